"""Complete runs of the self-supervised objectives."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from train.runs import (
    COLORS,
    NO_AUGMENTATION,
    filter_events,
    interrupt_at,
    read_metrics,
    weights_equal,
)
from vitcli.checkpoints.load import load
from vitcli.config import DataConfig, FewshotConfig
from vitcli.distributed import join_ranks
from vitcli.errors import DataError, RunError
from vitcli.evaluation.fewshot import measure
from vitcli.prediction import Predictor
from vitcli.train import setup
from vitcli.train.directory import RunDirectory, read_train_config
from vitcli.train.loop import train
from vitcli.train.objective_config import MaskingConfig


@pytest.fixture(scope="module")
def unlabeled_images(colors, tmp_path_factory) -> Path:
    """The images of `colors` in a single directory, without labels."""
    root = tmp_path_factory.mktemp("unlabeled")
    for file in colors.glob("*/*.png"):
        shutil.copy(file, root / f"{file.parent.name}-{file.name}")
    return root


@pytest.mark.parametrize(
    "fields",
    [{}, {"objective": "mae"}, {"freeze": "backbone", "augment": NO_AUGMENTATION}],
    ids=["images", "masked", "features"],
)
def test_unreadable_validation_split_is_an_error(tiny_run, make_splits, fields):
    damaged = [f"val/{name}/00.png" for name in COLORS]
    data = make_splits({"train": range(20), "val": [0]}, damaged)
    with pytest.raises(DataError, match="can be read"):
        train(tiny_run(data=DataConfig(str(data)), steps=2, **fields))


@pytest.mark.parametrize("objective", ["masked-patch", "mae"])
def test_self_supervised_run(tiny_run, unlabeled_images, objective, draw_figures):
    data = DataConfig(str(unlabeled_images), val_fraction=0.2)
    run = tiny_run(data=data, objective=objective, steps=30, eval_every=30, lr=1e-2)
    events = []
    outcome = train(run, on_event=events.append)
    directory = Path(run.output)
    assert {path.name for path in directory.iterdir()} == {
        "README.md", "config.json", "curves.png", "decoder.safetensors", "metrics.jsonl",
        "model.safetensors", "reconstruction.png", "split.json",
    }  # fmt: skip
    loss = outcome.metrics["val_loss"]
    (line,) = read_metrics(directory, "evaluation")
    assert line == {"event": "evaluation", "step": 30, "val_loss": loss}
    assert loss < (0.8 * 6.24 if objective == "masked-patch" else 1.0)
    assert {event.accuracy for event in filter_events(events, "train")} == {None}
    model = load(directory)
    assert model.config.num_classes == 0 and model.classes == ()
    assert model.info.provenance["metrics"] == outcome.metrics == {"val_loss": loss}
    card = (directory / "README.md").read_text()
    assert f"| loss, validation split | {loss:.4f} |" in card
    assert "reconstruction.png" in card and "vit predict" not in card
    picture = Image.open(directory / "reconstruction.png")
    assert picture.width > 2 * picture.height and len(picture.getcolors(1 << 20)) > 50


def test_no_figure_without_readable_images(tiny_run, make_splits, draw_figures, monkeypatch):
    monkeypatch.setattr("vitcli.train.report.NUM_IMAGES", 1)
    data = make_splits({"train": range(20), "val": [0]}, [f"val/{min(COLORS)}/00.png"])
    run = tiny_run(data=DataConfig(str(data)), objective="mae", steps=1)
    assert train(run).metrics["val_loss"] > 0
    assert not (Path(run.output) / "reconstruction.png").exists()


def test_sharding_does_not_change_results(tiny_run, tmp_path, monkeypatch):
    whole = tiny_run(objective="mae", ema=0.5, steps=4, eval_every=2, shard=True)
    sharded = dataclasses.replace(whole, output=str(tmp_path / "sharded"))
    train(whole)  # a process without a launcher has nothing to shard over
    launch = {"RANK": "0", "WORLD_SIZE": "1", "VIT_STORE_FILE": str(tmp_path / "store")}
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    train(sharded)
    assert read_metrics(whole.output, "evaluation") == read_metrics(sharded.output, "evaluation")
    assert weights_equal(whole.output, sharded.output)


def test_mae_run_is_finetuned_and_pretrained_further(tiny_run, tmp_path):
    first = tiny_run(objective="mae", output=str(tmp_path / "mae"), steps=2)
    train(first)
    more = {"model": first.output, "overrides": {}}
    tuned = tiny_run(task="finetune", output=str(tmp_path / "tuned"), steps=2, **more)
    assert train(tuned).metrics["val_top1"] >= 0
    assert load(tuned.output).config.num_classes == 3

    def prepared(**fields):
        events = []
        run = tiny_run(**more, **fields)
        with join_ranks(torch.device("cpu")) as ranks:
            found = setup.prepare(run, RunDirectory(run.output), ranks, events.append)
        return found, " ".join(getattr(event, "text", "") for event in events)

    again, messages = prepared(objective="mae")
    stored = load_file(tmp_path / "mae" / "decoder.safetensors")
    loaded = again.objective.aux_state()
    assert stored.keys() == loaded.keys() and "decoder: weights from" in messages
    assert all(torch.equal(stored[name], loaded[name]) for name in stored)
    other, messages = prepared(objective="mae", masking=MaskingConfig(decoder_width=64))
    assert "decoder: new weights" in messages
    (tmp_path / "mae" / "decoder.safetensors").write_bytes(b"no")
    with pytest.raises(RunError, match="cannot be read"):
        prepared(objective="mae")


def test_probes_match_fewshot(tiny_run, colors):
    """Probes of a resumed run, compared with the function behind `vit fewshot`."""
    run = tiny_run(objective="mae", probe_every=5, eval_every=12, steps=12)
    train(run, on_event=interrupt_at(7))
    events = []
    train(read_train_config(run.output), resume=True, on_event=events.append)
    lines = read_metrics(run.output, "probe")
    assert [line["step"] for line in lines] == [5, 10, 12]
    assert all(set(line) == {"event", "step", "probe_5shot", "probe_10shot"} for line in lines)
    assert [event.step for event in filter_events(events, "probe")] == [10, 12]
    config = FewshotConfig(
        run.data, shots=(5, 10), seeds=(0,), transform="checkpoint", l2=(2.0**10,)
    )
    found = measure(Predictor(run.output, "cpu", "fp32"), config)
    expected = {f"probe_{trial.shots}shot": trial.accuracy for trial in found.trials}
    assert {k: v for k, v in lines[-1].items() if "shot" in k} == expected
    assert lines[-1]["probe_10shot"] > 0.5


def test_probes_require_labels_and_validation_split(tiny_run, unlabeled_images, colors):
    for data in (DataConfig(str(unlabeled_images)), DataConfig(str(colors), val_fraction=0)):
        with pytest.raises(RunError, match="--probe-every"):
            train(tiny_run(data=data, objective="mae", probe_every=5))

"""Initial weights: kept heads, new classes, downloads and the default model."""

from pathlib import Path

import numpy as np
import pytest
import torch

from peers.random_models import save_random
from train.runs import SIZES, filter_events, read_metrics
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.load import load
from vitcli.config import ClassLabel, DataConfig, Preprocess, model_config
from vitcli.data.dataset import open_splits
from vitcli.errors import ConfigError, DataError, handle_warnings
from vitcli.hub import registry
from vitcli.hub.fetch import fetch
from vitcli.train import initial
from vitcli.train.config import TrainConfig
from vitcli.train.loop import train


@pytest.fixture
def parent(tmp_path) -> Path:
    """A random model with six classes, two of them named crane, a center crop, and a hidden layer
    before its head."""
    names = ("red", "crane", "blue", "crane", "gray", "green")
    classes = tuple(ClassLabel(f"n{i:08}", name) for i, name in enumerate(names))
    model = model_config("Ti/8", num_classes=6, pre_logits=20, **SIZES)
    preprocess = Preprocess((16, 16), crop_pct=0.8)
    return save_random(tmp_path / "six", model, preprocess=preprocess, classes=classes)


def config(data: Path, model: Path, **fields) -> TrainConfig:
    return TrainConfig(
        data=DataConfig(str(data)), output="run", model=str(model), keep_head=True, **fields
    )


def test_kept_head_starts_with_accuracy_of_old_model(tiny_run, parent, tmp_path):
    run = tiny_run(
        task="finetune", model=str(parent), keep_head=True, resolution=None, steps=1, lr=1e-9,
        optimizer="sgd", eval_every=1,
    )  # fmt: skip
    events = []
    train(run, on_event=events.append)
    first, *_ = filter_events(events, "evaluation")
    assert first.step == 0 and first.to_json() == read_metrics(run.output)[0]
    # The old model, without the logits of other classes.
    old, val = load(parent), open_splits(run.data).val
    rows = [[label.name for label in old.classes].index(name) for name in ("blue", "green", "red")]
    with torch.no_grad():
        logits = old(torch.stack([old.transform(val.read(i)) for i in range(len(val))]))[:, rows]
    right = logits.argmax(dim=1).numpy() == val.labels
    assert first.metrics["val_top1"] == right.mean()
    loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(val.labels)).item()
    assert first.metrics["val_loss"] == pytest.approx(loss, rel=1e-5)
    new = load(run.output)
    assert torch.allclose(new.head.weight, old.head.weight[rows], atol=1e-6)
    assert new.preprocess == old.preprocess and new.config.pre_logits == 20


def test_kept_rows_match_by_id_then_unique_name(parent, tmp_path):
    start = initial.read_weights(config(tmp_path, parent), offline=True).info
    classes = (
        ClassLabel("n00000003", "anything"),
        ClassLabel("zebra", "zebra"),
        ClassLabel("Gray", "Gray"),
    )
    assert initial.kept_rows(start, classes, config(tmp_path, parent)).tolist() == [3, -1, 4]
    crane = (ClassLabel("crane", "crane"), *classes)
    with pytest.raises(DataError, match="more than one class of the model matches 'crane'"):
        initial.kept_rows(start, crane, config(tmp_path, parent))
    with pytest.raises(ConfigError, match="none of the classes 'zebra'"):
        initial.kept_rows(start, classes[1:2], config(tmp_path, parent))


def test_new_classes_start_at_zero_or_head_bias(parent, tmp_path):
    run = config(tmp_path, parent, head_bias=-4.0)
    start = initial.read_weights(run, offline=True)
    info = CheckpointInfo(start.info.model.with_classes(3), start.info.preprocess)
    model = initial.build_model(start, info, np.array([5, -1, 0]), run)
    old = start.tensors
    assert torch.equal(model.head.weight[[0, 2]], old["head.weight"][[5, 0]])
    assert torch.equal(model.head.bias[[0, 2]], old["head.bias"][[5, 0]])
    assert not model.head.weight[1].any() and model.head.bias[1] == -4.0


def test_training_does_not_modify_checkpoint_file(tiny_run, parent):
    """Its tensors are memory-mapped from the file."""
    before = (parent / "model.safetensors").read_bytes()
    train(tiny_run(task="finetune", model=str(parent), resolution=None, steps=2, optimizer="sgd"))
    assert (parent / "model.safetensors").read_bytes() == before


def test_weights_download_is_reported(tiny_run, parent, hub):
    hub.add("me/six", {file.name: file.read_bytes() for file in parent.iterdir()})
    events = []
    train(tiny_run(task="finetune", model="me/six", steps=1), on_event=events.append)
    loads = [event.transfer for event in filter_events(events, "download")]
    assert loads and loads[-1].done == loads[-1].total
    assert loads[-1].name == "model.safetensors"


def test_finetuning_prefers_released_model_to_bundled(hub):
    entry, ours = registry.entries()[initial.BEST_MODEL], registry.aliases()["default-pretrained"]

    def chosen(offline: bool = False) -> tuple[str, str]:
        warnings: list[str] = []
        with handle_warnings(warnings.append):
            return initial.choose_model(offline), "".join(warnings)

    name, why = chosen()
    assert name == ours and "cannot reach the Hub" in why
    hub.add(entry.repo, {"config.json": b"{}", "model.safetensors": b"weights"})
    assert chosen() == ("vit-b16-i21k", "")
    name, why = chosen(offline=True)
    assert name == ours and "--offline is set" in why
    fetch(entry.repo)
    assert chosen(offline=True) == ("vit-b16-i21k", "")

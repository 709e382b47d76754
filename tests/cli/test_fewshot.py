"""`vit fewshot`: a table, JSON, an image, a checkpoint; features are computed once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file
from typer.testing import CliRunner

from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.read import read_info
from vitcli.checkpoints.save import save_checkpoint
from vitcli.cli.main import app
from vitcli.config import BiTConfig, Preprocess
from vitcli.models.resnet import BiT
from vitcli.prediction import Predictor
from vitcli.resnets import bit_resnet

CPU = ("--device", "cpu", "--precision", "fp32", "--quiet")


def write(folder: Path, level: int, count: int, seed: int, noise: float = 15) -> None:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    for i in range(count):
        pixels = np.clip(rng.normal(level, noise, (70, 64, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")


@pytest.fixture(scope="module")
def colours(tmp_path_factory) -> Path:
    """Two classes of ten images that any features tell apart."""
    root = tmp_path_factory.mktemp("fewshot")
    for seed, (name, level) in enumerate((("dark", 40), ("light", 210))):
        write(root / name, level, 10, seed)
    return root


@pytest.fixture(scope="module")
def greys(tmp_path_factory) -> Path:
    """Three classes that are hard to tell apart, with a test part."""
    root = tmp_path_factory.mktemp("greys")
    for seed, (name, level) in enumerate((("one", 120), ("two", 126), ("three", 132))):
        write(root / "train" / name, level, 6, seed, noise=60)
        write(root / "test" / name, level, 12, 10 + seed, noise=60)
    return root


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VIT_CACHE", str(tmp_path / "cache"))


def vit(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words])


def rows(result) -> list[dict]:
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_accuracy_by_shots(colours, tiny_checkpoint, tmp_path):
    words = ("fewshot", "--data", colours, "--model", tiny_checkpoint, "--shots", "1,5", *CPU)
    one, five = rows(vit(*words, "--json", "--plot", tmp_path / "shots.png"))
    assert (one["shots"], five["shots"]) == (1, 5) and one["seeds"] == [0, 1, 2]
    assert five["mean"] == 1.0 and five["test"] == 4 and five["l2"] == [1024.0] * 3
    assert Image.open(tmp_path / "shots.png").width > 300
    table = vit(*words).stdout.splitlines()
    assert table[0].split() == ["shots", "seed", "0", "seed", "1", "seed", "2", "mean", "std"]
    assert table[2].split()[-2:] == ["100.00%", "0.00%"]


def test_a_second_run_computes_no_features(colours, tiny_checkpoint, monkeypatch):
    words = ("fewshot", "--data", colours, "--model", tiny_checkpoint, "--shots", "1", "--json")
    first = vit(*words, *CPU)
    assert first.exit_code == 0, first.stderr
    monkeypatch.setattr(Predictor, "embed", lambda *args: pytest.fail("computed again"))
    assert vit(*words, *CPU).stdout == first.stdout


def test_of_the_training_part_what_is_drawn_is_looked_at(greys, tiny_checkpoint, monkeypatch):
    asked: list[str] = []
    embed = Predictor.embed

    def counted(self, images, batch_size=None):
        listed = list(images)
        asked.extend(image.name for image in listed)
        return embed(self, listed, batch_size)

    monkeypatch.setattr(Predictor, "embed", counted)
    words = ("fewshot", "--data", greys, "--model", tiny_checkpoint, *CPU)
    rows(vit(*words, "--shots", "2", "--seeds", "3", "--json"))
    assert sum("train" in name for name in asked) == 6 and len(asked) == 6 + 36


def test_several_l2_and_the_one_of_leave_one_out(greys, tiny_checkpoint, tmp_path):
    words = ("fewshot", "--data", greys, "--model", tiny_checkpoint, "--shots", "3,6", *CPU)
    found = rows(vit(*words, "--l2", "1,1e4", "--json", "--plot", tmp_path / "l2.svg"))
    asked = [(3, 1.0), (3, 1e4), (6, 1.0), (6, 1e4)]
    assert [(row["shots"], row["l2"][0]) for row in found] == asked
    assert "l2 10000" in (tmp_path / "l2.svg").read_text()
    alone = rows(vit(*words, "--l2", "1e4", "--json"))
    assert [row["accuracies"] for row in alone] == [row["accuracies"] for row in found[1::2]]
    table = vit(*words, "--l2", "1,1e4").stdout.splitlines()
    assert table[0].split()[:2] == ["shots", "l2"] and table[2].split()[:2] == ["3", "10000"]
    (auto,) = rows(vit(*words[:-5], "--shots", "6", *CPU, "--l2", "auto", "--json"))
    assert all(np.log2(l2) in range(-10, 20) for l2 in auto["l2"])
    said = vit(*words[:-5], "--shots", "6", *CPU[:-1], "--l2", "auto")
    assert said.stdout.splitlines()[0].endswith("std  l2 by seed")
    assert said.stdout.splitlines()[1].endswith(", ".join(f"{l2:g}" for l2 in auto["l2"]))
    assert said.stderr == "tested on the test part, 36 images\n"


@pytest.mark.parametrize(
    "choice", [(), ("--pool", "gap"), ("--layer", "1", "--preprocess", "checkpoint")], ids=str
)
def test_what_is_saved_decides_as_it_was_measured(choice, greys, tiny_checkpoint, tmp_path):
    saved = tmp_path / "greys"
    words = ("fewshot", "--data", greys, "--model", tiny_checkpoint, "--shots", "2,5", *choice)
    *_, five = rows(vit(*words, "--l2", "auto", "--save", saved, "--json", *CPU))
    info, _ = read_info(saved)
    assert [label.name for label in info.classes] == ["one", "three", "two"]
    assert info.provenance["metrics"] == {"test_top1": five["accuracies"][0]}
    assert info.provenance["parent"] == tiny_checkpoint.name
    assert info.model.depth == (1 if "--layer" in choice else 2)
    assert info.preprocess.antialias == ("checkpoint" in choice)
    (measured,) = rows(vit("evaluate", "--data", greys, "--model", saved, "--json", *CPU))
    assert measured["top1"] == five["accuracies"][0] and measured["images"] == 36
    card = (saved / "README.md").read_text()
    assert "5 shots, least squares" in card and "test part" in card


def test_a_head_on_a_resnet(colours, tmp_path):
    model = BiT(BiTConfig(bit_resnet((1, 1, 1, 1), 0.5), (64, 64)))
    model.init_weights(0)
    info = CheckpointInfo(model.config, Preprocess((64, 64)))
    bit = save_checkpoint(tmp_path / "bit", model.state_dict(), info)
    words = ("fewshot", "--data", colours, "--model", bit, "--shots", "5", *CPU)
    (row,) = rows(vit(*words, "--save", tmp_path / "few", "--json"))
    (found,) = rows(vit("evaluate", "--data", colours, "--model", tmp_path / "few", "--json", *CPU))
    assert found["top1"] == row["accuracies"][0] == 1.0


def test_what_is_saved_can_be_pushed(greys, tiny_checkpoint, tmp_path, hub):
    words = ("fewshot", "--data", greys, "--model", tiny_checkpoint, "--shots", "3", *CPU)
    rows(vit(*words, "--save", tmp_path / "greys", "--json"))
    result = vit("push", tmp_path / "greys", "me/greys", "--license", "mit")
    assert result.exit_code == 0, result.stderr
    files = hub.files("me/greys")
    assert {"model.safetensors", "config.json", "README.md"} <= set(files)
    image = greys / "test" / "one" / "0.png"
    mine, theirs = (
        rows(vit("predict", image, "--model", model, "--json", *CPU))[0]["predictions"]
        for model in (tmp_path / "greys", "me/greys")
    )
    assert mine == theirs


def test_a_head_in_one_file(colours, tiny_checkpoint, tmp_path):
    file = tmp_path / "new" / "head.safetensors"
    words = ("fewshot", "--data", colours, "--model", tiny_checkpoint, "--shots", "4")
    result = vit(*words, "--save", file, *CPU[:-1])
    assert result.exit_code == 0, result.stderr
    assert f"next: vit predict IMAGE --model {file}" in result.stderr
    assert "4 shots, seed 0, l2 1024: 100.00%" in result.stderr
    assert [path.name for path in file.parent.iterdir()] == ["head.safetensors"]
    (answer,) = rows(vit("predict", colours / "light" / "0.png", "--model", file, "--json", *CPU))
    best, second = answer["predictions"]
    assert best["label"] == "light" and best["score"] > 0.75 > 0.25 > second["score"]
    tensors, before = load_file(file), load_file(tiny_checkpoint / "model.safetensors")
    kept = set(tensors) - {"head.weight", "head.bias"}
    assert all(np.array_equal(tensors[name], before[name]) for name in kept)
    again = vit(*words, "--save", file, *CPU)
    assert again.exit_code == 1 and "head.safetensors: exists already" in again.stderr
    assert vit(*words, "--save", file, "--force", *CPU).exit_code == 0


# ---------------------------------------------------------------------------------------------
# What goes wrong


def failure(*words: object) -> str:
    """The error's lines of a command that fails."""
    result = vit(*words)
    assert result.exit_code == 1, result.stdout
    assert not result.stdout and len(result.stderr.splitlines()) <= 2
    return result.stderr


def test_fewer_images_than_shots(colours, tiny_checkpoint):
    told = failure("fewshot", "--data", colours, "--model", tiny_checkpoint, "--shots", "5,9", *CPU)
    assert "'dark' has 8 training images, too few for 9 shots (2 such classes)" in told
    assert "take --shots up to 8" in told


def test_a_class_of_the_test_part_alone(greys, tiny_checkpoint, tmp_path):
    root = shutil.copytree(greys, tmp_path / "data")
    shutil.rmtree(root / "train" / "two")
    told = failure("fewshot", "--data", root, "--model", tiny_checkpoint, "--shots", "1", *CPU)
    assert "'two' has no images in the training part" in told


def test_classes_are_named_by_a_file(colours, tiny_checkpoint, tmp_path):
    table = [f"{p},{k}" for k, p in enumerate(colours.iterdir()) for p in sorted(p.iterdir())]
    (tmp_path / "data.csv").write_text("\n".join(["path,label", *table]))
    words = ("fewshot", "--data", tmp_path / "data.csv", "--model", tiny_checkpoint, *CPU)
    words += ("--shots", "1", "--seeds", "0", "--classes", tmp_path / "names.txt")
    (tmp_path / "names.txt").write_text("dark\ndark\n")
    assert "names.txt: 'dark' stands for more than one class" in failure(*words)
    (tmp_path / "names.txt").write_text("a\nb\n")
    assert vit(*words, "--save", tmp_path / "few").exit_code == 0
    assert [label.name for label in read_info(tmp_path / "few")[0].classes] == ["a", "b"]


def test_one_class(colours, tiny_checkpoint, tmp_path):
    shutil.copytree(colours / "dark", tmp_path / "data" / "dark")
    told = failure("fewshot", "--data", tmp_path / "data", "--model", tiny_checkpoint, *CPU)
    assert "all images are of one class, 'dark'" in told


def test_l2_0_on_a_singular_system(colours, tiny_checkpoint, tmp_path):
    for name in ("dark", "light"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for i in range(6):  # one image, six times
            shutil.copy(colours / name / "0.png", tmp_path / "data" / name / f"{i}.png")
    words = ("fewshot", "--data", tmp_path / "data", "--model", tiny_checkpoint, "--shots", "3")
    told = failure(*words, "--l2", "0", *CPU)
    assert "with l2 0 the system is singular" in told and "take an l2 above 0, or auto" in told
    assert vit(*words, "--l2", "1e-3", *CPU).exit_code == 0


def test_features_that_are_no_numbers(colours, tiny_checkpoint, tmp_path):
    weights = load_file(tiny_checkpoint / "model.safetensors")
    weights["norm.weight"] = np.full_like(weights["norm.weight"], np.nan)
    bad = save_checkpoint(tmp_path / "bad", weights, read_info(tiny_checkpoint)[0])
    told = failure("fewshot", "--data", colours, "--model", bad, "--shots", "1", *CPU)
    assert "bad: its features of " in told and "are not finite numbers" in told


def test_a_representation_that_there_is_not(colours, tiny_checkpoint):
    words = ("fewshot", "--data", colours, "--model", tiny_checkpoint, "--shots", "1", *CPU)
    assert "there is no layer 7: the model has 2 blocks" in failure(*words, "--layer", "7")
    assert "no attention pooling (map); its head reads token" in failure(*words, "--pool", "map")


def test_a_head_that_no_checkpoint_holds(colours, tmp_path):
    distilled = Path(__file__).parents[1] / "golden" / "timm_deit_distilled"
    words = ("fewshot", "--data", colours, "--model", distilled, "--shots", "2", *CPU)
    told = failure(*words, "--pool", "gap", "--save", tmp_path / "no")
    assert "the heads of a distilled model read its class and distillation tokens" in told
    assert not (tmp_path / "no").exists()
    assert vit(*words, "--pool", "gap").exit_code == 0
    (row,) = rows(vit(*words, "--save", tmp_path / "yes", "--json"))
    (found,) = rows(vit("evaluate", "--data", colours, "--model", tmp_path / "yes", "--json", *CPU))
    # The split goes along: what is measured again are the images that were held out.
    assert (found["images"], found["top1"]) == (row["test"], row["accuracies"][0])


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--shots", "a,b", "'a,b' is not a list"),
        ("--l2", "many", "neither a number"),
        ("--pool", "cls", "cls"),
        ("--layer", "0", "greater than or equal to 1"),
        ("--plot", "x.txt", "x.txt"),
    ],
)
def test_wrong_calls(option, value, told, colours, tiny_checkpoint):
    result = vit("fewshot", "--data", colours, "--model", tiny_checkpoint, option, value)
    assert result.exit_code == 2 and told in result.stderr and option in result.stderr


def test_one_l2_is_saved(colours, tiny_checkpoint, tmp_path):
    words = ("fewshot", "--data", colours, "--model", tiny_checkpoint, "--l2", "1,2")
    result = vit(*words, "--save", tmp_path / "x")
    assert result.exit_code == 2 and "one --l2" in result.stderr

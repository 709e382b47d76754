"""`vit fewshot`: table, JSON, plot and checkpoint; features are computed once."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file
from typer.testing import Result

from checkpoints.golden_cases import GOLDEN
from cli.conftest import write_images
from cli.training_runs import FP32, vit
from vitcli.checkpoints.read import read_info
from vitcli.prediction import Predictor

OPTIONS = (*FP32, "--quiet")


@pytest.fixture(scope="module")
def easy_data(tmp_path_factory):
    """Two classes of ten images each, told apart by any features."""
    root = tmp_path_factory.mktemp("easy")
    for seed, (name, level) in enumerate((("dark", 40), ("light", 210))):
        write_images(root / name, 10, level, seed)
    return root


@pytest.fixture(scope="module")
def hard_data(tmp_path_factory):
    """Three classes that are hard to tell apart, with a test split."""
    root = tmp_path_factory.mktemp("hard")
    for seed, (name, level) in enumerate((("one", 120), ("two", 126), ("three", 132))):
        write_images(root / "train" / name, 6, level, seed, noise=60)
        write_images(root / "test" / name, 12, level, 10 + seed, noise=60)
    return root


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VIT_CACHE", str(tmp_path / "cache"))


def fewshot(data: Path, model: Path, *args: object) -> Result:
    return vit("fewshot", "--data", data, "--model", model, *args, *OPTIONS)


def json_rows(result: Result, exit_code: int = 0) -> list[dict]:
    assert result.exit_code == exit_code, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def evaluate(data: Path, model: Path) -> dict:
    return json_rows(vit("evaluate", "--data", data, "--model", model, "--json", *OPTIONS))[0]


@pytest.fixture
def embedded_images(monkeypatch):
    """Names of the images that were run through the model."""
    names: list[str] = []
    embed = Predictor.embed

    def record(self, images, *options):
        images = list(images)
        names.extend(image.name for image in images)
        return embed(self, images, *options)

    monkeypatch.setattr(Predictor, "embed", record)
    return names


def test_accuracy_by_shots(easy_data, tiny_checkpoint, tmp_path, embedded_images):
    plot = tmp_path / "shots.png"
    args = ("--shots", "1,5")
    one, five = json_rows(fewshot(easy_data, tiny_checkpoint, *args, "--json", "--plot", plot))
    assert (one["shots"], five["shots"]) == (1, 5) and one["seeds"] == [0, 1, 2]
    assert five["mean"] == 1.0 and five["test"] == 4 and five["l2"] == [1024.0] * 3
    assert Image.open(plot).width > 300
    count = len(embedded_images)
    table = fewshot(easy_data, tiny_checkpoint, *args).stdout.splitlines()
    assert table[0].split() == ["shots", "seed", "0", "seed", "1", "seed", "2", "mean", "std"]
    assert table[2].split()[-2:] == ["100.00%", "0.00%"]
    assert len(embedded_images) == count  # the second run computes nothing


def test_reads_only_sampled_training_images(hard_data, tiny_checkpoint, embedded_images):
    json_rows(fewshot(hard_data, tiny_checkpoint, "--shots", "2", "--seeds", "3", "--json"))
    assert sum("train" in name for name in embedded_images) == 6 and len(embedded_images) == 6 + 36


def test_multiple_l2_and_leave_one_out(hard_data, tiny_checkpoint, tmp_path):
    args = ("--shots", "3,6")
    plot = tmp_path / "l2.svg"
    result = fewshot(hard_data, tiny_checkpoint, *args, "--l2", "1,1e4", "--json", "--plot", plot)
    rows = json_rows(result)
    expected = [(3, 1.0), (3, 1e4), (6, 1.0), (6, 1e4)]
    assert [(row["shots"], row["l2"][0]) for row in rows] == expected
    assert "l2 10000" in plot.read_text()
    single = json_rows(fewshot(hard_data, tiny_checkpoint, *args, "--l2", "1e4", "--json"))
    assert [row["accuracies"] for row in single] == [row["accuracies"] for row in rows[1::2]]
    table = fewshot(hard_data, tiny_checkpoint, *args, "--l2", "1,1e4").stdout.splitlines()
    assert table[0].split()[-1] == "l2" and table[2].split()[-1] == "10000"
    auto = ("--shots", "6", "--l2", "auto")
    (row,) = json_rows(fewshot(hard_data, tiny_checkpoint, *auto, "--json"))
    assert all(np.log2(l2) in range(-10, 20) for l2 in row["l2"])
    table = fewshot(hard_data, tiny_checkpoint, *auto).stdout.splitlines()
    assert table[1].endswith(", ".join(f"{l2:g}" for l2 in row["l2"]))


@pytest.mark.parametrize(
    "choice",
    ["", "--pool gap --transform checkpoint", "--layer 0 --preprocess checkpoint --resolution 48"],
)
def test_saved_model_reproduces_accuracy(choice, hard_data, tiny_checkpoint, tmp_path):
    saved = tmp_path / "few"
    args = ("--shots", "2,5", *choice.split(), "--l2", "auto", "--save", saved, "--json")
    *_, five = json_rows(fewshot(hard_data, tiny_checkpoint, *args))
    info, _ = read_info(saved)
    assert [label.name for label in info.classes] == ["one", "three", "two"]
    assert info.provenance["metrics"] == {"test_top1": five["accuracies"][0]}
    assert info.provenance["parent"] == tiny_checkpoint.name
    assert info.model.depth == (1 if "--layer" in choice else 2)
    assert info.preprocess.antialias == bool(choice)
    pixels = 48 if "--resolution" in choice else 64
    assert info.model.image_size == info.preprocess.size == (pixels, pixels)
    evaluation = evaluate(hard_data, saved)
    assert (evaluation["top1"], evaluation["images"]) == (five["accuracies"][0], 36)
    assert "5 shots, least squares" in (saved / "README.md").read_text()


def test_saved_model_keeps_evaluation_image_size(hard_data, tmp_path):
    """A transformers DINOv2 whose preprocessing uses smaller images than its training."""
    dino, saved = tmp_path / "dino", tmp_path / "few"
    shutil.copytree(GOLDEN / "hf_dinov2", dino)
    preprocess = {"size": {"shortest_edge": 36}, "crop_size": 28, "do_center_crop": True}
    (dino / "preprocessor_config.json").write_text(json.dumps(preprocess))
    args = ("--shots", "5", "--save", saved, "--json")
    (row,) = json_rows(fewshot(hard_data, dino, *args, "--preprocess", "checkpoint"))
    info, _ = read_info(saved)
    assert info.model.image_size == info.preprocess.size == (28, 28)
    assert info.provenance["posemb_resize"]["from"] == [4, 4]
    assert evaluate(hard_data, saved)["top1"] == row["accuracies"][0]
    before, after = (Predictor(path, "cpu", "fp32").embed(hard_data) for path in (dino, saved))
    for expected, embedding in zip(before, after, strict=True):
        np.testing.assert_allclose(embedding.features, expected.features, atol=1e-5)


def test_head_on_resnet(easy_data, resnet, tmp_path):
    args = ("--shots", "5", "--save", tmp_path / "few", "--json")
    (row,) = json_rows(fewshot(easy_data, resnet, *args))
    assert evaluate(easy_data, tmp_path / "few")["top1"] == row["accuracies"][0] == 1.0


def test_head_on_distilled_model(easy_data, tmp_path):
    distilled = GOLDEN / "timm_deit_distilled"
    args = ("--shots", "2", "--json", "--save", tmp_path / "few")
    result = fewshot(easy_data, distilled, *args, "--pool", "gap")  # its heads read two tokens
    assert "leave out --save" in result.stderr and not (tmp_path / "few").exists()
    (row,) = json_rows(fewshot(easy_data, distilled, *args))
    # With the saved split, the same held-out images are evaluated again.
    evaluation = evaluate(easy_data, tmp_path / "few")
    assert (evaluation["images"], evaluation["top1"]) == (row["test"], row["accuracies"][0])


def test_save_to_single_file(easy_data, tiny_checkpoint, tmp_path):
    file = tmp_path / "new" / "head.safetensors"
    args = ("--shots", "4", "--save", file)
    result = fewshot(easy_data, tiny_checkpoint, *args)
    assert result.exit_code == 0, result.stderr
    assert [path.name for path in file.parent.iterdir()] == ["head.safetensors"]
    image = easy_data / "light" / "0.png"
    (row,) = json_rows(vit("predict", image, "--model", file, "--json", *OPTIONS))
    best, second = row["predictions"]
    assert best["label"] == "light" and best["score"] > 0.75 > 0.25 > second["score"]
    tensors, before = load_file(file), load_file(tiny_checkpoint / "model.safetensors")
    backbone = set(tensors) - {"head.weight", "head.bias"}
    assert all(np.array_equal(tensors[name], before[name]) for name in backbone)
    assert fewshot(easy_data, tiny_checkpoint, *args).exit_code == 1  # already exists
    assert fewshot(easy_data, tiny_checkpoint, *args, "--force").exit_code == 0


def test_unwritable_save_path_fails_early(easy_data, tiny_checkpoint, tmp_path):
    (tmp_path / "file").write_text("in the way")
    for save in ("file", "file/new", "file/new.safetensors"):
        result = fewshot(easy_data, tiny_checkpoint, "--save", tmp_path / save)
        assert (result.exit_code, result.stdout) == (1, "")


def test_unreadable_images_are_skipped_and_counted(hard_data, tiny_checkpoint, tmp_path):
    data = shutil.copytree(hard_data, tmp_path / "data")
    (data / "test" / "one" / "0.png").write_bytes(b"no image")
    for name in ("0.png", "3.png"):
        (data / "train" / "two" / name).write_bytes(b"no image")
    result = fewshot(data, tiny_checkpoint, "--shots", "4", "--json")
    (row,) = json_rows(result, exit_code=1)
    assert (row["test"], row["unreadable"]) == (35, 3)
    assert result.stderr.count("error: ") == 3 and "two/3.png" in result.stderr
    result = fewshot(data, tiny_checkpoint, "--shots", "4", "--strict")
    assert result.exit_code == 1 and not result.stdout
    result = fewshot(data, tiny_checkpoint, "--shots", "5")  # too few images of class two are left
    assert result.exit_code == 1 and "use --shots 4" in result.stderr


def test_nonfinite_features_are_not_cached(easy_data, nan_checkpoint):
    for _ in range(2):
        result = fewshot(easy_data, nan_checkpoint, "--shots", "1")
        assert result.exit_code == 1 and "not finite" in result.stderr

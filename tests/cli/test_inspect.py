"""`vit inspect`: figures, JSON and arrays for every view."""

import dataclasses
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vitcli
from peers.random_models import CLASSES, save_random
from vitcli.config import ModelConfig, Preprocess
from vitcli.inspection.inspector import visible_crop

CPU = ("--device", "cpu", "--quiet")


CONFIG = ModelConfig(16, 2, 2, 32, (8, 8), (24, 32), num_classes=6)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_random(tmp_path_factory.mktemp("inspect") / "model", CONFIG)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for name, size in (("wide", (40, 90)), ("tall", (60, 30)), ("tiny", (1, 1))):
        Image.fromarray(rng.integers(0, 255, (*size, 3), np.uint8)).save(root / f"{name}.png")
    return root


def drawn(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        image.load()
        assert image.convert("L").getextrema()[0] < image.convert("L").getextrema()[1]
        return image.size


@pytest.mark.parametrize("view", ["attention", "heads", "pca"])
def test_image_views(vit, model, photos, tmp_path, view):
    out, arrays = tmp_path / "out", tmp_path / "arrays.npz"
    done = vit(
        *("inspect", photos, "--model", model, "-o", out, "--view", view),
        *("--arrays", arrays, "--json", *CPU),
    )
    assert done.exit_code == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [Path(row["file"]).stem for row in rows] == ["tall", "tiny", "wide"]
    for row in rows:
        assert row["view"] == view and row["class"]["id"] in {label.id for label in CLASSES}
        (path,) = map(Path, row["outputs"])
        assert drawn(path)[0] > 300
    assert (out / f"{view}.png").exists() == (view != "heads")  # the contact sheet
    saved = np.load(arrays)
    shapes = {"attention": (3, 3, 4), "heads": (3, 2, 3, 4), "pca": (3, 3, 4, 3)}
    assert saved[view].shape == shapes[view] and len(saved["files"]) == 3
    api = vitcli.inspect(model, str(photos), view, device="cpu")
    assert np.allclose(api.array, saved[view])


def test_gradient_with_faithfulness(vit, model, photos, tmp_path):
    done = vit(
        *("inspect", photos / "wide.png", "--model", model, "-o", tmp_path, "--json", *CPU),
        *("--method", "gradient", "--class", "tabby", "--faithfulness", "--dark"),
    )
    assert done.exit_code == 0, done.stderr
    (row,) = (json.loads(line) for line in done.stdout.splitlines())
    assert row["class"]["index"] == 2 and 0 < row["class"]["score"] < 1
    for areas in row["faithfulness"].values():
        assert 0 <= areas["deletion"] <= 1 and 0 <= areas["insertion"] <= 1
    assert [Path(path).name for path in row["outputs"]] == [
        "wide-attention.png",
        "wide-faithfulness.png",
    ]
    for path in row["outputs"]:
        with Image.open(path) as image:
            assert max(image.convert("RGB").getpixel((2, 2))) < 40  # dark


def test_model_without_position_embeddings(vit, tmp_path):
    model = save_random(tmp_path / "model", dataclasses.replace(CONFIG, posemb="none"))
    words = ("inspect", "--model", model, "-o", tmp_path, "--json", *CPU)
    done = vit(*words)
    assert done.exit_code == 0 and json.loads(done.stdout)["view"] == "filters"
    done = vit(*words, "--view", "posemb")
    assert done.exit_code == 1 and "no position embeddings" in done.stderr


def test_distance(vit, model, photos, tmp_path):
    done = vit(
        *("inspect", photos, "--model", model, "-o", tmp_path, "--view", "distance"),
        *("--json", *CPU),
    )
    (row,) = (json.loads(line) for line in done.stdout.splitlines())
    assert row["images"] == 3 and np.array(row["distances"]).shape == (2, 2)
    table = (tmp_path / "distance.csv").read_text().splitlines()
    assert table[0] == "layer,head,pixels" and len(table) == 5
    assert float(table[4].split(",")[2]) == pytest.approx(row["distances"][1][1])
    assert drawn(tmp_path / "distance.png")


def test_unreadable_images_are_reported_and_skipped(vit, model, photos, tmp_path):
    (tmp_path / "bad.jpg").write_text("no image")
    out = tmp_path / "out"
    words = ("inspect", tmp_path / "bad.jpg", photos / "wide.png", "--model", model, "-o", out)
    for view, figure in (("attention", "wide-attention.png"), ("distance", "distance.png")):
        done = vit(*words, "--view", view, *CPU)
        assert done.exit_code == 1 and "bad.jpg" in done.stderr
        assert (out / figure).exists()


def test_same_named_images_get_separate_figures(vit, model, photos, tmp_path):
    wide = photos / "wide.png"
    done = vit("inspect", wide, wide, "--model", model, "-o", tmp_path, *CPU)
    assert done.exit_code == 0
    assert (tmp_path / "wide-attention.png").exists() and (
        tmp_path / "wide-2-attention.png"
    ).exists()


def test_figures_do_not_overwrite_images(vit, model, photos, tmp_path):
    image = Path(shutil.copy(photos / "wide.png", tmp_path / "attention.png"))
    before = image.read_bytes()
    for images in ([photos / "wide.png", image], [tmp_path, photos / "wide.png"]):
        done = vit("inspect", *images, "--model", model, "-o", tmp_path, *CPU)
        assert done.exit_code == 1 and "is one of the images" in done.stderr
    image = image.rename(tmp_path / "distance.png")
    done = vit("inspect", image, "--view", "distance", "--model", model, "-o", tmp_path, *CPU)
    assert done.exit_code == 1 and image.read_bytes() == before


def test_longest_file_name(vit, model, photos, tmp_path):
    image = shutil.copy(photos / "tiny.png", tmp_path / f"{'x' * 245}.png")
    assert vit("inspect", image, "--model", model, "-o", tmp_path, *CPU).exit_code == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the file system refuses such names")
def test_file_name_that_is_not_valid_unicode(vit, model, photos, tmp_path):
    image = tmp_path / os.fsdecode(b"\xff\n.png")
    shutil.copy(photos / "tiny.png", image)
    done = vit("inspect", image, "--model", model, "-o", tmp_path, "--json", *CPU)
    assert done.exit_code == 0 and len(list(tmp_path.glob("*-attention.png"))) == 1


def test_invalid_requests_fail_early(vit, model, resnet, photos, tmp_path):
    out, arrays = tmp_path / "out", tmp_path / "no" / "x.npz"
    for words, said in (
        (("--model", resnet), "ResNet"),
        (("--model", model, "--class", "crane", "--method", "gradient"), "crane"),
        (("--model", model, "--arrays", arrays), str(arrays)),
    ):
        done = vit("inspect", photos, *words, "-o", out, *CPU)
        assert done.exit_code == 1 and said in done.stderr and not done.stdout
        assert not list(out.glob("*"))


@pytest.mark.parametrize(
    ("size", "preprocess", "wanted"),
    [
        ((90, 40), Preprocess(size=(32, 32), crop_mode="squash"), (90, 40)),
        ((90, 40), Preprocess(size=(32, 32)), (40, 40)),
        ((80, 80), Preprocess(size=(32, 32), crop_pct=0.5), (40, 40)),
        ((90, 40), Preprocess(size=(32, 32), crop_mode="border"), (90, 90)),
    ],
)
def test_shown_part_matches_model_input(size, preprocess, wanted):
    part = visible_crop(Image.new("RGB", size, "black"), preprocess)
    assert part.shape[:2] == pytest.approx(wanted[::-1], abs=2)
    white = (part == 255).all(axis=2).mean()
    assert white == pytest.approx(1 - 40 / 90 if preprocess.crop_mode == "border" else 0, abs=0.05)

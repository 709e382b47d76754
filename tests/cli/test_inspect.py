"""`vit inspect`: figures, JSON and arrays for every view."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vitcli
from cli.training_runs import vit
from peers.random_models import CLASSES, save_random
from vitcli.config import ModelConfig, Preprocess
from vitcli.inspection.inspector import visible_crop

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


@pytest.fixture
def inspect(model, tmp_path):
    """`vit inspect` with the small model and the test's temporary directory for output."""
    options = ("-o", tmp_path, "--device", "cpu", "--quiet")
    return lambda *args, model=model: vit("inspect", *args, "--model", model, *options)


def figure_size(path: Path) -> tuple[int, int]:
    """The size of a figure, which must not be blank."""
    with Image.open(path) as image:
        image.load()
        assert image.convert("L").getextrema()[0] < image.convert("L").getextrema()[1]
        return image.size


@pytest.mark.parametrize("view", ["attention", "heads", "pca"])
def test_image_views(inspect, model, photos, tmp_path, view):
    arrays, images = tmp_path / "arrays.npz", [str(photos / "tall.png"), str(photos / "wide.png")]
    result = inspect(*images, "--view", view, "--arrays", arrays, "--json")
    assert result.exit_code == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["file"] for row in rows] == images
    for row in rows:
        assert row["view"] == view and row["class"]["id"] in {label.id for label in CLASSES}
        (path,) = map(Path, row["outputs"])
        assert figure_size(path)[0] > 300
    assert (tmp_path / f"{view}.png").exists() == (view != "heads")  # the contact sheet
    saved_arrays = np.load(arrays)
    shapes = {"attention": (2, 3, 4), "heads": (2, 2, 3, 4), "pca": (2, 3, 4, 3)}
    assert saved_arrays[view].shape == shapes[view] and saved_arrays["files"].tolist() == images
    inspection = vitcli.inspect(model, images, view, device="cpu")
    assert np.allclose(inspection.array, saved_arrays[view])


def test_gradient_with_faithfulness(inspect, photos):
    args = ("--method", "gradient", "--class", "tabby", "--faithfulness", "--dark", "--json")
    result = inspect(photos / "wide.png", *args)
    assert result.exit_code == 0, result.stderr
    (row,) = (json.loads(line) for line in result.stdout.splitlines())
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


def test_distance(inspect, photos, tmp_path):
    result = inspect(photos, "--view", "distance", "--json")
    (row,) = (json.loads(line) for line in result.stdout.splitlines())
    assert row["images"] == 3 and np.array(row["distances"]).shape == (2, 2)
    table = (tmp_path / "distance.csv").read_text().splitlines()
    assert table[0] == "layer,head,pixels" and len(table) == 5
    assert float(table[4].split(",")[2]) == pytest.approx(row["distances"][1][1])
    assert figure_size(tmp_path / "distance.png")


@pytest.mark.usefixtures("no_figures")
def test_unreadable_images_are_reported_and_skipped(inspect, photos, tmp_path):
    (tmp_path / "bad.jpg").write_text("no image")
    for view, figure in (("attention", "wide-attention.png"), ("distance", "distance.png")):
        result = inspect(tmp_path / "bad.jpg", photos / "wide.png", "--view", view)
        assert result.exit_code == 1 and "bad.jpg" in result.stderr
        assert (tmp_path / figure).exists()
    assert inspect(tmp_path / "bad.jpg", "--arrays", tmp_path / "x.npz").exit_code == 1
    assert not (tmp_path / "x.npz").exists()


@pytest.mark.usefixtures("no_figures")
def test_same_named_images_get_separate_figures(inspect, photos, tmp_path):
    assert inspect(photos / "wide.png", photos / "wide.png").exit_code == 0
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {"wide-attention.png", "wide-2-attention.png"}


@pytest.mark.usefixtures("no_figures")
def test_figures_do_not_overwrite_images(inspect, photos, tmp_path):
    image = Path(shutil.copy(photos / "wide.png", tmp_path / "attention.png"))
    before = image.read_bytes()
    for images in ([photos / "wide.png", image], [tmp_path, photos / "wide.png"]):
        result = inspect(*images)
        assert result.exit_code == 1 and "is one of the images" in result.stderr
    image = image.rename(tmp_path / "distance.png")
    result = inspect(image, "--view", "distance")
    assert result.exit_code == 1 and image.read_bytes() == before


@pytest.mark.usefixtures("no_figures")
def test_arrays_replace_only_arrays_of_inspect(inspect, photos, tmp_path):
    arrays = tmp_path / "x.npz"
    np.savez(arrays, **{"embedding/kernel": np.zeros(3)})
    before = arrays.read_bytes()
    result = inspect("--arrays", arrays)
    assert result.exit_code == 2 and arrays.read_bytes() == before
    arrays.unlink()
    for images in ([], [photos / "wide.png"]):
        assert inspect(*images, "--arrays", arrays).exit_code == 0
    assert set(np.load(arrays)) == {"attention", "files"}


def test_options_of_other_views_are_rejected(inspect, photos):
    for option in ("--layer=0", "--method=block", "--faithfulness", "--head=0", "--class=cat"):
        result = inspect(photos, "--view", "pca", option)
        assert result.exit_code == 2 and f"{option.split('=')[0]} requires" in result.stderr


def test_invalid_requests_fail_early(inspect, resnet, photos, tmp_path):
    arrays = tmp_path / "no" / "x.npz"
    for result, code, message in (
        (inspect(photos, model=resnet), 2, "ResNet"),
        (inspect(photos, "--class", "crane", "--method", "gradient"), 2, "crane"),
        (inspect(photos, "--arrays", arrays), 1, str(arrays)),
    ):
        assert result.exit_code == code and message in result.stderr and not result.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("size", "preprocess", "expected"),
    [
        ((90, 40), Preprocess(size=(32, 32), crop_mode="squash"), (90, 40)),
        ((90, 40), Preprocess(size=(32, 32)), (40, 40)),
        ((80, 80), Preprocess(size=(32, 32), crop_pct=0.5), (40, 40)),
        ((90, 40), Preprocess(size=(32, 32), crop_mode="border"), (90, 90)),
    ],
)
def test_shown_part_matches_model_input(size, preprocess, expected):
    crop = visible_crop(Image.new("RGB", size, "black"), preprocess)
    assert crop.shape[:2] == pytest.approx(expected[::-1], abs=2)
    white = (crop == 255).all(axis=2).mean()
    assert white == pytest.approx(1 - 40 / 90 if preprocess.crop_mode == "border" else 0, abs=0.05)

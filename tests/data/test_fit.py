"""From image to model input. (tests/test_golden.py compares with timm, transformers and
TensorFlow.)"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from data.preprocess_cases import BIG_VISION, IMAGES
from vitcli.config import Preprocess
from vitcli.data import fit
from vitcli.data.fit import Fit
from vitcli.data.transforms import EvalTransform, to_float


@pytest.mark.parametrize("size", [(1, 1), (3, 500), (37, 41), (300, 200)])
def test_resize_without_antialias_matches_torch(size):
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    preprocess = Preprocess(
        (32, 48), interpolation="bilinear", antialias=False, crop_mode="squash", crop_pct=0.5
    )
    planes = torch.from_numpy(image).permute(2, 0, 1)[None].float()
    whole = torch.nn.functional.interpolate(planes, (64, 96), mode="bilinear", antialias=False)
    theirs = whole[0, :, 16:48, 24:72].permute(1, 2, 0).numpy()
    ours = np.asarray(Fit(preprocess)(Image.fromarray(image))).astype(float)
    assert ((ours <= theirs + 1e-3) & (ours > theirs - 1.001)).all()  # truncated, not rounded


@pytest.mark.parametrize(
    "preprocess",
    [
        BIG_VISION["resize(36)|central_crop(32)"],
        Preprocess((32, 32), interpolation="nearest"),
        Preprocess((224, 224), crop_pct=0.9),
    ],
    ids=["four pixels are sampled", "one is sampled", "no reduced scale is large enough"],
)
def test_jpeg_is_decoded_at_full_scale_when_needed(preprocess):
    with Image.open(IMAGES / "cat.jpg") as image:
        opened = np.asarray(Fit(preprocess)(image))
    assert np.array_equal(opened, np.asarray(Fit(preprocess)((IMAGES / "cat.jpg").read_bytes())))


@pytest.mark.parametrize(("rounding", "start"), [("even", 4), ("down", 3)])
def test_center_crop_rounding(rounding, start):
    """As in torchvision's CenterCrop (used by timm) and in transformers."""
    image = Image.fromarray(np.tile(np.arange(39, dtype=np.uint8)[:, None], (1, 32))).convert("RGB")
    found = np.asarray(Fit(Preprocess((32, 32), crop_rounding=rounding))(image))
    assert found[0, 0, 0] == start


ANY_SHAPE = {
    mode: Preprocess((32, 48), crop_mode=mode, crop_pct=0.875)
    for mode in ("center", "squash", "border")
}
ANY_SHAPE["no antialiasing"] = replace(BIG_VISION["resize(36)|central_crop(32)"], size=(32, 48))


@pytest.mark.parametrize("preprocess", ANY_SHAPE.values(), ids=ANY_SHAPE)
@pytest.mark.parametrize("size", [(1, 1), (3, 500), (500, 3), (1, 2000), (37, 41), (2_000_000, 1)])
def test_any_input_shape(preprocess, size):
    """Without an intermediate image that fills the memory."""
    image = Fit(preprocess)(Image.new("RGB", size, "white"))
    assert image.size == (48, 32)
    assert preprocess.crop_mode == "border" or image.getextrema() == ((255, 255),) * 3


@pytest.mark.parametrize("size", [(64, 64), (64, 96)])
def test_resizing_only_the_crop_looks_the_same(size, monkeypatch):
    transform = Fit(Preprocess(size, crop_pct=0.7))
    with Image.open(IMAGES / "cat.jpg") as image:
        whole = np.asarray(transform(image)).astype(int)
        monkeypatch.setattr(fit, "MAX_PIXELS", 0)
        assert np.abs(np.asarray(transform(image)) - whole).max() <= 3


def test_normalization():
    preprocess = Preprocess((8, 8), mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 1.0))
    image = Image.new("RGB", (9, 9), (51, 102, 255))
    got = to_float(EvalTransform(preprocess)(image), preprocess)
    expected = torch.tensor([(0.2 - 0.1) / 0.5, (0.4 - 0.2) / 0.25, 0.7])
    assert (got.shape, got.dtype) == ((3, 8, 8), torch.float32)
    torch.testing.assert_close(got[:, 4, 4], expected)
    images = torch.full((2, 3, 4, 4), 255.0)
    to_float(images, Preprocess())
    assert (images == 255).all()  # the input is not modified

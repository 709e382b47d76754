"""Training augmentation of images and batches, and its random draws."""

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats

from data.preprocess_cases import IMAGES
from vitcli.config import AugmentConfig
from vitcli.data.images import decode
from vitcli.data.order import batch_rng, sample_rng
from vitcli.data.transforms import TrainTransform, erase, inception_box, mix

CAT = (IMAGES / "cat.jpg").read_bytes()


def test_crop_boxes_have_the_requested_areas_and_ratios():
    augment = AugmentConfig(crop_area=(0.1, 0.6), crop_ratio=(0.5, 2.0))
    boxes = [inception_box((480, 500), augment, sample_rng(0, 0, i)) for i in range(4000)]
    left, top, right, bottom = np.array(boxes).T
    assert min(left.min(), top.min()) >= 0 and right.max() <= 500 and bottom.max() <= 480
    area, ratio = (right - left) * (bottom - top) / (480 * 500), (right - left) / (bottom - top)
    assert area.min() >= 0.099 and area.max() <= 0.602
    assert ratio.min() >= 0.49 and ratio.max() <= 2.04
    # Without rejected draws, areas are uniform and ratios are log-uniform.
    small = AugmentConfig(crop_area=(0.05, 0.4), crop_ratio=(0.5, 2.0))
    boxes = [inception_box((500, 500), small, sample_rng(1, 0, i)) for i in range(4000)]
    left, top, right, bottom = np.array(boxes).T
    logs = np.log((right - left) / (bottom - top))
    for values, law in (
        ((right - left) * (bottom - top) / 500**2, stats.uniform(0.05, 0.35)),
        (logs, stats.uniform(-np.log(2), 2 * np.log(2))),
        (left / (500 - (right - left)), stats.uniform),
        (top / (500 - (bottom - top)), stats.uniform),
    ):
        assert stats.kstest(values, law.cdf).pvalue > 0.001


@pytest.mark.parametrize("size", [(1, 1), (1, 300), (300, 1), (2, 3)])
def test_any_shape_can_be_cropped(size):
    transform = TrainTransform((8, 12), "bicubic", AugmentConfig(randaugment=(2, 15), erasing=1.0))
    for i in range(20):
        image = Image.new("RGB", (size[1], size[0]), (9, 9, 9))
        assert transform(image, sample_rng(0, 0, i)).shape == (3, 8, 12)


def test_full_crop_resizes_and_flips_half_of_the_images():
    plain = TrainTransform((20, 30), "bilinear", AugmentConfig(crop_area=(1, 1), flip=False))
    mirrored = TrainTransform((20, 30), "bilinear", AugmentConfig(crop_area=(1, 1)))
    image = decode(CAT)
    straight = plain(image, sample_rng(0, 0, 0))
    resized = np.asarray(image.resize((30, 20), Image.Resampling.BILINEAR))
    assert np.array_equal(straight.permute(1, 2, 0).numpy(), resized)
    count = 0
    for i in range(200):
        got = mirrored(image, sample_rng(3, 0, i))
        if not torch.equal(got, straight):
            assert torch.equal(got, straight.flip(-1))
            count += 1
    assert 75 < count < 125


def test_image_is_determined_by_seed_epoch_and_index():
    augment = AugmentConfig(randaugment=(2, 10), erasing=0.5)
    transform = TrainTransform((24, 24), "bilinear", augment)
    first = transform(CAT, sample_rng(1, 2, 3))
    assert torch.equal(first, transform(CAT, sample_rng(1, 2, 3)))
    for other in ((0, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert not torch.equal(first, transform(CAT, sample_rng(*other)))


def test_jpeg_decoded_at_reduced_scale_looks_the_same():
    transform = TrainTransform((32, 32), "bicubic", AugmentConfig(crop_area=(0.6, 1.0)))
    for i in range(10):
        with Image.open(IMAGES / "rocket.jpg") as image:
            full = transform(image, sample_rng(0, 0, i)).double()
            assert image.size == (640, 427)
        reduced = transform((IMAGES / "rocket.jpg").read_bytes(), sample_rng(0, 0, i)).double()
        assert (full - reduced).abs().mean() < 3
        assert not torch.equal(full, reduced)


def test_random_erasing_fills_a_rectangle_with_noise():
    areas, logs, tops, lefts = [], [], [], []
    for i in range(400):
        pixels = torch.full((3, 160, 160), 7, dtype=torch.uint8)
        erase(pixels, 1.0, sample_rng(0, 0, i))
        changed = (pixels != 7).any(0)
        rows, columns = torch.where(changed.any(1))[0], torch.where(changed.any(0))[0]
        inside = changed[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        assert inside.double().mean() > 0.97  # noise equals the old value now and then
        areas.append(len(rows) * len(columns) / 160**2)
        logs.append(np.log(len(rows) / len(columns)))
        tops.append(float(rows[0]) / (160 - len(rows)))
        lefts.append(float(columns[0]) / (160 - len(columns)))
    assert min(areas) > 0.019 and max(areas) < 0.41 and max(map(abs, logs)) < 1.25
    for values, law in (
        (areas, stats.uniform(0.02, 0.38)),
        (logs, stats.uniform(-1.2, 2.4)),
        (tops, stats.uniform),
        (lefts, stats.uniform),
    ):
        assert stats.kstest(values, law.cdf).statistic < 0.12
    count = 0
    for i in range(400):
        pixels = torch.zeros((3, 16, 16), dtype=torch.uint8)
        erase(pixels, 0.25, sample_rng(0, 0, i))
        count += bool(pixels.any())
    assert 70 < count < 130


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.randn(6, 3, 16, 24, generator=torch.Generator().manual_seed(0))
    return images, torch.eye(6)


def test_mixup_blends_with_the_previous_sample():
    images, targets = batch()
    mixed, labels = mix(images, targets, AugmentConfig(mixup=0.2), batch_rng(0, 0))
    share = labels[0, 0].item()
    assert 0.5 <= share < 1
    expected = share * images + (1 - share) * images[[5, 0, 1, 2, 3, 4]]
    torch.testing.assert_close(mixed, expected)
    torch.testing.assert_close(labels, share * targets + (1 - share) * targets[[5, 0, 1, 2, 3, 4]])
    same, labels = mix(images, targets, AugmentConfig(), batch_rng(0, 0))
    assert torch.equal(same, images) and torch.equal(labels, targets)


@pytest.mark.parametrize("augment", [AugmentConfig(mixup=0.2), AugmentConfig(cutmix=1.0)])
def test_batch_parts_are_mixed_like_the_whole_batch(augment):
    images, targets = batch()
    whole = mix(images, targets, augment, batch_rng(0, 0))
    for places in ([5, 0, 1, 2], [2, 3, 4, 5]):
        part = mix(images[places], targets[places], augment, batch_rng(0, 0), lead=1)
        for mixed, expected in zip(part, whole, strict=True):
            assert torch.equal(mixed, expected[places[1:]])


def test_cutmix_box_area_matches_the_label_weight():
    shares = []
    for step in range(100):
        images, targets = batch()
        mixed, labels = mix(images, targets, AugmentConfig(cutmix=1.0), batch_rng(0, step))
        foreign = (mixed != images).all(1)
        torch.testing.assert_close(foreign.double().mean((1, 2)), 1 - labels.diagonal().double())
        torch.testing.assert_close(labels.sum(1), torch.ones(6))
        before = torch.where(foreign[:, None], images.roll(1, 0), images)
        assert torch.equal(mixed, before)
        shares.append(labels[0, 0].item())
    assert min(shares) < 0.35 and max(shares) > 0.9


def test_mixup_and_cutmix_distributions():
    images, targets = torch.zeros(2, 3, 16, 16), torch.eye(2)
    images[1] = 1

    def mixed(augment, seed, step):
        return mix(images, targets, augment, batch_rng(seed, step))

    shares = [float(mixed(AugmentConfig(mixup=0.8), 5, i)[1][0, 0]) for i in range(2000)]
    folded = stats.beta(0.8, 0.8)
    assert stats.kstest(shares, lambda x: 2 * folded.cdf(x) - 1).pvalue > 0.001
    augment = AugmentConfig(mixup=0.2, cutmix=1.0)
    boxes = [
        set(mixed(augment, 0, step)[0].flatten().tolist()) <= {0.0, 1.0} for step in range(300)
    ]
    assert 115 < sum(boxes) < 185

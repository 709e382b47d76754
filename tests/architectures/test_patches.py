"""Patch embeddings resized to another patch size, checked on resized images."""

import numpy as np
import pytest
import torch

from vitcli.architectures.patches import area_matrix, resize_patches

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("old, new", [(16, 4), (7, 3), (3, 7), (5, 5), (12, 1)])
def test_area_matrix_averages_covered_pixels(old, new):
    line = RNG.random(old)
    finest = np.repeat(line, new).reshape(new, old)  # old * new slices, `old` per new pixel
    assert np.allclose(area_matrix(old, new) @ line, finest.mean(axis=1))


def test_larger_patches_match_downsampled_image():
    weight = RNG.normal(size=(6, 3, 4, 4))
    large = resize_patches(weight, (16, 16))
    image = RNG.random((3, 16, 16))
    small = image.reshape(3, 4, 4, 4, 4).mean(axis=(2, 4))
    assert np.allclose((large * image).sum((1, 2, 3)), (weight * small).sum((1, 2, 3)))


def test_roundtrip_is_bit_exact():
    weight = torch.randn(6, 3, 4, 4)
    spread = resize_patches(weight, (16, 16))
    assert spread.shape == (6, 3, 16, 16) and spread.dtype is torch.float32
    assert torch.equal(resize_patches(spread, (4, 4)), weight)

"""Patch embeddings at another patch size, against the images they are meant for."""

import numpy as np
import pytest
import torch

from vitcli.patches import area_matrix, resize_patches

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("old, new", [(16, 4), (7, 3), (3, 7), (5, 5), (12, 1)])
def test_area_matrix_averages_what_a_pixel_covers(old, new):
    line = RNG.random(old)
    finest = np.repeat(line, new).reshape(new, old)  # old * new slices, `old` to a new pixel
    assert np.allclose(area_matrix(old, new) @ line, finest.mean(axis=1))


def test_larger_patches_are_the_old_function_of_the_downsampled_image():
    weight = RNG.normal(size=(6, 3, 4, 4))
    large = resize_patches(weight, (16, 16))
    image = RNG.random((3, 16, 16))
    small = image.reshape(3, 4, 4, 4, 4).mean(axis=(2, 4))
    assert np.allclose((large * image).sum((1, 2, 3)), (weight * small).sum((1, 2, 3)))


def test_there_and_back_is_exact_to_the_bit():
    weight = torch.randn(6, 3, 4, 4)
    spread = resize_patches(weight, (16, 16))
    assert spread.shape == (6, 3, 16, 16) and spread.dtype is torch.float32
    assert torch.equal(resize_patches(spread, (4, 4)), weight)

"""Resizing of position embeddings. (Against original implementations: tests/test_golden.py.)"""

import numpy as np
import pytest
import torch

from vitcli.architectures import posemb
from vitcli.errors import ConfigError


@pytest.mark.parametrize("method", ["bilinear", "bicubic", "bicubic-hf"])
@pytest.mark.parametrize("old, new", [(1, 1), (1, 5), (6, 2), (14, 24), (24, 14), (3, 17)])
def test_resize_preserves_constants(old, new, method):
    matrix = posemb.resize_matrix(old, new, method)
    assert matrix.shape == (new, old)
    assert np.allclose(matrix.sum(axis=1), 1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_resize_preserves_dtype(dtype):
    table = torch.randn(1, 5, 8).to(dtype)
    assert posemb.resize(table, 1, (2, 2), (3, 5), "bilinear").dtype is dtype


def test_grid_mismatch_is_rejected():
    with pytest.raises(ConfigError, match="5 position embeddings do not fit a grid of 3 x 2"):
        posemb.resize(np.zeros((1, 5, 8)), 1, (3, 2), (4, 4), "bilinear")


@pytest.mark.parametrize("method", ["bicubic", "bicubic-hf"])
def test_relative_biases_resize_like_images(method):
    table = np.random.default_rng(0).normal(size=(7 * 5 + 3, 2))
    found = posemb.resize_relative(table, (4, 3), (3, 5), method)
    image = torch.from_numpy(table[:-3]).view(7, 5, 2).permute(2, 0, 1)[None]
    options = {"mode": "bicubic", "align_corners": False, "antialias": method == "bicubic"}
    expected = torch.nn.functional.interpolate(image, (5, 9), **options)[0].permute(1, 2, 0)
    assert np.allclose(found[:-3], expected.reshape(45, 2))
    assert np.array_equal(found[-3:], table[-3:])
    assert posemb.resize_relative(table, (4, 3), (4, 3), method) is table

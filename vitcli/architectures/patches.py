"""Resampling of patch embeddings to another patch size, using only numpy.

A patch embedding is a linear function of a patch's pixels. At another patch size it should compute
the same function of the same image at another resolution. The two are related by area averaging R
(one row per pixel of the smaller image):

- larger patches: the new weights are R^T w, so that w'.x equals w.(R x), the old function of the
  area-downsampled image (at a factor of 4, each weight / 16 is spread over 4 x 4 pixels);
- smaller patches: the new weights are U^T w, where U is area upsampling, which repeats pixels: the
  old function of the upsampled image. For integer factors, this exactly inverts the former.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from vitcli.architectures.posemb import in_float64
from vitcli.config import Size


def area_matrix(old: int, new: int) -> npt.NDArray[np.float64]:
    """The (new, old) matrix of area averaging: each new pixel is the mean of the area it covers."""
    edges_old = np.arange(old + 1) / old
    edges_new = np.arange(new + 1) / new
    left = np.maximum(edges_old[None, :-1], edges_new[:-1, None])
    right = np.minimum(edges_old[None, 1:], edges_new[1:, None])
    matrix: npt.NDArray[np.float64] = np.maximum(right - left, 0.0) * new
    return matrix


def resize_patches(weight: Any, size: Size) -> Any:
    """Resample patch embedding weights (D, C, height, width) to another patch size.

    They are a numpy array or a torch tensor; the result has the same type and dtype. If the size
    does not change, it is the input itself.
    """
    old = (weight.shape[2], weight.shape[3])
    if old == tuple(size):
        return weight
    rows, columns = area_matrix(size[0], old[0]), area_matrix(size[1], old[1])
    return in_float64(weight, lambda array: rows.T @ array @ columns)

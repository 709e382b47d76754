"""Position embeddings: resampling matrices and sine-cosine tables, using only numpy.

Resizing is linear and separable, so a method is one small matrix per axis. There are three:

- `bilinear`: aligned corners, as in the authors' code (`scipy.ndimage.zoom(order=1)` in
  vit_jax/checkpoint.py and big_vision/models/vit.py);
- `bicubic`: a = -0.5, unaligned corners, antialiased (timm's `resample_abs_pos_embed`);
- `bicubic-hf`: a = -0.75, unaligned corners, not antialiased (transformers'
  `interpolate_pos_encoding`).
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from vitcli.architectures.vit import RELATIVE
from vitcli.config import PosembMethod, Size
from vitcli.errors import ConfigError
from vitcli.words import pluralize

Matrix = npt.NDArray[np.float64]


def resize_matrix(old: int, new: int, method: PosembMethod) -> Matrix:
    """Return the (new, old) matrix that resamples one axis; its rows sum to 1."""
    if old == new:
        return np.eye(new)
    methods = {"bilinear": _bilinear, "bicubic": _bicubic, "bicubic-hf": _bicubic_clamped}
    return methods[method](old, new)


def resize(posemb: Any, num_prefix: int, old: Size, new: Size, method: PosembMethod) -> Any:
    """Resample the grid of a table of position embeddings; those of prefix tokens are unchanged.

    Args:
        posemb: (1, num_prefix + rows * columns, D), a numpy array or a torch tensor.
        num_prefix: number of prefix tokens that have an embedding.
        old: rows and columns of the current grid.
        new: rows and columns of the new grid; if equal to `old`, `posemb` itself is returned.

    Returns:
        (1, num_prefix + new rows * new columns, D), of the same type and dtype.

    Raises:
        ConfigError: the table does not have `num_prefix + rows * columns` tokens.
    """
    tokens, dim = posemb.shape[1], posemb.shape[2]
    if tokens != num_prefix + old[0] * old[1]:
        raise ConfigError(
            f"{tokens} position embeddings do not fit a grid of {old[0]} x {old[1]} and "
            f"{pluralize(num_prefix, 'prefix token')}"
        )
    if old == new:
        return posemb
    rows = resize_matrix(old[0], new[0], method)
    columns = resize_matrix(old[1], new[1], method)

    def resample(table: Matrix) -> Matrix:
        grid = rows @ table[0, num_prefix:].reshape(old[0], old[1] * dim)  # (new rows, columns D)
        grid = columns @ grid.reshape(new[0], old[1], dim)  # (new rows, new columns, D)
        return np.concatenate([table[:, :num_prefix], grid.reshape(1, -1, dim)], axis=1)

    return in_float64(posemb, resample)


def resize_relative(table: Any, old: Size, new: Size, method: PosembMethod) -> Any:
    """Resample the relative position biases of a block; the last three, which are those of the
    class token, are unchanged. (The new offsets are evenly spaced, as the patches are in pixels.)

    Args:
        table: ((2 rows - 1) (2 columns - 1) + 3, heads), a numpy array or a torch tensor.
        old: rows and columns of the current grid.
        new: rows and columns of the new grid; if equal to `old`, `table` itself is returned.
    """
    if old == new:
        return table
    old_offsets, new_offsets = ((2 * rows - 1, 2 * columns - 1) for rows, columns in (old, new))

    def resample(biases: Matrix) -> Matrix:
        grid = resize(biases[None, :-3], 0, old_offsets, new_offsets, method)[0]
        return np.concatenate([grid, biases[-3:]])

    return in_float64(table, resample)


def in_float64(array: Any, function: Callable[[Matrix], Matrix]) -> Any:
    """Apply a function to a numpy array or torch tensor in float64; the result has the input's type
    and dtype."""
    if hasattr(array, "new_tensor"):
        return array.new_tensor(function(array.detach().cpu().double().numpy()))
    return function(array.astype(np.float64)).astype(array.dtype)


def sincos2d(grid: Size, width: int) -> npt.NDArray[np.float32]:
    """Return the table (1, rows * columns, width): sines and cosines of the column, then of the
    row, width / 4 frequencies each (`posemb_sincos_2d` in big_vision/models/vit.py; MoCo v3)."""
    y, x = np.mgrid[: grid[0], : grid[1]]
    omega = 1.0 / 10_000.0 ** np.linspace(0.0, 1.0, width // 4)
    y_angle = y.reshape(-1, 1) * omega  # (rows * columns, width / 4)
    x_angle = x.reshape(-1, 1) * omega
    parts = [np.sin(x_angle), np.cos(x_angle), np.sin(y_angle), np.cos(y_angle)]
    return np.concatenate(parts, axis=1).astype(np.float32)[None]


def _bilinear(old: int, new: int) -> Matrix:
    """Linear interpolation with aligned corners: output i is at i (old - 1) / (new - 1)."""
    positions = np.linspace(0.0, old - 1, new)[:, None]
    matrix: Matrix = np.maximum(1.0 - np.abs(positions - np.arange(old)), 0.0)
    return matrix


def _bicubic(old: int, new: int) -> Matrix:
    """Antialiased: the kernel is widened for downsampling, cut off at the border and normalized."""
    scale = old / new
    centers = (np.arange(new)[:, None] + 0.5) * scale
    distances = np.arange(old) + 0.5 - centers  # (new, old)
    weights: Matrix = _cubic(distances / max(scale, 1.0), a=-0.5)
    weights /= weights.sum(axis=1, keepdims=True)
    return weights


def _bicubic_clamped(old: int, new: int) -> Matrix:
    """Four taps per output position; taps beyond the border are clamped to it."""
    matrix = np.zeros((new, old))
    centers = (np.arange(new) + 0.5) * old / new - 0.5
    for offset in range(-1, 3):
        taps = np.floor(centers).astype(int) + offset
        weights = _cubic(taps - centers, a=-0.75)
        np.add.at(matrix, (np.arange(new), taps.clip(0, old - 1)), weights)
    return matrix


def _cubic(x: npt.NDArray[Any], a: float) -> Matrix:
    """Keys' cubic convolution kernel."""
    x = np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def similarity(tables: Mapping[str, npt.NDArray[Any]], grid: Size, num_prefix: int) -> Matrix:
    """Cosine similarity of each patch's position embedding to every other, as tiles:
    (rows * rows, columns * columns), tile (i, j) for the patch in row i and column j.

    Args:
        tables: by tensor name: "pos_embed", or "pos_embed_row" and "pos_embed_column".
        num_prefix: number of prefix tokens in "pos_embed".

    Raises:
        ConfigError: there are none; relative position biases do not count.
    """
    rows, columns = grid
    if not tables or next(iter(tables)).endswith(RELATIVE):
        raise ConfigError("the model has no position embeddings to show: it adds none to patches")
    if "pos_embed" in tables:
        x = np.asarray(tables["pos_embed"], np.float64)[0, num_prefix:]
    else:  # D/2 of the column, then D/2 of the row
        x, y = (np.asarray(tables[f"pos_embed_{axis}"], float)[0] for axis in ("column", "row"))
        x = np.concatenate([np.tile(x, (rows, 1)), np.repeat(y, columns, 0)], axis=1)
    x = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    tiles: Matrix = (x @ x.T).reshape(rows, columns, rows, columns).transpose(0, 2, 1, 3)
    return tiles.reshape(rows * rows, columns * columns)

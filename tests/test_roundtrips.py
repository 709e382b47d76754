"""Every layout in every other: bit-exact, or refused; as a table: `make roundtrips`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from golden_table import GOLDEN, unzipped
from layouts.released_names import NAMES, Arrays
from roundtrip_table import compare, sources
from vitcli.checkpoints.convert import convert
from vitcli.checkpoints.read import open_checkpoint

EXACT = {
    "vit_jax_token/checkpoint.npz": "vit transformers vit-npz",
    "vit_jax_rep": "vit vit-npz",
    "vit_jax_gap": "vit vit-npz big_vision",
    "vit_jax_hybrid_b3": "vit vit-npz",
    "big_vision_tok/checkpoint_scan.npz": "vit big_vision",
    "big_vision_gap_sincos": "vit big_vision",
    "big_vision_map_scan_twotower": "vit big_vision",
    "hf_vit": "vit transformers vit-npz",
    "hf_dinov2": "vit transformers",
    "hf_deit_teacher": "vit",
    "hf_dinov2_registers": "vit transformers",
    "hf_siglip_vision": "vit big_vision",
    "hf_clip_vision": "vit",
    "timm_vit_default": "vit transformers vit-npz",
    "timm_vit_reg4_dinov2": "vit",
    "timm_bit_resnetv2": "vit bit-npz",
    "timm_hybrid_r50_s16": "vit vit-npz",
    "BiT bit.npz": "vit bit-npz",
    "big_vision BiT bit_paper.npz": "vit big_vision",
    "torchvision vit.pth": "vit transformers vit-npz",
    "open_clip clip.safetensors": "vit",
    "DINO dino.pth": "vit transformers vit-npz",
    "DINOv2, in chunks dinov2.pth": "vit transformers",
}
"""The targets that some sources are exact in."""


@pytest.mark.parametrize("name", sources())
def test_exact_or_refused(name: str) -> None:
    cells = compare(name)  # asserts that the bits are the same
    assert cells["vit"].exact and not cells["vit"].note
    assert all(cell.exact or cell.note for cell in cells.values())
    if name in EXACT:
        assert [target for target, cell in cells.items() if cell.exact] == EXACT[name].split()


@pytest.mark.parametrize("name", NAMES)
def test_the_tensors_under_other_names_are_the_same(name: str, tmp_path: Path) -> None:
    case, _ = NAMES[name]
    (file,) = (GOLDEN / case).glob("model.safetensors*")
    (tmp_path / "timm").mkdir()
    expected = load_file(unzipped(file, tmp_path / "timm"))
    found = open_checkpoint(sources()[name](tmp_path)).tensors
    assert "norm.weight" in found
    for key, tensor in found.items():
        assert np.array_equal(tensor.read(), expected[key]), key


SAME_NAMES = (
    "vit_jax_token/checkpoint.npz",
    "vit_jax_rep",
    "vit_jax_gap",
    "vit_jax_hybrid_b3",
    "vit_jax_hybrid_p2_rep",
    "vit_jax_hybrid_stem_only_p8",
    "big_vision_tok/checkpoint.npz",
    "big_vision_gap_sincos",
    "big_vision_gap_rep_bf16/checkpoint.npz",
    "big_vision_gap_rep_bf16/checkpoint_bf16.npz",
    "BiT bit.npz",
    "big_vision BiT bit_paper.npz",
    "hf_vit",
    "hf_dinov2",
)
"""Files that are written as their makers wrote them, but for a prefix and a mask token."""


def arrays(path: Path) -> Arrays:
    """Names and bytes as another reader than ours finds them."""
    found = np.load(path) if path.suffix == ".npz" else load_file(path / "model.safetensors")
    return {n.removeprefix("params/"): a for n, a in found.items() if "mask_token" not in n}


@pytest.mark.parametrize("name", SAME_NAMES)
def test_there_and_back_is_the_same_to_the_bit(name: str, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    source = sources()[name](tmp_path / "source")
    middle = convert(source, tmp_path / "ours.safetensors")
    layout = open_checkpoint(source).layout
    back = convert(middle, tmp_path / f"back{source.suffix}", layout)
    expected, found = arrays(source), arrays(back)
    assert set(found) == set(expected)
    for key, array in expected.items():
        assert (found[key].dtype, found[key].shape) == (array.dtype, array.shape), key
        assert found[key].tobytes() == array.tobytes(), key

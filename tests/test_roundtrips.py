"""Every layout in every other: bit-exact, or refused; as a table: `make roundtrips`."""

from __future__ import annotations

import pytest

from roundtrip_table import compare, sources

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

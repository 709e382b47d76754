"""Conversion from every layout that vit reads to every layout that it writes.

    python tests/test_roundtrips.py [SOURCE...]

or `make roundtrips` prints a table:

exact: every tensor is read back from the written checkpoint bit for bit.
exact[1]: likewise, but programs that read the layout compute something different (footnote 1).
refused[2]: the layout cannot represent the model (footnote 2).
"""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from checkpoints.golden_cases import GOLDEN, cases, unpack
from layouts.released_names import RELEASES, Arrays
from vitcli.checkpoints import tensor_file
from vitcli.checkpoints.convert import convert
from vitcli.checkpoints.read import Checkpoint, open_checkpoint
from vitcli.errors import OutputError
from vitcli.layouts.catalog import Format, formats, layout_of


class Cell(NamedTuple):
    """The result of converting a source to a target."""

    exact: bool
    note: str = ""
    """Why it is refused, or what programs that read it compute differently."""


SOURCES = [name for name, file in cases().items() if file.is_file()] + list(RELEASES)
"""Golden cases, and timm's with the tensor names of other projects."""


def write_source(name: str, directory: Path) -> Path:
    """Write a source into an empty directory and return its path."""
    if name not in RELEASES:
        file = unpack(cases()[name], directory)
        return file if file.suffix == ".npz" else file.parent
    case, rename = RELEASES[name]
    (directory / "original").mkdir()
    file = unpack(next((GOLDEN / case).glob("model.safetensors*")), directory / "original")
    arrays = rename(load_file(file))
    path = directory / name.rpartition(" ")[2]
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    elif path.suffix == ".safetensors":
        save_file({n: np.ascontiguousarray(a) for n, a in arrays.items()}, path)
    else:
        torch.save({"model": {n: torch.tensor(a) for n, a in arrays.items()}}, path)
    return path


def compare(name: str) -> dict[Format, Cell]:
    """Convert a source to every target."""
    cells = {}
    with tempfile.TemporaryDirectory() as directory:
        path = write_source(name, Path(directory))
        source = open_checkpoint(path)
        for target in formats():
            layout = layout_of(target)
            output = Path(directory) / f"{target}{layout.suffixes[0]}"
            try:
                convert(path, output, target)
            except OutputError:
                cells[target] = Cell(False, ", ".join(layout.unsupported(source.info.model)))
            else:
                cells[target] = _compared(source, output)
    return cells


def _compared(source: Checkpoint, output: Path) -> Cell:
    again = open_checkpoint(output)
    assert set(again.tensors) == set(source.tensors)
    for name, tensor in source.tensors.items():
        assert _bits(tensor) == _bits(again.tensors[name]), name
    old, new = _flatten(asdict(source.info.model)), _flatten(asdict(again.info.model))
    return Cell(
        True, ", ".join(f"{k} {new.get(k)} instead of {old[k]}" for k in old if old[k] != new[k])
    )


def _bits(tensor: tensor_file.LazyTensor) -> tuple[str, tuple[int, ...], bytes]:
    return tensor.dtype, tensor.shape, bytes(tensor_file.tensor_bytes(tensor))


def _flatten(fields: Mapping[str, Any]) -> Arrays:
    """Fields of a model and of its ResNet, flattened."""
    stem = fields.get("stem") or fields.get("resnet") or {}
    rest = {k: v for k, v in fields.items() if k not in ("stem", "resnet", "image_size")}
    return {**rest, **{f"stem's {k}": v for k, v in stem.items()}}


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
"""The targets to which these sources convert exactly."""


@pytest.mark.parametrize("name", SOURCES)
def test_conversion_is_exact_or_refused(name: str) -> None:
    cells = compare(name)  # asserts that tensors are bit-identical
    assert cells["vit"].exact and not cells["vit"].note
    assert all(cell.exact or cell.note for cell in cells.values())
    if name in EXACT:
        assert [target for target, cell in cells.items() if cell.exact] == EXACT[name].split()


@pytest.mark.parametrize("name", RELEASES)
def test_renamed_tensors_match_timm(name: str, tmp_path: Path) -> None:
    case, _ = RELEASES[name]
    (file,) = (GOLDEN / case).glob("model.safetensors*")
    (tmp_path / "timm").mkdir()
    expected = load_file(unpack(file, tmp_path / "timm"))
    found = open_checkpoint(write_source(name, tmp_path)).tensors
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
"""Sources that a round trip reproduces exactly, except for a prefix and a mask token."""


def arrays(path: Path) -> Arrays:
    """Tensors by name, read without vit."""
    found = np.load(path) if path.suffix == ".npz" else load_file(path / "model.safetensors")
    return {n.removeprefix("params/"): a for n, a in found.items() if "mask_token" not in n}


@pytest.mark.parametrize("name", SAME_NAMES)
def test_roundtrip_is_bit_exact(name: str, tmp_path: Path) -> None:
    source = write_source(name, tmp_path)
    middle = convert(source, tmp_path / "ours.safetensors")
    layout = open_checkpoint(source).layout
    back = convert(middle, tmp_path / f"back{source.suffix}", layout)
    expected, found = arrays(source), arrays(back)
    assert set(found) == set(expected)
    for key, array in expected.items():
        assert (found[key].dtype, found[key].shape) == (array.dtype, array.shape), key
        assert found[key].tobytes() == array.tobytes(), key


def main(names: Sequence[str]) -> int:
    """Print the table and its footnotes."""
    width = max(map(len, SOURCES)) + 2
    print(f"{'source':{width}}" + "".join(f"{target:>14}" for target in formats()))
    notes: list[str] = []
    for name in names or SOURCES:
        line = f"{name:{width}}"
        for cell in compare(name).values():
            if cell.note and cell.note not in notes:
                notes.append(cell.note)
            mark = f"[{notes.index(cell.note) + 1}]" if cell.note else ""
            line += f"{('exact' if cell.exact else 'refused') + mark:>14}"
        print(line, flush=True)
    for number, note in enumerate(notes, 1):
        print(f"[{number}] {note}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

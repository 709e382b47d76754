"""Every layout that vit reads, in every layout that it writes: `make roundtrips`, or

    python tests/roundtrip_table.py [SOURCE...]

exact: every tensor is read back from the written checkpoint bit for bit.
exact[1]: likewise, but programs that read the layout compute something differently (footnote 1).
refused[2]: the layout cannot express the model (footnote 2).

tests/test_roundtrips.py asserts the same.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy

from golden_table import GOLDEN, cases, unzipped
from layouts.released_names import NAMES, Arrays
from vitcli.checkpoints import tensor_file
from vitcli.checkpoints.convert import convert
from vitcli.checkpoints.read import Checkpoint, open_checkpoint
from vitcli.errors import OutputError
from vitcli.layouts.catalogue import Format, formats, layout_of


class Cell(NamedTuple):
    """A source in a target."""

    exact: bool
    note: str = ""
    """Why it is refused, or what programs that read it compute differently."""


def sources() -> dict[str, Callable[[Path], Path]]:
    """Every source: its name, and a function that writes it to a directory and returns its path."""
    found: dict[str, Callable[[Path], Path]] = {}
    for name, file in cases().items():
        if file.is_file():
            found[name] = lambda directory, file=file: _unpacked(file, directory)
    for name in NAMES:
        found[name] = lambda directory, name=name: _renamed(name, directory)
    return found


def _unpacked(file: Path, directory: Path) -> Path:
    file = unzipped(file, directory)
    return file if file.suffix == ".npz" else file.parent


def _renamed(name: str, directory: Path) -> Path:
    """A golden case of timm's with the names of another project."""
    case, rename = NAMES[name]
    (directory / "original").mkdir()
    file = unzipped(next((GOLDEN / case).glob("model.safetensors*")), directory / "original")
    arrays = rename(safetensors.numpy.load(file.read_bytes()))
    path = directory / name.rpartition(" ")[2]
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    elif path.suffix == ".safetensors":
        plain = {n: np.ascontiguousarray(a) for n, a in arrays.items()}
        safetensors.numpy.save_file(plain, path)
    else:
        import torch

        torch.save({"model": {n: torch.tensor(a) for n, a in arrays.items()}}, path)
    return path


def compare(name: str) -> dict[Format, Cell]:
    """A source in every target."""
    cells = {}
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "source").mkdir()
        path = sources()[name](Path(directory) / "source")
        source = open_checkpoint(path)
        for target in formats():
            layout = layout_of(target)
            output = Path(directory) / f"{target}{layout.suffixes[0]}"
            try:
                convert(path, output, target)
            except OutputError:
                cells[target] = Cell(False, ", ".join(layout.refusals(source.info.model)))
            else:
                cells[target] = _compared(source, output)
    return cells


def _compared(source: Checkpoint, output: Path) -> Cell:
    again = open_checkpoint(output)
    assert set(again.tensors) == set(source.tensors)
    for name, tensor in source.tensors.items():
        assert _bits(tensor) == _bits(again.tensors[name]), name
    old, new = _flat(asdict(source.info.model)), _flat(asdict(again.info.model))
    return Cell(
        True, ", ".join(f"{k} {new.get(k)} instead of {old[k]}" for k in old if old[k] != new[k])
    )


def _bits(tensor: tensor_file.LazyTensor) -> tuple[str, tuple[int, ...], bytes]:
    return tensor.dtype, tensor.shape, bytes(tensor_file.tensor_bytes(tensor))


def _flat(fields: Mapping[str, Any]) -> Arrays:
    """Fields of a model and of its ResNet."""
    stem = fields.get("stem") or fields.get("resnet") or {}
    rest = {k: v for k, v in fields.items() if k not in ("stem", "resnet", "image_size")}
    return {**rest, **{f"stem's {k}": v for k, v in stem.items()}}


def main(names: Sequence[str]) -> int:
    """Prints the table and its footnotes."""
    width = max(map(len, sources())) + 2
    print(f"{'source':{width}}" + "".join(f"{target:>14}" for target in formats()))
    notes: list[str] = []
    for name in names or sources():
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

"""A checkpoint of any layout that we read, written in any that we write, tensor by tensor.

What a layout cannot say of a model is refused by name; what it has no place for (class names in an
.npz) is told.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vitcli.atomic import whole_folder, write_text
from vitcli.checkpoints import npz, read, tensor_file
from vitcli.checkpoints.changes import Changes, change
from vitcli.checkpoints.info import CheckpointInfo, assumptions
from vitcli.checkpoints.tensor_file import LazyTensor
from vitcli.config import Size
from vitcli.errors import OutputError
from vitcli.hub import fetch as hub
from vitcli.layouts.catalogue import Format, default_format, layout_of
from vitcli.layouts.layout import Layout
from vitcli.layouts.writing import write_layout

if TYPE_CHECKING:
    import numpy as np


class Renamed(NamedTuple):
    """One of our tensors, in the source and in the target."""

    ours: str
    shape: tuple[int, ...]
    dtype: str
    """As they are written."""
    source: tuple[str, ...]
    """Names; none of what is made anew."""
    target: tuple[str, ...]
    was: str
    """What it was before it was changed: a shape, a type; empty where it was not."""


@dataclass(frozen=True)
class Conversion:
    """What `write` does: read, decided and checked, but not written yet."""

    source: read.Checkpoint
    output: Path
    format: Format
    info: CheckpointInfo
    ours: dict[str, LazyTensor]
    """Under our names, changed as asked for."""
    tensors: dict[str, LazyTensor]
    """The same under the names of the target."""
    renamed: dict[str, tuple[str, ...]]
    """Our names, and those of the target."""
    made: frozenset[str] = frozenset()
    """Our names of what is zeros, and not the source's."""
    warnings: list[str] = field(default_factory=list)
    nan: list[str] = field(default_factory=list)
    """Names of tensors that hold NaN, known once they are written."""

    def names(self) -> Iterator[Renamed]:
        """What becomes of each tensor."""
        for name, new in self.ours.items():
            old = self.source.tensors.get(name)
            made = old is None or name in self.made
            source = () if made else self.source.sources.get(name, (name,))
            was = [] if old is None or made or old.shape == new.shape else [shape_text(old.shape)]
            was += [] if old is None or made or old.dtype == new.dtype else [old.dtype]
            yield Renamed(name, new.shape, new.dtype, source, self.renamed[name], " ".join(was))


def convert(
    spec: str | Path,
    output: str | Path,
    to: Format | None = None,
    changes: Changes | None = None,
    *,
    force: bool = False,
    old_grid: Size | None = None,
    offline: bool = False,
    allow_pickle: bool = False,
) -> Path:
    """Writes a checkpoint in another layout; returns the file or folder.

    Args:
        spec: a path, a name or a Hub repo, of any layout that we read.
        output: a .safetensors or .npz file, or a folder.
        to: by default the authors' for .npz, else ours.
        changes: what else becomes of the model.
        force: replace what is there.
        old_grid: rows and columns of the position embeddings, where the file does not say.
        offline: never touch the network.
        allow_pickle: take a Hub repo whose weights are a pickle only; nothing in it is run.

    Raises:
        VitError: the source cannot be read, the target cannot express it, or not be written.
    """
    conversion = plan_convert(
        spec, output, to, changes, old_grid=old_grid, offline=offline, allow_pickle=allow_pickle
    )
    write(conversion, force)
    return conversion.output


def plan_convert(
    spec: str | Path,
    output: str | Path,
    to: Format | None = None,
    changes: Changes | None = None,
    *,
    old_grid: Size | None = None,
    offline: bool = False,
    on_progress: hub.Progress | None = None,
    allow_pickle: bool = False,
) -> Conversion:
    """Reads what there is and decides what is written. Arguments and errors as `convert`."""
    located = read.locate(spec, offline, on_progress, allow_pickle)
    source = read.open_checkpoint(located.file, located.entry, old_grid)
    output = Path(output)
    info, tensors = change(source.info, source.tensors, changes or Changes())
    target = to or default_format(info.model, output)
    layout = layout_of(target)
    _check_output(output, target, layout)
    if problems := layout.refusals(info.model):
        raise OutputError(
            f"the layout {target} cannot express this model: {', '.join(problems)}",
            where=source.file,
            hint="--drop-head leaves out the head and what stands before it"
            if any("pre_logits" in problem for problem in problems)
            else None,
        )
    warnings = [*_told_of(info, source), *layout.warnings(info.model)]
    saved, renamed = write_layout(layout, info.model, tensors)
    new_head = changes is not None and changes.num_classes is not None
    made = frozenset(name for name in tensors if new_head and name.startswith("head"))
    return Conversion(source, output, target, info, tensors, saved, renamed, made, warnings)


def shape_text(shape: tuple[int, ...]) -> str:
    """As in "48 x 3 x 16 x 16"."""
    return " x ".join(map(str, shape)) or "1"


def _told_of(info: CheckpointInfo, source: read.Checkpoint) -> list[str]:
    """What was assumed and what is left out."""
    found = []
    if assumed := assumptions(info):
        found.append(f"the file does not state, so it is assumed: {', '.join(assumed.values())}")
    if source.dropped:
        shown = ", ".join(source.dropped[:6]) + (", ..." if len(source.dropped) > 6 else "")
        found.append(f"no part of the model, left out: {shown}")
    return found


def _check_output(output: Path, target: Format, layout: Layout) -> None:
    suffix = output.suffix if output.suffix in (".safetensors", ".npz") else ""
    if suffix not in layout.suffixes:
        words = {"": "a directory", ".npz": "a .npz file", ".safetensors": "a .safetensors file"}
        wanted = " or ".join(words[kind] for kind in layout.suffixes)
        raise OutputError(f"the layout {target} is written to {wanted}", where=output)


# ---------------------------------------------------------------------------------------------
# Writing


def write(job: Conversion, force: bool = False) -> None:
    """Writes what was planned: the file, or all files of the folder, or none.

    Raises:
        OutputError: the target exists (without `force`), or cannot be written.
    """
    is_file = job.output.suffix in (".safetensors", ".npz")
    if job.output.exists() and not force:
        raise OutputError("exists already", where=job.output, hint="--force replaces it")
    file = job.output if is_file else job.output / "model.safetensors"
    if os.path.realpath(file) == os.path.realpath(job.source.file):
        raise OutputError("is the checkpoint itself: take another name", where=file)
    tensors = {name: _watched(name, tensor, job.nan) for name, tensor in job.tensors.items()}
    layout = layout_of(job.format)
    if ".npz" in layout.suffixes:
        npz.write(file, tensors)
    elif is_file:
        tensor_file.write(file, tensors, layout.metadata(job.info))
    else:
        with whole_folder(job.output) as folder:
            _write_folder(folder, job, layout, tensors)


def _write_folder(
    folder: Path, job: Conversion, layout: Layout, tensors: Mapping[str, LazyTensor]
) -> None:
    tensor_file.write(folder / "model.safetensors", tensors, layout.metadata(job.info))
    dtypes = {tensor.dtype for tensor in tensors.values()}
    dtype = max(dtypes, key=lambda name: tensor_file.numpy_dtype(name).itemsize)
    for name, table in layout.configs(job.info, dtype).items():
        text = json.dumps(table, indent=2, ensure_ascii=False) + "\n"
        write_text(folder / name, text)


def _watched(name: str, tensor: LazyTensor, nan: list[str]) -> LazyTensor:
    """The tensor; its name is noted when it is read and holds NaN."""

    def read() -> np.ndarray:
        import numpy as np

        array = tensor.read()
        with np.errstate(invalid="ignore"):
            if "float" in tensor.dtype and array.size and math.isnan(float(array.min())):
                nan.append(name)
        return array

    return LazyTensor(tensor.dtype, tensor.shape, read, tensor.extent)

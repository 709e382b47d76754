"""A checkpoint of any layout that we read, written in any that we write, tensor by tensor.

What a layout cannot express of a model is refused by name; what it has no place for (class names in
an .npz) is a warning.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vitcli.atomic import whole_directory, write_text
from vitcli.checkpoints import read
from vitcli.checkpoints.changes import Changes, change, zeros
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.save import write_config
from vitcli.checkpoints.store import write_npz
from vitcli.checkpoints.tensor_file import LazyTensor
from vitcli.checkpoints.tensor_file import write as write_tensors
from vitcli.config import ModelConfig, Size
from vitcli.errors import OutputError
from vitcli.hub import fetch as hub
from vitcli.layouts import keymaps, targets
from vitcli.layouts import transformers_config as hf
from vitcli.layouts.keymaps import Row
from vitcli.layouts.targets import NPZ, Format
from vitcli.posemb import sincos2d

if TYPE_CHECKING:
    import numpy as np


class Renamed(NamedTuple):
    """One tensor, in the source and in the target."""

    ours: str
    shape: tuple[int, ...]
    dtype: str
    """As it is written."""
    source: tuple[str, ...]
    """Names; none of a new tensor."""
    target: tuple[str, ...]
    was: str
    """Its shape and type in the source, where these change."""


@dataclass(frozen=True)
class Conversion:
    """What `write` will do: decided and checked, but not written yet."""

    source: read.Checkpoint
    output: Path
    is_file: bool
    """Whether the output is a file, not a directory."""
    format: Format
    info: CheckpointInfo
    ours: dict[str, LazyTensor]
    """Under our names, changed as asked for."""
    tensors: dict[str, LazyTensor]
    """The same under the names of the target."""
    renamed: dict[str, tuple[str, ...]]
    """Our names, and those of the target."""
    made: frozenset[str] = frozenset()
    """Our names of new tensors, which are zeros."""
    warnings: list[str] = field(default_factory=list)
    nan: list[str] = field(default_factory=list)
    """Names of tensors that hold NaN, known once they are written."""

    def names(self) -> Iterator[Renamed]:
        """Each tensor that is written."""
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
    """Writes a checkpoint in another layout; returns the file or directory.

    Args:
        spec: a path, a name or a Hub repo, of any layout that we read.
        output: a .safetensors or .npz file, or a directory.
        to: by default the authors' for .npz, else ours.
        changes: what else is changed.
        force: replace an existing output.
        old_grid: rows and columns of the position embeddings, if the file does not state them.
        offline: never use the network.
        allow_pickle: accept a Hub repo that has its weights only as a pickle; nothing in it is run.

    Raises:
        VitError: the source cannot be read, or the target cannot express it or be written.
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
    """Reads the source's header and decides what is written. Arguments and errors as `convert`."""
    located = read.locate(spec, offline, on_progress, allow_pickle)
    source = read.open_checkpoint(located.file, located.entry, old_grid)
    kind = _kind_of_output(output)
    info, tensors = change(source.info, source.tensors, changes or Changes())
    target = to or (targets.npz_of(info.model) if kind == ".npz" else "vit")
    _check_output(output, kind, target)
    if problems := targets.not_in(target, info.model):
        raise OutputError(
            f"the layout {target} cannot express this model: {', '.join(problems)}",
            where=source.file,
            hint="--drop-head leaves out the head and what stands before it"
            if any("pre_logits" in problem for problem in problems)
            else None,
        )
    warnings = [*_left_open(info, source), *targets.warnings(target, info.model)]
    saved, renamed = _renamed(target, info, tensors)
    new_head = changes is not None and changes.num_classes is not None
    made = frozenset(name for name in tensors if new_head and name.startswith("head"))
    is_file, path = bool(kind), Path(output)
    return Conversion(source, path, is_file, target, info, tensors, saved, renamed, made, warnings)


def _renamed(
    target: Format, info: CheckpointInfo, tensors: Mapping[str, LazyTensor]
) -> tuple[dict[str, LazyTensor], dict[str, tuple[str, ...]]]:
    """The target's tensors; our names and its."""
    model, rows = info.model, targets.rows(target, info.model)
    if rows is None:
        return dict(tensors), {name: (name,) for name in tensors}
    saved: dict[str, LazyTensor] = {}
    renamed: dict[str, tuple[str, ...]] = {}
    if isinstance(model, ModelConfig) and model.posemb == "sincos2d":
        _check_sincos(tensors["pos_embed"], model)
        renamed["pos_embed"] = ()
    for row in keymaps.expand(rows, model.depth):
        if set(row.ours) <= set(tensors) and not set(row.ours) <= set(renamed):
            saved |= _saved(row, tensors, getattr(model, "num_heads", 1))
            renamed |= dict.fromkeys(row.ours, row.theirs)
    dtype = next(iter(tensors.values())).dtype
    for name, shape in targets.unused(target, model).items():
        saved[name] = zeros(dtype, shape)
    if left := set(tensors) - set(renamed):
        raise OutputError(f"the layout {target} has no place for {', '.join(sorted(left))}")
    return saved, renamed


def shape_text(shape: tuple[int, ...]) -> str:
    """As in "48 x 3 x 16 x 16"."""
    return " x ".join(map(str, shape)) or "1"


def _left_open(info: CheckpointInfo, source: read.Checkpoint) -> list[str]:
    """Assumptions, and tensors that are left out."""
    found = []
    if assumed := info.provenance.get("assumed"):
        found.append(f"not stated in the file, so assumed: {', '.join(assumed)}")
    if source.dropped:
        shown = ", ".join(source.dropped[:6]) + (", ..." if len(source.dropped) > 6 else "")
        found.append(f"not part of the model, so left out: {shown}")
    return found


def _kind_of_output(output: str | Path) -> str:
    """A file's suffix; "" for a directory, which has none that looks like a file's, or exists, or
    ends with a slash."""
    suffix = Path(output).suffix
    file = re.fullmatch(r"\.[A-Za-z][A-Za-z0-9]*", suffix)
    directory = str(output).endswith(("/", os.sep)) or Path(output).is_dir()
    return suffix if file and not directory else ""


def _check_output(output: str | Path, kind: str, target: Format) -> None:
    kinds = (".npz",) if target in NPZ else ("", ".safetensors") if target == "vit" else ("",)
    if kind not in kinds:
        words = {"": "a directory", ".npz": "a .npz file", ".safetensors": "a .safetensors file"}
        wanted = " or ".join(words[kind] for kind in kinds)
        hint = "a directory's name may end with /" if kind not in words and "" in kinds else None
        raise OutputError(f"the layout {target} is written to {wanted}", where=output, hint=hint)


def _saved(
    row: Row, tensors: Mapping[str, LazyTensor], num_heads: int
) -> Iterator[tuple[str, LazyTensor]]:
    """The target's tensors of a row."""
    import numpy as np

    ours = [tensors[name] for name in row.ours]
    count = sum(tensor.shape[0] for tensor in ours) // len(row.theirs)

    def read(k: int) -> np.ndarray:
        whole = ours[0].read() if len(ours) == 1 else np.concatenate([t.read() for t in ours])
        array: np.ndarray = row.op.save(whole[k * count : (k + 1) * count], num_heads)
        return array

    each = np.broadcast_to(np.int8(0), (count, *ours[0].shape[1:]))
    shape = row.op.save(each, num_heads).shape
    for k, name in enumerate(row.theirs):
        yield name, LazyTensor(ours[0].dtype, shape, functools.partial(read, k))


def _check_sincos(tensor: LazyTensor, model: ModelConfig) -> None:
    """Raises OutputError if the table is not the one that big_vision computes."""
    import numpy as np

    if not np.array_equal(tensor.read(), sincos2d(model.grid, model.width)):
        raise OutputError("its sine-cosine position embeddings are not those of big_vision")


# ---------------------------------------------------------------------------------------------
# Writing


def write(job: Conversion, force: bool = False) -> None:
    """Writes what was planned: the file, or all files of the directory, or none.

    Raises:
        OutputError: the target exists (without `force`), or cannot be written.
    """
    if job.output.exists() and not force:
        raise OutputError("exists already", where=job.output, hint="--force replaces it")
    file = job.output if job.is_file else job.output / "model.safetensors"
    if os.path.realpath(file) == os.path.realpath(job.source.file):
        raise OutputError("is the source itself", where=file, hint="choose another output")
    tensors = {name: _watched(name, tensor, job.nan) for name, tensor in job.tensors.items()}
    if job.format in NPZ:
        write_npz(file, tensors)
    elif job.is_file:
        write_tensors(file, tensors, job.info.to_metadata())
    else:
        with whole_directory(job.output) as directory:
            _write_directory(directory, job, tensors)


def _write_directory(directory: Path, job: Conversion, tensors: Mapping[str, LazyTensor]) -> None:
    file = directory / "model.safetensors"
    if job.format == "vit":
        write_tensors(file, tensors, job.info.to_metadata())
        write_config(directory / "config.json", job.info)
        return
    kind = targets.transformers_kind(job.info.model)
    config, processor = hf.to_transformers(job.info, kind)
    config["dtype"] = "float32"  # else transformers would compute in the type that is stored
    write_tensors(file, tensors, {"format": "pt"})
    for name, table in (("preprocessor_config", processor), ("config", config)):
        text = json.dumps(table, indent=2, ensure_ascii=False) + "\n"
        write_text(directory / f"{name}.json", text)


def _watched(name: str, tensor: LazyTensor, nan: list[str]) -> LazyTensor:
    """The tensor; reading it notes its name if it holds NaN."""

    def read() -> np.ndarray:
        import numpy as np

        array = tensor.read()
        with np.errstate(invalid="ignore"):
            if "float" in tensor.dtype and array.size and math.isnan(float(array.min())):
                nan.append(name)
        return array

    return LazyTensor(tensor.dtype, tensor.shape, read)

"""Converting a checkpoint from any supported layout to any that can be written, tensor by tensor.

Model features that the target layout cannot express are errors; metadata that it cannot store
(class names in an .npz) is a warning.
"""

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import numpy as np

from vitcli.atomic import atomic_directory, write_json
from vitcli.checkpoints import read
from vitcli.checkpoints.average import average_models
from vitcli.checkpoints.changes import Changes, change, with_architecture
from vitcli.checkpoints.info import CheckpointInfo, assumptions_text
from vitcli.checkpoints.store import WRITERS
from vitcli.checkpoints.tensor_file import (
    LazyTensor,
    OnProgress,
    ignore_progress,
    with_progress,
)
from vitcli.config import Size
from vitcli.errors import ConfigError, OutputError
from vitcli.layouts.catalog import OURS, Format, default_format, formats, layout_of
from vitcli.weight_files import PROGRAMS, output_suffix


class TensorNames(NamedTuple):
    """A tensor's names in the source and in the target."""

    name: str
    """In vit's layout."""
    shape: tuple[int, ...]
    dtype: str
    """As written."""
    source: tuple[str, ...]
    """Names in the source; empty for a new tensor."""
    target: tuple[str, ...]
    was: str
    """Its shape and dtype in the source, if they change."""


@dataclass(frozen=True)
class Conversion:
    """A conversion that is planned and checked, for `write` to carry out."""

    source: read.Checkpoint
    others: list[read.Checkpoint]
    """Checkpoints that `source` is averaged with."""
    output: Path
    is_file: bool
    """Whether the output is a file, not a directory."""
    format: Format
    info: CheckpointInfo
    tensors: dict[str, LazyTensor]
    """By their names in the target, with all changes applied."""
    names: list[TensorNames]
    """One for each tensor of the model."""
    warnings: list[str]
    nan: list[str] = field(default_factory=list)
    """Names of tensors that contain NaN, filled in as they are written."""

    def to_json(self) -> dict[str, Any]:
        """A summary of source and output, with an entry for each tensor."""
        rows = [row._asdict() for row in self.names]
        return {
            "source": str(self.source.file),
            "averaged_with": [str(other.file) for other in self.others],
            "layout": self.source.layout,
            "output": str(self.output),
            "format": self.format,
            "tensors": len(self.tensors),
            "parameters": self.info.model.num_params(),
            "dropped": self.source.dropped,
            "nan": self.nan,
            "warnings": self.warnings,
            "names": [{k: v for k, v in row.items() if k != "was"} for row in rows],
        }


def convert(
    spec: str | Path,
    output: str | Path,
    to: Format | None = None,
    changes: Changes | None = None,
    average: Sequence[str] = (),
    *,
    force: bool = False,
    old_grid: Size | None = None,
    offline: bool = False,
    allow_pickle: bool = False,
) -> Path:
    """Convert a checkpoint to another layout; return the output file or directory.

    Args:
        spec: a path, a model name such as "default", or a Hub repo, "org/name[@revision]".
        output: a .safetensors or .npz file, or a directory.
        to: the target layout; by default the authors' for .npz, else ours.
        changes: what else to change.
        average: models to average with `spec`.
        force: replace an existing output.
        old_grid: rows and columns of the position embeddings, if the file does not state them.
        offline: never use the network.
        allow_pickle: accept Hub repos that have only pickled weights; no code in them is run.

    Raises:
        VitError: the source cannot be read, or the target cannot express the model or be written.
    """
    fetching: read.Fetching = {"offline": offline, "allow_pickle": allow_pickle}
    job = plan_convert(spec, output, to, changes, average, old_grid, **fetching)
    write(job, force)
    return job.output


def plan_convert(
    spec: str | Path,
    output: str | Path,
    to: Format | None = None,
    changes: Changes | None = None,
    average: Sequence[str] = (),
    old_grid: Size | None = None,
    **fetching: Unpack[read.Fetching],
) -> Conversion:
    """Read the source's header and plan the output. Arguments and errors are those of `convert`."""
    output = os.path.expanduser(output)
    check_output(output, to)
    suffix, changes = output_suffix(output), Changes() if changes is None else changes
    if not isinstance(changes, Changes):
        what = f"changes: must be a Changes object, not {changes!r}"
        raise ConfigError(what, hint="import Changes from vitcli.checkpoints.changes")
    specs = [str(spec), *([average] if isinstance(average, str) else average)]
    stored = (read.open_checkpoint(name, old_grid, **fetching) for name in specs)
    models = [
        dataclasses.replace(model, info=with_architecture(model.info, changes)) for model in stored
    ]
    source, *others = models
    info, tensors = source.info, source.tensors
    if others:
        # In float64 until `change` rounds it, so that it is rounded only once.
        info, tensors = average_models(models, specs, "float64" if changes.dtype else None)
    info, tensors = change(info, tensors, changes)
    target = to or default_format(info.model, suffix)
    layout = layout_of(target)
    if problems := layout.unsupported(info.model):
        hint = "use vit's own layout: a directory or a .safetensors file as DST, without --to"
        if suffix == ".npz" and to is None and not layout_of("big_vision").unsupported(info.model):
            hint = "pass --to big_vision"
        headless, _ = change(info, tensors, Changes(drop_head=True))
        if not layout.unsupported(headless.model):
            hint = "pass --drop-head to leave out the head and the pre_logits layer before it"
        raise OutputError(
            f"the {target} layout cannot express this model: {', '.join(problems)}",
            where=source.file,
            hint=hint,
        )
    warnings = [*_source_warnings(info, source), *layout.warnings(info)]
    saved, target_names = layout.save(info.model, tensors)
    names = []
    for name, new in tensors.items():
        is_new = name.startswith("head") and changes.num_classes is not None
        old = new if is_new else source.tensors[name]
        was = [" x ".join(map(str, old.shape))] if old.shape != new.shape else []
        was += [old.dtype] if old.dtype != new.dtype else []
        names.append(
            TensorNames(name, new.shape, new.dtype, new.sources, target_names[name], " ".join(was))
        )
    path, is_file = Path(output), bool(suffix)
    return Conversion(source, others, path, is_file, target, info, saved, names, warnings)


def _source_warnings(info: CheckpointInfo, source: read.Checkpoint) -> list[str]:
    """Warnings about assumptions and about tensors that are left out."""
    warnings = []
    if assumed := assumptions_text(info):
        warnings.append(assumed)
    if source.dropped:
        names = ", ".join(source.dropped[:6]) + (", ..." if len(source.dropped) > 6 else "")
        warnings.append(f"not part of the model, so left out: {names}")
    return warnings


def check_output(output: str | Path, to: Format | None) -> None:
    """Raise ConfigError if an output of this kind (file suffix or directory) cannot hold the
    layout `to`, or the default for the suffix."""
    suffix, target = output_suffix(output), to or OURS
    if target not in formats():
        raise ConfigError(f"no layout '{target}'", hint=f"choose from {', '.join(formats())}")
    layout = layout_of(target)
    if suffix in layout.suffixes or (to is None and suffix == ".npz"):
        return
    expected = " or ".join(f"a {s} file" if s else "a directory" for s in layout.suffixes)
    hint = "end DST with / to write a directory"
    if suffix in PROGRAMS:
        hint = "use `vit export`"
    is_known = suffix in ("", *WRITERS) or "" not in layout.suffixes
    raise ConfigError(
        f"the {target} layout requires {expected}",
        where=output,
        hint=None if is_known else hint,
    )


# ---------------------------------------------------------------------------------------------
# Writing


_SPLIT = "split.json"
"""The split that a model was trained on, by which `vit evaluate` finds the images held out."""


def write(job: Conversion, force: bool = False, on_progress: OnProgress = ignore_progress) -> None:
    """Write a planned conversion: the file or all files of the directory, or nothing at all.

    Args:
        force: replace an existing output.

    Raises:
        OutputError: the target exists (without `force`), or cannot be written.
    """
    if job.output.exists() and not force:
        hint = "use --force to replace it"
        if not job.is_file:
            hint = "choose another DST, or use --force to write into this directory"
        raise OutputError("already exists", where=job.output, hint=hint)
    file = job.output if job.is_file else job.output / "model.safetensors"
    sources = [os.path.realpath(source.file) for source in (job.source, *job.others)]
    if os.path.realpath(file) in sources:
        raise OutputError(
            "source and output are the same file", where=file, hint="choose another path"
        )
    if not job.is_file and _is_run(job.output):
        raise OutputError(
            "contains a run, whose card and figures would describe another model",
            where=job.output,
            hint="choose another DST",
        )
    recording = {name: _record_nan(name, tensor, job.nan) for name, tensor in job.tensors.items()}
    tensors = with_progress(recording, on_progress)
    layout, write_weights = layout_of(job.format), WRITERS[file.suffix]
    if job.is_file:
        write_weights(file, tensors, layout.metadata(job.info))
    else:
        with atomic_directory(job.output) as directory:
            write_weights(directory / file.name, tensors, layout.metadata(job.info))
            configs = layout.configs(job.info)
            for name, config in configs.items():
                write_json(directory / name, config)
            paths = [model.file.with_name(_SPLIT) for model in (job.source, *job.others)]
            splits = {path.read_bytes() for path in paths if path.is_file()}
            if len(splits) == 1:
                (directory / _SPLIT).write_bytes(splits.pop())
            written = {path.name for path in directory.iterdir()}
        for name in {*layout.config_files, _SPLIT} - written:  # of the model that was replaced
            (job.output / name).unlink(missing_ok=True)


def _is_run(directory: Path) -> bool:
    """Whether a directory is that of a run, finished or not. A converted model may have a split."""

    def has(name: str) -> bool:
        return (directory / name).exists()

    return has("metrics.jsonl") or (has(_SPLIT) and (has("README.md") or has("state")))


def _record_nan(name: str, tensor: LazyTensor, nan: list[str]) -> LazyTensor:
    """Wrap a tensor so that reading it adds its name to `nan` if it contains NaN."""

    def read() -> np.ndarray:
        array = tensor.read()
        with np.errstate(invalid="ignore"):
            if "float" in tensor.dtype and array.size and math.isnan(float(array.min())):
                nan.append(name)
        return array

    return tensor._replace(read=read)

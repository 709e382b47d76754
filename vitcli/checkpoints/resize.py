"""Resizing the position embeddings of a checkpoint on disk; all other tensors are kept bit for bit.

One tensor is in memory at a time, and only pickles require torch. The layout is kept, except that a
pickle is converted to ours; shards become one file.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from vitcli.atomic import atomic_directory, write_json, write_text
from vitcli.checkpoints import read
from vitcli.checkpoints.adapt import actual_method, adapt_tensor, at_size, resize_record
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.save import write_config, write_weights
from vitcli.checkpoints.store import open_store, rewrite
from vitcli.checkpoints.tensor_file import (
    RESIZE_KEY,
    OnProgress,
    ignore_progress,
    with_progress,
)
from vitcli.config import Architecture, ModelConfig, PosembMethod, Size
from vitcli.errors import CheckpointError, ConfigError, OutputError
from vitcli.hub import readme, registry
from vitcli.layouts.catalog import LAYOUTS, config_files
from vitcli.layouts.foreign_json import read_json
from vitcli.layouts.transformers import MODEL_TYPES, read_config
from vitcli.weight_files import SUFFIXES, is_own_file, output_suffix


@dataclass(frozen=True)
class Resize:
    """A resize that is planned and checked, for `resize_posemb` to carry out."""

    checkpoint: read.Checkpoint
    file: Path
    """The weights file to write."""
    output: Path
    """The same, or the directory to write."""
    directory: Path | None
    """The input directory, whose other files are copied; None if the input is a single file."""
    info: CheckpointInfo
    """The description of the output."""
    method: PosembMethod
    tables: Mapping[str, np.ndarray]
    """The position embeddings of the input, by our names."""
    resized: Mapping[str, np.ndarray]
    """Those of the output; empty if the grid does not change."""

    @property
    def source(self) -> Path:
        """The weights file to read; for shards, the index."""
        return self.checkpoint.file

    @property
    def in_place(self) -> bool:
        """Whether the output replaces the input."""
        return os.path.realpath(self.file) == os.path.realpath(self.source)

    @property
    def is_converted(self) -> bool:
        """Whether the output is in our layout, whatever the input's."""
        return self.checkpoint.kind == "pickle"

    @property
    def models(self) -> tuple[Architecture, Architecture]:
        """The models of the input and of the output."""
        return self.checkpoint.info.model, self.info.model

    @property
    def record(self) -> dict[str, Any]:
        """The provenance record, an `info.Resized`."""
        return resize_record(*self.models, self.method)

    def to_json(self) -> dict[str, Any]:
        """Paths, the provenance record and the difference."""
        paths = {"source": str(self.source), "output": str(self.output)}
        return {**paths, **self.record, "difference": self.difference()}

    def difference(self) -> float:
        """The information lost on the new grid: the RMS change of the embeddings after resizing to
        it and back, relative to their RMS."""
        old, new = self.models
        error = size = 0.0
        for name, table in self.tables.items():
            restored = adapt_tensor(name, self.resized.get(name, table), new, old, self.method)
            prefix = old.posemb_prefix if name == "pos_embed" else 0
            original = table.astype(np.float64)[:, prefix:]
            error += float(((restored.astype(np.float64)[:, prefix:] - original) ** 2).sum())
            size += float((original**2).sum())
        return (error / size) ** 0.5 if size else 0.0

    def changed_tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
        """The new tables by their names in the file, each with as many axes as the one it replaces.

        Args:
            shapes: the shapes of the file's tensors, by their names in the file.
        """
        tensors = {}
        for ours, table in self.resized.items():
            theirs = self.checkpoint.tensors[ours].sources[0]
            squeezed = len(shapes[theirs]) < table.ndim
            tensors[theirs] = table[0] if squeezed else table
            ids = theirs.replace("position_embedding.weight", "position_ids")  # 0, 1, 2, ...
            if squeezed and ids in self.checkpoint.dropped:
                tensors[ids] = np.arange(table.shape[1], dtype=np.int64)[None]
        return tensors


def plan_resize(
    spec: str | Path,
    *,
    grid: Size | None = None,
    resolution: Size | None = None,
    method: PosembMethod = "bilinear",
    output: str | Path | None = None,
    in_place: bool = False,
    old_grid: Size | None = None,
    **fetching: Unpack[read.Fetching],
) -> Resize:
    """Read a checkpoint's header and its position embeddings, and resize them in memory.

    Args:
        spec: a path, a model name such as "default", or a Hub repo, "org/name[@revision]".
        grid: rows and columns of patches.
        resolution: height and width of the images, instead of `grid`.
        output: a file of the input's kind, or a directory; by default beside the input, with the
            grid in its name.
        in_place: replace the input.
        old_grid: rows and columns of the stored embeddings, if the checkpoint does not state them.

    Raises:
        ConfigError: the model does not support the size.
        CheckpointError: the checkpoint has no position embeddings or cannot be read.
        OutputError: the output path is missing or not possible.
    """
    registry.resolve(spec)  # raises if there is no such model
    path = Path(spec)
    if output is None and not path.exists():
        raise OutputError(
            "this is a model name, not a path, so --output is required",
            where=spec,
            hint="pass -o OUT instead of --in-place" if in_place else "add it, such as -o larger",
        )
    checkpoint = read.open_checkpoint(spec, old_grid, **fetching)
    old, info = checkpoint.info.model, checkpoint.info
    if not isinstance(old, ModelConfig):
        raise CheckpointError("a ResNet has no position embeddings", where=checkpoint.file)
    size = resolution or old.image_size
    if grid is not None:
        size = grid[0] * old.patch_size[0], grid[1] * old.patch_size[1]
    method, tables, resized = actual_method(old, method), _read_tables(checkpoint), {}
    if size != old.image_size and grid != old.grid:
        info = at_size(info, size, method)
        resized = {n: adapt_tensor(n, t, old, info.model, method) for n, t in tables.items()}
        _check_square(checkpoint, size)
    target, is_directory = _output_path(path, checkpoint, info.model.grid, output, in_place)
    name = checkpoint.file.name if checkpoint.kind in _ONE_FILE else "model.safetensors"
    file = target / name if is_directory else target
    if output is not None and os.path.realpath(file) == os.path.realpath(checkpoint.file):
        raise OutputError(
            "source and output are the same file",
            where=file,
            hint="to replace it, pass --in-place instead of --output",
        )
    # The configuration beside it is that of a file with the standard name or an index of shards.
    has_config = checkpoint.file.name == "model.safetensors" or checkpoint.file.suffix == ".json"
    directory = checkpoint.file.parent if has_config or not path.is_file() else None
    return Resize(checkpoint, file, target, directory, info, method, tables, resized)


def _read_tables(checkpoint: read.Checkpoint) -> dict[str, np.ndarray]:
    """The position embeddings stored in the file. Raises CheckpointError if there are none."""
    model = checkpoint.info.model
    names = [name for name in model.posemb_tables if checkpoint.tensors[name].sources]
    if not names:
        kinds = {"sine-cosine": model.posemb == "sincos2d", "rotary": model.rope != "none"}
        computed = next((name for name, used in kinds.items() if used), None)
        raise CheckpointError(
            "no position embeddings to resize",
            where=checkpoint.file,
            hint=f"the model computes {computed} embeddings for any grid" if computed else None,
        )
    return {name: checkpoint.tensors[name].read() for name in names}


def _check_square(checkpoint: read.Checkpoint, size: Size) -> None:
    """Raise ConfigError if the model's class in transformers could not load the result."""
    if checkpoint.layout != "transformers" or size[0] == size[1]:
        return
    model_type = read_config(checkpoint.file.parent).get("model_type", str, "")
    if model_type and MODEL_TYPES[model_type].square_only:
        raise ConfigError(
            f"{model_type} in transformers supports only square images",
            where=checkpoint.file,
            hint="convert it to timm's layout, which supports any size, with `vit convert`",
        )


_ONE_FILE = ("safetensors", "npz")
"""Kinds of files that are written with the same name, and in place."""


def _output_path(
    path: Path,
    checkpoint: read.Checkpoint,
    grid: Size,
    output: str | Path | None,
    in_place: bool,
) -> tuple[Path, bool]:
    """The output path, and whether it is a directory. Raises OutputError."""
    file, kind = checkpoint.file, checkpoint.kind
    suffix = ".npz" if kind == "npz" else ".safetensors"
    if in_place and kind not in _ONE_FILE:
        raise OutputError(
            "only a single safetensors or npz file can be resized in place",
            where=file,
            hint="pass -o OUT instead of --in-place",
        )
    if output is not None:
        given_suffix = output_suffix(output)
        if given_suffix and given_suffix != suffix:
            raise OutputError(
                f"this checkpoint must be written as a {suffix} file",
                where=output,
                hint="to write another format, use `vit convert`",
            )
        return Path(output), not given_suffix
    is_directory = path.is_dir() or file.suffix == ".json"  # an index of shards
    if in_place:
        return (file.parent if is_directory else file), is_directory
    if is_directory:
        directory = file.parent if file.parent.name.strip(".") else file.parent.resolve()
        return directory.with_name(f"{directory.name}-{grid[0]}x{grid[1]}"), True
    stem = file.stem.removesuffix(".pth")  # of .pth.tar
    return file.with_name(f"{stem}-{grid[0]}x{grid[1]}{suffix}"), False


# ---------------------------------------------------------------------------------------------
# Writing


def resize_posemb(
    job: Resize, force: bool = False, on_progress: OnProgress = ignore_progress
) -> None:
    """Write a planned resize: the file or all files of the directory, or nothing at all.

    Args:
        force: replace an existing output.

    Raises:
        CheckpointError: a configuration beside the weights cannot be read.
        OutputError: the output exists (without `force`) or cannot be written.
    """
    if job.in_place and not job.resized:
        return
    is_directory = job.output != job.file
    is_empty = is_directory and job.output.is_dir() and not any(job.output.iterdir())
    if job.output.exists() and not job.in_place and not is_empty and not force:
        raise OutputError("already exists", where=job.output, hint="use --force to replace it")
    if not is_directory and not (job.in_place and job.directory):
        _write_weights(job, job.file, on_progress)
        return
    # In place, weights are moved first: the grid in them overrides any configuration.
    with atomic_directory(job.file.parent) as directory:
        _write_weights(job, directory / job.file.name, on_progress)
        if not job.in_place:
            _copy_other_files(job, directory)
        if job.directory and job.resized:
            _resize_configs(job, job.directory, directory)
        has_config = (directory / "config.json").is_file() or job.in_place
        if job.is_converted or (job.checkpoint.layout == "vit" and not has_config):
            write_config(directory / "config.json", job.info)


def _write_weights(job: Resize, file: Path, on_progress: OnProgress) -> None:
    """Write the file with the new position embeddings."""
    if job.is_converted:
        tensors = {**job.checkpoint.tensors, **job.resized}
        write_weights(file, with_progress(tensors, on_progress), job.info)
        return
    store, metadata = open_store(job.source), dict[str, str]()
    if job.resized:
        is_ours = job.checkpoint.layout == "vit"
        metadata = job.info.to_metadata() if is_ours else {RESIZE_KEY: json.dumps(job.record)}
    changed = {**store.tensors, **job.changed_tensors(store.shapes)}
    rewrite(replace(store, tensors=with_progress(changed, on_progress)), file, metadata)


def _copy_other_files(job: Resize, directory: Path) -> None:
    """Copy the other files of a model's directory, such as its card, but no other weights."""
    for path in job.directory.iterdir() if job.directory else ():
        weights = path.suffix in SUFFIXES or path.name.endswith(".index.json")
        if is_own_file(path) and not weights and path.name[0] != ".":
            shutil.copyfile(path, directory / path.name)


def _resize_configs(job: Resize, source: Path, directory: Path) -> None:
    """Write the source's configurations with the new size, and its card with a note about it."""
    old, new = job.models[0].image_size, job.models[1].image_size
    if is_own_file(source / "README.md"):
        card = (source / "README.md").read_text("utf-8", errors="replace")
        write_text(directory / "README.md", readme.mark_resized(card, old, new))
    for name in config_files():
        if (config := read_json(source / name)) is None:
            continue
        configs = (layout.resized_config(name, config, job.info) for layout in LAYOUTS)
        if (resized := next((c for c in configs if c is not None), None)) is not None:
            write_json(directory / name, resized)

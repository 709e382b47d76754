"""Position embeddings of a checkpoint on disk, resized: one tensor changes, the rest is copied.

No torch (but for a pickle), and no tensor in memory but the one that changes: what is around it
goes from file to file. Every layout stays what it is; a pickle, which is read and not written,
becomes safetensors in ours.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitcli.atomic import whole_folder, write_text
from vitcli.checkpoints import read, store, tensor_file
from vitcli.checkpoints.adapt import adapt_tensor, at_size
from vitcli.checkpoints.companions import copy_companions, resize_configs
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.rewrite import (
    RECORD,
    copy_file,
    record_text,
    rewrite_npz,
    rewrite_safetensors,
)
from vitcli.checkpoints.save import write_config
from vitcli.config import ModelConfig, PosembMethod, Size
from vitcli.errors import CheckpointError, ConfigError, OutputError
from vitcli.hub import fetch as hub
from vitcli.hub import registry

if TYPE_CHECKING:
    import numpy as np

TABLES = ("pos_embed", "pos_embed_row", "pos_embed_column")


@dataclass(frozen=True)
class Resize:
    """What `resize_posemb` does: read, decided and checked, but not written yet."""

    checkpoint: read.Checkpoint
    kind: str
    """Of its file: "safetensors", "shards", "npz" or "pickle"."""
    output: Path
    is_folder: bool
    """Whether the output is a folder."""
    folder: Path | None
    """The input's, whose other files go along; None where the input is a file by itself."""
    info: CheckpointInfo
    """As the output will say it."""
    models: tuple[ModelConfig, ModelConfig]
    """Of the input and of the output."""
    method: PosembMethod
    tables: Mapping[str, np.ndarray]
    """The position embeddings as they are, under our names."""
    resized: Mapping[str, np.ndarray]
    """And as they will be; none where the grid stays."""

    @property
    def source(self) -> Path:
        """The file that is read; of shards the index."""
        return self.checkpoint.file

    @property
    def file(self) -> Path:
        """The file that is written; of shards the index."""
        if not self.is_folder:
            return self.output
        return self.output / ("model.safetensors" if self.kind == "pickle" else self.source.name)

    @property
    def record(self) -> dict[str, Any]:
        """What the output says of the resize."""
        old, new = self.models
        return {"method": self.method, "from": list(old.grid), "to": list(new.grid)}

    @property
    def in_place(self) -> bool:
        return os.path.realpath(self.file) == os.path.realpath(self.source)

    def changed(self) -> dict[str, np.ndarray]:
        """The new tables under the file's names, in its shapes."""
        import numpy as np

        found = {}
        for ours, table in self.resized.items():
            theirs = self.checkpoint.sources.get(ours, (ours,))[0]
            two_axes = theirs.endswith((".position_embedding.weight", "positional_embedding"))
            found[theirs] = table[0] if two_axes else table
            ids = theirs.replace("position_embedding.weight", "position_ids")  # 0, 1, 2, ...
            if two_axes and ids in self.checkpoint.dropped:
                found[ids] = np.arange(table.shape[1], dtype=np.int64)[None]
        return found

    def loss(self) -> float:
        """How far the embeddings are after the way there and back, relative to their size: what
        the new grid cannot hold (root mean square over the grid's part)."""
        import numpy as np

        back, there = self.models
        error = size = 0.0
        for name, table in self.tables.items():
            again = adapt_tensor(name, self.resized.get(name, table), there, back, self.method)
            prefix = back.posemb_prefix if name == "pos_embed" else 0
            grid = np.asarray(table, np.float64)[:, prefix:]
            error += float(((np.asarray(again, np.float64)[:, prefix:] - grid) ** 2).sum())
            size += float((grid**2).sum())
        return (error / size) ** 0.5 if size else 0.0


def plan_resize(
    spec: str | Path,
    *,
    grid: Size | None = None,
    resolution: Size | None = None,
    method: PosembMethod = "bilinear",
    output: str | Path | None = None,
    in_place: bool = False,
    old_grid: Size | None = None,
    offline: bool = False,
    on_progress: hub.Progress | None = None,
    allow_pickle: bool = False,
) -> Resize:
    """Reads a checkpoint's header and its position embeddings and resizes them in memory.

    Args:
        spec: a file of any layout that we read, a model's folder, a name or a Hub repo.
        grid: rows and columns of patches wanted, or `resolution`: height and width of the images.
        output: a file of the input's kind, or a folder; by default beside the input, under its
            name and the grid.
        in_place: the input is the output.
        old_grid: rows and columns of today's table, where the checkpoint does not say.

    Raises:
        ConfigError: neither or both sizes, or one that the model cannot have.
        CheckpointError: the checkpoint has no position embeddings, or cannot be read.
        OutputError: there is no place for the output.
    """
    if (grid is None) == (resolution is None):
        raise ConfigError("give either a grid or a resolution")
    registry.resolve(spec)  # which raises where there is no such model
    if output is None and not Path(spec).expanduser().exists():
        raise OutputError(
            "is not a file here: it has no place beside it", where=spec, hint="say where: -o OUT"
        )
    source = read.locate(spec, offline, on_progress, allow_pickle)
    opened = read.open_checkpoint(source.file, source.entry, old_grid)
    model, kind = opened.info.model, store.kind_of(source.file)
    if not isinstance(model, ModelConfig):
        raise CheckpointError("is a ResNet: it has no position embeddings", where=source.file)
    if grid is not None:
        resolution = grid[0] * model.patch_size[0], grid[1] * model.patch_size[1]
    assert resolution is not None
    tables = _tables(opened)
    info, new, resized = opened.info, model, {}
    if resolution != model.image_size and grid != model.grid:
        info, new = at_size(info, resolution, method), model.at(resolution)
        resized = {n: adapt_tensor(n, t, model, new, method) for n, t in tables.items()}
        _check_square(opened, new)
    is_folder, path = _output(spec, source.file, kind, new.grid, output, in_place)
    if kind == "pickle" and not resized:
        raise CheckpointError(
            f"has a grid of {new.grid[0]} x {new.grid[1]} already, and pickles are not written",
            where=source.file,
            hint="`vit convert` makes safetensors of it",
        )
    lone = Path(spec).expanduser().is_file() and not _is_standard(source.file)
    folder = None if lone else source.file.parent
    return Resize(
        opened, kind, path, is_folder, folder, info, (model, new), method, tables, resized
    )


def _is_standard(file: Path) -> bool:
    """Whether a file is the one that the config.json beside it is about."""
    return file.name in ("model.safetensors", "model.safetensors.index.json")


def _tables(opened: read.Checkpoint) -> dict[str, np.ndarray]:
    """The position embeddings that the file holds. Raises CheckpointError where there are none."""
    names = [n for n in TABLES if n in opened.tensors and opened.sources.get(n, (n,))]
    if not names:
        computed = getattr(opened.info.model, "posemb", None) == "sincos2d"
        raise CheckpointError(
            "has no position embeddings to resize",
            where=opened.file,
            hint="they are sines and cosines, computed for any grid" if computed else None,
        )
    return {name: opened.tensors[name].read() for name in names}


def _check_square(opened: read.Checkpoint, model: ModelConfig) -> None:
    """Raises ConfigError where transformers' class could not load the result."""
    from vitcli.layouts.transformers import KINDS, read_config

    height, width = model.image_size
    if opened.layout != "transformers" or height == width:
        return
    config = read_config(opened.file.parent)
    kind = config.text("model_type") if config is not None else ""
    if kind and KINDS[kind].square:
        raise ConfigError(
            f"transformers' {kind} takes square images only",
            where=opened.file,
            hint="`vit convert` writes it in timm's layout, which takes any",
        )


SUFFIXES = {"safetensors": ".safetensors", "pickle": ".safetensors", "npz": ".npz"}
"""Of the file that is written, by the kind of the one that is read."""


def _output(
    spec: str | Path,
    file: Path,
    kind: str,
    grid: Size,
    output: str | Path | None,
    in_place: bool,
) -> tuple[bool, Path]:
    """Where the result goes, and whether that is a folder. Raises ConfigError and OutputError."""
    path = Path(spec).expanduser()
    if in_place and output is not None:
        raise ConfigError("--in-place and -o contradict each other")
    if in_place and kind == "pickle":
        raise OutputError(
            "is a pickle, which is read and not written", where=file, hint="say where: -o OUT"
        )
    several = kind == "shards"
    if output is not None:
        path = Path(output)
        is_folder = path.suffix not in (".safetensors", ".npz", ".bin", ".pth", ".pt")
        if not is_folder and (several or path.suffix != SUFFIXES[kind]):
            wanted = "several files, in a folder" if several else f"a {SUFFIXES[kind]} file"
            raise OutputError(
                f"what is resized here is written as {wanted}",
                where=path,
                hint="`vit convert` writes other kinds",
            )
        return is_folder, path
    is_folder = several or path.is_dir()
    if is_folder:
        path = path if path.is_dir() else path.parent
        whole = path.resolve()
        return True, path if in_place else whole.with_name(f"{whole.name}-{grid[0]}x{grid[1]}")
    name = f"{file.stem.removesuffix('.pth')}-{grid[0]}x{grid[1]}{SUFFIXES[kind]}"
    return False, file if in_place else file.with_name(name)


def resize_posemb(job: Resize, force: bool = False) -> None:
    """Writes what was planned: a file, or all files of a folder, whole or not at all.

    Other bytes, their order and the header's other entries stay. A grid that is today's gives a
    copy, bit for bit.

    Raises:
        OutputError: the output exists (without `force`), or cannot be written.
    """
    if job.in_place and not job.resized:
        return
    empty = job.is_folder and job.output.is_dir() and not any(job.output.iterdir())
    if job.output.exists() and not job.in_place and not empty and not force:
        raise OutputError("exists already", where=job.output, hint="--force replaces it")
    if job.is_folder:
        with whole_folder(job.output) as folder:
            _write_folder(job, folder)
        return
    _write_weights(job, job.output)
    if job.in_place and job.folder:  # a file of the standard name, which its config.json is about
        resize_configs(job.folder, job.folder, job.models[0].image_size, job.info)


def _write_folder(job: Resize, folder: Path) -> None:
    """The weights, and what stands beside them."""
    _write_weights(job, folder / job.file.name)
    if job.folder and not job.in_place:
        copy_companions(job.folder, folder)
    if job.folder and job.resized:
        resize_configs(job.folder, folder, job.models[0].image_size, job.info)
    described = (folder / "config.json").is_file() or job.in_place
    if job.kind == "pickle" or (job.checkpoint.layout == "vit" and not described):
        write_config(folder / "config.json", job.info)


def _write_weights(job: Resize, file: Path) -> None:
    if job.kind == "pickle":
        tensor_file.write(file, {**job.checkpoint.tensors, **job.resized}, job.info.to_metadata())
    elif job.kind == "shards":
        _write_shards(job, file)
    elif not job.resized:
        copy_file(job.source, file)
    elif job.kind == "npz":
        rewrite_npz(job.source, file, job.changed(), job.record)
    else:
        _write_safetensors(job, job.source, file)


def _write_safetensors(job: Resize, source: Path, file: Path) -> int:
    """One file with the new tables, which says so; returns by how many bytes its tensors grew."""
    said = {RECORD: record_text(job.record)}
    if job.checkpoint.layout == "vit":
        said = job.info.to_metadata()
    metadata = {**tensor_file.read_header(source).metadata, **said}
    return rewrite_safetensors(source, file, job.changed(), metadata)


def _write_shards(job: Resize, index: Path) -> None:
    """The shards, of which those with the tables are others, and then their index."""
    table: dict[str, Any] = json.loads(job.source.read_text("utf-8"))
    names: dict[str, str] = table["weight_map"]
    resized = {names[name] for name in job.changed()}
    grown = 0
    for name in sorted(set(names.values())):
        source, file = job.source.with_name(name), index.with_name(name)
        if name in resized:
            grown += _write_safetensors(job, source, file)
        elif not job.in_place:
            copy_file(source, file)
    about = table.get("metadata")
    if isinstance(about, dict) and isinstance(about.get("total_size"), int):
        about["total_size"] += grown
    text = json.dumps(table, indent=2, ensure_ascii=False) + "\n"
    write_text(index, text if resized else job.source.read_text("utf-8"))


def similarity(tables: Mapping[str, np.ndarray], model: ModelConfig) -> np.ndarray:
    """Cosine similarity of each patch's position embedding with every other, as tiles:
    (rows * rows, columns * columns), tile (i, j) for the patch in row i and column j."""
    import numpy as np

    rows, columns = model.grid
    if "pos_embed" in tables:
        x = np.asarray(tables["pos_embed"], np.float64)[0, model.posemb_prefix :]
    else:  # D/2 of the column, then D/2 of the row
        across, down = (np.asarray(tables[f"pos_embed_{k}"], float)[0] for k in ("column", "row"))
        x = np.concatenate([np.tile(across, (rows, 1)), np.repeat(down, columns, 0)], axis=1)
    x = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    tiles: np.ndarray = (x @ x.T).reshape(rows, columns, rows, columns).transpose(0, 2, 1, 3)
    return tiles.reshape(rows * rows, columns * columns)

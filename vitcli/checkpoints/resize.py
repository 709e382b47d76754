"""Position embeddings of a checkpoint on disk, resized: one tensor changes, the rest is copied.

No torch, and no tensor in memory but the one that changes: what is around it goes from file to
file in pieces.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from vitcli.atomic import whole_file, write_text
from vitcli.checkpoints import hub, native, npz, read, stores
from vitcli.checkpoints.adapt import adapt_tensor, at_size
from vitcli.checkpoints.native import CheckpointInfo, Header, LazyTensor
from vitcli.checkpoints.save import write_config
from vitcli.config import ModelConfig, PosembMethod, Size
from vitcli.errors import CheckpointError, ConfigError, OutputError

if TYPE_CHECKING:
    import numpy as np

TABLES = ("pos_embed", "pos_embed_row", "pos_embed_column")
PIECE = 1 << 22
"""Bytes that are copied at once."""


@dataclass(frozen=True)
class Resize:
    """What `resize_posemb` does: read, decided and checked, but not written yet."""

    source: Path
    """A safetensors file in timm's layout, or an .npz of the authors or of big_vision."""
    output: Path
    """A file of the same kind, or a folder that holds one."""
    header: Header | None
    """None for an .npz."""
    info: CheckpointInfo
    """As the output will say it."""
    old: CheckpointInfo
    models: tuple[ModelConfig, ModelConfig]
    """Of the input and of the output."""
    tables: Mapping[str, np.ndarray]
    """The position embeddings as they are."""
    resized: Mapping[str, np.ndarray]
    """And as they will be; none where the grid stays."""

    source_name: str = "pos_embed"
    """What an .npz calls the table."""

    @property
    def file(self) -> Path:
        """The safetensors file that is written."""
        is_file = self.output.suffix in (".safetensors", ".npz")
        return self.output if is_file else self.output / "model.safetensors"

    def loss(self) -> float:
        """How far the embeddings are after the way there and back, relative to their size: what
        the new grid cannot hold (root mean square over the grid's part)."""
        import numpy as np

        back, there = self.models
        method = self.info.provenance.get("posemb_resize", {}).get("method", "bilinear")
        error = size = 0.0
        for name, table in self.tables.items():
            again = adapt_tensor(name, self.resized.get(name, table), there, back, method)
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
) -> Resize:
    """Reads a checkpoint's header and its position embeddings and resizes them in memory.

    Args:
        spec: a safetensors file, a model's folder, a name or a Hub repo.
        grid: rows and columns of patches wanted, or `resolution`: height and width of the pictures.
        output: a .safetensors file or a folder; by default beside the input, under its name and
            the grid.
        in_place: the input is the output.
        old_grid: rows and columns of today's table, where the checkpoint does not say.

    Raises:
        ConfigError: neither or both sizes, or one that the model cannot have.
        CheckpointError: the checkpoint has no position embeddings, or cannot be read.
        OutputError: there is no place for the output.
    """
    source = read.locate(spec, offline, on_progress)
    opened = read.open_checkpoint(source.file, source.entry, old_grid)
    old, model, is_npz = opened.info, opened.info.model, stores.kind_of(source.file) == "npz"
    if opened.layout != "vit" and not is_npz:
        raise CheckpointError(
            f"is in the layout of {opened.layout}, which is not resized in place of its own",
            where=source.file,
            hint="`vit convert` writes it in ours, which is",
        )
    if not isinstance(model, ModelConfig):
        raise CheckpointError("is a ResNet: it has no position embeddings", where=source.file)
    if (grid is None) == (resolution is None):
        raise ConfigError("give either a grid or a resolution")
    if grid is not None:
        resolution = grid[0] * model.patch_size[0], grid[1] * model.patch_size[1]
    assert resolution is not None
    names = [n for n in TABLES if n in opened.tensors and opened.sources.get(n, (n,))]
    if not names:
        raise CheckpointError("has no position embeddings to resize", where=source.file)
    tables = {name: opened.tensors[name].read() for name in names}
    header = None if is_npz else native.read_header(source.file)
    info, new, resized = old, model, {}
    if resolution != model.image_size and grid != model.grid:
        info, new = at_size(old, resolution, method), model.at(resolution)
        resized = {n: adapt_tensor(n, t, model, new, method) for n, t in tables.items()}
    path = _output(Path(spec), source.file, new.grid, output, in_place, is_npz)
    if (path.suffix == ".npz") != is_npz:
        raise OutputError("would be of another kind than the input: `vit convert`", where=path)
    name = opened.sources.get(names[0], names)[0]
    return Resize(source.file, path, header, info, old, (model, new), tables, resized, name)


def _output(
    spec: Path, file: Path, grid: Size, output: str | Path | None, in_place: bool, is_npz: bool
) -> Path:
    """Where the result goes."""
    if in_place and output is not None:
        raise ConfigError("--in-place and -o contradict each other")
    if not spec.expanduser().exists() and output is None:
        raise OutputError(
            "is not a file here: it has no place beside it", where=spec, hint="say where: -o OUT"
        )
    if output is not None:
        return Path(output)
    if in_place:
        return spec if spec.is_dir() else file
    name = f"{grid[0]}x{grid[1]}"
    if spec.is_dir():
        return spec.resolve().with_name(f"{spec.resolve().name}-{name}")
    return file.with_name(f"{file.stem}-{name}{'.npz' if is_npz else '.safetensors'}")


def resize_posemb(job: Resize, force: bool = False) -> None:
    """Writes what was planned: each file whole or not at all, the tensors before their description.

    Other bytes, their order and the header's other entries stay. A grid that is today's gives a
    copy, bit for bit.

    Raises:
        OutputError: the output exists (without `force`), or cannot be written.
    """
    in_place = os.path.realpath(job.file) == os.path.realpath(job.source)
    if job.output.exists() and not in_place and not force:
        raise OutputError("exists already", where=job.output, hint="--force replaces it")
    if in_place and not job.resized:
        return
    if job.header is None and job.resized:
        _write_npz(job)
        return
    if job.file is not job.output:
        _copy_companions(job.source, job.output)
    with open(job.source, "rb") as source, whole_file(job.file) as target:
        if job.resized:
            _write_resized(job, source, target)
        else:
            _copy(source, target, os.fstat(source.fileno()).st_size)
    config = job.source.with_name("config.json")
    if job.file is job.output and not in_place:
        return  # a file of its own says everything in its header
    if not config.is_file():
        write_config(job.file.with_name("config.json"), job.info)
    elif job.resized:
        text = json.dumps(_at_size(config, job.info), indent=2, ensure_ascii=False) + "\n"
        write_text(job.file.with_name("config.json"), text)


def _write_resized(job: Resize, source: BinaryIO, target: BinaryIO) -> None:
    """The header with new offsets, then each tensor in the order in which they lie."""
    header = job.header
    assert header is not None
    order = sorted(header.tensors, key=lambda name: header.tensors[name].start)
    entries: dict[str, Any] = {"__metadata__": {**header.metadata, **job.info.to_metadata()}}
    end = 0
    for name in order:
        spec = header.tensors[name]
        new = job.resized.get(name)
        start, end = end, end + (spec.end - spec.start if new is None else new.nbytes)
        shape = list(spec.shape if new is None else new.shape)
        entries[name] = {"dtype": spec.dtype, "shape": shape, "data_offsets": [start, end]}
    target.write(native.header_bytes(entries, job.file))
    source.seek(header.data_start)
    for name in order:
        spec = header.tensors[name]
        if name in job.resized:
            target.write(native.tensor_bytes(job.resized[name]))
            source.seek(spec.end - spec.start, os.SEEK_CUR)
        else:
            _copy(source, target, spec.end - spec.start)


def _write_npz(job: Resize) -> None:
    """The arrays as they are but one. An npz has no place for the method."""
    table = job.resized["pos_embed"]
    resized = LazyTensor(table.dtype.name, table.shape, lambda: table)
    npz.write(job.file, {**stores.read_npz(job.source), job.source_name: resized})


def _copy(source: BinaryIO, target: BinaryIO, length: int) -> None:
    while length:
        piece = source.read(min(length, PIECE))
        if not piece:
            raise CheckpointError("was cut short while it was read", where=source.name)
        target.write(piece)
        length -= len(piece)


def _copy_companions(source: Path, folder: Path) -> None:
    """The other files of a model's folder: its card, its curves. Not other weights."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in source.parent.iterdir() if source.name == "model.safetensors" else ():
            weights = path.suffix in (".safetensors", ".bin", ".pth", ".npz", ".pt")
            if path.is_file() and not weights and path.parent != folder:
                shutil.copyfile(path, folder / path.name)
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror or error}", where=folder) from error


def _at_size(path: Path, info: CheckpointInfo) -> dict[str, Any]:
    """A config.json of timm's or ours with the new size, all else as it stands."""
    config: dict[str, Any] = json.loads(path.read_text("utf-8"))
    size = list(info.model.image_size)
    pretrained = config.get("pretrained_cfg", config)
    pretrained["input_size"] = [3, *size]
    if "architecture" in config:
        config["model_args"] = {**(config.get("model_args") or {}), "img_size": size}
    if "vit" in config:
        config["vit"] = {**config["vit"], **info.to_dict()}
    return config


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

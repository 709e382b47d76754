"""What model a file of another layout holds, by the table that `recognise` finds for its names.

Nothing is dropped without being named.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.store import RECORD, Store, recorded
from vitcli.checkpoints.tensor_file import LazyTensor
from vitcli.config import Architecture, BiTConfig, ModelConfig, Preprocess, Score, Size
from vitcli.errors import CheckpointError, ConfigError
from vitcli.hub import registry
from vitcli.layouts import keymaps, open_clip
from vitcli.layouts import transformers_config as hf
from vitcli.layouts.keymaps import Row
from vitcli.layouts.recognise import Layout, recognise
from vitcli.layouts.shapes import check_keys, infer_architecture
from vitcli.posemb import sincos2d

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Reading:
    """A foreign file as a model of ours."""

    layout: str
    """Its name; see `recognise.Layout`."""
    info: CheckpointInfo
    tensors: dict[str, LazyTensor]
    """Under our names, each made when it is read."""
    sources: dict[str, tuple[str, ...]]
    """Our name -> the file's names."""
    dropped: tuple[str, ...] = ()
    """Names in the file that are no part of the model."""


def read_layout(
    store: Store, grid: Size | None = None, said: CheckpointInfo | None = None
) -> Reading:
    """What model a file of another layout holds.

    Args:
        grid: rows and columns of its position embeddings, where nothing says.
        said: what a config.json of timm's beside a pickle of timm's says.

    Raises:
        CheckpointError: it is none that is known, or its tensors do not make that model.
    """
    layout = recognise(store)
    depth = 1 + max(
        (int(n) for name in layout.tensors for n in re.findall(_BLOCK, name)), default=0
    )
    if layout.name == "timm" and said is not None:
        depth = max(depth, said.model.depth)
    if depth > len(layout.tensors):
        raise CheckpointError("numbers more blocks than it has tensors", where=store.path)
    rows = [
        row
        for row in keymaps.expand(layout.rows, depth)
        if any(name in layout.tensors for name in row.theirs)
    ]
    is_said = layout.name == "timm" and said is not None
    info = said if is_said and said is not None else _describe(store, layout, rows, grid)
    model, heads = info.model, getattr(info.model, "num_heads", 1)
    wanted = model.tensor_shapes()
    expected: dict[str, tuple[int, ...]] = {}
    tensors: dict[str, LazyTensor] = {}
    sources: dict[str, tuple[str, ...]] = {}
    if isinstance(model, ModelConfig) and model.posemb == "sincos2d":  # no file has this table
        table = functools.partial(sincos2d, model.grid, model.width)
        tensors["pos_embed"] = LazyTensor("float32", wanted["pos_embed"], table)
        sources["pos_embed"] = ()
    for row in keymaps.expand(layout.rows, model.depth):
        if not set(row.ours) <= set(wanted):
            continue
        if set(row.ours) <= set(tensors):  # another name for what is there already
            continue
        expected |= _their_shapes(row, wanted, heads)
        for name, tensor in _loaded(row, wanted, layout.tensors):
            tensors[name] = tensor
            sources[name] = tuple(layout.names.get(n, layout.prefix + n) for n in row.theirs)
    expected |= {name: wanted[name] for name in wanted if name not in tensors}
    extra = [name for name in layout.tensors if name not in expected]
    dropped = [name for name in extra if re.search(layout.droppable, name)]
    found = {n: t.shape for n, t in layout.tensors.items() if n not in dropped}
    check_keys(expected, found, where=store.path)
    ordered = {name: tensors[name] for name in wanted}
    left = (*layout.outside, *(layout.prefix + name for name in dropped))
    return Reading(layout.name, info, ordered, sources, left)


_BLOCK = r"(?:encoderblock_|encoder_layer_|blocks\.|layers?\.)(\d{1,4})\b"


# ---------------------------------------------------------------------------------------------
# What the model is


def _describe(store: Store, layout: Layout, rows: list[Row], grid: Size | None) -> CheckpointInfo:
    """The model from its shapes and from what its makers take for granted."""
    shapes = {}
    for row in rows:
        try:
            loaded = [_loaded_shape(row, name, layout.tensors) for name in row.theirs]
        except (KeyError, ValueError, IndexError):
            continue  # missing or misshapen: told with all others
        total = sum(shape[0] if shape else 0 for shape in loaded)
        for name, part in zip(row.ours, _parts(row, total), strict=True):
            shapes[name] = (part, *loaded[0][1:]) if loaded[0] else ()
    patch, size = shapes.get("patch_embed.proj.weight", ()), layout.fields.get("image_size")
    resized = recorded(store)
    if grid is None and resized:
        grid = (resized["to"][0], resized["to"][1])
    elif grid is None and size and len(patch) == 4:
        grid = (size[0] // patch[2], size[1] // patch[3])
    tokens = layout.fields.get("posemb_tokens")
    model, assumed = infer_architecture(shapes, store.path, grid, tokens)
    try:
        if isinstance(model, BiTConfig):
            resnet = dataclasses.replace(model.resnet, **layout.resnet)
            model = dataclasses.replace(model, resnet=resnet)
        else:
            model = dataclasses.replace(model, **_fields(layout, model, shapes))
    except ConfigError as error:
        raise CheckpointError(f"makes no model: {error.what}", where=store.path) from error
    if layout.fields.get("num_heads") or layout.resnet:
        assumed = [text for text in assumed if text.startswith("images")]
    preprocess, said = _preprocess(store, layout, model)
    if not said:
        assumed = [*assumed, f"images prepared as usual for {layout.kind}"]
    provenance: dict[str, Any] = {"converted_from": layout.name}
    if resized:
        provenance[RECORD] = resized
    if store.notes:
        provenance["took"] = store.notes
    if assumed:
        provenance["assumed"] = assumed
    return _with_classes(CheckpointInfo(model, preprocess, provenance=provenance), layout)


def _fields(
    layout: Layout, model: ModelConfig, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """What the layout says of a model that its shapes do not."""
    fields = dict(layout.fields)
    if layout.kind == "dinov2" and model.num_classes == 0:
        fields["pool"] = "token"
    size = fields.get("image_size") if model.posemb != "none" else None
    if size and dataclasses.replace(model, image_size=size).grid != model.grid:
        fields.pop("image_size")  # of a table that this file does not have
    if model.pool == "gap" and "fc_norm.weight" not in shapes:
        fields["fc_norm"] = False
    if model.stem:
        fields["stem"] = dataclasses.replace(model.stem, **layout.resnet)
    return fields


def _preprocess(store: Store, layout: Layout, model: Architecture) -> tuple[Preprocess, bool]:
    size = model.image_size
    if isinstance(model, BiTConfig) and layout.kind != "timm":
        return Preprocess(size, interpolation="bilinear", crop_mode="squash"), False
    if layout.name == "transformers":
        return hf.preprocess_of(store.path.parent, layout.kind, size)
    if layout.name == "open_clip":
        return open_clip.preprocess(layout.config, size)
    pool = model.pool if isinstance(model, ModelConfig) else None
    if layout.name == "vit-npz" or (layout.name == "big_vision" and pool == "map"):
        return Preprocess(size, interpolation="bilinear", crop_mode="squash"), False
    if layout.name == "big_vision":
        return Preprocess(size, interpolation="bilinear", crop_pct=0.875), False
    (mean, std), filter, crop, crop_pct = hf.PROCESSORS["deit"]
    if layout.name == "torchvision":
        return Preprocess(size, mean, std, "bilinear", crop_pct), False
    return Preprocess(size, mean, std, "bicubic", crop_pct), False


def _with_classes(info: CheckpointInfo, layout: Layout) -> CheckpointInfo:
    """Names from the config, else ImageNet's where the number of classes is ImageNet's."""
    count = info.model.num_classes
    classes = hf.labels_of(layout.config, count)
    lists: dict[int, registry.Labels] = {1000: "imagenet-1k", 21843: "imagenet-21k"}
    if count in lists:
        known = registry.labels(lists[count])
        first = known[0].name.partition(",")[0]  # "tench", "organism"
        if not classes or classes[0].name.startswith(first):
            classes = known
    score: Score = hf.score_of(layout.config) or ("sigmoid" if count == 21843 else "softmax")
    return dataclasses.replace(info, classes=classes, score=score)


# ---------------------------------------------------------------------------------------------
# One row


def _parts(row: Row, total: int) -> list[int]:
    """How our tensors share the first axis: alone, or as q and kv."""
    return [total] if len(row.ours) == 1 else [total // 3, total - total // 3]


def _loaded_shape(row: Row, name: str, tensors: Mapping[str, LazyTensor]) -> tuple[int, ...]:
    import numpy as np

    # All strides are 0, so that every reshape is a view: nothing is stored.
    shape: tuple[int, ...] = row.op.load(np.broadcast_to(np.int8(0), tensors[name].shape)).shape
    return shape


def _their_shapes(
    row: Row, ours: Mapping[str, tuple[int, ...]], num_heads: int
) -> dict[str, tuple[int, ...]]:
    """The names of theirs in a row and the shapes they must have."""
    import numpy as np

    shapes = [ours[name] for name in row.ours]
    total = sum(shape[0] for shape in shapes)
    each = (total // len(row.theirs), *shapes[0][1:])
    shape = row.op.save(np.broadcast_to(np.int8(0), each), num_heads).shape
    return dict.fromkeys(row.theirs, shape)


def _loaded(
    row: Row, wanted: Mapping[str, tuple[int, ...]], tensors: Mapping[str, LazyTensor]
) -> Iterator[tuple[str, LazyTensor]]:
    """Our tensors of a row."""
    dtype = tensors[row.theirs[0]].dtype if row.theirs[0] in tensors else "float32"

    def read(start: int, end: int) -> np.ndarray:
        import numpy as np

        parts = [row.op.load(tensors[name].read()) for name in row.theirs]
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return whole if len(row.ours) == 1 else whole[start:end]

    start = 0
    for name in row.ours:
        shape = wanted[name]
        end = start + (shape[0] if shape else 0)
        yield name, LazyTensor(dtype, shape, functools.partial(read, start, end))
        start = end

"""Reading a file as a model, by the table of the layout that recognizes it.

Nothing is dropped silently: every tensor is the model's, or listed in `Checkpoint.dropped`, unless
it has no values.
"""

import dataclasses
import functools
import re

from vitcli.architectures.resnet import Shape
from vitcli.checkpoints.info import Checkpoint, CheckpointInfo
from vitcli.checkpoints.store import recorded_resize
from vitcli.checkpoints.tensor_file import RESIZE_KEY, LazyTensor, Store
from vitcli.config import Architecture, BiTConfig, Size
from vitcli.errors import CheckpointError, ConfigError
from vitcli.layouts import table
from vitcli.layouts.catalog import OURS, recognize
from vitcli.layouts.layout import Match
from vitcli.layouts.shapes import check_keys, format_assumption, infer_architecture


def read_layout(store: Store, grid: Size | None = None) -> Checkpoint:
    """Read a file in a supported layout as a checkpoint.

    Args:
        grid: rows and columns of its position embeddings, if the file does not specify them.

    Raises:
        CheckpointError: its layout is not supported, or its tensors do not match the model.
    """
    # Without registers, transformers stores a tensor without values.
    nonempty = {name: tensor for name, tensor in store.tensors.items() if 0 not in tensor.shape}
    store = dataclasses.replace(store, tensors=nonempty)
    layout, match = recognize(store)
    match = dataclasses.replace(match, rows=table.choose(match.rows, match.tensors))
    try:
        if match.info is not None:
            info = _apply_recorded_resize(match.info, store)
        else:
            info = _describe(store, layout.name, match, grid)
    except ConfigError as error:
        raise CheckpointError(error.what, where=store.path, hint=error.hint) from error
    model, num_heads = info.model, getattr(info.model, "num_heads", 1)
    shapes = model.tensor_shapes()
    expected: dict[str, Shape] = {}
    tensors: dict[str, LazyTensor] = {}
    stored = {name for row in match.rows if row.theirs[0] in match.tensors for name in row.ours}
    if model.posemb == "sincos2d" and "pos_embed" not in stored:
        from vitcli.architectures.posemb import sincos2d

        read = functools.partial(sincos2d, model.grid, model.width)
        tensors["pos_embed"] = LazyTensor("float32", shapes["pos_embed"], read)
    rows = [row for row in table.expand(match.rows, model.depth) if shapes.keys() >= set(row.ours)]
    order = {name: k for k, name in enumerate(shapes)}
    for row in sorted(rows, key=lambda row: order[row.ours[0]]):
        if set(row.ours) <= tensors.keys():  # another name for tensors that are already loaded
            continue
        expected |= dict.fromkeys(row.theirs, table.save_shape(row, shapes, num_heads))
        tensors |= table.load(row, shapes, match.tensors)
    expected |= {name: shapes[name] for name in shapes if name not in tensors}
    extra = [name for name in match.tensors if name not in expected]
    droppable = [name for name in extra if re.search(match.droppable, name)]
    actual = {n: t.shape for n, t in match.tensors.items() if n not in droppable}
    has_config = match.info is not None and "vit" not in store.metadata
    config_file = store.path.with_name(layout.config_files[0]) if has_config else None
    check_keys(expected, actual, store.path, config_file)
    used = {name for tensor in tensors.values() for name in tensor.sources}
    dropped = tuple(name for name in store.tensors if name not in used)
    ordered, provenance = {name: tensors[name] for name in shapes}, dict(info.provenance)
    if projections := [name for name in dropped if re.search(layout.projections, name)]:
        provenance["left_out"] = projections
    layout_name, renamed = layout.name, any(t.sources != (n,) for n, t in ordered.items())
    if layout_name == "timm" and store.kind == "safetensors" and not renamed:
        layout_name = OURS  # except for the description
        provenance.pop("converted_from", None)
    info = dataclasses.replace(info, provenance=provenance)
    return Checkpoint(store.path, info, ordered, store.kind, layout_name, dropped)


def _apply_recorded_resize(info: CheckpointInfo, store: Store) -> CheckpointInfo:
    """Adapt the description of a file whose position embeddings were resized later."""
    resize, model = recorded_resize(store), info.model
    if resize is None or isinstance(model, BiTConfig):
        return info
    if list(model.grid) == resize["to"]:
        return dataclasses.replace(info, provenance={**info.provenance, RESIZE_KEY: resize})
    from vitcli.checkpoints.adapt import at_size

    (rows, columns), (height, width) = resize["to"], model.patch_size
    return at_size(info, (rows * height, columns * width), resize["method"])


def _describe(store: Store, layout: str, match: Match, grid: Size | None) -> CheckpointInfo:
    """Describe a model from its tensor shapes and the layout's `match`."""
    depth = table.depth_of(match.rows, match.tensors)
    shapes = table.load_shapes(table.expand(match.rows, depth), match.tensors)
    patch, size = shapes.get("patch_embed.proj.weight", ()), match.fields.get("image_size")
    resize = recorded_resize(store)
    if grid is None and resize:
        grid = (resize["to"][0], resize["to"][1])
    elif grid is None and size and len(patch) == 4 and min(patch) > 0:
        grid = (size[0] // patch[2], size[1] // patch[3])
    model, assumed = infer_architecture(shapes, grid, match.posemb_tokens)
    model = _with_fields(model, match)
    assumed -= {*match.fields, *match.known, *(("resnet",) if match.resnet else ())}
    assumed |= match.assumed
    if match.preprocess is None:
        assumed.add("preprocess")
    preprocess = dataclasses.replace(match.preprocess or match.default, size=model.image_size)
    entries = {
        RESIZE_KEY: resize if resize and resize["from"] != resize["to"] else None,
        "input_size": match.input_size and list(match.input_size),
        "took": store.notes,
        "assumed": {fact: format_assumption(fact, model, preprocess) for fact in sorted(assumed)},
    }
    provenance = {"converted_from": layout} | {k: v for k, v in entries.items() if v}
    classes = match.classes if len(match.classes) == model.num_classes else ()
    score = match.score or ("sigmoid" if model.num_classes == 21843 else "softmax")
    return CheckpointInfo(model, preprocess, classes, score, provenance)


def _with_fields(model: Architecture, match: Match) -> Architecture:
    """Add the fields that the layout specifies and tensor shapes do not show."""
    if isinstance(model, BiTConfig):
        return dataclasses.replace(model, resnet=dataclasses.replace(model.resnet, **match.resnet))
    fields = dict(match.fields)
    size = fields.get("image_size") if model.posemb != "none" else None
    if size and dataclasses.replace(model, image_size=size).grid != model.grid:
        fields.pop("image_size")  # of other position embeddings than this file's
    if model.stem:
        fields["stem"] = dataclasses.replace(model.stem, **match.resnet)
    return dataclasses.replace(model, **fields)

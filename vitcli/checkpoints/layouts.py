"""Which layout a file has, told by its names, and what model it holds.

Each layout is a table of `keymaps` and what its makers take for granted: the GELU, the epsilon, how
pictures are prepared. Nothing is dropped without being named.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vitcli.checkpoints import keymaps, registry
from vitcli.checkpoints import transformers_config as hf
from vitcli.checkpoints.keymaps import Row
from vitcli.checkpoints.native import CheckpointInfo, LazyTensor, check_keys
from vitcli.checkpoints.shapes import infer_model, tensor_shapes
from vitcli.checkpoints.stores import Store
from vitcli.config import ModelConfig, Preprocess, Size
from vitcli.errors import CheckpointError, ConfigError
from vitcli.posemb import sincos2d

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Reading:
    """A foreign file as a model of ours."""

    layout: str
    """"vit-npz", "big_vision", "transformers", "torchvision" or "timm"."""
    info: CheckpointInfo
    tensors: dict[str, LazyTensor]
    """Under our names, each made when it is read."""
    sources: dict[str, tuple[str, ...]]
    """Our name -> the file's names."""
    dropped: tuple[str, ...] = ()
    """Names in the file that are no part of the model."""


@dataclass(frozen=True)
class _Layout:
    """What a store's names say: a table, and what the model's makers take for granted."""

    name: str
    rows: tuple[Row, ...]
    tensors: Mapping[str, LazyTensor]
    """Of the model: prefixes cut, blocks that are stacked taken apart."""
    kind: str
    """How pictures are prepared: a key of `transformers_config.PROCESSORS`, or `name`."""
    droppable: str = r"$^"
    """A pattern of names that may be left out."""
    prefix: str = ""
    """What was cut."""
    outside: tuple[str, ...] = ()
    """Names in the file that are not of the model: a text tower, an optimiser."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Of the model's configuration."""
    config: dict[str, Any] = field(default_factory=dict)
    """transformers' config.json."""


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
    layout = _recognise(store)
    depth = 1 + max(
        (int(n) for name in layout.tensors for n in re.findall(_BLOCK, name)), default=0
    )
    if depth > len(layout.tensors):
        raise CheckpointError("numbers more blocks than it has tensors", where=store.path)
    rows = [
        row
        for row in keymaps.expand(layout.rows, depth)
        if any(name in layout.tensors for name in row.theirs)
    ]
    if layout.name == "timm" and said is not None and isinstance(said.model, ModelConfig):
        info, model = said, said.model
    else:
        info, model = _describe(store, layout, rows, grid)
    wanted = tensor_shapes(model)
    expected: dict[str, tuple[int, ...]] = {}
    tensors: dict[str, LazyTensor] = {}
    sources: dict[str, tuple[str, ...]] = {}
    for row in keymaps.expand(layout.rows, model.depth):
        if not set(row.ours) <= set(wanted):
            continue
        if row.ours == ("pos_embed",) and model.posemb == "sincos2d":
            continue
        if set(row.ours) <= set(tensors):  # another name for what is there already
            continue
        expected |= _their_shapes(row, wanted, model.num_heads)
        for name, tensor in _loaded(row, wanted, layout.tensors):
            tensors[name] = tensor
            sources[name] = tuple(layout.prefix + theirs for theirs in row.theirs)
    extra = [name for name in layout.tensors if name not in expected]
    dropped = [name for name in extra if re.search(layout.droppable, name)]
    found = {n: t.shape for n, t in layout.tensors.items() if n not in dropped}
    check_keys(expected, found, where=store.path)
    if model.posemb == "sincos2d":
        table = functools.partial(sincos2d, model.grid, model.width)
        tensors["pos_embed"] = LazyTensor("float32", wanted["pos_embed"], table)
        sources["pos_embed"] = ()
    ordered = {name: tensors[name] for name in wanted}
    return Reading(layout.name, info, ordered, sources, (*layout.outside, *dropped))


_BLOCK = r"(?:encoderblock_|encoder_layer_|blocks\.|layers?\.)(\d{1,4})\b"


# ---------------------------------------------------------------------------------------------
# Telling layouts apart


def _recognise(store: Store) -> _Layout:
    names = store.tensors
    if prefix := _prefix(names, "embedding/kernel", "Transformer/encoder_norm/scale"):
        return _flax(store, prefix[0])
    for anchor in (
        "embeddings.patch_embeddings.projection.weight",
        "embeddings.patch_embedding.weight",
    ):
        if prefix := _prefix(names, anchor):
            return _transformers(store, prefix[0], anchor)
    if "conv_proj.weight" in names and "encoder.ln.weight" in names:
        old = any(".mlp.linear_1." in name for name in names)
        rows = keymaps.TORCHVISION["torchvision-old" if old else "torchvision"]
        return _Layout("torchvision", rows, names, "torchvision")
    if prefix := _prefix(names, "patch_embed.proj.weight", "blocks.0.norm1.weight"):
        return _timm(store, prefix[0])
    raise CheckpointError(
        "does not hold a Vision Transformer under names that vit knows",
        where=store.path,
        hint="it knows timm's, transformers', torchvision's, vit_jax's and big_vision's",
    )


def _prefix(names: Mapping[str, Any], anchor: str, other: str = "") -> list[str]:
    """What stands before the anchor (and `other`) in the names; empty where neither is there."""
    found = [name.removesuffix(anchor) for name in names if name.endswith(anchor)]
    return [prefix for prefix in found if not other or prefix + other in names][:1]


def _flax(store: Store, prefix: str) -> _Layout:
    """vit_jax's and big_vision's .npz files."""
    inside = {n.removeprefix(prefix): t for n, t in store.tensors.items() if n.startswith(prefix)}
    outside = tuple(name for name in store.tensors if not name.startswith(prefix))
    tensors = _unstacked(inside)
    first = keymaps.FLAX_BLOCK.replace("{i}", "0")
    old = f"{first}/{keymaps.PRE_LINEN['attn']}/query/kernel" in tensors
    position = next((name for name in keymaps.POSITIONS if name in tensors), keymaps.POSITIONS[1])
    authors = old or position == keymaps.POSITIONS[0]
    map_head = "MAPHead_0/" if "MAPHead_0/probe" in tensors else ""
    numbers = keymaps.PRE_LINEN if old else keymaps.LINEN
    rows = keymaps.flax_rows(numbers, position, map_head)
    if "probe" not in tensors and not map_head:
        rows = tuple(row for row in rows if not row.ours[0].startswith("attn_pool."))
    heads = tensors.get(f"{first}/{numbers['attn']}/query/bias")
    fields = {
        "num_heads": heads.shape[0] if heads is not None and len(heads.shape) == 2 else 1,
        "activation": "gelu_tanh",
        "norm_eps": 1e-6,
    }
    if position not in tensors:
        fields |= {"posemb": "sincos2d", "posemb_tokens": "patches"}
    if "conv_root/kernel" in tensors:
        units = [re.match(r"block(\d)/unit(\d{1,3})/", name) for name in tensors]
        depths = {(int(m[1]), int(m[2])) for m in units if m}
        blocks = range(1, 1 + max((block for block, _ in depths), default=0))
        counts = tuple(sum(block == k for block, _ in depths) for k in blocks)
        flat = len(tensors["gn_root/scale"].shape) == 1 if "gn_root/scale" in tensors else False
        rows += keymaps.stem_rows(counts, flat)
    name = "vit-npz" if authors else "big_vision"
    return _Layout(name, rows, tensors, name, prefix=prefix, outside=outside, fields=fields)


def _unstacked(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Blocks that big_vision's `scan` has stacked along a first axis, under names of their own."""
    stem, found = "Transformer/encoderblock/", {}
    for name, tensor in tensors.items():
        if not name.startswith(stem) or not tensor.shape:
            found[name] = tensor
            continue
        kept = functools.cache(tensor.read)  # an npz file has no way to read a part

        def part(read: Any, i: int) -> Any:
            return read()[i]

        for i in range(min(tensor.shape[0], 10_000)):
            read = functools.partial(part, kept, i)
            leaf = name.removeprefix(stem)
            found[f"Transformer/encoderblock_{i}/{leaf}"] = LazyTensor(
                tensor.dtype, tensor.shape[1:], read
            )
    return found


def _transformers(store: Store, prefix: str, anchor: str) -> _Layout:
    config = hf.read_config(store.path.parent)
    names = store.tensors
    if anchor.endswith("patch_embedding.weight"):
        siglip = f"{prefix}embeddings.class_embedding" not in names
        kind = "siglip_vision_model" if siglip else "clip_vision_model"
        rows = keymaps.prefixed(keymaps.TRANSFORMERS["clip"], prefix)
        drop = r"position_ids$|^text_model\.|_projection\.weight$|^logit_(scale|bias)$"
    else:
        dino = any(name.endswith("layer_scale1.lambda1") for name in names)
        new = any(name.endswith("attention.q_proj.weight") for name in names)
        swiglu = any(".mlp.weights_in." in name or ".mlp.gate_proj." in name for name in names)
        family = ("dinov2" if dino else "vit") + ("-5" if dino and new else "5" if new else "")
        rows = keymaps.TRANSFORMERS[family + ("-swiglu" if swiglu else "")]
        rows = keymaps.prefixed(rows, prefix)
        teacher = "cls_classifier.weight" in names
        rows += keymaps.TEACHER_HEADS if teacher else keymaps.HEAD
        kind = "dinov2" if dino else "vit"
        drop = r"mask_token$|^decoder\.|position_ids$"
        if f"{prefix}embeddings.distillation_token" in names and "classifier.weight" in names:
            # A head on the class token alone: the other token is one that nothing reads.
            names_of = {"dist_token": "reg_token"}
            rows = tuple(
                row._replace(ours=tuple(names_of.get(n, n) for n in row.ours))
                for row in rows
                if row.ours != ("reg_token",)
            )
        if any(name.endswith("classifier.weight") for name in names):
            drop += r"|pooler\."
            rows = tuple(row for row in rows if not row.ours[0].startswith("pre_logits"))
    fields = {"activation": "gelu", "norm_eps": 1e-6, **hf.model_fields(config)}
    kind = config.get("model_type", kind)
    return _Layout("transformers", rows, names, kind, drop, fields=fields, config=config)


def _timm(store: Store, prefix: str) -> _Layout:
    """timm's names, as DeiT, DINO, DINOv2 and MAE released theirs too."""
    rows = tuple(Row((name,), (prefix + name,)) for name in _timm_names(store, prefix))
    theirs = {row.theirs[0] for row in rows}
    rows += tuple(
        row
        for row in keymaps.prefixed(keymaps.DINOV2_AUTHORS, prefix)
        if not set(row.theirs) & theirs
    )
    drop = r"mask_token$|(^|\.)decoder_|^rope|" + (rf"^(?!{re.escape(prefix)})" if prefix else "$^")
    drop += r"|head\.(mlp|last_layer)"
    if "decoder_pos_embed" in store.tensors:
        drop += r"|^decoder"
    return _Layout("timm", rows, store.tensors, "timm", drop)


def _timm_names(store: Store, prefix: str) -> Iterator[str]:
    """Names of the file that our model could have."""
    pattern = (
        r"(cls|dist|reg)_token|pos_embed(_row|_column)?|patch_embed\.proj\.(weight|bias)|"
        r"blocks\.\d+\.(norm1|norm2|attn\.qkv|attn\.proj|mlp\.fc1|mlp\.fc2)\.(weight|bias)|"
        r"blocks\.\d+\.ls[12]\.gamma|(norm_pre|norm|fc_norm|head|head_dist)\.(weight|bias)|"
        r"pre_logits\.fc\.(weight|bias)|attn_pool\..*"
    )
    for name in store.tensors:
        if name.startswith(prefix) and re.fullmatch(pattern, name.removeprefix(prefix)):
            yield name.removeprefix(prefix)


# ---------------------------------------------------------------------------------------------
# What the model is


def _describe(
    store: Store, layout: _Layout, rows: list[Row], grid: Size | None
) -> tuple[CheckpointInfo, ModelConfig]:
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
    fields = dict(layout.fields)
    patch = shapes.get("patch_embed.proj.weight", ())
    if grid is None and "image_size" in fields and len(patch) == 4:
        grid = (fields["image_size"][0] // patch[2], fields["image_size"][1] // patch[3])
    model, assumed = infer_model(shapes, store.path, grid)
    if layout.kind == "dinov2" and model.num_classes == 0:
        fields["pool"] = "token"
    if fields.get("image_size") and model.posemb != "none" and model.grid != grid:
        fields.pop("image_size")
    if model.pool == "gap" and "fc_norm.weight" not in shapes:
        fields["fc_norm"] = False
    assumed = [] if layout.fields.get("num_heads") else assumed
    if layout.name == "vit-npz" and model.stem:  # flax's epsilons, and what they are added to
        flax: Any = {"std_eps": 1e-5, "std_eps_in": "deviation", "norm_eps": 1e-6}
        fields["stem"] = dataclasses.replace(model.stem, **flax)
    try:
        model = dataclasses.replace(model, **fields)
    except ConfigError as error:
        raise CheckpointError(f"makes no model: {error.what}", where=store.path) from error
    preprocess, said = _preprocess(store, layout, model)
    if not said:
        assumed = [*assumed, f"pictures prepared as usual for {layout.kind}"]
    provenance: dict[str, Any] = {"converted_from": layout.name}
    if store.notes:
        provenance["took"] = store.notes
    if assumed:
        provenance["assumed"] = assumed
    info = CheckpointInfo(model, preprocess, provenance=provenance)
    return _with_classes(info, layout), model


def _preprocess(store: Store, layout: _Layout, model: ModelConfig) -> tuple[Preprocess, bool]:
    size = model.image_size
    if layout.name == "transformers":
        return hf.preprocess_of(store.path.parent, layout.kind, size)
    if layout.name == "vit-npz" or (layout.name == "big_vision" and model.pool == "map"):
        return Preprocess(size, interpolation="bilinear", crop_mode="squash"), False
    if layout.name == "big_vision":
        return Preprocess(size, interpolation="bilinear", crop_pct=0.875), False
    (mean, std), filter, crop, crop_pct = hf.PROCESSORS["deit"]
    if layout.name == "torchvision":
        return Preprocess(size, mean, std, "bilinear", crop_pct), False
    return Preprocess(size, mean, std, "bicubic", crop_pct), False


def _with_classes(info: CheckpointInfo, layout: _Layout) -> CheckpointInfo:
    """Names from the config, else ImageNet's where the number of classes is ImageNet's."""
    count = info.model.num_classes
    classes = hf.labels_of(layout.config, count)
    lists: dict[int, registry.Labels] = {1000: "imagenet-1k", 21843: "imagenet-21k"}
    if count in lists and (not classes or classes[0].name.startswith("tench")):
        classes = registry.labels(lists[count])
    score: Any = "sigmoid" if count == 21843 and layout.name != "transformers" else "softmax"
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

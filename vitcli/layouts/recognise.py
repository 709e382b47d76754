"""Which layout a file has, told by the names in it and never by its own.

Each layout is a table of `keymaps` and what its makers take for granted: the GELU, the epsilons,
how images are prepared.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vitcli.checkpoints.store import Store
from vitcli.checkpoints.tensor_file import LazyTensor
from vitcli.errors import CheckpointError
from vitcli.layouts import keymaps, open_clip
from vitcli.layouts import transformers_config as hf
from vitcli.layouts.keymaps import Row


@dataclass(frozen=True)
class Layout:
    """What a file's names say: a table, and what the model's makers take for granted."""

    name: str
    """"vit-npz", "bit-npz", "big_vision", "transformers", "torchvision", "open_clip" or "timm"."""
    rows: tuple[Row, ...]
    tensors: Mapping[str, LazyTensor]
    """Of the model: prefixes cut, blocks that are stacked taken apart."""
    kind: str
    """How images are prepared: a key of `transformers_config.PROCESSORS`, or `name`."""
    droppable: str = r"$^"
    """A pattern of names that may be left out."""
    prefix: str = ""
    """What was cut."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The file's names of those that were changed more than that."""
    outside: tuple[str, ...] = ()
    """Names in the file that are not of the model: a text tower, an optimiser."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Of the model's configuration."""
    resnet: dict[str, Any] = field(default_factory=dict)
    """Of its ResNet's."""
    config: dict[str, Any] = field(default_factory=dict)
    """transformers' config.json, or open_clip's."""


def recognise(store: Store) -> Layout:
    """The layout of a file.

    Raises:
        CheckpointError: it is none that is known.
    """
    names = store.tensors
    for anchor, paper in ((_BIT, False), (_BIT_PAPER, True)):
        if prefix := _prefix([re.sub(*_NUMBERED, name) for name in names], anchor):
            return _bit(store, prefix[0], paper)
    if prefix := _prefix(names, "embedding/kernel", "Transformer/encoder_norm/scale"):
        return _flax(store, prefix[0])
    for anchor in (
        "embeddings.patch_embeddings.projection.weight",
        "embeddings.patch_embedding.weight",
    ):
        if prefix := _prefix(names, anchor):
            return _transformers(store, prefix[0], anchor)
    if prefix := _prefix(names, "conv_proj.weight", "encoder.ln.weight"):
        return _torchvision(store, prefix[0])
    if prefix := _prefix(names, "conv1.weight", "class_embedding"):
        return _open_clip(store, prefix[0])
    for anchor, other in _TIMM:
        if prefix := _prefix(names, anchor, other):
            return _timm(store, prefix[0])
    hf.read_config(store.path.parent)  # may name a model of transformers' that is none of ours
    if _prefix(names, "gn_root/scale", "head/kernel"):
        raise CheckpointError("is a post-activation ResNet of big_vision's", where=store.path)
    raise CheckpointError(
        "does not hold a Vision Transformer or a BiT ResNet under names that vit knows",
        where=store.path,
        hint="it knows timm's, transformers', torchvision's, vit_jax's and big_vision's",
    )


_AVERAGED = re.compile(r"(^|[._/])(ema|teacher|target_encoder)([._/]|$)")
_SLOTS = re.compile(r"^(opt|optimizer|opt_state)/(?!target/)|(^|/)(state|mu|nu)/")


def _prefix(names: Iterable[str], anchor: str, other: str = "") -> list[str]:
    """What stands before the anchor (and `other`) in the names; empty where neither is there.
    An averaged model comes before its student, and a model before what an optimiser keeps of it."""
    names = set(names)
    found = [name.removesuffix(anchor) for name in names if name.endswith(anchor)]
    found = [prefix for prefix in found if not other or prefix + other in names]

    def likely(prefix: str) -> tuple[bool, bool, int, str]:
        slots, averaged = _SLOTS.search(prefix), _AVERAGED.search(prefix)
        return bool(slots), not averaged, len(prefix), prefix

    return sorted(found, key=likely)[:1]


def _below(store: Store, prefix: str) -> tuple[dict[str, LazyTensor], tuple[str, ...]]:
    """The tensors under a prefix without it, and the names of the rest."""
    inside = {n.removeprefix(prefix): t for n, t in store.tensors.items() if n.startswith(prefix)}
    return inside, tuple(name for name in store.tensors if not name.startswith(prefix))


# ---------------------------------------------------------------------------------------------
# .npz files

TRAINING = r"^(opt|optimizer|opt_state|state)/|^(global_)?step$|^epoch$"
"""What a training run keeps beside its weights."""


def _flax(store: Store, prefix: str) -> Layout:
    """vit_jax's and big_vision's files of ViTs and hybrids."""
    inside, outside = _below(store, prefix)
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
    elif position == keymaps.POSITIONS[0] and "cls" in tensors:
        fields |= {"posemb_tokens": "all"}  # 49 are never 7 x 7 patches here
    if "conv_root/kernel" in tensors:
        rows += keymaps.stem_rows(_units(tensors), _flat(tensors, "gn_root/scale"))
    # flax's epsilons, and what they are added to
    resnet = {"std_eps": 1e-5, "std_eps_in": "deviation", "norm_eps": 1e-6}
    names = {
        n: prefix + re.sub(r"(encoderblock)_\d+", r"\1", n) for n in set(tensors) - set(inside)
    }
    name = "vit-npz" if authors else "big_vision"
    return Layout(name, rows, tensors, name, TRAINING, prefix, names, outside, fields, resnet)


_BIT = "root_block/standardized_conv2d/kernel"
_BIT_PAPER = "root_block/conv_root/kernel"
_NUMBERED = (r"(/standardized_conv2d)_\d+/", r"\1/")
"""Some of the authors' files number their convolutions: a pattern, and what replaces it."""


def _bit(store: Store, prefix: str, paper: bool) -> Layout:
    """A BiT ResNet of its authors', or of big_vision's `bit_paper`, which pads with -inf."""
    inside, outside = _below(store, prefix)
    tensors, names = _renamed(inside, prefix, *_NUMBERED)
    rows = keymaps.bit_rows(_units(tensors), paper, _flat(tensors, "norm-pre-head/scale"))
    resnet: dict[str, Any] = {"std_eps": 1e-10, "pool_padding": "-inf" if paper else "zeros"}
    name = "big_vision" if paper else "bit-npz"
    return Layout(name, rows, tensors, "bit", TRAINING, prefix, names, outside, resnet=resnet)


def _renamed(
    tensors: Mapping[str, LazyTensor], prefix: str, pattern: str, by: str
) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """Tensors under simpler names, and what the file calls them."""
    names = {re.sub(pattern, by, name): name for name in tensors}
    simpler = {new: tensors[old] for new, old in names.items()}
    return simpler, {new: prefix + old for new, old in names.items() if new != old}


def _units(names: Iterable[str]) -> tuple[int, ...]:
    """How many units each of a ResNet's blocks has."""
    units = [re.match(r"block([1-4])/unit(\d{1,3})/", name) for name in names]
    found = {(int(m[1]), int(m[2])) for m in units if m}
    blocks = range(1, 1 + max((block for block, _ in found), default=0))
    return tuple(sum(block == k for block, _ in found) for k in blocks)


def _flat(tensors: Mapping[str, LazyTensor], norm: str) -> bool:
    """Whether a norm's scale is (C,) and not (1, 1, 1, C)."""
    return norm in tensors and len(tensors[norm].shape) == 1


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


# ---------------------------------------------------------------------------------------------
# PyTorch's files


def _transformers(store: Store, prefix: str, anchor: str) -> Layout:
    config = hf.read_config(store.path.parent)
    names = store.tensors
    classifying: dict[str, Any] = {}
    if anchor.endswith("patch_embedding.weight"):
        siglip = f"{prefix}embeddings.class_embedding" not in names
        kind = "siglip_vision_model" if siglip else "clip_vision_model"
        rows = keymaps.prefixed(keymaps.TRANSFORMERS["clip"], prefix)
        drop = r"position_ids$|^text_model\.|_projection\.weight$|^logit_(scale|bias)$"
        if "classifier.weight" in names:  # which sees the mean of the patches, not what is pooled
            unused = "attn_pool." if siglip else "norm."
            rows = tuple(row for row in rows if not row.ours[0].startswith(unused))
            rows += keymaps.HEAD
            classifying = {"pool": "gap", "fc_norm": False}
            drop += r"|(^|\.)head\." if siglip else r"|(^|\.)post_layernorm\."
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
        if f"{prefix}embeddings.distillation_token" in names and not teacher:
            # What is read is the class token alone: the other one is as a register.
            names_of = {"dist_token": "reg_token"}
            rows = tuple(
                row._replace(ours=tuple(names_of.get(n, n) for n in row.ours))
                for row in rows
                if row.ours != ("reg_token",)
            )
        if any(name.endswith("classifier.weight") for name in names):
            drop += r"|pooler\."
            rows = tuple(row for row in rows if not row.ours[0].startswith("pre_logits"))
    fields = {"activation": "gelu", "norm_eps": 1e-6, **hf.model_fields(config, store.path)}
    fields |= classifying
    kind = config.get("model_type", kind)
    return Layout("transformers", rows, names, kind, drop, fields=fields, config=config)


def _torchvision(store: Store, prefix: str) -> Layout:
    inside, outside = _below(store, prefix)
    old = any(".mlp.linear_1." in name for name in inside)
    rows = keymaps.TORCHVISION["torchvision-old" if old else "torchvision"]
    return Layout("torchvision", rows, inside, "torchvision", prefix=prefix, outside=outside)


def _open_clip(store: Store, prefix: str) -> Layout:
    """The image half of a CLIP under OpenAI's names, which open_clip's files have too."""
    inside, outside = _below(store, prefix)
    config = open_clip.read_config(store.path.parent)
    fields = {"norm_eps": 1e-5, **open_clip.model_fields(config)}
    if "input_resolution" in outside:  # OpenAI's own, all of them with quick GELU
        heads = max(math.prod(inside["class_embedding"].shape) // 64, 1)
        fields |= {"activation": "quick_gelu", "num_heads": heads}
    rows, kind = keymaps.OPEN_CLIP, "clip_vision_model"
    drop = r"^proj$"  # to the space that is shared with the text
    return Layout("open_clip", rows, inside, kind, drop, prefix, {}, outside, fields, config=config)


_TIMM = (
    ("patch_embed.proj.weight", "blocks.0.norm1.weight"),
    ("patch_embed.proj.weight", "blocks.0.0.norm1.weight"),
    ("stem.conv.weight", "stages.0.blocks.0.norm1.weight"),
)
"""Names by which timm's are known: of a ViT, of one whose blocks are in chunks, of a BiT ResNet."""


def _timm(store: Store, prefix: str) -> Layout:
    """timm's names, as DeiT, DINO, DINOv2 and MAE released theirs too."""
    inside, outside = _below(store, prefix)
    # DINOv2 trains with blocks in chunks, each numbered by its chunk and by itself.
    tensors, names = _renamed(inside, prefix, r"^blocks\.\d+\.(\d+\.)", r"blocks.\1")
    rows = tuple(Row((name,), (name,)) for name in tensors if _TIMMS_NAME.fullmatch(name))
    rows += tuple(row for row in keymaps.META if row.theirs[0].replace("{i}", "0") in tensors)
    drop = r"mask_token$|(^|\.)decoder_|^rope|head\.(mlp|last_layer)"
    if "decoder_pos_embed" in tensors:
        drop += r"|^decoder"
    return Layout("timm", rows, tensors, "timm", drop, prefix, names, outside)


_TIMMS_NAME = re.compile(
    r"(cls|dist|reg)_token|pos_embed(_row|_column)?|patch_embed\.proj\.(weight|bias)|"
    r"blocks\.\d+\.(norm1|norm2|attn\.qkv|attn\.proj|mlp\.fc1|mlp\.fc2)\.(weight|bias)|"
    r"blocks\.\d+\.ls[12]\.gamma|(norm_pre|norm|fc_norm|head|head_dist)\.(weight|bias)|"
    r"pre_logits\.fc\.(weight|bias)|attn_pool\..*|"
    r"(patch_embed\.backbone\.)?(stem|stages|conv|norm)\..*|head\.fc\.(weight|bias)"
)
"""What our models could have."""

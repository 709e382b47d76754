"""Shared code of the npz layouts: vit_jax, big_vision and BiT.

Sources: vit_jax/models_vit.py, vit_jax/models_resnet.py, big_vision/models/{vit,bit_paper}.py.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vitcli.architectures.vit import STEM
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.tensor_file import RESIZE_KEY, LazyTensor, Store
from vitcli.config import BiTConfig, Preprocess
from vitcli.layouts.layout import Layout, Match, find_prefix, tensors_under
from vitcli.layouts.table import CHANNELS, SAME, Row, rows

TRAINING = r"^(opt|optimizer|opt_state|state)/|^(global_)?step$|^epoch$"
"""A regex for training state stored alongside the weights."""

VIT_FIELDS = {"activation": "gelu_tanh", "norm_eps": 1e-6}
"""`ModelConfig` fields of every ViT."""
STEM_FIELDS = {"std_eps": 1e-5, "std_eps_in": "deviation", "norm_eps": 1e-6}
"""`ResNetConfig` fields of every hybrid's stem."""

SQUASHED = Preprocess(interpolation="bilinear", crop_mode="squash")
CROPPED = Preprocess(interpolation="bilinear", crop_pct=0.875)
"""Default preprocessing; big_vision crops images for its ViT classifiers."""

POSEMB_NAMES = (
    "Transformer/posembed_input/pos_embedding",
    "pos_embedding",
    "Transformer/pos_embedding",
)
"""Names of the position embeddings: in vit_jax, big_vision, and big_vision before 2022."""

_VIT_TABLE = """
cls_token                cls
patch_embed.proj.*       embedding/*                       conv
pos_embed                {pos_embed}
blocks.{i}.norm1.*       {block}/{norm1}/*                 norm
blocks.{i}.attn.qkv.*    {block}/{attn}/[query,key,value]/*  qkv
blocks.{i}.attn.proj.*   {block}/{attn}/out/*              out
blocks.{i}.norm2.*       {block}/{norm2}/*                 norm
blocks.{i}.mlp.fc1.*     {block}/{mlp}/Dense_0/*           matrix
blocks.{i}.mlp.fc2.*     {block}/{mlp}/Dense_1/*           matrix
norm.*                   Transformer/encoder_norm/*        norm
pre_logits.fc.*          pre_logits/*                      matrix
head.*                   head/*                            matrix
"""
_MAP_TABLE = """
attn_pool.latent         {map}probe
attn_pool.q.*            {map}{attn}/query/*               qkv
attn_pool.kv.*           {map}{attn}/[key,value]/*       qkv
attn_pool.proj.*         {map}{attn}/out/*                 out
attn_pool.norm.*         {map}LayerNorm_0/*                norm
attn_pool.mlp.fc1.*      {map}{mlp}/Dense_0/*              matrix
attn_pool.mlp.fc2.*      {map}{mlp}/Dense_1/*              matrix
"""
_BLOCK = "Transformer/encoderblock_{i}"
_ATTENTION = "MultiHeadDotProductAttention_"
PRE_LINEN = {"norm1": "LayerNorm_0", "attn": f"{_ATTENTION}1", "norm2": "LayerNorm_2"}
PRE_LINEN |= {"mlp": "MlpBlock_3"}  # one counter for all submodules of a block
LINEN = {"norm1": "LayerNorm_0", "attn": f"{_ATTENTION}0", "norm2": "LayerNorm_1"}
LINEN |= {"mlp": "MlpBlock_0"}  # a counter for each class of submodule


def vit_rows(submodules: dict[str, str], posemb_name: str, map_head: str | None) -> tuple[Row, ...]:
    """Return the table for a ViT.

    Args:
        submodules: their names, PRE_LINEN or LINEN.
        posemb_name: the name of the position embeddings.
        map_head: the prefix of the attention pool; None: there is none.
    """
    table = rows(_VIT_TABLE, pos_embed=posemb_name, block=_BLOCK, **submodules)
    return table if map_head is None else table + rows(_MAP_TABLE, map=map_head, **LINEN)


HYBRID_TABLES = (
    """
{root}conv.weight        conv_root/kernel                  conv
{root}norm.*             gn_root/*                         channels
""",
    """
{ours}.conv{k}.weight    {unit}/conv{k}/kernel             conv
{ours}.norm{k}.*         {unit}/gn{k}/*                    channels
""",
    """
{ours}.downsample.conv.weight  {unit}/conv_proj/kernel     conv
{ours}.downsample.norm.*       {unit}/gn_proj/*            channels
""",
)
"""Tables of a ResNet's root, of layers 1, 2 and 3 of its units, and of the downsampling in the
first unit of a stage."""


def stem_rows(depths: tuple[int, ...], flat: bool = False) -> tuple[Row, ...]:
    """Return the table for a hybrid's ResNet, with `depths` units a block; `flat`: (C,) norms."""
    root = HYBRID_TABLES[0].replace("{root}", STEM + ("stem." if depths else ""))
    return resnet_rows((root, *HYBRID_TABLES[1:]), depths, STEM, "unit{}", flat)


def resnet_rows(
    tables: tuple[str, str, str], depths: tuple[int, ...], prefix: str, unit_format: str, flat: bool
) -> tuple[Row, ...]:
    """Return the table for a ResNet: `tables` like HYBRID_TABLES, `unit_format` for unit names."""
    root, layer, downsample = tables
    pairs = zip("123", "abc", strict=True)
    layers = "".join(layer.replace("{k}", k).replace("{letter}", letter) for k, letter in pairs)
    table = rows(root)
    for s, depth in enumerate(depths):
        for b in range(depth):
            unit_table = layers + downsample if b == 0 else layers
            unit_table = unit_table.replace("{ours}", f"{prefix}stages.{s}.blocks.{b}")
            table += rows(unit_table, unit=f"block{s + 1}/{unit_format.format(b + 1)}")
    return tuple(row._replace(op=SAME) if flat and row.op == CHANNELS else row for row in table)


def count_units(names: Iterable[str]) -> tuple[int, ...]:
    """Count the units in each block of a ResNet."""
    matches = [re.match(r"block([1-4])/unit(\d{1,3})/", name) for name in names]
    pairs = {(int(m[1]), int(m[2])) for m in matches if m}
    blocks = range(1, 1 + max((block for block, _ in pairs), default=0))
    return tuple(sum(block == k for block, _ in pairs) for k in blocks)


def is_flat(tensors: Mapping[str, LazyTensor], norm: str) -> bool:
    """Whether a norm's scale has shape (C,) rather than (1, 1, 1, C)."""
    return norm in tensors and len(tensors[norm].shape) == 1


def find_vit(store: Store, vit_jax: bool) -> Match | None:
    """Match a ViT or hybrid of vit_jax (if `vit_jax`) or of big_vision."""
    prefix = find_prefix(store.tensors, "embedding/kernel", "Transformer/encoder_norm/scale")
    if prefix is None:
        return None
    tensors = _unstack_blocks(tensors_under(store, prefix))
    first_block = _BLOCK.replace("{i}", "0")
    pre_linen = f"{first_block}/{PRE_LINEN['attn']}/query/kernel" in tensors
    posemb_name = next((name for name in POSEMB_NAMES if name in tensors), POSEMB_NAMES[1])
    if vit_jax != (pre_linen or posemb_name == POSEMB_NAMES[0]):
        return None
    map_head = next((p for p in ("MAPHead_0/", "") if f"{p}probe" in tensors), None)
    submodules = PRE_LINEN if pre_linen else LINEN
    query = tensors.get(f"{first_block}/{submodules['attn']}/query/kernel")  # (D, heads, D / heads)
    heads = query.shape[1] if query is not None and len(query.shape) == 3 else 1
    fields: dict[str, Any] = {**VIT_FIELDS, "num_heads": heads}
    if posemb_name not in tensors:
        fields |= {"posemb": "sincos2d", "posemb_tokens": "patches"}
    table = vit_rows(submodules, posemb_name, map_head)
    if "conv_root/kernel" in tensors:
        table += stem_rows(count_units(tensors), is_flat(tensors, "gn_root/scale"))
    return Match(
        table,
        tensors,
        TRAINING,
        fields,
        STEM_FIELDS,
        # In vit_jax, 49 embeddings are never 7 x 7 patches; in big_vision, they usually are.
        posemb_tokens=("all",) if posemb_name == POSEMB_NAMES[0] else ("patches", "all"),
        default=SQUASHED if vit_jax or map_head is not None else CROPPED,
    )


def _unstack_blocks(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Split blocks that big_vision's `scan` stacked along a first axis; each gets its own name."""
    prefix, unstacked = "Transformer/encoderblock/", {}
    for name, tensor in tensors.items():
        if not name.startswith(prefix) or not tensor.shape:
            unstacked[name] = tensor
            continue
        read_all = functools.cache(tensor.read)  # npz arrays cannot be read in part
        for i in range(min(tensor.shape[0], 10_000)):
            read = functools.partial(_read_block, read_all, i)
            block = tensor._replace(shape=tensor.shape[1:], read=read)
            unstacked[f"Transformer/encoderblock_{i}/{name.removeprefix(prefix)}"] = block
    return unstacked


def _read_block(read: Callable[[], Any], i: int) -> Any:
    return read()[i]


class NpzLayout(Layout):
    """Base class of the npz layouts."""

    library = "timm"
    suffixes = (".npz",)

    def metadata(self, info: CheckpointInfo) -> Mapping[str, str]:
        """Record how the position embeddings were resized, or their grid where it is not square."""
        rows, columns = info.model.grid
        resized = info.provenance.get(RESIZE_KEY)
        if not resized and rows != columns:
            resized = {"method": "bilinear", "from": [rows, columns], "to": [rows, columns]}
        return {RESIZE_KEY: json.dumps(resized)} if resized else {}

    def warnings(self, info: CheckpointInfo) -> list[str]:
        model, notes = info.model, ["an npz file stores neither class names nor preprocessing"]
        if isinstance(model, BiTConfig):
            if (model.resnet.std_eps, model.resnet.std_eps_in) != (1e-10, "variance"):
                notes.append(
                    "programs that read it standardize weights with epsilon 1e-10: logits differ"
                )
            return notes
        size = tuple(n * side for n, side in zip(model.grid, model.patch_size, strict=True))
        if model.image_size != size:
            theirs, ours = (f"{height} x {width}" for height, width in (size, model.image_size))
            notes.append(f"vit reads it with images of {theirs} pixels, not {ours}")
        if model.activation != "gelu_tanh":
            notes.append(
                "programs that read it approximate GELU by tanh: logits differ by about 1e-4"
            )
        if model.norm_eps != 1e-6:
            notes.append(f"programs that read it use LayerNorm epsilon 1e-6, not {model.norm_eps}")
        if model.stem and model.stem.std_eps_in != "deviation":
            notes.append(
                "programs that read it standardize weights with epsilon 1e-5: logits differ"
            )
        return notes

"""Names of the same tensors in other layouts: tables, read in both directions.

A row is (ours, theirs, op): the tensors of `ours` side by side along the first axis are those of
`theirs` side by side once `op` is undone on each. `{i}` counts the blocks. Our names are timm's.
Sources: vit_jax/models_vit.py, big_vision/models/{vit,bit_paper}.py, bit_pytorch/models.py,
transformers' modeling_{vit,deit,dinov2,dinov2_with_registers,vit_mae,siglip,clip}.py,
torchvision/models/vision_transformer.py, deit/models_v2.py, dinov2/models/vision_transformer.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from vitcli.architectures import STEM


class Op(NamedTuple):
    """How their array lies beside ours. Each field is undone exactly, so a round trip is too."""

    heads: int | None = None
    """The axis of ours that they have as two: heads, and channels of a head."""
    order: tuple[int, ...] | None = None
    """The order of the axes, of ours after that, in theirs."""
    units: int = 0
    """Leading axes of length 1 that ours has and theirs has not (below 0: the other way)."""

    def save(self, array: Any, num_heads: int) -> Any:
        """Our array as theirs."""
        shape = tuple(array.shape)
        if self.heads is not None:
            split = (num_heads, shape[self.heads] // num_heads)
            array = array.reshape(*shape[: self.heads], *split, *shape[self.heads + 1 :])
        if self.order is not None:
            array = array.transpose(self.order)
        return array.reshape(self._trim(tuple(array.shape)))

    def load(self, array: Any) -> Any:
        """Their array as ours."""
        shape = tuple(array.shape)
        array = array.reshape((1,) * self.units + shape if self.units > 0 else shape[-self.units :])
        if self.order is not None:
            array = array.transpose([self.order.index(k) for k in range(len(self.order))])
        if self.heads is not None:
            shape, k = tuple(array.shape), self.heads
            array = array.reshape(*shape[:k], shape[k] * shape[k + 1], *shape[k + 2 :])
        return array

    def _trim(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[self.units :] if self.units >= 0 else (1,) * -self.units + shape


SAME = Op()
MATRIX = Op(order=(1, 0))  # (out, in) is (in, out) in flax
CONV = Op(order=(2, 3, 1, 0))  # OIHW is HWIO
QKV = Op(heads=0, order=(2, 0, 1))  # (heads * d, D) is (D, heads, d)
OUT = Op(heads=1, order=(1, 2, 0))  # (D, heads * d) is (heads, d, D)
HEADS = Op(heads=0)  # (heads * d,) is (heads, d)
TABLE = Op(units=1)  # (1, N, D) is (N, D)
VECTOR = Op(units=2)  # (1, 1, D) is (D,)
CHANNELS = Op(units=-3)  # (C,) is (1, 1, 1, C)
POINTWISE = Op(order=(2, 3, 1, 0), units=2)  # (O, I, 1, 1) is (I, O)


class Row(NamedTuple):
    """Tensors of ours and of theirs that hold the same numbers."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    op: Op = SAME


def _rows(table: str, **names: str) -> tuple[Row, ...]:
    """Rows from text: `ours  theirs[,theirs...]  [op]`, where `*` is both weight and bias (in flax
    `kernel` and `bias`, for a norm `scale` and `bias`, in TensorFlow `gamma` and `beta`) and
    {words} come from `names`."""
    ops = {
        "same": (SAME, SAME),
        "matrix": (MATRIX, SAME),
        "conv": (CONV, SAME),
        "qkv": (QKV, HEADS),
        "out": (OUT, SAME),
        "table": (TABLE, SAME),
        "vector": (VECTOR, SAME),
        "channels": (CHANNELS, CHANNELS),
        "pointwise": (POINTWISE, SAME),
    }
    parts_of = {
        "norm": ("scale", "bias"),
        "channels": ("scale", "bias"),
        "gamma": ("gamma", "beta"),
    }
    parts_of |= dict.fromkeys(("same", "table", "vector"), ("weight", "bias"))
    rows = []
    for line in table.strip().splitlines():
        ours, theirs, kind = (line.split() + ["same"])[:3]
        for word, name in names.items():
            theirs = theirs.replace(f"{{{word}}}", name)
        weight, bias = parts_of.get(kind, ("kernel", "bias"))
        weight_op, bias_op = ops.get(kind, (SAME, SAME))
        parts = (("weight", weight, weight_op), ("bias", bias, bias_op))
        for part, their_part, op in parts if "*" in line else (("", "", weight_op),):
            left = tuple(ours.replace("*", part).split(","))
            right = tuple(theirs.replace("*", their_part).split(","))
            rows.append(Row(left, right, op))
    return tuple(rows)


# ---------------------------------------------------------------------------------------------
# The authors' flax files (.npz)

_FLAX = """
cls_token                cls
patch_embed.proj.*       embedding/*                       conv
pos_embed                {pos_embed}
blocks.{i}.norm1.*       {block}/{norm1}/*                 norm
blocks.{i}.attn.qkv.*    {block}/{attn}/query/*,{block}/{attn}/key/*,{block}/{attn}/value/*  qkv
blocks.{i}.attn.proj.*   {block}/{attn}/out/*              out
blocks.{i}.norm2.*       {block}/{norm2}/*                 norm
blocks.{i}.mlp.fc1.*     {block}/{mlp}/Dense_0/*           matrix
blocks.{i}.mlp.fc2.*     {block}/{mlp}/Dense_1/*           matrix
norm.*                   Transformer/encoder_norm/*        norm
pre_logits.fc.*          pre_logits/*                      matrix
head.*                   head/*                            matrix
"""
_MAP = """
attn_pool.latent         {map}probe
attn_pool.q.*            {map}{attn}/query/*               qkv
attn_pool.kv.*           {map}{attn}/key/*,{map}{attn}/value/*  qkv
attn_pool.proj.*         {map}{attn}/out/*                 out
attn_pool.norm.*         {map}LayerNorm_0/*                norm
attn_pool.mlp.fc1.*      {map}{mlp}/Dense_0/*              matrix
attn_pool.mlp.fc2.*      {map}{mlp}/Dense_1/*              matrix
"""
_ATTENTION = "MultiHeadDotProductAttention_"
PRE_LINEN = {"norm1": "LayerNorm_0", "attn": f"{_ATTENTION}1", "norm2": "LayerNorm_2"}
PRE_LINEN |= {"mlp": "MlpBlock_3"}  # one counter for all parts of a block
LINEN = {"norm1": "LayerNorm_0", "attn": f"{_ATTENTION}0", "norm2": "LayerNorm_1"}
LINEN |= {"mlp": "MlpBlock_0"}  # a counter for each kind

FLAX_BLOCK = "Transformer/encoderblock_{i}"
POSITIONS = (
    "Transformer/posembed_input/pos_embedding",
    "pos_embedding",
    "Transformer/pos_embedding",
)
"""Of the authors, of big_vision, of big_vision before 2022."""


def flax_rows(numbers: dict[str, str], positions: str, map_head: str) -> tuple[Row, ...]:
    """The table of a flax file.

    Args:
        numbers: PRE_LINEN or LINEN.
        positions: the name of the position embeddings.
        map_head: what stands before the names of the attention pool.
    """
    names = {"pos_embed": positions, "block": FLAX_BLOCK, **numbers}
    return _rows(_FLAX, **names) + _rows(_MAP, map=map_head, **LINEN)


_HYBRID = (
    """
{root}conv.weight        conv_root/kernel                  conv
{root}norm.*             gn_root/*                         channels
""",
    """
{ours}.conv1.weight      {unit}/conv1/kernel               conv
{ours}.norm1.*           {unit}/gn1/*                      channels
{ours}.conv2.weight      {unit}/conv2/kernel               conv
{ours}.norm2.*           {unit}/gn2/*                      channels
{ours}.conv3.weight      {unit}/conv3/kernel               conv
{ours}.norm3.*           {unit}/gn3/*                      channels
""",
    """
{ours}.downsample.conv.weight  {unit}/conv_proj/kernel     conv
{ours}.downsample.norm.*       {unit}/gn_proj/*            channels
""",
)
_BIT = (
    """
stem.conv.weight         root_block/standardized_conv2d/kernel  conv
norm.*                   group_norm/*                      gamma
head.fc.*                head/conv2d/*                     conv
""",
    """
{ours}.norm1.*           {unit}/a/group_norm/*             gamma
{ours}.conv1.weight      {unit}/a/standardized_conv2d/kernel    conv
{ours}.norm2.*           {unit}/b/group_norm/*             gamma
{ours}.conv2.weight      {unit}/b/standardized_conv2d/kernel    conv
{ours}.norm3.*           {unit}/c/group_norm/*             gamma
{ours}.conv3.weight      {unit}/c/standardized_conv2d/kernel    conv
""",
    """
{ours}.downsample.conv.weight  {unit}/a/proj/standardized_conv2d/kernel  conv
""",
)
_BIT_PAPER = (
    """
stem.conv.weight         root_block/conv_root/kernel       conv
norm.*                   norm-pre-head/*                   channels
head.fc.*                head/*                            pointwise
""",
    _HYBRID[1],
    """
{ours}.downsample.conv.weight  {unit}/conv_proj/kernel     conv
""",
)
"""A ResNet's root (and head), any of its units, and a stage's first one."""


def stem_rows(depths: tuple[int, ...], flat: bool = False) -> tuple[Row, ...]:
    """The table of a hybrid's ResNet with so many units a block; `flat`: norms are (C,)."""
    root = _HYBRID[0].replace("{root}", STEM + ("stem." if depths else ""))
    return _resnet_rows((root, *_HYBRID[1:]), depths, STEM, "unit{}", flat)


def bit_rows(depths: tuple[int, ...], paper: bool = False, flat: bool = False) -> tuple[Row, ...]:
    """The table of a BiT ResNet, as its authors wrote it (from "resnet/" on) or as big_vision's
    `bit_paper` does."""
    return _resnet_rows(_BIT_PAPER if paper else _BIT, depths, "", "unit{:02}", flat)


def _resnet_rows(
    tables: tuple[str, str, str], depths: tuple[int, ...], prefix: str, unit: str, flat: bool
) -> tuple[Row, ...]:
    root, units, first = tables
    rows = _rows(root)
    for s, depth in enumerate(depths):
        for b in range(depth):
            table = units + (first.lstrip() if b == 0 else "")
            table = table.replace("{ours}", f"{prefix}stages.{s}.blocks.{b}")
            rows += _rows(table, unit=f"block{s + 1}/{unit.format(b + 1)}")
    return tuple(row._replace(op=SAME) if flat and row.op == CHANNELS else row for row in rows)


# ---------------------------------------------------------------------------------------------
# transformers (rows without a prefix such as "vit.") and torchvision

_HF_EMBEDDINGS = """
cls_token                embeddings.cls_token
dist_token               embeddings.distillation_token
reg_token                embeddings.register_tokens
pos_embed                embeddings.position_embeddings
patch_embed.proj.*       embeddings.patch_embeddings.projection.*
norm.*                   layernorm.*
"""
_HF_VIT = """
blocks.{i}.norm1.*       encoder.layer.{i}.layernorm_before.*
blocks.{i}.attn.qkv.*    {qkv}
blocks.{i}.attn.proj.*   encoder.layer.{i}.attention.output.dense.*
blocks.{i}.norm2.*       encoder.layer.{i}.layernorm_after.*
blocks.{i}.mlp.fc1.*     encoder.layer.{i}.intermediate.dense.*
blocks.{i}.mlp.fc2.*     encoder.layer.{i}.output.dense.*
pre_logits.fc.*          pooler.dense.*
"""
_HF_VIT_5 = """
blocks.{i}.norm1.*       layers.{i}.layernorm_before.*
blocks.{i}.attn.qkv.*    {qkv}
blocks.{i}.attn.proj.*   layers.{i}.attention.o_proj.*
blocks.{i}.norm2.*       layers.{i}.layernorm_after.*
blocks.{i}.mlp.fc1.*     layers.{i}.mlp.fc1.*
blocks.{i}.mlp.fc2.*     layers.{i}.mlp.fc2.*
pre_logits.fc.*          pooler.dense.*
"""
_HF_DINOV2 = """
blocks.{i}.norm1.*       {layer}.norm1.*
blocks.{i}.attn.qkv.*    {qkv}
blocks.{i}.attn.proj.*   {out}.*
blocks.{i}.ls1.gamma     {layer}.layer_scale1.lambda1
blocks.{i}.norm2.*       {layer}.norm2.*
blocks.{i}.mlp.fc1.*     {layer}.mlp.{fc1}
blocks.{i}.mlp.fc2.*     {layer}.mlp.{fc2}
blocks.{i}.ls2.gamma     {layer}.layer_scale2.lambda1
"""
_HF_CLIP = """
cls_token                embeddings.class_embedding                vector
patch_embed.proj.*       embeddings.patch_embedding.*
pos_embed                embeddings.position_embedding.weight      table
norm_pre.*               pre_layrnorm.*
blocks.{i}.norm1.*       encoder.layers.{i}.layer_norm1.*
blocks.{i}.attn.qkv.*    {qkv}
blocks.{i}.attn.proj.*   encoder.layers.{i}.self_attn.out_proj.*
blocks.{i}.norm2.*       encoder.layers.{i}.layer_norm2.*
blocks.{i}.mlp.fc1.*     encoder.layers.{i}.mlp.fc1.*
blocks.{i}.mlp.fc2.*     encoder.layers.{i}.mlp.fc2.*
norm.*                   post_layernorm.*
attn_pool.latent         head.probe
attn_pool.q.weight,attn_pool.kv.weight  head.attention.in_proj_weight
attn_pool.q.bias,attn_pool.kv.bias      head.attention.in_proj_bias
attn_pool.proj.*         head.attention.out_proj.*
attn_pool.norm.*         head.layernorm.*
attn_pool.mlp.fc1.*      head.mlp.fc1.*
attn_pool.mlp.fc2.*      head.mlp.fc2.*
"""
_OPEN_CLIP = """
cls_token                class_embedding                           vector
patch_embed.proj.*       conv1.*
pos_embed                positional_embedding                      table
norm_pre.*               ln_pre.*
blocks.{i}.norm1.*       {layer}.ln_1.*
blocks.{i}.attn.qkv.weight  {layer}.attn.in_proj_weight
blocks.{i}.attn.qkv.bias    {layer}.attn.in_proj_bias
blocks.{i}.attn.proj.*   {layer}.attn.out_proj.*
blocks.{i}.norm2.*       {layer}.ln_2.*
blocks.{i}.mlp.fc1.*     {layer}.mlp.c_fc.*
blocks.{i}.mlp.fc2.*     {layer}.mlp.c_proj.*
blocks.{i}.ls1.gamma     {layer}.ls_1.gamma
blocks.{i}.ls2.gamma     {layer}.ls_2.gamma
norm.*                   ln_post.*
"""
_TORCHVISION = """
cls_token                class_token
patch_embed.proj.*       conv_proj.*
pos_embed                encoder.pos_embedding
blocks.{i}.norm1.*       {layer}.ln_1.*
blocks.{i}.attn.qkv.weight  {layer}.self_attention.in_proj_weight
blocks.{i}.attn.qkv.bias    {layer}.self_attention.in_proj_bias
blocks.{i}.attn.proj.*   {layer}.self_attention.out_proj.*
blocks.{i}.norm2.*       {layer}.ln_2.*
blocks.{i}.mlp.fc1.*     {layer}.mlp.{fc1}.*
blocks.{i}.mlp.fc2.*     {layer}.mlp.{fc2}.*
norm.*                   encoder.ln.*
pre_logits.fc.*          heads.pre_logits.*
head.*                   heads.head.*
"""


def _qkv(stem: str, names: str = "query key value") -> str:
    return ",".join(f"{stem}.{name}.*" for name in names.split())


_PROJECTIONS = "q_proj k_proj v_proj"


def _dinov2(layer: str, qkv: str, out: str, swiglu: bool) -> tuple[Row, ...]:
    fc1, fc2 = ("fc1.*", "fc2.*")
    if swiglu and out.endswith("o_proj"):
        fc1, fc2 = f"gate_proj.*,{layer}.mlp.up_proj.*", "down_proj.*"
    elif swiglu:
        fc1, fc2 = "weights_in.*", "weights_out.*"
    table = _HF_EMBEDDINGS + _HF_DINOV2.lstrip()
    return _rows(table, qkv=qkv, out=f"{layer}.{out}", layer=layer, fc1=fc1, fc2=fc2)


_OLD, _NEW = "encoder.layer.{i}", "layers.{i}"
_OLD_QKV, _NEW_QKV = _qkv(f"{_OLD}.attention.attention"), _qkv(f"{_NEW}.attention", _PROJECTIONS)
_DINO_OLD = (_OLD, _OLD_QKV, "attention.output.dense")
_DINO_NEW = (_OLD, _qkv(f"{_OLD}.attention", _PROJECTIONS), "attention.o_proj")
_TV = "encoder.layers.encoder_layer_{i}"

TRANSFORMERS = {
    "vit": _rows(_HF_EMBEDDINGS + _HF_VIT.lstrip(), qkv=_OLD_QKV),
    "vit5": _rows(_HF_EMBEDDINGS + _HF_VIT_5.lstrip(), qkv=_NEW_QKV),
    "dinov2": _dinov2(*_DINO_OLD, swiglu=False),
    "dinov2-swiglu": _dinov2(*_DINO_OLD, swiglu=True),
    "dinov2-5": _dinov2(*_DINO_NEW, swiglu=False),
    "dinov2-5-swiglu": _dinov2(*_DINO_NEW, swiglu=True),
    "clip": _rows(_HF_CLIP, qkv=_qkv("encoder.layers.{i}.self_attn", _PROJECTIONS)),
}
"""By family and generation of names: 4.x writes the old ones to disk and 5.x reads both."""

HEAD = _rows("head.*  classifier.*")
TEACHER_HEADS = _rows("head.*  cls_classifier.*\nhead_dist.*  distillation_classifier.*")

TORCHVISION = {
    "torchvision": _rows(_TORCHVISION, layer=_TV, fc1="0", fc2="3"),
    "torchvision-old": _rows(_TORCHVISION, layer=_TV, fc1="linear_1", fc2="linear_2"),
}

OPEN_CLIP = _rows(_OPEN_CLIP, layer="transformer.resblocks.{i}")
"""OpenAI's CLIP and open_clip's, from "visual." on."""

_META = """
reg_token                register_tokens
blocks.{i}.mlp.fc1.*     blocks.{i}.mlp.w12.*
blocks.{i}.mlp.fc2.*     blocks.{i}.mlp.w3.*
blocks.{i}.ls1.gamma     blocks.{i}.gamma_1
blocks.{i}.ls2.gamma     blocks.{i}.gamma_2
"""
META = _rows(_META)
"""What the authors of DINOv2 and of DeiT III call otherwise than timm."""


def expand(rows: tuple[Row, ...], depth: int) -> list[Row]:
    """The rows of a model with so many blocks."""

    def numbered(row: Row, i: int) -> Row:
        left, right = ([n.replace("{i}", str(i)) for n in names] for names in row[:2])
        return Row(tuple(left), tuple(right), row.op)

    return [numbered(row, i) for row in rows for i in range(depth if "{i}" in row.ours[0] else 1)]


def prefixed(rows: tuple[Row, ...], prefix: str) -> tuple[Row, ...]:
    """The rows with a prefix before their names."""
    return tuple(row._replace(theirs=tuple(prefix + n for n in row.theirs)) for row in rows)

"""torchvision's ViTs. Source: torchvision/models/vision_transformer.py."""

from vitcli.checkpoints.tensor_file import Store
from vitcli.config import Preprocess
from vitcli.layouts.layout import IMAGENET, Layout, Match, find_prefix, tensors_under
from vitcli.layouts.table import rows

_TABLE = """
cls_token                class_token
patch_embed.proj.*       conv_proj.*
pos_embed                encoder.pos_embedding
blocks.{i}.norm1.*       {layer}.ln_1.*
blocks.{i}.attn.qkv.weight  {layer}.self_attention.in_proj_weight
blocks.{i}.attn.qkv.bias    {layer}.self_attention.in_proj_bias
blocks.{i}.attn.proj.*   {layer}.self_attention.out_proj.*
blocks.{i}.norm2.*       {layer}.ln_2.*
blocks.{i}.mlp.fc1.*     {layer}.mlp.0.*
blocks.{i}.mlp.fc1.*     {layer}.mlp.linear_1.*
blocks.{i}.mlp.fc2.*     {layer}.mlp.3.*
blocks.{i}.mlp.fc2.*     {layer}.mlp.linear_2.*
norm.*                   encoder.ln.*
pre_logits.fc.*          heads.pre_logits.*
head.*                   heads.head.*
"""


class Torchvision(Layout):
    """Its first version used other names for the two layers of an MLP."""

    name = "torchvision"

    def find(self, store: Store) -> Match | None:
        prefix = find_prefix(store.tensors, "conv_proj.weight", "encoder.ln.weight")
        if prefix is None:
            return None
        tensors = tensors_under(store, prefix)
        table = rows(_TABLE, layer="encoder.layers.encoder_layer_{i}")
        fields = {"activation": "gelu", "norm_eps": 1e-6}
        default = Preprocess((224, 224), *IMAGENET, "bilinear", 0.875)
        return Match(table, tensors, fields=fields, default=default)

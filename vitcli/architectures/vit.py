"""The architecture of Vision Transformers and hybrids: hyperparameters and a table of layers.

Standard library only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from vitcli.architectures.resnet import (
    LARGEST_IMAGE,
    MAX_BLOCKS,
    BiTConfig,
    Layer,
    Layered,
    ResNetConfig,
    Size,
    conv,
    linear,
    norm,
)
from vitcli.errors import ConfigError
from vitcli.fields import check_fields, limited

Pool = Literal["token", "gap", "map", "token+gap"]
Posemb = Literal["learn", "learn2d", "sincos2d", "relative", "none"]
Activation = Literal["gelu", "gelu_tanh", "quick_gelu"]


@dataclass(frozen=True)
class ModelConfig(Layered):
    """The architecture of a Vision Transformer, or of a hybrid, which takes its patches from the
    feature map of a ResNet. These are exactly the fields that a checkpoint stores. Fields with
    their default value are not stored, so no default may ever change.

    Names of sizes follow the paper (arXiv 2010.11929, section 3.1 and Table 1).
    """

    width: int = limited(min=1, max=1 << 20)
    """D, the embedding dimension."""
    depth: int = limited(min=1, max=MAX_BLOCKS)
    """Number of Transformer blocks."""
    num_heads: int = limited(min=1, max=1 << 20)
    """Number of attention heads, with width / num_heads channels each."""
    mlp_dim: int = limited(min=1, max=1 << 20)
    """Hidden dimension of a block's MLP (with SwiGLU: gate and value combined)."""
    patch_size: Size = (16, 16)
    """Height and width of a patch, in pixels."""
    image_size: Size = (224, 224)
    """Height and width of the input, which determine the size of the position embeddings."""
    num_classes: int = limited(0, min=0, max=10**9)
    """Number of outputs of the head; 0: no head, and `model(images)` returns features."""
    class_token: bool = True
    """A learned token before the patches."""
    distill_token: bool = False
    """DeiT's distillation token, with its own head; the logits are the mean of both heads."""
    num_registers: int = limited(0, min=0, max=1 << 20)
    """Number of registers: learned tokens between class token and patches, unused by the head."""
    posemb: Posemb = "learn"
    """learn: one vector per token; learn2d: D/2 for the row and D/2 for the column (paper D.4);
    sincos2d: fixed, as in big_vision; relative: not added to tokens; instead, the attention of each
    block has a bias for each offset between two patches (BEiT); none."""
    posemb_tokens: Literal["all", "class", "patches"] = "all"
    """Tokens that position embeddings are added to: prefix tokens and patches, class token and
    patches (but not registers), or patches only."""
    rope: Literal["none", "dinov3", "eva02"] = "none"
    """Rotary position embeddings: queries and keys are rotated by angles proportional to the row
    and column of the patch. dinov3: from -1 to 1 across the image; eva02: from 0 to 16."""
    pool: Pool = "token"
    """Input of the head: class token, mean of patches, attention pooling, or token and mean."""
    pre_norm: bool = False
    """A LayerNorm before the first block (CLIP)."""
    final_norm: bool = True
    """A LayerNorm over the tokens after the last block."""
    fc_norm: bool = False
    """A LayerNorm after pooling."""
    pre_logits: int = limited(0, min=0, max=1 << 20)
    """Size of the tanh layer before the head (the paper's pre-training head); 0 means none."""
    layer_scale: bool = False
    """A learned per-channel scale on each residual branch of a block."""
    qkv_bias: bool = True
    """Biases of the query, key and value projections."""
    key_bias: bool = True
    """Whether `qkv_bias` includes the key projection (not in EVA-02 and DINOv3)."""
    patch_bias: bool = True
    """Bias of the patch embedding."""
    activation: Activation = "gelu"
    """gelu: exact (timm, transformers); gelu_tanh: the authors' Flax code; quick_gelu: CLIP."""
    swiglu: bool = False
    """SiLU-gated MLP, with gate and value in one matrix, gate first (DINOv2 giant)."""
    sub_norm: Literal["none", "mlp", "both"] = "none"
    """LayerNorm before the output projection of a block's MLP, or of MLP and attention (EVA-02)."""
    norm: Literal["layer", "rms"] = "layer"
    """layer: LayerNorm; rms: RMSNorm, also after the patch embedding, and no biases in the blocks
    other than those of `qkv_bias` (AIMv2)."""
    norm_eps: float = limited(1e-6, min=0, max=1)
    """Epsilon of all normalization layers."""
    stem: ResNetConfig | None = None
    """The ResNet of a hybrid, before the patch embedding."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.width % self.num_heads:
            raise ConfigError(f"width {self.width} is not a multiple of num_heads {self.num_heads}")
        for axis, size, patch in zip(
            ("height", "width"), self.image_size, self.patch_size, strict=True
        ):
            # Not `size % patch`: SigLIP has 14-pixel patches at 384 pixels.
            if not 1 <= patch <= size <= LARGEST_IMAGE:
                raise ConfigError(
                    f"image {axis} {size} is not between the patch size {patch} and {LARGEST_IMAGE}"
                )
        if self.stem and any(patch % self.stem.stride for patch in self.patch_size):
            raise ConfigError(
                f"a patch of {self.patch_size[0]} x {self.patch_size[1]} pixels is not a multiple "
                f"of the ResNet stem's stride {self.stem.stride}"
            )
        if "token" in self.pool and not self.class_token:
            raise ConfigError(f"pool '{self.pool}' needs a class token; use pool 'gap'")
        if self.pool == "token+gap" and (self.pre_logits or self.fc_norm or self.distill_token):
            raise ConfigError(
                "pool 'token+gap' cannot be combined with pre_logits, fc_norm or a distill_token"
            )
        has_other_input = self.pool != "token" or self.fc_norm or self.pre_logits
        if self.distill_token and self.num_classes and has_other_input:
            raise ConfigError(
                "the two heads of a model with a distillation token read its class and "
                "distillation tokens: use pool 'token', without fc_norm and pre_logits"
            )
        if self.posemb == "relative" and (not self.class_token or self.num_prefix_tokens > 1):
            raise ConfigError("posemb 'relative' needs the class token as the only prefix token")
        if self.posemb == "relative" and self.rope != "none":
            raise ConfigError("posemb 'relative' cannot be combined with rope")
        if not self.key_bias and not self.qkv_bias:
            raise ConfigError("key_bias=false has no effect with qkv_bias=false")
        if self.norm == "rms" and self.pool == "map":
            raise ConfigError("norm 'rms' does not support pool 'map'")
        if self.rope != "none" and self.width % (4 * self.num_heads):
            raise ConfigError(
                f"rope '{self.rope}' needs a width that is a multiple of {4 * self.num_heads}, not "
                f"{self.width}"
            )
        if self.posemb in ("learn2d", "sincos2d"):
            if self.posemb_tokens != "patches" and self.num_prefix_tokens:
                raise ConfigError(f"posemb '{self.posemb}' needs posemb_tokens='patches'")
            divisor, smallest = {"learn2d": (2, 2), "sincos2d": (4, 8)}[self.posemb]
            if self.width % divisor or self.width < smallest:
                raise ConfigError(
                    f"posemb '{self.posemb}' needs a width that is a multiple of {divisor}, at "
                    f"least {smallest}, not {self.width}"
                )
        if self.swiglu and self.mlp_dim % 2:
            raise ConfigError(f"SwiGLU needs an even mlp_dim, not {self.mlp_dim}")

    @property
    def grid(self) -> Size:
        """Number of rows and columns of patches."""
        rows, columns = self.image_size if not self.stem else self.stem.feature_map(self.image_size)
        return rows // self.patch_kernel[0], columns // self.patch_kernel[1]

    @property
    def patch_kernel(self) -> Size:
        """Kernel height and width of the patch embedding, in pixels or in cells of the stem's
        feature map."""
        stride = self.stem.stride if self.stem else 1
        return self.patch_size[0] // stride, self.patch_size[1] // stride

    @property
    def patch_channels(self) -> int:
        """Input channels of the patch embedding: RGB, or those of the stem."""
        return self.stem.channels if self.stem else 3

    @property
    def num_prefix_tokens(self) -> int:
        """Number of tokens before the patches: class, distillation, registers, in this order."""
        return int(self.class_token) + int(self.distill_token) + self.num_registers

    @property
    def num_tokens(self) -> int:
        """Sequence length in the blocks."""
        return self.num_prefix_tokens + self.grid[0] * self.grid[1]

    @property
    def num_head_tokens(self) -> int | None:
        """Number of leading tokens that the head reads; None if it reads the patches."""
        return 1 + int(self.distill_token) if self.pool == "token" else None

    @property
    def posemb_prefix(self) -> int:
        """Number of prefix tokens that have a position embedding."""
        if self.posemb != "learn" or self.posemb_tokens == "patches":
            return 0
        return int(self.class_token) if self.posemb_tokens == "class" else self.num_prefix_tokens

    @property
    def posemb_tables(self) -> tuple[str, ...]:
        """Names of the position embedding tensors, whose shapes depend on the grid."""
        return tuple(layer.name for layer in self._posemb_layers())

    @property
    def feature_dim(self) -> int:
        """Output dimension of `features`, which is the input of the head."""
        return self.pre_logits or self.width * (2 if self.pool == "token+gap" else 1)

    def with_image_size(self, image_size: Size) -> ModelConfig:
        """Return the same architecture for another image size.

        Raises:
            ConfigError: the new size is not a multiple of the patch size. (A hybrid's ResNet pads.)
        """
        check_image_size(image_size, self)
        return dataclasses.replace(self, image_size=image_size)

    def with_classes(self, num_classes: int) -> ModelConfig:
        """Return the same architecture with another number of classes."""
        return dataclasses.replace(self, num_classes=num_classes)

    def num_params(self) -> int:
        return super().num_params() - (0 if self.key_bias else self.depth * self.width)

    def layers(self) -> Iterator[Layer]:
        """Yield all layers, in forward order; `models/vit.py` is tested against this table."""
        d, num_patches = self.width, self.grid[0] * self.grid[1]
        tokens = {"cls_token": int(self.class_token), "dist_token": int(self.distill_token)}
        for name, count in {**tokens, "reg_token": self.num_registers}.items():
            if count:
                yield Layer(name, {name: (1, count, d)})
        yield from self._posemb_layers()
        if self.stem:
            yield from self.stem.layers(self.image_size, STEM)
        channels, kernel = self.patch_channels, self.patch_kernel
        yield conv("patch_embed.proj", channels, d, kernel, num_patches, bias=self.patch_bias)
        if self.norm == "rms":
            yield self._norm("patch_embed.norm")
        if self.pre_norm:
            yield self._norm("norm_pre")
        yield from self.blocks(self.num_tokens)
        if self.final_norm:
            yield self._norm("norm")
        if self.pool == "map":
            yield Layer("attn_pool", {"attn_pool.latent": (1, 1, d)}, 2 * num_patches * d)
            yield linear("attn_pool.q", d, d, 1)
            yield linear("attn_pool.kv", d, 2 * d, num_patches)
            yield linear("attn_pool.proj", d, d, 1)
            yield norm("attn_pool.norm", d)
            yield from self._mlp("attn_pool.mlp", 1, swiglu=False)
        if self.fc_norm:
            yield self._norm("fc_norm")
        if self.pre_logits:
            yield linear("pre_logits.fc", d, self.pre_logits, 1)
        if self.num_classes:
            for name in ("head", "head_dist") if self.distill_token else ("head",):
                yield linear(name, self.feature_dim, self.num_classes, 0)

    def blocks(self, tokens: int) -> Iterator[Layer]:
        """Yield the layers of all blocks, for a sequence length of `tokens`."""
        d = self.width
        for i in range(self.depth):
            block = f"blocks.{i}"
            yield self._norm(f"{block}.norm1")
            yield linear(f"{block}.attn.qkv", d, 3 * d, tokens, self.qkv_bias)
            yield Layer(f"{block}.attn", {}, 2 * tokens**2 * d)
            if self.sub_norm == "both":
                yield self._norm(f"{block}.attn.norm")
            yield linear(f"{block}.attn.proj", d, d, tokens, self.norm != "rms")
            yield self._norm(f"{block}.norm2")
            yield from self._mlp(f"{block}.mlp", tokens, self.swiglu, self.sub_norm != "none")
            if self.layer_scale:
                yield Layer(f"{block}.ls1", {f"{block}.ls1.gamma": (d,)})
                yield Layer(f"{block}.ls2", {f"{block}.ls2.gamma": (d,)})

    def _mlp(self, name: str, tokens: int, swiglu: bool, sub_norm: bool = False) -> Iterator[Layer]:
        hidden, bias = self.mlp_dim // (2 if swiglu else 1), self.norm != "rms"
        yield linear(f"{name}.fc1", self.width, self.mlp_dim, tokens, bias)
        if sub_norm:
            yield self._norm(f"{name}.norm", hidden)
        yield linear(f"{name}.fc2", hidden, self.width, tokens, bias)

    def _norm(self, name: str, channels: int | None = None) -> Layer:
        layer = norm(name, channels or self.width)
        weight = f"{name}.weight"
        return layer if self.norm == "layer" else Layer(name, {weight: layer.tensors[weight]})

    def _posemb_layers(self) -> Iterator[Layer]:
        rows, columns = self.grid
        table = (1, self.posemb_prefix + rows * columns, self.width)
        if self.posemb in ("learn", "sincos2d"):
            yield Layer("pos_embed", {"pos_embed": table}, learned=self.posemb == "learn")
        elif self.posemb == "relative":
            offsets = num_offsets(self.grid)
            for i in range(self.depth):
                name = f"blocks.{i}.attn.{RELATIVE}"
                yield Layer(name, {name: (offsets, self.num_heads)})
        elif self.posemb == "learn2d":
            half = self.width // 2
            yield Layer("pos_embed_row", {"pos_embed_row": (1, rows, half)})
            yield Layer("pos_embed_column", {"pos_embed_column": (1, columns, half)})


RELATIVE = "relative_position_bias_table"
"""Name of a block's relative position biases: a row for each offset between patches, then three for
the class token: from it, to it, and to itself."""


def num_offsets(grid: Size) -> int:
    """Number of rows of the relative position bias table for a grid of patches."""
    rows, columns = grid
    return (2 * rows - 1) * (2 * columns - 1) + 3


STEM = "patch_embed.backbone."
"""Prefix of the tensor names of a hybrid's ResNet."""


def check_image_size(image_size: Size, model: ModelConfig) -> None:
    """Reject a requested size with pixels beyond the last whole patch, which would be ignored."""
    if model.stem and model.patch_kernel == (1, 1):
        return  # the ResNet pads
    for axis, size, patch in zip(("height", "width"), image_size, model.patch_size, strict=True):
        if size % patch:
            sizes = {size // patch * patch, -(-size // patch) * patch} - {0}
            raise ConfigError(
                f"{axis} {size} is not a multiple of the patch size {patch}",
                hint=f"use a resolution of {' or '.join(map(str, sorted(sizes)))}",
            )


Architecture = ModelConfig | BiTConfig
"""The configuration of any model."""

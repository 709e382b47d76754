"""The architectures: Vision Transformers, hybrids, BiT ResNets, by size and by name.

Standard library only.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from vitcli.errors import ConfigError
from vitcli.fields import check_fields, limited
from vitcli.resnets import (
    DEPTHS,
    LARGEST_IMAGE,
    MOST_BLOCKS,
    BiTConfig,
    Layer,
    Layered,
    ResNetConfig,
    Size,
    bit_resnet,
    conv,
    linear,
    norm,
)
from vitcli.words import counted, either

Pool = Literal["token", "gap", "map", "token+gap"]
Posemb = Literal["learn", "learn2d", "sincos2d", "rope", "none"]
Activation = Literal["gelu", "gelu_tanh", "quick_gelu"]


@dataclass(frozen=True)
class ModelConfig(Layered):
    """The architecture of a Vision Transformer, or of a hybrid, whose patches are cut from a
    ResNet's feature map: what its checkpoint stores and nothing else.

    Names of sizes are the paper's (arXiv 2010.11929, section 3.1 and Table 1).
    """

    width: int = limited(min=1, max=1 << 20)
    """D, the size of a token."""
    depth: int = limited(min=1, max=MOST_BLOCKS)
    """Number of Transformer blocks."""
    num_heads: int = limited(min=1, max=1 << 20)
    """Attention heads; each has width / num_heads channels."""
    mlp_dim: int = limited(min=1, max=1 << 20)
    """Hidden size of a block's MLP (with SwiGLU: gate and value together)."""
    patch_size: Size = (16, 16)
    """Height and width of a patch, in pixels."""
    image_size: Size = (224, 224)
    """Height and width of the images that the position embeddings are made for."""
    num_classes: int = limited(0, min=0, max=10**9)
    """Outputs of the head; 0 means no head, and `model(images)` gives features."""
    class_token: bool = True
    """A learned token in front of the patches."""
    distill_token: bool = False
    """DeiT's second token with a head of its own; the logits are the mean of both heads."""
    num_registers: int = limited(0, min=0, max=1 << 20)
    """Registers: learned tokens between the class token and the patches, which no head reads."""
    posemb: Posemb = "learn"
    """learn: one vector per token; learn2d: D/2 for the row and D/2 for the column (paper D.4);
    sincos2d: fixed, big_vision's; rope: queries and keys are rotated, DINOv3's; none."""
    posemb_tokens: Literal["all", "class", "patches"] = "all"
    """Which tokens the position embeddings are added to: prefix tokens and patches, class token
    and patches (registers without), or patches alone."""
    pool: Pool = "token"
    """What the head reads: class token, mean of the patches, both, or one attention query."""
    pre_norm: bool = False
    """A LayerNorm before the first block (CLIP)."""
    final_norm: bool = True
    """A LayerNorm over the tokens after the last block."""
    fc_norm: bool = False
    """A LayerNorm after pooling."""
    pre_logits: int = limited(0, min=0, max=1 << 20)
    """Size of the tanh layer before the head (the paper's pre-training head); 0 means none."""
    layer_scale: bool = False
    """A learned factor per channel on each branch of a block."""
    qkv_bias: bool = True
    """Biases of the query, key and value projections."""
    patch_bias: bool = True
    """Bias of the patch embedding."""
    activation: Activation = "gelu"
    """gelu: exact (timm, transformers); gelu_tanh: the authors' flax code; quick_gelu: CLIP."""
    swiglu: bool = False
    """SiLU-gated MLP, gate first, in one matrix (DINOv2 giant)."""
    norm_eps: float = limited(1e-6, min=0, max=1)
    """Epsilon of every LayerNorm."""
    stem: ResNetConfig | None = None
    """A hybrid's ResNet, between the image and the patch embedding."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.width % self.num_heads:
            raise ConfigError(f"width {self.width} is not a multiple of num_heads {self.num_heads}")
        for axis, size, patch in zip(
            ("height", "width"), self.image_size, self.patch_size, strict=True
        ):
            # Not `size % patch`: SigLIP has patches of 14 at 384.
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
            raise ConfigError(f"pool '{self.pool}' needs a class token; use pool 'gap' or 'map'")
        if self.pool == "token+gap" and (self.pre_logits or self.fc_norm or self.distill_token):
            raise ConfigError("pool 'token+gap' supports only a linear head")
        if self.distill_token and self.pre_logits and self.num_classes:
            raise ConfigError("a distillation token supports only linear heads, without pre_logits")
        if self.posemb in ("learn2d", "sincos2d", "rope"):
            if self.posemb_tokens != "patches" and self.num_prefix_tokens:
                raise ConfigError(f"posemb '{self.posemb}' needs posemb_tokens='patches'")
            divisor = {"learn2d": 2, "sincos2d": 4, "rope": 4 * self.num_heads}[self.posemb]
            if self.width % divisor:
                raise ConfigError(
                    f"posemb '{self.posemb}' needs a width that is a multiple of {divisor}, not "
                    f"{self.width}"
                )
        if self.swiglu and self.mlp_dim % 2:
            raise ConfigError(f"SwiGLU needs an even mlp_dim, not {self.mlp_dim}")

    @property
    def grid(self) -> Size:
        """Rows and columns of patches."""
        rows, columns = self.image_size if not self.stem else self.stem.feature_map(self.image_size)
        return rows // self.patch_kernel[0], columns // self.patch_kernel[1]

    @property
    def patch_kernel(self) -> Size:
        """Height and width of the patch embedding's kernel: of a patch, in pixels or in cells of
        the stem's feature map."""
        stride = self.stem.stride if self.stem else 1
        return self.patch_size[0] // stride, self.patch_size[1] // stride

    @property
    def patch_channels(self) -> int:
        """Channels that the patch embedding reads: colours, or those of the stem."""
        return self.stem.channels if self.stem else 3

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens in front of the patches: class, distillation, registers, in this order."""
        return int(self.class_token) + int(self.distill_token) + self.num_registers

    @property
    def num_tokens(self) -> int:
        """Length of the sequence that the blocks see."""
        return self.num_prefix_tokens + self.grid[0] * self.grid[1]

    @property
    def posemb_prefix(self) -> int:
        """Prefix tokens that have a position embedding of their own."""
        if self.posemb != "learn" or self.posemb_tokens == "patches":
            return 0
        return int(self.class_token) if self.posemb_tokens == "class" else self.num_prefix_tokens

    @property
    def posemb_tables(self) -> tuple[str, ...]:
        """Names of the tensors that are bound to the grid: the position embeddings."""
        return tuple(layer.name for layer in self._posemb_layers())

    @property
    def feature_dim(self) -> int:
        """Size of what `features` returns: the input of the head."""
        return self.pre_logits or self.width * (2 if self.pool == "token+gap" else 1)

    def at(self, image_size: Size) -> ModelConfig:
        """The same model for images of another size.

        Raises:
            ConfigError: the new size is not a multiple of the patch size. (A hybrid's ResNet pads.)
        """
        _check_whole_patches(image_size, self)
        return dataclasses.replace(self, image_size=image_size)

    def with_classes(self, num_classes: int) -> ModelConfig:
        """The same model with another number of classes."""
        return dataclasses.replace(self, num_classes=num_classes)

    def layers(self) -> Iterator[Layer]:
        """The table that describes the architecture; `models/vit.py` is tested against it."""
        d, patches = self.width, self.grid[0] * self.grid[1]
        tokens = {"cls_token": int(self.class_token), "dist_token": int(self.distill_token)}
        for name, count in {**tokens, "reg_token": self.num_registers}.items():
            if count:
                yield Layer(name, {name: (1, count, d)})
        yield from self._posemb_layers()
        if self.stem:
            yield from self.stem.layers(self.image_size, STEM)
        channels, kernel = self.patch_channels, self.patch_kernel
        yield conv("patch_embed.proj", channels, d, kernel, patches, bias=self.patch_bias)
        if self.pre_norm:
            yield norm("norm_pre", d)
        yield from self.blocks(self.num_tokens)
        if self.final_norm:
            yield norm("norm", d)
        if self.pool == "map":
            yield Layer("attn_pool", {"attn_pool.latent": (1, 1, d)}, 2 * patches * d)
            yield linear("attn_pool.q", d, d, 1)
            yield linear("attn_pool.kv", d, 2 * d, patches)
            yield linear("attn_pool.proj", d, d, 1)
            yield norm("attn_pool.norm", d)
            yield from self._mlp("attn_pool.mlp", 1, swiglu=False)
        if self.fc_norm:
            yield norm("fc_norm", d)
        if self.pre_logits:
            yield linear("pre_logits.fc", d, self.pre_logits, 1)
        if self.num_classes:
            for name in ("head", "head_dist") if self.distill_token else ("head",):
                yield linear(name, self.feature_dim, self.num_classes, 0)

    def blocks(self, tokens: int) -> Iterator[Layer]:
        """The layers of all blocks, on a sequence of so many tokens."""
        d = self.width
        for i in range(self.depth):
            block = f"blocks.{i}"
            yield norm(f"{block}.norm1", d)
            yield linear(f"{block}.attn.qkv", d, 3 * d, tokens, self.qkv_bias)
            yield Layer(f"{block}.attn", {}, 2 * tokens**2 * d)
            yield linear(f"{block}.attn.proj", d, d, tokens)
            yield norm(f"{block}.norm2", d)
            yield from self._mlp(f"{block}.mlp", tokens, self.swiglu)
            if self.layer_scale:
                yield Layer(f"{block}.ls1", {f"{block}.ls1.gamma": (d,)})
                yield Layer(f"{block}.ls2", {f"{block}.ls2.gamma": (d,)})

    def _mlp(self, name: str, tokens: int, swiglu: bool) -> Iterator[Layer]:
        yield linear(f"{name}.fc1", self.width, self.mlp_dim, tokens)
        yield linear(f"{name}.fc2", self.mlp_dim // (2 if swiglu else 1), self.width, tokens)

    def _posemb_layers(self) -> Iterator[Layer]:
        rows, columns = self.grid
        table = (1, self.posemb_prefix + rows * columns, self.width)
        if self.posemb in ("learn", "sincos2d"):
            yield Layer("pos_embed", {"pos_embed": table}, learned=self.posemb == "learn")
        elif self.posemb == "learn2d":
            half = self.width // 2
            yield Layer("pos_embed_row", {"pos_embed_row": (1, rows, half)})
            yield Layer("pos_embed_column", {"pos_embed_column": (1, columns, half)})


STEM = "patch_embed.backbone."
"""The prefix of a hybrid's ResNet in tensor names."""


def _check_whole_patches(image_size: Size, model: ModelConfig) -> None:
    """For sizes that someone asks for: pixels beyond the last whole patch would be ignored."""
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
"""Any model."""


class Variant(NamedTuple):
    """A row of Table 1 of the paper; Ti and S come from DeiT and AugReg."""

    depth: int
    width: int
    mlp_dim: int
    num_heads: int


VARIANTS = {
    "Ti": Variant(12, 192, 768, 3),
    "S": Variant(12, 384, 1536, 6),
    "B": Variant(12, 768, 3072, 12),
    "L": Variant(24, 1024, 4096, 16),
    "H": Variant(32, 1280, 5120, 16),
}


def model_config(variant: str, **overrides: Any) -> ModelConfig:
    """The configuration of a ViT such as "B/16" or a hybrid such as "R50+B/16", with any field
    overridden. A hybrid's number is its stride: at 16 the layers of stage 4 are in stage 3 (section
    3.1), and a root alone, "R+Ti/16", has the patches of the released one: 8 x 8 cells of 4 pixels.
    "R(3-4)x0.5+Ti/8" names the blocks of each stage, and has half the channels.

    Raises:
        ConfigError: there is no such variant.
    """
    match = re.fullmatch(_VIT, variant, re.IGNORECASE)
    name = (
        {known.lower(): known for known in VARIANTS}.get(match["size"].lower()) if match else None
    )
    if match is None or name is None or not int(match["patch"]):
        raise _no_variant(variant)
    patch, stem = int(match["patch"]), None
    if match["number"] is not None:
        stem = _stem(match, patch, variant)
        patch = ROOT_PATCH if (stem.depths, patch) == ((), 16) else patch
    sizes = {**VARIANTS[name]._asdict(), "patch_size": (patch, patch), "stem": stem}
    config = ModelConfig(**(sizes | overrides))
    _check_whole_patches(config.image_size, config)
    return config


_RESNET = r"R(?P<number>\d*)(?:\((?P<blocks>\d+(-\d+)*)\))?(?:x(?P<factor>\d+(\.\d+)?))?"
"""A ResNet by its number or by the blocks of its stages, and its width factor."""
_VIT = rf"(?:{_RESNET}\+)?(?P<size>[A-Za-z]+)/(?P<patch>\d+)"
"""A ViT's size and patch size; a hybrid's ResNet in front."""


def has_form_of_variant(name: str) -> bool:
    """Whether a name is meant as a variant's, known or not."""
    resnet = re.fullmatch(_RESNET, name, re.IGNORECASE)
    return bool(re.fullmatch(_VIT, name, re.IGNORECASE) or (resnet and resnet["factor"]))


ROOT_PATCH = 32
"""Pixels of a patch of R+Ti/16: its name says 16, its stride is 32."""


def _stem(match: re.Match[str], stride: int, variant: str) -> ResNetConfig:
    depths = _depths(match, variant)
    if match["number"] and stride not in (16, 32):
        raise _no_variant(variant)
    if match["number"] and stride == 16:
        depths = (*depths[:2], depths[2] + depths[3])
    return ResNetConfig(depths, float(match["factor"] or 1))


def _depths(match: re.Match[str], variant: str) -> tuple[int, ...]:
    """The blocks of the stages of a `_RESNET`; none for the root alone."""
    number, blocks = match["number"], match["blocks"]
    if number and (blocks or int(number) not in DEPTHS):
        raise _no_variant(variant)
    if blocks:
        return tuple(map(int, blocks.split("-")))
    return DEPTHS[int(number)] if number else ()


def bit_config(variant: str, **overrides: Any) -> BiTConfig:
    """The configuration of a BiT ResNet such as "R50x1", as timm computes it.

    Raises:
        ConfigError: there is no such variant.
    """
    match = re.fullmatch(_RESNET, variant, re.IGNORECASE)
    depths = _depths(match, variant) if match and match["factor"] else ()
    if match is None or not depths:
        raise _no_variant(variant)
    return BiTConfig(bit_resnet(depths, float(match["factor"])), **overrides)


def architecture(variant: str, **overrides: Any) -> Architecture:
    """What any variant's name means: "B/16", "R50+B/16", "R50x1".

    Raises:
        ConfigError: there is no such variant, or it has no such field.
    """
    make = model_config if "/" in variant else bit_config
    try:
        return make(variant, **overrides)
    except TypeError as error:
        field = str(error).rpartition(" ")[2]
        raise ConfigError(f"{variant} has no field {field}") from error


def _no_variant(variant: str) -> ConfigError:
    resnets = either(["R", *(f"R{depth}" for depth in DEPTHS)])
    return ConfigError(
        f"unknown architecture '{variant}'",
        hint=f"use a size ({', '.join(VARIANTS)}) and a patch size, such as B/16; a hybrid "
        f"({resnets} before a +), such as R50+B/16 or R+Ti/16; or a BiT ResNet, such as R50x1",
    )


def variant_name(config: Architecture) -> str:
    """The short name of an architecture, "B/16"; other sizes are spelled out."""
    if isinstance(config, BiTConfig):
        return f"{_resnet_name(config.resnet.depths)}x{config.resnet.width_factor:g}"
    sizes = Variant(config.depth, config.width, config.mlp_dim, config.num_heads)
    rows, columns = config.patch_size
    patch = str(rows) if rows == columns else f"{rows}x{columns}"
    stem = ""
    if config.stem:
        factor = config.stem.width_factor
        stem = _resnet_name(config.stem.depths) + (f"x{factor:g}" if factor != 1 else "") + "+"
        if not config.stem.depths and config.patch_size == (ROOT_PATCH, ROOT_PATCH):
            patch = "16"
    for name, variant in VARIANTS.items():
        if sizes == variant:
            return f"{stem}{name}/{patch}"
        if sizes == variant._replace(depth=config.depth):
            return f"{stem}{name}/{patch} with {counted(config.depth, 'block')}"
    return f"{stem}width {config.width}, depth {config.depth}, patch {patch}"


def _resnet_name(depths: tuple[int, ...]) -> str:
    """ "R50" for its stages, also where those of stage 4 are in stage 3; "R" for a root alone."""
    for name, stages in DEPTHS.items():
        if depths in (stages, (*stages[:2], stages[2] + stages[3])):
            return f"R{name}"
    return f"R({'-'.join(map(str, depths))})" if depths else "R"

"""What BiT ResNets and the ResNet stems of hybrids are, hold and cost. Standard library only.

Both are the bottleneck ResNet with GroupNorm for BatchNorm and weight-standardised convolutions
(arXiv 1912.11370). A BiT ResNet is pre-activation and pads symmetrically, a hybrid's stem is
post-activation and pads as TensorFlow's SAME (vit_jax/models_resnet.py); names are timm's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from vitcli.errors import ConfigError

Size = tuple[int, int]
"""(height, width)."""

GROUPS = 32
"""Of every GroupNorm."""
EXPANSION = 4
"""A bottleneck gives so many times the channels that it works on."""

DEPTHS: dict[int, tuple[int, ...]] = {
    26: (2, 2, 2, 2),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    200: (3, 24, 36, 3),
}
"""Blocks a stage by a ResNet's name; 26 is of the hybrids (arXiv 2106.10270)."""


class Layer(NamedTuple):
    """A convolution or a norm of the network."""

    name: str
    kind: Literal["conv", "norm"]
    shape: tuple[int, ...]
    """Of its weight: (out, in, k, k), or (channels,)."""
    positions: int
    """Where its outputs lie: rows times columns."""


@dataclass(frozen=True)
class ResNetConfig:
    """The convolutions of a BiT ResNet, or of a hybrid's stem: all but pooling and head."""

    depths: tuple[int, ...]
    """Blocks a stage; none: the root (convolution, norm, ReLU, max-pool) alone."""
    width_factor: float = 1.0
    """Times 64 channels at the root; each stage doubles."""
    preact: bool = False
    """Norm and ReLU before each convolution (BiT), or after it (hybrids)."""
    padding: Literal["same", "symmetric"] = "same"
    """same: TensorFlow's, which puts the odd pixel behind; symmetric: k // 2 on either side."""
    pool_padding: Literal["zeros", "-inf"] = "zeros"
    """What surrounds the root's max-pool: zeros in timm's BiT, -inf in big_vision's. The two agree
    behind a ReLU, so in every hybrid."""
    std_eps: float = 1e-8
    """Epsilon of weight standardisation: 1e-8 in timm, 1e-5 in vit_jax."""
    std_eps_in: Literal["variance", "deviation"] = "variance"
    """variance: weights over sqrt(variance + eps) (timm); deviation: over std + eps (vit_jax)."""
    norm_eps: float = 1e-5
    """Epsilon of every GroupNorm: 1e-5 in timm, 1e-6 in flax."""

    def __post_init__(self) -> None:
        if len(self.depths) > 4 or any(depth < 1 for depth in self.depths):
            raise ConfigError(f"a ResNet has up to 4 stages of 1 block or more, not {self.depths}")
        if self.width_factor <= 0 or (64 * self.width_factor) % GROUPS:
            raise ConfigError(
                f"width_factor {self.width_factor:g} does not give groups of {GROUPS} channels",
                hint="take a multiple of 0.5",
            )
        if self.preact and not self.depths:
            raise ConfigError("a pre-activation ResNet needs a stage")
        if self.std_eps < 0 or self.norm_eps < 0:
            raise ConfigError("an epsilon cannot be negative")

    @property
    def width(self) -> int:
        """Channels of the root."""
        return int(64 * self.width_factor)

    @property
    def channels(self) -> int:
        """Channels of the last feature map."""
        stages = len(self.depths)
        return self.width * (EXPANSION << stages - 1) if stages else self.width

    @property
    def stride(self) -> int:
        """Pixels a cell of the last feature map, along each axis."""
        return 4 << max(len(self.depths) - 1, 0)

    def feature_map(self, image_size: Size) -> Size:
        """Rows and columns of the last feature map; every halving rounds up."""
        rows, columns = (math.ceil(side / self.stride) for side in image_size)
        return rows, columns

    def layers(self, image_size: Size = (224, 224)) -> Iterator[Layer]:
        """Every layer from the root on, under timm's names."""

        def layer(name: str, *shape: int, stride: int = 1) -> Layer:
            kind: Literal["conv", "norm"] = "conv" if len(shape) > 1 else "norm"
            positions = math.prod(math.ceil(side / stride) for side in image_size)
            return Layer(name, kind, shape, positions)

        root = "stem." if self.depths else ""  # where there are no stages, timm's stem is all
        yield layer(f"{root}conv", self.width, 3, 7, 7, stride=2)
        if not self.preact:
            yield layer(f"{root}norm", self.width, stride=2)
        before, stride = self.width, 4
        for stage, depth in enumerate(self.depths):
            inner = self.width * 2**stage
            after, old, stride = inner * EXPANSION, stride, stride * (2 if stage else 1)
            for block in range(depth):
                name = f"stages.{stage}.blocks.{block}"
                if block == 0:
                    yield layer(f"{name}.downsample.conv", after, before, 1, 1, stride=stride)
                    if not self.preact:
                        yield layer(f"{name}.downsample.norm", after, stride=stride)
                yield layer(f"{name}.norm1", before if self.preact else inner, stride=old)
                yield layer(f"{name}.conv1", inner, before, 1, 1, stride=old)
                yield layer(f"{name}.norm2", inner, stride=stride)
                yield layer(f"{name}.conv2", inner, inner, 3, 3, stride=stride)
                yield layer(f"{name}.norm3", inner if self.preact else after, stride=stride)
                yield layer(f"{name}.conv3", after, inner, 1, 1, stride=stride)
                before, old = after, stride
        if self.preact:
            yield layer("norm", before, stride=stride)

    def macs(self, image_size: Size) -> int:
        """Multiply-accumulates of its convolutions for one image."""
        convolutions = (layer for layer in self.layers(image_size) if layer.kind == "conv")
        return sum(math.prod(layer.shape) * layer.positions for layer in convolutions)

    def num_params(self) -> int:
        """Number of learned values: convolutions have no bias, norms a scale and a bias."""
        return sum(
            math.prod(layer.shape) * (1 if layer.kind == "conv" else 2) for layer in self.layers()
        )


@dataclass(frozen=True)
class BiTConfig:
    """A BiT ResNet: the network, the mean over its last feature map, a linear head."""

    resnet: ResNetConfig
    """Its convolutions; pre-activation."""
    image_size: Size = (224, 224)
    """Height and width of the images it is meant for; it takes others as they are."""
    num_classes: int = 0
    """Outputs of the head; 0 means no head, and `model(images)` gives features."""

    def __post_init__(self) -> None:
        if not self.resnet.preact:
            raise ConfigError("a BiT ResNet is pre-activation")
        if min(self.image_size) < 1:
            raise ConfigError(f"an image cannot have the size {self.image_size}")
        if self.num_classes < 0:
            raise ConfigError("num_classes cannot be negative")

    @property
    def grid(self) -> Size:
        """Rows and columns of the last feature map."""
        return self.resnet.feature_map(self.image_size)

    @property
    def patch_size(self) -> Size:
        """Height and width in pixels of a cell of the last feature map."""
        return self.resnet.stride, self.resnet.stride

    @property
    def depth(self) -> int:
        """Number of bottlenecks."""
        return sum(self.resnet.depths)

    @property
    def num_tokens(self) -> int:
        """Cells of the last feature map."""
        return self.grid[0] * self.grid[1]

    @property
    def posemb(self) -> Literal["none"]:
        """A ResNet knows positions by its borders alone."""
        return "none"

    @property
    def posemb_prefix(self) -> int:
        """See `posemb`."""
        return 0

    @property
    def feature_dim(self) -> int:
        """Size of what `features` returns: the input of the head."""
        return self.resnet.channels

    def at(self, image_size: Size) -> BiTConfig:
        """The same model for images of another size; any will do."""
        return dataclasses.replace(self, image_size=image_size)

    def with_classes(self, num_classes: int) -> BiTConfig:
        """The same model with another number of classes."""
        return dataclasses.replace(self, num_classes=num_classes)

    def macs(self) -> int:
        """Multiply-accumulates of one image's forward pass, the head excluded."""
        return self.resnet.macs(self.image_size)

    def num_params(self) -> int:
        """Number of learned values, the head included."""
        return self.resnet.num_params() + (self.feature_dim + 1) * self.num_classes


def bit_resnet(depths: tuple[int, ...], width_factor: float) -> ResNetConfig:
    """The convolutions of a BiT ResNet as timm computes them."""
    return ResNetConfig(depths, width_factor, preact=True, padding="symmetric")

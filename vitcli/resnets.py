"""BiT ResNets and the ResNet stems of hybrids: configurations, and tables of their layers. Standard
library only.

Both are the bottleneck ResNet with GroupNorm for BatchNorm and weight-standardised convolutions
(arXiv 1912.11370). A BiT ResNet is pre-activation and pads symmetrically, a hybrid's stem is
post-activation and pads as TensorFlow's SAME (vit_jax/models_resnet.py); names are timm's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from vitcli.errors import ConfigError
from vitcli.fields import Size as Size
from vitcli.fields import check_fields, limited

GROUPS = 32
"""Groups of every GroupNorm."""
MOST_BLOCKS = 1000
"""A larger depth is a mistake, and its table of layers would fill the memory."""
LARGEST_IMAGE = 1 << 16
"""Pixels along an axis."""
EXPANSION = 4
"""Output channels of a bottleneck, divided by the channels inside."""

DEPTHS: dict[int, tuple[int, ...]] = {
    26: (2, 2, 2, 2),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    200: (3, 24, 36, 3),
}
"""Blocks per stage, by the number in a ResNet's name; 26 is for hybrids (arXiv 2106.10270)."""


Shape = tuple[int, ...]


class Layer(NamedTuple):
    """A row of the table that describes an architecture."""

    name: str
    """timm's."""
    tensors: dict[str, Shape]
    """Its tensors' full names and shapes; none for a product of activations."""
    macs: int = 0
    """Multiply-accumulates for one image; a head's are not counted."""
    outputs: int = 0
    """Values that a dense layer or a convolution computes for one image."""
    learned: bool = True
    """Whether its tensors are trained (a sine-cosine table is not)."""


def linear(name: str, inputs: int, outputs: int, positions: int, bias: bool = True) -> Layer:
    """A dense layer that is applied at so many positions of an image."""
    macs = inputs * outputs * positions
    return Layer(name, _weight(name, (outputs, inputs), bias), macs, outputs * positions)


def conv(
    name: str, inputs: int, outputs: int, kernel: Size, positions: int, bias: bool = False
) -> Layer:
    """A convolution with so many output positions in an image."""
    shape = (outputs, inputs, *kernel)
    macs = math.prod(shape) * positions
    return Layer(name, _weight(name, shape, bias), macs, outputs * positions)


def _weight(name: str, shape: Shape, bias: bool) -> dict[str, Shape]:
    return {f"{name}.weight": shape} | ({f"{name}.bias": shape[:1]} if bias else {})


def norm(name: str, channels: int) -> Layer:
    """A LayerNorm or GroupNorm."""
    return Layer(name, {f"{name}.weight": (channels,), f"{name}.bias": (channels,)})


@dataclass(frozen=True)
class Layered:
    """A model as a table of its layers."""

    def layers(self) -> Iterator[Layer]:
        """Every layer, in the order in which an image passes them."""
        raise NotImplementedError

    def tensor_shapes(self) -> dict[str, Shape]:
        """Name and shape of every tensor of a checkpoint, as the module's `state_dict` has them."""
        return {name: shape for layer in self.layers() for name, shape in layer.tensors.items()}

    def macs(self) -> int:
        """Multiply-accumulates of one image's forward pass: convolutions and matrix products,
        the head excluded (FLOPs = 2 x MACs; one training step = 3 x forward)."""
        return sum(layer.macs for layer in self.layers())

    def num_params(self) -> int:
        """Number of learned values, the head included."""
        learned = (layer for layer in self.layers() if layer.learned)
        return sum(math.prod(shape) for layer in learned for shape in layer.tensors.values())


@dataclass(frozen=True)
class ResNetConfig:
    """The convolutions of a BiT ResNet, or of a hybrid's stem: all but pooling and head."""

    depths: tuple[int, ...]
    """Blocks per stage; none: only the root (convolution, norm, ReLU, max-pool)."""
    width_factor: float = 1.0
    """Channels of the root, divided by 64; each stage doubles them."""
    preact: bool = False
    """Norm and ReLU before each convolution (BiT), or after it (hybrids)."""
    padding: Literal["same", "symmetric"] = "same"
    """same: TensorFlow's, which puts the odd pixel behind; symmetric: k // 2 on either side."""
    pool_padding: Literal["zeros", "-inf"] = "zeros"
    """What surrounds the root's max-pool: zeros in timm's BiT, -inf in big_vision's. The two agree
    behind a ReLU, so in every hybrid."""
    std_eps: float = limited(1e-8, min=0, max=1)
    """Epsilon of weight standardisation: 1e-8 in timm, 1e-5 in vit_jax."""
    std_eps_in: Literal["variance", "deviation"] = "variance"
    """variance: weights over sqrt(variance + eps) (timm); deviation: over std + eps (vit_jax)."""
    norm_eps: float = limited(1e-5, min=0, max=1)
    """Epsilon of every GroupNorm: 1e-5 in timm, 1e-6 in flax."""

    def __post_init__(self) -> None:
        check_fields(self)
        if len(self.depths) > 4 or any(not 1 <= depth <= MOST_BLOCKS for depth in self.depths):
            blocks = "-".join(map(str, self.depths))
            raise ConfigError(
                f"a ResNet has up to 4 stages of 1 to {MOST_BLOCKS} blocks, not {blocks}"
            )
        if not 0 < self.width_factor <= 1024 or (64 * self.width_factor) % GROUPS:
            step = GROUPS / 64
            raise ConfigError(
                f"width_factor {self.width_factor:g} is not a multiple of {step:g} up to 1024"
            )
        if self.preact and not self.depths:
            raise ConfigError("a pre-activation ResNet needs a stage")

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
        """Pixels per cell of the last feature map, along each axis."""
        return 4 << max(len(self.depths) - 1, 0)

    def feature_map(self, image_size: Size) -> Size:
        """Rows and columns of the last feature map; every halving rounds up."""
        rows, columns = (math.ceil(side / self.stride) for side in image_size)
        return rows, columns

    def layers(self, image_size: Size = (224, 224), prefix: str = "") -> Iterator[Layer]:
        """Every layer from the root on, for images of that size; names begin with `prefix`."""

        def cells(stride: int) -> int:
            return math.prod(math.ceil(side / stride) for side in image_size)

        root = prefix + ("stem." if self.depths else "")  # timm's stem of no stages is the root
        yield conv(f"{root}conv", 3, self.width, (7, 7), cells(2))
        if not self.preact:
            yield norm(f"{root}norm", self.width)
        before, stride = self.width, 4
        for stage, depth in enumerate(self.depths):
            inner = self.width * 2**stage
            after, old, stride = inner * EXPANSION, stride, stride * (2 if stage else 1)
            for block in range(depth):
                name = f"{prefix}stages.{stage}.blocks.{block}"
                if block == 0:
                    yield conv(f"{name}.downsample.conv", before, after, (1, 1), cells(stride))
                    if not self.preact:
                        yield norm(f"{name}.downsample.norm", after)
                yield norm(f"{name}.norm1", before if self.preact else inner)
                yield conv(f"{name}.conv1", before, inner, (1, 1), cells(old))
                yield norm(f"{name}.norm2", inner)
                yield conv(f"{name}.conv2", inner, inner, (3, 3), cells(stride))
                yield norm(f"{name}.norm3", inner if self.preact else after)
                yield conv(f"{name}.conv3", inner, after, (1, 1), cells(stride))
                before, old = after, stride
        if self.preact:
            yield norm(f"{prefix}norm", before)


@dataclass(frozen=True)
class BiTConfig(Layered):
    """A BiT ResNet: the network, the mean over its last feature map, a linear head."""

    resnet: ResNetConfig
    """Its convolutions; pre-activation."""
    image_size: Size = (224, 224)
    """Height and width of the images it was trained on; it accepts any size."""
    num_classes: int = limited(0, min=0, max=10**9)
    """Outputs of the head; 0 means no head, and `model(images)` gives features."""
    posemb: ClassVar[Literal["none"]] = "none"
    rope: ClassVar[Literal["none"]] = "none"
    key_bias: ClassVar[bool] = True
    norm: ClassVar[Literal["layer"]] = "layer"
    posemb_tables: ClassVar[tuple[str, ...]] = ()
    posemb_prefix: ClassVar[int] = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.resnet.preact:
            raise ConfigError("a BiT ResNet is pre-activation")
        if not 1 <= min(self.image_size) <= max(self.image_size) <= LARGEST_IMAGE:
            raise ConfigError(f"invalid image size {self.image_size}")

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
    def feature_dim(self) -> int:
        """Size of what `features` returns: the input of the head."""
        return self.resnet.channels

    def at(self, image_size: Size) -> BiTConfig:
        """The same model for images of another size; any will do."""
        return dataclasses.replace(self, image_size=image_size)

    def with_classes(self, num_classes: int) -> BiTConfig:
        """The same model with another number of classes."""
        return dataclasses.replace(self, num_classes=num_classes)

    def layers(self) -> Iterator[Layer]:
        """Every layer; timm's head is a 1 x 1 convolution."""
        yield from self.resnet.layers(self.image_size)
        if self.num_classes:
            yield conv("head.fc", self.feature_dim, self.num_classes, (1, 1), 0, bias=True)


def bit_resnet(depths: tuple[int, ...], width_factor: float) -> ResNetConfig:
    """The convolutions of a BiT ResNet as timm computes them."""
    return ResNetConfig(depths, width_factor, preact=True, padding="symmetric")

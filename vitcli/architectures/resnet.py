"""BiT ResNets and the ResNet stems of hybrids: configurations and tables of layers. Standard
library only.

Both are bottleneck ResNets with GroupNorm instead of BatchNorm and weight-standardized convolutions
(arXiv 1912.11370). A BiT ResNet is pre-activation with symmetric padding; the stem of a hybrid is
post-activation with TensorFlow's SAME padding (vit_jax/models_resnet.py). Names are timm's.
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
"""Number of groups of every GroupNorm."""
MAX_BLOCKS = 1000
"""Maximum depth; a larger one is a mistake, and its table of layers would exhaust memory."""
LARGEST_IMAGE = 1 << 16
"""Maximum height and width of an image in pixels."""
EXPANSION = 4
"""Ratio of a bottleneck's output channels to its inner channels."""

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
    """The name in timm."""
    tensors: dict[str, Shape]
    """Shapes by full tensor name; empty for a product of activations."""
    macs: int = 0
    """Multiply-accumulates per image; those of a head are not counted."""
    outputs: int = 0
    """Number of output values of a linear layer or convolution per image."""
    learned: bool = True
    """Whether its tensors are trained (a sine-cosine table is not)."""


def linear(name: str, inputs: int, outputs: int, positions: int, bias: bool = True) -> Layer:
    """A linear layer that is applied at `positions` positions of an image."""
    macs = inputs * outputs * positions
    return Layer(name, _weight_shapes(name, (outputs, inputs), bias), macs, outputs * positions)


def conv(
    name: str, inputs: int, outputs: int, kernel: Size, positions: int, bias: bool = False
) -> Layer:
    """A convolution with `positions` output positions per image."""
    shape = (outputs, inputs, *kernel)
    macs = math.prod(shape) * positions
    return Layer(name, _weight_shapes(name, shape, bias), macs, outputs * positions)


def _weight_shapes(name: str, shape: Shape, bias: bool) -> dict[str, Shape]:
    return {f"{name}.weight": shape} | ({f"{name}.bias": shape[:1]} if bias else {})


def norm(name: str, channels: int) -> Layer:
    """A LayerNorm or GroupNorm."""
    return Layer(name, {f"{name}.weight": (channels,), f"{name}.bias": (channels,)})


@dataclass(frozen=True)
class Layered:
    """A model that is described by a table of its layers."""

    def layers(self) -> Iterator[Layer]:
        """Yield all layers, in forward order."""
        raise NotImplementedError

    def tensor_shapes(self) -> dict[str, Shape]:
        """Shape of every tensor of a checkpoint by name, as in the state dict of the module."""
        return {name: shape for layer in self.layers() for name, shape in layer.tensors.items()}

    def macs(self) -> int:
        """Multiply-accumulates of a forward pass per image: convolutions and matrix products,
        without the head (FLOPs = 2 x MACs; one training step = 3 x forward)."""
        return sum(layer.macs for layer in self.layers())

    def num_params(self) -> int:
        """Number of trainable parameters, including the head."""
        learned = (layer for layer in self.layers() if layer.learned)
        return sum(math.prod(shape) for layer in learned for shape in layer.tensors.values())


@dataclass(frozen=True)
class ResNetConfig:
    """The backbone of a BiT ResNet, or the stem of a hybrid: everything but pooling and head."""

    depths: tuple[int, ...]
    """Blocks per stage; empty: only the root (convolution, norm, ReLU, max-pool)."""
    width_factor: float = 1.0
    """Channels of the root, divided by 64; each stage doubles them."""
    preact: bool = False
    """Norm and ReLU before each convolution (BiT), or after it (hybrids)."""
    padding: Literal["same", "symmetric"] = "same"
    """same: TensorFlow's, with the odd pixel at the end; symmetric: k // 2 on both sides."""
    pool_padding: Literal["zeros", "-inf"] = "zeros"
    """Padding value of the root's max-pool: zeros in timm's BiT, -inf in big_vision's. Both give
    the same result after a ReLU, so in every hybrid."""
    std_eps: float = limited(1e-8, min=0, max=1)
    """Epsilon of weight standardization: 1e-8 in timm, 1e-5 in vit_jax."""
    std_eps_in: Literal["variance", "deviation"] = "variance"
    """variance: divide weights by sqrt(var + eps) (timm); deviation: by std + eps (vit_jax)."""
    norm_eps: float = limited(1e-5, min=0, max=1)
    """Epsilon of every GroupNorm: 1e-5 in timm, 1e-6 in flax."""

    def __post_init__(self) -> None:
        check_fields(self)
        if len(self.depths) > 4 or any(not 1 <= depth <= MAX_BLOCKS for depth in self.depths):
            blocks = "-".join(map(str, self.depths))
            raise ConfigError(
                f"a ResNet has up to 4 stages of 1 to {MAX_BLOCKS} blocks, not {blocks}"
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
        """Rows and columns of the last feature map; each halving rounds up."""
        rows, columns = (math.ceil(side / self.stride) for side in image_size)
        return rows, columns

    def layers(self, image_size: Size = (224, 224), prefix: str = "") -> Iterator[Layer]:
        """Yield all layers from the root on, for one image size, with a prefix for their names."""

        def cells(stride: int) -> int:
            return math.prod(math.ceil(side / stride) for side in image_size)

        root = prefix + ("stem." if self.depths else "")  # timm's stem without stages is the root
        yield conv(f"{root}conv", 3, self.width, (7, 7), cells(2))
        if not self.preact:
            yield norm(f"{root}norm", self.width)
        inputs, stride = self.width, 4
        for stage, depth in enumerate(self.depths):
            mid = self.width * 2**stage
            outputs, old_stride, stride = mid * EXPANSION, stride, stride * (2 if stage else 1)
            for block in range(depth):
                name = f"{prefix}stages.{stage}.blocks.{block}"
                if block == 0:
                    yield conv(f"{name}.downsample.conv", inputs, outputs, (1, 1), cells(stride))
                    if not self.preact:
                        yield norm(f"{name}.downsample.norm", outputs)
                yield norm(f"{name}.norm1", inputs if self.preact else mid)
                yield conv(f"{name}.conv1", inputs, mid, (1, 1), cells(old_stride))
                yield norm(f"{name}.norm2", mid)
                yield conv(f"{name}.conv2", mid, mid, (3, 3), cells(stride))
                yield norm(f"{name}.norm3", mid if self.preact else outputs)
                yield conv(f"{name}.conv3", mid, outputs, (1, 1), cells(stride))
                inputs, old_stride = outputs, stride
        if self.preact:
            yield norm(f"{prefix}norm", inputs)


@dataclass(frozen=True)
class BiTConfig(Layered):
    """A BiT ResNet: a backbone, global average pooling and a linear head."""

    resnet: ResNetConfig
    """The backbone, which is pre-activation."""
    image_size: Size = (224, 224)
    """Height and width of the training images; the model accepts any size."""
    num_classes: int = limited(0, min=0, max=10**9)
    """Number of outputs of the head; 0: no head, and `model(images)` returns features."""
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
        """Height and width of a cell of the last feature map in pixels."""
        return self.resnet.stride, self.resnet.stride

    @property
    def depth(self) -> int:
        """Number of bottleneck blocks."""
        return sum(self.resnet.depths)

    @property
    def num_tokens(self) -> int:
        """Cells of the last feature map."""
        return self.grid[0] * self.grid[1]

    @property
    def feature_dim(self) -> int:
        """Output dimension of `features`, which is the input of the head."""
        return self.resnet.channels

    def with_image_size(self, image_size: Size) -> BiTConfig:
        """Return the same architecture for another image size, which can be any."""
        return dataclasses.replace(self, image_size=image_size)

    def with_classes(self, num_classes: int) -> BiTConfig:
        """Return the same architecture with another number of classes."""
        return dataclasses.replace(self, num_classes=num_classes)

    def layers(self) -> Iterator[Layer]:
        """Yield all layers; as in timm, the head is a 1 x 1 convolution."""
        yield from self.resnet.layers(self.image_size)
        if self.num_classes:
            yield conv("head.fc", self.feature_dim, self.num_classes, (1, 1), 0, bias=True)


def bit_resnet(depths: tuple[int, ...], width_factor: float) -> ResNetConfig:
    """Return the backbone of a BiT ResNet as in timm."""
    return ResNetConfig(depths, width_factor, preact=True, padding="symmetric")

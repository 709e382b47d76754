"""ResNets with GroupNorm and weight-standardized convolutions: BiT, and the stem of the hybrids.

    images (B, 3, H, W)
      -> root: 7 x 7 convolution (H/2, W/2), [norm, ReLU], 3 x 3 max-pool (H/4, W/4)
      -> stages of bottlenecks; each stage but the first halves rows and columns
      -> BiT: norm, ReLU, mean -> features (B, C) -> head -> logits (B, num_classes)

BiT (arXiv 1912.11370) is pre-activation: x + conv(relu(norm(...))). The stem of a hybrid is
post-activation (vit_jax/models_resnet.py): relu(x + norm(conv(...))). Parameter names are timm's.
"""

import math
from collections import OrderedDict
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitcli.architectures.resnet import EXPANSION, GROUPS, BiTConfig, ResNetConfig


def same_padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """TensorFlow's SAME padding before and after one axis, for ceil(size / stride) outputs; an odd
    pixel goes after."""
    total = max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)
    return total // 2, total - total // 2


def pad(x: Tensor, kernel: int, stride: int, config: ResNetConfig, value: float = 0.0) -> Tensor:
    """Pad images (B, C, H, W) for a window with this kernel size and stride."""
    if config.padding == "symmetric":
        top = bottom = left = right = kernel // 2
    else:
        top, bottom = same_padding(x.shape[2], kernel, stride)
        left, right = same_padding(x.shape[3], kernel, stride)
    return F.pad(x, (left, right, top, bottom), value=value) if kernel > 1 else x


class Conv2d(nn.Conv2d):
    """A convolution without padding. Where its result has a single column, it is computed
    transposed: in bf16 on CPUs with AMX, oneDNN's result and gradient would be wrong."""

    def forward(self, x: Tensor) -> Tensor:
        return self.convolve(x, self.weight)

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.shape[3] - weight.shape[3] >= self.stride[1]:
            return F.conv2d(x, weight, self.bias, self.stride)
        return F.conv2d(x.mT, weight.mT, self.bias, self.stride[::-1]).mT


class StdConv(Conv2d):
    """A convolution with weights of mean 0 and variance 1 per output channel (arXiv 1903.10520),
    standardized in float32 or better."""

    is_standardized = False

    def __init__(
        self, inputs: int, outputs: int, kernel: int, config: ResNetConfig, stride: int = 1
    ) -> None:
        super().__init__(inputs, outputs, kernel, stride, bias=False)
        self.config = config

    def standardized(self) -> Tensor:
        """Return the standardized weights, (out, in, k, k)."""
        if self.is_standardized:
            return self.weight
        w = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        variance, mean = torch.var_mean(w, dim=(1, 2, 3), correction=0, keepdim=True)
        eps = self.config.std_eps
        if self.config.std_eps_in == "variance":
            scale = (variance + eps).rsqrt()
        else:
            scale = 1 / (variance.sqrt() + eps)
        return ((w - mean) * scale).to(self.weight.dtype)

    @torch.no_grad()
    def standardize(self) -> None:
        """Standardize the weights once, for inference: a third of the time of a small batch."""
        self.weight = nn.Parameter(self.standardized(), requires_grad=False)
        self.is_standardized = True

    def forward(self, x: Tensor) -> Tensor:
        padded = pad(x, self.kernel_size[0], self.stride[0], self.config)
        return self.convolve(padded, self.standardized())


def group_norm(channels: int, config: ResNetConfig) -> nn.GroupNorm:
    return nn.GroupNorm(GROUPS, channels, eps=config.norm_eps)


class Root(nn.Module):
    """The first convolution and the max-pool; post-activation ResNets have norm and ReLU between.
    On its own, it is the stem of R+Ti/16."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        self.conv = StdConv(3, config.width, 7, config, stride=2)
        self.norm = None if config.preact else group_norm(config.width, config)

    def forward(self, images: Tensor) -> Tensor:  # (B, 3, H, W) -> (B, C, H / 4, W / 4)
        x = self.conv(images)
        if self.norm is not None:
            x = F.relu(self.norm(x))
        pad_value = 0.0 if self.config.pool_padding == "zeros" else -math.inf
        return F.max_pool2d(pad(x, 3, 2, self.config, pad_value), 3, 2)


class DropPath(nn.Module):
    """Stochastic depth (arXiv 1603.09382): drops a branch for some samples of a batch."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:  # (B, ...) -> (B, ...)
        factors = self.factors(x, 1)
        return x if factors is None else (x * factors[0]).to(x.dtype)

    def factors(self, x: Tensor, branches: int) -> Tensor | None:
        """Draw factors for each sample's branches, (branches, B, 1, ...) for x (B, ...): 0 if a
        branch is dropped; None: none is."""
        if not self.training or self.rate == 0.0:
            return None
        factors = torch.empty((branches, x.shape[0], *(1,) * (x.ndim - 1)), device=x.device)
        return factors.bernoulli_(1.0 - self.rate).div_(1.0 - self.rate)


def downsample(inputs: int, outputs: int, stride: int, config: ResNetConfig) -> nn.Module:
    """The shortcut of a stage's first block, with its channels and stride."""
    norm = nn.Identity() if config.preact else group_norm(outputs, config)
    return nn.Sequential(OrderedDict(conv=StdConv(inputs, outputs, 1, config, stride), norm=norm))


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions with a shortcut; the 3 x 3 one has the stride."""

    def __init__(
        self, inputs: int, hidden: int, stride: int, first: bool, config: ResNetConfig, rate: float
    ) -> None:
        super().__init__()
        outputs = hidden * EXPANSION
        self.preact = config.preact
        self.downsample = downsample(inputs, outputs, stride, config) if first else None
        self.norm1 = group_norm(inputs if config.preact else hidden, config)
        self.conv1 = StdConv(inputs, hidden, 1, config)
        self.norm2 = group_norm(hidden, config)
        self.conv2 = StdConv(hidden, hidden, 3, config, stride)
        self.norm3 = group_norm(hidden if config.preact else outputs, config)
        self.conv3 = StdConv(hidden, outputs, 1, config)
        self.drop_path = DropPath(rate)

    def forward(self, x: Tensor) -> Tensor:  # (B, inputs, h, w) -> (B, outputs, h / s, w / s)
        if self.preact:
            y = F.relu(self.norm1(x))
            shortcut = x if self.downsample is None else self.downsample(y)
            y = self.conv2(F.relu(self.norm2(self.conv1(y))))
            return shortcut + self.drop_path(self.conv3(F.relu(self.norm3(y))))
        shortcut = x if self.downsample is None else self.downsample(x)
        y = F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))
        return F.relu(shortcut + self.drop_path(self.norm3(self.conv3(y))))


def build_stage(stage: int, config: ResNetConfig, rates: list[float]) -> nn.Module:
    """Bottlenecks at one resolution."""
    hidden = config.width << stage
    outputs = hidden * EXPANSION
    inputs, stride = (outputs // 2, 2) if stage else (config.width, 1)
    first = Bottleneck(inputs, hidden, stride, True, config, rates[0])
    others = (Bottleneck(outputs, hidden, 1, False, config, rate) for rate in rates[1:])
    return nn.Sequential(OrderedDict(blocks=nn.Sequential(first, *others)))


class ResNet(nn.Module):
    """Root and stages: images (B, 3, H, W) to a feature map (B, C, H / stride, W / stride)."""

    def __init__(self, config: ResNetConfig, drop_path: float = 0.0) -> None:
        super().__init__()
        num_blocks = sum(config.depths)
        rates = (drop_path * i / max(num_blocks - 1, 1) for i in range(num_blocks))
        self.stem = Root(config)
        self.stages = nn.Sequential(
            *(build_stage(i, config, list(islice(rates, n))) for i, n in enumerate(config.depths))
        )
        self.norm = group_norm(config.channels, config) if config.preact else None

    def forward(self, images: Tensor) -> Tensor:
        """Return the last feature map, after the last ReLU."""
        x = self.stages(self.stem(images))
        return x if self.norm is None else F.relu(self.norm(x))


def build_stem(config: ResNetConfig) -> nn.Module:
    """Build a hybrid's stem; without stages it is the root alone, as in timm."""
    return ResNet(config) if config.depths else Root(config)


class ConvHead(nn.Module):
    """The linear head as a 1 x 1 convolution, as in timm."""

    def __init__(self, features: int, num_classes: int) -> None:
        super().__init__()
        self.fc = nn.Conv2d(features, num_classes, 1)

    def forward(self, features: Tensor) -> Tensor:  # (B, C) -> (B, num_classes)
        return self.fc(features.to(self.fc.weight.dtype)[:, :, None, None]).flatten(1)


class BiT(ResNet):
    """A BiT ResNet as a classifier, for images of any size.

    Args:
        config: the architecture.
        dropout: of the features; training only.
        drop_path: stochastic depth of the last block, rising linearly from 0; training only.

    Parameters have PyTorch's default initialization: load a checkpoint, or call `init_weights`.
    """

    def __init__(self, config: BiTConfig, dropout: float = 0.0, drop_path: float = 0.0) -> None:
        super().__init__(config.resnet, drop_path)
        self.config = config
        self.drop = nn.Dropout(dropout)
        features, classes = config.feature_dim, config.num_classes
        self.head = ConvHead(features, classes) if classes else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, num_classes) of images (B, 3, H, W); without a head, the features."""
        return self.head(self.drop(self.features(images)))

    def features(self, images: Tensor) -> Tensor:
        """The input of the head: the mean of the last feature map, (B, feature_dim)."""
        return super().forward(images).mean(dim=(2, 3))

    @torch.no_grad()
    def init_weights(self, seed: int, head_bias: float = 0.0) -> None:
        """Initialize every parameter: convolutions LeCun-normal, norms 1 and 0, the head 0."""
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if name.startswith("head"):
                p.fill_(head_bias if name.endswith("bias") else 0.0)
            else:
                init_layer(name, p, generator)


def init_layer(name: str, p: Tensor, generator: torch.Generator, zero_last: bool = False) -> None:
    """Initialize a parameter of a ResNet as flax does; with `zero_last`, every branch starts at 0,
    as in the stems of vit_jax/models_resnet.py."""
    if p.ndim == 4:
        p.normal_(0.0, 1.0 / math.sqrt(p[0].numel()), generator=generator)
    elif name.endswith("weight"):
        p.fill_(0.0 if zero_last and name.endswith("norm3.weight") else 1.0)
    else:
        p.zero_()

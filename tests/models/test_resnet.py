"""BiT ResNets and hybrid stems: properties that hold for any weights. (Comparisons with timm and
the authors' code: tests/test_golden.py, tests/layouts, tests/peers.)"""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from layouts.test_shapes import hybrid_config
from vitcli.architectures.resnet import bit_resnet
from vitcli.config import BiTConfig, ResNetConfig
from vitcli.models.resnet import BiT, Conv2d, ResNet, Root, StdConv, same_padding
from vitcli.models.vit import ViT

IMAGES = torch.randn(2, 3, 64, 64)


def bit(depths=(1, 1, 1, 1), **fields) -> BiT:
    config = BiTConfig(
        dataclasses.replace(bit_resnet(depths, 0.5), **fields), (64, 64), num_classes=3
    )
    model = BiT(config)
    model.init_weights(0)
    return model


@pytest.mark.parametrize("depths", [(1,), (1, 2, 1), (2, 1, 1, 2)])
def test_shapes_match_the_config_at_any_size(depths):
    model = bit(depths).eval()
    for size in ((64, 64), (33, 50)):
        features = model.features(torch.randn(2, 3, *size))
        assert features.shape == (2, model.config.feature_dim)
        grid = ResNet.forward(model, torch.randn(1, 3, *size)).shape[2:]
        assert tuple(grid) == model.config.with_image_size(size).grid
    features = model.features(IMAGES)
    for module in model.modules():
        if isinstance(module, StdConv):
            module.standardize()
    assert torch.equal(model.features(IMAGES), features)
    assert model(IMAGES).shape == (2, 3) and not model(IMAGES).any()


@pytest.mark.parametrize("preact", [False, True])
@pytest.mark.parametrize("size", [(64, 64), (50, 33)])
def test_macs_match_the_executed_convolutions(preact, size):
    config = ResNetConfig((2, 1, 1), 0.5, preact, "symmetric" if preact else "same")
    model, counted = ResNet(config), []
    for module in model.modules():
        if isinstance(module, StdConv):
            module.register_forward_hook(
                lambda conv, _, output: counted.append(conv.weight[0].numel() * output[0].numel())
            )
    model(torch.zeros(1, 3, *size))
    assert sum(layer.macs for layer in config.layers(size)) == sum(counted)


def test_hybrid_init_is_seeded_with_zero_residual_branches():
    first, again = (ViT(hybrid_config(depths=(1, 1), width_factor=0.5)) for _ in range(2))
    first.init_weights(0)
    again.init_weights(0)
    pairs = zip(first.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    backbone = first.patch_embed.backbone
    assert not backbone.stages[0].blocks[0].norm3.weight.any()
    assert backbone.stages[0].blocks[0].downsample.norm.weight.all()
    assert backbone.stem.conv.weight.std().item() == pytest.approx(147**-0.5, rel=0.05)


@pytest.mark.parametrize("kernel, stride", [(7, 2), (3, 2), (3, 1), (1, 2)])
def test_same_padding_matches_tensorflow(kernel, stride):
    """ceil(size / stride) windows that cover every pixel; an odd padding pixel goes to the end."""
    for size in range(7, 13):
        before, behind = same_padding(size, kernel, stride)
        assert (size + before + behind - kernel) // stride + 1 == -(-size // stride)
        assert behind - before in (0, 1)


def test_max_pool_padding_matters_without_a_relu():
    stems = [bit(pool_padding=border).stem for border in ("zeros", "-inf")]
    for stem in stems:  # its feature map is negative everywhere
        stem.conv.standardized = lambda: -torch.ones(32, 3, 7, 7)
    zeros, infinite = (stem(torch.ones(1, 3, 16, 16))[0, 0] for stem in stems)
    assert zeros[0, 0] == 0 > infinite[0, 0] and zeros[2, 2] == infinite[2, 2] < 0
    zeros, infinite = (Root(ResNetConfig((), 0.5, pool_padding=b)) for b in ("zeros", "-inf"))
    infinite.load_state_dict(zeros.state_dict())  # post-activation: a ReLU comes before the pool
    image = torch.randn(1, 3, 15, 16)
    assert torch.equal(zeros(image), infinite(image))


@pytest.mark.parametrize("size", [(40, 8), (8, 40)], ids=["one column", "one row"])
def test_bf16_convolution_is_accurate(size):
    conv, images = Conv2d(3, 16, 8, 8), torch.randn(2, 3, *size)
    expected = F.conv2d(images, conv.weight, conv.bias, 8)
    assert torch.allclose(conv(images), expected, atol=1e-5)
    assert torch.allclose(conv.bfloat16()(images.bfloat16()).float(), expected, atol=0.05)


def test_stochastic_depth_only_in_training():
    model = BiT(bit().config, dropout=0.2, drop_path=0.9)
    model.init_weights(0)
    rates = [block.drop_path.rate for stage in model.stages for block in stage.blocks]
    assert rates == pytest.approx([0.0, 0.3, 0.6, 0.9])
    torch.manual_seed(0)
    assert not torch.equal(model.features(IMAGES), model.features(IMAGES))
    model.eval()
    assert torch.equal(model.features(IMAGES), model.features(IMAGES))

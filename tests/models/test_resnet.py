"""BiT ResNets and the stems of hybrids: what holds whatever the weights. (Numbers against timm and
the authors: tests/checkpoints.)"""

import dataclasses

import numpy as np
import pytest
import torch

from vitcli.config import BiTConfig, ModelConfig, ResNetConfig
from vitcli.models.resnet import BiT, ResNet, Root, StdConv, pad, same_padding
from vitcli.models.vit import ViT
from vitcli.resnets import bit_resnet

STEMS = {
    "root alone": (ResNetConfig((), 0.5), 8),
    "root, patches of 2": (ResNetConfig((), 0.5), 2),
    "two stages": (ResNetConfig((1, 2), 0.5), 2),
    "three stages": (ResNetConfig((2, 1, 1), 0.5), 1),
    "four stages": (ResNetConfig((1, 1, 1, 1), 0.5), 1),
}


def hybrid(stem: ResNetConfig, cells: int, **fields) -> ViT:
    patch = cells * stem.stride
    sizes = {"width": 16, "depth": 1, "num_heads": 2, "mlp_dim": 24, "image_size": (64, 64)}
    config = ModelConfig(**(sizes | {"patch_size": (patch, patch), "stem": stem} | fields))
    model = ViT(config)
    model.init_weights(0)
    return model


def bit(depths=(1, 1, 1, 1), **fields) -> BiT:
    config = BiTConfig(
        dataclasses.replace(bit_resnet(depths, 0.5), **fields), (64, 64), num_classes=3
    )
    model = BiT(config)
    model.init_weights(0)
    return model


@pytest.mark.parametrize("stem, cells", STEMS.values(), ids=STEMS)
def test_a_hybrid_has_the_tokens_and_parameters_that_its_config_says(stem, cells):
    model = hybrid(stem, cells, num_classes=5).eval()
    config = model.config
    assert sum(p.numel() for p in model.parameters()) == config.num_params()
    tokens = model.encode(torch.randn(2, 3, 64, 64))
    assert tokens.shape == (2, config.num_tokens, 16)
    assert config.grid == (64 // (stem.stride * cells),) * 2
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 5)


@pytest.mark.parametrize("depths", [(1,), (1, 2, 1), (2, 1, 1, 2)])
def test_a_bit_resnet_has_the_parameters_and_features_that_its_config_says(depths):
    model = bit(depths).eval()
    assert sum(p.numel() for p in model.parameters()) == model.config.num_params()
    for size in ((64, 64), (33, 50)):  # any will do
        features = model.features(torch.randn(2, 3, *size))
        assert features.shape == (2, model.config.feature_dim)
        grid = model.feature_map(torch.randn(1, 3, *size)).shape[2:]
        assert tuple(grid) == model.config.at(size).grid
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 3)


def count_multiplications(model: torch.nn.Module, images: torch.Tensor) -> int:
    """Of every convolution as it runs."""
    counted = []

    def count(conv, _, output):
        counted.append(conv.weight[0].numel() * output[0].numel())

    for module in model.modules():
        if isinstance(module, StdConv):
            module.register_forward_hook(count)
    model(images)
    return sum(counted)


@pytest.mark.parametrize("preact", [False, True])
@pytest.mark.parametrize("size", [(64, 64), (50, 33)])
def test_macs_are_those_that_happen(preact, size):
    config = ResNetConfig((2, 1, 1), 0.5, preact, "symmetric" if preact else "same")
    macs = sum(layer.macs for layer in config.layers(size))
    assert macs == count_multiplications(ResNet(config), torch.zeros(1, 3, *size))


def test_one_head_of_zeros_after_reset():
    model = bit()
    model.reset_head(7)
    assert model.config.num_classes == 7
    assert not model(torch.randn(1, 3, 64, 64)).any()
    model.reset_head(0)
    images = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(model.eval()(images), model.features(images))


def test_the_seed_decides_the_weights_and_every_branch_of_a_stem_starts_at_zero():
    stem = ResNetConfig((1, 1), 0.5)
    first, again = hybrid(stem, 1), hybrid(stem, 1)
    pairs = zip(first.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    backbone = first.patch_embed.backbone
    assert not backbone.stages[0].blocks[0].norm3.weight.any()
    assert backbone.stages[0].blocks[0].downsample.norm.weight.all()
    assert backbone.stem.conv.weight.std().item() == pytest.approx(147**-0.5, rel=0.05)


@pytest.mark.parametrize("where, eps", [("variance", 1e-8), ("variance", 0.1), ("deviation", 0.1)])
def test_weights_are_standardised_over_input_and_kernel(where, eps):
    config = ResNetConfig((1,), std_eps=eps, std_eps_in=where)
    conv = StdConv(4, 6, 3, config)
    w = conv.weight.detach().double().numpy()
    centred = w - w.mean(axis=(1, 2, 3), keepdims=True)
    deviation = w.std(axis=(1, 2, 3), keepdims=True)
    expected = centred / (np.sqrt(deviation**2 + eps) if where == "variance" else deviation + eps)
    np.testing.assert_allclose(conv.standardized().detach().numpy(), expected, atol=1e-5)
    half = conv.to(torch.bfloat16)
    assert half.standardized().dtype == torch.bfloat16


@pytest.mark.parametrize("kernel, stride", [(7, 2), (3, 2), (3, 1), (1, 2)])
@pytest.mark.parametrize("size", range(7, 13))
def test_same_padding_is_tensorflows(size, kernel, stride):
    """ceil(size / stride) windows that cover every pixel, the odd pixel behind."""
    before, behind = same_padding(size, kernel, stride)
    windows = (size + before + behind - kernel) // stride + 1
    assert windows == -(-size // stride)
    assert behind - before in (0, 1)


def test_the_odd_pixel_of_same_padding_lies_behind():
    same, symmetric = ResNetConfig((1,)), bit_resnet((1,), 1)
    image = torch.ones(1, 1, 4, 5)
    assert pad(image, 3, 2, same)[0, 0].tolist() == [
        [0, 1, 1, 1, 1, 1, 0],
        *[[0, 1, 1, 1, 1, 1, 0]] * 3,
        [0] * 7,
    ]
    assert pad(image, 3, 2, symmetric).shape == (1, 1, 6, 7)
    assert pad(image, 7, 2, same).shape == (1, 1, 9, 11)


def test_the_border_of_the_max_pool_matters_without_a_relu():
    zeros, infinite = bit(pool_padding="zeros"), bit(pool_padding="-inf")
    for model in (zeros, infinite):  # the root's feature map is negative at once
        with torch.no_grad():
            model.stem.conv.standardized = lambda: -torch.ones(32, 3, 7, 7)
    image = torch.ones(1, 3, 16, 16)
    with torch.no_grad():
        corner = [model.stem(image)[0, 0, 0, 0].item() for model in (zeros, infinite)]
        inner = [model.stem(image)[0, 0, 2, 2].item() for model in (zeros, infinite)]
    assert corner[0] == 0 and corner[1] < 0
    assert inner[0] == inner[1] < 0


def test_the_border_does_not_matter_behind_one():
    zeros = Root(ResNetConfig((), 0.5))
    infinite = Root(ResNetConfig((), 0.5, pool_padding="-inf"))
    infinite.load_state_dict(zeros.state_dict())
    image = torch.randn(1, 3, 15, 16)
    assert torch.equal(zeros(image), infinite(image))


def test_stochastic_depth_leaves_branches_out_in_training_alone():
    model = BiT(bit().config, dropout=0.2, drop_path=0.9)
    model.init_weights(0)
    rates = [block.drop_path.rate for stage in model.stages for block in stage.blocks]
    assert rates == pytest.approx([0.0, 0.3, 0.6, 0.9])
    images = torch.randn(4, 3, 64, 64)
    torch.manual_seed(0)
    assert not torch.equal(model.features(images), model.features(images))
    model.eval()
    assert torch.equal(model.features(images), model.features(images))


def test_nothing_is_made_on_the_meta_device():
    with torch.device("meta"):
        model = BiT(BiTConfig(bit_resnet((3, 8, 36, 3), 4), num_classes=1000))
    assert all(p.is_meta for p in model.parameters())

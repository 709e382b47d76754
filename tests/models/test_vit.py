"""ViT: properties that hold for any weights. (Numbers: tests/test_golden.py, tests/peers; tensors
and their shapes: tests/layouts/test_shapes.py.)"""

import itertools

import pytest
import torch
import torch.nn.functional as F

from layouts.test_shapes import MODELS, random_model, small_config
from vitcli.config import ModelConfig, model_config
from vitcli.errors import ConfigError
from vitcli.models.vit import ViT, attend

VITS = {name: config for name, config in MODELS.items() if isinstance(config, ModelConfig)}
VITS["sincos2d"] = small_config(posemb="sincos2d", posemb_tokens="patches")
ROPE = {"posemb": "none", "rope": "dinov3", "num_registers": 2}
VITS["rope"] = small_config(**ROPE)
VITS["relative"] = small_config(posemb="relative")
VITS["aimv2"] = small_config(norm="rms", qkv_bias=False, swiglu=True)
VITS["eva02"] = small_config(rope="eva02", key_bias=False, sub_norm="both", swiglu=True)


@pytest.mark.parametrize("config", VITS.values(), ids=VITS)
def test_shapes_and_position_dependence_of_every_option(config):
    model = random_model(config).double()
    images = torch.randn(3, 3, *config.image_size).double()
    logits = model(images)
    assert logits.shape == (3, config.num_classes or config.feature_dim)
    assert model.features(images).shape == (3, config.feature_dim)
    assert model.encode(images).shape == (3, config.num_tokens, config.width)
    moved = torch.roll(images, config.patch_size, dims=(2, 3))
    unplaced = config.posemb == config.rope == "none"
    assert torch.allclose(logits, model(moved)) == unplaced


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("config", VITS.values(), ids=VITS)
def test_every_option_trains_under_autocast(config):
    model = random_model(config)
    images = torch.randn(3, 3, *config.image_size)
    expected = model(images)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.train()(images)
    logits.float().square().mean().backward()
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(g is not None and g.isfinite().all() for g in grads)
    assert (logits - expected).abs().max() < 0.1 * expected.abs().max()


def test_rope_follows_the_patch_order_of_each_image():
    """Permuting the patches of an image, and `patches` with them, only permutes the outputs."""
    model = random_model(small_config(**ROPE)).double()
    config, images = model.config, torch.randn(3, 3, 32, 32).double()
    prefix, patches = config.num_prefix_tokens, config.grid[0] * config.grid[1]
    tokens, order = model.embed(images), torch.stack([torch.randperm(patches) for _ in range(3)])
    each = torch.arange(3)[:, None]
    shuffled = torch.cat([tokens[:, :prefix], tokens[:, prefix:][each, order]], dim=1)
    found, expected = model.encode_tokens(shuffled, patches=order), model.encode_tokens(tokens)
    assert torch.allclose(found[:, prefix:], expected[:, prefix:][each, order])
    assert torch.allclose(found[:, :prefix], expected[:, :prefix])
    assert not torch.allclose(model.encode_tokens(shuffled)[:, 0], expected[:, 0])


def test_wrong_image_size_is_rejected():
    with pytest.raises(ConfigError):
        random_model(small_config())(torch.zeros(1, 3, 40, 32))


def test_explicit_attention_matches_sdpa():
    q, k, v = torch.randn(3, 2, 4, 9, 8).to(torch.bfloat16)
    fused = F.scaled_dot_product_attention(q.float(), k.float(), v.float())
    written = attend(q.requires_grad_(), k, v)
    assert torch.allclose(written.float(), fused, atol=0.03)
    with torch.no_grad():
        assert torch.allclose(attend(q, k, v).float(), fused, atol=0.03)


@pytest.mark.parametrize(
    "fields",
    [{}, {"distill_token": True}, {"num_registers": 2, "layer_scale": True}, {"pool": "gap"}, ROPE],
    ids=str,
)
def test_skipping_tokens_in_the_last_block_changes_nothing(fields):
    """In training and in `Inference`, the last block skips tokens that no head reads."""
    model = random_model(small_config(**fields))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    images = torch.randn(2, 3, 32, 32)
    tokens = []
    model.norm.register_forward_hook(lambda *args: tokens.append(args[-1].shape[1]))
    found = []
    for training, model.computes_all_tokens in ((False, True), (True, True), (False, False)):
        model.train(training)
        logits = model(images)
        (logits**2).sum().backward()
        found.append([logits, *(p.grad.clone() for p in model.parameters())])
        model.zero_grad()
    for expected, *ours in zip(*found, strict=True):
        assert all(torch.allclose(values, expected, rtol=1e-4, atol=1e-5) for values in ours)
    distilled, pool = bool(fields.get("distill_token")), fields.get("pool", "token")
    assert tokens[1:] == [tokens[0] if pool == "gap" else 1 + distilled] * 2


def test_dropout_and_stochastic_depth_only_in_training():
    model = ViT(small_config(), dropout=0.3, drop_path=0.5)
    model.init_weights(0)
    images = torch.randn(8, 3, 32, 32)
    model.eval()
    assert torch.equal(model.features(images), model.features(images))
    model.train()
    assert not torch.equal(model.features(images), model.features(images))
    assert [block.drop_path.rate for block in model.blocks] == [0.0, 0.5]
    ones = model.blocks[1].drop_path(torch.ones(4000, 2, 3))
    assert set(ones.unique().tolist()) == {0.0, 2.0}
    assert ones.mean().item() == pytest.approx(1.0, abs=0.1)
    assert torch.equal(ones[:, :1, :1].expand_as(ones), ones)  # whole samples are dropped


def test_init_matches_the_authors_and_depends_on_the_seed():
    config = model_config("S/16", depth=1, num_classes=10)
    model, again, other = ViT(config), ViT(config), ViT(config)
    for one, seed in ((model, 1), (again, 1), (other, 2)):
        one.init_weights(seed)
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    qkv = model.blocks[0].attn.qkv.weight
    assert not torch.equal(qkv, other.blocks[0].attn.qkv.weight)
    limit = (6 / (384 + 384)) ** 0.5  # Xavier for each of q, k, v: fan-in and fan-out 384
    for matrix in qkv.split(384):
        assert matrix.abs().max().item() == pytest.approx(limit, rel=1e-3)
    patches = model.patch_embed.proj.weight
    assert patches.std().item() == pytest.approx(768**-0.5, rel=0.02)
    assert patches.abs().max() < 2.28 * 768**-0.5  # flax truncates
    assert model.pos_embed.std().item() == pytest.approx(0.02, rel=0.02)
    assert not model.cls_token.any() and not model.head.weight.any()


def test_meta_device_allocates_nothing():
    with torch.device("meta"):
        model = ViT(model_config("H/14", num_classes=1000))
    tensors = itertools.chain(model.parameters(), model.buffers())
    assert all(tensor.is_meta for tensor in tensors)

"""MAE and its decoder, compared with a plain reference implementation of the authors' method."""

import pytest
import torch
from torch import nn

from train.runs import TINY, make_config
from vitcli.architectures.variants import model_config
from vitcli.config import Preprocess
from vitcli.errors import ConfigError
from vitcli.models.vit import ViT
from vitcli.train.mae import MaskedAutoencoder, decoder_config
from vitcli.train.objective_config import MaskingConfig
from vitcli.train.plan import default_lr

ROPE = {"posemb": "none", "rope": "dinov3"}


def make_objective(variant="Ti/8", size=(32, 48), fields=(), **masking) -> MaskedAutoencoder:
    model = ViT(model_config(variant, image_size=size, num_classes=0, **(TINY | dict(fields))))
    model.init_weights(1)
    config = make_config(task="pretrain", objective="mae", masking=MaskingConfig(**masking))
    return MaskedAutoencoder(model, config, Preprocess(size=size))


def reference_loss(made: MaskedAutoencoder, image: torch.Tensor, order: torch.Tensor, patch: int):
    """models_mae.py for one image, with loops: encode the visible patches, insert mask tokens in
    image order, decode, and average the loss over the hidden patches."""
    model, decoder = made.model, made.decoder
    columns = image.shape[2] // patch
    squares = [
        image[:, patch * (i // columns) :, patch * (i % columns) :][:, :patch, :patch]
        for i in range(len(order))
    ]
    weight, bias = model.patch_embed.proj.weight, model.patch_embed.proj.bias
    visible = order[: int(len(order) * 0.25)].tolist()
    tokens = [model.cls_token[0, 0] + model.pos_embed[0, 0]]
    for i in visible:
        embedded = (weight * squares[i]).sum(dim=(1, 2, 3)) + bias
        tokens.append(embedded + model.pos_embed[0, 1 + i])
    x = decoder.embed(model.norm(model.blocks(torch.stack(tokens)[None])))[0]
    full = [x[0]]
    for i in range(len(order)):
        token = x[1 + visible.index(i)] if i in visible else decoder.mask_token[0, 0]
        full.append(token + decoder.pos_embed[0, i])
    out = decoder.predict(decoder.norm(decoder.blocks(torch.stack(full)[None])))[0, 1:]
    losses = []
    for i in set(order.tolist()) - set(visible):
        pixels = squares[i].permute(1, 2, 0).flatten()  # row, column, channel, as "nhwpqc"
        target = (pixels - pixels.mean()) / (pixels.var(unbiased=True) + 1e-6) ** 0.5
        losses.append(((out[i] - target) ** 2).mean())
    return torch.stack(losses).mean()


def test_decoder_initialization_matches_authors():
    """Xavier uniform, zero biases, mask token with std 0.02 (`_init_weights` in models_mae.py)."""
    decoder = make_objective(fields={"width": 384, "num_heads": 6}).decoder
    assert decoder.mask_token.std().item() == pytest.approx(0.02, rel=0.2)
    for module in decoder.modules():
        if isinstance(module, nn.Linear):
            expected = (2 / sum(module.weight.shape)) ** 0.5
            assert module.weight.std().item() == pytest.approx(expected, rel=0.05)
            assert not module.bias.any()
        elif isinstance(module, nn.LayerNorm):
            assert (module.weight == 1).all() and not module.bias.any()


@pytest.mark.parametrize("size", [(32, 32), (16, 64), (48, 32)])
def test_loss_matches_reference(size):
    made, x = make_objective(size=size), torch.randn(3, 3, *size)
    _, y = made.prepare(x, torch.zeros(3), 1)
    losses, _ = made(x, y)
    for image, order, loss in zip(x, y, losses, strict=True):
        assert torch.allclose(loss, reference_loss(made, image, order, 8), rtol=1e-5)
    losses.sum().backward()
    grads = {name: p.grad for name, p in made.named_parameters()}
    assert all(grad is not None and grad.abs().sum() > 0 for grad in grads.values()), grads.keys()


def test_masks_are_uniform_permutations():
    made, x = make_objective(size=(64, 64)), torch.zeros(50, 3, 64, 64)
    _, y = made.prepare(x, torch.zeros(50), 4)
    assert y.shape == (50, 64) and made.num_visible == 16
    assert all(sorted(row) == list(range(64)) for row in y.tolist())
    assert len({tuple(row) for row in y.tolist()}) == 50
    seen = torch.cat([made.prepare(x, torch.zeros(50), step)[1][:, :16] for step in range(40)])
    counts = torch.bincount(seen.flatten(), minlength=64).double()
    assert (counts - 500).abs().max() < 5 * (2000 * 0.25 * 0.75) ** 0.5


@pytest.mark.parametrize(
    "fields", [{"num_registers": 2}, {"class_token": False, "pool": "gap"}, ROPE]
)
def test_encoder_sees_visible_patches_and_prefix_tokens(fields):
    """Hidden pixels do not affect the prediction."""
    made, x = make_objective(fields=fields.items()), torch.randn(2, 3, 32, 48)
    y = made.validation_masks(x, [0, 1])
    seen = []
    made.model.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    before = made.predict(x, y)
    assert seen == [(2, made.architecture.num_prefix_tokens + 6, 24)]
    cells = made.patchify(x)
    for i in range(2):
        cells[i, y[i, made.num_visible :]] = 9.0
    assert torch.equal(made.predict(made.unpatchify(cells), y), before)


def test_reconstruction_is_unnormalized_per_patch():
    """A decoder that predicts its targets reconstructs the image."""
    made, x = make_objective(), torch.randn(2, 3, 32, 48) / 3
    y = made.validation_masks(x, [0, 1])
    made.predict = lambda x, y: made.target(x, y)[0]
    shown, filled = made.reconstruct(x, y)
    assert torch.allclose(filled, x, atol=1e-5)
    hidden = made.patchify(shown)[0, y[0, made.num_visible :]]
    assert torch.allclose(hidden, torch.tensor(0.0))  # mid-gray, normalized
    assert torch.equal(
        made.patchify(shown)[0, y[0, : made.num_visible]],
        made.patchify(x)[0, y[0, : made.num_visible]],
    )


def test_decoder_size_defaults():
    config = make_config(task="pretrain", objective="mae")
    for variant, width in {"H/14": 512, "B/16": 512, "S/16": 256, "Ti/16": 128}.items():
        found = decoder_config(model_config(variant), config)
        assert (found.width, found.depth, found.num_heads) == (width, 8, width // 32)
        assert found.mlp_dim == 4 * width
    made = make_objective(decoder_width=96, decoder_depth=3)
    assert made.decoder.embed.out_features == 96 and len(made.decoder.blocks) == 3
    with pytest.raises(ConfigError):
        make_objective(decoder_width=100)
    with pytest.raises(ConfigError, match="hybrid"):
        make_objective("R+Ti/16", (64, 96))
    assert default_lr(config, 4096) == pytest.approx(2.4e-3)  # Table 8


@pytest.mark.parametrize("fields", [{}, {"swiglu": True}])
def test_macs_match_torch_flop_counter(fields):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    made, x = make_objective(size=(64, 64), fields=fields.items()), torch.zeros(1, 3, 64, 64)
    unfused = sdpa_kernel(SDPBackend.MATH)  # before torch 2.15, fused attention counts for nothing
    with unfused, FlopCounterMode(display=False) as counter, torch.no_grad():
        made(x, made.validation_masks(x, [0]))
    assert 2 * made.macs == counter.get_total_flops()


def test_parameter_count_matches_authors():
    """mae_vit_base_patch16 has 111,907,840 values, including 392,192 in fixed position embeddings:
    197 x 768 in the encoder and 197 x 512 in the decoder."""
    with torch.device("meta"):
        model = ViT(model_config("B/16", num_classes=0))
        encoder = sum(p.numel() for p in model.parameters())
        assert isinstance(model.norm, nn.LayerNorm)
    config = make_config(task="pretrain", objective="mae")
    made = MaskedAutoencoder(model, config, Preprocess())
    ours = sum(p.numel() for p in made.parameters())
    learned_positions = 197 * 768
    assert encoder == 85_798_656
    assert ours - learned_positions == 111_907_840 - 197 * (768 + 512)

"""Masked patch prediction, compared with the paper's numbers (section B.1.2) and plain NumPy."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from train.runs import TINY, make_config
from vitcli.architectures.variants import bit_config, model_config
from vitcli.config import Preprocess
from vitcli.data.transforms import to_float
from vitcli.errors import ConfigError
from vitcli.models.resnet import BiT
from vitcli.models.vit import ViT
from vitcli.train.masked_patch import NUM_COLORS, MaskedPatches
from vitcli.train.masking import gather
from vitcli.train.objective_config import MaskingConfig

PREPROCESS = Preprocess(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def make_objective(variant="Ti/8", size=(32, 48), seed=0, **masking) -> MaskedPatches:
    model = ViT(model_config(variant, image_size=size, num_classes=0, **TINY))
    model.init_weights(1)
    fields = {"objective": "masked-patch", "masking": MaskingConfig(**masking), "seed": seed}
    made = MaskedPatches(model, make_config(task="pretrain", **fields), PREPROCESS)
    torch.nn.init.normal_(made.decoder.weight, std=0.1, generator=torch.Generator().manual_seed(2))
    return made


def pixels(size=(32, 48), count=3) -> torch.Tensor:
    """8-bit images in which every 8 x 8 patch has its own noisy color."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (count, 3, size[0] // 8, size[1] // 8))
    fine = coarse.repeat(8, axis=2).repeat(8, axis=3) + rng.integers(-20, 20, (count, 3, *size))
    return torch.from_numpy(np.clip(fine, 0, 255).astype(np.uint8))


def test_corruption_fractions_match_paper():
    """Within four standard deviations for 80,000 corrupted patches."""
    made = make_objective(size=(64, 64), seed=3)
    x = torch.zeros(100, 3, 64, 64)
    y = torch.cat([made.prepare(x, torch.zeros(100), step)[1] for step in range(25)])
    assert y.shape == (2500, 32, 2)  # exactly half of each image's 64 patches
    places, shown = y.unbind(2)
    assert all(len(set(row)) == 32 for row in places.tolist())
    assert not torch.equal(y[:100], y[100:200])
    for chosen, share in ((shown == 64, 0.8), (shown == places, 0.1)):
        assert abs(chosen.double().mean() - share) < 4 * (share * (1 - share) / 80_000) ** 0.5
    others = (shown != 64) & (shown != places)
    assert abs(others.double().mean() - 0.1) < 4 * (0.09 / 80_000) ** 0.5
    # Patches are corrupted, and their replacements drawn, uniformly.
    counts = torch.bincount(places.flatten(), minlength=64).double()
    assert (counts - 1250).abs().max() < 5 * (2500 * 0.25) ** 0.5
    shifts = (shown - places)[others] % 64
    counts = torch.bincount(shifts, minlength=64)[1:].double()
    assert (counts - counts.mean()).abs().max() < 5 * counts.mean() ** 0.5


def test_corruption_does_not_depend_on_batch_splits():
    made, x = make_objective(), torch.zeros(6, 3, 32, 48)
    whole = made.prepare(x, torch.zeros(6), 7)[1]
    parts = [made.prepare(x[i : i + 2], torch.zeros(2), 7, first=i)[1] for i in (0, 2, 4)]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(
        made.validation_masks(x[:2], [4, 5]), make_objective(seed=5).validation_masks(x[:2], [4, 5])
    )


@pytest.mark.parametrize("variant, size", [("Ti/8", (32, 48)), ("Ti/14", (28, 42))])
@pytest.mark.parametrize("target", ["mean-3bit", "4x4-3bit"])
def test_color_classes_match_numpy(variant, size, target):
    raw = pixels((32, 48))[:, :, : size[0], : size[1]]
    found = make_objective(variant, size, target=target).color_classes(to_float(raw, PREPROCESS))
    patch, side = int(variant[3:]), 1 if target == "mean-3bit" else 4
    expected = []
    for image in raw.numpy():
        for top in range(0, size[0], patch):
            for left in range(0, size[1], patch):
                square = torch.from_numpy(image[:, top : top + patch, left : left + patch])
                mean = F.adaptive_avg_pool2d(square.double(), side)  # (3, side, side)
                r, g, b = np.minimum(np.floor(mean.numpy() * 8 / 255), 7).astype(int)
                expected.append((64 * r + 8 * g + b).flatten())
    assert np.array_equal(found.flatten(0, 1).numpy(), np.array(expected))
    assert found.min() >= 0 and found.max() < NUM_COLORS and len(found.unique()) > 10


def test_color_levels_are_three_highest_bits():
    values = torch.arange(256, dtype=torch.uint8)
    raw = values.view(256, 1, 1, 1).expand(256, 3, 16, 16)
    found = make_objective("Ti/8", (16, 16)).color_classes(to_float(raw, PREPROCESS))
    assert torch.equal(found[:, 0, 0], (values.long() >> 5) * 73)


@pytest.mark.parametrize("target", ["mean-3bit", "4x4-3bit", "pixels"])
def test_loss_covers_only_corrupted_patches(target):
    made, raw = make_objective(target=target), pixels()
    x = to_float(raw, PREPROCESS)
    y = made.validation_masks(x, range(3))
    losses, _ = made(x, y)
    # Computed by hand, one patch at a time.
    for i in range(3):
        patches = made.model.patch_embed(x[i : i + 1])[0]
        corrupted = patches.clone()
        for place, shown in y[i].tolist():
            corrupted[place] = made.mask_token[0, 0] if shown == 24 else patches[shown]
        tokens = made.model.encode_tokens(made.model.add_positions(corrupted[None]))[0, 1:]
        each = []
        for place, _ in y[i].tolist():
            output = made.decoder(tokens[place])
            if target == "pixels":
                top, left = divmod(place, 6)
                square = x[i, :, 8 * top : 8 * top + 8, 8 * left : 8 * left + 8]
                each.append((output - square.permute(1, 2, 0).flatten()).square().mean())
            else:
                classes = made.color_classes(x[i : i + 1])[0, place]
                each.append(F.cross_entropy(output.view(-1, 512), classes))
        assert torch.allclose(losses[i], torch.stack(each).mean(), rtol=1e-5)
    losses.sum().backward()
    assert made.mask_token.grad is not None and made.mask_token.grad.abs().sum() > 0


def test_hybrid_patches_have_sides_of_its_stride():
    made = make_objective("R+Ti/16", (64, 96))
    assert made.patchify(torch.zeros(1, 3, 64, 96)).shape[1:] == (6, 32, 32, 3)
    x = torch.randn(2, 3, 64, 96)
    losses, _ = made(x, made.validation_masks(x, [0, 1]))
    losses.sum().backward()
    assert (
        losses.isfinite().all() and made.model.patch_embed.backbone.conv.weight.grad.abs().sum() > 0
    )


@pytest.mark.parametrize("target", ["mean-3bit", "4x4-3bit", "pixels"])
def test_perfect_predictions_reconstruct_image(target, monkeypatch):
    made, x = make_objective(target=target), to_float(pixels(), PREPROCESS)
    y = made.validation_masks(x, range(3))
    if target == "pixels":
        right, side, tolerance = gather(made.patchify(x), y[..., 0]).flatten(2), 8, 1e-5
    else:
        right = F.one_hot(gather(made.color_classes(x), y[..., 0]), NUM_COLORS).float().flatten(2)
        side, tolerance = (1 if target == "mean-3bit" else 4), 1 / 16 + 1e-5  # half a level
    monkeypatch.setattr(made, "predict", lambda x, y: right)

    def areas(images):  # mean colors, (B, P, side, side, 3)
        cells = made.patchify(made.to_rgb(images)).unflatten(3, (side, -1)).unflatten(2, (side, -1))
        return cells.mean(dim=(3, 5))

    shown, filled = made.reconstruct(x, y)
    assert (areas(filled) - areas(x)).abs().max() <= tolerance
    cells, shown, filled = (made.patchify(made.to_rgb(images)) for images in (x, shown, filled))
    assert torch.allclose(made.unpatchify(cells), made.to_rgb(x))
    places, sources = y.unbind(2)
    for i in range(3):
        unchanged = sorted(set(range(24)) - set(places[i].tolist()))
        assert torch.allclose(shown[i, unchanged], cells[i, unchanged], atol=1e-5)
        assert torch.allclose(filled[i, unchanged], cells[i, unchanged], atol=1e-5)
        masked = places[i][sources[i] == 24]
        assert torch.allclose(shown[i, masked], torch.tensor(0.5), atol=1e-5)


def test_models_without_patches_to_hide_are_rejected():
    config = make_config(task="pretrain", objective="masked-patch")
    with pytest.raises(ConfigError, match="BiT"):
        MaskedPatches(BiT(bit_config("R50x1")), config, PREPROCESS)
    with pytest.raises(ConfigError, match="at least two"):
        make_objective("Ti/32", (32, 32))

"""Attention maps, distances and weights, checked against closed forms and plain references."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

import vitcli
from checkpoints.golden_cases import GOLDEN, TIMM_VIT
from layouts.test_shapes import random_model
from vitcli.config import ClassLabel, ModelConfig, model_config
from vitcli.errors import ConfigError
from vitcli.inference import CorePool
from vitcli.inspection.attention import (
    AttentionHook,
    AttentionInputs,
    attention_distance,
    attention_maps,
    head_maps,
    patch_distance,
    readout,
)
from vitcli.inspection.components import (
    feature_colors,
    filter_components,
    posemb_similarity,
    principal_components,
)
from vitcli.inspection.faithfulness import faithfulness_of, random_maps
from vitcli.inspection.inspector import Inspector
from vitcli.models.vit import ViT
from vitcli.prediction import Predictor

Floats = npt.NDArray[np.float64]

# Every kind of attention: class token, distillation token, registers, attention pooling, mean
# pooling, hybrid, other layouts.
CASES = (
    *("timm_vit_default", "timm_deit_distilled", "timm_vit_reg4_dinov2", "timm_vit_reg4_gap"),
    *("timm_siglip_map", "timm_gap_fcnorm", "timm_clip_prenorm", "timm_dinov2", "timm_deit3"),
    *("vit_jax_token/checkpoint.npz", "vit_jax_gap/checkpoint.npz", "hf_vit", "hf_deit_teacher"),
    *("big_vision_tok/checkpoint.npz", "vit_jax_hybrid_b3/checkpoint.npz"),
)


def random_vit(**fields: object) -> ViT:
    """A small model with weights large enough for attention that is far from uniform."""
    sizes = {"width": 24, "depth": 3, "num_heads": 2, "mlp_dim": 48, "num_classes": 5}
    sizes |= {"patch_size": (8, 8), "image_size": (24, 32)}
    return random_model(ModelConfig(**(sizes | fields)), std=0.4)


def test_class_name_takes_precedence_over_index() -> None:
    inspector = Inspector(Predictor(TIMM_VIT, "cpu", "fp32"))
    inspector.classes = tuple(ClassLabel(id, id) for id in ("1", "10", "2", "one"))
    assert [inspector.find_class(name) for name in ("1", "2", "10", "0", "3")] == [0, 2, 1, 0, 3]
    inspector.classes = (
        ClassLabel("n01440764", "tench, Tinca tinca"),
        ClassLabel("n1", "goldfish"),
    )
    assert inspector.find_class("Tench") == 0
    for name in ("4", "two"):
        with pytest.raises(ConfigError, match="no class"):
            inspector.find_class(name)


def pixels(model: ViT, count: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, *model.config.image_size, generator=generator)


def all_weights(model: ViT, images: Tensor) -> dict[int, Tensor]:
    found = {}
    with AttentionHook(model, lambda index, layer, _: found.update({index: layer.weights()})):
        model(images)
    return found


@pytest.mark.parametrize("case", CASES)
def test_recomputed_attention_matches_the_blocks(case: str) -> None:
    path = GOLDEN / case
    model = vitcli.load(path)
    images = pixels(model)
    seen = []

    def visit(index: int, layer: AttentionInputs, output: Tensor) -> None:
        assert torch.allclose(layer.weights() @ layer.v, output, atol=1e-5, rtol=0)
        seen.append(index)

    with torch.no_grad(), AttentionHook(model, visit):
        model(images)
    pooled = [-1] if model.config.pool == "map" else []
    assert seen == [*range(model.config.depth), *pooled]
    maps = attention_maps(model, images)
    assert maps.shape == (2, *model.config.grid) and (maps >= 0).all()
    assert (maps.sum(axis=(1, 2)) <= 1 + 1e-5).all()


def test_model_is_not_modified() -> None:
    model = random_vit()
    before = model(pixels(model))
    attention_maps(model, pixels(model), "gradient", target=torch.tensor([0, 1]))
    assert torch.equal(model(pixels(model)), before)
    assert all(p.grad is None for p in model.parameters())


def reference_rollout(model: ViT, images: Tensor) -> Floats:
    """Abnar & Zuidema in NumPy, for all tokens: (B, N, N)."""
    product = np.eye(model.config.num_tokens)[None]
    for index in range(model.config.depth):
        weights = all_weights(model, images)[index].detach().double().numpy().mean(axis=1)
        mixed = weights + np.eye(weights.shape[-1])
        product = mixed / mixed.sum(axis=-1, keepdims=True) @ product
    assert np.allclose(product.sum(axis=-1), 1, atol=1e-6)
    return product


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_registers": 2},
        {"distill_token": True},
        {"class_token": False, "pool": "gap"},
        {"class_token": False, "pool": "map"},
        {"pool": "token+gap"},
    ],
    ids=["token", "registers", "distilled", "mean", "map", "token+gap"],
)
def test_rollout_matches_reference(fields: dict[str, object]) -> None:
    model = random_vit(**fields)
    images = pixels(model)
    row = readout(model)
    if model.config.pool == "map":  # the pool's own attention over the patches
        read = all_weights(model, images)[-1].detach().double().numpy().mean(axis=1)[:, 0]
    else:
        read = np.broadcast_to(row.double().numpy(), (2, len(row)))
    expected = np.einsum("bn,bnm->bm", read, reference_rollout(model, images))
    expected = expected[:, model.config.num_prefix_tokens :].reshape(2, *model.config.grid)
    assert np.allclose(attention_maps(model, images), expected, atol=1e-6)


def reference_gradient(model: ViT, images: Tensor, target: Tensor) -> Floats:
    """Chefer et al. with explicit attention and its gradient by autograd: (B, N, N)."""
    weights: list[Tensor] = []

    def explicit_attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        scores = q @ k.mT * q.shape[-1] ** -0.5
        attention = (scores if bias is None else scores + bias).softmax(dim=-1)
        attention.retain_grad()
        weights.append(attention)
        return attention @ v

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitcli.models.vit.attend", explicit_attend)
        model(images).gather(1, target[:, None]).sum().backward()
    relevance = torch.eye(model.config.num_tokens).expand(len(images), -1, -1)
    for attention in weights:
        mean = (attention.detach() * attention.grad).clamp(min=0).mean(dim=1)
        relevance = relevance + mean @ relevance
    return relevance.double().numpy()


@pytest.mark.parametrize("posemb", ["learn", "relative"])
def test_gradient_matches_reference(posemb: str) -> None:
    model = random_vit(posemb=posemb)
    images, target = pixels(model), torch.tensor([3, 1])
    relevance = reference_gradient(model, images, target)
    expected = relevance[:, 0, 1:].reshape(2, *model.config.grid)
    assert np.abs(expected).max() > 1e-3
    found = attention_maps(model, images, "gradient", target=target)
    assert np.allclose(found, expected, atol=1e-6, rtol=1e-4)
    other = attention_maps(model, images, "gradient", target=torch.tensor([0, 0]))
    assert not np.allclose(other, found, rtol=1e-2)


@pytest.mark.parametrize("pool", ["map", "gap"])
def test_gradient_without_a_class_token(pool: str) -> None:
    model = random_vit(class_token=False, pool=pool)
    maps = attention_maps(model, pixels(model), "gradient", target=torch.tensor([3, 1]))
    assert maps.shape == (2, 3, 4) and maps.max() > 0 and maps.min() >= 0


def test_single_layer_and_head() -> None:
    model = random_vit()
    images = pixels(model)
    weights = all_weights(model, images)[1].detach()
    found = attention_maps(model, images, "block", layer=1, head=1)
    assert np.allclose(found, weights[:, 1, 0, 1:].reshape(2, 3, 4), atol=1e-6)
    heads = head_maps(model, images, layer=1)
    assert heads.shape == (2, 2, 3, 4)
    assert np.allclose(heads[:, 1], found, atol=1e-6)
    mean = attention_maps(model, images, "block", layer=1)
    assert np.allclose(mean, heads.mean(axis=1), atol=1e-6)


def test_attention_pool_is_the_last_layer() -> None:
    model = random_vit(class_token=False, pool="map")
    images = pixels(model)
    weights = all_weights(model, images)
    pool = weights[-1].detach()[:, :, 0].reshape(2, 2, 3, 4)
    assert np.allclose(head_maps(model, images), pool, atol=1e-6)
    assert np.allclose(attention_maps(model, images, "block", head=1), pool[:, 1], atol=1e-6)
    block = weights[1].detach()[:, 1].mean(dim=1).reshape(2, 3, 4)
    assert np.allclose(attention_maps(model, images, "block", 1, 1), block, atol=1e-6)


def test_rollout_to_a_layer_ignores_later_layers() -> None:
    model = random_vit()
    shallow = random_vit(depth=2)
    shallow.load_state_dict(model.state_dict(), strict=False)
    images = pixels(model)
    assert np.allclose(attention_maps(model, images, layer=1), attention_maps(shallow, images))


# ---------------------------------------------------------------------------------------------
# Distance


@pytest.mark.parametrize("grid", [(3, 3), (2, 5)])
def test_distance_of_known_attention(grid: tuple[int, int]) -> None:
    rows, columns = grid
    patches, prefix = rows * columns, 2
    places = [(8 * i, 8 * j) for i in range(rows) for j in range(columns)]
    pixels = np.array([[np.hypot(a - c, b - d) for a, b in places] for c, d in places])

    def distance(patch_weights: Tensor) -> float:
        weights = torch.full((1, 1, patches + prefix, patches + prefix), 0.1)  # prefix: ignored
        weights[..., prefix:, prefix:] = patch_weights / 2  # half of the attention is on patches
        return float(patch_distance(weights, torch.tensor(pixels).float(), prefix)[0])

    assert distance(torch.eye(patches)) == 0
    uniform = torch.full((patches, patches), 1 / patches)
    assert distance(uniform) == pytest.approx(pixels.mean(), rel=1e-6)
    right = torch.zeros(patches, patches)
    for i in range(patches):
        right[i, i + 1 if (i + 1) % columns else i] = 1  # the last column attends to itself
    assert distance(right) == pytest.approx(8 * (columns - 1) / columns)


def test_distance_is_the_mean_over_images() -> None:
    model = random_vit()
    images = pixels(model, 3)
    whole = attention_distance(model, images)
    parts = np.mean([attention_distance(model, image[None]) for image in images], axis=0)
    assert whole.shape == (3, 2) and np.allclose(whole, parts, rtol=1e-6)
    assert (whole > 0).all() and (whole < np.hypot(24, 32)).all()


# ---------------------------------------------------------------------------------------------
# Features and weights


def test_principal_components_match_svd() -> None:
    rows = np.random.default_rng(0).normal(size=(50, 6)) * np.arange(1, 7)
    centered = rows - rows.mean(axis=0)
    expected = np.linalg.svd(centered, full_matrices=False)[2][:3]
    found = principal_components(rows, 3)
    assert np.allclose(np.abs((found * expected).sum(axis=1)), 1, atol=1e-5)
    assert (found[range(3), np.abs(found).argmax(axis=1)] > 0).all()


def test_feature_colors_span_all_images() -> None:
    features = np.random.default_rng(0).normal(size=(2, 3, 4, 8)).astype(np.float32)
    features[1] += 5  # the offset between images dominates the first component
    colors = feature_colors(features)
    assert colors.shape == (2, 3, 4, 3) and colors.min() == 0 and colors.max() == 1
    assert abs(colors[0, ..., 0].mean() - colors[1, ..., 0].mean()) > 0.5


def test_filter_components() -> None:
    filters = filter_components(random_vit())  # width 24
    assert filters.shape == (23, 8, 8, 3)
    assert np.allclose(filters.min(axis=(1, 2, 3)), 0) and np.allclose(filters.max((1, 2, 3)), 1)
    hybrid = ViT(model_config("R+Ti/16", depth=1, num_classes=2)).eval()
    assert filter_components(hybrid).shape == (28, 7, 7, 3)


@pytest.mark.parametrize("posemb", ["learn", "learn2d", "sincos2d"])
def test_posemb_similarity(posemb: str) -> None:
    tokens = "all" if posemb == "learn" else "patches"
    model = random_vit(posemb=posemb, posemb_tokens=tokens)
    tiles = posemb_similarity(model)
    assert tiles.shape == (9, 16)
    similarity = tiles.reshape(3, 3, 4, 4).transpose(0, 2, 1, 3)
    table = model.position_embeddings()
    unit = torch.nn.functional.normalize(table[0, model.config.posemb_prefix :].detach(), dim=1)
    assert np.allclose(similarity.reshape(12, 12), unit @ unit.T, atol=1e-5)
    with pytest.raises(ConfigError, match="no position embeddings"):
        posemb_similarity(random_vit(posemb="none"))


# ---------------------------------------------------------------------------------------------
# Faithfulness


class OnePatch(ViT):
    """A model whose logit of class 0 depends only on the brightness of one patch."""

    def forward(self, images: Tensor) -> Tensor:
        bright = images[:, :, 8:16, 16:24].mean(dim=(1, 2, 3))
        return torch.stack([4 * bright, torch.zeros_like(bright)], dim=1)


def test_correct_map_beats_wrong_and_random_maps() -> None:
    size = 27, 34  # the last pixels are beyond the last patch
    model, cores = OnePatch(random_vit(image_size=size).config), CorePool(torch.device("cpu"))
    image = torch.randn(3, *size, generator=torch.Generator().manual_seed(0)) / 10
    image[:, 8:16, 16:24] += 1
    right = np.zeros((3, 4), np.float32)
    right[1, 2] = 1
    good = faithfulness_of(model, image, right, 0, "softmax", cores, steps=12)
    bad = faithfulness_of(model, image, -right, 0, "softmax", cores, steps=12)
    good_areas, bad_areas = good.areas(), bad.areas()
    assert good_areas["deletion"] < bad_areas["deletion"]
    assert good_areas["insertion"] > bad_areas["insertion"]
    assert good.deletion[0] == pytest.approx(good.insertion[-1])  # the whole image
    assert good.deletion[1] == pytest.approx(0.5)  # without the patch
    for noise in random_maps((3, 4), 5):
        areas = faithfulness_of(model, image, noise, 0, "softmax", cores, steps=12).areas()
        assert good_areas["deletion"] <= areas["deletion"]
        assert good_areas["insertion"] >= areas["insertion"]
    flat = faithfulness_of(model, image * 0, right, 0, "softmax", cores, steps=4)
    assert flat.areas() == pytest.approx({"deletion": 0.5, "insertion": 0.5})

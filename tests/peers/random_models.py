"""Random architectures and weights: small, but covering every optional part."""

import random
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.save import save_checkpoint
from vitcli.config import Architecture, ClassLabel, ModelConfig, Preprocess
from vitcli.layouts.timm import architecture_from_args
from vitcli.models.resnet import BiT
from vitcli.models.vit import ViT


def random_arguments(seed: int) -> dict[str, Any]:
    """Draw arguments for timm's `VisionTransformer`."""
    draw = random.Random(seed)
    heads = draw.choice([2, 3])
    class_token = draw.random() < 0.7
    pool = draw.choice(["token", "avg", "map"] if class_token else ["avg", "map"])
    return {
        "img_size": draw.choice([(32, 32), (48, 32)]),
        "patch_size": draw.choice([8, 16]),
        "embed_dim": heads * draw.choice([8, 16]),
        "depth": draw.choice([1, 2, 3]),
        "num_heads": heads,
        "mlp_ratio": draw.choice([2, 3.5, 4]),
        "qkv_bias": draw.random() < 0.7,
        "init_values": draw.choice([None, 1e-5]),
        "class_token": class_token,
        "reg_tokens": draw.choice([0, 0, 1, 4]),
        "no_embed_class": draw.random() < 0.5,
        "pos_embed": draw.choice(["learn", "learn", "none"]),
        "pre_norm": draw.random() < 0.3,
        "final_norm": draw.random() < 0.8,
        "fc_norm": draw.choice([None, True, False]),
        "global_pool": pool,
        "act_layer": draw.choice([None, "gelu_tanh", "quick_gelu"]),
        "num_classes": draw.choice([0, 5, 11]),
    }


def random_config(seed: int) -> ModelConfig:
    """Return our config for these arguments, with as many outputs as `CLASSES`."""
    arguments = random_arguments(seed)
    known = {key: arguments[key] for key in arguments.keys() - {"num_classes", "img_size"}}
    model = architecture_from_args("vit_base_patch16_224", known)
    assert isinstance(model, ModelConfig)
    return model.with_image_size(arguments["img_size"]).with_classes(len(CLASSES))


def random_preprocess(seed: int, size: tuple[int, int]) -> Preprocess:
    draw = random.Random(seed)
    return Preprocess(
        size=size,
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
        interpolation=draw.choice(["bilinear", "bicubic"]),
        crop_pct=draw.choice([0.875, 0.9, 1.0]),
        crop_mode=draw.choice(["center", "squash", "border"]),
    )


# Two classes share a name, as in ImageNet.
CLASSES = (
    *(ClassLabel("n02012849", "crane"), ClassLabel("n03126707", "crane")),
    *(ClassLabel("n02123045", "tabby"), ClassLabel("n07930864", "cup")),
    *(ClassLabel("n04008634", "projectile"), ClassLabel("n02389026", "sorrel")),
)


@torch.no_grad()
def randomize(model: nn.Module, seed: int) -> None:
    """Randomize every parameter, including those that are initialized to zeros or ones."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.normal_(std=0.2, generator=generator)
        if "norm" in name and name.endswith("weight"):
            parameter.add_(1)


def random_images(seed: int, size: tuple[int, int]) -> torch.Tensor:
    """(4, 3, H, W)."""
    return torch.randn(4, 3, *size, generator=torch.Generator().manual_seed(seed))


def save_random(
    folder: Path,
    config: Architecture,
    seed: int = 0,
    preprocess: Preprocess | None = None,
    classes: tuple[ClassLabel, ...] = CLASSES,
) -> Path:
    """Save a checkpoint of ours with random weights."""
    model = ViT(config) if isinstance(config, ModelConfig) else BiT(config)
    randomize(model, seed)
    preprocess = preprocess or Preprocess(size=config.image_size)
    info = CheckpointInfo(config, preprocess, classes[: config.num_classes])
    return save_checkpoint(folder, model.state_dict(), info)


def assert_same(
    ours: nn.Module,
    theirs: nn.Module,
    images: torch.Tensor,
    dtype: torch.dtype = torch.float64,
    rtol: float = 1e-8,
    atol: float = 1e-8,
) -> None:
    """Assert that both compute the same logits or features. In float64, rounding errors of random
    weights in many layers do not matter."""
    with torch.inference_mode():
        found = ours.to(dtype)(images.to(dtype))
        expected = theirs.to(dtype).eval()(images.to(dtype))
    if not isinstance(expected, torch.Tensor):  # from transformers
        expected = expected.logits if hasattr(expected, "logits") else expected.pooler_output
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)

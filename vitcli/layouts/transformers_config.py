"""transformers' `config.json` and `preprocessor_config.json`, in and out, by tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vitcli.checkpoints.info import CheckpointInfo
from vitcli.config import ClassLabel, ModelConfig, Preprocess, Score, Size
from vitcli.errors import CheckpointError
from vitcli.layouts.timm_config import unique_names

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))

PROCESSORS: dict[str, tuple[Any, str, str, float]] = {
    "vit": (HALF, "bilinear", "squash", 1.0),
    "vit_mae": (IMAGENET, "bilinear", "squash", 1.0),
    "deit": (IMAGENET, "bicubic", "center", 0.875),
    "dinov2": (IMAGENET, "bicubic", "center", 0.875),
    "dinov2_with_registers": (IMAGENET, "bicubic", "center", 0.875),
    "siglip_vision_model": (HALF, "bicubic", "squash", 1.0),
    "clip_vision_model": (CLIP, "bicubic", "center", 1.0),
}
"""model_type -> what its image processor does where no file says: mean and std, filter, crop."""

ALIASES = {"siglip": "siglip_vision_model", "clip": "clip_vision_model"}
"""Two-tower models: their image half is meant."""

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}
FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box"}
"""Pillow's numbers."""

SCORES: dict[str, Score] = {
    "multi_label_classification": "sigmoid",
    "single_label_classification": "softmax",
    "regression": "none",
}
"""problem_type -> what transformers' pipeline makes scores of logits by."""


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json in a folder, if it is transformers'; a two-tower model's image half.

    Raises:
        CheckpointError: it is of a kind of model that is not ours, or not JSON.
    """
    path = folder / "config.json"
    try:
        config: Any = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot be read: {error}", where=path) from error
    if not isinstance(config, dict) or "model_type" not in config:
        return {}
    kind = ALIASES.get(config["model_type"], config["model_type"])
    if kind not in PROCESSORS:
        raise CheckpointError(
            f"is of a transformers model that vit does not know: {kind}",
            where=path,
            hint=f"it knows {', '.join(PROCESSORS)}",
        )
    vision = config.get("vision_config")
    named = {"id2label": config["id2label"]} if "id2label" in config else {}
    return {**config, **(vision if isinstance(vision, dict) else {}), **named, "model_type": kind}


def model_fields(config: dict[str, Any], where: object) -> dict[str, Any]:
    """What of a ModelConfig the tensors do not show and the config says. Raises CheckpointError."""
    if not config:
        return {}
    try:
        heads = config.get("num_attention_heads", 12)
        default = {"siglip_vision_model": "gelu_pytorch_tanh", "clip_vision_model": "quick_gelu"}
        kind = config["model_type"]
        activation = config.get("hidden_act", default.get(kind, "gelu"))
        eps = {"vit": 1e-12, "deit": 1e-12, "vit_mae": 1e-12, "clip_vision_model": 1e-5}
        return {
            "num_heads": int(heads),
            "activation": ACTIVATIONS[activation],
            "norm_eps": float(config.get("layer_norm_eps", eps.get(kind, 1e-6))),
            **({"image_size": _pair(config["image_size"])} if "image_size" in config else {}),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"its config.json has a value that vit does not know: {error}", where=where
        ) from error


def _pair(size: Any) -> Size:
    return (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))


def preprocess_of(folder: Path, kind: str, size: Size) -> tuple[Preprocess, bool]:
    """How images are prepared, and whether a `preprocessor_config.json` says so."""
    (mean, std), interpolation, crop, crop_pct = PROCESSORS.get(kind, PROCESSORS["vit"])
    fields: dict[str, Any] = {
        "mean": mean,
        "std": std,
        "interpolation": interpolation,
        "crop_mode": crop,
        "crop_pct": crop_pct,
    }
    path = folder / "preprocessor_config.json"
    if not path.is_file():
        return Preprocess(size, **fields), False
    try:
        said: dict[str, Any] = json.loads(path.read_text("utf-8"))
        if said.get("do_normalize", True):
            fields["mean"] = tuple(map(float, said.get("image_mean", mean)))
            fields["std"] = tuple(map(float, said.get("image_std", std)))
        else:
            fields["mean"], fields["std"] = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
        fields["interpolation"] = FILTERS[said["resample"]] if "resample" in said else interpolation
        resized, cropped = _side(said.get("size")), _side(said.get("crop_size"))
        if said.get("do_center_crop") and resized and cropped:
            fields["crop_mode"], fields["crop_pct"] = "center", min(cropped / resized, 1.0)
        elif "do_center_crop" in said or isinstance(said.get("size"), (dict, int)):
            fields["crop_mode"], fields["crop_pct"] = "squash", 1.0
        return Preprocess(size, **fields), True
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"cannot be read: {error!r}", where=path) from error


def _side(size: Any) -> int | None:
    if isinstance(size, dict):
        size = size.get("shortest_edge", size.get("height"))
    return size if isinstance(size, int) else None


def labels_of(config: dict[str, Any], count: int) -> tuple[ClassLabel, ...]:
    """The names of the classes; none where they are numbered only."""
    table = config.get("id2label")
    if not isinstance(table, dict) or len(table) != count:
        return ()
    names = [str(table.get(str(i), f"LABEL_{i}")) for i in range(count)]
    if all(name == f"LABEL_{i}" for i, name in enumerate(names)):
        return ()
    unique = len(set(names)) == count
    return tuple(ClassLabel(n if unique else f"{n} {i}", n) for i, n in enumerate(names))


def score_of(config: dict[str, Any]) -> Score | None:
    """The score function, where the config says."""
    return SCORES.get(str(config.get("problem_type")))


# ---------------------------------------------------------------------------------------------
# Out


def not_in_transformers(model: ModelConfig, kind: str) -> list[str]:
    """What of a model transformers' `vit`, `dinov2` or `dinov2_with_registers` cannot say; empty if
    it can."""
    dino, registers = kind != "vit", model.num_registers
    covered = ("class",) if registers else ("all", "class")
    pool = "token+gap" if dino and model.num_classes else "token"
    checks = {
        f"pool '{model.pool}'": model.pool != pool,
        "no class token": not model.class_token,
        "a distillation token": model.distill_token,
        f"{registers} register tokens": registers > 0 and not dino,
        f"position embeddings '{model.posemb}'": model.posemb != "learn",
        f"position embeddings of {model.posemb_tokens}, not class token and patches": (
            model.posemb == "learn" and model.posemb_tokens not in covered
        ),
        "a norm before the blocks": model.pre_norm,
        "no final norm": not model.final_norm,
        "a norm after pooling": model.fc_norm,
        "a patch embedding without bias": not model.patch_bias,
        "a gated MLP": model.swiglu and not dino,
        "pre_logits before a head": model.pre_logits > 0
        and (dino or model.num_classes > 0 or model.pre_logits != model.width),
        "patches that are not square": model.patch_size[0] != model.patch_size[1],
        f"an MLP of {model.mlp_dim}": dino and _mlp_ratio(model) is None,
        "images that are not square": dino and model.image_size[0] != model.image_size[1],
        "images with a rest": any(
            s % p for s, p in zip(model.image_size, model.patch_size, strict=True)
        ),
    }
    return [what for what, impossible in checks.items() if impossible]


def _mlp_ratio(model: ModelConfig) -> int | None:
    """The whole number by which transformers' DINOv2 has such an MLP, if there is one: of a gated
    one it takes two thirds, rounded up to a multiple of 8."""
    for ratio in range(1, 33):
        size = model.width * ratio
        if (2 * ((size * 2 // 3 + 7) // 8 * 8) if model.swiglu else size) == model.mlp_dim:
            return ratio
    return None


def to_transformers(info: CheckpointInfo, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and preprocessor_config.json of a model that is not `not_in_transformers`."""
    model, preprocess = info.model, info.preprocess
    assert isinstance(model, ModelConfig)
    classes = {"vit": "ViT", "dinov2": "Dinov2", "dinov2_with_registers": "Dinov2WithRegisters"}
    name = classes[kind] + ("ForImageClassification" if model.num_classes else "Model")
    activations = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    height, width = model.image_size
    config: dict[str, Any] = {
        "architectures": [name],
        "model_type": kind,
        "hidden_size": model.width,
        "num_hidden_layers": model.depth,
        "num_attention_heads": model.num_heads,
        "hidden_act": activations[model.activation],
        "layer_norm_eps": model.norm_eps,
        "image_size": height if height == width else [height, width],
        "patch_size": model.patch_size[0],
        "num_channels": 3,
        "qkv_bias": model.qkv_bias,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    if kind == "vit":
        config |= {"intermediate_size": model.mlp_dim}
    else:
        config |= {"mlp_ratio": _mlp_ratio(model), "use_swiglu_ffn": model.swiglu}
        config |= {"layerscale_value": 1.0}
        registers = {"num_register_tokens": model.num_registers}
        config |= registers if model.num_registers else {"use_mask_token": False}
    if model.num_classes:
        names = unique_names(info.classes) or [f"LABEL_{i}" for i in range(model.num_classes)]
        config["id2label"] = {str(i): name for i, name in enumerate(names)}
        config["label2id"] = {name: i for i, name in enumerate(names)}
        kinds = {score: kind for kind, score in SCORES.items()}
        config["problem_type"] = kinds[info.score]
    size = {"height": preprocess.size[0], "width": preprocess.size[1]}
    centre = preprocess.crop_mode == "center"
    resized = round(min(preprocess.size) / preprocess.crop_pct)
    numbers = {name: number for number, name in FILTERS.items()}
    processor: dict[str, Any] = {
        "image_processor_type": "BitImageProcessor" if centre else "ViTImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": resized} if centre else size,
        "resample": numbers[preprocess.interpolation],
        "do_center_crop": centre,
        **({"crop_size": size} if centre else {}),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocess.mean),
        "image_std": list(preprocess.std),
    }
    return config, processor

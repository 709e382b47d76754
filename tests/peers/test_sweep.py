"""Every ViT-like model of timm and transformers, small and with random weights: with and without
its config, it either computes the same as in the library or is rejected."""

import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from peers.random_models import randomize
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.load import load
from vitcli.errors import VitError

pytestmark = [pytest.mark.peers, pytest.mark.slow]

EQUAL, REFUSED, ASSUMED, WRONG = "EQUAL", "REFUSED", "ASSUMED", "WRONG"
"""ASSUMED: other outputs, but every setting that differs is listed as assumed."""
MODULES = (
    "beit", "deit", "eva", "naflexvit", "vision_transformer", "vision_transformer_hybrid",
    "vision_transformer_relpos", "vision_transformer_sam",
)  # fmt: skip
SIZES: tuple[dict[str, Any], ...] = (
    {"embed_dim": 128, "depth": 2, "num_heads": 2},
    {"embed_dim": 128, "num_heads": 2},
    {},
)
"""Small sizes, of which the first that a model accepts are used."""


EAGER = {"Phi4MultimodalVisionModel"}
"""SigLIP's model under SigLIP's names. With torch's fused attention, transformers 5 mistakenly
applies a causal mask, and differs from its own eager attention."""


def is_close(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and bool(
        (found - expected).abs().max() <= 1e-6 * expected.abs().max().clamp(min=1e-3)
    )


def outcome(
    path: Path, image: Tensor, expected: list[Tensor], true: CheckpointInfo | None
) -> tuple[str, CheckpointInfo | None]:
    """Load a file and compare it with its library's outputs, any of which may match."""
    try:
        model = load(path, dtype=torch.float64)
        size = model.config.image_size
        if size != tuple(image.shape[2:]):  # no tensor of some models shows it
            is_assumed = "image_size" in model.info.provenance.get("assumed", {})
            return ASSUMED if is_assumed else WRONG, model.info
        with torch.inference_mode():
            found = model(image)
    except VitError:
        return REFUSED, None
    if any(is_close(found, one) for one in expected):
        return EQUAL, model.info
    if true is not None:
        found_fields, true_fields = asdict(model.info.model), asdict(true.model)
        differing = {k for k, value in true_fields.items() if value != found_fields.get(k)}
        if differing and differing <= set(model.info.provenance.get("assumed", {})):
            return ASSUMED, model.info
    return WRONG, model.info


def load_outcomes(whole: Path, image: Tensor, expected: list[Tensor]) -> tuple[str, str]:
    """Return the outcomes for a directory and for its weights alone."""
    bare = whole.with_name("bare")
    bare.mkdir()
    shutil.copy(whole / "model.safetensors", bare)
    first, true = outcome(whole, image, expected, None)
    second, _ = outcome(bare / "model.safetensors", image, expected, true)
    shutil.rmtree(bare)
    return first, second


def assert_none_wrong(table: dict[str, tuple[str, str]], least_equal: int) -> None:
    for name, (whole, bare) in table.items():
        sys.stdout.write(f"{name:50} {whole:10} {bare}\n")
    assert not [name for name, outcomes in table.items() if WRONG in outcomes]
    assert sum(whole == EQUAL for whole, _ in table.values()) >= least_equal


def build_small(make: Callable[..., nn.Module]) -> nn.Module | None:
    """Build a model in the first size that it accepts; None if even that is large."""
    for sizes in SIZES:
        try:
            with torch.device("meta"):  # which needs no memory
                num_parameters = sum(p.numel() for p in make(**sizes).parameters())
            return make(**sizes) if num_parameters < 60e6 else None
        except (TypeError, AssertionError, RuntimeError, ValueError, KeyError):
            continue
    return None


def test_timm(timm: ModuleType, tmp_path: Path) -> None:
    table = {}
    names = [name for module in MODULES for name in timm.list_models(module=module)]
    names += ["resnetv2_50x1_bit"]
    for name in names:
        side = 56 if "patch14" in name else 64

        def make(name: str = name, side: int = side, **sizes: Any) -> nn.Module:
            options = {} if "resnet" in name else {"img_size": side}
            return timm.create_model(name, num_classes=5, **options, **sizes)

        model = build_small(make)
        if model is None:
            continue
        randomize(model, 0)
        size = (224, 224) if "resnet" in name else (side, side)
        image = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(1)).double()
        timm.models.save_for_hf(model, tmp_path / "whole", safe_serialization=True)
        with torch.inference_mode():
            expected = model.eval().double()(image)
        table[name] = load_outcomes(tmp_path / "whole", image, [expected])
        shutil.rmtree(tmp_path / "whole")
    assert_none_wrong(table, 100)


VISION = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION |= {"intermediate_size": 256, "image_size": 32, "patch_size": 8, "num_labels": 5}


def vision_models(transformers: ModuleType) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, config class and model class of models that take images and have patches."""
    for name in sorted(dir(transformers)):
        if not name.endswith(("Model", "ForImageClassification", "WithTeacher", "WithProjection")):
            continue
        if name.endswith("PreTrainedModel"):
            continue
        try:
            model = getattr(transformers, name)
            config = getattr(model, "config_class", None)
        except ImportError:
            continue
        if config is None or getattr(model, "main_input_name", "") != "pixel_values":
            continue
        if all(hasattr(config(), key) for key in ("hidden_size", "patch_size", "image_size")):
            yield name, config, model


def test_transformers(transformers: ModuleType, tmp_path: Path) -> None:
    transformers.logging.set_verbosity_error()
    table = {}
    image = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1)).double()
    for name, config, make in vision_models(transformers):
        try:
            model = make(config(**VISION)).eval()
            randomize(model, 0)
            if name in EAGER:
                model.set_attn_implementation("eager")
            model.save_pretrained(tmp_path / "whole")
            options = {"noise": torch.arange(16.0)[None]} if "MAE" in name else {}
            if "MAE" in name:
                model.config.mask_ratio = 0.0
            with torch.inference_mode():
                output = model.double()(image, **options)
        except Exception:  # video models, backbones: transformers itself fails
            continue
        if name.endswith("WithProjection"):  # ours is the input of the projection
            with torch.inference_mode():
                output = model.vision_model(image)
        keys = ("logits", "pooler_output")
        expected = [output[key] for key in keys if output.get(key) is not None][:1]
        if not expected and output.last_hidden_state.ndim == 3:
            expected = [output.last_hidden_state[:, 0], output.last_hidden_state.mean(1)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            table[name] = load_outcomes(tmp_path / "whole", image, expected)
        shutil.rmtree(tmp_path / "whole")
    assert_none_wrong(table, 15)

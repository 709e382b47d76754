"""Changes made by a conversion, and conversions that are rejected."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from checkpoints.golden_cases import GOLDEN, TIMM_VIT
from peers.random_models import save_random
from vitcli.checkpoints import tensor_file
from vitcli.checkpoints.changes import Changes
from vitcli.checkpoints.convert import convert
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.load import load
from vitcli.checkpoints.read import read_info
from vitcli.checkpoints.save import rewrite_info, save_checkpoint
from vitcli.config import ClassLabel, ModelConfig, Preprocess, architecture
from vitcli.errors import ConfigError, OutputError
from vitcli.layouts.catalog import layout_of
from vitcli.layouts.timm import not_in_timm


def read_with_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Read the tensors with the safetensors library, independently of our reader."""
    return load_file(path / "model.safetensors")


def test_applies_dtype_classes_and_preprocess(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = TIMM_VIT
    monkeypatch.setenv("HOME", str(tmp_path))
    labels = tuple(ClassLabel(f"n{i}", f"name {i}") for i in range(3))
    changes = Changes(
        dtype="bfloat16",
        num_classes=3,
        labels=labels,
        preprocess={"mean": [0.1, 0.2, 0.3], "crop_mode": "squash"},
    )
    out = convert(source, "~/out", changes=changes)
    info, _ = read_info(tmp_path / "out")
    assert info.classes == labels and info.model.num_classes == 3
    assert info.preprocess.mean == (0.1, 0.2, 0.3) and info.preprocess.crop_mode == "squash"
    model = load(out)
    assert not model.head.weight.any() and model.head.weight.shape == (3, 48)
    old = torch.from_numpy(read_with_safetensors(source)["norm.weight"])
    assert torch.equal(model.norm.weight, old.bfloat16().float())


def test_averages_several_models(tmp_path: Path) -> None:
    """A model that is listed twice counts twice."""
    source, others = TIMM_VIT, [str(tmp_path / name) for name in ("b", "c")]
    first = read_with_safetensors(source)
    for factor, other in zip((3, -5), others, strict=True):
        info, _ = read_info(source)
        tensors = {name: factor * array for name, array in first.items()}
        trained = dataclasses.replace(info, provenance={"metrics": {"val_top1": 0.5}})
        save_checkpoint(other, tensors, trained)
        (Path(other) / "split.json").write_text("the same split")
    half = Changes(dtype="float16")
    out = convert(source, tmp_path / "mean", changes=half, average=[*others, others[0]])
    assert (out / "split.json").read_text() == "the same split"
    for name, array in read_with_safetensors(out).items():
        assert array.dtype == np.float16  # (1 + 3 - 5 + 3) / 4
        np.testing.assert_array_equal(array, (first[name] / 2).astype(np.float16))
    # The mean of 16-bit weights is not rounded to 16 bits.
    sixteen = [str(tmp_path / name) for name in ("b16", "c16")]
    for other, to in zip(others, sixteen, strict=True):
        convert(other, to, changes=Changes(dtype="bfloat16"))
    mean = convert(sixteen[0], tmp_path / "f32", None, Changes(dtype="float32"), sixteen[1:])
    stored = [read_with_safetensors(Path(name))["norm.weight"] for name in sixteen]
    expected = sum(array.astype(np.float32) for array in stored) / 2
    np.testing.assert_array_equal(read_with_safetensors(mean)["norm.weight"], expected)
    info, _ = read_info(out)
    assert info.provenance["average_of"] == [source.name, "b", "c", "b"]
    assert "metrics" not in info.provenance
    (Path(others[0]) / "split.json").write_text("another")
    assert not (convert(others[0], out, average=others[1:], force=True) / "split.json").exists()

    for fields, message in (
        ({"num_classes": 3}, r"a different .* head \(num_classes\)"),
        ({"preprocess": {"crop_mode": "squash"}}, r"different preprocessing \(crop_mode\)"),
    ):
        other = convert(source, tmp_path / next(iter(fields)), changes=Changes(**fields))
        with pytest.raises(ConfigError, match=f"cannot be averaged with .* {message}"):
            convert(source, tmp_path / "d", average=[str(other)])
    with pytest.raises(OutputError, match="the same file"):
        convert(source, others[0], average=others[:1], force=True)


def test_force_removes_stale_config_files(tmp_path: Path) -> None:
    """transformers prefers the processor_config.json that its newer versions write."""
    stale, other = tmp_path / "out/processor_config.json", tmp_path / "out/notes.json"
    stale.parent.mkdir()
    for file in (stale, other):
        file.write_text('{"image_processor": {"image_mean": [0, 0, 0]}}')
    convert(TIMM_VIT, tmp_path / "out", to="transformers", force=True)
    assert not stale.exists() and other.exists()
    expected = read_info(TIMM_VIT)[0].preprocess.mean
    assert read_info(tmp_path / "out")[0].preprocess.mean == expected


def test_new_head_resets_metrics_and_score(tmp_path: Path) -> None:
    """Even if it has as many classes as the old head."""
    source = convert(TIMM_VIT, tmp_path / "source")
    old, _ = read_info(source)
    trained = {"provenance": {"metrics": {"val_top1": 0.5}}, "score": "sigmoid"}
    rewrite_info(source, dataclasses.replace(old, **trained))
    for i, changes in enumerate((Changes(num_classes=10), Changes(drop_head=True))):
        info, _ = read_info(convert(source, tmp_path / f"{i}", changes=changes))
        assert "metrics" not in info.provenance and info.score == "softmax"
    same, _ = read_info(convert(source, tmp_path / "same"))
    assert "metrics" in same.provenance and same.score == "sigmoid"


@pytest.mark.parametrize(
    ("source", "pool"),
    [("vit_jax_rep/checkpoint.npz", "token"), ("hf_dinov2", "token"), ("timm_gap_fcnorm", "gap")],
)
def test_dropped_head_leaves_features_of_one_pool(tmp_path: Path, source: str, pool: str) -> None:
    """Without the layer before the head; DINOv2's head reads the class token and the mean."""
    out = convert(GOLDEN / source, tmp_path / "out", changes=Changes(drop_head=True))
    config = load(out).config
    assert (config.num_classes, config.pre_logits, config.pool) == (0, 0, pool)


def test_head_count_from_arch_or_num_heads(tmp_path: Path) -> None:
    model = ModelConfig(192, 12, 3, 768, patch_size=(16, 16), image_size=(32, 32))
    tensors = {n: np.zeros(s, np.float16) for n, s in model.tensor_shapes().items()}
    tensor_file.write(tmp_path / "a.safetensors", tensors, {})
    out = convert(tmp_path / "a.safetensors", tmp_path / "b", changes=Changes(arch="Ti/16"))
    info, _ = read_info(out)
    assert info.model == model and info.provenance["given"] == "Ti/16"
    assumed = {"activation", "norm_eps", "grid", "pool", "preprocess"}
    assert set(info.provenance["assumed"]) == assumed
    out = convert(tmp_path / "a.safetensors", tmp_path / "d", changes=Changes(num_heads=6))
    assert read_info(out)[0].model == dataclasses.replace(model, num_heads=6)
    timm_arch = Changes(arch="vit_tiny_patch16_224")
    out = convert(tmp_path / "a.safetensors", tmp_path / "e", changes=timm_arch)
    assert "activation" not in read_info(out)[0].provenance["assumed"]
    with pytest.raises(ConfigError, match="384 in S/16 and 192 in the file"):
        convert(tmp_path / "a.safetensors", tmp_path / "c", changes=Changes(arch="S/16"))


def test_resized_patches_match_on_enlarged_images(tmp_path: Path) -> None:
    source = TIMM_VIT
    out = convert(source, tmp_path / "out", changes=Changes(patch_size=32))
    old, new = load(source), load(out)
    assert new.config.image_size == (128, 128) and new.preprocess.size == (128, 128)
    images = torch.randn(1, 3, 64, 64)
    enlarged = images.repeat_interleave(2, 2).repeat_interleave(2, 3)
    with torch.inference_mode():
        torch.testing.assert_close(new(enlarged), old(images), rtol=0, atol=1e-5)


def test_npz_stores_non_square_grid(tmp_path: Path) -> None:
    model = ModelConfig(16, 1, 2, 32, (8, 8), (16, 48), 5, activation="gelu_tanh", norm_eps=1e-6)
    info, _ = read_info(convert(save_random(tmp_path / "ours", model), tmp_path / "x.npz"))
    assert info.model.image_size == (16, 48) and "posemb_resize" not in info.provenance


@pytest.mark.parametrize(
    ("fields", "by"),
    [
        ({"crop_mode": "squash", "crop_pct": 0.9}, []),
        ({"crop_mode": "border"}, ["transformers"]),
        ({"antialias": False, "interpolation": "bilinear"}, ["vit", "transformers"]),
        ({"size": (64, 32)}, ["transformers"]),
        ({"size": (64, 32), "crop_mode": "squash"}, []),
    ],
)
def test_warns_about_preprocessing_differences(fields: dict[str, Any], by: list[str]) -> None:
    preprocess = Preprocess(**{"size": (32, 32), **fields})
    model = architecture("Ti/16", image_size=preprocess.size)
    info = CheckpointInfo(model, preprocess)
    assert [name for name in ("vit", "transformers") if layout_of(name).warnings(info)] == by


@dataclasses.dataclass(frozen=True)
class FutureConfig(ModelConfig):
    """A model with a field from a later version."""

    rotary: bool = False


def test_layouts_reject_unknown_fields() -> None:
    plain = FutureConfig(32, 2, 2, 64, (8, 8), (32, 32), 5)
    for refusals in (*(layout_of(n).unsupported for n in ("transformers", "vit-npz")), not_in_timm):
        assert refusals(plain) == []
        assert refusals(dataclasses.replace(plain, rotary=True)) == ["rotary=true"]

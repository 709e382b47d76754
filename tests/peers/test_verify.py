"""`vit convert --verify` with the real timm and transformers."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from typer.testing import CliRunner, Result

from checkpoints.golden_cases import GOLDEN
from peers.random_models import save_random
from vitcli.checkpoints.changes import Changes
from vitcli.checkpoints.convert import convert
from vitcli.checkpoints.load import load
from vitcli.checkpoints.read import open_checkpoint
from vitcli.checkpoints.verify import verify
from vitcli.cli.main import app
from vitcli.config import ModelConfig, ResNetConfig
from vitcli.errors import CheckpointError
from vitcli.layouts.catalog import Format

pytestmark = pytest.mark.peers

VIT = ModelConfig(48, 2, 3, 96, (8, 8), (32, 32), 6)
EXACT = 1e-10


@pytest.fixture
def vit(transformers: ModuleType) -> Callable[..., Result]:
    def run(*args: object) -> Result:
        return CliRunner().invoke(app, [str(arg) for arg in args], prog_name="vit")

    return run


READABLE = [
    "timm_vit_default/model.safetensors",
    "timm_vit_reg4_gap/model.safetensors",
    "timm_deit_distilled/model.safetensors",
    "timm_siglip_map/model.safetensors",
    "timm_clip_prenorm/model.safetensors",
    "vit_jax_token/checkpoint.npz",
    "big_vision_tok/checkpoint.npz",
    "big_vision_map_scan_twotower/checkpoint.npz",
    "hf_vit/model.safetensors",
    "hf_deit_teacher/model.safetensors",
    "hf_dinov2_registers/model.safetensors",
    "hf_vitmae_encoder/model.safetensors",
    "hf_siglip_vision/model.safetensors",
    "hf_clip_vision/model.safetensors",
]


@pytest.mark.parametrize("name", READABLE)
def test_verifies_source(transformers: ModuleType, name: str) -> None:
    found = verify(open_checkpoint(GOLDEN / name))
    assert found.difference < EXACT < found.largest
    peer, _ = found.library.split(" ", 1)
    assert peer == ("transformers" if name.startswith("hf_") else "timm")


@pytest.mark.parametrize(
    ("output", "layout", "library"),
    [
        ("m", "vit", "timm"),
        ("m", "transformers", "transformers"),
        ("m.npz", "vit-npz", "timm"),
        ("m.safetensors", "vit", "timm"),
    ],
)
def test_verifies_output(
    vit: Callable[..., Result], tmp_path: Path, output: str, layout: str, library: str
) -> None:
    source = save_random(tmp_path / "ours", dataclasses.replace(VIT, activation="gelu_tanh"))
    args = ["convert", source, tmp_path / output, "--to", layout, "--verify", "--json"]
    result = vit(*args)
    assert result.exit_code == 0, result.output
    first, second = json.loads(result.stdout)["verified"]
    assert first["file"] == str(source / "model.safetensors") and first["what"] == "logits"
    assert second["library"].startswith(library) and str(tmp_path / output) in second["file"]
    assert max(first["difference"], second["difference"]) < EXACT < first["largest"]


@pytest.mark.parametrize(
    ("name", "key", "prefix"),
    [
        ("vit_tiny_patch16_224", "state_dict", ""),
        ("vit_tiny_patch16_224", "teacher", "module.backbone."),
        ("beit_base_patch16_224", "model", ""),
    ],
)
def test_verifies_timm_pickle(
    timm: ModuleType,
    vit: Callable[..., Result],
    tmp_path: Path,
    name: str,
    key: str,
    prefix: str,
) -> None:
    model = timm.create_model(name, img_size=32, depth=2, num_classes=3)
    tensors = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    torch.save({key: tensors}, tmp_path / "x.pth")
    result = vit("convert", tmp_path / "x.pth", tmp_path / "y", "--verify", "-q")
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stdout.splitlines() if line.startswith("verified ")]
    assert [line.removeprefix("verified ").partition(": ")[0] for line in lines] == [
        str(tmp_path / "x.pth"),
        str(tmp_path / "y" / "model.safetensors"),
    ]


def test_verifies_gated_eva(timm: ModuleType, tmp_path: Path) -> None:
    """Whose `mlp_ratio` and tensors have other names and values in timm."""
    config = {"rope": "eva02", "swiglu": True, "key_bias": False, "layer_scale": False}
    model = dataclasses.replace(VIT, **config, pool="gap", final_norm=False, fc_norm=True)
    assert verify(open_checkpoint(save_random(tmp_path, model))).difference < 1e-6
    bare = (tmp_path / "model.safetensors").rename(tmp_path / "bare.safetensors")
    assert verify(open_checkpoint(bare)).difference < 1e-6


def test_original_hybrid_is_verified_with_timm_epsilons(
    vit: Callable[..., Result], tmp_path: Path
) -> None:
    stem = ResNetConfig((2, 2, 2, 2))
    config = dataclasses.replace(
        VIT, stem=stem, patch_size=(32, 32), image_size=(64, 64), activation="gelu_tanh"
    )
    npz = convert(save_random(tmp_path / "ours", config), tmp_path / "x.npz")
    assert open_checkpoint(npz).info.model.stem != stem
    result = vit("convert", npz, tmp_path / "y", "--verify", "--json")
    assert result.exit_code == 0, result.output
    for found in json.loads(result.stdout)["verified"]:
        assert found["difference"] < EXACT < found["largest"]
        assert found["note"] == "with timm's epsilons"


def test_mismatch_is_detected_before_writing(vit: Callable[..., Result], tmp_path: Path) -> None:
    """With the exact GELU instead of its approximation, and with another number of heads."""
    folder = shutil.copytree(GOLDEN / "hf_vit", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu_new"}))
    file = folder / "model.safetensors"
    checkpoint = open_checkpoint(file)
    model = dataclasses.replace(checkpoint.info.model, activation="gelu")
    other = dataclasses.replace(checkpoint, info=dataclasses.replace(checkpoint.info, model=model))
    with pytest.raises(CheckpointError, match="computes different logits"):
        verify(other)

    ours = save_random(tmp_path / "ours", VIT)
    wrong = json.loads((ours / "config.json").read_text())
    wrong["model_args"]["num_heads"] = 6  # the header says three
    (ours / "config.json").write_text(json.dumps(wrong))
    result = vit("convert", ours, tmp_path / "out", "--verify")
    assert result.exit_code == 1 and "computes different logits" in result.stderr
    assert not (tmp_path / "out").exists()


def test_model_unsupported_by_library_is_an_error(
    vit: Callable[..., Result], tmp_path: Path
) -> None:
    source = save_random(tmp_path / "ours", dataclasses.replace(VIT, pre_logits=48))
    result = vit("convert", source, tmp_path / "x.npz", "--verify")
    assert result.exit_code == 1
    assert "timm does not support pre_logits=48" in result.stderr


@pytest.mark.parametrize("layout", ["vit", "transformers"])
def test_float16_is_computed_in_float32(
    transformers: ModuleType, tmp_path: Path, layout: Format
) -> None:
    source = save_random(tmp_path / "ours", VIT)
    out = convert(source, tmp_path / "half", layout, Changes(dtype="float16"))
    theirs = transformers.AutoModelForImageClassification.from_pretrained(out).eval()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(theirs(images).logits, load(out)(images), rtol=0, atol=1e-5)

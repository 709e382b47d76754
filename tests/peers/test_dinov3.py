"""DINOv3 as timm and transformers compute it, and under its authors' names: rotary position
embeddings, biases of queries and values alone, gated MLPs."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import vitcli
from peers.random_models import fill, random_images, saved
from vitcli.checkpoints.read import open_checkpoint
from vitcli.checkpoints.verify import verify
from vitcli.config import model_config
from vitcli.hub.push import pack
from vitcli.layouts.timm import not_in_timm

pytestmark = pytest.mark.peers

SIZES: dict[str, Any] = {"embed_dim": 32, "depth": 2, "num_heads": 2, "img_size": (48, 32)}
NAMES = [
    "vit_small_patch16_dinov3",
    "vit_small_patch16_dinov3_qkvb",
    "vit_small_plus_patch16_dinov3",
    "vit_small_plus_patch16_dinov3_qkvb",
]


def made_by(timm: ModuleType, name: str, **options: Any) -> nn.Module:
    overlay = {"input_size": (3, *SIZES["img_size"])}
    model: nn.Module = timm.create_model(name, pretrained_cfg_overlay=overlay, **SIZES, **options)
    fill(model.eval(), 0)
    return model


def assert_close(ours: nn.Module, theirs: nn.Module, size: tuple[int, int]) -> None:
    """In float32: the tables of angles are float32 here, and not there."""
    with torch.inference_mode():
        found, expected = ours(random_images(1, size)), theirs(random_images(1, size))
    expected = getattr(expected, "pooler_output", expected)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("pool", ["avg", "token"])
@pytest.mark.parametrize("name", NAMES)
def test_timms(timm: ModuleType, tmp_path: Path, name: str, pool: str) -> None:
    theirs = made_by(timm, name, global_pool=pool, num_classes=5)
    timm.models.save_for_hf(theirs, tmp_path, safe_serialization=True)
    assert_close(vitcli.load(tmp_path), theirs, (48, 32))
    assert_close(vitcli.load(tmp_path, resolution=(64, 96)), theirs, (64, 96))
    assert verify(open_checkpoint(tmp_path)).library.startswith("timm")


@pytest.mark.parametrize("name", NAMES)
def test_its_authors(timm: ModuleType, tmp_path: Path, name: str) -> None:
    """Their files have a bias of keys, whatever it is, and a mask that leaves it out."""
    theirs = made_by(timm, name, global_pool="token")
    renamed = {"reg_token": "storage_tokens", "gamma_1": "ls1.gamma", "gamma_2": "ls2.gamma"}
    renamed |= {"fc1_g": "w1", "fc1_x": "w2"}
    renamed |= {"mlp.fc2": "mlp.w3"} if "plus" in name else {}
    state, found = theirs.state_dict(), dict[str, torch.Tensor]()
    for key, tensor in state.items():
        for before, after in renamed.items():
            key = key.replace(before, after)
        found[key] = tensor
    for block in ("blocks.0.attn.", "blocks.1.attn.") if "qkvb" in name else ():
        query, value = found.pop(f"{block}q_bias"), found.pop(f"{block}v_bias")
        found[f"{block}qkv.bias"] = torch.cat([query, torch.randn_like(query), value])
        found[f"{block}qkv.bias_mask"] = torch.ones(96).index_fill(0, torch.arange(32, 64), 0)
    found["rope_embed.periods"] = torch.ones(4, dtype=torch.bfloat16)
    found["mask_token"] = torch.zeros(1, 32)
    torch.save(found, tmp_path / "dinov3.pth")
    ours = vitcli.load(tmp_path / "dinov3.pth")
    assert ours.config.num_heads == 2 and ours.preprocess.size == (256, 256)
    assert ours.info.provenance["assumed"].keys() == {"preprocess"}
    assert_close(ours, theirs, (256, 256))


OURS: dict[str, Any] = {"width": 32, "depth": 2, "num_heads": 2, "mlp_dim": 64, "norm_eps": 1e-5}
OURS |= {"posemb": "rope", "posemb_tokens": "patches", "num_registers": 4, "layer_scale": True}
OURS |= {"qkv_bias": False, "image_size": (48, 32)}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"pool": "gap", "class_token": False, "num_registers": 0},
        {"pool": "gap", "fc_norm": True, "final_norm": False},
        {"swiglu": True, "mlp_dim": 256},
        {"pre_norm": True, "patch_bias": False},
    ],
    ids=str,
)
def test_timm_and_transformers_read_what_we_write(
    timm: ModuleType, transformers: ModuleType, tmp_path: Path, fields: dict[str, Any]
) -> None:
    config = model_config("Ti/16", num_classes=6, **(OURS | fields))
    assert not not_in_timm(config)
    ours = vitcli.load(saved(tmp_path / "m", config))
    assert ours.config == config
    pack(tmp_path / "m", make(tmp_path / "pushed"), "me/model")
    for folder in ("m", "pushed"):
        theirs = timm.create_model(f"local-dir:{tmp_path / folder}", pretrained=True).eval()
        assert_close(ours, theirs, (48, 32))
    wrapped = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "m").eval()
    with torch.inference_mode():
        images = random_images(1, (48, 32))
        torch.testing.assert_close(wrapped(images).logits, ours(images), rtol=0, atol=2e-5)
    timm.models.save_for_hf(theirs, tmp_path / "back", safe_serialization=True)
    assert_close(vitcli.load(tmp_path / "back"), ours, (48, 32))


def make(folder: Path) -> Path:
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    "fields",
    [{"qkv_bias": True}, {"norm_eps": 1e-6}, {"layer_scale": False}, {"activation": "gelu_tanh"}],
    ids=str,
)
def test_what_timm_cannot_express_is_ours_alone(tmp_path: Path, fields: dict[str, Any]) -> None:
    config = model_config("Ti/16", num_classes=6, **(OURS | fields))
    assert not_in_timm(config)
    ours = vitcli.load(saved(tmp_path, config))
    assert ours.config == config
    assert "architecture" not in json.loads((tmp_path / "config.json").read_text())


@pytest.mark.parametrize("gated", [False, True])
def test_transformers(transformers: ModuleType, tmp_path: Path, gated: bool) -> None:
    config = transformers.DINOv3ViTConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_register_tokens=4,
        image_size=64,
        use_gated_mlp=gated,
        hidden_act="silu" if gated else "gelu",
    )
    theirs = transformers.DINOv3ViTModel(config).eval()
    fill(theirs, 0)
    theirs.save_pretrained(tmp_path)
    said = {"image_processor_type": "DINOv3ViTImageProcessorFast", "size": {"height": 96}}
    said["size"]["width"] = 96
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
    ours = vitcli.load(tmp_path)
    assert ours.preprocess.size == ours.config.image_size == (96, 96)
    assert ours.preprocess.crop_mode == "squash" and ours.preprocess.interpolation == "bilinear"
    assert_close(ours, theirs, (96, 96))
    assert verify(open_checkpoint(tmp_path)).difference < 1e-6

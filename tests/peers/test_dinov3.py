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
from peers.random_models import fill, random_images
from vitcli.checkpoints.read import open_checkpoint
from vitcli.checkpoints.verify import verify

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

"""DINOv3, EVA, EVA-02, AIMv2 and BEiT, compared with timm and transformers."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import vitcli
from peers.random_models import assert_same, random_images, randomize, save_random
from vitcli.checkpoints.read import open_checkpoint
from vitcli.checkpoints.resize import plan_resize, resize_posemb
from vitcli.checkpoints.save import save_checkpoint
from vitcli.checkpoints.verify import verify
from vitcli.config import model_config
from vitcli.errors import CheckpointError
from vitcli.hub.push import pack
from vitcli.layouts.timm import not_in_timm

pytestmark = pytest.mark.peers

SIZES: dict[str, Any] = {"embed_dim": 32, "depth": 2, "num_heads": 2, "img_size": (48, 32)}
SIZES["patch_size"] = 16
THEIRS: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
THEIRS["intermediate_size"] = 64
DINOV3 = [
    "vit_small_patch16_dinov3",
    "vit_small_patch16_dinov3_qkvb",
    "vit_small_plus_patch16_dinov3",
    "vit_small_plus_patch16_dinov3_qkvb",
]
EVA = [
    "vit_small_patch16_lingbot",
    "eva_giant_patch14_224",
    "eva02_tiny_patch14_224",
    "eva02_base_patch14_224",
    "eva02_base_patch16_clip_224",
    "vit_medium_patch16_rope_reg1_gap_256",
    "vit_mediumd_patch16_rope_reg1_gap_256",
    "aimv2_large_patch14_224",
    "beit_base_patch16_224",
]


def create_timm_model(timm: ModuleType, name: str, **options: Any) -> nn.Module:
    overlay = {"input_size": (3, *SIZES["img_size"])}
    model: nn.Module = timm.create_model(name, pretrained_cfg_overlay=overlay, **SIZES, **options)
    randomize(model.eval(), 0)
    return model


def assert_close(ours: nn.Module, theirs: nn.Module, size: tuple[int, int]) -> None:
    """Compare in float32: our tables of rotary angles are float32, theirs are not."""
    assert_same(ours, theirs, random_images(1, size), torch.float32, rtol=0, atol=2e-5)


DATA2VEC = "Data2VecVisionForImageClassification"
POOLS = [(name, "avg") for name in DINOV3 + EVA]
POOLS += [(n, "token") for n in DINOV3 + EVA if "gap" not in n and "aim" not in n]


@pytest.mark.parametrize(("name", "pool"), POOLS)
def test_timm(timm: ModuleType, tmp_path: Path, name: str, pool: str) -> None:
    theirs = create_timm_model(timm, name, global_pool=pool, num_classes=5)
    timm.models.save_for_hf(theirs, tmp_path / "m", safe_serialization=True)
    ours = vitcli.load(tmp_path / "m")
    assert_close(ours, theirs, (48, 32))
    assert verify(open_checkpoint(tmp_path / "m")).library.startswith("timm")
    save_checkpoint(tmp_path / "back", ours.state_dict(), ours.info)
    again = timm.create_model(f"local-dir:{tmp_path / 'back'}", pretrained=True).eval()
    assert_close(again, theirs, (48, 32))
    if name.startswith("beit"):  # timm resizes these tables by another method, while loading
        return
    if name in EVA:
        theirs.set_input_size((64, 96))
    larger = vitcli.load(tmp_path / "m", resolution=(64, 96), posemb_method="bicubic")
    assert_close(larger, theirs, (64, 96))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rope": "eva02", "layer_scale": True},
        {"posemb": "relative", "layer_scale": True},
        {"rope": "dinov3", "posemb": "none", "norm_eps": 1e-5, "layer_scale": True},
    ],
    ids=["eva", "eva02", "beit", "dinov3"],
)
def test_training_keeps_key_bias_zero(
    timm: ModuleType, tmp_path: Path, fields: dict[str, Any]
) -> None:
    config = model_config("Ti/16", num_classes=6, **(OURS | PLAIN | fields))
    ours = vitcli.load(save_random(tmp_path / "m", config)).train()
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.1)
    before = {name: p.clone() for name, p in ours.named_parameters()}
    for step in range(2):
        optimizer.zero_grad()
        ours(random_images(step, (48, 32))).square().sum().backward()
        optimizer.step()
    key = slice(32, 64)
    for name, parameter in ours.named_parameters():
        if name.endswith("qkv.bias"):
            assert not parameter[key].any() and not before[name][key].any()
            assert not torch.equal(parameter[:32], before[name][:32])
    save_checkpoint(tmp_path / "trained", ours.state_dict(), ours.info)
    theirs = timm.create_model(f"local-dir:{tmp_path / 'trained'}", pretrained=True).eval()
    assert_close(ours.eval(), theirs, (48, 32))


@pytest.mark.parametrize("name", DINOV3)
def test_reads_original_dinov3_checkpoints(timm: ModuleType, tmp_path: Path, name: str) -> None:
    """Their files contain an arbitrary bias for keys, and a mask that removes it."""
    theirs = create_timm_model(timm, name, global_pool="token")
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
OURS |= {"posemb": "none", "rope": "dinov3", "num_registers": 4, "layer_scale": True}
OURS |= {"qkv_bias": False, "image_size": (48, 32)}
PLAIN: dict[str, Any] = {"qkv_bias": True, "key_bias": False, "rope": "none", "posemb": "learn"}
AIMV2: dict[str, Any] = {"norm": "rms", "qkv_bias": False, "key_bias": True, "norm_eps": 1e-5}
AIMV2 |= {"swiglu": True, "mlp_dim": 170, "class_token": False, "pool": "gap"}
PLAIN |= {"num_registers": 0, "layer_scale": False, "norm_eps": 1e-6, "posemb_tokens": "all"}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"pool": "gap", "class_token": False, "num_registers": 0},
        {"pool": "gap", "fc_norm": True, "final_norm": False},
        {"swiglu": True, "mlp_dim": 256},
        {"pre_norm": True, "patch_bias": False},
        {"qkv_bias": True, "key_bias": False},
        PLAIN,
        PLAIN | {"rope": "eva02", "pool": "gap", "num_registers": 2, "layer_scale": True},
        PLAIN | {"rope": "eva02", "swiglu": True, "mlp_dim": 170, "sub_norm": "mlp"},
        PLAIN | {"rope": "eva02", "swiglu": True, "mlp_dim": 170, "sub_norm": "both"},
        PLAIN | {"rope": "eva02", "swiglu": True, "mlp_dim": 170},
        PLAIN | AIMV2,
        PLAIN
        | {"posemb": "relative", "pool": "gap", "fc_norm": True, "final_norm": False}
        | {"layer_scale": True},
    ],
    ids=str,
)
def test_timm_and_transformers_read_our_checkpoints(
    timm: ModuleType, transformers: ModuleType, tmp_path: Path, fields: dict[str, Any]
) -> None:
    config = model_config("Ti/16", num_classes=6, **(OURS | fields))
    assert not not_in_timm(config)
    ours = vitcli.load(save_random(tmp_path / "m", config))
    assert ours.config == config
    (tmp_path / "pushed").mkdir()
    pack(tmp_path / "m", tmp_path / "pushed", "me/model")
    for folder in ("m", "pushed"):
        theirs = timm.create_model(f"local-dir:{tmp_path / folder}", pretrained=True).eval()
        assert_close(ours, theirs, (48, 32))
    wrapped = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "m").eval()
    with torch.inference_mode():
        images = random_images(1, (48, 32))
        torch.testing.assert_close(wrapped(images).logits, ours(images), rtol=0, atol=2e-5)
    timm.models.save_for_hf(theirs, tmp_path / "back", safe_serialization=True)
    assert_close(vitcli.load(tmp_path / "back"), ours, (48, 32))


@pytest.mark.parametrize(("gated", "registers"), [(False, 4), (True, 4), (False, 0)])
def test_transformers(
    transformers: ModuleType, tmp_path: Path, gated: bool, registers: int
) -> None:
    mlp = {"use_gated_mlp": gated, "hidden_act": "silu" if gated else "gelu"}
    config = transformers.DINOv3ViTConfig(
        **THEIRS, **mlp, num_register_tokens=registers, image_size=64
    )
    theirs = transformers.DINOv3ViTModel(config).eval()
    randomize(theirs, 0)
    theirs.save_pretrained(tmp_path)
    processor = {"image_processor_type": "DINOv3ViTImageProcessorFast"}
    processor["size"] = {"height": 96, "width": 96}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    ours = vitcli.load(tmp_path)
    assert ours.preprocess.size == ours.config.image_size == (96, 96)
    assert ours.preprocess.crop_mode == "squash" and ours.preprocess.interpolation == "bilinear"
    assert_close(ours, theirs, (96, 96))
    assert verify(open_checkpoint(tmp_path)).difference < 1e-6
    torch.save(theirs.state_dict(), tmp_path / "x.pth")
    assert_close(vitcli.load(tmp_path / "x.pth"), theirs, (96, 96))


def test_reads_original_beit_checkpoints(timm: ModuleType, tmp_path: Path) -> None:
    for size, fits in ((48, True), ((48, 32), False)):
        sizes = SIZES | {"img_size": size}
        theirs = timm.create_model("beitv2_base_patch16_224", **sizes, num_classes=5).eval()
        randomize(theirs, 0)
        state = theirs.state_dict()
        state |= {f"blocks.{i}.attn.relative_position_index": torch.zeros(7, 7) for i in (0, 1)}
        torch.save({"model": state}, tmp_path / "beit.pth")
        if fits:
            ours = vitcli.load(tmp_path / "beit.pth")
            assert ours.config.num_heads == 2 and not ours.config.key_bias
            assert_close(ours, theirs, (48, 48))
            larger = tmp_path / "larger"
            resize_posemb(plan_resize(tmp_path / "beit.pth", grid=(4, 4), output=larger))
            resized = timm.create_model(f"local-dir:{larger}", pretrained=True)
            assert_close(vitcli.load(larger), resized, (64, 64))
        else:
            with pytest.raises(CheckpointError, match="do not fit a grid"):
                vitcli.load(tmp_path / "beit.pth")


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("name", ["BeitModel", "BeitForImageClassification", DATA2VEC])
def test_reads_transformers_beit(
    transformers: ModuleType, tmp_path: Path, name: str, mean: bool
) -> None:
    kind = name.removesuffix("ForImageClassification").removesuffix("Model")
    fields = {"use_relative_position_bias": True, "use_mean_pooling": mean}
    config = getattr(transformers, f"{kind}Config")(**THEIRS, **fields, image_size=48, num_labels=5)
    theirs = getattr(transformers, name)(config).eval()
    randomize(theirs, 0)
    theirs.save_pretrained(tmp_path)
    ours = vitcli.load(tmp_path)
    assert ours.config.posemb == "relative" and not ours.config.key_bias
    assert verify(open_checkpoint(tmp_path)).difference < 1e-6
    images = random_images(1, (48, 48))
    with torch.inference_mode():
        output = theirs(images)
        expected = output.pooler_output if name.endswith("Model") else output.logits
        assert (ours(images) - expected).abs().max() < 2e-5

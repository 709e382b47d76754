"""Checkpoints of vit_jax, big_vision, transformers and others compute what the originals do."""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints.golden_cases import GOLDEN, TIMM_VIT, images_and_logits, write_shards
from layouts.released_names import open_clip
from vitcli.checkpoints.load import load
from vitcli.checkpoints.read import open_checkpoint, read_info
from vitcli.config import ModelConfig
from vitcli.errors import CheckpointError
from vitcli.models.vit import ViT


def test_open_clip_image_tower_from_timm(tmp_path: Path) -> None:
    siglip = {"class_token": False, "pool": "map", "activation": "gelu_tanh"}
    model = ViT(ModelConfig(48, 2, 12, 96, (8, 8), (32, 32), num_classes=0, **siglip)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    tensors = {f"visual.trunk.{name}": tensor for name, tensor in model.state_dict().items()}
    save_file(tensors | {"logit_scale": torch.ones(())}, tmp_path / "open_clip_model.safetensors")
    vision = {"image_size": 32, "timm_model_name": "vit_base_patch32_siglip_256"}
    preprocess = {"mean": [0.5, 0.5, 0.5], "std": [0.2, 0.2, 0.2], "resize_mode": "squash"}
    config = {"model_cfg": {"vision_cfg": vision}, "preprocess_cfg": preprocess}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    read = load(tmp_path)
    assert read.config == model.config and read.preprocess.crop_mode == "squash"
    assert read.preprocess.std == (0.2, 0.2, 0.2) and "assumed" not in read.info.provenance
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        assert torch.equal(read(images), model(images))


def test_reads_sharded_checkpoint(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "model")
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(load(folder)(images), load(GOLDEN / "hf_vit")(images))
    index = folder / "model.safetensors.index.json"
    wrongs = ({"weight_map": {"x": "../x"}}, {"weight_map": {"x": ""}}, {}, {"weight_map": 3})
    for wrong in wrongs:
        index.write_text(json.dumps(wrong))
        with pytest.raises(CheckpointError, match="index"):
            read_info(folder)


def test_training_checkpoint_loads_ema_weights(tmp_path: Path) -> None:
    tensors = load_file(TIMM_VIT / "model.safetensors")
    zeros = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    prefixed = {f"module.{name}": tensor for name, tensor in tensors.items()}
    large: list[object] = ["x" * 1_000_000] * 1000
    for _ in range(40):
        large = [large, large]  # would have 2^40 GB in JSON
    options = argparse.Namespace(lr=0.1, large=large)
    state = {"epoch": 3, "args": options, "state_dict": zeros, "state_dict_ema": prefixed}
    state |= {"best_acc1": torch.tensor(76.1), "rng_state": torch.get_rng_state()}
    path = tmp_path / "model_best.pth.tar"
    torch.save(state, path)
    model = load(path)
    assert torch.equal(model.head.weight, tensors["head.weight"])
    assert model.info.provenance["took"] == ["the weights under 'state_dict_ema'"]
    torch.save(state, path, _use_new_zipfile_serialization=False)
    assert torch.equal(load(path).head.weight, tensors["head.weight"])
    matrix, vector = torch.ones(2, 2), torch.ones(2)
    state = {"model": {"name": "vit"}, "optimizer": {"state": {0: {"exp_avg": matrix}}}}
    for content in (
        {**state, "criterion": {"weight": vector}, "net": prefixed},
        {**prefixed, "optimizer": {"exp_avg": matrix}},
        {"ema": {"decay": 0.99, "shadow": prefixed}, "model": zeros},
        {"model": prefixed, "queue": matrix},
    ):
        torch.save(content, path)
        assert torch.equal(load(path).head.weight, tensors["head.weight"])
    torch.save({"params": zeros, "params_ema": prefixed}, path)
    with pytest.raises(CheckpointError, match="several dictionaries of tensors: 'params', 'par"):
        load(path)


def test_gelu_of_openai_clip_is_assumed_if_not_stated(tmp_path: Path) -> None:
    """open_clip's config states it."""
    tensors = open_clip(load_file(GOLDEN / "timm_clip_prenorm" / "model.safetensors"))
    tensors = {name: torch.as_tensor(tensor) for name, tensor in tensors.items()}
    file = tmp_path / "open_clip_model.safetensors"
    save_file(tensors, file)
    torch.save({**tensors, "input_resolution": torch.tensor(32)}, tmp_path / "ViT-B-8.pt")

    def check(path: Path, activation: str, num_heads: int, assumed: set[str]) -> None:
        info, _ = read_info(path)
        assert isinstance(info.model, ModelConfig)
        assert (info.model.activation, info.model.num_heads) == (activation, num_heads)
        assert set(info.provenance["assumed"]) == assumed

    check(file, "gelu", 1, {"activation", "grid", "num_heads", "preprocess"})
    check(tmp_path / "ViT-B-8.pt", "quick_gelu", 1, {"grid", "preprocess"})
    vision = {"image_size": 32, "layers": 2, "width": 48, "patch_size": 8, "head_width": 16}
    config = {"model_cfg": {"quick_gelu": True, "vision_cfg": vision}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    check(file, "quick_gelu", 3, {"preprocess"})


def write_bare_checkpoint(path: Path, **fields: Any) -> Path:
    """Write a checkpoint in timm's layout without any metadata."""
    sizes = {"width": 64, "depth": 1, "num_heads": 1, "mlp_dim": 96, "patch_size": (8, 8)}
    config = ModelConfig(**{**sizes, **fields})
    tensors = {n: torch.zeros(shape) for n, shape in config.tensor_shapes().items()}
    save_file(tensors, path)
    return path


def test_ambiguous_grid_is_not_guessed(tmp_path: Path) -> None:
    """25 embeddings are a class token and 4 x 6 patches, or 5 x 5 patches without one."""
    path = write_bare_checkpoint(tmp_path / "x.safetensors", image_size=(32, 48))
    with pytest.raises(CheckpointError) as caught:
        read_info(path)
    assert "--old-grid" in str(caught.value.hint)
    model: Any = open_checkpoint(path, grid=(4, 6)).info.model
    assert (model.grid, model.posemb_tokens) == ((4, 6), "all")
    model = open_checkpoint(path, grid=(5, 5)).info.model
    assert (model.grid, model.posemb_tokens) == ((5, 5), "patches")
    scaled = write_bare_checkpoint(
        tmp_path / "y.safetensors",
        image_size=(40, 40),
        layer_scale=True,
        posemb_tokens="patches",
    )
    model = read_info(scaled)[0].model
    assert (model.grid, model.posemb_tokens) == ((5, 5), "patches")


AMBIGUOUS: dict[str, dict[str, Any]] = {
    "DINOv3": {"posemb": "none"},
    "PE core": {"pre_norm": True, "pool": "map"},
    "PE spatial": {"pre_norm": True, "final_norm": False},
    "post-norm": {"class_token": False, "pool": "gap", "qkv_bias": False},
    "pool over the prefix": {"class_token": False, "num_registers": 1, "pool": "map"},
}


@pytest.mark.parametrize("fields", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_ambiguous_bare_files_are_rejected(tmp_path: Path, fields: dict[str, Any]) -> None:
    path = write_bare_checkpoint(tmp_path / "x.safetensors", image_size=(32, 32), **fields)
    with pytest.raises(CheckpointError, match="which is not supported"):
        read_info(path)


def save_npz(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    np.savez(path, **arrays)
    return path


def assert_logits_match(path: Path, case: str) -> None:
    """Check that a checkpoint computes the logits of a golden case."""
    images, expected = images_and_logits(case)
    with torch.inference_mode():
        found = load(path)(torch.from_numpy(images)).numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_old_big_vision_position_embedding_names(tmp_path: Path) -> None:
    arrays = dict(np.load(GOLDEN / "vit_jax_token" / "checkpoint_linen_names.npz"))
    positions = arrays.pop("Transformer/posembed_input/pos_embedding")
    for name in ("Transformer/pos_embedding", "pos_embedding"):
        path = save_npz(tmp_path / "x.npz", {f"params/{n}": a for n, a in arrays.items()})
        path = save_npz(path, {**dict(np.load(path)), f"params/{name}": positions})
        assert_logits_match(path, "vit_jax_token")
        opened = open_checkpoint(path)
        assert opened.layout == "big_vision"
        assert opened.tensors["pos_embed"].sources == (f"params/{name}",)


def test_optimizer_state_is_dropped(tmp_path: Path) -> None:
    arrays = dict(np.load(GOLDEN / "vit_jax_token" / "checkpoint.npz"))
    for prefix, slots in (("params/", "opt/0/mu/"), ("opt/target/", "opt/state/"), ("", "opt/mu/")):
        found = {f"{slots}{name}": np.zeros_like(array) for name, array in arrays.items()}
        found |= {prefix + name: array for name, array in arrays.items()}
        path = save_npz(tmp_path / "x.npz", found)
        assert_logits_match(path, "vit_jax_token")


def test_teacher_is_preferred_over_student(tmp_path: Path) -> None:
    tensors = load_file(TIMM_VIT / "model.safetensors")
    both = {f"teacher.backbone.{name}": tensor for name, tensor in tensors.items()}
    both |= {f"s.b.{name}": torch.zeros_like(tensor) for name, tensor in tensors.items()}
    torch.save({"model": both}, tmp_path / "x.pth")
    assert torch.equal(load(tmp_path / "x.pth").head.weight, tensors["head.weight"])

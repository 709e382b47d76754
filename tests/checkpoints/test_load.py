"""Loading a checkpoint as a torch model that computes the same as the original."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints.golden_cases import GOLDEN, TIMM_VIT, write_shards
from vitcli.architectures.posemb import resize
from vitcli.checkpoints.load import load, load_weights
from vitcli.checkpoints.resize import plan_resize
from vitcli.checkpoints.save import save_checkpoint
from vitcli.checkpoints.tensor_file import write
from vitcli.errors import CheckpointError, VitWarning
from vitcli.prediction import Predictor


def test_half_precision_is_loaded_and_resized_in_float32(tmp_path: Path) -> None:
    weights = load_weights(TIMM_VIT)
    save_checkpoint(tmp_path, weights.tensors, weights.info, "bfloat16")
    model = load(tmp_path, resolution=96)
    assert {p.dtype for p in model.parameters()} == {torch.float32} and not model.training
    table = load_weights(tmp_path).tensors["pos_embed"]
    assert torch.equal(model.pos_embed, resize(table.float(), 1, (4, 4), (6, 6), "bilinear"))
    half = load(tmp_path, resolution=96, dtype=None)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


def test_projection_that_is_left_out_is_warned_of(tmp_path: Path) -> None:
    tensors = load_file(GOLDEN / "hf_clip_vision" / "model.safetensors")
    tensors["visual_projection.weight"] = torch.zeros(8, 48)
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(GOLDEN / "hf_clip_vision" / "config.json", tmp_path)
    for opened in (load, Predictor):
        with pytest.warns(VitWarning, match="left out: visual_projection.weight"):
            opened(tmp_path)


@pytest.mark.parametrize("name", ["module.head", "classifier"])
def test_head_beside_the_backbone_is_warned_of(tmp_path: Path, name: str) -> None:
    tensors = load_file(TIMM_VIT / "model.safetensors")
    wrapped = {f"module.backbone.{key}": tensor for key, tensor in tensors.items()}
    wrapped[f"{name}.weight"] = torch.zeros(3, 48)
    torch.save(wrapped, tmp_path / "x.pth")
    with pytest.warns(VitWarning, match=f"left out: {name}.weight"):
        assert torch.equal(load(tmp_path / "x.pth").head.weight, tensors["head.weight"])


def test_mismatched_tensors_are_listed(tmp_path: Path) -> None:
    weights = load_weights(TIMM_VIT)
    tensors = dict(weights.tensors)
    del tensors["norm.bias"], tensors["blocks.0.norm1.weight"]
    tensors["head.weight"] = tensors["head.weight"][:, :40]
    tensors["mask_token"] = torch.zeros(1, 1, 48)
    write(tmp_path / "model.safetensors", tensors, weights.info.to_metadata())
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    for name in ("norm.bias", "blocks.0.norm1.weight", "mask_token", "head.weight (10, 40)"):
        assert name in caught.value.what


def test_pickled_shards(tmp_path: Path) -> None:
    """They are read like those of safetensors, whose index may not name pickles."""
    folder = write_shards(tmp_path / "model")
    expected = load(folder).state_dict()
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(".safetensors", ".bin"))
    for shard in folder.glob("*.safetensors"):
        torch.save(load_file(shard), shard.with_suffix(".bin"))
        shard.unlink()
    with pytest.raises(CheckpointError, match="not a valid safetensors file"):
        load(folder)
    index = index.rename(folder / "pytorch_model.bin.index.json")
    torch.testing.assert_close(load(index).state_dict(), expected, rtol=0, atol=0)
    job = plan_resize(index, grid=(7, 7))  # a file beside them would be read instead of them
    assert job.file == tmp_path / "model-7x7" / "model.safetensors" and job.directory == folder

"""Models resized by `vit resize-posemb` match the real transformers, which resizes at runtime."""

import shutil
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from checkpoints.golden_cases import GOLDEN
from peers.random_models import assert_same, random_images
from vitcli.checkpoints.load import load
from vitcli.checkpoints.resize import plan_resize, resize_posemb

pytestmark = pytest.mark.peers

CASES = {
    "hf_vit": ("AutoModelForImageClassification", "bicubic-hf"),
    "hf_deit_teacher": ("DeiTForImageClassificationWithTeacher", "bicubic-hf"),
    "hf_dinov2": ("AutoModelForImageClassification", "bicubic-hf"),
    "hf_dinov2_registers": ("AutoModelForImageClassification", "bicubic-hf"),
    "hf_siglip_vision": ("SiglipVisionModel", "bicubic-hf"),
    "hf_clip_vision": ("CLIPVisionModel", "bicubic-hf"),
}
"""Golden case: (transformers class, our name for its interpolation)."""


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_matches_resizing_in_transformers(
    transformers: ModuleType, tmp_path: Path, name: str, sharded: bool
) -> None:
    kind, method = CASES[name]
    source = GOLDEN / name
    before = getattr(transformers, kind).from_pretrained(source).eval()
    if sharded:
        source = tmp_path / "source"
        before.save_pretrained(source, max_shard_size="50KB")
        assert (source / "model.safetensors.index.json").is_file()
    job = plan_resize(source, grid=(6, 6), method=method, output=tmp_path / "new")
    resize_posemb(job)
    after, loading_info = getattr(transformers, kind).from_pretrained(
        tmp_path / "new", output_loading_info=True
    )
    assert not any(loading_info.values())
    size = job.models[1].image_size
    assert after.config.image_size == size[0]
    images = random_images(0, size)
    with torch.inference_mode():
        found = after.eval()(images)
        # DINOv2 always interpolates.
        options = {} if "dinov2" in name else {"interpolate_pos_encoding": True}
        expected = before(images, **options)
    key = "logits" if hasattr(found, "logits") else "pooler_output"
    torch.testing.assert_close(found[key], expected[key], rtol=0, atol=1e-5)
    assert_same(load(tmp_path / "new"), after, images)


def test_position_ids_are_extended(transformers: ModuleType, tmp_path: Path) -> None:
    """Old CLIP files store 0, 1, 2, ... for both towers; only the image tower's are extended."""
    source = shutil.copytree(GOLDEN / "hf_clip_vision", tmp_path / "clip")
    file = source / "model.safetensors"
    tensors = load_file(file)
    (table,) = (name for name in tensors if name.endswith("position_embedding.weight"))
    ids = table.replace("position_embedding.weight", "position_ids")
    tensors |= {ids: np.arange(17)[None], "text_model.embeddings.position_ids": np.arange(5)[None]}
    save_file(tensors, file)
    job = plan_resize(source, grid=(6, 6))
    resize_posemb(job)
    assert load_file(job.file)[ids].tolist() == [list(range(37))]
    assert load_file(job.file)["text_model.embeddings.position_ids"].shape == (1, 5)
    theirs = transformers.CLIPVisionModel.from_pretrained(job.output)
    assert_same(load(job.output), theirs, random_images(0, (48, 48)))


def test_transformers_reads_non_square_grid(transformers: ModuleType, tmp_path: Path) -> None:
    source = shutil.copytree(GOLDEN / "hf_vit", tmp_path / "vit")
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(source)
    job = plan_resize(source, grid=(3, 5))
    resize_posemb(job)
    theirs = transformers.AutoModelForImageClassification.from_pretrained(job.output).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(job.output)
    noise = torch.randint(0, 256, (3, 50, 60), dtype=torch.uint8)
    images = processor(noise, return_tensors="pt")["pixel_values"]
    assert tuple(images.shape) == (1, 3, 24, 40)
    assert_same(load(job.output), theirs, images)

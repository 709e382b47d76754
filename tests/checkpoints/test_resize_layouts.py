"""Resizing position embeddings keeps each layout's tensor names, files and configuration."""

import contextlib
import json
import os
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from checkpoints.golden_cases import GOLDEN, TIMM_VIT, write_shards
from checkpoints.test_resize import changed_tensors, read_tensors, resize, scipy_resize
from layouts.released_names import open_clip
from vitcli.checkpoints import read, tensor_file
from vitcli.checkpoints.resize import plan_resize
from vitcli.checkpoints.store import open_store
from vitcli.errors import CheckpointError, ConfigError, OutputError


@pytest.mark.parametrize("name", [path.name for path in sorted(GOLDEN.glob("hf_*"))])
def test_transformers_directory(name: str, tmp_path: Path) -> None:
    """Only the embeddings and the image size change (tests/peers compares the values)."""
    source = shutil.copytree(GOLDEN / name, tmp_path / "model")
    before = read.read_info(source)[0].model
    file = resize(source, grid=(6, 6))
    (table,) = changed_tensors(source / "model.safetensors", file)
    assert "embeddings.position_embedding" in table
    old = json.loads((source / "config.json").read_text())
    new = json.loads((file.parent / "config.json").read_text())
    assert new == {**old, "image_size": 6 * before.patch_size[0]} != old
    assert read.read_info(file)[0].model.grid == (6, 6)


def test_image_processor_gets_new_size(tmp_path: Path) -> None:
    source = shutil.copytree(GOLDEN / "hf_vit", tmp_path / "model")
    processor, no_crop = source / "preprocessor_config.json", {"do_center_crop": False}
    for before, after in [
        ({"size": {"height": 32, "width": 32}}, {"size": {"height": 48, "width": 96}, **no_crop}),
        ({"size": 32}, {"size": {"height": 48, "width": 96}, **no_crop}),
        (
            {"size": {"shortest_edge": 40}, "crop_size": 32, "do_center_crop": True},
            {"size": {"shortest_edge": 60}, "crop_size": {"height": 48, "width": 96}},
        ),
        (
            {"size": {"height": 40, "width": 40}, "crop_size": 32, "do_center_crop": True},
            {"size": {"height": 60, "width": 120}, "crop_size": {"height": 48, "width": 96}},
        ),
    ]:
        processor.write_text(json.dumps({"image_mean": [0.1, 0.2, 0.3], **before}))
        file = resize(source, resolution=(48, 96), output=tmp_path / f"out{len(str(before))}")
        found = json.loads((file.parent / processor.name).read_text())
        assert found == {"image_mean": [0.1, 0.2, 0.3], **before, **after}
        assert json.loads((file.parent / "config.json").read_text())["image_size"] == [48, 96]
        assert read.read_info(file)[0].model.grid == (6, 12)


def test_rejects_non_square_grids_for_transformers() -> None:
    for name in ("hf_dinov2", "hf_clip_vision"):
        with pytest.raises(ConfigError, match="supports only square images") as error:
            plan_resize(GOLDEN / name, grid=(6, 3))
        assert "vit convert" in str(error.value.hint)


def test_shards_become_one_file(tmp_path: Path) -> None:
    source = write_shards(tmp_path / "model")
    (source / "pytorch_model.bin").write_bytes(b"other weights")
    file = resize(source, grid=(7, 7))
    assert file == tmp_path / "model-7x7" / "model.safetensors"
    old, new = load_file(GOLDEN / "hf_vit" / "model.safetensors"), load_file(file)
    (table,) = (name for name in old if new[name].tobytes() != old[name].tobytes())
    assert old.keys() == new.keys() and new[table].shape == (1, 50, 48)
    info, _ = read.read_info(file.parent)
    assert info.model.grid == (7, 7) and info.provenance["posemb_resize"]["to"] == [7, 7]
    assert tensor_file.read_header(file).metadata["format"] == "pt"
    weights = {path.name for path in file.parent.iterdir() if path.suffix != ".json"}
    assert weights == {"model.safetensors"} and not [*file.parent.glob("*.index.json")]
    with pytest.raises(OutputError, match="a single safetensors or npz file"):
        plan_resize(source, grid=(4, 4), in_place=True)
    index = next(source.glob("*.index.json"))
    index = index.rename(index.with_name("model.fp16.safetensors.index.json"))
    assert read.read_info(resize(index, grid=(5, 5)))[0].model.grid == (5, 5)


def test_single_file_overrides_outdated_config(tmp_path: Path) -> None:
    """Its tensor names have a prefix, so the file does not get metadata of its own."""
    folder = Path(shutil.copytree(TIMM_VIT, tmp_path / "m"))
    tensors = read_tensors(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file({f"module.{name}": t for name, t in tensors.items()}, folder / "x.safetensors")
    for grid in ((3, 5), (4, 4), (6, 6)):
        file = resize(folder / "x.safetensors", grid=grid, in_place=True)
        info, _ = read.read_info(file)
        assert info.model.grid == grid and info.model.num_classes == 10
        assert info.preprocess.size == info.model.image_size


@pytest.mark.parametrize("name", ["timm_vit_default", "hf_vit", "hf_dinov2"])
@pytest.mark.parametrize("single_file", [False, True])
@pytest.mark.parametrize("moves", range(4))
def test_interrupted_in_place_resize_leaves_valid_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, single_file: bool, moves: int
) -> None:
    """Interrupted after some of its files have been replaced."""
    folder = Path(shutil.copytree(GOLDEN / name, tmp_path / "m"))
    (folder / "README.md").write_text("# A card")
    (folder / "preprocessor_config.json").write_text('{"size": 32}')
    spec = read.open_checkpoint(folder).file if single_file else folder
    names = {path.name for path in folder.iterdir()}
    old, remaining, replace = read.read_info(folder)[0].model.grid, moves, os.replace

    def move(source: Path, target: Path) -> None:
        nonlocal remaining
        if Path(target).parent == folder:
            remaining -= 1
            if remaining < 0:
                raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(os, "replace", move)
        resize(spec, grid=(5, 5), in_place=True)
    assert read.read_info(folder)[0].model.grid == ((5, 5) if moves else old)
    resize(spec, grid=(6, 6), in_place=True)
    assert read.read_info(folder)[0].model.grid == (6, 6)
    assert {path.name for path in folder.iterdir()} == names
    if name == "timm_vit_default":
        config = json.loads((folder / "config.json").read_text())
        assert config["model_args"]["img_size"] == [96, 96]


def test_unreadable_config_leaves_weights_unchanged(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(TIMM_VIT, tmp_path / "m"))
    (folder / "preprocessor_config.json").write_text("{")
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="cannot be read"):
        resize(folder / "model.safetensors", grid=(2, 2), in_place=True)
    assert (folder / "model.safetensors").read_bytes() == before


NPZ = {
    "vit_jax_token/checkpoint_opt_target.npz": "hires_pos_embedding",
    "big_vision_map_scan_twotower/checkpoint.npz": "hires_pos_embedding",
    "big_vision_gap_rep_bf16/checkpoint.npz": None,
}


@pytest.mark.parametrize("name", NPZ)
def test_npz_stays_npz(tmp_path: Path, name: str) -> None:
    source = Path(shutil.copy(GOLDEN / name, tmp_path / "x.npz"))
    file = resize(source, grid=(6, 6))
    assert file == tmp_path / "x-6x6.npz"
    old, new = np.load(source), np.load(file)
    assert list(old) == list(new)
    (table,) = (n for n in old if old[n].tobytes() != new[n].tobytes())
    assert old[table].dtype == new[table].dtype
    if hires := NPZ[name]:
        expected = np.load((GOLDEN / name).parent / "io.npz")[hires]
        np.testing.assert_allclose(new[table], expected, rtol=0, atol=1e-6)
    with pytest.raises(OutputError, match="written as a .npz file"):
        plan_resize(source, grid=(6, 6), output=tmp_path / "y.safetensors")
    file.unlink()
    assert resize(source, grid=(2, 9), in_place=True) == source
    assert read.read_info(tmp_path)[0].model.grid == (2, 9)
    assert [path.name for path in tmp_path.iterdir()] == ["x.npz"]


def test_npz_is_not_held_open(tmp_path: Path) -> None:
    """Windows cannot replace an open file."""
    source = Path(shutil.copy(GOLDEN / "vit_jax_token" / "checkpoint.npz", tmp_path / "x.npz"))
    data = source.read_bytes()
    *_, tensor = open_store(source).tensors.values()
    assert tensor.read().shape == tensor.shape
    source.rename(tmp_path / "y.npz")
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        tensor.read()
    with zipfile.ZipFile(tmp_path / "y.npz") as archive:
        start = archive.infolist()[-1].header_offset
    source.write_bytes(data[: start + 200])
    with pytest.raises(CheckpointError, match="damaged npz file: it is truncated"):
        tensor.read()


def test_npz_comment_is_preserved(tmp_path: Path) -> None:
    source = tmp_path / "x.npz"
    arrays = np.load(GOLDEN / "vit_jax_token" / "checkpoint.npz")
    np.savez_compressed(source, **{name: np.asfortranarray(arrays[name]) for name in arrays})
    with zipfile.ZipFile(source, "a") as archive:
        archive.comment = b"This is from the authors.\nThis is free."
    again = resize(resize(source, grid=(3, 7)), grid=(5, 2), output=tmp_path / "y.npz")
    with zipfile.ZipFile(again) as archive:
        assert archive.testzip() is None
        one, two, grid = archive.comment.splitlines()
        assert (one, two) == (b"This is from the authors.", b"This is free.")
    found = np.load(again)
    assert all((found[name] == arrays[name]).all() for name in arrays if "pos" not in name)
    info, _ = read.read_info(again)
    assert info.model.grid == (5, 2)
    resized = {"method": "bilinear", "from": [3, 7], "to": [5, 2]}
    assert info.provenance["posemb_resize"] == resized


def test_open_clip_directory(tmp_path: Path) -> None:
    arrays = open_clip(read_tensors(GOLDEN / "timm_clip_prenorm" / "model.safetensors"))
    source = tmp_path / "clip" / "open_clip_model.safetensors"
    source.parent.mkdir()
    tensor_file.write(source, {n: np.array(a) for n, a in arrays.items()}, {})
    vision = {"image_size": 32, "width": 48, "head_width": 16, "patch_size": 8}
    config = {"model_cfg": {"embed_dim": 8, "vision_cfg": vision}}
    (source.parent / "open_clip_config.json").write_text(json.dumps(config))
    file = resize(source.parent, grid=(3, 5))
    (name,) = changed_tensors(source, file)
    assert name == "visual.positional_embedding"
    info, _ = read.read_info(file.parent)
    assert info.model.grid == (3, 5) and info.model.num_heads == 3
    config = json.loads((file.parent / "open_clip_config.json").read_text())
    assert config["model_cfg"]["vision_cfg"] == {**vision, "image_size": [24, 40]}


def test_sincos_embeddings_are_rejected() -> None:
    with pytest.raises(CheckpointError, match="no position embeddings") as error:
        plan_resize(GOLDEN / "big_vision_gap_sincos" / "checkpoint.npz", grid=(6, 6))
    assert "for any grid" in str(error.value.hint)


def test_pickle_becomes_safetensors(tmp_path: Path) -> None:
    tensors = read_tensors(TIMM_VIT / "model.safetensors")
    state = {name: torch.from_numpy(np.array(tensor)) for name, tensor in tensors.items()}
    torch.save({"model": state}, tmp_path / "x.pth.tar")
    file = resize(tmp_path / "x.pth.tar", grid=(3, 5))
    assert file == tmp_path / "x-3x5.safetensors"
    same = resize(tmp_path / "x.pth.tar", grid=(4, 4))
    found = read_tensors(file)
    expected = scipy_resize(tensors["pos_embed"], 1, (3, 5))
    np.testing.assert_allclose(found["pos_embed"], expected, rtol=0, atol=1e-6)
    for name in set(tensors) - {"pos_embed"}:
        assert found[name].tobytes() == tensors[name].tobytes()
    assert read.read_info(file)[0].model.grid == (3, 5)
    with pytest.raises(OutputError):
        plan_resize(tmp_path / "x.pth.tar", grid=(2, 2), in_place=True)
    assert all((tensors[name] == array).all() for name, array in read_tensors(same).items())


def test_named_model_is_written_to_output(tmp_path: Path) -> None:
    file = resize("default", grid=(4, 6), output=tmp_path / "new")
    assert read.read_info(file)[0].model.grid == (4, 6)
    config = json.loads((file.parent / "config.json").read_text())
    assert config["pretrained_cfg"]["input_size"] == [3, 64, 96]
    assert (file.parent / "README.md").is_file()
    (tmp_path / "empty").mkdir()
    assert resize("default", grid=(4, 6), output=tmp_path / "empty").is_file()

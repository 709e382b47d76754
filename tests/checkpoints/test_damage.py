"""Truncated, corrupt and malicious checkpoints, and full disks: short errors, no partial output."""

import os
import resource
import shutil
import signal
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints.golden_cases import GOLDEN, TIMM_VIT, write_shards
from vitcli.checkpoints.changes import Changes
from vitcli.checkpoints.convert import convert
from vitcli.checkpoints.read import read_info
from vitcli.errors import CheckpointError, ConfigError, OutputError

NPZ = GOLDEN / "vit_jax_token" / "checkpoint.npz"


def save_pickle(folder: Path, zipped: bool) -> Path:
    state = load_file(TIMM_VIT / "model.safetensors")
    path = folder / "x.pth"
    torch.save({"state_dict": state}, path, _use_new_zipfile_serialization=zipped)
    return path


SOURCES: dict[str, Callable[[Path], Path]] = {
    "npz": lambda folder: Path(shutil.copy(NPZ, folder)),
    "timm": lambda folder: Path(shutil.copytree(TIMM_VIT, folder / "m")) / "model.safetensors",
    "transformers": lambda folder: (
        Path(shutil.copytree(GOLDEN / "hf_vit", folder / "m")) / "model.safetensors"
    ),
    "shards": lambda folder: write_shards(folder / "m") / "model-00002-of-00002.safetensors",
    "pickle": lambda folder: save_pickle(folder, zipped=True),
    "old pickle": lambda folder: save_pickle(folder, zipped=False),
}


@pytest.mark.parametrize("name", SOURCES)
def test_truncated_files_are_rejected(tmp_path: Path, name: str) -> None:
    file = SOURCES[name](tmp_path)
    data, out = file.read_bytes(), tmp_path / "out"
    source = file if name != "shards" else file.parent
    for tenth in range(10):
        file.write_bytes(data[: len(data) * tenth // 10])
        with pytest.raises(CheckpointError) as caught:
            convert(source, out)
        assert str(file.parent) in str(caught.value) and len(str(caught.value).splitlines()) <= 2
        assert not out.exists()
    file.write_bytes(data)
    convert(source, out)


def test_flipped_bit_in_npz_is_detected(tmp_path: Path) -> None:
    data = bytearray(NPZ.read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "x.npz").write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged npz"):
        convert(tmp_path / "x.npz", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_zip_bombs_are_not_inflated(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez_compressed(path, **{"embedding/kernel": np.zeros(10_000_000)})
    assert path.stat().st_size < 1e6
    with pytest.raises(CheckpointError, match="would decompress to 80,000,"):
        read_info(path)
    # A false size: the headers say 64 bytes, but the stream contains more.
    data = bytearray(path.read_bytes())
    for mark, at in ((b"PK\x01\x02", 24), (b"PK\x03\x04", 22)):
        start = data.find(mark)
        data[start + at : start + at + 4] = struct.pack("<I", 64)
    path.write_bytes(data)
    with pytest.raises(CheckpointError):
        convert(path, tmp_path / "out")


def test_invalid_npy_headers_are_rejected(tmp_path: Path) -> None:
    def npy(shape: str, descr: str = "<f4", body: bytes = b"\0" * 8) -> bytes:
        text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"
        text = text.ljust(117) + "\n"
        return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + body

    for bad in (
        npy("(9223372036854775808,)"),
        npy("(4294967296, 4294967296)"),
        npy("(-2,)"),
        npy("(3,)"),
        npy("(2,)", "|O"),
        npy("__import__('os').getcwd()"),
        npy(f"({'1, ' * 10_000})"),
        b"\x93NUMPY\x09\x00" + b"\0" * 100,
        b"",
    ):
        with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
            archive.writestr("embedding/kernel.npy", bad)
        with pytest.raises(CheckpointError) as caught:
            read_info(tmp_path / "x.npz")
        assert "allow_pickle=True" not in str(caught.value)  # numpy's advice
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive, pytest.warns(UserWarning):
        archive.writestr("a.npy", npy("(2,)"))
        archive.writestr("a.npy", npy("(2,)"))
    with pytest.raises(CheckpointError, match="contains the array 'a' twice"):
        read_info(tmp_path / "x.npz")


class BlockedPickle:
    """A pickle that uses a module for which torch has an error message of its own."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("exit 1",)


class MaliciousPickle:
    """A pickle that would run code when loaded."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('ran')",)


@pytest.mark.parametrize("zipped", [True, False])
def test_malicious_pickle_is_rejected(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "bomb.pth"
    torch.save({"model": MaliciousPickle()}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r"\(exec\); nothing in it was run"):
        convert(path, tmp_path / "out")
    torch.save({"model": BlockedPickle()}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match="nothing in it was run") as caught:
        convert(path, tmp_path / "out")
    assert "weights_only" not in str(caught.value)
    torch.save({"model": torch.nn.Linear(2, 2)}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r"\(torch.nn.modules.linear.Linear\)"):
        convert(path, tmp_path / "out")
    endless: dict[str, object] = {}
    endless["model"] = endless
    wide: dict[str, object] = {}
    for _ in range(3):
        wide = {f"{i}": wide for i in range(2000)}  # 2000^3 paths
    for content in ({"optimizer": 3, "epoch": 1}, endless, {"model": wide}, wide):
        torch.save(content, path)
        with pytest.raises(CheckpointError, match="no dictionary of tensors"):
            convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_torchscript_and_pt2_archives_are_rejected(tmp_path: Path) -> None:
    """OpenAI released CLIP as TorchScript."""
    model, image = torch.nn.Linear(2, 2), torch.zeros(1, 2)
    torch.jit.trace(model, image).save(str(tmp_path / "ViT-B-32.pt"))
    torch.export.save(torch.export.export(model, (image,)), tmp_path / "vit.pt2")
    for name, kind in {"ViT-B-32.pt": "TorchScript", "vit.pt2": ".pt2"}.items():
        with pytest.raises(CheckpointError, match=f"a {kind} archive") as error:
            convert(tmp_path / name, tmp_path / "out")
        assert "state_dict()" in str(error.value.hint) and not (tmp_path / "out").exists()


def test_float16_overflow_is_rejected(tmp_path: Path) -> None:
    folder = shutil.copytree(TIMM_VIT, tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    tensors["norm.bias"][3] = 1e5
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="norm.bias"):
        convert(folder, tmp_path / "out", changes=Changes(dtype="float16"))
    assert not (tmp_path / "out").exists()


def test_quantized_weights_are_rejected(tmp_path: Path) -> None:
    folder = shutil.copytree(TIMM_VIT, tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    quantized = {"blocks.0.attn.qkv.weight": tensors["blocks.0.attn.qkv.weight"].to(torch.int8)}
    save_file(tensors | quantized, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="qkv.weight"):
        read_info(folder)


@pytest.mark.parametrize("target", ["x.safetensors", "x.npz", "x"])
@pytest.mark.parametrize("max_bytes", [0, 1, 40_000])
def test_full_disk_leaves_no_partial_output(tmp_path: Path, target: str, max_bytes: int) -> None:
    """A limit on file sizes stands in for a full disk, which fails the same way. An existing target
    is left unchanged."""
    old, new = tmp_path / target, tmp_path / f"new-{target}"
    convert(TIMM_VIT, old)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, limit[1]))
    try:
        for path, force in ((old, True), (new, False)):
            with pytest.raises(OutputError, match="cannot be written: File too large") as caught:
                convert(TIMM_VIT, path, force=force)
            assert str(caught.value).startswith(str(path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, previous)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert [p.name for p in tmp_path.iterdir()] == [target]

"""Bad checkpoints, as `vit convert` and `vit resize-posemb` answer them: a line or two on standard
error, exit code 1, nothing written."""

from __future__ import annotations

import errno
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import Result

from vitcli.checkpoints import tensor_file

GOLDEN = Path(__file__).parents[1] / "golden"
TIMM = GOLDEN / "timm_vit_default" / "model.safetensors"
NPZ = GOLDEN / "vit_jax_token" / "checkpoint.npz"
POSITIONS = "Transformer/posembed_input/pos_embedding"
Vit = Callable[..., Result]


def commands(path: Path, *words: object) -> list[tuple[object, ...]]:
    """Both, from a file to one beside it."""
    suffix = path.suffix if path.suffix == ".npz" else ".safetensors"
    out = path.with_name(f"out{suffix}")
    resize = ("resize-posemb", path, "--grid", 6, "-o", out, *words)
    return [("convert", path, out, *words), resize]


def assert_refused(vit: Vit, folder: Path, *words: object, said: str) -> str:
    before = {path: path.stat().st_size for path in folder.rglob("*")}
    result = vit(*words)
    assert (result.exit_code, result.stdout) == (1, ""), words
    assert result.stderr.startswith("error: ") and len(result.stderr.splitlines()) <= 2
    assert said in result.stderr and "unexpected " not in result.stderr, result.stderr
    assert {path: path.stat().st_size for path in folder.rglob("*")} == before
    return result.stderr


def safetensors(folder: Path, **changed: Any) -> Path:
    """The golden file with another entry for its position embeddings in the header."""
    data = TIMM.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["pos_embed"].update(changed)
    text = json.dumps(header).encode()
    path = folder / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
    return path


def npz(folder: Path, **changed: Any) -> Path:
    arrays = {**np.load(NPZ), **changed}
    np.savez(folder / "x.npz", **{n: a for n, a in arrays.items() if a is not None})
    return folder / "x.npz"


def duplicate(folder: Path) -> Path:
    path = safetensors(folder)
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    entry = json.dumps(json.loads(data[8:end])["pos_embed"]).encode()
    text = data[8 : end - 1] + b', "pos_embed": ' + entry + b"}"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
    return path


def bomb(folder: Path) -> Path:
    zeros = {POSITIONS: np.zeros((1, 500_000, 48), np.float32)}
    np.savez_compressed(folder / "x.npz", **{**np.load(NPZ), **zeros})
    return folder / "x.npz"


class RunsCode:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise SystemExit('ran')",)


def pickled(folder: Path) -> Path:
    import torch

    torch.save({"state_dict": {"pos_embed": RunsCode()}}, folder / "x.pth")
    return folder / "x.pth"


BAD: dict[str, tuple[Callable[[Path], Path], str]] = {
    "offsets that overlap": (lambda f: safetensors(f, data_offsets=[4, 4 + 17 * 192]), "overlaps"),
    "offsets beyond the end": (
        lambda f: safetensors(f, data_offsets=[2**40, 2**40 + 17 * 192]),
        "leaves a gap",
    ),
    "negative offsets": (lambda f: safetensors(f, data_offsets=[-(17 * 192), 0]), "bad offsets"),
    "offsets of 2^63": (lambda f: safetensors(f, data_offsets=[2**63, 2**63 + 9]), "bad offsets"),
    "a shape of 2^63": (lambda f: safetensors(f, shape=[1, 2**63, 48]), "bad shape"),
    "another shape": (lambda f: safetensors(f, shape=[1, 18, 48]), "does not take the"),
    "a key twice": (duplicate, "'pos_embed' stands twice"),
    "a pickle that runs code": (pickled, "which could run code: it is not read (it asks for"),
    "a zip bomb": (bomb, "would inflate to 96,"),
    "no square": (
        lambda f: npz(f, **{POSITIONS: np.zeros((1, 1 + 192, 48), np.float32)}),
        "take --old-grid ROWSxCOLUMNS",
    ),
    "no head's bias": (lambda f: npz(f, **{"head/bias": None}), "1 missing: head/bias (10)"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_both_commands_refuse(vit: Vit, tmp_path: Path, name: str) -> None:
    make, said = BAD[name]
    path = make(tmp_path)
    for words in commands(path):
        assert str(path) in assert_refused(vit, tmp_path, *words, said=said)


@pytest.mark.parametrize("source", [TIMM, NPZ], ids=["safetensors", "npz"])
def test_cut_at_every_tenth(vit: Vit, tmp_path: Path, source: Path) -> None:
    data, path = source.read_bytes(), tmp_path / f"x{source.suffix}"
    for tenth in range(10):
        path.write_bytes(data[: len(data) * tenth // 10])
        for words in commands(path):
            assert_refused(vit, tmp_path, *words, said=str(path))


def test_values_that_are_not_numbers_are_warned_of(vit: Vit, tmp_path: Path) -> None:
    table = np.load(NPZ)[POSITIONS].copy()
    table[0, 3, 7] = np.nan
    path = npz(tmp_path, **{POSITIONS: table})
    for words in commands(path, "--force"):
        result = vit(*words)
        assert result.exit_code == 0 and (tmp_path / "out.npz").is_file()
        assert (
            f"warning: {path}: {POSITIONS} holds values that are not numbers (NaN)" in result.stderr
        )


def test_no_position_embeddings_at_all(vit: Vit, tmp_path: Path) -> None:
    header = tensor_file.read_header(TIMM)
    tensors = {
        n: tensor_file.read_tensor(TIMM, header, n) for n in header.tensors if n != "pos_embed"
    }
    tensor_file.write(tmp_path / "x.safetensors", {n: np.array(t) for n, t in tensors.items()}, {})
    converts, resizes = commands(tmp_path / "x.safetensors")
    for words in (converts, resizes):  # they may be rotary ones
        assert_refused(vit, tmp_path, *words, said="has no position embeddings")


def test_what_exists_and_a_disk_that_is_full(
    vit: Vit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = safetensors(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        for words in commands(path):
            assert_refused(vit, tmp_path, *words, said="cannot be written: No space left on device")
    (tmp_path / "out.safetensors").write_text("mine")
    for words in commands(path):
        assert_refused(vit, tmp_path, *words, said="exists already\nhint: --force replaces it")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        for words in commands(path, "--force"):
            assert_refused(vit, tmp_path, *words, said="No space left on device")
    assert (tmp_path / "out.safetensors").read_text() == "mine"
    for words in commands(path, "--force"):
        assert vit(*words).exit_code == 0


def test_an_archive_with_a_pickle_under_an_arrays_name(vit: Vit, tmp_path: Path) -> None:
    objects = np.array([RunsCode()], dtype=object)
    np.savez(tmp_path / "whole.npz", **{"embedding/kernel": objects})
    with (
        zipfile.ZipFile(tmp_path / "whole.npz") as old,
        zipfile.ZipFile(tmp_path / "x.npz", "w") as new,
    ):
        new.writestr("embedding/kernel.npy", old.read("embedding/kernel.npy"))
    for words in commands(tmp_path / "x.npz"):
        assert_refused(vit, tmp_path, *words, said="holds Python objects, which could run code")

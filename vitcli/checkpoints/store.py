"""Files of named arrays: safetensors (single or sharded), npz, torch pickles.

The kind of a file is detected from its first bytes. Arrays are read lazily, one at a time.
To add a kind, write a module for it, detect it in `detect_kind`, list it in the tables below, and
add its suffix to `weight_files.py`.
"""

from __future__ import annotations

import codecs
import contextlib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitcli.checkpoints import npz, shards, tensor_file
from vitcli.checkpoints.info import Resized
from vitcli.checkpoints.tensor_file import RESIZE_KEY, Store, check_types, require_file
from vitcli.errors import CheckpointError, wrap_os_errors
from vitcli.typed_json import from_json, parse

if TYPE_CHECKING:
    import numpy as np


def open_store(path: Path) -> Store:
    """Open a file of any kind.

    Raises:
        CheckpointError: the file is damaged or not a checkpoint.
    """
    return READERS[detect_kind(path)](path)


def detect_kind(path: Path) -> str:
    """Detect the kind of a file from its first bytes and, for a zip archive, its members.

    Raises:
        CheckpointError: the file cannot be read, is of an unknown kind, or is a Git LFS pointer.
    """
    with wrap_os_errors(CheckpointError, "cannot be read", path):
        require_file(path)
        with open(path, "rb") as file:
            start = file.read(512)
    if not start:
        raise CheckpointError("the file is empty", where=path)
    if start.startswith(b"PK\x03\x04"):
        with npz.checkpoint_errors(path), zipfile.ZipFile(path) as archive:
            has_arrays = any(name.endswith(".npy") for name in archive.namelist())
        return "npz" if has_arrays else "pickle"
    if start.startswith(b"\x80") and start[8:9] != b"{":  # not a safetensors header
        return "pickle"
    if start.startswith(b"{"):
        return "shards"
    description, hint = _describe_other_file(start)
    if description:
        raise CheckpointError(description, where=path, hint=hint)
    return "safetensors"


def _describe_other_file(start: bytes) -> tuple[str, str | None]:
    """Describe a file that is not a checkpoint, with a hint; ("", None) if it may be one."""
    if start.startswith(b"version https:/"):
        return "a Git LFS pointer, not the file itself", "download the file with `git lfs pull`"
    with contextlib.suppress(UnicodeDecodeError):
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(start)
        # A safetensors file has a zero byte among its first eight bytes.
        if all(character.isprintable() or character.isspace() for character in text):
            is_html = text.lstrip().lower().startswith(("<!doctype", "<html"))
            hint = "download the file itself instead of its page" if is_html else None
            return f"{'a web page' if is_html else 'a text file'}, not a checkpoint", hint
    if len(start) > 8 and start[8:9] != b"{":
        if start[0] == 8 and start[2] == 0x12:  # the tags of ir_version and producer_name
            return "an ONNX program, not a checkpoint", "use the checkpoint it was exported from"
        return "not a checkpoint: neither safetensors, npz nor pickle", None
    return "", None


def recorded_resize(store: Store) -> dict[str, Any] | None:
    """The `Resized` record of position embeddings in a file's metadata, if there is one."""
    try:
        record: dict[str, Any] | None = parse(store.metadata.get(RESIZE_KEY, "null"))
        from_json(Resized | None, record)
    except ValueError:
        return None
    return record


def _open_pickle(path: Path) -> Store:
    from vitcli.checkpoints.pickles import read_pickle

    return read_pickle(path)


def files_of(path: Path) -> list[Path]:
    """The files of a checkpoint: the file itself and, for an index, its shards."""
    if detect_kind(path) != "shards":
        return [path]
    return [path, *(path.with_name(name) for name in sorted(set(shards.read_index(path).values())))]


READERS = {
    "safetensors": tensor_file.read_header,
    "shards": shards.open_shards,
    "npz": npz.open_npz,
    "pickle": _open_pickle,
}
WRITERS = {".safetensors": tensor_file.write, ".npz": npz.write}
"""Suffix -> function that writes such a file."""


def rewrite(
    store: Store, target: Path, changed: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Write a copy of a file with some arrays replaced and metadata added; shards become one file.

    Raises:
        CheckpointError: the file is damaged.
        OutputError: the target cannot be written.
    """
    check_types(store.tensors, store.path)  # also those outside the model
    write = npz.write if store.kind == "npz" else tensor_file.write
    write(target, {**store.tensors, **changed}, {**store.metadata, **metadata})

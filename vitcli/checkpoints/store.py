"""Files that hold named arrays: safetensors (whole or in shards), npz, torch pickles.

The kind of a file is recognised by its first bytes. Arrays are read one at a time, when needed.
A new kind is a module, recognised in `kind_of` and listed in the tables below; its suffix goes to
`weight_files.py`.
"""

from __future__ import annotations

import codecs
import contextlib
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitcli.atomic import write_json
from vitcli.checkpoints import npz, shards, tensor_file
from vitcli.checkpoints.info import Resized
from vitcli.checkpoints.tensor_file import RECORD, Store, check_types, require_file
from vitcli.errors import CheckpointError
from vitcli.typed_json import from_json, parse

if TYPE_CHECKING:
    import numpy as np


def open_store(path: Path) -> Store:
    """The arrays of a file of any kind.

    Raises:
        CheckpointError: it is damaged or not a checkpoint.
    """
    return READERS[kind_of(path)](path)


def kind_of(path: Path) -> str:
    """The kind of a file, by its first bytes and, for a zip archive, by its members.

    Raises:
        CheckpointError: it cannot be read, is of no known kind, or is a pointer of git lfs.
    """
    try:
        require_file(path)
        with open(path, "rb") as file:
            start = file.read(512)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}", where=path) from error
    if not start:
        raise CheckpointError("the file is empty", where=path)
    if start.startswith(b"PK\x03\x04"):
        with npz.reading(path), zipfile.ZipFile(path) as archive:
            arrays = any(name.endswith(".npy") for name in archive.namelist())
        return "npz" if arrays else "pickle"
    if start.startswith(b"\x80") and start[8:9] != b"{":  # no length of a header of JSON
        return "pickle"
    if start.startswith(b"{"):
        return "shards"
    what, hint = _other_kind(start)
    if what:
        raise CheckpointError(what, where=path, hint=hint)
    return "safetensors"


def _other_kind(start: bytes) -> tuple[str, str | None]:
    """What a file is that begins so and is no checkpoint, and a hint; ("", None) if it may be."""
    if start.startswith(b"version https:/"):
        return "a Git LFS pointer, not the file itself", "download the file with `git lfs pull`"
    with contextlib.suppress(UnicodeDecodeError):
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(start)
        # A safetensors file has a zero byte among its first eight.
        if all(character.isprintable() or character.isspace() for character in text):
            page = text.lstrip().lower().startswith(("<!doctype", "<html"))
            hint = "download the file itself instead of its page" if page else None
            return f"{'a web page' if page else 'a text file'}, not a checkpoint", hint
    if len(start) > 8 and start[8:9] != b"{":
        return "not a checkpoint: neither safetensors, npz nor pickle", None
    return "", None


def recorded(store: Store) -> dict[str, Any] | None:
    """How the position embeddings of a file were resized, if it is recorded; a `Resized`."""
    try:
        found: dict[str, Any] | None = parse(store.metadata.get(RECORD, "null"))
        from_json(Resized | None, found)
    except ValueError:
        return None
    return found


def _open_pickle(path: Path) -> Store:
    from vitcli.checkpoints.pickles import read_pickle

    return read_pickle(path)


def files_of(path: Path) -> list[Path]:
    """A file of weights; of an index, its shards too."""
    if kind_of(path) != "shards":
        return [path]
    return [path, *(path.with_name(name) for name in sorted(set(shards.read_index(path).values())))]


READERS = {
    "safetensors": tensor_file.read_header,
    "shards": shards.open_shards,
    "npz": npz.open_npz,
    "pickle": _open_pickle,
}
COPIES = {"safetensors": ".safetensors", "shards": "", "npz": ".npz"}
"""The suffix of a changed copy of each kind, "" for a directory; a pickle is only read."""
WRITERS = {".safetensors": tensor_file.write, ".npz": npz.write}
"""How a file is written, by its suffix."""


def rewrite(
    store: Store, target: Path, changed: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Writes a file again with these arrays in place of its own, and this metadata added; of
    shards the index and those that change.

    Raises:
        CheckpointError: the file is damaged.
        OutputError: the target cannot be written.
    """
    if store.kind != "shards":
        check_types(store.tensors, store.path)  # also of what is not part of the model
        write = WRITERS[COPIES[store.kind]]
        return write(target, {**store.tensors, **changed}, {**store.metadata, **metadata})
    names, index = shards.read_index(store.path), parse(store.path.read_bytes())
    for file in sorted({names[name] for name in changed}):
        new = {name: array for name, array in changed.items() if names[name] == file}
        shard = tensor_file.read_header(store.path.with_name(file))
        rewrite(shard, target.with_name(file), new, metadata)
    about = index.get("metadata")
    if isinstance(about, dict) and isinstance(about.get("total_size"), int):
        for name, array in changed.items():
            old = math.prod(store.tensors[name].shape)
            about["total_size"] += array.itemsize * (array.size - old)
    write_json(target, index)

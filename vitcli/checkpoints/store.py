"""Files that hold named arrays: safetensors (whole or in shards), npz, torch pickles.

The kind of a file is recognised by its first bytes. Arrays are read one at a time, when needed.
A new kind is recognised in `kind_of` and opened by an entry in `OPEN`; its suffix goes to
`weight_files.py`.
"""

from __future__ import annotations

import codecs
import contextlib
import math
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitcli.atomic import whole_file
from vitcli.checkpoints.info import Resized
from vitcli.checkpoints.tensor_file import (
    LazyTensor,
    Store,
    numpy_dtype,
    read_header,
    tensor_bytes,
)
from vitcli.errors import CheckpointError, VitError
from vitcli.typed_json import from_json, parse
from vitcli.weight_files import weights_among

if TYPE_CHECKING:
    import numpy as np

MOST_INFLATED = 60
"""A zip archive that inflates to more than this many times its size is refused as a bomb: weights
hardly compress, except for heads of zeros."""
RECORD = "posemb_resize"
"""Key of the metadata under which a resize is recorded where a layout has no place for it."""


def open_store(path: Path) -> Store:
    """The arrays of a file of any kind.

    Raises:
        CheckpointError: it is damaged or not a checkpoint.
    """
    return OPEN[kind_of(path)](path)


def kind_of(path: Path) -> str:
    """The kind of a file, by its first bytes and, for a zip archive, by its members.

    Raises:
        CheckpointError: it cannot be read, is of no known kind, or is a pointer of git lfs.
    """
    try:
        _require_file(path)
        with open(path, "rb") as file:
            start = file.read(512)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}", where=path) from error
    if not start:
        raise CheckpointError("the file is empty", where=path)
    if start.startswith(b"PK\x03\x04"):
        with _reading(path), zipfile.ZipFile(path) as archive:
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


def _require_file(path: Path) -> None:
    """Raises CheckpointError for a pipe or a device, which might make a reader wait for ever."""
    if path.exists() and not path.is_file():
        raise CheckpointError("not a regular file", where=path)


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


# ---------------------------------------------------------------------------------------------
# Shards of safetensors


def read_index(path: Path) -> dict[str, str]:
    """Names of tensors and of the files that they are in, from `model.safetensors.index.json`.

    Raises:
        CheckpointError: it is not such an index, or names files outside its directory.
    """
    try:
        index = parse(path.read_bytes())
        if "weight_map" not in index:
            beside = weights_among(file.name for file in path.parent.iterdir())
            raise CheckpointError(
                "neither a checkpoint nor an index of safetensors files",
                where=path,
                hint=f"to load the model's directory, pass {path.parent}" if beside else None,
            )
        names: dict[str, str] = from_json(dict[str, str], index["weight_map"])
        if any(not file or Path(file).name != file for file in names.values()):
            raise ValueError("it names files outside its directory")
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"not a valid index of safetensors files: {error}", where=path
        ) from error
    return names


def files_of(path: Path) -> list[Path]:
    """A file of weights; of an index, its shards too."""
    if kind_of(path) != "shards":
        return [path]
    return [path, *(path.with_name(name) for name in sorted(set(read_index(path).values())))]


def _open_shards(path: Path) -> Store:
    """The tensors that an index finds in several files."""
    names, shards, metadata = read_index(path), {}, dict[str, str]()
    for file in set(names.values()):
        _require_file(path.with_name(file))
        header = read_header(path.with_name(file))
        shards[file] = header.tensors
        metadata |= {key: text for key, text in header.metadata.items() if key == RECORD}
    missing = [name for name, file in names.items() if name not in shards[file]]
    if missing:
        raise CheckpointError(
            f"{len(missing)} tensors are missing from the files in the index, the first is "
            f"{missing[0]}",
            where=path,
        )
    tensors = {name: shards[file][name] for name, file in names.items()}
    return Store(path, "shards", tensors, metadata)


# ---------------------------------------------------------------------------------------------
# npz


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Whatever zipfile and numpy raise on a damaged file becomes a CheckpointError."""
    try:
        yield
    except (VitError, MemoryError):
        raise
    except Exception as error:
        raise CheckpointError(f"damaged npz file: {error}", where=path) from error


def _open_npz(path: Path) -> Store:
    """The arrays of an .npz file.

    Raises:
        CheckpointError: it is damaged, holds Python objects, or inflates beyond reason.
    """
    with _reading(path):
        archive = zipfile.ZipFile(path)
        members = [m for m in archive.infolist() if m.filename.endswith(".npy")]
        inflated = sum(member.file_size for member in members)
        if inflated > MOST_INFLATED * path.stat().st_size + (1 << 26):
            raise CheckpointError(
                f"would decompress to {inflated:,} bytes, which is suspiciously large", where=path
            )
        found: dict[str, LazyTensor] = {}
        for member in members:
            name = member.filename.removesuffix(".npy")
            if name in found:
                raise CheckpointError(f"contains the array '{name}' twice", where=path)
            found[name] = _npy(archive, member, path)
        lines = archive.comment.decode(errors="replace").splitlines()
        metadata = {key: value for key, _, value in (line.partition(" ") for line in lines)}
        return Store(path, "npz", found, metadata)


def _npy(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> LazyTensor:
    """One array of an archive, of which the header is read."""
    from numpy.lib import format as npy

    with archive.open(member) as file:
        version = npy.read_magic(file)
        header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = header(file)
        start = file.tell()
    if dtype.hasobject:
        raise CheckpointError(
            f"'{member.filename}' contains Python objects, which could run code", where=path
        )
    if start + math.prod(shape) * dtype.itemsize != member.file_size:
        raise CheckpointError(
            f"the size of '{member.filename}' does not match its shape {shape}", where=path
        )
    # As big_vision stores it, and numpy names it.
    dtype = numpy_dtype("bfloat16") if dtype.str == "|V2" else dtype

    def read() -> np.ndarray:
        import numpy as np

        with _reading(path):  # zipfile verifies the checksum
            array = np.frombuffer(archive.read(member), dtype, offset=start)
            return array.reshape(shape, order="F" if fortran else "C")

    return LazyTensor(dtype.name, tuple(shape), read)


def write_npz(path: str | Path, tensors: Mapping[str, LazyTensor]) -> None:
    """Writes an uncompressed .npz file whole or not at all, one array at a time.

    Raises:
        OutputError: it cannot be written.
    """
    with whole_file(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, tensor in tensors.items():
            # Dated 1980, ZipInfo's default: the same arrays make the same file.
            _write_array(archive, zipfile.ZipInfo(f"{name}.npy"), tensor)


def rewrite_npz(
    source: Path, target: Path, changed: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Writes an .npz with these arrays in place of its own; the other members, their order and how
    they are compressed stay. The metadata becomes lines of the archive's comment, which other
    readers pass over.

    Raises:
        CheckpointError: the source is damaged.
        OutputError: the target cannot be written.
    """
    with (
        _reading(source),
        zipfile.ZipFile(source) as old,
        whole_file(target) as file,
        zipfile.ZipFile(file, "w") as new,
    ):
        for member in old.infolist():
            copy = zipfile.ZipInfo(member.filename, member.date_time)
            copy.compress_type, copy.external_attr = member.compress_type, member.external_attr
            name = member.filename.removesuffix(".npy")
            if name in changed:
                _write_array(new, copy, changed[name])
                continue
            zip64 = member.file_size > 1 << 30
            with old.open(member) as data, new.open(copy, "w", force_zip64=zip64) as out:
                shutil.copyfileobj(data, out, 1 << 20)
        keys = {key.encode() for key in metadata}
        kept = [line for line in old.comment.splitlines() if line.partition(b" ")[0] not in keys]
        new.comment = b"\n".join([*kept, *(f"{k} {v}".encode() for k, v in metadata.items())])


def _write_array(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, tensor: np.ndarray | LazyTensor
) -> None:
    """Appends an array to an archive as a .npy file."""
    from numpy.lib import format as npy

    data, name = tensor_bytes(tensor), str(tensor.dtype)
    descr = "|V2" if name == "bfloat16" else numpy_dtype(name).str
    about = {"descr": descr, "fortran_order": False, "shape": tuple(tensor.shape)}
    with archive.open(member, "w", force_zip64=data.nbytes > 1 << 30) as out:
        npy.write_array_header_1_0(out, about)
        out.write(data)


# ---------------------------------------------------------------------------------------------
# Kinds

OPEN: dict[str, Callable[[Path], Store]] = {
    "safetensors": read_header,
    "shards": _open_shards,
    "npz": _open_npz,
    "pickle": _open_pickle,
}
"""How each kind of file is opened."""

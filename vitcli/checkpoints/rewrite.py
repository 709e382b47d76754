"""A file of tensors in which some are changed: all other bytes are copied as they lie.

What was resized is recorded in the file, where a layout has no description of the model: under
"posemb_resize" in the metadata of a safetensors file, and as the comment of the zip archive that an
.npz is, which numpy and the authors' readers pass over.
"""

from __future__ import annotations

import contextlib
import copy
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitcli.atomic import whole_file
from vitcli.checkpoints import npz, tensor_file
from vitcli.checkpoints.copying import copy_range
from vitcli.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np

RECORD = "posemb_resize"


def copy_file(source: Path, target: Path) -> None:
    """A copy, whole or not at all. Raises OutputError."""
    with open(source, "rb") as old, whole_file(target) as new:
        copy_range(old, new, 0, source.stat().st_size)


def rewrite_safetensors(
    source: Path, target: Path, changed: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> int:
    """Writes `source` with these tensors in place of its own, in its order; returns by how many
    bytes the tensors grew.

    Args:
        changed: of the element types that they have in the file.
        metadata: what the header says beside the tensors.

    Raises:
        CheckpointError: the source is damaged.
        OutputError: the target cannot be written.
    """
    header = tensor_file.read_header(source)
    order = sorted(header.tensors, key=lambda name: header.tensors[name][2:])
    offsets, end = {}, 0
    for name in order:
        spec = header.tensors[name]
        length = changed[name].nbytes if name in changed else spec.end - spec.start
        offsets[name] = [end, end := end + length]
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    for name, spec in header.tensors.items():
        shape = list(changed[name].shape if name in changed else spec.shape)
        entries[name] = {"dtype": spec.dtype, "shape": shape, "data_offsets": offsets[name]}
    start = tensor_file.header_bytes(entries, target)
    # The source is closed before it is replaced, if it is the target: Windows asks for that.
    with whole_file(target) as new, open(source, "rb") as old:
        new.write(start)
        kept = 0  # up to here the source has been dealt with
        for name in [name for name in order if name in changed]:
            spec = header.tensors[name]
            copy_range(old, new, header.data_start + kept, spec.start - kept)
            new.write(tensor_file.tensor_bytes(changed[name]))
            kept = spec.end
        size = max((spec.end for spec in header.tensors.values()), default=0)
        copy_range(old, new, header.data_start + kept, size - kept)
    return end - size


def rewrite_npz(
    source: Path, target: Path, changed: Mapping[str, np.ndarray], record: Mapping[str, Any]
) -> None:
    """Writes an .npz with these arrays in place of its own; the other members are copied as they
    lie, compressed or not, and the record becomes (the last line of) the archive's comment.

    Raises:
        CheckpointError: the source is damaged.
        OutputError: the target cannot be written.
    """
    with open(source, "rb") as old, zipfile.ZipFile(old) as archive:
        members = sorted(archive.infolist(), key=lambda member: member.header_offset)
        ends = [*(member.header_offset for member in members[1:]), archive.start_dir]
        with whole_file(target) as file, zipfile.ZipFile(file, "w", allowZip64=True) as new:
            for member, end in zip(members, ends, strict=True):
                if end <= member.header_offset:
                    raise CheckpointError("is a damaged npz file: members overlap", where=source)
                name = member.filename.removesuffix(".npy")
                if name in changed:
                    npz.write_array(new, npz.member_like(member), changed[name])
                    continue
                moved = copy.copy(member)
                moved.header_offset = file.tell()
                copy_range(old, file, member.header_offset, end - member.header_offset)
                new.filelist.append(moved)
                new.NameToInfo[moved.filename] = moved
                new.start_dir = file.tell()
            new.filelist = [new.NameToInfo[member.filename] for member in archive.infolist()]
            lines = [line for line in archive.comment.splitlines() if not line.startswith(_MARK)]
            new.comment = b"\n".join([*lines, _MARK + record_text(record).encode()])


_MARK = f"{RECORD} ".encode()
"""What our line of an archive's comment begins with."""


def record_text(record: Mapping[str, Any]) -> str:
    """A record as a file has it."""
    return json.dumps(record, separators=(",", ":"))


def recorded(path: Path, kind: str) -> dict[str, Any] | None:
    """How the position embeddings of a file were resized, `{"method", "from", "to"}`, if it says.

    Args:
        kind: as `store.kind_of` tells it.
    """
    text: str | bytes = ""
    if kind == "safetensors":
        text = tensor_file.read_header(path).metadata.get(RECORD, "")
    elif kind == "npz":
        with contextlib.suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
            lines = archive.comment.splitlines()
            text = b"".join(line.removeprefix(_MARK) for line in lines if line.startswith(_MARK))
    try:
        found = json.loads(text)
        sizes = [found["from"], found["to"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if all(map(_is_size, sizes)) else None


def _is_size(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(n) is int for n in value)

"""`Source`, the common form of all datasets with random access: labeled images read by index.

Training visits images in a random permutation per epoch, so any image must be readable at any time.
A source is sent to worker processes, so it holds no open files. It stores packed arrays rather than
objects: tens of bytes per image.
"""

from __future__ import annotations

import array
import dataclasses
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from vitcli.config import ClassLabel
from vitcli.data.files import read_file
from vitcli.errors import DataError, ImageError

if TYPE_CHECKING:
    from vitcli.data.stream import Stream

Ints = npt.NDArray[np.int64]


class Names:
    """Strings packed into one byte array: 1.3 million file names take 40 MB instead of 150, and
    worker processes share them (reference counts of `str` objects would copy every page).

    Args:
        text: the strings, each followed by a zero byte.
        ends: (N,) indices of the zero bytes.
        rows: indices of the selected strings; None: all.
    """

    def __init__(self, text: npt.NDArray[np.uint8], ends: Ints, rows: Ints | None = None) -> None:
        self._text, self._ends, self._rows = text, ends, rows

    @classmethod
    def pack(cls, strings: Iterable[str]) -> Names:
        """Pack strings; undecodable bytes in file names (surrogates) are preserved."""
        text = bytearray()
        ends = array.array("q")
        for string in strings:
            text += string.encode("utf-8", "surrogateescape")
            ends.append(len(text))
            text.append(0)
        return cls(np.frombuffer(bytes(text), np.uint8), np.array(ends, np.int64))

    def __len__(self) -> int:
        return len(self._ends if self._rows is None else self._rows)

    def __getitem__(self, index: int) -> str:
        row = self.row(index)
        start = int(self._ends[row - 1]) + 1 if row else 0
        return self._text[start : self._ends[row]].tobytes().decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        # Not by indexing: that takes twice as long, which is seconds for a million strings.
        starts, ends = np.append(0, self._ends + 1)[:-1], self._ends
        if self._rows is not None:
            starts, ends = starts[self._rows], ends[self._rows]
        text, spans = self._text.data, zip(starts.data, ends.data, strict=True)
        return (str(text[start:end], "utf-8", "surrogateescape") for start, end in spans)

    def row(self, index: int) -> int:
        """The index of a string among all strings, before any selection."""
        return range(len(self))[index] if self._rows is None else int(self._rows[index])

    def select(self, indices: Ints) -> Names:
        """The strings at `indices`, sharing the text."""
        return Names(self._text, self._ends, indices if self._rows is None else self._rows[indices])

    def arrays(self) -> tuple[npt.NDArray[np.uint8], Ints]:
        """Return (text, ends), from which `Names(text, ends)` can be rebuilt."""
        return (self._text, self._ends) if self._rows is None else Names.pack(self).arrays()


class Reader(Protocol):
    """Reads images that are not files; must be picklable."""

    def read(self, row: int) -> bytes:
        """Read the encoded image (the bytes of a JPEG, PNG, ...) of a row. Raises ImageError."""
        ...


@dataclass(frozen=True, eq=False)
class Source:
    """Labeled images with random access."""

    classes: tuple[ClassLabel, ...]
    labels: Ints  # (N,), indices into `classes`
    names: Names  # location of each image, relative to `root` or absolute
    root: str | Path
    reader: Reader | None = None  # image i is its row names.row(i); None: the images are files

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> bytes:
        """Read the encoded image at `index`. Raises ImageError if it cannot be read."""
        if self.reader is not None:
            return self.reader.read(self.names.row(index))
        path = self.where(index)
        if os.path.exists(path) and not os.path.isfile(path):  # a pipe would block
            raise ImageError("not a file", where=path)
        return read_file(path)

    def where(self, index: int) -> str:
        """The full path of an image."""
        return os.path.join(self.root, self.names[index]).removeprefix(f".{os.sep}")

    def select(self, indices: Ints) -> Source:
        """The images at `indices`, in that order."""
        names = self.names.select(indices)
        return dataclasses.replace(self, labels=self.labels[indices], names=names)

    def counts(self) -> Ints:
        """int64 (K,): the number of images of each class."""
        return np.bincount(self.labels, minlength=len(self.classes)).astype(np.int64)

    def same_class(self, index: int) -> Iterator[int]:
        """Yield `index`, then the indices of the other images of its class, starting with the next
        one and wrapping around."""
        yield index
        members = np.flatnonzero(self.labels == self.labels[index])
        yield from np.roll(members, -1 - int(np.searchsorted(members, index)))[:-1].tolist()

    def fingerprint(self) -> str:
        """A short hash of names, labels and classes, which changes when the dataset does."""
        text, ends = self.names.arrays()
        digest = hashlib.sha256(repr(self.classes).encode())
        for values in (self.labels, np.delete(text, ends), ends - np.arange(len(ends))):
            digest.update(values.tobytes())
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class _ConcatReader:
    """The concatenated images of two sources."""

    first: Source
    second: Source

    def read(self, row: int) -> bytes:
        count = len(self.first)
        return self.first.read(row) if row < count else self.second.read(row - count)


def concat_sources(first: Source, second: Source) -> Source:
    """Concatenate two sources with the same classes; names become full paths."""
    labels = np.concatenate([first.labels, second.labels])
    names = Names.pack(source.where(i) for source in (first, second) for i in range(len(source)))
    return Source(first.classes, labels, names, "", _ConcatReader(first, second))


# ---------------------------------------------------------------------------------------------
# Splits


@dataclass(frozen=True)
class Dataset:
    """A dataset with its own splits, before any validation split is held out."""

    train: Source | Stream | None = None
    val: Source | None = None
    test: Source | None = None


_SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}


def split_of(word: str) -> str | None:
    """The split (train, val or test) for a directory name or a word of a file name, or None."""
    return _SPLIT_WORDS.get(word.lower())


def require_split(word: object, column: str, where: object) -> str:
    """The split for a value in a column of splits. Raises DataError if it is not a split."""
    if split := split_of(str(word)):
        return split
    hint = "use train, val or test, or rename the column"
    raise DataError(f"column '{column}': '{word}' is not a split", where=where, hint=hint)


def last_split(text: str, default: str = "train") -> str:
    """The split for the last split word in a text; `default` if there is none."""
    words = re.split(r"[^A-Za-z]+", text)
    return next((split for word in reversed(words) if (split := split_of(word))), default)


def group_by_split(files: Sequence[Path], root: Path | None) -> dict[str, list[Path]]:
    """Group files by the last split word (`last_split`) in their paths relative to `root`, or,
    without `root`, in their own and their directories' names (val/train-list.tar is training).
    Without such a word: train."""
    groups: dict[str, list[Path]] = {}
    for file in files:
        name = file.relative_to(root) if root else Path(*file.parts[-2:])
        groups.setdefault(last_split(str(name)), []).append(file)
    return {split: groups[split] for split in ("train", "val", "test") if split in groups}

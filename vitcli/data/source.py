"""What every dataset becomes: `Source`, labelled images read by index.

Training visits images in the order of a permutation drawn for each epoch, so any image must be
within reach at any time; and a source is sent to worker processes, so it holds no open files. In
memory it holds packed arrays: tens of bytes an image, not objects.
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
from vitcli.errors import ImageError

if TYPE_CHECKING:
    from vitcli.data.stream import Stream

Ints = npt.NDArray[np.int64]


class Names:
    """Strings as one block of bytes: 1.3 million file names take 40 MB instead of 150, and worker
    processes share them (reference counts of `str` objects would copy every page).

    Args:
        text: the strings, each followed by a byte 0.
        ends: (N,) where these bytes are.
        rows: which of the strings; None: all.
    """

    def __init__(self, text: npt.NDArray[np.uint8], ends: Ints, rows: Ints | None = None) -> None:
        self._text, self._ends, self._rows = text, ends, rows

    @classmethod
    def pack(cls, strings: Iterable[str]) -> Names:
        """Packs strings; undecodable bytes of file names (surrogates) survive."""
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
        row = range(len(self))[index] if self._rows is None else int(self._rows[index])
        start = int(self._ends[row - 1]) + 1 if row else 0
        return self._text[start : self._ends[row]].tobytes().decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))

    def select(self, indices: Ints) -> Names:
        """The strings at `indices`, sharing the text."""
        return Names(self._text, self._ends, indices if self._rows is None else self._rows[indices])

    def arrays(self) -> tuple[npt.NDArray[np.uint8], Ints]:
        """(text, ends), from which `Names(text, ends)` is rebuilt."""
        return (self._text, self._ends) if self._rows is None else Names.pack(self).arrays()


class Reader(Protocol):
    """Returns the encoded image (the bytes of a JPEG, PNG, ...) of a row; can be pickled."""

    def read(self, row: int) -> bytes:
        """The bytes of image `row`. Raises ImageError if they cannot be read."""
        ...


@dataclass(frozen=True)
class FileReader:
    """Each image is a file."""

    root: Path
    names: Names  # relative to root, or absolute

    def read(self, row: int) -> bytes:
        path = os.path.join(self.root, self.names[row])
        if os.path.exists(path) and not os.path.isfile(path):  # a pipe would block
            raise ImageError("not a file", where=path)
        return read_file(path)


@dataclass(frozen=True, eq=False)
class Source:
    """Labelled images, read by index."""

    classes: tuple[ClassLabel, ...]
    labels: Ints  # (N,), indices into `classes`
    names: Names  # where each image is, for messages
    reader: Reader
    root: str | Path  # what the names are relative to
    rows: Ints | None = None  # image i is row rows[i] of the reader; None: row i

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> bytes:
        """The encoded image at `index`."""
        return self.reader.read(index if self.rows is None else int(self.rows[index]))

    def where(self, index: int) -> str:
        """The full name of an image, for messages."""
        return os.path.join(self.root, self.names[index])

    def select(self, indices: Ints) -> Source:
        """The images at `indices`, in that order."""
        return dataclasses.replace(
            self,
            labels=self.labels[indices],
            names=self.names.select(indices),
            rows=indices if self.rows is None else self.rows[indices],
        )

    def counts(self) -> Ints:
        """int64 (K,): images of each class."""
        return np.bincount(self.labels, minlength=len(self.classes)).astype(np.int64)

    def same_class(self, index: int) -> Iterator[int]:
        """Image `index`, then the others of its class: the next one first, the first after the
        last."""
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
class _Joined:
    """The images of two sources, one after the other."""

    first: Source
    second: Source

    def read(self, row: int) -> bytes:
        count = len(self.first)
        return self.first.read(row) if row < count else self.second.read(row - count)


def join_sources(first: Source, second: Source) -> Source:
    """All images of two sources with the same classes, in order; names become full paths."""
    labels = np.concatenate([first.labels, second.labels])
    names = Names.pack(each.where(i) for each in (first, second) for i in range(len(each)))
    return Source(first.classes, labels, names, _Joined(first, second), root="")


# ---------------------------------------------------------------------------------------------
# Splits


@dataclass(frozen=True)
class Dataset:
    """A dataset as it is stored, with the splits that it names itself."""

    train: Source | Stream | None = None
    val: Source | None = None
    test: Source | None = None
    warnings: tuple[str, ...] = ()


_SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}


def split_of(word: str) -> str | None:
    """The split (train, val or test) that a directory's name, or a word of a file's, means."""
    return _SPLIT_WORDS.get(word.lower())


def last_split(text: str) -> str:
    """The split that the last such word of a text means; without such a word: train."""
    words = re.split(r"[^A-Za-z]+", text)
    return next((split for word in reversed(words) if (split := split_of(word))), "train")


def group_by_split(files: Sequence[Path], root: Path | None) -> dict[str, list[Path]]:
    """Files by the split that a word of their names below the directory `root` means, or of their
    own and their directories' names; the last such word counts (val/train-list.tar is training).
    Without such a word: train."""
    grouped: dict[str, list[Path]] = {}
    for file in files:
        name = file.relative_to(root) if root else Path(*file.parts[-2:])
        grouped.setdefault(last_split(str(name)), []).append(file)
    return {split: grouped[split] for split in ("train", "val", "test") if split in grouped}

"""What every data set becomes: `Source`, labelled images read by index.

Training visits the images in the order of a permutation that is drawn anew for each epoch, so
any image must be within reach at any time; and a source goes to worker processes, so it holds
no open files. What it holds in memory are packed arrays: tens of bytes an image, not objects.
"""

from __future__ import annotations

import array
import bisect
import dataclasses
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vitcli.config import ClassLabel
from vitcli.errors import ImageError

Ints = npt.NDArray[np.int64]

IMAGE_SUFFIXES = frozenset(
    ("avif", "bmp", "gif", "j2k", "jfif", "jp2", "jpe", "jpeg", "jpg", "pbm", "pgm", "png")
    + ("pnm", "ppm", "tif", "tiff", "webp")
)
"""File name endings (lower case, no dot) that are taken for images."""


class Names(Sequence[str]):
    """Strings as one block of bytes: 1.3 million file names take 40 MB instead of 150, and
    worker processes share them (reference counts of `str` objects would copy every page)."""

    def __init__(self, text: npt.NDArray[np.uint8], ends: Ints, rows: Ints | None = None) -> None:
        self._text = text
        self._ends = ends
        self._rows = rows

    @classmethod
    def pack(cls, strings: Iterable[str]) -> Names:
        """Packs strings; undecodable bytes of file names (surrogates) survive."""
        text = bytearray()
        ends = array.array("q")
        for string in strings:
            text += string.encode("utf-8", "surrogateescape")
            ends.append(len(text))
        return cls(np.frombuffer(bytes(text), np.uint8), np.array(ends, np.int64))

    @classmethod
    def join(cls, parts: Sequence[Names]) -> Names:
        """The strings of all parts, one after the other."""
        arrays = [part.arrays() for part in parts]
        lengths = [len(text) for text, _ in arrays]
        starts = np.cumsum([0, *lengths[:-1]])
        ends = [ends + start for (_, ends), start in zip(arrays, starts, strict=True)]
        return cls(np.concatenate([text for text, _ in arrays]), np.concatenate(ends))

    def __len__(self) -> int:
        return len(self._ends if self._rows is None else self._rows)

    def __getitem__(self, index: Any) -> Any:  # an int gives a str, a slice gives Names
        if isinstance(index, slice):
            return self.select(np.arange(len(self))[index])
        row = range(len(self))[index] if self._rows is None else int(self._rows[index])
        start = int(self._ends[row - 1]) if row else 0
        return self._text[start : self._ends[row]].tobytes().decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))

    def select(self, indices: Ints) -> Names:
        """The strings at `indices`, sharing the text."""
        rows = indices if self._rows is None else self._rows[indices]
        return Names(self._text, self._ends, np.asarray(rows, np.int64))

    def arrays(self) -> tuple[npt.NDArray[np.uint8], Ints]:
        """(text, ends): what `Names(text, ends)` rebuilds; of names that were not selected from."""
        if self._rows is not None:
            return Names.pack(self).arrays()
        return self._text, self._ends


class Reader(Protocol):
    """Gives the encoded image (the bytes of a JPEG, PNG, ...) of a row; can be pickled."""

    def read(self, row: int) -> bytes:
        """The bytes of image `row`.

        Raises:
            ImageError: the file is not there (any more) or cannot be read.
        """
        ...


@dataclass(frozen=True)
class FileReader:
    """Images in files of their own."""

    root: Path
    names: Names  # relative to root, or absolute

    def read(self, row: int) -> bytes:
        path = self.root / str(self.names[row])
        try:
            return path.read_bytes()
        except OSError as error:
            raise ImageError(f"cannot be read: {error.strerror}", where=path) from error


@dataclass(frozen=True, eq=False)
class Source:
    """Labelled images, read by index.

    labels: int64 (N,), indices into `classes`. names: where each image is, for messages.
    """

    classes: tuple[ClassLabel, ...]
    labels: Ints
    names: Names
    reader: Reader
    root: str | Path  # what the names are relative to
    rows: Ints | None = None  # image i is row rows[i] of the reader; None: row i

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> bytes:
        """The encoded image at `index`."""
        return self.reader.read(index if self.rows is None else int(self.rows[index]))

    def where(self, index: int) -> str:
        """The place of an image in full, for messages."""
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

    def others_of_class(self, index: int) -> Ints:
        """The other images of the same class, from the next one on; the first follow the last."""
        members = np.flatnonzero(self.labels == self.labels[index])
        return np.roll(members, -1 - int(np.searchsorted(members, index)))[:-1]

    def fingerprint(self) -> str:
        """A short hash of names, labels and classes: a changed data set has another one."""
        digest = hashlib.sha256(repr(self.classes).encode())
        for values in (self.labels, *self.names.arrays()):
            digest.update(values.tobytes())
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class _Joined:
    """The images of several sources, one after the other."""

    sources: tuple[Source, ...]
    starts: tuple[int, ...]

    def read(self, row: int) -> bytes:
        which = bisect.bisect_right(self.starts, row) - 1
        return self.sources[which].read(row - self.starts[which])


def join_sources(*sources: Source) -> Source:
    """All images of sources with the same classes, in order; names become full paths."""
    if len({source.classes for source in sources}) > 1:
        raise ValueError("the sources have different classes")
    labels = np.concatenate([source.labels for source in sources])
    names = Names.pack(source.where(i) for source in sources for i in range(len(source)))
    starts = np.cumsum([0, *(len(source) for source in sources[:-1])]).tolist()
    reader = _Joined(tuple(sources), tuple(starts))
    return Source(sources[0].classes, labels, names, reader, root="")


@dataclass(frozen=True)
class Dataset:
    """A data set as it lies on disk: the parts that it names itself, before any split."""

    train: Source | None = None
    val: Source | None = None
    test: Source | None = None
    warnings: tuple[str, ...] = ()


def is_image(name: str) -> bool:
    """Whether a file is named like an image."""
    return not name.startswith(".") and name.rpartition(".")[2].lower() in IMAGE_SUFFIXES


_PART_WORDS = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "test": "test",
    "testing": "test",
}


def split_of(word: str) -> str | None:
    """The part ("train", "val" or "test") that a folder's name, or a word of a file's, means."""
    return _PART_WORDS.get(word.lower())


def group_by_split(files: Iterable[Path], root: Path) -> dict[str, list[Path]]:
    """Files by the part that a word of their names below `root`, or of the file itself, means;
    the last such word counts (val/train-list.tar is training). Names that say nothing: train."""
    grouped: dict[str, list[Path]] = {}
    for file in files:
        inner = file.relative_to(root) if file.is_relative_to(root) and file != root else file.name
        words = re.split(r"[^A-Za-z]+", str(inner))
        part = next((part for word in reversed(words) if (part := split_of(word))), "train")
        grouped.setdefault(part, []).append(file)
    return {part: grouped[part] for part in ("train", "val", "test") if part in grouped}

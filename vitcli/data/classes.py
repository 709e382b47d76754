"""Classes of a data set: from folder names, files and labels, and matched to those of a model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vitcli.config import ClassLabel
from vitcli.data.source import Ints
from vitcli.errors import DataError

_SYNSET = re.compile(r"(n\d{8})(?:[ _.-]+(.+))?")


def class_of(name: str) -> ClassLabel:
    """The class that a folder stands for. "n01440764" and "n01440764_tench" keep the WordNet
    synset as their id; any other folder's name is both id and name."""
    match = _SYNSET.fullmatch(name)
    if match is None:
        return ClassLabel(name, name)
    return ClassLabel(match[1], (match[2] or match[1]).replace("_", " "))


def read_classes(path: Path) -> tuple[ClassLabel, ...]:
    """Classes in index order from a file with one a line: `id`, or `id TAB name`.

    Raises:
        DataError: not there, not text, empty, or an id twice.
    """
    lines = read_lines(path, "the list of classes")
    while lines and not lines[-1].strip():
        lines.pop()
    classes = []
    for number, line in enumerate(lines, 1):
        label, _, name = (part.strip() for part in line.partition("\t"))
        if not label:
            raise DataError(
                f"line {number} names no class",
                where=path,
                hint="each line holds the class of that index: its id, or id, tab and name",
            )
        classes.append(ClassLabel(label, name or class_of(label).name))
    if not classes:
        raise DataError("the list of classes is empty", where=path)
    require_unique_ids(classes, path)
    return tuple(classes)


def read_lines(path: Path, what: str) -> list[str]:
    """The lines of a file in UTF-8. Raises DataError, which says `what` cannot be read."""
    try:
        return path.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise DataError(f"{what} cannot be read: {reason}", where=path) from error


def require_unique_ids(classes: Sequence[ClassLabel], where: object) -> None:
    """Raises DataError if two classes have one id."""
    twice = [id for id, count in Counter(label.id for label in classes).items() if count > 1]
    if twice:
        raise DataError(f"{listed(twice)} stands for more than one class", where=where)


def listed(items: Iterable[object], limit: int = 5) -> str:
    """ "'a', 'b', 'c' and 7 more"."""
    texts = [f"'{item}'" for item in items]
    if len(texts) > limit:
        return f"{', '.join(texts[:limit])} and {len(texts) - limit:,} more"
    return f"{', '.join(texts[:-1])} and {texts[-1]}" if len(texts) > 1 else "".join(texts)


def name_labels(
    raw: Mapping[str, npt.NDArray[Any]], known: tuple[ClassLabel, ...] | None, where: object
) -> tuple[tuple[ClassLabel, ...], dict[str, Ints], list[str]]:
    """Turns what a file says of each image into classes and indices.

    Args:
        raw: the labels of each part, as an array of integers or of strings.
        known: the classes in index order, where a list of them came with the data. Integers are
            then indices into it; strings are matched by id, then by a name that is unique.
            Without, strings are ids of their own and integers are taken for indices.
        where: the data set, for messages.

    Returns:
        (classes, {part: int64 indices}, warnings)

    Raises:
        DataError: an index without a class, or a label that the list does not have.
    """
    numbers = all(labels.dtype.kind in "iu" for labels in raw.values())
    if not numbers:
        raw = {part: labels.astype(np.str_) for part, labels in raw.items()}
        ids = sorted({str(label) for labels in raw.values() for label in np.unique(labels)})
        classes = known or tuple(class_of(label) for label in ids)
        if known is None:
            require_unique_ids(classes, where)
        spelt = tuple(ClassLabel(label, label) for label in ids)
        if known is None:
            table = np.arange(len(ids))
        else:
            table = match_classes(spelt, classes, where, "the list of classes")
        return classes, {p: table[np.searchsorted(ids, labels)] for p, labels in raw.items()}, []
    lowest = min((int(labels.min()) for labels in raw.values() if len(labels)), default=0)
    highest = max((int(labels.max()) for labels in raw.values() if len(labels)), default=0)
    if lowest < 0 or (known is not None and highest >= len(known)):
        bad = lowest if lowest < 0 else highest
        valid = f"0 to {len(known) - 1}" if known else "0 and up"
        raise DataError(
            f"an image has the label {bad}, but the classes are {valid}",
            where=where,
            hint="give the list of classes that belongs to this data with --classes FILE",
        )
    indices = {part: labels.astype(np.int64) for part, labels in raw.items()}
    if known is not None:
        return known, indices, []
    if highest > 10 * sum(len(labels) for labels in raw.values()) + 1000:
        raise DataError(
            f"an image has the label {highest}, far more than there are images",
            where=where,
            hint="labels are indices of classes, 0 and up; or give names instead of numbers",
        )
    classes = tuple(ClassLabel(str(i), str(i)) for i in range(highest + 1))
    warning = (
        f"{where} does not name its classes: they are called 0 to {highest}; "
        "name them with --classes FILE (one class a line, in index order)"
    )
    return classes, indices, [warning]


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", " ")


def _first(name: str) -> str:
    """ "tench, Tinca tinca" is also called by its first name."""
    return _plain(name.split(",")[0])


class ClassIndex:
    """Finds classes by id, then by name."""

    def __init__(self, classes: Sequence[ClassLabel]) -> None:
        self.classes = classes
        self.by_id = {label.id: index for index, label in enumerate(classes)}
        self.by_name = _indices_by(classes, _plain)
        self.by_first_name = _indices_by(classes, _first)

    def find(self, label: ClassLabel) -> list[int]:
        """Indices of the classes that this may be: one, or those that share its name, or none."""
        if label.id in self.by_id:
            return [self.by_id[label.id]]
        return self.by_name.get(_plain(label.name)) or self.by_first_name.get(
            _first(label.name), []
        )


def _indices_by(
    classes: Sequence[ClassLabel], spelling: Callable[[str], str]
) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for index, label in enumerate(classes):
        found.setdefault(spelling(label.name), []).append(index)
    return found


def match_classes(
    theirs: Sequence[ClassLabel], ours: Sequence[ClassLabel], where: object, owner: str
) -> Ints:
    """int64 (len(theirs),): for each of their classes its index in ours, by id, then by a name
    that is unique in both.

    Raises:
        DataError: a class that is not there, or a name that several have: all are listed.
    """
    index = ClassIndex(ours)
    found = [index.find(label) for label in theirs]
    require_known(theirs, found, ours, where, owner)
    table = np.array([indices[0] for indices in found], np.int64)
    repeated = [i for i, n in Counter(table.tolist()).items() if n > 1]
    if repeated:
        raise DataError(
            f"several classes mean {listed(ours[i].name for i in repeated)} of {owner}", where=where
        )
    return table


def require_known(
    theirs: Sequence[ClassLabel],
    found: Sequence[Sequence[int]],
    ours: Sequence[ClassLabel],
    where: object,
    owner: str,
    hint: str = "",
) -> None:
    """Raises DataError for those of their classes that were not found in ours, or more than once.

    Args:
        hint: what to do where a class is missing, after what there is.
    """
    pairs = list(zip(theirs, found, strict=True))
    ambiguous = [label.name for label, indices in pairs if len(indices) > 1]
    if ambiguous:
        raise DataError(
            f"{listed(ambiguous)} could be more than one class of {owner}",
            where=where,
            hint="name these classes by their ids (WordNet synsets, for instance)",
        )
    missing = [label.name for label, indices in pairs if not indices]
    if missing:
        there = f"among the {len(ours):,} classes of {owner}"
        all_of_them = len(missing) == len(pairs) > 1
        raise DataError(
            f"none of {listed(missing)} is {there}"
            if all_of_them
            else f"{listed(missing)} is not {there}",
            where=where,
            hint=f"{owner} has {listed((label.name for label in ours), 8)}{hint}",
        )

"""The classes of a dataset: from directory names, files or labels, and matched to a model's.
A class is (id, name); names are not unique (ImageNet has two `crane`s)."""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitcli.config import ClassLabel
from vitcli.data.files import read_limited
from vitcli.data.source import Dataset, Ints, Names, Reader, Source
from vitcli.errors import DataError, warn
from vitcli.words import pluralize

Classes = tuple[ClassLabel, ...]

CLASSES_HINT = (
    "pass --classes FILE with a line for each class, in index order: its id (such as 0), a tab and "
    "its name"
)

INTEGER = re.compile(r"-?[0-9]{1,9}")
"""A label that is a number, if all are."""
_MISSING_VALUES = {"nan", "na", "n/a", "<na>", "null"}
_SYNSET = re.compile(r"(n\d{8})(?:[ _.-]+(.+))?")


def parse_class(label: str) -> ClassLabel:
    """The class for a directory name or text label. The id of "n01440764" and "n01440764_tench" is
    the WordNet synset; any other label is both id and name, in Unicode's composed form (NFC): macOS
    may name the same directory in another one."""
    label = label.encode(errors="backslashreplace").decode()  # may not be valid UTF-8
    label = unicodedata.normalize("NFC", label)
    match = _SYNSET.fullmatch(label)
    if match is None:
        return ClassLabel(label, label)
    return ClassLabel(match[1], (match[2] or match[1]).replace("_", " "))


def read_classes(path: Path) -> Classes:
    """Read classes in index order from a file with one per line: `id`, or `id TAB name`."""
    classes = []
    for where, line in read_lines(path, "the class list", skip_empty=False):
        id, _, name = (field.strip() for field in line.partition("\t"))
        if not id:
            hint = "write one class per line, in index order: an id, optionally followed by a tab "
            hint += "and a name"
            raise DataError("the line is empty", where=where, hint=hint)
        parsed = parse_class(id)
        classes.append(ClassLabel(parsed.id, name or parsed.name))
    require_unique_ids(classes, path)
    return tuple(classes)


def read_lines(path: Path, what: str, skip_empty: bool = True) -> list[tuple[str, str]]:
    """Read the lines of a UTF-8 file without empty ones, in NFC (see `parse_class`), each with its
    place for error messages.

    Args:
        what: the file's content, for error messages.
        skip_empty: whether to skip all empty lines, or only those at the end.

    Raises:
        DataError: the file cannot be read, or has no lines.
    """
    try:
        with open(path, "rb") as file:
            text = b"".join(read_limited(file, path)).decode("utf-8-sig")
        lines = unicodedata.normalize("NFC", text).rstrip().splitlines()
        if not lines:
            raise DataError(f"{what} is empty", where=path)
        places = [f"{path}, line {number}" for number in range(1, len(lines) + 1)]
        pairs = zip(places, lines, strict=True)
        return [(place, line) for place, line in pairs if line.strip() or not skip_empty]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror or error if isinstance(error, OSError) else "not UTF-8 text"
        reason = "no such file" if isinstance(error, FileNotFoundError) else reason
        raise DataError(f"{what} cannot be read: {reason}", where=path) from error


_USE_IDS = "use class ids (such as WordNet synsets) instead of names"


def require_unique_ids(classes: Iterable[ClassLabel], where: object) -> None:
    """Raise DataError if two classes have the same id."""
    duplicates = [id for id, count in Counter(label.id for label in classes).items() if count > 1]
    if duplicates:
        what = f"more than one class has the id {quote_list(duplicates)}"
        raise DataError(what, where=where, hint="give each class a different id")


def quote_list(items: Iterable[object], limit: int = 5) -> str:
    """ "'a', 'b', 'c' and 7 more"."""
    quoted = [f"'{item}'" for item in items]
    if len(quoted) > limit:
        return f"{', '.join(quoted[:limit])} and {len(quoted) - limit:,} more"
    return f"{', '.join(quoted[:-1])} and {quoted[-1]}" if len(quoted) > 1 else "".join(quoted)


# ---------------------------------------------------------------------------------------------
# Labels


class RawSplit(NamedTuple):
    """The images of a split with their original labels, not yet class indices."""

    labels: Ints | list[str]
    names: Names
    root: str | Path
    reader: Reader | None = None


def label_dataset(
    raw: Mapping[str, RawSplit],
    class_list: Classes | None,
    where: object,
    data_classes: Classes | None = None,
    parse_numbers: bool = True,
) -> Dataset:
    """Build a dataset from raw splits: determine its classes and convert labels to indices.

    Text labels are class ids or names, or numbers if all are integers. Numbers are indices into
    `data_classes`, or, if those are missing or numbers themselves, the numbers of classes in
    `class_list` (`class_numbers`).

    Args:
        class_list: the classes listed by the user: the result has these, in this order.
        data_classes: the classes named in the data itself.
        parse_numbers: whether text labels may be numbers.

    Raises:
        DataError: a class index is out of range, or a label is not in the list of classes.
    """
    labels: dict[str, Ints] = {}
    texts = {s for split in raw.values() if isinstance(split.labels, list) for s in split.labels}
    if not texts or (parse_numbers and all(map(INTEGER.fullmatch, texts))):
        labels = {name: np.array(split.labels, np.int64) for name, split in raw.items()}
        if class_list and data_classes and _are_numbers(data_classes):
            known = {text for label in class_list for text in label}
            # ImageNetV2's directories are indices; others may be ids of the list.
            if not known.issuperset(label.id for label in data_classes):
                numbered = [label._replace(id=str(int(label.id))) for label in data_classes]
                require_unique_ids(numbered, where)  # not both 1 and 01
                values = np.array([int(label.id) for label in numbered], np.int64)
                labels, data_classes = {name: values[found] for name, found in labels.items()}, None
        if not (data_classes or class_list):
            data_classes = _numbered_classes(labels, where)
            fallback = f"using 0 to {len(data_classes) - 1}"
            warn(f"the dataset has no class names: {fallback}; {CLASSES_HINT}", where)
        numbers = {index: index for index in range(len(data_classes or ()))}
        numbers = numbers or class_numbers(class_list or ())
        labels = {name: _find_numbers(found, numbers, where) for name, found in labels.items()}
    else:
        parsed = {s: parse_class(s) for split in raw.values() for s in set(map(str, split.labels))}
        by_id = {label.id: label for label in sorted(parsed.values())}
        data_classes = tuple(by_id[id] for id in sorted(by_id))
        position = {label.id: index for index, label in enumerate(data_classes)}
        for name, split in raw.items():
            indices = [position[parsed[str(label)].id] for label in split.labels]
            labels[name] = np.array(indices, np.int64)
    if data_classes:
        require_unique_ids(data_classes, where)
    if data_classes and not class_list:
        _warn_about_mistakes(data_classes, where)
    if data_classes and class_list:
        table = match_classes(data_classes, class_list, where, "the class list")
        labels = {name: table[indices] for name, indices in labels.items()}
    classes = class_list or data_classes or ()
    sources = {
        name: Source(classes, labels[name], split.names, split.root, split.reader)
        for name, split in raw.items()
    }
    return Dataset(**sources)


def _warn_about_mistakes(classes: Classes, where: object) -> None:
    """Warn about classes that are probably one class misspelled, or missing values."""
    groups = defaultdict[str, list[str]](list)
    for label in classes:
        groups[_normalize_name(label.id)].append(label.id)
    if similar := [id for ids in groups.values() if len(ids) > 1 for id in ids]:
        warn(f"classes differ only in case, spaces or underscores: {quote_list(similar)}", where)
    if missing := [label.id for label in classes if label.id.lower() in _MISSING_VALUES]:
        warn(f"classes with the names of missing values: {quote_list(missing)}", where)


def _numbered_classes(labels: Mapping[str, Ints], where: object) -> Classes:
    """Create classes named 0, 1, 2, ... for indices without class names."""
    highest = max(int(indices.max(initial=0)) for indices in labels.values())
    if highest > 10 * sum(map(len, labels.values())) + 1000:
        raise DataError(
            f"label {highest} is far larger than the number of images",
            where=where,
            hint="labels must be class names, or indices starting at 0",
        )
    return tuple(ClassLabel(str(i), str(i)) for i in range(highest + 1))


def class_numbers(classes: Sequence[ClassLabel]) -> dict[int, int]:
    """The index of each class by the number that labels have for it: its id if all ids are
    integers, else its index. Of 1 and 01, the first."""
    use_ids, numbers = _are_numbers(classes), dict[int, int]()
    for index, label in enumerate(classes):
        numbers.setdefault(int(label.id) if use_ids else index, index)
    return numbers


def _are_numbers(classes: Iterable[ClassLabel]) -> bool:
    return all(INTEGER.fullmatch(label.id) for label in classes)


def out_of_range(label: object, numbers: Collection[int]) -> str:
    """An error message about a label that is not the number of a class."""
    known = f"0 to {len(numbers) - 1}" if _is_range(numbers) else quote_list(numbers)
    return f"label {label} is out of range: the classes are {known}"


def _is_range(numbers: Iterable[int]) -> bool:
    return all(number == index for index, number in enumerate(numbers))


def _find_numbers(labels: Ints, numbers: Mapping[int, int], where: object) -> Ints:
    """Convert labels that are numbers to class indices."""
    if _is_range(numbers):
        known, indices = (labels >= 0) & (labels < len(numbers)), labels
    else:
        ordered = np.array(sorted(numbers.items()), np.int64)
        known = np.isin(labels, ordered[:, 0])
        indices = ordered[np.searchsorted(ordered[:, 0], labels[known]), 1]
    if not known.all():
        unknown = labels[~known][0]
        hint = "pass the class list of this dataset with --classes FILE"
        hint = "labels must be class names, or indices starting at 0" if unknown < 0 else hint
        raise DataError(out_of_range(unknown, numbers), where=where, hint=hint)
    return indices


# ---------------------------------------------------------------------------------------------
# Matching


class ClassIndex:
    """Look up classes by id, name, or first name: "tench" finds "tench, Tinca tinca"."""

    def __init__(self, classes: Sequence[ClassLabel]) -> None:
        self.classes = classes
        self.by_id = {label.id: index for index, label in enumerate(classes)}
        self.by_name, self.by_first_name = defaultdict[str, list[int]](list), defaultdict(list)
        for index, label in enumerate(classes):
            self.by_name[_normalize_name(label.name)].append(index)
            self.by_first_name[_normalize_name(label.name.split(",")[0])].append(index)

    def find(self, label: ClassLabel) -> list[int]:
        """Indices of the matching classes: one, several that share the name, or none."""
        if label.id in self.by_id:
            return [self.by_id[label.id]]
        by_first = self.by_first_name.get(_normalize_name(label.name.split(",")[0]), [])
        return self.by_name.get(_normalize_name(label.name)) or by_first


def _normalize_name(name: str) -> str:
    return unicodedata.normalize("NFC", name).strip().lower().replace("_", " ")


def match_classes(
    data: Sequence[ClassLabel], classes: Sequence[ClassLabel], where: object, owner: str
) -> Ints:
    """int64 (len(data),): the index in `classes` of each class of the data, matched by id, then by
    a name that is unique in both.

    Args:
        where: the dataset, for error messages.
        owner: what `classes` belong to, such as "the model".

    Raises:
        DataError: a class has no match or several; the message lists all such classes.
    """
    index = ClassIndex(classes)
    require_known(data, index, where, owner)
    table = np.array([index.find(label)[0] for label in data], np.int64)
    repeated = [classes[i].name for i, n in Counter(table.tolist()).items() if n > 1]
    if repeated:
        raise DataError(
            f"more than one class matches {quote_list(repeated)} of {owner}",
            where=where,
            hint=_USE_IDS,
        )
    return table


def require_known(
    data: Iterable[ClassLabel], index: ClassIndex, where: object, owner: str, hint: str = ""
) -> None:
    """Raise DataError if a class of the data has no match among those of `owner`, or more than one.

    Args:
        hint: what to do about missing classes; the list of available classes follows it.
    """
    pairs = [(label, index.find(label)) for label in data]
    ambiguous = [label.name for label, indices in pairs if len(indices) > 1]
    if ambiguous:
        raise DataError(
            f"more than one class of {owner} matches {quote_list(ambiguous)}",
            where=where,
            hint=_USE_IDS,
        )
    missing = [label for label, indices in pairs if not indices]
    if not missing:
        return
    names, verb = quote_list(label.name for label in missing), "is" if len(missing) == 1 else "are"
    unnamed = all(label.id == label.name and label.id.isdecimal() for label in missing)
    unnamed = unnamed and not any(label.id.isdecimal() for label in index.classes)
    available = f"{owner} has {quote_list((label.name for label in index.classes), 8)}"
    available = f"{hint}; {available}" if hint else available
    known = pluralize(len(index.classes), "class", "classes")
    raise DataError(
        f"{names} {verb} not among the {known} of {owner}",
        where=where,
        hint=f"the dataset has no class names: {CLASSES_HINT}" if unnamed else available,
    )

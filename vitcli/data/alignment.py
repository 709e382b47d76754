"""A data set's classes beside a model's: which are the same, and among which a model answers.

Evaluation compares labels with answers, so both become indices into one list of classes. Usually
that is the model's. It is shorter where the model may answer among some classes only, or where one
class of the data stands for several of the model's ("cat" for five breeds of an ImageNet model).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from vitcli.config import ClassLabel
from vitcli.data.classes import ClassIndex, read_lines, require_known
from vitcli.data.source import Ints
from vitcli.errors import DataError

UNKNOWN = "; --mapping FILE says which class is which, --skip-unknown leaves images out"
LEFT_OUT = "-"
"""In a mapping: images of the class are left out."""


@dataclass(frozen=True)
class MatchRules:
    """How the classes of data and model are matched."""

    mapping: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """From an id or name of the data's to ids or names of the model's; none: left out."""
    among: Literal["auto", "model", "data", "imagenet-1k"] = "auto"
    """What the model may answer: all its classes, those of the data, or ImageNet-1k's. auto: the
    last for a model that knows more than them, on data whose classes are among them."""
    skip_unknown: bool = False
    """Leave out images of classes that the model does not know; else they are an error."""


@dataclass(frozen=True)
class Alignment:
    """One list of classes, and where those of the data and the model are in it; -1: left out."""

    classes: tuple[ClassLabel, ...]
    first: Ints
    """(classes,): the model's index of each, of several the first."""
    of_data: Ints
    """(the data's classes,)"""
    of_model: Ints
    """(the model's classes,)"""


def read_mapping(path: Path) -> dict[str, list[str]]:
    """A file with a line for each pair of classes: the data's, tab, the model's, by id or name.

    A class of the data may have several lines, and stands for all those classes of the model; "-"
    for the model's leaves its images out.

    Raises:
        DataError: cannot be read, a line without a tab, or a pair twice.
    """
    lines = read_lines(path, "the mapping")
    mapping: dict[str, list[str]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        ours, _, theirs = (part.strip() for part in line.partition("\t"))
        if not ours or not theirs:
            raise DataError(
                f"line {number} is not two classes",
                where=path,
                hint="write the data's class, a tab, and the model's (an id or a name, - for none)",
            )
        found = mapping.setdefault(ours, [])
        if theirs in found or (LEFT_OUT in (theirs, *found) and found):
            raise DataError(f"line {number} gives '{ours}' once more", where=path)
        found.append(theirs)
    if not mapping:
        raise DataError("the mapping is empty", where=path)
    return {ours: [] if theirs == [LEFT_OUT] else theirs for ours, theirs in mapping.items()}


def align(
    data: Sequence[ClassLabel],
    present: Iterable[int],
    model: Sequence[ClassLabel],
    rules: MatchRules,
    imagenet: Sequence[ClassLabel],
    where: object,
) -> Alignment:
    """Matches classes by the mapping, by id, then by a name that is unique.

    Args:
        present: indices of the data's classes that have images; only they have to be known.
        imagenet: the classes of ImageNet-1k.
        where: the data set, for messages.

    Raises:
        DataError: a class that the model does not know, or that could be several of its own.
    """
    index, wanted = ClassIndex(model), set(present)
    if rules.among == "auto":
        beyond = _knows_beyond(index, imagenet, [data[i] for i in wanted])
        rules = replace(rules, among="imagenet-1k" if beyond else "model")
    groups = _groups(data, wanted, index, rules, where)
    allowed = {member for group in groups.values() for member in group}
    if rules.among == "model":
        allowed = set(range(len(model)))
    elif rules.among == "imagenet-1k":
        allowed |= {i for label in imagenet for i in index.find(label)}
    group_of = {member: group for group in groups.values() for member in group}
    names = {group: data[i] for i, group in groups.items() if len(group) > 1}
    classes: list[ClassLabel] = []
    first: list[int] = []
    of_model = np.full(len(model), -1, np.int64)
    for member in sorted(allowed):
        if of_model[member] < 0:
            group = group_of.get(member, (member,))
            of_model[list(group)] = len(classes)
            classes.append(names.get(group, model[member]))
            first.append(member)
    if len(classes) == 1 < len(model):
        raise DataError(
            f"'{classes[0].name}' is all that could be answered",
            where=where,
            hint="--among model allows all classes of the model",
        )
    of_data = np.full(len(data), -1, np.int64)
    for i, group in groups.items():
        of_data[i] = of_model[group[0]]
    return Alignment(tuple(classes), np.array(first, np.int64), of_data, of_model)


def _knows_beyond(
    model: ClassIndex, imagenet: Sequence[ClassLabel], data: Sequence[ClassLabel]
) -> bool:
    """Whether ids say that the model knows ImageNet-1k and more (of the 21,843 classes of
    ImageNet-21k 999 are in ImageNet-1k), and that the data is of ImageNet-1k."""
    ids = {label.id for label in imagenet}
    known = len(ids & model.by_id.keys())
    return (
        len(model.classes) > len(ids) and known >= 0.99 * len(ids) and {c.id for c in data} <= ids
    )


def _groups(
    data: Sequence[ClassLabel],
    present: set[int],
    index: ClassIndex,
    rules: MatchRules,
    where: object,
) -> dict[int, tuple[int, ...]]:
    """For each class of the data that is evaluated the model's classes that it stands for."""
    groups: dict[int, tuple[int, ...]] = {}
    wanted: list[ClassLabel] = []
    found: list[list[int]] = []
    for i in present:
        names = rules.mapping.get(data[i].id, rules.mapping.get(data[i].name))
        spelt = [data[i]] if names is None else [ClassLabel(name, name) for name in names]
        indices = [index.find(label) for label in spelt]
        if spelt and all(len(one) == 1 for one in indices):
            groups[i] = tuple(sorted({one[0] for one in indices}))
        wanted += spelt
        found += indices
    if groups and (rules.skip_unknown or rules.among == "imagenet-1k"):
        known = [k for k, one in enumerate(found) if one]
        wanted, found = [wanted[k] for k in known], [found[k] for k in known]
    require_known(wanted, found, index.classes, where, "the model", UNKNOWN)
    _require_apart(groups, data, index.classes, where)
    return groups


def _require_apart(
    groups: Mapping[int, tuple[int, ...]],
    data: Sequence[ClassLabel],
    model: Sequence[ClassLabel],
    where: object,
) -> None:
    """Raises DataError where classes of the data share some but not all of the model's."""
    owner: dict[int, int] = {}
    for i, group in groups.items():
        for member in group:
            other = owner.setdefault(member, i)
            if groups[other] != group:
                raise DataError(
                    f"'{data[other].name}' and '{data[i].name}' stand for different classes of the "
                    f"model, but for '{model[member].name}' both",
                    where=where,
                )

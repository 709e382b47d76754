"""Align the classes of a dataset with those of a model.

Evaluation compares labels with predictions, so both become indices into one list of classes.
Usually that is the model's list. It is shorter if predictions are restricted to some classes, or if
one dataset class covers several model classes ("cat" for five breeds of an ImageNet model).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from vitcli.config import ClassLabel
from vitcli.data.classes import ClassIndex, read_lines, require_known
from vitcli.data.source import Ints
from vitcli.errors import DataError

_MAP_HINT = "map them with --mapping FILE"
_SKIP_HINT = ", or leave their images out with --skip-unknown"
_FIX_HINT = "correct the file: - leaves the images of a class out"
_EXCLUDED = "-"
"""In a mapping: exclude the images of this class."""


@dataclass(frozen=True)
class MatchRules:
    """How dataset classes are matched to model classes."""

    mapping: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """From a dataset class to model classes, by id or name; an empty list excludes the class."""
    among: Literal["auto", "model", "data", "imagenet-1k"] = "auto"
    """Which classes can be predicted: all of the model's, the dataset's, or ImageNet-1k's. auto:
    ImageNet-1k's if the model has these and more, and the dataset's classes are among them."""
    skip_unknown: bool = False
    """Skip images of classes that the model does not have, instead of raising an error. Classes
    named in the mapping must exist."""


@dataclass(frozen=True)
class Alignment:
    """A common list of classes, with the indices into it of both sides' classes; -1: excluded."""

    classes: tuple[ClassLabel, ...]
    class_to_model: Ints
    """(classes,): the model index of each class, the first if there are several."""
    data_to_class: Ints
    """(dataset classes,)"""
    model_to_class: Ints
    """(model classes,)"""


def read_mapping(path: Path) -> dict[str, list[str]]:
    """Read a mapping file: per line a dataset class, a tab and a model class, by id or name.

    A dataset class on several lines covers all of these model classes; "-" instead of a model class
    excludes its images.
    """
    mapping: dict[str, list[str]] = {}
    for where, line in read_lines(path, "the mapping"):
        data_class, _, model_class = (name.strip() for name in line.partition("\t"))
        if not data_class or not model_class:
            hint = (
                "write the dataset's class, a tab, and the model's class (id or name; - for none)"
            )
            what = "expected two classes separated by a tab"
            raise DataError(what, where=where, hint=hint)
        targets = mapping.setdefault(data_class, [])
        if model_class in targets or (_EXCLUDED in (model_class, *targets) and targets):
            raise DataError(f"repeats '{data_class}'", where=where)
        targets.append(model_class)
    return {name: [] if targets == [_EXCLUDED] else targets for name, targets in mapping.items()}


def align(
    data: Sequence[ClassLabel],
    present: Iterable[int],
    model: Sequence[ClassLabel],
    rules: MatchRules,
    imagenet: Sequence[ClassLabel],
    where: object,
) -> Alignment:
    """Match classes by the mapping, then by id, then by unique name.

    Args:
        present: indices of the dataset classes that have images; only these must be matched.
        imagenet: the ImageNet-1k classes.
        where: the dataset, for error messages.

    Raises:
        DataError: a class matches no model class, or several.
    """
    index, required = ClassIndex(model), set(present)
    if rules.among == "auto":
        use_imagenet = _should_use_imagenet(index, imagenet, [data[i] for i in required])
        rules = replace(rules, among="imagenet-1k" if use_imagenet else "model")
    groups = _build_groups(data, required, index, rules, where)
    group_of = {member: group for group in groups.values() for member in group}
    allowed = set(group_of)
    if rules.among == "model":
        allowed = set(range(len(model)))
    elif rules.among == "imagenet-1k":
        in_imagenet = {i for label in imagenet for i in index.find(label)}
        if not in_imagenet:
            hint = "leave out --among imagenet-1k"
            raise DataError("the model has no class of ImageNet-1k", where=where, hint=hint)
        allowed |= in_imagenet
    group_labels = {group: data[i] for i, group in groups.items() if len(group) > 1}
    classes: list[ClassLabel] = []
    members: list[int] = []
    model_to_class = np.full(len(model), -1, np.int64)
    for member in sorted(allowed):
        if model_to_class[member] < 0:
            group = group_of.get(member, (member,))
            model_to_class[list(group)] = len(classes)
            classes.append(group_labels.get(group, model[member]))
            members.append(member)
    if len(classes) == 1 < len(model):
        raise DataError(
            f"only one class is left to predict, '{classes[0].name}'",
            where=where,
            hint="allow all classes of the model with --among model",
        )
    data_to_class = np.full(len(data), -1, np.int64)
    for i, group in groups.items():
        data_to_class[i] = model_to_class[group[0]]
    return Alignment(tuple(classes), np.array(members, np.int64), data_to_class, model_to_class)


def _should_use_imagenet(
    model: ClassIndex, imagenet: Sequence[ClassLabel], data: Sequence[ClassLabel]
) -> bool:
    """Whether, by ids, the model has the ImageNet-1k classes and more (ImageNet-21k's 21,843
    classes include 999 of them), and all classes of the data are in ImageNet-1k."""
    ids = {label.id for label in imagenet}
    shared = len(ids & model.by_id.keys())
    is_superset = len(model.classes) > len(ids) and shared >= 0.99 * len(ids)
    return is_superset and {label.id for label in data} <= ids


def _build_groups(
    data: Sequence[ClassLabel],
    present: set[int],
    index: ClassIndex,
    rules: MatchRules,
    where: object,
) -> dict[int, tuple[int, ...]]:
    """The model classes that each evaluated dataset class covers."""
    mapped = {
        i: [ClassLabel(name, name) for name in names]
        for i in present
        if (names := rules.mapping.get(data[i].id, rules.mapping.get(data[i].name))) is not None
    }
    entries = [label for labels in mapped.values() for label in labels]
    require_known(entries, index, "--mapping", "the model", _FIX_HINT)
    groups = {
        i: tuple(sorted({index.find(label)[0] for label in labels}))
        for i, labels in mapped.items()
        if labels
    }
    found = {i: index.find(data[i]) for i in present if i not in mapped}
    groups |= {i: tuple(matches) for i, matches in found.items() if len(matches) == 1}
    if groups and (rules.skip_unknown or rules.among == "imagenet-1k"):
        found = {i: matches for i, matches in found.items() if matches}
    can_skip = groups and not rules.skip_unknown
    hint = _MAP_HINT + _SKIP_HINT if can_skip else _MAP_HINT
    require_known([data[i] for i in found], index, where, "the model", hint)
    owner_of: dict[int, int] = {}
    for i, group in sorted(groups.items()):
        for member in group:
            first_owner = owner_of.setdefault(member, i)
            if groups[first_owner] != group:
                raise DataError(
                    f"'{data[first_owner].name}' and '{data[i].name}' both map to the model's "
                    f"class '{index.classes[member].name}', but otherwise to different classes",
                    where=where,
                )
    return groups

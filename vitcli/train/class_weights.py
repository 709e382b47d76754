"""Weights of the classes in the loss, for imbalanced datasets."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from vitcli.config import ClassLabel
from vitcli.data.classes import match_classes, read_lines
from vitcli.data.dataset import require_source
from vitcli.data.source import Source
from vitcli.data.stream import Stream
from vitcli.errors import DataError

ClassWeights = Literal["balanced"] | dict[str, float]


def read_class_weights(path: str | Path) -> dict[str, float]:
    """Read {class: weight} from a file with one per line: ID or name, a tab or comma, a number.

    Raises:
        DataError: the file cannot be read or is empty, a line is malformed, or a class repeats.
    """
    weights: dict[str, float] = {}
    for where, line in read_lines(Path(path), "the list of class weights"):
        name, separator, value = line.rpartition("\t" if "\t" in line else ",")
        try:
            weight = float(value)
        except ValueError:
            weight = math.nan
        if not separator or not 0 <= weight < math.inf:
            raise DataError(
                f"not a class and a weight: '{line.strip():.60}'",
                where=where,
                hint="write a class, a tab or comma, and a weight of at least 0 on each line",
            )
        if name.strip() in weights:
            raise DataError(f"repeats the class '{name.strip()}'", where=where)
        weights[name.strip()] = weight
    return weights


def class_weights(spec: ClassWeights, train: Source | Stream) -> npt.NDArray[np.float32]:
    """Return the weight of each class of the data, float32 (K,).

    "balanced" weights a class with n_k of the n training images by n / (K n_k), where K counts
    the classes that have images (scikit-learn's `compute_class_weight`). A mapping has the weights
    of some classes, by id or by unique name. All other classes get 1.

    Raises:
        DataError: the data lacks a class of the mapping, or no class has a weight above 0.
    """
    counts = np.ones(len(train.classes), np.int64)
    if spec == "balanced" or isinstance(train, Source):
        counts = require_source(train).counts()
    if spec == "balanced":
        num_present = int((counts > 0).sum())
        balanced = counts.sum() / (num_present * np.maximum(counts, 1))
        return np.where(counts > 0, balanced, 1).astype(np.float32)
    assert isinstance(spec, Mapping)
    labels = [ClassLabel(name, name) for name in spec]
    indices = match_classes(labels, train.classes, "--class-weights", "the dataset")
    weights = np.ones(len(counts), np.float32)
    weights[indices] = list(spec.values())
    if not weights[counts > 0].any():
        raise DataError("all classes have weight 0", where="--class-weights")
    return weights

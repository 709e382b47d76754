"""Averaging the weights of several models ("model soups", arXiv 2203.05482)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vitcli.checkpoints.info import Checkpoint, CheckpointInfo, stored_name
from vitcli.checkpoints.tensor_file import LazyTensor, numpy_dtype
from vitcli.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np


_MUST_MATCH = {
    "model": "a different architecture, image size or head",
    "classes": "different classes",
    "score": "a different score function",
    "preprocess": "different preprocessing",
}
"""Fields of `CheckpointInfo` that must be equal, and how an error describes a difference."""


def average_models(
    models: Sequence[Checkpoint], names: Sequence[str], dtype: str | None = None
) -> tuple[CheckpointInfo, dict[str, LazyTensor]]:
    """Return the first model's description, without metrics, and the mean of each tensor, which is
    computed in float64 when read.

    Args:
        names: the models as named by the user, for provenance.
        dtype: dtype of the means; None for the first model's.

    Raises:
        ConfigError: the models differ in architecture, classes, score function or preprocessing.
    """
    first, *others = models
    for other in others:
        for field, difference in _MUST_MATCH.items():
            ours, theirs = getattr(first.info, field), getattr(other.info, field)
            if ours != theirs:
                if type(ours) is type(theirs) and dataclasses.is_dataclass(ours):
                    keys = [key for key, value in vars(ours).items() if value != vars(theirs)[key]]
                    difference += f" ({', '.join(keys)})"
                raise ConfigError(
                    f"cannot be averaged with {first.file}, which has {difference}",
                    where=other.file,
                    hint="compare the two with `vit info`",
                )

    def mean_tensor(name: str) -> LazyTensor:
        tensors = [model.tensors[name] for model in models]

        def read() -> np.ndarray:
            total = tensors[0].read().astype("float64")
            for tensor in tensors[1:]:
                total += tensor.read()
            mean: np.ndarray = (total / len(tensors)).astype(numpy_dtype(mean_dtype))
            return mean

        mean_dtype = dtype or tensors[0].dtype
        return tensors[0]._replace(read=read, dtype=mean_dtype)

    provenance = {k: v for k, v in first.info.provenance.items() if k != "metrics"}
    provenance["average_of"] = list(map(stored_name, names))
    info = dataclasses.replace(first.info, provenance=provenance)
    return info, {name: mean_tensor(name) for name in first.tensors}

"""A model's tensors in another layout, by that layout's table."""

from __future__ import annotations

from collections.abc import Mapping

from vitcli.checkpoints.tensor_file import LazyTensor
from vitcli.config import Architecture
from vitcli.errors import OutputError
from vitcli.layouts import table
from vitcli.layouts.layout import Layout


def write_layout(
    layout: Layout, model: Architecture, tensors: Mapping[str, LazyTensor]
) -> tuple[dict[str, LazyTensor], dict[str, tuple[str, ...]]]:
    """The layout's tensors, and their names by ours (none where readers compute a tensor).

    Raises:
        OutputError: a tensor has no place, or is not what readers compute.
    """
    saved: dict[str, LazyTensor] = {}
    renamed: dict[str, tuple[str, ...]] = {}
    for name, array in layout.computed(model).items():
        import numpy as np

        if not np.array_equal(tensors[name].read(), array):
            raise OutputError(
                f"{name} would be computed differently by readers of the layout {layout.name}"
            )
        renamed[name] = ()
    for row in table.expand(layout.rows(model), model.depth):
        if set(row.ours) <= set(tensors) and not set(row.ours) <= set(renamed):
            saved |= table.save(row, tensors, getattr(model, "num_heads", 1))
            renamed |= dict.fromkeys(row.ours, row.theirs)
    saved |= layout.extra(model, next(iter(tensors.values())).dtype)
    if left := set(tensors) - set(renamed):
        names = ", ".join(sorted(left))
        raise OutputError(f"the layout {layout.name} cannot store {names}")
    return saved, renamed

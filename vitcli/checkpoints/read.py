"""Finding the file of a model and reading its description. Reads headers only; no torch."""

import dataclasses
import re
from pathlib import Path
from typing import TypedDict, Unpack

from vitcli.checkpoints.info import Checkpoint as Checkpoint
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.store import open_store
from vitcli.checkpoints.tensor_file import FLOATS, check_types
from vitcli.config import ClassLabel, Size
from vitcli.errors import CheckpointError
from vitcli.hub import fetch as hub
from vitcli.hub import registry
from vitcli.hub.registry import HubRepo, RegistryEntry
from vitcli.layouts import timm
from vitcli.layouts.shapes import check_keys
from vitcli.weight_files import weights_among


class Fetching(TypedDict, total=False):
    """Options of a download from the Hub: arguments of `hub.fetch.fetch`."""

    offline: bool
    on_progress: hub.Progress | None
    allow_pickle: bool


def open_checkpoint(
    spec: str | Path,
    grid: Size | None = None,
    timeout: float | None = None,
    **fetching: Unpack[Fetching],
) -> Checkpoint:
    """Open a model's file, in any supported layout; it is downloaded if necessary.

    The description comes from the file's header, else from a configuration beside it, else from
    the tensor shapes; then `provenance["assumed"]` lists what shapes do not show.

    Args:
        spec: a path, a model name such as "default", or a Hub repo, "org/name[@revision]".
        grid: rows and columns of the position embeddings, if the file does not state them.
        timeout: as `hub.fetch.fetch`.

    Raises:
        ModelNotFoundError: there is no such model.
        HubError: the model cannot be downloaded from the Hub.
        CheckpointError: the file is damaged, has an unknown layout, or its tensors do not match
            its description.
    """
    source = registry.resolve(spec)
    entry = source if isinstance(source, RegistryEntry) else None
    if isinstance(source, RegistryEntry):
        source = HubRepo(source.repo)
    if isinstance(source, HubRepo):
        file = hub.fetch(source.id, source.revision, timeout=timeout, **fetching)
        return open_file(file, entry, grid)
    return open_file(_find_weights(source), entry, grid)


def read_info(spec: str | Path, **fetching: Unpack[Fetching]) -> tuple[CheckpointInfo, Path]:
    """Return a checkpoint's description and file. Raises VitError as `open_checkpoint` does."""
    checkpoint = open_checkpoint(spec, **fetching)
    return checkpoint.info, checkpoint.file


def _find_weights(path: Path) -> Path:
    """The weights file at a path: in a directory, the standard one or the only one of a kind."""
    if not path.is_dir():
        return path
    names = weights_among(file.name for file in path.iterdir() if file.is_file())
    if len(names) == 1:
        return path / names[0]
    if names:
        hint = "pass the path of one of these files"
        listing = ", ".join(names)
        raise CheckpointError(f"contains several checkpoints: {listing}", where=path, hint=hint)
    listing = ", ".join(sorted(file.name for file in path.iterdir())[:8]) or "nothing"
    is_run = (path / "state").is_dir()  # the training state of a run
    raise CheckpointError(
        f"no checkpoint in this directory; found {listing}",
        where=path,
        hint="this run has not stored a model yet: continue it with --resume" if is_run else None,
    )


def open_file(
    file: Path, entry: RegistryEntry | None = None, grid: Size | None = None
) -> Checkpoint:
    """`open_checkpoint` for a local file; `entry` is that of a released model."""
    store = open_store(file)
    header_info = CheckpointInfo.from_metadata(store.metadata, where=file)
    if header_info is not None and not timm.has_other_names(header_info.model):
        if header_info.model.depth > len(store.tensors):
            raise CheckpointError("describes more blocks than it has tensors", where=file)
        check_keys(header_info.model.tensor_shapes(), store.shapes, where=file)
        checkpoint = Checkpoint(file, header_info, store.tensors, store.kind, entry=entry)
    else:
        from vitcli.layouts.reading import read_layout  # not needed for our own files

        checkpoint = read_layout(store, grid)
        info = _with_known_classes(checkpoint.info, entry)
        checkpoint = dataclasses.replace(checkpoint, info=info, entry=entry)
    model_grid = checkpoint.info.model.grid
    if grid is not None and model_grid != grid:
        raise CheckpointError(
            f"the model's grid is {model_grid[0]} x {model_grid[1]}, not {grid[0]} x {grid[1]}",
            where=file,
            hint="leave out --old-grid",
        )
    check_types(checkpoint.tensors, file, FLOATS)
    return checkpoint


def _with_known_classes(info: CheckpointInfo, entry: RegistryEntry | None) -> CheckpointInfo:
    """Fill in class names and score function that the file does not state, from the registry, from
    timm's tag ("augreg_in21k") or from the number of classes."""
    classes, score, count = info.classes, info.score, info.model.num_classes
    label_set: registry.Labels | None = None
    timm_names = info.provenance.get("timm")
    if entry is not None and entry.classes == count:
        label_set, score = entry.labels, entry.score
    elif isinstance(timm_names, dict):
        tag = str(timm_names.get("tag") or "")
        if re.search(r"in1k(_\d+)?$", tag) and count == 1000:
            label_set = "imagenet-1k"
        elif tag.endswith("in21k") and count == 21843:
            # AugReg's ImageNet-21k models were trained with a sigmoid per class.
            label_set = "imagenet-21k"
            score = "sigmoid" if tag == "augreg_in21k" else "softmax"
    elif (layout := info.provenance.get("converted_from")) is not None and count in _LABEL_SETS:
        labels = registry.labels(_LABEL_SETS[count])
        first_name = labels[0].name.partition(",")[0]  # "tench", "organism"
        # If a configuration of transformers lists no names, there are none.
        if classes[0].name.startswith(first_name) if classes else layout != "transformers":
            return dataclasses.replace(info, classes=labels)
    if label_set and not classes:
        classes = registry.labels(label_set)
    elif classes:
        classes = _with_synset_names(classes)
    return dataclasses.replace(info, classes=classes, score=score)


_LABEL_SETS: dict[int, registry.Labels] = {1000: "imagenet-1k", 21843: "imagenet-21k"}


def _with_synset_names(classes: tuple[ClassLabel, ...]) -> tuple[ClassLabel, ...]:
    """Replace class names that are only a synset id by readable ones."""
    if not any(re.fullmatch(r"n\d{8}", label.name) for label in classes):
        return classes
    names = {label.id: label.name for label in registry.labels("imagenet-21k")}
    names |= {label.id: label.name for label in registry.labels("imagenet-1k")}
    return tuple(label._replace(name=names.get(label.name, label.name)) for label in classes)

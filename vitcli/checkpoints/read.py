"""From a model's name to its file and the description in it. Reads headers only; no torch."""

from __future__ import annotations

import dataclasses
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.store import open_store
from vitcli.checkpoints.tensor_file import DTYPES, LazyTensor
from vitcli.config import ClassLabel, Score, Size
from vitcli.errors import CheckpointError, VitWarning
from vitcli.hub import fetch as hub
from vitcli.hub import registry
from vitcli.hub.registry import HubRepo, RegistryEntry
from vitcli.layouts.shapes import check_keys
from vitcli.weight_files import weights_among


class Located(NamedTuple):
    """Where a checkpoint's tensors lie."""

    file: Path
    """Of any kind that `store` reads."""
    entry: RegistryEntry | None
    """The released model that it is, if the registry knows it."""


def locate(
    spec: str | Path,
    offline: bool = False,
    on_progress: hub.Progress | None = None,
    allow_pickle: bool = False,
    timeout: float | None = None,
) -> Located:
    """The file of a model: a path, a registry name, a Hub repo (fetched if need be).

    Raises:
        ModelNotFoundError: there is no such model.
        HubError: it cannot be fetched from the Hub.
        CheckpointError: the path does not hold a checkpoint.
    """
    found = registry.resolve(spec)
    entry = found if isinstance(found, RegistryEntry) else None
    if isinstance(found, RegistryEntry):
        found = HubRepo(found.repo, found.revision)
    if isinstance(found, HubRepo):
        file = hub.fetch(found.id, found.revision, offline, on_progress, allow_pickle, timeout)
        return Located(file, entry)
    return Located(_weights_file(found), entry)


def _weights_file(path: Path) -> Path:
    """The file that a path means: a directory's standard one, or its only one of a kind."""
    if not path.is_dir():
        return path
    names = weights_among(file.name for file in path.iterdir() if file.is_file())
    if len(names) == 1:
        return path / names[0]
    if names:
        hint = "pass the path of one of these files"
        found = ", ".join(names)
        raise CheckpointError(f"contains several checkpoints: {found}", where=path, hint=hint)
    found = ", ".join(sorted(file.name for file in path.iterdir())[:8]) or "nothing"
    unfinished = "this run has not saved a model yet: continue it with --resume"
    raise CheckpointError(
        f"no checkpoint in this directory; found {found}",
        where=path,
        hint=unfinished if (path / STATE).is_dir() else None,
    )


STATE = "state"
"""The directory of what an unfinished run resumes from."""


def read_info(
    spec: str | Path,
    offline: bool = False,
    on_progress: hub.Progress | None = None,
    allow_pickle: bool = False,
) -> tuple[CheckpointInfo, Path]:
    """The description of a checkpoint, checked against its tensors' shapes, and its file.

    It comes from the header, else from a `config.json` beside the file, else from the shapes, and
    `provenance["assumed"]` then lists what shapes do not show.

    Raises:
        VitError: as `locate`; CheckpointError if the file is damaged, of an unknown layout, or
            holds other tensors than the model that it describes.
    """
    file, entry = locate(spec, offline, on_progress, allow_pickle)
    return open_checkpoint(file, entry).info, file


@dataclass(frozen=True)
class Checkpoint:
    """An open file: its description, and its tensors, each read when it is needed."""

    file: Path
    info: CheckpointInfo
    tensors: dict[str, LazyTensor]
    """Under our names."""
    layout: str = "vit"
    """"vit" (which is timm's), or one of `layouts`."""
    dropped: tuple[str, ...] = ()
    """Names in the file that are not part of the model."""
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Our name -> the names in the file, where they differ."""


def open_checkpoint(
    file: Path, entry: RegistryEntry | None = None, grid: Size | None = None
) -> Checkpoint:
    """A file of any layout that we read.

    Args:
        entry: of the registry, where the file is a released model.
        grid: rows and columns of its position embeddings, if the file does not state them.

    Raises:
        CheckpointError: it is damaged, of an unknown layout, or holds another model.
    """
    store = open_store(file)
    info = CheckpointInfo.from_metadata(store.metadata, where=file)
    described = info is not None
    if info is not None:
        if info.model.depth > len(store.tensors):
            raise CheckpointError("describes more blocks than it has tensors", where=file)
        check_keys(info.model.tensor_shapes(), store.shapes, where=file)
        found = Checkpoint(file, info, store.tensors)
    else:
        from vitcli.layouts.reading import read_layout  # not needed for our own files

        read = read_layout(store, grid)
        info, described = read.info, "assumed" not in read.info.provenance
        found = Checkpoint(file, info, read.tensors, read.layout, read.dropped, read.sources)
        renamed = any(names != (ours,) for ours, names in read.sources.items())
        if read.layout == "timm" and store.kind == "safetensors" and not renamed:
            # Our own layout but for the description.
            provenance = {k: v for k, v in info.provenance.items() if k != "converted_from"}
            info = dataclasses.replace(info, provenance=provenance)
            found = Checkpoint(file, info, read.tensors, dropped=read.dropped)
        found = dataclasses.replace(found, info=_with_known_classes(info, entry))
    for name, tensor in found.tensors.items():
        if tensor.dtype not in DTYPES.values():
            raise CheckpointError(f"'{name}' has the unknown type {tensor.dtype}", where=file)
    if described and entry is not None:
        _warn_of_departures(found.info, entry)
    return found


def _warn_of_departures(info: CheckpointInfo, entry: RegistryEntry) -> None:
    """Warns where a released model's own repo, which is followed, departs from the registry."""
    stated, known = (
        dataclasses.asdict(side.preprocess) | dataclasses.asdict(side.model)
        for side in (info, entry)
    )
    if departures := [
        f"{name} is {stated.get(name)} in its repo and {known.get(name)} in the registry"
        for name in {**known, **stated}
        if known.get(name) != stated.get(name)
    ]:
        text = f"{entry.name}: {'; '.join(departures)}; the repo is followed"
        warnings.warn(text, VitWarning, stacklevel=2)


def _with_known_classes(info: CheckpointInfo, entry: RegistryEntry | None) -> CheckpointInfo:
    """Class names and score function if the file leaves them to the registry, to timm's tag
    ("augreg_in21k"), or to the number of classes, as releases do."""
    classes, score, count = info.classes, info.score, info.model.num_classes
    named: registry.Labels | None = None
    timms = info.provenance.get("timm")
    if entry is not None and entry.classes == count:
        named, score = entry.labels, entry.score
    elif isinstance(timms, dict):
        tag = str(timms.get("tag") or "")
        if re.search(r"in1k(_\d+)?$", tag) and count == 1000:
            named = "imagenet-1k"
        elif tag.endswith("in21k") and count == 21843:
            named, score = "imagenet-21k", _score_of(tag)
    elif "converted_from" in info.provenance and count in _LISTS:
        known = registry.labels(_LISTS[count])
        first = known[0].name.partition(",")[0]  # "tench", "organism"
        if not classes or classes[0].name.startswith(first):
            return dataclasses.replace(info, classes=known)
    if named and not classes:
        classes = registry.labels(named)
    elif classes:
        classes = _with_synset_names(classes)
    return dataclasses.replace(info, classes=classes, score=score)


_LISTS: dict[int, registry.Labels] = {1000: "imagenet-1k", 21843: "imagenet-21k"}


def _score_of(tag: str) -> Score:
    """AugReg's models of ImageNet-21k were trained with a sigmoid per class."""
    return "sigmoid" if tag == "augreg_in21k" else "softmax"


def _with_synset_names(classes: tuple[ClassLabel, ...]) -> tuple[ClassLabel, ...]:
    """Readable names for classes that are named by their synset alone."""
    if not any(re.fullmatch(r"n\d{8}", label.name) for label in classes):
        return classes
    names = {label.id: label.name for label in registry.labels("imagenet-21k")}
    names |= {label.id: label.name for label in registry.labels("imagenet-1k")}
    return tuple(label._replace(name=names.get(label.name, label.name)) for label in classes)

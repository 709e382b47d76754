"""From a model's name to its file and what the file says of itself; headers alone, no torch."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.store import open_store
from vitcli.checkpoints.tensor_file import LazyTensor
from vitcli.config import ClassLabel, Score, Size
from vitcli.errors import CheckpointError, VitWarning
from vitcli.hub import fetch as hub
from vitcli.hub import registry
from vitcli.hub.registry import HubRepo, RegistryEntry
from vitcli.layouts.reading import read_layout
from vitcli.layouts.shapes import check_keys


class Located(NamedTuple):
    """Where a checkpoint's tensors lie."""

    file: Path
    """A safetensors file, or one of another kind that `stores` reads."""
    entry: RegistryEntry | None
    """The released model that it is, where the registry knows."""


def locate(
    spec: str | Path,
    offline: bool = False,
    on_progress: hub.Progress | None = None,
    allow_pickle: bool = False,
) -> Located:
    """The file of a model: a path, a registry name, a Hub repo (fetched if need be).

    Raises:
        ModelNotFoundError: there is no such model.
        HubError: it is on the Hub and cannot be had.
        CheckpointError: the path holds no checkpoint that we read.
    """
    found = registry.resolve(spec)
    entry = found if isinstance(found, RegistryEntry) else None
    if isinstance(found, RegistryEntry):
        found = HubRepo(found.repo, found.revision)
    if isinstance(found, HubRepo):
        file = hub.fetch(found.id, found.revision, offline, on_progress, allow_pickle)
        return Located(file, entry)
    return Located(_weights_file(found), entry)


def _weights_file(path: Path) -> Path:
    """The file that a path means: a folder's standard one, or its only one of a kind."""
    if path.is_dir():
        for pattern in _STANDARD:
            files = sorted(file for file in path.glob(pattern) if file.name != STATE)
            if len(files) == 1:
                return files[0]
            if files:
                break
        else:
            files = []
        found = ", ".join(file.name for file in files) or _some(p.name for p in path.iterdir())
        unfinished = "a run that has kept no model yet: train it further with --resume"
        hint = "name one of its files" if files else None
        raise CheckpointError(
            f"holds no model.safetensors but {found or 'nothing'}",
            where=path,
            hint=unfinished if not files and (path / STATE).is_file() else hint,
        )
    return path


STATE = "state.safetensors"
"""What a run in the making needs to go on, and no model."""


_STANDARD = (
    "model.safetensors",
    "model.safetensors.index.json",
    "*.safetensors",
    "pytorch_model.bin",
    "*.npz",
    "*.bin",
    "*.pt[h]",
    "*.pth.tar",
    "*.pt",
)
"""What a folder's weights are called, the best first."""


def _some(names: Iterable[str], most: int = 8) -> str:
    names = sorted(names)
    return ", ".join(names[:most]) + (" ..." if len(names) > most else "")


def read_info(
    spec: str | Path,
    offline: bool = False,
    on_progress: hub.Progress | None = None,
    allow_pickle: bool = False,
) -> tuple[CheckpointInfo, Path]:
    """What a checkpoint says of itself, and its file; the tensors' shapes are checked against it.

    The header's own description comes first, then a `config.json` beside the file, then what the
    shapes tell (`provenance["assumed"]` then lists what they do not tell).

    Raises:
        VitError: as `locate`, and CheckpointError where the file is damaged, of an unknown layout,
            or holds other tensors than the model that it describes.
    """
    file, entry = locate(spec, offline, on_progress, allow_pickle)
    return open_checkpoint(file, entry).info, file


@dataclass(frozen=True)
class Checkpoint:
    """A file that was opened: what it says, and its tensors, each read when it is asked for."""

    file: Path
    info: CheckpointInfo
    tensors: dict[str, LazyTensor]
    """Under our names."""
    layout: str = "vit"
    """"vit" (which is timm's), or one of `layouts`."""
    dropped: tuple[str, ...] = ()
    """Names in the file that are no part of the model."""
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Our name -> the names in the file, where they differ."""


def open_checkpoint(
    file: Path, entry: RegistryEntry | None = None, grid: Size | None = None
) -> Checkpoint:
    """A file of any layout that is supported.

    Raises:
        CheckpointError: it is damaged, of an unknown layout, or holds another model.
    """
    store = open_store(file)
    info = CheckpointInfo.from_metadata(store.metadata, where=file)
    if info is not None:
        if info.model.depth > len(store.tensors):
            raise CheckpointError("describes more blocks than it has tensors", where=file)
        check_keys(info.model.tensor_shapes(), store.shapes, where=file)
        found = Checkpoint(file, info, store.tensors)
        described = True
    else:
        reading = read_layout(store, grid)
        described = "assumed" not in reading.info.provenance
        renamed = any(names != (ours,) for ours, names in reading.sources.items())
        if reading.layout == "timm" and store.kind == "safetensors" and not renamed:
            # As it stands this is our own layout.
            provenance = dict(reading.info.provenance)
            provenance.pop("converted_from", None)
            info = dataclasses.replace(reading.info, provenance=provenance)
            found = Checkpoint(file, info, reading.tensors, dropped=reading.dropped)
        else:
            found = Checkpoint(
                file,
                reading.info,
                reading.tensors,
                reading.layout,
                reading.dropped,
                reading.sources,
            )
        found = dataclasses.replace(found, info=_with_known_classes(found.info, entry))
    if described and entry is not None:
        _warn_of_departures(found.info, entry)
    return found


def _warn_of_departures(info: CheckpointInfo, entry: RegistryEntry) -> None:
    """Says where a released model's own repo, which is followed, is not what the registry says."""
    said, known = (
        dataclasses.asdict(side.preprocess) | dataclasses.asdict(side.model)
        for side in (info, entry)
    )
    if told := [
        f"{name} {said.get(name)}, and the registry {known.get(name)}"
        for name in {**known, **said}
        if known.get(name) != said.get(name)
    ]:
        text = f"{entry.name}: its repo says {'; '.join(told)}; the repo is followed"
        warnings.warn(text, VitWarning, stacklevel=2)


def _with_known_classes(info: CheckpointInfo, entry: RegistryEntry | None) -> CheckpointInfo:
    """Class names and score function where the file leaves them to the registry, to timm's tag
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

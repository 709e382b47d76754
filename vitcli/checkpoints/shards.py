"""Shards and their index, which transformers and timm write for large checkpoints: safetensors
files and `model.safetensors.index.json`, or pickles and `pytorch_model.bin.index.json`."""

from collections.abc import Callable
from pathlib import Path

from vitcli.checkpoints.tensor_file import RESIZE_KEY, Store, read_header, require_file
from vitcli.errors import CheckpointError
from vitcli.typed_json import from_json, parse
from vitcli.weight_files import weights_among


def read_index(path: Path) -> dict[str, str]:
    """Read an index: name of a tensor -> name of the file that contains it.

    Raises:
        CheckpointError: the file is not an index, or names files outside its directory.
    """
    try:
        index = parse(path.read_bytes())
        if "weight_map" not in index:
            weights = weights_among(file.name for file in path.parent.iterdir())
            raise CheckpointError(
                "neither a checkpoint nor an index of shards",
                where=path,
                hint=f"to load the model's directory, pass {path.parent}" if weights else None,
            )
        weight_map: dict[str, str] = from_json(dict[str, str], index["weight_map"])
        if any(not file or Path(file).name != file for file in weight_map.values()):
            raise ValueError("it names files outside its directory")
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"not a valid index of shards: {error}", where=path) from error
    return weight_map


def open_shards(path: Path) -> Store:
    """Open the shards listed in an index."""
    weight_map, shards, metadata = read_index(path), {}, dict[str, str]()
    kind: str = "shards"
    read: Callable[[Path], Store] = read_header
    if path.name.endswith(".bin.index.json"):
        from vitcli.checkpoints.pickles import read_pickle

        kind, read = "pickle", read_pickle
    for file in set(weight_map.values()):
        require_file(path.with_name(file))
        header = read(path.with_name(file))
        shards[file] = header.tensors
        metadata |= {k: v for k, v in header.metadata.items() if k in ("format", RESIZE_KEY)}
    missing = [name for name, file in weight_map.items() if name not in shards[file]]
    if missing:
        raise CheckpointError(
            f"{len(missing)} tensors are missing from the files in the index; the first is "
            f"{missing[0]}",
            where=path,
        )
    tensors = {name: shards[file][name] for name, file in weight_map.items()}
    return Store(path, kind, tensors, metadata)

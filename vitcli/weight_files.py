"""Weight files and others in directories and Hub repos. Standard library only."""

import os
import re
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

INDEX = "model.safetensors.index.json"
SAFE = ("model.safetensors", INDEX, "*.safetensors", "*.npz")
"""Patterns of files that contain only tensors, in order of preference."""
PICKLED_INDEX = "pytorch_model.bin.index.json"
PICKLES = ("pytorch_model.bin", PICKLED_INDEX, "*.pth", "*.pth.tar", "*.pt", "*.bin", "*.ckpt")
"""Patterns of torch pickles, in order of preference."""
SUFFIXES = (".safetensors", ".npz", ".bin", ".pth", ".pt", ".tar", ".ckpt", ".h5", ".msgpack")
"""Suffixes of weight files, whether `vit` can read them or not."""
PROGRAMS = (".onnx", ".pt2")
"""Suffixes of the programs that `vit export` writes."""
NOT_A_MODEL = ("training_args.bin", "optimizer.*", "scheduler.*", "rng_state*")


def weights_among(names: Iterable[str], patterns: Iterable[str] = SAFE + PICKLES) -> list[str]:
    """Return the weight files among the names in a directory: all that match the best pattern."""
    names = [name for name in names if "/" not in name]
    names = [name for name in names if not any(fnmatch(name, skip) for skip in NOT_A_MODEL)]
    matches = ([name for name in names if fnmatch(name, pattern)] for pattern in patterns)
    return sorted(next(filter(None, matches), []))


def output_suffix(output: str | Path) -> str:
    """The suffix of an output file; "" for a directory, which has no suffix that looks like a
    file's, or exists, or ends with a slash."""
    suffix = Path(output).suffix
    looks_like_file = re.fullmatch(r"\.[A-Za-z][A-Za-z0-9]*", suffix)
    is_directory = str(output).endswith(("/", os.sep)) or Path(output).is_dir()
    return suffix if looks_like_file and not is_directory else ""


def is_own_file(path: Path) -> bool:
    """Whether a file is in its directory, and not a link to elsewhere, which may be a private file
    in a model of another person. Links into the Hub's cache are allowed."""
    directory = path.parent.resolve()
    allowed = directory, directory.parent.parent / "blobs"
    return path.is_file() and path.resolve().parent in allowed

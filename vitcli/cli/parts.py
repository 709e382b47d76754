"""Results in a directory: one file per argument, so that finished ones are not repeated."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from vitcli.atomic import make_directory
from vitcli.cli.parameters import UsageError
from vitcli.data.files import is_url, url_path
from vitcli.data.image_inputs import expand_pattern
from vitcli.data.tar import is_tar
from vitcli.inference import current_ranks

if TYPE_CHECKING:
    from vitcli.cli.predict import Predict


def is_directory(path: str | None) -> bool:
    """Whether an output path is a directory or will be one."""
    return path is not None and (path.endswith(("/", os.sep)) or os.path.isdir(path))


def split_by_argument(args: Predict) -> list[Predict]:
    """Split the command into one per image argument whose results are missing, if they go to a
    directory; else return the command itself.

    Raises:
        UsageError: one output is a directory and the other is not, or two results have one name.
        OutputError: the directory cannot be created.
    """
    outputs = {name: path for name in ("output", "features") if (path := getattr(args, name))}
    directories = {name: path for name, path in outputs.items() if is_directory(path)}
    if not directories:
        return [args]
    if directories != outputs:
        raise UsageError("--output and --features must both be files or both be directories")
    suffixes = {"output": ".jsonl" if args.json else ".csv" if args.csv else ".parquet"}
    suffixes["features"] = ".parquet"
    arguments: dict[str, str] = {}
    for argument in args.images:
        for source in expand_pattern(argument) or [argument]:
            previous = arguments.setdefault(result_name(source), source)
            if previous != source:
                raise UsageError(f"'{previous}' and '{source}' would be written to the same file")
    for path in directories.values():
        make_directory(path)
    files: dict[str, dict[str, Any]] = {
        argument: {key: os.path.join(path, name + suffixes[key]) for key, path in outputs.items()}
        for name, argument in arguments.items()
    }
    missing = [
        argument
        for argument, paths in files.items()
        if argument in ("-", "@-") or not all(map(os.path.exists, paths.values()))
    ]
    if (ranks := current_ranks()) is not None:
        missing = ranks.broadcast(missing)  # others write to temporary directories
    return [dataclasses.replace(args, images=[name], **files[name]) for name in missing]


def result_name(argument: str) -> str:
    """Return the name of an argument's results, without its suffix (a number is none: part.00)."""
    path = unquote(url_path(argument)) if is_url(argument) else argument.removeprefix("@")
    name = os.path.basename(os.path.abspath(path))
    if os.path.isdir(path):
        return name
    stem = is_tar(name) and re.sub(r"(?i)\.(tar|tgz)(\.\w+)?$", "", name)
    return stem or ("stdin" if path == "-" else re.sub(r"\.[a-zA-Z]\w*$", "", name))

"""The files beside a model's weights, for images of another size."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from vitcli.atomic import write_text
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.config import Size
from vitcli.errors import OutputError
from vitcli.hub import card
from vitcli.layouts.catalogue import LAYOUTS, companions
from vitcli.layouts.foreign_json import read_json
from vitcli.weight_files import SUFFIXES

CARD = "README.md"


def copy_companions(source: Path, directory: Path) -> None:
    """Copies the other files of a model's directory, such as its card, but not other weights.

    Raises:
        OutputError: they cannot be written.
    """
    try:
        for path in sorted(source.iterdir()):
            weights = path.suffix in SUFFIXES or path.name.endswith(".index.json")
            if path.is_file() and not weights and path.name[0] != ".":
                shutil.copyfile(path, directory / path.name)
    except OSError as error:
        raise OutputError(
            f"cannot be written: {error.strerror or error}", where=directory
        ) from error


def resize_configs(source: Path, directory: Path, old: Size, info: CheckpointInfo) -> None:
    """Writes the source's configurations with the new size, and its card with a note about it.

    Raises:
        CheckpointError: one of the source's cannot be read.
        OutputError: one cannot be written.
    """
    new = info.model.image_size
    if (source / CARD).is_file():
        text = (source / CARD).read_text("utf-8", errors="replace")
        write_text(directory / CARD, card.resized(text, old, new))
    for name in companions():
        config = read_json(source / name)
        if config is None:
            continue
        for layout in LAYOUTS:
            resized = layout.resized_config(name, config, old, info)
            if resized is not None:
                text = json.dumps(resized, indent=2, ensure_ascii=False) + "\n"
                write_text(directory / name, text)
                break

"""What a model's description may tell the world: no folders, homes, tokens or passwords."""

from __future__ import annotations

import re
import shlex
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any, TypeVar

Value = TypeVar("Value")

PATH = re.compile(
    r"(?<![\w:/<.~-])(?:file:(?=//))?(?:~[\w-]*|\.{1,2}|[A-Za-z]:)?(?:[\\/]+[^\s\\/'\"`,;=()\[\]]+)+"
)
"""Absolute paths and those from home, here or above, in running text: what follows a word, as in
B/16 and org/name, is none, and neither is an address of the web."""

SECRETS = ((re.compile(r"\bhf_\w{8,}"), "hf_..."), (re.compile(r"(?<=://)[^/@\s]+@"), ""))
"""Tokens of the Hub, and names and passwords in addresses."""


def without_paths(value: Value) -> Value:
    """A JSON value whose texts name files by their last part, and hold no token."""
    made: Any = value
    if isinstance(value, str):
        path = re.match(r"(~?/|[A-Za-z]:[\\/])", value) and "\n" not in value
        made = _last(value) if path else _text(value)
    elif isinstance(value, dict):
        made = {key: without_paths(item) for key, item in value.items()}
        if isinstance(command := value.get("command"), str):
            made["command"] = _command(command)
    elif isinstance(value, list):
        made = [without_paths(item) for item in value]
    return made  # type: ignore[no-any-return]


def _command(text: str) -> str:
    """A command line, word by word: a path may hold spaces, and a relative one many folders."""
    try:
        words = shlex.split(text)
    except ValueError:
        return _text(text)
    return shlex.join(map(_word, words))


def _word(word: str) -> str:
    option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return option + equals + ",".join(_last(part) for part in value.split(","))


def _last(value: str) -> str:
    """A path by its last part; a name, an address or org/name[@refs/pr/1] as it is."""
    if "://" in value or re.fullmatch(r"[\w-][\w.-]*/[\w.-]+(@[\w./-]+)?", value):
        return _text(value)
    if re.match(r"[A-Za-z]:[\\/]|\\\\", value):
        return PureWindowsPath(value).name
    if value.startswith(("/", "~", "./", "../")) or value.count("/") > 1:
        return PurePosixPath(value).name or "."
    return _text(value)


def _text(text: str) -> str:
    for secret, shown in SECRETS:
        text = secret.sub(shown, text)
    return PATH.sub(lambda found: re.split(r"[\\/]", found[0])[-1], text)

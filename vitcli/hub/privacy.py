"""What a published checkpoint may say of the machine that made it: no directories, no tokens.

Nothing is guessed from the look of a text: a path is published by its last component wherever a
path may be recorded, and a name with a slash stays whole only if it is known not to be a path.
"""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from vitcli.hub import registry
from vitcli.variants import VARIANTS
from vitcli.weight_files import SUFFIXES

PATHS = ("data", "output", "classes")
"""Keys of provenance under which a path may stand."""
MODELS = ("parent", "teacher")
"""Those under which a model stands: the name of a path, or a Hub repo."""

VARIANT = re.compile(rf"(R\d*\+)?({'|'.join(VARIANTS)})/\d{{1,2}}")
REPO = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
SECRETS = ((re.compile(r"\bhf_\w{8,}"), "hf_..."), (re.compile(r"(?<=://)[^/@\s]+@"), ""))
"""Tokens of the Hub; names and passwords in URLs."""
QUERY = re.compile(r"\?((?!::).)*")
"""What follows an address, up to the next one; it may be a signature that gives access."""


def publishable(
    provenance: Mapping[str, Any], places: Collection[Path] = (), known: Collection[str] = ()
) -> dict[str, Any]:
    """Provenance that names files by their last component and holds no token.

    Args:
        places: directories whose names are removed from free text, beside home and the like.
        known: Hub repos by which a run before was made.
    """
    known = {*known, *_repos(provenance)}
    places = {*places, Path.home(), Path.cwd(), Path(tempfile.gettempdir())}
    public: dict[str, Any] = {}
    for key, value in provenance.items():
        if key == "history" and isinstance(value, list):
            runs = [run for run in value if isinstance(run, dict)]
            public[key] = [publishable(run, places, known) for run in runs]
        elif key == "command" and isinstance(value, str):
            public[key] = _command(value, known)
        elif key in PATHS and isinstance(value, str):
            public[key] = _last(value)
        elif key in MODELS and isinstance(value, str):
            public[key] = value if value.partition("@")[0] in known else _last(value)
        else:
            public[key] = _text(value, places)
    return public


def _repos(provenance: Mapping[str, Any]) -> set[str]:
    """The Hub repos that a run was made from: of a path only the name is recorded."""
    models = (str(provenance.get(key, "")).partition("@")[0] for key in MODELS)
    return {entry.repo for entry in registry.entries().values()} | set(filter(is_repo, models))


def is_repo(model: str) -> bool:
    """Whether a recorded model is a Hub repo."""
    return bool(REPO.fullmatch(model)) and not model.endswith(SUFFIXES)


def _command(text: str, known: Collection[str]) -> str:
    """A command line, word by word: a path may hold spaces."""
    try:
        words = shlex.split(text)
    except ValueError:
        words = text.split()
    public = []
    for word in words:
        option = re.match(r"--[\w-]+=?|-[a-zA-Z]=?|", word)[0]  # type: ignore[index]
        value = word.removeprefix(option)
        public.append(option + _value(value, known) if value else option)
    return shlex.join(public)


def _value(value: str, known: Collection[str]) -> str:
    repo = re.sub(r"^(hf-hub:|hf://)|@.*$", "", value)
    is_url = "://" in value and not value.startswith("file:")
    if is_url or VARIANT.fullmatch(value) or repo in known:
        return str(_text(QUERY.sub("", value), ()))
    return _last(value)


def _last(path: str) -> str:
    """The last component of a path of any system."""
    return str(_text(re.split(r"[\\/]", path.rstrip("\\/"))[-1] or ".", ()))


def _text(value: Any, places: Collection[Path]) -> Any:
    """A JSON value without secrets and without the names of these directories."""
    if isinstance(value, dict):
        return {key: _text(item, places) for key, item in value.items()}
    if isinstance(value, list):
        return [_text(item, places) for item in value]
    if not isinstance(value, str):
        return value
    for secret, shown in SECRETS:
        value = secret.sub(shown, value)
    for place in sorted(map(str, places), key=len, reverse=True):
        if len(place) > 1:  # not "/"
            value = re.sub(
                rf"{re.escape(place)}(?![\w-])(?:[\\/]+[^\s\\/`'\",;)]+)*", _shorten, value
            )
    return value


def _shorten(found: re.Match[str]) -> str:
    return re.split(r"[\\/]", found[0])[-1]

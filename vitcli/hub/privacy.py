"""Removing directories and tokens of the local machine from a checkpoint before it is published.

There are no heuristics: wherever a path may be recorded, only its last component is published, and
a name with a slash is kept whole only if it is known not to be a path.
"""

import os
import re
import shlex
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from vitcli.architectures.variants import VARIANTS
from vitcli.hub import registry
from vitcli.weight_files import SUFFIXES
from vitcli.words import URL_USER, public_url

PATHS = ("data", "output", "classes")
"""Keys of provenance whose value may be a path."""
MODELS = ("parent", "teacher")
"""Keys whose value is a model: the last component of a path, or a Hub repo."""

VARIANT = re.compile(rf"(R\d*\+)?({'|'.join(VARIANTS)})/\d{{1,2}}")
REPO = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
SECRETS = ((re.compile(r"\bhf_\w{8,}"), "hf_..."), (URL_USER, ""))
"""Patterns and replacements of Hub tokens, and of user names and passwords in URLs."""


def redact(
    provenance: Mapping[str, Any], directories: Collection[Path] = (), repos: Collection[str] = ()
) -> dict[str, Any]:
    """Return provenance with paths reduced to their last component and tokens removed.

    Args:
        directories: those to remove from free text, besides the home directory and the like.
        repos: names of Hub repos, besides those recorded in it and in the registry.
    """
    repos = {*repos, *_known_repos(provenance)}
    home, temporary = map(Path, (os.path.expanduser("~"), tempfile.gettempdir()))
    directories = {*directories, home, Path.cwd(), temporary}
    public: dict[str, Any] = {}
    for key, value in provenance.items():
        if key == "history" and isinstance(value, list):
            runs = [run for run in value if isinstance(run, dict)]
            public[key] = [redact(run, directories, repos) for run in runs]
        elif key == "command" and isinstance(value, str):
            public[key] = _redact_command(value, repos)
        elif key in PATHS and isinstance(value, str):
            public[key] = _basename(value)
        elif key in MODELS and isinstance(value, str):
            public[key] = value if value.partition("@")[0] in repos else _basename(value)
        else:
            public[key] = _redact_text(value, directories)
    return public


def _known_repos(provenance: Mapping[str, Any]) -> set[str]:
    """Hub repos: those of the registry, the run's models with a slash, as paths have none, and its
    dataset on the Hub."""
    recorded = (str(provenance.get(key, "")).partition("@")[0] for key in (*MODELS, "dataset"))
    return {entry.repo for entry in registry.entries().values()} | set(filter(is_repo, recorded))


def is_repo(model: str) -> bool:
    """Whether a recorded model is a Hub repo."""
    return bool(REPO.fullmatch(model)) and not model.endswith(SUFFIXES)


def _redact_command(text: str, repos: Collection[str]) -> str:
    """Clean a command line word by word, as a path may contain spaces."""
    try:
        words = shlex.split(text)
    except ValueError:
        words = text.split()
    public = []
    for word in words:
        option = re.match(r"--[\w-]+=?|-[a-zA-Z]=?|", word)[0]  # type: ignore[index]
        value = word.removeprefix(option)
        public.append(option + _redact_value(value, repos) if value else option)
    return shlex.join(public)


def _redact_value(value: str, repos: Collection[str]) -> str:
    if "::" in value:  # several datasets
        return "::".join(_redact_value(part, repos) for part in value.split("::"))
    repo = re.sub(r"^(hf-hub:|hf://)|@.*$", "", value)
    is_url = "://" in value and not value.startswith("file:")
    if is_url or VARIANT.fullmatch(value) or repo in repos:
        return str(_redact_text(public_url(value), ()))
    return _basename(value)


def _basename(path: str) -> str:
    """The last component of a path of any operating system."""
    return str(_redact_text(re.split(r"[\\/]", path.rstrip("\\/"))[-1] or ".", ()))


def _redact_text(value: Any, directories: Collection[Path]) -> Any:
    """Remove secrets and the names of these directories from a JSON value."""
    if isinstance(value, dict):
        return {key: _redact_text(item, directories) for key, item in value.items()}
    if isinstance(value, list):
        return [_redact_text(item, directories) for item in value]
    if not isinstance(value, str):
        return value
    for secret, replacement in SECRETS:
        value = secret.sub(replacement, value)
    for directory in sorted(map(str, directories), key=len, reverse=True):
        if len(directory) > 1:  # not "/"
            path = rf"{re.escape(directory)}(?![\w-])(?:[\\/]+[^\s\\/`'\",;)]+)*"
            value = re.sub(path, _last_component, value)
    return value


def _last_component(match: re.Match[str]) -> str:
    return re.split(r"[\\/]", match[0])[-1]

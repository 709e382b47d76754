"""Resolving `--model`: the registry of released models, and the included models.

The only module that reads `weights/`. Standard library only.
"""

import gzip
import json
import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vitcli.architectures.variants import looks_like_variant
from vitcli.config import Architecture, ClassLabel, Preprocess, Score, Size
from vitcli.errors import ModelNotFoundError
from vitcli.layouts import layout, timm
from vitcli.weight_files import SUFFIXES
from vitcli.words import did_you_mean

NORMALIZE = {
    "half": layout.HALF,
    "imagenet": layout.IMAGENET,
    "clip": layout.CLIP,
    "satellite": ((0.430, 0.411, 0.296), (0.213, 0.156, 0.143)),  # DINOv3 on SAT-493M
    "none": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
}
"""Mean and standard deviation, by their names in the registry."""

LICENSE_LINKS = {
    "dinov3-license": "https://ai.meta.com/resources/models-and-libraries/dinov3-license/"
}
"""License -> URL of its text, for licenses without an identifier on the Hub."""

Labels = Literal["imagenet-1k", "imagenet-21k"]


class HubRepo(NamedTuple):
    """A repo on the Hugging Face Hub; revision None is its main branch."""

    id: str
    revision: str | None = None


@dataclass(frozen=True)
class RegistryEntry:
    """A released model."""

    name: str
    """Our name, such as "vit-b16-i21k"."""
    repo: str
    """The Hub repo in timm's layout."""
    classes: int
    """Outputs of the head; 0 for no head."""
    size: int
    """Height and width of the input images."""
    normalize: Literal["half", "imagenet", "clip", "satellite", "none"]
    """Mean and std of the input images, a key of NORMALIZE."""
    interpolation: Literal["bilinear", "bicubic"]
    crop_pct: float
    crop_mode: Literal["center", "squash"]
    license: str
    params: int
    """Number of parameters, including the head."""
    labels: Labels | None = None
    """The name of the list of classes."""
    score: Score = "softmax"
    top1: float | None = None
    """Top-1 accuracy in percent on ImageNet's validation split, as measured by timm."""
    transformers: str | None = None
    """The repo with the same weights in transformers' layout."""
    source: str | None = None
    """URL of the authors' release."""
    note: str | None = None

    @property
    def architecture(self) -> str:
        """timm's name of the architecture."""
        return self.repo.partition("/")[2].partition(".")[0]

    @property
    def model(self) -> Architecture:
        model = timm.architecture_from_args(self.architecture, {"img_size": self.size})
        return model.with_classes(self.classes)

    @property
    def preprocess(self) -> Preprocess:
        mean, std = NORMALIZE[self.normalize]
        size: Size = (self.size, self.size)
        return Preprocess(size, mean, std, self.interpolation, self.crop_pct, self.crop_mode)


# ---------------------------------------------------------------------------------------------
# Released and included models


@cache
def weights_root() -> Path:
    """The directory `weights`: inside an installed package, beside it in a checkout."""
    package = Path(__file__).parents[1]
    roots = (package / "weights", package.parent / "weights")
    return next(root for root in roots if (root / "shipped.toml").is_file())


@cache
def entries() -> dict[str, RegistryEntry]:
    """The registry entries by name, in the order of the files."""
    result: dict[str, RegistryEntry] = {}
    for file in sorted(weights_root().glob("*.toml")):
        if file.name != "shipped.toml":
            tables = tomllib.loads(file.read_text("utf-8"))
            defaults = tables.pop("defaults", {})
            result |= {name: RegistryEntry(name, **defaults | t) for name, t in tables.items()}
    return result


def _shipped() -> dict[str, Any]:
    return tomllib.loads((weights_root() / "shipped.toml").read_text("utf-8"))


@cache
def aliases() -> dict[str, str]:
    """Alias of an included checkpoint, such as "default" -> its name."""
    return dict(_shipped()["aliases"])


def shipped() -> dict[str, Path]:
    """The included checkpoints: name -> directory."""
    return {
        file.parent.name: file.parent for file in sorted(weights_root().glob("*/model.safetensors"))
    }


def find(name: str) -> RegistryEntry | Path | None:
    """The released model with this name or repo, or the directory of an included one."""
    key = aliases().get(name.lower(), name.lower())
    return shipped().get(key) or entries().get(key) or entry_of(name)


def require_model(name: str) -> RegistryEntry | Path:
    """`find`, but raise ModelNotFoundError with similar names if there is no such model."""
    if (model := find(name)) is None:
        repos = [entry.repo for entry in entries().values()]
        raise _not_found_error(name, "no model with this name", repos)
    return model


def shipped_license() -> str:
    """The license of the included checkpoints."""
    return str(_shipped()["license"])


def names() -> list[str]:
    """Every name that `resolve` accepts: aliases, included models, released models."""
    return [*aliases(), *shipped(), *entries()]


def entry_of(repo: str) -> RegistryEntry | None:
    """The registry entry of a Hub repo, named with or without its `timm/`."""
    return next((e for e in entries().values() if e.repo in (repo, f"timm/{repo}")), None)


@cache
def labels(name: Labels) -> tuple[ClassLabel, ...]:
    """A list of classes (WordNet synset, name), in index order."""
    lines = _read_gzip(f"{name}.tsv.gz").splitlines()
    return tuple(ClassLabel(*line.split("\t")) for line in lines)


@cache
def real_labels() -> tuple[tuple[int, ...], ...]:
    """ReaL labels (arXiv 2006.07159): for validation image i of ImageNet, the correct classes, of
    which there may be none."""
    return tuple(tuple(classes) for classes in json.loads(_read_gzip("imagenet-real.json.gz")))


def _read_gzip(name: str) -> str:
    return gzip.decompress((weights_root() / "labels" / name).read_bytes()).decode()


# ---------------------------------------------------------------------------------------------
# Resolving `--model`


HUB_URL = re.compile(r"hf-hub:|hf://(?:models/)?|(?:https?://)?(?:huggingface\.co|hf\.co)/")
URL_REVISION = re.compile(r"/(?:tree|resolve|blob|commit)/(refs/\w+/\w+|[^/]+)(?:/.*)?$")


def resolve(spec: str | Path) -> Path | RegistryEntry | HubRepo:
    """Resolve a model's name: an existing path, else a released or included model, else a repo on
    the Hub, `org/repo[@revision]` or its URL. `./x` is always a path.

    Raises:
        ModelNotFoundError: none of these; suggests similar names.
    """
    if not isinstance(spec, (str, os.PathLike)):
        what = f"expected a model name or path, not a {type(spec).__name__}"
        raise ModelNotFoundError(what)
    text = str(spec)
    if text.strip() and os.path.exists(path := os.path.expanduser(text)):
        return Path(path)
    text = text.strip()
    if isinstance(spec, Path) or re.match(r"(\.|~|/|[A-Za-z]:[\\/])", text):
        raise ModelNotFoundError("no such file or directory", where=text)
    return resolve_name(text)


def resolve_name(text: str) -> Path | RegistryEntry | HubRepo:
    """`resolve` for a name that is not a path."""
    if found := find(text):
        return found
    if prefix := HUB_URL.match(text):
        path = re.split("[?#]", text[prefix.end() :])[0].rstrip("/")
        text = URL_REVISION.sub(r"@\1", path).replace("%2F", "/")
    match = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@([\w./+-]+))?", text)
    if match and Path(match[1]).suffix not in SUFFIXES and not looks_like_variant(text):
        repo = HubRepo(match[1], match[2])
        entry = entry_of(repo.id) if repo.revision is None else None
        return entry or repo
    raise _not_found_error(text, "no such file or directory, and no model with this name")


def _not_found_error(text: str, what: str, candidates: Sequence[str] = ()) -> ModelNotFoundError:
    hint = did_you_mean(text, [*names(), *candidates]) or "list models with `vit models`"
    if looks_like_variant(text):
        hint = f"'{text}' is an architecture; list models with `vit models`, or train one with "
        hint += f"`vit pretrain --variant {text}`"
    elif any(entry.architecture == text for entry in entries().values()):
        hint = f"'{text}' is an architecture; list its models with `vit models list {text}`"
    return ModelNotFoundError(what, where=text or "an empty name", hint=hint)

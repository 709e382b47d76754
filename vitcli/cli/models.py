"""`vit models`: the models that have a name, those that are cached, and removing them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from vitcli.cli import options, output
from vitcli.cli.main import PLAIN
from vitcli.config import Architecture, ClassLabel, nearest
from vitcli.errors import HubError, ModelNotFoundError, VitError
from vitcli.hub import registry
from vitcli.hub.cache import RepoCache, fetched
from vitcli.hub.fetch import cached
from vitcli.hub.registry import HubRepo, RegistryEntry

if TYPE_CHECKING:
    from typer._click import Context

    from vitcli.checkpoints.info import CheckpointInfo

FLOAT32 = 4
"""Bytes of a released weight."""


class ModelsGroup(TyperGroup):
    """`vit models WORDS` is `vit models list WORDS`."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        if not args or args[0] not in {*self.commands, *ctx.help_option_names}:
            args = ["list", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=ModelsGroup, add_completion=False, **PLAIN)

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="WORDS",
        help="Only models whose line has all of these, as in: b16 384 i21k; cached.",
        show_default=False,
    ),
]
Name = Annotated[
    str,
    typer.Argument(metavar="NAME", show_default=False, autocompletion=options.complete_model),
]
Names = Annotated[
    list[str],
    typer.Argument(
        metavar="NAME...",
        help="Names of models, or Hub repos: org/name.",
        show_default=False,
        autocompletion=options.complete_model,
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@app.callback()
def models() -> None:
    """List the models that have a name: vit models [WORDS]..., as in vit models b16 384 i21k."""


@app.command("list")
def list_models(
    words: Words = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """List models; words choose among them."""
    rows = [row for row in _rows() if all(word.lower() in _line(row) for word in words or ())]
    if not rows:
        like = nearest(" ".join(words or ()), registry.names())
        raise ModelNotFoundError(
            f"no model matches '{' '.join(words or ())}'",
            hint=f"did you mean {' or '.join(like)}?"
            if like
            else "`vit models` lists all, `vit pull NAME` downloads one",
        )
    if json:
        for row in rows:
            output.json_line(row)
        return
    columns = ("model", "params", "classes", "size", "px", "license", "here")
    output.table(columns, (_cells(row) for row in rows), numbers=(1, 2, 3, 4))
    here = sum(row["here"] is not None for row in rows)
    count = f"{len(rows):,} model{'s' * (len(rows) != 1)}, {here:,} here"
    output.note(f"{count}; see also `vit models show NAME`, `vit pull NAME`", quiet)


@app.command()
def show(name: Name, json: options.Json = False, debug: options.Debug = False) -> None:
    """Describe one model, without downloading it."""
    found = registry.find(name) or _cached(name) or registry.known(name)
    row = _row(found)
    details, classes = _details(found)
    if json:
        output.json_line({**row, **details})
        return
    for what, text in _as_lines(row, details, classes):
        output.line(output.entry(what, text, 20, sys.stdout))


@app.command("rm")
def remove(
    names: Names,
    yes: Yes = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Remove downloaded models from the Hub's cache, and nothing else."""
    repos = [RepoCache(repo) for repo in dict.fromkeys(map(_repo, names))]
    if missing := [cache.repo for cache in repos if not cache.directory.is_dir()]:
        raise HubError("is not in the cache", where=", ".join(missing))
    if not yes:
        if json:
            raise typer.BadParameter("--json cannot ask: add --yes")
        for cache in repos:
            output.note(f"{cache.repo}: {output.size(cache.size())} in {cache.directory}")
        typer.confirm("Remove?", abort=True, err=True)
    for cache in repos:
        freed = cache.remove()
        if json:
            output.json_line({"repo": cache.repo, "freed": freed})
        else:
            output.line(f"removed {cache.repo}: {output.size(freed)} freed")


# ---------------------------------------------------------------------------------------------

Model = RegistryEntry | Path | HubRepo
"""A released model, the directory of one that ships, or any other repo that was fetched."""


def _rows() -> list[dict[str, Any]]:
    """All models, those that ship first."""
    released = registry.entries().values()
    known = {entry.repo for entry in released}
    others = [HubRepo(repo) for repo in fetched() if repo not in known]
    models: list[Model] = [*registry.shipped().values(), *released, *others]
    return [_row(model) for model in models]


def _cached(name: str) -> HubRepo | None:
    """The fetched repo of that name, which the registry does not know."""
    return HubRepo(name) if name in fetched() else None


def _row(model: Model) -> dict[str, Any]:
    if isinstance(model, Path):
        return _shipped(model)
    return _released(model) if isinstance(model, RegistryEntry) else _other(model)


def _released(entry: RegistryEntry) -> dict[str, Any]:
    here = cached(entry.repo, entry.revision)
    return {
        "name": entry.name,
        "repo": entry.repo,
        "revision": entry.revision,
        "parameters": entry.params,
        "classes": entry.classes,
        "labels": entry.labels,
        "bytes": FLOAT32 * entry.params,
        "resolution": [entry.size, entry.size],
        "gmacs": entry.gmacs,
        "top1": entry.top1,
        "license": entry.license,
        "here": "cached" if here else None,
        "path": str(here) if here else None,
    }


def _other(repo: HubRepo) -> dict[str, Any]:
    here, info = cached(repo.id), _stored_info(repo)
    return {
        "name": repo.id,
        "repo": repo.id,
        "revision": None,
        "parameters": info and info.model.num_params(),
        "classes": info and info.model.num_classes,
        "labels": None,
        "bytes": RepoCache(repo.id).size(),
        "resolution": info and list(info.model.image_size),
        "gmacs": info and _gmacs(info.model),
        "top1": None,
        "license": None,
        "here": "cached" if here else "incomplete",
        "path": str(here) if here else None,
    }


def _shipped(directory: Path) -> dict[str, Any]:
    info = _stored_info(directory)
    assert info is not None
    return {
        "name": directory.name,
        "repo": None,
        "revision": None,
        "parameters": info.model.num_params(),
        "classes": info.model.num_classes,
        "labels": None,
        "bytes": (directory / "model.safetensors").stat().st_size,
        "resolution": list(info.model.image_size),
        "gmacs": _gmacs(info.model),
        "top1": None,
        "license": registry.shipped_license(),
        "here": "ships",
        "path": str(directory),
    }


def _gmacs(model: Architecture) -> float:
    return round((model.macs() + model.feature_dim * model.num_classes) / 1e9, 2)


def _stored_info(model: Path | HubRepo) -> CheckpointInfo | None:
    """What a checkpoint that is here says of itself; None where it cannot be read."""
    from vitcli.checkpoints.read import read_info

    path = model if isinstance(model, Path) else cached(model.id)
    try:
        return read_info(path)[0] if path else None
    except VitError:
        return None


def _line(row: dict[str, Any]) -> str:
    """What words are looked for in."""
    text = f"{row['name']} {row['repo'] or ''} {row['labels'] or ''} {' '.join(_cells(row))}"
    return text.lower()


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    height, width = row["resolution"] or (0, 0)
    count = row["parameters"]
    return (
        row["name"],
        f"{count / 1e6:.1f}M" if (count or 0) < 1e9 else f"{count / 1e9:.2f}B",
        f"{row['classes']:,}" if row["classes"] else "-",
        output.size(row["bytes"]),
        str(width) if height == width else f"{height}x{width}",
        row["license"] or "-",
        " as ".join([row["here"] or "", *_aliases(row["name"])]),
    )


def _aliases(name: str) -> list[str]:
    return [alias for alias, means in registry.aliases().items() if means == name]


def _details(found: Model) -> tuple[dict[str, Any], Sequence[ClassLabel]]:
    """What `show` adds to a model's row."""
    from vitcli.checkpoints.read import read_info
    from vitcli.cli.info import describe_model

    released = found if isinstance(found, RegistryEntry) else None
    if isinstance(found, RegistryEntry):
        source: RegistryEntry | CheckpointInfo = found
        classes = registry.labels(found.labels) if found.labels else ()
    else:
        path = found if isinstance(found, Path) else cached(found.id)
        if path is None:
            raise HubError("is only partly in the cache", hint="`vit pull` fetches the rest")
        source = read_info(path)[0]
        classes = source.classes
    return {
        **describe_model(source.model),
        "preprocess": dataclasses.asdict(source.preprocess),
        "score": source.score,
        "transformers": released and released.transformers,
        "source": released and released.source,
        "note": released and released.note,
    }, classes


def _as_lines(
    row: dict[str, Any], details: dict[str, Any], classes: Sequence[ClassLabel]
) -> list[tuple[str, str]]:
    """The same for people."""
    from vitcli.cli.info import as_lines

    named = [label._asdict() for label in classes]
    lines = list(as_lines({"model": row["name"], **details, "classes": named, "provenance": {}}))
    fetch = f"not here: `vit pull {row['name']}` downloads {output.size(row['bytes'])}"
    more = {
        "multiply-adds": f"{row['gmacs']:,.2f} billion per image, with the head",
        "ImageNet top-1": row["top1"] and f"{row['top1']:.1f}%, as timm measured",
        "labels": row["labels"],
        "license": row["license"],
        "repo": row["repo"] and f"{row['repo']}{'@' + row['revision'] if row['revision'] else ''}",
        "for transformers": details["transformers"],
        "source": details["source"],
        "note": details["note"],
        "here": f"{_cells(row)[-1]}: {row['path']}" if row["here"] else fetch,
    }
    return lines + [(what, str(text)) for what, text in more.items() if text]


def _repo(name: str) -> str:
    """The repo that a name means, whether the registry knows it or not."""
    found = registry.resolve(name) if "/" in name else registry.known(name)
    if isinstance(found, RegistryEntry):
        return found.repo
    if isinstance(found, Path):
        raise HubError("ships with vit and is not in the cache", where=name)
    if found.revision is not None:
        raise HubError("is removed as a whole: leave out the revision", where=name)
    return found.id

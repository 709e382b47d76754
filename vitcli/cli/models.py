"""`vit models`: what there is to fetch, what is here already, and removing that."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from vitcli.cli import options, output
from vitcli.cli.main import PLAIN
from vitcli.config import nearest
from vitcli.errors import HubError, ModelNotFoundError
from vitcli.hub import cache, registry
from vitcli.hub.registry import RegistryEntry

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
            f"no model has all of the words: {' '.join(words or ())}",
            hint=f"did you mean {' or '.join(like)}?" if like else "`vit models` lists them all",
        )
    if json:
        for row in rows:
            output.json_line(row)
        return
    columns = ("model", "params", "classes", "size", "px", "licence", "here")
    output.table(columns, (_cells(row) for row in rows), numbers=(1, 2, 3, 4))
    here = sum(row["here"] is not None for row in rows)
    count = f"{len(rows):,} model{'s' * (len(rows) != 1)}, {here:,} here"
    output.note(f"{count}; `vit models show NAME` tells more, `vit pull NAME` fetches", quiet)


@app.command()
def show(name: Name, json: options.Json = False, debug: options.Debug = False) -> None:
    """Say what is known of one model, without fetching it."""
    found = registry.known(name)
    row = _shipped(found) if isinstance(found, Path) else _released(found)
    told = _details(found)
    if json:
        output.json_line({**row, **told})
        return
    for what, text in _as_lines(row, told, found):
        output.line(output.entry(what, text, 20, sys.stdout))


@app.command("rm")
def remove(
    names: Names,
    yes: Yes = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Remove fetched models from the Hub's cache, and nothing else."""
    repos = list(dict.fromkeys(map(_repo, names)))
    missing = [repo for repo in repos if not cache.folder(repo).is_dir()]
    if missing:
        raise HubError("is not in the cache", where=", ".join(missing))
    if not yes:
        if json:
            raise typer.BadParameter("--json asks nothing: say --yes, too")
        for repo in repos:
            output.note(f"{repo}: {output.size(cache.size(repo))} in {cache.folder(repo)}")
        typer.confirm("Remove?", abort=True, err=True)
    for repo in repos:
        freed = cache.remove(repo)
        if json:
            output.json_line({"repo": repo, "freed": freed})
        else:
            output.line(f"removed {repo}: {output.size(freed)} freed")


# ---------------------------------------------------------------------------------------------


def _rows() -> list[dict[str, Any]]:
    """All that there is, what ships first."""
    shipped = [_shipped(folder) for folder in registry.shipped().values()]
    return shipped + [_released(entry) for entry in registry.entries().values()]


def _released(entry: RegistryEntry) -> dict[str, Any]:
    here = cache.snapshot(entry.repo, entry.revision)
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


def _shipped(folder: Path) -> dict[str, Any]:
    model = _stored_info(folder).model
    return {
        "name": folder.name,
        "repo": None,
        "revision": None,
        "parameters": model.num_params(),
        "classes": model.num_classes,
        "labels": None,
        "bytes": (folder / "model.safetensors").stat().st_size,
        "resolution": list(model.image_size),
        "gmacs": round((model.macs() + model.feature_dim * model.num_classes) / 1e9, 2),
        "top1": None,
        "license": registry.shipped_license(),
        "here": "ships",
        "path": str(folder),
    }


def _stored_info(folder: Path) -> CheckpointInfo:
    from vitcli.checkpoints.read import open_checkpoint

    return open_checkpoint(folder / "model.safetensors").info


def _line(row: dict[str, Any]) -> str:
    """What words are looked for in."""
    text = f"{row['name']} {row['repo'] or ''} {row['labels'] or ''} {' '.join(_cells(row))}"
    return text.lower()


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    height, width = row["resolution"]
    count = row["parameters"]
    return (
        row["name"],
        f"{count / 1e6:.1f}M" if count < 1e9 else f"{count / 1e9:.2f}B",
        f"{row['classes']:,}" if row["classes"] else "-",
        output.size(row["bytes"]),
        str(width) if height == width else f"{height}x{width}",
        row["license"],
        " as ".join([row["here"] or "", *_aliases(row["name"])]),
    )


def _aliases(name: str) -> list[str]:
    return [alias for alias, means in registry.aliases().items() if means == name]


def _details(found: RegistryEntry | Path) -> dict[str, Any]:
    """What `show` adds to a model's row."""
    from vitcli.cli.info import describe_model

    source = _stored_info(found) if isinstance(found, Path) else found
    released = found if isinstance(found, RegistryEntry) else None
    return {
        **describe_model(source.model),
        "preprocess": dataclasses.asdict(source.preprocess),
        "score": source.score,
        "transformers": released and released.transformers,
        "source": released and released.source,
        "note": released and released.note,
    }


def _as_lines(
    row: dict[str, Any], told: dict[str, Any], found: RegistryEntry | Path
) -> list[tuple[str, str]]:
    """The same for people."""
    from vitcli.cli.info import as_lines

    if isinstance(found, Path):
        classes = _stored_info(found).classes
    else:
        classes = registry.labels(found.labels) if found.labels else ()
    named = [label._asdict() for label in classes]
    lines = list(as_lines({"model": row["name"], **told, "classes": named, "provenance": {}}))
    fetch = f"not here: `vit pull {row['name']}` fetches {output.size(row['bytes'])}"
    more = {
        "multiply-adds": f"{row['gmacs']:,.2f} billion an image, with the head",
        "ImageNet top-1": row["top1"] and f"{row['top1']:.1f}%, as timm measured",
        "labels": row["labels"],
        "licence": row["license"],
        "repo": row["repo"] and f"{row['repo']}{'@' + row['revision'] if row['revision'] else ''}",
        "for transformers": told["transformers"],
        "source": told["source"],
        "note": told["note"],
        "here": f"{_cells(row)[-1]}: {row['path']}" if row["here"] else fetch,
    }
    return lines + [(what, str(text)) for what, text in more.items() if text]


def _repo(name: str) -> str:
    """The repo that a name means, whether the registry knows it or not."""
    found = registry.resolve(name) if "/" in name else registry.known(name)
    if isinstance(found, RegistryEntry):
        return found.repo
    if isinstance(found, Path):
        raise HubError("is no fetched model: it is at " + str(found), where=name)
    if found.revision is not None:
        raise HubError("goes as a whole: leave out the revision", where=name)
    return found.id

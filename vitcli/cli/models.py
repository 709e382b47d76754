"""`vit models`: list named and cached models, describe one, and remove downloads."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from vitcli.cli import output
from vitcli.cli.main import TYPER_SETTINGS
from vitcli.cli.options import CommonOptions
from vitcli.cli.parameters import GroupedCommand, UsageError, command
from vitcli.errors import HubError, ModelNotFoundError, VitError
from vitcli.fields import option
from vitcli.hub import registry
from vitcli.hub.cache import RepoCache, cached_repos, root
from vitcli.hub.fetch import cached
from vitcli.hub.registry import HubRepo, RegistryEntry
from vitcli.weight_files import SAFE, weights_among
from vitcli.words import did_you_mean, format_size, pluralize, quote

if TYPE_CHECKING:
    from vitcli.checkpoints.info import CheckpointInfo

CACHED, INCLUDED = "cached", "included"
"""Values of `status` for downloaded and included models."""
BYTES_PER_WEIGHT = 4
"""Bytes per weight of a released model."""


class ModelsGroup(TyperGroup):
    """Treats `vit models WORDS` as `vit models list WORDS`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_command = bool(args) and args[0] in {*self.commands, *ctx.help_option_names}
        # Shell completion parses no arguments, to offer the subcommands.
        if not is_command and (args or not ctx.resilient_parsing):
            args = ["list", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=ModelsGroup, add_completion=False, **TYPER_SETTINGS)


@dataclass(frozen=True, kw_only=True)
class List(CommonOptions):
    """Options of `vit models list`."""

    words: list[str] = option(
        [],
        "WORDS",
        "Only list models whose name, repo, class list or table row contains all of these words; "
        f'"{CACHED}" selects downloaded models, "{INCLUDED}" those included with vit.',
    )


@dataclass(frozen=True, kw_only=True)
class Show(CommonOptions):
    """Options of `vit models show`."""

    name: str = option(
        ...,
        "NAME",
        "Model name (see `vit models`), or a downloaded Hub repo (org/name[@revision]).",
    )


@dataclass(frozen=True, kw_only=True)
class Remove(CommonOptions):
    """Options of `vit models rm`."""

    names: list[str] = option(
        ..., "NAME", "Model names (see `vit models`) or Hub repos (org/name)."
    )
    yes: bool = option(False, "--yes -y", "Remove without asking.")


@app.callback()
def models() -> None:
    """List models, describe one, or remove downloads.

    `vit models [WORDS...]` is short for `vit models list [WORDS...]`, with the same options; see
    `vit models list --help`.

    \b
    Examples:
      vit models b16 384 i21k
      vit models show vit-b16-i21k
      vit models rm vit-b16-i21k
    """


@app.command("list", cls=GroupedCommand)
@command(List)
def list_models(args: List) -> None:
    """List named models and downloaded repos.

    \b
    Examples:
      vit models list
      vit models list b16 384
      vit models list cached
    """
    words = [word.lower() for word in args.words]
    rows = [_model_row(model, args.json) for model in _all_models()]
    texts = [(row, _search_text(row)) for row in rows]
    rows = [row for row, text in texts if all(word in text for word in words)]
    if not rows and words == [CACHED]:
        raise ModelNotFoundError(
            "no downloaded models", where=root(), hint="download one with `vit pull NAME`"
        )
    if not rows:
        unknown = [word for word in words if not any(word in text for _, text in texts)]
        searched = " ".join(unknown or words)
        raise ModelNotFoundError(
            f"no model matches '{searched}'",
            hint=did_you_mean(searched, [*registry.names(), "show", "rm"])
            or "list all models with `vit models`, or download one with `vit pull NAME`",
        )
    if args.json:
        for row in rows:
            output.json_line(row)
        return
    columns = ("model", "params", "classes", "size", "px", "license", "status")
    output.table(columns, (_cells(row) for row in rows), numeric=(1, 2, 3, 4))
    num_offline = sum(row["status"] is not None for row in rows)
    summary = f"{pluralize(len(rows), 'model')}, {num_offline:,} available offline"
    output.note(f"{summary}; see also `vit models show NAME`, `vit pull NAME`")


@app.command("show", cls=GroupedCommand)
@command(Show)
def show(args: Show) -> None:
    """Describe a model without downloading it.

    \b
    Examples:
      vit models show vit-b16-i21k
      vit models show default --json
    """
    from vitcli.cli.info import architecture_lines, describe_model, print_lines, use_lines

    model = _find_model(args.name)
    row, entry = _model_row(model), model.entry
    source: RegistryEntry | CheckpointInfo = entry or model.info()
    if isinstance(source, RegistryEntry):
        classes = registry.labels(source.labels) if source.labels else ()
    else:
        classes = source.classes
    config = source.model
    extra = {key: entry and getattr(entry, key) for key in ("transformers", "source", "note")}
    if args.json:
        inputs = {"preprocess": dataclasses.asdict(source.preprocess), "score": source.score}
        output.json_line({**row, **describe_model(config), **inputs, **extra})
        return
    hint = f"not downloaded: `vit pull {model.name}` downloads {output.format_bytes(row['bytes'])}"
    facts = {
        "ImageNet top-1": row["top1"] and f"{row['top1']:.1f}%, as measured by timm",
        "class list": row["class_list"],
        "license": row["license"],
        "repo": row["repo"] and f"{row['repo']}{'@' + row['revision'] if row['revision'] else ''}",
        "for transformers": extra["transformers"],
        "source": extra["source"],
        "note": extra["note"],
        "status": f"{_cells(row)[-1]}: {row['path']}" if row["status"] else hint,
    }
    print_lines([("model", model.name), *architecture_lines(config)])
    print_lines(use_lines(source.preprocess, classes, config.num_classes, source.score))
    print_lines((name, str(value)) for name, value in facts.items() if value)


@app.command("rm", cls=GroupedCommand)
@command(Remove)
def remove(args: Remove) -> None:
    """Remove downloaded models from the Hub's cache.

    \b
    Examples:
      vit models rm vit-b16-i21k
      vit models rm google/vit-base-patch16-224 --yes
    """
    names = {_repo_id(name): name for name in args.names}
    repos = [RepoCache(repo) for repo in names]
    if missing := [names[cache.repo] for cache in repos if not cache.directory.is_dir()]:
        raise HubError(
            "not downloaded",
            where=", ".join(missing),
            hint="list downloaded models with `vit models cached`",
        )
    if not args.yes:
        if args.json:
            raise UsageError("--json cannot ask for confirmation: add --yes")
        for cache in repos:
            size = output.format_bytes(cache.size())
            output.note(f"{names[cache.repo]}: {size} in {cache.directory}")
        if not output.confirm("Remove?"):
            output.note("nothing was removed")
            raise typer.Exit(1)
    for cache in repos:
        freed = cache.remove()
        if args.json:
            output.json_line({"repo": cache.repo, "freed": freed})
        else:
            output.line(f"removed {names[cache.repo]}: {output.format_bytes(freed)} freed")


# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A released model, an included model, or any other downloaded repo."""

    name: str
    status: str | None = None
    path: Path | None = None
    entry: RegistryEntry | None = None
    repo: str | None = None
    revision: str | None = None

    def info(self) -> CheckpointInfo:
        """Read the metadata of the checkpoint. Raises VitError."""
        from vitcli.checkpoints.read import read_info

        if self.path is None:
            raise HubError(
                "only partly in the cache",
                where=self.name,
                hint=f"complete it with `vit pull {self.name}`",
            )
        return read_info(self.path)[0]


def _all_models() -> list[Model]:
    """Return all models, the included ones first."""
    return [
        *(Model(name, INCLUDED, path) for name, path in registry.shipped().items()),
        *map(_released_model, registry.entries().values()),
        *(
            _cached_model(HubRepo(repo, revision))
            for repo, revision in cached_repos()
            if revision or registry.entry_of(repo) is None
        ),
    ]


def _released_model(entry: RegistryEntry) -> Model:
    path = cached(entry.repo)
    return Model(entry.name, CACHED if path else None, path, entry, entry.repo)


def _cached_model(repo: HubRepo) -> Model:
    path, name = cached(*repo), "@".join(filter(None, repo))
    return Model(name, CACHED if path else "incomplete", path, None, *repo)


def _find_model(name: str) -> Model:
    """Return the model for a name or repo. Raises VitError."""
    resolved = _resolve_name(name)
    if isinstance(resolved, Path):
        return Model(resolved.name, INCLUDED, resolved)
    if isinstance(resolved, RegistryEntry):
        return _released_model(resolved)
    if not RepoCache(resolved.id).directory.is_dir():
        raise HubError("not downloaded", where=name, hint=f"download it with `vit pull {name}`")
    return _cached_model(resolved)


def _model_row(model: Model, with_cost: bool = True) -> dict[str, Any]:
    """Return the model as a JSON object; null means unknown. The cost of all released models takes
    as long to compute as the rest of the list."""
    entry, info = model.entry, None
    if model.path and not entry and weights_among(os.listdir(model.path), SAFE):  # needs no torch
        with contextlib.suppress(VitError):  # a repo with an unsupported model
            info = model.info()
    config = entry.model if entry and with_cost else info and info.model
    image_size = (entry.size, entry.size) if entry else config and config.image_size
    macs = config and config.macs() + config.feature_dim * config.num_classes
    if entry:
        num_bytes = BYTES_PER_WEIGHT * entry.params
    elif model.path:
        num_bytes = sum(file.stat().st_size for file in model.path.rglob("*") if file.is_file())
    else:
        num_bytes = RepoCache(str(model.repo)).size()
    return {
        "name": model.name,
        "repo": model.repo,
        "revision": model.revision,
        "parameters": entry.params if entry else config and config.num_params(),
        "classes": entry.classes if entry else config and config.num_classes,
        "class_list": entry and entry.labels,
        "bytes": num_bytes,
        "resolution": image_size and list(image_size),
        "gmacs": macs and round(macs / 1e9, 2),
        "top1": entry and entry.top1,
        "license": entry.license if entry else None if model.repo else registry.shipped_license(),
        "status": model.status,
        "path": model.path and str(model.path),
    }


def _search_text(row: dict[str, Any]) -> str:
    """Return the text that the search words are matched against."""
    text = f"{row['name']} {row['repo'] or ''} {row['class_list'] or ''} {' '.join(_cells(row))}"
    return text.lower()


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    num_params = row["parameters"] or 0
    aliases = [alias for alias, means in registry.aliases().items() if means == row["name"]]
    params = f"{num_params / 1e6:.1f}M" if num_params < 1e9 else f"{num_params / 1e9:.2f}B"
    return (
        row["name"],
        params if num_params else "-",
        f"{row['classes']:,}" if row["classes"] else "-",
        output.format_bytes(row["bytes"]),
        format_size(row["resolution"]) if row["resolution"] else "-",
        row["license"] or "-",
        " as ".join([row["status"] or "", *aliases]),
    )


def _resolve_name(name: str) -> RegistryEntry | Path | HubRepo:
    """Resolve a name to a released model, an included one or a Hub repo. Raises VitError."""
    is_name = "/" in name or registry.find(name) or not os.path.exists(name)
    if name.startswith((".", "~", "/")) or not is_name:
        hint = f"describe a checkpoint on disk with `vit info {quote(name)}`"
        raise HubError("a path, not a model's name", where=name, hint=hint)
    return registry.resolve_name(name) if "/" in name else registry.require_model(name)


def _repo_id(name: str) -> str:
    """Return the repo id for a name. Raises VitError."""
    resolved = _resolve_name(name)
    if isinstance(resolved, RegistryEntry):
        return resolved.repo
    if isinstance(resolved, Path):
        raise HubError("included with vit, so it cannot be removed", where=name)
    if resolved.revision is not None:
        raise HubError("a repo can only be removed as a whole: leave out the revision", where=name)
    return resolved.id

"""`vit pull`."""

from __future__ import annotations

import typer

from vitcli.checkpoints.read import locate, open_checkpoint
from vitcli.cli import options, output
from vitcli.cli.models import Names
from vitcli.errors import VitError
from vitcli.hub import registry
from vitcli.hub.registry import HubRepo, RegistryEntry


def pull(
    names: Names,
    json: options.Json = False,
    offline: options.Offline = False,
    allow_pickle: options.AllowPickle = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Fetch models from the Hub and check them, so that they are here when they are needed.

    Prints where each lies. One that cannot be had is reported and the others are fetched; the exit
    code is then 1.
    """
    failed = 0
    for name in names:
        try:
            found = registry.resolve(name)
            with output.FetchDisplay(quiet) as fetching:
                located = locate(name, offline, fetching, allow_pickle)
            if isinstance(found, RegistryEntry):
                open_checkpoint(located.file, found)  # warns where the registry is wrong
        except KeyboardInterrupt as stop:
            stop.add_note(f"stopped; {name} was not fetched")
            raise
        except VitError as error:
            if len(names) == 1 and not json:
                raise
            failed += 1
            if json:
                output.json_line({"name": name, "error": str(error)})
            else:
                output.error(str(error))
            continue
        if json:
            repo = found.repo if isinstance(found, RegistryEntry) else None
            repo = found.id if isinstance(found, HubRepo) else repo
            told = {"path": str(located.file), "bytes": located.file.stat().st_size}
            output.json_line({"name": name, "repo": repo, **told})
        else:
            output.line(str(located.file))
    if failed:
        raise typer.Exit(1)

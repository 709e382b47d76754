"""`vit pull`."""

from __future__ import annotations

from typing import Annotated

import typer

from vitcli.checkpoints.read import locate, open_checkpoint
from vitcli.cli import options, output
from vitcli.cli.models import Names
from vitcli.errors import VitError
from vitcli.hub import registry
from vitcli.hub.fetch import with_shards
from vitcli.hub.registry import HubRepo
from vitcli.hub.retry import TIMEOUT

Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        min=0,
        metavar="SECONDS",
        help="Give up if the Hub sends nothing for this long, or asks to wait longer.  "
        f"[default: {TIMEOUT:.0f}]",
    ),
]


def pull(
    names: Names,
    timeout: Timeout = None,
    json: options.Json = False,
    offline: options.Offline = False,
    allow_pickle: options.AllowPickle = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Download models from the Hub and verify them.

    Prints the path of each. Running the command again resumes an interrupted download. If one
    model fails, the others are still downloaded, and the exit code is 1.

    \b
    Examples:
      vit pull vit-b16-i21k
      vit pull timm/vit_tiny_patch16_224.augreg_in21k google/vit-base-patch16-224@main
    """
    failed = 0
    for name in names:
        try:
            found = registry.resolve(name)
            with output.FetchDisplay(quiet) as display:
                file, entry = locate(name, offline, display, allow_pickle, timeout)
            open_checkpoint(file, entry)  # warns where the registry is wrong
        except KeyboardInterrupt as stop:
            stop.add_note(f"stopped; resume the download with `vit pull {name}`")
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
            repo = entry.repo if entry else found.id if isinstance(found, HubRepo) else None
            size = sum(path.stat().st_size for path in with_shards(file))
            output.json_line({"name": name, "repo": repo, "path": str(file), "bytes": size})
        else:
            if not display.shown:
                output.note(f"{name} is already in the cache", quiet)
            output.line(str(file))
    if failed:
        raise typer.Exit(1)

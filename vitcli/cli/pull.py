"""`vit pull`."""

from dataclasses import dataclass
from pathlib import Path

import typer

from vitcli.checkpoints.read import open_checkpoint
from vitcli.checkpoints.store import files_of
from vitcli.cli import output
from vitcli.cli.options import DownloadOptions, fetching
from vitcli.cli.parameters import command
from vitcli.errors import VitError
from vitcli.fields import option
from vitcli.hub import registry
from vitcli.hub.registry import HubRepo
from vitcli.retry import TIMEOUT


@dataclass(frozen=True, kw_only=True)
class HubOptions(DownloadOptions):
    """Options of commands that transfer files from or to the Hub."""

    timeout: float | None = option(
        None,
        "--timeout SECONDS",
        "Give up if the Hub sends nothing for this long, or asks vit to wait longer.  [default: "
        f"{TIMEOUT:.0f}]",
        min=0,
    )


@dataclass(frozen=True, kw_only=True)
class Pull(HubOptions):
    """Options of `vit pull`."""

    names: list[str] = option(
        ..., "NAME", "Model names (see `vit models`) or Hub repos (org/name[@revision])."
    )


@command(Pull)
def pull(args: Pull) -> None:
    """Download models from the Hub and verify them.

    Prints the path of each. Running the command again resumes an interrupted download. If one
    model fails, the others are still downloaded, and the exit code is 1.

    \b
    Examples:
      vit pull vit-b16-i21k
      vit pull timm/vit_tiny_patch16_224.augreg_in21k google/vit-base-patch16-224@main
    """
    failed = False
    for name in args.names:
        try:
            resolved = registry.resolve(name)
            with fetching(args) as kwargs:
                checkpoint = open_checkpoint(name, timeout=args.timeout, **kwargs)
        except KeyboardInterrupt as stop:
            stop.add_note(f"stopped; resume the download with `vit pull {name}`")
            raise
        except VitError as error:
            if args.json:
                output.json_line({"name": name, "error": error.what})
            if len(args.names) == 1:
                raise
            output.error(error.message, error.hint)
            failed = True
            continue
        if args.json:
            entry, file = checkpoint.entry, checkpoint.file
            repo = entry.repo if entry else resolved.id if isinstance(resolved, HubRepo) else None
            size = sum(path.stat().st_size for path in files_of(file))
            output.json_line({"name": name, "repo": repo, "path": str(file), "bytes": size})
        else:
            if not kwargs["on_progress"].was_called:
                location = "on this machine" if isinstance(resolved, Path) else "in the cache"
                output.note(f"{name} is already {location}")
            output.line(str(checkpoint.file))
    if failed:
        raise typer.Exit(1)

"""`--devices N`: run a command as N ranks, one per device, with torchrun's launcher."""

import dataclasses
import functools
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import typer

from vitcli.cli.options import InferenceOptions
from vitcli.cli.parameters import UsageError
from vitcli.cli.parts import is_directory
from vitcli.machine import is_launched, rank


def on_devices(*outputs: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Implement `--devices` for a command whose first argument is an `InferenceOptions`.

    Args:
        outputs: the options that name output files. Rank 0 writes them; the other ranks write to a
            temporary directory.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(args: InferenceOptions, *extra: Any) -> None:
            if args.devices or is_launched():
                for name in {"-", "@-"}.intersection(getattr(args, "images", ())):
                    raise UsageError(f"several devices cannot share stdin, '{name}'")
            launch_ranks(args.devices, args.device)
            if not is_launched():
                return command(args, *extra)
            from vitcli.devices import choose_device
            from vitcli.distributed import join_ranks

            with tempfile.TemporaryDirectory() as scratch, join_ranks(choose_device(args.device)):
                if rank():
                    paths = {name: path for name in outputs if (path := getattr(args, name))}
                    for name, path in paths.items():
                        own = os.path.join(scratch, name)  # basenames may be the same
                        os.mkdir(own)
                        base = "" if is_directory(path) else os.path.basename(path)
                        paths[name] = os.path.join(own, base)
                    args = dataclasses.replace(args, **paths)
                command(args, *extra)

        return run

    return decorate


def launch_ranks(devices: int | None, device: str = "auto", max_restarts: int = 0) -> None:
    """Run this command on several devices of this machine and exit. No-op within a rank or without
    `--devices`.

    Raises:
        ConfigError: the machine has fewer devices.
        RankError: a rank was killed.
        Exit: with the exit code of the rank that failed first, or 0.
    """
    if devices is not None and not is_launched():
        from vitcli.devices import check_count
        from vitcli.distributed import launch

        check_count(devices, device)
        # -P: do not import modules from the working directory.
        raise typer.Exit(launch(devices, ["-P", "-m", "vitcli", *sys.argv[1:]], max_restarts))

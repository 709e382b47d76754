"""The command `vit`: what it can do, and the one place where errors become words and exit codes.

Nothing heavy is imported here: `vit --help` reads the table below, and a command's module is
imported when that command is called.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import io
import os
import signal
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

import typer
from typer.core import TyperGroup

from vitcli.cli import output
from vitcli.cli.help import GroupedCommand
from vitcli.errors import VitError, VitWarning

if TYPE_CHECKING:
    from types import FrameType

    from typer._click import Command as ClickCommand
    from typer._click import Context, HelpFormatter


class Command(NamedTuple):
    """A row of the table: where the function (or the Typer app of a group) is, and one line."""

    target: str
    help: str


COMMANDS = {
    "predict": Command("vitcli.cli.predict:predict", "Say what is in images."),
    "finetune": Command("vitcli.cli.finetune:finetune", "Teach a pre-trained model your classes."),
    "pretrain": Command("vitcli.cli.pretrain:pretrain", "Train a model from scratch."),
    "fewshot": Command(
        "vitcli.cli.fewshot:fewshot", "Measure a model by a few images of each class."
    ),
    "evaluate": Command("vitcli.cli.evaluate:evaluate", "Measure a model on labelled images."),
    "convert": Command(
        "vitcli.cli.convert:convert", "Write a checkpoint in another project's layout."
    ),
    "resize-posemb": Command(
        "vitcli.cli.resize_posemb:resize_posemb", "Make a model take images of another size."
    ),
    "inspect": Command("vitcli.cli.inspect:inspect", "Show what a model attends to."),
    "info": Command("vitcli.cli.info:info", "Describe a model, and count what a run costs."),
    "models": Command("vitcli.cli.models:app", "List models by name; see and remove what is here."),
    "pull": Command("vitcli.cli.pull:pull", "Fetch models from the Hub."),
    "push": Command("vitcli.cli.push:push", "Put a model on the Hub."),
}

SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
PLAIN: dict[str, Any] = {
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
    "context_settings": SETTINGS,
}


class LazyGroup(TyperGroup):
    """The commands of the table, each imported when it is called; and the error boundary."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = cast(Any, COMMANDS)  # names, to suggest one for a mistyped one

    def get_command(self, ctx: Context, cmd_name: str) -> ClickCommand | None:
        return _load(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: Context, formatter: HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help) for name, command in COMMANDS.items()])

    def invoke(self, ctx: Context) -> Any:
        try:
            with warnings.catch_warnings():  # each of ours once a command
                warnings.simplefilter("default", VitWarning)
                warnings.showwarning = functools.partial(_show_warning, warnings.showwarning)
                result = super().invoke(ctx)
            sys.stdout.flush()  # a full disk behind the pipe is our failure too
            return result
        except BrokenPipeError:  # the reader has left, as in `vit predict ... | head -1`
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            raise typer.Exit(128 + 13) from None  # as if by SIGPIPE
        except Exception as error:
            message = _explain(error)
            if message is None:
                raise
            if ctx.meta.get("debug"):
                raise
            output.error(message)
            _print_notes(error)
            raise typer.Exit(1) from error
        except KeyboardInterrupt as stop:
            _print_notes(stop)
            raise


def _print_notes(error: BaseException) -> None:
    """What the code on the way here knew of a failure, or of a Ctrl-C."""
    notes = getattr(error, "__notes__", ())
    if notes and isinstance(error, KeyboardInterrupt) and output.is_terminal():
        output.note("")  # ends the line that ^C is on
    for text in notes:
        output.note(text)


def _show_warning(
    others: Callable[..., None], message: Warning | str, category: type[Warning], *where: Any
) -> None:
    """Ours in a line of their own; the others as Python shows them."""
    if issubclass(category, VitWarning):
        output.warning(str(message))
    else:
        others(message, category, *where)


def _load(name: str) -> ClickCommand:
    """Import a command's module and make Typer's command of its function."""
    module, _, attribute = COMMANDS[name].target.partition(":")
    home = importlib.import_module(module)
    target = getattr(home, attribute)
    if not isinstance(target, typer.Typer):
        app = typer.Typer(add_completion=False, **PLAIN)
        app.command(name, cls=GroupedCommand)(target)
        target = app
    command = typer.main.get_command(target)
    command.name = name
    return command


def _explain(error: Exception) -> str | None:
    """An error in one or two lines; None for what Typer reports (wrong calls)."""
    if isinstance(error, VitError):
        return str(error)
    if isinstance(error, (typer.TyperException, typer.Exit, typer.Abort, EOFError)):
        return None
    if isinstance(error, OSError):
        reason = error.strerror or str(error)
        return f"{error.filename}: {reason}" if error.filename else reason
    if isinstance(error, MemoryError) or _is_torchs_memory(error):
        return "out of memory\nhint: use a smaller --batch-size or --resolution"
    return (
        f"unexpected {type(error).__name__}: {error}\n"
        "hint: this is a bug in vit; please report it with the output of --debug"
    )


def _is_torchs_memory(error: Exception) -> bool:
    if not isinstance(error, RuntimeError) or "torch" not in sys.modules:
        return False
    from vitcli.devices import ran_out_of_memory

    return ran_out_of_memory(error)


app = typer.Typer(
    cls=LazyGroup, name="vit", help="Vision Transformers from the command line.", **PLAIN
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from vitcli import __version__

        output.line(f"vit {__version__}")
        raise typer.Exit()


@app.callback(no_args_is_help=True)
def vit(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Vision Transformers from the command line: pre-train, fine-tune, predict, share."""


def _terminate(number: int, frame: FrameType | None) -> None:
    """SIGTERM unwinds like Ctrl-C, so that nothing half-written stays behind."""
    raise SystemExit(128 + number)


def main() -> None:
    """The entry point of `vit` and of `python -m vitcli`."""
    signal.signal(signal.SIGTERM, _terminate)
    # What the Hub's client logs between its tries is said by us, once, if all of them fail.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    # Importing torch makes objects by the hundred thousand, none of them garbage.
    gc.set_threshold(100_000, 20, 100)
    # Meanwhile threads that decode images wait for the interpreter, a dozen times for each: not
    # for 5 ms each time.
    sys.setswitchinterval(1e-4)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever started us, as in `>&-`
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of files need not be text
            utf8 = stream.encoding.lower() == "utf-8"
            stream.reconfigure(errors="surrogateescape" if utf8 else "backslashreplace")
    try:
        app(prog_name="vit")
    except SystemExit as leaving:
        _leave(leaving.code)


def _leave(code: object) -> None:
    """End the process without taking torch's modules apart one by one, which takes 0.3 s."""
    gc.freeze()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        atexit._run_exitfuncs()
    except BrokenPipeError:
        os._exit(1)
    os._exit(code if isinstance(code, int) else int(code is not None))

"""The `vit` command: its subcommands, and the boundary that turns errors into exit codes.

Nothing heavy is imported here: `vit --help` prints the table below, and a subcommand's module is
imported when it is called.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import io
import os
import signal
import sys
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, cast

import typer
from typer.core import TyperGroup

from vitcli.atomic import remove_own
from vitcli.cli import output
from vitcli.errors import PeerFailedError, VitError, handle_warnings
from vitcli.machine import END_SIGNALS, rank

if TYPE_CHECKING:
    from types import FrameType

COMMANDS = {
    "predict": "Classify images.",
    "finetune": "Fine-tune a pre-trained model on your own classes.",
    "pretrain": "Pre-train a model, with or without labels.",
    "evaluate": "Evaluate a model on labeled images.",
    "fewshot": "Evaluate a model's features with a few images per class.",
    "inspect": "Show what a model attends to, and its weights.",
    "convert": "Convert a checkpoint to another layout.",
    "export": "Export a model to ONNX or torch.export.",
    "resize-posemb": "Resize position embeddings for another input size.",
    "info": "Describe a model and compute the cost of training it.",
    "bench": "Measure the speed of models on this machine.",
    "models": "List models, describe one, or remove downloads.",
    "pull": "Download models from the Hub.",
    "push": "Upload a model to the Hub.",
}
"""Commands with their one-line help. `resize-posemb` is the function `resize_posemb` of the module
`vitcli.cli.resize_posemb`, or the Typer app `app` if the module has one."""
SUGGESTIONS = {"train": "did you mean finetune or pretrain?"}
"""Hints for nonexistent commands, where similar names are not enough."""

TYPER_SETTINGS: dict[str, Any] = {
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


class LazyGroup(TyperGroup):
    """The error boundary, and a command group that imports each command when it is called."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = cast(Any, COMMANDS)  # for shell completion

    def make_context(self, info_name: Any, args: list[str], *positional: Any, **extra: Any) -> Any:
        is_bare = not args  # a bare `vit` prints its help, which Typer treats as an error
        try:
            return super().make_context(info_name, args, *positional, **extra)
        except BrokenPipeError:  # of `vit --help | head -1`
            _exit_broken_pipe()
        except typer.TyperException as error:
            if is_bare:
                raise
            _exit_with_usage_error(error, "vit")

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _load_command(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name not in COMMANDS and not ctx.resilient_parsing:
            from vitcli.words import did_you_mean

            hint = SUGGESTIONS.get(name) or did_you_mean(name, [*COMMANDS])
            ctx.fail(f"no such command '{name}'" + (f"\nhint: {hint}" if hint else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: Any) -> Any:
        try:
            _check_environment()
            with handle_warnings(output.warning):
                result = super().invoke(ctx)
            sys.stdout.flush()  # may fail, for example if the disk is full
            return result
        except BrokenPipeError:
            _exit_broken_pipe()
        except typer.TyperException as error:
            _exit_with_usage_error(error, f"vit {ctx.invoked_subcommand}")
        except typer.Exit:
            raise
        except Exception as error:
            if isinstance(error, PeerFailedError):
                raise typer.Exit(error.exit_code) from error
            if rank():
                output.unmute()
            if output.debug:
                raise
            output.error(*_message_and_hint(error))
            _print_notes(error)
            raise typer.Exit(error.exit_code if isinstance(error, VitError) else 1) from error
        except (KeyboardInterrupt, SystemExit) as stop:
            _print_notes(stop)
            raise


def _exit_broken_pipe() -> NoReturn:
    """Exit as if by SIGPIPE: the reader closed the pipe, as in `vit predict ... | head -1`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    raise typer.Exit(128 + 13) from None


def _check_environment() -> None:
    """Raise UsageError for a variable that makes the import of the Hub's client fail, and OSError
    if the working directory has been deleted, as torch would abort the process."""
    from vitcli.cli.parameters import UsageError

    os.getcwd()
    for name in ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT"):
        if not (value := os.environ.get(name, "10")).strip().isdecimal():
            what = f"{name}: '{value}' is not a whole number of seconds"
            raise UsageError(f"{what}\nhint: correct or unset it")


def _exit_with_usage_error(error: Any, command: str) -> NoReturn:
    """Report a usage error with a hint, in the same format as other errors, and exit."""
    from vitcli.words import did_you_mean

    message, _, hint = error.format_message().partition("\nhint: ")
    context: Any = getattr(error, "ctx", None)  # has the path of a subcommand; not on every error
    if hasattr(error, "possibilities"):  # an unknown option
        message = f"no such option '{error.option_name}'"
        if isinstance(context.command, TyperGroup):
            message += " before the command"
            hint = "options follow the command, as in `vit predict cat.jpg --json`"
        elif error.possibilities is not None:  # a long option
            names = [name for option in context.command.params for name in option.opts]
            hint = did_you_mean(error.option_name, [n for n in names if n.startswith("--")])
    if message[1:2].islower():  # a sentence from Typer, such as "Missing option '--data'."
        message = message[0].lower() + message[1:].removesuffix(".")
    output.error(message, hint or f"see `{context.command_path if context else command} --help`")
    raise typer.Exit(error.exit_code) from error


def _message_and_hint(error: Exception) -> tuple[str, str | None]:
    """Return the error message and a hint, if any."""
    if isinstance(error, VitError):
        return error.message, error.hint
    if isinstance(error, OSError):
        reason, name = error.strerror or str(error), error.filename
        if name is None and isinstance(error, FileNotFoundError):
            if "temporary" in reason:  # of `tempfile`
                return "no temporary directory is writable", "set TMPDIR to one that is"
            name = "current directory"  # of `os.getcwd`
        return f"{name}: {reason}" if name else reason, None
    if isinstance(error, MemoryError) or _is_out_of_memory(error):
        return "out of memory", "free some, or use a smaller batch size, resolution or model"
    text = " ".join(str(error).split())
    if "can't start new thread" in text:
        return "cannot start another thread", "allow more processes (`ulimit -u`) or memory"
    if isinstance(error, ImportError) and not (error.name or "").startswith("vitcli"):
        return text, "install vit again, or allow it more memory (`ulimit -v`)"
    hint = "this is a bug in vit; please report it with the output of --debug"
    return f"unexpected {type(error).__name__}: {text}", hint


def _is_out_of_memory(error: Exception) -> bool:
    if not isinstance(error, RuntimeError) or "torch" not in sys.modules:
        return False
    from vitcli.devices import is_out_of_memory

    return is_out_of_memory(error)


def _print_notes(error: BaseException) -> None:
    """Print the notes (`add_note`) of an error, a Ctrl-C or a SIGTERM."""
    notes = getattr(error, "__notes__", ())
    if notes and isinstance(error, KeyboardInterrupt) and sys.stderr.isatty():
        output.write("", sys.stderr)  # end the line with the ^C
    for note in notes:
        output.note(note, always=True)


def _load_command(name: str) -> Any:
    """Import a command's module and create its Typer command."""
    from vitcli.cli.parameters import GroupedCommand

    function_name = name.replace("-", "_")
    module = importlib.import_module(f"vitcli.cli.{function_name}")
    app = getattr(module, "app", None)
    if app is None:
        app = typer.Typer(add_completion=False, **TYPER_SETTINGS)
        app.command(name, cls=GroupedCommand)(getattr(module, function_name))
    command = typer.main.get_command(app)
    command.name = name
    return command


app = typer.Typer(cls=LazyGroup, name="vit", **TYPER_SETTINGS)


def _print_version(value: bool) -> None:
    if value:
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
    """Vision Transformers from the command line."""


def _handle_stop(signum: int, frame: FrameType | None) -> None:
    """Unwind on a signal, so that partial files are removed. Exit at once while a module is being
    imported, where torch swallows exceptions."""
    while frame:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            remove_own()
            os._exit(128 + signum)
        frame = frame.f_back
    raise KeyboardInterrupt if signum == signal.SIGINT else SystemExit(128 + signum)


def main() -> None:
    """Handle signals, run the command, and exit."""
    for number in END_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as set by nohup
            signal.signal(number, _handle_stop)
    if rank():  # only rank 0 prints
        output.mute()
    # The Hub client would log every retry; the final error is enough.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    # Importing torch creates hundreds of thousands of objects, none of them garbage. Threads that
    # decode images meanwhile often wait for the GIL, and should not wait 5 ms each time.
    gc.set_threshold(100_000, 20, 100)
    sys.setswitchinterval(1e-4)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the caller, as in `>&-`
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    if sys.platform == "win32":  # the classic console prints escape sequences unless told not to
        importlib.import_module("colorama").just_fix_windows_console()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # file names may not be valid Unicode
            is_utf8 = stream.encoding.lower() == "utf-8"
            stream.reconfigure(errors="surrogateescape" if is_utf8 else "backslashreplace")
    try:
        app(prog_name="vit")
    except SystemExit as exit:
        exit_fast(exit.code)
    except KeyboardInterrupt:  # before Typer handles it
        exit_fast(128 + signal.SIGINT)
    except OSError as error:  # from --help or --version, outside any command, or with --debug
        if output.debug:
            raise
        output.error(*_message_and_hint(error))
        exit_fast(1)


def exit_fast(code: Any) -> None:
    """Exit without tearing down torch's modules one by one, which takes 0.3 s, and without waiting
    for threads that read from the network, which may take 10 s after a Ctrl-C. Needs a private
    function of `atexit`; without it, exit normally."""
    run_exit_functions = getattr(atexit, "_run_exitfuncs", None)
    if run_exit_functions is None:
        sys.exit(code)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would only interrupt the cleanup
    gc.freeze()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        code = 128 + 13
    except OSError:  # the command has reported it
        code = code or 1
    for number in END_SIGNALS:  # not earlier, as a flush waits for the reader of a pipe
        signal.signal(number, signal.SIG_IGN)
    run_exit_functions()
    os._exit(code if isinstance(code, int) else int(code is not None))

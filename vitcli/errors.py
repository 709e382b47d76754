"""The exceptions that `vit` raises.

An error has a message, the place where it occurred, and a hint on how to fix it. The command line
prints it in one or two lines and exits with code 1.
"""

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from vitcli.words import public_url


class VitError(Exception):
    """What is wrong, where (a file, a directory, a repo), and a hint on how to fix it."""

    def __init__(self, what: str, *, where: object = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = None if where is None else public_url(str(where))
        self.hint = hint

    @property
    def message(self) -> str:
        """Where and what, without the hint."""
        return f"{self.where}: {self.what}" if self.where else self.what

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


NOT_FINITE = "the weights contain NaN or are too large; with fp16, try --precision fp32"
"""Hint for model outputs that are not finite."""


class ConfigError(VitError):
    """An invalid value for a model, image or run."""


class CheckpointError(VitError):
    """A checkpoint that is corrupt, incomplete or of an unknown kind."""


class ModelNotFoundError(VitError):
    """A name that is not a path, a registry name or a Hub repo."""


class HubError(VitError):
    """A request to the Hub that failed."""

    reason = ""
    """Why the request failed: a key of `hub_requests.MESSAGES`."""
    is_temporary = False
    """Whether the failure is unrelated to the repo: no network, a timeout, an outage of the Hub."""


class DataError(VitError):
    """A dataset that cannot be used."""


class ImageError(DataError):
    """An image that cannot be read; others may be fine."""


class RunError(VitError):
    """A run that cannot be started, resumed or trusted."""


class DivergedError(RunError):
    """A loss that is no longer finite."""


class RankError(RunError):
    """Ranks that cannot work together, or one that died or hangs."""


class PeerFailedError(RankError):
    """A rank that exits silently, because another reports the error or the launch has ended."""

    exit_code = 1
    """The exit code of the rank."""


class OutputError(VitError):
    """An output that cannot be written."""


class MissingExtraError(VitError):
    """An optional dependency that is not installed."""


@contextlib.contextmanager
def wrap_os_errors(error_class: type[VitError], what: str, where: object) -> Iterator[None]:
    """Convert an OSError in the block to an error of this class: "WHAT: the system's reason"."""
    try:
        yield
    except OSError as error:
        raise error_class(f"{what}: {error.strerror or error}", where=where) from error


def missing_extra(modules: Sequence[str], purpose: str) -> MissingExtraError:
    """The MissingExtraError for packages that `purpose` needs."""
    quoted, listed = "', '".join(modules), " ".join(modules)
    what = f"{purpose} needs the package{'s' * (len(modules) > 1)} '{quoted}'"
    hint = f"pip install {listed}, or with pipx: pipx inject vitcli {listed}"
    return MissingExtraError(what, hint=hint)


def require(module: str, purpose: str) -> Any:
    """Import an optional package. Raises MissingExtraError."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing_extra([module.partition(".")[0]], purpose) from error


class VitWarning(UserWarning):
    """A warning for the user; the command line prints each one once."""


def warn(what: str, where: object = None) -> None:
    """Issue a VitWarning: what is wrong, and where (a file, a directory, a repo)."""
    message = what if where is None else f"{public_url(str(where))}: {what}"
    warnings.warn(message, VitWarning, stacklevel=3)


@contextlib.contextmanager
def handle_warnings(handle: Callable[[str], None]) -> Iterator[None]:
    """In the block, pass each VitWarning to a function, once; others are shown as usual."""
    default_showwarning, handled = warnings.showwarning, set[str]()

    def show(message: Any, category: type[Warning], *location: Any) -> None:
        if not issubclass(category, VitWarning):
            default_showwarning(message, category, *location)
        elif str(message) not in handled:
            handled.add(str(message))
            handle(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always", VitWarning)
        warnings.showwarning = cast(Any, show)
        yield

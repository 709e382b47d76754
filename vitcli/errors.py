"""Every error that `vit` raises on purpose.

    VitError
    ├── ConfigError         a value that no model, image or run can have
    ├── CheckpointError     a checkpoint that is damaged, incomplete or of an unknown kind
    ├── ModelNotFoundError  a name that is neither a path, a registry name nor a Hub repo
    ├── HubError            the Hub did not answer, or refused
    ├── DataError           a dataset that cannot be used
    │   └── ImageError      an image that cannot be read; others may be fine
    ├── RunError            a run directory that cannot be started, resumed or trusted
    │   ├── DivergedError   a loss that is no longer finite
    │   └── RankError       ranks that cannot work together, or one that died or hangs
    │       └── LeftError   a rank that has nothing to add, because another says what is wrong
    ├── OutputError         something that cannot be written
    └── MissingExtraError   an optional dependency that is not installed

An error says what failed, where, and in a hint what to do. The command line prints it in one or two
lines and exits with 1.
"""

import contextlib
from collections.abc import Iterator


class VitError(Exception):
    """What is wrong, where (a file, a directory, a repo), and a hint on what to do about it."""

    def __init__(self, what: str, *, where: object = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = None if where is None else str(where)
        self.hint = hint

    def __str__(self) -> str:
        line = f"{self.where}: {self.what}" if self.where else self.what
        return f"{line}\nhint: {self.hint}" if self.hint else line


NOT_FINITE = "the weights contain NaN, or values too large for the precision: try --precision fp32"
"""The hint where a model's outputs are not finite numbers."""


class ConfigError(VitError):
    """A value that no model, image or run can have."""


class CheckpointError(VitError):
    """A checkpoint that is damaged, incomplete or of an unknown kind."""


class ModelNotFoundError(VitError):
    """A name that is neither a path, a registry name nor a Hub repo."""


class HubError(VitError):
    """The Hub did not answer, or refused."""

    reason = ""
    """Of a request that failed: its key in `hub.retry.MEANINGS`."""
    may_pass = False
    """Whether the failure says nothing about the repo: no network, a time-out, a Hub in trouble."""


class DataError(VitError):
    """A dataset that cannot be used."""


class ImageError(DataError):
    """An image that cannot be read; others may be fine."""


class RunError(VitError):
    """A run directory that cannot be started, resumed or trusted."""


class DivergedError(RunError):
    """A loss that is no longer finite."""


class RankError(RunError):
    """Ranks that cannot work together, or one that died or hangs."""


class LeftError(RankError):
    """A rank that has nothing to add, because another says what is wrong."""


class OutputError(VitError):
    """Something that cannot be written."""


class MissingExtraError(VitError):
    """An optional dependency that is not installed."""

    def __init__(self, module: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package '{module}'",
            hint=f"pip install {module}, or with pipx: pipx inject vitcli {module}",
        )


@contextlib.contextmanager
def failing_as(kind: type[VitError], what: str, where: object) -> Iterator[None]:
    """Makes what the system refuses in the block an error of this kind: "WHAT: its reason"."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {error.strerror or error}", where=where) from error


class VitWarning(UserWarning):
    """Something that a user should know; the command line prints it once."""

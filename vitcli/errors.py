"""Every error that `vit` raises on purpose.

    VitError
    ├── ConfigError         a value that no model, image or run can have
    ├── CheckpointError     a checkpoint that is damaged, incomplete or of an unknown kind
    ├── ModelNotFoundError  a name that is neither a path, a registry name nor a Hub repo
    ├── HubError            the Hub did not answer, or answered no
    ├── DataError           a data set that cannot be used
    │   └── ImageError    one image that cannot be read; the others may be fine
    ├── RunError            a run folder that cannot be started, resumed or trusted
    │   └── DivergedError   a loss that is not finite any more
    ├── OutputError         something that cannot be written
    └── MissingExtraError   an optional dependency that is not installed

An error says what is wrong, with which file (`where`) and what to do (`hint`). The command line
prints it in one or two lines and exits with 1; nothing else in the package words an exception.
"""


class VitError(Exception):
    """Base class: `what` is wrong, `where` (a file, a folder, a repo), a `hint` on what to do."""

    def __init__(self, what: str, *, where: object = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = None if where is None else str(where)
        self.hint = hint

    def __str__(self) -> str:
        line = f"{self.where}: {self.what}" if self.where else self.what
        return f"{line}\nhint: {self.hint}" if self.hint else line


NOT_FINITE = "the weights hold NaN, or numbers too large for the precision: try --precision fp32"
"""The hint where a model makes something else than numbers of an image."""


class ConfigError(VitError):
    """A value that no model, image or run can have."""


class CheckpointError(VitError):
    """A checkpoint that is damaged, incomplete or of an unknown kind."""


class ModelNotFoundError(VitError):
    """A name that is neither a path, a registry name nor a Hub repo."""


class HubError(VitError):
    """The Hub did not answer, or answered no."""


class DataError(VitError):
    """A data set that cannot be used."""


class ImageError(DataError):
    """One image that cannot be read; the others may be fine."""


class RunError(VitError):
    """A run folder that cannot be started, resumed or trusted."""


class DivergedError(RunError):
    """A loss that is not finite any more."""


class OutputError(VitError):
    """Something that cannot be written."""


class MissingExtraError(VitError):
    """An optional dependency that is not installed."""

    def __init__(self, module: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package '{module}'",
            hint=f"pip install 'vitcli[{extra}]', or with pipx: pipx inject vitcli {module}",
        )


class VitWarning(UserWarning):
    """Something that a person should know and that stops nothing. The command line prints it in a
    line of its own, once."""

"""What a failure of the Hub's client means to a person, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vitcli.errors import HubError, VitError

LOGIN = "log in with `hf auth login`, or set HF_TOKEN"
TOKEN = f"{LOGIN}, with a token that may write"


@contextmanager
def worded(repo: str, name: str = "", revision: str | None = None) -> Iterator[None]:
    """Turns what the client raises in this block into a HubError; what is no failure of the Hub
    stays as it is.

    Args:
        name: the file that is asked for, if any.
        revision: the branch, tag or commit.
    """
    try:
        yield
    except VitError:
        raise
    except Exception as error:
        meaning = explain(error, repo, name, revision)
        if meaning is None:
            raise
        raise meaning from error


def explain(
    error: BaseException, repo: str, name: str = "", revision: str | None = None
) -> HubError | None:
    """The HubError that a failure of the client is; None where it is something else."""
    from huggingface_hub import errors
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # httpx2 since 2.0

    def say(what: str, hint: str) -> HubError:
        return HubError(what, where=repo, hint=hint)

    if isinstance(error, errors.LocalEntryNotFoundError | RuntimeError) and error.__cause__:
        return explain(error.__cause__, repo, name, revision)  # why the Hub was not asked
    if isinstance(error, errors.HfHubHTTPError):
        return say(*_refusal(error, name, revision))
    if isinstance(error, errors.HFValidationError):
        return say("is not a name of a repo", "write org/repo")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return say("the network is forbidden", "unset HF_HUB_OFFLINE")
    if isinstance(error, httpx.TimeoutException):
        longer = "HF_HUB_ETAG_TIMEOUT=60 HF_HUB_DOWNLOAD_TIMEOUT=60"
        return say("the Hub did not answer in time", f"try again, or wait longer (s): {longer}")
    if isinstance(error, httpx.ConnectError | errors.LocalEntryNotFoundError | ConnectionError):
        return say("the Hub cannot be reached", "check the network and HF_ENDPOINT")
    if isinstance(error, httpx.UnsupportedProtocol | httpx.InvalidURL):
        return say("HF_ENDPOINT is no address", "write https://..., or unset it")
    if isinstance(error, httpx.TransportError) or "Consistency check failed" in str(error):
        return say("the connection broke in the middle", "try again")
    if isinstance(error, errors.FileMetadataError | httpx.HTTPError):
        return say("the Hub's answer is not understood", "check HF_ENDPOINT, and try again")
    if isinstance(error, OSError):
        reason = error.strerror or error
        return say(f"{name or 'it'} cannot be kept: {reason}", "look at the disk and at HF_HOME")
    return None


def _refusal(error: Exception, name: str, revision: str | None) -> tuple[str, str]:
    """An answer with a status of failure, in words; and what to do."""
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", 0)
    if isinstance(error, errors.GatedRepoError):
        return "access has to be asked for", f"ask on the repo's page, then {LOGIN}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            "there is no such repo on the Hub, and no such folder here",
            f"check the name; for a private repo, {LOGIN}",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"has no revision '{revision}'", "look at the branches on its page"
    if isinstance(error, errors.EntryNotFoundError):
        return f"has no {name or 'such file'}", "look at the files on its page"
    if status == 401:
        return "the Hub does not know this token (401)", LOGIN
    if status == 403:
        return "access is refused (403)", f"with a token that may do this, {LOGIN}"
    if status == 429:
        return "the Hub asks for patience (429)", "wait a few minutes and try again"
    if status >= 500:
        return f"the Hub is in trouble (error {status})", "try again later"
    return f"the Hub answered with error {status}", "try again later"


def is_passing(error: BaseException) -> bool:
    """Whether a failure says nothing about the repo: no network, a time-out, a Hub in trouble."""
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

    if isinstance(error, httpx.TransportError | ConnectionError):
        return not isinstance(error, httpx.UnsupportedProtocol)
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return status == 429 or status >= 500


# ---------------------------------------------------------------------------------------------
# Pushing


@contextmanager
def worded_push(repo: str) -> Iterator[None]:
    """As `worded`, for an upload, whatever the client wrapped its failure in."""
    try:
        yield
    except HubError:
        raise
    except Exception as error:
        raise _in_words(error, repo) from error


def _in_words(error: Exception, repo: str) -> Exception:
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    owner = repo.partition("/")[0]
    if (
        status is None
        and isinstance(error, RuntimeError)
        and isinstance(error.__cause__, Exception)
    ):
        return _in_words(error.__cause__, repo)  # an upload in a thread
    if status == 401:
        return HubError("the Hub does not accept the token (401)", where=repo, hint=TOKEN)
    if status == 403:
        return HubError(
            "the token may not write there (403)",
            where=repo,
            hint=f"take a token that may write for {owner}, push to a name of your own, or "
            "propose the change with --create-pr",
        )
    if status == 409:
        return HubError(
            "is there already, and cannot be seen with this token (409)", where=repo, hint=TOKEN
        )
    if status == 412:
        return HubError("the repo changed meanwhile", where=repo, hint="push again")
    if status == 400:
        said = getattr(error, "server_message", None) or error
        return HubError(f"the Hub refuses it: {said}", where=repo)
    if (meaning := explain(error, repo)) is not None or not isinstance(error, ValueError):
        return meaning or error
    return HubError("the Hub's answer is not understood", where=repo, hint="try again later")

"""A checkpoint on its way to the Hub: what is published, what of it is new, and one commit.

What is published is written into a directory first, by name, so that nothing else of a run is
uploaded. The client skips unchanged files too, but says so only after a push: `compare` is for
`--dry-run`, for the report, and for the card on the Hub, which a person may have edited.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from warnings import catch_warnings

from vitcli.atomic import write_text
from vitcli.checkpoints import read, tensor_file
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.save import write_config
from vitcli.errors import HubError
from vitcli.hub import card
from vitcli.hub.cache import digest_of
from vitcli.hub.card import LICENSE, MEASURED, Card, digest, lineage
from vitcli.hub.fetch import RepoState, list_repo
from vitcli.hub.privacy import publishable
from vitcli.hub.retry import LOGIN, Progress, ask, is_offline, is_repo_id, may_be_done, one_try
from vitcli.layouts.timm import not_in_timm, otherwise_in_timm

if TYPE_CHECKING:
    from huggingface_hub import HfApi

T = TypeVar("T")

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"

CONTRADICTING = (
    *("preprocessor_config.json", "processor_config.json", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
"""Files of other layouts that timm or transformers would read instead of ours, or beside them."""


@dataclass(frozen=True)
class Package:
    """A directory that holds what is to be pushed, and nothing else."""

    directory: Path
    repo: str
    license: str | None
    base_model: str | None
    title: str
    """The commit's, where the user gives none."""
    warnings: tuple[str, ...] = ()
    given: frozenset[str] = frozenset()
    """Parts of the card that the user gave with the push."""

    @property
    def files(self) -> dict[str, Path]:
        return {file.name: file for file in sorted(self.directory.iterdir())}


@dataclass(frozen=True)
class Changes:
    """What a push changes in a repo."""

    upload: dict[str, int]
    """Files that are new or different, and their bytes."""
    unchanged: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    state: RepoState | None = None
    """What was compared with; None: there is no such repo."""
    branch_exists: bool = True
    card_diff: str = ""
    edited: tuple[str, ...] = ()
    """Parts of the card on the Hub that stay as a person edited them, although there are newer."""


@dataclass(frozen=True)
class Pushed:
    """How a push ended."""

    url: str
    """The page of the commit, of the pull request or of the repo."""
    commit: str | None = None
    """None: nothing had changed."""
    created: bool = False
    """Whether the repo was."""
    request: str | None = None
    """The page of the pull request."""


# ---------------------------------------------------------------------------------------------
# What is published


@contextlib.contextmanager
def workspace() -> Iterator[Path]:
    """An empty temporary directory; those that killed pushes left behind are removed."""
    from filelock import FileLock, Timeout

    prefix, lock = "vit-push-", ".lock"
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*/{lock}"):
        with contextlib.suppress(OSError, Timeout):
            if time.time() - left.stat().st_mtime > 60:  # not one that is about to be locked
                with FileLock(left, timeout=0):
                    shutil.rmtree(left.parent)
    with tempfile.TemporaryDirectory(prefix=prefix) as place, FileLock(Path(place, lock)):
        Path(place, "package").mkdir()
        yield Path(place, "package")


def pack(
    spec: str | Path,
    directory: Path,
    repo: str,
    license: str | None = None,
    on_progress: Progress | None = None,
    allow_pickle: bool = False,
) -> Package:
    """Writes timm's Hub layout, a card and its images into an empty directory.

    The license is the given one, else what the run's card says, else that of the model that it
    was trained from, where the registry knows it; never a guess. Raises VitError.
    """
    source = read.open_checkpoint(spec, on_progress=on_progress, allow_pickle=allow_pickle)
    beside = source.file.parent
    places = {beside, beside.absolute(), beside.absolute().parent}
    info = dataclasses.replace(source.info, provenance=publishable(source.info.provenance, places))
    needed, free = 4 * info.model.num_params(), shutil.disk_usage(directory).free
    if needed > free:
        raise HubError(
            f"preparing the upload needs {needed / 1e6:,.0f} MB in {directory.parent}, which has "
            f"only {free / 1e6:,.0f} MB free",
            where=repo,
            hint="set TMPDIR to a directory on another disk",
        )
    tensor_file.write(directory / WEIGHTS, source.tensors, info.to_metadata())
    write_config(directory / CONFIG, info)

    base_model, inherited = lineage(info, source.entry)
    own = beside / CARD
    old = Card.parse(own.read_text("utf-8", "replace") if own.is_file() else "")
    is_run = old.is_ours or "command" in info.provenance
    new = card.model_card(
        info,
        name=repo,
        images=card.figures_in(beside) if is_run else {},
        license=license or inherited,
        base_model=base_model,
    )
    made, given = Card.parse(new), frozenset({LICENSE} if license else ())
    if old.is_ours:
        if not old.digests:  # an earlier version's: what it wrote cannot be told from edits
            old = old._replace(
                digests={k: digest(t) for k, t in old.parts.items() if k in made.parts}
            )
        made = made.merged_with(old, keep={*MEASURED, LICENSE} - given, replace=given)
    write_text(directory / CARD, str(made))
    for name in card.images_in(str(made)):
        if (beside / name).is_file():
            shutil.copyfile(beside / name, directory / name)
    title = f"Push {info.provenance.get('data') or 'a model'}"
    warnings = tuple(_warnings(info, made.license))
    return Package(directory, repo, made.license, base_model, title, warnings, given)


def _warnings(info: CheckpointInfo, license: str | None) -> Iterator[str]:
    if reasons := not_in_timm(info.model):
        named = ", ".join(reasons)
        yield f"timm and transformers cannot load this model: they do not support {named}"
    else:
        yield from otherwise_in_timm(info.model)
    if license is None:
        yield "the model card has no license: set one, for example with --license apache-2.0"
    if info.model.num_classes and not info.classes:
        yield "the classes have no names: add them with `vit convert --classes FILE`"


# ---------------------------------------------------------------------------------------------
# What is new


def compare(
    package: Package,
    revision: str | None = None,
    token: str | None = None,
    overwrite_card: bool = False,
    timeout: float | None = None,
) -> Changes:
    """What of a package its repo does not have yet. What a person wrote into the card on the Hub
    is taken over into the package's, unless `overwrite_card`. Raises HubError."""
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    repo, branch_exists = package.repo, True
    try:
        try:
            state = list_repo(repo, revision, timeout, token=token)
        except HubError as error:
            if not isinstance(error.__cause__, RevisionNotFoundError):
                raise
            state, branch_exists = list_repo(repo, None, timeout, token=token), False
    except HubError as error:
        if not isinstance(error.__cause__, RepositoryNotFoundError):
            raise
        return Changes({name: path.stat().st_size for name, path in package.files.items()})
    diff, edited = "", tuple[str, ...]()
    if CARD in state.files:
        diff, edited = _merge_card(package, state, token, overwrite_card, timeout)
    files = package.files
    same = {
        name
        for name, path in files.items()
        if (there := state.files.get(name)) and digest_of(path, len(there.digest)) == there.digest
    }
    return Changes(
        upload={name: path.stat().st_size for name, path in files.items() if name not in same},
        unchanged=tuple(sorted(same)),
        remove=tuple(name for name in CONTRADICTING if name in state.files),
        state=state,
        branch_exists=branch_exists,
        card_diff=diff,
        edited=edited,
    )


def _merge_card(
    package: Package,
    state: RepoState,
    token: str | None,
    overwrite: bool,
    timeout: float | None,
) -> tuple[str, tuple[str, ...]]:
    """Takes over the edits of the card on the Hub; how that card would change, and its edits."""
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        hf_raise_for_status,
    )

    def receive(silence: float) -> str:
        url = hf_hub_url(package.repo, CARD, revision=state.commit)
        answer = get_session().get(url, headers=build_hf_headers(token=token), timeout=silence)
        hf_raise_for_status(answer)
        return str(answer.content.decode("utf-8", "replace"))

    path = package.directory / CARD
    there = ask(package.repo, receive, name=CARD, timeout=timeout)
    old, new = Card.parse(there), Card.parse(path.read_text("utf-8"))
    edited: tuple[str, ...] = ()
    if not overwrite:
        merged = new.merged_with(old, replace=package.given)
        edited = tuple(
            key
            for key, text in new.parts.items()
            if merged.parts.get(key, text) != text and digest(text) != old.digests.get(key)
        )
        write_text(path, there if merged == old else str(merged))
    before, after = there.splitlines(), path.read_text("utf-8").splitlines()
    diff = difflib.unified_diff(before, after, f"{CARD} (Hub)", f"{CARD} (new)", lineterm="")
    return "\n".join(diff), edited


# ---------------------------------------------------------------------------------------------
# One commit


def _ask(repo: str, call: Callable[[], T], timeout: float | None, once: bool = False) -> T:
    """`ask`, for calls of the client's that take no time-out: by itself, it waits for ever."""
    from huggingface_hub import get_session, set_client_factory

    if not isinstance(get_session(), one_try()):
        set_client_factory(one_try())

    def limited(silence: float) -> T:
        get_session().timeout = silence
        return call()

    return ask(repo, limited, timeout=0 if once else timeout, patience=timeout or math.inf)


def log_in(repo: str, token: str | None = None, timeout: float | None = None) -> None:
    """Makes sure of the repo's name, and of a token that may write. Raises HubError."""
    from huggingface_hub import HfApi, get_token

    if not is_repo_id(repo):
        raise HubError("not a valid name of a Hub repo", where=repo, hint="use the form org/name")
    if is_offline():
        raise HubError("offline mode is on", where=repo, hint="unset HF_HUB_OFFLINE")
    if not (token or get_token()):
        raise HubError("pushing requires a token, and none was found", where=repo, hint=LOGIN)
    me: dict[str, Any] = _ask(repo, lambda: HfApi(token=token).whoami(), timeout)
    if me.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise HubError(f"the token of {me['name']} has no write access", where=repo, hint=LOGIN)


def push(
    package: Package,
    changes: Changes,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
    create_pr: bool = False,
    token: str | None = None,
    timeout: float | None = None,
) -> Pushed:
    """Uploads what is new, as one commit: whatever goes wrong before it, the repo stays as it was.

    Args:
        changes: what `compare` found just now.
        private: of a repo that is created; an existing one stays what it is.
        revision: a branch, created from main where it does not exist.

    Raises:
        HubError: it failed; a note says what of the push was done.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    repo, api, state = package.repo, HfApi(token=token), changes.state
    if private and state is not None and not state.private:
        raise HubError(
            "the repo already exists and is public",
            where=repo,
            hint="leave out --private, make the repo private on its page, or choose another name",
        )
    if state is None and create_pr:
        raise HubError("the repo does not exist, so no pull request can be opened", where=repo)
    page = f"{api.endpoint}/{repo}"
    if not changes.upload and not changes.remove:
        return Pushed(page)
    title, created, sent = message or package.title, False, False

    def commit() -> Any:
        files = [CommitOperationAdd(name, package.files[name]) for name in changes.upload]
        with catch_warnings(action="ignore"), _plain_uploads():  # warnings about the card
            return api.create_commit(
                repo,
                [*files, *map(CommitOperationDelete, changes.remove)],
                commit_message=title,
                revision=revision,
                create_pr=create_pr,
                parent_commit=state.commit if state else None,
            )

    try:
        if state is None:
            _ask(repo, lambda: api.create_repo(repo, private=private or None), timeout)
            created = True
        if revision is not None and not (state and changes.branch_exists):
            start = state.commit if state else None
            _ask(
                repo,
                lambda: api.create_branch(repo, branch=revision, revision=start, exist_ok=True),
                timeout,
            )
        sent = True
        done = _ask(repo, commit, timeout)
    except (HubError, KeyboardInterrupt, SystemExit) as error:
        found: str | None = ""
        if sent and (not isinstance(error, HubError) or may_be_done(error.__cause__)):
            found = _find_commit(api, repo, revision, title, state, timeout)
        if found and isinstance(error, HubError):
            return Pushed(f"{page}/commit/{found}", found, created)
        error.add_note(_what_happened(page, found, create_pr and sent, created))
        raise
    return Pushed(done.pr_url or done.commit_url, done.oid, created, done.pr_url)


@contextlib.contextmanager
def _plain_uploads() -> Iterator[None]:
    """Uploads large files over plain HTTP, as they are downloaded: Xet has time-outs of its own, so
    `--timeout` would not limit it."""
    from huggingface_hub import constants

    before, constants.HF_HUB_DISABLE_XET = constants.HF_HUB_DISABLE_XET, True
    try:
        yield
    finally:
        constants.HF_HUB_DISABLE_XET = before


def _find_commit(
    api: HfApi,
    repo: str,
    revision: str | None,
    title: str,
    before: RepoState | None,
    timeout: float | None,
) -> str | None:
    """The commit of a push that was interrupted, "" if there is none; None if nobody can say."""
    try:
        latest = _ask(
            repo, lambda: api.list_repo_commits(repo, revision=revision)[0], timeout, once=True
        )
    except (HubError, KeyboardInterrupt):
        return None
    is_new = before is None or latest.commit_id != before.commit
    return latest.commit_id if is_new and latest.title == title.partition("\n")[0] else ""


def _what_happened(page: str, found: str | None, requested: bool, created: bool) -> str:
    """What an interrupted push has done, in words."""
    if requested:
        return f"a pull request may have been opened: see {page}/discussions"
    if found:
        return f"the commit was made: {page}/commit/{found}"
    if found is None:
        return f"unknown whether the commit was made: see {page}/commits/main"
    if created:
        return f"{page} was created and is empty: push again, or delete it there"
    return f"nothing in {page} was changed"

"""Pushing a checkpoint to the Hub: pack its files, compare them with the repo, make one commit.

The files are first written to a separate directory, so that nothing else of a run is uploaded. The
client skips unchanged files too, but reports them only after a push: `compare` is for `--dry-run`,
for the report, and for the card on the Hub, which a person may have edited.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack
from warnings import catch_warnings

from vitcli.atomic import write_text
from vitcli.checkpoints import read
from vitcli.checkpoints.info import CheckpointInfo, assumptions_text
from vitcli.checkpoints.save import write_config, write_weights
from vitcli.checkpoints.tensor_file import numpy_dtype
from vitcli.errors import HubError
from vitcli.hub import card
from vitcli.hub.cache import check_space, digest_of
from vitcli.hub.card import lineage
from vitcli.hub.fetch import RepoState, list_repo
from vitcli.hub.privacy import redact
from vitcli.hub.readme import LICENSE, METRICS, Card, digest, images_in
from vitcli.hub_requests import LOGIN, call_client, call_hub, offline_switch
from vitcli.layouts.timm import not_in_timm, timm_differences
from vitcli.weight_files import is_own_file

if TYPE_CHECKING:
    from huggingface_hub import HfApi

T = TypeVar("T")

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"

CONFLICTING = (
    "preprocessor_config.json",
    "processor_config.json",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Files of other layouts that timm or transformers would read instead of ours or in addition."""


@dataclass(frozen=True)
class Target:
    """The destination of a push."""

    repo: str
    revision: str | None = None
    """A branch, created from main if it does not exist; None for main."""
    timeout: float | None = None

    def call(self, call: Callable[[HfApi], T], once: bool = False) -> T:
        """Call the Hub client, with retries, and return its result. Raises HubError."""
        from huggingface_hub import HfApi

        return call_client(self.repo, lambda: call(HfApi()), self.timeout, once)

    @property
    def page(self) -> str:
        from huggingface_hub import constants

        return f"{constants.ENDPOINT}/{self.repo}"


@dataclass(frozen=True)
class Package:
    """A directory with the files to push, and nothing else."""

    directory: Path
    license: str | None
    base_model: str | None
    title: str
    """The default title of the commit."""
    warnings: tuple[str, ...] = ()
    overrides: frozenset[str] = frozenset()
    """Parts of the card that are set by options of the push."""
    has_head: bool = True

    @property
    def files(self) -> dict[str, Path]:
        return {file.name: file for file in sorted(self.directory.iterdir())}

    @property
    def sizes(self) -> dict[str, int]:
        return {name: path.stat().st_size for name, path in self.files.items()}


@dataclass(frozen=True)
class Changes:
    """The changes that a push makes in a repo."""

    upload: dict[str, int]
    """New or changed files, and their sizes in bytes."""
    unchanged: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    state: RepoState | None = None
    """What was compared with; None if the repo does not exist."""
    branch_exists: bool = True
    card_diff: str = ""
    edited: tuple[str, ...] = ()
    """Parts of the card on the Hub that keep a person's edits, although there are newer ones."""
    license: str | None = None
    """The license in the resulting card."""


@dataclass(frozen=True)
class PushResult:
    """The result of a push."""

    url: str
    """The page of the commit, the pull request or the repo."""
    commit: str | None = None
    """None if nothing had changed."""
    created: bool = False
    """Whether the repo was created."""
    pull_request: str | None = None
    """The page of the pull request."""


# ---------------------------------------------------------------------------------------------
# Packing


def pack(
    spec: str | Path,
    directory: Path,
    repo: str,
    license: str | None = None,
    **fetching: Unpack[read.Fetching],
) -> Package:
    """Write timm's Hub layout, a card and its images to an empty directory.

    The license is the given one, else that of the run's card, else that of the model that it was
    trained from, if it is in the registry; it is never guessed. Raises VitError.
    """
    source = read.open_checkpoint(spec, **fetching)
    source_dir = source.file.parent
    directories = {source_dir, source_dir.absolute(), source_dir.absolute().parent}
    info = dataclasses.replace(source.info, provenance=redact(source.info.provenance, directories))
    tensors = source.tensors.values()
    needed = sum(numpy_dtype(t.dtype).itemsize * math.prod(t.shape) for t in tensors)
    check_space(directory.parent, needed, "preparing the upload", repo, "TMPDIR")
    write_weights(directory / WEIGHTS, source.tensors, info)
    write_config(directory / CONFIG, info)

    base_model, inherited = lineage(info, source.entry)
    readme = source_dir / CARD
    old = Card.parse(readme.read_text("utf-8", "replace") if readme.is_file() else "")
    is_run = old.is_ours or "command" in info.provenance
    images = card.figures_in(source_dir) if is_run else {}
    new = Card.parse(card.model_card(info, None, repo, images, license or inherited, base_model))
    overrides = frozenset({LICENSE} if license else ())
    if old.is_ours:
        new = new.merged_with(old, keep={METRICS, LICENSE} - overrides, replace=overrides)
    write_text(directory / CARD, str(new))
    for name in images_in(str(new)):
        if is_own_file(source_dir / name):
            shutil.copyfile(source_dir / name, directory / name)
    title = f"Push {info.provenance.get('data') or 'a model'}"
    warnings, has_head = tuple(_warnings(info)), info.model.num_classes > 0
    return Package(directory, new.license, base_model, title, warnings, overrides, has_head)


def _warnings(info: CheckpointInfo) -> Iterator[str]:
    if reasons := not_in_timm(info.model):
        features = ", ".join(reasons)
        yield f"timm and transformers cannot load this model: they do not support {features}"
    else:
        yield from timm_differences(info)
    if assumed := assumptions_text(info):
        yield assumed
    if info.model.num_classes and not info.classes:
        yield "the classes have no names: add some with `vit convert CHECKPOINT DST --classes FILE`"


# ---------------------------------------------------------------------------------------------
# Comparing


def compare(package: Package, target: Target, overwrite_card: bool = False) -> Changes:
    """Compare a package with its repo. A person's edits of the card on the Hub are merged into the
    package's card, unless `overwrite_card`. Raises HubError."""
    state, branch_exists = None, True
    try:
        state = list_repo(target.repo, target.revision, target.timeout)
    except HubError as error:
        if error.reason == "RevisionNotFoundError":
            state = list_repo(target.repo, None, target.timeout)
            branch_exists = False
        elif error.reason != "RepositoryNotFoundError":
            raise
    if state is None:
        return Changes(package.sizes, license=package.license)
    diff, edited = "", tuple[str, ...]()
    if CARD in state.files:
        diff, edited = _merge_card(package, state, target, overwrite_card)
    same = _unchanged(package, state)
    return Changes(
        upload={name: size for name, size in package.sizes.items() if name not in same},
        unchanged=tuple(sorted(same)),
        remove=tuple(name for name in CONFLICTING if name in state.files),
        state=state,
        branch_exists=branch_exists,
        card_diff=diff,
        edited=edited,
        license=_read_card(package).license,
    )


def _unchanged(package: Package, state: RepoState) -> set[str]:
    """The names of a package's files that the repo has with the same content."""
    return {
        name
        for name, path in package.files.items()
        if (file := state.files.get(name)) and digest_of(path, len(file.digest)) == file.digest
    }


def _read_card(package: Package) -> Card:
    return Card.parse((package.directory / CARD).read_text("utf-8"))


def _merge_card(
    package: Package, state: RepoState, target: Target, overwrite: bool
) -> tuple[str, tuple[str, ...]]:
    """Merge the edits of the card on the Hub; return the diff of the card and the edited parts."""
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        hf_raise_for_status,
    )

    path, listed = package.directory / CARD, state.files[CARD].digest

    def receive(read_timeout: float) -> str:
        url = hf_hub_url(target.repo, CARD, revision=state.commit)
        response = get_session().get(url, headers=build_hf_headers(), timeout=read_timeout)
        hf_raise_for_status(response)
        if digest_of(response.content, len(listed)) != listed:
            raise ValueError("not the listed file, but perhaps a login page")
        return str(response.content.decode("utf-8", "replace"))

    hub_text = call_hub(target.repo, receive, name=CARD, timeout=target.timeout)
    old, new = Card.parse(hub_text), _read_card(package)
    edited: tuple[str, ...] = ()
    if not overwrite:
        keep = {LICENSE} - package.overrides
        merged = new.merged_with(old, keep, replace=package.overrides)
        edited = tuple(
            key
            for key, text in new.parts.items()
            if merged.parts.get(key, text) != text
            and digest(text) != old.digests.get(key)
            and key in old.edited()
        )
        write_text(path, hub_text if merged == old else str(merged))
    before, after = hub_text.splitlines(), path.read_text("utf-8").splitlines()
    diff = difflib.unified_diff(before, after, f"{CARD} (Hub)", f"{CARD} (new)", lineterm="")
    return "\n".join(diff), edited


# ---------------------------------------------------------------------------------------------
# Committing


def check_online(target: Target) -> None:
    """Raise HubError if an environment variable forbids network access."""
    if switch := offline_switch():
        raise HubError(f"{switch} is set", where=target.repo, hint=f"unset {switch}")


def check_token(target: Target) -> None:
    """Check that there is a token with write access. Raises HubError."""
    from huggingface_hub import get_token

    check_online(target)
    if not get_token():
        what = "pushing requires a token, and none was found"
        raise HubError(what, where=target.repo, hint=LOGIN)

    def check_role(api: HfApi) -> None:
        user: dict[str, Any] = api.whoami()
        if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
            what = f"the token of {user['name']} has no write access"
            page = "https://huggingface.co/settings/tokens"
            hint = f"create a token with write access at {page}, then {LOGIN}"
            raise HubError(what, where=target.repo, hint=hint)

    target.call(check_role)


def check_options(changes: Changes, target: Target, private: bool, create_pr: bool) -> None:
    """Check that the options of a push suit the repo. Raises HubError."""
    if private and changes.state is not None and not changes.state.private:
        raise HubError(
            "the repo already exists and is public",
            where=target.repo,
            hint="leave out --private, make the repo private on its page, or choose another name",
        )
    if create_pr and changes.state is None:
        what = "the repo does not exist, so no pull request can be opened"
        raise HubError(what, where=target.repo)


def push(
    package: Package,
    changes: Changes,
    target: Target,
    *,
    private: bool = False,
    message: str | None = None,
    create_pr: bool = False,
) -> PushResult:
    """Upload the changes as one commit; if that fails, the files stay as they were.

    Args:
        changes: the result of `compare`, which must be recent.
        private: visibility of a new repo; that of an existing one does not change.

    Raises:
        HubError: the push failed; a new repo or branch may have been created.
    """
    repo, revision, state = target.repo, target.revision, changes.state
    parent = state.commit if state else None

    def commit(api: HfApi) -> Any:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete, constants

        # Large files are uploaded by plain HTTP, like downloads: Xet has timeouts of its own.
        constants.HF_HUB_DISABLE_XET = True
        additions = [CommitOperationAdd(name, package.files[name]) for name in changes.upload]
        deletions = [CommitOperationDelete(name) for name in changes.remove]
        with catch_warnings(action="ignore"):  # about the card
            return api.create_commit(
                repo,
                [*additions, *deletions],
                commit_message=message or package.title,
                revision=revision,
                create_pr=create_pr,
                parent_commit=parent,
            )

    if state is None:
        # The repo may exist after an attempt whose response was lost.
        target.call(lambda api: api.create_repo(repo, private=private or None, exist_ok=True))
    if revision is not None and not (state and changes.branch_exists):
        target.call(
            lambda api: api.create_branch(repo, branch=revision, revision=parent, exist_ok=True)
        )
    if not changes.upload and not changes.remove:
        return PushResult(target.page)
    try:
        result = target.call(commit, once=create_pr)  # a second attempt opens another one
    except (HubError, KeyboardInterrupt, SystemExit) as error:
        condition = ""
        if create_pr:  # the next attempt opens another one
            condition = f"unless {target.page}/discussions lists the pull request, "
        error.add_note(f"{condition}push again: unchanged files are skipped")
        raise
    return PushResult(result.pr_url or result.commit_url, result.oid, state is None, result.pr_url)

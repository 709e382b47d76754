"""A model on its way to the Hub: what goes there, what of it is new, and one commit.

What goes there is written into a folder first, by name, so that nothing else of a run can go
along. `huggingface_hub` is imported when the Hub is asked and not before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from vitcli.atomic import write_text
from vitcli.checkpoints import read, tensor_file
from vitcli.checkpoints.info import CheckpointInfo
from vitcli.checkpoints.save import write_config
from vitcli.errors import HubError, ModelNotFoundError
from vitcli.hub import card, registry
from vitcli.hub import fetch as hub
from vitcli.hub.client_errors import TOKEN, worded_push
from vitcli.hub.privacy import without_paths
from vitcli.hub.registry import RegistryEntry
from vitcli.layouts.timm import not_in_timm, otherwise_in_timm

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
IMAGES = {
    "Loss, accuracy and learning rate": "curves.png",
    "Confusion matrix": "confusion.png",
    "Reliability": "reliability.png",
}
"""What a run draws, by its caption in the card."""

CONTRADICTING = (
    *("preprocessor_config.json", "processor_config.json", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
"""Files of other layouts that timm or transformers would read instead of ours, or beside them."""


@dataclass(frozen=True)
class Package:
    """A folder that holds what is to be pushed, and nothing else."""

    folder: Path
    repo: str
    info: CheckpointInfo
    license: str | None
    base_model: str | None
    warnings: tuple[str, ...] = ()

    @property
    def files(self) -> dict[str, Path]:
        return {file.name: file for file in sorted(self.folder.iterdir())}


@dataclass(frozen=True)
class Changes:
    """What a push changes in a repo."""

    upload: dict[str, int]
    """Files that are new or another, and their bytes."""
    unchanged: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    commit: str | None = None
    """The commit that was compared with; None: there is no such repo."""
    private: bool = False
    branch_exists: bool = True

    @property
    def is_empty(self) -> bool:
        return not self.upload and not self.remove


@dataclass(frozen=True)
class Pushed:
    """How a push ended."""

    changes: Changes
    url: str
    """The page of the commit, of the pull request or of the repo."""
    commit: str | None = None
    """None: nothing had changed."""
    created: bool = False
    """The repo was made."""
    request: str | None = None
    """The page of the pull request."""


# ---------------------------------------------------------------------------------------------
# What goes there


def pack(
    spec: str | Path,
    folder: Path,
    repo: str,
    license: str | None = None,
    on_progress: hub.Progress | None = None,
    allow_pickle: bool = False,
) -> Package:
    """Writes timm's Hub layout, a card and its images into an empty folder.

    Args:
        spec: a run's folder, a file of any layout that we read, a name or another repo.
        repo: where it will be, `org/name`; the card says so.
        license: an identifier of the Hub's; else what the run's card says, else the licence of
            the model that it was trained from, where the registry knows that. Never a guess.

    Raises:
        VitError: there is no such checkpoint, or it cannot be read.
    """
    located = read.locate(spec, on_progress=on_progress, allow_pickle=allow_pickle)
    source = read.open_checkpoint(located.file, located.entry)
    provenance = without_paths(source.info.provenance)
    info = dataclasses.replace(source.info, provenance=provenance)
    beside = located.file.parent
    own = beside / CARD
    old = own.read_text("utf-8", "replace") if own.is_file() else ""
    old = without_paths(old) if card.is_ours(old) else ""
    base_model, inherited = lineage(info, located.entry)
    license = license or card.license_of(old) or inherited

    tensor_file.write(folder / WEIGHTS, source.tensors, info.to_metadata())
    write_config(folder / CONFIG, info)
    drawn = {caption: file for caption, file in IMAGES.items() if (beside / file).is_file()}
    text = card.model_card(
        info,
        name=repo,
        images=drawn if old or "command" in provenance else {},
        license=license,
        base_model=base_model,
    )
    text = card.with_sections_of(text, old)
    write_text(folder / CARD, text)
    for name in card.images_in(text):
        if (beside / name).is_file():
            shutil.copyfile(beside / name, folder / name)
    return Package(folder, repo, info, license, base_model, tuple(_warnings(info, license)))


def _warnings(info: CheckpointInfo, license: str | None) -> Iterator[str]:
    if reasons := not_in_timm(info.model):
        yield f"timm and transformers cannot load it, which know no {', '.join(reasons)}"
    else:
        yield from otherwise_in_timm(info.model)
    if license is None:
        yield "the card names no licence, as nobody said one: --license apache-2.0 would"
    if info.model.num_classes and not info.classes:
        yield "its classes have no names: `vit convert --labels FILE` gives them"


def lineage(
    info: CheckpointInfo, entry: RegistryEntry | None = None
) -> tuple[str | None, str | None]:
    """The Hub repo that a model comes from and that repo's licence, each None where unknown.

    The nearest ancestor with a name counts: one's own runs between have none. A repo that the
    registry does not know may have any licence.
    """
    if entry is not None:
        return entry.repo, entry.license
    for run in (info.provenance, *reversed(info.provenance.get("history", []))):
        parent = str(run.get("parent", "")).partition("@")[0]
        try:
            known = registry.known(parent) if parent else None
        except ModelNotFoundError:
            if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", parent) and not PurePath(parent).suffix:
                return parent, None
            continue
        if isinstance(known, RegistryEntry):
            return known.repo, known.license
        if known is not None:
            return None, registry.shipped_license()
    return None, None


# ---------------------------------------------------------------------------------------------
# What is new


def compare(package: Package, revision: str | None = None) -> Changes:
    """What of a package its repo does not have yet; changes nothing.

    Raises:
        HubError: the Hub cannot be reached, or does not say.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    repo, api, branch_exists = package.repo, HfApi(), True
    files = package.files
    with worded_push(repo):
        try:
            found = api.repo_info(repo, revision=revision)
        except RepositoryNotFoundError:
            return Changes({name: path.stat().st_size for name, path in files.items()})
        except RevisionNotFoundError:
            found, branch_exists = api.repo_info(repo), False
        tree = api.list_repo_tree(repo, recursive=True, revision=found.sha)
        there = {item.path: item for item in tree if hasattr(item, "blob_id")}
    same = {name for name, path in files.items() if name in there and _same(path, there[name])}
    return Changes(
        upload={name: path.stat().st_size for name, path in files.items() if name not in same},
        unchanged=tuple(sorted(same)),
        remove=tuple(name for name in CONTRADICTING if name in there),
        commit=found.sha,
        private=bool(found.private),
        branch_exists=branch_exists,
    )


def _same(path: Path, there: Any) -> bool:
    """Whether a file is the one in the repo: large ones go by their sha256, others by git's id."""
    if there.size != path.stat().st_size:
        return False
    with open(path, "rb") as file:
        if there.lfs is not None:
            return bool(hashlib.file_digest(file, "sha256").hexdigest() == there.lfs.sha256)
        blob = hashlib.sha1(b"blob %d\0" % there.size, usedforsecurity=False)
        blob.update(file.read())
        return bool(blob.hexdigest() == there.blob_id)


# ---------------------------------------------------------------------------------------------
# One commit


def check_name(repo: str) -> None:
    """Raises HubError where a repo cannot be called so."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(repo)
        whole = "/" in repo
    except HFValidationError:
        whole = False
    if not whole:
        hint = "write org/name, in letters, digits, - _ and ."
        raise HubError("is not a name of a repo", where=repo, hint=hint)


def check_login(repo: str) -> str:
    """Who we are to the Hub, by the ordinary token.

    Raises:
        HubError: there is no token, it is not valid, or it may not write.
    """
    from huggingface_hub import HfApi, get_token

    if hub.is_offline():
        raise HubError("the network is forbidden", where=repo, hint="unset HF_HUB_OFFLINE")
    if get_token() is None:
        raise HubError("to push needs a token, and there is none", where=repo, hint=TOKEN)
    with worded_push(repo):
        me: Mapping[str, Any] = HfApi().whoami()
    role = me.get("auth", {}).get("accessToken", {}).get("role")
    if role == "read":
        raise HubError(f"the token of {me['name']} may only read", where=repo, hint=TOKEN)
    return str(me["name"])


def push(
    package: Package,
    changes: Changes | None = None,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
    create_pr: bool = False,
) -> Pushed:
    """Uploads what is new, as one commit: whatever goes wrong before it, the repo stays as it was.
    One that this push made stays, too, empty, which a note of the error tells.

    Args:
        changes: what `compare` found just now.
        private: of a repo that is made; one that is there keeps what it is.
        revision: a branch, made from main where it is not there.
        create_pr: open a pull request instead of changing the branch.

    Raises:
        HubError: access is refused, the network fails, or the repo changed meanwhile.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    repo, api, files = package.repo, HfApi(), package.files
    changes = changes or compare(package, revision)
    exists = changes.commit is not None
    if private and exists and not changes.private:
        raise HubError(
            "is there already, and public",
            where=repo,
            hint="leave out --private, make it private on its page, or take another name",
        )
    if not exists and create_pr:
        raise HubError("is not there: a pull request needs a repo", where=repo)
    page = f"{api.endpoint}/{repo}"
    if changes.is_empty:
        return Pushed(changes, page)
    additions = [CommitOperationAdd(name, str(files[name])) for name in changes.upload]
    removals = [CommitOperationDelete(name) for name in changes.remove]
    branch = revision if exists and changes.branch_exists else None
    made = False
    try:
        with worded_push(repo), warnings.catch_warnings(action="ignore"):  # of the card, too
            if CARD in changes.upload:  # may be refused, and nothing is made yet
                _check_card(files[CARD].read_text("utf-8"), repo)
            if not exists:
                api.create_repo(repo, private=private or None)
                made = True
            api.preupload_lfs_files(repo, additions, revision=branch, create_pr=create_pr)
            if revision != branch:  # made for contents that are there
                api.create_branch(
                    repo, branch=str(revision), revision=changes.commit, exist_ok=True
                )
            done = api.create_commit(
                repo,
                [*additions, *removals],
                commit_message=message or _title(package),
                revision=revision,
                create_pr=create_pr,
                parent_commit=changes.commit,
            )
    except BaseException as error:  # Ctrl-C, too
        if made:
            error.add_note(f"{repo} was made and is empty: push again, or delete it on its page")
        elif isinstance(error, KeyboardInterrupt):
            error.add_note(f"stopped before {repo} took the commit")
        raise
    return Pushed(changes, done.pr_url or done.commit_url, done.oid, made, done.pr_url)


def _check_card(text: str, repo: str) -> None:
    """Asks the Hub whether it takes a card's front matter. Raises HubError where it does not.

    `ModelCard.validate` of huggingface_hub 1 asks huggingface.co, wherever HF_ENDPOINT points.
    """
    from huggingface_hub import HfApi, get_session
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        hf_raise_for_status,
    )

    answer = get_session().post(
        f"{HfApi().endpoint}/api/validate-yaml",
        json={"content": text, "repoType": "model"},
        headers=build_hf_headers(),
    )
    if answer.status_code == 400:
        said = answer.text
        with contextlib.suppress(ValueError, KeyError, TypeError):
            said = "; ".join(reason["message"] for reason in answer.json()["errors"])
        raise HubError(
            f"the Hub refuses the card's front matter: {said}",
            where=repo,
            hint="is --license, or the one in README.md, an identifier of the Hub's?",
        )
    hf_raise_for_status(answer)


def _title(package: Package) -> str:
    """What a commit is called that nobody gave a name."""
    return f"Push {package.info.provenance.get('data') or 'a model'}"

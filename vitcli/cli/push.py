"""`vit push`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import typer

from vitcli.cli import output
from vitcli.cli.parameters import command
from vitcli.cli.pull import Transferring
from vitcli.errors import HubError
from vitcli.fields import option
from vitcli.hub.push import Changes, Package, compare, log_in, pack, workspace
from vitcli.hub.push import push as push_package
from vitcli.hub.retry import is_offline, is_repo_id


@dataclass(frozen=True, kw_only=True)
class Push(Transferring):
    """Options of `vit push`."""

    checkpoint: str = option(
        ..., "CHECKPOINT", "Run directory, checkpoint file of any layout, or model name."
    )
    repo: str = option(..., "ORG/NAME", "Repo on the Hub.")
    private: bool = option(False, "--private", "Create a private repo.")
    revision: str | None = option(
        None,
        "--revision BRANCH",
        "Branch to push to; created if it does not exist.  [default: main]",
    )
    message: str | None = option(None, "--commit-message --message TEXT", "Commit message.")
    create_pr: bool = option(
        False, "--create-pr", "Open a pull request instead of changing the repo."
    )
    license: str | None = option(
        None,
        "--license ID",
        "License to state in the model card, for example apache-2.0.  [default: the card's, else "
        "that of the model it was trained from]",
    )
    overwrite_card: bool = option(
        False, "--overwrite-card", "Replace the model card on the Hub, including edits made there."
    )
    token: str | None = option(
        None,
        "--token TOKEN",
        "Hub token.  [default: HF_TOKEN, or the one saved by `hf auth login`]",
    )
    dry_run: bool = option(
        False,
        "--dry-run",
        "Print what would be uploaded, with a diff of the model card, without uploading it.",
    )


@command(Push)
def push(args: Push) -> None:
    """Upload a model to the Hub, for vit, timm and transformers to load by name.

    Uploads the weights, config.json, a model card and its images in one commit, and skips unchanged
    files. Edits made to the card on the Hub are kept. Directory names, tokens and training states
    are never uploaded.

    \b
    Examples:
      vit push runs/flowers me/flowers --dry-run
      vit push runs/flowers me/flowers --private
    """
    repo, revision = args.repo, args.revision
    if args.offline:
        raise typer.BadParameter("an upload needs the network", param_hint="--offline")
    if args.create_pr and revision not in (None, "main"):
        raise typer.BadParameter("--create-pr opens a pull request to main: leave out --revision")
    if not is_repo_id(repo):
        raise typer.BadParameter(f"'{repo}' is not of the form org/name", param_hint="ORG/NAME")
    if revision is not None and (not re.fullmatch(r"\w[\w./-]*", revision) or ".." in revision):
        raise typer.BadParameter(f"'{revision}' is not a branch name")
    if not args.dry_run:
        log_in(repo, args.token, args.timeout)
    with workspace() as directory:
        with output.FetchDisplay(args.quiet) as fetching:
            package = pack(
                args.checkpoint, directory, repo, args.license, fetching, args.allow_pickle
            )
        for text in package.warnings:
            output.warning(text)
        compared = (package, revision, args.token, args.overwrite_card, args.timeout)
        if args.dry_run:
            _show(package, _compared(*compared), revision, args.json)
            return
        changes = compare(*compared)
        if changes.edited:
            parts = ", ".join(part.strip("# :") or "introduction" for part in changes.edited)
            text = f"{repo}: kept edits in README.md ({parts})"
            output.warning(f"{text}; --overwrite-card replaces it")
        _announce(changes, shown=not args.quiet and not args.json)
        done = push_package(
            package,
            changes,
            private=args.private,
            revision=revision,
            message=args.message,
            create_pr=args.create_pr,
            token=args.token,
            timeout=args.timeout,
        )
    told = _told(package, changes, revision)
    told |= {"commit": done.commit, "url": done.url, "created": done.created}
    if args.json:
        output.json_line({**told, "pull_request": done.request})
        return
    for name in changes.remove:
        output.note(f"removed {name}, which other libraries would load instead", args.quiet)
    if done.commit is None:
        output.note(f"nothing to push: {repo} is up to date", args.quiet)
    else:
        same = len(changes.unchanged)
        output.note(
            f"pushed {_amount(changes)}" + (f"; {same} unchanged" if same else ""), args.quiet
        )
    output.line(done.url)
    if done.request is None:
        at = f"@{revision}" if revision else ""
        output.note(f"next: vit predict IMAGE --model {repo}{at}", args.quiet)


def _compared(package: Package, *how: Any) -> Changes:
    """What is new, or all of it where the Hub does not say."""
    try:
        if is_offline():
            raise HubError("offline mode is on", where=package.repo)
        return compare(package, *how)
    except HubError as error:
        output.warning(f"cannot compare with the repo: {error.what}")
        return Changes({name: path.stat().st_size for name, path in package.files.items()})


def _told(package: Package, changes: Changes, revision: str | None) -> dict[str, Any]:
    return {
        "repo": package.repo,
        "revision": revision,
        "uploaded": changes.upload,
        "unchanged": list(changes.unchanged),
        "removed": list(changes.remove),
        "license": package.license,
        "base_model": package.base_model,
    }


def _show(package: Package, changes: Changes, revision: str | None, json: bool) -> None:
    """What would happen."""
    if json:
        output.json_line({**_told(package, changes, revision), "dry_run": True})
        return
    rows = [
        *((name, f"{size:,}", "would be uploaded") for name, size in changes.upload.items()),
        *((name, "", "unchanged") for name in changes.unchanged),
        *((name, "", "would be removed") for name in changes.remove),
    ]
    output.table(("file", "bytes", package.repo), rows, numbers=(1,))
    if changes.card_diff:
        output.line("\n" + changes.card_diff.rstrip("\n"))


def _announce(changes: Changes, shown: bool) -> None:
    """The client draws its own bars, for a person at a terminal; elsewhere, a line has to do."""
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    if not shown or not output.is_terminal():
        disable_progress_bars()
        if changes.upload:
            output.note(f"pushing {_amount(changes)}", quiet=not shown)


def _amount(changes: Changes) -> str:
    count = len(changes.upload)
    return f"{count} file{'s' * (count != 1)}, {output.size(sum(changes.upload.values()))}"

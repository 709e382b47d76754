"""`vit push`."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from vitcli.cli import options, output
from vitcli.cli.pull import Timeout
from vitcli.errors import HubError
from vitcli.hub.push import Changes, Package, compare, log_in, pack, workspace
from vitcli.hub.push import push as push_package
from vitcli.hub.retry import is_offline

Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help="Run directory, checkpoint file of any layout, or model name.",
        show_default=False,
    ),
]
Repo = Annotated[
    str, typer.Argument(metavar="ORG/NAME", help="Repo on the Hub.", show_default=False)
]
Private = Annotated[bool, typer.Option("--private", help="Create a private repo.")]
Revision = Annotated[
    str | None,
    typer.Option(
        "--revision",
        metavar="BRANCH",
        help="Branch to push to; created if it does not exist.  [default: main]",
    ),
]
Message = Annotated[
    str | None,
    typer.Option("--commit-message", "--message", metavar="TEXT", help="Commit message."),
]
Token = Annotated[
    str | None,
    typer.Option(
        "--token",
        metavar="TOKEN",
        help="Hub token.  [default: HF_TOKEN, or the one saved by `hf auth login`]",
    ),
]
OverwriteCard = Annotated[
    bool,
    typer.Option(
        "--overwrite-card", help="Replace the model card on the Hub, including edits made there."
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Print what would be uploaded, with a diff of the model card, without uploading it.",
    ),
]
CreatePr = Annotated[
    bool, typer.Option("--create-pr", help="Open a pull request instead of changing the repo.")
]
License = Annotated[
    str | None,
    typer.Option(
        "--license",
        metavar="ID",
        help="License to state in the model card, for example apache-2.0.  [default: the card's, "
        "else that of the model it was trained from]",
    ),
]


def push(
    checkpoint: Checkpoint,
    repo: Repo,
    private: Private = False,
    revision: Revision = None,
    message: Message = None,
    create_pr: CreatePr = False,
    license: License = None,
    overwrite_card: OverwriteCard = False,
    token: Token = None,
    timeout: Timeout = None,
    dry_run: DryRun = False,
    offline: options.Offline = False,
    json: options.Json = False,
    allow_pickle: options.AllowPickle = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Upload a model to the Hub, for vit, timm and transformers to load by name.

    Uploads the weights, config.json, a model card and its images in one commit, and skips unchanged
    files. Edits made to the card on the Hub are kept. Directory names, tokens and training states
    are never uploaded.

    \b
    Examples:
      vit push runs/flowers me/flowers --dry-run
      vit push runs/flowers me/flowers --private
    """
    if offline:
        raise typer.BadParameter("an upload needs the network", param_hint="--offline")
    if create_pr and revision not in (None, "main"):
        raise typer.BadParameter("--create-pr opens a pull request to main: leave out --revision")
    if revision is not None and (not re.fullmatch(r"\w[\w./-]*", revision) or ".." in revision):
        raise typer.BadParameter(f"'{revision}' is not a branch name")
    if not dry_run:
        log_in(repo, token, timeout)
    with workspace() as directory:
        with output.FetchDisplay(quiet) as fetching:
            package = pack(checkpoint, directory, repo, license, fetching, allow_pickle)
        for text in package.warnings:
            output.warning(text)
        compared = (package, revision, token, overwrite_card)
        if dry_run:
            _show(package, _compared(*compared), revision, json)
            return
        changes = compare(*compared)
        if changes.edited:
            parts = ", ".join(part.strip("# :") or "introduction" for part in changes.edited)
            text = f"{repo}: kept edits in README.md ({parts})"
            output.warning(f"{text}; --overwrite-card replaces it")
        _announce(changes, shown=not quiet and not json)
        done = push_package(
            package,
            changes,
            private=private,
            revision=revision,
            message=message,
            create_pr=create_pr,
            token=token,
            timeout=timeout,
        )
    told = _told(package, changes, revision)
    told |= {"commit": done.commit, "url": done.url, "created": done.created}
    if json:
        output.json_line({**told, "pull_request": done.request})
        return
    for name in changes.remove:
        output.note(f"removed {name}, which other libraries would load instead", quiet)
    if done.commit is None:
        output.note(f"nothing to push: {repo} is up to date", quiet)
    else:
        same = len(changes.unchanged)
        output.note(f"pushed {_amount(changes)}" + (f"; {same} unchanged" if same else ""), quiet)
    output.line(done.url)
    if done.request is None:
        at = f"@{revision}" if revision else ""
        output.note(f"next: vit predict IMAGE --model {repo}{at}", quiet)


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

"""`vit push`."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from vitcli.cli import options, output
from vitcli.errors import HubError
from vitcli.hub.push import (
    Changes,
    Package,
    check_login,
    check_name,
    compare,
    pack,
)
from vitcli.hub.push import push as push_package

Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="CKPT",
        help="A run's folder, a checkpoint of any layout, or a model's name.",
        show_default=False,
    ),
]
Repo = Annotated[
    str, typer.Argument(metavar="ORG/NAME", help="The repo on the Hub.", show_default=False)
]
Private = Annotated[
    bool, typer.Option("--private", help="Make the repo private, where it is not there yet.")
]
Revision = Annotated[
    str | None,
    typer.Option(
        "--revision",
        metavar="BRANCH",
        help="A branch, made where it is not there.  [default: main]",
    ),
]
Message = Annotated[
    str | None, typer.Option("--message", metavar="TEXT", help="What the commit is called.")
]
CreatePr = Annotated[
    bool, typer.Option("--create-pr", help="Open a pull request instead of changing the repo.")
]
License = Annotated[
    str | None,
    typer.Option(
        "--license",
        metavar="ID",
        help="The licence that the card names, as in apache-2.0.  [default: that of the model it "
        "was trained from, where known]",
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
    dry_run: options.DryRun = False,
    allow_pickle: options.AllowPickle = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Put a model on the Hub, so that vit, timm and transformers load it by its name.

    Weights, config.json, a model card and its images go there in one commit; only what changed
    is uploaded. Folders, tokens and the state of a run stay here.
    """
    if create_pr and revision not in (None, "main"):
        raise typer.BadParameter("a pull request goes to main: leave out --revision")
    if revision is not None and not re.fullmatch(r"[\w][\w./-]*", revision):
        raise typer.BadParameter(f"'{revision}' is no name of a branch")
    check_name(repo)
    if not dry_run:
        check_login(repo)
    with tempfile.TemporaryDirectory(prefix="vit-push-") as folder:
        with output.FetchDisplay(quiet) as fetching:
            package = pack(checkpoint, Path(folder), repo, license, fetching, allow_pickle)
        for text in package.warnings:
            output.warning(text)
        if dry_run:
            _show(package, _compared(package, revision), revision, json)
            return
        changes = compare(package, revision)
        _announce(changes, shown=not quiet and not json)
        done = push_package(
            package,
            changes,
            private=private,
            revision=revision,
            message=message,
            create_pr=create_pr,
        )
    told = _told(package, done.changes, revision)
    told |= {"commit": done.commit, "url": done.url, "created": done.created}
    if json:
        output.json_line({**told, "pull_request": done.request})
        return
    for name in done.changes.remove:
        output.note(f"removed {name} from the repo: other libraries would have read it", quiet)
    if done.commit is None:
        output.note(f"nothing to push: {repo} has it all", quiet)
    else:
        same = len(done.changes.unchanged)
        text = f"pushed {_amount(changes)}"
        output.note(text + (f"; {same} had not changed" if same else ""), quiet)
    output.line(done.url)
    if done.request is None:
        at = f"@{revision}" if revision else ""
        output.note(f"next: vit predict IMAGE --model {repo}{at}", quiet)


def _compared(package: Package, revision: str | None) -> Changes:
    """What is new, or all of it where the Hub does not say."""
    try:
        return compare(package, revision)
    except HubError as error:
        output.warning(f"not compared with the repo: {error.what}")
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
        *((name, "", "is there already") for name in changes.unchanged),
        *((name, "", "would be removed") for name in changes.remove),
    ]
    output.table(("file", "bytes", package.repo), rows, numbers=(1,))


def _announce(changes: Changes, shown: bool) -> None:
    """The client draws its own bars: for a person at a terminal; elsewhere a line tells."""
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not shown or not output.is_terminal():
        disable_progress_bars()
        if changes.upload:
            output.note(f"pushing {_amount(changes)}", quiet=not shown)


def _amount(changes: Changes) -> str:
    count = len(changes.upload)
    return f"{count} file{'s' * (count != 1)}, {output.size(sum(changes.upload.values()))}"

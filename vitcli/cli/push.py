"""`vit push`."""

import os
import re
import sys
import tempfile
from dataclasses import dataclass

import typer

from vitcli.atomic import temporary_directory
from vitcli.cli import output
from vitcli.cli.options import CHECKPOINT, fetching
from vitcli.cli.parameters import UsageError, command
from vitcli.cli.pull import HubOptions
from vitcli.errors import HubError
from vitcli.fields import option
from vitcli.hub import push as hub
from vitcli.words import pluralize


@dataclass(frozen=True, kw_only=True)
class Push(HubOptions):
    """Options of `vit push`."""

    checkpoint: str = option(..., "CHECKPOINT", CHECKPOINT)
    repo: str = option(..., "ORG/NAME", "Repo on the Hub; created if it does not exist.")
    private: bool = option(False, "--private", "Create a private repo.")
    revision: str | None = option(
        None,
        "--revision BRANCH",
        "Branch to push to; created if it does not exist.  [default: main]",
    )
    message: str | None = option(
        None, "--commit-message --message TEXT", "Title of the commit.  [default: Push DATASET]"
    )
    create_pr: bool = option(
        False, "--create-pr", "Open a pull request instead of changing the repo."
    )
    license: str | None = option(
        None,
        "--license ID",
        "License for the model card, for example apache-2.0.  [default: the card's, else the "
        "initial model's]",
    )
    overwrite_card: bool = option(
        False, "--overwrite-card", "Replace the model card on the Hub, including edits made there."
    )
    token: str | None = option(
        None,
        "--token TOKEN",
        "Hub token.  [default: HF_TOKEN, or the one saved by `hf auth login`]",
    )
    offline: bool = option(False, "--offline", "")  # rejected below
    dry_run: bool = option(
        False,
        "--dry-run",
        "Print what would be uploaded, with a diff of the model card, without uploading it.",
    )


@command(Push)
def push(args: Push) -> None:
    """Upload a model to the Hub, so that vit, timm and transformers can load it by name.

    Uploads the weights, config.json, and a model card with its figures in one commit, and skips
    unchanged files. Edits made to the card on the Hub are kept. Paths in the command recorded in
    the card are shortened to their last component. Tokens and training states are never uploaded.

    \b
    Examples:
      vit push runs/flowers me/flowers --dry-run
      vit push runs/flowers me/flowers --private
    """
    if args.token is not None:  # for all requests, also those that download a private model
        os.environ |= {"HF_TOKEN": args.token, "HF_HUB_DISABLE_IMPLICIT_TOKEN": ""}
        os.environ.pop("HF_OIDC_RESOURCE", None)  # takes precedence
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    _check_arguments(args)
    revision, target = args.revision, hub.Target(args.repo, args.revision, args.timeout)
    if not args.dry_run:
        hub.check_token(target)
    with temporary_directory(tempfile.gettempdir()) as directory:
        with fetching(args) as kwargs:
            kwargs["timeout"] = args.timeout
            package = hub.pack(args.checkpoint, directory, args.repo, args.license, **kwargs)
        for message in package.warnings:
            output.warning(message)
        changes = _compare(package, target, args)
        if changes.license is None:
            output.warning(
                "the model card has no license: set one, for example with --license apache-2.0"
            )
        info = {
            "repo": args.repo,
            "revision": revision,
            "uploaded": changes.upload,
            "unchanged": list(changes.unchanged),
            "removed": list(changes.remove),
            "license": changes.license,
            "base_model": package.base_model,
        }
        if args.dry_run:
            output.json_line({**info, "dry_run": True}) if args.json else _show(changes, args.repo)
            return
        if changes.edited:
            sections = ", ".join(part.strip("# :") or "introduction" for part in changes.edited)
            message = f"{args.repo}: kept the edits made to README.md on the Hub ({sections})"
            output.warning(f"{message}; --overwrite-card discards them")
        count, size = len(changes.upload), sum(changes.upload.values())
        amount = f"{pluralize(count, 'file')}, {output.format_bytes(size)}"
        if output.quiet or args.json or not sys.stderr.isatty():
            disable_progress_bars()  # the client's
        if count and not args.json:
            output.note(f"pushing {amount}")
        result = hub.push(
            package,
            changes,
            target,
            private=args.private,
            message=args.message,
            create_pr=args.create_pr,
        )
    if args.json:
        outcome = {"commit": result.commit, "url": result.url, "created": result.created}
        output.json_line({**info, **outcome, "pull_request": result.pull_request})
        return
    for name in changes.remove:
        output.note(f"removed {name}, which other libraries would load instead")
    if not changes.branch_exists:
        output.note(f"created the branch {revision}")
    if result.commit is not None:
        num_unchanged = len(changes.unchanged)
        output.note(f"pushed {amount}" + (f"; {num_unchanged} unchanged" if num_unchanged else ""))
    elif changes.branch_exists:
        output.note(f"nothing to push: {args.repo} is up to date")
    output.line(result.url)
    if result.pull_request is None:
        revision_suffix = f"@{revision}" if revision else ""
        next_command = "predict IMAGE" if package.has_head else "finetune --data DATA"
        output.note(f"next: vit {next_command} --model {args.repo}{revision_suffix}")


def _check_arguments(args: Push) -> None:
    revision = args.revision
    if args.offline:
        raise UsageError("vit push requires the network: leave out --offline")
    if args.create_pr and revision not in (None, "main"):
        raise UsageError("--create-pr opens a pull request to main: leave out --revision")
    if not _is_repo_id(args.repo):
        message = f"'{args.repo}' is not of the form org/name"
        raise typer.BadParameter(message, param_hint="'ORG/NAME'")
    if revision is not None and (not re.fullmatch(r"\w[\w./-]*", revision) or ".." in revision):
        raise typer.BadParameter(f"'{revision}' is not a branch name", param_hint="'--revision'")


def _is_repo_id(name: str) -> bool:
    """Whether a name is a valid repo id of the form org/name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name


def _compare(package: hub.Package, target: hub.Target, args: Push) -> hub.Changes:
    """Compare with the repo; if that fails in a dry run, treat every file as new."""
    try:
        hub.check_online(target)
        changes = hub.compare(package, target, args.overwrite_card)
    except HubError as error:
        if not args.dry_run:
            raise
        output.warning(f"cannot compare with the repo: {error.what}")
        return hub.Changes(package.sizes, license=package.license)
    hub.check_options(changes, target, args.private, args.create_pr)
    return changes


def _show(changes: hub.Changes, repo: str) -> None:
    """Print what would be pushed."""
    rows = [
        *((name, f"{size:,}", "would be uploaded") for name, size in changes.upload.items()),
        *((name, "", "unchanged") for name in changes.unchanged),
        *((name, "", "would be removed") for name in changes.remove),
    ]
    output.table(("file", "bytes", repo), rows, numeric=(1,))
    if changes.card_diff:
        output.line("", *changes.card_diff.split("\n"))

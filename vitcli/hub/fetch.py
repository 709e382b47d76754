"""Checkpoints from the Hugging Face Hub: fetched into the ordinary cache, and checked there.

`huggingface_hub` is imported when something is to be fetched and not before.
"""

from __future__ import annotations

import http.client
import json
import os
import threading
import urllib.error
import urllib.request
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from vitcli.errors import HubError, VitWarning
from vitcli.hub.client_errors import is_passing, worded
from vitcli.hub.repo_cache import COMMIT, Listing, RepoCache
from vitcli.hub.transfer import Progress as Progress
from vitcli.hub.transfer import download

MAIN, CONFIG, INDEX = "main", "config.json", "model.safetensors.index.json"
BESIDE = (CONFIG, "preprocessor_config.json")
"""What is read beside the weights, where a repo has it."""
SAFE = ("model.safetensors", INDEX, "*.safetensors", "*.npz")
PICKLES = ("pytorch_model.bin", "*.pth", "*.pth.tar", "*.pt", "*.bin")
"""What weights are called, the best first."""
NO_WEIGHTS = ("training_args.bin", "optimizer.*", "scheduler.*", "rng_state*")


def fetch(
    repo: str,
    revision: str | None = None,
    offline: bool = False,
    on_progress: Progress | None = None,
    allow_pickle: bool = False,
) -> Path:
    """The file of a repo's weights in the cache (of shards: their index), fetched with what is
    read beside it where it is not there yet.

    Every file is compared with the digest that the Hub lists before it is first used: the client
    itself accepts a damaged download. A damaged file is removed and fetched once more. Where the
    Hub cannot be asked, what the cache has of the revision will do, with a warning.

    Raises:
        HubError: the repo, the revision or a file is not there, access is refused, the network
            fails, a file arrives damaged twice, or the weights are pickled and `allow_pickle` is
            not set.
    """
    cache, revision = RepoCache(repo), revision or MAIN
    found = _look(cache, revision, offline or is_offline())
    weights = _choose(found.listing, repo, allow_pickle)
    if found.otherwise is None:
        cache.clear_incomplete()
    for name in BESIDE:
        if name in found.listing:
            found.get(name, on_progress)
        elif found.is_new:
            found.check_absent(name)
    file = found.get(weights, on_progress)
    for shard in _shards(file) if weights == INDEX else ():
        found.get(shard, on_progress)
    if found.otherwise is None:
        cache.remember(revision, found.commit, found.listing)
    return file


def cached(repo: str, revision: str | None = None) -> Path | None:
    """The folder of a repo's checkpoint if the cache holds it whole; asks no one."""
    cache = RepoCache(repo)
    commit = cache.commit(revision or MAIN)
    if commit is None:
        return None
    present, folder = cache.present(commit), cache.snapshot(commit)
    try:
        weights = _choose(present, repo, pickles=True)
        shards = _shards(folder / weights) if weights == INDEX else ()
    except HubError:
        return None
    return folder if all(shard in present for shard in shards) else None


def is_offline() -> bool:
    """Whether the environment forbids the network."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in names)


def reachable(timeout: float = 3.0, repo: str | None = None) -> bool:
    """Whether the Hub answers within so many seconds, with a file of `repo` if one is named (a
    proxy's refusal is an answer too, but no model); False where the network is forbidden."""
    if is_offline():
        return False
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    answered = threading.Event()

    def ask() -> None:
        try:
            page = f"{endpoint}/{repo}/resolve/main/{CONFIG}" if repo else endpoint
            request = urllib.request.Request(page, method="HEAD")
            with urllib.request.urlopen(request, timeout=timeout):
                answered.set()
        except urllib.error.HTTPError:
            if repo is None:
                answered.set()  # an error page is an answer
        except (OSError, ValueError, http.client.HTTPException):
            pass

    # A thread, because looking up a name has no timeout of its own.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout)
    return answered.is_set()


# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Found:
    """A commit of a repo: what it has, and whether what is not in the cache can be had."""

    cache: RepoCache
    commit: str
    listing: Listing
    is_new: bool = False
    """The listing has not been made sure of yet."""
    otherwise: HubError | None = None
    """Why nothing can be fetched; None: it can."""

    def get(self, name: str, on_progress: Progress | None) -> Path:
        """A file, whole, in the cache. Raises HubError."""
        repo, path = self.cache.repo, self.cache.snapshot(self.commit) / name
        if name not in self.listing:
            raise self.otherwise or HubError(f"has no {name}, which its index names", where=repo)
        digest = self.listing[name]
        if path.is_file() and self.cache.is_whole(path, digest):
            return path
        if self.otherwise is not None:
            if not path.is_file():
                raise self.otherwise
            self.cache.remove(path)
            raise HubError(
                f"{name} is damaged in the cache, and was removed",
                where=repo,
                hint="fetch it again without --offline",
            )
        for _ in range(2):
            with worded(repo, name):
                self.cache.remove(path)
            download(self.cache, name, self.commit, digest, on_progress)
            if path.is_file() and self.cache.is_whole(path, digest):
                return path
        self.cache.remove(path)
        raise HubError(
            f"{name} arrived damaged, twice, and was removed",
            where=repo,
            hint="try again; if it happens again, the network or the disk alters data",
        )

    def check_absent(self, name: str) -> None:
        """Makes sure that a file that is not listed is not there: without its config a model
        would be taken for another. Raises HubError."""
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
        from huggingface_hub.errors import HfHubHTTPError

        repo = self.cache.repo
        with worded(repo, name, self.commit):
            try:
                url = hf_hub_url(repo, name, revision=self.commit)
                get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT)
            except HfHubHTTPError as error:
                if error.response.status_code != 404:
                    raise
                return
        raise HubError(f"lists no {name} but has one", where=repo, hint="try again")


def _look(cache: RepoCache, revision: str, offline: bool) -> _Found:
    """Which commit a revision is, and what files it has: one question to the Hub, and none for a
    commit that was asked about before. Raises HubError."""
    known = cache.commit(revision)
    present = cache.present(known) if known else {}
    listing = (known and cache.listing(known)) or present
    if offline:
        missing = "is not in the cache" if revision == MAIN else f"{revision} is not in the cache"
        way = "where HF_HUB_OFFLINE is not set" if is_offline() else "without --offline"
        otherwise = HubError(missing, where=cache.repo, hint=f"fetch it once {way}")
        if known is None or not present:
            raise otherwise
        return _Found(cache, known, listing, otherwise=otherwise)
    if known == revision and cache.listing(known):
        return _Found(cache, known, listing)
    try:
        with worded(cache.repo, revision=revision):
            return _ask(cache, revision)
    except HubError as error:
        if known and _weights(present) and error.__cause__ and is_passing(error.__cause__):
            text = f"{cache.repo}: {error.what}; what the cache has of it is used"
            warnings.warn(f"{text}, commit {known[:7]}", VitWarning, stacklevel=2)
            return _Found(cache, known, listing, otherwise=error)
        raise


def _ask(cache: RepoCache, revision: str) -> _Found:
    """The question. Raises what the client raises."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        info = HfApi().model_info(
            cache.repo,
            revision=revision,
            files_metadata=True,
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
        )
        listing = {
            file.rfilename: str(file.lfs.sha256 if file.lfs else file.blob_id or "")
            for file in info.siblings or ()
        }
        commit = str(info.sha)
    except (HfHubHTTPError, HFValidationError):
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _not_understood(cache.repo) from error
    if not COMMIT.fullmatch(commit):
        raise _not_understood(cache.repo)
    return _Found(cache, commit, listing, is_new=cache.listing(commit) != listing)


def _not_understood(repo: str) -> HubError:
    hint = "check HF_ENDPOINT, and try again"
    return HubError("the Hub's answer is not understood", where=repo, hint=hint)


def _weights(names: Collection[str], patterns: Sequence[str] = SAFE + PICKLES) -> list[str]:
    """The names that weights have, of the best kind there is: more than one where several might
    be meant."""
    top = [name for name in names if "/" not in name]
    top = [name for name in top if not any(fnmatch(name, no) for no in NO_WEIGHTS)]
    kinds = ([name for name in top if fnmatch(name, pattern)] for pattern in patterns)
    return sorted(next((kind for kind in kinds if kind), []))


def _choose(names: Collection[str], repo: str, pickles: bool) -> str:
    """The name of a repo's weights: safetensors where there are any. Raises HubError."""
    safe = _weights(names, SAFE)
    found = safe or _weights(names, PICKLES)
    if not found:
        some = ", ".join(sorted(names)[:8]) or "nothing"
        raise HubError(
            f"holds no weights that we read, but {some}",
            where=repo,
            hint="safetensors, .npz or torch's .bin and .pth are read, outside folders",
        )
    if len(found) > 1:
        raise HubError(
            f"holds several checkpoints: {', '.join(found[:8])}",
            where=repo,
            hint=f"fetch one (hf download {repo} {found[0]}) and name its path",
        )
    if not safe and not pickles:
        raise HubError(
            f"has its weights as a pickle only, {found[0]}, a kind of file that can run code",
            where=repo,
            hint="--allow-pickle reads its tensors, and nothing else in it",
        )
    return found[0]


def _shards(index: Path) -> list[str]:
    """The files that an index names. Raises HubError."""
    try:
        names: dict[str, str] = json.loads(index.read_text("utf-8"))["weight_map"]
        if any(Path(name).name != name for name in names.values()):
            raise ValueError("it names files in folders")
        return sorted(set(names.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise HubError("is no index of safetensors files", where=index) from error

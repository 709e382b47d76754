"""The ranks of a distributed command: one process per device.

They are started by torchrun, or by `--devices N` with the same launcher; a process without a
launcher is rank 0 of 1, and has no process groups. Rank 0 prints and writes. Ranks agree on
decisions through a CPU group (gloo), beside the group of the devices (NCCL, or gloo if torch has no
NCCL, as on Windows).
"""

import contextlib
import itertools
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]
    FileStore,
    HashStore,
    PrefixStore,
    Store,
    rendezvous,
)

from vitcli.errors import ConfigError, PeerFailedError, RankError, RunError, VitError
from vitcli.machine import (
    END_SIGNALS,
    RANK_TIMEOUT,
    STOP_SIGNALS,
    cpu_cores,
    end_with_parent,
    is_launched,
)

T = TypeVar("T")

_GRACE = 5.0
"""Seconds to wait for the errors of other ranks once one is unreachable."""
_NCCL_GRACE = 60.0
"""Seconds by which NCCL's timeout exceeds that of the CPU groups: NCCL aborts the process, which
can then no longer report the unresponsive rank."""
_LOST_RANK_HINT = "look for an earlier error; if a rank is only slow, raise --rank-timeout"


_STORE_FILE = "VIT_STORE_FILE"
"""Environment variable: the file of the ranks' store, if `launch` has started them."""
_LAUNCHER = "VIT_LAUNCHER"
"""Environment variable: the process ID of `launch`, which a rank may outlive before it joins."""
_FINAL = "final"
"""Key in the store of a launch: the exit code of all further attempts."""


@dataclass(frozen=True)
class Ranks:
    """This process as one of several ranks. All ranks call the methods in the same order."""

    rank: int
    """From 0."""
    world_size: int
    control: dist.ProcessGroup | None
    """The CPU group, for data that is not on a device; None without a launcher."""
    background: dist.ProcessGroup | None
    """A CPU group for a background thread, which writes the state of a run during training."""
    store: Store
    launch_store: Store
    """Shared by all attempts of a launch, which may restart its ranks after a failure."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which prints and writes."""
        return self.rank == 0

    def share(self, total: int) -> range:
        """This rank's contiguous part of `total` items. The parts are in the order of the ranks,
        and their sizes differ by at most one."""
        return range(
            total * self.rank // self.world_size, total * (self.rank + 1) // self.world_size
        )

    def sum(self, tensor: Tensor) -> Tensor:
        """All-reduce a tensor on this rank's device (sum), in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: T) -> list[T]:
        """Gather a picklable value from all ranks, in rank order."""
        gathered: list[Any] = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(gathered, value, group=self.control)
        return gathered

    def broadcast(self, value: T) -> T:
        """Broadcast rank 0's value to all ranks."""
        values = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(values, group=self.control)
        return values[0]

    def all_max(self, *values: int) -> list[int]:
        """All-reduce integers (max), each on its own."""
        tensor = torch.tensor(values)
        if self.world_size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.control)
        return [int(value) for value in tensor]

    def barrier(self) -> None:
        """Wait until all ranks have reached this call."""
        if self.world_size > 1:
            dist.barrier(group=self.control)

    @contextlib.contextmanager
    def rank_zero_first(self) -> Iterator[None]:
        """Run the block on rank 0 first, however long it takes, then on the others, which find what
        it has downloaded or indexed. If rank 0 fails, the others exit silently."""
        key = f"turn/{next(_turns)}"
        while not self.is_first and not self.store.check([key]):
            if self.store.check(["exited/0"]):
                raise PeerFailedError("rank 0 has failed")
            time.sleep(0.05)
        yield
        self.store.set(key, "")

    def begin(self, path: Path) -> None:
        """Record that this launch has begun a run in a directory."""
        self.launch_store.set(f"begun/{path}", "")

    def has_begun(self, path: Path) -> bool:
        """Whether an earlier attempt of this launch has begun a run in a directory."""
        return self.broadcast(self.launch_store.check([f"begun/{path}"]))

    def end_launch(self, exit_code: int) -> None:
        """Make further attempts exit at once: a restart would only repeat an error, or continue a
        run that a signal has stopped."""
        self.launch_store.set(_FINAL, str(exit_code))

    def check_same(self, value: object, what: str) -> None:
        """Raise RankError on all ranks if any has a different value than rank 0."""
        values = self.gather(value)
        if ranks := [rank for rank, other in enumerate(values) if other != values[0]]:
            raise RankError(
                f"{_format_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} a different "
                f"{what} than rank 0",
                hint="run the same command with the same files and data on every rank",
            )


@contextlib.contextmanager
def join_ranks(device: torch.device, timeout: float = RANK_TIMEOUT) -> Iterator[Ranks]:
    """Join the ranks that the launcher started, or become rank 0 of 1. Nested calls yield the same
    ranks.

    Args:
        device: the device of this rank (`devices.choose_device`).
        timeout: seconds after which an unresponsive rank ends the others.

    Raises:
        ConfigError: several ranks on MPS, which has no backend for them.
        RankError: a rank has died or hangs; raised on the lowest of the remaining ranks.
        PeerFailedError: the same, on the other ranks.
    """
    global _current
    if _current is not None:
        yield _current
        return
    _current = _join(device, timedelta(seconds=timeout))
    try:
        if device.type == "mps" and _current.world_size > 1:
            raise ConfigError("several ranks cannot use mps", hint="use --device cpu, or one rank")
        yield _current
    except BaseException as error:
        if _current.world_size > 1 and (final := _error_to_raise(_current, error)) is not error:
            raise final from error
        raise
    else:
        if is_launched():
            dist.destroy_process_group()
    finally:
        _current = None


_current: Ranks | None = None
_turns = itertools.count()


def current() -> Ranks | None:
    """Return the ranks that this process has joined, if any."""
    return _current


def _join(device: torch.device, timeout: timedelta) -> Ranks:
    """Create the process groups. Raises RankError: no address, a port in use, a missing rank."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not is_launched():
        return Ranks(0, 1, None, None, HashStore(), HashStore())
    if "TORCHELASTIC_RUN_ID" in os.environ:
        parent = int(os.environ.get(_LAUNCHER, os.getppid()))
        threading.Thread(target=end_with_parent, args=(parent,), daemon=True).start()
    nccl = device.type == "cuda" and dist.is_nccl_available()
    backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
    try:
        with _default_signals():
            store, rank, size = _open_store()
            store.set_timeout(timeout)
            if store.check([_FINAL]):
                ended = PeerFailedError("an earlier attempt has ended the launch")
                ended.exit_code = int(store.get(_FINAL))
                raise ended
            launch_store = store
            store = PrefixStore(_agree_on_attempt(store, rank, size, timeout), store)
            group = PrefixStore("group", store)
            limit = timeout + timedelta(seconds=_NCCL_GRACE if nccl else 0)
            dist.init_process_group(backend, store=group, rank=rank, world_size=size, timeout=limit)
            control, background = (
                dist.new_group(backend="gloo", timeout=timeout) for _ in range(2)
            )
    except (ValueError, RuntimeError) as error:
        _await_launcher(_GRACE)
        first_line = str(error).partition("\n")[0]
        raise RankError(
            f"the ranks cannot reach each other: {first_line}",
            hint="start them with torchrun, or with --devices N on one machine",
        ) from error
    return Ranks(rank, size, control, background, PrefixStore("vit", store), launch_store)


def _open_store() -> tuple[Store, int, int]:
    """Return the store that the ranks share, this rank, and the number of ranks."""
    if path := os.environ.get(_STORE_FILE):
        return FileStore(path), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found: tuple[Store, int, int] = next(rendezvous("env://"))
    return found


def _agree_on_attempt(store: Store, rank: int, size: int, timeout: timedelta) -> str:
    """Return a prefix for the keys of this attempt, as the store still has those of ranks that have
    been restarted. Rank 0 chooses it, and answers each rank that asks until all have joined.

    Raises:
        RuntimeError: a rank is missing.
    """
    own_id = uuid.uuid4().hex
    if rank:
        store.set(f"ask/{rank}", own_id)
        attempt = store.get(f"answer/{own_id}").decode()
        store.set(f"{attempt}/{rank}", "")
        return attempt
    missing, deadline = set(range(1, size)), time.monotonic() + timeout.total_seconds()
    while missing:
        for peer in [*missing]:
            if store.check([f"ask/{peer}"]):
                store.set(f"answer/{store.get(f'ask/{peer}').decode()}", own_id)
            if store.check([f"{own_id}/{peer}"]):
                missing.remove(peer)
        if time.monotonic() > deadline:
            raise RuntimeError(f"{_format_ranks(sorted(missing))} did not start in time")
        time.sleep(0.01)
    return own_id


@contextlib.contextmanager
def _default_signals() -> Iterator[None]:
    """Let `STOP_SIGNALS` end this process while it waits for others in C++, where Python's handlers
    do not run."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _await_launcher(seconds: float = 0.0) -> None:
    """Let the launcher terminate this rank at once if another has died, which it then reports."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(seconds)


SAVING_SECONDS = "120"
"""Seconds that ranks have to save their state after a signal."""


def launch(count: int, command: list[str], max_restarts: int = 0) -> int:
    """Run a command as `count` ranks on this machine, with torchrun's launcher.

    Args:
        command: arguments for the Python interpreter.
        max_restarts: how often to restart the ranks after a failure.

    Returns:
        The exit code of the rank that failed first, or 0; 128 + the signal number if this process
        received a signal.

    Raises:
        RankError: a rank was killed by a signal, so it could not report that itself.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # reported below
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cpu_cores() // count)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SAVING_SECONDS)
    try:
        with tempfile.TemporaryDirectory(prefix="vit-") as logs:
            # TCPStore listens on all interfaces, without authentication; files are the user's own.
            os.environ[_STORE_FILE] = os.path.join(logs, "ranks")
            os.environ[_LAUNCHER] = str(os.getpid())
            os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
            if sys.platform == "linux":
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=count,
                rdzv_backend="c10d",
                rdzv_endpoint=os.path.join(logs, "launcher"),
                # Each heartbeat makes the file longer, and nobody waits for them.
                rdzv_configs={"store_type": "file", "keep_alive_interval": 10**6},
                run_id=uuid.uuid4().hex,
                max_restarts=max_restarts,
                signals_to_handle=",".join(number.name for number in END_SIGNALS),
                logs_specs=DefaultLogsSpecs(logs),  # its default is never removed
            )
            elastic_launch(config, sys.executable)(*command)
    except SignalException as stop:
        return 128 + int(stop.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            aborted = failure.exitcode == -signal.SIGABRT  # as NCCL does if another rank hangs
            raise RankError(
                f"rank {rank} was killed by {failure.signal_name()}",
                hint=_LOST_RANK_HINT if aborted else None,
            ) from error
        return int(failure.exitcode)
    return 0


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error of a rank says only that it has lost another: not one of its own device."""
    own_errors = torch.OutOfMemoryError, torch.AcceleratorError
    return isinstance(error, RuntimeError) and not isinstance(error, own_errors)


def _error_to_raise(ranks: Ranks, error: BaseException) -> BaseException:
    """Return the error to raise on this rank when `error` ends it, so that only one rank reports.

    A rank with an error of its own reports it, unless rank 0 reports the same. A rank that has only
    lost another stays silent if that one reports, or if the launcher terminates this rank too, as
    the launcher then names the one that died; else the lowest such rank names the missing ones.
    """
    key, lost_peer = "exited/{}".format, is_lost_peer(error)
    message = "" if lost_peer else f"{type(error).__name__}: {error}"
    if lost_peer:
        _await_launcher()
    messages: dict[int, str] = {}
    try:
        if isinstance(error, ConfigError | RunError) and not isinstance(error, RankError):
            ranks.end_launch(error.exit_code)
        ranks.store.set(key(ranks.rank), message)
        deadline = time.monotonic() + _GRACE
        while len(messages) < ranks.world_size and time.monotonic() < deadline:
            time.sleep(0.05)
            reported = [r for r in range(ranks.world_size) if ranks.store.check([key(r)])]
            messages = {r: ranks.store.get(key(r)).decode() for r in reported}
            if lost_peer and any(messages.values()):
                return PeerFailedError("another rank has failed")
            if not lost_peer and 0 in messages:
                break
    except RuntimeError:  # the store's process has exited
        return error
    if not lost_peer:
        if ranks.rank and messages.get(0) == message:
            return PeerFailedError("another rank has failed")
        if ranks.rank and isinstance(error, VitError) and not isinstance(error, RankError):
            error.what += f" (on rank {ranks.rank})"
        return error
    missing = [r for r in range(ranks.world_size) if r not in messages]
    if not missing:
        return error
    if ranks.rank != min(messages):
        return PeerFailedError("another rank has failed")
    return RankError(
        f"{_format_ranks(missing)} died or did not respond in time", hint=_LOST_RANK_HINT
    )


def _format_ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))

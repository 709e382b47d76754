"""CPU cores and memory available to this process, considering the limits of its container, and its
rank if a launcher started it.

Standard library only."""

import contextlib
import ctypes
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

RANK_TIMEOUT = 600.0
"""Seconds after which a rank that does not respond ends the others."""
STOP_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)
]
"""Signals that stop a run after a step, with its state saved; Slurm can send SIGUSR1 on request."""
END_SIGNALS = STOP_SIGNALS + ([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])
"""Signals that end a command: also that of a closed terminal."""


def is_launched() -> bool:
    """Whether a launcher such as torchrun started this process as one of several ranks."""
    return bool(os.environ.get("RANK") and os.environ.get("WORLD_SIZE"))


def rank() -> int:
    """The rank of this process; 0 without a launcher."""
    return int(os.environ["RANK"]) if is_launched() else 0


def local_rank() -> int:
    """The rank on this machine; 0 without a launcher."""
    return int(os.environ.get("LOCAL_RANK", 0)) if is_launched() else 0


def end_with_parent(parent: int) -> None:
    """Kill this process once its parent, given by its PID, is gone. Runs in a thread."""
    if os.name == "nt":  # there, `getppid` may be the python.exe of a venv, and never changes
        return
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def cpu_cores(root: Path = Path("/")) -> int:
    """Number of cores available to this process, at least 1; a container's quota is rounded up. The
    ranks on a machine share them evenly. `root` contains /proc and /sys."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    for group in _control_groups("cpu", root):
        quota = _words(group / "cpu.max")  # cgroup v2: "150000 100000", or "max 100000"
        quota = quota or _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us")
        if len(quota) == 2 and quota[0].isdecimal() and int(quota[1]):
            cores = min(cores, -(-int(quota[0]) // int(quota[1])))
    if is_launched():
        cores //= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return max(cores, 1)


def free_memory(root: Path = Path("/")) -> float:
    """Memory in bytes that this process can still allocate, within the limits of its container."""
    limits = [_available_memory(root)]
    for group in _control_groups("memory", root):
        limit = _words(group / "memory.max") or _words(group / "memory.limit_in_bytes")
        used = _words(group / "memory.current") or _words(group / "memory.usage_in_bytes")
        if limit and used and limit[0].isdecimal():  # not "max"
            stat = group / "memory.stat"  # the kernel frees cache before it runs out
            cache = _read_field(stat, "total_inactive_file") or _read_field(stat, "inactive_file")
            limits.append(max(0, int(limit[0]) - int(used[0]) + cache))
    return float(min(limits))


def reset_peak_memory() -> None:
    """Return freed memory to the system, and reset `peak_memory` to the current usage."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps it otherwise
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", "ascii")


def peak_memory() -> int | None:
    """Peak resident memory of this process in bytes since `reset_peak_memory`; None if the system
    does not report it."""
    return _read_field(Path("/proc/self/status"), "VmHWM:") * 1024 or None


def _available_memory(root: Path) -> float:
    available = _read_field(root / "proc/meminfo", "MemAvailable:")
    if available:
        return available * 1024.0
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):  # not on macOS or Windows
        return 4e9


def _control_groups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the control groups (v1 or v2) of this process, from its own up to the root. In a
    container its own path may not exist; the limits are then at the root."""
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        top = root / "sys/fs/cgroup"
        if hierarchy != "0":
            if controller not in controllers.split(","):
                continue
            top /= controller
        deepest = top / path.lstrip("/")
        yield from (group for group in (deepest, *deepest.parents) if group.is_relative_to(top))


def _read_text(path: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text("utf-8")
    return ""


def _words(path: Path) -> list[str]:
    return _read_text(path).split()


def _read_field(path: Path, name: str) -> int:
    """The number after `name` at the start of a line; 0 if it is missing."""
    match = re.search(rf"^{name}\s+(\d+)", _read_text(path), re.MULTILINE)
    return int(match[1]) if match else 0

"""What a process may use: the machine's, less what its container and its affinity keep from it.
Standard library only."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path


def cpu_cores(root: Path = Path("/")) -> int:
    """Processors that this process may use, at least 1; of a container's quota a part counts as a
    whole one. `root` is where /proc and /sys are."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    for folder in _control_groups("cpu", root):
        quota = _words(folder / "cpu.max")  # version 2: "150000 100000", or "max 100000"
        quota = quota or _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        if len(quota) == 2 and quota[0].isdecimal() and int(quota[1]):
            cores = min(cores, -(-int(quota[0]) // int(quota[1])))
    return max(cores, 1)


def free_memory(root: Path = Path("/")) -> float:
    """Bytes that this process can still have: of the machine, or less where its container may."""
    rooms = [_machine_memory(root)]
    for folder in _control_groups("memory", root):
        limit = _words(folder / "memory.max") or _words(folder / "memory.limit_in_bytes")
        used = _words(folder / "memory.current") or _words(folder / "memory.usage_in_bytes")
        if limit and used and limit[0].isdecimal():  # not "max"
            stat = folder / "memory.stat"  # the kernel drops cache before it refuses memory
            cache = _field(stat, "total_inactive_file") or _field(stat, "inactive_file")
            rooms.append(max(0, int(limit[0]) - int(used[0]) + cache))
    return float(min(rooms))


def _machine_memory(root: Path) -> float:
    available = _field(root / "proc/meminfo", "MemAvailable:")
    if available:
        return available * 1024.0
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):  # not on macOS or Windows
        return 4e9


def _control_groups(controller: str, root: Path) -> Iterator[Path]:
    """The folders whose limits hold for this process: its control group (version 1 or 2) and those
    above it. In a container its path may not be there, but the limits are at the top."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        top = root / "sys/fs/cgroup"
        if number != "0":
            if controller not in controllers.split(","):
                continue
            top /= controller
        below = top / path.lstrip("/")
        yield from (folder for folder in (below, *below.parents) if folder.is_relative_to(top))


def _text(path: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text("utf-8")
    return ""


def _words(path: Path) -> list[str]:
    return _text(path).split()


def _field(path: Path, name: str) -> int:
    """The number behind a name, at the beginning of a line; 0 where it is not."""
    found = re.search(rf"^{name}\s+(\d+)", _text(path), re.MULTILINE)
    return int(found[1]) if found else 0

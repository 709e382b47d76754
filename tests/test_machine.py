"""Limits of containers, read from a fake /proc and /sys."""

import os
from pathlib import Path

import pytest

from vitcli import machine

GB = 1 << 30
MEMINFO = f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable:   {48 << 20} kB\n"


def write_files(root: Path, files: dict[str, object]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def test_cgroup_v2_parent_limit_and_page_cache(tmp_path):
    root = write_files(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/job/step",
            "sys/fs/cgroup/job/memory.max": 4 * GB,
            "sys/fs/cgroup/job/memory.current": 3 * GB,
            "sys/fs/cgroup/job/memory.stat": f"anon {GB}\ninactive_file {GB}\nactive_file 5",
            "sys/fs/cgroup/job/step/memory.max": "max",
            "sys/fs/cgroup/job/step/memory.current": 3 * GB,
        },
    )
    assert machine.free_memory(root) == 2 * GB


def test_cgroup_v1_limits_in_container(tmp_path):
    root = write_files(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n1:name=x:/",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 8 * GB,
            "sys/fs/cgroup/memory/memory.usage_in_bytes": 5 * GB,
            "sys/fs/cgroup/memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {GB}",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": 100000,
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": 100000,
        },
    )
    assert machine.free_memory(root) == pytest.approx(4 * GB, rel=1e-6)
    assert machine.cpu_cores(root) == 1


def test_no_limits_uses_whole_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 4}, raising=False)
    assert machine.cpu_cores(tmp_path) == 3
    assert machine.free_memory(tmp_path) > 0  # no /proc at all
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 9"}
    root = write_files(tmp_path, files)
    assert machine.free_memory(root) == 48 * GB and machine.cpu_cores(root) == 3


@pytest.mark.parametrize(("quota", "cores"), [("150000 100000", 2), ("10000 100000", 1)])
def test_cpu_quota_is_rounded_up(tmp_path, monkeypatch, quota, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    root = write_files(tmp_path, {"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": quota})
    assert machine.cpu_cores(root) == cores

"""What a container may use, by the control groups that it is in, and how its memory is cut."""

import os
import platform
from pathlib import Path

import pytest

from manyranks import linux

GIB = 1 << 30
# The machine has so much, if no control group limits it.
MACHINE_GIB = 100
MACHINE_CORES = 8
VERSION_2 = {"memory.max": "max", "memory.current": GIB, "memory.stat": "anon 7\ninactive_file 0"}
# The limits stand above the own group, as systemd sets them for a user.
OF_A_USER = {
    "user.slice/memory.max": 2 * GIB,
    "user.slice/memory.current": GIB,
    "user.slice/memory.stat": "anon 7\ninactive_file 0",
    "user.slice/cpu.max": "200000 100000",
    "user.slice/session.scope/memory.max": "max",
}
VERSION_1 = {
    "memory/hub/memory.limit_in_bytes": 3 * GIB,
    "memory/hub/memory.usage_in_bytes": 2 * GIB,
    "memory/hub/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}",
    "memory/memory.limit_in_bytes": 9223372036854771712,
    "memory/memory.usage_in_bytes": 2 * GIB,
}


@pytest.mark.parametrize(
    "own, files, gib, cores",
    [
        ("0::/", VERSION_2, 100, 8),
        ("0::/", {**VERSION_2, "memory.max": 4 * GIB, "cpu.max": "50000 100000"}, 3, 0.5),
        ("0::/", {"cpu.max": "max 100000"}, 100, 8),
        ("0::/user.slice/session.scope", OF_A_USER, 1, 2),
        ("0::/unseen/by/this/container", {**VERSION_2, "memory.max": 4 * GIB}, 3, 8),
        ("3:cpuset:/\n4:memory:/hub\n0::/", VERSION_1, 2, 8),
        (
            "5:cpu,cpuacct:/hub",
            {"cpu/hub/cpu.cfs_quota_us": 150000, "cpu/hub/cpu.cfs_period_us": 100000},
            100,
            1.5,
        ),
        ("5:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": -1, "cpu/cpu.cfs_period_us": 100000}, 100, 8),
    ],
)
def test_what_a_container_may_use(tmp_path, monkeypatch, own, files, gib, cores):
    for name, value in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{value}\n")
    (tmp_path / "own").write_text(own + "\n")
    monkeypatch.setattr(linux, "CGROUPS", tmp_path)
    monkeypatch.setattr(linux, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(linux, "available_memory", lambda: MACHINE_GIB * GIB)
    monkeypatch.setattr(linux.os, "sched_getaffinity", lambda pid: range(MACHINE_CORES))
    assert linux.free_memory() == gib * GIB
    assert linux.processor_share() == cores
    assert linux.usable_cores() == max(1, int(cores))


def test_without_proc_the_machine_is_all_there_is(tmp_path, monkeypatch):
    monkeypatch.setattr(linux, "OWN_CGROUPS", tmp_path / "missing")
    assert linux.cgroup_folders("memory") == []
    assert linux.free_memory() == pytest.approx(linux.available_memory(), 0.1)


def huge_kib(process):
    """Return how much of a process's memory stands in huge pages."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))


NEW_ENOUGH = tuple(map(int, platform.release().split(".")[:2])) >= (6, 1)
HAS_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage").exists()


@pytest.mark.skipif(not (NEW_ENOUGH and HAS_HUGE_PAGES), reason="needs Linux 6.1")
def test_memory_moves_into_huge_pages():
    parts = [bytearray(b"x" * 1000) for _ in range(100_000)]
    before = huge_kib(os.getpid())
    linux.use_huge_pages()
    assert huge_kib(os.getpid()) - before > 20_000
    assert all(part == b"x" * 1000 for part in parts)

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from lightning_elixir.core.host import available_host_bytes

GIB = 2**30


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 32 GiB, 20 of them available."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=32 * GIB, available=20 * GIB))


def write(root: Path, files: dict[str, object]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


def test_without_control_groups_what_the_system_has(tmp_path: Path) -> None:
    assert available_host_bytes(tmp_path) == 20 * GIB


def test_v2_limit_less_usage_without_reclaimable_cache(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job/step",
            "sys/fs/cgroup/job/step/memory.max": 10 * GIB,
            "sys/fs/cgroup/job/step/memory.current": 6 * GIB,
            "sys/fs/cgroup/job/step/memory.stat": f"anon {4 * GIB}\ninactive_file {2 * GIB}",
        },
    )
    assert available_host_bytes(tmp_path) == 6 * GIB


def test_v2_the_tightest_ancestor_counts(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job/step",
            "sys/fs/cgroup/job/step/memory.max": "max",
            "sys/fs/cgroup/job/step/memory.current": GIB,
            "sys/fs/cgroup/job/memory.max": 5 * GIB,
            "sys/fs/cgroup/job/memory.current": 2 * GIB,
        },
    )
    assert available_host_bytes(tmp_path) == 3 * GIB


def test_v2_inside_a_container_the_path_may_not_be_mounted(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/../../kubepods/pod7",
            "sys/fs/cgroup/memory.max": 8 * GIB,
            "sys/fs/cgroup/memory.current": GIB,
        },
    )
    assert available_host_bytes(tmp_path) == 7 * GIB


def test_v1(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "5:devices:/x\n4:cpu,memory:/job\n0::/",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": 12 * GIB,
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": 3 * GIB,
            "sys/fs/cgroup/memory/job/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,  # none
            "sys/fs/cgroup/memory/memory.usage_in_bytes": 30 * GIB,
        },
    )
    assert available_host_bytes(tmp_path) == 10 * GIB


def test_v2_beside_v1(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job",
            "sys/fs/cgroup/unified/job/memory.max": 4 * GIB,
            "sys/fs/cgroup/unified/job/memory.current": GIB,
        },
    )
    assert available_host_bytes(tmp_path) == 3 * GIB


def test_the_system_counts_where_it_has_less_than_the_group_may_take(tmp_path: Path) -> None:
    files: dict[str, object] = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": 31 * GIB}
    write(tmp_path, {**files, "sys/fs/cgroup/memory.current": GIB})
    assert available_host_bytes(tmp_path) == 20 * GIB


@pytest.mark.parametrize(
    "device",
    ["sys/bus/virtio/drivers/virtio_mem/virtio4/vendor", "sys/bus/virtio/drivers/virtio_balloon/virtio0/vendor"],
)
def test_memory_that_grows_on_demand_is_sized_by_the_group(tmp_path: Path, device: str) -> None:
    files: dict[str, object] = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": 128 * GIB}
    write(tmp_path, {**files, "sys/fs/cgroup/memory.current": 3 * GIB, device: "0x1af4"})
    assert available_host_bytes(tmp_path) == (128 - 2 - 3) * GIB  # the kernel has two for its table of pages


def test_a_group_larger_than_a_machine_that_cannot_grow_adds_nothing(tmp_path: Path) -> None:
    """Virtual or not, and with the drivers alone."""
    files: dict[str, object] = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": 128 * GIB}
    write(tmp_path, {**files, "sys/fs/cgroup/memory.current": 3 * GIB, "proc/cpuinfo": "flags\t\t: hypervisor"})
    write(tmp_path, {"sys/bus/virtio/drivers/virtio_mem/bind": ""})
    assert available_host_bytes(tmp_path) == 20 * GIB


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    files: dict[str, object] = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": GIB}
    write(tmp_path, {**files, "sys/fs/cgroup/memory.current": 2 * GIB})
    assert available_host_bytes(tmp_path) == 0


def test_this_machine() -> None:
    assert available_host_bytes() > 0

"""Figures of a CUDA device: sane in order and size. How fast it is, no test says."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lightning_elixir.core.comm import SoloComm
from lightning_elixir.core.device import make_device
from lightning_elixir.plan.hardware import BandwidthCurve, HardwareSpec
from lightning_elixir.profiling.measured_hardware import profile_hardware
from lightning_elixir.profiling.rates import Workbench
from lightning_elixir.profiling.stopwatch import Stopwatch
from tests.helpers.dist import run_ranks

pytestmark = pytest.mark.gpu

MIB = 2**20


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> HardwareSpec:
    """The fastest of three measurements at computing: tests beside this one use the same GPU and slow one of them."""
    specs = [profile_hardware(cache_dir=tmp_path_factory.mktemp("cache"), budget_s=3.0) for _ in range(3)]
    return max(specs, key=lambda spec: spec.matmul_flops_per_s["bfloat16"])


def test_copies_of_all_sizes_are_measured(spec: HardwareSpec) -> None:
    for curve in (spec.h2d, spec.d2h):
        check_points(curve)


def check_points(curve: BandwidthCurve) -> None:
    """Sizes that grow, in times that do not shrink: where others use the device as well, a small transfer may take as
    long as a large one."""
    sizes, seconds = zip(*curve.points, strict=True)
    assert len(sizes) > 1
    assert list(sizes) == sorted(set(sizes))
    assert list(seconds) == sorted(seconds)
    assert 0 < seconds[0] <= seconds[-1] < 10


def test_all_of_it_is_measured(spec: HardwareSpec) -> None:
    """Nothing is compared: on a device that others use as well any of these may be slower than another."""
    rates = [spec.gpu_adam_numel_per_s, spec.streamed_adam_numel_per_s, spec.cpu_adam_numel_per_s]
    rates += [spec.device_bytes_per_s, spec.h2d.bytes_per_s(64 * MIB), spec.d2h.bytes_per_s(64 * MIB)]
    assert spec.host_bytes_per_s is not None
    assert all(0 < rate < math.inf for rate in (*rates, spec.host_bytes_per_s, *spec.matmul_flops_per_s.values()))
    assert spec.matmul_flops_per_s.keys() >= {"bfloat16", "float16", "float32"}
    assert 0 < spec.launch_s < 1


def test_memory_of_the_device(spec: HardwareSpec) -> None:
    assert spec.gpu_bytes is not None
    assert spec.gpu_total_bytes == torch.cuda.get_device_properties(0).total_memory
    assert 0 < spec.gpu_bytes <= spec.gpu_total_bytes
    assert torch.cuda.get_device_name(0) in spec.name


def test_host_memory_is_page_locked() -> None:
    device = make_device()
    bench = Workbench(device, SoloComm(), Stopwatch(device, SoloComm(), 0.01), 4 * MIB, 1)
    assert bench._host.is_pinned()


@pytest.mark.parametrize(
    ("chosen", "grows"),
    [("", True), ("max_split_size_mb:512", True), ("expandable_segments:False", False)],
)
def test_device_memory_comes_in_segments_that_grow_unless_the_user_has_chosen(chosen: str, grows: bool) -> None:
    program = """
import torch
from lightning_elixir.core.device import make_device
device = make_device("cuda")
held = [torch.empty(2**22, device="cuda"), torch.empty(0, device="cuda")]
device.allocate(held[1].untyped_storage(), 2**24)
print(*{segment["is_expandable"] for segment in torch.cuda.memory_snapshot()})
"""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | ({"PYTORCH_CUDA_ALLOC_CONF": chosen} if chosen else {}),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(grows)]


def test_leaves_no_memory_behind(spec: HardwareSpec, tmp_path: Path) -> None:
    process = psutil.Process(os.getpid())

    def held() -> tuple[int, int, int]:
        gc.collect()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), process.memory_info().rss

    before = held()  # the fixture has run once: libraries are loaded
    profile_hardware(cache_dir=tmp_path, refresh=True, budget_s=1.0)
    after = held()
    assert after[0] == before[0]
    assert after[1] <= before[1]
    assert after[2] - before[2] < 128 * MIB  # page-locked memory was 512 MiB


def profile_rank(folder: str) -> dict[str, Any]:
    device = torch.device("cuda", torch.cuda.current_device())
    return profile_hardware(device=device, local_world_size=2, cache_dir=folder, budget_s=3.0).to_dict()


@pytest.mark.several_gpus(2)
def test_two_ranks_agree(tmp_path: Path) -> None:
    one, other = run_ranks(profile_rank, 2, str(tmp_path), device="cuda")
    assert one == other
    found = HardwareSpec.from_dict(one)
    for curve in (found.all_gather, found.reduce_scatter):
        assert curve is not None
        check_points(curve)

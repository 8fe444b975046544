from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from lightning_elixir.errors import PlanError
from lightning_elixir.plan.hardware import BandwidthCurve, HardwareSpec, hardware_table, load_hardware, save_hardware


def full() -> HardwareSpec:
    """Every entry set."""
    return replace(
        HardwareSpec.nominal(2**34, 2**36),
        h2d=BandwidthCurve(((2**20, 1e-4), (2**24, 5e-4), (2**28, 6e-3))),
        nvme_read_bytes_per_s=3e9,
        nvme_write_bytes_per_s=2e9,
        nvme_bytes=10**12,
        world_size=4,
        versions={"torch": "2.13"},
        gpu_total_bytes=2**35,
        computing_slowdown=1.35,
        collective_slowdown=1.7,
    )


# Curves


def test_a_constant_curve_is_latency_and_bandwidth() -> None:
    curve = BandwidthCurve.constant(10e9, 20e-6)
    for nbytes in (1, 1000, 2**20, 10**7, 2**30, 10**11):
        assert curve.seconds(nbytes) == pytest.approx(20e-6 + nbytes / 10e9)
        assert curve.bytes_per_s(nbytes) == pytest.approx(nbytes / (20e-6 + nbytes / 10e9))
    assert curve.seconds(0) == 0.0


def test_a_curve_is_linear_between_its_points() -> None:
    curve = BandwidthCurve(((1000, 1.0), (2000, 3.0), (4000, 4.0)))
    wanted = {1: 1.0, 999: 1.0, 1000: 1.0, 1500: 2.0, 2000: 3.0, 3000: 3.5, 4000: 4.0, 6000: 5.0}
    assert {n: curve.seconds(n) for n in wanted} == pytest.approx(wanted)


def test_a_curve_of_one_point_is_one_bandwidth_above_it() -> None:
    curve = BandwidthCurve(((1000, 2.0),))
    assert [curve.seconds(n) for n in (10, 1000, 3000)] == pytest.approx([2.0, 2.0, 6.0])


def test_a_curve_that_falls_at_its_end_does_not_fall_below_it() -> None:
    curve = BandwidthCurve(((1000, 2.0), (2000, 2.0)))
    assert curve.seconds(4000) == pytest.approx(4.0)


def test_larger_transfers_take_longer() -> None:
    random = Random(71)
    for _ in range(50):
        sizes = sorted(random.sample(range(1, 10**9), 4))
        times = sorted(random.random() + 1e-6 for _ in sizes)
        curve = BandwidthCurve(tuple(zip(sizes, times, strict=True)))
        seconds = [curve.seconds(n) for n in sorted(random.sample(range(1, 2 * 10**9), 30))]
        assert seconds == sorted(seconds)


@pytest.mark.parametrize(
    "points",
    [(), ((0, 1.0),), ((10, 0.0),), ((10, -1.0),), ((10, 1.0), (10, 2.0)), ((20, 1.0), (10, 2.0)), ((10, math.nan),)],
)
def test_refused_curves(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(PlanError, match="a curve needs ascending sizes and positive times"):
        BandwidthCurve(points)


# Updates as seen in training


def test_a_slower_host_leaves_more_to_the_stream() -> None:
    machine = replace(HardwareSpec.nominal(), host_bytes_per_s=100e9)  # 1 on the host, 1.5 streamed, 2 together
    slow = machine.with_host_slower(1.25)
    rates = slow.cpu_adam_numel_per_s, slow.joint_adam_numel_per_s, slow.streamed_adam_numel_per_s
    assert rates == pytest.approx((0.8e9, 2e9, 1.5e9))
    assert slow.host_bytes_per_s == pytest.approx(80e9)
    assert machine.streamed_beside(1e9) == pytest.approx(1e9)
    assert slow.streamed_beside(slow.cpu_adam_numel_per_s) == pytest.approx(1.2e9)
    assert slow.name == machine.name + ", the host's updates as seen in training" == slow.with_host_slower(1.1).name


@pytest.mark.parametrize(("host_bytes_per_s", "slowdown"), [(None, 1.0), (60e9, 1.0), (42.4e9, 1.25), (20e9, 53 / 28)])
def test_copies_and_updates_share_the_hosts_memory(host_bytes_per_s: float | None, slowdown: float) -> None:
    """Updates ask for 28 GB/s, or are measured to get them, and a copy for 25."""
    machine = replace(HardwareSpec.nominal(), h2d=BandwidthCurve.constant(25e9), host_bytes_per_s=host_bytes_per_s)
    assert machine.copies_beside_updates == pytest.approx(slowdown)


def test_a_faster_host_takes_nothing_from_the_stream() -> None:
    fast = HardwareSpec.nominal().with_host_slower(0.5)
    assert (fast.cpu_adam_numel_per_s, fast.joint_adam_numel_per_s) == pytest.approx((2e9, 4e9))
    assert fast.streamed_beside(fast.cpu_adam_numel_per_s) == HardwareSpec.nominal().streamed_adam_numel_per_s


@pytest.mark.parametrize(("num_ranks", "num_nodes", "of_memory"), [(1, 1, 0.5), (2, 2, 0.5), (2, 1, 1.0), (4, 2, 1.0)])
def test_updates_of_several_ranks_are_faster_in_turns_and_their_memory_is_not(
    num_ranks: int, num_nodes: int, of_memory: float
) -> None:
    machine = replace(HardwareSpec.nominal(), host_bytes_per_s=100e9, world_size=num_ranks, num_nodes=num_nodes)
    fast, slow = machine.with_host_slower(0.5), machine.with_host_slower(2.0)
    assert fast.cpu_adam_numel_per_s == pytest.approx(2e9)
    assert fast.host_bytes_per_s == pytest.approx(100e9 / of_memory)
    assert fast.joint_adam_numel_per_s == pytest.approx(2e9 / of_memory)
    assert (slow.cpu_adam_numel_per_s, slow.host_bytes_per_s) == pytest.approx((0.5e9, 50e9))


# The whole profile


@pytest.mark.parametrize("spec", [full(), HardwareSpec.nominal(), replace(full(), device_bytes_per_s=math.inf)])
def test_a_profile_survives_the_round_trip(spec: HardwareSpec, tmp_path: Path) -> None:
    assert HardwareSpec.from_dict(spec.to_dict()) == spec
    assert HardwareSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    save_hardware(spec, tmp_path / "machine.json")
    assert load_hardware(tmp_path / "machine.json") == spec


def test_what_was_kept_before_collectives_were_seen_beside_computing_says_nothing_of_it() -> None:
    content = full().to_dict()
    del content["computing_slowdown"], content["collective_slowdown"]
    spec = HardwareSpec.from_dict(content)
    assert (spec.computing_slowdown, spec.collective_slowdown, spec.slowdowns) == (1.0, 1.0, None)
    assert full().slowdowns == (1.35, 1.7)
    told = ("computing and collectives, beside each other", "1.35 and 1.70 times as long")
    assert told in hardware_table(full())
    assert told[0] not in dict(hardware_table(spec))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"schema": 99}, "not a hardware profile of schema"),
        ({"gpus": 3}, "unknown entries: gpus"),
        ({"h2d": {"points": [[2, 1.0], [1, 2.0]]}}, "ascending sizes"),
        ({"h2d": {"points": "fast"}}, "cannot be read"),
        ({"h2d": {}}, "cannot be read"),
        ({"h2d": None}, "h2d"),
        ({"gpu_bytes": "3"}, "gpu_bytes must be"),
        ({"host_bytes": -1}, "host_bytes must be"),
        ({"host_bytes": None}, "host_bytes must be"),
        ({"duplex_slowdown": 0.5}, "duplex_slowdown must be"),
        ({"computing_slowdown": 0.9}, "computing_slowdown must be"),
        ({"collective_slowdown": None}, "collective_slowdown must be"),
        ({"cpu_adam_numel_per_s": 0}, "cpu_adam_numel_per_s must be"),
        ({"gpu_adam_numel_per_s": -1.0}, "gpu_adam_numel_per_s must be"),
        ({"streamed_adam_numel_per_s": "quick"}, "streamed_adam_numel_per_s must be"),
        ({"joint_adam_numel_per_s": math.nan}, "joint_adam_numel_per_s must be"),
        ({"host_bytes_per_s": 0}, "host_bytes_per_s must be"),
        ({"device_bytes_per_s": True}, "device_bytes_per_s must be"),
        ({"launch_s": -1e-6}, "launch_s must be"),
        ({"matmul_flops_per_s": {"float32": 0}}, "matmul_flops_per_s"),
        ({"matmul_flops_per_s": [1]}, "matmul_flops_per_s must be"),
        ({"nvme_read_bytes_per_s": 0}, "nvme_read_bytes_per_s must be"),
        ({"world_size": 0}, "world_size must be"),
        ({"name": 3}, "name must be"),
    ],
)
def test_refused_profiles(edit: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        HardwareSpec.from_dict({**full().to_dict(), **edit})


@pytest.mark.parametrize("key", ["name", "host_bytes", "h2d", "cpu_adam_numel_per_s"])
def test_a_profile_with_an_entry_missing(key: str) -> None:
    content = full().to_dict()
    del content[key]
    with pytest.raises(PlanError, match=key):
        HardwareSpec.from_dict(content)


@pytest.mark.parametrize("content", [None, [], "machine", 3, {}])
def test_what_is_no_profile_at_all(content: object) -> None:
    with pytest.raises(PlanError, match="not a hardware profile"):
        HardwareSpec.from_dict(content)


def test_errors_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"cannot read the hardware profile .*missing\.json"):
        load_hardware(tmp_path / "missing.json")
    path = tmp_path / "machine.json"
    for text, message in (
        ("{", r" is no hardware profile: it is not JSON \(Expecting.*`lightning-elixir bench-hardware --out"),
        ("", " is no hardware profile: it is empty"),
        ("[]", ": not a hardware profile"),
    ):
        path.write_text(text)
        with pytest.raises(PlanError, match=rf"machine\.json{message}"):
            load_hardware(path)


def test_adam_through_nvme() -> None:
    spec = replace(full(), cpu_adam_numel_per_s=1e12)
    assert spec.nvme_adam_numel_per_s == pytest.approx(1 / (12 / 3e9 + 12 / 2e9))
    assert replace(spec, cpu_adam_numel_per_s=1e6).nvme_adam_numel_per_s == 1e6
    assert replace(spec, nvme_write_bytes_per_s=None).nvme_adam_numel_per_s is None


def test_the_table_names_what_was_measured() -> None:
    rows = dict(hardware_table(full()))
    assert rows["device memory"] == "16.0 GiB of 32.0 GiB"
    assert rows["NVMe read"] == "3 GB/s"
    assert rows["host to device"].startswith("10.5 GB/s at 1 MiB, ")
    bare = dict(hardware_table(replace(full(), nvme_read_bytes_per_s=None, nvme_bytes=None, all_gather=None)))
    assert not {"NVMe read", "NVMe free space", "all-gather of a chunk"} & set(bare)

"""The simulated step against forms that can be written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from lightning_elixir.plan.hardware import BandwidthCurve, HardwareSpec
from lightning_elixir.plan.memory import NVME_BUFFERS, Scheme
from lightning_elixir.plan.profile import StepInterval, StepProfile
from lightning_elixir.plan.regime import TrainingRegime
from lightning_elixir.plan.simulator.cost import Costs
from lightning_elixir.plan.simulator.counters import simulate
from lightning_elixir.plan.simulator.timeline import (
    Timeline,
    compressed,
    plan_use,
    scheme_of,
    simulate_step,
)
from lightning_elixir.plan.types import ALIGN_NUMEL, AccessTrace, Acquire, IgnoredParam, Plan, Tier, UpdateTiming
from tests.plan.problems import KEPT, MIXED, OFFLOADED, RESIDENT, SHARDED
from tests.plan.steps import NUMEL, RATE, TRANSFER_S, chunks_at, machine, random_problem, there, there_and_back
from tests.plan.traces import BLOCK_BYTES, make_plan_of, random_trace, unpinned


def run(
    plan: Plan, profile: StepProfile, hardware: HardwareSpec, *, is_detailed: bool = False, accumulates: bool = False
) -> Timeline:
    scheme = scheme_of(plan, replace(MIXED, accumulates=accumulates))
    return simulate_step(plan, profile, hardware, scheme, is_detailed=is_detailed)


# Closed forms


def test_everything_resident_is_computing_and_the_update() -> None:
    plan = make_plan_of(chunks_at(RESIDENT, 5), 0)
    times = run(plan, there_and_back(5, 2e-3), machine()).times
    assert times.total_s == pytest.approx(10 * 2e-3 + 5 * 1e-4)
    assert (times.step_s, times.adam_s) == pytest.approx((5 * 1e-4, 5 * 1e-4))
    assert times.waiting_s == pytest.approx(0.0, abs=1e-15)  # sums of floats: Python 3.12 rounds them otherwise
    assert (times.h2d_s, times.d2h_s, times.collective_s) == (0, 0, 0)


def test_casts_of_replicas_take_from_computing_and_use_no_bus() -> None:
    chunks = [replace(chunk, dtype="bfloat16") for chunk in chunks_at(SHARDED, 3)]
    hardware = replace(machine(), device_bytes_per_s=NUMEL * (4 + 2) / 1e-3)
    plan, profile = make_plan_of(chunks, 1), there_and_back(3, 2e-3)
    timeline = run(plan, profile, hardware, is_detailed=True)
    fetches = simulate(plan, profile.trace).counters.fetches
    assert timeline.times.total_s == pytest.approx(6 * 2e-3 + fetches * 1e-3 + 3 * 1e-4)
    assert {s.lane for s in timeline.spans} == {"compute"}
    casts = [s.end_s - s.start_s for s in timeline.spans if s.label.startswith("cast")]
    assert casts == pytest.approx([1e-3] * fetches)


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_without_computing_a_step_is_its_transfers(blocks: int) -> None:
    plan = make_plan_of(chunks_at(OFFLOADED, 6, requires_grad=False), blocks)
    profile = StepProfile(unpinned(*range(6), *reversed(range(6))), (StepInterval(0.0, 0),) * 13)
    times = run(plan, profile, machine()).times
    moved = simulate(plan, profile.trace, iterations=2).h2d_bytes - simulate(plan, profile.trace).h2d_bytes
    assert times.h2d_s == pytest.approx(moved / RATE)
    assert times.total_s == pytest.approx(times.h2d_s)
    assert times.waiting_s == pytest.approx(times.total_s)


@pytest.mark.parametrize(("depth", "blocks"), [(1, 2), (2, 3), (3, 6)])
@pytest.mark.parametrize("compute_s", [2.5e-4, 1e-3, 3e-3])
def test_prefetching_hides_the_shorter_of_computing_and_fetching(depth: int, blocks: int, compute_s: float) -> None:
    plan = make_plan_of(chunks_at(OFFLOADED, 8), blocks, depth)
    timeline = run(plan, there(8, compute_s), machine())
    expected = TRANSFER_S + 7 * max(TRANSFER_S, compute_s) + compute_s  # the first fetch and the last chunk stand alone
    assert timeline.backward_end_s == pytest.approx(expected)


def test_without_prefetching_nothing_is_hidden() -> None:
    plan = make_plan_of(chunks_at(OFFLOADED, 8), 2)
    assert run(plan, there(8, 3e-3), machine()).backward_end_s == pytest.approx(8 * (TRANSFER_S + 3e-3))


def test_gradients_go_down_while_the_next_chunk_computes() -> None:
    """Parameters stay; each gradient needs a millisecond, each chunk computes for two."""
    plan = make_plan_of(chunks_at(KEPT, 4), 0)
    times = run(plan, there_and_back(4, 2e-3), machine()).times
    assert times.d2h_s == pytest.approx(4e-3)
    assert times.waiting_s == pytest.approx(1e-3)  # the last
    # The host updates one after the other; each value goes up while the next is being updated.
    assert times.step_s == pytest.approx(4 * 4e-3 + 1e-3)
    assert times.h2d_s == pytest.approx(4e-3)


def test_two_gradient_blocks_and_no_more() -> None:
    """Each gradient needs 5 ms, each chunk computes for 1; the third chunk needs the first one's block."""
    hardware = machine(d2h=BLOCK_BYTES / 5e-3)
    profile = there_and_back(4, 1e-3)
    last = replace(profile.intervals[-1], grads=())
    # Chunk 0 is frozen and computes for long at the end, when gradients could go down beside it.
    profile = replace(profile, intervals=(*profile.intervals[:-1], replace(last, compute_s=20e-3)))
    frozen = chunks_at(RESIDENT, 1, requires_grad=False)
    timeline = run(make_plan_of(frozen + chunks_at(KEPT, 4)[1:], 0), profile, hardware, is_detailed=True)
    waits = [s for s in timeline.spans if s.label == "wait for a gradient block"]
    # Complete at 5, 6 ms and (after waiting for 10) at 11; their reductions end at 10, 15, 20 ms.
    assert [(s.start_s, s.end_s) for s in waits] == [pytest.approx((6e-3, 10e-3)), pytest.approx((11e-3, 15e-3))]
    assert timeline.backward_end_s == pytest.approx(15e-3 + 20e-3)
    assert timeline.times.waiting_s == pytest.approx(8e-3)


def test_the_step_waits_for_the_last_gradient() -> None:
    timeline = run(make_plan_of(chunks_at(KEPT, 1), 0), there_and_back(1, 1e-3), machine(), is_detailed=True)
    assert timeline.backward_end_s == pytest.approx(3e-3)
    assert [s.label for s in timeline.spans if s.lane == "compute" and s.label.startswith("wait")] == [
        "wait for gradients"
    ]


def test_host_stream_and_gpu_update_side_by_side() -> None:
    sites = [RESIDENT, OFFLOADED, OFFLOADED, OFFLOADED._replace(is_update_streamed=True)]
    chunks = [replace(chunks_at(s, 4)[i], id=i) for i, s in enumerate(sites)]
    plan = make_plan_of(chunks, 4)
    times = run(plan, there_and_back(4), machine()).times
    assert times.step_s == pytest.approx(8e-3)  # two on the host; the stream takes 2, the GPU 0.1
    assert times.adam_s == pytest.approx(8e-3 + 2e-3 + 1e-4)
    only_streamed = make_plan_of(chunks_at(sites[3], 4), 4)
    assert run(only_streamed, there_and_back(4), machine()).times.step_s == pytest.approx(4 * 2e-3)


@pytest.mark.parametrize(
    ("beside", "num_streamed", "streamed_s"),
    [
        (1 / 8e-3, 1, 4e-3 + 1e-3),  # half of it while the host updates, the rest at 2 ms each
        (1 / 8e-3, 5, 4e-3 + 9e-3),
        (1 / 4e-3, 1, 4e-3),  # all of it while the host updates
        (1 / 2e-3, 1, 2e-3),  # they don't disturb each other
        (0.0, 1, 4e-3 + 1.6e-3),  # a tenth of its rate is left to it
    ],
)
def test_the_host_comes_first_in_its_memory(beside: float, num_streamed: int, streamed_s: float) -> None:
    """It takes 4 ms alone, and so it does beside the stream, which takes 2 ms alone and gets what both reach less what
    the host does."""
    sites = [OFFLOADED, *[OFFLOADED._replace(is_update_streamed=True)] * num_streamed]
    plan = make_plan_of([replace(chunks_at(s, len(sites))[i], id=i) for i, s in enumerate(sites)], len(sites))
    joint = machine(joint_adam_numel_per_s=NUMEL * (1 / 4e-3 + beside))
    times = run(plan, there_and_back(len(sites)), joint).times
    assert (times.step_s, times.adam_s) == pytest.approx((max(4e-3, streamed_s), 4e-3 + streamed_s))
    alone = make_plan_of(chunks_at(OFFLOADED, 2), 2)
    assert run(alone, there_and_back(2), joint).times.step_s == pytest.approx(8e-3)  # nobody to share with


@pytest.mark.parametrize(("num_streamed", "step_s"), [(2, 9e-3), (6, 14e-3)])
def test_new_values_and_the_stream_share_the_bus(num_streamed: int, step_s: float) -> None:
    """New values are there at 4 and 8 ms and need one; the stream fills the time between."""
    sites = [KEPT, KEPT] + [KEPT._replace(is_update_streamed=True)] * num_streamed
    count = len(sites)
    plan = make_plan_of([replace(chunks_at(s, count)[i], id=i) for i, s in enumerate(sites)], 0)
    times = run(plan, there_and_back(count), machine()).times
    assert times.step_s == pytest.approx(step_s)
    assert times.h2d_s == pytest.approx(2 * TRANSFER_S)


def test_states_on_nvme_are_read_and_written() -> None:
    plan = make_plan_of([replace(c, optim_tier=Tier.NVME) for c in chunks_at(OFFLOADED, 2)], 2)
    nbytes = NUMEL * 8  # two fp32 states
    hardware = machine(nvme_read_bytes_per_s=nbytes / 6e-3, nvme_write_bytes_per_s=nbytes / 7e-3)
    timeline = run(plan, there_and_back(2), hardware, is_detailed=True)
    spans = {s.label: (s.start_s - timeline.backward_end_s, s.end_s - timeline.backward_end_s) for s in timeline.spans}
    # The last write of the step before is not over when this one's updates begin.
    begin_s = spans["read states 0"][0]
    assert spans["read states 0"] == pytest.approx((begin_s, begin_s + 6e-3))
    assert spans["update 0"] == pytest.approx((begin_s + 6e-3, begin_s + 10e-3))
    assert spans["read states 1"] == pytest.approx((begin_s + 6e-3, begin_s + 12e-3))
    assert spans["update 1"] == pytest.approx((begin_s + 12e-3, begin_s + 16e-3))
    assert timeline.times.step_s == pytest.approx(begin_s + 16e-3)
    assert timeline.times.nvme_s == pytest.approx(26e-3)
    assert timeline.times.total_s == pytest.approx(26e-3)  # which is all that the disk does
    assert run(plan, there_and_back(2), machine()).times.step_s == float("inf")


@pytest.mark.parametrize("timing", UpdateTiming)
@pytest.mark.parametrize("num_backwards", [1, 3])
def test_parameters_on_nvme_are_read_for_every_fetch(timing: UpdateTiming, num_backwards: int) -> None:
    chunks = [replace(c, param_tier=Tier.NVME, optim_tier=Tier.NVME) for c in chunks_at(OFFLOADED, 4)]
    plan = replace(make_plan_of(chunks, 1), update_timing=timing)
    each = NUMEL * 4  # bytes of parameters and gradients; there is no master, and there are two states
    hardware = machine(nvme_read_bytes_per_s=each / 1e-3, nvme_write_bytes_per_s=each / 2e-3)
    scheme = scheme_of(plan, replace(MIXED, num_backwards=num_backwards))
    timeline = simulate_step(plan, there_and_back(4), hardware, scheme, is_detailed=True)
    lane = sorted((s for s in timeline.spans if s.lane == "nvme"), key=lambda s: s.start_s)
    assert all(a.end_s <= b.start_s + 1e-12 for a, b in pairwise(lane))
    update_s = 4 * (3 * 1e-3 + 3 * 2e-3)
    land_s = 4 * (2e-3 + (1e-3 if num_backwards > 1 else 0))
    assert timeline.times.nvme_s == pytest.approx(num_backwards * (7 * 1e-3 + land_s) + update_s)  # one chunk stays
    for span in lane:
        if span.label.startswith("read parameters"):
            number = span.label.split()[-1]
            assert any(s.label == f"fetch {number}" and s.start_s >= span.end_s - 1e-12 for s in timeline.spans)


def test_a_fast_disk_costs_the_first_read() -> None:
    """The host's Adam takes 4 ms a chunk."""
    plan = make_plan_of([replace(c, optim_tier=Tier.NVME) for c in chunks_at(OFFLOADED, 5)], 2)
    nbytes = NUMEL * 8
    fast = machine(nvme_read_bytes_per_s=nbytes / 1e-3, nvme_write_bytes_per_s=nbytes / 1e-3)
    assert run(plan, there_and_back(5), fast).times.step_s == pytest.approx(1e-3 + 5 * 4e-3)


@pytest.mark.parametrize("timing", UpdateTiming)
@pytest.mark.parametrize("num_memory", [0, 3])
def test_the_disk_does_one_thing_at_a_time_through_three_buffers(timing: UpdateTiming, num_memory: int) -> None:
    chunks = chunks_at(OFFLOADED, 9)
    chunks = [replace(c, optim_tier=Tier.NVME) if c.id >= num_memory else c for c in chunks]
    plan = replace(make_plan_of(chunks, 3), update_timing=timing)
    nbytes = NUMEL * 8
    random = Random(5)
    for _ in range(10):
        read_s, write_s = random.uniform(1e-3, 9e-3), random.uniform(1e-3, 9e-3)
        hardware = machine(nvme_read_bytes_per_s=nbytes / read_s, nvme_write_bytes_per_s=nbytes / write_s)
        timeline = run(plan, there_and_back(9), hardware, is_detailed=True)
        times = timeline.times
        assert times.total_s >= times.nvme_s * (1 - 1e-3)  # in the steady state nothing is left
        assert times.nvme_s == pytest.approx((9 - num_memory) * (read_s + write_s))
        lane = sorted((s.start_s, s.end_s) for s in timeline.spans if s.lane == "nvme")
        assert all(a[1] <= b[0] + 1e-12 for a, b in pairwise(lane))
        cores = sorted((s.start_s, s.end_s) for s in timeline.spans if s.lane == "cpu")
        assert all(a[1] <= b[0] + 1e-12 for a, b in pairwise(cores))
        at = {s.label: s for s in timeline.spans if s.lane in ("nvme", "cpu") and s.start_s > 0}
        for i in range(num_memory, 9):
            if {f"read states {i}", f"update {i}", f"store states {i}"} <= set(at):
                read, update, write = (at[f"{what} {i}"] for what in ("read states", "update", "store states"))
                if read.start_s < update.start_s < write.start_s:
                    assert read.end_s <= update.start_s + 1e-12
                    assert update.end_s <= write.start_s + 1e-12


@pytest.mark.parametrize("timing", UpdateTiming)
def test_a_disk_without_delay_is_as_memory(timing: UpdateTiming) -> None:
    plan = replace(make_plan_of(chunks_at(OFFLOADED, NVME_BUFFERS), 2), update_timing=timing)
    on_nvme = replace(plan, chunks=tuple(replace(c, optim_tier=Tier.NVME) for c in plan.chunks))
    hardware = machine(nvme_read_bytes_per_s=1e30, nvme_write_bytes_per_s=1e30)
    times, wanted = (run(p, there_and_back(NVME_BUFFERS), hardware).times for p in (on_nvme, plan))
    assert times.total_s == pytest.approx(wanted.total_s)
    assert times.update_waiting_s == pytest.approx(wanted.update_waiting_s)


def test_gradients_of_one_interval_come_one_after_the_other() -> None:
    """A step whose layers checkpointing keeps for their backward is seen as few long intervals: it takes what it takes
    where each gradient has an access of its own."""
    plan = make_plan_of(chunks_at(OFFLOADED, 4), 4)
    hardware = machine(d2h=BLOCK_BYTES / 1.5e-3, cpu_adam_numel_per_s=1e30)
    apart = there_and_back(4, 2e-3)
    *forward, _ = apart.intervals[:6]
    joined = StepInterval(8e-3, 0, (3, 2, 1, 0))
    seen = StepProfile(unpinned(0, 1, 2, 3, 3), (*forward, joined))
    times, wanted = (run(plan, profile, hardware).times for profile in (seen, apart))
    assert times.waiting_s == pytest.approx(wanted.waiting_s)
    assert times.total_s == pytest.approx(wanted.total_s)


def test_gradients_that_come_all_at_once_wait_for_each_other() -> None:
    """As those of compiled code: each goes down for 1.5 ms, beside nothing, and all but two wait for a block."""
    plan = make_plan_of(chunks_at(KEPT, 4), 0)
    hardware = machine(d2h=BLOCK_BYTES / 1.5e-3)

    def waiting_s(*grad_s: float) -> float:
        joined = StepInterval(8e-3, 0, (3, 2, 1, 0), grad_s=grad_s)
        profile = StepProfile(unpinned(0, 1, 2, 3, 3), (*there(4, 2e-3).intervals, joined))
        timeline = run(plan, profile, hardware, is_detailed=True)
        computing_s = sum(s.end_s - s.start_s for s in timeline.spans if s.label.startswith("backward"))
        assert timeline.times.compute_s == pytest.approx(16e-3)
        assert computing_s in (0.0, pytest.approx(8e-3))  # whether it is backward is not said
        return timeline.times.waiting_s

    assert waiting_s(*[8e-3] * 4) == pytest.approx(4 * 1.5e-3)
    assert waiting_s(*[0.0] * 4) == pytest.approx(2 * 1.5e-3)  # the last two go down beside what is left to compute
    assert waiting_s(2e-3, 4e-3, 6e-3, 8e-3) == pytest.approx(1.5e-3) == waiting_s()


def test_both_directions_at_once_take_longer() -> None:
    """Chunk 1's gradient goes down for 3 ms, beside the fetch of chunk 0."""
    chunks = [*chunks_at(OFFLOADED, 1), *chunks_at(KEPT, 2)[1:]]
    profile = StepProfile(unpinned(1, 0), (StepInterval(0.0, 0), StepInterval(1e-3, 0, (1,)), StepInterval(1e-3, 0)))
    for slowdown in (1.0, 1.5):
        hardware = machine(d2h=BLOCK_BYTES / 3e-3, duplex_slowdown=slowdown)
        times = run(make_plan_of(chunks, 1), profile, hardware).times
        # 0 is fetched from 1 ms on, when 1 has computed; the download under way costs it half again.
        assert times.h2d_s - 1e-3 == pytest.approx(1e-3 * slowdown)  # 1e-3: chunk 1's new values
        assert times.d2h_s == pytest.approx(3e-3)
    # The other way round: a fetch is under way when the download begins.
    profile = replace(profile, trace=unpinned(1, 0), intervals=(StepInterval(0.0, 0), *profile.intervals[1:]))
    plan = make_plan_of(chunks, 1, 1)  # 0 is fetched ahead, from 0 ms to 3
    hardware = machine(h2d=BLOCK_BYTES / 3e-3, duplex_slowdown=1.5)
    assert run(plan, profile, hardware).times.d2h_s == pytest.approx(1.5e-3)


def test_frozen_replicas_survive_the_step() -> None:
    plan = make_plan_of([*chunks_at(OFFLOADED, 2, requires_grad=False), *chunks_at(OFFLOADED, 3)[2:]], 3)
    times = run(plan, there_and_back(3), machine()).times
    assert times.h2d_s == pytest.approx(TRANSFER_S)  # chunk 2 alone


# Several ranks


def ranks(site: Any, *, count: int = 3, world_size: int = 2, blocks: int = 1, depth: int = 0) -> Plan:
    return make_plan_of(chunks_at(site, count, world_size=world_size), blocks, depth, world_size)


def test_a_fetch_is_an_upload_and_a_gather() -> None:
    hardware = machine(all_gather=2 * BLOCK_BYTES / 5e-3, reduce_scatter=2 * BLOCK_BYTES / 7e-3)
    times = run(ranks(OFFLOADED), there_and_back(3), hardware).times
    # 5 fetches; a rank's half is one block. 3 reductions, overlapped with fetches but for the last.
    assert times.h2d_s == pytest.approx(5 * TRANSFER_S)
    assert times.collective_s == pytest.approx(5 * 5e-3 + 3 * 7e-3)
    assert times.d2h_s == pytest.approx(3 * TRANSFER_S)
    # Chunk 2 is there when backward begins: its reduction begins at 18 ms, the next ones follow, each with a download.
    assert times.waiting_s == pytest.approx(18e-3 + 3 * 8e-3)


def test_shards_on_the_gpu_are_only_gathered() -> None:
    hardware = machine(all_gather=2 * BLOCK_BYTES / 5e-3)
    times = run(ranks(SHARDED), there_and_back(3), hardware).times
    assert (times.h2d_s, times.d2h_s) == (0, 0)
    assert times.collective_s == pytest.approx(5 * 5e-3)


def test_replicas_that_every_rank_keeps_are_gathered_for_the_next_forward() -> None:
    hardware = machine(all_gather=2 * BLOCK_BYTES / 5e-3)
    timeline = run(ranks(RESIDENT), there_and_back(3, 6e-3), hardware, is_detailed=True)
    assert timeline.times.collective_s == pytest.approx(3 * 5e-3)
    assert timeline.times.waiting_s == pytest.approx(5e-3)  # the first; the others are gathered beside the computing
    assert timeline.times.step_s == pytest.approx(3 * 1e-4)
    fast = run(ranks(RESIDENT), there_and_back(3), hardware)
    assert fast.times.waiting_s == pytest.approx(15e-3)


def test_updates_are_shared() -> None:
    times = run(ranks(OFFLOADED, blocks=3), there_and_back(3), machine()).times
    assert times.step_s == pytest.approx(3 * 4e-3)  # 512 of 1024 elements each


def test_ranks_prefetch_only_where_they_meet() -> None:
    hardware = machine(all_gather=1e18)
    plan = ranks(OFFLOADED, count=6, blocks=4, depth=2)
    profile = there(6, 2e-3)
    timeline = run(plan, profile, hardware, is_detailed=True)
    fetches = [s.label for s in timeline.spans if s.lane == "h2d"]
    waits = [s.label for s in timeline.spans if s.label.startswith("wait for chunk")]
    counters = simulate(plan, profile.trace).counters
    assert (len(fetches), len(waits)) == (6, counters.fetches)


def test_whole_shards_are_gathered_once_a_step() -> None:
    plan = replace(ranks(OFFLOADED, depth=1, blocks=2), is_storage_distributed=False)
    hardware = machine(all_gather=2 * BLOCK_BYTES / 5e-3)
    times = run(plan, there_and_back(3), hardware).times
    assert times.collective_s == pytest.approx(3 * 5e-3)
    assert times.d2h_s == pytest.approx(3 * 2e-3 + 3 * 1e-3)  # the whole shard taken over, half a gradient


# Collectives beside computing


def alone(profile: StepProfile) -> StepProfile:
    """Of a dry run."""
    return replace(profile, is_alone=True)


SLOW = {"computing_slowdown": 1.5, "collective_slowdown": 2.0}


def test_gathers_and_computing_take_longer_beside_each_other() -> None:
    hardware = machine(all_gather=2 * BLOCK_BYTES / 5e-3, **SLOW)
    times = run(ranks(RESIDENT), alone(there_and_back(3, 6e-3)), hardware).times
    # The first gather is waited for, alone. Beside the second and third something is computed that takes 9 ms instead
    # of 6, of each of them 4.5 ms are done meanwhile, and half a millisecond is waited for.
    assert times.compute_s == pytest.approx(6 * 6e-3 + 2 * 3e-3)
    assert times.waiting_s == pytest.approx(5e-3 + 2 * 5e-4)
    assert times.collective_s == pytest.approx(3 * 5e-3)
    assert times.total_s == pytest.approx(42e-3 + 6e-3 + 3 * 1e-4)


def test_a_reduction_that_is_hidden_costs_computing() -> None:
    hardware = machine(reduce_scatter=2 * BLOCK_BYTES / 2e-3, **SLOW)
    times = run(ranks(RESIDENT), alone(there_and_back(3, 6e-3)), hardware).times
    # Two of them last 4 ms, in which 4 / 1.5 are computed; the last one is waited for.
    assert times.compute_s == pytest.approx(6 * 6e-3 + 2 * (4e-3 - 4e-3 / 1.5))
    assert times.waiting_s == pytest.approx(2e-3)


def test_reductions_that_queue_become_later_by_what_is_computed_beside_them() -> None:
    hardware = machine(reduce_scatter=2 * BLOCK_BYTES / 8e-3, **SLOW)
    times = run(ranks(RESIDENT, count=4), alone(there_and_back(4, 6e-3)), hardware).times
    # Beside each of the first three 9 ms are computed, in which 4.5 of its 8 ms are done; then its block is waited for.
    assert times.compute_s == pytest.approx(5 * 6e-3 + 3 * 9e-3)
    assert times.waiting_s == pytest.approx(3 * 3.5e-3 + 8e-3)


def test_collectives_of_both_lanes_follow_each_other() -> None:
    """Each chunk is gathered while the one before is computed with, and reduced beside the next."""
    rates = {"all_gather": 2 * BLOCK_BYTES / 1e-3, "reduce_scatter": 2 * BLOCK_BYTES / 2e-3}
    profile = alone(there_and_back(4, 20e-3))
    times = run(ranks(SHARDED, count=4, blocks=2, depth=1), profile, machine(**rates, **SLOW)).times
    plain = run(ranks(SHARDED, count=4, blocks=2, depth=1), profile, machine(**rates)).times
    assert times.waiting_s == pytest.approx(plain.waiting_s)  # what is waited for has nothing beside it
    hidden_s = plain.collective_s - plain.waiting_s
    assert hidden_s > 8e-3
    assert times.compute_s == pytest.approx(8 * 20e-3 + hidden_s * 2.0 * (1 - 1 / 1.5))


def test_a_collective_that_waits_for_the_network_takes_no_more_from_computing() -> None:
    rates = {"reduce_scatter": 2 * BLOCK_BYTES / 2e-3, **SLOW}
    node = run(ranks(RESIDENT), alone(there_and_back(3, 6e-3)), machine(**rates)).times
    slow = replace(
        machine(**{**rates, "reduce_scatter": 2 * BLOCK_BYTES / 5e-3}),
        world_size=2,
        num_nodes=2,
        node_reduce_scatter=machine(**rates).reduce_scatter,
    )
    across = run(ranks(RESIDENT), alone(there_and_back(3, 6e-3)), slow).times
    assert across.compute_s == pytest.approx(node.compute_s)
    assert across.waiting_s == pytest.approx(5e-3)  # the last one
    unknown = replace(slow, node_reduce_scatter=None)
    assert run(ranks(RESIDENT), alone(there_and_back(3, 6e-3)), unknown).times.compute_s == pytest.approx(36e-3)


def test_what_was_seen_in_steps_and_a_single_rank_take_no_longer() -> None:
    random = Random(67)
    num_alone = 0
    for _ in range(200):
        plan, profile, hardware = random_problem(random)
        slower = replace(hardware, **SLOW)
        assert run(plan, profile, slower, is_detailed=True) == run(plan, profile, hardware, is_detailed=True)
        of_dry_run = run(plan, alone(profile), slower, is_detailed=True)
        if plan.world_size == 1:
            num_alone += 1
            assert of_dry_run == run(plan, profile, hardware, is_detailed=True)
    assert num_alone > 50


def test_no_step_takes_less_or_more_than_collectives_can_explain() -> None:
    random = Random(68)
    num_longer = 0
    for _ in range(300):
        plan, profile, hardware = random_problem(random)
        plain = run(plan, alone(profile), hardware).times
        times = run(plan, alone(profile), replace(hardware, **SLOW)).times
        assert times.waiting_s + times.compute_s + times.step_s == pytest.approx(times.total_s)
        assert times.collective_s == plain.collective_s
        most_s = 2.0 * (1 - 1 / 1.5) * times.collective_s  # all of them hidden
        assert plain.compute_s <= times.compute_s <= plain.compute_s + most_s + 1e-12
        assert times.total_s >= plain.total_s - 1e-12
        assert times.total_s <= plain.total_s + most_s + times.collective_s + 1e-12
        num_longer += times.total_s > plain.total_s
    assert num_longer > 50


def test_micro_batches_that_are_alike_take_as_much_longer() -> None:
    hardware = machine(reduce_scatter=2 * BLOCK_BYTES / 2e-3, **SLOW)
    plan, profile = ranks(RESIDENT), alone(there_and_back(3, 6e-3))
    regime = replace(MIXED, num_backwards=3)
    times = simulate_step(plan, profile, hardware, scheme_of(plan, regime)).times
    assert times.compute_s == pytest.approx(3 * run(plan, profile, hardware).times.compute_s)


# Properties


def seconds_of(curve: BandwidthCurve | None, nbytes: int) -> float:
    return 0.0 if curve is None else curve.seconds(nbytes)


def test_the_books_of_random_steps_balance() -> None:
    random = Random(61)
    for _ in range(300):
        plan, profile, hardware = random_problem(random)
        timeline = run(plan, profile, hardware, is_detailed=True)
        times, costs = timeline.times, Costs(hardware, scheme_of(plan, MIXED))
        assert times.waiting_s + times.compute_s + times.step_s == pytest.approx(times.total_s)
        assert times.compute_s == pytest.approx(profile.compute_s)
        # What moves is what `simulate` counts in the steady state.
        first, both = (simulate(plan, profile.trace, iterations=n) for n in (1, 2))
        trained = [c for c in plan.chunks if c.requires_grad]
        slice_bytes = sum(c.nbytes // plan.world_size for c in trained if c.optim_tier is not Tier.GPU)
        write_back_s = sum(costs.write_back_s(c) for c in trained)
        assert times.h2d_s == pytest.approx(seconds_of(hardware.h2d, both.h2d_bytes - first.h2d_bytes) + write_back_s)
        assert times.d2h_s == pytest.approx(
            seconds_of(hardware.d2h, both.d2h_bytes - first.d2h_bytes) + seconds_of(hardware.d2h, slice_bytes)
        )
        gathered = both.gathered_bytes - first.gathered_bytes
        if plan.world_size > 1:
            gathered += sum(c.nbytes for c in trained if c.is_persistent)
            reduced = sum(c.nbytes for c in trained)
            expected = seconds_of(hardware.all_gather, gathered) + seconds_of(hardware.reduce_scatter, reduced)
            assert times.collective_s == pytest.approx(expected)
        else:
            assert times.collective_s == 0
        # One lane does one thing at a time.
        for lane in ("compute", "h2d", "cpu"):
            spans = sorted((s.start_s, s.end_s) for s in timeline.spans if s.lane == lane)
            assert all(a[1] <= b[0] + 1e-12 for a, b in zip(spans, spans[1:], strict=False))
        busy = sum(s.end_s - s.start_s for s in timeline.spans if s.lane == "compute" and "wait" not in s.label)
        updates = sum(costs.update_s(c) for c in trained if c.optim_tier is Tier.GPU)
        assert busy == pytest.approx(times.compute_s + updates)
        assert max((s.end_s for s in timeline.spans), default=0.0) <= times.total_s + 1e-12
        assert times.total_s >= max(times.compute_s, times.h2d_s, times.d2h_s) - 1e-12


def test_no_moment_takes_more_than_the_peak() -> None:
    random = Random(62)
    for _ in range(200):
        plan, profile, hardware = random_problem(random)
        accumulates = random.random() < 0.5
        timeline = run(plan, profile, hardware, is_detailed=True, accumulates=accumulates)
        highest = max(point.total_bytes for point in timeline.memory)
        assert highest <= timeline.peak_gpu_bytes
        kinds = dict(timeline.gpu_kinds)
        assert sum(kinds.values()) == timeline.peak_gpu_bytes
        assert min(kinds.values()) >= 0
        assert timeline.margin_bytes <= kinds["non_model_bytes"]
        most = max(i.non_model_bytes for i in profile.intervals)
        assert timeline.peak_gpu_bytes - highest <= most + sum(c.nbytes for c in plan.chunks) * 4
        assert [p.at_s for p in timeline.memory] == sorted(p.at_s for p in timeline.memory)


def test_the_peak_is_moment_by_moment() -> None:
    """Three resident chunks in fp32: 4 bytes of parameters, 8 of states, 4 of gradients an element, in blocks that stay
    as shards; where they are added to earlier ones, two blocks beside these."""
    plan = make_plan_of(chunks_at(RESIDENT, 3), 0)
    trace = unpinned(0, 1, 2, 2, 1, 0)
    other = [0, 3000, 6000, 9000, 9000, 6000, 3000]
    grads: list[tuple[int, ...]] = [(), (), (), (), (2,), (1,), (0,)]
    profile = StepProfile(trace, tuple(StepInterval(0.0, b, g) for b, g in zip(other, grads, strict=True)))
    fixed = 3 * NUMEL * 12
    shard = NUMEL * 4
    assert profile.course.moments == (((), 9000), ((2,), 9000), ((1,), 6000), ((0,), 3000))
    peak = fixed + max(9000 + shard, 6000 + 2 * shard, 3000 + 3 * shard)
    assert run(plan, profile, machine()).peak_gpu_bytes == peak
    assert run(plan, profile, machine(), accumulates=True).peak_gpu_bytes == fixed + 9000 + 3 * shard + 2 * BLOCK_BYTES
    streamed = make_plan_of(chunks_at(OFFLOADED._replace(is_update_streamed=True), 3), 1)
    scheme = Scheme(1, True, BLOCK_BYTES, TrainingRegime(stream_bytes=20_000))
    timeline = simulate_step(streamed, profile, machine(), scheme)
    assert timeline.peak_gpu_bytes == 3 * BLOCK_BYTES + 20_000  # when activations are gone
    scheme = replace(scheme, regime=TrainingRegime(stream_bytes=5_000))
    assert simulate_step(streamed, profile, machine(), scheme).peak_gpu_bytes == 3 * BLOCK_BYTES + 9_000


def test_gradients_in_fp32_take_their_bytes() -> None:
    """Of 16-bit parameters, with a master and two states."""
    (chunk,) = (replace(c, dtype="bfloat16") for c in chunks_at(RESIDENT, 1))
    plan = make_plan_of([chunk], 0)
    for accumulates, grad_bytes in ((False, 2), (True, 4)):
        timeline = run(plan, there_and_back(1), machine(), accumulates=accumulates)
        assert timeline.peak_gpu_bytes == NUMEL * (2 + 12 + grad_bytes) + accumulates * BLOCK_BYTES


def test_of_two_backwards_the_first_leaves_gradients_in_16_bits() -> None:
    """Where more may come before an update, sums in fp32 are there when the last one begins."""
    (chunk,) = (replace(c, dtype="bfloat16") for c in chunks_at(RESIDENT, 1))
    for most, grad_bytes in ((None, 4), (2, 2), (3, 4)):
        scheme = scheme_of(make_plan_of([chunk], 0), replace(MIXED, accumulates=True, most_backwards=most))
        assert scheme.earlier_grad_bytes(chunk) == NUMEL * grad_bytes


# The brief profile


def repeated(random: Random, num_chunks: int) -> StepProfile:
    """A trace in which the same chunks are accessed several times in a row."""
    events = []
    for event in random_trace(random, num_chunks, 15).events:
        events.append(event)
        if isinstance(event, Acquire) and not event.is_pinned:
            events += [replace(event, held=())] * random.randint(0, 3)
    count = sum(isinstance(e, Acquire) for e in events)
    intervals = tuple(StepInterval(random.random() * 1e-3, random.randint(0, 99)) for _ in range(count + 1))
    return StepProfile(AccessTrace(tuple(events)), intervals)


def without_holds(profile: StepProfile) -> StepProfile:
    events = tuple(replace(e, held=()) if isinstance(e, Acquire) else e for e in profile.trace.events)
    return replace(profile, trace=AccessTrace(events))


@pytest.mark.full
def test_the_brief_profile_moves_the_same() -> None:
    random = Random(63)
    shorter = 0
    for _ in range(300):
        num_chunks = random.randint(2, 7)
        profile = without_holds(repeated(random, num_chunks))
        brief = compressed(profile)
        shorter += len(brief.intervals) < len(profile.intervals)
        assert len(brief.intervals) == 1 + sum(1 for _ in brief.trace.acquires())
        assert brief.compute_s == pytest.approx(profile.compute_s)
        assert brief.peak_non_model_bytes == profile.peak_non_model_bytes
        chunks = chunks_at(OFFLOADED, num_chunks)
        plan = make_plan_of(chunks, random.randint(2, 6), random.randint(0, 3))
        whole, less = (simulate(plan, p.trace, iterations=2) for p in (profile, brief))
        assert less.h2d_bytes == whole.h2d_bytes
        assert less.counters.evictions == whole.counters.evictions
        assert less.counters.overflows <= whole.counters.overflows
        ours, theirs = run(plan, brief, machine()).times, run(plan, profile, machine()).times
        assert ours.h2d_s == pytest.approx(theirs.h2d_s)
        assert ours.total_s == pytest.approx(theirs.total_s, rel=0.02)
    assert shorter > 200


def test_gradients_of_a_brief_profile_are_no_earlier() -> None:
    random = Random(64)
    for _ in range(200):
        plan, profile, hardware = random_problem(random)
        profile = without_holds(profile)
        brief = compressed(profile)
        order = [i for interval in profile.intervals for i in interval.grads]
        assert [i for interval in brief.intervals for i in interval.grads] == order
        longest = max(interval.compute_s for interval in brief.intervals)
        ours, theirs = run(plan, brief, hardware).times, run(plan, profile, hardware).times
        assert ours.step_s == pytest.approx(theirs.step_s)
        assert abs(ours.total_s - theirs.total_s) <= 4 * longest + 0.05 * theirs.total_s


def test_a_brief_profile_knows_when_gradients_come() -> None:
    first, second = StepInterval(2e-3, 0, (1,)), StepInterval(3e-3, 0, (2, 0), grad_s=(1e-3, 3e-3))
    profile = StepProfile(unpinned(0, 0), (StepInterval(0.0, 0), first, second))
    _, joined = compressed(profile).intervals
    assert joined.grads == (1, 2, 0)
    assert joined.grad_s == pytest.approx((2e-3, 3e-3, 5e-3))
    _, joined = compressed(replace(profile, intervals=(StepInterval(0.0, 0), first, first))).intervals
    assert joined.grad_s == ()
    assert joined.until_grads_s == pytest.approx((2e-3, 4e-3))


def test_nothing_is_left_of_an_empty_profile() -> None:
    empty: Sequence[StepInterval] = ()
    assert compressed(StepProfile(AccessTrace(()), tuple(empty))) == StepProfile(AccessTrace(()), ())
    assert (
        run(make_plan_of(chunks_at(OFFLOADED, 1), 1), StepProfile(AccessTrace(()), ()), machine()).times.compute_s == 0
    )


def test_what_a_plan_takes_counts_its_rcache_and_what_is_in_no_chunk_and_activations_apart() -> None:
    chunks = chunks_at(OFFLOADED, 4)
    frozen = IgnoredParam("frozen", (10,), "uint8", False, 14)
    plan = replace(make_plan_of(chunks, 3), ignored=(frozen,), activation_host_bytes=1000)
    use, bare = plan_use(plan, MIXED), plan_use(replace(plan, ignored=(), activation_host_bytes=0), MIXED)
    assert use.rcache_bytes == 3 * plan.block_bytes
    assert (bare.gpu_bytes + 14, bare.host_bytes + 1000) == (use.gpu_bytes, use.host_bytes)
    assert use.host_chunk_bytes == bare.host_chunk_bytes == bare.host_bytes
    trained = replace(frozen, dtype="float32", requires_grad=True, nbytes=40)
    # In one chunk of its own: value, gradient, the block that this is gathered in, and two moments.
    assert plan_use(replace(plan, ignored=(trained,)), MIXED).gpu_bytes == bare.gpu_bytes + 5 * ALIGN_NUMEL * 4

"""Simulated steps whose updates run behind forward or inside backward, against forms that can be written down."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from lightning_elixir.errors import CapacityError
from lightning_elixir.plan.hardware import ADAM_BYTES, HardwareSpec
from lightning_elixir.plan.memory import Budget, Scheme, memory_use
from lightning_elixir.plan.placing.placement import place
from lightning_elixir.plan.placing.structure import structural_profile
from lightning_elixir.plan.problem import PlacementRequest, Problem
from lightning_elixir.plan.profile import StepInterval, StepProfile
from lightning_elixir.plan.regime import TrainingRegime, UpdateMode
from lightning_elixir.plan.simulator import step as simulated_step
from lightning_elixir.plan.simulator.cost import Costs
from lightning_elixir.plan.simulator.spans import Timeline
from lightning_elixir.plan.simulator.timeline import scheme_of, simulate_step
from lightning_elixir.plan.types import Plan, Tier, UpdateTiming
from tests.plan.models import accesses_of
from tests.plan.problems import (
    HARDWARE,
    KEPT,
    KIB,
    MIXED,
    OFFLOADED,
    RESIDENT,
    SHARDED_PARAMS,
    Candidate,
    changed,
    constant_hardware,
    layers,
    layout_of,
    search,
    with_spares,
)
from tests.plan.steps import NUMEL, chunks_at, machine, random_problem, there_and_back
from tests.plan.traces import BLOCK_BYTES, make_plan_of, unpinned

AFTER, BEHIND, INSIDE = UpdateTiming
STREAMED = OFFLOADED._replace(is_update_streamed=True)


def run(plan: Plan, timing: UpdateTiming, profile: StepProfile, hardware: HardwareSpec, **options: Any) -> Timeline:
    """The options are those of the regime, and `is_detailed`."""
    plan, is_detailed = replace(plan, update_timing=timing), options.pop("is_detailed", False)
    scheme = scheme_of(plan, replace(MIXED, **options))
    return simulate_step(plan, profile, hardware, scheme, is_detailed=is_detailed)


def offloaded(count: int, site: Any = OFFLOADED, **options: Any) -> Plan:
    is_gone = not site.is_persistent
    return make_plan_of(chunks_at(site, count, **options), count if is_gone else 0, 2 * is_gone)


# Closed forms: a fetch, a download and a write-back take 1 ms, an update on the host 4, a streamed one 2


@pytest.mark.parametrize(
    ("timing", "waiting_s", "step_s"), [(AFTER, 2e-3, 16e-3), (BEHIND, 9e-3, 0), (INSIDE, 6e-3, 0)]
)
def test_what_computing_hides_of_updates(timing: UpdateTiming, waiting_s: float, step_s: float) -> None:
    """Four chunks that compute long. Behind forward: the first one's gradients land 1 ms after the step, when another
    one's update has begun: 4 + 4 and the fetch. Inside backward only the first one is left: 1 + 4 and the fetch."""
    times = run(offloaded(4), timing, there_and_back(4, 20e-3), machine()).times
    assert (times.waiting_s, times.step_s) == pytest.approx((waiting_s, step_s))
    assert times.total_s == pytest.approx(8 * 20e-3 + waiting_s + step_s)
    assert times.adam_s == pytest.approx(16e-3)
    assert times.update_waiting_s == pytest.approx(0 if timing is AFTER else waiting_s - 1e-3)


@pytest.mark.parametrize(("timing", "waiting_s"), [(BEHIND, 9e-3), (INSIDE, 6e-3)])
def test_parameters_that_stay_wait_for_their_update_and_the_way_up(timing: UpdateTiming, waiting_s: float) -> None:
    timeline = run(offloaded(4, KEPT), timing, there_and_back(4, 20e-3), machine(), is_detailed=True)
    times = timeline.times
    assert (times.waiting_s, times.update_waiting_s, times.step_s) == pytest.approx((waiting_s, waiting_s, 0))
    assert times.h2d_s == pytest.approx(4e-3)
    waits = [s for s in timeline.spans if s.label.startswith("wait")]
    assert [s.label for s in waits] == ["wait for the update of chunk 0"]
    assert (waits[0].start_s, waits[0].end_s) == pytest.approx((0, waiting_s))


def test_what_is_updated_in_the_step_counts_there_and_the_others_are_hidden() -> None:
    """Chunk 0 is updated in the step: 4 ms there, whether or not others have members in it. Chunk 3, which is needed
    last, hides behind forward, as it does alone."""
    plan, profile = offloaded(4), there_and_back(4, 20e-3)
    frozen = make_plan_of([replace(c, requires_grad=c.id in (0, 3)) for c in plan.chunks], 4, 2)
    mixture = frozenset({"p0", "unknown"})
    for timing in (BEHIND, INSIDE):
        times = run(frozen, timing, profile, machine(), in_step=mixture).times
        assert (times.step_s, times.update_waiting_s) == pytest.approx((4e-3, 0))
        assert times.waiting_s == pytest.approx(2e-3)  # its gradients, the last, and its fetch
        assert times.adam_s == pytest.approx(8e-3)
    after = run(frozen, AFTER, profile, machine()).times
    assert after.step_s == pytest.approx(8e-3)
    assert run(frozen, AFTER, profile, machine(), in_step=mixture).times == after
    everything = frozenset({"p0", "p3"})
    assert run(frozen, BEHIND, profile, machine(), in_step=everything).times == after


def test_the_step_waits_for_gradients_of_what_it_updates_alone() -> None:
    """The last gradients, of chunk 0, are no matter of the step where that hides."""
    profile = there_and_back(4, 20e-3)
    times = run(offloaded(4), BEHIND, profile, machine(), in_step=frozenset({"p3"})).times
    alone = run(offloaded(4), BEHIND, profile, machine()).times
    assert (times.step_s, times.waiting_s) == pytest.approx((4e-3, alone.waiting_s))


def test_updates_on_the_device_stay_in_the_step() -> None:
    plan = make_plan_of([*chunks_at(RESIDENT, 1), *chunks_at(KEPT, 4)[1:]], 0)
    times = run(plan, INSIDE, there_and_back(4, 20e-3), machine()).times
    assert (times.step_s, times.waiting_s) == pytest.approx((1e-4, 0))


@pytest.mark.parametrize("timing", list(UpdateTiming))
def test_what_the_program_takes_between_steps_hides_updates_where_these_go_on(timing: UpdateTiming) -> None:
    profile = there_and_back(4, 20e-3)
    before = run(offloaded(4), timing, profile, machine()).times
    after = run(offloaded(4), timing, replace(profile, program_s=5e-3), machine()).times
    assert after.step_s == pytest.approx(before.step_s + 5e-3)
    hidden_s = 0.0 if timing is AFTER else min(5e-3, before.update_waiting_s)
    assert after.update_waiting_s == pytest.approx(before.update_waiting_s - hidden_s)
    assert after.total_s == pytest.approx(before.total_s + 5e-3 - hidden_s)


def test_nothing_changes_where_all_states_are_on_the_device() -> None:
    plan = offloaded(4, RESIDENT)
    after = run(plan, AFTER, there_and_back(4, 2e-3), machine(), is_detailed=True)
    for timing in (BEHIND, INSIDE):
        assert run(plan, timing, there_and_back(4, 2e-3), machine(), is_detailed=True) == after


@pytest.mark.parametrize(("timing", "least_s"), [(BEHIND, 16e-3), (INSIDE, 16e-3)])
def test_a_host_that_is_always_busy_is_the_step(timing: UpdateTiming, least_s: float) -> None:
    """Next to no computing: the worker is waited for."""
    times = run(offloaded(4), timing, there_and_back(4, 1e-5), machine()).times
    after = run(offloaded(4), AFTER, there_and_back(4, 1e-5), machine()).times
    assert least_s <= times.total_s < after.total_s
    assert times.update_waiting_s > 0.5 * times.waiting_s


def test_only_the_first_micro_batch_waits_for_updates() -> None:
    hardware = machine(host_bytes_per_s=1e15)  # so that adding up takes no time
    once = run(offloaded(4), BEHIND, there_and_back(4, 20e-3), hardware).times
    times = run(offloaded(4), BEHIND, there_and_back(4, 20e-3), hardware, num_backwards=3).times
    others_s = 8 * 20e-3 + 1e-3  # the first chunk is fetched
    assert times.total_s == pytest.approx(once.total_s + 2 * others_s)
    assert times.compute_s == pytest.approx(3 * once.compute_s)
    assert times.h2d_s == pytest.approx(3 * once.h2d_s)
    assert times.update_waiting_s == pytest.approx(once.update_waiting_s)


@pytest.mark.parametrize("site", [OFFLOADED, KEPT, RESIDENT])
def test_adding_up_in_host_memory_can_be_what_a_step_waits_for(site: Any) -> None:
    """Four chunks, of which the host adds up three gradients each: the first one is there, two read 4 bytes an element,
    and read and write 4. A micro-batch computes 160 ms."""
    added_s = 60e-3  # of a chunk's gradient, on average of three
    hardware = machine(host_bytes_per_s=NUMEL * 8 / added_s)
    timeline = run(offloaded(4, site), BEHIND, there_and_back(4, 20e-3), hardware, num_backwards=3, is_detailed=True)
    added = [span for span in timeline.spans if span.label.startswith("add up")]
    if site is RESIDENT:
        assert not added
        assert timeline.times.total_s == pytest.approx(3 * 160e-3, rel=1e-2)
        return
    assert {span.label for span in added} == {f"add up {i}" for i in range(4)}
    assert max(span.end_s - span.start_s for span in added) == pytest.approx(added_s)
    # With what lands and what the updates move, 72 bytes an element instead of 3 x 8.
    assert timeline.times.total_s == pytest.approx(4 * 9 * added_s, rel=1e-2)
    alone = run(offloaded(4, site), BEHIND, there_and_back(4, 20e-3), hardware, is_detailed=True)
    assert not any(span.label.startswith("add up") for span in alone.spans)


def test_a_gradient_waits_for_a_buffer_to_be_added_from() -> None:
    """There are three: the fourth gradient comes down when the first one has been added."""
    hardware = machine(host_bytes_per_s=NUMEL * 8 / 1.0)
    timeline = run(offloaded(5), AFTER, there_and_back(5, 20e-3), hardware, num_backwards=3, is_detailed=True)
    added = sorted(s.end_s for s in timeline.spans if s.label.startswith("add up"))
    down = sorted(s.start_s for s in timeline.spans if s.label.startswith("gradients"))
    assert down[3:] == pytest.approx(added[:2])
    assert timeline.times.total_s > added[-1]  # the update needs the sums


@pytest.mark.parametrize("in_step", [frozenset(), frozenset({"p0"}), frozenset({"p3"})])
def test_sums_are_waited_for_once_by_what_is_updated_in_the_step(in_step: frozenset[str]) -> None:
    """A sum takes 4 ms, an update 14; the next forward of the step does not wait for sums. The one of chunk 3 hides
    behind backward, as do the updates of the others where it alone is updated in the step."""
    hardware, timing = machine(cpu_adam_numel_per_s=NUMEL / 14e-3), BEHIND if in_step else AFTER
    times = run(offloaded(4), timing, there_and_back(4, 20e-3), hardware, num_backwards=3, in_step=in_step).times
    last_s = 0.0 if "p3" in in_step else 3 * 1e-3 + 4e-3  # of each backward, the way down; of the last one, the sum
    assert times.waiting_s - times.update_waiting_s == pytest.approx(3 * 1e-3 + last_s)  # fetches
    assert times.step_s == pytest.approx(14e-3 * (len(in_step) or 4))


def test_sums_are_waited_for_also_where_a_chunk_of_the_gpu_comes_last() -> None:
    """The first of three sums of 30 ms begins 61 ms before the end of backward."""
    plan = make_plan_of([*chunks_at(RESIDENT, 1), *chunks_at(KEPT, 4)[1:]], 0)
    hardware = machine(cpu_adam_numel_per_s=NUMEL / 105e-3)
    assert run(plan, AFTER, there_and_back(4, 20e-3), hardware, num_backwards=3).times.waiting_s == pytest.approx(31e-3)


@pytest.mark.parametrize("options", [{"num_backwards": 2}, {"accumulates": True}])
def test_gradients_that_are_added_to_are_not_used_inside_backward(options: dict[str, Any]) -> None:
    profile = there_and_back(4, 20e-3)
    inside, behind = (run(offloaded(4), timing, profile, machine(), **options).times for timing in (INSIDE, BEHIND))
    assert inside == behind


def test_streamed_updates_share_the_bus_with_fetches() -> None:
    """Four streamed chunks of one piece each, two milliseconds of the bus each way at most."""
    slow = machine(h2d=BLOCK_BYTES / 1e-3, streamed_adam_numel_per_s=NUMEL / 8e-3)
    plan = offloaded(4, STREAMED)
    timeline = run(plan, INSIDE, there_and_back(4, 20e-3), slow, is_detailed=True)
    up = sum(s.end_s - s.start_s for s in timeline.spans if s.lane == "h2d" and s.label.startswith("update"))
    scheme = scheme_of(plan, MIXED)
    pieces, up_s, down_s = Costs(slow, scheme).stream_s(plan.chunks[0])
    # fp32: gradients and two states go up, states and parameters come down, four bytes each
    assert (pieces, up_s, down_s) == pytest.approx((1, 3e-3, 3e-3))
    assert up == pytest.approx(4 * 3e-3)
    assert timeline.times.total_s > 8 * 20e-3 + 8e-3  # the first chunk's own
    hidden = run(plan, INSIDE, there_and_back(4, 20e-3), machine()).times
    assert hidden.waiting_s == pytest.approx(1e-3 + 4e-3 + 1e-3, abs=2e-3)


def test_ranks_wait_for_an_update_before_they_gather() -> None:
    plan = make_plan_of(chunks_at(OFFLOADED, 3, world_size=2), 3, 0, 2)
    hardware = machine(all_gather=2 * BLOCK_BYTES / 1e-3)
    timeline = run(plan, INSIDE, there_and_back(3, 20e-3), hardware, is_detailed=True)
    waits = [s.label for s in timeline.spans if "the update" in s.label]
    assert waits == ["wait for the update of chunk 0"]
    assert timeline.times.step_s == 0
    assert timeline.times.update_waiting_s == pytest.approx(1e-3 + 4e-3)


def test_ranks_wait_even_for_what_they_fetch_ahead() -> None:
    """Chunks 1, 0, 2 are updated in this order, and all three are fetched at the first access."""
    waiting_s = {}
    for world_size in (1, 2):
        plan = make_plan_of(chunks_at(OFFLOADED, 3, world_size=world_size), 3, 3, world_size)
        hardware = machine(all_gather=1e18)
        times = run(plan, BEHIND, there_and_back(3, 20e-3), hardware).times
        waiting_s[world_size] = times.update_waiting_s
    assert waiting_s == pytest.approx({1: 8e-3, 2: 12e-3})


def test_replicas_that_all_ranks_keep_are_gathered_at_the_step() -> None:
    plan = make_plan_of(chunks_at(KEPT, 3, world_size=2), 0, 0, 2)
    hardware = machine(all_gather=1e18)
    behind = run(plan, BEHIND, there_and_back(3, 20e-3), hardware).times
    assert behind.step_s == pytest.approx(3 * 4e-3 + 1e-3)  # as if they ran after backward, landing hidden
    inside = run(plan, INSIDE, there_and_back(3, 20e-3), hardware).times
    assert inside.step_s == pytest.approx(1e-3 + 4e-3 + 1e-3)


def test_the_memory_of_the_host_is_a_wall() -> None:
    """fp32: an update reads and writes 4 + 2 * 8 + 4 bytes, landing and two fetches 4 each; all chunks stay after
    forward, so each is fetched once."""
    plan, profile = offloaded(4), there_and_back(4, 5e-3)
    nbytes = 4 * NUMEL * (4 + 16 + 4 + 4 + 4)
    free = run(plan, INSIDE, profile, machine()).times
    wide = run(plan, INSIDE, profile, machine(host_bytes_per_s=10 * nbytes / free.total_s)).times
    assert wide == free
    for factor in (1.2, 3.0):
        hardware = machine(host_bytes_per_s=nbytes / (factor * free.total_s))
        narrow = run(plan, INSIDE, profile, hardware).times
        assert narrow.total_s == pytest.approx(factor * free.total_s, rel=0.02)
        assert narrow.total_s >= factor * free.total_s * (1 - 1e-9)
        assert narrow.compute_s + narrow.waiting_s + narrow.step_s == pytest.approx(narrow.total_s)
        assert narrow.update_waiting_s - free.update_waiting_s == pytest.approx(narrow.total_s - free.total_s, rel=0.1)


def test_copies_take_memory_from_updates_beside_them() -> None:
    """Updates alone ask for all that the memory gives, 28 bytes a parameter; 4 are fetched in a step."""
    plan, profile = offloaded(4), there_and_back(4, 5e-3)
    free = run(plan, INSIDE, profile, machine()).times
    traffic, fetched = 4 * NUMEL * 28, 4 * NUMEL * 4
    rate = traffic / free.adam_s
    shared = run(plan, INSIDE, profile, machine(host_bytes_per_s=rate)).times
    assert shared.adam_s == pytest.approx(free.adam_s * (1 + fetched / shared.total_s / rate), rel=2e-3)
    assert shared.total_s >= free.total_s
    assert run(plan, AFTER, profile, machine(host_bytes_per_s=rate)).times.adam_s == free.adam_s


@pytest.mark.parametrize(("back_s", "slower_s"), [(2e-3, 0.25e-3), (4.6e-3, 0.1e-3), (6e-3, 0.0)])
def test_updates_take_memory_from_copies_beside_them(back_s: float, slower_s: float) -> None:
    """They and a copy ask for a quarter more than there is. The second gradient goes down, for 1 ms, when the update
    of the first one has begun, after `back_s` and that millisecond; it lasts for 4 ms, and some more."""
    plan, forward = offloaded(2, KEPT), there_and_back(2, 1e-3).intervals[:3]
    profile = StepProfile(unpinned(0, 1, 1, 0), (*forward, *(StepInterval(back_s, 0, (i,)) for i in (1, 0))))
    free = machine()
    rate = (ADAM_BYTES * NUMEL / 4e-3 + BLOCK_BYTES / 1e-3) / 1.25
    times = run(plan, INSIDE, profile, replace(free, host_bytes_per_s=rate)).times
    assert run(plan, INSIDE, profile, free).times.d2h_s == pytest.approx(2e-3)
    lasting_s = times.adam_s / 2  # of an update beside copies
    beside_s = max(0.0, min(1.25e-3, 1e-3 + lasting_s - back_s))
    assert times.d2h_s == pytest.approx(2e-3 + beside_s * (1 - 1 / 1.25))
    assert times.d2h_s == pytest.approx(2e-3 + slower_s, abs=0.1e-3)


# Properties


def test_the_books_of_overlapped_steps_balance() -> None:
    random = Random(71)
    for _ in range(150):
        plan, profile, hardware = random_problem(random)
        timing = random.choice((BEHIND, INSIDE))
        in_step = frozenset(c.members[0].fqn for c in plan.chunks if random.random() < random.choice((0, 0, 0.5)))
        timeline = run(plan, timing, profile, hardware, is_detailed=True, in_step=in_step)
        times, costs = timeline.times, Costs(hardware, scheme_of(plan, MIXED))
        assert times.waiting_s + times.compute_s + times.step_s == pytest.approx(times.total_s)
        assert -1e-12 <= times.update_waiting_s <= times.waiting_s + 1e-12
        after = run(plan, AFTER, profile, hardware).times
        assert (times.compute_s, times.adam_s) == pytest.approx((after.compute_s, after.adam_s))
        assert (times.h2d_s, times.d2h_s) == pytest.approx((after.h2d_s, after.d2h_s))
        assert times.collective_s == pytest.approx(after.collective_s)
        assert timeline.end_s == pytest.approx(times.total_s)
        assert times.total_s >= max(times.compute_s, times.h2d_s) - 1e-9
        # One lane does one thing at a time; what begins before the picture is cut off.
        for lane in ("compute", "h2d", "cpu"):
            here = [s for s in timeline.spans if s.lane == lane]
            if lane == "h2d":  # what updates send goes between fetches, and is drawn from its first byte to its last
                here = [s for s in here if s.label.startswith("fetch")]
            spans = sorted((s.start_s, s.end_s) for s in here)
            assert all(a[1] <= b[0] + 1e-9 for a, b in zip(spans, spans[1:], strict=False))
            assert all(0 <= a <= b <= timeline.end_s + 1e-12 for a, b in spans)
        # Chunks that nothing uses are updated at some time, and all others in every step.
        used = {i for e in profile.trace.acquires() for i in e.ids}
        on_host = [c for c in plan.chunks if c.requires_grad and c.optim_tier is not Tier.GPU and c.id in used]
        if not any(c.is_update_streamed for c in plan.chunks):
            busy_s = sum(s.end_s - s.start_s for s in timeline.spans if s.lane == "cpu")
            assert busy_s >= sum(costs.update_s(c) for c in on_host) * 0.5
            longest_s = max((costs.update_s(c) for c in on_host), default=0.0)
            assert times.total_s <= after.total_s + 2 * longest_s


def test_further_steps_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for odd ones, where a chunk trains that forward does not need."""
    random = Random(72)
    odd = 0
    for _ in range(60):
        plan, profile, hardware = random_problem(random)
        timing = random.choice((BEHIND, INSIDE))
        few = run(plan, timing, profile, hardware).times
        monkeypatch.setattr(simulated_step, "_SAME", -1.0)
        monkeypatch.setattr(simulated_step, "_MOST_STEPS", 9)
        many = run(plan, timing, profile, hardware).times
        monkeypatch.undo()
        odd += few.total_s != pytest.approx(many.total_s, rel=0.02)
        assert few.total_s == pytest.approx(many.total_s, abs=8e-3)  # an update of the largest chunk
    assert odd <= 2


# Memory


def test_the_buffers_of_the_stream_stay_while_it_may_be_needed() -> None:
    plan = offloaded(3, STREAMED)
    profile = there_and_back(3)
    profile = replace(profile, intervals=tuple(replace(i, non_model_bytes=9_000) for i in profile.intervals))
    peaks = []
    for timing in UpdateTiming:
        scheme = Scheme(1, True, BLOCK_BYTES, TrainingRegime(stream_bytes=5_000), UpdateMode(timing))
        timed = replace(plan, update_timing=timing)
        timeline = simulate_step(timed, profile, machine(), scheme, is_detailed=True)
        peaks.append(timeline.peak_gpu_bytes)
        assert max(p.total_bytes for p in timeline.memory) <= timeline.peak_gpu_bytes
    assert peaks == [5 * BLOCK_BYTES + 9_000, *[5 * BLOCK_BYTES + 14_000] * 2]


def test_the_buffers_of_whole_parameters_are_there_in_the_step_alone() -> None:
    """Under every timing: the highest moment is in backward, as without them, or in the update."""
    profile = there_and_back(3)
    profile = replace(profile, intervals=tuple(replace(i, non_model_bytes=9_000) for i in profile.intervals))
    for timing in UpdateTiming:
        plan = replace(offloaded(3), update_timing=timing)
        for whole_bytes, highest in ((0, 9_000), (5_000, 9_000), (10_000, 10_000)):
            regime = TrainingRegime(whole_update_bytes=whole_bytes, in_step=frozenset({"p1"}))
            timeline = simulate_step(plan, profile, machine(), scheme_of(plan, regime), is_detailed=True)
            assert timeline.peak_gpu_bytes == 5 * BLOCK_BYTES + highest
            assert max(p.total_bytes for p in timeline.memory) <= timeline.peak_gpu_bytes
            in_update = [p.grad_bytes for p in timeline.memory if not p.non_model_bytes]
            assert {p.grad_bytes for p in timeline.memory if p.non_model_bytes} == {2 * BLOCK_BYTES}
            assert in_update == [2 * BLOCK_BYTES + whole_bytes]


def test_gradients_in_compute_shards_take_no_host_memory() -> None:
    chunks = [replace(c, dtype="bfloat16") for c in chunks_at(OFFLOADED, 2)]
    scheme = Scheme(1, True, BLOCK_BYTES, MIXED)
    reusing = replace(scheme, updates=UpdateMode(grad_reuses_compute_shard=True))
    assert memory_use(chunks, 2, scheme).host_bytes == 2 * NUMEL * 16
    assert memory_use(chunks, 2, reusing).host_bytes == 2 * NUMEL * 14
    for others in (chunks_at(OFFLOADED, 2), [replace(c, dtype="bfloat16") for c in chunks_at(KEPT, 2)]):
        assert memory_use(others, 2, reusing) == memory_use(others, 2, scheme)  # no master; no compute shard there
    in_fp32 = replace(MIXED, accumulates=True)
    scheme, reusing = replace(scheme, regime=in_fp32), replace(reusing, regime=in_fp32)
    assert memory_use(chunks, 2, reusing) == memory_use(chunks, 2, scheme)  # they would not fit


# The search


def problem_of(host_bytes: int | None, **options: Any) -> tuple[list[Candidate], Problem]:
    """Eight chunks of 1024 bf16 parameters on a GPU that holds next to nothing."""
    specs = layers(8, dtype="bfloat16")
    layout, accesses = layout_of(specs), accesses_of(specs)
    hardware = options.pop("hardware", HARDWARE["nominal"])
    profile = structural_profile(layout, accesses, hardware)
    request = PlacementRequest(accesses=accesses)
    problem = Problem(request, Budget(6 * KIB, host_bytes), 1, replace(MIXED, **options), hardware)
    return [Candidate(layout, profile)], problem


def test_gradients_go_to_compute_shards_only_where_memory_would_not_suffice() -> None:
    candidates, problem = problem_of(8 * 16 * KIB, update_timing=INSIDE, can_reuse_compute_shard=True)
    plan = search(candidates, problem)
    assert (plan.grad_reuses_compute_shard, plan.update_timing) == (False, INSIDE)
    for short in (1, 8 * 2 * KIB):
        candidates, problem = problem_of(8 * 16 * KIB - short, update_timing=INSIDE, can_reuse_compute_shard=True)
        plan = search(candidates, problem)
        assert (plan.grad_reuses_compute_shard, plan.update_timing) == (True, BEHIND)
        assert plan.notes["host_bytes"] == 8 * 14 * KIB
        assert plan.forecast is not None
        assert plan.forecast.host_bytes == 8 * 14 * KIB
        assert "which saves 2 bytes each" in plan.explain()
        with pytest.raises(CapacityError, match="host memory"):
            search(candidates, changed(problem, can_reuse_compute_shard=False))
    candidates, problem = problem_of(8 * 14 * KIB - 1, can_reuse_compute_shard=True)
    with pytest.raises(CapacityError, match=r"needs 112\.0 KiB on the host"):
        search(candidates, problem)


def test_gradients_go_to_compute_shards_rather_than_states_to_nvme() -> None:
    disk = constant_hardware(nvme_read_bytes_per_s=3e9, nvme_write_bytes_per_s=2e9)
    candidates, problem = problem_of(8 * 15 * KIB, hardware=disk, update_timing=BEHIND)
    problem = replace(problem, budget=replace(problem.budget, nvme_bytes=100 * KIB))
    on_disk = search(candidates, problem)
    assert any(c.optim_tier is Tier.NVME for c in on_disk.chunks)
    plan = search(candidates, changed(problem, can_reuse_compute_shard=True))
    assert plan.grad_reuses_compute_shard
    assert not any(c.optim_tier is Tier.NVME for c in plan.chunks)


def test_what_hides_more_is_never_predicted_to_be_slower() -> None:
    random = Random(73)
    for _ in range(6):
        hardware = HARDWARE[random.choice(("nominal", "slow bus", "slow host Adam"))]
        totals = []
        for timing in UpdateTiming:
            candidates, problem = problem_of(None, hardware=hardware, update_timing=timing)
            plan = search(candidates, problem)
            assert plan.forecast is not None
            assert plan.update_timing is timing
            totals.append(plan.forecast.times.total_s)
        assert totals[2] <= totals[1] * 1.001
        assert totals[1] <= totals[0] * 1.001


# Spare states


def test_spare_states_take_host_memory_where_there_is_a_master() -> None:
    chunks = [replace(c, dtype="bfloat16") for c in chunks_at(OFFLOADED, 2)]
    scheme = Scheme(1, True, BLOCK_BYTES, MIXED)
    all_spared = with_spares(chunks, scheme, None)
    assert memory_use(all_spared, 2, scheme).host_bytes == 2 * NUMEL * (16 + 14)
    assert memory_use(all_spared, 2, scheme).host_spare_bytes == 2 * NUMEL * 14
    assert memory_use(all_spared, 2, scheme).gpu_bytes == memory_use(chunks, 2, scheme).gpu_bytes
    one_spared = with_spares(chunks, scheme, None, most=1)
    assert memory_use(one_spared, 2, scheme).host_bytes == NUMEL * (2 * 16 + 14)
    kept = with_spares([replace(c, dtype="bfloat16") for c in chunks_at(KEPT, 2)], scheme, None)
    assert memory_use(kept, 2, scheme).host_bytes == 2 * NUMEL * (14 + 14)
    in_two = [replace(c, dtype="bfloat16") for c in chunks_at(OFFLOADED, 2, world_size=2)]
    on_two = replace(scheme, world_size=2)
    spared = with_spares(in_two, on_two, None)
    assert memory_use(spared, 2, on_two).host_spare_bytes == sum(c.numel for c in in_two) * 7
    for others in (
        chunks_at(OFFLOADED, 2),  # no master
        [replace(c, dtype="bfloat16") for c in chunks_at(RESIDENT, 2)],
        [replace(c, dtype="bfloat16", requires_grad=False) for c in chunks_at(OFFLOADED, 2)],
        [replace(c, optim_tier=Tier.NVME) for c in chunks],
    ):
        assert with_spares(others, scheme, None) == tuple(others)
    without = replace(scheme, regime=replace(MIXED, master_weights=False))
    assert with_spares(chunks, without, None) == tuple(chunks)


def test_spare_states_come_where_a_norm_is_needed_and_the_host_has_memory() -> None:
    options = {"update_timing": INSIDE, "hardware": HARDWARE["slow host Adam"], "can_reuse_compute_shard": True}
    for host_bytes, spares in ((8 * 30 * KIB, 1), (None, 1), ((8 * 16 + 14) * KIB, 1), ((8 * 16 + 14) * KIB - 1, 0)):
        candidates, problem = problem_of(host_bytes, needs_global_norm=True, **options)
        plan = search(candidates, problem)
        # The host's updates take so long that the last one, which begins first, lasts as long as backward.
        assert [c.id for c in plan.chunks if c.has_spare_states] == [7] * spares
        assert plan.update_timing == (INSIDE if spares else BEHIND)
        assert plan.notes["host_spare_bytes"] == spares * 14 * KIB
        assert plan.forecast is not None
        assert plan.forecast.host_bytes == (8 * 16 + spares * 14) * KIB
        said = "into spare states for 1 of 8 chunks (the updates of the others wait for the step)"
        assert (said in plan.explain()) is bool(spares)
        assert ("spare states 14.0 KiB" in plan.explain()) is bool(spares)
    for changes in ({"needs_global_norm": False}, {"update_timing": BEHIND}, {"update_timing": AFTER}):
        candidates, problem = problem_of(None, **{**options, "needs_global_norm": True, **changes})
        plan = search(candidates, problem)
        assert (plan.has_spare_states, plan.update_timing) == (False, problem.regime.update_timing)


def test_a_step_with_spare_states_for_all_is_predicted_like_one_that_needs_no_norm() -> None:
    options = {"update_timing": INSIDE, "hardware": HARDWARE["slow host Adam"]}
    times = []
    for needs_global_norm in (False, True):
        [candidate], problem = problem_of(None, needs_global_norm=needs_global_norm, **options)
        problem = replace(problem, request=replace(problem.request, policy="cpu"))
        way = problem.regime.speculating() if needs_global_norm else problem.regime.waiting()
        plan = place(candidate.layout, problem.with_updates(way))
        assert all(c.has_spare_states is needs_global_norm for c in plan.chunks)
        scheme = scheme_of(plan, problem.regime)
        times.append(simulate_step(plan, candidate.profile, problem.hardware, scheme).times)
    assert times[0] == times[1]


def test_spare_states_are_not_taken_where_they_hide_nothing() -> None:
    fast = replace(constant_hardware(), cpu_adam_numel_per_s=1e18)
    candidates, problem = problem_of(None, update_timing=INSIDE, needs_global_norm=True, hardware=fast)
    assert not search(candidates, problem).has_spare_states
    everything = replace(problem, budget=Budget(None, None), hardware=HARDWARE["slow host Adam"])
    assert not search(candidates, everything).has_spare_states


def test_spare_states_and_gradients_in_compute_shards_exclude_each_other() -> None:
    options = {"update_timing": INSIDE, "can_reuse_compute_shard": True, "needs_global_norm": True}
    candidates, problem = problem_of(8 * 15 * KIB, hardware=HARDWARE["slow host Adam"], **options)
    plan = search(candidates, problem)
    assert (plan.grad_reuses_compute_shard, plan.has_spare_states, plan.update_timing) == (True, False, BEHIND)


@pytest.mark.parametrize(
    ("timing", "text"),
    [
        (AFTER, "after backward, and the next forward waits for all of them"),
        (BEHIND, "behind the next forward"),
        (INSIDE, "from inside backward on"),
    ],
)
def test_a_plan_says_when_its_updates_run(timing: UpdateTiming, text: str) -> None:
    candidates, problem = problem_of(None, update_timing=timing)
    assert f"updates of states beside the GPU run {text}" in search(candidates, problem).explain()
    before = replace(search(candidates, problem), forecast=None).explain()  # and before the optimizer is known
    assert ("(those of HybridAdam and CPUAdam; other optimizers' run in their step)" in before) == (timing is not AFTER)
    everything = replace(problem, budget=Budget(None, None))
    assert "updates of states" not in search(candidates, everything).explain()


def test_shards_on_the_device_wait_for_their_write_back() -> None:
    plan = make_plan_of(chunks_at(SHARDED_PARAMS, 2, world_size=2), 2, 0, 2)
    hardware = machine(all_gather=1e18)
    timeline = run(plan, INSIDE, there_and_back(2, 20e-3), hardware, is_detailed=True)
    assert timeline.times.update_waiting_s == pytest.approx(1e-3 + 4e-3 + 1e-3)
    assert timeline.times.h2d_s == pytest.approx(2e-3)

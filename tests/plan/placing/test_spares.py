"""Spare states for part of the chunks: which get them, within which limits, and what that makes of a simulated step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_elixir.plan.hardware import HardwareSpec
from lightning_elixir.plan.memory import Budget, Scheme, memory_use
from lightning_elixir.plan.placing.fallbacks import plan_with_fallbacks
from lightning_elixir.plan.placing.placement import place
from lightning_elixir.plan.placing.search import search
from lightning_elixir.plan.placing.space import Candidate
from lightning_elixir.plan.placing.spares import SPARE_PATTERNS
from lightning_elixir.plan.placing.structure import structural_profile
from lightning_elixir.plan.problem import PlacementRequest, Problem
from lightning_elixir.plan.profile import StepInterval, StepProfile
from lightning_elixir.plan.regime import TrainingRegime
from lightning_elixir.plan.simulator.spans import Timeline
from lightning_elixir.plan.simulator.timeline import scheme_of, simulate_step
from lightning_elixir.plan.types import ChunkSpec, Plan, Tier, UpdateTiming
from tests.plan.models import accesses_of, spec
from tests.plan.problems import KIB, MIXED, OFFLOADED, constant_hardware, layers, layout_of, with_spares
from tests.plan.steps import NUMEL, chunks_at, machine, there_and_back
from tests.plan.traces import BLOCK_BYTES, make_chunk, make_plan_of, unpinned

_, BEHIND, INSIDE = UpdateTiming
SCHEME = Scheme(1, True, BLOCK_BYTES, MIXED)
CLIPPED = replace(MIXED, update_timing=INSIDE, needs_global_norm=True)
EACH = 14 * NUMEL
"""Bytes of a chunk's spare states."""


def in_bf16(chunks: list[ChunkSpec]) -> list[ChunkSpec]:
    return [replace(c, dtype="bfloat16") for c in chunks]


def spared(chunks: tuple[ChunkSpec, ...]) -> list[int]:
    return [c.id for c in chunks if c.has_spare_states]


# Which chunks


@pytest.mark.parametrize(
    ("pattern", "ids"),
    [("spread", [2, 5, 7]), ("first", [0, 1, 2]), ("middle", [2, 3, 4]), ("last", [5, 6, 7])],
)
def test_they_are_handed_out_within_the_limit_to_the_byte(pattern: str, ids: list[int]) -> None:
    chunks = in_bf16(chunks_at(OFFLOADED, 8))
    base = memory_use(chunks, 0, SCHEME).host_bytes
    for room, expected in ((3 * EACH, ids), (4 * EACH - 1, ids), (3 * EACH - 1, None), (0, []), (-1, [])):
        found = with_spares(chunks, SCHEME, base + room, pattern)
        assert spared(found) == expected or (expected is None and len(spared(found)) == 2)
        assert memory_use(found, 0, SCHEME).host_bytes == base + EACH * len(spared(found))
    for limit in (base + 8 * EACH, None):
        assert spared(with_spares(chunks, SCHEME, limit, pattern)) == list(range(8))
        assert spared(with_spares(chunks, SCHEME, limit, pattern, most=3)) == ids


def test_a_smaller_chunk_takes_what_a_larger_one_leaves() -> None:
    chunks = in_bf16([make_chunk(i, blocks) for i, blocks in enumerate((3, 1, 3, 1))])
    base = memory_use(chunks, 0, SCHEME).host_bytes
    assert spared(with_spares(chunks, SCHEME, base + 4 * EACH, "first")) == [0, 1]
    assert spared(with_spares(chunks, SCHEME, base + 2 * EACH, "first")) == [1, 3]
    assert spared(with_spares(chunks, SCHEME, base + 5 * EACH, "last")) == [1, 2, 3]


def test_those_of_the_host_and_streamed_ones_get_their_share() -> None:
    chunks = [replace(c, is_update_streamed=c.id % 2 == 0) for c in in_bf16(chunks_at(OFFLOADED, 12))]
    found = spared(with_spares(chunks, SCHEME, None, "spread", most=6))
    assert [sum(i % 2 == kind for i in found) for kind in (0, 1)] == [3, 3]


def problem_of(budget: Budget, policy: str = "cpu", **options: Any) -> tuple[Candidate, Problem]:
    """Chunks of 1024 bf16 parameters: 16 KiB each on the host, and 14 more with spare states."""
    specs = layers(options.pop("count", 8), dtype="bfloat16")
    layout, accesses = layout_of(specs), accesses_of(specs)
    hardware = options.pop("hardware", constant_hardware())
    request = PlacementRequest(policy=policy, accesses=accesses)
    problem = Problem(request, budget, 1, replace(CLIPPED, **options), hardware)
    return Candidate(layout, structural_profile(layout, accesses, hardware)), problem


def placed(budget: Budget, **options: Any) -> Plan:
    candidate, problem = problem_of(budget, **options)
    return plan_with_fallbacks(problem, lambda way: place(candidate.layout, way), is_choosing=False)


@pytest.mark.parametrize(
    ("cpu", "spare", "count"),
    [
        (None, None, 8),
        (8 * 30, None, 8),
        (8 * 30 - 1, None, 7),
        (8 * 16 + 14, None, 1),
        (8 * 16 + 13, None, 0),
        (8 * 16, None, 0),
        (None, 8 * 16 + 3 * 14, 3),
        (None, 0, 0),
        (1000, 8 * 16 + 28, 2),
        (8 * 16 + 28, 1000, 2),
    ],
)
def test_a_fixed_placement_gets_what_the_host_leaves(cpu: int | None, spare: int | None, count: int) -> None:
    """`spare_cpu_bytes` is a limit for spare states alone."""
    limits = [None if n is None else n * KIB for n in (cpu, spare)]
    plan = placed(Budget(6 * KIB, limits[0], spare_cpu_bytes=limits[1]))
    assert len(spared(plan.chunks)) == count
    assert plan.has_spare_states is bool(count)
    assert plan.update_timing is (INSIDE if count else BEHIND)
    assert plan.notes["host_spare_bytes"] == count * 14 * KIB
    assert plan.notes["host_bytes"] == (8 * 16 + count * 14) * KIB
    assert ("for 3 of 8 chunks" in plan.explain()) is (count == 3)
    assert ("into spare states:" in plan.explain()) is (count == 8)


def test_chunks_without_a_master_get_none() -> None:
    specs = [spec("a", 1024, dtype="bfloat16"), spec("norm", 1024), spec("b", 1024, dtype="bfloat16")]
    problem = Problem(PlacementRequest(policy="cpu", accesses=accesses_of(specs)), Budget(10**9), 1, CLIPPED)
    plan = plan_with_fallbacks(problem, lambda way: place(layout_of(specs), way), is_choosing=False)
    assert [(c.dtype, c.has_spare_states) for c in plan.chunks] == [
        (c.dtype, c.dtype == "bfloat16") for c in plan.chunks
    ]
    assert {c.dtype for c in plan.chunks} == {"bfloat16", "float32"}


# The simulated step


def run(
    chunks: tuple[ChunkSpec, ...], profile: StepProfile, hardware: HardwareSpec, regime: TrainingRegime = CLIPPED
) -> Timeline:
    plan = replace(make_plan_of(chunks, len(chunks), 2), update_timing=INSIDE)
    return simulate_step(plan, profile, hardware, scheme_of(plan, regime), is_detailed=True)


def test_only_chunks_with_spare_states_begin_inside_backward() -> None:
    """Neither the others nor fp32 ones, as in the runtime; without anything that needs all gradients, all do."""
    chunks = in_bf16(chunks_at(OFFLOADED, 6))
    chunks[4] = replace(chunks[4], dtype="float32")
    spread = with_spares(chunks, SCHEME, None, "last", most=2)
    assert spared(spread) == [3, 5]
    for given, regime, expected in (
        (spread, CLIPPED, {3, 5}),
        (spread, replace(CLIPPED, needs_global_norm=False), {3, 5}),
        (tuple(chunks), CLIPPED, set()),
        (tuple(chunks), replace(CLIPPED, needs_global_norm=False), {1, 2, 3, 4, 5}),
        (spread, replace(CLIPPED, num_backwards=2), set()),
    ):
        timeline = run(given, there_and_back(6, 20e-3), machine(), regime)
        updates = [s for s in timeline.spans if s.label.startswith("update ")]
        early = {int(s.label.split()[1]) for s in updates if 100e-3 < s.start_s < timeline.backward_end_s - 1e-9}
        assert early == expected


def example() -> tuple[list[ChunkSpec], StepProfile, HardwareSpec]:
    """Ten chunks: half a second each in forward, a second in backward, a second of update; transfers take no time."""
    ids = list(range(10))
    intervals = [StepInterval(0.0, 0), *[StepInterval(0.5, 0)] * 10]
    intervals += [StepInterval(1.0, 0, (i,)) for i in reversed(ids)]
    profile = StepProfile(unpinned(*ids, *reversed(ids)), tuple(intervals))
    return in_bf16(chunks_at(OFFLOADED, 10)), profile, machine(h2d=1e18, d2h=1e18, cpu_adam_numel_per_s=float(NUMEL))


@pytest.mark.parametrize(
    ("pattern", "most", "total_s"),
    [("last", 0, 20.5), ("last", 5, 18.0), ("first", 5, 16.5), ("spread", 5, 16.0), ("last", 10, 16.0)],
)
def test_the_first_chunks_are_needed_first_and_the_last_ones_land_first(
    pattern: str, most: int, total_s: float
) -> None:
    """Of the last five, all updates are over when backward is, and then forward waits for those of the first five one
    by one; of the first five, they begin half way through it, and forward waits for nothing then."""
    chunks, profile, hardware = example()
    found = run(with_spares(chunks, SCHEME, None, pattern, most), profile, hardware)
    assert found.times.total_s == pytest.approx(total_s)


@pytest.mark.parametrize("pattern", SPARE_PATTERNS)
def test_some_are_never_slower_than_none(pattern: str) -> None:
    chunks, profile, hardware = example()
    none = run(tuple(chunks), profile, hardware).times.total_s
    for most in range(11):
        assert run(with_spares(chunks, SCHEME, None, pattern, most), profile, hardware).times.total_s <= none + 1e-9


# The search


@pytest.mark.full  # random problems
@pytest.mark.parametrize("rate", [3e8, 1e9, 3e9, 5e9])
def test_a_step_never_gets_longer_with_more_memory(rate: float) -> None:
    totals, counts = [], []
    for room in [*range(0, 8 * 14 + 1, 7), None]:
        limit = None if room is None else (8 * 16 + room) * KIB
        budget = Budget(6 * KIB, limit) if room != 28 else Budget(6 * KIB, 10**9, spare_cpu_bytes=limit)
        candidate, problem = problem_of(budget, "auto", hardware=constant_hardware(cpu_adam_numel_per_s=rate))
        plan = search([candidate], problem)
        assert plan.forecast is not None
        assert room is None or plan.forecast.host_bytes <= (8 * 16 + room) * KIB
        totals.append(plan.forecast.times.total_s)
        counts.append(len(spared(plan.chunks)))
    assert counts[0] == counts[1] == 0 < counts[2]
    for fewer, more in zip(totals, totals[1:], strict=False):
        assert more <= fewer * 1.002  # of two that differ by less than a thousandth, that with fewer bytes is taken
    assert totals[-1] < totals[0]


def test_fewer_than_fit_may_be_faster() -> None:
    """Where the updates of all chunks have begun, those of the first ones come last, though forward waits for them."""
    hardware = constant_hardware(cpu_adam_numel_per_s=5e9)
    candidate, problem = problem_of(Budget(6 * KIB), "auto", hardware=hardware, count=24)
    plan = search([candidate], problem)
    count = len(spared(plan.chunks))
    assert 0 < count < 24
    chunks = tuple(replace(c, has_spare_states=c.optim_tier is Tier.CPU) for c in plan.chunks)
    every = replace(plan, chunks=chunks)
    scheme = scheme_of(plan, problem.regime)
    all_s = simulate_step(every, candidate.profile, hardware, scheme).times.total_s
    assert plan.forecast is not None
    assert plan.forecast.times.total_s <= all_s * 1.001
    assert plan.forecast.host_bytes < memory_use(chunks, 0, scheme).host_bytes


def test_it_decides_which_chunks_by_simulation() -> None:
    """Where backward is long enough for all updates that may begin there, the first chunks are the best."""
    chunks, profile, hardware = example()
    layout = layout_of([spec(f"p{i}", NUMEL, dtype="bfloat16") for i in range(10)], NUMEL)
    request = PlacementRequest(accesses=())
    base = memory_use(chunks, 0, SCHEME).host_bytes
    totals = {}
    for room in (0, 5):
        budget = Budget(4 * layout.block_bytes, base + room * EACH)
        plan = search([Candidate(layout, profile)], Problem(request, budget, 1, CLIPPED, hardware))
        assert plan.forecast is not None
        totals[room] = plan.forecast.times.total_s
        assert len(spared(plan.chunks)) <= room
    assert totals[5] == pytest.approx(16.0, rel=2e-3)
    assert totals[0] == pytest.approx(20.5, rel=2e-3)


def test_where_they_bring_nothing_there_are_none() -> None:
    chunks, profile, hardware = example()
    fast = replace(hardware, cpu_adam_numel_per_s=1000 * hardware.cpu_adam_numel_per_s)
    layout = layout_of([spec(f"p{i}", NUMEL, dtype="bfloat16") for i in range(10)], NUMEL)
    budget = Budget(4 * layout.block_bytes, memory_use(chunks, 0, SCHEME).host_bytes + 10 * EACH)
    problem = Problem(PlacementRequest(accesses=()), budget, 1, CLIPPED, fast)
    plan = search([Candidate(layout, profile)], problem)
    assert spared(plan.chunks) == []
    assert plan.update_timing is BEHIND


@pytest.mark.parametrize(
    ("budget", "ways"),
    [
        (Budget(6 * KIB), [INSIDE]),
        (Budget(6 * KIB, (8 * 16 + 14) * KIB), [INSIDE]),
        (Budget(6 * KIB, 8 * 16 * KIB), [INSIDE, BEHIND]),
        (Budget(6 * KIB, nvme_bytes=10**9), [BEHIND, INSIDE]),
    ],
    ids=["room", "little_room", "no_room", "disk"],
)
def test_plans_without_are_searched_where_those_with_bring_nothing(budget: Budget, ways: list[UpdateTiming]) -> None:
    candidate, problem = problem_of(budget)
    tried: list[UpdateTiming] = []

    def make(way: Problem) -> Plan:
        tried.append(way.updates.timing)
        return place(candidate.layout, way)

    plan = plan_with_fallbacks(problem, make, is_choosing=True)
    assert tried == ways
    assert plan.update_timing is (INSIDE if ways == [INSIDE] else BEHIND)


@pytest.mark.full
def test_the_placement_is_the_best_beside_the_spare_states_that_are_useful() -> None:
    """Seven billion parameters whose updates may be streamed: with spare states for all, others would be streamed."""
    count, numel = 33, 202_375_168
    hardware = constant_hardware(
        h2d=55e9,
        d2h=55e9,
        cpu_adam_numel_per_s=6.1e9,
        gpu_adam_numel_per_s=146e9,
        streamed_adam_numel_per_s=3.5e9,
        joint_adam_numel_per_s=6.5e9,
    )
    ids = list(range(count))
    intervals = [StepInterval(0.0, 0), *[StepInterval(0.01, 0)] * count]
    intervals += [StepInterval(0.02, 0, (i,)) for i in reversed(ids)]
    profile = StepProfile(unpinned(*ids, *reversed(ids)), tuple(intervals))
    layout = layout_of([spec(f"p{i}", numel, dtype="bfloat16") for i in ids], numel)
    regime = replace(CLIPPED, can_stream=True)
    totals = []
    for room in (0, 24, 33):
        budget = Budget(4 * 2**30, (count * 16 + room * 14) * numel)
        problem = Problem(PlacementRequest(), budget, 1, regime, hardware)
        plan = search([Candidate(layout, profile)], problem)
        assert plan.forecast is not None
        totals.append(plan.forecast.times.total_s)
    assert totals[1] < 0.75 * totals[0]
    assert totals[2] <= totals[1] * 1.002

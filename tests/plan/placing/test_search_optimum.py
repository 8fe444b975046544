"""The search against every placement there is of a small model."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from lightning_elixir.errors import CapacityError
from lightning_elixir.plan.placing.placement import OFFLOADED
from lightning_elixir.plan.placing.structure import structural_profile
from lightning_elixir.plan.problem import PlacementRequest
from lightning_elixir.plan.types import Tier, UpdateTiming
from tests.helpers.tiers import crossed, telling
from tests.plan.models import accesses_of, spec
from tests.plan.problems import (
    HARDWARE,
    Case,
    changed,
    constant_hardware,
    every_placement,
    layout_of,
    random_case,
    random_times,
)

DEPTHS = (2, 4, 8)
"""Those that the search looks at."""


def fastest_s(case: Case) -> float | None:
    times = [case.simulate(plan).times.total_s for plan in every_placement(case, DEPTHS)]
    return min(times, default=None)


def check(case: Case, rel: float = 0.02) -> bool:
    """Whether anything fits; if so, the search has found the best."""
    best_s = fastest_s(case)
    try:
        plan = case.search()
    except CapacityError:
        assert best_s is None
        return False
    assert best_s is not None
    assert plan.forecast is not None
    assert plan.forecast.times.total_s == pytest.approx(case.simulate(plan).times.total_s)
    assert plan.forecast.times.total_s == pytest.approx(best_s, rel=rel)
    return True


@pytest.mark.parametrize("name", telling(HARDWARE, "streaming is fast"))
def test_the_search_finds_the_best_placement(name: str) -> None:
    random = Random(name)
    found = sum(check(random_case(random, most_chunks=4, hardware=HARDWARE[name])) for _ in range(10))
    assert found >= 3


@pytest.mark.parametrize(
    "name", telling(["nominal", "slow collectives", "collectives", "slow host Adam"], "collectives")
)
def test_the_search_finds_the_best_placement_on_two_ranks(name: str) -> None:
    random = Random(name)
    cases = [random_case(random, most_chunks=3, world_size=2, hardware=HARDWARE[name]) for _ in range(6)]
    assert sum(check(case) for case in cases) >= 3


OVERLAPPED = (UpdateTiming.BEHIND_FORWARD, UpdateTiming.INSIDE_BACKWARD)


def overlapped(case: Case, timing: UpdateTiming) -> Case:
    return replace(case, problem=changed(case.problem, update_timing=timing))


@crossed(
    told=["slow host Adam-UpdateTiming.INSIDE_BACKWARD", "streaming is fast-UpdateTiming.BEHIND_FORWARD"],
    name=["nominal", "slow host Adam", "streaming is fast"],
    timing=OVERLAPPED,
)
def test_the_search_finds_the_best_placement_where_updates_overlap(name: str, timing: UpdateTiming) -> None:
    random = Random(name)
    cases = [random_case(random, most_chunks=3, hardware=HARDWARE[name]) for _ in range(10)]
    assert sum(check(overlapped(case, timing)) for case in cases) >= 3


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("timing", OVERLAPPED)
def test_the_search_finds_the_best_of_more_overlapped_placements(timing: UpdateTiming) -> None:
    random = Random(7)
    found = sum(check(overlapped(random_case(random, most_chunks=4), timing)) for _ in range(30))
    found += sum(check(overlapped(random_case(random, most_chunks=3, world_size=2), timing)) for _ in range(10))
    assert found >= 20


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_search_finds_the_best_of_more_placements() -> None:
    random = Random(5)
    found = sum(check(random_case(random, most_chunks=5)) for _ in range(40))
    found += sum(check(random_case(random, most_chunks=4, world_size=2)) for _ in range(10))
    found += sum(check(random_case(random, most_chunks=4)) for _ in range(100))
    assert found >= 80


@pytest.mark.full
@pytest.mark.parametrize("timing", UpdateTiming)
def test_the_search_finds_the_best_placement_with_a_disk(timing: UpdateTiming) -> None:
    """Up to what states on NVMe have to bring before they go there."""
    random = Random(3)
    on_nvme = 0
    for _ in range(4):
        rates = {f"nvme_{what}_bytes_per_s": random.uniform(2e9, 2e10) for what in ("read", "write")}
        case = overlapped(random_case(random, hardware=constant_hardware(**rates), can_stream=False), timing)
        specs = [spec(f"l{i}.w", 512 * 200 * random.choice((1, 1, 1, 2))) for i in range(5)]
        request = PlacementRequest(accesses=accesses_of(specs))
        layout = layout_of(specs, 512 * 200)
        profile = random_times(random, structural_profile(layout, request.accesses, case.problem.hardware, 0), 0)
        case = replace(case, layout=layout, profile=profile, problem=replace(case.problem, request=request))
        placer = case.placer
        offloaded = placer.at([OFFLOADED] * len(specs))
        host_bytes = offloaded.use.host_bytes
        case = case.with_budget(
            gpu_bytes=int(offloaded.gpu_bytes(offloaded.smallest) * random.uniform(1.0, 1.2)),
            cpu_bytes=int(host_bytes * random.uniform(0.82, 0.98)),
            nvme_bytes=2**30,
        )
        if check(case, rel=0.07):
            on_nvme += any(c.optim_tier is Tier.NVME for c in case.search().chunks)
    assert on_nvme >= 2


def test_whole_shards_on_two_ranks() -> None:
    random = Random(6)
    cases = [random_case(random, most_chunks=3, world_size=2, distributed_storage=False) for _ in range(8)]
    assert sum(check(case) for case in cases) >= 4

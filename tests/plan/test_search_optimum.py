"""The search against every placement there is of a small model."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from lightning_elixir.errors import CapacityError
from lightning_elixir.plan.types import UpdateTiming
from tests.plan.problems import HARDWARE, Case, every_placement, random_case

DEPTHS = (2, 4, 8)
"""Those that the search looks at."""


def fastest_s(case: Case) -> float | None:
    times = [case.simulate(plan).times.total_s for plan in every_placement(case, DEPTHS)]
    return min(times, default=None)


def check(case: Case) -> bool:
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
    assert plan.forecast.times.total_s == pytest.approx(best_s, rel=0.02)
    return True


@pytest.mark.parametrize("name", HARDWARE)
def test_the_search_finds_the_best_placement(name: str) -> None:
    random = Random(name)
    found = sum(check(random_case(random, most_chunks=4, hardware=HARDWARE[name])) for _ in range(10))
    assert found >= 3


@pytest.mark.parametrize("name", ["nominal", "slow collectives", "collectives", "slow host Adam"])
def test_the_search_finds_the_best_placement_on_two_ranks(name: str) -> None:
    random = Random(name)
    cases = [random_case(random, most_chunks=3, world_size=2, hardware=HARDWARE[name]) for _ in range(6)]
    assert sum(check(case) for case in cases) >= 3


OVERLAPPED = (UpdateTiming.BEHIND_FORWARD, UpdateTiming.INSIDE_BACKWARD)


def overlapped(case: Case, timing: UpdateTiming) -> Case:
    return replace(case, problem=replace(case.problem, update_timing=timing))


@pytest.mark.parametrize("timing", OVERLAPPED)
@pytest.mark.parametrize("name", ["nominal", "slow host Adam", "streaming is fast"])
def test_the_search_finds_the_best_placement_where_updates_overlap(name: str, timing: UpdateTiming) -> None:
    random = Random(name)
    cases = [random_case(random, most_chunks=3, hardware=HARDWARE[name]) for _ in range(8)]
    assert sum(check(overlapped(case, timing)) for case in cases) >= 3


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("timing", OVERLAPPED)
def test_the_search_finds_the_best_of_more_overlapped_placements(timing: UpdateTiming) -> None:
    random = Random(7)
    found = sum(check(overlapped(random_case(random, most_chunks=4), timing)) for _ in range(30))
    found += sum(check(overlapped(random_case(random, most_chunks=3, world_size=2), timing)) for _ in range(10))
    assert found >= 20


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_search_finds_the_best_of_more_placements() -> None:
    random = Random(5)
    found = sum(check(random_case(random, most_chunks=5)) for _ in range(40))
    found += sum(check(random_case(random, most_chunks=4, world_size=2)) for _ in range(10))
    found += sum(check(random_case(random, most_chunks=4)) for _ in range(100))
    assert found >= 80


def test_whole_shards_on_two_ranks() -> None:
    random = Random(6)
    cases = [random_case(random, most_chunks=3, world_size=2, distributed_storage=False) for _ in range(8)]
    assert sum(check(case) for case in cases) >= 4

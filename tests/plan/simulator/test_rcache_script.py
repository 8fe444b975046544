"""The script of a step is what the rCache does when it is run step after step."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from lightning_elixir.plan.simulator.counters import simulate
from lightning_elixir.plan.simulator.rcache_script import RCacheScript, RCacheScripts
from lightning_elixir.plan.types import AccessTrace, Plan, Tier
from tests.plan.steps import random_problem


def script_of(plan: Plan, trace: AccessTrace) -> RCacheScript:
    return RCacheScripts(trace).of(plan)


def test_the_script_is_a_later_step_of_the_simulation() -> None:
    random = Random(11)
    fetched = 0
    for _ in range(80):
        plan, profile, _ = random_problem(random)
        plan = replace(plan, prefetch_depth=random.choice((0, 1, 3)))
        script = script_of(plan, profile.trace)
        assert script == script_of(plan, profile.trace)
        before, after = (simulate(plan, profile.trace, iterations=n) for n in (2, 3))
        assert [a.ids for a in script.accesses] == [a.ids for a in profile.trace.acquires()]
        fetches = after.counters.fetches + after.counters.prefetches
        fetches -= before.counters.fetches + before.counters.prefetches
        assert sum(len(a.fetches) for a in script.accesses) == fetches
        assert max((a.used_blocks for a in script.accesses), default=0) <= script.peak_blocks == after.peak_blocks
        fetched += fetches
    assert fetched > 200


def test_the_order_of_need_is_that_of_the_first_accesses() -> None:
    random = Random(12)
    for _ in range(20):
        plan, profile, _ = random_problem(random)
        touched = dict.fromkeys(i for a in script_of(plan, profile.trace).accesses for i in a.ids)
        assert profile.trace.order_of_need == {i: at for at, i in enumerate(touched)}


def test_what_is_awaited_is_what_came_since_it_was_last_waited_for() -> None:
    random = Random(13)
    for _ in range(20):
        plan, profile, _ = random_problem(random)
        waited: set[int] = set()
        for access in script_of(plan, profile.trace).accesses:
            waited -= {i for i, _ in access.fetches}
            assert set(access.awaited) == set(access.ids) - waited
            waited |= set(access.ids)


def test_scripts_tell_plans_apart_by_what_comes_and_goes() -> None:
    """One object for many plans gives each of them its own script, and the same one to those that differ elsewhere."""
    random = Random(14)
    plan, profile, _ = random_problem(random)
    scripts = RCacheScripts(profile.trace)
    for _ in range(40):
        chunks = tuple(replace(c, is_persistent=random.random() < 0.3) for c in plan.chunks)
        blocks, depth = random.randint(1, len(chunks)), random.choice((0, 1, 3))
        other = replace(plan, chunks=chunks, rcache_blocks=blocks, prefetch_depth=depth)
        script = scripts.of(other)
        assert script == script_of(other, profile.trace)
        on_gpu = tuple(replace(c, optim_tier=Tier.GPU) for c in chunks)
        assert scripts.of(replace(other, chunks=on_gpu)) is script

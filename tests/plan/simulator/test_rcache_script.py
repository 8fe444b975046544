"""The script of a step is what the rCache does when it is run step after step."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from lightning_elixir.plan.simulator.counters import simulate
from lightning_elixir.plan.simulator.rcache_script import rcache_script
from tests.plan.steps import random_problem


def test_the_script_is_a_later_step_of_the_simulation() -> None:
    random = Random(11)
    fetched = 0
    for _ in range(80):
        plan, profile, _ = random_problem(random)
        plan = replace(plan, prefetch_depth=random.choice((0, 1, 3)))
        script = rcache_script(plan, profile.trace)
        assert script == rcache_script(plan, profile.trace)
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
        touched = dict.fromkeys(i for a in profile.trace.acquires() for i in a.ids)
        assert rcache_script(plan, profile.trace).order_of_need() == {i: at for at, i in enumerate(touched)}

from __future__ import annotations

from random import Random

import pytest

from lightning_elixir.plan.growth_estimate import GrowthModel, StepMemory, needed_blocks, outgrowth
from lightning_elixir.plan.policy import CachePolicy
from lightning_elixir.plan.rcache import RCache
from lightning_elixir.plan.types import AccessTrace, Acquire, Drop
from tests.plan.traces import random_trace

# Forward takes 100 bytes a layer, over 10 bytes of inputs; backward frees them. The head has a temporary of 50.
LEVELS = (10, 110, 210, 310, 310, 210, 110)
PEAKS = (10, 110, 210, 360, 360, 310, 210, 110)
GRADS: tuple[tuple[int, ...], ...] = ((), (), (), (), (3,), (2,), (1,), (0,))
SAMPLE = StepMemory(LEVELS, PEAKS, GRADS)


def test_the_peak_is_predicted_from_the_ratio() -> None:
    model = GrowthModel(SAMPLE, {}, block_bytes=7)
    assert model.rise_bytes == 350
    assert model.beside_bytes(1.0) == 357
    assert model.beside_bytes(2.0) == 707


def test_gradients_come_while_activations_go() -> None:
    model = GrowthModel(SAMPLE, dict.fromkeys(range(4), 100), block_bytes=0)
    # At the end of backward 400 bytes of gradients and 100 of activations; at its beginning 100 and 350.
    assert model.beside_bytes(1.0) == max(350 + 100, 300 + 200, 200 + 300, 100 + 400)
    assert model.beside_bytes(3.0) == 3 * 350 + 100


def test_many_moments_are_bounded_by_few() -> None:
    random = Random(0)
    for _ in range(50):
        num = random.randint(1, 300)
        peaks = tuple(random.randint(0, 1000) for _ in range(num))
        grads = tuple((i,) for i in range(num))
        model = GrowthModel(StepMemory((0,) * (num - 1), peaks, grads), dict.fromkeys(range(num), 5), 0)
        for ratio in (1.0, 1.7, 4.0):
            exact = max(round(ratio * peak) + 5 * (i + 1) for i, peak in enumerate(peaks))
            assert exact <= model.beside_bytes(ratio) <= exact + 5 * num / 8 + ratio * 1000 / 8
    falling = StepMemory((0,) * 99, tuple(range(1000, 0, -10)), tuple((i,) for i in range(100)))
    for ratio, exact in ((1.0, 1010), (0.5, 1005), (2.0, 2010)):
        assert exact <= GrowthModel(falling, dict.fromkeys(range(100), 10), 0).beside_bytes(ratio) <= exact + 70


def test_looks_are_where_there_is_something_to_compare() -> None:
    model = GrowthModel(SAMPLE, {}, 0)
    assert model.looks == {1: 100, 2: 200, 3: 300, 5: 200, 6: 100}
    many = StepMemory(tuple(range(1000)), (*range(1000), 1000), ((),) * 1001)
    looks = GrowthModel(many, {}, 0).looks
    assert 5 < len(looks) <= 12
    assert min(looks) >= 1000 / 16
    assert GrowthModel(StepMemory((), (5,), ((),)), {}, 0).looks == {}


def test_growth_and_what_lies_beside_it_are_told_apart() -> None:
    assert outgrowth(0, 100, 100) == (0, 1.0)
    assert outgrowth(0, 150, 100) == (0, 1.5)
    assert outgrowth(30, 100, 100) == (30, 1.0)
    assert outgrowth(30, 150, 100) == (30, 1.5)
    assert outgrowth(-30, 70, 100) == (0, 1.0)
    # A workspace of 40 that the sampled step took in its course, and later ones find there; or the other way round.
    assert outgrowth(40, 60, 100) == (0, 1.0)
    assert outgrowth(-40, 140, 100) == (0, 1.0)
    assert outgrowth(40, 80, 100) == (20, 1.0)
    assert outgrowth(-40, 190, 100) == (0, 1.5)


def test_a_step_that_takes_nothing_predicts_nothing() -> None:
    model = GrowthModel(StepMemory((0, 0), (0, 0, 0), ((), (), ())), {}, 0)
    assert model.looks == {}
    assert model.beside_bytes(5.0) == 0


def test_needed_blocks_of_pins_within_pins() -> None:
    costs = {0: 1, 1: 2, 2: 4}
    trace = AccessTrace(
        (
            Acquire((0,), is_pinned=True),
            Acquire((1,), is_pinned=True),
            Drop((1,)),
            Acquire((2,), is_pinned=False, held=(0,)),
            Drop((0,)),
            Acquire((1, 7), is_pinned=False),
        )
    )
    assert needed_blocks(trace, costs) == 5
    assert needed_blocks(AccessTrace(()), costs) == 0


def test_needed_blocks_is_the_smallest_rcache_without_overflow() -> None:
    random = Random(1)
    for _ in range(200):
        costs = {i: random.randint(1, 3) for i in range(5)}
        trace = random_trace(random, 5, random.randint(1, 20))
        needed = needed_blocks(trace, costs)
        for budget, may_overflow in ((needed, False), (needed - 1, True)):
            cache = RCache(costs, budget)
            cache.begin(CachePolicy(trace))
            for event in trace.events:
                if isinstance(event, Acquire):
                    # Whatever the trace says was held may not even be resident here.
                    cache.acquire(event.ids, pin=event.is_pinned, held=event.held)
                else:
                    cache.drop(event.ids)
            if not may_overflow:
                assert cache.counters.overflows == 0


@pytest.mark.parametrize("ratio", [1.0, 2.0])
def test_blocks_for_gradients_count_at_any_ratio(ratio: float) -> None:
    with_blocks, without = GrowthModel(SAMPLE, {}, 64), GrowthModel(SAMPLE, {}, 0)
    assert with_blocks.beside_bytes(ratio) - without.beside_bytes(ratio) == 64

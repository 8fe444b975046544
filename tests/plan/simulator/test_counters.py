from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from torch import nn

from lightning_elixir.errors import PlanError, StateError
from lightning_elixir.optimizer import ElixirOptimizer
from lightning_elixir.plan.simulator.counters import simulate
from lightning_elixir.plan.types import AccessTrace, Acquire, Drop, Tier
from lightning_elixir.wrapper import ElixirModule
from tests.helpers.plans import make_plan
from tests.plan.traces import BLOCK_BYTES, fewest_fetches, make_chunk, make_plan_of, random_trace, unpinned


def there_and_back(num_chunks: int) -> AccessTrace:
    return unpinned(*range(num_chunks), *reversed(range(num_chunks)))


def test_every_iteration_starts_empty_after_a_step() -> None:
    plan = make_plan_of([make_chunk(i) for i in range(6)], rcache_blocks=2)
    result = simulate(plan, there_and_back(6), iterations=3)
    assert result.counters.fetches == 3 * (2 * 6 - 2)
    assert result.h2d_bytes == result.counters.fetches * BLOCK_BYTES
    assert (result.peak_blocks, result.peak_bytes) == (2, 2 * BLOCK_BYTES)


def test_frozen_chunks_survive_a_step() -> None:
    plan = make_plan_of([make_chunk(0), make_chunk(1, requires_grad=False)], rcache_blocks=2)
    assert simulate(plan, unpinned(0, 1), iterations=3).counters.fetches == 3 + 1


def test_ranks_prefetch_wherever_one_would() -> None:
    trace = unpinned(0, 1, 2, 3, 4, 5)
    counters = [
        simulate(make_plan_of([make_chunk(i, world_size=w) for i in range(6)], 4, 2, w), trace).counters for w in (1, 2)
    ]
    assert [(c.fetches, c.prefetches) for c in counters] == [(1, 5), (1, 5)]


def test_ranks_that_hold_everything_each_prefetch_as_one() -> None:
    plan = replace(make_plan_of([make_chunk(i, world_size=2) for i in range(6)], 4, 2, 2), num_copies=2)
    alone = make_plan_of([make_chunk(i) for i in range(6)], 4, 2)
    trace = unpinned(0, 1, 2, 3, 4, 5)
    assert simulate(plan, trace).counters == simulate(alone, trace).counters


def test_ranks_with_whole_shards_prefetch_as_one() -> None:
    """Also what a step has outdated, and they have to gather."""
    plan = replace(make_plan_of([make_chunk(i, world_size=2) for i in range(6)], 3, 2, 2), is_storage_distributed=False)
    alone = make_plan_of([make_chunk(i) for i in range(6)], 3, 2)
    for n in (1, 2):
        ranks, one = (simulate(each, there_and_back(6), iterations=n).counters for each in (plan, alone))
        assert (ranks.fetches, ranks.prefetches) == (one.fetches, one.prefetches)
        assert (ranks.fetches, ranks.prefetches) == (n, 8 * n)


def test_pins_that_last_until_the_end_of_backward_end_there() -> None:
    plan = make_plan_of([make_chunk(0), make_chunk(1)], rcache_blocks=1)
    trace = AccessTrace((Acquire((0,), is_pinned=True), Acquire((1,), is_pinned=False)))
    result = simulate(plan, trace, iterations=2)
    assert (result.counters.fetches, result.counters.overflows, result.peak_blocks) == (4, 2, 2)


def test_without_a_step_what_is_resident_stays() -> None:
    plan = make_plan_of([make_chunk(i) for i in range(6)], rcache_blocks=6)
    result = simulate(plan, there_and_back(6), iterations=3, steps=False)
    assert result.counters.fetches == 6


def test_no_rcache_fetches_less() -> None:
    random = Random(41)
    for _ in range(100):
        num_chunks, budget = random.randint(2, 5), random.randint(1, 3)
        accesses = [(random.randrange(num_chunks),) for _ in range(10)]
        plan = make_plan_of([make_chunk(i) for i in range(num_chunks)], budget)
        assert simulate(plan, unpinned(*accesses)).counters.fetches == fewest_fetches(accesses, budget)


def test_the_first_iteration_may_be_unknown() -> None:
    plan = make_plan_of([make_chunk(i) for i in range(6)], rcache_blocks=3, prefetch_depth=2)
    trace = there_and_back(6)
    recorded = simulate(plan, trace, iterations=1, is_trace_known=False)
    assert recorded.counters.prefetches == 0
    both = simulate(plan, trace, iterations=2, is_trace_known=False)
    assert both.counters.prefetches == simulate(plan, trace).counters.prefetches > 0


def test_prefetches_move_bytes_too() -> None:
    plan = make_plan_of([make_chunk(i) for i in range(6)], rcache_blocks=3, prefetch_depth=2)
    result = simulate(plan, there_and_back(6))
    moved = result.counters.fetches + result.counters.prefetches
    assert (result.counters.fetches, moved) == (1, 9)
    assert result.h2d_bytes == 9 * BLOCK_BYTES


def test_persistent_chunks_move_nothing() -> None:
    plan = make_plan_of([make_chunk(0, is_persistent=True, param_tier=Tier.GPU), make_chunk(1)], rcache_blocks=1)
    result = simulate(plan, unpinned(0, 1, (0, 1)))
    assert (result.counters.fetches, result.h2d_bytes, result.peak_blocks) == (1, BLOCK_BYTES, 1)


def test_shards_on_the_gpu_are_gathered_and_not_uploaded() -> None:
    chunks = [make_chunk(0, world_size=2, param_tier=Tier.GPU), make_chunk(1, world_size=2)]
    result = simulate(make_plan_of(chunks, 1, world_size=2), unpinned(0, 1))
    assert result.gathered_bytes == 2 * 2 * BLOCK_BYTES
    assert result.h2d_bytes == BLOCK_BYTES  # this rank's half of chunk 1


def test_whole_shards_are_gathered_once_after_each_step() -> None:
    chunks = [make_chunk(0, world_size=2), make_chunk(1, world_size=2, requires_grad=False)]
    plan = replace(make_plan_of(chunks, 1, world_size=2), is_storage_distributed=False)
    result = simulate(plan, unpinned(0, 1, 0), iterations=2)
    whole = 2 * BLOCK_BYTES
    assert result.counters.fetches == 6
    assert result.gathered_bytes == whole  # chunk 0, once, in the second iteration; chunk 1 is never updated
    assert result.d2h_bytes == whole
    assert result.h2d_bytes == 5 * whole + whole // 2


def test_large_chunks_count_their_blocks() -> None:
    plan = make_plan_of([make_chunk(0, blocks=3), make_chunk(1)], rcache_blocks=3)
    result = simulate(plan, unpinned(0, 1))
    assert (result.peak_blocks, result.peak_bytes) == (3, 3 * BLOCK_BYTES)
    assert result.counters.evictions == 1


def test_peaks_and_counters_of_random_traces() -> None:
    random = Random(42)
    for _ in range(200):
        num_chunks = random.randint(2, 7)
        chunks = [
            make_chunk(i, random.choice((1, 1, 2)), is_persistent=random.random() < 0.2) for i in range(num_chunks)
        ]
        plan = make_plan_of(chunks, random.randint(2, 6), random.randint(0, 3))
        trace = random_trace(random, num_chunks, 25)
        result = simulate(plan, trace, iterations=2)
        assert result == simulate(plan, trace, iterations=2)
        assert result.counters.accesses == 2 * sum(1 for _ in trace.acquires())
        assert result.counters.misses_of_trace == 0
        assert result.counters.overflows or result.peak_blocks <= plan.rcache_blocks
        assert result.peak_bytes <= result.peak_blocks * BLOCK_BYTES
        no_wait = result.counters.hits + result.counters.fetches
        managed = sum(len({i for i in e.ids if not chunks[i].is_persistent}) for e in trace.acquires())
        assert no_wait == 2 * managed


def test_a_trace_of_another_model_is_refused() -> None:
    plan = make_plan_of([make_chunk(0)], rcache_blocks=1)
    with pytest.raises(PlanError, match=r"the trace touches chunks \[3\], the plan has 1"):
        simulate(plan, unpinned(0, 3))
    with pytest.raises(StateError, match="dropped more often"):
        simulate(plan, AccessTrace((Drop((0,)),)))


def test_an_empty_trace_does_nothing() -> None:
    result = simulate(make_plan_of([make_chunk(0)], 1), AccessTrace(()))
    assert (result.counters.accesses, result.h2d_bytes, result.peak_blocks) == (0, 0, 0)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.0) for _ in range(4)
        )
        self.layers[0].requires_grad_(False)
        self.head = nn.Linear(32, 50)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


@pytest.mark.parametrize("prefetch_depth", [0, 1, 3])
@pytest.mark.parametrize("chunk_size", [8_000, 40_000])
def test_counters_are_those_of_a_real_run(chunk_size: int, prefetch_depth: int) -> None:
    model = Tied()
    plan = make_plan(model, placement_policy="cpu", chunk_size=chunk_size, prefetch_depth=prefetch_depth)
    engine = ElixirModule(model, plan)
    optimizer = ElixirOptimizer(engine, torch.optim.SGD(model.parameters(), lr=0.1))
    counted = []
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.backward(engine(torch.arange(8).view(2, 4)).sum())
        optimizer.step()
        counted.append(engine.stats())
    trace = engine.engine.traces["train"]
    engine.close()
    for iterations, stats in enumerate(counted, start=1):
        result = simulate(plan, trace, iterations=iterations, is_trace_known=False)
        for name in ("fetches", "prefetches", "hits", "evictions", "overflows", "misses_of_trace"):
            assert getattr(stats, name) == getattr(result.counters, name), name
        assert stats.peak_blocks == result.peak_blocks
        assert stats.h2d_bytes == result.h2d_bytes

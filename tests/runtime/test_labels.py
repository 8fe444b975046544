"""What traces of torch's profiler call the engine's work."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.dist import run_ranks
from tests.helpers.plans import make_plan

WIDTH = 32


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_trace_says_which_chunk_was_fetched_and_waited_for(prefetch: bool) -> None:
    """On demand, a chunk is waited for as soon as it is fetched."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    plan = make_plan(
        model, placement_policy="cpu", chunk_size=WIDTH * WIDTH * 4, gpu_bytes=4 * WIDTH * WIDTH * 4, prefetch=prefetch
    )
    module = ElixirModule(model, plan)
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.1))

    def step() -> None:
        optimizer.backward(module(torch.ones(4, WIDTH)).square().mean())
        optimizer.step()

    step()
    module.reset_stats()
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        step()
    ours = sorted((e for e in trace.events() if e.name.startswith("elixir: ")), key=lambda e: e.time_range.start)
    names = [e.name.removeprefix("elixir: ") for e in ours]
    fetched = [name.split()[-1] for name in names if name.startswith("fetch ")]
    stats = module.stats()
    assert len(fetched) == stats.fetches + stats.prefetches > 4
    assert {name for name in names if name.startswith("gradients ")} == {f"gradients {i}" for i in range(4)}
    moves = [name.replace("wait for chunk", "wait") for name in names if name.startswith(("fetch ", "wait for chunk "))]
    demanded = [one for one, other in zip(moves, moves[1:], strict=False) if other == one.replace("fetch", "wait")]
    if prefetch:
        assert stats.prefetches > 0
        assert len(demanded) < len(fetched)
    else:
        assert [name.split()[-1] for name in demanded] == fetched
    module.close()


def waits_for_ranks() -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    module = ElixirModule(model, make_plan(model, placement_policy="cpu", chunk_size=WIDTH * WIDTH * 4, world_size=2))
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.1))
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        optimizer.backward(module(torch.ones(4, WIDTH)).square().mean())
        optimizer.step()
    module.close()
    return [e.name for e in trace.events() if e.name == "elixir: wait for ranks"]


def test_a_trace_says_where_ranks_are_waited_for() -> None:
    assert all(len(found) > 4 for found in run_ranks(waits_for_ranks, 2))

"""The accesses that a profile foretells are those that the engine records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

from lightning_elixir import profile_memory
from lightning_elixir.plan.hardware import HardwareSpec
from lightning_elixir.plan.packing import PackedChunk, pack
from lightning_elixir.plan.profile import MemoryProfile, step_profile
from lightning_elixir.plan.simulator.counters import simulate
from lightning_elixir.plan.types import AccessTrace, Acquire, Drop
from lightning_elixir.profiling.parameters import param_specs
from tests.helpers.tiers import telling
from tests.helpers.training import Scheme, train_elixir
from tests.helpers.zoo import ZOO, make

KIB = 1 << 10


def zoo_profile(name: str) -> MemoryProfile:
    return profile_memory(make(name), {}, lambda model, inp: ZOO[name].loss(model, 0).backward())


def merged(trace: AccessTrace) -> list[set[int]]:
    """Accesses, without those of chunks that the one before has already."""
    found: list[set[int]] = []
    for access in trace.acquires():
        if not found or not set(access.ids) <= found[-1]:
            found.append(set(access.ids))
    return found


def unexpected(recorded: Sequence[set[int]], foretold: Sequence[set[int]]) -> tuple[list[set[int]], list[set[int]]]:
    """Recorded accesses that were not foretold, in order, and the other way round.

    A backward operator that needs several parameters is one access in a profile; the engine records each saved tensor.
    """
    missing, extra = [], []
    position, is_met = 0, False
    for ids in recorded:
        ahead = next((k for k in range(position, len(foretold)) if ids <= foretold[k]), None)
        if ahead is None:
            missing.append(ids)
            continue
        if ahead > position:
            extra += foretold[position + is_met : ahead]
        position, is_met = ahead, True
    return missing, extra + list(foretold[position + 1 :])


@pytest.mark.parametrize("name", telling(ZOO, "tied", "branching", "recurrent", "gpt2_checkpoint_reentrant"))
def test_accesses_are_the_engines(name: str) -> None:
    chunk_size = (4 if name in ("mlp", "conv") else 8) * KIB
    run = train_elixir(name, Scheme(steps=2), placement_policy="cpu", chunk_size=chunk_size, prefetch=False)
    plan = run.engine.plan
    recorded = run.engine.engine.traces["train"]
    packed = [PackedChunk(c.dtype, c.requires_grad, c.numel, c.members) for c in plan.chunks]
    foretold = step_profile(zoo_profile(name), packed, HardwareSpec.nominal()).trace
    missing, extra = unexpected(merged(recorded), merged(foretold))
    assert missing == []
    if name != "odd":  # reads a resident parameter again and again, which the engine does not see
        assert len(extra) <= (2 if name in ("recurrent", "attention") else 0)
    # What non-reentrant checkpointing recomputes stays until its backward, which asks the engine for nothing then.
    assert most_in_use(foretold) == most_in_use(recorded)
    actual, expected = simulate(plan, foretold), simulate(plan, recorded)
    assert actual.counters.fetches + actual.counters.prefetches == pytest.approx(
        expected.counters.fetches + expected.counters.prefetches, abs=1
    )


def most_in_use(trace: AccessTrace) -> int:
    return max(map(len, trace.in_use()))


class Container(nn.Module):
    """Uses a parameter of its own beside its children, and a child's without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.gain = nn.Parameter(torch.ones(8))
        self.second = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x * self.gain) * self.gain
        return nn.functional.linear(x, self.second.weight)


def events(found: MemoryProfile) -> Iterator[tuple[str, ...]]:
    for interval in found.timeline:
        yield from (("drop", *fqns) for fqns in interval.dropped)
        if interval.fqns:
            kind = "pin" if interval.is_pinned else "touch"
            yield (kind + (" in backward" if interval.is_backward else ""), *interval.fqns)


def test_pins_touches_and_drops_in_order() -> None:
    found = profile_memory(Container(), {"x": torch.zeros(2, 8)}, lambda m, i: m(i["x"]).sum().backward())
    assert list(events(found)) == [
        ("touch", "gain"),
        ("pin", "first.weight"),
        ("drop", "first.weight"),
        ("touch", "gain"),
        ("touch", "second.weight"),
        ("touch in backward", "second.weight"),
        ("touch in backward", "gain"),
        ("touch in backward", "first.weight"),
    ]
    assert [i.module for i in found.timeline if i.is_pinned] == ["first"]


def test_recomputation_pins_again_in_backward() -> None:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
            self.head = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False))

    inp = {"x": torch.zeros(2, 8, requires_grad=True)}
    found = profile_memory(Recomputed(), inp, lambda m, i: m(i["x"]).sum().backward())
    pinned = [(i.module, i.is_backward) for i in found.timeline if i.is_pinned]
    assert pinned == [("body.0", False), ("head", False), ("body.0", True)]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_keeps_frozen_parameters_too(use_reentrant: bool) -> None:
    """Backward of the first layer's input needs both weights; what is recomputed saves the transposed views of them."""

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=use_reentrant)

    inp = {"x": torch.zeros(2, 8, requires_grad=True)}
    found = profile_memory(Frozen(), inp, lambda m, i: m(i["x"]).sum().backward())
    held = [(i.module, i.held) for i in found.timeline if i.is_pinned and i.is_backward]
    assert held == [("body.0", ()), ("body.2", () if use_reentrant else ("body.0.weight",))]
    assert not any(i.held for i in found.timeline if not i.is_backward)


def test_tied_parameters_have_one_name() -> None:
    found = zoo_profile("tied")
    names = {spec.fqn for spec in param_specs(make("tied"))}
    assert {fqn for i in found.timeline for fqn in i.fqns} == names
    assert sorted(fqn for i in found.timeline for fqn in i.grads) == sorted(names)


def test_pins_end() -> None:
    for name in ("mlp", "attention", "gpt2_checkpoint", "t5"):
        held: list[tuple[str, ...]] = []
        for interval in zoo_profile(name).timeline:
            for fqns in interval.dropped:
                held.remove(fqns)
            if interval.is_pinned:
                held.append(interval.fqns)
        assert held == []


def test_events_of_chunks() -> None:
    found = profile_memory(Container(), {"x": torch.zeros(2, 8)}, lambda m, i: m(i["x"]).sum().backward())
    trace = step_profile(found, pack(param_specs(Container()), 64, 1), HardwareSpec.nominal()).trace
    assert sum(isinstance(e, Drop) for e in trace.events) == 1
    assert sum(isinstance(e, Acquire) for e in trace.events) == 7

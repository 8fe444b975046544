"""The blocks that gradients collect in: few, and what is computed waits for one only where it is needed."""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from lightning_elixir.core.device import Event
from lightning_elixir.plan.memory import GRAD_BLOCKS
from lightning_elixir.plan.types import Plan, Tier
from lightning_elixir.runtime import reducer
from lightning_elixir.runtime.chunk import Chunk
from lightning_elixir.runtime.landing import Landing
from lightning_elixir.runtime.reducer import Reducer
from lightning_elixir.wrapper import ElixirModule
from tests.helpers.asynchronous import asynchronous
from tests.helpers.plans import make_plan

SIZE = 16


class AllAtOnce(torch.autograd.Function):
    """A product with several matrices, whose gradients come together, as those of compiled code do."""

    @staticmethod
    def forward(ctx: Any, log: list[str], x: Tensor, *weights: Tensor) -> Tensor:
        ctx.log = log
        ctx.save_for_backward(x, *weights)
        return x @ torch.stack(weights).sum(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.log.append("backward")
        x, *weights = ctx.saved_tensors
        grad = x.T @ grads[0]
        return None, grads[0] @ torch.stack(weights).sum(0).T, *(grad.clone() for _ in weights)


class Layer(nn.Module):
    def __init__(self, log: list[str], num_weights: int) -> None:
        super().__init__()
        self.log = log
        self.weights = nn.ParameterList(torch.randn(SIZE, SIZE) / SIZE for _ in range(num_weights))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = AllAtOnce.apply(self.log, x, *self.weights)
        return result


class LateEvent:
    def __init__(self, event: Event, log: list[str]) -> None:
        self.event, self.log = event, log

    def wait(self) -> None:
        self.log.append("wait")
        self.event.wait()

    def synchronize(self) -> None:
        self.event.synchronize()

    def is_over(self) -> bool:
        return self.event.is_over()


def plan_of(model: nn.Module, num_on_device: int) -> Plan:
    """A chunk for each weight, in host memory but for every `num_on_device`-th (0: all)."""
    plan = make_plan(model, placement_policy="cpu", chunk_size=SIZE * SIZE)
    chunks = tuple(
        replace(c, param_tier=Tier.GPU, optim_tier=Tier.GPU, is_persistent=True)
        if num_on_device and c.id % num_on_device == 0
        else c
        for c in plan.chunks
    )
    assert all(len(c.members) == 1 for c in chunks)
    return replace(plan, chunks=chunks)


@pytest.mark.parametrize("num_on_device", [0, 2])
@pytest.mark.parametrize("num_weights", [2, 3])
def test_gradients_that_come_at_once_hold_up_nothing_but_each_other(
    num_weights: int, num_on_device: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two in each layer, both have a block, and the next layer is computed at once; a third waits for the first."""
    log: list[str] = []
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(log, num_weights) for _ in range(4)))
    plain, x = copy.deepcopy(model), torch.randn(SIZE, SIZE)
    plain(x).square().sum().backward()

    most_blocks = 0
    new_block, land = Reducer._new_block, Landing.land

    def counted(self: Reducer, chunk: Chunk) -> Tensor:
        nonlocal most_blocks
        if chunk.spec.optim_tier is not Tier.GPU:
            log.append("block")
        block = new_block(self, chunk)
        used = [i.chunk for i in self._in_flight] + [self._chunks[i] for i in self._collected] + [chunk]
        most_blocks = max(most_blocks, sum(c.spec.optim_tier is not Tier.GPU for c in used))
        return block

    def late(self: Landing, *args: Any, **options: Any) -> Event:
        log.append("landing")
        return LateEvent(land(self, *args, **options), log)

    monkeypatch.setattr(Reducer, "_new_block", counted)
    monkeypatch.setattr(Landing, "land", late)
    with asynchronous():
        module = ElixirModule(model, plan_of(model, num_on_device))
        log.clear()
        module(x).square().sum().backward()
        for (name, p), own in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(p.grad, own.grad), name  # type: ignore[arg-type]
        module.close()
    assert most_blocks == GRAD_BLOCKS
    first, *layers = [part.split() for part in " ".join(log).split("backward")]
    assert not first
    assert len(layers) == 4
    for layer in layers[:-1]:  # backward itself ends with waiting for all
        assert layer[-1] == "landing"  # and the next one is computed
        assert all(layer[i - 1] in ("block", "wait") for i, what in enumerate(layer) if what == "wait")
    assert any("wait" in layer for layer in layers[:-1])


def test_blocks_that_are_cast_for_the_reduction_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """They become no gradient shards, though states are on the device; as of experts that one rank has alone."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer([], 2) for _ in range(4)))
    most_blocks = 0
    new_block = Reducer._new_block

    def counted(self: Reducer, chunk: Chunk) -> Tensor:
        nonlocal most_blocks
        block = new_block(self, chunk)
        most_blocks = max(most_blocks, len(self._in_flight) + len(self._collected) + 1)
        return block

    monkeypatch.setattr(Reducer, "_new_block", counted)
    with asynchronous():
        module = ElixirModule(model, plan_of(model, 1))
        module.engine.reducer._reduce_dtype = torch.float64
        module(torch.randn(SIZE, SIZE)).sum().backward()
        module.close()
    assert most_blocks == GRAD_BLOCKS


def test_what_fails_to_land_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lane has its memory already: an item that is dropped would give that to others."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer([], 2) for _ in range(2)))
    module = ElixirModule(model, plan_of(model, 0))
    log: list[str] = []
    reducer, lane = module.engine.reducer, module.engine.device.reduce_lane
    record = lane.record

    def fail(*args: Any, **options: Any) -> Event:
        raise RuntimeError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(Landing, "land", fail)
        patched.setattr(lane, "record", lambda: LateEvent(record(), log))
        with pytest.raises(RuntimeError, match="no room"):
            module(torch.randn(SIZE, SIZE)).sum().backward()
        with suppress(Exception):
            reducer.abandon()
    assert log == ["wait"]
    assert not reducer._in_flight
    module.close()


class Mixed(nn.Module):
    """Large and small parameters, one that is used twice, and one that only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(SIZE, 4 * SIZE), nn.Linear(4 * SIZE, SIZE)
        self.norm, self.extra = nn.LayerNorm(SIZE), nn.Parameter(torch.randn(SIZE))

    def forward(self, x: Tensor, number: int) -> Tensor:
        for _ in range(2):  # under reentrant checkpointing each time has a gradient of its own
            x = x + torch.utils.checkpoint.checkpoint(self.part, x, use_reentrant=True)
        return self.norm(x) * self.extra if number % 2 else self.norm(x)

    def part(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(self.norm(x)).relu())
        return result


@pytest.mark.parametrize("most", [0, 4 * SIZE, 4 * SIZE * SIZE, 2**30])
def test_small_gradients_are_copied_together(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducer, "_SMALL_BYTES", most)
    copies: list[int] = []
    together = torch._foreach_copy_

    def noted(targets: list[Tensor], sources: list[Tensor]) -> None:
        assert all(source.nbytes <= most for source in sources)
        copies.append(len(targets))
        together(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", noted)
    torch.manual_seed(3)
    expected = Mixed()
    with asynchronous():
        plan = make_plan(expected, placement_policy="cuda")
        actual = ElixirModule(copy.deepcopy(expected), plan, device=torch.device("cpu"))
    assert len(actual.engine.chunks) == 1
    for number in range(4):
        x = torch.randn(5, SIZE, requires_grad=True)
        expected(x, number).square().sum().backward()
        actual(x, number).square().sum().backward()
        own = dict(actual.module.named_parameters())
        for name, parameter in expected.named_parameters():
            grad = own[name].grad
            assert (grad is None) is (parameter.grad is None)
            assert grad is None or torch.equal(grad, parameter.grad)
        expected.zero_grad()
        actual.zero_grad()
    # Those of the norm, `extra` and one bias; the other bias; both weights.
    assert max(copies, default=0) == {0: 0, 4 * SIZE: 4, 4 * SIZE * SIZE: 5}.get(most, 7)

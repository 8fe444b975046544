"""A step that fails half way leaves values that nobody must train on, or save."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_elixir.errors import StateError
from lightning_elixir.optim import HybridAdam, execution
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.plans import make_plan


def build(optimizer_class: type[torch.optim.Optimizer]) -> tuple[ElixirModule, ElixirOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(5)])
    optimizer = optimizer_class(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    module = ElixirModule(model, make_plan(model, placement_policy="cpu", chunk_size=20 * 1024))
    return module, ElixirOptimizer(module, optimizer)


def step(module: ElixirModule, optimizer: ElixirOptimizer) -> None:
    optimizer.backward(module(torch.ones(2, 64)).sum())
    optimizer.step()


@pytest.mark.parametrize("optimizer_class", [HybridAdam, torch.optim.AdamW])
def test_an_exception_in_an_update_ends_the_engine(
    optimizer_class: type[torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, optimizer = build(optimizer_class)
    step(module, optimizer)
    calls = []

    def interrupted(*args: object, **options: object) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt

    if optimizer_class is HybridAdam:
        monkeypatch.setattr(execution.UpdateRunner, "_run_timed", interrupted)
    else:
        inner = next(iter(optimizer._states.inner.values()))
        monkeypatch.setattr(type(inner), "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step(module, optimizer)
    for use in (module.full_state_dict, optimizer.state_dict, lambda: step(module, optimizer)):
        with pytest.raises(StateError, match="in the middle of an optimizer step .KeyboardInterrupt.*checkpoint"):
            use()


def test_states_are_counted() -> None:
    module, optimizer = build(HybridAdam)
    assert optimizer.state_count == (2, 0)
    step(module, optimizer)
    assert optimizer.state_count == (2, 0)
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    adam = torch.optim.AdamW(model.parameters(), amsgrad=True)
    module = ElixirModule(model, make_plan(model))
    optimizer = ElixirOptimizer(module, adam)
    step(module, optimizer)
    assert optimizer.state_count == (3, 0)

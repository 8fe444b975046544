"""Threads of the user's beside training: served, or refused there, and training goes on as if they were not."""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_elixir.errors import StateError
from lightning_elixir.optim.hybrid_adam import HybridAdam
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.plans import make_plan
from tests.helpers.training import step_side_by_side

WIDTH = 64


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(10)])


def _wrap(model: nn.Module, device: str = "cpu") -> tuple[ElixirModule, ElixirOptimizer]:
    plan = make_plan(model, placement_policy="const", offload_param_frac=1.0, chunk_size=17408)
    module = ElixirModule(model, dataclasses.replace(plan, rcache_blocks=3), device=torch.device(device))
    return module, ElixirOptimizer(module, HybridAdam(model.parameters(), lr=1e-2))


def _in_thread(work: Callable[[], Any]) -> Any:
    """What `work` returns or raises in a thread of its own."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, name="monitor", daemon=True)
    thread.start()
    thread.join(60)
    assert found, "the thread hangs"
    return found[0]


def test_a_monitor_reads_parameters_all_the_time() -> None:
    train_beside_a_monitor("cpu")


def train_beside_a_monitor(device: str) -> None:
    plain = _net()
    model = copy.deepcopy(plain)
    module, optimizer = _wrap(model, device)
    oracle = HybridAdam(plain.to(device).parameters(), lr=1e-2)
    is_over = threading.Event()
    num_reads, errors = 0, []

    def watch() -> None:
        nonlocal num_reads
        while not is_over.is_set():
            for p in model.parameters():
                try:
                    assert p.detach().norm().isfinite()
                    num_reads += 1
                except Exception as error:
                    errors.append(error)
                is_over.wait(1e-4)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    for _ in range(25):
        x = torch.randn(8, WIDTH, device=device)
        step_side_by_side(plain, oracle, module, optimizer, x)
    is_over.set()
    thread.join(60)
    assert not thread.is_alive()
    assert num_reads + len(errors) > 25
    assert {type(error) for error in errors} <= {StateError}
    state = module.state_dict()
    assert all(torch.equal(state[name], value.cpu()) for name, value in plain.state_dict().items())
    assert module.stats().evictions > 300


def test_between_steps_another_thread_is_served() -> None:
    plain = _net()
    model = copy.deepcopy(plain)
    module, optimizer = _wrap(model)
    optimizer.backward(module(torch.randn(8, WIDTH)).sum())
    optimizer.zero_grad()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(_in_thread(lambda p=p: p.detach().clone()), q)
    values = _in_thread(model.state_dict)
    assert all(torch.equal(values[name], value) for name, value in plain.state_dict().items())


def test_inside_forward_another_thread_is_refused_and_told_what_to_do() -> None:
    model = _net()
    module, optimizer = _wrap(model)
    weight, seen = model[0][0].weight, []

    def look(*args: Any) -> None:
        seen.append(_in_thread(lambda: float(weight.sum())))
        seen.append(_in_thread(lambda: module(torch.randn(8, WIDTH))))
        seen.append(_in_thread(model.state_dict))
        assert _in_thread(lambda: tuple(weight.shape)) == (WIDTH, WIDTH)

    model[5].register_forward_hook(look)
    x = torch.randn(8, WIDTH)
    loss = module(x).square().mean()
    assert len(seen) == 3
    for error in seen:
        assert isinstance(error, StateError)
        assert "thread 'monitor'" in str(error)
        assert "callback" in str(error)
    optimizer.backward(loss)  # and nothing has happened to this one
    plain = _net()
    plain(x).square().mean().backward()
    grads = module.full_grads()
    assert all(torch.equal(grads[name], p.grad) for name, p in plain.named_parameters() if p.grad is not None)


def test_one_thread_after_the_other_may_train() -> None:
    plain = _net()
    module, optimizer = _wrap(copy.deepcopy(plain))
    oracle = HybridAdam(plain.parameters(), lr=1e-2)

    def train(net: Any, step: Any) -> float:
        loss = net(torch.full((8, WIDTH), 0.1)).square().mean()
        optimizer.backward(loss) if step is optimizer else loss.backward()
        step.step()
        step.zero_grad()
        return loss.item()

    for _ in range(2):
        assert _in_thread(lambda: train(module, optimizer)) == train(plain, oracle)
        assert train(module, optimizer) == train(plain, oracle)
    with pytest.raises(TypeError):  # and an error in a thread is its own
        raise _in_thread(lambda: module())
    assert train(module, optimizer) == train(plain, oracle)

"""Threads of the user's beside training: served, or refused there, and training goes on as if they were not."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_elixir.errors import StateError
from lightning_elixir.optim.hybrid_adam import HybridAdam
from tests.helpers.threads import WIDTH, new_net, train_beside_a_monitor, wrap


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


def test_between_steps_another_thread_is_served() -> None:
    plain = new_net()
    model = copy.deepcopy(plain)
    module, optimizer = wrap(model)
    optimizer.backward(module(torch.randn(8, WIDTH)).sum())
    optimizer.zero_grad()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(_in_thread(lambda p=p: p.detach().clone()), q)
    values = _in_thread(model.state_dict)
    assert all(torch.equal(values[name], value) for name, value in plain.state_dict().items())


def test_inside_forward_another_thread_is_refused_and_told_what_to_do() -> None:
    model = new_net()
    module, optimizer = wrap(model)
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
    plain = new_net()
    plain(x).square().mean().backward()
    grads = module.full_grads()
    assert all(torch.equal(grads[name], p.grad) for name, p in plain.named_parameters() if p.grad is not None)


def test_one_thread_after_the_other_may_train() -> None:
    plain = new_net()
    module, optimizer = wrap(copy.deepcopy(plain))
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

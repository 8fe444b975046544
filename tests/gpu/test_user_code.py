"""What users do beside training, on a device: `p.grad`, threads that read, fp32 layers. The bodies of the CPU tests."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn

from lightning_elixir.optim.hybrid_adam import HybridAdam
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.keep_fp32 import train_through_moves
from tests.helpers.plans import make_plan
from tests.helpers.threads import WIDTH, new_net, train_beside_a_monitor, wrap
from tests.helpers.visible_gradients import ACTIONS, PLACEMENTS, train
from tests.helpers.zoo import make

pytestmark = pytest.mark.gpu


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return HybridAdam([p for p in model.parameters() if p.requires_grad], lr=0.01)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("action", ACTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_what_users_do_to_gradients_counts(action: Any, placement: str, micro_batches: int) -> None:
    plain = make("gpt2").cuda()
    expected = train(plain, plain, _adam(plain), action, "gpt2", micro_batches)
    model = make("gpt2")
    module = ElixirModule(model, make_plan(model, **PLACEMENTS[placement]), device=torch.device("cuda"))
    found = train(module, model, ElixirOptimizer(module, _adam(model)), action, "gpt2", micro_batches)
    state = module.state_dict()
    if action.__name__ == "clip_norm_foreach":  # the norm of other groups of tensors
        assert found == pytest.approx(expected, rel=1e-5)
        return
    assert found == expected
    assert all(torch.equal(state[name].cpu(), value.cpu()) for name, value in plain.state_dict().items())


def test_a_monitor_reads_parameters_all_the_time() -> None:
    train_beside_a_monitor("cuda")


def test_a_read_on_another_stream_takes_no_memory_that_queued_work_needs() -> None:
    """The thread has a chunk fetched into memory of its own stream; training reads it there, late, and drops it."""
    model = new_net()
    plain = copy.deepcopy(model).cuda()
    module, optimizer = wrap(model, "cuda")
    x = torch.randn(8, WIDTH, device="cuda")
    expected = plain(x)
    optimizer.backward(module(x).sum())  # from here on, this is the thread that trains
    optimizer.zero_grad()

    def read(layer: int) -> None:
        thread = threading.Thread(target=lambda: model[layer][0].weight.detach().norm().item(), daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()

    mine = torch.cuda.Stream()
    mine.wait_stream(torch.cuda.current_stream())
    for layer in reversed(range(10)):  # what the next forward begins with is read last, and stays
        read(layer)
    with torch.cuda.stream(mine), torch.no_grad():
        torch.cuda._sleep(500_000_000)  # some tenths of a second, in which the host goes on
        found = module(x)
    for layer in range(10):
        read(layer)
    mine.synchronize()
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("recompute", "is_frozen"), [(None, False), (None, True), ("reentrant", False), ("non-reentrant", False)]
)
def test_the_bits_of_plain_autocast_through_moves(recompute: str | None, is_frozen: bool) -> None:
    train_through_moves(recompute, is_frozen, "cuda")

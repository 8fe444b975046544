"""What users do beside training, on a device: `p.grad`, threads that read, fp32 layers. The bodies of the CPU tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_elixir.optim.hybrid_adam import HybridAdam
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.keep_fp32 import train_through_moves
from tests.helpers.plans import make_plan
from tests.helpers.threads import train_beside_a_monitor
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


@pytest.mark.parametrize(
    ("recompute", "is_frozen"), [(None, False), (None, True), ("reentrant", False), ("non-reentrant", False)]
)
def test_the_bits_of_plain_autocast_through_moves(recompute: str | None, is_frozen: bool) -> None:
    train_through_moves(recompute, is_frozen, "cuda")

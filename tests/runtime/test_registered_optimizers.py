"""Optimizers of users, registered as element-wise, over chunks: plain PyTorch bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_elixir
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.dist import run_ranks
from tests.helpers.plans import make_plan
from tests.helpers.tiers import telling
from tests.helpers.users_optimizers import Lion, ScheduleFree

STEPS = 4


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 48), nn.Linear(48, 7)
    )


def _loss(model: nn.Module, seed: int) -> Tensor:
    data = torch.randn(4, 24, generator=torch.Generator().manual_seed(seed))
    loss: Tensor = model(data).square().mean()
    return loss


def _made(cls: type[torch.optim.Optimizer], model: nn.Module) -> torch.optim.Optimizer:
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return cls([{"params": decay}, {"params": rest, "lr": 0.02}])  # type: ignore[call-arg]


def _modes(optimizer: Any, mode: str) -> None:
    if hasattr(type(optimizer), mode) and not (isinstance(optimizer, ElixirOptimizer) and not optimizer.has_modes):
        getattr(optimizer, mode)()


def _plain(cls: type[torch.optim.Optimizer], world_size: int) -> tuple[list[float], dict[str, Tensor], Any]:
    model = _net()
    optimizer, evaluated = _made(cls, model), []
    _modes(optimizer, "train")
    for step in range(STEPS):
        for rank in range(world_size):
            (_loss(model, step * world_size + rank) / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
        _modes(optimizer, "eval")
        evaluated.append(_loss(model, 99).item())
        _modes(optimizer, "train")
    return evaluated, model.state_dict(), optimizer.state_dict()


def _train(cls: type[torch.optim.Optimizer], world_size: int, rank: int, **plan: Any) -> tuple[Any, ...]:
    lightning_elixir.register_elementwise(cls)
    model = _net()
    module = ElixirModule(model, make_plan(model, world_size=world_size, chunk_size=4096, **plan))
    inner = _made(cls, model)
    optimizer, evaluated = ElixirOptimizer(module, inner, init_step=True), []
    _modes(inner, "train")  # the user's own object knows what to do
    for step in range(STEPS):
        optimizer.backward(_loss(module, step * world_size + rank))
        optimizer.step()
        optimizer.zero_grad()
        _modes(optimizer, "eval")
        with torch.no_grad():
            evaluated.append(_loss(module, 99).item())
        _modes(optimizer, "train")
        if step == 1:  # states go in and out
            state = optimizer.state_dict()
            optimizer.load_state_dict(module.engine.comm.exchange_objects(state)[0])
    result = evaluated, module.full_state_dict(rank0_only=False), optimizer.state_dict(), module.stats().evictions
    module.close()
    return result


@pytest.mark.parametrize("cls", [Lion, ScheduleFree])
@pytest.mark.parametrize("policy", ["cpu", "cuda"])
def test_equals_plain_torch(cls: type[torch.optim.Optimizer], policy: str) -> None:
    losses, values, states = _plain(cls, 1)
    got = _train(cls, 1, 0, placement_policy=policy)
    assert got[0] == losses
    assert all(torch.equal(got[1][name], value) for name, value in values.items())
    assert got[2]["param_groups"] == states["param_groups"]
    for number, state in states["state"].items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(got[2]["state"][number][key]), torch.as_tensor(value)), (number, key)
    assert policy == "cuda" or got[3] > 0


def _on_rank(cls: type[torch.optim.Optimizer]) -> tuple[Any, ...]:
    return _train(cls, 2, torch.distributed.get_rank(), placement_policy="cpu")


@pytest.mark.parametrize("cls", telling([Lion, ScheduleFree], "Lion"))
def test_two_ranks(cls: type[torch.optim.Optimizer]) -> None:
    losses, values, states = _plain(cls, 2)
    for rank, got in enumerate(run_ranks(_on_rank, 2, cls)):
        # Halves of gradients are exact, so the mean of two ranks is that of two backwards.
        assert got[0] == losses
        assert all(torch.equal(got[1][name], value) for name, value in values.items())
        assert rank or got[2]["param_groups"] == states["param_groups"]

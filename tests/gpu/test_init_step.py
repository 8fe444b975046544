"""`init_step=True` on a device: the memory of states is taken, and an optimizer that has stepped goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.plans import make_plan

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


def _net(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))


def _loss(model: Any, seed: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    loss: torch.Tensor = model(torch.randn(4, width, generator=generator).cuda()).square().mean()
    return loss


def test_device_memory_is_taken_before_the_first_step() -> None:
    width = 1024
    _loss(_net(width).cuda(), 0, width).backward()  # cuBLAS takes its own memory
    model = _net(width)
    module = ElixirModule(model, make_plan(model, placement_policy="cuda", chunk_size=8 * 1024**2), device=CUDA)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    before = torch.cuda.memory_allocated()
    optimizer = ElixirOptimizer(module, inner, init_step=True)
    taken = torch.cuda.memory_allocated() - before
    assert taken >= 4 * width * width * 4
    optimizer.backward(_loss(module, 0, width))
    optimizer.step()
    optimizer.zero_grad()
    assert torch.cuda.memory_allocated() - before <= taken + 2**20
    module.close()


@pytest.mark.parametrize("init_step", [False, True])
@pytest.mark.parametrize("settings", [{"fused": True}, {"capturable": True}, {"foreach": True}], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam])
def test_an_optimizer_that_has_stepped_on_the_device(
    kind: type[torch.optim.Optimizer], settings: dict[str, bool], init_step: bool
) -> None:
    if kind is torch.optim.NAdam and "fused" in settings:
        pytest.skip("NAdam has no fused form")
    models = [_net(32).cuda() for _ in range(2)]
    inners = [kind(m.parameters(), lr=1e-2, **settings) for m in models]  # type: ignore[call-arg]
    for model, inner in zip(models, inners, strict=True):
        for seed in (100, 101):
            _loss(model, seed, 32).backward()
            inner.step()
            inner.zero_grad()
    plain, wrapped = models
    module = ElixirModule(wrapped, make_plan(wrapped, placement_policy="cuda", chunk_size=4096), device=CUDA)
    optimizer = ElixirOptimizer(module, inners[1], init_step=init_step)
    for seed in range(3):
        _loss(plain, seed, 32).backward()
        inners[0].step()
        inners[0].zero_grad()
        optimizer.backward(_loss(module, seed, 32))
        optimizer.step()
        optimizer.zero_grad()
    values = module.full_state_dict()
    assert [k for k, v in plain.state_dict().items() if not torch.equal(values[k], v.cpu())] == []
    module.close()

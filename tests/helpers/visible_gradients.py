"""What users do with `p.grad`, and a training that does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_elixir.plan.types import UpdateTiming
from lightning_elixir.wrapper import ElixirOptimizer
from tests.helpers.zoo import ZOO

PLACEMENTS: dict[str, dict[str, Any]] = {
    "cpu": {"placement_policy": "cpu", "chunk_size": 8 * 1024},
    "cuda": {"placement_policy": "cuda", "chunk_size": 8 * 1024},
    "cpu_behind": {
        "placement_policy": "cpu",
        "chunk_size": 8 * 1024,
        "update_timing": UpdateTiming.BEHIND_FORWARD,
    },
}


def nothing(parameters: list[nn.Parameter]) -> None:
    return


def look(parameters: list[nn.Parameter]) -> None:
    assert sum(float(p.grad.abs().sum()) for p in parameters if p.grad is not None) > 0


def scale_in_place(parameters: list[nn.Parameter]) -> None:
    for i, p in enumerate(parameters):
        if p.grad is not None:
            p.grad.mul_(1.0 + 0.1 * i)


def scale_data(parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        if p.grad is not None:
            p.grad.data.mul_(0.5)  # which no version counter shows


def assign(parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        if p.grad is not None:
            p.grad = p.grad * 0.25 + 0.01


def assign_to_some(parameters: list[nn.Parameter]) -> None:
    parameters[0].grad = torch.full_like(parameters[0], 0.125)
    held = parameters[0].grad
    assert parameters[0].grad is held
    held.add_(1.0)


def add_noise(parameters: list[nn.Parameter]) -> None:
    torch.manual_seed(7)
    for p in parameters:
        if p.grad is not None:
            p.grad.add_(torch.randn(p.grad.shape).to(p.grad) * 0.01)


def drop_some(parameters: list[nn.Parameter]) -> None:
    for p in parameters[::2]:
        p.grad = None


def clip_norm(parameters: list[nn.Parameter]) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, 0.05, foreach=False)


def clip_norm_foreach(parameters: list[nn.Parameter]) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, 0.05, foreach=True)


def clip_value(parameters: list[nn.Parameter]) -> None:
    torch.nn.utils.clip_grad_value_(parameters, 0.001)


def one_element(parameters: list[nn.Parameter]) -> None:
    with torch.no_grad():
        parameters[0].grad.view(-1)[3] = 2.0


ACTIONS: tuple[Callable[[list[nn.Parameter]], None], ...] = (
    nothing, look, scale_in_place, scale_data, assign, assign_to_some, add_noise, drop_some, clip_norm,
    clip_norm_foreach, clip_value, one_element,
)  # fmt: skip


def train(net: Any, model: nn.Module, optimizer: Any, action: Any, name: str, micro_batches: int = 1) -> list[float]:
    losses = []
    for step in range(3):
        for micro in range(micro_batches):
            loss = ZOO[name].loss(net, step * micro_batches + micro)
            optimizer.backward(loss) if isinstance(optimizer, ElixirOptimizer) else loss.backward()
            losses.append(loss.item())
        action([p for p in model.parameters() if p.requires_grad])
        optimizer.step()
        optimizer.zero_grad()
    return losses

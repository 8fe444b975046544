"""A training loop under Fabric, for our strategy and for Lightning's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_elixir._lightning import Fabric
from lightning_elixir.fabric import ElixirStrategy
from tests.strategy.models import TIGHT, WIDTH, make_layers, make_optimizer


@dataclass(frozen=True)
class Loop:
    """How to train."""

    optimizer: str = "adamw"
    micro_batches: int = 1
    max_norm: float | None = None
    clip_value: float | None = None
    precision: Any = "32-true"
    devices: int = 1
    steps: int = 5
    is_joint: bool = True
    """Module and optimizer are set up by one call."""
    first_step: int = 0


@dataclass
class Run:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    optimizer_state: dict[str, Any] = field(default_factory=dict)
    evictions: int = 0


def make_net() -> nn.Module:
    torch.manual_seed(7)
    return make_layers()


def batch_of(step: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(4, WIDTH, generator=generator), torch.randint(0, 4, (4,), generator=generator)


def make_fabric(strategy: Any, loop: Loop = Loop()) -> Any:
    if isinstance(strategy, dict):
        strategy = ElixirStrategy(**strategy)
    fabric = Fabric(accelerator="cpu", devices=loop.devices, strategy=strategy, precision=loop.precision)
    fabric.launch()
    return fabric


def set_up(fabric: Any, loop: Loop, make: Callable[[], nn.Module] = make_net) -> tuple[Any, Any]:
    net = make()
    if loop.is_joint:
        model, optimizer = fabric.setup(net, make_optimizer(loop.optimizer, net.parameters(), 1e-2))
        return model, optimizer
    model = fabric.setup_module(net)
    return model, fabric.setup_optimizers(make_optimizer(loop.optimizer, model.parameters(), 1e-2))


def run_steps(
    fabric: Any, model: Any, optimizer: Any, loop: Loop, before: Callable[[int], None] = lambda step: None
) -> Run:
    """Train.

    Args:
        before: Called with the number of each step, before it.
    """
    run = Run()
    torch.manual_seed(11 + fabric.global_rank)
    for step in range(loop.first_step, loop.first_step + loop.steps):
        before(step)
        for micro in range(loop.micro_batches):
            x, y = batch_of(step * loop.micro_batches + micro, fabric.global_rank)
            with fabric.no_backward_sync(model, enabled=micro < loop.micro_batches - 1):
                loss = nn.functional.cross_entropy(model(x).float(), y) / loop.micro_batches
                fabric.backward(loss)
            run.losses.append(loss.item())
        if loop.max_norm is not None:
            run.norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=loop.max_norm)))
        if loop.clip_value is not None:
            fabric.clip_gradients(model, optimizer, clip_val=loop.clip_value)
        optimizer.step()
        optimizer.zero_grad()
    return run


def collect(fabric: Any, model: Any, optimizer: Any, run: Run) -> Run:
    run.state = {key: value.detach().clone() for key, value in model.state_dict().items()}
    run.optimizer_state = copy.deepcopy(optimizer.state_dict())
    if isinstance(fabric.strategy, ElixirStrategy):
        run.evictions = fabric.strategy.stats().evictions
    return run


def train(strategy: Any, loop: Loop = Loop(), make: Callable[[], nn.Module] = make_net) -> Run:
    fabric = make_fabric(strategy, loop)
    model, optimizer = set_up(fabric, loop, make)
    run = collect(fabric, model, optimizer, run_steps(fabric, model, optimizer, loop))
    if isinstance(fabric.strategy, ElixirStrategy):
        fabric.strategy.close()
    return run


__all__ = ["TIGHT", "Loop", "Run", "batch_of", "collect", "make_fabric", "make_net", "run_steps", "set_up", "train"]

"""Optimizers as `Fabric` wraps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_elixir.errors import PlanError
from lightning_elixir.wrapper import ElixirOptimizer


class SteppedByFabric(ElixirOptimizer):
    """Fabric's wrapper inherits the class of what it wraps, and would keep to itself what these methods set."""

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        super(SteppedByFabric, _inside(self)).zero_grad(set_to_none)

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super(SteppedByFabric, _inside(self)).add_param_group(param_group)

    @override
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        return super(SteppedByFabric, _inside(self)).clip_grad_norm_(max_norm, norm_type)

    @override
    def clip_grad_value_(self, clip_value: float) -> None:
        super(SteppedByFabric, _inside(self)).clip_grad_value_(clip_value)

    @override
    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        return super(SteppedByFabric, _inside(self)).grad_norm(norm_type)


def _inside(optimizer: SteppedByFabric) -> SteppedByFabric:
    """The optimizer itself, or the one that Fabric's wrapper holds."""
    held = vars(optimizer).get("_optimizer")
    return held if isinstance(held, SteppedByFabric) else optimizer


def set_up_optimizer(optimizer: Optimizer) -> ElixirOptimizer:
    """Raises `PlanError` for one that was not set up."""
    if not isinstance(optimizer, ElixirOptimizer):
        raise PlanError(
            f"{type(optimizer).__name__} was not set up: pass what fabric.setup() or fabric.setup_optimizers() gave"
        )
    return optimizer


def point_to(optimizer: Optimizer, names: Mapping[int, str], parameters: Mapping[str, nn.Parameter]) -> None:
    """Have the optimizer hold a module's parameters as they are now.

    Args:
        names: Of those that it holds, by `id`.
        parameters: By name.
    """
    for group in optimizer.param_groups:
        before: Sequence[nn.Parameter] = group["params"]
        group["params"] = [parameters[names[id(p)]] for p in before]
        for old, new in zip(before, group["params"], strict=True):
            if old is not new and old in optimizer.state:
                optimizer.state[new] = optimizer.state.pop(old)

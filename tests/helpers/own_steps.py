"""Optimizers with a step of their own."""

from __future__ import annotations

import copy
from typing import Any

import torch

from lightning_elixir import HybridAdam


class Inherits(torch.optim.RMSprop):
    """torch puts a wrapper around the step that it inherits."""


class Counts(torch.optim.AdamW):
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.log: list[Any] = []

    def step(self, closure: Any = None) -> Any:
        self.log.append("before")
        loss = super().step(closure)
        self.log.append(None if loss is None else loss.item())
        return loss


class CountsAgain(Counts):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.log.append("outer")
        return super(CountsAgain, self).step(closure)  # noqa: UP008 - people write it


class WarmsUp(torch.optim.SGD):
    """Another learning rate in every step, and weights that stay in a box."""

    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        for group in self.param_groups:
            group["lr"] = 1e-2 * self.num_steps
        result = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.clamp_(-0.2, 0.2)
        return result


class EverySecond(HybridAdam):
    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        return super().step(closure) if self.num_steps % 2 == 0 else None


class Clears(torch.optim.Adam):
    num_cleared = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.num_cleared += 1
        super().zero_grad(set_to_none)


class Mixin:
    def step(self, closure: Any = None) -> Any:
        self.mixed = getattr(self, "mixed", 0) + 1
        return super().step(closure)  # type: ignore[misc]


class Mixed(Mixin, torch.optim.NAdam):
    pass


CLASSES = [Inherits, Counts, CountsAgain, WarmsUp, EverySecond, Clears, Mixed]


def noted(optimizer: Any) -> dict[str, Any]:
    """What a class has noted by itself."""
    known = ("log", "num_steps", "num_cleared", "mixed")
    return {name: copy.copy(getattr(optimizer, name)) for name in known if hasattr(optimizer, name)}

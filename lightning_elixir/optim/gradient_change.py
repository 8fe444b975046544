"""What a step does to gradients before it updates with them, as a value: an update may run later."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor


class Transform(NamedTuple):
    """Multiplies by `value`, or clamps to [-value, value]."""

    kind: Literal["factor", "clamp"]
    value: float


@dataclass(frozen=True)
class GradientChange:
    """Takes the loss scale out, then clips."""

    unscale: float | None = None
    """The inverse loss scale; None: gradients are without a loss scale."""
    clips: tuple[Transform, ...] = ()
    """In this order."""

    @property
    def is_nothing(self) -> bool:
        return self.unscale is None and not self.clips

    @property
    def inverse_scale(self) -> float:
        """What takes the loss scale out; 1 where there is none."""
        return 1.0 if self.unscale is None else self.unscale

    @property
    def is_factor(self) -> bool:
        """Whether all of it is one factor."""
        return all(clip.kind == "factor" for clip in self.clips)

    @property
    def grad_factor(self) -> float:
        """For `FlatUpdate`: the factor, if all of it is one."""
        return math.prod((c.value for c in self.clips), start=self.inverse_scale) if self.is_factor else 1.0

    @property
    def change_grad(self) -> Callable[[Tensor], None] | None:
        """For `FlatUpdate`: what is no factor."""
        return None if self.is_factor else self.apply_

    def in_dtype(self, dtype: torch.dtype) -> GradientChange:
        """The same with limits as numbers of this dtype: what a clamp makes of a gradient in it."""
        if dtype.itemsize >= 4 or self.is_factor:
            return self
        limits = (c.value if c.kind == "factor" else torch.tensor(c.value, dtype=dtype).item() for c in self.clips)
        return replace(self, clips=tuple(Transform(c.kind, v) for c, v in zip(self.clips, limits, strict=True)))

    def apply_(self, grad: Tensor) -> None:
        """Change a gradient in place."""
        if self.unscale is not None:
            grad.mul_(self.unscale)
        for kind, value in self.clips:
            if kind == "factor":
                grad.mul_(value)
            else:
                grad.clamp_(-value, value)

    def applied(self, grad: Tensor) -> Tensor:
        """A changed copy of the same dtype, or `grad` itself where nothing changes."""
        if self.is_nothing:
            return grad
        result = grad.clone()
        self.apply_(result)
        return result

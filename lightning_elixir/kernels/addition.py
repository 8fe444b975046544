"""How a gradient comes to a sum of gradients: the operations, in torch's words."""

from __future__ import annotations

from enum import IntEnum

from torch import Tensor

# What is added at once: torch widens 16-bit operands in memory of their size, and this stays in the cache.
_PIECE_NUMEL = 1024 * 1024


class Addition(IntEnum):
    """What a gradient is to a sum."""

    PUT = 0
    """The first of it."""
    ADD = 1
    """One more, in the dtype of the sum."""
    ADD_ROUNDED = 2
    """One more, in the dtype of the gradient: the sum, though wider, holds such values alone."""


def run_addition(total: Tensor, grad: Tensor, addition: Addition) -> None:
    """Bring a gradient to a sum by torch's operations, piece by piece.

    Args:
        total: 1-D; the sum, changed in place.
        grad: 1-D, same numel and device, of the same dtype or a narrower one.
        addition: What `grad` is to `total`.
    """
    for start in range(0, total.numel(), _PIECE_NUMEL):
        piece = slice(start, start + _PIECE_NUMEL)
        if addition is Addition.PUT:
            total[piece].copy_(grad[piece])
        elif addition is Addition.ADD:
            total[piece].add_(grad[piece])
        else:
            total[piece].copy_(total[piece].to(grad.dtype).add_(grad[piece]))

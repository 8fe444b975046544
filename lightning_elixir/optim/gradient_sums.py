"""Sums of gradients over several backwards, in one pass where there is a compiled kernel."""

from __future__ import annotations

from torch import Tensor

from lightning_elixir.core.threads import default_num_update_threads
from lightning_elixir.kernels import cpu
from lightning_elixir.kernels.addition import Addition, run_addition

__all__ = ["Addition", "add_to_sum"]


def add_to_sum(total: Tensor, grad: Tensor, addition: Addition) -> None:
    """Bring a gradient to a sum; the same bits with and without a kernel, which works beside training.

    Args:
        total: 1-D, on the host or on a device; changed in place.
        grad: 1-D, same numel and device, of the same dtype or a narrower one.
        addition: What `grad` is to `total`.
    """
    if not cpu.add_up(total, grad, addition, default_num_update_threads()):
        run_addition(total, grad, addition)

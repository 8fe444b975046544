"""Means of the gradients that ranks have sent each other, on any device."""

from __future__ import annotations

from torch import Tensor

from lightning_elixir.core import comm
from lightning_elixir.kernels import gpu


def mean_of_rows(rows: Tensor, mean: Tensor) -> None:
    """As `core.comm.mean_of_rows`, with the same bits; on a GPU, where Triton is, in a fifth of its memory traffic,
    which what is computed beside it needs."""
    if not (rows.is_cuda and gpu.mean_of_rows(rows, mean)):
        comm.mean_of_rows(rows, mean)

"""One Adam or AdamW update over flat tensors, bitwise the same on every device and for every way of cutting them.

What every element goes through is [Note: written sequence] in `kernels/sequence.py`; compiled kernels carry it out
where they can, torch's operations everywhere else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_elixir.kernels import cpu
from lightning_elixir.kernels.sequence import SCRATCH_ROWS, Operands, Scalars, Table, piece_numel, run_sequence
from lightning_elixir.plan.types import ALIGN_NUMEL

__all__ = [
    "SCRATCH_ROWS",
    "AdamHyper",
    "Operands",
    "Scalars",
    "adam_update_",
    "load_adam",
    "piece_numel",
    "update_parts_",
]


@dataclass(frozen=True, kw_only=True)
class AdamHyper:
    """The settings of one group: plain Python numbers, read at the moment of a step."""

    lr: float
    beta1: float
    """Decay of the first moment."""
    beta2: float
    """Decay of the second moment."""
    eps: float
    """Added to the root of the second moment."""
    weight_decay: float
    """Decoupled decay (AdamW) or L2 penalty (Adam)."""
    adamw_mode: bool
    """Whether the decay is decoupled."""
    bias_correction: bool
    """Whether to correct both moments for their start at zero."""
    maximize: bool = False
    """Climb instead of descend."""

    def scalars(self, step: int, grad_factor: float = 1.0) -> Scalars:
        """The numbers of the written sequence.

        Args:
            step: Count of updates including this one, from 1.
            grad_factor: Multiplies the gradient first (loss unscaling and clipping in one).
        """
        correction1 = 1.0 - self.beta1**step if self.bias_correction else 1.0
        correction2_root = math.sqrt(1.0 - self.beta2**step) if self.bias_correction else 1.0
        return Scalars(
            grad_factor=-grad_factor if self.maximize else grad_factor,
            l2=0.0 if self.adamw_mode else self.weight_decay,
            shrink=1.0 - self.lr * self.weight_decay if self.adamw_mode else 1.0,
            beta1=self.beta1,
            one_minus_beta1=1.0 - self.beta1,
            beta2=self.beta2,
            one_minus_beta2=1.0 - self.beta2,
            eps=self.eps * correction2_root,
            minus_step_size=-self.lr * correction2_root / correction1,
        )


def adam_update_(operands: Operands, scalars: Scalars) -> None:
    """Update a flat parameter and its moments.

    With `c1 = 1 - beta1**step` and `c2 = sqrt(1 - beta2**step)` (both 1 without bias correction), and every line one
    or more single operations rounded in the compute dtype, scalars in brackets rounded once to it:

        g = grad                          exact widening, or one rounding of an fp64 gradient
        g = g * [grad_factor]             negated to maximise; left out when it is 1
        p = p * [1 - lr * weight_decay]   AdamW with decay
        g = g + p * [weight_decay]        Adam with decay
        m = m + (g - m) * [1 - beta1]     for 1 - beta1 < 0.5; otherwise m = g - (g - m) * [beta1]
        v = v * [beta2] + (g * [1 - beta2]) * g
        d = 1 / (1 / sqrt(v)) + [eps * c2]
        p = p + (m * [-lr * c2 / c1]) / d

    16-bit parameters and moments are widened, updated and rounded once (to nearest, ties to even) at the end.
    The result is the same on CPU and CUDA, unless denormals are flushed (`torch.set_flush_denormal`).

    Args:
        operands: Parameter and moments fp64, fp32, bf16 or fp16, the gradient of any floating dtype.
        scalars: From `AdamHyper.scalars`.

    Raises:
        ValueError: Tensors that are not flat, not floating, or do not fit each other.
    """
    update_parts_(operands, [(0, operands.param.numel(), scalars)])


def update_parts_(
    operands: Operands, table: Table, *, scratch: Tensor | None = None, num_threads: int | None = None
) -> None:
    """Update parts of flat tensors, each with its own numbers, in one call of a compiled kernel where there is one.

    Args:
        operands: As for `adam_update_`.
        table: What to update; elements outside stay as they are.
        scratch: See `run_sequence`; used where no compiled kernel is.
        num_threads: Host threads of the compiled kernel; None: as `core.threads.default_num_threads` says.

    Raises:
        ValueError: Tensors that are not flat, not floating, or do not fit each other, or a part outside them.
    """
    param, grad, exp_avg, exp_avg_sq, compute, outputs = operands
    results = operands.results
    _check_operands(param, exp_avg, exp_avg_sq, grad, *(() if compute is None else (compute,)), *results)
    if [x.dtype for x in results] != [param.dtype, exp_avg.dtype, exp_avg_sq.dtype]:
        raise ValueError(f"outputs must have the dtypes of what they replace, got {[x.dtype for x in results]}")
    for start, numel, _ in table:
        if not 0 <= start <= start + numel <= param.numel():
            raise ValueError(f"a part of {numel} elements from {start} on is not within {param.numel()} elements")
    if not param.numel():
        return
    is_on_host = param.device.type == "cpu"
    if is_on_host and cpu.adam_update(operands, table, num_threads):
        return
    if outputs is not None:  # the others work in place
        for source, target in zip((param, exp_avg, exp_avg_sq), results, strict=True):
            for start, numel, _ in table:
                target[start : start + numel].copy_(source[start : start + numel])
        param, exp_avg, exp_avg_sq = results
        operands = Operands(param, grad, exp_avg, exp_avg_sq, compute)
    if param.device.type == "cuda":
        from lightning_elixir.kernels import gpu

        if gpu.adam_update(operands, table):
            return
    for start, numel, scalars in table:
        if numel:
            p, g, m, v = (x[start : start + numel] for x in (param, grad, exp_avg, exp_avg_sq))
            run_sequence(p, g, m, v, scalars, None if compute is None else compute[start : start + numel], scratch)


def load_adam(device: torch.device, dtypes: Sequence[torch.dtype]) -> None:
    """Run one update on a CUDA device that changes nothing of the user's, so that its code is compiled and loaded.

    Args:
        dtypes: Of parameter, gradient, both moments and, where there is one, the copy in the compute dtype.
    """
    hyper = AdamHyper(lr=0.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, adamw_mode=True, bias_correction=True)
    param, grad, exp_avg, exp_avg_sq, *compute = (torch.zeros(ALIGN_NUMEL, dtype=d, device=device) for d in dtypes)
    adam_update_(Operands(param, grad, exp_avg, exp_avg_sq, next(iter(compute), None)), hyper.scalars(1))


def _check_operands(param: Tensor, *others: Tensor) -> None:
    for x in (param, *others):
        if x.dim() != 1 or not x.is_contiguous() or not x.is_floating_point():
            raise ValueError(
                f"adam_update_ takes 1-D contiguous floating tensors, got shape {tuple(x.shape)}, stride {x.stride()}, "
                f"{x.dtype}; pass x.view(-1) of a contiguous tensor"
            )
        if x.shape != param.shape or x.device != param.device:
            raise ValueError(
                f"adam_update_ takes tensors of one length on one device, got {x.numel()} elements on {x.device} "
                f"beside a parameter of {param.numel()} on {param.device}"
            )

"""One Adam or AdamW update over flat tensors, bitwise the same on every device and for every way of cutting them.

What every element goes through is [Note: written sequence] in `kernels/sequence.py`; compiled kernels carry it out
where they can, torch's operations everywhere else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypedDict

from torch import Tensor

from lightning_elixir.kernels import cpu
from lightning_elixir.kernels.sequence import SCRATCH_ROWS, Scalars, Table, piece_numel, run_sequence

__all__ = ["SCRATCH_ROWS", "AdamHyper", "Scalars", "adam_scalars", "adam_update_", "piece_numel", "update_parts_"]


class AdamHyper(TypedDict):
    """A group's settings in the form `adam_update_` takes: plain Python numbers, read at the moment of the call."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    adamw_mode: bool
    bias_correction: bool
    maximize: bool


def adam_scalars(
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    adamw_mode: bool,
    bias_correction: bool,
    maximize: bool = False,
    grad_factor: float = 1.0,
) -> Scalars:
    """The numbers of the written sequence, from settings as `adam_update_` takes them."""
    correction1 = 1.0 - beta1**step if bias_correction else 1.0
    correction2_root = math.sqrt(1.0 - beta2**step) if bias_correction else 1.0
    return Scalars(
        grad_factor=-grad_factor if maximize else grad_factor,
        l2=0.0 if adamw_mode else weight_decay,
        shrink=1.0 - lr * weight_decay if adamw_mode else 1.0,
        beta1=beta1,
        one_minus_beta1=1.0 - beta1,
        beta2=beta2,
        one_minus_beta2=1.0 - beta2,
        eps=eps * correction2_root,
        minus_step_size=-lr * correction2_root / correction1,
    )


def adam_update_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    adamw_mode: bool,
    bias_correction: bool,
    maximize: bool = False,
    grad_factor: float = 1.0,
    compute_param: Tensor | None = None,
    scratch: Tensor | None = None,
) -> None:
    """Update a flat parameter and its moments in place.

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
        param: 1-D, contiguous, fp64, fp32, bf16 or fp16, `[numel]`.
        grad: 1-D, contiguous, same device, any floating dtype, `[numel]`; read only.
        exp_avg: First moment, 1-D, contiguous, floating, `[numel]`.
        exp_avg_sq: Second moment, likewise.
        step: Count of updates including this one, from 1.
        lr: Learning rate.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled decay (AdamW) or L2 penalty (Adam).
        adamw_mode: Whether the decay is decoupled.
        bias_correction: Whether to correct both moments for their start at zero.
        maximize: Climb instead of descend.
        grad_factor: Multiplies the gradient first (loss unscaling and clipping in one).
        compute_param: Receives the updated parameter, rounded to its own dtype, `[numel]`, while it is still in cache.
            May be the gradient's own memory, in the gradient's dtype.
        scratch: Memory to work in, uint8, 1-D, same device, aligned for the compute dtype; at least `SCRATCH_ROWS` rows
            of `ALIGN_NUMEL` elements of it. With more, one pass covers more. None: allocated here, where it is needed.

    Raises:
        ValueError: Tensors that are not flat, not floating, or do not fit each other.
    """
    scalars = adam_scalars(
        step=step,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        adamw_mode=adamw_mode,
        bias_correction=bias_correction,
        maximize=maximize,
        grad_factor=grad_factor,
    )
    table = [(0, param.numel(), scalars)]
    update_parts_(param, grad, exp_avg, exp_avg_sq, table, compute=compute_param, scratch=scratch)


def update_parts_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    table: Table,
    *,
    compute: Tensor | None = None,
    scratch: Tensor | None = None,
    num_threads: int | None = None,
    outputs: Sequence[Tensor] | None = None,
) -> None:
    """Update parts of flat tensors, each with its own numbers, in one call of a compiled kernel where there is one.

    Args:
        param, grad, exp_avg, exp_avg_sq, compute, scratch: As for `adam_update_`.
        table: What to update; elements outside stay as they are.
        num_threads: Host threads of the compiled kernel; None: as `core.threads.default_num_threads` says.
        outputs: What receives parameter and moments, in their dtypes and in memory of its own; the operands then stay
            as they are. None: they are written over.

    Raises:
        ValueError: Tensors that are not flat, not floating, or do not fit each other, or a part outside them.
    """
    results = (param, exp_avg, exp_avg_sq) if outputs is None else tuple(outputs)
    _check_operands(param, exp_avg, exp_avg_sq, grad, *(() if compute is None else (compute,)), *results)
    if [x.dtype for x in results] != [param.dtype, exp_avg.dtype, exp_avg_sq.dtype]:
        raise ValueError(f"outputs must have the dtypes of what they replace, got {[x.dtype for x in results]}")
    for start, numel, _ in table:
        if not 0 <= start <= start + numel <= param.numel():
            raise ValueError(f"a part of {numel} elements from {start} on is not within {param.numel()} elements")
    if not param.numel():
        return
    is_on_host = param.device.type == "cpu"
    if is_on_host and cpu.adam_update(param, grad, exp_avg, exp_avg_sq, table, compute, num_threads, outputs):
        return
    if outputs is not None:  # the others work in place
        for source, target in zip((param, exp_avg, exp_avg_sq), results, strict=True):
            for start, numel, _ in table:
                target[start : start + numel].copy_(source[start : start + numel])
        param, exp_avg, exp_avg_sq = results
    if param.device.type == "cuda":
        from lightning_elixir.kernels import gpu

        if gpu.adam_update(param, grad, exp_avg, exp_avg_sq, table, compute):
            return
    for start, numel, scalars in table:
        if numel:
            p, g, m, v = (x[start : start + numel] for x in (param, grad, exp_avg, exp_avg_sq))
            run_sequence(p, g, m, v, scalars, None if compute is None else compute[start : start + numel], scratch)


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

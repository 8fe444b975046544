"""One Adam or AdamW update over flat tensors, bitwise the same on every device and for every way of cutting them.

[Note: written sequence] The update is a fixed list of single IEEE 754 operations, each rounded once to the compute
dtype (fp32; fp64 for fp64 parameters): no operation that one backend contracts into a fused multiply-add and another
does not (`lerp`, `addcmul`, `addcdiv`, `add` with alpha), no reduction, no approximate function. Every element sees
the same operations wherever it lies, so neither device, nor thread count, nor position in a piece can change a bit.
A compiled kernel may replace this module as long as it keeps the sequence and switches contraction off.

Two operations need care in torch. `sqrt` on the CPU goes through MKL, which misses the correctly rounded fp32 root
for one mantissa in six; `rsqrt` on the CPU is an IEEE root followed by an IEEE division, but on CUDA it is an
approximation. Dividing by a Python scalar is a division on the CPU and a multiplication by a reciprocal on CUDA: the
sequence only ever multiplies by scalars. The scalars are computed in double and rounded once to the compute dtype.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_elixir.plan.types import ALIGN_NUMEL

_CPU_PIECE_NUMEL_PER_THREAD = 65536
"""Measured best on 16 threads; the parameter, two moments and two scratch buffers of this size stay in a core's cache,
and torch gives every thread the same part of a piece in all operations."""

SCRATCH_ROWS = 5
"""Most scratch elements that one element of a parameter needs: two, and one for each 16-bit operand."""

_DEVICE_PIECE_NUMEL = 4 * 1024 * 1024
"""Bounds the scratch memory on other devices to 16 MiB a buffer; larger pieces were no faster on an H200."""


class _Scalars(NamedTuple):
    """The Python floats of one update, computed in double."""

    grad_factor: float
    """Multiplies the gradient; negative to maximise."""
    l2: float
    """Weight decay added to the gradient (Adam), 0 for none."""
    shrink: float
    """Factor on the parameter (AdamW), 1 for none."""
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    eps: float
    """`eps` scaled by the root of the second bias correction."""
    minus_step_size: float


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
        scratch: Memory to work in, uint8, 1-D, same device, aligned for the compute dtype; at least `SCRATCH_ROWS` rows
            of `ALIGN_NUMEL` elements of it. With more, one pass covers more. None: allocated here.

    Raises:
        ValueError: Tensors that are not flat, not floating, or do not fit each other.
    """
    compute_dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
    operands = [param, exp_avg, exp_avg_sq]
    _check_operands(operands, grad, compute_param)
    numel = param.numel()
    if not numel:
        return
    correction1 = 1.0 - beta1**step if bias_correction else 1.0
    correction2_root = math.sqrt(1.0 - beta2**step) if bias_correction else 1.0
    scalars = _Scalars(
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
    is_wide = [x.dtype == compute_dtype for x in operands]
    num_rows = 2 + is_wide.count(False)
    if scratch is None:
        piece = piece_numel(param.device)
        rows = torch.empty(num_rows, min(numel, piece), dtype=compute_dtype, device=param.device).unbind()
    else:
        piece = scratch.nbytes // compute_dtype.itemsize // num_rows // ALIGN_NUMEL * ALIGN_NUMEL
        rows = scratch.view(compute_dtype)[: num_rows * piece].view(num_rows, piece).unbind()
    with torch.no_grad():
        for start in range(0, numel, piece):
            length = min(piece, numel - start)
            stored = [_part(x, start, length) for x in operands]
            first, second, *widened = [_part(buffer, 0, length) for buffer in rows]
            p, m, v = (x if is_kept else widened.pop().copy_(x) for x, is_kept in zip(stored, is_wide, strict=True))
            _update_piece(p, m, v, _part(grad, start, length), first, second, scalars)
            for narrow, updated, is_kept in zip(stored, (p, m, v), is_wide, strict=True):
                if not is_kept:
                    narrow.copy_(updated)
            if compute_param is not None:
                _part(compute_param, start, length).copy_(stored[0])


def piece_numel(device: torch.device) -> int:
    """How many elements one pass over the sequence covers on this device."""
    if device.type == "cpu":
        return _CPU_PIECE_NUMEL_PER_THREAD * torch.get_num_threads()
    return _DEVICE_PIECE_NUMEL


def _part(x: Tensor, start: int, length: int) -> Tensor:
    return x if length == x.numel() else x[start : start + length]


def _update_piece(p: Tensor, m: Tensor, v: Tensor, grad: Tensor, a: Tensor, b: Tensor, k: _Scalars) -> None:
    """The written sequence over one piece; `a` and `b` are scratch of the compute dtype, `grad` is read only."""
    g = grad
    if g.dtype != a.dtype or k.grad_factor != 1.0 or k.l2 != 0.0:
        g = a.copy_(grad)
    if k.grad_factor != 1.0:
        g.mul_(k.grad_factor)
    if k.shrink != 1.0:
        p.mul_(k.shrink)
    if k.l2 != 0.0:
        g.add_(torch.mul(p, k.l2, out=b))

    torch.sub(g, m, out=b)
    if k.one_minus_beta1 < 0.5:
        m.add_(b.mul_(k.one_minus_beta1))
    else:
        torch.sub(g, b.mul_(k.beta1), out=m)

    torch.mul(g, k.one_minus_beta2, out=b)
    v.mul_(k.beta2).add_(b.mul_(g))

    if v.device.type == "cpu":
        torch.rsqrt(v, out=b)
    else:
        torch.sqrt(v, out=b).reciprocal_()
    b.reciprocal_().add_(k.eps)
    p.add_(torch.mul(m, k.minus_step_size, out=a).div_(b))


def _check_operands(operands: list[Tensor], grad: Tensor, compute_param: Tensor | None) -> None:
    param = operands[0]
    others = [*operands, grad] if compute_param is None else [*operands, grad, compute_param]
    for x in others:
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

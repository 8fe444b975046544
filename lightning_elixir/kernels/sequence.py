"""The written sequence of Adam, in torch's operations: what every other implementation must match bit for bit.

[Note: written sequence] The update is a fixed list of single IEEE 754 operations, each rounded once to the compute
dtype (fp32; fp64 for fp64 parameters): no operation that one backend contracts into a fused multiply-add and another
does not (`lerp`, `addcmul`, `addcdiv`, `add` with alpha), no reduction, no approximate function. Every element sees
the same operations wherever it lies, so neither device, nor thread count, nor position in a piece can change a bit.
The compiled kernels beside this module keep the sequence and switch contraction off. Which of the many bit patterns of
nan a nan has is the one thing left open: torch's own casts differ in that between the body and the tail of a tensor.

Two operations need care in torch. `sqrt` on the CPU goes through MKL, which misses the correctly rounded fp32 root
for one mantissa in six; `rsqrt` on the CPU is an IEEE root followed by an IEEE division, but on CUDA it is an
approximation. Dividing by a Python scalar is a division on the CPU and a multiplication by a reciprocal on CUDA: the
sequence only ever multiplies by scalars. The scalars are computed in double and rounded once to the compute dtype.
"""

from __future__ import annotations

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


class Scalars(NamedTuple):
    """The numbers of one update, computed in double."""

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


Table = list[tuple[int, int, Scalars]]
"""Start, numel and numbers of the parts of flat tensors: ascending, not overlapping."""


class Operands(NamedTuple):
    """The tensors of one update: 1-D, contiguous, floating, of one numel and on one device, each in its own dtype."""

    param: Tensor
    grad: Tensor
    """Read only, unless `compute` is the same memory."""
    exp_avg: Tensor
    """First moment."""
    exp_avg_sq: Tensor
    """Second moment."""
    compute: Tensor | None = None
    """Receives the updated parameter, rounded to its own dtype, while it is still in cache. May be the gradient's own
    memory, in the gradient's dtype."""
    outputs: tuple[Tensor, Tensor, Tensor] | None = None
    """What receives parameter and moments, in their dtypes and in memory of its own; these stay as they are then. None:
    they are written over."""

    @property
    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        """Where the new parameter and moments go."""
        return self.outputs or (self.param, self.exp_avg, self.exp_avg_sq)


def piece_numel(device: torch.device) -> int:
    """How many elements one pass over the sequence covers on this device."""
    if device.type == "cpu":
        return _CPU_PIECE_NUMEL_PER_THREAD * torch.get_num_threads()
    return _DEVICE_PIECE_NUMEL


def run_sequence(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    scalars: Scalars,
    compute: Tensor | None = None,
    scratch: Tensor | None = None,
) -> None:
    """Carry out the sequence over whole tensors, in place; see `Operands` for all of them.

    Args:
        scratch: Memory to work in, uint8, 1-D, same device, aligned for the compute dtype; at least `SCRATCH_ROWS` rows
            of `ALIGN_NUMEL` elements of it. With more, one pass covers more. None: allocated here.
    """
    compute_dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
    operands = [param, exp_avg, exp_avg_sq]
    numel = param.numel()
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
            if compute is not None:
                _part(compute, start, length).copy_(stored[0])


def _part(x: Tensor, start: int, length: int) -> Tensor:
    return x if length == x.numel() else x[start : start + length]


def _update_piece(p: Tensor, m: Tensor, v: Tensor, grad: Tensor, a: Tensor, b: Tensor, k: Scalars) -> None:
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

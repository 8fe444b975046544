"""Cross-entropy of a linear layer's outputs that never holds all of them: the logits of a large vocabulary are often
more than all other activations of a step.

The tokens come in pieces. Each piece's logits, their loss and what they add to the gradients are computed at once, in
forward, and then they are gone: what is kept is the gradient of the inputs and that of the weight, which backward
multiplies by the gradient of the loss. So no product is computed twice.

Numbers are those of `F.cross_entropy(F.linear(hidden, weight, bias).float(), targets)` but for rounding: gradients are
those of the sum of the losses until backward scales them, the weight's is summed over the pieces in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from lightning_elixir.fused import liger

_LEAST_ROWS = {"torch": 256, "kernel": 1024}
"""Tokens of a piece, by what computes it. With fewer, reading the weight and adding to its gradient, which each piece
does, takes as long as the products; torch's operators need four times the memory for a token."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """`F.cross_entropy(F.linear(hidden, weight, bias).float(), targets)` without the memory of the logits.

    Args:
        hidden: `[..., width]`, floating; under `torch.autocast` cast to its dtype.
        weight: `[classes, width]`.
        targets: `[...]`, integer: a class each.
        bias: `[classes]`.
        ignore_index: Targets of this value do not count.
        reduction: "mean" over the targets that count, or "sum".

    Returns:
        A scalar in fp32 (fp64 for fp64 operands).

    Raises:
        ValueError: Another reduction, or shapes that do not fit.
    """
    operands = (hidden, weight, bias)
    if has_torch_function(operands):  # parameters that are not on the device come there by this
        options: dict[str, Any] = {"ignore_index": ignore_index, "reduction": reduction}
        result: Tensor = handle_torch_function(linear_cross_entropy, operands, hidden, weight, targets, bias, **options)
        return result
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    if hidden.shape[:-1] != targets.shape or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        shapes = ", ".join(str(list(t.shape)) for t in (hidden, weight, targets))
        raise ValueError(f"hidden [..., width], weight [classes, width] and targets [...] are of shapes {shapes}")
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    rows = hidden.reshape(-1, hidden.shape[-1])
    more = ignore_index, torch.is_grad_enabled()
    total: Tensor = _LossSum.apply(rows, weight, targets.reshape(-1), bias, *more)  # type: ignore[no-untyped-call]
    return total if reduction == "sum" else total / (targets != ignore_index).sum()


class _LossSum(torch.autograd.Function):
    """The sum of the losses, `[]`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        bias: Tensor | None,
        ignore_index: int,
        has_grad: bool,
    ) -> Tensor:
        needs = ctx.needs_input_grad
        needs_grads = (has_grad and needs[0], has_grad and needs[1], has_grad and bias is not None and needs[3])
        with torch.autocast(hidden.device.type, enabled=False):
            operands = (hidden, weight, *([] if bias is None else [bias]))
            kernels = liger.kernels_for(*operands)
            # In fp16 gradients that nothing scales would not fit; without one of the inputs it gives none at all.
            is_for_it = hidden.dtype not in (torch.float16, torch.float64) and needs_grads[0] == any(needs_grads)
            if kernels is None or not is_for_it:
                foreseen = liger.kernels() if is_for_it and liger.foresees(*operands) else None
                loss, grads = _in_pieces(hidden, weight, targets, bias, ignore_index, needs_grads, foreseen)
            else:
                loss, grads = _by_kernel(kernels, hidden, weight, targets, bias, ignore_index, needs_grads)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.save_for_backward(*grads)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = [
            None if saved is None else _scaled(saved, grad, dtype)
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return grads[0], grads[1], None, grads[2], None, None


def _scaled(saved: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Their product, in `dtype`, without a copy in another one."""
    product = torch.empty(saved.shape, dtype=dtype, device=saved.device)
    return torch.mul(saved, factor.to(torch.promote_types(saved.dtype, torch.float32)), out=product)


_Grads = tuple[Tensor | None, Tensor | None, Tensor | None]


def _by_kernel(
    kernels: liger.Kernels,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    needs_grads: tuple[bool, bool, bool],
) -> tuple[Tensor, _Grads]:
    factor, _ = _pieces_of_kernel(kernels, hidden, weight.shape[0])
    more = {"chunk_mem_const": factor} if kernels.has_piece_sizes else {}
    with torch.no_grad():
        loss, _, _, _, *grads = kernels.linear_cross_entropy(
            hidden.contiguous(),
            weight,
            targets,
            bias=bias,
            ignore_index=ignore_index,
            reduction="sum",
            accum_dtype=torch.float32,
            compute_gradients=any(needs_grads),
            weight_requires_grad=needs_grads[1],
            **more,
        )
    of_input, of_weight, of_bias = (g if is_needed else None for g, is_needed in zip(grads, needs_grads, strict=True))
    return loss, (of_input, of_weight, of_bias)


def _pieces_of_kernel(kernels: liger.Kernels, hidden: Tensor, num_classes: int) -> tuple[int, int]:
    """How many times the inputs' elements the kernel's logits may have at a time, and the tokens that it then takes."""
    num_rows, width = hidden.shape
    at_once = rows_at_once(num_rows, width, num_classes, "kernel") * num_classes
    factor = -(-at_once // max(1, num_rows * width)) if kernels.has_piece_sizes else 1
    number = -(-num_classes // (factor * width))
    return factor, max(1, min(num_rows, 1 << (-(-num_rows // number) - 1).bit_length()))  # a power of two, if any


def _in_pieces(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    needs_grads: tuple[bool, bool, bool],
    foreseen: liger.Kernels | None,
) -> tuple[Tensor, _Grads]:
    """The same by torch's operators, on any device. Where a kernel is foreseen, with as much memory as it takes, whose
    gradients are in the place of its logits, in the dtype of the inputs."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    loss = torch.zeros((), dtype=wide, device=hidden.device)
    of_input = torch.empty_like(hidden) if needs_grads[0] else None
    of_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if needs_grads[1] else None
    of_bias = torch.zeros(weight.shape[0], dtype=wide, device=weight.device) if needs_grads[2] else None
    num_rows, dtype = rows_at_once(hidden.shape[0], hidden.shape[1], weight.shape[0]), wide
    if foreseen is not None:
        num_rows, dtype = _pieces_of_kernel(foreseen, hidden, weight.shape[0])[1], hidden.dtype
    for first in range(0, hidden.shape[0], num_rows):
        piece, wanted = hidden[first : first + num_rows], targets[first : first + num_rows]
        counts = wanted != ignore_index
        wanted = wanted.masked_fill(~counts, 0).unsqueeze(1)
        counts = counts.unsqueeze(1)
        logits = F.linear(piece, weight, bias).to(dtype)
        logs = logits.logsumexp(1, keepdim=True)
        loss += ((logs - logits.gather(1, wanted)) * counts).sum()
        if not any(needs_grads):
            continue
        # Of the sum of the losses with respect to the logits: probabilities, less one at the target.
        grads = logits.sub_(logs).exp_()
        grads.scatter_add_(1, wanted, grads.new_full((1, 1), -1.0).expand_as(wanted)).mul_(counts)
        if of_bias is not None:
            of_bias += grads.sum(0)
        narrow = grads.to(hidden.dtype)
        if of_input is not None:
            torch.mm(narrow, weight, out=of_input[first : first + num_rows])
        if of_weight is None:
            continue
        if hidden.is_cuda and narrow.dtype is not wide:
            torch.addmm(of_weight, narrow.t(), piece, out_dtype=wide, out=of_weight)
        else:
            of_weight.addmm_(grads.t(), piece.to(wide))
    return loss, (of_input, of_weight, of_bias)


def rows_at_once(num_rows: int, width: int, num_classes: int, way: str = "torch") -> int:
    """Tokens of a piece: its logits have about as many elements as all inputs together.

    Args:
        num_rows: All tokens.
        width: Of a token.
        num_classes: Logits of a token.
        way: "torch", or "kernel" for that of `liger-kernel`.
    """
    return max(_LEAST_ROWS[way], -(-num_rows * width // num_classes // 64) * 64)

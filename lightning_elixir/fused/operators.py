"""Norms and gated products that keep less for backward than the operators they are written in, on any device, and run
as one kernel where `liger` has one. What autograd keeps is the same with both. Of tensors without values, which a dry
run has, they take the memory and move the bytes that the kernel would, where that is installed (`liger.foresees`).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_elixir.fused import liger

NormKind = Literal["llama", "gemma"]
"""How the formula goes in 16 bits. llama: the normalised value is rounded, then multiplied by the weight. gemma: all in
fp32, times one plus the weight, then rounded."""
Gate = Literal["silu", "gelu_tanh"]

_MOST_COLUMNS = 65536
"""Of a row, for the kernels of `liger`."""


def is_plain(*operands: Any) -> bool:
    """Whether these are torch's own tensors, or what stands for them in a dry run: kernels take no others."""
    return all(type(x) in (Tensor, FakeTensor) for x in operands)


def rms_norm(x: Tensor, weight: Tensor, eps: float, kind: NormKind) -> Tensor:
    """`x / rms(x)` over the last dimension, times the weight.

    Args:
        x: `[..., width]`, floating.
        weight: `[width]`.
        eps: Added to the mean square.
        kind: The order of rounding.
    """
    kernels = liger.kernels_for(x, weight)
    if kernels is not None and x.dtype is not torch.float64:
        offset = 1.0 if kind == "gemma" else 0.0
        # Not in place: the gradient that comes may be that of a residual branch as well.
        output: Tensor = kernels.rms_norm.apply(x, weight, eps, offset, kind, False, None)
        return output
    return rms_norm_by_torch(x, weight, eps, kind)


def rms_norm_by_torch(x: Tensor, weight: Tensor, eps: float, kind: NormKind) -> Tensor:
    """The same on any device."""
    output: Tensor = _RMSNorm.apply(x, weight, eps, kind)  # type: ignore[no-untyped-call]
    return output


class _RMSNorm(torch.autograd.Function):
    """Keeps `x` and one fp32 number for each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, kind: NormKind) -> Tensor:
        ctx.is_foreseen = liger.foresees(x, weight) and x.dtype is not torch.float64
        if ctx.is_foreseen:
            ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
            return x * weight
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.kind = kind
        normal = wide * scale
        if kind == "gemma":
            return (normal * (1.0 + weight.to(wide.dtype))).to(x.dtype)
        return weight * normal.to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, scale = ctx.saved_tensors
        if ctx.is_foreseen:
            return grad.clone() * x, torch.empty_like(weight), None, None
        normal = x.to(scale.dtype) * scale
        of_x = of_weight = None
        if ctx.needs_input_grad[1]:
            factor = normal if ctx.kind == "gemma" else normal.to(x.dtype)
            product = grad.to(torch.promote_types(grad.dtype, weight.dtype)) * factor
            of_weight = product.reshape(-1, weight.numel()).sum(0, dtype=scale.dtype).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            factor = weight.to(scale.dtype) + 1.0 if ctx.kind == "gemma" else weight
            of_normal = (grad.to(factor.dtype) * factor).to(scale.dtype)
            shared = (of_normal * normal).mean(-1, keepdim=True)
            of_x = ((of_normal - normal * shared) * scale).to(x.dtype)
        return of_x, of_weight, None, None


def gated_product(gate: Tensor, up: Tensor, kind: Gate) -> Tensor:
    """`act(gate) * up`, element by element.

    Args:
        gate: Any shape, floating.
        up: Of the same shape.
        kind: The activation.
    """
    product: Tensor = _GatedProduct.apply(gate, up, kind)  # type: ignore[no-untyped-call]
    return product


def _part_of_row(width: int) -> int:
    """Columns for a kernel that goes element by element and takes a whole row at once: as many parts as it needs."""
    while width > _MOST_COLUMNS and width % 2 == 0:
        width //= 2
    return width


def activation(x: Tensor, kind: Gate) -> Tensor:
    """The activation by itself."""
    return F.silu(x) if kind == "silu" else F.gelu(x, approximate="tanh")


class _GatedProduct(torch.autograd.Function):
    """Keeps its two operands; the activation is computed again."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: Gate) -> Tensor:
        ctx.kind = kind
        kernels = liger.kernels_for(gate, up) if gate.dtype is not torch.float64 else None
        ctx.width = _part_of_row(gate.shape[-1])
        if ctx.width > _MOST_COLUMNS:
            kernels = None
        ctx.kernels, ctx.is_foreseen = kernels, liger.foresees(gate, up) and gate.dtype is not torch.float64
        if ctx.is_foreseen:
            ctx.save_for_backward(gate, up)
            return gate * up
        if kernels is None:
            ctx.save_for_backward(gate, up)
            return activation(gate, kind) * up
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        forward = kernels.silu_forward if kind == "silu" else kernels.gelu_forward
        product: Tensor = forward(gate.view(-1, ctx.width), up.view(-1, ctx.width))[2]
        return product.view(gate.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        gate, up = ctx.saved_tensors
        if ctx.kernels is not None:
            backward = ctx.kernels.silu_backward if ctx.kind == "silu" else ctx.kernels.gelu_backward
            # The kernel writes over its operands, which users may have kept, or a second backward may need.
            parts = (t.view(-1, ctx.width) for t in (gate.clone(), up.clone(), grad.contiguous()))
            of_gate, of_up = backward(*parts)
            return of_gate.view(gate.shape), of_up.view(up.shape), None
        if ctx.is_foreseen:
            return gate.clone().mul_(grad), up.clone().mul_(grad), None
        aten = torch.ops.aten
        of_gate = of_up = None
        if ctx.needs_input_grad[0]:
            of_act = grad * up
            is_silu = ctx.kind == "silu"
            of_gate = (
                aten.silu_backward(of_act, gate) if is_silu else aten.gelu_backward(of_act, gate, approximate="tanh")
            )
        if ctx.needs_input_grad[1]:
            of_up = grad * activation(gate, ctx.kind)
        return of_gate, of_up, None


def rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor] | None:
    """Queries and keys turned by their positions, the two halves of a head being the parts of a complex number.

    Args:
        query: `[batch, heads, length, width]`.
        key: The same, with as many heads or fewer.
        cos: `[batch or 1, length, width]`.
        sin: The same.

    Returns:
        None where there is no kernel for these operands.
    """
    if not is_plain(query, key, cos, sin):
        return None
    is_usual = query.dim() == key.dim() == 4 and cos.dim() == 3 and cos.shape == sin.shape
    if not is_usual or cos.shape[-1] != query.shape[-1] or query.shape[-1] % 2:
        return None
    if liger.foresees(query, key, cos, sin):
        foreseen: tuple[Tensor, Tensor] = _ForeseenRope.apply(query, key, cos, sin)  # type: ignore[no-untyped-call]
        return foreseen
    kernels = liger.kernels_for(query, key, cos, sin)
    if kernels is None:
        return None
    # The kernel writes over its operands, which others may have kept.
    turned: tuple[Tensor, Tensor] = kernels.rope.apply(query.clone(), key.clone(), cos, sin)
    return turned


class _ForeseenRope(torch.autograd.Function):
    """What the kernel takes and keeps, without its numbers."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return query.clone().mul_(1.0), key.clone().mul_(1.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_query: Tensor, of_key: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return of_query.clone().mul_(1.0), of_key.clone().mul_(1.0), None, None

"""The experts of a mixture as one operator, on any device: their matrix products as grouped ones, and what lies between
them (tokens in the order of their experts and back, the gate, the experts' weights) in a few passes over memory, which
take longer than the products do where each is an operator of its own.

Kept for backward are the tokens, the outputs of the first products, and which row belongs where. The tokens' rows are
gathered again, the gate is computed again, and the weight of an expert gets its gradient from the rows before the
second product, so that the rows after it are not needed. Nothing is added up in an order that differs from run to run.

On a GPU what lies between is done by kernels (`triton_code`) where Triton is, which torch's builds for CUDA bring;
elsewhere by torch's operators. In a dry run, whose tensors have no values, as much memory is taken and moved as by the
kernels.
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_elixir.core.device import current_device, runs_triton
from lightning_elixir.fused.operators import Gate, activation

log = logging.getLogger(__name__)

_MOST_COLUMNS = 2048
"""Of a row that one program of a kernel takes at a time."""
_ALIGNED = 16
"""Rows of operands of grouped products begin at multiples of so many bytes."""


def mixture(
    tokens: Tensor,
    numbers: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    kind: Gate,
    num_pairs: int | None = None,
) -> Tensor:
    """What the experts of each token make of it, added up with their weights.

    An expert makes `down @ (act(gate @ token) * (up @ token))` of a token.

    Args:
        tokens: `[n, width]`, floating; cast to the dtype of `gate_up`, under `torch.autocast` to autocast's.
        numbers: `[n, k]`, integer: the experts of each token, from 0. One that is not there is an error, as where
            transformers goes through the experts: a `RuntimeError`, on a GPU an assertion on the device.
        weights: `[n, k]`, floating.
        gate_up: `[experts, 2 * inner, width]`: the rows of the gate before those of `up`.
        down: `[experts, width, inner]`.
        kind: The activation.
        num_pairs: How many of `numbers` are those of experts, where the others are -1: a token need not have `k` of
            them. None: all.

    Returns:
        `[n, width]`, of the dtype of the tokens.
    """
    device = tokens.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else gate_up.dtype
    operands = (tokens.to(dtype), numbers, weights, gate_up.to(dtype), down.to(dtype))
    output: Tensor = _Mixture.apply(*operands, kind, num_pairs)  # type: ignore[no-untyped-call]
    return output.to(tokens.dtype)


class _Mixture(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        numbers: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        kind: Gate,
        num_pairs: int | None,
    ) -> Tensor:
        num_chosen = numbers.shape[1]
        by_expert, order = torch.sort(numbers.reshape(-1), stable=True)
        if num_pairs is not None:  # behind all that are -1
            by_expert, order = (t[t.numel() - num_pairs :] for t in (by_expert, order))
        experts = torch.arange(gate_up.shape[0], device=by_expert.device, dtype=by_expert.dtype)
        ends = torch.searchsorted(by_expert, experts, right=True).to(torch.int32)
        are_there = (by_expert[:1] >= 0).all() & (ends[-1] == by_expert.numel())
        torch._assert_async(are_there, f"tokens are given to experts other than the {len(experts)} from 0 on")
        places = order.new_full((numbers.numel(),), -1)
        places[order] = torch.arange(order.numel(), device=order.device)
        places = places.view(-1, num_chosen)
        with torch.autocast(tokens.device.type, enabled=False):
            hidden = _products(tokens[order // num_chosen], gate_up.transpose(1, 2), ends)
            results = _products(_gated(hidden, kind), down.transpose(1, 2), ends)
            output = added(results, places, weights)
        ctx.save_for_backward(tokens, weights, gate_up, down, hidden, order, places, ends)
        ctx.kind = kind
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(grad.device.type, enabled=False):  # it may be on, where backward is called under it
            return _backward(ctx, grad)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    tokens, weights, gate_up, down, hidden, order, places, ends = ctx.saved_tensors
    token_of_row = order // places.shape[1]
    grads = grad.contiguous()[token_of_row]
    row_weights = weights.reshape(-1)[order]
    of_hidden, weighted, dots = _gated_backward(hidden, _products(grads, down, ends), row_weights, ctx.kind)
    of_tokens = of_weights = of_gate_up = of_down = None
    if ctx.needs_input_grad[4]:
        of_down = _outer_products(grads, weighted, ends)
    del grads, weighted
    if ctx.needs_input_grad[2]:
        of_weights = dots[places].masked_fill_(places < 0, 0.0).to(weights.dtype)
    if ctx.needs_input_grad[3]:
        of_gate_up = _outer_products(of_hidden, tokens[token_of_row], ends)
    if ctx.needs_input_grad[0]:
        of_tokens = added(_products(of_hidden, gate_up, ends), places, None)
    return of_tokens, None, of_weights, of_gate_up, of_down, None, None


# Products


def _is_grouped(*operands: Tensor) -> bool:
    """Whether torch has a grouped product for these that does not wait for the device."""
    first = operands[0]
    rows = [t.stride(-1) if t.stride(-1) > 1 else t.stride(-2) for t in operands]
    is_aligned = all(n * first.element_size() % _ALIGNED == 0 for n in rows)
    return is_aligned and first.dtype is torch.bfloat16 and first.is_cuda and _have_grouped(first.device)


@functools.cache
def _have_grouped(device: torch.device) -> bool:
    """Whether torch's grouped product runs on a device; older ones have none."""
    matrices = torch.zeros(1, 16, 16, device=device, dtype=torch.bfloat16)
    try:
        F.grouped_mm(matrices[0], matrices, offs=torch.full((1,), 16, device=device, dtype=torch.int32))
    except torch.OutOfMemoryError:  # tells nothing of the device, and must not be remembered
        raise
    except RuntimeError as error:
        log.info("no grouped matrix products on %s, one for each expert: %s", device, error)
        return False
    return True


def _products(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Each expert's rows times its matrix.

    Args:
        rows: `[n, a]`, in the order of their experts.
        matrices: `[experts, a, b]`.
        ends: `[experts]`, int32: where each expert's rows end.

    Returns:
        `[n, b]`.
    """
    if isinstance(rows, FakeTensor):
        return rows @ matrices[0]
    if _is_grouped(rows, matrices):
        return F.grouped_mm(rows, matrices, offs=ends).contiguous()  # it pads rows of results, too
    output, begin = rows.new_empty(rows.shape[0], matrices.shape[2]), 0
    for end, matrix in zip(ends.tolist(), matrices, strict=True):
        torch.mm(rows[begin:end], matrix, out=output[begin:end])
        begin = end
    return output


def _outer_products(first: Tensor, second: Tensor, ends: Tensor) -> Tensor:
    """The sum over each expert's rows of their outer products.

    Args:
        first: `[n, a]`.
        second: `[n, b]`.
        ends: As for `_products`.

    Returns:
        `[experts, a, b]`.
    """
    if not isinstance(first, FakeTensor) and _is_grouped(first, second):
        return F.grouped_mm(first.t(), second, offs=ends)
    output = first.new_empty(ends.shape[0], first.shape[1], second.shape[1])
    if isinstance(first, FakeTensor):
        torch.mm(first.t(), second, out=output[0])
        return output
    begin = 0
    for end, one in zip(ends.tolist(), output, strict=True):
        torch.mm(first[begin:end].t(), second[begin:end], out=one)
        begin = end
    return output


# What lies between


def _code_for(operand: Tensor) -> Any:
    """The kernels; None: use torch's operators."""
    is_narrow = operand.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return _code(operand.device) if is_narrow and runs_triton(operand.device) else None


@functools.cache
def _code(device: torch.device) -> Any:
    """The kernels, where they can be compiled for a device; else None."""
    try:
        code = importlib.import_module("lightning_elixir.fused.triton_code")
        tried = torch.zeros(1, 32, device=device)
        with current_device(device):
            code.gated_kernel[(1, 1)](tried, tried.new_empty(1, 16), 16, IS_SILU=True, BLOCK=16)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers fail in many ways
        log.warning(
            "experts of a mixture are computed by torch's operators, not Triton's kernels, which are faster: %s: %s",
            type(error).__name__,
            str(error).strip() or "no message",
        )
        return None
    return code


def _blocks(width: int) -> tuple[int, int]:
    """Columns that a program takes at a time, a power of two, and how many times that takes for a row."""
    block = min(1 << max(4, (width - 1).bit_length()), _MOST_COLUMNS)
    return block, -(-width // block)


def _gated(hidden: Tensor, kind: Gate) -> Tensor:
    """`[n, 2 * inner]` to `[n, inner]`."""
    width = hidden.shape[1] // 2
    if isinstance(hidden, FakeTensor):
        first, second = hidden.view(2, -1, width).unbind()
        return first * second
    code = _code_for(hidden)
    if code is None:
        return activation(hidden[:, :width], kind) * hidden[:, width:]
    output = hidden.new_empty(hidden.shape[0], width)
    block, parts = _blocks(width)
    with current_device(hidden.device):
        code.gated_kernel[(hidden.shape[0], parts)](hidden, output, width, IS_SILU=kind == "silu", BLOCK=block)
    return output


def _gated_backward(hidden: Tensor, of_product: Tensor, weights: Tensor, kind: Gate) -> tuple[Tensor, Tensor, Tensor]:
    """Of `_gated`, whose rows have weights further on.

    Args:
        hidden: `[n, 2 * inner]`.
        of_product: `[n, inner]`: the gradient of the product before the row's weight.
        weights: `[n]`.
        kind: The activation.

    Returns:
        The gradient of `hidden`; the product times the weight; the gradient of the weight, `[n]`, fp32 or fp64.
    """
    width = of_product.shape[1]
    wide = torch.promote_types(hidden.dtype, torch.float32)
    if isinstance(hidden, FakeTensor):
        return hidden * 1.0, of_product * 1.0, weights.new_empty(weights.shape, dtype=wide)
    code = _code_for(hidden)
    if code is None:
        gate, up, grad = (t.to(wide) for t in (hidden[:, :width], hidden[:, width:], of_product))
        act, factors = activation(gate, kind), weights.to(wide).unsqueeze(1)
        product = act * up
        aten, is_silu = torch.ops.aten, kind == "silu"
        of_act = grad * factors * up
        of_gate = aten.silu_backward(of_act, gate) if is_silu else aten.gelu_backward(of_act, gate, approximate="tanh")
        of_hidden = torch.cat((of_gate, grad * factors * act), 1).to(hidden.dtype)
        return of_hidden, (product * factors).to(hidden.dtype), (product * grad).sum(1)
    of_hidden, weighted = torch.empty_like(hidden), torch.empty_like(of_product)
    dots = torch.empty(weights.shape, dtype=torch.float32, device=weights.device)
    block, _ = _blocks(width)
    with current_device(hidden.device):
        code.gated_backward_kernel[(hidden.shape[0],)](
            hidden, of_product, weights, of_hidden, weighted, dots, width, IS_SILU=kind == "silu", BLOCK=block
        )
    return of_hidden, weighted, dots


def added(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """The sum of each token's rows, added up in fp32 at least.

    Args:
        rows: `[m, width]`.
        places: `[n, k]`: where a token's rows are; -1: it has no more.
        weights: `[n, k]`; None: ones.

    Returns:
        `[n, width]`.
    """
    if isinstance(rows, FakeTensor):
        num_tokens = max(1, places.shape[0])
        each = rows.shape[0] // num_tokens
        found = rows[: num_tokens * each].view(places.shape[0], each, rows.shape[1])
        return found.sum(1, dtype=rows.dtype)  # told, since autocast would have it in fp32
    code = _code_for(rows)
    if code is None:
        wide = torch.promote_types(rows.dtype, torch.float32)
        total = torch.zeros(places.shape[0], rows.shape[1], dtype=wide, device=rows.device)
        for k, place in enumerate(places.unbind(1)):  # all at once would take memory for all rows once more
            found = rows[place.clamp(min=0)].to(wide).masked_fill_((place < 0).unsqueeze(1), 0.0)
            total += found if weights is None else found.mul_(weights[:, k : k + 1].to(wide))
        return total.to(rows.dtype)
    output = rows.new_empty(places.shape[0], rows.shape[1])
    block, parts = _blocks(rows.shape[1])
    with current_device(rows.device):
        code.added_kernel[(places.shape[0], parts)](
            rows.contiguous(),
            places.contiguous(),
            rows if weights is None else weights.contiguous(),
            output,
            rows.shape[1],
            K=places.shape[1],
            HAS_WEIGHTS=weights is not None,
            BLOCK=block,
        )
    return output

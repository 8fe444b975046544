"""The device code of `mixtures`, in Triton's language; importing this needs Triton.

All of it moves memory and computes little, so rows are read in whole accesses and sums stay in registers, in fp32.
"""

import triton
import triton.language as tl

_SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
_CUBIC = tl.constexpr(0.044715)


@triton.jit
def _activated(x, IS_SILU: tl.constexpr):
    """The activation of fp32, and its derivative."""
    if IS_SILU:
        sigmoid = tl.sigmoid(x)
        value = x * sigmoid
        slope = sigmoid * (1.0 + x * (1.0 - sigmoid))
    else:
        # GELU by tanh, of which tanh(z) = 2 sigmoid(2 z) - 1
        inner = _SQRT_2_OVER_PI * (x + _CUBIC * x * x * x)
        half = tl.sigmoid(2.0 * inner)
        value = x * half
        slope = half + 2.0 * x * half * (1.0 - half) * _SQRT_2_OVER_PI * (1.0 + 3.0 * _CUBIC * x * x)
    return value, slope


@triton.jit
def gated_kernel(hidden, output, width, IS_SILU: tl.constexpr, BLOCK: tl.constexpr):
    """`output[row] = act(hidden[row, :width]) * hidden[row, width:]`; a program for each part of each row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = tl.load(hidden + row * 2 * width + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(hidden + row * 2 * width + width + column, mask=mask, other=0.0).to(tl.float32)
    value, _ = _activated(gate, IS_SILU)
    tl.store(output + row * width + column, (value * up).to(output.dtype.element_ty), mask=mask)


@triton.jit
def gated_backward_kernel(
    hidden, of_product, weights, of_hidden, weighted, dots, width, IS_SILU: tl.constexpr, BLOCK: tl.constexpr
):
    """Of a row's gated product, given its gradient before the row's weight; a program for each row.

    `of_hidden[row]` is the gradient of both halves, `weighted[row]` the product times the weight, `dots[row]` the inner
    product of the product and its gradient, which is the weight's gradient.
    """
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row).to(tl.float32)
    hidden += row * 2 * width
    of_hidden += row * 2 * width
    of_product += row * width
    weighted += row * width
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < width
        gate = tl.load(hidden + column, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(hidden + width + column, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(of_product + column, mask=mask, other=0.0).to(tl.float32)
        value, slope = _activated(gate, IS_SILU)
        product = value * up
        total += product * grad
        grad *= weight
        tl.store(of_hidden + column, (grad * up * slope).to(of_hidden.dtype.element_ty), mask=mask)
        tl.store(of_hidden + width + column, (grad * value).to(of_hidden.dtype.element_ty), mask=mask)
        tl.store(weighted + column, (product * weight).to(weighted.dtype.element_ty), mask=mask)
    tl.store(dots + row, tl.sum(total))


@triton.jit
def added_kernel(rows, places, weights, output, width, K: tl.constexpr, HAS_WEIGHTS: tl.constexpr, BLOCK: tl.constexpr):
    """`output[token]` is the sum of `rows[places[token, k]]`, with its weight if there are some, but where a place is
    -1; a program for each part of each token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for k in range(K):
        place = tl.load(places + token * K + k).to(tl.int64)
        there = column < tl.where(place >= 0, width, 0)
        row = tl.load(rows + place * width + column, mask=there, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            row *= tl.load(weights + token * K + k).to(tl.float32)
        total += row
    tl.store(output + token * width + column, total.to(output.dtype.element_ty), mask=mask)

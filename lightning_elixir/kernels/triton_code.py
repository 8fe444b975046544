"""The device code of `gpu`, in Triton's language; importing this needs Triton.

To be compiled without contraction (`enable_fp_fusion=False`, an option of the launch, given in `gpu`).

Full blocks take a branch of their own, without a mask: a mask whose end is unknown to the compiler would cut every
access of 16 bytes into single elements.
"""

import triton
import triton.language as tl

ALIGN = tl.constexpr(512)
"""Runs of elements start at multiples of this (`ALIGN_NUMEL`), and blocks of sums have this many elements."""


@triton.jit
def _widened(x):
    """fp32 of fp32, fp16 or bf16; exact. bf16 by its bits, since Triton's interpreter gets denormals wrong."""
    if x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        wide = bits.to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """fp32 to fp32, fp16 or bf16, to nearest, ties to even. bf16 by its bits, since Triton's interpreter truncates."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        nearest = tl.where(x != x, 0x7FC0, nearest)
        narrow = nearest.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        narrow = x.to(dtype)
    return narrow


@triton.jit
def _place(block, table, num_runs, BLOCK: tl.constexpr):
    """Which run a block of `BLOCK` elements belongs to, and its number within that run.

    `table[:num_runs]` are the runs' first blocks, ascending from 0.
    """
    low = tl.full([], 0, tl.int32)
    high = num_runs + low
    while high - low > 1:
        middle = (low + high) // 2
        is_after = tl.load(table + middle) <= block
        low = tl.where(is_after, middle, low)
        high = tl.where(is_after, high, middle)
    return low, block - tl.load(table + low)


@triton.jit
def _adam_block(
    param,
    grad,
    exp_avg,
    exp_avg_sq,
    compute,
    offsets,
    mask,
    grad_factor,
    l2,
    shrink,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    minus_step_size,
    HAS_L2: tl.constexpr,
    IS_LERP: tl.constexpr,
    HAS_COMPUTE: tl.constexpr,
):
    """The written sequence over one block; every element is read before it is written, and by the thread that does."""
    g = _widened(tl.load(grad + offsets, mask=mask))
    p = _widened(tl.load(param + offsets, mask=mask))
    m = _widened(tl.load(exp_avg + offsets, mask=mask))
    v = _widened(tl.load(exp_avg_sq + offsets, mask=mask))

    g = g * grad_factor
    p = p * shrink
    if HAS_L2:
        g = g + p * l2
    difference = g - m
    m = m + difference * one_minus_beta1 if IS_LERP else g - difference * beta1
    v = v * beta2 + (g * one_minus_beta2) * g
    one = tl.full(v.shape, 1.0, tl.float32)
    d = tl.div_rn(one, tl.div_rn(one, tl.sqrt_rn(v))) + eps
    p = p + tl.div_rn(m * minus_step_size, d)

    stored = _rounded(p, param.dtype.element_ty)
    tl.store(param + offsets, stored, mask=mask)
    tl.store(exp_avg + offsets, _rounded(m, exp_avg.dtype.element_ty), mask=mask)
    tl.store(exp_avg_sq + offsets, _rounded(v, exp_avg_sq.dtype.element_ty), mask=mask)
    if HAS_COMPUTE:
        tl.store(compute + offsets, _rounded(_widened(stored), compute.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["numel", "num_runs"])
def adam_kernel(
    param,
    grad,
    exp_avg,
    exp_avg_sq,
    compute,
    table,
    numel,
    num_runs,
    grad_factor,
    l2,
    shrink,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    minus_step_size,
    HAS_TABLE: tl.constexpr,
    HAS_L2: tl.constexpr,
    IS_LERP: tl.constexpr,
    HAS_COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of one run. Without a table there is one run, of `numel` elements from the first on.

    With one, `table` is int64, `[3, num_runs]`: first block, first element in units of `ALIGN`, numel.
    """
    block = tl.program_id(0).to(tl.int64)
    if HAS_TABLE:
        run, block = _place(block, table, num_runs, BLOCK)
        start = tl.load(table + num_runs + run) * ALIGN + block * BLOCK
        left = tl.load(table + 2 * num_runs + run) - block * BLOCK
    else:
        start = block * BLOCK
        left = numel - start
    lane = tl.arange(0, BLOCK)
    offsets = start + lane
    if left >= BLOCK:
        _adam_block(
            param,
            grad,
            exp_avg,
            exp_avg_sq,
            compute,
            offsets,
            None,
            grad_factor,
            l2,
            shrink,
            beta1,
            one_minus_beta1,
            beta2,
            one_minus_beta2,
            eps,
            minus_step_size,
            HAS_L2,
            IS_LERP,
            HAS_COMPUTE,
        )
    else:
        _adam_block(
            param,
            grad,
            exp_avg,
            exp_avg_sq,
            compute,
            offsets,
            lane < left,
            grad_factor,
            l2,
            shrink,
            beta1,
            one_minus_beta1,
            beta2,
            one_minus_beta2,
            eps,
            minus_step_size,
            HAS_L2,
            IS_LERP,
            HAS_COMPUTE,
        )


@triton.jit
def _term(
    values, offsets, left, scale, clamp, IS_FULL: tl.constexpr, IS_SQUARED: tl.constexpr, HAS_CLAMP: tl.constexpr
):
    """What is added up of these elements, in fp64; 0 from `left` on."""
    x = tl.load(values + offsets) if IS_FULL else tl.load(values + offsets, mask=offsets < left, other=0.0)
    wide = x if x.dtype == tl.float64 else _widened(x).to(tl.float64)
    if IS_SQUARED:
        wide = wide * scale
        if HAS_CLAMP:
            wide = tl.where(wide > clamp, clamp, wide)  # which keeps nan, as torch's does
            wide = tl.where(wide < -clamp, -clamp, wide)
        wide = wide * wide
    return wide


@triton.jit
def _halved(x, ROWS: tl.constexpr, HALF: tl.constexpr):
    """`[ROWS, 2 * HALF]` to `[ROWS, HALF]`: element i and i + HALF, one addition for each, whatever the lay-out."""
    return tl.sum(tl.reshape(x, (ROWS, 2, HALF)), axis=1)


@triton.jit
def _row_sums(
    values,
    first,
    left,
    scale,
    clamp,
    ROWS: tl.constexpr,
    IS_FULL: tl.constexpr,
    IS_SQUARED: tl.constexpr,
    HAS_CLAMP: tl.constexpr,
):
    """Sums of `ROWS` rows of `ALIGN` elements from `first` on, by halving; `[ROWS]`, fp64.

    Read in quarters, so that the lanes of one warp hold all of a row between them.
    """
    row = tl.arange(0, ROWS)[:, None] * ALIGN
    column = tl.arange(0, 128)[None, :]
    values += first
    a = _term(values, row + column, left, scale, clamp, IS_FULL, IS_SQUARED, HAS_CLAMP)
    b = _term(values, row + (column + 128), left, scale, clamp, IS_FULL, IS_SQUARED, HAS_CLAMP)
    c = _term(values, row + (column + 256), left, scale, clamp, IS_FULL, IS_SQUARED, HAS_CLAMP)
    d = _term(values, row + (column + 384), left, scale, clamp, IS_FULL, IS_SQUARED, HAS_CLAMP)
    x = (a + c) + (b + d)
    x = _halved(x, ROWS, 64)
    x = _halved(x, ROWS, 32)
    x = _halved(x, ROWS, 16)
    x = _halved(x, ROWS, 8)
    x = _halved(x, ROWS, 4)
    x = _halved(x, ROWS, 2)
    return tl.sum(x, axis=1)


@triton.jit(do_not_specialize=["num_runs", "scale_bits", "clamp_bits"])
def sum_kernel(
    values,
    sums,
    table,
    num_runs,
    scale_bits,
    clamp_bits,
    IS_SQUARED: tl.constexpr,
    HAS_CLAMP: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One level of a sum by halving: `ROWS` rows of `ALIGN` elements of one run.

    `table` is int64, `[4, num_runs]`: first block (of `ROWS` rows), first element in `values` in units of `UNIT`,
    numel, first element in `sums`. A run of no elements has one row all the same, of zeros. `scale_bits` and
    `clamp_bits` are fp64 numbers as int64: numbers as arguments would come as fp32.
    """
    scale = tl.full([], scale_bits, tl.int64).to(tl.float64, bitcast=True)
    clamp = tl.full([], clamp_bits, tl.int64).to(tl.float64, bitcast=True)
    run, block = _place(tl.program_id(0).to(tl.int64), table, num_runs, ROWS)
    skipped = block * (ROWS * ALIGN)
    first = tl.load(table + num_runs + run) * UNIT + skipped
    left = tl.load(table + 2 * num_runs + run) - skipped
    target = sums + tl.load(table + 3 * num_runs + run) + block * ROWS
    row = tl.arange(0, ROWS)
    if left >= ROWS * ALIGN:
        tl.store(target + row, _row_sums(values, first, left, scale, clamp, ROWS, True, IS_SQUARED, HAS_CLAMP))
    else:
        num_rows = tl.maximum((left + (ALIGN - 1)) // ALIGN, 1)
        totals = _row_sums(values, first, left, scale, clamp, ROWS, False, IS_SQUARED, HAS_CLAMP)
        tl.store(target + row, totals, mask=row < num_rows)


@triton.jit
def _mean_block(rows, mean, offsets, left, row_numel, num_rows, IS_FULL: tl.constexpr):
    first = tl.load(rows + offsets) if IS_FULL else tl.load(rows + offsets, mask=offsets < left, other=0.0)
    total = _widened(first)
    for _ in range(1, num_rows):
        rows += row_numel
        row = tl.load(rows + offsets) if IS_FULL else tl.load(rows + offsets, mask=offsets < left, other=0.0)
        total += _widened(row)
    value = _rounded(tl.div_rn(total, tl.full([], num_rows, tl.int32).to(tl.float32)), mean.dtype.element_ty)
    if IS_FULL:
        tl.store(mean + offsets, value)
    else:
        tl.store(mean + offsets, value, mask=offsets < left)


@triton.jit(do_not_specialize=["num_rows"])
def mean_kernel(rows, mean, row_numel, num_rows, BLOCK: tl.constexpr):
    """`mean[i]` is the mean of `rows[:, i]`, added up in fp32, from the first row on; a program for each block."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    left = row_numel - start
    offsets = tl.arange(0, BLOCK)
    if left >= BLOCK:
        _mean_block(rows + start, mean + start, offsets, left, row_numel, num_rows, True)
    else:
        _mean_block(rows + start, mean + start, offsets, left, row_numel, num_rows, False)

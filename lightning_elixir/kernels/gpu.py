"""Adam, and norms and means of gradients, on an NVIDIA GPU, by compiled code: the bits of the torch operations it
stands for.

The code itself is in `triton_code`; here is what is launched, and over what. Torch's builds for CUDA bring Triton.
Where it is missing, or cannot compile (it needs a C compiler for its launchers), every function here says so by its
result, and the caller goes on with torch's operations.

[Note: tables on the device] Which elements belong together is read from a small table in device memory, which stays
there from step to step; what changes with every step goes as arguments of the launch. So a step like the last copies
nothing to the device, where it would queue behind the chunks that are fetched. Tables are kept for each stream apart:
they are filled and freed in the order of the stream that reads them, and no stream has to wait for another.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_elixir.core.device import current_device
from lightning_elixir.kernels.sequence import Operands, Scalars, Table
from lightning_elixir.plan.types import ALIGN_NUMEL

log = logging.getLogger(__name__)

_T = TypeVar("_T")

Runs = tuple[tuple[int, int], ...]
"""First element, a multiple of `ALIGN_NUMEL`, and numel of each of some runs of elements."""

_ADAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SUM_DTYPES = (*_ADAM_DTYPES, torch.float64)

_ADAM_BLOCK = 1024
_ADAM_WARPS = 8
"""Four elements a thread: fp32 goes in accesses of 16 bytes, 16-bit values in accesses of 8 by the same threads, so
that nothing has to change places between threads."""

_SUM_ROWS = 8
_SUM_WARPS = 4
"""32 elements a thread, in four parts of 8; see `triton_code`."""

_MEAN_BLOCK = 2048
_MEAN_WARPS = 4
"""16 elements a thread, in accesses of 16 bytes."""

_EXACT = {"enable_fp_fusion": False}
"""No contraction into fused multiply-adds. Denormals are kept without being asked for."""

_MAX_TABLES = 4096
"""Far more than chunks times streams; the tables of one chunk take a few hundred bytes, or 24 a parameter tensor."""


class SumLevel(NamedTuple):
    """One level of sums by halving: every run of elements to one sum for each `ALIGN_NUMEL` of them."""

    table: tuple[int, ...]
    """`[4, runs]`, as `triton_code.sum_kernel` reads it."""
    num_blocks: int
    """Programs of the launch."""
    num_sums: int
    """Of all runs together."""


def adam_update(operands: Operands, table: Table) -> bool:
    """Carry out the written sequence (`sequence`) over parts of tensors on the device, in place, on the current stream.

    One launch for each set of numbers in the table. Elements outside the parts are neither read nor written.

    Args:
        operands: Without `outputs`; every one fp32, bf16 or fp16.
        table: Parts of the tensors, each starting at a multiple of `ALIGN_NUMEL`.

    Returns:
        Whether it was done; if not, nothing has been changed.
    """
    tensors = [x for x in operands[:5] if x is not None]
    if any(x.dtype not in _ADAM_DTYPES for x in tensors) or any(start % ALIGN_NUMEL for start, _, _ in table):
        return False
    kernels = _kernels()
    if not kernels.are_usable:
        return False
    written = [x for x in tensors if x is not operands.grad]
    is_begun = False
    for scalars, runs in group_parts(table):
        try:
            with kernels.lock, current_device(operands.param.device):
                _launch_adam(kernels.code, tensors, scalars, runs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # compilers fail in many ways
            if is_begun:
                raise
            kernels.give_up(error)
            return False
        is_begun = True
    torch.autograd.graph.increment_version(written)  # as torch's own operations do: autograd finds stale values by it
    return True


def square_sums(shard: Tensor, segments: Runs, scale: float = 1.0, clamp: float | None = None) -> Tensor | None:
    """`optim.scaling.square_sums` in one launch for each level of sums, on the current stream; checks nothing.

    Returns:
        fp64, on the shard's device, `[len(segments)]`; None if it cannot be done here.
    """
    kernels = _kernels()
    if shard.dtype not in _SUM_DTYPES or not kernels.are_usable:
        return None
    if not any(numel for _, numel in segments):
        return torch.zeros(len(segments), dtype=torch.float64, device=shard.device)
    return kernels.attempt(shard.device, _launch_sums, shard, segments, scale, clamp)


def mean_of_rows(rows: Tensor, mean: Tensor) -> bool:
    """`core.comm.mean_of_rows` in one pass over the rows, on the current stream.

    Args:
        rows: `[n, numel]`, contiguous, on the device.
        mean: `[numel]`, contiguous; overwritten.

    Returns:
        Whether it was done; if not, nothing has been changed.
    """
    kernels = _kernels()
    if not {rows.dtype, mean.dtype} <= set(_ADAM_DTYPES) or not kernels.are_usable:
        return False
    if not kernels.attempt(rows.device, _launch_mean, rows, mean):
        return False
    torch.autograd.graph.increment_version(mean)
    return True


def group_parts(table: Table) -> list[tuple[Scalars, Runs]]:
    """Parts with the same numbers together, and those that touch as one."""
    groups: dict[Scalars, list[tuple[int, int]]] = {}
    for start, numel, scalars in table:
        runs = groups.setdefault(scalars, [])
        if runs and sum(runs[-1]) == start:
            runs[-1] = (runs[-1][0], runs[-1][1] + numel)
        elif numel:
            runs.append((start, numel))
    return [(scalars, tuple(runs)) for scalars, runs in groups.items() if runs]


def run_table(runs: Runs, block_numel: int) -> tuple[tuple[int, ...], int]:
    """`[3, runs]` as `triton_code.adam_kernel` reads it, and the number of blocks in all."""
    blocks = [-(-numel // block_numel) for _, numel in runs]
    starts = [start // ALIGN_NUMEL for start, _ in runs]
    return (*_sums_before(blocks), *starts, *(numel for _, numel in runs)), sum(blocks)


def sum_levels(segments: Runs) -> list[SumLevel]:
    """The levels that leave one sum of each segment, in the order of the segments; at least one."""
    firsts = [offset // ALIGN_NUMEL for offset, _ in segments]
    counts = [numel for _, numel in segments]
    levels = []
    while True:
        rows = [max(1, -(-count // ALIGN_NUMEL)) for count in counts]
        blocks = [-(-count // _SUM_ROWS) for count in rows]
        targets = _sums_before(rows)
        levels.append(SumLevel((*_sums_before(blocks), *firsts, *counts, *targets), sum(blocks), sum(rows)))
        if max(rows) == 1:
            return levels
        firsts, counts = targets, rows


class _Kernels:
    """Triton's code, or the reason why it is not used in this process."""

    code: Any = None

    def __init__(self) -> None:
        self.lock = threading.Lock()  # streamed updates have a thread of their own; Triton promises nothing about that
        try:
            if torch.version.hip is not None:
                raise ImportError("the kernels have been written for NVIDIA GPUs alone")
            self.code = importlib.import_module("lightning_elixir.kernels.triton_code")
        except Exception as error:  # whatever a broken installation raises
            self.give_up(error)

    @property
    def are_usable(self) -> bool:
        return self.code is not None and os.environ.get("LIGHTNING_ELIXIR_KERNELS", "1") != "0"

    def attempt(self, device: torch.device, launch: Callable[..., _T], *args: Any) -> _T | None:
        """What a launch gives, called with the code and `args`; None if it fails: torch does without from now on."""
        try:
            with self.lock, current_device(device):
                return launch(self.code, *args)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # compilers fail in many ways
            self.give_up(error)
            return None

    def give_up(self, error: Exception) -> None:
        """Leave everything to torch from now on."""
        self.code = None
        log.warning(
            "Triton's kernels for Adam and gradients are not used, but torch's operations, which give the same "
            "numbers in several times as long: %s: %s",
            type(error).__name__,
            str(error).strip() or "no message",
        )


_first_use = threading.Lock()  # one object for all threads, and so one lock around Triton


def _kernels() -> _Kernels:
    with _first_use:
        return _the_kernels()


@functools.cache
def _the_kernels() -> _Kernels:
    return _Kernels()


def _launch_adam(code: Any, tensors: list[Tensor], scalars: Scalars, runs: Runs) -> None:
    param, grad, exp_avg, exp_avg_sq, *compute = tensors
    has_table = len(runs) > 1
    if has_table:
        table, num_blocks = _table_of_runs(runs, param.device, _stream_id(param.device))
        numel = 0
    else:
        start, numel = runs[0]
        param, grad, exp_avg, exp_avg_sq, *compute = (x[start : start + numel] for x in tensors)
        table, num_blocks = grad, -(-numel // _ADAM_BLOCK)  # any tensor will do: it is not read
    code.adam_kernel[(num_blocks,)](
        param,
        grad,
        exp_avg,
        exp_avg_sq,
        *(compute or [param]),
        table,
        numel,
        len(runs),
        *torch.tensor(scalars, dtype=torch.float32, device="cpu").tolist(),  # rounded here, beyond the range to inf
        HAS_TABLE=has_table,
        HAS_L2=scalars.l2 != 0.0,
        IS_LERP=scalars.one_minus_beta1 < 0.5,
        HAS_COMPUTE=bool(compute),
        BLOCK=_ADAM_BLOCK,
        num_warps=_ADAM_WARPS,
        **_EXACT,
    )


def _launch_sums(code: Any, shard: Tensor, segments: Runs, scale: float, clamp: float | None) -> Tensor:
    values = shard
    for i, (level, table) in enumerate(_tables_of_sums(segments, shard.device, _stream_id(shard.device))):
        is_first = i == 0
        sums = torch.empty(level.num_sums, dtype=torch.float64, device=shard.device)
        code.sum_kernel[(level.num_blocks,)](
            values,
            sums,
            table,
            len(segments),
            _bits(scale),
            _bits(0.0 if clamp is None else clamp),
            IS_SQUARED=is_first,
            HAS_CLAMP=is_first and clamp is not None,
            UNIT=ALIGN_NUMEL if is_first else 1,
            ROWS=_SUM_ROWS,
            num_warps=_SUM_WARPS,
            **_EXACT,
        )
        values = sums
    return values


def _launch_mean(code: Any, rows: Tensor, mean: Tensor) -> Literal[True]:
    num_rows, numel = rows.shape
    grid = (-(-numel // _MEAN_BLOCK),)
    code.mean_kernel[grid](rows, mean, numel, num_rows, BLOCK=_MEAN_BLOCK, num_warps=_MEAN_WARPS, **_EXACT)
    return True


@functools.lru_cache(maxsize=_MAX_TABLES)
def _table_of_runs(runs: Runs, device: torch.device, stream_id: int) -> tuple[Tensor, int]:
    table, num_blocks = run_table(runs, _ADAM_BLOCK)
    return _on_device(table, device), num_blocks


@functools.lru_cache(maxsize=_MAX_TABLES)
def _tables_of_sums(segments: Runs, device: torch.device, stream_id: int) -> list[tuple[SumLevel, Tensor]]:
    levels = sum_levels(segments)
    # One tensor for all: each would take a block of the allocator's of its own.
    tables = _on_device([x for level in levels for x in level.table], device).unflatten(0, (len(levels), -1))
    return list(zip(levels, tables.unbind(), strict=True))


def _on_device(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu").to(device, non_blocking=True)


def _sums_before(counts: list[int]) -> list[int]:
    total = 0
    sums = []
    for count in counts:
        sums.append(total)
        total += count
    return sums


def _bits(x: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", x))[0])


def _stream_id(device: torch.device) -> int:
    """The stream that Triton launches on."""
    return 0 if device.type == "cpu" else torch.accelerator.current_stream(device).stream_id

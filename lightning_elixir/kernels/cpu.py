"""Adam, sums and norms of gradients on the host, each in one pass, by code that is compiled on first use.

Where there is no compiler, or anything else is wrong, there is one line in the log, and torch's operations do the same
to the bit, more slowly.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from pathlib import Path

import torch
from torch import Tensor

from lightning_elixir.core.cache import default_cache_dir
from lightning_elixir.core.threads import default_num_threads
from lightning_elixir.kernels.addition import Addition, run_addition
from lightning_elixir.kernels.compilation import BuildError, load_library
from lightning_elixir.kernels.sequence import Operands, Scalars, Table, run_sequence

log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("adam.cpp")
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_NO_DTYPE = -1
_NUM_OPERANDS = 8
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)  # no subclasses: what they hold is not at their `data_ptr`

_TEST_NUMEL = 1100
_TEST_SCALARS = (
    Scalars(0.5, 0.0, 0.999, 0.9, 0.1, 0.999, 0.001, 1e-8, -1e-3),
    Scalars(-1.0, 0.1, 1.0, 0.3, 0.7, 0.95, 0.05, 1e-6, -1e-2),
)


def adam_update(operands: Operands, table: Table, num_threads: int | None = None) -> bool:
    """Carry out the written sequence over parts of tensors on the host, without the GIL.

    Args:
        operands: Every one fp32, bf16 or fp16.
        table: What to update; elements outside stay as they are.
        num_threads: None: as `core.threads.default_num_threads` says.

    Returns:
        False if this cannot be done here, and nothing has been changed.
    """
    tensors = (*operands[:5], *(operands.outputs or ()))
    if not all(x is None or _is_plain(x) for x in tensors) or torch.compiler.is_compiling():
        return False
    kernel = _the_kernel.get()
    if kernel is None:
        return False
    num_threads = default_num_threads() if num_threads is None else num_threads
    kernel.update(tensors, table, num_threads)
    # As torch's own writes do, so that autograd notices a saved tensor that has changed.
    written = (*operands.results, operands.compute)
    torch.autograd.graph.increment_version([x for x in written if x is not None])
    return True


def square_sums(
    shard: Tensor, segments: Sequence[tuple[int, int]], scale: float = 1.0, clamp: float | None = None
) -> Tensor | None:
    """`optim.scaling.square_sums` for an fp32, bf16 or fp16 shard on the host, without the GIL; checks nothing.

    Returns:
        fp64, `[len(segments)]`; None if this cannot be done here.
    """
    if not _is_plain(shard) or torch.compiler.is_compiling():
        return None
    kernel = _the_kernel.get()
    if kernel is None:
        return None
    return kernel.square_sums(shard, segments, scale, math.inf if clamp is None else clamp, default_num_threads())


def add_up(total: Tensor, grad: Tensor, addition: Addition, num_threads: int) -> bool:
    """`run_addition` for an fp32 sum on the host and an fp32, bf16 or fp16 gradient there, without the GIL.

    Args:
        total: 1-D, contiguous; changed in place.
        grad: 1-D, contiguous, same numel.
        addition: What `grad` is to `total`.
        num_threads: How many threads work, the calling one included.

    Returns:
        False if this cannot be done here, and nothing has been changed.
    """
    if total.dtype != torch.float32 or total.shape != grad.shape or torch.compiler.is_compiling():
        return False
    if not (_is_host_plain(total) and _is_host_plain(grad)):
        return False
    kernel = _the_kernel.get()
    if kernel is None:
        return False
    kernel.add_up(total, grad, addition, num_threads)
    torch.autograd.graph.increment_version(total)
    return True


def implementation() -> str:
    """What carries out updates on the host, for a log. Compiles it if that has not been done."""
    kernel = _the_kernel.get()
    return "torch operations" if kernel is None else f"compiled one-pass kernel ({kernel.names[0]})"


def prepare() -> None:
    """Compile and load what `adam_update` needs, so that its first call takes no longer than others."""
    _the_kernel.get()


@dataclass(frozen=True)
class Kernel:
    """The loaded library."""

    library: ctypes.CDLL
    names: tuple[str, ...] = field(init=False)
    """Of the implementations that this machine can run, the best first."""

    def __post_init__(self) -> None:
        library = self.library
        library.elixir_implementation_name.restype = ctypes.c_char_p
        pointer, int32, int64, double = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_double
        library.elixir_adam.argtypes = [int32, pointer, pointer, int64, pointer, pointer, int32]
        library.elixir_square_sums.argtypes = [int32, pointer, int32, int64, pointer, double, double, pointer, int32]
        library.elixir_add_up.argtypes = [int32, pointer, pointer, int32, int64, int32, int32]
        library.elixir_plain_loop.argtypes = [pointer, int64, int32]
        count = library.elixir_num_implementations()
        names = tuple(library.elixir_implementation_name(which).decode() for which in range(count))
        object.__setattr__(self, "names", names)

    def update(self, operands: Sequence[Tensor | None], table: Table, num_threads: int, which: int = 0) -> None:
        """One update.

        Args:
            operands: Parameter, gradient, moments, and what receives the new parameter or None; flat, on the host. If
                they shall not be written over, then what receives parameter and moments, in the same dtypes.
            num_threads: How many threads work, the calling one included.
            which: The number of the implementation.

        Raises:
            MemoryError: Without room for a table of the parts; nothing has been changed.
        """
        operands = [*operands, *[None] * (_NUM_OPERANDS - len(operands))]
        addresses = _addresses(operands)
        dtypes = array("i", [_NO_DTYPE if x is None else _DTYPES[x.dtype] for x in operands])
        spans = array("q", chain.from_iterable((start, numel) for start, numel, _ in table))
        scalars = array("d", chain.from_iterable(numbers for _, _, numbers in table))
        arrays = [x.buffer_info()[0] for x in (addresses, dtypes, spans, scalars)]
        if self.library.elixir_adam(which, arrays[0], arrays[1], len(table), arrays[2], arrays[3], num_threads):
            raise MemoryError(f"no host memory for a table of {len(table)} parts")

    def square_sums(
        self,
        shard: Tensor,
        segments: Sequence[tuple[int, int]],
        scale: float,
        limit: float,
        num_threads: int,
        which: int = 0,
    ) -> Tensor:
        """Sums of squares of segments that start at multiples of `ALIGN_NUMEL`; `limit` may be infinite.

        Raises:
            MemoryError: Without room for the sums of all rows.
        """
        sums = torch.zeros(len(segments), dtype=torch.float64, device="cpu")
        spans = array("q", chain.from_iterable(segments))
        address, dtype, count = shard.data_ptr(), _DTYPES[shard.dtype], len(segments)
        if self.library.elixir_square_sums(
            which, address, dtype, count, spans.buffer_info()[0], scale, limit, sums.data_ptr(), num_threads
        ):
            raise MemoryError(f"no host memory for sums over {shard.numel()} elements")
        return sums

    def add_up(self, total: Tensor, grad: Tensor, addition: Addition, num_threads: int, which: int = 0) -> None:
        """Bring a gradient to an fp32 sum; both flat, on the host, of one numel.

        Raises:
            MemoryError: As for `update`.
        """
        addresses, dtype = (total.data_ptr(), grad.data_ptr()), _DTYPES[grad.dtype]
        if self.library.elixir_add_up(which, *addresses, dtype, total.numel(), int(addition), num_threads):
            raise MemoryError("no host memory for a table of one part")

    def plain_loop(self, operands: Sequence[Tensor | None], numel: int, num_threads: int) -> None:
        """Read three fp32 tensors (first, third, fourth) and a bf16 one (second), and write the three.

        What memory gives to as many streams as Adam has: for benchmarks.

        Raises:
            MemoryError: As for `update`.
        """
        addresses = _addresses(operands)
        if self.library.elixir_plain_loop(addresses.buffer_info()[0], numel, num_threads):
            raise MemoryError("no host memory for a table of one part")


def load_kernel() -> Kernel:
    """Compile, load and test the kernel.

    Raises:
        BuildError: There is none that works here.
    """
    cache = default_cache_dir()
    library = load_library(_SOURCE, None if cache is None else cache / "kernels", _check_library)
    return Kernel(library)


class _Once:
    """The kernel of this process: found at the first use, or not."""

    def __init__(self, load: Callable[[], Kernel]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._is_known = False
        self._kernel: Kernel | None = None

    def get(self) -> Kernel | None:
        if not self._is_known:
            with self._lock:
                if not self._is_known:
                    self._kernel = self._find()
                    self._is_known = True
        return self._kernel

    def _find(self) -> Kernel | None:
        if os.environ.get("LIGHTNING_ELIXIR_KERNELS", "1") == "0":
            log.info("compiled kernels are turned off by LIGHTNING_ELIXIR_KERNELS=0")
            return None
        try:
            return self._load()
        except BuildError as error:
            log.warning("updates and sums on the host run slower than they could, by torch operations: %s", error)
        except Exception:  # whatever it is, training can go on
            log.warning("updates and sums on the host run slower than they could, by torch operations", exc_info=True)
        return None


_the_kernel = _Once(load_kernel)


def _is_plain(x: Tensor) -> bool:
    return type(x) in _PLAIN_TYPES and x.dtype in _DTYPES and not x.is_inference()


def _is_host_plain(x: Tensor) -> bool:
    return _is_plain(x) and x.device.type == "cpu" and x.is_contiguous()


def _addresses(operands: Sequence[Tensor | None]) -> array[int]:
    return array("Q", [0 if x is None else x.data_ptr() for x in operands])


def _check_library(library: ctypes.CDLL) -> None:
    """A small update of each kind against the written sequence."""
    # The first use may be under the user's, of another dtype or device.
    with torch.autocast("cpu", enabled=False), torch.device("cpu"), torch.no_grad():
        _check_kernel(Kernel(library))


def _check_kernel(kernel: Kernel) -> None:
    table: Table = [(0, 700, _TEST_SCALARS[0]), (704, _TEST_NUMEL - 704, _TEST_SCALARS[1])]
    generator = torch.Generator().manual_seed(0)
    for dtype, grad_dtype in product((torch.float32, torch.bfloat16), _DTYPES):
        start = torch.rand(4, _TEST_NUMEL, generator=generator)
        param, exp_avg, exp_avg_sq = (x.to(dtype) for x in start[1:])
        grad = start[0].sub(0.5).to(grad_dtype)
        first = [x.clone() for x in (param, grad, exp_avg, exp_avg_sq)]
        second = [x.clone() for x in first]
        third = [x.clone() for x in first]
        compute = torch.empty(_TEST_NUMEL + 1, dtype=grad_dtype)[1:]  # where no vector would begin
        kernel.update([*(x.clone() for x in first), compute], table, 2)
        kernel.update([*second, third[1], third[0], *third[2:]], table, 2)
        kernel.update([*first, first[1]], table, 2)
        written = torch.cat([compute[begin : begin + numel] for begin, numel, _ in table])
        if not torch.equal(written, torch.cat([first[1][begin : begin + numel] for begin, numel, _ in table])):
            raise ValueError(f"new values of {grad_dtype} beside parameters of {dtype} come out wrong")
        for begin, numel, scalars in table:
            p, g, m, v = (x[begin : begin + numel] for x in second)
            run_sequence(p, g, m, v, scalars, g)
        if not all(torch.equal(a, b) and torch.equal(c, b) for a, b, c in zip(first, second, third, strict=True)):
            raise ValueError(f"parameters of {dtype} with gradients of {grad_dtype} come out wrong")
    for dtype, addition in product(_DTYPES, Addition):
        grad = torch.rand(_TEST_NUMEL, generator=generator).sub(0.5).to(dtype)
        total = torch.rand(_TEST_NUMEL, generator=generator).to(dtype).float()
        sums = [total.clone(), total.clone()]
        kernel.add_up(sums[0], grad, addition, 2)
        run_addition(sums[1], grad, addition)
        if not torch.equal(*sums):
            raise ValueError(f"sums of gradients of {dtype} come out wrong")

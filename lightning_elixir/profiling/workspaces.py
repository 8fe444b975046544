"""What CUDA's kernels allocate beside their results, and free when they return.

The formulas were read off an H200 (torch 2.11, CUDA 13): memory in use before, in and after each operator. Devices with
fewer multiprocessors than that one need less.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_MIB = 1 << 20

# cuBLAS: kept from a thread's first matrix product on. Backward has a thread, and so a handle, of its own.
MATMUL_WORKSPACE_BYTES = 32 * _MIB
BIASED_MATMUL_WORKSPACE_BYTES = _MIB  # cuBLASLt, for products with a bias
BIASED_MATMULS = frozenset((aten.addmm,))
MATMULS = frozenset((aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.addbmm, aten.mv, aten.addmv, aten.dot))

# The device of which the most workspace is asked.
_NUM_MULTIPROCESSORS = 132
_THREADS_PER_MULTIPROCESSOR = 2048


def workspace_bytes(packet: Any, args: tuple[Any, ...], outputs: list[Tensor]) -> tuple[int, ...]:
    """Sizes of the allocations that live while an operator runs.

    Args:
        packet: The operator, without its overload, such as `torch.ops.aten.mm`.
        args: Its positional operands.
        outputs: Its results.
    """
    formula = _FORMULAS.get(packet)
    return () if formula is None else formula(args, outputs)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _reduction(args: tuple[Any, ...], outputs: list[Tensor]) -> tuple[int, ...]:
    """Sums over outer dimensions, such as gradients of biases, are split over blocks that meet in global memory."""
    source = args[0]
    dims = args[1] if len(args) > 1 and isinstance(args[1], (tuple, list)) else ()
    reduced = {d % source.dim() for d in dims} if dims else set(range(source.dim()))
    wide = [d for d in range(source.dim()) if source.shape[d] > 1]
    if not wide or min(wide, key=source.stride) in reduced:
        return ()
    num_inputs = math.prod(source.shape[d] for d in reduced)
    return _outer_reduction_bytes(num_inputs, source.numel() // max(1, num_inputs), max(4, source.element_size()))


def _outer_reduction_bytes(num_inputs: int, num_outputs: int, itemsize: int) -> tuple[int, ...]:
    """torch's launch configuration of such a sum (ATen/native/cuda/Reduce.cuh), as far as it decides the buffer."""
    if num_inputs < 1 or num_outputs < 1:
        return ()
    vector = next(n for n in (4, 2, 1) if num_outputs % n == 0)
    max_threads = 512 // vector
    columns = min(_last_power_of_2(num_outputs // vector), max_threads)
    height = min(_last_power_of_2(num_inputs), max_threads // min(columns, 32), max_threads)
    width = min(columns, max_threads // height)
    if num_inputs < min(height * 16, 256):
        return ()
    values = -(-num_inputs // height)
    grid = -(-num_outputs // (vector * width))
    target = _NUM_MULTIPROCESSORS * (_THREADS_PER_MULTIPROCESSOR // (width * height))
    if values < 256 or grid > target:
        return ()
    splits = max(min(-(-target // grid), -(-values // 16)), -(-values // 256))
    return (itemsize * num_outputs * splits * width * vector, 4 * grid) if splits > 1 else ()


def _last_power_of_2(value: int) -> int:
    return 1 << (value.bit_length() - 1)


def _softmax_backward(args: tuple[Any, ...], outputs: list[Tensor]) -> tuple[int, ...]:
    return (_nbytes(args[1]),)  # gradient times output


def _safe_softmax(args: tuple[Any, ...], outputs: list[Tensor]) -> tuple[int, ...]:
    return (args[0].numel(), args[0].numel() // max(1, args[0].shape[-1]))  # which elements, which rows are masked


def _embedding_backward(args: tuple[Any, ...], outputs: list[Tensor]) -> tuple[int, ...]:
    num_indices, num_rows = args[1].numel(), args[2]
    if num_indices <= 3072:
        return ()
    num_partials = num_indices // 10 + min(num_indices, num_rows)
    return (*[8 * num_indices] * 6, 8 * num_partials, 4 * num_partials * outputs[0].shape[-1])


def _index_put(args: tuple[Any, ...], outputs: list[Tensor]) -> tuple[int, ...]:
    if len(args) < 4 or not args[3]:  # indices are sorted where values are added up
        return ()
    return (48 * max((i.numel() for i in args[1] if i is not None), default=0),)


def _heads_expanded(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    """Gradients of keys and values, one for each head of the queries, where there are fewer of theirs."""
    if query.shape[1] == key.shape[1]:
        return ()
    groups = query.shape[1] // key.shape[1]
    return _nbytes(key) * groups, _nbytes(value) * groups


def _cudnn_backward(args: tuple[Any, ...], outputs: list[Tensor]) -> tuple[int, ...]:
    query, key, value = args[1:4]
    rows = query.numel() // query.shape[-1]
    return (4 * query.numel() + 4 * rows + 512, *_heads_expanded(query, key, value))


def _flash_backward(args: tuple[Any, ...], outputs: list[Tensor]) -> tuple[int, ...]:
    query, key, value = args[1:4]
    rows = query.shape[0] * query.shape[1] * _round_up(query.shape[2], 128)
    width = _round_up(query.shape[3], 32 if query.shape[3] <= 128 else 64)
    return (4 * rows * width, 4 * rows, *_heads_expanded(query, key, value))


def _efficient_forward(args: tuple[Any, ...], outputs: list[Tensor]) -> tuple[int, ...]:
    query, width = args[0], args[2].shape[-1]
    return (4 * outputs[0].numel(),) if query.element_size() == 2 and width > 128 else ()


def _efficient_backward(args: tuple[Any, ...], outputs: list[Tensor]) -> tuple[int, ...]:
    query = args[1]
    rows = query.shape[0] * query.shape[1] * _round_up(query.shape[2], 64)
    return (4 * rows * _round_up(query.shape[3], 64), 4 * rows, 4 * rows)


def _is_channels_last(tensor: Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def _convolution(args: tuple[Any, ...], outputs: list[Tensor]) -> tuple[int, ...]:
    """cuDNN works on channels-last copies of what is not laid out so."""
    source, weight = args[0], args[1]
    if _is_channels_last(source):
        return (_nbytes(weight),)
    return (_nbytes(source), _nbytes(outputs[0]), _nbytes(weight))


def _convolution_backward(args: tuple[Any, ...], outputs: list[Tensor]) -> tuple[int, ...]:
    grad, source, weight = args[0], args[1], args[2]
    kept = (2 * _nbytes(weight), 4 * _MIB)
    return kept if _is_channels_last(source) else (_nbytes(grad), _nbytes(source), *kept)


def _layer_norm_backward(args: tuple[Any, ...], outputs: list[Tensor]) -> tuple[int, ...]:
    """A gradient that is not contiguous is copied; many short rows are summed in parts."""
    grad, width = args[0], math.prod(args[2])
    copied = () if grad.is_contiguous() else (_nbytes(grad),)
    is_split = grad.numel() // max(1, width) > 64 * 1024 and width // 32 < _NUM_MULTIPROCESSORS // 2
    return (*copied, 16 * _MIB) if is_split else copied


_FORMULAS: dict[Any, Callable[[tuple[Any, ...], list[Tensor]], tuple[int, ...]]] = {
    aten.sum: _reduction,
    aten.mean: _reduction,
    aten._softmax_backward_data: _softmax_backward,
    aten._safe_softmax: _safe_softmax,
    aten.embedding_dense_backward: _embedding_backward,
    aten.index_put: _index_put,
    aten.index_put_: _index_put,
    aten._scaled_dot_product_cudnn_attention_backward: _cudnn_backward,
    aten._scaled_dot_product_flash_attention_backward: _flash_backward,
    aten._scaled_dot_product_efficient_attention: _efficient_forward,
    aten._scaled_dot_product_efficient_attention_backward: _efficient_backward,
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution_backward,
    aten.native_layer_norm_backward: _layer_norm_backward,
}

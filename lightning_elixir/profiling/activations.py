"""Peak of the bytes that one training step needs beside the chunks, from fake tensors: no GPU, no weights."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_elixir.errors import PlanError

StepFn = Callable[[nn.Module, Mapping[str, Any]], object]
"""Runs forward and backward of one step on (model, inputs)."""

# The CUDA caching allocator hands out multiples of this.
_ALLOCATION_BYTES = 512


def measure_non_model_bytes(
    model: nn.Module, inp: Mapping[str, Any], step_fn: StepFn, compute_dtype: torch.dtype | None = None
) -> int:
    """Peak bytes of activations, buffers, inputs and temporaries during `step_fn`. Gradients of parameters are left out
    once they are accumulated (the engine moves each into its chunk at that moment).

    Runs on a copy of the model made of fake CPU tensors; neither the model nor the random state changes.

    Args:
        model: On any device, `meta` included.
        inp: Real tensors (any nesting of them), as `step_fn` takes them.
        step_fn: Called once with the copy and fake inputs.
        compute_dtype: Dtype of parameters, and of floating inputs if it is a 16-bit one; None: as they are.

    Raises:
        PlanError: `step_fn` fails without real values, for example because it reads one with `.item()`.
    """
    try:
        return _measure(model, inp, step_fn, compute_dtype)
    except Exception as error:  # whatever the user's code raises: here it means that it cannot be profiled
        raise PlanError(
            f"step_fn cannot be profiled without real data ({type(error).__name__}: {error}). It must not read values"
            " (.item(), .cpu(), control flow on tensors) or move tensors to a device; or use simple_search with"
            " non_model_bytes given"
        ) from error


def _measure(model: nn.Module, inp: Mapping[str, Any], step_fn: StepFn, compute_dtype: torch.dtype | None) -> int:
    # Plain tensors that a module holds outside its buffers come along as they are.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    input_dtype = compute_dtype if compute_dtype is not None and compute_dtype.itemsize == 2 else None
    with mode:
        fake_model = _fake_copy(model, compute_dtype)
        fake_inp = tree_map_only(Tensor, lambda t: _fake_like(t, input_dtype), inp)
        tracker = _PeakTracker()
        for buffer in fake_model.buffers():
            tracker.add(buffer)
        for tensor in tree_leaves(fake_inp):
            if isinstance(tensor, Tensor):
                tracker.add(tensor)
        for parameter in fake_model.parameters():
            tracker.ignore(parameter)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_drop_grad)
        with torch.random.fork_rng(devices=[]), tracker:
            step_fn(fake_model, fake_inp)
    return tracker.peak_bytes


class _PeakTracker(TorchDispatchMode):
    """Counts the bytes of every storage from the operator that makes it until it dies."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._live_bytes = 0
        self._sizes: dict[int, int] = {}  # storage address -> bytes; 0 for what is not counted

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self.add(value)
        return result

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._track(storage, -(-storage.nbytes() // _ALLOCATION_BYTES) * _ALLOCATION_BYTES)

    def ignore(self, tensor: Tensor) -> None:
        self._track(tensor.untyped_storage(), 0)

    def _track(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        address = storage._cdata
        if address in self._sizes:
            return
        self._sizes[address] = nbytes
        self._live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        weakref.finalize(storage, self._forget, address).atexit = False

    def _forget(self, address: int) -> None:
        self._live_bytes -= self._sizes.pop(address)


def _drop_grad(parameter: Tensor) -> None:
    parameter.grad = None


def _fake_copy(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """A deep copy whose parameters and buffers are fake; ties are kept. To be called under the fake mode."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(_fake_like(parameter, dtype), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = _fake_like(buffer, None)
    return copy.deepcopy(model, memo)


def _fake_like(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A fake CPU tensor of this shape; floating-point ones in `dtype` if given."""
    kept = tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=kept, device="cpu").requires_grad_(
        tensor.requires_grad and not isinstance(tensor, nn.Parameter)
    )

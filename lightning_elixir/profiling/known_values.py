"""Small tensors whose values are known stay real in a step on fake tensors, so that code may look at them.

Models read whether a mask masks anything, whether positions start anew, how long a sequence is, from tensors made of
the step's integer inputs, or of nothing. Such a value decides which way a layer takes, so it should be the true one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_elixir.errors import PlanError
from lightning_elixir.profiling.fake_results import FakeResults

_MAX_NUMEL = 1 << 22
_MAX_NUMEL_OF_MODEL = 4096
_VALUE_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


def is_knowable(tensor: Tensor) -> bool:
    """Whether an input of the step is kept with its values: small ones of integers or booleans are."""
    is_plain = tensor.layout is torch.strided and not tensor.is_meta and not isinstance(tensor, FakeTensor)
    return is_plain and not (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() <= _MAX_NUMEL


def run(
    func: Any,
    types: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    sources: Iterable[Tensor],
    results: FakeResults,
    max_numel: int = _MAX_NUMEL,
) -> Any:
    """Run an operator under a fake mode; for real if all of its operands are, and what comes out is small.

    Args:
        func: The operator.
        types: As `__torch_dispatch__` gets them.
        args: Its positional operands.
        kwargs: Its keyword operands.
        sources: The tensors among them.
        results: Of the operators before.
        max_numel: Elements of a small tensor.
    """
    if any(isinstance(tensor, FakeTensor) or tensor.requires_grad for tensor in sources):
        return results.run(func, types, args, kwargs)
    if not any(tag in func.tags for tag in _VALUE_TAGS):
        fake = results.run(func, types, args, kwargs)
        made = [t for t in tree_leaves(fake) if isinstance(t, Tensor)]
        if any(t.device.type != "cpu" or t.numel() > max_numel for t in made):
            return fake
    with unset_fake_temporarily():
        return func(*args, **kwargs)


class KnownValues(TorchDispatchMode):
    """Enter under a fake mode where a model is built: what is tiny has values, since constructors read some.
    Flags of other tensors are read as False, so that initializers which may have to draw again do not."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = FakeResults()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        sources = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(sources[0], FakeTensor):
            return False if sources[0].dtype is torch.bool else func(*args, **kwargs)
        return run(func, types, args, kwargs, sources, self._results, _MAX_NUMEL_OF_MODEL)


class Guesses:
    """To be called around each operator of code that reads numbers, to log or to check them, from tensors without
    values: those are taken to be 1, and answers no. Integers, which decide on shapes, stay unknown.

    A loop that waits for another answer would never end, so there are only so many: a thousand, and after a minute a
    hundred.
    """

    _MOST = 1000
    _MOST_LATER = 100
    _LATER_S = 60.0

    def __init__(self) -> None:
        self._num = 0
        self._first_s = 0.0

    def __call__(self, func: Any, args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        """Args:
            func: The operator.
            args: Its positional operands.
            run: Runs it.

        Raises:
            PlanError: Too many numbers were read.
        """
        is_read = func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor)
        if not is_read or not (args[0].dtype is torch.bool or args[0].is_floating_point()):
            return run()
        self._count()
        return False if args[0].dtype is torch.bool else 1.0

    def _count(self) -> None:
        now_s = time.monotonic()
        self._first_s = self._first_s or now_s
        self._num += 1
        is_late = now_s - self._first_s > self._LATER_S
        if self._num > (self._MOST_LATER if is_late else self._MOST):
            raise PlanError(f"{self._num} numbers were read from tensors without values; a loop may wait for others")

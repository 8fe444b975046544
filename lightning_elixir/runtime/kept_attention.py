"""Recomputing a block without its attention: results of fused attention stay from the block's forward, and stand for
computing them again.

Calls of attention are found by a mode for functions, which costs the host less than one that sees each operator, and
lets modules touch parameters as ever; within such a call, below autograd, a mode for operators finds the kernel. In the
recomputation autograd saves again what it has saved in forward, with the very results of then. A call is left to be
computed again that has dropout, needs no gradient, or lies inside a checkpoint or hooks for saved tensors of the user's
own; and so is one of whose results something was written to. What is compiled is not looked into.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_elixir.core.attention import OPERATORS, can_stand_in, is_attention
from lightning_elixir.runtime.hooks import innermost_pack

_aten = torch.ops.aten.scaled_dot_product_attention
# `multi_head_attention_forward` is written in Python, and calls the first where this mode does not see it.
_CALLS = frozenset((F.scaled_dot_product_attention, _aten, _aten.default, F.multi_head_attention_forward, *OPERATORS))


class _Result:
    """Of one call.

    Args:
        operator: That was called.
        value: What it gave.
    """

    def __init__(self, operator: Any, value: Any) -> None:
        self._operator = operator
        self._value = tree_map_only(Tensor, _alias, value)
        self._versions = self._now()

    def of(self, operator: Any) -> Any:
        """The same values as new tensors; None if that is another operator's, or they have changed."""
        if operator is not self._operator or self._now() != self._versions:
            return None
        return tree_map_only(Tensor, _alias, self._value)

    def _now(self) -> list[int]:
        return [value._version for value in tree_leaves(self._value) if isinstance(value, Tensor)]


def _alias(tensor: Tensor) -> Tensor:
    """Another tensor over the same storage, which shares its count of writes: autograd gives the first one a node, by
    which that would hold itself."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


class _Keeping:
    """In a forward: keeps what attention gives, call by call.

    Args:
        results: Where; None: such a call is computed again.
    """

    def __init__(self, results: list[_Result | None]) -> None:
        self._results = results
        self._pack: Any = None

    def begin(self) -> None:
        self._pack = innermost_pack()  # of the checkpoint around

    def attend(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self._results.append(None)  # first, since a call that raises has its place among the calls too
        value = operator(*args, **kwargs)
        needs_grad = torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args)
        is_checkpoints = self._pack is not None and innermost_pack() is self._pack
        if needs_grad and is_checkpoints and can_stand_in(operator, args, kwargs):
            self._results[-1] = _Result(operator, value)
        return value


class _Replaying:
    """In a recomputation: gives what was kept, in the order of the calls.

    Args:
        results: Kept.
    """

    def __init__(self, results: list[_Result | None]) -> None:
        self._results = results
        self._next = 0

    def begin(self) -> None:
        self._next = 0

    def attend(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        result = self._results[self._next] if self._next < len(self._results) else None
        self._next += 1
        value = None if result is None else result.of(operator)
        return operator(*args, **kwargs) if value is None else value


class _Operators(TorchDispatchMode):
    """Has something else give the results of attention.

    Args:
        attending: That.
    """

    def __init__(self, attending: _Keeping | _Replaying) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._attending = attending

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_attention(func):
            return self._attending.attend(func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)


class _Calls(TorchFunctionMode):
    """Around a block, in forward and in recomputations: of one class, so that what is compiled inside is so once.

    Args:
        attending: What attention gives comes from there.
    """

    def __init__(self, attending: _Keeping | _Replaying) -> None:
        super().__init__()
        self._attending, self._operators = attending, _Operators(attending)

    def __enter__(self) -> None:
        self._attending.begin()
        super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _CALLS and not torch.compiler.is_compiling():
            with self._operators:
                return func(*args, **(kwargs or {}))
        return func(*args, **kwargs) if kwargs else func(*args)


def keeping_attention() -> tuple[TorchFunctionMode, TorchFunctionMode]:
    """Contexts of a checkpoint: around the forward of a block, and around each of its recomputations."""
    results: list[_Result | None] = []
    return _Calls(_Keeping(results)), _Calls(_Replaying(results))

"""Recomputing a block without its attention: results of fused attention stay from the block's forward, and stand for
computing them again.

Below autograd a mode finds the operators. In the recomputation autograd saves again what it has saved in forward, with
the very results of then. A call is left to be computed again that has dropout, needs no gradient, or lies inside a
checkpoint or hooks for saved tensors of the user's own; and so is one of whose results something was written to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_elixir.core.attention import can_stand_in, is_attention

_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks  # None: there are no hooks


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


class _Mode(TorchDispatchMode):
    def __init__(self, results: list[_Result | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # what is compiled inside a block stays so; its attention is not seen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_attention(func):
            return self._attend(func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)

    def _attend(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        raise NotImplementedError


class _Keeping(_Mode):
    """Around a forward: keeps what attention gives, call by call."""

    _hooks: Any = None

    def __enter__(self) -> _Keeping:
        self._hooks = _top_hooks(False)  # of the checkpoint that this is the context of
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def _attend(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        value = operator(*args, **kwargs)
        needs_grad = torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args)
        is_kept = needs_grad and can_stand_in(operator, args, kwargs) and _same(_top_hooks(False), self._hooks)
        self._results.append(_Result(operator, value) if is_kept else None)
        return value


class _Replaying(_Mode):
    """Around a recomputation: gives what was kept, in the order of the calls."""

    _next = 0

    def __enter__(self) -> _Replaying:
        self._next = 0
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def _attend(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        result = self._results[self._next] if self._next < len(self._results) else None
        self._next += 1
        value = None if result is None else result.of(operator)
        return operator(*args, **kwargs) if value is None else value


def _same(hooks: Any, others: Any) -> bool:
    return hooks is not None and others is not None and hooks[0] is others[0]


def keeping_attention() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Around the forward of a block, and around each of its recomputations."""
    results: list[_Result | None] = []
    return _Keeping(results), _Replaying(results)

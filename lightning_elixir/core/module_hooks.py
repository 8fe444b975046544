"""Hooks and forwards of ours at the modules of a model, which copies of the model do without."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_state_dict_hooks")
_MARKS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


class OwnHook:
    """A hook, or an object whose methods are hooks, that does nothing in copies of a module."""


_OWN = "_is_own_forward"


def own_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function that a module gets as its forward, so that copies of the module do without."""
    setattr(forward, _OWN, True)
    return forward


def has_own_forward(module: nn.Module) -> bool:
    """Whether a module's forward is one of ours."""
    return hasattr(getattr(vars(module).get("forward"), "__func__", None), _OWN)


def without_hooks(modules: Iterable[nn.Module], memo: Mapping[int, Any]) -> None:
    """Take our hooks and forwards out of deep copies: TorchScript cannot compile them.

    Args:
        modules: The originals.
        memo: Of `copy.deepcopy`, which has come past the copies.
    """
    for module in modules:
        copied = memo.get(id(module))
        if isinstance(copied, nn.Module) and has_own_forward(copied):
            del vars(copied)["forward"]
        for name in _HOOKS:
            hooks: dict[int, Any] = memo.get(id(getattr(module, name))) or {}
            for key in [key for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", hook), OwnHook)]:
                del hooks[key]
                for mark in _MARKS:
                    marked: dict[int, Any] = memo.get(id(getattr(module, mark))) or {}
                    marked.pop(key, None)

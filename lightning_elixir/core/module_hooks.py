"""Hooks of ours at the modules of a model, which copies of the model do without."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_state_dict_hooks")
_MARKS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


class OwnHook:
    """A hook, or an object whose methods are hooks, that does nothing in copies of a module."""


def without_hooks(modules: Iterable[nn.Module], memo: Mapping[int, Any]) -> None:
    """Take our hooks out of deep copies: TorchScript cannot compile them.

    Args:
        modules: The originals.
        memo: Of `copy.deepcopy`, which has come past the copies.
    """
    for module in modules:
        for name in _HOOKS:
            hooks: dict[int, Any] = memo.get(id(getattr(module, name))) or {}
            for key in [key for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", hook), OwnHook)]:
                del hooks[key]
                for mark in _MARKS:
                    marked: dict[int, Any] = memo.get(id(getattr(module, mark))) or {}
                    marked.pop(key, None)

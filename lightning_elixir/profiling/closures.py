"""Functions that a copied model carries: what they hold is to be the copy's.

`copy.deepcopy` shares functions, with all that is in their closures and defaults, and so a `forward` that was put in
the place of another (`layer.forward = lambda *args: checkpoint(original, *args)`) or a hook leads back from a copy to
the modules of the original.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, cast
from weakref import ref

from torch import Tensor, nn

__all__ = ["rebind"]


def rebind(model: nn.Module, memo: Mapping[int, Any]) -> None:
    """Have what the modules of a copy carry as attributes or hooks reach the copies of modules and tensors.

    Args:
        model: The copy. Changed.
        memo: What the copy has in the place of others, by id, as `copy.deepcopy` leaves it.
    """
    rebinding = _Rebinding(memo)
    for module in model.modules():
        own = vars(module)
        for attributes in (own, *(value for value in own.values() if isinstance(value, dict))):
            for name, value in list(attributes.items()):
                if isinstance(value, _CARRIERS):
                    attributes[name] = rebinding.of(value)


_CARRIERS = (FunctionType, MethodType, partial, ref)


class _Rebinding:
    def __init__(self, memo: Mapping[int, Any]) -> None:
        self._memo = memo
        self._functions: dict[int, FunctionType] = {}

    def of(self, value: Any) -> Any:
        """The value, or another one in its place if something of the original is in it."""
        if isinstance(value, (nn.Module, Tensor)):
            return self._memo.get(id(value), value)
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            function, owner = self.of(value.__func__), self.of(value.__self__)
            is_same = function is value.__func__ and owner is value.__self__
            return value if is_same else MethodType(function, owner)
        if type(value) is partial:
            parts = (value.func, value.args, value.keywords)
            function, args, keywords = (self.of(part) for part in parts)
            is_same = all(a is b for a, b in zip(parts, (function, args, keywords), strict=True))
            return value if is_same else partial(function, *args, **keywords)
        if type(value) is ref:
            target = value()
            other = self.of(target)
            return value if other is target else ref(other)
        if type(value) in (list, tuple):
            items = [self.of(item) for item in value]
            return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(items)
        if type(value) is dict:
            found = {key: self.of(item) for key, item in value.items()}
            return value if all(found[key] is value[key] for key in found) else found
        return value

    def _function(self, function: FunctionType) -> FunctionType:
        if id(function) in self._functions:
            return self._functions[id(function)]
        self._functions[id(function)] = function  # what calls itself stays as it is, unless something else changes
        closure = function.__closure__ or ()
        held = [cell.cell_contents if _is_filled(cell) else None for cell in closure]
        defaults = self.of(function.__defaults__)
        named = self.of(function.__kwdefaults__)
        contents = [self.of(value) for value in held]
        is_same = defaults is function.__defaults__ and named is function.__kwdefaults__
        if is_same and all(a is b for a, b in zip(contents, held, strict=True)):
            return function
        cells = tuple(
            CellType(value) if _is_filled(cell) else cell for cell, value in zip(closure, contents, strict=True)
        )
        other = FunctionType(
            function.__code__, function.__globals__, function.__name__, cast(Any, defaults), cells or None
        )
        other.__kwdefaults__ = named
        other.__dict__.update(vars(function))
        self._functions[id(function)] = other
        return other


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - raises where there is nothing
    except ValueError:
        return False
    return True

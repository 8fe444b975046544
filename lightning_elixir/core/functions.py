"""What Python functions and the like hold, and copies of them that hold something else."""

from __future__ import annotations

from functools import partial
from types import BuiltinMethodType, CellType, FunctionType, MethodType, MethodWrapperType
from typing import Any
from weakref import ref


def copy_of(function: Any, closure: tuple[CellType, ...] | None, scope: dict[str, Any] | None = None) -> FunctionType:
    """The same function over other variables of the functions around it.

    Args:
        function: Written in Python.
        closure: A cell for each of its free variables.
        scope: Its globals; None: the same.
    """
    scope = function.__globals__ if scope is None else scope
    copied = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, closure)
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__module__, copied.__qualname__ = function.__module__, function.__qualname__
    copied.__doc__ = function.__doc__
    copied.__dict__.update(vars(function))
    return copied


def parts_of(value: Any) -> list[Any]:
    """What a function, a method (also one of Python's own, such as `[].append`), a partial one, a cell or a weak
    reference has at hand; nothing of any other value. Of a function these are cells and defaults."""
    if isinstance(value, FunctionType):
        return [*(value.__closure__ or ()), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, CellType):
        return held_by(value)
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, (BuiltinMethodType, MethodWrapperType)):
        return [value.__self__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    return [value()] if isinstance(value, ref) else []


def held_by(cell: CellType) -> list[Any]:
    """What is in a cell; empty while nothing is."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []

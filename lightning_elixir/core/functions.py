"""Python functions and what they hold, for those who need one that holds something else."""

from __future__ import annotations

from types import CellType, FunctionType
from typing import Any


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


def held_by(cell: CellType) -> list[Any]:
    """What is in a cell; empty while nothing is."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []

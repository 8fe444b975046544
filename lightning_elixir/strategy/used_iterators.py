"""Which iterators a model's code may use up, as far as that can be told without running it.

How far an iterator has come cannot be put back, and a generator cannot be copied. Those that modules have as attributes
are copied with them; others are found by following the code: from the methods of the model's classes and the functions
that its modules carry, through what these hold and the names that they use, to the user's own functions and objects.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_elixir.core.functions import parts_of
from lightning_elixir.strategy.users_code import is_users_class, is_users_module

_OF_ITERATORS = ("builtins", "itertools")
_SHARED = (FunctionType, MethodType, BuiltinMethodType, partial)  # by a module and its copies, with what they hold
_MOST_ITEMS = 1000  # of a container
_MOST_WALKED = 20_000


def used_iterators(model: nn.Module) -> list[Any]:
    """Iterators of Python's own, and generators, that running the model may use up."""
    todo: list[Any] = []
    for module in model.modules():
        todo += (one for one in type(module).__mro__ if is_users_class(one))
        for value in vars(module).values():
            carried = value.values() if isinstance(value, dict) else (value,)
            todo += (one for one in carried if isinstance(one, _SHARED))
    return _found_from(todo, {id(module): module for module in model.modules()})


def held_iterators(model: nn.Module, data: Any) -> list[Any]:
    """Likewise those that the modules and what gives batches have as attributes, for where no copies of these run."""
    modules = list(model.modules())
    attributes = [value for module in modules for value in vars(module).values()]
    return _found_from([data, *attributes], {id(module): module for module in modules})


def _found_from(todo: list[Any], seen: dict[int, Any]) -> list[Any]:
    """Iterators that can be reached from values of the user's.

    Args:
        todo: Where to begin.
        seen: What is left out, by `id`.
    """
    found = []
    while todo and len(seen) < _MOST_WALKED:
        value = todo.pop()
        if id(value) in seen or isinstance(value, Tensor):
            continue
        seen[id(value)] = value
        if isinstance(value, Iterator) and type(value).__module__ in _OF_ITERATORS:
            found.append(value)
        else:
            todo += _reached_from(value)
    return found


def _reached_from(value: Any) -> list[Any]:
    if isinstance(value, FunctionType):
        return [*parts_of(value), *_named_in(value)]
    if isinstance(value, (CellType, MethodType, BuiltinMethodType, MethodWrapperType, partial)):
        return parts_of(value)
    if isinstance(value, type):
        members = vars(value).values() if is_users_class(value) else ()
        return [getattr(one, "__func__", getattr(one, "fget", one)) for one in members]
    if isinstance(value, (list, tuple, dict)):
        return list(value.values() if isinstance(value, dict) else value) if len(value) <= _MOST_ITEMS else []
    if is_users_class(type(value)) or isinstance(value, (DataLoader, Dataset)):
        return [type(value), *getattr(value, "__dict__", {}).values()]
    return []


def _named_in(function: FunctionType) -> list[Any]:
    """Globals of the user's files that the function's code names, and what it may name in modules among them."""
    names, found = _names(function.__code__), list[Any]()
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType):
            if is_users_module(value.__name__, value):
                found += (vars(value)[one] for one in names if one in vars(value))
        elif isinstance(value, (FunctionType, type)):
            found += [value] * is_users_module(value.__module__)
        else:
            found.append(value)
    return found


def _names(code: CodeType) -> set[str]:
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return set(code.co_names).union(*map(_names, inner))

"""Functions that a copied model carries: the modules that they hold are to be the copy's.

`copy.deepcopy` shares functions, with all that is in their closures and defaults, and so a `forward` that was put in
the place of another (`layer.forward = lambda *args: checkpoint(original, *args)`) or a hook leads back from a copy to
the modules of the original.

What leads to no module of the original stays as it is, and stays shared: a counter that two hooks have, a list that
others read. What does is made anew, once, however many hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any
from weakref import ref

from torch import Tensor

from lightning_elixir.core.functions import copy_of, held_by, parts_of

__all__ = ["rebind"]

_CARRIERS = (FunctionType, MethodType, partial, ref)
_CONTAINERS = (list, tuple, dict)
# Longer containers are data, and so is what lies behind so many objects.
_MOST_ITEMS = 10_000
_MOST_WALKED = 100_000


def rebind(memo: Mapping[int, Any], given: Collection[int]) -> None:
    """Have what copied objects carry (as attributes, or as items of lists and dicts) reach the copies of modules and
    tensors. What is reached by several ways is made once.

    Args:
        memo: What has copies, by id, as `copy.deepcopy` leaves it. These are changed.
        given: Ids that were there before, whose values are no copies.
    """
    copies = [value for key, value in memo.items() if key not in given and key != id(memo)]
    carried = [place for copied in copies for place in _carried_by(copied)]
    rebinding = _Rebinding(memo, (value for _, _, value in carried))
    for holder, key, value in carried:
        other = rebinding.of(value)
        if other is not value:
            holder[key] = other
    rebinding.finish()


def _carried_by(copied: Any) -> Iterator[tuple[Any, Any, Any]]:
    """What a copy carries: where that is kept, at which key or place, and what it is."""
    if isinstance(copied, (*_CARRIERS, Tensor, type)):
        return
    holder = copied if isinstance(copied, (list, dict)) else getattr(copied, "__dict__", None)
    if not isinstance(holder, (list, dict)) or len(holder) > _MOST_ITEMS:
        return
    for key, value in enumerate(holder) if isinstance(holder, list) else holder.items():
        if isinstance(value, _CARRIERS):
            yield holder, key, value


class _Rebinding:
    """Makes anew what leads to something that has a copy.

    Args:
        memo: What has a copy, by id.
        roots: What is to be made.
    """

    def __init__(self, memo: Mapping[int, Any], roots: Iterable[Any]) -> None:
        self._memo = memo
        self._leading = self._found(roots)  # by id, which the values keep
        self._made: dict[int, Any] = {}
        self._to_fill: list[Callable[[], object]] = []

    def _found(self, roots: Iterable[Any]) -> dict[int, Any]:
        """What leads to something that has a copy."""
        known: dict[int, Any] = {}
        holders: dict[int, list[int]] = {}
        ends, todo = [], list(roots)
        while todo and len(known) < _MOST_WALKED:
            value = todo.pop()
            if id(value) in known:
                continue
            known[id(value)] = value
            if id(value) in self._memo:
                if self._memo[id(value)] is not value:
                    ends.append(id(value))
                continue
            for part in _parts(value):
                holders.setdefault(id(part), []).append(id(value))
                todo.append(part)
        found: dict[int, Any] = {}
        while ends:
            number = ends.pop()
            if number not in found:
                found[number] = known[number]
                ends += holders.get(number, ())
        return found

    def of(self, value: Any) -> Any:
        """What the copy has in its place. Functions and containers may still be empty, until `finish`."""
        number = id(value)
        if number in self._memo:
            return self._memo[number]
        if number not in self._leading:
            return value
        if number not in self._made:
            self._made[number] = self._new(value)
        return self._made[number]

    def finish(self) -> None:
        while self._to_fill:
            self._to_fill.pop()()

    def _new(self, value: Any) -> Any:
        # What may hold itself is made empty, and filled later.
        if isinstance(value, FunctionType):
            made = copy_of(value, tuple(map(self.of, value.__closure__ or ())) or None)
            self._to_fill.append(partial(self._fill_function, made, value))
            return made
        if isinstance(value, CellType):
            cell = CellType()
            self._to_fill.append(partial(self._fill_cell, cell, value))
            return cell
        if type(value) is list:
            items: list[Any] = []
            self._to_fill.append(lambda: items.extend(map(self.of, value)))
            return items
        if type(value) is dict:
            entries: dict[Any, Any] = {}
            self._to_fill.append(lambda: entries.update({self.of(key): self.of(item) for key, item in value.items()}))
            return entries
        if isinstance(value, MethodType):
            return MethodType(self.of(value.__func__), self.of(value.__self__))
        if type(value) is partial:
            return partial(self.of(value.func), *map(self.of, value.args), **self._named(value.keywords))
        if type(value) is ref:
            return ref(self.of(value()), value.__callback__)
        return tuple(map(self.of, value))

    def _fill_function(self, made: FunctionType, value: FunctionType) -> None:
        if value.__defaults__:
            made.__defaults__ = tuple(map(self.of, value.__defaults__))
        if value.__kwdefaults__:
            made.__kwdefaults__ = self._named(value.__kwdefaults__)
        vars(made).update(self._named(vars(value)))

    def _fill_cell(self, cell: CellType, value: CellType) -> None:
        for content in held_by(value):
            cell.cell_contents = self.of(content)

    def _named(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.of(value) for name, value in values.items()}


def _parts(value: Any) -> list[Any]:
    """What it holds, where that may be made anew."""
    if isinstance(value, FunctionType):
        return [*parts_of(value), *vars(value).values()]
    if type(value) in (*_CARRIERS, CellType):  # of subclasses nothing is known
        return parts_of(value)
    if type(value) not in _CONTAINERS or len(value) > _MOST_ITEMS:
        return []
    return [*value.keys(), *value.values()] if type(value) is dict else list(value)

"""How one thing that can change is noted down and put back: a row of a table for each kind."""

from __future__ import annotations

import array
import ast
import collections
import copy
import functools
import io
import itertools
import queue
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

Undo = Callable[[], object]

_MOST_COPIED_BYTES = 16 << 20  # of one array


def note_of(value: Any) -> Callable[[Any], Undo | None] | None:
    """What notes down the state of a tensor, an array, a generator of random numbers or the like, and gives what puts
    it back (None: it cannot change); None: it is of no such kind."""
    return next((note for kind, note in (*_ROWS, *_rows_of_numpy()) if isinstance(value, kind)), None)


def copy_of(value: Any) -> Any:
    """A copy of what goes on by itself and cannot be set back, such as `itertools.count()` or what is iterated with;
    None: there can be none, or it is nothing of the kind."""
    if not isinstance(value, _COPIED):
        return None
    if isinstance(value, types.MethodWrapperType):
        if value.__name__ != "__next__":
            return None
        other = copy_of(value.__self__)
        return None if other is None else other.__next__
    if type(value) is itertools.count:
        try:  # copying these is deprecated in Python 3.12, and gone in 3.14
            return itertools.count(*ast.literal_eval(repr(value).removeprefix("count").replace(")", ",)")))
        except (ValueError, SyntaxError):
            return None
    return copy.copy(value)


def goes_on(value: Any) -> bool:
    """Whether using it takes something from it for good, such as a Python generator."""
    if isinstance(value, types.GeneratorType) and value.gi_frame is None:  # it is over
        return False
    return isinstance(value, (Iterator, types.CoroutineType))


def _tensor(tensor: Tensor) -> Undo | None:
    if isinstance(tensor, nn.Parameter) or type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return None
    if tensor.requires_grad or tensor.untyped_storage().nbytes() > _MOST_COPIED_BYTES or tensor.is_inference():
        return None
    before, version = tensor.detach().clone(), tensor._version

    def undo() -> None:
        if tensor._version != version:
            tensor.detach().copy_(before)

    return undo


def _array_of_numpy(value: Any) -> Undo | None:
    if not value.flags.writeable or value.dtype.hasobject:
        return None
    if value.nbytes > _MOST_COPIED_BYTES:
        value.flags.writeable = False
        return functools.partial(value.setflags, write=True)
    return functools.partial(value.__setitem__, ..., value.copy())


def _sequence(value: Any) -> Undo:
    before = value[:]

    def undo() -> None:
        if value != before:
            value[:] = before

    return undo


def _buffer(value: io.BytesIO | io.StringIO) -> Undo | None:
    if value.closed:
        return None
    before: Any = value.getvalue()
    position = value.tell()

    def undo() -> None:
        if value.closed or (value.tell() == position and value.getvalue() == before):
            return
        value.seek(0)
        value.truncate()
        value.write(before)
        value.seek(position)

    return undo


def _file(value: io.IOBase) -> Undo | None:
    """Where a file is read. What is written to one is outside of the process."""
    if value.closed or value.writable() or not value.seekable():
        return None
    try:
        position = value.tell()
    except OSError:  # it is gone through line by line
        return None
    return functools.partial(value.seek, position)


def _simple_queue(value: queue.SimpleQueue[Any]) -> Undo:
    """It can only be looked at by emptying it."""

    def items() -> list[Any]:
        found = []
        while not value.empty():
            found.append(value.get_nowait())
        return found

    def fill(found: list[Any]) -> None:
        for item in found:
            value.put(item)

    before = items()
    fill(before)

    def undo() -> None:
        items()
        fill(before)

    return undo


# The first row whose kind it is counts. None: nothing of it can be put back, and nothing need be.
_ROWS: tuple[tuple[type, Callable[[Any], Undo | None]], ...] = (
    (Tensor, _tensor),
    (torch.Generator, lambda g: functools.partial(g.set_state, g.get_state())),
    (random.SystemRandom, lambda g: None),
    (random.Random, lambda g: functools.partial(g.setstate, g.getstate())),
    (bytearray, _sequence),
    (array.array, _sequence),
    (queue.SimpleQueue, _simple_queue),
    (io.BytesIO, _buffer),
    (io.StringIO, _buffer),
    (io.IOBase, _file),
)


def _rows_of_numpy() -> tuple[tuple[type, Callable[[Any], Undo | None]], ...]:
    if sys.modules.get("numpy") is None:  # it need not be there
        return ()
    return _make_rows_of_numpy()


@functools.cache
def _make_rows_of_numpy() -> tuple[tuple[type, Callable[[Any], Undo | None]], ...]:
    import numpy as np

    return (
        (np.ndarray, _array_of_numpy),
        (np.random.Generator, lambda g: _state_of_bits(g.bit_generator)),
        (np.random.BitGenerator, _state_of_bits),
        (np.random.RandomState, lambda g: functools.partial(g.set_state, g.get_state(legacy=False))),
    )


def _state_of_bits(generator: Any) -> Undo:
    return functools.partial(setattr, generator, "state", generator.state)


# Iterators that go through what they were made from by a place of their own.
_ITERATED: tuple[Iterable[Any], ...] = ([], (), "", b"", range(0), range(1 << 70), {}, {}.values(), {}.items(), set())
_COPIED: tuple[type, ...] = (
    *(type(iter(one)) for one in _ITERATED),
    type(reversed([])),
    itertools.count,
    types.MethodWrapperType,
)


REFILLED: tuple[Any, ...] = (list, collections.deque, set, collections.OrderedDict, dict)


def items_of(container: Any) -> list[Any]:
    """What a list, a deque, a set or a dict (in pairs) holds, whatever a class of the user's makes of that."""
    kind = _kind_of(container)
    return list(kind.items(container) if issubclass(kind, dict) else kind.__iter__(container))


def refill(container: Any, items: list[Any]) -> None:
    """Have such a container hold these."""
    kind = _kind_of(container)
    kind.clear(container)
    if kind in (list, collections.deque):
        kind.extend(container, items)
    elif kind is set:
        kind.update(container, items)
    else:
        for key, value in items:
            kind.__setitem__(container, key, value)


def _kind_of(container: Any) -> Any:
    kind = type(container)
    return kind if kind in REFILLED else next(one for one in REFILLED if isinstance(container, one))

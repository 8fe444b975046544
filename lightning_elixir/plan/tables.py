"""What a function gives for objects that are asked about again and again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Table(Generic[K, V]):
    """Finds a value once for each object, and keeps both. Objects are told apart by identity: to compare two chunks
    takes longer than to find their bytes.

    Args:
        find: Gives the value of an object.
    """

    def __init__(self, find: Callable[[K], V]) -> None:
        self._find = find
        self._known: dict[int, tuple[V, K]] = {}  # by `id`; the object is kept, so that no other one can have its id

    def __call__(self, key: K) -> V:
        known = self._known.get(id(key))
        if known is None:
            known = self._known[id(key)] = self._find(key), key
        return known[0]

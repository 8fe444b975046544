"""What works one thing after the other: lanes that take their work in order, and a bus that several of them share."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass


@dataclass
class Lane:
    """Work in the order in which it was given, and when the last of it ends."""

    free_s: float = 0.0

    def work(self, start_s: float, seconds: float) -> float:
        """Queue `seconds` of work that may start at `start_s`; returns its end."""
        self.free_s = max(self.free_s, start_s) + seconds
        return self.free_s


class Bus:
    """One direction of a bus: a transfer that comes later may use the gaps that others leave."""

    def __init__(self) -> None:
        # Disjoint and ascending.
        self._begins: list[float] = []
        self._ends: list[float] = []

    def reserve(self, start_s: float, seconds: float) -> tuple[float, float]:
        """The first time from `start_s` on when the bus is free for so long, now taken: (begin, end)."""
        if seconds <= 0:
            return start_s, start_s
        begins, ends = self._begins, self._ends
        if not ends or start_s >= ends[-1]:  # as mostly
            begins.append(start_s)
            ends.append(start_s + seconds)
            return start_s, ends[-1]
        index = bisect_right(ends, start_s)
        while index < len(begins) and begins[index] - start_s < seconds:
            start_s = max(start_s, ends[index])
            index += 1
        end_s = start_s + seconds
        begins.insert(index, start_s)
        ends.insert(index, end_s)
        return start_s, end_s

    def room(self, start_s: float) -> tuple[float, float]:
        """The first moment from `start_s` on when the bus is free, and for how long it then is."""
        begins, ends = self._begins, self._ends
        index = bisect_right(ends, start_s)
        while index < len(begins) and begins[index] <= start_s:
            start_s = ends[index]
            index += 1
        return start_s, begins[index] - start_s if index < len(begins) else math.inf

    def is_busy(self, at_s: float) -> bool:
        if not self._ends or at_s >= self._ends[-1]:  # as mostly
            return False
        return self._begins[bisect_right(self._ends, at_s)] <= at_s

    def forget(self, before_s: float) -> None:
        """No time before this one is asked for again."""
        gone = bisect_left(self._ends, before_s)
        del self._begins[:gone]
        del self._ends[:gone]

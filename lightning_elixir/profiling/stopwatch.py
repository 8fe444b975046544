"""Timing work that all ranks do at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from lightning_elixir.core.comm import Comm
from lightning_elixir.core.device import Device

# Short work is repeated until one timing takes about this long, so that waiting for its end does not count.
_TIMING_S = 0.005
_MAX_CALLS = 64
_MAX_TIMINGS = 7
_REST_S = 0.2


class Stopwatch:
    """Times work on all ranks at once. What it says is the slowest rank's time, the same on every rank.

    Args:
        device: What the work may leave running.
        comm: The ranks that measure; all make the same calls.
        limit_s: About how long one measurement may take. Few repetitions are made in any case.
    """

    def __init__(self, device: Device, comm: Comm, limit_s: float) -> None:
        self._device = device
        self._comm = comm
        self.limit_s = limit_s

    def seconds(self, work: Callable[[], None]) -> float:
        """Seconds of one call of `work` among many, issued without waiting in between: the median of several timings.
        Collective.

        Args:
            work: What is timed; does the same on every rank.
        """
        work()  # loads kernels, touches memory
        once_s = self.slowest_s(self._timed(work, 1))
        if once_s > self.limit_s:
            return once_s
        num_calls = _between(_TIMING_S / once_s, 1, _MAX_CALLS)
        num_timings = _between(self.limit_s / (num_calls * once_s), 1, _MAX_TIMINGS)
        timings = [self._timed(work, num_calls) / num_calls for _ in range(num_timings)]
        return self.slowest_s(statistics.median(timings))

    def burst_seconds(self, work: Callable[[], None], burst_s: float) -> float:
        """Seconds of one call of `work` among those that fill `burst_s` after a rest. Collective."""
        work()
        once_s = self.slowest_s(self._timed(work, 1))
        if once_s > self.limit_s:
            return once_s
        num_calls = _between(burst_s / once_s, 1, _MAX_CALLS)
        time.sleep(min(_REST_S, self.limit_s))
        return self.slowest_s(self._timed(work, num_calls) / num_calls)

    def settled_seconds(self, work: Callable[[], None], span_s: float) -> float:
        """Seconds of one call of `work` after others without a pause, for `span_s` in all. Collective."""
        once_s = self.slowest_s(self._timed(work, 1))
        if once_s > self.limit_s:
            return once_s
        num_calls = max(1, int(span_s / 2 / once_s))
        self._timed(work, num_calls)
        return self.slowest_s(self._timed(work, num_calls) / num_calls)

    def slowest_s(self, seconds: float) -> float:
        """The longest of all ranks' times, at least a nanosecond. Collective."""
        return max(1, *(row[0] for row in self._comm.exchange([round(seconds * 1e9)]))) / 1e9

    def _timed(self, work: Callable[[], None], num_calls: int) -> float:
        self._comm.exchange(())  # all ranks begin together
        self._device.synchronize()
        start = time.perf_counter()
        for _ in range(num_calls):
            work()
        self._device.synchronize()
        return time.perf_counter() - start


def _between(value: float, least: int, most: int) -> int:
    return int(min(max(value, least), most))

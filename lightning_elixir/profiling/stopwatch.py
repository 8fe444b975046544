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
_LEAST_TIMINGS = 2
_MAX_TIMINGS = 7
_REST_S = 0.2
_NUM_BURSTS = 2
_NUM_SETTLED = 4
# Times the best: where a usual repeat takes more than that, something else was at work.
_DISTURBED = 2.0
# Of all measurements: one that is disturbed says little about the others.
_FEW = 0.05


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
        self._num_measured = 0
        self._num_disturbed = 0  # repeats differed, and did so again; the same on every rank

    def seconds(self, work: Callable[[], None]) -> float:
        """Seconds of one call of `work` among many, issued without waiting in between: the best of several timings,
        since what disturbs one makes it longer. Collective.

        Args:
            work: What is timed; does the same on every rank.
        """
        return self._repeated(work)[0]

    def usual_seconds(self, work: Callable[[], None]) -> float:
        """As `seconds`, for work that takes now more and now less by itself, as a disk's: the median. Collective."""
        return self._repeated(work, is_judged=False)[1]

    def burst_seconds(self, work: Callable[[], None], burst_s: float) -> float:
        """Seconds of one call of `work` among those that fill `burst_s` after a rest: the best of some. Collective."""
        work()
        once_s = self._once(work)
        if once_s > self.limit_s:
            return once_s
        num_calls = _between(burst_s / once_s, 1, _MAX_CALLS)
        timings = []
        for _ in range(_NUM_BURSTS):
            time.sleep(min(_REST_S, self.limit_s))
            timings.append(self._timed(work, num_calls) / num_calls)
        best_s, usual_s = self._judged(timings)
        self._count(best_s, usual_s)
        return best_s

    def settled_seconds(self, work: Callable[[], None], span_s: float) -> float:
        """Seconds of one call of `work` after others without a pause, for `span_s` in all: the median of several
        timings at its end. Collective."""
        once_s = self._once(work)
        if once_s > self.limit_s:
            return once_s
        num_calls = max(1, int(span_s / 2 / once_s))
        self._timed(work, num_calls)
        num_timings = min(_NUM_SETTLED, num_calls)
        num_calls //= num_timings
        timings = [self._timed(work, num_calls) / num_calls for _ in range(num_timings)]
        return self._judged(timings)[1]

    def side_by_side_seconds(
        self, lane: Callable[[], None], num_lane: int, computed: Callable[[], None], num_computed: int
    ) -> tuple[float, float]:
        """Seconds from the first call of `computed` to the end of the last, on the device, and from the first call of
        `lane`, which comes before, until all is done. Collective.

        Args:
            lane: Work of a lane, such as a collective.
            num_lane: Calls of it, the same on every rank.
            computed: Work of the compute stream.
            num_computed: Likewise.
        """
        self._comm.exchange(())  # all ranks begin together
        self._device.synchronize()
        start = time.perf_counter()
        for _ in range(num_lane):
            lane()
        first = self._device.mark()
        for _ in range(num_computed):
            computed()
        last = self._device.mark()
        self._device.synchronize()
        seconds = time.perf_counter() - start
        return self.slowest_s(last.seconds_since(first)), self.slowest_s(seconds)

    def _repeated(self, work: Callable[[], None], *, is_judged: bool = True) -> tuple[float, float]:
        """The best and the median of several timings, of the slowest rank.

        Args:
            work: What is timed.
            is_judged: Whether timings that differ much are taken again, and counted if they still do.
        """
        work()  # loads kernels, touches memory
        best_s = self.slowest_s(self._timed(work, 1))
        if best_s > self.limit_s:
            best_s, usual_s = self._judged([best_s, self._timed(work, 1)] if is_judged else [best_s])
        else:
            best_s, usual_s = self._round(work, best_s)
            if is_judged and usual_s > _DISTURBED * best_s:  # a GPU has woken up meanwhile, or something came between
                best_s, usual_s = self._round(work, best_s)
        if is_judged:
            self._count(best_s, usual_s)
        return best_s, usual_s

    def _round(self, work: Callable[[], None], best_s: float) -> tuple[float, float]:
        """Several timings, of as many calls as one that takes `best_s` allows: the best of these and that, and the
        median."""
        num_calls = _between(_TIMING_S / best_s, 1, _MAX_CALLS)
        num_timings = _between(self.limit_s / (num_calls * best_s), _LEAST_TIMINGS, _MAX_TIMINGS)
        found_s, usual_s = self._judged([self._timed(work, num_calls) / num_calls for _ in range(num_timings)])
        return min(best_s, found_s), usual_s

    def _once(self, work: Callable[[], None]) -> float:
        """Seconds of one call: the better of two."""
        return min(self.slowest_s(self._timed(work, 1)) for _ in range(2))

    def _judged(self, timings: list[float]) -> tuple[float, float]:
        """Best and median, of the slowest rank."""
        return self.slowest_s(min(timings)), self.slowest_s(statistics.median(timings))

    def _count(self, best_s: float, usual_s: float) -> None:
        self._num_measured += 1
        self._num_disturbed += usual_s > _DISTURBED * best_s

    def slowest_s(self, seconds: float) -> float:
        """The longest of all ranks' times, at least a nanosecond. Collective."""
        return max(1, *(row[0] for row in self._comm.exchange([round(seconds * 1e9)]))) / 1e9

    def disturbance(self) -> str:
        """What measurements until now say of others at work, for people, the same on every rank; empty: nothing."""
        if self._num_disturbed < 2 or self._num_disturbed <= _FEW * self._num_measured:
            return ""
        share = f"{self._num_disturbed} of {self._num_measured}"
        return f"repeats of {share} measurements took more than {_DISTURBED:.0f} times as long as the best of them"

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

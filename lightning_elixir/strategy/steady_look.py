"""One more look, when training has settled, at how fast the host updates.

What a machine can do was measured before, once, with nothing else at work. In training the host's memory also serves
the user's own processes and, on virtual machines, other guests; and its share of that may be another one today. So some
steps after the plan has become final, what the host's updates have taken is held against what was predicted.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

from lightning_elixir.optim.execution import UpdateTimes

# Steps looked at: the first ones still touch memory, and one may be disturbed.
_NUM_STEPS = 5


class SteadyLook:
    """Collects what the host's updates take in some steps that follow each other.

    Args:
        update_times: See `StepMeter`.
    """

    def __init__(self, update_times: Callable[[], UpdateTimes | None]) -> None:
        self._update_times = update_times
        self._last = update_times()  # of a step before
        self._seen: list[tuple[float, int]] = []  # seconds, parameters
        self._num_steps = 0

    def after_step(self) -> bool:
        """Another step is over. Returns whether it was the last one to look at: the same on every rank."""
        times = self._update_times()
        if times is not None and times != self._last:
            self._last = times
            if times.cpu_numel and times.adam_s > 0:
                self._seen.append((times.adam_s, times.cpu_numel))
        self._num_steps += 1
        return self._num_steps >= _NUM_STEPS

    @property
    def is_at_last_step(self) -> bool:
        """Whether the step under way is the last one to look at."""
        return self._num_steps == _NUM_STEPS - 1

    @property
    def host_update_s(self) -> float | None:
        """Seconds of the host's updates of a usual step; None where too few were seen, or the host updates nothing."""
        most = max((numel for _, numel in self._seen), default=0)
        seconds = [seconds for seconds, numel in self._seen if numel == most]
        return statistics.median(seconds) if 2 * len(seconds) >= _NUM_STEPS else None

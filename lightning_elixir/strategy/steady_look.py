"""One more look, when training has settled, at what steps compute and how fast the host updates.

The first steps that were timed are slower than others, since kernels are loaded and memory is obtained. And what a
machine can do was measured before, once, with nothing else at work; in training the host's memory also serves the
user's own processes and, on virtual machines, other guests, and its share of that may be another one today. So some
steps after the plan has become final, both are taken as they are by then: predictions follow, the plan stays (seen on
H200s: figures that changed a step by up to a third led to no other, and looking for one took seconds of a step).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

from lightning_elixir.optim.execution import UpdateTimes
from lightning_elixir.plan.profile import StepProfile

# Steps looked at: the first ones still touch memory, and one may be disturbed.
_NUM_STEPS = 5
_NEARLY_ALL = 0.9


class SteadyLook:
    """Collects what some steps that follow each other compute, and what the host's updates take in them.

    Args:
        update_times: See `StepMeter`.
    """

    def __init__(self, update_times: Callable[[], UpdateTimes | None]) -> None:
        self._update_times = update_times
        self._last = update_times()  # of a step before
        self._seen: list[tuple[float, int]] = []  # seconds, parameters
        self._profiles: list[StepProfile] = []
        self._between: list[float] = []
        self._num_steps = 0

    def after_step(self, profile: StepProfile | None, between_s: float | None) -> bool:
        """Another step is over. Returns whether it was the last one to look at: the same on every rank.

        Args:
            profile: What it did, if that is known.
            between_s: From the backward before its first forward to that, if that is known: see `StepSampler`.
        """
        if between_s is not None:
            self._between.append(between_s)
        times = self._update_times()
        if times is not None and times != self._last:
            self._last = times
            if times.cpu_numel and times.host_update_s > 0:
                self._seen.append((times.host_update_s, times.cpu_numel))
        if profile is not None:
            self._profiles.append(profile)
        self._num_steps += 1
        return self._num_steps >= _NUM_STEPS

    @property
    def profile(self) -> StepProfile | None:
        """What a usual step does: that with the median time of computing; None: unknown."""
        ordered = sorted(self._profiles, key=lambda profile: profile.compute_s)
        return ordered[len(ordered) // 2] if ordered else None

    @property
    def between_s(self) -> float | None:
        """Seconds between backward and the next forward, of a usual step; None: too few were seen."""
        return statistics.median(self._between) if 2 * len(self._between) >= _NUM_STEPS else None

    def host_update_s(self, numel: int) -> float | None:
        """Seconds of the host's updates of a usual step; None where too few were seen, or the host updates nothing.

        Args:
            numel: What it has to update in a step: one of several optimizers' part of that says nothing.
        """
        most = max((numel for _, numel in self._seen), default=0)
        if most < _NEARLY_ALL * numel:
            return None
        seconds = [seconds for seconds, numel in self._seen if numel == most]
        return statistics.median(seconds) if 2 * len(seconds) >= _NUM_STEPS else None

"""What training steps are seen to take: metrics for loggers and callbacks, and figures for the report at the end of a
run."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from lightning_elixir.optim.execution import UpdateTimes
from lightning_elixir.plan.rcache import RCache
from lightning_elixir.plan.types import Plan
from lightning_elixir.report import Measured
from lightning_elixir.runtime.engine import Engine
from lightning_elixir.runtime.sampling import StepSeconds
from lightning_elixir.runtime.stats import Stats

_RCACHE_COUNTERS = ("fetches", "prefetches", "hits", "evictions")
_MOVES = ("h2d", "d2h", "gathered", "reduced")
# Bounds the memory of long runs; a report is about the usual step.
_MOST_STEPS = 4096
# For a report, this many of the first steps in the steady state are timed, however rarely metrics are logged.
_REPORT_TIMED_STEPS = 3


@dataclass
class _Mean:
    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.total += value
        self.count += 1

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None


def _seconds() -> deque[float]:
    return deque(maxlen=_MOST_STEPS)


def _median(values: deque[float]) -> float | None:
    return statistics.median(values) if values else None


@dataclass
class _Steady:
    """Figures of steps under one plan."""

    plan: Plan
    num_steps: int = 0
    step_s: deque[float] = field(default_factory=_seconds)
    # Of the steps that were timed, with all of their micro-batches. An update may be over long after its step: the
    # first one that is seen may still be that of the first step under the plan, which allocates. So medians are asked
    # for.
    compute_s: deque[float] = field(default_factory=_seconds)
    waiting_s: deque[float] = field(default_factory=_seconds)
    update_s: deque[float] = field(default_factory=_seconds)
    host_update_s: deque[float] = field(default_factory=_seconds)
    counters: dict[str, float] = field(default_factory=dict)
    """Summed over `num_steps` steps."""
    held_bytes: dict[str, int] = field(default_factory=dict)
    """The most of each kind that was seen."""

    def see_bytes(self, held: Mapping[str, int]) -> None:
        for kind, nbytes in held.items():
            self.held_bytes[kind] = max(nbytes, self.held_bytes.get(kind, 0))


class StepMeter:
    """Measures the training steps of one fit. Only in steps that are timed does the host wait for the device.

    Args:
        engine: Whose steps these are.
        time_steps: Turns the timing of steps on and off.
        update_times: Of the last step whose updates are all over, which may be an earlier one than the last; None: of
            none, since nothing was updated or all of it is still under way. Must not wait.
        is_reporting: Whether there will be a report, so that some steps are timed in any case.
        is_read: Whether this rank is the one whose figures are read.
    """

    def __init__(
        self,
        engine: Engine,
        time_steps: Callable[[bool], None],
        update_times: Callable[[], UpdateTimes | None],
        *,
        is_reporting: bool,
        is_read: bool,
    ) -> None:
        self._engine = engine
        self._time_steps = time_steps
        self._update_times = update_times
        self._is_reporting = is_reporting
        self._is_read = is_read
        self._steady: _Steady | None = None
        self._was_settled = False  # when the step before was over
        self._is_in_step = False  # from the first of its batches on
        self._since_s: float | None = None  # when the step under way began; None: it is not to be timed as a whole
        self._is_timed = False
        self._wall_s = _Mean()  # since the last metrics
        self._counted: dict[str, float] = {}  # in steps since the last metrics
        self._counters: dict[str, float] = {}  # when the batch under way began, or was counted last
        self._rcache: RCache = engine.rcache  # then
        self._seen_times: UpdateTimes | None = None  # so that no step's update counts twice
        self._seconds_before: StepSeconds | None = None  # what was timed before the step under way
        self._seconds: StepSeconds | None = None  # of the last step that was timed
        self._stats: Stats | None = None  # after that step

    # What happens

    def interrupt(self) -> None:
        """What comes now belongs to no step."""
        self._since_s = None

    def begin_batch(self, *, is_wanted: bool) -> None:
        """A batch begins: a step, or another micro-batch of it.

        Args:
            is_wanted: Metrics will be asked for when its step is over.
        """
        self._counters, self._rcache = self._read_counters(), self._engine.rcache
        if self._is_in_step:  # which is timed as a whole or not at all
            return
        self._is_in_step = True
        if self._since_s is None:
            self._since_s = time.perf_counter()
        if self._is_reporting and self._steady is not None:
            is_wanted |= self._steady.num_steps < _REPORT_TIMED_STEPS
        self._set_timed(is_wanted)
        self._seconds_before = self._engine.all_seconds if self._is_timed and self._is_read else None

    def after_backward(self) -> None:
        """A backward is over, and its gradients are there."""
        self._count()
        if not self._is_timed:
            return
        self._update_times()  # last chance to see those of the step before, where updates run behind the forward
        if self._steady is not None:
            self._steady.see_bytes(self._engine.held_bytes())  # with the gradients

    def end_step(self, *, is_settled: bool) -> None:
        """The optimizer has stepped.

        Args:
            is_settled: The warm-up is over: steps under the plan in force are alike from the next one on.
        """
        self._count()
        self._note_end(is_settled=is_settled)
        self._is_in_step = False
        if self._seconds_before is not None:
            self._stats = self._engine.stats()
            self._seconds = self._engine.all_seconds - self._seconds_before
            self._seconds_before = None
            self._see(self._stats, self._seconds)
        self._set_timed(False)

    # Measuring

    def _set_timed(self, is_timed: bool) -> None:
        # On all ranks alike. While the strategy warms up it times steps for its own ends.
        if is_timed != self._is_timed:
            self._is_timed = is_timed
            self._time_steps(is_timed)

    def _note_end(self, *, is_settled: bool) -> None:
        now_s, since_s = time.perf_counter(), self._since_s
        self._since_s = now_s  # until the next step ends: data loading is part of a step
        plan = self._engine.plan
        steady = self._steady
        if steady is None or not (self._was_settled and _is_same_placement(steady.plan, plan)):
            # The first step under a plan allocates, and may record; it is not like the others.
            self._steady = _Steady(plan)
            self._seen_times = self._update_times()  # of that step, or of one under an earlier plan
        else:
            steady.plan = plan  # with what is expected now
            steady.num_steps += 1
            if since_s is not None:
                steady.step_s.append(now_s - since_s)
        self._was_settled = is_settled
        if since_s is not None:
            self._wall_s.add(now_s - since_s)

    def _read_counters(self) -> dict[str, float]:
        counters, moved = self._engine.rcache.counters, self._engine.moved
        found: dict[str, float] = {name: getattr(counters, name) for name in _RCACHE_COUNTERS}
        found["redone_steps"] = self._engine.steps.num_redone
        if self._engine.store.states is not None:
            traffic = self._engine.traffic
            found |= {"nvme_read_bytes": traffic.read_bytes, "nvme_written_bytes": traffic.written_bytes}
            found["nvme_wait_s"] = traffic.waited_s
        return found | {f"{name}_bytes": getattr(moved, name) for name in _MOVES}

    def _count(self) -> None:
        """Between batches users may reset counters, and validation counts as well; so look at both ends of a batch's
        work."""
        has_new_rcache = self._engine.rcache is not self._rcache
        counters = self._read_counters()
        for name, value in counters.items():
            start = 0 if has_new_rcache and name in _RCACHE_COUNTERS else self._counters.get(name, 0)
            added = value - start if value >= start else value
            self._counted[name] = self._counted.get(name, 0) + added
            if self._steady is not None:
                self._steady.counters[name] = self._steady.counters.get(name, 0) + added
        self._counters, self._rcache = counters, self._engine.rcache

    def _see(self, stats: Stats, seconds: StepSeconds) -> None:
        steady = self._steady
        if steady is None:
            return
        steady.see_bytes(stats.held_bytes)
        if steady.num_steps:
            if seconds.compute_s:  # under manual optimization nothing may have come to its end
                steady.compute_s.append(seconds.compute_s)
                steady.waiting_s.append(seconds.exposed_wait_s)
            times = self._update_times()
            if times is not None and times != self._seen_times:
                self._seen_times = times
                steady.update_s.append(times.update_s)
                steady.host_update_s.append(times.host_update_s)

    # Metrics

    def metrics(self) -> dict[str, float]:
        """Of the steps since the last call, if the last of them was timed; else nothing."""
        stats, seconds = self._stats, self._seconds
        self._stats = self._seconds = None
        if stats is None or seconds is None:
            return {}
        held, engine = stats.held_bytes, self._engine
        found: dict[str, float | None] = {f"{kind}_bytes": nbytes for kind, nbytes in held.items()}
        found["gpu_bytes"] = sum(nbytes for kind, nbytes in held.items() if not kind.startswith(("cpu_", "nvme_")))
        found["cpu_bytes"] = sum(nbytes for kind, nbytes in held.items() if kind.startswith("cpu_"))
        found |= self._counted
        self._counted = {}
        found["step_s"], self._wall_s = self._wall_s.value, _Mean()
        if seconds.compute_s:
            found["compute_s"], found["exposed_wait_s"] = seconds.compute_s, seconds.exposed_wait_s
        times = self._update_times()
        if times is not None:
            found["update_s"], found["host_update_s"] = times.update_s, times.host_update_s
        if engine.device.is_counting:
            found["peak_gpu_bytes"] = engine.device.peak_bytes()
        return {f"elixir/{name}": float(value) for name, value in found.items() if value is not None}

    # The report

    def measured(self) -> tuple[Measured, dict[str, int]]:
        """What was seen since the plan in force came, and the most bytes of each kind."""
        stats, engine = self._engine.stats(), self._engine
        steady = self._steady or _Steady(self._engine.plan)
        steady.see_bytes(stats.held_bytes)
        measured = Measured(
            peak_gpu_bytes=engine.device.peak_bytes() if engine.device.is_counting else None,
            host_bytes=sum(nbytes for kind, nbytes in steady.held_bytes.items() if kind.startswith("cpu_")),
            step_s=tuple(steady.step_s),
            compute_s=_median(steady.compute_s),
            waiting_s=_median(steady.waiting_s),
            update_s=_median(steady.update_s),
            host_update_s=_median(steady.host_update_s),
            counters=_per_step(steady),
        )
        return measured, dict(sorted(steady.held_bytes.items()))


def _is_same_placement(one: Plan, other: Plan) -> bool:
    """Two plans may say the same and expect other times of it."""
    return one is other or one.fingerprint() == other.fingerprint()


def _per_step(steady: _Steady) -> dict[str, int | float]:
    """Mean counts of one step."""
    num = max(1, steady.num_steps)
    return {name: count // num if count % num == 0 else count / num for name, count in steady.counters.items()}

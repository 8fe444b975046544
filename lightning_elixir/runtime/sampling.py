"""What one real step takes: seconds of compute and device memory beside the chunks, between one access and the next.

Device memory is its peak, less what the engine itself holds. Time marks stand before the compute stream waits for a
chunk (or for a gradient block, or for ranks) and after, so that compute and exposed waiting are told apart; they are
read only when they are asked for. `Engine.step_profile` joins bytes and times of steps with the same accesses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

from lightning_elixir.core.device import Device, Mark
from lightning_elixir.plan.growth_estimate import StepMemory
from lightning_elixir.plan.profile import StepInterval, StepProfile, first_gradients
from lightning_elixir.plan.types import AccessTrace, Acquire


@dataclass(frozen=True)
class StepSeconds:
    """Times of forwards and backwards."""

    compute_s: float
    """Operators ran, or were waited for."""
    exposed_wait_s: float
    """Nothing ran, because a chunk, or a block for gradients, was not there yet."""

    def __add__(self, other: StepSeconds) -> StepSeconds:
        return StepSeconds(self.compute_s + other.compute_s, self.exposed_wait_s + other.exposed_wait_s)

    def __sub__(self, other: StepSeconds) -> StepSeconds:
        return StepSeconds(self.compute_s - other.compute_s, self.exposed_wait_s - other.exposed_wait_s)


class _Clock:
    """Marks around everything that is waited for. They are read when the times are asked for: only then the host
    waits."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._index = 0
        self.num_stops = 0
        """How often compute has stopped in the interval under way."""
        self.begin = device.mark()
        self._started: Mark | None = self.begin
        self._stopped: Mark | None = None
        self._noted: Mark | None = None
        self._runs: list[tuple[int, Mark, Mark]] = []
        self._waits: list[tuple[Mark, Mark]] = []

    @property
    def is_running(self) -> bool:
        return self._started is not None

    def stop(self) -> None:
        if self._started is not None:
            self._stopped = self._device.mark()
            self._runs.append((self._index, self._started, self._stopped))
            self._started = None
            self.num_stops += 1

    def go_on(self, *, has_waited: bool) -> None:
        if self._stopped is None:
            return
        self._started = self._stopped
        if has_waited:
            self._started = self._device.mark()
            self._waits.append((self._stopped, self._started))
        self._stopped = None

    def next_interval(self) -> None:
        self._index += 1
        self.num_stops = 0

    def note(self) -> None:
        """The step may turn out to have ended here."""
        self._noted = self._device.mark()

    def close(self) -> None:
        self.stop()
        self._stopped = None

    def reopen(self) -> None:
        """After `close`: what lies between is neither compute nor waiting."""
        if self._started is None:
            self._started, self._stopped = self._device.mark(), None

    def settle(self) -> Mark | None:
        """The step is over. If nothing has closed it, it ended at the last note. Returns its end."""
        if self._started is not None and self._noted is not None:
            self._runs.append((self._index, self._started, self._noted))
        self._started = self._stopped = None
        return self._runs[-1][2] if self._runs else None

    def read(self) -> tuple[list[list[float]], float]:
        """Seconds of compute of each interval until nothing has stopped it, until its first stop, and so on; and of
        waiting in all."""
        seconds = [[0.0] for _ in range(self._index + 1)]
        for index, start, stop in self._runs:
            of_interval = seconds[index]
            of_interval.append(of_interval[-1] + max(0.0, stop.seconds_since(start)))
        return seconds, sum(max(0.0, stop.seconds_since(start)) for start, stop in self._waits)


@dataclass
class _Sample:
    """One iteration. Lists have one entry for each interval."""

    trace: AccessTrace | None
    """None: it took another way than the known one."""
    grads: list[list[int]]
    stops: list[list[int]]
    """For each of `grads`, at which stop of its interval's compute it was complete."""
    arrivals: list[list[int]]
    """As in `StepInterval`."""
    peaks: list[int] | None
    levels: list[int]
    """Bytes beside the engine's own at each access, before anything was fetched for it; empty without peaks."""
    clock: _Clock | None
    seconds: list[list[float]] | None = None
    """As `_Clock.read` gives them."""
    wait_s: float = 0.0

    def read(self) -> None:
        if self.clock is not None:
            self.seconds, self.wait_s = self.clock.read()
            self.clock = None

    def grad_s(self, index: int) -> tuple[float, ...]:
        """See `StepInterval`; of one that was timed, and read."""
        if not self.seconds:
            return ()
        until_s = self.seconds[index]
        return tuple(until_s[min(stop, len(until_s) - 1)] for stop in self.stops[index])

    def has_accesses_of(self, other: _Sample) -> bool:
        if self.trace is None or other.trace is None:
            return False
        return [e.ids for e in self.trace.acquires()] == [e.ids for e in other.trace.acquires()]


class StepSampler:
    """Looks at the accesses of a training iteration, if told to.

    Args:
        device: Counts bytes and gives marks.
        held_bytes: Device bytes that the engine takes now.
    """

    def __init__(self, device: Device, held_bytes: Callable[[], int]) -> None:
        self._device = device
        self._held_bytes = held_bytes
        self.has_memory = False
        self.has_times = False
        self.is_on = False
        """Something is looked at: all the time, or in the open iteration."""
        self.peak_non_model_bytes = 0
        """Since the memory began to be watched."""
        self._has_looks = False
        self._held_before = 0  # when the peak was last reset
        # The open iteration
        self._clock: _Clock | None = None
        self._peaks: list[int] | None = None
        self._levels: list[int] = []
        self._grads: list[list[int]] | None = None
        self._stops: list[list[int]] = []
        self._arrivals: list[list[int]] = []
        self._has_accesses = True
        # Earlier ones
        self._last: _Sample | None = None
        self._last_timed: _Sample | None = None
        self._before_last = StepSeconds(0.0, 0.0)  # of all that were timed before that one
        self._last_with_memory: _Sample | None = None
        self._last_end: Mark | None = None  # of the last iteration, if that was timed
        self._since: Mark | None = None  # the same, if nothing but steps has come after it
        self._between: tuple[Mark, Mark] | None = None  # of the last iteration

    def watch(self, *, memory: bool | None = None, times: bool | None = None) -> None:
        """Turn on or off what is looked at; None: as it is."""
        if memory is not None:
            self.has_memory = memory
            if memory:
                self.peak_non_model_bytes = 0
                self.restart_peak()
        if times is not None:
            self.has_times = times
        self._update()

    # The iteration under way, in the order of the calls

    def begin(self, *, memory: bool, has_accesses: bool) -> None:
        """A training iteration begins.

        Args:
            memory: Watch its memory, even if `has_memory` is not set.
            has_accesses: Whether there is one between intervals; else, where every chunk stays, they end where a
                chunk's gradients begin and end, and the profile has accesses of nothing.
        """
        self.abandon()
        since, self._between = self._since, None
        self._since = self._last_end = None
        self._has_accesses = has_accesses
        if memory or self.has_memory:
            self._grads, self._stops, self._arrivals, self._peaks, self._levels = [[]], [[]], [[]], [0], []
            self.restart_peak()
        if self.has_times:
            self._grads, self._stops, self._arrivals, self._clock = [[]], [[]], [[]], _Clock(self._device)
            self._between = None if since is None else (since, self._clock.begin)
        self._update()

    def before_access(self) -> None:
        """An interval ends: from here on, chunks are waited for."""
        if self._clock is not None:
            self._clock.stop()
        if self._has_looks:
            self.look()
            if self._peaks is not None:
                self._levels.append(self._device.allocated_bytes() - self._held_before)

    def after_access(self, *, has_waited: bool) -> None:
        """The chunks are there: an interval begins."""
        self._next_interval()
        if self._has_looks:
            self.restart_peak()
        if self._clock is not None:
            self._clock.go_on(has_waited=has_waited)

    def _next_interval(self) -> None:
        if self._grads is not None:
            self._grads.append([])
            self._stops.append([])
            self._arrivals.append([])
        if self._peaks is not None:
            self._peaks.append(0)
        if self._clock is not None:
            self._clock.next_interval()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What the compute stream and the host wait for inside is no compute."""
        clock = self._clock
        if clock is None or not clock.is_running:
            yield
            return
        clock.stop()
        try:
            yield
        finally:
            clock.go_on(has_waited=True)

    def before_collect(self) -> None:
        """A gradient is about to move from autograd's memory to the engine's."""
        if self._has_looks:
            self.look()

    def after_collect(self) -> None:
        if self._has_looks:
            self.restart_peak()

    def grads_begin(self, chunk_id: int) -> None:
        """The first gradient of a chunk has come, or one after the chunk was reduced. It is still autograd's while
        there is a block for it."""
        if self._grads is None:
            return
        if not self._has_accesses:
            self._end_interval()
            if self._peaks is not None:
                self._peaks[-1] = max(0, self._device.allocated_bytes() - self._held_before)
        self._arrivals[-1].append(chunk_id)

    def grads_complete(self, chunk_ids: Iterable[int], *, is_at_end: bool = False) -> None:
        """Gradients of some chunks are complete, and have been waited for.

        Args:
            is_at_end: Only the end of backward tells it.
        """
        if self._grads is None:
            return
        chunk_ids = tuple(chunk_ids)
        stop = 0 if self._clock is None else self._clock.num_stops + is_at_end
        self._grads[-1].extend(chunk_ids)
        self._stops[-1].extend([stop] * len(chunk_ids))
        self._arrivals[-1].extend(chunk_ids)
        if self._grads[-1] and not self._has_accesses:
            self._end_interval()

    def _end_interval(self) -> None:
        clock = None if self._clock is None or not self._clock.is_running else self._clock
        if clock is not None:
            clock.stop()
        self._next_interval()
        if clock is not None:
            clock.go_on(has_waited=False)

    def note_end(self) -> None:
        """A forward has ended; there may come no backward."""
        if self._has_looks:
            self.look()
        if self._clock is not None:
            self._clock.note()

    def end_backward(self) -> None:
        if self._has_looks:
            self.look()
        if self._clock is not None:
            self._clock.close()

    def begin_backward(self) -> None:
        if self._clock is not None:
            self._clock.reopen()

    def finish(self, trace: AccessTrace | None) -> StepMemory | None:
        """The iteration is over.

        Args:
            trace: Of this iteration; None if it has taken another way than the known one, or has no accesses.

        Returns:
            What it took, if that was watched and there is a trace.
        """
        memory = self._since = self._last_end = None
        if self._grads is not None:
            if not self._has_accesses:
                trace = AccessTrace((Acquire((), is_pinned=False),) * (len(self._grads) - 1))
            if trace is not None and len(self._grads) != sum(1 for _ in trace.acquires()) + 1:
                trace = None
            sample = _Sample(trace, self._grads, self._stops, self._arrivals, self._peaks, self._levels, self._clock)
            if self._clock is not None:
                self._last_end = self._clock.settle()
                self._before_last = self.all_seconds()  # the device has long come to the end of that one
                self._last_timed = sample
            if trace is not None:
                self._last = sample
                if self._peaks is not None:
                    self._last_with_memory = sample
                    memory = self._memory_of(self._peaks)
        self.abandon()
        return memory

    def note_step(self) -> None:
        """The iteration that is over was the last one before a step of an optimizer, or of several."""
        self._since = self._last_end

    def note_evaluation(self) -> None:
        """What lies between the last backward and the next forward is more than what a step takes."""
        self._since = self._last_end = None

    def _memory_of(self, peaks: Sequence[int]) -> StepMemory:
        begun = tuple(first_gradients(self._arrivals))
        return StepMemory(tuple(self._levels), tuple(peaks), begun, tuple(chain.from_iterable(self._arrivals)))

    def abandon(self) -> None:
        """Forget the iteration under way."""
        self._clock = self._peaks = self._grads = None
        self._stops, self._arrivals, self._levels = [], [], []
        self._update()

    def _update(self) -> None:
        self._has_looks = self.has_memory or self._peaks is not None
        self.is_on = self._has_looks or self.has_times

    # Memory

    def look(self) -> None:
        """Take the peak since the last look. Call before what the engine itself holds changes, and `restart_peak`
        after it."""
        held = self._held_bytes()
        peak = max(0, self._device.take_peak_bytes() - min(held, self._held_before))
        self._held_before = held
        self.peak_non_model_bytes = max(self.peak_non_model_bytes, peak)
        if self._peaks is not None:
            self._peaks[-1] = max(self._peaks[-1], peak)

    def restart_peak(self) -> None:
        self._device.take_peak_bytes()
        self._held_before = self._held_bytes()

    # Results

    def profile(self) -> StepProfile | None:
        """The last sampled iteration, with times and bytes of an earlier one of the same accesses where it has none of
        its own. None: there is none."""
        sample = self._last
        if sample is None or sample.trace is None:
            return None
        num = len(sample.grads)
        seconds, peaks = [0.0] * num, [0] * num
        grad_s: list[tuple[float, ...]] = [()] * num
        timed, measured = self._last_timed, self._last_with_memory
        if timed is not None and sample.has_accesses_of(timed):
            timed.read()
            seconds = [until_s[-1] for until_s in timed.seconds or ()] or seconds
            if timed.grads == sample.grads:
                grad_s = [timed.grad_s(index) for index in range(num)]
        if measured is not None and sample.has_accesses_of(measured):
            peaks = measured.peaks or peaks
        elif measured is not None and not any(sample.trace.in_use()):
            peaks = [max(measured.peaks or [0])] * num
        intervals = (
            StepInterval(s, p, tuple(grads), arrivals=tuple(arrivals), grad_s=until_s)
            for s, p, grads, arrivals, until_s in zip(
                seconds, peaks, sample.grads, sample.arrivals, grad_s, strict=True
            )
        )
        return StepProfile(sample.trace, tuple(intervals))

    def seconds(self) -> StepSeconds | None:
        """Of the last timed iteration. Waits for its end."""
        timed = self._last_timed
        if timed is None:
            return None
        timed.read()
        return StepSeconds(sum(until_s[-1] for until_s in timed.seconds or ()), timed.wait_s)

    def seconds_between(self) -> float | None:
        """From the end of the backward before a step to the begin of the forward after it, on the device, if both were
        timed and the last iteration began with that forward. Waits for that begin."""
        return None if self._between is None else max(0.0, self._between[1].seconds_since(self._between[0]))

    def all_seconds(self) -> StepSeconds:
        """Of all iterations that were ever timed, added up. Waits for the end of the last one."""
        last = self.seconds()
        return self._before_last if last is None else self._before_last + last

"""Times, losses and memory of one process, however its loop is driven."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peers.jobs import Job

TRACED_STEPS = 2


def _nothing() -> None:
    return


@dataclass(frozen=True)
class Phase:
    """Some steps in a row, and what happens around them. The device is idle at both ends."""

    name: str
    count: int
    enter: Callable[[], None] = _nothing
    leave: Callable[[], None] = _nothing


class Recorder:
    """Told of every step, before and after; knows how many there are.

    A step's time reaches from the end of the one before to its own end, by marks on the compute stream: nobody waits
    for the device in between, so that hosts run ahead and updates run behind as they would in training.

    Args:
        job: What to do.
        device: The compute device.
        rank: Rank 0 writes the trace.
        before_timed: Called where the timed steps begin, and `after_timed` where they end.
        extra: Phases after the timed steps, on which nothing that is compared depends.
    """

    def __init__(
        self,
        job: Job,
        device: torch.device,
        rank: int = 0,
        *,
        before_timed: Callable[[], None] = _nothing,
        after_timed: Callable[[], None] = _nothing,
        extra: tuple[Phase, ...] = (),
    ) -> None:
        self._job = job
        self._device = device
        self._rank = rank
        self._is_cuda = device.type == "cuda"
        self._hooks = (before_timed, after_timed)
        self._profiler: Any = None
        phases = [Phase("warmup", job.warmup), Phase("timed", job.steps, self._begin_timed, self._end_timed), *extra]
        if job.trace_dir is not None:
            phases.append(Phase("traced", TRACED_STEPS, self._begin_trace, self._end_trace))
        self._starts: dict[int, Phase] = {}
        self._ends: dict[int, Phase] = {}
        self.num_steps = 0
        for phase in phases:
            if phase.count:
                self._starts[self.num_steps] = phase
                self.num_steps += phase.count
                self._ends[self.num_steps - 1] = phase
        self._index = 0
        self._is_timed = False
        self._marks: list[Any] = []
        self._losses: list[Tensor] = []
        self._result: dict[str, Any] = {}
        self._begin_s = time.perf_counter()

    def begin(self) -> None:
        """A step begins."""
        phase = self._starts.get(self._index)
        if phase is not None:
            self.synchronize()
            phase.enter()

    def end(self, loss: Tensor) -> None:
        """It has ended, as far as the host is concerned."""
        self._losses.append(loss.detach().float().clone())
        if self._is_timed:
            self._mark()
        phase = self._ends.get(self._index)
        if phase is not None:
            self.synchronize()
            phase.leave()
        self._index += 1

    def synchronize(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()

    def _mark(self) -> None:
        if not self._is_cuda:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def _begin_timed(self) -> None:
        self._hooks[0]()
        self._result["until_timed_s"] = time.perf_counter() - self._begin_s
        self._result |= self._peaks("run_")
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats()
        self._is_timed = True
        self._begin_s = time.perf_counter()
        self._mark()

    def _end_timed(self) -> None:
        self._result["wall_s"] = time.perf_counter() - self._begin_s
        self._is_timed = False
        marks = self._marks
        pairs = zip(marks, marks[1:], strict=False)
        seconds = [a.elapsed_time(b) / 1e3 if self._is_cuda else b - a for a, b in pairs]
        self._result["step_s"] = seconds
        self._result["median_step_s"] = statistics.median(seconds)
        self._result |= self._peaks("")
        self._hooks[1]()

    def _peaks(self, prefix: str) -> dict[str, Any]:
        if not self._is_cuda:
            return {}
        peaks = {
            f"{prefix}peak_gpu_allocated_bytes": torch.cuda.max_memory_allocated(),
            f"{prefix}peak_gpu_reserved_bytes": torch.cuda.max_memory_reserved(),
        }
        with suppress(AttributeError, RuntimeError):  # newer than the oldest torch that we run on
            stats = torch.cuda.memory.host_memory_stats()
            peaks[f"{prefix}pinned_by_torch_bytes"] = stats.get("allocated_bytes.peak", 0)
        return peaks

    def _begin_trace(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self._is_cuda else [])
        config = None
        with suppress(AttributeError, TypeError):  # as above; without it the threads that we started stay out
            config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        self._profiler = profile(activities=activities, experimental_config=config)
        self._profiler.__enter__()

    def _end_trace(self) -> None:
        self._profiler.__exit__(None, None, None)
        if self._rank == 0 and self._job.trace_dir is not None:
            folder = Path(self._job.trace_dir)
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{self._job.system}.json.gz"
            self._profiler.export_chrome_trace(str(path))
            self._result["trace"] = path.name
        self._profiler = None

    def losses(self) -> list[float]:
        """Of all steps up to the last timed one, the mean over ranks. Collective where there are ranks."""
        count = self._job.warmup + self._job.steps
        values = torch.stack(self._losses[:count])
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            torch.distributed.all_reduce(values)
            values /= torch.distributed.get_world_size()
        return [float(v) for v in values]

    def result(self) -> dict[str, Any]:
        """Collective where there are ranks."""
        return {**self._result, "losses": self.losses()}

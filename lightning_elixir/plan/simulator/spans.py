"""What a simulated step looks like: lanes, memory and times."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_elixir.plan.types import StepTimes


@dataclass(frozen=True)
class Span:
    """Something that keeps a lane busy."""

    lane: str
    """"compute", "h2d", "d2h", "collective", "cpu" or "nvme"."""
    start_s: float
    end_s: float
    label: str
    """For people, such as "fetch 3", "forward", "wait for chunk 7", "update 12"."""


@dataclass(frozen=True)
class MemoryPoint:
    """Device bytes from a moment on, by kind."""

    at_s: float
    resident_bytes: int
    """Parameters, shards and states that never leave."""
    rcache_bytes: int
    """Replicas in the rCache."""
    grad_bytes: int
    """Gradient blocks and gradient shards, and the buffers of streamed updates."""
    non_model_bytes: int
    """Activations and everything else."""

    @property
    def total_bytes(self) -> int:
        return self.resident_bytes + self.rcache_bytes + self.grad_bytes + self.non_model_bytes


@dataclass(frozen=True)
class Timeline:
    """One simulated step in the steady state: from the beginning of its forward to that of the next one."""

    times: StepTimes
    peak_gpu_bytes: int
    backward_end_s: float
    """When forward and backward are over and the update begins."""
    spans: tuple[Span, ...] = ()
    """Empty unless asked for. Where updates run behind forward, those of the step before are at the beginning."""
    memory: tuple[MemoryPoint, ...] = ()
    """Empty unless asked for."""
    host_update_s: float = 0.0
    """How long the host's own updates take together, beside all else; streamed ones not counted."""
    margin_bytes: int = 0
    """See `Forecast`."""
    gpu_kinds: tuple[tuple[str, int], ...] = ()
    """See `Forecast`."""

    @property
    def end_s(self) -> float:
        """When the next forward may begin, counted from the beginning of what the spans show."""
        return self.backward_end_s + self.times.step_s

    def within(self, limit: int | None) -> Timeline:
        """The same where no more than this may be on the device: what tensors take beyond what was foreseen leaves less
        of the margin; None: there is no limit."""
        lacking = 0 if limit is None else min(self.margin_bytes, max(0, self.peak_gpu_bytes - limit))
        return replace(
            self,
            peak_gpu_bytes=self.peak_gpu_bytes - lacking,
            margin_bytes=self.margin_bytes - lacking,
            gpu_kinds=tuple((kind, n - lacking * (kind == "non_model_bytes")) for kind, n in self.gpu_kinds),
        )

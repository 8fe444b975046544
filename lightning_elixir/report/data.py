"""What a report is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_elixir.plan.hardware import HardwareSpec
from lightning_elixir.plan.simulator.timeline import Timeline
from lightning_elixir.plan.types import Plan


@dataclass(frozen=True)
class Measured:
    """What a real run took, of one rank. Everything may be left out."""

    peak_gpu_bytes: int | None = None
    """Highest moment of the compute device, everything included."""
    host_bytes: int | None = None
    """Host memory of the shards."""
    step_s: tuple[float, ...] = ()
    """Wall time of every step in the steady state, in order (the warm-up left out)."""
    compute_s: float | None = None
    """Forward and backward of one step without the waiting in it, on average."""
    waiting_s: float | None = None
    """How long forward and backward of one step stood still, on average."""
    adam_s: float | None = None
    """Updates of one step, wherever they ran, on average."""
    counters: Mapping[str, int | float] = field(default_factory=dict)
    """Name to value, shown as given: fetches, hits, evictions..."""
    memory: tuple[tuple[float, int], ...] = ()
    """(seconds since the step began, bytes in use on the compute device), in order."""


@dataclass(frozen=True)
class ReportData:
    """One plan, what is expected of it, and what came of it."""

    title: str
    """For people, such as the model's name."""
    plan: Plan
    """Its `forecast` and `notes` are shown where it has them."""
    hardware: HardwareSpec | None
    """The figures that the forecast was made with."""
    timeline: Timeline | None
    """Made with `is_detailed=True`; None: the pictures of the step are left out."""
    measured: Measured | None = None
    num_tokens: int | None = None
    """Tokens of one step over all ranks, for the rate."""
    num_samples: int | None = None
    """The same in samples."""
    facts: tuple[tuple[str, str], ...] = ()
    """(what, value): what the plan was made for, such as precision and batch size."""
    remarks: tuple[str, ...] = ()
    """What was assumed, in sentences."""

    @property
    def device_word(self) -> str:
        """What to call the compute device."""
        is_cpu = self.hardware is not None and self.hardware.gpu_bytes is None and self.gpu_limit_bytes is None
        return "device" if is_cpu else "GPU"

    @property
    def gpu_limit_bytes(self) -> int | None:
        return None if self.plan.forecast is None else self.plan.forecast.gpu_limit_bytes

    @property
    def predicted_s(self) -> float | None:
        """Predicted seconds of one step."""
        if self.plan.forecast is not None:
            return self.plan.forecast.times.total_s
        return None if self.timeline is None else self.timeline.times.total_s

"""What a report is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_elixir.plan.device_words import DeviceWords
from lightning_elixir.plan.hardware import HardwareSpec
from lightning_elixir.plan.simulator.timeline import Timeline
from lightning_elixir.plan.types import Plan, StepTimes


@dataclass(frozen=True)
class Measured:
    """What a real run took, of one rank. Everything may be left out. A step has all of its micro-batches."""

    peak_gpu_bytes: int | None = None
    """Highest moment of the compute device, everything included."""
    host_bytes: int | None = None
    """Host memory of the shards."""
    step_s: tuple[float, ...] = ()
    """Wall time of every step in the steady state, in order (the warm-up left out)."""
    compute_s: float | None = None
    """Forwards and backwards of a step without the waiting in them: the median of the steps that were timed."""
    waiting_s: float | None = None
    """How long forwards and backwards of a step stood still: the median of the same steps."""
    update_s: float | None = None
    """From the call of a step until the last result of its updates was there, which may be in the next step: the median
    of the updates that were seen to end. Of updates where the device keeps the states, only the launches."""
    host_update_s: float | None = None
    """How long at least one thread of the host was at the arithmetic of a step's updates: the median of the same
    ones."""
    counters: Mapping[str, int | float] = field(default_factory=dict)
    """Name to value, shown as given: fetches, hits, evictions... Means of one step."""
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
    words: DeviceWords = DeviceWords()
    """What to call the compute device."""

    @property
    def device_word(self) -> str:
        return self.words.device

    @property
    def gpu_limit_bytes(self) -> int | None:
        return None if self.plan.forecast is None else self.plan.forecast.gpu_limit_bytes

    @property
    def times(self) -> StepTimes | None:
        """What is predicted of one step."""
        if self.plan.forecast is not None:
            return self.plan.forecast.times
        return None if self.timeline is None else self.timeline.times

    @property
    def predicted_s(self) -> float | None:
        """Predicted seconds of one step."""
        return None if self.times is None else self.times.total_s

    @property
    def has_nominal_times(self) -> bool:
        """Whether what is predicted in seconds comes from round figures of no machine in particular."""
        return self.hardware is not None and self.hardware.is_nominal

    @property
    def host_update_s(self) -> float | None:
        """Predicted seconds of the host's own updates in one step."""
        return None if self.timeline is None else self.timeline.host_update_s

"""The clocks of what works in parallel in a simulated step: compute stream, lanes, bus, host's worker, disk."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_elixir.plan.simulator.backlog import Backlog
from lightning_elixir.plan.simulator.lanes import Bus, Lane
from lightning_elixir.plan.simulator.record import StepRecord


@dataclass(slots=True)
class Busy:
    """What is done in the step under way, in seconds and bytes."""

    h2d_s: float = 0.0
    d2h_s: float = 0.0
    collective_s: float = 0.0
    nvme_s: float = 0.0
    update_waiting_s: float = 0.0
    """The compute stream waits for updates."""
    host_bytes: int = 0
    """Copies and sums of gradients read and write them in host memory."""

    def repeated(self, once: Busy, times: int) -> Busy:
        """What it would be if all that came after `once` were done so many times. Only `once` waits for updates."""
        return replace(
            self,
            h2d_s=once.h2d_s + times * (self.h2d_s - once.h2d_s),
            d2h_s=once.d2h_s + times * (self.d2h_s - once.d2h_s),
            collective_s=once.collective_s + times * (self.collective_s - once.collective_s),
            nvme_s=once.nvme_s + times * (self.nvme_s - once.nvme_s),
            host_bytes=once.host_bytes + times * (self.host_bytes - once.host_bytes),
        )


class Clocks:
    """When everything that works in parallel is free again.

    Args:
        record: Told what is done when.
        num_nvme_buffers: Through which states on NVMe are updated.
    """

    def __init__(self, record: StepRecord, num_nvme_buffers: int) -> None:
        self.record = record
        self.now_s = 0.0
        """Of the compute stream."""
        self.fetch, self.reduce = Lane(), Lane()
        self.activations_in, self.activations_out = Lane(), Lane()
        self.h2d, self.d2h = Bus(), Bus()
        self.backlog = Backlog(self.h2d, self.d2h, record.span if record.is_detailed else None, num_nvme_buffers)
        self.busy = Busy()

    def begin_step(self) -> None:
        self.busy = Busy()
        self.record.begin_step()

    def compute(self, seconds: float, label: str) -> None:
        start_s = self.now_s
        self.now_s += seconds
        self.record.span("compute", start_s, self.now_s, label)

    def wait(self, until_s: float, label: str) -> None:
        """The compute stream stands still."""
        if until_s > self.now_s:
            self.record.span("compute", self.now_s, until_s, label)
            self.now_s = until_s

    def use_disk(self, start_s: float, seconds: float, what: str, chunk_id: int) -> float:
        """Read or write something there; returns the end."""
        if seconds <= 0:
            return start_s
        begin_s, end_s = self.backlog.disk.reserve(start_s, seconds)
        self.record.span("nvme", begin_s, end_s, f"{what} {chunk_id}")
        self.busy.nvme_s += seconds
        return end_s

    def forget(self, before_s: float) -> None:
        """No time before this one is asked for again."""
        for each in (self.h2d, self.d2h, self.backlog):
            each.forget(before_s)

"""The clocks of what works in parallel in a simulated step: compute stream, lanes, bus, host's worker, disk.

[Note: collectives beside computing] A collective that runs takes multiprocessors and memory from what is computed
beside it, and that from the collective: while both go on, each takes longer than alone, by factors that are measured
(`HardwareSpec.slowdowns`). Seen on two H200s: matrix products take 1.26 times as long beside all-gathers and 1.43 times
beside exchanges of gradients, and these 1.8 and 1.5 times as long meanwhile. Times of real steps have that in them;
those of a dry run have not (`StepProfile.is_alone`). Known of collectives is how many seconds of them are left; those
under way at once are taken to follow each other, since they share the links. What is computed beside them moves their
lanes, and what waits for them, to later. Left out: what comes after a reduction on its way to the host is as early as
ever, and updates on the device take as long.
"""

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
    slowed_s: float = 0.0
    """Computing takes longer, beside collectives and where replicas are cast."""
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
            slowed_s=once.slowed_s + times * (self.slowed_s - once.slowed_s),
            host_bytes=once.host_bytes + times * (self.host_bytes - once.host_bytes),
        )


class Clocks:
    """When everything that works in parallel is free again.

    Args:
        record: Told what is done when.
        num_nvme_buffers: Through which states on NVMe are updated.
        slowdowns: How many times as long computing takes beside a collective, and a collective beside computing; None:
            as long as ever, or computing has that in its times.
    """

    def __init__(self, record: StepRecord, num_nvme_buffers: int, slowdowns: tuple[float, float] | None = None) -> None:
        self.record = record
        self.now_s = 0.0
        """Of the compute stream."""
        self.fetch, self.reduce = Lane(), Lane()
        self.activations_in, self.activations_out = Lane(), Lane()
        self.h2d, self.d2h = Bus(), Bus()
        self.backlog = Backlog(self.h2d, self.d2h, record.span if record.is_detailed else None, num_nvme_buffers)
        self.busy = Busy()
        self._slowdowns = slowdowns
        self._collectives_s = 0.0  # seconds alone of those that were issued and are not over
        self.late_s = 0.0
        """By how much a collective that never ends would have become later until now. Ends are kept less what this is
        when they are foreseen, and read with what it is by then."""

    def begin_step(self) -> None:
        self.busy = Busy()
        self.record.begin_step()

    def compute(self, seconds: float, label: str) -> None:
        start_s = self.now_s
        self.now_s += seconds
        self.record.span("compute", start_s, self.now_s, label)

    def interrupt(self, seconds: float, label: str) -> None:
        """Something that is no part of forward and backward, a cast, has the device's memory to itself."""
        self.busy.slowed_s += seconds
        self.compute(seconds, label)

    def wait(self, until_s: float, label: str) -> None:
        """The compute stream stands still."""
        if until_s > self.now_s:
            self.record.span("compute", self.now_s, until_s, label)
            if self._collectives_s:
                self._collectives_s = max(0.0, self._collectives_s - (until_s - self.now_s))
            self.now_s = until_s

    def communicate(self, seconds: float, beside_s: float) -> None:
        """A collective is issued.

        Args:
            seconds: That it takes alone.
            beside_s: Of that, what takes from computing.
        """
        self.busy.collective_s += seconds
        if self._slowdowns is not None:
            self._collectives_s += beside_s

    def advance(self, seconds: float) -> None:
        """Something is computed that takes so long alone; the record is not told."""
        if not self._collectives_s or self._slowdowns is None:
            self.now_s += seconds
            return
        computing, collective = self._slowdowns
        both_s = min(seconds * computing, self._collectives_s * collective)
        slowed_s, late_s = both_s * (1 - 1 / computing), both_s * (1 - 1 / collective)
        for lane in (self.fetch, self.reduce):
            if lane.free_s > self.now_s:
                lane.free_s += late_s
        self._collectives_s = max(0.0, self._collectives_s - both_s / collective)
        self.late_s += late_s
        self.busy.slowed_s += slowed_s
        self.now_s += seconds + slowed_s

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

"""A simulated step: forward and backward of all micro-batches, then the update.

[Note: the steady state] Where updates run behind forward, a step begins with work of the step before. Every chunk that
trains is needed in forward, so nothing of that is left when backward begins: what one step leaves to the next hardly
depends on what it was left itself, and the second simulated step, or the third, is like all that follow. What the
rCache does is the same in all of them, and found once (`rcache_script.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lightning_elixir.plan.hardware import HardwareSpec
from lightning_elixir.plan.memory import Scheme, is_on_nvme, nvme_buffers
from lightning_elixir.plan.profile import StepProfile
from lightning_elixir.plan.simulator.clocks import Busy, Clocks
from lightning_elixir.plan.simulator.cost import Costs, is_time_known
from lightning_elixir.plan.simulator.forward_backward import ForwardBackward
from lightning_elixir.plan.simulator.rcache_script import rcache_script
from lightning_elixir.plan.simulator.record import StepRecord
from lightning_elixir.plan.simulator.spans import MemoryPoint, Span
from lightning_elixir.plan.simulator.updates import Updates
from lightning_elixir.plan.types import Plan, StepTimes, Tier, UpdateTiming

_MOST_STEPS = 4
_SAME = 1e-3  # steps that differ by less are the steady state


@dataclass(frozen=True)
class SimulatedStep:
    """One step of the steady state."""

    times: StepTimes
    backward_end_s: float
    peak_blocks: int
    spans: tuple[Span, ...]
    memory: tuple[MemoryPoint, ...]


class StepSimulator:
    """Runs one step after the other. Arguments as for `simulate_step`."""

    def __init__(
        self, plan: Plan, profile: StepProfile, hardware: HardwareSpec, scheme: Scheme, *, is_detailed: bool
    ) -> None:
        self._plan, self._profile, self._hardware = plan, profile, hardware
        self._num_backwards = scheme.regime.num_backwards
        self._costs = Costs(hardware, scheme)
        self._script = rcache_script(plan, profile.trace)
        beside = [c for c in plan.chunks if c.requires_grad and c.optim_tier is not Tier.GPU]
        timing = scheme.regime.allowed(plan.update_timing) if beside else UpdateTiming.AFTER_BACKWARD
        record = StepRecord(plan, scheme, timing, is_detailed=is_detailed)
        self._clocks = Clocks(record, nvme_buffers(scheme.state_bytes(c) for c in beside if is_on_nvme(c))[0])
        self._updates = Updates(plan, self._costs, timing, self._script.order_of_need(), self._clocks)
        self._forward_backward = ForwardBackward(plan, profile, self._script, self._costs, self._updates, self._clocks)

    def run(self) -> SimulatedStep:
        """A step of the steady state."""
        clocks, updates = self._clocks, self._updates
        step = self._step()
        # The last states on NVMe are written behind forward, whatever the timing.
        has_rest = updates.is_overlapped or any(map(is_on_nvme, updates.beside_device))
        for _ in range(_MOST_STEPS - 1 if has_rest else 0):
            left_s = clocks.backlog.left_s(clocks.now_s)
            step = self._step()
            if abs(clocks.backlog.left_s(clocks.now_s) - left_s) <= _SAME * step.times.total_s:
                break  # the next step would begin as this one did
        if not is_time_known(self._plan, self._hardware):
            unknown = math.inf  # what spans and waiting leave out
            return replace(step, times=replace(step.times, total_s=unknown, step_s=unknown, nvme_s=unknown))
        return step

    def _step(self) -> SimulatedStep:
        clocks, updates = self._clocks, self._updates
        begin_s = clocks.now_s
        clocks.begin_step()
        self._forward_backward.spread()
        forward_backward_s = self._micro_batches()
        busy = clocks.busy
        busy.nvme_s += sum(sum(self._costs.nvme_s(c)) for c in updates.beside_device)
        busy.h2d_s += sum(self._costs.write_back_s(c) for c in updates.trained)
        backward_end_s = clocks.now_s
        adam_s = updates.adam_s
        updates.run(begin_s)
        step_s = clocks.now_s - backward_end_s
        compute_s = self._num_backwards * self._profile.compute_s
        # All lanes together may ask more of the host's memory than it has; the spans do not show that. Nor may a step
        # be shorter than what the disk has to do in it, as one could be that leaves more than it was left.
        least_s = max(self._host_memory_s() if updates.is_overlapped else 0.0, busy.nvme_s)
        more_s = max(0.0, least_s - forward_backward_s - step_s)
        times = StepTimes(
            total_s=forward_backward_s + step_s + more_s,
            compute_s=compute_s,
            h2d_s=busy.h2d_s,
            d2h_s=busy.d2h_s,
            collective_s=busy.collective_s,
            adam_s=adam_s,
            waiting_s=max(0.0, forward_backward_s - compute_s) + more_s,
            step_s=step_s,
            update_waiting_s=busy.update_waiting_s + more_s,
            nvme_s=busy.nvme_s,
        )
        record = clocks.record
        return SimulatedStep(
            times,
            backward_end_s - begin_s,
            self._script.peak_blocks,
            record.spans(begin_s, clocks.now_s),
            record.memory(begin_s),
        )

    def _micro_batches(self) -> float:
        """All of a step; returns their seconds. Those that are alike are simulated once."""
        clocks, micro_batch = self._clocks, self._forward_backward.micro_batch
        once, seconds, times = Busy(), 0.0, self._num_backwards
        if times > 1 and self._updates.is_overlapped:  # only the first one waits for updates
            seconds = micro_batch()
            once, times = replace(clocks.busy), times - 1
        seconds += times * micro_batch()
        clocks.busy = clocks.busy.repeated(once, times)
        return seconds

    def _host_memory_s(self) -> float:
        """How long the host's memory needs for all that a step moves in it; 0 where that was not measured."""
        if self._hardware.host_bytes_per_s is None:
            return 0.0
        updates = sum(self._costs.update_traffic_bytes(c) for c in self._updates.beside_device)
        return (updates + self._clocks.busy.fetched_bytes) / self._hardware.host_bytes_per_s

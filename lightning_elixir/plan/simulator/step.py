"""A simulated step: forward and backward of all micro-batches, then the update.

[Note: the steady state] Where updates run behind forward, a step begins with work of the step before. Every chunk that
trains is needed in forward, so nothing of that is left when backward begins: what one step leaves to the next hardly
depends on what it was left itself, and the second simulated step, or the third, is like all that follow. How much
longer updates take beside copies is found on the way. What the rCache does is the same in all of them, and found once
(`rcache_script.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_elixir.plan.memory import is_on_nvme, nvme_buffers
from lightning_elixir.plan.profile import StepProfile
from lightning_elixir.plan.simulator.clocks import Busy, Clocks
from lightning_elixir.plan.simulator.cost import Costs, is_time_known
from lightning_elixir.plan.simulator.forward_backward import ForwardBackward
from lightning_elixir.plan.simulator.rcache_script import RCacheScript, RCacheScripts
from lightning_elixir.plan.simulator.record import DetailedRecord, StepRecord
from lightning_elixir.plan.simulator.spans import MemoryPoint, Span
from lightning_elixir.plan.simulator.updates import Updates
from lightning_elixir.plan.types import ChunkSpec, Plan, StepTimes, Tier, UpdateTiming

_MOST_STEPS = 4
_SAME = 1e-3  # steps that differ by less are the steady state
# A step that has been left work takes longer than a first one, but for the order in which things then come: up to so
# much less was seen.
_FASTER_LATER = 5e-3
# The steps after that swing, since copies and updates share the host's memory by the length of the step before: up to
# so much less was seen.
_FASTER_STILL = 25e-3


@dataclass(frozen=True)
class SimulatedStep:
    """One step of the steady state."""

    times: StepTimes
    backward_end_s: float
    host_update_s: float
    peak_blocks: int
    spans: tuple[Span, ...]
    memory: tuple[MemoryPoint, ...]


class StepSimulator:
    """Simulates steps of plans of one layout, for one profile. What placements share is found once.

    Args:
        profile: What forward and backward touch, and how long they compute.
        costs: What training does to chunks, in seconds of one rank.
        scripts: Of the profile's trace, where other simulators have use for them as well.
    """

    def __init__(self, profile: StepProfile, costs: Costs, scripts: RCacheScripts | None = None) -> None:
        self._profile, self._costs = profile, costs
        self._scripts = scripts or RCacheScripts(profile.trace)

    def handling_s(self, chunks: Sequence[ChunkSpec]) -> float:
        """The host's work to have these chunks moved and updated in a step; not part of its times."""
        return sum(self._costs.of(c).handling_s for c in chunks)

    def least(self, chunks: Sequence[ChunkSpec], timing: UpdateTiming) -> StepTimes:
        """Of a step with these chunks in which nothing waits for anything but the host's memory; none is faster."""
        regime, rate = self._costs.scheme.regime, self._costs.hardware.host_bytes_per_s
        compute_s = regime.num_backwards * self._profile.compute_s
        step_s = traffic = 0.0
        for chunk in chunks:
            if chunk.requires_grad:
                costs = self._costs.of(chunk)
                if chunk.optim_tier is Tier.GPU:
                    step_s += costs.update_s
                elif timing is not UpdateTiming.AFTER_BACKWARD and not costs.is_in_step:
                    traffic += costs.update_traffic_bytes
        memory_s = traffic / rate if rate else 0.0
        waiting_s = max(0.0, memory_s - compute_s - step_s)
        return StepTimes(
            total_s=compute_s + step_s + waiting_s,
            compute_s=compute_s,
            h2d_s=0.0,
            d2h_s=0.0,
            collective_s=0.0,
            adam_s=step_s,
            waiting_s=waiting_s,
            step_s=step_s,
            update_waiting_s=waiting_s,
        )

    def run(self, plan: Plan, *, is_detailed: bool = False, limit_s: float = math.inf) -> SimulatedStep:
        """A step of the steady state; where that takes longer than `limit_s`, perhaps one before it, which takes longer
        as well. `spans` and `memory` are empty unless it is to be detailed."""
        script = self._scripts.of(plan)
        return _Steps(plan, self._profile, self._costs, script, is_detailed=is_detailed).run(limit_s)


class _Steps:
    """Runs one step after the other."""

    def __init__(
        self, plan: Plan, profile: StepProfile, costs: Costs, script: RCacheScript, *, is_detailed: bool
    ) -> None:
        self._plan, self._profile, self._hardware, self._script = plan, profile, costs.hardware, script
        scheme = costs.scheme
        self._num_backwards = scheme.regime.num_backwards
        beside = [c for c in plan.chunks if c.requires_grad and c.optim_tier is not Tier.GPU]
        timing = scheme.regime.allowed(plan.update_timing) if beside else UpdateTiming.AFTER_BACKWARD
        record = DetailedRecord(plan, scheme, profile.course.arrivals) if is_detailed else StepRecord()
        hardware, of_chunks = costs.hardware, list(map(costs.of, plan.chunks))
        self._clocks = Clocks(
            record,
            nvme_buffers(scheme.state_bytes(c) for c in beside if is_on_nvme(c))[0],
            hardware.slowdowns if profile.is_alone else None,
        )
        self._updates = Updates(
            plan,
            of_chunks,
            timing,
            profile.trace.order_of_need,
            self._clocks,
            needs_global_norm=scheme.regime.needs_global_norm,
            hardware=hardware,
        )
        self._forward_backward = ForwardBackward(
            plan,
            profile,
            script,
            of_chunks,
            self._updates,
            self._clocks,
            hardware=hardware,
        )

    def run(self, limit_s: float) -> SimulatedStep:
        """As `StepSimulator.run`."""
        clocks, updates = self._clocks, self._updates
        step = self._step()
        # The last states on NVMe are written behind forward, whatever the timing.
        has_rest = updates.is_overlapped or any(map(is_on_nvme, updates.beside_device))
        is_over = step.times.total_s * (1 - _FASTER_LATER) > limit_s
        for _ in range(_MOST_STEPS - 1 if has_rest and not is_over else 0):
            left_s, adam_s = clocks.backlog.left_s(clocks.now_s), updates.adam_s
            self._share_memory(step.times.total_s)
            step = self._step()
            if step.times.total_s * (1 - _FASTER_STILL) > limit_s:
                break
            is_as_left = abs(clocks.backlog.left_s(clocks.now_s) - left_s) <= _SAME * step.times.total_s
            if is_as_left and abs(updates.adam_s - adam_s) <= _SAME * adam_s:
                break  # the next step would begin, and go on, as this one did
        if not is_time_known(self._plan, self._hardware):
            unknown = math.inf  # what spans and waiting leave out
            return replace(step, times=replace(step.times, total_s=unknown, step_s=unknown, nvme_s=unknown))
        return step

    def _share_memory(self, step_s: float) -> None:
        """Updates go on beside copies that come as often as in the step before."""
        rate = self._hardware.host_bytes_per_s
        if self._updates.is_overlapped and rate is not None and step_s:
            self._updates.share_memory(self._clocks.busy.host_bytes / step_s, rate)

    def _step(self) -> SimulatedStep:
        clocks, updates = self._clocks, self._updates
        begin_s = clocks.now_s
        clocks.begin_step()
        self._forward_backward.spread()
        forward_backward_s = self._micro_batches()
        busy = clocks.busy
        busy.nvme_s += updates.nvme_s
        busy.h2d_s += updates.write_back_s
        backward_end_s = clocks.now_s
        adam_s, host_update_s = updates.adam_s, updates.host_s
        updates.run(begin_s)
        clocks.now_s += self._profile.program_s
        step_s = clocks.now_s - backward_end_s
        compute_s = self._num_backwards * self._profile.compute_s + busy.slowed_s
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
            host_update_s,
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
        seconds += self._forward_backward.wait_for_sums()
        clocks.busy = clocks.busy.repeated(once, times)
        return seconds

    def _host_memory_s(self) -> float:
        """How long the host's memory needs for all that a step moves in it; 0 where that was not measured."""
        if self._hardware.host_bytes_per_s is None:
            return 0.0
        return (self._updates.traffic_bytes + self._clocks.busy.host_bytes) / self._hardware.host_bytes_per_s

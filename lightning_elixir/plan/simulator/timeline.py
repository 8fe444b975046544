"""When everything in one training step happens: the simulated run of a plan, with measured figures.

The rCache is the runtime's own class and decides as it will (`rcache_script.py`). Around it are the clocks of what
works in parallel: the compute stream, the lane that fetches, the lane that reduces and downloads, the host's worker and
the stream of updates, and the two directions of the bus that they share. The rules are those of the runtime ([Note:
stream rule], `core/device.py`): a fetch begins when it was issued and all that the compute stream was given before is
done, and not before its chunk's update; a gradient block is free when the reduction before the last one has ended;
updates begin when the plan's `update_timing` says, or in the step where their optimizer can do no other.

Memory is the highest moment, not a sum of peaks: gradients come while activations go. Reads and writes of states,
parameters and gradients on NVMe share the disk, a lane of its own; a step is never predicted to be shorter than what
the disk has to do in it. What clipping and loss scaling cost on the host is known from steps that were seen
(`StepProfile.program_s`). Not predicted: steps that speculation has to run again, the size of staging buffers under a
wider `reduce_dtype`, and the fp32 master that fp32 parameters on the GPU have beside states in host memory or on NVMe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from lightning_elixir.plan.hardware import HardwareSpec
from lightning_elixir.plan.ignored import ignored_bytes
from lightning_elixir.plan.memory import MemoryUse, Scheme, memory_use
from lightning_elixir.plan.profile import Course, StepInterval, StepProfile
from lightning_elixir.plan.regime import TrainingRegime, UpdateMode
from lightning_elixir.plan.simulator.cost import Costs, is_time_known
from lightning_elixir.plan.simulator.rcache_script import RCacheScripts
from lightning_elixir.plan.simulator.spans import MemoryPoint, Span, Timeline
from lightning_elixir.plan.simulator.step import StepSimulator
from lightning_elixir.plan.types import AccessTrace, Acquire, Alternative, ChunkSpec, Drop, Plan, Tier

__all__ = [
    "Costs",
    "Holding",
    "MemoryPoint",
    "RCacheScripts",
    "Span",
    "StepSimulator",
    "Timeline",
    "beside_rcache_bytes",
    "compressed",
    "highest_moment",
    "is_time_known",
    "peak_gpu_bytes",
    "plan_use",
    "scheme_of",
    "simulate_step",
    "with_times",
]


def scheme_of(plan: Plan, regime: TrainingRegime) -> Scheme:
    """The scheme that a plan was made under."""
    updates = UpdateMode(plan.update_timing, plan.grad_reuses_compute_shard)
    return Scheme(
        plan.world_size,
        plan.is_storage_distributed,
        plan.block_bytes,
        regime,
        updates,
        plan.activation_host_bytes or 0,
        plan.tensor_parallel_size,
        plan.expert_parallel_size,
        plan.num_copies,
    )


def plan_use(plan: Plan, regime: TrainingRegime) -> MemoryUse:
    """Predicted bytes of one rank under a plan, with its rCache full: chunks, what is in none of them
    (`non_model_bytes`), and the host memory that activations may take; not what a step has beside on the device."""
    scheme = scheme_of(plan, regime)
    return memory_use(plan.chunks, plan.rcache_blocks, scheme, ignored_bytes(plan.ignored, scheme))


def simulate_step(
    plan: Plan,
    profile: StepProfile,
    hardware: HardwareSpec,
    scheme: Scheme,
    *,
    is_detailed: bool = False,
) -> Timeline:
    """Run one step of a plan without its bytes.

    Args:
        plan: Chunks, tiers and rCache.
        profile: What forward and backward touch, and how long they compute.
        hardware: Measured figures of one rank.
        scheme: What training does to chunks. Of several micro-batches before each update, `times` are those of all
            of them and the update; spans and memory show the last one, and the first where that waits for updates.
        is_detailed: Whether to give `spans` and `memory`.

    Returns:
        The timeline of a step with its trace known, as all but the first are. Its `total_s`, `step_s` and `nvme_s` are
        infinite unless `is_time_known`.
    """
    step = StepSimulator(profile, Costs(hardware, scheme)).run(plan, is_detailed=is_detailed)
    use = memory_use(plan.chunks, 0, scheme)
    course = profile.course
    moments = tuple((begun, profile.margin.without(nbytes)) for begun, nbytes in course.moments)
    bare = course._replace(moments=moments)
    rcache_bytes = max(plan.rcache_blocks, step.peak_blocks) * plan.block_bytes
    highest = replace(highest_moment(plan.chunks, course, scheme, use), rcache_bytes=rcache_bytes)
    return Timeline(
        step.times,
        highest.gpu_bytes,
        step.backward_end_s,
        step.spans,
        step.memory,
        step.host_update_s,
        highest.gpu_bytes - rcache_bytes - beside_rcache_bytes(plan.chunks, bare, scheme, use),
        highest.gpu_kinds,
    )


def with_times(
    plan: Plan,
    timeline: Timeline,
    hardware: str,
    *,
    binding: str | None = None,
    alternatives: tuple[Alternative, ...] | None = None,
) -> Plan:
    """A plan of which something is expected, with newer figures of its step.

    Args:
        plan: Without a forecast it is returned as it is.
        timeline: Its step.
        hardware: Whose figures that is simulated with.
        binding: See `Forecast.binding`; None: it stays.
        alternatives: In the newer figures. None: they stay, in the figures that they were weighed with
            (`Forecast.weighed_s`).
    """
    earlier = plan.forecast
    if earlier is None:
        return plan
    timeline = timeline.within(earlier.gpu_limit_bytes)
    forecast = replace(
        earlier,
        times=timeline.times,
        peak_gpu_bytes=timeline.peak_gpu_bytes,
        margin_bytes=timeline.margin_bytes,
        gpu_kinds=timeline.gpu_kinds,
        hardware=hardware,
        binding=earlier.binding if binding is None else binding,
        alternatives=earlier.alternatives if alternatives is None else alternatives,
        weighed_s=earlier.compared_s if alternatives is None and earlier.alternatives else None,
    )
    return replace(plan, forecast=forecast)


def beside_rcache_bytes(chunks: Sequence[ChunkSpec], course: Course, scheme: Scheme, use: MemoryUse) -> int:
    """Highest moment of everything on the device but the rCache: gradients come while activations go.

    Args:
        chunks: With their tiers.
        course: Of the profile of the step.
        scheme: What training does to them.
        use: Of these chunks, without the rCache.
    """
    return Holding.of(chunks, course.arrivals, scheme, use).highest(course).total


def highest_moment(chunks: Sequence[ChunkSpec], course: Course, scheme: Scheme, use: MemoryUse) -> MemoryUse:
    """What is on the device at that moment, by kind, so that the kinds add up to it. Arguments as for
    `beside_rcache_bytes`."""
    highest = Holding.of(chunks, course.arrivals, scheme, use).highest(course)
    return replace(
        use,
        gpu_grad_bytes=highest.grad_bytes,
        gpu_stream_bytes=highest.stream_bytes,
        non_model_bytes=use.non_model_bytes + highest.non_model_bytes,
    )


class HighestMoment(NamedTuple):
    """The highest moment without the rCache, in bytes."""

    total: int
    grad_bytes: int
    stream_bytes: int
    non_model_bytes: int


class Holding(NamedTuple):
    """What chunks have on the device while gradients come, whatever activations do meanwhile, in bytes."""

    fixed: int
    """All the time, without buffers of updates and gradients."""
    update: HighestMoment
    lasting: int
    """Buffers of updates in forward and backward."""
    before: int
    """Of gradients, when backward begins."""
    added: int
    """More, from when a chunk with its states there gets gradients."""
    more: Mapping[int, int]
    """More for each of those chunks from then on, by id."""

    @classmethod
    def of(cls, chunks: Sequence[ChunkSpec], arrivals: Sequence[int], scheme: Scheme, use: MemoryUse) -> Holding:
        """Arguments as for `beside_rcache_bytes`; `arrivals` are those of the course."""
        of_gpu = [c for c in chunks if c.requires_grad and c.optim_tier is Tier.GPU]
        shards = {c.id: scheme.chunk_bytes(c).gpu_grad for c in of_gpu}
        blocks = scheme.grad_block_bytes(chunks, arrivals)  # freed ones stay with the device's pool
        fixed, stream_bytes = use.gpu_bytes - use.gpu_grad_bytes, scheme.stream_bytes(chunks)
        at_end = blocks + sum(shards.values())
        earlier = {c.id: scheme.earlier_grad_bytes(c) for c in of_gpu} if scheme.regime.accumulates else {}
        return cls(
            fixed,
            HighestMoment(fixed + at_end + stream_bytes, at_end, stream_bytes, 0),
            scheme.lasting_stream_bytes(chunks),
            blocks + sum(earlier.values()),
            scheme.added_grad_bytes(chunks, arrivals),
            {i: nbytes - earlier.get(i, 0) for i, nbytes in shards.items()},
        )

    def highest(self, course: Course) -> HighestMoment:
        """The highest moment of a step."""
        highest, held, added, more = self.update, self.before, self.added, self.more
        beside, total = self.fixed + self.lasting, self.update.total
        for begun, non_model_bytes in course.moments:
            if added and not more.keys().isdisjoint(begun):
                held, added = held + added, 0
            for chunk_id in begun:
                held += more.get(chunk_id, 0)
            if beside + held + non_model_bytes > total:
                total = beside + held + non_model_bytes
                highest = HighestMoment(total, held, self.lasting, non_model_bytes)
        return highest


def peak_gpu_bytes(plan: Plan, profile: StepProfile, scheme: Scheme) -> int:
    """Highest moment of a step on the device, with the plan's rCache."""
    beside = beside_rcache_bytes(plan.chunks, profile.course, scheme, memory_use(plan.chunks, 0, scheme))
    return beside + plan.rcache_blocks * plan.block_bytes


def compressed(profile: StepProfile) -> StepProfile:
    """The same profile with accesses of the same chunks in a row made one: what matters to a simulation, in a fraction
    of the events. Pins that meet end to end become one, so a chunk may be kept a little longer."""
    events: list[Acquire | Drop] = []
    intervals = [profile.intervals[0]] if profile.intervals else []
    last: Acquire | None = None
    taken = 0
    for event in profile.trace.events:
        if not isinstance(event, Acquire):
            events.append(event)
            continue
        taken += 1
        interval = profile.intervals[taken]
        is_repeat = False
        if last is not None and event.ids == last.ids:
            if events[-1] is last:
                is_repeat = not event.is_pinned
            elif isinstance(events[-1], Drop) and events[-1].ids == event.ids and events[-2] is last:
                is_repeat = True
                if event.is_pinned:
                    events.pop()
        if is_repeat:
            earlier = intervals[-1]
            intervals[-1] = StepInterval(
                earlier.compute_s + interval.compute_s,
                max(earlier.non_model_bytes, interval.non_model_bytes),
                earlier.grads + interval.grads,
                moves=earlier.moves + interval.moves,
                arrivals=earlier.arrivals + interval.arrivals,
                grad_s=earlier.grad_s_before(interval),
            )
        else:
            events.append(event)
            intervals.append(interval)
            last = event
    return replace(profile, trace=AccessTrace(tuple(events)), intervals=tuple(intervals))

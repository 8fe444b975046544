"""When everything in one training step happens: the simulated run of a plan, with measured figures.

The rCache is the runtime's own class and decides as it will. Around it this file keeps the clocks of what works in
parallel: the compute stream, the lane that fetches, the lane that reduces and downloads, and the host. The rules are
those of the runtime ([Note: stream rule], `core/device.py`): a fetch begins when it was issued and all that the compute
stream was given before is done; a gradient block is free when the reduction before the last one has ended; the step
begins when all gradients have landed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_elixir.plan.cost import Costs
from lightning_elixir.plan.hardware import HardwareSpec
from lightning_elixir.plan.memory import ModelDataBytes, Scheme, memory_use
from lightning_elixir.plan.policy import CachePolicy
from lightning_elixir.plan.profile import StepInterval, StepProfile
from lightning_elixir.plan.rcache import RCache
from lightning_elixir.plan.types import AccessTrace, Acquire, ChunkSpec, Drop, Plan, StepTimes, Tier


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
    """Gradient blocks and gradient shards."""
    non_model_bytes: int
    """Activations and everything else."""

    @property
    def total_bytes(self) -> int:
        return self.resident_bytes + self.rcache_bytes + self.grad_bytes + self.non_model_bytes


@dataclass(frozen=True)
class Timeline:
    """One simulated step in the steady state."""

    times: StepTimes
    peak_gpu_bytes: int
    backward_end_s: float
    """When forward and backward are over and the update begins."""
    spans: tuple[Span, ...] = ()
    """Empty unless asked for."""
    memory: tuple[MemoryPoint, ...] = ()
    """Empty unless asked for."""

    @property
    def end_s(self) -> float:
        """When the update is over, counted from the beginning of the last forward."""
        return self.backward_end_s + self.times.step_s


def scheme_of(plan: Plan, data_bytes: Mapping[str, ModelDataBytes], stream_bytes: int = 0) -> Scheme:
    """The scheme that a plan was made under."""
    return Scheme(plan.world_size, plan.is_storage_distributed, plan.block_bytes, data_bytes, stream_bytes)


def simulate_step(
    plan: Plan,
    profile: StepProfile,
    hardware: HardwareSpec,
    scheme: Scheme,
    *,
    accumulates: bool = False,
    num_backwards: int = 1,
    is_detailed: bool = False,
) -> Timeline:
    """Run one step of a plan without its bytes.

    Args:
        plan: Chunks, tiers and rCache.
        profile: What forward and backward touch, and how long they compute.
        hardware: Measured figures of one rank.
        scheme: Bytes per element.
        accumulates: Gradients of earlier backwards are there from the start, and stay.
        num_backwards: Micro-batches before each update. `times` are those of all of them and the update; spans and
            memory show the last one.
        is_detailed: Whether to give `spans` and `memory`.

    Returns:
        The timeline of a step with its trace known, as all but the first are.
    """
    return _Run(plan, profile, hardware, scheme, accumulates, num_backwards, is_detailed).run()


def moments(profile: StepProfile) -> tuple[tuple[tuple[int, ...], int], ...]:
    """(chunks whose gradients complete, most bytes beside the chunks until the next do), in order."""
    found: list[tuple[tuple[int, ...], int]] = [((), 0)]
    for interval in profile.intervals:
        if interval.grads:
            found.append((interval.grads, interval.non_model_bytes))
        elif interval.non_model_bytes > found[-1][1]:
            found[-1] = (found[-1][0], interval.non_model_bytes)
    return tuple(found)


def beside_rcache_bytes(
    chunks: Sequence[ChunkSpec],
    moments: Sequence[tuple[tuple[int, ...], int]],
    scheme: Scheme,
    *,
    accumulates: bool = False,
) -> int:
    """Highest moment of everything on the device but the rCache: gradients come while activations go.

    Args:
        chunks: With their tiers.
        moments: Of the profile of the step.
        scheme: Bytes per element.
        accumulates: Gradients of earlier backwards are there from the start.
    """
    grads = {c.id: scheme.grad_shard_bytes(c) for c in chunks if c.optim_tier is Tier.GPU}
    shards = sum(grads.values())
    fixed = memory_use(chunks, 0, scheme).gpu_bytes - shards
    held = shards if accumulates else 0
    is_streaming = any(c.is_update_streamed for c in chunks)
    peak = fixed + shards + (scheme.stream_bytes if is_streaming else 0)  # the update
    for finished, non_model_bytes in moments:
        if not accumulates:
            for chunk_id in finished:
                held += grads.get(chunk_id, 0)
        peak = max(peak, fixed + held + non_model_bytes)
    return peak


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
            )
        else:
            events.append(event)
            intervals.append(interval)
            last = event
    return StepProfile(AccessTrace(tuple(events)), tuple(intervals))


@dataclass
class _Busy:
    """One lane: when it is free, and how long it has worked."""

    name: str
    free_s: float = 0.0
    total_s: float = 0.0

    def work(self, start_s: float, seconds: float) -> float:
        """Queue `seconds` of work that may start at `start_s`; returns its end."""
        self.free_s = max(self.free_s, start_s) + seconds
        self.total_s += seconds
        return self.free_s


@dataclass
class _Recorder:
    spans: list[Span] = field(default_factory=list)
    memory: list[MemoryPoint] = field(default_factory=list)


class _Run:
    """The clocks under way."""

    def __init__(
        self,
        plan: Plan,
        profile: StepProfile,
        hardware: HardwareSpec,
        scheme: Scheme,
        accumulates: bool,
        num_backwards: int,
        is_detailed: bool,
    ) -> None:
        self.plan, self.profile, self.hardware, self.scheme = plan, profile, hardware, scheme
        self.accumulates, self.num_backwards = accumulates, num_backwards
        self.costs = Costs(hardware, scheme)
        self.recorder = _Recorder() if is_detailed else None
        cost_blocks = {c.id: plan.blocks_of(c.id) for c in plan.chunks if not c.is_persistent}
        self.rcache = RCache(cost_blocks, plan.rcache_blocks, plan.prefetch_depth)
        self.has_frozen = any(not c.is_persistent and not c.requires_grad for c in plan.chunks)
        self.policy = CachePolicy(profile.trace)
        use = memory_use(plan.chunks, plan.rcache_blocks, scheme)
        shards = sum(scheme.grad_shard_bytes(c) for c in plan.chunks if c.optim_tier is Tier.GPU)
        self.resident_bytes = use.gpu_param_bytes + use.gpu_state_bytes
        self.grad_block_bytes = use.gpu_grad_bytes - shards
        self.start_grad_bytes = shards if accumulates else 0

    def run(self) -> Timeline:
        if self.has_frozen:  # frozen replicas survive the step: the steady state begins with them
            recorder, self.recorder = self.recorder, None
            self._iterate()
            self.recorder = recorder
        self._iterate()
        backward_end_s = max(self.compute_s, self.reduce.free_s)
        self._wait(backward_end_s, "wait for gradients")
        n, compute_s = self.num_backwards, self.profile.compute_s
        once = (self.h2d_s, self.d2h_s, self.collective_s)
        step_s = self._step(backward_end_s) - backward_end_s
        times = StepTimes(
            total_s=n * backward_end_s + step_s,
            compute_s=n * compute_s,
            h2d_s=self.h2d_s + (n - 1) * once[0],
            d2h_s=self.d2h_s + (n - 1) * once[1],
            collective_s=self.collective_s + (n - 1) * once[2],
            adam_s=self.adam_s,
            waiting_s=n * max(0.0, backward_end_s - compute_s),
            step_s=step_s,
        )
        peak = beside_rcache_bytes(self.plan.chunks, moments(self.profile), self.scheme, accumulates=self.accumulates)
        recorder = self.recorder or _Recorder()
        return Timeline(
            times,
            peak + max(self.plan.rcache_blocks, self.rcache.peak_blocks) * self.plan.block_bytes,
            backward_end_s,
            tuple(recorder.spans),
            tuple(recorder.memory),
        )

    # Forward and backward

    def _iterate(self) -> None:
        self.compute_s = 0.0
        self.fetch, self.reduce = _Busy("h2d"), _Busy("d2h")
        self.h2d_s = self.d2h_s = self.collective_s = self.adam_s = 0.0
        self.ready: dict[int, float] = {}
        self.reductions: list[float] = []  # ends, of those that may still be under way
        self.grad_bytes = self.start_grad_bytes
        is_outdating = self.plan.world_size > 1 and not self.plan.is_storage_distributed
        self.outdated = {c.id for c in self.plan.chunks if c.requires_grad} if is_outdating else set()
        self.rcache.begin(self.policy)
        self._spread()
        taken = 0
        for interval in self.profile.intervals[:1]:
            self._compute(interval, "compute")
        for event in self.profile.trace.events:
            if isinstance(event, Drop):
                self.rcache.drop(event.ids)
                continue
            taken += 1
            self._access(event)
            self._compute(self.profile.intervals[taken], f"chunk {', '.join(map(str, event.ids))}")
        self.rcache.unpin_all()
        self.rcache.release([c.id for c in self.plan.chunks if c.requires_grad and not c.is_persistent])

    def _spread(self) -> None:
        """The end of the step before has left the fetch lane with the new values of chunks that every rank keeps."""
        for chunk in self.plan.chunks:
            spread_s = self.costs.spread_s(chunk) if chunk.requires_grad else 0.0
            if spread_s:
                self.ready[chunk.id] = end_s = self.fetch.work(0.0, spread_s)
                self.collective_s += spread_s
                self._span("collective", end_s - spread_s, end_s, f"gather {chunk.id}")

    def _access(self, event: Acquire) -> None:
        rcache, plan = self.rcache, self.plan
        decision = rcache.acquire(event.ids, pin=event.is_pinned, held=event.held)
        # Ranks meet, and so agree on what to prefetch, only where they gather something on demand.
        can_prefetch = plan.world_size == 1 or any(self.costs.is_gathered(i in self.outdated) for i in decision.fetch)
        for chunk_id in decision.fetch:
            self._fetch(chunk_id)
        if can_prefetch:
            held = {*event.held, *event.ids}
            candidates = rcache.prefetch_candidates(held)
            if candidates:
                for chunk_id in rcache.prefetch(candidates, held).fetch:
                    self._fetch(chunk_id)
        latest = max((self.ready.get(i, 0.0) for i in event.ids), default=0.0)
        self._wait(latest, f"wait for chunk {', '.join(map(str, event.ids))}")

    def _fetch(self, chunk_id: int) -> None:
        chunk = self.plan.chunks[chunk_id]
        is_outdated = chunk_id in self.outdated
        upload_s = self.costs.upload_s(chunk, is_outdated=is_outdated)
        gather_s = self.costs.gather_s(chunk, is_outdated=is_outdated)
        if upload_s and self.reduce.free_s > max(self.fetch.free_s, self.compute_s):
            upload_s *= self.hardware.duplex_slowdown
        start_s = max(self.fetch.free_s, self.compute_s)
        refresh_s = self.costs.refresh_s(chunk, is_outdated=is_outdated)
        self.ready[chunk_id] = end_s = self.fetch.work(self.compute_s, upload_s + gather_s + refresh_s)
        self.h2d_s += upload_s
        self.d2h_s += refresh_s
        self.collective_s += gather_s
        self.outdated.discard(chunk_id)
        self._span("h2d", start_s, start_s + upload_s, f"fetch {chunk_id}")
        self._span("collective", start_s + upload_s, start_s + upload_s + gather_s, f"gather {chunk_id}")
        self._span("d2h", end_s - refresh_s, end_s, f"refresh {chunk_id}")

    def _compute(self, interval: StepInterval, label: str) -> None:
        start_s = self.compute_s
        self.compute_s += interval.compute_s
        phase = {True: "backward ", False: "forward ", None: ""}[interval.is_backward]
        self._span("compute", start_s, self.compute_s, phase + label)
        self._remember(start_s, interval.non_model_bytes)
        for chunk_id in interval.grads:
            chunk = self.plan.chunks[chunk_id]
            if not chunk.requires_grad:
                continue
            if chunk.optim_tier is Tier.GPU and not self.accumulates:
                self.grad_bytes += self.scheme.grad_shard_bytes(chunk)
            self._reduce(chunk)

    def _reduce(self, chunk: ChunkSpec) -> None:
        reduce_s, download_s = self.costs.reduce_s(chunk), self.costs.download_s(chunk)
        if download_s and self.fetch.free_s > max(self.reduce.free_s, self.compute_s):
            download_s *= self.hardware.duplex_slowdown
        start_s = max(self.reduce.free_s, self.compute_s)
        end_s = self.reduce.work(self.compute_s, reduce_s + download_s)
        self.d2h_s += download_s
        self.collective_s += reduce_s
        self._span("collective", start_s, start_s + reduce_s, f"reduce {chunk.id}")
        self._span("d2h", start_s + reduce_s, end_s, f"gradients {chunk.id}")
        if self.reductions:  # its block is needed for the chunk that follows
            self._wait(self.reductions[-1], "wait for a gradient block")
        self.reductions = [end_s]

    def _wait(self, until_s: float, label: str) -> None:
        if until_s > self.compute_s:
            self._span("compute", self.compute_s, until_s, label)
            self.compute_s = until_s

    # The update

    def _step(self, start_s: float) -> float:
        """Updates on the device, streamed ones and those of the host run side by side, each kind in turn; the last two
        share the host's memory, and slow each other down."""
        compute_s = cpu_s = start_s
        slowdown = self._joint_slowdown()
        is_streaming = any(c.is_update_streamed for c in self.plan.chunks)
        self._remember(start_s, 0, self.scheme.stream_bytes if is_streaming else 0)
        self.grad_bytes = self.start_grad_bytes
        streamed: list[tuple[float, str]] = []
        written: list[tuple[float, float, str]] = []  # when the host has made the new values, seconds of the bus
        for chunk in self.plan.chunks:
            if not chunk.requires_grad:
                continue
            seconds = self.costs.update_s(chunk)
            label = f"update {chunk.id}"
            if chunk.optim_tier is Tier.GPU:
                self._span("compute", compute_s, compute_s + seconds, label)
                compute_s += seconds
            elif chunk.is_update_streamed:
                seconds *= slowdown
                streamed.append((seconds, label))
            else:
                seconds *= slowdown
                self._span("cpu", cpu_s, cpu_s + seconds, label)
                cpu_s += seconds
                write_back_s = self.costs.write_back_s(chunk)
                if write_back_s:
                    written.append((cpu_s, write_back_s, f"write back {chunk.id}"))
            self.adam_s += seconds
        return max(compute_s, cpu_s, self._share_bus(start_s, streamed, written))

    def _share_bus(
        self, now_s: float, streamed: list[tuple[float, str]], written: list[tuple[float, float, str]]
    ) -> float:
        """New values go up as soon as they are there, and what is streamed in between. Returns the end."""
        streamed, written = streamed[::-1], written[::-1]
        while streamed or written:
            if written and (not streamed or written[-1][0] <= now_s):
                ready_s, seconds, label = written.pop()
                now_s = max(now_s, ready_s)
                self.h2d_s += seconds
            else:
                seconds, label = streamed.pop()
            self._span("h2d", now_s, now_s + seconds, label)
            now_s += seconds
        return now_s

    def _joint_slowdown(self) -> float:
        """How much longer updates by the host and streamed ones take beside each other."""
        seconds = {True: 0.0, False: 0.0}
        numel = 0
        for chunk in self.plan.chunks:
            if chunk.requires_grad and chunk.optim_tier is not Tier.GPU:
                seconds[chunk.is_update_streamed] += self.costs.update_s(chunk)
                numel += chunk.numel // self.plan.world_size
        if not all(seconds.values()):
            return 1.0
        return max(1.0, numel / self.hardware.joint_adam_numel_per_s / max(seconds.values()))

    # Details

    def _span(self, lane: str, start_s: float, end_s: float, label: str) -> None:
        if self.recorder is not None and end_s > start_s:
            self.recorder.spans.append(Span(lane, start_s, end_s, label))

    def _remember(self, at_s: float, non_model_bytes: int, stream_bytes: int = 0) -> None:
        if self.recorder is not None:
            point = MemoryPoint(
                at_s,
                self.resident_bytes,
                self.rcache.used_blocks * self.plan.block_bytes,
                self.grad_block_bytes + self.grad_bytes + stream_bytes,
                non_model_bytes,
            )
            self.recorder.memory.append(point)

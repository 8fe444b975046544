"""The clocks of a simulated step: the compute stream, the lanes, the host's worker and the stream of updates.

[Note: the steady state] Where updates run behind forward, a step begins with work of the step before. Every chunk that
trains is needed in forward, so nothing of that is left when backward begins: what one step leaves to the next hardly
depends on what it was left itself, and the second simulated step, or the third, is like all that follow. What the
rCache does is the same in all of them, and found once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lightning_elixir.plan.backlog import Backlog, Work
from lightning_elixir.plan.cost import Costs
from lightning_elixir.plan.hardware import HardwareSpec
from lightning_elixir.plan.lanes import Bus, Lane
from lightning_elixir.plan.memory import Scheme, has_params_on_nvme, is_on_nvme, memory_use, nvme_buffers, uses_nvme
from lightning_elixir.plan.policy import CachePolicy
from lightning_elixir.plan.profile import StepInterval, StepProfile
from lightning_elixir.plan.rcache import RCache
from lightning_elixir.plan.spans import MemoryPoint, Span
from lightning_elixir.plan.types import Acquire, ChunkSpec, Drop, Plan, StepTimes, Tier, UpdateTiming

_MOST_STEPS = 4
_SAME = 1e-3  # steps that differ by less are the steady state


@dataclass(frozen=True)
class _Access:
    """One acquire of the trace, and what the rCache does about it."""

    ids: tuple[int, ...]
    fetches: tuple[tuple[int, bool], ...]
    """(chunk, whether its whole shard has to be gathered first), needed ones before those fetched ahead."""
    used_blocks: int


@dataclass(frozen=True)
class Clocked:
    """One step of the steady state."""

    times: StepTimes
    backward_end_s: float
    peak_blocks: int
    spans: tuple[Span, ...]
    memory: tuple[MemoryPoint, ...]


class Clocks:
    """Arguments as for `simulate_step`."""

    def __init__(
        self,
        plan: Plan,
        profile: StepProfile,
        hardware: HardwareSpec,
        scheme: Scheme,
        is_detailed: bool,
    ) -> None:
        self.plan, self.profile, self.hardware, self.scheme = plan, profile, hardware, scheme
        self.is_detailed = is_detailed
        self.num_backwards, self.accumulates = scheme.regime.num_backwards, scheme.regime.accumulates
        self.costs = Costs(hardware, scheme)
        self.trained = [c for c in plan.chunks if c.requires_grad]
        self.on_host = [c for c in self.trained if c.optim_tier is not Tier.GPU]
        self.timing = scheme.regime.allowed(plan.update_timing) if self.on_host else UpdateTiming.AFTER_BACKWARD
        self.is_overlapped = self.timing is not UpdateTiming.AFTER_BACKWARD
        self.slowdown = self._joint_slowdown()
        self.peak_blocks = 0
        self.before, self.accesses = self._script()
        self._fetch_costs: dict[tuple[int, bool], tuple[float, float, float]] = {}
        # Bytes that a picture of the device's memory shows.
        use = memory_use(plan.chunks, plan.rcache_blocks, scheme)
        shards = sum(scheme.grad_shard_bytes(c) for c in plan.chunks if c.optim_tier is Tier.GPU)
        self.stream_bytes = scheme.stream_bytes(plan.chunks)
        self.resident_bytes = use.gpu_param_bytes + use.gpu_state_bytes
        self.grad_block_bytes = use.gpu_grad_bytes - shards + (self.stream_bytes if self.is_overlapped else 0)
        self.start_grad_bytes = shards if self.accumulates else 0
        # The clocks.
        self.now_s = 0.0
        """Of the compute stream."""
        self.fetch, self.reduce = Lane(), Lane()
        self.h2d, self.d2h = Bus(), Bus()
        self.nvme_s = 0.0
        """Of the disk, in the step under way."""
        num_buffers = nvme_buffers(scheme.state_bytes(c) for c in self.on_host if is_on_nvme(c))[0]
        self.backlog = Backlog(self.h2d, self.d2h, self._span, num_buffers)
        self.needed = self._order_of_need()
        self.landed_s: dict[int, float] = {}
        self.spans: list[Span] = []
        self.memory: list[MemoryPoint] = []

    def run(self) -> Clocked:
        step = self._step()
        has_rest = self.is_overlapped or any(
            map(is_on_nvme, self.on_host)
        )  # the last states are written behind forward anyway
        for _ in range(_MOST_STEPS - 1 if has_rest else 0):
            left_s = self.backlog.left_s(self.now_s)
            step = self._step()
            if abs(self.backlog.left_s(self.now_s) - left_s) <= _SAME * step.times.total_s:
                break  # the next step would begin as this one did
        if self.hardware.nvme_adam_numel_per_s is None and any(map(uses_nvme, self.plan.chunks)):
            unknown = math.inf  # what spans and waiting leave out
            return replace(step, times=replace(step.times, total_s=unknown, step_s=unknown, nvme_s=unknown))
        return step

    # What the rCache does, the same in every step

    def _script(self) -> tuple[StepInterval | None, list[_Access]]:
        """The interval before the first access, and all accesses of a step."""
        plan = self.plan
        cost_blocks = {c.id: plan.blocks_of(c.id) for c in plan.chunks if not c.is_persistent}
        rcache = RCache(cost_blocks, plan.rcache_blocks, plan.prefetch_depth)
        policy = CachePolicy(self.profile.trace)
        accesses = self._decided(rcache, policy)
        if any(not c.is_persistent and not c.requires_grad for c in plan.chunks):
            accesses = self._decided(rcache, policy)  # frozen replicas survive the step
        self.peak_blocks = rcache.peak_blocks
        return self.profile.intervals[0] if self.profile.intervals else None, accesses

    def _decided(self, rcache: RCache, policy: CachePolicy) -> list[_Access]:
        plan = self.plan
        is_outdating = plan.world_size > 1 and not plan.is_storage_distributed
        outdated = {c.id for c in self.trained} if is_outdating else set()
        rcache.begin(policy)
        accesses = []
        for event in self.profile.trace.events:
            if isinstance(event, Drop):
                rcache.drop(event.ids)
            else:
                accesses.append(self._decide(rcache, event, outdated))
        rcache.unpin_all()
        rcache.release([c.id for c in self.trained if not c.is_persistent])
        return accesses

    def _decide(self, rcache: RCache, event: Acquire, outdated: set[int]) -> _Access:
        decision = rcache.acquire(event.ids, pin=event.is_pinned, held=event.held)
        fetched = list(decision.fetch)
        # Ranks meet, and so agree on what to prefetch, only where they gather something on demand.
        if self.plan.world_size == 1 or any(self.costs.is_gathered(i in outdated) for i in fetched):
            held = {*event.held, *event.ids}
            candidates = rcache.prefetch_candidates(held)
            if candidates:
                fetched += rcache.prefetch(candidates, held).fetch
        fetches = tuple((i, i in outdated) for i in fetched)
        outdated.difference_update(fetched)
        return _Access(event.ids, fetches, rcache.used_blocks)

    def _order_of_need(self) -> dict[int, int]:
        order: dict[int, int] = {}
        for access in self.accesses:
            for chunk_id in access.ids:
                order.setdefault(chunk_id, len(order))
        return order

    # One step

    def _step(self) -> Clocked:
        self.begin_s = self.now_s
        self.h2d_s = self.d2h_s = self.collective_s = 0.0
        self.update_waiting_s = 0.0
        self.nvme_s = 0.0
        self.fetched_bytes = 0
        first_memory = len(self.memory)
        self._spread()
        n, compute_s = self.num_backwards, self.profile.compute_s
        forward_backward_s = self._micro_batch()
        times_repeated = n
        once = (0.0, 0.0, 0.0, 0.0)
        if n > 1 and self.is_overlapped:  # only the first one waits for updates
            once = (self.h2d_s, self.d2h_s, self.collective_s, self.nvme_s)
            fetched = self.fetched_bytes
            times_repeated = n - 1
            forward_backward_s += times_repeated * self._micro_batch()
            self.fetched_bytes = fetched + times_repeated * (self.fetched_bytes - fetched)
        else:
            forward_backward_s *= n
            self.fetched_bytes *= n
        busy = [
            first + times_repeated * (total - first)
            for first, total in zip(once, (self.h2d_s, self.d2h_s, self.collective_s, self.nvme_s), strict=True)
        ]
        self.nvme_s = busy[3] + sum(sum(self.costs.nvme_s(c)) for c in self.on_host)
        backward_end_s = self.now_s
        adam_s = sum(self._update_s(c) for c in self.trained)
        busy[0] += sum(self.costs.write_back_s(c) for c in self.trained)
        if self.is_overlapped:
            self._start_updates()
        else:
            self._update()
        step_s = self.now_s - backward_end_s
        waiting_s = max(0.0, forward_backward_s - n * compute_s)
        # All lanes together may ask more of the host's memory than it has; the spans do not show that. Nor may a step
        # be shorter than what the disk has to do in it, as one could be that leaves more than it was left.
        least_s = max(self._host_memory_s() if self.is_overlapped else 0.0, self.nvme_s)
        more_s = max(0.0, least_s - forward_backward_s - step_s)
        times = StepTimes(
            total_s=forward_backward_s + step_s + more_s,
            compute_s=n * compute_s,
            h2d_s=busy[0],
            d2h_s=busy[1],
            collective_s=busy[2],
            adam_s=adam_s,
            waiting_s=waiting_s + more_s,
            step_s=step_s,
            update_waiting_s=self.update_waiting_s + more_s,
            nvme_s=self.nvme_s,
        )
        memory = tuple(replace(p, at_s=p.at_s - self.begin_s) for p in self.memory[first_memory:])
        end_s = backward_end_s - self.begin_s
        return Clocked(times, end_s, self.peak_blocks, self._shown_spans(), memory)

    def _shown_spans(self) -> tuple[Span, ...]:
        """Those of this step, and what it was left by the one before, counted from its beginning."""
        begin_s, end_s = self.begin_s, self.now_s
        return tuple(
            Span(s.lane, max(0.0, s.start_s - begin_s), min(s.end_s, end_s) - begin_s, s.label)
            for s in self.spans
            if s.start_s < end_s and s.end_s > begin_s
        )

    # Forward and backward

    def _micro_batch(self) -> float:
        """One forward and one backward; returns their seconds."""
        begin_s = self.now_s
        self.ready: dict[int, float] = {}
        self.held_up: dict[int, float] = {}
        """Seconds that a fetch began later because of its chunk's update."""
        self.reductions: list[float] = []  # ends, of those that may still be under way
        self.reduced_s = 0.0  # the last one of a chunk with states on the device
        self.grad_bytes = self.start_grad_bytes
        self.used_blocks = 0
        if self.before is not None:
            self._compute(self.before, "compute")
        for access, interval in zip(self.accesses, self.profile.intervals[1:], strict=True):
            self.used_blocks = access.used_blocks
            self._access(access)
            self._compute(interval, f"chunk {', '.join(map(str, access.ids))}" if self.is_detailed else "")
        self._wait(self.reduced_s if self.is_overlapped else self.reduce.free_s, "wait for gradients")
        return self.now_s - begin_s

    def _spread(self) -> None:
        """The end of the step before has left the fetch lane with the new values of chunks that every rank keeps."""
        self.spread_ready: dict[int, float] = {}
        for chunk in self.trained:
            spread_s = self.costs.spread_s(chunk)
            if spread_s:
                self.spread_ready[chunk.id] = end_s = self.fetch.work(self.now_s, spread_s)
                self.collective_s += spread_s
                self._span("collective", end_s - spread_s, end_s, f"gather {chunk.id}")

    def _access(self, access: _Access) -> None:
        for chunk_id, is_outdated in access.fetches:
            self._fetch(chunk_id, is_outdated)
        latest_s, late_id = 0.0, -1
        for chunk_id in access.ids:
            if chunk_id in self.backlog:  # it stays on the device, and its states on the host
                self.ready[chunk_id] = self.backlog.done_s(chunk_id, self.now_s)
                self.held_up[chunk_id] = max(0.0, self.ready[chunk_id] - self.now_s)
            ready_s = self.ready.get(chunk_id)
            if ready_s is None:
                ready_s = self.spread_ready.get(chunk_id, 0.0)
            if ready_s > latest_s:
                latest_s, late_id = ready_s, chunk_id
        stall_s = latest_s - self.now_s
        if stall_s > 0:
            for_update_s = min(stall_s, self.held_up.get(late_id, 0.0))
            self.update_waiting_s += for_update_s
            what = "the update of " if 2 * for_update_s > stall_s else ""
            self._wait(latest_s, f"wait for {what}chunk {', '.join(map(str, access.ids))}" if self.is_detailed else "")

    def _fetch(self, chunk_id: int, is_outdated: bool) -> None:
        cost = self._fetch_costs.get((chunk_id, is_outdated))
        if cost is None:
            chunk, costs = self.plan.chunks[chunk_id], self.costs
            cost = self._fetch_costs[chunk_id, is_outdated] = (
                costs.upload_s(chunk, is_outdated=is_outdated),
                costs.gather_s(chunk, is_outdated=is_outdated),
                costs.refresh_s(chunk, is_outdated=is_outdated),
            )
        upload_s, gather_s, refresh_s = cost
        if upload_s:
            share = self.plan.world_size if self.costs.is_gathered(is_outdated) else 1
            self.fetched_bytes += self.plan.chunks[chunk_id].nbytes // share
        done_s = self.now_s
        if chunk_id in self.backlog:
            done_s = self.backlog.done_s(chunk_id, self.now_s)
            if self.costs.is_gathered(is_outdated):  # the host waits, or ranks would meet for different chunks
                self.update_waiting_s += max(0.0, done_s - self.now_s)
                self._wait(done_s, f"wait for the update of chunk {chunk_id}")
        start_s = max(self.fetch.free_s, self.now_s)
        is_held_up = done_s > start_s  # then others may overtake it
        self.held_up[chunk_id] = max(0.0, done_s - start_s)
        start_s = max(start_s, done_s)
        if upload_s and (self.reduce.free_s > start_s or self.d2h.is_busy(start_s)):
            upload_s *= self.hardware.duplex_slowdown
        self.backlog.advance(self.now_s)
        start_s = self._use_disk(
            start_s, self.costs.param_read_s(self.plan.chunks[chunk_id]), "read parameters", chunk_id
        )
        start_s, uploaded_s = self.h2d.reserve(start_s, upload_s)
        end_s = uploaded_s + gather_s + refresh_s
        self.ready[chunk_id] = end_s
        if not is_held_up:
            self.fetch.free_s = end_s
        self.h2d_s += upload_s
        self.d2h_s += refresh_s
        self.collective_s += gather_s
        if self.is_detailed:
            self._span("h2d", start_s, uploaded_s, f"fetch {chunk_id}")
            self._span("collective", uploaded_s, uploaded_s + gather_s, f"gather {chunk_id}")
            self._span("d2h", end_s - refresh_s, end_s, f"refresh {chunk_id}")

    def _compute(self, interval: StepInterval, label: str) -> None:
        start_s = self.now_s
        self.now_s += interval.compute_s
        if self.is_detailed:
            phase = {True: "backward ", False: "forward ", None: ""}[interval.is_backward]
            self._span("compute", start_s, self.now_s, phase + label)
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
        start_s = max(self.reduce.free_s, self.now_s)
        if download_s and (self.fetch.free_s > start_s or self.h2d.is_busy(start_s)):
            download_s *= self.hardware.duplex_slowdown
        reduced_s = start_s + reduce_s
        self.backlog.advance(self.now_s)
        down_s, end_s = self.d2h.reserve(reduced_s, download_s)
        self.reduce.free_s = end_s
        stored_s = self._use_disk(
            end_s, self.costs.grad_store_s(chunk, is_added=self.num_backwards > 1), "store gradients", chunk.id
        )
        self.d2h_s += download_s
        self.collective_s += reduce_s
        if self.is_detailed:
            self._span("collective", start_s, reduced_s, f"reduce {chunk.id}")
            self._span("d2h", down_s, end_s, f"gradients {chunk.id}")
        if self.reductions:  # its block is needed for the chunk that follows
            self._wait(self.reductions[-1], "wait for a gradient block")
        self.reductions = [end_s]
        if chunk.optim_tier is Tier.GPU:
            self.reduced_s = end_s
        elif self._is_early(chunk):
            self.backlog.add(self._work(chunk), end_s, is_before_step=True)
        self.landed_s[chunk.id] = stored_s

    def _is_early(self, chunk: ChunkSpec) -> bool:
        """Whether its update may begin inside backward, which reads parameters on NVMe until it is over."""
        return self.timing is UpdateTiming.INSIDE_BACKWARD and not has_params_on_nvme(chunk)

    def _use_disk(self, start_s: float, seconds: float, what: str, chunk_id: int) -> float:
        """Read or write something there; returns the end."""
        if seconds <= 0:
            return start_s
        begin_s, end_s = self.backlog.disk.reserve(start_s, seconds)
        self._span("nvme", begin_s, end_s, f"{what} {chunk_id}")
        self.nvme_s += seconds
        return end_s

    def _wait(self, until_s: float, label: str) -> None:
        if until_s > self.now_s:
            self._span("compute", self.now_s, until_s, label)
            self.now_s = until_s

    # Updates beside forward and backward

    def _start_updates(self) -> None:
        """Updates on the device, then the next forward begins; the others are in the backlog, in the order of need."""
        begin_s = self.now_s
        self._remember(begin_s, 0)
        self.grad_bytes = self.start_grad_bytes
        for chunk in self.on_host:
            if not self._is_early(chunk):
                self.backlog.add(self._work(chunk), max(begin_s, self.landed_s.get(chunk.id, 0.0)))
        self.backlog.step(self.needed, begin_s)
        self._update_on_device()
        if self.plan.world_size > 1:  # replicas that all keep are gathered at once, by hosts that wait for them
            for chunk in self.on_host:
                if chunk.is_persistent and chunk.id in self.backlog:
                    self._wait(self.backlog.done_s(chunk.id, self.now_s), f"wait for the update of chunk {chunk.id}")
        self._forget()

    def _forget(self) -> None:
        for each in (self.h2d, self.d2h, self.backlog):
            each.forget(self.begin_s)

    def _work(self, chunk: ChunkSpec) -> Work:
        work = Work(chunk.id, self._update_s(chunk), self.costs.write_back_s(chunk))
        work.read_s, work.write_s = self.costs.nvme_s(chunk)
        work.known_s = self.now_s
        if chunk.is_update_streamed:
            work.num_pieces, work.up_s, work.down_s = self.costs.stream_s(chunk)
        return work

    def _update_on_device(self) -> None:
        for chunk in self.trained:
            if chunk.optim_tier is Tier.GPU:
                start_s = self.now_s
                self.now_s += self.costs.update_s(chunk)
                self._span("compute", start_s, self.now_s, f"update {chunk.id}")

    def _update_s(self, chunk: ChunkSpec) -> float:
        seconds = self.costs.update_s(chunk)
        return seconds if chunk.optim_tier is Tier.GPU else seconds * self.slowdown

    def _host_memory_s(self) -> float:
        """How long the host's memory needs for all that a step moves in it; 0 where nobody has measured that."""
        if self.hardware.host_bytes_per_s is None:
            return 0.0
        updates = sum(self.costs.update_traffic_bytes(c) for c in self.on_host)
        return (updates + self.fetched_bytes) / self.hardware.host_bytes_per_s

    # Updates after backward

    def _update(self) -> None:
        """Updates on the device, streamed ones and those of the host run side by side, each kind in turn; the last two
        share the host's memory, and slow each other down."""
        begin_s = last_s = self.now_s
        self._remember(begin_s, 0, self.stream_bytes)
        self.grad_bytes = self.start_grad_bytes
        streamed: list[tuple[float, str]] = []
        written: list[tuple[float, float, str]] = []  # when the host has made the new values, seconds of the bus
        for chunk in self.on_host:
            seconds, label = self._update_s(chunk), f"update {chunk.id}"
            if chunk.is_update_streamed:
                streamed.append((seconds, label))
                continue
            work = self._work(chunk)
            if work.is_on_disk:
                self.backlog.add(work, max(begin_s, self.landed_s.get(chunk.id, 0.0)))
                continue
            start_s, last_s = self.backlog.cpu.reserve(last_s, seconds)
            self._span("cpu", start_s, last_s, label)
            if work.write_back_s:
                written.append((last_s, work.write_back_s, f"write back {chunk.id}"))
        self._update_on_device()
        self.now_s = max(self.now_s, last_s, self._share_bus(begin_s, streamed, written))
        for chunk in self.on_host:
            if chunk.id in self.backlog:
                self.now_s = max(self.now_s, self.backlog.done_s(chunk.id, begin_s))
        self._forget()

    def _share_bus(
        self, now_s: float, streamed: list[tuple[float, str]], written: list[tuple[float, float, str]]
    ) -> float:
        """New values go up as soon as they are there, and what is streamed in between. Returns the end."""
        streamed, written = streamed[::-1], written[::-1]
        while streamed or written:
            if written and (not streamed or written[-1][0] <= now_s):
                ready_s, seconds, label = written.pop()
                now_s = max(now_s, ready_s)
            else:
                seconds, label = streamed.pop()
            self._span("h2d", now_s, now_s + seconds, label)
            now_s += seconds
        return now_s

    def _joint_slowdown(self) -> float:
        """How much longer updates by the host and streamed ones take beside each other."""
        seconds = [self._host_s(is_streamed=streamed) for streamed in (False, True)]
        if not all(seconds):
            return 1.0
        numel = sum(c.numel // self.plan.world_size for c in self.on_host)
        return max(1.0, numel / self.hardware.joint_adam_numel_per_s / max(seconds))

    def _host_s(self, *, is_streamed: bool) -> float:
        """All updates of one of the two kinds, one after the other."""
        return sum(self.costs.update_s(c) for c in self.on_host if c.is_update_streamed is is_streamed)

    # Details

    def _span(self, lane: str, start_s: float, end_s: float, label: str) -> None:
        if self.is_detailed and end_s > start_s:
            self.spans.append(Span(lane, start_s, end_s, label))

    def _remember(self, at_s: float, non_model_bytes: int, stream_bytes: int = 0) -> None:
        if self.is_detailed:
            rcache_bytes = self.used_blocks * self.plan.block_bytes
            grad_bytes = self.grad_block_bytes + self.grad_bytes + stream_bytes
            self.memory.append(MemoryPoint(at_s, self.resident_bytes, rcache_bytes, grad_bytes, non_model_bytes))

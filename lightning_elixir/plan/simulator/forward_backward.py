"""Forward and backward of a simulated step, as the rCache's script says."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from lightning_elixir.plan.activations import NO_MOVES, ActivationMoves
from lightning_elixir.plan.hardware import BandwidthCurve, HardwareSpec
from lightning_elixir.plan.memory import GRAD_BLOCKS, STAGING_BUFFERS
from lightning_elixir.plan.profile import StepInterval, StepProfile
from lightning_elixir.plan.simulator.clocks import Clocks
from lightning_elixir.plan.simulator.cost import ChunkCosts
from lightning_elixir.plan.simulator.lanes import Bus
from lightning_elixir.plan.simulator.rcache_script import RCacheScript, ScriptedAccess
from lightning_elixir.plan.simulator.updates import Updates
from lightning_elixir.plan.types import Plan, Tier

_ACTIVATION_BYTES = 32 * 2**20
"""Of the storages that activations are in, about."""

_PHASES = {True: "backward ", False: "forward ", None: ""}


class ForwardBackward:
    """Fetches, computes and reduces.

    Args:
        plan: Chunks and tiers.
        profile: What is computed between the accesses, and where gradients become complete.
        script: What the rCache does at each of these.
        costs: Of every chunk.
        updates: Told of gradients that have landed.
        clocks: Of the simulated step.
        hardware: Rates of the bus, and how much longer a transfer takes while the other direction is busy.
    """

    def __init__(
        self,
        plan: Plan,
        profile: StepProfile,
        script: RCacheScript,
        costs: Sequence[ChunkCosts],
        updates: Updates,
        clocks: Clocks,
        *,
        hardware: HardwareSpec,
    ) -> None:
        self._hardware, self._duplex_slowdown = hardware, hardware.duplex_slowdown
        self._beside_updates = hardware.copies_beside_updates
        self._chunks, self._costs, self._updates, self._clocks = plan.chunks, costs, updates, clocks
        self._before = profile.intervals[0] if profile.intervals else None
        self._accesses = tuple(zip(script.accesses, profile.intervals[1:], strict=True))
        self._spread = [(c.id, costs[c.id].spread_s) for c in updates.trained if costs[c.id].spread_s]
        self._spread_ready: dict[int, float] = {}  # as `_ready`
        # Of the micro-batch under way.
        self._ready: dict[int, float] = {}  # when it is there, less `late_s` of the clocks
        self._held_up: dict[int, float] = {}  # seconds that a fetch began later because of its chunk's update
        self._collected_s = 0.0  # end of the last reduction, less `late_s`
        self._blocks: deque[float] = deque(maxlen=GRAD_BLOCKS)  # ends of the last ones that had a block, likewise
        self._sums: deque[float] = deque(maxlen=STAGING_BUFFERS)  # ends of the last additions in host memory
        # Of chunks that are updated in the step: when the last gradient is reduced, less `late_s`, and when all are
        # added up.
        self._reduced_s = self._summed_s = 0.0

    def spread(self) -> None:
        """The end of the step before has left the fetch lane with the new values of chunks that every rank keeps."""
        clocks = self._clocks
        self._spread_ready = {}
        for chunk_id, spread_s in self._spread:
            end_s = clocks.fetch.work(clocks.now_s, spread_s)
            self._spread_ready[chunk_id] = end_s - clocks.late_s
            clocks.communicate(spread_s, self._costs[chunk_id].fetch_outdated.gather_beside_s)
            clocks.record.span("collective", end_s - spread_s, end_s, f"gather {chunk_id}")

    def micro_batch(self) -> float:
        """One forward and one backward; returns their seconds."""
        clocks = self._clocks
        begin_s = clocks.now_s
        self._ready, self._held_up, self._collected_s, self._reduced_s = {}, {}, 0.0, 0.0
        self._blocks.clear()
        clocks.record.begin_micro_batch()
        is_detailed = clocks.record.is_detailed
        if self._before is not None:
            self._compute(self._before, "compute")
            for chunk_id in self._before.grads:
                self._gradient(chunk_id)
        for access, interval in self._accesses:
            ids, fetches, used_blocks, awaited = access
            moves, grads = interval.moves, interval.grads
            if fetches or awaited:
                self._access(access)
            if moves is not NO_MOVES:
                self._bring_activations(moves)
            if is_detailed:
                clocks.record.access(used_blocks)
            if len(grads) > 1 or interval.grad_s:
                self._compute_spread(interval, ids)
                self._send_activations(moves)
                continue
            if is_detailed:
                self._compute(interval, f"chunk {', '.join(map(str, ids))}")
            else:
                clocks.advance(interval.compute_s)
            if moves is not NO_MOVES:
                self._send_activations(moves)
            for chunk_id in grads:
                self._gradient(chunk_id)
        clocks.wait(self._reduced_s + clocks.late_s, "wait for gradients")
        return clocks.now_s - begin_s

    def wait_for_sums(self) -> float:
        """What is updated in the step waits until its last gradients are added to those of earlier micro-batches, which
        the next forward does not; returns the seconds that this takes."""
        begin_s = self._clocks.now_s
        self._clocks.wait(self._summed_s, "wait for gradients")
        return self._clocks.now_s - begin_s

    def _bring_activations(self, moves: ActivationMoves) -> None:
        """An interval begins: what it needs of host memory is there, and what is needed later begins to come."""
        clocks = self._clocks
        if moves.is_awaited:
            clocks.wait(clocks.activations_in.free_s, "wait for activations")
        if moves.in_bytes:
            seconds = self._activation_s(self._hardware.h2d, moves.in_bytes, clocks.d2h)
            begin_s, end_s = clocks.h2d.reserve(max(clocks.activations_in.free_s, clocks.now_s), seconds)
            clocks.activations_in.free_s = end_s
            clocks.busy.h2d_s += seconds
            clocks.busy.host_bytes += moves.in_bytes
            clocks.record.span("h2d", begin_s, end_s, "activations")

    def _send_activations(self, moves: ActivationMoves) -> None:
        """An interval ends: what it has left goes to host memory, when what went before is there."""
        if not moves.out_bytes:
            return
        clocks = self._clocks
        clocks.wait(clocks.activations_out.free_s, "wait for activations to go")
        seconds = self._activation_s(self._hardware.d2h, moves.out_bytes, clocks.h2d)
        begin_s, end_s = clocks.d2h.reserve(clocks.now_s, seconds)
        clocks.activations_out.free_s = end_s
        clocks.busy.d2h_s += seconds
        clocks.busy.host_bytes += moves.out_bytes
        clocks.record.span("d2h", begin_s, end_s, "activations")

    def _activation_s(self, rate: BandwidthCurve, nbytes: int, other: Bus) -> float:
        """Of a copy that begins now, in pieces as large as the host's memory is asked for them."""
        seconds = nbytes / rate.bytes_per_s(min(nbytes, _ACTIVATION_BYTES))
        now_s = self._clocks.now_s
        return self._beside(seconds, now_s, is_duplex=other.is_busy(now_s))

    def _beside(self, seconds: float, start_s: float, *, is_duplex: bool) -> float:
        """Of a copy that begins then: longer beside one in the other direction, and as long as the host updates."""
        if is_duplex:
            seconds *= self._duplex_slowdown
        slowdown = self._beside_updates
        if slowdown == 1 or not seconds:
            return seconds
        host_s = self._clocks.backlog.host_s(start_s, slowdown * seconds)
        return seconds + host_s * (1 - 1 / slowdown)

    def _access(self, access: ScriptedAccess) -> None:
        clocks, backlog = self._clocks, self._clocks.backlog
        for chunk_id, is_outdated in access.fetches:
            self._fetch(chunk_id, is_outdated)
        latest_s, late_id = 0.0, -1
        for chunk_id in access.awaited:
            if chunk_id in backlog:  # it stays on the device, and its states on the host
                done_s = backlog.done_s(chunk_id, clocks.now_s)
                self._ready[chunk_id] = done_s - clocks.late_s
                self._held_up[chunk_id] = max(0.0, done_s - clocks.now_s)
            ready_s = self._ready.get(chunk_id)
            if ready_s is None:
                ready_s = self._spread_ready.get(chunk_id, 0.0)
            ready_s += clocks.late_s
            if ready_s > latest_s:
                latest_s, late_id = ready_s, chunk_id
        stall_s = latest_s - clocks.now_s
        if stall_s > 0:
            for_update_s = min(stall_s, self._held_up.get(late_id, 0.0))
            clocks.busy.update_waiting_s += for_update_s
            what = "the update of " if 2 * for_update_s > stall_s else ""
            is_detailed = clocks.record.is_detailed
            clocks.wait(latest_s, f"wait for {what}chunk {', '.join(map(str, access.ids))}" if is_detailed else "")

    def _fetch(self, chunk_id: int, is_outdated: bool) -> None:
        clocks, backlog, busy = self._clocks, self._clocks.backlog, self._clocks.busy
        costs = self._costs[chunk_id]
        fetch = costs.fetch_outdated if is_outdated else costs.fetch
        upload_s = fetch.upload_s
        busy.host_bytes += fetch.host_bytes
        done_s = clocks.now_s
        if chunk_id in backlog:
            done_s = backlog.done_s(chunk_id, clocks.now_s)
            if fetch.is_gathered:  # the host waits, or ranks would meet for different chunks
                busy.update_waiting_s += max(0.0, done_s - clocks.now_s)
                clocks.wait(done_s, f"wait for the update of chunk {chunk_id}")
        start_s = max(clocks.fetch.free_s, clocks.now_s)
        is_held_up = done_s > start_s  # then others may overtake it
        self._held_up[chunk_id] = max(0.0, done_s - start_s)
        start_s = max(start_s, done_s)
        is_duplex = upload_s > 0 and (clocks.reduce.free_s > start_s or clocks.d2h.is_busy(start_s))
        backlog.advance(clocks.now_s)
        upload_s = self._beside(upload_s, start_s, is_duplex=is_duplex)
        if costs.param_read_s:
            start_s = clocks.use_disk(start_s, costs.param_read_s, "read parameters", chunk_id)
        start_s, uploaded_s = clocks.h2d.reserve(start_s, upload_s)
        there_s = uploaded_s + fetch.cast_s
        if fetch.cast_s:
            clocks.interrupt(fetch.cast_s, f"cast {chunk_id}")
        end_s = there_s + fetch.gather_s + fetch.refresh_s
        self._ready[chunk_id] = end_s - clocks.late_s
        if not is_held_up:
            clocks.fetch.free_s = end_s
        busy.h2d_s += upload_s
        busy.d2h_s += fetch.refresh_s
        clocks.communicate(fetch.gather_s, fetch.gather_beside_s)
        if clocks.record.is_detailed:
            clocks.record.span("h2d", start_s, uploaded_s, f"fetch {chunk_id}")
            clocks.record.span("collective", there_s, there_s + fetch.gather_s, f"gather {chunk_id}")
            clocks.record.span("d2h", end_s - fetch.refresh_s, end_s, f"refresh {chunk_id}")

    def _compute(self, interval: StepInterval, label: str, seconds: float | None = None) -> None:
        """An interval, or so many seconds of it."""
        clocks = self._clocks
        start_s = clocks.now_s
        clocks.advance(interval.compute_s if seconds is None else seconds)
        if clocks.record.is_detailed:
            for chunk_id in interval.arrivals:
                clocks.record.gradient(self._chunks[chunk_id])
            clocks.record.span("compute", start_s, clocks.now_s, _PHASES[interval.is_backward] + label)
            clocks.record.remember(start_s, interval.non_model_bytes)

    def _compute_spread(self, interval: StepInterval, ids: Sequence[int]) -> None:
        """An interval in which several chunks get their gradients, or of which is known when one does.

        Those of compiled code come all at once, and all but two wait for a block."""
        label = f"chunk {', '.join(map(str, ids))}" if self._clocks.record.is_detailed else ""
        done_s = 0.0
        for number, (chunk_id, until_s) in enumerate(zip(interval.grads, interval.until_grads_s, strict=True)):
            if until_s > done_s or number == 0:
                self._compute(interval, label, until_s - done_s)
                done_s = until_s
            self._gradient(chunk_id, is_next_soon=not interval.grad_s)
        if interval.compute_s > done_s:
            self._compute(interval, label, interval.compute_s - done_s)

    def _gradient(self, chunk_id: int, *, is_next_soon: bool = True) -> None:
        """A chunk's gradients are complete: they are reduced, and go where they stay.

        Args:
            is_next_soon: The next chunk needs a block at once, as one after the other gets its gradients. Otherwise it
                does where its own are complete: of its first one it is not known when that comes.
        """
        clocks, chunk, costs = self._clocks, self._chunks[chunk_id], self._costs[chunk_id]
        if not chunk.requires_grad:
            return
        is_detailed = clocks.record.is_detailed
        if is_detailed:
            clocks.record.gradient(chunk)
        reduce_s, download_s = costs.reduce_s, costs.download_s
        has_block = reduce_s + download_s > 0  # otherwise it becomes the gradient shard
        if has_block and len(self._blocks) == GRAD_BLOCKS:
            clocks.wait(self._blocks[0] + clocks.late_s, "wait for a gradient block")
        start_s = max(clocks.reduce.free_s, clocks.now_s)
        is_duplex = download_s > 0 and (clocks.fetch.free_s > start_s or clocks.h2d.is_busy(start_s))
        reduced_s = start_s + reduce_s
        clocks.backlog.advance(clocks.now_s)
        download_s = self._beside(download_s, reduced_s, is_duplex=is_duplex)
        is_added = costs.sum_s > 0
        has_buffer_s = self._sums[0] if is_added and len(self._sums) == STAGING_BUFFERS else 0.0
        down_s, end_s = clocks.d2h.reserve(max(reduced_s, has_buffer_s), download_s)
        clocks.reduce.free_s = end_s
        landed_s = self._add_up(chunk_id, end_s) if is_added else end_s
        stored_s = landed_s
        if costs.grad_store_s:
            stored_s = clocks.use_disk(landed_s, costs.grad_store_s, "store gradients", chunk_id)
        clocks.busy.d2h_s += download_s
        clocks.communicate(reduce_s, costs.reduce_beside_s)
        if is_detailed:
            clocks.record.span("collective", start_s, reduced_s, f"reduce {chunk_id}")
            clocks.record.span("d2h", down_s, end_s, f"gradients {chunk_id}")
        if has_block:
            self._blocks.append(end_s - clocks.late_s)
        if is_next_soon:
            clocks.wait(self._collected_s + clocks.late_s, "wait for a gradient block")
        self._collected_s = end_s - clocks.late_s
        if chunk_id not in self._updates.behind:
            self._reduced_s, self._summed_s = self._collected_s, max(self._summed_s, landed_s)
        if chunk.optim_tier is not Tier.GPU:
            self._updates.land(chunk, landed_s, stored_s)

    def _add_up(self, chunk_id: int, from_s: float) -> float:
        """A thread adds a gradient in host memory to what earlier micro-batches have brought; returns the end."""
        costs = self._costs[chunk_id]
        end_s = max(from_s, *self._sums, 0.0) + costs.sum_s
        self._sums.append(end_s)
        self._clocks.busy.host_bytes += costs.sum_traffic_bytes
        self._clocks.record.span("cpu", end_s - costs.sum_s, end_s, f"add up {chunk_id}")
        return end_s

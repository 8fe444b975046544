"""Updates in a simulated step: on the device, by the host, and streamed; beside forward and backward, or after them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from lightning_elixir.plan.hardware import HardwareSpec
from lightning_elixir.plan.memory import has_params_on_nvme
from lightning_elixir.plan.simulator.backlog import Work
from lightning_elixir.plan.simulator.clocks import Clocks
from lightning_elixir.plan.simulator.cost import ChunkCosts
from lightning_elixir.plan.types import ChunkSpec, Plan, Tier, UpdateTiming


class Updates:
    """All updates of one step after the other.

    Args:
        plan: Chunks, and where and when they are updated.
        costs: Of every chunk.
        timing: When updates beside the device run.
        needed: The order in which forward needs the chunks.
        clocks: Of the simulated step.
        needs_global_norm: See `TrainingRegime`.
        hardware: Measured figures of one rank.
    """

    def __init__(
        self,
        plan: Plan,
        costs: Sequence[ChunkCosts],
        timing: UpdateTiming,
        needed: Mapping[int, int],
        clocks: Clocks,
        *,
        needs_global_norm: bool,
        hardware: HardwareSpec,
    ) -> None:
        self._plan, self._costs, self._clocks = plan, costs, clocks
        self._needed = needed
        self.trained = [c for c in plan.chunks if c.requires_grad]
        self.beside_device = [c for c in self.trained if c.optim_tier is not Tier.GPU]
        is_behind = timing is not UpdateTiming.AFTER_BACKWARD
        self.behind = {c.id: c for c in self.beside_device if is_behind and not costs[c.id].is_in_step}
        """Chunks whose updates do not end with the step, by id."""
        # With spare states for any chunk, nothing is promised of the step: the others' updates wait for it.
        only_into_spares = plan.has_spare_states or needs_global_norm
        self._early = {
            c.id
            for c in self.behind.values()
            if timing is UpdateTiming.INSIDE_BACKWARD
            and not has_params_on_nvme(c)  # backward reads those until it is over
            and (c.has_spare_states or not only_into_spares)
        }  # updates that begin inside backward
        # Of each update: first with all that it uses to itself, then beside those of the other kind.
        self._update_s = {c.id: costs[c.id].update_s for c in self.trained}
        streamed = {c.id for c in self.beside_device if c.is_update_streamed}
        self._update_s = self._alone_s = self._slowed(self._stream_slowdown(hardware), streamed)
        self.nvme_s = sum(sum(costs[c.id].nvme_s) for c in self.beside_device)
        """The disk reads and writes for them."""
        self.write_back_s = sum(costs[c.id].write_back_s for c in self.trained)
        """The bus to the device brings their new values."""
        self.traffic_bytes = sum(costs[i].update_traffic_bytes for i in self.behind)
        """Read and written in host memory beside forward and backward."""
        self._landed_s: dict[int, float] = {}  # when a chunk's gradients were where its update reads them

    @property
    def adam_s(self) -> float:
        """All of a step, wherever they run."""
        return sum(self._update_s.values())

    @property
    def host_s(self) -> float:
        """Of the host's own arithmetic, one update after the other."""
        return self._kinds_s(self.beside_device)[0]

    def share_memory(self, copied_bytes_per_s: float, host_bytes_per_s: float) -> None:
        """From now on updates beside forward and backward take as much longer as they and the copies over the bus
        together need more bytes a second than the host's memory has.

        Args:
            copied_bytes_per_s: Of copies beside them, but for gradients, which count as traffic of the updates.
            host_bytes_per_s: What the memory gives; more, if updates alone were measured to take more.
        """
        self._update_s = self._alone_s
        alone_s = max(self._kinds_s(self.behind.values()))
        if alone_s:
            asked = self.traffic_bytes / alone_s
            factor = max(1.0, (asked + copied_bytes_per_s) / max(host_bytes_per_s, asked))
            self._update_s = self._slowed(factor, self.behind)

    def _slowed(self, factor: float, ids: Collection[int]) -> dict[int, float]:
        """Seconds of each update, where those of some chunks take so many times as long."""
        return {i: seconds * (factor if i in ids else 1.0) for i, seconds in self._update_s.items()}

    @property
    def is_overlapped(self) -> bool:
        """Whether any updates run beside forward."""
        return bool(self.behind)

    def land(self, chunk: ChunkSpec, in_host_memory_s: float, stored_s: float) -> None:
        """A chunk's gradients have come down: to the host's memory, and to where they stay."""
        if chunk.id in self._early:
            self._clocks.backlog.add(self._work(chunk), in_host_memory_s, is_before_step=True)
        self._landed_s[chunk.id] = stored_s

    def run(self, begin_s: float) -> None:
        """The end of the step that began at `begin_s`; then the next forward may begin. What runs behind that is in the
        backlog, in the order of need; the others' updates come first."""
        clocks, backlog = self._clocks, self._clocks.backlog
        now_s = clocks.now_s
        clocks.record.begin_update(now_s)
        for chunk in self.behind.values():
            if chunk.id not in self._early:
                backlog.add(self._work(chunk), max(now_s, self._landed_s.get(chunk.id, 0.0)))
        if self.behind:
            backlog.step(now_s)
        self._finish()
        if self._plan.world_size > 1:  # replicas that all keep are gathered at once, by hosts that wait for them
            for chunk in self.behind.values():
                if chunk.is_persistent and chunk.id in backlog:
                    clocks.wait(backlog.done_s(chunk.id, clocks.now_s), f"wait for the update of chunk {chunk.id}")
        clocks.forget(begin_s)

    def _work(self, chunk: ChunkSpec) -> Work:
        costs = self._costs[chunk.id]
        return Work(
            chunk.id,
            self._update_s[chunk.id],
            costs.write_back_s,
            *costs.stream_s,
            *costs.nvme_s,
            known_s=self._clocks.now_s,
            place=self._needed.get(chunk.id, len(self._needed)),
        )

    def _update_on_device(self) -> None:
        for chunk in self.trained:
            if chunk.optim_tier is Tier.GPU:
                self._clocks.compute(self._update_s[chunk.id], f"update {chunk.id}")

    def _finish(self) -> None:
        """Updates of the step: on the device, streamed ones and those of the host run side by side, each kind in turn;
        the last two share the host's memory, and slow each other down."""
        clocks, record, backlog = self._clocks, self._clocks.record, self._clocks.backlog
        begin_s = last_s = clocks.now_s
        beside = [c for c in self.beside_device if c.id not in self.behind]
        streamed: list[tuple[float, str]] = []
        written: list[tuple[float, float, str]] = []  # when the host has made the new values, seconds of the bus
        for chunk in beside:
            seconds, label = self._update_s[chunk.id], f"update {chunk.id}"
            if chunk.is_update_streamed:
                streamed.append((seconds, label))
                continue
            work = self._work(chunk)
            if work.is_on_disk:
                backlog.add(work, max(begin_s, self._landed_s.get(chunk.id, 0.0)))
                continue
            start_s, last_s = backlog.cpu.reserve(last_s, seconds)
            record.span("cpu", start_s, last_s, label)
            if work.write_back_s:
                written.append((last_s, work.write_back_s, f"write back {chunk.id}"))
        self._update_on_device()
        clocks.now_s = max(clocks.now_s, last_s, self._share_bus(begin_s, streamed, written))
        for chunk in beside:
            if chunk.id in backlog:
                clocks.now_s = max(clocks.now_s, backlog.done_s(chunk.id, begin_s))

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
            self._clocks.record.span("h2d", now_s, now_s + seconds, label)
            now_s += seconds
        return now_s

    def _stream_slowdown(self, hardware: HardwareSpec) -> float:
        """How much longer streamed updates take beside the host's own."""
        host_s, streamed_s = self._kinds_s(self.beside_device)
        if not host_s or not streamed_s:
            return 1.0
        host_numel, streamed_numel = (
            sum(c.numel // self._plan.num_sharing(c) for c in self.beside_device if c.is_update_streamed is kind)
            for kind in (False, True)
        )
        beside = hardware.streamed_beside(host_numel / host_s)
        done = min(streamed_numel, beside * host_s)
        return (done / beside + (streamed_numel - done) * streamed_s / streamed_numel) / streamed_s

    def _kinds_s(self, chunks: Collection[ChunkSpec]) -> list[float]:
        """All updates of these by the host, and all streamed ones, one after the other."""
        seconds = self._update_s
        return [sum(seconds[c.id] for c in chunks if c.is_update_streamed is kind) for kind in (False, True)]

"""What people look at of a simulated step: what kept which lane busy, and the device's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_elixir.plan.memory import Scheme, memory_use
from lightning_elixir.plan.simulator.spans import MemoryPoint, Span
from lightning_elixir.plan.types import ChunkSpec, Plan, Tier


class StepRecord:
    """Told of what happens in a step; keeps nothing."""

    is_detailed = False
    """Whether anything is kept."""

    def begin_step(self) -> None:
        pass

    def begin_micro_batch(self) -> None:
        pass

    def access(self, used_blocks: int) -> None:
        """So many blocks of the rCache are in use from now on."""

    def gradient(self, chunk: ChunkSpec) -> None:
        """A chunk has got gradients, its first ones or more."""

    def begin_update(self, at_s: float) -> None:
        """Activations are gone; gradients go with the update."""

    def span(self, lane: str, start_s: float, end_s: float, label: str) -> None:
        """Something keeps a lane busy."""

    def remember(self, at_s: float, non_model_bytes: int) -> None:
        """The device's memory from a moment on."""

    def spans(self, begin_s: float, end_s: float) -> tuple[Span, ...]:
        """Those of a step, and what it was left by the one before, counted from its beginning."""
        return ()

    def memory(self, begin_s: float) -> tuple[MemoryPoint, ...]:
        """Of the step under way, counted from its beginning."""
        return ()


class DetailedRecord(StepRecord):
    """Spans and memory.

    Args:
        plan: What is simulated.
        scheme: What training does to its chunks.
        arrivals: Of the step, as in `Course`.
    """

    is_detailed = True

    def __init__(self, plan: Plan, scheme: Scheme, arrivals: Sequence[int]) -> None:
        use = memory_use(plan.chunks, plan.rcache_blocks, scheme)
        self._scheme = scheme
        self._block_bytes = plan.block_bytes
        lasting_bytes = scheme.lasting_stream_bytes(plan.chunks)
        self._stream_bytes = scheme.stream_bytes(plan.chunks) - lasting_bytes  # of the update alone
        self._resident_bytes = use.gpu_param_bytes + use.gpu_state_bytes
        self._grad_block_bytes = scheme.grad_block_bytes(plan.chunks, arrivals) + lasting_bytes
        on_device = [c for c in plan.chunks if c.requires_grad and c.optim_tier is Tier.GPU]
        self._start_grad_bytes = sum(map(scheme.earlier_grad_bytes, on_device))
        self._grad_bytes = 0
        self._begun: set[int] = set()
        self._used_blocks = 0
        self._spans: list[Span] = []
        self._memory: list[MemoryPoint] = []
        self._first_point = 0

    def begin_step(self) -> None:
        self._first_point = len(self._memory)

    def begin_micro_batch(self) -> None:
        self._grad_bytes, self._used_blocks = self._start_grad_bytes, 0
        self._begun.clear()

    def access(self, used_blocks: int) -> None:
        self._used_blocks = used_blocks

    def gradient(self, chunk: ChunkSpec) -> None:
        if chunk.optim_tier is Tier.GPU and chunk.id not in self._begun:
            self._begun.add(chunk.id)
            self._grad_bytes += self._scheme.grad_shard_bytes(chunk) - self._scheme.earlier_grad_bytes(chunk)

    def begin_update(self, at_s: float) -> None:
        self._remember(at_s, 0, self._stream_bytes)
        self._grad_bytes = self._start_grad_bytes

    def span(self, lane: str, start_s: float, end_s: float, label: str) -> None:
        if end_s > start_s:
            self._spans.append(Span(lane, start_s, end_s, label))

    def remember(self, at_s: float, non_model_bytes: int) -> None:
        self._remember(at_s, non_model_bytes, 0)

    def _remember(self, at_s: float, non_model_bytes: int, stream_bytes: int) -> None:
        rcache_bytes = self._used_blocks * self._block_bytes
        grad_bytes = self._grad_block_bytes + self._grad_bytes + stream_bytes
        self._memory.append(MemoryPoint(at_s, self._resident_bytes, rcache_bytes, grad_bytes, non_model_bytes))

    def spans(self, begin_s: float, end_s: float) -> tuple[Span, ...]:
        return tuple(
            Span(s.lane, max(0.0, s.start_s - begin_s), min(s.end_s, end_s) - begin_s, s.label)
            for s in self._spans
            if s.start_s < end_s and s.end_s > begin_s
        )

    def memory(self, begin_s: float) -> tuple[MemoryPoint, ...]:
        return tuple(replace(p, at_s=p.at_s - begin_s) for p in self._memory[self._first_point :])

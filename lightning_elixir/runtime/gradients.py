"""Gradients as users see them: `p.grad` between backward and step.

[Note: visible gradients] Gradients lie in shards. A read of `p.grad` gives the whole gradient of that parameter, in
its dtype on the compute device, made for the read; with several ranks all of them read, and each gives its slice.
What is handed out stays the same tensor for as long as it is referred to. What was written to it counts: before the
gradients are used, this rank's slice is compared with its shard, bit by bit in the parameter's dtype, and the elements
that differ are taken over. The others keep the bits that this dtype does not have.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_elixir.errors import DivergenceError, StateError
from lightning_elixir.plan.shard_segments import Segment, segment_of
from lightning_elixir.runtime.agreement import Meeting
from lightning_elixir.runtime.chunk import Chunk, storage_use_count
from lightning_elixir.runtime.whole import in_memory_order
from lightning_elixir.runtime.written import BITS

if TYPE_CHECKING:
    from lightning_elixir.runtime.engine import Engine

Change = Callable[[Tensor], None]
"""Changes a gradient in place, element by element."""


class Gradients:
    """What was handed out as `p.grad` of one engine's parameters, or set.

    Args:
        engine: Has the shards, and knows the optimizers, which may have changed what is to be seen.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seen: dict[tuple[int, int], Tensor] = {}
        """By (chunk id, member index): in the parameter's shape, dtype and memory order."""
        self._most_seen = 1
        """So many of them, and those that nobody refers to any more are dropped."""
        self._unheld = _holders({(0, 0): torch.empty(1)}, (0, 0))

    def read(self, chunk: Chunk, index: int) -> Tensor | None:
        """`p.grad`: the whole gradient; None: there is none. Collective, unless this rank knows that there is none.

        Raises:
            StateError: The chunk's update has begun inside backward.
            DivergenceError: Another rank reads another gradient.
        """
        engine, key = self._engine, (chunk.id, index)
        if not chunk.spec.requires_grad or (engine.store[chunk.id].grad is None and key not in self._seen):
            return None
        self._check_not_begun(chunk, index)
        is_seen = key in self._seen
        with engine.meeting(Meeting.GRADIENTS, [*key, is_seen or key in engine.reducer.used, is_seen]) as rows:
            return self._met(chunk, index, rows)

    def _met(self, chunk: Chunk, index: int, rows: Sequence[Sequence[int]]) -> Tensor | None:
        """Args:
        rows: Of every rank the key, whether it has a gradient, and whether it has handed it out.
        """
        engine, key = self._engine, (chunk.id, index)
        if any(tuple(row[:2]) != key for row in rows):
            names = [engine.chunks[row[0]].spec.members[row[1]].fqn for row in rows]
            where = ", ".join(f"rank {rank}: {name}" for rank, name in enumerate(names))
            raise DivergenceError(
                f"the ranks read the gradients of different parameters ({where}): read `.grad` on every rank, in the "
                "same order"
            )
        if not any(row[2] for row in rows):
            return None
        engine.reducer.carry_out_drops()
        if not all(row[3] for row in rows):
            if len(self._seen) >= self._most_seen:
                for unheld in self._unheld_keys():
                    self._absorb(*unheld)
                    del self._seen[unheld]
                self._most_seen = 2 * len(self._seen) + 1  # or each of many reads would look at all of them
            if key in self._seen:
                self._absorb(*key)
            whole = self._gather(chunk, index)
            self._seen.setdefault(key, whole)
        return self._seen[key]

    def write(self, chunk: Chunk, index: int, value: Tensor) -> None:
        """`p.grad = value`, which torch has found to fit. The same call on every rank.

        Raises:
            StateError: In the middle of forward or backward, or the chunk's update has begun.
        """
        engine = self._engine
        name = chunk.spec.members[index].fqn
        if engine.is_computing:
            raise StateError(f"the gradient of {name} cannot be set inside {engine.phase.value}: set it after backward")
        if not chunk.spec.requires_grad:
            raise StateError(f"{name} was frozen when the model was set up: it has no place for a gradient")
        if value.layout is not torch.strided:
            raise StateError(f"the gradient of {name} cannot be {value.layout}: set a dense one (value.to_dense())")
        self._check_not_begun(chunk, index)
        self._seen[chunk.id, index] = value

    def forget(self, chunk: Chunk, index: int) -> None:
        """The gradient is dropped."""
        self._seen.pop((chunk.id, index), None)

    def forget_all(self) -> None:
        """All gradients are dropped, or will be others."""
        self._seen.clear()

    @torch.no_grad()
    def absorb(self) -> None:
        """Bring what users have written or dropped to the gradient shards."""
        self._engine.reducer.carry_out_drops()
        for key in list(self._seen):
            self._absorb(*key)

    @torch.no_grad()
    def follow(self, change: Change, is_of: Callable[[int, int], bool]) -> None:
        """Gradients are changed in the step from now on: what users hold shows it. To be called after `absorb`.

        Args:
            is_of: Whether the change is of the gradient of a member, by chunk id and index.
        """
        self._let_go()
        for key, value in self._seen.items():
            if is_of(*key):
                change(value)

    def _check_not_begun(self, chunk: Chunk, index: int) -> None:
        if self._engine.reducer.has_begun(chunk.id):
            raise StateError(
                f"the gradient of {chunk.spec.members[index].fqn} is gone: its update has begun inside backward, where "
                "nothing was known that looks at gradients. Look at them in on_after_backward or "
                "on_before_optimizer_step, for which updates wait, or use update_timing='behind_forward'"
            )

    def _segment(self, chunk: Chunk, index: int, rank: int) -> Segment | None:
        return segment_of(chunk.spec, index, rank, self._engine.comm.world_size)

    def _shown(self, chunk: Chunk, index: int, part: Tensor) -> Tensor:
        """Part of a gradient shard as users see it; 1-D, compute dtype, perhaps `part` itself."""
        change = self._engine.steps.change_of_gradient(chunk.id, index)
        if change is None:
            return part.to(chunk.dtype)
        wide = part.to(torch.promote_types(torch.float32, part.dtype), copy=True)  # factors apply before rounding
        change(wide)
        return wide.to(chunk.dtype)

    @torch.no_grad()
    def _gather(self, chunk: Chunk, index: int) -> Tensor:
        """The whole gradient. Collective."""
        engine = self._engine
        member, stride = chunk.spec.members[index], chunk.strides[index]
        device = engine.device.torch_device
        with engine.telling():
            engine.reducer.wait_for_download(chunk.id)
            grad = engine.store[chunk.id].read_grad()
        if stride is None:
            whole = torch.empty(member.shape, dtype=chunk.dtype, device=device)
        else:
            whole = torch.empty_strided(member.shape, stride, dtype=chunk.dtype, device=device)
        flat = whole.as_strided((member.numel,), (1,))
        of_ranks = [self._segment(chunk, index, rank) for rank in range(engine.comm.world_size)]
        own = of_ranks[engine.comm.rank]
        if engine.comm.world_size == 1:
            if own is not None and grad is not None:
                flat.copy_(self._shown(chunk, index, grad[own.in_shard]))
            return whole
        sent = torch.zeros(max(s.numel if s is not None else 0 for s in of_ranks), dtype=chunk.dtype)
        if own is not None and grad is not None:
            sent[: own.numel].copy_(self._shown(chunk, index, grad[own.in_shard]))
        for segment, row in zip(of_ranks, engine.comm.gather_host(sent, on_all_ranks=True) or (), strict=True):
            if segment is not None:
                flat[segment.in_param].copy_(row[: segment.numel])
        return whole

    def _absorb(self, chunk_id: int, index: int) -> None:
        engine, chunk = self._engine, self._engine.chunks[chunk_id]
        value, store = self._seen[chunk_id, index], self._engine.store
        engine.reducer.wait_for_download(chunk_id)
        grad = store[chunk_id].read_grad()
        flat = in_memory_order(chunk, index, value)
        is_new = (chunk_id, index) not in engine.reducer.used and grad is None
        own = self._segment(chunk, index, engine.comm.rank)
        values = flat[own.in_param] if own is not None else flat[:0]
        changed = torch.ones_like(values, dtype=torch.bool)
        if own is not None and grad is not None:
            values = values.to(grad.device)
            bits = BITS[values.dtype.itemsize]
            changed = values.view(bits) != self._shown(chunk, index, grad[own.in_shard]).view(bits)
        is_written = bool(changed.any())
        if is_written or is_new:
            if is_written and engine.steps.change_of_gradient(chunk_id, index) is not None:
                engine.steps.apply_gradient_changes(chunk_id, index)

            def write(shard: Tensor) -> None:
                if own is not None:
                    part = shard[own.in_shard]
                    part.copy_(torch.where(changed.to(part.device), values.to(part), part))

            engine.reducer.rewrite(chunk, write)
        engine.reducer.used.add((chunk_id, index))

    def _let_go(self) -> None:
        """Drop what is referred to from nowhere else any more; it has been absorbed."""
        for key in self._unheld_keys():
            del self._seen[key]

    def _unheld_keys(self) -> list[tuple[int, int]]:
        return [key for key in self._seen if _holders(self._seen, key) == self._unheld]


def _holders(seen: dict[tuple[int, int], Tensor], key: tuple[int, int]) -> tuple[int, int]:
    """How often a tensor is referred to, and how many tensors and handles share its storage; with our own."""
    return sys.getrefcount(seen[key]), storage_use_count(seen[key].untyped_storage())

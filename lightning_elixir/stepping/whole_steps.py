"""Steps of optimizers whose update looks at whole parameters.

Chunks are laid out before the optimizer is known, and a shard's border may cut a parameter. So
each parameter has one rank that owns it (`plan/owners.py`): there its states are, whole, and there it is updated, on
the compute device, by the optimizer's own code. What lies in one shard is updated where it is. Of a parameter that is
cut the other ranks send their slices of value and gradient to the owner, and get new values back: two exchanges for a
chunk, of fp32, or of the compute dtype where there is no master. States in host memory pass through the device in the
step (`stepping/whole_stream.py`): forward and backward have none of that memory then. Chunks with states on the host
and on the device take turns, so that the transfers of these hide behind the updates of those.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_elixir.optim.execution import UpdateRecord, UpdateRunner
from lightning_elixir.optim.gradient_change import GradientChange
from lightning_elixir.optim.whole_parameters import WholeParameters
from lightning_elixir.plan.owners import num_slots
from lightning_elixir.plan.shard_segments import Segment, segment_of
from lightning_elixir.plan.types import Tier
from lightning_elixir.runtime.chunk import Chunk
from lightning_elixir.runtime.chunk_optimizers import ChunkOptimizers
from lightning_elixir.runtime.engine import Engine
from lightning_elixir.stepping.targets import target_of
from lightning_elixir.stepping.torch_steps import TorchSteps
from lightning_elixir.stepping.whole_stream import HostUpdate, WholeStream

_T = TypeVar("_T")


@dataclass(frozen=True)
class _Cut:
    """A parameter of which several ranks have a part."""

    index: int
    owner: int
    of_ranks: tuple[Segment | None, ...]


@dataclass(frozen=True)
class _Shard:
    """What the update of a chunk works with, beside its states."""

    grad: Tensor
    target: Tensor | None
    """Where new values go in the compute dtype; None: there is no master."""
    change: GradientChange


class WholeSteps(TorchSteps):
    """Runs updates over whole parameters; as `TorchSteps`, within the step."""

    def __init__(self, engine: Engine, states: ChunkOptimizers, runner: UpdateRunner) -> None:
        super().__init__(engine, states, runner)
        self._stream = WholeStream(engine.device)
        self._awaited: dict[int, set[int]] = {}  # members that go through it in this step, by chunk id

    def allocate(self) -> None:
        """Nothing: states are made by the first step."""

    def run(self, chunks: Sequence[Chunk], used: Mapping[int, set[int]], change: GradientChange) -> UpdateRecord:
        on_host = [chunk for chunk in chunks if self._is_streamed(chunk)]
        near = [chunk for chunk in chunks if not self._is_streamed(chunk)]
        self._awaited = {chunk.id: used[chunk.id] for chunk in on_host}
        try:
            return super().run(taking_turns(on_host, near), used, change)
        finally:
            self._stream.close()

    def _finish(self) -> None:
        self._stream.finish()

    def _is_streamed(self, chunk: Chunk) -> bool:
        return chunk.spec.optim_tier is Tier.CPU and not self._engine.device.is_synchronous

    def _update_chunk(
        self, chunk: Chunk, members: set[int], grad: Tensor, target: Tensor | None, change: GradientChange
    ) -> None:
        inner, rank = self._inner(chunk), self._engine.groups.copy.rank
        shard = _Shard(grad, target, change)
        cuts: list[_Cut] = []
        for index in sorted(members):
            of_ranks = self._of_ranks(chunk, index)
            own = of_ranks[rank]
            if _is_cut(of_ranks):
                cuts.append(_Cut(index, self._states.owners[chunk.id, index], of_ranks))
            elif own is not None and self._is_streamed(chunk):
                if not self._stream.is_open:
                    slot_bytes = self._slot_bytes()
                    self._stream.open(slot_bytes, self._num_slots(slot_bytes))
                self._stream.issue(self._host_update(chunk, inner, index, own, shard))
            elif own is not None:
                value = inner.work[own.in_shard].to(self._engine.device.torch_device, non_blocking=True)
                ready = self._near_grad(grad[own.in_shard], inner.work.dtype, change)
                inner.update(index, self._states.group_of(chunk, index), value, ready)
                _store(value, own, inner.work, target)
        if cuts:
            self._update_cut(chunk, inner, cuts, shard)

    def _inner(self, chunk: Chunk) -> WholeParameters:
        inner = self._states.inner[chunk.id]
        if not isinstance(inner, WholeParameters):
            raise TypeError("whole parameters are updated by WholeParameters")
        return inner

    def _of_ranks(self, chunk: Chunk, index: int) -> tuple[Segment | None, ...]:
        size = self._engine.groups.copy.world_size
        return tuple(segment_of(chunk.spec, index, rank, size) for rank in range(size))

    def _host_update(self, chunk: Chunk, inner: WholeParameters, index: int, own: Segment, shard: _Shard) -> HostUpdate:
        group = self._states.group_of(chunk, index)

        def step(value: Tensor, grad: Tensor, states: dict[str, Any]) -> dict[str, Any]:
            return inner.stepped(index, group, value, self._near_grad(grad, value.dtype, shard.change), states)

        return HostUpdate(
            value=inner.work[own.in_shard],
            grad=shard.grad[own.in_shard],
            target=None if shard.target is None else shard.target[own.in_shard],
            states=inner.states_of(index),
            step=step,
            keep=partial(inner.keep, index, is_copied=True),
        )

    def _slot_bytes(self) -> int:
        """The most of any parameter that goes through the stream in this step."""
        most, rank = 0, self._engine.groups.copy.rank
        for chunk_id, members in self._awaited.items():
            chunk, grad = self._engine.chunks[chunk_id], self._engine.store[chunk_id].grad
            if grad is None:
                continue
            shard = _Shard(grad, target_of(self._engine, chunk), GradientChange())
            for index in members:
                of_ranks = self._of_ranks(chunk, index)
                own = of_ranks[rank]
                if own is not None and not _is_cut(of_ranks):
                    most = max(most, self._host_update(chunk, self._inner(chunk), index, own, shard).slot_bytes)
        return most

    def _num_slots(self, slot_bytes: int) -> int:
        """As plans count them: by the largest parameter that the optimizer has."""
        chunks = self._engine.chunks
        most = max(chunks[i].spec.members[k].numel for i, members in self._states.members.items() for k in members)
        return num_slots(most, slot_bytes)

    def _near_grad(self, grad: Tensor, dtype: torch.dtype, change: GradientChange) -> Tensor:
        """A gradient as the optimizer takes it, on the compute device."""
        near = grad.to(self._engine.device.torch_device, non_blocking=True)
        if not change.is_nothing and near.dtype.itemsize < 4:
            near = near.float()  # factors apply before rounding
        return change.applied(near).to(dtype)

    def _update_cut(self, chunk: Chunk, inner: WholeParameters, cuts: Sequence[_Cut], shard: _Shard) -> None:
        """Those of which several ranks have a part. Collective."""
        comm, dtype, device = self._engine.groups.copy, inner.work.dtype, self._engine.device.torch_device
        mine = [cut for cut in cuts if cut.owner == comm.rank]
        theirs = [cut for cut in cuts if cut.owner != comm.rank and cut.of_ranks[comm.rank] is not None]
        sent: list[list[Tensor]] = [[] for _ in range(comm.world_size)]
        for cut in theirs:
            own = _own(cut, comm.rank)
            value = inner.work[own.in_shard].to(device, non_blocking=True)
            sent[cut.owner] += [value, self._near_grad(shard.grad[own.in_shard], dtype, shard.change)]
        others = [
            [(cut, segment) for cut in mine if (segment := cut.of_ranks[rank]) is not None and rank != comm.rank]
            for rank in range(comm.world_size)
        ]
        numels = [sum(2 * segment.numel for _, segment in of_rank) for of_rank in others]
        rows = self._exchange(sent, numels, dtype, device)
        values = {
            cut.index: torch.empty(chunk.spec.members[cut.index].numel, dtype=dtype, device=device) for cut in mine
        }
        grads = {index: torch.empty_like(value) for index, value in values.items()}
        for row, of_rank in zip(rows, others, strict=True):
            start = 0
            for cut, segment in of_rank:
                values[cut.index][segment.in_param].copy_(row[start : start + segment.numel])
                grads[cut.index][segment.in_param].copy_(row[start + segment.numel : start + 2 * segment.numel])
                start += 2 * segment.numel
        for cut in mine:
            own_part = cut.of_ranks[comm.rank]
            if own_part is not None:
                values[cut.index][own_part.in_param].copy_(inner.work[own_part.in_shard], non_blocking=True)
                ready = self._near_grad(shard.grad[own_part.in_shard], dtype, shard.change)
                grads[cut.index][own_part.in_param].copy_(ready)
            inner.update(cut.index, self._states.group_of(chunk, cut.index), values[cut.index], grads[cut.index])
            if own_part is not None:
                _store(values[cut.index][own_part.in_param], own_part, inner.work, shard.target)
        back = [[values[cut.index][segment.in_param] for cut, segment in of_rank] for of_rank in others]
        numels = [sum(_own(c, comm.rank).numel for c in theirs if c.owner == rank) for rank in range(comm.world_size)]
        for rank, row in enumerate(self._exchange(back, numels, dtype, device)):
            start = 0
            for cut in theirs:
                if cut.owner == rank:
                    own = _own(cut, comm.rank)
                    _store(row[start : start + own.numel], own, inner.work, shard.target)
                    start += own.numel

    def _exchange(
        self, sent: Sequence[Sequence[Tensor]], numels: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> list[Tensor]:
        """Send each rank its tensors. Collective.

        Args:
            sent: To each rank, 1-D.
            numels: How many elements each rank sends here.

        Returns:
            1-D, from each rank.
        """
        parts = [part for of_rank in sent for part in of_rank]
        flat = torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=device)
        received = self._engine.groups.copy.all_to_all(
            flat, [sum(p.numel() for p in of_rank) for of_rank in sent], numels
        )
        return list(received.split(list(numels)))


def taking_turns(first: Sequence[_T], second: Sequence[_T]) -> list[_T]:
    """Both, each in its order, spread over all, with the second's first at the begin and its last at the end, so that
    the first's way to the device and back hides behind these: the same on every rank where the two are."""
    places = [((number + 0.5) / len(first), one) for number, one in enumerate(first)]
    places += [(number / max(1, len(second) - 1), one) for number, one in enumerate(second)]
    return [one for _, one in sorted(places, key=lambda place: place[0])]


def _is_cut(of_ranks: Iterable[Segment | None]) -> bool:
    """Whether several ranks have a part."""
    return sum(segment is not None for segment in of_ranks) > 1


def _own(cut: _Cut, rank: int) -> Segment:
    own = cut.of_ranks[rank]
    if own is None:
        raise RuntimeError("a rank sends a slice that it has not got")
    return own


def _store(value: Tensor, segment: Segment, work: Tensor, target: Tensor | None) -> None:
    """Bring new values of a segment from the device to where they live.

    Args:
        value: 1-D, on the compute device; perhaps the segment of `work` itself.
        work: This rank's master, or its parameters where there is none.
        target: Its parameters, where there is a master.
    """
    home = work[segment.in_shard]
    if home.data_ptr() != value.data_ptr():
        home.copy_(value, non_blocking=True)
    if target is not None:
        target[segment.in_shard].copy_(value.to(target.dtype), non_blocking=True)

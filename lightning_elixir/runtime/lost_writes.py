"""Writes to parameters in forward that would be lost.

[Note: lost writes] In forward a parameter is a view of its chunk's replica. Writes in place show in autograd's version
counters, and raise; one through `p.data` does not: that has a counter of its own. Where other memory holds the values
(shards, fp32 masters), it is lost with the replica, or at the next update. What may have been written is known from two
sources: each `p.data` that an intercepted parameter gives leaves its version counter here; and a dry run has seen what
the step writes to, also where nothing is intercepted (in the forward of a parameter's own module). Their chunks are
compared with what holds their values when they go, and at the end of the forward: values that were put back, or have
not changed, are none the worse for it. In backward there may be newer values to compare with, so every write counts,
but for those of a recomputation that have changed nothing in its forward (Gemma 3n limits weights in each forward).
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_elixir.core.shells import is_shell
from lightning_elixir.runtime.chunk import Chunk
from lightning_elixir.runtime.phases import Phase
from lightning_elixir.runtime.unreadable import set_data
from lightning_elixir.runtime.written import has_bits_of

if TYPE_CHECKING:
    from lightning_elixir.runtime.engine import Engine


@dataclass(frozen=True)
class _Data:
    """A `p.data` that was given."""

    name: str
    """Of the parameter."""
    version: Tensor
    """Empty, with the version counter that all views of it share."""
    reference: weakref.ref[Tensor]

    @property
    def is_written(self) -> bool:
        return self.version._version > 0


def version_counter_of(data: Tensor) -> Tensor:
    """A tensor without bytes that has the version counter of a `p.data`: 0 for each that is given, and of its views."""
    version = data.detach()
    set_data([version], [torch.empty(0, dtype=data.dtype, device=data.device)])
    return version


class LostWrites:
    """What may be written past version counters, and what was.

    Args:
        engine: Has the chunks, and what holds their values.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._suspects: dict[int, set[str]] = {}  # parameters by chunk id
        self._unchanged: set[str] = set()  # parameters to which a forward wrote the values that they had
        self._lost: dict[str, None] = {}  # parameters; `found` empties it
        self._data: dict[int, list[_Data]] = {}  # by chunk id

    def suspect(self, names: Collection[str]) -> None:
        """The step was seen to write to these parameters."""
        chunks = self._engine.chunks if names else ()
        found = {c.id: {m.fqn for m in c.spec.members}.intersection(names) for c in chunks}
        self._suspects = {chunk_id: suspected for chunk_id, suspected in found.items() if suspected}

    def watch(self, name: str, chunk: Chunk, data: object) -> None:
        """A parameter of the chunk was asked for its `.data`."""
        if not isinstance(data, Tensor) or is_shell(data) or not self._can_lose(chunk):
            return
        self._data.setdefault(chunk.id, []).append(_Data(name, version_counter_of(data), weakref.ref(data)))

    def leaves(self, chunk: Chunk) -> None:
        """The chunk's replica is about to go."""
        if not (self._suspects or self._data):  # as mostly
            return
        if self._engine.phase is Phase.FORWARD and self._may_be_written(chunk.id):
            self._look(chunk)

    def found(self, *, is_after_forward: bool) -> list[str]:
        """Parameters of which a write was lost, or will be; each is returned once.

        Args:
            is_after_forward: And before backward, in which updates begin: values may be newer than the replica's then.
        """
        for chunk_id in {*self._suspects, *self._data}:
            chunk = self._engine.chunks[chunk_id]
            if is_after_forward and chunk.is_usable and self._may_be_written(chunk_id):
                self._look(chunk)
            elif not is_after_forward:
                self._lost.update(dict.fromkeys(n for n in self._written(chunk_id) if n not in self._unchanged))
        kept = {i: [one for one in data if one.reference() is not None] for i, data in self._data.items()}
        self._data = {i: data for i, data in kept.items() if data}
        found = list(self._lost)
        self._lost.clear()
        return found

    def forget(self) -> None:
        """Nothing that was taken before matters any more."""
        self._data.clear()
        self._unchanged.clear()

    def _can_lose(self, chunk: Chunk) -> bool:
        """Whether other memory than the replica holds the values."""
        shard = self._engine.store[chunk.id]
        return shard.param is not None or shard.is_param_on_disk or shard.has_master

    def _may_be_written(self, chunk_id: int) -> bool:
        return chunk_id in self._suspects or bool(self._written(chunk_id))

    def _written(self, chunk_id: int) -> list[str]:
        """Parameters that were written through a `p.data`."""
        return [one.name for one in self._data.get(chunk_id, ()) if one.is_written]

    def _look(self, chunk: Chunk) -> None:
        engine = self._engine
        if not self._can_lose(chunk):
            return
        shard = engine.store.settle(chunk.id)
        with torch.no_grad():
            mine, held = engine.groups.mine(chunk.spec, chunk.flat), shard.read_param()
            if held is None:
                master = shard.read_master()
                held = None if master is None else master.to(chunk.dtype)
            if held is not None and held.numel() != mine.numel():  # the whole chunk, of which others' slices may be old
                held = engine.groups.mine(chunk.spec, held)
            if held is None:
                return
            changed = set[str]()
            if not has_bits_of(mine, held):
                for segment in engine.groups.segments(chunk.spec):  # without padding, which holds anything
                    at = slice(segment.shard_offset, segment.shard_offset + segment.numel)
                    if not has_bits_of(mine[at], held[at]):
                        changed.add(chunk.spec.members[segment.member_index].fqn)
        self._unchanged.update(self._written(chunk.id), self._suspects.get(chunk.id, ()))
        self._unchanged -= changed
        self._lost.update(dict.fromkeys(changed))

"""Averages of the parameters that train: one more fp32 tensor beside each shard, where its states are.

They are made from what the optimizer updates (the master, where there is one), shard by shard, so that no parameter is
ever whole on the compute device for that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_elixir.plan.shard_segments import Segment
from lightning_elixir.plan.types import Tier
from lightning_elixir.runtime.agreement import Meeting
from lightning_elixir.runtime.chunk import Chunk
from lightning_elixir.runtime.whole import gather_whole, in_memory_order, own_shard_writer, saved_dtype

if TYPE_CHECKING:
    from lightning_elixir.runtime.engine import Engine

Average = Callable[[Tensor, Tensor, int | Tensor], Tensor]
"""(average, current values, number of earlier updates) -> new average, element by element: what
`torch.optim.swa_utils.AveragedModel` takes as `avg_fn`."""


class Averages:
    """Averages of one engine's parameters, which begin as what the parameters are now.

    Args:
        engine: Whose parameters.
        average: How they are made; after the first update they are the parameters of that time.
    """

    def __init__(self, engine: Engine, average: Average) -> None:
        self._engine = engine
        self._average = average
        self._held: dict[int, tuple[Tier, Tensor]] = {}  # by chunk id; 1-D, fp32 at least, [numel of the shard]
        self._aside: dict[int, Tensor] = {}  # parameters in whose place these are, where their memory did not change
        engine.on_held_bytes(self.held_bytes)
        engine.on_move(self.follow)
        with engine.meeting(Meeting.STATE), torch.no_grad():
            for chunk in self._chunks:
                self._home(chunk).copy_(engine.own_shard(chunk))

    @property
    def _chunks(self) -> list[Chunk]:
        return [chunk for chunk in self._engine.chunks if chunk.spec.requires_grad]

    def held_bytes(self) -> dict[str, int]:
        """Bytes on this rank, by tier and kind."""
        held: dict[str, int] = {}
        for tier, tensor in [*self._held.values(), *((Tier.CPU, aside) for aside in self._aside.values())]:
            kind = "cpu_average" if tier is Tier.CPU else "gpu_average"
            held[kind] = held.get(kind, 0) + tensor.nbytes
        return held

    def _home(self, chunk: Chunk) -> Tensor:
        """The average of a shard."""
        if chunk.id not in self._held:
            values, tier = self._engine.own_shard(chunk), _tier_of(chunk)
            dtype = torch.promote_types(torch.float32, values.dtype)
            self._held[chunk.id] = tier, self._engine.store.zeros(values.numel(), dtype, tier)
        return self._held[chunk.id][1]

    def follow(self, chunk: Chunk) -> None:
        """Go where the plan in force has the chunk's states: what is left there is free when this returns."""
        earlier, tier = self._held.get(chunk.id), _tier_of(chunk)
        if earlier is not None and earlier[0] is not tier:
            home = self._engine.store.empty(earlier[1].numel(), earlier[1].dtype, tier)
            self._held[chunk.id] = tier, home.copy_(earlier[1])

    @torch.no_grad()
    def update(self, num_earlier: int) -> None:
        """Take the parameters as they are now into the averages. Collective.

        Args:
            num_earlier: How often that was done before; 0: they become the averages.
        """
        with self._engine.meeting(Meeting.STATE):
            for chunk in self._chunks:
                home = self._home(chunk)
                current = self._engine.own_shard(chunk).to(home)
                home.copy_(current if num_earlier == 0 else self._average(home, current, num_earlier))

    # In the place of the parameters

    @torch.no_grad()
    def swap(self) -> None:
        """Put the averages in the place of the parameters, or the parameters back. Collective.

        The two change places, so that no memory is taken; of 16-bit parameters without a master, whose dtype would
        round an average, copies are kept.
        """
        engine = self._engine
        with engine.meeting(Meeting.STATE):
            for chunk in self._chunks:
                home, own = self._home(chunk), engine.own_shard(chunk)
                if own.dtype == home.dtype:
                    current = own.to(home.device, copy=True)
                    self._write(chunk, home)
                    home.copy_(current)
                elif chunk.id in self._aside:
                    self._write(chunk, self._aside.pop(chunk.id))
                else:
                    self._aside[chunk.id] = own.to("cpu", copy=True)
                    self._write(chunk, home)

    def take_effect(self) -> None:
        """Make the averages the parameters, for good. Collective."""
        with self._engine.meeting(Meeting.STATE):
            for chunk in self._chunks:
                self._write(chunk, self._home(chunk))

    def _write(self, chunk: Chunk, values: Tensor) -> None:
        own_shard_writer(self._engine, chunk, values.to("cpu"))()

    # Whole ones

    def whole(self) -> dict[str, Tensor]:
        """By the names of parameters: whole averages (or, while these are in their place, parameters) in host memory,
        in the dtypes of saved parameters, on rank 0; `{}` on others. Collective."""
        engine = self._engine
        with engine.meeting(Meeting.STATE), engine.store.checkpoint_memory() or nullcontext() as memory:
            pieces = ((c, self.own(c)) for c in self._chunks)
            found = gather_whole(engine, pieces, on_all_ranks=False, memory=memory)
        dtypes = {m.fqn: saved_dtype(engine, c, i) for c in self._chunks for i, m in enumerate(c.spec.members)}
        return {name: value.to(dtypes[name]) for name, value in found.items()}

    def own(self, chunk: Chunk) -> Tensor:
        """This rank's averages of a chunk that trains, 1-D (or, while these are in the parameters' place, what was
        there). Not a copy."""
        return self._aside.get(chunk.id, self._home(chunk))

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor]) -> None:
        """Take averages from whole ones by name, on every rank; what is missing stays.

        Args:
            values: Any device and floating dtype.
        """

        def read(chunk: Chunk, segment: Segment, target: Tensor) -> None:
            if segment.fqn in values:
                part = self._engine.groups.part_of(chunk.spec.members[segment.member_index], values[segment.fqn])
                target.copy_(in_memory_order(chunk, segment.member_index, part)[segment.in_param])

        with self._engine.meeting(Meeting.STATE):
            self.fill(read)

    @torch.no_grad()
    def fill(self, read: Callable[[Chunk, Segment, Tensor], None]) -> None:
        """Have `read` fill this rank's averages, parameter by parameter; inside a meeting.

        Args:
            read: Gets a tensor in host memory, 1-D, `[segment.numel]`, with the average as it is.
        """
        for chunk in self._chunks:
            home = self._home(chunk)
            values = home.to("cpu")
            for segment in self._engine.groups.segments(chunk.spec):
                read(chunk, segment, values[segment.in_shard])
            if values is not home:
                home.copy_(values)


def _tier_of(chunk: Chunk) -> Tier:
    return Tier.GPU if chunk.spec.optim_tier is Tier.GPU else Tier.CPU

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

from lightning_elixir.plan.types import Tier
from lightning_elixir.runtime.agreement import Meeting
from lightning_elixir.runtime.chunk import Chunk
from lightning_elixir.runtime.whole import gather_whole, in_memory_order, own_shard_writer

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
        self._held: dict[int, Tensor] = {}  # by chunk id; 1-D, fp32 at least, [numel of the shard]
        self._aside: dict[int, Tensor] = {}  # parameters in whose place these are, where their memory did not change
        engine.on_held_bytes(self.held_bytes)
        with engine.meeting(Meeting.STATE), torch.no_grad():
            for chunk in self._chunks:
                self._home(chunk).copy_(engine.own_shard(chunk))

    @property
    def _chunks(self) -> list[Chunk]:
        return [chunk for chunk in self._engine.chunks if chunk.spec.requires_grad]

    def held_bytes(self) -> dict[str, int]:
        """Bytes on this rank, by tier and kind."""
        held: dict[str, int] = {}
        tensors = [*self._held.values(), *self._aside.values()]
        for tensor in tensors:
            kind = "cpu_average" if tensor.device.type == "cpu" else "gpu_average"
            held[kind] = held.get(kind, 0) + tensor.nbytes
        return held

    def _home(self, chunk: Chunk) -> Tensor:
        """The average of a shard, where the plan in force has its states."""
        engine, earlier = self._engine, self._held.get(chunk.id)
        values = engine.own_shard(chunk)
        tier = Tier.GPU if chunk.spec.optim_tier is Tier.GPU else Tier.CPU
        device = engine.device.torch_device if tier is Tier.GPU else torch.device("cpu")
        if earlier is not None and earlier.device.type == device.type:
            return earlier
        dtype = torch.promote_types(torch.float32, values.dtype)
        home = engine.store.zeros(values.numel(), dtype, tier)
        if earlier is not None:
            home.copy_(earlier)
        self._held[chunk.id] = home
        return home

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
        in the dtypes of the model's own parameters, on rank 0; `{}` on others. Collective."""
        engine = self._engine
        with engine.meeting(Meeting.STATE), engine.store.checkpoint_memory() or nullcontext() as memory:
            pieces = ((c, self._aside.get(c.id, self._home(c))) for c in self._chunks)
            found = gather_whole(engine, pieces, on_all_ranks=False, memory=memory)
        dtypes = {m.fqn: d for c in self._chunks for m, d in zip(c.spec.members, c.original_dtypes, strict=True)}
        return {name: value.to(dtypes[name]) for name, value in found.items()}

    @torch.no_grad()
    def load(self, values: Mapping[str, Tensor]) -> None:
        """Take averages from whole ones by name, on every rank; what is missing stays.

        Args:
            values: Any device and floating dtype.
        """
        engine = self._engine
        with engine.meeting(Meeting.STATE):
            for chunk in self._chunks:
                home = self._home(chunk)
                for segment in engine.groups.segments(chunk.spec):
                    if segment.fqn in values:
                        member = chunk.spec.members[segment.member_index]
                        part = engine.groups.part_of(member, values[segment.fqn])
                        flat = in_memory_order(chunk, segment.member_index, part)
                        home[segment.in_shard].copy_(flat[segment.in_param])

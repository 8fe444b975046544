"""What carries bytes between shards and replicas, and how many it has carried."""

from __future__ import annotations

from dataclasses import dataclass, fields

from lightning_elixir.core.device import Device
from lightning_elixir.runtime.groups import Groups
from lightning_elixir.storage.shards import ShardStore


@dataclass
class TransferBytes:
    """What was moved since the last reset, in bytes."""

    h2d: int = 0
    d2h: int = 0
    gathered: int = 0
    reduced: int = 0
    reduced_across: int = 0
    activations_out: int = 0
    """To host memory."""
    activations_in: int = 0
    """Back from there."""
    activations_left: int = 0
    """Of what should have gone to host memory, and found no room there."""
    recomputed_blocks: int = 0
    """Calls of blocks whose activations were dropped, to be recomputed."""

    def reset(self) -> None:
        for field in fields(self):
            setattr(self, field.name, 0)


@dataclass(frozen=True)
class Transport:
    """The means of one plan's fetches and reductions."""

    device: Device
    """Lanes and storages."""
    groups: Groups
    """The ranks that share each chunk."""
    store: ShardStore
    """The shards."""
    is_distributed: bool
    """Whether a parameter shard is a slice (else the whole chunk)."""
    moved: TransferBytes
    """Counts."""

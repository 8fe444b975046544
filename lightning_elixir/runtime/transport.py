"""What carries bytes between shards and replicas, and how many it has carried."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_elixir.core.device import Device
from lightning_elixir.runtime.groups import Groups
from lightning_elixir.storage.shards import ShardStore


@dataclass
class TransferBytes:
    """Bytes moved since the last reset."""

    h2d: int = 0
    d2h: int = 0
    gathered: int = 0
    reduced: int = 0

    def reset(self) -> None:
        self.h2d = self.d2h = self.gathered = self.reduced = 0


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

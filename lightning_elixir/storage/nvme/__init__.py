"""Tensors on a disk: `open_offload_file`."""

from lightning_elixir.storage.nvme.folders import is_in_memory, temporary_folder
from lightning_elixir.storage.nvme.mapped import MappedMemory
from lightning_elixir.storage.nvme.offload_file import BACKENDS, OffloadFile, OffloadStats, open_offload_file
from lightning_elixir.storage.nvme.scratch import NOT_OFFERED, go_direct, remove_stale
from lightning_elixir.storage.nvme.state_file import (
    GRAD,
    MASTER,
    MOMENTS,
    PARAM,
    ChunkStates,
    DiskOptions,
    Piece,
    StateFile,
    StateSpec,
    StateTraffic,
    Visit,
    open_state_file,
)
from lightning_elixir.storage.nvme.transfer import ALIGNMENT, Region, Request, aligned, aligned_memory, when_all_over

__all__ = [
    "ALIGNMENT",
    "BACKENDS",
    "GRAD",
    "MASTER",
    "MOMENTS",
    "NOT_OFFERED",
    "PARAM",
    "ChunkStates",
    "DiskOptions",
    "MappedMemory",
    "OffloadFile",
    "OffloadStats",
    "Piece",
    "Region",
    "Request",
    "StateFile",
    "StateSpec",
    "StateTraffic",
    "Visit",
    "aligned",
    "aligned_memory",
    "go_direct",
    "is_in_memory",
    "open_offload_file",
    "open_state_file",
    "remove_stale",
    "temporary_folder",
    "when_all_over",
]

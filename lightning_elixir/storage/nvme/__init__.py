"""Tensors on a disk: `open_offload_file`."""

from lightning_elixir.storage.nvme.folders import is_in_memory, temporary_folder
from lightning_elixir.storage.nvme.offload_file import BACKENDS, OffloadFile, OffloadStats, open_offload_file
from lightning_elixir.storage.nvme.scratch import remove_stale
from lightning_elixir.storage.nvme.transfer import ALIGNMENT, Region, Request

__all__ = [
    "ALIGNMENT",
    "BACKENDS",
    "OffloadFile",
    "OffloadStats",
    "Region",
    "Request",
    "is_in_memory",
    "open_offload_file",
    "remove_stale",
    "temporary_folder",
]

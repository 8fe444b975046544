"""Tensors on a disk: `open_offload_file`."""

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
    "open_offload_file",
    "remove_stale",
]

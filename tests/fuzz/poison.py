"""Storage that is given away, or taken, holds NaN: what reads it too late or too early shows in the numbers."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lightning_elixir.core.device import CpuDevice, CudaDevice

ALL_ONES = 0xFF  # in every byte: NaN in every floating dtype, -1 in integers


def _fill(storage: torch.UntypedStorage) -> None:
    if storage.nbytes() == 0:
        return
    if storage.device.type == "cpu":
        ctypes.memset(storage.data_ptr(), ALL_ONES, storage.nbytes())
        return
    with _disable_current_modes():  # those of selective checkpointing would count it among the user's operators
        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).fill_(ALL_ONES)


@contextmanager
def poisoned_storage() -> Iterator[None]:
    """Inside, devices fill replicas' storage with NaN before they free it, and after they have allocated it. On a GPU
    both happen on the compute stream, as the freeing and the allocation do."""
    with _poisoned(CpuDevice), _poisoned(CudaDevice):
        yield


@contextmanager
def _poisoned(device: type[CpuDevice] | type[CudaDevice]) -> Iterator[None]:
    allocate, free = device.allocate, device.free

    def allocate_poisoned(self: object, storage: torch.UntypedStorage, nbytes: int) -> None:
        allocate(self, storage, nbytes)  # type: ignore[arg-type]
        _fill(storage)

    def free_poisoned(self: object, storage: torch.UntypedStorage) -> None:
        _fill(storage)
        free(self, storage)  # type: ignore[arg-type]

    with mock.patch.object(device, "allocate", allocate_poisoned), mock.patch.object(device, "free", free_poisoned):
        yield

"""CPU devices that count bytes: as a GPU's allocator does, with only so many of them; and host memory."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_elixir.core.device import CpuDevice


class MeteredCpuDevice(CpuDevice):
    """Counts replicas and gradient blocks, and every tensor that operators make inside `counting()`; host memory, which
    comes from `host_zeros`, is left out. Blocks that were freed stay with the device until `give_back`, as in a memory
    pool.

    Args:
        limit_bytes: With more in use, blocks kept back included, `torch.OutOfMemoryError` is raised; None: no limit.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        super().__init__()
        self.limit_bytes = limit_bytes
        self.num_give_backs = 0
        self.pooled_bytes = 0
        self.most_bytes = 0
        """Most that was in use since `restart_most`, with blocks kept back."""
        self._live_bytes = 0
        self._peak_bytes = 0
        self._sizes: dict[int, int] = {}  # by storage address; 0: released, or not counted
        self._blocks: set[int] = set()  # storage addresses
        self._making: set[int] = set()  # threads that make host memory now, beside what is counted

    @property
    def is_counting(self) -> bool:
        return True

    def allocate(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        kept = min(self.pooled_bytes, nbytes)
        self._take(nbytes, kept)
        self.pooled_bytes -= kept
        super().allocate(storage, nbytes)
        self._track(storage, nbytes)
        self._blocks.add(storage._cdata)

    def free(self, storage: torch.UntypedStorage) -> None:
        super().free(storage)
        nbytes = self._sizes.get(storage._cdata, 0)
        self._sizes[storage._cdata] = 0
        self._live_bytes -= nbytes
        self.pooled_bytes += nbytes

    def host_zeros(self, numel: int, dtype: torch.dtype, *, is_locked: bool = True) -> Tensor:
        self._making.add(threading.get_ident())
        try:
            return super().host_zeros(numel, dtype)
        finally:
            self._making.discard(threading.get_ident())

    def allocated_bytes(self) -> int:
        return self._live_bytes

    def peak_bytes(self) -> int:
        return self._peak_bytes

    def usable_bytes(self) -> int | None:
        return self.limit_bytes

    def take_peak_bytes(self) -> int:
        peak, self._peak_bytes = self._peak_bytes, self._live_bytes
        return peak

    def give_back(self) -> None:
        self.num_give_backs += 1
        self.pooled_bytes = 0

    def counting(self) -> TorchDispatchMode:
        """Enter it around forward and backward."""
        return _Counting(self)

    def add(self, tensor: Tensor) -> None:
        """Count the tensor's storage until it dies, unless it is counted already."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._sizes:
            return
        nbytes = 0 if threading.get_ident() in self._making else storage.nbytes()
        self._take(nbytes, 0)
        self._track(storage, nbytes)

    def _take(self, nbytes: int, kept_bytes: int) -> None:
        used_bytes = self._live_bytes + self.pooled_bytes + nbytes - kept_bytes
        if self.limit_bytes is not None and used_bytes > self.limit_bytes and nbytes:
            raise torch.OutOfMemoryError(f"{used_bytes} bytes of {self.limit_bytes}")
        self._live_bytes += nbytes
        self._peak_bytes = max(self._peak_bytes, self._live_bytes)
        self.most_bytes = max(self.most_bytes, used_bytes)

    def restart_most(self) -> None:
        self.most_bytes = self._live_bytes + self.pooled_bytes

    def _track(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        if storage._cdata not in self._sizes:
            weakref.finalize(storage, self._forget, storage._cdata).atexit = False
        self._sizes[storage._cdata] = nbytes

    def _forget(self, address: int) -> None:
        nbytes = self._sizes.pop(address)
        self._live_bytes -= nbytes
        if address in self._blocks:
            self._blocks.remove(address)
            self.pooled_bytes += nbytes


class MeteredHostDevice(CpuDevice):
    """Counts the host memory of shards and states, all that comes from `host_zeros`."""

    def __init__(self) -> None:
        super().__init__()
        self.host_bytes = self.peak_host_bytes = 0

    def host_zeros(self, numel: int, dtype: torch.dtype, *, is_locked: bool = True) -> Tensor:
        tensor = super().host_zeros(numel, dtype)
        nbytes = tensor.untyped_storage().nbytes()
        self._take(nbytes)
        weakref.finalize(tensor.untyped_storage(), self._take, -nbytes).atexit = False
        return tensor

    def _take(self, nbytes: int) -> None:
        self.host_bytes += nbytes
        self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)


class _Counting(TorchDispatchMode):
    def __init__(self, device: MeteredCpuDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # What an operator writes to is none that it has made: it may be host memory that a thread got.
        given = {v.untyped_storage()._cdata for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor)}
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.untyped_storage()._cdata not in given:
                self._device.add(value)
        return result


def use_metered_device(monkeypatch: pytest.MonkeyPatch, limit_bytes: int | None = None) -> MeteredCpuDevice:
    """Have the next `ElixirModule`s compute on a metered device."""
    device = MeteredCpuDevice(limit_bytes)
    monkeypatch.setattr("lightning_elixir.wrapper.make_device", lambda *_: device)
    return device

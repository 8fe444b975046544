"""The compute device: storages, streams, host memory. The only file that names `torch.cuda`.

[Note: stream rule] Chunk storage is allocated and freed on the compute stream. A lane (a side stream) first waits for
all that the compute stream has been given so far, so it never touches storage before its allocation, or while an
earlier user of the same memory still runs; and the compute stream waits for the lane's event before it uses or frees
that storage. Therefore no `record_stream`. On a CPU device everything is synchronous and lanes do nothing.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lightning_elixir.core.host import cpu_model
from lightning_elixir.core.pages import Pages
from lightning_elixir.core.signals import DeferringLock

log = logging.getLogger(__name__)


class Event(Protocol):
    """A moment on a lane."""

    def wait(self) -> None:
        """Make the compute stream wait for this moment."""

    def synchronize(self) -> None:
        """Make the host wait for this moment."""

    def is_over(self) -> bool:
        """Whether this moment has come; waits for nothing."""


class Stream(Protocol):
    """A compute stream, which is the current one of some thread. Two of the same are equal."""

    def hold_up_this_thread(self) -> None:
        """What this thread gives its own stream from now on comes after all that this one was given."""

    def wait_for(self, other: Stream) -> None:
        """What this stream is given from now on comes after all that the other one was given."""


class Mark(Protocol):
    """A moment of the compute stream, for measuring."""

    def seconds_since(self, earlier: Mark) -> float:
        """Makes the host wait until both have come."""


class Lane(Protocol):
    """A queue of transfers beside the compute stream."""

    def issue(self) -> AbstractContextManager[None]:
        """Work inside runs on the lane, after all that the compute stream was given before. To be entered at once."""

    def resume(self) -> AbstractContextManager[None]:
        """As `issue`, without waiting for the compute stream: for storage that was there at an earlier `issue`. Waiting
        for an event inside holds up the lane, not the compute stream."""

    def record(self) -> Event: ...


class Device(Protocol):
    """What the runtime needs from a compute device."""

    torch_device: torch.device
    is_synchronous: bool
    """Whether every transfer is done when its call returns."""
    fetch_lane: Lane
    reduce_lane: Lane

    def new_lane(self) -> Lane:
        """One more lane, beside all others."""

    def allocate(self, storage: torch.UntypedStorage, nbytes: int) -> None: ...

    def free(self, storage: torch.UntypedStorage) -> None: ...

    def host_zeros(self, numel: int, dtype: torch.dtype, *, is_locked: bool = True) -> Tensor:
        """1-D host tensor of zeros, as the system gives fresh memory: they cost nothing.

        Args:
            is_locked: Whether it is page-locked, where that speeds transfers up and is possible. It takes longer than
                for all cores to touch the memory.
        """

    def lock(self, tensor: Tensor) -> None:
        """Page-lock all of the memory of a tensor from `host_zeros`, which may be so already."""

    def compute_stream(self) -> Stream:
        """The one on which this thread computes now."""

    def compute_event(self) -> Event:
        """An event on the compute stream, now."""

    def synchronize(self) -> None: ...

    def mark(self) -> Mark:
        """A mark on the compute stream, now."""

    @property
    def is_counting(self) -> bool:
        """Whether the bytes in use are counted."""

    def allocated_bytes(self) -> int:
        """Device bytes in use by tensors now; 0 where they are not counted."""

    def peak_bytes(self) -> int:
        """Most device bytes in use by tensors since the last `take_peak_bytes`; 0 where they are not counted."""

    def take_peak_bytes(self) -> int:
        """As `peak_bytes`, which counts anew from here."""

    def num_shortages(self) -> int:
        """Times that there was no memory until the device had finished, and what was kept for later had been given
        back."""

    def usable_bytes(self) -> int | None:
        """Bytes of the device's memory that this process may use; None where they are not counted."""

    def give_back(self) -> None:
        """Release, for any other use, what `free` has kept for the next `allocate`. Takes milliseconds."""


class _CpuEvent:
    def wait(self) -> None:
        return

    def synchronize(self) -> None:
        return

    def is_over(self) -> bool:
        return True


@dataclass(frozen=True)
class _CpuStream:
    def hold_up_this_thread(self) -> None:
        return

    def wait_for(self, other: Stream) -> None:
        return


class _CpuMark:
    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def seconds_since(self, earlier: Mark) -> float:
        return self._at_s - earlier._at_s if isinstance(earlier, _CpuMark) else 0.0


class _CpuLane:
    def issue(self) -> AbstractContextManager[None]:
        return nullcontext()

    def resume(self) -> AbstractContextManager[None]:
        return nullcontext()

    def record(self) -> Event:
        return _CpuEvent()


class CpuDevice:
    """The CPU as compute device: "device" and host memory are the same, every transfer is a synchronous copy."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.is_synchronous = True
        self.fetch_lane: Lane = _CpuLane()
        self.reduce_lane: Lane = _CpuLane()

    def new_lane(self) -> Lane:
        return _CpuLane()

    def allocate(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        storage.resize_(nbytes)

    def free(self, storage: torch.UntypedStorage) -> None:
        storage.resize_(0)

    def host_zeros(self, numel: int, dtype: torch.dtype, *, is_locked: bool = True) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device="cpu")

    def lock(self, tensor: Tensor) -> None:
        pass

    def compute_stream(self) -> Stream:
        return _CpuStream()

    def compute_event(self) -> Event:
        return _CpuEvent()

    def synchronize(self) -> None:
        return

    def mark(self) -> Mark:
        return _CpuMark()

    @property
    def is_counting(self) -> bool:
        return False

    def allocated_bytes(self) -> int:
        return 0

    def peak_bytes(self) -> int:
        return 0

    def take_peak_bytes(self) -> int:
        return 0

    def num_shortages(self) -> int:
        return 0

    def usable_bytes(self) -> int | None:
        return None

    def give_back(self) -> None:
        return


class _CudaEvent:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(blocking=True)  # a host thread that waits leaves its core to the updates
        self._event.record(stream)

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def synchronize(self) -> None:
        self._event.synchronize()

    def is_over(self) -> bool:
        is_over: bool = self._event.query()
        return is_over


@dataclass(frozen=True)
class _CudaStream:
    stream: torch.cuda.Stream

    def hold_up_this_thread(self) -> None:
        torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)

    def wait_for(self, other: Stream) -> None:
        if isinstance(other, _CudaStream):
            self.stream.wait_stream(other.stream)


class _CudaMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(stream)

    def seconds_since(self, earlier: Mark) -> float:
        if not isinstance(earlier, _CudaMark):
            return 0.0
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1000


class _CudaLane:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def issue(self) -> AbstractContextManager[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return self.resume()

    def resume(self) -> AbstractContextManager[None]:
        on_stream: AbstractContextManager[None] = torch.cuda.stream(self._stream)
        return on_stream

    def record(self) -> Event:
        return _CudaEvent(self._stream)


class CudaDevice:
    """One CUDA (or ROCm) device.

    Replicas and gradient blocks come out of a private memory pool: all of one size, they are reused without
    fragmenting, and without being fragmented by, what the activations need. What is free in such a pool stays there for
    as long as the pool lives, whatever `empty_cache` is told; so to give it back the pool is dropped; what is still in
    use goes back once it is freed and other memory is asked for.

    Args:
        device: A CUDA device with an index.
        pin_memory: Page-lock host shards. If the system refuses, host memory stays pageable, with one warning.
    """

    def __init__(self, device: torch.device, pin_memory: bool = True) -> None:
        segments_grow(device)
        self.torch_device = device
        self.is_synchronous = False
        self.fetch_lane: Lane = _CudaLane(device)
        self.reduce_lane: Lane = _CudaLane(device)
        self._pool = torch.cuda.MemPool()
        self._pool_lock = DeferringLock()  # torch refuses a second thread that uses the same pool, and miscounts then
        self._can_pin = pin_memory
        self._unlocked = weakref.WeakValueDictionary[int, _PinnedPages]()  # by address

    def new_lane(self) -> Lane:
        return _CudaLane(self.torch_device)

    def allocate(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        with self._pool_lock:
            try:
                self._resize_in_pool(storage, nbytes)
            except torch.OutOfMemoryError:
                # The general pool may sit on cached, unused memory that ours cannot reach. It gives that back where no
                # pool is in use: inside the context nothing is given back, and nothing said (seen on torch 2.11).
                torch.cuda.empty_cache()
                self._resize_in_pool(storage, nbytes)

    def _resize_in_pool(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        with torch.cuda.use_mem_pool(self._pool, self.torch_device):
            storage.resize_(nbytes)

    def free(self, storage: torch.UntypedStorage) -> None:
        storage.resize_(0)

    def host_zeros(self, numel: int, dtype: torch.dtype, *, is_locked: bool = True) -> Tensor:
        if not self._can_pin or numel == 0:
            return torch.zeros(numel, dtype=dtype, device="cpu")
        pages = _PinnedPages(numel * dtype.itemsize)
        tensor = pages.tensor(dtype)
        _touch(tensor)
        if is_locked:
            self._pin(pages)
        else:
            self._unlocked[pages.address] = pages
        return tensor

    def lock(self, tensor: Tensor) -> None:
        pages = self._unlocked.pop(tensor.untyped_storage().data_ptr(), None)
        if pages is not None and self._can_pin:
            self._pin(pages)

    def _pin(self, pages: _PinnedPages) -> None:
        if not pages.pin():
            self._can_pin = False
            log.warning(
                "could not page-lock host memory: transfers will be slower; raise the memory lock limit (ulimit -l)"
            )

    def compute_stream(self) -> Stream:
        return _CudaStream(torch.cuda.current_stream(self.torch_device))

    def compute_event(self) -> Event:
        return _CudaEvent(torch.cuda.current_stream(self.torch_device))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def mark(self) -> Mark:
        return _CudaMark(torch.cuda.current_stream(self.torch_device))

    @property
    def is_counting(self) -> bool:
        return True

    def allocated_bytes(self) -> int:
        return self._bytes_in_use()["current"]

    def peak_bytes(self) -> int:
        return self._bytes_in_use()["peak"]

    def take_peak_bytes(self) -> int:
        peak = self.peak_bytes()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        return peak

    def num_shortages(self) -> int:
        num: int = self._stats()["num_alloc_retries"]
        return num

    def usable_bytes(self) -> int | None:
        return current_device_memory_bytes(self.torch_device)

    def give_back(self) -> None:
        self._pool = torch.cuda.MemPool()

    def _bytes_in_use(self) -> dict[str, int]:
        counts: dict[str, int] = self._stats()["allocated_bytes"]["all"]
        return counts

    def _stats(self) -> dict[str, Any]:
        # Not `memory_allocated`: it sorts all that there is to know, and takes six times as long.
        stats: dict[str, Any] = torch.cuda.memory.memory_stats_as_nested_dict(self.torch_device)
        return stats


def segments_grow(device: torch.device | None = None) -> bool:
    """Have torch's allocator, which is one for the process, grow its segments page by page, unless the environment says
    otherwise; returns whether it does. A plan fills the device to the last gigabytes. With segments of fixed sizes, up
    to 5 GiB lay in gaps that no tensor fitted into (experts of 768 MiB, two H200s); with segments that grow, 2 GiB at
    the peak, and 0.2 once memory was short.

    Initialises CUDA. True on the CPU, which has no such allocator.

    Args:
        device: None: the current CUDA device, or the CPU where there is none.
    """
    device = device or _default_device()
    if device.type != "cuda":
        return True
    chosen = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""  # torch's own
    if "expandable_segments" in chosen:
        return "expandable_segments:true" in chosen.lower().replace(" ", "")
    if torch.version.cuda is not None:
        with suppress(torch.OutOfMemoryError):  # of which others tell
            index = torch.cuda.current_device() if device.index is None else device.index
            return _grow_segments(index, f"{chosen}," if chosen else "")
    return False


@cache  # to look makes the device wait, and what the driver can do stays as it is
def _grow_segments(index: int, kept: str) -> bool:
    """Args:
    index: Of the device.
    kept: Settings that stay, as the allocator reads them, with a comma after each.
    """
    torch._C._accelerator_setAllocatorSettings(f"{kept}expandable_segments:True")
    device = torch.device("cuda", index)
    try:
        with torch.cuda.use_mem_pool(torch.cuda.MemPool(), device):  # where no segment is there yet
            torch.empty(1, device=device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # some virtual machines and drivers cannot map memory
        torch._C._accelerator_setAllocatorSettings(f"{kept}expandable_segments:False")
        log.info("segments of device memory keep their sizes: the driver cannot let them grow (%s)", error)
        return False
    return True


_TOUCH_STRIDE = 512
"""Bytes from one write to the next: less than a page, so that torch sees enough work for all threads."""


def _touch(fresh: Tensor) -> None:
    """Have the system give the pages of fresh memory now, to all threads at once: locking them would do it with one."""
    fresh.view(torch.uint8)[::_TOUCH_STRIDE].zero_()


class _PinnedPages(Pages):
    """Page-locked in place: torch's pinned allocator rounds up to powers of two. Unlocked when the last tensor over it
    is gone."""

    _is_pinned = False

    def pin(self) -> bool:
        """Lock the pages; False if the system refuses."""
        self._is_pinned = int(torch.cuda.cudart().cudaHostRegister(self.address, self.nbytes, 0)) == 0
        return self._is_pinned

    def __del__(self) -> None:
        if self._is_pinned and self.is_own:
            with suppress(RuntimeError):  # CUDA may be gone already when the interpreter ends
                # A transfer may still read these pages; without a wait it would send what comes to lie there next.
                torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self.address)
            self._is_pinned = False
        super().__del__()


def _default_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def make_device(device: torch.device | str | None = None, pin_memory: bool = True) -> Device:
    """The runtime's view of `device`; by default the current CUDA device, or the CPU where there is none."""
    device = _default_device() if device is None else torch.device(device)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return CudaDevice(torch.device("cuda", index), pin_memory)
    if device.type == "cpu":
        return CpuDevice()
    raise ValueError(f"lightning_elixir computes on CPU and CUDA devices, not on {device}")


def current_device_memory_bytes(device: torch.device | None = None) -> int | None:
    """Bytes of the compute device's memory that this process may use: what is free now plus what torch already holds,
    within `torch.cuda.set_per_process_memory_fraction`. None on the CPU.

    Initialises CUDA.
    """
    device = device or _default_device()
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    usable = free + torch.cuda.memory_reserved(device)
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    return min(usable, int(fraction * total))


@dataclass(frozen=True)
class DeviceFacts:
    """What a compute device is, for reports and for telling machines apart."""

    name: str
    num_devices: int
    """Devices of its type that this process sees."""
    total_bytes: int | None
    """All of its memory; None for the CPU."""
    driver: str
    """Version; empty where it is not known."""


def device_facts(device: torch.device) -> DeviceFacts:
    """Name, number, memory and driver of a device with an index, or of the CPU. Initialises CUDA for the former."""
    if device.type != "cuda":
        return DeviceFacts(cpu_model(), 1, None, "")
    properties = torch.cuda.get_device_properties(device)
    return DeviceFacts(properties.name, torch.cuda.device_count(), properties.total_memory, _driver_version())


def _driver_version() -> str:
    for name in ("nvidia", "amdgpu"):
        with suppress(OSError):
            return Path(f"/sys/module/{name}/version").read_text(encoding="ascii").strip()
    return ""


def current_device(device: torch.device) -> AbstractContextManager[None]:
    """Inside, what names no device goes to this one; so do Triton's launches, whatever their tensors are on."""
    return nullcontext() if device.type == "cpu" else torch.cuda.device(device)


@contextmanager
def working_on(device: torch.device) -> Iterator[None]:
    """What a thread of ours needs around its work: it inherits neither the device nor the gradient mode."""
    with torch.no_grad(), current_device(device):
        yield


def runs_triton(device: torch.device) -> bool:
    """Whether Triton's kernels run there: with its own switch as Python, on any device."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def records_graphs(device: torch.device) -> bool:
    """Whether code that is compiled with CUDA graphs runs as such there."""
    return device.type == "cuda"


def beside_dispatch_modes() -> AbstractContextManager[Any]:
    """Inside, the dispatch modes that are on do not see what is done: selective activation checkpointing and counters
    of operators are about the user's operators, and raise, or count, where ours come between. To be used with signals
    deferred: one that came inside would leave them off."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


def is_device_in_use() -> bool:
    """Whether this process has begun to use CUDA, so that none that is forked from it can."""
    return bool(torch.cuda.is_initialized())


def release_cached_memory(device: torch.device, *, with_workspaces: bool = True) -> None:
    """Give back what torch keeps of the device's memory without using it.

    Args:
        with_workspaces: And those of its libraries: not while another thread computes.
    """
    if device.type == "cuda":
        if with_workspaces:
            torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()

"""Parameters from a disk to replicas: read into a few page-locked buffers, and sent up from there.

Each thread has a buffer, so that several reads are under way, and is free again when the copy to the device has begun;
before its buffer is read into again, it waits for the end of that copy. Only these threads wait for a buffer, and what
they wait for needs none of them: the disk, the device, and an update that is over when their work begins.

[Note: parameters on NVMe] Such a chunk's compute shard is one more part of its states in the file, and so are its
gradients: if these stayed in host memory until their updates, a model larger than that would not train. The host holds
only what is under way, however many chunks there are: `PARAM_BUFFERS` for fetches, `STAGING_BUFFERS` for gradients,
`NVME_BUFFERS` for updates. A master of the compute dtype is the parameters, and has no second part; frozen chunks have
parameters there alone.

- *Fetch.* The read is held until the chunk's update is over, which has then asked for its writes, and the file keeps
  order. A prefetch begins its read at once; eviction writes nothing. With several ranks the host waits for the read of
  its slice, since a collective follows. A read that fails ends the run.
- *Gradients* go by way of sums (Note: sums beside backward, `runtime/accumulation.py`), with the bits of sums in host
  memory; 4 bytes a parameter are reserved for them. Square sums are taken on the device, of a gradient that has not
  been added to; otherwise the norm reads it from the file. `Shard.grad` is on `meta`, and tells that there are some.
- *Update.* A visit reads gradients with the states, once they have landed; new values are one more part of the buffer.
  Where not every element gets one, values are made from the master first. Nothing begins inside backward, which reads
  the old values: there is no second copy. What users look at between steps is compared with the file, which reads it
  once more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lightning_elixir.core.device import Device, Event, working_on
from lightning_elixir.core.labels import label
from lightning_elixir.core.signals import deferred
from lightning_elixir.core.worker import LateEvent, Task, Worker
from lightning_elixir.storage.nvme import ALIGNMENT, ChunkStates


@dataclass(eq=False)
class _Buffer:
    memory: Tensor | None = None  # 1-D, uint8, host memory, aligned; made when first needed
    sent: Event | None = None  # the end of the last copy out of it


class ParamReads:
    """The way of parameters from a disk to the device.

    Args:
        device: Where they go.
        num_buffers: Reads that may be under way.
        buffer_bytes: Of the largest shard.
    """

    def __init__(self, device: Device, num_buffers: int, buffer_bytes: int) -> None:
        self._device = device
        self._buffer_bytes = buffer_bytes
        self._lock = threading.Lock()
        self._num_made = 0
        self._free = [_Buffer() for _ in range(num_buffers)]
        self._worker = Worker(
            "elixir-params", num_threads=max(1, num_buffers), context=partial(working_on, device.torch_device)
        )

    def submit(self, on_disk: ChunkStates, send: Callable[[Tensor], Event], update: Task | None) -> Event:
        """Have a chunk's parameters read and sent.

        Args:
            on_disk: Where they are.
            send: Gets them, 1-D, and begins the copy to the device; returns its end.
            update: Of the chunk, if it may be under way: it comes before.

        Returns:
            The end of the copy. Waiting for it raises what reading, or the update, has raised.
        """
        found: list[Event] = []
        with deferred():  # a signal between the two would leave it held for ever
            task = self._worker.submit(partial(self._read, on_disk, send, update, found), is_held=update is not None)
            if update is not None:  # no thread waits for it, or all of them might, and others could read meanwhile
                update.then(task.release)
        return _Sent(LateEvent(task, lambda: found[0]), update)

    def held_bytes(self) -> int:
        """Host memory of the buffers."""
        return self._num_made * self._buffer_bytes

    def rest(self) -> None:
        """End the threads when all is read; the next read starts new ones."""
        self._worker.rest()

    def close(self) -> None:
        """Do what has begun, drop what waits for an update, and end the threads. None may follow."""
        self._worker.close(drops_held=True)

    def _read(
        self, on_disk: ChunkStates, send: Callable[[Tensor], Event], update: Task | None, found: list[Event]
    ) -> None:
        if update is not None and update.error is not None:
            raise update.error
        with self._lock:
            buffer = self._free.pop()
        try:
            if buffer.sent is not None:
                buffer.sent.synchronize()
                buffer.sent = None
            if buffer.memory is None:
                buffer.memory = self._new_memory()
            spec = on_disk.spec
            dtype = spec.param_dtype or spec.dtype
            values = buffer.memory[: spec.numel * dtype.itemsize].view(dtype)
            with label("read parameters"):
                on_disk.file.read_values(on_disk.chunk_id, values)
            buffer.sent = send(values)
            found.append(buffer.sent)
        finally:
            with self._lock:
                self._free.append(buffer)

    def _new_memory(self) -> Tensor:
        whole = self._device.host_zeros(self._buffer_bytes + ALIGNMENT, torch.uint8)
        with self._lock:
            self._num_made += 1
        skipped = -whole.data_ptr() % ALIGNMENT  # so that reads need no copy
        return whole[skipped : skipped + self._buffer_bytes]


class _Sent:
    """The end of a copy that is issued behind an update: waiting for it first waits for the update."""

    def __init__(self, event: LateEvent, update: Task | None) -> None:
        self._event = event
        self._update = update

    def wait(self) -> None:
        self._hurry()
        self._event.wait()

    def synchronize(self) -> None:
        self._hurry()
        self._event.synchronize()

    def is_over(self) -> bool:
        return self._event.is_over()

    def _hurry(self) -> None:
        if self._update is not None:
            self._update.wait()
            self._update = None

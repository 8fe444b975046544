"""Page-locked staging memory, for what a device takes from host memory that is not locked, or brings there."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from lightning_elixir.core.device import Device, Event, Lane, working_on
from lightning_elixir.core.worker import Task, Worker


class Uploads:
    """Page-locked staging memory for what goes to the device: one buffer is written while the other is under way.

    Args:
        device: Where it goes.
        lane: On which it goes.
        piece_numel: Most elements of a buffer in `upload`.
    """

    _NUM_BUFFERS = 2
    _MOST_BETWEEN_NUMEL = 4096

    def __init__(self, device: Device, lane: Lane, piece_numel: int = 16 * 1024 * 1024) -> None:
        self._piece_numel = piece_numel
        self._device = device
        self._lane = lane
        self._buffers: list[tuple[Tensor, Event | None]] = []  # with what was sent from each last

    def upload(self, parts: Iterable[tuple[int, Tensor]], target: Tensor) -> None:
        """`target` (device, 1-D) receives values in its own dtype, as if on the compute stream. Between parts that
        follow each other closely it becomes zeros.

        Args:
            parts: Where each begins in `target`, and its values (host, 1-D); in order.
        """
        with self._lane.issue():  # what the compute stream does with `target` comes first
            pass
        most = max(1, min(self._piece_numel, target.numel()))
        begin = end = 0  # of the elements that are in the buffer
        buffer: Tensor | None = None
        for offset, values in parts:
            for first in range(0, values.numel(), most):
                at, piece = offset + first, values[first : first + most]
                is_apart = at - end > self._MOST_BETWEEN_NUMEL or at + piece.numel() - begin > most
                if buffer is not None and is_apart:
                    self.send(target[begin:end]).wait()
                    buffer = None
                if buffer is None:
                    buffer, begin, end = self.take(most, target.dtype), at, at
                buffer[end - begin : at - begin].zero_()
                end = at + piece.numel()
                buffer[at - begin : end - begin].copy_(piece)
        if buffer is not None:
            self.send(target[begin:end]).wait()

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A buffer to write to, 1-D; waits until an earlier one has been sent. `send` must follow."""
        held: Tensor | None = None
        if len(self._buffers) == self._NUM_BUFFERS:
            held, sent = self._buffers.pop(0)
            if sent is not None:
                sent.synchronize()
        if held is None or held.numel() < numel * dtype.itemsize:
            held = None  # before there is another
            held = self._device.host_zeros(numel * dtype.itemsize, torch.uint8)
        self._buffers.append((held, None))
        return held[: numel * dtype.itemsize].view(dtype)

    def send(self, target: Tensor) -> Event:
        """`target` (device, 1-D) receives what was written to the buffer taken last. Returns when it has."""
        buffer, _ = self._buffers.pop()
        with self._lane.resume():
            target.copy_(buffer[: target.nbytes].view(target.dtype), non_blocking=True)
            sent = self._lane.record()
        self._buffers.append((buffer, sent))
        return sent


class Downloads:
    """Page-locked staging memory for what comes from the device: a thread empties one buffer while the other is filled.

    Args:
        device: Where it comes from.
        piece_numel: Most elements of a buffer.
    """

    _NUM_BUFFERS = 2

    def __init__(self, device: Device, piece_numel: int = 16 * 1024 * 1024) -> None:
        self._piece_numel = piece_numel
        self._device = device
        self._worker = Worker("elixir-download", context=partial(working_on, device.torch_device))
        self._buffers: list[tuple[Tensor, Task]] = []  # with what empties it

    def download(self, source: Tensor, target: Tensor) -> None:
        """`target` (host, 1-D) receives `source` (device, 1-D, the same dtype), as if on the compute stream, by the
        time that `settle` returns."""
        for first in range(0, source.numel(), self._piece_numel):
            piece = source[first : first + self._piece_numel]
            buffer = self._take(piece.nbytes)
            staged = buffer[: piece.nbytes].view(piece.dtype)
            staged.copy_(piece, non_blocking=True)
            land = partial(_land, staged, target[first : first + piece.numel()], torch.is_inference_mode_enabled())
            self._buffers.append((buffer, self._worker.submit(land, event=self._device.compute_event())))

    def _take(self, nbytes: int) -> Tensor:
        """A buffer that is empty."""
        held: Tensor | None = None
        if len(self._buffers) == self._NUM_BUFFERS:
            held, emptied = self._buffers.pop(0)
            emptied.wait()
        if held is None or held.numel() < nbytes:
            held = None  # before there is another
            held = self._device.host_zeros(nbytes, torch.uint8)
        return held

    def settle(self) -> None:
        """Wait until all is where it shall be."""
        for _, emptied in self._buffers:
            emptied.wait()

    def close(self) -> None:
        """Wait likewise, raise nothing, and end the thread."""
        for _, emptied in self._buffers:
            emptied.join()
        self._buffers.clear()
        self._worker.close()


def _land(staged: Tensor, target: Tensor, is_inference: bool) -> None:
    with torch.inference_mode(is_inference):
        target.copy_(staged)

"""Carries out a step's Adam updates, each where it belongs, all sites at the same time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_elixir.core.device import Device, Uploads
from lightning_elixir.optim.adam import piece_numel
from lightning_elixir.optim.streaming import StateStream
from lightning_elixir.optim.updates import FlatUpdate

# Passes over the cores' caches between two looks at the lanes of streamed updates: a few milliseconds on any host.
_HOST_PASSES = 4

# Bounds temporary memory on the device.
_DEVICE_PIECE_NUMEL = 16 * 1024 * 1024


@dataclass(frozen=True)
class UpdateTimes:
    """What the update of one step did and took on this rank, by the host's clock; nothing is waited for to measure."""

    update_s: float
    """The whole update, until host memory holds all results. Of updates where the device keeps the states, only the
    launches."""
    adam_s: float
    """The host's own arithmetic."""
    gpu_numel: int
    """Parameters updated on the device, where their states live."""
    streamed_numel: int
    """Parameters updated on the device, whose states live on the host."""
    cpu_numel: int
    """Parameters updated by the host."""


class UpdateRunner:
    """Carries out `FlatUpdate`s on the compute device, through it, and on the host.

    Args:
        device: The compute device.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._uploads = Uploads(device)
        self._stream = StateStream(device)

    def held_bytes(self) -> dict[str, int]:
        """Device memory held now, by the engine's kinds."""
        return self._stream.held_bytes()

    def reserve_stream(self) -> None:
        """Take the device memory that the streamed updates of the next `run` need.

        Raises:
            CapacityError: If it is not there.
        """
        self._stream.reserve()

    def release_stream(self) -> None:
        """Give it back unused."""
        self._stream.release()

    @torch.no_grad()
    def run(
        self, on_device: Sequence[FlatUpdate], streamed: Sequence[FlatUpdate], on_host: Sequence[FlatUpdate]
    ) -> UpdateTimes:
        """Carry out all updates; host memory holds the results when this returns.

        Args:
            on_device: Their states are on the compute device.
            streamed: Their states are in host memory, and go up to the device for the update.
            on_host: Their states are in host memory, and stay there.

        Raises:
            CapacityError: If the device has no memory for streaming; no update has begun then.
        """
        start_s = time.perf_counter()
        adam_s = 0.0
        with self._stream.running(streamed) as advance:
            has_gone_down = [self._run_on_device(update) for update in on_device]
            for update in on_host:
                for piece in update.pieces(_HOST_PASSES * piece_numel(update.param.device)):
                    adam_s += self._run_on_host(piece)
                    advance()
        if any(has_gone_down):
            self._device.compute_event().synchronize()
        return UpdateTimes(
            update_s=time.perf_counter() - start_s,
            adam_s=adam_s,
            gpu_numel=_total_numel(on_device),
            streamed_numel=_total_numel(streamed),
            cpu_numel=_total_numel(on_host),
        )

    def _run_on_device(self, update: FlatUpdate) -> bool:
        """Returns whether new values are on their way to host memory."""
        compute = update.compute
        if compute is None or update.is_compute_on_device:
            for piece in update.pieces(_DEVICE_PIECE_NUMEL):
                piece.run()
            return False
        for piece in update.pieces(_DEVICE_PIECE_NUMEL):
            replace(piece, compute=None).run()
            if piece.compute is not None:
                piece.compute.copy_(piece.param.to(compute.dtype), non_blocking=True)
        return True

    def _run_on_host(self, piece: FlatUpdate) -> float:
        """Returns the seconds of the arithmetic."""
        compute = piece.compute
        if compute is None or not piece.is_compute_on_device:
            start_s = time.perf_counter()
            piece.run()
            return time.perf_counter() - start_s
        # Cast while it is in the cache, so that only the compute dtype crosses the bus, from page-locked memory.
        staged = self._uploads.take(compute.numel(), compute.dtype)
        start_s = time.perf_counter()
        if piece.used_numel < piece.numel:
            staged.zero_()  # padding goes up as well
        replace(piece, compute=staged).run()
        seconds = time.perf_counter() - start_s
        self._uploads.send(compute)
        return seconds

    def write_back(self, master: Tensor, target: Tensor) -> None:
        """`target` (any device) receives a master (any device) in its own dtype. Cast where the master is."""
        if master.device == target.device or master.dtype == target.dtype:
            target.copy_(master)
        elif master.device.type != "cpu":
            target.copy_(master.to(target.dtype))
        else:
            self._uploads.upload(master, target)


def _total_numel(updates: Iterable[FlatUpdate]) -> int:
    return sum(update.used_numel for update in updates)

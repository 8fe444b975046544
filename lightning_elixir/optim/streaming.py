"""Adam for states in host memory, carried out by the compute device.

[Note: streamed updates] Parameters, states and gradients go up in pieces, are updated on the device by the same written
sequence of operations as on the host (so bitwise to the same values), and come back. Lanes work beside each other and
beside the compute stream: one piece goes up, one is updated, one comes down. All memory on the device is taken before
the first piece and given back after the last; a slot is filled again when its piece has come back.

What else goes up must not wait for all of that. A GPU copies one thing at a time in each direction, and goes on with a
lane for as long as that has something to copy: while pieces were queued far ahead, three copies of 50 MiB on another
lane took 0.22 to 0.82 s instead of 3 ms (one H200), and backward stood still for 50 ms at a time. So each piece goes
up on the lane that the one before did not use, and is issued when the last one there is up: the bus stays busy, and
the other copies have it after two pieces at most (seen: they took 5 to 8 ms; the stream had 3.35 in place of 3.48
Gparam/s). One lane whose next piece is issued when the last one is up would leave the bus idle in between (3.03).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from lightning_elixir.core.device import Device, Event
from lightning_elixir.errors import CapacityError
from lightning_elixir.optim.updates import FlatUpdate
from lightning_elixir.plan.stream_buffers import NUM_SLOTS, SCRATCH_BYTES, SLOT_BYTES
from lightning_elixir.plan.types import ALIGN_NUMEL
from lightning_elixir.plan.units import format_bytes

log = logging.getLogger(__name__)

# Each holds one piece that goes up, or is the next to do so.
_NUM_UP_LANES = 2

# Below this, transfers are too short to be worth it.
_LEAST_SLOT_BYTES = 4 * 1024**2


class StateStream:
    """Carries out `FlatUpdate`s of host tensors on the compute device.

        stream = StateStream(make_device())
        update = FlatUpdate(master, grad, exp_avg, exp_avg_sq, (UpdatePart(0, numel, 1, hyper),), compute=param)
        stream.run([update])  # the host tensors hold the result when this returns

    Host tensors should come from `Device.host_zeros`: from pageable memory it works too, a good deal slower. `compute`
    may be on either side. On a CPU device, the slots are host memory and everything is a synchronous copy.

    Args:
        device: The compute device.
        slot_bytes: Device memory of each of `NUM_SLOTS` pieces.
        scratch_bytes: Device memory for the arithmetic.
    """

    def __init__(self, device: Device, slot_bytes: int = SLOT_BYTES, scratch_bytes: int = SCRATCH_BYTES) -> None:
        self._device = device
        self._slot_bytes = slot_bytes
        self._scratch_bytes = scratch_bytes
        self._slots: list[Tensor] = []  # uint8; there while updates run
        self._scratch: Tensor | None = None  # likewise
        self._up_lanes = [device.new_lane() for _ in range(_NUM_UP_LANES)]
        self._update_lane, self._down_lane = device.new_lane(), device.new_lane()
        self._num_issued = 0
        self._going_up: deque[Event] = deque()  # the ends of what may be on its way there
        self._last_ends: deque[Event] = deque(maxlen=NUM_SLOTS)

    @property
    def device_bytes(self) -> int:
        """Device memory that a run takes."""
        return NUM_SLOTS * self._slot_bytes + self._scratch_bytes

    def held_bytes(self) -> dict[str, int]:
        """Device memory held now, under the engine's kind `update_slot`."""
        return {} if self._scratch is None else {"update_slot": self.device_bytes}

    def reserve(self) -> None:
        """Take the device memory, less of it where there is not so much; `run` does so by itself.

        Raises:
            CapacityError: If not even small slots fit.
        """
        while self._scratch is None:
            try:
                self._slots = [self._allocate(self._slot_bytes) for _ in range(NUM_SLOTS)]
                self._scratch = self._allocate(self._scratch_bytes)
                for lane in (*self._up_lanes, self._update_lane, self._down_lane):
                    with lane.issue():  # what used this memory before is done
                        pass
            except torch.OutOfMemoryError as error:
                self._slots = []
                if self._slot_bytes // 2 < _LEAST_SLOT_BYTES:
                    raise CapacityError(
                        f"no device memory for streamed updates: they need at least {format_bytes(self.device_bytes)} "
                        "beside all that stays on the device; lower gpu_memory_limit so that the plan leaves more "
                        "free, or use a plan without streamed updates",
                        resource="GPU",
                    ) from error
                self._slot_bytes //= 2
                self._scratch_bytes //= 2
                log.warning(
                    "little device memory for streamed updates: going on with %s", format_bytes(self.device_bytes)
                )

    def release(self) -> None:
        """Give the device memory back, when all that was issued is over."""
        self._slots, self._scratch = [], None
        self._going_up.clear()
        self._last_ends.clear()

    def run(self, updates: Iterable[FlatUpdate]) -> None:
        """Carry out all updates, after all that the compute stream was given; the host tensors hold the result when
        this returns. Takes the device memory, and gives it back.

        Raises:
            CapacityError: If the device has no memory for it; no update has begun then.
        """
        waiting = iter(updates)
        first = next(waiting, None)
        if first is None:
            return
        self.reserve()
        now = self._device.compute_event()
        try:
            for update in chain((first,), waiting):
                end = self.issue(update, now)
            end.synchronize()
        except BaseException:
            self._device.synchronize()  # the lanes may still use the memory that goes now
            raise
        finally:
            self.release()

    def issue(self, update: FlatUpdate, may_write: Event | None = None) -> Event:
        """Queue an update on the lanes, after those issued before; the host waits until all but its last pieces are up.

        Args:
            update: Its host tensors must be ready; memory must have been reserved.
            may_write: When the compute stream has stopped reading the update's `compute`, where that is on the device.

        Returns:
            When the host tensors hold the result.
        """
        if may_write is not None and update.is_compute_on_device:
            with self._update_lane.resume():
                may_write.wait()
        for piece in update.pieces(self._piece_numel(update)):
            while len(self._going_up) >= _NUM_UP_LANES:
                self._going_up.popleft().synchronize()
            is_free = self._last_ends[0] if len(self._last_ends) == NUM_SLOTS else None
            end = self._issue(piece, self._num_issued, is_free)
            self._last_ends.append(end)
            self._num_issued += 1
        return end

    def _allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device.torch_device)

    def _piece_numel(self, update: FlatUpdate) -> int:
        nbytes = 3 * update.param.dtype.itemsize + update.grad.dtype.itemsize
        if update.compute is not None and not update.is_compute_on_device:
            nbytes += update.compute.dtype.itemsize
        if update.change_grad is not None:
            nbytes += update.changed_grad_dtype.itemsize
        return self._slot_bytes // nbytes

    def _issue(self, piece: FlatUpdate, number: int, is_free: Event | None) -> Event:
        """Queue one piece on the lanes.

        Args:
            piece: On the host.
            number: Counts the pieces; decides the slot, and the lane up.
            is_free: When the slot's last piece has come back.

        Returns:
            When this one has.
        """
        slot, up_lane = _Slot(self._slots[number % NUM_SLOTS]), self._up_lanes[number % _NUM_UP_LANES]
        with up_lane.resume():
            if is_free is not None:
                is_free.wait()
            above = replace(
                piece,
                param=slot.filled(piece.param),
                grad=slot.filled(piece.grad),
                exp_avg=slot.filled(piece.exp_avg),
                exp_avg_sq=slot.filled(piece.exp_avg_sq),
                compute=None,  # cast below, padding included
                outputs=None,  # what came up may be written over
            )
            is_up = up_lane.record()
        self._going_up.append(is_up)
        compute = piece.compute
        with self._update_lane.resume():
            is_up.wait()
            changed = None if piece.change_grad is None else slot.take(piece.numel, piece.changed_grad_dtype)
            above.run(changed_grad=changed, scratch=self._scratch)
            if compute is not None:
                near = compute if piece.is_compute_on_device else slot.take(compute.numel(), compute.dtype)
                near.copy_(above.param)
            is_updated = self._update_lane.record()
        with self._down_lane.resume():
            is_updated.wait()
            for target, source in zip(piece.written, above.written, strict=True):
                target.copy_(source, non_blocking=True)
            if compute is not None and not piece.is_compute_on_device:
                compute.copy_(near, non_blocking=True)
            return self._down_lane.record()


class _Slot:
    """Cuts one piece's device tensors out of its slot."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._used_bytes = 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        start = self._used_bytes
        self._used_bytes += -(-numel // ALIGN_NUMEL) * ALIGN_NUMEL * dtype.itemsize
        return self._memory[start : start + numel * dtype.itemsize].view(dtype)

    def filled(self, source: Tensor) -> Tensor:
        return self.take(source.numel(), source.dtype).copy_(source, non_blocking=True)

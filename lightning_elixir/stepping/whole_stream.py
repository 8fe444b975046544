"""Updates of whole parameters whose states live in host memory: the next ones come while one is updated.

[Note: matrices on their way] A matrix that Muon updates goes up with its gradient and its states, and comes
back: some 20 bytes for each element, which takes about as long as its update. So two lanes work beside the compute
stream: one parameter goes up, one is updated, one comes down. What goes up lies in slots, taken before the first and
given back after the last, each as large as the largest needs. Smaller ones share a slot, one after the other, until it
is full: if each had its own, the bus would stand still behind four small ones. A slot is filled again when all in it
have come back, for which the host waits, so nothing that a lane still reads is overwritten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_elixir.core.device import Device, Event
from lightning_elixir.plan.packing import round_up
from lightning_elixir.plan.types import ALIGN_NUMEL


@dataclass(frozen=True)
class HostUpdate:
    """The update of one parameter, on the host."""

    value: Tensor
    """1-D, `[numel]`; written."""
    grad: Tensor
    """As `value`, perhaps of another dtype."""
    target: Tensor | None
    """The parameter in the compute dtype, where `value` is a master: 1-D, on either side; written."""
    states: Mapping[str, Any]
    """From earlier steps."""
    step: Callable[[Tensor, Tensor, dict[str, Any]], Mapping[str, Any]]
    """Gets value, gradient and states on the device; updates the value in place, and returns the states."""
    keep: Callable[[Mapping[str, Any]], None]
    """Copies new states to where they live."""

    @property
    def slot_bytes(self) -> int:
        """Device memory of what goes up, and of the new parameter that comes down."""
        tensors = (self.value, self.grad, _tensor(self.target), *map(_tensor, self.states.values()))
        return sum(_aligned(tensor.nbytes) for tensor in tensors if tensor.dim())


class WholeStream:
    """Carries out `HostUpdate`s.

    Args:
        device: The compute device. On a CPU, slots are host memory and everything is a synchronous copy.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._up_lane, self._down_lane = device.new_lane(), device.new_lane()
        self._slots: deque[_Slot] = deque()  # there while updates run; the last one is being filled
        self._is_finished = True

    @property
    def is_open(self) -> bool:
        """Whether there is memory for updates."""
        return bool(self._slots)

    def open(self, slot_bytes: int, num_slots: int) -> None:
        """Take the device memory, after all that the compute stream was given.

        Args:
            slot_bytes: The most of any update that follows.
            num_slots: How many pieces of so many.
        """
        place = self._device.torch_device
        memories = [torch.empty(slot_bytes, dtype=torch.uint8, device=place) for _ in range(num_slots)]
        self._slots = deque(_Slot(memory) for memory in memories)
        for lane in (self._up_lane, self._down_lane):
            with lane.issue():  # what used this memory before is done
                pass

    def issue(self, update: HostUpdate) -> None:
        """Queue an update, after those issued before; waits while the slots are full."""
        self._is_finished = False
        slot = self._slots[-1]
        if slot.free_bytes < update.slot_bytes:
            slot = self._slots.popleft()
            slot.empty()
            self._slots.append(slot)
        with self._up_lane.resume():
            value, grad = slot.filled(update.value), slot.filled(update.grad)
            near = {k: slot.filled(v) if _tensor(v).dim() else v for k, v in update.states.items()}
            is_up = self._up_lane.record()
        is_up.wait()
        states = update.step(value, grad, near)
        target = update.target
        cast = None if target is None else slot.room_for(target).copy_(value)
        is_updated = self._device.compute_event()
        with self._down_lane.resume():
            is_updated.wait()
            update.value.copy_(value, non_blocking=True)
            if target is not None and cast is not None:
                target.copy_(cast, non_blocking=True)
            update.keep(states)
            slot.hold(self._down_lane.record(), map(_tensor, states.values()))

    def finish(self) -> None:
        """Wait until the host has all results."""
        for slot in self._slots:
            slot.empty()
        self._is_finished = True

    def close(self) -> None:
        """Give the device memory back."""
        if not self._is_finished:  # an error came between
            self._device.synchronize()
            self._is_finished = True
        self._slots.clear()


_NOTHING = torch.empty(())


def _tensor(value: Any) -> Tensor:
    """The value, if it is a tensor; a scalar for all others."""
    return value if isinstance(value, Tensor) else _NOTHING


def _aligned(nbytes: int) -> int:
    return round_up(nbytes, ALIGN_NUMEL)


class _Slot:
    """Memory of updates on their way, which lie there one after the other."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory  # 1-D, uint8
        self._used_bytes = 0
        self._last_end: Event | None = None
        self._read: list[Tensor] = []  # by the down lane, until then

    @property
    def free_bytes(self) -> int:
        return self._memory.nbytes - self._used_bytes

    def filled(self, source: Tensor) -> Tensor:
        """A copy, dense as the source is."""
        return self.room_for(source).copy_(source, non_blocking=True)

    def room_for(self, like: Tensor) -> Tensor:
        """An uninitialised tensor of this shape, strides and dtype."""
        start = self._used_bytes
        self._used_bytes += _aligned(like.nbytes)
        flat = self._memory[start : start + like.nbytes].view(like.dtype)
        return flat.as_strided(like.shape, like.stride())

    def hold(self, end: Event, read: Iterable[Tensor]) -> None:
        """One more update in it is over at `end`; the down lane reads `read` until then."""
        self._last_end = end  # the lane does one after the other
        self._read += read

    def empty(self) -> None:
        """Wait until all in it are over."""
        if self._last_end is not None:
            self._last_end.synchronize()
        self._used_bytes, self._last_end = 0, None
        self._read.clear()

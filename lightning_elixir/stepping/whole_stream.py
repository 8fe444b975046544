"""Updates of whole parameters whose states live in host memory: the next one comes while one is updated.

[Note: matrices on their way] A matrix that Muon updates goes up with its gradient and its states, and comes
back: some 20 bytes for each element, which takes about as long as its update. So two lanes work beside the compute
stream: one parameter goes up, one is updated, one comes down. What goes up lies in one of three slots, taken before the
first and given back after the last; a slot is filled again when its parameter has come back, for which the host waits.
So it is at most three parameters ahead, and nothing that a lane still reads is freed. (With two slots, nothing could go
up while one is updated and another comes down.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_elixir.core.device import Device, Event
from lightning_elixir.plan.packing import round_up
from lightning_elixir.plan.types import ALIGN_NUMEL

NUM_SLOTS = 3


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
        """Device memory of what goes up."""
        return sum(_aligned(t.nbytes) for t in (self.value, self.grad, *map(_tensor, self.states.values())) if t.dim())


class WholeStream:
    """Carries out `HostUpdate`s.

    Args:
        device: The compute device. On a CPU, slots are host memory and everything is a synchronous copy.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._up_lane, self._down_lane = device.new_lane(), device.new_lane()
        self._slots: list[Tensor] = []  # uint8; there while updates run
        self._num_issued = 0
        self._under_way: deque[tuple[Event, tuple[Tensor, ...]]] = deque()  # ends, and what the down lane reads

    @property
    def is_open(self) -> bool:
        """Whether there is memory for updates."""
        return bool(self._slots)

    def open(self, slot_bytes: int) -> None:
        """Take the device memory, after all that the compute stream was given.

        Args:
            slot_bytes: The most of any update that follows.
        """
        place = self._device.torch_device
        self._slots = [torch.empty(slot_bytes, dtype=torch.uint8, device=place) for _ in range(NUM_SLOTS)]
        for lane in (self._up_lane, self._down_lane):
            with lane.issue():  # what used this memory before is done
                pass

    def issue(self, update: HostUpdate) -> None:
        """Queue an update, after those issued before; waits while the slots are full."""
        while len(self._under_way) >= NUM_SLOTS:
            self._under_way.popleft()[0].synchronize()
        slot = _Slot(self._slots[self._num_issued % NUM_SLOTS])
        self._num_issued += 1
        with self._up_lane.resume():
            value, grad = slot.filled(update.value), slot.filled(update.grad)
            near = {k: slot.filled(v) if _tensor(v).dim() else v for k, v in update.states.items()}
            is_up = self._up_lane.record()
        is_up.wait()
        states = update.step(value, grad, near)
        target = update.target
        cast = None if target is None else value.to(target.dtype)
        is_updated = self._device.compute_event()
        with self._down_lane.resume():
            is_updated.wait()
            update.value.copy_(value, non_blocking=True)
            if target is not None and cast is not None:
                target.copy_(cast, non_blocking=True)
            update.keep(states)
            read = [*map(_tensor, states.values()), *([] if cast is None else [cast])]
            self._under_way.append((self._down_lane.record(), tuple(read)))

    def finish(self) -> None:
        """Wait until the host has all results."""
        while self._under_way:
            self._under_way.popleft()[0].synchronize()

    def close(self) -> None:
        """Give the device memory back."""
        if self._under_way:  # an error came between
            self._device.synchronize()
            self._under_way.clear()
        self._slots = []


_NOTHING = torch.empty(())


def _tensor(value: Any) -> Tensor:
    """The value, if it is a tensor; a scalar for all others."""
    return value if isinstance(value, Tensor) else _NOTHING


def _aligned(nbytes: int) -> int:
    return round_up(nbytes, ALIGN_NUMEL)


class _Slot:
    """Cuts the device tensors of one update out of its slot."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._used_bytes = 0

    def filled(self, source: Tensor) -> Tensor:
        """A copy, dense as the source is."""
        start = self._used_bytes
        self._used_bytes += _aligned(source.nbytes)
        flat = self._memory[start : start + source.nbytes].view(source.dtype)
        return flat.as_strided(source.shape, source.stride()).copy_(source, non_blocking=True)

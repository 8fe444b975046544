"""Sums of gradients in host memory, made by a thread while backward goes on.

[Note: sums beside backward] A gradient that is to be added to one in host memory goes down into a page-locked staging
buffer, on the lane, and a thread adds it from there. Only the next gradient that finds no free buffer, and what reads
the sum, wait for that: a `TaskEvent` stands for it where the end of a plain copy would. Additions to one sum come in
the order of the backwards, so its bits do not depend on how fast the thread is. An addition that has failed fails all
later ones to the same sum, until the gradient is dropped.

Where parameters are on a disk, gradients are beside them: they all go that way, a sum is read, added to and written
again, and backward waits where all buffers are on their way.

There are `STAGING_BUFFERS` staging buffers (fewer where fewer chunks have states on the host), each as large as the
largest shard in the gradient's dtype, made when first needed. What drops gradients (`zero_grad`, a backward that
failed) waits for their sums as well, since the memory comes to others.

Where several backwards come before a step (`Landing.expect_accumulation`, or an earlier step had them), the first
gradient goes the same way, widened, and the sum's memory stays from step to step. Otherwise the first one lands in 16
bits, over which an update can write new values, and the second backward exchanges that for a sum, once. Where the step
is known to come next (`Landing.step_next`), gradients land in 16 bits whatever came before; with spare states they
may land in sums as well, and an update that has begun waits for its sum. Further gradients of a chunk in one backward
are added in place, in their own dtype, also to a sum that holds nothing but that backward's: as autograd would. On the
GPU tier sums are made on the reduce lane. In host memory the compiled kernel adds, without the GIL, and with as
many threads as torch has but for two, which launch and copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lightning_elixir.core.device import Device, Event, working_on
from lightning_elixir.core.labels import label
from lightning_elixir.core.worker import Task, TaskEvent, Worker
from lightning_elixir.optim.gradient_sums import Addition, add_to_sum
from lightning_elixir.storage.nvme import ChunkStates, aligned


@dataclass(eq=False)
class _Slot:
    buffer: Tensor  # 1-D, uint8, host memory
    task: Task | None = None  # the last addition from it


class HostSums:
    """The way of gradients from the device to sums in host memory.

    Args:
        device: Where gradients come from.
        num_buffers: Gradients that may be on their way.
        buffer_bytes: Of the largest.
    """

    def __init__(self, device: Device, num_buffers: int, buffer_bytes: int) -> None:
        self._device = device
        self._num_buffers = num_buffers
        self._buffer_bytes = buffer_bytes
        self._slots: list[_Slot] = []  # the one that was taken first comes first; made when first needed
        self._worker = Worker("elixir-gradients", context=partial(working_on, device.torch_device))

    def submit(self, grad: Tensor, total: Tensor, addition: Addition, earlier: Event | None) -> tuple[Event, TaskEvent]:
        """Have a gradient brought to a sum. On the reduce lane. Waits for a buffer.

        Args:
            grad: 1-D, on the device, there for what the lane is given now.
            total: Host memory, 1-D, same numel. Copies of the lane to it may be under way; nothing else may.
            addition: How.
            earlier: What `submit` returned for this sum last, if it may be under way or have failed.

        Returns:
            When the device has sent the gradient, and when it is in the sum.
        """
        return self._submit(grad, lambda staged, _: add_up(total, staged, addition), earlier)

    def submit_to_disk(
        self,
        grad: Tensor,
        on_disk: ChunkStates,
        dtypes: tuple[torch.dtype | None, torch.dtype],
        addition: Addition,
        earlier: Event | None,
    ) -> tuple[Event, TaskEvent]:
        """As `submit`, for a sum that is on a disk.

        Args:
            grad: As there.
            on_disk: Where the sum is.
            dtypes: In which it is there (None: there is none yet), and in which it shall be.
            addition: How.
            earlier: As there.
        """
        return self._submit(grad, partial(_store, on_disk, dtypes, addition), earlier)

    def _submit(
        self, grad: Tensor, work: Callable[[Tensor, Tensor], None], earlier: Event | None
    ) -> tuple[Event, TaskEvent]:
        """`work` gets the gradient in host memory, and the whole blocks of bytes that it begins."""
        slot = self._free_slot()
        staged = slot.buffer[: grad.nbytes].view(grad.dtype)
        staged.copy_(grad, non_blocking=True)
        sent = self._device.reduce_lane.record()
        after = earlier.task if isinstance(earlier, TaskEvent) else None
        blocks = slot.buffer[: aligned(grad.nbytes)]
        slot.task = self._worker.submit(partial(work, staged, blocks), after=after, event=sent)
        return sent, TaskEvent(slot.task)

    def held_bytes(self) -> int:
        """Host memory that the buffers take."""
        return sum(slot.buffer.nbytes for slot in self._slots)

    def rest(self) -> None:
        """Do what is left, and end the thread until there is more to add."""
        self._worker.rest()

    def close(self) -> None:
        """Do what is left, end the thread and free the buffers, with what has failed."""
        self._worker.close()
        self._slots.clear()

    def _free_slot(self) -> _Slot:
        if not self._slots:
            buffers = [self._device.host_zeros(self._buffer_bytes, torch.uint8) for _ in range(self._num_buffers)]
            self._slots = [_Slot(buffer) for buffer in buffers]
        slot = next((s for s in self._slots if s.task is None or s.task.is_over()), self._slots[0])
        if slot.task is not None:
            slot.task.join()
        self._slots.remove(slot)
        self._slots.append(slot)
        return slot


def _store(
    on_disk: ChunkStates,
    dtypes: tuple[torch.dtype | None, torch.dtype],
    addition: Addition,
    grad: Tensor,
    blocks: Tensor,
) -> None:
    before, after = dtypes
    if before is None and grad.dtype == after:
        on_disk.write_grad_blocks(blocks, grad.nbytes)
        return
    total = (
        torch.empty(grad.numel(), dtype=after, device="cpu") if before is None else on_disk.read_grad(before).to(after)
    )
    add_up(total, grad, addition)
    on_disk.write_grad(total)


def add_up(total: Tensor, grad: Tensor, addition: Addition) -> None:
    """Bring a gradient to a sum, here and now."""
    with label("add gradients"):
        add_to_sum(total, grad, addition)

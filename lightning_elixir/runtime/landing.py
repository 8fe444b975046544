"""Where reduced gradients go: to the gradient shards, on the device, in host memory or on NVMe.

How they are added up in host memory and on NVMe is told in `runtime/accumulation.py` (Note: sums beside backward).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_elixir.core.device import Event
from lightning_elixir.core.host_memory import Extent
from lightning_elixir.core.worker import TaskEvent
from lightning_elixir.errors import StateError, StorageError
from lightning_elixir.optim.gradient_sums import Addition
from lightning_elixir.plan.memory import grad_staging, has_params_on_nvme
from lightning_elixir.plan.types import Tier
from lightning_elixir.runtime.accumulation import HostSums, add_up
from lightning_elixir.runtime.chunk import Chunk
from lightning_elixir.runtime.transport import Transport
from lightning_elixir.storage.nvme import aligned


class Landing:
    """The way of reduced gradients to the gradient shards, where they are added to what is there.

    Args:
        transport: What it works with.
        chunks: All chunks.
        reduce_dtype: Of what comes; None: the compute dtype.
    """

    def __init__(self, transport: Transport, chunks: Sequence[Chunk], reduce_dtype: torch.dtype | None) -> None:
        self._chunks = chunks
        self._device = transport.device
        self._store = transport.store
        self._reduce_dtype = reduce_dtype
        itemsize = None if reduce_dtype is None else reduce_dtype.itemsize
        num_buffers, nbytes = grad_staging(
            (c.spec for c in chunks), lambda c: transport.groups.of(c).world_size, itemsize
        )
        if any(has_params_on_nvme(c.spec) for c in chunks):
            nbytes = aligned(nbytes)  # the disk takes whole blocks
        self._sums = HostSums(transport.device, num_buffers, nbytes)
        # Chunk id -> when its gradient is in host memory, added up, if that has not been waited for
        self._downloads: dict[int, Event] = {}
        self._single: set[int] = set()  # chunks with a sum in fp32 that holds the gradients of one backward alone
        self.accumulates = False
        """Whether several backwards come before a step, as was said or seen: gradients in host memory are then kept in
        fp32 from the first on, so that its memory is the same in every step."""
        self.is_accumulation_expected = False
        """Whether it was said."""
        self.is_step_next = False
        """See `step_next`."""

    # How many backwards come before a step

    def expect_accumulation(self, is_expected: bool) -> None:
        """Say whether several backwards come before each step: then host memory for their sums is taken in the first
        backward, and no update begins inside it. Otherwise, or without a word, that is seen in the second one."""
        self.accumulates = self.is_accumulation_expected = is_expected

    @contextmanager
    def step_next(self) -> Iterator[None]:
        """Inside, no other backward comes before the step, as the caller promises: what has come before decides nothing
        then about how gradients land, and new values may be written over them."""
        self.is_step_next = True
        try:
            yield
        finally:
            self.is_step_next = False

    def take_over(self, earlier: Landing) -> None:
        """Go on with what an earlier one over the same chunks has learned."""
        self.accumulates = earlier.accumulates
        self.is_accumulation_expected = earlier.is_accumulation_expected

    def reserve(self, chunk: Chunk) -> None:
        """Take the host memory now that the chunk's gradients are going to land in."""
        self._store.reserve_grad(chunk.spec, self._first_dtype(chunk))

    def to_reserve(self, chunk: Chunk) -> list[Extent]:
        """What `reserve` takes."""
        dtype = self._first_dtype(chunk)
        if self._store.has_grad_memory(chunk.spec, dtype):
            return []
        return [Extent(self._store.optim_numel(chunk.spec), dtype)]

    def _first_dtype(self, chunk: Chunk) -> torch.dtype:
        """In which the first gradient lands in host memory."""
        dtype = self._reduce_dtype or chunk.dtype
        return torch.promote_types(torch.float32, dtype) if self.accumulates else dtype

    # What is under way

    def finish(self) -> None:
        """Make the host wait until nothing writes to gradient shards in its memory; says nothing of failed sums."""
        for event in self._downloads.values():
            _finish(event)

    def wait_for_all(self) -> None:
        """Make the host wait until the gradient shards in its memory are there: streams wait for each other only."""
        for chunk_id in list(self._downloads):
            self.wait(chunk_id)

    def wait(self, chunk_id: int) -> None:
        """As `wait_for_all`, for one chunk.

        Raises:
            StateError: Adding up has failed, and the gradient has not been dropped since.
        """
        event = self._downloads.get(chunk_id)
        if event is None:
            return
        try:
            event.synchronize()
        except Exception as error:
            if not isinstance(event, TaskEvent):
                raise
            if isinstance(error, StorageError):
                raise  # what was there on the disk before is lost as well
            raise StateError(
                f"adding up the gradients of {self._chunks[chunk_id].spec} in host memory has failed"
                f" ({type(error).__name__}: {error}): call zero_grad() and begin again with the first micro-batch"
            ) from error
        del self._downloads[chunk_id]

    def end_of(self, chunk_id: int) -> Event | None:
        """When the chunk's gradient is in host memory, added up; this waits for it as well."""
        return self._downloads.get(chunk_id)

    def take(self, chunk_id: int) -> Event | None:
        """As `end_of`, but from then on the caller sees to waiting for it, not this."""
        return self._downloads.pop(chunk_id, None)

    def drop(self, chunk_ids: Collection[int]) -> None:
        """Drop the gradients of these chunks."""
        for chunk_id in chunk_ids:  # what is under way writes to memory that others use next
            event = self.take(chunk_id)
            if event is not None:
                _finish(event)
        self._store.clear_grads(chunk_ids)
        self._single.difference_update(chunk_ids)

    def staging_bytes_held(self) -> int:
        """Host memory of the buffers through which gradients come down to be added up."""
        return self._sums.held_bytes()

    def rest(self) -> None:
        """End the thread that adds gradients up until there is more to add."""
        self._sums.rest()

    def close(self) -> None:
        """End the thread that adds gradients up. None may follow."""
        self._sums.close()

    # The three tiers

    def land(self, chunk: Chunk, result: Tensor, *, is_late: bool) -> Event:
        """Bring a reduced gradient to its tier and add it to what is there. On the reduce lane.

        Args:
            result: 1-D, `[numel of the gradient shard]`, on the device.
            is_late: It is added to what the same backward has brought.

        Returns:
            When the device has no use for `result` any more.
        """
        if chunk.spec.optim_tier is Tier.GPU:
            self._land_on_device(chunk, result, is_late)
            return self._device.reduce_lane.record()
        sent, self._downloads[chunk.id] = self._land_on_host(chunk, result, is_late)
        return sent

    def _land_on_device(self, chunk: Chunk, result: Tensor, is_late: bool) -> None:
        """Add to earlier gradients: in fp32 across backwards; within one backward as autograd would, in its dtype."""
        shard = self._store[chunk.id]
        total = shard.grad
        if total is None:
            shard.grad = result
            return
        if is_late and total.dtype == result.dtype:
            total.add_(result)
            return
        wide = torch.promote_types(torch.float32, total.dtype)
        if total.dtype != wide:
            earlier = total
            total = self._store.set_grad(chunk.spec, wide)
            total.copy_(earlier)
        total.add_(result)

    def _land_on_host(self, chunk: Chunk, result: Tensor, is_late: bool) -> tuple[Event, Event]:
        """As `_land_on_device`. Returns when the device has sent the result, and when the gradient is there."""
        if self._store[chunk.id].is_param_on_disk:
            return self._land_on_disk(chunk, result, is_late)
        total = self._store[chunk.id].grad
        wide = torch.promote_types(torch.float32, result.dtype)
        if total is None:
            if result.dtype == wide or not self.accumulates or self.is_step_next:
                self._store.set_grad(chunk.spec, result.dtype).copy_(result, non_blocking=True)
                sent = self._device.reduce_lane.record()
                return sent, sent
            self._single.add(chunk.id)
            return self._sums.submit(result, self._store.set_grad(chunk.spec, wide), Addition.PUT, None)
        if is_late and (total.dtype == result.dtype or chunk.id in self._single):
            self.wait(chunk.id)
            add_up(total, result.to(total.device), _late_addition(total.dtype, result.dtype))
            sent = self._device.reduce_lane.record()
            return sent, sent
        if not is_late:
            self.accumulates = True
        if total.dtype != wide:
            total = self.widened(chunk, total, wide)
        self._single.discard(chunk.id)
        return self._sums.submit(result, total, Addition.ADD, self._downloads.get(chunk.id))

    def _land_on_disk(self, chunk: Chunk, result: Tensor, is_late: bool) -> tuple[Event, Event]:
        """As `_land_on_host`, with the same numbers: host memory is only passed through."""
        shard = self._store[chunk.id]
        if shard.on_disk is None:
            raise RuntimeError(f"{chunk.spec} has no place on the disk")
        earlier = None if shard.grad is None else shard.grad.dtype
        after, addition = torch.promote_types(torch.float32, result.dtype), Addition.ADD
        if earlier is None:
            addition = Addition.PUT
            if not self.accumulates or self.is_step_next or result.dtype == after:
                after = result.dtype
            else:
                self._single.add(chunk.id)
        elif is_late and (earlier == result.dtype or chunk.id in self._single):
            addition = _late_addition(earlier, result.dtype)
            after = earlier
        else:
            self.accumulates = self.accumulates or not is_late
            self._single.discard(chunk.id)
        before = self._downloads.get(chunk.id)
        self._store.set_grad(chunk.spec, after)
        return self._sums.submit_to_disk(result, shard.on_disk, (earlier, after), addition, before)

    def widened(self, chunk: Chunk, grad: Tensor, dtype: torch.dtype) -> Tensor:
        """A gradient shard in host memory with the same values in another dtype."""
        self.wait(chunk.id)
        total = self._store.set_grad(chunk.spec, dtype)
        total.copy_(grad)
        self._store.restore_param(self._store[chunk.id])
        return total

    def note_rewritten(self, chunk_id: int) -> None:
        """The gradient shard has been written by others: it may hold more than one backward's, or other bits."""
        self._single.discard(chunk_id)


def _finish(event: Event) -> None:
    """Make the host wait for what writes to host memory, whether or not it fails."""
    if isinstance(event, TaskEvent):
        event.task.join()
    else:
        event.synchronize()


def _late_addition(total: torch.dtype, grad: torch.dtype) -> Addition:
    """What a further gradient of one backward is to the sum."""
    return Addition.ADD if total == grad else Addition.ADD_ROUNDED

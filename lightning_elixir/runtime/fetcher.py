"""Shard -> replica: carries out what the rCache decided."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_elixir.core.device import Event, working_on
from lightning_elixir.core.labels import label
from lightning_elixir.core.worker import LateEvent, Task
from lightning_elixir.errors import StateError
from lightning_elixir.plan.types import Tier
from lightning_elixir.runtime.chunk import Chunk, ChunkState
from lightning_elixir.runtime.param_reads import ParamReads
from lightning_elixir.runtime.transport import Transport
from lightning_elixir.storage.shards import Shard


def _in_memory(shard: Shard) -> Tensor:
    """What replicas are made from: the compute shard, or a master on the device."""
    values = shard.master if shard.param is None else shard.param
    if values is None:
        raise RuntimeError("a chunk whose parameters are not in memory was to be fetched from there")
    return values


class Fetcher:
    """Fills replicas from shards.

    Args:
        transport: What it works with.
        reads: Of parameters that are on a disk.
    """

    def __init__(self, transport: Transport, reads: ParamReads) -> None:
        self._reads = reads
        self._device = transport.device
        self._groups = transport.groups
        self._store = transport.store
        self._is_distributed = transport.is_distributed
        self._moved = transport.moved

    def is_collective(self, chunk: Chunk) -> bool:
        """Whether fetching needs the other ranks."""
        if self._groups.of(chunk.spec).world_size == 1:
            return False
        return self._is_distributed or self._store[chunk.id].is_param_outdated

    def would_wait(self, chunk: Chunk) -> bool:
        """Whether fetching it now would make the host wait for its update."""
        update = self._store[chunk.id].update
        return update is not None and not update.is_over() and self.is_collective(chunk)

    def fetch(self, chunk: Chunk) -> None:
        """Allocate the replica and start filling it, or have that done as soon as the chunk's update is over. If
        collective, every rank fetches or serves the chunk now, and so waits for its update. Where it fails, the chunk
        stays released."""
        try:
            self._fetch(chunk)
        except BaseException:
            chunk.forget_fetch()
            raise

    def _fetch(self, chunk: Chunk) -> None:
        shard = self._source(chunk)
        is_alone = not self.is_collective(chunk)
        if is_alone and shard.is_param_on_disk:
            if shard.update is not None and shard.update.is_over():
                self._store.settle(chunk.id)
            chunk.allocate()
            chunk.ready = self._fill_from_disk(chunk, shard)
        elif not is_alone or shard.update is None or shard.update.is_over():
            shard = self._store.settle(chunk.id)
            chunk.allocate()
            with self._device.fetch_lane.issue(), label("fetch", chunk.id):
                self._fill(chunk, chunk.flat, shard, is_alone=is_alone)
                chunk.ready = self._device.fetch_lane.record()
        else:
            chunk.allocate()
            chunk.ready = self._fill_later(chunk, shard, shard.update)
        chunk.to_state(ChunkState.RESIDENT)

    def _fill_later(self, chunk: Chunk, shard: Shard, update: Task) -> Event:
        """Fill the replica, without its peers, when `update` is over; on whatever thread finds that out."""
        device, is_allocated = self._device, self._device.compute_event()
        if chunk.spec.param_tier is not Tier.GPU:
            self._moved.h2d += chunk.spec.nbytes

        def issue() -> Event:
            with working_on(device.torch_device), device.fetch_lane.resume(), label("fetch", chunk.id):
                is_allocated.wait()
                chunk.flat.copy_(_in_memory(shard), non_blocking=True)
                return device.fetch_lane.record()

        return LateEvent(update, issue)

    def _fill_from_disk(self, chunk: Chunk, shard: Shard) -> Event:
        """As `_fill_later`, once the parameters have been read, which begins when the chunk's update is over."""
        device, is_allocated = self._device, self._device.compute_event()
        self._moved.h2d += chunk.spec.nbytes
        if shard.on_disk is None:
            raise RuntimeError(f"{chunk.spec} has no place on the disk")

        def send(values: Tensor) -> Event:
            with working_on(device.torch_device), device.fetch_lane.resume(), label("fetch", chunk.id):
                is_allocated.wait()
                chunk.flat.copy_(values, non_blocking=True)
                return device.fetch_lane.record()

        return self._reads.submit(shard.on_disk, send, shard.update)

    def held_bytes(self) -> int:
        """Host memory of the buffers through which parameters come from a disk."""
        return self._reads.held_bytes()

    def rest(self) -> None:
        """End the threads that read parameters until there is more to read."""
        self._reads.rest()

    def close(self) -> None:
        """End the threads that read parameters; all that was begun has been waited for."""
        self._reads.close()

    def serve(self, chunk: Chunk) -> None:
        """Take part in the peers' fetch of a chunk that this rank does not need."""
        self._source(chunk)
        shard = self._store.settle(chunk.id)
        scratch = torch.empty(chunk.spec.numel, dtype=chunk.dtype, device=self._device.torch_device)
        with self._device.fetch_lane.issue():
            self._fill(chunk, scratch, shard, is_alone=False)
            event = self._device.fetch_lane.record()
        event.wait()  # the scratch memory is reused on the compute stream

    def gather_in_place(self, chunk: Chunk) -> None:
        """Bring a persistent replica's other slices up to date. Collective."""
        with self._device.fetch_lane.issue():
            self._groups.of(chunk.spec).all_gather(chunk.flat)
            chunk.ready = self._device.fetch_lane.record()
        self._moved.gathered += chunk.spec.nbytes
        chunk.to_state(ChunkState.RESIDENT)

    def _source(self, chunk: Chunk) -> Shard:
        shard = self._store[chunk.id]
        has_source = shard.param is not None or shard.master is not None or shard.is_param_on_disk
        if chunk.spec.is_persistent or not has_source:
            raise StateError(f"{chunk.spec} has no shard to fetch from: its replica was the only copy")
        return shard

    def _fill(self, chunk: Chunk, flat: Tensor, shard: Shard, *, is_alone: bool) -> None:
        param = shard.read_param()  # with its peers, a rank reads when they have met
        groups, spec = self._groups, chunk.spec
        is_upload = spec.param_tier is not Tier.GPU
        if param is None:
            param = _in_memory(shard)
        elif shard.is_param_overwritten and shard.master is not None:
            param = shard.master.to(chunk.dtype)  # the same bits; rare, so from memory that is not page-locked
        if is_alone:
            flat.copy_(param, non_blocking=True)
            self._moved.h2d += param.nbytes if is_upload else 0
            return
        mine = groups.mine(spec, flat)
        own = param if self._is_distributed else groups.mine(spec, param)
        mine.copy_(own, non_blocking=True)
        self._moved.h2d += own.nbytes if is_upload else 0
        groups.of(spec).all_gather(flat)
        self._moved.gathered += spec.nbytes
        if not self._is_distributed:
            param.copy_(flat, non_blocking=True)
            shard.is_param_outdated = False
            self._moved.d2h += param.nbytes if is_upload else 0

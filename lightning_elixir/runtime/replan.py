"""From one placement to another of the same chunk layout, chunk by chunk.

A chunk moves as a whole, shard and optimizer states, and what it leaves is free before the next one moves, but for host
memory that gradients land in before and after. The order (`plan/moving.py`) is one in which neither the device nor the
host holds more than the larger of both placements and a chunk. Moments and masters go to a disk, from it, and from file
to file through one piece of memory. The file stays where all states that shall be there have their places in it;
otherwise another one is opened before anything moves, and for a moment both exist, so `auto` plans with half of the
free space.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_elixir.core.device import release_cached_memory, working_on
from lightning_elixir.core.host_memory import Extent, bytes_of
from lightning_elixir.core.worker import Task, Worker
from lightning_elixir.errors import PlanError
from lightning_elixir.plan.memory import has_params_on_nvme, problem_of_places
from lightning_elixir.plan.moving import order_of_moves
from lightning_elixir.plan.types import ChunkSpec, Plan, Tier
from lightning_elixir.runtime.build import CHUNKS_AHEAD, dtype_of, storage_bytes
from lightning_elixir.runtime.chunk import Chunk, ChunkState
from lightning_elixir.runtime.whole import own_values
from lightning_elixir.storage.nvme import MASTER
from lightning_elixir.storage.shards import ShardStore

if TYPE_CHECKING:
    from lightning_elixir.runtime.engine import Engine

log = logging.getLogger(__name__)

_NUM_MOMENTS = 2  # of Adam
# What a chunk takes of the host's memory, or leaves there, is made or freed by the way, if it is less.
_WORTH_A_THREAD_BYTES = 16 * 2**20


def check_layout(old: Plan, new: Plan) -> None:
    """Raises `PlanError` unless both plans have the same chunks and the same kind of parameter shards, and the new one
    can be obeyed."""
    if old.layout_fingerprint() != new.layout_fingerprint():
        raise PlanError(
            "the new plan has another chunk layout: a running engine can only move between placements of its own chunks"
        )
    if old.is_storage_distributed != new.is_storage_distributed:
        raise PlanError("enable_distributed_storage cannot change while an engine runs: close it and build a new one")
    problem = problem_of_places(new)
    if problem is not None:
        raise PlanError(problem)


def move_chunks(
    engine: Engine,
    plan: Plan,
    before: ShardStore,
    followers: Sequence[Callable[[Chunk], None]],
    most_kept_bytes: int = 0,
) -> None:
    """Move every chunk of `engine` to where `plan` wants it, out of `before` into the engine's store, and with it, by
    `followers`, what others keep of it, such as optimizer states. Collective; no replica may be in use, and no
    gradients wait.

    They go one by one, in an order in which neither the device nor the host need hold both placements: what leaves a
    memory makes room for what comes to it. It is the same on every rank, since some moves are collective.

    Args:
        most_kept_bytes: How much of the host memory that chunks leave, where none comes to it, stays for the next move.
    """
    kept = {c.id for c in engine.chunks if _keeps_grad_memory(c.spec, plan.all_chunks[c.id], plan)}
    before.drop_grad_buffers(but=kept)
    changes = [_change(engine, chunk.spec, plan.all_chunks[chunk.id]) for chunk in engine.chunks]
    order = order_of_moves(changes)
    # Where some leave host memory and others come to it, there may be no more of it than one move takes.
    is_coming, is_leaving = any(host > 0 for _, host in changes), any(host < 0 for _, host in changes)
    wanted = [_to_come(engine, engine.chunks[number], plan.all_chunks[number], before) for number in order]
    wanted = [e if bytes_of(e) >= _WORTH_A_THREAD_BYTES and not is_leaving else [] for e in wanted]
    engine.host_room.begin()
    left, unmapping = list[Tensor](), _Unmapping(engine.device.torch_device)
    for place in engine.host_memory.in_turn(wanted, CHUNKS_AHEAD):
        number = order[place]
        chunk = engine.chunks[number]
        engine.host_room.take(chunk.spec, max(0, changes[number][1]), plan, engine.host_bytes)
        on_host = [] if is_coming else _on_host(engine, chunk, before)
        with torch.no_grad():
            _move(engine, chunk, plan.all_chunks[chunk.id], plan, before)
        engine.store[chunk.id].grad_buffer = before[chunk.id].grad_buffer
        before.vacate(chunk.id)
        for follow in followers:
            follow(chunk)
        if most_kept_bytes:
            left += on_host
        elif sum(tensor.nbytes for tensor in on_host) >= _WORTH_A_THREAD_BYTES:
            engine.host_memory.free(on_host)  # of that, what is not in the new place as well
        del on_host
        chunk.free_released()  # what an optimizer steps over was a part of the replica until now
        if changes[number][0] < 0:
            unmapping.begin()
    unmapping.end()
    if left:
        engine.device.synchronize()  # which may still read it
    engine.host_memory.keep(left, most_kept_bytes)
    engine.host_memory.settle()  # and not more: what was made ahead for optimizer states waits for them


class _Unmapping:
    """Gives what chunks have left of a device's memory back, beside the copies of the next ones: it takes 0.3 s for 80
    GiB, a fifth of the copies.

    Args:
        device: The compute device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._worker = Worker("elixir-unmapping", context=partial(working_on, device))
        self._task: Task | None = None

    def begin(self) -> None:
        """Chunks have left, unless the last call's part is still under way: then it goes with the next one's. On a CPU
        nothing is kept."""
        if self._device.type != "cpu" and (self._task is None or self._task.is_over()):
            self._task = self._worker.submit(partial(_give_back, self._device))

    def end(self) -> None:
        """Wait for it; what is left is for the caller."""
        self._worker.rest()


def _give_back(device: torch.device) -> None:
    try:
        release_cached_memory(device, with_workspaces=False)
    except Exception:  # the move harms nothing by it, and gives all of it back at its end, where a failure is raised
        log.warning("device memory that chunks have left could not be given back during the move", exc_info=True)


def _to_come(engine: Engine, chunk: Chunk, spec: ChunkSpec, before: ShardStore) -> list[Extent]:
    """What the chunk is going to have in host memory and has not: shard and moments of Adam."""
    found: list[Extent] = []
    if spec.optim_tier is Tier.CPU and chunk.spec.optim_tier is not Tier.CPU:
        master, is_coming = engine.precision.master_of(spec), chunk.spec.optim_tier is Tier.GPU
        found += [] if master is None else [engine.store.master_extent(spec, master, is_coming=is_coming)]
        for states in engine.steps.optimizers.states:
            inner = states.inner.get(chunk.id)
            found += [] if inner is None else inner.moments_to_host(is_sent=spec.is_update_streamed)
    has_param = before[chunk.id].param is not None and chunk.spec.param_tier is Tier.CPU
    if spec.param_tier is Tier.CPU and not spec.is_persistent and not has_param:
        found.append(Extent(engine.store.param_numel(spec), dtype_of(spec)))
    return found


def _on_host(engine: Engine, chunk: Chunk, before: ShardStore) -> list[Tensor]:
    """What the chunk has in host memory."""
    shard = before[chunk.id]
    inner = [states.inner[chunk.id] for states in engine.steps.optimizers.states if chunk.id in states.inner]
    moments = [moment for one in inner for moment in one.moment_memory()]
    tensors = [shard.param, shard.master, shard.spare_master, shard.spare_param, *moments]
    return [t for t in tensors if t is not None and t.device.type == "cpu"]


def _keeps_grad_memory(old: ChunkSpec, new: ChunkSpec, plan: Plan) -> bool:
    """Whether the host memory that a chunk's gradients have landed in is where the next ones land: page-locked memory
    takes 0.3 s a GiB to make."""
    has_own = not (plan.grad_reuses_compute_shard and new.param_tier is Tier.CPU) and not has_params_on_nvme(new)
    return has_own and Tier.GPU not in (old.optim_tier, new.optim_tier)


def _change(engine: Engine, old: ChunkSpec, new: ChunkSpec) -> tuple[int, int]:
    """Bytes that a rank's device and host hold more with the chunk in its new place, if the optimizer is Adam: what
    states this rank really has does not matter, as it may differ from rank to rank."""
    device, host = (_bytes_on(engine, new, tier) - _bytes_on(engine, old, tier) for tier in (Tier.GPU, Tier.CPU))
    if old.has_spare_states and not new.has_spare_states:  # new ones come later, in a step
        host -= _spare_bytes(engine, old)
    return device, host


def _spare_bytes(engine: Engine, spec: ChunkSpec) -> int:
    master = engine.precision.master_of(spec)
    each = 0 if master is None else (1 + _NUM_MOMENTS) * master.itemsize + dtype_of(spec).itemsize
    return engine.groups.numel(spec) * each


def _bytes_on(engine: Engine, spec: ChunkSpec, tier: Tier) -> int:
    nbytes, shard_numel = 0, engine.groups.numel(spec)
    master = engine.precision.master_of(spec)
    if spec.requires_grad and spec.optim_tier is tier:
        nbytes += _NUM_MOMENTS * shard_numel * (master or dtype_of(spec)).itemsize
    if master is not None and spec.optim_tier is tier:
        nbytes += shard_numel * master.itemsize
    if spec.is_persistent:
        return nbytes + (storage_bytes(engine.plan, spec) if tier is Tier.GPU else 0)
    if spec.param_tier is tier and not engine.is_cast_from_master(spec):
        nbytes += (shard_numel if engine.plan.is_storage_distributed else spec.numel) * dtype_of(spec).itemsize
    return nbytes


def _move(engine: Engine, chunk: Chunk, spec: ChunkSpec, plan: Plan, before: ShardStore) -> None:
    old, store, groups = before[chunk.id], engine.store, engine.groups
    new = store.add(spec)
    # All values first: the replica may be their only copy, and stop being it.
    if spec.is_persistent and not chunk.is_usable:
        chunk.storage_bytes = storage_bytes(plan, spec)
        engine.active.fetcher.fetch(chunk)
        chunk.wait_ready()
    master_dtype = engine.precision.master_of(spec)
    if master_dtype is not None and (new.on_disk is None or new.on_disk != old.on_disk):
        if old.master is not None and chunk.spec.optim_tier is spec.optim_tier:
            new.master = old.master
        elif new.on_disk is not None and old.on_disk is not None and old.on_disk.has_master:
            before.settle(chunk.id)
            new.on_disk.copy_from(old.on_disk, MASTER)
        elif new.on_disk is not None:
            new.on_disk.write(MASTER, own_values(before, chunk, groups))
        else:
            source = own_values(before, chunk, groups)
            new.master = store.new_master(spec, master_dtype, is_coming=chunk.spec.optim_tier is Tier.GPU)
            if spec.optim_tier is Tier.GPU:
                engine.device.lock(source)
            new.master.copy_(source)
    if spec.has_spare_states:  # those of a chunk that gets them now are made in its step
        new.spare_master, new.spare_param = old.spare_master, old.spare_param
    if not spec.is_persistent and not store.is_cast_from_master(spec, master_dtype):
        numel = store.param_numel(spec)
        if old.param is not None and chunk.spec.param_tier is spec.param_tier:
            new.param = old.param
        elif not new.is_param_on_disk or new.on_disk != old.on_disk:
            param = old.read_param()
            if param is None and old.master is not None and not chunk.spec.is_persistent:
                param = old.master.to(chunk.dtype)
            whole = chunk.flat if param is None else param
            own = groups.mine(chunk.spec, whole) if whole.numel() != numel else whole
            if new.is_param_on_disk:
                new.keep_param(own)
            else:
                new.param = store.empty(numel, chunk.dtype, spec.param_tier).copy_(own)
        new.is_param_outdated = old.is_param_outdated
    chunk.spec = spec
    chunk.storage_bytes = storage_bytes(plan, spec)
    if not spec.is_persistent and chunk.state is not ChunkState.RELEASED:
        chunk.release()

"""All persistent bytes of this rank: compute shards, masters and gradient shards, by chunk.

Shards on the host are exactly sized anonymous maps, page-locked by registration, with huge pages asked for. Persistent
chunks on the GPU tier have no shard beside their replica, and others none beside a master there. Gradient shards on the
GPU come from the memory that activations leave, not from the pool of replicas, whose storages are all of one size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_elixir.core.device import Device
from lightning_elixir.core.host_memory import Extent, HostMemory
from lightning_elixir.core.worker import Task
from lightning_elixir.errors import ElixirError, StateError, StorageError
from lightning_elixir.plan.memory import is_cast_from_master, uses_nvme
from lightning_elixir.plan.types import DTYPE_BYTES, ChunkSpec, Tier
from lightning_elixir.storage.nvme import GRAD, MASTER, PARAM, ChunkStates, MappedMemory, StateFile


@dataclass
class Shard:
    """What this rank keeps of one chunk. Numel is that of a rank's slice of the chunk unless said otherwise."""

    param: Tensor | None = None
    """1-D, compute dtype, on the parameter tier. None where the replica itself is the shard (persistent chunks on the
    GPU tier), where replicas are cast from the master, and where it is on NVMe (`is_param_on_disk`). The whole chunk
    where storage is not distributed."""
    master: Tensor | None = None
    """1-D, master dtype, on the optimizer tier. None for frozen chunks, where the compute shard is the optimizer's own
    copy, and on NVMe."""
    on_disk: ChunkStates | None = None
    """Master and moments of chunks that have them on NVMe, perhaps parameters and gradients as well. They are read and
    written there."""
    grad: Tensor | None = None
    """1-D, on the optimizer tier (for NVMe in host memory): gradients reduced since the last step; in the reduce dtype
    after one backward, fp32 when more have been added, or, in host memory, when that is expected. On `meta` where
    parameters are on a disk: they are beside them (`read_grad`). None: no gradient yet."""
    grad_buffer: Tensor | None = None
    """Host memory that `grad` reuses from step to step (not on the GPU tier)."""
    spare_master: Tensor | None = None
    """As `master`: an update that may be taken back writes here (`ChunkSpec.has_spare_states`), and the two change
    roles when it is not."""
    spare_param: Tensor | None = None
    """1-D, compute dtype, on the host: receives the values of that update."""
    update: Task | None = None
    """The last update of this chunk, if it may still be under way: `param` and `master` hold the new values only when
    it is over. Before reading them, call `ShardStore.settle`, or wait for it in another way."""
    is_param_overwritten: bool = False
    """The gradient lies where `param` was (`Plan.grad_reuses_compute_shard`): that is `master`, cast."""
    is_param_outdated: bool = False
    """Storage not distributed: only this rank's slice of `param` has seen the last update."""

    @property
    def has_master(self) -> bool:
        """Whether there is one, wherever it is."""
        return self.master is not None or (self.on_disk is not None and self.on_disk.has_master)

    @property
    def is_param_on_disk(self) -> bool:
        """Whether the parameters are on NVMe, and gradients with them."""
        return self.on_disk is not None and self.on_disk.has_param

    def read_param(self) -> Tensor | None:
        """`param`, or a copy of it in host memory where it is on a disk; the chunk's update must be over.

        Raises:
            StorageError: It cannot be read.
        """
        if self.on_disk is not None and self.on_disk.has_param:
            return self.on_disk.read(self.on_disk.spec.values_part)
        return self.param

    def keep_param(self, param: Tensor) -> None:
        """What the parameters are from now on, if they are on a disk; a master of their dtype is kept by itself.

        Raises:
            StorageError: It cannot be written.
        """
        if self.on_disk is not None and self.on_disk.spec.has_own_values:
            self.on_disk.write(PARAM, param)

    def read_grad(self) -> Tensor | None:
        """`grad`, or a copy of it in host memory where it is on a disk; it must have landed.

        Raises:
            StorageError: It cannot be read.
        """
        if self.grad is not None and self.on_disk is not None and self.on_disk.has_param:
            return self.on_disk.read_grad(self.grad.dtype)
        return self.grad

    def keep_grad(self, grad: Tensor) -> None:
        """What `read_grad` has given was changed.

        Raises:
            StorageError: It cannot be written.
        """
        if self.on_disk is not None and self.on_disk.has_param:
            self.on_disk.write_grad(grad)

    def read_master(self) -> Tensor | None:
        """The master, or a copy of it in host memory where it is on a disk; the chunk's update must be over.

        Raises:
            StorageError: It cannot be read.
        """
        if self.on_disk is not None and self.on_disk.has_master:
            return self.on_disk.read(MASTER)
        return self.master

    def keep_master(self, master: Tensor) -> None:
        """What `read_master` has given was changed.

        Raises:
            StorageError: It cannot be written.
        """
        if self.on_disk is not None:
            self.on_disk.write(MASTER, master)


class ShardStore:
    """Owner of the shards.

    Args:
        device: The compute device.
        memory: Gives host memory.
        num_sharing: How many ranks share a chunk.
        is_distributed: False: parameter shards are whole on every rank.
        is_param_reused: Gradients land in the memory of the compute shard, where that lies beside a master on the host.
        states: Of the chunks that have them on NVMe.
    """

    def __init__(
        self,
        device: Device,
        memory: HostMemory,
        num_sharing: Callable[[ChunkSpec], int],
        is_distributed: bool,
        is_param_reused: bool = False,
        states: StateFile | None = None,
    ) -> None:
        self.states = states
        self.memory = memory
        self._device = device
        self._is_param_reused = is_param_reused
        self._num_sharing = num_sharing
        self._is_distributed = is_distributed
        self._shards: dict[int, Shard] = {}
        self._specs: dict[int, ChunkSpec] = {}

    def __getitem__(self, chunk_id: int) -> Shard:
        return self._shards[chunk_id]

    def add(self, spec: ChunkSpec) -> Shard:
        has_disk = self.states is not None and uses_nvme(spec)  # a file may have places that are not used any more
        shard = Shard(on_disk=self.states.of(spec.id) if has_disk and self.states is not None else None)
        self._shards[spec.id] = shard
        self._specs[spec.id] = spec
        return shard

    def param_numel(self, spec: ChunkSpec) -> int:
        return self.optim_numel(spec) if self._is_distributed else spec.numel

    def optim_numel(self, spec: ChunkSpec) -> int:
        return spec.numel // self._num_sharing(spec)

    def is_cast_from_master(self, spec: ChunkSpec, master: torch.dtype | None) -> bool:
        """Whether the chunk has no compute shard, as its replicas are made from the master.

        Args:
            master: Its dtype; None: there is none.
        """
        has_master, num_sharing = (
            master is not None and master.itemsize > DTYPE_BYTES[spec.dtype],
            self._num_sharing(spec),
        )
        return is_cast_from_master(spec, num_sharing, has_master=has_master, is_distributed=self._is_distributed)

    def empty(self, numel: int, dtype: torch.dtype, tier: Tier) -> Tensor:
        """1-D uninitialised tensor on `tier`; for NVMe one without memory, on `meta`."""
        if tier is Tier.GPU:
            return torch.empty(numel, dtype=dtype, device=self._device.torch_device)
        return self.zeros(numel, dtype, tier, is_overwritten=True)

    def zeros(
        self, numel: int, dtype: torch.dtype, tier: Tier, *, is_locked: bool = True, is_overwritten: bool = False
    ) -> Tensor:
        """As `empty`, zeros.

        Args:
            is_locked: Of host memory: as for `Device.host_zeros`.
            is_overwritten: Of host memory: as for `HostMemory.zeros`.
        """
        if tier is Tier.CPU:
            return self.memory.zeros(numel, dtype, is_locked=is_locked, is_overwritten=is_overwritten)
        device = self._device.torch_device if tier is Tier.GPU else "meta"
        return torch.zeros(numel, dtype=dtype, device=device)

    def master_extent(self, spec: ChunkSpec, dtype: torch.dtype, *, is_coming: bool = False) -> Extent:
        """Of a master in host memory, or its spare: page-locked if the device takes it in updates.

        Args:
            is_coming: Its values come from the device, whose copies are fast into locked memory alone.
        """
        return Extent(self.optim_numel(spec), dtype, is_coming or spec.is_update_streamed)

    def new_master(self, spec: ChunkSpec, dtype: torch.dtype, *, is_coming: bool = False) -> Tensor:
        """Zeros in host memory where no values are to come, uninitialised elsewhere; see `master_extent`."""
        if spec.optim_tier is Tier.CPU:
            extent = self.master_extent(spec, dtype, is_coming=is_coming)
            return self.memory.zeros(extent.numel, extent.dtype, is_locked=extent.is_locked, is_overwritten=is_coming)
        return self.empty(self.optim_numel(spec), dtype, spec.optim_tier)

    def checkpoint_memory(self) -> MappedMemory | None:
        """Where to put whole states that are to be saved; None: in host memory, which holds them already."""
        return None if self.states is None else self.states.mapped_memory()

    def keeper(self, chunk_id: int) -> Callable[[Tensor], Tensor]:
        """Makes copies of parts of a chunk's master: in host memory, or in memory that the disk can take where the
        master is on one."""

        def keep(values: Tensor) -> Tensor:
            on_disk = self._shards[chunk_id].on_disk
            memory = self.checkpoint_memory() if on_disk is not None and on_disk.has_master else None
            with memory or nullcontext():
                empty = torch.empty if memory is None else memory.empty
                return empty(values.numel(), dtype=values.dtype).copy_(values)

        return keep

    def settle(self, chunk_id: int) -> Shard:
        """The shard of a chunk, its values up to date: waits for the chunk's update.

        Raises:
            StateError: The update has failed.
            StorageError: It has failed for want of states on a disk.
        """
        shard = self._shards[chunk_id]
        if shard.update is not None:
            try:
                shard.update.wait()
            except BaseException as error:
                if error is not shard.update.error:
                    raise  # Ctrl-C, now
                raise _lost(f"the update of {self._specs[chunk_id]} has failed", error) from error
            shard.update = None
        return shard

    def settle_all(self) -> None:
        """Wait for the updates of all chunks, and until states that go to a disk are there.

        Raises:
            StateError: One of them has failed; the others are over all the same.
            StorageError: Likewise, for the disk.
        """
        first: ElixirError | None = None
        for chunk_id in self._shards:
            try:
                self.settle(chunk_id)
            except ElixirError as error:
                first = first or error
        if first is not None:
            raise first
        self._ask_states(StateFile.synchronize)

    @property
    def has_failed(self) -> bool:
        """Whether an update, or the disk, is known to have failed: values are lost. Waits for nothing."""
        updates = [shard.update for shard in self._shards.values() if shard.update is not None]
        is_disk_lost = self.states is not None and self.states.has_failed
        return is_disk_lost or any(update.is_over() and update.error is not None for update in updates)

    def check_states(self) -> None:
        """Raises `StorageError` if states on a disk are known to be lost; waits for nothing."""
        self._ask_states(StateFile.check)

    def _ask_states(self, ask: Callable[[StateFile], None]) -> None:
        if self.states is not None:
            try:
                ask(self.states)
            except Exception as error:
                raise _lost("keeping optimizer states on NVMe has failed", error) from error

    def set_grad(self, spec: ChunkSpec, dtype: torch.dtype) -> Tensor:
        """An uninitialised gradient shard on the optimizer tier; host memory is reused."""
        shard = self.settle(spec.id)  # an update may still read the last one
        numel = self.optim_numel(spec)
        if spec.optim_tier is Tier.GPU:
            shard.grad = self.empty(numel, dtype, Tier.GPU)
            return shard.grad
        if shard.is_param_on_disk:
            shard.grad = self.empty(numel, dtype, Tier.NVME)
            return shard.grad
        if self._may_reuse_param(spec, dtype):
            shard.grad, shard.is_param_overwritten = shard.param, True
            return shard.param  # type: ignore[return-value]
        if shard.grad_buffer is None or shard.grad_buffer.dtype != dtype:
            shard.grad_buffer = self.empty(numel, dtype, Tier.CPU)
        shard.grad = shard.grad_buffer
        return shard.grad

    def has_grad_memory(self, spec: ChunkSpec, dtype: torch.dtype) -> bool:
        """Whether `set_grad` takes no host memory, for what the chunk has in another place, or has already."""
        shard = self._shards[spec.id]
        is_elsewhere = spec.optim_tier is Tier.GPU or shard.is_param_on_disk or self._may_reuse_param(spec, dtype)
        return (
            shard.grad is not None
            or is_elsewhere
            or (shard.grad_buffer is not None and shard.grad_buffer.dtype == dtype)
        )

    def reserve_grad(self, spec: ChunkSpec, dtype: torch.dtype) -> None:
        """Make the host memory that `set_grad` is going to take."""
        if not self.has_grad_memory(spec, dtype):
            self._shards[spec.id].grad_buffer = self.empty(self.optim_numel(spec), dtype, Tier.CPU)

    def _may_reuse_param(self, spec: ChunkSpec, dtype: torch.dtype) -> bool:
        if not self._is_param_reused or spec.param_tier is not Tier.CPU:
            return False
        shard = self._shards[spec.id]
        param = shard.param
        if param is None or shard.master is None or shard.is_param_overwritten:
            return False
        return (param.dtype, param.numel()) == (dtype, self.optim_numel(spec))

    def drop_grad_buffers(self, but: Collection[int] = ()) -> None:
        """Free the host memory that is kept for the next gradients.

        Args:
            but: Chunks that keep it.
        """
        for chunk_id, shard in self._shards.items():
            if chunk_id not in but:
                shard.grad_buffer = None

    def vacate(self, chunk_id: int) -> None:
        """What a chunk had here is elsewhere now."""
        self._shards[chunk_id] = Shard()

    def reserve_spares(self, spec: ChunkSpec, dtype: torch.dtype) -> bool:
        """Make the second master and the memory for values, if the chunk shall have them and has not.

        Args:
            dtype: Compute dtype.

        Returns:
            Whether they are there.
        """
        shard = self._shards[spec.id]
        if not spec.has_spare_states or shard.master is None:
            return False
        if shard.spare_master is None:  # zeros, since padding is never written
            shard.spare_master = self.new_master(spec, shard.master.dtype)
        if shard.spare_param is None:
            shard.spare_param = self.zeros(shard.master.numel(), dtype, Tier.CPU)
        return True

    def restore_param(self, shard: Shard) -> None:
        """Have the compute shard hold the parameters again, where gradients lie in it that are not needed any more."""
        if shard.is_param_overwritten and shard.param is not None and shard.master is not None:
            shard.param.copy_(shard.master)
            shard.is_param_overwritten = False

    def clear_grads(self, chunk_ids: Iterable[int]) -> None:
        """Drop the gradients of these chunks."""
        for chunk_id in chunk_ids:
            shard = self._shards[chunk_id]
            shard.grad = None
            self.restore_param(shard)

    def grad_bytes_on_device(self) -> int:
        """What gradient shards take on the GPU tier."""
        return sum(
            s.grad.nbytes
            for i, s in self._shards.items()
            if s.grad is not None and self._specs[i].optim_tier is Tier.GPU
        )

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes held, as `<tier>_<kind>`: tiers `gpu`, `cpu` and `nvme` by where the plan put them, kinds `param`,
        `master`, `grad`, `spare`, `state_buffer`."""
        held: dict[str, int] = {}
        for chunk_id, shard in self._shards.items():
            spec = self._specs[chunk_id]
            grad = shard.grad if shard.grad is not None else shard.grad_buffer
            grad_tier = Tier.GPU if spec.optim_tier is Tier.GPU else Tier.CPU
            if shard.is_param_overwritten or shard.is_param_on_disk:
                grad = None  # counted as parameters, or with the places that they have on the disk
            kinds = (
                ("param", shard.param, spec.param_tier),
                ("master", shard.master, spec.optim_tier),
                ("grad", grad, grad_tier),
                ("spare", shard.spare_master, spec.optim_tier),
                ("spare", shard.spare_param, spec.optim_tier),
            )
            for kind, tensor, tier in kinds:
                if tensor is not None:
                    key = f"{tier.value}_{kind}"
                    held[key] = held.get(key, 0) + tensor.nbytes
        if self.states is not None:
            there = [s.on_disk.spec for s in self._shards.values() if s.on_disk is not None]
            held["nvme_master"] = sum(s.bytes_of(MASTER) for s in there if s.has_master)
            for kind, part in (("nvme_param", PARAM), ("nvme_grad", GRAD)):
                nbytes = sum(s.bytes_of(part) for s in there if part in s.parts)
                if nbytes:
                    held[kind] = nbytes
            held["cpu_state_buffer"] = self.states.buffer_bytes_held()
        return held

    def rest(self) -> None:
        """End the threads of the disk, for as long as nothing more is asked for."""
        if self.states is not None:
            self.states.rest()

    def close(self) -> None:
        """Drop everything."""
        self._shards.clear()
        if self.states is not None:
            self.states.close()


def _lost(what: str, error: BaseException) -> ElixirError:
    text = (
        f"{what} ({type(error).__name__}: {error}), so parameters and optimizer states are not whole any more: start "
        "again from a checkpoint"
    )
    if isinstance(error, StorageError):
        return StorageError(text, path=error.path, offset=error.offset, nbytes=error.nbytes)
    return StateError(text)

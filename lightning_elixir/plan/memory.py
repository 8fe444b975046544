"""Bytes of a placement, by kind, of one rank.

Per parameter: compute shard (unless replicas are cast from a master on the device), gradient shard, master (beside 16
bits only) and states, divided by the ranks. Beside that
rCache blocks, `GRAD_BLOCKS` gradient blocks (one collects while another is reduced; more where several collect at once,
and with several ranks; none where a rank alone has the states on its device, and the block stays as the shard), on the
device what is persistent, and on the host staging buffers where gradients are added up and buffers for NVMe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from lightning_elixir.plan.device_words import DeviceWords
from lightning_elixir.plan.mesh import Mesh
from lightning_elixir.plan.regime import ModelDataBytes, TrainingRegime, UpdateMode
from lightning_elixir.plan.tables import Table
from lightning_elixir.plan.types import DTYPE_BYTES, GPU_BYTE_KINDS, ChunkSpec, Plan, Tier, UpdateTiming

GRAD_BLOCKS = 2
"""Blocks for gradients on the compute device: one fills up while another is being reduced. Where parameters of another
dtype lie between the others (kept in fp32), one more fills up beside it: see `num_grad_blocks`."""

STAGING_BUFFERS = 3
"""Buffers through which gradients come down to be added up in host memory: one fills up, one is added, one waits."""

NVME_BUFFERS = 3
"""Buffers through which states on NVMe are updated: one is read into, one is updated, one is written back."""

NVME_BUFFER_BYTES = 96 * 2**20
"""Most that one of them takes; larger chunks pass through it in pieces."""

PARAM_BUFFERS = 3
"""Buffers through which parameters come from NVMe: some are read into, from others replicas are filled."""

HOST_RESERVE_BYTES = 2 * 2**30
"""Host memory that is left to each rank beside its plan."""

HOST_RESERVE_PART = 50
"""That part of the free host memory is left beside."""

MOST_RESERVED_PART = 4
"""No more than that part of it is left in all, however small the host."""


def has_grad_block(chunk: ChunkSpec, num_sharing: int) -> bool:
    """Whether gradients are gathered in one of the blocks, and not in what becomes the shard, or is added to it.

    Args:
        num_sharing: Ranks that share the chunk.
    """
    return chunk.requires_grad and (chunk.optim_tier is not Tier.GPU or num_sharing > 1)


def num_grad_blocks(chunks: Iterable[ChunkSpec], world_size: int, arrivals: Iterable[int] = ()) -> int:
    """How many such blocks a rank has, no more than chunks that train. Of several ranks one may be a chunk ahead of the
    others, so that a further block waits for them (seen: two H200s, experts of 768 MiB).

    Args:
        chunks: That have such blocks, those that train.
        world_size: All ranks.
        arrivals: Of a step, as in `Course`. One more block fills up where a chunk gets its last gradient after the
            first one of others, as chunks with the norms of a layer do, which come last among its modules.
    """
    dtypes = {c.id: c.dtype for c in chunks if c.requires_grad}
    most = len(set(dtypes.values()))
    collecting = set[int]()
    for chunk_id in arrivals:
        if chunk_id in dtypes:
            collecting ^= {chunk_id}
            most = max(most, len(collecting))
    return min(len(dtypes), most + GRAD_BLOCKS - 1 + (world_size > 1))


def nvme_buffers(state_bytes: Iterable[int]) -> tuple[int, int]:
    """How many of those buffers there are in host memory, and the bytes of each: of the largest chunk's states, or of
    the largest piece of them.

    Args:
        state_bytes: Master and states of one rank, of each chunk that has them on NVMe.
    """
    sizes = list(state_bytes)
    num_pieces = sum(-(-size // NVME_BUFFER_BYTES) for size in sizes)
    return min(NVME_BUFFERS, num_pieces), min(NVME_BUFFER_BYTES, max(sizes, default=0))


def param_buffers(param_bytes: Iterable[int]) -> tuple[int, int]:
    """As `nvme_buffers`, for reading parameters.

    Args:
        param_bytes: Of one rank, of each chunk that has them on NVMe.
    """
    sizes = list(param_bytes)
    return min(PARAM_BUFFERS, len(sizes)), max(sizes, default=0)


def grad_staging(
    chunks: Iterable[ChunkSpec], num_sharing: Callable[[ChunkSpec], int], itemsize: int | None = None
) -> tuple[int, int]:
    """How many of those buffers there are, and the bytes of each: of the largest gradient shard.

    Args:
        chunks: With their tiers.
        num_sharing: How many ranks share a chunk.
        itemsize: Of a gradient's element as it comes down; None: of the compute dtype.
    """
    sizes = [
        c.numel // num_sharing(c) * (itemsize or DTYPE_BYTES[c.dtype])
        for c in chunks
        if c.requires_grad and c.optim_tier is not Tier.GPU
    ]
    return min(STAGING_BUFFERS, len(sizes)), max(sizes, default=0)


def is_on_nvme(chunk: ChunkSpec) -> bool:
    """Whether the chunk has states, and has them there."""
    return chunk.requires_grad and chunk.optim_tier is Tier.NVME


def has_params_on_nvme(chunk: ChunkSpec) -> bool:
    """Whether the chunk's parameters are there; its gradients then are, too."""
    return chunk.param_tier is Tier.NVME


def uses_nvme(chunk: ChunkSpec) -> bool:
    """Whether anything of the chunk is there."""
    return is_on_nvme(chunk) or has_params_on_nvme(chunk)


def is_cast_from_master(chunk: ChunkSpec, num_sharing: int, *, has_master: bool, is_distributed: bool) -> bool:
    """Whether the chunk has no compute shard, since its replicas are made from the master, which is on the device: that
    costs next to nothing there, and spares the memory of the parameters in 16 bits.

    Args:
        num_sharing: Ranks that share the chunk.
        has_master: There is a more precise copy of the parameters, if they train.
        is_distributed: These keep no more of the parameters than their slice, which is what they have of the master.
    """
    is_near = chunk.requires_grad and chunk.param_tier is Tier.GPU and chunk.optim_tier is Tier.GPU
    return is_near and has_master and not chunk.is_persistent and (is_distributed or num_sharing == 1)


def problem_of_params_on_nvme(chunks: Iterable[ChunkSpec], world_size: int, is_storage_distributed: bool) -> str | None:
    """Why no runtime could obey a plan with these parameters on NVMe; None if one can."""
    for chunk in chunks:
        if not has_params_on_nvme(chunk):
            continue
        if chunk.is_persistent:
            return f"{chunk} stays on the device, so its parameters cannot be on NVMe"
        if chunk.requires_grad and chunk.optim_tier is not Tier.NVME:
            return f"{chunk} has its parameters on NVMe, so its optimizer states must be there, too"
        if world_size > 1 and not is_storage_distributed:
            return (
                f"{chunk} has its parameters on NVMe, of which every rank must keep its slice alone there: use"
                " enable_distributed_storage=True"
            )
    return None


def problem_of_places(plan: Plan) -> str | None:
    """Why no runtime could obey a plan that has these things of its chunks in these places; None if one can."""
    on_nvme = problem_of_params_on_nvme(plan.chunks, plan.world_size, plan.is_storage_distributed)
    return on_nvme or _problem_of_spare_states(plan)


def _problem_of_spare_states(plan: Plan) -> str | None:
    for chunk in plan.chunks:
        if not chunk.has_spare_states:
            continue
        if plan.update_timing is not UpdateTiming.INSIDE_BACKWARD:
            return f'{chunk} has spare states, which are for update_timing "inside_backward" only'
        if not chunk.requires_grad or chunk.optim_tier is not Tier.CPU:
            return f"{chunk} has spare states, but no states in host memory"
        if DTYPE_BYTES[chunk.dtype] != 2:
            return f"{chunk} has spare states, but its {chunk.dtype} parameters have no fp32 master"
    return None


@dataclass(frozen=True)
class Budget:
    """What one rank may use. None: not known, treated as unlimited."""

    gpu_bytes: int | None = None
    """Memory of the compute device."""
    cpu_bytes: int | None = None
    """This rank's part of the host's memory."""
    non_model_bytes: int = 0
    """Device memory that activations, buffers and temporaries take at their peak."""
    nvme_bytes: int = 0
    """This rank's part of the NVMe space that optimizer states may take."""
    spare_cpu_bytes: int | None = None
    """Up to how many bytes in all what a plan can do without may fill this rank's part of the host's memory: spare
    states. None: as many as `cpu_bytes`."""
    words: DeviceWords = DeviceWords()
    """Of the compute device, for refusals."""
    reserve_bytes: int = 0
    """This rank's part of what is kept back of the host's memory (`host_share`), for refusals."""
    has_growing_segments: bool = True
    """Whether the device's allocator grows its segments page by page, so that little of them is lost in gaps."""

    @property
    def most_with_spares(self) -> int | None:
        """Bytes of host memory that a plan with spare states may take; None: as many as it likes."""
        return min((b for b in (self.cpu_bytes, self.spare_cpu_bytes) if b is not None), default=None)


def host_share(free_bytes: int, num_ranks: int, limit: int | None = None, *, is_begun: bool = False) -> tuple[int, int]:
    """What one of the ranks on a host may use of its memory, and up to where it may fill that with what a plan can do
    without: `Budget.cpu_bytes` and `Budget.spare_cpu_bytes`.

    A reserve is kept back, for what no plan counts: the processes themselves and their libraries, page tables and the
    driver's own of page-locked memory, the user's data and its loaders. What can be done without leaves as much again.

    Args:
        free_bytes: Of the host, before the plan takes any.
        num_ranks: On the host.
        limit: Of the host, as the user gave it; within what is free it counts as it is.
        is_begun: Training is about to begin: what the reserve is for has taken its part, and half is kept back.
    """
    reserve = min(num_ranks * HOST_RESERVE_BYTES + free_bytes // HOST_RESERVE_PART, free_bytes // MOST_RESERVED_PART)
    reserve //= 1 + is_begun
    cpu = free_bytes - reserve if limit is None else min(free_bytes, limit)
    return cpu // num_ranks, min(cpu, max(0, free_bytes - 2 * reserve)) // num_ranks


def host_bytes_for(cpu_bytes: int) -> int:
    """How much of a host's memory has to be free for each rank, so that one may use so many bytes of it (`host_share`
    the other way round)."""
    part, quarter = HOST_RESERVE_PART, MOST_RESERVED_PART
    with_reserve = -(-(cpu_bytes + HOST_RESERVE_BYTES) * part // (part - 1))
    return min(with_reserve, -(-cpu_bytes * quarter // (quarter - 1)))


def fair_part(nbytes: int, wanted: int, others: Sequence[int]) -> int:
    """One model's part of a memory that several share. A model that needs less than an even part gets what it
    needs, and the others share the rest; where all get what they need, all of the memory is shared in that proportion.

    Args:
        nbytes: Of the memory.
        wanted: What this model needs, in bytes.
        others: What each other model needs.
    """
    left, count = nbytes, 1 + len(others)
    if wanted + sum(others) <= nbytes:
        return nbytes * wanted // max(1, wanted + sum(others))
    for other in sorted(others):
        if other >= wanted or other * count >= left:
            break
        left, count = left - other, count - 1
    return min(wanted, left // count)


class ChunkBytes(NamedTuple):
    """What a chunk takes by itself, of one rank, by kind."""

    gpu_param: int = 0
    gpu_state: int = 0
    gpu_grad: int = 0
    host_param: int = 0
    host_state: int = 0
    host_grad: int = 0
    host_spare: int = 0
    nvme: int = 0
    uses_nvme: int = 0
    """1 if anything of it is there."""
    grad_block: int = 0
    """Of the block that its gradients are gathered in, if there is one."""
    grad_slice: int = 0
    """What several ranks reduce of them and send to the host."""


@dataclass(frozen=True)
class Scheme:
    """What training does to every chunk, whatever the placement."""

    world_size: int
    is_storage_distributed: bool
    block_bytes: int
    regime: TrainingRegime
    updates: UpdateMode = UpdateMode()
    activation_host_bytes: int = 0
    """Host memory that activations may take."""
    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1
    num_copies: int = 1

    def with_activations(self, host_bytes: int) -> Scheme:
        """The same beside so many bytes of activations in host memory. What is found of chunks serves both."""
        scheme = replace(self, activation_host_bytes=host_bytes)
        vars(scheme).update(chunk_bytes=self.chunk_bytes, mesh=self.mesh, data_bytes=self.data_bytes)
        return scheme

    @cached_property
    def mesh(self) -> Mesh:
        """How the ranks stand to each other."""
        return Mesh(self.world_size, self.tensor_parallel_size, self.expert_parallel_size, self.num_copies)

    def num_sharing(self, chunk: ChunkSpec) -> int:
        """How many ranks share a chunk: those that hold the same parts of its parameters."""
        return self.mesh.num_sharing(chunk.axes)

    def shard_numel(self, chunk: ChunkSpec) -> int:
        """Elements of one rank's slice of a chunk."""
        return chunk.numel // self.num_sharing(chunk)

    @cached_property
    def data_bytes(self) -> Mapping[str, ModelDataBytes]:
        """Bytes per element, by compute dtype."""
        return self.regime.data_bytes

    @cached_property
    def chunk_bytes(self) -> Table[ChunkSpec, ChunkBytes]:
        """What a chunk takes by itself."""
        return Table(self._chunk_bytes)

    def _chunk_bytes(self, chunk: ChunkSpec) -> ChunkBytes:
        gpu_param, num_sharing = 0, self.num_sharing(chunk)
        if chunk.is_persistent:
            gpu_param = chunk.nbytes
        elif chunk.param_tier is Tier.GPU and not self.is_cast_from_master(chunk):
            gpu_param = self.param_shard_bytes(chunk)
        on_gpu = chunk.requires_grad and chunk.optim_tier is Tier.GPU
        on_host = chunk.requires_grad and chunk.optim_tier is Tier.CPU
        return ChunkBytes(
            gpu_param=gpu_param,
            gpu_state=self.state_bytes(chunk) if on_gpu else 0,
            gpu_grad=self.grad_shard_bytes(chunk) if on_gpu else 0,
            host_param=self.param_shard_bytes(chunk) if chunk.param_tier is Tier.CPU else 0,
            host_state=self.state_bytes(chunk) if on_host else 0,
            host_grad=self.host_grad_bytes(chunk) if chunk.requires_grad else 0,
            host_spare=self.spare_bytes(chunk),
            nvme=self.nvme_bytes(chunk),
            uses_nvme=int(uses_nvme(chunk)),
            grad_block=max(self.block_bytes, chunk.nbytes) if self.has_grad_block(chunk) else 0,
            grad_slice=chunk.nbytes // num_sharing if chunk.requires_grad and not on_gpu and num_sharing > 1 else 0,
        )

    @property
    def is_shard_whole(self) -> bool:
        """Then a shard on the GPU is the whole replica, and dropping the one would keep the other."""
        return self.mesh.copy_size == 1 or not self.is_storage_distributed

    def is_cast_from_master(self, chunk: ChunkSpec) -> bool:
        """As the function of that name."""
        has_master, num_sharing = self.data_bytes[chunk.dtype].master > 0, self.num_sharing(chunk)
        return is_cast_from_master(
            chunk, num_sharing, has_master=has_master, is_distributed=self.is_storage_distributed
        )

    def is_smaller_without_replica(self, dtype: str, *, requires_grad: bool) -> bool:
        """Whether a chunk whose states are on the device takes less of it if its replica does not stay, too: several
        ranks share it, or it is cast from its master.

        Args:
            dtype: Its compute dtype.
        """
        has_master = requires_grad and self.data_bytes[dtype].master > 0
        return not self.is_shard_whole or (self.mesh.copy_size == 1 and has_master)

    def stream_bytes(self, chunks: Iterable[ChunkSpec]) -> int:
        """Device memory of the buffers through which updates are streamed, if any of these is, or of whole parameters
        while they are updated."""
        streamed = self.regime.stream_bytes if any(c.is_update_streamed for c in chunks) else 0
        return max(streamed, self.regime.whole_update_bytes)

    def lasting_stream_bytes(self, chunks: Iterable[ChunkSpec]) -> int:
        """Of these, what is there in forward and backward as well. What whole parameters take is given back when their
        step ends."""
        is_left = self.updates.timing is not UpdateTiming.AFTER_BACKWARD and any(c.is_update_streamed for c in chunks)
        return self.regime.stream_bytes if is_left else 0

    def param_shard_bytes(self, chunk: ChunkSpec) -> int:
        return chunk.nbytes if self.is_shard_whole else chunk.nbytes // self.num_sharing(chunk)

    def grad_shard_bytes(self, chunk: ChunkSpec) -> int:
        return self.shard_numel(chunk) * self.data_bytes[chunk.dtype].grad if chunk.requires_grad else 0

    def host_grad_bytes(self, chunk: ChunkSpec) -> int:
        """What gradients take in host memory beside the compute shard."""
        if chunk.optim_tier is Tier.GPU or (self.updates.grad_reuses_compute_shard and self.can_reuse(chunk)):
            return 0
        return 0 if has_params_on_nvme(chunk) else self.grad_shard_bytes(chunk)

    def grad_staging_bytes(self, chunks: Sequence[ChunkSpec]) -> int:
        """Host memory of the buffers through which gradients come down to be added up, or to go on to NVMe; and of one
        sum that is read there, and written again."""
        on_nvme = [c for c in chunks if self.chunk_bytes(c).uses_nvme and c.requires_grad and has_params_on_nvme(c)]
        if not self.regime.accumulates and not on_nvme:
            return 0
        number, nbytes = grad_staging(chunks, self.num_sharing)
        sums = 2 * max(map(self.nvme_grad_bytes, on_nvme), default=0) if self.regime.accumulates else 0
        return number * nbytes + sums

    def nvme_grad_bytes(self, chunk: ChunkSpec) -> int:
        """What gradients have reserved on NVMe: they may become sums in fp32."""
        if not chunk.requires_grad or not has_params_on_nvme(chunk):
            return 0
        return self.shard_numel(chunk) * max(4, self.data_bytes[chunk.dtype].compute)

    def nvme_bytes(self, chunk: ChunkSpec) -> int:
        """All that a chunk takes on NVMe."""
        states = self.state_bytes(chunk) if is_on_nvme(chunk) else 0
        if not has_params_on_nvme(chunk):
            return states
        return states + self.param_shard_bytes(chunk) + self.nvme_grad_bytes(chunk)

    def nvme_buffer_bytes(self, chunks: Iterable[ChunkSpec]) -> int:
        """Host memory of the buffers through which states on NVMe are updated, and parameters come from there."""
        there = [c for c in chunks if self.chunk_bytes(c).uses_nvme]
        number, nbytes = nvme_buffers(self.chunk_bytes(c).nvme for c in there if is_on_nvme(c))
        read, largest = param_buffers(self.param_shard_bytes(c) for c in there if has_params_on_nvme(c))
        return number * nbytes + read * largest

    def can_reuse(self, chunk: ChunkSpec) -> bool:
        """Whether a chunk's gradients could land in its compute shard."""
        data = self.data_bytes[chunk.dtype]
        is_on_host = chunk.param_tier is Tier.CPU and chunk.optim_tier is Tier.CPU
        return is_on_host and data.master > 0 and data.grad <= data.compute

    def state_bytes(self, chunk: ChunkSpec) -> int:
        """Master and optimizer states of one rank; where parameters of several optimizers share the chunk, of the rank
        whose slice has the most."""
        if not chunk.requires_grad:
            return 0
        data, fewer = self.data_bytes[chunk.dtype], self.regime.fewer_bytes[chunk.dtype]
        each = self._master_bytes(chunk) + data.states
        if not fewer or not chunk.members:
            return self.shard_numel(chunk) * each
        least = min(fewer.get(member.fqn, 0) for member in chunk.members)  # what is padding counts as the fullest
        numel = self.shard_numel(chunk)
        without = [0] * (chunk.numel // numel)  # of each rank
        for member in chunk.members:
            lacking = fewer.get(member.fqn, 0) - least
            end = member.offset + member.numel
            for rank in range(member.offset // numel, -(-end // numel)) if lacking else ():
                first = max(member.offset, rank * numel)
                without[rank] += lacking * max(0, min(end, (rank + 1) * numel) - first)
        return numel * (each - least) - min(without)

    def _master_bytes(self, chunk: ChunkSpec) -> int:
        """Of an element: the optimizer's own copy. Without a more precise one the compute shard serves, unless it lies
        elsewhere. What updates states on NVMe is the host, and its copy there is the compute shard as well."""
        data = self.data_bytes[chunk.dtype]
        updated_on = Tier.CPU if chunk.optim_tier is Tier.NVME else chunk.optim_tier
        is_apart = not has_params_on_nvme(chunk) and chunk.param_tier is not updated_on
        return data.master or (data.compute if is_apart else 0)

    def spare_bytes(self, chunk: ChunkSpec) -> int:
        """The second set of master and states, and the memory for new values, where the chunk has them."""
        return self.bytes_to_spare(chunk) if chunk.has_spare_states else 0

    def bytes_to_spare(self, chunk: ChunkSpec) -> int:
        """What spare states of the chunk take."""
        return self.state_bytes(chunk) + self._value_bytes(chunk)

    def can_have_spares(self, chunk: ChunkSpec) -> bool:
        """Whether the chunk's updates could begin inside backward into spare states."""
        is_on_host = chunk.requires_grad and chunk.optim_tier is Tier.CPU
        return is_on_host and self.data_bytes[chunk.dtype].master > 0

    @property
    def begins_only_into_spares(self) -> bool:
        """Whether updates that begin inside backward must be such that can be taken back."""
        return self.updates.timing is UpdateTiming.INSIDE_BACKWARD and self.regime.needs_global_norm

    def _value_bytes(self, chunk: ChunkSpec) -> int:
        return self.shard_numel(chunk) * self.data_bytes[chunk.dtype].compute

    def earlier_grad_bytes(self, chunk: ChunkSpec) -> int:
        """What gradients of earlier backwards take of the shard when the last one before an update begins: sums are in
        fp32, which the gradients of one backward become when more is added."""
        if not (chunk.requires_grad and self.regime.accumulates):
            return 0
        width = self.data_bytes[chunk.dtype]
        return self.shard_numel(chunk) * (width.compute if self.regime.most_backwards == 2 else width.grad)

    def has_grad_block(self, chunk: ChunkSpec) -> bool:
        """As the function of that name."""
        return has_grad_block(chunk, self.num_sharing(chunk))

    def added_grad_bytes(self, chunks: Sequence[ChunkSpec], arrivals: Iterable[int] = ()) -> int:
        """Device memory, while backward runs, of gradients that are added to shards there by the rank itself, and of
        what was there until it has become fp32. Arguments as for `num_grad_blocks`."""
        added = [c for c in chunks if c.requires_grad and not self.has_grad_block(c)] if self.regime.accumulates else []
        sizes = sorted((c.nbytes for c in added), reverse=True)[: num_grad_blocks(added, self.world_size, arrivals)]
        widened = [c.nbytes for c in added if DTYPE_BYTES[c.dtype] < self.data_bytes[c.dtype].grad]
        return sum(sizes) + max(widened, default=0)

    def grad_block_bytes(self, chunks: Sequence[ChunkSpec], arrivals: Iterable[int] = ()) -> int:
        """The blocks that gradients are gathered in, and the slices that several ranks reduce and send to the host.
        Arguments as for `num_grad_blocks`."""
        each = [self.chunk_bytes(c) for c in chunks]
        trained = [c for c, nbytes in zip(chunks, each, strict=True) if nbytes.grad_block]
        count = num_grad_blocks(trained, self.world_size, arrivals)
        blocks = sorted([nbytes.grad_block for nbytes in each], reverse=True)[:count]
        slices = sorted([nbytes.grad_slice for nbytes in each], reverse=True)[:GRAD_BLOCKS]
        return sum(blocks) + sum(slices)


@dataclass(frozen=True)
class MemoryUse:
    """Predicted bytes of one rank, by kind."""

    gpu_param_bytes: int
    """Persistent replicas and parameter shards on the GPU."""
    gpu_state_bytes: int
    """Master and optimizer states on the GPU."""
    gpu_grad_bytes: int
    """Gradient shards on the GPU, and the blocks that gradients are gathered in."""
    rcache_bytes: int
    host_param_bytes: int
    host_state_bytes: int
    host_grad_bytes: int
    """Gradient shards in host memory, and the buffers through which they are added up."""
    non_model_bytes: int
    nvme_bytes: int = 0
    """Master and optimizer states on NVMe; parameters and gradients that are there as well."""
    host_spare_bytes: int = 0
    host_buffer_bytes: int = 0
    """Buffers through which states on NVMe are updated, and parameters come from there."""
    host_activation_bytes: int = 0
    """Activations between their forward and their backward."""
    gpu_stream_bytes: int = 0
    """Buffers of updates (`Scheme.stream_bytes`); `memory_use`, which knows of no moment, leaves them out."""

    @property
    def gpu_bytes(self) -> int:
        """Everything on the device, as if all its peaks came together."""
        held = self.gpu_param_bytes + self.gpu_state_bytes + self.gpu_grad_bytes
        return held + self.rcache_bytes + self.gpu_stream_bytes + self.non_model_bytes

    @property
    def gpu_kinds(self) -> tuple[tuple[str, int], ...]:
        """What `gpu_bytes` is for."""
        return tuple((kind, getattr(self, kind)) for kind in GPU_BYTE_KINDS)

    @property
    def host_chunk_bytes(self) -> int:
        """Everything in host memory but activations."""
        held = self.host_param_bytes + self.host_state_bytes + self.host_grad_bytes
        return held + self.host_spare_bytes + self.host_buffer_bytes

    @property
    def host_bytes(self) -> int:
        return self.host_chunk_bytes + self.host_activation_bytes


def memory_use(chunks: Sequence[ChunkSpec], rcache_blocks: int, scheme: Scheme, non_model_bytes: int = 0) -> MemoryUse:
    """Predicted bytes of one rank.

    Args:
        chunks: With their tiers.
        rcache_blocks: As in the plan.
        scheme: Bytes per element and ranks.
        non_model_bytes: Passed on.
    """
    total = ChunkBytes(*map(sum, zip(ChunkBytes(), *map(scheme.chunk_bytes, chunks), strict=True)))
    is_staged = scheme.regime.accumulates or total.uses_nvme
    return MemoryUse(
        gpu_param_bytes=total.gpu_param,
        gpu_state_bytes=total.gpu_state,
        gpu_grad_bytes=total.gpu_grad + scheme.grad_block_bytes(chunks) + scheme.added_grad_bytes(chunks),
        rcache_bytes=rcache_blocks * scheme.block_bytes,
        host_param_bytes=total.host_param,
        host_state_bytes=total.host_state,
        host_grad_bytes=total.host_grad + (scheme.grad_staging_bytes(chunks) if is_staged else 0),
        non_model_bytes=non_model_bytes,
        nvme_bytes=total.nvme,
        host_spare_bytes=total.host_spare,
        host_buffer_bytes=scheme.nvme_buffer_bytes(chunks) if total.uses_nvme else 0,
        host_activation_bytes=scheme.activation_host_bytes,
    )

"""From a module and a plan to bound chunks and filled shards, one chunk at a time (and rank 0 collects the next one's
values meanwhile).

Values come from rank 0, or from sources: a parameter that has one on rank 0 is read by every rank, its own segments
only, and the others are scattered from rank 0; one chunk may hold both. So a checkpoint that is loaded before there is
an engine, or a model that had to be built for real, overrules the files. Whole chunks are gathered from what the ranks
have read. An error of reading is kept until all chunks are built, as the peers need this rank in their collectives, and
then raised by all. Values from files take the way of the parameter's own dtype, and are cast as `module.to(dtype)`
would; masters are made from the fp32 originals. Slices that are read pass through one piece of memory: with a new one
for each, malloc kept the gaps between the shards, 70 MiB of a model of 100 MiB (seen).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from lightning_elixir.core.comm import Comm
from lightning_elixir.core.device import Device, working_on
from lightning_elixir.core.host_memory import Extent, bytes_of
from lightning_elixir.core.shells import ShellParameter, held_as, layout_of
from lightning_elixir.core.staging import Downloads, Uploads
from lightning_elixir.core.worker import Task, Worker
from lightning_elixir.errors import PlanError, StateError, StorageError
from lightning_elixir.patterns.cuts import forget_whole, whole_of
from lightning_elixir.plan.memory import (
    has_params_on_nvme,
    is_on_nvme,
    problem_of_places,
    uses_nvme,
)
from lightning_elixir.plan.types import ChunkSpec, Plan, Tier
from lightning_elixir.runtime.chunk import Chunk, ChunkState
from lightning_elixir.runtime.groups import Groups
from lightning_elixir.runtime.host_room import HostRoom
from lightning_elixir.runtime.model_checks import check_modules, check_names
from lightning_elixir.runtime.resident import ResidentParameters, has_plain_class, place_beside, placed, send_from_first
from lightning_elixir.runtime.sources import Source, forget_source, source_of
from lightning_elixir.storage.nvme import MASTER, DiskOptions, StateFile, StateSpec, StateTraffic, open_state_file
from lightning_elixir.storage.shards import Shard, ShardStore

# Chunks whose host memory is made while an earlier one is filled: no more, as the user's model is there as well.
CHUNKS_AHEAD = 8
# What the user's parameters have had of a chunk is freed by the way, if it is less.
_WORTH_A_THREAD_BYTES = 16 * 2**20
# Elements that go to the device at once. While threads lock pages every call of its driver waits for them: few calls
# are worth 512 MiB.
_PIECE_NUMEL = 64 * 2**20
# So many times the values of a chunk must be free: for the whole of them and of the next one, a rank's slice, what
# collectives copy, and the replica.
_ROOM_TO_COLLECT = 6


class _Collecting(NamedTuple):
    """A chunk's values, on their way into one tensor."""

    full: Tensor
    task: Task


@dataclass(frozen=True)
class Precision:
    """Dtypes of an engine."""

    master: torch.dtype | None
    """Dtype of the optimizer's own copy of 16-bit parameters; None: the optimizer works in the compute dtype."""

    def master_of(self, spec: ChunkSpec) -> torch.dtype | None:
        """Dtype of the separate master of this chunk; None if the compute shard is the optimizer's copy."""
        if not spec.requires_grad:
            return None
        compute = dtype_of(spec)
        if self.master is not None and compute.itemsize < self.master.itemsize:
            return self.master
        # States on NVMe are updated by the host: parameters that are there are its own copy.
        optim_tier = Tier.CPU if spec.optim_tier is Tier.NVME else spec.optim_tier
        return compute if spec.param_tier is not optim_tier else None


def _as_held(parameter: nn.Parameter) -> Tensor:
    """The parameter, or what has the shape and the dtype that a chunk has of it."""
    if layout_of(parameter) is None:
        return parameter
    shape, dtype = held_as(parameter)
    return torch.empty(shape, dtype=dtype, device="meta")


def dtype_of(spec: ChunkSpec) -> torch.dtype:
    """Compute dtype of a chunk."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype


class Builder:
    """Binds a module's parameters to chunks.

    Args:
        module: The model; parameters of ranks other than 0 may be on `meta`, and on all ranks those that have a source.
        plan: The chunks.
        groups: The ranks that share them.

    Raises:
        PlanError: If plan and model do not fit, rank 0 has parameters on `meta` without a source, or another rank has
            no source where rank 0 has one.
    """

    def __init__(self, module: nn.Module, plan: Plan, device: Device, groups: Groups) -> None:
        self._module = module
        self._plan = plan
        self._device = device
        self._groups = groups
        self._comm = groups.world
        self._named = dict(module.named_parameters(remove_duplicate=False))
        # On rank 0, of the parameters that are cut, until their chunk is filled
        wholes = {name: whole_of(p) for name, p in self._named.items()}
        self._wholes = {name: w.detach() for name, w in wholes.items() if w is not None and not w.is_meta}
        for parameter in self._named.values():
            forget_whole(parameter)
        check_names(plan, self._named)
        check_modules(module)
        problem = problem_of_places(plan)
        if problem is not None:
            raise PlanError(problem)
        self._sources = self._agreed_sources()  # by the plan's names
        self._read_error: Exception | None = None
        self._staging: Tensor | None = None  # 1-D, bytes
        self._uploads: Uploads | None = None
        self._downloads = Downloads(device)
        self._chunks: list[Chunk] = []
        self._collector = Worker("elixir-collect", context=partial(working_on, device.torch_device))
        self._ahead: _Collecting | None = None
        self._shells: dict[str, Tensor] = {}  # around other tensors, until their chunk is filled
        self._new: set[str] = set()  # ours, in the places of the user's

    def place_ignored(self) -> ResidentParameters:
        """Have the frozen parameters that are in no chunk on the device, with rank 0's values. Collective; before
        `build`.

        Raises:
            PlanError: A rank has one without values, of a class that cannot be sent.
            StorageError: A source cannot be read.
        """
        names = [p.fqn for p in self._plan.ignored if not p.requires_grad]
        resident = ResidentParameters()
        for name in names:
            old = self._named[name]
            try:
                new = placed(name, old, self._sources.get(name), self._device.torch_device)
            except Exception as error:
                self._comm.leave(error)
                raise
            if new is not old:
                for module in self._module.modules():
                    for own, parameter in list(module._parameters.items()):
                        if parameter is old:
                            setattr(module, own, new)
            if name not in self._sources and has_plain_class(new):
                send_from_first(self._comm, new)
            resident.add(old, new)
        if names:
            self._named = dict(self._module.named_parameters(remove_duplicate=False))
        return resident

    def build(self, store: ShardStore, precision: Precision) -> list[Chunk]:
        """Bind everything, and fill the shards.

        Raises:
            CapacityError: A host runs short of memory; raised on every rank.
            StorageError: Values could not be read from their source; raised on every rank.
        """
        self._store = store
        self._precision = precision
        self._usable_bytes = self._device.usable_bytes()
        specs = self._plan.all_chunks
        self._chunks = chunks = [self._new_chunk(spec) for spec in specs]
        self._replace_parameters(chunks)
        self._move_buffers()
        room = HostRoom(self._comm, store.memory)
        wanted = [self._on_host(spec) for spec in specs]
        try:
            for number in store.memory.in_turn(wanted, CHUNKS_AHEAD):
                room.take(specs[number], bytes_of(wanted[number]), self._plan, partial(_host_bytes, store))
                self._build_together(chunks[number])
            self._downloads.settle()
        finally:
            self._collector.close()
            self._ahead = None
            self._downloads.close()
            store.memory.settle()  # a process that is forked now would keep for good what has not gone yet
        self._device.synchronize()  # values may still be on their way
        self._staging = self._uploads = None
        self._raise_read_error()
        return chunks

    def _on_host(self, spec: ChunkSpec) -> list[Extent]:
        """What the chunk's shard has in host memory, states and gradients left out."""
        master = self._precision.master_of(spec)
        found = [] if master is None or spec.optim_tier is not Tier.CPU else [self._store.master_extent(spec, master)]
        if spec.param_tier is Tier.CPU:
            found.append(Extent(self._store.param_numel(spec), dtype_of(spec)))
        return found

    def _agreed_sources(self) -> dict[str, Source]:
        """Rank 0 decides which values come from their sources; where it has values itself, all ranks get them."""
        own: dict[str, Source] = {}
        frozen = (p.fqn for p in self._plan.ignored if not p.requires_grad)
        for name in (*(m.fqn for c in self._plan.all_chunks for m in c.members), *frozen):
            source = source_of(self._named[name])
            if source is not None:
                own[name] = source
        empty = sorted(
            name for name, p in self._named.items() if p.is_meta and source_of(p) is None and name not in self._wholes
        )
        is_first = self._comm.rank == 0
        without_values, wanted = self._comm.exchange_objects((empty, list(own)) if is_first else None)[0]
        if without_values:
            raise PlanError(
                f"{len(without_values)} parameters have no values (device meta): {', '.join(without_values[:5])}. Build"
                " the model in configure_model without torch.device('meta'), or load its weights before training"
            )
        if not wanted:
            return {}
        lacking = self._comm.exchange_objects([name for name in wanted if name not in own])
        for rank, names in enumerate(lacking):
            if names:
                raise PlanError(
                    f"rank {rank} does not know where the values of {len(names)} parameters are, as rank 0 does:"
                    f" {', '.join(names[:5])}. Build the same model, with pretrained(), on every rank"
                )
        return {name: own[name] for name in wanted}

    def _new_chunk(self, spec: ChunkSpec) -> Chunk:
        like = [_as_held(self._named[member.fqn]) for member in spec.members]
        return Chunk(spec, dtype_of(spec), self._device, storage_bytes(self._plan, spec), like)

    def _replace_parameters(self, chunks: list[Chunk]) -> None:
        """What cannot be bound through `.data`, on meta or around other tensors: put a parameter of the device in its
        place, wherever it is used."""
        replaced: dict[int, nn.Parameter] = {}
        for chunk in chunks:
            for index, member in enumerate(chunk.spec.members):
                old = self._named[member.fqn]
                new = self._bindable(old)
                if new is old:
                    continue
                self._new.add(member.fqn)
                if isinstance(new, ShellParameter):
                    self._shells[member.fqn] = old
                replaced[id(old)] = new
                forget_source(new)
                chunk.hide(index, new, self._refuse)
        for module in self._module.modules():
            for name, parameter in list(module._parameters.items()):
                if id(parameter) in replaced:
                    # Not in `_parameters`: recurrent layers keep a list of their weights, too.
                    setattr(module, name, replaced[id(parameter)])
        self._named = dict(self._module.named_parameters(remove_duplicate=False))

    def _bindable(self, old: nn.Parameter) -> nn.Parameter:
        layout = layout_of(old)
        if layout is None and not old.is_meta:
            return old
        data = torch.empty(0, dtype=held_as(old)[1], device=self._device.torch_device)
        if layout is not None:
            shell = ShellParameter(data, layout)
            own = vars(layout.on_meta())
            shell.__dict__.update({k: v for k, v in vars(old).items() if k not in own and k != "_is_param"})
            return shell
        new = nn.Parameter(data, requires_grad=old.requires_grad)
        new.__class__ = type(old)
        new.__dict__.update(old.__dict__)
        return new

    def _move_buffers(self) -> None:
        device = self._device.torch_device
        for module in self._module.modules():
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                moved = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
                self._comm.broadcast_from_first(moved)
                module._buffers[name] = moved

    def _build_together(self, chunk: Chunk) -> None:
        try:
            self._build_chunk(chunk)
        except Exception as error:
            self._comm.leave(error)  # the others would wait for its values
            raise

    def _build_chunk(self, chunk: Chunk) -> None:
        """Its parameters have the values that they had, or are those of the chunk: other threads find no others."""
        spec = chunk.spec
        for parameter in (self._named[member.fqn] for member in spec.members):
            if type(parameter) is not nn.Parameter and not isinstance(parameter, ShellParameter):
                place_beside(parameter, self._device.torch_device)
        shard = self._new_shard(spec)
        piece = self._own_values(chunk, shard.master)
        self._fill_shard(spec, shard, piece)
        if spec.is_persistent:
            if chunk.state is ChunkState.RELEASED:
                chunk.allocate()
            self._fill_whole(spec, chunk.flat, piece)
            chunk.to_state(ChunkState.RESIDENT)
        del piece
        left = self._memory_of(spec)
        chunk.bind([self._named[member.fqn] for member in spec.members], self._refuse)
        self._leave(left)
        for member in spec.members:
            self._shells.pop(member.fqn, None)

    def _memory_of(self, spec: ChunkSpec) -> list[Tensor]:
        """Host memory of the user's parameters that is not used any more once they are bound."""
        own = [self._named[member.fqn] for member in spec.members if member.fqn not in self._new]
        return [p.data for p in own if type(p) is nn.Parameter and p.device.type == "cpu"]

    def _leave(self, tensors: list[Tensor]) -> None:
        """Have a thread free memory that the user's parameters do not use any more: until the end, that of many chunks
        may wait. Where the host runs short, the next look waits for it.

        Args:
            tensors: Emptied.
        """
        if sum(tensor.nbytes for tensor in tensors) >= _WORTH_A_THREAD_BYTES:
            self._store.memory.give_back(tensors)

    def _refuse(self, chunk: Chunk) -> AbstractContextManager[None]:
        raise StateError(
            f"{chunk.spec} was read, by another thread, while its ElixirModule is being built: read the model before"
            " that, or when the module is there"
        )

    def _first_place(self, chunk: Chunk, master: Tensor | None, *, is_read: bool) -> Tensor | None:
        """Zeros, 1-D, in master (or compute) dtype, where this rank's slice of a chunk's values is put first: its
        master, or the replica that stays. None: it is put together in staging memory.

        Args:
            is_read: Some values come from files, which are read to host memory.
        """
        spec = chunk.spec
        if master is not None and spec.optim_tier is Tier.CPU:
            return master  # which begins as zeros
        is_near = spec.is_persistent or spec.param_tier is Tier.GPU
        if self._comm.world_size > 1 or not is_near or (is_read and self._is_far(chunk.flat)):
            return None
        if master is not None:
            return master.zero_()
        if not spec.is_persistent or self._sent_dtype(chunk) != chunk.dtype:
            return None
        chunk.allocate()
        return chunk.flat.zero_()

    def _own_values(self, chunk: Chunk, master: Tensor | None) -> Tensor:
        """This rank's slice of the chunk's values, 1-D, in master (or compute) dtype, its padding zeros. Where they
        come from no other rank it is that of `_first_place`, if there is one."""
        comm, spec = self._comm, chunk.spec
        dtype, numel = self._sent_dtype(chunk), self._groups.numel(spec)
        is_read = [member.fqn in self._sources for member in spec.members]
        if spec.axes and not all(is_read):
            piece = self._own_part(chunk, numel, dtype)
            if any(is_read):
                piece = piece.to("cpu")
                self._read_sources(chunk, piece)
            return piece
        if all(is_read) or comm.world_size == 1:
            place = self._first_place(chunk, master, is_read=any(is_read))
            piece = self._staged(numel, dtype) if place is None else place
            if not all(is_read):
                self._collect(chunk, piece)
        else:
            full = None
            if comm.rank == 0:
                full = self._whole_values(chunk)
            piece = self._scattered(numel, dtype, full)
        if any(is_read):
            piece = piece.to("cpu")
            self._read_sources(chunk, piece)
        return piece

    def _whole_values(self, chunk: Chunk) -> Tensor:
        """Rank 0's values of a chunk, 1-D on the device. A thread puts those of the next one together meanwhile, where
        the device has room: to copy the user's memory takes as long as to share it out."""
        collecting, self._ahead = self._ahead or self._begin_collecting(chunk), None
        collecting.task.wait()
        following = self._chunks[chunk.id + 1 :][:1]
        if following and not self._sources and not following[0].spec.axes and self._has_room(following[0]):
            with suppress(torch.OutOfMemoryError):  # then in its turn, when this one is gone
                self._ahead = self._begin_collecting(following[0])
        return collecting.full

    def _begin_collecting(self, chunk: Chunk) -> _Collecting:
        full = torch.zeros(chunk.spec.numel, dtype=self._sent_dtype(chunk), device=self._device.torch_device)
        stream, is_inference = self._device.compute_stream(), torch.is_inference_mode_enabled()

        def collect() -> None:
            with torch.inference_mode(is_inference):
                stream.hold_up_this_thread()
                try:
                    self._collect(chunk, full)
                finally:
                    stream.wait_for(self._device.compute_stream())

        return _Collecting(full, self._collector.submit(collect))

    def _sent_dtype(self, chunk: Chunk) -> torch.dtype:
        return self._precision.master_of(chunk.spec) or chunk.dtype

    def _has_room(self, chunk: Chunk) -> bool:
        """Whether the device has room for one more chunk's values than are there at once."""
        if self._usable_bytes is None:
            return True
        nbytes = chunk.spec.numel * self._sent_dtype(chunk).itemsize
        return self._usable_bytes - self._device.allocated_bytes() >= _ROOM_TO_COLLECT * nbytes

    def _own_part(self, chunk: Chunk, numel: int, dtype: torch.dtype) -> Tensor:
        """As `_own_values`, of a chunk whose parameters are cut between ranks: rank 0 makes every part and sends each
        rank its slice of its own."""
        groups, spec, device = self._groups, chunk.spec, self._device.torch_device
        rows = None
        if self._comm.rank == 0:
            rows = torch.zeros((groups.copy.world_size, numel), dtype=dtype, device=device)
            for ranks in groups.parts(spec)[: groups.mesh.num_parts(spec.axes)]:
                flat = torch.zeros(spec.numel, dtype=dtype, device=device)
                parts = {
                    index: groups.part_of(member, self._wholes[member.fqn], ranks[0])
                    for index, member in enumerate(spec.members)
                    if member.fqn not in self._sources
                }
                self._put_members(chunk, flat, parts)
                rows[torch.tensor(ranks, device=device)] = flat.view(len(ranks), numel)
            rows = rows.view(-1)
        piece = self._scattered(numel, dtype, rows)
        for member in spec.members:
            self._wholes.pop(member.fqn, None)
        return piece

    def _scattered(self, numel: int, dtype: torch.dtype, rows: Tensor | None) -> Tensor:
        """This rank's slice of what rank 0 has of all slices of one copy, 1-D, in the order of its ranks. Collective.
        The first copy shares it out, and each of its ranks passes its slice on to the others."""
        piece = torch.empty(numel, dtype=dtype, device=self._device.torch_device)
        if self._groups.is_counted:
            self._groups.copy.scatter_from_first(piece, rows)
        self._groups.across.broadcast_from_first(piece)
        return piece

    def _put_members(self, chunk: Chunk, flat: Tensor, values: Mapping[int, Tensor]) -> None:
        """Copy values of members, by their index, to where these lie in a flat tensor, before anything else lies
        between them. From the host to the device they go through page-locked memory, which all cores fill and a GPU
        takes many times as fast as the user's own."""
        views = {index: chunk.view_of(flat, index) for index in values}
        sent = [
            index
            for index, value in values.items()
            if value.device.type == "cpu" and self._is_far(flat) and views[index].is_contiguous()
        ]
        if sent:
            members = chunk.spec.members
            self._send(((members[i].offset, values[i].reshape(-1)) for i in sent), flat)
        for index in values.keys() - set(sent):  # now, since what is between parts that are sent becomes zeros
            self._put(views[index], values[index])
        if not self._is_far(flat) and any(map(self._is_far, values.values())):  # it is read next
            self._downloads.settle()
            self._device.compute_event().synchronize()

    def _put(self, target: Tensor, values: Tensor) -> None:
        """Copy, and cast where both are on one side of the bus: what crosses it in another dtype torch casts on the
        host, through new, pageable memory (seen: 0.15 s for 50 million elements, a fifteenth of it so). What comes to
        the host is there when the device has come so far, and the downloads are settled."""
        if self._is_far(target) is self._is_far(values) or not target.is_contiguous():
            target.copy_(values)
        elif self._is_far(target):
            self._send([(0, values.reshape(-1))], target.view(-1))
        elif target.is_pinned():
            target.copy_(values.to(target.dtype), non_blocking=True)
        else:
            self._downloads.download(values.reshape(-1).to(target.dtype), target.view(-1))

    def _send(self, parts: Iterable[tuple[int, Tensor]], target: Tensor) -> None:
        """See `Uploads.upload`. Of one thread at a time: where one collects ahead, no values come from this rank's host
        memory by another way."""
        self._uploads = self._uploads or Uploads(self._device, self._device.new_lane(), _PIECE_NUMEL)
        self._uploads.upload(parts, target)

    @staticmethod
    def _is_far(flat: Tensor) -> bool:
        return flat.device.type != "cpu"

    def _staged(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros in host memory, 1-D, until the next call. Always the same memory: if it was freed and allocated for
        every chunk, malloc would keep the gaps between the shards, which come to as much as the model (seen). The
        device takes it at full speed."""
        nbytes = numel * dtype.itemsize
        if self._staging is None or self._staging.numel() < nbytes:
            self._staging = None
            self._staging = self._device.host_zeros(nbytes, torch.uint8)
        return self._staging[:nbytes].view(dtype).zero_()

    def _collect(self, chunk: Chunk, full: Tensor) -> Tensor:
        """Rank 0's values of the whole chunk, put into `full`, 1-D; where they come from a source, `full` stays."""
        plain = {
            index: self._named[member.fqn].detach()
            for index, member in enumerate(chunk.spec.members)
            if member.fqn not in self._sources and member.fqn not in self._shells
        }
        self._put_members(chunk, full, plain)
        for index, member in enumerate(chunk.spec.members):
            if member.fqn in self._shells:
                layout = cast(ShellParameter, self._named[member.fqn]).layout_at_elixir
                layout.fill(chunk.view_of(full, index), self._shells[member.fqn])
        return full

    def _read_sources(self, chunk: Chunk, piece: Tensor) -> None:
        """Read what this rank keeps of the members that have a source into its slice, in host memory."""
        if self._read_error is not None:
            return
        try:
            for segment in self._groups.segments(chunk.spec):
                source = self._sources.get(segment.fqn)
                if source is None:
                    continue
                index = segment.member_index
                run = piece[segment.shard_offset : segment.shard_offset + segment.numel]
                source.read_run(chunk.strides[index], segment.param_offset, run, chunk.original_dtypes[index])
        except Exception as error:
            self._read_error = error  # the others need this rank until all chunks are there, and hear of it then

    def _raise_read_error(self) -> None:
        if not self._sources:
            return
        errors = self._comm.exchange_objects(None if self._read_error is None else str(self._read_error))
        if self._read_error is not None:
            raise self._read_error
        for rank, error in enumerate(errors):
            if error is not None:
                raise StorageError(f"rank {rank} could not read the model's values: {error}")

    def _new_shard(self, spec: ChunkSpec) -> Shard:
        """With memory for the master, where that is in memory."""
        store, master_dtype = self._store, self._precision.master_of(spec)
        shard = store.add(spec)
        is_on_disk = shard.on_disk is not None and shard.on_disk.has_master
        if master_dtype is not None and not is_on_disk:
            shard.master = store.new_master(spec, master_dtype)
        return shard

    def _fill_shard(self, spec: ChunkSpec, shard: Shard, piece: Tensor) -> None:
        store, dtype = self._store, dtype_of(spec)
        if shard.on_disk is not None and shard.on_disk.has_master:
            shard.on_disk.write(MASTER, piece)
        elif shard.master is not None and shard.master is not piece:
            self._put(shard.master, piece)
        if spec.is_persistent:
            return  # the replica, or this rank's slice of it, is always there: it is the shard
        if store.is_cast_from_master(spec, self._precision.master_of(spec)):
            return
        if shard.is_param_on_disk:
            shard.keep_param(piece)
            return
        shard.param = store.empty(store.param_numel(spec), dtype, spec.param_tier)
        if shard.param.numel() == piece.numel():
            self._put(shard.param, piece)
        else:
            whole = torch.empty(spec.numel, dtype=dtype, device=self._device.torch_device)
            self._fill_whole(spec, whole, piece)
            shard.param.copy_(whole)

    def _fill_whole(self, spec: ChunkSpec, whole: Tensor, piece: Tensor) -> None:
        """Put the ranks' slices together, on the compute device."""
        comm = self._groups.of(spec)
        if piece is not whole:
            self._put(self._groups.mine(spec, whole), piece)
        if comm.world_size > 1:
            comm.all_gather(whole)


def _host_bytes(store: ShardStore) -> int:
    return sum(nbytes for kind, nbytes in store.bytes_by_kind().items() if kind.startswith("cpu_"))


def states_on_nvme(plan: Plan, precision: Precision) -> dict[int, StateSpec]:
    """What one rank keeps on NVMe under a plan, by chunk id."""
    found = {}
    for spec in plan.chunks:
        if uses_nvme(spec):
            master = precision.master_of(spec)
            found[spec.id] = StateSpec(
                spec.numel // plan.num_sharing(spec),
                master or dtype_of(spec),
                master is not None,
                dtype_of(spec) if has_params_on_nvme(spec) else None,
                is_on_nvme(spec),
            )
    return found


def open_states(
    plan: Plan, precision: Precision, disk: DiskOptions, comm: Comm, traffic: StateTraffic, kept: StateFile | None
) -> StateFile | None:
    """Room on the disk for what the plan has there. Collective.

    Args:
        traffic: Counts what goes there and comes back.
        kept: What there is already; given back if it has room for all, each chunk's where it is.

    Raises:
        PlanError: There is no such back end.
        StorageError: The disk cannot hold it; on every rank, if it is so on one.
    """
    specs = states_on_nvme(plan, precision)
    if not specs:
        return None
    if kept is not None and kept.holds(specs):
        return kept
    file, problem = None, None
    try:
        file = open_state_file(specs, disk, comm.rank, traffic)
    except Exception as error:
        problem = error
    problems = comm.exchange_objects(None if problem is None else str(problem))
    if any(problems):
        if file is not None:
            file.close()
        if problem is not None:
            raise problem
        rank, text = next((rank, text) for rank, text in enumerate(problems) if text)
        raise StorageError(f"rank {rank} cannot keep optimizer states on NVMe: {text}")
    return file


def storage_bytes(plan: Plan, spec: ChunkSpec) -> int:
    """What to allocate for a replica: whole blocks, so that the device's pool can reuse any of them."""
    return spec.nbytes if spec.is_persistent else plan.blocks_of(spec.id) * plan.block_bytes

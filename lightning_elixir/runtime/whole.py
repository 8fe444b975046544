"""Whole parameters and gradients out of shards, on the host, and back. Never a whole model on the compute device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_elixir.core.shells import ShellParameter, is_shell
from lightning_elixir.errors import PlanError, StateError
from lightning_elixir.runtime.chunk import Chunk
from lightning_elixir.runtime.groups import Groups
from lightning_elixir.storage.nvme import MappedMemory
from lightning_elixir.storage.shards import ShardStore

if TYPE_CHECKING:
    from lightning_elixir.runtime.engine import Engine


def own_values(store: ShardStore, chunk: Chunk, groups: Groups) -> Tensor:
    """This rank's current values of its slice of a chunk, 1-D: master, else compute shard. No copy, unless it is on a
    disk."""
    shard = store.settle(chunk.id)
    master = shard.read_master()
    if master is not None:
        return master
    param = shard.read_param()
    whole = chunk.flat if param is None else param
    if whole.numel() == store.optim_numel(chunk.spec):
        return whole
    return groups.mine(chunk.spec, whole)


def gather_whole(
    engine: Engine,
    pieces: Iterable[tuple[Chunk, Tensor | None]],
    on_all_ranks: bool,
    memory: MappedMemory | None = None,
) -> dict[str, Tensor]:
    """Put shards together, chunk by chunk. Collective.

    Args:
        pieces: Chunks, the same and in the same order on every rank, each with this rank's shard (any device and dtype,
            the same dtype on every rank); None leaves the chunk out.
        on_all_ranks: Return the result everywhere, not only on rank 0.
        memory: Of the result; None: host memory.

    Returns:
        FQN -> CPU tensor in the shape of the whole parameter, of memory of its own; empty where not asked for.
    """
    try:
        return _gather_whole(engine, pieces, on_all_ranks, memory)
    except BaseException as error:  # shards may come from a disk, say; the others wait here
        engine.comm.leave(error)
        raise


def _gather_whole(
    engine: Engine, pieces: Iterable[tuple[Chunk, Tensor | None]], on_all_ranks: bool, memory: MappedMemory | None
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    groups = engine.groups
    for chunk, piece in pieces:
        if piece is None or not (on_all_ranks or groups.is_counted):
            continue
        rows = groups.copy.gather_host(piece.detach().to("cpu"), on_all_ranks)
        if rows is None:
            continue
        flats = groups.flats(chunk.spec, rows)
        for index, member in enumerate(chunk.spec.members):
            found[member.fqn] = _put_together(groups, chunk, index, flats, memory)
    return found


def _put_together(
    groups: Groups, chunk: Chunk, index: int, flats: list[tuple[int, Tensor]], memory: MappedMemory | None
) -> Tensor:
    """A whole parameter out of the chunk's flat tensors (`Groups.flats`), in memory of its own."""
    member = chunk.spec.members[index]
    if not member.cuts:
        return _copied(chunk.view_of(flats[0][1], index), memory)
    shape, dtype = groups.whole_shape(member), flats[0][1].dtype
    whole = (
        torch.empty(shape, dtype=dtype, device="cpu")
        if memory is None
        else memory.empty(math.prod(shape), dtype).view(shape)
    )
    for rank, flat in flats:
        groups.part_of(member, whole, rank).copy_(chunk.view_of(flat, index))
    return whole


def _copied(value: Tensor, memory: MappedMemory | None) -> Tensor:
    if memory is None or not value.numel():
        return value.clone()
    home = memory.empty(value.numel(), value.dtype)
    return home.as_strided(value.shape, value.stride()).copy_(value)  # parameters lie in chunks without gaps


def whole_values(engine: Engine, *, on_all_ranks: bool, is_frozen_included: bool = True) -> dict[str, Tensor]:
    """Whole parameters, of the dtypes of `saved_dtype`. Collective.

    Args:
        is_frozen_included: False leaves parameters out that require no gradient.
    """
    pieces = (
        (chunk, engine.own_shard(chunk)) for chunk in engine.chunks if chunk.spec.requires_grad or is_frozen_included
    )
    with engine.store.checkpoint_memory() or nullcontext() as memory:
        found = gather_whole(engine, pieces, on_all_ranks, memory)
        empty = None if memory is None else memory.empty
        for fqn, parameter in shells_of(engine).items():
            if fqn in found:
                found[fqn] = parameter.layout_at_elixir.taken_out(found[fqn], empty)
    if engine.precision.master is not None:
        dtypes = {m.fqn: saved_dtype(engine, c, i) for c in engine.chunks for i, m in enumerate(c.spec.members)}
        found = {fqn: v if is_shell(v) else v.to(dtypes[fqn]) for fqn, v in found.items()}
    return found


def saved_dtype(engine: Engine, chunk: Chunk, index: int) -> torch.dtype:
    """Of a parameter's value in a state dict or a checkpoint: the model's own dtype, where parameters have masters, but
    with all bits of what was trained."""
    master, own = engine.precision.master, chunk.original_dtypes[index]
    if master is None:
        return chunk.dtype
    return torch.promote_types(own, master) if chunk.spec.requires_grad else own


def shells_of(engine: Engine) -> dict[str, ShellParameter]:
    """Parameters that stand for tensors around others (Note: shells, `core/shells.py`), by FQN."""
    return {
        member.fqn: parameter
        for chunk in engine.chunks
        for parameter, member in zip(chunk.parameters, chunk.spec.members, strict=True)
        if isinstance(parameter, ShellParameter)
    }


def whole_value(engine: Engine, chunk: Chunk, index: int) -> Tensor:
    """One parameter of a chunk as `whole_values` gives it, on every rank, in memory of its own. Collective."""
    with engine.telling():  # the shard may come from a disk
        rows = engine.groups.copy.gather_host(engine.own_shard(chunk).detach().to("cpu"), on_all_ranks=True) or []
    flats = engine.groups.flats(chunk.spec, rows)
    return _put_together(engine.groups, chunk, index, flats, None).to(chunk.original_dtypes[index])


def whole_grads(engine: Engine, factor: float) -> dict[str, Tensor]:
    """Whole gradients of the parameters that have one, in fp32 (fp64 ones as they are), multiplied by `factor`, on
    every rank. Collective."""
    engine.reducer.landing.wait_for_all()
    has_grad = torch.tensor(
        [engine.store[c.id].grad is not None for c in engine.chunks], dtype=torch.uint8, device="cpu"
    )
    engine.comm.all_reduce_max(has_grad)
    pieces: list[tuple[Chunk, Tensor | None]] = []
    for chunk, is_there in zip(engine.chunks, has_grad.tolist(), strict=True):
        grad = engine.store[chunk.id].read_grad()
        if grad is not None:
            pieces.append((chunk, grad.to(torch.promote_types(grad.dtype, torch.float32)) * factor))
        elif is_there:  # on another rank, where users have written to a gradient of zeros
            wide = torch.promote_types(chunk.dtype, torch.float32)
            pieces.append((chunk, torch.zeros(engine.store.optim_numel(chunk.spec), dtype=wide, device="cpu")))
    found = gather_whole(engine, pieces, on_all_ranks=True)
    used = engine.steps.used()
    grads: dict[str, Tensor] = {}
    for chunk in engine.chunks:
        wide = torch.promote_types(chunk.dtype, torch.float32)
        for index in sorted(used.get(chunk.id, ())):
            member = chunk.spec.members[index]
            if member.fqn in found:
                grads[member.fqn] = found[member.fqn]
            else:
                grads[member.fqn] = torch.zeros(engine.groups.whole_shape(member), dtype=wide, device="cpu")
    return grads


def write_whole(engine: Engine, values: Mapping[str, Tensor]) -> None:
    """Overwrite parameters with whole values, the same on every rank. Chunks with a replica are released or refilled.

    Args:
        values: FQN -> tensor of the whole parameter's shape, any device and floating dtype; of its class, where that
            is one around other tensors.

    Raises:
        PlanError: Such a one has another class, or other tensors inside.
        StateError: For a name that is not a managed parameter.
    """
    values = {**values, **_bytes_of_shells(engine, values)}
    known = {m.fqn for c in engine.chunks for m in c.spec.members}
    unknown = [name for name in values if name not in known]
    if unknown:
        raise StateError(f"not managed parameters of this model: {', '.join(unknown[:5])}")
    with engine.telling():
        for chunk in engine.chunks:
            of_chunk = [(i, m) for i, m in enumerate(chunk.spec.members) if m.fqn in values]
            named = [(i, engine.groups.part_of(m, values[m.fqn])) for i, m in of_chunk]
            if named:
                engine.interception.written.forget({chunk.id: [index for index, _ in named]})
                _write_chunk(engine, chunk, named)


def _bytes_of_shells(engine: Engine, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for fqn, parameter in shells_of(engine).items():
        if fqn in values:
            layout = parameter.layout_at_elixir
            found[fqn] = torch.empty(layout.nbytes, dtype=torch.uint8, device="cpu")
            try:
                layout.fill(found[fqn], values[fqn])
            except ValueError as error:
                raise PlanError(f"values for {fqn} are those of another parameter: {error}") from error
    return found


@torch.no_grad()
def _write_chunk(engine: Engine, chunk: Chunk, named: list[tuple[int, Tensor]]) -> None:
    shard = engine.store.settle(chunk.id)
    chunk.wait_ready()
    master = shard.read_master()
    stored = shard.read_param() if shard.is_param_on_disk else None
    for index, value in named:
        member, segment = chunk.spec.members[index], engine.groups.segment(chunk.spec, index)
        flat = in_memory_order(chunk, index, value)
        has_param = engine.plan.is_storage_distributed and not shard.is_param_overwritten
        for target in (master, stored, shard.param if has_param else None):
            if target is not None and segment is not None:
                target[segment.in_shard].copy_(flat[segment.in_param])
        if shard.param is not None and not engine.plan.is_storage_distributed:
            shard.param[member.offset : member.offset + member.numel].copy_(flat)
        if chunk.is_usable:
            chunk.slice_of(chunk.flat, index).copy_(flat)
    if master is not None:
        shard.keep_master(master)
    if stored is not None:
        shard.keep_param(stored)
    chunk.note_written(index for index, _ in named)


def own_shard_writer(engine: Engine, chunk: Chunk, values: Tensor) -> Callable[[], None]:
    """What overwrites a chunk with every rank's slice of its values. Collective; only where a rank has a replica, or
    ranks keep all of the chunk, does it pass through memory as a whole.

    Args:
        values: 1-D, as `own_values` gives them, on the host; a dtype that is the same on every rank.

    Returns:
        To be called: it sends nothing, and may fail on one rank alone.
    """
    comm = engine.groups.of(chunk.spec)
    engine.interception.written.forget({chunk.id: range(len(chunk.spec.members))})
    is_whole_kept = comm.world_size > 1 and not engine.plan.is_storage_distributed
    if is_whole_kept or any(row[0] for row in comm.exchange([int(chunk.is_usable)])):
        whole = torch.cat(comm.gather_host(values, on_all_ranks=True) or [])
        named = [(i, chunk.view_of(whole, i)) for i in range(len(chunk.spec.members))]
        return partial(_write_chunk, engine, chunk, named)
    return partial(_write_own_shard, engine, chunk, values)


@torch.no_grad()
def _write_own_shard(engine: Engine, chunk: Chunk, values: Tensor) -> None:
    shard = engine.store.settle(chunk.id)
    if shard.has_master:
        if shard.master is not None:
            shard.master.copy_(values)
        else:
            shard.keep_master(values)
    if shard.param is not None and not shard.is_param_overwritten:
        shard.param.copy_(values)
    if shard.is_param_on_disk:
        shard.keep_param(values.to(chunk.dtype))
    chunk.note_written(range(len(chunk.parameters)))


def in_memory_order(chunk: Chunk, index: int, value: Tensor) -> Tensor:
    """The elements as they lie in the chunk, 1-D."""
    stride = chunk.strides[index]
    if stride is None:
        return value.detach().reshape(-1)
    ordered = torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device)
    ordered.copy_(value)
    return ordered.as_strided((ordered.numel(),), (1,))

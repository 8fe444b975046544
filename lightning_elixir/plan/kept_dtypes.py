"""A plan whose parameters have other dtypes than it was made with: some stay in fp32 that it has in 16 bits."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from lightning_elixir.plan.packing import round_up
from lightning_elixir.plan.types import ALIGN_NUMEL, DTYPE_BYTES, TRAINED_DTYPES, ChunkSpec, Member, Plan


def kept_in(plan: Plan) -> frozenset[str]:
    """Names of the parameters that a plan for 16 bits has in fp32."""
    if DTYPE_BYTES[plan.compute_dtype] != 2:
        return frozenset()
    return frozenset(m.fqn for c in plan.chunks if c.dtype == "float32" for m in c.members)


def with_kept(plan: Plan, kept: Collection[str], *, is_exact: bool) -> Plan:
    """The same placement with parameters in fp32.

    Args:
        plan: For any dtype; one for other dtypes than those of 16 bits is returned as it is.
        kept: Their names; those of other parameters, and of frozen ones that no precision casts, do no harm.
        is_exact: Whether what else the plan has in fp32 is to be in 16 bits.
    """
    if DTYPE_BYTES[plan.compute_dtype] != 2:
        return plan
    dtypes = dict.fromkeys(kept_in(plan), plan.compute_dtype) if is_exact else {}
    cast = {m.fqn for c in plan.chunks if c.dtype in TRAINED_DTYPES for m in c.members}
    return with_dtypes(plan, dtypes | dict.fromkeys(cast.intersection(kept), "float32"))


def with_dtypes(plan: Plan, dtypes: Mapping[str, str]) -> Plan:
    """The same placement with these dtypes of parameters.

    What changes its dtype leaves its chunk for one of its own kind on the same tiers, without spare states, which is
    filled up to a block; chunks in which nothing changes stay as they are. The rCache gets room for one such chunk
    more.

    Args:
        plan: Any plan.
        dtypes: Of parameters of the plan; those that are missing stay as they are.

    Returns:
        `plan` itself where nothing changes; else one without its predicted figures.
    """
    if all(dtypes.get(m.fqn, c.dtype) == c.dtype for c in plan.chunks for m in c.members):
        return plan
    filled: list[_Open] = []
    moved: list[_Open] = []
    open_chunks: dict[tuple[ChunkSpec, tuple[str, ...]], _Open] = {}
    for chunk in plan.chunks:
        staying = [m for m in chunk.members if dtypes.get(m.fqn, chunk.dtype) == chunk.dtype]
        if len(staying) == len(chunk.members):
            filled.append(_Open(chunk, list(chunk.members), chunk.numel))
            continue
        if staying:
            rest = _Open(chunk)
            for member in staying:
                rest.add(member)
            filled.append(rest)
        for member in chunk.members:
            dtype = dtypes.get(member.fqn, chunk.dtype)
            if dtype == chunk.dtype:
                continue
            kind = replace(chunk, id=0, dtype=dtype, numel=0, members=(), has_spare_states=False)
            target = open_chunks.get((kind, chunk.axes))
            if target is None or not target.has_room(member, plan.block_bytes):
                target = open_chunks[kind, chunk.axes] = _Open(kind)
                filled.append(target)
                moved.append(target)
            target.add(member)
    chunks = tuple(one.closed(i, plan.world_size) for i, one in enumerate(filled))
    result = replace(plan, chunks=chunks, notes={}, forecast=None)
    new = [i for i, one in enumerate(filled) if one in moved and not chunks[i].is_persistent]
    everything = sum(result.blocks_of(c.id) for c in chunks if not c.is_persistent)
    more = max((result.blocks_of(i) for i in new), default=0)
    return replace(result, rcache_blocks=min(everything, plan.rcache_blocks + more))


@dataclass(eq=False)
class _Open:
    """A chunk that is being filled."""

    kind: ChunkSpec
    members: list[Member] = field(default_factory=list)
    end: int = 0
    """Where the next member would start."""

    def has_room(self, member: Member, block_bytes: int) -> bool:
        return (self.end + member.numel) * DTYPE_BYTES[self.kind.dtype] <= block_bytes

    def add(self, member: Member) -> None:
        self.members.append(replace(member, offset=self.end))
        self.end = round_up(self.end + member.numel, ALIGN_NUMEL)

    def closed(self, chunk_id: int, world_size: int) -> ChunkSpec:
        numel = round_up(max(1, self.end), world_size * ALIGN_NUMEL)
        return replace(self.kind, id=chunk_id, numel=numel, members=tuple(self.members))

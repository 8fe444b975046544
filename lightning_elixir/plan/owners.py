"""Which rank updates a parameter that may not be cut: pure, and the same on every rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from lightning_elixir.plan.shard_segments import segment_of
from lightning_elixir.plan.types import ChunkSpec


def owners_of(chunks: Sequence[ChunkSpec], world_size: int) -> dict[tuple[int, int], int]:
    """The rank that keeps the optimizer's states of each parameter that trains, and updates it: one that has elements
    of it, and of these the one with the fewest elements to update so far. What a single rank has is that rank's.

    Args:
        chunks: All, by id; where they are placed does not count.
        world_size: Ranks that share them.

    Returns:
        (chunk id, member index) -> rank.
    """
    loads = [0] * world_size
    owners: dict[tuple[int, int], int] = {}
    for chunk in chunks:
        if not chunk.requires_grad:
            continue
        for index, member in enumerate(chunk.members):
            ranks = [r for r in range(world_size) if segment_of(chunk, index, r, world_size) is not None]
            owner = min(ranks, key=lambda rank: (loads[rank], rank), default=0)
            owners[chunk.id, index] = owner
            loads[owner] += member.numel
    return owners


# Of each element of a parameter on its way: value, gradient and states in fp32, or in the place of 4 bytes the new
# value in the compute dtype.
_SLOT_BYTES = 16
# Of each element of the one that is updated: what Muon or Adafactor make of it (the gradient and a copy in fp32, and
# three copies in bf16; or two in fp32).
_WORK_BYTES = 16
# So many slots take as long as the bus or the updates alone, where parameters of two sizes come in turns (by a
# simulation of three lanes); three take 6 to 20% longer, two half as long again. Of the largest parameters three: what
# a fourth takes would be missing for chunks.
_MOST_SLOTS, _FEWEST_SLOTS = 4, 3
_MOST_BYTES_OF_SLOTS = 6 * 2**30
# Of a slot: what gaps between the tensors in it may take, without there being fewer.
_GAPS = 0.1
MOST_UPDATE_BYTES = _WORK_BYTES + _MOST_SLOTS * _SLOT_BYTES
# Of each element of a chunk with a parameter that ranks cut: value and gradient, sent, received and put together.
EXCHANGE_BYTES = 24


def num_slots(numel: int, slot_bytes: int = 0) -> int:
    """How many parameters of `numel` elements may be on their way at once.

    Args:
        numel: Elements of the largest.
        slot_bytes: Of the largest slot, where that is known: of those that take more than plans count (AdEMAMix: 20
            bytes for each element) there are fewer.
    """
    count = max(_FEWEST_SLOTS, min(_MOST_SLOTS, _MOST_BYTES_OF_SLOTS // max(1, _SLOT_BYTES * numel)))
    if not slot_bytes:
        return count
    return min(count, max(1, int(count * _SLOT_BYTES * numel / slot_bytes + _GAPS)))


def update_bytes(numel: int) -> int:
    """Device memory that updates of parameters of up to `numel` elements take."""
    return (_WORK_BYTES + num_slots(numel) * _SLOT_BYTES) * numel


def whole_update_bytes(chunks: Sequence[ChunkSpec], members: Mapping[int, Collection[int]], world_size: int) -> int:
    """Device memory that the updates of whole parameters take in a step, beside what stays there: of one parameter
    after the other, of one chunk after the other.

    Args:
        chunks: All, by id.
        members: What the optimizer has, by chunk id.
        world_size: Ranks that share them.
    """
    ids = [chunk_id for chunk_id, indices in members.items() if indices]
    numels = [chunks[chunk_id].members[index].numel for chunk_id in ids for index in members[chunk_id]]
    sent = max((chunks[chunk_id].numel for chunk_id in ids), default=0) if world_size > 1 else 0
    return update_bytes(max(numels, default=0)) + EXCHANGE_BYTES * sent

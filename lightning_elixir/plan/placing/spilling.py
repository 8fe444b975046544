"""Which chunks' states go on to NVMe where the host's memory is short."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_elixir.plan.memory import (
    NVME_BUFFERS,
    Scheme,
    has_params_on_nvme,
    is_on_nvme,
    memory_use,
    nvme_buffers,
)
from lightning_elixir.plan.tables import Table
from lightning_elixir.plan.types import ChunkSpec, Tier


@dataclass(frozen=True)
class _Movable:
    """A chunk whose states may go."""

    chunk: ChunkSpec
    moved: ChunkSpec
    state_bytes: int
    relief_bytes: int
    """What goes from the host's memory with them, buffers not counted."""


class Spilling:
    """Moves what the host's memory does not hold to NVMe. The same chunks give the same objects, whose bytes are known.

    Args:
        scheme: Bytes per element.
    """

    def __init__(self, scheme: Scheme) -> None:
        self._scheme = scheme
        self._movable = Table(self._as_movable)
        self._without_params = Table(_without_params)

    def states(self, chunks: Sequence[ChunkSpec], limit: int, room: int | None) -> tuple[ChunkSpec, ...]:
        """States go on to NVMe, those of the last chunks first, until the host's memory holds the rest.

        The buffers through which they are updated are as large as the largest of them, up to a limit: so first only the
        smallest chunks are looked at, then larger ones as well, and the least bytes on NVMe win.

        Args:
            chunks: None of them with states on NVMe, or with spare ones.
            limit: Of the host's memory.
            room: NVMe space; None: as much as it takes.

        Returns:
            The chunks; where no choice fits, those of the choice that comes nearest to it, perhaps none moved.
        """
        lacking = memory_use(chunks, 0, self._scheme).host_bytes - limit
        movable = [self._movable(c) for c in reversed(chunks) if c.requires_grad and c.optim_tier is Tier.CPU]
        best: list[_Movable] = []
        best_rank = _rank(best, lacking)
        for largest in sorted({m.state_bytes for m in movable}):
            chosen = _needed(_taken([m for m in movable if m.state_bytes <= largest], lacking, room), lacking)
            found = _rank(chosen, lacking)
            if found < best_rank:
                best, best_rank = chosen, found
        moved = {m.chunk.id: m.moved for m in best}
        return tuple(moved.get(c.id, c) for c in chunks)

    def states_and_params(self, chunks: Sequence[ChunkSpec], limit: int, room: int) -> tuple[ChunkSpec, ...] | None:
        """All states that are in the host's memory go on to NVMe, and as few of the parameters as it takes, those of
        the last chunks first: what `states` could not make fit.

        Args:
            chunks: As `states` takes them.
            limit: Of the host's memory.
            room: NVMe space.

        Returns:
            The chunks; None if that does not fit either.
        """
        scheme = self._scheme
        if not scheme.is_storage_distributed and scheme.world_size > 1:
            return None
        without = tuple(self._movable(c).moved if c.requires_grad and c.optim_tier is Tier.CPU else c for c in chunks)
        movable = [c.id for c in reversed(without) if can_move_params(c)]

        def moved(count: int) -> tuple[ChunkSpec, ...]:
            chosen = set(movable[:count])
            return tuple(self._without_params(c) if c.id in chosen else c for c in without)

        low, high = 1, len(movable)
        while low < high:  # more chunks take less memory, once there are all the buffers
            middle = (low + high) // 2
            if memory_use(moved(middle), 0, scheme).host_bytes <= limit:
                high = middle
            else:
                low = middle + 1
        found = moved(low)
        use = memory_use(found, 0, scheme)
        return found if movable and use.host_bytes <= limit and use.nvme_bytes <= room else None

    def _as_movable(self, chunk: ChunkSpec) -> _Movable:
        scheme, moved = self._scheme, replace(chunk, optim_tier=Tier.NVME, is_update_streamed=False)
        states = scheme.state_bytes(chunk)
        before = states + scheme.host_grad_bytes(chunk)
        return _Movable(chunk, moved, states, before - scheme.host_grad_bytes(moved))


def can_move_params(chunk: ChunkSpec) -> bool:
    """Whether the chunk's parameters, which are in the host's memory, may go on to NVMe as its states are there."""
    return chunk.param_tier is Tier.CPU and (not chunk.requires_grad or chunk.optim_tier is Tier.NVME)


def in_host_memory(chunks: Sequence[ChunkSpec]) -> tuple[ChunkSpec, ...]:
    """The same chunks with what is on NVMe back in the host's memory."""
    without = (replace(c, param_tier=Tier.CPU) if has_params_on_nvme(c) else c for c in chunks)
    return tuple(replace(c, optim_tier=Tier.CPU) if is_on_nvme(c) else c for c in without)


def _without_params(chunk: ChunkSpec) -> ChunkSpec:
    return replace(chunk, param_tier=Tier.NVME)


def _relief(chosen: Sequence[_Movable]) -> int:
    number, nbytes = nvme_buffers(m.state_bytes for m in chosen)
    return sum(m.relief_bytes for m in chosen) - number * nbytes


def _rank(chosen: Sequence[_Movable], lacking: int) -> tuple[int, int]:
    """What is lacking still, then what NVMe holds."""
    return max(0, lacking - _relief(chosen)), sum(m.state_bytes for m in chosen)


def _taken(movable: Sequence[_Movable], lacking: int, room: int | None) -> list[_Movable]:
    """One after the other while something is lacking."""
    chosen: list[_Movable] = []
    relief = most = 0
    for one in movable:
        number, nbytes = nvme_buffers([most] * min(NVME_BUFFERS, len(chosen)))
        if relief - number * nbytes >= lacking:
            break
        if room is not None and one.state_bytes > room:
            continue
        chosen.append(one)
        relief += one.relief_bytes
        most = max(most, one.state_bytes)
        room = None if room is None else room - one.state_bytes
    return chosen


def _needed(chosen: list[_Movable], lacking: int) -> list[_Movable]:
    """Without those that came to be unnecessary: a large one may do what small ones were taken for."""
    sizes = sorted(m.state_bytes for m in chosen)
    relief = sum(m.relief_bytes for m in chosen)
    kept = []
    for one in reversed(chosen):
        largest = sizes[-NVME_BUFFERS - 1 :]  # the buffers depend on these alone
        if one.state_bytes in largest:
            largest.remove(one.state_bytes)
        number, nbytes = nvme_buffers(largest)
        if relief - one.relief_bytes - number * nbytes >= lacking:
            relief -= one.relief_bytes
            sizes.remove(one.state_bytes)
        else:
            kept.append(one)
    return kept

"""Adam's states over the segments of one shard: two moments and step counts, in memory or on a disk."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from lightning_elixir.optim.updates import StatesOnDisk
from lightning_elixir.plan.types import ALIGN_NUMEL
from lightning_elixir.storage.nvme import MOMENTS, ChunkStates, Piece


class Zeros(Protocol):
    """Makes 1-D tensors of zeros on a device, in host memory or without memory."""

    def __call__(
        self, numel: int, dtype: torch.dtype, *, is_locked: bool = True, is_overwritten: bool = False
    ) -> Tensor:
        """
        Args:
            is_locked: Of host memory: whether it is page-locked.
            is_overwritten: Of host memory: it may hold anything, as all of it will be written before it is read.
        """


@dataclass(frozen=True)
class SegmentPlace:
    """Where a segment lies and which of the user's parameter groups it belongs to."""

    member_index: int
    group_index: int
    shard_offset: int
    numel: int


class AdamStates:
    """The moments lie in one flat tensor each, segment after segment, so that a shard is moved and updated in long
    pieces.

    Those on a disk are tensors on `meta` here: an update is described over them, and carried out where they have come
    to (`StatesOnDisk`). What needs their values opens them (`opened`).

    Segments are named by their position in `places`.

    Args:
        places: The segments, in order.
        shard_numel: Elements of the shard.
        dtype: Of the moments.
        zeros: Makes 1-D tensors of zeros where they shall live.
        on_disk: Where they are, if that is a disk.
        is_sent: Whether updates send them to the device, from host memory: then it is page-locked.
    """

    def __init__(
        self,
        places: Sequence[SegmentPlace],
        shard_numel: int,
        dtype: torch.dtype,
        zeros: Zeros,
        on_disk: ChunkStates | None,
        *,
        is_sent: bool,
    ) -> None:
        self.places = tuple(places)
        self.on_disk = on_disk
        self.moments: tuple[Tensor, ...] = ()
        """`MOMENTS`, once there are any."""
        self.spares: tuple[Tensor, ...] = ()
        """Memory for the next ones, where these must stay as they are."""
        self.counts: dict[int, int] = {}
        """Updates so far, of the segments that have states; no tensors, which took long."""
        self._blank: set[int] = set()  # segments whose moments are zeros, whatever the disk holds
        self._fresh: set[int] = set()  # segments whose moments are as they were made: zeros
        self._shard_numel = shard_numel
        self._dtype = dtype
        self._zeros = zeros
        self.is_sent = is_sent
        # Where each segment's moments begin, and how many elements they are in all. On a disk they lie as the shard
        # does, so that a piece is the same elements of everything. In memory they are as far apart as in the shard
        # where segments follow each other there.
        sizes = [-(-p.numel // ALIGN_NUMEL) * ALIGN_NUMEL for p in places]
        *self._starts, self.numel = [0, *itertools.accumulate(sizes)]
        """Elements of each moment."""
        self.numel_in_memory = self.numel
        """As `numel`, if they come there from a disk."""
        if on_disk is not None:
            self._starts, self.numel = [p.shard_offset for p in places], on_disk.spec.numel

    def allocate(self, *, is_coming: bool = False) -> None:
        """Make the moments if there are none yet.

        Args:
            is_coming: There are values to come from the device, of the segments that have states.
        """
        if not self.moments:
            self.moments = self._new(is_locked=is_coming or self.is_sent, is_overwritten=is_coming)
            if is_coming:
                for moment in self.moments:
                    self._clear_gaps(moment)
            is_fresh = self.on_disk is None and not is_coming
            self._fresh = set(range(len(self.places))) if is_fresh else set()

    def _clear_gaps(self, moment: Tensor) -> None:
        """Write zeros between the segments."""
        for place, start, end in zip(self.places, self._starts, [*self._starts, moment.numel()][1:], strict=True):
            moment[start + place.numel : end].zero_()

    def allocate_spares(self) -> None:
        """Make a second set, if there is none yet."""
        self.spares = self.spares or self._new(is_locked=self.is_sent)

    def _new(self, *, is_locked: bool, is_overwritten: bool = False) -> tuple[Tensor, ...]:
        make = partial(self._zeros, self.numel, self._dtype, is_locked=is_locked, is_overwritten=is_overwritten)
        return tuple(make() for _ in MOMENTS)

    @property
    def is_on_device(self) -> bool:
        """Whether there are moments, neither in host memory nor on a disk."""
        return bool(self.moments) and self.moments[0].device.type not in ("cpu", "meta")

    def exchange(self) -> None:
        """The spare moments are those in use, and the other way round."""
        self.moments, self.spares = self.spares, self.moments
        self._fresh.clear()

    def start_of(self, position: int) -> int:
        """Where a segment's elements begin in each moment."""
        return self._starts[position]

    def at(self, position: int) -> dict[str, Tensor]:
        """A segment's moments by name, views."""
        start = self._starts[position]
        return {
            key: m[start : start + self.places[position].numel] for key, m in zip(MOMENTS, self.moments, strict=True)
        }

    def begin(self, position: int) -> dict[str, Tensor]:
        """Zero moments and a step count of zero for a segment that has no states yet."""
        self.counts[position] = 0
        if self.on_disk is not None:
            self._blank.add(position)
        views = self.at(position)
        if position in self._fresh:  # as large as the model: not written to without need
            self._fresh.remove(position)
            return views
        return {key: view.zero_() for key, view in views.items()}

    def forget(self, position: int) -> None:
        """The segment has no states any more."""
        self.counts.pop(position, None)
        self._blank.discard(position)
        self._fresh.discard(position)

    # On a disk

    @property
    def is_away(self) -> bool:
        """Whether they are on a disk, and not opened."""
        return self.on_disk is not None and bool(self.moments) and self.moments[0].is_meta

    @contextmanager
    def opened(self, *, is_written: bool = False) -> Iterator[None]:
        """Inside, moments have values wherever they live: those on a disk are read to host memory, one chunk's at a
        time, so nothing else may open them or update them.

        Args:
            is_written: They are changed inside.

        Raises:
            StorageError: The disk has failed.
        """
        on_disk = self.on_disk
        if on_disk is None or not self.is_away:
            yield
            return
        stand_ins = self.moments
        if self._has_come_from_disk():
            self.moments = tuple(on_disk.read(part) for part in MOMENTS)
            for position in self._blank:
                for view in self.at(position).values():
                    view.zero_()
        else:
            self.moments = tuple(torch.zeros(self.numel, dtype=self._dtype, device="cpu") for _ in MOMENTS)
        try:
            yield
            if is_written:
                for part, moment in zip(MOMENTS, self.moments, strict=True):
                    on_disk.write(part, moment)
                self._blank.clear()
        finally:
            self.moments = stand_ins

    def _has_come_from_disk(self) -> bool:
        """Whether any moments there hold something."""
        return any(position not in self._blank for position in self.counts)

    def take_on_disk(self, members: Collection[int]) -> StatesOnDisk | None:
        """What the update of these members that was described just now has to know of states on a disk; it makes zeros
        where it comes to, of all theirs and perhaps of others'."""
        if self.on_disk is None:
            return None
        blank = [Piece(self._starts[i], self._starts[i] + self.places[i].numel) for i in sorted(self._blank)]
        found = StatesOnDisk(self.on_disk, not self._has_come_from_disk(), tuple(blank))
        self._blank = {i for i in self._blank if self.places[i].member_index not in members}
        return found

    def flat_on_disk(self, key: str) -> Tensor:
        """One moment of all segments, each where the segment lies in the shard, else zeros; read from the disk."""
        if self.on_disk is None or not self._has_come_from_disk():
            return torch.zeros(self._shard_numel, dtype=self._dtype, device="cpu")
        found, end = self.on_disk.read(key), 0
        for position, place in enumerate(self.places):
            if position in self.counts and position not in self._blank:
                found[end : place.shard_offset].zero_()
                end = place.shard_offset + place.numel
        found[end:].zero_()
        return found

    # From the same shard's earlier ones

    def has_same_segments(self, earlier: AdamStates) -> bool:
        return self._extents() == earlier._extents()

    def _extents(self) -> list[tuple[int, int, int]]:
        return [(p.member_index, p.shard_offset, p.numel) for p in self.places]

    def take_memory(self, earlier: AdamStates) -> None:
        """The same memory from now on, spare moments included, whatever lies there."""
        self.moments, self.spares = earlier.moments, earlier.spares
        self._fresh.clear()

    def take_all(self, earlier: AdamStates) -> None:
        """Take over the states of the same segments, from memory to a disk, from a disk, or left on it: host memory
        does not hold a chunk's moments for that alone.

        Args:
            earlier: Of no use afterwards.

        Raises:
            StorageError: A disk has failed.
        """
        if self.on_disk is not None and self.on_disk == earlier.on_disk:
            self.moments, self.counts, self._blank = earlier.moments, earlier.counts, earlier._blank
        elif earlier.counts:
            self.allocate(is_coming=earlier.is_on_device)
            if earlier._has_come_from_disk():
                for number, part in enumerate(MOMENTS):
                    self._copy_by_pieces(earlier, number, part)
            for position, count in earlier.counts.items():
                self._take_blank(position, position in earlier._blank)
                self.counts[position] = count
            self._fresh.clear()

    def _take_blank(self, position: int, is_blank: bool) -> None:
        if is_blank and self.on_disk is not None:
            self._blank.add(position)
        elif is_blank:
            for view in self.at(position).values():
                view.zero_()

    def _copy_by_pieces(self, earlier: AdamStates, number: int, part: str) -> None:
        source, target = earlier.on_disk, self.on_disk
        if source is not None and target is not None:
            target.copy_from(source, part)
        elif source is not None:
            for start, values in source.buffers(part):
                source.read_piece(part, start, values)
                for own, inside in self._overlaps(number, start, values):
                    own.copy_(inside)
        elif target is not None:
            for start, values in target.buffers(part):
                values.zero_()
                for own, inside in earlier._overlaps(number, start, values):
                    inside.copy_(own)
                target.write_piece(part, start, values)

    def _overlaps(self, number: int, start: int, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Of a moment in memory and elements of the shard from `start` on: what is the same segment's."""
        end = start + values.numel()
        for place, begin in zip(self.places, self._starts, strict=True):
            first, last = max(start, place.shard_offset), min(end, place.shard_offset + place.numel)
            if first < last:
                at = begin + first - place.shard_offset
                yield self.moments[number][at : at + last - first], values[first - start : last - start]

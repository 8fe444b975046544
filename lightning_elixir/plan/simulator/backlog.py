"""Updates that run beside forward and backward: what does them, in which order, and when each is done.

The host's worker updates one chunk after the other, those whose states are on NVMe when these have been read; another
thread streams pieces of chunks through the device, over the bus that fetches and gradients use as well. Each takes the
chunk that the next forward needs first, of those whose gradients have landed.
Nothing happens by itself: `advance` lets them work up to a moment, `done_s` makes one chunk the next one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

from lightning_elixir.plan.simulator.lanes import Bus
from lightning_elixir.plan.stream_buffers import NUM_SLOTS

Record = Callable[[str, float, float, str], None]
"""Lane, begin, end, label."""


@dataclass(slots=True, eq=False)
class Work:
    """The update of one chunk."""

    chunk_id: int
    seconds: float
    """With all that it uses to itself."""
    write_back_s: float = 0.0
    """Of the bus to the device, when the host has made the new values."""
    num_pieces: int = 0
    """Streamed: pieces that are left."""
    up_s: float = 0.0
    """Streamed: of the bus to the device, a piece."""
    down_s: float = 0.0
    """Streamed: of the bus from the device, a piece."""
    read_s: float = 0.0
    """States on NVMe: of the disk, before the update."""
    write_s: float = 0.0
    """States on NVMe: of the disk, after it."""
    known_s: float = 0.0
    """States on NVMe: when reading may begin."""
    place: int = 0
    """In the order in which forward needs the chunks: the lowest goes first."""
    ready_s: float = math.inf
    """When its gradients are there, and its states read."""
    is_before_step: bool = False
    """Backward still reads the old values: the new ones may not go up yet."""
    is_begun: bool = False

    @property
    def is_streamed(self) -> bool:
        return self.num_pieces > 0

    @property
    def is_on_disk(self) -> bool:
        return self.read_s + self.write_s > 0


def _turn(work: Work) -> tuple[bool, int]:
    """The lowest goes first: what has begun, then by place."""
    return not work.is_begun, work.place


class _Site(ABC):
    """A queue of updates, and what does them one after the other."""

    def __init__(self, h2d: Bus, d2h: Bus, record: Record | None, done: dict[int, float]) -> None:
        self.h2d, self.d2h, self.record, self.done = h2d, d2h, record, done
        self.free_s = 0.0
        self.waiting: list[Work] = []

    def add(self, work: Work) -> None:
        """One more, at its place in the queue; after its equals."""
        insort(self.waiting, work, key=_turn)

    def advance(self, until_s: float) -> None:
        """Do what begins before `until_s`."""
        while self.waiting and self.free_s < until_s:
            work = self._next()
            if work.ready_s >= until_s:
                return
            self._do(work, until_s)

    def finish(self, work: Work, now_s: float) -> None:
        """Do one next: after what has begun, before all that has not, unless its gradients have yet to land."""
        begun = self.waiting[0]
        if begun.is_begun and begun is not work:
            self._finish(begun)
        self.free_s = max(self.free_s, now_s)
        while work.ready_s > self.free_s:
            other = self._next()
            if max(other.ready_s, self.free_s) >= work.ready_s:
                break
            self._finish(other)
        self._finish(work)

    def _finish(self, work: Work) -> None:
        while work.chunk_id not in self.done:
            self._do(work, math.inf)

    def _next(self) -> Work:
        first = self.waiting[0]
        if first.is_begun or first.ready_s <= self.free_s:
            return first
        ready = next((w for w in self.waiting if w.ready_s <= self.free_s), None)
        return ready or min(self.waiting, key=lambda w: w.ready_s)  # the first of equals

    def left_s(self, now_s: float) -> float:
        """Seconds of work that `now_s` leaves."""
        return max(0.0, self.free_s - now_s) + sum(w.seconds for w in self.waiting)

    @abstractmethod
    def _do(self, work: Work, until_s: float) -> None:
        """Go on with `work`, not much further than `until_s`."""

    def _done(self, work: Work, at_s: float) -> None:
        self.waiting.remove(work)
        self.done[work.chunk_id] = at_s


class _Host(_Site):
    def __init__(self, h2d: Bus, d2h: Bus, record: Record | None, done: dict[int, float], cpu: Bus) -> None:
        super().__init__(h2d, d2h, record, done)
        self.cpu = cpu
        self._held: list[tuple[Work, float]] = []  # updated, with values that may not go up yet

    def _do(self, work: Work, until_s: float) -> None:
        end_s = self._update(work)
        if work.write_back_s and work.is_before_step:
            self._held.append((work, end_s))
            self.waiting.remove(work)
        else:
            self._done(work, self._write_back(work, end_s))

    def _update(self, work: Work) -> float:
        start_s, self.free_s = self.cpu.reserve(max(self.free_s, work.ready_s), work.seconds)
        if self.record is not None:
            self.record("cpu", start_s, self.free_s, f"update {work.chunk_id}")
        return self.free_s

    def let_go(self, now_s: float) -> None:
        """The step has come: new values may go up."""
        for work, done_s in self._held:
            self.done[work.chunk_id] = self._write_back(work, max(done_s, now_s))
        self._held.clear()

    def _write_back(self, work: Work, from_s: float) -> float:
        begin_s, end_s = self.h2d.reserve(from_s, work.write_back_s)
        if self.record is not None:
            self.record("h2d", begin_s, end_s, f"write back {work.chunk_id}")
        return end_s


class _HostOverDisk(_Host):
    """States are read into buffers, also before gradients have landed if there are no others; the host updates what is
    there; then they are written back. Reads and writes share the disk, first come, first served."""

    def __init__(
        self, h2d: Bus, d2h: Bus, record: Record | None, done: dict[int, float], cpu: Bus, num_buffers: int
    ) -> None:
        super().__init__(h2d, d2h, record, done, cpu)
        self.disk = Bus()
        self.unread: list[Work] = []
        self._free_buffers = [0.0] * num_buffers  # since when

    def add(self, work: Work) -> None:
        self.unread.append(work)

    def advance(self, until_s: float) -> None:
        self._read(until_s)
        while self.waiting:
            work = self._next()
            if max(self.free_s, work.ready_s) >= until_s:
                return
            self._do(work, until_s)
            self._read(until_s)

    def finish(self, work: Work, now_s: float) -> None:
        work.place = -1
        while work in self.unread:
            if not self._free_buffers:
                self._do(self._next(), math.inf)
            self._read(math.inf)
        super().finish(work, now_s)

    def left_s(self, now_s: float) -> float:
        reading_s = sum(w.seconds + w.read_s for w in self.unread)
        writing_s = sum(w.write_s for w in (*self.unread, *self.waiting))
        return super().left_s(now_s) + reading_s + writing_s + max(0.0, max(self._free_buffers, default=now_s) - now_s)

    def _read(self, until_s: float) -> None:
        """What there are buffers for."""
        while self.unread and self._free_buffers:
            free_s = min(self._free_buffers)
            work = self._first_unread(free_s)
            if max(free_s, work.known_s) >= until_s:
                return
            self._free_buffers.remove(free_s)
            self.unread.remove(work)
            insort(self.waiting, work, key=_turn)
            begin_s, end_s = self.disk.reserve(max(free_s, work.known_s), work.read_s)
            if self.record is not None:
                self.record("nvme", begin_s, end_s, f"read states {work.chunk_id}")
            work.ready_s = max(work.ready_s, end_s)

    def _first_unread(self, at_s: float) -> Work:
        """The one that is needed first of those whose gradients have landed, or else the one that came first."""
        at_s = max(at_s, self.unread[0].known_s)
        return min((w for w in self.unread if w.ready_s <= at_s), key=_turn, default=self.unread[0])

    def _update(self, work: Work) -> float:
        end_s = super()._update(work)
        self._read(end_s)  # all that the disk was asked for before
        begin_s, written_s = self.disk.reserve(end_s, work.write_s)
        if self.record is not None:
            self.record("nvme", begin_s, written_s, f"store states {work.chunk_id}")
        self._free_buffers.append(written_s)
        return end_s


class _Stream(_Site):
    def _do(self, work: Work, until_s: float) -> None:
        """As many pieces as go up in a row before another transfer has the bus, and before `until_s`."""
        start_s, gap_s = self.h2d.room(max(self.free_s, work.ready_s))
        if start_s >= until_s:
            self.free_s = start_s
            return
        if not work.is_begun:
            work.is_begun = True
            self.waiting.remove(work)
            self.waiting.insert(0, work)
        piece_s = work.seconds / work.num_pieces
        count = work.num_pieces
        if piece_s > 0:
            for most_s, whole in ((until_s - start_s, math.ceil), (gap_s, math.floor)):
                if most_s < count * piece_s:
                    count = min(count, max(1, whole(most_s / piece_s)))
        begin_s, up_end_s = self.h2d.reserve(start_s, count * work.up_s)
        down_s, end_s = self.d2h.reserve(begin_s + work.up_s, count * work.down_s)
        end_s = max(end_s, begin_s + count * piece_s)
        if self.record is not None:
            self.record("h2d", begin_s, up_end_s, f"update {work.chunk_id}")
            self.record("d2h", down_s, down_s + count * work.down_s, f"update {work.chunk_id}")
        # A piece needs a slot, which one that still comes down has.
        self.free_s = max(begin_s + count * piece_s, end_s - (NUM_SLOTS - 1) * piece_s)
        work.num_pieces -= count
        work.seconds -= count * piece_s
        if work.num_pieces == 0:
            self._done(work, end_s)


class Backlog:
    """All updates of one step after the other that states beside the device need.

    Args:
        h2d: The bus to the device, shared with fetches.
        d2h: The bus from the device, shared with gradients.
        record: Told what is done when; None: nothing is.
        num_buffers: For states on NVMe.
    """

    def __init__(self, h2d: Bus, d2h: Bus, record: Record | None, num_buffers: int = 0) -> None:
        self.cpu = Bus()
        """The host's worker."""
        self._done: dict[int, float] = {}
        self._pending: dict[int, tuple[_Site, Work]] = {}
        self._host = _Host(h2d, d2h, record, self._done, self.cpu)
        self._over_disk = _HostOverDisk(h2d, d2h, record, self._done, self.cpu, num_buffers)
        self._stream = _Stream(h2d, d2h, record, self._done)
        # Without buffers, nothing is updated over the disk.
        over_disk = (self._over_disk,) if num_buffers else ()
        self._sites: tuple[_Site, ...] = (self._host, *over_disk, self._stream)

    @property
    def disk(self) -> Bus:
        """Where states on NVMe are, and what else is there."""
        return self._over_disk.disk

    def __contains__(self, chunk_id: int) -> bool:
        """Whether an access that needs this chunk's new values has to wait for them. Backward needs the old ones."""
        return chunk_id in self._pending and not self._pending[chunk_id][1].is_before_step

    def add(self, work: Work, ready_s: float, *, is_before_step: bool = False) -> None:
        """One more update.

        Args:
            work: The update.
            ready_s: When its gradients have landed.
            is_before_step: Whether backward still runs; `step` will end that.
        """
        if work.chunk_id in self._pending:  # not needed since its last update
            ready_s = max(ready_s, self.done_s(work.chunk_id, ready_s))
        work.ready_s, work.is_before_step = ready_s, is_before_step
        site: _Site = self._stream if work.is_streamed else self._over_disk if work.is_on_disk else self._host
        site.add(work)
        self._pending[work.chunk_id] = site, work

    def advance(self, until_s: float) -> None:
        """Let all work up to a moment."""
        if self._pending:
            for site in self._sites:
                site.advance(until_s)

    def host_s(self, from_s: float, most_s: float) -> float:
        """For how long the host's worker goes on with what it has, from a moment on. What it begins after having been
        idle is left out, and so are states on NVMe: an update that begins beside a copy is slowed itself.

        Args:
            from_s: Up to where all has been let work, or later.
            most_s: Beyond which it does not matter.
        """
        end_s, until_s = self._host.free_s, from_s + most_s
        for work in self._host.waiting:
            if end_s >= until_s:
                break
            if work.ready_s <= max(end_s, from_s):
                end_s += work.seconds
        return max(0.0, min(end_s, until_s) - from_s)

    def left_s(self, now_s: float) -> float:
        """Seconds of work that `now_s` leaves to all together."""
        return sum(site.left_s(now_s) for site in self._sites)

    def step(self, now_s: float) -> None:
        """Backward is over: new values may go up."""
        self.advance(now_s)
        for _, work in self._pending.values():
            work.is_before_step = False
        self._host.let_go(now_s)
        self._over_disk.let_go(now_s)

    def forget(self, before_s: float) -> None:
        """No time before this one is asked for again."""
        for bus in (self.cpu, self._over_disk.disk):
            bus.forget(before_s)

    def done_s(self, chunk_id: int, now_s: float) -> float:
        """When a chunk's update is done that is needed from `now_s` on; asked once an update."""
        self.advance(now_s)
        site, work = self._pending.pop(chunk_id)
        if chunk_id not in self._done:
            site.finish(work, now_s)
        return self._done.pop(chunk_id)

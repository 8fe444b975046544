"""What every rank waits for, so that ranks which wait for each other find out.

[Note: ranks that wait for each other] A collective that one rank calls alone never ends, and neither does what the
others have come to instead. Where both go over the same messages, the ranks see it at once (`Comm.exchange`). Where
they do not (two groups, or `torch.distributed.barrier()` of the user's), a rank that has waited for more than a second
writes what it is in to the store in which the default process group began, and reads what the others are in. That a
rank is slow is no error, however slow: it is in no collective then, and is waited for. An error it is where ranks wait
for each other in a ring: A in a collective that B has not come to, B in one that A has not come to. Both are counted,
so it is known, and since neither can go on, it stays true: nothing is guessed, and no timeout ends a healthy run.

While all goes well nothing is written or asked. A thread looks once a second at what this process is in, since the one
that waits may do so inside torch, for ever and deaf to signals; what ranks wait for by our own messages they wait for
in slices, and so hear of this, and of signals, soon.

What has lasted from one look to the next is written, with how many collectives of each group this rank has come to; a
ring counts only if each rank in it was seen there after the reader's own wait began. All in it, and all that wait for
them, raise the same `DivergenceError` 2 to 4 s after the last one has come. A wait of ours raises in its slice. One in
torch cannot be ended from inside: its thread is told to raise when it is back (`PyThreadState_SetAsyncExc`), a barrier
is ended by the rank that it waits for, which joins it, and anything else ends with the process of that rank. Not known
are `send` and `recv`, `work.wait()` of the user's own, and whatever else user code may wait for (a file, a socket): to
the others that is a rank that is slow. Groups are opened behind a question to the store in which all ranks come
together, since torch makes them deaf to signals. A rank that ends its program, or closes its engine, says so; what
waits for it raises a `PeerLostError`.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import sys
import sysconfig
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, _world

from lightning_elixir.core.garbage import no_collections
from lightning_elixir.core.lifelines import Lifelines, tie
from lightning_elixir.core.peers import Process, Roster, Watch
from lightning_elixir.core.signals import handle_overdue
from lightning_elixir.errors import DivergenceError, PeerLostError

log = logging.getLogger(__name__)

# How often a rank that waits looks what the others are in, and how many ranks it does so for in that time.
LOOK_EVERY_S = 1.0
_RANKS_PER_LOOK = 64
# How long a signal that has come inside of `deferred` waits for the other ranks.
LONGEST_DEFERRED_S = 3.0
# How long others may take to hear that they wait in vain.
_LONGEST_HEARING_S = 5.0
# When a rank that waits for others says so.
_TELL_AFTER_S = 30.0

_TORCH = "torch:"
_BARRIER = "torch.distributed.barrier()"


class Call(NamedTuple):
    """What a rank does, or whose part it is in, when it waits for others."""

    words: str
    family: str = ""
    """Calls whose messages may meet, and are told apart by the rank that reads them; empty: this one's alone."""
    is_routine: bool = False
    """Whether every program makes this call time and again: where ranks differ, another call is at fault."""
    cure: str = ""
    """What all ranks must do; empty: call it."""
    is_of_batch: bool = False
    """Whether a rank comes to it once or more for each of its batches, and never without one."""

    @property
    def code(self) -> int:
        """The same on every rank for the same family."""
        return _code(self.family or self.words)


@cache
def _code(name: str) -> int:
    return zlib.crc32(name.encode())


SETUP = Call("the preparation or the end of a run", is_routine=True)
SETUP_OBJECTS = SETUP._replace(family="objects")


class Position(NamedTuple):
    """Where a rank is, for people."""

    words: str
    where: str
    cure: str
    """What all ranks must do; empty: what they all do, time and again."""
    is_of_batch: bool = False
    """Whether it has a batch there."""

    def __str__(self) -> str:
        return f"{self.words} ({self.where})" if self.where else self.words


# Where one rank has a batch and another has come to something else, it may be that the other has no batch left.
MORE_BATCHES = (
    "Where one rank has more batches than another, give all as many, with a DistributedSampler or `limit_train_batches`"
    " (in a prediction with experts that are spread, `limit_predict_batches`)"
)


def differing(positions: Mapping[int, Position]) -> str:
    """The error of ranks that are at different points; the same on all."""
    ranks: dict[str, list[int]] = {}
    for rank, position in sorted(positions.items()):
        ranks.setdefault(str(position), []).append(rank)
    told = "; ".join(f"{_named(found)} in {words}" for words, found in ranks.items())
    special = list(dict.fromkeys(p.cure for _, p in sorted(positions.items()) if p.cure))
    cure = "Every rank must make the same of these calls, equally often and in the same order"
    if special:
        first = " and ".join(special)
        cure = (
            f"{first[0].upper()}{first[1:]} on every rank, at the same point of the program, and not on one"
            " alone (as under `if rank == 0`): all ranks have a part of what it gives"
        )
    if any(p.is_of_batch for p in positions.values()):
        cure += f". {MORE_BATCHES}"
    return f"the ranks are in different calls, in which they wait for each other: {told}. {cure}"


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"ranks {shown} are"


# Where a thread is


def position_of(call: Call, thread: int | None = None) -> Position:
    """Where in the user's program a thread is that is in `call`; None: this thread."""
    callee, place = _users_call(threading.get_ident() if thread is None else thread)
    main = threading.main_thread().ident
    if not place and main is not None:
        callee, place = _users_call(main)  # autograd has threads of its own
    where = f"{callee} at {place}" if callee and place else place and f"at {place}"
    named = call.words if callee in _RUNS or not callee else callee
    cure = "" if call.is_routine else call.cure or f"call {named}"
    return Position(call.words, where, cure, call.is_of_batch)


# What a user calls once, and in which Lightning or a callback comes to all else.
_RUNS = {f"Trainer.{name}()" for name in ("fit", "validate", "test", "predict")}


def _users_call(thread: int) -> tuple[str, str]:
    """What the user's program has called in which a thread is, if that has a public name, and the line where."""
    callee, libraries = "", _libraries()
    with _without_collections():
        frame = sys._current_frames().get(thread)
        while frame is not None:
            code = frame.f_code
            if not code.co_filename.startswith(libraries):
                is_public = callee and not any(part.startswith(("_", "<")) for part in callee.split("."))
                return (f"{callee}()" if is_public else "", f"{os.path.basename(code.co_filename)}:{frame.f_lineno}")
            callee = code.co_qualname
            frame = frame.f_back
    return "", ""


# Of the threads that look at others' frames: each would put back what another has set.
_LOOKS_AT_FRAMES = threading.Lock()


@contextmanager
def _without_collections() -> Iterator[None]:
    """No garbage is collected while a thread looks at another's frames.

    Until Python 3.12 a collection may begin wherever an object is made, so inside `sys._current_frames()` too, which
    holds the lock of the list of threads. A finalizer (of a process group, say) lets other threads run; one of them
    that starts or ends a thread waits for that lock and keeps the GIL, so the process hangs for good
    (https://github.com/python/cpython/issues/106883, which 3.11 keeps).
    """
    if sys.version_info >= (3, 12):
        yield
        return
    with _LOOKS_AT_FRAMES, no_collections():
        yield


def _libraries() -> tuple[str, ...]:
    """Folders of code that is not the user's."""
    found = [os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "<frozen"]
    for name in ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics"):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file:
            found.append(os.path.dirname(file))
    standard = sysconfig.get_path("stdlib")
    found += [os.path.join(standard, name) for name in ("contextlib", "threading", "concurrent", "multiprocessing")]
    return tuple(found)


# Waits


class CollectiveFailed(RuntimeError):
    """Of other ranks' doing: connections are closed, or a rank has told that it leaves."""


class Place:
    """One group of ranks that meet in a fixed order.

    Args:
        name: The same on every rank, and no other's.
        ranks: Numbers of its ranks in the default group.
        roster: What they tell of their ends.
    """

    def __init__(self, name: str, ranks: Sequence[int], roster: Roster | None = None) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.roster = roster
        self.count = 0
        """How many collectives this rank has come to."""
        self.attempts = 0
        """Of groups that are opened: how often this rank has tried. A try that fails is none of those that count."""


@dataclass(eq=False)
class Wait:
    """A thread of this process is in a collective that is not over."""

    place: str
    number: int
    """Of this collective among those of the place, from 1."""
    needs: tuple[int, ...]
    """Ranks, of the default group, without which it does not end."""
    call: Call
    thread: int
    roster: Roster | None = None
    attempt: int = 0
    """Of groups that are opened: which of this rank's tries. What was found out of an earlier one says nothing."""
    since_s: float = field(default_factory=time.monotonic)
    verdict: str = ""
    """Why it will never end."""
    is_peer_gone: bool = False
    lost: Mapping[int, str] = field(default_factory=dict)
    """Ranks, of the default group, whose hosts have vanished."""
    has_told: bool = False
    """Whether the user was told that it takes long."""
    barriers: Sequence[tuple[int, str, int]] = ()
    """Ranks that wait in a barrier of torch's to which this rank comes next, the place and the number of that."""

    def is_same_as(self, other: Wait) -> bool:
        """Whether both are of one call; what is in torch is found anew every time."""
        return (self.place, self.number, self.attempt) == (other.place, other.number, other.attempt)

    def check(self) -> None:
        """Called between the slices of a wait.

        Raises:
            DivergenceError: The ranks wait for each other.
            CollectiveFailed: Another rank has told that it cannot go on, or has vanished with its host.
        """
        if self.verdict:
            raise DivergenceError(self.verdict)
        if self.is_peer_gone or (self.lost and any(rank in self.lost for rank in self.needs)):
            raise CollectiveFailed("another rank has left")
        handle_overdue(LONGEST_DEFERRED_S)


class Leaver(Protocol):
    """A group of ranks that can be left."""

    def leave(self, error: BaseException) -> None: ...


class Line:
    """What this process is in, in the order of its program, and what the others are in.

    Of one process and one default group there is one: see `line_of`. Whatever its groups and engines, a process waits
    in one place at a time.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self._store = dist.PrefixStore("lightning_elixir/waits", _get_default_store())
        self._places: weakref.WeakSet[Place] = weakref.WeakSet()
        self._leavers: weakref.WeakSet[Leaver] = weakref.WeakSet()
        self._openings: dict[str, Place] = {}
        self._current: list[Wait] = []
        self._watch: Watch | None = None
        self.lost: dict[int, str] = {}
        """Ranks whose hosts have vanished, and what to say of that. Filled by the thread of the lifelines."""
        self.abandoned: list[weakref.ref[dist.ProcessGroup]] = []
        """Groups of what the garbage collector has taken before it was closed. To be destroyed where groups are made:
        the collector may run inside of torch's own list of them."""
        self._lifelines: Lifelines | None = None
        # Of the thread that looks
        self._seen: Wait | None = None
        self._beat = 0
        self._beats: dict[int, int] = {}
        self._has_ring = False
        self._looks = 0
        self._is_posted = False
        self._has_peer_told = False
        for key in (str(self.rank), f"verdict/{self.rank}"):  # of an earlier process group over the same store
            self._set(key, "")

    def take_abandoned(self) -> list[dist.ProcessGroup]:
        """What `abandoned` has, which is empty then."""
        taken = [self.abandoned.pop() for _ in range(len(self.abandoned))]
        return [group for group in (known() for known in taken) if group is not None]

    # Of threads that wait

    def add(self, place: Place, leaver: Leaver) -> None:
        """Have a place looked after, for as long as it lives; `leaver.leave(error)` is called where ranks wait for each
        other, since none can go on then."""
        self._places.add(place)
        self._leavers.add(leaver)
        weakref.finalize(place, _rest, weakref.ref(self)).atexit = False
        self._watch_out()

    def _watch_out(self) -> None:
        if self._watch is None:
            line = weakref.ref(self)
            self._watch = Watch(lambda: _look(line), lambda: None, lambda: _tell_end(line), look_every_s=LOOK_EVERY_S)
            weakref.finalize(self, self._watch.stop)

    def remove(self, place: Place) -> None:
        """It is closed."""
        self._places.discard(place)
        self.rest()

    def rest(self) -> None:
        """End the thread that looks, and the lifelines, where there is no place left and nothing to wait for."""
        if self._current or next(iter(self._places), None) is not None:
            return
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        if self._lifelines is not None:
            self._lifelines.close()
            self._lifelines = None

    @property
    def tied(self) -> str:
        """The name of this rank's lifelines; empty: it has none."""
        return "" if self._lifelines is None else self._lifelines.name

    def tie(
        self, name: str, tied: Sequence[str], processes: Sequence[Process], exchange: Callable[[Any], list[Any]]
    ) -> None:
        """Have lifelines to the other hosts, if there are any: new ones, unless all ranks still have their ends of the
        same. Collective, over all ranks of the default group.

        Args:
            name: For new ones.
            tied: By rank.
            processes, exchange: See `lifelines.tie`.
        """
        if len({process.where for process in processes}) == 1 or (self.tied and set(tied) == {self.tied}):
            return
        if self._lifelines is not None:
            self._lifelines.close()
            self._lifelines = None  # also where a rank fails while new ones are made
        self._lifelines = tie(name, self.rank, processes, exchange, self.lost)
        weakref.finalize(self, self._lifelines.close).atexit = False

    def begin(self, wait: Wait) -> None:
        wait.lost = self.lost
        self._current.append(wait)

    def end(self, wait: Wait) -> None:
        with suppress(ValueError):
            self._current.remove(wait)

    def leave(self, error: BaseException) -> None:
        """Have all groups left: others may come to wait for this rank in any of them."""
        for leaver in list(self._leavers):
            leaver.leave(error)

    @contextmanager
    def opening(self, name: str, ranks: Sequence[int], call: Call) -> Iterator[None]:
        """Wait until all ranks have come to make groups of this name: torch waits for them deaf to signals."""
        place = self._openings.setdefault(name, Place(f"open/{name}", ranks))
        place.count += 1
        place.attempts += 1
        wait = Wait(place.name, place.count, place.ranks, call, threading.get_ident(), attempt=place.attempts)
        self._set(f"{place.name}/{self.rank}", f"{place.count} {place.attempts}")
        self.begin(wait)
        self._watch_out()
        try:
            pause_s = 0.002
            for rank in place.ranks:
                while rank != self.rank and self._come_to(place.name, rank)[0] < place.count:
                    self._check_hosts(wait)
                    wait.check()
                    time.sleep(pause_s)
                    pause_s = min(0.1, pause_s * 1.5)
        except BaseException as error:
            place.count -= 1
            self._set(f"{place.name}/{self.rank}", f"{place.count} {place.attempts}")
            self.end(wait)
            if isinstance(error, DivergenceError):
                self.leave(error)
            self.rest()
            raise
        try:
            yield
        except RuntimeError:  # torch's, where its connections to a host that has vanished were ended
            self._check_hosts(wait)
            raise
        finally:
            self.end(wait)

    def _check_hosts(self, wait: Wait) -> None:
        """Raise where groups cannot be made since a host has vanished."""
        vanished = {rank: self.lost[rank] for rank in wait.needs if rank in self.lost}
        if vanished:
            why = "; ".join(dict.fromkeys(vanished.values()))
            text = f"rank {self.rank} cannot go on: {why}. It was in {position_of(wait.call, wait.thread)}"
            raise PeerLostError(text, ranks=sorted(vanished))

    def _come_to(self, name: str, rank: int) -> tuple[int, int]:
        """How often a rank has opened these groups, counting the try under way, and how often it has tried."""
        count, _, attempts = self._get(f"{name}/{rank}").partition(" ")
        return (int(count), int(attempts)) if count else (0, 0)

    # Of the thread that looks

    def look(self) -> None:
        """Once a second."""
        wait = self._lasting()
        if wait is None:
            return
        self._looks += 1
        if self._looks % max(1, len(wait.needs) // _RANKS_PER_LOOK):
            return
        if wait.roster is not None and wait.roster.is_waited_for_in_vain(wait.number):
            wait.is_peer_gone = wait.is_peer_gone or self._has_peer_told  # connections tell sooner, if they can
            self._has_peer_told = True
        self._beat += 1
        self._is_posted = True
        record = self._record(wait)
        self._set(str(self.rank), json.dumps(record))
        if self.is_decided(wait):
            return
        others = self._others(wait)
        ring = _ring(self.rank, {**others, self.rank: record})
        if not ring:
            self._tell(wait, others)
        elif not self._has_ring:
            self._has_ring = True  # by the next look more ranks may have come, which must hear too
        elif all(rank == self.rank or others[rank]["beat"] > self._beats[rank] for rank in ring):
            records = {**others, self.rank: record}
            # A rank that waits for one of these is stuck as well.
            sure = {rank for rank in others if others[rank]["beat"] > self._beats[rank]} | {self.rank}
            stuck = {rank: records[rank] for rank in sure if rank in ring or {*records[rank]["needs"]} & {*ring}}
            verdict = differing({rank: Position(*r["position"]) for rank, r in stuck.items()})
            waits = _waits_in_vain(stuck, records)
            ended = {(r["place"], r["number"]) for r in stuck.values() if r["position"][0] == _BARRIER}
            barriers = [(rank, *place) for rank, places in waits.items() for place in places if place in ended]
            for rank, places in waits.items():
                of = [(*place, _attempts_at(place, stuck)) for place in places]
                told = {"of": of, "text": verdict, "barriers": barriers}
                self._set(f"verdict/{rank}", json.dumps(told))
            self._conclude(wait, verdict, barriers)

    def is_decided(self, wait: Wait) -> bool:
        """Whether this or another rank has found out that a wait will never end."""
        if not wait.verdict:
            text = self._get(f"verdict/{self.rank}")
            told = json.loads(text) if text else {}
            for place, number, attempts in told.get("of", ()):
                if (place, number) == (wait.place, wait.number) and not self._is_of_earlier_try(wait, attempts):
                    self._conclude(wait, told["text"], told["barriers"])
        return bool(wait.verdict)

    def _is_of_earlier_try(self, wait: Wait, attempts: Mapping[str, int]) -> bool:
        """Whether groups are opened again since it was found out that they never will be.

        Args:
            attempts: Of the ranks that waited for it then, by number, as `json` gives them.
        """
        if str(self.rank) in attempts:
            return attempts[str(self.rank)] != wait.attempt
        return any(self._come_to(wait.place, int(rank))[1] > attempt for rank, attempt in attempts.items())

    def barriers_to_end(self, wait: Wait) -> list[dist.ProcessGroup]:
        """Where ranks wait in barriers of torch's for this one, which never comes: it should, so that they are back and
        raise what they have heard. Waits for some seconds until they have."""
        deadline = time.monotonic() + _LONGEST_HEARING_S
        for rank, place, number in wait.barriers:
            while self._get(f"heard/{rank}") != f"{place}#{number}" and time.monotonic() < deadline:
                time.sleep(0.05)
        places = {place for _, place, _ in wait.barriers}
        return [group for group in list(_world.pg_map) if _TORCH + group.group_name in places]

    def tell_end(self) -> None:
        """The program ends, with nothing wrong."""
        for place in list(self._places):
            if place.roster is not None:
                place.roster.tell_orderly_end()

    def _lasting(self) -> Wait | None:
        """What this process is in for the second look at least."""
        wait = self._current[-1] if self._current else self._torch_wait()
        seen, self._seen = self._seen, wait
        if wait is not None and seen is not None and wait.is_same_as(seen):
            if wait is not seen:
                self._seen = wait = seen
            return wait
        self._beats.clear()
        self._has_ring = False
        self._has_peer_told = False
        self._looks = -1
        if self._is_posted:
            self._is_posted = False
            self._set(str(self.rank), "")
        return None

    def _record(self, wait: Wait) -> dict[str, Any]:
        return {
            "place": wait.place,
            "number": wait.number,
            "attempt": wait.attempt,
            "needs": [rank for rank in wait.needs if rank != self.rank],
            "position": position_of(wait.call, wait.thread),
            "passed": {p.name: p.count for p in (*self._places, *self._openings.values())} | _torch_counts(),
            "beat": self._beat,
        }

    def _others(self, wait: Wait) -> dict[int, dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        wanted = [rank for rank in wait.needs if rank != self.rank]
        with suppress(Exception):
            for rank in wanted:
                if self._store.check([str(rank)]):
                    text = self._store.get(str(rank)).decode()
                    if text:
                        found[rank] = json.loads(text)
                        self._beats.setdefault(rank, found[rank]["beat"])
        return found

    def _tell(self, wait: Wait, others: Mapping[int, Mapping[str, Any]]) -> None:
        if not (wait.has_told or wait.call.is_routine) and time.monotonic() - wait.since_s > _TELL_AFTER_S:
            wait.has_told = True
            there = {r for r, o in others.items() if (o["place"], o["number"]) == (wait.place, wait.number)}
            absent = [rank for rank in wait.needs if rank not in there and rank != self.rank]
            log.warning(
                "rank %d is in %s and waits for %s, which must call it too",
                self.rank,
                position_of(wait.call, wait.thread),
                f"rank {absent[0]}" if len(absent) == 1 else f"ranks {', '.join(map(str, absent[:8]))}",
            )

    def _conclude(self, wait: Wait, verdict: str, barriers: Sequence[Sequence[Any]]) -> None:
        counts = _torch_counts()
        wait.barriers = [(r, place, number) for r, place, number in barriers if counts.get(place) == number - 1]
        wait.verdict = verdict
        if wait.place.startswith(_TORCH):  # nothing can end that from outside
            log.error("rank %d: %s", self.rank, verdict)
            _raise_in(wait.thread, verdict)
            self._set(f"heard/{self.rank}", f"{wait.place}#{wait.number}")
            self.leave(DivergenceError(verdict))

    def _torch_wait(self) -> Wait | None:
        """A collective that the user has called in torch, on the main thread."""
        thread = threading.main_thread().ident
        if thread is None:
            return None
        with _without_collections():
            found = _torch_call(sys._current_frames().get(thread))
        if found is None:
            return None
        group, call, needs = found
        number = _count_of(group)
        return None if number is None else Wait(_TORCH + group.group_name, number, needs, call, thread)

    # The store may be gone with the process that keeps it

    def _set(self, key: str, value: str) -> None:
        with suppress(Exception):
            self._store.set(key, value)

    def _get(self, key: str) -> str:
        with suppress(Exception):
            if self._store.check([key]):
                return self._store.get(key).decode()
        return ""


def _waits_in_vain(
    stuck: Mapping[int, Mapping[str, Any]], records: Mapping[int, Mapping[str, Any]]
) -> dict[int, list[tuple[str, int]]]:
    """Rank -> collectives (place and number) of which it must hear that they never end: its own, or, where a rank has
    not told yet what it is in, those in which the stuck ones wait for it, since it may come to each."""
    waits = {rank: {(record["place"], record["number"])} for rank, record in stuck.items()}
    for record in stuck.values():
        place = record["place"], record["number"]
        for rank in record["needs"]:
            theirs = records.get(rank)
            if rank not in stuck and (theirs is None or (theirs["place"], theirs["number"]) == place):
                waits.setdefault(rank, set()).add(place)
    return {rank: sorted(places) for rank, places in waits.items()}


def _attempts_at(place: tuple[str, int], stuck: Mapping[int, Mapping[str, Any]]) -> dict[int, int]:
    """Rank -> which of its tries: of those that wait there."""
    there = {rank: record for rank, record in stuck.items() if (record["place"], record["number"]) == place}
    return {rank: record["attempt"] for rank, record in there.items()}


def _ring(start: int, records: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Ranks that wait for each other in a ring through `start`; empty: none does."""
    before: dict[int, int] = {}
    reached = [start]
    for rank in reached:
        record = records[rank]
        for needed in record["needs"]:
            other = records.get(needed)
            if other is None:
                continue
            passed = other["passed"].get(record["place"], None if record["place"].startswith(_TORCH) else 0)
            if passed is None or passed >= record["number"]:
                continue  # it is there
            if needed == start:
                ring = [rank]
                while ring[-1] != start:
                    ring.append(before[ring[-1]])
                return ring
            if needed not in before:
                before[needed] = rank
                reached.append(needed)
    return []


# What torch is asked for by users

_TO_FIRST = {"broadcast", "broadcast_object_list", "scatter", "scatter_object_list"}
_TO_LAST = {"reduce", "gather", "gather_object"}
_TO_ALL = {"barrier", "monitored_barrier", "all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor"}
_TO_ALL |= {"all_gather_single", "all_to_all", "all_to_all_single", "reduce_scatter", "reduce_scatter_tensor"}
_TO_ALL |= {"reduce_scatter_single", "all_gather_coalesced", "all_reduce_coalesced"}


def _torch_call(frame: FrameType | None) -> tuple[dist.ProcessGroup, Call, tuple[int, ...]] | None:
    """The collective that a thread is in, its group, and the ranks that it waits for."""
    inner = frame
    while inner is not None and inner.f_code.co_filename.endswith(_TORCH_FILES):
        name = inner.f_code.co_name
        if name in _TO_FIRST or name in _TO_LAST or name in _TO_ALL:
            return _torch_needs(name, inner.f_locals)
        inner = inner.f_back
    return None


_TORCH_FILES = (os.path.join("torch", "distributed", "distributed_c10d.py"), "c10d_logger.py")


def _torch_needs(name: str, arguments: Mapping[str, Any]) -> tuple[dist.ProcessGroup, Call, tuple[int, ...]] | None:
    group = arguments.get("group") or dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup) or arguments.get("async_op"):
        return None
    try:
        ranks = tuple(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        return None
    call = Call(f"torch.distributed.{name}()", is_routine=True)
    root = arguments.get("src") if name in _TO_FIRST else arguments.get("dst") if name in _TO_LAST else None
    if root is None and name in _TO_FIRST | _TO_LAST:
        within = arguments.get("group_src", arguments.get("group_dst"))
        root = ranks[within] if isinstance(within, int) and within < len(ranks) else None
        if root is None:
            return None
    return group, call, ranks if root is None or root == dist.get_rank() else (root,)


def _count_of(group: dist.ProcessGroup) -> int | None:
    with suppress(Exception):
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined] # torch's stubs lack it
    return None


def _torch_counts() -> dict[str, int]:
    """How many collectives of each group of torch's this rank has come to."""
    found = {_TORCH + group.group_name: _count_of(group) for group in list(_world.pg_map)}
    return {name: count for name, count in found.items() if count is not None}


def _raise_in(thread: int, text: str) -> None:
    """Have a thread that is inside torch raise a `DivergenceError` as soon as it is back."""

    class Told(DivergenceError):
        def __init__(self) -> None:
            super().__init__(text)

    Told.__name__ = Told.__qualname__ = "DivergenceError"
    Told.__module__ = DivergenceError.__module__
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(Told))


# One for each default group: all that make a group must find it, and a thread waits in one place only. It holds nothing
# of any engine's.
_LINES: weakref.WeakKeyDictionary[dist.ProcessGroup, Line] = weakref.WeakKeyDictionary()


def line_of_process() -> Line:
    """The line of this process."""
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("there is no default process group")
    if world not in _LINES:
        _LINES[world] = Line()
    return _LINES[world]


def _look(line: weakref.ref[Line]) -> bool:
    found = line()
    if found is not None:
        try:
            found.look()
        except Exception:  # the run goes on without
            log.debug("could not look what the other ranks are in", exc_info=True)
    return False


def _rest(line: weakref.ref[Line]) -> None:
    found = line()
    if found is not None:
        found.rest()


def _tell_end(line: weakref.ref[Line]) -> None:
    found = line()
    if found is not None:
        found.tell_end()

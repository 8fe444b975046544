"""What has become of the other ranks, where a collective has failed.

[Note: lost ranks] Nothing is asked for while all goes well. A rank that cannot go on writes that, and why, to the
store in which the default process group began, and then closes its connections. A rank that waits for it, or comes to
wait later, gets an error at once, looks into the store, writes that it has heard, and closes its own: so ranks that are
connected to the first one only through others hear as well. A killed process writes nothing. Its connections are closed
by the system, and then the others of its host find that there is no such process any more; those of other hosts read
that from what these have written, or name the ranks that have not written anything for some seconds.

[Note: hosts that wait in their device] With NCCL a host may wait for a kernel that waits for a peer which is gone: no
connection of the host's own fails, and the kernel spins until NCCL's timeout, half an hour. There a thread looks once a
second (one question to the store), and ends the connections if the rank itself has not noticed for some seconds.

Processes that end with nothing wrong say so, and are not missed. A host with one rank whose process is killed is not
seen from other hosts in this way, unless it kept the store: those that wait in their device wait for NCCL's timeout. A
host that vanishes (no power, no network) closes nothing: see [Note: hosts that vanish]. A rank in a collective of the
user's own, or of torchmetrics, over the default group hears of a lost peer when the peer's process ends.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from lightning_elixir.core.signals import start

# How long to look for lost ranks. Ranks that compute at the time have not heard of a failure yet.
_LONGEST_LOOK_S = 5.0
_PAUSE_S = 0.05
# How long to wait for the others where all have failed and begin anew.
_LONGEST_MEETING_S = 60.0
# How often a watch looks, and how long it leaves it to the rank itself to notice.
_LOOK_EVERY_S = 1.0
_GRACE_S = 3.0
_MOST_FAILED_LOOKS = 3

_ANYONE = "anyone"
_CLOSED = "closed"


@dataclass(frozen=True)
class Process:
    """A process, such that others can tell whether it is there."""

    host: str
    place: str
    """Where its number means it: boot and namespace."""
    pid: int
    started: str

    @property
    def where(self) -> str:
        """The same for processes of one host, and for no others."""
        return f"{self.host} {self.place}"

    @staticmethod
    def this() -> Process:
        pid = os.getpid()
        status = None
        with suppress(OSError):
            status = _status(pid)
        return Process(socket.gethostname(), _place(), pid, (status or ("", ""))[1])

    def has_ended(self) -> bool:
        """Whether that is certain."""
        if not self.place or self.place != _place():
            return False
        try:
            status = _status(self.pid)
        except OSError:
            return False  # too many open files, say
        return status is None or status[0] in "ZX" or status[1] != self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _place() -> str:
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return ""  # it is another namespace's, where our numbers are other processes
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""  # no Linux: no process is known to have ended


def _status(pid: int) -> tuple[str, str] | None:
    """State and time of start; None: there is no such process.

    Raises:
        OSError: That cannot be told.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], fields[19]


class Roster:
    """The ranks of a group, and what they have written about their end.

    Args:
        name: Of the group; the same on every rank, and no other's.
        rank: This one.
    """

    def __init__(self, name: str, rank: int) -> None:
        self.name = name
        self.processes: list[Process] = []
        """By rank; to be filled in."""
        self.numbers: Sequence[int] = ()
        """By rank: its number in the default group; to be filled in."""
        self.lost: Mapping[int, str] = {}
        """By that number: what to say of ranks whose hosts have vanished; to be filled in."""
        self._rank = rank
        self._store = dist.PrefixStore(f"lightning_elixir/{name}", _get_default_store())
        self._is_store_here = dist.get_rank() == 0
        self._num_failed_looks = 0

    def tell(self, *, failed: str | None = None, heard: str = "") -> None:
        """This rank cannot go on.

        Args:
            failed: Why, where that lies with this rank.
            heard: What it knows of others, where it lies with those.
        """
        self._set(str(self._rank), f"failed:{failed}" if failed is not None else f"heard:{heard}")
        self._set(_ANYONE, "")

    def tell_orderly_end(self) -> None:
        """This rank's process ends, with nothing wrong."""
        self._set(f"ended/{self._rank}", "")

    def tell_closed(self, count: int) -> None:
        """This rank has closed the group, with nothing wrong, after so many collectives."""
        self._set(f"{_CLOSED}/{self._rank}", str(count))
        self._set(_CLOSED, "")

    def is_waited_for_in_vain(self, number: int) -> bool:
        """Whether some rank has told that it cannot go on, or has closed the group before it came to its collective of
        this number. One question or two, while none has."""
        if self._has(_ANYONE):
            return True
        if not self._has(_CLOSED):
            return False
        return any(0 <= self._closed_after(rank) < number for rank in range(len(self.processes)))

    def _closed_after(self, rank: int) -> int:
        """After how many collectives a rank has closed the group; -1: it has not."""
        key = f"{_CLOSED}/{rank}"
        with suppress(Exception):
            if self._store.check([key]):
                return int(self._store.get(key))
        return -1

    def is_anyone_gone(self) -> bool:
        """Whether some rank has told that it cannot go on, has vanished with its host, or has ended on this one, other
        than orderly; or whether the store has been gone for several looks. Takes one look."""
        if self.vanished():
            return True
        for rank, process in enumerate(self.processes):  # before the store, in which another thread may be waiting
            if process.has_ended() and not self._has(f"ended/{rank}"):
                return True
        try:
            is_told = bool(self._store.check([_ANYONE]))
        except Exception:
            self._num_failed_looks += 1
            return self._num_failed_looks >= _MOST_FAILED_LOOKS
        self._num_failed_looks = 0
        return is_told

    def causes(self) -> dict[int, str]:
        """Rank -> what has become of it; of those that keep this one from going on. Waits some seconds to learn it."""
        deadline = time.monotonic() + _LONGEST_LOOK_S
        while True:
            ends = {rank: self._end_of(rank) for rank in range(len(self.processes)) if rank != self._rank}
            found = {rank: f"rank {rank} failed: {text}" for rank, (kind, text) in ends.items() if kind == "failed"}
            silent = [rank for rank, (kind, _) in ends.items() if not kind]
            for rank in silent:
                if self._has(f"ended/{rank}"):
                    found[rank] = f"rank {rank} has come to the end of its program ({self.processes[rank]})"
                elif self.processes[rank].has_ended():
                    found[rank] = f"rank {rank} has ended ({self.processes[rank]})"
                elif self._closed_after(rank) >= 0:
                    found[rank] = f"rank {rank} has closed what this goes through (close())"
            if vanished := self.vanished():  # looked for last: questions to a store on that host fail when it is known
                return vanished
            heard = {rank: text for rank, (kind, text) in ends.items() if kind == "heard" and text}
            if found or not silent:
                return found or dict(list(heard.items())[:1])
            if heard:
                return dict(list(heard.items())[:1])
            if time.monotonic() > deadline:
                return {rank: f"rank {rank} does not answer ({self.processes[rank]})" for rank in silent}
            time.sleep(_PAUSE_S)

    def vanished(self) -> dict[int, str]:
        """Ranks whose hosts have vanished, and what to say of that."""
        if not self.lost:
            return {}
        return {rank: self.lost[number] for rank, number in enumerate(self.numbers) if number in self.lost}

    def have_ended_well(self, ranks: Collection[int]) -> bool:
        """Whether there are any, and nothing has gone wrong with them: they were through with what they had to do."""
        return bool(ranks) and all(
            self._end_of(rank)[0] != "failed" and (self._has(f"ended/{rank}") or self._closed_after(rank) >= 0)
            for rank in ranks
        )

    def have_all_told(self, longest_s: float = _LONGEST_LOOK_S) -> bool:
        """Wait until every rank has told that it cannot go on, or has ended.

        Returns:
            Whether every rank has told.
        """
        deadline = time.monotonic() + longest_s
        while True:
            silent = [rank for rank in range(len(self.processes)) if not self._end_of(rank)[0]]
            if not silent:
                return True
            vanished = self.vanished()
            gone = [r for r in silent if r in vanished or self.processes[r].has_ended() or self._closed_after(r) >= 0]
            if gone == silent or time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE_S)

    def meet_again(self) -> bool:
        """Wait until every rank has come here, having told.

        Returns:
            Whether every rank has come, and soon.
        """
        return self._have_all_come("again", _LONGEST_MEETING_S)

    def have_all_stumbled(self) -> bool:
        """Wait until every rank has come here, each with an error under way that it has not told of.

        Returns:
            Whether every rank has come, within some seconds.
        """
        return self._have_all_come("stumbled", _LONGEST_LOOK_S)

    def _have_all_come(self, where: str, longest_s: float) -> bool:
        self._set(f"{where}/{self._rank}", "")
        deadline = time.monotonic() + longest_s
        while not all(self._has(f"{where}/{rank}") for rank in range(len(self.processes))):
            is_anyone_gone = bool(self.vanished()) or any(process.has_ended() for process in self.processes)
            if is_anyone_gone or time.monotonic() > deadline:
                return False
            time.sleep(_PAUSE_S)
        return True

    def linger(self) -> None:
        """Where the store is kept by this process, wait a moment for ranks that may look into it: it may end soon."""
        if self._is_store_here:
            self.have_all_told(2.0)

    def _end_of(self, rank: int) -> tuple[str, str]:
        if not self._has(str(rank)):
            return "", ""
        kind, _, text = self._store.get(str(rank)).decode().partition(":")
        return kind, text

    # The store may be gone with the process that keeps it

    def _set(self, key: str, value: str) -> None:
        with suppress(Exception):
            self._store.set(key, value)

    def _has(self, key: str) -> bool:
        with suppress(Exception):
            return self._store.check([key])
        return False


class Watch:
    """Looks, now and then, whether any rank is gone: for hosts that wait in their device, where no peer wakes them.

    Its thread ends before the interpreter does.

    Args:
        is_anyone_gone: Takes one look.
        react: Called once, on the watch's thread, where a rank is gone and this one has not noticed by itself for some
            seconds, as `stop` would have told.
        tell_end: Called when the interpreter ends while this is at work, unless an error has ended the program.
    """

    def __init__(
        self,
        is_anyone_gone: Callable[[], bool],
        react: Callable[[], None],
        tell_end: Callable[[], None],
        *,
        look_every_s: float = _LOOK_EVERY_S,
        grace_s: float = _GRACE_S,
    ) -> None:
        # Released: it is over. No `Event`, whose own lock `stop` would wait for if the garbage collector called it
        # just where that is taken.
        self._is_going = threading.Lock()
        self._is_going.acquire()
        self._tell_end = tell_end
        self._thread = threading.Thread(
            target=_watch,
            args=(self._is_going, is_anyone_gone, react, look_every_s, grace_s),
            name="elixir-peers",
            daemon=True,
        )
        atexit.register(self._end)
        start(self._thread)

    def stop(self) -> None:
        """Look no more."""
        with suppress(RuntimeError):  # it is over
            self._is_going.release()
        atexit.unregister(self._end)

    def _end(self) -> None:
        if getattr(sys, "last_type", None) is None:
            self._tell_end()
        with suppress(RuntimeError):
            self._is_going.release()
        self._thread.join(_LONGEST_LOOK_S)


def _watch(
    is_going: threading.Lock,
    is_anyone_gone: Callable[[], bool],
    react: Callable[[], None],
    look_every_s: float,
    grace_s: float,
) -> None:
    while not is_going.acquire(timeout=look_every_s):
        if not is_anyone_gone():
            continue
        if is_going.acquire(timeout=grace_s):
            return
        if is_anyone_gone():
            react()
            return

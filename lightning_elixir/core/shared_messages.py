"""Small messages between the ranks of one host, through memory that all of them have mapped.

[Note: messages of one host] Gloo gives each message to a thread of its own, and that to the one that has the sockets,
on both sides. While updates keep a host's processors busy, each of these threads waits for one: the 62 messages in a
step of Llama-7B took 0.17 s of it (two H200s, 16 cores each), and a rank that waits for them launches nothing. Here a
rank writes its message where all can read it, and wakes those that sleep until it has (futex(2)): one thread of each
rank takes part, the one that waits.

A rank has room for two messages, which it uses in turns. It begins the next but one when it has read all of the next
one, which others send when they have read this one: so nothing is written over that is still to be read. What is sent
is there before the number that says so, since x86-64 keeps the order of stores, and of loads; elsewhere gloo is used.

A rank that leaves says so in its own line, and wakes the others. If it has waited in vain then, its message counts as
taken back: those that come later must not go on as if all had met. That a process was killed is looked for whenever a
wait has lasted for its slice.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import sys
import time
import uuid
import weakref
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning_elixir.core.peers import Process
from lightning_elixir.core.waits import CollectiveFailed

_FOLDER = Path("/dev/shm")  # noqa: S108 - memory, on every Linux; the file is made anew, with a name that none knows
_MACHINE = "x86_64"
_SYS_FUTEX = 202  # its number there
_FUTEX_WAIT, _FUTEX_WAKE, _EVERYONE = 0, 1, 2**31 - 1

_LINE_BYTES = 64  # so that no two ranks write to one line of a cache
_LEFT = 1  # word of a rank's line, int32, after the number of its last message
_IN_ORDER, _IN_VAIN = 1, 2  # how it has left; 0: it has not
_NUM_WORDS = _LINE_BYTES // 4
_MASK = 2**31 - 1

_PAUSE_S = 1e-4  # between two looks, on a system that does not wake those that sleep

Tell = Callable[[Any], list[Any]]
"""Gives every rank's value to all; collective."""


class _Time(ctypes.Structure):
    """What futex(2) takes."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class SharedMessages:
    """The messages of some ranks to each other. Every rank sends as many, and reads each before it sends the next.

    Args:
        memory: The same of all of them, zeros at first.
        rank: This one.
        processes: By rank.
        timeout: How long the slowest is waited for; None: for ever.
    """

    room = 512
    """Integers of one message."""

    def __init__(self, memory: mmap.mmap, rank: int, processes: Sequence[Process], timeout: timedelta | None) -> None:
        self._rank = rank
        self._processes = processes
        self._timeout = timeout
        self._words = memoryview(memory).cast("i")
        self._integers = memoryview(memory).cast("q")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        # One that the garbage collector takes without `leave` sends nothing any more either
        self._say_left = weakref.finalize(self, _say_left, os.getpid(), self._words, rank, len(processes))
        self._say_left.atexit = False

    @classmethod
    def num_bytes(cls, num_ranks: int) -> int:
        """Of the memory."""
        return num_ranks * (_LINE_BYTES + 2 * cls.room * 8)

    def send(self, values: Sequence[int]) -> Message:
        """Send `values`, int64, to all; no more than there is room for.

        Raises:
            CollectiveFailed: The message before is not over: a signal has come before it was waited for, or another
                thread waits for it. Others may have to read what this would be written over.
        """
        own = self._rank * _NUM_WORDS
        before = self._words[own]
        if missing := self.missing(before - 1 & _MASK):
            raise CollectiveFailed(f"the message before was not waited for, and rank {missing[0]} has not sent its own")
        number = before + 1 & _MASK
        begin = self._place(self._rank, turn := number % 2)
        self._integers[begin : begin + len(values)] = memoryview(array("q", values))
        self._words[own] = number  # nothing else says that it was sent: where a signal comes before, it was not
        self._wake()
        return Message(self, before, turn)

    def leave(self) -> None:
        """Have those that wait for messages which this rank has not sent hear that they will not come."""
        self._say_left()
        self._wake()

    # For messages

    def read(self, turn: int, numel: int) -> list[list[int]]:
        """The first integers of every rank's message, in rank order."""
        begins = [self._place(rank, turn) for rank in range(len(self._processes))]
        return [self._integers[begin : begin + numel].tolist() for begin in begins]

    def missing(self, before: int) -> list[int]:
        """The ranks that have sent no message after that number, or have taken it back."""
        words, number = self._words, before + 1 & _MASK
        return [
            line // _NUM_WORDS
            for line in range(0, len(self._processes) * _NUM_WORDS, _NUM_WORDS)
            if words[line] == before or (words[line + _LEFT] == _IN_VAIN and words[line] == number)
        ]

    def sleep(self, rank: int, before: int, longest_s: float) -> None:
        """Until that rank sends something, or leaves; no longer than so many seconds."""
        whole = int(longest_s)
        longest = _Time(whole, int((longest_s - whole) * 1e9))
        if not self._futex(rank, _FUTEX_WAIT, before, ctypes.byref(longest)):
            time.sleep(min(longest_s, _PAUSE_S))

    def check(self, rank: int, before: int, waited_s: float, *, is_late: bool) -> None:
        """Raise `CollectiveFailed` if that rank's message will not come.

        Args:
            before: The number of its last message.
            waited_s: How long it has been waited for.
            is_late: Whether to look for its process, too.
        """
        why = ""
        if self._words[rank * _NUM_WORDS + _LEFT]:
            why = f"rank {rank} has left"
        elif is_late and self._processes[rank].has_ended():
            why = f"the process of rank {rank} has ended"
        elif self._timeout is not None and waited_s > self._timeout.total_seconds():
            why = f"no message of rank {rank} has come for {waited_s:.0f} s"
        if why and rank in self.missing(before):  # it may have come meanwhile
            raise CollectiveFailed(why)

    def _place(self, rank: int, turn: int) -> int:
        return len(self._processes) * _LINE_BYTES // 8 + (2 * rank + turn) * self.room

    def _wake(self) -> None:
        self._futex(self._rank, _FUTEX_WAKE, _EVERYONE, None)

    def _futex(self, rank: int, operation: int, value: int, longest: Any) -> bool:
        """Returns whether the system has such a thing."""
        address = ctypes.c_void_p(self._address + rank * _LINE_BYTES)
        result = self._syscall(ctypes.c_long(_SYS_FUTEX), address, operation, value, longest, None, 0)
        return result >= 0 or ctypes.get_errno() in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT)


class Message:
    """One that was sent, and those that the others send with it.

    Args:
        messages: Of which ranks.
        before: The number of the message before.
        turn: Where its integers are.
    """

    def __init__(self, messages: SharedMessages, before: int, turn: int) -> None:
        self._messages, self._before, self._turn = messages, before, turn
        self._begin_s = time.monotonic()

    def is_over_within(self, longest: timedelta) -> bool:
        """Whether all ranks' messages have come; waits for them so long.

        Raises:
            CollectiveFailed: One of them will not come.
        """
        end_s = time.monotonic() + longest.total_seconds()
        while missing := self._messages.missing(self._before):
            now_s = time.monotonic()
            for rank in missing:  # one that is slow does not hide one that is gone
                self._messages.check(rank, self._before, now_s - self._begin_s, is_late=now_s >= end_s)
            if now_s >= end_s:
                return False
            self._messages.sleep(missing[0], self._before, end_s - now_s)
        return True

    def rows(self, numel: int) -> list[list[int]]:
        """The first integers of every rank's message, in rank order, when it is over."""
        return self._messages.read(self._turn, numel)


def open_shared_messages(
    rank: int, processes: Sequence[Process], timeout: timedelta | None, tell: Tell
) -> SharedMessages | None:
    """Map memory that the ranks share. Collective.

    Args:
        rank: This one.
        processes: By rank.
        timeout: How long messages wait for the slowest rank.
        tell: How the ranks tell each other until then.

    Returns:
        None, on all of them: they are not on one host, or there is no such memory.
    """
    is_one_host = bool(processes[0].place) and len({process.where for process in processes}) == 1
    if not is_one_host or sys.platform != "linux" or platform.machine() != _MACHINE:
        return None
    num_bytes = SharedMessages.num_bytes(len(processes))
    own = _FOLDER / f"lightning_elixir-{uuid.uuid4().hex}" if rank == 0 else None
    memory: mmap.mmap | None = None
    try:
        with suppress(OSError):
            memory = None if own is None else _mapped(own, num_bytes, is_new=True)
        path = tell(own)[0]
        if own is None:
            with suppress(OSError):
                memory = _mapped(path, num_bytes, is_new=False)
        can_see = not any(process.has_ended() for process in processes)  # else /proc hides some of them
        have_all = all(tell(memory is not None and can_see))
    finally:
        if own is not None:
            with suppress(OSError):  # the folder is not there, not to be written to, or another's
                own.unlink()
    return SharedMessages(memory, rank, processes, timeout) if have_all and memory is not None else None


def _say_left(pid: int, words: memoryview, rank: int, num_ranks: int) -> None:
    if os.getpid() != pid:  # a forked process that ends is not this rank
        return
    numbers = words[: num_ranks * _NUM_WORDS : _NUM_WORDS].tolist()
    words[rank * _NUM_WORDS + _LEFT] = _IN_VAIN if numbers[rank] - 1 & _MASK in numbers else _IN_ORDER


def _mapped(path: Path, num_bytes: int, *, is_new: bool) -> mmap.mmap:
    """
    Raises:
        OSError: There is no such file, or no memory for it.
    """
    file = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if is_new else 0) | os.O_CLOEXEC, 0o600)
    try:
        if is_new:
            os.posix_fallocate(file, 0, num_bytes)  # a write to memory that is not there would end the process
        elif os.fstat(file).st_size != num_bytes:
            raise OSError(errno.EINVAL, "not the file that was made", str(path))
        return mmap.mmap(file, num_bytes)
    finally:
        os.close(file)

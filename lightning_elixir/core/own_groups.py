"""Process groups of torch's that are made here, and their ends.

[Note: who ends groups] Torch keeps every group, and gloo three threads for each, until it is told to destroy it. Who
has made some does that: with `close`, to which all ranks come. Most runs end without one, since engine and groups stay
for checkpoints and for the next fit; where they are dropped later, whoever makes groups next ends those that were left
behind. The garbage collector could not: it may run inside torch's own loops over its groups, and an end waits for
threads.

To end a group of gloo's is a thing of this rank alone: what it has sent arrives, and a peer that waits for more gets an
error. But it waits for messages that are under way, for ever where the peer has raised and never comes. Such a group
stays open, to the end of the process if need be.

NCCL may wait for the peers when a communicator is destroyed. So groups of all ranks end in `close`, in one order; those
that were dropped, at another moment on each rank, and those over some of the ranks stay, as their memory of the device
does, to the end of the process. Groups to which torch has given a name after their ranks stay as well: made again,
one would get its old name, and find the addresses of the old one in the store.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from datetime import timedelta
from enum import IntEnum
from typing import cast

import torch.distributed as dist

# Groups with a message under way that must not be waited for, and that message: see `leave_open`.
_LEFT_OPEN: list[tuple[dist.ProcessGroup, dist.Work]] = []


class Ending(IntEnum):
    """How groups come to their end; what one destroys, those after it do too."""

    DROPPED = 1
    """Nothing uses them any more; found out on each rank at a moment of its own."""
    CLOSED = 2
    """All ranks close them, in one order."""
    LEFT = 3
    """This rank leaves, and what is over some of the ranks is not made again."""


class OwnGroups:
    """The groups that one owner has made."""

    def __init__(self) -> None:
        self._groups: dict[dist.ProcessGroup, Ending] = {}
        """With the first ending that destroys them."""
        self._num_under_way: dict[dist.ProcessGroup, int] = {}
        """Messages that nobody has waited for yet; without the messages, which keep their tensors."""

    def make(
        self, ranks: list[int], timeout: timedelta | None, backend: str | None, beside: Sequence[list[int]] | None
    ) -> dist.ProcessGroup:
        """A new group. Collective.

        Args:
            ranks: With this one among them.
            timeout: Of its messages; None: torch's default.
            backend: None: that of the default group.
            beside: All groups that are made at this point, by all ranks of the default group, this one among them.
                None: only the ranks of this group make it.
        """
        is_whole = len(ranks) == dist.get_world_size()
        if beside is not None:  # NCCL makes the communicators of a part with the help of all ranks of the whole
            made = [dist.new_group(one, timeout=timeout, backend=backend) for one in beside]
            group = made[list(beside).index(ranks)]
        else:
            # Torch numbers groups that all ranks make, and names those of some after these.
            group = dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=not is_whole)
        own = cast(dist.ProcessGroup, group)  # torch annotates what ranks outside the group get as well
        if dist.get_backend(own) == "gloo":
            self.add(own, Ending.DROPPED if is_whole or beside is not None else Ending.LEFT)
        else:
            self.add(own, Ending.CLOSED if is_whole else Ending.LEFT)
        return own

    def add(self, group: dist.ProcessGroup, first: Ending) -> None:
        """Another, which was made elsewhere.

        Args:
            first: Of the endings that destroy it.
        """
        self._groups[group] = first

    def begin(self, group: dist.ProcessGroup) -> None:
        """A message is under way that may never be waited for."""
        self._num_under_way[group] = self._num_under_way.get(group, 0) + 1

    def end(self, group: dist.ProcessGroup) -> None:
        """One that was under way is over, or `leave_open` has been told of it."""
        self._num_under_way[group] -= 1

    def destroy(self, ending: Ending) -> None:
        """Have torch forget the groups. They are closed when no other reference to them, or to a message, is left."""
        groups, self._groups = self._groups, {}
        for group, first in groups.items():
            if ending >= first and not self._num_under_way.get(group):
                _destroy(group)
        self._num_under_way.clear()

    def leave_behind(self, owner: object, behind: list[OwnGroups]) -> None:
        """Where the owner is dropped, these come to a list, from which who makes groups next shall take them
        (`destroy_dropped`)."""
        weakref.finalize(owner, behind.append, self).atexit = False


def destroy_dropped(behind: list[OwnGroups]) -> None:
    """End what was left behind."""
    while behind:
        behind.pop().destroy(Ending.DROPPED)


def leave_open(group: dist.ProcessGroup, work: dist.Work) -> None:
    """Keep a group, to the end of the process, as long as its message is under way: closing it would wait for that, and
    so would the end of the interpreter. Ranks that wait for this one there hear by the store."""
    for known, late in list(_LEFT_OPEN):
        if late.is_completed():
            _LEFT_OPEN.remove((known, late))
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(known))
    _LEFT_OPEN.append((group, work))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _destroy(group: dist.ProcessGroup) -> None:
    try:
        dist.destroy_process_group(group)
    except (RuntimeError, ValueError, AssertionError):
        return  # it is gone, or was aborted

"""Masters that users have written over between steps, and what is there again once the old values are put back.

[Note: what is put back] Users see parameters in the compute dtype, and the master has more bits. A user who writes
other values for a while (an average of the weights, for an evaluation) and then those that were there has changed
nothing; so the master gets its bits back. Values that users wrote come to the master at times of our own (an eviction,
a forward, a checkpoint), of which the numbers must not depend. So what the master becomes is a function of three things
alone:

- *before*: the master as the last update or load has left it;
- *given*: what `p.copy_(values)` has written since, in more bits than the compute dtype has; the last such;
- the parameter's values now: where they are *given*, rounded, the master is *given*; else where they are *before*,
  rounded, it is *before*; else it is them. Values that all are *before*, rounded, and that *given* does not explain
  have been put back as a whole, and the master is *before*. (What cannot be seen: values put back through an alias,
  such as `p.data`, after a `p.copy_` of values that all round to the same. Then those stay; `p.copy_(old)` is seen.)

Both are kept from the first write that changes a value to the next update or load, in host memory (on a disk where the
states are), for parameters that were written and for no others.

Where the master is on a disk, the parameters now are compared with the compute shard first, which is the master, cast;
the master is read and written only where they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What to compare bits as, by the size of an element in bytes."""

Keep = Callable[[Tensor], Tensor]
"""Makes a copy of part of a master, on the host."""


@dataclass
class _Written:
    """One segment of a master, 1-D, on the host."""

    before: Tensor
    given: Tensor | None = None
    is_given: bool = False
    """The master itself is what was given, and `given` is not taken yet."""


class WrittenMasters:
    """What is remembered of masters that users have written over. Segments are told by (chunk id, member index): a rank
    has one of a member."""

    def __init__(self) -> None:
        self._written: dict[tuple[int, int], _Written] = {}

    def absorb(self, key: tuple[int, int], master: Tensor, values: Tensor, keep: Keep) -> None:
        """Bring a segment's values to its master.

        Args:
            key: Which segment.
            master: 1-D; changed.
            values: 1-D, compute dtype, on the master's device; not all of them are the master, rounded.
            keep: Where to remember the old master.
        """
        if master.dtype == values.dtype:  # it has no bits of its own
            master.copy_(values)
            return
        written = self._written.get(key)
        if written is None:
            before = keep(master)
            changed = ~_is_rounded(values, master)
            self._written[key] = _Written(before)
            master.copy_(torch.where(changed, values.to(master.dtype), master))
            return
        if written.is_given:
            written.given, written.is_given = keep(master), False
        master.copy_(_resolved(written, master, values))

    def give(self, key: tuple[int, int], master: Tensor, values: Tensor, keep: Keep) -> None:
        """`p.copy_(values)`: they are what the master is.

        Args:
            values: 1-D, any floating dtype, on the host; the parameter holds them, rounded.
        """
        if key not in self._written:
            self._written[key] = _Written(keep(master))
        written = self._written[key]
        written.given, written.is_given = None, True
        master.copy_(values)

    def has_given(self, chunk_id: int, index: int) -> bool:
        """Whether anything was given for this member that may still show in its master."""
        written = self._written.get((chunk_id, index))
        return written is not None and (written.is_given or written.given is not None)

    def give_rounded(self, key: tuple[int, int], master: Tensor, values: Tensor) -> None:
        """`p.copy_(values)` of the compute dtype, where something was given before: that is written over, also where
        it rounds to the same values."""
        written = self._written[key]
        written.given, written.is_given = None, False
        master.copy_(_resolved(written, master, values.to(master.device)))

    def forget(self, members: Mapping[int, Collection[int]]) -> None:
        """The masters of these members (by chunk id) have new values, which no user has written over yet."""
        if self._written:
            for chunk_id, indices in members.items():
                for index in indices:
                    self._written.pop((chunk_id, index), None)

    def clear(self) -> None:
        """Forget all."""
        self._written.clear()

    def held_bytes(self) -> dict[str, int]:
        """Host memory that it takes, by kind."""
        kept = [t for one in self._written.values() for t in (one.before, one.given) if t is not None]
        return {"cpu_written_over": sum(t.nbytes for t in kept)} if kept else {}


def has_bits_of(values: Tensor, stored: Tensor | None) -> bool:
    """Whether both have the same bits, on whatever devices they are."""
    if stored is None or values.numel() != stored.numel():
        return False
    bits = BITS[values.dtype.itemsize]
    return torch.equal(values.to(stored.device).view(bits), stored.view(bits))


def _is_rounded(values: Tensor, master: Tensor) -> Tensor:
    """Where values are the master, rounded to their dtype, in every bit."""
    bits = BITS[values.dtype.itemsize]
    return values.view(bits) == master.to(values.dtype).view(bits)


def _resolved(written: _Written, master: Tensor, values: Tensor) -> Tensor:
    """What the master is for these values: see the note."""
    before = written.before.to(master.device)
    is_before = _is_rounded(values, before)
    found = torch.where(is_before, before, values.to(master.dtype))
    if written.given is None:
        return found
    given = written.given.to(master.device)
    is_given = _is_rounded(values, given)
    if bool(is_before.all()) and not bool(is_given.all()):
        return found
    return torch.where(is_given, given, found)

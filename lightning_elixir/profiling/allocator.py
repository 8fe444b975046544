"""What torch's CUDA caching allocator would hand out: sizes are rounded, and a remainder too small to be split off
stays with its block and counts as allocated."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

_MIB = 1 << 20
_ROUND_BYTES = 512  # all sizes are multiples of it
_SMALL_BYTES = _MIB  # up to here requests come from segments of their own kind
_SMALL_SEGMENT_BYTES = 2 * _MIB
_LARGE_SEGMENT_BYTES = 20 * _MIB  # for requests below `_OWN_SEGMENT_BYTES`
_OWN_SEGMENT_BYTES = 10 * _MIB  # from here on a segment is made for the request, in multiples of 2 MiB
_SEGMENT_ROUND_BYTES = 2 * _MIB


@dataclass(eq=False, slots=True)
class Block:
    """A piece of a segment."""

    address: int
    nbytes: int
    is_small: bool
    before: Block | None = None
    after: Block | None = None
    is_free: bool = False


class CachingAllocator:
    """One stream's allocations on a device without end: best fit, split, merge, in the order in which they are made."""

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self._next_address = 0
        # By (size, address), as torch orders them: of the smallest that fit, the lowest.
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}

    def allocate(self, nbytes: int) -> Block | None:
        """A block of at least `nbytes`; None for zero bytes, which take no memory."""
        if nbytes <= 0:
            return None
        size = -(-nbytes // _ROUND_BYTES) * _ROUND_BYTES
        is_small = size <= _SMALL_BYTES
        free = self._free[is_small]
        index = bisect_left(free, size, key=lambda entry: entry[0])
        block = free.pop(index)[2] if index < len(free) else self._new_segment(size, is_small)
        block.is_free = False
        remainder = block.nbytes - size
        if remainder >= _ROUND_BYTES if is_small else remainder > _SMALL_BYTES:
            rest = Block(block.address + size, remainder, is_small, block, block.after)
            if block.after is not None:
                block.after.before = rest
            block.after, block.nbytes = rest, size
            self._put(rest)
        self.allocated_bytes += block.nbytes
        return block

    def free(self, block: Block | None) -> None:
        if block is None:
            return
        self.allocated_bytes -= block.nbytes
        after, before = block.after, block.before
        if after is not None and after.is_free:
            self._take(after)
            block.nbytes += after.nbytes
            block.after = after.after
            if after.after is not None:
                after.after.before = block
        if before is not None and before.is_free:
            self._take(before)
            before.nbytes += block.nbytes
            before.after = block.after
            if block.after is not None:
                block.after.before = before
            block = before
        self._put(block)

    def _new_segment(self, size: int, is_small: bool) -> Block:
        if is_small:
            nbytes = _SMALL_SEGMENT_BYTES
        elif size < _OWN_SEGMENT_BYTES:
            nbytes = _LARGE_SEGMENT_BYTES
        else:
            nbytes = -(-size // _SEGMENT_ROUND_BYTES) * _SEGMENT_ROUND_BYTES
        address = self._next_address
        self._next_address += nbytes
        return Block(address, nbytes, is_small)

    def _put(self, block: Block) -> None:
        block.is_free = True
        insort(self._free[block.is_small], (block.nbytes, block.address, block), key=lambda entry: entry[:2])

    def _take(self, block: Block) -> None:
        free = self._free[block.is_small]
        del free[bisect_left(free, (block.nbytes, block.address), key=lambda entry: entry[:2])]

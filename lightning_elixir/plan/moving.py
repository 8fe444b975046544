"""In which order chunks move from one placement to another, so that memory never has to hold much of both."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


def order_of_moves(changes: Sequence[tuple[int, int]]) -> list[int]:
    """Numbers of the moves, in a good order: each next one is that after which the device, and then the host, is the
    least above what it held at first or will hold at last, whatever is more; among those, the one that frees most.
    Greedy, as the best order is a matter of trying all of them.

    Args:
        changes: Of each move: bytes that the device, and that the host, holds more after it.
    """
    most_device, most_host = (max(0, sum(change[memory] for change in changes)) for memory in (0, 1))
    left: dict[tuple[int, int], deque[int]] = {}  # most chunks are of one size: there are few different changes
    for number, change in enumerate(changes):
        left.setdefault(change, deque()).append(number)
    order: list[int] = []
    device = host = 0
    while left:

        def above(change: tuple[int, int], device: int = device, host: int = host) -> tuple[int, int, int]:
            above_device, above_host = device + change[0] - most_device, host + change[1] - most_host
            return max(0, above_device), max(0, above_host), sum(change)

        best = min(left, key=above)
        order.append(left[best].popleft())
        if not left[best]:
            del left[best]
        device, host = device + best[0], host + best[1]
    return order

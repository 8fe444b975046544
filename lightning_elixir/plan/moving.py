"""In which order chunks move from one placement to another, so that memory never has to hold much of both."""

from __future__ import annotations

from collections.abc import Sequence


def order_of_moves(changes: Sequence[tuple[int, int]]) -> list[int]:
    """Numbers of the moves, in a good order: each next one is that after which the device, and then the host, is the
    least above what it held at first; among those, the one that frees most. Greedy, as the best order is a matter of
    trying all of them.

    Args:
        changes: Of each move: bytes that the device, and that the host, holds more after it.
    """
    left = list(range(len(changes)))
    order: list[int] = []
    device = host = 0
    while left:

        def above(number: int, device: int = device, host: int = host) -> tuple[int, int, int]:
            more_device, more_host = changes[number]
            return max(0, device + more_device), max(0, host + more_host), more_device + more_host

        best = min(left, key=above)
        left.remove(best)
        order.append(best)
        device, host = device + changes[best][0], host + changes[best][1]
    return order

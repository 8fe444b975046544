"""Names in messages, where there may be thousands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def first_names(names: Iterator[str] | Sequence[str], limit: int = 5) -> str:
    """The first of them, for a message."""
    listed = list(names)
    return ", ".join(listed[:limit]) + (f" and {len(listed) - limit} more" if len(listed) > limit else "")

"""What each rank hears when one of them fails, and how soon."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_elixir.errors import PeerLostError

# The others hear within some seconds; the process of a rank that has failed is there at least as long.
SOON_S = 15.0
_LONG_S = 30.0


@dataclass(frozen=True)
class Heard:
    """How a rank ended."""

    type: str
    text: str
    ranks: tuple[int, ...]
    time_s: float
    """When, by a clock common to all ranks."""


def heard_by(rank: int, world_size: int, action: Callable[[], Any]) -> dict[str, Any]:
    """Run `action`, and stay until all ranks have come to the end of theirs, or for long.

    Returns:
        Of `Heard`.
    """
    heard = Heard("", "", (), 0.0)
    try:
        action()
    except Exception as error:
        ranks = error.ranks if isinstance(error, PeerLostError) else ()
        heard = Heard(type(error).__name__, str(error), ranks, time.monotonic())
    Path(f"ended_{rank}").touch()
    deadline = time.monotonic() + _LONG_S
    while time.monotonic() < deadline and not all(Path(f"ended_{other}").exists() for other in range(world_size)):
        time.sleep(0.05)
    return asdict(heard)


def check_heard(everyone: list[dict[str, Any]], victim: int, type_name: str, text: str) -> None:
    """The victim has raised this, and all others soon after that a `PeerLostError` that names it."""
    own = Heard(**everyone[victim])
    assert own.type == type_name
    assert text in own.text
    for rank, told in enumerate(everyone):
        if rank == victim:
            continue
        heard = Heard(**told)
        assert heard.type == "PeerLostError", heard
        assert heard.ranks == (victim,)
        assert f"rank {victim} failed: {type_name}: " in heard.text
        assert text in heard.text
        assert heard.time_s - own.time_s < SOON_S

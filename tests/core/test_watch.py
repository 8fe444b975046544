"""The thread that looks after the other ranks."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from lightning_elixir.core.peers import Watch


def _wait_for(event: threading.Event) -> None:
    assert event.wait(30)


def test_it_reacts_once_where_this_rank_does_not_notice() -> None:
    looks, reactions, has_reacted = [], [], threading.Event()

    def look() -> bool:
        looks.append(1)
        return len(looks) == 3

    def react() -> None:
        reactions.append(threading.current_thread().name)
        has_reacted.set()

    watch = Watch(look, react, look_every_s=0.01, grace_s=0.01)
    _wait_for(has_reacted)
    watch.stop(wait_s=30.0)
    assert reactions == ["elixir-peers"]
    assert len(looks) == 3


def test_it_leaves_it_to_a_rank_that_notices() -> None:
    reactions, has_looked = [], threading.Event()

    def look() -> bool:
        has_looked.set()
        return True

    watch = Watch(look, lambda: reactions.append(1), look_every_s=0.0, grace_s=60.0)
    _wait_for(has_looked)
    begin = time.monotonic()
    watch.stop(wait_s=30.0)
    assert time.monotonic() - begin < 20
    assert not reactions
    assert not [t for t in threading.enumerate() if t.name == "elixir-peers"]


def test_what_reacts_may_stop_it() -> None:
    is_over = threading.Event()
    watches: list[Watch] = []

    def react() -> None:
        watches[0].stop(wait_s=30.0)
        is_over.set()

    watches.append(Watch(lambda: bool(watches), react, look_every_s=0.01, grace_s=0.0))
    _wait_for(is_over)


@pytest.mark.parametrize("work", ["False", "time.sleep(0.3)"])
def test_a_program_ends_with_a_watch_at_work(work: str) -> None:
    code = (
        "import time; from lightning_elixir.core.peers import Watch\n"
        f"watch = Watch(lambda: {work}, lambda: None, look_every_s=0.0, grace_s=0.0)\n"
        "time.sleep(0.1)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")

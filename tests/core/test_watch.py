"""The thread that looks after the other ranks."""

from __future__ import annotations

import errno
import gc
import os
import re
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_elixir.core import comm as comm_module
from lightning_elixir.core.comm import Comm, GroupComm, make_comm
from lightning_elixir.core.peers import Process, Roster, Watch
from lightning_elixir.core.waits import Wait
from lightning_elixir.errors import PeerLostError
from tests.helpers import processes
from tests.helpers.dist import run_ranks
from tests.helpers.tiers import full


def _nothing() -> None:
    pass


def _wait_for_end() -> None:
    gc.collect()  # what tests before have left in this process ends with the object that owns it
    deadline = time.monotonic() + 30
    while [t for t in threading.enumerate() if t.name == "elixir-peers"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _wait_for(event: threading.Event) -> None:
    assert event.wait(30)


def test_it_reacts_once_where_this_rank_does_not_notice() -> None:
    looks, reactions, has_reacted = [], [], threading.Event()

    def look() -> bool:
        looks.append(1)
        return len(looks) not in (1, 2, 4)  # what is seen once only may have been a mistake

    def react() -> None:
        reactions.append(threading.current_thread().name)
        has_reacted.set()

    watch = Watch(look, react, _nothing, look_every_s=0.01, grace_s=0.01)
    _wait_for(has_reacted)
    watch.stop()
    _wait_for_end()
    assert reactions == ["elixir-peers"]
    assert len(looks) == 6


def test_it_leaves_it_to_a_rank_that_notices() -> None:
    reactions, has_looked = [], threading.Event()

    def look() -> bool:
        has_looked.set()
        return True

    watch = Watch(look, lambda: reactions.append(1), _nothing, look_every_s=0.01, grace_s=60.0)
    _wait_for(has_looked)
    watch.stop()
    watch.stop()
    _wait_for_end()
    assert not reactions


def test_what_reacts_may_stop_it() -> None:
    is_over = threading.Event()
    watches: list[Watch] = []

    def react() -> None:
        watches[0].stop()
        is_over.set()

    watches.append(Watch(lambda: bool(watches), react, _nothing, look_every_s=0.01, grace_s=0.0))
    _wait_for(is_over)


@pytest.mark.parametrize(("how", "told"), [("", "orderly\n"), ("raise ValueError", ""), full("watch.stop()", "")])
@pytest.mark.parametrize("work", [full("False"), "time.sleep(0.3)"])
@pytest.mark.full
def test_a_program_ends_with_a_watch_at_work(work: str, how: str, told: str) -> None:
    code = (
        "import time; from lightning_elixir.core.peers import Watch\n"
        f"watch = Watch(lambda: {work}, lambda: None, lambda: print('orderly'), look_every_s=0.0, grace_s=0.0)\n"
        f"time.sleep(0.1); {how}"
    )
    done = processes.run(code)
    assert (done.returncode, done.stdout) == (int("raise" in how), told)
    assert how.startswith("raise") == bool(done.stderr)


def _seen_by_groups_of_one_name() -> list[bool]:
    """As where a process group is made anew over the same store, which gives the same names again."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm_module, "Roster", lambda name, rank: Roster(re.sub("^[^/]*", "same", name), rank))
        for _ in range(2):
            comm = make_comm(dist.group.WORLD, torch.device("cpu"))
            assert isinstance(comm, GroupComm)
            seen.append(comm._roster.is_anyone_gone())
            comm.exchange([0])
            comm._roster.tell(failed="so")
            comm.exchange([0])
            seen.append(comm._roster.is_anyone_gone())
            comm.close()
    return seen


def test_what_was_told_in_a_group_is_not_taken_for_the_next_ones() -> None:
    assert run_ranks(_seen_by_groups_of_one_name, 2) == [[False, True] * 2] * 2


def _is_watching() -> bool:
    return any(thread.name == "elixir-peers" for thread in threading.enumerate())


class _Local:
    """What a frame keeps."""


def _hear(comm: Comm, other: Comm) -> weakref.ref[_Local]:
    """As a fit does that fails: what ends it is told to all comms, and goes on. Gives what a frame that it has passed
    had in it."""
    local = _Local()

    def run() -> None:
        known = local
        try:
            comm.exchange([0])
        except PeerLostError as error:
            other.leave(error)
            raise
        del known

    with pytest.raises(PeerLostError):
        run()
    return weakref.ref(local)


def _left_and_opened_again() -> tuple[bool, bool, bool]:
    comm, other = (make_comm(dist.group.WORLD, torch.device("cpu")) for _ in range(2))
    is_kept = False
    if dist.get_rank() == 0:
        for one in (comm, other):
            one.leave(ValueError("so"))
    else:
        local = _hear(comm, other)
        gc.collect()
        is_kept = local() is not None
    _wait_for_end()  # although both live
    comm.exchange([0])
    is_again = _is_watching()
    for one in (comm, other):
        one.close()
    _wait_for_end()
    return is_kept, is_again, _is_watching()


def test_what_was_left_is_not_looked_after_and_keeps_no_frames() -> None:
    assert run_ranks(_left_and_opened_again, 2) == [(False, True, False)] * 2


def _ended_in_a_wait() -> bool:
    """As by a signal whose handler raises."""
    comm = make_comm(dist.group.WORLD, torch.device("cpu"))
    if dist.get_rank() == 0:
        with mock.patch.object(Wait, "check", side_effect=ValueError("so")), pytest.raises(ValueError, match="so"):
            comm.exchange([0])
    dist.barrier()
    if dist.get_rank() == 1:
        with pytest.raises(PeerLostError, match="so"):
            comm.exchange([0])
    _wait_for_end()
    comm.close()
    return _is_watching()


def test_what_was_left_in_the_middle_of_a_wait_is_not_looked_after() -> None:
    assert run_ranks(_ended_in_a_wait, 2) == [False] * 2


def test_a_process_of_which_nothing_can_be_told_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    this = Process.this()
    assert not this.has_ended()
    assert replace(this, started="0").has_ended()

    def fail(self: Path) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(Path, "read_bytes", fail)
    assert not replace(this, started="0").has_ended()

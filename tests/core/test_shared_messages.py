"""Messages through memory that ranks share; here the ranks are threads, but where it says so."""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_elixir.core import peers, shared_messages
from lightning_elixir.core.comm import GroupComm, make_comm
from lightning_elixir.core.peers import Process
from lightning_elixir.core.shared_messages import SharedMessages, open_shared_messages
from lightning_elixir.core.waits import CollectiveFailed
from tests.helpers.dist import run_ranks

LONG = timedelta(seconds=20)
SHORT = timedelta(seconds=0.05)
ENDED = Process("somewhere", "else", 1, "long ago")


def ranks_of(
    count: int, processes: list[Process] | None = None, timeout: timedelta | None = None
) -> list[SharedMessages]:
    memory = mmap.mmap(-1, SharedMessages.num_bytes(count))
    return [SharedMessages(memory, rank, processes or [Process.this()] * count, timeout) for rank in range(count)]


def run_threads(*works: Callable[[], Any]) -> list[Any]:
    found: list[Any] = [None] * len(works)

    def run(number: int) -> None:
        found[number] = works[number]()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("begin", [0, 2**31 - 20])
@pytest.mark.parametrize("has_futex", [True, False])
def test_every_rank_reads_what_each_has_sent(
    count: int, begin: int, has_futex: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = ranks_of(count)
    for messages in ranks:
        messages._words[messages._rank * 16] = begin
        if not has_futex:
            monkeypatch.setattr(shared_messages.ctypes, "get_errno", lambda: errno.ENOSYS)
            messages._syscall = lambda *_: -1  # type: ignore[assignment]

    def work(messages: SharedMessages) -> list[list[list[int]]]:
        heard, pauses = [], random.Random(messages._rank)
        for number in range(60):
            message = messages.send([messages._rank, number] * (number % 4) + [-number])
            assert message.is_over_within(LONG)
            if pauses.random() < 0.2:
                time.sleep(pauses.random() * 2e-3)
            heard.append(message.rows(2 * (number % 4) + 1))
        return heard

    expected = [[[rank, number] * (number % 4) + [-number] for rank in range(count)] for number in range(60)]
    assert run_threads(*(lambda messages=messages: work(messages) for messages in ranks)) == [expected] * count


def test_a_rank_that_waits_sleeps() -> None:
    ranks = ranks_of(2)
    message = ranks[0].send([1])
    begin_s, busy_s = time.perf_counter(), time.thread_time()
    assert not message.is_over_within(timedelta(seconds=0.3))
    assert time.perf_counter() - begin_s >= 0.3
    assert time.thread_time() - busy_s < 0.1
    late = threading.Timer(0.1, lambda: ranks[1].send([2]))
    late.start()
    assert message.is_over_within(LONG)
    assert message.rows(1) == [[1], [2]]
    late.join()


def test_a_message_that_was_sent_is_read_though_its_rank_has_left() -> None:
    first, second = ranks_of(2)
    message = first.send([1])
    assert second.send([2]).is_over_within(LONG)
    second.leave()
    assert message.is_over_within(LONG)
    assert message.rows(1) == [[1], [2]]
    with pytest.raises(CollectiveFailed, match="rank 1 has left"):
        first.send([1]).is_over_within(LONG)


def test_a_message_that_was_waited_for_in_vain_is_taken_back() -> None:
    first, second, third = ranks_of(3)
    for number in range(2):
        messages = [one.send([number]) for one in (first, second, third)]
        assert all(message.is_over_within(LONG) for message in messages)
    waiting = second.send([2])
    first.send([2])
    assert waiting._messages.missing(2) == [2]
    first.leave()
    for message in (waiting, third.send([2])):
        with pytest.raises(CollectiveFailed, match="rank 0 has left"):
            message.is_over_within(LONG)


def test_a_rank_that_leaves_wakes_the_others() -> None:
    first, second = ranks_of(2)
    message = first.send([1])
    leaving = threading.Timer(0.1, second.leave)
    leaving.start()
    begin_s = time.perf_counter()
    with pytest.raises(CollectiveFailed, match="rank 1 has left"):
        message.is_over_within(LONG)
    assert time.perf_counter() - begin_s < LONG.total_seconds() / 2
    leaving.join()


def test_a_rank_that_does_not_come_in_time_is_named() -> None:
    first, second, _ = ranks_of(3, timeout=timedelta(seconds=0.3))
    second.send([2])
    message = first.send([1])
    assert not message.is_over_within(SHORT)
    time.sleep(0.3)
    with pytest.raises(CollectiveFailed, match="no message of rank 2 has come"):
        message.is_over_within(SHORT)


@pytest.mark.parametrize("how", ["ended", "left", "collected"])
def test_a_slow_rank_does_not_hide_one_that_will_not_come(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Process, "has_ended", lambda self: self == ENDED)
    third = ENDED if how == "ended" else Process.this()
    ranks = ranks_of(3, [Process.this(), Process.this(), third])
    message = ranks[0].send([1])
    if how == "left":
        ranks[2].leave()
    elif how == "collected":
        del ranks[2]
    with pytest.raises(CollectiveFailed, match=r"rank 2 has (left|ended)"):
        message.is_over_within(SHORT)


def test_a_message_whose_sending_was_interrupted_was_not_sent() -> None:
    first, second = ranks_of(2)
    for number in range(3):  # both places have something
        messages = [first.send([number]), second.send([number])]
        assert all(message.is_over_within(LONG) for message in messages)
    waiting = second.send([7])

    class Interrupted:
        def __setitem__(self, place: slice, values: memoryview) -> None:
            raise KeyboardInterrupt

    integers, first._integers = first._integers, Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        first.send([8])
    first._integers = integers
    assert not waiting.is_over_within(SHORT)
    message = first.send([9])
    assert waiting.is_over_within(LONG)
    assert message.is_over_within(LONG)
    assert waiting.rows(1) == message.rows(1) == [[9], [7]]


def test_no_message_is_sent_while_the_one_before_is_not_over() -> None:
    """What others have sent two messages ago would be read for an answer to it."""
    first, second = ranks_of(2)
    for number in range(2):
        messages = [first.send([number]), second.send([number])]
        assert all(message.is_over_within(LONG) for message in messages)
    given_up = first.send([2])
    with pytest.raises(CollectiveFailed, match="rank 1 has not sent its own"):
        first.send([3])
    assert second.send([4]).is_over_within(LONG)
    assert given_up.rows(1) == [[2], [4]]
    first.send([5])


def test_a_forked_process_that_ends_is_not_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ranks_of(2)
    with monkeypatch.context() as patch:
        patch.setattr(shared_messages.os, "getpid", lambda: -1)
        second.leave()
    assert not first.send([1]).is_over_within(SHORT)


# Ranks that are processes


def opened(hosts: list[str], folder: str) -> tuple[bool, list[list[int]], list[str]]:
    comm = make_comm(None, torch.device("cpu"))
    assert isinstance(comm, GroupComm)
    rank = dist.get_rank()
    processes = [replace(one, host=host) for one, host in zip(comm._roster.processes, hosts, strict=True)]
    with pytest.MonkeyPatch.context() as patch:  # the process has other tests to serve
        patch.setattr(shared_messages, "_FOLDER", Path(folder))
        messages = open_shared_messages(rank, processes, None, comm.exchange_objects)
    rows: list[list[int]] = []
    if messages is not None:
        message = messages.send([rank] * messages.room)
        assert message.is_over_within(LONG)
        rows = message.rows(messages.room)
    comm.exchange([])
    left = os.listdir(folder) if Path(folder).exists() else []
    comm.close()
    return messages is not None, rows, left


@pytest.mark.parametrize(
    ("hosts", "has_folder", "is_there"),
    [(["a", "a"], True, True), (["a", "b"], True, False), (["a", "a"], False, False)],
)
def test_ranks_of_one_host_share_memory_and_leave_no_file(
    hosts: list[str], has_folder: bool, is_there: bool, tmp_path: Path
) -> None:
    for found, rows, left in run_ranks(opened, 2, hosts, str(tmp_path if has_folder else tmp_path / "none")):
        assert found == is_there
        assert rows == ([[0] * 512, [1] * 512] if is_there else [])
        assert left == []


@pytest.mark.parametrize("folder", ["/dev/null", "/proc"])
def test_a_folder_that_takes_no_files_is_no_error(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_messages, "_FOLDER", Path(folder))
    assert open_shared_messages(0, [Process.this()] * 2, None, lambda value: [value] * 2) is None


def test_ranks_that_cannot_see_each_others_processes_share_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would take the others for ended in every wait."""
    processes = [Process.this()] * 2
    assert open_shared_messages(0, processes, None, lambda value: [value] * 2) is not None
    monkeypatch.setattr(Process, "has_ended", lambda self: True)  # as where /proc hides those of other users
    assert open_shared_messages(0, processes, None, lambda value: [value] * 2) is None


def test_where_proc_is_another_namespaces_no_memory_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed rank would have the number of a process that lives."""
    with monkeypatch.context() as patch:
        patch.setattr(peers.os, "getpid", lambda: 1)
        processes = [Process.this()] * 2
    assert not processes[0].has_ended()
    assert open_shared_messages(0, processes, None, lambda value: [value] * 2) is None


def sent_by_gloo(is_long: bool) -> tuple[list[list[int]], int]:
    """What an engine's ranks hear of each other, and how many messages of theirs gloo has carried."""
    comm = make_comm(None, torch.device("cpu"))
    assert isinstance(comm, GroupComm)
    before = comm._control._get_backend(torch.device("cpu"))._get_sequence_number_for_group()
    rows = comm.exchange(list(range(1000 if is_long else 100)) if comm.rank else [])
    after = comm._control._get_backend(torch.device("cpu"))._get_sequence_number_for_group()
    comm.close()
    return rows, after - before


@pytest.mark.parametrize("is_long", [False, True])
def test_integers_go_by_memory_and_long_messages_by_gloo(is_long: bool) -> None:
    expected: list[list[int]] = [[], list(range(1000 if is_long else 100))]
    assert run_ranks(sent_by_gloo, 2, is_long) == [(expected, int(is_long))] * 2

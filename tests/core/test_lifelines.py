"""Connections to other hosts that break when one of these vanishes. With real networks: `strategy/test_nodes.py`."""

from __future__ import annotations

import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from lightning_elixir.core import lifelines, peers
from lightning_elixir.core.comm import make_comm
from lightning_elixir.core.lifelines import Door, Lifelines, hosts_of, own_addresses, plain_address, tie
from lightning_elixir.core.peers import Process
from lightning_elixir.core.waits import Call, Line, line_of_process
from lightning_elixir.errors import PeerLostError
from tests.helpers.dist import run_ranks


def _on(host: str) -> Process:
    return Process(host, "a place", 1, "")


def test_ranks_are_of_hosts_wherever_these_stand_in_line() -> None:
    processes = [_on("a"), _on("b"), _on("a"), Process("a", "another place", 1, "")]
    assert list(hosts_of(processes).values()) == [[0, 2], [1], [3]]


def test_addresses_that_another_host_has_as_well_are_not_a_hosts_own() -> None:
    doors = {
        host: Door((f"10.0.0.{number}", "172.17.0.1"), 1, b"")
        for number, host in enumerate(["here", "there", "beside"])
    }
    assert own_addresses(doors, "there") == {"10.0.0.1"}


@pytest.mark.parametrize(
    ("address", "plain"),
    [("10.0.0.1", "10.0.0.1"), ("::ffff:10.0.0.1", "10.0.0.1"), ("fe80::1%eth0", "fe80::1"), ("FD00::02", "fd00::2")],
)
def test_addresses_are_compared_whatever_way_they_are_written(address: str, plain: str) -> None:
    assert plain_address(address) == plain


def _wait_for_threads(number: int) -> None:
    deadline = time.monotonic() + 30
    while len([t for t in threading.enumerate() if t.name == "elixir-lifelines"]) != number:
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Neighbour:
    """Rank 1, alone on another host, whose part is played by the test."""

    ADDRESS = "127.0.0.2"

    def __init__(self) -> None:
        self.listening = socket.create_server((self.ADDRESS, 0))
        self.door = Door((self.ADDRESS,), self.listening.getsockname()[1], b"t" * 16)
        self.welcome = b"\x01"
        self.is_deaf = False
        self.heard = b""
        self.end: socket.socket | None = None
        self.back: socket.socket | None = None
        self.is_stranger = False
        self._num_exchanges = 0

    def exchange(self, value: Any) -> list[Any]:
        self._num_exchanges += 1
        if self._num_exchanges == 1:
            self.door_there = value[0]
            return [value, (self.door, "")]
        if self._num_exchanges == 2:
            self.back = socket.create_connection((self.door_there.addresses[0], self.door_there.port))
            self.back.sendall(b"s" * 16 if self.is_stranger else self.door_there.token)
            if not self.is_deaf:
                self.end, _ = self.listening.accept()
                self.heard = self.end.recv(16)
                self.end.sendall(self.welcome)
        return [value, {}]

    def reset(self) -> None:
        """As a host that has started anew, and knows of no connection."""
        assert self.end is not None
        self.end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.end.close()

    def close(self) -> None:
        for end in (self.listening, self.end, self.back):
            if end is not None:
                end.close()


@pytest.fixture
def neighbour(monkeypatch: pytest.MonkeyPatch) -> Iterator[Neighbour]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(lifelines, "_LONGEST_MEETING_S", 0.5)
    made = Neighbour()
    yield made
    made.close()
    _wait_for_threads(0)


def _tie(neighbour: Neighbour, lost: dict[int, str]) -> Lifelines:
    return tie("a name", 0, [_on("here"), _on("there")], neighbour.exchange, lost)


def _ends_of(tied: Lifelines) -> tuple[socket.socket, socket.socket]:
    """To the other host, and from there."""
    by_host = {host: end for end, host in tied._ends.values()}
    return by_host["there a place"], by_host[""]


def test_a_host_that_vanishes_is_told_and_all_connections_to_it_are_ended(
    neighbour: Neighbour, caplog: pytest.LogCaptureFixture
) -> None:
    lost: dict[int, str] = {}
    _tie(neighbour, lost)
    assert neighbour.heard == neighbour.door.token
    with (
        socket.create_server((neighbour.ADDRESS, 0)) as there,
        socket.create_server(("127.0.0.3", 0)) as elsewhere,
        socket.create_connection(there.getsockname()) as ended,
        socket.create_connection(elsewhere.getsockname()) as kept,
    ):
        assert not lost
        neighbour.reset()
        ended.settimeout(30)
        assert ended.recv(1) == b""
        assert list(lost) == [1]
        assert lost[1].startswith("host there has vanished, with rank 1: ")
        kept.settimeout(0.1)
        with pytest.raises(TimeoutError):
            kept.recv(1)
    assert neighbour.back is not None
    neighbour.back.close()
    _wait_for_threads(0)
    assert lost[1] in caplog.text


def test_the_system_asks_whether_the_other_host_is_there(neighbour: Neighbour) -> None:
    tied = _tie(neighbour, {})
    end, _ = _ends_of(tied)
    assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    idle_s, every_s, number = (end.getsockopt(socket.IPPROTO_TCP, option) for option in options)
    assert (idle_s, every_s, number) == (10, 5, 4)
    assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
    tied.close()


@pytest.mark.parametrize("who", ["this rank", "the other one"])
def test_connections_that_are_closed_tell_nothing(who: str, neighbour: Neighbour) -> None:
    lost: dict[int, str] = {}
    tied = _tie(neighbour, lost)
    if who == "this rank":
        tied.close()
        assert neighbour.end is not None
        assert neighbour.end.recv(1) == b""
    else:
        neighbour.close()
    _wait_for_threads(0)
    assert not lost


def test_a_stranger_is_not_let_in(neighbour: Neighbour) -> None:
    neighbour.is_stranger = True
    tied = _tie(neighbour, {})
    assert [host for _, host in tied._ends.values()] == ["there a place"]
    assert neighbour.back is not None
    assert neighbour.back.recv(1) == b""
    tied.close()


def test_strangers_do_not_keep_ranks_from_going_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifelines, "_LONGEST_MEETING_S", 0.1)
    monkeypatch.setattr(lifelines, "_LONGEST_GREETING_S", 0.05)
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=40))
        strangers = [stack.enter_context(socket.create_connection(listening.getsockname())) for _ in range(40)]
        assert lifelines._let_in(listening, b"t" * 16, 1) == []
        strangers[-1].setblocking(False)
        with pytest.raises(BlockingIOError):  # its turn has not come
            strangers[-1].recv(1)


@pytest.mark.parametrize("how", ["of others", "its own"])
def test_a_host_listens_at_the_first_address_that_is_its_own(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """192.0.2.1 is no host's: it is kept for documents."""
    addresses = ["192.0.2.1", "fe80::1%lo"] + ["127.0.0.4"] * (how == "its own")
    infos = [(lifelines._family(at), socket.SOCK_STREAM, 6, "", (at, 0)) for at in addresses]
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: infos)
    if how == "of others":
        with pytest.raises(OSError, match="has no address of this host"):
            lifelines._listen(2)
    else:
        with lifelines._listen(2) as listening:
            assert listening.getsockname()[0] == "127.0.0.4"


@pytest.mark.parametrize("how", ["nobody listens", "another program answers"])
def test_where_nothing_can_be_connected_this_is_said_once(
    how: str, neighbour: Neighbour, caplog: pytest.LogCaptureFixture
) -> None:
    if how == "nobody listens":
        neighbour.listening.close()
        neighbour.is_deaf = True
    else:
        neighbour.welcome = b"?"
    with caplog.at_level(logging.WARNING):
        tied = _tie(neighbour, {})
    assert [host for _, host in tied._ends.values()] == [""]
    assert len(caplog.records) == 1
    assert "from here to there" in caplog.text
    tied.close()


# ------------------------------------------------------------------------------------------------------- of real ranks


def _share(are_apart: bool) -> list[Any]:
    """What of lifelines there is with one comm, a second one, and with none again; then with another one."""
    line, rank, seen = line_of_process(), dist.get_rank(), list[Any]()
    with pytest.MonkeyPatch.context() as patch:
        if are_apart:
            patch.setattr(peers, "_place", lambda: f"place {rank}")
        for _ in range(2):
            first = make_comm(None, torch.device("cpu"))
            name = line.tied
            second = make_comm(None, torch.device("cpu"))
            seen.append((bool(name), line.tied == name))
            _wait_for_threads(int(are_apart))
            first.close()
            assert line.tied == name
            second.exchange([0])
            second.close()
            seen.append(line.tied)
            _wait_for_threads(0)
    assert not line.lost
    return seen


def test_engines_of_one_process_share_them_and_only_between_hosts() -> None:
    assert run_ranks(_share, 2, True) == [[(True, True), "", (True, True), ""]] * 2
    assert run_ranks(_share, 2, False) == [[(False, True), "", (False, True), ""]] * 2


def _train_without() -> list[str]:
    rank, warned = dist.get_rank(), list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "_place", lambda: f"place {rank}")
        patch.setattr(lifelines.log, "warning", lambda text, *values: warned.append(text % values))
        if rank == 1:
            patch.setattr(lifelines, "_listen", _fail)
        comm = make_comm(None, torch.device("cpu"))
        assert comm.exchange([rank]) == [[0], [1]]
        comm.close()
    return warned


def _fail(num_ranks: int) -> socket.socket:
    raise OSError("no address")


def test_ranks_that_cannot_connect_go_on() -> None:
    (told,), others = run_ranks(_train_without, 2)
    assert "it cannot listen: no address" in told
    assert "as long as `timeout` says" in told
    assert others == []


def _open_groups(line: Line) -> None:
    with line.opening("groups", (0, 1), Call("a call")):
        pass


def _lose(where: str) -> None:
    """Rank 1's host vanishes while rank 0 waits; the connections to it stay."""
    comm, line, store = make_comm(None, torch.device("cpu")), line_of_process(), _get_default_store()
    if dist.get_rank() == 1:
        store.get("heard")
        return
    threading.Timer(0.3, line.lost.update, [{1: "host b has vanished, with rank 1"}]).start()
    wait = partial(comm.exchange, [0]) if where == "a collective" else partial(_open_groups, line)
    with pytest.raises(PeerLostError, match="rank 0 cannot go on: host b has vanished, with rank 1") as raised:
        wait()
    store.set("heard", "")
    assert raised.value.ranks == (1,)


@pytest.mark.parametrize("where", ["a collective", "groups that are opened"])
def test_who_waits_for_a_host_that_has_vanished_hears_of_it(where: str) -> None:
    run_ranks(_lose, 2, where, fresh=True, timeout_s=30.0)

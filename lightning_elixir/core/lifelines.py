"""Idle connections to the other hosts: they break when one of these vanishes.

[Note: hosts that vanish] A process that is killed has its connections closed by the system. A host without power or
network closes nothing: a rank that waits for a message from it waits for ever, and what was under way to it is sent
again for a quarter of an hour. So each rank has a connection to the first rank of each other host, over which nothing
is sent, and has the system look now and then whether the other end is there (`SO_KEEPALIVE`). The other host's system
answers, not its process: so one that computes, is stopped, swapped, in a debugger, or holds the GIL in a long call is
there.

Unanswered questions are counted, not seconds (as `TCP_USER_TIMEOUT` would): a virtual machine that was paused itself
does not take the others for lost when it goes on.

When such a connection breaks, all others of this process to that host are ended as if it had closed them, whosever they
are: it is certain that nothing will come. So whatever waits (a collective of any group, also of the user's own, or a
question to the store) fails at once, as where a process was killed, and goes the same way (Note: lost ranks). A thread
of its own does that, which sleeps until then: the one that looks after ranks may be waiting for a store that was on the
host. What says that it ends (a rank that closes its groups, or is killed) is no reason for anything here.
"""

from __future__ import annotations

import errno
import hmac
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from typing import Any, NamedTuple

import psutil

from lightning_elixir.core.peers import Process
from lightning_elixir.core.signals import start

log = logging.getLogger(__name__)

# A host that vanishes is noticed 20 to 30 s later: so long after the last answer the first question is asked, then the
# others. Networks are sometimes away for seconds, which training survives.
IDLE_S = 10
ASK_EVERY_S = 5
NUM_UNANSWERED = 4
# How long ranks may take to connect.
_LONGEST_MEETING_S = 5.0
# How long one that has connected may take to say why.
_LONGEST_GREETING_S = 1.0

_TOKEN_BYTES = 16
_WELCOME = b"\x01"


class Door(NamedTuple):
    """Where the first rank of a host waits for those of the others."""

    addresses: tuple[str, ...]
    """All by which this host is reached; it waits at the first."""
    port: int
    token: bytes
    """What a rank that connects has to send first."""


def hosts_of(processes: Sequence[Process]) -> dict[str, list[int]]:
    """Host (`Process.where`) -> its ranks."""
    hosts: dict[str, list[int]] = {}
    for rank, process in enumerate(processes):
        hosts.setdefault(process.where, []).append(rank)
    return hosts


def own_addresses(doors: Mapping[str, Door], host: str) -> set[str]:
    """Addresses that no other host has: some networks, as those of containers, are on each host by themselves."""
    others = {address for other, door in doors.items() if other != host for address in door.addresses}
    return set(doors[host].addresses) - others


def named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


class Lifelines:
    """This rank's connections to the other hosts.

    Args:
        name: The same on every rank, and no other ones'.
        ends: To other hosts, and from ranks of these (""). A thread takes them over.
        react: Called with a host that has vanished, on that thread.
    """

    def __init__(self, name: str, ends: Mapping[socket.socket, str], react: Callable[[str], None]) -> None:
        self.name = name
        self._ends = {end.fileno(): (end, host) for end, host in ends.items()}
        start(threading.Thread(target=_watch, args=(self._ends, react), name="elixir-lifelines", daemon=True))

    def close(self) -> None:
        """End them, on both sides: nothing is noticed any more. Takes no lock, so finalizers may call it."""
        for end, _ in list(self._ends.values()):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes them


def _watch(ends: dict[int, tuple[socket.socket, str]], react: Callable[[str], None]) -> None:
    poll = select.poll()
    for number in ends:
        poll.register(number, select.POLLIN)
    while ends:
        for number, _ in poll.poll():
            end, host = ends[number]
            try:
                has_vanished = is_broken(end)
            except BlockingIOError:
                continue
            poll.unregister(number)
            del ends[number]
            end.close()
            if has_vanished and host:
                react(host)


def is_broken(end: socket.socket) -> bool:
    """Whether a connection that has come to its end was not closed, by this side or the other.

    A host that has started anew since then answers that it knows of no connection (`ECONNRESET`). A process that is
    killed would answer so only if it had left something unread, and nothing is sent.

    Raises:
        BlockingIOError: It has not come to its end.
    """
    try:
        end.recv(1)
    except BlockingIOError:
        raise
    except OSError:
        return True
    return False


def tie(
    name: str,
    rank: int,
    processes: Sequence[Process],
    exchange: Callable[[Any], list[Any]],
    lost: dict[int, str],
) -> Lifelines:
    """Connect this rank with the other hosts, of which there are some. Collective. No rank raises: where connections
    cannot be made training goes on, and rank 0 says what is not noticed then.

    Args:
        name: See `Lifelines`.
        rank: This one.
        processes: By rank.
        exchange: Gives every rank's value, in rank order.
        lost: Gets, for each rank on a host that vanishes, what to say of it; then this process's connections to that
            host are ended.
    """
    hosts, here = hosts_of(processes), processes[rank].where
    listening, door, why = _open_door(len(processes)) if rank == hosts[here][0] else (None, None, "")
    told: list[tuple[Door | None, str]] = exchange((door, why))
    doors = {host: found for host, ranks in hosts.items() if (found := told[ranks[0]][0]) is not None}
    failed = {host: told[ranks[0]][1] for host, ranks in hosts.items() if host not in doors and host != here}

    ends = _connect({host: found for host, found in doors.items() if host != here}, failed)
    everyones: list[dict[str, str]] = exchange(failed)
    kept: list[socket.socket] = []
    if listening is not None and door is not None:
        num_coming = sum(p.where != here and here not in f for p, f in zip(processes, everyones, strict=True))
        with listening:
            kept = _let_in(listening, door.token, num_coming)
    deadline = time.monotonic() + 2 * _LONGEST_MEETING_S  # the other side may take that to let in those that come
    _each(ends, failed, lambda end, _: _await_welcome(end, deadline))
    everyones = exchange(failed)
    if rank == 0 and any(everyones):
        _warn(processes, hosts, everyones)

    def react(host: str) -> None:
        ranks = hosts[host]
        text = (
            f"host {processes[ranks[0]].host} has vanished, with {named(ranks)}: its system answers nothing (it has no"
            " power, has crashed, or no network joins it to this host)"
        )
        lost.update(dict.fromkeys(ranks, text))
        end_connections(own_addresses(doors, host))
        log.error("rank %d: %s", rank, text)

    for end in (*ends.values(), *kept):
        end.setblocking(False)
    return Lifelines(name, {end: host for host, end in ends.items()} | dict.fromkeys(kept, ""), react)


def _open_door(num_ranks: int) -> tuple[socket.socket | None, Door | None, str]:
    """Listen for the ranks of other hosts; or why not."""
    try:
        listening = _listen(num_ranks)
        cards = [card for cards in psutil.net_if_addrs().values() for card in cards if card.family in _FAMILIES]
        addresses = [plain_address(card.address) for card in cards]
    except (OSError, ValueError, psutil.Error) as error:
        return None, None, f"it cannot listen: {error}"
    first, port = listening.getsockname()[:2]
    others = [address for address in addresses if not ip_address(address).is_loopback]
    return listening, Door((first, *others), port, secrets.token_bytes(_TOKEN_BYTES)), ""


_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _listen(num_ranks: int) -> socket.socket:
    """At the address at which gloo has other hosts reach this one: the first that is its own. Names may also stand for
    others, such as a router's.

    Raises:
        OSError: There is none.
    """
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if name:
        found = [card.address for card in psutil.net_if_addrs().get(name, []) if card.family in _FAMILIES]
    else:
        infos = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        found = [str(info[4][0]) for info in infos if info[0] in _FAMILIES]
    for address in found:
        if "%" not in address:  # those mean something on this host alone
            with suppress(OSError):
                return socket.create_server((address, 0), family=_family(address), backlog=num_ranks)
    raise OSError(errno.EADDRNOTAVAIL, f"{name or socket.gethostname()} has no address of this host")


def plain_address(address: str) -> str:
    """Without the interface of a local one, and IPv4 as such."""
    found = ip_address(address.partition("%")[0])
    return str(found.ipv4_mapped or found) if isinstance(found, IPv6Address) else str(found)


# Of ranks that connect. What fails is closed, and told with its host.


def _connect(doors: Mapping[str, Door], failed: dict[str, str]) -> dict[str, socket.socket]:
    """Go to the doors of other hosts, to all at the same time, and say there which rank comes."""
    ends: dict[str, socket.socket] = {}
    for host, door in doors.items():
        try:
            ends[host] = socket.socket(_family(door.addresses[0]))
        except OSError as error:
            failed[host] = str(error)
    _each(ends, failed, lambda end, host: _begin_to_connect(end, doors[host]))
    deadline = time.monotonic() + _LONGEST_MEETING_S

    def greet(end: socket.socket, host: str) -> None:
        end.settimeout(max(0.01, deadline - time.monotonic()))
        end.sendall(doors[host].token)  # waits until they are connected

    _each(ends, failed, greet)
    return ends


def _each(ends: dict[str, socket.socket], failed: dict[str, str], do: Callable[[socket.socket, str], None]) -> None:
    for host, end in list(ends.items()):
        try:
            do(end, host)
        except OSError as error:
            failed[host] = str(error)
            end.close()
            del ends[host]


def _begin_to_connect(end: socket.socket, door: Door) -> None:
    end.setblocking(False)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASK_EVERY_S)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, NUM_UNANSWERED)
    code = end.connect_ex((door.addresses[0], door.port))
    if code not in (0, errno.EINPROGRESS):
        raise OSError(code, os.strerror(code))


def _await_welcome(end: socket.socket, deadline: float) -> None:
    end.settimeout(max(0.01, deadline - time.monotonic()))
    if end.recv(1) != _WELCOME:
        raise OSError(errno.ECONNREFUSED, "another program answers there")


def _let_in(listening: socket.socket, token: bytes, num_coming: int) -> list[socket.socket]:
    """Those that have connected, and have said the token."""
    deadline, kept = time.monotonic() + _LONGEST_MEETING_S, list[socket.socket]()
    with suppress(OSError):  # it takes too long
        while len(kept) < num_coming and time.monotonic() < deadline:  # strangers may come on and on
            listening.settimeout(max(0.01, deadline - time.monotonic()))
            end, _ = listening.accept()
            try:
                end.settimeout(_LONGEST_GREETING_S)
                if not hmac.compare_digest(end.recv(_TOKEN_BYTES), token):
                    raise OSError(errno.EPERM, "a stranger")
                end.sendall(_WELCOME)
                kept.append(end)
            except OSError:
                end.close()
    return kept


def _warn(
    processes: Sequence[Process], hosts: Mapping[str, Sequence[int]], failed: Sequence[Mapping[str, str]]
) -> None:
    told: dict[str, None] = {}
    for process, failures in zip(processes, failed, strict=True):
        for host, why in failures.items():
            told[f"from {process.host} to {processes[hosts[host][0]].host}: {why}"] = None
    shown = "; ".join(list(told)[:4]) + (f"; and {len(told) - 4} more" if len(told) > 4 else "")
    log.warning(
        "the connections by which a host that vanishes (no power, no network) is noticed within half a minute could"
        " not be made everywhere (%s). Training goes on; where such a host vanishes, others wait for it as long as"
        " `timeout` says. Let hosts connect to each other at any TCP port, as gloo must be able to as well",
        shown,
    )


# Of a host that has vanished


def end_connections(addresses: Collection[str]) -> None:
    """End all TCP connections of this process to these addresses, as if the other side had closed them."""
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return  # waits for messages of ours look into `lost` by themselves
    for number in numbers:
        with suppress(OSError):  # closed meanwhile, no socket, or not connected
            _end_if_to(number, addresses)


def _end_if_to(number: int, addresses: Collection[str]) -> None:
    copied = os.dup(number)
    try:
        end = socket.socket(fileno=copied)
    except OSError:
        os.close(copied)
        raise
    with end:
        is_tcp = end.family in _FAMILIES and end.type == socket.SOCK_STREAM
        if is_tcp and plain_address(end.getpeername()[0]) in addresses:
            end.shutdown(socket.SHUT_RDWR)

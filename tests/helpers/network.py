"""Hosts with networks of their own, joined by a switch: namespaces of Linux, in which a cable can be pulled.

A test starts `join` in a process of its own (`processes.start`), which makes the hosts, and pulls a cable when the test
asks for it (`unplug`).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

_NEW_MOUNTS, _NEW_UTS, _NEW_USER, _NEW_NETWORK = 0x00020000, 0x04000000, 0x10000000, 0x40000000


def _enter_new(kinds: int, inner_user: int, inner_group: int) -> bool:
    """Have this process be in new namespaces, if the system allows it. It must have one thread alone, if it is not
    root's.

    Args:
        inner_user, inner_group: Who this is there, if a namespace of users has to be made for that.
    """
    user, group = os.getuid(), os.getgid()
    unshare = ctypes.CDLL(None).unshare
    if unshare(kinds) == 0:
        return True
    if unshare(_NEW_USER | kinds) != 0:
        return False
    with suppress(OSError):
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{inner_user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{inner_group} {group} 1")
    return True


def be_on(host: str) -> None:
    """From now on this process, and what it starts, is on a host of that name: in a namespace, where the system lets
    this user make one, else Python alone is told another name."""
    if _enter_new(_NEW_UTS, os.getuid(), os.getgid()):
        with suppress(OSError):
            socket.sethostname(host)
    if socket.gethostname() != host:
        socket.gethostname = lambda: host


@cache
def why_not() -> str:
    """Why hosts cannot be joined here; empty: they can."""
    if not (shutil.which("ip") and shutil.which("unshare")):
        return "needs the commands ip and unshare"
    tried = "mount --make-rprivate / && ip link add switch type bridge && ip link add cable type veth peer name end"
    done = subprocess.run(["unshare", "-Urnm", "sh", "-c", tried], capture_output=True, text=True)
    return f"this system does not let this user make networks: {done.stderr.strip()}" if done.returncode else ""


def unplug(folder: Path, host: int) -> None:
    """Pull a host's cable, at the switch: nothing comes to it or from it any more, and nobody is told."""
    (folder / f"unplug{host}").touch()


def join(num_hosts: int, run: Callable[[int], None], folder: str, *, ipv6: bool = False) -> None:
    """Run something on each of several hosts, as a process: `node0`, `node1`, and so on, which know each other by name.
    Ends this process, when all have, with the number of those that have failed.

    Args:
        run: Gets the number of its host.
        folder: For what `unplug` asks.
        ipv6: They have addresses of IPv6 alone.
    """
    if not _enter_new(_NEW_MOUNTS | _NEW_NETWORK, 0, 0):
        raise OSError("no namespaces can be made here")
    addresses = {host: f"fd77::{host + 1}" if ipv6 else f"10.77.0.{host + 1}" for host in range(num_hosts)}
    known = Path(folder, "hosts")
    known.write_text("127.0.0.1 localhost\n" + "".join(f"{at} node{host}\n" for host, at in addresses.items()))
    _do("mount --make-rprivate /", f"mount --bind {known} /etc/hosts", "ip link add switch type bridge")
    _do("ip link set switch up")
    hosts = {_begin(host, address, run): host for host, address in addresses.items()}
    num_failed = 0
    while hosts:
        for host in addresses:
            asked = Path(folder, f"unplug{host}")
            if asked.exists():
                _do(f"ip link set cable{host} down")
                asked.unlink()
        pid, status = os.waitpid(-1, os.WNOHANG)
        num_failed += hosts.pop(pid, None) is not None and status != 0
        time.sleep(0.05)
    os._exit(num_failed)


def _begin(host: int, address: str, run: Callable[[int], None]) -> int:
    """Returns the process."""
    here, there = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            _enter_new(_NEW_NETWORK, 0, 0)
            there.send(b"1")
            there.recv(1)
            size = "64 nodad" if ":" in address else "24"
            _do("ip link set lo up", f"ip addr add {address}/{size} dev eth0", "ip link set eth0 up")
            run(host)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    here.recv(1)
    _do(f"ip link add cable{host} type veth peer name eth0 netns {pid}", f"ip link set cable{host} master switch up")
    here.send(b"1")
    return pid


def _do(*commands: str) -> None:
    for command in commands:
        subprocess.run(command.split(), check=True)

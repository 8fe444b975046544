"""`start`: run Python code in a process by itself, without the seconds that importing torch and Lightning takes.

The process is the fork of a server that has imported what tests need and done nothing else. It runs the code as its
main program and ends as any interpreter does. Test processes that run beside each other share one server. Beside a GPU
it is a new interpreter instead: CUDA does not work in forks of a process that has looked for devices, which some
imports do.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).parents[2]
# Each with the module whose import here tells that what is started may need it.
_SLOW_TO_IMPORT = {
    "torch": "torch",
    "lightning_elixir.strategy": "lightning_elixir",
    "transformers.models.gpt2.modeling_gpt2": "tests.helpers.zoo",
    "tests.helpers.dist": "tests.helpers.dist",
}
_LENGTH = struct.Struct("!Q")
_MOST_FDS = 8


class Process(Protocol):
    """What tests use of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...

    def kill(self) -> None: ...


def python_path() -> str:
    """`PYTHONPATH` for what tests start: the project's root, then the folders that this process was given there, in
    which other releases of libraries may be."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def start(
    code: str,
    environment: Mapping[str, str] | None = None,
    *,
    arguments: Sequence[str] = (),
    pass_fds: Sequence[int] = (),
    stdout: int | None = None,
    stderr: int | None = None,
) -> Process:
    """Run code as the main program of a new process, in this working directory.

    Args:
        code: What follows `python -c`.
        environment: All variables, but for `PYTHONPATH`, which is `python_path()`; None: those of this process.
        arguments: `sys.argv[1:]`.
        pass_fds: Files to share; their numbers there come after the arguments.
        stdout, stderr: Files that it writes to; None: those of this process.
    """
    environment = {**(os.environ if environment is None else environment), "PYTHONPATH": python_path()}
    if _has_gpu():
        return subprocess.Popen(
            [sys.executable, "-c", code, *arguments, *map(str, pass_fds)],
            env=environment,
            pass_fds=pass_fds,
            stdout=stdout,
            stderr=stderr,
        )
    modules = [name for name, sign in _SLOW_TO_IMPORT.items() if sign in sys.modules]
    redirected = {number: fd for number, fd in ((1, stdout), (2, stderr)) if fd is not None}
    request = _Request(modules, code, environment, list(arguments), os.getcwd(), list(redirected))
    return _server().fork(request, [*redirected.values(), *pass_fds])


def without_last_look(code: str) -> str:
    """Code for `start` whose process does not go through all that was imported when it ends, which takes a second:
    libraries may say then that it was left, so what it writes must not be looked at."""
    return f"import atexit, gc; atexit.unregister(gc.unfreeze)\n{code}"


def run(code: str, environment: Mapping[str, str] | None = None, timeout_s: float = 60.0) -> Ended:
    """As `start`, until it has ended; after so long it is killed."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        process = start(code, environment, stdout=out.fileno(), stderr=errors.fileno())
        try:
            returncode = process.wait(timeout_s)
        finally:
            process.kill()
        texts = []
        for file in (out, errors):
            file.seek(0)
            texts.append(file.read().decode())
    return Ended(returncode, *texts)


@dataclass(frozen=True)
class Ended:
    """A process that has ended, and what it has written."""

    returncode: int
    stdout: str
    stderr: str


def address() -> str:
    """Where other processes reach the server of this one, by `share`."""
    return _server().path


def share(path: str) -> None:
    """Use the server of another process, as long as that process runs."""
    _servers.append(_Server(path))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@dataclass(frozen=True)
class _Request:
    """One process to start: as `start`."""

    modules: list[str]
    """What the server is to have imported."""
    code: str
    environment: dict[str, str]
    arguments: list[str]
    cwd: str
    redirected: list[int]
    """Standard files in place of which those come that are passed first."""


class _Fork:
    """A process that the server has started; the other end of `status` is kept by its keeper."""

    def __init__(self, status: int) -> None:
        self._status = os.fdopen(status, "rb", buffering=0)
        self.pid = self._number()
        self.returncode: int | None = None

    def _number(self) -> int:
        line = self._status.readline()
        if not line:
            raise RuntimeError("the server that starts processes has ended")
        return int(line)

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def _look(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout_s)[0]:
            self.returncode = self._number()
            self._status.close()
        return self.returncode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


# ------------------------------------------------------------------------------------------------------- the server


class _Server:
    """This end of it. It ends when the process does that has started it.

    Args:
        path: Of the socket of a server that runs; None: start one.
    """

    def __init__(self, path: str | None = None) -> None:
        self._process = None
        self._channel = socket.socket(socket.AF_UNIX)
        if path is not None:
            self.path = path
            self._channel.connect(path)
            return
        self.path = os.path.join(tempfile.mkdtemp(), "server")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.path)
            listener.listen()
            self._channel.connect(self.path)  # as the first, whose end is the server's
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(listener.fileno())],
                env={**os.environ, "PYTHONPATH": python_path()},
                pass_fds=[listener.fileno()],
            )

    def fork(self, request: _Request, pass_fds: Sequence[int]) -> _Fork:
        ours, theirs = os.pipe()
        try:
            data = json.dumps(asdict(request)).encode()
            socket.send_fds(self._channel, [_LENGTH.pack(len(data))], [theirs, *pass_fds])
            self._channel.sendall(data)
        finally:
            os.close(theirs)
        return _Fork(ours)

    def stop(self) -> None:
        self._channel.close()
        if self._process is not None:
            self._process.wait()
            shutil.rmtree(os.path.dirname(self.path), ignore_errors=True)


_servers: list[_Server] = []
"""One, from when it is first needed."""


def _server() -> _Server:
    if not _servers:
        _servers.append(_Server())
    return _servers[0]


@atexit.register
def _stop() -> None:
    while _servers:
        _servers.pop().stop()


def _serve(listener: socket.socket) -> tuple[_Request, list[int]] | None:
    """Fork for every request. Returns in the server when the first that has connected hangs up, and in each process
    that was asked for with what it is to run."""
    first, _ = listener.accept()
    channels = [first]
    while True:
        ready = select.select([listener, *channels], [], [])[0][0]
        if ready is listener:
            channels.append(listener.accept()[0])
            continue
        header, fds, *_ = socket.recv_fds(ready, _LENGTH.size, _MOST_FDS)
        if not header:
            if ready is first:
                return None
            channels.remove(ready)
            ready.close()
            continue
        data, (length,) = b"", _LENGTH.unpack(header)
        while len(data) < length:
            data += ready.recv(length - len(data))
        request = _Request(**json.loads(data))
        _import(request.modules)
        if os.fork() == 0:
            break
        for fd in fds:
            os.close(fd)
    # The keeper, which tells the number of the process, and how it has ended.
    for channel in (listener, *channels):
        channel.close()
    status, *passed = fds
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid:
        for fd in passed:
            os.close(fd)
        os.write(status, b"%d\n" % pid)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(status, b"%d\n" % code)
        os._exit(0)
    os.close(status)
    return request, passed


def _import(names: Sequence[str]) -> None:
    if not all(name in sys.modules for name in names):
        for name in names:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()  # garbage collections in the processes need not look through all that was imported


def _become(request: _Request, fds: Sequence[int]) -> None:
    """Be as a process that was just started to run that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.cwd)
    for number, fd in zip(request.redirected, fds, strict=False):
        os.dup2(fd, number)
        os.close(fd)
    sys.argv = ["-c", *request.arguments, *map(str, fds[len(request.redirected) :])]


def _main(listener: socket.socket) -> str | None:
    """The server; what it returns is for a process that it has started to run."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ends with the process that has started it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers leave nothing to wait for
    found = _serve(listener)
    atexit.register(gc.unfreeze)  # libraries look at their end for what is left
    if found is None:
        return None
    _become(*found)
    return found[0].code


if __name__ == "__main__":
    program = _main(socket.socket(fileno=int(sys.argv[1])))
    if program is not None:
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})

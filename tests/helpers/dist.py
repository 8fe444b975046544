"""`run_ranks`: run a function on several ranks, each a process, and bring back what every rank returned.

Importing torch costs a process more than most tests do, so ranks are served by a pool of idle workers, one process
each, started once a session. A call gets a fresh process group and a clean process state all the same: environment,
seeds, default dtype, working directory and warning filters are set anew. After a failure or a timeout the workers
are killed, and the next call starts new ones (`processes.start`).
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import io
import itertools
import multiprocessing
import os
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.processes import Process, start, without_last_look

# The first worker is there when torch and perhaps Lightning have been imported.
_START_TIMEOUT_S = 120.0
# After the first failure the other ranks get this long to fail too, so that the earliest can be told from its echoes.
_GRACE_S = 0.5


_calls = itertools.count()


class RankError(RuntimeError):
    """A rank raised; the message holds its traceback."""


@dataclass(frozen=True)
class _Job:
    """One rank's part of a call, as sent to its worker."""

    payload: bytes
    """(function, arguments), saved."""
    rank: int
    world_size: int
    device: str
    rendezvous: str
    master_port: int
    timeout_s: float
    init_group: bool
    cwd: str
    filters: list[Any]
    """The warning filters of the calling test."""


@dataclass(frozen=True)
class _Outcome:
    """What a worker answers."""

    is_ok: bool
    value: bytes = b""
    traceback: str = ""
    time_s: float = 0.0
    """Monotonic clock, common to the processes of a host: the smallest among the failures is the cause."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    device: str = "cpu",
    timeout_s: float = 120.0,
    fresh: bool = False,
    init_group: bool = True,
) -> list[Any]:
    """Run `fn(*args)` on `world_size` ranks; inside, `torch.distributed` tells the rank.

    Args:
        fn: A function at module level of a test module (it is found by name in the other process).
        world_size: Number of ranks.
        args: Arguments for every rank; plain data and tensors.
        device: "cpu" (gloo) or "cuda" (NCCL, one GPU a rank; the test carries the mark `several_gpus`).
        timeout_s: After this long all ranks are killed and `TimeoutError` shows where each one was.
        fresh: Use new processes, for tests that measure memory or leave traces in their process.
        init_group: Start the default process group. Without it the rank is described by torchrun's environment
            variables alone, which are set in any case, so that a `Trainer` starts the group itself.

    Returns:
        What each rank returned, in rank order; tensors come back on the CPU.

    Raises:
        RankError: A rank raised; holds the traceback of the rank that failed first.
        TimeoutError: Not every rank finished in time.
    """
    pool = _Pool() if fresh else _POOLS.setdefault(device, _Pool())
    try:
        return pool.run(fn, world_size, args, device, timeout_s, init_group)
    except BaseException:
        pool.kill()
        raise
    finally:
        if fresh:
            pool.kill()


def stop_workers() -> None:
    """End all idle workers."""
    for pool in _POOLS.values():
        pool.kill()


# ---------------------------------------------------------------------------------------------------- parent side


class _Pool:
    """Idle workers of one device type; a call with n ranks uses the first n."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []

    def run(
        self,
        fn: Callable[..., Any],
        world_size: int,
        args: tuple[Any, ...],
        device: str,
        timeout_s: float,
        init_group: bool,
    ) -> list[Any]:
        new = [_Worker(rank) for rank in range(len(self._workers), world_size)]  # they start side by side
        self._workers += new
        for worker in new:
            worker.wait_until_ready()

        with tempfile.TemporaryDirectory(prefix="ranks_", ignore_cleanup_errors=True) as scratch:
            payload = _save((fn, args))
            master_port = _free_port()
            for rank, worker in enumerate(self._workers[:world_size]):
                worker.connection.send(
                    _Job(
                        payload,
                        rank,
                        world_size,
                        device,
                        f"file://{scratch}/rendezvous",
                        master_port,
                        timeout_s,
                        init_group,
                        os.getcwd(),
                        list(warnings.filters),
                    )
                )
            outcomes = self._collect(self._workers[:world_size], timeout_s)
        failures = {rank: o for rank, o in outcomes.items() if not o.is_ok}
        if failures:
            rank = min(failures, key=lambda r: failures[r].time_s)
            raise RankError(f"rank {rank} of {world_size} failed:\n{failures[rank].traceback}")
        return [_load(outcomes[rank].value) for rank in range(world_size)]

    def _collect(self, workers: Sequence[_Worker], timeout_s: float) -> dict[int, _Outcome]:
        """Outcomes by rank: of all ranks, or of those that answered soon after the first failure."""
        outcomes: dict[int, _Outcome] = {}
        deadline = time.monotonic() + timeout_s
        while len(outcomes) < len(workers):
            pending = {w.connection: rank for rank, w in enumerate(workers) if rank not in outcomes}
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            has_failed = any(not o.is_ok for o in outcomes.values())
            if not ready and has_failed:
                break
            if not ready:
                stacks = "\n".join(f"rank {rank}:\n{workers[rank].stacks()}" for rank in sorted(pending.values()))
                raise TimeoutError(f"ranks {sorted(pending.values())} did not finish within {timeout_s} s\n{stacks}")
            for connection in ready:
                rank = pending[connection]  # type: ignore[index]
                outcomes[rank] = workers[rank].answer()
                if not outcomes[rank].is_ok and not has_failed:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        return outcomes

    def kill(self) -> None:
        """End every worker and what it started."""
        for worker in self._workers:
            worker.kill()
        self._workers = []


class _Worker:
    """One worker process and the parent's end of its pipe."""

    def __init__(self, rank: int) -> None:
        self.connection, child = multiprocessing.Pipe()
        descriptor, name = tempfile.mkstemp(prefix=f"rank{rank}_", suffix=".stacks")
        os.close(descriptor)
        self._stacks = Path(name)
        self._name = f"rank{rank}"
        self._process = start(_WORKER, arguments=[name], pass_fds=[child.fileno()])
        child.close()  # so that the worker's death is the end of file here

    def wait_until_ready(self) -> None:
        if not self.connection.poll(_START_TIMEOUT_S):
            raise TimeoutError(f"worker {self._name} did not start within {_START_TIMEOUT_S} s")
        self.connection.recv()

    def answer(self) -> _Outcome:
        try:
            outcome: _Outcome = self.connection.recv()
        except (EOFError, ConnectionError):
            code = self._process.wait(5)
            text = f"the process died without a traceback, exit code {code}\n{self._stacks.read_text()}"
            return _Outcome(is_ok=False, traceback=text, time_s=time.monotonic())
        return outcome

    def stacks(self) -> str:
        """Where each of the worker's threads is now."""
        code = self._process.poll()
        if code is not None:
            return f"it has ended, with exit code {code}"
        os.kill(self._process.pid, signal.SIGUSR1)
        deadline, told = time.monotonic() + 10, ""
        while time.monotonic() < deadline:
            time.sleep(0.2)
            before, told = told, self._stacks.read_text()
            if told and told == before:
                break
        if told:
            return told
        try:
            return f"it does not heed signals:\n{Path(f'/proc/{self._process.pid}/status').read_text()}"
        except OSError:
            return f"it has ended meanwhile, with exit code {self._process.poll()}"

    def kill(self) -> None:
        # The worker leads a process group of its own, so what it started ends with it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()  # it may not lead its group yet
        self._process.wait()
        self.connection.close()
        self._stacks.unlink(missing_ok=True)


_POOLS: dict[str, _Pool] = {}
atexit.register(stop_workers)


def _free_port() -> int:
    """One that is free now, and that nobody takes before the rank does that listens there: from below those that the
    system gives to whoever asks for any (a port of those was another test's a moment later), and from other ones than
    test processes beside this one."""
    while True:
        port = 10_000 + (os.getpid() * 61 + next(_calls)) % 20_000
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def _save(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _load(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


# ---------------------------------------------------------------------------------------------------- worker side


_WORKER = "from tests.helpers.dist import serve; serve()"


def serve() -> None:
    """The worker's life: one job after another until the parent hangs up."""
    stacks, connection = sys.argv[1], Connection(int(sys.argv[2]))
    os.setpgid(0, 0)  # Ctrl-C reaches the parent alone, which ends its workers
    with open(stacks, "w") as log:
        faulthandler.enable(file=log)  # a crash (exit 139) leaves its stack
        environment = dict(os.environ)
        connection.send("ready")
        while True:
            try:
                job = connection.recv()
            except EOFError:
                return
            faulthandler.unregister(signal.SIGUSR1)  # the last job may have set this signal's handler
            faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
            try:
                outcome = _Outcome(is_ok=True, value=_run_job(job, environment))
            except BaseException:
                outcome = _Outcome(is_ok=False, traceback=traceback.format_exc(), time_s=time.monotonic())
            if dist.is_initialized():
                dist.destroy_process_group()  # also tells ranks that still wait for this one
            connection.send(outcome)
            job = outcome = None
            # What the job has left ends here with its threads, of which gloo has two a group, that look every few
            # milliseconds whether there is something to do.
            gc.collect()


def _run_job(job: _Job, environment: dict[str, str]) -> bytes:
    os.chdir(job.cwd)
    os.environ.clear()
    os.environ.update(environment)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # of a test that ran when some of the workers were started
        os.environ.pop(name, None)
    os.environ.update(
        RANK=str(job.rank),
        LOCAL_RANK=str(job.rank),
        NODE_RANK="0",
        WORLD_SIZE=str(job.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job.master_port),
        OMP_NUM_THREADS="1",
    )
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # else gloo resolves the host's name, which not every machine can
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.manual_seed(0)
    random.seed(0)
    if job.device == "cuda":
        torch.cuda.set_device(job.rank)
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.filters.extend(job.filters)  # type: ignore[attr-defined]
        fn, args = _load(job.payload)
        if job.init_group:
            dist.init_process_group(
                "nccl" if job.device == "cuda" else "gloo",
                init_method=job.rendezvous,
                rank=job.rank,
                world_size=job.world_size,
                timeout=timedelta(seconds=job.timeout_s),
            )
            if job.device == "cpu":
                dist.barrier()  # gloo: a rank that is done must not hang up on one that still connects
        return _save(fn(*args))


# ---------------------------------------------------------------------------------------------------- ranks that die


_STDERR = 2
"""What pytest keeps of this, and shows where a test fails."""


def start_processes(code: str, world_size: int) -> list[Process]:
    """Start Python code on several ranks, each a process by itself, as a cluster's launcher would. One rank alone gets
    no address of others. A `Trainer` starts the group."""
    port = _free_port()
    processes = []
    for rank in range(world_size):
        group = {"RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(world_size)}
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        environment = {**os.environ, **(group | place if world_size > 1 else {}), "OMP_NUM_THREADS": "1"}
        quiet = f"import warnings; warnings.simplefilter('ignore')\n{code}"
        processes.append(start(without_last_look(quiet), environment, stderr=_STDERR))
    return processes


def run_processes(code: str, world_size: int, timeout_s: float = 120.0) -> list[int]:
    """Run Python code on several ranks, which may be killed: see `start_processes`.

    Returns:
        Exit codes, by rank. No process is left.
    """
    processes = start_processes(code, world_size)
    deadline = time.monotonic() + timeout_s
    try:
        return [process.wait(max(0.0, deadline - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()

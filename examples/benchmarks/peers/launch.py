"""Processes: one for each rank of a system, watched, and ended when their time is over."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from peers.jobs import Job

_SAMPLE_S = 0.2
_SHOWN = 3000
_GRACE_S = 5.0


class HostSampler:
    """Highest host memory of some process trees while they run.

    Two figures, since neither sees everything: the resident sizes of the processes, where pages that ranks share count
    for each, and what the machine has less, where page-locked memory that belongs to the driver counts too.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._stop = threading.Event()
        self._used_before = _used_bytes()
        self.peak_rss_bytes = 0
        self.peak_host_used_bytes = 0
        self._thread = threading.Thread(target=self._run, name="host-memory", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            self._look()

    def _look(self) -> None:
        total = 0
        for pid in self._pids:
            with suppress(psutil.Error):
                parent = psutil.Process(pid)
                for process in (parent, *parent.children(recursive=True)):
                    with suppress(psutil.Error):
                        total += process.memory_info().rss
        self.peak_rss_bytes = max(self.peak_rss_bytes, total)
        self.peak_host_used_bytes = max(self.peak_host_used_bytes, _used_bytes() - self._used_before)

    def close(self) -> dict[str, int]:
        self._stop.set()
        self._thread.join()
        return {"peak_rss_bytes": self.peak_rss_bytes, "peak_host_used_bytes": self.peak_host_used_bytes}


def _used_bytes() -> int:
    memory = psutil.virtual_memory()
    return int(memory.total - memory.available)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
    return port


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun would set. Cores are shared out; torchrun itself would leave one to each rank."""
    if ranks == 1:
        return {}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "compare",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // ranks))),
    }


def run_job(job: Job, command: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """Run `command JOB RESULT` once for each rank; rank 0 writes the result.

    Returns:
        What rank 0 wrote, and the memory of the host; or `error`, the end of what went wrong. Never raises for it.
    """
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="compare-") as name:
        folder = Path(name)
        job.save(folder / "job.json")
        result_path = folder / "result.json"
        port = free_port()
        processes, logs = [], []
        sampler: HostSampler | None = None
        try:
            for rank in range(job.ranks):
                logs.append(folder / f"rank{rank}.log")
                with logs[-1].open("w") as log:
                    process = subprocess.Popen(  # noqa: S603 - this very program
                        [*command, str(folder / "job.json"), str(result_path)],
                        env={**os.environ, **rank_environment(rank, job.ranks, port)},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                processes.append(process)
            sampler = HostSampler([p.pid for p in processes])
            failure = _wait(processes, timeout_s)
        finally:
            _end(processes)
            memory = {} if sampler is None else sampler.close()
        content: dict[str, Any] = {}
        if result_path.exists():
            content = json.loads(result_path.read_text())
        if failure is not None and not content.get("unsupported"):
            rank, error = failure
            text = logs[rank].read_text(errors="replace")[-_SHOWN:]
            content = {"log": text, "error": f"{error}: {_last_line(text)}"}
        return {**content, **memory, "process_s": time.monotonic() - begin_s}


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["it said nothing"])[-1][:300]


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> tuple[int, str] | None:
    """None if all end well; else a rank and what was wrong, as soon as one fails."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        codes = [p.poll() for p in processes]
        failed = [(rank, code) for rank, code in enumerate(codes) if code]
        if failed:
            rank, code = failed[0]
            return rank, f"rank {rank} ended with {code}"
        if all(code == 0 for code in codes):
            return None
        if time.monotonic() > deadline_s:
            return 0, f"not ready after {timeout_s:.0f} s"
        time.sleep(0.05)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End what still runs of these, with what they started."""
    running = [p for p in processes if p.poll() is None]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in running:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
        deadline = time.monotonic() + _GRACE_S
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))

"""How fast offload files are written and read, beside the disk itself, in one run.

    python examples/benchmarks/nvme_speed.py --folder /mnt/nvme --gib 4 --json nvme.json

Three ways, in turns: raw, as dd would with `oflag=direct` (pieces of 8 MiB, as many threads as `--queue-depth`, one
aligned buffer each, nothing else), and an offload file of either back end with regions of `--region-mib`. All use
O_DIRECT where the file system has it, on preallocated files that have been written once. The last figures are those of
an update: regions are read, and written as soon as they are there, so both directions share the disk. Medians of
`--repeats`, in GB/s, and the part of raw that they are. Exits with 1 if one is below `--least`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import mmap
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_elixir.storage.nvme import ALIGNMENT, OffloadFile, Request, open_offload_file
from lightning_elixir.storage.nvme.scratch import go_direct
from lightning_elixir.storage.nvme.transfer import aligned_memory

RAW_BYTES = 8 * 2**20
NUM_BUFFERS = 4
DIRECTIONS = ("write", "read", "update")


def main() -> int:
    arguments = parse()
    names = [name for name in arguments.backends if name != "tensornvme" or importlib.util.find_spec("tensornvme")]
    for name in sorted({*arguments.backends} - {*names}):
        print(f"{name}: not installed, left out")
    folder = Path(arguments.folder)
    folder.mkdir(parents=True, exist_ok=True)
    region_bytes = arguments.region_mib * 2**20
    count = max(NUM_BUFFERS, round(arguments.gib * 2**30 / region_bytes))
    nbytes = count * region_bytes
    seconds: dict[str, dict[str, list[float]]] = {name: {d: [] for d in DIRECTIONS} for name in ("raw", *names)}
    is_direct: dict[str, bool] = {}
    for repeat in range(arguments.repeats + 1):  # the first one warms up
        for name in seconds:
            if name == "raw":
                with RawFile(folder, nbytes, arguments.queue_depth) as raw:
                    is_direct[name] = raw.is_direct
                    raw.write()
                    took = {"read": timed(raw.read), "write": timed(raw.write), "update": timed(raw.update)}
            else:
                sizes = [region_bytes] * count
                with open_offload_file(folder, sizes, backend=name, queue_depth=arguments.queue_depth) as file:
                    is_direct[name] = file.is_direct
                    took = time_offload(file, region_bytes // 4)
            for direction, took_s in took.items():
                if repeat:
                    seconds[name][direction].append(took_s)
    return report(arguments, nbytes, seconds, is_direct)


def report(
    arguments: argparse.Namespace,
    nbytes: int,
    seconds: dict[str, dict[str, list[float]]],
    is_direct: dict[str, bool],
) -> int:
    results: dict[str, Any] = {}
    for name, by_direction in seconds.items():
        results[name] = {"is_direct": is_direct[name]}
        for direction, took in by_direction.items():
            moved = nbytes * (2 if direction == "update" else 1)
            results[name][f"{direction}_gb_per_s"] = moved / statistics.median(took) / 1e9
            results[name][f"{direction}_of_raw"] = statistics.median(seconds["raw"][direction]) / statistics.median(
                took
            )
            results[name][f"{direction}_s"] = took
    for name, row in results.items():
        cells = (f"{d} {row[f'{d}_gb_per_s']:6.2f} GB/s ({row[f'{d}_of_raw']:.2f} of raw)" for d in DIRECTIONS)
        print(f"{name:<11}{'direct' if row['is_direct'] else 'cached':<8}{'   '.join(cells)}")
    if arguments.json:
        found = {
            "nbytes": nbytes,
            "region_mib": arguments.region_mib,
            "queue_depth": arguments.queue_depth,
            "system": platform.platform(),
            "torch": torch.__version__,
            "cores": os.cpu_count(),
            "results": results,
        }
        Path(arguments.json).write_text(json.dumps(found, indent=1) + "\n")
    slow = [(n, d) for n, row in results.items() for d in DIRECTIONS if row[f"{d}_of_raw"] < arguments.least]
    for name, direction in slow:
        print(f"{name}: {direction} is below {arguments.least} of raw")
    return 1 if slow else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where the files go")
    parser.add_argument("--gib", type=float, default=1.0, help="size of each file")
    parser.add_argument("--region-mib", type=int, default=64, help="what is read or written as one")
    parser.add_argument("--queue-depth", type=int, default=4, help="reads and writes at a time")
    parser.add_argument("--backends", nargs="+", default=["direct", "tensornvme"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--least", type=float, default=0.0, help="part of raw that each must reach")
    parser.add_argument("--json", help="where the figures go")
    return parser.parse_args()


def timed(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def time_offload(file: OffloadFile, numel: int) -> dict[str, float]:
    """Seconds of all regions in each direction."""
    buffers = [file.empty(numel, torch.float32) for _ in range(NUM_BUFFERS)]
    for buffer in buffers:
        buffer.random_(2**20)
    count = len(file.regions)

    def write() -> None:
        in_turns(count, buffers, lambda k, buffer: file.write(k, buffer))

    def read() -> None:
        in_turns(count, buffers, lambda k, buffer: file.read(k, buffer, will_write=True))

    def update() -> None:
        reads, writes = {k: file.read(k, buffers[k], will_write=True) for k in range(2)}, {}
        for k in range(count):
            reads[k].wait()
            writes[k] = file.write(k, buffers[k % NUM_BUFFERS])
            if k + 2 < count:
                if k >= 2:
                    writes[k - 2].wait()
                reads[k + 2] = file.read(k + 2, buffers[(k + 2) % NUM_BUFFERS], will_write=True)
        file.synchronize()

    write()
    return {"read": timed(read), "write": timed(write), "update": timed(update)}


def in_turns(count: int, buffers: list[Tensor], begin: Callable[[int, Tensor], Request]) -> None:
    requests: list[Request] = []
    for k in range(count):
        if k >= len(buffers):
            requests[k - len(buffers)].wait()
        requests.append(begin(k, buffers[k % len(buffers)]))
    for request in requests:
        request.wait()


class RawFile:
    """What the disk can do: threads that read and write a file in pieces."""

    def __init__(self, folder: Path, nbytes: int, num_threads: int) -> None:
        self._fd, path = tempfile.mkstemp(dir=folder)
        os.unlink(path)
        os.posix_fallocate(self._fd, 0, nbytes)
        self.is_direct = go_direct(self._fd, nbytes - ALIGNMENT)
        self._num_pieces, self._num_threads = nbytes // RAW_BYTES, num_threads
        self._buffers = [aligned_memory(RAW_BYTES) for _ in range(num_threads)]
        for buffer in self._buffers:
            buffer[:] = os.urandom(RAW_BYTES)
        self._threads = ThreadPoolExecutor(num_threads)

    def write(self) -> None:
        self._each(lambda buffer, offset: os.pwrite(self._fd, buffer, offset))

    def read(self) -> None:
        self._each(lambda buffer, offset: os.preadv(self._fd, [buffer], offset))

    def update(self) -> None:
        def both(buffer: mmap.mmap, offset: int) -> int:
            os.preadv(self._fd, [buffer], offset)
            return os.pwrite(self._fd, buffer, offset)

        self._each(both)

    def _each(self, move: Callable[[mmap.mmap, int], int]) -> None:
        def run(thread: int) -> None:
            for piece in range(thread, self._num_pieces, self._num_threads):
                if move(self._buffers[thread], piece * RAW_BYTES) != RAW_BYTES:
                    raise OSError(f"the disk ended at {piece * RAW_BYTES}")

        list(self._threads.map(run, range(self._num_threads)))

    def __enter__(self) -> RawFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown()
        os.close(self._fd)


if __name__ == "__main__":
    sys.exit(main())

"""How long ranks of one host take to tell each other a few integers, as they do before each gathering of a chunk.

    python examples/benchmarks/messages.py --ranks 2 --busy 0 2 4 --out messages.json

No GPU is needed. Messages go by memory that the ranks share, and, for comparison, by gloo; beside them run as many
threads as `--busy` says, each in a process of its own, which compute all the time as updates on the host do.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_elixir.core.comm import GroupComm, make_comm
from lightning_elixir.core.host import cpu_model, num_usable_cores

WARM_UP = 20


def compute_for_ever() -> None:
    torch.set_num_threads(1)
    values = torch.rand(2**16)
    while True:
        values.mul_(1.0001)


def time_messages(rank: int, world_size: int, path: str, is_shared: bool, count: int, results: Any) -> None:
    """One rank: seconds of each of `count` messages to `results`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    comm = make_comm(None, torch.device("cpu"))
    if isinstance(comm, GroupComm) and not is_shared:
        comm._messages = None
    took = []
    for _ in range(count + WARM_UP):
        begin_s = time.perf_counter()
        comm.exchange([1, 2, 3])
        took.append(time.perf_counter() - begin_s)
    comm.close()
    dist.destroy_process_group()
    results.put(took[WARM_UP:])


def measure(num_ranks: int, num_busy: int, is_shared: bool, count: int) -> dict[str, Any]:
    """Of all ranks together, in microseconds."""
    context = multiprocessing.get_context("spawn")
    busy = [context.Process(target=compute_for_ever, daemon=True) for _ in range(num_busy)]
    for process in busy:
        process.start()
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "store")
        ranks = [
            context.Process(target=time_messages, args=(rank, num_ranks, path, is_shared, count, results))
            for rank in range(num_ranks)
        ]
        for process in ranks:
            process.start()
        took = sorted(seconds * 1e6 for _ in ranks for seconds in results.get())
        for process in ranks:
            process.join()
    for process in busy:
        process.kill()
    return {
        "busy": num_busy,
        "by": "shared memory" if is_shared else "gloo",
        "median_us": statistics.median(took),
        "mean_us": statistics.mean(took),
        "slowest_hundredth_us": took[-max(1, len(took) // 100)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 2, 4], help="other threads that compute")
    parser.add_argument("--count", type=int, default=1000, help="messages of each rank")
    parser.add_argument("--out", type=Path, default=Path("messages.json"))
    arguments = parser.parse_args()
    rows = []
    for num_busy in arguments.busy:
        for is_shared in (False, True):
            rows.append(measure(arguments.ranks, num_busy, is_shared, arguments.count))
            print(", ".join(f"{k} {v:.0f}" if isinstance(v, float) else f"{k} {v}" for k, v in rows[-1].items()))
    found = {
        "command": sys.argv,
        "torch": torch.__version__,
        "machine": f"{num_usable_cores()} cores of {cpu_model()}, {platform.system()}",
        "rows": rows,
    }
    arguments.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

"""How fast Adam updates parameters whose states live in host memory: by the host, streamed to the GPU, both at once.

    python examples/benchmarks/adam_speed.py --numel 1e9 --json adam.json

fp32 master and states, bf16 gradients and parameters, in chunks, as a training step does it; the median of some runs,
in parameters per second. Needs 16 bytes of host memory a parameter. On a machine without a GPU it checks itself alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_elixir.core.device import Device, make_device
from lightning_elixir.optim.execution import UpdateRunner, UpdateTimes
from lightning_elixir.optim.hybrid_adam import AdamHyper
from lightning_elixir.optim.streaming import StateStream
from lightning_elixir.optim.updates import FlatUpdate, UpdatePart
from lightning_elixir.plan.streaming import SCRATCH_BYTES, SLOT_BYTES

HYPER = AdamHyper(
    lr=1e-4,
    beta1=0.9,
    beta2=0.95,
    eps=1e-8,
    weight_decay=0.1,
    adamw_mode=True,
    bias_correction=True,
    maximize=False,
)


def make_update(device: Device, numel: int, segment_numel: int) -> FlatUpdate:
    """One chunk with random contents, cut into parameters of `segment_numel`."""

    def filled(dtype: torch.dtype, scale: float) -> Tensor:
        source = torch.randn(1 << 20).mul_(scale).abs_()
        target = device.host_empty(numel, dtype)
        for start in range(0, numel, source.numel()):
            part = target[start : start + source.numel()]
            part.copy_(source[: part.numel()])
        return target

    starts = range(0, numel, segment_numel)
    parts = tuple(UpdatePart(s, min(segment_numel, numel - s), 10, HYPER) for s in starts)
    return FlatUpdate(
        filled(torch.float32, 1.0),
        filled(torch.bfloat16, 1e-3),
        filled(torch.float32, 1e-3),
        filled(torch.float32, 1e-6),
        parts,
        grad_factor=0.5,
        compute=device.host_empty(numel, torch.bfloat16),
    )


def measure(
    device: Device, streamed: Sequence[FlatUpdate], on_host: Sequence[FlatUpdate], slot_bytes: int, repeats: int
) -> dict[str, Any]:
    runner = UpdateRunner(device)
    runner._stream = StateStream(device, slot_bytes, SCRATCH_BYTES)
    runs: list[UpdateTimes] = []
    seconds = []
    for _ in range(repeats + 1):
        device.synchronize()
        start_s = time.perf_counter()
        runs.append(runner.run([], streamed, on_host))
        seconds.append(time.perf_counter() - start_s)
    took_s = statistics.median(seconds[1:])
    numel = runs[0].streamed_numel + runs[0].cpu_numel
    return {
        "streamed_numel": runs[0].streamed_numel,
        "cpu_numel": runs[0].cpu_numel,
        "slot_mib": slot_bytes / 2**20,
        "seconds": seconds[1:],
        "adam_s": statistics.median(r.adam_s for r in runs[1:]),
        "gparam_per_s": numel / took_s / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=float, default=1e9, help="parameters in all")
    parser.add_argument("--chunk-numel", type=float, default=64 * 2**20, help="parameters of a chunk")
    parser.add_argument("--segment-numel", type=float, default=16 * 2**20, help="parameters of a weight")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--slot-mib", type=float, nargs="*", default=[SLOT_BYTES / 2**20])
    parser.add_argument("--shares", type=float, nargs="*", default=[0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    device = make_device()
    num_chunks = max(2, round(options.numel / options.chunk_numel))
    start_s = time.perf_counter()
    updates = [make_update(device, int(options.chunk_numel), int(options.segment_numel)) for _ in range(num_chunks)]
    print(f"{num_chunks} chunks made in {time.perf_counter() - start_s:.1f} s", flush=True)
    rows = []
    for slot_mib in options.slot_mib:
        for share in options.shares:
            count = round(share * num_chunks)
            row = measure(device, updates[:count], updates[count:], int(slot_mib * 2**20), options.repeats)
            rows.append({"share_streamed": count / num_chunks, **row})
            print(
                f"slots of {slot_mib:.0f} MiB, {count / num_chunks:.2f} streamed: {row['gparam_per_s']:.2f} Gparam/s, "
                f"the host at work for {row['adam_s']:.3f} of {statistics.median(row['seconds']):.3f} s",
                flush=True,
            )
    if options.json:
        versions = {"torch": torch.__version__, "device": str(device.torch_device), "threads": torch.get_num_threads()}
        options.json.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()

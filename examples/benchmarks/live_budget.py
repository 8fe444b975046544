"""How long it takes to give a device's memory back between two steps, and to take it again, and what the device sees.

    python examples/benchmarks/live_budget.py --width 8192 --depth 80 --limit 16GiB --out live_budget.json
    torchrun --nproc-per-node 2 examples/benchmarks/live_budget.py --width 8192 --depth 80 --limit 16GiB
    python examples/benchmarks/live_budget.py --width 64 --depth 8 --limit 128KiB --device cpu

The first trains 5.4e9 parameters, which take 80 GiB with everything on the GPU: bf16 with an fp32 master, `HybridAdam`.
Some steps, then again and again: `set_memory_limit(limit)`, a step within it, `set_memory_limit()`, a step. A second
training of the same model, which is never moved, must have had the same losses, bit for bit. Free memory is the
device's own (`cudaMemGetInfo`), before and after each call, when all that runs on it is over, and the updates of the
step before. With `--keep-host-memory` what chunks leave on the host stays for the next time.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_elixir import ElixirModule, ElixirOptimizer, HybridAdam, __version__
from lightning_elixir.plan.types import UpdateTiming
from lightning_elixir.plan.units import format_bytes, parse_bytes
from lightning_elixir.planning import ChunkSizes, PlacementRequest, TrainingRegime, detect_budget, make_plan

GIB = 2**30


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + torch.tanh(self.linear(self.norm(x)))
        return y


def build(width: int, depth: int) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = nn.Sequential(*[Block(width) for _ in range(depth)])
    model.to_empty(device="cpu")
    scale = torch.randn(width, width) / width**0.5
    with torch.no_grad():
        for number, block in enumerate(model):
            block.norm.reset_parameters()  # type: ignore[union-attr, operator]
            block.linear.weight.copy_(scale.roll(number, 0))  # type: ignore[union-attr, operator]
    return model


class Training:
    """One training, on all ranks."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.device = torch.device(arguments.device)
        self.batch, self.width = arguments.batch_size, arguments.width
        self.keeps = arguments.keep_host_memory
        world = dist.get_world_size() if dist.is_initialized() else 1
        model = build(arguments.width, arguments.depth)
        plan = make_plan(
            model,
            PlacementRequest(policy="cuda"),
            chunk_sizes=ChunkSizes(chunk_size=parse_bytes(arguments.chunk_size)),
            budget=detect_budget(world),
            regime=TrainingRegime(update_timing=UpdateTiming.BEHIND_FORWARD, can_stream=True),
            world_size=world,
            compute_dtype=torch.bfloat16,
        )
        self.module = ElixirModule(model, plan, dtype=torch.bfloat16, device=self.device)
        self.optimizer = ElixirOptimizer(self.module, HybridAdam(model.parameters(), lr=1e-4), init_step=True)
        self.number = 0

    def step(self) -> float:
        generator = torch.Generator().manual_seed(self.number)
        self.number += 1
        x = torch.randn(self.batch, self.width, generator=generator).to(self.device)
        loss = self.module(x).float().square().mean()
        self.optimizer.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def limit(self, gpu: int | None) -> dict[str, Any]:
        begin_s = time.monotonic()
        self.optimizer.synchronize()  # the call would wait for the last step's updates on the host
        updates_s = time.monotonic() - begin_s
        before = self.free()
        begin_s = time.monotonic()
        self.module.set_memory_limit(gpu=gpu, keep_host_memory=self.keeps)
        self.wait()
        seconds = time.monotonic() - begin_s
        after = self.free()
        held = self.module.stats().held_bytes
        found = {"limit": gpu, "seconds": seconds, "updates_s": updates_s}
        return {**found, "free_before": before, "free_after": after, "held_bytes": held}

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def free(self) -> int:
        """Bytes; on the CPU, which has no such figure, those that the engine does not hold, below nothing."""
        self.wait()
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info()[0]
        return -self.module.engine.device_bytes()

    def close(self) -> None:
        self.module.close()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    training = Training(arguments)
    limit, losses, calls = parse_bytes(arguments.limit), [], []
    losses += [training.step() for _ in range(2)]
    for _ in range(arguments.rounds):
        for gpu in (limit, None):
            calls.append(training.limit(gpu))
            losses.append(training.step())
    training.close()
    del training
    gc.collect()
    undisturbed = Training(arguments)
    expected = [undisturbed.step() for _ in losses]
    undisturbed.close()
    return {"calls": calls, "losses": losses, "is_same": losses == expected}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--depth", type=int, default=80)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--chunk-size", default="256MiB")
    parser.add_argument("--limit", default="16GiB")
    parser.add_argument("--keep-host-memory", action="store_true", help="have it stay from one call to the next")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        arguments.chunk_size = str(arguments.width**2 * 2 + 4096) + "B"
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        if arguments.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if arguments.device == "cuda" else "gloo")
    found = measure(arguments)
    for call in found["calls"]:
        moved = call["free_after"] - call["free_before"]
        words = "all again" if call["limit"] is None else format_bytes(call["limit"])
        sys.stdout.write(
            f"rank {rank}, {words}: {call['seconds']:.2f} s, free memory changed by {moved / GIB:.2f} GiB\n"
        )
    sys.stdout.write(f"rank {rank}, the losses of a training that is never moved: {found['is_same']}\n")
    if arguments.out is not None and rank == 0:
        about = {"version": __version__, "torch": torch.__version__, "host": platform.platform()}
        if arguments.device == "cuda":
            about["gpu"] = torch.cuda.get_device_name()
        told = {name: str(value) for name, value in vars(arguments).items()}
        arguments.out.write_text(json.dumps({"about": about, "arguments": told, **found}, indent=1) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()
    if not found["is_same"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

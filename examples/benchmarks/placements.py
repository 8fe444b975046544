"""Predicted against measured: one GPT under hand-made placements and under the search's own, at several memory limits.

    python examples/benchmarks/placements.py --size 2.7b --limits-gib 16 40 80 --out placements.json
    python examples/benchmarks/placements.py --size tiny --batch-size 2 --seq-len 64 --device cpu --limits-mib 2 4

For each limit: a warm-up step with the smallest rCache samples memory, a later one is timed; then the search makes its
plan and twelve others are made by hand, every one is predicted before it runs, and each runs a few steps. bf16 with an
fp32 master, `HybridAdam`, per-layer activation checkpointing. The times are medians of synchronised steps.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import statistics
import sys
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lightning_elixir import ElixirModule, ElixirOptimizer, HybridAdam, __version__, profile_hardware
from lightning_elixir.errors import CapacityError
from lightning_elixir.plan.describe import describe_placement
from lightning_elixir.plan.hardware import HardwareSpec
from lightning_elixir.plan.memory import Budget
from lightning_elixir.plan.packing import PackedChunk
from lightning_elixir.plan.placing.placement import OFFLOADED, RESIDENT, Layout, Placer, Site
from lightning_elixir.plan.problem import PlacementRequest, Problem
from lightning_elixir.plan.profile import StepProfile
from lightning_elixir.plan.types import Plan, Tier
from lightning_elixir.plan.units import format_bytes
from lightning_elixir.planning import ChunkSizes, TrainingRegime, make_plan, module_accesses, timeline_of

_spec = importlib.util.spec_from_file_location("train_gpt", Path(__file__).parents[1] / "train_gpt.py")
if _spec is None or _spec.loader is None:
    raise SystemExit("examples/train_gpt.py is missing")
train_gpt: Any = importlib.util.module_from_spec(_spec)
sys.modules["train_gpt"] = train_gpt
_spec.loader.exec_module(train_gpt)

KEPT = Site(Tier.GPU, Tier.CPU, True)
SHARES = (1.0, 0.5, 0.0)  # of the chunks that fit with their states on the GPU


def build(size: str, seq_len: int, device: torch.device) -> nn.Module:
    """The GPT on the CPU; its values are drawn on the device, which is faster."""
    shape = replace(train_gpt.SIZES[size], seq_len=seq_len)
    with torch.device("meta"):
        model: nn.Module = train_gpt.GPT(shape, True)
    drawn: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is None:
                continue
            if id(p) not in drawn:
                value = torch.ones(p.shape) if p.dim() == 1 else torch.empty(p.shape, device=device).normal_(std=0.02)
                drawn[id(p)] = nn.Parameter(value.cpu())
            module._parameters[name] = drawn[id(p)]
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.zeros_(module.bias)
    return model


class Bench:
    """One engine, and what its steps take."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.device = torch.device(arguments.device)
        self.is_cuda = self.device.type == "cuda"
        self.hardware = profile_hardware(device=self.device) if self.is_cuda else HardwareSpec.nominal()
        torch.manual_seed(0)
        model = build(arguments.size, arguments.seq_len, self.device)
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self.accesses = module_accesses(model)
        first = make_plan(
            model,
            PlacementRequest(policy="cpu"),
            chunk_sizes=ChunkSizes(arguments.chunk_mib * 2**20 if arguments.chunk_mib else None),
            compute_dtype=torch.bfloat16,
        )
        with torch.device("meta"):
            self.skeleton = train_gpt.GPT(replace(train_gpt.SIZES[arguments.size], seq_len=arguments.seq_len), True)
        optimizer = HybridAdam(model.parameters(), lr=1e-5)
        self.module = ElixirModule(model, first, dtype=torch.bfloat16, device=self.device)
        self.optimizer = ElixirOptimizer(self.module, optimizer)
        self.engine = self.module.engine
        shape = (arguments.batch_size, arguments.seq_len + 1)
        self.tokens = torch.randint(0, train_gpt.VOCABULARY, shape, device=self.device)

    def step(self) -> tuple[float, float]:
        """(loss, seconds)."""
        self.synchronize()
        start_s = time.perf_counter()
        logits = self.module(self.tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), self.tokens[:, 1:].flatten())
        self.optimizer.backward(loss)
        self.optimizer.step()
        self.synchronize()
        return float(loss.detach()), time.perf_counter() - start_s

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def limit(self, nbytes: int) -> None:
        if self.is_cuda:
            torch.cuda.empty_cache()
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total))

    def sample(self) -> StepProfile:
        """A step for the memory, one to settle, one for the times."""
        self.engine.sample_activations(True)
        self.step()
        self.engine.sample_activations(False)
        self.step()
        self.engine.sample_times(True)
        self.step()
        self.engine.sample_times(False)
        profile = self.engine.step_profile()
        if profile is None:
            raise SystemExit("no step was sampled")
        return profile.with_margin(self.engine.plan.block_bytes)

    def run(self, name: str, plan: Plan, profile: StepProfile) -> dict[str, Any]:
        """Predict, move to the plan, and measure."""
        predicted = timeline_of(plan, profile, self.hardware)
        result: dict[str, Any] = {
            "name": name,
            "placement": describe_placement(plan.chunks, plan.rcache_blocks, plan.prefetch_depth),
            "predicted": asdict(predicted.times),
            "predicted_peak_bytes": predicted.peak_gpu_bytes,
        }
        start_s = time.perf_counter()
        try:
            self.engine.replan(plan)
            if self.is_cuda:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            result["move_s"] = time.perf_counter() - start_s
            self.step()
            self.engine.reset_stats()
            if self.is_cuda:
                torch.cuda.reset_peak_memory_stats()
            steps = [self.step() for _ in range(self.arguments.steps)]
        except (torch.OutOfMemoryError, CapacityError) as error:
            result["error"] = "".join(traceback.format_exception(error))[-3000:]
            print(f"{name}: failed\n{result['error']}", flush=True)
            return result
        result["loss"] = steps[-1][0]
        result["step_s"] = [seconds for _, seconds in steps]
        result["measured_s"] = statistics.median(result["step_s"])
        result["counters"] = asdict(self.engine.stats())
        if self.is_cuda:
            result["measured_peak_bytes"] = torch.cuda.max_memory_allocated()
            result["reserved_bytes"] = torch.cuda.max_memory_reserved()
        times = self.optimizer.last_step_times
        result["update"] = None if times is None else asdict(times)
        off = predicted.times.total_s / result["measured_s"] - 1
        times_s = f"predicted {predicted.times.total_s:.3f} s, measured {result['measured_s']:.3f} s ({off:+.0%})"
        print(f"{name:34s} {times_s}; update {predicted.times.step_s:.3f} s; {result['placement']}", flush=True)
        return result


def by_hand(bench: Bench, profile: StepProfile, limit_bytes: int) -> list[tuple[str, Plan]]:
    """Twelve placements: states of as many chunks as fit, half of them, none; the other parameters fetched, or kept as
    far as they fit; the other updates on the host or streamed."""
    plan = bench.engine.plan
    layout = Layout(
        tuple(PackedChunk(c.dtype, c.requires_grad, c.numel, c.members) for c in plan.chunks),
        plan.block_bytes,
        plan.compute_dtype,
    )
    request = PlacementRequest(policy="const", prefetch_depth=4, accesses=bench.accesses)
    placer = Placer(layout, Problem(request, Budget(limit_bytes)), profile)
    n = len(layout.packed)

    def fits(sites: list[Site]) -> bool:
        placement = placer.at(sites)
        return placement.gpu_bytes(placement.smallest) <= limit_bytes

    def most(make: Any) -> int:
        return max((k for k in range(n + 1) if fits(make(k))), default=0)

    resident = most(lambda k: [RESIDENT] * k + [OFFLOADED] * (n - k))
    plans = []
    for share in SHARES:
        count = round(resident * share)
        kept = most(lambda k, c=count: [RESIDENT] * c + ([KEPT] * n)[: min(k, n - c)] + [OFFLOADED] * max(0, n - c - k))
        for others in ("fetched", "kept"):
            sites = [RESIDENT] * count + [OFFLOADED] * (n - count)
            if others == "kept":
                kept_now = min(kept, n - count)
                sites = [RESIDENT] * count + [KEPT] * kept_now + [OFFLOADED] * (n - count - kept_now)
            for where in ("host", "streamed"):
                placed = [
                    s._replace(is_update_streamed=True) if where == "streamed" and s.optim_tier is Tier.CPU else s
                    for s in sites
                ]
                name = f"states of {count}, others {others}, {where}"
                try:
                    plans.append((name, placer.plan(placed, "const")))
                except CapacityError as error:
                    print(f"{name}: {error}", flush=True)
    return plans


def table(results: list[dict[str, Any]]) -> list[str]:
    rows = [
        "| limit | placement | predicted s | measured s | error | predicted GiB | measured GiB (reserved) |",
        "|---|---|---|---|---|---|---|",
    ]
    for limit in results:
        for run in limit["runs"]:
            label = f"| {limit['limit']} | {run['name']}: {run['placement']} | {run['predicted']['total_s']:.3f} "
            if "measured_s" not in run:
                rows.append(f"{label}| failed | | {run['predicted_peak_bytes'] / 2**30:.2f} | |")
                continue
            error = run["predicted"]["total_s"] / run["measured_s"] - 1
            peak, reserved = (run.get(k, 0) / 2**30 for k in ("measured_peak_bytes", "reserved_bytes"))
            rows.append(
                f"{label}| {run['measured_s']:.3f} | {error:+.0%} | {run['predicted_peak_bytes'] / 2**30:.2f}"
                f" | {peak:.2f} ({reserved:.2f}) |"
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="2.7b", choices=list(train_gpt.SIZES))
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=3, help="timed ones of each placement")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limits-gib", type=float, nargs="*", default=[])
    parser.add_argument("--limits-mib", type=float, nargs="*", default=[])
    parser.add_argument("--chunk-mib", type=int, default=0, help="0: the size with the least waste")
    parser.add_argument("--budget-s", type=float, default=1e9, help="begin no placement after this long")
    parser.add_argument("--out", type=Path, default=Path("placements.json"))
    arguments = parser.parse_args()
    begin_s = time.perf_counter()
    bench = Bench(arguments)
    print(f"{bench.num_parameters / 1e9:.3f}e9 parameters, built in {time.perf_counter() - begin_s:.0f} s", flush=True)
    profile = bench.sample()
    if bench.is_cuda:
        pools: dict[str, list[int]] = {}
        for segment in torch.cuda.memory_snapshot():
            sums = pools.setdefault(str(segment["segment_pool_id"]), [0, 0])
            sums[0] += segment["total_size"]
            sums[1] += segment["allocated_size"]
        print(f"reserved and allocated by pool after sampling: {pools}; held {bench.engine.held_bytes()}", flush=True)
    print(
        f"forward and backward {profile.compute_s:.3f} s, {format_bytes(profile.peak_non_model_bytes)} beside",
        flush=True,
    )
    results: list[dict[str, Any]] = []
    limits = [int(g * 2**30) for g in arguments.limits_gib] + [int(m * 2**20) for m in arguments.limits_mib]
    for limit_bytes in limits:
        entry: dict[str, Any] = {"limit": format_bytes(limit_bytes), "limit_bytes": limit_bytes, "runs": []}
        results.append(entry)
        bench.limit(limit_bytes)
        auto = make_plan(
            bench.skeleton,
            compute_dtype=torch.bfloat16,
            layout=bench.engine.plan,
            budget=Budget(limit_bytes),
            regime=TrainingRegime(can_stream=True),
            profile=profile,
            hardware=bench.hardware,
        )
        print(f"\n{entry['limit']}\n{auto.explain()}", flush=True)
        plans = [("auto", auto), *by_hand(bench, profile, limit_bytes)]
        for name, plan in plans:
            if time.perf_counter() - begin_s > arguments.budget_s:
                entry["is_cut_short"] = True
                break
            entry["runs"].append(bench.run(name, plan, profile))
            arguments.out.write_text(
                json.dumps(
                    {
                        "command": sys.argv,
                        "versions": {"lightning_elixir": __version__, "torch": torch.__version__},
                        "machine": platform.platform(),
                        "hardware": bench.hardware.to_dict(),
                        "parameters": bench.num_parameters,
                        "compute_s": profile.compute_s,
                        "limits": results,
                    },
                    indent=1,
                )
            )
    print("\n" + "\n".join(table(results)), flush=True)


if __name__ == "__main__":
    main()

"""Predicted against measured: one GPT under hand-made placements and under the search's own, at several memory limits.

    python examples/benchmarks/placements.py --size 2.7b --limits-gib 16 --budget-s 150 --out placements.json
    python examples/benchmarks/placements.py --size tiny --batch-size 2 --seq-len 64 --device cpu --limits-mib 2 4
    python examples/benchmarks/placements.py --simulate placements.json

One model is built, once: a warm-up step with the smallest rCache samples memory, a later one is timed. For each limit
the search then makes its plan and twelve different ones are made by hand; the engine moves from one to the next, every
one is predicted before it runs, and each runs a few steps, none of which waits for the one before. Further rounds,
every other one of them the other way round, take the search's own and those within a tenth of the fastest: steps of one
placement differ by as much as placements do. The median of all steps counts. Which is the best by hand is chosen by
every other round, and how far it is from the search's own is seen in the rounds between: the fastest of several that
were measured once is faster by chance than it is. bf16 with an fp32 master, `HybridAdam`, per-layer activation
checkpointing; updates begin when they do in a fit where nothing is set (`--update-timing`). The file has what it takes
to simulate each placement again, as `--simulate` does without a GPU: the machine's figures, the profile of the step,
the chunks and where each of them was.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from disturbance import HostUse, Pauses
from torch import nn

from lightning_elixir import ElixirModule, ElixirOptimizer, HybridAdam, __version__, profile_hardware
from lightning_elixir.core.threads import frequent_switches
from lightning_elixir.errors import CapacityError
from lightning_elixir.plan.describe import describe_placement
from lightning_elixir.plan.hardware import HardwareSpec
from lightning_elixir.plan.memory import Budget
from lightning_elixir.plan.packing import PackedChunk
from lightning_elixir.plan.placing.placement import OFFLOADED, RESIDENT, Layout, Placer, Site, sites_of
from lightning_elixir.plan.problem import PlacementRequest, Problem
from lightning_elixir.plan.profile import StepInterval, StepProfile
from lightning_elixir.plan.simulator.timeline import Timeline
from lightning_elixir.plan.types import AccessTrace, Acquire, ChunkSpec, Drop, Member, Plan, Tier, UpdateTiming
from lightning_elixir.plan.units import format_bytes
from lightning_elixir.planning import ChunkSizes, TrainingRegime, make_plan, module_accesses, timeline_of
from lightning_elixir.strategy.regimes import fit_regime, with_optimizer

_spec = importlib.util.spec_from_file_location("train_gpt", Path(__file__).parents[1] / "train_gpt.py")
if _spec is None or _spec.loader is None:
    raise SystemExit("examples/train_gpt.py is missing")
train_gpt: Any = importlib.util.module_from_spec(_spec)
sys.modules["train_gpt"] = train_gpt
_spec.loader.exec_module(train_gpt)

CLOSE = 0.05  # placements that measure closer than this have no order
CONTENDERS = 0.1  # those that measure within this of the fastest run in further rounds
KEPT = Site(Tier.GPU, Tier.CPU, True)
BY_HAND = 12
TIMED = 3  # steps, for what computing takes
SETTLING = 2  # steps until updates overlap with the next forward as they go on doing
SHARES = (1.0, 0.5, 0.0)  # of the chunks that fit with their states on the GPU
STREAMED = (0.0, 0.25, 1.0)  # of the updates beside the GPU, in the order in which they are tried
DEPTHS = (4, 2, 8)  # chunks fetched ahead; the first, and what comes where placements are the same otherwise


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


def regime_of(update_timing: str) -> TrainingRegime:
    """As in a fit with `HybridAdam` that neither clips nor accumulates."""
    regime = fit_regime(
        is_mixed=True,
        wanted=update_timing,
        can_begin_early=True,
        needs_global_norm=False,
        accumulates=False,
        num_backwards=1,
    )
    return with_optimizer(regime, can_stream=True, num_states=2)


@dataclass(frozen=True)
class StepSeen:
    """One step that ran."""

    loss: float
    step_s: float
    """From the end of the one before, on the device."""
    issued_s: float
    """Until the host had issued forward and backward, from when it had issued the one before."""
    backward_s: float
    """Of the step's time, until the device had carried them out."""
    update: dict[str, Any] | None
    """See `UpdateTimes`."""
    gc_s: float
    """The garbage collector's part."""


class Bench:
    """One engine, and what its steps take."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.device = torch.device(arguments.device)
        self.is_cuda = self.device.type == "cuda"
        self.seconds = {"machine": -time.perf_counter()}
        self.hardware = profile_hardware(device=self.device) if self.is_cuda else HardwareSpec.nominal()
        self.seconds["machine"] += time.perf_counter()
        self.seconds["build"] = -time.perf_counter()
        self.regime = regime_of(arguments.update_timing)
        self.pauses = Pauses()
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
        self.seconds["build"] += time.perf_counter()

    def steps(self, count: int) -> list[StepSeen]:
        """So many steps in a row, as in a training: the host waits for the device after the last one alone."""
        ends, backwards = [self.engine.device.mark()], []
        beside: list[tuple[torch.Tensor, float, dict[str, Any] | None, float]] = []
        for _ in range(count):
            start_s, paused_s = time.perf_counter(), self.pauses.total_s
            logits = self.module(self.tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), self.tokens[:, 1:].flatten())
            with self.optimizer.unobserved():
                self.optimizer.backward(loss)
                backwards.append(self.engine.device.mark())
                issued_s = time.perf_counter() - start_s
                self.optimizer.step()
            ends.append(self.engine.device.mark())
            times = self.optimizer.last_step_times  # of the last step whose updates are all over
            update = None if times is None else asdict(times)
            beside.append((loss.detach(), issued_s, update, self.pauses.total_s - paused_s))
        self.synchronize()
        return [
            StepSeen(float(loss), end.seconds_since(start), issued_s, done.seconds_since(start), update, gc_s)
            for (start, end), done, (loss, issued_s, update, gc_s) in zip(
                pairwise(ends), backwards, beside, strict=True
            )
        ]

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def limit(self, nbytes: int) -> None:
        if self.is_cuda:
            torch.cuda.empty_cache()
            nbytes += int(self.arguments.room_gib * 2**30)
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total))

    def sample(self) -> StepProfile:
        """A step for the memory, one to settle, and some for the times, of which the fastest counts: what slows a step
        down that is looked at is no part of those that are not."""
        self.engine.sample_activations(True)
        self.steps(1)
        self.engine.sample_activations(False)
        self.steps(1)
        self.engine.sample_times(True)
        found = []
        for _ in range(TIMED):
            self.steps(1)
            found.append(self.engine.step_profile())
        self.engine.sample_times(False)
        seen = [profile for profile in found if profile is not None]
        if not seen:
            raise SystemExit("no step was sampled")
        fastest = min(seen, key=lambda profile: profile.compute_s)
        return fastest.with_margin(self.engine.plan.block_bytes)

    def run(self, name: str, plan: Plan, profile: StepProfile) -> dict[str, Any]:
        """Predict, move to the plan, and measure."""
        start_s = time.perf_counter()
        predicted = timeline_of(plan, profile, self.hardware, self.regime, is_detailed=False)
        result: dict[str, Any] = {
            "name": name,
            "placement": describe_placement(plan.chunks, plan.rcache_blocks, plan.prefetch_depth),
            "sites": short_sites(plan),
            "rcache_blocks": plan.rcache_blocks,
            "prefetch_depth": plan.prefetch_depth,
            "update_timing": plan.update_timing.value,
            "predicted": asdict(predicted.times),
            "predicted_host_update_s": predicted.host_update_s,
            "predicted_peak_bytes": predicted.peak_gpu_bytes,
        }
        try:
            self.engine.replan(plan)
            result["move_s"] = time.perf_counter() - start_s
            gc.collect()  # not in one of the steps
            if self.is_cuda:
                torch.cuda.empty_cache()
            result["first_steps_s"] = [step.step_s for step in self.steps(SETTLING)]
            self.engine.reset_stats()
            if self.is_cuda:
                torch.cuda.reset_peak_memory_stats()
            retries = torch.cuda.memory_stats()["num_alloc_retries"] if self.is_cuda else 0
            use = HostUse()
            steps = self.steps(self.arguments.steps)
            result["host_use"] = use.so_far()
        except (torch.OutOfMemoryError, CapacityError) as error:
            result["error"] = "".join(traceback.format_exception(error))[-3000:]
            print(f"{name}: failed\n{result['error']}", flush=True)
            return result
        result["steps"] = [asdict(step) for step in steps]
        result["measured_s"] = statistics.median(step.step_s for step in steps)
        result["counters"] = asdict(self.engine.stats())
        if self.is_cuda:
            result["measured_peak_bytes"] = torch.cuda.max_memory_allocated()
            result["reserved_bytes"] = torch.cuda.max_memory_reserved()
            # How often the allocator gave back what it keeps, and waited for the GPU, for want of memory
            result["gpu_retries"] = torch.cuda.memory_stats()["num_alloc_retries"] - retries
        result["seconds"] = time.perf_counter() - start_s
        times_s = f"predicted {predicted.times.total_s:.3f} s, measured {result['measured_s']:.3f} s"
        print(f"{name:34s} {times_s} ({error_of(result):+.0%}); {result['placement']}", flush=True)
        return result


def error_of(run: Mapping[str, Any]) -> float:
    """Of the prediction, as a part of what was measured."""
    return float(run["predicted"]["total_s"] / run["measured_s"] - 1)


def short_sites(plan: Plan) -> list[tuple[int, str]]:
    """Where the chunks are, in the order of their numbers: (how many in a row, tier of parameters and of states)."""
    short: list[tuple[int, str]] = []
    for site in sites_of(plan.chunks):
        words = [site.param_tier.value, site.optim_tier.value]
        words += ["kept"] if site.is_persistent else []
        words += ["streamed"] if site.is_update_streamed else []
        text = " ".join(words)
        short = [*short[:-1], (short[-1][0] + 1, text)] if short and short[-1][1] == text else [*short, (1, text)]
    return short


def short_profile(profile: StepProfile) -> dict[str, Any]:
    """What a step was seen to do, for the file."""
    events = [
        {"needs": e.ids, "is_pinned": e.is_pinned, "held": e.held} if isinstance(e, Acquire) else {"drops": e.ids}
        for e in profile.trace.events
    ]
    intervals = [(i.compute_s, i.non_model_bytes, i.grads, i.grad_s) for i in profile.intervals]
    return {"events": events, "intervals": intervals}


def in_the_file(bench: Bench, profile: StepProfile) -> dict[str, Any]:
    """What simulating a placement again takes, beside the placement."""
    plan = bench.engine.plan
    return {
        "hardware": bench.hardware.to_dict(),
        "regime": asdict(bench.regime) | {"update_timing": bench.regime.update_timing.value, "in_step": []},
        "compute_dtype": plan.compute_dtype,
        "block_bytes": plan.block_bytes,
        "chunks": [(c.dtype, c.requires_grad, c.numel) for c in plan.chunks],
        "profile": short_profile(profile),
    }


def simulated_again(found: Mapping[str, Any], run: Mapping[str, Any]) -> Timeline:
    """A placement of an earlier file as it is predicted now."""
    told = found["regime"]
    regime = TrainingRegime(**told | {"update_timing": UpdateTiming(told["update_timing"]), "in_step": frozenset()})
    sites = [site for count, text in run["sites"] for site in [text.split()] * count]
    chunks = tuple(
        ChunkSpec(
            i,
            dtype,
            requires_grad,
            numel,
            (Member(f"p{i}", (numel,), 0),),
            Tier(site[0]),
            Tier(site[1]),
            "kept" in site,
            "streamed" in site,
        )
        for i, ((dtype, requires_grad, numel), site) in enumerate(zip(found["chunks"], sites, strict=True))
    )
    depth, timing = run["prefetch_depth"], UpdateTiming(run["update_timing"])
    plan = Plan(1, found["compute_dtype"], found["block_bytes"], run["rcache_blocks"], depth, chunks)
    events = [
        Acquire(tuple(e["needs"]), e["is_pinned"], tuple(e["held"])) if "needs" in e else Drop(tuple(e["drops"]))
        for e in found["profile"]["events"]
    ]
    intervals = [
        StepInterval(seconds, size, tuple(grads), grad_s=tuple(*grad_s))  # earlier files have no `grad_s`
        for seconds, size, grads, *grad_s in found["profile"]["intervals"]
    ]
    profile = StepProfile(AccessTrace(tuple(events)), tuple(intervals))
    hardware = HardwareSpec.from_dict(found["hardware"])
    return timeline_of(replace(plan, update_timing=timing), profile, hardware, regime, is_detailed=False)


def print_simulated(path: Path) -> None:
    """The placements of a file as they are predicted now, beside what was predicted and measured."""
    found = json.loads(path.read_text())
    for limit in found["limits"]:
        print(limit["limit"])
        for run in limit["runs"]:
            now_s, then_s = simulated_again(found, run).times.total_s, run["predicted"]["total_s"]
            measured = f"measured {run['measured_s']:.3f}" if "measured_s" in run else "failed"
            print(f"  {run['name']:54s} now {now_s:.3f}, then {then_s:.3f}, {measured}")


def by_hand(bench: Bench, profile: StepProfile, limit_bytes: int) -> list[tuple[str, Plan]]:
    """Twelve different placements: states of as many chunks as fit, half of them, none; the other parameters fetched,
    or kept as far as they fit; the other updates on the host, a part of them streamed, or all. Where two come to the
    same, chunks are fetched less far ahead, or further."""
    plan = bench.engine.plan
    layout = Layout(
        tuple(PackedChunk(c.dtype, c.requires_grad, c.numel, c.members) for c in plan.chunks),
        plan.block_bytes,
        plan.compute_dtype,
    )
    request = PlacementRequest(policy="const", accesses=bench.accesses)
    problem = Problem(request, Budget(limit_bytes), regime=bench.regime, hardware=bench.hardware)
    placer = Placer(layout, problem.with_updates(bench.regime.waiting()), profile)
    n = len(layout.packed)

    def sites_with(count: int, kept: int, streamed: float) -> list[Site]:
        sites = [RESIDENT] * count + [KEPT] * kept + [OFFLOADED] * (n - count - kept)
        beside = n - count
        chosen = {count + k * beside // round(beside * streamed) for k in range(round(beside * streamed))}
        return [s._replace(is_update_streamed=True) if i in chosen else s for i, s in enumerate(sites)]

    def fits(sites: list[Site]) -> bool:
        placement = placer.at(sites)
        return placement.gpu_bytes(placement.smallest) <= limit_bytes

    def sites_of_kind(share: float, others: str, streamed: float) -> tuple[int, list[Site]]:
        """How many chunks have their states on the GPU, and where all are."""
        resident = max((k for k in range(n + 1) if fits(sites_with(k, 0, streamed))), default=0)
        count, kept = round(resident * share), 0
        if others == "kept":
            kept = max((k for k in range(n - count + 1) if fits(sites_with(count, k, streamed))), default=0)
        return count, sites_with(count, kept, streamed)

    found: dict[str, tuple[str, Plan]] = {}
    for depth, streamed, share, others in product(DEPTHS, STREAMED, SHARES, ("fetched", "kept")):
        count, sites = sites_of_kind(share, others, streamed)
        where = f"{streamed:.0%} streamed" if streamed else "host"
        name = f"states of {count}, others {others}, {where}, {depth} ahead"
        try:
            made = placer.plan(sites, "const", prefetch_depth=depth)
        except CapacityError as error:
            print(f"{name}: {str(error).partition(' (')[0]}", flush=True)
            continue
        if len(found) < BY_HAND:
            has_rcache = any(not c.is_persistent for c in made.chunks)
            found.setdefault(f"{short_sites(made)} {depth * has_rcache}", (name, made))
    # Those with states in the same places after each other: less is moved.
    return sorted(found.values(), key=lambda pair: [c.optim_tier is Tier.CPU for c in pair[1].chunks])


def compared(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How good predictions are, and the search's own plan, which is the first."""
    done = [run for run in runs if "measured_s" in run]
    if len(done) < 2 or done[0]["name"] != "auto":
        return {}
    errors = [error_of(run) for run in done]
    pairs = list(combinations(done, 2))
    told = [(a, b) for a, b in pairs if abs(a["measured_s"] / b["measured_s"] - 1) > CLOSE]
    wrong = [
        (a["name"], b["name"])
        for a, b in told
        if (a["measured_s"] < b["measured_s"]) is not (a["predicted"]["total_s"] < b["predicted"]["total_s"])
    ]
    contending = [run for run in done[1:] if "again" in run] or done[1:]
    best = min(contending, key=partial(seconds_of, first=0))
    return {
        "by_hand": len(done) - 1,
        "lowest_error": min(errors),
        "highest_error": max(errors),
        "mean_error": statistics.mean(map(abs, errors)),
        "pairs": len(told),
        "pairs_in_wrong_order": wrong,
        "best_by_hand": best["name"],
        "auto_over_best": seconds_of(done[0], first=1) / seconds_of(best, first=1),
    }


def seconds_of(run: Mapping[str, Any], first: int | None = None) -> float:
    """The median step of a placement.

    Args:
        first: Of every other round from this one on, where there is one; None: of all.
    """
    rounds = [one for one in (run, *run.get("again", ())) if "steps" in one]
    chosen = rounds if first is None else rounds[first::2] or rounds
    return statistics.median(float(step["step_s"]) for one in chosen for step in one["steps"])


def contenders(runs: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Which placements run once more."""
    done = {name: run["measured_s"] for name, run in runs.items() if "measured_s" in run}
    fastest_s = min(done.values(), default=0.0)
    return [name for name, seconds in done.items() if name == "auto" or seconds <= fastest_s * (1 + CONTENDERS)]


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


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="2.7b", choices=list(train_gpt.SIZES))
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=5, help="timed ones of each placement, in each round")
    parser.add_argument("--rounds", type=int, default=4, help="the first with all placements, others with the fastest")
    parser.add_argument("--update-timing", default="auto", choices=["auto", "behind_forward", "after_backward"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limits-gib", type=float, nargs="*", default=[])
    parser.add_argument("--limits-mib", type=float, nargs="*", default=[])
    parser.add_argument("--chunk-mib", type=int, default=0, help="0: the size with the least waste")
    parser.add_argument("--room-gib", type=float, default=0.0, help="that the allocator may take above the limits")
    parser.add_argument("--budget-s", type=float, default=1e9, help="begin no placement after this long")
    parser.add_argument("--out", type=Path, default=Path("placements.json"))
    parser.add_argument(
        "--simulate", type=Path, metavar="FILE", help="run nothing: predict the placements of a file anew"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.simulate is not None:
        print_simulated(arguments.simulate)
        return
    with frequent_switches():  # as fits have
        run_all(arguments)


def run_all(arguments: argparse.Namespace) -> None:
    begin_s = time.perf_counter()
    bench = Bench(arguments)
    print(f"{bench.num_parameters / 1e9:.3f}e9 parameters, built in {bench.seconds['build']:.0f} s", flush=True)
    start_s = time.perf_counter()
    profile = bench.sample()
    bench.seconds["sample"] = time.perf_counter() - start_s
    beside = format_bytes(profile.peak_non_model_bytes)
    print(f"forward and backward {profile.compute_s:.3f} s, {beside} beside", flush=True)
    found: dict[str, Any] = {
        "command": sys.argv,
        "versions": {"lightning_elixir": __version__, "torch": torch.__version__},
        "machine": platform.platform(),
        **in_the_file(bench, profile),
        "parameters": bench.num_parameters,
        "compute_s": profile.compute_s,
        "seconds": bench.seconds,
        "limits": [],
    }

    def keep(entry: dict[str, Any]) -> None:
        entry["compared"] = compared(entry["runs"])
        bench.seconds["all"] = time.perf_counter() - begin_s
        arguments.out.write_text(json.dumps(found, indent=1))

    limits = [int(g * 2**30) for g in arguments.limits_gib] + [int(m * 2**20) for m in arguments.limits_mib]
    for limit_bytes in sorted(limits):  # a move holds what the larger of two placements does
        entry: dict[str, Any] = {"limit": format_bytes(limit_bytes), "limit_bytes": limit_bytes, "runs": []}
        found["limits"].append(entry)
        bench.limit(limit_bytes)
        auto = make_plan(
            bench.skeleton,
            compute_dtype=torch.bfloat16,
            layout=bench.engine.plan,
            budget=Budget(limit_bytes),
            regime=bench.regime,
            profile=profile,
            hardware=bench.hardware,
        )
        print(f"\n{entry['limit']}\n{auto.explain()}", flush=True)
        plans = dict([("auto", auto), *by_hand(bench, profile, limit_bytes)])
        runs: dict[str, dict[str, Any]] = {}
        for number in range(arguments.rounds):
            names = contenders(runs) if number else list(plans)
            for name in names[:: -1 if number % 2 else 1]:
                if time.perf_counter() - begin_s > arguments.budget_s:
                    entry["is_cut_short"] = True
                    break
                result = bench.run(name, plans[name], profile)
                run = runs.setdefault(name, result)
                if run is not result:
                    run.setdefault("again", []).append(result)
                    run["measured_s"] = seconds_of(run)
                entry["runs"] = list(runs.values())
                keep(entry)
        print(json.dumps(entry.get("compared", {}), indent=1), flush=True)
    print("\n" + "\n".join(table(found["limits"])), flush=True)
    print("seconds: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in bench.seconds.items()), flush=True)


if __name__ == "__main__":
    main()

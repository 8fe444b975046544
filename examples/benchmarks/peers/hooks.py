"""What the engine's hooks cost the host: the same model with everything resident, without and with hooks."""

from __future__ import annotations

import cProfile
import pstats
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lightning_elixir.plan.types import Plan
from lightning_elixir.planning import PlacementRequest, make_plan
from peers.elixir_systems import ManualStep
from peers.jobs import Job
from peers.model import GPT, batches
from peers.torch_systems import device_of, one_process

FEW_TOKENS = 16
"""So few that the device never keeps the host waiting."""

_NUM_FUNCTIONS = 60  # of the profile

_FEW_STEPS_EACH = 5  # steps of few tokens for each step of the job's


def resident_plan(model: GPT, dtype: torch.dtype) -> Plan:
    """Everything stays on the device: no hook runs."""
    return make_plan(model, PlacementRequest(policy="cuda"), compute_dtype=dtype)


def hooked_plan(model: GPT, dtype: torch.dtype) -> Plan:
    """Everything is on the device and may be evicted, and nothing ever is: every hook runs."""
    plan = resident_plan(model, dtype)
    chunks = tuple(replace(chunk, is_persistent=False) for chunk in plan.chunks)
    blocks = sum(plan.blocks_of(chunk.id) for chunk in chunks)
    return replace(plan, chunks=chunks, rcache_blocks=blocks, prefetch_depth=4, policy="const")


def _measure(steps: Mapping[str, ManualStep], data: Sequence[torch.Tensor], warmup: int) -> dict[str, dict[str, Any]]:
    """Seconds of a step that ends with an idle device, and processor seconds of the thread that launches, by name: the
    median, and of processor seconds the smallest tenth, which other programs on the machine disturb least. Steps are
    taken in turns, so that what disturbs one disturbs the others."""
    is_cuda = data[0].is_cuda

    def synchronize() -> None:
        if is_cuda:
            torch.cuda.synchronize()

    for step in steps.values():
        for tokens in data[:warmup]:
            step(tokens)
        step.module.reset_stats()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    main_s: dict[str, list[float]] = {name: [] for name in steps}
    for tokens in data[warmup:]:
        for name, step in steps.items():
            synchronize()
            begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
            step(tokens)
            main_s[name].append(time.thread_time() - begin_cpu_s)  # before waiting, which spins
            synchronize()
            seconds[name].append(time.perf_counter() - begin_s)
    return {
        name: {
            "step_s": seconds[name],
            "median_step_s": statistics.median(seconds[name]),
            "main_thread_s": statistics.median(main_s[name]),
            "main_thread_low_s": sorted(main_s[name])[len(main_s[name]) // 10],
            "counters": step.module.stats().as_dict(),
        }
        for name, step in steps.items()
    }


def _calls(step: ManualStep, data: Sequence[torch.Tensor]) -> dict[str, tuple[float, float]]:
    """Calls and processor seconds of each function (without what it calls) in a step, by file, line and name."""
    profile = cProfile.Profile(time.thread_time)
    profile.enable()
    for tokens in data:
        step(tokens)
    profile.disable()
    found = pstats.Stats(profile).strip_dirs().stats  # type: ignore[attr-defined]
    return {
        f"{file}:{line} {name}": (calls / len(data), seconds / len(data))
        for (file, line, name), (_, calls, seconds, *_) in found.items()
    }


def _more_calls(steps: Mapping[str, ManualStep], data: Sequence[torch.Tensor]) -> list[tuple[str, float, float]]:
    """What functions are called more often in a step with hooks than without, or less, and what they take: those with
    the largest difference of seconds, of which a profile makes more than there is."""
    calls = {name: _calls(step, data) for name, step in steps.items()}
    none = (0.0, 0.0)
    more = [
        (function, *(b - a for a, b in zip(*(calls[name].get(function, none) for name in steps), strict=True)))
        for function in {*calls["resident"], *calls["hooked"]}
    ]
    return sorted(more, key=lambda row: -abs(row[2]))[:_NUM_FUNCTIONS]


def run_hooks(job: Job) -> dict[str, Any]:
    """Both plans, with the job's tokens and with few.

    `hook_s` is how much more processor time the host takes for a step of few tokens with hooks (of the smallest tenth
    each), and `share` what that is of a whole step. That step's backward runs on the same thread as its forward: with a
    thread of autograd's own, the clocks of threads have steps of 10 ms, and the two wait for the interpreter by turns.
    `functions`, of the same steps under a profile: name, calls and seconds more with hooks than without.
    """
    one_process(job)
    device, dtype = device_of(job), getattr(torch, job.dtype)
    few = replace(job, batch=1, shape=replace(job.shape, seq=min(FEW_TOKENS, job.shape.seq)))
    plans = {"resident": resident_plan, "hooked": hooked_plan}
    steps = {
        name: ManualStep(job, device, 0, lambda model, make=make: make(model, dtype))  # type: ignore[misc]
        for name, make in plans.items()
    }
    result: dict[str, Any] = _measure(steps, batches(job, job.warmup + job.steps, 0, device), job.warmup)
    with torch.autograd.set_multithreading_enabled(False):
        num_few = job.warmup + _FEW_STEPS_EACH * job.steps
        for name, found in _measure(steps, batches(few, num_few, 0, device), job.warmup).items():
            result[name]["few_tokens"] = found
        functions = _more_calls(steps, batches(few, 5, 0, device))
    for step in steps.values():
        step.close()
    resident, hooked = result["resident"], result["hooked"]
    hook_s = hooked["few_tokens"]["main_thread_low_s"] - resident["few_tokens"]["main_thread_low_s"]
    return {
        **result,
        "functions": functions,
        "hook_s": hook_s,
        "share": hook_s / resident["median_step_s"],
        "step_ratio": hooked["median_step_s"] / resident["median_step_s"],
    }

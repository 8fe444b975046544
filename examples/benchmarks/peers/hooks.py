"""What the engine's hooks cost the host: the same model with everything resident, without and with hooks."""

from __future__ import annotations

import os
import statistics
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
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


def resident_plan(model: GPT, dtype: torch.dtype) -> Plan:
    """Everything stays on the device: no hook runs."""
    return make_plan(model, PlacementRequest(policy="cuda"), compute_dtype=dtype)


def hooked_plan(model: GPT, dtype: torch.dtype) -> Plan:
    """Everything is on the device and may be evicted, and nothing ever is: every hook runs."""
    plan = resident_plan(model, dtype)
    chunks = tuple(replace(chunk, is_persistent=False) for chunk in plan.chunks)
    blocks = sum(plan.blocks_of(chunk.id) for chunk in chunks)
    return replace(plan, chunks=chunks, rcache_blocks=blocks, prefetch_depth=4, policy="const")


def _thread_seconds(prefix: str) -> float:
    """Processor time of this process's threads whose name begins so; 0 where the system does not tell."""
    total = 0.0
    with suppress(OSError):
        tick = os.sysconf("SC_CLK_TCK")
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):
                name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
                if name.startswith(prefix):
                    fields = rest.split()
                    total += (int(fields[11]) + int(fields[12])) / tick
    return total


def _measure(step: ManualStep, data: list[torch.Tensor], warmup: int) -> dict[str, Any]:
    """Median seconds of a step that ends with an idle device, and processor seconds of the two threads that launch."""
    is_cuda = data[0].is_cuda

    def synchronize() -> None:
        if is_cuda:
            torch.cuda.synchronize()

    for tokens in data[:warmup]:
        step(tokens)
    step.module.reset_stats()
    seconds, main_s, autograd_before = [], [], _thread_seconds("pt_autograd")
    for tokens in data[warmup:]:
        synchronize()
        begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
        step(tokens)
        main_s.append(time.thread_time() - begin_cpu_s)  # before waiting, which spins
        synchronize()
        seconds.append(time.perf_counter() - begin_s)
    count = len(seconds)
    return {
        "step_s": seconds,
        "median_step_s": statistics.median(seconds),
        "main_thread_s": statistics.median(main_s),
        "autograd_thread_s": (_thread_seconds("pt_autograd") - autograd_before) / count,
        "counters": step.module.stats().as_dict(),
    }


def run_hooks(job: Job) -> dict[str, Any]:
    """Both plans, with the job's tokens and with few.

    `hook_s` is how much more processor time the host takes for a step of few tokens with hooks, and `share` what that
    is of a whole step. That step's backward runs on the same thread as its forward: with a thread of autograd's own,
    the clocks of threads have steps of 10 ms, and the two wait for the interpreter by turns.
    """
    one_process(job)
    device, dtype = device_of(job), getattr(torch, job.dtype)
    count = job.warmup + job.steps
    few = replace(job, batch=1, shape=replace(job.shape, seq=min(FEW_TOKENS, job.shape.seq)))
    result: dict[str, Any] = {}
    for name, make in (("resident", resident_plan), ("hooked", hooked_plan)):
        step = ManualStep(job, device, 0, lambda model, make=make: make(model, dtype))  # type: ignore[misc]
        full = _measure(step, batches(job, count, 0, device), job.warmup)
        with torch.autograd.set_multithreading_enabled(False):
            result[name] = {**full, "few_tokens": _measure(step, batches(few, 2 * count, 0, device), job.warmup)}
        step.close()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    resident, hooked = result["resident"], result["hooked"]
    hook_s = hooked["few_tokens"]["main_thread_s"] - resident["few_tokens"]["main_thread_s"]
    return {
        **result,
        "hook_s": hook_s,
        "share": hook_s / resident["median_step_s"],
        "step_ratio": hooked["median_step_s"] / resident["median_step_s"],
    }

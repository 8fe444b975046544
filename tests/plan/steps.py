"""Small steps for the simulator, and what they take."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from lightning_elixir.plan.hardware import HardwareSpec
from lightning_elixir.plan.profile import StepInterval, StepProfile
from lightning_elixir.plan.types import ChunkSpec, Plan, Tier
from tests.plan.problems import KEPT, OFFLOADED, RESIDENT, SHARDED, constant_hardware
from tests.plan.traces import BLOCK_BYTES, make_chunk, make_plan_of, random_trace, unpinned

NUMEL = 512
TRANSFER_S = 1e-3
RATE = BLOCK_BYTES / TRANSFER_S
"""Of a bus that needs a millisecond for a chunk of one block."""


def machine(**figures: Any) -> HardwareSpec:
    """Transfers take a millisecond a block, updates on the host four, streamed two, on the GPU a tenth."""
    rates: dict[str, Any] = {
        "h2d": RATE,
        "d2h": RATE,
        "cpu_adam_numel_per_s": NUMEL / 4e-3,
        "streamed_adam_numel_per_s": NUMEL / 2e-3,
        "gpu_adam_numel_per_s": NUMEL / 1e-4,
        "joint_adam_numel_per_s": 1e18,
    }
    return constant_hardware(**{**rates, **figures})


def chunks_at(site: Any, count: int, *, requires_grad: bool = True, world_size: int = 1) -> list[ChunkSpec]:
    return [
        replace(
            make_chunk(i, world_size=world_size, requires_grad=requires_grad),
            param_tier=site.param_tier,
            optim_tier=site.optim_tier,
            is_persistent=site.is_persistent,
            is_update_streamed=site.is_update_streamed,
        )
        for i in range(count)
    ]


def there(num_chunks: int, compute_s: float = 0.0) -> StepProfile:
    """Forward alone."""
    intervals = [StepInterval(0.0, 0)] + [StepInterval(compute_s, 0)] * num_chunks
    return StepProfile(unpinned(*range(num_chunks)), tuple(intervals))


def there_and_back(num_chunks: int, compute_s: float = 0.0) -> StepProfile:
    forward = there(num_chunks, compute_s)
    back = list(reversed(range(num_chunks)))
    intervals = forward.intervals + tuple(StepInterval(compute_s, 0, (i,)) for i in back)
    return StepProfile(unpinned(*range(num_chunks), *back), intervals)


def random_problem(random: Random) -> tuple[Plan, StepProfile, HardwareSpec]:
    world_size = random.choice((1, 1, 2, 3))
    num_chunks = random.randint(2, 7)
    is_distributed = world_size == 1 or random.random() < 0.7
    chunks = []
    for i in range(num_chunks):
        sites = [RESIDENT, KEPT, OFFLOADED, OFFLOADED]
        if is_distributed:
            sites.append(SHARDED)
        site = random.choice(sites)
        if site.optim_tier is Tier.CPU and random.random() < 0.3:
            site = site._replace(is_update_streamed=True)
        chunk = make_chunk(i, random.choice((1, 1, 2)), world_size=world_size, requires_grad=random.random() < 0.8)
        chunks.append(
            replace(
                chunk,
                param_tier=site.param_tier,
                optim_tier=site.optim_tier,
                is_persistent=site.is_persistent,
                is_update_streamed=site.is_update_streamed and chunk.requires_grad,
            )
        )
    plan = make_plan_of(chunks, random.randint(2, 6), random.randint(0, 3), world_size)
    plan = replace(plan, is_storage_distributed=is_distributed)
    trace = random_trace(random, num_chunks, 30)
    num_accesses = sum(1 for _ in trace.acquires())
    left = [c.id for c in chunks if c.requires_grad]
    random.shuffle(left)
    intervals = [StepInterval(random.random() * 1e-3, random.randint(0, 9000)) for _ in range(num_accesses + 1)]
    for at in range(len(intervals) // 2, len(intervals)):
        if left and random.random() < 0.5:
            intervals[at] = replace(intervals[at], grads=(left.pop(),))
    intervals[-1] = replace(intervals[-1], grads=(*intervals[-1].grads, *left))
    hardware = machine(
        h2d=random.uniform(0.3, 3) * RATE,
        d2h=random.uniform(0.3, 3) * RATE,
        all_gather=random.choice((None, 5 * RATE)),
        reduce_scatter=random.choice((None, 2 * RATE)),
    )
    return plan, StepProfile(trace, tuple(intervals)), hardware

"""Training whose updates run at different times, take long, or are held up."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_elixir.optim.updates import FlatUpdate
from lightning_elixir.plan.types import UpdateTiming
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers import streamed_updates as bodies
from tests.helpers.plans import with_spares
from tests.helpers.streamed_updates import CPU, How, Result
from tests.helpers.zoo import make

TIMINGS = [UpdateTiming.BEHIND_FORWARD, UpdateTiming.INSIDE_BACKWARD]
SITES = ["host", "streamed", "every_site", "streamed_param_on_gpu", "mixed_persistent"]


def new_training(
    how: How,
    site: str,
    device: torch.device,
    timing: UpdateTiming,
    *,
    is_reusing: bool = False,
    spared: str = "none",
    **options: Any,
) -> tuple[ElixirModule, ElixirOptimizer]:
    """`spared`: which chunks have spare states, a key of `SPARED`."""
    model = make(how.name)
    inner = bodies.new_optimizer(model, how)
    plan = with_spares(bodies.plan_for(model, how, site, **options), spared)
    plan = replace(plan, update_timing=timing, grad_reuses_compute_shard=is_reusing)
    module = ElixirModule(model, plan, dtype=how.dtype, master_weights=how.master, device=device)
    if how.scale and device.type == "cpu":
        module.needs_loss_scale = True
    optimizer = ElixirOptimizer(
        module, inner, initial_scale=how.scale or 1.0, init_step=how.init_step, max_norm=how.max_norm
    )
    return module, optimizer


def step(module: ElixirModule, optimizer: ElixirOptimizer, how: How, number: int, rank: int = 0) -> float | None:
    is_clipped = bool(how.clip_norm or how.clip_value)
    for micro in range(how.micro_batches - 1):
        bodies.train_micro_batch(module, optimizer, how, number, micro, rank)
    with optimizer.unobserved(not is_clipped):
        bodies.train_micro_batch(module, optimizer, how, number, how.micro_batches - 1, rank)
        return bodies.end_step(optimizer, how)


def train(how: How, site: str, timing: UpdateTiming, device: torch.device = CPU, **options: Any) -> Result:
    module, optimizer = new_training(how, site, device, timing, **options)
    norms, skipped = [], []
    for number in range(how.steps):
        norms.append(step(module, optimizer, how, number))
        skipped.append(optimizer.is_step_skipped)
    result = bodies.result_of(module, optimizer)
    module.close()
    return replace(result, norms=[n for n in norms if n is not None], skipped=skipped)


@contextmanager
def slow_updates(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.003) -> Iterator[list[str]]:
    """Updates take long, and not all the same: whoever does not wait for them sees old values. Yields the names of the
    threads that ran them."""
    run, names, times = FlatUpdate.run, [], random.Random(0)

    def slow(self: FlatUpdate, **options: Any) -> None:
        names.append(threading.current_thread().name)
        time.sleep(times.random() * seconds)
        run(self, **options)
        time.sleep(times.random() * seconds)

    with monkeypatch.context() as patch:
        patch.setattr(FlatUpdate, "run", slow)
        yield names


@contextmanager
def held_updates(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No update runs until the event is set."""
    run, gate = FlatUpdate.run, threading.Event()

    def held_up(self: FlatUpdate, **options: Any) -> None:
        gate.wait()
        run(self, **options)

    with monkeypatch.context() as patch:
        patch.setattr(FlatUpdate, "run", held_up)
        try:
            yield gate
        finally:
            gate.set()  # a failing test leaves no thread behind


class Twice(nn.Module):
    """A layer inside and outside of reentrant checkpointing: its gradient hook fires twice in one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.shared = nn.Linear(64, 64)
        self.is_twice = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.is_twice:
            x = checkpoint(self.shared, x, use_reentrant=True)
        return self.shared(x).square().mean()

"""Training with states on NVMe, on disks that are slow or fail."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_elixir.plan import memory
from lightning_elixir.plan.types import UpdateTiming
from lightning_elixir.storage.nvme import direct
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers import streamed_updates as bodies
from tests.helpers import update_timing as timing_bodies
from tests.helpers.streamed_updates import CPU, HOWS, How, Result, assert_same, result_of, use_small_slots
from tests.helpers.update_timing import slow_updates
from tests.helpers.zoo import ZOO, make

NVME_SITES = ["nvme", "nvme_some", "nvme_param_on_gpu", "nvme_persistent", "nvme_param"]
BF16 = HOWS["bf16"]
SMALL_BUFFER_BYTES = 12 * 1024
Training = tuple[ElixirModule, ElixirOptimizer]


@contextmanager
def slow_disk(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.001) -> Iterator[None]:
    """Reads and writes take long, and not all the same: whoever does not wait for them finds other values."""
    times = random.Random(0)
    with monkeypatch.context() as patch:
        for name in ("preadv", "pwritev"):
            call = getattr(os, name)

            def slow(*args: Any, call: Callable[..., int] = call) -> int:
                time.sleep(times.random() * seconds)
                return call(*args)

            patch.setattr(direct.os, name, slow)
        yield


def use_small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a few thousand elements, so that these models' chunks take several pieces."""
    monkeypatch.setattr(memory, "NVME_BUFFER_BYTES", SMALL_BUFFER_BYTES)


def new_training(how: How = BF16, site: str = "nvme", timing: UpdateTiming = UpdateTiming.BEHIND_FORWARD) -> Training:
    return timing_bodies.new_training(how, site, CPU, timing)


def step(training: Training, how: How, number: int) -> None:
    timing_bodies.step(*training, how, number)


def check_every_way(
    how: How, site: str, timing: UpdateTiming, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = bodies.train_on_host(how, device)
    use_small_buffers(monkeypatch)
    with slow_disk(monkeypatch), slow_updates(monkeypatch, 0.001):
        actual = timing_bodies.train(how, site, timing, device)
    assert_same(actual, expected)
    assert str(actual.norms) == str(expected.norms)


def check_losses(site: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fetches (from the disk, where parameters are there, too) that wait for updates, which wait for the disk;
    every loss is the same."""
    losses: dict[str, list[float]] = {}
    for place in ("host", site):
        model = make("llama")
        inner = bodies.new_optimizer(model, BF16)
        plan = replace(bodies.plan_for(model, BF16, place), rcache_blocks=3, update_timing=UpdateTiming.BEHIND_FORWARD)
        module = ElixirModule(model, plan, dtype=torch.bfloat16, device=device)
        optimizer = ElixirOptimizer(module, inner, max_norm=0.1)
        losses[place] = []
        with slow_disk(monkeypatch):
            for number in range(5):
                loss = ZOO["llama"].loss(module, number)
                losses[place].append(loss.item())
                optimizer.backward(loss)
                optimizer.step()
        assert module.stats().evictions > 0
        module.close()
    assert losses[site] == losses["host"]
    assert len(set(losses["host"])) == 5


def train_rank(how: How, site: str, timing: UpdateTiming, options: dict[str, Any]) -> Result:
    with pytest.MonkeyPatch.context() as patch, slow_disk(patch):
        use_small_slots(patch)
        use_small_buffers(patch)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        module, optimizer = timing_bodies.new_training(how, site, CPU, timing, world_size=world_size, **options)
        for number in range(how.steps):
            timing_bodies.step(module, optimizer, how, number, rank)
        result = result_of(module, optimizer)
        module.close()
    return result


WRITES: dict[str, Callable[[ElixirModule], None]] = {
    "copy": lambda m: [p.copy_(torch.full(p.shape, 0.123456789)) for p in m.module.parameters()],  # type: ignore[dict-item]
    "clamp": lambda m: [p.clamp_(-0.01, 0.01) for p in m.module.parameters()],  # type: ignore[dict-item]
    "read": lambda m: [p.norm() for p in m.module.parameters()],  # type: ignore[dict-item]
    "load": lambda m: m.load_full_state_dict({k: v * 0.5 for k, v in m.full_state_dict().items()}),  # type: ignore[dict-item]
}


def whole_write(module: ElixirModule) -> None:
    with module.full_parameters(modify=True) as parameters:
        for parameter in parameters.values():
            parameter.mul_(1.25)


def check_writes(write: Callable[[ElixirModule], None], how: How, site: str) -> None:
    """What users write between steps is trained on as with states and parameters in host memory."""
    results = []
    for place in ("host", site):
        module, optimizer = training = new_training(how, place)
        for number in range(2):
            step(training, how, number)
        with torch.no_grad():
            write(module)
        for number in range(2, 4):
            step(training, how, number)
        results.append(result_of(module, optimizer))
        module.close()
    assert_same(results[1], results[0])


def failing(call: str, number: int, after: int = 0) -> Callable[..., int]:
    """As the system's call, which fails from some call on."""
    real, calls = getattr(os, call), []

    def fail(*args: Any) -> int:
        calls.append(1)
        if len(calls) > after:
            raise OSError(number, os.strerror(number))
        return real(*args)

    return fail

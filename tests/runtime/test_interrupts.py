"""Ctrl-C at any moment, with parameters and states on NVMe: training goes on, or says what to do; nothing hangs."""

from __future__ import annotations

import collections
import faulthandler
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lightning_elixir import ElixirModule, ElixirOptimizer, HybridAdam
from lightning_elixir.errors import ElixirError
from lightning_elixir.plan.types import UpdateTiming
from tests.helpers.plans import make_plan, with_spares
from tests.helpers.streamed_updates import SITES

WIDTH = 16
NUM_LAYERS = 8
LONGEST_S = 5.0
"""Of one step, or of closing: some milliseconds are usual."""
CURES = ("from a checkpoint", "zero_grad()")


class How(NamedTuple):
    site: str
    timing: UpdateTiming
    is_unobserved: bool = False
    has_spares: bool = False
    is_bare: bool = False
    """`loss.backward()`, of which nobody tells the engine."""


HOWS = {
    "params": How("nvme_param", UpdateTiming.BEHIND_FORWARD),
    "params_bare": How("nvme_param", UpdateTiming.BEHIND_FORWARD, is_bare=True),
    "states": How("nvme", UpdateTiming.BEHIND_FORWARD),
    "states_early": How("nvme", UpdateTiming.INSIDE_BACKWARD, is_unobserved=True),
    "every_site": How("every_site", UpdateTiming.BEHIND_FORWARD),
    "spares": How("host", UpdateTiming.INSIDE_BACKWARD, has_spares=True),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers: list[nn.Linear] = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))  # type: ignore

    def forward(self, x: Tensor, which: list[int]) -> Tensor:
        for index in which:
            x = x + torch.tanh(self.layers[index](x))
        return x


def build(how: How, folder: str) -> tuple[ElixirModule, ElixirOptimizer]:
    torch.manual_seed(0)
    net = Net()
    inner = HybridAdam(net.parameters(), lr=1e-2)
    plan = make_plan(net, placement_policy="cpu", compute_dtype=torch.bfloat16, chunk_size=2048)
    chunks = tuple(SITES[how.site](c) for c in plan.chunks)
    plan = replace(plan, chunks=chunks, rcache_blocks=3)
    plan = replace(with_spares(plan, "all" if how.has_spares else "none"), update_timing=how.timing)
    module = ElixirModule(net, plan, dtype=torch.bfloat16, nvme_offload_dir=folder)
    return module, ElixirOptimizer(module, inner, max_norm=0.5 if how.has_spares else 0.0)


def step(module: ElixirModule, optimizer: ElixirOptimizer, how: How, rng: random.Random) -> None:
    net: Net = module.module  # type: ignore[assignment]
    which = [rng.randrange(NUM_LAYERS) for _ in range(NUM_LAYERS)]
    with optimizer.unobserved(how.is_unobserved):
        loss = module(torch.randn(4, WIDTH), which).float().square().mean()
        if how.is_bare:
            loss.backward()
        else:
            optimizer.backward(loss)
        optimizer.step()
    look = rng.randrange(8)
    if look == 0:
        module.full_state_dict()
        optimizer.state_dict()
    elif look == 1:
        module.module.state_dict()
    elif look == 2:  # by itself, and not through the model
        net.layers[which[0]](torch.randn(4, WIDTH, dtype=torch.bfloat16))
    elif look == 3:
        with torch.no_grad():
            net.layers[which[0]].weight.mul_(0.9)


def check_whole(module: ElixirModule) -> None:
    """Parameters are their masters, cast."""
    module.engine.synchronize()
    for chunk in module.engine.chunks:
        shard = module.engine.store.settle(chunk.id)
        master, param = shard.read_master(), shard.read_param()
        assert master is not None
        assert param is not None
        for member in chunk.spec.members:
            span = slice(member.offset, member.offset + member.numel)
            assert torch.equal(master[span].to(param.dtype), param[span]), member.fqn


def bombard(how: How, folder: str, seed: int, seconds: float) -> dict[str, Any]:
    """Train, with Ctrl-C at a random moment of nearly every step. What hangs ends the process, with all stacks."""
    torch.set_num_threads(1)
    rng = random.Random(seed)
    counts: collections.Counter[str] = collections.Counter()
    messages: set[str] = set()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    end_s = time.monotonic() + seconds
    usual_s = 0.02
    while time.monotonic() < end_s:
        faulthandler.dump_traceback_later(LONGEST_S, exit=True)
        module, optimizer = build(how, folder)
        for number in range(60):
            faulthandler.dump_traceback_later(LONGEST_S, exit=True)
            start_s = time.monotonic()
            try:
                try:
                    if number > 2 and rng.random() < 0.9:
                        signal.setitimer(signal.ITIMER_REAL, max(1e-5, rng.random() * 1.2 * usual_s))
                    step(module, optimizer, how, rng)
                    usual_s = 0.9 * usual_s + 0.1 * (time.monotonic() - start_s)
                    counts["steps"] += 1
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                counts["interrupts"] += 1
                torch.set_grad_enabled(True)  # it may have come when `torch.no_grad` had begun, and its block had not
                try:
                    optimizer.zero_grad()
                    step(module, optimizer, how, rng)
                    counts["went_on"] += 1
                except ElixirError as error:
                    messages.add(f"{type(error).__name__}: {error}")
                    break
            except ElixirError as error:
                messages.add(f"{type(error).__name__}: {error}")
                break
        else:
            optimizer.zero_grad()
            check_whole(module)
            counts["whole"] += 1
        faulthandler.dump_traceback_later(LONGEST_S, exit=True)
        module.close()
        del module, optimizer
    faulthandler.cancel_dump_traceback_later()
    return {**counts, "messages": sorted(messages)}


@pytest.mark.full
def test_ctrl_c_at_any_moment(tmp_path: Path) -> None:
    code = f"""
import json
from tests.runtime.test_interrupts import HOWS, bombard
for name, how in HOWS.items():
    print(json.dumps({{"name": name}} | bombard(how, {str(tmp_path)!r}, seed=1, seconds=1.2)), flush=True)
"""
    command, root = [sys.executable, "-c", code], Path(__file__).parents[2]
    child = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60, check=False)
    assert child.returncode == 0, child.stdout + child.stderr[-6000:]
    found = [json.loads(line) for line in child.stdout.splitlines()]
    assert [each["name"] for each in found] == list(HOWS)
    for each in found:
        assert each["went_on"] > 2, each
        assert each["went_on"] >= 0.9 * each["interrupts"], each
        assert all(any(cure in message for cure in CURES) for message in each["messages"]), each

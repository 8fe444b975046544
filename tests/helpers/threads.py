"""Training beside a thread that looks at it."""

from __future__ import annotations

import copy
import dataclasses
import threading

import torch
from torch import nn

from lightning_elixir.errors import StateError
from lightning_elixir.optim.hybrid_adam import HybridAdam
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.plans import make_plan
from tests.helpers.training import step_side_by_side

WIDTH = 64


def new_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(10)])


def wrap(model: nn.Module, device: str = "cpu") -> tuple[ElixirModule, ElixirOptimizer]:
    plan = make_plan(model, placement_policy="const", offload_param_frac=1.0, chunk_size=17408)
    module = ElixirModule(model, dataclasses.replace(plan, rcache_blocks=3), device=torch.device(device))
    return module, ElixirOptimizer(module, HybridAdam(model.parameters(), lr=1e-2))


def train_beside_a_monitor(device: str) -> None:
    plain = new_net()
    model = copy.deepcopy(plain)
    module, optimizer = wrap(model, device)
    oracle = HybridAdam(plain.to(device).parameters(), lr=1e-2)
    is_over = threading.Event()
    num_reads, errors = 0, []

    def watch() -> None:
        nonlocal num_reads
        while not is_over.is_set():
            for p in model.parameters():
                try:
                    assert p.detach().norm().isfinite()
                    num_reads += 1
                except Exception as error:
                    errors.append(error)
                is_over.wait(1e-4)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    for _ in range(25):
        x = torch.randn(8, WIDTH, device=device)
        step_side_by_side(plain, oracle, module, optimizer, x)
    is_over.set()
    thread.join(60)
    assert not thread.is_alive()
    assert num_reads + len(errors) > 25
    assert {type(error) for error in errors} <= {StateError}
    state = module.state_dict()
    assert all(torch.equal(state[name], value.cpu()) for name, value in plain.state_dict().items())
    assert module.stats().evictions > 300

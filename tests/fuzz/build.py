"""From a program to what runs: model, batches, losses, optimizer, schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_elixir import HybridAdam
from tests.fuzz.layers import Clock, Stack, make_layers
from tests.fuzz.programs import COMPILED, Program, kinds_in

VOCAB, BATCH, TIME = 12, 3, 5


@dataclass
class Output:
    """What a model may give instead of a tensor."""

    logits: Tensor
    hidden: Tensor


class Net(nn.Module):
    """The model of a program."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        width = program.width
        self.outputs = program.outputs
        self.clock = Clock()
        if program.inputs != "floats":
            self.embed = nn.Embedding(VOCAB, width)
        if program.inputs != "tokens":
            self.project = nn.Linear(width, width)
        self.body = Stack(make_layers(program.layers, width, self.clock, []), self.clock)
        self.norm = nn.LayerNorm(width)  # whatever the layers do, losses stay within bounds
        self.head = nn.Linear(width, VOCAB, bias=False)
        if program.is_tied and program.inputs != "floats":
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor | None = None, features: Tensor | None = None) -> Any:
        x: Tensor | None = None
        if tokens is not None:
            x = self.embed(tokens)
        if features is not None:
            projected = self.project(features)
            x = projected if x is None else x + projected
        assert x is not None
        hidden = self.norm(self.body(x))
        logits = self.head(hidden)
        if self.outputs == "tuple":
            return logits, hidden
        if self.outputs == "dict":
            return {"logits": logits, "hidden": [hidden]}
        if self.outputs == "dataclass":
            return Output(logits, hidden)
        return logits


def make_model(program: Program) -> Net:
    if COMPILED in kinds_in(program.layers):
        torch._dynamo.reset()
    torch.manual_seed(program.seed)
    return Net(program).to(program.device)


def logits_of(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple):
        return output[0]
    if isinstance(output, dict):
        return output["logits"]
    assert isinstance(output, Output)
    return output.logits


def batch_of(program: Program, number: int, rank: int) -> dict[str, Tensor]:
    """The arguments of one forward."""
    generator = torch.Generator().manual_seed(100_000 * (1 + rank) + number)
    batch: dict[str, Tensor] = {}
    if program.inputs != "floats":
        batch["tokens"] = torch.randint(0, VOCAB, (BATCH, TIME), generator=generator)
    if program.inputs != "tokens":
        batch["features"] = torch.randn(BATCH, TIME, program.width, generator=generator, dtype=torch.float32)
    return {name: value.to(program.device) for name, value in batch.items()}


def loss_of(program: Program, output: Any, number: int, rank: int) -> Tensor:
    logits = logits_of(output).float()
    generator = torch.Generator().manual_seed(777 + 1000 * (1 + rank) + number)
    if program.loss == "cross_entropy":
        targets = torch.randint(0, VOCAB, (BATCH * TIME,), generator=generator).to(program.device)
        return F.cross_entropy(logits.flatten(0, 1), targets)
    targets = torch.randn(logits.shape, generator=generator, dtype=torch.float32)
    return (logits - targets.to(program.device)).square().mean()


def make_groups(program: Program, named: Iterable[tuple[str, Any]]) -> list[dict[str, Any]]:
    """The parameters, dealt out to groups with different settings. The last trained one is left out, where a group is
    added later."""
    trained = [p for _, p in named if p.requires_grad]
    if len(trained) > 1 and any(a.name == "add_group" for a in program.actions):
        trained = trained[:-1]
    num = min(program.num_groups, len(trained))
    groups = []
    for index in range(num):
        group: dict[str, Any] = {"params": trained[index::num], "lr": _LR[program.optimizer] / (1 + index)}
        if index % 2 and program.optimizer != "rprop":
            group["weight_decay"] = 0.02
        groups.append(group)
    return groups


_LR = {
    "sgd": 0.1, "momentum": 0.05, "nesterov": 0.05, "dampened": 0.05, "adam": 1e-2, "adamw": 1e-2, "amsgrad": 1e-2,
    "rmsprop": 1e-3, "adagrad": 0.05, "adadelta": 0.5, "adamax": 1e-2, "nadam": 1e-2, "radam": 1e-2, "asgd": 0.05,
    "rprop": 1e-3, "hybrid": 1e-2, "hybrid_adam": 1e-2,
}  # fmt: skip


def make_optimizer(program: Program, named: Iterable[tuple[str, Any]]) -> torch.optim.Optimizer:
    groups, name = make_groups(program, named), program.optimizer
    o = torch.optim
    plain: dict[str, Any] = {"foreach": False}
    # Large: Adam gives a gradient that is nothing but rounding, as of a bias before a norm, the step of any other.
    eps = 1e-3
    made: dict[str, Any] = {
        "sgd": lambda: o.SGD(groups, **plain),
        "momentum": lambda: o.SGD(groups, momentum=0.9, **plain),
        "nesterov": lambda: o.SGD(groups, momentum=0.9, nesterov=True, **plain),
        "dampened": lambda: o.SGD(groups, momentum=0.9, dampening=0.5, **plain),
        "adam": lambda: o.Adam(groups, eps=eps, **plain),
        "adamw": lambda: o.AdamW(groups, eps=eps, **plain),
        "amsgrad": lambda: o.AdamW(groups, amsgrad=True, eps=eps, **plain),
        "rmsprop": lambda: o.RMSprop(groups, momentum=0.5, centered=True, **plain),
        "adagrad": lambda: o.Adagrad(groups, **plain),
        "adadelta": lambda: o.Adadelta(groups, **plain),
        "adamax": lambda: o.Adamax(groups, **plain),
        "nadam": lambda: o.NAdam(groups, **plain),
        "radam": lambda: o.RAdam(groups, **plain),
        "asgd": lambda: o.ASGD(groups, **plain),
        "rprop": lambda: o.Rprop(groups, **plain),
        "hybrid": lambda: HybridAdam(groups, weight_decay=0.01, eps=eps),
        "hybrid_adam": lambda: HybridAdam(groups, adamw_mode=False, eps=eps),
    }
    return made[name]()


def make_schedule(program: Program, optimizer: torch.optim.Optimizer) -> Any:
    schedulers = torch.optim.lr_scheduler
    if program.schedule == "step":
        return schedulers.StepLR(optimizer, 2, 0.5)
    if program.schedule == "cosine":
        return schedulers.CosineAnnealingLR(optimizer, 8)
    if program.schedule == "lambda":
        return schedulers.LambdaLR(optimizer, lambda step: 1.0 / math.sqrt(1 + step))
    return None

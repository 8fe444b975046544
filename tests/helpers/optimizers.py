"""A training with optimizers of all kinds beside plain PyTorch on the same device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_avg_fn

from lightning_elixir import HybridAdam, register_elementwise
from lightning_elixir.runtime.averages import Averages
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.plans import make_plan
from tests.helpers.users_optimizers import Lion, ScheduleFree

STEPS = 4
DECAY = 0.9


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(64, 96), nn.LayerNorm(96), nn.Tanh(), nn.Linear(96, 128), nn.Tanh(), nn.Linear(128, 16)
        )

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layers(x).square().mean()
        return loss


def _registered(cls: type[torch.optim.Optimizer]) -> Callable[[nn.Module], list[torch.optim.Optimizer]]:
    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        register_elementwise(cls)
        return [cls(model.parameters())]  # type: ignore[call-arg]

    return make


def _of(package: str, name: str) -> Callable[[nn.Module], list[torch.optim.Optimizer]]:
    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        optimizers = pytest.importorskip(f"{package}.optim", reason="has these optimizers")
        return [getattr(optimizers, name)(model.parameters(), lr=0.01)]

    return make


def _parts(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    matrices, rest = ([p for p in model.parameters() if (p.dim() == 2) is wanted] for wanted in (True, False))
    return matrices, rest


MAKE: dict[str, Callable[[nn.Module], list[torch.optim.Optimizer]]] = {
    "Lion": _registered(Lion),
    "ScheduleFree": _registered(ScheduleFree),
    "Adafactor": lambda model: [torch.optim.Adafactor(model.parameters(), lr=0.02)],
    "AdamW8bit": _of("bitsandbytes", "AdamW8bit"),
    "AdEMAMix8bit": _of("bitsandbytes", "AdEMAMix8bit"),
    "AdamW8bit of torchao": _of("torchao", "AdamW8bit"),  # which compiles its update, for each shape
    "Muon and AdamW": lambda model: [
        torch.optim.Muon(_parts(model)[0], lr=0.02),
        torch.optim.AdamW(_parts(model)[1], lr=0.01),
    ],
    "Muon and HybridAdam": lambda model: [
        torch.optim.Muon(_parts(model)[0], lr=0.02),
        HybridAdam(_parts(model)[1], lr=0.01),
    ],
    "two HybridAdams": lambda model: [
        HybridAdam(_parts(model)[0], lr=0.01),
        HybridAdam(_parts(model)[1], lr=0.02),
    ],
}
PLACES: dict[str, dict[str, Any]] = {
    "offloaded": {"placement_policy": "cpu", "chunk_size": 40000},
    "resident": {"placement_policy": "cuda", "chunk_size": 40000},
    "half": {"placement_policy": "const", "chunk_size": 40000, "offload_optim_frac": 0.5, "offload_param_frac": 0.5},
}


def _data(seed: int, device: torch.device) -> Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)).to(device)


def _call(optimizers: list[Any], mode: str) -> None:
    for optimizer in optimizers:
        if getattr(optimizer, "has_modes", hasattr(optimizer, mode)):
            getattr(optimizer, mode)()


def largest_difference(name: str, place: str, device: torch.device) -> float:
    """Of values and of averages after some steps, evaluations between them, and a state that went out and in."""
    if "torchao" not in name:
        return _largest_difference(name, place, device)
    with warnings.catch_warnings(), torch._inductor.config.patch(compile_threads=1):  # the compiler's; they would stay
        warnings.simplefilter("ignore")
        return _largest_difference(name, place, device)


def _largest_difference(name: str, place: str, device: torch.device) -> float:
    plain = Net().to(device)
    theirs = MAKE[name](plain)
    averages = {key: value.detach().clone() for key, value in plain.named_parameters()}
    _call(theirs, "train")
    average = get_ema_avg_fn(DECAY)
    for step in range(STEPS):
        plain(_data(step, device)).backward()
        for optimizer in theirs:
            optimizer.step()
            optimizer.zero_grad()
        for key, value in plain.named_parameters():
            averages[key] = value.detach().clone() if step == 0 else average(averages[key], value.detach(), step)

    model = Net()
    module = ElixirModule(model, make_plan(model, **PLACES[place]), device=device)
    ours = [ElixirOptimizer(module, inner) for inner in MAKE[name](model)]
    kept = Averages(module.engine, average)
    _call(ours, "train")
    for step in range(STEPS):
        ours[0].backward(module(_data(step, device)))
        for optimizer in ours:
            optimizer.step()
            optimizer.zero_grad()
        kept.update(step)
        if step == 1:
            _call(ours, "eval")
            kept.swap()
            with torch.no_grad():
                module(_data(99, device))
            kept.swap()
            _call(ours, "train")
            for optimizer in ours:
                optimizer.load_state_dict(optimizer.state_dict())
    values, whole = module.full_state_dict(), kept.whole()
    module.close()
    pairs = [(values[key], value) for key, value in plain.state_dict().items()]
    pairs += [(whole[key], value) for key, value in averages.items()]
    return max(float((mine - value.detach().cpu()).abs().max()) for mine, value in pairs)

"""The oracle (plain PyTorch) and the engine, trained side by side on the same data."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.once import computed_once
from tests.helpers.plans import make_plan
from tests.helpers.zoo import ZOO, make

STEPS = 4


@dataclass
class Run:
    """What a training gave."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    module: ElixirModule | None = None
    optimizer: ElixirOptimizer | None = None

    @property
    def engine(self) -> ElixirModule:
        assert self.module is not None
        return self.module


@dataclass(frozen=True)
class Scheme:
    """How to train: the same words for oracle and engine."""

    dtype: torch.dtype = torch.float32
    master: bool = True
    autocast: bool = False
    micro_batches: int = 1
    clip_norm: float = 0.0
    clip_value: float = 0.0
    device: str = "cpu"
    steps: int = STEPS
    scale: float = 1.0
    """Loss scale (fp16)."""
    eps: float = 1e-8

    @property
    def is_mixed(self) -> bool:
        return self.dtype.itemsize == 2 and self.master


def new_optimizer(parameters: list[nn.Parameter] | list[Tensor], eps: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.05, eps=eps, foreach=False)


def _loss(scheme: Scheme, name: str, model: Any, seed: int) -> Tensor:
    if scheme.dtype.itemsize == 2 and not scheme.autocast and not isinstance(model, ElixirModule):
        model = _CastInputs(model, scheme.dtype)
    if scheme.autocast and not isinstance(model, ElixirModule):
        with torch.autocast(scheme.device, scheme.dtype):
            return ZOO[name].loss(model, seed)
    return ZOO[name].loss(model, seed)


class _CastInputs:
    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._model, self._dtype = model, dtype

    def parameters(self) -> Any:
        return self._model.parameters()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def cast(x: Any) -> Any:
            return x.to(self._dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

        return self._model(*map(cast, args), **{k: cast(v) for k, v in kwargs.items()})


@computed_once
def train_plain(name: str, scheme: Scheme) -> Run:
    """Plain PyTorch; mixed precision: the model in 16 bits, AdamW over an fp32 master fed with the 16-bit gradients."""
    model = make(name).to(scheme.device)
    trained = [p for p in model.parameters() if p.requires_grad]
    masters = [p.detach().clone() for p in trained] if scheme.is_mixed else trained
    if scheme.dtype.itemsize == 2:
        for p in model.parameters():
            p.data = p.data.to(scheme.dtype)
    optimizer = new_optimizer(masters, scheme.eps)
    run = Run()
    for step in range(scheme.steps):
        sums: list[Tensor | None] = [None] * len(trained)
        for micro in range(scheme.micro_batches):
            loss = _loss(scheme, name, model, step * scheme.micro_batches + micro)
            (loss * scheme.scale if scheme.scale != 1.0 else loss).backward()
            run.losses.append(loss.item())
            for i, p in enumerate(trained):  # accumulation over micro-batches in fp32
                if p.grad is not None:
                    grad = p.grad.to(masters[i].dtype) if scheme.is_mixed else p.grad
                    wide = grad.float() if scheme.micro_batches > 1 else grad
                    sums[i] = wide if sums[i] is None else sums[i] + wide
                    p.grad = None
        for master, total in zip(masters, sums, strict=True):
            master.grad = None if total is None else (total / scheme.scale).to(master.dtype)
        if scheme.clip_value:
            nn.utils.clip_grad_value_(masters, scheme.clip_value)
        if scheme.clip_norm:
            run.norms.append(clip_exactly(masters, scheme.clip_norm))
        optimizer.step()
        optimizer.zero_grad()
        if scheme.is_mixed:
            with torch.no_grad():
                for p, master in zip(trained, masters, strict=True):
                    p.copy_(master)
    if scheme.is_mixed:
        with torch.no_grad():
            for p, master in zip(trained, masters, strict=True):
                p.data = master
    run.state = {k: v.detach().to("cpu", copy=True) for k, v in model.state_dict().items()}
    return run


def clip_exactly(parameters: list[Any], max_norm: float) -> float:
    """`clip_grad_norm_` with the norm in fp64, as the engine takes it: torch's fp32 norm differs in its last bits,
    which 16-bit training blows up."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = sum(float(g.double().square().sum()) for g in grads) ** 0.5
    assert norm == pytest.approx(
        float(nn.utils.get_total_norm(grads)), rel=1e-6 if grads[0].dtype.itemsize > 2 else 1e-2
    )
    for grad in grads:
        grad.mul_(min(1.0, max_norm / (norm + 1e-6)))
    return norm


def train_elixir(name: str, scheme: Scheme, **plan_options: Any) -> Run:
    """The engine, on the same data."""
    model = make(name)
    dtype = scheme.dtype
    plan = make_plan(model, compute_dtype=dtype, master_weights=scheme.master, **plan_options)
    module = ElixirModule(
        model,
        plan,
        dtype=dtype,
        master_weights=scheme.master,
        autocast=scheme.autocast,
        device=torch.device(scheme.device),
    )
    optimizer = ElixirOptimizer(
        module,
        new_optimizer([p for p in model.parameters() if p.requires_grad], scheme.eps),
        initial_scale=max(scheme.scale, 1.0),
    )
    run = Run(module=module, optimizer=optimizer)
    for step in range(scheme.steps):
        for micro in range(scheme.micro_batches):
            loss = _loss(scheme, name, module, step * scheme.micro_batches + micro)
            optimizer.backward(loss)
            run.losses.append(loss.item())
        if scheme.clip_value:
            optimizer.clip_grad_value_(scheme.clip_value)
        if scheme.clip_norm:
            run.norms.append(float(optimizer.clip_grad_norm_(scheme.clip_norm)))
        optimizer.step()
        optimizer.zero_grad()
    run.state = copy.copy(module.full_state_dict())
    return run


def different_names(actual: Run, expected: Run) -> list[str]:
    """Names whose values are not bitwise equal."""
    assert list(actual.state) == list(expected.state)
    return [name for name, value in expected.state.items() if not torch.equal(actual.state[name], value)]


def step_side_by_side(
    plain: nn.Module, oracle: Any, module: ElixirModule, optimizer: ElixirOptimizer, x: Tensor
) -> None:
    """One step of both over the same input; the loss, the mean square of the output, must be equal."""
    oracle.zero_grad()
    expected = plain(x).square().mean()
    expected.backward()
    oracle.step()
    loss = module(x).square().mean()
    optimizer.backward(loss)
    optimizer.step()
    assert torch.equal(loss, expected)

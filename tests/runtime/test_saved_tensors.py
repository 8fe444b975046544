"""What autograd saves, with chunks that come and go: the values of plain PyTorch, and its checks."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.dlpack import to_dlpack
from torch.utils.flop_counter import FlopCounterMode

from lightning_elixir.errors import StateError
from lightning_elixir.runtime.unreadable import serve_under_modes
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.plans import make_plan
from tests.helpers.tiers import crossed
from tests.helpers.training import step_side_by_side

WIDTH = 32


class _Adapted(nn.Module):
    """A frozen operator that saves its weight, and a trained low-rank path beside it."""

    def __init__(self, kind: str, is_frozen: bool = True) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5, requires_grad=not is_frozen)
        self.bias = nn.Parameter(torch.randn(WIDTH), requires_grad=not is_frozen)
        self.down = nn.Parameter(torch.randn(WIDTH, 2) / WIDTH**0.5)
        self.up = nn.Parameter(torch.randn(2, WIDTH) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(_OPERATORS[self.kind](x, self.weight, self.bias)) + x @ self.down @ self.up


_OPERATORS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "addmm": lambda x, weight, bias: torch.addmm(bias, x, weight),
    "linear": F.linear,
    "mul": lambda x, weight, bias: x * bias * F.linear(x, weight),
    "conv": lambda x, weight, bias: F.conv1d(x.unsqueeze(-1), weight.unsqueeze(-1), bias).squeeze(-1),
    "norm": lambda x, weight, bias: F.layer_norm(x, (WIDTH,), bias, bias) @ weight,
}


class _Model(nn.Module):
    def __init__(self, kind: str, how: str, num_layers: int = 12) -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList(_Adapted(kind) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        half = len(self.layers) // 2
        for first in (0, half):
            layers = list(self.layers[first : first + half])
            x = _HOW[self.how](layers, x)
        return x


def _run(layers: list[nn.Module], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def _tied(layers: list[nn.Module], x: Tensor) -> Tensor:
    """Uses a frozen weight outside its module, when it has been there already, and much after it."""
    x = _run(layers[:2], x)
    x = x + F.linear(x, layers[1].weight) * layers[0].bias
    return _run(layers[2:], x)


def _nested(layers: list[nn.Module], x: Tensor, *, is_inner_reentrant: bool) -> Tensor:
    x = checkpoint(_run, layers[:3], x, use_reentrant=is_inner_reentrant)
    return _run(layers[3:], x)


_HOW: dict[str, Callable[[list[nn.Module], Tensor], Tensor]] = {
    "modules": lambda layers, x: checkpoint(_run, layers, x, use_reentrant=False),
    "functional": lambda layers, x: checkpoint(_tied, layers, x, use_reentrant=False),
    "nested": lambda layers, x: checkpoint(
        lambda y: _nested(layers, y, is_inner_reentrant=False), x, use_reentrant=False
    ),
    "reentrant_inside": lambda layers, x: checkpoint(
        lambda y: _nested(layers, y, is_inner_reentrant=True), x, use_reentrant=False
    ),
    "reentrant_outside": lambda layers, x: checkpoint(
        lambda y: _nested(layers, y, is_inner_reentrant=False), x, use_reentrant=True
    ),
}


def _wrap(model: nn.Module, device: torch.device, rcache_blocks: int = 3) -> tuple[ElixirModule, ElixirOptimizer]:
    plan = make_plan(model, placement_policy="const", offload_param_frac=1.0, chunk_size=4608)
    module = ElixirModule(model, dataclasses.replace(plan, rcache_blocks=rcache_blocks), device=device)
    trained = [p for p in model.parameters() if p.requires_grad]
    return module, ElixirOptimizer(module, torch.optim.SGD(trained, lr=0.05))


@crossed(kind=_OPERATORS, how=_HOW)
def test_frozen_weights_under_activation_checkpointing(kind: str, how: str, device: torch.device) -> None:
    torch.manual_seed(0)
    plain = _Model(kind, how).to(device)
    module, optimizer = _wrap(copy.deepcopy(plain), device)
    oracle = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.05)
    for _ in range(3):
        x = torch.randn(5, WIDTH, device=device, requires_grad=True)
        step_side_by_side(plain, oracle, module, optimizer, x)
    state = module.state_dict()
    assert all(torch.equal(state[name], value.cpu()) for name, value in plain.state_dict().items())
    assert module.stats().evictions > 60


class _Keeping(nn.Module):
    """Its own hooks keep what they get, under a weight that is there already."""

    def __init__(self, is_frozen: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Adapted("linear", is_frozen) for _ in range(8))
        self.pack: Callable[[Tensor], Tensor] = lambda tensor: tensor

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor):
            x = x @ self.layers[0].weight  # saves the leaf itself
        return _run(list(self.layers[1:]), x)


@pytest.mark.parametrize("pack", [lambda tensor: tensor, Tensor.detach], ids=["itself", "detached"])
@pytest.mark.parametrize("is_frozen", [True, False])
def test_what_users_hooks_keep_of_a_parameter(
    is_frozen: bool, pack: Callable[[Tensor], Tensor], device: torch.device
) -> None:
    torch.manual_seed(0)
    plain = _Keeping(is_frozen).to(device)
    plain.pack = pack
    module, optimizer = _wrap(copy.deepcopy(plain), device)
    for _ in range(3):
        x = torch.randn(5, WIDTH, device=device, requires_grad=True)
        plain.zero_grad()
        plain(x).square().mean().backward()
        optimizer.zero_grad()
        optimizer.backward(module(x).square().mean())
        grads = module.full_grads()
        assert all(torch.equal(grads[name], p.grad.cpu()) for name, p in plain.named_parameters() if p.grad is not None)
    assert module.stats().evictions > 20


_READS: tuple[Callable[[Tensor], Any], ...] = (
    torch.sum, torch.clone, torch.t, torch.detach, torch.trace,
    lambda w: w.view(-1), lambda w: w @ w, lambda w: torch.cat([w, w]), lambda w: F.linear(w, w, w[0]),
    lambda w: torch._foreach_mul([w, w], 2.0)[1],
)  # fmt: skip


@pytest.mark.parametrize("has_mode", [False, True])
@pytest.mark.parametrize("is_inference", [True, False])
def test_a_released_parameter_is_never_read_without_its_elements(
    is_inference: bool, has_mode: bool, device: torch.device
) -> None:
    plain = _Model("addmm", "modules").to(device)
    model = copy.deepcopy(plain)
    module, _ = _wrap(model, device)
    weight, expected = model.layers[0].weight, plain.layers[0].weight
    for read in _READS:
        with torch.inference_mode(is_inference), FlopCounterMode(display=False) if has_mode else nullcontext():
            module(torch.randn(5, WIDTH, device=device))
            with torch._C.DisableTorchFunctionSubclass():  # as C++ code sees it
                assert (weight.shape, weight.stride(), weight.dtype) == ((WIDTH, WIDTH), (WIDTH, 1), torch.float32)
                for address in (torch.Tensor.data_ptr, to_dlpack):
                    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
                        address(weight)
                assert torch.equal(read(weight), read(expected))
    assert torch.empty_like(weight).shape == weight.new_zeros(WIDTH, WIDTH).shape
    module.close()
    for read in _READS:
        with torch._C.DisableTorchFunctionSubclass(), pytest.raises(StateError, match="closed"):
            read(weight)


def test_an_operator_that_a_library_has_half_registered_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    library = torch.library.Library("half_loaded_at_elixir", "IMPL")  # as torchao's, where its C++ part does not load
    library.impl("nothing", torch.clone, "CPU")
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("half_loaded_at_elixir")]
    assert names
    monkeypatch.setattr(torch._C, "_dispatch_get_all_op_names", lambda: names)
    assert serve_under_modes.__wrapped__() == ()


class _Overwriting(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.layers = nn.ModuleList(_Adapted("linear", is_frozen=False) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.where == "needed":
                y = torch.tanh(x)
                x = y * 2 + x
                y.add_(1.0)  # tanh's backward needs what it has given
            elif self.where == "input":
                y = x.clone()
                x = x + y * y
                y.mul_(0.5)
            elif self.where == "harmless":
                x = torch.relu_((x * 1.5).add_(0.25))
        return x


@pytest.mark.parametrize("where", ["needed", "input", "harmless"])
def test_activations_overwritten_in_place(where: str, device: torch.device) -> None:
    torch.manual_seed(0)
    plain = _Overwriting(where).to(device)
    module, optimizer = _wrap(copy.deepcopy(plain), device)
    x = torch.randn(5, WIDTH, device=device)
    expected, loss = plain(x).square().mean(), module(x).square().mean()
    if where == "harmless":
        expected.backward()
        optimizer.backward(loss)
        grads = module.full_grads()
        assert all(torch.equal(grads[name], p.grad.cpu()) for name, p in plain.named_parameters())
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            expected.backward()
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation: torch.float32, shape \(5, 32\)"):
            optimizer.backward(loss)
    assert module.stats().evictions > 5


@pytest.mark.parametrize("rcache_blocks", [3, 100])
def test_backward_through_weights_that_a_step_has_changed(rcache_blocks: int, device: torch.device) -> None:
    """As plain PyTorch: an error where they are needed, and right where the step changed others."""
    torch.manual_seed(0)
    plain = nn.ModuleList(_Overwriting("") for _ in range(2)).to(device)
    model = copy.deepcopy(plain)
    module, optimizer = _wrap(model, device, rcache_blocks)
    oracle = torch.optim.SGD(plain.parameters(), lr=0.05)
    x = torch.randn(5, WIDTH, device=device)
    for net, step in ((plain, oracle), (model, optimizer)):
        first, second, third = net[0](x).square().mean(), net[1](x).square().mean(), net[0](x).square().mean()
        for loss in (first, second):
            optimizer.backward(loss) if step is optimizer else loss.backward()
            step.step()
            step.zero_grad()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            optimizer.backward(third) if step is optimizer else third.backward()
        step.zero_grad()
    state = module.state_dict()
    assert all(torch.equal(state[name], value.cpu()) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("rcache_blocks", [3, 100])
def test_gradients_of_chosen_parameters(rcache_blocks: int, device: torch.device) -> None:
    torch.manual_seed(0)
    plain = _Overwriting("").to(device)
    model = copy.deepcopy(plain)
    module, optimizer = _wrap(model, device, rcache_blocks)
    x = torch.randn(5, WIDTH, device=device)
    wanted = [plain.layers[i].weight for i in (6, 0)]
    expected = torch.autograd.grad(plain(x).square().mean(), wanted)
    found = torch.autograd.grad(module(x).square().mean(), [model.layers[i].weight for i in (6, 0)])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    module(x).square().mean().backward(inputs=[model.layers[3].weight])
    plain(x).square().mean().backward(inputs=[plain.layers[3].weight])
    grads = module.full_grads()
    assert dict.fromkeys(grads, True) == {
        "layers.3.weight": torch.equal(*grads.values(), plain.layers[3].weight.grad.cpu())
    }
    optimizer.zero_grad()
    optimizer.backward(module(x).square().mean())
    plain.zero_grad()
    plain(x).square().mean().backward()
    assert all(torch.equal(module.full_grads()[name], p.grad.cpu()) for name, p in plain.named_parameters())

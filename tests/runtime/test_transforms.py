"""`torch.func` and tracers where chunks move: an error of ours that says what to do, and everything else goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_elixir.errors import StateError
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.plans import make_plan
from tests.helpers.tiers import crossed

TIGHT: dict[str, Any] = {"placement_policy": "cpu", "chunk_size": 1024}
RESIDENT: dict[str, Any] = {"placement_policy": "cuda", "chunk_size": 1024}
X = torch.linspace(-1, 1, 48).reshape(3, 16)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(16, 16), nn.Tanh())))


def wrapped(**options: Any) -> tuple[nn.Sequential, ElixirModule, ElixirOptimizer]:
    model = net()
    module = ElixirModule(model, make_plan(model, **options), device=torch.device("cpu"))
    return model, module, ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.1))


def _of_parameters(model: nn.Module) -> Any:
    return grad(lambda p: functional_call(model, p, (X,)).sum())(dict(model.named_parameters()))


def _per_sample(model: nn.Module) -> Any:
    values = {name: p.detach() for name, p in model.named_parameters()}
    return vmap(grad(lambda p, x: functional_call(model, p, (x,)).sum()), in_dims=(None, 0))(values, X)


DERIVATIVES: dict[str, Callable[[Any], Any]] = {
    "grad": lambda m: grad(lambda x: m(x).sum())(X),
    "grad of parameters": _of_parameters,
    "per sample": _per_sample,
    "vjp": lambda m: vjp(m, X)[1](X),
    "jvp": lambda m: jvp(m, (X,), (X,))[1],
    "jacrev": lambda m: jacrev(lambda x: m(x).sum())(X),
    "jacfwd": lambda m: jacfwd(lambda x: m(x).sum())(X),
    "hessian": lambda m: hessian(lambda x: m(x).square().sum())(X[0]),
}
TRACERS: dict[str, Callable[[Any], Any]] = {
    "linearize": lambda m: linearize(m, X)[1](X),
    "make_fx": lambda m: make_fx(lambda x: m(x))(X)(X),
    "jit": lambda m: torch.jit.trace(m, X)(X),
    "export": lambda m: torch.export.export(m, (X,)).module()(X),
}


def train(model: nn.Module, module: Any, optimizer: Any, steps: int = 2) -> dict[str, Tensor]:
    for step in range(steps):
        loss = module(X + step).square().mean()
        if isinstance(optimizer, ElixirOptimizer):
            optimizer.backward(loss)
        else:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return module.full_state_dict() if isinstance(module, ElixirModule) else model.state_dict()


@pytest.mark.filterwarnings("ignore")
@crossed(
    told=["grad-True", "grad of parameters-False", "jvp-True", "hessian-True", "make_fx-True", "export-True"],
    what=[*DERIVATIVES, *TRACERS],
    is_wrapped=[True, False],
)
def test_an_error_of_ours_and_training_goes_on(what: str, is_wrapped: bool) -> None:
    model, module, optimizer = wrapped(**TIGHT)
    words = r"torch\.func's grad.*torch\.autograd\.grad.*deepcopy" if what in DERIVATIVES else r"traced.*deepcopy"
    for _ in range(2):
        with pytest.raises(StateError, match=words):
            {**DERIVATIVES, **TRACERS}[what](module if is_wrapped else model)
        values = train(model, module, optimizer)
    assert module.stats().evictions > 0
    plain = net()
    expected = train(plain, plain, torch.optim.SGD(plain.parameters(), lr=0.1), steps=2)
    expected = train(plain, plain, torch.optim.SGD(plain.parameters(), lr=0.1), steps=2)
    assert [k for k, v in expected.items() if not torch.equal(values[k], v)] == []


@pytest.mark.parametrize("what", DERIVATIVES)
def test_where_everything_stays_they_work(what: str) -> None:
    model, _, _ = wrapped(**RESIDENT)
    actual, expected = DERIVATIVES[what](model), DERIVATIVES[what](net())
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_inside_a_forward() -> None:
    """A model of forces: the derivative of an energy is what it gives."""

    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = net()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = grad(lambda y: self.energy(y).sum())(x)
            return result

    model = Force()
    module = ElixirModule(model, make_plan(model, **TIGHT), device=torch.device("cpu"))
    with pytest.raises(StateError, match=r"torch\.func's grad.*torch\.autograd\.grad"):
        module(X)


def test_what_the_error_names_works() -> None:
    model, module, _ = wrapped(**TIGHT)
    plain = net()
    for m in (model, module):
        x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
        (actual,), (expected,) = torch.autograd.grad(m(x).sum(), x), torch.autograd.grad(plain(y).sum(), y)
        assert torch.equal(actual, expected)
        for function in (torch.autograd.functional.jacobian, torch.autograd.functional.hessian):
            actual, expected = (function(lambda v, n=n: n(v).square().sum(), X[0]) for n in (m, plain))
            torch.testing.assert_close(actual, expected)
        with forward_ad.dual_level():
            actual = forward_ad.unpack_dual(m(forward_ad.make_dual(X, X))).tangent
        torch.testing.assert_close(actual, jvp(plain, (X,), (X,))[1])
    assert module.stats().evictions > 0


def test_batching_keeps_nothing() -> None:
    plain, (_, module, optimizer) = net(), wrapped(**TIGHT)
    vmap(plain)(X).square().sum().backward()
    optimizer.backward(vmap(module)(X).square().sum())
    grads = module.full_grads()
    assert [n for n, p in plain.named_parameters() if not torch.equal(grads[n], p.grad)] == []
    assert module.stats().evictions > 0


def _batched(model: nn.Sequential) -> list[Tensor]:
    """Parameters of several chunks, as batches and beside them, in calls of no layer."""
    first, last = model[0], model[-2]
    assert isinstance(first, nn.Linear)
    assert isinstance(last, nn.Linear)
    return [
        vmap(lambda row: row.sum())(last.weight),
        vmap(torch.dot, (0, None))(last.weight, first.bias),
        vmap(torch.mv, (None, 0))(first.weight, X),
        vmap(lambda x: nn.functional.linear(x, last.weight, last.bias))(X),
        vmap(lambda row, x: row * x, (0, None))(first.weight, last.bias),
    ]


def test_parameters_are_batched_while_chunks_come_and_go() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x).sum() + torch.stack([values.sum() for values in _batched(self.net)]).sum()

    plain, model = Model(), Model()
    module = ElixirModule(model, make_plan(model, **TIGHT), device=torch.device("cpu"))
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.1))
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        for actual, expected in zip(_batched(model.net), _batched(plain.net), strict=True):
            assert torch.equal(actual, expected)
        values, expected_values = train(model, module, optimizer), train(plain, plain, plain_optimizer)
        assert [k for k, v in expected_values.items() if not torch.equal(values[k], v)] == []
    assert module.stats().evictions > 0

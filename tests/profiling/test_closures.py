"""What a copied model carries leads to the copy, and what leads nowhere stays shared."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_elixir.profiling.closures import rebind

Patch = Callable[[nn.Module], Any]


def copied(model: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {}
    other = copy.deepcopy(model, memo)
    rebind(memo, ())
    return other


def closure(layer: nn.Module) -> Any:
    original = layer.forward
    return lambda x: original(x)


def default(layer: nn.Module) -> Any:
    def forward(x: Tensor, *, inner: Any = layer.forward) -> Tensor:
        return inner(x)  # type: ignore[no-any-return]

    return forward


def weak(layer: nn.Module) -> Any:
    return partial(lambda reference, x: type(layer).forward(reference(), x), weakref.ref(layer))


def wrapper(layer: nn.Module) -> Any:
    @wraps(layer.forward)
    def forward(x: Tensor) -> Tensor:
        return forward.__wrapped__(x)  # type: ignore[attr-defined,no-any-return]

    return forward


def recursive(layer: nn.Module) -> Any:
    def forward(x: Tensor, depth: int = 3) -> Tensor:
        return forward(x, depth - 1) if depth else type(layer).forward(layer, x)  # type: ignore[no-any-return]

    return forward


def mutual(layer: nn.Module) -> Any:
    def forward(x: Tensor, depth: int = 3) -> Tensor:
        return other(x, depth)

    def other(x: Tensor, depth: int) -> Tensor:
        return forward(x, depth - 1) if depth else type(layer).forward(layer, x)  # type: ignore[no-any-return]

    return forward


def by_list(layer: nn.Module) -> Any:
    held: list[Any] = [layer]
    held.append(held)
    return lambda x: type(held[0]).forward(held[1][0], x)


def by_key(layer: nn.Module) -> Any:
    known = {layer: type(layer).forward}
    return lambda x: next(forward(module, x) for module, forward in known.items())


def by_object(layer: nn.Module) -> Any:
    class Call:
        def __init__(self) -> None:
            self.run = closure(layer)

        def __call__(self, x: Tensor) -> Tensor:
            return self.run(x)  # type: ignore[no-any-return]

    return Call()


@pytest.mark.parametrize(
    "patch", [closure, default, weak, wrapper, recursive, mutual, by_list, by_key, by_object], ids=lambda f: f.__name__
)
def test_a_forward_of_the_copy_computes_with_the_copy(patch: Patch) -> None:
    model = nn.Linear(3, 2)
    model.forward = patch(model)  # type: ignore[method-assign]
    carried = model.forward
    other = copied(model)
    x = torch.randn(4, 3)
    before = model(x)
    with torch.no_grad():
        other.weight.zero_()
        other.bias.fill_(7.0)
    assert torch.equal(other(x), torch.full((4, 2), 7.0))
    assert torch.equal(model(x), before)
    assert model.forward is carried


def test_what_hooks_share_without_a_module_stays_shared() -> None:
    """Among them, and with what is outside."""
    model, seen = nn.Linear(3, 2), list[float]()
    began = 0

    def begin(module: nn.Module, args: Any) -> None:
        nonlocal began
        began += 1

    def end(module: nn.Module, args: Any, result: Tensor) -> None:
        seen.append(began + model.weight.sum().item())

    model.register_forward_pre_hook(begin)
    model.register_forward_hook(end)
    other = copied(model)
    with torch.no_grad():
        other.weight.zero_()
    other(torch.randn(1, 3))
    other(torch.randn(1, 3))
    assert (began, seen) == (2, [1.0, 2.0])


def test_what_two_hooks_hold_is_made_once() -> None:
    model = nn.Linear(3, 2)
    model.features = features = [model]  # type: ignore[assignment]
    model.register_forward_pre_hook(lambda module, args: features.append(module))
    model.register_forward_hook(lambda module, args, result: features.append(module))
    other = copied(model)
    other(torch.randn(1, 3))
    assert other.features == [other] * 3
    assert features == [model]


def test_long_containers_are_data() -> None:
    model, numbers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(50))), list(range(3_000_000))
    for layer in model:
        layer.register_forward_hook(lambda *_: numbers and None)  # type: ignore[func-returns-value]
        layer.forward = (lambda inner: lambda x: inner(x) + 0 * len(numbers))(layer.forward)  # type: ignore[method-assign]
    other = copied(model)
    assert all(torch.equal(a.weight, b.weight) for a, b in zip(model, other, strict=True))

"""Users' subclasses of optimizers, and their hooks: what they do around the step happens once a step."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_elixir import ElixirModule, ElixirOptimizer, HybridAdam
from lightning_elixir.errors import PlanError, StateError
from tests.helpers.own_steps import CLASSES, Counts, noted
from tests.helpers.plans import make_plan
from tests.helpers.tiers import crossed

CPU = torch.device("cpu")


def _model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*[nn.Linear(24, 24) for _ in range(6)])


def _loss(model: Any, seed: int) -> Tensor:
    x = torch.randn(4, 24, generator=torch.Generator().manual_seed(seed))
    return model(x).square().mean()


def _wrapped(make: Callable[[Any], torch.optim.Optimizer]) -> tuple[ElixirModule, ElixirOptimizer, Any]:
    model = _model()
    plan = make_plan(model, placement_policy="cpu", chunk_size=4096, gpu_bytes=20 * 1024)
    module = ElixirModule(model, plan, device=CPU)
    inner = make(model.parameters())
    return module, ElixirOptimizer(module, inner), inner


@crossed(together=1, cls=CLASSES, has_closure=[False, True])
def test_subclasses_do_what_they_do_in_plain_pytorch(cls: Any, has_closure: bool) -> None:
    plain = _model()
    expected = cls(plain.parameters(), lr=1e-2)
    module, optimizer, inner = _wrapped(lambda parameters: cls(parameters, lr=1e-2))
    for seed in range(5):
        results = []
        for own, net, backward in ((expected, plain, Tensor.backward), (optimizer, module, optimizer.backward)):

            def closure(own: Any = own, net: Any = net, backward: Any = backward, seed: int = seed) -> Tensor:
                own.zero_grad()
                loss = _loss(net, seed)
                backward(loss)
                return loss

            if has_closure:
                results.append(own.step(closure))
            else:
                closure()
                results.append(own.step())
        assert results[0] == results[1]
        assert type(inner) is cls
        state = module.full_state_dict()
        assert [k for k, v in plain.state_dict().items() if not torch.equal(state[k], v)] == []
    assert noted(inner) == noted(expected)
    assert module.stats().evictions > 0
    module.close()


def test_hooks_of_the_users_optimizer_run_once_a_step() -> None:
    seen: list[tuple[str, type]] = []

    def run(optimizer: Any, inner: Any, step: Callable[[], None]) -> list[Any]:
        seen.clear()
        inner.register_step_pre_hook(lambda o, args, kwargs: seen.append(("before", type(o))))
        inner.register_step_post_hook(lambda o, args, kwargs: seen.append(("after", type(o))))
        for _ in range(3):
            step()
            optimizer.step()
        return list(seen)

    for cls in (torch.optim.AdamW, Counts, HybridAdam):
        plain = _model()
        own = cls(plain.parameters(), lr=1e-2)
        if cls is Counts and getattr(torch.optim.AdamW.step, "hooked", False):
            expected = [("before", Counts), ("after", Counts)] * 3  # torch runs them twice where AdamW was used before
        else:
            expected = run(own, own, lambda plain=plain: _loss(plain, 0).backward())
        module, optimizer, inner = _wrapped(lambda parameters, cls=cls: cls(parameters, lr=1e-2))
        assert run(optimizer, inner, lambda o=optimizer, m=module: o.backward(_loss(m, 0))) == expected
        module.close()


class Rewrites(torch.optim.AdamW):
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad.sign(), alpha=-group["lr"])


class StartsOtherwise(torch.optim.AdamW):
    def _init_group(self, *args: Any) -> Any:
        return super()._init_group(*args)


def _replaced(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.step = types.MethodType(lambda self, closure=None: None, optimizer)  # type: ignore[method-assign]
    return optimizer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Rewrites, r"Rewrites\.step\(\) does not call super\(\)\.step\(\)"),
        (StartsOtherwise, r"_init_group\(\) of its own, which would not run"),
        (_replaced, "was replaced on the object, which would not run"),
    ],
)
def test_what_would_not_run_is_refused(make: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        _wrapped(make)


def test_a_scheduler_may_watch_the_step() -> None:
    model = _model()
    inner = Counts(model.parameters(), lr=1e-2)
    torch.optim.lr_scheduler.StepLR(inner, 1)  # replaces `step` on the object
    module = ElixirModule(model, make_plan(model, placement_policy="cpu"), device=CPU)
    optimizer = ElixirOptimizer(module, inner)
    optimizer.backward(_loss(module, 0))
    optimizer.step()
    assert inner.log == ["before", None]
    module.close()


class Twice(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return super().step(closure)


def test_gradients_are_used_once() -> None:
    module, optimizer, inner = _wrapped(Twice)
    optimizer.backward(_loss(module, 0))
    with pytest.raises(StateError, match=r"twice: .*call super\(\)\.step\(\) once"):
        optimizer.step()
    assert type(inner) is Twice
    module.close()

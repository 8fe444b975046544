"""`p.grad` between backward and step: what plain PyTorch has, and what is written there counts."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_elixir.errors import StateError
from lightning_elixir.optim.hybrid_adam import HybridAdam
from lightning_elixir.plan.types import UpdateTiming
from lightning_elixir.planning import make_plan
from lightning_elixir.runtime.gradients import Gradients
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.dist import run_ranks
from tests.helpers.tiers import crossed
from tests.helpers.visible_gradients import (
    ACTIONS,
    PLACEMENTS,
    assign,
    assign_to_some,
    clip_norm,
    drop_some,
    look,
    nothing,
    one_element,
    scale_in_place,
    train,
)
from tests.helpers.zoo import ZOO, make


def wrapped(name: str, device: torch.device, **options: Any) -> tuple[nn.Module, ElixirModule, ElixirOptimizer]:
    model = make(name)
    module = ElixirModule(model, make_plan(model, **options), device=device)
    return model, module, ElixirOptimizer(module, sgd(model.parameters()))


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.05, momentum=0.9, foreach=False)


@crossed(action=ACTIONS, placement=PLACEMENTS)
def test_what_users_do_to_gradients_counts(action: Any, placement: str) -> None:
    plain = make("gpt2")
    expected = train(plain, plain, sgd(plain.parameters()), action, "gpt2")
    model, module, optimizer = wrapped("gpt2", torch.device("cpu"), **PLACEMENTS[placement])
    assert train(module, model, optimizer, action, "gpt2") == expected
    state = module.state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("action", [look, scale_in_place, assign_to_some, clip_norm], ids=lambda f: f.__name__)
def test_with_accumulation(action: Any) -> None:
    plain = make("gpt2")
    expected = train(plain, plain, sgd(plain.parameters()), action, "gpt2", micro_batches=3)
    model, module, optimizer = wrapped("gpt2", torch.device("cpu"), **PLACEMENTS["cpu"])
    assert train(module, model, optimizer, action, "gpt2", micro_batches=3) == expected


def test_between_micro_batches() -> None:
    plain = make("gpt2")
    model, module, optimizer = wrapped("gpt2", torch.device("cpu"), **PLACEMENTS["cpu"])
    for net, of in ((plain, plain), (module, model)):
        for micro in range(3):
            loss = ZOO["gpt2"].loss(net, micro)
            optimizer.backward(loss) if net is module else loss.backward()
            scale_in_place(list(of.parameters()))
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_a_gradient_is_a_tensor_like_any_other() -> None:
    plain = make("gpt2")
    ZOO["gpt2"].loss(plain, 0).backward()
    model, module, optimizer = wrapped("gpt2", torch.device("cpu"), **PLACEMENTS["cpu"])
    assert all(p.grad is None for p in model.parameters())
    loss = ZOO["gpt2"].loss(module, 0)
    assert all(p.grad is None for p in model.parameters())
    optimizer.backward(loss)
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(q.grad, p.grad)
        assert (q.grad.dtype, q.grad.stride(), q.grad.is_leaf) == (p.grad.dtype, p.grad.stride(), True)
        assert not q.grad.requires_grad
    first = next(model.parameters())
    with pytest.raises(RuntimeError, match="size"):
        first.grad = torch.zeros(3)
    with pytest.raises(TypeError):
        first.grad = 3
    with pytest.raises(RuntimeError, match="type"):
        first.grad = torch.zeros_like(first, dtype=torch.float64)
    optimizer.step()
    assert all(p.grad is None for p in model.parameters())  # the step has used them


def test_nobody_holds_what_was_looked_at() -> None:
    """Looking at all gradients, one after the other, keeps one at a time."""
    model, module, optimizer = wrapped("gpt2", torch.device("cpu"), **PLACEMENTS["cpu"])
    optimizer.backward(ZOO["gpt2"].loss(module, 0))
    for p in model.parameters():
        p.grad.abs_()
        assert len(module.engine.gradients._seen) == 1
    held = [p.grad for p in model.parameters()]
    assert len(module.engine.gradients._seen) == len(held)
    assert all(bool((g >= 0).all()) for g in held)  # and what was written before stays
    assert all(p.grad is g for p, g in zip(model.parameters(), held, strict=True))


def test_a_guard_against_nan_drops_the_step() -> None:
    plain = make("gpt2")
    model, module, optimizer = wrapped("gpt2", torch.device("cpu"), **PLACEMENTS["cpu"])
    oracle = sgd(plain.parameters())
    for net, of, step in ((plain, plain, oracle), (module, model, optimizer)):
        for seed in range(4):
            loss = ZOO["gpt2"].loss(net, seed) * (float("nan") if seed == 1 else 1.0)
            optimizer.backward(loss) if step is optimizer else loss.backward()
            if not all(bool(p.grad.isfinite().all()) for p in of.parameters() if p.grad is not None):
                assert seed == 1
                step.zero_grad()
            step.step()
            step.zero_grad()
    state = module.state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("is_held", [True, False])
def test_beside_our_own_clipping(is_held: bool) -> None:
    """What is clipped is what users have written, they see what was clipped, and what they write to that counts."""
    plain = make("gpt2")
    model, module, optimizer = wrapped("gpt2", torch.device("cpu"), **PLACEMENTS["cpu"])
    oracle = sgd(plain.parameters())
    for net, of, step in ((plain, plain, oracle), (module, model, optimizer)):
        loss = ZOO["gpt2"].loss(net, 0)
        optimizer.backward(loss) if step is optimizer else loss.backward()
        held = [p.grad for p in of.parameters()] if is_held else []
        scale_in_place(list(of.parameters()))
        if step is optimizer:
            optimizer.clip_grad_value_(0.01)
        else:
            torch.nn.utils.clip_grad_value_(of.parameters(), 0.01)
        assert all(float(p.grad.abs().max()) <= 0.01 for p in of.parameters())
        assert all(float(g.abs().max()) <= 0.01 for g in held)
        list(of.parameters())[1].grad.fill_(0.5)
        step.step()
        step.zero_grad()
    state = module.state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_16_bits_keep_the_bits_that_are_not_seen(micro_batches: int) -> None:
    """Looking rounds nothing; of what is written the elements that changed are taken."""
    states = []
    for action in (nothing, look, one_element):
        model = make("gpt2")
        plan = make_plan(model, compute_dtype=torch.bfloat16, **PLACEMENTS["cpu"])
        module = ElixirModule(model, plan, dtype=torch.bfloat16, device=torch.device("cpu"))
        optimizer = ElixirOptimizer(module, sgd(model.parameters()))
        train(module, model, optimizer, action, "gpt2", micro_batches)
        states.append(module.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    differing = [name for name in states[0] if not torch.equal(states[0][name], states[2][name])]
    assert differing


def test_an_update_that_has_begun() -> None:
    model = make("gpt2")
    options = {**PLACEMENTS["cpu"], "update_timing": UpdateTiming.INSIDE_BACKWARD, "can_stream": True}
    plan = make_plan(model, compute_dtype=torch.bfloat16, **options)
    module = ElixirModule(model, plan, dtype=torch.bfloat16, device=torch.device("cpu"))
    optimizer = ElixirOptimizer(module, HybridAdam(model.parameters(), lr=1e-2))
    num_refused = 0
    for step in range(3):
        with optimizer.unobserved():
            optimizer.backward(ZOO["gpt2"].loss(module, step))
            for p in model.parameters():
                if module.engine.reducer.has_begun(module.engine.home_of(p)[0].id):
                    for access in (lambda q=p: q.grad, lambda q=p: setattr(q, "grad", torch.zeros_like(q))):
                        with pytest.raises(StateError, match=r"on_before_optimizer_step.*timing='behind_forward'"):
                            access()
                    num_refused += 1
            optimizer.step()
    assert num_refused > 10


def test_reading_inside_backward_is_an_error_and_not_none() -> None:
    model, module, optimizer = wrapped("gpt2", torch.device("cpu"), **PLACEMENTS["cpu"])
    first = next(p for p in model.parameters())
    seen: list[Any] = []
    first.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    with pytest.raises(StateError, match="cannot be read inside backward: read it after backward"):
        optimizer.backward(ZOO["gpt2"].loss(module, 0))
    assert seen == []


def _train_rank(action: Any, placement: str) -> dict[str, Tensor]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = make("gpt2")
    plan = make_plan(model, world_size=world_size, **PLACEMENTS[placement])
    module = ElixirModule(model, plan, device=torch.device("cpu"))
    optimizer = ElixirOptimizer(module, sgd(model.parameters()))
    for step in range(3):
        optimizer.backward(ZOO["gpt2"].loss(module, step * world_size + rank))
        action(list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    state = copy.copy(module.state_dict())
    module.close()
    return state


@crossed(
    action=[look, scale_in_place, assign, assign_to_some, drop_some, clip_norm],
    placement=["cpu", "cuda"],
)
def test_several_ranks(action: Any, placement: str) -> None:
    plain = make("gpt2")
    oracle = sgd(plain.parameters())
    for step in range(3):
        copies = []
        for rank in range(2):
            twin = copy.deepcopy(plain)
            ZOO["gpt2"].loss(twin, step * 2 + rank).backward()
            copies.append([p.grad for p in twin.parameters()])
        for p, a, b in zip(plain.parameters(), *copies, strict=True):
            p.grad = (a + b) / 2
        action(list(plain.parameters()))
        oracle.step()
        oracle.zero_grad()
    expected = plain.state_dict()
    for state in run_ranks(_train_rank, 2, action, placement):
        assert all(torch.allclose(state[name], expected[name], rtol=1e-5, atol=1e-6) for name in expected)


class Noisy(torch.optim.SGD):
    """A user's, which changes gradients in its own step."""

    def step(self, closure: Any = None) -> Any:
        torch.manual_seed(3)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad = p.grad + 0.01 * torch.randn_like(p.grad)
        return super().step(closure)


def test_an_optimizer_that_changes_gradients_in_its_step() -> None:
    plain = make("gpt2")
    expected = train(plain, plain, Noisy(plain.parameters(), lr=0.05), nothing, "gpt2")
    model = make("gpt2")
    module = ElixirModule(model, make_plan(model, **PLACEMENTS["cpu"]), device=torch.device("cpu"))
    optimizer = ElixirOptimizer(module, Noisy(model.parameters(), lr=0.05))
    assert train(module, model, optimizer, nothing, "gpt2") == expected
    state = module.state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


def test_a_clip_of_dropped_gradients_is_forgotten() -> None:
    """Whoever drops them: the module, the optimizer, or `p.grad = None` for each."""
    for drop in ("module", "optimizer", "each"):
        plain = make("gpt2")
        oracle = sgd(plain.parameters())
        model, module, optimizer = wrapped("gpt2", torch.device("cpu"), **PLACEMENTS["cpu"])
        optimizer.backward(ZOO["gpt2"].loss(module, 0) * float("nan"))
        optimizer.clip_grad_norm_(1.0)
        if drop == "each":
            for p in model.parameters():
                p.grad = None
        else:
            (module if drop == "module" else optimizer).zero_grad()
        optimizer.backward(ZOO["gpt2"].loss(module, 1))
        optimizer.step()
        ZOO["gpt2"].loss(plain, 1).backward()
        oracle.step()
        state = module.state_dict()
        assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items()), drop


@pytest.mark.parametrize("has_backward", [False, True])
def test_an_assigned_gradient_is_there_at_the_first_read(has_backward: bool) -> None:
    model, module, optimizer = wrapped("gpt2", torch.device("cpu"), **PLACEMENTS["cpu"])
    if has_backward:
        optimizer.backward(ZOO["gpt2"].loss(module, 0))
    parameter = next(iter(model.parameters()))
    parameter.grad = None
    parameter.grad = torch.ones_like(parameter)
    del module
    assert parameter.grad is not None
    assert bool((parameter.grad == 1).all())


def test_looking_at_many_gradients_compares_each_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    _, module, optimizer = wrapped("gpt2", torch.device("cpu"), **PLACEMENTS["cpu"])
    optimizer.backward(ZOO["gpt2"].loss(module, 0))
    count, absorb = [0], Gradients._absorb

    def counted(self: Gradients, *key: int) -> None:
        count[0] += 1
        absorb(self, *key)

    monkeypatch.setattr(Gradients, "_absorb", counted)
    parameters = list(module.module.parameters())
    held = [p.grad for p in parameters]
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    assert len(held) > 20
    assert count[0] <= 2 * len(held)

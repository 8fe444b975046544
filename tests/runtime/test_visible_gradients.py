"""`p.grad` between backward and step: what plain PyTorch has, and what is written there counts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_elixir.errors import StateError
from lightning_elixir.optim.hybrid_adam import HybridAdam
from lightning_elixir.plan.types import UpdateTiming
from lightning_elixir.runtime.gradients import Gradients
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.dist import run_ranks
from tests.helpers.plans import make_plan
from tests.helpers.seeds import seed_torch
from tests.helpers.tiers import crossed, telling
from tests.helpers.training import clip_exactly
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


@crossed(
    told=[
        *("look-cuda", "scale_in_place-cpu_behind", "assign-cpu", "assign_to_some-cpu", "drop_some-cpu"),
        *("clip_norm_foreach-cpu", "one_element-cpu"),
    ],
    action=ACTIONS,
    placement=PLACEMENTS,
)
def test_what_users_do_to_gradients_counts(action: Any, placement: str) -> None:
    plain = make("gpt2")
    expected = train(plain, plain, sgd(plain.parameters()), action, "gpt2")
    model, module, optimizer = wrapped("gpt2", torch.device("cpu"), **PLACEMENTS[placement])
    assert train(module, model, optimizer, action, "gpt2") == expected
    state = module.state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


@pytest.mark.parametrize(
    "action", telling([look, scale_in_place, assign_to_some, clip_norm], "scale_in_place", "assign_to_some")
)
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


@pytest.mark.parametrize("micro_batches", telling([1, 2], "1"))
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


def halve(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(0.5)


def double(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad = parameter.grad * 2


def drop(parameter: Tensor) -> None:
    parameter.grad = None


@crossed(hook=[halve, double], kind=["accumulated", "tensor", "module", "module_before"], placement=["cpu", "cuda"])
def test_a_hook_finds_no_none(hook: Any, kind: str, placement: str) -> None:
    model, module, optimizer = wrapped("gpt2", torch.device("cpu"), **PLACEMENTS[placement])
    parameters = list(model.parameters())
    if kind == "accumulated":
        parameters[-1].register_post_accumulate_grad_hook(hook)
    elif kind == "tensor":
        parameters[0].register_hook(lambda grad: hook(parameters[-1]))
    elif kind == "module":
        model.get_submodule("transformer.h.0.mlp.act").register_full_backward_hook(lambda *_: hook(parameters[-1]))
    else:
        model.get_submodule("transformer.h.0.mlp.act").register_full_backward_pre_hook(lambda *_: hook(parameters[-1]))
    with pytest.raises(StateError, match="cannot be read inside backward: read it after backward"):
        optimizer.backward(ZOO["gpt2"].loss(module, 0))
    module.close()


@crossed(hook=[halve, double, drop], placement=["cpu", "cuda"])
def test_hooks_that_change_gradients(hook: Any, placement: str) -> None:
    """From before the model was wrapped, where autograd's own gradient is there; dropping works later, too."""
    plain, model = make("gpt2"), make("gpt2")
    for net in (plain, model):
        for parameter in list(net.parameters())[::2]:
            parameter.register_post_accumulate_grad_hook(hook)
    module = ElixirModule(model, make_plan(model, **PLACEMENTS[placement]), device=torch.device("cpu"))
    optimizer = ElixirOptimizer(module, sgd(model.parameters()))
    if hook is drop:
        for net in (plain, model):
            list(net.parameters())[1].register_post_accumulate_grad_hook(hook)
    plain_optimizer = sgd(plain.parameters())
    for seed in range(3):
        ZOO["gpt2"].loss(plain, seed).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        optimizer.backward(ZOO["gpt2"].loss(module, seed))
        optimizer.step()
        optimizer.zero_grad()
    state = module.full_state_dict()
    assert [name for name, value in plain.state_dict().items() if not torch.equal(state[name], value)] == []
    optimizer.backward(ZOO["gpt2"].loss(module, 3))
    if hook is not drop:  # here it is not the sum of both, which it is in plain PyTorch
        with pytest.raises(StateError, match="is that of one backward here, without those before it"):
            optimizer.backward(ZOO["gpt2"].loss(module, 4))
    module.close()


@pytest.mark.parametrize("placement", ["cpu", "cuda"])
@pytest.mark.parametrize("is_bare", [True, False])
def test_gradients_with_a_graph_are_refused(placement: str, is_bare: bool) -> None:
    """What a penalty over `p.grad` adds would be missing, unsaid; `torch.autograd.grad` gives what can be penalised."""
    plain = make("mlp")
    model, module, optimizer = wrapped("mlp", torch.device("cpu"), **PLACEMENTS[placement])
    loss = ZOO["mlp"].loss(module, 0)
    with pytest.raises(StateError, match=r"was made by backward\(create_graph=True\).*torch\.autograd\.grad"):
        loss.backward(create_graph=True) if is_bare else optimizer.backward(loss, create_graph=True)
    optimizer.zero_grad()
    for net in (plain, model):
        loss = ZOO["mlp"].loss(module if net is model else net, 0)
        grads = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
        total = loss + sum(grad.square().sum() for grad in grads)
        optimizer.backward(total) if net is model else total.backward()
    own = module.full_grads()
    assert [name for name, p in plain.named_parameters() if not torch.equal(own[name], p.grad)] == []
    module.close()


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


@pytest.mark.parametrize("placement", ["cpu", "cuda"])
@pytest.mark.parametrize("action", [look, scale_in_place, assign, assign_to_some, drop_some, clip_norm])
@pytest.mark.full
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
        seed_torch(3)
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


# Further backwards, and zeros


class Parts(nn.Module):
    """Layers of several chunks, of which a batch may use some."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(6))

    def forward(self, x: Tensor, ids: Iterable[int]) -> Tensor:
        for index in ids:
            x = torch.tanh(self.layers[index](x))
        return x.square().mean()


def parts() -> Parts:
    seed_torch(5)
    return Parts()


def batch(seed: int) -> Tensor:
    return torch.randn(4, 24, generator=torch.Generator().manual_seed(seed))


PARTS: dict[str, dict[str, Any]] = {
    **PLACEMENTS,
    "nvme": {"placement_policy": "cpu", "nvme_offload_fraction": 1.0, "chunk_size": 8 * 1024},
    "all on nvme": {
        "placement_policy": "cpu",
        "nvme_offload_fraction": 1.0,
        "nvme_offload_param_fraction": 1.0,
        "chunk_size": 8 * 1024,
    },
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=0.1, foreach=False),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1, foreach=False),
    "hybrid": lambda ps: HybridAdam(ps, lr=1e-2, weight_decay=0.1),
}


def part_pairs(placement: str, optimizer: str) -> list[tuple[Any, Any, Any, Any]]:
    """Plain PyTorch and the engine: what to call, the model, the optimizer, and what runs backward."""
    plain, model = parts(), parts()
    module = ElixirModule(model, make_plan(model, **PARTS[placement]), device=torch.device("cpu"))
    own = ElixirOptimizer(module, OPTIMIZERS[optimizer](model.parameters()))
    return [
        (plain, plain, OPTIMIZERS[optimizer](plain.parameters()), lambda loss: loss.backward()),
        (module, model, own, own.backward),
    ]


def assert_equal_states(pairs: list[tuple[Any, Any, Any, Any]]) -> None:
    (plain, *_), (module, *_) = pairs
    state = module.state_dict()
    assert [name for name, value in plain.state_dict().items() if not torch.equal(state[name], value)] == []


@pytest.mark.parametrize("placement", PARTS)
def test_what_users_keep_is_added_to(placement: str) -> None:
    """And what they write to it after that counts; also where they have set it."""
    pairs = part_pairs(placement, "hybrid" if "nvme" in placement else "sgd")
    seen = []
    for net, model, optimizer, backward in pairs:
        for _ in range(2):
            backward(net(batch(0), range(6)))
            kept = [p.grad for p in model.parameters()]
            views = [g.view(-1)[1:3] for g in kept]
            assigned = torch.ones_like(kept[0])
            next(model.parameters()).grad = assigned
            backward(net(batch(1), range(4)))
            assert all(p.grad is g for p, g in zip(model.parameters(), [assigned, *kept[1:]], strict=True))
            seen.append([g.clone() for g in (*kept, *views, assigned)])
            kept[3].mul_(0.5)
            backward(net(batch(2), range(2, 6)))
            seen.append([g.clone() for g in (*kept, *views, assigned)])
            optimizer.step()
            seen.append([g.clone() for g in (*kept, *views, assigned)])
            optimizer.zero_grad()
            backward(net(batch(3), range(6)))  # which they are no gradients of any more
            seen.append([g.clone() for g in (*kept, *views, assigned)])
            optimizer.step()
            optimizer.zero_grad()
    half = len(seen) // 2
    for expected, actual in zip(seen[:half], seen[half:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))
    assert_equal_states(pairs)


def _keep_on_rank_0() -> tuple[list[Tensor], list[Tensor]]:
    model = make("gpt2")
    module = ElixirModule(model, make_plan(model, world_size=2, **PLACEMENTS["cpu"]), device=torch.device("cpu"))
    optimizer = ElixirOptimizer(module, sgd(model.parameters()))
    optimizer.backward(ZOO["gpt2"].loss(module, 0))
    kept = [p.grad for p in list(model.parameters())[:4]]
    if dist.get_rank() == 1:
        kept.clear()
    optimizer.backward(ZOO["gpt2"].loss(module, 1))
    now = [p.grad.clone() for p in list(model.parameters())[:4]]
    module.close()
    return kept, now


@pytest.mark.full  # a long run with ranks
def test_what_one_rank_keeps_is_added_to() -> None:
    (kept, now), (_, others) = run_ranks(_keep_on_rank_0, 2)
    assert all(torch.equal(a, b) for a, b in zip(kept, now, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(now, others, strict=True))


HOWS = ("optimizer", "module", "model", "inner optimizer", "part")


def fill(how: str, net: Any, model: Any, optimizer: Any) -> None:
    if how == "part":
        model.layers[1].zero_grad(set_to_none=False)
        return
    inner = optimizer.optimizer if isinstance(optimizer, ElixirOptimizer) else optimizer
    owner = {"optimizer": optimizer, "module": net, "model": model, "inner optimizer": inner}[how]
    owner.zero_grad(set_to_none=False)


@crossed(how=HOWS, placement=PLACEMENTS, optimizer=OPTIMIZERS)
def test_zeros_are_gradients(how: str, placement: str, optimizer: str) -> None:
    check_zeros(how, placement, optimizer)


@crossed(told=["model-all on nvme"], how=["optimizer", "model"], placement=["nvme", "all on nvme"])
def test_zeros_are_gradients_on_nvme(how: str, placement: str) -> None:
    check_zeros(how, placement, "hybrid")


def check_zeros(how: str, placement: str, optimizer: str) -> None:
    """Momentum, moments and weight decay act on what `zero_grad(set_to_none=False)` has filled with zeros, also where
    the last step has used it, and where the next backward leaves it alone."""
    pairs = part_pairs(placement, optimizer)
    seen = []
    for net, model, own, backward in pairs:
        backward(net(batch(0), range(6)))
        kept = list(model.parameters())[3].grad
        fill(how, net, model, own)
        seen.append([p.grad.clone() for p in model.parameters()] + [kept.clone()])
        own.step()
        if how == "part":
            own.zero_grad(set_to_none=False)
        else:
            fill(how, net, model, own)
        own.step()  # zeros alone
        own.zero_grad(set_to_none=False)
        backward(net(batch(1), range(2)))
        seen.append([p.grad.clone() for p in model.parameters()] + [kept.clone()])
        kept.add_(0.25)
        own.step()
        own.zero_grad(set_to_none=True)
        own.step()  # nothing
        backward(net(batch(2), range(1, 3)))
        fill(how, net, model, own)
        own.step()
    half = len(seen) // 2
    for expected, actual in zip(seen[:half], seen[half:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))
    assert_equal_states(pairs)


class Failure(Exception):
    pass


def _fail(grad: Tensor) -> Tensor:
    raise Failure


@crossed(how=HOWS[:-1], placement=PLACEMENTS, has_earlier=[False, True])
def test_zeros_of_a_backward_that_failed(how: str, placement: str, has_earlier: bool) -> None:
    """What it had put down is dropped, but it was there: `zero_grad(set_to_none=False)` makes zeros of it."""
    pairs = part_pairs(placement, "adamw")
    for net, model, own, backward in pairs:
        if has_earlier:
            backward(net(batch(0), [0, 3]))
        handle = model.layers[1].register_forward_hook(
            lambda module, inputs, output: output.register_hook(_fail) and None
        )
        with pytest.raises(Failure):
            backward(net(batch(0), range(3)))
        handle.remove()
        fill(how, net, model, own)
        has_grad = [has_earlier, False, True, has_earlier, False, False]
        assert [p.grad is not None for p in model.parameters()] == [has for has in has_grad for _ in range(2)]
        backward(net(batch(1), range(1, 4)))
        own.step()
        fill(how, net, model, own)
        own.step()
    assert_equal_states(pairs)


@pytest.mark.parametrize("how", HOWS[:-1])
def test_zeros_stay_when_they_are_filled_again(how: str) -> None:
    pairs = part_pairs("cpu", "adamw")
    for net, model, own, backward in pairs:
        backward(net(batch(0), range(6)))
        fill(how, net, model, own)
        fill(how, net, model, own)
        assert all(p.grad is not None for p in model.parameters())
        own.step()
    assert_equal_states(pairs)


@pytest.mark.parametrize("placement", ["cpu", "cuda"])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_a_bare_backward_that_failed_hides_no_gradients(placement: str, set_to_none: bool) -> None:
    """Nothing tells that it has raised: what is dropped and written right after that is noticed all the same."""
    pairs = part_pairs(placement, "adamw")
    for net, model, own, _ in pairs:
        net(batch(0), range(6)).backward()
        handle = model.layers[4].register_forward_hook(
            lambda module, inputs, output: output.register_hook(_fail) and None
        )
        with pytest.raises(Failure):
            net(batch(0), range(6)).backward()
        handle.remove()
        model.zero_grad(set_to_none=set_to_none)
        with torch.no_grad():
            model.layers[5].bias.add_(0.25)
        assert [p.grad is None for p in model.parameters()] == [set_to_none] * 12
        net(batch(1), range(1, 4)).backward()
        own.step()
    assert_equal_states(pairs)


def _halves(model: nn.Module, half: int = 6) -> list[torch.optim.Optimizer]:
    parameters = list(model.parameters())
    return [OPTIMIZERS["adamw"](part) for part in (parameters[:half], parameters[half : 2 * half])]


def test_a_failed_backward_and_parameters_of_no_optimizer() -> None:
    """It has mixed gradients of three kinds with its own: each optimizer's count for its step alone."""
    model = parts()
    module = ElixirModule(model, make_plan(model, **PARTS["cpu"]), device=torch.device("cpu"))
    first, second = (ElixirOptimizer(module, inner) for inner in _halves(model, 4))
    first.backward(module(batch(0), range(6)))
    handle = model.layers[0].register_forward_hook(lambda layer, inputs, output: output.register_hook(_fail) and None)
    with pytest.raises(Failure):
        first.backward(module(batch(0), range(6)))
    handle.remove()
    assert module.engine.has_lost_gradients
    first.zero_grad()
    first.step()
    with pytest.raises(StateError, match="all of them were dropped"):
        second.step()
    second.zero_grad()
    second.step()
    module.close()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_zeros_of_two_optimizers(placement: str) -> None:
    """Those of one stay where the other drops its gradients or steps; what a step has dropped becomes zeros."""
    plain, model = parts(), parts()
    module = ElixirModule(model, make_plan(model, **PARTS[placement]), device=torch.device("cpu"))
    ours = [ElixirOptimizer(module, inner) for inner in _halves(model)]
    for net, owns in ((plain, _halves(plain)), (module, ours)):
        net(batch(0), range(6)).backward()
        owns[0].zero_grad(set_to_none=False)
        owns[1].zero_grad(set_to_none=True)
        owns[0].step()
        owns[0].zero_grad(set_to_none=True)
        net(batch(1), range(6)).backward()
        owns[1].zero_grad(set_to_none=False)
        owns[0].step()
        owns[1].step()
        owns[0].zero_grad()
        owns[1].zero_grad()
        net(batch(2), range(6)).backward()
        owns[0].step()
        owns[1].zero_grad(set_to_none=False)
        owns[1].step()
        owns[0].zero_grad()
    state = module.state_dict()
    assert [name for name, value in plain.state_dict().items() if not torch.equal(state[name], value)] == []


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_zeros_that_users_hold_stay_over_the_step_of_another_optimizer(placement: str) -> None:
    plain, model = parts(), parts()
    module = ElixirModule(model, make_plan(model, **PARTS[placement]), device=torch.device("cpu"))
    ours = [ElixirOptimizer(module, inner) for inner in _halves(model)]
    for net, owned, owns in ((plain, plain, _halves(plain)), (module, model, ours)):
        net(batch(0), range(6)).backward()
        owns[1].zero_grad(set_to_none=False)
        held = owned.layers[4].weight.grad
        owns[0].step()
        assert held is owned.layers[4].weight.grad
        held.add_(0.5)
        owns[1].step()
    state = module.state_dict()
    assert [name for name, value in plain.state_dict().items() if not torch.equal(state[name], value)] == []


@pytest.mark.parametrize("has_other", [False, True])
def test_zeros_that_users_hold_show_nothing_of_a_backward_that_failed(has_other: bool) -> None:
    model = parts()
    module = ElixirModule(model, make_plan(model, **PARTS["cpu"]), device=torch.device("cpu"))
    owns = [ElixirOptimizer(module, inner) for inner in _halves(model)[: 1 + has_other]]
    owns[0].backward(module(batch(0), range(6)))
    model.zero_grad(set_to_none=False)
    held = model.layers[2].weight.grad
    assert held is not None
    owns[0].backward(module(batch(0), range(6)))
    assert bool(held.any())
    handle = model.layers[0].register_forward_hook(lambda layer, inputs, output: output.register_hook(_fail) and None)
    with pytest.raises(Failure):
        owns[0].backward(module(batch(0), range(6)))
    handle.remove()
    assert module.engine.has_lost_gradients
    assert model.layers[2].weight.grad is held
    assert not bool(held.any())
    with pytest.raises(StateError, match="had been mixed with its own"):
        owns[0].step()
    module.close()


def _lost_on_ranks() -> list[str]:
    """On each rank, gradients of another optimizer are lost, with others of none."""
    model = parts()
    module = ElixirModule(model, make_plan(model, world_size=2, **PLACEMENTS["cpu"]), device=torch.device("cpu"))
    owns = [ElixirOptimizer(module, inner) for inner in _halves(model, 4)]
    layers = [4, 1, 5] if dist.get_rank() == 0 else [4, 3, 5]
    owns[0].backward(module(batch(0), layers))
    handle = model.layers[4].register_forward_hook(lambda layer, inputs, output: output.register_hook(_fail) and None)
    with pytest.raises(Failure):
        owns[0].backward(module(batch(0), layers))
    handle.remove()
    told = []
    for own in owns:
        with pytest.raises(StateError) as caught:
            own.step()
        told.append(str(caught.value))
    model.zero_grad()
    owns[0].step()
    module.close()
    return told


def test_what_one_rank_has_lost_is_lost_for_the_steps_of_all() -> None:
    first, second = run_ranks(_lost_on_ranks, 2)
    assert first == second
    assert all("had been mixed with its own" in text for text in first)


def _two_optimizers_on_ranks() -> dict[str, Tensor]:
    """One rank alone has gradients of the second optimizer."""
    model = parts()
    module = ElixirModule(model, make_plan(model, world_size=2, **PLACEMENTS["cpu"]), device=torch.device("cpu"))
    owns = [ElixirOptimizer(module, inner) for inner in _halves(model)]
    owns[0].backward(module(batch(0), [0] if dist.get_rank() == 0 else [4]))
    owns[0].zero_grad()
    owns[1].step()
    state = copy.copy(module.state_dict())
    module.close()
    return state


def test_zero_grad_of_one_of_two_optimizers_on_ranks() -> None:
    plain = parts()
    (plain(batch(0), [4]) / 2).backward()
    _halves(plain)[1].step()
    for state in run_ranks(_two_optimizers_on_ranks, 2):
        assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


def test_zeros_are_seen_in_whole_gradients_and_norms() -> None:
    _, (module, model, optimizer, backward) = part_pairs("cpu", "sgd")
    backward(module(batch(0), range(3)))
    optimizer.zero_grad(set_to_none=False)
    grads = module.full_grads()
    assert set(grads) == {name for name, _ in model.named_parameters() if int(name.split(".")[1]) < 3}
    assert all(not bool(grad.any()) for grad in grads.values())
    assert float(optimizer.grad_norm()) == 0.0
    optimizer.zero_grad()
    assert module.full_grads() == {}


def _fill_on_ranks(how: str) -> dict[str, Tensor]:
    """Each rank uses other layers."""
    rank, model = dist.get_rank(), parts()
    module = ElixirModule(model, make_plan(model, world_size=2, **PLACEMENTS["cpu"]), device=torch.device("cpu"))
    own = ElixirOptimizer(module, OPTIMIZERS["adamw"](model.parameters()))
    own.backward(module(batch(0), [0, rank + 1]))
    fill(how, module, model, own)
    assert [p.grad is None for p in model.parameters()] == [False] * 6 + [True] * 6
    own.step()
    fill(how, module, model, own)
    own.step()
    state = copy.copy(module.state_dict())
    module.close()
    return state


@pytest.mark.parametrize("how", HOWS[:-1])
def test_zeros_of_several_ranks(how: str) -> None:
    plain = parts()
    oracle = OPTIMIZERS["adamw"](plain.parameters())
    for p in list(plain.parameters())[:6]:
        p.grad = torch.zeros_like(p)
    oracle.step()
    oracle.step()
    expected = plain.state_dict()
    for state in run_ranks(_fill_on_ranks, 2, how):
        assert all(torch.equal(state[name], value) for name, value in expected.items())


def _clip_plainly(kind: str, parameters: list[nn.Parameter]) -> None:
    if kind == "value":
        torch.nn.utils.clip_grad_value_(parameters, 1e-3)
    else:
        clip_exactly(parameters, 1e-2)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("kinds", [("norm", "value"), ("value", "norm")])
@pytest.mark.parametrize("is_held", [False, True])
def test_clipping_between_micro_batches(placement: str, kinds: tuple[str, str], is_held: bool) -> None:
    """What is clipped is what there is: not what later backwards add."""
    pairs = part_pairs(placement, "sgd")
    for net, model, own, backward in pairs:
        for step in range(2):
            held: list[Any] = []
            for micro, kind in enumerate((*kinds, "norm")):
                backward(net(batch(3 * step + micro), range(6)))
                if is_held:
                    held = held or [p.grad for p in model.parameters()]
                if net is model:
                    _clip_plainly(kind, list(model.parameters()))
                elif kind == "value":
                    own.clip_grad_value_(1e-3)
                else:
                    own.clip_grad_norm_(1e-2)
            own.step()
            own.zero_grad()
    assert_equal_states(pairs)


def test_a_loss_scale_and_clipping_between_micro_batches() -> None:
    """A power of two shows nowhere; gradients that come later are scaled, as those that were clipped."""
    states = []
    for scale in (1.0, 1024.0):
        model = parts()
        module = ElixirModule(model, make_plan(model, **PLACEMENTS["cpu"]), device=torch.device("cpu"))
        module.needs_loss_scale = True  # which only fp16 has, on a GPU
        own = ElixirOptimizer(module, sgd(model.parameters()), initial_scale=scale)
        own.backward(module(batch(0), range(6)))
        own.clip_grad_value_(1e-3)
        own.backward(module(batch(1), range(6)))
        own.clip_grad_norm_(1e-2)
        next(model.parameters()).grad[0].add_(1e-3)  # has the shards unscaled
        own.backward(module(batch(2), range(6)))
        own.step()
        states.append(copy.copy(module.state_dict()))
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


def test_16_bits_keep_their_bits_when_what_is_held_is_clipped() -> None:
    states = []
    for is_held in (False, True):
        model = make("gpt2")
        plan = make_plan(model, compute_dtype=torch.bfloat16, **PLACEMENTS["cpu"])
        module = ElixirModule(model, plan, dtype=torch.bfloat16, device=torch.device("cpu"))
        optimizer = ElixirOptimizer(module, sgd(model.parameters()))
        for micro in range(3):
            optimizer.backward(ZOO["gpt2"].loss(module, micro))
            held = [p.grad for p in model.parameters()] if is_held else []
            optimizer.clip_grad_norm_(0.05)
        optimizer.step()
        assert bool(held) == is_held
        states.append(copy.copy(module.state_dict()))
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


def test_no_update_begins_inside_backward_where_what_is_added_can_be_seen() -> None:
    model = make("gpt2")
    options = {**PLACEMENTS["cpu"], "update_timing": UpdateTiming.INSIDE_BACKWARD, "can_stream": True}
    plan = make_plan(model, compute_dtype=torch.bfloat16, **options)
    module = ElixirModule(model, plan, dtype=torch.bfloat16, device=torch.device("cpu"))
    optimizer = ElixirOptimizer(module, HybridAdam(model.parameters(), lr=1e-2))
    for step in range(3):
        optimizer.backward(ZOO["gpt2"].loss(module, 10 + step))
        parameter = next(iter(model.parameters()))
        held = parameter.grad
        with optimizer.unobserved():
            optimizer.backward(ZOO["gpt2"].loss(module, step))
            assert parameter.grad is held
            optimizer.step()
        optimizer.zero_grad()


def _linears(world_size: int) -> tuple[nn.Module, ElixirModule]:
    seed_torch(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    plan = make_plan(model, world_size=world_size, placement_policy="cpu", chunk_size=2048)
    return model, ElixirModule(model, plan, device="cpu")


def _one_rank_keeps_a_gradient(is_kept: bool) -> list[Any]:
    model, module = _linears(2)
    kinds = [[p for p in model.parameters() if p.dim() == dims] for dims in (2, 1)]
    optimizers = [ElixirOptimizer(module, torch.optim.SGD(parameters, lr=0.1)) for parameters in kinds]
    left: list[Any] = []
    for seed in range(2):
        seed_torch(seed)
        optimizers[0].backward(module(torch.randn(4, 16)).square().mean())
        kept = model[0].bias.grad  # type: ignore[index]
        if not is_kept or dist.get_rank():
            del kept
        for optimizer in optimizers:
            optimizer.step()
        left += [module.engine.store[c.id].grad is None for c in module.plan.chunks]
        left += [p.grad is None for p in model.parameters()]
    return [left, module.full_state_dict(rank0_only=False)]


@pytest.mark.parametrize("is_kept", [False, True])
def test_ranks_agree_whatever_one_of_them_keeps(is_kept: bool) -> None:
    """Two optimizers share the chunks; whether their gradients are there is the same on both ranks."""
    found = run_ranks(_one_rank_keeps_a_gradient, 2, is_kept)
    assert all(all(left) for left, _ in found)
    assert all(torch.equal(found[0][1][name], value) for name, value in found[1][1].items())


def _write_to_a_clipped_slice(is_written: bool) -> dict[str, Tensor]:
    model, module = _linears(2)
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.1))
    for seed in range(2):
        seed_torch(seed)
        optimizer.backward(module(torch.randn(4, 16)).square().mean())
        if not seed:
            optimizer.grad_norm()  # from now on a step that does not clip computes it
        else:
            optimizer.clip_grad_value_(1e-3)
        if is_written:
            model[0].bias.grad.mul_(0.5)  # type: ignore[index, union-attr]
        optimizer.step()
        optimizer.zero_grad()
    return module.full_state_dict(rank0_only=False)


def test_a_clipped_gradient_of_which_one_rank_has_the_slice_is_written() -> None:
    """That rank clips at once, what it has; the other one in the step. Both, or neither, compute the norm in it."""
    plain, written = (run_ranks(_write_to_a_clipped_slice, 2, is_written) for is_written in (False, True))
    assert all(torch.equal(written[0][name], value) for name, value in written[1].items())
    assert not torch.equal(plain[0]["0.bias"], written[0]["0.bias"])


def _write_to_zeros() -> list[Any]:
    model, module = _linears(2)
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.backward(module(torch.randn(4, 16)).square().mean())
    optimizer.zero_grad(set_to_none=False)
    gradient = model[0].bias.grad  # type: ignore[index]
    assert gradient is not None
    gradient.add_(2.0)
    return [module.full_grads(), gradient]


def test_whole_gradients_where_one_rank_has_written_to_zeros() -> None:
    """The other one, which has no part of what was written, has no memory for gradients of the chunk."""
    for grads, gradient in run_ranks(_write_to_zeros, 2):
        assert torch.equal(grads["0.bias"], torch.full((16,), 2.0))
        assert torch.equal(gradient, torch.full((16,), 2.0))
        assert not grads["2.weight"].any()

"""Ordinary torch calls on managed parameters: they do what they do in plain PyTorch, or say why not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import checkpoint as checkpoints
from torch.utils.flop_counter import FlopCounterMode

from lightning_elixir.errors import PlanError, StateError
from lightning_elixir.optim import HybridAdam
from lightning_elixir.runtime.reducer import Reducer
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.dist import run_processes, run_ranks
from tests.helpers.plans import make_plan
from tests.helpers.seeds import seed_torch
from tests.helpers.tiers import crossed
from tests.helpers.user_access import CPU, OPTIONS, PLACEMENTS, RESIDENT, TIGHT, step, wrapped
from tests.helpers.zoo import ZOO, make


@crossed(how=["module", "model", "part", "inner optimizer", "attribute"], options=OPTIONS)
def test_zero_grad_drops_gradients(options: dict[str, Any], how: str) -> None:
    plain, (model, module, optimizer) = make("gpt2"), wrapped(**options)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=False)

    def clear(net: Any, own: Any) -> None:
        if how == "module":
            (module if net is model else net).zero_grad()
        elif how == "model":
            net.zero_grad()
        elif how == "part":
            net.transformer.h[1].zero_grad()
        elif how == "inner optimizer":
            own.zero_grad()
        else:
            for p in net.transformer.h[0].parameters():
                p.grad = None

    ZOO["gpt2"].loss(plain, 0).backward()
    optimizer.backward(ZOO["gpt2"].loss(module, 0))
    clear(plain, plain_optimizer)
    clear(model, optimizer.optimizer)
    ZOO["gpt2"].loss(plain, 1).backward()
    optimizer.backward(ZOO["gpt2"].loss(module, 1))
    grads = module.full_grads()
    assert [name for name, p in plain.named_parameters() if not torch.equal(grads[name], p.grad)] == []
    plain_optimizer.step()
    optimizer.step()
    state = module.full_state_dict()
    assert [k for k, v in plain.state_dict().items() if not torch.equal(state[k], v)] == []


@PLACEMENTS
def test_a_gradient_that_was_never_taken_over_is_dropped(options: dict[str, Any]) -> None:
    """Where a hook of the user's, or Ctrl-C, comes between autograd and the engine, `.grad` stays where it was put; the
    next backward would add to it."""
    plain = make("gpt2")
    model = copy.deepcopy(plain)
    is_failing = True

    def fail(parameter: Tensor) -> None:
        if is_failing:
            raise KeyError("of the user")

    model.transformer.h[1].mlp.c_fc.bias.register_post_accumulate_grad_hook(fail)
    module = ElixirModule(model, make_plan(model, **options), device=CPU)
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(KeyError, match="of the user"):
        optimizer.backward(ZOO["gpt2"].loss(module, 0))
    optimizer.zero_grad()
    is_failing = False
    optimizer.backward(ZOO["gpt2"].loss(module, 1))
    ZOO["gpt2"].loss(plain, 1).backward()
    grads = module.full_grads()
    assert [name for name, p in plain.named_parameters() if not torch.equal(grads[name], p.grad)] == []


class Hidden:
    """An output in which nobody finds tensors: its backward shows at the first gradient only."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Hiding(nn.Sequential):
    def forward(self, x: Tensor) -> Hidden:
        return Hidden(super().forward(x))


def test_a_bare_backward_that_fails_before_it_is_noticed_leaves_nothing() -> None:
    seed_torch(0)
    plain = Hiding(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    model, x = copy.deepcopy(plain), torch.randn(3, 8)
    module = ElixirModule(model, make_plan(model, placement_policy="cpu", chunk_size=1024), device=CPU)
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = module(x).logits.square().mean()
    with torch.no_grad():
        model[2].bias.mul_(1.0)
    with pytest.raises(StateError, match=r"written inside forward and backward: 2\.bias"):
        loss.backward()
    optimizer.zero_grad()
    module(x).logits.square().mean().backward()
    plain(x).logits.square().mean().backward()
    grads = module.full_grads()
    assert [name for name, p in plain.named_parameters() if not torch.equal(grads[name], p.grad)] == []


class Changing(nn.Module):
    """Does something to its layers in the middle of a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])
        self.change: Callable[[nn.Module], Any] | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        if self.change is not None:
            self.change(self.layers[2])
        return self.layers[3](x)


def _assign(layer: nn.Module) -> None:
    layer.weight.data = layer.weight.data * 2


@pytest.mark.parametrize("change", [_assign, nn.Module.half, nn.Module.double])
@pytest.mark.parametrize("placement", ["cpu", "cuda"])
@pytest.mark.parametrize("is_training", [True, False])
def test_parameters_that_are_assigned_inside_forward(change: Any, placement: str, is_training: bool) -> None:
    """An error, since the chunk goes on with its own values; and as if it had not been afterwards."""
    seed_torch(0)
    plain = Changing()
    model, x = copy.deepcopy(plain), torch.randn(3, 16)
    module = ElixirModule(model, make_plan(model, placement_policy=placement, chunk_size=2048), device=CPU)
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.1))
    model.change = change
    with pytest.raises(StateError, match=r"inside forward .*layers\.2\.weight"), torch.set_grad_enabled(is_training):
        module(x)
    model.change = None
    optimizer.zero_grad()
    optimizer.backward(module(x).square().mean())
    plain(x).square().mean().backward()
    grads = module.full_grads()
    assert [name for name, p in plain.named_parameters() if not torch.equal(grads[name], p.grad)] == []
    module.close()


@pytest.mark.parametrize("placement", ["cpu", "cuda"])
@pytest.mark.parametrize("write", [lambda data: data.mul_(0.5), lambda data: data.view(-1)[3:].add_(1.0)])
def test_writes_through_data_inside_forward(write: Callable[[Tensor], Any], placement: str) -> None:
    """Where the replica holds the values they count as in plain PyTorch; elsewhere they would be lost, and are an
    error. Reading is none."""
    seed_torch(0)
    plain = Changing()
    model, x = copy.deepcopy(plain), torch.randn(3, 16)
    module = ElixirModule(model, make_plan(model, placement_policy=placement, chunk_size=2048), device=CPU)
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.1))
    model.change = plain.change = lambda layer: layer.weight.data.sum()
    for i in range(2):
        if i:
            model.change = plain.change = lambda layer: write(layer.weight.data)
        loss = plain(x).square().mean()
        loss.backward()
        if i and placement == "cpu":
            with pytest.raises(StateError, match=r"written inside forward: layers\.2\.weight"):
                module(x)
            optimizer.zero_grad()
            model.change = None
            continue
        found = module(x).square().mean()
        optimizer.backward(found)
        assert torch.equal(found, loss)
        optimizer.zero_grad()
    for i, layer in enumerate(plain.layers):
        is_written = i == 2 and placement == "cuda"
        assert torch.equal(model.layers[i].weight, layer.weight) is (i != 2 or is_written)
    module.close()


class Limited(nn.Module):
    """Limits its layers' weights in each forward, as Gemma 3n does, or from some call on; each is recomputed."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.use_reentrant = use_reentrant
        self.limit: float = 120.0
        self.first = 0
        self.num_calls = 0

    def _layer(self, number: int, x: Tensor) -> Tensor:
        layer = self.layers[number]
        if self.num_calls >= self.first:
            layer.weight.data.clamp_(-self.limit, self.limit)
        self.num_calls += 1
        return layer(x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        for number in range(len(self.layers)):
            x = checkpoints.checkpoint(partial(self._layer, number), x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputations_may_write_what_is_there(use_reentrant: bool, dtype: torch.dtype) -> None:
    seed_torch(0)
    plain = Limited(use_reentrant)
    model = copy.deepcopy(plain)
    plain.to(dtype)
    plan = replace(make_plan(model, placement_policy="cpu", chunk_size=1024, compute_dtype=dtype), rcache_blocks=2)
    module = ElixirModule(model, plan, dtype=dtype, device=CPU)
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.0))
    for _ in range(3):
        x = torch.randn(3, 16, dtype=dtype, requires_grad=True)
        plain.zero_grad()
        plain(x).square().mean().backward()
        optimizer.backward(module(x).square().mean())
        grads = module.full_grads()
        assert [name for name, p in plain.named_parameters() if not torch.equal(grads[name], p.grad)] == []
        optimizer.step()
        optimizer.zero_grad()
    assert module.stats().evictions > 0
    model.first, model.num_calls, model.limit = len(model.layers), 0, 0.01  # in recomputations alone
    loss = module(x).square().mean()
    with pytest.raises(StateError, match=r"written inside forward and backward: layers\.\d\.weight"):
        optimizer.backward(loss)
    optimizer.zero_grad()
    model.first = 0
    with pytest.raises(StateError, match=r"written inside forward: layers\.\d\.weight"):
        module(x)
    module.close()


def test_stepping_a_plain_optimizer_is_an_error() -> None:
    model, module, optimizer = wrapped(**TIGHT)
    optimizer.backward(ZOO["gpt2"].loss(module, 0))
    with pytest.raises(StateError, match="Step the ElixirOptimizer .*what setup has returned under Fabric"):
        optimizer.optimizer.step()
    with pytest.raises(StateError, match="Step the ElixirOptimizer"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    optimizer.step()


def test_the_norm_is_that_of_the_optimizers_parameters() -> None:
    plain = make("gpt2")
    chosen = [p for name, p in plain.named_parameters() if "mlp" in name]
    ZOO["gpt2"].loss(plain, 0).backward()
    expected = nn.utils.clip_grad_norm_(chosen, 0.1)
    plain_optimizer = torch.optim.SGD(chosen, lr=0.1)
    plain_optimizer.step()
    model = make("gpt2")
    module = ElixirModule(model, make_plan(model, **TIGHT), device=CPU)
    inner = torch.optim.SGD([p for name, p in model.named_parameters() if "mlp" in name], lr=0.1)
    optimizer = ElixirOptimizer(module, inner)
    optimizer.backward(ZOO["gpt2"].loss(module, 0))
    torch.testing.assert_close(optimizer.clip_grad_norm_(0.1), expected, rtol=1e-6, atol=0)
    optimizer.step()
    torch.testing.assert_close(module.full_state_dict(), dict(plain.state_dict()), rtol=1e-6, atol=1e-7)


def _two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    of_mlps = [p for name, p in model.named_parameters() if "mlp" in name]
    others = [p for name, p in model.named_parameters() if "mlp" not in name]
    return [torch.optim.SGD(chosen, lr=0.1, momentum=0.9) for chosen in (of_mlps, others)]


@PLACEMENTS
def test_two_optimizers_one_after_the_other(options: dict[str, Any]) -> None:
    """As with a generator and its critic: each has its own backward."""
    plain, model = make("gpt2"), make("gpt2")
    module = ElixirModule(model, make_plan(model, **options), device=CPU)
    plain_ones, ours = _two_optimizers(plain), [ElixirOptimizer(module, o) for o in _two_optimizers(model)]
    for seed in range(4):
        plain_ones[seed % 2].zero_grad()
        ours[seed % 2].zero_grad()
        ZOO["gpt2"].loss(plain, seed).backward()
        ours[seed % 2].backward(ZOO["gpt2"].loss(module, seed))
        plain_ones[seed % 2].step()
        ours[seed % 2].step()
    state = module.full_state_dict()
    assert [k for k, v in plain.state_dict().items() if not torch.equal(state[k], v)] == []


@PLACEMENTS
def test_chunks_of_two_optimizers_drop_their_gradients_as_one(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One backward, then both steps: nothing is filled with zeros, and nothing is left to add the next gradients to,
    for which sums in fp32 would be made."""
    rewritten: list[int] = []
    rewrite = Reducer.rewrite
    monkeypatch.setattr(
        Reducer, "rewrite", lambda self, chunk, *rest: (rewritten.append(chunk.id), rewrite(self, chunk, *rest))
    )
    plain, model = make("gpt2"), make("gpt2")
    module = ElixirModule(model, make_plan(model, **options), device=CPU)
    plain_ones, ours = _two_optimizers(plain), [ElixirOptimizer(module, o) for o in _two_optimizers(model)]
    for seed in range(3):
        ZOO["gpt2"].loss(plain, seed).backward()
        ours[0].backward(ZOO["gpt2"].loss(module, seed))
        for ones in (plain_ones, ours):
            for one in ones:
                one.step()
                one.zero_grad()
        assert all(module.engine.store[chunk.id].grad is None for chunk in module.plan.chunks)
    assert rewritten == []
    assert not module.engine.reducer.landing.accumulates
    state = module.full_state_dict()
    assert [k for k, v in plain.state_dict().items() if not torch.equal(state[k], v)] == []


@PLACEMENTS
@pytest.mark.parametrize("num_backwards", [1, 2])
def test_gradients_that_are_taken_out_and_set_again(options: dict[str, Any], num_backwards: int) -> None:
    """Each is dropped before it is set, and nobody keeps what was set."""
    plain, model = make("gpt2"), make("gpt2")
    module = ElixirModule(model, make_plan(model, **options), device=CPU)
    oracle = torch.optim.SGD(plain.parameters(), lr=0.1)
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.1))
    for seed in range(2):
        for number in range(num_backwards):
            ZOO["gpt2"].loss(plain, 2 * seed + number).backward()
            optimizer.backward(ZOO["gpt2"].loss(module, 2 * seed + number))
            for net in (plain, model):
                for parameter in net.parameters():
                    grad = parameter.grad
                    assert grad is not None
                    parameter.grad = None
                    parameter.grad = 2 * grad
                    del grad
        for one in (oracle, optimizer):
            one.step()
            one.zero_grad()
        state = module.full_state_dict()
        assert [k for k, v in plain.state_dict().items() if not torch.equal(state[k], v)] == []


@PLACEMENTS
def test_zero_grad_of_one_of_two_optimizers_leaves_the_others_gradients(options: dict[str, Any]) -> None:
    plain, model = make("gpt2"), make("gpt2")
    module = ElixirModule(model, make_plan(model, **options), device=CPU)
    plain_ones, ours = _two_optimizers(plain), [ElixirOptimizer(module, o) for o in _two_optimizers(model)]
    ZOO["gpt2"].loss(plain, 0).backward()
    ours[1].backward(ZOO["gpt2"].loss(module, 0))
    plain_ones[0].zero_grad()
    ours[0].zero_grad()
    assert sorted(module.full_grads()) == sorted(n for n, p in plain.named_parameters() if p.grad is not None)
    plain_ones[1].step()
    ours[1].step()
    state = module.full_state_dict()
    assert [k for k, v in plain.state_dict().items() if not torch.equal(state[k], v)] == []


@PLACEMENTS
def test_a_step_leaves_the_gradients_of_another_optimizer(options: dict[str, Any]) -> None:
    """As plain PyTorch: those of two backwards, read, clipped and stepped after the other's step."""
    plain, model = make("gpt2"), make("gpt2")
    module = ElixirModule(model, make_plan(model, **options), device=CPU)
    ours = [ElixirOptimizer(module, o) for o in _two_optimizers(model)]
    grads: list[list[Tensor]] = []
    for net, body, (first, second) in ((plain, plain, _two_optimizers(plain)), (module, model, ours)):
        for seed in range(4):
            ZOO["gpt2"].loss(net, seed).backward()
            first.step()
            first.zero_grad()
            if seed % 2:
                grads.append([p.grad.clone() for p in body.parameters() if p.grad is not None])
                if seed == 3:
                    second.zero_grad(set_to_none=False)
                second.step()
                second.zero_grad()
    state = module.full_state_dict()
    assert [k for k, v in plain.state_dict().items() if not torch.equal(state[k], v)] == []
    assert all(torch.equal(a, b) for x, y in zip(grads[:2], grads[2:], strict=True) for a, b in zip(x, y, strict=True))


@PLACEMENTS
def test_a_group_counts_as_soon_as_it_is_added(options: dict[str, Any]) -> None:
    """In the norm of the next step, and for a state that is loaded, and not only from that step on."""
    plain, (model, module, _) = make("gpt2"), wrapped(**options)
    first, late = ([n for n, _ in plain.named_parameters() if ("mlp" in n) is is_late] for is_late in (False, True))

    def begin(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([net.get_parameter(n) for n in first], lr=0.1, momentum=0.9)

    def grow(own: torch.optim.Optimizer, net: nn.Module) -> None:
        own.add_param_group({"params": [net.get_parameter(n) for n in late], "lr": 0.05})

    plain_optimizer, optimizer = begin(plain), ElixirOptimizer(module, begin(model))
    grow(plain_optimizer, plain)
    grow(optimizer, model)
    for seed in range(2):
        ZOO["gpt2"].loss(plain, seed).backward()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        optimizer.backward(ZOO["gpt2"].loss(module, seed))
        torch.testing.assert_close(optimizer.clip_grad_norm_(0.1), expected, rtol=1e-6, atol=0)
        optimizer.step()
    torch.testing.assert_close(module.full_state_dict(), dict(plain.state_dict()), rtol=1e-6, atol=1e-7)

    another, again, _ = wrapped(**options)
    resumed = ElixirOptimizer(again, begin(another))
    grow(resumed, another)
    resumed.load_state_dict(plain_optimizer.state_dict())
    state, loaded = plain_optimizer.state_dict()["state"], resumed.state_dict()["state"]
    assert state.keys() == loaded.keys()
    assert [i for i in state if not torch.equal(state[i]["momentum_buffer"], loaded[i]["momentum_buffer"])] == []


def test_an_optimizer_that_has_stepped_keeps_its_state() -> None:
    plain, model = make("gpt2"), make("gpt2")
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=False) for m in (plain, model)]
    for net, own in zip((plain, model), optimizers, strict=True):
        step(net, own, 0)
    for p in model.parameters():
        p.grad = None
    module = ElixirModule(model, make_plan(model, **TIGHT), device=CPU)
    optimizer = ElixirOptimizer(module, optimizers[1])
    for seed in range(1, 4):
        assert step(module, optimizer, seed) == step(plain, optimizers[0], seed)


@PLACEMENTS
def test_state_dict_of_the_model_after_a_write(options: dict[str, Any]) -> None:
    model, module, _ = wrapped(**options)
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight.fill_(7.0)
    assert bool((model.state_dict()["transformer.h.1.mlp.c_fc.weight"] == 7.0).all())
    module.close()


@PLACEMENTS
def test_aliases_kept_over_steps(options: dict[str, Any]) -> None:
    plain, (model, module, optimizer) = make("gpt2"), wrapped(**options)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=False)
    kept = [
        [net.transformer.h[0].mlp.c_fc.weight.data, net.transformer.h[2].ln_1.bias.detach()] for net in (plain, model)
    ]
    for seed in range(4):
        assert step(module, optimizer, seed) == step(plain, plain_optimizer, seed)
        assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))
        for aliases in kept:
            for alias in aliases:
                alias.mul_(0.9)
    state = module.full_state_dict()
    assert [k for k, v in plain.state_dict().items() if not torch.equal(state[k], v)] == []


@PLACEMENTS
def test_aliases_keep_what_an_assignment_replaces(options: dict[str, Any]) -> None:
    """As plain PyTorch, where the parameter gets other storage; before that, and for others, an alias follows it."""
    plain = make("gpt2")
    model, module, optimizer = wrapped(**options)
    seen = []
    for net in (plain, model):
        weight, bias = net.transformer.h[0].mlp.c_fc.weight, net.transformer.h[0].mlp.c_fc.bias
        kept, detached, other = weight.data, weight.detach(), bias.data
        with torch.no_grad():
            weight.add_(1.0)
            weight.data = weight.data  # nothing happens
            bias.mul_(3.0)
        before = kept.clone()
        weight.data = torch.full_like(weight, 0.25)
        with torch.no_grad():
            weight.mul_(2.0)
            kept.add_(1.0)  # of no parameter any more
        seen.append([before, kept.clone(), detached.clone(), other.clone(), weight.detach().clone()])
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
    assert float(seen[1][4].max()) == 0.5


@PLACEMENTS
def test_numpy_views_do_no_harm(options: dict[str, Any]) -> None:
    plain, (model, module, optimizer) = make("gpt2"), wrapped(**options)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=False)
    for seed in range(3):
        assert step(module, optimizer, seed) == step(plain, plain_optimizer, seed)
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            assert a.detach().cpu().numpy().sum() == b.detach().cpu().numpy().sum()
    module.close()


SHARING: dict[str, Callable[[nn.Module], object]] = {
    "model": lambda model: model.share_memory(),
    "parameter": lambda model: model.transformer.h[0].mlp.c_fc.weight.share_memory_(),  # type: ignore[union-attr, operator, index]
    "storage": lambda model: model.transformer.h[0].mlp.c_fc.weight.untyped_storage().share_memory_(),  # type: ignore[union-attr, operator, index]
}


def share(options: dict[str, Any], how: str) -> None:
    """Run by a process of its own, which a storage that is emptied and filled again would end."""
    plain, (model, module, optimizer) = make("gpt2"), wrapped(**options)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=False)
    for seed in range(4):
        assert step(module, optimizer, seed) == step(plain, plain_optimizer, seed)
        if seed == 1:
            SHARING[how](model)
    weight = model.transformer.h[0].mlp.c_fc.weight
    assert weight.is_shared()
    state = module.full_state_dict()
    assert [k for k, v in plain.state_dict().items() if not torch.equal(state[k], v)] == []
    module.close()


@pytest.mark.full  # processes that import torch themselves
@crossed(told=["cpu-model"], options=[pytest.param(TIGHT, id="cpu"), pytest.param(RESIDENT, id="cuda")], how=SHARING)
def test_parameters_in_shared_memory_stay_there_and_are_right(options: dict[str, Any], how: str) -> None:
    assert run_processes(f"from tests.runtime.test_user_habits import share; share({options!r}, {how!r})", 1) == [0]


@PLACEMENTS
def test_parameters_cannot_be_swapped(options: dict[str, Any]) -> None:
    """Their object would go, with another's values in it, and training would go on with values that nobody sees."""
    model, module, optimizer = wrapped(**options)
    before = module.full_state_dict()
    weight = model.transformer.h[0].mlp.c_fc.weight
    other = nn.Parameter(torch.zeros(weight.shape))
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(weight, other)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with pytest.raises(RuntimeError, match="Couldn't swap"):
            model.double()
        plain = make("gpt2")
        plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=False)
        state = module.full_state_dict()
        assert [k for k, v in before.items() if not torch.equal(state[k], v)] == []
        assert step(module, optimizer, 0) == step(plain, plain_optimizer, 0)
        with pytest.raises(RuntimeError, match="weakref"):
            model.load_state_dict(before)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    module.close()


def test_copies_are_plain_and_second_wrapping_is_refused() -> None:
    model, module, _ = wrapped(**TIGHT)
    copied = copy.deepcopy(module)
    assert type(copied) is type(model)
    assert all(type(p) is nn.Parameter for p in copied.parameters())
    with pytest.raises(StateError, match="managed by lightning_elixir already"):
        ElixirModule(model, make_plan(make("gpt2"), **TIGHT), device=CPU)


class Extra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.layer(x)

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def test_extra_state_and_nested_modules() -> None:
    seed_torch(0)
    model = Extra()
    module = ElixirModule(model, make_plan(model, **TIGHT), device=CPU)
    module(torch.zeros(1, 8))
    state = module.state_dict()
    model.seen = 9
    module.load_state_dict(state)
    assert model.seen == 1
    outer = nn.ModuleDict({"body": module, "head": nn.Linear(8, 2)})
    assert set(outer.state_dict()) == {"body." + k for k in state} | {"head.weight", "head.bias"}
    with pytest.raises(PlanError, match="unexpected"):
        module.load_state_dict({**state, "nonsense": torch.zeros(1)})


def statistics_of_ranks() -> Tensor:
    rank = dist.get_rank()
    seed_torch(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    module = ElixirModule(model, make_plan(model, world_size=2, **TIGHT), device=CPU)
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.1))
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        optimizer.backward(module(torch.randn(6, 4, generator=generator)).square().mean())
        optimizer.step()
    module.eval()
    with torch.no_grad():
        result: Tensor = module(torch.ones(2, 4))
    module.close()
    return result


def test_running_statistics_are_those_of_rank_0_as_in_ddp() -> None:
    first, second = run_ranks(statistics_of_ranks, 2)
    assert torch.equal(first, second)


def test_layers_that_write_their_weight_in_forward_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, max_norm=1.0), nn.Linear(4, 4))
    with pytest.raises(PlanError, match="0: max_norm"):
        ElixirModule(model, make_plan(model, **TIGHT), device=CPU)


def _keep_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> checkpoints.CheckpointPolicy:
    is_kept = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return checkpoints.CheckpointPolicy.MUST_SAVE if is_kept else checkpoints.CheckpointPolicy.PREFER_RECOMPUTE


class SelectivelyCheckpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(48, 48), nn.Tanh(), nn.LayerNorm(48)) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)  # so that its chunks are there when the region begins, and are not when it is run again
            x = x + checkpoints.checkpoint(
                block,
                x,
                use_reentrant=False,
                context_fn=lambda: checkpoints.create_selective_checkpoint_contexts(_keep_products),
            )
        return x


def test_dispatch_modes_see_the_users_operators_alone() -> None:
    """Selective checkpointing counts operators, and raised where the engine's came between."""
    seed_torch(0)
    plain = SelectivelyCheckpointed()
    model = copy.deepcopy(plain)
    plan = replace(make_plan(model, placement_policy="cpu", chunk_size=16 * 1024), rcache_blocks=2)
    module = ElixirModule(model, plan, device=CPU)
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.1))
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for seed in range(3):
        x = torch.randn(5, 48, generator=torch.Generator().manual_seed(seed))
        counts = []
        for net, own in ((plain, plain_optimizer), (module, optimizer)):
            with FlopCounterMode(display=False) as counter:
                loss = net(x).square().mean()
                loss.backward()
            own.step()
            own.zero_grad()
            counts.append(counter.get_total_flops())
        assert counts[0] == counts[1]
    assert module.stats().evictions > 0
    state = module.full_state_dict()
    assert [k for k, v in plain.state_dict().items() if not torch.equal(state[k], v)] == []


def test_clipping_by_value_is_of_gradients_without_the_loss_scale() -> None:
    seed_torch(0)
    plain, model = nn.Linear(8, 4), nn.Linear(8, 4)
    model.load_state_dict(plain.state_dict())
    oracle = torch.optim.SGD(plain.parameters(), lr=0.5)
    module = ElixirModule(model, make_plan(model, **TIGHT), device=CPU)
    module.needs_loss_scale = True  # there is no fp16 on the CPU; scaling works with any dtype
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.5), initial_scale=64.0)
    x = torch.randn(6, 8)
    plain(x).square().mean().backward()
    largest = max(float(p.grad.abs().max()) for p in plain.parameters())
    nn.utils.clip_grad_value_(plain.parameters(), largest / 2)
    oracle.step()
    optimizer.backward(module(x).square().mean())
    optimizer.clip_grad_value_(largest / 2)
    optimizer.step()
    state = module.full_state_dict()
    assert all(torch.equal(state[name], p) for name, p in plain.named_parameters())


@pytest.mark.parametrize("habit", ["sets zeros", "drops all", "nothing"])
def test_a_step_whose_gradients_have_overflowed_is_skipped_whatever_is_done_to_them(habit: str) -> None:
    """As after `GradScaler.unscale_`: else the scale would stay too large for ever."""
    model = nn.Linear(8, 4)
    module = ElixirModule(model, make_plan(model, **TIGHT), device=CPU)
    module.needs_loss_scale = True  # there is no fp16 on the CPU; scaling works with any dtype
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.5), initial_scale=2.0**100)
    before = module.full_state_dict()
    optimizer.backward(module(torch.full((6, 8), 1e20)).sum())  # the gradient of the bias is finite
    optimizer.show_unscaled()
    optimizer.find_overflows()
    if habit == "sets zeros":
        for p in model.parameters():
            p.grad.nan_to_num_(0.0, 0.0, 0.0)
    elif habit == "drops all":
        optimizer.zero_grad()
    optimizer.step()
    assert optimizer.is_step_skipped
    assert optimizer.loss_scale == 2.0**99
    state = module.full_state_dict()
    assert all(torch.equal(state[name], value) for name, value in before.items())
    optimizer.backward(module(torch.ones(6, 8)).sum())  # and only that step is
    optimizer.step()
    assert not optimizer.is_step_skipped


def _step_looked_at_by_some(looking: list[bool]) -> tuple[bool, float]:
    model = nn.Linear(8, 4)
    module = ElixirModule(model, make_plan(model, world_size=len(looking), **TIGHT), device=CPU)
    module.needs_loss_scale = True
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.5), initial_scale=2.0**100)
    optimizer.backward(module(torch.full((6, 8), 1e20)).sum())
    optimizer.show_unscaled()
    optimizer.find_overflows(looking[dist.get_rank()])
    if any(looking):
        optimizer.zero_grad()
    optimizer.step()
    return optimizer.is_step_skipped, optimizer.loss_scale


@pytest.mark.parametrize("looking", [[True, False], [False, True], [False, False]])
def test_ranks_with_other_hooks_look_for_overflows_together(looking: list[bool]) -> None:
    """As where rank 0 alone has a callback that logs."""
    assert run_ranks(_step_looked_at_by_some, 2, looking) == [(True, 2.0**99)] * 2


def test_an_optimizer_around_a_plain_module_is_refused() -> None:
    model = nn.Linear(8, 4)
    with pytest.raises(PlanError, match=r"takes the ElixirModule around the model, got Linear"):
        ElixirOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.5))  # type: ignore[arg-type]


def test_a_device_may_be_named_by_a_string() -> None:
    model = make("mlp")
    module = ElixirModule(model, make_plan(model), device="cpu")
    assert module.engine.device.torch_device == torch.device("cpu")
    ZOO["mlp"].loss(module, 0).backward()
    module.close()


@crossed(kind=["adamw", "hybrid"], options=OPTIONS)
def test_torchs_default_device_has_nothing_of_the_engine(kind: str, options: dict[str, Any]) -> None:
    """As of `torch.set_default_device("cuda")`: what belongs in host memory goes there."""
    plain, model = _stack(), _stack()

    def optimize(net: nn.Module) -> Any:
        make_inner: Any = HybridAdam if kind == "hybrid" else partial(torch.optim.AdamW, foreach=False)
        return make_inner(net.parameters(), lr=1e-2)

    oracle = optimize(plain)
    module = ElixirModule(model, make_plan(model, **options), device=CPU)
    optimizer = ElixirOptimizer(module, optimize(model))
    batches = [torch.randn(6, 32) for _ in range(4)]
    for x in batches:
        plain(x).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
        with torch.device("meta"):
            optimizer.backward(module(x).square().mean())
            assert torch.equal(module.full_grads()["0.weight"], plain[0].weight.grad)
            torch.testing.assert_close(optimizer.clip_grad_norm_(1e9), norm)
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
            module.load_full_state_dict(module.full_state_dict())
        oracle.step()
        oracle.zero_grad()
    state, moments = module.full_state_dict(), optimizer.state_dict()["state"]
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    assert all(
        torch.equal(moments[i][key], oracle.state_dict()["state"][i][key]) for i in moments for key in moments[i]
    )


def _stack() -> nn.Sequential:
    seed_torch(0)
    return nn.Sequential(*[nn.Linear(32, 32) for _ in range(6)])

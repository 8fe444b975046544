"""What users do to parameters outside forward: it is kept, or refused with the cure; never lost."""

from __future__ import annotations

import copy
import io
import os
import pickle
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from lightning_elixir.errors import PlanError, StateError
from lightning_elixir.runtime.chunk import Chunk
from lightning_elixir.runtime.fetcher import Fetcher
from lightning_elixir.runtime.hooks import innermost_pack
from lightning_elixir.runtime.spans import Packing
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.plans import make_plan
from tests.helpers.seeds import seed_torch
from tests.helpers.tiers import crossed, telling
from tests.helpers.user_access import CPU, OPTIONS, PLACEMENTS, RESIDENT, TIGHT, step, wrapped
from tests.helpers.zoo import ZOO, make


def ema_swap(model: nn.Module) -> None:
    shadow = [p.detach().clone() * 0.5 for p in model.parameters()]
    for p, value in zip(model.parameters(), shadow, strict=True):
        p.data.copy_(value)


def clamp_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.01, 0.01)


def clamp_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.clamp_(-0.01, 0.01)


def assign_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data * 0.5


def init_again(model: nn.Module) -> None:
    torch.manual_seed(3)
    for p in model.parameters():
        nn.init.normal_(p, std=0.02)


def init_between_bounds(model: nn.Module) -> None:
    torch.manual_seed(3)
    for p in model.parameters():
        nn.init.trunc_normal_(p, std=0.02)
        p.data.add_(p.new_tensor(0.01))  # what torch's own code does with bounds, and users with constants


def load_state(model: nn.Module) -> None:
    model.load_state_dict(make("gpt2", seed=9).state_dict())


def write_row(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p[0] = 0.25


def write_through_kept_alias(model: nn.Module) -> None:
    aliases = [p.detach() for p in model.parameters()]
    for alias in aliases:
        alias.mul_(0.5)


def foreach(model: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.5)


def vector(model: nn.Module) -> None:
    with torch.no_grad():
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) * 0.5, model.parameters())


WRITES: list[Callable[[nn.Module], None]] = [
    ema_swap, clamp_in_place, clamp_data, assign_data, init_again, init_between_bounds, load_state,
    write_row, write_through_kept_alias, foreach, vector,
]  # fmt: skip


@crossed(write=WRITES, options=OPTIONS)
def test_writes_between_steps_are_kept(write: Callable[[nn.Module], None], options: dict[str, Any]) -> None:
    plain = make("gpt2")
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=False)
    model, module, optimizer = wrapped(**options)
    for seed in range(4):
        assert step(module, optimizer, seed) == step(plain, plain_optimizer, seed)
        if seed in (0, 2):
            write(model)
            write(plain)
    state, expected = module.full_state_dict(), plain.state_dict()
    assert [k for k in expected if not torch.equal(state[k], expected[k])] == []


@PLACEMENTS
def test_reading_leaves_the_master_alone(options: dict[str, Any]) -> None:
    _, untouched, untouched_optimizer = wrapped(dtype=torch.bfloat16, **options)
    model, module, optimizer = wrapped(dtype=torch.bfloat16, **options)
    for seed in range(3):
        step(untouched, untouched_optimizer, seed)
        step(module, optimizer, seed)
        assert all(bool(torch.isfinite(p.detach()).all()) for p in model.parameters())
    state, expected = module.full_state_dict(), untouched.full_state_dict()
    assert [k for k in expected if not torch.equal(state[k], expected[k])] == []
    assert any(not torch.equal(v, v.bfloat16().float()) for v in state.values())  # the master has more bits


@PLACEMENTS
def test_copying_fp32_values_keeps_their_precision(options: dict[str, Any]) -> None:
    model, module, _ = wrapped(dtype=torch.bfloat16, **options)
    values = make("gpt2", seed=4).state_dict()
    model.load_state_dict(values)  # copies into every parameter
    state = module.full_state_dict()
    assert [k for k in values if not torch.equal(state[k], values[k])] == []


@PLACEMENTS
def test_writes_inside_forward_raise(options: dict[str, Any]) -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.layer.weight.clamp_(-1, 1)
            return self.layer(x)

    model = Writing()
    module = ElixirModule(model, make_plan(model, **options), device=CPU)
    with pytest.raises(StateError, match=r"layer\.weight.*optimizer\.step"):
        module(torch.randn(2, 4))


@PLACEMENTS
def test_writes_between_forward_and_backward_raise(options: dict[str, Any]) -> None:
    model, module, optimizer = wrapped(**options)
    loss = ZOO["gpt2"].loss(module, 0)
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight.zero_()
    with pytest.raises(StateError, match=r"mlp\.c_fc\.weight"):
        optimizer.backward(loss)


@pytest.mark.parametrize("call", ["half", "double", "bfloat16"])
def test_conversions_are_refused(call: str) -> None:
    model, module, _ = wrapped(**TIGHT)
    with pytest.raises(StateError, match="precision="):
        getattr(model, call)()
    model.float()  # nothing to change
    module.close()


def test_another_shape_is_refused() -> None:
    """As transformers' `resize_token_embeddings` would give it."""
    model, module, _ = wrapped(**TIGHT)
    weight = model.transformer.wte.weight
    with pytest.raises(StateError, match=r"resize a model before it is wrapped.*copy\.deepcopy"):
        weight.data = torch.zeros(weight.shape[0] + 8, weight.shape[1])
    module.close()


@PLACEMENTS
def test_deepcopy_gives_a_plain_whole_model(options: dict[str, Any]) -> None:
    model, module, optimizer = wrapped(**options)
    step(module, optimizer, 0)
    copied = copy.deepcopy(model)
    before = {k: v.clone() for k, v in copied.state_dict().items()}
    assert all(type(p) is nn.Parameter for p in copied.parameters())
    assert copied.lm_head.weight is copied.transformer.wte.weight
    copied_loss = ZOO["gpt2"].loss(copied, 5)
    copied_loss.backward()
    assert all(p.grad is not None for p in copied.parameters())
    step(module, optimizer, 1)
    state = module.full_state_dict()
    assert all(torch.equal(v, before[k]) for k, v in copied.state_dict().items())
    assert any(not torch.equal(state[k], before[k]) for k in state)


@PLACEMENTS
def test_state_dict_of_the_model_and_its_parts(options: dict[str, Any]) -> None:
    model, module, optimizer = wrapped(**options)
    step(module, optimizer, 0)
    whole = module.full_state_dict()
    direct = model.state_dict()
    assert list(direct) == list(whole)
    assert all(torch.equal(direct[k], whole[k]) for k in whole)
    part = model.transformer.h[1].state_dict()
    assert all(torch.equal(v, whole[f"transformer.h.1.{k}"]) for k, v in part.items())
    assert module.engine.rcache.used_blocks <= module.plan.rcache_blocks
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    fresh = make("gpt2", seed=3)
    fresh.load_state_dict(torch.load(saved))
    assert all(torch.equal(v, whole[k]) for k, v in fresh.state_dict().items())


def test_pickling_a_parameter_gives_a_plain_one() -> None:
    model, module, _ = wrapped(**TIGHT)
    weight = model.transformer.h[0].mlp.c_fc.weight
    loaded = pickle.loads(pickle.dumps(weight))
    assert type(loaded) is nn.Parameter
    assert torch.equal(loaded, module.full_state_dict()["transformer.h.0.mlp.c_fc.weight"])


def test_metadata_needs_no_fetch() -> None:
    model, module, _ = wrapped(**TIGHT)
    module.reset_stats()
    for p in model.parameters():
        assert isinstance(p, nn.Parameter)
        assert p.shape.numel() == p.numel() == torch.numel(p)
        assert p.is_leaf
        assert p.requires_grad
        assert p.grad is None
        assert p.dtype is torch.float32
        assert torch.zeros_like(p).shape == p.shape
        assert hash(p) == id(p)
    model.zero_grad()
    torch.optim.SGD(model.parameters(), lr=0.1)
    stats = module.stats()
    assert (stats.fetches, stats.hits) == (0, 0)


@PLACEMENTS
def test_gradients_are_given(options: dict[str, Any]) -> None:
    plain = make("gpt2")
    ZOO["gpt2"].loss(plain, 0).backward()
    _, module, optimizer = wrapped(**options)
    optimizer.backward(ZOO["gpt2"].loss(module, 0))
    grads = module.full_grads()
    assert all(torch.equal(grads[name], p.grad) for name, p in plain.named_parameters() if p.grad is not None)
    expected = nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    torch.testing.assert_close(optimizer.grad_norm(), expected, rtol=1e-6, atol=0)
    optimizer.zero_grad()
    assert module.full_grads() == {}


@PLACEMENTS
def test_full_parameters(options: dict[str, Any]) -> None:
    model, module, _ = wrapped(**options)
    before = module.full_state_dict()
    name = "transformer.h.2.mlp.c_fc.weight"
    with module.full_parameters([name]) as parameters:
        assert torch.equal(parameters[name], before[name])
        parameters[name].data.zero_()
    assert torch.equal(module.full_state_dict()[name], before[name])
    with module.full_parameters([name], modify=True) as parameters, torch.no_grad():
        parameters[name].zero_()
    assert not module.full_state_dict()[name].any()
    with module.full_parameters() as parameters:
        assert len(parameters) == len(list(model.parameters()))
    with pytest.raises(StateError, match="nonsense"), module.full_parameters(["nonsense"]):
        pass


@PLACEMENTS
def test_bare_backward_double_backward_and_retained_graphs(options: dict[str, Any]) -> None:
    plain = make("gpt2")
    first, second = ZOO["gpt2"].loss(plain, 0), ZOO["gpt2"].loss(plain, 1)
    first.backward(retain_graph=True)
    (first * 2 + second).backward()
    _, module, _ = wrapped(**options)
    a, b = ZOO["gpt2"].loss(module, 0), ZOO["gpt2"].loss(module, 1)
    a.backward(retain_graph=True)
    (a * 2 + b).backward()
    grads = module.full_grads()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, rtol=1e-5, atol=1e-7)


@PLACEMENTS
def test_gradient_penalty_through_autograd_grad(options: dict[str, Any]) -> None:
    def penalty(model: Any) -> Tensor:
        x = torch.randn(3, 24, generator=torch.Generator().manual_seed(0)).requires_grad_()
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return grad.square().sum()

    plain = make("mlp")
    penalty(plain).backward()
    model = make("mlp")
    module = ElixirModule(model, make_plan(model, **{**options, "chunk_size": 4096}), device=CPU)
    penalty(module).backward()
    grads = module.full_grads()
    assert all(torch.equal(grads[name], p.grad) for name, p in plain.named_parameters() if p.grad is not None)


@PLACEMENTS
def test_learning_to_learn_through_autograd_grad(options: dict[str, Any]) -> None:
    """Gradients with a graph and the parameters that they are of meet in one expression (MAML)."""

    class Learner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            seed_torch(0)
            self.net = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(24, 24), nn.Tanh())))

        def forward(self, x: Tensor) -> Tensor:
            fast = dict(self.net.named_parameters())
            for _ in range(2):
                loss = functional_call(self.net, fast, (x,)).square().mean()
                grads = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
                fast = {name: p - 0.1 * g for (name, p), g in zip(fast.items(), grads, strict=True)}
            result: Tensor = functional_call(self.net, fast, (x,)).square().mean()
            return result

    x = torch.randn(3, 24, generator=torch.Generator().manual_seed(0))
    plain, model = Learner(), Learner()
    module = ElixirModule(model, make_plan(model, **{**options, "chunk_size": 4096}), device=CPU)
    for m in (plain, module):
        m(x).backward()
    grads = module.full_grads()
    assert [name for name, p in plain.named_parameters() if not torch.equal(grads[name], p.grad)] == []


def test_forwards_without_grad_between_forward_and_backward() -> None:
    plain, (model, module, optimizer) = make("gpt2"), wrapped(**TIGHT)
    expected = ZOO["gpt2"].loss(plain, 0)
    expected.backward()
    loss = ZOO["gpt2"].loss(module, 0)
    with torch.no_grad():
        assert ZOO["gpt2"].loss(module, 1).item() == ZOO["gpt2"].loss(plain, 1).item()
    with torch.inference_mode():
        assert ZOO["gpt2"].loss(model, 1).item() == ZOO["gpt2"].loss(plain, 1).item()  # the model itself, unwrapped
    optimizer.backward(loss)
    grads = module.full_grads()
    assert all(torch.equal(grads[name], p.grad) for name, p in plain.named_parameters())


def test_users_saved_tensor_hooks() -> None:
    for hooks in (
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        lambda: torch.autograd.graph.save_on_cpu(),
    ):
        plain, (_, module, optimizer) = make("gpt2"), wrapped(**TIGHT)
        ZOO["gpt2"].loss(plain, 0).backward()
        with hooks():
            loss = ZOO["gpt2"].loss(module, 0)
        optimizer.backward(loss)
        grads = module.full_grads()
        assert all(torch.equal(grads[name], p.grad) for name, p in plain.named_parameters())


def test_exceptions_leave_a_working_engine() -> None:
    model, module, optimizer = wrapped(**TIGHT)
    plain = make("gpt2")
    handle = model.transformer.h[1].register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        module(input_ids=torch.zeros(1, 4, dtype=torch.long))
    handle.remove()
    loss = ZOO["gpt2"].loss(module, 0)
    loss.register_hook(lambda _: (_ for _ in ()).throw(RuntimeError("on purpose")))
    with pytest.raises(RuntimeError, match="on purpose"):
        optimizer.backward(loss)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=False)
    for seed in range(3):
        assert step(module, optimizer, seed) == step(plain, plain_optimizer, seed)


class Interrupting(nn.Module):
    """Ctrl-C in the recomputation, when there is one. torch tells no hook of a module of that."""

    is_on = True

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_on and torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled():
            raise KeyboardInterrupt
        result: Tensor = self.layer(x)
        return result


class CheckpointedTwice(nn.Module):
    def __init__(self, outer: bool, inner: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), Interrupting()) for _ in range(4))
        self.outer, self.inner = outer, inner

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(lambda y, b=block: checkpoint(b, y, use_reentrant=self.inner), x, use_reentrant=self.outer)
        return x


@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_ctrl_c_in_a_nested_recomputation_leaves_a_working_engine(outer: bool, inner: bool) -> None:
    torch.manual_seed(0)
    plain = CheckpointedTwice(outer, inner)
    model = copy.deepcopy(plain)
    module = ElixirModule(model, replace(make_plan(model, **TIGHT), rcache_blocks=6), device=CPU)
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(4, 64, requires_grad=True)
    with pytest.raises(KeyboardInterrupt):
        optimizer.backward(module(x).square().mean())
    optimizer.zero_grad()
    for part in (*plain.modules(), *model.modules()):
        part.is_on = False  # type: ignore[assignment]
    optimizer.backward(module(x).square().mean())
    plain(x).square().mean().backward()
    grads = module.full_grads()
    assert [name for name, p in plain.named_parameters() if not torch.equal(grads[name], p.grad)] == []
    assert module.stats().evictions > 0


class Raising:
    """Whose end is interrupted; what `__del__` raises is ignored."""

    def __del__(self) -> None:
        _ctrl_c()


class Undeterred(nn.Module):
    """Ctrl-C in the forward, which goes on."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4))
        self.scale = nn.Parameter(torch.full((64,), 1.5))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x) * self.scale
        with torch.autograd.graph.save_on_cpu():
            x = self.layers[1](x)
            try:
                if self.way == "ignored":
                    Raising()
                elif self.way == "caught":
                    _ctrl_c()
                else:
                    self.interrupted(x)
            except KeyboardInterrupt:
                x = x * 2
            x = self.layers[2](x) * self.scale
        result: Tensor = self.layers[3](x).square().mean()
        return result

    def interrupted(self, x: Tensor) -> None:
        handle = self.layers[2].register_forward_pre_hook(_ctrl_c)
        try:
            self.layers[2](x)
        finally:
            handle.remove()


def _ctrl_c(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("is_part", [False, True])
@pytest.mark.parametrize("way", ["caught", "caught inside", "ignored"])
def test_a_forward_goes_on_after_a_signal_that_did_not_end_it(
    way: str, is_part: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the user's hooks for saved tensors are on, which were taken away in the place of ours."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    torch.manual_seed(0)
    model = nn.Sequential(Undeterred(way))
    plain = copy.deepcopy(model)
    module = ElixirModule(model, replace(make_plan(model, **TIGHT), rcache_blocks=4), device=CPU)
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(4, 64)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model[0](x) if is_part else module(x)
        assert innermost_pack() is None
        optimizer.backward(loss)
        plain.zero_grad()
        expected = plain(x)
        expected.backward()
        grads = module.full_grads()
        assert loss.item() == expected.item()
        assert [name for name, p in plain.named_parameters() if not torch.equal(grads[name], p.grad)] == []
    optimizer.step()
    assert module.stats().evictions > 0


@pytest.mark.parametrize("then", ["zero_grad", "forward", "close"])
def test_a_signal_at_the_end_of_a_read_leaves_no_hooks(then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may come where `__exit__` has been called and has not begun to defer signals."""
    model, module, optimizer = wrapped(**TIGHT)

    def interrupted(self: Any, *error: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Packing, "__exit__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(model.parameters()).square()
    assert innermost_pack() is not None
    if then == "zero_grad":
        optimizer.zero_grad()
    elif then == "forward":
        step(module, optimizer, 0)
    else:
        module.close()
    assert innermost_pack() is None


def test_two_engines_in_one_process() -> None:
    _, first, first_optimizer = wrapped(**TIGHT)
    _, second, second_optimizer = wrapped(**TIGHT)
    plain = make("gpt2")
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=False)
    for seed in range(3):
        expected = step(plain, plain_optimizer, seed)
        a, b = ZOO["gpt2"].loss(first, seed), ZOO["gpt2"].loss(second, seed)
        first_optimizer.backward(a)
        second_optimizer.backward(b)
        second_optimizer.step()
        first_optimizer.step()
        assert a.item() == b.item() == expected
    with torch.no_grad():  # one call over both engines' released parameters
        x, y = first.module.transformer.h[0].mlp.c_fc.weight, second.module.transformer.h[0].mlp.c_fc.weight
        assert torch.equal(x, y)
        assert float((x - y).abs().sum()) == 0
    first.close()
    assert step(second, second_optimizer, 9) == step(plain, plain_optimizer, 9)


def test_closed_engine_says_so() -> None:
    model, module, optimizer = wrapped(**TIGHT)
    module.close()
    module.close()
    for use in (
        lambda: module(input_ids=torch.zeros(1, 4, dtype=torch.long)),
        lambda: next(model.parameters()) + 1,
        lambda: module.full_state_dict(),
        lambda: optimizer.step(),
    ):
        with pytest.raises(StateError, match="closed"):
            use()


def test_unfreezing_after_setup_is_refused() -> None:
    model = make("frozen")
    module = ElixirModule(model, make_plan(model, **TIGHT), device=CPU)
    model.layers[0].weight.requires_grad_(True)
    with pytest.raises(StateError, match=r"layers\.0\.weight was frozen"):
        module(torch.randn(2, 32))
    model.layers[0].weight.requires_grad_(False)
    module(torch.randn(2, 32)).sum().backward()


def test_foreign_and_unsuitable_optimizers_are_refused() -> None:
    model, module, _ = wrapped(**TIGHT)
    with pytest.raises(PlanError, match=r"not the wrapped model's.*shape \(3,\)"):
        ElixirOptimizer(module, torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1))
    with pytest.raises(PlanError, match=r"LBFGS looks at whole parameters.*Use one of HybridAdam"):
        ElixirOptimizer(module, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(PlanError, match=r"\.Lion is not known to be element-wise.*use one of HybridAdam"):
        ElixirOptimizer(module, Lion(model.parameters()))


class Lion(torch.optim.Optimizer):
    """Of a user: element-wise, which nobody here knows."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})


def test_plan_of_another_model_or_world_is_refused() -> None:
    plan = make_plan(make("mlp"), **TIGHT)
    with pytest.raises(PlanError, match="another model"):
        ElixirModule(make("gpt2"), plan, device=CPU)
    with pytest.raises(PlanError, match="2 ranks"):
        ElixirModule(make("mlp"), make_plan(make("mlp"), world_size=2, **TIGHT), device=CPU)
    with pytest.raises(PlanError, match="float16 is for GPUs"):
        ElixirModule(make("mlp"), make_plan(make("mlp"), compute_dtype=torch.float16), dtype=torch.float16, device=CPU)


@pytest.mark.parametrize(
    "kind",
    telling(
        ["AdamW", "Adam", "SGD", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"],
        *["AdamW", "SGD", "Rprop"],
    ),
)
def test_torch_optimizers_with_groups_schedules_and_resume(kind: str) -> None:
    def build(model: nn.Module) -> torch.optim.Optimizer:
        decay = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() <= 1]
        extra = {"momentum": 0.9} if kind == "SGD" else {}
        return getattr(torch.optim, kind)(
            [{"params": decay}, {"params": rest, "lr": 5e-3}], lr=1e-2, foreach=False, **extra
        )

    plain = make("gpt2")
    plain_optimizer = build(plain)
    model = make("gpt2")
    module = ElixirModule(model, make_plan(model, **TIGHT), device=CPU)
    user = build(model)
    optimizer = ElixirOptimizer(module, user)
    plain_schedule = torch.optim.lr_scheduler.ExponentialLR(plain_optimizer, 0.7)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    for seed in range(3):
        assert step(module, optimizer, seed) == step(plain, plain_optimizer, seed)
        plain_schedule.step()
        schedule.step()
    assert user.param_groups[0]["lr"] == plain_optimizer.param_groups[0]["lr"]
    saved, expected = optimizer.state_dict(), plain_optimizer.state_dict()
    assert saved["state"].keys() == expected["state"].keys()
    for number, entries in expected["state"].items():
        assert saved["state"][number].keys() == entries.keys()
        for key, value in entries.items():
            if value is not None:
                loaded = torch.as_tensor(saved["state"][number][key])
                assert torch.equal(loaded, torch.as_tensor(value)), (number, key)
    other = make("gpt2", seed=7)
    other_module = ElixirModule(other, make_plan(other, placement_policy="cuda", chunk_size=20 * 1024), device=CPU)
    other_optimizer = ElixirOptimizer(other_module, build(other))
    other_module.load_full_state_dict(plain.state_dict())
    other_optimizer.load_state_dict(expected)
    for seed in range(3, 5):
        assert step(other_module, other_optimizer, seed) == step(plain, plain_optimizer, seed)


def test_a_replica_that_a_view_holds_makes_no_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory stays taken, also while chunks are fetched ahead: it counts, and does not come again."""
    _, module, optimizer = wrapped(**TIGHT)
    module.replan(replace(module.plan, rcache_blocks=6, prefetch_depth=2))
    for seed in range(2):
        step(module, optimizer, seed)
    held = module.engine.chunks[2]
    view = held.parameters[0].data
    fetch, fetched = Fetcher.fetch, []

    def noted(self: Fetcher, chunk: Chunk) -> None:
        fetched.append(chunk.id)
        fetch(self, chunk)

    monkeypatch.setattr(Fetcher, "fetch", noted)
    module.reset_stats()
    optimizer.backward(ZOO["gpt2"].loss(module, 2))
    stats = module.stats()
    assert stats.prefetches > 0
    assert stats.evictions > 0
    assert len(fetched) > len(module.plan.chunks)
    assert held.id not in fetched
    assert held.is_aliased()
    del view
    module.close()


def test_layers_have_no_hooks_where_everything_is_resident() -> None:
    def hooked(model: nn.Module) -> int:
        return sum(bool(m._forward_hooks) + bool(m._forward_pre_hooks) for m in model.modules())

    model, module, optimizer = wrapped(**RESIDENT)
    resident = hooked(model)
    assert resident <= 2 * (1 + len(list(model.children())))
    assert not model.transformer.h[0].mlp.c_fc._forward_hooks
    expected = [step(module, optimizer, seed) for seed in range(4)]
    model, module, optimizer = wrapped(**TIGHT)
    assert hooked(model) > 10 * resident
    losses = [step(module, optimizer, seed) for seed in range(2)]
    module.replan(make_plan(model, layout=module.plan, placement_policy="cuda"))
    assert hooked(model) == resident
    losses += [step(module, optimizer, seed) for seed in range(2, 4)]
    assert losses == expected
    with torch.no_grad():  # a part called by itself
        model.transformer.h[1].mlp(torch.zeros(1, 32))
    module.close()
    assert hooked(model) == 0


def test_what_is_kept_of_a_parameter_outlives_the_engine() -> None:
    """As in plain PyTorch; before, its storage was freed with the engine, and a read of it killed the process."""
    model, module, _ = wrapped(**TIGHT)
    chunk = module.engine.chunks[0]
    named = dict(model.named_parameters())
    name = chunk.spec.members[0].fqn
    kept, expected = named[name].detach(), named[name].detach().clone()
    module.close()
    assert torch.equal(kept, expected)
    assert chunk.device_bytes == 0
    with pytest.raises(StateError, match="closed"):
        named[name].sum()


@pytest.mark.parametrize("how", ["module", "model", "layer", "to_empty"])
def test_a_model_does_not_go_to_meta(how: str) -> None:
    """Before, parameters were replaced by some without values, and only the next forward failed, in words of torch."""
    model, module, optimizer = wrapped(**TIGHT)
    plain = make("gpt2")
    convert = {
        "module": lambda: module.to("meta"),
        "model": lambda: model.to("meta"),
        "layer": lambda: model.transformer.h[0].mlp.to("meta"),
        "to_empty": lambda: model.to_empty(device="meta"),
    }
    with pytest.raises(StateError, match=r"meta device.*deepcopy\(model\).*close\(\)"):
        convert[how]()
    assert all(p.is_meta for p in copy.deepcopy(model).to("meta").parameters())
    assert next(model.parameters()).to("meta").is_meta
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=False)
    assert step(module, optimizer, 0) == step(plain, plain_optimizer, 0)


def test_growing_beyond_the_plan_is_told_in_one_line_unless_the_whole_is_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ParameterList([nn.Parameter(torch.randn(64, 64)) for _ in range(8)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ torch.stack([p + 0 for p in self.layers]).sum(0) @ torch.stack(list(self.layers)).sum(0)

    model = Wide()
    plan = make_plan(model, placement_policy="cpu", chunk_size=16 * 1024)
    module = ElixirModule(model, replace(plan, rcache_blocks=1), device="cpu")
    with module.full_parameters() as parameters:
        assert len(parameters) == 8
    assert module.stats().overflows > 0
    assert caplog.messages == []
    for _ in range(2):
        with torch.no_grad():
            module(torch.randn(2, 64))
    (message,) = caplog.messages
    assert "and 7 more parameters, but the plan allows 1: growing" in message
    assert len(message) < 250

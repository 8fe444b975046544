"""Frozen tensors around others (quantised weights) lie in chunks as bytes, and are used as what they are."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils.checkpoint import checkpoint

from lightning_elixir.core.shells import ShellLayout, ShellParameter, tensors_inside
from lightning_elixir.errors import PlanError, StateError
from lightning_elixir.optim import HybridAdam
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.dist import run_ranks
from tests.helpers.plans import make_plan

WIDTH = 64
aten = torch.ops.aten


class Scaled(Tensor):
    """int8 values and a scale for each row; products with it are computed by plain operators."""

    def __new__(cls, values: Tensor, scale: Any, is_copied: bool = True) -> Scaled:
        made: Scaled = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32, device=values.device)
        made.values, made.scale, made.is_copied = values, scale, is_copied  # type: ignore[method-assign]
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["values", "scale"], self.is_copied

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Any], context: Any, size: Any, stride: Any) -> Scaled:
        return cls(inner["values"], inner["scale"], context)

    def dense(self) -> Tensor:
        scale = self.scale.dense() if isinstance(self.scale, Scaled) else self.scale
        return self.values.to(torch.float32) * scale

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            return args[0] @ args[1].dense().t()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (aten.detach.default, aten.clone.default, aten._to_copy.default, aten.alias.default):
            names, context = args[0].__tensor_flatten__()
            own = {name: func(getattr(args[0], name), *args[1:], **kwargs) for name in names}
            return return_and_correct_aliasing(func, args, kwargs, cls(own["values"], own["scale"], context))
        if func is aten.copy_.default:
            args[0].values.copy_(args[1].values)
            return args[0]
        dense = [a.dense() if isinstance(a, Scaled) else a for a in args]
        return func(*dense, **kwargs)


def drawn(inner: Any = None) -> Scaled:
    values = torch.randint(-100, 100, (WIDTH, WIDTH), dtype=torch.int8)
    return Scaled(values, torch.rand(WIDTH, 1) / 500 if inner is None else inner)


class ByHand(torch.autograd.Function):
    """A product that keeps its weight, as autograd saves it or beside autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, is_saved: bool) -> Tensor:
        if is_saved:
            ctx.save_for_backward(weight)
        else:
            ctx.weight = weight
        return x @ weight.dense().t()  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        saved = ctx.saved_tensors
        weight = saved[0] if saved else ctx.weight
        return grad @ weight.dense(), None, None


class Block(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        inside = drawn()
        inside.values = inside.values[:, :1].contiguous()
        weight = drawn(Scaled(inside.values, inside.scale)) if how == "nested" else drawn()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.how = how
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.how in ("saved", "beside", "passed"):
            weight = self.weight.detach() if self.how == "passed" else self.weight
            y = ByHand.apply(x, weight, self.how != "beside")
        else:
            y = nn.functional.linear(x, self.weight)
        return torch.tanh(y + self.up(self.down(x)))


class Model(nn.Module):
    def __init__(self, is_checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(Block(how) for how in ("linear", "saved", "beside", "nested", "passed") * 2)
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return x


def batch(number: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))


def wrapped(model: nn.Module, **options: Any) -> ElixirModule:
    world = dist.get_world_size() if dist.is_initialized() else 1
    options = {"placement_policy": "cpu", "gpu_bytes": 60_000, "chunk_size": 8192, **options}
    return ElixirModule(model, make_plan(model, world_size=world, **options))


def train(model: nn.Module, steps: int = 3) -> list[float]:
    module = model if isinstance(model, ElixirModule) else None
    inner = HybridAdam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    optimizer = inner if module is None else ElixirOptimizer(module, inner)
    losses = []
    for number in range(steps):
        loss = model(batch(number)).square().mean()
        loss.backward() if module is None else optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_same_state(actual: Any, expected: Any) -> None:
    assert list(actual) == list(expected)
    for name, value in expected.items():
        assert type(actual[name]) is type(value) or type(value) is nn.Parameter
        pairs = zip(tensors_inside(actual[name]), tensors_inside(value), strict=True)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs), name


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_as_plain_pytorch(is_checkpointed: bool) -> None:
    model = Model(is_checkpointed)
    plain = copy.deepcopy(model)
    module = wrapped(model)
    assert not module.plan.ignored
    assert train(module) == train(plain)
    assert module.stats().evictions > 0
    assert_same_state(module.state_dict(), plain.state_dict())
    module.close()


def on_ranks(is_distributed: bool) -> None:
    model = Model()
    if dist.get_rank():  # values come from rank 0
        for block in model.blocks:
            for inside in tensors_inside(block.weight):
                inside.zero_()
    plain = Model()
    module = wrapped(model, enable_distributed_storage=is_distributed)
    assert train(module) == train(plain)
    assert_same_state(module.state_dict(), plain.state_dict())
    if is_distributed:
        kept = {c.id for c in module.engine.chunks if c.dtype is torch.uint8}
        assert all(module.engine.store[i].param.numel() * 2 == module.engine.chunks[i].spec.numel for i in kept)
    module.close()


@pytest.mark.parametrize("is_distributed", [True, False])
def test_on_two_ranks(is_distributed: bool) -> None:
    run_ranks(on_ranks, 2, is_distributed)


def test_what_users_do_between_steps() -> None:
    model, plain = Model(), Model()
    module = wrapped(model)
    weight, own = model.blocks[0].weight, plain.blocks[0].weight
    assert isinstance(weight, ShellParameter)
    assert (weight.shape, weight.dtype, weight.is_copied, weight.numel()) == (own.shape, own.dtype, True, own.numel())
    assert torch.equal(weight.dense(), own.dense())
    assert torch.equal(weight @ batch(0).t(), own @ batch(0).t())
    assert not hasattr(weight, "quant_state")
    assert model.to("cpu") is model
    with pytest.raises(StateError, match=r"blocks.0.weight .* copy_\(\) new values"):
        weight.data = own
    assert_same_state(copy.deepcopy(model).state_dict(), plain.state_dict())
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    assert_same_state(torch.load(file, weights_only=False), plain.state_dict())
    changed = drawn()
    weight.copy_(changed)
    own.copy_(changed)
    assert torch.equal(module(batch(1)), plain(batch(1)))
    with module.full_parameters(["blocks.1.weight"]) as found:
        assert torch.equal(found["blocks.1.weight"].dense(), plain.blocks[1].weight.dense())
    module.close()


def test_a_state_dict_goes_back_in() -> None:
    model = Model()
    torch.manual_seed(9)
    source = {k: drawn() if type(v) is Scaled and "blocks.3" not in k and "blocks.8" not in k else v
              for k, v in Model().state_dict().items()}  # fmt: skip
    module = wrapped(model)
    module.load_state_dict(source)
    assert_same_state(module.state_dict(), source)
    source["blocks.0.weight"] = drawn(torch.ones(1, WIDTH))
    with pytest.raises(PlanError, match=r"values for blocks.0.weight are those of another parameter: Scaled"):
        module.load_state_dict(source)
    module.close()


@pytest.mark.parametrize("what", ["gaps", "broken", "trains"])
def test_what_no_chunk_can_hold_stays_as_it_is(what: str) -> None:
    shell = drawn()
    if what == "gaps":
        shell.scale = torch.rand(1, 1).expand(WIDTH, 1)
    if what == "broken":

        class Broken(Scaled):
            @classmethod
            def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
                return inner["values"]

        shell = Broken(shell.values, shell.scale)
    if what == "trains":
        shell.requires_grad_(True)
    assert ShellLayout.of(shell) is None
    model = nn.Module()
    model.weight, model.bias = nn.Parameter(shell, requires_grad=what == "trains"), nn.Parameter(torch.ones(1))
    if what == "trains":
        with pytest.raises(PlanError, match=r"weight \(Scaled\): cannot be held in chunks"):
            make_plan(model)
    else:
        assert [p.fqn for p in make_plan(model).ignored] == ["weight"]


def test_no_chunk_is_held_from_forward_to_backward() -> None:
    model = Model()
    module = wrapped(model)
    loss = module(batch(0)).square().mean()
    assert [str(c.spec) for c in module.engine.chunks if c.dtype is torch.uint8 and c.is_aliased()] == []
    loss.backward()
    module.close()


def test_under_another_limit() -> None:
    model = Model()
    plain = copy.deepcopy(model)
    module = wrapped(model)
    expected = train(plain)
    module.set_memory_limit(gpu="1MiB", cpu="1GiB")
    assert train(module) == expected
    module.close()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_what_compiled_code_uses_stays_out_of_chunks() -> None:
    model = Model()
    model.blocks[2].compile()
    assert [p.fqn for p in make_plan(model).ignored] == ["blocks.2.weight"]

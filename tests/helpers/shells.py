"""Frozen tensors around others, in every way that autograd and users hold them."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils.checkpoint import checkpoint

from lightning_elixir.core.shells import tensors_inside
from lightning_elixir.optim import HybridAdam
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
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
        # `to()` may name the dtype that the whole is used as, on a GPU say; what is inside keeps its own.
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "dtype"}
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


def batch(number: int, device: str = "cpu") -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number)).to(device)


def wrapped(model: nn.Module, device: str = "cpu", **options: Any) -> ElixirModule:
    world = dist.get_world_size() if dist.is_initialized() else 1
    options = {"placement_policy": "cpu", "gpu_bytes": 60_000, "chunk_size": 8192, **options}
    return ElixirModule(model, make_plan(model, world_size=world, **options), device=device)


def train(model: nn.Module, steps: int = 3, device: str = "cpu") -> list[float]:
    module = model if isinstance(model, ElixirModule) else None
    inner = HybridAdam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    optimizer = inner if module is None else ElixirOptimizer(module, inner)
    losses = []
    for number in range(steps):
        loss = model(batch(number, device)).square().mean()
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


def check_beside_plain(device: str, is_checkpointed: bool) -> None:
    """A training under a small rCache, with plain PyTorch's losses and values to the bit."""
    model = Model(is_checkpointed)
    plain = copy.deepcopy(model).to(device)
    module = wrapped(model, device)
    assert not module.plan.ignored
    assert train(module, device=device) == train(plain, device=device)
    assert module.stats().evictions > 0
    assert_same_state(module.state_dict(), plain.to("cpu").state_dict())
    module.close()

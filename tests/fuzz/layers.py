"""The layers of random programs. Each takes and gives `[batch, time, width]`, so that any may be left out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils import parametrizations
from torch.utils import checkpoint as checkpoints

from tests.fuzz.programs import Layer


class Boom(Exception):
    """What a program raises on purpose."""


class Clock:
    """Where the program is, and what shall happen there. One for each model; a copy of the model has its own."""

    def __init__(self) -> None:
        self.step = 0
        self.fault = ""
        self.at = -1
        """Number of the leaf at which it happens."""
        self.num_leaves = 0

    def visit(self, number: int, x: Tensor) -> Tensor:
        if number != self.at or not self.fault:
            return x
        is_backward = torch._C._current_graph_task_id() != -1
        if self.fault == "raise_forward" or (self.fault == "raise_recomputation" and is_backward):
            raise Boom(self.fault)
        if self.fault == "raise_backward" and x.requires_grad:
            x.register_hook(_boom)
        if self.fault == "overwrite_saved" and torch.is_grad_enabled() and not is_backward:
            y = x * 1.5
            z = y * y  # saves y
            y.add_(1.0)
            return z + y
        return x


def _boom(grad: Tensor) -> Tensor:
    raise Boom("raise_backward")


class Stack(nn.Module):
    """Layers, one after the other; each passes the clock."""

    def __init__(self, layers: list[nn.Module], clock: Clock) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.clock = clock
        self.numbers = []
        for layer in layers:
            self.numbers.append(-1 if isinstance(layer, Group) else clock.num_leaves)
            clock.num_leaves += not isinstance(layer, Group)

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in zip(self.numbers, self.layers, strict=True):
            x = layer(x) if number < 0 else self.clock.visit(number, layer(x))
        return x


class Group(nn.Module):
    """A stack, run in a certain way."""

    def __init__(self, kind: str, arg: int, inner: list[nn.Module], clock: Clock, width: int) -> None:
        super().__init__()
        self.kind, self.arg, self.clock = kind, arg, clock
        self.body: nn.Module = Stack(inner, clock)
        if kind == "module_dict":
            self.body = nn.ModuleDict({"a": self.body, "b": nn.Linear(width, width)})
        if kind == "sequential":
            self.body = nn.Sequential(self.body, nn.Tanh())
        if kind == "compiled":
            self.body = _compiled(self.body, arg)

    def forward(self, x: Tensor) -> Tensor:
        kind, body = self.kind, self.body
        if kind == "residual":
            return x + body(x)
        if kind == "twice":
            return body(torch.tanh(body(x)))
        if kind == "reentrant":
            return checkpoints.checkpoint(body, x, use_reentrant=True)
        if kind == "non_reentrant":
            return checkpoints.checkpoint(body, x, use_reentrant=False, determinism_check="default")
        if kind == "selective":
            return checkpoints.checkpoint(body, x, use_reentrant=False, context_fn=_keep_products)
        if kind == "save_on_cpu":
            with torch.autograd.graph.save_on_cpu():
                return body(x)
        if kind == "hooks":
            with torch.autograd.graph.saved_tensors_hooks(*_PACKS[self.arg % len(_PACKS)]):
                return body(x)
        if kind == "odd_steps":
            return body(x) if self.clock.step % 2 else x
        if kind == "no_grad_below":
            with torch.no_grad():
                teacher = body(x)
            return x + body(x) * 0.5 + teacher.detach() * 0.1
        if kind == "module_dict":
            assert isinstance(body, nn.ModuleDict)
            return body["a"](x) + torch.sigmoid(body["b"](x))
        return body(x)


def _compiled(module: nn.Module, how: int) -> nn.Module:
    """By a backend that leaves the arithmetic as it is."""
    given: Any = {"backend": "aot_eager", "dynamic": False}
    if how % 3 == 0:
        module.compile(**given)
        return module
    if how % 3 == 1:
        made: Any = torch.compile(module, **given)
        return made  # type: ignore[no-any-return]
    module.forward = torch.compile(module.forward, **given)
    return module


def _keep_products() -> Any:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        is_kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
        save, again = checkpoints.CheckpointPolicy.MUST_SAVE, checkpoints.CheckpointPolicy.PREFER_RECOMPUTE
        return save if is_kept else again

    return checkpoints.create_selective_checkpoint_contexts(policy)


class _Box:
    """What a user's hook may make of a saved tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


_PACKS: list[tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = [
    (lambda t: t, lambda t: t),
    (_Box, lambda box: box.tensor),
    (lambda t: t.detach().clone(), lambda t: t),
    (lambda t: (t.detach(), t.shape), lambda p: p[0].view(p[1])),
    (lambda t: t * 1.0, lambda t: t),
]


# ---------------------------------------------------------------------------------------------------- leaves


class Adapter(nn.Module):
    """A layer of torch, and how to call it."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = layer
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer, x)


class Addmm(nn.Module):
    """GPT-2's `Conv1D`."""

    def __init__(self, width: int, width_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width_out) * 0.2)
        self.bias = nn.Parameter(torch.zeros(width_out))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], -1)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """Which expert runs depends on the data; some run in no step."""

    def __init__(self, width: int, num: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, num)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(num))

    def forward(self, x: Tensor) -> Tensor:
        gates = F.softmax(self.router(x), dim=-1)
        best, index = gates.max(dim=-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = index == number
            if bool(chosen.any()):
                part = expert(x[chosen]) * best[chosen].unsqueeze(-1)
                y = y.masked_scatter(chosen.unsqueeze(-1).expand_as(y), part.to(y.dtype))
        return x + y


class Own(nn.Module):
    """Parameters by themselves, used by a function of the module."""

    def __init__(self, call: Callable[[Own, Tensor], Tensor], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.call = call
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape) * 0.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


class ParameterList(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(width, width) * 0.2) for _ in range(3)])
        self.scales = nn.ParameterDict({"a": nn.Parameter(torch.ones(width)), "b": nn.Parameter(torch.zeros(width))})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x + torch.tanh(x @ weight)
        return x * self.scales["a"] + self.scales["b"]


class Buffers(nn.Module):
    """A running mean, changed in place by every training forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("count", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.detach().float().mean((0, 1)) * 0.1)
                self.count.add_(1)
        return (x - self.mean) * self.scale


class Borrowed(nn.Module):
    """Uses the weight of another layer, which is not its child, in one of several ways."""

    def __init__(self, owner: nn.Module, name: str, width: int, variant: int) -> None:
        super().__init__()
        self.owner = (owner, name)  # in a tuple: not a child
        self.variant = variant
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        owner, name = self.owner
        weight = getattr(owner, name)
        if self.variant == 0:
            return F.linear(x, weight, self.bias)
        if self.variant == 1:
            return x @ weight.t() + self.bias
        if self.variant == 2:
            return torch.einsum("btw,vw->btv", x, weight[:]) + self.bias
        return F.linear(x, weight * 0.5 + 0.1, self.bias)


class FunctionalCall(nn.Module):
    """A layer called with other parameters than its own, made from its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        changed = {name: p * 0.5 for name, p in self.layer.named_parameters()}
        return torch.func.functional_call(self.layer, changed, (x,)) + self.layer(x)


class Lora(nn.Module):
    """A frozen layer and what is trained beside it."""

    def __init__(self, base: nn.Module, width: int, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, width) * 0.3)
        self.up = nn.Parameter(torch.randn(width, rank) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


class _SaveParam(torch.autograd.Function):
    """A product; the weight is kept by `save_for_backward`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        need = ctx.needs_input_grad
        return (grad @ weight.t() if need[0] else None, x.flatten(0, 1).t() @ grad.flatten(0, 1) if need[1] else None)


class _KeepParam(torch.autograd.Function):
    """A product; the weight is kept as an attribute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x.detach(), weight
        return x @ weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        need = ctx.needs_input_grad
        first = grad @ ctx.weight.t() if need[0] else None
        return first, ctx.x.flatten(0, 1).t() @ grad.flatten(0, 1) if need[1] else None


class _InPlaceTanh(torch.autograd.Function):
    """Writes over its input, and saves what it has written."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.tanh_()
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y)


def _in_place(layer: nn.Module, x: Tensor) -> Tensor:
    y = layer(x)
    y.relu_()
    z = y + 1.0
    z.add_(x).mul_(0.5)  # what is overwritten was not saved
    z[:, :1] = 0.25
    return z


def _in_place_product(own: Own, x: Tensor) -> Tensor:
    y = x * own.scale
    y += own.bias
    y[..., 0].mul_(0.5)
    return y.clamp_(-4.0, 4.0)


def _no_grad(own: Own, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = torch.tanh(x @ own.weight)
    return x + target * own.scale


def _alias(own: Own, x: Tensor) -> Tensor:
    transposed = own.weight.t()
    half = own.weight[: own.weight.shape[0] // 2]
    detached = own.weight.detach()
    return x @ transposed + F.pad(x @ half.t(), (0, transposed.shape[0] - half.shape[0])) + x @ detached * 0.1


def _foreign_hooks(own: Own, x: Tensor) -> Tensor:
    """Hooks of the user's around one operator that saves the parameter itself."""
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Any:
        kept.append(tensor)
        return len(kept) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda index: kept[index]):
        y = x * own.scale
    return y @ own.weight


def _call(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


def _first(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)[0]


def _over_time(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x.transpose(1, 2)).transpose(1, 2)


def _as_picture(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x.unsqueeze(1)).mean(1)


def _self_attention(layer: nn.Module, x: Tensor) -> Tensor:
    return x + layer(x, x, x, need_weights=False)[0]


def _product(own: Own, x: Tensor) -> Tensor:
    return x * own.scale + own.bias


def _gated(layer: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(layer, nn.ModuleList)
    return layer[0](x) * torch.sigmoid(layer[1](x))


def _bmm(own: Own, x: Tensor) -> Tensor:
    heads = x.unflatten(-1, (2, -1)).flatten(0, 1).transpose(0, 1)  # [2, batch * time, width / 2]
    return torch.bmm(heads, own.weight).transpose(0, 1).reshape(x.shape)


def _einsum(own: Own, x: Tensor) -> Tensor:
    return torch.einsum("btw,wv,v->btv", x, own.weight, own.scale)


def _position(own: Own, x: Tensor) -> Tensor:
    return x + own.table[: x.shape[1]]


def _lookup(layer: nn.Module, x: Tensor) -> Tensor:
    return x + layer((x.detach().float().sum(-1).abs() * 3).long() % 6)


def _save_param(own: Own, x: Tensor) -> Tensor:
    return _SaveParam.apply(x, own.weight)


def _keep_param(own: Own, x: Tensor) -> Tensor:
    return _KeepParam.apply(x, own.weight)


def _save_then_change(own: Own, x: Tensor) -> Tensor:
    return _InPlaceTanh.apply(x @ own.weight) * own.scale


def _detached(own: Own, x: Tensor) -> Tensor:
    return x + torch.tanh(x.detach() @ own.weight)


def make_leaf(layer: Layer, width: int, weights: list[tuple[nn.Module, str]]) -> nn.Module:
    """A layer without groups.

    Args:
        weights: `[width, width]` parameters of earlier layers, by owner and name, from which some borrow.
    """
    # No biases in attention: the true gradient of a key's is 0, and optimizers that divide by it blow roundings up.
    w, arg = width, layer.arg
    square = (w, w)
    makers: dict[str, Callable[[], nn.Module]] = {
        "linear": lambda: nn.Linear(w, w, bias=arg % 2 == 0),
        "mlp": lambda: nn.Sequential(nn.Linear(w, 2 * w), nn.GELU(), nn.Linear(2 * w, w)),
        "conv1d": lambda: Adapter(nn.Conv1d(w, w, 3, padding=1, groups=1 + arg % 2), _over_time),
        "conv2d": lambda: Adapter(nn.Conv2d(1, 3, 3, padding=1), _as_picture),
        "addmm": lambda: Addmm(w, w),
        "layer_norm": lambda: nn.LayerNorm(w),
        "rms_norm": lambda: nn.RMSNorm(w),
        "group_norm": lambda: Adapter(nn.GroupNorm(2, w), _over_time),
        "batch_norm": lambda: Adapter(nn.BatchNorm1d(w), _over_time),
        "attention": lambda: Attention(w),
        "mha": lambda: Adapter(nn.MultiheadAttention(w, 2, batch_first=True, bias=False), _self_attention),
        "encoder": lambda: nn.TransformerEncoderLayer(w, 2, 2 * w, 0.1 * (arg % 2), batch_first=True, bias=False),
        "lstm": lambda: Adapter(nn.LSTM(w, w, batch_first=True), _first),
        "gru": lambda: Adapter(nn.GRU(w, w, batch_first=True), _first),
        "product": lambda: Own(_product, scale=(w,), bias=(w,)),
        "gated": lambda: Adapter(nn.ModuleList([nn.Linear(w, w), nn.Linear(w, w)]), _gated),
        "bmm": lambda: Own(_bmm, weight=(2, w // 2, w // 2)),
        "einsum": lambda: Own(_einsum, weight=square, scale=(w,)),
        "experts": lambda: Experts(w, 2 + arg % 3),
        "dropout": lambda: nn.Dropout(0.2),
        "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(w, w)),
        "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(w, w)),
        "buffers": lambda: Buffers(w),
        "functional_call": lambda: FunctionalCall(w),
        "position": lambda: Own(_position, table=(8, w)),
        "lora": lambda: Lora(nn.Linear(w, w), w),
        "lora_addmm": lambda: Lora(Addmm(w, w), w),
        "lookup": lambda: Adapter(nn.Embedding(6, w), _lookup),
        "alias": lambda: Own(_alias, weight=square),
        "save_param": lambda: Own(_save_param, weight=square),
        "keep_param": lambda: Own(_keep_param, weight=square),
        "save_then_change": lambda: Own(_save_then_change, weight=square, scale=(w,)),
        "in_place": lambda: Adapter(nn.Linear(w, w), _in_place),
        "in_place_product": lambda: Own(_in_place_product, scale=(w,), bias=(w,)),
        "no_grad": lambda: Own(_no_grad, weight=square, scale=(w,)),
        "detached": lambda: Own(_detached, weight=square),
        "bilinear": lambda: Adapter(nn.Bilinear(w, w, w), lambda m, x: m(x, x)),
        "parameter_list": lambda: ParameterList(w),
        "foreign_hooks": lambda: Own(_foreign_hooks, weight=square, scale=(w,)),
    }
    if layer.kind == "borrowed":
        if not weights:
            return nn.Linear(w, w)
        owner, name = weights[arg % len(weights)]
        if arg % 3 == 2 and isinstance(owner, nn.Linear):
            tied = nn.Linear(w, w)
            tied.weight = owner.weight
            return tied
        return Borrowed(owner, name, w, arg % 4)
    return makers[layer.kind]()


def freeze(module: nn.Module, which: str) -> None:
    """ "all", or only parameters whose names end so."""
    for name, parameter in module.named_parameters():
        if which == "all" or (which and name.endswith(which)):
            parameter.requires_grad_(False)


def add_hook(module: nn.Module, kind: str) -> None:
    """A hook as users write them, that changes numbers."""
    if kind == "forward":
        module.register_forward_hook(lambda m, args, out: out * 1.25)
    elif kind == "pre":
        module.register_forward_pre_hook(lambda m, args: (args[0] * 0.75,))
    elif kind == "backward":
        module.register_full_backward_hook(lambda m, into, out: tuple(g if g is None else g * 0.5 for g in into))
    elif kind == "tensor":
        module.register_forward_hook(_hook_output)
    elif kind == "parameter":
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda grad: grad * 0.5)
    elif kind == "after_accumulation":
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_count)


def _hook_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    if output.requires_grad:
        output.register_hook(lambda grad: grad * 0.75)
    return output


def _count(parameter: Tensor) -> None:
    parameter.seen = getattr(parameter, "seen", 0) + 1  # type: ignore[attr-defined]


def squares(module: nn.Module, width: int) -> list[tuple[nn.Module, str]]:
    """Parameters that others may borrow."""
    return [
        (owner, name)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None and tuple(parameter.shape) == (width, width)
    ]


def make_layers(
    layers: tuple[Layer, ...], width: int, clock: Clock, weights: list[tuple[nn.Module, str]]
) -> list[nn.Module]:
    made: list[nn.Module] = []
    for layer in layers:
        module: nn.Module
        if layer.inner:
            inner = make_layers(layer.inner, width, clock, weights)
            module = Group(layer.kind, layer.arg, inner, clock, width)
        else:
            module = make_leaf(layer, width, weights)
            weights += squares(module, width)
        freeze(module, layer.frozen)
        if layer.hook:
            add_hook(module, layer.hook)
        made.append(module)
    return made


def copied(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module)

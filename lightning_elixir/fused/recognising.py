"""Which formula a module computes: told by running its own code on a few random numbers, not by its name.

So modules of any library are known, and one that only looks alike is left alone. What runs is the forward of the class
over small parameters of its own: the module's parameters, which may be anywhere, and the random state stay untouched.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor, nn

from lightning_elixir.core.module_hooks import CALL_HOOKS
from lightning_elixir.core.shells import is_shell
from lightning_elixir.fused.mixtures import mixture
from lightning_elixir.fused.operators import Gate, NormKind, activation, is_plain, rms_norm_by_torch

_EPS = ("variance_epsilon", "eps", "epsilon", "norm_eps", "layer_norm_epsilon")
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Attributes in which modules keep how many experts they have."""
TAKES_PAIRS = "_elixir_takes_pairs"
"""An attribute of forwards of experts that also take `num_pairs`, as `mixtures.mixture` does. Where they would have to
compute by the module's own forward, they give `NotImplemented`."""
_LARGE = 1e3  # beyond the limits at which some models cut values off
_GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def norm_formula(module: nn.Module) -> tuple[NormKind, float] | None:
    """Of an RMS norm: how it rounds, and its epsilon. None: it is none. Torch's own has a kernel already."""
    weight = module._parameters.get("weight")
    if "RMSNorm" not in type(module).__name__ and "T5LayerNorm" not in type(module).__name__:
        return None
    if isinstance(module, nn.RMSNorm) or set(module._parameters) != {"weight"} or weight is None or weight.dim() != 1:
        return None
    eps = next((vars(module)[name] for name in _EPS if isinstance(vars(module).get(name), float)), None)
    if eps is None or module._buffers or module._modules or not _takes_one(type(module).forward):
        return None
    found = [kind for kind in get_args(NormKind) if _is_norm(module, kind, eps)]
    return (found[0], eps) if found else None


def _takes_one(forward: Callable[..., Any]) -> bool:
    """Whether a forward has the input as its only argument. With another one, such as the gate of gated norms, it
    computes something else, even if that may be left out."""
    _, *taken = inspect.signature(forward).parameters.values()
    return sum(p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in taken) <= 1


def _is_norm(module: nn.Module, kind: NormKind, eps: float) -> bool:
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = _numbers(3, module._parameters["weight"].numel(), dtype=dtype)  # type: ignore[union-attr]
        probe = twin(module, parameters={"weight": nn.Parameter(weight[0], requires_grad=False)})
        with torch.no_grad():
            try:
                theirs = type(module).forward(probe, x)
            except Exception:  # whatever it needs: it is not this formula
                return False
            ours = rms_norm_by_torch(x, weight[0], eps, kind)
        if not _is_same(theirs, ours, 1e-5 if dtype is torch.float32 else 4e-3):
            return False
    return True


def gate_of(module: nn.Module) -> Gate | None:
    """The activation of `down_proj(act_fn(gate_proj(x)) * up_proj(x))`; None: the module is something else."""
    if set(module._modules) != _GATED or module._parameters or module._buffers:
        return None
    act = module._modules["act_fn"]
    kind = _activation_of(act)
    if kind is None:
        return None
    generator = torch.Generator().manual_seed(0)
    parts = {"gate_proj": (4, 6), "up_proj": (4, 6), "down_proj": (6, 4)}
    layers: dict[str, Any] = {}
    for name, (width, height) in parts.items():
        layer = nn.Linear(width, height, bias=False, device="meta").to_empty(device="cpu")
        layer.weight = nn.Parameter(torch.randn(height, width, generator=generator), requires_grad=False)
        layers[name] = layer
    probe = twin(module, modules={**layers, "act_fn": act})
    x = torch.randn(2, 3, 4, generator=generator)
    x = torch.cat((x, x * _LARGE))
    with torch.no_grad():
        try:
            theirs = type(module).forward(probe, x)
        except Exception:
            return None
        ours = layers["down_proj"](activation(layers["gate_proj"](x), kind) * layers["up_proj"](x))
    return kind if _is_same(theirs, ours, 1e-5) else None


def _activation_of(act: Any) -> Gate | None:
    """Of a module or a function."""
    if isinstance(act, nn.Module) and (list(act.parameters()) or any(vars(act).get(name) for name in CALL_HOOKS)):
        return None
    line = torch.cat((torch.linspace(-6, 6, 101), torch.tensor([-_LARGE, _LARGE])))
    with torch.no_grad():
        try:
            values = act(line)
        except Exception:  # it takes something else, or is none
            return None
    return next((kind for kind in get_args(Gate) if _is_same(values, activation(line, kind), 1e-6)), None)


def mixture_of(module: nn.Module) -> Gate | None:
    """The activation of a module that computes `mixtures.mixture` with its `gate_up_proj` and `down_proj`, given
    (tokens, numbers of experts, weights); None: the module is something else."""
    own = [module._parameters.get(name) for name in ("gate_up_proj", "down_proj")]
    if len(module._parameters) != 2 or module._buffers or any(p is None or p.dim() != 3 for p in own):
        return None
    if any(p is None or is_shell(p) or not p.is_floating_point() for p in own):
        return None  # quantised ones, or parts of others: products know them by their class
    if set(module._modules) - {"act_fn"}:
        return None
    kind = _activation_of(getattr(module, "act_fn", None))
    if kind is None:
        return None
    generator = torch.Generator().manual_seed(0)
    gate_up, down = (torch.randn(shape, generator=generator) for shape in ((3, 16, 8), (3, 8, 8)))
    small = {"gate_up_proj": gate_up, "down_proj": down}
    probe = twin(
        module,
        parameters={name: nn.Parameter(value, requires_grad=False) for name, value in small.items()},
        modules=dict(module._modules),
    )
    vars(probe).update({name: 3 for name in COUNTS if name in vars(module)})
    tokens, weights = torch.randn(4, 8, generator=generator), torch.rand(4, 2, generator=generator)
    tokens, weights = torch.cat((tokens, tokens * _LARGE)), torch.cat((weights, weights))
    numbers = torch.tensor([[0, 2], [2, 0], [2, 0], [0, 2]] * 2)  # one gets no tokens
    with torch.no_grad():
        try:
            theirs = type(module).forward(probe, tokens, numbers, weights)
        except Exception:
            return None
        ours = mixture(tokens, numbers, weights, gate_up, down, kind)
    return kind if _is_same(theirs, ours, 1e-5) else None


def is_rope(function: Any) -> bool:
    """Whether it turns queries and keys as `operators.rope` does, given (query, key, cos, sin)."""
    query, key = (t[:, : t.shape[1] - i] for i, t in enumerate(_numbers(1, 2, 3, 8)))
    angle = _numbers(1, 3, 4)[0]
    cos, sin = (torch.cat((f(angle), f(angle)), -1) for f in (torch.cos, torch.sin))
    try:
        theirs = function(query, key, cos, sin)
    except Exception:
        return False
    ours = tuple(_turned(t, cos.unsqueeze(1), sin.unsqueeze(1)) for t in (query, key))
    is_pair = isinstance(theirs, tuple) and len(theirs) == 2
    return is_pair and all(_is_same(a, b, 1e-5) for a, b in zip(theirs, ours, strict=True))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _numbers(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, *shape, generator=generator).to(dtype)
    return first, second


def twin(
    module: nn.Module, parameters: dict[str, Any] | None = None, modules: dict[str, Any] | None = None
) -> nn.Module:
    """A module of the same class and attributes, with other parameters and parts, and without hooks."""
    twin: nn.Module = object.__new__(type(module))
    twin.__dict__.update(vars(module))
    twin.__dict__.pop("forward", None)
    twin.__dict__.update({name: OrderedDict() for name in CALL_HOOKS})
    twin.__dict__["_parameters"] = parameters or {}
    twin.__dict__["_modules"] = modules or {}
    return twin


def _is_same(theirs: Any, ours: Tensor, tolerance: float) -> bool:
    if not is_plain(theirs) or theirs.dtype is not ours.dtype or theirs.shape != ours.shape:
        return False
    return torch.allclose(theirs.float(), ours.float(), rtol=tolerance, atol=tolerance)

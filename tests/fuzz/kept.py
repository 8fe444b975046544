"""`keep_fp32` of the oracle: which parameters stay in fp32 beside 16-bit ones, and what that does to their modules."""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from lightning_elixir.profiling.kept_fp32 import default_kept
from tests.fuzz.options import is_where
from tests.fuzz.programs import Program


def kept_names(program: Program, model: nn.Module) -> set[str]:
    """All names of the parameters that stay in fp32."""
    words = program.option("keep_fp32")
    found: set[str] = set()
    if program.option("master_weights", True) and words != ():
        is_alone = program.through == "trainer" and program.device == "cpu"  # there norms are left alone by autocast
        has_autocast = bool(program.option("autocast"))
        found = default_kept(model, has_autocast=has_autocast, leaves_norms=is_alone and has_autocast)
    everything = dict(model.named_parameters(remove_duplicate=False))
    for word in words or ():
        kind, _, rest = word.rpartition(":")
        if not kind:
            found |= {name for name in everything if fnmatchcase(name, word)}
        for name, module in model.named_modules(remove_duplicate=False):
            is_chosen = {
                "": bool(name) and fnmatchcase(name, word),
                "class": kind == "class" and isinstance(module, getattr(nn, rest)),
                "where": kind == "where" and is_where(int(rest), name, module),
            }[kind]
            if is_chosen:
                found |= {f"{name}.{own}" for own, _ in module.named_parameters(remove_duplicate=False)}
    shared = {id(everything[name]) for name in found}
    return {name for name, p in everything.items() if id(p) in shared}


def cast_around(model: nn.Module, kept: Collection[str], dtype: torch.dtype) -> None:
    """Without autocast: modules that are kept as a whole take 16-bit inputs as fp32, and give 16-bit results."""
    ids = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name in kept}
    below: set[int] = set()
    for name, module in model.named_modules():
        own = {id(p) for p in module.parameters()}
        is_norm = isinstance(module, nn.modules.batchnorm._NormBase)  # takes 16 bits as they are
        if name and own and own <= ids and not is_norm and type(module).forward is not nn.Module.forward:
            around = _Around(dtype, is_outermost=id(module) not in below)
            below |= {id(m) for m in module.modules()}
            module.register_forward_pre_hook(around.before, with_kwargs=True)
            module.register_forward_hook(around.after, always_call=True)


class _Around:
    def __init__(self, dtype: torch.dtype, *, is_outermost: bool) -> None:
        self._dtype = dtype
        self._is_outermost = is_outermost
        self._are_cast: list[bool] = []

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        floating = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.is_floating_point()]
        has_half = any(t.dtype is self._dtype for t in floating)
        self._are_cast.append(has_half or (not floating and self._is_outermost))
        return tuple(map(self._widened, args)), {name: self._widened(value) for name, value in kwargs.items()}

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._are_cast and self._are_cast.pop():
            return self._narrowed(output)
        return None

    def _widened(self, value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.dtype is self._dtype else value

    def _narrowed(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._narrowed, value))
        return value.to(self._dtype) if isinstance(value, Tensor) and value.dtype is torch.float32 else value

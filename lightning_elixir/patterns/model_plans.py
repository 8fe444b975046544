"""Patterns that models bring along: the `tp_plan` and `ep_plan` of transformers' models."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn

from lightning_elixir.core.compiled_modules import named_modules, uncompiled_name
from lightning_elixir.errors import PlanError
from lightning_elixir.patterns.base import ParallelPattern
from lightning_elixir.patterns.expert import Expert
from lightning_elixir.patterns.linear import Column, Row
from lightning_elixir.patterns.sequence import PartialGradients
from lightning_elixir.patterns.vocabulary import Vocabulary
from lightning_elixir.plan.mesh import Mesh

log = logging.getLogger(__name__)

_TENSOR: dict[str, ParallelPattern] = {
    "colwise": Column(),
    "rowwise": Row(),
    "rowwise_split_input": Row(splits=True),
    "colwise_gather_output": Vocabulary(),
    "embedding_rowwise": Vocabulary(),
    "replicated_with_grad_allreduce": PartialGradients(),
    # Their names in transformers 4 and 5.0.
    "rowwise_rep": Row(splits=True),
    "colwise_rep": Vocabulary(),
    "local_colwise": Column(),
    "local_rowwise": Row(),
}
# Until 5.17 or so transformers' experts had the same style in both plans; Expert needs nothing of their router.
_EXPERT: dict[str, ParallelPattern] = {"ep_dispatch_experts": Expert(), "moe_tp_experts": Expert()}
_LEFT_WHOLE = {"replicate", "moe_tp_experts", "grouped_gemm", "ep_router", "local", "gather"}
"""Styles of modules and parameters that every rank along the axis keeps, or that the module above them is for, where
there is no pattern for them. "gather" adds up what ranks have made of the layers below, which Row has done already."""
_OF_A_PART = {"q_norm", "k_norm", "v_norm", "act_fn"}
"""Names of modules that compute with whole parameters on what a layer with Column has made, if they fit it. Some plans
leave them out: those of transformers 4, and of a few models since."""


def own_patterns(model: nn.Module, mesh: Mesh) -> dict[str | type, ParallelPattern]:
    """Module name -> pattern, for the axes of more than one rank.

    Args:
        model: With models of transformers in it, perhaps wrapped by peft.
        mesh: The ranks.

    Raises:
        PlanError: An axis for which no model brings a plan, or a plan asks for what there is no pattern for.
    """
    found: dict[str | type, ParallelPattern] = {}
    for name, inner in _models(model):
        prefix = f"{name}." if name else ""
        if mesh.tensor > 1:
            _check_heads(inner, mesh.tensor)
            plan = _plan(inner, "tp_plan")
            chosen = _resolved(inner, "tp_plan", plan, _TENSOR)
            chosen |= _of_parts(inner, plan, chosen, mesh.tensor)
            found |= {prefix + at: one for at, one in _without_uneven_vocabulary(inner, chosen, mesh.tensor).items()}
        if mesh.expert > 1:
            plan = _plan(inner, "ep_plan") or _experts(_plan(inner, "tp_plan"))
            found |= {prefix + at: one for at, one in _resolved(inner, "ep_plan", plan, _EXPERT).items()}
    for axis, kind, since in (("tensor", "tp_plan", ""), ("expert", "ep_plan", " from 5.0 on")):
        if mesh.size(axis) > 1 and not any(one.axis == axis for one in found.values()):
            raise PlanError(
                f"{axis}_parallel_size={mesh.size(axis)}, but no patterns say what to cut, and the model brings no"
                f" {kind} as models of transformers do{since}: give ElixirStrategy patterns={{name of a module:"
                " pattern}"
            )
    return found


def brings_plan(model: nn.Module) -> bool:
    """Whether modules in a model may say by themselves how they are cut."""
    return next(_models(model), None) is not None


def _models(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules that bring plans along."""
    seen: list[str] = []
    for name, module in named_modules(model).items():
        is_inside = any(name == one or not one or name.startswith(f"{one}.") for one in seen)
        if not is_inside and isinstance(getattr(type(module), "tp_plan", None), property):
            seen.append(name)
            yield name, module


def _plan(model: nn.Module, kind: str) -> Mapping[str, str]:
    # In transformers before 5.18 or so the plan for experts has a private name alone.
    plan: Mapping[str, str] = getattr(model, kind, None) or getattr(model, f"_{kind}", None) or {}
    return plan


def _experts(tensor_plan: Mapping[str, str]) -> Mapping[str, str]:
    """A plan for experts, of a model that has none: until 5.13 or so most named their experts in `tp_plan` alone."""
    return {
        key: "moe_tp_experts"
        for key, style in tensor_plan.items()
        if style in ("moe_tp_experts", "gather") and key.endswith("experts")
    }


def _rules(plan: Mapping[str, str]) -> dict[str, re.Pattern[str]]:
    """What each key of a plan stands for; a star is one part of a name."""
    return {key: re.compile(re.escape(key).replace(r"\*", r"[^.]+")) for key in plan}


def _resolved(
    model: nn.Module, kind: str, plan: Mapping[str, str], known: Mapping[str, ParallelPattern]
) -> dict[str, ParallelPattern]:
    modules = named_modules(model)
    meant = _rules(plan)
    left_whole = _LEFT_WHOLE - set(known)
    whole = [
        name for name in modules for key, rule in meant.items() if plan[key] in left_whole and rule.fullmatch(name)
    ]
    found: dict[str, ParallelPattern] = {}
    for key, style in plan.items():
        names = [name for name in modules if meant[key].fullmatch(name)]
        parameters = [name for name in _names_of_parameters(model) if meant[key].fullmatch(name)]
        is_handled = all(any(name.startswith(f"{top}.") for top in [*whole, *found]) for name in parameters)
        if style in left_whole or (not names and is_handled):
            continue
        if style not in known or parameters:
            raise PlanError(
                f"the model's own {kind} has {style!r} for {key}, for which there is no pattern: give ElixirStrategy"
                " the patterns of this model (patterns=...)"
            )
        found |= dict.fromkeys(names, known[style])
    return found


def _of_parts(
    model: nn.Module, plan: Mapping[str, str], found: Mapping[str, ParallelPattern], size: int
) -> dict[str, ParallelPattern]:
    """Patterns for what stands beside layers with Column and a plan forgets: each rank would train it with the
    gradients of its part alone.

    Raises:
        PlanError: There is something beside them that is not known to take a part.
    """
    modules, rules = named_modules(model), _rules(plan).values()
    names = {*modules, *_names_of_parameters(model)}
    said = {above for name in names if any(rule.fullmatch(name) for rule in rules) for above in _and_above(name)}
    widths: dict[str, list[int]] = {}
    for name, pattern in found.items():
        if isinstance(pattern, Column):
            widths.setdefault(name.rpartition(".")[0], []).append(getattr(modules[name], "out_features", 0) // size)
    more: dict[str, ParallelPattern] = {}
    for parent, numbers in widths.items():
        for name in _with_parameters(modules[parent]):
            full = f"{parent}.{name}" if parent else name
            if full in said:
                continue
            if name not in _OF_A_PART or not _fits(modules[full], numbers):
                raise PlanError(
                    f"the model's own tp_plan cuts layers of {parent or 'the model'} and says nothing of {full}, which"
                    " may get a rank's part of what they make: give ElixirStrategy the patterns of this model"
                    " (patterns=...)"
                )
            more[full] = PartialGradients()
    return more


def _names_of_parameters(model: nn.Module) -> list[str]:
    return [uncompiled_name(name) for name, _ in model.named_parameters()]


def _and_above(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]


def _with_parameters(module: nn.Module) -> Iterator[str]:
    """Names of a module's own parameters, and of the modules in it that have some."""
    yield from (name for name, _ in module.named_parameters(recurse=False))
    yield from (name for name, child in module.named_children() if next(child.parameters(), None) is not None)


def _fits(module: nn.Module, widths: Collection[int]) -> bool:
    """Whether the parameters of a module are as wide as a head, or a fraction of it, of a rank's part. Width 0: that of
    a layer that does not tell it, which nothing fits."""
    return all(any(width and width % p.numel() == 0 for width in widths) for p in module.parameters())


def _within_adapters(module: nn.Module) -> nn.Module:
    """The layer that peft has wrapped, or the module itself."""
    inner = getattr(module, "base_layer", None)
    return inner if isinstance(inner, nn.Module) else module


def _check_heads(model: nn.Module, size: int) -> None:
    config: Any = getattr(model, "config", None)
    for name in ("num_attention_heads", "num_key_value_heads"):
        number = getattr(config, name, None)
        if isinstance(number, int) and number % size:
            raise PlanError(
                f"the model's {name} is {number}, which cannot be cut into {size} equal parts: choose a"
                " tensor_parallel_size that divides it"
            )


def _without_uneven_vocabulary(
    model: nn.Module, found: dict[str, ParallelPattern], size: int
) -> dict[str, ParallelPattern]:
    """A vocabulary that cannot be cut into equal parts stays whole, as does one with an embedding that peft has
    wrapped, or that is tied to a layer without a pattern."""
    modules = named_modules(model)
    of_vocabulary = {name: modules[name] for name, one in found.items() if isinstance(one, Vocabulary)}
    uses: dict[int, set[str]] = {}
    for name, module in modules.items():
        for parameter in module.parameters(recurse=False):
            uses.setdefault(id(parameter), set()).add(name.removesuffix(".base_layer"))
    adapted = {n for n, m in of_vocabulary.items() if isinstance(getattr(m, "base_layer", None), nn.Embedding)}
    left = set(adapted)
    for module in of_vocabulary.values():
        for parameter in _within_adapters(module).parameters(recurse=False):
            if parameter.shape[0] % size or not uses[id(parameter)] <= set(of_vocabulary) - adapted:
                left |= uses[id(parameter)]
    if left:
        why = "it has adapters" if adapted else f"it cannot be cut into {size} equal parts"
        log.info("the vocabulary stays whole on every rank: %s", why)
    return {name: one for name, one in found.items() if name not in left}

"""Which modules of a model are its blocks: the layers that repeat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch import nn

from lightning_elixir.core.compiled_modules import compiled_regions, inner_of
from lightning_elixir.errors import PlanError
from lightning_elixir.plan.activations import ActivationRequest, Fate, ModelBlock, has_offloaded
from lightning_elixir.plan.selection import matching, near_misses
from lightning_elixir.plan.types import Plan

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_UNCALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # without a forward of their own
_CHECKPOINTING_LAYER = "GradientCheckpointingLayer"  # of transformers, which need not be there
_MOST_SHOWN = 3


def items_of_lists(module: nn.Module, least: int | None = None) -> Iterator[nn.Module]:
    """The items of the outermost lists of layers, and in the place of those that are stacks of blocks themselves (an
    encoder and a decoder, say) theirs.

    Args:
        least: What has more elements than this may be such a stack; None: a quarter of the module.
    """
    least = num_elements(module) // 4 if least is None else least
    items = [item for item in module.children() if has_parts(item)] if isinstance(module, _LISTS) else []
    is_never_called = isinstance(module, _UNCALLED)
    if len(items) > 1 or (items and is_never_called):
        for item in items:
            is_stack = isinstance(item, _UNCALLED) or num_elements(item) > least
            below = list(items_of_lists(item, least)) if is_stack else []
            if below or isinstance(item, _UNCALLED):
                yield from below or [part for part in item.children() if has_parts(part)]
            else:
                yield item
        return
    for child in module.children():
        yield from items_of_lists(child, least)


def has_parts(module: nn.Module) -> bool:
    """Whether there is more to it than one operator."""
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def num_elements(module: nn.Module) -> int:
    """Of all parameters."""
    return sum(p.numel() for p in module.parameters())


def found_blocks(model: nn.Module) -> tuple[str, ...]:
    """Names of the blocks that a model has: layers that transformers would checkpoint; else modules of a class that
    repeats in a list of layers. None lies in another, or inside compiled code."""
    layers = list(_outermost_layers(model))
    if not layers:
        # Tied layers come several times.
        layers = list({id(m): m for m in (*items_of_lists(model), *_leaf_items(model))}.values())
        counts = Counter(type(layer) for layer in layers)
        layers = [layer for layer in layers if counts[type(layer)] > 1]
    found = {id(layer) for layer in layers} - _inside_compiled(model)
    names = [name for name, module in model.named_modules() if name and id(module) in found]
    return tuple(name for name in names if not any(name.startswith(f"{other}.") for other in names))


def _outermost_layers(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        whole = inner_of(child)  # of `torch.compile(layer)`
        if any(base.__name__ == _CHECKPOINTING_LAYER for base in type(whole).__mro__):
            yield child
        else:
            yield from _outermost_layers(child)


def _leaf_items(model: nn.Module) -> Iterator[nn.Module]:
    """Items of lists that hold their parameters themselves, and are of no class of torch's."""
    for module in model.modules():
        if isinstance(module, _LISTS):
            for item in module.children():
                is_own = not type(item).__module__.startswith("torch.") and not has_parts(item)
                if is_own and any(True for _ in item.parameters()):
                    yield item


def _inside_compiled(model: nn.Module) -> set[int]:
    """Modules (by id) whose calls are part of compiled code, and so cannot be told apart in it."""
    regions = compiled_regions(model)
    return {id(m) for region in regions for m in region.inside} - {id(region.entrance) for region in regions}


def blocks_of(model: nn.Module, request: ActivationRequest) -> tuple[ModelBlock, ...]:
    """The blocks of a model that a plan says something of, in the order of registration. Where the plan is to choose,
    they begin as kept.

    Args:
        model: With the classes that it was built of.
        request: What the user asked for.

    Raises:
        PlanError: There are no blocks, or none that a glob means; one lies in another, has no forward, or is part of
            compiled code.
    """
    if request.is_nothing:
        return ()
    found = found_blocks(model)
    if request.by_glob:
        fates = _named(model, request, found)
    else:
        fates = dict.fromkeys(found, request.everywhere or Fate.KEEP)
        if not found and not request.is_searched:
            raise PlanError(
                f"activations: {type(model).__name__} has no layers of one class in a list, so that none are known as"
                " blocks. Name them: activations={'encoder.*': 'recompute'}; of what is compiled as a whole, compile"
                " the blocks"
            )
    order = [name for name, _ in model.named_modules() if name in fates]
    return tuple(ModelBlock(name, fates[name]) for name in order)


def with_activations(model: nn.Module, plan: Plan, option: object) -> Plan:
    """A plan with what a user says of activations.

    Args:
        model: With the classes that it was built of.
        plan: Says it otherwise.
        option: The value of an option `activations`; None, "auto": as the plan has it.

    Raises:
        PlanError: "auto", of a plan that says nothing; a value that is none; or one that does not suit the model.
    """
    request = ActivationRequest.of(option)
    if request.is_searched and not plan.activations:
        raise PlanError(
            "activations='auto': the given plan does not choose them: make it with"
            " optimal_search(activations='auto', inp=..., step_fn=...), or say 'keep', 'recompute' or 'offload'"
        )
    if request.is_nothing or request.is_searched:
        check_blocks(model, [block.name for block in plan.activations])
        return plan
    blocks = blocks_of(model, request)
    if blocks == plan.activations:
        return plan
    # The figures were those of other activations.
    return replace(plan, activations=blocks, activation_host_bytes=None if has_offloaded(blocks) else 0, forecast=None)


def _named(model: nn.Module, request: ActivationRequest, found: tuple[str, ...]) -> dict[str, Fate]:
    fates: dict[str, Fate] = {}
    modules = {name: module for name, module in model.named_modules() if name}
    for glob, fate in request.by_glob:
        names = matching(glob, found) or [n for n in matching(glob, modules) if not isinstance(modules[n], _UNCALLED)]
        if not names:
            shown = near_misses(glob, modules)
            known = f"; did you mean {', '.join(shown)}?" if shown else ""
            blocks = f"its blocks are {', '.join(found[:_MOST_SHOWN])}, ..." if found else "no blocks were found in it"
            raise PlanError(f"activations: the model has no module {glob!r} that can be called{known} ({blocks})")
        for name in _outermost(names):
            fates.setdefault(name, fate)
    check_blocks(model, fates)
    return fates


def _outermost(names: list[str]) -> list[str]:
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]


def check_blocks(model: nn.Module, names: Iterable[str]) -> None:
    """Raises `PlanError` for names of which no block can be made."""
    modules = dict(model.named_modules())
    inside, known = _inside_compiled(model), list(names)
    for name in known:
        if name not in modules:
            raise PlanError(
                f"activations: the plan names {name}, which the model has not got: make a plan of this model"
            )
        above = next((other for other in known if name.startswith(f"{other}.")), None)
        if above is not None:
            raise PlanError(f"activations: {name} lies in {above}: name one of the two")
        if id(modules[name]) in inside:
            raise PlanError(
                f"activations: {name} is part of code that is compiled as a whole: compile the blocks one by one"
                " instead (for block in model.layers: block.compile())"
            )

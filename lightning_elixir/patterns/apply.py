"""Patterns into a model: whose parameters become parts, and whose modules talk to their peers.

[Note: patterns] A module keeps its class, its names and its hooks. Its `forward` becomes an attribute that calls the
pattern (`PatternForward`), and that the class's own; each parameter that is cut becomes one on `meta` in the shape
of a part, with its cuts, and on the rank that has the values with the whole (`patterns/cuts.py`). The engine fills
parts from that. All of it can be taken back (`take_out`), as a further run may have other patterns.

Compiled blocks have the patterns along "tensor" in their graphs, with functional collectives (`patterns/peers.py`).
Experts run as they are, and blocks with experts are compiled in parts around them (`keep_out`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_elixir.core.compiled_modules import compiled_regions, keep_out, named_modules
from lightning_elixir.errors import PlanError
from lightning_elixir.patterns.adapted_experts import is_adapted
from lightning_elixir.patterns.base import ParallelPattern
from lightning_elixir.patterns.cuts import set_cuts, whole_of
from lightning_elixir.patterns.expert import Expert
from lightning_elixir.patterns.peers import Peers, Wire
from lightning_elixir.patterns.placed import check_placed, placed_in, placed_modules
from lightning_elixir.plan.mesh import AxisCut, Mesh
from lightning_elixir.plan.selection import matching, near_misses
from lightning_elixir.plan.weighing import Exchanged

Patterns = Mapping[str | type, ParallelPattern]


class PatternForward:
    """What a module with a pattern has as its `forward`: the method `__call__` of this, since the compiler tells other
    objects apart one by one, and would compile each block anew.

    Args:
        name: Of the module, from the root of the model.
        module: Whose.
        pattern: What computes in its place.
        peers: The ranks that share its work.
    """

    def __init__(self, name: str, module: nn.Module, pattern: ParallelPattern, peers: Peers) -> None:
        self.name = name
        self.module = module
        self.pattern = pattern
        self.peers = peers
        self.compute: Callable[..., Any] = module.forward
        self.is_in_place_of_own = "forward" in vars(module)  # not of its class, but put into the module itself
        known = inspect.signature(self.compute).parameters.values()
        self._names = [p.name for p in known if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self.replaced: dict[str, Any] = {}
        """Attributes of the module as they were."""

    @property
    def calls_compute(self) -> bool:
        """Whether the pattern is known to have `compute` do what the module does, whatever that is."""
        return type(self.pattern).forward in (ParallelPattern.forward, Expert.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for name in self._names[len(args) :] if kwargs else ():  # patterns look at arguments by their positions
            if name not in kwargs:
                break
            args = (*args, kwargs[name])
            kwargs = {key: value for key, value in kwargs.items() if key != name}
        # Of one in backward (activation checkpointing) nothing is told: fates have no part in it.
        if self.peers.is_listened_to and torch._C._current_graph_task_id() == -1:
            with self.peers.forward_of(self.name):
                return self.pattern.forward(self.module, self.compute, self.peers, args, kwargs)
        return self.pattern.forward(self.module, self.compute, self.peers, args, kwargs)


def pattern_forwards(model: nn.Module) -> Iterator[PatternForward]:
    """Those in a model."""
    for module in model.modules():
        found = getattr(vars(module).get("forward"), "__self__", None)
        if isinstance(found, PatternForward):
            yield found


def uncompiled_modules(model: nn.Module) -> list[nn.Module]:
    """Those in a model that are not for compiled code: how many rows come to a rank is another number in each step,
    which it is told in between."""
    return [forward.module for forward in pattern_forwards(model) if _is_uncompiled(forward.pattern)]


def check_compiled(model: nn.Module) -> None:
    """Raises `PlanError` if modules with patterns are in compiled code that would run again without their ranks having
    met."""
    ids = {id(forward.module) for forward in pattern_forwards(model)}
    for region in compiled_regions(model):
        if region.has_cuda_graphs and any(id(module) in ids for module in region.entrance.modules()):
            raise PlanError(
                f"{type(region.entrance).__name__} is compiled with CUDA graphs (mode='reduce-overhead' or"
                " 'max-autotune') and has modules with parallel patterns, whose ranks meet in each step: compile with"
                " mode='default' or 'max-autotune-no-cudagraphs'"
            )


def _is_uncompiled(pattern: ParallelPattern) -> bool:
    return pattern.axis == "expert"


def bind_peers(model: nn.Module, wire: Wire | None) -> None:
    """Connect the peers of all patterns in a model; None: disconnect them."""
    for forward in pattern_forwards(model):
        forward.peers.bind(wire)
    for _, _, placed in placed_modules(model):
        placed.bind(wire)


@contextmanager
def exchanges_of(model: nn.Module) -> Iterator[list[Exchanged]]:
    """What the patterns in a model exchange in steps without values inside."""
    found: list[Exchanged] = []

    def hear(axis: str, kind: str, nbytes: int, forward_of: str) -> None:
        found.append(Exchanged(axis, kind, nbytes, forward_of))

    every = [forward.peers for forward in pattern_forwards(model)]
    for peers in every:
        peers.listen(hear)
    try:
        yield found
    finally:
        for peers in every:
            peers.listen(None)


def take_out(model: nn.Module) -> None:
    """Have modules be as they were, and parameters that no engine has taken over."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            whole = None if parameter is None else whole_of(parameter)
            if whole is not None:
                setattr(module, name, whole)
    for forward in list(pattern_forwards(model)):
        if forward.is_in_place_of_own:
            forward.module.forward = forward.compute
        else:
            del forward.module.forward
        for name, value in forward.replaced.items():
            setattr(forward.module, name, value)


def met_keys(model: nn.Module, patterns: Patterns) -> set[str | type]:
    """Keys of patterns that mean a module of a model."""
    modules = named_modules(model, remove_duplicate=False)
    return {key for key in patterns if _names_meant(key, modules)}


def put_in(model: nn.Module, patterns: Patterns, mesh: Mesh, rank: int) -> None:
    """Put patterns into a model. The same on every rank.

    Args:
        model: With whole parameters; on ranks other than 0 they may be on `meta`.
        patterns: By globs over names of modules, or by classes.
        mesh: The ranks. Patterns along an axis of one rank do nothing.
        rank: This one.

    Raises:
        PlanError: A key means no module, a module has two patterns, or a parameter cannot be cut.
    """
    take_out(model)
    check_placed(model, mesh)
    peers = {axis: Peers(axis, mesh.size(axis), mesh.coordinate(rank, axis)) for axis in ("tensor", "expert")}
    chosen = _chosen(model, patterns)
    active = {name: pattern for name, pattern in chosen.items() if peers[pattern.axis].size > 1}
    modules = named_modules(model, remove_duplicate=False)
    cuts = _cuts_of(active, modules, mesh)
    _add_placed(model, cuts, active)
    _check_ties(model, cuts, active)
    keep_out(model, [modules[name] for name, pattern in active.items() if _is_uncompiled(pattern)])
    done: set[int] = set()
    for name, pattern in active.items():
        module = modules[name]
        if id(module) in done:
            continue
        done.add(id(module))
        forward = PatternForward(name, module, pattern, peers[pattern.axis])
        for key, value in pattern.attributes(module, forward.peers).items():
            forward.replaced[key] = getattr(module, key)
            setattr(module, key, value)
        module.forward = forward.__call__
    check_compiled(model)
    _replace(model, cuts, mesh)


def _chosen(model: nn.Module, patterns: Patterns) -> dict[str, ParallelPattern]:
    """Name of a module -> its pattern, after each has told which modules it is for."""
    modules = named_modules(model, remove_duplicate=False)
    found: dict[str, tuple[ParallelPattern, str | type]] = {}
    for key, pattern in patterns.items():
        names = _meant(key, modules)
        for name in names:
            for below, own in _targets(pattern, name, modules[name]).items():
                target = f"{name}.{below}" if name and below else name or below
                known = found.get(target)
                if known is not None and known[0] != own:
                    raise PlanError(
                        f"patterns: {target} has two, {known[0]!r} by {_shown(known[1])} and {own!r} by {_shown(key)}:"
                        " give each module one"
                    )
                found[target] = own, key
    return {name: pattern for name, (pattern, _) in found.items()}


def _targets(pattern: ParallelPattern, name: str, module: nn.Module) -> Mapping[str, ParallelPattern]:
    try:
        return pattern.targets(module)
    except PlanError as error:
        raise PlanError(f"patterns: {name}: {error}") from error


def _shown(key: str | type) -> str:
    return repr(key) if isinstance(key, str) else key.__name__


def _names_meant(key: str | type, modules: Mapping[str, nn.Module]) -> list[str]:
    if isinstance(key, type):
        return [_adapted(name, modules) for name, module in modules.items() if isinstance(module, key)]
    return matching(key, modules)


def _meant(key: str | type, modules: Mapping[str, nn.Module]) -> list[str]:
    names = _names_meant(key, modules)
    if not names:
        close = near_misses(key, modules) if isinstance(key, str) else []
        hint = f"; close to it are {', '.join(close)}" if close else ""
        raise PlanError(f"patterns: the model has no module {_shown(key)}{hint}")
    return names


def _adapted(name: str, modules: Mapping[str, nn.Module]) -> str:
    """Of the outermost wrapper that peft has put around a module, which has its place in the model."""
    while (outer := name.removesuffix(".base_layer")) != name and is_adapted(modules[outer]):
        name = outer
    return name


def _cuts_of(
    active: Mapping[str, ParallelPattern], modules: Mapping[str, nn.Module], mesh: Mesh
) -> dict[int, tuple[AxisCut, ...]]:
    """By `id` of the parameter."""
    found: dict[int, tuple[AxisCut, ...]] = {}
    for name, pattern in active.items():
        module = modules[name]
        own = dict(module.named_parameters(remove_duplicate=False))
        try:
            dims = pattern.cuts(module)
        except PlanError as error:
            raise PlanError(f"patterns: {name}: {error}") from error
        for below, dim in dims.items():
            if below not in own:
                raise PlanError(f"patterns: {name}: {pattern!r} cuts a parameter {below}, which is not there")
            parameter, whole = own[below], f"{name}.{below}" if name else below
            size = mesh.size(pattern.axis)
            if not 0 <= dim < parameter.dim() or parameter.shape[dim] % size:
                raise PlanError(
                    f"patterns: {whole} {list(parameter.shape)} cannot be cut into {size} equal parts along dimension"
                    f" {dim} ({pattern.axis}_parallel_size={size}): choose a size that divides it, pad the model to a"
                    " multiple, or give the module no pattern"
                )
            known = found.get(id(parameter), ())
            cut = AxisCut(pattern.axis, dim)
            if any(c != cut and (c.axis == cut.axis or c.dim == cut.dim) for c in known):
                raise PlanError(f"patterns: {whole} would be cut in two ways: give modules that share it one pattern")
            if cut not in known:
                found[id(parameter)] = (*known, cut)
    return found


def _add_placed(model: nn.Module, cuts: dict[int, tuple[AxisCut, ...]], active: Mapping[str, ParallelPattern]) -> None:
    """Cut what was a DTensor as that was."""
    found: dict[int, AxisCut | None] = {}
    for name, module, placed in placed_modules(model):
        if name in active and active[name].axis == placed.axis:
            raise PlanError(f"{name} was given to parallelize_module(), and has a pattern as well: leave out one")
        for below in placed.placements:
            parameter, whole = module._parameters.get(below), f"{name}.{below}" if name else below
            if parameter is None:
                continue
            cut = placed.cut(below)
            if found.setdefault(id(parameter), cut) != cut:
                raise PlanError(f"{whole}, a DTensor, is shared by modules that place it in two ways: place it alike")
            if any(known.axis == placed.axis for known in cuts.get(id(parameter), ())):
                raise PlanError(f"{whole} was cut by parallelize_module(), and has a pattern as well: leave out one")
    for key, cut in found.items():
        if cut is not None:
            cuts[key] = (*cuts.get(key, ()), cut)


def _check_ties(
    model: nn.Module, cuts: Mapping[int, tuple[AxisCut, ...]], active: Mapping[str, ParallelPattern]
) -> None:
    """A parameter that is cut must not be used by a module without a pattern."""
    for name, module in named_modules(model).items():
        placed = placed_in(module)
        if any(name == top or name.startswith(f"{top}.") for top in active if top):
            continue
        for below, parameter in module.named_parameters(recurse=False):
            if placed is not None and below in placed.placements:
                continue
            if id(parameter) in cuts and name not in active:
                other = next(n for n, p in model.named_parameters(remove_duplicate=False) if p is parameter)
                raise PlanError(
                    f"patterns: {name}.{below} is the same parameter as {other}, which a pattern cuts: give both"
                    " modules the pattern (Vocabulary, for an embedding that is the output layer as well), or none"
                )


def _replace(model: nn.Module, cuts: Mapping[int, tuple[AxisCut, ...]], mesh: Mesh) -> None:
    """Put parts in the places of whole parameters."""
    parts: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or id(parameter) not in cuts:
                continue
            part = parts.get(id(parameter))
            if part is None:
                part = parts[id(parameter)] = _part_of(parameter, cuts[id(parameter)], mesh)
            setattr(module, name, part)


def _part_of(parameter: nn.Parameter, cuts: tuple[AxisCut, ...], mesh: Mesh) -> nn.Parameter:
    shape = list(parameter.shape)
    for cut in cuts:
        shape[cut.dim] //= mesh.size(cut.axis)
    data = torch.empty(shape, dtype=parameter.dtype, device="meta")
    part = nn.Parameter(data, requires_grad=parameter.requires_grad)
    if type(parameter) is not nn.Parameter:
        part.__class__ = type(parameter)
    part.__dict__.update(parameter.__dict__)
    set_cuts(part, cuts, parameter)
    return part

"""Modules whose parameters were DTensors: what torch's `parallelize_module` has left of them.

[Note: DTensors] A DTensor is a shell around this rank's part, with words about the whole. Chunks hold plain parts, so
here the words go to the module, and its parameter becomes a plain one, cut as the DTensor was: from then on it is a
parameter of a pattern (`patterns/cuts.py`), to planning, the engine, optimizers and checkpoints. Code that computes
reads the parameter as an attribute of its module. While an engine computes, it is a DTensor over the part, for this
one use, so torch's own operators and parallel styles run as ever. What autograd saves of it is its part, which the
engine knows (`runtime/hooks.py`). A gradient comes back to the part in the DTensor's own placement: one that is a sum
over ranks, as those of norms along a cut sequence are, is added up here.

Whole values wait on the first rank for the engine, as those of patterns do. So a model that is built anew after a fit,
or has no engine yet, has plain, whole parameters under its own names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from lightning_elixir.errors import PlanError, StateError
from lightning_elixir.patterns.peers import Wire, is_without_values
from lightning_elixir.plan.mesh import AxisCut, Mesh

_PLACED = "_elixir_placed"


class _Group(Protocol):
    """What binds collectives of DTensors to an engine: `core/meeting_group.py`."""

    axis: str

    @property
    def is_bound(self) -> bool: ...

    def bind(self, host: Wire | None) -> None: ...


class Placed:
    """What the DTensors of one module were.

    Args:
        mesh: Torch's, of one dimension.
        placements: Name of a parameter or buffer, in the module -> its placements.
    """

    def __init__(self, mesh: Any, placements: Mapping[str, tuple[Any, ...]]) -> None:
        self.mesh = mesh
        self.placements = dict(placements)
        self._wire: Wire | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Placed:
        return self  # copies of a module talk to the same ranks

    def __reduce__(self) -> Any:
        return Placed, (None, self.placements)  # another process has other groups

    @property
    def axis(self) -> str:
        """Along which the parts are."""
        group: _Group = self.mesh.get_group()
        return group.axis

    @property
    def is_connected(self) -> bool:
        """Whether its ranks can still be talked to."""
        try:
            return self.mesh is not None and self.mesh.get_group() is not None
        except (RuntimeError, ValueError, KeyError):  # the group is gone
            return False

    @property
    def is_taken(self) -> bool:
        """Whether an engine has its collectives."""
        group: _Group = self.mesh.get_group()
        return group.is_bound

    @property
    def size(self) -> int:
        """How many ranks there are along it."""
        return int(self.mesh.size())

    def bind(self, wire: Wire | None) -> None:
        """Have collectives go over this from now on; None: there is no engine any more."""
        self._wire = wire
        if wire is not None or self.is_connected:
            group: _Group = self.mesh.get_group()
            group.bind(wire)

    def as_seen(self, name: str, tensor: Tensor) -> Tensor:
        """What the attribute of the parameter gives: a DTensor where its module computes."""
        is_computing = self._wire is not None and self._wire.is_computing
        if is_computing or is_without_values(tensor):
            seen: Tensor = _Shell.apply(tensor, self.mesh, self.placements[name])  # type: ignore[no-untyped-call]
            return seen
        return tensor

    def cut(self, name: str) -> AxisCut | None:
        """How a parameter is cut; None: each rank has all of it."""
        (placement,) = self.placements[name]
        return AxisCut(self.axis, placement.dim) if placement.is_shard() and self.size > 1 else None


class _Shell(Function):
    """A DTensor over a part, whose gradient is the part's."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, mesh: Any, placements: tuple[Any, ...]) -> Tensor:
        from torch.distributed.tensor import DTensor

        ctx.where = mesh, placements
        return DTensor.from_local(local.view_as(local), mesh, placements, run_check=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> tuple[Tensor, None, None]:
        mesh, placements = ctx.where
        local = grad.redistribute(mesh, placements).to_local()
        return (local.wait() if hasattr(local, "wait") else local), None, None


def placed_in(module: nn.Module) -> Placed | None:
    """What the DTensors of this one module were; None: it had none."""
    found: Placed | None = vars(module).get(_PLACED)
    return found


def placed_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, Placed]]:
    """Those in a model that had DTensors, with their names."""
    for name, module in model.named_modules():
        placed = placed_in(module)
        if placed is not None:
            yield name, module, placed


def is_dtensor(tensor: Tensor | None) -> bool:
    """Whether it is one of torch's distributed tensors."""
    return tensor is not None and any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__)


def take_over(model: nn.Module, mesh: Mesh, rank: int) -> bool:
    """Have plain, whole parameters and buffers in the places of DTensors: with values on the first rank, on `meta` on
    all others. Nothing happens in a model without DTensors. Collective where there are some, in the same places on
    every rank.

    Args:
        model: As the user built it.
        mesh: The ranks.
        rank: This one.

    Returns:
        Whether there were any.

    Raises:
        PlanError: DTensors along other ranks than those of a tensor-parallel group, or in parts that a chunk cannot
            have; on every rank, before anything is changed.
    """
    found = {
        name: (module, own)
        for name, module in model.named_modules()
        if (own := {k: t for k, t in (*module._parameters.items(), *module._buffers.items()) if is_dtensor(t)})
    }
    for name, (_, own) in found.items():
        for below, tensor in own.items():
            _check(f"{name}.{below}" if name else below, tensor, mesh)
    known: dict[int, tuple[Tensor, Tensor]] = {}
    classes: dict[tuple[type, frozenset[str]], type] = {}
    for module, own in found.values():
        _show(module, own, classes)
        for below, tensor in own.items():
            if id(tensor) not in known:  # with the DTensor itself, whose id would be another's when it is gone
                known[id(tensor)] = tensor, _whole(tensor, rank)
            whole = known[id(tensor)][1]
            if below in module._parameters:
                setattr(module, below, whole)
            else:
                module._buffers[below] = whole
    return bool(found)


def check_placed(model: nn.Module, mesh: Mesh) -> None:
    """Raises `PlanError` where modules had DTensors over other ranks than there are now, or over a mesh whose
    collectives go over another model's engine."""
    for name, _, placed in placed_modules(model):
        if not placed.is_connected:
            raise PlanError(
                f"parallelize_module() has cut {name or 'the model'} between processes that are not connected any more:"
                " build the model anew"
            )
        if placed.size != mesh.tensor:
            raise PlanError(
                f"parallelize_module() has cut {name or 'the model'} for tensor_parallel_size={placed.size}, and it is"
                f" {mesh.tensor} now: build the model anew"
            )
        if placed.is_taken:
            raise PlanError(
                f"parallelize_module() has cut {name or 'the model'} over the device mesh of another model, which is in"
                " use: build each model anew in configure_model, or give Fabric's strategy parallelize_fn=..., which"
                " gets a mesh for each"
            )


def _check(name: str, tensor: Any, mesh: Mesh) -> None:
    own, placements = tensor.device_mesh, tensor.placements
    cure = (
        'ElixirStrategy takes those that parallelize_module(..., self.device_mesh["tensor_parallel"], ...) makes in'
        " configure_model, with tensor_parallel_size=...; over the other ranks it cuts parameters itself, without"
        " fully_shard()"
    )
    if own.ndim != 1 or not hasattr(own.get_group(), "bind"):
        raise PlanError(f"{name} is a DTensor over a mesh of its own, {own}: {cure}")
    if own.size() != mesh.tensor:
        raise PlanError(
            f"{name} is a DTensor over {own.size()} ranks, and tensor_parallel_size is {mesh.tensor}: build the model"
            " anew, or train it with the size that it was built for"
        )
    (placement,) = placements
    if placement.is_shard() and tensor.shape[placement.dim] % own.size():
        raise PlanError(
            f"{name} {list(tensor.shape)} is cut along dimension {placement.dim} into {own.size()} parts that are not"
            " equal, which chunks cannot hold: pad the model to a multiple, or leave the layer out of the plan that"
            " parallelize_module gets"
        )
    if not (type(placement).__name__ == "Shard" or placement.is_replicate()):
        raise PlanError(f"{name} is a DTensor placed as {placement}, and chunks hold Shard and Replicate: {cure}")


def _whole(tensor: Any, rank: int) -> Tensor:
    if tensor.to_local().is_meta:
        values = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    else:
        with torch.no_grad():
            values = tensor.detach().full_tensor()
            values = values.to("cpu", copy=True) if rank == 0 else values.to("meta")
    if not isinstance(tensor, nn.Parameter):
        return values if rank == 0 else torch.empty_like(values, device="cpu")  # of buffers the engine sends values
    whole = nn.Parameter(values, requires_grad=tensor.requires_grad)
    own = {key: value for key, value in vars(tensor).items() if key not in ("_local_tensor", "_spec")}
    whole.__dict__.update(own)
    return whole


def _show(module: nn.Module, own: Mapping[str, Any], classes: dict[tuple[type, frozenset[str]], type]) -> None:
    """Note what DTensors a module has, and have it show them.

    Args:
        own: Name in the module -> DTensor.
        classes: Those made so far, by the class that they stand for and the names.
    """
    placed, kind = placed_in(module), type(module)
    placements = {} if placed is None else dict(placed.placements)
    placements |= {name: tuple(tensor.placements) for name, tensor in own.items()}
    vars(module)[_PLACED] = Placed(next(iter(own.values())).device_mesh, placements)
    base = kind if placed is None else kind.__mro__[1]
    key = base, frozenset(placements)
    if key not in classes:
        classes[key] = _showing(*key)
    module.__class__ = classes[key]


def _showing(base: type, names: frozenset[str]) -> type:
    """A class that stands for `base`, and whose objects show the tensors of these names as `Placed.as_seen` has
    them."""
    members: dict[str, Any] = {name: property(_Shown(name)) for name in names}
    members |= {"__module__": __name__, "__qualname__": base.__qualname__, "__reduce_ex__": _reduce}
    return type(base.__name__, (base,), members)


class _Shown:
    """What a property reads."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, module: nn.Module) -> Any:
        own = module._parameters if self._name in module._parameters else module._buffers
        if self._name not in own:
            raise AttributeError(f"{type(module).__name__} has no {self._name} any more")
        tensor = own[self._name]
        if tensor is None:
            return None
        try:
            return vars(module)[_PLACED].as_seen(self._name, tensor)
        except AttributeError as error:  # modules would give the part itself then
            raise StateError(f"{self._name} of {type(module).__name__} could not be made a DTensor: {error}") from error


def _reduce(module: nn.Module, protocol: Any) -> Any:
    placed = placed_in(module)
    names = frozenset() if placed is None else frozenset(placed.placements)
    return _empty, (type(module).__mro__[1], names), dict(vars(module))


def _empty(base: type, names: frozenset[str]) -> Any:
    """A module without anything yet, for copies."""
    kind: Any = _showing(base, names)
    return kind.__new__(kind)

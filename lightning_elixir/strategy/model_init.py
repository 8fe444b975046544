"""How a model comes into being on several ranks: rank 0 builds it for real, the others without memory.

[Note: same seed, same start] Rank 0 runs the user's constructor as it is, so its parameters have the values, and the
random generators the state, of plain construction. On the other ranks every parameter is moved to `meta` at the moment
it is registered: shapes, ties, dtypes and attributes are those of rank 0, and drawing values costs neither memory nor
random numbers. Afterwards a rank whose generators started in the same state as rank 0's takes over the state they ended
in, and `ElixirModule` sends the values chunk by chunk.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from lightning_elixir.core.comm import Comm
from lightning_elixir.core.module_hooks import is_scripted
from lightning_elixir.core.random_states import capture_random_states, restore_random_states
from lightning_elixir.core.shells import layout_of
from lightning_elixir.core.together import is_heard, raise_together
from lightning_elixir.errors import PlanError
from lightning_elixir.plan.types import ParamSpec
from lightning_elixir.runtime.sources import source_of

log = logging.getLogger(__name__)

# What ranks must have in common


def check_same_model(comm: Comm, specs: Sequence[ParamSpec]) -> None:
    """Compare the parameters of all ranks.

    Raises:
        PlanError: They differ; raised on every rank, with the first difference.
    """
    mine = [(s.fqn, s.shape, s.dtype, s.requires_grad, s.aliases) for s in specs]
    digests = comm.exchange_objects(_digest(mine))
    if len(set(digests)) == 1:
        return
    by_rank = comm.exchange_objects(mine)
    rank = next(r for r, theirs in enumerate(by_rank) if theirs != by_rank[0])
    first, other = by_rank[0], by_rank[rank]
    at = next((i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), min(len(first), len(other)))
    raise PlanError(
        f"the ranks have different models: parameter number {at} is {_describe(first, at)} on rank 0 and"
        f" {_describe(other, at)} on rank {rank}. Build the same model on every rank"
    )


def _describe(specs: Sequence[tuple[Any, ...]], at: int) -> str:
    if at >= len(specs):
        return "missing"
    fqn, shape, dtype, requires_grad, aliases = specs[at]
    ties = f", also {', '.join(aliases)}," if aliases else ""
    return f"{fqn} {list(shape)} {dtype}{'' if requires_grad else ' (frozen)'}{ties}"


def _digest(value: Any) -> str:
    return hashlib.sha256(pickle.dumps(value)).hexdigest()


def _digests(states: Mapping[str, Any]) -> dict[str, str]:
    return {k: _digest(v.tolist() if isinstance(v, Tensor) else v) for k, v in states.items()}


# Construction

# Only the code around the user's `configure_model` knows that an engine will come, and only `pretrained()` inside of it
# needs to: there is no object that both of them see.
_AWAITS_ENGINE: ContextVar[bool] = ContextVar("lightning_elixir_awaits_engine", default=False)
_IS_WITHOUT_VALUES: ContextVar[bool] = ContextVar("lightning_elixir_is_without_values", default=False)


@contextmanager
def awaiting_engine() -> Iterator[None]:
    """Inside, parameters may stay without values, which an engine will read (`source_of`)."""
    token = _AWAITS_ENGINE.set(True)
    try:
        yield
    finally:
        _AWAITS_ENGINE.reset(token)


def awaits_engine() -> bool:
    """Whether this is inside of `awaiting_engine`."""
    return _AWAITS_ENGINE.get()


def is_without_values() -> bool:
    """Whether this is inside of `parameters_on_meta`."""
    return _IS_WITHOUT_VALUES.get()


@contextmanager
def built_by_first_rank(
    comm: Comm, device: torch.device, model: nn.Module, build: Callable[[], object]
) -> Iterator[None]:
    """Layers made inside exist on rank 0 alone; elsewhere their parameters are on `meta`. An engine is awaited.

    See [Note: same seed, same start]. Where construction looks at the values of parameters, it fails without them; such
    a rank builds for real as well.

    Args:
        comm: All ranks, each of which must enter and leave.
        device: The compute device, for its random generator.
        model: The module that receives the layers.
        build: What runs inside, for a second try.

    Raises:
        PlanError: Building failed on another rank. This rank's own error is raised as it is.
    """
    with awaiting_engine(), _only_on_first_rank(comm, device, model, build):
        yield


@contextmanager
def _only_on_first_rank(
    comm: Comm, device: torch.device, model: nn.Module, build: Callable[[], object]
) -> Iterator[None]:
    if comm.world_size == 1:
        yield
        return
    before = capture_random_states(device)
    error: BaseException | None = None
    try:
        if comm.rank == 0:
            yield
        else:
            snapshot = _Snapshot(model)
            try:
                with parameters_on_meta():
                    yield
            except Exception as exception:
                if is_heard(exception):
                    raise
                log.info(
                    "rank %d builds the model for real, since building it without values failed: %s",
                    comm.rank,
                    exception,
                )
                snapshot.restore()
                restore_random_states(before, device)
                build()
    except BaseException as exception:
        error = exception
    raise_together(comm, error)
    give_meta_buffers_memory(model)
    _share_random_states(comm, device, before)


@contextmanager
def made_by_first_rank(comm: Comm, device: torch.device, *, is_empty: bool) -> Iterator[None]:
    """As `built_by_first_rank`, around code that cannot be run a second time and makes a model of its own; buffers that
    are computed from parameters stay on `meta` on the other ranks (`give_meta_buffers_memory`).

    Args:
        is_empty: Parameters are on `meta` on rank 0 as well: a checkpoint will have their values.

    Raises:
        PlanError: Building failed on another rank. This rank's own error is raised as it is.
    """
    before = capture_random_states(device)
    error: BaseException | None = None
    try:
        with awaiting_engine(), parameters_on_meta() if comm.rank > 0 or is_empty else nullcontext():
            yield
    except BaseException as exception:
        error = exception
    raise_together(comm, error)
    if comm.world_size > 1:
        _share_random_states(comm, device, before)


def _share_random_states(comm: Comm, device: torch.device, before: Mapping[str, Any]) -> None:
    mine = _digests(before)
    after = capture_random_states(device) if comm.rank == 0 else None
    started, ended = comm.exchange_objects((mine, after))[0]
    if comm.rank != 0:
        same = {kind for kind, digest in started.items() if mine.get(kind) == digest}
        restore_random_states({kind: state for kind, state in ended.items() if kind in same}, device)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Every parameter that is registered inside is replaced by one on `meta`: same class, attributes and ties."""
    moved: dict[int, tuple[weakref.ref[Tensor], nn.Parameter]] = {}

    def move(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or isinstance(parameter, nn.parameter.UninitializedParameter):
            return None  # registered as it is
        known = moved.get(id(parameter))
        if known is not None and known[0]() is parameter:
            return known[1]  # tied through a name outside of the modules
        twin = _on_meta(parameter)
        moved[id(parameter)] = (weakref.ref(parameter), twin)
        return twin

    handle = register_module_parameter_registration_hook(move)  # type: ignore[arg-type]  # torch's stub forgets the value
    token = _IS_WITHOUT_VALUES.set(True)
    try:
        with warnings.catch_warnings():
            # A constructor that loads weights does so on rank 0; here it copies them to nowhere.
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter")
            yield
    finally:
        _IS_WITHOUT_VALUES.reset(token)
        handle.remove()


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    layout = layout_of(parameter)
    if layout is not None:  # what it has inside are attributes
        return nn.Parameter(layout.on_meta(), requires_grad=False)
    twin = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    if type(parameter) is not nn.Parameter:
        twin.__class__ = type(parameter)
    twin.__dict__.update(parameter.__dict__)
    return twin


def give_meta_buffers_memory(model: nn.Module) -> None:
    """Buffers computed from parameters are on `meta` as well: they get memory, and later their values from rank 0."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.zeros_like(buffer, device="cpu")


@dataclass
class _Snapshot:
    """What a module had before a constructor ran over it."""

    model: nn.Module
    attributes: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.attributes = {
            key: value.copy()
            if key in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
            else value
            for key, value in vars(self.model).items()
        }

    def restore(self) -> None:
        vars(self.model).clear()
        vars(self.model).update(self.attributes)


# Parameters without an engine


def skeleton_of(model: nn.Module) -> nn.Module:
    """The tree of a model's modules with `meta` parameters, ties kept.

    For planning while an engine holds the parameters: looking at those would fetch them.
    """
    twins: dict[int, nn.Parameter] = {}
    modules: dict[int, nn.Module] = {}
    for module in model.modules():
        # Of its classes the one that planning may ask for, not the user's, which may need more than a bare module has.
        kind = next(base for base in type(module).__mro__ if base.__module__.startswith("torch.nn."))
        twin: nn.Module = object.__new__(kind)
        modules[id(module)] = twin
        nn.Module.__init__(twin)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                parameter = twins.setdefault(id(parameter), parameter if parameter.is_meta else _on_meta(parameter))
            twin._parameters[name] = parameter
    for module in model.modules():
        modules[id(module)]._modules = {
            name: None if child is None else modules[id(child)] for name, child in module._modules.items()
        }
    return modules[id(model)]


def make_for_loading(model: nn.Module, build: Callable[[], Any]) -> None:
    """Have a hook of the model's make layers whose values are to be loaded: with memory for all of them, and without
    drawing random numbers that others see.

    Args:
        build: The hook; what it has made before, it leaves.
    """
    with torch.random.fork_rng(devices=[]):
        build()
    on_meta = [p for p in model.parameters() if p.is_meta]
    replace_parameters(
        model, {id(p): nn.Parameter(torch.empty_like(p, device="cpu"), p.requires_grad) for p in on_meta}
    )
    give_meta_buffers_memory(model)


def meta_parameter_names(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.is_meta]


def materialise(model: nn.Module, is_loaded: bool = False) -> None:
    """Give `meta` parameters and buffers memory, and the values that `reset_parameters` of their modules draws.
    Parameters that are tied stay so, with the values that the first of their modules draws. Parameters whose values are
    in a file, and parameters and buffers that have values, stay as they are.

    Args:
        is_loaded: Their values come from a checkpoint, so that none need be drawn.

    Raises:
        PlanError: Modules hold parameters on `meta` and have no `reset_parameters`.
    """
    helpless: list[str] = []
    made: dict[Tensor, nn.Parameter] = {}
    for name, module in model.named_modules():
        before = {key: parameter for key, parameter in module._parameters.items() if parameter is not None}
        kept = {key: made.get(p, p) for key, p in before.items() if p in made or not p.is_meta}
        if is_scripted(module):  # gives other tensors at each look
            kept.clear()
        own: list[Tensor] = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(tensor.is_meta and source_of(tensor) is None and tensor not in made for tensor in own):
            reset = getattr(module, "reset_parameters", None)
            if any(source_of(tensor) is not None for tensor in own) or (  # to_empty would take these, too
                not is_loaded and not callable(reset)
            ):
                helpless.append(f"{name or 'the model itself'} ({type(module).__name__})")
                continue
            for key, parameter in kept.items():  # in whose place others are written over
                module._parameters[key] = nn.Parameter(torch.empty_like(parameter, device="meta"), False)
            computed = {key: value for key, value in module._buffers.items() if value is not None and not value.is_meta}
            module.to_empty(device="cpu", recurse=False)
            module._buffers.update(computed)
            if callable(reset):
                reset()
            for key, parameter in before.items():
                present = module._parameters.get(key)
                if key not in kept and present is not None:
                    module._parameters[key] = made.setdefault(parameter, present)
        for key, parameter in kept.items():
            if module._parameters.get(key) is not parameter:
                module._parameters[key] = parameter
    if helpless:
        raise PlanError(
            f"{', '.join(helpless[:5])}: parameters are on the meta device and there is no reset_parameters() to give"
            " them values. Build the layers for real (rank 0 alone holds them), or load a checkpoint (ckpt_path)"
        )


def replace_parameters(model: nn.Module, replacements: Mapping[int, nn.Parameter]) -> None:
    """Put other parameters in their places, everywhere they are used.

    Args:
        model: Where to look.
        replacements: By the `id` of the parameter to replace.
    """
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) in replacements:
                setattr(module, name, replacements[id(parameter)])

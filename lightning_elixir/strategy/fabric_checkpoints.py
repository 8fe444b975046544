"""Folders that `fabric.save` writes with `state_dict_type="sharded"`, and that `fabric.load` reads.

They are those of the Trainer (`strategy/engine_state.py`), with module and optimizers under the user's names as well:
so plain PyTorch, Lightning's FSDP strategies, the Trainer and `lightning-elixir consolidate` read them. Everything else
that is saved is in `meta.pt`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_elixir._lightning import apply_filter, check_keys
from lightning_elixir.checkpoint.consolidate import OWN_KEY
from lightning_elixir.core.comm import Comm
from lightning_elixir.core.first_names import first_names
from lightning_elixir.errors import PlanError
from lightning_elixir.optimizer import ElixirOptimizer
from lightning_elixir.strategy.engine_handle import EngineHandle
from lightning_elixir.strategy.engine_state import CURRENT_MODEL, OPTIMIZER
from lightning_elixir.strategy.sharded_checkpoints import ShardedCheckpoints
from lightning_elixir.wrapper import ElixirModule

Filter = Callable[[str, Any], bool]


def engine_around(module: Any) -> ElixirModule | None:
    """The engine that a module is, or that holds its parameters; None: it is a plain one, or no module."""
    if isinstance(module, ElixirModule):
        return module
    handle = EngineHandle.of(module) if isinstance(module, nn.Module) else None
    return None if handle is None else handle.engine


def _parts(state: Mapping[str, Any]) -> tuple[dict[str, ElixirModule], dict[str, ElixirOptimizer]]:
    """Modules and optimizers of ours, by the user's names."""
    modules = {key: engine for key, value in state.items() if (engine := engine_around(value)) is not None}
    return modules, {key: value for key, value in state.items() if isinstance(value, ElixirOptimizer)}


def save_folder(
    saves: ShardedCheckpoints,
    path: Path,
    state: Mapping[str, Any],
    filters: Mapping[str, Filter],
    comm: Comm,
    device: torch.device,
) -> None:
    """Save. Collective.

    Args:
        saves: Writes it.
        path: Of the folder to be.
        state: As `fabric.save` takes it, unwrapped.
        filters: By the user's names: which entries of a state dict are saved.

    Raises:
        PlanError: The state has not exactly one module that was set up, an optimizer of another module, or something
            under a name that the folder has for something else.
        StorageError: It could not be written.
    """
    modules, optimizers = _parts(state)
    if len(modules) != 1:
        raise PlanError(
            f"a sharded checkpoint holds one module that was set up, and not {len(modules)}"
            f"{f' ({first_names(list(modules))})' if modules else ''}: save each module with its optimizers to a folder"
            " of its own, or give ElixirStrategy(state_dict_type='full')"
        )
    ((model_key, engine),) = modules.items()
    foreign = [key for key, optimizer in optimizers.items() if optimizer.module is not engine]
    if foreign:
        raise PlanError(
            f"{first_names(foreign)} steps another module than {model_key}, and a sharded checkpoint holds one module"
            " with its optimizers: save each module with its own to a folder of its own"
        )
    _check_names(model_key, optimizers, [key for key in state if key not in modules and key not in optimizers])
    model = _filtered(model_key, filters, saves.model_state(engine))
    ordered = _in_order(optimizers)
    states = [_filtered(key, filters, saves.optimizer_state(engine, optimizers[key])) for key in ordered]
    checkpoint: dict[str, Any] = {"state_dict": model}
    if states:
        checkpoint["optimizer_states"] = states
    for key, value in state.items():
        if key not in modules and key not in optimizers:
            checkpoint[key] = _filtered(key, filters, value.state_dict() if _is_stateful(value) else value)
    names = {"state_dict": model_key, **{OPTIMIZER.format(number): key for number, key in enumerate(ordered)}}
    given = [optimizers[key] for key in ordered]
    saves.save(path, checkpoint, engine, given, comm, device, is_waited_for=False, names=names)


def _check_names(model_key: str, optimizers: Iterable[str], rest: Iterable[str]) -> None:
    """Raises `PlanError` where one of the user's names is the folder's for something else, or cannot be found again."""
    dotted = [key for key in (model_key, *optimizers) if "." in key]
    if dotted:
        raise PlanError(
            f"a sharded checkpoint cannot hold a module or an optimizer under the name {first_names(dotted)}: there,"
            " what follows a dot is a part of what comes before it. Give fabric.save() a key without dots"
        )
    taken = [model_key] if model_key == CURRENT_MODEL or re.fullmatch(r"optimizer_\d+", model_key) else []
    taken += [key for key in optimizers if key in ("state_dict", "model", CURRENT_MODEL)]
    taken += [key for key in rest if key in ("state_dict", CURRENT_MODEL, "optimizer_states", OWN_KEY)]
    if taken:
        raise PlanError(
            f"a sharded checkpoint uses the name {first_names(taken)} for something else: 'state_dict', 'model' and"
            f" '{CURRENT_MODEL}' are the module, 'optimizer_states' and 'optimizer_0', 'optimizer_1', ... the"
            f" optimizers, and '{OWN_KEY}' what the strategy keeps beside. Give fabric.save() another key for it"
        )


def _in_order(optimizers: Iterable[str]) -> list[str]:
    """Names of optimizers by the number that each has in the folder: the one in its name, if there is a place of that
    number, and else the first that is left."""
    keys = list(optimizers)
    own = {number: OPTIMIZER.format(number) for number in range(len(keys)) if OPTIMIZER.format(number) in keys}
    others = iter(key for key in keys if key not in own.values())
    return [own.get(number) or next(others) for number in range(len(keys))]


def load_folder(
    saves: ShardedCheckpoints,
    path: Path,
    state: Any,
    comm: Comm,
    *,
    strict: bool,
    weights_only: bool | None,
) -> dict[str, Any]:
    """Load, as `fabric.load` does. Collective.

    Returns:
        What is left of the checkpoint, without modules and optimizers.

    Raises:
        PlanError: It is no state dict of the user's that is to be loaded into, or another model's checkpoint.
        KeyError: With `strict`, something of the state is not in the checkpoint.
    """
    if isinstance(state, (nn.Module, Optimizer)):
        raise PlanError(f"{path} is a folder, of a sharded checkpoint: load it with fabric.load(path, state)")
    rest = saves.open(path, comm, weights_only)
    rest.pop("optimizer_states", None)
    try:
        state = {} if state is None else state
        modules, optimizers = _parts(state)
        there = saves.names | rest.keys()
        check_keys([key for key in state if key not in modules and key not in optimizers], rest.keys(), strict=strict)
        _check_parts([*modules, *optimizers], there, path, strict=strict)
        for key, engine in modules.items():
            if key in there:
                saves.load_model(engine, strict, root=key)
        for key, optimizer in optimizers.items():
            if key in there:
                saves.load_optimizer(optimizer.module, optimizer, root=key)
        for key, value in state.items():
            if key in rest and key not in modules and key not in optimizers:
                found = rest.pop(key)
                if _is_stateful(value):
                    value.load_state_dict(found)
                else:
                    state[key] = found
    finally:
        saves.close()
    return rest


def _check_parts(keys: Sequence[str], there: Set[str], path: Path, *, strict: bool) -> None:
    """Raises `KeyError` if a module or an optimizer is not in the folder under the user's name."""
    lacking = [key for key in keys if key not in there]
    if strict and lacking:
        raise KeyError(
            f"{path} holds nothing under the name {first_names(lacking)}: there are {first_names(sorted(there))}. Name"
            " modules and optimizers as they were when it was saved, or load it with strict=False, which leaves out"
            " what is not there"
        )


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _filtered(key: str, filters: Mapping[str, Filter], value: Any) -> Any:
    kept: dict[str, Any] = {}
    apply_filter(key, dict(filters), value, kept)
    return kept.get(key, {})

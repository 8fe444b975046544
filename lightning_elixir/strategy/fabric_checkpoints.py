"""Folders that `fabric.save` writes with `state_dict_type="sharded"`, and that `fabric.load` reads.

They are those of the Trainer (`strategy/engine_state.py`), with module and optimizer under the user's names as well: so
plain PyTorch, Lightning's FSDP strategies, the Trainer and `lightning-elixir consolidate` read them. Everything else
that is saved is in `meta.pt`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_elixir._lightning import apply_filter, check_keys
from lightning_elixir.core.comm import Comm
from lightning_elixir.errors import PlanError
from lightning_elixir.optimizer import ElixirOptimizer
from lightning_elixir.strategy.engine_handle import EngineHandle
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
        PlanError: The state has not exactly one module that was set up, or more than one optimizer.
        StorageError: It could not be written.
    """
    modules, optimizers = _parts(state)
    if len(modules) != 1 or len(optimizers) > 1:
        raise PlanError(
            f"a sharded checkpoint holds one module that was set up and up to one optimizer, and not {len(modules)} and"
            f" {len(optimizers)}: save each module with its optimizer to a folder of its own, or give"
            " ElixirStrategy(state_dict_type='full')"
        )
    ((model_key, engine),) = modules.items()
    model = _filtered(model_key, filters, saves.model_state(engine))
    checkpoint: dict[str, Any] = {"state_dict": model}
    names = {"state_dict": model_key}
    for key, optimizer in optimizers.items():
        checkpoint["optimizer_states"] = [_filtered(key, filters, saves.optimizer_state(engine, optimizer))]
        names["optimizer_0"] = key
    for key, value in state.items():
        if key not in modules and key not in optimizers:
            checkpoint[key] = _filtered(key, filters, value.state_dict() if _is_stateful(value) else value)
    saves.save(path, checkpoint, engine, list(optimizers.values()), comm, device, is_waited_for=False, names=names)


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
        check_keys([*modules, *optimizers], there, strict=strict)
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


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _filtered(key: str, filters: Mapping[str, Filter], value: Any) -> Any:
    kept: dict[str, Any] = {}
    apply_filter(key, dict(filters), value, kept)
    return kept.get(key, {})

"""Mistakes in an optimizer that is to update an engine's parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_elixir.errors import PlanError, StateError
from lightning_elixir.optim.hybrid_adam import HybridAdam
from lightning_elixir.runtime.engine import Engine


def check_has_no_place(optimizer: torch.optim.Optimizer) -> None:
    """Raises `PlanError` if the optimizer was told where its states shall be, which is the plan's to say."""
    if isinstance(optimizer, HybridAdam) and optimizer.nvme_offload_fraction > 0:
        raise PlanError(
            f"{type(optimizer).__name__}(nvme_offload_fraction={optimizer.nvme_offload_fraction:g}) places its states "
            "by itself, and under ElixirStrategy or ElixirModule the plan does: give nvme_offload_fraction to "
            "ElixirStrategy or make_plan (nvme_offload_dir to ElixirStrategy or ElixirModule), and leave it out here"
        )


def check_parameters(engine: Engine, groups: Sequence[Mapping[str, Any]]) -> None:
    """Whether parameter groups hold trainable parameters of the engine's model, and nothing else.

    Raises:
        PlanError: They hold parameters of another model.
        StateError: They hold parameters that were frozen when the engine was built.
    """
    foreign, unfrozen = [], []
    for g, group in enumerate(groups):
        for i, parameter in enumerate(group["params"]):
            home = engine.home_of(parameter)
            if parameter in engine.ignored:
                if parameter.requires_grad:
                    unfrozen.append(f"group {g}, parameter {i}, shape {tuple(parameter.shape)}, which is ignored")
            elif home is None:
                foreign.append(f"group {g}, parameter {i}, shape {tuple(parameter.shape)}")
            elif parameter.requires_grad and not home[0].spec.requires_grad:
                unfrozen.append(home[0].spec.members[home[1]].fqn)
    if foreign:
        raise PlanError(
            f"the optimizer holds {len(foreign)} parameters that are not the wrapped model's: "
            f"{'; '.join(foreign[:5])}. Build it from the parameters of the model that is wrapped (on ranks other than "
            "0, after wrapping if the model was built in configure_model)"
        )
    if unfrozen:
        raise StateError(
            f"frozen when the model was set up, and now in an optimizer to be trained: {', '.join(unfrozen[:5])}"
        )

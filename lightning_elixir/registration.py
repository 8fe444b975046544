"""The names under which `Trainer(strategy=...)` and `Fabric(strategy=...)` find us."""

from __future__ import annotations

import sys
from typing import Any

from lightning_elixir._lightning import FABRIC_REGISTRY, StrategyRegistry
from lightning_elixir.errors import PlanError

_NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "elixir": ("chunks over GPU and host memory; what fits stays on the GPU", {}),
    "elixir_auto": ("the same as elixir", {"placement_policy": "auto"}),
    "elixir_cpu": ("parameters and optimizer states in host memory", {"placement_policy": "cpu"}),
    "elixir_cuda": ("everything in GPU memory", {"placement_policy": "cuda"}),
    "elixir_nvme": (
        "parameters in host memory, optimizer states on NVMe",
        {"placement_policy": "cpu", "nvme_offload_fraction": 1.0},
    ),
}


def register_strategies() -> None:
    """Make the names known; again, where that has been done before, changes nothing."""
    for name, (description, options) in _NAMES.items():
        StrategyRegistry.register(name, _make_strategy, description=description, override=True, **options)
        FABRIC_REGISTRY.register(name, _make_fabric_strategy, description=description, override=True, **options)
    _point_elsewhere()


def _make_strategy(**options: Any) -> Any:
    from lightning_elixir.strategy import (
        ElixirStrategy,  # with the engine, which Trainers of other strategies do without
    )

    return ElixirStrategy(**options)


def _make_fabric_strategy(**options: Any) -> Any:
    from lightning_elixir.strategy.fabric_strategy import ElixirStrategy

    return ElixirStrategy(**options)


def _point_elsewhere() -> None:
    """Where both distributions of Lightning are in use, tell users of the other one what to import."""
    for module, attribute, ours, refuse in (
        ("pytorch_lightning.strategies", "StrategyRegistry", StrategyRegistry, _refuse),
        ("lightning_fabric.strategies", "STRATEGY_REGISTRY", FABRIC_REGISTRY, _refuse_fabric),
    ):
        registry: Any = getattr(sys.modules.get(module), attribute, ours)
        if registry is ours:
            continue
        for name, (description, _) in _NAMES.items():
            registry.register(name, refuse, description=description, override=True)


def _refuse() -> Any:
    raise PlanError(
        "this Trainer is pytorch_lightning's, and lightning is installed as well, whose classes lightning_elixir uses:"
        " import Trainer and LightningModule from lightning.pytorch"
    )


def _refuse_fabric() -> Any:
    raise PlanError(
        "this Fabric is lightning_fabric's, and lightning is installed as well, whose classes lightning_elixir uses:"
        " import Fabric from lightning.fabric"
    )

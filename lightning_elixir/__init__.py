"""Train models far larger than the GPU's memory with PyTorch Lightning: `Trainer(strategy="elixir")`.

Importing this package registers the strategies `elixir`, `elixir_auto`, `elixir_cpu`, `elixir_cuda` and `elixir_nvme`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_elixir.errors import CapacityError as CapacityError
    from lightning_elixir.errors import DivergenceError as DivergenceError
    from lightning_elixir.errors import ElixirError as ElixirError
    from lightning_elixir.errors import PeerLostError as PeerLostError
    from lightning_elixir.errors import PlanError as PlanError
    from lightning_elixir.errors import StateError as StateError
    from lightning_elixir.errors import StorageError as StorageError
    from lightning_elixir.fused.linear_loss import linear_cross_entropy as linear_cross_entropy
    from lightning_elixir.optim.elementwise import register_elementwise as register_elementwise
    from lightning_elixir.optim.hybrid_adam import CPUAdam as CPUAdam
    from lightning_elixir.optim.hybrid_adam import HybridAdam as HybridAdam
    from lightning_elixir.plan.hardware import HardwareSpec as HardwareSpec
    from lightning_elixir.plan.types import Plan as Plan
    from lightning_elixir.planning import minimum_waste_search as minimum_waste_search
    from lightning_elixir.planning import optimal_search as optimal_search
    from lightning_elixir.planning import simple_search as simple_search
    from lightning_elixir.profiling.fake_step import cuda_memory_profiling as cuda_memory_profiling
    from lightning_elixir.profiling.fake_step import profile_memory as profile_memory
    from lightning_elixir.profiling.measured_hardware import profile_hardware as profile_hardware
    from lightning_elixir.strategy import ElixirStrategy as ElixirStrategy
    from lightning_elixir.strategy.averaging import ElixirWeightAveraging as ElixirWeightAveraging
    from lightning_elixir.strategy.callbacks import ElixirStatsMonitor as ElixirStatsMonitor
    from lightning_elixir.strategy.precision import ElixirPrecision as ElixirPrecision
    from lightning_elixir.strategy.pretrained import pretrained as pretrained
    from lightning_elixir.wrapper import ElixirModule as ElixirModule
    from lightning_elixir.wrapper import ElixirOptimizer as ElixirOptimizer

__version__ = "0.1.0"

_HOMES = {
    "CPUAdam": "optim.hybrid_adam",
    "CapacityError": "errors",
    "DivergenceError": "errors",
    "ElixirError": "errors",
    "ElixirModule": "wrapper",
    "ElixirOptimizer": "wrapper",
    "ElixirPrecision": "strategy.precision",
    "ElixirStatsMonitor": "strategy.callbacks",
    "ElixirStrategy": "strategy",
    "ElixirWeightAveraging": "strategy.averaging",
    "HardwareSpec": "plan.hardware",
    "HybridAdam": "optim.hybrid_adam",
    "Plan": "plan.types",
    "PeerLostError": "errors",
    "PlanError": "errors",
    "StateError": "errors",
    "StorageError": "errors",
    "cuda_memory_profiling": "profiling.fake_step",
    "linear_cross_entropy": "fused.linear_loss",
    "minimum_waste_search": "planning",
    "optimal_search": "planning",
    "pretrained": "strategy.pretrained",
    "profile_hardware": "profiling.measured_hardware",
    "profile_memory": "profiling.fake_step",
    "register_elementwise": "optim.elementwise",
    "simple_search": "planning",
}

__all__ = [
    "CPUAdam",
    "CapacityError",
    "DivergenceError",
    "ElixirError",
    "ElixirModule",
    "ElixirOptimizer",
    "ElixirPrecision",
    "ElixirStatsMonitor",
    "ElixirStrategy",
    "ElixirWeightAveraging",
    "HardwareSpec",
    "HybridAdam",
    "PeerLostError",
    "Plan",
    "PlanError",
    "StateError",
    "StorageError",
    "__version__",
    "cuda_memory_profiling",
    "linear_cross_entropy",
    "minimum_waste_search",
    "optimal_search",
    "pretrained",
    "profile_hardware",
    "profile_memory",
    "register_elementwise",
    "simple_search",
]


def __getattr__(name: str) -> Any:
    if name in ("fabric", "patterns"):  # modules, which some users alone need
        return import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _is_own_command() -> bool:
    """Whether this process runs `lightning-elixir`, whose help should not wait for torch: it registers by itself."""
    name = PurePath(sys.argv[0]).name if sys.argv else ""
    if name == "-m":  # the module is still being looked for
        return dict(zip(sys.orig_argv, sys.orig_argv[1:], strict=False)).get("-m") == "lightning_elixir"
    return name in ("lightning-elixir", "lightning-elixir.exe")


if not _is_own_command():
    from lightning_elixir.registration import register_strategies

    register_strategies()

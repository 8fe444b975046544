"""Which Lightning: `lightning` where it is installed, else `pytorch_lightning`. All our imports of it go through here.

The two are the same code under two names, with classes and registries of their own; a strategy for the Trainer of one
must subclass the classes of that one.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only

if TYPE_CHECKING or find_spec("lightning") is not None:
    import lightning.pytorch as pl
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import TorchCheckpointIO
    from lightning.fabric.plugins.precision import DoublePrecision as FabricDoublePrecision
    from lightning.fabric.plugins.precision import HalfPrecision as FabricHalfPrecision
    from lightning.fabric.plugins.precision import MixedPrecision as FabricMixedPrecision
    from lightning.fabric.plugins.precision import Precision as FabricPrecision
    from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRIC_REGISTRY
    from lightning.fabric.strategies import ParallelStrategy as FabricParallelStrategy
    from lightning.fabric.strategies.launchers import _MultiProcessingLauncher as FabricMultiProcessingLauncher
    from lightning.fabric.strategies.launchers import _SubprocessScriptLauncher as FabricSubprocessScriptLauncher
    from lightning.fabric.strategies.strategy import _apply_filter as apply_filter
    from lightning.fabric.strategies.strategy import _BackwardSyncControl as BackwardSyncControl
    from lightning.fabric.strategies.strategy import _Sharded as Sharded
    from lightning.fabric.strategies.strategy import _validate_keys_for_strict_loading as check_keys
    from lightning.fabric.utilities import imports as lightning_imports
    from lightning.fabric.utilities.distributed import _get_default_process_group_backend_for_device as default_backend
    from lightning.fabric.utilities.distributed import _init_dist_connection as connect_processes
    from lightning.fabric.utilities.distributed import _sync_ddp_if_available as reduce_tensor
    from lightning.fabric.utilities.init import _EmptyInit as EmptyInit
    from lightning.fabric.utilities.seed import reset_seed
    from lightning.fabric.wrappers import _unwrap_objects as unwrap_fabric
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.accelerators import Accelerator, CPUAccelerator
    from lightning.pytorch.callbacks import (
        BaseFinetuning,
        Callback,
        GradientAccumulationScheduler,
        ModelCheckpoint,
        OnExceptionCheckpoint,
        StochasticWeightAveraging,
        WeightAveraging,
    )
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.plugins import (
        CheckpointIO,
        ClusterEnvironment,
        DoublePrecision,
        HalfPrecision,
        MixedPrecision,
        Precision,
    )
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
    from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher as MultiProcessingLauncher
    from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher as SubprocessScriptLauncher
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.compile import to_uncompiled
    from lightning.pytorch.utilities.exceptions import SIGTERMException
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning.pytorch.utilities.rank_zero import rank_zero_only
else:
    import pytorch_lightning as pl
    from lightning_fabric import Fabric
    from lightning_fabric.plugins import TorchCheckpointIO
    from lightning_fabric.plugins.precision import DoublePrecision as FabricDoublePrecision
    from lightning_fabric.plugins.precision import HalfPrecision as FabricHalfPrecision
    from lightning_fabric.plugins.precision import MixedPrecision as FabricMixedPrecision
    from lightning_fabric.plugins.precision import Precision as FabricPrecision
    from lightning_fabric.strategies import STRATEGY_REGISTRY as FABRIC_REGISTRY
    from lightning_fabric.strategies import ParallelStrategy as FabricParallelStrategy
    from lightning_fabric.strategies.launchers import _MultiProcessingLauncher as FabricMultiProcessingLauncher
    from lightning_fabric.strategies.launchers import _SubprocessScriptLauncher as FabricSubprocessScriptLauncher
    from lightning_fabric.strategies.strategy import _apply_filter as apply_filter
    from lightning_fabric.strategies.strategy import _BackwardSyncControl as BackwardSyncControl
    from lightning_fabric.strategies.strategy import _Sharded as Sharded
    from lightning_fabric.strategies.strategy import _validate_keys_for_strict_loading as check_keys
    from lightning_fabric.utilities import imports as lightning_imports
    from lightning_fabric.utilities.distributed import _get_default_process_group_backend_for_device as default_backend
    from lightning_fabric.utilities.distributed import _init_dist_connection as connect_processes
    from lightning_fabric.utilities.distributed import _sync_ddp_if_available as reduce_tensor
    from lightning_fabric.utilities.init import _EmptyInit as EmptyInit
    from lightning_fabric.utilities.seed import reset_seed
    from lightning_fabric.wrappers import _unwrap_objects as unwrap_fabric
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.accelerators import Accelerator, CPUAccelerator
    from pytorch_lightning.callbacks import (
        BaseFinetuning,
        Callback,
        GradientAccumulationScheduler,
        ModelCheckpoint,
        OnExceptionCheckpoint,
        StochasticWeightAveraging,
        WeightAveraging,
    )
    from pytorch_lightning.core.optimizer import LightningOptimizer
    from pytorch_lightning.plugins import (
        CheckpointIO,
        ClusterEnvironment,
        DoublePrecision,
        HalfPrecision,
        MixedPrecision,
        Precision,
    )
    from pytorch_lightning.plugins.environments import TorchElasticEnvironment
    from pytorch_lightning.strategies import ParallelStrategy, StrategyRegistry
    from pytorch_lightning.strategies.launchers import _MultiProcessingLauncher as MultiProcessingLauncher
    from pytorch_lightning.strategies.launchers import _SubprocessScriptLauncher as SubprocessScriptLauncher
    from pytorch_lightning.trainer.states import TrainerFn
    from pytorch_lightning.utilities.compile import to_uncompiled
    from pytorch_lightning.utilities.exceptions import SIGTERMException
    from pytorch_lightning.utilities.model_helpers import is_overridden
    from pytorch_lightning.utilities.rank_zero import rank_zero_only

__all__ = [
    "Accelerator",
    "apply_filter",
    "BackwardSyncControl",
    "BaseFinetuning",
    "Callback",
    "check_keys",
    "CheckpointIO",
    "ClusterEnvironment",
    "connect_processes",
    "CPUAccelerator",
    "default_backend",
    "DoublePrecision",
    "EmptyInit",
    "FABRIC_REGISTRY",
    "Fabric",
    "FabricDoublePrecision",
    "FabricHalfPrecision",
    "FabricMixedPrecision",
    "FabricMultiProcessingLauncher",
    "FabricParallelStrategy",
    "FabricPrecision",
    "FabricSubprocessScriptLauncher",
    "GradientAccumulationScheduler",
    "HalfPrecision",
    "is_interactive",
    "is_overridden",
    "LightningModule",
    "LightningOptimizer",
    "load_lightning_cli",
    "MixedPrecision",
    "ModelCheckpoint",
    "MultiProcessingLauncher",
    "OnExceptionCheckpoint",
    "ParallelStrategy",
    "pl",
    "Precision",
    "reduce_tensor",
    "reset_seed",
    "set_global_rank",
    "Sharded",
    "SIGTERMException",
    "StochasticWeightAveraging",
    "StrategyRegistry",
    "SubprocessScriptLauncher",
    "to_uncompiled",
    "unwrap_fabric",
    "TorchCheckpointIO",
    "TorchElasticEnvironment",
    "Trainer",
    "TrainerFn",
    "WeightAveraging",
]


def set_global_rank(rank: int) -> None:
    """Only the process of rank 0 prints what is for rank 0."""
    rank_zero_only.rank = utilities_rank_zero_only.rank = rank  # type: ignore[attr-defined]


def is_interactive() -> bool:
    """Whether this is a notebook, or another session without a script, as far as Lightning sees it."""
    return bool(lightning_imports._IS_INTERACTIVE)


def load_lightning_cli() -> Any:
    """The class `LightningCLI`, imported when it is asked for: it brings jsonargparse."""
    return import_module(f"{pl.__name__}.cli").LightningCLI

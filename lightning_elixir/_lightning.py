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
    from lightning.fabric.plugins import TorchCheckpointIO
    from lightning.fabric.utilities.distributed import _get_default_process_group_backend_for_device as default_backend
    from lightning.fabric.utilities.distributed import _init_dist_connection as connect_processes
    from lightning.fabric.utilities.distributed import _sync_ddp_if_available as reduce_tensor
    from lightning.fabric.utilities.seed import reset_seed
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.accelerators import Accelerator, CPUAccelerator
    from lightning.pytorch.callbacks import (
        BaseFinetuning,
        Callback,
        GradientAccumulationScheduler,
        ModelCheckpoint,
        OnExceptionCheckpoint,
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
    from lightning_fabric.plugins import TorchCheckpointIO
    from lightning_fabric.utilities.distributed import _get_default_process_group_backend_for_device as default_backend
    from lightning_fabric.utilities.distributed import _init_dist_connection as connect_processes
    from lightning_fabric.utilities.distributed import _sync_ddp_if_available as reduce_tensor
    from lightning_fabric.utilities.seed import reset_seed
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.accelerators import Accelerator, CPUAccelerator
    from pytorch_lightning.callbacks import (
        BaseFinetuning,
        Callback,
        GradientAccumulationScheduler,
        ModelCheckpoint,
        OnExceptionCheckpoint,
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
    "BaseFinetuning",
    "CPUAccelerator",
    "Callback",
    "CheckpointIO",
    "ClusterEnvironment",
    "DoublePrecision",
    "GradientAccumulationScheduler",
    "HalfPrecision",
    "LightningModule",
    "LightningOptimizer",
    "MixedPrecision",
    "ModelCheckpoint",
    "OnExceptionCheckpoint",
    "MultiProcessingLauncher",
    "ParallelStrategy",
    "Precision",
    "SIGTERMException",
    "StrategyRegistry",
    "SubprocessScriptLauncher",
    "TorchCheckpointIO",
    "Trainer",
    "TrainerFn",
    "connect_processes",
    "default_backend",
    "is_overridden",
    "load_lightning_cli",
    "pl",
    "reduce_tensor",
    "reset_seed",
    "set_global_rank",
    "to_uncompiled",
]


def set_global_rank(rank: int) -> None:
    """Only the process of rank 0 prints what is for rank 0."""
    rank_zero_only.rank = utilities_rank_zero_only.rank = rank  # type: ignore[attr-defined]


def load_lightning_cli() -> Any:
    """The class `LightningCLI`, imported when it is asked for: it brings jsonargparse."""
    return import_module(f"{pl.__name__}.cli").LightningCLI

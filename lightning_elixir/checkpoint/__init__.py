"""Checkpoints as folders in the format of `torch.distributed.checkpoint`, and pretrained weights in safetensors."""

from lightning_elixir.checkpoint.boxes import Extent
from lightning_elixir.checkpoint.folder import (
    META_FILE,
    is_checkpoint_folder,
    local_path,
    replacing_folder,
    restore_previous,
    whole_file,
)
from lightning_elixir.checkpoint.index import CheckpointIndex, StoredTensor
from lightning_elixir.checkpoint.save import PendingFolder, save_together
from lightning_elixir.checkpoint.weight_files import StoredWeight, WeightFiles
from lightning_elixir.checkpoint.writer import TensorPlan

__all__ = [
    "META_FILE",
    "CheckpointIndex",
    "Extent",
    "PendingFolder",
    "StoredTensor",
    "StoredWeight",
    "TensorPlan",
    "WeightFiles",
    "is_checkpoint_folder",
    "local_path",
    "replacing_folder",
    "restore_previous",
    "save_together",
    "whole_file",
]

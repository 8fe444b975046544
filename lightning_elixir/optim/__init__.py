"""Optimizers and what a step needs around them; flat tensors and segments, no chunks."""

from lightning_elixir.optim.adam import adam_update_
from lightning_elixir.optim.hybrid_adam import CPUAdam, HybridAdam
from lightning_elixir.optim.scaling import LossScaler, absolute_max, clip_coefficient, square_sums

__all__ = ["CPUAdam", "HybridAdam", "LossScaler", "absolute_max", "adam_update_", "clip_coefficient", "square_sums"]

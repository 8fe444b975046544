"""Fused operators, and what puts them in the place of a model's own."""

from lightning_elixir.fused.linear_loss import linear_cross_entropy
from lightning_elixir.fused.swapping import FusedChoice, Swapped, check_fused_choice, fuse, fuse_copy

__all__ = ["FusedChoice", "Swapped", "check_fused_choice", "fuse", "fuse_copy", "linear_cross_entropy"]

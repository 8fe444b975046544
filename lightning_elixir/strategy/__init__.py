"""`ElixirStrategy`: between Lightning's Trainer and the engine."""

from __future__ import annotations

from lightning_elixir.strategy.elixir_strategy import ElixirStrategy

__all__ = ["ElixirStrategy"]

"""`Fabric(strategy="elixir")`: the same engine, under a training loop of your own."""

from __future__ import annotations

from lightning_elixir.strategy.fabric_strategy import ElixirStrategy as ElixirStrategy

__all__ = ["ElixirStrategy"]

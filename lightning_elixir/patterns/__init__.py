"""Parallel patterns: how ranks share the work of single modules. See docs/parallel-patterns.md."""

from lightning_elixir.patterns.base import ParallelPattern
from lightning_elixir.patterns.expert import Expert
from lightning_elixir.patterns.linear import Column, Row
from lightning_elixir.patterns.peers import Peers
from lightning_elixir.patterns.sequence import PartialGradients, Sequence
from lightning_elixir.patterns.vocabulary import Vocabulary

__all__ = ["Column", "Expert", "ParallelPattern", "PartialGradients", "Peers", "Row", "Sequence", "Vocabulary"]

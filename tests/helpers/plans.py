"""Plans of models from options by name, as tests vary them one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from torch import nn

from lightning_elixir import planning
from lightning_elixir.plan.types import ChunkSpec, Plan, Tier, UpdateTiming
from lightning_elixir.planning import Budget, ChunkSizes, PlacementRequest, TrainingRegime

_NAMES = {
    "placement_policy": "policy",
    "enable_distributed_storage": "distributed_storage",
    "chunk_search_range": "search_range",
    "chunk_search_n_grids": "n_grids",
    "is_chunk_size_searched": "is_searched",
}
"""Where an option is called otherwise than the field that it sets."""


def make_plan(model: nn.Module, *, prefetch: bool = True, **options: Any) -> Plan:
    """`planning.make_plan` with the fields of its values as options, most of them under the names that
    `ElixirStrategy` has for them.

    Args:
        model: The model.
        prefetch: False: `prefetch_depth` is 0.
        options: Fields of `PlacementRequest`, `ChunkSizes`, `Budget` and `TrainingRegime`, and arguments of
            `planning.make_plan`.
    """
    options = {_NAMES.get(name, name): value for name, value in options.items()}
    if not prefetch:
        options["prefetch_depth"] = 0

    def taken(kind: Any) -> Any:
        return kind(**{f.name: options.pop(f.name) for f in fields(kind) if f.name in options})

    request, chunk_sizes = taken(PlacementRequest), taken(ChunkSizes)
    budget, regime = taken(Budget), taken(TrainingRegime)
    return planning.make_plan(model, request, chunk_sizes=chunk_sizes, budget=budget, regime=regime, **options)


SPARED: dict[str, Callable[[int], bool]] = {
    "all": lambda chunk_id: True,
    "odd": lambda chunk_id: chunk_id % 2 == 1,
    "third": lambda chunk_id: chunk_id % 3 == 1,
    "none": lambda chunk_id: False,
}
"""Which chunks have spare states, by id."""


def with_spares(plan: Plan, which: str = "all") -> Plan:
    """With updates inside backward, into spare states where a chunk can have them and `SPARED` says so."""

    def spared(chunk: ChunkSpec) -> bool:
        is_possible = chunk.requires_grad and chunk.optim_tier is Tier.CPU and chunk.dtype in ("bfloat16", "float16")
        return is_possible and SPARED[which](chunk.id)

    chunks = tuple(replace(c, has_spare_states=spared(c)) for c in plan.chunks)
    return replace(plan, chunks=chunks, update_timing=UpdateTiming.INSIDE_BACKWARD)

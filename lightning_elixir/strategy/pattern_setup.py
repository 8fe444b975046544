"""Parallel patterns, from a strategy's options into a model."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from lightning_elixir.core.comm import Comm
from lightning_elixir.core.compiled_modules import compiled_regions
from lightning_elixir.core.device import release_cached_memory
from lightning_elixir.core.first_names import first_names
from lightning_elixir.errors import PlanError
from lightning_elixir.patterns.apply import met_keys, pattern_forwards, put_in, take_out
from lightning_elixir.patterns.cuts import cuts_of, whole_of
from lightning_elixir.patterns.model_plans import brings_plan, own_patterns
from lightning_elixir.patterns.placed import check_placed, placed_modules, take_over
from lightning_elixir.plan.mesh import offsets_in_whole
from lightning_elixir.runtime.sources import set_source, source_of
from lightning_elixir.strategy.config import ElixirConfig

log = logging.getLogger(__name__)

_SEED = "PL_GLOBAL_SEED"
"""Where Lightning keeps what `seed_everything` was called with; its samplers shuffle by it."""


def check_mesh(config: ElixirConfig, world_size: int, num_nodes: int) -> None:
    """Whether so many ranks can be what the options say, before the model takes memory.

    Raises:
        PlanError: They cannot, or a plan that was given is for others.
    """
    mesh, given = config.mesh(world_size), config.given_plan()
    config.meshes(world_size, num_nodes)
    if given is not None and replace(given.mesh, copies=1) != mesh:
        raise PlanError(
            f"the given plan is for {given.mesh}, and this Trainer has {mesh}: give the same tensor_parallel_size,"
            " expert_parallel_size and number of devices, or leave out `plan`"
        )


def tell_of_idle_patterns(config: ElixirConfig) -> None:
    """Warn of what was given for an axis of one rank. No error: one program may be run on one rank and on many."""
    for axis, keys in config.idle_patterns.items():
        log.warning(
            "patterns are given for %s, but %s_parallel_size is 1: every rank computes these modules whole. Give the"
            " number of ranks that are to share them, or leave the patterns out",
            first_names(keys),
            axis,
        )


def take_dtensors_over(module: nn.Module, config: ElixirConfig, comm: Comm, device: torch.device) -> None:
    """Have plain parameters in the places of those that `parallelize_module` has made into DTensors. Collective.

    Raises:
        PlanError: Chunks cannot have what they were; on every rank.
    """
    if take_over(module, config.mesh(comm.world_size), comm.rank):
        release_cached_memory(device)  # it had parts of the model


def check_seeds(config: ElixirConfig, comm: Comm) -> None:
    """Whether ranks that share batches draw the same numbers, as far as Lightning knows. Collective.

    Raises:
        PlanError: They do not, on every rank.
    """
    mesh = config.mesh(comm.world_size)
    if mesh.tensor < 2:
        return
    seeds = comm.exchange_objects(os.environ.get(_SEED))
    differing = [group for group in mesh.along("tensor") if len({seeds[rank] for rank in group}) > 1]
    if differing:
        told = ", ".join(f"{rank}: {seeds[rank]}" for rank in differing[0])
        raise PlanError(
            f"ranks of one tensor-parallel group share batches and dropout, and have other seeds (rank {told}): call"
            " seed_everything() with the same number on all ranks, before the Trainer or Fabric begins"
        )


def put_patterns_in(module: nn.Module, config: ElixirConfig, comm: Comm, earlier: Sequence[nn.Module] = ()) -> None:
    """Have a model's modules share their work, where the options say so; the same on every rank. Not collective.

    Args:
        module: As the user built it, and not in an engine.
        earlier: Other models of the same options, in engines: what a pattern is for in one of them need not be here.

    Raises:
        PlanError: It cannot have these patterns.
    """
    mesh = config.mesh(comm.world_size)
    check_placed(module, mesh)
    is_placed = next(placed_modules(module), None) is not None
    if is_placed and compiled_regions(module):
        raise PlanError(
            "modules that torch.compile has compiled cannot be in a model that parallelize_module() has cut: leave out"
            " torch.compile, or give ElixirStrategy patterns in the place of parallelize_module()"
        )
    if mesh.is_trivial and config.patterns is None:
        take_out(module)  # those of an earlier run
        return
    patterns = config.patterns
    if mesh.tensor > 1 and not is_placed:
        config.check_pattern_along("tensor")
    if patterns is not None:
        elsewhere = {key for other in earlier for key in met_keys(other, patterns)}
        here = met_keys(module, patterns)
        patterns = {key: one for key, one in patterns.items() if key in here or key not in elsewhere}
    elif not brings_plan(module) and any(next(pattern_forwards(other), None) is not None for other in earlier):
        patterns = {}
    else:  # what parallelize_module() has done is not done again
        patterns = own_patterns(module, replace(mesh, tensor=1) if is_placed else mesh)
    if not patterns and not is_placed and comm.rank == 0:
        log.warning("no pattern is for %s: every rank computes it whole", type(module).__name__)
    put_in(module, patterns, mesh, comm.rank)
    for parameter in module.parameters():
        cuts, whole = cuts_of(parameter), whole_of(parameter)
        source = None if whole is None else source_of(whole)
        if source is not None:  # each rank reads its part
            shape = tuple(parameter.shape)
            set_source(parameter, source.part(shape, offsets_in_whole(shape, cuts, mesh, comm.rank)))

"""Sizes of parallel patterns that are "auto": weighed by the user's own step, before chunks are cut."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from lightning_elixir.core.comm import Comm
from lightning_elixir.errors import PlanError
from lightning_elixir.fused import fuse
from lightning_elixir.patterns.apply import exchanges_of, take_out
from lightning_elixir.plan.memory import Budget
from lightning_elixir.plan.mesh import Mesh
from lightning_elixir.plan.profile import MemoryProfile
from lightning_elixir.plan.weighing import Choice, Exchanged, Way, way_of, weigh
from lightning_elixir.strategy.config import ElixirConfig
from lightning_elixir.strategy.pattern_setup import put_patterns_in
from lightning_elixir.strategy.shared_plans import Planner, host_bytes_of

log = logging.getLogger(__name__)

Step = Callable[[], MemoryProfile]
"""What a step of the model does as it is now, with patterns or without. Raises `PlanError` if that cannot be told."""


def choose_sizes(
    module: nn.Module, planner: Planner, meshes: tuple[Mesh, ...], device: torch.device, foresee: Callable[[], Step]
) -> Choice:
    """The sizes to train with: rank 0 decides, by what its own step would be. Collective.

    Args:
        module: As the user built it; the same afterwards.
        planner: With options in which sizes are open.
        meshes: What they may be.
        device: The compute device.
        foresee: Finds a rank's step, or raises `PlanError` where it cannot be foreseen.

    Raises:
        PlanError: The model cannot be trained as it is.
    """
    comm, config = planner.comm, planner.config
    budget = planner.budget(host_bytes_of(module))
    refusals: list[str] = planner.share(lambda: [_refusal(module, config, comm, mesh) for mesh in meshes[1:]])
    if all(refusals):
        choice = Choice(meshes[0], f"{Way(meshes[0], None)}: nothing else is possible ({refusals[0]})", ())
        if comm.rank == 0:
            log.warning("sizes of parallel patterns: %s", choice.note)
        return choice
    step, reason = _foreseen_by_all(comm, foresee)
    if not reason:
        planner.measure_links()
    choice = planner.share(lambda: _weighed(module, planner, meshes, budget, device, step, reason))
    if comm.rank == 0:
        log.info("sizes of parallel patterns: %s", choice.note)
    return choice


def _foreseen_by_all(comm: Comm, foresee: Callable[[], Step]) -> tuple[Step | None, str]:
    """A rank's step, or why there is none on one of them."""
    step, reason = None, ""
    try:
        step = foresee()
    except Exception as error:  # whatever the user's code raises: it is heard of when training begins
        reason = str(error).partition("\n")[0] or type(error).__name__
    reasons: list[str] = comm.exchange_objects(reason)
    return step, next(filter(None, reasons), "")


@contextmanager
def _cut(module: nn.Module, config: ElixirConfig, comm: Comm) -> Iterator[list[Exchanged]]:
    """The model with its patterns inside, and what these exchange in steps without values."""
    try:
        put_patterns_in(module, config, comm)
        with exchanges_of(module) as exchanges:
            yield exchanges
    finally:
        take_out(module)


def _refusal(module: nn.Module, config: ElixirConfig, comm: Comm, mesh: Mesh) -> str:
    """Why a model cannot have such patterns; empty if it can."""
    try:
        with _cut(module, config.with_sizes_of(mesh), comm):
            return ""
    except PlanError as error:
        return str(error)


class _UnforeseenError(PlanError):
    """A step cannot be told without values."""


def _weighed(
    module: nn.Module,
    planner: Planner,
    meshes: tuple[Mesh, ...],
    budget: Budget,
    device: torch.device,
    step: Step | None,
    reason: str,
) -> Choice:
    """Not collective. Arguments as before, and why a step cannot be foreseen on one of the ranks."""

    def profile_of(is_foreseen: bool) -> MemoryProfile | None:
        if step is None or not is_foreseen:
            return None
        try:
            return step()
        except PlanError as error:
            raise _UnforeseenError(str(error)) from error

    def look(is_foreseen: bool, mesh: Mesh) -> Way:
        config = planner.config.with_sizes_of(mesh)
        with _cut(module, config, planner.comm) as exchanges:
            swapped = fuse(module, config.use_fused_kernels, device)
            try:
                plan, step_s = planner.weighed(module, mesh, budget, profile_of(is_foreseen))
            finally:
                swapped.undo()
        return way_of(plan, step_s, exchanges, planner.figures.best, planner.regime.num_backwards)

    unforeseen = f"a step could not be foreseen ({reason})" if reason else ""
    if not unforeseen:
        try:
            ways = weigh(meshes, partial(look, True))
            if any(not way.refusal for way in ways):
                return Choice.of(ways)
            unforeseen = "nothing fits beside what a step takes"  # and yet a step may run: the fit tries
        except _UnforeseenError as error:  # of the model as it is
            unforeseen = f"a step could not be foreseen ({error})"
    return Choice.of(weigh(meshes, partial(look, False)), unforeseen)

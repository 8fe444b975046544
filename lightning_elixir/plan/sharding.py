"""Which ranks share parameters: all of them, or those of each node.

Within a node links are fast. Sharded there, every chunk is gathered from neighbours, and only slices of gradients go
between nodes; but each node holds a copy of all parameters, gradients and states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, get_args

from lightning_elixir.errors import CapacityError, PlanError
from lightning_elixir.plan.mesh import Mesh
from lightning_elixir.plan.types import Plan

NOTE = "sharding"
"""Key of a plan's `notes`: what was weighed, the fastest first."""

Sharding = Literal["world", "node", "auto"]


def check_sharding(sharding: object) -> None:
    """Raises `PlanError` for what is none."""
    if sharding not in get_args(Sharding):
        names = ", ".join(map(repr, get_args(Sharding)))
        raise PlanError(f"unknown sharding {sharding!r}: choose one of {names}")


def meshes_of(mesh: Mesh, num_nodes: int, sharding: Sharding) -> tuple[Mesh, ...]:
    """How ranks may share what they hold.

    Args:
        mesh: All ranks; those of a node have neighbouring numbers.
        num_nodes: With as many ranks each.
        sharding: What was asked for.

    Returns:
        What is to be weighed.

    Raises:
        PlanError: Ranks that patterns cut parameters between are on several nodes, and each node was to have a copy.
    """
    if num_nodes < 2 or sharding == "world":
        return (mesh,)
    if mesh.world_size % num_nodes:
        raise PlanError(
            f"sharding={sharding!r} needs as many ranks on every node, and there are {mesh.world_size} on {num_nodes}"
        )
    of_node, cut = mesh.world_size // num_nodes, mesh.tensor * mesh.expert
    if of_node % cut == 0:
        within = replace(mesh, copies=num_nodes)
        return (within,) if sharding == "node" else (mesh, within)
    if sharding == "node":
        raise PlanError(
            f"sharding='node' needs tensor_parallel_size x expert_parallel_size ({cut}) to divide the {of_node} ranks"
            " of a node, since each node has a copy of all parameters: choose smaller sizes, or sharding='world'"
        )
    return (mesh,)


def best_sharding(make: Callable[[Mesh], Plan], meshes: Sequence[Mesh]) -> Plan:
    """The plan with the shortest predicted step; of those as fast, or without a prediction, the first. What the others
    would take is in its `notes`.

    Args:
        make: The plan under a mesh, or raises `CapacityError`.
        meshes: What is to be weighed.

    Raises:
        CapacityError: Nothing fits; that of the first.
    """
    if len(meshes) == 1:
        return make(meshes[0])
    plans: list[Plan] = []
    refusals: list[tuple[Mesh, CapacityError]] = []
    for mesh in meshes:
        try:
            plans.append(make(mesh))
        except CapacityError as error:
            refusals.append((mesh, error))
    if not plans:
        raise refusals[0][1]
    best = min(plans, key=step_seconds)
    told = [describe_sharding(best.mesh)]
    told += [_beside(plan, best) for plan in sorted(plans, key=step_seconds) if plan is not best]
    told += [f"{describe_sharding(mesh)}: does not fit" for mesh, _ in refusals]
    return replace(best, notes={**best.notes, NOTE: "; ".join(told)})


def step_seconds(plan: Plan) -> float:
    """Predicted; 0 without a prediction."""
    return 0.0 if plan.forecast is None else plan.forecast.times.total_s


def _beside(other: Plan, best: Plan) -> str:
    """How much slower: as a ratio, since seconds are known better later on, and the note stays."""
    best_s = step_seconds(best)
    slower = f"the step is {step_seconds(other) / best_s:.2f} times as long" if best_s else "not predicted"
    return f"{describe_sharding(other.mesh)}: {slower}"


def sharding_note(plan: Plan) -> str:
    """Which ranks share chunks, and what else was weighed; empty where all ranks share all, and nothing was."""
    if plan.num_copies == 1 and NOTE not in plan.notes:
        return ""
    return str(plan.notes.get(NOTE, describe_sharding(plan.mesh)))


def describe_sharding(mesh: Mesh) -> str:
    """Which ranks share chunks, for people."""
    if mesh.copies == 1:
        return f"sharded over all {mesh.world_size} ranks"
    return f"sharded over {mesh.copy_size} ranks, in {mesh.copies} copies"

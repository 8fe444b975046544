"""Whether parallel patterns pay: cut experts or layers beside sharding everything, by simulated time and memory.

A step of each way is simulated as of any plan, with the parameters that a rank has a part of and what is computed with
them. What the ranks of a pattern exchange is not in there: activations, for which they all wait. Their bytes, seen when
the step is run without values, come on top, over the links of the ranks that exchange them. Not counted are the small
messages between hosts that begin exchanges, and experts that get more tokens than others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lightning_elixir.errors import CapacityError, PlanError
from lightning_elixir.plan.hardware import HardwareSpec
from lightning_elixir.plan.mesh import Mesh
from lightning_elixir.plan.sharding import NOTE as SHARDING_NOTE
from lightning_elixir.plan.types import Plan
from lightning_elixir.plan.units import format_bytes, format_seconds

ParallelSize = int | Literal["auto"]

NOTE = "patterns"
"""Key of a plan's `notes`: which sizes were chosen, and why, a line for each that was looked at."""

WORTH_IT = 0.05
"""Part of a sample's time that patterns have to save to be advised: exchanges cost more than is counted."""


def meshes_to_weigh(
    world_size: int, num_nodes: int, tensor: ParallelSize = "auto", expert: ParallelSize = "auto"
) -> tuple[Mesh, ...]:
    """What sizes that are to be chosen may be, one axis after the other: of "tensor" within a node, where ranks talk
    most; of "expert" up to all ranks.

    Args:
        world_size: All ranks.
        num_nodes: With as many ranks each.
        tensor: A size that is given stays.
        expert: Likewise.

    Returns:
        The first has 1 in the place of what is to be chosen.
    """
    base = Mesh(world_size, 1 if tensor == "auto" else tensor, 1 if expert == "auto" else expert)
    sizes = [size for size in range(2, world_size + 1) if world_size % (size * base.tensor * base.expert) == 0]
    found = [base]
    if tensor == "auto":
        of_node = world_size // num_nodes
        found += [replace(base, tensor=size) for size in sizes if of_node % size == 0]
    if expert == "auto":
        found += [replace(base, expert=size) for size in sizes]
    return tuple(found)


@dataclass(frozen=True)
class Exchanged:
    """One exchange of activations between the ranks along an axis."""

    axis: str
    kind: str
    """"sum": each gets the sum. "gather": each gets all. "part": each gets a part of the sum. "rows": from each to
    each."""
    nbytes: int
    """Of one rank's tensor; of "gather" what it gets."""
    forward_of: str = ""
    """Name of the module in whose forward it is, which may be recomputed; empty: it is in a backward."""


def exchange_s(exchanges: Sequence[Exchanged], mesh: Mesh, hardware: HardwareSpec) -> float:
    """Seconds that all of them take, one after the other."""
    node_size = max(1, mesh.world_size // hardware.num_nodes)
    total = 0.0
    for axis in {one.axis for one in exchanges}:
        size = mesh.size(axis)
        is_near = all(len({rank // node_size for rank in ranks}) == 1 for ranks in mesh.along(axis))
        for one in exchanges:
            if one.axis != axis:
                continue
            if one.kind in ("sum", "gather"):
                total += hardware.gather_s(one.nbytes, size, is_within_node=is_near)
            if one.kind != "gather":
                total += hardware.reduce_s(one.nbytes, size, is_within_node=is_near)
    return total


@dataclass(frozen=True)
class Way:
    """One way to share the work, and what it takes."""

    mesh: Mesh
    step_s: float | None
    """Predicted, without exchanges of activations; None: it does not fit, cannot be, or what a step does is not known.
    """
    exchange_s: float = 0.0
    """Of a step."""
    peak_gpu_bytes: int = 0
    host_bytes: int = 0
    refusal: str = ""
    """Why it cannot be, or does not fit."""
    sharding: str = ""
    """What else was weighed on several nodes, of the same sizes."""
    num_backwards: int = 1
    """Forwards and backwards in a step."""

    @property
    def batch_s(self) -> float | None:
        """Seconds for each micro-batch's worth of samples; ranks along "tensor" share one."""
        if self.step_s is None:
            return None
        return (self.step_s + self.exchange_s) / (self.num_backwards * self.mesh.num_batches)

    def __str__(self) -> str:
        parts = [f"{axis} {self.mesh.size(axis)}" for axis in ("tensor", "expert") if self.mesh.size(axis) > 1]
        copies = [f"in {self.mesh.copies} copies"] if self.mesh.copies > 1 else []
        return ", ".join([*(parts or ["sharding alone"]), *copies])


def way_of(
    plan: Plan, step_s: float | None, exchanges: Sequence[Exchanged], hardware: HardwareSpec, num_backwards: int
) -> Way:
    """A way that fits.

    Args:
        plan: The best one of it.
        step_s: Predicted seconds of its step; None: what a step does is not known.
        exchanges: Of one forward and backward in which the plan has nothing recomputed. Those of forwards that it has
            recomputed come again: all, though torch may end without the last, which backward does not need.
        hardware: Figures to predict times with.
        num_backwards: Forwards and backwards in a step.
    """
    forecast = plan.forecast
    recomputed = [block.name for block in plan.activations if block.fate.is_recomputed]
    again = [one for one in exchanges if any(f"{one.forward_of}.".startswith(f"{name}.") for name in recomputed)]
    return Way(
        plan.mesh,
        step_s,
        num_backwards * exchange_s([*exchanges, *again], plan.mesh, hardware),
        0 if forecast is None else forecast.peak_gpu_bytes,
        0 if forecast is None else forecast.host_bytes,
        sharding=str(plan.notes.get(SHARDING_NOTE, "")),
        num_backwards=num_backwards,
    )


def weigh(meshes: Sequence[Mesh], look: Callable[[Mesh], Way]) -> list[Way]:
    """What each takes, and why others cannot be. Where "tensor" and "expert" are worth it each by itself, the best of
    both together is looked at as well.

    Args:
        meshes: The first is without what is weighed.
        look: What one takes, or raises `CapacityError` where it does not fit and `PlanError` where it cannot be.

    Raises:
        PlanError: That of the first.
    """

    def looked(mesh: Mesh) -> Way:
        try:
            return look(mesh)
        except CapacityError:
            return Way(mesh, None, refusal="does not fit")
        except PlanError as error:
            if mesh == meshes[0]:
                raise
            said = re.sub(r"^patterns: (\S+: )?", "", str(error))
            return Way(mesh, None, refusal=said.partition(":")[0])  # without what to do about it

    ways = [looked(mesh) for mesh in meshes]
    base, best = meshes[0], []
    for axis in ("tensor", "expert"):
        of_axis = [ways[0], *(way for way in ways if way.mesh.size(axis) > base.size(axis))]
        best.append((advise(of_axis)[0] or ways[0]).mesh)
    both = replace(base, tensor=best[0].tensor, expert=best[1].expert)
    is_new = both.tensor > base.tensor and both.expert > base.expert
    if is_new and both.world_size % (both.tensor * both.expert) == 0:
        ways.append(looked(both))
    return ways


def advise(ways: Sequence[Way]) -> tuple[Way | None, str]:
    """The way to take, and why.

    Args:
        ways: The first is that without patterns.
    """
    plain, possible = ways[0], [way for way in ways if way.batch_s is not None]
    if not possible:
        unforeseen = next((way for way in ways if not way.refusal), None)
        return (None, "nothing fits") if unforeseen is None else (unforeseen, f"{unforeseen}: the first that fits")
    best = min(possible, key=lambda way: way.batch_s or 0.0)
    plain_s, best_s = plain.batch_s, best.batch_s or 0.0
    if plain_s is None:
        return best, f"{best}: {plain} does not fit"
    if best is plain:
        return plain, f"{plain}: nothing else is faster"
    gain = 1 - best_s / plain_s
    if gain < WORTH_IT:
        return plain, f"{plain}: {best} would save {gain:.1%} of the time, which is less than is left out here"
    saved = plain.peak_gpu_bytes - best.peak_gpu_bytes
    memory = f"{format_bytes(abs(saved))} {'less' if saved > 0 else 'more'} of each GPU"
    spent = format_seconds(best.exchange_s)
    return best, f"{best}: {gain:.0%} less time for the same samples, {spent} of a step for exchanges, {memory}"


@dataclass(frozen=True)
class Choice:
    """The sizes of parallel patterns that were chosen, and why."""

    mesh: Mesh
    why: str
    ways: tuple[Way, ...]
    """All that was looked at."""

    @classmethod
    def of(cls, ways: Sequence[Way], unforeseen: str = "") -> Choice:
        """As advised; where nothing fits, the first.

        Args:
            ways: What was looked at; the first is without what was weighed.
            unforeseen: Why no times of steps are known, where they are not.
        """
        best, why = advise(ways)
        if unforeseen:
            why = f"{why}; nothing was weighed, since {unforeseen}"
        chosen = ways[0] if best is None else best
        return cls(chosen.mesh, why, tuple(ways))

    @property
    def note(self) -> str:
        """For `notes` of plans: lines."""
        return "\n".join([self.why, *(f"{way}: {self._told_of(way)}" for way in self.ways)])

    def _told_of(self, way: Way) -> str:
        if way.refusal:
            return way.refusal
        parts = [way.sharding] if way.sharding else []
        if way.step_s is not None:
            parts.append(
                f"step {format_seconds(way.step_s + way.exchange_s)}, {format_seconds(way.exchange_s)} of it for"
                f" exchanges, {format_seconds(way.batch_s or 0.0)} for a micro-batch"
            )
        parts.append(f"GPU {format_bytes(way.peak_gpu_bytes)}, host {format_bytes(way.host_bytes)}")
        return f"{'; '.join(parts)}; {self._verdict(way)}"

    def _verdict(self, way: Way) -> str:
        if way.mesh == self.mesh:
            return "chosen"
        chosen = next(one for one in self.ways if one.mesh == self.mesh)
        if way.batch_s is None or not chosen.batch_s:
            return "not looked at further"
        times = way.batch_s / chosen.batch_s
        return f"{times:.2f} times as long" if times >= 1 else f"{1 - times:.1%} faster, too little to count on"


def with_notes_of(plan: Plan, earlier: Plan) -> Plan:
    """A new placement of a plan's chunks, with what that one says of how its ranks share work and chunks."""
    told = {key: earlier.notes[key] for key in (SHARDING_NOTE, NOTE) if key in earlier.notes}
    return replace(plan, notes={**plan.notes, **told}) if told else plan


def weighing_lines(plan: Plan) -> tuple[str, ...]:
    """Which sizes of parallel patterns were chosen, and why; empty where there was nothing to choose."""
    return tuple(str(plan.notes[NOTE]).splitlines()) if NOTE in plan.notes else ()

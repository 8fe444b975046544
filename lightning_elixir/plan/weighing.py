"""Whether parallel patterns pay: cut experts or layers beside sharding everything, by simulated time and memory.

A step of each way is simulated as of any plan, with the parameters that a rank has a part of and what is computed with
them. What the ranks of a pattern exchange is not in there: activations, for which they all wait. Their bytes, seen when
the step is run without values, come on top, over the links of the ranks that exchange them. Not counted are the small
messages between hosts that begin exchanges, and experts that get more tokens than others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_elixir.plan.hardware import HardwareSpec
from lightning_elixir.plan.mesh import Mesh
from lightning_elixir.plan.units import format_bytes, format_seconds

WORTH_IT = 0.05
"""Part of a sample's time that patterns have to save to be advised: exchanges cost more than is counted."""


@dataclass(frozen=True)
class Exchanged:
    """One exchange of activations between the ranks along an axis."""

    axis: str
    kind: str
    """"sum": each gets the sum. "gather": each gets all. "part": each gets a part of the sum. "rows": from each to
    each."""
    nbytes: int
    """Of one rank's tensor; of "gather" what it gets."""


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
    """Predicted, without exchanges of activations; None: it does not fit, or cannot be."""
    exchange_s: float = 0.0
    """Of a step."""
    peak_gpu_bytes: int = 0
    host_bytes: int = 0
    refusal: str = ""
    """Why not, without a step."""

    @property
    def batch_s(self) -> float | None:
        """Seconds for each micro-batch's worth of samples; ranks along "tensor" share one."""
        return None if self.step_s is None else (self.step_s + self.exchange_s) / self.mesh.num_batches

    def __str__(self) -> str:
        parts = [f"{axis} {self.mesh.size(axis)}" for axis in ("tensor", "expert") if self.mesh.size(axis) > 1]
        return ", ".join(parts) or "sharding alone"


def advise(ways: Sequence[Way]) -> tuple[Way | None, str]:
    """The way to take, and why.

    Args:
        ways: The first is that without patterns.
    """
    plain, possible = ways[0], [way for way in ways if way.batch_s is not None]
    if not possible:
        return None, "nothing fits"
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

"""Several nodes out of the figures of one, and of the network between them: for simulations of what was not measured.

The network is two numbers: what one rank sends to other nodes while all ranks of its node do the same, and how long one
message takes. Within a node collectives take as long as they were measured there. Between nodes they take as long as
the bytes of ours take: an all-gather is a ring, so a node's ranks together receive what it has not got, once; a
reduce-scatter is an exchange of slices, so each rank sends other nodes all of their slices; and the mean over copies is
both, of a slice. Each has a message's time for every other node. What overlaps takes the longer of both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lightning_elixir.errors import PlanError
from lightning_elixir.plan.hardware import BandwidthCurve, HardwareSpec

_SIZES = tuple(2**n for n in range(10, 33, 2))


def on_ranks(host: HardwareSpec, num_ranks: int) -> HardwareSpec:
    """The figures of one rank of so many on a host where those of another number were measured: they share its cores,
    its memory and its disk. Collectives that were not measured are round figures; those that were stay as they are.
    Figures of several hosts stay as they are.

    Args:
        host: Of a rank of one host.
        num_ranks: On that host.
    """
    if host.world_size == num_ranks or host.num_nodes > 1:
        return host
    nominal, has_none = HardwareSpec.nominal(), num_ranks > 1 and host.all_gather is None
    share = host.world_size / num_ranks

    def shared(rate: float | None) -> float | None:
        return None if rate is None else rate * share

    return replace(
        host,
        world_size=num_ranks,
        cpu_adam_numel_per_s=host.cpu_adam_numel_per_s * share,
        joint_adam_numel_per_s=host.joint_adam_numel_per_s * share,
        host_bytes_per_s=shared(host.host_bytes_per_s),
        nvme_read_bytes_per_s=shared(host.nvme_read_bytes_per_s),
        nvme_write_bytes_per_s=shared(host.nvme_write_bytes_per_s),
        all_gather=nominal.all_gather if has_none else host.all_gather,
        reduce_scatter=nominal.reduce_scatter if has_none else host.reduce_scatter,
    )


@dataclass(frozen=True)
class Network:
    """Between nodes."""

    bytes_per_s: float
    """What one rank sends, while all ranks of its node do; as much comes in meanwhile."""
    latency_s: float
    """Of one message."""


def on_nodes(node: HardwareSpec, num_nodes: int, network: Network) -> HardwareSpec:
    """The figures of several such nodes.

    Args:
        node: Of all ranks of one node; with several of them, their collectives as well.
        num_nodes: How many.
        network: Between them.

    Raises:
        PlanError: `node` is of several nodes already, or of several ranks whose collectives were not measured.
    """
    if num_nodes == 1:
        return node
    if node.num_nodes > 1:
        raise PlanError(f"these figures are of {node.num_nodes} nodes: to simulate others takes those of one")
    size, others = node.world_size, num_nodes - 1
    if size > 1 and (node.all_gather is None or node.reduce_scatter is None):
        raise PlanError(f"these figures of {size} ranks have no collectives: measure them on one node")

    def curve(seconds: Callable[[int], float]) -> BandwidthCurve:
        return BandwidthCurve(tuple((nbytes, seconds(nbytes)) for nbytes in _SIZES))

    def sent_s(nbytes: float) -> float:
        return others / num_nodes * nbytes / network.bytes_per_s + others * network.latency_s

    def within_s(measured: BandwidthCurve | None, nbytes: int) -> float:
        return 0.0 if measured is None or size == 1 else measured.seconds(nbytes)

    return replace(
        node,
        name=f"{num_nodes} nodes, simulated, each: {node.name}",
        world_size=size * num_nodes,
        num_nodes=num_nodes,
        all_gather=curve(lambda nbytes: max(within_s(node.all_gather, nbytes), sent_s(nbytes / size))),
        reduce_scatter=curve(lambda nbytes: max(within_s(node.reduce_scatter, nbytes), sent_s(nbytes))),
        node_all_gather=node.all_gather if size > 1 else None,
        node_reduce_scatter=node.reduce_scatter if size > 1 else None,
        across_mean=curve(lambda nbytes: 2 * sent_s(nbytes)),
    )

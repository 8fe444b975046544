"""Bytes and measured figures -> seconds of what a plan does to one chunk. The only constants of its own count what the
host issues."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

from lightning_elixir.plan.hardware import ADAM_BYTES, BandwidthCurve, HardwareSpec
from lightning_elixir.plan.memory import Scheme, has_params_on_nvme, is_on_nvme, uses_nvme
from lightning_elixir.plan.mesh import AXES
from lightning_elixir.plan.stream_buffers import SLOT_BYTES
from lightning_elixir.plan.tables import Table
from lightning_elixir.plan.types import ChunkSpec, Plan, Tier, UpdateTiming

_MOVE_LAUNCHES = 6
"""Operators that the host could launch in the time in which it has a chunk fetched, or its gradients brought away."""
_PIECE_LAUNCHES = 10
"""Likewise of a piece of a streamed update: its copies, events and kernel."""
_LATER_UPDATES = 0.05
"""Part of the updates beside forward and backward that counts likewise: in training they take longer than alone, 1.05
to 1.19 times on five H200s. So where more of them seem to cost nothing, as they end just in time, fewer are better."""


def is_time_known(plan: Plan, hardware: HardwareSpec) -> bool:
    """Whether these figures say how long a step takes: not where it waits for a disk that was not measured."""
    return hardware.nvme_adam_numel_per_s is not None or not any(map(uses_nvme, plan.chunks))


@dataclass(frozen=True)
class FetchCosts:
    """Of one fetch of a chunk."""

    upload_s: float
    cast_s: float
    gather_s: float
    gather_beside_s: float
    refresh_s: float
    is_gathered: bool
    host_bytes: int
    """Read in host memory."""


@dataclass(frozen=True)
class ChunkCosts:
    """All that a chunk costs where it is; each is explained in `Costs`."""

    fetch: FetchCosts
    fetch_outdated: FetchCosts
    reduce_s: float
    reduce_beside_s: float
    download_s: float
    update_s: float
    nvme_s: tuple[float, float]
    param_read_s: float
    grad_store_s: float
    write_back_s: float
    stream_s: tuple[int, float, float]
    spread_s: float
    update_traffic_bytes: int
    sum_s: float
    sum_traffic_bytes: int
    handling_s: float
    is_in_step: bool
    """Members are updated within the step, whatever the timing; then the chunk counts there."""


@dataclass(frozen=True)
class Costs:
    """Seconds that one chunk costs one rank, while all ranks do the same."""

    hardware: HardwareSpec
    scheme: Scheme

    @cached_property
    def of(self) -> Table[ChunkSpec, ChunkCosts]:
        """All costs of a chunk."""
        return Table(self._of)

    def _of(self, chunk: ChunkSpec) -> ChunkCosts:
        return ChunkCosts(
            fetch=self._fetch(chunk, is_outdated=False),
            fetch_outdated=self._fetch(chunk, is_outdated=True),
            reduce_s=self.reduce_s(chunk),
            reduce_beside_s=self.beside_s(chunk, self.reduce_s(chunk), self.hardware.node_reduce_scatter),
            download_s=self.download_s(chunk),
            update_s=self.update_s(chunk),
            nvme_s=self.nvme_s(chunk),
            param_read_s=self.param_read_s(chunk),
            grad_store_s=self.grad_store_s(chunk, is_added=self.scheme.regime.num_backwards > 1),
            write_back_s=self.write_back_s(chunk),
            stream_s=self.stream_s(chunk) if chunk.is_update_streamed else (0, 0.0, 0.0),
            spread_s=self.spread_s(chunk),
            update_traffic_bytes=self.update_traffic_bytes(chunk),
            sum_s=self.sum_s(chunk),
            sum_traffic_bytes=self.sum_traffic_bytes(chunk),
            handling_s=self.handling_s(chunk),
            is_in_step=self.scheme.regime.is_in_step(chunk.members),
        )

    def _fetch(self, chunk: ChunkSpec, *, is_outdated: bool) -> FetchCosts:
        upload_s, is_gathered = self.upload_s(chunk, is_outdated=is_outdated), self.is_gathered(chunk, is_outdated)
        gather_s = self.gather_s(chunk, is_outdated=is_outdated)
        return FetchCosts(
            upload_s=upload_s,
            cast_s=self.cast_s(chunk),
            gather_s=gather_s,
            gather_beside_s=self.beside_s(chunk, gather_s, self.hardware.node_all_gather),
            refresh_s=self.refresh_s(chunk, is_outdated=is_outdated),
            is_gathered=is_gathered,
            host_bytes=chunk.nbytes // (self.scheme.num_sharing(chunk) if is_gathered else 1) if upload_s else 0,
        )

    def upload_s(self, chunk: ChunkSpec, *, is_outdated: bool = False) -> float:
        """The host's part of a fetch: this rank's slice where the rest is gathered, else the whole chunk."""
        if chunk.param_tier is Tier.GPU:
            return 0.0
        is_slice = self.is_gathered(chunk, is_outdated)
        return self.hardware.h2d.seconds(chunk.nbytes // self.scheme.num_sharing(chunk) if is_slice else chunk.nbytes)

    def cast_s(self, chunk: ChunkSpec) -> float:
        """The device makes this rank's part of a replica from its master."""
        if not self.scheme.is_cast_from_master(chunk):
            return 0.0
        data = self.scheme.data_bytes[chunk.dtype]
        return self.scheme.shard_numel(chunk) * (data.master + data.compute) / self.hardware.device_bytes_per_s

    def gather_s(self, chunk: ChunkSpec, *, is_outdated: bool = False) -> float:
        """The ranks' part of a fetch."""
        return self._spread_s(chunk) if self.is_gathered(chunk, is_outdated) else 0.0

    def _spread_s(self, chunk: ChunkSpec) -> float:
        """An all-gather of the ranks that share a chunk."""
        is_near = chunk.axes in self._axes_near
        return self.hardware.gather_s(chunk.nbytes, self.scheme.num_sharing(chunk), is_within_node=is_near)

    @cached_property
    def _axes_near(self) -> frozenset[tuple[str, ...]]:
        """The axes along which parameters may be cut so that the ranks that share a part of one are on one node."""
        mesh = self.scheme.mesh
        size = max(1, mesh.world_size // self.hardware.num_nodes)

        def is_near(axes: tuple[str, ...]) -> bool:
            return all(len({rank // size for rank in ranks}) == 1 for ranks in mesh.sharing(axes))

        every = (axes for number in range(len(AXES) + 1) for axes in combinations(AXES, number))
        return frozenset(axes for axes in every if is_near(axes))

    def refresh_s(self, chunk: ChunkSpec, *, is_outdated: bool) -> float:
        """Whole shards on the host take the gathered values, so that later fetches need no peers."""
        if (
            self.scheme.is_storage_distributed
            or chunk.param_tier is Tier.GPU
            or not self.is_gathered(chunk, is_outdated)
        ):
            return 0.0
        return self.hardware.d2h.seconds(chunk.nbytes)

    def is_gathered(self, chunk: ChunkSpec, is_outdated: bool) -> bool:
        return self.scheme.num_sharing(chunk) > 1 and (self.scheme.is_storage_distributed or is_outdated)

    def reduce_s(self, chunk: ChunkSpec) -> float:
        """Reduction of a chunk's gradients over the ranks: of those that share it, then of slices over copies."""
        hardware, num_sharing, is_near = self.hardware, self.scheme.num_sharing(chunk), chunk.axes in self._axes_near
        within_s = hardware.reduce_s(chunk.nbytes, num_sharing, is_within_node=is_near)
        return within_s + hardware.mean_across_s(chunk.nbytes // num_sharing, self.scheme.num_copies)

    def beside_s(self, chunk: ChunkSpec, seconds: float, within_node: BandwidthCurve | None) -> float:
        """What of a collective takes from computing, and computing from it: as long as it would take within a node. The
        rest of one over several nodes waits for the network.

        Args:
            chunk: Whose.
            seconds: That it takes.
            within_node: Of such collectives there.
        """
        if self.hardware.num_nodes == 1:
            return seconds
        return 0.0 if within_node is None else min(seconds, within_node.seconds(chunk.nbytes))

    def download_s(self, chunk: ChunkSpec) -> float:
        """Reduced gradients on their way to the host."""
        if chunk.optim_tier is Tier.GPU:
            return 0.0
        return self.hardware.d2h.seconds(chunk.nbytes // self.scheme.num_sharing(chunk))

    def update_s(self, chunk: ChunkSpec) -> float:
        """Adam over this rank's shard, where the plan has it run; of states on NVMe, what the host does."""
        hardware = self.hardware
        numel = self.scheme.shard_numel(chunk)
        if chunk.optim_tier is Tier.GPU:
            return numel / hardware.gpu_adam_numel_per_s
        if chunk.is_update_streamed:
            return numel / hardware.streamed_adam_numel_per_s
        return numel / hardware.cpu_adam_numel_per_s

    def stream_s(self, chunk: ChunkSpec) -> tuple[int, float, float]:
        """A streamed update that shares the bus: in how many pieces, and how long one of them has the bus up and
        down; no longer than the measured rate allows."""
        data = self.scheme.data_bytes[chunk.dtype]
        numel = self.scheme.shard_numel(chunk)
        piece_numel = min(numel, max(1, SLOT_BYTES // (data.optim + data.compute)))
        most_s = piece_numel / self.hardware.streamed_adam_numel_per_s
        down = data.optim - data.grad + (data.compute if chunk.param_tier is not Tier.GPU else 0)
        up_s = self.hardware.h2d.seconds(piece_numel * data.optim)
        down_s = self.hardware.d2h.seconds(piece_numel * down)
        return math.ceil(numel / piece_numel), min(up_s, most_s), min(down_s, most_s)

    def update_traffic_bytes(self, chunk: ChunkSpec) -> int:
        """Bytes that an update reads and writes in host memory, and those of its gradients landing there: 28 and 2 a
        parameter with 16-bit gradients and values beside fp32 states."""
        if chunk.optim_tier is Tier.GPU or not chunk.requires_grad:
            return 0
        data = self.scheme.data_bytes[chunk.dtype]
        each, states = data.grad + data.compute, 2 * self.scheme.state_bytes(chunk)
        if chunk.param_tier is Tier.GPU:  # values go up again, or never come down
            each += -data.compute if chunk.is_update_streamed else data.compute
        if is_on_nvme(chunk):  # the disk writes them to host memory, and reads them there
            states *= 2
        return states + (each + data.compute) * self.scheme.shard_numel(chunk)

    def sum_s(self, chunk: ChunkSpec) -> float:
        """The host adds up the gradients of several micro-batches: of one of them, on average."""
        rate = self.hardware.host_bytes_per_s
        if rate is None:  # as in updates, which move that many bytes
            rate = ADAM_BYTES * self.hardware.cpu_adam_numel_per_s
        return self._added_bytes(chunk) / rate

    def sum_traffic_bytes(self, chunk: ChunkSpec) -> int:
        """Bytes that are read and written for that in host memory, and those of gradients that land there beside what
        `update_traffic_bytes` has; of one micro-batch, on average."""
        num = self.scheme.regime.num_backwards
        landed = self.scheme.shard_numel(chunk) * self.scheme.data_bytes[chunk.dtype].compute * (num - 1) // num
        added = self._added_bytes(chunk)
        return landed + added if added else 0

    def _added_bytes(self, chunk: ChunkSpec) -> int:
        """The first gradient is widened, where it is narrower than the sum; each further one is added to that."""
        num, data = self.scheme.regime.num_backwards, self.scheme.data_bytes[chunk.dtype]
        is_on_host = chunk.requires_grad and chunk.optim_tier is not Tier.GPU and not has_params_on_nvme(chunk)
        if num == 1 or not is_on_host:
            return 0
        first = data.compute + data.grad if data.grad > data.compute else 0
        return self.scheme.shard_numel(chunk) * (first + (num - 1) * (data.compute + 2 * data.grad)) // num

    def handling_s(self, chunk: ChunkSpec) -> float:
        """The host's work to have a chunk moved and updated in a step, as far as threads of Python do it, at most: a
        chunk that stays in the rCache is not fetched again; and by how much the update may be later than foreseen. It
        is not part of a step's predicted time, as the device does not wait while the host is ahead of it, but of what
        placements are compared by. Seen on H200s: 1.27 s for
        226 chunks of which 52 are streamed, 1.10 s for 67 with 16, both predicted as 1.10 s; 1.01 s for 258 with none,
        1.04 s for 34, predicted as 0.94 and 1.00 s."""
        once = chunk.requires_grad + 2 * (not chunk.is_persistent)  # forward and backward fetch
        moves = self.scheme.regime.num_backwards * once
        pieces = self.stream_s(chunk)[0] if chunk.is_update_streamed else 0
        work_s = (moves * _MOVE_LAUNCHES + pieces * _PIECE_LAUNCHES) * self.hardware.launch_s
        is_on_device = not chunk.requires_grad or chunk.optim_tier is Tier.GPU
        is_counted = self.scheme.updates.timing is UpdateTiming.AFTER_BACKWARD or is_on_device  # in the step's time
        return work_s + (0.0 if is_counted else _LATER_UPDATES * self.update_s(chunk))

    def nvme_s(self, chunk: ChunkSpec) -> tuple[float, float]:
        """Reading and writing master and states on NVMe for an update, gradients and new parameters that are there as
        well; nothing where that was not measured."""
        read_rate, write_rate = self.hardware.nvme_read_bytes_per_s, self.hardware.nvme_write_bytes_per_s
        if not is_on_nvme(chunk) or not read_rate or not write_rate:
            return 0.0, 0.0
        nbytes = self.scheme.state_bytes(chunk)
        if not has_params_on_nvme(chunk):
            return nbytes / read_rate, nbytes / write_rate
        grad, values = self.scheme.grad_shard_bytes(chunk), self.scheme.param_shard_bytes(chunk)
        return (nbytes + grad) / read_rate, (nbytes + values) / write_rate

    def param_read_s(self, chunk: ChunkSpec) -> float:
        """Reading this rank's parameters from NVMe for a fetch; nothing where that was not measured."""
        rate = self.hardware.nvme_read_bytes_per_s
        return self.scheme.param_shard_bytes(chunk) / rate if has_params_on_nvme(chunk) and rate else 0.0

    def grad_store_s(self, chunk: ChunkSpec, *, is_added: bool = False) -> float:
        """Bringing gradients to NVMe; with `is_added`, to a sum that is there."""
        read_rate, write_rate = self.hardware.nvme_read_bytes_per_s, self.hardware.nvme_write_bytes_per_s
        if not has_params_on_nvme(chunk) or not chunk.requires_grad or not read_rate or not write_rate:
            return 0.0
        nbytes = self.scheme.grad_shard_bytes(chunk)
        return nbytes / write_rate + (nbytes / read_rate if is_added else 0.0)

    def write_back_s(self, chunk: ChunkSpec) -> float:
        """New values of an update on the host, on their way to a parameter shard or replica on the device."""
        if chunk.optim_tier is Tier.GPU or chunk.is_update_streamed or chunk.param_tier is not Tier.GPU:
            return 0.0
        return self.hardware.h2d.seconds(chunk.nbytes // self.scheme.num_sharing(chunk))

    def spread_s(self, chunk: ChunkSpec) -> float:
        """All slices of an updated chunk that every rank keeps whole on the device."""
        return self._spread_s(chunk) if chunk.is_persistent else 0.0

"""Bytes and measured figures -> seconds of what a plan does to one chunk. No constants of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_elixir.plan.hardware import HardwareSpec
from lightning_elixir.plan.memory import Scheme, has_params_on_nvme, is_on_nvme, uses_nvme
from lightning_elixir.plan.stream_buffers import SLOT_BYTES
from lightning_elixir.plan.types import ChunkSpec, Plan, Tier


def is_time_known(plan: Plan, hardware: HardwareSpec) -> bool:
    """Whether these figures say how long a step takes: not where it waits for a disk that was not measured."""
    return hardware.nvme_adam_numel_per_s is not None or not any(map(uses_nvme, plan.chunks))


@dataclass(frozen=True)
class Costs:
    """Seconds that one chunk costs one rank, while all ranks do the same."""

    hardware: HardwareSpec
    scheme: Scheme

    def upload_s(self, chunk: ChunkSpec, *, is_outdated: bool = False) -> float:
        """The host's part of a fetch: this rank's slice where the rest is gathered, else the whole chunk."""
        if chunk.param_tier is Tier.GPU:
            return 0.0
        is_slice = self.is_gathered(is_outdated)
        return self.hardware.h2d.seconds(chunk.nbytes // self.scheme.world_size if is_slice else chunk.nbytes)

    def gather_s(self, chunk: ChunkSpec, *, is_outdated: bool = False) -> float:
        """The ranks' part of a fetch."""
        if not self.is_gathered(is_outdated) or self.hardware.all_gather is None:
            return 0.0
        return self.hardware.all_gather.seconds(chunk.nbytes)

    def refresh_s(self, chunk: ChunkSpec, *, is_outdated: bool) -> float:
        """Whole shards on the host take the gathered values, so that later fetches need no peers."""
        if self.scheme.is_storage_distributed or chunk.param_tier is Tier.GPU or not self.is_gathered(is_outdated):
            return 0.0
        return self.hardware.d2h.seconds(chunk.nbytes)

    def is_gathered(self, is_outdated: bool) -> bool:
        return self.scheme.world_size > 1 and (self.scheme.is_storage_distributed or is_outdated)

    def reduce_s(self, chunk: ChunkSpec) -> float:
        """Reduction of a chunk's gradients over the ranks."""
        if self.scheme.world_size == 1 or self.hardware.reduce_scatter is None:
            return 0.0
        return self.hardware.reduce_scatter.seconds(chunk.nbytes)

    def download_s(self, chunk: ChunkSpec) -> float:
        """Reduced gradients on their way to the host."""
        if chunk.optim_tier is Tier.GPU:
            return 0.0
        return self.hardware.d2h.seconds(chunk.nbytes // self.scheme.world_size)

    def update_s(self, chunk: ChunkSpec) -> float:
        """Adam over this rank's shard, where the plan has it run; of states on NVMe, what the host does."""
        hardware = self.hardware
        numel = chunk.numel // self.scheme.world_size
        if chunk.optim_tier is Tier.GPU:
            return numel / hardware.gpu_adam_numel_per_s
        if chunk.is_update_streamed:
            return numel / hardware.streamed_adam_numel_per_s
        return numel / hardware.cpu_adam_numel_per_s

    def stream_s(self, chunk: ChunkSpec) -> tuple[int, float, float]:
        """A streamed update that shares the bus: in how many pieces, and how long one of them has the bus up and
        down; no longer than the measured rate allows."""
        data = self.scheme.data_bytes[chunk.dtype]
        numel = chunk.numel // self.scheme.world_size
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
        each = data.grad + 2 * (data.master + data.states) + data.compute
        if chunk.param_tier is Tier.GPU:  # values go up again, or never come down
            each += -data.compute if chunk.is_update_streamed else data.compute
        if is_on_nvme(chunk):  # the disk writes them to host memory, and reads them there
            each += 2 * (data.master + data.states)
        return (each + data.compute) * (chunk.numel // self.scheme.world_size)

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
        return self.hardware.h2d.seconds(chunk.nbytes // self.scheme.world_size)

    def spread_s(self, chunk: ChunkSpec) -> float:
        """All slices of an updated chunk that every rank keeps whole on the device."""
        if self.scheme.world_size == 1 or not chunk.is_persistent or self.hardware.all_gather is None:
            return 0.0
        return self.hardware.all_gather.seconds(chunk.nbytes)

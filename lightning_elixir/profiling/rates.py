"""What transfers, collectives, Adam and matrix products reach on this machine, run as the engine runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from lightning_elixir.core.comm import Comm
from lightning_elixir.core.device import Device, release_cached_memory
from lightning_elixir.core.threads import default_num_update_threads
from lightning_elixir.optim.adam import AdamHyper
from lightning_elixir.optim.execution import UpdateRunner
from lightning_elixir.optim.streaming import StateStream
from lightning_elixir.optim.updates import FlatUpdate, UpdatePart
from lightning_elixir.plan.hardware import BandwidthCurve
from lightning_elixir.plan.mesh import Mesh
from lightning_elixir.plan.stream_buffers import SCRATCH_BYTES, SLOT_BYTES
from lightning_elixir.plan.types import ALIGN_NUMEL
from lightning_elixir.profiling.stopwatch import Stopwatch

_MIB = 2**20
_SIZES = (_MIB // 16, *(n * _MIB for n in (1, 4, 16, 64, 128, 256)))
_GROWTH = 4
_MATRIX_SIZES = tuple(128 * _GROWTH**n for n in range(4))
_MATMUL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_NUM_TINY_OPS = 100
_MAX_PIECES = 1024
# Mixed precision: gradient in 16 bits, which the parameter is written over, beside master and two states in fp32.
_ADAM_BYTES = 2 + 3 * 4
# What one update reads and writes: everything read, and all written again, the gradient's memory by the parameter.
_ADAM_TRAFFIC_BYTES = 2 * _ADAM_BYTES
_SCRATCH_PART = 16
_NUM_PASSES = 4
# Idle cores take some tenths of a second to reach full speed (seen: 1.7, then 2.7 Gparam/s), and in training they have
# rested when the update begins. In units of an ordinary measurement.
_HOST_BURST = 2.0
# A GPU lowers its clock when it has taken full power for some tenths of a second, as in a step (seen: 785, then 660
# TFLOP/s). In the same units.
_SETTLING = 4.0
# Collectives beside computing: in the same units, for how long something is computed, and how many times as long the
# collectives take, so that these are still under way when it is done.
_BESIDE = 0.5
_OUTLASTING = 2.5
_NUM_ROUNDS = 2
_MOST_SLOWDOWN = 10.0


class Workbench:
    """Two stretches of memory, one on the host and one on the device, and what is measured with them.

    All ranks make the same calls in the same order.

    Args:
        arena_bytes: Size of each stretch, the same on every rank; at least 1 MiB. With 2 GiB host caches do not matter:
            with 512 MiB, Adam was measured 1.5 times as fast as memory is, on a processor with some hundred MiB of
            cache.
        node_size: Ranks of one node; they have neighbouring numbers.
    """

    def __init__(self, device: Device, comm: Comm, watch: Stopwatch, arena_bytes: int, node_size: int) -> None:
        self._device = device
        self._node_size = node_size
        self._comm = comm
        self._watch = watch
        self._near = torch.zeros(arena_bytes, dtype=torch.uint8, device=device.torch_device)

    @cached_property
    def _host(self) -> Tensor:
        return self._device.host_zeros(self._near.numel(), torch.uint8).zero_()

    def measure(self) -> dict[str, Any]:
        """The figures of a `HardwareSpec` that need no file, by field name."""
        h2d, d2h = self._curve(self._upload), self._curve(self._download)
        host_adam = self._host_adam_numel_per_s()
        streamed_adam = self._streamed_adam_numel_per_s()
        figures: dict[str, Any] = {
            "h2d": h2d,
            "d2h": d2h,
            "duplex_slowdown": self._duplex_slowdown(h2d, d2h),
            "cpu_adam_numel_per_s": host_adam,
            "streamed_adam_numel_per_s": streamed_adam,
            "joint_adam_numel_per_s": self._joint_adam_numel_per_s(host_adam, streamed_adam),
            "host_bytes_per_s": self._host_bytes_per_s(host_adam, h2d, d2h),
            **self.measure_computing(),
        }
        if self._comm.world_size > 1:
            self._near.zero_()
            figures["all_gather"], figures["reduce_scatter"] = self._collectives(self._comm)
            links = self._links()
            if not links and not self._device.is_synchronous:
                links = self.measure_slowdowns(self._comm)
            figures |= links
        return figures

    def _collectives(self, comm: Comm) -> tuple[BandwidthCurve, BandwidthCurve]:
        """All-gathers and reduce-scatters of the ranks of one group."""
        comm.connect(self._near.numel() // 2)
        gather, reduce = (partial(work, comm) for work in (self._gather, self._reduce))
        return self._curve(gather, comm.world_size), self._curve(reduce, comm.world_size)

    def _links(self) -> dict[str, Any]:
        """Where the ranks are on several nodes: what those of one reach, and those with the same place on each."""
        size, world = self._node_size, self._comm.world_size
        if any(row[0] != size for row in self._comm.exchange([size])) or size >= world or world % size:
            return {}
        mesh = Mesh(world, copies=world // size)
        node = self._comm.part(mesh.sharing(()), has_reductions=True)
        across = self._comm.part(mesh.across(), has_reductions=True)
        found: dict[str, Any] = {"num_nodes": mesh.copies}
        if size > 1:
            found["node_all_gather"], found["node_reduce_scatter"] = self._collectives(node)
            if not self._device.is_synchronous:
                found |= self.measure_slowdowns(node)
        across.connect(self._near.numel() // 2)
        found["across_mean"] = self._curve(partial(self._mean, across), world)
        node.close()
        across.close()
        return found

    def measure_computing(self) -> dict[str, Any]:
        """Those of the compute device by itself, by field name: the host's stretch of memory is not taken for them."""
        return {
            "gpu_adam_numel_per_s": self._adam_numel_per_s(self._near),
            "matmul_flops_per_s": self._all_flops_per_s(),
            "device_bytes_per_s": self._elementwise_bytes_per_s(),
            "launch_s": self._launch_s(),
        }

    # Transfers

    def _curve(self, transfer: Callable[[int], Callable[[], None]], num_slices: int = 1) -> BandwidthCurve:
        """Times over the sizes that fit; large ones are left out where they would take too long."""
        points: list[tuple[int, float]] = []
        unit = 2 * num_slices  # whole 16-bit elements in each slice
        for size in _SIZES:
            nbytes = size // unit * unit
            if size > self._half:
                break
            if len(points) > 1 and points[-1][1] * nbytes / points[-1][0] > self._watch.limit_s:
                break
            points.append((nbytes, self._watch.seconds(transfer(nbytes))))
        # Fewer bytes take no more time: what looks so was disturbed.
        for i in range(len(points) - 1, 0, -1):
            points[i - 1] = (points[i - 1][0], min(points[i - 1][1], points[i][1]))
        return BandwidthCurve(tuple(points))

    @property
    def _half(self) -> int:
        return self._near.numel() // 2

    def _upload(self, nbytes: int) -> Callable[[], None]:
        pairs = _pairs(self._host[: self._half], self._near[: self._half], nbytes)

        def work() -> None:
            source, target = next(pairs)
            with self._device.fetch_lane.issue():
                target.copy_(source, non_blocking=True)

        return work

    def _download(self, nbytes: int) -> Callable[[], None]:
        pairs = _pairs(self._near[self._half :], self._host[self._half :], nbytes)

        def work() -> None:
            source, target = next(pairs)
            with self._device.reduce_lane.issue():
                target.copy_(source, non_blocking=True)

        return work

    def _duplex_slowdown(self, h2d: BandwidthCurve, d2h: BandwidthCurve) -> float:
        nbytes = min(h2d.points[-1][0], d2h.points[-1][0])
        up, down = self._upload(nbytes), self._download(nbytes)

        def work() -> None:
            up()
            down()

        return max(1.0, self._watch.seconds(work) / max(h2d.seconds(nbytes), d2h.seconds(nbytes)))

    def _gather(self, comm: Comm, nbytes: int) -> Callable[[], None]:
        flat = self._near[:nbytes].view(torch.bfloat16)

        def work() -> None:
            with self._device.fetch_lane.issue():
                comm.all_gather(flat)

        return work

    def _reduce(self, comm: Comm, nbytes: int) -> Callable[[], None]:
        flat = self._near[:nbytes].view(torch.bfloat16)
        shard = self._near[self._half :].view(torch.bfloat16)[: flat.numel() // comm.world_size]

        def work() -> None:
            with self._device.reduce_lane.issue():
                pending = comm.reduce_scatter_mean(shard, flat)
                if pending is not None:
                    pending.wait()

        return work

    def measure_slowdowns(self, comm: Comm) -> dict[str, float]:
        """How many times as long computing takes beside collectives, and these beside computing, by field name: the
        mean of what gathers and reductions show, all groups at once. Of several ranks whose device does several things
        at once.

        How often each is done is agreed: a rank that had other counts would leave its peers waiting.
        """
        unit = 2 * comm.world_size  # whole 16-bit elements in each slice
        product, nbytes = self._product_beside(), self._half // unit * unit
        num_products = _times_in(_BESIDE * self._watch.limit_s, self._watch.seconds(product))
        found: list[tuple[float, float]] = []
        for collective in (self._gather(comm, nbytes), self._reduce(comm, nbytes)):
            span_s = _OUTLASTING * self._watch.side_by_side_seconds(collective, 0, product, num_products)[0]
            num = _times_in(span_s, self._watch.seconds(collective))
            rounds: list[tuple[float, float]] = []
            for _ in range(_NUM_ROUNDS):
                computing_s, _ = self._watch.side_by_side_seconds(collective, 0, product, num_products)
                _, collectives_s = self._watch.side_by_side_seconds(collective, num, product, 0)
                beside_s, all_s = self._watch.side_by_side_seconds(collective, num, product, num_products)
                rounds.append(slowdowns_of(computing_s, collectives_s, beside_s, all_s))
            found.append((min(one[0] for one in rounds), min(one[1] for one in rounds)))
        names = ("computing_slowdown", "collective_slowdown")
        return {name: sum(each) / len(found) for name, each in zip(names, zip(*found, strict=True), strict=True)}

    def _product_beside(self) -> Callable[[], None]:
        """A product of large matrices, in the last quarter of the memory, where no collective writes."""
        size = max(n for n in _MATRIX_SIZES if n == _MATRIX_SIZES[0] or 6 * n * n <= self._near.numel() // 4)
        return _product_in(self._near[-6 * size * size :].view(torch.bfloat16), size)

    def _mean(self, comm: Comm, nbytes: int) -> Callable[[], None]:
        flat = self._near[:nbytes].view(torch.bfloat16)

        def work() -> None:
            with self._device.reduce_lane.issue():
                comm.mean_over_ranks(flat)

        return work

    # Adam

    def _adam_numel_per_s(self, arena: Tensor) -> float:
        update = _update_in(arena)
        return update.numel / self._watch.seconds(update.run)

    def _host_adam_numel_per_s(self) -> float:
        """As in a step: from rest, for some tenths of a second, with the threads that a step has for it."""
        update = _update_in(self._host)
        run = partial(update.run, num_threads=default_num_update_threads())
        return update.numel / self._watch.burst_seconds(run, _HOST_BURST * self._watch.limit_s)

    def _streamed_adam_numel_per_s(self) -> float:
        update, arena_bytes = _update_in(self._host), self._host.numel()
        stream = StateStream(
            self._device, min(SLOT_BYTES, arena_bytes // 4), min(SCRATCH_BYTES, arena_bytes // _SCRATCH_PART)
        )
        # Over and over, so that filling and draining the pipeline hardly counts, as in a step over many chunks.
        # Passes overlap, and some numbers are updated from older ones: the time is the same.
        updates = [update] * (1 if self._device.is_synchronous else _NUM_PASSES)
        seconds = self._watch.seconds(lambda: stream.run(updates)) / len(updates)
        release_cached_memory(self._device.torch_device)
        return update.numel / seconds

    def _joint_adam_numel_per_s(self, host_numel_per_s: float, streamed_numel_per_s: float) -> float:
        """Host and stream at the same time, each with as much as it can do."""
        update = _update_in(self._host)
        runner = UpdateRunner(self._device, default_num_update_threads())
        num_passes = 1 if self._device.is_synchronous else _NUM_PASSES
        num_on_host = round(num_passes * host_numel_per_s / streamed_numel_per_s)
        on_host = [update] * min(max(num_on_host, 1), 4 * num_passes)
        streamed = [update] * num_passes
        try:
            seconds = self._watch.seconds(lambda: _run_both(runner, streamed, on_host))
        finally:
            runner.close()
        release_cached_memory(self._device.torch_device)
        return update.numel * (len(on_host) + len(streamed)) / seconds

    def _host_bytes_per_s(self, host_numel_per_s: float, h2d: BandwidthCurve, d2h: BandwidthCurve) -> float | None:
        """All bytes that the host's memory reads and writes while the host updates and both directions of the bus are
        busy, and no less than updates alone; None where there is no bus."""
        if self._device.is_synchronous:
            return None
        update = _update_in(self._host)
        up_bytes, down_bytes = h2d.points[-1][0], d2h.points[-1][0]
        up, down = self._upload(up_bytes), self._download(down_bytes)
        update_s = update.numel / host_numel_per_s
        num_up = _times_in(update_s, h2d.seconds(up_bytes))
        num_down = _times_in(update_s, d2h.seconds(down_bytes))

        def work() -> None:
            for transfer, count in ((up, num_up), (down, num_down)):
                for _ in range(count):
                    transfer()
            update.run(num_threads=default_num_update_threads())

        nbytes = update.numel * _ADAM_TRAFFIC_BYTES + num_up * up_bytes + num_down * down_bytes
        # Copies that go on when the update is over leave the memory idle: such a time says less than updates alone
        # (seen on two H200s: 59 GB/s where updates alone move 89, and a step foreseen in 1.20 s that took 0.81).
        return max(nbytes / self._watch.seconds(work), host_numel_per_s * _ADAM_TRAFFIC_BYTES)

    # Arithmetic

    def _all_flops_per_s(self) -> dict[str, float]:
        """Of each dtype, as in a step that computes all the time."""
        products = {dtype: self._fastest_product(dtype) for dtype in _MATMUL_DTYPES}
        rates = {str(dtype).removeprefix("torch."): flops / seconds for dtype, (_, flops, seconds) in products.items()}
        # 16-bit products are what takes all the power that there is.
        work, _, at_first_s = products[torch.bfloat16]
        share = min(1.0, at_first_s / self._watch.settled_seconds(work, _SETTLING * self._watch.limit_s))
        return {name: rate if name == "float32" else rate * share for name, rate in rates.items()}

    def _fastest_product(self, dtype: torch.dtype) -> tuple[Callable[[], None], float, float]:
        """The best over growing square matrices, up to what fits in memory and time: it, its operations and seconds."""
        found: list[tuple[Callable[[], None], float, float]] = []
        for size in _MATRIX_SIZES:
            needed = 3 * size * size * dtype.itemsize
            if needed > self._near.numel():
                break
            work = _product_in(self._near[:needed].view(dtype), size)
            found.append((work, 2.0 * size**3, self._watch.seconds(work)))
            if _GROWTH**3 * found[-1][2] > self._watch.limit_s:
                break
        return max(found, key=lambda product: product[1] / product[2])

    def _elementwise_bytes_per_s(self) -> float:
        source, target = self._near.zero_()[: 2 * self._half].view(torch.bfloat16).chunk(2)

        def work() -> None:
            torch.mul(source, 2.0, out=target)

        return (source.nbytes + target.nbytes) / self._watch.seconds(work)

    def _launch_s(self) -> float:
        one = self._near[:4].view(torch.float32)

        def work() -> None:
            for _ in range(_NUM_TINY_OPS):
                one.add_(1.0)

        return self._watch.seconds(work) / _NUM_TINY_OPS


def slowdowns_of(computing_s: float, collectives_s: float, beside_s: float, all_s: float) -> tuple[float, float]:
    """How many times as long computing takes beside collectives, and collectives beside computing: at least 1.

    Args:
        computing_s: What is computed, alone.
        collectives_s: All collectives, alone; longer than what is computed.
        beside_s: What is computed, beside collectives from its begin to its end.
        all_s: Until all of both is done.
    """
    done_s = collectives_s - (all_s - beside_s)  # of the collectives while it was computed; the rest, they were alone
    collective = beside_s / done_s if done_s > beside_s / _MOST_SLOWDOWN else _MOST_SLOWDOWN
    return max(1.0, beside_s / computing_s), max(1.0, collective)


def _pairs(source: Tensor, target: Tensor, nbytes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of both, one after the other without end: a piece copied again would come out of a cache."""
    starts = range(0, source.numel() - nbytes + 1, nbytes)[:_MAX_PIECES]
    return cycle([(source[start : start + nbytes], target[start : start + nbytes]) for start in starts])


def _times_in(span_s: float, once_s: float) -> int:
    """How often something is done in a time, at least once."""
    return min(max(1, round(span_s / once_s)), _MAX_PIECES)


def _run_both(runner: UpdateRunner, streamed: list[FlatUpdate], on_host: list[FlatUpdate]) -> None:
    runner.run((), streamed, on_host)


def _product_in(memory: Tensor, size: int) -> Callable[[], None]:
    """A product of square matrices that lie in this memory, 1-D, `[3 * size * size]`."""
    generator = torch.Generator(memory.device).manual_seed(0)  # the user's stays as it is
    left, right, product = memory.view(3, size, size).unbind()
    for factor in (left, right):
        factor.normal_(generator=generator)  # zeros would be faster: they need less power
    return partial(_multiply, left, right, product)


def _multiply(left: Tensor, right: Tensor, product: Tensor) -> None:
    torch.mm(left, right, out=product)


def _update_in(arena: Tensor) -> FlatUpdate:
    """Mixed-precision AdamW whose tensors fill the arena, unscaling or clipping included.

    New parameters take the gradient's place, as in a step; that later runs read them as gradients changes no time.
    """
    numel = arena.numel() // _ADAM_BYTES // ALIGN_NUMEL * ALIGN_NUMEL
    master, exp_avg, exp_avg_sq = arena[: 12 * numel].view(torch.float32).zero_().view(3, numel).unbind()
    grad = arena[12 * numel : 14 * numel].view(torch.bfloat16)
    grad.fill_(0.01)
    hyper = AdamHyper(
        lr=1e-3,
        beta1=0.9,
        beta2=0.999,
        eps=1e-8,
        weight_decay=0.01,
        adamw_mode=True,
        bias_correction=True,
        maximize=False,
    )
    parts = (UpdatePart(0, numel, 1, hyper),)
    return FlatUpdate(master, grad, exp_avg, exp_avg_sq, parts, grad_factor=0.5, compute=grad)

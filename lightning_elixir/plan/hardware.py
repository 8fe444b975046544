"""What a machine can do, as measured figures: pure data, standard library only."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from lightning_elixir.errors import PlanError
from lightning_elixir.plan.files import read_json
from lightning_elixir.plan.units import format_bytes

HARDWARE_SCHEMA = 2
ADAM_BYTES = 28
"""Read and written in host memory for one parameter by an update there: fp32 master and states, 16-bit gradients."""
_LEAST_BESIDE = 0.1  # of its rate alone, what a stream is sure to keep
_NOMINAL = "nominal figures, not measured"
_AS_SEEN = ", the host's updates as seen in training"


@dataclass(frozen=True)
class BandwidthCurve:
    """Time of a transfer over its size, from measured points."""

    points: tuple[tuple[int, float], ...]
    """(bytes, seconds for that many), sizes and times ascending."""

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not self.points or sizes != sorted(set(sizes)) or any(s < 1 or not t > 0 for s, t in self.points):
            raise PlanError(f"a curve needs ascending sizes and positive times, got {self.points}")

    @classmethod
    def constant(cls, bytes_per_s: float, latency_s: float = 0.0) -> BandwidthCurve:
        """One bandwidth for every size, after a fixed delay."""
        sizes = (1, 2**20, 2**30)
        return cls(tuple((size, latency_s + size / bytes_per_s) for size in sizes))

    def seconds(self, nbytes: int) -> float:
        """Seconds for `nbytes`: linear between measured points, at the last bandwidth above them; below the smallest
        as long as that one."""
        if nbytes <= 0:
            return 0.0
        index = bisect_left(self.points, (nbytes, -math.inf))
        if index == 0:
            return self.points[0][1]
        if index == len(self.points):
            size, seconds = self.points[-1]
            if len(self.points) == 1:
                return seconds * nbytes / size
            before_size, before = self.points[-2]
            slope = max((seconds - before) / (size - before_size), 0.0) or seconds / size
            return seconds + slope * (nbytes - size)
        (low, low_s), (high, high_s) = self.points[index - 1], self.points[index]
        return low_s + (high_s - low_s) * (nbytes - low) / (high - low)

    def bytes_per_s(self, nbytes: int) -> float:
        return nbytes / self.seconds(nbytes)


@dataclass(frozen=True)
class HardwareSpec:
    """What one rank may count on while all ranks of its host do the same.

    Rates are those of this package's own code on that machine, not of its data sheet.
    """

    name: str
    """For people: the devices, and where the figures come from."""
    gpu_bytes: int | None
    """Memory of one device that this process may use: less than all of it where the driver or others hold some. None:
    the CPU computes."""
    host_bytes: int
    """Host memory that all ranks of the host may use together."""
    h2d: BandwidthCurve
    """Page-locked host memory to device, alone."""
    d2h: BandwidthCurve
    """Device to page-locked host memory, alone."""
    duplex_slowdown: float
    """How much longer a transfer takes while the other direction is busy as well; at least 1."""
    cpu_adam_numel_per_s: float
    """Parameters a second: Adam on the host over fp32 master and states with 16-bit gradients."""
    gpu_adam_numel_per_s: float
    """The same on the device."""
    streamed_adam_numel_per_s: float
    """The same with states in host memory that go up to the device, are updated there, and come back."""
    joint_adam_numel_per_s: float = math.inf
    """What the host and the stream reach together, at the same time: host memory serves both."""
    host_bytes_per_s: float | None = None
    """All that is read and written in host memory while the host updates and both directions of the bus are busy;
    None where it was not measured."""
    matmul_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    """By compute dtype, for large matrices."""
    device_bytes_per_s: float = math.inf
    """Device memory, read and write together, in element-wise operators."""
    launch_s: float = 0.0
    """Least time of one operator, on the host or on the device."""
    all_gather: BandwidthCurve | None = None
    """Time over the bytes of the whole chunk, for `world_size` ranks."""
    reduce_scatter: BandwidthCurve | None = None
    """The same for a chunk of gradients."""
    world_size: int = 1
    """Ranks that took part."""
    num_nodes: int = 1
    """Hosts that they were on, as many on each."""
    node_all_gather: BandwidthCurve | None = None
    """As `all_gather`, among the ranks of one node, on all nodes at once; None: not measured, or it is the same."""
    node_reduce_scatter: BandwidthCurve | None = None
    """The same for a chunk of gradients."""
    across_mean: BandwidthCurve | None = None
    """Time over the bytes of one rank's slice, until each rank has its mean with those of one rank of every other node,
    all ranks at once; None: not measured, or one node."""
    nvme_read_bytes_per_s: float | None = None
    nvme_write_bytes_per_s: float | None = None
    nvme_bytes: int | None = None
    """Free space of the folder that was measured."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of what was measured: torch, this package, driver."""
    gpu_total_bytes: int | None = None
    """All memory of one device."""
    computing_slowdown: float = 1.0
    """How many times as long computing takes while a collective of the ranks of one node runs beside it; 1: no longer,
    or not known."""
    collective_slowdown: float = 1.0
    """How many times as long such a collective takes while something is computed beside it; 1: likewise."""

    @property
    def slowdowns(self) -> tuple[float, float] | None:
        """Those of computing and of collectives beside each other; None: neither takes longer."""
        found = (self.computing_slowdown, self.collective_slowdown)
        return found if max(found) > 1 else None

    def gather_s(self, nbytes: int, num_ranks: int, *, is_within_node: bool) -> float:
        """Seconds until so many ranks have gathered a chunk of so many bytes, all such groups at once; 0 where
        collectives were not measured.

        Args:
            is_within_node: Whether all ranks of a group are on one node.
        """
        return self._group_s(nbytes, num_ranks, self.node_all_gather if is_within_node else None, self.all_gather)

    def reduce_s(self, nbytes: int, num_ranks: int, *, is_within_node: bool) -> float:
        """The same until each rank has its slice of the mean."""
        own = self.node_reduce_scatter if is_within_node else None
        return self._group_s(nbytes, num_ranks, own, self.reduce_scatter)

    def _group_s(
        self, nbytes: int, num_ranks: int, of_node: BandwidthCurve | None, of_all: BandwidthCurve | None
    ) -> float:
        """A smaller group than was measured sends less: of n ranks, each sends and gets all but an nth."""
        curve, measured = (of_all, self.world_size) if of_node is None else (of_node, self.world_size // self.num_nodes)
        if curve is None or num_ranks < 2:
            return 0.0
        seconds = curve.seconds(nbytes)
        return seconds if measured < 2 else seconds * (1 - 1 / num_ranks) / (1 - 1 / measured)

    def mean_across_s(self, nbytes: int, num_copies: int) -> float:
        """Seconds until ranks of so many copies of the parameters have the mean of their slices of so many bytes."""
        if num_copies < 2:
            return 0.0
        if self.across_mean is None:
            parts = self.gather_s(nbytes, num_copies, is_within_node=False)
            return parts + self.reduce_s(nbytes, num_copies, is_within_node=False)
        seconds = self.across_mean.seconds(nbytes)
        return seconds if self.num_nodes < 2 else seconds * (1 - 1 / num_copies) / (1 - 1 / self.num_nodes)

    @property
    def nvme_adam_numel_per_s(self) -> float | None:
        """Parameters a second of Adam with fp32 master and states on NVMe: 12 bytes each are read and 12 written, one
        after the other, and the host updates no faster than it does in memory. None where no disk was measured."""
        if not self.nvme_read_bytes_per_s or not self.nvme_write_bytes_per_s:
            return None
        moved = 1 / (12 / self.nvme_read_bytes_per_s + 12 / self.nvme_write_bytes_per_s)
        return min(moved, self.cpu_adam_numel_per_s)

    def streamed_beside(self, host_numel_per_s: float) -> float:
        """Parameters a second of streamed updates while the host updates at its own rate: the stream gets what that
        leaves of what both reach together.

        Where nothing else runs both slow down alike: on an H200 the host updates 4.4 Gparam/s alone and 3.2 beside the
        stream, which has 3.4 and 2.4. In a step the stream stands aside for chunks that are fetched and waits for
        gradients more often than the host does. Of 13 placements on another H200, steps are foreseen 12% too long at
        most so, with one of 61 pairs in the wrong order; with equal parts 12% too short, and seven pairs.
        """
        alone = self.streamed_adam_numel_per_s
        return min(alone, max(self.joint_adam_numel_per_s - host_numel_per_s, _LEAST_BESIDE * alone))

    @property
    def copies_beside_updates(self) -> float:
        """How many times as long a copy over the bus takes while the host updates: both get the same part of what they
        ask of the host's memory. 1 where that has enough for both, or was not measured. Seen on H200s: copies
        took 1.36 and 1.22 times as long, up and down, in a step whose host updated 57% of the time; steps whose copies
        fill the bus beside updates were foreseen 4 to 14% too short without this, 2 to 12% with it."""
        if self.host_bytes_per_s is None:
            return 1.0
        updates, (nbytes, seconds) = ADAM_BYTES * self.cpu_adam_numel_per_s, self.h2d.points[-1]
        return max(1.0, (updates + nbytes / seconds) / max(self.host_bytes_per_s, updates))

    def with_host_slower(self, factor: float) -> HardwareSpec:
        """The same machine where the host's updates take so many times as long, and copies beside them leave as much
        less; below 1: less long.

        What host and stream reach together stays where the host is slower: a stream gets what the host leaves. Seen on
        an H200 in five fits with streamed updates, whose host took 1.13 to 1.39 times as long as foreseen: steps are
        predicted within 14% so, and 17 to 30% too long in four of them if both were slower together.

        Where ranks share a host, its memory is not faster when their updates are: they were measured all at once, and
        come in turns in training. Seen on two and four GPUs in seven fits whose updates took less time than foreseen:
        by a faster memory steps were foreseen 7 to 17% too short; two of them, simulated anew with that which was
        measured, 7 and 11%.
        """
        rate, of_memory = self.host_bytes_per_s, factor
        if self.world_size > self.num_nodes:
            of_memory = max(1.0, factor)
        return replace(
            self,
            name=self.name.removesuffix(_AS_SEEN) + _AS_SEEN,
            cpu_adam_numel_per_s=self.cpu_adam_numel_per_s / factor,
            joint_adam_numel_per_s=self.joint_adam_numel_per_s / min(1.0, of_memory),
            host_bytes_per_s=None if rate is None else rate / of_memory,
        )

    @classmethod
    def nominal(cls, gpu_bytes: int | None = None, host_bytes: int = 0) -> HardwareSpec:
        """Round figures of no machine in particular, for tests and for the CPU as compute device, where the order of
        placements is all that matters: a bus of 25 GB/s, 100 Tflop/s, Adam at 1 (host), 20 (device) Gparam/s;
        launching an operator costs nothing."""
        return cls(
            name=_NOMINAL,
            gpu_bytes=gpu_bytes,
            host_bytes=host_bytes,
            h2d=BandwidthCurve.constant(25e9, 20e-6),
            d2h=BandwidthCurve.constant(25e9, 20e-6),
            duplex_slowdown=1.1,
            cpu_adam_numel_per_s=1e9,
            gpu_adam_numel_per_s=20e9,
            streamed_adam_numel_per_s=1.5e9,
            joint_adam_numel_per_s=2e9,
            matmul_flops_per_s={"float32": 50e12, "float16": 100e12, "bfloat16": 100e12},
            device_bytes_per_s=1e12,
            all_gather=BandwidthCurve.constant(50e9, 50e-6),
            reduce_scatter=BandwidthCurve.constant(50e9, 50e-6),
        )

    @property
    def is_nominal(self) -> bool:
        """Whether these are the figures of `nominal`, but for what was given by hand: predicted seconds say little."""
        return self.name.startswith(_NOMINAL)

    def to_dict(self) -> dict[str, Any]:
        return {"schema": HARDWARE_SCHEMA, **asdict(self)}

    @classmethod
    def from_dict(cls, content: Any) -> HardwareSpec:
        """What `to_dict` gave.

        Raises:
            PlanError: Another schema, or missing, unknown or misshapen entries.
        """
        if not isinstance(content, Mapping) or content.get("schema") != HARDWARE_SCHEMA:
            raise PlanError(
                f"not a hardware profile of schema {HARDWARE_SCHEMA}: run `lightning-elixir bench-hardware`"
            )
        values = {k: v for k, v in content.items() if k != "schema"}
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown:
            raise PlanError(f"the hardware profile has unknown entries: {', '.join(unknown)}")
        try:
            for key in ("h2d", "d2h", *_GROUP_CURVES):
                curve = values.get(key)
                if curve is not None:
                    values[key] = BandwidthCurve(tuple((int(size), float(time)) for size, time in curve["points"]))
            _check_values(values)
            return cls(**values)
        except (TypeError, KeyError, ValueError) as error:
            raise PlanError(f"the hardware profile cannot be read: {error}") from error


_GROUP_CURVES = ("all_gather", "reduce_scatter", "node_all_gather", "node_reduce_scatter", "across_mean")
_SIZES = ("host_bytes", "gpu_bytes", "gpu_total_bytes", "nvme_bytes")
_RATES = (
    "cpu_adam_numel_per_s",
    "gpu_adam_numel_per_s",
    "streamed_adam_numel_per_s",
    "joint_adam_numel_per_s",
    "host_bytes_per_s",
    "device_bytes_per_s",
    "nvme_read_bytes_per_s",
    "nvme_write_bytes_per_s",
)
_NULLABLE = (
    "gpu_bytes",
    "gpu_total_bytes",
    "host_bytes_per_s",
    "nvme_bytes",
    "nvme_read_bytes_per_s",
    "nvme_write_bytes_per_s",
)


def _check_values(values: Mapping[str, Any]) -> None:
    """Raises `PlanError` for a value that no machine has."""

    def check(key: str, value: object, is_good: bool, wanted: str) -> None:
        if not is_good and not (value is None and key in _NULLABLE):
            raise PlanError(f"the hardware profile: {key} must be {wanted}, got {value!r}")

    for key, value in values.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        is_count = is_number and isinstance(value, int)
        if key in _SIZES:
            check(key, value, is_count and value >= 0, "a number of bytes")
        elif key in _RATES:
            check(key, value, is_number and value > 0, "a positive number")
        elif key in ("duplex_slowdown", "computing_slowdown", "collective_slowdown"):
            check(key, value, is_number and value >= 1, "a number of at least 1")
        elif key == "launch_s":
            check(key, value, is_number and value >= 0, "a number of seconds")
        elif key in ("world_size", "num_nodes"):
            check(key, value, is_count and value >= 1, "a number of ranks")
        elif key == "name":
            check(key, value, isinstance(value, str), "a string")
        elif key in ("h2d", "d2h"):
            check(key, value, isinstance(value, BandwidthCurve), "a curve")
        elif key in ("matmul_flops_per_s", "versions"):
            check(key, value, isinstance(value, Mapping), "an object")
    for dtype, rate in values.get("matmul_flops_per_s", {}).items():
        check(f"matmul_flops_per_s of {dtype}", rate, isinstance(rate, (int, float)) and rate > 0, "a positive number")


def save_hardware(spec: HardwareSpec, path: str | Path) -> None:
    Path(path).write_text(json.dumps(spec.to_dict(), indent=1) + "\n", encoding="utf-8")


def load_hardware(path: str | Path) -> HardwareSpec:
    """Read what `save_hardware` wrote.

    Raises:
        PlanError: The file is missing or is not a hardware profile; the message names it.
    """
    origin = "Hardware profiles are written by `lightning-elixir bench-hardware --out FILE.json`, and by save_hardware"
    content = read_json(path, "hardware profile", origin)
    try:
        return HardwareSpec.from_dict(content)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error


def hardware_table(spec: HardwareSpec) -> list[tuple[str, str]]:
    """The figures for people: (what, value with unit), in the order of printing. What was not measured is left out."""
    on_nodes = f" on {spec.num_nodes} nodes" if spec.num_nodes > 1 else ""
    rows = [("machine", spec.name), ("ranks", f"{spec.world_size}{on_nodes}")]
    if spec.gpu_bytes:
        total = "" if spec.gpu_total_bytes is None else f" of {format_bytes(spec.gpu_total_bytes)}"
        rows.append(("device memory", f"{format_bytes(spec.gpu_bytes)}{total}"))
    if spec.host_bytes:
        rows.append(("host memory", format_bytes(spec.host_bytes)))
    rows += [
        ("host to device", _curve_text(spec.h2d)),
        ("device to host", _curve_text(spec.d2h)),
        ("both directions at once", f"{spec.duplex_slowdown:.2f} times as long"),
    ]
    for what, curve in (
        ("all-gather of a chunk", spec.all_gather),
        ("reduce-scatter of a chunk", spec.reduce_scatter),
        ("all-gather within a node", spec.node_all_gather),
        ("reduce-scatter within a node", spec.node_reduce_scatter),
        ("mean of slices over nodes", spec.across_mean),
    ):
        if curve is not None:
            rows.append((what, _curve_text(curve)))
    rows += [
        ("Adam on the host", _adam_text(spec.cpu_adam_numel_per_s)),
        ("Adam on the device", _adam_text(spec.gpu_adam_numel_per_s)),
        ("Adam streamed to the device", _adam_text(spec.streamed_adam_numel_per_s)),
    ]
    if math.isfinite(spec.joint_adam_numel_per_s):
        rows.append(("Adam, host and streamed at once", _adam_text(spec.joint_adam_numel_per_s)))
    if spec.slowdowns is not None:
        times = f"{spec.computing_slowdown:.2f} and {spec.collective_slowdown:.2f} times as long"
        rows.append(("computing and collectives, beside each other", times))
    if spec.host_bytes_per_s:
        rate = f"{spec.host_bytes_per_s / 1e9:.3g} GB/s read and written"
        rows.append(("host memory, with Adam and both directions at once", rate))
    rows += [(f"matmul {name}", f"{rate / 1e12:.3g} TFLOP/s") for name, rate in spec.matmul_flops_per_s.items()]
    if math.isfinite(spec.device_bytes_per_s):
        rows.append(("element-wise operators", f"{spec.device_bytes_per_s / 1e9:.3g} GB/s read and written"))
    rows.append(("least time of an operator", f"{spec.launch_s * 1e6:.3g} us"))
    if spec.nvme_read_bytes_per_s and spec.nvme_write_bytes_per_s:
        rows.append(("NVMe read", f"{spec.nvme_read_bytes_per_s / 1e9:.3g} GB/s"))
        rows.append(("NVMe write", f"{spec.nvme_write_bytes_per_s / 1e9:.3g} GB/s"))
        rows.append(("Adam through NVMe", _adam_text(spec.nvme_adam_numel_per_s or 0.0)))
    if spec.nvme_bytes is not None:
        rows.append(("NVMe free space", format_bytes(spec.nvme_bytes)))
    return rows + [(f"version of {name}", version) for name, version in spec.versions.items()]


def _curve_text(curve: BandwidthCurve) -> str:
    """Bandwidth by size: "11 GB/s at 1 MiB, 31 at 4, 46 at 16"."""
    points = [point for point in curve.points if point[0] >= 2**16] or curve.points
    parts = [(f"{size / seconds / 1e9:.3g}", f"{size / 2**20:g}") for size, seconds in points]
    (rate, size), *others = parts
    return ", ".join([f"{rate} GB/s at {size} MiB", *(f"{rate} at {size}" for rate, size in others)])


def _adam_text(numel_per_s: float) -> str:
    return f"{numel_per_s / 1e9:.3g} Gparam/s"

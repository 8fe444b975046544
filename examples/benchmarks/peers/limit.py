"""What no system can beat on a machine: pure arithmetic over values. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

RESIDENT_BYTES = 16
"""Device memory of a parameter that stays there: value and gradient in 16 bits, fp32 master and two moments."""
ADAM_BYTES = 28
"""Host memory traffic of one update: a 16-bit gradient and three fp32 numbers are read, three and 16 bits written."""
FETCHED_BYTES = 4
"""A 16-bit value goes to the device for forward, and again for backward."""
LANDED_BYTES = 2
"""Its gradient comes back."""
STREAMED_BYTES = 14
"""Each way, of an update that runs on the device over states of the host: three fp32 numbers, and 16 bits."""


@dataclass(frozen=True)
class Rates:
    """Bytes a second."""

    h2d: float
    """To one device while all others of the host do the same."""
    d2h: float
    host: float
    """All that the host's memory serves at once: Adam, transfers to and from the devices."""


@dataclass(frozen=True)
class Traffic:
    """What one step moves, bytes."""

    h2d_bytes: float
    """To each device."""
    d2h_bytes: float
    """From each device."""
    host_bytes: float
    """Read and written in host memory, by everybody."""


@dataclass(frozen=True)
class Limit:
    """Least seconds of a step by each resource."""

    compute_s: float
    h2d_s: float
    d2h_s: float
    host_s: float

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.h2d_s, self.d2h_s, self.host_s)

    @property
    def binding(self) -> str:
        """The resource that sets it."""
        found = {
            "compute": self.compute_s,
            "host to device": self.h2d_s,
            "device to host": self.d2h_s,
            "host memory": self.host_s,
        }
        return max(found, key=lambda name: found[name])


def resident_numel(num_parameters: int, gpu_bytes: float | None, activation_bytes: float, ranks: int = 1) -> int:
    """Parameters that can stay on the devices with everything, if nothing but activations needed room beside them.

    Args:
        gpu_bytes: Of each device; None: no limit.
        activation_bytes: On each device, at the highest moment.
        ranks: Devices that share the parameters.
    """
    if gpu_bytes is None:
        return num_parameters
    room = max(0.0, gpu_bytes - activation_bytes) * ranks
    return min(num_parameters, int(room / RESIDENT_BYTES))


def least_traffic(num_offloaded: int, ranks: int = 1) -> Traffic:
    """Of parameters whose states live in host memory and are updated there, each rank's share by that rank.

    Updates streamed to the device move other bytes: this is the yardstick of the ordinary scheme, not of every one
    that can be thought of.
    """
    moved = FETCHED_BYTES + LANDED_BYTES
    return Traffic(
        h2d_bytes=num_offloaded * FETCHED_BYTES / ranks,
        d2h_bytes=num_offloaded * LANDED_BYTES / ranks,
        host_bytes=num_offloaded * (ADAM_BYTES + moved),
    )


def limit_of(compute_s: float, traffic: Traffic, rates: Rates) -> Limit:
    """The longest of what each resource needs, as if all overlapped perfectly."""
    return Limit(
        compute_s=compute_s,
        h2d_s=traffic.h2d_bytes / rates.h2d,
        d2h_s=traffic.d2h_bytes / rates.d2h,
        host_s=traffic.host_bytes / rates.host,
    )


def own_traffic(fetched_bytes: float, landed_bytes: float, numel: Mapping[str, int], ranks: int = 1) -> Traffic:
    """Of a run that counted what it fetched, and the gradients that landed; updates follow from the placement.

    Args:
        fetched_bytes: To one device in one step.
        landed_bytes: From one device in one step.
        numel: Parameters by who updates them, all ranks together: "host", "streamed", and "written_back", those of the
            host whose values live on the device.
    """
    streamed = numel["streamed"] * STREAMED_BYTES / ranks
    h2d_bytes = fetched_bytes + streamed + numel["written_back"] * LANDED_BYTES / ranks
    d2h_bytes = landed_bytes + streamed
    return Traffic(h2d_bytes, d2h_bytes, (h2d_bytes + d2h_bytes) * ranks + ADAM_BYTES * numel["host"])


def rates_from(hardware: Mapping[str, Any]) -> Rates:
    """From a measured `HardwareSpec` as JSON: large transfers, each way alone, and host memory under all at once.

    Where that was not measured, what the host and a stream reach together at Adam stands for it.
    """

    def bytes_per_s(curve: Mapping[str, Any]) -> float:
        size, seconds = curve["points"][-1]
        return float(size / seconds)

    host = hardware.get("host_bytes_per_s")
    return Rates(
        h2d=bytes_per_s(hardware["h2d"]),
        d2h=bytes_per_s(hardware["d2h"]),
        host=float(host) if host else ADAM_BYTES * float(hardware["joint_adam_numel_per_s"]),
    )

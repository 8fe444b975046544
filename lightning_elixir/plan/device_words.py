"""What refusals of plans call the compute device and its memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceWords:
    """By default those for GPUs."""

    device: str = "GPU"
    devices: str = "GPUs"
    memory: str = "GPU memory"
    more: str = "more GPU memory"
    """After an amount."""
    host_limit: str = ""
    """The option that limits the host's memory, where one does."""
    is_limit_usable: bool = True
    """Whether a plan may use all of that; else there is what the host has, of which a part is kept back."""
    has_activations: bool = True
    """Whether activations share the device's memory with chunks."""

    @classmethod
    def of(cls, limit: str, host_limit: str, *, is_cpu: bool, is_host_limited: bool) -> DeviceWords:
        """Of a GPU, or of a CPU that a limit makes as small as one.

        Args:
            limit: Name of the option that limits the device's memory.
            host_limit: Of that for the host's.
            is_cpu: Whether a CPU plays the device.
            is_host_limited: Whether that option is given.
        """
        given = host_limit if is_host_limited else ""
        if not is_cpu:
            return cls(host_limit=given, is_limit_usable=is_host_limited)
        return cls("device", "ranks", f"CPU memory ({limit})", f"more ({limit})", given, is_host_limited, False)

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

    @classmethod
    def of_a_cpu(cls, option: str) -> DeviceWords:
        """Of a CPU that a limit makes as small as a GPU.

        Args:
            option: Its name.
        """
        return cls("device", "ranks", f"CPU memory ({option})", f"more ({option})")

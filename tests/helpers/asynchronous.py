"""The CPU taken for a device that does several things at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from lightning_elixir.core.device import CpuDevice


@contextmanager
def asynchronous() -> Iterator[None]:
    """Devices that are made inside are such ones."""
    make = CpuDevice.__init__

    def make_late(self: CpuDevice) -> None:
        make(self)
        self.is_synchronous = False

    with mock.patch.object(CpuDevice, "__init__", make_late):
        yield

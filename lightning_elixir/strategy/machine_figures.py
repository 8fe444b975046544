"""What the machine can do: given by the user, kept from an earlier run, or measured when a plan first depends on it."""

from __future__ import annotations

import torch

from lightning_elixir.core.comm import Comm
from lightning_elixir.core.together import run_together
from lightning_elixir.plan.hardware import HardwareSpec
from lightning_elixir.plan.links import on_ranks
from lightning_elixir.profiling.measured_hardware import HardwareProbe
from lightning_elixir.strategy.config import ElixirConfig


class MachineFigures:
    """One machine's figures.

    Args:
        config: The user's options.
        comm: All ranks.
        device: The compute device.
        num_local_ranks: Ranks on this host.
        earlier: For the same machine, of an earlier run.
    """

    def __init__(
        self,
        config: ElixirConfig,
        comm: Comm,
        device: torch.device,
        num_local_ranks: int,
        earlier: MachineFigures | None = None,
    ) -> None:
        self._config = config
        self._comm = comm
        self._device = device
        self._num_local_ranks = num_local_ranks
        self.known: HardwareSpec | None = None if earlier is None or earlier.is_nominal else earlier.known
        """None: not found out, or not needed."""
        # Round figures, with the compute device's own.
        self._computing_only: HardwareSpec | None = None if earlier is None else earlier._computing_only
        self.is_nominal: bool = False
        """Whether they are round figures, but for the disk's."""
        self.is_measured: bool = earlier is not None and earlier.is_measured
        """Whether those that are known are this machine's, from now or an earlier run, and not given by the user."""
        self.is_pending = False
        """Whether measuring was put off until a plan depends on it."""

    def prepare(self, *, is_training: bool) -> None:
        """Find out what costs nothing, and put off what need not be known where everything fits on the device. On the
        CPU, where only the order of placements matters, nothing is measured: kept figures serve, or round ones.
        Collective."""
        config, comm = self._config, self._comm
        found = run_together(comm, config.given_hardware if comm.rank == 0 else lambda: None)
        given: HardwareSpec | None = comm.exchange_objects(found)[0]
        if given is not None:
            given = on_ranks(given, self._num_local_ranks)
        self.is_measured = self.is_measured and given is None
        self.known = given or self.known
        is_reported = config.report_dir is not None
        is_needed = is_training and (config.is_placement_searched or is_reported)
        if self._device.type == "cpu" and is_needed:
            self._take_kept()
        if self._device.type == "cpu" and (is_needed or self._disk is not None):
            self._take_nominal()
        self.is_pending = self.known is None and is_needed
        if self.is_pending and (is_reported or self._disk is not None):
            self.measure()
        self._see_disk()

    @property
    def best(self) -> HardwareSpec:
        """What is known, or else round figures, with those of the compute device if they were measured."""
        return self.known or self._computing_only or HardwareSpec.nominal(self._config.gpu_limit_bytes)

    def measure_computing(self) -> None:
        """Have figures with which a step can be predicted in which nothing moves, in little time. Collective."""
        if self.known is None and self._computing_only is None:
            self._take_kept()
            if self.known is None:
                self._computing_only = self._probe().with_computing_rates(self.best)
        self.is_pending = self.is_pending and self.known is None

    def measure(self) -> None:
        """Have all figures. Collective."""
        if self.known is None:
            self.known, self.is_measured = self._probe().find().spec, True
        self.is_pending = False

    def take_host_slower(self, factor: float) -> None:
        """The host's updates take so many times as long in training as measured; the same on every rank."""
        if self.known is not None and self.is_measured:
            self.known = self.known.with_host_slower(factor)

    def _probe(self) -> HardwareProbe:
        ranks = self._num_local_ranks
        return HardwareProbe(device=self._device, comm=self._comm, local_world_size=ranks, nvme_dir=self._disk)

    @property
    def _disk(self) -> str | None:
        """The folder whose disk plans may count on."""
        return self._config.nvme_offload_dir if self._config.is_placement_searched else None

    def _see_disk(self) -> None:
        if self._disk is None:
            return
        known = self._take_nominal()
        if known.nvme_adam_numel_per_s is None:
            self.known = self._probe().with_disk_rates(known)

    def _take_kept(self) -> None:
        """If nothing is known: figures of an earlier run, where there are any."""
        if self.known is None:
            self.known = self._probe().find_kept()
            self.is_measured = self.known is not None

    def _take_nominal(self) -> HardwareSpec:
        """What is known, or else round figures."""
        if self.known is None:
            self.known, self.is_nominal = HardwareSpec.nominal(self._config.gpu_limit_bytes), True
        return self.known

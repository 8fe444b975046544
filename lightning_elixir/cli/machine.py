"""The machine that a plan is made for: measured or assumed figures, within the sizes that were given."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from lightning_elixir.cli.wording import size_of
from lightning_elixir.errors import PlanError
from lightning_elixir.plan.device_words import DeviceWords
from lightning_elixir.plan.hardware import BandwidthCurve, HardwareSpec, load_hardware
from lightning_elixir.plan.links import Network, on_nodes, on_ranks
from lightning_elixir.plan.memory import Budget, host_share


@dataclass(frozen=True)
class Machine:
    """What one rank has."""

    hardware: HardwareSpec
    budget: Budget
    """Less what a fit keeps back of the host's memory."""
    remarks: tuple[str, ...]
    """Figures that were assumed, for people."""


def machine_of(options: argparse.Namespace, dtype: str) -> Machine:
    """The machine that the options describe.

    Args:
        options: Of the command `plan`.
        dtype: The dtype that `--gpu-tflops` speaks of.

    Raises:
        PlanError: No such figures, or a size is missing or none.
    """
    spec = named_hardware(options.hardware) if options.hardware else HardwareSpec.nominal()
    remarks = _assumed(spec, options)
    spec = _with_figures(on_ranks(spec, options.gpus), options, dtype)
    spec = _for_nodes(spec, options)
    gpu_bytes = size_of(options.gpu_memory, "--gpu-memory") or spec.gpu_bytes
    host_bytes = size_of(options.cpu_memory, "--cpu-memory") or spec.host_bytes
    if not gpu_bytes or not host_bytes:
        missing = [f"--{kind}-memory" for kind, size in (("gpu", gpu_bytes), ("cpu", host_bytes)) if not size]
        raise PlanError(
            f"how much memory is there? Give {' and '.join(missing)} (such as 24GiB), or --hardware with a machine"
            " that was measured"
        )
    nvme_bytes = size_of(options.nvme_memory, "--nvme-memory", may_be_zero=True) or 0
    if nvme_bytes and spec.nvme_adam_numel_per_s is None:
        raise PlanError(
            "how fast is the disk? Give --nvme-read-gb-s and --nvme-write-gb-s beside --nvme-memory, or --hardware with"
            " figures of a disk, as `lightning-elixir bench-hardware --nvme-dir FOLDER --out FILE.json` writes them"
        )
    spec = replace(spec, gpu_bytes=gpu_bytes, host_bytes=host_bytes, nvme_bytes=nvme_bytes or None)
    if options.hardware is None:
        remarks = ("speeds are round figures of no machine in particular: see --hardware", *remarks)
    cpu, spare = host_share(host_bytes, options.gpus, size_of(options.cpu_memory_limit, "--cpu-memory-limit"))
    is_limited = bool(options.cpu_memory_limit)
    words = DeviceWords(host_limit="--cpu-memory-limit" if is_limited else "--cpu-memory", is_limit_usable=is_limited)
    budget = Budget(
        gpu_bytes,
        cpu,
        nvme_bytes=nvme_bytes // options.gpus,
        spare_cpu_bytes=spare,
        words=words,
        reserve_bytes=0 if is_limited else host_bytes // options.gpus - cpu,
    )
    return Machine(spec, budget, remarks)


def named_hardware(name: str) -> HardwareSpec:
    """A machine by the name of a packaged profile (in upper or lower case), or by the path of one.

    Raises:
        PlanError: Neither exists, or the file is no profile.
    """
    folder = files("lightning_elixir.plan") / "machines"
    known = sorted(item.name.removesuffix(".json") for item in folder.iterdir() if item.name.endswith(".json"))
    packaged = name if name in known or Path(name).exists() else name.lower()
    if packaged in known:
        return HardwareSpec.from_dict(json.loads((folder / f"{packaged}.json").read_text(encoding="utf-8")))
    if not Path(name).exists():
        raise PlanError(
            f"no machine {name!r}: it is neither a file nor one of {', '.join(known)}."
            " `lightning-elixir bench-hardware --out FILE.json` writes a file of this one. Without --hardware"
            " round figures are taken: give --gpu-memory and --cpu-memory"
        )
    return load_hardware(name)


def _with_figures(spec: HardwareSpec, options: argparse.Namespace, dtype: str) -> HardwareSpec:
    changed: dict[str, object] = {}
    for option, name in (("h2d_gb_s", "h2d"), ("d2h_gb_s", "d2h")):
        rate = getattr(options, option)
        if rate is not None:
            changed[name] = BandwidthCurve.constant(rate * 1e9)
    if options.collective_gb_s is not None:
        curve = BandwidthCurve.constant(options.collective_gb_s * 1e9)
        changed |= {"all_gather": curve, "reduce_scatter": curve}
    for option, name in (
        ("gpu_adam", "gpu_adam_numel_per_s"),
        ("cpu_adam", "cpu_adam_numel_per_s"),
        ("streamed_adam", "streamed_adam_numel_per_s"),
        ("nvme_read_gb_s", "nvme_read_bytes_per_s"),
        ("nvme_write_gb_s", "nvme_write_bytes_per_s"),
    ):
        rate = getattr(options, option)
        if rate is not None:
            changed[name] = rate * 1e9
    if options.gpu_tflops is not None:
        changed["matmul_flops_per_s"] = {**spec.matmul_flops_per_s, dtype: options.gpu_tflops * 1e12}
    if not changed:
        return spec
    return replace(spec, **changed, name=f"{spec.name}; {len(changed)} of the figures given by hand")  # type: ignore[arg-type]


def _assumed(spec: HardwareSpec, options: argparse.Namespace) -> tuple[str, ...]:
    """What is assumed where another number of ranks was measured."""
    if spec.world_size == options.gpus or spec.num_nodes > 1:
        return ()
    remarks = []
    if options.cpu_adam is None:
        remarks.append(f"Adam on the host: the figure of {_ranks(spec.world_size)}, shared by {_ranks(options.gpus)}")
    if options.gpus > 1 and spec.all_gather is None and options.collective_gb_s is None:
        remarks.append("collectives: round figures, since one rank was measured; see --collective-gb-s")
    return tuple(remarks)


def _for_nodes(spec: HardwareSpec, options: argparse.Namespace) -> HardwareSpec:
    """The figures of a rank among several nodes: those that were measured there, or simulated ones.

    Raises:
        PlanError: They were measured on other nodes, or nothing is known of the network.
    """
    nodes, measured = options.nodes, (spec.num_nodes, spec.world_size)
    if spec.num_nodes > 1:
        if measured != (nodes, nodes * options.gpus):
            raise PlanError(
                f"--hardware: these figures are of {spec.world_size} GPUs on {spec.num_nodes} hosts: give --nodes"
                f" {spec.num_nodes} --gpus {spec.world_size // spec.num_nodes}, or figures of one host"
            )
        return spec
    given = (options.network_gb_s, options.network_us)
    if nodes == 1:
        return spec
    if None in given:
        raise PlanError(
            "how fast is the network between the hosts? Give --network-gb-s and --network-us, or figures that"
            " `bench-hardware` has measured there"
        )
    return on_nodes(spec, nodes, Network(given[0] * 1e9, given[1] * 1e-6))


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"

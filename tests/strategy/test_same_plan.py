"""`lightning-elixir plan` says which plan a fit comes to, with the same options on the same machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_elixir import CPUAdam, ElixirWeightAveraging
from lightning_elixir._lightning import LightningModule
from lightning_elixir.cli.options import make_parser
from lightning_elixir.cli.plan import find
from lightning_elixir.plan.hardware import BandwidthCurve, HardwareSpec, save_hardware
from lightning_elixir.plan.types import Plan, Tier
from lightning_elixir.strategy import ElixirStrategy, shared_plans
from lightning_elixir.strategy.shared_plans import Planner
from tests.helpers.dist import run_ranks
from tests.helpers.tiers import crossed
from tests.strategy.models import make_trainer

WIDTH, NUM_LAYERS, BATCH = 512, 8, 4


class Net(LightningModule):
    """No norms: autocast on a CPU, where the fit runs, leaves them alone, and the command plans for GPUs."""

    def __init__(self, optimizer: str = "hybrid") -> None:
        super().__init__()
        self.optimizer = optimizer
        self.embed = nn.Embedding(100, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embed(batch)
        for layer in self.layers:
            x = x + nn.functional.gelu(layer(x))
        return x.float().square().mean()

    def configure_optimizers(self) -> Any:
        if self.optimizer == "hybrid":
            return CPUAdam(self.parameters(), lr=1e-3)
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def batch() -> Tensor:
    return torch.arange(BATCH * 16).view(BATCH, 16) % 100


def _planned(machine: Path, limits: dict[str, str], options: list[str]) -> Plan:
    arguments = ["plan", "--module", f"{__file__}:Net", "--batch", f"{__file__}:batch", "--hardware", str(machine)]
    for name, value in limits.items():
        arguments += [name, value]
    return find(make_parser().parse_args([*arguments, *options, "--json"])).plan


CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "nothing": ({}, []),
    "clip": ({"gradient_clip_val": 1.0}, ["--gradient-clip-val", "1"]),
    "clip value": (
        {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
        ["--gradient-clip-val", "1", "--gradient-clip-algorithm", "value"],
    ),
    "accumulate": ({"accumulate_grad_batches": 2}, ["--accumulate", "2"]),
    "torch": ({"optimizer": "torch"}, ["--optimizer", "torch"]),
    "timing": ({"update_timing": "after_backward"}, ["--update-timing", "after_backward"]),
    "fp32": ({"precision": "32-true"}, ["--precision", "32-true"]),
    "cpu": ({"placement_policy": "auto", "chunk_size": "256KiB"}, ["--chunk-size", "256KiB"]),
    "ignored": ({"ignored": ["embed"]}, ["--ignored", "embed"]),
    "averages": ({"averages": 1}, ["--averages", "1"]),
    "averages without masters": (
        {"averages": 1, "precision": "bf16-true", "optimizer": "torch"},
        ["--averages", "1", "--precision", "bf16-true", "--optimizer", "torch"],
    ),
}


@crossed(told=["accumulate-64MiB", "clip-24MiB"], case=list(CASES), host=["24MiB", "64MiB"])
def test_the_fit_comes_to_the_plan_of_the_command(
    case: str, host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a GPU, whose memory chunks share with what a step takes beside them.
    monkeypatch.setattr(Planner, "_counts_activations", property(lambda planner: True))
    if (case, host) == ("fp32", "24MiB"):
        host = "32MiB"  # for a fit that has too little goes on all the same
    machine = tmp_path / "machine.json"
    save_hardware(replace(HardwareSpec.nominal(), device_bytes_per_s=1e11), machine)
    trained, typed = CASES[case]
    # 88 MiB for activations and working memory; fewer chunks, and bf16 states, take less.
    limit = {"ignored": "108MiB", "accumulate": "116MiB", "averages without masters": "104MiB"}.get(case, "114MiB")
    planned = _planned(machine, {"--gpu-memory": limit, "--cpu-memory": "1GiB", "--cpu-memory-limit": host}, typed)
    options = dict(trained)
    names = ("update_timing", "placement_policy", "chunk_size", "ignored")
    strategy = ElixirStrategy(
        gpu_memory_limit=limit,
        cpu_memory_limit=host,
        hardware=machine,
        **{name: options.pop(name) for name in names if name in options},
    )
    model = Net(options.pop("optimizer", "hybrid"))
    options["callbacks"] = [ElixirWeightAveraging(decay=0.9) for _ in range(options.pop("averages", 0))]
    trainer = make_trainer(strategy, max_steps=1, **{"precision": "bf16-mixed", **options})
    trainer.fit(model, torch.utils.data.DataLoader([batch()[i] for i in range(BATCH)] * 4, batch_size=BATCH))
    assert strategy.plan.fingerprint() == planned.fingerprint()
    assert any(c.optim_tier is not Tier.GPU for c in planned.chunks)
    assert any(c.has_spare_states for c in planned.chunks) == (case == "clip")


def test_a_fit_without_a_limit_keeps_back_of_the_host_what_the_command_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Planner, "_counts_activations", property(lambda planner: True))
    machine, model = tmp_path / "machine.json", Net()
    save_hardware(replace(HardwareSpec.nominal(), device_bytes_per_s=1e11), machine)
    # Beside the model, whose memory counts as free.
    available = 64 * 2**20 - sum(p.nbytes for p in model.parameters())
    monkeypatch.setattr(shared_plans, "available_host_bytes", lambda: available)
    planned = _planned(machine, {"--gpu-memory": "114MiB", "--cpu-memory": "64MiB"}, [])
    strategy = ElixirStrategy(gpu_memory_limit="114MiB", hardware=machine)
    trainer = make_trainer(strategy, max_steps=1, precision="bf16-mixed")
    trainer.fit(model, torch.utils.data.DataLoader([batch()[i] for i in range(BATCH)] * 4, batch_size=BATCH))
    assert strategy.plan.fingerprint() == planned.fingerprint()
    assert strategy.plan.forecast is not None
    assert planned.forecast is not None
    assert strategy.plan.forecast.host_limit_bytes == planned.forecast.host_limit_bytes == 48 * 2**20


def _plan_of_rank(machine: Path) -> str:
    """Run by each of two ranks."""
    strategy = ElixirStrategy(gpu_memory_limit="114MiB", cpu_memory_limit="64MiB", hardware=machine)
    trainer = make_trainer(strategy, max_steps=1, devices=2, precision="bf16-mixed", use_distributed_sampler=False)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Planner, "_counts_activations", property(lambda planner: True))
        trainer.fit(Net(), torch.utils.data.DataLoader([batch()[i] for i in range(BATCH)] * 4, batch_size=BATCH))
    return strategy.plan.fingerprint()


@pytest.mark.full
def test_two_ranks_share_the_host_that_one_rank_was_measured_on(tmp_path: Path) -> None:
    machine = tmp_path / "machine.json"
    collectives = BandwidthCurve.constant(100e9)
    figures = replace(HardwareSpec.nominal(), device_bytes_per_s=1e11, host_bytes_per_s=5e10)
    save_hardware(replace(figures, all_gather=collectives, reduce_scatter=collectives), machine)
    limits = {"--gpu-memory": "114MiB", "--cpu-memory": "1GiB", "--cpu-memory-limit": "64MiB"}
    planned = _planned(machine, limits, ["--gpus", "2"])
    assert set(run_ranks(_plan_of_rank, 2, machine, init_group=False)) == {planned.fingerprint()}

"""Several devices in a session without a script: a notebook, or `python -i`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from lightning_elixir import ElixirStrategy, PlanError, StateError
from lightning_elixir._lightning import lightning_imports
from lightning_elixir.fabric import ElixirStrategy as FabricStrategy
from tests.helpers.processes import run
from tests.helpers.tiers import full
from tests.strategy.fabric_runs import Loop, make_fabric
from tests.strategy.models import LateNet, Net, ShardedNet, assert_same_state, make_trainer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def _session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lightning_imports, "_IS_INTERACTIVE", True)


def _launchers(**options: Any) -> list[Any]:
    trainer = make_trainer(ElixirStrategy(**options), devices=2)
    strategy = FabricStrategy(parallel_devices=[torch.device("cpu")] * 2, **options)
    strategy.cluster_environment = trainer.strategy.cluster_environment
    strategy._configure_launcher()
    return [trainer.strategy.launcher, strategy.launcher]


@pytest.mark.usefixtures("_session")
def test_processes_are_forked_where_there_is_no_script() -> None:
    for launcher in [*_launchers(), *_launchers(start_method="fork")]:
        assert launcher.is_interactive_compatible
        assert launcher._start_method == "fork"


def test_scripts_are_run_once_a_device() -> None:
    assert not any(launcher.is_interactive_compatible for launcher in _launchers())


@pytest.mark.usefixtures("_session")
def test_one_device_needs_no_process() -> None:
    assert make_trainer(ElixirStrategy()).strategy.launcher is None
    assert make_fabric("elixir", Loop()).strategy.launcher is None


@pytest.mark.usefixtures("_session")
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_new_processes_are_refused_in_a_session(method: Any) -> None:
    with pytest.raises(PlanError, match=f"start_method='{method}' begins new processes.*leave start_method out"):
        make_trainer(ElixirStrategy(start_method=method), devices=2)


def test_fork_of_a_process_that_uses_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_elixir.strategy.processes.is_device_in_use", lambda: True)
    strategy = ElixirStrategy(start_method="fork", parallel_devices=[torch.device("cuda", i) for i in range(2)])
    with pytest.raises(StateError, match="forked from this one, which uses CUDA already.*Restart the kernel"):
        strategy.prepare_start("fork")
    strategy.prepare_start("spawn")


AFTER_FORK = """
import os, signal, torch
from lightning_elixir.core.threads import end_openmp_threads

torch.set_num_threads(2)
x = torch.randn(2_000_000)
torch.sigmoid(x)
end_openmp_threads()
child = os.fork()
if child == 0:
    signal.alarm(20)
    torch.sigmoid(x)
    os._exit(0)
print("ended", os.waitpid(child, 0)[1], torch.sigmoid(x).shape[0])
"""


def test_fork_computes_on_where_its_parent_had_threads() -> None:
    assert "ended 0 2000000" in run(AFTER_FORK).stdout


class _Worker(NamedTuple):
    """What Lightning's launcher is told of."""

    best_model_path: str | None
    weights_path: str | None
    trainer_state: Any
    extra: Any


@pytest.mark.parametrize("make_model", [Net, LateNet, ShardedNet])
def test_weights_come_back_also_to_layers_that_hooks_have_made(make_model: type[Net], tmp_path: Path) -> None:
    """`trainer.save_checkpoint` in the session would have written a model without parameters."""
    trained = LateNet(seed=3)
    trained.configure_model()
    path = tmp_path / "weights.ckpt"
    torch.save(trained.state_dict(), path)
    trainer = make_trainer(ElixirStrategy(start_method="fork"), devices=2)
    trainer.strategy.connect(model := make_model())
    before = torch.random.get_rng_state()
    launcher = trainer.strategy.launcher
    extra = launcher.get_extra_results(trainer)
    launcher._recover_results_in_main_process(_Worker(None, str(path), trainer.state, extra), trainer)
    assert_same_state(model.state_dict(), trained.state_dict())
    assert torch.equal(before, torch.random.get_rng_state())
    launcher.procs = [None]
    with pytest.raises(StateError, match="the engine was in the processes .* have ended: ask for it there"):
        trainer.strategy.stats()


SESSION = """
import torch
from torch import nn
import lightning_elixir
from {package} import {name}

class Net({base}):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 8)
    def training_step(self, batch, index):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return lightning_elixir.HybridAdam(self.parameters(), lr=0.1)

{train}
"""
TRAIN = {
    "Trainer": """
net = Net()
before, x = net.net.weight.clone(), torch.randn(2000, 500).sigmoid()
quiet = dict(logger=False, enable_checkpointing=False)
trainer = Trainer(strategy="elixir", accelerator="cpu", devices=2, max_epochs=1, **quiet)
trainer.fit(net, torch.utils.data.DataLoader(torch.randn(16, 8), batch_size=4))
print("trained", not torch.equal(before, net.net.weight), trainer.world_size)
""",
    "Fabric": """
def train(fabric):
    net, optimizer = fabric.setup(net := Net(), torch.optim.AdamW(net.parameters()))
    fabric.backward(net.training_step(torch.ones(2, 8), 0))
    optimizer.step()
    return fabric.world_size

print("trained", True, Fabric(strategy="elixir", accelerator="cpu", devices=2).launch(train))
""",
}


@pytest.mark.parametrize("name", [full("Trainer"), full("Fabric")])
def test_python_i_trains_on_two_devices(name: str) -> None:
    pl = lightning_imports.__name__.partition(".")[0]
    package = {"lightning": {"Trainer": "lightning.pytorch", "Fabric": "lightning.fabric"}}.get(pl, {})
    base = "nn.Module" if name == "Fabric" else "__import__('lightning.pytorch').pytorch.LightningModule"
    code = SESSION.format(package=package[name], name=name, base=base, train=TRAIN[name])
    done = subprocess.run(
        [sys.executable, "-i", "-c", code],
        input="",
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert "trained True 2" in done.stdout, done.stderr

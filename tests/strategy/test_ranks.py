"""Two ranks give what DDP gives, bit for bit; and the ways to start them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_elixir._lightning import pl
from lightning_elixir.strategy import ElixirStrategy
from tests.helpers.dist import run_ranks
from tests.strategy.models import (
    CHUNK,
    TIGHT,
    LateNet,
    Net,
    assert_same_state,
    fit,
    make_data,
    make_trainer,
)
from tests.strategy.test_fit import BatchNormNet, FrozenNet, ManualNet, OverridingNet, ScheduledNet, TiedNet

ROOT = Path(__file__).parents[2]


def _train(make_model: Callable[[], Net], strategy: Any, options: dict[str, Any]) -> Any:
    if isinstance(strategy, dict):
        strategy = ElixirStrategy(**strategy)
    trainer, _, run = fit(
        strategy, make_model, devices=2, train=lambda: make_data(64), val=lambda: make_data(16, seed=2), **options
    )
    evictions = strategy.stats().evictions if isinstance(strategy, ElixirStrategy) else 0
    return [x.item() for x in run.losses], {k: v.item() for k, v in run.metrics.items()}, run.state, evictions


def _assert_equal_to_ddp(make_model: Callable[[], Net] = Net, elixir: Any = TIGHT, *, exact: bool = True, **options: Any) -> None:
    ddp = "ddp_find_unused_parameters_true"
    expected = run_ranks(_train, 2, make_model, ddp, options, init_group=False)
    actual = run_ranks(_train, 2, make_model, elixir, options, init_group=False)
    for a, e in zip(actual, expected, strict=True):
        if exact:
            assert a[:2] == e[:2]
        else:
            torch.testing.assert_close(a[0], e[0], rtol=1e-4, atol=1e-6)
    if exact:
        assert_same_state(actual[0][2], expected[0][2])
    assert actual[1][2] == {}
    assert "gpu_memory_limit" not in elixir or actual[0][3] > 0


@pytest.mark.parametrize(
    "options",
    [
        {"placement_policy": "auto"},
        {"placement_policy": "auto", "gpu_memory_limit": "96KiB"},
        {"placement_policy": "cuda"},
        {"placement_policy": "const", "shard_param_frac": 0.5, "offload_optim_frac": 0.5},
        {"placement_policy": "cpu", "gpu_memory_limit": "96KiB", "enable_distributed_storage": False},
    ],
    ids=str,
)
def test_policies(options: dict[str, Any]) -> None:
    _assert_equal_to_ddp(lambda_free_hybrid, {**CHUNK, **options}, max_epochs=2)


def lambda_free_hybrid() -> Net:
    return Net(optimizer="hybrid")


class RankBranchNet(Net):
    """A layer that only rank 1 uses, and only in every second step."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(32, 32)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        if self.global_rank == 1 and batch_idx % 2:
            x = self.extra(x)
        return super().training_step([x, y], batch_idx)


@pytest.mark.parametrize("make_model", [LateNet, ScheduledNet, FrozenNet, TiedNet, RankBranchNet])
def test_models(make_model: Any) -> None:
    _assert_equal_to_ddp(make_model, max_epochs=2)


@pytest.mark.parametrize("make_model", [ManualNet, OverridingNet])
def test_clipping_models(make_model: Any) -> None:
    _assert_equal_to_ddp(make_model, exact=False, max_epochs=2)


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"},
        {"num_sanity_val_steps": 2, "val_check_interval": 3, "max_epochs": 2},
        {"limit_train_batches": 3},
    ],
    ids=str,
)
def test_trainer_options(options: dict[str, Any]) -> None:
    _assert_equal_to_ddp(**options)


def test_clipping_by_norm_with_accumulation() -> None:
    _assert_equal_to_ddp(exact=False, gradient_clip_val=0.05, accumulate_grad_batches=2)


def _batch_norm() -> Any:
    _, _, run = fit(ElixirStrategy(**TIGHT), BatchNormNet, devices=2)
    return run.state


def test_buffers_of_rank_0_are_saved() -> None:
    state = run_ranks(_batch_norm, 2, init_group=False)[0]
    assert state["layers.1.norm.num_batches_tracked"] == 4


# Checkpoints between numbers of ranks


def _save(path: str) -> Any:
    trainer, _, run = fit(ElixirStrategy(**TIGHT), lambda_free_hybrid, devices=2, max_epochs=1)
    trainer.save_checkpoint(path)
    return run.state, Path(path).exists()


def _resume(path: str, devices: int, strategy: Any = None) -> Any:
    pl.seed_everything(5, verbose=False)
    model = lambda_free_hybrid()
    model.layers.eval()
    trainer = make_trainer(ElixirStrategy(**TIGHT) if strategy is None else strategy, devices=devices, max_epochs=2)
    # The same global batches for any number of ranks.
    data = make_data(32, batch_size=8 // devices)
    trainer.fit(model, data, ckpt_path=path, weights_only=False)
    return trainer.strategy.lightning_module_state_dict()


@pytest.mark.parametrize("devices", [1, 2])
def test_resume_with_another_number_of_ranks(tmp_path: Path, devices: int) -> None:
    path = str(tmp_path / "two.ckpt")
    saved, is_written = run_ranks(_save, 2, path, init_group=False)[0]
    assert is_written
    assert_same_state(torch.load(path, weights_only=True)["state_dict"], saved)
    ddp = run_ranks(_resume, 2, path, 2, "ddp", init_group=False)[0]
    state = _resume(path, 1) if devices == 1 else run_ranks(_resume, 2, path, 2, init_group=False)[0]
    if devices == 2:
        assert_same_state(state, ddp)
    else:  # another sampler: other batches
        assert state.keys() == ddp.keys()


class StopOnRank1(pl.Callback):
    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 2:
            raise ValueError("stopped on rank 1")


def _stop() -> str:
    from datetime import timedelta

    with pytest.raises(Exception) as error:  # noqa: PT011 - the type is part of what is compared
        fit(ElixirStrategy(**TIGHT, timeout=timedelta(seconds=20)), devices=2, callbacks=[StopOnRank1()])
    if dist.get_rank() == 1:
        dist.destroy_process_group()
    return f"{type(error.value).__name__}: {error.value}"


def test_an_error_on_one_rank_ends_the_others_too() -> None:
    first, second = run_ranks(_stop, 2, init_group=False, fresh=True, timeout_s=90)
    assert second == "ValueError: stopped on rank 1"
    assert "Error" in first


# Starting processes

SCRIPT = """
    import logging, os, sys, warnings
    warnings.simplefilter("ignore")
    import torch
    torch.set_num_threads(1)
    import lightning_elixir
    from lightning_elixir._lightning import Trainer
    from tests.strategy.models import Net, make_data

    def main():
        trainer = Trainer(strategy={strategy}, accelerator="cpu", devices=2, max_epochs=1, logger=False,
                          enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        model = Net()
        trainer.fit(model, make_data())
        state = trainer.strategy.lightning_module_state_dict() if {collective} else {{}}
        print("done", trainer.global_rank, trainer.world_size, len(state), flush=True)

    if __name__ == "__main__":
        main()
"""


def _run(tmp_path: Path, command: list[str], strategy: str = '"elixir"', collective: bool = True) -> list[str]:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT.format(strategy=strategy, collective=collective)))
    environment = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "WORLD_SIZE", "RANK", "MASTER_PORT")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, str(script)], env=environment, capture_output=True, text=True, timeout=200, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return sorted(line for line in done.stdout.splitlines() if line.startswith("done"))


@pytest.mark.slow
def test_script_is_started_once_a_device(tmp_path: Path) -> None:
    assert _run(tmp_path, [sys.executable]) == ["done 0 2 26", "done 1 2 0"]


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    assert _run(tmp_path, command) == ["done 0 2 26", "done 1 2 0"]


@pytest.mark.slow
def test_spawned_processes_bring_the_weights_back(tmp_path: Path) -> None:
    strategy = 'lightning_elixir.ElixirStrategy(start_method="spawn")'
    assert _run(tmp_path, [sys.executable], strategy, collective=True) == ["done 0 2 26"]


def test_a_single_device_needs_no_process_group() -> None:
    strategy = ElixirStrategy(**TIGHT)
    trainer, _, _ = fit(strategy)
    assert not dist.is_initialized()
    assert (trainer.world_size, trainer.global_rank, strategy.launcher, strategy.is_distributed) == (1, 0, None, False)
    assert strategy.broadcast("x") == "x"
    assert strategy.reduce(torch.tensor(3.0)).item() == 3.0
    assert strategy.reduce("x") == "x"
    assert strategy.all_gather(torch.ones(2)).tolist() == [1.0, 1.0]
    assert strategy.reduce_boolean_decision(True)
    strategy.barrier()


def _messages() -> Any:
    trainer = make_trainer(ElixirStrategy(), devices=2)
    strategy = trainer.strategy
    strategy.setup_environment()
    value = torch.tensor(float(trainer.global_rank + 1))
    strategy.barrier("here")
    return (
        strategy.broadcast(f"from {trainer.global_rank}"),
        strategy.reduce(value.clone()).item(),
        strategy.reduce(value.clone(), reduce_op="sum").item(),
        strategy.all_gather(value).tolist(),
        strategy.reduce_boolean_decision(trainer.global_rank == 0, all=False),
        trainer.distributed_sampler_kwargs,
    )


def test_messages_between_ranks() -> None:
    for rank, answers in enumerate(run_ranks(_messages, 2, init_group=False)):
        assert answers == ("from 0", 1.5, 3.0, [1.0, 2.0], True, {"num_replicas": 2, "rank": rank})



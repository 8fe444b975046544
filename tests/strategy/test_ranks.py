"""Two ranks give what DDP gives, bit for bit; and the ways to start them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_elixir._lightning import pl
from lightning_elixir.strategy import ElixirStrategy
from tests.helpers.dist import run_ranks
from tests.helpers.tiers import full, telling
from tests.strategy.models import (
    CHUNK,
    TIGHT,
    Block,
    LateNet,
    Net,
    assert_same_state,
    fit,
    make_data,
    make_trainer,
)
from tests.strategy.nets import BatchNormNet, FrozenNet, ManualNet, OverridingNet, ScheduledNet, TiedNet

ROOT = Path(__file__).parents[2]


def _train(make_model: Callable[[], Net], strategy: Any, options: dict[str, Any]) -> Any:
    if isinstance(strategy, dict):
        strategy = ElixirStrategy(**strategy)
    trainer, _, run = fit(
        strategy, make_model, devices=2, train=lambda: make_data(64), val=lambda: make_data(16, seed=2), **options
    )
    evictions = strategy.stats().evictions if isinstance(strategy, ElixirStrategy) else 0
    return [x.item() for x in run.losses], {k: v.item() for k, v in run.metrics.items()}, run.state, evictions


def _assert_equal_to_ddp(
    make_model: Callable[[], Net] = Net, elixir: Any = TIGHT, *, exact: bool = True, **options: Any
) -> None:
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


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        full({"placement_policy": "auto"}),
        full({"placement_policy": "auto", "gpu_memory_limit": "96KiB"}),
        full({"placement_policy": "cuda"}),
        full({"placement_policy": "const", "shard_param_frac": 0.5, "offload_optim_frac": 0.5}),
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


class TalkingNet(Net):
    """Each rank goes through a layer of its own, and then sends what all ranks receive."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.ModuleList(Block(dropout=0.0) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(self.own[self.global_rank](x))
        return output

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        self.losses.append(self.all_gather(loss.detach()).sum())
        self.trainer.strategy.barrier()
        self.losses.append(self.trainer.strategy.broadcast(loss.detach(), src=1))
        return loss + self.loss(batch)


def test_messages_inside_a_forward_wait_for_ranks_that_need_chunks() -> None:
    _assert_equal_to_ddp(TalkingNet)


MODELS = [LateNet, ScheduledNet, FrozenNet, TiedNet, RankBranchNet]


@pytest.mark.full
@pytest.mark.parametrize("make_model", telling(MODELS, "RankBranchNet"))
def test_models(make_model: Any) -> None:
    _assert_equal_to_ddp(make_model, max_epochs=2)


@pytest.mark.parametrize("make_model", [ManualNet, OverridingNet])
@pytest.mark.full
def test_clipping_models(make_model: Any) -> None:
    _assert_equal_to_ddp(make_model, exact=False, max_epochs=2)


@pytest.mark.parametrize(
    "options",
    [
        full({"precision": "64-true"}),
        full({"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"}),
        full({"num_sanity_val_steps": 2, "val_check_interval": 3, "max_epochs": 2}),
        full({"limit_train_batches": 3}),
    ],
    ids=str,
)
def test_trainer_options(options: dict[str, Any]) -> None:
    _assert_equal_to_ddp(**options)


@pytest.mark.full
@pytest.mark.parametrize("clip", [full({}), {"gradient_clip_val": 0.05}], ids=str)
def test_accumulation(clip: dict[str, Any]) -> None:
    """DDP sums the micro-batches first and the ranks then; here it is the other way round."""
    _assert_equal_to_ddp(exact=False, accumulate_grad_batches=2, **clip)


def _batch_norm() -> Any:
    _, _, run = fit(ElixirStrategy(**TIGHT), BatchNormNet, devices=2)
    return run.state


@pytest.mark.full
def test_buffers_of_rank_0_are_saved() -> None:
    state = run_ranks(_batch_norm, 2, init_group=False)[0]
    assert state["layers.1.norm.num_batches_tracked"] == 4


class LookingNet(BatchNormNet):
    """Runs its layers once more in a step, without gradients, which changes the running statistics again."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            self(batch[0])
        self.losses.append(self.layers[1].norm.running_mean.sum())
        return loss


@pytest.mark.full
def test_running_statistics_are_shared_when_a_step_begins() -> None:
    """Once, however many forwards it runs: DDP takes a step for one."""
    _assert_equal_to_ddp(LookingNet, max_epochs=2)


class MeanNet(Net):
    """With a buffer that every rank changes by its own batches, and that nobody shares in training."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.mean.mul_(0.9).add_(batch[0].mean(), alpha=0.1)
        return super().training_step(batch, batch_idx)


class SharedMeanNet(MeanNet):
    """Computes with the buffer, and shares it as the docs say where DDP does not."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._share()

    def on_validation_start(self) -> None:
        self._share()

    def _share(self) -> None:
        if not isinstance(self.trainer.strategy, pl.strategies.DDPStrategy):
            dist.broadcast(self.mean, src=0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - self.mean)


def test_other_buffers_are_shared_by_hooks() -> None:
    """DDP does that by itself."""
    _assert_equal_to_ddp(SharedMeanNet)


def _saved_and_loaded_mean(path: str, state_dict_type: str) -> tuple[float, float]:
    means = []
    for ckpt_path in (None, path):  # nothing is left to do for the second one
        model = MeanNet()
        trainer = make_trainer(ElixirStrategy(**TIGHT, state_dict_type=state_dict_type), devices=2)
        trainer.fit(model, make_data(), ckpt_path=ckpt_path, weights_only=False)
        means.append(float(model.mean))
        if ckpt_path is None:
            trainer.save_checkpoint(path)
    return means[0], means[1]


@pytest.mark.parametrize("state_dict_type", telling(["full", "sharded"], "sharded"))
def test_buffers_of_rank_0_are_loaded_by_all(tmp_path: Path, state_dict_type: str) -> None:
    """As from a checkpoint of DDP's."""
    path = str(tmp_path / "model.ckpt")
    means = run_ranks(_saved_and_loaded_mean, 2, path, state_dict_type, init_group=False)
    saved, loaded = zip(*means, strict=True)
    assert saved[0] != saved[1]
    assert loaded == (saved[0], saved[0])


# Checkpoints between numbers of ranks


def _save(path: str) -> Any:
    trainer, _, run = fit(ElixirStrategy(**TIGHT), lambda_free_hybrid, devices=2, max_epochs=1)
    trainer.save_checkpoint(path)
    return run.state, Path(path).exists()


def _resume(path: str, devices: int, strategy: Any = None) -> Any:
    pl.seed_everything(5, verbose=False)
    model = lambda_free_hybrid()
    trainer = make_trainer(ElixirStrategy(**TIGHT) if strategy is None else strategy, devices=devices, max_epochs=2)
    trainer.fit(model, make_data(32, batch_size=8 // devices), ckpt_path=path, weights_only=False)
    return trainer.strategy.lightning_module_state_dict()


@pytest.mark.parametrize("devices", telling([1, 2], "1"))
def test_resume_with_another_number_of_ranks(tmp_path: Path, devices: int) -> None:
    path = str(tmp_path / "two.ckpt")
    saved, is_written = run_ranks(_save, 2, path, init_group=False)[0]
    assert is_written
    assert_same_state(torch.load(path, weights_only=True)["state_dict"], saved)
    if devices == 1:
        assert_same_state(_resume(path, 1), _resume(path, 1, "auto"))
    else:
        expected, actual = (run_ranks(_resume, 2, path, 2, s, init_group=False)[0] for s in ("ddp", None))
        assert_same_state(actual, expected)


# Starting processes

SCRIPT = """
    import logging, os, sys, warnings
    warnings.simplefilter("ignore")
    import torch
    torch.set_num_threads(1)
    import lightning_elixir
    from lightning_elixir._lightning import Trainer
    from tests.strategy.models import Net, make_data

    class FailingNet(Net):
        def training_step(self, batch, batch_idx):
            if self.global_rank == {failing_rank} and batch_idx == 2:
                raise ValueError("stopped")
            return super().training_step(batch, batch_idx)

    def main():
        print("process", os.getpid(), flush=True)
        trainer = Trainer(strategy={strategy}, accelerator="cpu", devices=2, max_epochs=1, logger=False,
                          enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        model = {model}()
        trainer.fit(model, make_data())
        state = trainer.strategy.lightning_module_state_dict() if {collective} else model.state_dict()
        is_trained = bool(state) and not torch.equal(state["layers.4.bias"], Net().layers[4].bias)
        done = ("done", trainer.global_rank, trainer.world_size, len(state), is_trained)
        sys.stdout.write(" ".join(map(str, done)) + "\\n")  # at once, or the lines of two ranks are mixed
        sys.stdout.flush()

    if __name__ == "__main__":
        main()
"""


def _launch(tmp_path: Path, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    fields = {"strategy": '"elixir"', "collective": True, "model": "Net", "failing_rank": -1} | options
    script.write_text(textwrap.dedent(SCRIPT.format(**fields)))
    environment = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "WORLD_SIZE", "RANK", "MASTER_PORT")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(
        [*command, str(script)], env=environment, capture_output=True, text=True, timeout=200, cwd=tmp_path
    )


def _run(tmp_path: Path, command: list[str], **options: Any) -> list[str]:
    done = _launch(tmp_path, command, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return sorted(line for line in done.stdout.splitlines() if line.startswith("done"))


@pytest.mark.full
@pytest.mark.parametrize("failing_rank", [0, 1])
def test_an_error_on_one_rank_leaves_no_process_behind(tmp_path: Path, failing_rank: int) -> None:
    done = _launch(tmp_path, [sys.executable], model="FailingNet", failing_rank=failing_rank)
    assert done.returncode != 0
    assert "stopped" in done.stderr
    deadline = time.monotonic() + 30
    processes = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("process")]
    assert len(processes) == 2
    while any(_is_running(p) for p in processes) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not any(_is_running(p) for p in processes)


def _is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.full
def test_script_is_started_once_a_device(tmp_path: Path) -> None:
    assert _run(tmp_path, [sys.executable]) == ["done 0 2 26 True", "done 1 2 0 False"]


@pytest.mark.full
def test_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    assert _run(tmp_path, command) == ["done 0 2 26 True", "done 1 2 0 False"]


@pytest.mark.full
def test_spawned_processes_bring_the_weights_back(tmp_path: Path) -> None:
    strategy = 'lightning_elixir.ElixirStrategy(start_method="spawn")'
    assert _run(tmp_path, [sys.executable], strategy=strategy, collective=False) == ["done 0 2 26 True"]


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


def _timeouts() -> list[timedelta]:
    strategy = ElixirStrategy(timeout=timedelta(seconds=77))
    make_trainer(strategy, devices=2).validate(Net(), make_data(8), verbose=False)
    groups = [strategy._comm, strategy._engine.engine.comm]
    return [g._control._get_backend(torch.device("cpu")).options._timeout for g in groups]  # type: ignore[attr-defined]


def test_timeout_holds_for_the_engines_messages_too() -> None:
    assert run_ranks(_timeouts, 2, init_group=False) == [[timedelta(seconds=77)] * 2] * 2


def _gradients_planned_and_held(reduce_dtype: str) -> tuple[int, int]:
    """Run by each of two ranks."""
    held: list[int] = []

    class Looking(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
            held.append(trainer.strategy.stats().held_bytes["cpu_grad"])

    strategy = ElixirStrategy(placement_policy="cpu", reduce_dtype=reduce_dtype)
    trainer = make_trainer(strategy, max_steps=2, devices=2, precision="bf16-mixed", callbacks=[Looking()])
    trainer.fit(Net(), make_data())
    return int(strategy.plan.notes["host_grad_bytes"]), held[-1]


def test_gradients_of_a_wider_reduction_are_planned_with() -> None:
    for planned, held in run_ranks(_gradients_planned_and_held, 2, "float32", init_group=False):
        assert planned == held

"""Sizes of parallel patterns that are "auto": what is chosen, and training with it beside the plain Trainer."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_elixir import ElixirStrategy, HybridAdam, fabric
from lightning_elixir._lightning import Fabric
from lightning_elixir.cli import main
from lightning_elixir.errors import PlanError
from lightning_elixir.patterns import Column
from lightning_elixir.plan.hardware import BandwidthCurve, HardwareSpec, save_hardware
from lightning_elixir.plan.mesh import Mesh
from lightning_elixir.plan.weighing import weighing_lines
from lightning_elixir.strategy.engine_handle import EngineHandle
from tests.helpers.dist import RankError, run_ranks
from tests.helpers.pattern_fits import SMALL, Model, Tokens, fit_plain, make, trainer_of
from tests.helpers.patterns import EXPERT, difference
from tests.helpers.releases import need_experts_in_one_module
from tests.helpers.tiers import full, telling

CLOSE = 1e-5
OPEN = {"tensor_parallel_size": "auto", "expert_parallel_size": "auto"}
SLOW, FAST = 1e6, 1e12  # bytes a second, between ranks


class Listener(logging.Handler):
    """What is logged, of this level and above."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


def machine(bytes_per_s: float, world: int) -> HardwareSpec:
    links = BandwidthCurve.constant(bytes_per_s, 1e-7)
    return replace(HardwareSpec.nominal(), all_gather=links, reduce_scatter=links, world_size=world)


class WithData(Model):
    """Whose sampler is one of its own, as it has to be with `use_distributed_sampler=False`."""

    def train_dataloader(self) -> Any:
        sampler = DistributedSampler(Tokens(), shuffle=False, **self.trainer.distributed_sampler_kwargs)
        return DataLoader(Tokens(), batch_size=2, sampler=sampler)


def fit(kind: str, bytes_per_s: float, options: dict[str, Any], nodes: int = 1) -> Any:
    """What every rank returns: the sizes, why, the whole state, and how many replicas were evicted."""
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    spec, per_node = machine(bytes_per_s, world), world // nodes
    if nodes > 1:
        os.environ.pop("NODE_RANK", None)
        os.environ.update(LOCAL_RANK=str(rank % per_node), LOCAL_WORLD_SIZE=str(per_node))
        os.environ.update(GROUP_RANK=str(rank // per_node), TORCHELASTIC_RUN_ID="a test")
        near = BandwidthCurve.constant(FAST, 1e-7)
        spec = replace(spec, num_nodes=nodes, node_all_gather=near, node_reduce_scatter=near)
    strategy = ElixirStrategy(hardware=spec, **{**OPEN, **options})
    trainer_of(strategy, per_node, num_nodes=nodes, gradient_clip_val=1.0).fit(WithData(kind))
    state = {k: v.clone() for k, v in strategy.lightning_module_state_dict().items()}
    return strategy.plan.mesh, weighing_lines(strategy.plan), state, strategy.stats().evictions


def advised(
    bytes_per_s: float, folder: Path, capsys: pytest.CaptureFixture[str], is_fused: bool
) -> tuple[str, list[str]]:
    """What the command says of the same model on the same machine: what to take, and its table."""
    save_hardware(machine(bytes_per_s, 2), folder / "machine.json")
    shape = [f"{name}={size}" for name, size in SMALL.items() if size is not None]
    shape += ["moe_intermediate_size=32", "num_experts=8", "num_experts_per_tok=2"]
    model = ["plan", "--model", "qwen3_moe", "--set", *shape, "--batch-size", "2", "--seq-len", "8"]
    given = ["--hardware", str(folder / "machine.json"), "--gpus", "2", "--gpu-memory", "1GiB", "--cpu-memory", "4GiB"]
    given += ["--use-fused-kernels"] if is_fused else []
    assert main([*model, *given, "--precision", "32-true", "--patterns"]) == 0
    lines = capsys.readouterr().out.splitlines()
    return lines[-1].removeprefix("Take ").rstrip("."), lines[2:5]


@pytest.mark.parametrize(
    ("bytes_per_s", "mesh", "is_fused"),
    [
        pytest.param(SLOW, Mesh(2, expert=2), False, id="slow", marks=pytest.mark.full),
        pytest.param(FAST, Mesh(2), False, id="fast", marks=pytest.mark.full),
        pytest.param(SLOW, Mesh(2, expert=2), True, id="slow_with_fused_operators", marks=pytest.mark.full),
    ],
)
def test_links_decide_as_the_command_says(
    bytes_per_s: float, mesh: Mesh, is_fused: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    need_experts_in_one_module()
    options = {"report_dir": "report", "use_fused_kernels": is_fused}
    found = run_ranks(fit, 2, "qwen3_moe", bytes_per_s, options, init_group=False)
    assert [one[0] for one in found] == [mesh, mesh]
    assert found[0][1] == found[1][1]
    why, *ways = found[0][1]
    advice, table = advised(bytes_per_s, tmp_path, capsys, is_fused)
    assert why.partition(":")[0] == advice.partition(":")[0]
    if bytes_per_s == SLOW:  # the memory of a GPU, which the command knows of, decides the last digit elsewhere
        seconds = [row.split(" | ")[1:4] for row in table]
        assert [way.split(": ", 1)[1].split(";")[0] for way in ways] == [
            f"step {step}, {part} of it for exchanges, {batch} for a micro-batch" for step, part, batch in seconds
        ]
    assert f"<b>Parallel patterns: </b>{why}" in Path("report/report.html").read_text(encoding="utf-8")
    assert [way.partition(":")[0] for way in ways] == ["sharding alone", "tensor 2", "expert 2"]
    assert [way.endswith("chosen") for way in ways] == [mesh.expert == 1, False, mesh.expert == 2]
    assert difference(found[0][2], fit_plain("qwen3_moe", 2)) < CLOSE


SHORT = {
    "experts": ("qwen3_moe", 2, "200KiB", Mesh(2, expert=2)),
    "layers": ("llama", 2, "32KiB", Mesh(2, tensor=2)),
    "chunks-alone": ("llama+checkpointed", 2, "39KiB", Mesh(2, tensor=2)),  # nothing fits beside a foreseen step
    "experts-of-four": ("qwen3_moe", 4, "100KiB", Mesh(4, expert=4)),
}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")  # the name that all versions have
@pytest.mark.parametrize("case", telling(SHORT, "chunks-alone"))
def test_little_memory_decides(case: str) -> None:
    kind, world, limit, mesh = SHORT[case]
    if mesh.expert > 1:
        need_experts_in_one_module()
    options = {"gpu_memory_limit": limit, "report_dir": "report"}
    found = run_ranks(fit, world, kind, FAST, options, init_group=False)
    assert [one[0] for one in found] == [mesh] * world
    assert found[0][3] > 0
    facts = json.loads(Path("report/report.json").read_text(encoding="utf-8"))["facts"]
    assert facts["samples in a step"] == str(2 * mesh.num_batches)
    assert difference(found[0][2], fit_plain(kind, mesh.num_batches)) < CLOSE


@pytest.mark.full
def test_nodes_with_slow_links_between_them_have_a_copy_each() -> None:
    options = {"sharding": "auto", "expert_parallel_size": 1}
    found = run_ranks(fit, 4, "llama", SLOW, options, 2, init_group=False)
    assert {one[0] for one in found} == {Mesh(4, copies=2)}
    why, *ways = found[0][1]
    assert why.startswith("sharding alone, in 2 copies:")
    assert "sharded over 2 ranks, in 2 copies; sharded over all 4 ranks: the step is" in ways[0]
    assert difference(found[0][2], fit_plain("llama", 4)) < CLOSE


class Noticing(Model):
    """Counts what a look at its step, before training, must not leave behind."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.asked: list[str] = []

    def train_dataloader(self) -> Any:
        self.asked.append("loader")
        return DataLoader(Tokens(), batch_size=2, shuffle=True)

    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        self.asked.append("batch")
        return batch


def several_runs() -> Any:
    """Evaluation, two fits, and one by a given plan: sizes, engines, and what the model noticed."""
    world, environment = int(os.environ["WORLD_SIZE"]), dict(os.environ)
    model, found, engines = Noticing("qwen3_moe"), [], []
    options: dict[str, Any] = {**OPEN, "hardware": machine(SLOW, world)}
    for run in ("validate", "fit", "fit", "fit by the plan"):
        os.environ.update(environment)
        strategy = ElixirStrategy(**options)
        trainer = trainer_of(strategy, world, limit_train_batches=1)
        if run == "validate":
            trainer.validate(model, DataLoader(Tokens(), batch_size=2), verbose=False)
            model.asked.clear()
        else:
            trainer.fit(model)
        found.append(strategy.plan.mesh)
        engines.append(EngineHandle.of(model))
        if run == "fit":
            options["plan"] = strategy.plan if len(engines) == 3 else None
    return found, [engine is engines[1] for engine in engines], model.asked


def test_what_was_chosen_stays() -> None:
    need_experts_in_one_module()
    meshes, are_kept, asked = run_ranks(several_runs, 2, init_group=False)[0]
    assert meshes == [Mesh(2), *[Mesh(2, expert=2)] * 3]
    assert are_kept == [False, True, True, False]
    assert asked == ["loader", "batch", "batch"] * 3  # two epochs each; nothing of what was asked before


def fit_an_epoch(bytes_per_s: float, state_dict_type: Any, load: str | None, save: str | None) -> Any:
    """As a process of its own, which knows of no earlier choice: the sizes, what is logged of them, the whole model."""
    world, heard, log = int(os.environ["WORLD_SIZE"]), Listener(logging.INFO), logging.getLogger("lightning_elixir")
    level = log.level
    log.addHandler(heard)
    log.setLevel(logging.INFO)
    strategy = ElixirStrategy(**OPEN, hardware=machine(bytes_per_s, world), state_dict_type=state_dict_type)
    trainer, model = trainer_of(strategy, world, gradient_clip_val=1.0), WithData("qwen3_moe")
    trainer.fit_loop.max_epochs = 1 if load is None else 2
    trainer.fit(model, ckpt_path=load)
    log.removeHandler(heard)
    log.setLevel(level)
    if save is not None:
        trainer.save_checkpoint(save)
    handle = EngineHandle.of(model)
    assert handle is not None
    state = {name: value.clone() for name, value in handle.engine.full_state_dict().items()}
    return strategy.plan.mesh, [line for line in heard.told if line.startswith("sizes of parallel")], state


@pytest.mark.parametrize(
    ("links", "state_dict_type"),
    [
        ((SLOW, FAST), "sharded"),
        full((FAST, SLOW), "sharded"),
        full((SLOW, FAST), "full"),
        full((FAST, SLOW), "full"),
    ],
    ids=["to-one", "to-two", "to-one-in-one-file", "to-two-in-one-file"],
)
def test_what_is_resumed_elsewhere_may_have_other_sizes(
    links: tuple[float, float], state_dict_type: str, tmp_path: Path
) -> None:
    need_experts_in_one_module()
    path, found = str(tmp_path / "saved"), []
    for speed, load, save in zip(links, (None, path), (path, None), strict=True):
        found.append(run_ranks(fit_an_epoch, 2, speed, state_dict_type, load, save, init_group=False)[0])
    assert [mesh for mesh, _, _ in found] == [Mesh(2, expert=2 if speed == SLOW else 1) for speed in links]
    assert [len(told) for _, told, _ in found] == [1, 1]
    for (told,), speed in zip([told for _, told, _ in found], links, strict=True):
        assert ("patterns: expert 2: " in told) is (speed == SLOW)
    assert difference(found[1][2], fit_plain("qwen3_moe", 2)) < CLOSE  # moments are those of the first epoch


class Streamed(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(Tokens()[index] for index in range(8))


class PassedOn(Tokens):
    """Each sample is the next of an iterator, whatever its number."""

    def __init__(self) -> None:
        self.numbers = iter(range(8))

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(next(self.numbers))


class StepsItself(Model):
    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        optimizer.step()


def fit_unforeseen(kind: str, limit: str) -> Any:
    world = int(os.environ["WORLD_SIZE"])
    strategy = ElixirStrategy(hardware=machine(SLOW, world), gpu_memory_limit=limit, **OPEN)
    data = {"stream": Streamed, "iterator": PassedOn, "manual": Tokens}[kind]()
    model = (StepsItself if kind == "manual" else Model)("qwen3_moe")
    trainer_of(strategy, world, max_steps=1).fit(model, DataLoader(data, batch_size=2))
    left = next(data.numbers) if isinstance(data, PassedOn) else None
    return strategy.plan.mesh, weighing_lines(strategy.plan), left


UNFORESEEN = {
    "stream": ("1GiB", Mesh(2), "only a DataLoader over a dataset with indices"),
    "iterator": ("200KiB", Mesh(2, expert=2), "what gives batches may use up an iterator (range_iterator)"),
    "manual": ("1GiB", Mesh(2), "under manual optimization training_step uses the optimizers"),
}


@pytest.mark.parametrize("kind", telling(UNFORESEEN, "stream", "iterator"))
def test_without_a_step_to_weigh_by_the_first_that_fits_is_taken(kind: str) -> None:
    need_experts_in_one_module()
    limit, mesh, reason = UNFORESEEN[kind]
    for found, (why, *_), left in run_ranks(fit_unforeseen, 2, kind, limit, init_group=False):
        assert found == mesh
        assert f"a step could not be foreseen ({reason}" in why
        assert left in (None, 2)  # one batch, and nothing of what was asked before


def fit_language() -> Any:
    heard = Listener(logging.WARNING)
    logging.getLogger("lightning_elixir").addHandler(heard)
    mesh, lines, _, _ = fit("language", SLOW, {})
    logging.getLogger("lightning_elixir").removeHandler(heard)
    return mesh, lines, heard.told


def test_models_without_patterns_are_told_of_once() -> None:
    first, second = run_ranks(fit_language, 2, init_group=False)
    assert first[:2] == second[:2] == (Mesh(2), first[1])
    assert len(first[1]) == 1
    assert "nothing else is possible (tensor_parallel_size=2, but no patterns say what to cut" in first[1][0]
    assert [told for told in first[2] if "sizes of parallel patterns" in told] == [
        f"sizes of parallel patterns: {first[1][0]}"
    ]
    assert second[2] == []


def language_step(net: Any, inp: Any) -> None:
    net(**inp).loss.backward()


def failing_step(net: Any, inp: Any) -> None:
    raise ValueError("no such step")


def set_up_with_fabric(bytes_per_s: float, limit: str, step: Any) -> Any:
    world = int(os.environ["WORLD_SIZE"])
    options: dict[str, Any] = {**OPEN, "hardware": machine(bytes_per_s, world), "gpu_memory_limit": limit}
    if step is not None:
        tokens = torch.zeros(2, 8, dtype=torch.long)
        options |= {"step_fn": step, "inp": {"input_ids": tokens, "labels": tokens}}
    run = Fabric(accelerator="cpu", devices=world, strategy=fabric.ElixirStrategy(**options))
    run.launch()
    with pytest.raises(PlanError, match="setup.. before setup_dataloaders"):
        run.setup_dataloaders(DataLoader(Tokens(), batch_size=2))
    net = make("qwen3_moe")
    net, optimizer = run.setup(net, HybridAdam(net.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.05))
    loader = run.setup_dataloaders(DataLoader(Tokens(), batch_size=2), use_distributed_sampler=True)
    for batch in [*loader, *loader]:
        optimizer.zero_grad()
        run.backward(net(input_ids=batch, labels=batch).loss)
        run.clip_gradients(net, optimizer, max_norm=1.0)
        optimizer.step()
    state = run.strategy.get_module_state_dict(net)
    return run.strategy.plan.mesh, weighing_lines(run.strategy.plan), {f"net.{name}": t for name, t in state.items()}


OF_FABRIC: dict[str, tuple[float, str, Any, Mesh, str]] = {
    "given": (SLOW, "1GiB", language_step, Mesh(2, expert=2), "expert 2: "),
    "failing": (SLOW, "1GiB", failing_step, Mesh(2), "no such step"),
    "none": (SLOW, "1GiB", None, Mesh(2), "under Fabric the training step is a loop of the user's"),
    "none-and-little-memory": (FAST, "200KiB", None, Mesh(2, expert=2), "loop of the user's"),
}


@pytest.mark.parametrize("case", telling(OF_FABRIC, "given"))
def test_under_fabric_a_given_step_decides_or_the_first_that_fits(case: str) -> None:
    need_experts_in_one_module()
    bytes_per_s, limit, step, mesh, reason = OF_FABRIC[case]
    results = run_ranks(set_up_with_fabric, 2, bytes_per_s, limit, step, init_group=False)
    for found, (why, *ways), _ in results:
        assert found == mesh
        assert reason in why
        assert (" of it for exchanges" in ways[-1]) is (step is language_step)
    assert difference(results[0][2], fit_plain("qwen3_moe", 2)) < CLOSE


def fit_cut_by_torch() -> None:
    fit("untied_llama+dtensors", SLOW, {})


def test_a_device_mesh_needs_a_size() -> None:
    with pytest.raises(RankError, match="device_mesh is used while tensor_parallel_size='auto' is still to be chosen"):
        run_ranks(fit_cut_by_torch, 2, init_group=False)


def test_one_device_leaves_nothing_to_choose() -> None:
    strategy = ElixirStrategy(**OPEN, patterns={"*.up": Column(), **EXPERT})
    trainer_of(strategy, 1, max_steps=1).fit(Model("mixture"), DataLoader(Tokens(), batch_size=2))
    assert strategy.plan.mesh == Mesh()
    assert weighing_lines(strategy.plan) == ()

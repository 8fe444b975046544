"""Models that `parallelize_module` has cut in `configure_model`, and the plain Trainer on one process."""

from __future__ import annotations

import gc
import itertools
import os
import time
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler

from lightning_elixir import ElixirStrategy, HybridAdam
from lightning_elixir._lightning import LightningModule
from lightning_elixir.core.meeting_group import MeetingGroup
from lightning_elixir.errors import PeerLostError, PlanError
from lightning_elixir.fused import swapping
from lightning_elixir.patterns import Column, Expert
from lightning_elixir.plan.mesh import Mesh
from lightning_elixir.strategy.engine_handle import EngineHandle
from tests.helpers.dist import run_ranks
from tests.helpers.pattern_fits import TIGHT, Model, Tokens, cut_by_torch, fit, fit_plain, trainer_of
from tests.helpers.patterns import STEPS, Case, batch, difference, new_optimizer, train_plain
from tests.helpers.tiers import crossed, full, telling

CLOSE = 1e-5
DENSE = Case(tensor=2, options={"is_mixture": False})

KINDS = ["untied_llama", "language", "language+checkpointed", "untied_llama+checkpointed"]


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")  # the name that all versions have
@pytest.mark.parametrize(
    ("kind", "world"),
    telling([pytest.param(k, w, id=f"{k}-{w}") for k in KINDS for w in (2, 4)], "language+checkpointed-2"),
)
def test_equals_plain_training(kind: str, world: int) -> None:
    kind = kind.replace("+", "+dtensors-") if "+" in kind else f"{kind}+dtensors"
    short = {"limit_train_batches": 2}
    expected = fit_plain(kind, world // 2, **short)
    # What is recomputed of a layer is there at once, so chunks are smaller for any of them to go.
    options = {"chunk_size": 4500} if "checkpointed" in kind else {}
    found, evictions = run_ranks(fit, world, kind, 2, 1, options, short, init_group=False)[0]
    assert evictions > 0
    assert difference(found, expected) < CLOSE


@pytest.mark.full
@pytest.mark.parametrize("world", [1, full(2)])
def test_tensor_parallel_size_of_one(world: int) -> None:
    expected = fit_plain("language", world)
    found, evictions = run_ranks(fit, world, "language+dtensors", 1, 1, {}, {}, init_group=False)[0]
    assert evictions > 0
    assert difference(found, expected) < CLOSE


def fit_fused(kind: str, options: dict[str, Any]) -> Any:
    """As `fit`, and what was swapped."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        counts: list[set[str]] = []
        monkeypatch.setattr(
            swapping, "_tell", lambda swapped, *_, **__: counts.append({op for op, _ in swapped.counts})
        )
        return (*fit(f"{kind}+dtensors", 2, 1, {"use_fused_kernels": True}, options), counts[0])


@pytest.mark.parametrize(
    ("kind", "operators"),
    telling(
        [
            pytest.param("untied_llama", {"RMS norm", "gated product"}, id="llama"),
            pytest.param("gated", {"gated product"}, id="norms_in_parts"),
        ],
        "norms_in_parts",
    ),
)
def test_operators_are_fused_where_no_operand_is_a_dtensor(kind: str, operators: set[str]) -> None:
    short = {"limit_train_batches": 2}
    expected = fit_plain(kind, 1, **short)
    found, evictions, swapped = run_ranks(fit_fused, 2, kind, short, init_group=False)[0]
    assert swapped == operators
    assert evictions > 0
    assert difference(found, expected) < CLOSE


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "auto_in_little_memory": ({"placement_policy": "auto", "gpu_memory_limit": "100KiB"}, {}),
    "resident": ({"placement_policy": "cuda"}, {}),
    "accumulated": ({}, {"accumulate_grad_batches": 2}),
    "states_on_nvme": ({"nvme_offload_fraction": 0.5, "nvme_offload_dir": "states"}, {}),
}


@pytest.mark.full
@crossed(kind=["language", "untied_llama"], way=WAYS, together=1)
def test_under_options(kind: str, way: str) -> None:
    options, of_trainer = WAYS[way]
    expected = fit_plain(kind, 1, **of_trainer)
    found, evictions = run_ranks(fit, 2, f"{kind}+dtensors", 2, 1, options, of_trainer, init_group=False)[0]
    assert evictions > 0 or way == "resident"
    assert difference(found, expected) < CLOSE


@pytest.mark.full
def test_a_frozen_embedding_where_placements_are_searched() -> None:
    """Torch keeps the mask of an embedding that is cut from one operator to the next: one of a dry run, which had
    broken off in between, was there in the first step."""
    expected = fit_plain("frozen_untied_llama", 1)
    options = {"placement_policy": "auto", "gpu_memory_limit": "80KiB"}
    found, evictions = run_ranks(fit, 2, "frozen_untied_llama+dtensors", 2, 1, options, {}, init_group=False)[0]
    assert evictions > 0
    assert difference(found, expected) < CLOSE


@pytest.mark.full
def test_beside_a_pattern_along_the_other_axis() -> None:
    """`parallelize_module` cuts the attention, and a pattern spreads the experts."""
    expected = fit_plain("mixture", 2)
    options = {"patterns": {"*.experts": Expert()}}
    found, evictions = run_ranks(fit, 4, "mixture+dtensors", 2, 2, options, {}, init_group=False)[0]
    assert evictions > 0
    assert difference(found, expected) < CLOSE


# Checkpoints, and further runs


def fit_and_go_on(state_dict_type: str, folder: str) -> Any:
    """Two epochs; a validation in between, and a new Trainer that goes on from the file, over the same module."""
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    sampler = DistributedSampler(Tokens(), num_replicas=world // 2, rank=rank // 2, shuffle=False)
    data = DataLoader(Tokens(), batch_size=2, sampler=sampler)
    first = Model("language+dtensors")
    strategy = ElixirStrategy(tensor_parallel_size=2, state_dict_type=state_dict_type, **TIGHT)
    trainer = trainer_of(strategy, world, gradient_clip_val=1.0)
    trainer.fit_loop.max_epochs = 1
    trainer.fit(first, data)
    trainer.validate(first, data, verbose=False)
    trainer.save_checkpoint(folder)
    os.environ.update(WORLD_SIZE=str(world), RANK=str(rank), LOCAL_RANK=str(rank))
    again = Model("language+dtensors")
    strategy = ElixirStrategy(tensor_parallel_size=2, **{**TIGHT, "chunk_size": 7000})
    trainer_of(strategy, world, gradient_clip_val=1.0).fit(again, data, ckpt_path=folder)
    return {k: v.clone() for k, v in strategy.lightning_module_state_dict().items()}


@pytest.mark.parametrize("state_dict_type", [full("full"), full("sharded")])
def test_goes_on_from_a_checkpoint(state_dict_type: str, tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    expected = fit_plain("language", 2)
    found = run_ranks(fit_and_go_on, 4, state_dict_type, path, init_group=False)[0]
    assert difference(found, expected) < CLOSE
    if state_dict_type == "full":  # plain PyTorch loads it
        saved = torch.load(path, weights_only=False)["state_dict"]
        plain = Model("language")
        plain.configure_model()
        plain.load_state_dict(saved)


# Fabric


def by_fabric(how: str, path: str) -> str:
    fabric_module = pytest.importorskip("lightning.fabric")
    from lightning_elixir.fabric import ElixirStrategy as FabricStrategy

    def cut(net: Any, mesh: Any) -> Any:
        cut_by_torch(net, mesh["tensor_parallel"])
        return net

    options = {"parallelize_fn": cut} if how.startswith("function") else {}
    strategy = FabricStrategy(placement_policy="cpu", chunk_size=6000, tensor_parallel_size=2, **options)
    fabric = fabric_module.Fabric(strategy=strategy, accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]))
    fabric.launch()
    with fabric.init_module() if how.endswith("init_module") else nullcontext():
        made = DENSE.make()
    try:
        if how.startswith("mesh"):
            cut(made, fabric.strategy.device_mesh)
    except PlanError as error:
        return str(error)
    model, optimizer = fabric.setup(made, new_optimizer(made.parameters()))
    for step in range(STEPS):
        fabric.backward(model(batch(step, fabric.global_rank // 2)))
        optimizer.step()
        optimizer.zero_grad()
    fabric.save(path, {"model": model})
    return ""


@pytest.mark.parametrize(
    "how", telling(["function", "function_init_module", "mesh", "mesh_init_module"], "mesh_init_module")
)
def test_under_fabric(how: str, tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    told = run_ranks(by_fabric, 4, how, path, init_group=False)
    if how == "mesh_init_module":
        assert all("parallelize_fn" in text for text in told)
        return
    assert difference(torch.load(path, weights_only=False)["model"], train_plain(DENSE, 2)[2]) < CLOSE


# Several models in one process


class Chain(LightningModule):
    """Pairs of layers, cut by `parallelize_module` between two ranks that have half of the samples each."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(12))

    def cut(self, mesh: Any) -> None:
        styles = ColwiseParallel(input_layouts=Shard(0)), RowwiseParallel(output_layouts=Shard(0))
        parallelize_module(self, mesh, {f"layers.{i}": styles[i % 2] for i in range(12)})

    def configure_model(self) -> None:
        if not EngineHandle.of(self):
            self.cut(self.device_mesh["tensor_parallel"])

    def forward(self, x: Tensor, skipped: tuple[int, ...] = ()) -> Tensor:
        for i, (up, down) in enumerate(zip(self.layers[::2], self.layers[1::2], strict=True)):
            if i not in skipped:
                x = x + down(up(x).relu())
        return x.square().sum()

    def training_step(self, x: Tensor, index: int) -> Tensor:
        return self(x.chunk(2)[self.device_mesh["tensor_parallel"].get_local_rank()])

    def configure_optimizers(self) -> Any:
        return HybridAdam(self.parameters())


def fit_one_after_the_other() -> list[tuple[int, int]]:
    """Of each fit, how many collectives of DTensors went through its engine, and how many past it."""
    met: dict[bool, int] = {True: 0, False: 0}
    run, world, rank = MeetingGroup._run, int(os.environ["WORLD_SIZE"]), os.environ["RANK"]

    def counted(self: MeetingGroup, *args: Any) -> Any:
        met[self.is_bound] += 1
        return run(self, *args)

    found = []
    try:
        for _ in range(2):
            os.environ.update(WORLD_SIZE=str(world), RANK=rank, LOCAL_RANK=rank)
            model, data = Chain(), DataLoader(torch.randn(16, 16), batch_size=4)
            strategy = ElixirStrategy(tensor_parallel_size=2, placement_policy="cpu", chunk_size="1KiB")
            model.on_train_start = lambda: setattr(MeetingGroup, "_run", counted)  # type: ignore[method-assign]
            model.on_train_end = lambda: setattr(MeetingGroup, "_run", run)  # type: ignore[method-assign]
            trainer_of(strategy, world).fit(model, data)
            found.append((met[True], met[False]))
            met.update({True: 0, False: 0})
    finally:
        MeetingGroup._run = run  # type: ignore[method-assign]
    return found


@pytest.mark.full
def test_collectives_of_a_second_model_go_through_its_own_engine() -> None:
    for (first, past), again in run_ranks(fit_one_after_the_other, 2, init_group=False):
        assert first > 0
        assert past == 0
        assert again == (first, 0)


class Branching(Chain):
    """Looks at the mesh in the middle of a step, to which ranks come at different times."""

    def training_step(self, x: Tensor, index: int) -> Tensor:
        for i, (up, down) in enumerate(zip(self.layers[::2], self.layers[1::2], strict=True)):
            if i == 1 and self.global_rank // 2 == 1:
                continue
            size = self.device_mesh["tensor_parallel"].size()
            x = x + down(up(x).relu()) / size
        return x.square().mean()


def fit_again() -> list[int]:
    world, rank, model, meshes = int(os.environ["WORLD_SIZE"]), os.environ["RANK"], Branching(), []
    for _ in range(2):
        os.environ.update(WORLD_SIZE=str(world), RANK=rank, LOCAL_RANK=rank)
        strategy = ElixirStrategy(tensor_parallel_size=2, placement_policy="cpu", chunk_size="1KiB")
        trainer_of(strategy, world).fit(model, DataLoader(torch.randn(16, 16), batch_size=2))
        assert strategy.device_mesh is model.device_mesh
        meshes.append(id(model.device_mesh))
    return meshes


@pytest.mark.full
def test_a_model_keeps_its_mesh_in_a_further_run() -> None:
    for first, second in run_ranks(fit_again, 4, init_group=False):
        assert first == second


def fit_and_forget() -> bool:
    model = Chain()
    strategy = ElixirStrategy(tensor_parallel_size=2, placement_policy="cpu", chunk_size="1KiB")
    trainer_of(strategy, int(os.environ["WORLD_SIZE"])).fit(model, DataLoader(torch.randn(16, 16), batch_size=4))
    of_model, of_strategy = weakref.ref(model), weakref.ref(strategy)
    del model, strategy
    gc.collect()
    return of_model() is None and of_strategy() is None


@pytest.mark.full
def test_a_model_goes_when_nothing_uses_it() -> None:
    """Torch keeps groups for ever, and these know the engine."""
    assert all(run_ranks(fit_and_forget, 2, init_group=False))


def fit_alone() -> tuple[list[bool], list[Tensor]]:
    """On one device: whether there is a process group, in runs and after them, and what the model computes."""
    model, x, is_there, results = Chain(), torch.randn(2, 16), [], []
    model.on_train_end = lambda: is_there.append(dist.is_initialized())  # type: ignore[method-assign]
    for policy in ("cpu", "cpu", "cuda"):
        strategy = ElixirStrategy(placement_policy=policy, chunk_size="1KiB")
        trainer_of(strategy, 1, max_steps=1).fit(model, DataLoader(torch.randn(16, 16), batch_size=2))
        is_there.append(dist.is_initialized())
        results.append(model(x).detach().clone())
    strategy.close()
    return is_there, results


def fabric_alone() -> tuple[bool, bool]:
    fabric_module = pytest.importorskip("lightning.fabric")
    from lightning_elixir.fabric import ElixirStrategy as FabricStrategy

    def cut(net: Chain, mesh: Any) -> Chain:
        net.cut(mesh["tensor_parallel"])
        return net

    run = fabric_module.Fabric(strategy=FabricStrategy(parallelize_fn=cut), accelerator="cpu", devices=1)
    run.launch()
    net = Chain()
    run.setup(net, HybridAdam(net.parameters(), lr=1e-3))
    is_there = dist.is_initialized()
    run.strategy.close()
    return is_there, dist.is_initialized()


def test_one_device_has_a_process_group_in_runs_alone() -> None:
    """Which a device mesh needs. What came later in the process took it for one of several."""
    is_there, results = run_ranks(fit_alone, 1, init_group=False)[0]
    assert is_there == [True, False] * 3
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(results))
    assert run_ranks(fabric_alone, 1, init_group=False) == [(True, False)]


SAMPLES = torch.randn(6, 4, 16, generator=torch.Generator().manual_seed(0))
SKIPPED = [((1, 3), ()), ((), (0, 2)), ((4,), (5, 1))]  # step -> batch -> pairs that it leaves out


def two_under_fabric(policy: str) -> list[dict[str, Tensor]]:
    fabric_module = pytest.importorskip("lightning.fabric")
    from lightning_elixir.fabric import ElixirStrategy as FabricStrategy

    def cut(net: Chain, mesh: Any) -> Chain:
        net.cut(mesh["tensor_parallel"])
        return net

    memory = "80KiB" if policy == "cpu" else None
    strategy = FabricStrategy(
        placement_policy=policy,
        chunk_size="1KiB",
        gpu_memory_limit=memory,
        tensor_parallel_size=2,
        parallelize_fn=cut,
    )
    fabric = fabric_module.Fabric(strategy=strategy, accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]))
    fabric.launch()
    number, half = divmod(fabric.global_rank, 2)
    nets = [Chain(seed) for seed in (1, 2)]
    runs = [fabric.setup(net, HybridAdam(net.parameters(), lr=1e-3, eps=1e-3)) for net in nets]
    for step in range(3):
        for model, optimizer in runs:
            fabric.backward(model(SAMPLES[2 * step + number].chunk(2)[half], SKIPPED[step][number]))
            optimizer.step()
            optimizer.zero_grad()
    return [{name: value.clone() for name, value in model.state_dict().items()} for model, _ in runs]


@pytest.mark.full
@pytest.mark.parametrize("policy", ["cpu", "cuda"])
def test_two_models_whose_ranks_branch(policy: str) -> None:
    found = run_ranks(two_under_fabric, 4, policy, init_group=False)[0]
    for seed, state in zip((1, 2), found, strict=True):
        net = Chain(seed)
        optimizer = HybridAdam(net.parameters(), lr=1e-3, eps=1e-3)
        for step in range(3):
            loss = sum(net(SAMPLES[2 * step + number], SKIPPED[step][number]) for number in (0, 1)) / 2
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert difference(state, dict(net.state_dict())) < CLOSE


def two_over_one_mesh() -> str:
    fabric_module = pytest.importorskip("lightning.fabric")
    from lightning_elixir.fabric import ElixirStrategy as FabricStrategy

    strategy = FabricStrategy(placement_policy="cpu", tensor_parallel_size=2)
    fabric = fabric_module.Fabric(strategy=strategy, accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]))
    fabric.launch()
    nets = [Chain(seed) for seed in (1, 2)]
    for net in nets:
        net.cut(strategy.device_mesh["tensor_parallel"])
    first = fabric.setup(nets[0], HybridAdam(nets[0].parameters()))
    try:
        fabric.setup(nets[1], HybridAdam(nets[1].parameters()))
    except PlanError as error:
        return str(error)
    return str(first)


@pytest.mark.full
def test_two_models_over_one_mesh_are_refused_on_every_rank() -> None:
    assert all("parallelize_fn" in told for told in run_ranks(two_over_one_mesh, 2, init_group=False))


# What is refused


class Refused(LightningModule):
    """A model cut in a way that chunks cannot have."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def configure_model(self) -> None:
        self.up, self.down = nn.Linear(8, 15 if self.how == "uneven" else 16), nn.Linear(16, 8)
        mesh = self.device_mesh
        assert mesh["data_parallel"].size() == 1
        if self.how == "own_mesh":
            parallelize_module(self.up, init_device_mesh("cpu", (2,)), ColwiseParallel())
        elif self.how == "fully_shard":
            fully_shard(self.up, mesh=mesh["data_parallel"])
        else:
            parallelize_module(self.up, mesh["tensor_parallel"], ColwiseParallel())

    def training_step(self, x: Tensor, index: int) -> Tensor:
        return self.down(self.up(x)).square().mean()

    def configure_optimizers(self) -> Any:
        return HybridAdam(self.parameters())


REFUSED: dict[str, tuple[str, dict[str | type, Any] | None]] = {
    "own_mesh": ("is a DTensor over a mesh of its own", None),
    "fully_shard": ("without fully_shard", None),
    "uneven": ("parts that are not equal", None),
    "pattern": ("has a pattern as well", {"up": Column()}),
}


def refused(how: str, patterns: Any) -> str:
    strategy = ElixirStrategy(tensor_parallel_size=2, patterns=patterns)
    try:
        trainer_of(strategy, int(os.environ["WORLD_SIZE"])).fit(Refused(how), DataLoader(torch.randn(8, 8)))
    except PlanError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("how", telling(REFUSED, "uneven"))
def test_what_chunks_cannot_have_is_refused_on_every_rank(how: str) -> None:
    text, patterns = REFUSED[how]
    for told in run_ranks(refused, 2, how, patterns, init_group=False):
        assert text in told


def test_processes_that_this_one_starts_are_refused_before_training() -> None:
    strategy = ElixirStrategy(tensor_parallel_size=2, start_method="spawn")
    strategy.parallel_devices, strategy.cluster_environment = [torch.device("cpu")] * 2, LightningEnvironment()
    strategy._configure_launcher()
    with pytest.raises(PlanError, match="runs once more in the process that has started the others"):
        strategy._new_device_mesh(Mesh(2, 2))


# A rank that fails


class Failing(Model):
    def __init__(self, where: str) -> None:
        super().__init__("language+dtensors")
        self.where = where

    def configure_model(self) -> None:
        is_new = self.net is None
        super().configure_model()
        if not is_new:
            return
        layer, rank = self.net.layers[1], int(os.environ["RANK"])

        def fail(*_: Any) -> None:
            if rank == 1:
                raise RuntimeError("a test wants it so")

        if self.where == "forward":
            layer.register_forward_pre_hook(fail)
        else:
            layer.register_full_backward_hook(fail)


def fails(where: str) -> tuple[str, str]:
    world = int(os.environ["WORLD_SIZE"])
    begin = time.monotonic()
    try:
        trainer = trainer_of(ElixirStrategy(tensor_parallel_size=2, **TIGHT), world)
        trainer.fit(Failing(where), DataLoader(Tokens(), batch_size=2))
    except Exception as error:
        assert time.monotonic() - begin < 60
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("where", [full("forward"), full("backward")])
def test_a_rank_that_raises_alone(where: str) -> None:
    told = run_ranks(fails, 4, where, init_group=False, fresh=True)
    assert told[1] == ("RuntimeError", "a test wants it so")
    for rank in (0, 2, 3):
        assert told[rank][0] == PeerLostError.__name__
        assert "a test wants it so" in told[rank][1]


class Looking(Model):
    """Rank 1 looks at a parameter before its turn: it wants a chunk that rank 0 does not, and is one behind then."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if int(os.environ["RANK"]) == 1:
            with torch.no_grad():
                for layer in self.net.layers:
                    layer.feed.up.weight.to_local().sum()
        return super().training_step(batch, index)

    def on_train_end(self) -> None:
        self.num_met = sum(self.trainer.strategy._handle.engine.engine.wire.counts)


def looks() -> Any:
    strategy = ElixirStrategy(tensor_parallel_size=2, **{**TIGHT, "chunk_size": 4000})
    trainer = trainer_of(strategy, int(os.environ["WORLD_SIZE"]), gradient_clip_val=1.0)
    model = Looking("language+dtensors")
    trainer.fit(model, DataLoader(Tokens(), batch_size=2))
    return {k: v.clone() for k, v in strategy.lightning_module_state_dict().items()}, model.num_met


@pytest.mark.full
def test_ranks_that_want_different_chunks_meet_before_collectives_of_torch() -> None:
    (found, first), (_, second) = run_ranks(looks, 2, init_group=False)
    assert first == second > 100
    assert difference(found, fit_plain("language", 1)) < CLOSE


def cut_half(net: nn.Module, mesh: Any, failing: int) -> nn.Module:
    """Cut one layer, and then another, before which one rank raises; with rank + 10 it does so before both."""
    rank = int(os.environ["RANK"])
    if failing == rank + 10:
        raise RuntimeError("a test wants it so")
    parallelize_module(net, mesh["tensor_parallel"], {"0": ColwiseParallel()})
    if failing == rank:
        raise RuntimeError("a test wants it so")
    return parallelize_module(net, mesh["tensor_parallel"], {"1": RowwiseParallel()})


class HalfCut(Refused):
    def __init__(self, failing: int) -> None:
        super().__init__("")
        self.failing = failing

    def configure_model(self) -> None:
        self.net = cut_half(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)), self.device_mesh, self.failing)


def fails_to_build(failing: int, is_fabric: bool) -> tuple[str, str]:
    begin, devices = time.monotonic(), int(os.environ["WORLD_SIZE"])
    try:
        if is_fabric:
            fabric_module = pytest.importorskip("lightning.fabric")
            from lightning_elixir.fabric import ElixirStrategy as FabricStrategy

            strategy = FabricStrategy(
                tensor_parallel_size=2, parallelize_fn=lambda net, mesh: cut_half(net, mesh, failing)
            )
            fabric = fabric_module.Fabric(strategy=strategy, accelerator="cpu", devices=devices)
            fabric.launch()
            fabric.setup_module(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)))
        else:
            trainer = trainer_of(ElixirStrategy(tensor_parallel_size=2), devices)
            trainer.fit(HalfCut(failing), DataLoader(torch.randn(8, 8)))
    except Exception as error:
        assert time.monotonic() - begin < 30
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.full
@pytest.mark.parametrize("is_fabric", [False, True])
@pytest.mark.parametrize("failing", [0, 1, 10, 11])
def test_a_rank_that_cannot_cut_the_model(failing: int, is_fabric: bool) -> None:
    told = run_ranks(fails_to_build, 2, failing, is_fabric, init_group=False, fresh=True, timeout_s=60)
    own, other = failing % 10, 1 - failing % 10
    assert told[own] == ("RuntimeError", "a test wants it so")
    assert told[other] == ("PlanError", f"rank {own} failed: RuntimeError: a test wants it so")

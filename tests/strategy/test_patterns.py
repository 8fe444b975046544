"""`ElixirStrategy` whose ranks share operators, and the plain Trainer on one process with all batches."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler

from lightning_elixir import ElixirStrategy, fabric, pretrained
from lightning_elixir._lightning import Fabric, LightningModule
from lightning_elixir.errors import DivergenceError, PlanError
from lightning_elixir.patterns import Column, Expert, Row
from tests.helpers.dist import RankError, run_ranks
from tests.helpers.failures import heard_by
from tests.helpers.pattern_fits import TIGHT, Model, Tokens, fit, fit_plain, make, trainer_of
from tests.helpers.patterns import EXPERT, STEPS, VOCABULARY, Case, difference, new_optimizer, train_plain
from tests.helpers.patterns import batch as batch_of
from tests.helpers.releases import need_experts_in_one_module
from tests.helpers.seeds import seed_everything
from tests.helpers.tiers import full, telling

CLOSE = 1e-5
KINDS = [
    pytest.param("mixtral", 1, 2, id="mixtral-experts"),
    pytest.param("mixtral", 2, 1, id="mixtral-tensor"),
    pytest.param("qwen3_moe", 1, 2, id="qwen3_moe-experts"),
    pytest.param("qwen3_moe", 2, 1, id="qwen3_moe-tensor"),
    pytest.param("qwen3_moe", 2, 2, id="qwen3_moe-both"),
    pytest.param("llama", 2, 1, id="llama"),
    pytest.param("uneven", 2, 1, id="llama-vocabulary-left-whole"),
    pytest.param("lora", 2, 1, id="llama-lora"),
    pytest.param("phi_lora", 2, 1, id="phi-3-lora-on-gathered-layers"),
    pytest.param("apertus", 2, 1, id="apertus-whose-plan-forgets-its-activation"),
    pytest.param("lora_of_experts", 1, 1, id="qwen3_moe-lora-of-experts-sharding"),
    pytest.param("lora_of_experts", 2, 1, id="qwen3_moe-lora-of-experts-tensor"),
    pytest.param("lora_of_experts", 1, 2, id="qwen3_moe-lora-of-experts-experts"),
    pytest.param("lora_of_experts", 2, 2, id="qwen3_moe-lora-of-experts-both"),
    pytest.param("qwen3_moe+compiled", 2, 2, id="qwen3_moe-both-compiled"),
    pytest.param("lora_of_experts+compiled", 1, 2, id="qwen3_moe-lora-of-experts-experts-compiled"),
]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft, of transformers' attribute
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of the compiler's own code, which hides both
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(("kind", "tensor", "expert"), telling(KINDS, "qwen3_moe-both"))
def test_models_of_transformers_by_their_own_plans(kind: str, tensor: int, expert: int) -> None:
    if expert > 1:
        need_experts_in_one_module()
    world = max(2, tensor * expert)
    expected = fit_plain(kind.partition("+")[0], world // tensor)
    found, evictions = run_ranks(fit, world, kind, tensor, expert, {}, {}, init_group=False)[0]
    assert evictions > 0
    assert difference(found, expected) < CLOSE


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(("kind", "tensor", "expert"), telling(KINDS, "qwen3_moe-lora-of-experts-experts"))
def test_fused_operators_beneath_their_plans(kind: str, tensor: int, expert: int) -> None:
    """Beside plain modules on one process."""
    if expert > 1:
        need_experts_in_one_module()
    world = max(2, tensor * expert)
    expected = fit_plain(kind.partition("+")[0], world // tensor)
    options = {"use_fused_kernels": True}
    found, evictions = run_ranks(fit, world, kind, tensor, expert, options, {}, init_group=False)[0]
    assert evictions > 0
    assert difference(found, expected) < CLOSE


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "auto_in_little_memory": ({"placement_policy": "auto", "gpu_memory_limit": "250KiB"}, {}),
    "accumulated": ({}, {"accumulate_grad_batches": 2}),
    "states_on_nvme": ({"nvme_offload_fraction": 0.5, "nvme_offload_dir": "states"}, {}),
    "parameters_on_nvme": (
        {"nvme_offload_fraction": 1.0, "nvme_offload_param_fraction": 1.0, "nvme_offload_dir": "states"},
        {},
    ),
    "reduced_in_fp32": ({"reduce_dtype": "float32"}, {}),
    "init_step": ({"init_step": True}, {}),
    "whole_shards": ({"enable_distributed_storage": False}, {}),
    "activations_recomputed": ({"activations": "recompute"}, {}),
    "activations_offloaded": ({"activations": "offload"}, {"accumulate_grad_batches": 2}),
    "activations_chosen": ({"activations": "auto"}, {}),
}


@pytest.mark.full  # combinations
@pytest.mark.parametrize("way", telling(WAYS, "auto_in_little_memory", "states_on_nvme"))
def test_with_other_options(way: str) -> None:
    need_experts_in_one_module()
    options, of_trainer = WAYS[way]
    expected = fit_plain("mixtral", 2, **of_trainer)
    found, _ = run_ranks(fit, 2, "mixtral", 1, 2, options, of_trainer, init_group=False)[0]
    assert difference(found, expected) < CLOSE


def other_patterns_later(kind: str) -> dict[str, Tensor]:
    """Three fits of one model, with other sizes each time."""
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    environment, model = dict(os.environ), Model(kind)
    strategy: Any = None
    for tensor, expert in ((2, 1), (1, 1), (1, 2)):
        os.environ.update(environment)
        strategy = ElixirStrategy(tensor_parallel_size=tensor, expert_parallel_size=expert, **TIGHT)
        sampler = DistributedSampler(Tokens(), num_replicas=world // tensor, rank=rank // tensor, shuffle=False)
        loader = DataLoader(Tokens(), batch_size=4 // (world // tensor), sampler=sampler)
        trainer_of(strategy, world).fit(model, loader)
    return {k: v.clone() for k, v in strategy.lightning_module_state_dict().items()}


@pytest.mark.full
def test_one_model_with_other_sizes_in_every_fit() -> None:
    need_experts_in_one_module()
    model = Model("mixtral")
    for _ in range(3):
        trainer_of("auto", 1).fit(model, DataLoader(Tokens(), batch_size=4))
    found = run_ranks(other_patterns_later, 2, "mixtral", init_group=False)[0]
    assert difference(found, model.state_dict()) < CLOSE


class Restoring(Model):
    """Loads what its own `state_dict()` gives, halved, between two steps."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 2:
            self.load_state_dict({name: value / 2 for name, value in self.state_dict().items()})


def restores(kind: str, tensor: int, expert: int) -> dict[str, Tensor]:
    strategy = ElixirStrategy(tensor_parallel_size=tensor, expert_parallel_size=expert, **TIGHT)
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    sampler = DistributedSampler(Tokens(), num_replicas=world // tensor, rank=rank // tensor, shuffle=False)
    trainer_of(strategy, world).fit(Restoring(kind), DataLoader(Tokens(), batch_size=4 // world, sampler=sampler))
    return {k: v.clone() for k, v in strategy.lightning_module_state_dict().items()}


@pytest.mark.full
@pytest.mark.parametrize(("kind", "tensor", "expert"), [("mixtral", 1, 2), ("untied_llama+dtensors", 2, 1)], ids=str)
def test_a_module_loads_whole_values_between_steps(kind: str, tensor: int, expert: int) -> None:
    if expert > 1:
        need_experts_in_one_module()
    model = Restoring(kind.partition("+")[0])
    trainer_of("auto", 1).fit(model, DataLoader(Tokens(), batch_size=4 // tensor))
    found = run_ranks(restores, 2, kind, tensor, expert, init_group=False)[0]
    assert difference(found, model.state_dict()) < CLOSE


def evaluated(kind: str) -> list[float]:
    world = int(os.environ["WORLD_SIZE"])
    model = Model(kind)
    strategy = ElixirStrategy(expert_parallel_size=2, **TIGHT)
    found = trainer_of(strategy, world).validate(model, DataLoader(Tokens(), batch_size=2), verbose=False)
    return [float(found[0]["loss"])]


@pytest.mark.full
def test_evaluation() -> None:
    need_experts_in_one_module()
    model = Model("mixtral")
    model.configure_model()
    with torch.no_grad():
        own = [float(model.training_step(batch, 0)) for batch in DataLoader(Tokens(), batch_size=2)]
    for losses in run_ranks(evaluated, 2, "mixtral", init_group=False):
        assert losses == pytest.approx([sum(own) / len(own)], abs=CLOSE)


class Predicting(Model):
    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        return self.training_step(batch, index)


def predicted(limit: int | None) -> Any:
    """What each rank has of five samples, or the error."""
    strategy = ElixirStrategy(expert_parallel_size=2, patterns=EXPERT, **TIGHT)
    trainer = trainer_of(strategy, 2, use_distributed_sampler=True, limit_predict_batches=limit)
    data = DataLoader(torch.stack([Tokens()[i] for i in range(5)]), batch_size=1)
    try:
        return [float(loss) for loss in trainer.predict(Predicting("mixture"), data) or []]
    except DivergenceError as error:
        return str(error)


@pytest.mark.parametrize("limit", [None, 2])
def test_predictions_need_as_many_batches_on_all_ranks_that_share_experts(limit: int | None) -> None:
    found = run_ranks(predicted, 2, limit, init_group=False)
    if limit is None:
        assert all("limit_predict_batches" in text for text in found)
        return
    net = make("mixture")
    with torch.no_grad():
        expected = [float(net(Tokens()[i][None] % VOCABULARY)) for i in range(4)]
    assert found == [pytest.approx(expected[rank::2], abs=CLOSE) for rank in range(2)]


class FromFiles(Model):
    """Each rank reads its parts from a file."""

    def __init__(self, kind: str, path: str) -> None:
        super().__init__(kind)
        self.path = path

    def configure_model(self) -> None:
        if self.net is None:
            self.net = pretrained(lambda: make(self.kind), self.path)


def fit_from_files(kind: str, tensor: int, expert: int, path: str) -> dict[str, Tensor]:
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    strategy = ElixirStrategy(tensor_parallel_size=tensor, expert_parallel_size=expert, **TIGHT)
    sampler = DistributedSampler(Tokens(), num_replicas=world // tensor, rank=rank // tensor, shuffle=False)
    trainer = trainer_of(strategy, world, gradient_clip_val=1.0)
    trainer.fit(FromFiles(kind, path), DataLoader(Tokens(), batch_size=2, sampler=sampler))
    return {k: v.clone() for k, v in strategy.lightning_module_state_dict().items()}


@pytest.mark.parametrize(
    ("kind", "tensor", "expert"), [("llama", 2, 1), full("qwen3_moe", 2, 2), full("mixtral", 1, 2)]
)
def test_weights_from_files(kind: str, tensor: int, expert: int, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    if expert > 1:
        need_experts_in_one_module()
    world = max(2, tensor * expert)
    state = {n: p.detach() + 0.01 for n, p in make(kind).named_parameters()}  # others than those that are drawn
    safetensors.save_file(state, tmp_path / "model.safetensors")
    model = Model(kind)
    model.configure_model()
    model.net.load_state_dict(state, strict=False)
    trainer = trainer_of("auto", 1, gradient_clip_val=1.0)
    trainer.fit(model, DataLoader(Tokens(), batch_size=2 * world // tensor))
    found = run_ranks(fit_from_files, world, kind, tensor, expert, str(tmp_path), init_group=False)[0]
    assert difference(found, model.state_dict()) < CLOSE


# What is refused


def test_ranks_of_a_tensor_parallel_group_get_the_same_data(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = ElixirStrategy(tensor_parallel_size=2, patterns={"*": Column()})
    strategy.num_nodes, strategy.parallel_devices = 2, [torch.device("cpu")] * 4
    found = []
    for rank in range(8):
        monkeypatch.setattr(ElixirStrategy, "global_rank", property(lambda _, rank=rank: rank))
        found.append(strategy.distributed_sampler_kwargs)
    assert found == [{"num_replicas": 4, "rank": rank} for rank in (0, 0, 1, 1, 2, 2, 3, 3)]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be a number of ranks"),
        ({"expert_parallel_size": True}, "expert_parallel_size must be a number of ranks"),
        ({"patterns": [Column()]}, "patterns must be a dict"),
        ({"patterns": {3: Column()}}, "a key is a module name"),
        ({"patterns": {"*.up": Column}}, r"write Column\(\)"),
        ({"expert_parallel_size": 2, "patterns": {"*.up": Column()}}, "no pattern is for it"),
    ],
)
def test_options_that_cannot_be_used(options: dict[str, Any], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        ElixirStrategy(**options)


class Plain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.odd = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 3)
        self.norm = nn.LayerNorm(8)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.odd(self.norm(self.down(self.up(batch)))).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no_such_module": ({"*.upp": Column()}, "the model has no module"),
    "not_linear": ({"norm": Column()}, "Column is for linear layers"),
    "uneven": ({"odd": Column()}, "cannot be cut into 2 equal parts"),
    "two": ({"up": Column(), "*p": Column(gathers=True)}, "has two"),
    "no_plan": ({}, "the model brings no tp_plan"),
    "none_along_tensor": ({"odd": Expert()}, "no pattern is for it"),
}


def refused(name: str) -> str:
    patterns, _ = REFUSED[name]
    strategy = ElixirStrategy(tensor_parallel_size=2, patterns=patterns or None)
    trainer = trainer_of(strategy, int(os.environ["WORLD_SIZE"]))
    try:
        trainer.fit(Plain(), DataLoader(torch.randn(8, 8), batch_size=4))
    except PlanError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", telling(REFUSED, "uneven", "no_plan"))
def test_patterns_that_do_not_fit_the_model_are_refused_on_every_rank(name: str) -> None:
    told = run_ranks(refused, 2, name, init_group=False)
    assert all(REFUSED[name][1] in text for text in told)


def too_few() -> None:
    strategy = ElixirStrategy(tensor_parallel_size=2, patterns={"up": Column(), "down": Row()})
    trainer_of(strategy, 3).fit(Plain(), DataLoader(torch.randn(8, 8), batch_size=4))


def test_a_number_of_ranks_that_the_sizes_do_not_divide() -> None:
    with pytest.raises(RankError, match="multiple of 2, and there are 3"):
        run_ranks(too_few, 3, init_group=False)


def _seeded(seeds: list[int]) -> dict[str, Any]:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    seed_everything(seeds[rank])
    strategy = ElixirStrategy(tensor_parallel_size=2, patterns={"up": Column(), "down": Row()})
    trainer = trainer_of(strategy, world_size, use_distributed_sampler=True)
    return heard_by(rank, world_size, lambda: trainer.fit(Plain(), DataLoader(torch.randn(8, 8), batch_size=4)))


@pytest.mark.parametrize("seeds", [[1, 2], full([3, 3, 4, 4]), full([3, 3, 4, 5])])
def test_ranks_that_share_batches_have_one_seed(seeds: list[int]) -> None:
    """Their samplers would draw other batches, and their layers drop out other values."""
    told = run_ranks(_seeded, len(seeds), seeds, init_group=False)
    is_refused = seeds != [3, 3, 4, 4]
    assert [heard["type"] for heard in told] == ["PlanError" if is_refused else ""] * len(seeds)
    first = "0: 1, 1: 2" if len(seeds) == 2 else "2: 4, 3: 5"
    assert all(f"(rank {first})" in heard["text"] for heard in told) == is_refused


@pytest.mark.parametrize("has_trainer", [True, False])
def test_patterns_that_cut_nothing_are_warned_of(has_trainer: bool, caplog: pytest.LogCaptureFixture) -> None:
    patterns = {"u*": Column(), "down": Row()}
    for given in (None, patterns):
        model = Plain()
        if has_trainer:
            trainer_of(ElixirStrategy(patterns=given), 1).fit(model, DataLoader(torch.randn(8, 8)))
        else:
            loop = Fabric(strategy=fabric.ElixirStrategy(patterns=given), accelerator="cpu", devices=1)
            loop.launch()
            loop.setup(model, new_optimizer(model.parameters()))
        told = [record.getMessage() for record in caplog.records if "patterns are given" in record.getMessage()]
        if given is None:
            assert told == []
    assert [text.split(":")[0] for text in told] == [
        "patterns are given for 'u*', 'down', but tensor_parallel_size is 1"
    ]


def by_fabric(tensor: int, expert: int, path: str) -> None:
    fabric_module = pytest.importorskip("lightning.fabric")
    from lightning_elixir.fabric import ElixirStrategy as FabricStrategy

    case = Case(tensor=tensor, expert=expert)
    strategy = FabricStrategy(
        placement_policy="cpu",
        chunk_size=6000,
        tensor_parallel_size=tensor,
        expert_parallel_size=expert,
        patterns=case.patterns,
    )
    fabric = fabric_module.Fabric(strategy=strategy, accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]))
    fabric.launch()
    made = case.make()
    model, optimizer = fabric.setup(made, new_optimizer(made.parameters()))
    for step in range(STEPS):
        fabric.backward(model(batch_of(step, fabric.global_rank // tensor)))
        optimizer.step()
        optimizer.zero_grad()
    fabric.save(path, {"model": model})


@pytest.mark.parametrize("expert", [1, full(2)])
def test_under_fabric(expert: int, tmp_path: Path) -> None:
    run_ranks(by_fabric, 2 * expert, 2, expert, str(tmp_path / "saved.ckpt"), init_group=False)
    _, _, expected = train_plain(Case(tensor=2, expert=expert), expert)
    assert difference(torch.load(tmp_path / "saved.ckpt", weights_only=False)["model"], expected) < CLOSE


def beside_another(tensor: int, kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two modules, of which patterns are for the first alone; both in one loss. Returns the states of both."""
    is_plain = tensor == 1
    case = Case(tensor=tensor)
    given = {"tensor_parallel_size": tensor, "patterns": case.patterns if kind == "given" else None}
    tight = {"placement_policy": "cpu", "chunk_size": 6000, **given}
    strategy = "auto" if is_plain else fabric.ElixirStrategy(**tight)
    loop = Fabric(strategy=strategy, accelerator="cpu", devices=tensor)
    loop.launch()
    first = case.make() if kind == "given" else make("llama")
    second = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    models, optimizers = [], []
    for net in (first, second):
        torch.manual_seed(4)
        nn.init.normal_(next(net.parameters()), std=0.1)
        model, optimizer = loop.setup(net, new_optimizer(net.parameters()))
        models.append(model)
        optimizers.append(optimizer)
    for step in range(STEPS):
        tokens = batch_of(step, 0)
        loss = models[0](tokens) if kind == "given" else models[0](input_ids=tokens, labels=tokens).loss
        loop.backward(loss + models[1](tokens.float()).square().mean())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    states = [{k: v.clone() for k, v in model.state_dict().items()} for model in models]
    if not is_plain:
        assert sum(loop.strategy.engine_of(model).stats().evictions for model in models) > 0
        loop.strategy.close()
    return states[0], states[1]


@pytest.mark.parametrize("kind", ["given", full("own")])
def test_a_module_without_patterns_beside_one_with_them(kind: str) -> None:
    """Under Fabric, which sets up one after the other."""
    expected = beside_another(1, kind)
    for found in run_ranks(beside_another, 2, 2, kind, init_group=False):
        for mine, plain in zip(found, expected, strict=True):
            assert difference(mine, plain) < CLOSE


class Elsewhere(Plain):
    """Weights that are not there yet, in a way that patterns cannot do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def configure_model(self) -> None:
        if self.how == "compiled":
            self.down.compile(backend="eager")
            parallelize_module(self, self.device_mesh["tensor_parallel"], {"up": ColwiseParallel()})
        else:
            mesh = init_device_mesh("cpu", (2,))
            self.up.weight = nn.Parameter(distribute_tensor(self.up.weight.detach(), mesh, [Shard(0)]))


def refuses_elsewhere(how: str) -> str:
    patterns = None if how == "compiled" else {"down": Row(splits=True)}
    trainer = trainer_of(ElixirStrategy(tensor_parallel_size=2, patterns=patterns), int(os.environ["WORLD_SIZE"]))
    try:
        trainer.fit(Elsewhere(how), DataLoader(torch.randn(8, 8), batch_size=4))
    except PlanError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("how", telling(["compiled", "dtensor"], "dtensor"))
def test_what_cannot_be_combined_is_refused_on_every_rank(how: str) -> None:
    told = {"compiled": "cannot be in a model that parallelize_module", "dtensor": "a DTensor over a mesh of its own"}[
        how
    ]
    for text in run_ranks(refuses_elsewhere, 2, how, init_group=False):
        assert re.search(told, text)

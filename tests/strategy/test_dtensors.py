"""Models that `parallelize_module` has cut in `configure_model`, and the plain Trainer on one process."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_elixir import ElixirStrategy, HybridAdam
from lightning_elixir._lightning import LightningModule, Trainer
from lightning_elixir.errors import PeerLostError, PlanError
from lightning_elixir.patterns import Column
from tests.helpers.dist import run_ranks
from tests.helpers.patterns import STEPS, Case, Language, batch, difference, new_optimizer, train_plain

CLOSE = 1e-5
DENSE = Case(tensor=2, options={"is_mixture": False})
TIGHT = {"placement_policy": "cpu", "chunk_size": 9000}
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
LAYER = {
    "self_attn.[qkv]_proj": ColwiseParallel,
    "self_attn.o_proj": RowwiseParallel,
    "mlp.gate_proj": ColwiseParallel,
    "mlp.up_proj": ColwiseParallel,
    "mlp.down_proj": RowwiseParallel,
}


def parallel_llama(net: Any, mesh: Any) -> None:
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(net, mesh, plan)
    for layer in net.model.layers:
        parallelize_module(layer, mesh, {name.replace("[qkv]", k): style() for name, style in LAYER.items() for k in "qkv"})


def parallel_language(net: Language, mesh: Any) -> None:
    """Activations between the blocks are cut along the sequence."""
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(net, mesh, plan)
    for layer in net.layers:
        whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        of_layer: dict[str, Any] = {"first": SequenceParallel(), "second": SequenceParallel()}
        of_layer |= {"attention": whole, "feed": whole, "attention.[qkv]": ColwiseParallel()}
        of_layer |= {"attention.o": RowwiseParallel(output_layouts=Shard(1)), "feed.up": ColwiseParallel()}
        of_layer |= {"feed.down": RowwiseParallel(output_layouts=Shard(1))}
        parallelize_module(layer, mesh, of_layer)


class Tokens(Dataset[Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(0, 24, (8,), generator=torch.Generator().manual_seed(index))


class Model(LightningModule):
    def __init__(self, kind: str, is_cut: bool) -> None:
        super().__init__()
        self.kind, self.is_cut = kind, is_cut
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is not None:
            return
        torch.manual_seed(5)
        if self.kind.startswith("llama"):
            transformers = pytest.importorskip("transformers")
            self.net = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
            if self.kind == "llama-checkpointed":
                self.net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
                self.net.train()
        else:
            self.net = Language(is_mixture=False, is_checkpointed="checkpointed" in self.kind)
        if self.is_cut:
            cut = parallel_llama if self.kind.startswith("llama") else parallel_language
            cut(self.net, self.device_mesh["tensor_parallel"])

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if self.kind.startswith("llama"):
            return self.net(input_ids=batch, labels=batch).loss
        return self.net(batch)

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("loss", self.training_step(batch, index), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return HybridAdam([p for p in self.parameters() if p.requires_grad], lr=1e-2, eps=1e-3, weight_decay=0.05)


def trainer_of(strategy: Any, devices: int, **options: Any) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "use_distributed_sampler": False}
    return Trainer(strategy=strategy, accelerator="cpu", devices=devices, max_epochs=2, **{**quiet, **options})


def fit_plain(kind: str, batches: int, **options: Any) -> dict[str, Tensor]:
    model = Model(kind, is_cut=False)
    trainer_of("auto", 1, gradient_clip_val=1.0, **options).fit(model, DataLoader(Tokens(), batch_size=2 * batches))
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def fit(kind: str, options: dict[str, Any], of_trainer: dict[str, Any]) -> Any:
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    model = Model(kind, is_cut=True)
    strategy = ElixirStrategy(tensor_parallel_size=2, **{**TIGHT, **options})
    sampler = DistributedSampler(Tokens(), num_replicas=world // 2, rank=rank // 2, shuffle=False)
    trainer = trainer_of(strategy, world, gradient_clip_val=1.0, **of_trainer)
    trainer.fit(model, DataLoader(Tokens(), batch_size=2, sampler=sampler))
    evictions = strategy.stats().evictions
    return {k: v.clone() for k, v in strategy.lightning_module_state_dict().items()}, evictions


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")  # the name that all versions have
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", ["llama", "llama-checkpointed", "language", "language-checkpointed"])
def test_equals_plain_training(kind: str, world: int) -> None:
    expected = fit_plain(kind, world // 2)
    found, evictions = run_ranks(fit, world, kind, {}, {}, init_group=False)[0]
    assert evictions > 0
    assert difference(found, expected) < CLOSE


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "auto_in_little_memory": ({"placement_policy": "auto", "gpu_memory_limit": "120KiB"}, {}),
    "resident": ({"placement_policy": "cuda"}, {}),
    "accumulated": ({}, {"accumulate_grad_batches": 2}),
    "states_on_nvme": ({"nvme_offload_fraction": 0.5, "nvme_offload_dir": "states"}, {}),
}


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("kind", ["llama", "language"])
def test_under_options(kind: str, way: str) -> None:
    options, of_trainer = WAYS[way]
    expected = fit_plain(kind, 1, **of_trainer)
    found, evictions = run_ranks(fit, 2, kind, options, of_trainer, init_group=False)[0]
    assert evictions > 0 or way == "resident"
    assert difference(found, expected) < CLOSE


# Checkpoints, and further runs


def fit_and_go_on(state_dict_type: str, folder: str) -> Any:
    """Two epochs; a validation in between, and a new Trainer that goes on from the file, over the same module."""
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    sampler = DistributedSampler(Tokens(), num_replicas=world // 2, rank=rank // 2, shuffle=False)
    data = DataLoader(Tokens(), batch_size=2, sampler=sampler)
    first = Model("language", is_cut=True)
    strategy = ElixirStrategy(tensor_parallel_size=2, state_dict_type=state_dict_type, **TIGHT)
    trainer = trainer_of(strategy, world, gradient_clip_val=1.0)
    trainer.fit_loop.max_epochs = 1
    trainer.fit(first, data)
    trainer.validate(first, data, verbose=False)
    trainer.save_checkpoint(folder)
    os.environ.update(WORLD_SIZE=str(world), RANK=str(rank), LOCAL_RANK=str(rank))
    again = Model("language", is_cut=True)
    strategy = ElixirStrategy(tensor_parallel_size=2, **{**TIGHT, "chunk_size": 7000})
    trainer_of(strategy, world, gradient_clip_val=1.0).fit(again, data, ckpt_path=folder)
    return {k: v.clone() for k, v in strategy.lightning_module_state_dict().items()}


@pytest.mark.parametrize("state_dict_type", ["full", "sharded"])
def test_goes_on_from_a_checkpoint(state_dict_type: str, tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    expected = fit_plain("language", 2)
    found = run_ranks(fit_and_go_on, 4, state_dict_type, path, init_group=False)[0]
    assert difference(found, expected) < CLOSE
    if state_dict_type == "full":  # plain PyTorch loads it
        saved = torch.load(path, weights_only=False)["state_dict"]
        plain = Model("language", is_cut=False)
        plain.configure_model()
        plain.load_state_dict(saved)


# Fabric


def by_fabric(how: str, path: str) -> str:
    fabric_module = pytest.importorskip("lightning.fabric")
    from lightning_elixir.fabric import ElixirStrategy as FabricStrategy

    def cut(net: Any, mesh: Any) -> Any:
        parallel_language(net, mesh["tensor_parallel"])
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


@pytest.mark.parametrize("how", ["function", "function_init_module", "mesh", "mesh_init_module"])
def test_under_fabric(how: str, tmp_path: Path) -> None:
    path = str(tmp_path / "saved.ckpt")
    told = run_ranks(by_fabric, 4, how, path, init_group=False)
    if how == "mesh_init_module":
        assert all("parallelize_fn" in text for text in told)
        return
    assert difference(torch.load(path, weights_only=False)["model"], train_plain(DENSE, 2)[2]) < CLOSE


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


@pytest.mark.parametrize("how", list(REFUSED))
def test_what_chunks_cannot_have_is_refused_on_every_rank(how: str) -> None:
    text, patterns = REFUSED[how]
    for told in run_ranks(refused, 2, how, patterns, init_group=False):
        assert text in told


# A rank that fails


class Failing(Model):
    def __init__(self, where: str) -> None:
        super().__init__("language", is_cut=True)
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


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_rank_that_raises_alone(where: str) -> None:
    told = run_ranks(fails, 4, where, init_group=False, fresh=True)
    assert told[1] == ("RuntimeError", "a test wants it so")
    for rank in (0, 2, 3):
        assert told[rank][0] == PeerLostError.__name__
        assert "a test wants it so" in told[rank][1]

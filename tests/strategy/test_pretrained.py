"""Models from safetensors files: every rank reads its part, and trains as if it had called `from_pretrained`."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_elixir import ElixirModule, ElixirOptimizer, ElixirStrategy, HybridAdam, pretrained
from lightning_elixir._lightning import LightningModule
from lightning_elixir.checkpoint import StoredWeight
from lightning_elixir.cli import main
from lightning_elixir.errors import PlanError, StorageError
from lightning_elixir.strategy.model_init import parameters_on_meta
from tests.helpers.dist import run_ranks
from tests.helpers.own_memory import Peak
from tests.helpers.plans import make_plan
from tests.helpers.tiers import crossed, full, telling
from tests.strategy.models import assert_same_run, assert_same_state, fit, make_optimizer, make_trainer

transformers = pytest.importorskip("transformers")
save_file = pytest.importorskip("safetensors.torch").save_file

VOCABULARY = 101
SMALL = {"chunk_size": "48KiB"}
TIGHT = {**SMALL, "placement_policy": "cpu", "gpu_memory_limit": "400KiB"}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "tight": TIGHT,
    "cuda": {**SMALL, "placement_policy": "cuda"},
    "auto": {},
    "const": {**SMALL, "placement_policy": "const", "offload_optim_frac": 0.5, "shard_param_frac": 0.5},
    "whole": {**TIGHT, "enable_distributed_storage": False},
    "nvme": {**SMALL, "placement_policy": "cpu", "nvme_offload_fraction": 1.0, "nvme_offload_param_fraction": 1.0},
}


def _config(kind: str) -> Any:
    if kind == "gpt2":  # embeddings are tied to the head, and not in the files a second time
        return transformers.GPT2Config(
            n_layer=2, n_embd=32, n_head=2, vocab_size=VOCABULARY, n_positions=16, bos_token_id=0, eos_token_id=0
        )
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    if kind == "llama":  # rotary tables are buffers that no file has
        return transformers.LlamaConfig(**sizes, vocab_size=VOCABULARY, max_position_embeddings=16)
    return transformers.BertConfig(**sizes, vocab_size=VOCABULARY, max_position_embeddings=16)


# Who is saved, and who is loaded from that. Of BERT the file has no head, and names without the prefix.
SAVED = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "bert": "BertModel"}
LOADED = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "bert": "BertForSequenceClassification"}
OPTIONS: dict[str, dict[str, Any]] = {"gpt2": {}, "llama": {}, "bert": {"missing": "initialize"}}


def _save(kind: str, folder: Path, *, max_shard_size: str = "5GB", dtype: torch.dtype | None = None) -> nn.Module:
    torch.manual_seed(3)
    model: nn.Module = getattr(transformers, SAVED[kind])(_config(kind)).to(dtype)
    with torch.no_grad():  # biases and norms do not all begin alike
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def _new(kind: str, folder: Path) -> nn.Module:
    loaded = getattr(transformers, LOADED[kind])
    return loaded(loaded.config_class.from_pretrained(folder))


def _load(kind: str, folder: Path, **options: Any) -> nn.Module:
    return pretrained(functools.partial(_new, kind, folder), folder, **{**OPTIONS[kind], **options})


class TokenNet(LightningModule):
    """A language model or a classifier; made by `pretrained`, or by transformers."""

    def __init__(self, kind: str, folder: Path, by: str = "pretrained", **options: Any) -> None:
        super().__init__()
        self.kind, self.folder, self.by, self.options = kind, folder, by, options
        self.model: Any = None
        self.losses: list[Tensor] = []
        self.val_losses: list[Tensor] = []

    def configure_model(self) -> None:
        if self.model is not None:
            return
        if self.by == "pretrained":
            self.model = _load(self.kind, self.folder, **self.options)
            self.was_meta = [p.is_meta for p in self.model.parameters()]
        else:
            loaded = getattr(transformers, LOADED[self.kind])
            self.model = loaded.from_pretrained(self.folder, dtype=torch.float32)
        self.model.train()  # transformers loads for evaluation: here dropout takes part, and so random states
        self.change()

    def change(self) -> None:
        return

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens, labels = batch
        loss = self.model(input_ids=tokens, labels=labels if self.kind == "bert" else tokens).loss
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return make_optimizer("adamw", trained, 1e-2)


class HybridNet(TokenNet):
    def configure_optimizers(self) -> Any:
        return make_optimizer("hybrid", [p for p in self.parameters() if p.requires_grad], 1e-2)


class FrozenNet(HybridNet):
    """The embeddings and the first layer do not train; and there is a layer from elsewhere."""

    def change(self) -> None:
        frozen = ("wte", "wpe", "h.0.", "embed_tokens", "layers.0.", "embeddings", "layer.0.")
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in frozen))
        self.scale = nn.Linear(1, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.scale.weight.square().sum()


def _tokens() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (24, 12), generator=generator)
    labels = torch.randint(0, 2, (24,), generator=generator)
    return DataLoader(TensorDataset(tokens, labels), batch_size=4)


def _fit(make: Callable[[], Any], placement: str, folder: Path, **options: Any) -> Any:
    more = {"nvme_offload_dir": str(folder)} if placement == "nvme" else {}
    strategy = "auto" if placement == "plain" else ElixirStrategy(**PLACEMENTS[placement], **more)
    _, model, run = fit(strategy, make, train=_tokens, **options)
    return model, run


# Training


@pytest.mark.parametrize("max_shard_size", telling(["5GB", "30KB"], "30KB"))
@pytest.mark.parametrize("kind", SAVED)
def test_trains_as_plain_pytorch_from_pretrained(tmp_path: Path, kind: str, max_shard_size: str) -> None:
    _save(kind, tmp_path, max_shard_size=max_shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (max_shard_size == "30KB")
    _, expected = _fit(functools.partial(TokenNet, kind, tmp_path, "transformers"), "plain", tmp_path)
    model, actual = _fit(functools.partial(TokenNet, kind, tmp_path), "tight", tmp_path)
    assert len(actual.losses) == 6
    assert sum(model.was_meta) == len(model.was_meta) - (2 if kind == "bert" else 0)
    assert_same_run(actual, expected)


def _states(make: Callable[[], Any], placement: str, folder: Path, devices: int, options: dict[str, Any]) -> Any:
    model, run = _fit(make, placement, folder, devices=devices, **options)
    return run.losses, {k: v for k, v in run.state.items() if isinstance(v, Tensor)}, getattr(model, "was_meta", None)


def _on_ranks(make: Any, placement: str, folder: Path, world_size: int, options: dict[str, Any]) -> list[Any]:
    if world_size == 1:
        return [_states(make, placement, folder, 1, options)]
    return run_ranks(_states, world_size, make, placement, folder, world_size, options, init_group=False)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "placement", "world_size", "precision"),
    [
        full("gpt2", "tight", 2, "32-true"),
        full("gpt2", "cuda", 3, "bf16-mixed"),
        full("gpt2", "nvme", 2, "bf16-mixed"),
        full("llama", "nvme", 1, "32-true"),
        full("llama", "auto", 2, "bf16-mixed"),
        full("llama", "whole", 2, "bf16-mixed"),
        full("llama", "cuda", 1, "bf16-true"),
        ("bert", "const", 3, "bf16-mixed"),
        full("bert", "tight", 2, "bf16-true"),
        full("bert", "cuda", 2, "32-true"),
        full("bert", "whole", 3, "32-true"),
    ],
)
@pytest.mark.parametrize("net", telling([HybridNet, FrozenNet], "HybridNet"))
def test_any_placement_ranks_and_precision(
    tmp_path: Path, kind: str, placement: str, world_size: int, precision: str, net: type[TokenNet]
) -> None:
    _save(kind, tmp_path, max_shard_size="60KB")
    options = {"precision": precision, "max_steps": 3}
    # The same engine over a model that rank 0 loads as a whole.
    expected = _on_ranks(
        functools.partial(net, kind, tmp_path, "transformers"), placement, tmp_path, world_size, options
    )
    actual = _on_ranks(functools.partial(net, kind, tmp_path), placement, tmp_path, world_size, options)
    for rank in range(world_size):
        assert [loss.item() for loss in actual[rank][0]] == [loss.item() for loss in expected[rank][0]]
        assert sum(actual[rank][2]) >= len(actual[rank][2]) - (2 if kind == "bert" else 0)
    assert_same_state(actual[0][1], expected[0][1])


# What is read


@contextmanager
def _instead_of_read_run(replacement: Callable[..., None]) -> Iterator[None]:
    """`replacement(read, weight, extent, target, *more)` runs when a run of elements is to be read."""
    with pytest.MonkeyPatch.context() as patch:
        read = StoredWeight.read_run
        patch.setattr(StoredWeight, "read_run", lambda *arguments: replacement(read, *arguments))
        yield


def _count(make: Callable[[], Any], placement: str, folder: Path, devices: int) -> tuple[int, int]:
    """Elements that this rank reads of the files, and those of the model."""
    counts = []

    def count(read: Callable[..., None], weight: StoredWeight, extent: Any, *more: Any) -> None:
        counts.append(extent.numel)
        read(weight, extent, *more)

    with _instead_of_read_run(count):
        model, _ = _fit(make, placement, folder, devices=devices, max_steps=1)
    return sum(counts), sum(p.numel() for p in model.model.parameters())


@pytest.mark.parametrize("placement", telling(["tight", "cuda", "const", "whole", "nvme"], "tight"))
def test_ranks_read_every_element_once_between_them(tmp_path: Path, placement: str) -> None:
    _save("llama", tmp_path)
    counts = run_ranks(
        _count, 2, functools.partial(HybridNet, "llama", tmp_path), placement, tmp_path, 2, init_group=False
    )
    assert sum(count for count, _ in counts) == counts[0][1]
    assert min(count for count, _ in counts) > 0.2 * counts[0][1]  # the last rank has the padding


class LargeNet(LightningModule):
    """Measures its host memory from `configure_model` until there is an engine; 64 MiB of weights."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.losses: list[Tensor] = []
        self.val_losses: list[Tensor] = []

    def configure_model(self) -> None:
        self.peak = Peak()
        self.peak.__enter__()
        self.layers = pretrained(lambda: nn.Sequential(*_wide_layers()), self.folder)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layers(batch[0].float().mean() * torch.ones(1, 1024)).mean()

    def configure_optimizers(self) -> Any:
        self.peak.__exit__()
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _wide_layers() -> list[nn.Module]:
    return [nn.Linear(1024, 1024, bias=False) for _ in range(16)]


def _fit_large(folder: Path) -> int:
    strategy = ElixirStrategy(placement_policy="cpu", chunk_size="8MiB")
    _, model, _ = fit(strategy, functools.partial(LargeNet, folder), train=_tokens, devices=2, max_steps=1)
    return model.peak.nbytes


@pytest.mark.full
def test_no_rank_ever_holds_the_model(tmp_path: Path) -> None:
    state = {f"{layer}.weight": torch.full((1024, 1024), float(layer)) for layer in range(16)}
    save_file(state, tmp_path / "model.safetensors")
    for nbytes in run_ranks(_fit_large, 2, tmp_path, fresh=True, init_group=False):
        # Half of the model, half of a chunk, and what Lightning and gloo begin with.
        assert 32 * 2**20 <= nbytes < (32 + 4 + 12) * 2**20


# Names


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
@pytest.mark.parametrize("direction", ["base into head", "head into base"])
def test_prefix_of_the_base_model(tmp_path: Path, kind: str, direction: str) -> None:
    config = _config(kind)
    head = getattr(transformers, {**SAVED, "bert": "BertForMaskedLM"}[kind])
    base = {"gpt2": transformers.GPT2Model, "llama": transformers.LlamaModel, "bert": transformers.BertModel}[kind]
    saved, loaded = (base, head) if direction == "base into head" else (head, base)
    torch.manual_seed(3)
    saved(config).save_pretrained(tmp_path)
    expected = loaded.from_pretrained(tmp_path)
    torch.manual_seed(5)
    actual = pretrained(lambda: loaded(config), tmp_path, missing="initialize", unexpected="ignore")
    drawn = ("cls.", "lm_head", "pooler") if kind != "gpt2" else ()
    assert list(actual.state_dict()) == list(expected.state_dict())
    assert_same_state(
        {k: v for k, v in actual.state_dict().items() if not k.startswith(drawn)},
        {k: v for k, v in expected.state_dict().items() if not k.startswith(drawn)},
    )


def test_missing_ones_get_the_values_that_transformers_draws(tmp_path: Path) -> None:
    _save("bert", tmp_path)
    torch.manual_seed(5)
    expected = transformers.BertForSequenceClassification.from_pretrained(tmp_path)
    torch.manual_seed(5)
    actual = _load("bert", tmp_path)
    assert_same_state(actual.state_dict(), expected.state_dict())
    assert torch.equal(torch.rand(3), _rand_after(lambda: _load("bert", tmp_path)))


def _rand_after(action: Callable[[], object]) -> Tensor:
    torch.manual_seed(5)
    action()
    return torch.rand(3)


def test_a_module_scales_what_its_children_have_drawn(tmp_path: Path) -> None:
    save_file({"wte.weight": torch.ones(VOCABULARY, 32)}, tmp_path / "model.safetensors")
    torch.manual_seed(5)
    expected = transformers.GPT2Model.from_pretrained(tmp_path, config=_config("gpt2"))
    torch.manual_seed(5)
    actual = pretrained(lambda: transformers.GPT2Model(_config("gpt2")), tmp_path, missing="initialize")
    assert_same_state(actual.state_dict(), expected.state_dict())


def test_tied_parameters_stay_tied_whatever_their_name_in_the_file(tmp_path: Path) -> None:
    state = _save("gpt2", tmp_path / "whole").state_dict()
    state["lm_head.weight"] = state.pop("transformer.wte.weight")
    save_file(state, tmp_path / "model.safetensors")
    for defer in (False, True):
        model: Any = pretrained(lambda: transformers.GPT2LMHeadModel(_config("gpt2")), tmp_path, defer=defer)
        assert model.lm_head.weight is model.transformer.wte.weight
        if defer:
            ElixirModule(model, make_plan(model, placement_policy="cuda"))
        assert torch.equal(model.lm_head.weight.detach(), state["lm_head.weight"])


def test_old_names_of_norms(tmp_path: Path) -> None:
    model = _save("bert", tmp_path / "new")
    state = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in model.state_dict().items()
    }
    assert any(name.endswith("gamma") for name in state)
    save_file({f"bert.{name}": value for name, value in state.items()}, tmp_path / "model.safetensors")
    loaded = pretrained(lambda: transformers.BertModel(_config("bert")), tmp_path)
    assert_same_state(loaded.state_dict(), model.state_dict())


class Mixed(nn.Module):
    """Weights in another memory order, a scalar, buffers of all sorts."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(6)
        self.odd = nn.Linear(37, 53)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("table", torch.arange(5.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).mean() * self.scale + self.odd(x.flatten()[:37]).mean() + self.table.sum()


def _mixed(folder: Path) -> dict[str, Tensor]:
    torch.manual_seed(3)
    model = Mixed()
    model(torch.randn(2, 3, 5, 5))  # statistics
    state = model.state_dict()
    save_file({f"net.{name}": value.contiguous() for name, value in state.items()}, folder / "model.safetensors")
    return state


def _load_mixed(folder: Path, defer: bool | None = None, **options: Any) -> Mixed:
    return pretrained(Mixed, folder, rename=lambda name: name.removeprefix("net."), defer=defer, **options)


def _own_engine(folder: Path, chunk_size: int, placement_policy: str) -> dict[str, Tensor]:
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    model = _load_mixed(folder, defer=True)
    assert all(p.is_meta for p in model.parameters())
    assert not any(b.is_meta for b in model.buffers())
    plan = make_plan(model, world_size=world_size, placement_policy=placement_policy, chunk_size=chunk_size)
    module = ElixirModule(model, plan)
    optimizer = ElixirOptimizer(module, HybridAdam(model.parameters(), lr=0.0))
    optimizer.backward(module(torch.randn(2, 3, 5, 5)))
    optimizer.step()
    module.eval()
    assert not any(vars(p) for p in model.parameters())  # nothing of ours is left with them
    return {k: v for k, v in module.full_state_dict(rank0_only=False).items() if not k.startswith("norm.r")}


@crossed(world_size=[1, 2, 3], placement=["cpu", "cuda"])
def test_without_lightning_in_any_memory_order(tmp_path: Path, world_size: int, placement: str) -> None:
    expected = {k: v for k, v in _mixed(tmp_path).items() if not k.startswith("norm.r")}
    del expected["norm.num_batches_tracked"]
    for state in run_ranks(_own_engine, world_size, tmp_path, 4096, placement):
        del state["norm.num_batches_tracked"]
        assert_same_state(state, expected)


def test_buffers_are_copied_at_once(tmp_path: Path) -> None:
    expected = _mixed(tmp_path)
    model = _load_mixed(tmp_path, defer=True)
    assert torch.equal(model.norm.running_mean, expected["norm.running_mean"])
    assert model.norm.num_batches_tracked == 1
    assert torch.equal(model.table, torch.arange(5.0))


def test_buffers_that_initialising_resets_are_those_of_the_file(tmp_path: Path) -> None:
    expected = _mixed(tmp_path)
    del expected["norm.weight"]
    save_file({f"net.{k}": v.contiguous() for k, v in expected.items()}, tmp_path / "model.safetensors")
    model = _load_mixed(tmp_path, missing="initialize")
    assert torch.equal(model.norm.running_mean, expected["norm.running_mean"])
    assert torch.equal(model.norm.weight, torch.ones(6))
    assert torch.equal(model.norm.bias, expected["norm.bias"])


# Dtypes


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16])
def test_values_are_cast_as_a_copy_would(
    tmp_path: Path, stored: torch.dtype, compute: torch.dtype, own: torch.dtype
) -> None:
    torch.manual_seed(3)
    weight = torch.randn(64, 48, dtype=stored)
    save_file({"weight": weight}, tmp_path / "model.safetensors")

    def build() -> nn.Module:
        return nn.Linear(48, 64, bias=False, dtype=own)

    states = []
    for defer in (True, False):
        model = pretrained(build, tmp_path, defer=defer)
        module = ElixirModule(model, make_plan(model, placement_policy="cpu", compute_dtype=compute), dtype=compute)
        with module.full_parameters() as parameters:
            (value,) = (p.detach().clone() for p in parameters.values())
        master = module.engine.store[0].master
        states.append((value, None if master is None else master.clone(), module.full_state_dict()["weight"]))
    (value, master, saved), (other, other_master, other_saved) = states
    assert torch.equal(value, weight.to(own).to(compute))
    assert torch.equal(value, other)
    assert torch.equal(saved, other_saved)
    if compute is torch.bfloat16:
        assert torch.equal(master[: weight.numel()], weight.to(own).float().view(-1))
        assert torch.equal(master, other_master)


# Elsewhere


def test_other_strategies_load_for_real(tmp_path: Path) -> None:
    _save("gpt2", tmp_path)
    _, expected = _fit(functools.partial(TokenNet, "gpt2", tmp_path, "transformers"), "plain", tmp_path)
    model, actual = _fit(functools.partial(TokenNet, "gpt2", tmp_path), "plain", tmp_path)
    assert not any(model.was_meta)
    assert_same_run(actual, expected)


class EarlyNet(TokenNet):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.configure_model()


@crossed(told=["True-2"], defer=[None, True], world_size=[1, 2])
def test_made_in_init(tmp_path: Path, defer: bool | None, world_size: int) -> None:
    _save("gpt2", tmp_path)
    make = functools.partial(EarlyNet, "gpt2", tmp_path, defer=defer)
    runs = _on_ranks(make, "tight", tmp_path, world_size, {})
    late = _on_ranks(functools.partial(TokenNet, "gpt2", tmp_path), "tight", tmp_path, world_size, {})
    assert all(runs[0][2]) == (defer is True)
    assert torch.equal(torch.stack(runs[0][0]), torch.stack(late[0][0]))
    assert_same_state(runs[0][1], late[0][1])


class Proud(nn.Module):
    """Its construction looks at a value; a buffer is computed from a parameter."""

    def __init__(self, looks: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        if looks and self.layer.weight.sum().item() > 100:
            raise ValueError
        self.register_buffer("mean", self.layer.bias.detach().mean(), persistent=False)


@pytest.mark.parametrize("looks", [True, False])
def test_models_that_need_values_are_built_for_real(tmp_path: Path, looks: bool, caplog: Any) -> None:
    weight = torch.randn(3, 3)
    save_file({"layer.weight": weight, "layer.bias": torch.ones(3)}, tmp_path / "model.safetensors")
    model = pretrained(lambda: Proud(looks), tmp_path, defer=True)
    assert "building the model for real" in caplog.text
    assert torch.equal(model.layer.weight, weight)
    assert not model.mean.is_meta


def test_parts_of_the_model_may_be_taken_and_wrapped(tmp_path: Path) -> None:
    saved = _save("bert", tmp_path).state_dict()
    whole: Any = pretrained(lambda: transformers.BertModel(_config("bert")), tmp_path, defer=True)
    part = nn.Sequential(whole.encoder.layer[1])
    ElixirModule(part, make_plan(part, placement_policy="cuda"))
    name = "attention.self.query.weight"
    assert torch.equal(part.get_parameter(f"0.{name}").detach(), saved[f"encoder.layer.1.{name}"])


# Checkpoints, later runs


def _resume(folder: Path, state_dict_type: Any, devices: int) -> tuple[list[float], list[float]]:
    make, path = functools.partial(TokenNet, "llama", folder), folder / "one.ckpt"

    def train(max_epochs: int, placement: str, ckpt_path: str | None = None) -> Any:
        strategy = ElixirStrategy(**PLACEMENTS[placement], state_dict_type=state_dict_type)
        return fit(strategy, make, train=_tokens, devices=devices, max_epochs=max_epochs, ckpt_path=ckpt_path)

    _, _, whole = train(2, "tight")
    trainer, _, _ = train(1, "tight")
    trainer.save_checkpoint(path)
    _, _, resumed = train(2, "cuda", str(path))
    return [loss.item() for loss in resumed.losses], [loss.item() for loss in whole.losses]


@pytest.mark.full
@crossed(told=["sharded-2"], state_dict_type=["full", "sharded"], world_size=[1, 2])
def test_checkpoints_count_more_than_the_files(tmp_path: Path, state_dict_type: str, world_size: int) -> None:
    _save("llama", tmp_path)
    if world_size == 1:
        results = [_resume(tmp_path, state_dict_type, 1)]
    else:
        results = run_ranks(_resume, world_size, tmp_path, state_dict_type, world_size, init_group=False)
    for resumed, whole in results:
        assert len(resumed) == 6 // world_size
        assert resumed == whole[6 // world_size :]


def test_second_run_goes_on_from_the_first(tmp_path: Path) -> None:
    _save("llama", tmp_path)
    strategy = ElixirStrategy(**TIGHT)
    trainer, model, run = fit(strategy, functools.partial(TokenNet, "llama", tmp_path), train=_tokens)
    before = strategy.lightning_module_state_dict()
    again = make_trainer(ElixirStrategy(**PLACEMENTS["cuda"]), max_steps=0)
    again.fit(model, _tokens())
    assert_same_state(again.strategy.lightning_module_state_dict(), before)


def test_plan_command_reads_no_values(tmp_path: Path, capsys: Any) -> None:
    _mixed(tmp_path)
    (tmp_path / "train.py").write_text(
        "from tests.strategy.test_pretrained import LightningModule, Path, _load_mixed, torch\n"
        "class Module(LightningModule):\n"
        "    example_input_array = torch.zeros(2, 3, 5, 5)\n"
        "    def configure_model(self):\n"
        "        self.model = _load_mixed(Path(__file__).parent)\n"
        "    def forward(self, x):\n"
        "        return self.model(x)\n"
        "    def training_step(self, batch, batch_idx):\n"
        "        return self(batch)\n"
    )

    def fail(*_: object) -> None:
        raise StorageError("nobody shall read")

    arguments = ["plan", "--module", f"{tmp_path / 'train.py'}:Module", "--gpu-memory", "1GiB", "--cpu-memory", "8GiB"]
    with _instead_of_read_run(fail):
        assert main(arguments) == 0
    assert "Traceback" not in capsys.readouterr().err


# What does not fit


def _error(save: Mapping[str, Tensor], folder: Path, **options: Any) -> str:
    save_file({k: v.contiguous() for k, v in save.items()}, folder / "model.safetensors")
    with pytest.raises(PlanError) as info:
        _load_mixed(folder, **options)
    return str(info.value)


def test_errors_name_what_does_not_fit(tmp_path: Path) -> None:
    good = {f"net.{k}": v for k, v in _mixed(tmp_path).items()}
    bad = dict(good)
    del bad["net.conv.weight"], bad["net.norm.running_var"]
    bad |= {"net.else": torch.ones(1), "net.odd.bias": torch.ones(54)}
    message = _error(bad, tmp_path)
    assert "do not fit Mixed: they lack conv.weight, norm.running_var (missing='initialize'" in message
    assert "the model lacks else (unexpected='ignore'" in message
    assert "shapes differ: odd.bias [54] instead of [53]" in message
    message = _error(bad, tmp_path, missing="initialize", unexpected="ignore")
    assert "lack" not in message
    assert "shapes differ: odd.bias" in message


@pytest.mark.parametrize("options", [{"missing": "ignore"}, {"unexpected": "initialize"}])
def test_options_that_do_not_exist(tmp_path: Path, options: dict[str, Any]) -> None:
    _mixed(tmp_path)
    with pytest.raises(PlanError, match="it can be 'error' or"):
        _load_mixed(tmp_path, **options)


def test_tables_that_the_model_computes_are_no_error(tmp_path: Path) -> None:
    state = _save("llama", tmp_path).state_dict()
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)  # as in the files of the first Llama
    save_file(state, tmp_path / "model.safetensors")
    model: Any = _load("llama", tmp_path)
    assert model.model.rotary_emb.inv_freq.sum() > 0


def test_parameters_are_made_where_others_are(tmp_path: Path) -> None:
    _mixed(tmp_path)
    with torch.device("meta"):
        model = _load_mixed(tmp_path)
    assert all(tensor.is_meta for tensor in model.state_dict().values())


def test_nobody_initialises(tmp_path: Path) -> None:
    good = {f"net.{k}": v for k, v in _mixed(tmp_path).items()}
    del good["net.scale"]
    assert "nothing initialises scale" in _error(good, tmp_path, missing="initialize")


def test_what_transformers_ignores_is_no_error(tmp_path: Path) -> None:
    state = _save("gpt2", tmp_path).state_dict()
    del state["lm_head.weight"]
    state = {name.removeprefix("transformer."): value for name, value in state.items()}
    state["h.0.attn.bias"] = torch.ones(1, 1, 16, 16)  # as in the files of the first GPT-2
    save_file(state, tmp_path / "model.safetensors")
    model = _load("gpt2", tmp_path)
    assert torch.equal(model.get_parameter("transformer.h.0.ln_1.weight"), state["h.0.ln_1.weight"])


class OneBrokenRank(HybridNet):
    """Rank 1 sees other files."""

    def configure_model(self) -> None:
        if self.trainer.global_rank == 1:
            self.folder = self.folder.parent / "broken"
        super().configure_model()


def _fit_badly(net: type[TokenNet], folder: Path) -> str:
    try:
        _fit(functools.partial(net, "llama", folder), "tight", folder, devices=2)
    except PlanError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _lacking(folder: Path) -> None:
    index = folder / "model.safetensors"
    content = index.read_bytes()
    length = int.from_bytes(content[:8], "little")
    table = json.loads(content[8 : 8 + length])
    table["model.embed_tokens.bias"] = table.pop("model.norm.weight")
    text = json.dumps(table).encode()
    index.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


@pytest.mark.parametrize("is_one_rank", [False, True])
def test_misfits_are_told_on_every_rank(tmp_path: Path, is_one_rank: bool) -> None:
    _save("llama", tmp_path / "whole")
    _save("llama", tmp_path / "broken")
    _lacking(tmp_path / "broken")
    net, folder = (OneBrokenRank, "whole") if is_one_rank else (HybridNet, "broken")
    errors = run_ranks(_fit_badly, 2, net, tmp_path / folder, init_group=False)
    assert all("they lack model.norm.weight" in error for error in errors), errors
    assert errors[0].startswith("PlanError: rank 1 failed: PlanError") == is_one_rank


def _fit_cut(folder: Path, placement: str) -> str:
    """A file fails for rank 1, after all checks."""

    def fail(read: Callable[..., None], weight: StoredWeight, *more: Any) -> None:
        if dist.get_rank() == 1 and weight.shape == (VOCABULARY, 32):
            raise StorageError("the disk has failed")
        read(weight, *more)

    try:
        with _instead_of_read_run(fail):
            _fit(functools.partial(HybridNet, "llama", folder), placement, folder, devices=2)
    except StorageError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("placement", telling(["tight", "cuda", "nvme"], "nvme"))
def test_error_while_reading_is_told_on_every_rank(tmp_path: Path, placement: str) -> None:
    _save("llama", tmp_path)
    errors = run_ranks(_fit_cut, 2, tmp_path, placement, init_group=False, fresh=True)
    assert errors == ["rank 1 could not read the model's values: the disk has failed", "the disk has failed"]


def _different_sources(folder: Path) -> str:
    if dist.get_rank() == 1:
        with parameters_on_meta():
            model: nn.Module = Mixed()
    else:
        model = _load_mixed(folder, defer=True)
    try:
        ElixirModule(model, make_plan(model, world_size=2, placement_policy="cpu"))
    except PlanError as error:
        return str(error)
    return "no error"


def test_ranks_must_agree_on_where_values_are(tmp_path: Path) -> None:
    _mixed(tmp_path)
    for error in run_ranks(_different_sources, 2, tmp_path):
        assert error.startswith("rank 1 does not know where the values of 7 parameters are")

"""Models made in `__init__`, `configure_model` and `configure_sharded_model`, on one rank and on several."""

from __future__ import annotations

import ctypes
import gc
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_elixir._lightning import pl
from lightning_elixir.runtime.build import CHUNKS_AHEAD
from lightning_elixir.strategy import ElixirStrategy
from lightning_elixir.strategy.model_init import materialise, parameters_on_meta
from tests.helpers.dist import run_ranks
from tests.helpers.tiers import telling
from tests.strategy.models import (
    TIGHT,
    LateNet,
    Net,
    ShardedNet,
    assert_same_as_plain,
    assert_same_state,
    fit,
    make_data,
    make_layers,
    make_trainer,
)

HOOKS = [
    Net,
    LateNet,
    pytest.param(ShardedNet, id="ShardedNet", marks=pytest.mark.filterwarnings("ignore:.*configure_sharded_model")),
]


@pytest.mark.parametrize("make_model", telling(HOOKS, "LateNet", "ShardedNet"))
def test_one_rank(make_model: Callable[[], Net]) -> None:
    assert_same_as_plain(make_model)


class UnseededLateNet(LateNet):
    """Its values come from the generators as they are; so do those of what is drawn later."""

    def __init__(self) -> None:
        super().__init__(seed=None)


class UnseededNet(Net):
    def __init__(self) -> None:
        super().__init__(seed=None)


# Every rank records what it holds while and after building.


class RecordingNet(UnseededLateNet):
    def _make(self) -> None:
        super()._make()
        self.was_meta = [p.is_meta for p in self.parameters()]
        self.tail = nn.Linear(32, 4)
        self.layers[2].up.weight = self.layers[0].up.weight
        shared = nn.Parameter(torch.randn(3))
        self.first = nn.ParameterList([shared])
        self.second = nn.ParameterList([shared])
        self.layers[1].requires_grad_(False)
        self.register_buffer("copied", self.tail.weight.detach().clone())
        self.register_buffer("drawn", torch.randn(4))
        self.lstm = nn.LSTM(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        extra = self.lstm(x[:, None])[0].sum() + self.first[0].sum() * self.second[0].prod()
        return self.layers(x) + self.tail(x) + self.copied.sum() + self.drawn.sum() + extra

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, foreach=False)


def _fit_rank(make_model: Callable[[], Net], options: dict[str, Any] | None, trainer_options: dict[str, Any]) -> Any:
    strategy: Any = "ddp" if options is None else ElixirStrategy(**options)
    trainer, model, run = fit(
        strategy,
        make_model,
        devices=2,
        train=lambda: make_data(64),
        val=lambda: make_data(16, seed=2),
        **trainer_options,
    )
    draws = (random.random(), torch.rand(1).item())
    return run.state, [x.item() for x in run.losses], draws, getattr(model, "was_meta", None)


@pytest.mark.parametrize("make_model", [UnseededNet, *telling(HOOKS)])
def test_two_ranks_equal_ddp(make_model: Any) -> None:
    plain = LateNet if make_model is ShardedNet else make_model
    expected = run_ranks(_fit_rank, 2, plain, None, {}, init_group=False)
    actual = run_ranks(_fit_rank, 2, make_model, TIGHT, {}, init_group=False)
    for a, e in zip(actual, expected, strict=True):
        assert a[1] == e[1]
        assert a[2] == e[2]
    assert_same_state(actual[0][0], expected[0][0])
    assert actual[1][0] == {}


def test_only_rank_0_holds_the_model_while_it_is_built() -> None:
    first, second = run_ranks(_fit_rank, 2, RecordingNet, TIGHT, {}, init_group=False)
    assert not any(first[3])
    assert all(second[3])


@pytest.mark.full
def test_ties_frozen_layers_buffers_and_lstm_are_the_same_on_all_ranks() -> None:
    def flat(result: Any) -> Any:
        return result[1]

    expected = run_ranks(_fit_rank, 2, RecordingNet, None, {}, init_group=False)
    actual = run_ranks(_fit_rank, 2, RecordingNet, TIGHT, {}, init_group=False)
    assert [flat(r) for r in actual] == [flat(r) for r in expected]
    assert_same_state(actual[0][0], expected[0][0])


class LookingNet(LateNet):
    """Looks at the values of its parameters while it is built, which cannot be done without them."""

    def _make(self) -> None:
        if hasattr(self, "layers"):
            return
        super()._make()
        if self.layers[0].up.weight.abs().max() < 100:
            self.layers[0].up.weight.data = torch.eye(64, 32)
        self.noise = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.noise


@pytest.mark.full
def test_a_constructor_that_looks_at_values_runs_for_real_everywhere() -> None:
    expected = run_ranks(_fit_rank, 2, LookingNet, None, {}, init_group=False)
    actual = run_ranks(_fit_rank, 2, LookingNet, TIGHT, {}, init_group=False)
    assert [a[1:3] for a in actual] == [e[1:3] for e in expected]
    assert_same_state(actual[0][0], expected[0][0])


class FailingNet(LateNet):
    def _make(self) -> None:
        super()._make()
        if dist.get_rank() == 1:
            raise ValueError("no such file")


def _expect_error(make_model: Callable[[], Net]) -> str:
    with pytest.raises(Exception) as error:  # noqa: PT011 - the type is part of what is compared
        fit(ElixirStrategy(**TIGHT), make_model, devices=2)
    return f"{type(error.value).__name__}: {error.value}"


def test_failing_on_one_rank_fails_on_all() -> None:
    first, second = run_ranks(_expect_error, 2, FailingNet, init_group=False)
    assert first == "PlanError: rank 1 failed: ValueError: no such file"
    assert second == "ValueError: no such file"


class DifferentNet(Net):
    def __init__(self) -> None:
        super().__init__()
        if os.environ["LOCAL_RANK"] == "1":
            self.layers[2].up = nn.Linear(32, 48)


class LongerNet(Net):
    def __init__(self) -> None:
        super().__init__()
        if os.environ["LOCAL_RANK"] == "1":
            self.extra = nn.Linear(3, 3)


class ComplexNet(Net):
    def __init__(self) -> None:
        super().__init__()
        if os.environ["LOCAL_RANK"] == "0":
            self.table = nn.Parameter(torch.zeros(2, dtype=torch.complex64))


@pytest.mark.parametrize(
    ("make_model", "matches"),
    [
        (
            DifferentNet,
            ["number 14 is layers.2.up.weight [64, 32] float32 on rank 0 and layers.2.up.weight [48, 32]"] * 2,
        ),
        (LongerNet, ["number 26 is missing on rank 0 and extra.weight [3, 3] float32 on rank 1"] * 2),
        (ComplexNet, ["table (torch.complex64", "rank 0 failed: PlanError: table (torch.complex64"]),
    ],
)
def test_different_models_are_an_error_on_every_rank(make_model: Any, matches: list[str]) -> None:
    errors = run_ranks(_expect_error, 2, make_model, init_group=False)
    for error, match in zip(errors, matches, strict=True):
        assert error.startswith("PlanError")
        assert match in error


# The hook that puts parameters on meta, by itself


class Marked(nn.Parameter):
    """A parameter class of a user."""


def test_parameters_on_meta_are_like_the_real_ones() -> None:
    real = make_layers()
    state = torch.get_rng_state()
    with parameters_on_meta():
        module = make_layers()
        marked = Marked(torch.zeros(2, 3).t())
        marked.note = "kept"  # type: ignore[attr-defined]
        module.marked = marked  # type: ignore[assignment]
        module.again = marked  # type: ignore[assignment]
        module.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)  # type: ignore[assignment]
        module.lazy = nn.LazyLinear(3)
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.is_meta for n, p in module.named_parameters() if not n.startswith("lazy"))
    assert {n: p.shape for n, p in real.named_parameters()}.items() <= {
        n: p.shape for n, p in module.named_parameters() if not n.startswith("lazy")
    }.items()
    assert type(module.marked) is Marked
    assert module.marked.note == "kept"
    assert module.marked is module.again
    assert module.marked.stride() == (1, 3)
    assert not module.frozen.requires_grad
    assert not make_layers()[0].up.weight.is_meta


@pytest.mark.parametrize("is_real", [False, True])
def test_a_layer_on_meta_draws_nothing_over_what_it_shares(is_real: bool) -> None:
    """Its bias needs values, and `reset_parameters` draws all that the layer has: a shared weight had its values then,
    not the embedding's, also where these were there before."""
    torch.manual_seed(0)
    embedding = nn.Embedding(400, 8)
    with torch.device("meta"):
        head = nn.Linear(8, 400)
        tied = embedding if is_real else nn.Embedding(400, 8)
    head.weight = tied.weight
    torch.manual_seed(0)
    expected = embedding.weight.detach().clone()
    materialise(nn.ModuleList([tied, head]))
    assert head.weight is tied.weight
    assert torch.equal(head.weight, expected)
    assert not head.bias.is_meta


def test_transformers_model_has_the_values_of_plain_construction() -> None:
    pytest.importorskip("transformers")
    first, second = run_ranks(_gpt2_values, 2, init_group=False)
    expected = _gpt2().state_dict()
    assert second == {}
    assert all(torch.equal(first[f"gpt.{name}"], value) for name, value in expected.items())


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(5)
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=16))


class GPTNet(LateNet):
    def configure_model(self) -> None:
        if not hasattr(self, "gpt"):
            self.gpt = _gpt2()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.gpt(batch[1][:, None], labels=batch[1][:, None]).loss, sync_dist=True)


def _gpt2_values() -> dict[str, Tensor]:
    pl.seed_everything(3, verbose=False)
    trainer = make_trainer(ElixirStrategy(placement_policy="cpu", chunk_size="16KiB"), devices=2)
    trainer.test(GPTNet(), make_data(8, batch_size=2), verbose=False)
    return trainer.strategy.lightning_module_state_dict()


# Memory


_MMAP_THRESHOLD = -3  # glibc's number of this option


class LargeNet(LateNet):
    """64 MiB of parameters, none of them used."""

    num_layers, layer_bytes = 16, 4 * 2**20

    def _make(self) -> None:
        if hasattr(self, "layers"):
            return
        before = _take_peak_bytes()
        super()._make()
        self.many = nn.ModuleList([nn.Linear(1024, 1024, bias=False) for _ in range(self.num_layers)])
        self.build_bytes = _take_peak_bytes() - before


def _take_peak_bytes() -> int:
    """Highest resident memory of this process since the last call."""
    status = Path("/proc/self/status").read_text()
    peak = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")
    return peak


def _build_large() -> tuple[int, int]:
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 2**17)  # freed memory goes back at once, and can be told from used
    gc.collect()
    trainer = make_trainer(ElixirStrategy(placement_policy="cpu", chunk_size="4MiB"), devices=2)
    trainer.test(LateNet(), make_data(4, batch_size=2), verbose=False)  # what the first run of a process loads
    gc.collect()
    _take_peak_bytes()
    start = _take_peak_bytes()
    model = LargeNet()
    trainer.test(model, make_data(4, batch_size=2), verbose=False)
    return model.build_bytes, _take_peak_bytes() - start


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="resident memory is read from /proc")
def test_memory_of_building() -> None:
    """Rank 0 holds the model and turns it into shards chunk by chunk; rank 1 holds its shards and some chunks at
    most."""
    model_bytes, chunk_bytes = LargeNet.num_layers * LargeNet.layer_bytes, 4 * 2**20
    (first_build, first_peak), (second_build, second_peak) = run_ranks(_build_large, 2, init_group=False, fresh=True)
    assert model_bytes <= first_build < model_bytes + chunk_bytes
    assert second_build < chunk_bytes
    # The smallest rCache and two chunks ahead are 3 blocks; one chunk is put together, one on its way between ranks.
    # And memory for the shards of the next chunks is there already.
    most = 5 * chunk_bytes + CHUNKS_AHEAD * chunk_bytes / 2
    assert first_peak < model_bytes + most
    assert second_peak < model_bytes / 2 + most

"""Frozen parameters of any dtype lie in chunks; what is ignored stays out of them, and trains as plain PyTorch does."""

from __future__ import annotations

import copy
import io
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_elixir.errors import CapacityError, PlanError, StateError
from lightning_elixir.optim import HybridAdam
from lightning_elixir.plan.io import plan_from_dict, plan_to_dict
from lightning_elixir.profiling.ignored import ignored_parameters
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.dist import run_ranks
from tests.helpers.plans import make_plan
from tests.helpers.tiers import crossed

WIDTH = 32
DTYPES = {
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int64": torch.int64,
    "float8": torch.float8_e4m3fn,
    "float64": torch.float64,
    "complex64": torch.complex64,
    "bool": torch.bool,
}


def drawn(dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_complex:
        return torch.randn(WIDTH, WIDTH, dtype=dtype)
    if dtype.is_floating_point:
        return torch.randn(WIDTH, WIDTH).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 100, (WIDTH, WIDTH)).to(dtype)


class Frozen(nn.Module):
    """A product with a frozen matrix of some dtype, and an adapter beside it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = nn.Parameter(drawn(dtype), requires_grad=False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = self.base.real if self.base.is_complex() else self.base
        return torch.tanh(x @ (base.to(x.dtype) / WIDTH) + self.up(self.down(x)))


class Model(nn.Module):
    def __init__(self, is_checkpointed: bool = False, is_reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Frozen(dtype) for dtype in DTYPES.values())
        self.head = nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.head.weight
        self.is_checkpointed, self.is_reentrant = is_checkpointed, is_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.is_reentrant) if self.is_checkpointed else block(x)
        return self.head(x) + self.tied(x)


def batch(number: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * number + rank))


def rank_and_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def train(model: nn.Module, ignored: Any = None, *, accumulate: int = 1, steps: int = 4, **options: Any) -> Any:
    """Losses, whole state, optimizer state and stats of a training under a tight rCache."""
    rank, world = rank_and_size()
    options = {"placement_policy": "cpu", "gpu_bytes": 60_000, **options}
    plan = make_plan(model, world_size=world, chunk_size=4 * WIDTH * WIDTH + 2048, **options)
    module = ElixirModule(model, plan, ignored=ignored)
    optimizer = ElixirOptimizer(module, HybridAdam(model.parameters(), lr=1e-2, weight_decay=0.1))
    losses = []
    for number in range(steps):
        for micro in range(accumulate):
            loss = module(batch(number * accumulate + micro, rank)).square().mean() / accumulate
            optimizer.backward(loss)
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    found = losses, module.state_dict(), optimizer.state_dict(), module.stats()
    kept = module.plan
    module.close()
    return (*found, kept)


def train_plainly(model: nn.Module, *, accumulate: int = 1, steps: int = 4) -> Any:
    rank, world = rank_and_size()
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]  # of dtypes that DDP cannot send
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, frozen)
    wrapped = DistributedDataParallel(model) if world > 1 else model
    optimizer = HybridAdam(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses = []
    for number in range(steps):
        for micro in range(accumulate):
            loss = wrapped(batch(number * accumulate + micro, rank)).square().mean() / accumulate
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict(), optimizer.state_dict()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def assert_same(actual: Any, expected: Any) -> None:
    assert actual[0] == expected[0]
    assert list(actual[1]) == list(expected[1])
    assert [k for k, v in expected[1].items() if not torch.equal(bits(actual[1][k]), bits(v))] == []
    assert {k: v.dtype for k, v in actual[1].items()} == {k: v.dtype for k, v in expected[1].items()}
    if actual[2]:
        assert actual[2]["state"].keys() == expected[2]["state"].keys()
        for number, state in expected[2]["state"].items():
            assert all(torch.equal(actual[2]["state"][number][k], v) for k, v in state.items())


IGNORED: dict[str, Any] = {
    "nothing": None,
    "a name": "embed",
    "a glob": ["*.up.*", "blocks.0.base"],
    "a class": nn.ModuleList,
    "tied": "tied.weight",
    "a predicate": [lambda name, module: isinstance(module, nn.Linear)],
    "both": ["head", "blocks.?.base"],
    "everything": "*",
}


@pytest.mark.parametrize("what", IGNORED)
def test_as_plain_pytorch(what: str) -> None:
    model = Model()
    expected, ignored = train_plainly(copy.deepcopy(model)), IGNORED[what]
    actual = train(model, ignored)
    assert_same(actual, expected)
    members = {m.fqn for c in actual[4].chunks for m in c.members}
    left_out = {p.fqn for p in actual[4].ignored}
    assert members.isdisjoint(left_out)
    assert members | left_out == {name for name, _ in Model().named_parameters()}
    if what == "nothing":
        assert not left_out
        assert actual[3].evictions > 0
        assert {c.dtype for c in actual[4].chunks} == {*(str(d)[6:] for d in DTYPES.values())} | {"float32"}
    if what == "everything":
        assert actual[3].held_bytes["ignored"] == sum(p.nbytes for p in actual[4].ignored if not p.requires_grad)


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpointed_and_accumulated(is_reentrant: bool) -> None:
    model = Model(is_checkpointed=True, is_reentrant=is_reentrant)
    expected = train_plainly(copy.deepcopy(model), accumulate=2)
    actual = train(model, "embed", accumulate=2)
    assert_same(actual, expected)
    assert actual[3].evictions > 0


def on_ranks(ignored: Any, options: dict[str, Any]) -> None:
    model = Model()
    if rank_and_size()[0]:  # values come from rank 0
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.zeros_like(parameter))
    expected = train_plainly(Model())
    actual = train(model, ignored, **options)
    assert_same(actual, expected)


@crossed(told=["both-False"], what=["nothing", "both"], is_distributed=[True, False])
def test_on_two_ranks(what: str, is_distributed: bool) -> None:
    run_ranks(on_ranks, 2, IGNORED[what], {"enable_distributed_storage": is_distributed})


def test_a_state_dict_goes_back_in() -> None:
    source, model = Model(), Model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter))
    module = ElixirModule(model, make_plan(model, placement_policy="cpu"), ignored=["head", "blocks.3"])
    module.load_state_dict(source.state_dict())
    state = module.state_dict()
    assert [k for k, v in source.state_dict().items() if not torch.equal(bits(state[k]), bits(v))] == []
    module.close()


def test_mixed_precision_leaves_integers_and_what_is_ignored_alone() -> None:
    model = Model()
    plan = make_plan(model, placement_policy="cpu", compute_dtype=torch.bfloat16)
    module = ElixirModule(model, plan, dtype=torch.bfloat16, ignored="head", autocast=True)
    dtypes = {m.fqn: c.dtype for c in module.plan.chunks for m in c.members}
    assert dtypes["blocks.0.base"] == "uint8"
    assert dtypes["blocks.3.base"] == "float8_e4m3fn"
    assert dtypes["embed.weight"] == "bfloat16"
    assert model.head.weight.dtype is torch.float32
    loss = module(batch(0, 0)).float().square().mean()
    optimizer = ElixirOptimizer(module, HybridAdam(model.parameters(), lr=1e-2))
    optimizer.backward(loss)
    assert model.head.weight.grad is not None
    optimizer.step()
    module.close()


def test_samples_are_of_what_plans_place() -> None:
    model = Model()
    module = ElixirModule(model, make_plan(model, placement_policy="cpu"), ignored="head")
    module.sample_activations()
    optimizer = ElixirOptimizer(module, HybridAdam(p for p in model.parameters() if p.requires_grad))
    for _ in range(2):  # the first one's trace is not known before it ends
        optimizer.backward(module(batch(0, 0)).float().square().mean())
        optimizer.step()
    profile = module.engine.step_profile()
    assert profile is not None
    trained = {c.id for c in module.plan.chunks if c.requires_grad}
    assert {chunk for interval in profile.intervals for chunk in interval.grads} == trained
    module.close()


def test_what_is_ignored_is_counted() -> None:
    model = Model()
    limit = 100_000
    without = make_plan(model, placement_policy="auto", gpu_bytes=limit)
    ignored = ignored_parameters(model, "head")
    plan = make_plan(model, placement_policy="auto", gpu_bytes=limit, ignored=ignored)
    beside = int(plan.notes["ignored_bytes"])
    assert beside >= 16 * WIDTH * WIDTH  # parameter, gradient, two states
    assert plan.forecast is not None
    assert plan.forecast.peak_gpu_bytes <= limit
    assert int(plan.notes["non_model_bytes"]) == beside + int(without.notes["non_model_bytes"])
    assert plan_from_dict(plan_to_dict(plan)) == plan
    assert "2 parameters in no chunk (2 trained)" in plan.explain()


@pytest.mark.parametrize("policy", ["auto", "cpu"])
def test_what_is_ignored_is_no_activation_where_memory_is_short(policy: str) -> None:
    model = Model()
    with pytest.raises(CapacityError) as caught:
        make_plan(model, placement_policy=policy, gpu_bytes=20_000, ignored=ignored_parameters(model, "head"))
    told = re.search(r"stay out of chunks \(ignored\) ([0-9.]+) KiB\)", str(caught.value))
    assert told is not None, caught.value
    assert float(told[1]) * 1024 >= 16 * WIDTH * WIDTH
    assert "batch" not in str(caught.value)


REFUSED: dict[str, tuple[Any, str]] = {
    "no such name": ("hed", "ignored: 'hed' is the name of no parameter.* did you mean 'head'"),
    "no such class": (nn.Conv2d, "ignored: the model has no module of class Conv2d"),
    "a number": (3, "ignored takes names of parameters or modules"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_mistakes(name: str) -> None:
    model, (ignored, message) = Model(), REFUSED[name]
    with pytest.raises(PlanError, match=message):
        ElixirModule(model, make_plan(model, placement_policy="cpu"), ignored=ignored)


def test_what_is_ignored_cannot_be_unfrozen() -> None:
    model = Model()
    module = ElixirModule(model, make_plan(model, placement_policy="cpu"), ignored="blocks.4.base")
    model.blocks[4].base.requires_grad_(True)
    with pytest.raises(StateError, match="frozen when the model was set up"):
        ElixirOptimizer(module, HybridAdam(model.parameters(), lr=1e-2))
    module.close()


def test_copies_and_pickles() -> None:
    model = Model()
    expected = {k: v.clone() for k, v in model.state_dict().items()}
    module = ElixirModule(model, make_plan(model, placement_policy="cpu"), ignored=["head", "blocks.0"])
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for copied in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        state = copied.state_dict()
        assert [k for k, v in expected.items() if not torch.equal(bits(state[k]), bits(v))] == []
    module.close()

"""Patterns into models, and out again."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_elixir.errors import PlanError, StateError
from lightning_elixir.patterns import Column, Expert, ParallelPattern, Row, Vocabulary
from lightning_elixir.patterns.apply import pattern_forwards, put_in, take_out
from lightning_elixir.patterns.cuts import cuts_of
from lightning_elixir.patterns.placed import Placed
from lightning_elixir.plan.mesh import AxisCut, Mesh
from lightning_elixir.profiling.fake_step import profile_memory
from lightning_elixir.wrapper import ElixirModule
from tests.helpers.pattern_fits import make
from tests.helpers.patterns import Case, Experts, Language
from tests.helpers.plans import make_plan


def pair() -> nn.Module:
    return nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)})


def test_in_and_out_leaves_a_model_as_it_was() -> None:
    model = Case(options={"is_tied": True}).make()
    before = dict(model.named_parameters())
    twice = copy.deepcopy(model.state_dict())
    for tensor, expert in ((2, 2), (4, 1), (2, 1)):
        put_in(model, Case().patterns, Mesh(4, tensor, expert), 3)
    assert cuts_of(model.layers[0].attention.q.weight) == (AxisCut("tensor", 0),)
    assert model.head.weight is model.embedding.weight
    assert model.embedding.num_embeddings == 12
    take_out(model)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert all(torch.equal(value, twice[name]) for name, value in model.state_dict().items())
    assert not list(pattern_forwards(model))
    assert model.embedding.num_embeddings == 24


def test_what_was_cut_between_processes_that_are_gone_is_refused_without_a_strategy_too() -> None:
    model = pair()
    plan = make_plan(model, placement_policy="cpu")
    vars(model["up"])["_elixir_placed"] = pickle.loads(pickle.dumps(Placed(None, {})))
    with pytest.raises(PlanError, match="up between processes that are not connected"):
        ElixirModule(model, plan)


def test_an_axis_of_one_rank_changes_nothing() -> None:
    model = Case().make()
    before = list(model.parameters())
    put_in(model, Case().patterns, Mesh(2), 0)
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))


def test_without_an_engine_there_is_nobody_to_talk_to() -> None:
    model = pair()
    put_in(model, {"down": Row(splits=True)}, Mesh(2, 2), 0)
    with pytest.raises(StateError, match="no engine connects the ranks"):
        model["down"].forward(torch.randn(2, 16))


def test_foreseen_steps_have_the_right_shapes() -> None:
    model = Case(options={"is_tied": True}).make()
    put_in(model, Case().patterns, Mesh(4, 2, 2), 0)
    model.to("meta")
    x = torch.empty(2, 8, 16, device="meta")
    assert model.layers[0](x).shape == x.shape
    assert model.layers[0].attention(x).shape == x.shape


class Alike(nn.Module):
    """Experts that all do the same, without looking at values."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, 1))

    def forward(self, tokens: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        return tokens * weights.sum(1, keepdim=True) * self.scale[0]


def test_foreseen_steps_count_the_rows_that_travel() -> None:
    """Once to each rank: two of four experts are on one rank in a third of all cases. On their way a rank has what it
    sends and what it gets, and so on the way back."""
    model, told = nn.ModuleDict({"experts": Alike()}), []
    put_in(model, {"experts": Expert()}, Mesh(2, 1, 2), 0)
    next(pattern_forwards(model)).peers.listen(lambda *exchange: told.append(exchange))
    tokens, chosen = torch.randn(1536, 16), torch.randint(0, 4, (1536, 2))

    def step(model: Any, given: Any) -> None:
        model["experts"](given["x"].requires_grad_(), given["at"], torch.full((1536, 2), 1 / 2)).sum().backward()

    profile = profile_memory(model, {"x": tokens, "at": chosen}, step)
    rows_bytes = tokens.nbytes * 5 // 3
    assert profile.activation_bytes >= 2 * rows_bytes
    assert told == [("expert", "rows", rows_bytes, at) for at in ("experts", "experts", "", "")]


class LargestIntegers(TorchDispatchMode):
    """Bytes of the largest result of integers."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = [t.nbytes for t in tree_leaves(result) if isinstance(t, Tensor) and not t.is_floating_point()]
        self.nbytes = max(self.nbytes, *found, 0)
        return result


def test_numbers_of_experts_are_there_for_as_many_rows_as_can_go() -> None:
    """A token of two experts goes to two ranks at most, however many there are."""
    model = nn.ModuleDict({"experts": Alike()})
    put_in(model, {"experts": Expert()}, Mesh(4, 1, 4), 0)
    tokens, weights = torch.empty(64, 16, device="meta"), torch.empty(64, 2, device="meta")
    with LargestIntegers() as largest:
        model.to("meta")["experts"](tokens, torch.empty(64, 2, dtype=torch.int64, device="meta"), weights)
    assert largest.nbytes <= 8 * (64 * 4 + 1)  # of tokens and ranks


@pytest.mark.parametrize(
    ("make", "patterns", "told"),
    [
        (pair, {"upp": Column()}, "no module 'upp'; close to it are up"),
        (pair, {nn.Conv2d: Column()}, "no module Conv2d"),
        (pair, {"up": Column(), "*p": Column(gathers=True)}, "has two"),
        (lambda: nn.ModuleDict({"norm": nn.LayerNorm(8)}), {"norm": Column()}, "Column is for linear layers"),
        (lambda: nn.ModuleDict({"odd": nn.Linear(8, 3)}), {"odd": Column()}, "cannot be cut into 2 equal parts"),
        (lambda: nn.ModuleDict({"conv": nn.Conv2d(1, 1, 1)}), {"conv": Vocabulary()}, "Vocabulary is for"),
        (lambda: Language(is_tied=True), {"head": Vocabulary()}, "give both"),
        (lambda: Language(is_tied=True), {"head": Row(), "embedding": Vocabulary()}, "cut in two ways"),
        (
            lambda: nn.ModuleDict({"tokens": nn.Embedding(8, 4, scale_grad_by_freq=True)}),
            {"tokens": Vocabulary()},
            "tokens: .* scale_grad_by_freq=True: make it with scale_grad_by_freq=False",
        ),
        (
            lambda: nn.ModuleDict({"tokens": nn.Embedding(8, 4, max_norm=1.0)}),
            {"tokens": Vocabulary()},
            "tokens: .* max_norm=1.0: make it with max_norm=None",
        ),
        (lambda: nn.CrossEntropyLoss(label_smoothing=0.1), {nn.CrossEntropyLoss: Vocabulary()}, "label_smoothing"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(make: Any, patterns: Any, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        put_in(make(), patterns, Mesh(2, 2), 0)


class Dense(nn.Module):
    """All experts over all tokens, as those of Llama 4."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 8, 8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.bmm(tokens.view(4, -1, 8), self.weight).view(-1, 8)


class Bmm(Expert):
    def forward(self, module: Any, compute: Any, peers: Any, args: Any, kwargs: Any) -> Any:
        return compute(*args)


def test_experts_that_are_called_in_another_way_are_refused_before_a_step() -> None:
    with pytest.raises(PlanError, match=r"experts: Expert is .* and Dense is called with \(tokens\)"):
        put_in(nn.ModuleDict({"experts": Dense()}), {"experts": Expert()}, Mesh(2, expert=2), 0)
    model = nn.ModuleDict({"experts": Dense()})
    put_in(model, {"experts": Bmm()}, Mesh(2, expert=2), 0)
    assert model["experts"].weight.shape == (2, 8, 8)


def test_experts_that_are_modules_of_their_own_are_refused() -> None:
    experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    with pytest.raises(PlanError, match="put the experts' weights into one parameter"):
        put_in(nn.ModuleDict({"experts": experts}), {"experts": Expert()}, Mesh(2, 1, 2), 0)


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 8, 8)), nn.Parameter(torch.randn(4, 8))


@pytest.mark.parametrize(
    ("experts", "kind", "told"),
    [
        (Biased, "LoraConfig", "peft has adapted bias as one matrix"),
        (lambda: nn.Linear(8, 8), "IA3Config", "with plain LoRA over their parameters"),
    ],
    ids=["of_two_dimensions", "of_another_kind"],
)
def test_adapters_of_experts_that_cannot_go_with_them_are_refused(experts: Any, kind: str, told: str) -> None:
    peft = pytest.importorskip("peft")
    model = nn.ModuleDict({"experts": experts()})
    config = getattr(peft, kind)(
        **(
            {"target_parameters": ["experts.bias"]}
            if kind == "LoraConfig"
            else {"target_modules": ["experts"], "feedforward_modules": ["experts"]}
        )
    )
    with pytest.raises(PlanError, match=told):
        put_in(peft.inject_adapter_in_model(config, model), {"experts": Expert()}, Mesh(2, 1, 2), 0)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_a_class_means_the_wrappers_that_peft_has_put_around() -> None:
    model = make("lora_of_experts")
    by_class = {type(m) for m in model.modules() if type(m).__name__ == "Qwen3MoeExperts"}
    if not by_class:
        pytest.skip("transformers has experts in one parameter from 5 on")
    put_in(model, {"*.experts": Expert()}, Mesh(2, 1, 2), 0)
    expected = [(id(forward.module), type(forward.pattern)) for forward in pattern_forwards(model)]
    take_out(model)
    put_in(model, {by_class.pop(): Expert()}, Mesh(2, 1, 2), 0)
    assert [(id(forward.module), type(forward.pattern)) for forward in pattern_forwards(model)] == expected
    assert len(expected) > 1


class Late(ParallelPattern):
    def cuts(self, module: nn.Module) -> dict[str, int]:
        return {"bias": 0}


def test_a_pattern_that_cuts_what_is_not_there() -> None:
    model = nn.ModuleDict({"up": nn.Linear(8, 16, bias=False)})
    with pytest.raises(PlanError, match="cuts a parameter bias, which is not there"):
        put_in(model, {"up": Late()}, Mesh(2, 2), 0)


def test_arguments_by_name_come_by_position() -> None:
    seen: list[Any] = []

    class Looks(ParallelPattern):
        def inputs(self, args: Any, kwargs: Any, peers: Any) -> Any:
            seen.append((len(args), kwargs))
            return args, kwargs

    model = nn.ModuleDict({"experts": Experts()})
    put_in(model, {"experts": Looks()}, Mesh(2, 2), 0)
    tokens, numbers, weights = torch.randn(3, 16), torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1)
    result: Tensor = model["experts"](weights=weights, experts=numbers, tokens=tokens)
    assert result.shape == tokens.shape
    assert seen == [(3, {})]

"""Compiled blocks whose modules have patterns: the bits of the same ranks without the compiler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

from lightning_elixir.core.compiled_modules import compiled_regions, uncompiled_name
from lightning_elixir.errors import PlanError
from lightning_elixir.patterns import Column, Expert, ParallelPattern, Row
from lightning_elixir.patterns.apply import pattern_forwards, put_in, take_out
from lightning_elixir.plan.mesh import Mesh
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.dist import run_ranks
from tests.helpers.patterns import (
    EXPERT,
    IN_PARTS,
    TENSOR,
    TOKENS,
    WIDTH,
    Case,
    Language,
    batch,
    build,
    difference,
    train_plain,
    train_ranks,
)
from tests.helpers.plans import make_plan
from tests.helpers.tiers import telling

# Of the compiler's own code, which hides the first from users.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),
]

CLOSE = 1e-5
TIGHT = {"placement_policy": "cpu", "chunk_size": 6000}


@dataclass(frozen=True)
class Compiled(Case):
    """Blocks are compiled, or the model as a whole."""

    how: str = "call"
    backend: str = "aot_eager"

    def make(self) -> Language:
        model = super().make()
        options: dict[str, Any] = {"backend": self.backend, "fullgraph": True}
        if self.how == "whole":
            model.compile(**options)
        for index, layer in enumerate(model.layers):
            if self.how == "call":
                layer.compile(**options)
            elif self.how == "module":
                model.layers[index] = torch.compile(layer, **options)
            elif self.how == "forward":
                layer.forward = torch.compile(layer.forward, **options)
        return model

    @property
    def patterns(self) -> dict[str | type, ParallelPattern]:
        found = dict(TENSOR) if self.tensor > 1 else {}
        return found | EXPERT if self.expert > 1 else found


class InParts(Compiled):
    """Activations between blocks are in parts."""

    @property
    def patterns(self) -> dict[str | type, ParallelPattern]:
        return IN_PARTS


DENSE = {"is_mixture": False}
CASES: dict[str, tuple[int, Case]] = {
    "both": (4, Compiled(tensor=2, expert=2, plan=TIGHT, micro_batches=2, clip_norm=0.3)),
    "both_by_module": (4, Compiled(tensor=2, expert=2, plan=TIGHT, how="module")),
    "both_by_forward": (4, Compiled(tensor=2, expert=2, plan=TIGHT, how="forward")),
    "tensor": (2, Compiled(tensor=2, plan=TIGHT, options=DENSE, micro_batches=2, clip_norm=0.3)),
    "expert": (2, Compiled(expert=2, plan=TIGHT)),
    "tensor_as_a_whole": (2, Compiled(tensor=2, plan=TIGHT, options=DENSE, how="whole")),
    "tensor_in_parts": (2, InParts(tensor=2, plan=TIGHT, options=DENSE)),
    "tensor_checkpointed": (2, Compiled(tensor=2, plan=TIGHT, options={**DENSE, "is_checkpointed": True})),
    "tensor_recomputed": (2, Compiled(tensor=2, plan=TIGHT, options=DENSE, activations="recompute")),
    "tensor_frozen": (2, Compiled(tensor=2, plan=TIGHT, options=DENSE, frozen=("layers.0", "embedding"))),
    "expert_without_tokens": (4, Compiled(expert=4, plan=TIGHT, is_empty=True)),
    "expert_as_a_whole": (2, Compiled(expert=2, plan=TIGHT, how="whole")),
}


def _count(_: ElixirModule, __: object) -> tuple[int, int]:
    return sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"]


def train_compiled(case: Case) -> Any:
    torch._dynamo.reset()
    counters.clear()
    return train_ranks(case, _count)


def _without_wrappers(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("_orig_mod.", ""): value for name, value in state.items()}


@pytest.mark.parametrize("name", telling(CASES, "tensor"))
def test_as_without_the_compiler(name: str) -> None:
    world, case = CASES[name]
    uncompiled = type(case)(**{**vars(case), "how": "not"})
    losses, norms, state = train_plain(uncompiled, world // case.tensor)
    expected = run_ranks(train_ranks, world, uncompiled)
    for run, same in zip(run_ranks(train_compiled, world, case), expected, strict=True):
        assert run[:2] == same[:2]
        assert difference(_without_wrappers(run[2]), same[2]) == 0
        assert run[0] == pytest.approx(losses, abs=CLOSE)
        assert run[1] == pytest.approx(norms, abs=CLOSE)
        assert difference(same[2], state) < CLOSE
        assert (run[3]["evictions"] > 0) == (name != "tensor_as_a_whole")  # which holds all chunks at once
        num_breaks, num_graphs = run[4]
        assert num_breaks == 0
        assert num_graphs > 0


@pytest.mark.full
def test_with_inductor() -> None:
    """It rounds otherwise."""
    case = Compiled(tensor=2, plan=TIGHT, options=DENSE, backend="inductor")
    losses, norms, state = train_plain(Case(tensor=2, options=DENSE), 1)
    for run in run_ranks(train_compiled, 2, case):
        assert run[0] == pytest.approx(losses, abs=CLOSE)
        assert run[1] == pytest.approx(norms, abs=CLOSE)
        assert difference(run[2], state) < CLOSE
        assert run[4][0] == 0


def _step(module: ElixirModule, optimizer: ElixirOptimizer, number: int) -> float:
    loss = module(batch(number, 0))
    optimizer.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def several_engines() -> Any:
    """Two at once, and one after them: their losses, and how many exchanges each had."""
    torch._dynamo.reset()
    case = Compiled(tensor=2, plan=TIGHT, options=DENSE)
    first, second = build(case)[:2], build(case)[:2]
    of_first, of_second = [_step(*first, 0)], [_step(*second, 0), _step(*second, 1)]
    of_first += [_step(*first, 1), _step(*first, 2)]
    counts = first[0].engine.wire.counts, second[0].engine.wire.counts
    first[0].close()
    of_second.append(_step(*second, 2))
    second[0].close()
    third = build(case)[:2]
    of_third = [_step(*third, number) for number in range(3)]
    third[0].close()
    return (of_first, of_second, of_third), counts


@pytest.mark.full
def test_each_engine_has_its_own_exchanges() -> None:
    for losses, (of_first, of_second) in run_ranks(several_engines, 2):
        assert losses[0] == losses[1] == losses[2]
        assert 2 * of_first[0] == 3 * of_second[0]


def compiled_later() -> Any:
    """Between the second step and the third: losses, and the graphs that steps three, four and five compile."""
    torch._dynamo.reset()
    counters.clear()
    module, optimizer, _ = build(Compiled(tensor=2, expert=2, plan=TIGHT, how="not"))
    losses, graphs = [], []
    for number in range(5):
        if number == 2:
            for layer in module.module.layers:
                layer.compile(backend="aot_eager", fullgraph=True)
        losses.append(_step(module, optimizer, number))
        graphs.append(counters["stats"]["unique_graphs"])
    module.close()
    return losses, graphs, sum(counters["graph_break"].values())


@pytest.mark.full
def test_blocks_may_be_compiled_between_steps() -> None:
    expected, _, _ = run_ranks(compiled_later, 4)[0]
    for losses, graphs, num_breaks in run_ranks(compiled_later, 4):
        assert losses == expected
        assert graphs[1] == 0
        assert graphs[2] > 0
        assert graphs[4] == graphs[2]
        assert num_breaks == 0


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("how", ["call", "module", "forward", "whole"])
def test_blocks_with_experts_are_compiled_in_parts(how: str) -> None:
    model = Compiled(how=how).make()
    put_in(model, EXPERT, Mesh(2, 1, 2), 0)
    names = {id(module): uncompiled_name(name) for name, module in model.named_modules()}
    found = {names[id(region.entrance)] for region in compiled_regions(model)}
    parts = {f"layers.1.{name}" for name in ("first", "second", "attention", "feed.gate")}
    whole = {"layers.0", "embedding", "norm", "head"} if how == "whole" else {"layers.0"}
    assert found == parts | whole
    assert [type(forward.pattern) for forward in pattern_forwards(model)] == [Expert]


class Uncut(ParallelPattern):
    """Exchanges nothing."""

    axis = "tensor"

    def cuts(self, module: nn.Module) -> dict[str, int]:
        return {}


@pytest.mark.usefixtures("fresh_compiler")
def test_blocks_that_are_alike_share_a_graph() -> None:
    """Of more than eight graphs for one function the compiler makes none."""
    torch._dynamo.reset()
    model = Compiled(options={**DENSE, "layers": 3}).make()
    put_in(model, {"*.feed.up": Uncut()}, Mesh(2, 2), 0)
    before = counters["stats"]["unique_graphs"]
    for layer in model.layers:
        layer(torch.ones(1, TOKENS, WIDTH))
    assert counters["stats"]["unique_graphs"] - before == 1


@pytest.mark.usefixtures("fresh_compiler")
def test_a_forward_that_was_compiled_by_itself_is_put_back() -> None:
    model = Compiled(how="forward", options=DENSE).make()
    layer = model.layers[0]
    compiled = layer.forward
    put_in(model, {"layers.0": Uncut()}, Mesh(2, 2), 0)
    assert compiled_regions(model)[0].compiled is compiled
    take_out(model)
    assert layer.forward is compiled


@pytest.mark.usefixtures("fresh_compiler")
def test_cuda_graphs_are_refused() -> None:
    model = Case().make()
    model.layers[0].compile(mode="reduce-overhead")
    with pytest.raises(PlanError, match="Block is compiled with CUDA graphs"):
        put_in(model, {"*.attention.q": Column()}, Mesh(2, 2), 0)


@pytest.mark.usefixtures("fresh_compiler")
def test_experts_that_are_compiled_themselves_run_as_they_are() -> None:
    model = Case().make()
    model.layers[1].feed.experts = torch.compile(model.layers[1].feed.experts, backend="aot_eager")
    put_in(model, EXPERT, Mesh(2, 1, 2), 0)
    assert not compiled_regions(model)
    assert len(list(pattern_forwards(model))) == 1


def _a_layer_alone(is_compiled: bool) -> list[float]:
    """Whose forward was compiled by itself."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    if is_compiled:
        model[0].forward = torch.compile(model[0].forward, backend="aot_eager", fullgraph=True)
        model[2].compile(backend="aot_eager", fullgraph=True)
    mesh = Mesh(2, 2)
    put_in(model, {"0": Column(), "2": Row()}, mesh, dist.get_rank())
    module = ElixirModule(model, make_plan(model, mesh=mesh, placement_policy="cpu", chunk_size=200))
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for _ in range(3):
        loss = module(torch.ones(2, 8)).square().mean()
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    module.close()
    return losses


@pytest.mark.full
def test_single_layers_that_are_compiled() -> None:
    expected = run_ranks(_a_layer_alone, 2, False)
    assert run_ranks(_a_layer_alone, 2, True) == expected

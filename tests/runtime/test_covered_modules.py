"""Modules below one that brings all they need: only their begin is told of, and they do whatever else they did."""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_elixir.optim import HybridAdam
from lightning_elixir.plan.simulator.counters import simulate
from lightning_elixir.plan.types import ChunkSpec, Tier
from lightning_elixir.runtime.context_tensors import ContextTensors
from lightning_elixir.runtime.forwards import Forwards
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.plans import make_plan
from tests.helpers.tiers import crossed, full

CPU = torch.device("cpu")
WIDTH = 16
PARAMETER_BYTES = 2 * 1024  # with the padding behind it
CHUNK_BYTES = 4 * PARAMETER_BYTES  # one block


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.context: Callable[[], Any] | None = None  # of the first part
        self.context_of_last: Callable[[], Any] = nullcontext
        self.repeats = 0

    def forward(self, x: Tensor, repeat: int | None = None) -> Tensor:
        repeat = self.repeats if repeat is None else repeat
        if repeat:
            x = self(x, repeat=repeat - 1)
        if self.context is None:
            y = self.up(x)
        else:
            with self.context():
                y = self.up(x)
        with self.context_of_last():
            return x + self.down(torch.tanh(y))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.is_checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return x.square().mean()


def as_they_are() -> saved_tensors_hooks:
    """Keeps what autograd saves: a parameter as itself, so that nothing shows that its memory is still needed."""
    return saved_tensors_hooks(lambda x: x, lambda x: x)


class Training:
    """A model in chunks of which few fit, beside the same model in plain PyTorch.

    Args:
        num_parameters: In a chunk; four are a block.
        rcache_blocks: Chunks that fit.
        place: Where each chunk is.
    """

    def __init__(
        self,
        change: Callable[[Net], None] = lambda net: None,
        make: Callable[[], Net] = Net,
        num_parameters: int = 4,
        rcache_blocks: int = 2,
        place: Callable[[ChunkSpec], ChunkSpec] = lambda chunk: chunk,
    ) -> None:
        torch.manual_seed(0)
        self.net = make()
        change(self.net)
        self.plain = copy.deepcopy(self.net)
        size = num_parameters * PARAMETER_BYTES
        plan = replace(make_plan(self.net, placement_policy="cpu", chunk_size=size), rcache_blocks=rcache_blocks)
        plan = replace(plan, chunks=tuple(place(chunk) for chunk in plan.chunks))
        assert {len(c.members) for c in plan.chunks} == {num_parameters}
        inner = HybridAdam([p for p in self.net.parameters() if p.requires_grad], lr=1e-2)
        self.module = ElixirModule(self.net, plan, device=CPU)
        self.optimizer = ElixirOptimizer(self.module, inner)
        self.plain_optimizer = HybridAdam([p for p in self.plain.parameters() if p.requires_grad], lr=1e-2)
        self.num_steps = 0

    def step(self, forward: Callable[[Any, Tensor], Tensor] = lambda model, x: model(x)) -> None:
        """One of both: losses and parameters must be equal to the bit."""
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(self.num_steps))
        self.num_steps += 1
        self.plain_optimizer.zero_grad()
        expected = forward(self.plain, x)
        expected.backward()
        self.plain_optimizer.step()
        loss = forward(self.module, x)
        self.optimizer.backward(loss)
        self.optimizer.step()
        assert loss.item() == expected.item()
        actual = self.module.full_state_dict()
        assert [k for k, v in self.plain.state_dict().items() if not torch.equal(actual[k], v)] == []

    def hooks_of(self, name: str) -> tuple[int, int]:
        """How often a forward's begin is told of, and its end."""
        module = self.net.get_submodule(name)
        call: Any = module._compiled_call_impl
        begins = len(module._forward_pre_hooks) + (call is not None)
        return begins, len(module._forward_hooks) + (call is not None and call.forwards is not None)


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    """Other tests of this process may have compiled code, beside which modules keep hooks."""
    counters.clear()


@pytest.fixture
def training() -> Training:
    return Training()


def test_what_is_below_keeps_one_hook(training: Training) -> None:
    training.step()
    assert training.hooks_of("") == (1, 1)
    assert training.hooks_of("blocks.0") == (1, 0)
    assert training.hooks_of("blocks.0.up") == training.hooks_of("blocks.5.down") == (1, 0)
    training.module.reset_stats()
    training.step()
    stats = training.module.stats()
    assert stats.hits + stats.fetches <= 6 + 24  # forward by block, backward by saved weight
    assert stats.fetches + stats.prefetches > 6  # they did come and go


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_training_goes_on(is_checkpointed: bool) -> None:
    training = Training(lambda net: setattr(net, "is_checkpointed", is_checkpointed))
    for _ in range(4):
        training.step()
    assert training.hooks_of("blocks.3.up") == (1, 0)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Modules whose begin was told of."""
    modules: list[nn.Module] = []
    for name in ("enter_module", "enter_covered"):
        enter = getattr(Forwards, name)

        def seen(self: Forwards, module: nn.Module, inputs: Any = None, enter: Any = enter) -> None:
            modules.append(module)
            enter(self, module, inputs)

        monkeypatch.setattr(Forwards, name, seen)
    return modules


def of_steps(training: Training, told: list[nn.Module], num_steps: int = 1) -> list[str]:
    told.clear()
    for _ in range(num_steps):
        training.step()
    names = {module: name for name, module in training.net.named_modules()}
    return [names[module] for module in told if module is not training.net]


def test_what_needs_what_is_held_above_runs_as_it_is(told: list[nn.Module]) -> None:
    training = Training()
    training.step()
    blocks = [f"blocks.{i}" for i in range(6)]
    assert of_steps(training, told) == blocks
    training.module.engine.sample_activations(True)
    assert len(of_steps(training, told)) == 18  # what is recorded is told of as a whole
    training.module.engine.sample_activations(False)
    training.step()
    assert of_steps(training, told) == blocks
    training.module.engine.turn.was_contended = True  # another thread was seen, which may call any of them at any time
    assert len(of_steps(training, told)) == 18


def test_what_is_recomputed_is_told_of_where_it_needs_another_chunk(told: list[nn.Module]) -> None:
    training = Training(with_checkpoints)
    training.step()
    blocks = [f"blocks.{i}" for i in range(6)]
    assert of_steps(training, told) == blocks + blocks[::-1]
    training = Training(with_checkpoints, num_parameters=8)  # a chunk is two blocks
    training.step()
    assert of_steps(training, told) == [*blocks, "blocks.5", "blocks.3", "blocks.1"]


def test_a_part_of_another_block_inside_a_block() -> None:
    """Of which it is noticed at once: the chunk that it needs is not the one that is held."""

    class WithAnother(Block):
        other: Any = None

        def forward(self, x: Tensor, repeat: int | None = None) -> Tensor:
            y = super().forward(x)
            return y if self.other is None else y + self.other[0](x)

    def change(net: Net) -> None:
        net.blocks[1] = WithAnother()

    training = Training(change)
    for _ in range(3):
        training.step()
    for net in (training.net, training.plain):
        net.blocks[1].other = (net.blocks[4].down,)
    for _ in range(3):
        training.step()
        assert training.hooks_of("blocks.4.down") == (1, 0)
    assert training.module.stats().overflows == 0
    assert training.module.stats().peak_blocks <= 2


def test_hooks_of_the_user_inside_all_blocks_that_come_later(training: Training) -> None:
    """They keep views of weights, and so chunks. The first block's show it, and others' weights are not kept."""
    for _ in range(3):
        training.step()
    for net in (training.net, training.plain):
        for block in net.blocks:
            block.context = as_they_are
    for _ in range(3):
        training.step()
        assert training.hooks_of("blocks.5.up") == (1, 1)
    assert training.hooks_of("blocks.0.up") == (1, 1)
    assert training.module.stats().overflows == 0
    assert training.module.stats().peak_blocks == 2


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_ran_as_it_is_is_told_of_after_an_error(training: Training, error: type[BaseException]) -> None:
    def fail(*args: Any) -> None:
        raise error

    for _ in range(2):
        training.step()
    up = training.net.blocks[2].up
    handle = up.register_forward_hook(fail)
    with pytest.raises(error):
        training.module(torch.ones(3, WIDTH))
    handle.remove()
    assert training.hooks_of("blocks.2.up") == training.hooks_of("blocks.2.down") == (1, 0)
    for _ in range(2):
        training.step()


def test_hooks_of_the_user_inside_a_block() -> None:
    """They are inside ours there; the parameters that a block's parts save still go through ours."""
    training = Training(lambda net: setattr(net.blocks[1], "context", as_they_are))
    for _ in range(3):
        training.step()
    assert training.hooks_of("blocks.1.up") == (1, 1)
    assert training.hooks_of("blocks.1.down") == (1, 0)


def test_hooks_of_the_user_that_come_later(training: Training) -> None:
    for _ in range(2):
        training.step()
    for net in (training.net, training.plain):
        net.blocks[1].context = as_they_are
    for _ in range(3):
        training.step()
    assert training.hooks_of("blocks.1.up") == (1, 1)


def with_repeats(net: Net) -> None:
    net.blocks[1].repeats = 2


def with_checkpoints(net: Net) -> None:
    net.is_checkpointed = True


def with_hooks_inside(net: Net) -> None:
    net.blocks[1].context_of_last = as_they_are


def as_it_is(net: Net) -> None:
    pass


@pytest.mark.parametrize("change", [as_it_is, with_checkpoints, with_repeats, with_hooks_inside])
@pytest.mark.parametrize("num_parameters", [6, 3])
def test_blocks_that_lie_in_two_chunks(change: Callable[[Net], None], num_parameters: int) -> None:
    """Six parameters a chunk: the border cuts every other block between its parts. Three: it cuts a part as well, which
    needs both chunks at once, as what is recomputed does, whose saved tensors keep the chunk before."""
    rcache_blocks = 1 if num_parameters == 6 and change is not with_checkpoints else 2
    training = Training(change, num_parameters=num_parameters, rcache_blocks=rcache_blocks)
    for _ in range(4):
        training.step()
    assert training.hooks_of("blocks.4.up") == training.hooks_of("blocks.4.down") == (1, 0)
    stats = training.module.stats()
    assert stats.overflows == 0
    assert stats.evictions > 0
    engine = training.module.engine
    assert not any(engine.rcache.is_pinned(chunk.id) for chunk in engine.chunks)


class Inside(Block):
    """Recomputes its forward, not its call, so that its own hooks are outside: as layers of transformers do."""

    is_failing = False

    def forward(self, x: Tensor, repeat: int | None = None) -> Tensor:
        return checkpoint(self._compute, x, use_reentrant=False)  # type: ignore[no-any-return]

    def _compute(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if self.is_failing and torch._C._current_graph_task_id() != -1:
            raise ValueError("in backward")
        return x + self.down(torch.tanh(y))


def with_checkpoints_inside(net: Net) -> None:
    net.blocks = nn.ModuleList(Inside() for _ in range(6))


@pytest.mark.parametrize("num_parameters", [4, 6, 3])
def test_blocks_that_recompute_what_is_inside_of_them(num_parameters: int) -> None:
    training = Training(with_checkpoints_inside, num_parameters=num_parameters)
    for _ in range(3):
        training.step()
    assert training.hooks_of("blocks.1.up") == training.hooks_of("blocks.4.down") == (1, 0)
    training.module.reset_stats()
    training.step()
    stats, engine = training.module.stats(), training.module.engine
    if num_parameters == 4:
        assert stats.hits + stats.fetches <= 6 + 6  # by block, forward and again
    assert stats.overflows == 0
    assert not any(engine.rcache.is_pinned(chunk.id) for chunk in engine.chunks)
    assert not engine.forwards._frames


class Adapted(nn.Linear):
    """Frozen, with an adapter of two small matrices inside."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.requires_grad_(False)
        self.first, self.second = nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.second(self.first(x))


def with_adapters(net: Net) -> None:
    for block in net.blocks:
        block.up, block.down = Adapted(), Adapted()


def adapters_stay(chunk: ChunkSpec, optim_tier: Tier = Tier.GPU) -> ChunkSpec:
    staying = replace(chunk, param_tier=Tier.GPU, optim_tier=optim_tier, is_persistent=True)
    return staying if chunk.requires_grad else chunk


@crossed(together=1, change=[as_it_is, with_checkpoints, with_repeats, with_hooks_inside], has_states=[True, False])
def test_adapters_that_stay_beside_frozen_blocks(change: Callable[[Net], None], has_states: bool) -> None:
    """Adapters of four parameters each lie in chunks of one block's; a frozen block's own four in another.

    Args:
        has_states: Adapters are updated where they stay; if not, on the host, and the next forward waits for it.
    """

    def changed(net: Net) -> None:
        with_adapters(net)
        change(net)

    optim_tier = Tier.GPU if has_states else Tier.CPU
    training = Training(changed, place=lambda chunk: adapters_stay(chunk, optim_tier))
    for _ in range(3):
        training.step()
    training.module.reset_stats()
    training.step()
    stats, engine = training.module.stats(), training.module.engine
    trace = list(engine.traces["train"].acquires())
    frozen = [event.ids for event in trace if event.is_pinned and not engine.chunks[event.ids[0]].spec.requires_grad]
    if change is as_it_is:
        # In forward each once; before, again behind each adapter. Those that stay, once in forward, once in backward.
        assert len(frozen) == len(set(frozen)) == 6
        assert len(trace) == 18 + 34
    assert stats.misses_of_trace == stats.overflows == 0
    assert stats.fetches + stats.prefetches >= 6
    assert not any(engine.rcache.is_pinned(chunk.id) for chunk in engine.chunks)


@pytest.mark.parametrize(
    ("change", "num_parameters"), [full(as_it_is, 3), (with_repeats, 2), (with_checkpoints, 4), full(as_it_is, 6)]
)
def test_accesses_of_layers_with_adapters_are_the_same_in_each_step(
    change: Callable[[Net], None], num_parameters: int
) -> None:
    """Whether a chunk is there already, or the step is recorded, makes no difference to what the trace foresees; nor
    does a plan under which other chunks stay, once one step has shown it."""

    def changed(net: Net) -> None:
        with_adapters(net)
        change(net)

    training = Training(changed, num_parameters=num_parameters)
    engine = training.module.engine
    moving = engine.plan
    staying = replace(moving, chunks=tuple(adapters_stay(chunk) for chunk in moving.chunks))
    for plan in (moving, staying, moving, staying):
        engine.replan(plan)
        training.step()
        engine.reset_stats()
        for _ in range(2):
            training.step()
        assert engine.stats().misses_of_trace == 0


def test_an_error_where_a_block_recomputes_what_is_inside_of_it() -> None:
    training = Training(with_checkpoints_inside)
    for _ in range(2):
        training.step()
    block: Any = training.net.blocks[2]
    block.is_failing = True
    with pytest.raises(ValueError, match="in backward"):
        training.optimizer.backward(training.module(torch.ones(3, WIDTH)))
    block.is_failing = False
    assert not training.module.engine.forwards._frames
    training.optimizer.zero_grad()
    for _ in range(2):
        training.step()


class OwnUse(Block):
    """Uses a parameter of a part itself, after the forward of another one."""

    def forward(self, x: Tensor, repeat: int | None = None) -> Tensor:
        return x + F.linear(torch.tanh(self.up(x)), self.down.weight, self.down.bias)


@pytest.mark.parametrize("num_parameters", [2, 6])
def test_a_block_that_uses_what_lies_in_another_chunk_than_its_last_part(num_parameters: int) -> None:
    def change(net: Net) -> None:
        net.blocks = nn.ModuleList(OwnUse() for _ in range(6))

    training = Training(change, num_parameters=num_parameters, rcache_blocks=1)
    for _ in range(3):
        training.step()
    assert training.module.stats().overflows == 0


def stays_for(blocks: range) -> Callable[[ChunkSpec], ChunkSpec]:
    """Has the chunks of these blocks, one each, stay on the device."""
    return lambda chunk: replace(chunk, param_tier=Tier.GPU, is_persistent=chunk.id in blocks)


def test_a_layer_is_an_access_wherever_its_chunk_is() -> None:
    """At which chunks are prefetched. What the layer before has needed is not held for one that stays."""
    training, pinned = Training(place=stays_for(range(1, 4)), rcache_blocks=1), []
    engine = training.module.engine
    for index, block in enumerate(training.net.blocks):
        block.up.register_forward_hook(
            lambda *_, index=index: pinned.append(
                (index, [c.id for c in engine.chunks if engine.rcache.is_pinned(c.id)])
            )
        )
    for _ in range(3):
        pinned.clear()
        training.step()
        assert pinned == [(0, [0]), (1, []), (2, []), (3, []), (4, [4]), (5, [5])]
    engine.reset_stats()
    training.step()
    assert [event.ids for event in engine.traces["train"].acquires()][:6] == [(i,) for i in range(6)]
    assert engine.stats().misses_of_trace == engine.stats().overflows == 0


def test_a_layer_that_a_border_cuts_is_an_access_in_each_of_its_chunks(told: list[nn.Module]) -> None:
    """Its first part finds what is held for the layer before."""
    training = Training(with_checkpoints, num_parameters=6, rcache_blocks=2)
    training.step()
    parts = [name for name in of_steps(training, told) if "." in name[len("blocks.") :]]
    assert parts == [f"blocks.{i}.{part}" for i in (1, 4) for part in ("down",)] + [
        f"blocks.{i}.{part}" for i in (4, 1) for part in ("up", "down")
    ]
    trace = [event.ids for event in training.module.engine.traces["train"].acquires()]
    assert trace[:8] == [(0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,)]
    assert training.module.stats().misses_of_trace == 0


class Tied(Net):
    """Uses a weight of its first block again, between the blocks and behind them."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = F.linear(block(x), self.blocks[0].down.weight)
        return F.linear(x, self.blocks[0].up.weight).square().mean()


def test_what_a_model_uses_by_itself_finds_room() -> None:
    """What it holds for the layer that ran last goes."""
    training = Training(make=Tied, rcache_blocks=1)
    for _ in range(4):
        training.step()
    stats = training.module.stats()
    assert stats.overflows == 0
    assert stats.peak_blocks == 1


class Detaching(Net):
    """Of one block backward needs nothing."""

    detached: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = x + block(x).detach() if index == self.detached else block(x)
        return x.square().mean()


def test_a_backward_that_comes_to_another_chunk_sooner_than_foreseen() -> None:
    """Three blocks lie in a chunk, and of the accesses that are foreseen those of one do not come."""
    training = Training(make=Detaching, num_parameters=12, rcache_blocks=1)
    for _ in range(3):
        training.step()
    for net in (training.net, training.plain):
        net.detached = 3
    training.module.reset_stats()
    training.step()
    assert training.module.stats().fetches == 3
    for _ in range(3):
        training.step()


class Looking(Net):
    """Takes gradients inside its forward: a backward that reads chunks between the accesses of layers."""

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            before, x = x, block(x)
            if index % 2:
                x = x + torch.autograd.grad(x.square().sum(), before, retain_graph=True)[0].detach()
            if index == 3:
                first = self.blocks[0]
                x = x + torch.autograd.grad(first(x).square().sum(), x, retain_graph=True)[0].detach()
        return x.square().mean()


@pytest.mark.parametrize("num_parameters", [4, 6, 8, 12])
def test_backwards_between_layers(num_parameters: int) -> None:
    """What is foreseen of a row of accesses to one chunk is of no use for another chunk."""
    training = Training(make=Looking, num_parameters=num_parameters)
    for _ in range(2):
        training.step()
    training.module.reset_stats()
    training.step()
    engine = training.module.engine
    assert engine.stats().misses_of_trace == 0
    simulated = simulate(engine.plan, engine.traces["train"]).counters
    assert engine.rcache.counters == simulated


class KeptInContext(torch.autograd.Function):
    """A product with quantised weights, which are kept as bitsandbytes' functions keep them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.tensors = (weight,)
        return x @ (weight.float() / 64)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] @ (ctx.tensors[0].float() / 64).t(), None


def test_frozen_layers_are_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those of quantised values are. A class that parameters have while they are not there made all frozen ones
    look so, as those below adapters."""
    looked_at: list[Any] = []
    monkeypatch.setattr(ContextTensors, "take_out", lambda self, inputs, output: looked_at.append(output))
    training = Training(lambda net: net.blocks[1:].requires_grad_(False))
    for _ in range(2):
        training.step()
    assert training.module.stats().evictions > 0
    assert looked_at == []


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        values = torch.randint(-9, 9, (WIDTH, WIDTH), dtype=torch.int8)
        self.weight = nn.Parameter(values, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return KeptInContext.apply(x, self.weight.t().t())


class QuantisedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.block = nn.Sequential(*(Quantised() for _ in range(9)))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.first(x)).square().mean()


def test_what_a_function_keeps_of_a_part_is_let_go_behind_that_part() -> None:
    torch.manual_seed(0)
    net = QuantisedNet()
    size = 2 * PARAMETER_BYTES
    plan = replace(make_plan(net, placement_policy="cpu", chunk_size=size), rcache_blocks=1, prefetch_depth=0)
    assert sum(not chunk.requires_grad for chunk in plan.chunks) > 1
    module = ElixirModule(net, plan, device=CPU)
    optimizer = ElixirOptimizer(module, HybridAdam(net.parameters(), lr=1e-2))
    for _ in range(2):
        optimizer.backward(module(torch.ones(3, WIDTH)))
        optimizer.step()
    assert module.stats().overflows == 0


def with_a_part(model: Any, x: Tensor) -> Tensor:
    """A forward after a part of it."""
    net = model.module if isinstance(model, ElixirModule) else model
    return model(net.blocks[2].down(x))


def test_a_part_that_is_called_by_itself_later(training: Training) -> None:
    for _ in range(2):
        training.step()
    for _ in range(3):
        training.step(with_a_part)
    assert training.hooks_of("blocks.2.down") == (1, 1)


def test_a_part_that_is_always_called_by_itself() -> None:
    def only_parts(model: Any, x: Tensor) -> Tensor:
        net = model.module if isinstance(model, ElixirModule) else model
        for block in net.blocks:
            x = x + block.down(torch.tanh(block.up(x)))
        return x.square().mean()

    training = Training()
    for _ in range(3):
        training.step(only_parts)
    assert training.hooks_of("blocks.0.up") == (1, 1)


def test_a_block_that_calls_itself() -> None:
    training = Training(lambda net: setattr(net.blocks[1], "repeats", 2))
    for _ in range(3):
        training.step()
    assert not training.module.engine.forwards._frames


def test_an_error_inside_a_covered_module(training: Training) -> None:
    for _ in range(2):
        training.step()
    with pytest.raises(RuntimeError):
        training.module(torch.randn(3, WIDTH + 1))
    assert not training.module.engine.forwards._frames
    training.step()


def test_copies_are_left_alone(training: Training) -> None:
    training.step()
    copied = copy.deepcopy(training.net)
    x = torch.randn(3, WIDTH)
    copied(x).backward()
    assert copied.blocks[0].up.weight.grad is not None
    training.step()


def clone_of(module: nn.Module) -> nn.Module:
    """As meta-learning's libraries make them, and torch its replicas."""
    clone: nn.Module = module.__new__(type(module))
    vars(clone).update(vars(module))
    clone._parameters = {name: None if p is None else 2 * p.detach() for name, p in module._parameters.items()}
    clone._modules = {name: None if part is None else clone_of(part) for name, part in module._modules.items()}
    return clone


def test_clones_run_by_their_own_parameters(training: Training) -> None:
    training.step()
    x = torch.randn(3, WIDTH)
    assert torch.equal(clone_of(training.net)(x), clone_of(training.plain)(x))
    training.step()


def test_a_part_that_is_called_by_itself_before_and_after_a_replan(training: Training) -> None:
    for _ in range(2):
        training.step()
    training.step(with_a_part)
    training.module.replan(replace(training.module.engine.plan, rcache_blocks=3))
    training.step(with_a_part)
    assert training.hooks_of("blocks.2.down") == (1, 1)
    assert training.hooks_of("blocks.2.up") == (1, 0)


class Growing(Net):
    num_blocks = 5

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[: self.num_blocks]:
            x = block(x)
        return x.square().mean()


def test_blocks_that_come_later_leave_the_others_their_hooks() -> None:
    training = Training(make=Growing)
    for _ in range(2):
        training.step()
    for net in (training.net, training.plain):
        net.num_blocks = 6
    for _ in range(2):
        training.step()
    assert training.hooks_of("blocks.0.up") == training.hooks_of("blocks.5.up") == (1, 0)
    for net in (training.net, training.plain):
        net.blocks[1].context = as_they_are
    for _ in range(2):
        training.step()


class Twice(nn.Module):
    """Runs inside itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, repeat: int = 1) -> Tensor:
        if repeat:
            x = self(x, repeat=0)
        return torch.tanh(self.linear(x))


def test_a_part_that_runs_inside_itself_and_is_called_by_itself_later() -> None:
    training = Training(lambda net: setattr(net.blocks[2], "down", Twice()))
    for _ in range(2):
        training.step()
    part, above = training.net.blocks[2].down, []
    part.linear.register_forward_pre_hook(
        lambda *_: above.extend(f.module for f in training.module.engine.forwards._frames)
    )
    training.step(with_a_part)
    assert above[:2] == [part, part]  # it is still there when the inner call has returned


class GradInside(nn.Module):
    """Its parts run with gradients, whatever the caller wants."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, 2 * WIDTH), nn.LayerNorm(2 * WIDTH)  # whose weight is saved as it is
        self.kept: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            h = self.up(x)
            y = self.norm(h)
        self.kept = (h, y)
        return x + y[:, :WIDTH]


def test_parts_with_gradients_in_a_block_without() -> None:
    def change(net: Net) -> None:
        net.blocks[1] = GradInside()

    training = Training(change)
    for _ in range(2):
        training.step()
    x, found = torch.randn(3, WIDTH), []
    for net, model in ((training.net, training.module), (training.plain, training.plain)):
        with torch.no_grad():
            model(x)
        h, y = net.blocks[1].kept
        found += torch.autograd.grad(y.square().sum(), h)
        net.blocks[1].kept = h = y = None
    assert torch.equal(*found)


class Scaled(nn.Module):
    """A parameter of its own beside parts in several chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x * self.scale  # there already, with the first block: so nothing is intercepted


class NetWithScaled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Scaled(), Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            with as_they_are() if index == 1 else nullcontext():
                x = block(x)
        return x.square().mean()


def test_hooks_of_the_user_around_a_module_in_several_chunks() -> None:
    net = NetWithScaled()
    plain = copy.deepcopy(net)
    plan = replace(make_plan(net, placement_policy="cpu", chunk_size=CHUNK_BYTES), rcache_blocks=2)
    module = ElixirModule(net, plan, device=CPU)
    x = torch.randn(3, WIDTH)
    plain(x).backward()
    with module.engine.backwards.span():
        module(x).backward()
    assert torch.equal(module.full_grads()["blocks.1.scale"], plain.blocks[1].scale.grad)


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_ctrl_c_inside_a_part_that_was_called_by_itself(training: Training, way: str) -> None:
    """torch calls no hooks at a module's exit for what is no `Exception`: the region is open until somebody looks."""

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    for _ in range(2):
        training.step()
    block, x = training.net.blocks[2], torch.randn(3, WIDTH)
    loss = training.module(x) if way == "backward" else None
    handle = block.up.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        block(x)
    handle.remove()
    if loss is not None:
        training.optimizer.backward(loss)
        training.optimizer.zero_grad()
    for _ in range(3):
        training.step()
    assert not training.module.engine.forwards._frames


def test_a_part_that_catches_ctrl_c_and_goes_on(training: Training) -> None:
    """The forward that it has begun is as long as its call."""
    for _ in range(2):
        training.step()
    block, running = training.net.blocks[2], []

    def catch(*args: Any) -> None:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        training.net.blocks[4].up.weight.sum()  # intercepted, which looks whether the forward has ended
        running.extend(frame.module for frame in training.module.engine.forwards._frames)

    handle = block.up.register_forward_hook(catch)
    block(torch.ones(3, WIDTH))
    handle.remove()
    assert running == [block]
    training.step()

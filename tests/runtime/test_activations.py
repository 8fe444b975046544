"""Blocks keep, recompute or offload their activations: the same bits, and less that is kept."""

from __future__ import annotations

import copy
import random
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from lightning_elixir.errors import PlanError
from lightning_elixir.plan.activations import ActivationRequest, Fate, ModelBlock
from lightning_elixir.profiling.blocks import blocks_of
from lightning_elixir.runtime import offloading, recomputing
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.activations import FATES, PLACEMENTS, ROWS, WIDTH, Block, Pair, Stack, planned
from tests.helpers.dist import run_ranks
from tests.helpers.plans import make_plan
from tests.helpers.seeds import seed_torch
from tests.helpers.tiers import crossed, telling
from tests.helpers.training import Scheme, different_names, train_elixir, train_plain
from tests.helpers.zoo import make

# Of the compiler's own code, which hides the first from users.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),
]


@pytest.fixture
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models send all that they save."""
    monkeypatch.setattr(offloading, "LEAST_OFFLOADED_BYTES", 0)


@crossed(fate=FATES, placement=PLACEMENTS)
def test_bits_are_those_of_keeping_everything(fate: str, placement: str, device: torch.device) -> None:
    seed_torch(0)
    model = Stack()
    pair = Pair(model, planned(model, fate, **PLACEMENTS[placement]), device)
    for seed in range(3):
        pair.step(seed)
    pair.check()
    stats = pair.module.stats()
    assert (stats.evictions > 0) == (placement == "tight")
    assert (stats.recomputed_blocks > 0) == Fate(fate).is_recomputed
    # The last block's are on the device still when backward needs them.
    share = {"offload": 4 / 5, "recompute_offloaded": 4 / 5}.get(fate, 0.0)
    assert stats.activations_in_bytes == pytest.approx(share * stats.activations_out_bytes, rel=0.02)
    assert (stats.activations_out_bytes > 0) == Fate(fate).is_offloaded
    assert stats.activations_left_bytes == 0


@pytest.mark.parametrize("is_placed_anew", [False, True])
def test_what_a_recomputed_block_needs_at_once_has_room_in_chunks_of_any_size(is_placed_anew: bool) -> None:
    """Its parameters lie in several chunks, and backward keeps what was computed again until it has used it."""
    seed_torch(0)
    model = Stack()
    plan = planned(model, "recompute", prefetch=False)
    if is_placed_anew:
        plan = make_plan(model, placement_policy="cpu", prefetch=False, layout=plan)
    pair = Pair(model, plan)
    for seed in range(2):
        pair.step(seed)
    assert pair.module.stats().overflows == 0
    assert pair.module.engine.rcache.peak_blocks == plan.rcache_blocks < len(plan.chunks)
    pair.check()


ZOO = ["gpt2", "llama", "checkpoint", "checkpoint_reentrant", "branching", "frozen"]


@crossed(name=ZOO, fate=FATES[1:], accumulation=[1, 2], together=1)
def test_models_of_every_kind(name: str, fate: str, accumulation: int, everything_is_large: None) -> None:
    scheme = Scheme(micro_batches=accumulation, clip_norm=0.05, steps=2)
    options = {**PLACEMENTS["tight"], "chunk_size": 8192}
    asked = {"layers.*": fate, "up.*": fate} if name == "frozen" else fate
    run = train_elixir(name, scheme, activations=ActivationRequest.of(asked), **options)
    assert different_names(run, train_plain(name, scheme)) == []
    is_left_to_the_user = name.startswith("checkpoint")
    stats = run.engine.stats()
    assert (stats.recomputed_blocks + stats.activations_out_bytes == 0) == is_left_to_the_user
    assert stats.evictions > 0


@crossed(
    told=[
        "recompute_offloaded-attention",
        "offload-recurrent",
        "recompute-conv",
        "offload-odd",
        "recompute_offloaded-tied",
    ],
    fate=FATES[1:],
    name=["attention", "recurrent", "conv", "odd", "tied"],
)
def test_modules_that_the_user_names(name: str, fate: str, everything_is_large: None) -> None:
    """Among them parts of a storage with write counts of their own (GRU cells), and the same tensor three times
    (attention), running statistics, and modules that run twice."""
    named = {
        "attention": ["attention", "encoder"],
        "recurrent": ["lstm", "gru"],
        "conv": ["body"],
        "odd": ["twice", "big"],
        "tied": ["embed", "layers.*", "head"],
    }
    asked = ActivationRequest.of(dict.fromkeys(named[name], fate))
    run = train_elixir(name, Scheme(steps=2), activations=asked, placement_policy="cpu", chunk_size=8192)
    assert different_names(run, train_plain(name, Scheme(steps=2))) == []


@crossed(told=["offload-bf16_autocast", "recompute_offloaded-bf16"], fate=FATES[1:], scheme=["bf16", "bf16_autocast"])
def test_mixed_precision(fate: str, scheme: str, everything_is_large: None) -> None:
    how = Scheme(dtype=torch.bfloat16, autocast=scheme == "bf16_autocast", micro_batches=2, steps=2)
    asked = ActivationRequest.of(fate)
    run = train_elixir("gpt2", how, activations=asked, placement_policy="cpu", chunk_size=8192)
    assert different_names(run, train_plain("gpt2", how)) == []


@pytest.mark.parametrize("fate", ["recompute", "offload"])
def test_noise_that_is_drawn_after_it_was_saved(fate: str) -> None:
    """`nn.RReLU`, at the end of a block."""
    seed_torch(0)
    model = Stack(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RReLU()))
    pair = Pair(model, planned(model, fate))
    for seed in range(3):
        pair.step(seed)
    pair.check()


def test_different_fates_side_by_side(device: torch.device) -> None:
    seed_torch(0)
    model = Stack(depth=8)
    fates = [Fate.OFFLOAD, Fate.RECOMPUTE, Fate.KEEP, Fate.RECOMPUTE_OFFLOADED] * 2
    blocks = tuple(ModelBlock(f"blocks.{i}", fate) for i, fate in enumerate(fates))
    pair = Pair(model, replace(planned(model, "offload"), activations=blocks), device)
    for seed in range(3):
        pair.step(seed)
    pair.check()
    stats = pair.module.stats()
    assert stats.recomputed_blocks == 12
    assert 0 < stats.activations_in_bytes < stats.activations_out_bytes


class _Normed(nn.Module):
    """Writes to buffers in forward: running statistics, and the vectors of a spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def _three_steps(model: nn.Module, fate: str) -> Pair:
    """Beside plain PyTorch, to which they are equal."""
    pair = Pair(model, planned(model, fate))
    for seed in range(3):
        pair.step(seed)
    pair.check()
    return pair


@pytest.mark.parametrize("fate", FATES[1:])
def test_buffers_are_written_once(fate: str) -> None:
    seed_torch(0)
    model = Stack(_Normed, depth=3)
    _three_steps(model, fate)


class _Moody(nn.Module):
    """Computes something else in evaluation, in the middle of what is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.dropout(torch.relu(self.norm(self.up(x))), training=self.training)
        return x + torch.tanh(self.down(y))


def _evaluated(model: Any, x: Tensor) -> Tensor:
    y = model(x)
    model.eval()
    z: Tensor = y + 0.5 * model(x + 1)
    model.train()
    return z


def _with_other_parameters(model: Any, x: Tensor) -> Tensor:
    parts = model.module if isinstance(model, ElixirModule) else model
    others = {name: 1.1 * parameter for name, parameter in parts.named_parameters()}
    y: Tensor = functional_call(parts, others, (x,))
    return y


@crossed(
    told=["recompute-_evaluated", "recompute-_with_other_parameters"],
    fate=FATES[1:],
    run=[_evaluated, _with_other_parameters],
)
def test_blocks_are_recomputed_as_they_were_called(fate: str, run: Callable[[Any, Tensor], Tensor]) -> None:
    """Modes and parameters are others when backward comes."""
    seed_torch(0)
    model = Stack(_Moody, depth=3)
    pair = Pair(model, planned(model, fate))
    for seed in range(3):
        pair.step(seed, run=run)
    pair.check()
    assert (pair.module.stats().recomputed_blocks > 0) == Fate(fate).is_recomputed
    assert all(part.training for part in model.modules())


class _Drawing(nn.Module):
    """Draws numbers that torch's checkpoint knows nothing of.

    Args:
        source: What from.
    """

    def __init__(self, source: str) -> None:
        super().__init__()
        self.linear, self.source, self.num_calls = nn.Linear(WIDTH, WIDTH), source, 0
        self.generators = {"torch": torch.Generator(), "own": random.Random(2), "default_rng": np.random.default_rng(2)}
        self.own: Any = self.generators.get(source, np.random.RandomState(2))

    def forward(self, x: Tensor, *, given: Any = None) -> Tensor:
        self.num_calls += 1
        return x + torch.sin(torch.tanh(self.linear(x)) * self.drawn(x.shape, given).to(x))

    def drawn(self, shape: torch.Size, given: Any) -> Tensor:
        if self.source == "torch":
            return torch.rand(shape, generator=self.own)
        if self.source == "given":
            return torch.rand(shape, generator=given)
        if self.source == "count":
            return torch.tensor(self.num_calls % 3)
        if self.source == "numpy" or (self.source == "numpy, later" and self.num_calls > 2):
            return torch.from_numpy(np.random.standard_normal(shape))
        if self.source in ("default_rng", "RandomState"):
            return torch.from_numpy(self.own.normal(size=shape))
        return torch.tensor((self.own if self.source == "own" else random).random())


class _DrawingStack(Stack):
    """One generator for all blocks, of which they know in a forward alone."""

    def forward(self, x: Tensor) -> Tensor:
        x, given = self.inp(x), torch.Generator().manual_seed(3)
        for block in self.blocks:
            x = block(x, given=given)
        return self.out(x)


SOURCES = ["python", "numpy", "numpy, later", "torch", "given", "own", "default_rng", "RandomState", "count"]


@crossed(told=[f"recompute-{source}" for source in SOURCES], fate=["recompute", "recompute_offloaded"], source=SOURCES)
def test_blocks_draw_and_count_once(fate: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        random.seed(3)
        np.random.seed(3)
        y: Tensor = model(x)
        after.append((random.getstate(), np.random.get_state()[2]))
        return y

    after: list[tuple[Any, int]] = []
    if source == "numpy, later":
        monkeypatch.setattr(recomputing, "_LOOK_EVERY", 1)
    seed_torch(0)
    model = _DrawingStack(partial(_Drawing, source), depth=3)
    pair = Pair(model, planned(model, fate))
    for seed in range(4):
        pair.step(seed, run=run)
        assert (random.getstate(), np.random.get_state()[2]) == after[-1] == after[-2]
    pair.check()
    assert pair.module.stats().recomputed_blocks > 0
    assert {part.num_calls for part in model.modules() if isinstance(part, _Drawing)} == {4}


class _Collecting(nn.Module):
    """Keeps things in lists and the like, and computes with how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.means, self.names = nn.Linear(WIDTH, WIDTH), list[Tensor](), set[str]()
        self.sizes: defaultdict[str, list[int]] = defaultdict(list)
        self.cached: Tensor | None = None
        self.made: object = None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        if self.cached is None:
            self.cached, self.made = y.detach().mean(), object()
        self.names.add(f"made at {id(self.made)}")
        self.means.append(y.detach().mean())
        self.names.add(f"call {len(self.means)}")
        self.sizes["rows"].append(len(x))
        self.last = y.detach()
        y = y * len(self.means) / len(self.sizes["rows"]) ** 2 + self.cached / len(self.names)
        return x + torch.sin(y)  # for which all that is above has to be computed again


@pytest.mark.parametrize("fate", telling(["recompute", "recompute_offloaded"], "recompute"))
def test_what_blocks_keep_is_kept_once(fate: str) -> None:
    seed_torch(0)
    model = Stack(_Collecting, depth=3)
    pair = _three_steps(model, fate)
    assert pair.module.stats().recomputed_blocks > 0
    kept, expected = ([m for m in one.modules() if isinstance(m, _Collecting)] for one in (model, pair.plain))
    for one, other in zip(kept, expected, strict=True):
        assert torch.equal(torch.stack(one.means), torch.stack(other.means))
        assert (len(one.names), one.sizes) == (len(other.names), other.sizes)
        assert torch.equal(one.last, other.last)
        assert one.cached is not None
        assert other.cached is not None
        assert torch.equal(one.cached, other.cached)


class _Sign(Enum):
    PLUS = 1
    MINUS = -1


class _Conditions(NamedTuple):
    sign: _Sign
    shifts: tuple[Tensor, list[Tensor]]


class _Signed(_Conditions):
    def __new__(cls, shift: Tensor) -> _Signed:
        return _Conditions.__new__(cls, _Sign.MINUS, (shift, [shift]))


class _Given(nn.Module):
    """Computes with tensors that others put into it: a weight that is made elsewhere, a condition; and with an average
    that it makes in its first call, and goes on with."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.linear = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.condition: Tensor | None = None
        self.others: _Conditions | None = None
        self.last: Tensor | None = None
        del self.made.weight

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "average"):
            self.average = x.new_zeros(WIDTH)
        y = x - self.average
        self.average = self.average * 0.9 + x.detach().mean((0, 1)) * 0.1
        self.last = torch.tanh(self.made(y if self.condition is None else y * self.condition))
        if self.others is not None:
            sign, (shift, more) = self.others
            self.last = torch.tanh(self.last + shift + more[0]) * sign.value
        return x + torch.sin(self.linear(self.last))


class _Giving(Stack):
    def __init__(self) -> None:
        super().__init__(_Given, depth=3)
        self.weights, self.conditions = nn.Linear(8, WIDTH * WIDTH), nn.Embedding(2, WIDTH)
        self.codes = nn.Parameter(torch.linspace(-1, 1, 48).view(2, 3, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for weights, condition in zip(self.codes, self.conditions.weight, strict=True):
            for block, code in zip(self.blocks, weights, strict=True):
                block.made.weight, block.condition = self.weights(code).view(WIDTH, WIDTH) * 0.1, condition + 1.0
                others = _Conditions(_Sign.PLUS, (condition * 2.0, [condition * 3.0]))
                block.others = others if block.others is None else _Signed(condition)
                x = block(x)
        for block in self.blocks:
            del block.made.weight
            block.condition = block.others = None
        return self.out(x)


@pytest.mark.parametrize("fate", telling(["recompute", "recompute_offloaded"], "recompute"))
def test_what_is_put_into_blocks_is_that_of_their_forward(fate: str) -> None:
    seed_torch(0)
    model = _Giving()
    pair = _three_steps(model, fate)
    assert pair.module.stats().recomputed_blocks > 0
    kept, expected = ([m for m in one.modules() if isinstance(m, _Given)] for one in (model, pair.plain))
    for one, other in zip(kept, expected, strict=True):
        assert torch.equal(one.average, other.average)
        assert one.last is not None
        assert other.last is not None
        assert torch.equal(one.last, other.last)


class _Hooking(Stack):
    """Its blocks have hooks for one call each: their own, and those of a layer inside."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for k, block in enumerate([*self.blocks, *self.blocks], start=1):
            x = x + torch.sin(self.hooked(block, x, k / 4))
        return self.out(x)

    def hooked(self, block: Any, x: Tensor, by: float) -> Tensor:
        handles = [
            block.register_forward_pre_hook(lambda _, args: (args[0] * by,), prepend=True),
            block.up.register_forward_pre_hook(lambda _, args, kw: ((args[0] + by,), kw), with_kwargs=True),
            block.up.register_forward_hook(lambda _, args, kw, result: result * by, with_kwargs=True),
        ]
        y: Tensor = block(x)
        for handle in handles:
            handle.remove()
        return y


@pytest.mark.parametrize("fate", telling(["recompute", "recompute_offloaded"], "recompute"))
def test_hooks_around_a_call_are_there_when_it_is_recomputed(fate: str) -> None:
    seed_torch(0)
    model = _Hooking(depth=3)
    pair = _three_steps(model, fate)
    assert pair.module.stats().recomputed_blocks > 0
    left = [part._forward_hooks_with_kwargs or part._forward_pre_hooks_with_kwargs for part in model.modules()]
    assert not any(left)


class _HookingInside(Block):
    """Hooks a layer of its own: for each call, and in the first one for all to come."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        if not hasattr(self, "handle"):
            self.handle = self.up.register_forward_hook(lambda _, args, result: result * 1.5)
        once = self.up.register_forward_hook(lambda _, args, kw, result: torch.sin(result), with_kwargs=True)
        y = super().forward(x)
        once.remove()
        return y


@pytest.mark.parametrize("fate", telling(["recompute", "recompute_offloaded"], "recompute"))
def test_hooks_that_a_block_makes_are_made_once(fate: str) -> None:
    """A recomputation ends before the code that removes them."""
    seed_torch(0)
    model = Stack(_HookingInside, depth=3)
    pair = _three_steps(model, fate)
    assert pair.module.stats().recomputed_blocks > 0
    for block in model.blocks:
        assert len(block.up._forward_hooks) == 1
        assert not block.up._forward_hooks_with_kwargs


class _Showing(Block):
    """Keeps its last output."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.last = y.detach()
        return y


def test_large_tensors_that_a_block_replaces_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recomputing, "_MOST_COPIED", 16)
    model = Stack(_Showing, depth=3)
    pair = Pair(model, planned(model, "recompute"))
    shown: dict[Any, list[weakref.ref[Tensor]]] = {}
    alive: list[bool] = []

    def run(called: Any, x: Tensor) -> Tensor:
        y: Tensor = called(x)
        alive.extend(one() is not None for one in shown.get(called, ()))
        shown[called] = [weakref.ref(m.last) for m in called.modules() if isinstance(m, _Showing)]
        return y

    for seed in range(3):
        pair.step(seed, run=run)
    pair.check()
    assert len(alive) == 2 * 2 * 3  # models, steps after the first, blocks
    assert not any(alive)


class _Moved(Block):
    """Is given a tensor under one of two names."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        shift, scale = (vars(self).get(name) for name in ("shift", "scale"))
        y = x * torch.sin(scale) if shift is None else torch.sin(x) + torch.cos(x * shift)  # type: ignore[arg-type]
        return super().forward(y)


class _Moving(Stack):
    def __init__(self) -> None:
        super().__init__(_Moved, depth=2)
        self.given = nn.Parameter(torch.linspace(-1, 1, WIDTH))
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        self.num_calls += 1
        for name in ["shift", "shift" if self.num_calls < 3 else "scale"]:
            for block in self.blocks:
                vars(block)[name] = self.given * 2
                x = block(x)
                del vars(block)[name]
        return self.out(x)


def test_tensors_that_blocks_are_given_may_come_under_other_names() -> None:
    seed_torch(0)
    model = _Moving()
    pair = Pair(model, planned(model, "recompute"))
    for seed in range(5):
        pair.step(seed)
    pair.check()
    assert pair.module.stats().recomputed_blocks > 0


class _Probing(Block):
    """Keeps what is in no loss, with its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Linear(WIDTH, 4)
        self.seen: Tensor | None = None
        self.all_seen: list[Tensor] = []
        self.state: tuple[Tensor, ...] = ()

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y = super().forward(x)
        before = 0.0
        for one in () if self.seen is None else (self.seen, *self.all_seen, *self.state):
            before = before + one.detach().mean()
        self.seen = torch.tanh(self.probe(y.sin()))
        self.all_seen = [torch.tanh(self.probe(y.cos()))]
        self.state = (torch.tanh(self.probe(y)),)
        return torch.sin(y + before)


@pytest.mark.parametrize("fate", telling(["recompute", "recompute_offloaded"], "recompute"))
def test_no_call_of_a_block_holds_the_one_before(fate: str) -> None:
    seed_torch(0)
    model = Stack(_Probing, depth=2)
    pair = Pair(model, planned(model, fate))
    seen: list[weakref.ref[Tensor]] = []
    for seed in range(4):
        pair.step(seed)
        probing = [m for m in model.modules() if isinstance(m, _Probing)]
        seen += [weakref.ref(one) for m in probing for one in (m.seen, *m.all_seen, *m.state) if one is not None]
        assert sum(one() is not None for one in seen) == 6
    pair.check()
    assert pair.module.stats().recomputed_blocks > 0


class _Telling(Block):
    """Adds a loss of its own to what it is given, as mixtures of experts do, and hands on a sum."""

    def forward(self, x: Tensor, losses: list[Tensor], *, handed: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        y = super().forward(x)
        handed["sum"] = y.mean() if not handed else handed["sum"] * y.mean().cos()
        losses.append((y - x).square().mean())
        return y


class _Told(Stack):
    def __init__(self) -> None:
        super().__init__(_Telling, depth=4)
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x, self.losses = self.inp(x), []
        handed: dict[str, Tensor] = {}
        for block in self.blocks:
            x = block(x, self.losses, handed=handed)
        return self.out(x) + sum(self.losses) + handed["sum"]


@pytest.mark.parametrize("fate", FATES)
def test_what_blocks_add_to_their_arguments_is_there_once(fate: str) -> None:
    seed_torch(0)
    model = _Told()
    pair = Pair(model, planned(model, fate))
    for seed in range(3):
        pair.step(seed)
        assert len(model.losses) == len(model.blocks)
    pair.check()
    assert (pair.module.stats().recomputed_blocks > 0) == Fate(fate).is_recomputed


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(1 << 17))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        return torch.tanh(self.linear(x))


def test_a_large_buffer_that_would_be_written_twice_is_refused() -> None:
    model = Stack(_Counting, depth=2)
    module = ElixirModule(model, planned(model, "recompute"))
    with pytest.raises(PlanError, match=r"written to its buffer seen in forward.*'keep' or 'offload'"):
        module(torch.randn(4, 16))


@crossed(how=["inside", "around", "hooks", "hooks_around", "reentrant"], fate=FATES[1:], together=1)
def test_the_users_own_checkpoints_and_hooks_win(fate: str, how: str, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.numel())
        return tensor

    class Inner(Block):
        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            if how == "inside":
                result: Tensor = checkpoint(super().forward, x, use_reentrant=False)
                return result
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t) if how == "hooks" else nullcontext():
                return super().forward(x)

    class Outer(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            hooks = torch.autograd.graph.save_on_cpu() if how == "hooks_around" else nullcontext()
            for block in self.blocks:
                if how in ("around", "reentrant"):
                    x = checkpoint(block, x, use_reentrant=how == "reentrant")
                else:
                    with hooks:
                        x = block(x)
            return self.out(x)

    seed_torch(0)
    model = Outer(Inner, depth=3)
    pair = Pair(model, planned(model, fate))
    for seed in range(2):
        pair.step(seed)
    pair.check()
    stats = pair.module.stats()
    is_around = how in ("around", "hooks_around", "reentrant")
    if is_around:
        assert stats.recomputed_blocks == stats.activations_out_bytes == 0
    assert ("Inner runs under a checkpoint, or under hooks" in caplog.text) == is_around
    if how == "hooks":
        assert seen  # the user's got them, in forward or in the recomputation


@crossed(
    told=["call-recompute", "module-offload"],
    is_whole=[pytest.param(False, id="call"), pytest.param(True, id="module")],
    fate=["recompute", "offload"],
)
def test_compiled_blocks(fate: str, is_whole: bool) -> None:
    seed_torch(0)

    def build() -> nn.Module:
        seed_torch(0)
        model = Stack(depth=3)
        for i, block in enumerate(model.blocks):
            block.drop = nn.Identity()
            if is_whole:
                model.blocks[i] = torch.compile(block, backend="aot_eager")  # type: ignore[assignment]
            else:
                block.compile(backend="aot_eager")
        return model

    plain, model = build(), build()
    module = ElixirModule(model, planned(model, fate))
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.05))
    oracle = torch.optim.SGD(plain.parameters(), lr=0.05)
    for seed in range(2):
        x = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(seed))
        expected = plain(x).square().mean()
        expected.backward()
        oracle.step()
        oracle.zero_grad()
        loss = module(x).square().mean()
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(loss, expected)
    stats = module.stats()
    assert stats.recomputed_blocks == (6 if fate == "recompute" else 0)
    assert (stats.activations_in_bytes > 0) == (fate == "offload")
    module.close()
    torch._dynamo.reset()


class _Transposed(nn.Module):
    """Saves a view of its weight, which is no parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, 256) * 0.05)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.weight.t())


def test_parameters_in_no_chunk_stay() -> None:
    seed_torch(0)
    model = Stack(_Transposed, depth=3, width=256)
    for seed, ignored in enumerate([None, "blocks.*"]):
        one = copy.deepcopy(model)
        pair = Pair(one, planned(one, "offload", placement_policy="cuda", chunk_size=1 << 20), ignored=ignored)
        pair.step(seed)
        pair.check()
        sent = pair.module.stats().activations_out_bytes
        if ignored is None:
            expected = sent
    assert sent == expected


def test_host_memory_that_is_short_leaves_the_rest_on_the_device() -> None:
    seed_torch(0)
    model = Stack()
    limit = 4 << 20
    pair = Pair(model, replace(planned(model, "offload"), activation_host_bytes=limit))
    for seed, rows in enumerate([ROWS, 2 * ROWS, ROWS]):
        pair.step(seed, rows)
        held = pair.module.stats().held_bytes["cpu_activations"]
        assert 0 < held <= limit
    pair.check()
    assert pair.module.stats().activations_left_bytes > 0


def test_a_limit_of_the_host_counts_for_what_no_plan_foresees() -> None:
    """A rank's part of the host's memory, less what chunks and states take there."""
    seed_torch(0)
    model = Stack()
    plan = planned(model, "offload")
    assert plan.activation_host_bytes is None
    pair = Pair(model, plan)
    for seed in range(2):
        pair.step(seed)
    assert pair.module.stats().activations_left_bytes == 0
    for seed, limit in enumerate((6 << 20, None), 2):
        pair.module.set_memory_limit(cpu=limit)
        pair.module.reset_stats()
        pair.step(seed, 2 * ROWS)
        stats = pair.module.stats()
        assert stats.activations_out_bytes > 0
        assert (stats.activations_left_bytes > 0) == (limit is not None)
        held = sum(nbytes for kind, nbytes in stats.held_bytes.items() if kind.startswith("cpu_"))
        assert 0 < stats.held_bytes["cpu_activations"] < held
        assert limit is None or held <= limit
    pair.check()


def test_what_the_engine_holds_beside_its_plan_counts_against_a_limit() -> None:
    model = Stack()
    pair = Pair(model, planned(model, "offload"))
    engine, limit = pair.module.engine, 8 << 20
    pair.module.set_memory_limit(cpu=limit)
    beside = 3 << 20

    class Holder:
        def held_bytes(self) -> dict[str, int]:
            return {"cpu_beside": beside}

    holder = Holder()
    pair.step(0)
    taken = engine.host_bytes()
    engine.activations.rest()
    engine.on_held_bytes(holder.held_bytes)
    pair.step(1)
    assert limit - beside < taken
    assert taken < engine.host_bytes() <= limit
    assert pair.module.stats().activations_left_bytes > 0


def test_copies_of_parametrized_blocks_are_copies_alone() -> None:
    """torch's parametrized modules copy all their attributes."""
    model = nn.Sequential(*(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)) for _ in range(2)))
    expected = model(torch.ones(2, 8))
    module = ElixirModule(model, planned(model, {"*": "recompute"}), device="cpu")
    copied = copy.deepcopy(model)
    assert all(vars(part).get("_compiled_call_impl") is None for part in copied.modules())
    module(torch.ones(2, 8)).sum().backward()
    assert torch.equal(copied(torch.ones(2, 8)), expected)
    assert module.stats().recomputed_blocks == 2
    module.close()


def test_a_limit_between_steps_gives_back_what_activations_took() -> None:
    seed_torch(0)
    model = Stack()
    pair = Pair(model, planned(model, "offload", **PLACEMENTS["resident"]))
    pair.step(0)
    before = pair.module.plan.activations
    assert pair.module.stats().held_bytes["cpu_activations"] > 0
    for seed, limit in enumerate(("600KiB", None, None), 1):
        pair.module.set_memory_limit(limit)
        assert "cpu_activations" not in pair.module.stats().held_bytes
        assert pair.module.plan.activations == before
        pair.step(seed)
        stats = pair.module.stats()
        assert stats.activations_in_bytes > 0
        assert (stats.evictions > 0) == (limit is not None)
    pair.check()


def test_host_memory_is_used_again_and_given_back() -> None:
    model = Stack()
    pair = Pair(model, planned(model, "offload"))
    pair.step(0)
    held = pair.module.stats().held_bytes["cpu_activations"]
    for seed in range(1, 3):
        pair.step(seed)
    assert pair.module.stats().held_bytes["cpu_activations"] == held
    pair.module.engine.rest()
    assert "cpu_activations" not in pair.module.stats().held_bytes


def test_graphs_that_are_kept_and_used_again() -> None:
    seed_torch(0)
    model = Stack(depth=3)
    plain = copy.deepcopy(model)
    module = ElixirModule(model, planned(model, "offload"))
    x = torch.randn(ROWS, 16)
    grads = []
    for one in (plain, module):
        seed_torch(1)
        loss = one(x).square().mean()
        torch.autograd.backward(loss, retain_graph=True)
        torch.autograd.backward(loss)
        grads.append(one)
    found = module.full_grads()
    for name, parameter in plain.named_parameters():
        assert torch.equal(found[name], parameter.grad), name
    assert not module.engine.activations.offloader._brought


def test_forwards_before_backwards_and_without() -> None:
    """Two graphs at once, one that never gets a backward, and evaluation between."""
    seed_torch(0)
    model = Stack(depth=3)

    def twice(one: Any, x: Tensor) -> Tensor:
        one(x)  # its graph goes
        with torch.no_grad():
            one(x)
        return one(x[: ROWS // 2]) + one(x[ROWS // 2 :])

    pair = Pair(model, planned(model, "offload"))
    for seed in range(2):
        pair.step(seed, run=twice)
    pair.check()
    pair.module.engine.rest()
    assert "cpu_activations" not in pair.module.stats().held_bytes


class _Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sigmoid(self.linear(x))
        z = y * y
        y.add_(1)  # which the product has saved
        return z + y


def test_writes_to_what_was_saved_are_an_error() -> None:
    model = Stack(_Writes, depth=1)
    module = ElixirModule(model, planned(model, {"blocks.0": "offload"}))
    loss = module(torch.randn(ROWS, 16)).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    module.close()


class _Odd(nn.Module):
    """Saves what must stay: a sparse tensor, a subclass, a conjugate view, what a Function keeps; and integers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", torch.ones(ROWS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = _Cube.apply(self.linear(x) * self.mask)
        dense = torch.complex(y, x).conj() * torch.complex(x, y)
        sparse = torch.eye(WIDTH).to_sparse()
        picked = torch.gather(y, 1, y.argsort(dim=1))
        return (dense.real * 0.1 + torch.sparse.mm(sparse, y.t()).t() + picked) * 0.1


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, TwoTensor(x.detach(), x.detach()))
        ctx.twice = x * 2
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, pair = ctx.saved_tensors
        assert isinstance(pair, TwoTensor)
        return grad * 1.5 * ctx.twice * (x + pair.b) * 0.5


@pytest.mark.parametrize("fate", FATES[1:])
def test_functions_and_tensors_of_other_kinds(fate: str) -> None:
    seed_torch(0)
    model = Stack(_Odd, depth=2)
    pair = Pair(model, planned(model, fate))
    for seed in range(2):
        pair.step(seed)
    pair.check()


def test_a_forward_that_raises_leaves_nothing_behind() -> None:
    class Failing(Block):
        is_failing = False

        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            y = super().forward(x)
            if self.is_failing:
                raise ValueError("here")
            return y

    seed_torch(0)
    for fate in FATES[1:]:
        model = Stack(Failing, depth=3)
        pair = Pair(model, planned(model, fate))
        pair.step(0)
        model.blocks[1].is_failing = True  # type: ignore[assignment]
        with pytest.raises(ValueError, match="here"):
            pair.module(torch.randn(ROWS, 16))
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        model.blocks[1].is_failing = False  # type: ignore[assignment]
        pair.step(1)
        pair.check()


def _one_by_one(model: Any, x: Tensor) -> Tensor:
    """The parts of a model, called by the user."""
    parts = model.module if isinstance(model, ElixirModule) else model
    x = parts.inp(x)
    for block in parts.blocks:
        x = block(x)
    result: Tensor = parts.out(x)
    return result


@crossed(
    told=["recompute_offloaded-tight", "offload-tight", "recompute-resident"],
    fate=FATES,
    placement=PLACEMENTS,
)
def test_blocks_that_are_called_one_by_one(fate: str, placement: str, device: torch.device) -> None:
    """Each is a forward of its own. What is sent still comes back ahead of need."""

    def run(model: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            model.eval()
            _one_by_one(model, x)
            model.train()
        return _one_by_one(model, x)

    seed_torch(0)
    model = Stack()
    pair = Pair(model, planned(model, fate, **PLACEMENTS[placement]), device)
    for seed in range(3):
        pair.step(seed, run=run)
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    pair.check()
    stats = pair.module.stats()
    assert (stats.recomputed_blocks, stats.activations_out_bytes) != (0, 0) or fate == "keep"
    assert stats.activations_in_bytes == pytest.approx(4 / 5 * stats.activations_out_bytes, rel=0.02)


@pytest.mark.parametrize("fate", FATES)
def test_a_block_alone_and_a_backward_that_nobody_is_told_of(fate: str) -> None:
    seed_torch(0)
    model = Stack(depth=2)
    plain = copy.deepcopy(model)
    module = ElixirModule(model, planned(model, fate))
    x = torch.randn(ROWS, WIDTH)
    for one in (plain, model):
        seed_torch(1)
        one.blocks[0](x).square().mean().backward()
    found = module.full_grads()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert {name for name, grad in found.items() if grad.any()} == set(expected)
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())
    module.close()


class _Fails(Block):
    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        y = super().forward(x)
        if self.error is not None:
            raise self.error
        return y


@crossed(
    told=["interrupt-offload", "error-recompute_offloaded"],
    error=[pytest.param(ValueError("here"), id="error"), pytest.param(KeyboardInterrupt("here"), id="interrupt")],
    fate=FATES[1:],
)
def test_a_block_alone_that_raises_leaves_nothing_behind(fate: str, error: BaseException) -> None:
    seed_torch(0)
    model = Stack(_Fails, depth=3)
    pair = Pair(model, planned(model, fate))
    pair.step(0, run=_one_by_one)
    model.blocks[1].error = error  # type: ignore[assignment]
    x = model.blocks[0](torch.randn(ROWS, WIDTH))
    with pytest.raises(type(error), match="here"):
        model.blocks[1](x)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    model.blocks[1].error = None  # type: ignore[assignment]
    pair.step(1, run=_one_by_one)
    pair.step(2)
    pair.check()


@pytest.mark.parametrize("fate", telling(FATES, "offload", "recompute"))
def test_another_thread_calls_a_block(fate: str) -> None:
    """While the one that trains is between forward and backward."""
    seed_torch(0)
    model = Stack(depth=3)
    pair = Pair(model, planned(model, fate))
    x = torch.randn(ROWS, WIDTH)
    outputs: list[Tensor] = []
    for seed in range(2):

        def run(one: Any, batch: Tensor) -> Tensor:
            output = _one_by_one(one, batch)
            parts = one.module if isinstance(one, ElixirModule) else one
            thread = threading.Thread(target=lambda: outputs.append(parts.blocks[1](x).detach()))
            thread.start()
            thread.join()
            return output

        pair.step(seed, run=run)
        plain, ours = outputs[-2:]
        assert torch.equal(plain, ours)
    pair.check()


def test_a_plan_can_change_what_becomes_of_activations() -> None:
    seed_torch(0)
    model = Stack()
    plan = planned(model, "keep")
    pair = Pair(model, plan)
    for seed, fate in enumerate(FATES):
        blocks = blocks_of(model, ActivationRequest.of(fate))
        pair.module.replan(replace(plan, activations=blocks, activation_host_bytes=None))
        pair.step(seed)
    pair.check()
    pair.module.replan(replace(plan, activations=()))
    assert {block.fate for block in pair.module.plan.activations} == {Fate(FATES[-1])}


class _Cache:
    """Of keys, as transformers' are."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []

    def get_seq_length(self, layer: int) -> int:
        return len(self.keys)


class _State:
    """Of a layer that keeps no keys, in the cache of a hybrid model (linear attention, Mamba)."""

    def __init__(self, is_filled: bool) -> None:
        self.has_previous_state = {0: is_filled}


class _StateCache(_Cache):
    """Refuses to tell a length, as transformers' caches do for such layers."""

    def __init__(self, is_filled: bool = False) -> None:
        super().__init__()
        self.layers = [_State(is_filled)]

    def get_seq_length(self, layer: int) -> int:
        raise ValueError(f"layer {layer} does not track sequence length")


class _Caching(Block):
    """Goes by all that its cache has, once it has added to it."""

    def forward(self, x: Tensor, past_key_values: _Cache | None = None, **kwargs: Any) -> Tensor:  # type: ignore[override]
        if past_key_values is not None:
            past_key_values.keys.append(x)
            x = torch.stack(past_key_values.keys).sum(0)
        return super().forward(x, **kwargs)


class _CachingStack(Stack):
    """Gives each block a cache: by its position, as transformers 4 does it in GPT-2, or by its name."""

    def __init__(self, by_name: bool, new_cache: Callable[[], _Cache] = _Cache) -> None:
        super().__init__(_Caching, depth=3)
        self.by_name = by_name
        self.new_cache = new_cache
        self.caches: list[_Cache] = []

    def forward(self, x: Tensor) -> Tensor:
        x, self.caches = self.inp(x), [self.new_cache() for _ in self.blocks]
        for block, cache in zip(self.blocks, self.caches, strict=True):
            x = block(x, past_key_values=cache) if self.by_name else block(x, cache)
        return self.out(x)


@pytest.mark.parametrize(("by_name", "new_cache"), [(False, _Cache), (True, _Cache), (True, _StateCache)])
def test_caches_are_kept_out_of_blocks(by_name: bool, new_cache: Callable[[], _Cache]) -> None:
    seed_torch(0)
    model = _CachingStack(by_name, new_cache)
    pair = Pair(model, planned(model, "recompute"))
    for seed in range(2):
        pair.step(seed)
    pair.check()
    assert [cache.keys for cache in model.caches] == [[], [], []]
    assert [len(cache.keys) for cache in pair.plain.caches] == [1, 1, 1]


def test_a_cache_that_a_later_forward_goes_on_from_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    seed_torch(0)
    kept = _Cache()
    model = _CachingStack(True)
    pair = Pair(model, planned(model, "recompute"))
    pair.step(0)
    assert "twice" not in caplog.text
    model.new_cache = lambda: kept
    for _ in range(2):
        pair.module(torch.randn(ROWS, 16))
    assert caplog.text.count("_Caching was given the same cache of keys and values twice") == 1


class _Stateful(Block):
    """Begins with the state of its last call, as transformers' RecurrentGemma does."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Tensor | None = None

    def forward(self, x: Tensor, use_cache: bool = False) -> Tensor:  # type: ignore[override]
        y = super().forward(x if self.state is None else x + self.state)
        self.state = y.detach() if use_cache else None
        return y


class _StatefulStack(Stack):
    def __init__(self) -> None:
        super().__init__(_Stateful, depth=3)
        self.has_switch_on = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x, self.has_switch_on)
        return self.out(x)


def test_switches_of_caches_that_are_given_by_position_are_off() -> None:
    seed_torch(0)
    model = _StatefulStack()
    pair = Pair(model, planned(model, "recompute"))
    model.has_switch_on = True  # not in the plain model: the numbers are those without
    for seed in range(2):
        pair.step(seed)
    pair.check()


def test_blocks_with_a_state_in_their_cache_run_as_they_are() -> None:
    seed_torch(0)
    model = _CachingStack(True, partial(_StateCache, is_filled=True))
    pair = Pair(model, planned(model, "recompute"))
    pair.step(0)
    assert [len(cache.keys) for cache in model.caches] == [1, 1, 1]
    assert pair.module.stats().recomputed_blocks == 0


def test_transformers_own_checkpointing_is_off_where_a_plan_speaks() -> None:
    model = make("gpt2_checkpoint")
    layers = model.transformer.h
    assert layers[0].gradient_checkpointing
    plan = make_plan(model, placement_policy="cuda")
    ElixirModule(model, plan).close()
    assert layers[0].gradient_checkpointing

    model = make("gpt2_checkpoint")
    layers = model.transformer.h
    module = ElixirModule(model, make_plan(model, placement_policy="cuda"), activations={"*.h.1": "keep"})
    assert [layer.gradient_checkpointing for layer in layers] == [True, False, True]
    module.close()
    assert [layer.gradient_checkpointing for layer in layers] == [True, True, True]


def test_copies_know_nothing_of_it() -> None:
    seed_torch(0)
    model = Stack()
    module = ElixirModule(model, planned(model, "recompute"))
    copied = copy.deepcopy(model)
    assert all(block._compiled_call_impl is None for block in copied.blocks)
    copied(torch.randn(8, 16)).sum().backward()
    assert module.stats().recomputed_blocks == 0
    module.close()
    assert all(block._compiled_call_impl is None for block in model.blocks)


# What can be asked for


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("sometimes", r"activations must be 'auto', 'keep', 'recompute', 'offload', .*got 'sometimes'"),
        ({"blocks.*": "auto"}, r"activations\['blocks.\*'\] must be 'keep', .*got 'auto'"),
        ({}, "or a dict from globs of blocks"),
        ({3: "keep"}, "named by a glob"),
        (7, "or a dict from globs of blocks"),
        ({"block.*": "keep"}, r"no module 'block\.\*'.*did you mean blocks.*its blocks are blocks\.0"),
        ({"blocks": "keep"}, "no module 'blocks' that can be called"),
        ({"blocks.1": "keep", "blocks.1.norm": "offload"}, r"blocks\.1\.norm lies in blocks\.1"),
        ("auto", "the given plan does not choose them"),
    ],
)
def test_what_is_refused(value: Any, message: str) -> None:
    model = Stack()
    plan = make_plan(model, placement_policy="cuda")
    with pytest.raises(PlanError, match=message):
        ElixirModule(model, plan, activations=value)


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(PlanError, match=r"no layers of one class in a list.*activations=\{"):
        planned(make("mlp"), "recompute")
    assert planned(make("mlp"), "auto").activations == ()


def test_blocks_are_found_and_named() -> None:
    model = Stack(depth=3)
    every = ["blocks.0", "blocks.1", "blocks.2"]
    keep, again = Fate.KEEP, Fate.RECOMPUTE
    asked: list[tuple[Any, dict[str, Fate]]] = [
        (None, {}),
        ("auto", dict.fromkeys(every, keep)),
        ("recompute", dict.fromkeys(every, again)),
        ({"*": "recompute"}, dict.fromkeys(every, again)),
        ({"blocks.[01]": "recompute", "*": "keep"}, {"blocks.0": again, "blocks.1": again, "blocks.2": keep}),
        ({"blocks.2.up": "recompute", "inp": "keep"}, {"inp": keep, "blocks.2.up": again}),
    ]
    for value, expected in asked:
        found = blocks_of(model, ActivationRequest.of(value))
        assert {block.name: block.fate for block in found} == expected
        assert [block.name for block in found] == sorted(expected, key=[n for n, _ in model.named_modules()].index)
    assert [b.name for b in blocks_of(make("t5"), ActivationRequest.of("keep"))] == [
        f"{side}.block.{i}" for side in ("encoder", "decoder") for i in range(2)
    ]


SCHEMES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"dtype": torch.bfloat16, "master_weights": True},
    "bf16_autocast": {"dtype": torch.bfloat16, "master_weights": True, "autocast": True},
}


def _different_on_ranks(placement: str, scheme: str, is_one_by_one: bool = False) -> list[tuple[str, str]]:
    """Fates, and names of what is not as if everything were kept; each rank has batches of its own."""
    how, rank = SCHEMES[scheme], torch.distributed.get_rank()
    options = {"compute_dtype": how.get("dtype", torch.float32), "master_weights": how.get("master_weights", False)}
    states: dict[str, dict[str, Tensor]] = {}
    for fate in FATES:
        seed_torch(0)
        model = Stack()
        plan = planned(model, fate, world_size=2, **PLACEMENTS[placement], **options)
        module = ElixirModule(model, plan, **how)
        optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.05))
        for step in range(2):
            seed_torch(2 * step + rank)
            for part in torch.randn(4 * ROWS, 16).chunk(2):
                output = _one_by_one(module, part) if is_one_by_one else module(part)
                optimizer.backward(output.float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
        stats = module.stats()
        assert (stats.evictions > 0) == (placement == "tight")
        assert (stats.recomputed_blocks > 0) == Fate(fate).is_recomputed
        assert (stats.activations_in_bytes > 0) == Fate(fate).is_offloaded
        states[fate] = copy.deepcopy(dict(module.full_state_dict(rank0_only=False)))
        module.close()
    kept = states.pop("keep")
    return [(fate, name) for fate, state in states.items() for name in kept if not torch.equal(state[name], kept[name])]


@crossed(told=["tight-bf16"], placement=PLACEMENTS, scheme=SCHEMES)
def test_two_ranks(placement: str, scheme: str) -> None:
    assert run_ranks(_different_on_ranks, 2, placement, scheme) == [[], []]


@pytest.mark.full
def test_blocks_that_two_ranks_call_one_by_one() -> None:
    assert run_ranks(_different_on_ranks, 2, "tight", "fp32", True) == [[], []]

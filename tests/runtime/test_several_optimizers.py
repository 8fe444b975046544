"""`HybridAdam` beside an optimizer that updates within its step, over parameters of the same chunks: the first one's
updates run behind the next forward all the same, and no bit depends on it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_elixir import HybridAdam
from lightning_elixir.errors import StateError
from lightning_elixir.optim.updates import FlatUpdate
from lightning_elixir.plan.types import UpdateTiming
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.accumulation import additions
from tests.helpers.dist import run_ranks
from tests.helpers.plans import make_plan
from tests.helpers.tiers import full
from tests.helpers.update_timing import slow_updates

STEPS = 5
AFTER, BEHIND = UpdateTiming.AFTER_BACKWARD, UpdateTiming.BEHIND_FORWARD
WIDTH, WORDS = 32, 64


class Net(nn.Module):
    """An embedding and a head with chunks of their own; in the others are matrices beside biases and norms."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        loss: Tensor = nn.functional.cross_entropy(self.head(h).float().flatten(0, 1), x.roll(1, 1).flatten())
        return loss


INNER: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "muon": lambda matrices: torch.optim.Muon(matrices, lr=0.02),
    "sgd": lambda matrices: torch.optim.SGD(matrices, lr=0.05, momentum=0.9),
    "adamw": lambda matrices: torch.optim.AdamW(matrices, lr=0.01, foreach=False),
}
PLACES: dict[str, dict[str, Any]] = {
    "offloaded": {"placement_policy": "cpu"},
    "whole shards": {"placement_policy": "cpu", "enable_distributed_storage": False},
    "states on the host": {"placement_policy": "const", "shard_param_frac": 0.0, "offload_optim_frac": 1.0},
    "half": {"placement_policy": "const", "offload_optim_frac": 0.5, "offload_param_frac": 0.5},
    "reusing": {"placement_policy": "cpu"},
}


@dataclass(frozen=True)
class How:
    """How to train."""

    inner: str = "muon"
    is_adam_first: bool = False
    dtype: torch.dtype = torch.bfloat16
    place: str = "offloaded"
    micro_batches: int = 1
    clip: float = 0.0
    scale: float = 0.0
    """Loss scale, which overflows once; 0: none."""
    to_none: bool = True


FP32 = How(dtype=torch.float32)
HOWS = {
    "muon first": How(),
    "adam first": How(is_adam_first=True),
    "fp32": FP32,
    "fp32 adam first": replace(FP32, is_adam_first=True),
    "sgd": How(inner="sgd"),
    "sgd fp32 adam first": replace(FP32, inner="sgd", is_adam_first=True),
    "adamw of torch": How(inner="adamw", is_adam_first=True),
    "clipped": How(clip=0.05),
    "clipped fp32 adam first": replace(FP32, clip=0.05, is_adam_first=True),
    "accumulated": How(micro_batches=3),
    "accumulated adam first": How(micro_batches=2, is_adam_first=True, clip=0.05),
    "scaled": How(scale=64.0),
    "scaled adam first": How(scale=64.0, is_adam_first=True),
    "to zero": How(to_none=False, is_adam_first=True),
    **{
        f"{place}{' adam first' * first}": How(place=place, is_adam_first=first) for place in PLACES for first in (0, 1)
    },
}


def _parts(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices of blocks, and the rest."""
    parts: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for name, parameter in model.named_parameters():
        parts[not (parameter.dim() == 2 and name.startswith("blocks"))].append(parameter)
    return parts


def _inner(model: nn.Module, how: How) -> list[torch.optim.Optimizer]:
    matrices, rest = _parts(model)
    both = [INNER[how.inner](matrices), HybridAdam(rest, lr=0.01, weight_decay=0.1)]
    return both[::-1] if how.is_adam_first else both


def _data(seed: int) -> Tensor:
    return torch.randint(WORDS, (2, 8), generator=torch.Generator().manual_seed(seed))


def _new(how: How, timing: UpdateTiming) -> tuple[ElixirModule, list[ElixirOptimizer]]:
    model = Net()
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    options = {"chunk_size": 2048 * how.dtype.itemsize, "compute_dtype": how.dtype, "world_size": world_size}
    plan = make_plan(model, **options, **PLACES[how.place])
    plan = replace(plan, update_timing=timing, grad_reuses_compute_shard=how.place == "reusing")
    module = ElixirModule(model, plan, dtype=how.dtype, device="cpu")
    module.needs_loss_scale = bool(how.scale)
    return module, [ElixirOptimizer(module, inner, initial_scale=how.scale or 1.0) for inner in _inner(model, how)]


def _step(module: ElixirModule, optimizers: list[ElixirOptimizer], how: How, number: int) -> None:
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for micro in range(how.micro_batches):
        loss = module(_data((number * how.micro_batches + micro) * world_size + rank)) / how.micro_batches
        if how.scale and number == 2:
            loss = loss * torch.inf
        optimizers[0].backward(loss)
    for optimizer in optimizers:
        if how.clip:
            optimizer.clip_grad_norm_(how.clip)
        optimizer.step()
        optimizer.zero_grad(how.to_none)


def _trained(how: How, timing: UpdateTiming) -> dict[str, Tensor]:
    """Values and states."""
    module, optimizers = _new(how, timing)
    skipped = []
    for number in range(STEPS):
        _step(module, optimizers, how, number)
        skipped.append(optimizers[0].is_step_skipped)
    assert not all(skipped)
    assert any(skipped) == bool(how.scale)
    found: dict[str, Tensor] = dict(module.full_state_dict())
    for number, optimizer in enumerate(optimizers):
        for index, state in optimizer.state_dict().get("state", {}).items():
            found |= {f"{number} {index} {key}": torch.as_tensor(value) for key, value in state.items()}
    module.close()
    return found


def _differing(got: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    assert got.keys() == expected.keys()
    return [name for name, value in expected.items() if not torch.equal(got[name], value)]


TOLD = ("muon first", "fp32 adam first", "sgd fp32 adam first", "accumulated", "states on the host")


@pytest.mark.parametrize("name", [name if name in TOLD else full(name) for name in HOWS])
def test_no_bit_depends_on_the_timing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _trained(HOWS[name], AFTER)
    with additions(0.01), slow_updates(monkeypatch) as threads:
        got = _trained(HOWS[name], BEHIND)
    assert threads
    assert _differing(got, expected) == []


def _plain(how: How, world_size: int = 1) -> dict[str, Tensor]:
    model = Net()
    optimizers = _inner(model, how)
    for number in range(STEPS):
        for rank in range(world_size):
            (model(_data(number * world_size + rank)) / world_size).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return dict(model.state_dict())


@pytest.mark.parametrize("name", ["fp32", full("fp32 adam first"), full("sgd fp32 adam first")])
def test_bits_of_plain_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with slow_updates(monkeypatch):
        got = _trained(HOWS[name], BEHIND)
    plain = _plain(HOWS[name])
    assert _differing({key: got[key] for key in plain}, plain) == []


def _on_ranks(how: How) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    with pytest.MonkeyPatch.context() as patch:
        expected = _trained(how, AFTER)
        with slow_updates(patch):
            return _trained(how, BEHIND), expected


ON_RANKS = ("fp32 adam first",)


@pytest.mark.parametrize("name", [name if name in ON_RANKS else full(name) for name in HOWS])
def test_no_bit_depends_on_the_timing_on_two_ranks(name: str) -> None:
    """Matrices are cut between the ranks. In fp32 they have DDP's bits, as two halves are added exactly."""
    for rank, (got, expected) in enumerate(run_ranks(_on_ranks, 2, HOWS[name])):
        assert _differing(got, expected) == []
        if rank == 0 and HOWS[name] == replace(FP32, is_adam_first=True):
            plain = _plain(HOWS[name], 2)
            assert _differing({key: got[key] for key in plain}, plain) == []


@contextmanager
def _held_if_large(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Updates of embedding and head run when the event is set; a test that would wait for them sees it set."""
    run, gate = FlatUpdate.run, threading.Event()

    def held_up(self: FlatUpdate, **options: Any) -> None:
        if self.numel == WIDTH * WORDS:
            gate.wait()
        run(self, **options)

    late = threading.Timer(20.0, gate.set)
    with monkeypatch.context() as patch:
        patch.setattr(FlatUpdate, "run", held_up)
        late.start()
        try:
            yield gate
        finally:
            late.cancel()
            gate.set()


@pytest.mark.parametrize("is_adam_first", [False, True])
@pytest.mark.parametrize("inner", ["muon", full("sgd")])
def test_steps_do_not_wait_for_what_may_run_behind_forward(
    inner: str, is_adam_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the other optimizer's step comes later, it waits for updates of chunks that both have, and no others."""
    how = How(inner=inner, is_adam_first=is_adam_first)
    module, optimizers = _new(how, BEHIND)
    store, chunks = module.engine.store, module.plan.chunks
    of_adam_alone = [c.id for c in chunks if {m.fqn for m in c.members} <= {"embed.weight", "head.weight"}]
    shared = [c.id for c in chunks if any(len(m.shape) == 2 and "blocks" in m.fqn for m in c.members)]
    assert len(of_adam_alone) == 2
    assert len(shared) == 4
    with _held_if_large(monkeypatch) as gate:
        for number in range(2):
            _step(module, optimizers, how, number)
            assert not gate.is_set()
            updates = [store[i].update for i in of_adam_alone]
            assert [update is not None and update.is_over() for update in updates] == [False, False]
            if is_adam_first:  # the other step has waited for these
                assert [store[i].update for i in shared] == [None] * len(shared)
            gate.set()
            optimizers[0].synchronize()
            gate.clear()
    module.close()


def test_a_step_that_fails_ends_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the update of another optimizer runs."""
    module, optimizers = _new(How(is_adam_first=True), BEHIND)
    optimizers[0].backward(module(_data(0)))
    with slow_updates(monkeypatch):
        optimizers[0].step()
        with monkeypatch.context() as patch:
            patch.setattr(torch.optim.Muon, "step", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                optimizers[1].step()
    with pytest.raises(StateError, match="in the middle of an optimizer step"):
        module.full_state_dict()
    module.close()


def test_states_and_placements_change_while_updates_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """States that go out and come in again, and a move, right after a step."""
    how = How(is_adam_first=True)
    expected = _trained(how, AFTER)
    module, optimizers = _new(how, BEHIND)
    plan = module.plan
    resident = replace(
        make_plan(Net(), placement_policy="cuda", chunk_size=4096, compute_dtype=how.dtype), update_timing=BEHIND
    )
    with slow_updates(monkeypatch):
        for number in range(STEPS):
            _step(module, optimizers, how, number)
            if number == 1:
                for optimizer in optimizers:
                    optimizer.load_state_dict(optimizer.state_dict())
            if number == 2:
                module.replan(resident)
            if number == 3:
                module.replan(plan)
        got = module.full_state_dict()
    module.close()
    assert _differing(dict(got), {key: expected[key] for key in got}) == []


def test_a_limit_that_changes_knows_what_is_updated_in_the_step() -> None:
    module, optimizers = _new(How(), BEHIND)
    regime = module._limited.regime
    assert regime.in_step == {f"blocks.{i}.0.weight" for i in range(4)}
    assert (regime.update_timing, regime.can_stream) == (BEHIND, False)
    module.close()

"""Activations grow beyond what the plan left to them: the rCache gives way, and the numbers stay."""

from __future__ import annotations

import gc
import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_elixir.core.device import Device
from lightning_elixir.errors import CapacityError, StateError
from lightning_elixir.plan.activations import ActivationRequest
from lightning_elixir.plan.growth_estimate import StepMemory
from lightning_elixir.plan.memory import num_grad_blocks
from lightning_elixir.plan.rcache import RCache
from lightning_elixir.plan.types import AccessTrace, Acquire, Drop
from lightning_elixir.profiling.blocks import blocks_of
from lightning_elixir.runtime.growth import Growth
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.dist import run_ranks
from tests.helpers.metered import MeteredCpuDevice, use_metered_device
from tests.helpers.plans import make_plan
from tests.helpers.tiers import crossed, telling
from tests.helpers.training import new_optimizer
from tests.helpers.zoo import gpt2
from tests.plan.problems import OFFLOADED
from tests.plan.steps import chunks_at
from tests.plan.traces import make_plan_of, unpinned

CHUNK_BYTES = 128 * 1024
LENGTHS = (16, 16, 20, 32, 40, 32, 16, 16, 16, 16, 16, 16)
# Fits the first step with everything resident, and the longest one with a few blocks.
LIMIT_BYTES = 6_100_000


def make_model(**changes: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    options = {
        "n_layer": 4, "n_embd": 128, "n_head": 2, "vocab_size": 96, "n_positions": 256,
        "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "bos_token_id": 1, "eos_token_id": 2, "loss_type": "ForCausalLM",
    }  # fmt: skip
    return GPT2LMHeadModel(GPT2Config(**{**options, **changes})).train()


def loss_of(model: Any, seed: int, length: int) -> Tensor:
    tokens = torch.randint(0, 96, (1, length), generator=torch.Generator().manual_seed(seed))
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def train_plain(lengths: Sequence[int], **changes: Any) -> dict[str, Tensor]:
    model = make_model(**changes)
    optimizer = new_optimizer(list(model.parameters()), 1e-8)
    for seed, length in enumerate(lengths):
        loss_of(model, seed, length).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


@dataclass
class Training:
    """An engine whose rCache has a block for everything, on a device with a limit."""

    module: ElixirModule
    optimizer: ElixirOptimizer
    device: MeteredCpuDevice
    budgets: list[int] = field(default_factory=list)

    @classmethod
    def of(
        cls, monkeypatch: pytest.MonkeyPatch, model: nn.Module, limit_bytes: int | None, chunk_size: int = CHUNK_BYTES
    ) -> Training:
        device = use_metered_device(monkeypatch, limit_bytes)
        plan = make_plan(model, placement_policy="cpu", chunk_size=chunk_size)
        plan = replace(plan, rcache_blocks=sum(plan.blocks_of(c.id) for c in plan.chunks))
        module = ElixirModule(model, plan)
        return cls(module, ElixirOptimizer(module, new_optimizer(list(model.parameters()), 1e-8)), device)

    def backward(self, seed: int, length: int) -> None:
        with self.device.counting():
            self.optimizer.backward(loss_of(self.module, seed, length))

    def step(self, seed: int, length: int) -> None:
        self.backward(seed, length)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.budgets.append(self.module.engine.rcache.budget_blocks)

    def assert_equal(self, expected: dict[str, Tensor]) -> None:
        actual = self.module.full_state_dict()
        assert [name for name, value in expected.items() if not torch.equal(actual[name], value)] == []
        self.module.close()

    def run(self, lengths: Sequence[int]) -> None:
        for seed, length in enumerate(lengths):
            self.step(seed, length)


# Before memory runs out


def test_the_rcache_gives_way_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training.of(monkeypatch, make_model(), LIMIT_BYTES)
    planned = training.module.plan.rcache_blocks
    training.run(LENGTHS)
    budgets = training.budgets
    assert budgets[:2] == [planned, planned]
    assert planned > budgets[2] > budgets[3] > budgets[4]
    assert budgets[5] == budgets[4]  # not at once: the next step may be long again
    assert budgets[-1] == planned
    stats = training.module.stats()
    assert stats.evictions > 0
    assert stats.overflows == 0
    assert training.device.num_give_backs == 3
    assert training.module.engine.peak_non_model_bytes_seen > 2 * training.module.peak_activation_bytes()
    training.assert_equal(train_plain(LENGTHS))


def test_without_giving_way_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training.of(monkeypatch, make_model(), LIMIT_BYTES)
    training.module.engine.set_memory_limit(None)
    with pytest.raises(torch.OutOfMemoryError):
        training.run(LENGTHS)
    training.module.close()


def test_evicted_blocks_that_stay_with_their_pool_are_of_no_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """This is what makes the test above one of giving memory back, too."""
    monkeypatch.setattr(MeteredCpuDevice, "give_back", lambda device: None)
    training = Training.of(monkeypatch, make_model(), LIMIT_BYTES)
    with pytest.raises(torch.OutOfMemoryError):
        training.run(LENGTHS)
    training.module.close()


def _checkpointed() -> nn.Module:
    model: Any = make_model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # renamed in transformers 5.20
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def test_growth_under_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = (16, 16, 64, 96, 16)
    training = Training.of(monkeypatch, _checkpointed(), 5_300_000)
    training.run(lengths)
    assert training.budgets[3] < training.budgets[2] < training.module.plan.rcache_blocks
    training.assert_equal(train_plain(lengths))


def test_steps_like_the_first_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training.of(monkeypatch, make_model(), LIMIT_BYTES)
    training.run((16, 12, 16, 14, 16, 8))
    assert set(training.budgets) == {training.module.plan.rcache_blocks}
    assert training.device.num_give_backs == 0
    training.module.close()


@pytest.mark.full
def test_what_the_user_keeps_on_the_device_is_growth_too(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training.of(monkeypatch, make_model(), LIMIT_BYTES)
    training.step(0, 16)
    training.step(1, 16)
    with training.device.counting():
        kept = torch.zeros(600_000 // 4)
    training.step(2, 16)
    assert training.budgets[-1] < training.module.plan.rcache_blocks
    del kept
    for seed in range(4):
        training.step(3 + seed, 16)
    assert training.budgets[-1] == training.module.plan.rcache_blocks
    training.assert_equal(train_plain([16] * 7))


def test_a_step_that_fits_beside_no_rcache_asks_for_another_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training.of(monkeypatch, make_model(), None)
    engine = training.module.engine
    engine.set_memory_limit(LIMIT_BYTES)  # nobody enforces it here
    for seed, length in enumerate((16, 16, 32, 64)):
        training.step(seed, length)
        assert (engine.wanted_non_model_bytes > 0) == (length == 64)
    sampled = training.module.peak_activation_bytes()
    assert engine.wanted_non_model_bytes == pytest.approx(4 * sampled, rel=0.2)
    assert engine.peak_non_model_bytes_seen >= engine.wanted_non_model_bytes
    engine.replan(training.module.plan)
    assert engine.wanted_non_model_bytes == 0
    training.step(4, 16)
    training.assert_equal(train_plain((16, 16, 32, 64, 16)))


@pytest.mark.parametrize("policy", telling(["const", "cuda"], "cuda"))
def test_gradients_on_the_device_are_no_growth(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """Micro-batches find the gradients of earlier ones there."""
    device = use_metered_device(monkeypatch, 40_000_000)
    model = make_model()
    fractions = {"offload_optim_frac": 0.5, "offload_param_frac": 0.5} if policy == "const" else {}
    module = ElixirModule(model, make_plan(model, placement_policy=policy, chunk_size=CHUNK_BYTES, **fractions))
    optimizer = ElixirOptimizer(module, new_optimizer(list(model.parameters()), 1e-8))
    module.engine.set_memory_limit(1)  # any growth would lower the budget
    for seed in range(12):
        with device.counting():
            optimizer.backward(loss_of(module, seed, 16))
        if seed % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    assert module.engine.rcache.budget_blocks == module.plan.rcache_blocks
    module.close()


def test_the_peak_is_seen_where_nothing_can_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    device = use_metered_device(monkeypatch, 100_000_000)
    model = make_model()
    module = ElixirModule(model, make_plan(model, placement_policy="cuda", chunk_size=CHUNK_BYTES))
    optimizer = ElixirOptimizer(module, new_optimizer(list(model.parameters()), 1e-8))
    seen = []
    for seed, length in enumerate((16, 64, 16)):
        with device.counting():
            optimizer.backward(loss_of(module, seed, length))
        optimizer.step()
        optimizer.zero_grad()
        seen.append(module.engine.peak_non_model_bytes_seen)
    # At least so much: the highest moment may be one with many gradients and few activations.
    assert 0 < seen[0] < 1_400_000
    assert 1_000_000 < seen[1] == seen[2] < 5_400_000
    module.close()


def _train_unequal_rank(lengths: tuple[tuple[int, ...], ...], limit_bytes: int | None) -> tuple[Any, list[int]]:
    device, rank = MeteredCpuDevice(), dist.get_rank()
    with patch("lightning_elixir.wrapper.make_device", lambda *_: device):
        model = make_model()
        plan = make_plan(model, placement_policy="cpu", chunk_size=CHUNK_BYTES, world_size=2)
        plan = replace(plan, rcache_blocks=sum(plan.blocks_of(c.id) for c in plan.chunks))
        module = ElixirModule(model, plan)
    module.engine.set_memory_limit(limit_bytes)
    optimizer = ElixirOptimizer(module, new_optimizer(list(model.parameters()), 1e-8))
    budgets = []
    for seed, length in enumerate(lengths[rank]):
        with device.counting():
            optimizer.backward(loss_of(module, 2 * seed + rank, length))
        optimizer.step()
        optimizer.zero_grad()
        budgets.append(module.engine.rcache.budget_blocks)
    state = module.full_state_dict(rank0_only=False)
    module.close()
    return state, budgets


@pytest.mark.parametrize(("world_size", "is_one_more"), [(1, False), (2, True), (3, True)])
def test_what_several_ranks_collect_gradients_in_is_not_there_for_activations(
    world_size: int, is_one_more: bool
) -> None:
    chunks = chunks_at(OFFLOADED, 8, world_size=6)
    plan = replace(make_plan_of(chunks, 8, world_size=6), world_size=world_size)
    assert num_grad_blocks(chunks, world_size) == 2 + is_one_more
    assert num_grad_blocks(chunks[:1], world_size) == 1
    block = plan.block_bytes
    # All replicas, four blocks of activations, two of gradients, and two to spare.
    device = MeteredCpuDevice(16 * block)
    growth, rcache = Growth(device), RCache.of(plan)
    growth.adopt(plan, rcache, None)
    growth.learn(StepMemory((0, 4 * block), (0, 4 * block, 4 * block), ((), (), ())), unpinned(0, 1))
    growth.begin(lambda: 0, has_earlier_grads=False)
    held = torch.empty(6 * block, dtype=torch.uint8)  # half as much again
    device.add(held)
    assert growth.look(1, 0)
    assert rcache.budget_blocks == 7 - is_one_more


def test_the_first_step_under_a_plan_with_other_accesses_is_not_taken_for_growth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the same number of accesses, such a step is further on than the one that was sampled."""
    size = 4 * CHUNK_BYTES  # a layer lies in two chunks, and is entered once where one of them stays
    training = Training.of(monkeypatch, _checkpointed(), 40_000_000, size)
    engine = training.module.engine
    training.run((16, 16, 16))
    before = len(engine.traces["train"].events)
    halves = {"offload_optim_frac": 1.0, "offload_param_frac": 0.5}
    engine.replan(make_plan(make_model(), placement_policy="const", chunk_size=size, **halves))
    engine.set_memory_limit(1)  # any growth would lower the budget
    for seed in (3, 4):
        training.step(seed, 16)
        assert engine.wanted_non_model_bytes == 0
    assert len(engine.traces["train"].events) < before
    training.step(5, 40)
    assert engine.wanted_non_model_bytes > 0
    training.assert_equal(train_plain((16, 16, 16, 16, 16, 40)))


@pytest.mark.parametrize("change", ["keep", "compile"])
def test_neither_is_one_that_keeps_what_was_recomputed_or_has_compiled_blocks(
    monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    model: Any = make_model()
    training = Training.of(monkeypatch, model, 40_000_000, 4 * CHUNK_BYTES)
    engine = training.module.engine

    def replan(fate: str) -> None:
        blocks = blocks_of(model, ActivationRequest.of(fate))
        engine.replan(replace(engine.plan, activations=blocks, activation_host_bytes=None))

    replan("recompute" if change == "keep" else "keep")
    training.run((16, 16, 16))
    if change == "keep":
        replan("keep")
    else:
        for block in model.transformer.h:
            block.compile(backend="eager")
    engine.set_memory_limit(1)  # any growth would lower the budget
    training.step(3, 16)
    assert engine.wanted_non_model_bytes == 0
    training.step(4, 64)
    assert engine.wanted_non_model_bytes > 0
    training.assert_equal(train_plain((16, 16, 16, 16, 64)))


def test_a_shortage_before_a_new_sample_leaves_what_accesses_need() -> None:
    plan = make_plan_of(chunks_at(OFFLOADED, 8), 8)
    growth, rcache = Growth(MeteredCpuDevice(16 * plan.block_bytes)), RCache.of(plan)
    growth.adopt(plan, rcache, None)
    growth.learn(StepMemory((0, 8), (0, 8, 8), ((), (), ())), AccessTrace((Acquire((0, 1, 2), True), Drop((0, 1, 2)))))
    growth.adopt(plan, rcache, None)
    growth.outdate()
    assert growth.wants_sample
    assert growth.shortage()
    assert rcache.budget_blocks == 3


@pytest.mark.full  # with ranks, what a test of one rank finds as well
def test_ranks_give_way_by_themselves() -> None:
    lengths = ((16, 16, 16, 16), (16, 16, 48, 16))
    (free, _), _ = run_ranks(_train_unequal_rank, 2, lengths, None)
    (state, first), (other, second) = run_ranks(_train_unequal_rank, 2, lengths, LIMIT_BYTES)
    assert first[0] == first[2] == second[1]
    assert second[2] < second[1]
    for name, value in free.items():
        assert torch.equal(state[name], value)
        assert torch.equal(other[name], value)


# After memory has run out


class Raise(torch.autograd.Function):
    """Runs out of memory in the forward or the backward, once."""

    armed: list[str] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if "forward" in Raise.armed:
            Raise.armed.remove("forward")
            raise torch.OutOfMemoryError("armed")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if "backward" in Raise.armed:
            Raise.armed.remove("backward")
            raise torch.OutOfMemoryError("armed")
        return grad


def arm(model: Any, block: int | None) -> None:
    """Have this layer (None: the head) run out of memory when `Raise.armed` says so."""
    layer = model.lm_head if block is None else model.transformer.h[block].mlp
    inner = layer.forward
    layer.forward = lambda x: Raise.apply(inner(x))


def again(training: Training, run: Callable[[], None]) -> bool:
    """Run, and once more if memory runs out. Returns what `make_room` said."""
    try:
        run()
    except (torch.OutOfMemoryError, CapacityError):
        pass
    else:
        pytest.fail("memory did not run out")
    gc.collect()
    result = training.module.engine.make_room()
    run()
    return result


@crossed(told=["backward-3"], where=["forward", "backward"], block=[0, 3])
def test_a_step_runs_again_after_memory_ran_out(monkeypatch: pytest.MonkeyPatch, where: str, block: int) -> None:
    model = make_model()
    arm(model, block)
    training = Training.of(monkeypatch, model, None)
    training.step(0, 16)
    training.step(1, 16)
    Raise.armed.append(where)
    assert again(training, lambda: training.backward(2, 16))
    assert training.module.engine.rcache.budget_blocks < training.module.plan.rcache_blocks
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.step(3, 16)
    training.assert_equal(train_plain([16] * 4))


@pytest.mark.full
def test_a_device_that_is_really_full(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training.of(monkeypatch, make_model(), LIMIT_BYTES)
    training.module.engine.set_memory_limit(None)
    training.step(0, 16)
    training.step(1, 16)
    assert again(training, lambda: training.backward(2, 40))
    smallest = training.module.engine.rcache.budget_blocks
    training.optimizer.step()
    training.optimizer.zero_grad()
    for seed in range(3, 22):
        training.step(seed, 16)
    assert training.budgets[-10] == (smallest + training.module.plan.rcache_blocks) // 2 > smallest
    assert training.budgets[-1] == training.module.plan.rcache_blocks
    training.assert_equal(train_plain([16, 16, 40, *[16] * 19]))


@pytest.mark.full
def test_memory_runs_out_in_every_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the limit strikes (a replica, a gradient block, an activation), the engine is usable afterwards."""
    expected = train_plain((16, 16, 16))
    for limit in itertools.count(600_000, 350_000):
        training = Training.of(monkeypatch, make_model(), None)
        training.step(0, 16)
        training.step(1, 16)
        training.module.engine.set_memory_limit(None)
        training.device.give_back()
        training.device.limit_bytes = limit
        is_full = False
        try:
            training.backward(2, 16)
        except (torch.OutOfMemoryError, CapacityError):
            is_full = True
        training.device.limit_bytes = None
        if is_full:
            gc.collect()
            training.module.engine.make_room()
            training.backward(2, 16)
        training.optimizer.step()
        training.assert_equal(expected)
        if not is_full:
            break
    assert limit > 2_000_000


def test_a_replica_takes_the_place_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no memory for a fetch, but for what was fetched before: no error, and a smaller rCache from then on."""
    training = Training.of(monkeypatch, make_model(), None)
    training.step(0, 16)
    training.step(1, 16)
    training.module.engine.set_memory_limit(None)
    training.device.give_back()
    training.device.limit_bytes = 2_400_000
    training.step(2, 16)
    assert training.budgets[-1] < training.module.plan.rcache_blocks
    training.assert_equal(train_plain((16, 16, 16)))


def test_a_parameter_that_cannot_be_fetched_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    training = Training.of(monkeypatch, model, None)
    weight: Any = model.transformer.h[0].attn.c_attn.weight
    expected = make_model().transformer.h[0].attn.c_attn.weight  # type: ignore[union-attr]
    training.device.give_back()
    training.device.limit_bytes = 1
    with pytest.raises(CapacityError, match="no device memory"):
        weight.sum()
    training.device.limit_bytes = None
    assert torch.equal(weight + 0, expected)
    assert training.module.engine.make_room()
    assert training.module.engine.rcache.used_blocks == 0
    training.step(0, 16)
    training.assert_equal(train_plain((16,)))


def test_every_allocation_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the second attempt with it: replicas that are needed, replicas that are fetched ahead, gradient blocks."""
    training = Training.of(monkeypatch, make_model(), None)
    training.module.engine.set_memory_limit(None)
    device, real = training.device, training.device.allocate
    calls, fails_at, num_again = 0, -1, 0

    def allocate(storage: torch.UntypedStorage, nbytes: int) -> None:
        nonlocal calls
        calls += 1
        if calls in (fails_at, fails_at + 1):
            raise torch.OutOfMemoryError("armed")
        real(storage, nbytes)

    monkeypatch.setattr(device, "allocate", allocate)
    num_steps = 0
    while calls >= fails_at:
        engine = training.module.engine
        engine.rcache.budget_blocks = (4, training.module.plan.rcache_blocks)[num_steps % 2]
        calls, fails_at = 0, 3 * num_steps - 1
        try:
            training.backward(num_steps, 16)
        except (torch.OutOfMemoryError, CapacityError):
            num_again += 1
            engine.make_room()
            fails_at, reached = -1, calls
            training.backward(num_steps, 16)
            fails_at = calls = reached
        training.optimizer.step()
        training.optimizer.zero_grad()
        num_steps += 1
    assert num_steps > num_again + 3 > 10
    training.assert_equal(train_plain([16] * num_steps))


@pytest.mark.parametrize("block", telling([0, None], "0"))
def test_gradients_of_earlier_micro_batches_are_kept_or_missed(
    monkeypatch: pytest.MonkeyPatch, block: int | None
) -> None:
    """Only while nothing was added to them yet can they be told from those of the backward that failed."""
    model = make_model()
    arm(model, block)
    training = Training.of(monkeypatch, model, None)
    training.step(0, 16)
    training.backward(1, 16)
    Raise.armed.append("backward")
    with pytest.raises(torch.OutOfMemoryError):
        training.backward(2, 16)
    training.module.engine.make_room()
    is_lost = block == 0  # the last layer of backward
    assert training.module.engine.has_lost_gradients == is_lost
    if is_lost:
        with pytest.raises(StateError, match=r"zero_grad\(\) and begin again"):
            training.optimizer.step()
        training.optimizer.zero_grad()
        training.backward(1, 16)
    training.backward(2, 16)
    training.optimizer.step()

    plain = make_model()
    optimizer = new_optimizer(list(plain.parameters()), 1e-8)
    for seeds in ((0,), (1, 2)):
        for seed in seeds:
            loss_of(plain, seed, 16).backward()
        optimizer.step()
        optimizer.zero_grad()
    training.assert_equal(dict(plain.state_dict()))


def test_a_bare_backward_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    arm(model, 1)
    training = Training.of(monkeypatch, model, None)
    training.step(0, 16)
    Raise.armed.append("backward")
    with pytest.raises(torch.OutOfMemoryError):
        loss_of(training.module, 1, 16).backward()
    training.module.engine.make_room()
    training.step(1, 16)
    training.assert_equal(train_plain((16, 16)))


def test_make_room_tells_whether_it_helped(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training.of(monkeypatch, make_model(), None)
    training.step(0, 16)
    engine = training.module.engine
    assert engine.make_room()
    assert not engine.make_room()
    with engine.forwards.region(), pytest.raises(StateError, match="inside forward"):
        engine.make_room()
    training.module.close()
    model = gpt2()
    resident = ElixirModule(model, make_plan(model, placement_policy="cuda"), device=torch.device("cpu"))
    assert not resident.engine.make_room()
    resident.close()


def test_the_cpu_counts_nothing_and_has_no_limit() -> None:
    from lightning_elixir.core.device import CpuDevice

    device: Device = CpuDevice()
    assert not device.is_counting
    assert device.usable_bytes() is None
    assert device.allocated_bytes() == device.peak_bytes() == device.take_peak_bytes() == 0
    device.give_back()

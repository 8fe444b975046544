"""Limits of memory that change between steps: the engine moves, memory comes free, and no number changes."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_elixir import memory_limits
from lightning_elixir.core.device import CpuDevice
from lightning_elixir.core.host_memory import Extent, HostMemory
from lightning_elixir.errors import CapacityError, PlanError, StateError
from lightning_elixir.memory_limits import KeptPlans, MemoryLimits, RankMemory, common_budget, fits
from lightning_elixir.optim import HybridAdam
from lightning_elixir.plan.device_words import DeviceWords
from lightning_elixir.plan.memory import Budget, is_on_nvme
from lightning_elixir.plan.types import Plan, UpdateTiming
from lightning_elixir.runtime import replan
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.dist import run_ranks
from tests.helpers.plans import make_plan, with_spares
from tests.helpers.tiers import telling

WIDTH, DEPTH = 64, 6
Limits = tuple[int | str | None, int | str | None]


def net() -> nn.Sequential:
    torch.manual_seed(3)
    layers = [m for _ in range(DEPTH) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 2))


def rank_and_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class Training:
    """A training that is told of limits before some of its steps."""

    def __init__(self, kind: type[torch.optim.Optimizer] = HybridAdam, device: str = "cpu", **options: Any) -> None:
        self.rank, world = rank_and_size()
        self.device = device
        dtype = options.pop("dtype", torch.float32)
        folder, spare = options.pop("folder", None), options.pop("spare", False)
        options = {"placement_policy": "cuda", "update_timing": UpdateTiming.BEHIND_FORWARD, **options}
        model = net()
        plan = make_plan(model, world_size=world, compute_dtype=dtype, chunk_size=4 * WIDTH * WIDTH + 2048, **options)
        if spare:
            plan = with_spares(plan)
        self.module = ElixirModule(model, plan, dtype=dtype, device=device, nvme_offload_dir=folder)
        self.optimizer = ElixirOptimizer(self.module, kind(model.parameters(), lr=1e-2), max_norm=0.5)
        self.number = 0

    def step(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * self.number + self.rank)
        self.number += 1
        x = torch.randn(8, WIDTH, generator=generator).to(self.device)
        loss = self.module(x).float().square().mean()
        self.optimizer.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach().cpu()

    def held(self) -> int:
        return self.module.engine.device_bytes()

    def close(self) -> dict[str, torch.Tensor]:
        state = self.module.full_state_dict(rank0_only=False)
        self.module.close()
        return state


def train(limits: dict[int, Limits], steps: int = 8, **options: Any) -> tuple[list[torch.Tensor], Any, list[int]]:
    training, losses, held, evictions = Training(**options), [], [], 0
    for number in range(steps):
        if number in limits:
            training.module.set_memory_limit(*limits[number])
        held.append(training.held())
        losses.append(training.step())
        evictions += training.module.stats().evictions  # a move begins to count anew
    assert evictions > 0 or not any(gpu for gpu, _ in limits.values())
    return losses, training.close(), held


def assert_as_if_nothing_had_happened(actual: Any, expected: Any) -> None:
    assert all(torch.equal(a, b) for a, b in zip(actual[0], expected[0], strict=True))
    assert [k for k, v in expected[1].items() if not torch.equal(actual[1][k], v)] == []


SMALL = 140 * 1024
"""Bytes: some replicas of 16 KiB and gradient blocks, where everything on the device takes 450 KiB."""
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"dtype": torch.bfloat16},
    "spares": {"dtype": torch.bfloat16, "placement_policy": "cpu", "spare": True},
    "torch's Adam": {"kind": torch.optim.Adam},
}


@pytest.mark.parametrize("way", telling(WAYS, "plain", "spares"))
def test_memory_is_given_back_and_taken_again(way: str) -> None:
    options = WAYS[way]
    expected = train({}, **options)
    limit = SMALL // 2 if "dtype" in options else SMALL
    actual = train(
        {0: (None, None), 2: (limit, None), 3: (f"{limit}B", None), 5: (2 * limit, None), 7: (None, None)}, **options
    )
    assert_as_if_nothing_had_happened(actual, expected)
    held = actual[2]
    assert max(held[2:5]) <= limit
    if options.get("placement_policy") != "cpu":
        assert min(held[1], held[7]) > limit  # everything was there, and is again


@pytest.mark.parametrize("world_size", telling([1, 2], "1"))
def test_limits_that_come_again_need_no_search(world_size: int) -> None:
    if world_size == 1:
        _come_again()
    else:
        run_ranks(_come_again, world_size)


def _come_again() -> None:
    limits: dict[int, Limits] = {2: (SMALL, None), 3: (None, None), 4: (SMALL, None), 5: (2 * SMALL, None)}
    expected, searched = train({}), []
    with pytest.MonkeyPatch.context() as patch:
        found = memory_limits.place_anew

        def place_anew(*args: Any) -> Plan:
            searched.append(args)
            return found(*args)

        patch.setattr(memory_limits, "place_anew", place_anew)
        actual = train(limits)
    assert_as_if_nothing_had_happened(actual, expected)
    assert actual[2][2] == actual[2][4] <= SMALL
    assert len(searched) == (2 if rank_and_size()[0] == 0 else 0)


def test_what_plans_of_earlier_limits_are_kept_for() -> None:
    plan, limits, about = make_plan(net(), placement_policy="cpu"), MemoryLimits(gpu_bytes=SMALL), "a regime"
    then = Budget(SMALL, 1000, 0)
    kept = KeptPlans()
    kept.add(limits, plan, then, about)
    assert kept.get(limits, then, about) is plan
    assert kept.get(limits, Budget(SMALL, 900, 0), about) is plan
    assert kept.get(limits, Budget(SMALL, 1100, 0), about) is None  # a search may find a better one
    assert kept.get(limits, Budget(SMALL // 2, 1000, 0), about) is None
    assert kept.get(limits, then, "another regime") is None
    assert kept.get(MemoryLimits(), then, about) is None
    for number in range(20):
        kept.add(MemoryLimits(cpu_bytes=number), plan, then, about)
    assert kept.get(limits, then, about) is None
    assert kept.get(MemoryLimits(cpu_bytes=19), then, about) is plan


def test_a_plan_that_needs_a_disk_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(placement_policy="cpu", folder="states")
    training.step()
    free = memory_limits.available_host_bytes
    monkeypatch.setattr(memory_limits, "available_host_bytes", lambda: 0)
    training.module.set_memory_limit(SMALL, 350 * 1024)
    assert any(is_on_nvme(chunk) for chunk in training.module.plan.chunks)
    training.step()
    monkeypatch.setattr(memory_limits, "available_host_bytes", free)
    training.module.set_memory_limit(SMALL)
    assert not any(is_on_nvme(chunk) for chunk in training.module.plan.chunks)
    training.module.close()


def test_a_plan_of_earlier_limits_is_left_where_it_does_not_fit_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    training.step()
    training.module.set_memory_limit(SMALL)
    earlier = training.module.plan
    training.module.set_memory_limit()
    monkeypatch.setattr(memory_limits, "fits", lambda plan, *rest: plan != earlier and fits(plan, *rest))
    monkeypatch.setattr(memory_limits, "place_anew", lambda *args: pytest.fail("a search"))
    with pytest.raises(pytest.fail.Exception, match="a search"):
        training.module.set_memory_limit(SMALL)


@pytest.mark.parametrize("way", ["plain", "bf16", "torch's Adam"])
def test_threads_make_and_free_what_a_move_takes(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that comes to host memory has been made ahead, and nothing is left over; what leaves it is freed by them,
    before the call returns."""
    monkeypatch.setattr(replan, "_WORTH_A_THREAD_BYTES", 1)
    expected, training = train({}, **WAYS[way]), Training(**WAYS[way])
    memory, losses = training.module.engine.host_memory, [training.step(), training.step()]
    made: list[bool] = []
    taken = HostMemory._taken
    monkeypatch.setattr(
        HostMemory, "_taken", lambda self, extent: made.append((piece := taken(self, extent)) is not None) or piece
    )
    training.module.set_memory_limit(SMALL // 2)
    assert len(made) >= 6
    assert all(made) or "Adam" in way  # torch's own states are not known ahead
    assert memory.bytes_ahead() == 0
    losses += [training.step()]
    store = training.module.engine.store
    there = [weakref.ref(m) for c in training.module.plan.chunks if (m := store[c.id].param) is not None]
    assert there
    del store
    freed: list[int] = []
    free = HostMemory.free
    monkeypatch.setattr(HostMemory, "free", lambda self, tensors: freed.append(len(tensors)) or free(self, tensors))
    training.module.set_memory_limit()
    assert sum(freed) >= len(there)
    assert [reference() for reference in there if reference() is not None] == []
    losses += [training.step() for _ in range(5)]
    assert_as_if_nothing_had_happened((losses, training.close()), expected)


@pytest.mark.parametrize("way", telling(["plain", "bf16"], "plain"))
def test_host_memory_stays_for_the_next_time(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What chunks have left is all that they take when they come again; it goes where that is not asked for."""
    expected, training = train({}, **WAYS[way]), Training(**WAYS[way])
    engine, made, losses = training.module.engine, [0], [training.step(), training.step()]
    make = CpuDevice.host_zeros

    def host_zeros(self: CpuDevice, numel: int, dtype: torch.dtype, **options: Any) -> torch.Tensor:
        made[0] += 1
        return make(self, numel, dtype, **options)

    monkeypatch.setattr(CpuDevice, "host_zeros", host_zeros)
    limit = training.module.set_memory_limit

    def held() -> int:
        return engine.held_bytes().get("cpu_ahead", 0)

    limit(SMALL // 2)
    num_first, on_host = made[0], engine.host_bytes()
    assert num_first >= 6
    limit(keep_host_memory=True)
    assert 0 < held() <= on_host
    losses.append(training.step())
    assert held() > 0
    made[0] = 0
    limit(SMALL // 2)
    assert made[0] == 0
    losses.append(training.step())
    limit(keep_host_memory=True)
    limit()
    assert held() == 0
    limit(SMALL // 2)
    assert made[0] >= num_first
    limit(keep_host_memory=True)
    limit(4 * SMALL // 3)  # of which it takes a part
    assert held() == 0
    limit(SMALL // 2)
    limit(cpu=engine.host_bytes() // 4, keep_host_memory=True)
    assert 0 < engine.host_bytes() <= on_host // 4  # what stays keeps within the limit
    limit(SMALL // 2)
    limit(keep_host_memory=True)
    assert held() > on_host // 4
    limit(cpu=on_host // 4, keep_host_memory=True)  # where no chunk moves, too
    assert 0 < engine.host_bytes() <= on_host // 4
    losses += [training.step() for _ in range(4)]
    assert_as_if_nothing_had_happened((losses, training.close()), expected)
    assert held() == 0


def test_what_stays_of_a_move_in_inference_mode_can_be_written_to() -> None:
    expected, training = train({}), Training()
    limit, losses = training.module.set_memory_limit, [training.step(), training.step()]
    with torch.inference_mode():  # as in validation
        limit(SMALL // 2)
        limit(keep_host_memory=True)
    losses.append(training.step())
    limit(SMALL // 2)
    losses += [training.step() for _ in range(5)]
    assert_as_if_nothing_had_happened((losses, training.close()), expected)


def test_a_move_leaves_what_was_made_ahead_for_later() -> None:
    """Memory for optimizer states is made while the first plan is looked for, and a move comes before they do."""
    training = Training()
    memory = training.module.engine.host_memory
    memory.prepare([Extent(998, torch.float32, is_locked=False)] * 2)
    for pieces in memory._pieces.values():
        for piece in pieces:
            piece._task.join()
    training.module.set_memory_limit(SMALL)
    assert memory.bytes_ahead() == 2 * 998 * 4
    training.close()


def both_ways(limits: dict[int, Limits], options: dict[str, Any]) -> None:
    assert_as_if_nothing_had_happened(train(limits, **options), train({}, **options))


@pytest.mark.full
@pytest.mark.parametrize("is_distributed", telling([True, False], "True"))
def test_on_two_ranks(is_distributed: bool) -> None:
    run_ranks(both_ways, 2, {2: (SMALL, None), 5: (None, None)}, {"enable_distributed_storage": is_distributed})


def test_the_hosts_memory_is_given_back_to_a_disk() -> None:
    options = {"placement_policy": "cpu", "folder": "states"}
    expected = train({}, **options)
    training, losses = Training(**options), []
    for number in range(6):
        if number in (2, 4):
            training.module.set_memory_limit(SMALL, 350 * 1024 if number == 2 else None)
            assert (training.module.stats().held_bytes.get("nvme_states", 0) > 0) is (number == 2)
        losses.append(training.step())
    assert all(torch.equal(a, b) for a, b in zip(losses, expected[0], strict=False))
    training.close()


def refuse(wrong: Limits, error: type[Exception], match: str) -> None:
    training = Training()
    training.step()
    before = training.module.plan
    mine = (
        (SMALL, None)
        if wrong == ("rank", None) and training.rank
        else wrong
        if wrong[0] != "rank"
        else (2 * SMALL, None)
    )
    with pytest.raises(error, match=match):
        training.module.set_memory_limit(*mine)
    assert training.module.plan is before
    training.step()
    training.close()


REFUSED: dict[str, tuple[Limits, type[Exception], str]] = {
    "no room on the device": ((1024, None), CapacityError, "gpu"),
    "no room on the host": ((SMALL, 1024), CapacityError, "host memory"),
    "no size": (("16 bananas", None), PlanError, "set_memory_limit: a size must be"),
    "negative": ((-1, None), PlanError, "must not be negative"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_met_leaves_everything_as_it_was(name: str) -> None:
    refuse(*REFUSED[name])


def test_what_cannot_be_met_is_raised_on_all_ranks() -> None:
    run_ranks(refuse, 2, *REFUSED["no room on the device"])


def test_ranks_with_other_limits() -> None:
    run_ranks(refuse, 2, ("rank", None), PlanError, "the same limits on every rank, and got others")


def test_all_ranks_leave_room_for_the_gaps_of_one_whose_segments_keep_their_sizes() -> None:
    none = MemoryLimits()
    ranks = [RankMemory("host", 2**36, 0, 2**34, 0, has_growing_segments=grow, limits=none) for grow in (True, False)]
    assert common_budget(ranks[:1], DeviceWords()).has_growing_segments
    assert not common_budget(ranks, DeviceWords()).has_growing_segments


def test_limits_of_one_host_hold_for_all() -> None:
    """Of two hosts with two ranks each the second is limited; what is free on the first, less its reserve, is less."""
    first, second = MemoryLimits(), MemoryLimits(gpu_bytes=2**30, cpu_bytes=2**35)
    hosts = [("first", 2**34, first)] * 2 + [("second", 2**40, second)] * 2
    ranks = [RankMemory(name, free, 0, 2**34, 0, True, limits) for name, free, limits in hosts]
    found, alone = common_budget(ranks, DeviceWords()), common_budget(ranks[:2], DeviceWords())
    assert (found.gpu_bytes, found.cpu_bytes) == (2**30, alone.cpu_bytes)
    assert found.reserve_bytes == 0
    assert common_budget(ranks[2:], DeviceWords()).cpu_bytes == 2**34


def test_between_steps_only() -> None:
    training = Training()
    loss = training.module(torch.randn(2, WIDTH)).sum()
    training.optimizer.backward(loss)
    with pytest.raises(StateError, match="gradients wait for a step"):
        training.module.set_memory_limit(SMALL)
    training.optimizer.step()
    training.module.set_memory_limit(SMALL)
    training.close()


def test_blocks_are_recomputed_as_before() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)))
    plan = make_plan(model, placement_policy="cuda", chunk_size=4 * WIDTH * WIDTH + 2048)
    module = ElixirModule(model, plan, device="cpu", activations="recompute")
    before = module.plan.activations
    assert len(before) == DEPTH
    module.set_memory_limit(SMALL)
    assert module.plan.activations == before
    module(torch.ones(2, WIDTH)).sum().backward()
    assert module.stats().recomputed_blocks == DEPTH
    module.close()

"""States on NVMe give, bit for bit, what states in host memory give; a disk that fails is told of, and ends the run.

The bodies, in `helpers`, take the device, so that `tests/gpu` runs them with real lanes and page-locked memory.
"""

from __future__ import annotations

import errno
import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_elixir.errors import PlanError, StateError, StorageError
from lightning_elixir.optim import HybridAdam
from lightning_elixir.optim.updates import FlatUpdate, StatesOnDisk
from lightning_elixir.plan.memory import NVME_BUFFERS
from lightning_elixir.plan.placing.placement import with_states_on_nvme
from lightning_elixir.plan.types import Plan, Tier, UpdateTiming
from lightning_elixir.storage.nvme import MOMENTS, ChunkStates, StateFile, direct, mapped
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers import streamed_updates as bodies
from tests.helpers.dist import run_ranks
from tests.helpers.metered import MeteredHostDevice
from tests.helpers.nvme import (
    BF16,
    NVME_SITES,
    SMALL_BUFFER_BYTES,
    WRITES,
    Training,
    check_every_way,
    check_losses,
    check_writes,
    failing,
    new_training,
    slow_disk,
    step,
    train_rank,
    use_small_buffers,
    whole_write,
)
from tests.helpers.plans import make_plan
from tests.helpers.streamed_updates import CPU, HOWS, How, Result, assert_same, result_of, use_small_slots
from tests.helpers.tiers import crossed, full, telling
from tests.helpers.update_timing import held_updates
from tests.helpers.zoo import ZOO, make

# Every way to train


@crossed(
    told=["fp32-nvme_some-UpdateTiming.BEHIND_FORWARD"],
    name=["bf16", "fp32", "bf16_true", "unused"],
    site=NVME_SITES,
    timing=UpdateTiming,
)
def test_the_disk_changes_no_bit(name: str, site: str, timing: UpdateTiming, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_slots(monkeypatch)
    check_every_way(HOWS[name], site, timing, CPU, monkeypatch)


OTHERS = sorted(set(HOWS) - {"bf16", "fp32", "bf16_true", "unused"})


@pytest.mark.full
@pytest.mark.parametrize("name", telling(OTHERS, "scaled_clipped"))
def test_every_way_to_train(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_slots(monkeypatch)
    check_every_way(HOWS[name], "nvme_some", UpdateTiming.INSIDE_BACKWARD, CPU, monkeypatch)


@pytest.mark.full
def test_small_rcache_and_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    check_losses("nvme", CPU, monkeypatch)


@pytest.mark.parametrize(
    ("how", "options"),
    [full("tied", {}), full("accumulated_clipped", {"enable_distributed_storage": False}), full("unused_fp32", {})],
)
def test_several_ranks(how: str, options: dict[str, Any]) -> None:
    timing = UpdateTiming.INSIDE_BACKWARD
    expected = run_ranks(train_rank, 2, HOWS[how], "host", timing, options)
    for site in ("nvme", "nvme_some"):
        assert_same(run_ranks(train_rank, 2, HOWS[how], site, timing, options)[0], expected[0])


@pytest.mark.full
def test_two_engines_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    trainings = [new_training(HOWS[name]) for name in ("bf16", "fp32")]
    with slow_disk(monkeypatch):
        for number in range(3):
            for training, name in zip(trainings, ("bf16", "fp32"), strict=True):
                step(training, HOWS[name], number)
    for (module, optimizer), name in zip(trainings, ("bf16", "fp32"), strict=True):
        expected = replace(bodies.train_on_host(replace(HOWS[name], steps=3)), skipped=[])
        assert_same(result_of(module, optimizer), expected)
        module.close()


# What goes over the disk


@pytest.mark.parametrize(("name", "each"), [("bf16", 12), full("fp32", 8), full("bf16_true", 4)])
def test_bytes_of_a_step(name: str, each: int) -> None:
    """12 a parameter, up and down, padding included; 8 without a master. The first step finds zeros and reads none."""
    module, optimizer = new_training(HOWS[name])
    numel = sum(c.numel for c in module.plan.chunks)
    master = 4 if name == "bf16" else 0
    seen = []
    for number in range(3):
        module.reset_stats()
        step((module, optimizer), HOWS[name], number)
        optimizer.synchronize()
        stats = module.stats()
        seen.append((stats.nvme_read_bytes, stats.nvme_written_bytes))
    assert seen == [(master * numel, each * numel), (each * numel, each * numel), (each * numel, each * numel)]
    held = module.stats().held_bytes
    assert held["nvme_master"] + held["nvme_states"] == each * numel
    assert "cpu_master" not in held
    assert "cpu_states" not in held
    assert held["cpu_state_buffer"] <= NVME_BUFFERS * (max(c.numel for c in module.plan.chunks) * each + 3 * 4096)
    assert module.engine.device_bytes() == held["replica"] + held["grad_block"]
    module.close()


@pytest.mark.parametrize("name", telling(["bf16", "fp32", "frozen"], "fp32"))
def test_large_chunks_take_small_buffers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more bytes than in one piece, and the next piece is read while one is updated."""
    use_small_buffers(monkeypatch)
    module, optimizer = new_training(HOWS[name])
    trained = [c for c in module.plan.chunks if c.requires_grad]
    states = module.engine.store.states
    pieces = [piece for c in trained for piece in states.pieces(c.id)]
    assert len(pieces) >= 2 * len(trained)
    each = 8 if name == "fp32" else 12
    for number in range(2):
        module.reset_stats()
        step((module, optimizer), HOWS[name], number)
        optimizer.synchronize()
    stats, numel = module.stats(), sum(c.numel for c in trained)
    if name == "frozen":  # pieces without anything that is trained stay where they are
        assert 0 < stats.nvme_read_bytes == stats.nvme_written_bytes <= each * numel
    else:
        assert stats.nvme_read_bytes == stats.nvme_written_bytes == each * numel
    assert 0 < stats.held_bytes["cpu_state_buffer"] <= NVME_BUFFERS * SMALL_BUFFER_BYTES
    with held_updates(monkeypatch) as gate:
        step((module, optimizer), HOWS[name], 2)
        deadline = time.monotonic() + 10
        while states._num_ready < NVME_BUFFERS and time.monotonic() < deadline:
            time.sleep(0.005)
        assert states._num_ready == NVME_BUFFERS
        gate.set()
    expected = replace(bodies.train_on_host(replace(HOWS[name], steps=3)), skipped=[])
    assert_same(result_of(module, optimizer), expected)
    module.close()


def subset_training(site: str) -> Training:
    """The optimizer holds every second parameter: the others lie between them, without states, in the same chunks."""
    model = make("gpt2")
    inner = HybridAdam(list(model.parameters())[::2], lr=1e-2)
    module = ElixirModule(model, bodies.plan_for(model, BF16, site, chunk_size=64 * 1024), dtype=torch.bfloat16)
    return module, ElixirOptimizer(module, inner)


def assert_same_moments(actual: Training, expected: Training) -> None:
    for chunk in actual[0].engine.chunks:
        for key in MOMENTS:
            runs, wanted = (optimizer.state_runs(chunk, key, torch.float32) for _, optimizer in (actual, expected))
            assert [i for i, run in wanted.items() if not torch.equal(run, runs[i])] == [], (chunk.id, key)


@pytest.mark.full
def test_parameters_between_others_that_have_states(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, actual = subset_training("host"), None
    for number in range(2):
        step(expected, BF16, number)
    use_small_buffers(monkeypatch)
    actual = subset_training("nvme")
    with slow_disk(monkeypatch):
        for number in range(2):
            step(actual, BF16, number)
        assert_same(result_of(*actual), result_of(*expected))
        assert_same_moments(actual, expected)
        for _, optimizer in (expected, actual):  # one that others surround has none any more
            state = optimizer.state_dict()
            del state["state"][3]
            optimizer.load_state_dict(state)
        assert_same_moments(actual, expected)
        for module, optimizer in (expected, actual):  # the rest follows, with states of its own
            optimizer.add_param_group({"params": list(module.module.parameters())[1::2], "lr": 3e-3})
        for number in range(2, 4):
            for training in (expected, actual):
                step(training, BF16, number)
    assert_same(result_of(*actual), result_of(*expected))
    for module, _ in (expected, actual):
        module.close()


class Branches(nn.Module):
    """Each step needs one of two parameters, which lie in one chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.ModuleList(nn.Linear(128, 128, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return self.both[number % 2](x).float().square().mean()


def test_a_second_optimizer_begins_with_zeros_in_pieces_that_it_comes_to_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_small_buffers(monkeypatch)
    found = []
    for tier in (Tier.CPU, Tier.NVME):
        torch.manual_seed(0)
        model = Branches()
        plan = make_plan(model, placement_policy="cpu", compute_dtype=torch.bfloat16, chunk_size=4 * 128 * 128)
        plan = replace(plan, chunks=tuple(replace(c, optim_tier=tier) for c in plan.chunks))
        module = ElixirModule(model, plan, dtype=torch.bfloat16)
        for init_step in (False, True):
            optimizer = ElixirOptimizer(module, HybridAdam(model.parameters(), lr=1e-2), init_step=init_step)
            for number in range(4):
                optimizer.backward(module(torch.randn(4, 128), number))
                optimizer.step()
            optimizer.synchronize()
        found.append(module.full_state_dict())
        module.close()
    assert [name for name, value in found[0].items() if not torch.equal(value, found[1][name])] == []


def test_an_update_that_fails_in_one_piece_fails_for_all_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_buffers(monkeypatch)
    module, optimizer = training = new_training()
    step(training, BF16, 0)
    optimizer.synchronize()
    chunk_id = max(module.plan.chunks, key=lambda c: c.numel).id
    last = module.engine.store.states.pieces(chunk_id)[-1]
    prepare = StatesOnDisk.prepare

    def fail(self: StatesOnDisk, visit: Any) -> None:
        prepare(self, visit)
        if (visit.chunk_id, visit.piece) == (chunk_id, last):
            raise MemoryError("no memory for this piece")

    with monkeypatch.context() as patch:
        patch.setattr(StatesOnDisk, "prepare", fail)
        step(training, BF16, 1)
        for _ in range(2):
            with pytest.raises(StateError, match="no memory for this piece"):
                module.engine.store.settle(chunk_id)
    with pytest.raises(StateError, match="no memory for this piece"):
        optimizer.synchronize()
    for other in module.plan.chunks:  # nobody waits for a buffer that has not been given back
        if other.id != chunk_id:
            module.engine.store.settle(other.id)
    with pytest.raises(StateError, match="no memory for this piece"):
        module.state_dict()
    module.close()


def test_an_unused_chunk_is_not_read() -> None:
    how = HOWS["unused"]
    module, optimizer = new_training(how)
    optimizer.backward(ZOO[how.name].loss(module, 0))
    module.reset_stats()
    optimizer.step()
    optimizer.synchronize()
    numel = sum(module.plan.chunks[i].numel for i in range(len(module.plan.chunks)))
    assert 0 < module.stats().nvme_written_bytes < 12 * numel
    module.close()


def test_only_a_few_chunks_are_in_memory_and_they_are_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """While no update goes on, as many chunks are read as there are buffers, and no more."""
    module, optimizer = new_training()
    step((module, optimizer), BF16, 0)
    optimizer.synchronize()
    sizes = sorted({c.numel * 12 for c in module.plan.chunks})
    with held_updates(monkeypatch) as gate:
        module.reset_stats()
        step((module, optimizer), BF16, 1)
        deadline = time.monotonic() + 10
        while module.engine.store.states._num_ready < NVME_BUFFERS and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.05)
        states = module.engine.store.states
        assert states._num_ready == NVME_BUFFERS
        assert NVME_BUFFERS * sizes[0] <= module.stats().nvme_read_bytes <= NVME_BUFFERS * sizes[-1]
        assert module.stats().nvme_written_bytes == 0
        gate.set()
    optimizer.synchronize()
    assert module.stats().nvme_written_bytes == sum(c.numel * 12 for c in module.plan.chunks)
    module.close()


def test_the_order_is_that_of_the_next_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates that began inside backward, the last chunk's first, are put into the order of need by the step."""
    module, optimizer = training = new_training(timing=UpdateTiming.INSIDE_BACKWARD)
    for number in range(2):
        step(training, BF16, number)
    optimizer.synchronize()
    states, order = module.engine.store.states, []
    read = states._read

    def noted(visit: Any, buffer: Any) -> None:
        order.append(visit.chunk_id)
        read(visit, buffer)

    monkeypatch.setattr(states, "_read", noted)
    with held_updates(monkeypatch) as gate:
        step(training, BF16, 2)
        gate.set()
    optimizer.synchronize()
    needs = module.engine.steps.first_needs()
    begun, rest = order[:NVME_BUFFERS], order[NVME_BUFFERS:]  # there were buffers for these when they came
    assert begun == sorted(begun, key=lambda i: -needs[i])
    assert rest == sorted(rest, key=lambda i: needs[i])
    assert len(rest) > NVME_BUFFERS
    module.close()


def test_a_step_does_not_wait_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    module, optimizer = training = new_training()
    for number in range(2):
        step(training, BF16, number)
    optimizer.synchronize()
    write = os.pwritev

    def held_up(*args: Any) -> int:
        gate.wait()
        return write(*args)

    with monkeypatch.context() as patch:
        patch.setattr(direct.os, "pwritev", held_up)
        step(training, BF16, 2)
        # The values of one chunk come at least, and of as many as were read before the first write; their states do
        # not come back.
        updates = [module.engine.store[chunk.id].update for chunk in module.engine.chunks]
        while not any(update is not None and update.is_over() for update in updates):
            time.sleep(0.01)
        assert not all(update is None or update.is_over() for update in updates)
        gate.set()
    optimizer.synchronize()
    assert module.stats().nvme_wait_s > 0
    expected = replace(bodies.train_on_host(replace(BF16, steps=3)), skipped=[])
    assert_same(result_of(module, optimizer), expected)
    module.close()


# Between steps


@pytest.mark.full  # combinations
@crossed(
    together=1,
    write=[pytest.param(write, id=name) for name, write in {**WRITES, "full_parameters": whole_write}.items()],
    name=["bf16", "fp32"],
    site=["nvme", "nvme_persistent"],
)
def test_what_users_write_is_kept(write: Callable[[ElixirModule], None], name: str, site: str) -> None:
    check_writes(write, HOWS[name], site)


def test_looking_at_parameters_reads_no_master() -> None:
    module, optimizer = training = new_training()
    step(training, BF16, 0)
    optimizer.synchronize()
    module.reset_stats()
    with torch.no_grad():
        total = sum(float(p.float().norm()) for p in module.module.parameters())
    module.engine.writes.absorb()
    assert total > 0
    assert module.stats().nvme_read_bytes == 0
    module.close()


def test_loading_again_leaves_nothing_of_the_states_before() -> None:
    """A state dict without some states: those begin with zeros, though the disk holds others."""
    results = []
    for site in ("host", "nvme"):
        module, optimizer = training = new_training(BF16, site)
        for number in range(2):
            step(training, BF16, number)
        state = optimizer.state_dict()
        state["state"] = {k: v for k, v in state["state"].items() if k % 3 == 0}
        optimizer.load_state_dict(state)
        assert sorted(optimizer.state_dict()["state"]) == sorted(state["state"])
        step(training, BF16, 2)
        results.append(result_of(module, optimizer))
        module.close()
    assert_same(results[1], results[0])


def test_a_second_optimizer_begins_anew() -> None:
    results = []
    for site in ("host", "nvme"):
        module, optimizer = training = new_training(BF16, site)
        step(training, BF16, 0)
        optimizer.synchronize()
        other = ElixirOptimizer(module, bodies.new_optimizer(module.module, BF16))
        step((module, other), BF16, 1)
        results.append(result_of(module, other))
        module.close()
    assert_same(results[1], results[0])


def test_the_same_places_are_kept_where_fewer_are_needed() -> None:
    module, optimizer = training = new_training()
    step(training, BF16, 0)
    optimizer.synchronize()
    states, plan = module.engine.store.states, module.plan
    module.reset_stats()
    module.replan(replace(plan, rcache_blocks=plan.rcache_blocks + 1))
    assert module.engine.store.states is states
    assert module.stats().nvme_written_bytes == 0
    step(training, BF16, 1)
    module.replan(bodies.plan_for(module.module, BF16, "host"))
    assert states._is_closed
    step(training, BF16, 2)
    assert_same(result_of(module, optimizer), replace(bodies.train_on_host(replace(BF16, steps=3)), skipped=[]))
    module.close()


MOVED = ["bf16", "fp32", "bf16_true", "unused", "unused_fp32", "init_step", "groups"]


@pytest.mark.full
@pytest.mark.parametrize("name", telling(MOVED, "unused_fp32"))
def test_moments_move_piece_by_piece(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From memory to a disk, to another file, and back; never is a chunk's read as a whole."""
    route = ["nvme_some", "nvme", "host", "nvme_some", "nvme_param", "gpu", "nvme", "every_site"]
    how = replace(HOWS[name], steps=len(route))
    expected = bodies.train_on_host(how)
    use_small_buffers(monkeypatch)
    module, optimizer = training = new_training(how, route[0])
    step(training, how, 0)
    read = StateFile.read

    def read_others(self: StateFile, chunk_id: int, part: str) -> torch.Tensor:
        assert part not in MOMENTS
        return read(self, chunk_id, part)

    for number, site in enumerate(route[1:], 1):
        with monkeypatch.context() as patch, slow_disk(monkeypatch):
            patch.setattr(StateFile, "read", read_others)
            module.replan(bodies.plan_for(module.module, how, site))
        step(training, how, number)
    assert_same(result_of(module, optimizer), replace(expected, skipped=[]))
    module.close()


def _mixed(plan: Plan, seed: int) -> Plan:
    dice = random.Random(seed)
    sites = [bodies.SITES[dice.choice(["gpu", "host", "nvme"])] for _ in plan.chunks]
    return replace(plan, chunks=tuple(site(c) for site, c in zip(sites, plan.chunks, strict=True)))


@pytest.mark.parametrize("name", telling(["bf16", "fp32", "bf16_true"], "bf16"))
def test_a_move_takes_no_host_memory_but_for_a_chunk(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of both placements, nor of the masters of one and the moments of the other."""
    device = MeteredHostDevice()
    monkeypatch.setattr("lightning_elixir.wrapper.make_device", lambda *_: device)
    how = replace(HOWS[name], steps=8)
    module, optimizer = training = new_training(how, "host")
    plan = module.plan
    chunk_bytes = max(c.numel for c in plan.chunks) * (2 + (6 if name == "bf16_true" else 12))
    most_moved = 0
    for number in range(how.steps):
        if number:
            before, device.peak_host_bytes = device.host_bytes, device.host_bytes
            module.replan(_mixed(plan, number))
            assert device.peak_host_bytes <= max(before, device.host_bytes) + chunk_bytes
            most_moved = max(most_moved, abs(device.host_bytes - before))
        step(training, how, number)
    assert most_moved > 3 * chunk_bytes
    assert_same(result_of(module, optimizer), replace(bodies.train_on_host(how), skipped=[]))
    module.close()


def move_on_rank(how: How, options: dict[str, Any], is_moved: bool) -> Result:
    rank = dist.get_rank()
    module, optimizer = bodies.new_training(how, "host", CPU, world_size=dist.get_world_size(), **options)
    plan = module.plan
    for number in range(how.steps):
        if is_moved and number:
            module.replan(_mixed(plan, number))
        bodies.train_step(module, optimizer, how, number, rank)
    result = result_of(module, optimizer)
    module.close()
    return result


@pytest.mark.parametrize("world_size", telling([2, 3], "3"))
@pytest.mark.parametrize(
    ("name", "options"),
    [
        full("bf16", {}),
        full("unused_fp32", {}),
        full("groups", {}),
        full("frozen", {}),
        ("tied", {"enable_distributed_storage": False}),
    ],
)
def test_ranks_move_chunks_in_one_order(name: str, options: dict[str, Any], world_size: int) -> None:
    """Though some of them have states of fewer elements than others: some moves are collective."""
    how = replace(HOWS[name], steps=6)
    expected, *_ = run_ranks(move_on_rank, world_size, how, options, False)
    actual, *_ = run_ranks(move_on_rank, world_size, how, options, True)
    assert_same(actual, expected)


@pytest.mark.parametrize("site", telling(["nvme_param", "host"], "nvme_param"))
def test_moments_that_are_blank_stay_so_where_they_move(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second optimizer begins anew over a disk that is full of the first one's; some of the only chunk's parameters
    have been in a step since, others have not."""
    use_small_buffers(monkeypatch)  # a step writes zeros where it comes to
    how, results, size = HOWS["unused_fp32"], [], {"chunk_size": 128 * 1024}
    for is_moved in (False, True):
        module, optimizer = bodies.new_training(how, "nvme", CPU, **size)
        assert len(module.plan.chunks) == 1
        for number in range(4):
            bodies.train_step(module, optimizer, how, number)
        optimizer.synchronize()
        other = ElixirOptimizer(module, bodies.new_optimizer(module.module, how), init_step=True)
        for number in range(3):
            if number == 1 and is_moved:
                module.replan(bodies.plan_for(module.module, how, site, **size))
            bodies.train_step(module, other, how, number)
        results.append(result_of(module, other))
        module.close()
    assert_same(results[1], results[0])


# Disks that fail


@crossed(told=["4-pwritev-UpdateTiming.BEHIND_FORWARD"], after=[0, 4], call=["preadv", "pwritev"], timing=UpdateTiming)
def test_a_disk_that_fails_ends_the_run_and_hangs_nowhere(
    call: str, after: int, timing: UpdateTiming, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, optimizer = training = new_training(timing=timing)
    for number in range(2):
        step(training, BF16, number)
    saved = result_of(module, optimizer)
    with monkeypatch.context() as patch:
        patch.setattr(direct.os, call, failing(call, errno.EIO, after))

        def go_on() -> None:
            for number in range(2, 4):
                step(training, BF16, number)
            optimizer.synchronize()

        with pytest.raises(StorageError, match="Input/output error") as caught:
            go_on()
    assert caught.value.path is not None
    assert caught.value.offset is not None
    # The disk works again, and the states are lost all the same.
    for use in (module.full_state_dict, optimizer.state_dict, optimizer.synchronize, optimizer.step):
        with pytest.raises((StateError, StorageError), match="from a checkpoint"):
            use()
    module.close()
    other = new_training(timing=timing)
    other[0].load_full_state_dict(saved.values)
    other[1].load_state_dict(saved.optimizer_state)
    for number in range(2, 4):
        step(other, BF16, number)
    assert_same(result_of(*other), replace(bodies.train_on_host(BF16), skipped=[]))
    other[0].close()


def test_a_checkpoint_that_cannot_be_read_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    module, optimizer = training = new_training()
    for number in range(2):
        step(training, BF16, number)
    optimizer.synchronize()
    with monkeypatch.context() as patch:
        patch.setattr(direct.os, "preadv", failing("preadv", errno.EIO))
        for use in (module.full_state_dict, optimizer.state_dict):
            with pytest.raises(StorageError, match="Input/output error"):
                use()
    step(training, BF16, 2)  # nothing was changed
    assert_same(result_of(module, optimizer), replace(bodies.train_on_host(replace(BF16, steps=3)), skipped=[]))
    module.close()


def test_a_failed_update_leaves_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor a buffer behind, though there are more chunks than buffers."""
    module, optimizer = training = new_training()
    step(training, BF16, 0)
    optimizer.synchronize()

    def fail(self: FlatUpdate, **options: Any) -> None:
        raise RuntimeError("no such luck")

    with monkeypatch.context() as patch:
        patch.setattr(FlatUpdate, "run", fail)
        step(training, BF16, 1)
        with pytest.raises(StateError, match=r"update of chunk.*no such luck.*from a checkpoint"):
            optimizer.synchronize()
    module.close()


def test_a_file_is_no_folder_for_states(tmp_path: Path) -> None:
    file = tmp_path / "disk"
    file.write_text("a file")
    model = make("gpt2")
    plan = bodies.plan_for(model, BF16, "nvme")
    with pytest.raises(StorageError, match="it is a file, not a folder"):
        ElixirModule(model, plan, dtype=torch.bfloat16, nvme_offload_dir=str(file))


def test_a_disk_without_room_is_seen_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("gpt2")
    before = model.state_dict()
    plan = bodies.plan_for(model, BF16, "nvme")
    monkeypatch.setattr(os, "posix_fallocate", failing("posix_fallocate", errno.ENOSPC))
    with pytest.raises(StorageError, match="MiB free, and rank 0 needs"):
        ElixirModule(model, plan, dtype=torch.bfloat16, nvme_offload_dir=str(tmp_path))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())  # the model is the user's still
    assert list(tmp_path.iterdir()) == []


def refuse_on_second_rank(folder: str) -> str:
    if dist.get_rank() == 1:
        os.posix_fallocate = failing("posix_fallocate", errno.ENOSPC)  # type: ignore[assignment]
    model = make("gpt2")
    plan = bodies.plan_for(model, BF16, "nvme", world_size=2)
    with pytest.raises(StorageError) as caught:
        ElixirModule(model, plan, dtype=torch.bfloat16, nvme_offload_dir=folder)
    return str(caught.value)


def test_a_disk_without_room_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(refuse_on_second_rank, 2, str(tmp_path), fresh=True)
    assert first.startswith("rank 1 cannot keep optimizer states on NVMe")
    assert "rank 1 needs" in second


def test_a_replan_without_room_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    module, optimizer = training = new_training(BF16, "host")
    step(training, BF16, 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", failing("posix_fallocate", errno.ENOSPC))
        with pytest.raises(StorageError):
            module.replan(bodies.plan_for(module.module, BF16, "nvme"))
    for number in range(1, 3):
        step(training, BF16, number)
    assert_same(result_of(module, optimizer), replace(bodies.train_on_host(replace(BF16, steps=3)), skipped=[]))
    module.close()


def test_a_move_that_fails_half_way_gives_its_files_back(monkeypatch: pytest.MonkeyPatch) -> None:
    module, _ = training = new_training(BF16, "nvme_some")
    step(training, BF16, 0)
    files = [module.engine.store.states]
    with monkeypatch.context() as patch:
        patch.setattr(ChunkStates, "copy_from", failing_copy(after=3, seen=files))
        with pytest.raises(StorageError, match="no such luck"):
            module.replan(bodies.plan_for(module.module, BF16, "nvme"))
    assert files[0]._is_closed
    with pytest.raises(StateError, match="half way to another placement.*from a checkpoint"):
        step(training, BF16, 1)
    module.close()
    assert len(set(map(id, files))) == 2
    assert all(file._is_closed for file in files)


def failing_copy(after: int, seen: list[Any]) -> Callable[..., None]:
    real, calls = ChunkStates.copy_from, []

    def copy_from(self: ChunkStates, other: ChunkStates, part: str) -> None:
        seen.append(self.file)
        calls.append(1)
        if len(calls) > after:
            raise StorageError("no such luck")
        real(self, other, part)

    return copy_from


@pytest.mark.parametrize("site", telling(["nvme", "nvme_param"], "nvme_param"))
def test_a_failed_disk_keeps_nothing_alive(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its error has gone through frames that hold a loss, whose graph leads to the engine."""

    def train() -> weakref.ref[Any]:
        module, optimizer = training = new_training(site=site)
        for number in range(2):
            step(training, BF16, number)
        optimizer.synchronize()
        with monkeypatch.context() as patch:
            patch.setattr(direct.os, "pwritev", failing("pwritev", errno.EIO))

            def go_on() -> None:
                for number in range(2, 4):
                    loss = ZOO[BF16.name].loss(module, number)
                    optimizer.backward(loss, retain_graph=True)
                    optimizer.step()

            with pytest.raises(StorageError, match="Input/output error"):
                go_on()
        module.close()
        return weakref.ref(module.engine)

    engine = train()
    for _ in range(2):  # a graph is freed by the first
        gc.collect()
    assert engine() is None


# What is refused


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_optimizers_of_torch_are_refused(kind: type[torch.optim.Optimizer]) -> None:
    how = HOWS["fp32"]
    model = make(how.name)
    module = ElixirModule(model, bodies.plan_for(model, how, "nvme"))
    with pytest.raises(PlanError, match=rf"nvme_offload_fraction.*{kind.__name__} cannot.*use HybridAdam"):
        ElixirOptimizer(module, kind(model.parameters(), lr=1e-2))
    module.close()


def test_an_optimizer_that_places_its_states_by_itself_is_refused() -> None:
    how = HOWS["fp32"]
    for site in ("host", "nvme"):
        model = make(how.name)
        module = ElixirModule(model, bodies.plan_for(model, how, site))
        with pytest.raises(PlanError, match=r"HybridAdam.nvme_offload_fraction=0\.5.*to ElixirStrategy or make_plan"):
            ElixirOptimizer(module, HybridAdam(model.parameters(), nvme_offload_fraction=0.5))
        module.close()


def test_streamed_updates_of_states_there_are_refused() -> None:
    model = make("gpt2")
    plan = bodies.plan_for(model, BF16, "nvme")
    plan = replace(plan, chunks=tuple(replace(c, is_update_streamed=True) for c in plan.chunks))
    module = ElixirModule(model, plan, dtype=torch.bfloat16)
    with pytest.raises(PlanError, match="streams updates of states on NVMe"):
        ElixirOptimizer(module, HybridAdam(model.parameters()))
    module.close()


# Nothing stays behind, and memory is saved


def test_an_engine_that_is_dropped_frees_the_disk(tmp_path: Path) -> None:
    model = make("gpt2")
    module = ElixirModule(
        model, bodies.plan_for(model, BF16, "nvme"), dtype=torch.bfloat16, nvme_offload_dir=str(tmp_path)
    )
    optimizer = ElixirOptimizer(module, bodies.new_optimizer(model, BF16))
    step((module, optimizer), BF16, 0)
    fd = module.engine.store.states._file._backend._file.fd
    assert os.fstat(fd).st_size > 0
    optimizer.synchronize()
    del module, optimizer, model
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert list(tmp_path.iterdir()) == []


PROGRAM = """
    import os, sys, time
    import torch
    from dataclasses import replace
    from torch import nn
    from lightning_elixir import ElixirModule, ElixirOptimizer, HybridAdam
    from lightning_elixir.plan.placing.placement import with_states_on_nvme
    from tests.helpers.plans import make_plan
    from tests.helpers.own_memory import own_bytes

    folder, fraction, then = sys.argv[1], float(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(24)])
    optimizer = HybridAdam(model.parameters(), lr=1e-3)
    plan = make_plan(model, placement_policy="cpu", chunk_size=2**19, compute_dtype=torch.bfloat16)
    plan = replace(plan, chunks=with_states_on_nvme(plan.chunks, fraction), rcache_blocks=2)
    module = ElixirModule(model, plan, dtype=torch.bfloat16, nvme_offload_dir=folder)
    optimizer = ElixirOptimizer(module, optimizer)
    x = torch.randn(4, 512)
    for _ in range(3):
        loss = module(x).float().square().mean()
        optimizer.backward(loss)
        optimizer.step()
    optimizer.synchronize()
    before, numel = own_bytes(), sum(c.numel for c in plan.chunks)
    print(before, numel, loss.item(), os.listdir(folder), flush=True)
    if then == "save":
        saved = (module.full_state_dict(), optimizer.state_dict())
        grown = own_bytes() - before
        torch.save(saved, sys.argv[4])
        print(grown, os.listdir(folder), flush=True)
    if then == "raise":
        raise RuntimeError
    if then == "sleep":
        optimizer.backward(module(x).float().square().mean())
        optimizer.step()
        time.sleep(60)
"""


def start(folder: Path, fraction: float, then: str, *more: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(folder), str(fraction), then, *more]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.full
def test_host_memory_is_lower_by_the_states(tmp_path: Path) -> None:
    seen = {}
    for fraction in (0.0, 1.0):
        out, errors = start(tmp_path / "disk", fraction, "end").communicate(timeout=120)
        assert out, errors
        own, numel, loss, listing = out.split(maxsplit=3)
        seen[fraction] = (int(own), float(loss))
        assert listing.strip() == "[]"
    assert seen[0.0][1] == seen[1.0][1]
    expected = 12 * int(numel) - NVME_BUFFERS * 12 * 512 * 512  # what the buffers take stays
    saved = seen[0.0][0] - seen[1.0][0]
    assert 0.8 * expected < saved < 1.2 * expected, (saved / 2**20, expected / 2**20)


@pytest.mark.full
def test_a_checkpoint_takes_no_memory_of_its_size(tmp_path: Path) -> None:
    """Whole states lie in a file, too, until they are saved; what is saved is the same."""
    grown, saved = {}, {}
    for fraction in (0.0, 1.0):
        out, errors = start(tmp_path / "disk", fraction, "save", str(tmp_path / "saved")).communicate(timeout=120)
        first, last = out.strip().splitlines() or pytest.fail(errors)
        assert last.split(maxsplit=1)[1] == "[]"
        grown[fraction], saved[fraction] = int(last.split()[0]), torch.load(tmp_path / "saved", weights_only=True)
        numel = int(first.split()[1])
    assert grown[0.0] > 10 * numel
    assert grown[1.0] < 2 * numel, (grown, 12 * numel)
    (values, state), (expected_values, expected_state) = saved[1.0], saved[0.0]
    assert all(torch.equal(values[k], v) for k, v in expected_values.items())
    for number, entries in expected_state["state"].items():
        assert all(torch.equal(state["state"][number][k], v) for k, v in entries.items())


@pytest.mark.full
def test_a_checkpoint_is_put_together_in_memory_where_the_disk_is_full(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mapped, "_LEAST_BYTES", 1)
    module, optimizer = training = new_training()
    for number in range(2):
        step(training, BF16, number)
    expected = result_of(module, optimizer)
    monkeypatch.setattr(os, "posix_fallocate", failing("posix_fallocate", errno.ENOSPC, after=3))
    assert_same(result_of(module, optimizer), expected)
    assert "is put together in host memory" in caplog.text
    module.close()
    gc.collect()
    for state in expected.optimizer_state["state"].values():
        assert float(state["exp_avg_sq"].sum()) >= 0  # what was mapped outlives the engine


@pytest.mark.full
@pytest.mark.parametrize("then", ["raise", "sleep"])
def test_nothing_stays_behind(tmp_path: Path, then: str) -> None:
    process = start(tmp_path / "disk", 1.0, then)
    assert process.stdout is not None
    assert process.stdout.readline()
    if then == "sleep":
        process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert list((tmp_path / "disk").iterdir()) == []


def test_a_share_of_the_states() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(8)])
    plan = make_plan(model, placement_policy="cpu", chunk_size=4096, nvme_offload_fraction=0.5)
    assert [c.optim_tier for c in plan.chunks] == [Tier.CPU] * 4 + [Tier.NVME] * 4
    assert plan.chunks == with_states_on_nvme(replace(plan, chunks=plan.chunks).chunks, 0.0)
    module = ElixirModule(model, plan)
    held = module.stats().held_bytes
    assert "nvme_master" in held
    module.close()

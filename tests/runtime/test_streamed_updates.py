"""Updates streamed to the device give, bit for bit, what the host and the device itself give.

The bodies, in `helpers`, take the device, so that `tests/gpu` runs them with real lanes, page-locked memory and device
memory.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_elixir.core.device import CpuDevice
from lightning_elixir.errors import CapacityError, PlanError
from lightning_elixir.optim import HybridAdam
from lightning_elixir.optim.segments import SegmentOptimizer
from lightning_elixir.optim.streaming import StateStream
from lightning_elixir.runtime.engine import Engine
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.dist import run_ranks
from tests.helpers.streamed_updates import (
    CPU,
    HOWS,
    NVME_ORDER,
    ORDER,
    SITES,
    How,
    assert_same,
    check_replan,
    check_resume,
    check_sites_agree,
    new_optimizer,
    new_training,
    plan_for,
    result_of,
    train,
    train_on_host,
    train_rank,
    train_step,
    use_small_slots,
)
from tests.helpers.tiers import crossed, full, telling
from tests.helpers.zoo import ZOO, make


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_slots(monkeypatch)


TOLD = ["accumulated_clipped", "scaled_clipped", "groups_adam_clipped", "unused_fp32", "frozen"]


@pytest.mark.parametrize("how", telling(HOWS, "scaled_clipped", "frozen"))
def test_streamed_equals_host(how: str) -> None:
    check_sites_agree(HOWS[how], ["streamed", "mixed"], CPU)
    if HOWS[how].overflow_at >= 0:
        assert train(HOWS[how], "streamed").skipped.count(True) == 1


@pytest.mark.parametrize("how", telling(HOWS, "scaled_clipped", "unused", "accumulated"))
def test_replicas_are_cast_from_masters_on_the_device(how: str) -> None:
    check_sites_agree(HOWS[how], ["cast", "some_cast"], CPU)


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_cast_has_no_compute_shard(world_size: int) -> None:
    held = train_cast("bf16") if world_size == 1 else run_ranks(train_cast, world_size, "bf16")[0]
    numel = held["numel"] // world_size
    assert held["gpu_master"] == 4 * numel
    assert "gpu_param" not in held
    assert held["evictions"]
    true = train_cast("bf16_true") if world_size == 1 else run_ranks(train_cast, world_size, "bf16_true")[0]
    assert true["gpu_param"] == 2 * numel  # there is no master to cast from


def train_cast(how: str) -> dict[str, int]:
    """What a rank holds after a step with all states on the device and no replica that stays."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    module, optimizer = new_training(HOWS[how], "cast", CPU, world_size=world_size)
    train_step(module, optimizer, HOWS[how], 0)
    numel = sum(chunk.numel for chunk in module.plan.chunks)
    stats = module.stats()
    module.close()
    return {**stats.held_bytes, "numel": numel, "evictions": stats.evictions}


def test_written_values_reach_masters_that_replicas_are_cast_from() -> None:
    """In 16 bits, in fp32, and put back: as where parameters are on the host."""
    found = []
    for site in ("host", "cast", "gpu"):
        how = HOWS["bf16"]
        module, optimizer = new_training(how, site, CPU)
        parameters = dict(module.module.named_parameters())
        names = list(parameters)
        for number in range(4):
            train_step(module, optimizer, how, number)
            with torch.no_grad():
                parameters[names[number]].mul_(0.75)
                parameters[names[-1]].copy_(torch.full_like(parameters[names[-1]], 1.0, dtype=torch.float32).add_(1e-5))
                before = parameters[names[4]].clone()
                parameters[names[4]].zero_()
                ZOO[how.name].loss(module, 0)
                parameters[names[4]].copy_(before)
        found.append((module.full_state_dict(), result_of(module, optimizer)))
        module.close()
    (expected, first), *others = found
    for values, result in others:
        assert [k for k, v in expected.items() if not torch.equal(values[k], v)] == []
        assert_same(result, first)


@pytest.mark.full
@pytest.mark.parametrize("how", telling(["bf16", "fp32", "bf16_true", "clipped_by_value", "unused"], "unused"))
def test_every_place_of_parameters_and_states(how: str) -> None:
    check_sites_agree(HOWS[how], [s for s in SITES if s not in ("host", "streamed", "mixed")], CPU)


@pytest.mark.parametrize("site", ["host", "streamed", "nvme"])
def test_equals_plain_pytorch(site: str) -> None:
    """`HybridAdam` over the plain model, with gradients clipped by value, gives the same bits."""
    how = How(dtype=torch.float32, clip_value=0.003, has_groups=True)
    model = make(how.name)
    plain = new_optimizer(model, how)
    for step in range(how.steps):
        ZOO[how.name].loss(model, step * 3).backward()
        nn.utils.clip_grad_value_(model.parameters(), how.clip_value)
        plain.step()
        plain.zero_grad()
    values = train(how, site).values
    assert [k for k, v in model.state_dict().items() if not torch.equal(values[k], v)] == []


def test_unused_parameters_stay_untouched() -> None:
    """No decay, no moments, no step count for what got no gradient, though its chunk goes up and comes back."""
    how = HOWS["unused"]
    module, optimizer = new_training(how, "streamed", CPU)
    before = module.full_state_dict()
    train_step(module, optimizer, how, 0)
    after, state = module.full_state_dict(), optimizer.state_dict()["state"]
    used = {"inp", "out", "experts.0"}
    names = [n for n, _ in module.module.named_parameters()]
    for number, name in enumerate(names):
        is_used = any(name.startswith(prefix) for prefix in used)
        assert torch.equal(before[name], after[name]) != is_used
        assert (number in state) == is_used
    module.close()


# Moving


@pytest.mark.full
@crossed(
    told=["memory-bf16_true"],
    order=[pytest.param(ORDER, id="memory"), pytest.param(NVME_ORDER, id="nvme")],
    how=["bf16", "fp32", "bf16_true", "unused"],
)
def test_replan_keeps_everything(how: str, order: list[str]) -> None:
    check_replan(HOWS[how], CPU, order)


@crossed(
    told=["nvme to host-groups"],
    move=["streamed to host", "gpu to streamed", "mixed to mixed", "nvme to host", "host to nvme_some"],
    how=["bf16", "scaled", "unused", "groups"],
)
def test_resume_from_another_placement(how: str, move: str) -> None:
    saved_from, _, loaded_into = move.partition(" to ")
    check_resume(HOWS[how], CPU, saved_from, loaded_into)


def test_state_of_torch_and_back() -> None:
    """torch's AdamW over the plain model continues from a streamed state, and the other way round."""
    how = HOWS["fp32"]
    module, optimizer = new_training(how, "streamed", CPU)
    for step in range(2):
        train_step(module, optimizer, how, step)
    model = make(how.name)
    model.load_state_dict(module.full_state_dict())
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.05, foreach=False)
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    ZOO[how.name].loss(model, 6).backward()
    plain.step()
    train_step(module, optimizer, how, 2)
    torch.testing.assert_close(module.full_state_dict(), dict(model.state_dict()), rtol=1e-5, atol=1e-6)
    module.load_full_state_dict(model.state_dict())
    optimizer.load_state_dict(plain.state_dict())
    train_step(module, optimizer, how, 3)
    plain.zero_grad()
    ZOO[how.name].loss(model, 9).backward()
    plain.step()
    torch.testing.assert_close(module.full_state_dict(), dict(model.state_dict()), rtol=1e-5, atol=1e-6)
    module.close()


def test_optimizer_that_had_stepped_before() -> None:
    """States made over the plain model are taken over."""
    results = []
    for site in ("host", "streamed", "nvme"):
        how = HOWS["fp32"]
        model = make(how.name)
        inner = new_optimizer(model, how)
        ZOO[how.name].loss(model, 5).backward()
        inner.step()
        inner.zero_grad()
        module = ElixirModule(model, plan_for(model, how, site), device=CPU)
        optimizer = ElixirOptimizer(module, inner)
        train_step(module, optimizer, how, 0)
        results.append(result_of(module, optimizer))
        assert {float(s["step"]) for s in results[-1].optimizer_state["state"].values()} == {2.0}
        module.close()
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


def test_group_added_later() -> None:
    results = []
    for site in ("host", "streamed", "nvme"):
        how = HOWS["bf16"]
        model = make(how.name)
        module = ElixirModule(model, plan_for(model, how, site), dtype=how.dtype, device=CPU)
        late = [p for n, p in model.named_parameters() if n.endswith("bias")]
        first = [p for n, p in model.named_parameters() if not n.endswith("bias")]
        optimizer = ElixirOptimizer(module, HybridAdam(first, lr=1e-2))
        for step in range(2):
            train_step(module, optimizer, how, step)
        optimizer.add_param_group({"params": late, "lr": 1e-3})
        for step in range(2, 4):
            train_step(module, optimizer, how, step)
        results.append(result_of(module, optimizer))
        steps = {float(s["step"]) for s in results[-1].optimizer_state["state"].values()}
        assert steps == {2.0, 4.0}
        module.close()
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


# Several ranks


RANKED = [
    full("tied", {}),
    full("accumulated_clipped", {"enable_distributed_storage": False}),
    full("unused_fp32", {}),
    full("scaled", {}),
]


@pytest.mark.parametrize("world_size", telling([2, 3], "3"))
@pytest.mark.parametrize(("how", "options"), RANKED)
def test_several_ranks(how: str, options: dict[str, Any], world_size: int) -> None:
    expected = run_ranks(train_rank, world_size, HOWS[how], "host", options)
    sites = ["streamed", "mixed"] if options else ["streamed", "every_site", "some_cast", "streamed_persistent"]
    for site in sites:
        results = run_ranks(train_rank, world_size, HOWS[how], site, options)
        assert_same(results[0], expected[0])
        assert [sum(r.numel) for r in results] == [sum(r.numel) for r in expected]
        assert (sum(r.numel[1] for r in results) > 0) is (site != "some_cast")


# What is page-locked


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Addresses of host memory that a CUDA device would have page-locked."""
    found: set[int] = set()
    zeros = CpuDevice.host_zeros

    def noted(device: CpuDevice, numel: int, dtype: torch.dtype, *, is_locked: bool = True) -> Tensor:
        tensor = zeros(device, numel, dtype)
        (found.add if is_locked else found.discard)(tensor.data_ptr())
        return tensor

    monkeypatch.setattr(CpuDevice, "host_zeros", noted)
    monkeypatch.setattr(CpuDevice, "lock", lambda device, tensor: found.add(tensor.untyped_storage().data_ptr()))
    return found


def states(engine: Engine, inner: Mapping[int, SegmentOptimizer]) -> list[Tensor]:
    """Masters and moments, in host memory or anywhere."""
    masters = [engine.store[i].master for i in inner]
    return [*(m for m in masters if m is not None), *(m for one in inner.values() for m in one.moment_memory())]


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("later", ["streamed", "gpu"])
def test_states_are_page_locked_before_the_device_takes_them(locked: set[int], prepared: bool, later: str) -> None:
    """And not for updates by the host alone: locking takes longer than all else about memory."""
    how = HOWS["bf16"]
    module, optimizer = new_training(how, "host", CPU)
    if prepared:
        module.engine.host_memory.expect(optimizer.to_come())
    optimizer.reserve()
    train_step(module, optimizer, how, 0)
    inner = optimizer._updates.states.inner
    kept = states(module.engine, inner)
    shards = [module.engine.store[chunk.id] for chunk in module.engine.chunks if chunk.id in inner]
    assert not any(t.data_ptr() in locked for t in kept)
    assert all(t is not None and t.data_ptr() in locked for shard in shards for t in (shard.param, shard.grad_buffer))
    module.replan(plan_for(make(how.name), how, later))
    assert all(t.untyped_storage().data_ptr() in locked for t in kept)
    module.replan(plan_for(make(how.name), how, "host"))  # back from there: page-locked, as it came from the device
    assert all(t.data_ptr() in locked for t in states(module.engine, inner))
    module.close()


def test_states_that_are_streamed_from_the_start_are_page_locked(locked: set[int]) -> None:
    how = HOWS["bf16"]
    module, optimizer = new_training(how, "streamed", CPU)
    optimizer.reserve()
    assert all(t.data_ptr() in locked for t in states(module.engine, optimizer._updates.states.inner))
    module.close()


# What is refused and said


def test_optimizers_of_torch_cannot_stream() -> None:
    how = HOWS["fp32"]
    model = make(how.name)
    plan = plan_for(model, how, "streamed")
    module = ElixirModule(model, plan, device=CPU)
    with pytest.raises(PlanError, match=r"streams the updates of \d+ chunks.*AdamW.*HybridAdam.*can_stream=False"):
        ElixirOptimizer(module, torch.optim.AdamW(model.parameters()))
    module.close()


def test_replan_to_streaming_is_refused_before_anything_moves() -> None:
    how = HOWS["fp32"]
    results = []
    for tries in (False, True):
        model = make(how.name)
        module = ElixirModule(model, plan_for(model, how, "host"), device=CPU)
        optimizer = ElixirOptimizer(module, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False))
        assert not optimizer.can_stream
        train_step(module, optimizer, how, 0)
        if tries:
            with pytest.raises(PlanError, match="HybridAdam"):
                module.replan(plan_for(model, how, "streamed"))
            assert not any(c.is_update_streamed for c in module.plan.chunks)
        train_step(module, optimizer, how, 1)
        times = optimizer.last_step_times
        assert times is not None
        assert times.streamed_numel == 0 < times.cpu_numel
        assert 0 < times.host_update_s <= times.update_s
        results.append(result_of(module, optimizer))
        module.close()
    assert_same(results[1], results[0])


def test_times_of_a_step() -> None:
    how = HOWS["scaled"]
    module, optimizer = new_training(how, "mixed", CPU)
    assert optimizer.can_stream
    assert optimizer.last_step_times is None
    train_step(module, optimizer, how, 0)
    times = optimizer.last_step_times
    assert times is not None
    assert times.streamed_numel + times.cpu_numel == sum(p.numel() for p in make(how.name).parameters())
    assert 0 < times.host_update_s < times.update_s
    train_step(module, optimizer, how, how.overflow_at)
    assert optimizer.last_step_times is None
    module.close()


def test_out_of_device_memory_loses_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step raises before it counts or changes anything; with memory again, it can be repeated."""
    how = HOWS["bf16"]
    expected = train_on_host(replace(how, steps=2))
    module, optimizer = new_training(how, "mixed", CPU)
    train_step(module, optimizer, how, 0)

    def refuse(self: StateStream, nbytes: int) -> Tensor:
        raise torch.OutOfMemoryError("no memory left")

    with monkeypatch.context() as patch:
        patch.setattr(StateStream, "_allocate", refuse)
        with pytest.raises(CapacityError, match="streamed updates"):
            train_step(module, optimizer, how, 1)
    assert {float(s["step"]) for s in optimizer.state_dict()["state"].values()} == {1.0}
    optimizer.step()
    assert_same(result_of(module, optimizer), replace(expected, skipped=[]))
    module.close()


def test_memory_for_streaming_is_held_in_the_update_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    how = HOWS["bf16"]
    module, optimizer = new_training(how, "streamed", CPU)
    seen: list[dict[str, int]] = []
    issue = StateStream._issue

    def watched(self: StateStream, *args: Any) -> Any:
        seen.append(module.stats().held_bytes)
        return issue(self, *args)

    monkeypatch.setattr(StateStream, "_issue", watched)
    train_step(module, optimizer, how, 0)
    assert {held["update_slot"] for held in seen} == {3 * 20 * 1024 + 5 * 4 * 512}
    assert len(seen) > 2 * len(module.plan.chunks)
    assert "update_slot" not in module.stats().held_bytes
    module.close()

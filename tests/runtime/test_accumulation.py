"""Gradients of several micro-batches, added up in host memory by a thread, give the bits of those added up in place.

The reference keeps gradients on the compute device, where every addition is one operation in its turn. The bodies take
the device, so that `tests/gpu` runs them with real lanes and page-locked memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_elixir.errors import StateError
from lightning_elixir.optim.gradient_sums import Addition
from lightning_elixir.plan.memory import STAGING_BUFFERS
from lightning_elixir.plan.types import Tier, UpdateTiming
from lightning_elixir.runtime import accumulation
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers import streamed_updates as streamed
from tests.helpers.accumulation import (
    ACCUMULATED,
    AFTER,
    BEHIND,
    INSIDE,
    additions,
    check_backward_goes_on,
    check_bits,
    check_failed_backward,
    check_host_memory_stays,
    held_until_waited_for,
    new_training,
    train,
    train_rank,
)
from tests.helpers.dist import run_ranks
from tests.helpers.plans import make_plan
from tests.helpers.streamed_updates import CPU, HOWS, How, assert_same, result_of
from tests.helpers.tiers import crossed, full, telling
from tests.helpers.zoo import ZOO, make

TOLD = ["accumulated_clipped", "unused_accumulated"]


@pytest.mark.parametrize("name", telling(ACCUMULATED, "unused_accumulated"))
def test_same_bits(name: str) -> None:
    check_bits(ACCUMULATED[name], CPU)


@crossed(
    told=["{'num_buffers': 1}-accumulated"],
    options=[{"timing": BEHIND}, {"is_reusing": True}, {"num_buffers": 1}],
    name=["accumulated", "fp32_accumulated"],
)
def test_same_bits_however_it_is_done(name: str, options: dict[str, Any]) -> None:
    check_bits(ACCUMULATED[name], CPU, ["mixed"], **options)


@pytest.mark.full
@pytest.mark.parametrize("site", telling(["every_site", "streamed_param_on_gpu", "mixed_persistent"], "every_site"))
def test_same_bits_wherever_the_rest_lies(site: str) -> None:
    check_bits(HOWS["accumulated"], CPU, [site], timing=BEHIND)


@crossed(
    told=["clipped-False", "bf16_true-True"],
    name=["bf16", "bf16_true", "clipped", "clipped_by_value", "unused"],
    is_known=[False, True],
)
def test_a_number_of_micro_batches_that_changes(name: str, is_known: bool) -> None:
    """Also steps of one, whose gradients are 16 bits wide or widened."""
    how, numbers = HOWS[name], (1, 3, 1, 2)
    expected = train(how, "gpu", micro_batches=numbers)
    with additions(0.001):
        actual = train(how, "mixed", micro_batches=numbers, is_known=is_known)
    assert_same(actual, expected)
    assert actual.norms == expected.norms


@pytest.mark.parametrize("numbers", [(1, 1), (2, 1)])
def test_several_gradients_in_one_backward_are_added_in_their_own_dtype(
    numbers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As autograd would, though the sum is wider already."""
    seen: list[Addition] = []
    real = accumulation.add_up
    monkeypatch.setattr("lightning_elixir.runtime.landing.add_up", lambda *a: (seen.append(a[2]), real(*a)))
    how = How(name="checkpoint_reentrant", steps=2)
    expected = train(how, "gpu", micro_batches=numbers)
    with additions(0.001):
        assert_same(train(how, "host", micro_batches=numbers, is_known=True), expected)
    assert Addition.ADD_ROUNDED in seen


def test_several_gradients_in_a_later_backward_are_added_to_the_sum() -> None:
    """That is wider than they are, for good."""
    how = How(name="checkpoint_reentrant")
    results = []
    for site, is_known in (("gpu", False), ("host", False), ("host", True)):
        module, optimizer = new_training(how, site, CPU, is_known=is_known)
        with additions(0.001):
            for seed in range(6):
                module.engine.reducer._expected.clear()  # as if nobody knew how many come
                optimizer.backward(ZOO[how.name].loss(module, seed))
                if seed % 3 == 2:
                    optimizer.step()
        results.append(result_of(module, optimizer))
        module.close()
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


@pytest.mark.parametrize("site", telling(["host", "nvme_param"], "host"))
def test_what_gradients_are_reduced_in_is_nothing_to_one_rank(site: str) -> None:
    how = replace(HOWS["fp32"], steps=2, micro_batches=2)
    results = []
    for reduce_dtype in (None, torch.bfloat16):
        model = make(how.name)
        inner = streamed.new_optimizer(model, how)
        plan = streamed.plan_for(model, how, site)
        module = ElixirModule(model, plan, dtype=how.dtype, master_weights=how.master, reduce_dtype=reduce_dtype)
        optimizer = ElixirOptimizer(module, inner)
        for number in range(how.steps):
            streamed.train_step(module, optimizer, how, number)
        results.append(result_of(module, optimizer))
        module.close()
    assert_same(results[1], results[0])


@pytest.mark.parametrize("world_size", telling([2, 3], "2"))
@pytest.mark.parametrize(
    ("name", "options"),
    [
        full("accumulated", {"is_known": True}),
        full("accumulated_clipped", {"timing": BEHIND}),
        full("unused_accumulated", {"is_known": True, "timing": BEHIND}),
        ("late_accumulated", {"enable_distributed_storage": False}),
    ],
)
def test_several_ranks(name: str, options: dict[str, Any], world_size: int) -> None:
    how = ACCUMULATED[name]
    layout = {k: v for k, v in options.items() if k == "enable_distributed_storage"}
    expected = run_ranks(train_rank, world_size, how, "gpu", layout)
    assert_same(run_ranks(train_rank, world_size, how, "mixed", options)[0], expected[0])


# Who waits


def test_backward_goes_on() -> None:
    check_backward_goes_on(CPU)


def test_backward_waits_for_a_buffer() -> None:
    how = HOWS["accumulated"]
    module, optimizer = new_training(how, "host", CPU, is_known=True)
    assert len(module.engine.chunks) > STAGING_BUFFERS + 1
    with held_until_waited_for(lambda: module.stats().held_bytes["cpu_grad_staging"]) as held:
        optimizer.backward(ZOO[how.name].loss(module, 0))
        optimizer.synchronize()
    ((num_on_their_way, staging_bytes),) = held.seen
    assert num_on_their_way == STAGING_BUFFERS
    assert staging_bytes == STAGING_BUFFERS * max(c.nbytes for c in module.plan.chunks)
    module.close()


@pytest.mark.parametrize("is_known", telling([False, True], "True"))
def test_gradients_that_are_dropped_are_out_of_the_way(is_known: bool) -> None:
    """What is still under way must not come to lie in the sums of the next step."""
    how = HOWS["accumulated"]
    expected = train(how, "gpu")
    module, optimizer = new_training(how, "host", CPU, is_known=is_known)
    with additions(0.01) as slow:
        for step in range(how.steps):
            for seed in (50, 51):
                optimizer.backward(ZOO[how.name].loss(module, seed))
            optimizer.zero_grad()
            assert slow.num_running == 0
            streamed.train_step(module, optimizer, how, step)
    assert_same(result_of(module, optimizer), replace(expected, skipped=[]))
    module.close()


def test_one_parameter_without_its_gradient() -> None:
    how = HOWS["accumulated"]
    results = []
    for site in ("gpu", "host"):
        module, optimizer = new_training(how, site, CPU, is_known=True)
        with additions(0.01):
            for seed in range(2):
                optimizer.backward(ZOO[how.name].loss(module, seed))
            chunk = module.engine.chunks[0]
            module.engine.reducer.drop_member(chunk, 0)  # what is under way belongs to it
            optimizer.backward(ZOO[how.name].loss(module, 2))
            optimizer.step()
        results.append(result_of(module, optimizer))
        module.close()
    assert_same(results[1], results[0])


# Memory


@crossed(
    told=["False-UpdateTiming.BEHIND_FORWARD", "True-UpdateTiming.AFTER_BACKWARD"],
    is_known=[False, True],
    timing=[AFTER, BEHIND],
)
def test_host_memory_stays_from_step_to_step(timing: UpdateTiming, is_known: bool) -> None:
    check_host_memory_stays(CPU, timing, is_known=is_known)


@crossed(
    told=["4096-accumulated", "65536-bf16_true_accumulated", "1073741824-fp32_accumulated"],
    chunk_size=[4 * 1024, 64 * 1024, 1 << 30],
    name=["accumulated", "fp32_accumulated", "bf16_true_accumulated"],
)
def test_bytes_are_as_predicted(name: str, chunk_size: int) -> None:
    how = ACCUMULATED[name]
    module, optimizer = new_training(how, "host", CPU, is_known=True, chunk_size=chunk_size)
    predicted = make_plan(
        module.module,
        placement_policy="cpu",
        compute_dtype=how.dtype,
        master_weights=how.master,
        chunk_size=chunk_size,
        accumulates=True,
    )
    assert predicted.layout_fingerprint() == module.plan.layout_fingerprint()
    for step in range(2):
        streamed.train_step(module, optimizer, how, step)
    held = module.stats().held_bytes
    assert held["cpu_grad_staging"] == min(3, len(predicted.chunks)) * max(c.nbytes for c in predicted.chunks)
    assert held["cpu_grad"] + held["cpu_grad_staging"] == predicted.notes["host_grad_bytes"]
    module.close()


def test_no_staging_memory_where_nothing_is_added_up() -> None:
    for how, site in ((HOWS["bf16"], "host"), (HOWS["accumulated"], "gpu")):
        module, optimizer = new_training(how, site, CPU, is_known=True)
        if site == "host":
            module.engine.reducer.landing.expect_accumulation(False)
        streamed.train_step(module, optimizer, how, 0)
        assert "cpu_grad_staging" not in module.stats().held_bytes
        module.close()


def test_what_is_known_survives_a_move() -> None:
    how = HOWS["accumulated"]
    module, optimizer = new_training(how, "gpu", CPU)
    streamed.train_step(module, optimizer, how, 0)
    assert not module.engine.reducer.landing.accumulates  # nothing was added up in host memory
    for site in ("host", "mixed"):
        module.replan(streamed.plan_for(module.module, how, site))
        streamed.train_step(module, optimizer, how, 1)
        assert module.engine.reducer.landing.accumulates
    module.replan(streamed.plan_for(module.module, how, "host"))
    optimizer.backward(ZOO[how.name].loss(module, 0))
    assert {s.grad.dtype for s in shards(module)} == {torch.float32}
    module.close()


def shards(module: ElixirModule) -> list[Any]:
    return [module.engine.store[c.id] for c in module.engine.chunks if c.spec.optim_tier is not Tier.GPU]


def test_updates_still_begin_inside_backward() -> None:
    """Where one backward comes before a step all the same, its new values find room over 16-bit gradients."""
    how = HOWS["bf16"]
    expected = train(how, "gpu")
    module, optimizer = new_training(how, "host", CPU, timing=INSIDE, is_known=True)
    begun = []
    for step in range(how.steps):
        with optimizer.unobserved():
            optimizer.backward(ZOO[how.name].loss(module, step * 3))
            begun.append(len(module.engine.reducer.begun))
            optimizer.step()
    assert begun[0] == 0 < begun[1] == len(module.engine.chunks)
    assert_same(result_of(module, optimizer), replace(expected, skipped=[]))
    module.close()


# Errors


@crossed(
    told=["clip-4-True"],
    read=["grad_norm", "clip", "full_grads", "loss_scale"],
    failing_at=[1, 4],
    is_known=[False, True],
)
def test_an_error_on_the_thread_reaches_who_needs_the_sum(read: str, failing_at: int, is_known: bool) -> None:
    how = HOWS["scaled"] if read == "loss_scale" else HOWS["accumulated"]
    how = replace(how, micro_batches=3, overflow_at=-1)
    module, optimizer = new_training(how, "host", CPU, is_known=is_known)
    reads: dict[str, Callable[[], Any]] = {
        "grad_norm": optimizer.grad_norm,
        "clip": lambda: optimizer.clip_grad_norm_(0.1),
        "full_grads": module.full_grads,
        "loss_scale": optimizer.step,
    }
    values = module.full_state_dict()
    with additions(0.001) as failing:
        failing.failing_at = failing_at
        for seed in range(3):  # later additions to the same sum fail as well, and nothing hangs
            optimizer.backward(ZOO[how.name].loss(module, seed))
        for _ in range(2):
            with pytest.raises(StateError, match=r"adding up the gradients of .*RuntimeError: no sum today.*zero_grad"):
                reads[read]()
        # Values are whole.
        saved = module.full_state_dict()
        assert [k for k, v in values.items() if not torch.equal(saved[k], v)] == []
        optimizer.zero_grad()
        failing.failing_at = -1
        for step in range(how.steps):
            streamed.train_step(module, optimizer, how, step)
    assert_same(result_of(module, optimizer), replace(train(how, "gpu"), skipped=[]))
    module.close()


@pytest.mark.parametrize("timing", [AFTER, BEHIND])
def test_an_error_on_the_thread_fails_the_update(timing: UpdateTiming) -> None:
    """Where nobody reads gradients before their update does."""
    how = HOWS["accumulated"]
    module, optimizer = new_training(how, "host", CPU, is_known=True, timing=timing)

    def two_steps() -> None:
        for step in range(2):
            streamed.train_step(module, optimizer, how, step)

    with additions(0.001) as failing:
        failing.failing_at = 5
        with pytest.raises((StateError, RuntimeError), match="no sum today"):
            two_steps()
        with pytest.raises(StateError):
            module.full_state_dict()
    module.close()


@crossed(
    told=["{'is_known': False, 'is_reusing': True}-False"],
    options=[{"is_known": False}, {"is_known": True}, {"is_known": False, "is_reusing": True}],
    is_early=[False, True],
)
def test_a_backward_that_fails(options: dict[str, bool], is_early: bool) -> None:
    check_failed_backward(CPU, is_early=is_early, **options)


def test_closing_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    how = HOWS["accumulated"]
    module, optimizer = new_training(how, "host", CPU, is_known=True)
    with additions(0.01):
        optimizer.backward(ZOO[how.name].loss(module, 0))
        assert [t.name for t in set(threading.enumerate()) - before] == ["elixir-gradients-0"]
        module.close()
    assert set(threading.enumerate()) <= before

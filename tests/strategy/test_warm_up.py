"""Policy "auto": the final plan before the first step, by a dry run; where there is none, a safe plan for that step."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_elixir._lightning import Trainer, pl
from lightning_elixir.core.device import CpuDevice
from lightning_elixir.core.host_memory import Extent
from lightning_elixir.plan.describe import describe_placement
from lightning_elixir.plan.io import load_plan, save_plan
from lightning_elixir.plan.profile import StepProfile
from lightning_elixir.plan.types import Alternative, Plan, Tier
from lightning_elixir.plan.units import format_bytes
from lightning_elixir.runtime.engine import Engine
from lightning_elixir.stepping.scheduler import UpdateScheduler
from lightning_elixir.strategy import ElixirStrategy, shared_plans, warm_up
from lightning_elixir.strategy.shared_plans import Planner, Replanning
from lightning_elixir.strategy.warm_up import WarmUp
from tests.helpers.dist import run_ranks
from tests.helpers.tiers import full, telling
from tests.strategy.models import (
    CHUNK,
    Net,
    UnforeseenNet,
    assert_same_as_plain,
    assert_same_run,
    fit,
    make_data,
    make_trainer,
)


class Plans(pl.Callback):
    """The plan in force in each training step."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        strategy = trainer.strategy
        if isinstance(strategy, ElixirStrategy) and "training_step" not in vars(strategy):
            original = strategy.training_step

            def training_step(*args: Any, **kwargs: Any) -> Any:
                self.plans.append(strategy.plan)
                return original(*args, **kwargs)

            strategy.training_step = training_step  # type: ignore[method-assign]


class AdafactorNet(Net):
    """Its optimizer needs whole parameters in the step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), lr=1e-3)


def _plans(make_model: type[Net] = Net, **options: Any) -> list[Plan]:
    callback = Plans()
    trainer_options = {"accumulate_grad_batches": options.pop("accumulate", 1)}
    assert_same_as_plain(make_model, elixir={**CHUNK, **options}, callbacks=lambda: [callback], **trainer_options)
    return callback.plans


def _changes(plans: list[Plan]) -> list[int]:
    return [i for i in range(1, len(plans)) if plans[i].fingerprint() != plans[i - 1].fingerprint()]


def test_without_a_limit_everything_stays_from_the_start() -> None:
    plans = _plans()
    assert len({plan.fingerprint() for plan in plans}) == 1
    assert plans[0].is_all_resident


@pytest.mark.parametrize(("make_model", "changes"), [(Net, []), (UnforeseenNet, [1])])
def test_what_fits_is_on_the_device(make_model: type[Net], changes: list[int]) -> None:
    """From the start; where the first step has to be watched, that one has everything on the host."""
    _, _, expected = fit("auto", make_model)
    callback = Plans()
    _, _, actual = fit(ElixirStrategy(gpu_memory_limit="8MiB", **CHUNK), make_model, callbacks=[callback])
    assert_same_run(actual, expected)
    plans = callback.plans
    assert plans[-1].is_all_resident
    assert _changes(plans) == changes
    assert plans[0].is_all_resident == (make_model is Net)
    assert all(chunk.optim_tier is (Tier.GPU if make_model is Net else Tier.CPU) for chunk in plans[0].chunks)


@pytest.mark.parametrize("make_model", telling([Net, UnforeseenNet], "Net"))
def test_what_does_not_fit_stays_on_the_host(make_model: type[Net]) -> None:
    plans = _plans(make_model, gpu_memory_limit="96KiB")
    assert not plans[-1].is_all_resident
    assert any(chunk.param_tier is Tier.CPU for chunk in plans[-1].chunks)
    assert plans[-1].rcache_blocks >= plans[0].rcache_blocks
    assert len({plan.layout_fingerprint() for plan in plans}) == 1


@pytest.mark.full
@pytest.mark.parametrize("accumulate", telling([1, 2], "2"))
@pytest.mark.parametrize("limit", telling(["64KiB", "128KiB", "192KiB"], "64KiB"))
def test_no_more_host_memory_is_made_ahead_than_the_final_plan_takes(
    monkeypatch: pytest.MonkeyPatch, limit: str, accumulate: int
) -> None:
    """The plan that the engine is built with may have more there than the one that training goes on with."""
    allowed: list[int] = []
    to_come = UpdateScheduler.to_come

    def noted(updates: UpdateScheduler, most_bytes: int | None = None) -> list[Extent]:
        allowed.append(-1 if most_bytes is None else most_bytes + updates._engine.host_bytes())
        return to_come(updates, most_bytes)

    monkeypatch.setattr(UpdateScheduler, "to_come", noted)
    callback = Plans()
    strategy = ElixirStrategy(gpu_memory_limit=limit, **CHUNK)
    fit(strategy, Net, callbacks=[callback], accumulate_grad_batches=accumulate)
    taken = callback.plans[0].notes["host_bytes"]
    assert len(allowed) == 1
    assert 0 <= allowed[0] <= taken
    assert allowed[0] > taken / 2


def test_a_fit_is_built_with_the_first_chunks_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Plan] = []
    first_plan = Planner.first_plan

    def noted(planner: Planner, *args: Any, **options: Any) -> tuple[Plan, bool]:
        plan, is_final = first_plan(planner, *args, **options)
        built.append(plan)
        return plan, is_final

    monkeypatch.setattr(Planner, "first_plan", noted)
    plans = _plans(gpu_memory_limit="240KiB", chunk_size="8KiB")
    near = [c.id for c in built[-1].chunks if c.param_tier is Tier.GPU]
    assert near == list(range(len(near)))
    assert 2 <= len(near) < len(built[-1].chunks)
    assert plans[0].layout_fingerprint() == built[-1].layout_fingerprint()


@pytest.mark.full
def test_accumulation_makes_the_first_step_longer() -> None:
    assert _changes(_plans(UnforeseenNet, gpu_memory_limit="96KiB", accumulate=3))[:1] == [3]


class PendingNet(Net):
    """Manual optimization that steps in the middle of a batch and goes on; looks at values, so no dry run can tell."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        assert len(batch[0].nonzero()) > 0
        for step in range(2):
            loss = self.loss(batch)
            self.manual_backward(loss)
            self.losses.append(loss.detach())
            if step == 0:
                optimizer.step()
                optimizer.zero_grad()
        if batch_idx > 3:
            optimizer.zero_grad()


def test_the_plan_waits_for_pending_gradients() -> None:
    callback = Plans()
    _, _, expected = fit("auto", PendingNet)
    _, _, actual = fit(ElixirStrategy(gpu_memory_limit="8MiB", **CHUNK), PendingNet, callbacks=[callback])
    assert actual.losses == expected.losses
    assert _changes(callback.plans) == [5]
    assert callback.plans[-1].is_all_resident


@pytest.mark.full
def test_gradients_from_before_the_first_batch_put_the_plan_off() -> None:
    class Before(Net):
        def on_train_start(self) -> None:
            self.loss(next(iter(make_data()))).backward()

    callback = Plans()
    strategy = ElixirStrategy(gpu_memory_limit="96KiB", **CHUNK)
    fit(strategy, Before, callbacks=[callback])
    assert _changes(callback.plans)[:1] == [1]
    assert strategy.plan.forecast is not None


@pytest.mark.full
def test_a_final_plan_is_kept_for_the_next_fit() -> None:
    strategy = ElixirStrategy(gpu_memory_limit="8MiB", **CHUNK)
    trainer, model, _ = fit(strategy)
    final = strategy.plan
    callback = Plans()
    trainer.callbacks.append(callback)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, make_data())
    assert {plan.fingerprint() for plan in callback.plans} == {final.fingerprint()}


@pytest.mark.full
def test_evaluation_first_leaves_the_warm_up_to_fit() -> None:
    strategy, callback = ElixirStrategy(gpu_memory_limit="96KiB", **CHUNK), Plans()
    model, trainer = Net(), make_trainer(strategy, callbacks=[callback])
    trainer.validate(model, make_data(8), verbose=False)
    evaluating = strategy.plan
    trainer.fit(model, make_data())
    assert callback.plans[0].fingerprint() != evaluating.fingerprint()
    assert strategy.plan.forecast is not None


@pytest.mark.parametrize("as_path", telling([True, False], "True"))
def test_a_given_plan_is_obeyed(tmp_path: Any, as_path: bool) -> None:
    first = ElixirStrategy(placement_policy="const", offload_param_frac=0.5, **CHUNK)
    fit(first)
    save_plan(first.plan, tmp_path / "plan.json")
    given: Any = tmp_path / "plan.json" if as_path else load_plan(tmp_path / "plan.json")
    callback = Plans()
    strategy = ElixirStrategy(plan=given, gpu_memory_limit="1GiB")
    _, _, actual = fit(strategy, callbacks=[callback])
    assert {plan.fingerprint() for plan in callback.plans} == {first.plan.fingerprint()}
    assert [x.item() for x in actual.losses] == [x.item() for x in fit("auto")[2].losses]


@pytest.mark.full
def test_stats_norm_gradients_and_parameters_can_be_looked_at() -> None:
    class Looking(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            strategy = self.trainer.strategy
            assert isinstance(strategy, ElixirStrategy)
            grads = strategy.full_grads()
            assert {name: grad.shape for name, grad in grads.items()} == {
                n: p.shape for n, p in self.named_parameters()
            }
            total = torch.cat([grad.flatten().double() for grad in grads.values()]).norm()
            assert strategy.grad_norm().item() == pytest.approx(total.item(), rel=1e-6)

    strategy = ElixirStrategy(gpu_memory_limit="96KiB", **CHUNK)
    trainer, model, run = fit(strategy, Looking)
    stats = strategy.stats().as_dict()
    assert stats["fetches"] + stats["prefetches"] > 0
    strategy.reset_stats()
    assert strategy.stats().fetches == 0
    with strategy.full_parameters(["layers.4.bias"]) as parameters:
        assert torch.equal(parameters["layers.4.bias"], run.state["layers.4.bias"])
    with strategy.full_parameters(modify=True) as parameters, torch.no_grad():
        parameters["layers.4.bias"].fill_(3.0)
    assert strategy.lightning_module_state_dict()["layers.4.bias"].eq(3.0).all()


# The refinement


class Asked:
    """Stands in for `Planner.refined_plan`: answers with a plan of its own, and remembers the questions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, has_better: bool) -> None:
        self.asked: list[tuple[int, StepProfile]] = []
        self.steps = 0
        self._has_better = has_better
        original = WarmUp.after_step

        def after_step(warm_up: WarmUp, **options: bool) -> None:
            self.steps += 1
            original(warm_up, **options)

        monkeypatch.setattr(WarmUp, "after_step", after_step)
        monkeypatch.setattr(Planner, "refined_plan", self._refined_plan)
        monkeypatch.setattr(warm_up, "_STEP_AS_FORESEEN_WITHIN", -1.0)

    def _refined_plan(self, now: Replanning, profile: StepProfile) -> Plan:
        self.asked.append((self.steps, profile))
        current = now.current
        return replace(current, prefetch_depth=current.prefetch_depth + 1) if self._has_better else current


@pytest.mark.full
@pytest.mark.parametrize("has_better", telling([True, False], "True"))
@pytest.mark.parametrize(("make_model", "last"), [full(Net, 2), (UnforeseenNet, 3)])
def test_times_of_a_later_step_may_change_the_plan(
    monkeypatch: pytest.MonkeyPatch, make_model: type[Net], last: int, has_better: bool
) -> None:
    asked = Asked(monkeypatch, has_better=has_better)
    plans = _plans(make_model, gpu_memory_limit="96KiB")
    ((steps, profile),) = asked.asked
    assert steps == last
    assert profile.compute_s > 0
    assert len(list(profile.trace.acquires())) > 10
    assert (last in _changes(plans)) == has_better
    assert max([0, *_changes(plans)]) <= last


@pytest.mark.parametrize(("short", "last"), [([], 2), ([1], 2), ([2], 3), ([2, 3, 4], 3), ([1, 2, 3, 4], 3)])
def test_a_step_in_which_memory_was_short_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, short: list[int], last: int
) -> None:
    """But where it is in each step."""
    asked = Asked(monkeypatch, has_better=False)
    monkeypatch.setattr(CpuDevice, "num_shortages", lambda device: sum(step <= asked.steps for step in short))
    fit(ElixirStrategy(gpu_memory_limit="96KiB", **CHUNK))
    assert [steps for steps, _ in asked.asked] == [last]


@pytest.mark.parametrize("within", [-1.0, 1e9])
def test_what_is_as_foreseen_is_not_searched_for_again(monkeypatch: pytest.MonkeyPatch, within: float) -> None:
    asked = Asked(monkeypatch, has_better=True)
    monkeypatch.setattr(warm_up, "_STEP_AS_FORESEEN_WITHIN", within)
    callback = Plans()
    fit(ElixirStrategy(gpu_memory_limit="96KiB", **CHUNK), callbacks=[callback])
    assert len(asked.asked) == (within < 0)
    assert len(_changes(callback.plans)) == (within < 0)
    assert within < 0 or 2 in [plan.forecast.after_steps for plan in callback.plans if plan.forecast is not None]


@pytest.mark.parametrize(("short", "within", "expected"), [([], 1e9, [2]), ([2], 1e9, [2]), ([2], -1.0, [2, 3])])
def test_garbage_is_collected_after_the_first_step_that_was_timed_and_after_a_search(
    monkeypatch: pytest.MonkeyPatch, short: list[int], within: float, expected: list[int]
) -> None:
    """So that no later step is long by it. As on a GPU."""
    asked = Asked(monkeypatch, has_better=False)
    collected: list[int] = []
    monkeypatch.setattr(warm_up, "_STEP_AS_FORESEEN_WITHIN", within)
    monkeypatch.setattr(warm_up, "_UNHURRIED", ())
    monkeypatch.setattr(warm_up, "gc", SimpleNamespace(collect=lambda: collected.append(asked.steps)))
    monkeypatch.setattr(CpuDevice, "num_shortages", lambda device: sum(step <= asked.steps for step in short))
    fit(ElixirStrategy(gpu_memory_limit="96KiB", **CHUNK))
    assert collected == expected


def _room_of(engine: Engine) -> int:
    """Bytes that the plan leaves of 96 KiB."""
    assert engine.plan.forecast is not None
    return 96 * 1024 - engine.plan.forecast.peak_gpu_bytes


@pytest.mark.parametrize(
    ("extra", "count"),
    [
        (lambda engine: 0, 0),
        (lambda engine: engine.plan.block_bytes + 1, 1),
        (_room_of, 0),
        (lambda e: _room_of(e) + 1, 1),
    ],
    ids=["none", "more_than_a_block", "what_is_left", "one_byte_more"],
)
def test_memory_that_was_not_foreseen_is_searched_for_again(
    monkeypatch: pytest.MonkeyPatch, extra: Callable[[Engine], int], count: int
) -> None:
    asked = Asked(monkeypatch, has_better=False)
    monkeypatch.setattr(warm_up, "_STEP_AS_FORESEEN_WITHIN", 1e9)
    step_profile = Engine.step_profile

    def seen(engine: Engine) -> StepProfile | None:
        found = step_profile(engine)
        return found and found.with_bytes(lambda nbytes: nbytes + extra(engine))

    monkeypatch.setattr(Engine, "step_profile", seen)
    fit(ElixirStrategy(gpu_memory_limit="96KiB", **CHUNK))
    assert len(asked.asked) == count


class Refined(pl.Callback):
    """The plans that the third step would lead to if steps took these bytes beside the chunks."""

    def __init__(self, *beside_bytes: int) -> None:
        self.beside_bytes = beside_bytes
        self.before: Plan | None = None
        self.plans: list[Plan] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        strategy: Any = trainer.strategy
        run = strategy._fit_run
        if batch_idx != 2:
            return
        profile: StepProfile = run.warm_up.profile
        self.before = strategy.plan
        for nbytes in self.beside_bytes:
            intervals = tuple(replace(i, non_model_bytes=nbytes) for i in profile.intervals)
            taken = replace(profile, intervals=intervals)
            handle = strategy._handle
            now = Replanning(handle.skeleton, strategy.plan, handle.budget, run._regime())
            plan = run._planner.refined_plan(now, taken)
            self.plans.append(plan)


def test_a_plan_that_stays_says_what_limits_it_and_is_not_among_those_that_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make_anew(planner: Planner, now: Replanning, profile: StepProfile) -> Plan:
        plan = now.current
        assert plan.forecast is not None
        own = describe_placement(plan.chunks, plan.rcache_blocks, plan.prefetch_depth)
        lost = (Alternative(own, 1.0, "slower"), Alternative("another", 1.0, "slower"))
        forecast = replace(plan.forecast, binding="the limit found anew", alternatives=lost)
        return replace(plan, prefetch_depth=plan.prefetch_depth + 1, forecast=forecast)

    monkeypatch.setattr(Planner, "_make_anew", make_anew)
    monkeypatch.setattr(shared_plans, "LEAST_GAIN", 1.0)  # no plan is worth a move
    callback = Refined(0)
    fit(ElixirStrategy(gpu_memory_limit="200KiB", **CHUNK), callbacks=[callback])
    (plan,) = callback.plans
    assert plan.forecast is not None
    assert plan.forecast.binding == (
        "the limit found anew. Searched again with the times that steps take: no placement found would save 100% of the"
        " step, so this one stays"
    )
    own = describe_placement(plan.chunks, plan.rcache_blocks, plan.prefetch_depth)
    descriptions = [one.description for one in plan.forecast.alternatives]
    assert "another" in descriptions
    assert own not in descriptions


@pytest.mark.full
def test_a_plan_that_turns_out_too_large_is_left_for_one_that_is_no_faster() -> None:
    callback = Refined(0, 16 * 1024)
    fit(ElixirStrategy(gpu_memory_limit="200KiB", **CHUNK), callbacks=[callback])
    same, smaller = callback.plans
    assert callback.before is not None
    assert same.fingerprint() == callback.before.fingerprint() != smaller.fingerprint()
    assert same.forecast is not None
    assert smaller.forecast is not None
    assert smaller.forecast.times.total_s > same.forecast.times.total_s * 0.95  # no reason to move by itself
    assert smaller.forecast.peak_gpu_bytes <= 200 * 1024


@pytest.mark.parametrize("lacking", telling([0, 2**19], "524288"))
def test_the_smallest_plan_is_left_where_steps_take_less_than_was_foreseen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lacking: int
) -> None:
    """What is foreseen has a margin that may not fit; what is seen has a smaller one."""
    shared = Planner._shared_profile

    def with_more(planner: Planner, profile: StepProfile, current: Plan, *, is_seen: bool) -> StepProfile:
        found = shared(planner, profile, current, is_seen=is_seen)
        return found.with_bytes(lambda nbytes: nbytes + (lacking if is_seen else 2**19))

    monkeypatch.setattr(Planner, "_shared_profile", with_more)
    monkeypatch.setattr(shared_plans, "LEAST_GAIN", -1.0)  # on the CPU all placements are about as fast
    callback = Plans()
    _, _, expected = fit("auto")
    _, _, actual = fit(ElixirStrategy(gpu_memory_limit="512KiB", **CHUNK), callbacks=[callback])
    assert_same_run(actual, expected)
    plans = callback.plans
    (told,) = re.findall(
        r"smallest plan there is of these chunks, which will exceed the 512\.0 KiB of .* by ([^:]*):", caplog.text
    )
    assert f"there are 512.0 KiB. What would fit: {told} more" in caplog.text
    assert plans[0].forecast is not None
    assert plans[0].forecast.peak_gpu_bytes > 2**19
    assert told == format_bytes(plans[0].forecast.peak_gpu_bytes - 2**19, is_rounded_up=True)
    assert plans[0].notes["rcache_bytes"] == plans[0].rcache_blocks * plans[0].block_bytes
    assert _changes(plans) == ([] if lacking else [2])
    assert plans[-1].is_all_resident == (not lacking)
    assert plans[-1].forecast is not None
    assert plans[-1].forecast.after_steps


def test_what_would_fit_does_with_chunks_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    """Chunks are cut by the limit before a step is known, and larger ones need more than the number says."""

    def advised(limit: int, **options: Any) -> tuple[int, int] | None:
        caplog.clear()
        fit(ElixirStrategy(gpu_memory_limit=limit, **options), AdafactorNet)
        told = [r.getMessage() for r in caplog.records if "going on with the smallest plan there is" in r.getMessage()]
        if not told:
            return None
        found = re.search(r"What would fit: ([\d.]+) KiB more .*with chunks as they are \(chunk_size=(\d+),", told[0])
        assert found is not None
        return limit + round(float(found[1]) * 1024), int(found[2])

    first = advised(40 * 1024)
    assert first is not None
    higher, chunk_size = first
    assert advised(higher) is not None
    assert advised(higher, chunk_size=chunk_size) is None


@pytest.mark.parametrize(("options", "is_gpu"), [({}, True), ({}, False), ({"use_fused_kernels": "auto"}, True)])
def test_the_smallest_plan_comes_with_fused_operators_where_these_may_help(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, options: dict[str, Any], is_gpu: bool
) -> None:
    """Where activations share the memory, as on a GPU, and fused operators were not asked for."""
    shared = Planner._shared_profile
    monkeypatch.setattr(
        Planner, "_shared_profile", lambda *args, **kwargs: shared(*args, **kwargs).with_bytes(lambda n: n + 2**19)
    )
    monkeypatch.setattr(Planner, "_counts_activations", is_gpu)
    fit(ElixirStrategy(gpu_memory_limit="512KiB", **{**CHUNK, **options}))
    (warning,) = [r.getMessage() for r in caplog.records if "smallest plan there is" in r.getMessage()]
    advice = " With a language model of transformers, use_fused_kernels=True takes less: never all logits at once."
    assert warning.endswith(advice) == (is_gpu and "use_fused_kernels" not in options)


@pytest.mark.full
@pytest.mark.parametrize(("make_model", "changes"), [full(Net, [4]), (UnforeseenNet, [2, 6])])
def test_steps_with_several_batches_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, make_model: type[Net], changes: list[int]
) -> None:
    asked = Asked(monkeypatch, has_better=True)
    plans = _plans(make_model, gpu_memory_limit="96KiB", accumulate=2)
    assert [steps for steps, _ in asked.asked] == [1 + len(changes)]
    assert _changes(plans) == changes


@pytest.mark.parametrize(
    "options",
    [
        {"gpu_memory_limit": "8MiB"},
        full({"placement_policy": "cpu", "gpu_memory_limit": "96KiB"}),
        full({"placement_policy": "const", "offload_optim_frac": 1.0}),
        {},
    ],
    ids=str,
)
def test_where_nothing_can_be_gained_nobody_asks(monkeypatch: pytest.MonkeyPatch, options: Any) -> None:
    asked = Asked(monkeypatch, has_better=True)
    fit(ElixirStrategy(**CHUNK, **options))
    assert asked.asked == []


@pytest.mark.full
def test_a_short_fit_leaves_the_refinement_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch, has_better=True)
    first, second = (ElixirStrategy(gpu_memory_limit="96KiB", **CHUNK) for _ in range(2))
    _, model, _ = fit(first, train=lambda: make_data(8))
    assert asked.asked == []
    final = first.plan
    make_trainer(second).fit(model, make_data(16))
    assert len(asked.asked) == 1
    assert second.plan.fingerprint() != final.fingerprint()


def test_whether_gradients_add_up_is_told_to_the_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    original = Planner.__init__

    def init(self: Planner, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        told.append(self.regime.accumulates)

    monkeypatch.setattr(Planner, "__init__", init)
    scheduler = pl.callbacks.GradientAccumulationScheduler(scheduling={0: 1, 3: 4})
    for make, options, expected in (
        (Net, {}, False),
        (Net, {"accumulate_grad_batches": 2}, True),
        (Net, {"callbacks": [scheduler]}, True),
        (PendingNet, {}, True),
    ):
        told.clear()
        fit(ElixirStrategy(**CHUNK), make, train=lambda: make_data(4), **options)
        assert set(told) == {expected}


@pytest.mark.parametrize(
    ("options", "has_norm"),
    [
        ({}, False),
        ({"gradient_clip_val": 1.0}, True),
        ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, False),
    ],
    ids=["none", "norm", "value"],
)
def test_code_for_norms_is_loaded_ahead_where_steps_take_one(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], has_norm: bool
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(UpdateScheduler, "load_kernels", lambda self, *, has_norm: asked.append(has_norm))
    strategy = ElixirStrategy(gpu_memory_limit="96KiB", **CHUNK)
    fit(strategy, train=lambda: make_data(4), precision="bf16-mixed", **options)
    assert asked == [has_norm]


def test_the_plan_is_told_in_the_log(caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "lightning_elixir"):
        fit(ElixirStrategy(gpu_memory_limit="96KiB", **CHUNK))
    (told,) = [r.getMessage() for r in caplog.records if "the plan from now on" in r.getMessage()]
    assert "plan (auto), 1 rank" in told
    assert "limited by" in told


# Several ranks


def _rank(has_better: bool) -> Any:
    with pytest.MonkeyPatch.context() as monkeypatch:
        asked = Asked(monkeypatch, has_better=has_better)
        callback = Plans()
        strategy = ElixirStrategy(gpu_memory_limit="96KiB", **CHUNK)
        run = fit(strategy, devices=2, train=lambda: make_data(64), callbacks=[callback])[2]
        return [x.item() for x in run.losses], [plan.fingerprint() for plan in callback.plans], len(asked.asked)


@pytest.mark.parametrize("has_better", telling([True, False], "True"))
def test_two_ranks_move_together(has_better: bool) -> None:
    first, second = run_ranks(_rank, 2, has_better, init_group=False)
    assert first[1:] == second[1:]
    assert first[2] == 1
    assert len(set(first[1])) == 1 + has_better
    expected = run_ranks(_plainly, 2, 2, init_group=False)
    assert [first[0], second[0]] == expected


def _plainly(world_size: int, make_model: Callable[[], Net] = Net) -> list[float]:
    plain = "auto" if world_size == 1 else "ddp"
    return [x.item() for x in fit(plain, make_model, devices=world_size, train=lambda: make_data(64))[2].losses]


# Growth


def test_first_step_leaves_room_where_the_host_cannot_hold_everything() -> None:
    """Chunks take 400 KiB, most of which no host has; and nobody knows yet what activations take."""
    plans = _plans(UnforeseenNet, gpu_memory_limit="300KiB", cpu_memory_limit="250KiB")
    on_gpu = [sum(c.numel for c in plan.chunks if c.optim_tier is Tier.GPU) for plan in (plans[0], plans[-1])]
    total = sum(c.numel for c in plans[0].chunks)
    assert 0 < on_gpu[0] < on_gpu[1] < total


@pytest.mark.parametrize("world_size", telling([1, 2], "1"))
def test_steps_that_outgrow_the_plan_are_watched_again(world_size: int) -> None:
    results = run_ranks(_growing, world_size, world_size, init_group=False)
    for losses, plans, least in results:
        assert losses == results[0][0] or world_size > 1
        assert plans == results[0][1]
        assert least == 5000
        # What was built with, the plan for the step that was foreseen, the smallest, and the one for the larger step.
        order = [plan for i, plan in enumerate(plans) if i == 0 or plan[0] != plans[i - 1][0]]
        assert [policy for _, policy in order] == ["auto", "cpu", "auto"]


def _growing(world_size: int) -> Any:
    """From the sixth step on, rank 0 sees steps that take 5000 bytes, and later ones that take a little more."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        steps: list[int] = []
        looks: list[int] = []
        original = WarmUp.after_step

        def after_step(warm_up: WarmUp, **options: bool) -> None:
            steps.append(len(steps))
            original(warm_up, **options)

        def wanted(engine: Engine) -> int:
            if len(steps) < 6 or engine.comm.rank > 0:
                return 0
            looks.append(5000 if not looks else 5040)
            return looks[-1]

        monkeypatch.setattr(WarmUp, "after_step", after_step)
        monkeypatch.setattr(Engine, "wanted_non_model_bytes", property(wanted))
        monkeypatch.setattr(Planner, "refined_plan", lambda planner, now, profile: now.current)
        callback = Plans()
        strategy = ElixirStrategy(gpu_memory_limit="96KiB", **CHUNK)
        trainer = make_trainer(strategy, devices=world_size, callbacks=[callback])
        pl.seed_everything(11, verbose=False)
        model = Net()
        least: list[int] = []
        model.on_train_end = lambda: least.append(strategy._fit_run.warm_up._least_bytes)  # type: ignore[method-assign,union-attr]
        trainer.fit(model, make_data(world_size * 4 * 30))
        plans = [(plan.fingerprint(), plan.policy) for plan in callback.plans]
        return [x.item() for x in model.losses], plans, least[0]


# A device that has no room for the states of the plan


@pytest.mark.parametrize("world_size", telling([1, 2], "2"))
def test_states_that_find_no_room_on_the_device_lead_to_another_plan(world_size: int) -> None:
    expected = run_ranks(_plainly, world_size, world_size, partial(Net, "hybrid"), init_group=False)
    results = run_ranks(_without_room, world_size, world_size, init_group=False)
    for (losses, policies), plain in zip(results, expected, strict=True):
        assert losses == plain
        assert policies[0] == "cpu"
        assert policies[-1] == "auto"


def _without_room(world_size: int) -> Any:
    """The last rank finds none for the second chunk, before the first step."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        original, reserved = UpdateScheduler._reserve_states, []

        def reserve_states(scheduler: UpdateScheduler, chunk: Any, **options: Any) -> None:
            is_near = chunk.spec.optim_tier is Tier.GPU
            reserved.extend([chunk.id] * is_near)
            if is_near and len(reserved) == 2 and scheduler._engine.comm.rank == world_size - 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 34.00 MiB.")
            original(scheduler, chunk, **options)

        monkeypatch.setattr(UpdateScheduler, "_reserve_states", reserve_states)
        callback = Plans()
        strategy = ElixirStrategy(gpu_memory_limit="380KiB", **CHUNK)
        run = fit(
            strategy, partial(Net, "hybrid"), devices=world_size, train=lambda: make_data(64), callbacks=[callback]
        )[2]
        return [x.item() for x in run.losses], [plan.policy for plan in callback.plans]

"""The engine measures its own steps."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_elixir.core import device as core_device
from lightning_elixir.plan.profile import StepProfile
from lightning_elixir.plan.types import Acquire
from lightning_elixir.runtime.fetcher import Fetcher
from lightning_elixir.runtime.sampling import StepSeconds
from lightning_elixir.runtime.steps import Steps
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.metered import MeteredCpuDevice, use_metered_device
from tests.helpers.plans import make_plan
from tests.helpers.tiers import crossed
from tests.helpers.training import Scheme, different_names, train_elixir, train_plain
from tests.helpers.zoo import ZOO

WIDTH = 32
ROWS = 64
LAYER_BYTES = WIDTH * WIDTH * 4


class Layers(nn.Module):
    """Layers of one chunk each; every one keeps its input, of ROWS x WIDTH, for backward."""

    def __init__(self, num: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num))
        self.left_out: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = x if number == self.left_out else layer(x)
        return x


def build(monkeypatch: pytest.MonkeyPatch, model: nn.Module, **options: Any) -> tuple[ElixirModule, MeteredCpuDevice]:
    device = use_metered_device(monkeypatch)
    plan = make_plan(model, **{"placement_policy": "cpu", "chunk_size": LAYER_BYTES, **options})
    return ElixirModule(model, plan), device


def step(module: ElixirModule, optimizer: ElixirOptimizer, device: MeteredCpuDevice, rows: int = ROWS) -> None:
    with device.counting():
        loss = module(torch.ones(rows, WIDTH)).square().mean()
        optimizer.backward(loss)
        del loss
    optimizer.step()


def sampled(module: ElixirModule) -> StepProfile:
    profile = module.engine.step_profile()
    assert profile is not None
    return profile


def test_intervals_belong_to_the_accesses_of_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Layers(4)
    module, device = build(monkeypatch, model)
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.1))
    assert module.engine.step_profile() is None
    module.sample_activations()
    step(module, optimizer, device)
    profile = sampled(module)
    accesses = [event.ids for event in profile.trace.acquires()]
    assert profile.trace == module.engine.traces["train"]
    # Backward unpacks the weight of every layer but the first, whose input needs no gradient.
    assert accesses == [(0,), (1,), (2,), (3,), (3,), (2,), (1,)]
    assert len(profile.intervals) == 8
    activation = ROWS * WIDTH * 4
    # The input; then each layer's output stays, and the last one is squared.
    assert [i.non_model_bytes // activation for i in profile.intervals[:4]] == [1, 2, 3, 4]
    assert profile.peak_non_model_bytes == module.peak_activation_bytes()
    assert [i.grads for i in profile.intervals] == [()] * 5 + [(3,), (2,), (1, 0)]
    module.close()


def test_what_the_engine_holds_is_no_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = []
    for chunk_size in (LAYER_BYTES, 4 * LAYER_BYTES):
        model = Layers(8)
        module, device = build(monkeypatch, model, chunk_size=chunk_size)
        optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.1))
        module.sample_activations()
        step(module, optimizer, device, rows=4)  # so that blocks are larger than activations
        peaks.append([i.non_model_bytes for i in sampled(module).intervals])
        module.close()
    assert peaks[0] == peaks[1]


class Clock:
    """Shows what was added up: a fetch takes `fetch_s`, a layer's forward `layer_s`, and nothing else any time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fetch_s: float, layer_s: float) -> None:
        self.now_s = 0.0
        self._layer_s = layer_s
        real = Fetcher.fetch

        def fetch(fetcher: Fetcher, chunk: Any) -> None:
            self.now_s += fetch_s
            real(fetcher, chunk)

        monkeypatch.setattr(Fetcher, "fetch", fetch)
        monkeypatch.setattr(core_device.time, "perf_counter", lambda: self.now_s)

    def layer(self) -> nn.Module:
        linear = nn.Linear(WIDTH, WIDTH, bias=False)
        linear.register_forward_hook(self._take_time)
        return linear

    def _take_time(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.now_s += self._layer_s


def test_what_lies_between_two_steps_is_known_where_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, fetch_s=0.03, layer_s=0.01)
    model = nn.Sequential(*(clock.layer() for _ in range(3)))
    module, device = build(monkeypatch, model, prefetch=False)
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.1))

    def seen_after(seconds: float) -> float | None:
        """Of the pause before a micro-batch, which begins after so long."""
        clock.now_s += seconds
        with device.counting():
            optimizer.backward(module(torch.ones(ROWS, WIDTH)).square().mean())
        return module.engine.seconds_between

    seen_after(0.0)
    optimizer.step()
    module.engine.sample_times(True)
    assert seen_after(0.5) is None  # the one before was not timed
    assert seen_after(0.25) is None  # no step has come between
    optimizer.step()
    assert seen_after(0.125) == pytest.approx(0.125)
    optimizer.step()
    optimizer.step()  # of another one, say
    assert seen_after(0.25) == pytest.approx(0.25)
    for is_before_step in (False, True):
        if not is_before_step:
            optimizer.step()
        with torch.no_grad():
            module(torch.ones(ROWS, WIDTH))
        if is_before_step:
            optimizer.step()
        assert seen_after(0.5) is None
    optimizer.step()
    module.engine.sample_times(False)
    assert seen_after(0.5) is None
    module.engine.sample_times(True)
    assert seen_after(0.5) is None  # another micro-batch lies between
    module.close()


def test_waiting_is_no_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, fetch_s=0.03, layer_s=0.01)
    model = nn.Sequential(*(clock.layer() for _ in range(3)))
    module, device = build(monkeypatch, model, prefetch=False)
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.1))
    module.engine.sample_times(True)
    step(module, optimizer, device)
    stats = module.stats()
    assert stats.fetches > 3
    assert stats.compute_s == pytest.approx(0.03)
    assert stats.exposed_wait_s == pytest.approx(0.03 * stats.fetches)
    profile = sampled(module)
    assert profile.compute_s == pytest.approx(0.03)
    assert [i.compute_s for i in profile.intervals[1:4]] == pytest.approx([0.01] * 3)
    module.close()


def test_gradients_have_their_time_in_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward takes its time before a layer's weight is needed: when the one above has given its gradient."""
    clock = Clock(monkeypatch, fetch_s=0.03, layer_s=0.0)

    def take_time(grad: Tensor) -> None:
        clock.now_s += 0.02

    def before_backward(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(take_time)

    model = nn.Sequential(*(clock.layer() for _ in range(3)))
    for layer in model:
        layer.register_forward_hook(before_backward)
    module, device = build(monkeypatch, model, prefetch=False)
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.1))
    module.engine.sample_times(True)
    step(module, optimizer, device)
    profile = sampled(module)
    assert profile.compute_s == pytest.approx(3 * 0.02)
    # The first layer's input needs no gradient, so its weight is not needed.
    assert [i.grads for i in profile.intervals] == [(), (), (), (), (2,), (1, 0)]
    assert [i.grad_s for i in profile.intervals[4:]] == [pytest.approx((0.0,)), pytest.approx((0.0, 0.02))]
    assert [i.compute_s for i in profile.intervals[3:]] == pytest.approx([0.02] * 3)
    module.close()


def test_all_that_was_timed_is_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several micro-batches `stats` has the last one."""
    clock = Clock(monkeypatch, fetch_s=0.03, layer_s=0.01)
    model = nn.Sequential(*(clock.layer() for _ in range(3)))
    module, _ = build(monkeypatch, model, prefetch=False)
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.1))
    assert module.engine.all_seconds == StepSeconds(0.0, 0.0)
    for is_timed in (True, False, True, True):
        module.engine.sample_times(is_timed)
        before = module.stats().fetches
        optimizer.backward(module(torch.ones(ROWS, WIDTH)).square().mean())
    optimizer.step()
    fetches = module.stats().fetches - before  # of each of the last two
    seconds = module.engine.all_seconds
    assert seconds.compute_s == pytest.approx(3 * 0.03)
    assert module.stats().compute_s == pytest.approx(0.03)
    assert seconds.exposed_wait_s > 2.5 * 0.03 * fetches
    assert module.stats().exposed_wait_s == pytest.approx(0.03 * fetches)
    assert module.engine.all_seconds == seconds  # reading adds nothing
    module.close()


def test_times_of_a_later_step_join_the_bytes_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Layers(4)
    module, device = build(monkeypatch, model)
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.1))
    module.sample_activations()
    step(module, optimizer, device)
    module.sample_activations(False)
    first = sampled(module)
    assert first.compute_s == 0
    step(module, optimizer, device)
    assert module.stats().compute_s is None
    module.engine.sample_times(True)
    step(module, optimizer, device)
    module.engine.sample_times(False)
    second = sampled(module)
    assert second.compute_s > 0
    assert [i.non_model_bytes for i in second.intervals] == [i.non_model_bytes for i in first.intervals]
    assert second.trace == first.trace
    seconds = module.engine.last_seconds
    step(module, optimizer, device)
    assert module.engine.last_seconds == seconds
    module.close()


def test_everything_resident_has_intervals_around_the_gradients_of_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Layers(4)
    module, device = build(monkeypatch, model, placement_policy="cuda")
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.1))
    module.sample_activations()
    module.engine.sample_times(True)
    step(module, optimizer, device)
    profile = sampled(module)
    assert all(access.ids == () for access in profile.trace.acquires())
    assert profile.compute_s > 0
    assert [i.arrivals for i in profile.intervals] == [(), (3, 3), (), (2, 2), (), (1, 1), (), (0, 0), ()]
    assert [begun for begun, _ in profile.course.moments] == [(), (3,), (2,), (1,), (0,)]
    module.close()


def test_the_last_of_several_micro_batches_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Layers(4)
    module, device = build(monkeypatch, model)
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.1))
    module.sample_activations()
    for rows in (2 * ROWS, ROWS):
        with device.counting():
            optimizer.backward(module(torch.ones(rows, WIDTH)).square().mean())
    optimizer.step()
    assert len(sampled(module).intervals) == 8
    # Over all of them: a plan has to hold the largest.
    assert module.peak_activation_bytes() > 1.8 * sampled(module).peak_non_model_bytes
    module.close()


def test_an_interrupted_iteration_gives_no_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Layers(4)
    module, device = build(monkeypatch, model)
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.1))
    module.sample_activations()
    module.engine.sample_times(True)
    step(module, optimizer, device)
    before = sampled(module)
    with pytest.raises(RuntimeError, match="shapes"):
        module(torch.ones(3, WIDTH + 1))
    assert sampled(module) == before
    step(module, optimizer, device)
    assert [i.grads for i in sampled(module).intervals] == [i.grads for i in before.intervals]
    module.close()


def test_a_step_that_departs_from_the_trace_has_times_and_no_profile_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Layers(4)
    module, device = build(monkeypatch, model)
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.1))
    module.sample_activations()
    step(module, optimizer, device)
    module.sample_activations(False)
    before = sampled(module)
    module.engine.sample_times(True)
    model.left_out = 1
    step(module, optimizer, device)
    assert sampled(module) == before
    assert module.stats().compute_s is not None
    module.close()


def test_evaluation_in_between_is_not_part_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Layers(4)
    module, device = build(monkeypatch, model)
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.1))
    module.sample_activations()
    step(module, optimizer, device)
    before = sampled(module)
    with torch.no_grad():
        module(torch.ones(ROWS, WIDTH))
    assert sampled(module) == before
    module.close()


@crossed(
    told=["checkpoint_reentrant-3", "tied-1", "recurrent-1", "branching-1", "gpt2_checkpoint-1"], name=ZOO, steps=[1, 3]
)
def test_sampling_changes_no_number(name: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real, real_end_step = ElixirModule.__init__, Steps.end
    updated: list[int] = []

    def end_step(steps: Steps, ids: Any, used: Any, members: Any) -> None:
        updated[:] = list(ids)
        real_end_step(steps, ids, used, members)

    monkeypatch.setattr(Steps, "end", end_step)

    def build_sampling(module: ElixirModule, *args: Any, **kwargs: Any) -> None:
        real(module, *args, **kwargs)
        module.sample_activations()
        module.engine.sample_times(True)

    monkeypatch.setattr(ElixirModule, "__init__", build_sampling)
    chunk_size = 4 * 1024 if name in ("mlp", "conv") else 8 * 1024
    run = train_elixir(name, Scheme(steps=steps), placement_policy="cpu", chunk_size=chunk_size)
    assert different_names(run, train_plain(name, Scheme(steps=steps))) == []
    profile = sampled(run.engine)
    acquires = [e for e in profile.trace.events if isinstance(e, Acquire)]
    assert len(profile.intervals) == len(acquires) + 1
    assert sorted(i for interval in profile.intervals for i in interval.grads) == sorted(updated)


def test_marks_measure_seconds() -> None:
    device = core_device.CpuDevice()
    first = device.mark()
    time.sleep(0.02)
    assert device.mark().seconds_since(first) >= 0.02

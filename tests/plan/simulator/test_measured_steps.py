"""Steps that ran on an H200 and what the simulator makes of their plans, brought up to date as a fit does it.

The figures are those of `examples/benchmarks/results/defaults_looked_at_again_h200_2026-11-25.json` at ed1bdfc, whose
plans have many streamed updates. Layers are taken to be alike, with a quarter of the computing in forward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from lightning_elixir.plan.hardware import BandwidthCurve, HardwareSpec
from lightning_elixir.plan.profile import StepInterval, StepProfile
from lightning_elixir.plan.regime import TrainingRegime, UpdateMode
from lightning_elixir.plan.simulator.timeline import Timeline, scheme_of, simulate_step
from lightning_elixir.plan.types import ALIGN_NUMEL, ChunkSpec, Member, Plan, Tier, UpdateTiming
from tests.plan.traces import unpinned

MACHINE = replace(
    HardwareSpec.nominal(2**37, 2**37),
    h2d=BandwidthCurve.constant(54.6e9),
    d2h=BandwidthCurve.constant(54.8e9),
    duplex_slowdown=1.108,
    cpu_adam_numel_per_s=5.66e9,
    gpu_adam_numel_per_s=135.7e9,
    streamed_adam_numel_per_s=3.51e9,
    joint_adam_numel_per_s=6.15e9,
    host_bytes_per_s=175e9,
)


@dataclass(frozen=True)
class Fit:
    """A plan, and what its steps took."""

    gpu_numel: int
    streamed_numel: int
    cpu_numel: int
    resident: int
    """Chunks with all on the GPU."""
    streamed: int
    blocks: int
    others: int
    """Chunks that the host updates."""
    compute_s: float
    """Of one micro-batch."""
    host_s: float
    """The host's own updates in a step, as seen."""
    step_s: float
    num_backwards: int = 1

    @property
    def timing(self) -> UpdateTiming:
        return UpdateTiming.INSIDE_BACKWARD if self.num_backwards == 1 else UpdateTiming.BEHIND_FORWARD

    def plan(self) -> Plan:
        """Streamed updates are spread over the chunks that have their states on the host."""
        on_host = self.streamed + self.others
        streamed = {self.resident + k * on_host // self.streamed for k in range(self.streamed)}
        chunks = []
        for i in range(self.resident + on_host):
            numel, count = (self.gpu_numel, self.resident) if i < self.resident else (self.cpu_numel, self.others)
            if i in streamed:
                numel, count = self.streamed_numel, self.streamed
            numel = numel // count // ALIGN_NUMEL * ALIGN_NUMEL
            tier = Tier.GPU if i < self.resident else Tier.CPU
            spec = ChunkSpec(i, "bfloat16", True, numel, (Member(f"p{i}", (numel,), 0),), tier, tier, i < self.resident)
            chunks.append(replace(spec, is_update_streamed=i in streamed))
        largest = max(c.nbytes for c in chunks)
        plan = Plan(1, "bfloat16", largest, self.blocks, 8, tuple(chunks))
        return replace(plan, update_timing=self.timing)

    def profile(self) -> StepProfile:
        """Forward, and backward, which recomputes."""
        count = self.resident + self.streamed + self.others
        forward = [StepInterval(self.compute_s / 4 / count, 0)] * count
        back = [StepInterval(self.compute_s * 3 / 4 / count, 0, (i,)) for i in reversed(range(count))]
        trace = unpinned(*range(count), *reversed(range(count)))
        return StepProfile(trace, (StepInterval(0.0, 0), *forward, *back))

    def simulated(self, machine: HardwareSpec) -> Timeline:
        regime = TrainingRegime(
            accumulates=self.num_backwards > 1,
            num_backwards=self.num_backwards,
            update_timing=self.timing,
            can_stream=True,
        )
        scheme = replace(scheme_of(self.plan(), regime), updates=UpdateMode(self.timing))
        return simulate_step(self.plan(), self.profile(), machine, scheme)


FITS = {
    "llama": Fit(2205237248, 1428209664, 3104968704, 22, 14, 9, 31, 0.972, 0.692, 1.015),
    "llama_accumulate": Fit(1614864384, 1619066880, 3504484352, 8, 8, 3, 18, 0.925, 0.697, 2.886, 2),
    "moe": Fit(203429888, 1538007296, 3790361344, 2, 5, 14, 12, 0.214, 0.795, 1.091),
    "gpt_16": Fit(344465408, 1308676096, 3192512512, 3, 13, 6, 31, 0.475, 0.723, 0.993),
}


@pytest.mark.parametrize("name", FITS)
def test_steps_with_many_streamed_updates_are_as_measured(name: str) -> None:
    """Within the 15% that predictions are to keep."""
    fit = FITS[name]
    slower = max(1.0, fit.host_s / fit.simulated(MACHINE).host_update_s)
    seen = fit.simulated(MACHINE.with_host_slower(slower))
    assert seen.host_update_s == pytest.approx(fit.host_s, rel=0.1)
    assert seen.times.total_s == pytest.approx(fit.step_s, rel=0.15)

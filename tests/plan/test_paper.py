"""The closed forms of the Elixir paper (arXiv 2212.05339), and what becomes of them under our rules.

The paper compares two uses of the same GPU memory, in nanoseconds a step that one element's worth of it saves, with n
GPUs on one host and rates of all of them together:

    I(n) = e_p/B_c2g + e_p/B_g2c                                              as a block of the rCache
    J(n) = (n/r_os) (e_o/B_c2g + I + e_p/B_g2c + 1/V_cpu - 1/V_gpu)           as optimizer states

for e_p = 2 bytes of a parameter, e_o = 4 of a gradient or master, r_os = 7 times a parameter's bytes for states. The
rCache comes first where I > J: with one GPU in fp16; with two and more, states do.

Ours differ where the runtime does:
- A block of the rCache saves a fetch. Evicting a replica moves nothing (its values are in the shard): I' = e_p/B_c2g.
- Gradients go down, in the compute dtype, beside the fetches of the chunks that follow; new values come up with the
  next fetch. So states on the GPU save a chunk's fetches (two a step: forward, backward) and its update on the host;
  the GPU updates its share beside the host's. The gradient comes along, and replicas are cast from the master: a chunk
  costs 2 + 12 bytes an element, and one block's worth of memory on each of n ranks buys n/7 of it:
  J' = (n/7) (2 e_p/B_c2g + 1/V_cpu). Casts are not counted here.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lightning_elixir.plan.hardware import BandwidthCurve, HardwareSpec
from lightning_elixir.plan.profile import StepInterval, StepProfile
from lightning_elixir.plan.simulator.timeline import scheme_of, simulate_step
from lightning_elixir.plan.types import ALIGN_NUMEL, ChunkSpec, Member, Plan, Tier
from tests.plan.problems import MIXED, constant_hardware
from tests.plan.traces import unpinned

GB = 1e9
PARAM_BYTES, MASTER_BYTES, STATES_RATIO = 2, 4, 7


def up_bytes_per_s(n: int) -> float:
    """CPU to GPU, all ranks together."""
    return (16.3 * n + 8.7) * GB


def down_bytes_per_s(n: int) -> float:
    return (15.8 * n + 2.3) * GB


def host_numel_per_s(n: int) -> float:
    return (1.66 * math.log(n) + 5.15) * GB


def gpu_numel_per_s(n: int) -> float:
    return 50 * n * GB


def benefit_of_rcache(n: int) -> float:
    """Nanoseconds an element."""
    return (PARAM_BYTES / up_bytes_per_s(n) + PARAM_BYTES / down_bytes_per_s(n)) * GB


def benefit_of_states(n: int) -> float:
    moved = MASTER_BYTES / up_bytes_per_s(n) + PARAM_BYTES / down_bytes_per_s(n)
    updated = 1 / host_numel_per_s(n) - 1 / gpu_numel_per_s(n)
    return n / STATES_RATIO * ((moved + updated) * GB + benefit_of_rcache(n))


@pytest.mark.parametrize(
    ("n", "rcache", "states"), [(1, 0.191, 0.091), (2, 0.107, 0.118), (4, 0.058, 0.155), (8, 0.030, 0.215)]
)
def test_the_table_of_the_paper(n: int, rcache: float, states: float) -> None:
    assert benefit_of_rcache(n) == pytest.approx(rcache, abs=6e-4)
    assert benefit_of_states(n) == pytest.approx(states, abs=6e-4)


# The same under our rules

NUM_CHUNKS = 24
NUMEL = 16 * 8 * ALIGN_NUMEL
BLOCKS = 4


def hardware_of(n: int) -> HardwareSpec:
    """One rank's share of the paper's rates. Gathers are not counted there, and nothing computes."""
    return constant_hardware(
        h2d=up_bytes_per_s(n) / n,
        d2h=BandwidthCurve.constant(down_bytes_per_s(n) / n * 1e6),  # hidden: see the last test
        cpu_adam_numel_per_s=host_numel_per_s(n) / n,
        gpu_adam_numel_per_s=gpu_numel_per_s(n) / n,
        device_bytes_per_s=math.inf,
    )


def plan_of(n: int, blocks: int, on_gpu: int = 0) -> Plan:
    """fp16 parameters, the first `on_gpu` chunks with their states on the GPU."""
    chunks = []
    for i in range(NUM_CHUNKS):
        tier = Tier.GPU if i < on_gpu else Tier.CPU
        member = Member(f"p{i}", (NUMEL,), 0)
        chunks.append(ChunkSpec(i, "float16", True, NUMEL, (member,), tier, tier, is_persistent=False))
    return Plan(n, "float16", NUMEL * PARAM_BYTES, blocks, 0, tuple(chunks))


def seconds(plan: Plan, hardware: HardwareSpec) -> float:
    back = list(reversed(range(NUM_CHUNKS)))
    intervals = [StepInterval(0.0, 0)] * (NUM_CHUNKS + 1) + [StepInterval(0.0, 0, (i,)) for i in back]
    profile = StepProfile(unpinned(*range(NUM_CHUNKS), *back), tuple(intervals))
    return simulate_step(plan, profile, hardware, scheme_of(plan, MIXED)).times.total_s


def our_benefit_of_rcache(n: int) -> float:
    """Simulated: of one more block on every rank, in nanoseconds an element."""
    hardware = hardware_of(n)
    saved = seconds(plan_of(n, BLOCKS), hardware) - seconds(plan_of(n, BLOCKS + 1), hardware)
    return saved / NUMEL * GB


def our_benefit_of_states(n: int) -> float:
    """Simulated: of a block's worth of memory on every rank spent on chunks of 14 bytes an element."""
    hardware = hardware_of(n)
    saved = seconds(plan_of(n, BLOCKS), hardware) - seconds(plan_of(n, BLOCKS, on_gpu=1), hardware)
    data = MIXED.data_bytes["float16"]
    return saved / NUMEL * GB * n * PARAM_BYTES / data.optim


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_our_gains_are_our_closed_forms(n: int) -> None:
    up, host = PARAM_BYTES / up_bytes_per_s(n) * GB, 1 / host_numel_per_s(n) * GB
    assert our_benefit_of_rcache(n) == pytest.approx(up, rel=1e-3)
    assert our_benefit_of_states(n) == pytest.approx(n / STATES_RATIO * (2 * up + host), rel=1e-3)


def test_our_gains_go_the_way_of_the_paper() -> None:
    counts = (1, 2, 4, 8)
    for gains in (benefit_of_rcache, our_benefit_of_rcache):
        values = [gains(n) for n in counts]
        assert values == sorted(values, reverse=True)
    for gains in (benefit_of_states, our_benefit_of_states):
        values = [gains(n) for n in counts]
        assert values == sorted(values)
    wanted = [True, False, False, False]  # the rCache first with one GPU only
    assert [benefit_of_rcache(n) > benefit_of_states(n) for n in counts] == wanted
    assert [our_benefit_of_rcache(n) > our_benefit_of_states(n) for n in counts] == wanted


@pytest.mark.parametrize(("n", "is_rcache_better"), [(1, True), (2, False), (4, False), (8, False)])
def test_the_same_memory_spent_either_way(n: int, is_rcache_better: bool) -> None:
    """Eight blocks, or the states of n chunks: whole plans, not only their margins."""
    hardware = hardware_of(n)
    with_blocks = seconds(plan_of(n, BLOCKS + 8), hardware)
    with_states = seconds(plan_of(n, BLOCKS, on_gpu=n), hardware)
    assert (with_blocks < with_states) is is_rcache_better


def test_gradients_go_down_beside_what_comes_up() -> None:
    """The paper counts both directions one after the other; here the slower of the two counts."""
    hardware = hardware_of(2)
    slow = replace(hardware, d2h=hardware.h2d)
    plan = plan_of(2, BLOCKS)
    transfer_s = NUMEL * PARAM_BYTES / up_bytes_per_s(2)
    # The gradients of the chunks that backward finds in the rCache have no fetch beside them, and one comes last.
    extra_s = seconds(plan, slow) - seconds(plan, hardware)
    assert extra_s <= (BLOCKS + 1) * transfer_s * 1.01
    assert extra_s < NUM_CHUNKS * transfer_s / 4

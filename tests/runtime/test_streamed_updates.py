"""Updates streamed to the device give, bit for bit, what the host and the device itself give.

The bodies take the device, so that `tests/gpu` runs them with real lanes, page-locked memory and device memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_elixir.errors import CapacityError, PlanError
from lightning_elixir.optim import CPUAdam, HybridAdam, execution
from lightning_elixir.optim.streaming import StateStream
from lightning_elixir.plan.types import ChunkSpec, Plan, Tier
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.dist import run_ranks
from tests.helpers.plans import make_plan
from tests.helpers.tiers import crossed
from tests.helpers.zoo import ZOO, make

CPU = torch.device("cpu")


@dataclass(frozen=True)
class How:
    """How to train."""

    name: str = "gpt2"
    dtype: torch.dtype = torch.bfloat16
    master: bool = True
    micro_batches: int = 1
    clip_norm: float = 0.0
    clip_value: float = 0.0
    max_norm: float = 0.0
    scale: float = 0.0
    """Loss scale; 0: none."""
    overflow_at: int = -1
    """Step whose loss is infinite."""
    optimizer: Callable[..., HybridAdam] = HybridAdam
    adamw_mode: bool = True
    has_groups: bool = False
    init_step: bool = False
    steps: int = 4


@dataclass
class Result:
    values: dict[str, Tensor]
    optimizer_state: dict[str, Any]
    norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    numel: tuple[int, int, int] = (0, 0, 0)
    """Updated in the last step on the device, streamed, on the host."""


HOWS = {
    "bf16": How(),
    "fp32": How(dtype=torch.float32),
    "bf16_true": How(master=False),
    "accumulated": How(micro_batches=3),
    "accumulated_clipped": How(micro_batches=2, clip_norm=0.05),
    "clipped": How(clip_norm=0.05),
    "max_norm": How(max_norm=0.05),
    "clipped_by_value": How(clip_value=0.003),
    "fp32_clipped_by_value": How(dtype=torch.float32, clip_value=0.003, micro_batches=2),
    "bf16_true_clipped_by_value": How(master=False, clip_value=0.003),
    "scaled": How(scale=64.0, overflow_at=2),
    "scaled_clipped": How(scale=64.0, overflow_at=1, clip_norm=0.05, clip_value=0.003),
    "adam": How(adamw_mode=False),
    "cpu_adam": How(optimizer=CPUAdam),
    "groups": How(has_groups=True),
    "groups_adam_clipped": How(has_groups=True, adamw_mode=False, clip_norm=0.05),
    "init_step": How(init_step=True),
    "unused": How(name="branching"),
    "unused_fp32": How(name="branching", dtype=torch.float32, init_step=True),
    "frozen": How(name="frozen"),
    "odd": How(name="odd"),
    "tied": How(name="tied"),
    "conv": How(name="conv", dtype=torch.float32),
}

# What to make of a chunk that the "cpu" policy made: everything of it on the host.
SITES: dict[str, Callable[[ChunkSpec], ChunkSpec]] = {
    "host": lambda c: c,
    "streamed": lambda c: replace(c, is_update_streamed=True),
    "mixed": lambda c: replace(c, is_update_streamed=c.id % 2 == 0),
    "every_site": lambda c: replace(
        c, optim_tier=Tier.GPU if c.id % 3 == 0 else Tier.CPU, is_update_streamed=c.id % 3 == 1
    ),
    "streamed_param_on_gpu": lambda c: replace(c, param_tier=Tier.GPU, is_update_streamed=True),
    "streamed_persistent": lambda c: replace(c, param_tier=Tier.GPU, is_persistent=True, is_update_streamed=True),
    "mixed_persistent": lambda c: replace(c, param_tier=Tier.GPU, is_persistent=True, is_update_streamed=c.id % 2 == 0),
    "gpu": lambda c: replace(c, param_tier=Tier.GPU, optim_tier=Tier.GPU, is_persistent=True),
    "nvme": lambda c: replace(c, optim_tier=Tier.NVME),
    "nvme_some": lambda c: replace(c, optim_tier=Tier.NVME if c.id % 3 else Tier.CPU, is_update_streamed=c.id % 6 == 3),
    "nvme_param_on_gpu": lambda c: replace(c, param_tier=Tier.GPU, optim_tier=Tier.NVME),
    "nvme_param": lambda c: replace(c, param_tier=Tier.NVME, optim_tier=Tier.NVME),
    "nvme_persistent": lambda c: replace(c, param_tier=Tier.GPU, optim_tier=Tier.NVME, is_persistent=True),
}


def plan_for(model: nn.Module, how: How, site: str, world_size: int = 1, **options: Any) -> Plan:
    options = {"chunk_size": 4 * 1024 if how.name in ("conv", "branching", "frozen") else 8 * 1024, **options}
    plan = make_plan(
        model,
        placement_policy="cpu",
        compute_dtype=how.dtype,
        master_weights=how.master,
        world_size=world_size,
        **options,
    )
    is_all = site == "nvme_param"  # frozen parameters, too
    return replace(plan, chunks=tuple(SITES[site](c) if c.requires_grad or is_all else c for c in plan.chunks))


def new_optimizer(model: nn.Module, how: How) -> HybridAdam:
    settings = {"lr": 1e-2, "weight_decay": 0.05, "adamw_mode": how.adamw_mode}
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not how.has_groups:
        return how.optimizer(parameters, **settings)
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2]},
        {"params": [p for p in parameters if p.dim() < 2], "lr": 3e-3, "weight_decay": 0.0, "betas": (0.3, 0.8)},
    ]
    return how.optimizer(groups, **settings)


def new_training(how: How, site: str, device: torch.device, **options: Any) -> tuple[ElixirModule, ElixirOptimizer]:
    model = make(how.name)
    inner = new_optimizer(model, how)
    module = ElixirModule(
        model, plan_for(model, how, site, **options), dtype=how.dtype, master_weights=how.master, device=device
    )
    if how.scale and device.type == "cpu":
        module.needs_loss_scale = True  # there is no fp16 on the CPU; scaling works with any dtype
    optimizer = ElixirOptimizer(
        module,
        inner,
        initial_scale=how.scale or 1.0,
        init_step=how.init_step,
        max_norm=how.max_norm,
    )
    return module, optimizer


def train_micro_batch(
    module: ElixirModule, optimizer: ElixirOptimizer, how: How, step: int, micro: int, rank: int = 0
) -> None:
    loss = ZOO[how.name].loss(module, (step * how.micro_batches + micro) * 3 + rank)
    optimizer.backward(loss * float("inf") if step == how.overflow_at else loss)


def train_step(module: ElixirModule, optimizer: ElixirOptimizer, how: How, step: int, rank: int = 0) -> float | None:
    for micro in range(how.micro_batches):
        train_micro_batch(module, optimizer, how, step, micro, rank)
    return end_step(optimizer, how)


def end_step(optimizer: ElixirOptimizer, how: How) -> float | None:
    norm = None
    if how.clip_value:
        optimizer.clip_grad_value_(how.clip_value)
    if how.clip_norm:
        norm = float(optimizer.clip_grad_norm_(how.clip_norm))
    optimizer.step()
    return norm


def result_of(module: ElixirModule, optimizer: ElixirOptimizer) -> Result:
    times = optimizer.last_step_times
    numel = (times.gpu_numel, times.streamed_numel, times.cpu_numel) if times else (0, 0, 0)
    return Result(module.full_state_dict(), copy.deepcopy(optimizer.state_dict()), numel=numel)


def train(how: How, site: str, device: torch.device = CPU) -> Result:
    module, optimizer = new_training(how, site, device)
    norms, skipped = [], []
    for step in range(how.steps):
        norms.append(train_step(module, optimizer, how, step))
        skipped.append(optimizer.is_step_skipped)
    result = result_of(module, optimizer)
    module.close()
    return replace(result, norms=[n for n in norms if n is not None], skipped=skipped)


def assert_same(actual: Result, expected: Result) -> None:
    assert [k for k, v in expected.values.items() if not torch.equal(actual.values[k], v)] == []
    assert list(actual.optimizer_state["state"]) == list(expected.optimizer_state["state"])
    for number, state in expected.optimizer_state["state"].items():
        other = actual.optimizer_state["state"][number]
        assert list(other) == list(state)
        assert [k for k, v in state.items() if not torch.equal(other[k], v)] == [], number
    assert actual.optimizer_state.get("loss_scaler") == expected.optimizer_state.get("loss_scaler")
    assert actual.optimizer_state["param_groups"] == expected.optimizer_state["param_groups"]
    assert actual.skipped == expected.skipped


def use_small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots of one or two thousand elements, so that these models take many pieces."""
    monkeypatch.setattr(execution, "StateStream", partial(StateStream, slot_bytes=20 * 1024, scratch_bytes=5 * 4 * 512))


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_slots(monkeypatch)


def check_sites_agree(how: How, sites: list[str], device: torch.device, reference: str = "host") -> None:
    expected = train(how, reference, device)
    changed = make(how.name).state_dict()
    assert any(not torch.equal(changed[k], v) for k, v in expected.values.items())
    for site in sites:
        actual = train(how, site, device)
        assert_same(actual, expected)
        assert str(actual.norms) == str(expected.norms)  # nan equals nan
        total = sum(expected.numel)
        on_device, streamed, on_host = actual.numel
        assert on_device + streamed + on_host == total
        if site.startswith("streamed"):
            assert streamed == total
        if site.startswith(("mixed", "every")):
            assert 0 < streamed < total


@pytest.mark.parametrize("how", HOWS)
def test_streamed_equals_host(how: str) -> None:
    check_sites_agree(HOWS[how], ["streamed", "mixed"], CPU)
    if HOWS[how].overflow_at >= 0:
        assert train(HOWS[how], "streamed").skipped.count(True) == 1


@pytest.mark.parametrize("how", ["bf16", "fp32", "bf16_true", "clipped_by_value", "unused"])
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


ORDER = ["streamed", "host", "gpu", "streamed", "streamed_persistent", "mixed", "every_site", "streamed"]
NVME_ORDER = [
    "nvme",
    "host",
    "nvme_some",
    "nvme_param",
    "nvme",
    "nvme_param",
    "gpu",
    "nvme_persistent",
    "nvme_param",
    "streamed",
    "nvme",
]


def check_replan(how: How, device: torch.device, order: list[str]) -> None:
    module, optimizer = new_training(how, order[0], device)
    reference, reference_optimizer = new_training(how, "host", device)
    for step, site in enumerate(order):
        if step:
            module.replan(plan_for(module.module, how, site))
        for m, o in ((module, optimizer), (reference, reference_optimizer)):
            train_step(m, o, how, step)
        held = module.stats().held_bytes
        assert "update_slot" not in held
        tiers = ("cpu", "gpu", "nvme")
        assert sum(held.get(f"{tier}_states", 0) for tier in tiers) == sum(optimizer.state_bytes().values())
        assert sum(optimizer.state_bytes().values()) == sum(reference_optimizer.state_bytes().values())
    assert_same(result_of(module, optimizer), result_of(reference, reference_optimizer))
    module.close()
    reference.close()


@crossed(
    order=[pytest.param(ORDER, id="memory"), pytest.param(NVME_ORDER, id="nvme")],
    how=["bf16", "fp32", "bf16_true", "unused"],
)
def test_replan_keeps_everything(how: str, order: list[str]) -> None:
    check_replan(HOWS[how], CPU, order)


def check_resume(how: How, device: torch.device, saved_from: str, loaded_into: str) -> None:
    module, optimizer = new_training(how, saved_from, device)
    for step in range(2):
        train_step(module, optimizer, how, step)
    values, state = module.full_state_dict(), copy.deepcopy(optimizer.state_dict())
    other, other_optimizer = new_training(how, loaded_into, device)
    train_step(other, other_optimizer, how, 17)  # what is loaded replaces states that were there
    other.load_full_state_dict(values)
    other_optimizer.load_state_dict(state)
    for step in range(2, 4):
        for m, o in ((module, optimizer), (other, other_optimizer)):
            train_step(m, o, how, step)
    assert_same(result_of(other, other_optimizer), result_of(module, optimizer))
    for m in (module, other):
        m.close()


@pytest.mark.parametrize(
    ("saved_from", "loaded_into"),
    [("streamed", "host"), ("gpu", "streamed"), ("mixed", "mixed"), ("nvme", "host"), ("host", "nvme_some")],
)
@pytest.mark.parametrize("how", ["bf16", "scaled", "unused", "groups"])
def test_resume_from_another_placement(how: str, saved_from: str, loaded_into: str) -> None:
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


def train_rank(how: How, site: str, options: dict[str, Any], device_type: str = "cpu") -> Result:
    with pytest.MonkeyPatch.context() as patch:
        use_small_slots(patch)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        device = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, rank)
        module, optimizer = new_training(how, site, device, world_size=world_size, **options)
        for step in range(how.steps):
            train_step(module, optimizer, how, step, rank)
        result = result_of(module, optimizer)
        module.close()
    return result


RANKED = [
    ("tied", {}),
    ("accumulated_clipped", {"enable_distributed_storage": False}),
    ("unused_fp32", {}),
    ("scaled", {}),
]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("how", "options"), RANKED)
def test_several_ranks(how: str, options: dict[str, Any], world_size: int) -> None:
    expected = run_ranks(train_rank, world_size, HOWS[how], "host", options)
    sites = ["streamed", "mixed"] if options else ["streamed", "every_site", "streamed_persistent"]
    for site in sites:
        results = run_ranks(train_rank, world_size, HOWS[how], site, options)
        assert_same(results[0], expected[0])
        assert [sum(r.numel) for r in results] == [sum(r.numel) for r in expected]
        assert sum(r.numel[1] for r in results) > 0


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
        assert 0 < times.adam_s <= times.update_s
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
    assert 0 < times.adam_s < times.update_s
    train_step(module, optimizer, how, how.overflow_at)
    assert optimizer.last_step_times is None
    module.close()


def test_out_of_device_memory_loses_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step raises before it counts or changes anything; with memory again, it can be repeated."""
    how = HOWS["bf16"]
    expected = train(replace(how, steps=2), "host")
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

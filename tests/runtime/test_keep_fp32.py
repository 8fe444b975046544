"""The engine with parameters in fp32 beside those of 16 bits, to the bit as plain autocast over fp32 weights."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_elixir.errors import PlanError
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.keep_fp32 import HALF, WIDTH, Mixture, Net, optimizer_over, train_through_moves
from tests.helpers.plans import make_plan


@pytest.mark.full  # combinations
@pytest.mark.parametrize(
    ("recompute", "is_frozen"), [(None, False), (None, True), ("reentrant", False), ("non-reentrant", False)]
)
def test_the_bits_of_plain_autocast_through_moves(recompute: str | None, is_frozen: bool) -> None:
    train_through_moves(recompute, is_frozen, "cpu")


def test_casts_of_kept_parameters_are_seen_by_selective_checkpointing() -> None:
    """Each recomputation casts them anew, so each forward has to, also after one without gradients."""
    net = Mixture()
    policy = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                teacher = checkpoint(self.net.experts[0], x, use_reentrant=False, context_fn=policy)
            return teacher + checkpoint(self.net.experts[0], x, use_reentrant=False, context_fn=policy)

    model = Twice()
    plan = make_plan(model, placement_policy="cpu", chunk_size=4096, compute_dtype=HALF)
    module = ElixirModule(model, plan, dtype=HALF, autocast=True, keep_fp32=["net.experts.0"])
    optimizer = ElixirOptimizer(module, optimizer_over(module))
    optimizer.backward(module(torch.randn(4, WIDTH)).float().sum())
    assert float(module.full_grads()["net.experts.0.weight"].abs().sum()) > 0


def test_copies_compute_in_fp32_throughout() -> None:
    model = nn.Sequential(nn.Embedding(8, WIDTH), nn.Linear(WIDTH, 4))
    plan = make_plan(model, placement_policy="cpu", chunk_size=4096, compute_dtype=HALF, keep_fp32=["0"])
    module = ElixirModule(model, plan, dtype=HALF, keep_fp32=["0"])
    tokens = torch.tensor([1, 5])
    assert module(tokens).dtype is HALF
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(copy.deepcopy(model)))):
        assert copied(tokens).dtype is torch.float32
    assert module(tokens).dtype is HALF


def test_a_kept_parameter_is_its_own_master() -> None:
    def held(keep: Any) -> dict[str, int]:
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
        plan = make_plan(model, placement_policy="cpu", chunk_size=8192, compute_dtype=HALF)
        module = ElixirModule(model, plan, dtype=HALF, keep_fp32=keep)
        optimizer = ElixirOptimizer(module, optimizer_over(module))
        optimizer.backward(module(torch.randn(2, 64)).float().sum())
        optimizer.step()
        module.engine.synchronize()
        kinds = module.engine.held_bytes()
        module.close()
        return {kind: nbytes for kind, nbytes in kinds.items() if not kind.startswith(("replica", "grad_block"))}

    all_half, one_kept = held(()), held(["2"])
    changes = {kind: one_kept[kind] - nbytes for kind, nbytes in all_half.items()}
    assert changes == {"cpu_param": 4096 * 2, "cpu_grad": 4096 * 2, "cpu_master": -4096 * 4, "cpu_states": 0}


def test_checkpoints_go_from_one_keep_fp32_to_another() -> None:
    states: list[Any] = []
    for keep in (["head"], ()):
        module = ElixirModule(
            model := Net(), make_plan(model, placement_policy="cpu", compute_dtype=HALF), dtype=HALF, keep_fp32=keep
        )
        if states:
            module.load_state_dict(states[0])
        states.append(module.state_dict())
    assert all(torch.equal(states[1][name], value) for name, value in states[0].items())


def test_the_plan_decides_where_nothing_is_said() -> None:
    model = Net()
    options: dict[str, Any] = {"placement_policy": "cpu", "compute_dtype": HALF}
    plan = make_plan(model, keep_fp32=["blocks.0.norm.weight"], **options)
    module = ElixirModule(model, plan, dtype=HALF, keep_fp32=["head.bias"])
    names = {m.fqn for c in module.plan.chunks if c.dtype == "float32" for m in c.members}
    unasked = {"enter.bias", "enter.parametrizations.weight.original"}
    assert names == {"blocks.0.norm.weight", "head.bias"} | unasked
    module.close()
    module = ElixirModule(model := Net(), make_plan(model, **options), dtype=HALF, master_weights=False)
    assert {c.dtype for c in module.plan.chunks} == {"bfloat16"}


class Student(nn.Module):
    """A copy follows what trains.

    Args:
        is_frozen: The copy; else the optimizer has not got it.
    """

    def __init__(self, *, is_frozen: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.teacher = copy.deepcopy(self.net).requires_grad_(not is_frozen)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        return (self.net(x) - target).square().mean()

    @property
    def pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return list(zip(self.teacher.parameters(), self.net.parameters(), strict=True))


def _follow(model: Student) -> None:
    for ours, theirs in model.pairs:
        ours.mul_(0.99).add_(theirs, alpha=0.01)


def _follow_by_data(model: Student) -> None:
    for ours, theirs in model.pairs:
        ours.data.mul_(0.99).add_(theirs.data, alpha=0.01)


def _follow_by_assignment(model: Student) -> None:
    for ours, theirs in model.pairs:
        ours.data = ours.data * 0.99 + theirs.data * 0.01


def _follow_by_copying(model: Student) -> None:
    for ours, theirs in model.pairs:
        ours.copy_(0.99 * ours + 0.01 * theirs)


def _follow_together(model: Student) -> None:
    ours, theirs = map(list, zip(*model.pairs, strict=True))
    torch._foreach_lerp_(ours, theirs, 0.01)


def _follow_by_what_was_kept(model: Student) -> None:
    model.kept = model.kept or [ours.detach() if i % 2 else ours.data for i, (ours, _) in enumerate(model.pairs)]
    for ours, (_, theirs) in zip(model.kept, model.pairs, strict=True):
        ours.mul_(0.99).add_(theirs, alpha=0.01)


def _load(model: Student) -> None:
    model.teacher.load_state_dict(model.net.state_dict())


def _take_over(model: Student) -> None:
    for ours, theirs in model.pairs:
        ours.copy_(theirs)


def _read(model: Student) -> None:
    assert sum(float(ours.norm() + ours.data.norm()) for ours, _ in model.pairs) > 0


def _clamp_what_trains(model: Student) -> None:
    for _, theirs in model.pairs:
        theirs.data.clamp_(-1, 1)


def _in_evaluation(model: Student) -> None:
    model.eval()
    _follow(model)
    _follow_by_data(model)
    model.train()


def _steps(how: Callable[[Student], None], count: int = 3, **options: Any) -> ElixirModule:
    model = Student(is_frozen=options.pop("is_frozen", True))
    plan = make_plan(model, placement_policy="cpu", chunk_size=4096, gpu_bytes=20_000, compute_dtype=HALF)
    module = ElixirModule(model, plan, dtype=HALF, **options)
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.net.parameters(), lr=0.1))
    for step in range(4):
        optimizer.backward(module(torch.randn(4, WIDTH).to(HALF)).float())
        optimizer.step()
        optimizer.zero_grad()
        if step < count:
            with torch.no_grad():
                how(model)
    module.close()
    return module


@pytest.mark.parametrize(
    "how",
    [_follow, _follow_by_data, _follow_by_assignment, _follow_by_copying, _follow_together, _follow_by_what_was_kept],
)
def test_a_copy_that_follows_in_16_bits_is_told_of_once(
    how: Callable[[Student], None], caplog: pytest.LogCaptureFixture
) -> None:
    _steps(how)
    (message,) = [m for m in caplog.messages if "the rCache needs" not in m]
    assert message.startswith("parameters that no optimizer trains are written to again and again: teacher.0.weight, ")
    assert "and 4 more. Under mixed precision they are kept in bfloat16" in message
    assert "keep_fp32=['teacher'], or ignored= the same" in message


def test_a_copy_that_was_not_frozen_is_told_of_as_well(caplog: pytest.LogCaptureFixture) -> None:
    _steps(_follow, is_frozen=False)
    assert "keep_fp32=['teacher']" in caplog.text


@pytest.mark.parametrize("how", [_load, _take_over, _read, _clamp_what_trains, _in_evaluation])
def test_what_loses_nothing_or_is_no_part_of_training_is_not_told_of(
    how: Callable[[Student], None], caplog: pytest.LogCaptureFixture
) -> None:
    _steps(how)
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("count", "options"), [(1, {}), (3, {"keep_fp32": ["teacher"]}), (3, {"master_weights": False})], ids=str
)
def test_a_copy_that_is_written_once_or_loses_nothing_is_not_told_of(
    count: int, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    _steps(_follow, count, **options)
    assert caplog.messages == []


def test_names_that_mean_nothing_are_refused() -> None:
    model = Net()
    plan = make_plan(model, placement_policy="cpu", compute_dtype=HALF)
    with pytest.raises(PlanError, match=r"'blocks.\?.gate' is the name of no parameter"):
        ElixirModule(model, plan, dtype=HALF, keep_fp32=["blocks.?.gate"])
    assert type(model.head.weight) is nn.Parameter  # nothing was taken yet
    assert model.head.weight.dtype is torch.float32

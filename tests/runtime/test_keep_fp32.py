"""The engine with parameters in fp32 beside those of 16 bits, to the bit as plain autocast over fp32 weights."""

from __future__ import annotations

import copy
import functools
import pickle
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


def test_names_that_mean_nothing_are_refused() -> None:
    model = Net()
    plan = make_plan(model, placement_policy="cpu", compute_dtype=HALF)
    with pytest.raises(PlanError, match=r"'blocks.\?.gate' is the name of no parameter"):
        ElixirModule(model, plan, dtype=HALF, keep_fp32=["blocks.?.gate"])
    assert type(model.head.weight) is nn.Parameter  # nothing was taken yet
    assert model.head.weight.dtype is torch.float32

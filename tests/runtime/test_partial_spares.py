"""Spare states for part of the chunks: no bit depends on which, and the memory is what the plan says.

The oracle is a plain training loop: the model in bf16, `HybridAdam` over an fp32 master that is fed with its gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_elixir.errors import PlanError
from lightning_elixir.optim import HybridAdam
from lightning_elixir.plan.memory import Scheme, memory_use
from lightning_elixir.plan.moving import order_of_moves
from lightning_elixir.plan.regime import TrainingRegime
from lightning_elixir.plan.types import Plan, Tier
from lightning_elixir.runtime import replan
from lightning_elixir.stepping.speculation import Caution
from lightning_elixir.wrapper import ElixirModule
from tests.helpers import streamed_updates as streamed_bodies
from tests.helpers.dist import run_ranks
from tests.helpers.once import computed_once
from tests.helpers.plans import SPARED, with_spares
from tests.helpers.speculation import (
    ACTIONS,
    AFTER,
    SCALED,
    Training,
    check_action,
    check_every_way,
    new_training,
    num_with_spares,
)
from tests.helpers.streamed_updates import CPU, HOWS, How, assert_same, result_of, use_small_slots
from tests.helpers.tiers import crossed, full, telling
from tests.helpers.training import clip_exactly
from tests.helpers.update_timing import slow_updates
from tests.helpers.zoo import ZOO, make

STEPS = 7


@dataclass
class Seen:
    values: dict[str, Tensor]
    norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    num_ahead: list[int] = field(default_factory=list)


@computed_once
def train_plain(how: How) -> Seen:
    model = make(how.name)
    trained = list(model.parameters())
    masters = [p.detach().clone().requires_grad_() for p in trained]
    model.bfloat16()
    optimizer = HybridAdam(masters, lr=1e-2, weight_decay=0.05)
    seen, scale = Seen({}), how.scale or 1.0
    for number in range(STEPS):
        loss = ZOO[how.name].loss(model, 3 * number)
        (loss * scale * (float("inf") if number == how.overflow_at else 1.0)).backward()
        for p, master in zip(trained, masters, strict=True):
            assert p.grad is not None
            master.grad, p.grad = p.grad.float() / scale, None
        is_finite = all(bool(m.grad.isfinite().all()) for m in masters if m.grad is not None)
        seen.skipped.append(not is_finite)
        if not is_finite:
            scale *= 0.5
            continue
        if how.max_norm:
            seen.norms.append(clip_exactly(masters, how.max_norm))
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(trained, masters, strict=True):
                p.copy_(master)
    names = [name for name, _ in model.named_parameters()]
    seen.values = {name: m.detach() for name, m in zip(names, masters, strict=True)}
    return seen


def train(training: Training, how: How) -> Seen:
    module, optimizer = training
    seen = Seen({})
    for number in range(STEPS):
        loss = ZOO[how.name].loss(module, 3 * number)
        optimizer.backward(loss * float("inf") if number == how.overflow_at else loss)
        seen.num_ahead.append(optimizer.num_ahead)
        optimizer.step()
        seen.skipped.append(optimizer.is_step_skipped)
    found = module.full_state_dict()
    seen.values = {name: found[name] for name, _ in module.module.named_parameters() if found}  # on the first rank
    return seen


def spare_bytes_of(plan: Plan) -> int:
    scheme = Scheme(plan.world_size, plan.is_storage_distributed, plan.block_bytes, TrainingRegime())
    return memory_use(plan.chunks, plan.rcache_blocks, scheme).host_spare_bytes


def held_spare_bytes(module: ElixirModule) -> int:
    return module.stats().held_bytes.get("cpu_spare", 0)


# Against plain PyTorch


OVERFLOWING = replace(SCALED, overflow_at=3)
PLAIN_HOWS = {"clipped": How(max_norm=1.3), "scaled": OVERFLOWING, "both": replace(OVERFLOWING, max_norm=1.4)}
"""Some of the steps are clipped, others not."""


def _check_against_plain(name: str, site: str, spared: str, world_size: int = 1) -> Seen:
    """All ranks train on the same data, so that their mean is the plain gradient."""
    how = PLAIN_HOWS[name]
    training = module, _ = new_training(how, site, spared=spared, world_size=world_size)
    with pytest.MonkeyPatch.context() as patch, slow_updates(patch, 0.001):
        use_small_slots(patch)
        seen = train(training, how)
        held, promised = held_spare_bytes(module), spare_bytes_of(module.engine.plan)
        assert held == promised or world_size > 1  # then a rank's slice may be padding, which has no moments
        assert held <= promised
        seen.num_ahead.append(num_with_spares(module))
    module.close()
    return seen


def check_same(seen: Seen, name: str) -> None:
    how, expected = PLAIN_HOWS[name], train_plain(PLAIN_HOWS[name])
    assert [k for k, v in expected.values.items() if not torch.equal(seen.values[k], v)] == []
    assert seen.skipped == expected.skipped
    clipped = iter([norm > how.max_norm for norm in expected.norms])
    failed = [is_skipped or next(clipped, False) for is_skipped in expected.skipped]
    assert any(failed[1:])
    assert not all(failed)
    *num_ahead, most = seen.num_ahead
    caution = Caution()
    for number, has_failed in enumerate(failed):
        assert num_ahead[number] == (most if number and caution.is_allowed else 0)  # the first step makes the states
        caution.note(has_failed=has_failed)


@crossed(
    told=["both-every_site-odd", "clipped-host-third"],
    name=list(PLAIN_HOWS),
    site=["host", "mixed", "every_site"],
    spared=["third", "odd", "none", "all"],
)
def test_the_bits_are_those_of_plain_pytorch(name: str, site: str, spared: str) -> None:
    seen = _check_against_plain(name, site, spared)
    check_same(seen, name)
    assert (seen.num_ahead[-1] > 0) is (spared != "none")


@pytest.mark.full
@pytest.mark.parametrize(("name", "site", "spared"), [("clipped", "mixed", "odd"), full("both", "every_site", "third")])
def test_the_bits_are_those_of_plain_pytorch_with_ranks(name: str, site: str, spared: str) -> None:
    for seen in run_ranks(_check_against_plain, 2, name, site, spared, 2):
        if seen.values:
            check_same(seen, name)
        assert seen.num_ahead[-1] > 0


# Against updates in the step


@pytest.mark.full
@pytest.mark.parametrize("name", telling(sorted(HOWS), "accumulated_clipped", "unused", "tied"))
def test_every_way_to_train(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_slots(monkeypatch)
    check_every_way(HOWS[name], "mixed", CPU, monkeypatch, "odd")


@pytest.mark.full  # as in test_speculation.py
@pytest.mark.parametrize("name", telling(ACTIONS, "clip_low", "write_a_parameter", "save"))
def test_what_happens_between_backward_and_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_action(name, How(), "mixed", CPU, monkeypatch, "odd")


# Moves


def test_spares_come_and_go_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks keep them, lose them or get them, and what they had is free at once."""
    how = HOWS["bf16"]
    training = module, optimizer = new_training(how, "host")
    other = reference, _ = new_training(how, "host", is_ahead=False)
    kept: dict[int, Any] = {}
    script = [("host", "all"), ("host", "odd"), ("every_site", "third"), ("host", "odd"), ("mixed", "none")]
    for number, (site, spared) in enumerate(script):
        if number:
            plan = with_spares(streamed_bodies.plan_for(module.module, how, site), spared)
            had = {c.id for c in module.engine.plan.chunks if c.has_spare_states}
            stay = {c.id for c in plan.chunks if c.has_spare_states} & had
            before = held_spare_bytes(module)
            module.replan(plan)
            for chunk in plan.chunks:
                shard = module.engine.store[chunk.id]
                assert (shard.spare_master is not None) is (chunk.id in stay)
                assert chunk.id not in stay or {id(shard.spare_master), id(shard.master)} == kept[chunk.id]
                assert optimizer._states.inner[chunk.id].has_spares is (chunk.id in stay)
            assert held_spare_bytes(module) < before or not before
        with slow_updates(monkeypatch, 0.001):
            for micro in range(2):
                for one in (training, other):
                    one[1].backward(ZOO[how.name].loss(one[0], 7 * number + micro))
                assert optimizer.num_ahead == (num_with_spares(module) if micro else len(stay) if number else 0)
                for one in (training, other):
                    one[1].step()
        assert held_spare_bytes(module) == spare_bytes_of(module.engine.plan)
        shards = {c.id: module.engine.store[c.id] for c in module.engine.plan.chunks}
        kept = {i: {id(s.spare_master), id(s.master)} for i, s in shards.items()}
    assert_same(replace(result_of(*training), numel=(0, 0, 0)), replace(result_of(*other), numel=(0, 0, 0)))
    module.close()
    reference.close()


def test_what_frees_spares_moves_before_what_takes_host_memory() -> None:
    how = HOWS["bf16"]
    module, _ = new_training(how, "every_site", spared="all")
    old = module.engine.plan
    new = with_spares(streamed_bodies.plan_for(module.module, how, "host"), "none")
    changes = [replan._change(module.engine, a, b) for a, b in zip(old.chunks, new.chunks, strict=True)]
    for (_, host), before in zip(changes, old.chunks, strict=True):
        numel = before.numel
        assert host == (-14 * numel if before.optim_tier is Tier.CPU else 12 * numel)
    order = order_of_moves(changes)
    first_to_host = next(k for k, i in enumerate(order) if old.chunks[i].optim_tier is Tier.GPU)
    assert sum(changes[i][1] for i in order[: first_to_host + 1]) <= 0
    module.close()


def test_plans_that_no_engine_can_obey_are_refused() -> None:
    module, _ = new_training(HOWS["bf16"], "host", spared="odd")
    plan = module.engine.plan
    wrong = replace(plan, chunks=tuple(replace(c, optim_tier=Tier.GPU) for c in plan.chunks))
    with pytest.raises(PlanError, match="has spare states, but no states in host memory"):
        module.replan(wrong)
    with pytest.raises(PlanError, match='spare states, which are for update_timing "inside_backward" only'):
        module.replan(replace(plan, update_timing=AFTER))
    module.close()
    with pytest.raises(PlanError, match="has spare states, but no states in host memory"):
        ElixirModule(make("gpt2"), wrong)


def test_which_chunks_are_spared_here() -> None:
    """The cases above are of as many kinds as they look."""
    for spared in SPARED:
        module, _ = new_training(HOWS["bf16"], "mixed", spared=spared)
        count, total = num_with_spares(module), len(module.engine.plan.chunks)
        assert (count == total, count == 0) == (spared == "all", spared == "none")
        module.close()

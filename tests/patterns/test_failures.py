"""Ranks that share operators and come apart, or would: all of them learn it, soon."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning_utilities.core.imports import module_available
from torch import Tensor, nn
from torch.nn import utils

from lightning_elixir.errors import DivergenceError, PeerLostError, StateError
from lightning_elixir.patterns.apply import put_in
from lightning_elixir.plan.mesh import Mesh
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.dist import run_ranks
from tests.helpers.patterns import STEPS, TENSOR, Case, batch, build, difference, train_plain
from tests.helpers.plans import make_plan
from tests.helpers.tiers import full

if module_available("lightning"):
    from lightning.pytorch.utilities import grad_norm
else:
    from pytorch_lightning.utilities import grad_norm

TIGHT = {"placement_policy": "cpu", "chunk_size": 6000}
CASE = Case(tensor=2, plan=TIGHT)
SOON_S = 20.0


def outcome_of(run: Any) -> tuple[str, str]:
    begin = time.monotonic()
    try:
        run()
    except Exception as error:
        assert time.monotonic() - begin < SOON_S
        return type(error).__name__, str(error)
    return "", ""


def fails_inside(where: str) -> tuple[str, str]:
    """Rank 1 raises in the middle of a forward, or of a backward, after which it leaves as a Trainer has it do."""
    module, optimizer, _ = build(CASE)

    def fail(*_: Any) -> None:
        if dist.get_rank() == 1:
            raise RuntimeError("a test wants it so")

    layer = module.module.layers[1]
    if where == "forward":
        layer.register_forward_pre_hook(fail)
    else:
        layer.register_full_backward_hook(fail)

    def step() -> None:
        try:
            optimizer.backward(module(batch(0, 0)))
        except Exception as error:
            module.engine.comm.leave(error)
            raise

    return outcome_of(step)


@pytest.mark.parametrize("where", ["forward", full("backward")])
def test_a_rank_that_raises_alone(where: str) -> None:
    first, second = run_ranks(fails_inside, 2, where, fresh=True)
    assert first[0] == PeerLostError.__name__
    assert "a test wants it so" in first[1]
    assert second == ("RuntimeError", "a test wants it so")


def has_another_batch() -> tuple[str, str]:
    module, optimizer, _ = build(CASE)
    own = batch(0, 0)[:, : 8 - 2 * dist.get_rank()]
    return outcome_of(lambda: optimizer.backward(module(own)))


def test_batches_of_other_shapes_in_one_tensor_parallel_group() -> None:
    for kind, text in run_ranks(has_another_batch, 2, fresh=True):
        assert kind == DivergenceError.__name__
        assert "must have the same batch" in text


def leaves_one_out() -> tuple[str, str]:
    """Rank 1 does not run a module of which the work is shared."""
    module, optimizer, _ = build(CASE)
    if dist.get_rank() == 1:
        module.module.layers[0].feed.forward = lambda x: x
    return outcome_of(lambda: optimizer.backward(module(batch(0, 0))))


@pytest.mark.full
def test_a_module_that_one_rank_does_not_run() -> None:
    for kind, _ in run_ranks(leaves_one_out, 2, fresh=True):
        assert kind == DivergenceError.__name__


def runs_again_alone() -> tuple[str, str]:
    """As after memory ran out on rank 1 in the middle of a forward."""
    module, optimizer, _ = build(CASE)
    if dist.get_rank() == 1:

        def stop(*_: Any) -> None:
            raise torch.OutOfMemoryError("a test wants it so")

        handle = module.module.layers[1].register_forward_pre_hook(stop)
        with pytest.raises(torch.OutOfMemoryError):
            module(batch(0, 0))
        handle.remove()
        module.engine.make_room()
    return outcome_of(lambda: optimizer.backward(module(batch(0, 0))))


def test_a_batch_that_one_rank_runs_again_is_not_mixed_up() -> None:
    for kind, text in run_ranks(runs_again_alone, 2, fresh=True):
        assert kind == DivergenceError.__name__
        assert "ran its batch again" in text


class Branching(nn.Module):
    """Ranks with batches of their own may take other branches: only peers have to come to the same exchanges."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Case(options={"is_mixture": False}).make()
        self.beside = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, tokens: Tensor, branch: int) -> Tensor:
        loss = self.net(tokens)
        for layer in self.beside[: branch + 1]:
            loss = loss + layer(loss.expand(16)).mean()
        return loss if branch else loss + self.net(tokens)


def branching(plan: dict[str, Any]) -> tuple[ElixirModule, Mesh]:
    mesh, rank = Mesh(4, 2), dist.get_rank()
    torch.manual_seed(0)
    model = Branching()
    put_in(model, {f"net.{k}" if k[0] != "*" else k: v for k, v in TENSOR.items()}, mesh, rank)
    return ElixirModule(model, make_plan(model, mesh=mesh, **plan)), mesh


def branches() -> tuple[float, dict[str, Tensor]]:
    (module, mesh), rank = branching(TIGHT), dist.get_rank()
    model = module.module
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.backward(module(batch(0, mesh.batch_of(rank)), mesh.batch_of(rank)))
    optimizer.step()
    state = {k: v.clone() for k, v in module.full_state_dict(rank0_only=False).items()}
    evictions = module.stats().evictions
    module.close()
    return evictions, state


def test_groups_that_branch_apart() -> None:
    torch.manual_seed(0)
    model = Branching()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.stack([model(batch(0, of), of) for of in range(2)]).mean().backward()
    optimizer.step()
    for evictions, state in run_ranks(branches, 4):
        assert evictions > 0
        assert difference(state, model.state_dict()) < 1e-5


def branches_without_gradients() -> tuple[bool, int]:
    """What comes after each forward is a collective that knows nothing of patterns, as of metrics."""
    module, mesh = branching({"placement_policy": "cuda", "chunk_size": 6000})
    of = mesh.batch_of(dist.get_rank())
    losses = []
    for step in range(3):
        with torch.no_grad():
            losses.append(module(batch(step, of), of))
        module.engine.comm.exchange_objects(step)
    evictions = module.stats().evictions
    module.close()
    torch.manual_seed(0)
    model = Branching()
    close = all(torch.allclose(loss, model(batch(step, of), of), atol=1e-5) for step, loss in enumerate(losses))
    return close, evictions


@pytest.mark.full
def test_groups_that_branch_apart_where_all_is_resident() -> None:
    assert run_ranks(branches_without_gradients, 4) == [(True, 0)] * 4


def runs_again_where_hosts_do_not_meet() -> tuple[str, str]:
    """All chunks are resident, and ranks have compared their first exchanges; then rank 1 begins a batch anew."""
    case = Case(tensor=2, plan={"placement_policy": "cuda", "chunk_size": 6000}, options={"is_mixture": False})
    module, optimizer, _ = build(case)
    for step in range(8):
        optimizer.backward(module(batch(step, 0)))
    if dist.get_rank() == 1:
        module.engine.wire.note_rerun()
    return outcome_of(lambda: optimizer.backward(module(batch(9, 0))))


def test_a_rank_that_runs_a_batch_again_is_found_out_at_the_end_of_backward() -> None:
    for kind, text in run_ranks(runs_again_where_hosts_do_not_meet, 2, fresh=True):
        assert kind == DivergenceError.__name__
        assert "ran its batch again" in text


def messages_of_a_step(policy: str) -> list[int]:
    """Control messages of steps, after so many exchanges that ranks have compared."""
    case = Case(tensor=2, plan={"placement_policy": policy, "chunk_size": 6000}, options={"is_mixture": False})
    module, optimizer, _ = build(case)
    counts = []
    for step in range(10):
        before = module.engine.comm._place.count
        optimizer.backward(module(batch(step, 0)))
        counts.append(module.engine.comm._place.count - before)
        optimizer.step()
        optimizer.zero_grad()
    return counts


@pytest.mark.full
def test_where_all_is_resident_hosts_stop_meeting_at_exchanges() -> None:
    (counts, _), (moving, _) = (run_ranks(messages_of_a_step, 2, policy) for policy in ("cuda", "cpu"))
    assert counts[-1] < counts[1] / 2
    assert moving[-1] > 2 * counts[-1]


def _after_a_write(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    utils.clip_grad_norm_(model.parameters(), 0.1)


NORMS: dict[str, Callable[[nn.Module], Any]] = {
    "clip_grad_norm_": lambda model: utils.clip_grad_norm_(model.parameters(), 0.1),
    "clip_grad_norm_foreach": lambda model: utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True),
    "get_total_norm": lambda model: utils.get_total_norm([p.grad for p in model.parameters()]),
    "grad_norm_of_lightning": lambda model: grad_norm(model, 2),
    "of_one": lambda model: model.layers[0].attention.q.weight.grad.norm(),
    "of_all_in_a_row": lambda model: utils.parameters_to_vector(p.grad for p in model.parameters()).norm(),
    "of_gradients_that_were_set": _after_a_write,
}


def take_norms() -> dict[str, tuple[str, str]]:
    module, optimizer, _ = build(CASE)
    found = {}
    for name, take in NORMS.items():
        optimizer.backward(module(batch(0, 0)))
        found[name] = outcome_of(lambda take=take: take(module.module))  # type: ignore[misc]
        optimizer.zero_grad()
    module.close()
    return found


@pytest.mark.full
def test_norms_of_gradients_in_parts_are_refused_on_every_rank() -> None:
    for found in run_ranks(take_norms, 2):
        for name, (kind, text) in found.items():
            assert kind == StateError.__name__, name
            assert "this rank's part of it" in text, name
        assert "the gradient of layers.0.attention.q.weight is" in found["of_one"][1]


def clip_by_hand() -> tuple[dict[str, Tensor], list[type]]:
    """What works element by element: by the whole norm torch's function clips as plain PyTorch does."""
    module, optimizer, _ = build(CASE)
    seen: list[type] = []
    for step in range(STEPS):
        optimizer.backward(module(batch(step, 0)))
        utils.clip_grads_with_norm_(module.parameters(), CLIP, optimizer.grad_norm())
        grad = module.module.layers[0].attention.q.weight.grad
        utils.clip_grad_value_(module.parameters(), 10.0)
        copied = copy.deepcopy(grad), pickle.loads(pickle.dumps(grad))
        assert all(torch.equal(one, grad) for one in copied)
        assert bool((grad != 0).any())
        seen += [type(one) for one in (*copied, grad.square().sum(), torch.ones(grad.shape).to(grad))]
        del grad
        optimizer.step()
        optimizer.zero_grad()
    state = {k: v.clone() for k, v in module.full_state_dict(rank0_only=False).items()}
    module.close()
    return state, seen


CLIP = 0.05


@pytest.mark.full
def test_gradients_in_parts_are_as_any_tensor_element_by_element() -> None:
    _, _, expected = train_plain(Case(clip_norm=CLIP), 1)
    for state, seen in run_ranks(clip_by_hand, 2):
        assert difference(state, expected) < 1e-5
        assert set(seen) == {Tensor}

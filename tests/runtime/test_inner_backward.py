"""A `loss.backward()` of the user's inside a forward, as in a training step that attacks its own model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_elixir._lightning import LightningModule, Trainer
from lightning_elixir.errors import StateError
from lightning_elixir.optim.hybrid_adam import HybridAdam
from lightning_elixir.plan.types import UpdateTiming
from lightning_elixir.strategy import ElixirStrategy
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.dist import run_ranks
from tests.helpers.plans import make_plan

WIDTH = 32


class Attacked(nn.Module):
    """Runs backward in its forward, through some of its layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.layers[5].weight = self.layers[0].weight
        self.raises_at = -1
        self.calls = 0
        self.stumbles_at = 1  # layer
        self.is_tried_again = False  # where it has raised
        self.before_another: Callable[[], object] = _nothing
        self.num_checkpointed = 0  # of the layers of the inner backward, every other one

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        try:
            return self.through(x + 0.1 * self.attack(x, is_stumbling=self.raises_at == self.calls))
        except ZeroDivisionError:
            self.before_another()
            return self.through(x + 0.1 * self.attack(x) if self.is_tried_again else x)

    def attack(self, x: Tensor, is_stumbling: bool = False) -> Tensor:
        attacked = x.clone().requires_grad_()
        y = attacked
        for i, layer in enumerate(self.layers[:4]):
            if i == self.stumbles_at and is_stumbling:
                y.register_hook(_stumble)
            is_checkpointed = i % 2 == 1 and i < 2 * self.num_checkpointed
            y = checkpoint(_Tanh(layer), y, use_reentrant=True) if is_checkpointed else torch.tanh(layer(y))
        y.square().mean().backward()
        assert attacked.grad is not None
        return attacked.grad.sign()

    def through(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class _Tanh(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


def _nothing() -> None:
    return


def _stumble(grad: Tensor) -> Tensor:
    raise ZeroDivisionError


def _train(
    clears: bool, timing: UpdateTiming, raises_at: int = -1, is_tried_again: bool = False, stumbles_at: int = 1
) -> tuple[list[Any], list[Any]]:
    """What is seen with plain PyTorch, and with the engine.

    Args:
        clears: Whether the inner backward's gradients are dropped, as Lightning does.
        timing: Of the updates.
        raises_at: The forward whose inner backward raises.
        is_tried_again: Whether that forward runs another one then.
        stumbles_at: Before which layer it raises.
    """
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    plain = Attacked()
    model = copy.deepcopy(plain)
    plain.raises_at = model.raises_at = raises_at
    plain.is_tried_again = model.is_tried_again = is_tried_again
    plain.stumbles_at = model.stumbles_at = stumbles_at
    plan = make_plan(
        model, placement_policy="cpu", chunk_size=4500, world_size=world_size, can_stream=True, update_timing=timing
    )
    module = ElixirModule(model, plan, device="cpu")
    optimizer, oracle = ElixirOptimizer(module, HybridAdam(model.parameters())), HybridAdam(plain.parameters())
    found: tuple[list[Any], list[Any]] = ([], [])
    for step in range(4):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        for seen, net, own in ((found[0], plain, oracle), (found[1], module, optimizer)):
            loss = net(x).sum()
            if clears:
                own.zero_grad()
            if isinstance(own, ElixirOptimizer):
                with own.unobserved(world_size == 1):
                    own.backward(loss)
                    own.step()
            else:
                loss.backward()
                for p in plain.parameters() if world_size > 1 else ():
                    torch.distributed.all_reduce(p.grad)
                    p.grad.div_(world_size)
                own.step()
            own.zero_grad()
            seen.append(loss.item())
    found[0].append(dict(plain.state_dict()))
    found[1].append(module.full_state_dict(rank0_only=False))
    return found


def _assert_same(found: tuple[list[Any], list[Any]]) -> None:
    assert found[0][:-1] == found[1][:-1]
    assert all(torch.equal(found[1][-1][name], value) for name, value in found[0][-1].items())


@pytest.mark.parametrize("timing", UpdateTiming)
@pytest.mark.parametrize("clears", [True, False])
def test_its_gradients_count_until_they_are_dropped(clears: bool, timing: UpdateTiming) -> None:
    _assert_same(_train(clears, timing))


@pytest.mark.parametrize("is_tried_again", [False, True])
def test_one_that_raises_gives_nothing(is_tried_again: bool) -> None:
    _assert_same(_train(True, UpdateTiming.BEHIND_FORWARD, raises_at=3, is_tried_again=is_tried_again))


@pytest.mark.parametrize("is_cleared", [False, True])
@pytest.mark.parametrize("is_late", [False, True])
def test_what_one_that_raises_has_given_counts_where_another_one_follows(is_late: bool, is_cleared: bool) -> None:
    """As in plain PyTorch, with the gradients of earlier micro-batches; unless they are dropped in between."""
    plain = Attacked()
    plain.stumbles_at, plain.is_tried_again = (0 if is_late else 3), True
    model = copy.deepcopy(plain)
    module = ElixirModule(model, make_plan(model, placement_policy="cpu", chunk_size=4500), device="cpu")
    optimizer, oracle = ElixirOptimizer(module, HybridAdam(model.parameters())), HybridAdam(plain.parameters())
    if is_cleared:
        plain.before_another, model.before_another = oracle.zero_grad, optimizer.zero_grad
    kept: list[Tensor | None] = []
    for micro_batch in range(3):
        plain.raises_at = model.raises_at = plain.calls + 1 if micro_batch else -1
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(micro_batch))
        optimizer.backward(module(x).sum())
        plain(x).sum().backward()
        kept = kept or [p.grad for p in model.parameters()]
        for ours, p in zip(model.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None
            # Of what had not been reduced yet, both are added up first.
            assert p.grad is not None
            assert torch.allclose(ours.grad, p.grad, rtol=1e-5, atol=1e-6)


def _raise_on_two(stumbles: tuple[int, int]) -> tuple[list[Any], list[Any]]:
    return _train(False, UpdateTiming.BEHIND_FORWARD, 3, True, stumbles[torch.distributed.get_rank()])


@pytest.mark.parametrize("stumbles", [(0, 3), (3, 0), (1, 1)])
def test_ranks_may_raise_at_different_places(stumbles: tuple[int, int]) -> None:
    for plain, ours in run_ranks(_raise_on_two, 2, stumbles):
        assert ours[:-1] == pytest.approx(plain[:-1], rel=1e-5)  # sums over ranks come in another order
        assert all(torch.allclose(ours[-1][name], value, rtol=1e-4, atol=1e-5) for name, value in plain[-1].items())


def test_one_that_raises_takes_earlier_gradients_along_also_where_they_are_held() -> None:
    """What it was mixed with is lost, so the held ones are no gradients any more, and no step may follow."""
    tried = Attacked()
    tried.raises_at = 2
    module = ElixirModule(tried, make_plan(tried, placement_policy="cpu", chunk_size=4500), device="cpu")
    optimizer = ElixirOptimizer(module, HybridAdam(tried.parameters()))
    x = torch.randn(4, WIDTH)
    optimizer.backward(module(x).sum())
    held = [p.grad for p in tried.parameters()]
    assert all(grad is not None for grad in held)
    module(x)
    assert all(p.grad is None for p in tried.parameters())
    with pytest.raises(StateError, match="zero_grad"):
        optimizer.step()


@pytest.mark.parametrize("num_checkpointed", [1, 2])
def test_gradients_that_are_kept_show_it_where_checkpointing_is_reentrant(num_checkpointed: int) -> None:
    """Which runs backwards inside the inner one: that goes on afterwards."""
    plain = Attacked()
    plain.num_checkpointed = num_checkpointed
    model = copy.deepcopy(plain)
    module = ElixirModule(model, make_plan(model, placement_policy="cpu", chunk_size=4500), device="cpu")
    optimizer = ElixirOptimizer(module, HybridAdam(model.parameters()))
    kept: list[Tensor | None] = []
    for micro_batch in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(micro_batch))
        optimizer.backward(module(x).sum())
        plain(x).sum().backward()
        kept = kept or [p.grad for p in model.parameters()]
        for ours, p in zip(kept, plain.parameters(), strict=True):
            assert ours is not None
            assert torch.equal(ours, p.grad)


def test_on_two_ranks() -> None:
    for found in run_ranks(_train, 2, True, UpdateTiming.BEHIND_FORWARD):
        _assert_same(found)


class Lit(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Attacked()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.net(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, foreach=False)


def _fit(strategy: Any) -> dict[str, Tensor]:
    """As plain Lightning, which drops them before its own backward."""
    model = Lit()
    data = torch.randn(48, WIDTH, generator=torch.Generator().manual_seed(1))
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, accumulate_grad_batches=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(data, batch_size=4))
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_through_the_trainer() -> None:
    plain = _fit("auto")
    ours = _fit(ElixirStrategy(placement_policy="cpu", chunk_size=4500, gpu_memory_limit="40KiB"))
    assert all(torch.allclose(ours[name], value, rtol=1e-5, atol=1e-7) for name, value in plain.items())

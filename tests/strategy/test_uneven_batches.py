"""Ranks that have different numbers of batches: an error on all of them, soon, that says what to do; never a hang."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_elixir.core.waits import MORE_BATCHES
from lightning_elixir.strategy import ElixirStrategy
from tests.helpers.dist import run_ranks
from tests.helpers.failures import SOON_S, check_heard, heard_by
from tests.helpers.seeds import seed_everything
from tests.helpers.tiers import full
from tests.strategy.models import CHUNK, TIGHT, WIDTH, Net, assert_same_state, make_data, make_trainer
from tests.strategy.nets import BatchNormNet


def _ranks() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Stream(IterableDataset[list[Tensor]]):
    """So many batches on each rank; of no known length."""

    def __init__(self, lengths: list[int], batch_sizes: list[int]) -> None:
        self.rank = _ranks()[0]
        self.length, self.batch_size = lengths[self.rank], batch_sizes[self.rank]

    def __iter__(self) -> Iterator[list[Tensor]]:
        generator = torch.Generator().manual_seed(self.rank)
        for _ in range(self.length):
            x = torch.randn(self.batch_size, WIDTH, generator=generator)
            yield [x, torch.zeros(self.batch_size, dtype=torch.long)]


def _train(lengths: list[int], batch_sizes: list[int], net: type[Net] = Net, **options: Any) -> dict[str, Tensor]:
    trainer = make_trainer(ElixirStrategy(**TIGHT), devices=_ranks()[1], **options)
    trainer.fit(net("hybrid"), DataLoader(Stream(lengths, batch_sizes), batch_size=None))
    return trainer.strategy.lightning_module_state_dict()


def _heard(lengths: list[int], net: type[Net], options: dict[str, Any]) -> Any:
    return heard_by(*_ranks(), lambda: _train(lengths, [4] * len(lengths), net, **options))


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        full([6, 4], {}),
        full([4, 6], {"max_epochs": 2}),
        ([0, 3], {}),
        full([6, 5], {"accumulate_grad_batches": 4}),
    ],
)
def test_one_rank_has_more_batches(lengths: list[int], options: dict[str, Any]) -> None:
    everyone = run_ranks(_heard, 2, lengths, Net, options, init_group=False)
    assert [heard["type"] for heard in everyone] == ["DivergenceError"] * 2
    assert all(MORE_BATCHES in heard["text"] for heard in everyone)
    assert abs(everyone[0]["time_s"] - everyone[1]["time_s"]) < SOON_S


def _fit(lengths: list[int]) -> None:
    trainer = make_trainer(ElixirStrategy(**TIGHT), devices=_ranks()[1])
    trainer.fit(Net("hybrid"), DataLoader(Stream(lengths, [4, 4]), batch_size=None))


def _heard_of_fit(lengths: list[int]) -> Any:
    return heard_by(*_ranks(), lambda: _fit(lengths))


def test_fit_alone_tells_both() -> None:
    """No rank takes a fit for a good one that another has not come to the end of."""
    everyone = run_ranks(_heard_of_fit, 2, [5, 3], init_group=False)
    assert [heard["type"] for heard in everyone] == ["DivergenceError"] * 2
    for heard in everyone:
        assert "rank 0 is in the beginning of the next batch of trainer.fit() (" in heard["text"]
        assert (
            "rank 1 is in the preparation or the end of a run (Trainer.fit() at test_uneven_batches.py:"
            in heard["text"]
        )
        assert heard["text"].endswith(MORE_BATCHES)


class NetThatSkips(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        return None if batch_idx == 1 and _ranks()[0] == 1 else super().training_step(batch, batch_idx)


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}])
def test_one_rank_skips_a_step(options: dict[str, Any]) -> None:
    """Lightning refuses that wherever there are several ranks."""
    everyone = run_ranks(_heard, 2, [4, 4], NetThatSkips, options, init_group=False)
    check_heard(everyone, 1, "RuntimeError", "returning None in distributed training is not supported")


def test_batches_of_different_sizes() -> None:
    """Each rank counts alike, whatever it has, as with DDP."""
    states = run_ranks(_train, 2, [4, 4], [4, 2], init_group=False)
    (expected,) = run_ranks(_train_plain, 2, init_group=False)[:1]
    torch.testing.assert_close(states[0], expected, rtol=1e-4, atol=1e-5)
    assert_same_state(states[0], run_ranks(_train, 2, [4, 4], [4, 2], init_group=False)[0])


def _train_plain() -> dict[str, Tensor]:
    trainer = make_trainer("ddp", devices=2)
    model = Net("hybrid")
    trainer.fit(model, DataLoader(Stream([4, 4], [4, 2]), batch_size=None))
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _predict(strategy: Any, is_shared: bool) -> Any:
    """Before a fit, and after it."""
    seed_everything(11)
    model = BatchNormNet()
    data = make_data(17, seed=2) if is_shared else DataLoader(Stream([2, 0], [4, 4]), batch_size=None)
    trainer = make_trainer(ElixirStrategy(**strategy) if isinstance(strategy, dict) else strategy, devices=_ranks()[1])
    before = trainer.predict(model, data)
    trainer.fit(model, make_data(16))
    return before or [], trainer.predict(model, data) or []


@pytest.mark.parametrize(
    ("elixir", "is_shared"), [(TIGHT, True), (TIGHT, False), ({**CHUNK, "placement_policy": "cuda"}, False)]
)
def test_some_ranks_predict_more_batches(elixir: Any, is_shared: bool) -> None:
    """Lightning pads no prediction, so that its own shares are uneven; a rank may have no batch at all."""
    everyone = run_ranks(_predict, 2, elixir, is_shared, init_group=False)
    expected = run_ranks(_predict, 2, "ddp", is_shared, init_group=False)
    assert len(everyone[0][0]) > len(everyone[1][0])
    for mine, theirs in zip(everyone, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert [x.tolist() for x in one] == [x.tolist() for x in other]


class _QuietNet(Net):
    """Logs nothing: a rank without a batch would be missing where the others reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.allow_zero_length_dataloader_with_multiple_devices = True

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.val_losses.append(self.loss(batch).detach().clone())

    test_step = validation_step


def _evaluate(strategy: Any, lengths: list[int], is_sized: bool) -> Any:
    """Before a fit, in it, and after it."""
    seed_everything(11)
    model = (Net if all(lengths) else _QuietNet)()
    length = lengths[_ranks()[0]]
    data = make_data(4 * length, seed=2) if is_sized else DataLoader(Stream(lengths, [4, 4]), batch_size=None)
    trainer = make_trainer(
        ElixirStrategy(**strategy) if isinstance(strategy, dict) else strategy,
        devices=_ranks()[1],
        max_epochs=2,
        val_check_interval=1,
        accumulate_grad_batches=2,
        num_sanity_val_steps=2,
        use_distributed_sampler=not is_sized,
    )
    results = [trainer.validate(model, data)]
    trainer.fit(model, make_data(16), data)
    results += [trainer.test(model, data), {**trainer.logged_metrics}]
    return results, [loss.item() for loss in model.val_losses]


@pytest.mark.parametrize(
    ("elixir", "lengths", "is_sized"),
    [
        (TIGHT, [3, 1], False),
        full(TIGHT, [1, 3], True),
        (TIGHT, [3, 0], True),
        full(TIGHT, [0, 3], False),
        full({**CHUNK, "placement_policy": "cuda"}, [3, 0], False),
    ],
)
def test_some_ranks_evaluate_more_batches(elixir: Any, lengths: list[int], is_sized: bool) -> None:
    """Loaders of the user's own; plain DDP exchanges nothing in a forward without gradients."""
    everyone = run_ranks(_evaluate, 2, elixir, lengths, is_sized, init_group=False)
    assert len(everyone[0][1]) != len(everyone[1][1])
    expected = run_ranks(_evaluate, 2, "ddp", lengths, is_sized, init_group=False)
    torch.testing.assert_close(everyone, expected, rtol=1e-6, atol=1e-6)  # DDP sums micro-batches first


class _MessagesBetween(_QuietNet):
    def on_validation_batch_end(self, *_: Any) -> None:
        self.all_gather(torch.zeros(()))


def _heard_of_messages(lengths: list[int]) -> Any:
    def validate() -> None:
        trainer = make_trainer(ElixirStrategy(**TIGHT), devices=_ranks()[1])
        trainer.validate(_MessagesBetween(), DataLoader(Stream(lengths, [4, 4]), batch_size=None))

    return heard_by(*_ranks(), validate)


def test_messages_between_batches_that_some_ranks_do_not_have() -> None:
    everyone = run_ranks(_heard_of_messages, 2, [3, 1], init_group=False)
    assert [heard["type"] for heard in everyone] == ["DivergenceError"] * 2
    for heard in everyone:
        assert "rank 0 is in a message between two batches of an evaluation (" in heard["text"]
        assert "rank 1 is in the end of an evaluation (" in heard["text"]

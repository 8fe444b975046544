"""What all ranks must call, called on rank 0 alone, through a Trainer: an error on all ranks that names the calls."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from lightning_elixir._lightning import Trainer
from lightning_elixir.strategy import ElixirStrategy
from tests.helpers.dist import run_ranks
from tests.helpers.tiers import full
from tests.strategy.models import TIGHT, Net, make_data, make_trainer

SOON_S = 60.0  # on a busy machine
SAVE = "(Trainer.save_checkpoint() at test_one_rank_alone.py:"
CALLS: dict[str, Callable[[Trainer], Any]] = {
    "save_checkpoint": lambda trainer: trainer.save_checkpoint("one.ckpt"),
    "lightning_module_state_dict": lambda trainer: trainer.strategy.lightning_module_state_dict(),
    "state_dict": lambda trainer: trainer.lightning_module.state_dict(),
    "optimizer": lambda trainer: trainer.optimizers[0].state_dict(),
    "test": lambda trainer: trainer.test(trainer.lightning_module, make_data(16), verbose=False),
    "barrier": lambda trainer: trainer.strategy.barrier(),
}
TOLD = {
    "save_checkpoint": (SAVE, "Call Trainer.save_checkpoint() on every rank"),
    "lightning_module_state_dict": (
        "(ElixirStrategy.lightning_module_state_dict() at ",
        "Call ElixirStrategy.lightning_module_state_dict() on every rank",
    ),
    "state_dict": ("in state_dict() (Module.state_dict() at ", "Call Module.state_dict() on every rank"),
    "optimizer": ("in the optimizer's state_dict() (", "Call ElixirOptimizer.state_dict() on every rank"),
    "test": ("(Trainer.test() at test_one_rank_alone.py:", "Every rank must make the same of these calls"),
    "barrier": ("in strategy.barrier() (", "Every rank must make the same of these calls"),
}


class AloneNet(Net):
    """Rank 0 calls something before a batch.

    Args:
        call: Of `CALLS`.
        has_barrier: Whether all ranks come to a barrier after that.
    """

    def __init__(self, call: str, has_barrier: bool) -> None:
        super().__init__()
        self.call, self.has_barrier = call, has_barrier

    def on_train_batch_start(self, batch: list[Tensor], batch_idx: int) -> None:
        if batch_idx != 2 or not self.call:
            return
        if self.trainer.global_rank == 0:
            CALLS[self.call](self.trainer)
        if self.has_barrier:
            self.trainer.strategy.barrier()


def _ranks() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _heard(rank: int, world_size: int, action: Callable[[], Any]) -> tuple[str, str, float]:
    heard, begin = ("", ""), time.monotonic()
    try:
        action()
    except Exception as error:
        heard = type(error).__name__, str(error)
    seconds = time.monotonic() - begin
    Path(f"over_{rank}").touch()
    while time.monotonic() < begin + 2 * SOON_S and not all(Path(f"over_{r}").exists() for r in range(world_size)):
        time.sleep(0.05)
    return *heard, seconds


def _in_fit(call: str, has_barrier: bool, state_dict_type: str) -> tuple[str, str, float]:
    trainer = make_trainer(ElixirStrategy(**TIGHT, state_dict_type=state_dict_type), devices=2)
    return _heard(*_ranks(), lambda: trainer.fit(AloneNet(call, has_barrier), make_data(64)))


@pytest.mark.parametrize(
    ("call", "has_barrier", "state_dict_type"),
    [
        full("save_checkpoint", False, "full"),
        ("save_checkpoint", False, "sharded"),
        full("save_checkpoint", True, "full"),
        full("state_dict", True, "full"),
        full("optimizer", False, "full"),
        ("barrier", False, "full"),
    ],
)
@pytest.mark.full
def test_in_fit(call: str, has_barrier: bool, state_dict_type: str) -> None:
    theirs = "rank 1 is in strategy.barrier() (" if has_barrier else "rank 1 is in "
    words, cure = TOLD[call]
    everyone = run_ranks(_in_fit, 2, call, has_barrier, state_dict_type, init_group=False, fresh=True)
    for kind, text, seconds in everyone:
        assert kind == "DivergenceError"
        assert "rank 0 is in " in text
        assert words in text
        assert theirs in text
        assert cure in text
        assert seconds < SOON_S


def _after_fit(call: str, others: str, last_comes_after_s: float) -> tuple[str, str, float]:
    rank, world_size = _ranks()  # the Trainer forgets them
    trainer = make_trainer(ElixirStrategy(**TIGHT), devices=world_size)
    trainer.fit(AloneNet("", False), make_data(32))

    def act() -> None:
        if rank == world_size - 1:
            time.sleep(last_comes_after_s)
        if rank == 0:
            CALLS[call](trainer)
        elif others == "strategy.barrier":
            trainer.strategy.barrier()
        else:
            dist.barrier()

    return _heard(rank, world_size, act)


@pytest.mark.parametrize(
    ("call", "others", "world_size", "last_comes_after_s"),
    [
        # The first two find out without the third, which hears the same when it comes.
        full("lightning_module_state_dict", "strategy.barrier", 3, 5.0),
        full("lightning_module_state_dict", "strategy.barrier", 3, 0.0),
        full("save_checkpoint", "torch.distributed.barrier", 2, 0.0),
        full("test", "strategy.barrier", 2, 0.0),
    ],
)
def test_after_fit(call: str, others: str, world_size: int, last_comes_after_s: float) -> None:
    words, cure = TOLD[call]
    told = run_ranks(_after_fit, world_size, call, others, last_comes_after_s, init_group=False, fresh=True)
    for kind, text, seconds in told:
        assert kind == "DivergenceError"
        assert words in text
        assert f"in {others}() (" in text
        assert cure in text
        assert seconds < SOON_S

"""A rank that fails, or is killed, on two GPUs: NCCL's connections end with it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_elixir.strategy import ElixirStrategy
from tests.helpers.dist import run_processes, run_ranks
from tests.helpers.failures import SOON_S, check_heard, heard_by
from tests.strategy.models import TIGHT, Net, fit
from tests.strategy.nets import VICTIM, NetThatDies, NetThatLogs, NetThatStumbles

pytestmark = [pytest.mark.gpu, pytest.mark.several_gpus(2)]

OPTIONS: dict[str, dict[str, Any]] = {"tight": TIGHT, "resident": {"placement_policy": "cuda"}}


class NetThatDiesInBackward(Net):
    """The other one's device waits for what never comes."""

    victim = 0

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 3 and int(os.environ["RANK"]) == self.victim:
            next(self.parameters()).register_hook(lambda grad: _die())


def _die() -> None:
    Path("killed").write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


KINDS: dict[str, Any] = {"training step": NetThatDies, "backward": NetThatDiesInBackward}


def train_and_die_on_gpus(kind: str, victim: int, options: dict[str, Any]) -> None:
    """Run by a process of its own."""
    KINDS[kind].victim = victim
    rank = int(os.environ["RANK"])
    try:
        fit(ElixirStrategy(**options), KINDS[kind], devices=2, accelerator="cuda")
    except Exception as error:
        Path(f"error_{rank}").write_text(f"{time.monotonic()}\n{type(error).__name__}: {error}")
        raise


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("placement", OPTIONS)
@pytest.mark.parametrize("victim", [0, 1])
def test_killed_on_two_gpus(victim: int, placement: str, kind: str) -> None:
    module = "tests.strategy.test_lost_ranks_cuda"
    code = f"from {module} import train_and_die_on_gpus as run; run({kind!r}, {victim}, {OPTIONS[placement]!r})"
    codes = run_processes(code, 2, timeout_s=60.0)
    killed = float(Path("killed").read_text())
    assert codes == [-signal.SIGKILL if rank == victim else 1 for rank in range(2)]
    when, text = Path(f"error_{1 - victim}").read_text().split("\n", 1)
    assert float(when) - killed < SOON_S
    assert text.startswith(f"PeerLostError: rank {1 - victim} cannot go on: rank {victim} has ended (process ")


def _stumbles(kind: Any, options: dict[str, Any]) -> Any:
    rank = int(os.environ["RANK"])
    return heard_by(rank, 2, lambda: fit(ElixirStrategy(**options), kind, devices=2, accelerator="cuda"))


@pytest.mark.parametrize("kind", [NetThatStumbles, NetThatLogs])
@pytest.mark.parametrize("placement", OPTIONS)
def test_step_of_one_rank_raises_on_two_gpus(placement: str, kind: Any) -> None:
    """Also where the other one waits in a reduction of Lightning's, on the device."""
    everyone = run_ranks(
        _stumbles, 2, kind, OPTIONS[placement], device="cuda", init_group=False, fresh=True, timeout_s=60.0
    )
    check_heard(everyone, VICTIM, "ValueError", "no such luck")

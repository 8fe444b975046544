"""Ranks that have different numbers of batches to predict.

Lightning gives each rank its own share of what is predicted, with nothing doubled, so some have one more than others.
A rank that went on to the end of the run would leave those alone in forwards that need its part of the chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_elixir._lightning import Trainer


class UnevenPrediction:
    """One run's.

    Args:
        trainer: Which predicts.
        wait: Returns when all ranks have come to it.
    """

    def __init__(self, trainer: Trainer, wait: Callable[[], None]) -> None:
        self._loop: Any = trainer.predict_loop
        self._wait = wait

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_wait": _wait_for_none}  # copies of the Trainer are of no group

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, a rank that comes to the end of its batches waits for the others before anything else."""
        self._loop.on_run_end = self._end
        try:
            yield
        finally:
            del self._loop.on_run_end

    def _end(self) -> Any:
        self._wait()
        return type(self._loop).on_run_end(self._loop)


def _wait_for_none() -> None:
    return

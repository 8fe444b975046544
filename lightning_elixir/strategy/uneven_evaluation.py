"""Ranks that have different numbers of batches to evaluate.

Lightning gives each rank its own share of what is predicted, with nothing doubled, so some have one more than others;
and the user's own loaders of validation and test data may have what they like, since no gradients meet there. A rank
that went on, to a message that reduces what was logged or to the end of the run, would leave those alone in forwards
that need its part of the chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_elixir._lightning import Trainer, TrainerFn


class UnevenEvaluation:
    """The loop by which a run validates, tests or predicts.

    Args:
        trainer: Whose state tells what it runs.
        wait: Returns when all ranks have come to it.
    """

    def __init__(self, trainer: Trainer, wait: Callable[[], None]) -> None:
        loops: dict[Any, Any] = {
            TrainerFn.FITTING: trainer.fit_loop.epoch_loop.val_loop,
            TrainerFn.VALIDATING: trainer.validate_loop,
            TrainerFn.TESTING: trainer.test_loop,
            TrainerFn.PREDICTING: trainer.predict_loop,
        }
        self._loop = loops[trainer.state.fn]
        self._wait = wait
        self.is_under_way = False
        """Whether some ranks may have further batches when others have none."""

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_wait": _wait_for_none}  # copies of the Trainer are of no group

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, a rank that comes to the end of its batches waits for the others before anything else."""
        self._loop.run, self._loop.on_run_end = self._run, self._end
        try:
            yield
        finally:
            del self._loop.run, self._loop.on_run_end

    def _run(self) -> Any:
        self.is_under_way = True
        try:
            result = type(self._loop).run(self._loop)
            if self.is_under_way:  # without a batch, a loop whose length is known comes to no end
                self._wait()
        finally:
            self.is_under_way = False
        return result

    def _end(self) -> Any:
        self._wait()
        self.is_under_way = False
        return type(self._loop).on_run_end(self._loop)


def _wait_for_none() -> None:
    return

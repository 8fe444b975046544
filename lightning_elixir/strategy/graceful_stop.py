"""SIGTERM with several ranks: all of them stop before the same batch.

Lightning's handler sends a broadcast from wherever the signal has met it, and a rank that has it leaves its loop at the
end of its own batch, while others are in the next one: seen to hang, with DDP as well. And before each batch Lightning
asks rank 0 through the device, for which the host waits until the device has done all that it was given. Here the
handler takes a note, and before each batch the ranks tell each other over the host.

[Note: stopping] Two ranks hung in every try with Lightning's handler. What stands in for private methods of Lightning's
does so from `setup` to `teardown`; where Lightning has no such methods, nothing is changed.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lightning_elixir._lightning import SIGTERMException, Trainer
from lightning_elixir.core.comm import Comm, SoloComm
from lightning_elixir.core.waits import Call

log = logging.getLogger(__name__)

_HANDLER = "_sigterm_notifier_fn"
NEXT_BATCH = Call("the beginning of the next batch of trainer.fit()", is_routine=True, is_of_batch=True)
_QUESTION = "_broadcast_sigterm_tensor"


class GracefulStop:
    """One fit's.

    Args:
        trainer: Whose signals; `launched` processes are told, as Lightning does.
        comm: All ranks.
    """

    def __init__(self, trainer: Trainer, comm: Comm) -> None:
        self._trainer = trainer
        self._comm = comm
        self._is_asked_for = False

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_comm": SoloComm()}  # copies of the Trainer are of no group

    @contextmanager
    def installed(self) -> Iterator[None]:
        """In place of what Lightning does; to be entered before it registers its handlers."""
        connector, loop = self._trainer._signal_connector, self._trainer.fit_loop.epoch_loop
        # Both private. Without one of them Lightning does something else about signals, which is then left alone.
        is_known = hasattr(connector, _HANDLER) and hasattr(loop, _QUESTION)
        if not is_known or self._comm.world_size == 1:
            yield
            return
        setattr(connector, _HANDLER, self._note)
        setattr(loop, _QUESTION, self._stop_together)
        try:
            yield
        finally:
            delattr(connector, _HANDLER)
            delattr(loop, _QUESTION)

    def _note(self, number: int, frame: FrameType | None) -> None:
        """The handler of SIGTERM."""
        if self._is_asked_for:  # the second one: stop without waiting for the others
            raise SIGTERMException
        self._is_asked_for = True
        log.warning(
            "%s: rank %d stops with the others before the next batch; once more stops it at once",
            signal.strsignal(number),
            self._comm.rank,
        )
        launcher = self._trainer.strategy.launcher
        if launcher is not None:
            launcher.kill(signal.Signals(number))

    def _stop_together(self) -> None:
        """Before each batch of training. Collective.

        Raises:
            SIGTERMException: Some rank was asked to stop; raised on all.
        """
        if any(row[0] for row in self._comm.exchange([int(self._is_asked_for)], NEXT_BATCH)):
            self._trainer._signal_connector.received_sigterm = True
            raise SIGTERMException

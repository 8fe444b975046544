"""A thread of the user's that reads all the time while training goes on: it is served or refused, and harms nothing."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lightning_elixir.errors import ElixirError

if TYPE_CHECKING:
    from tests.fuzz.play import Player

LONGEST_READ_S = 60.0
_PAUSE_S = 0.0005


class Watcher:
    """The thread of one run by the engine; of the oracle's, or where the program has none, there is nothing.

    Args:
        player: Whose model is read.
    """

    def __init__(self, player: Player) -> None:
        self._player = player
        self._kind = player.program.watcher if player.backend.is_engine else ""
        self._thread: threading.Thread | None = None
        self._is_over = threading.Event()
        self._has_read = threading.Event()
        self._wrong = ""
        self.num_served = 0
        self.num_refused = 0

    def begin(self) -> None:
        """Start to read, unless that has begun. The first read is before training, as users are told (limits.md)."""
        if self._kind and self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="watcher", daemon=True)
            self._thread.start()
            self._has_read.wait(LONGEST_READ_S)

    def stop(self) -> None:
        """No thread reads any more."""
        self._is_over.set()
        if self._thread is None:
            return
        self._thread.join(LONGEST_READ_S)
        if self._thread.is_alive():
            self._wrong = "it hangs"
        counters = self._player.backend.counters
        counters["reads by threads"] += self.num_served
        counters["refused reads by threads"] += self.num_refused
        self._thread, self._kind = None, ""

    def check(self) -> None:
        """Raises:
        AssertionError: What was read was wrong.
        """
        if self._wrong:
            raise AssertionError(f"a thread that reads {self._player.program.watcher}: {self._wrong}")

    def _watch(self) -> None:
        number, reads = 0, _READS[self._kind]
        # Some programs write NaN to gradients themselves.
        are_finite = self._kind != "gradients"
        while not self._is_over.wait(_PAUSE_S) and not self._wrong:
            number += 1
            try:
                for value in reads(self._player, number):
                    if are_finite and value.is_floating_point() and not bool(torch.isfinite(value).all()):
                        self._wrong = f"inf or NaN in a tensor of shape {tuple(value.shape)}"
                self.num_served += 1
            except ElixirError:
                self.num_refused += 1
            except Exception as error:
                if _is_of_another_class_now(error):
                    self.num_refused += 1
                    continue
                where = "".join(traceback.format_tb(error.__traceback__))
                self._wrong = f"{type(error).__name__}: {error}\nin that thread:\n{where}in the one that asks:"
            finally:
                self._has_read.set()


def _is_of_another_class_now(error: Exception) -> bool:
    """Whether torch has looked twice at the class of a parameter that became whole in between, and found nothing to
    call: see `docs/errors.md`."""
    return isinstance(error, TypeError) and str(error).endswith("__torch_function__: []")


def _parameter(player: Player, number: int) -> Any:
    named = list(player.backend.named.values())
    return named[number % len(named)]


def _gradients(player: Player, number: int) -> list[Any]:
    grad = _parameter(player, number).grad
    return [] if grad is None else [grad]


_READS: dict[str, Callable[[Player, int], list[Any]]] = {
    "parameters": lambda player, number: [_parameter(player, number).detach().float()],
    "gradients": _gradients,
    "state_dict": lambda player, number: list(player.backend.model.state_dict().values()),
    "norms": lambda player, number: [_parameter(player, number).norm()],
}

"""When Python's garbage collector stops everything."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping


class Pauses:
    """How long it has run, in all, since this was made."""

    def __init__(self) -> None:
        self.total_s = self._began_s = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, info: Mapping[str, int]) -> None:
        if phase == "start":
            self._began_s = time.perf_counter()
        else:
            self.total_s += time.perf_counter() - self._began_s

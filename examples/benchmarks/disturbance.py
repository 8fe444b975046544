"""What disturbs a step that is timed: the garbage collector, and what else the host's processors do."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

_NS = 1e-9


class Pauses:
    """How long the garbage collector, which stops everything, has run in all since this was made."""

    def __init__(self) -> None:
        self.total_s = self._began_s = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, info: Mapping[str, int]) -> None:
        if phase == "start":
            self._began_s = time.perf_counter()
        else:
            self.total_s += time.perf_counter() - self._began_s


class HostUse:
    """Looks from now on. Linux alone."""

    def __init__(self) -> None:
        self._since_s, self._since = time.perf_counter(), psutil.cpu_times()
        self._own_s, self._waited_s = time.process_time(), _waited_s()

    def so_far(self) -> dict[str, Any]:
        """Seconds, of all processors together but for `wall_s`: at work for whatever program, at work for this one,
        kept from us by the machine that we are a virtual one of, and how long threads that could run waited for a
        processor, by their names (of one made since, from its start on)."""
        now = psutil.cpu_times()
        names = ("user", "nice", "system", "irq", "softirq")
        waited = {name: seconds - self._waited_s.get(name, 0.0) for name, seconds in _waited_s().items()}
        return {
            "wall_s": time.perf_counter() - self._since_s,
            "busy_s": sum(getattr(now, name) - getattr(self._since, name) for name in names),
            "own_s": time.process_time() - self._own_s,
            "stolen_s": now.steal - self._since.steal,
            "waited_s": {name: seconds for name, seconds in waited.items() if seconds > 1e-3},
        }


def _waited_s() -> dict[str, float]:
    """By name, of all threads with that name."""
    found: dict[str, float] = {}
    for folder in Path("/proc/self/task").iterdir():
        try:
            waited_s = int((folder / "schedstat").read_text().split()[1]) * _NS
            name = "main" if int(folder.name) == os.getpid() else (folder / "comm").read_text().strip()
        except OSError:  # it has ended
            continue
        found[name] = found.get(name, 0.0) + waited_s
    return found

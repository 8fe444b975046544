"""How little device memory beside what is in use do steps need: what torch's allocator loses in gaps.

    python examples/benchmarks/gaps.py --cases llama gpt gpt_16 moe --touch-first --timeout-s 75 --out gaps.json

A fit of `defaults.py` (cases and options are its own) trains some steps under its plan. Then torch is allowed less and
less beyond the most that was in use, a few steps each time: what these take, how often the allocator gave memory back
to obtain it anew (`num_alloc_retries`), and how often it ran out (`num_ooms`) is in `probe`. The plan stays as it is;
what a fit does when memory runs out is part of the last steps. On a CPU there is nothing to see.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import defaults
import torch
from defaults import CASES, GIB, SUITES, Seen, limit_device, measured, names_of, parser_of

_NUM_BEFORE = 9  # steps under the plan's own limit; the plan is final by then
_NUM_EACH = 2
_BEYOND_GIB = (4.0, 3.0, 2.0, 1.5, 1.0, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05)
_KEYS = ("num_alloc_retries", "num_ooms", "allocated_bytes.all.peak", "reserved_bytes.all.peak")


class SeenWithLess(Seen):
    """Lowers the limit while it looks."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.probe: list[dict[str, Any]] = []
        self._most_bytes = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        done, index = batch_idx + 1, (batch_idx + 1 - _NUM_BEFORE) // _NUM_EACH
        if self.clock.device.type != "cuda" or done < _NUM_BEFORE or (done - _NUM_BEFORE) % _NUM_EACH:
            return
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        before = self.probe[-1]["next_limit"] if self.probe else None
        self._most_bytes = self._most_bytes or stats["allocated_bytes.all.peak"]
        self.probe.append({"after": done, "limit": before, **{key: stats[key] for key in _KEYS}})
        if index < len(_BEYOND_GIB):
            total = torch.cuda.get_device_properties(self.clock.device).total_memory
            limit = min(total, int(self._most_bytes + _BEYOND_GIB[index] * GIB))
            self.probe[-1]["next_limit"] = limit
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            limit_device(replace(self.case, gpu_limit=limit), self.clock.device)

    def result(self, strategy: Any) -> dict[str, Any]:
        return super().result(strategy) | {"probe": self.probe}


def main() -> None:
    arguments = parser_of(__doc__ or "", CASES, SUITES, "gaps.json").parse_args()
    defaults.Seen = SeenWithLess  # type: ignore[assignment,misc]
    num_steps = _NUM_BEFORE + _NUM_EACH * len(_BEYOND_GIB) + 1
    measured({name: replace(CASES[name], num_steps=num_steps) for name in names_of(arguments, SUITES)}, arguments)


if __name__ == "__main__":
    main()

"""What a plan promised and what a run made of it, as files."""

from __future__ import annotations

import json
import logging
import math
import statistics
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_elixir.errors import PlanError
from lightning_elixir.plan.io import save_plan
from lightning_elixir.report import ReportData, render_report

log = logging.getLogger(__name__)


class RunReport:
    """The folder of one run's report. Rank 0's business.

    Args:
        folder: Made if missing, by `write`.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def prepare(self) -> None:
        """See that files can be written to the folder, and leave nothing behind: a run that ends before its first step,
        such as one that does not fit, has nothing to report.

        Raises:
            PlanError: They cannot; the message names the folder.
        """
        missing: list[Path] = []
        try:
            missing += [path for path in (self.folder, *self.folder.parents) if not path.exists()]
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise PlanError(
                f"report_dir: cannot write to {self.folder} ({error.strerror}): give the path of a folder that can be"
                " written to"
            ) from error
        finally:
            for path in missing:  # innermost first
                with suppress(OSError):  # it is not empty any more
                    path.rmdir()

    def write(self, data: ReportData, held_bytes: Mapping[str, int]) -> None:
        """Write `plan.json`, `report.json` and `report.html`.

        Args:
            data: For the page.
            held_bytes: The most bytes of each kind that the engine held.

        Raises:
            OSError: A file could not be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        save_plan(data.plan, self.folder / "plan.json")
        text = json.dumps(_finite(_summary(data, held_bytes)), indent=1, allow_nan=False) + "\n"
        (self.folder / "report.json").write_text(text, encoding="utf-8")
        (self.folder / "report.html").write_text(render_report(data), encoding="utf-8")
        log.info("wrote the report of this run to %s", self.folder)


def _summary(data: ReportData, held_bytes: Mapping[str, int]) -> dict[str, Any]:
    plan, real = data.plan, data.measured
    predicted: dict[str, Any] = {"bytes": plan.notes_at_peak}
    if plan.forecast is not None:
        predicted |= {
            "peak_gpu_bytes": plan.forecast.peak_gpu_bytes,
            "margin_bytes": plan.forecast.margin_bytes,
            "gpu_limit_bytes": plan.forecast.gpu_limit_bytes,
            "host_bytes": plan.forecast.host_bytes,
            "binding": plan.forecast.binding,
            "hardware": plan.forecast.hardware,
            "after_steps": plan.forecast.after_steps,
            "foreseen_s": plan.forecast.foreseen_s,
            "foreseen_after_steps": plan.forecast.foreseen_after_steps,
        }
    if data.times is not None:
        times = asdict(data.times)
        predicted |= {"step_s": data.predicted_s, "times": times | {"host_update_s": data.host_update_s}}
    measured: dict[str, Any] = {"bytes": dict(held_bytes)}
    if real is not None:
        measured |= {
            "peak_gpu_bytes": real.peak_gpu_bytes,
            "host_bytes": real.host_bytes,
            "step_s": statistics.median(real.step_s) if real.step_s else None,
            "num_steps": len(real.step_s),
            "times": {
                "compute_s": real.compute_s,
                "waiting_s": real.waiting_s,
                "update_s": real.update_s,
                "host_update_s": real.host_update_s,
            },
            "counters": dict(real.counters),
        }
    return {
        "title": data.title,
        "facts": dict(data.facts),
        "plan": {
            "file": "plan.json",
            "fingerprint": plan.fingerprint(),
            "policy": plan.policy,
            "world_size": plan.world_size,
            "num_chunks": len(plan.chunks),
            "block_bytes": plan.block_bytes,
            "rcache_blocks": plan.rcache_blocks,
            "prefetch_depth": plan.prefetch_depth,
        },
        "predicted": predicted,
        "measured": measured,
        "hardware": None if data.hardware is None else data.hardware.to_dict(),
    }


def _finite(value: Any) -> Any:
    """JSON knows no infinity."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

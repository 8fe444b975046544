"""How fast sharded checkpoints are saved and loaded, beside raw files of the same bytes, and what saves cost the steps.

    python examples/benchmarks/checkpoint_speed.py --folder /mnt/disk --preset 1.3b --batch 8 --json checkpoints.json
    python examples/benchmarks/checkpoint_speed.py --preset toy --device cpu

Three runs of `Trainer(strategy=ElixirStrategy(state_dict_type="sharded"))` over one GPT, one process each: one that
saves and waits for the disk, one that saves with `async_save=True` and goes on training, and one that resumes from
what was saved, with nothing of it in the system's cache. Raw is the same number of bytes in one preallocated file, past
the cache, in pieces of 8 MiB by four threads; the mean of two times, between and after those runs. Memory is the
process's anonymous memory at its highest while it saves or loads, less what it was before; loading makes the
optimizer's states, which are in it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from nvme_speed import RAW_BYTES, RawFile, timed
from peers.jobs import PRESETS, Job

NUM_WARMUP = 5  # the strategy takes its final placement in the fourth
NUM_BEFORE = 5


def main() -> int:
    arguments = parse()
    if arguments.mode:
        Path(arguments.json).write_text(json.dumps(run_here(arguments)))
        return 0
    folder = Path(arguments.folder)
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {
        "command": [Path(__file__).name, *sys.argv[1:]],
        "machine": {"platform": platform.platform(), "cores": os.cpu_count()},
        "versions": {name: version(name) for name in ("torch", "lightning") if find_spec(name)},
    }
    with tempfile.TemporaryDirectory(dir=folder) as own:
        for mode in ("sync", "async", "load"):
            if mode == "async":  # one checkpoint at a time: disks are small
                saved = Path(own) / "sync.ckpt"
                found["raw"] = raw_speed(Path(own), files_bytes(saved))
                shutil.rmtree(saved)
            found[mode] = run_apart(arguments, mode, Path(own))
            keep(found, arguments.json)
        found["raw_after"] = raw_speed(Path(own), found["async"]["nbytes"])
    for mode in ("sync", "async", "load"):
        print(f"{mode:<6}{summary(mode, found)}")
    keep(found, arguments.json)
    return 0


def keep(found: dict[str, Any], path: str | None) -> None:
    """What is known so far, should the rest not come."""
    if path:
        Path(path).write_text(json.dumps(found, indent=1) + "\n")


def summary(mode: str, found: dict[str, Any]) -> str:
    row = found[mode]
    direction = "read" if mode == "load" else "write"
    rate = row["nbytes"] / row["seconds"] / 1e9
    raw = statistics.mean(found[name][f"{direction}_gb_per_s"] for name in ("raw", "raw_after"))
    told = (
        f"{row['nbytes'] / 1e9:.2f} GB in {row['seconds']:.2f} s: {rate:.2f} GB/s, {rate / raw:.2f} of raw {raw:.2f};"
    )
    told += f" {row['memory_bytes'] / 2**20:.0f} MiB of memory"
    if mode != "load":
        told += f"; training stands for {row['blocked_s']:.2f} s; a step takes {row['before_s']:.3f} s"
    if row.get("during_s"):
        told += f", {len(row['during_s'])} of them beside the flush {sum(row['during_s']):.2f} s"
    return told


def raw_speed(folder: Path, nbytes: int) -> dict[str, float]:
    nbytes = max(nbytes - nbytes % RAW_BYTES, RAW_BYTES)
    with RawFile(folder, nbytes, 4) as raw:
        return {"write_gb_per_s": nbytes / timed(raw.write) / 1e9, "read_gb_per_s": nbytes / timed(raw.read) / 1e9}


def files_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def run_apart(arguments: argparse.Namespace, mode: str, own: Path) -> dict[str, Any]:
    result = own / f"{mode}.json"
    command = [sys.executable, __file__, "--mode", mode, "--folder", str(own), "--json", str(result)]
    command += ["--preset", arguments.preset, "--batch", str(arguments.batch), "--device", arguments.device]
    command += ["--elixir", arguments.elixir, "--steps-after", str(arguments.steps_after)]
    subprocess.run(command, check=True, timeout=arguments.timeout_s)  # noqa: S603 - this very program
    found: dict[str, Any] = json.loads(result.read_text())
    return found


# --------------------------------------------------------------------------------------------------- one process


def run_here(arguments: argparse.Namespace) -> dict[str, Any]:
    import torch
    from peers import elixir_systems as elixir
    from peers.elixir_systems import Batches, Lit
    from peers.model import batches

    from lightning_elixir import ElixirStrategy

    pl: Any = vars(elixir)["pl"]  # Lightning, under whichever of its names is there
    folder, mode = Path(arguments.folder), arguments.mode
    shape = PRESETS[arguments.preset]
    job = Job(system="elixir", shape=shape, batch=arguments.batch, device=arguments.device, lr=1e-6)
    device = torch.device(arguments.device, 0) if arguments.device == "cuda" else torch.device("cpu")
    found: dict[str, Any] = {}

    def settle() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    class Saving(pl.Callback):  # type: ignore[misc]
        def __init__(self, path: Path) -> None:
            self.path = path
            self.marks: list[float] = []
            self.begin_s = self.saved_s = 0.0
            self.there_s: float | None = None

        def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
            self.marks.append(settle())
            if len(self.marks) == NUM_WARMUP + NUM_BEFORE:
                with most_memory(found):
                    self.begin_s = settle()
                    trainer.save_checkpoint(self.path)
                    self.saved_s = settle()
                self.marks.append(self.saved_s)
            if self.begin_s and self.there_s is None and self.path.exists():
                self.there_s = settle()
                found["num_during"] = len(self.marks) - (NUM_WARMUP + NUM_BEFORE + 1)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            took = [b - a for a, b in zip(self.marks, self.marks[1:], strict=False)]
            first = NUM_WARMUP + NUM_BEFORE
            found["before_s"] = statistics.median(took[NUM_WARMUP - 1 : first - 1])
            found["blocked_s"] = self.saved_s - self.begin_s
            found["during_s"] = took[first : first + found.get("num_during", 0)]
            found["after_s"] = took[first + found.get("num_during", 0) :]

    class Timed(ElixirStrategy):
        """Knows how long it has been loading."""

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self._sharded.load_awaited_model = self.timed(self._sharded.load_awaited_model)  # type: ignore[method-assign]

        def timed(self, work: Any) -> Any:
            def run(*args: Any, **kwargs: Any) -> Any:
                with most_memory(found):
                    begin_s = settle()
                    result = work(*args, **kwargs)
                    found["seconds"] = found.get("seconds", 0.0) + settle() - begin_s
                return result

            return run

        def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
            return self.timed(super().load_checkpoint)(*args, **kwargs)

        def load_optimizer_state_dict(self, *args: Any, **kwargs: Any) -> None:
            self.timed(super().load_optimizer_state_dict)(*args, **kwargs)

    is_load = mode == "load"
    options = {"autocast": False, "state_dict_type": "sharded", "async_save": mode == "async"}
    strategy = (Timed if is_load else ElixirStrategy)(**options, **json.loads(arguments.elixir))
    saving = Saving(folder / f"{mode}.ckpt")
    num_steps = NUM_WARMUP + NUM_BEFORE + (1 if is_load else arguments.steps_after)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        precision="bf16-mixed",
        max_steps=num_steps,
        callbacks=[] if is_load else [saving],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    earlier = folder / "async.ckpt"
    if is_load:
        forget(earlier)
    data = Batches(batches(job, num_steps, 0, device))
    trainer.fit(Lit(job, device, 0), data, ckpt_path=str(earlier) if is_load else None)
    if is_load:
        return {**found, "nbytes": files_bytes(earlier)}
    there_s = saving.there_s or settle()  # the end of `fit` waits for the disk
    return {**found, "seconds": there_s - saving.begin_s, "nbytes": files_bytes(saving.path)}


def forget(folder: Path) -> None:
    """Have the system's cache let go of the files."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def most_memory(found: dict[str, Any]) -> Iterator[None]:
    """Note the most anonymous memory of this process, beyond what there was."""
    before, most, is_over = anonymous_bytes(), 0, threading.Event()

    def look() -> None:
        nonlocal most
        while not is_over.wait(0.005):
            most = max(most, anonymous_bytes() - before)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        found["memory_bytes"] = max(most, found.get("memory_bytes", 0))


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where the checkpoints go")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="1.3b")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps-after", type=int, default=40, help="steps after the save")
    parser.add_argument("--elixir", default="{}", help="JSON with further arguments of ElixirStrategy")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="for each run")
    parser.add_argument("--json", help="where the figures go")
    parser.add_argument("--mode", choices=("sync", "async", "load"), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

r"""A model that is larger than the host memory it is given: parameters, gradients and optimizer states on a disk.

    python examples/benchmarks/larger_than_host.py --folder /mnt/disk --host-limit 2GiB --json larger.json
    python examples/benchmarks/larger_than_host.py --device cpu --layers 16 --width 512 --heads 8 --vocab 2048 \
        --seq 64 --batch 2 --host-limit 80MiB --chunk-size 2MiB

Writes weights to safetensors files, tensor by tensor; then trains from them, through `pretrained` and
`Trainer(strategy=ElixirStrategy(...))`, with everything on the disk; then once more with everything resident, for the
losses, which are equal to the last bit. One process each. Memory is the process's anonymous memory at its highest, less
what it was before the Trainer was called: with page-locked memory, and on the CPU with what forward and backward take,
which no limit counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from checkpoint_speed import most_memory
from peers.jobs import Job, Shape

MODES = ("disk", "resident")


def main() -> int:
    arguments = parse()
    if arguments.mode:
        Path(arguments.json).write_text(json.dumps(train(arguments)))
        return 0
    Path(arguments.folder).mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {
        "command": [Path(__file__).name, *sys.argv[1:]],
        "machine": {"platform": platform.platform(), "cores": os.cpu_count()},
        "versions": {name: version(name) for name in ("torch", "lightning") if find_spec(name)},
        "parameters": job_of(arguments).shape.num_parameters,
    }
    with tempfile.TemporaryDirectory(dir=arguments.folder) as own:
        found["weight_bytes"] = write_weights(job_of(arguments), arguments.device, Path(own))
        for mode in MODES:
            found[mode] = run_apart(arguments, mode, own)
            if arguments.json:
                Path(arguments.json).write_text(json.dumps(found, indent=1) + "\n")
    disk, resident = (found[mode] for mode in MODES)
    print(disk["explained"])
    print(f"{found['parameters'] / 1e9:.3f}e9 parameters, {found['weight_bytes'] / 2**30:.2f} GiB of weights in bf16")
    most, planned = disk["memory_bytes"] / 2**30, disk["host_bytes"] / 2**30
    print(f"host memory: {most:.2f} GiB more at most; planned {planned:.2f} GiB of {arguments.host_limit}", end="; ")
    print(f"{disk['held_bytes'].get('nvme_states', 0) / 2**30:.1f} GiB of moments on the disk")
    print(f"step: {disk['step_s'][-1]:.2f} s; resident: {resident['step_s'][-1]:.3f} s")
    are_equal = disk["losses"] == resident["losses"]
    losses = " ".join(f"{loss:.6f}" for loss in disk["losses"])
    print(f"losses {losses}: {'equal to the last bit' if are_equal else 'NOT EQUAL'}")
    return 0 if are_equal else 1


def job_of(arguments: argparse.Namespace) -> Job:
    shape = Shape(arguments.layers, arguments.width, arguments.heads, vocab=arguments.vocab, seq=arguments.seq)
    return Job(system="elixir", shape=shape, batch=arguments.batch, device=arguments.device, lr=arguments.lr)


def write_weights(job: Job, device: str, folder: Path) -> int:
    """As transformers writes them, one file for each parameter, so that no more than one is in memory. Returns their
    bytes."""
    import torch
    from peers.model import drawn, empty_model
    from safetensors.torch import save_file

    nbytes, files = 0, {}
    for name, parameter in empty_model(job).named_parameters():
        value = drawn(job, name, parameter.shape, torch.device(device)).cpu()
        files[name] = f"{name}.safetensors"
        save_file({name: value}, folder / files[name])
        nbytes += value.nbytes
    index = {"metadata": {"total_size": nbytes}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return nbytes


def run_apart(arguments: argparse.Namespace, mode: str, folder: str) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".json") as result:
        command = [sys.executable, __file__, *sys.argv[1:], "--folder", folder, "--mode", mode, "--json", result.name]
        subprocess.run(command, check=True, timeout=arguments.timeout_s)  # noqa: S603
        found: dict[str, Any] = json.loads(Path(result.name).read_text())
        return found


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    import torch
    from peers import elixir_systems as elixir
    from peers.elixir_systems import Batches, Lit
    from peers.model import GPT, batches
    from torch import Tensor

    from lightning_elixir import ElixirStrategy, pretrained

    pl: Any = vars(elixir)["pl"]  # Lightning, under whichever of its names is there
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)  # else the same run differs from itself in the last bits on a GPU
    job, folder = job_of(arguments), arguments.folder
    device = torch.device(arguments.device, 0) if arguments.device == "cuda" else torch.device("cpu")
    found: dict[str, Any] = {"losses": [], "step_s": []}

    class Pretrained(Lit):
        def configure_model(self) -> None:
            if self.net is None:
                self.net = pretrained(lambda: GPT(job.shape), folder)

    class Watch(pl.Callback):  # type: ignore[misc]
        def on_train_start(self, *args: Any) -> None:
            self.mark_s = time.perf_counter()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: dict[str, Tensor], *args: Any) -> None:
            found["losses"].append(outputs["loss"].item())
            trainer.strategy.model.engine.synchronize()  # with updates that would run behind the next forward
            begin_s, self.mark_s = self.mark_s, time.perf_counter()
            found["step_s"].append(self.mark_s - begin_s)

        def on_train_end(self, trainer: Any, module: Any) -> None:
            engine = trainer.strategy.model
            stats = engine.stats().as_dict()
            plan = engine.plan
            found.update(counters=stats, held_bytes=stats["held_bytes"], explained=plan.explain())
            found["host_bytes"] = plan.notes["host_bytes"]

    on_disk = {
        "placement_policy": "cpu",
        "nvme_offload_fraction": 1.0,
        "nvme_offload_param_fraction": 1.0,
        "nvme_offload_dir": folder,
        "cpu_memory_limit": arguments.host_limit,
        "chunk_size": arguments.chunk_size,
    }
    strategy = ElixirStrategy(**(on_disk if arguments.mode == "disk" else {"placement_policy": "cuda"}))
    torch.zeros(1, device=device)  # what the device's libraries take is not the strategy's
    data = batches(job, arguments.steps, 0, device)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator=arguments.device,
        devices=1,
        precision="bf16",
        max_steps=arguments.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Watch()],
    )
    with most_memory(found):
        trainer.fit(Pretrained(job, device, 0), Batches(data))
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk: weights and states go there")
    parser.add_argument("--host-limit", default="2GiB", help="host memory for parameters, gradients and states")
    parser.add_argument("--chunk-size", default="128MiB", help="the host has buffers of some chunks' size")
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--width", type=int, default=2560)
    parser.add_argument("--heads", type=int, default=20)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="for each run")
    parser.add_argument("--json", help="where the figures go")
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

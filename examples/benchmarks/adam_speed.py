"""How fast Adam updates parameters, beside the alternatives, in one run on the same memory.

    python examples/benchmarks/adam_speed.py --numel 1e9 --json adam.json

fp32 master and states, bf16 gradients and parameters; medians of runs taken in turns. On the host: our kernel, torch's
fused AdamW with the casts it needs, the written sequence in torch's operations, DeepSpeedCPUAdam where it is installed,
and a plain loop that reads as many streams and writes as many (what memory gives). On a GPU: ours and torch's fused;
then states in host memory, updated by the host, streamed to the GPU, and both at once. The error of one and the other
is against the same steps in fp64. Needs 20 bytes of host memory for each of `--numel` parameters.
"""

from __future__ import annotations

import argparse
import importlib
import json
import mmap
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_elixir.core.device import Device, make_device
from lightning_elixir.core.host import cpu_model, num_usable_cores
from lightning_elixir.core.threads import default_num_threads
from lightning_elixir.kernels import cpu
from lightning_elixir.kernels.compilation import BuildError
from lightning_elixir.kernels.sequence import run_sequence
from lightning_elixir.optim.adam import AdamHyper
from lightning_elixir.optim.execution import UpdateRunner, UpdateTimes
from lightning_elixir.optim.streaming import StateStream
from lightning_elixir.optim.updates import FlatUpdate, UpdatePart
from lightning_elixir.plan.stream_buffers import SCRATCH_BYTES, SLOT_BYTES

HYPER = AdamHyper(
    lr=1e-4,
    beta1=0.9,
    beta2=0.95,
    eps=1e-8,
    weight_decay=0.1,
    adamw_mode=True,
    bias_correction=True,
    maximize=False,
)
STEP = 10
GRAD_FACTOR = 0.5
UPDATE_BYTES = 28  # a parameter: fp32 master and two states read and written, a gradient read, a parameter written
LOOP_BYTES = 26  # the plain loop writes no 16-bit parameter
ERROR_NUMEL = 1 << 20
ERROR_STEPS = 20
ERROR_LR = 1e-3
SOURCE_NUMEL = 1 << 20

Empty = Callable[[int, torch.dtype], Tensor]


# Memory


def huge_empty(numel: int, dtype: torch.dtype) -> Tensor:
    """Host memory of huge pages, where the system gives them, as the engine's is on a machine with a GPU."""
    # Not shared, as Python would have it: shared memory gets no huge pages.
    mapping = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=dtype)


def filled(empty: Empty, numel: int, dtype: torch.dtype, scale: float) -> Tensor:
    """Random magnitudes, which are no denormal numbers."""
    source = torch.randn(SOURCE_NUMEL).abs_().add_(0.1).mul_(scale)
    target = empty(numel, dtype)
    for start in range(0, numel, SOURCE_NUMEL):
        part = target[start : start + SOURCE_NUMEL]
        part.copy_(source[: part.numel()])
    return target


def make_update(empty: Empty, numel: int, segment_numel: int) -> FlatUpdate:
    """One chunk with random contents, cut into parameters of `segment_numel`; new values take the gradient's place."""
    starts = range(0, numel, segment_numel)
    grad = filled(empty, numel, torch.bfloat16, 1e-3)
    return FlatUpdate(
        filled(empty, numel, torch.float32, 1.0),
        grad,
        filled(empty, numel, torch.float32, 1e-3),
        filled(empty, numel, torch.float32, 1e-6),
        tuple(UpdatePart(start, min(segment_numel, numel - start), STEP, HYPER) for start in starts),
        grad_factor=GRAD_FACTOR,
        compute=grad,
    )


# What is measured: work over one chunk, each by its name


def torch_fused(update: FlatUpdate, wide_grad: Tensor) -> Callable[[], None]:
    """`torch.optim.AdamW(fused=True)`, which takes gradients in the parameter's dtype alone, with its casts."""
    param = torch.nn.Parameter(update.param)
    param.grad = wide_grad
    optimizer = torch.optim.AdamW(
        [param], lr=HYPER.lr, betas=(HYPER.beta1, HYPER.beta2), weight_decay=HYPER.weight_decay, fused=True
    )
    # A GPU takes unscaling as a tensor; on the host it would be another pass, and is left out.
    optimizer.state[param] = {
        "step": torch.tensor(float(STEP), device=param.device if param.is_cuda else "cpu"),
        "exp_avg": update.exp_avg,
        "exp_avg_sq": update.exp_avg_sq,
    }

    def work() -> None:
        wide_grad.copy_(update.grad)
        optimizer.step()
        update.grad.copy_(param.detach())

    return work


def deepspeed(update: FlatUpdate, wide_grad: Tensor) -> Callable[[], None] | None:
    """`DeepSpeedCPUAdam` with the same casts; None where it cannot be used."""
    try:
        adam = importlib.import_module("deepspeed.ops.adam")
        param = torch.nn.Parameter(update.param)
        optimizer = adam.DeepSpeedCPUAdam([param], lr=HYPER.lr, weight_decay=HYPER.weight_decay)
    except Exception as error:  # not installed, not compiled, no compiler: all one here
        print(f"DeepSpeedCPUAdam is left out: {type(error).__name__}: {error}"[:200])
        return None
    param.grad = wide_grad

    def work() -> None:
        wide_grad.copy_(update.grad)
        optimizer.step()
        update.grad.copy_(param.detach())

    return work


def torch_sequence(update: FlatUpdate) -> Callable[[], None]:
    scalars = HYPER.scalars(STEP, GRAD_FACTOR)
    tensors = (update.param, update.grad, update.exp_avg, update.exp_avg_sq)
    return lambda: run_sequence(*tensors, scalars, update.grad)


def host_systems(update: FlatUpdate, num_threads: int) -> dict[str, tuple[Callable[[], None], int]]:
    """Work by name, with the bytes of host memory that it must move for a parameter."""
    wide_grad = huge_empty(update.numel, torch.float32).zero_()
    found = {
        "ours": (lambda: update.run(num_threads=num_threads), UPDATE_BYTES),
        "torch AdamW(fused) with casts": (torch_fused(update, wide_grad), UPDATE_BYTES),
        "written sequence, torch operations": (torch_sequence(update), UPDATE_BYTES),
    }
    other = deepspeed(update, wide_grad)
    if other is not None:
        found["DeepSpeedCPUAdam with casts"] = (other, UPDATE_BYTES)
    try:
        kernel = cpu.load_kernel()
    except BuildError as error:
        print(f"no compiled kernel, and no plain loop: {error}")
        return found
    operands = (update.param, update.grad, update.exp_avg, update.exp_avg_sq, None)
    found["plain loop, 4 streams read, 3 written"] = (
        lambda: kernel.plain_loop(operands, update.numel, num_threads),
        LOOP_BYTES,
    )
    return found


def device_systems(update: FlatUpdate) -> dict[str, tuple[Callable[[], None], int]]:
    wide_grad = torch.zeros_like(update.param)
    return {
        "ours": (update.run, UPDATE_BYTES),
        "torch AdamW(fused) with casts": (torch_fused(update, wide_grad), UPDATE_BYTES),
        "written sequence, torch operations": (torch_sequence(update), UPDATE_BYTES),
    }


def measure_systems(
    device: Device, update: FlatUpdate, systems: dict[str, tuple[Callable[[], None], int]], repeats: int
) -> list[dict[str, Any]]:
    """All in turns, so that what disturbs the machine disturbs all."""
    grad = update.grad.clone()
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    with torch.no_grad():
        for _ in range(repeats + 1):
            for name, (work, _) in systems.items():
                update.grad.copy_(grad)
                device.synchronize()
                start_s = time.perf_counter()
                work()
                device.synchronize()
                seconds[name].append(time.perf_counter() - start_s)
    rows = []
    for name, (_, nbytes) in systems.items():
        took_s = statistics.median(seconds[name][1:])
        rate = update.numel / took_s
        rows.append(
            {"system": name, "gparam_per_s": rate / 1e9, "gb_per_s": rate * nbytes / 1e9, "seconds": seconds[name][1:]}
        )
    return rows


# Error


def ulps(actual: Tensor, exact: Tensor) -> tuple[float, float]:
    """Largest and mean distance from fp64 in units of fp32's last place: at the exact value, or at what one step moves
    where that is more."""
    _, exponents = torch.frexp(exact.abs().clamp(min=ERROR_LR))
    distance = (actual.double() - exact).abs() / torch.ldexp(torch.ones_like(exact), exponents - 24)
    return float(distance.max()), float(distance.mean())


def errors(device: torch.device) -> list[dict[str, Any]]:
    """Of one and the other after the same steps from the same start, with gradients of many magnitudes."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(ERROR_NUMEL, generator=generator)
    scales = torch.pow(10.0, torch.randint(-6, 1, (ERROR_NUMEL,), generator=generator).float())
    grads = [(torch.randn(ERROR_NUMEL, generator=generator) * scales).bfloat16().to(device) for _ in range(ERROR_STEPS)]
    settings = {"lr": ERROR_LR, "betas": (0.9, 0.95), "weight_decay": 0.1}

    def by_torch(dtype: torch.dtype, **choice: bool) -> Tensor:
        param = torch.nn.Parameter(start.to(device, dtype))
        optimizer = torch.optim.AdamW([param], **settings, **choice)  # type: ignore[arg-type]
        for grad in grads:
            param.grad = grad.to(dtype)
            optimizer.step()
        return param.detach()

    ours = start.to(device).clone()
    states = torch.zeros_like(ours), torch.zeros_like(ours)
    hyper = replace(HYPER, lr=ERROR_LR)
    for i, grad in enumerate(grads):
        FlatUpdate(ours, grad, *states, (UpdatePart(0, ERROR_NUMEL, i + 1, hyper),)).run()
    exact = by_torch(torch.float64, foreach=False)
    rows = []
    for name, values in (("ours", ours), ("torch AdamW(fused)", by_torch(torch.float32, fused=True))):
        largest, mean = ulps(values, exact)
        rows.append({"system": name, "max_ulp": largest, "mean_ulp": mean})
    return rows


# States in host memory, updated by the host and by the GPU


def measure_share(
    device: Device, streamed: Sequence[FlatUpdate], on_host: Sequence[FlatUpdate], slot_bytes: int, repeats: int
) -> dict[str, Any]:
    runner = UpdateRunner(device)
    runner._stream = StateStream(device, slot_bytes, SCRATCH_BYTES)
    runs: list[UpdateTimes] = []
    seconds = []
    for _ in range(repeats + 1):
        device.synchronize()
        start_s = time.perf_counter()
        runs.append(runner.run([], streamed, on_host))
        seconds.append(time.perf_counter() - start_s)
    runner.close()
    took_s = statistics.median(seconds[1:])
    rate = (runs[0].streamed_numel + runs[0].cpu_numel) / took_s
    return {
        "streamed_numel": runs[0].streamed_numel,
        "cpu_numel": runs[0].cpu_numel,
        "slot_mib": slot_bytes / 2**20,
        "seconds": seconds[1:],
        "adam_s": statistics.median(run.host_update_s for run in runs[1:]),
        "gparam_per_s": rate / 1e9,
        "gb_per_s": rate * UPDATE_BYTES / 1e9,
    }


def print_rates(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{title}\n{'':38}  Gparam/s    GB/s   of ours")
    for row in rows:
        share = row["gparam_per_s"] / rows[0]["gparam_per_s"]
        print(f"{row['system']:38}{row['gparam_per_s']:10.3f}{row['gb_per_s']:8.1f}{share:10.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=float, default=1e9, help="parameters in all")
    parser.add_argument("--chunk-numel", type=float, default=64 * 2**20, help="parameters of a chunk")
    parser.add_argument("--segment-numel", type=float, default=16 * 2**20, help="parameters of a weight")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=default_num_threads(), help="of the host, for all systems")
    parser.add_argument("--slot-mib", type=float, nargs="*", default=[SLOT_BYTES / 2**20])
    parser.add_argument("--shares", type=float, nargs="*", default=[0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    device = make_device()
    has_gpu = device.torch_device.type != "cpu"
    empty = device.host_zeros if has_gpu else huge_empty
    machine = f"{num_usable_cores()} cores of {cpu_model()}, {device.torch_device}"
    print(f"{machine}; {options.threads} threads; torch {torch.__version__}; ours: {cpu.implementation()}")
    results: dict[str, Any] = {
        "machine": machine,
        "torch": torch.__version__,
        "threads": options.threads,
        "implementation": cpu.implementation(),
        "numel": int(options.numel),
    }

    update = make_update(empty, int(options.numel), int(options.segment_numel))
    rows = measure_systems(device, update, host_systems(update, options.threads), options.repeats)
    print_rates(f"on the host, {update.numel / 1e9:.3g}e9 parameters", rows)
    results["host"] = rows
    loop = [row for row in rows if row["system"].startswith("plain loop")]
    if loop:
        results["host_share_of_plain_loop"] = rows[0]["gb_per_s"] / loop[0]["gb_per_s"]
        print(f"ours has {results['host_share_of_plain_loop']:.2f} of the plain loop's bytes per second")
    results["host_ulp"] = errors(torch.device("cpu"))
    del update
    if has_gpu:
        numel = int(options.chunk_numel)
        near = make_update(lambda n, d: torch.empty(n, dtype=d, device=device.torch_device), numel, numel // 4)
        results["device"] = measure_systems(device, near, device_systems(near), 4 * options.repeats)
        print_rates(f"on {device.torch_device}, {numel / 2**20:.0f} Mi parameters", results["device"])
        results["device_ulp"] = errors(device.torch_device)
        del near
    for where in ("host_ulp", "device_ulp"):
        for row in results.get(where, ()):
            print(f"{where[:-4]}, {row['system']}: error {row['mean_ulp']:.3f} ulp mean, {row['max_ulp']:.1f} largest")

    num_chunks = max(2, round(options.numel / options.chunk_numel))
    if options.shares:
        sizes = int(options.chunk_numel), int(options.segment_numel)
        updates = [make_update(empty, *sizes) for _ in range(num_chunks)]
    results["shares"] = []
    for slot_mib in options.slot_mib if options.shares else ():
        for share in options.shares:
            count = round(share * num_chunks)
            row = measure_share(device, updates[:count], updates[count:], int(slot_mib * 2**20), options.repeats)
            results["shares"].append({"share_streamed": count / num_chunks, **row})
            print(
                f"slots of {slot_mib:.0f} MiB, {count / num_chunks:.2f} streamed: {row['gparam_per_s']:.2f} Gparam/s, "
                f"{row['gb_per_s']:.0f} GB/s, the host at work for {row['adam_s']:.3f} of "
                f"{statistics.median(row['seconds']):.3f} s",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()

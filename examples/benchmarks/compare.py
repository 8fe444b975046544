"""One GPT, trained by several systems in turn: speed, memory, and losses that must agree.

    python examples/benchmarks/compare.py --preset 5b --batch 16 --gpu-limit 40GiB --out compare.json
    python examples/benchmarks/compare.py --preset 5b --batch 16 --gpu-limit 40GiB --clip 1.0 --systems plain elixir
    python examples/benchmarks/compare.py --preset 5b --batch 16 --gpu-limit 40GiB --optimizer muon
    python examples/benchmarks/compare.py --preset toy --device cpu --systems plain elixir elixir_manual fsdp2
    python examples/benchmarks/compare.py --preset 1.3b --batch 8 --hook-cost
    python examples/benchmarks/compare.py --width 8192 --heads 64 --largest 8 24 --systems elixir --cpu-limit 110GiB

Every system runs in a process of its own (one for each rank), with a time limit, and writes what it measured; whatever
happens to it, the others run. All train the same model: bf16 (or fp16) parameters and gradients beside an fp32 master,
AdamW (`--optimizer muon`: Muon for the matrices of the blocks), each block recomputed in backward (`--compiled`: and
compiled), the same start values and tokens. `elixir` is
`Trainer(strategy=ElixirStrategy(autocast=False))`, which is that arithmetic; `elixir_manual` the engine without
Lightning; `plain` PyTorch without offloading on the whole card, whatever the limit: it is what the others are held
against. `plain_autocast` and `torchao` compute under autocast over fp32 parameters.

Step times are medians between marks on the compute stream, without waiting in between. The physical limit is the
longest of: computing at plain's rate; the bytes to, and from, the device at the speed of the bus; all bytes that Adam
and both directions move in host memory, at its speed under all three. It counts the ordinary scheme: what does not fit
on the device at 16 bytes a parameter is updated by the host, fetched twice, and its gradient sent back.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from peers.jobs import PRESETS, Job, Shape, Unsupported
from peers.launch import run_job
from peers.tables import REFERENCE, disagreements, in_billions, summary, table, unlike

SYSTEMS = (
    "plain",
    "elixir",
    "elixir_manual",
    "fsdp2",
    "deepspeed_zero2",
    "deepspeed_zero3",
    "torchao",
    "plain_autocast",
)
PACKAGES = ("torch", "lightning", "pytorch-lightning", "lightning_elixir", "deepspeed", "torchao", "triton", "numpy")
_LEAST_S = 10.0
_PLAN_LINES = 6


# ---------------------------------------------------------------------------------------- one system's process


def runner_of(system: str) -> Callable[[Job], dict[str, Any]]:
    """Imports only what this system needs."""
    if system in ("plain", "plain_autocast", "fsdp2", "torchao"):
        from peers import torch_systems

        runner: Callable[[Job], dict[str, Any]] = getattr(torch_systems, f"run_{system}")
        return runner
    if system in ("deepspeed_zero2", "deepspeed_zero3"):
        from peers.deepspeed_systems import run_deepspeed

        return lambda job: run_deepspeed(job, int(system[-1]))
    if system == "hooks":
        from peers.hooks import run_hooks

        return run_hooks
    if system == "hardware":
        return measure_hardware
    from peers import elixir_systems

    return elixir_systems.run_elixir if system == "elixir" else elixir_systems.run_elixir_manual


def measure_hardware(job: Job) -> dict[str, Any]:
    """The machine's figures, from where they are kept, or measured now."""
    import torch

    from lightning_elixir import profile_hardware

    return {"hardware": profile_hardware(device=torch.device(job.device)).to_dict()}


def run_here(job: Job) -> dict[str, Any]:
    """Run one system in this process.

    Returns:
        Its result; with `unsupported` alone where it cannot do what is asked.
    """
    import torch

    if job.device == "cuda" and not torch.cuda.is_available():
        return {"unsupported": "there is no GPU here (--device cpu)"}
    if job.optimizer != "adamw" and job.system not in ("plain", "elixir", "hardware"):
        return {"unsupported": f"{job.system} is measured with AdamW alone"}
    if job.optimizer != "adamw" and (job.clip or job.precision != "bf16"):
        return {"unsupported": f"{job.optimizer} is measured in bf16 and without clipping"}
    if job.is_deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)  # warn_only would leave attention as it is
    try:
        result = runner_of(job.system)(job)
    except Unsupported as error:
        return {"unsupported": str(error)}
    except ModuleNotFoundError as error:
        if error.name in ("deepspeed", "torchao"):
            return {"unsupported": f"{error.name} is not installed"}
        raise
    name = torch.cuda.get_device_name() if job.device == "cuda" else platform.processor() or platform.machine()
    return {**result, "device_name": name, "num_threads": torch.get_num_threads()}


def child(job_path: Path, result_path: Path) -> None:
    job = Job.load(job_path)
    result = run_here(job)
    if int(os.environ.get("RANK", "0")) == 0:
        partial = result_path.with_suffix(".tmp")
        partial.write_text(json.dumps(result))
        partial.replace(result_path)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # process groups and profilers may hang at exit, and everything is written


# ------------------------------------------------------------------------------------------------ the parent


def parse_size(text: str) -> int:
    """Bytes of "40GiB", "512MiB" or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])iB)?", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 40GiB or 512MiB")
    return int(float(match[1]) * 2 ** (10 * (" KMGT".index(match[2]) if match[2] else 0)))


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="1.3b", help="shape; the next five change it")
    for name in ("layers", "width", "heads", "vocab", "seq"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS[:-1]), metavar="SYSTEM")
    parser.add_argument("--batch", type=int, default=4, help="sequences a step on each rank")
    parser.add_argument("--warmup", type=int, default=5, help="steps before the timed ones (elixir needs 4 to settle)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--precision", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--clip", type=float, default=0.0, help="global gradient norm; 0: no clipping")
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw", help="muon: plain and elixir alone")
    parser.add_argument("--compiled", action="store_true", help="compile each block")
    parser.add_argument("--lr", type=float, default=Job.lr)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpu-limit", type=parse_size, help="memory of each GPU that a system may use, such as 40GiB")
    parser.add_argument("--cpu-limit", type=parse_size, help="host memory that elixir plans with")
    parser.add_argument("--deterministic", action="store_true", help="deterministic operators: compares bits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--elixir", type=json.loads, default={}, metavar="JSON", help="further ElixirStrategy options")
    parser.add_argument("--hardware", type=Path, help="JSON of bench-hardware; measured otherwise")
    parser.add_argument("--reference", type=Path, metavar="FILE", help="take plain's figures from an earlier --out")
    parser.add_argument("--trace", type=Path, metavar="DIR", help="write a profiler trace of two more steps of each")
    parser.add_argument("--timeout-s", type=float, default=240.0, help="of each system")
    parser.add_argument("--budget-s", type=float, default=520.0, help="of all: what does not fit is left out")
    parser.add_argument("--out", type=Path, default=Path("compare.json"))
    parser.add_argument("--hook-cost", action="store_true", help="measure what hooks cost the host instead")
    parser.add_argument(
        "--largest", type=int, nargs=2, metavar=("FROM", "TO"), help="search for the most layers that train instead"
    )
    parser.add_argument("--child", nargs=2, type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def job_from(arguments: argparse.Namespace) -> Job:
    """The job of all systems; `system` is still to be filled in."""
    names = ("layers", "width", "heads", "vocab", "seq")
    changes = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    return Job(
        system="",
        shape=replace(PRESETS[arguments.preset], **changes),
        batch=arguments.batch,
        warmup=arguments.warmup,
        steps=arguments.steps,
        precision=arguments.precision,
        clip=arguments.clip,
        optimizer=arguments.optimizer,
        is_compiled=arguments.compiled,
        lr=arguments.lr,
        ranks=arguments.ranks,
        device=arguments.device,
        gpu_limit_bytes=arguments.gpu_limit,
        cpu_limit_bytes=arguments.cpu_limit,
        seed=arguments.seed,
        is_deterministic=arguments.deterministic,
        trace_dir=None if arguments.trace is None else str(arguments.trace),
        hardware=None if arguments.hardware is None else str(arguments.hardware),
        options=arguments.elixir,
    )


class Bench:
    """Runs jobs one after the other within the time that there is, and keeps what they gave in a file."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._end_s = time.monotonic() + arguments.budget_s
        self._timeout_s = arguments.timeout_s
        self._out: Path = arguments.out
        self.content: dict[str, Any] = {
            "command": sys.argv,
            "date": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
            "versions": {"python": platform.python_version(), **_versions()},
            "commit": _commit(),
            "machine": {"platform": platform.platform(), "cores": os.cpu_count()},
        }

    def run(self, job: Job) -> dict[str, Any]:
        left_s = self._end_s - time.monotonic()
        if left_s < _LEAST_S:
            return {"unsupported": "no time was left (--budget-s)"}
        command = [sys.executable, str(Path(__file__).resolve()), "--child"]
        result = run_job(job, command, min(self._timeout_s, left_s))
        shown = "".join(f"{result[key]:.4g} s a step" for key in ("median_step_s",) if key in result)
        shown = shown or str(result.get("error") or result.get("unsupported") or "done")
        print(f"{job.system} ({result.get('process_s', 0):.0f} s): {shown}", flush=True)
        for line in result.get("explained", "").splitlines()[:_PLAN_LINES]:
            print(f"    {line}", flush=True)
        if "log" in result:
            print(result["log"][-1500:], flush=True)
        return result

    def save(self, **content: Any) -> None:
        self.content |= content
        self._out.parent.mkdir(parents=True, exist_ok=True)
        self._out.write_text(json.dumps(self.content, indent=1))


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    """Of the working tree, marked where it has changes; None where git does not know."""
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],  # noqa: S607
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def load_reference(job: Job, path: Path) -> dict[str, Any]:
    """Plain's result in the file of an earlier run of the same model and batch."""
    content = json.loads(path.read_text())
    different = unlike(job, content["job"])
    plain: dict[str, Any] = content["results"].get(REFERENCE, {})
    if different or "median_step_s" not in plain:
        why = f"its {', '.join(different)} differ" if different else f"{REFERENCE} has no times there"
        raise SystemExit(f"--reference {path}: {why}")
    return plain


def compare(arguments: argparse.Namespace, bench: Bench) -> int:
    job = job_from(arguments)
    hardware: dict[str, Any] | None = None
    if arguments.hardware is not None:
        hardware = json.loads(arguments.hardware.read_text())
    elif job.device == "cuda":
        hardware = bench.run(replace(job, system="hardware", ranks=1)).get("hardware")
    reference = None if arguments.reference is None else load_reference(job, arguments.reference)
    results: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for system in arguments.systems:
        results[system] = bench.run(job.of(system))
        found = summary(job, results, hardware, reference)
        bench.save(
            job=asdict(job), parameters=job.shape.num_parameters, hardware=hardware, results=results, summary=found
        )
    print("\n" + "\n".join(table(job, results, found)))
    complaints = disagreements(job, found)
    print(*complaints, sep="\n")
    return 1 if complaints else 0


def hook_cost(arguments: argparse.Namespace, bench: Bench) -> int:
    job = job_from(arguments).of("hooks")
    result = bench.run(job)
    bench.save(job=asdict(job), parameters=job.shape.num_parameters, hooks=result)
    if "share" not in result:
        return 1
    resident, hooked = result["resident"], result["hooked"]
    print(f"\n{in_billions(job.shape.num_parameters)} parameters, {job.tokens} tokens a step, everything resident\n")
    print("| | no hooks | hooks |\n|---|---|---|")
    rows: tuple[tuple[str, Callable[[dict[str, Any]], float]], ...] = (
        ("step s", lambda r: r["median_step_s"]),
        ("main thread, processor s", lambda r: r["main_thread_s"]),
        ("step of few tokens on one thread, processor s", lambda r: r["few_tokens"]["main_thread_s"]),
        ("the same, smallest tenth", lambda r: r["few_tokens"]["main_thread_low_s"]),
    )
    for title, value in rows:
        print(f"| {title} | {value(resident):.4f} | {value(hooked):.4f} |")
    print(
        f"\nhooks take {result['hook_s'] * 1e3:.2f} ms of the host, {result['share']:.1%} of a step; the step itself "
        f"takes {result['step_ratio'] - 1:+.1%}"
    )
    return 0


def largest_passing(passes: Callable[[int], bool], low: int, high: int) -> int | None:
    """The largest number in [low, high] that passes, if all below it do; None if not even `low` does.

    The highest is tried second: often it is a guess that is meant to hold.
    """
    if not passes(low):
        return None
    if high > low and passes(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if passes(middle):
            low = middle
        else:
            high = middle
    return low


def does_train(result: dict[str, Any]) -> bool:
    """Losses are finite, and the last is below the first."""
    losses = result.get("losses") or []
    return len(losses) > 1 and all(x == x and abs(x) < 1e30 for x in losses) and losses[-1] < losses[0]


def largest(arguments: argparse.Namespace, bench: Bench) -> int:
    job = job_from(arguments)
    trials: dict[str, dict[str, Any]] = {}
    for system in arguments.systems:
        tried = trials.setdefault(system, {})

        def passes(layers: int, system: str = system, tried: dict[str, Any] = tried) -> bool:
            one = replace(job.of(system), shape=replace(job.shape, layers=layers))
            print(f"{system}: {layers} layers, {in_billions(one.shape.num_parameters)} parameters", flush=True)
            result = bench.run(one)
            does = does_train(result)
            print(f"  {'trains' if does else 'does not train'}; losses {result.get('losses')}", flush=True)
            tried[str(layers)] = {**result, "parameters": one.shape.num_parameters, "does_train": does}
            bench.save(job=asdict(job), trials=trials)
            return does

        layers = largest_passing(passes, *arguments.largest)
        shape: Shape | None = None if layers is None else replace(job.shape, layers=layers)
        found = "none" if shape is None else f"{layers} layers, {in_billions(shape.num_parameters)} parameters"
        print(f"{system}: the largest that trains: {found}", flush=True)
    return 0


def main(given: list[str] | None = None) -> int:
    arguments = parse_arguments(given)
    if arguments.child is not None:
        child(*arguments.child)
    if arguments.precision == "fp16" and arguments.device == "cpu":
        raise SystemExit("--precision fp16 is for GPUs")
    bench = Bench(arguments)
    if arguments.hook_cost:
        return hook_cost(arguments, bench)
    if arguments.largest is not None:
        return largest(arguments, bench)
    return compare(arguments, bench)


if __name__ == "__main__":
    raise SystemExit(main())

"""`examples/benchmarks/compare.py`: its arithmetic, its processes, and its systems at toy size."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "benchmarks"
GIB = 2**30
HARDWARE = {
    "h2d": {"points": [[2**20, 1.0], [50_000_000_000, 1.0]]},
    "d2h": {"points": [[40_000_000_000, 1.0]]},
    "host_bytes_per_s": 150e9,
    "joint_adam_numel_per_s": 5.5e9,
}


@pytest.fixture(scope="module")
def compare() -> Iterator[ModuleType]:
    """The script as a module; what it imports of its own folder goes with it."""
    sys.path.insert(0, str(FOLDER))
    try:
        import compare as module  # type: ignore[import-not-found]

        yield module
    finally:
        while str(FOLDER) in sys.path:
            sys.path.remove(str(FOLDER))
        for name in [n for n in sys.modules if n == "compare" or n.partition(".")[0] == "peers"]:
            del sys.modules[name]


@pytest.fixture
def job(compare: ModuleType) -> Any:
    return compare.Job(system="", shape=compare.PRESETS["toy"], batch=2, warmup=4, steps=2, device="cpu", lr=1e-3)


# ------------------------------------------------------------------------------------------ the physical limit


def test_limit_is_the_slowest_resource(compare: ModuleType) -> None:
    from peers.limit import Rates, Traffic, limit_of  # type: ignore[import-not-found]

    rates = Rates(h2d=10.0, d2h=20.0, host=100.0)
    found = limit_of(1.0, Traffic(h2d_bytes=30.0, d2h_bytes=40.0, host_bytes=200.0), rates)
    assert (found.compute_s, found.h2d_s, found.d2h_s, found.host_s) == (1.0, 3.0, 2.0, 2.0)
    assert (found.seconds, found.binding) == (3.0, "host to device")
    assert limit_of(5.0, Traffic(30.0, 40.0, 200.0), rates).binding == "compute"


def test_what_fits_stays_and_the_rest_is_moved(compare: ModuleType) -> None:
    from peers.limit import least_traffic, resident_numel

    assert resident_numel(5_000, None, 1e9) == 5_000
    assert resident_numel(5_000, 16_000 + 100, 100) == 1_000
    assert resident_numel(5_000, 16_000 + 100, 100, ranks=2) == 2_000
    assert resident_numel(5_000, 50, 100) == 0
    traffic = least_traffic(4_000)
    assert (traffic.h2d_bytes, traffic.d2h_bytes, traffic.host_bytes) == (16_000, 8_000, 136_000)
    shared = least_traffic(4_000, ranks=2)
    assert (shared.h2d_bytes, shared.d2h_bytes, shared.host_bytes) == (8_000, 4_000, 136_000)


def test_own_traffic_counts_transfers_and_updates_of_the_host(compare: ModuleType) -> None:
    from peers.limit import own_traffic

    numel = {"gpu": 7, "host": 10, "streamed": 0, "written_back": 0}
    assert own_traffic(100.0, 50.0, numel).host_bytes == 150 + 280
    assert own_traffic(100.0, 50.0, numel, ranks=2).host_bytes == 300 + 280
    more = own_traffic(100.0, 50.0, {**numel, "streamed": 4, "written_back": 5}, ranks=2)
    assert (more.h2d_bytes, more.d2h_bytes) == (100 + 28 + 5, 50 + 28)
    assert more.host_bytes == 2 * (133 + 78) + 280


def test_rates_come_from_the_largest_transfers(compare: ModuleType) -> None:
    from peers.limit import rates_from

    assert rates_from(HARDWARE).h2d == 50e9
    assert rates_from(HARDWARE).d2h == 40e9
    assert rates_from(HARDWARE).host == 150e9
    assert rates_from({**HARDWARE, "host_bytes_per_s": None}).host == 28 * 5.5e9


def test_limit_of_5b_at_40_gib_is_host_memory_at_a_small_batch_and_compute_at_a_large_one(compare: ModuleType) -> None:
    from peers.tables import physical_limit  # type: ignore[import-not-found]

    job = compare.Job(system="", shape=compare.PRESETS["5b"], gpu_limit_bytes=40 * GIB)
    small = {"forward_backward_s": 0.233, "update_s": 0.06, "activation_bytes": 8 * GIB}
    found = physical_limit(job, small, HARDWARE)
    resident = 32 * GIB / 16
    assert found.binding == "host memory"
    assert found.seconds == pytest.approx((job.shape.num_parameters - resident) * 34 / 150e9)
    assert found.compute_s == pytest.approx(0.233 + 0.06 * resident / job.shape.num_parameters)
    large = {**small, "forward_backward_s": 0.95}
    assert physical_limit(job, large, HARDWARE).binding == "compute"
    assert physical_limit(job, None, HARDWARE) is None
    assert physical_limit(job, small, None) is None


# ------------------------------------------------------------------------------------------------- the table


@pytest.mark.parametrize(
    ("system", "losses", "does_agree", "text"),
    [
        ("elixir", [4.0, 3.0], True, "bitwise"),
        ("elixir", [4.0, 3.003], True, "within 1.0e-03"),
        ("elixir", [4.0, 3.03], False, "OFF BY 1.0e-02"),
        ("elixir", [4.0001, 3.0], False, "OFF BY 2.5e-05"),  # nothing was updated yet: the first is equal or wrong
        ("fsdp2", [4.0001, 3.0], True, "within 2.5e-05"),
        ("torchao", [4.0001, 3.0], True, "within 2.5e-05"),
        ("torchao", [4.0, 3.06], False, "OFF BY 2.0e-02"),
        ("elixir", [4.0, math.nan], False, "OFF BY nan"),
        ("elixir", [4.0], True, "bitwise"),  # as far as both went
        ("elixir", [], False, "OFF BY nan"),
    ],
)
def test_losses_must_agree(compare: ModuleType, system: str, losses: list[float], does_agree: bool, text: str) -> None:
    from peers.tables import agreement

    found = agreement(system, losses, [4.0, 3.0], is_one_rank=True)
    assert (found.does_agree, str(found)) == (does_agree, text)


def test_sums_over_ranks_may_round_before_the_first_update(compare: ModuleType) -> None:
    from peers.tables import agreement

    assert agreement("elixir", [4.0001, 3.0], [4.0, 3.0], is_one_rank=False).does_agree


def test_table_holds_ratios_to_plain_and_to_the_limit(compare: ModuleType) -> None:
    from peers.tables import disagreements, summary, table

    job = compare.Job(system="", shape=compare.PRESETS["5b"], batch=4, gpu_limit_bytes=40 * GIB)
    plain = {
        "median_step_s": 0.25,
        "losses": [4.0, 3.0],
        "forward_backward_s": 0.2,
        "update_s": 0.05,
        "activation_bytes": 8 * GIB,
        "peak_gpu_allocated_bytes": 74 * GIB,
        "peak_gpu_reserved_bytes": 76 * GIB,
    }
    elixir = {
        "median_step_s": 1.0,
        "losses": [4.0, 3.0],
        "exposed_wait_s": 0.125,
        "peak_rss_bytes": 60 * GIB,
        "h2d_bytes": 50e9,
        "d2h_bytes": 20e9,
        "updated_numel": {"gpu": 1, "streamed": 0, "host": 3_000_000_000, "written_back": 0},
    }
    results = {"plain": plain, "elixir": elixir, "fsdp2": {"error": "out of | memory\nreally"}}
    found = summary(job, results, HARDWARE)
    row = found["systems"]["elixir"]
    assert row["times_plain"] == 0.25
    assert row["of_limit"] == pytest.approx(found["limit"]["seconds"])
    assert row["tokens_per_s"] == 4096
    assert row["tflops_6nt_per_gpu"] == pytest.approx(6 * job.shape.num_parameters * 4096 / 1e12)
    assert row["own_limit"]["host_s"] == pytest.approx((70e9 + 28 * 3e9) / 150e9)
    lines = table(job, results, found)
    assert [line for line in lines if line.startswith("| fsdp2")] == ["| fsdp2 | really | | | | | | | | |"]
    cells = [cell.strip() for cell in next(line for line in lines if line.startswith("| elixir")).split("|")]
    assert cells[2:4] == ["1.000", "0.25"]
    assert cells[8:11] == ["60.0", "0.125", "bitwise"]
    assert disagreements(job, found) == []
    off = summary(job, {**results, "elixir": {**elixir, "losses": [4.0, 3.5]}}, HARDWARE)
    assert disagreements(job, off) == ["elixir: losses are OFF BY 1.7e-01 against plain"]


def test_an_earlier_run_of_plain_stands_in_for_one(compare: ModuleType, job: Any, tmp_path: Path) -> None:
    plain = {"median_step_s": 0.5, "losses": [4.0, 3.0]}
    path = tmp_path / "earlier.json"
    path.write_text(json.dumps({"job": compare.asdict(job), "results": {"plain": plain}}))
    reference = compare.load_reference(job, path)
    elixir = {"median_step_s": 1.0, "losses": [4.0, 3.5]}
    row = compare.summary(job, {"elixir": elixir}, None, reference)["systems"]["elixir"]
    assert (row["times_plain"], row["losses"]["against"], row["losses"]["does_agree"]) == (0.5, "plain", False)
    two = compare.summary(replace(job, ranks=2), {"elixir": elixir}, None, reference)["systems"]["elixir"]
    assert (two["times_plain"], two["losses"]["against"]) == (0.5, "elixir")
    with pytest.raises(SystemExit, match="its batch, clip differ"):
        compare.load_reference(replace(job, batch=3, clip=1.0, steps=9), path)


def test_engine_with_and_without_lightning_gives_the_same_bits_where_operators_are_deterministic(
    compare: ModuleType, job: Any
) -> None:
    from peers.tables import disagreements, summary

    one, other = ({"median_step_s": 1.0, "losses": [4.0, third]} for third in (3.0, 3.0000002))
    found = summary(job, {"elixir": one, "elixir_manual": other}, None)
    assert disagreements(job, found) == ["elixir_manual: losses are not those of elixir to the bit"]
    assert disagreements(replace(job, device="cuda"), found) == []


# ----------------------------------------------------------------------------------------------- the command


def test_sizes(compare: ModuleType) -> None:
    assert compare.parse_size("40GiB") == 40 * GIB
    assert compare.parse_size("1.5 MiB") == 3 * 2**19
    assert compare.parse_size("1000") == 1000
    with pytest.raises(compare.argparse.ArgumentTypeError, match="no size"):
        compare.parse_size("40GB")


def test_shape_of_the_5b_preset_is_that_of_the_recorded_figures(compare: ModuleType) -> None:
    assert compare.PRESETS["5b"].num_parameters == pytest.approx(4.845e9, rel=2e-4)
    assert compare.PRESETS["1.3b"].num_parameters == pytest.approx(1.41e9, rel=1e-2)


def test_options_reach_the_job_and_the_job_its_process(compare: ModuleType, tmp_path: Path) -> None:
    given = [
        "--preset",
        "5b",
        "--layers",
        "3",
        "--gpu-limit",
        "16GiB",
        "--clip",
        "1.0",
        "--elixir",
        '{"prefetch": false}',
    ]
    job = compare.job_from(compare.parse_arguments(given))
    assert (job.shape.layers, job.shape.width, job.gpu_limit_bytes, job.clip) == (3, 4096, 16 * GIB, 1.0)
    job.save(tmp_path / "job.json")
    assert compare.Job.load(tmp_path / "job.json") == job


@pytest.mark.parametrize(("limit", "expected"), [(1, None), (2, 2), (7, 7), (9, 9), (12, 9)])
def test_search_for_the_largest(compare: ModuleType, limit: int, expected: int | None) -> None:
    tried: list[int] = []

    def passes(number: int) -> bool:
        tried.append(number)
        return number <= limit

    assert compare.largest_passing(passes, 2, 9) == expected
    assert len(tried) == len(set(tried)) <= 5


def test_training_means_finite_losses_that_fall(compare: ModuleType) -> None:
    assert compare.does_train({"losses": [4.0, 4.1, 3.9]})
    for losses in ([], [4.0], [4.0, 4.0], [4.0, math.nan], [4.0, math.inf, 3.0]):
        assert not compare.does_train({"losses": losses})
    assert not compare.does_train({"error": "out of memory"})


# ------------------------------------------------------------------------------------------------- processes


def _python(code: str) -> list[str]:
    """A command as `run_job` wants it: the paths of the job and of the result are the last arguments."""
    return [sys.executable, "-c", f"import json, os, sys, time\n{code}"]


def test_no_system_begins_when_time_is_up(compare: ModuleType, job: Any, tmp_path: Path) -> None:
    arguments = compare.parse_arguments(["--budget-s", "5", "--out", str(tmp_path / "out.json")])
    assert "no time" in compare.Bench(arguments).run(job.of("plain"))["unsupported"]


@pytest.mark.full
def test_every_rank_gets_its_environment_and_rank_0_answers(compare: ModuleType, job: Any) -> None:
    from peers.launch import run_job  # type: ignore[import-not-found]

    code = """
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")
if os.environ["RANK"] == "0":
    block = bytearray(64 * 2**20)
    time.sleep(0.8)
    json.dump({"seen": [os.environ[n] for n in names], "job": json.load(open(sys.argv[1]))}, open(sys.argv[2], "w"))
"""
    result = run_job(replace(job, ranks=2), _python(code), 30.0)
    assert result["seen"] == ["0", "0", "2", "127.0.0.1"]
    assert result["job"]["shape"]["width"] == 64
    assert result["peak_rss_bytes"] > 64 * 2**20


def test_the_rank_that_failed_is_told_and_the_others_are_ended(compare: ModuleType, job: Any, tmp_path: Path) -> None:
    from peers.launch import run_job

    code = f"""
open({str(tmp_path)!r} + "/pid" + os.environ["RANK"], "w").write(str(os.getpid()))
while not all(os.path.exists({str(tmp_path)!r} + f"/pid{{r}}") for r in range(2)):
    time.sleep(0.01)
if os.environ["RANK"] == "1":
    raise MemoryError("no room for chunk 7")
time.sleep(60)
"""
    begin_s = time.monotonic()
    result = run_job(replace(job, ranks=2), _python(code), 30.0)
    assert time.monotonic() - begin_s < 20
    assert result["error"] == "rank 1 ended with 1: MemoryError: no room for chunk 7"
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid0").read_text()), 0)


def test_a_process_that_takes_too_long_is_ended_with_what_it_started(
    compare: ModuleType, job: Any, tmp_path: Path
) -> None:
    from peers.launch import run_job

    code = f"""
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
time.sleep(60)
"""
    for limit_s in (1.5, 20.0, 55.0):  # a busy machine takes some seconds to start the two
        result = run_job(job, _python(code), limit_s)
        assert result["error"].startswith(f"not ready after {limit_s:.0f} s")
        if (tmp_path / "pid").exists():
            break
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 5
    while _is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    if _is_running(pid):
        os.kill(pid, signal.SIGKILL)
        pytest.fail("what the process had started went on")


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --------------------------------------------------------------------------------------------------- systems


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_plain_and_the_engine_train_alike_at_toy_size(compare: ModuleType, job: Any) -> None:
    job = replace(job, clip=0.5, gpu_limit_bytes=2**19)
    systems = ("plain", "elixir", "elixir_manual")
    results = {system: compare.run_here(job.of(system)) for system in systems}
    for result in results.values():
        assert len(result["losses"]) == job.warmup + job.steps
        assert len(result["step_s"]) == job.steps
    for system in ("elixir", "elixir_manual"):
        assert results[system]["updated_numel"]["gpu"] < job.shape.num_parameters  # the limit reached the plan
        assert results[system]["exposed_wait_s"] >= 0
        numel = results[system]["updated_numel"]
        assert sum(numel[site] for site in ("gpu", "streamed", "host")) >= job.shape.num_parameters
    found = compare.summary(job, results, None)
    assert compare.disagreements(job, found) == []
    assert found["systems"]["elixir_manual"]["is_bitwise_elixir"]
    # Without any update all systems would agree as well.
    still = compare.run_here(replace(job.of("plain"), lr=0.0))["losses"]
    assert still[0] == results["plain"]["losses"][0]
    assert still[-1] != results["plain"]["losses"][-1]


def test_plain_is_adamw_over_an_fp32_master(compare: ModuleType, job: Any) -> None:
    from peers.model import batches, built_model  # type: ignore[import-not-found]
    from peers.torch_systems import PlainStep  # type: ignore[import-not-found]

    cpu = torch.device("cpu")
    job = replace(job, clip=0.3, lr=1e-2)
    data = batches(job, 3, 0, cpu)
    step = PlainStep(job, cpu)
    model = built_model(job, cpu, where=cpu, dtype=torch.bfloat16)
    masters = [torch.nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=job.lr, betas=job.betas, weight_decay=job.weight_decay, fused=True)
    for tokens in data:
        loss = step(tokens)
        expected = model(tokens)
        assert torch.equal(loss, expected)
        expected.backward()
        for p, master in zip(model.parameters(), masters, strict=True):
            master.grad, p.grad = p.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, job.clip)
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                p.copy_(master)
    for p, other in zip(step.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, other, rtol=2**-7, atol=1e-6)


def test_plain_leaves_out_a_step_whose_fp16_gradients_overflow(compare: ModuleType, job: Any) -> None:
    from peers.model import batches
    from peers.torch_systems import PlainStep

    cpu = torch.device("cpu")
    job = replace(job, precision="fp16", lr=1e-2)
    step = PlainStep(job, cpu)
    tokens = batches(job, 1, 0, cpu)[0]
    before = [p.detach().clone() for p in step.model.parameters()]
    step.scale = 2.0**40
    step(tokens)
    assert step.scale == 2.0**39
    assert all(torch.equal(p, q) for p, q in zip(step.model.parameters(), before, strict=True))
    step.scale = 1024.0
    scaled = step(tokens)
    other = PlainStep(job, cpu)
    other.scale = 8.0
    assert torch.equal(scaled, other(tokens))
    # Adam's first update is nearly the same for any scale; its states are not.
    for mine, theirs in zip(step.optimizers, other.optimizers, strict=True):
        for a, b in zip(mine.state.values(), theirs.state.values(), strict=True):
            assert torch.allclose(a["exp_avg"], b["exp_avg"], rtol=0.0, atol=2e-2 * float(b["exp_avg"].abs().max()))
    assert not any(torch.equal(p, q) for p, q in zip(step.model.parameters(), before, strict=True))


def test_start_values_differ_between_parameters_and_not_between_dtypes(compare: ModuleType, job: Any) -> None:
    from peers.model import built_model

    cpu = torch.device("cpu")
    whole, half = (built_model(job, cpu, where=cpu, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    assert all(torch.equal(p, q.float()) for p, q in zip(whole.parameters(), half.parameters(), strict=True))
    block = whole.blocks[0]
    assert not torch.equal(block.q.weight, block.k.weight)
    assert float(block.q.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
    assert sum(p.numel() for p in whole.parameters()) == job.shape.num_parameters


def test_ranks_get_different_tokens_and_systems_the_same(compare: ModuleType, job: Any) -> None:
    from peers.model import batches

    cpu = torch.device("cpu")
    first, again, other = (batches(job, 3, rank, cpu) for rank in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[0], first[1])
    assert torch.equal(first[0], batches(job, 1, 0, cpu)[0])
    assert first[0].shape == (2, job.shape.seq + 1)
    assert 0 <= int(min(t.min() for t in first)) <= int(max(t.max() for t in first)) < job.shape.vocab


def test_hooks_run_in_one_plan_and_not_in_the_other(compare: ModuleType, job: Any) -> None:
    result = compare.run_here(replace(job, warmup=2, steps=1).of("hooks"))
    assert result["resident"]["counters"]["hits"] == 0
    assert result["hooked"]["counters"]["hits"] > 0
    assert result["hooked"]["counters"]["evictions"] == 0
    assert result["share"] * result["resident"]["median_step_s"] == pytest.approx(result["hook_s"])


def test_what_a_system_cannot_do_is_no_failure(compare: ModuleType, job: Any) -> None:
    assert "needs a GPU" in compare.run_here(job.of("torchao"))["unsupported"]
    assert "one process" in compare.run_here(replace(job, ranks=2).of("plain"))["unsupported"]


@pytest.mark.full
def test_command_writes_its_file_and_a_table(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, str(FOLDER / "compare.py"), "--preset", "toy", "--device", "cpu", "--batch", "2"]
    command += ["--warmup", "1", "--steps", "2", "--systems", "plain", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "| plain | " in ended.stdout
    content = json.loads(out.read_text())
    assert len(content["results"]["plain"]["losses"]) == 3
    assert content["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert content["job"]["shape"]["layers"] == 2


@pytest.mark.full
def test_two_ranks_of_every_system_that_knows_the_cpu(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, str(FOLDER / "compare.py"), "--preset", "toy", "--device", "cpu", "--batch", "2"]
    command += ["--ranks", "2", "--clip", "0.5", "--gpu-limit", "512KiB", "--trace", str(tmp_path / "traces")]
    command += ["--systems", "elixir", "elixir_manual", "fsdp2", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(out.read_text())["summary"]["systems"]
    assert found["elixir_manual"]["is_bitwise_elixir"]
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == [
        "elixir.json.gz",
        "elixir_manual.json.gz",
        "fsdp2.json.gz",
    ]

"""The compiled kernel gives the bits of the written sequence, whatever the types, the values and the threads."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_elixir.kernels import cpu
from lightning_elixir.kernels.addition import Addition, run_addition
from lightning_elixir.kernels.compilation import BuildError, find_compiler
from lightning_elixir.kernels.cpu import Kernel, adam_update, load_kernel
from lightning_elixir.kernels.sequence import Operands, Scalars, Table, run_sequence
from lightning_elixir.optim.adam import AdamHyper, adam_update_
from lightning_elixir.optim.updates import FlatUpdate, UpdatePart

if find_compiler() is None:
    pytest.skip("needs a C++ compiler", allow_module_level=True)

HYPER = AdamHyper(
    lr=1e-3,
    beta1=0.9,
    beta2=0.999,
    eps=1e-8,
    weight_decay=0.01,
    adamw_mode=True,
    bias_correction=True,
    maximize=False,
)
SCALARS = {
    "adamw": HYPER.scalars(3),
    "adam": replace(HYPER, adamw_mode=False, weight_decay=0.1).scalars(2),
    "small_beta1": replace(HYPER, beta1=0.3).scalars(1),
    "adam_small_beta1": replace(HYPER, adamw_mode=False, beta1=0.5, weight_decay=1e-3).scalars(9),
    "maximize": replace(HYPER, maximize=True).scalars(5, 0.37),
    "uncorrected": replace(HYPER, bias_correction=False, weight_decay=0.0).scalars(5, 3.0),
    "no_eps": replace(HYPER, eps=0.0).scalars(5),
}
NARROW = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *NARROW)
SPECIAL = (0.0, -0.0, 1e-45, -1e-41, 1.1754944e-38, 6e-8, 3e-5, -6.1e-5, 65503.9, 65520.0, -7e4, 3.39e38, -3.4e38)
SPECIAL += (1e-20, -1e-23, 1e19, 2e-19, float("inf"), -float("inf"), float("nan"), 1.0, -1.0)


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    return load_kernel()


def random_operands(
    numel: int, dtype: torch.dtype, grad_dtype: torch.dtype, state_dtype: torch.dtype, seed: int = 0
) -> list[Tensor]:
    """Values over many magnitudes, and every pair of special ones."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-12, 3, (4, numel), generator=generator).float()
    values = torch.randn(4, numel, generator=generator) * torch.pow(10.0, exponents)
    values[3].abs_()
    special = torch.tensor(list(product(SPECIAL, SPECIAL)))[:numel]
    for left, right in ((0, 1), (2, 1), (1, 3)):
        offset = torch.randint(0, max(1, numel - len(special)), (), generator=generator)
        values[left, offset : offset + len(special)] = special[:, 0]
        values[right, offset : offset + len(special)] = special[:, 1]
    return [x.to(d) for x, d in zip(values, (dtype, grad_dtype, state_dtype, state_dtype), strict=True)]


def by_sequence(operands: list[Tensor], table: Table, compute: Tensor | None) -> None:
    for start, numel, scalars in table:
        p, g, m, v = (x[start : start + numel] for x in operands)
        run_sequence(p, g, m, v, scalars, None if compute is None else compute[start : start + numel])


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    """The same bits; of nan there are several patterns, which is all one (see the note in `sequence`)."""
    for name, a, b in zip(("param", "grad", "exp_avg", "exp_avg_sq", "compute"), actual, expected, strict=False):
        integer = torch.int32 if a.dtype == torch.float32 else torch.int16
        is_same = (a.view(integer) == b.view(integer)) | (a.isnan() & b.isnan())
        wrong = torch.nonzero(~is_same).flatten()
        assert not wrong.numel(), f"{name} {wrong[:5].tolist()}: {a[wrong[:5]]} instead of {b[wrong[:5]]}"


def check(
    kernel: Kernel, operands: list[Tensor], table: Table, compute: Tensor | None, num_threads: int = 1, which: int = 0
) -> None:
    ours, theirs = ([x.clone() for x in operands] for _ in range(2))
    targets = [None, None]
    if compute is operands[1]:
        targets = [ours[1], theirs[1]]
    elif compute is not None:
        targets = [compute.clone(), compute.clone()]
    kernel.update([*ours, targets[0]], table, num_threads, which)
    by_sequence(theirs, table, targets[1])
    assert_same([*ours, *targets[:1]] if compute is not None else ours, [*theirs, *targets[1:]])
    check_apart(kernel, operands, table, compute, theirs, targets[1], num_threads, which)


def check_apart(
    kernel: Kernel,
    operands: list[Tensor],
    table: Table,
    compute: Tensor | None,
    expected: list[Tensor],
    expected_compute: Tensor | None,
    num_threads: int,
    which: int,
) -> None:
    """To other memory: the same, and nothing else is written."""
    ours = [x.clone() for x in operands]
    target = ours[1] if compute is operands[1] else None if compute is None else compute.clone()
    outputs = [torch.full_like(ours[i], 7.0) for i in (0, 2, 3)]
    kernel.update([*ours, target, *outputs], table, num_threads, which)
    wanted = [torch.full_like(x, 7.0) for x in outputs]
    for start, numel, _ in table:
        for x, i in zip(wanted, (0, 2, 3), strict=True):
            x[start : start + numel] = expected[i][start : start + numel]
    assert_same([outputs[0], ours[1], *outputs[1:]], [wanted[0], expected[1], *wanted[1:]])
    if target is not None and expected_compute is not None:
        assert_same([target], [expected_compute])
    kept = [i for i in range(4) if ours[i] is not target]
    assert_same([ours[i] for i in kept], [operands[i] for i in kept])


@pytest.mark.parametrize("compute_dtype", [None, *DTYPES], ids=str)
@pytest.mark.parametrize("grad_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "state_dtype"), [*zip(DTYPES, DTYPES, strict=True), (torch.bfloat16, torch.float32)], ids=str
)
def test_same_bits_for_all_dtypes(
    kernel: Kernel,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    compute_dtype: torch.dtype | None,
) -> None:
    operands = random_operands(2021, dtype, grad_dtype, state_dtype)
    compute = None if compute_dtype is None else torch.zeros(2021, dtype=compute_dtype)
    for which, scalars in product(range(len(kernel.names)), SCALARS.values()):
        check(kernel, operands, [(0, 2021, scalars)], compute, which=which)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("numel", [1, 2, 7, 8, 9, 31, 33, 511, 512, 513, 1025, 32767, 32769, 100_003])
def test_same_bits_for_all_lengths(kernel: Kernel, numel: int, which: int) -> None:
    if which >= len(kernel.names):
        pytest.skip(f"this machine has {len(kernel.names)} implementations")
    operands = random_operands(numel, torch.float32, torch.bfloat16, torch.float32)
    compute = torch.zeros(numel, dtype=torch.bfloat16)
    check(kernel, operands, [(0, numel, SCALARS["adam"])], compute, 2, which)


def test_unaligned_memory(kernel: Kernel) -> None:
    operands = [x[1:] for x in random_operands(3000, torch.float32, torch.float16, torch.float32)]
    ours, theirs = ([x.clone() for x in operands] for _ in range(2))
    shifted = [torch.cat((x[:1], x))[1:] for x in ours]
    results = [torch.empty(3000)[1:] for _ in range(3)]
    kernel.update([*shifted, None, *results], [(0, 2999, SCALARS["adamw"])], 2)
    kernel.update([*shifted, None], [(0, 2999, SCALARS["adamw"])], 2)
    by_sequence(theirs, [(0, 2999, SCALARS["adamw"])], None)
    assert_same(shifted, theirs)
    assert_same(results, [theirs[0], *theirs[2:]])


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("dtype", NARROW)
def test_casts_of_every_16_bit_value_and_its_neighbours(kernel: Kernel, dtype: torch.dtype, which: int) -> None:
    if which >= len(kernel.names):
        pytest.skip(f"this machine has {len(kernel.names)} implementations")
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    bits = every.float().view(torch.int32)
    halfway = 2**15 if dtype == torch.bfloat16 else 2**12
    param = torch.cat([bits + delta for delta in (-halfway, -1, 0, 1, halfway - 1, halfway, halfway + 1)])
    param = torch.cat([param.view(torch.float32), every.float() + torch.finfo(dtype).smallest_normal * 2.0**-11])
    zeros = [torch.zeros(param.numel()) for _ in range(3)]
    nothing = Scalars(1.0, 0.0, 1.0, 0.9, 0.1, 0.999, 0.001, 1e-8, -0.0)
    compute = torch.zeros(param.numel(), dtype=dtype)
    kernel.update([param, *zeros, compute], [(0, param.numel(), nothing)], 1, which)
    assert_same([compute], [param.to(dtype)])

    # As a gradient, through a first moment that becomes a copy of it.
    copying = Scalars(1.0, 0.0, 1.0, 0.0, 1.0, 0.999, 0.001, 1e-8, -0.0)
    moment = torch.zeros(every.numel())
    operands = [torch.zeros(every.numel()), every, moment, torch.zeros(every.numel()), None]
    kernel.update(operands, [(0, every.numel(), copying)], 1, which)
    finite = every.isfinite()
    assert torch.equal(moment[finite], every.float()[finite])
    assert moment[~finite].isnan().all()  # inf - inf


@pytest.mark.parametrize("num_threads", [1, 2, 3, 7])
@pytest.mark.parametrize("num_parts", [1, 2, 300])
def test_parts_have_their_own_numbers_and_padding_stays(kernel: Kernel, num_parts: int, num_threads: int) -> None:
    numel = 1 << 18
    operands = random_operands(numel, torch.float32, torch.bfloat16, torch.float32)
    generator = torch.Generator().manual_seed(num_parts)
    cuts = (torch.randperm(numel // 512 - 1, generator=generator)[: num_parts - 1].sort().values + 1) * 512
    table: Table = []
    for i, (start, stop) in enumerate(pairwise([0, *cuts.tolist(), numel])):
        padding = int(torch.randint(0, 512, (), generator=generator))
        table.append((start, stop - start - padding, list(SCALARS.values())[i % len(SCALARS)]))
    check(kernel, operands, table, torch.zeros(numel, dtype=torch.bfloat16), num_threads)


def test_empty_parts(kernel: Kernel) -> None:
    operands = random_operands(100, torch.float32, torch.float32, torch.float32)
    scalars = SCALARS["adamw"]
    check(kernel, operands, [(0, 0, scalars), (0, 10, scalars), (10, 0, scalars), (90, 10, scalars)], None, 3)
    check(kernel, operands, [], None)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compute_may_be_the_memory_of_the_gradient(
    kernel: Kernel, dtype: torch.dtype, grad_dtype: torch.dtype, num_threads: int
) -> None:
    operands = random_operands(100_001, dtype, grad_dtype, dtype)
    for name in ("adamw", "adam"):
        check(kernel, operands, [(0, 50_000, SCALARS[name]), (50_176, 40_000, SCALARS[name])], operands[1], num_threads)


def test_sequence_too_lets_compute_be_the_memory_of_the_gradient() -> None:
    for dtype in (torch.float32, torch.float64):
        operands = [x.to(dtype) for x in random_operands(3000, torch.float32, torch.float32, torch.float32)]
        apart, together = ([x.clone() for x in operands] for _ in range(2))
        compute = torch.empty_like(apart[1])
        for _ in range(2):
            run_sequence(*apart, SCALARS["adam"], compute)
            apart[1].copy_(compute)
            run_sequence(*together, SCALARS["adam"], together[1])
        for a, b in zip(apart, together, strict=True):
            assert torch.equal(a.nan_to_num(), b.nan_to_num())


def test_flush_of_denormals_does_not_reach_the_kernel(kernel: Kernel) -> None:
    operands = [torch.full((600,), 1e-40) for _ in range(4)]
    expected = [x.clone() for x in operands]
    by_sequence(expected, [(0, 600, SCALARS["adamw"])], None)
    torch.set_flush_denormal(True)
    try:
        kernel.update([*operands, None], [(0, 600, SCALARS["adamw"])], 1)
    finally:
        torch.set_flush_denormal(False)
    assert_same(operands, expected)


def test_several_python_threads_at_once(kernel: Kernel) -> None:
    table: Table = [(0, 200_000, SCALARS["adamw"])]
    starts = [random_operands(200_000, torch.float32, torch.bfloat16, torch.float32, seed) for seed in range(4)]
    ours, theirs = ([[x.clone() for x in operands] for operands in starts] for _ in range(2))

    def work(operands: list[Tensor]) -> None:
        for _ in range(10):
            kernel.update([*operands, None], table, 3)

    threads = [threading.Thread(target=work, args=(operands,)) for operands in ours]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for operands, expected in zip(ours, theirs, strict=True):
        for _ in range(10):
            by_sequence(expected, table, None)
        assert_same(operands, expected)


def test_interpreter_goes_on_meanwhile(kernel: Kernel) -> None:
    operands = [torch.rand(2**20) for _ in range(4)]
    table: Table = [(0, 2**20, SCALARS["adamw"])] * 100
    took: list[float] = []

    def work() -> None:
        took.append(time.perf_counter())
        kernel.update([*operands, None], table, 1)
        took.append(time.perf_counter())

    thread = threading.Thread(target=work)
    thread.start()
    seen = []
    while thread.is_alive():
        seen.append(time.perf_counter())
    thread.join()
    start, stop = took
    assert any(start + 0.3 * (stop - start) < at < start + 0.7 * (stop - start) for at in seen)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have one priority for a process")
def test_its_threads_stand_behind_the_programs(kernel: Kernel) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    operands = random_operands(200_000, torch.float32, torch.bfloat16, torch.float32)
    kernel.update([*operands, None], [(0, 200_000, SCALARS["adamw"])], 4)

    def found() -> list[int]:
        tasks = [task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text() == "elixir_update\n"]
        return [os.getpriority(os.PRIO_PROCESS, int(task.name)) for task in tasks]

    behind, deadline = min(19, own + 10), time.monotonic() + 20.0
    while (len(seen := found()) < 3 or set(seen) != {behind}) and time.monotonic() < deadline:
        time.sleep(0.01)  # a thread may not have begun
    assert len(seen) >= 3
    assert set(seen) == {behind}
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own


_CROWD = """
import os, subprocess, sys, time
from pathlib import Path
import torch
from lightning_elixir.kernels.addition import Addition
from lightning_elixir.kernels.cpu import load_kernel

def found():
    tasks = [task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text() == "elixir_update\\n"]
    return {os.sched_getscheduler(int(task.name)) for task in tasks}

def run_until(policies):
    deadline = time.monotonic() + 60
    while found() != policies:
        assert time.monotonic() < deadline, found()
        kernel.add_up(total, grad, next(iter(Addition)), 2)

kernel, total, grad = load_kernel(), torch.zeros(2**24), torch.ones(2**24)
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
run_until({os.SCHED_IDLE})
busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
try:
    run_until({os.SCHED_OTHER})
finally:
    for one in busy:
        one.kill()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems have no such policies")
@pytest.mark.full
@pytest.mark.parametrize("is_privileged", [True, False])
def test_its_threads_run_when_nothing_else_does_unless_they_are_crowded_out(is_privileged: bool) -> None:
    """A thread that lost its processor with a piece in hand would hold up the step for seconds, each time. Without
    privileges none may leave SCHED_IDLE: others take the place of those threads."""

    def give_up() -> None:
        ctypes.CDLL(None).prctl(24, 23, 0, 0, 0)  # PR_CAPBSET_DROP, CAP_SYS_NICE: from exec on

    done = subprocess.run(
        [sys.executable, "-c", _CROWD],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=None if is_privileged else give_up,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_forked_child_has_threads_of_its_own(kernel: Kernel) -> None:
    table: Table = [(0, 200_000, SCALARS["adamw"])]
    start = random_operands(200_000, torch.float32, torch.bfloat16, torch.float32)
    expected, actual = ([x.clone() for x in start] for _ in range(2))
    kernel.update([*expected, None], table, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, which is what this is about
        child = os.fork()
    if not child:
        code = 100
        try:
            before = len(os.listdir("/proc/self/task"))
            kernel.update([*actual, None], table, 4)
            assert_same(actual, expected)
            code = len(os.listdir("/proc/self/task")) - before
        finally:
            os._exit(code)
    deadline = time.monotonic() + 20.0
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(ended[1]) == 3  # threads beside its first


# Sums of squares


def sums_by_halving(shard: Tensor, segments: list[tuple[int, int]], scale: float, limit: float) -> Tensor:
    """The written order of `optim.scaling.square_sums`, one segment at a time."""
    sums = []
    for start, numel in segments:
        x = shard[start : start + numel].double() * scale
        x = x.clamp(-limit, limit) ** 2
        while True:
            rows = torch.zeros(max(1, -(-x.numel() // 512)) * 512, dtype=torch.float64)
            rows[: x.numel()] = x
            rows = rows.view(-1, 512)
            while rows.shape[1] > 1:
                rows = rows[:, : rows.shape[1] // 2] + rows[:, rows.shape[1] // 2 :]
            x = rows[:, 0]
            if x.numel() == 1:
                break
        sums.append(x)
    return torch.cat(sums)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize(("scale", "limit"), [(1.0, float("inf")), (1 / 3, float("inf")), (0.7, 0.25)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_square_sums_in_the_written_order(
    kernel: Kernel, dtype: torch.dtype, scale: float, limit: float, which: int
) -> None:
    if which >= len(kernel.names):
        pytest.skip(f"this machine has {len(kernel.names)} implementations")
    shard = torch.randn(300_000, generator=torch.Generator().manual_seed(1)).to(dtype)
    segments = [(512, 1), (1024, 0), (1024, 511), (1536, 513), (3072, 70_000), (80_384, 200_000)]
    expected = sums_by_halving(shard, segments, scale, limit)
    for num_threads in (1, 3):
        assert torch.equal(kernel.square_sums(shard, segments, scale, limit, num_threads, which), expected)
    assert kernel.square_sums(shard, [], scale, limit, 1, which).shape == (0,)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_square_sums_show_what_is_not_finite(kernel: Kernel, value: float) -> None:
    shard = torch.ones(5000)
    shard[4000] = value
    assert kernel.square_sums(shard, [(0, 3000), (3072, 1900)], 1.0, float("inf"), 1).isfinite().tolist() == [
        True,
        False,
    ]
    assert not torch.isnan(kernel.square_sums(shard, [(0, 3000)], 1.0, 2.0, 1)).any()
    clamped = kernel.square_sums(shard, [(3072, 1900)], 1.0, 2.0, 1)
    assert clamped.isnan().all() if math.isnan(value) else clamped.item() == 1899 + 4


def test_square_sums_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = torch.arange(5000.0)
    sums = cpu.square_sums(shard, [(0, 5000)], 0.5, 100.0)
    assert sums is not None
    assert torch.equal(sums, sums_by_halving(shard, [(0, 5000)], 0.5, 100.0))
    assert cpu.square_sums(shard.double(), [(0, 5000)]) is None
    no_kernel(monkeypatch)
    assert cpu.square_sums(shard, [(0, 5000)]) is None


# The front


@pytest.mark.parametrize("addition", Addition)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [1, 511, 40_001])
def test_sums_are_those_of_torch(kernel: Kernel, dtype: torch.dtype, numel: int, addition: Addition) -> None:
    generator = torch.Generator().manual_seed(numel)
    grad, earlier = (torch.randn(numel, generator=generator).to(dtype) for _ in range(2))
    special = torch.tensor(SPECIAL)[:numel].to(dtype)
    grad[: len(special)], earlier[-len(special) :] = special, special.flip(0)
    memory = torch.randn(numel + 1, generator=generator)  # the sum begins where no vector would
    for which in range(len(kernel.names)):
        for offset in (0, 1):
            total = memory.clone()[offset : offset + numel]
            total.copy_(earlier)
            expected = total.clone()
            kernel.add_up(total, grad, addition, 3, which)
            run_addition(expected, grad, addition)
            assert_same([total], [expected])


@pytest.mark.parametrize("addition", Addition)
def test_sums_of_the_process(addition: Addition, monkeypatch: pytest.MonkeyPatch) -> None:
    """Done here for an fp32 sum in host memory, with autograd told; left alone otherwise."""
    total, grad = torch.rand(100), torch.rand(100).bfloat16()
    expected, version = total.clone(), total._version
    run_addition(expected, grad, addition)
    assert cpu.add_up(total, grad, addition, 2)
    if addition is not Addition.ADD_ROUNDED:  # which is for sums of rounded values
        assert torch.equal(total, expected)
    assert total._version > version
    for left in (total.double(), total.bfloat16(), torch.rand(200)[::2], torch.rand(101)):
        before = left.clone()
        assert not cpu.add_up(left, grad, addition, 2)
        assert torch.equal(left, before)
    no_kernel(monkeypatch)
    assert not cpu.add_up(total, grad, addition, 2)


def no_kernel(monkeypatch: pytest.MonkeyPatch, message: str = "there is no compiler") -> None:
    def fail() -> Kernel:
        raise BuildError(message)

    monkeypatch.setattr(cpu, "_the_kernel", cpu._Once(fail))


def test_without_a_kernel_one_line_and_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    operands = random_operands(5000, torch.float32, torch.bfloat16, torch.float32)
    ours, theirs = ([x.clone() for x in operands] for _ in range(2))
    adam_update_(Operands(*ours), HYPER.scalars(1))
    no_kernel(monkeypatch)
    for i in range(2):
        adam_update_(Operands(*(theirs if i == 0 else [torch.ones(3) for _ in range(4)])), HYPER.scalars(1))
    assert_same(ours, theirs)
    assert [record.message for record in caplog.records] == [
        "updates and sums on the host run slower than they could, by torch operations: there is no compiler"
    ]
    assert cpu.implementation() == "torch operations"


def test_environment_turns_the_kernel_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_the_kernel", cpu._Once(load_kernel))
    monkeypatch.setenv("LIGHTNING_ELIXIR_KERNELS", "0")
    assert cpu.implementation() == "torch operations"


@pytest.mark.parametrize("make", ["fp64", "subclass", "inference"])
def test_what_it_cannot_do_is_left_alone(make: str) -> None:
    class Special(Tensor):
        pass

    x = torch.ones(8)
    if make == "fp64":
        x = x.double()
    elif make == "subclass":
        x = x.as_subclass(Special)
    else:
        with torch.inference_mode():
            x = torch.ones(8)
    others = [torch.ones(8) for _ in range(3)]
    for i in range(5):
        operands = [*others[:i], x, *others[i:], torch.ones(8)][:5]
        assert not adam_update(Operands(*operands), [(0, 8, SCALARS["adamw"])])
    assert all(torch.equal(y, torch.ones(8)) for y in others)


def test_autograd_notices_what_was_updated() -> None:
    param, compute = torch.ones(8, requires_grad=True), torch.ones(8)
    loss = (param * param).sum()
    before = compute._version
    adam_update_(Operands(param.view(-1), *(torch.ones(8) for _ in range(3)), compute=compute), HYPER.scalars(1))
    assert compute._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("num_threads", [None, 1, 3])
def test_flat_update_is_one_call(num_threads: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    operands = random_operands(70_000, torch.float32, torch.bfloat16, torch.float32)
    ours, theirs = ([x.clone() for x in operands] for _ in range(2))
    fast = replace(HYPER, lr=0.1)
    spans = ((0, 20_000, 1, HYPER), (20_480, 20_000, 4, HYPER), (40_960, 20_000, 1, fast), (61_440, 5, 1, HYPER))
    parts = tuple(UpdatePart(*span) for span in spans)
    calls = []
    update = Kernel.update

    def counted(self: Kernel, operands: list[Tensor], table: Table, threads: int, which: int = 0) -> None:
        calls.append(threads)
        update(self, operands, table, threads, which)

    monkeypatch.setattr(Kernel, "update", counted)
    monkeypatch.setenv("LIGHTNING_ELIXIR_NUM_THREADS", "2")
    FlatUpdate(*ours, parts, grad_factor=0.5, compute=ours[1]).run(num_threads=num_threads)
    assert calls == [num_threads or 2]
    table = [(part.start, part.numel, part.hyper.scalars(part.step, 0.5)) for part in parts]
    by_sequence(theirs, table, theirs[1])
    assert_same(ours, theirs)


@pytest.mark.parametrize(
    "around", [torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", torch.float16), torch.device("meta")]
)
def test_it_is_found_wherever_it_is_first_used(around: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under manual optimization in mixed precision a step is in autocast, say."""
    monkeypatch.setattr(cpu, "_the_kernel", cpu._Once(load_kernel))
    with around:
        assert "compiled" in cpu.implementation()
        sums = cpu.square_sums(torch.full((5,), 2.0, device="cpu"), [(0, 5)])
    assert sums is not None
    assert sums.tolist() == [20.0]

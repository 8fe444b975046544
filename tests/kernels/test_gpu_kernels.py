"""The GPU kernels without a GPU: what is launched over what, under Triton's interpreter, and compiled for an H200."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_elixir.kernels import gpu
from lightning_elixir.kernels.sequence import Operands, Scalars
from lightning_elixir.optim import scaling
from lightning_elixir.plan.types import ALIGN_NUMEL
from tests.helpers.interpreter import check_under_interpreter
from tests.helpers.tiers import full, telling

ROOT = Path(__file__).parents[2]

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton, which runs without a GPU: pip install triton"
)

FIRST = Scalars(0.5, 0.0, 1.0, 0.9, 0.1, 0.999, 0.001, 1e-8, -1e-3)
SECOND = FIRST._replace(minus_step_size=-2e-3)


# What is launched over what


def test_parts_that_touch_and_have_the_same_numbers_are_one_run() -> None:
    table = [
        (0, 1024, FIRST),
        (1024, 700, FIRST),
        (2048, 512, SECOND),
        (2560, 0, FIRST),
        (2560, 512, SECOND),
        (3072, 5, FIRST),
    ]
    expected = [(FIRST, ((0, 1724), (3072, 5))), (SECOND, ((2048, 1024),))]
    assert gpu.group_parts(table) == expected


def test_no_parts_are_no_runs() -> None:
    assert gpu.group_parts([]) == []
    assert gpu.group_parts([(0, 0, FIRST)]) == []


def random_segments(source: random.Random, max_numel: int) -> tuple[tuple[int, int], ...]:
    segments = []
    first = source.randrange(3) * ALIGN_NUMEL
    for _ in range(source.randrange(1, 8)):
        numel = source.choice([0, 1, ALIGN_NUMEL, source.randrange(max_numel)])
        segments.append((first, numel))
        first += (-(-numel // ALIGN_NUMEL) + source.randrange(2)) * ALIGN_NUMEL
    return tuple(segments)


@pytest.mark.parametrize("seed", range(20))
def test_blocks_of_runs_cover_every_element_once(seed: int) -> None:
    runs = tuple(run for run in random_segments(random.Random(seed), 5000) if run[1]) or ((512, 3),)
    table, num_blocks = gpu.run_table(runs, 1024)
    first_blocks, units, numels = (table[i * len(runs) : (i + 1) * len(runs)] for i in range(3))
    covered: Counter[int] = Counter()
    for block in range(num_blocks):
        run = max(i for i, first in enumerate(first_blocks) if first <= block)
        begin = (block - first_blocks[run]) * 1024
        covered.update(
            range(units[run] * ALIGN_NUMEL + begin, units[run] * ALIGN_NUMEL + min(begin + 1024, numels[run]))
        )
    assert covered == Counter(i for start, numel in runs for i in range(start, start + numel))


def sums_by_levels(shard: torch.Tensor, segments: tuple[tuple[int, int], ...]) -> list[float]:
    """What the launches of `gpu.sum_levels` leave, with Python's numbers in the order that the kernel is to keep."""
    values = shard.double().square().tolist()
    unit = ALIGN_NUMEL
    for level in gpu.sum_levels(segments):
        first_blocks, firsts, counts, targets = torch.tensor(level.table).reshape(4, -1).tolist()
        sums = [math.nan] * level.num_sums
        for block in range(level.num_blocks):
            run = max(i for i, first in enumerate(first_blocks) if first <= block)
            skipped = block - first_blocks[run]
            for row in range(skipped * gpu._SUM_ROWS, (skipped + 1) * gpu._SUM_ROWS):
                begin, end = row * ALIGN_NUMEL, min((row + 1) * ALIGN_NUMEL, counts[run])
                if end <= begin and row:
                    continue
                terms = values[firsts[run] * unit + begin : firsts[run] * unit + end]
                terms += [0.0] * (ALIGN_NUMEL - len(terms))
                while len(terms) > 1:
                    half = len(terms) // 2
                    terms = [terms[i] + terms[i + half] for i in range(half)]
                sums[targets[run] + row] = terms[0]
        values, unit = sums, 1
    return values


@pytest.mark.parametrize("seed", range(10))
def test_levels_of_sums_leave_one_for_each_segment(seed: int) -> None:
    segments = random_segments(random.Random(seed), 20_000)
    shard = torch.randn(segments[-1][0] + 40 * ALIGN_NUMEL)
    assert sums_by_levels(shard, segments) == scaling.square_sums(shard, segments).tolist()


@pytest.mark.parametrize(
    ("numel", "num_levels"),
    [(0, 1), (512, 1), (513, 2), (512**2, 2), (512**2 + 1, 3), (512**3, 3), (512**3 + 1, 4)],
)
def test_as_many_levels_as_the_longest_segment_needs(numel: int, num_levels: int) -> None:
    levels = gpu.sum_levels(((0, 5), (512, numel)))
    assert len(levels) == num_levels
    assert levels[-1].num_sums == 2


# Where there are no kernels


@pytest.fixture
def _fresh_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forgets in the end what a test made of this process's kernels."""
    monkeypatch.delenv("LIGHTNING_ELIXIR_KERNELS", raising=False)
    gpu._the_kernels.cache_clear()
    yield
    gpu._the_kernels.cache_clear()


@pytest.mark.usefixtures("_fresh_kernels")
def test_threads_that_come_at_once_share_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_import(name: str) -> object:
        time.sleep(0.1)
        return object()

    monkeypatch.setattr(gpu.importlib, "import_module", slow_import)
    with ThreadPoolExecutor(4) as threads:
        found = [one.result() for one in [threads.submit(gpu._kernels) for _ in range(4)]]
    assert len(set(map(id, found))) == 1


def adam_operands(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.ones(8, dtype=dtype) for _ in range(4)]


class Code:
    """Stands in for Triton's code; counts the launches and fails at the one it is told to."""

    def __init__(self, fails_at: int | None) -> None:
        self.num_launches = 0
        self._fails_at = fails_at
        self.adam_kernel = self.sum_kernel = self

    def __getitem__(self, grid: tuple[int]) -> Code:
        return self

    def __call__(self, *operands: Any, **options: Any) -> None:
        self.num_launches += 1
        if self.num_launches == self._fails_at:
            raise OSError("no C compiler")


def stand_in(monkeypatch: pytest.MonkeyPatch, fails_at: int | None = None) -> Code:
    code = Code(fails_at)
    monkeypatch.setattr(gpu.importlib, "import_module", lambda name: code)
    return code


@pytest.mark.usefixtures("_fresh_kernels")
def test_without_triton_nothing_is_done_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "lightning_elixir.kernels.triton_code", raising=False)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert not gpu.adam_update(Operands(*adam_operands()), [(0, 8, FIRST)])
            assert gpu.square_sums(torch.ones(8), ((0, 8),)) is None
    assert len(caplog.records) == 1
    assert "triton" in caplog.text


@pytest.mark.usefixtures("_fresh_kernels")
def test_a_launch_that_fails_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    code = stand_in(monkeypatch, fails_at=1)
    with caplog.at_level(logging.WARNING):
        assert gpu.square_sums(torch.ones(8), ((0, 8),)) is None
        assert gpu.square_sums(torch.ones(8), ((0, 8),)) is None
        assert not gpu.adam_update(Operands(*adam_operands()), [(0, 8, FIRST)])
    assert code.num_launches == 1
    assert [record.getMessage() for record in caplog.records] == [
        "Triton's kernels for Adam and gradients are not used, but torch's operations, which give the same "
        "numbers in several times as long: OSError: no C compiler"
    ]


@pytest.mark.usefixtures("_fresh_kernels")
def test_an_update_half_done_is_no_case_for_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, fails_at=2)
    operands = [torch.ones(1024) for _ in range(4)]
    with pytest.raises(OSError, match="no C compiler"):
        gpu.adam_update(Operands(*operands), [(0, 8, FIRST), (512, 8, SECOND)])


@pytest.mark.usefixtures("_fresh_kernels")
def test_running_out_of_memory_is_no_reason_to_give_up(monkeypatch: pytest.MonkeyPatch) -> None:
    code = stand_in(monkeypatch)

    def fail(*operands: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(Code, "__call__", fail)
    with pytest.raises(torch.OutOfMemoryError):
        gpu.adam_update(Operands(*adam_operands()), [(0, 8, FIRST)])
    with pytest.raises(torch.OutOfMemoryError):
        gpu.square_sums(torch.ones(8), ((0, 8),))
    assert gpu._kernels().code is code


@pytest.mark.usefixtures("_fresh_kernels")
def test_the_environment_turns_the_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    code = stand_in(monkeypatch)
    monkeypatch.setenv("LIGHTNING_ELIXIR_KERNELS", "0")
    assert not gpu.adam_update(Operands(*adam_operands()), [(0, 8, FIRST)])
    assert gpu.square_sums(torch.ones(8), ((0, 8),)) is None
    monkeypatch.setenv("LIGHTNING_ELIXIR_KERNELS", "1")
    assert gpu.adam_update(Operands(*adam_operands()), [(0, 8, FIRST)])
    assert code.num_launches == 1


@pytest.mark.usefixtures("_fresh_kernels")
def test_other_dtypes_and_parts_between_blocks_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    code = stand_in(monkeypatch)
    for i in range(4):
        operands = adam_operands()
        operands[i] = operands[i].double()
        assert not gpu.adam_update(Operands(*operands), [(0, 8, FIRST)])
    assert not gpu.adam_update(Operands(*adam_operands(), compute=torch.ones(8).double()), [(0, 8, FIRST)])
    assert not gpu.adam_update(Operands(*adam_operands()), [(4, 4, FIRST)])
    assert gpu.square_sums(torch.ones(8, dtype=torch.float8_e5m2), ((0, 8),)) is None
    assert code.num_launches == 0


@pytest.mark.usefixtures("_fresh_kernels")
def test_other_gpus_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    code = stand_in(monkeypatch)
    monkeypatch.setattr(gpu.torch, "version", SimpleNamespace(hip="7.0"))
    assert not gpu.adam_update(Operands(*adam_operands()), [(0, 8, FIRST)])
    assert code.num_launches == 0


@pytest.mark.usefixtures("_fresh_kernels")
def test_one_launch_for_each_set_of_numbers_and_for_each_level(monkeypatch: pytest.MonkeyPatch) -> None:
    code = stand_in(monkeypatch)
    operands = [torch.ones(5 * 512) for _ in range(4)]
    assert gpu.adam_update(Operands(*operands), [(i * 512, 8, SECOND if i % 2 else FIRST) for i in range(5)])
    assert code.num_launches == 2
    assert gpu.square_sums(torch.ones(10_000), ((0, 600), (1024, 8000))) is not None
    assert code.num_launches == 2 + 2


# The kernels themselves


@needs_triton
@pytest.mark.full
def test_kernels_under_the_interpreter() -> None:
    # numpy divides by zero aloud
    check_under_interpreter(r"7\d", "-W", "ignore::RuntimeWarning", "tests/gpu/test_kernels.py")


class Compiler:
    """Stands in for the module of kernels: compiles for an H200 what would be launched, and keeps its instructions."""

    def __init__(self, code: ModuleType) -> None:
        self.counted: list[Counter[str]] = []
        self._code = code

    def __getattr__(self, name: str) -> Any:
        return Launcher(getattr(self._code, name), self.counted)


class Launcher:
    def __init__(self, kernel: Any, counted: list[Counter[str]]) -> None:
        self._kernel = kernel
        self._counted = counted

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*operands: Any, **options: Any) -> None:
            ptx = self._kernel.run(*operands, grid=grid, warmup=True, **options).asm["ptx"]
            # Names of instructions, with or without a predicate before them.
            counted = Counter(re.findall(r"^\s*(?:@!?%\w+\s+)?([a-z]\w*(?:\.[\w:]+)*)[\s;]", ptx, re.MULTILINE))
            assert counted["ret"] >= 1
            self._counted.append(counted)

        return launch


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    driver = importlib.import_module("triton.runtime.driver").driver
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    h200 = SimpleNamespace(
        get_current_device=lambda: 1000,  # no real one's number: Triton keeps what is compiled by it
        get_current_stream=lambda device: 0,
        get_current_target=lambda: target,
    )
    monkeypatch.setattr(driver, "_active", h200)
    return Compiler(importlib.import_module("lightning_elixir.kernels.triton_code"))


def of_kind(counted: Counter[str], pattern: str) -> dict[str, int]:
    return {name: count for name, count in counted.items() if re.match(pattern, name)}


def assert_exact(counted: Counter[str]) -> None:
    """Every operation on numbers is rounded to nearest, alone, and keeps denormals."""
    assert not of_kind(counted, r"(fma|mad)\.\w*\.?f\d\d|.*\.ftz|.*\.approx|.*\.full")
    arithmetic = of_kind(counted, r"(add|sub|mul|div|sqrt|rcp)\..*f(32|64)$")
    assert arithmetic
    assert not [name for name in arithmetic if ".rn." not in name]


fp32, bf16 = torch.float32, torch.bfloat16


@needs_triton
@pytest.mark.parametrize("num_parts", telling([1, 3], "3"))
@pytest.mark.parametrize(
    ("param", "grad", "wide_loads"),
    [(fp32, bf16, {"ld.global.v4.b32": 3, "ld.global.v2.b32": 1}), full(bf16, bf16, {"ld.global.v2.b32": 4})],
)
def test_compiled_adam_is_exact_and_vectorised(
    compiler: Compiler, param: torch.dtype, grad: torch.dtype, wide_loads: dict[str, int], num_parts: int
) -> None:
    dtypes = (param, grad, param, param, grad)
    tensors = [torch.ones(num_parts * 1024, dtype=dtype) for dtype in dtypes]
    runs = tuple((i * 1024, 700) for i in range(num_parts))
    gpu._launch_adam(compiler, tensors, FIRST._replace(l2=0.1), runs)
    (counted,) = compiler.counted
    assert_exact(counted)
    per_thread = gpu._ADAM_BLOCK // (32 * gpu._ADAM_WARPS) * 2  # two branches: full blocks, and the rest
    assert sum(of_kind(counted, r"div\.rn\.f32").values()) == 3 * per_thread
    assert counted["sqrt.rn.f32"] == per_thread
    assert of_kind(counted, r"ld\.global\.v\d") == wide_loads
    assert sum(of_kind(counted, r"st\.global\.v\d").values()) == 4
    assert not of_kind(counted, r".*\.shared|bar\.")  # nothing changes places between threads


@needs_triton
@pytest.mark.parametrize(("dtype", "num_wide_loads"), [full(bf16, 4), (fp32, 8)])
def test_compiled_sums_are_exact(compiler: Compiler, dtype: torch.dtype, num_wide_loads: int) -> None:
    gpu._launch_sums(compiler, torch.ones(8000, dtype=dtype), ((0, 600), (1024, 6000)), 0.3, None)
    first, second = compiler.counted
    assert_exact(first)
    assert_exact(second)
    assert of_kind(first, r"ld\.global\.v\d") == {"ld.global.v4.b32": num_wide_loads}


@needs_triton
@pytest.mark.parametrize("dtype", [bf16, full(fp32)])
def test_compiled_means_are_exact_and_read_in_wide_accesses(compiler: Compiler, dtype: torch.dtype) -> None:
    gpu._launch_mean(compiler, torch.ones(4, 4096, dtype=dtype), torch.ones(4096, dtype=dtype))
    (counted,) = compiler.counted
    assert_exact(counted)
    assert of_kind(counted, r"ld\.global\.v\d").keys() == {"ld.global.v4.b32"}
    assert of_kind(counted, r"st\.global\.v\d").keys() == {"st.global.v4.b32"}
    assert not of_kind(counted, r".*\.shared|bar\.")

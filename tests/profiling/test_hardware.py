from __future__ import annotations

import fcntl
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lightning_elixir
from lightning_elixir.core.comm import Comm, SoloComm, make_comm
from lightning_elixir.core.device import make_device
from lightning_elixir.core.host import core_times
from lightning_elixir.errors import PlanError, StorageError
from lightning_elixir.plan.hardware import BandwidthCurve, HardwareSpec, hardware_table
from lightning_elixir.profiling import measured_hardware, nvme_speed
from lightning_elixir.profiling.disturbance import CoreWatch, RankUse, others_at_work
from lightning_elixir.profiling.hardware_cache import HardwareCache, default_cache_dir
from lightning_elixir.profiling.measured_hardware import profile_hardware
from lightning_elixir.profiling.rates import Workbench, slowdowns_of
from lightning_elixir.profiling.stopwatch import Stopwatch
from tests.helpers.dist import run_ranks
from tests.helpers.tiers import full, telling

MIB = 2**20
# Little memory and time: what is tested is never how fast this machine is.
QUICK: dict[str, Any] = {"device": torch.device("cpu"), "budget_s": 0.1, "max_bytes": 16 * MIB}


@pytest.fixture(autouse=True)
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    be_calm(monkeypatch)


def be_calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests run side by side, so that this machine is busy."""
    monkeypatch.setattr(CoreWatch, "others", lambda self: "")
    monkeypatch.setattr(Stopwatch, "disturbance", lambda self: "")


def quick(cache_dir: Path | str, **options: Any) -> HardwareSpec:
    return profile_hardware(**{**QUICK, "cache_dir": cache_dir, **options})


def rates(spec: HardwareSpec) -> HardwareSpec:
    """Without what is looked at anew at every call."""
    return replace(spec, host_bytes=0, gpu_bytes=None, nvme_bytes=None)


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def refuse_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(self: Workbench) -> dict[str, Any]:
        raise AssertionError("measured, where the cache should have served")

    monkeypatch.setattr(Workbench, "measure", measure)


def check_figures(spec: HardwareSpec) -> None:
    curves = [c for c in (spec.h2d, spec.d2h, spec.all_gather, spec.reduce_scatter) if c is not None]
    for curve in curves:
        sizes, times = zip(*curve.points, strict=True)
        assert len(sizes) > 1
        assert list(sizes) == sorted(set(sizes))
        assert list(times) == sorted(times)
        assert times[0] > 0
    assert (len(curves) == 4) == (spec.world_size > 1)
    assert spec.duplex_slowdown >= 1
    assert spec.slowdowns is None  # the CPU does one thing at a time
    assert min(spec.cpu_adam_numel_per_s, spec.gpu_adam_numel_per_s, spec.streamed_adam_numel_per_s) > 0
    assert 0 < spec.joint_adam_numel_per_s < float("inf")
    assert set(spec.matmul_flops_per_s) == {"float32", "float16", "bfloat16"}
    assert min(spec.matmul_flops_per_s.values()) > 0
    assert 0 < spec.device_bytes_per_s < float("inf")
    assert spec.launch_s > 0
    assert spec.host_bytes_per_s is None  # the CPU has no bus
    assert spec.host_bytes > 0


def test_figures_of_one_rank(tmp_path: Path) -> None:
    spec = lightning_elixir.profile_hardware(**QUICK, cache_dir=tmp_path)
    check_figures(spec)
    assert (spec.world_size, spec.gpu_bytes, spec.gpu_total_bytes) == (1, None, None)
    assert (spec.nvme_bytes, spec.nvme_read_bytes_per_s, spec.nvme_write_bytes_per_s) == (None, None, None)
    assert spec.versions["torch"] == torch.__version__
    assert spec.versions["lightning_elixir"] == lightning_elixir.__version__


def test_random_numbers_of_the_user_are_left_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    quick(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("options", "named"), [({"local_world_size": 0}, "0"), ({"budget_s": 0.0}, "0.0"), ({"max_bytes": MIB}, str(MIB))]
)
def test_wrong_options_are_refused(tmp_path: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(PlanError, match=f"profile_hardware needs .* got .*{named}"):
        quick(tmp_path, **options)


class ScriptedWatch(Stopwatch):
    """Says what it was told, in order."""

    def __init__(self, times: list[float], limit_s: float) -> None:
        super().__init__(make_device(torch.device("cpu")), SoloComm(), limit_s)
        self.times = times

    def seconds(self, work: Callable[[], None], warm_up_s: float = 0.0) -> float:
        work()
        return self.times.pop(0)


def scripted_curve(times: list[float], limit_s: float) -> list[tuple[float, float]]:
    bench = Workbench(make_device(torch.device("cpu")), SoloComm(), ScriptedWatch(times, limit_s), 32 * MIB, 1)
    return [(size / MIB, seconds) for size, seconds in bench._curve(bench._upload).points]


def test_disturbed_timing_of_a_small_copy_is_taken_back() -> None:
    assert scripted_curve([1.0, 9.0, 2.0, 3.0], limit_s=100.0) == [(1 / 16, 1.0), (1, 2.0), (4, 2.0), (16, 3.0)]


def test_sizes_that_would_take_too_long_are_left_out() -> None:
    assert scripted_curve([1.0, 2.0, 3.0, 4.0], limit_s=7.9) == [(1 / 16, 1.0), (1, 2.0)]


# How much memory it takes


GIB = 1024 * MIB


@pytest.mark.parametrize(
    ("host", "gpu", "local", "expected"),
    [
        (1000 * GIB, None, 1, GIB // 4),  # twice on the host, and the operations as much again
        (1000 * GIB, 80 * GIB, 1, GIB // 2),
        (16 * GIB, 80 * GIB, 8, 128 * MIB),  # eight ranks leave seven eighths of the host free
        (1000 * GIB, 2 * GIB, 1, 128 * MIB),
        (1000, 1000, 1, 4 * MIB),
    ],
)
def test_memory_is_bounded(host: int, gpu: int | None, local: int, expected: int) -> None:
    assert measured_hardware._arena_bytes(measured_hardware._Memory(host, gpu, None), local, GIB) == expected


# The cache


def test_second_call_takes_rates_from_the_cache_and_memory_from_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = quick(tmp_path, nvme_dir=tmp_path.parent)
    refuse_to_measure(monkeypatch)
    monkeypatch.setattr(measured_hardware, "available_host_bytes", lambda: 12345)
    monkeypatch.setattr(measured_hardware, "free_disk_bytes", lambda folder, comm: 54321)
    cached = quick(tmp_path, nvme_dir=tmp_path.parent)
    assert rates(cached) == rates(measured)
    assert (cached.host_bytes, cached.nvme_bytes) == (12345, 54321)


def test_refresh_measures_and_keeps_the_new_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(tmp_path)
    figures = {
        "h2d": BandwidthCurve.constant(1e9),
        "d2h": BandwidthCurve.constant(1e9),
        "duplex_slowdown": 1.0,
        "cpu_adam_numel_per_s": 7.0,
        "gpu_adam_numel_per_s": 8.0,
        "streamed_adam_numel_per_s": 9.0,
    }
    monkeypatch.setattr(Workbench, "measure", lambda self: figures)
    assert quick(tmp_path).cpu_adam_numel_per_s != 7.0
    assert quick(tmp_path, refresh=True).cpu_adam_numel_per_s == 7.0
    refuse_to_measure(monkeypatch)
    assert quick(tmp_path).cpu_adam_numel_per_s == 7.0


def _without(path: Path, key: str) -> str:
    content = json.loads(path.read_text())
    del content["hardware"][key]
    return json.dumps(content)


@pytest.mark.parametrize(
    "spoil",
    [
        full(lambda path: path.write_text(path.read_text()[:-100])),
        full(lambda path: path.write_bytes(b"\xff\xfe\x00")),
        full(lambda path: path.write_text("[1, 2]")),
        lambda path: path.write_text(path.read_text().replace('"schema": 2', '"schema": 99', 2)),
        lambda path: path.write_text(path.read_text().replace('"num_cores": ', '"num_cores": 9')),
        full(lambda path: path.write_text(_without(path, "h2d"))),
        lambda path: path.unlink() or path.mkdir(),
    ],
    ids=["cut_off", "not_text", "not_a_profile", "other_schema", "other_machine", "incomplete", "a_folder"],
)
def test_unusable_file_is_measured_again_with_a_line(tmp_path: Path, spoil: Any, caplog: Any) -> None:
    quick(tmp_path)
    path = only_file(tmp_path)
    spoil(path)
    with caplog.at_level(logging.WARNING):
        spec = quick(tmp_path)
    check_figures(spec)
    assert str(path) in caplog.text
    if path.is_file():
        caplog.clear()
        assert rates(quick(tmp_path)) == rates(spec)  # the file has been replaced
        assert caplog.text == ""


def test_folder_that_cannot_be_written_costs_a_line_only(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        check_figures(quick(tmp_path / "file" / "folder"))
    assert "cannot be kept" in caplog.text


def test_figures_that_others_can_write_are_measured_again(tmp_path: Path, caplog: Any) -> None:
    spec = HardwareSpec.nominal()
    kept = HardwareCache(tmp_path / "own", {"host": "a"})
    assert kept.store(spec)
    assert kept.load() == spec
    assert kept.stored_at() is not None
    only_file(tmp_path / "own").chmod(0o666)
    with caplog.at_level(logging.WARNING):
        assert kept.load() is None
    assert "cannot be used and are measured again: everybody can write to" in caplog.text
    assert kept.store(spec)  # a new file, which is ours
    assert kept.load() == spec
    (tmp_path / "own").chmod(0o777)
    assert kept.load() is None
    assert not kept.store(spec)
    assert "cannot be kept in" in caplog.text
    (tmp_path / "own").chmod(0o700)


def test_no_home_means_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert default_cache_dir() is None
    kept = HardwareCache(None, {})
    kept.store(HardwareSpec.nominal())
    assert kept.load() is None


def test_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache_dir() == Path("/somewhere/lightning_elixir")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert default_cache_dir() == tmp_path / ".cache" / "lightning_elixir"


@pytest.mark.full
def test_what_the_rates_depend_on_has_a_file_of_its_own(tmp_path: Path) -> None:
    quick(tmp_path)
    quick(tmp_path, local_world_size=2)
    quick(tmp_path, nvme_dir=tmp_path.parent)
    torch.set_num_threads(2)
    quick(tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


def test_readers_see_whole_files_while_others_write(tmp_path: Path) -> None:
    spec = HardwareSpec.nominal()
    HardwareCache(tmp_path, {"host": "a"}).store(spec)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            HardwareCache(tmp_path, {"host": "a"}).store(spec)

    writers = [threading.Thread(target=write) for _ in range(3)]
    for writer in writers:
        writer.start()
    try:
        found = [HardwareCache(tmp_path, {"host": "a"}).load() for _ in range(100)]
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert found == [spec] * 100
    assert only_file(tmp_path).name.startswith("hardware-")


# Several ranks


def profile_rank(folder: str, world_size: int) -> list[HardwareSpec]:
    """Measured; from rank 0's cache, the others having none; measured again because rank 0 says so."""
    rank = dist.get_rank()
    own = Path(folder) / str(rank)
    with pytest.MonkeyPatch.context() as patch:
        be_calm(patch)
        patch.setattr(measured_hardware, "available_host_bytes", lambda: (10 - rank) * GIB)
        specs = [
            quick(own, local_world_size=world_size, refresh=how == "anew" and rank == 0) for how in ("", "", "anew")
        ]
    assert own.exists() == (rank == 0)
    return specs


@pytest.mark.parametrize("world_size", telling([1, 2, 3], "3"))
def test_ranks_agree(world_size: int, tmp_path: Path) -> None:
    results = run_ranks(profile_rank, world_size, str(tmp_path), world_size)
    assert results == [results[0]] * world_size
    first, cached, anew = results[0]
    assert cached == first
    assert rates(anew) != rates(first)
    for spec in (first, anew):
        check_figures(spec)
        assert spec.world_size == world_size
        assert spec.host_bytes == (11 - world_size) * GIB  # a rank that has less than its peers counts for all
        for curve in (spec.all_gather, spec.reduce_scatter):
            assert curve is None or all(size % (2 * world_size) == 0 for size, _ in curve.points)


@pytest.mark.parametrize(
    ("computing_s", "collectives_s", "beside_s", "all_s", "expected"),
    [
        (87.6, 244.2, 110.8, 293.9, (1.265, 1.813)),  # products and gathers on two H200s
        (87.6, 195.1, 125.3, 238.5, (1.430, 1.530)),  # products and exchanges of gradients
        (50.0, 100.0, 50.0, 100.0, (1.0, 1.0)),  # neither minds the other
        (50.0, 100.0, 50.0, 150.0, (1.0, 10.0)),  # one after the other
        (50.0, 100.0, 49.0, 98.0, (1.0, 1.0)),  # disturbed alone
    ],
)
def test_how_much_longer_each_takes_beside_the_other(
    computing_s: float, collectives_s: float, beside_s: float, all_s: float, expected: tuple[float, float]
) -> None:
    assert slowdowns_of(computing_s, collectives_s, beside_s, all_s) == pytest.approx(expected, abs=1e-3)


class CountingWatch(Stopwatch):
    """Ranks that take other times for the same."""

    def __init__(self, comm: Comm) -> None:
        super().__init__(make_device(torch.device("cpu")), comm, 0.01)
        self.counts: list[tuple[int, int]] = []

    def side_by_side_seconds(
        self, lane: Callable[[], None], num_lane: int, computed: Callable[[], None], num_computed: int
    ) -> tuple[float, float]:
        self.counts.append((num_lane, num_computed))
        time.sleep(0.002 * self._comm.rank)
        return super().side_by_side_seconds(lane, num_lane, computed, num_computed)


def measured_side_by_side() -> tuple[dict[str, float], list[tuple[int, int]]]:
    device = make_device(torch.device("cpu"))
    comm = make_comm(None, device.torch_device)
    try:
        watch = CountingWatch(comm)
        return Workbench(device, comm, watch, 4 * MIB, 2).measure_slowdowns(comm), watch.counts
    finally:
        comm.close()


def test_ranks_measure_side_by_side_as_often_and_find_the_same() -> None:
    (first, counts), other = run_ranks(measured_side_by_side, 2)
    assert other == (first, counts)
    assert set(first) == {"computing_slowdown", "collective_slowdown"}
    assert all(1 <= value <= 10 for value in first.values())
    assert len(counts) == 2 * (1 + 2 * 3)
    assert all(max(count) >= 1 for count in counts)


def time_unequal_work() -> tuple[int, float]:
    comm = make_comm(None, torch.device("cpu"))
    calls = 0

    def work() -> None:
        nonlocal calls
        calls += 1
        threading.Event().wait(0.02 if comm.rank == 1 else 0.0)

    seconds = Stopwatch(make_device(torch.device("cpu")), comm, limit_s=0.1).seconds(work)
    comm.close()
    return calls, seconds


def test_slowest_rank_counts_and_all_call_as_often() -> None:
    (calls_a, seconds_a), (calls_b, seconds_b) = run_ranks(time_unequal_work, 2)
    assert calls_a == calls_b
    assert seconds_a == seconds_b
    assert seconds_a >= 0.02


class PlannedWatch(Stopwatch):
    """One that takes as long as planned, call by call; the last plan holds from then on."""

    def __init__(self, *seconds: float) -> None:
        super().__init__(make_device(torch.device("cpu")), SoloComm(), limit_s=0.1)
        self.planned = list(seconds)
        self.num_calls: list[int] = []

    def _timed(self, work: Callable[[], None], num_calls: int) -> float:
        self.num_calls.append(num_calls)
        return num_calls * (self.planned.pop(0) if len(self.planned) > 1 else self.planned[0])


@pytest.mark.parametrize(
    ("planned", "found", "num_rounds"),
    [
        ([0.01], 0.01, 1),
        ([0.09, 0.09, 0.01, 0.02, 0.01], 0.01, 2),  # a first timing that was disturbed leaves few: again, and more
        ([0.01] + 4 * [0.011] + 3 * [0.5], 0.01, 1),  # some are disturbed, the best counts
        ([0.01] + 4 * [0.03] + [0.01], 0.01, 2),  # most were: again
        ([0.2, 0.12], 0.12, 0),  # one call takes more than the limit: two of them
    ],
)
def test_the_best_of_repeats_counts(
    planned: list[float], found: float, num_rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[float] = []
    genuine = Stopwatch._round
    monkeypatch.setattr(Stopwatch, "_round", lambda self, *args: rounds.append(0.0) or genuine(self, *args))
    watch = PlannedWatch(*planned)
    assert watch.seconds(lambda: None) == pytest.approx(found)
    assert (len(rounds), watch._num_measured, watch._num_disturbed) == (num_rounds, 1, 0)


def test_repeats_that_still_differ_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # of `calm`
    watch = PlannedWatch(0.001, 0.003)
    for _ in range(2):
        assert watch.disturbance() == ""  # one may happen
        watch.planned = [0.001, 0.003]
        assert watch.seconds(lambda: None) == pytest.approx(0.001)
    told = "repeats of 2 of 2 measurements took more than 2 times as long as the best of them"
    assert watch.disturbance() == told
    for _ in range(38):
        assert watch.disturbance() != ""
        watch.planned = [0.001]
        watch.seconds(lambda: None)
    assert watch.disturbance() == ""  # of so many, two are few
    assert watch.num_calls[:3] == [1, 5, 5]


def test_what_differs_by_itself_is_taken_as_it_usually_is() -> None:
    watch = PlannedWatch(0.01, 0.03)
    assert watch.usual_seconds(lambda: None) == pytest.approx(0.03)
    assert watch._num_measured == 0


def test_a_burst_is_the_better_of_two() -> None:
    watch = PlannedWatch(0.01, 0.01, 0.05, 0.01)
    assert watch.burst_seconds(lambda: None, 0.05) == pytest.approx(0.01)
    assert watch.num_calls == [1, 1, 5, 5]
    assert watch._num_disturbed == 1


def use(
    busy_s: float, own_s: float, *, cores: Iterable[int] = range(4), num_threads: int = 4, host: str = "a"
) -> RankUse:
    return RankUse(host, frozenset(cores), num_threads, 10.0, busy_s, own_s)


@pytest.mark.parametrize(
    ("uses", "found"),
    [
        ([use(32.0, 30.0)], ""),  # a fifth of a core
        ([use(40.0, 30.0)], "1.0 of the 4 cores of a"),
        ([use(15.0, 5.0, num_threads=2)], ""),  # there are cores enough
        ([use(30.0, 5.0, num_threads=2)], "2.5 of the 4 cores of a"),
        ([use(39.0, 19.0, num_threads=2), use(39.0, 20.0, num_threads=2)], ""),  # each other
        ([use(39.0, 9.0, num_threads=2), use(39.0, 20.0, num_threads=2)], "1.0 of the 4 cores of a"),
        ([use(39.0, 39.0), use(39.0, 20.0, host="b")], "1.9 of the 4 cores of b"),
        (
            [use(19.0, 19.0, cores={0, 1}), use(19.0, 3.0, cores={2, 3})],
            "1.6 of the 2 cores of a",
        ),
        ([use(3.0, 9.0)], ""),  # a system that does not tell
        ([], ""),
    ],
)
def test_who_else_had_the_cores(uses: list[RankUse], found: str) -> None:
    assert others_at_work(uses) == (f"other programs had {found} at work" if found else "")


@pytest.mark.full
def test_another_process_is_seen() -> None:
    before = core_times()
    if before is None or before.busy_s == 0:
        pytest.skip("this system does not say what its cores do")
    spin = "import time\nend = time.monotonic() + 0.6\nwhile time.monotonic() < end: pass"
    subprocess.run([sys.executable, "-S", "-c", spin], check=True)
    after = core_times()
    assert after is not None
    assert after.busy_s - before.busy_s - (after.own_s - before.own_s) > 0.3
    assert after.own_s - before.own_s < 0.3
    since = time.process_time()
    while time.process_time() < since + 0.1:
        pass
    assert 0.09 < core_times().own_s - after.own_s < 0.3  # type: ignore[union-attr]


@pytest.mark.parametrize("who", telling([CoreWatch, Stopwatch], "CoreWatch"))
def test_what_a_busy_machine_shows_is_not_kept(
    who: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    probe = measured_hardware.HardwareProbe(**QUICK, cache_dir=tmp_path, refresh=True)
    calm = probe.find()
    assert (calm.path, calm.disturbance) == (only_file(tmp_path), "")
    content = only_file(tmp_path).read_text()
    monkeypatch.setattr(who, "others" if who is CoreWatch else "disturbance", lambda self: "something was at work")
    with caplog.at_level(logging.WARNING):
        found = probe.find()
        computing = probe.with_computing_rates(HardwareSpec.nominal())
    check_figures(found.spec)
    assert (found.path, found.stored_at, found.disturbance) == (None, None, "something was at work")
    assert only_file(tmp_path).read_text() == content
    assert found.spec.name == f"{calm.spec.name}, on a busy machine"
    assert computing.name == f"{calm.spec.name}, on a busy machine, computing only"
    assert "something was at work while this machine was measured: its figures are not kept" in caplog.text


def test_a_rate_is_taken_when_work_has_gone_on_for_some_time() -> None:
    times = iter([0.01] * 30 + [0.02] * 30)
    watch = Stopwatch(make_device(torch.device("cpu")), SoloComm(), limit_s=0.1)
    watch._timed = lambda work, num_calls: sum(next(times) for _ in range(num_calls))  # type: ignore[method-assign]
    assert watch.settled_seconds(lambda: None, 0.58) == pytest.approx(0.02, rel=0.02)


def test_where_nothing_moves_only_computing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise AssertionError("a compilation on the first run of a machine")

    refuse_to_measure(monkeypatch)
    probe = measured_hardware.HardwareProbe(**QUICK, cache_dir=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(measured_hardware, "implementation", refuse)
        assert probe.find_kept() is None
        nominal = HardwareSpec.nominal()
        spec = probe.with_computing_rates(nominal)
    assert spec.matmul_flops_per_s.keys() == nominal.matmul_flops_per_s.keys()
    assert spec.matmul_flops_per_s != nominal.matmul_flops_per_s
    assert spec.device_bytes_per_s != nominal.device_bytes_per_s
    assert (spec.h2d, spec.cpu_adam_numel_per_s) == (nominal.h2d, nominal.cpu_adam_numel_per_s)
    assert list(tmp_path.iterdir()) == []


def computing_of_rank(cache_dir: str) -> HardwareSpec:
    comm = make_comm(None, QUICK["device"])
    probe = measured_hardware.HardwareProbe(**QUICK, comm=comm, local_world_size=2, cache_dir=cache_dir)
    found = probe.with_computing_rates(HardwareSpec.nominal())
    comm.close()
    return found


def test_ranks_agree_on_what_computing_takes(tmp_path: Path) -> None:
    mine, theirs = run_ranks(computing_of_rank, 2, str(tmp_path))
    assert mine == theirs
    assert mine.matmul_flops_per_s != HardwareSpec.nominal().matmul_flops_per_s
    assert list(tmp_path.iterdir()) == []


def test_kept_figures_serve_where_nothing_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = quick(tmp_path)
    refuse_to_measure(monkeypatch)
    kept = measured_hardware.HardwareProbe(**QUICK, cache_dir=tmp_path).find_kept()
    assert kept is not None
    assert rates(kept) == rates(measured)


# The disk


def test_disk_is_measured_and_nothing_stays(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    spec = quick(tmp_path / "cache", nvme_dir=folder)
    read, write = spec.nvme_read_bytes_per_s or 0, spec.nvme_write_bytes_per_s or 0
    assert min(read, write) > 0
    assert (spec.nvme_bytes or 0) > 0
    assert spec.nvme_adam_numel_per_s == pytest.approx(
        min(spec.cpu_adam_numel_per_s, read * write / (12 * (read + write)))
    )
    assert list(folder.iterdir()) == []


def test_disk_without_direct_access_is_measured_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = fcntl.fcntl

    def refuse(descriptor: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError("no direct access here")
        return genuine(descriptor, command, argument)

    monkeypatch.setattr(nvme_speed.fcntl, "fcntl", refuse)
    watch = Stopwatch(make_device(torch.device("cpu")), SoloComm(), 0.05)
    assert min(nvme_speed.measure_disk(tmp_path, SoloComm(), watch, 64 * MIB)) > 0


def test_disk_with_little_space_is_refused(tmp_path: Path) -> None:
    watch = Stopwatch(make_device(torch.device("cpu")), SoloComm(), 0.05)
    with pytest.raises(StorageError, match="too little free space .* 32 MiB"):
        nvme_speed.measure_disk(tmp_path, SoloComm(), watch, 31 * MIB)


def fail_on_one_rank(folder: str, failure: str) -> str:
    rank = dist.get_rank()
    nvme_dir, genuine = Path(folder), nvme_speed.os.pwrite
    if failure == "missing" and rank == 1:
        nvme_dir = nvme_dir / "missing"

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        raise OSError(28, "No space left on device")

    if failure == "full" and rank == 1:
        nvme_speed.os.pwrite = pwrite
    try:
        quick(Path(folder) / "cache", nvme_dir=nvme_dir, local_world_size=2)
    except StorageError as error:
        return str(error)
    finally:
        nvme_speed.os.pwrite = genuine
    return "no error"


@pytest.mark.parametrize(
    ("failure", "said"), [("missing", "No such file or directory"), ("full", "No space left on device")]
)
def test_disk_that_fails_one_rank_stops_all(failure: str, said: str, tmp_path: Path) -> None:
    for message in run_ranks(fail_on_one_rank, 2, str(tmp_path), failure):
        assert said in message
        assert "(rank 1)" in message


# What people read


def test_table_names_every_figure_with_its_unit() -> None:
    spec = replace(
        HardwareSpec.nominal(gpu_bytes=139 * GIB, host_bytes=128 * GIB),
        h2d=BandwidthCurve(((MIB, MIB / 11e9), (4 * MIB, 4 * MIB / 31e9))),
        gpu_total_bytes=140 * GIB,
        nvme_read_bytes_per_s=3e9,
        nvme_write_bytes_per_s=1.5e9,
        nvme_bytes=64 * GIB,
        versions={"torch": "2.13"},
    )
    rows = dict(hardware_table(spec))
    assert rows["device memory"] == "139.0 GiB of 140.0 GiB"
    assert rows["host memory"] == "128.0 GiB"
    assert rows["host to device"] == "11 GB/s at 1 MiB, 31 at 4"
    assert rows["Adam on the device"] == "20 Gparam/s"
    assert rows["matmul bfloat16"] == "100 TFLOP/s"
    assert rows["least time of an operator"] == "0 us"
    assert rows["Adam through NVMe"] == "0.0833 Gparam/s"
    assert rows["NVMe free space"] == "64.0 GiB"
    assert rows["version of torch"] == "2.13"


def test_table_leaves_out_what_was_not_measured() -> None:
    spec = replace(HardwareSpec.nominal(), all_gather=None, reduce_scatter=None, device_bytes_per_s=float("inf"))
    labels = [label for label, _ in hardware_table(spec)]
    assert not {"device memory", "all-gather of a chunk", "NVMe read", "element-wise operators"} & set(labels)
    assert len(labels) == len(set(labels))

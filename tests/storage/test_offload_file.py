"""What an offload file does, whatever is behind it."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_elixir.core.device import CpuDevice
from lightning_elixir.core.worker import Worker
from lightning_elixir.errors import PlanError, StateError, StorageError
from lightning_elixir.storage.nvme import ALIGNMENT, open_offload_file
from tests.helpers.tiers import crossed, telling
from tests.storage.conftest import Open
from tests.storage.files import MIB, noise, read_back, start


@crossed(numel=[1, 1024, 4097, 3 * MIB + 5], dtype=[torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_what_is_written_is_read(open_file: Open, dtype: torch.dtype, numel: int) -> None:
    file = open_file(numel * dtype.itemsize, 64, numel * dtype.itemsize)
    tensor = (noise(numel) * 100).to(dtype)
    file.write(0, tensor)
    file.write(2, tensor.flip(0))
    file.synchronize()
    assert torch.equal(read_back(file, 0, numel, dtype), tensor)
    assert torch.equal(read_back(file, 2, numel, dtype), tensor.flip(0))


@pytest.mark.parametrize("skipped", [0, 1, 1024])
def test_alignment_in_memory_does_not_matter(open_file: Open, skipped: int) -> None:
    numel = 5 * MIB // 4 + 3
    file = open_file(numel * 4)
    source, target = file.empty(numel + skipped, torch.float32), file.empty(numel + skipped + 9, torch.float32)
    source.copy_(noise(numel + skipped))
    target.fill_(3.0)
    file.write(0, source[skipped:]).wait()
    file.read(0, target[skipped : skipped + numel]).wait()
    assert torch.equal(target[skipped : skipped + numel], source[skipped:])
    assert (target[:skipped] == 3).all()
    assert (target[skipped + numel :] == 3).all()


def test_empty_is_aligned(open_file: Open) -> None:
    file = open_file(ALIGNMENT)
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        for numel in (0, 1, 5000):
            tensor = file.empty(numel, dtype)
            assert tensor.data_ptr() % ALIGNMENT == 0 or numel == 0
            assert (tensor.numel(), tensor.dtype, tensor.dim()) == (numel, dtype, 1)


def test_memory_for_transfers_comes_from_the_device(open_file: Open) -> None:
    asked: list[int] = []

    class Counting(CpuDevice):
        def __init__(self) -> None:
            super().__init__()
            self.is_synchronous = False

        def host_zeros(self, numel: int, dtype: torch.dtype, *, is_locked: bool = True) -> Tensor:
            asked.append(numel)
            return super().host_zeros(numel, dtype)

    assert open_file(64, device=Counting()).empty(100, torch.float32).numel() == 100
    assert len(asked) == 1
    open_file(64, device=CpuDevice()).empty(100, torch.float32).fill_(1.0)


def test_what_was_never_written_is_zeros(open_file: Open) -> None:
    file = open_file(9 * MIB, 100)
    assert (read_back(file, 0, 9 * MIB // 4) == 0).all()
    assert (read_back(file, 1, 25) == 0).all()


def test_parts_of_a_region(open_file: Open) -> None:
    numel = 9 * MIB // 4 + 11
    file = open_file(ALIGNMENT, numel * 4, ALIGNMENT)
    whole = noise(numel)
    file.write(1, whole)
    first, last = noise(1024, seed=1), noise(1035, seed=2)
    for part, offset in ((first, 4096), (first, 8 * MIB - 4096), (last, (numel - 1035) * 4 // 4096 * 4096)):
        part = part[: (numel * 4 - offset) // 4]
        file.write(1, part, offset=offset)
        whole[offset // 4 : offset // 4 + len(part)] = part
    target = torch.empty(2048)
    file.read(1, target, offset=8 * MIB - 4096, will_write=True).wait()  # of which only a part is read
    assert torch.equal(target, whole[2 * MIB - 1024 : 2 * MIB + 1024])
    assert torch.equal(read_back(file, 1, numel), whole)
    assert (read_back(file, 0, 1024) == 0).all()
    assert (read_back(file, 2, 1024) == 0).all()


def test_a_part_of_what_was_never_written(open_file: Open) -> None:
    file = open_file(ALIGNMENT * 3)
    file.write(0, torch.ones(1024), offset=ALIGNMENT).wait()
    assert read_back(file, 0, 3072).view(3, 1024).sum(1).tolist() == [0, 1024, 0]


def test_requests_for_one_region_keep_their_order(open_file: Open) -> None:
    numel = 6 * MIB // 4
    file = open_file(numel * 4)
    results = [torch.empty(numel) for _ in range(4)]
    for number, result in enumerate(results):
        file.write(0, torch.full((numel,), float(number)), order=-number)
        file.read(0, result, order=-number)
    file.synchronize()
    assert [result.unique().tolist() for result in results] == [[0.0], [1.0], [2.0], [3.0]]


@pytest.mark.full
def test_a_reader_who_will_write(open_file: Open) -> None:
    numel = 17 * MIB // 4 + 3
    file = open_file(numel * 4, numel * 4)
    values = [noise(numel, seed) for seed in range(2)]
    for step in range(4):
        for region, value in enumerate(values):
            buffer = torch.empty(numel)
            file.read(region, buffer, will_write=True).wait()
            assert torch.equal(buffer, value * step)
            file.write(region, value * (step + 1))
    assert torch.equal(read_back(file, 1, numel), values[1] * 4)
    assert torch.equal(read_back(file, 1, numel), values[1] * 4)  # and a reader who will not, twice


def test_who_will_write_may_do_so_in_parts(open_file: Open) -> None:
    file = open_file(8 * 4096)
    file.write(0, torch.full((8 * 1024,), 1.0)).wait()
    file.read(0, torch.empty(8 * 1024), will_write=True).wait()
    file.write(0, torch.full((3 * 1024,), 2.0)).wait()
    target = torch.empty(3 * 1024)
    file.read(0, target).wait()
    assert (target == 2).all()
    file.write(0, torch.full((5 * 1024,), 3.0), offset=3 * 4096).wait()
    target = torch.empty(8 * 1024)
    file.read(0, target).wait()
    assert torch.equal(target, torch.tensor([2.0] * 3 + [3.0] * 5).repeat_interleave(1024))


@pytest.mark.full
def test_signals_while_somebody_waits(open_file: Open) -> None:
    """Any handler, of Ctrl-C or of a DataLoader's children, may run in the middle of a wait."""
    code = """
import signal, sys, torch
from lightning_elixir.storage.nvme import open_offload_file
seen, done = [], 0
signal.signal(signal.SIGALRM, lambda *_: seen.append(1))
with open_offload_file(sys.argv[1], [64 * 2**20], backend=sys.argv[2]) as file:
    x = file.empty(64 * 2**20, torch.uint8).fill_(7)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    while len(seen) < 300 or done < 3:
        file.write(0, x).wait()
        file.read(0, x.zero_()).wait()
        assert (x == 7).all()
        done += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
print("done")
"""
    folder, backend = open_file(64).folder, open_file(64).backend
    assert run(code, str(folder), backend).strip() == "done"


@pytest.mark.parametrize("seed", telling(range(3), "1"))
def test_any_sequence_of_requests(open_file: Open, seed: int) -> None:
    """Against a dictionary; the file keeps its size, of which its last block tells."""
    dice = random.Random(seed)
    sizes = [dice.choice([4, 100, 4096, 5000, 70000, 3 * MIB, 9 * MIB + 4]) // 4 for _ in range(7)]
    file = open_file(*(size * 4 for size in sizes), queue_depth=dice.choice([1, 2, 5]), has_checksums=seed == 0)
    known = [torch.zeros(size) for size in sizes]
    for step in range(60):
        region = dice.randrange(len(sizes))
        if dice.random() < 0.5:
            known[region] = noise(sizes[region], seed=step)
            request = file.write(region, known[region])
        else:
            buffer = file.empty(sizes[region], torch.float32) if dice.random() < 0.5 else torch.empty(sizes[region])
            will_write = dice.random() < 0.5
            file.read(region, buffer, will_write=will_write).wait()
            assert torch.equal(buffer, known[region])
            if will_write:
                request = file.write(region, buffer)
        if dice.random() < 0.2:
            file.synchronize()
    request.wait()
    file.synchronize()
    for region, value in enumerate(known):
        assert torch.equal(read_back(file, region, len(value)), value)


def test_three_buffers_make_a_pipeline(open_file: Open) -> None:
    numel, count = MIB, 8
    file = open_file(*[numel * 4] * count)
    for region in range(count):
        file.write(region, torch.full((numel,), float(region)))
    buffers = [file.empty(numel, torch.float32) for _ in range(3)]
    for _ in range(2):
        reads = {0: file.read(0, buffers[0], will_write=True)}
        writes = {}
        for k in range(count):
            if k + 1 < count:
                if k >= 2:
                    writes[k - 2].wait()
                reads[k + 1] = file.read(k + 1, buffers[(k + 1) % 3], will_write=True)
            reads[k].wait()
            buffers[k % 3] += 100
            writes[k] = file.write(k, buffers[k % 3])
        file.synchronize()
    assert [read_back(file, k, numel).unique().tolist() for k in range(count)] == [[k + 200.0] for k in range(count)]


def test_a_task_may_wait_for_a_request(open_file: Open) -> None:
    numel = 2 * MIB
    file = open_file(numel * 4)
    file.write(0, noise(numel))
    target, worker, sums = torch.zeros(numel), Worker("update"), []
    worker.submit(lambda: sums.append(float(target.sum())), event=file.read(0, target)).wait()
    worker.close()
    assert sums == [float(noise(numel).sum())]


def test_a_request_is_over_when_it_says_so(open_file: Open) -> None:
    file = open_file(64 * MIB)
    target = file.empty(16 * MIB, torch.float32)
    file.write(0, target.fill_(2.0))
    request = file.read(0, target)
    target.zero_() if not request.is_over() else None
    while not request.is_over():
        time.sleep(0.001)
    assert request.error is None
    request.wait()
    request.synchronize()


def test_requests_from_several_threads(open_file: Open) -> None:
    numel = MIB // 4 + 1
    file = open_file(*[numel * 4] * 6)
    problems = []

    def use(region: int) -> None:
        for step in range(5):
            file.write(region, noise(numel, seed=10 * region + step))
            if not torch.equal(read_back(file, region, numel), noise(numel, seed=10 * region + step)):
                problems.append(region)

    threads = [threading.Thread(target=use, args=(region,)) for region in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_two_files_in_one_process(open_file: Open) -> None:
    first, second = open_file(MIB, rank=0), open_file(MIB, rank=1)
    first.write(0, torch.ones(MIB // 4))
    second.write(0, torch.full((MIB // 4,), 2.0))
    first.synchronize()
    first.close()
    assert (read_back(second, 0, MIB // 4) == 2).all()


def test_statistics_count_requests_and_bytes(open_file: Open) -> None:
    file = open_file(400)
    file.write(0, torch.ones(100))
    read_back(file, 0, 100)
    seen = file.stats()
    assert (seen.num_reads, seen.num_writes, seen.read_bytes, seen.written_bytes) == (1, 1, 400, 400)


def test_what_cannot_be_asked_for(open_file: Open) -> None:
    file = open_file(8 * ALIGNMENT, 100)
    fits = torch.zeros(1024)
    wrong = [
        (2, fits, 0, "regions 0 to 1"),
        (-1, fits, 0, "regions 0 to 1"),
        (1, fits, 0, "holds 100 bytes"),
        (0, fits, 8 * ALIGNMENT, "holds 32768 bytes"),
        (0, fits, 64, "not whole blocks"),
        (0, fits[:100], 0, "not whole blocks"),
        (0, fits[::2], 0, "contiguous"),
        (0, fits.view(2, 512), 0, "contiguous"),
        (0, torch.empty(1024, device="meta"), 0, "on the host"),
    ]
    for region, tensor, offset, text in wrong:
        for call in (file.read, file.write):
            with pytest.raises(StorageError, match=text):
                call(region, tensor, offset=offset)
    assert file.stats().num_reads == file.stats().num_writes == 0
    with pytest.raises(PlanError, match="choose one of direct, tensornvme"):
        open_file(100, backend="floppy")


def test_parameters_can_be_written(open_file: Open) -> None:
    file = open_file(400)
    parameter = torch.nn.Parameter(torch.ones(100))
    file.write(0, parameter).wait()
    file.read(0, parameter).wait()
    assert (parameter == 1).all()


# ------------------------------------------------------------------------------------------------ its end


def test_close_with_requests_under_way(open_file: Open) -> None:
    file = open_file(*[8 * MIB] * 12)
    tensor = torch.ones(2 * MIB)
    requests = [file.write(region, tensor) for region in range(12)]
    before = threading.active_count()
    file.close()
    file.close()
    assert threading.active_count() < before
    failures = []
    for request in requests:
        assert request.is_over()
        try:
            request.wait()
        except StorageError as error:
            failures.append(str(error))
    assert all("did not take place" in text for text in failures)
    for call in (lambda: file.read(0, tensor), file.synchronize):
        with pytest.raises(StateError, match="is closed"):
            call()


def test_descriptors_and_threads_go_with_the_file(open_file: Open, tmp_path: Path, backend: str) -> None:
    open_file(MIB).close()  # what is loaded once
    before = len(os.listdir("/proc/self/fd"))
    with open_file(MIB) as file:
        file.write(0, torch.ones(MIB // 4))
    assert len(os.listdir("/proc/self/fd")) == before
    file = open_offload_file(tmp_path / "disk", [MIB], backend=backend)
    request = file.write(0, torch.ones(MIB // 4))
    del file  # forgotten, not closed
    request.wait()
    deadline = time.monotonic() + 10
    while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < deadline:
        del request
        gc.collect()
        time.sleep(0.02)
        request = None
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.full
def test_a_fork_may_not_use_it_and_does_no_harm(open_file: Open) -> None:
    code = """
import os, sys, torch
from lightning_elixir.errors import StateError
from lightning_elixir.storage.nvme import open_offload_file
folder, backend = sys.argv[1:]
file = open_offload_file(folder, [2**20], backend=backend)
file.write(0, torch.ones(2**18)).wait()
child = os.fork()
if child == 0:
    code = 0
    for call in (lambda: file.read(0, torch.empty(2**18)), file.synchronize):
        try:
            call()
            code = 1
        except StateError as error:
            assert "forked" in str(error)
    file.close()
    held = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    if backend == "direct" and any("elixir-offload" in name for name in held):
        code = 2
    sys.exit(code)  # an ordinary end, with all that belongs to one
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
target = torch.empty(2**18)
file.read(0, target).wait()
print(bool((target == 1).all()))
"""
    folder, backend = open_file(64).folder, open_file(64).backend
    assert run(code, str(folder), backend).split() == ["0", "True"]


@pytest.mark.full
@pytest.mark.parametrize("ending", ["sys.exit(0)", "pass", "raise KeyboardInterrupt", "gc.disable(); del file"])
def test_an_end_with_requests_under_way(open_file: Open, ending: str) -> None:
    code = f"""
import gc, sys, torch
from lightning_elixir.storage.nvme import open_offload_file
file = open_offload_file(sys.argv[1], [8 * 2**20] * 10, backend=sys.argv[2])
for region in range(10):
    file.write(region, torch.ones(2**21))
{ending}
"""
    folder, backend = open_file(64).folder, open_file(64).backend
    printed = run(code, str(folder), backend, codes=(0, 1, -2, 130))
    assert printed == ""
    assert list(folder.iterdir()) == []


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_process_leaves_nothing(open_file: Open, number: signal.Signals) -> None:
    code = """
import sys, time, torch
from lightning_elixir.storage.nvme import open_offload_file
file = open_offload_file(sys.argv[1], [8 * 2**20] * 4, backend=sys.argv[2])
for region in range(4):
    file.write(region, torch.ones(2**21))
print("ready", flush=True)
time.sleep(60)
"""
    folder, backend = open_file(64).folder, open_file(64).backend
    process = start(code, str(folder), backend)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert list(folder.iterdir()) == []  # nor is there anything while it lives
    process.send_signal(number)
    assert process.wait(30) == -number
    process.stdout.close()
    assert list(folder.iterdir()) == []


def run(code: str, *arguments: str, codes: tuple[int, ...] = (0,)) -> str:
    """What it prints."""
    process = start(code, *arguments)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode in codes
    return printed

"""States on a disk: buffers, their order, and what happens when the disk fails."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_elixir.errors import StateError, StorageError
from lightning_elixir.plan import memory
from lightning_elixir.plan.memory import NVME_BUFFERS
from lightning_elixir.storage.nvme import (
    DiskOptions,
    StateFile,
    StateSpec,
    StateTraffic,
    Visit,
    direct,
    open_state_file,
)

NUMEL = 3 * 512  # parts that end within a block
SPEC = StateSpec(NUMEL, torch.float32, has_master=True)

Make = Callable[..., StateFile]


@pytest.fixture
def make_file(tmp_path: Path, backend: str) -> Iterator[Make]:
    made = []

    def make(num_chunks: int = 6, spec: StateSpec = SPEC, traffic: StateTraffic | None = None) -> StateFile:
        options = DiskOptions(str(tmp_path / "disk"), backend)
        made.append(open_state_file(dict.fromkeys(range(num_chunks), spec), options, 0, traffic or StateTraffic()))
        return made[-1]

    yield make
    for file in made:
        file.close()


def begin(
    file: StateFile,
    chunk_id: int,
    read: Collection[str],
    order: float = 0.0,
    has_landed: Callable[[], bool] = lambda: True,
) -> Visit:
    """A visit of a whole chunk."""
    (piece,) = file.pieces(chunk_id)
    return file.begin(chunk_id, piece, read, order, has_landed=has_landed)


def values(chunk_id: int, part: str, spec: StateSpec = SPEC) -> torch.Tensor:
    generator = torch.Generator().manual_seed(chunk_id * 10 + spec.parts.index(part))
    return torch.randn(spec.numel, generator=generator).to(spec.dtype)


@pytest.mark.parametrize("spec", [SPEC, StateSpec(NUMEL, torch.bfloat16, has_master=False)], ids=["fp32", "bf16"])
def test_parts_are_read_as_they_were_written(make_file: Make, spec: StateSpec) -> None:
    traffic = StateTraffic()
    file = make_file(spec=spec, traffic=traffic)
    for chunk_id in range(6):
        states = file.of(chunk_id)
        assert states is not None
        assert not states.read("exp_avg").any()  # zeros at first
        for part in spec.parts:
            states.write(part, values(chunk_id, part, spec))
    for chunk_id in reversed(range(6)):
        for part in spec.parts:
            assert torch.equal(file.read(chunk_id, part), values(chunk_id, part, spec))
    assert traffic.written_bytes == 6 * len(spec.parts) * spec.bytes_of("exp_avg")
    assert file.of(6) is None
    assert file.bytes_on_disk(spec.parts) == traffic.written_bytes
    assert file.buffer_bytes_held() == 0


def test_visits_change_what_is_there(make_file: Make) -> None:
    file = make_file()
    for chunk_id in range(6):
        for part in SPEC.parts:
            file.write(chunk_id, part, values(chunk_id, part))
    for _ in range(2):
        visits = [begin(file, chunk_id, SPEC.parts, order=chunk_id) for chunk_id in range(6)]
        for visit in visits:
            visit.wait()
            for tensor in visit.tensors.values():
                tensor.mul_(2)
            visit.end()
    file.synchronize()
    for chunk_id in range(6):
        for part in SPEC.parts:
            assert torch.equal(file.read(chunk_id, part), values(chunk_id, part) * 4)
    assert file.buffer_bytes_held() == NVME_BUFFERS * 3 * 8192


@pytest.mark.parametrize(
    ("param_dtype", "grad_dtype"), [(None, None), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_large_chunks_are_visited_in_pieces(
    make_file: Make,
    monkeypatch: pytest.MonkeyPatch,
    param_dtype: torch.dtype | None,
    grad_dtype: torch.dtype | None,
) -> None:
    """Whatever the order, every piece has its own elements of every part, and of gradients in either dtype."""
    spec = StateSpec(9 * 2048 + 512, torch.float32, has_master=True, param_dtype=param_dtype)
    monkeypatch.setattr(memory, "NVME_BUFFER_BYTES", 2 * spec.buffer_bytes(2048))
    file = make_file(2, spec=spec)
    pieces = file.pieces(0)
    assert [p.start for p in pieces] == list(range(0, spec.numel, 4096))
    assert pieces[-1].stop == spec.numel
    grad = torch.randn(spec.numel, dtype=grad_dtype)
    for chunk_id in range(2):
        for part in spec.written:
            file.of(chunk_id).write(part, values(chunk_id, part, spec).to(spec.dtype_of(part)))
        if grad_dtype is not None:
            file.of(chunk_id).write_grad(grad)
    read, itemsize = [*spec.written], 0 if grad_dtype is None else grad_dtype.itemsize
    for _ in range(2):
        visits = [file.begin(i, piece, read, -n, itemsize) for i in range(2) for n, piece in enumerate(pieces)]
        for visit in [*visits[:NVME_BUFFERS], *sorted(visits[NVME_BUFFERS:], key=lambda v: v._order)]:
            visit.wait()
            for part in spec.written:
                visit.tensors[part].mul_(2)
            if grad_dtype is not None:
                found = visit.tensors["grad"].view(grad_dtype)[: visit.piece.numel]
                assert torch.equal(found, grad[visit.piece.start : visit.piece.stop])
            visit.end()
    file.synchronize()
    for chunk_id in range(2):
        for part in spec.written:
            wanted = values(chunk_id, part, spec).to(spec.dtype_of(part)) * 4
            assert torch.equal(file.read(chunk_id, part), wanted)
    assert file.buffer_bytes_held() <= NVME_BUFFERS * memory.NVME_BUFFER_BYTES


def test_buffers_that_nobody_has_can_go(make_file: Make) -> None:
    file = make_file()
    visits = [begin(file, chunk_id, ()) for chunk_id in range(NVME_BUFFERS)]
    for visit in visits:
        visit.wait()
    visits[0].end()
    file.synchronize()
    file.release_buffers()
    assert file.buffer_bytes_held() == (NVME_BUFFERS - 1) * 3 * 8192
    for visit in visits[1:]:
        visit.drop()
    file.release_buffers()
    assert file.buffer_bytes_held() == 0
    again = begin(file, 0, SPEC.parts)
    again.wait()
    again.end()
    file.synchronize()
    assert file.buffer_bytes_held() == 3 * 8192


def test_the_order_decides_where_buffers_are_short(make_file: Make) -> None:
    file, come = make_file(8), []
    first = [begin(file, i, ()) for i in range(NVME_BUFFERS)]
    others = [begin(file, i, (), order=10 - i) for i in range(NVME_BUFFERS, 8)]
    for visit in others:
        visit.then(lambda visit=visit: come.append(visit.chunk_id))
    assert come == []
    for visit in [*first, *reversed(others)]:
        visit.wait()
        visit.end()
        file.synchronize()
    assert come == [7, 6, 5, 4, 3]


def test_buffers_go_to_visits_whose_gradients_have_landed_or_come_next(make_file: Make) -> None:
    file, come, landed = make_file(8), [], set[int]()
    first = [begin(file, i, ()) for i in range(NVME_BUFFERS)]
    for i in range(NVME_BUFFERS, 8):
        visit = begin(file, i, (), order=10 - i, has_landed=lambda i=i: i in landed)
        visit.then(partial(come.append, visit))
    for lands in (set(), {5, 6}, set(), set(), {4}):
        landed |= lands
        visit = first.pop(0) if first else come[-1]
        visit.end()
        file.synchronize()
    assert [visit.chunk_id for visit in come] == [3, 6, 5, 4, 7]


def test_what_is_waited_for_comes_first(make_file: Make) -> None:
    file = make_file(6)
    first = [begin(file, i, ()) for i in range(NVME_BUFFERS)]
    second, third = begin(file, 3, (), order=1.0), begin(file, 4, (), order=2.0)
    waiter = threading.Thread(target=third.wait)
    waiter.start()
    while third._order > 0:
        time.sleep(0.001)
    first[0].end()
    waiter.join()
    assert not second.is_over()
    third.end()
    second.wait()


def test_a_dropped_visit_writes_nothing_and_gives_its_buffer_back(make_file: Make, backend: str) -> None:
    if backend == "tensornvme":
        pytest.skip("what that has read for an update is not there any more until it is written")
    file = make_file(6)
    file.write(0, "master", values(0, "master"))
    for _ in range(3):
        visits = [begin(file, i, SPEC.parts) for i in range(5)]  # some of them wait, read, have come
        for visit in reversed(visits):
            visit.drop()
            visit.drop()
    visit = begin(file, 0, SPEC.parts)
    visit.wait()
    assert torch.equal(visit.tensors["master"], values(0, "master"))
    visit.end()
    visit.drop()
    file.synchronize()
    assert (file._num_ready, file._num_reading, len(file._free)) == (0, 0, file._num_made)


def failing(*args: object) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_after_a_failure_nobody_waits(
    make_file: Make, backend: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend != "direct":
        pytest.skip("the package's own calls cannot be made to fail from here")
    file = make_file(8)
    visits = [begin(file, i, SPEC.parts) for i in range(8)]
    for visit in visits[:NVME_BUFFERS]:
        visit.wait()
    with monkeypatch.context() as patch:
        patch.setattr(direct.os, call, failing)
        for visit in visits[:NVME_BUFFERS]:
            with suppress(StorageError):  # an earlier write may have failed by now
                visit.end()
        for visit in visits[NVME_BUFFERS:]:
            with pytest.raises(StorageError, match="Input/output error"):
                visit.wait()
    for use in (file.check, file.synchronize, lambda: file.read(0, "master"), begin(file, 0, ()).wait):
        with pytest.raises(StorageError, match="Input/output error"):
            use()
    with pytest.raises(StorageError):
        file.write(0, "master", values(0, "master"))


def test_closing_ends_all_waiting(make_file: Make) -> None:
    file = make_file(8)
    visits = [begin(file, i, ()) for i in range(8)]
    waiter = threading.Thread(target=lambda: pytest.raises(StateError, visits[-1].wait))
    waiter.start()
    file.close()
    waiter.join(10)
    assert not waiter.is_alive()
    with pytest.raises(StateError, match="closed"):
        file.read(0, "master")
    assert all(visit.is_over() for visit in visits)


def test_waiting_is_the_time_in_which_nothing_can_go_on(
    make_file: Make, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend != "direct":
        pytest.skip("the package's own calls cannot be slowed down from here")
    traffic = StateTraffic()
    file = make_file(2, traffic=traffic)
    read = os.preadv

    def slow(*args: object) -> int:
        time.sleep(0.05)
        return read(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(direct.os, "preadv", slow)
    first = begin(file, 0, ("master",))
    first.wait()
    waited_s = traffic.waited_s
    assert waited_s >= 0.05
    second = begin(file, 1, ("master",))
    second.wait()  # beside the first, which could go on
    assert traffic.waited_s == waited_s
    first.end()
    second.end()

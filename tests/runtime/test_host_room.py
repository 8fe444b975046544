"""The host runs short of memory while the engine takes it: an error on all ranks, with figures that are true."""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_elixir import ElixirModule, ElixirOptimizer, HybridAdam
from lightning_elixir.core import host_memory
from lightning_elixir.core.device import CpuDevice
from lightning_elixir.core.host_memory import Extent, HostMemory
from lightning_elixir.errors import CapacityError
from lightning_elixir.optim import execution
from lightning_elixir.plan.types import Plan
from lightning_elixir.planning import ChunkSizes, PlacementRequest, TrainingRegime, make_plan
from lightning_elixir.runtime import build, host_room
from lightning_elixir.runtime.sources import set_source
from tests.helpers.dist import run_ranks
from tests.helpers.tiers import telling

WIDTH = 64
MIB = 2**20


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(8)])


def make_host_plan(policy: str, world_size: int) -> Plan:
    return make_plan(
        make_model(),
        PlacementRequest(policy=policy),
        chunk_sizes=ChunkSizes(WIDTH * WIDTH * 2 + 2048),
        regime=TrainingRegime(can_stream=True),
        world_size=world_size,
        compute_dtype=torch.bfloat16,
    )


class Host:
    """A host whose memory shrinks by what the engine takes; looked at after each chunk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, looks_until_short: int) -> None:
        self.looks = 0
        self._looks_until_short = looks_until_short
        monkeypatch.setattr(host_room, "_BETWEEN_LOOKS", 1)
        monkeypatch.setattr(host_room, "_ELEMENTS_PER_FREE_BYTE", 0)
        monkeypatch.setattr(build, "CHUNKS_AHEAD", 0)
        monkeypatch.setattr(host_room, "available_host_bytes", self._available)

    def _available(self) -> int:
        self.looks += 1
        return 8 * 1024 * MIB if self.looks <= self._looks_until_short else 1000


def _run(where: str, world_size: int) -> Any:
    """Come to `where` on a host that then has no memory left; what was raised, and after how many looks."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        host = Host(monkeypatch, 3 if where == "build" else 10**9)
        plan = make_host_plan("cuda" if where == "move" else "cpu", world_size)
        try:
            engine = ElixirModule(make_model(), plan, dtype=torch.bfloat16, device=torch.device("cpu"))
            optimizer = ElixirOptimizer(engine, HybridAdam(engine.parameters()))
            host.looks, host._looks_until_short = 0, 3
            if where == "move":
                engine.replan(make_host_plan("cpu", world_size))
            else:
                optimizer.reserve()
        except CapacityError as error:
            return str(error), host.looks, error.resource, error.lacking_bytes
        return None


@pytest.mark.parametrize("where", ["build", "move", "reserve"])
@pytest.mark.parametrize("world_size", telling([1, 2], "2"))
def test_an_error_on_all_ranks_before_the_memory_is_gone(where: str, world_size: int) -> None:
    found = run_ranks(_run, world_size, where, world_size)
    assert len(set(found)) == 1 or where == "move"
    for message, looks, resource, lacking in found:
        assert looks == 5  # once more without what is there ahead
        assert resource == "host"
        assert lacking > 0
        assert "1000 B are left" in message
        assert "were planned" in message
        assert f"its {world_size} rank" in message
        assert "cpu_memory_limit" not in message  # the host has nothing


def test_what_is_reserved_is_what_steps_keep() -> None:
    plan = make_host_plan("cpu", 1)
    engine = ElixirModule(make_model(), plan, dtype=torch.bfloat16, device=torch.device("cpu"))
    optimizer = ElixirOptimizer(engine, HybridAdam(engine.parameters()))
    optimizer.reserve()
    reserved = engine.engine.host_bytes()
    assert reserved == plan.notes["host_bytes"]
    for _ in range(2):
        optimizer.backward(engine(torch.ones(2, WIDTH, dtype=torch.bfloat16)).float().sum())
        optimizer.step()
    engine.engine.synchronize()
    assert engine.engine.host_bytes() == reserved


AHEAD = 4 * MIB  # what both have made ahead


class _Comm:
    """Two ranks of one host."""

    def __init__(self, free: int, wanted: int, held: int) -> None:
        self._row = [free - AHEAD, wanted, held, AHEAD // 2]

    def exchange(self, row: Any) -> list[list[int]]:
        return [self._row, self._row]

    def exchange_objects(self, name: str) -> list[str]:
        return [name, name]


@pytest.mark.parametrize(
    ("free", "wanted", "held", "fits"),
    [
        (2 * 1024, 500, 10_000, True),
        (2 * 1011, 500, 10_000, False),
        (10, 0, 0, True),  # nothing of the plan is there, so nothing is wanted
        (2 * 20, 10, 0, True),  # no more than the plan has there
        (2 * 19, 10, 0, False),
    ],
)
def test_each_rank_wants_to_find_what_it_takes_and_some_more(free: int, wanted: int, held: int, fits: bool) -> None:
    room: Any = host_room.HostRoom(
        _Comm(free * MIB, wanted * MIB, held * MIB),  # type: ignore[arg-type]
        HostMemory(CpuDevice(), 2),
    )
    plan = make_host_plan("cpu", 1)
    if fits:
        room.look(plan, lambda: 0)
        return
    with pytest.raises(CapacityError, match="runs short of memory") as raised:
        room.look(plan, lambda: 0)
    fitting = 2 * held + free - 4 * 512
    assert ("cpu_memory_limit" in str(raised.value)) == (fitting > 0)


@pytest.mark.parametrize(("free_gib", "looks"), [(0, 16), (16, 16), (64, 4), (1024, 1)])
def test_looks_come_more_often_where_less_is_free(monkeypatch: pytest.MonkeyPatch, free_gib: int, looks: int) -> None:
    """A look takes the time of a message between all ranks."""
    counted: list[int] = []
    monkeypatch.setattr(host_room, "_BETWEEN_LOOKS", 32 * MIB)
    comm: Any = _Comm(free_gib * 1024 * MIB, 0, 0)
    exchange = comm.exchange
    monkeypatch.setattr(comm, "exchange", lambda values: counted.append(1) or exchange(values), raising=False)
    room = host_room.HostRoom(comm, HostMemory(CpuDevice(), 2))
    plan = make_host_plan("cpu", 1)
    chunk = replace(plan.chunks[0], numel=32 * MIB)
    for _ in range(16):
        room.take(chunk, 0, plan, lambda: 0)
    assert len(counted) == looks


def test_memory_is_looked_for_anew_where_more_is_going_to_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Much was free at the last look, hours ago."""
    comm: Any = _Comm(2**20 * MIB, 0, 0)
    room, plan = host_room.HostRoom(comm, HostMemory(CpuDevice(), 2)), make_host_plan("cpu", 1)
    room.look(plan, lambda: 0)
    comm._row[:] = [0, MIB, MIB, 0]
    chunk = replace(plan.chunks[0], numel=host_room._BETWEEN_LOOKS)
    room.take(chunk, MIB, plan, lambda: MIB)
    room.begin()
    with pytest.raises(CapacityError, match="runs short of memory"):
        room.take(chunk, MIB, plan, lambda: MIB)


def test_moves_and_reservations_begin_with_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    engine = ElixirModule(make_model(), make_host_plan("cuda", 1), dtype=torch.bfloat16, device=torch.device("cpu"))
    optimizer = ElixirOptimizer(engine, HybridAdam(engine.parameters()))
    monkeypatch.setattr(host_room.HostRoom, "begin", lambda room: begun.append(1))
    engine.replan(make_host_plan("cpu", 1))
    assert len(begun) == 1
    optimizer.reserve()
    assert len(begun) == 2


def test_what_is_being_made_is_no_shortage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such memory is neither free nor there: nobody is refused what is going to be taken anyway."""
    engine = ElixirModule(make_model(), make_host_plan("cpu", 1), dtype=torch.bfloat16, device=torch.device("cpu"))
    optimizer = ElixirOptimizer(engine, HybridAdam(engine.parameters()))
    memory, has_begun = engine.engine.host_memory, threading.Event()
    zeros, is_dropped = CpuDevice.host_zeros, threading.Event()

    def slow(device: CpuDevice, numel: int, dtype: torch.dtype, *, is_locked: bool = True) -> Tensor:
        if "elixir-memory" in threading.current_thread().name:
            has_begun.set()
            assert is_dropped.wait(20)
        return zeros(device, numel, dtype)

    def drop() -> None:
        is_dropped.set()
        HostMemory.drop(memory)

    monkeypatch.setattr(CpuDevice, "host_zeros", slow)
    monkeypatch.setattr(memory, "drop", drop)
    monkeypatch.setattr(host_room, "_BETWEEN_LOOKS", 1)
    monkeypatch.setattr(host_room, "_ELEMENTS_PER_FREE_BYTE", 0)
    monkeypatch.setattr(host_room, "available_host_bytes", lambda: 8 * 1024 * MIB if is_dropped.is_set() else 1000)
    memory.expect(optimizer.to_come())
    assert has_begun.wait(20)
    optimizer.reserve()


def test_what_is_prepared_is_what_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there when it is asked for; in all no more is taken, and no thread is left."""
    taken: list[list[tuple[int, torch.dtype]]] = []
    zeros = CpuDevice.host_zeros

    def noted(device: CpuDevice, numel: int, dtype: torch.dtype, *, is_locked: bool = True) -> Tensor:
        taken[-1].append((numel, dtype))
        return zeros(device, numel, dtype)

    monkeypatch.setattr(CpuDevice, "host_zeros", noted)
    for is_prepared in (False, True):
        taken.append([])
        engine = ElixirModule(make_model(), make_host_plan("cpu", 1), dtype=torch.bfloat16, device=torch.device("cpu"))
        optimizer = ElixirOptimizer(engine, HybridAdam(engine.parameters()))
        before = engine.engine.host_bytes()
        memory = engine.engine.host_memory
        if is_prepared:
            memory.expect(optimizer.to_come())
            memory._worker.wait()
            assert memory.bytes_ahead() > 0
            num_taken = len(taken[-1])
            assert engine.engine.host_bytes() == before + memory.bytes_ahead()
        optimizer.reserve()
        assert memory.bytes_ahead() == 0
        assert not any("elixir-memory" in thread.name for thread in threading.enumerate())
        if is_prepared:
            assert len(taken[-1]) == num_taken
    assert sorted(map(str, taken[0])) == sorted(map(str, taken[1]))


def test_for_a_plan_that_may_change_states_come_first_and_are_not_locked() -> None:
    plan = make_host_plan("cpu", 1)
    plan = replace(plan, chunks=tuple(replace(chunk, is_update_streamed=True) for chunk in plan.chunks))
    engine = ElixirModule(make_model(), plan, dtype=torch.bfloat16, device=torch.device("cpu"))
    optimizer = ElixirOptimizer(engine, HybridAdam(engine.parameters()))
    final, early = optimizer.to_come(), optimizer.to_come(most_bytes=2**40)
    assert all(extent.is_locked for extent in final)
    num_states = sum(extent.dtype is torch.float32 for extent in final)
    assert 0 < num_states < len(final)
    assert [extent.is_locked for extent in early] == [False] * num_states + [True] * (len(final) - num_states)
    assert sorted(str(extent.size) for extent in early) == sorted(str(extent.size) for extent in final)


def test_no_more_is_prepared_than_is_asked_for() -> None:
    """A plan that comes may have less on the host: what was made for it then came on top."""
    engine = ElixirModule(make_model(), make_host_plan("cpu", 1), dtype=torch.bfloat16, device=torch.device("cpu"))
    optimizer = ElixirOptimizer(engine, HybridAdam(engine.parameters()))
    memory = engine.engine.host_memory
    memory.expect(optimizer.to_come())
    memory._worker.wait()
    in_all = memory.bytes_ahead()
    memory.drop()
    memory.expect(optimizer.to_come(most_bytes=in_all // 2))
    memory._worker.wait()
    assert in_all / 4 < memory.bytes_ahead() <= in_all / 2
    memory.drop()
    engine.close()


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "elixir-memory" in thread.name]


@pytest.mark.parametrize("make_optimizer", [HybridAdam, torch.optim.SGD])
def test_the_first_step_gives_back_what_it_does_not_need(make_optimizer: Any) -> None:
    engine = ElixirModule(make_model(), make_host_plan("cpu", 1), dtype=torch.bfloat16, device=torch.device("cpu"))
    optimizer = ElixirOptimizer(engine, make_optimizer(engine.parameters(), lr=0.1))
    assert _threads() == []
    engine.engine.host_memory.expect([*optimizer.to_come(), Extent(7, torch.float32)])  # that of an earlier plan
    engine.engine.host_memory._worker.wait()
    assert _threads()
    optimizer.backward(sum(p.float().sum() for p in engine.parameters()))
    optimizer.step()
    assert engine.engine.host_memory.bytes_ahead() == 0
    assert _threads() == []


def test_a_build_that_fails_gives_back_what_was_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("no values")

    made: list[HostMemory] = []
    drop = HostMemory.drop
    monkeypatch.setattr(HostMemory, "drop", lambda memory: (made.append(memory), drop(memory)))
    monkeypatch.setattr(build.Builder, "_build_chunk", fails)
    with pytest.raises(ValueError, match="no values"):
        ElixirModule(make_model(), make_host_plan("cpu", 1), dtype=torch.bfloat16, device=torch.device("cpu"))
    assert made[0].bytes_ahead() == 0
    assert _threads() == []


def test_small_models_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def never() -> int:
        raise AssertionError("looked")

    monkeypatch.setattr(host_room, "available_host_bytes", never)
    plan = make_host_plan("cpu", 1)
    engine = ElixirModule(make_model(), plan, dtype=torch.bfloat16, device=torch.device("cpu"))
    ElixirOptimizer(engine, HybridAdam(engine.parameters())).reserve()


def _resumed(rank: int) -> int:
    """With states there already, nothing more is wanted."""
    plan = make_host_plan("cpu", 1)
    engine = ElixirModule(make_model(), plan, dtype=torch.bfloat16, device=torch.device("cpu"))
    optimizer = ElixirOptimizer(engine, HybridAdam(engine.parameters()))
    optimizer.backward(engine(torch.ones(2, WIDTH, dtype=torch.bfloat16)).float().sum())
    optimizer.step()
    wanted: list[int] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(host_room.HostRoom, "take", lambda room, spec, nbytes, *rest: wanted.append(nbytes))
        optimizer.reserve()
    return sum(wanted)


def test_what_is_there_is_not_wanted_again() -> None:
    assert _resumed(0) == 0


@pytest.mark.parametrize("worth_bytes", [1, 10**12], ids=["by_a_thread", "by_the_way"])
def test_what_the_users_parameters_had_is_free_when_the_engine_is_there(
    worth_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_WORTH_A_THREAD_BYTES", worth_bytes)
    model, expected, freed_by = make_model(), make_model().state_dict(), []
    for parameter in model.parameters():
        array = parameter.detach().numpy().copy()
        parameter.data = torch.from_numpy(array)
        weakref.finalize(array, lambda: freed_by.append(threading.current_thread().name))
        del array
    engine = ElixirModule(model, make_host_plan("cpu", 1), dtype=torch.bfloat16, device=torch.device("cpu"))
    here = threading.current_thread().name
    assert freed_by == ["elixir-free-0" if worth_bytes == 1 else here] * len(expected)
    assert not any("elixir-free" in thread.name for thread in threading.enumerate())
    values = engine.full_state_dict()
    assert all(torch.equal(values[name], value) for name, value in expected.items())


def test_memory_that_something_else_uses_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_WORTH_A_THREAD_BYTES", 1)
    model, expected = make_model(), make_model()
    kept = [parameter.data for parameter in model.parameters()]
    ElixirModule(model, make_host_plan("cpu", 1), dtype=torch.bfloat16, device=torch.device("cpu"))
    for own, theirs in zip(kept, expected.parameters(), strict=True):
        assert torch.equal(own, theirs)


def test_what_updates_run_is_loaded_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(execution.cpu, "prepare", lambda: loaded.append(threading.current_thread().name))
    engine = ElixirModule(make_model(), make_host_plan("cpu", 1), dtype=torch.bfloat16, device=torch.device("cpu"))
    optimizer = ElixirOptimizer(engine, HybridAdam(engine.parameters()))
    optimizer.load_kernels()
    optimizer.rest()
    assert [name.startswith("elixir-update") for name in loaded] == [True]
    other = ElixirModule(make_model(), make_host_plan("cpu", 1), dtype=torch.bfloat16, device=torch.device("cpu"))
    ElixirOptimizer(other, torch.optim.SGD(other.parameters(), lr=0.1)).load_kernels()
    assert len(loaded) == 1


class Halves:
    """Where the values of a parameter without any come from."""

    def read_run(self, stride: Any, begin: int, target: Tensor, dtype: torch.dtype) -> None:
        target.fill_(0.5)

    def part(self, shape: Any, offsets: Any) -> Halves:
        return self


def test_parameters_without_values_have_nothing_to_free(monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[list[Tensor]] = []
    monkeypatch.setattr(build, "_WORTH_A_THREAD_BYTES", 1)
    monkeypatch.setattr(host_memory, "_empty", freed.append)
    with torch.device("meta"):
        model = make_model()
    for parameter in model.parameters():
        set_source(parameter, Halves())
    engine = ElixirModule(model, make_host_plan("cpu", 1), dtype=torch.bfloat16, device=torch.device("cpu"))
    assert all(bool((value == 0.5).all()) for value in engine.full_state_dict().values())
    assert not freed


def _build_from_the_first_rank() -> Any:
    freed: list[list[Tensor]] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(build, "_WORTH_A_THREAD_BYTES", 1)
        monkeypatch.setattr(host_memory, "_empty", freed.append)
        with torch.device("meta" if torch.distributed.get_rank() else "cpu"):
            model = make_model()
        engine = ElixirModule(model, make_host_plan("cpu", 2), dtype=torch.bfloat16, device=torch.device("cpu"))
        found = engine.full_state_dict()
        engine.close()
        return found, bool(freed)


def test_nor_have_those_of_ranks_that_get_the_firsts() -> None:
    (found, is_freed), (_, is_freed_elsewhere) = run_ranks(_build_from_the_first_rank, 2)
    assert is_freed
    assert not is_freed_elsewhere
    expected = make_model().state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_memory_that_is_being_freed_is_waited_for_before_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host has enough only when what the user's parameters took is back."""
    is_freed, free = threading.Event(), host_memory._empty

    def slowly(tensors: list[Tensor]) -> None:
        free(tensors)
        time.sleep(0.05)
        is_freed.set()

    def available() -> int:
        return 8 * 1024 * MIB if is_freed.is_set() else 1000

    monkeypatch.setattr(build, "_WORTH_A_THREAD_BYTES", 1)
    monkeypatch.setattr(build, "CHUNKS_AHEAD", 0)
    monkeypatch.setattr(host_memory, "_empty", slowly)
    monkeypatch.setattr(host_room, "_BETWEEN_LOOKS", 2 * WIDTH * WIDTH)  # after the first chunks
    monkeypatch.setattr(host_room, "_ELEMENTS_PER_FREE_BYTE", 0)
    monkeypatch.setattr(host_room, "available_host_bytes", available)
    ElixirModule(make_model(), make_host_plan("cpu", 1), dtype=torch.bfloat16, device=torch.device("cpu"))
    assert is_freed.is_set()

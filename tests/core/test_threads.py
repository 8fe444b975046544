"""Threads and processors of a rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_elixir.core import threads
from lightning_elixir.core.threads import (
    ThreadPlan,
    default_num_threads,
    default_num_update_threads,
    frequent_switches,
    numa_nodes,
    plan_threads,
)
from lightning_elixir.errors import PlanError
from tests.helpers import processes


def host(num_nodes: int, cores_per_node: int, siblings: int = 1) -> list[list[frozenset[int]]]:
    """As Linux counts them: first one processor of every core, then the siblings."""
    num_cores = num_nodes * cores_per_node
    cores = [frozenset(range(core, siblings * num_cores, num_cores)) for core in range(num_cores)]
    return [cores[node * cores_per_node : (node + 1) * cores_per_node] for node in range(num_nodes)]


def everything(nodes: list[list[frozenset[int]]]) -> frozenset[int]:
    return frozenset().union(*(core for node in nodes for core in node))


@pytest.mark.parametrize(
    ("num_cores", "num_update_threads"), [(1, 1), (2, 2), (3, 3), (4, 3), (6, 5), (8, 6), (16, 14), (96, 94)]
)
def test_one_rank_has_the_machine(num_cores: int, num_update_threads: int) -> None:
    nodes = host(1, num_cores)
    assert plan_threads(everything(nodes), 0, 1, nodes) == ThreadPlan(everything(nodes), num_cores, num_update_threads)


def test_a_thread_a_core_not_a_sibling() -> None:
    nodes = host(2, 8, siblings=2)
    assert plan_threads(everything(nodes), 0, 1, nodes).num_threads == 16
    assert plan_threads(everything(nodes), 0, 1, nodes, reserved=1).num_update_threads == 15


def test_ranks_lie_within_nodes_and_share_nothing() -> None:
    nodes = host(2, 8, siblings=2)
    plans = [plan_threads(everything(nodes), rank, 4, nodes) for rank in range(4)]
    assert [plan.num_threads for plan in plans] == [4] * 4
    assert [len(plan.cpus) for plan in plans] == [8] * 4
    assert plans[0].cpus | plans[1].cpus == frozenset().union(*nodes[0])
    assert plans[2].cpus | plans[3].cpus == frozenset().union(*nodes[1])
    assert frozenset().union(*(plan.cpus for plan in plans)) == everything(nodes)
    assert plans[1].cpus == {4, 5, 6, 7, 20, 21, 22, 23}


def test_uneven_shares_leave_no_core_out() -> None:
    nodes = host(1, 7)
    plans = [plan_threads(everything(nodes), rank, 3, nodes) for rank in range(3)]
    assert sorted(cpu for plan in plans for cpu in plan.cpus) == list(range(7))


def test_more_ranks_than_cores() -> None:
    nodes = host(1, 2)
    plans = [plan_threads(everything(nodes), rank, 5, nodes) for rank in range(5)]
    assert all(plan.num_threads == plan.num_update_threads == 1 and plan.cpus for plan in plans)


def test_mask_of_one_rank_stays_and_is_its_own() -> None:
    nodes = host(1, 16)
    assert plan_threads({4, 5, 6, 7}, 1, 4, nodes) == ThreadPlan(frozenset({4, 5, 6, 7}), 4, 3)


def test_mask_of_all_ranks_stays_and_is_shared() -> None:
    nodes = host(1, 16)
    assert plan_threads(set(range(8)), 1, 4, nodes) == ThreadPlan(frozenset(range(8)), 2, 2)


def test_processors_that_the_host_does_not_list() -> None:
    assert plan_threads({100, 101}, 0, 1, host(1, 4)) == ThreadPlan(frozenset({100, 101}), 1, 1)


def write(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = root / "sys/devices/system" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")


def test_reads_nodes_and_siblings(tmp_path: Path) -> None:
    files = {"cpu/online": "0-7", "node/node0/cpulist": "0-1,4-5", "node/node1/cpulist": "2-3,6-7"}
    files |= {f"cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}
    write(tmp_path, {**files, "node/node10/cpulist": ""})
    assert numa_nodes(tmp_path) == host(2, 2, siblings=2)


def test_offline_processors_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, {"cpu/online": "0,2", "node/node0/cpulist": "0-2"})
    assert numa_nodes(tmp_path) == [[frozenset({0}), frozenset({2})]]


def test_a_host_that_does_not_say(tmp_path: Path) -> None:
    assert numa_nodes(tmp_path) == [[frozenset({cpu}) for cpu in sorted(threads.usable_cpus())]]


def test_torchs_count_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIGHTNING_ELIXIR_NUM_THREADS", raising=False)
    torch.set_num_threads(3)
    assert default_num_threads() == 3


def test_torchruns_one_thread_is_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_share_of_host", lambda rank, size: 10 * size + rank)
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    torch.set_num_threads(1)
    assert default_num_threads() == 21
    torch.set_num_threads(4)  # somebody knew better
    assert default_num_threads() == 4
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert default_num_threads() == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert default_num_threads() == 1


def test_users_wish_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_ELIXIR_NUM_THREADS", "5")
    assert default_num_threads() == 5
    plan = threads.thread_plan(0, 1)
    assert (plan.num_threads, plan.num_update_threads) == (5, 5)


@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5"])
def test_wish_that_is_no_number_raises(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_ELIXIR_NUM_THREADS", value)
    with pytest.raises(PlanError, match=f"must be a number of threads from 1, got '{value}'"):
        default_num_threads()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no masks of processors")
@pytest.mark.full
def test_apply_binds_what_nobody_has_bound() -> None:
    code = """
import os, threading, torch
from lightning_elixir.core import threads
whole = threads.usable_cpus()
some, other = frozenset(sorted(whole)[:1]), frozenset(sorted(whole)[-1:])
go, masks = threading.Event(), []
def stay():
    os.sched_setaffinity(0, other)
    ready.set(); go.wait(); masks.append(os.sched_getaffinity(0) == other)
ready = threading.Event()
thread = threading.Thread(target=stay); thread.start(); ready.wait()
torch.set_num_threads(1)
os.environ.update(TORCHELASTIC_RUN_ID="x", OMP_NUM_THREADS="1")
threads.apply(threads.ThreadPlan(some, 3, 2))
go.set(); thread.join()
print(os.sched_getaffinity(0) == some, masks, torch.get_num_threads())
"""
    done = processes.run(code)
    assert done.stdout.split() == ["True", "[True]", "3"], done.stdout + done.stderr


def test_work_beside_training_leaves_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIGHTNING_ELIXIR_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    assert (default_num_threads(), default_num_update_threads()) == (16, 14)
    monkeypatch.setenv("LIGHTNING_ELIXIR_NUM_THREADS", "5")  # a wish is a wish
    assert default_num_update_threads() == 5


@pytest.fixture
def switch_s() -> Iterator[float]:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield sys.getswitchinterval()
    sys.setswitchinterval(before_s)


def test_threads_switch_often_inside_alone(switch_s: float) -> None:
    with frequent_switches():
        assert sys.getswitchinterval() == pytest.approx(5e-4, rel=0.01)
    assert sys.getswitchinterval() == pytest.approx(switch_s, rel=0.01)


def test_what_a_user_has_set_stays(switch_s: float) -> None:
    sys.setswitchinterval(1e-4)
    with frequent_switches():
        assert sys.getswitchinterval() == pytest.approx(1e-4, rel=0.01)
    sys.setswitchinterval(switch_s)
    with frequent_switches():
        sys.setswitchinterval(2e-3)
    assert sys.getswitchinterval() == pytest.approx(2e-3, rel=0.01)

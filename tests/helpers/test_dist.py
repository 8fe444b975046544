from __future__ import annotations

import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.helpers.dist import RankError, run_ranks


def _sum_of(x: torch.Tensor, factor: int) -> tuple[int, torch.Tensor]:
    x = x * (dist.get_rank() + factor)
    dist.all_reduce(x)
    return dist.get_rank(), x


def _process_id() -> int:
    return os.getpid()


def _fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no luck on rank 1")
    dist.barrier()  # in vain: rank 1 never comes


def _die() -> None:
    os.abort()


def _hang_on_rank_1(path: str) -> None:
    if dist.get_rank() == 1:
        with open(path, "w") as f:
            f.write(str(os.getpid()))
        time.sleep(1000)


def _leave_traces() -> None:
    os.environ["LEFT_BEHIND"] = "1"
    torch.set_default_dtype(torch.float64)


def _see_traces() -> tuple[bool, torch.dtype, bool, str | None]:
    return "LEFT_BEHIND" in os.environ, torch.get_default_dtype(), dist.is_initialized(), os.environ.get("LOCAL_RANK")


def _warn() -> None:
    warnings.warn("careless", UserWarning, stacklevel=1)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_returns_the_values_of_all_ranks(world_size: int) -> None:
    results = run_ranks(_sum_of, world_size, torch.ones(4), 2)
    assert [rank for rank, _ in results] == list(range(world_size))
    for _, value in results:
        assert torch.equal(value, torch.full((4,), float(sum(range(2, 2 + world_size)))))


def test_workers_are_used_again_unless_fresh_ones_are_asked_for() -> None:
    first, second, third = (run_ranks(_process_id, 2), run_ranks(_process_id, 2), run_ranks(_process_id, 2, fresh=True))
    assert first == second
    assert not set(first) & set(third)


def test_each_call_starts_from_a_clean_process_state() -> None:
    run_ranks(_leave_traces, 2)
    assert run_ranks(_see_traces, 2) == [(False, torch.float32, True, str(rank)) for rank in range(2)]


def test_group_is_left_to_the_function_when_asked() -> None:
    assert run_ranks(_see_traces, 1, init_group=False) == [(False, torch.float32, False, "0")]


def test_traceback_of_the_rank_that_failed_first_is_raised() -> None:
    with pytest.raises(RankError, match="(?s)rank 1 of 2 failed.*_fail_on_rank_1.*ValueError: no luck on rank 1"):
        run_ranks(_fail_on_rank_1, 2)
    assert len(run_ranks(_process_id, 2)) == 2, "the pool starts again after a failure"


def test_death_of_a_process_is_reported_with_its_stack() -> None:
    with pytest.raises(RankError, match="(?s)exit code -6.*_die"):
        run_ranks(_die, 1)


def test_timeout_kills_the_ranks_and_shows_where_they_were() -> None:
    path = os.path.abspath("pid")
    with pytest.raises(TimeoutError, match=r"(?s)ranks \[1\] did not finish within 1.0 s.*_hang_on_rank_1"):
        run_ranks(_hang_on_rank_1, 2, path, timeout_s=1.0)
    with open(path) as f, pytest.raises(ProcessLookupError):
        os.kill(int(f.read()), 0)


def test_ranks_treat_warnings_as_the_calling_test_does() -> None:
    with pytest.raises(RankError, match="UserWarning: careless"):
        run_ranks(_warn, 1)
    warnings.simplefilter("ignore")
    run_ranks(_warn, 1)

"""Lanes, the shared bus, and updates that wait for their turn."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from lightning_elixir.plan.simulator.backlog import Backlog, Work
from lightning_elixir.plan.simulator.lanes import Bus, Lane

Spans = list[tuple[str, float, float, str]]


def backlog() -> tuple[Backlog, Bus, Bus, Spans]:
    h2d, d2h, spans = Bus(), Bus(), Spans()
    return Backlog(h2d, d2h, lambda *span: spans.append(span)), h2d, d2h, spans


def streamed(chunk_id: int, num_pieces: int, seconds: float = 1.0) -> Work:
    """Each piece has the bus both ways all of its time."""
    return Work(chunk_id, num_pieces * seconds, num_pieces=num_pieces, up_s=seconds, down_s=seconds)


def test_a_lane_works_in_order() -> None:
    lane = Lane()
    assert [lane.work(2.0, 1.0), lane.work(0.0, 1.0), lane.work(9.0, 1.0)] == [3.0, 4.0, 10.0]


def test_who_comes_later_takes_the_gaps_of_a_bus() -> None:
    bus = Bus()
    assert bus.reserve(5.0, 2.0) == (5.0, 7.0)
    assert bus.reserve(0.0, 2.0) == (0.0, 2.0)
    assert bus.reserve(0.0, 4.0) == (7.0, 11.0)  # too long for the gap
    assert bus.reserve(1.0, 3.0) == (2.0, 5.0)
    assert bus.reserve(1.0, 1.0) == (11.0, 12.0)
    assert bus.reserve(1.0, 0.0) == (1.0, 1.0)
    assert [bus.is_busy(at) for at in (0.0, 4.9, 11.9, 12.0)] == [True, True, True, False]


def test_room_and_forgetting() -> None:
    bus = Bus()
    bus.reserve(1.0, 1.0)
    bus.reserve(5.0, 1.0)
    assert bus.room(0.0) == (0.0, 1.0)
    assert bus.room(1.5) == (2.0, 3.0)
    assert bus.room(5.0) == (6.0, float("inf"))
    bus.forget(3.0)
    assert bus.room(3.0) == (3.0, 2.0)
    assert bus.reserve(3.0, 3.0) == (6.0, 9.0)


def test_a_bus_never_does_two_things_at_once() -> None:
    random = Random(5)
    bus = Bus()
    taken = []
    for _ in range(300):
        start_s, seconds = random.uniform(0, 100), random.uniform(0.1, 2)
        begin_s, end_s = bus.reserve(start_s, seconds)
        assert begin_s >= start_s
        assert end_s - begin_s == pytest.approx(seconds)
        taken.append((begin_s, end_s))
    taken.sort()
    assert all(a[1] <= b[0] + 1e-9 for a, b in zip(taken, taken[1:], strict=False))


def test_updates_run_one_after_the_other_as_gradients_land() -> None:
    work, *_ = backlog()
    for chunk_id, ready_s in ((2, 1.0), (1, 2.0), (0, 20.0)):
        work.add(Work(chunk_id, 5.0), ready_s)
    assert [work.done_s(i, 50.0) for i in (2, 1, 0)] == [6.0, 11.0, 25.0]
    assert 2 not in work


def test_the_one_that_is_needed_goes_first_but_nothing_is_broken_off() -> None:
    work, *_ = backlog()
    for chunk_id in range(4):
        work.add(Work(chunk_id, 5.0), 0.0)
    assert work.done_s(3, 7.0) == 15.0  # 0 is done, 1 under way
    assert work.done_s(2, 7.0) == 20.0
    assert work.done_s(1, 30.0) == 10.0
    assert work.done_s(0, 30.0) == 5.0


def test_of_what_has_landed_the_one_that_forward_needs_first_is_next() -> None:
    work, *_ = backlog()
    for chunk_id, ready_s in ((3, 0.0), (2, 1.0), (1, 2.0), (0, 9.0)):  # as gradients land
        work.add(Work(chunk_id, 5.0, place=chunk_id), ready_s, is_before_step=True)
    work.step(6.0)
    assert [work.done_s(i, 100.0) for i in range(4)] == [15.0, 10.0, 20.0, 5.0]


def test_pieces_of_a_streamed_chunk_that_has_begun_come_before_what_is_needed_sooner() -> None:
    work, *_ = backlog()
    for chunk_id in (2, 1):
        work.add(replace(streamed(chunk_id, 4), place=chunk_id), 0.0)
    work.advance(1.0)  # a piece of the second one
    work.add(replace(streamed(0, 1), place=0), 1.0)
    assert [work.done_s(i, 100.0) for i in (1, 0, 2)] == [5.0, 6.0, 10.0]


def test_a_chunk_whose_gradients_have_not_landed_lets_others_pass() -> None:
    work, *_ = backlog()
    work.add(Work(0, 5.0, place=0), 8.0)
    work.add(Work(1, 5.0, place=1), 0.0)
    work.step(0.0)
    assert [work.done_s(i, 100.0) for i in (0, 1)] == [13.0, 5.0]


def test_new_values_go_up_when_they_are_there_and_the_step_has_come() -> None:
    for ready_s, is_before_step, done_s in ((0.0, False, 7.0), (0.0, True, 12.0), (8.0, True, 15.0)):
        work, h2d, _, spans = backlog()
        work.add(Work(0, 5.0, write_back_s=2.0), ready_s, is_before_step=is_before_step)
        work.step(10.0)
        assert work.done_s(0, 30.0) == done_s
        assert spans[-1] == ("h2d", done_s - 2.0, done_s, "write back 0")
        assert h2d.is_busy(done_s - 1.0)


def test_a_stream_has_the_bus_both_ways() -> None:
    work, h2d, d2h, spans = backlog()
    work.add(streamed(0, 3), 2.0)
    assert work.done_s(0, 2.0) == 6.0  # the last piece comes down when it has gone up
    assert [span[:3] for span in spans] == [("h2d", 2.0, 5.0), ("d2h", 3.0, 6.0)]
    assert (h2d.is_busy(4.9), h2d.is_busy(5.0), d2h.is_busy(5.9)) == (True, False, True)


def test_a_fetch_comes_between_two_pieces() -> None:
    work, h2d, *_ = backlog()
    work.add(streamed(0, 4), 0.0)
    work.advance(1.5)  # two pieces have begun
    assert h2d.reserve(1.5, 3.0) == (2.0, 5.0)
    assert work.done_s(0, 2.0) == 8.0


def test_pieces_fill_what_others_leave() -> None:
    work, h2d, *_ = backlog()
    h2d.reserve(2.5, 3.0)
    work.add(streamed(0, 4), 0.0)
    assert work.done_s(0, 20.0) == 5.5 + 2 + 1  # two before, two after, and down
    assert h2d.room(0.0) == (2.0, 0.5)


def test_host_and_stream_work_beside_each_other() -> None:
    work, *_ = backlog()
    work.add(Work(0, 5.0), 0.0)
    work.add(streamed(1, 5), 0.0)
    work.add(Work(2, 5.0), 0.0)
    assert [work.done_s(i, 0.0) for i in (0, 1, 2)] == [5.0, 6.0, 10.0]


def test_a_streamed_chunk_that_has_begun_is_finished_first() -> None:
    work, *_ = backlog()
    work.add(streamed(0, 4), 0.0)
    work.add(streamed(1, 2), 0.0)
    work.advance(0.5)
    assert work.done_s(1, 0.5) == 7.0
    assert work.done_s(0, 0.5) == 5.0


def test_what_nobody_needed_is_over_before_the_next_update_of_it() -> None:
    work, *_ = backlog()
    work.add(Work(0, 5.0, write_back_s=3.0), 0.0)
    work.add(Work(0, 5.0, write_back_s=3.0), 2.0)
    assert work.done_s(0, 2.0) == 2 * (5.0 + 3.0)
    assert 0 not in work


def test_states_on_a_disk_wait_for_a_free_buffer() -> None:
    """Reading takes one second, an update ten, writing five; the fourth read waits for the first write."""
    spans = Spans()
    work = Backlog(Bus(), Bus(), lambda *span: spans.append(span), 3)
    for i in range(4):
        work.add(Work(i, 10.0, read_s=1.0, write_s=5.0), 0.0)
    work.advance(100.0)
    on_disk = [span[1:] for span in spans if span[0] == "nvme"]
    assert on_disk[:5] == [
        (0.0, 1.0, "read states 0"),
        (1.0, 2.0, "read states 1"),
        (2.0, 3.0, "read states 2"),
        (11.0, 16.0, "store states 0"),
        (16.0, 17.0, "read states 3"),
    ]
    assert [span[1:] for span in spans if span[0] == "cpu"] == [
        (1.0, 11.0, "update 0"),
        (11.0, 21.0, "update 1"),
        (21.0, 31.0, "update 2"),
        (31.0, 41.0, "update 3"),
    ]


def test_buffers_for_states_on_a_disk_go_to_what_has_landed() -> None:
    """Two buffers; gradients land in the order 3, 2, 1, 0, the last one late."""
    spans = Spans()
    work = Backlog(Bus(), Bus(), lambda *span: spans.append(span), 2)
    for i, ready_s in ((3, 2.0), (2, 3.0), (1, 4.0), (0, 60.0)):
        work.add(Work(i, 10.0, read_s=1.0, write_s=1.0, place=i), ready_s)
    work.advance(100.0)
    assert [span[3] for span in spans if span[0] == "nvme" and "read" in span[3]] == [
        "read states 3",  # nothing has landed
        "read states 2",
        "read states 1",
        "read states 0",
    ]
    assert [span[3] for span in spans if span[0] == "cpu"] == ["update 3", "update 2", "update 1", "update 0"]

    again = Backlog(Bus(), Bus(), lambda *span: spans.append(span), 2)
    spans.clear()
    for i, ready_s in ((3, 2.0), (2, 3.0), (1, 4.0), (0, 5.0)):
        again.add(Work(i, 10.0, read_s=1.0, write_s=1.0, place=i), ready_s)
    again.advance(100.0)
    assert [span[3] for span in spans if span[0] == "cpu"] == ["update 3", "update 2", "update 0", "update 1"]

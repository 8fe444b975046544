from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_elixir.plan.activations import NO_MOVES
from lightning_elixir.plan.packing import pack
from lightning_elixir.plan.profile import MemoryProfile, ProfileInterval, StepInterval, StepProfile, step_profile
from lightning_elixir.plan.types import AccessTrace, Acquire, Drop
from tests.plan.models import spec
from tests.plan.problems import constant_hardware
from tests.plan.traces import unpinned

HARDWARE = constant_hardware(
    matmul_flops_per_s={"float32": 1e6, "bfloat16": 4e6}, device_bytes_per_s=1e6, launch_s=1e-3
)


def interval(fqns: tuple[str, ...] = (), **values: object) -> ProfileInterval:
    empty = ProfileInterval(fqns, bool(fqns), (), "", False, 0, 0, 0, 0, 0, 0, ())
    return replace(empty, **values)  # type: ignore[arg-type]


def memory_profile(*timeline: ProfileInterval, dtype: str = "float32") -> MemoryProfile:
    return MemoryProfile(dtype, 0, 0, 0, 0, 0, 0, "", 0, timeline)


PACKED = pack([spec("a", 512), spec("b", 512), spec("frozen", 1024, requires_grad=False), spec("c", 1024)], 1024, 1)
"""Chunk 0 holds a and b."""


def test_names_become_chunks() -> None:
    profile = step_profile(
        memory_profile(
            interval(activation_bytes=1),  # before the first access
            interval(("a", "b"), activation_bytes=2),
            interval(("frozen",), activation_bytes=3, dropped=(("a", "b"),)),
            interval(("c",), activation_bytes=4, dropped=(("frozen",),)),
            interval(("c",), is_pinned=False, activation_bytes=3, dropped=(("c",),), grads=("c",), is_backward=True),
            interval(("a",), is_pinned=False, activation_bytes=2, grads=("a",), is_backward=True),
            interval(("b",), is_pinned=False, activation_bytes=1, grads=("b",), is_backward=True),
        ),
        PACKED,
        HARDWARE,
    )
    assert profile.trace.events == (
        Acquire((0,), is_pinned=True),
        Drop((0,)),
        Acquire((1,), is_pinned=True),
        Drop((1,)),
        Acquire((2,), is_pinned=True),
        Drop((2,)),
        Acquire((2,), is_pinned=False),
        Acquire((0,), is_pinned=False),
        Acquire((0,), is_pinned=False),
    )
    assert [i.non_model_bytes for i in profile.intervals] == [1, 2, 3, 4, 3, 2, 1]
    assert [i.grads for i in profile.intervals] == [(), (), (), (), (2,), (), (0,)]  # with the chunk's last parameter
    assert profile.peak_non_model_bytes == 4


def test_intervals_match_accesses_whatever_comes_first() -> None:
    for timeline in ([interval(("a",))], [interval(), interval(("a",))], [interval(), interval(), interval(("a",))]):
        profile = step_profile(memory_profile(*timeline), PACKED, HARDWARE)
        assert len(profile.intervals) == 2
    assert profile.is_alone  # nothing ran beside a dry run
    assert profile.with_margin(1).of_first_chunks(0).with_bytes(lambda nbytes: 0).is_alone
    nothing = step_profile(memory_profile(), PACKED, HARDWARE)
    assert nothing == StepProfile(profile.trace.__class__(()), (), is_alone=True)


def test_times_follow_operations() -> None:
    def seconds(dtype: str = "float32", **values: int) -> float:
        return step_profile(memory_profile(interval(("a",), **values), dtype=dtype), PACKED, HARDWARE).compute_s

    assert seconds(flops=5000, num_ops=1) == pytest.approx(5e-3)
    assert seconds("bfloat16", flops=5000) == pytest.approx(1.25e-3)
    assert seconds("float64", flops=8000) == pytest.approx(2e-3)  # it was not measured: the fastest
    assert seconds(moved_bytes=3000) == pytest.approx(3e-3)
    assert seconds(flops=5000, moved_bytes=3000, num_ops=1) == pytest.approx(8e-3)
    assert seconds(flops=5000, moved_bytes=3000, num_ops=4) == pytest.approx(18e-3)  # the program takes longer
    assert seconds(flops=5000, moved_bytes=3000, num_ops=9, is_compiled=True) == pytest.approx(9e-3)


def test_the_device_waits_for_a_program_that_is_slower_and_for_no_other() -> None:
    """An operator takes the program 4.5 ms."""

    def seconds(*work: tuple[int, int]) -> list[float]:
        timeline = [interval(("a",), flops=flops, num_ops=num_ops) for flops, num_ops in work]
        return [1e3 * i.compute_s for i in step_profile(memory_profile(*timeline), PACKED, HARDWARE).intervals[1:]]

    assert seconds((9000, 1), (1000, 2), (9000, 1)) == pytest.approx([9, 1, 9])  # it is ahead: 18 ms of 19
    # After 9 ms the device waits until 18 ms, and again until 27 ms.
    assert seconds((9000, 1), (1000, 3), (1000, 2)) == pytest.approx([9, 9, 9])
    assert seconds((1000, 2), (9000, 1), (1000, 1)) == pytest.approx([9, 9, 1])


def test_what_no_chunk_holds_is_left_out() -> None:
    profile = step_profile(
        memory_profile(
            interval(("a",), activation_bytes=1, flops=1000),
            interval(("elsewhere",), activation_bytes=9, flops=2000, grads=("a", "b", "elsewhere")),
            interval(dropped=(("elsewhere",), ("a",))),
        ),
        PACKED,
        HARDWARE,
    )
    assert profile.trace.events == (Acquire((0,), is_pinned=True), Drop((0,)))
    assert profile.intervals == (StepInterval(0.0, 0), StepInterval(3e-3, 9, (0,), False, arrivals=(0, 0)))


def test_compiled_code_gives_its_gradients_when_it_ends() -> None:
    def intervals(*, is_compiled: bool, grads: tuple[str, ...] = ("a", "b", "c")) -> tuple[StepInterval, ...]:
        back = interval(("a", "c"), is_pinned=False, flops=1000, grads=grads, is_compiled=is_compiled)
        after = interval(flops=2000)
        return step_profile(memory_profile(interval(("a",)), back, after), PACKED, HARDWARE).intervals

    assert intervals(is_compiled=True)[-1] == StepInterval(3e-3, 0, (0, 2), False, NO_MOVES, (0, 0, 2, 2), (1e-3, 1e-3))
    assert intervals(is_compiled=False)[-1].grad_s == ()
    late = intervals(is_compiled=True, grads=("a", "c"))[-1]  # b is not used
    assert (late.grads, late.until_grads_s) == ((2, 0), pytest.approx((1.5e-3, 3e-3)))


def test_of_the_first_chunks_there_are_no_others() -> None:
    """There is still one interval after each access."""
    events = (Acquire((0, 2), is_pinned=True), Drop((0, 2)), Acquire((2,), is_pinned=False, held=(0,)))
    intervals = (StepInterval(0.0, 0), StepInterval(1.0, 9), StepInterval(2.0, 9, (2, 0)))
    profile = StepProfile(AccessTrace(events), intervals).of_first_chunks(2)
    assert profile.trace.events == (Acquire((0,), is_pinned=True), Drop((0,)), Acquire((), is_pinned=False, held=(0,)))
    assert profile.intervals == (*intervals[:2], StepInterval(2.0, 9, (0,)))
    assert profile.trace.in_use() == {frozenset((0,))}
    timed = replace(profile.intervals[2], grads=(2, 0), grad_s=(1.0, 1.5))
    profile = StepProfile(AccessTrace(events), (*intervals[:2], timed)).of_first_chunks(2)
    assert profile.intervals[2] == StepInterval(2.0, 9, (0,), grad_s=(1.5,))


def test_a_chunk_with_an_unused_parameter_is_complete_at_the_end() -> None:
    """As the runtime has it: the end of backward flushes what is left."""
    profile = step_profile(
        memory_profile(
            interval(("a",)), interval(("c",), grads=("a",)), interval(("a",), is_pinned=False, grads=("c",))
        ),
        PACKED,
        HARDWARE,
    )
    assert [i.grads for i in profile.intervals] == [(), (), (), (2, 0)]
    nothing = step_profile(memory_profile(interval(("a",)), interval(("c",), grads=("c",))), PACKED, HARDWARE)
    assert [i.grads for i in nothing.intervals] == [(), (), (2,)]  # without any gradient a chunk is left alone


def test_a_margin_is_left_where_something_was_measured() -> None:
    profile = StepProfile(unpinned(0), (StepInterval(1.0, 0), StepInterval(2.0, 100_000, (0,))))
    more = profile.with_margin(1000)
    first, second = (i.non_model_bytes for i in more.intervals)
    assert first >= 2000  # two blocks, and what lies in gaps
    assert second - first >= 100_000
    assert [(i.compute_s, i.grads) for i in more.intervals] == [(1.0, ()), (2.0, (0,))]
    nothing = StepProfile(unpinned(0), (StepInterval(1.0, 0), StepInterval(2.0, 0)))
    assert nothing.with_margin(1000) == nothing  # a device that nobody measures
    for margined in (more, profile.with_margin(1000, is_certain=False)):
        pairs = zip(profile.intervals, margined.intervals, strict=True)
        bare = ((b.non_model_bytes, margined.margin.without(a.non_model_bytes)) for b, a in pairs)
        assert all(abs(after - before) <= 1 for before, after in bare)
    # Segments that keep their sizes have more gaps.
    fixed = profile.with_margin(1000, has_growing_segments=False)
    assert fixed.peak_non_model_bytes - more.peak_non_model_bytes == 15_000
    # What was never seen, and cannot be run again, leaves more.
    unseen = profile.with_margin(1000, is_certain=False)
    assert unseen.peak_non_model_bytes - more.peak_non_model_bytes == int(profile.peak_non_model_bytes * 0.2) - int(
        profile.peak_non_model_bytes * 0.05
    )

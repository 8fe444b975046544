"""The ways of updates, each walked through over named memory."""

from __future__ import annotations

import itertools

import pytest

from lightning_elixir.stepping.cases import Case, Delivery, Grads, Params, Start, Values, Way, way_of

CASES = [
    Case(*axes)
    for axes in itertools.product(Start, Grads, Params, [False, True], [False, True])
    # Gradients lie over parameters in host memory alone.
    if axes[1] is not Grads.OVER_PARAMS or axes[2] is Params.HOST
]

UPDATED, LEFT = 0, 1  # two elements; the second one gets a new value only where all do


def walk(case: Case, way: Way) -> tuple[list[str], list[str], list[str]]:
    """Two elements of a chunk: what `params` hold before the step, what they hold after it, and what the master
    holds."""
    gradients = ["gradient", "gradient"]
    memory = {"params": ["old", "old"], "grads": gradients, "spare": ["junk", "junk"], "master": ["old", "old"]}
    if case.grads is Grads.OVER_PARAMS:
        memory["params"] = gradients
    place = {Values.GRADS: "grads", Values.SPARE: "spare", Values.MASTER: "master"}.get(way.values, "params")
    for element in (UPDATED, LEFT) if case.is_whole else (UPDATED,):
        memory["master"][element] = memory[place][element] = "new"
    before = list(memory["params"])
    if way.delivery is Delivery.EXCHANGE:
        memory["params"], memory[place] = memory[place], memory["params"]
    elif way.delivery is Delivery.CAST:
        memory["params"] = list(memory[place])
    elif way.delivery is Delivery.UPLOAD:
        memory["params"][UPDATED] = memory[place][UPDATED]
        if case.is_whole:
            memory["params"][LEFT] = memory[place][LEFT]
    return before, memory["params"], memory["master"]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parameters_are_what_the_master_is_after_the_step(case: Case) -> None:
    way = way_of(case)
    if way is not None:
        _, after, master = walk(case, way)
        assert after == master


@pytest.mark.parametrize("case", [c for c in CASES if c.start is not Start.IN_STEP], ids=str)
def test_backward_finds_the_old_values_of_what_has_begun(case: Case) -> None:
    way = way_of(case)
    if way is not None and case.grads is not Grads.OVER_PARAMS:  # there it reads the master
        assert walk(case, way)[0] == ["old", "old"]


@pytest.mark.parametrize("case", [c for c in CASES if c.start is Start.AHEAD], ids=str)
def test_what_can_be_taken_back_writes_to_spare_memory_alone(case: Case) -> None:
    way = way_of(case)
    assert way is None or way.values is Values.SPARE


@pytest.mark.parametrize("case", CASES, ids=str)
def test_host_memory_that_backward_reads_is_written_after_it(case: Case) -> None:
    """The host's parameters, unless they are lost anyway, and those on a disk, which are written piece by piece."""
    way = way_of(case)
    if way is not None:
        is_on_host = case.params in (Params.HOST, Params.HOST_SLICE)
        is_written = way.values is Values.PARAMS or way.delivery is Delivery.CAST
        assert way.is_after_backward == (is_on_host and is_written)


@pytest.mark.parametrize("case", [c for c in CASES if c.start is Start.IN_STEP], ids=str)
def test_every_update_is_possible_in_its_step(case: Case) -> None:
    assert way_of(case) is not None


@pytest.mark.parametrize("case", CASES, ids=str)
def test_memory_changes_roles_on_the_host_and_copies_go_where_the_parameters_are(case: Case) -> None:
    way = way_of(case)
    if way is not None:
        homes = {
            Delivery.EXCHANGE: [Params.HOST],
            Delivery.CAST: [Params.HOST, Params.HOST_SLICE],
            Delivery.UPLOAD: [Params.DEVICE],
        }
        assert case.params in homes.get(way.delivery, list(Params))


def test_spares_and_gradients_save_a_copy_where_they_can() -> None:
    for is_streamed in (False, True):
        for grads in (Grads.LIKE_PARAMS, Grads.ELSEWHERE):
            ahead = Case(Start.AHEAD, grads, Params.HOST, is_streamed, is_whole=True)
            assert way_of(ahead) == Way(Values.SPARE, Delivery.EXCHANGE)
        for start in (Start.EARLY, Start.IN_STEP):
            alike = Case(start, Grads.LIKE_PARAMS, Params.HOST, is_streamed, is_whole=True)
            assert way_of(alike) == Way(Values.GRADS, Delivery.EXCHANGE)


def test_a_streamed_update_in_its_step_sends_nothing_up_twice() -> None:
    case = Case(Start.IN_STEP, Grads.LIKE_PARAMS, Params.DEVICE, is_streamed=True, is_whole=True)
    assert way_of(case) == Way(Values.DEVICE_PARAMS, Delivery.NONE)

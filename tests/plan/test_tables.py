from __future__ import annotations

from lightning_elixir.plan.placing.placement import OFFLOADED, RESIDENT, Placer
from lightning_elixir.plan.problem import PlacementRequest, Problem
from lightning_elixir.plan.tables import Table
from tests.plan.problems import layers, layout_of


def test_a_table_finds_each_object_once_and_tells_equal_ones_apart() -> None:
    asked: list[tuple[int, ...]] = []

    def length(key: tuple[int, ...]) -> int:
        asked.append(key)
        return len(key)

    table = Table(length)
    keys = [tuple(range(n)) for n in (2, 3, 2)]
    assert [table(k) for k in (*keys, *keys)] == [2, 3, 2, 2, 3, 2]
    assert [id(k) for k in asked] == [id(k) for k in keys]


def test_a_table_is_not_misled_by_objects_that_are_gone() -> None:
    """A new object may come to lie where one was that nobody else holds."""
    table: Table[list[int], int] = Table(len)
    assert [table([0] * n) for n in range(200)] == list(range(200))


def test_a_placer_has_one_placement_for_the_same_sites() -> None:
    placer = Placer(layout_of(layers(3)), Problem(PlacementRequest()))
    first = placer.at([RESIDENT, OFFLOADED, OFFLOADED])
    assert placer.at((RESIDENT, OFFLOADED._replace(), OFFLOADED)) is first
    other = placer.at([RESIDENT, RESIDENT, OFFLOADED])
    assert other is not first
    assert [a is b for a, b in zip(first.chunks, other.chunks, strict=True)] == [True, False, True]
    assert first.use != other.use

"""Who holds what when parameters are cut between ranks."""

from __future__ import annotations

import itertools

import pytest

from lightning_elixir.errors import PlanError
from lightning_elixir.plan.io import plan_from_dict, plan_to_dict
from lightning_elixir.plan.mesh import AXES, AxisCut, Mesh, offsets_in_whole, whole_shape
from lightning_elixir.plan.packing import pack
from lightning_elixir.plan.placing.placement import place
from lightning_elixir.plan.problem import PlacementRequest, Problem
from lightning_elixir.plan.types import ParamSpec, Plan
from tests.plan.problems import layout_of


def planned(spec: ParamSpec, tensor: int = 1) -> Plan:
    problem = Problem(PlacementRequest(policy="cpu"), world_size=2, tensor_parallel_size=tensor)
    return place(layout_of([spec], world_size=2), problem)


MESHES = [Mesh(8, 2, 2), Mesh(8, 4, 1), Mesh(6, 1, 3), Mesh(4, 2, 2), Mesh(2, 2, 1), Mesh(3)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_groups_cover_all_ranks_once(mesh: Mesh) -> None:
    for axes in [(), ("tensor",), ("expert",), AXES]:
        groups = mesh.sharing(axes)
        assert sorted(itertools.chain(*groups)) == list(range(mesh.world_size))
        assert {len(group) for group in groups} == {mesh.num_sharing(axes)}
        assert all(len({mesh.part(rank, axes) for rank in group}) == 1 for group in groups)
    for axis in AXES:
        groups = mesh.along(axis)
        assert sorted(itertools.chain(*groups)) == list(range(mesh.world_size))
        for group in groups:  # in the order of their places, and equal in every other respect
            assert [mesh.coordinate(rank, axis) for rank in group] == list(range(mesh.size(axis)))
            other = AXES[1 - AXES.index(axis)]
            assert len({mesh.coordinate(rank, other) for rank in group}) == 1


def test_ranks_of_a_tensor_parallel_group_have_one_batch() -> None:
    mesh = Mesh(8, 2, 2)
    assert [mesh.batch_of(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert mesh.num_batches == 4


def test_parts_make_up_the_whole() -> None:
    mesh, cuts = Mesh(8, 2, 2), (AxisCut("expert", 0), AxisCut("tensor", 2))
    assert whole_shape((3, 5, 7), cuts, mesh) == (6, 5, 14)
    offsets = {offsets_in_whole((3, 5, 7), cuts, mesh, rank) for rank in range(8)}
    assert offsets == {(a, 0, b) for a in (0, 3) for b in (0, 7)}


@pytest.mark.parametrize(("mesh", "told"), [(Mesh(3, 2, 1), "multiple of 2"), (Mesh(4, 2, 4), "multiple of 8")])
def test_ranks_that_make_up_no_box_are_refused(mesh: Mesh, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        mesh.check()


def test_parameters_of_one_kind_share_chunks() -> None:
    cuts = [(), (AxisCut("tensor", 0),), (AxisCut("expert", 0),), (AxisCut("tensor", 1),)]
    specs = [ParamSpec(f"p{i}", (8, 8), "float32", True, cuts=cuts[i % 4]) for i in range(8)]
    chunks = pack(specs, 10**6, 4)
    assert [[m.fqn for m in c.members] for c in chunks] == [["p0", "p4"], ["p1", "p3", "p5", "p7"], ["p2", "p6"]]
    assert [c.axes for c in chunks] == [(), ("tensor",), ("expert",)]


def test_cuts_are_part_of_a_plan_and_its_fingerprint() -> None:
    plain = planned(ParamSpec("p", (8, 8), "float32", True))
    spec = ParamSpec("p", (8, 8), "float32", True, cuts=(AxisCut("tensor", 1),))
    plan = planned(spec, tensor=2)
    assert plan_from_dict(plan_to_dict(plan)) == plan
    assert plan.num_sharing(plan.chunks[0]) == 1
    assert plain.layout_fingerprint() != plan.layout_fingerprint()
    assert plain.fingerprint() != plan.fingerprint()


@pytest.mark.parametrize("cuts", [{"tensor": 2}, {"tensor": 0, "expert": 0}, {"data": 0}, {"tensor": -1}])
def test_cuts_that_no_parameter_can_have_are_refused(cuts: dict[str, int]) -> None:
    spec = ParamSpec("p", (8, 8), "float32", True, cuts=(AxisCut("tensor", 1),))
    content: dict = plan_to_dict(planned(spec, tensor=2))
    content["chunks"][0]["members"][0]["cuts"] = cuts
    with pytest.raises(PlanError, match="cuts"):
        plan_from_dict(content)

"""Several nodes on paper: which ranks share what, what links cost, and what is chosen by that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_elixir.errors import CapacityError, PlanError
from lightning_elixir.plan.activations import Fate, ModelBlock
from lightning_elixir.plan.hardware import BandwidthCurve, HardwareSpec
from lightning_elixir.plan.io import plan_from_dict, plan_to_dict
from lightning_elixir.plan.links import Network, on_nodes, on_ranks
from lightning_elixir.plan.mesh import Mesh
from lightning_elixir.plan.sharding import NOTE, best_sharding, meshes_of
from lightning_elixir.plan.simulator.cost import Costs
from lightning_elixir.plan.simulator.timeline import scheme_of
from lightning_elixir.plan.types import Plan
from lightning_elixir.plan.weighing import Choice, Exchanged, Way, advise, exchange_s, meshes_to_weigh, way_of, weigh
from lightning_elixir.planning import TrainingRegime
from tests.helpers.plans import make_plan

GB = 1e9


def test_copies_are_of_neighbours_and_the_same_places_meet() -> None:
    mesh = Mesh(8, tensor=2, copies=2)
    assert mesh.sharing(()) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.sharing(("tensor",)) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.across() == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert (mesh.num_sharing(()), mesh.num_sharing(("tensor",))) == (4, 2)
    assert mesh.num_batches == 4


@pytest.mark.parametrize("mesh", [Mesh(8, copies=3), Mesh(8, expert=4, copies=4), Mesh(8, copies=0)])
def test_copies_that_cannot_be_are_refused(mesh: Mesh) -> None:
    with pytest.raises(PlanError, match="copies of the parameters"):
        mesh.check()


@pytest.mark.parametrize(
    ("mesh", "nodes", "sharding", "copies"),
    [
        (Mesh(8), 2, "world", [1]),
        (Mesh(8), 2, "node", [2]),
        (Mesh(8), 2, "auto", [1, 2]),
        (Mesh(8), 1, "node", [1]),
        (Mesh(8, expert=8), 2, "auto", [1]),
    ],
)
def test_what_is_weighed(mesh: Mesh, nodes: int, sharding: Any, copies: list[int]) -> None:
    assert [one.copies for one in meshes_of(mesh, nodes, sharding)] == copies


def test_ranks_of_a_host_share_it() -> None:
    one = replace(HardwareSpec.nominal(), joint_adam_numel_per_s=2e9, host_bytes_per_s=8e10, nvme_read_bytes_per_s=4e9)
    four = on_ranks(one, 4)
    shared = ("cpu_adam_numel_per_s", "joint_adam_numel_per_s", "host_bytes_per_s", "nvme_read_bytes_per_s")
    for name in shared:
        assert getattr(four, name) == pytest.approx(getattr(one, name) / 4)
    assert (four.world_size, four.nvme_write_bytes_per_s, four.h2d) == (4, None, one.h2d)
    assert on_ranks(four, 1).cpu_adam_numel_per_s == pytest.approx(one.cpu_adam_numel_per_s)
    assert on_ranks(four, 4) is four
    assert on_ranks(replace(one, computing_slowdown=1.3), 4).computing_slowdown == 1.3
    bare = replace(one, all_gather=None, reduce_scatter=None)
    assert on_ranks(bare, 2).all_gather == HardwareSpec.nominal().all_gather
    assert on_ranks(replace(four, all_gather=None), 1).all_gather is None


def planned(mesh: Mesh, hardware: HardwareSpec | None = None, **options: Any) -> Plan:
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
    return make_plan(model, mesh=mesh, compute_dtype=torch.bfloat16, hardware=hardware, **options)


def test_a_plan_keeps_its_copies_and_a_copy_takes_memory() -> None:
    options = {"placement_policy": "cuda", "chunk_size": 2**17}
    alone, copied = planned(Mesh(4), **options), planned(Mesh(4, copies=2), **options)
    assert plan_from_dict(plan_to_dict(copied)) == copied
    assert copied.fingerprint() != alone.fingerprint()
    assert copied.layout_fingerprint() != alone.layout_fingerprint()
    assert copied.notes["gpu_state_bytes"] == 2 * int(alone.notes["gpu_state_bytes"])


NODE = replace(
    HardwareSpec.nominal(2**40, 2**40),
    world_size=4,
    all_gather=BandwidthCurve.constant(100 * GB),
    reduce_scatter=BandwidthCurve.constant(50 * GB),
)


def test_figures_of_several_nodes() -> None:
    spec, size = on_nodes(replace(NODE, computing_slowdown=1.3), 2, Network(10 * GB, 1e-5)), 2**28
    assert spec.slowdowns == (1.3, 1.0)
    assert (spec.world_size, spec.num_nodes) == (8, 2)
    assert spec.node_all_gather == NODE.all_gather
    # What comes from the other node: half, by four ranks together.
    assert spec.gather_s(size, 8, is_within_node=False) == pytest.approx(size / 2 / (40 * GB) + 1e-5)
    # Each rank sends half of what it has.
    assert spec.reduce_s(size, 8, is_within_node=False) == pytest.approx(size / 2 / (10 * GB) + 1e-5)
    assert spec.mean_across_s(size, 2) == pytest.approx(size / (10 * GB) + 2e-5)
    assert spec.gather_s(size, 4, is_within_node=True) == pytest.approx(size / (100 * GB))
    assert spec.gather_s(size, 2, is_within_node=True) == pytest.approx(size / (100 * GB) * (1 / 2) / (3 / 4))
    assert HardwareSpec.from_dict(spec.to_dict()) == spec


def test_nodes_of_nodes_are_refused() -> None:
    spec = on_nodes(NODE, 2, Network(GB, 0.0))
    with pytest.raises(PlanError, match="of 2 nodes already|are of 2 nodes"):
        on_nodes(spec, 2, Network(GB, 0.0))


@pytest.mark.parametrize("copies", [1, 2])
def test_costs_go_by_the_links_of_the_group(copies: int) -> None:
    hardware = on_nodes(NODE, 2, Network(GB, 0.0))
    plan = planned(Mesh(8, copies=copies), hardware, placement_policy="cpu", chunk_size=2**17)
    chunk, costs = plan.chunks[0], Costs(hardware, scheme_of(plan, TrainingRegime()))
    size = chunk.nbytes
    near, far = NODE.all_gather.seconds(size), size / 2 / (4 * GB)  # type: ignore[union-attr]
    assert costs.gather_s(chunk) == pytest.approx(near if copies == 2 else far, rel=1e-3)
    within = NODE.reduce_scatter.seconds(size)  # type: ignore[union-attr]
    assert costs.reduce_s(chunk) == pytest.approx(within + size / 4 / GB if copies == 2 else size / 2 / GB, rel=1e-3)


@pytest.mark.parametrize(("bytes_per_s", "copies"), [(GB / 10, 2), (1e6 * GB, 1)], ids=["slow", "fast"])
def test_the_faster_sharding_is_taken(bytes_per_s: float, copies: int) -> None:
    hardware = on_nodes(NODE, 2, Network(bytes_per_s, 0.0))

    def make(mesh: Mesh) -> Plan:
        return planned(mesh, hardware, chunk_size=2**17, gpu_bytes=2**21)

    meshes = meshes_of(Mesh(8), 2, "auto")
    plan = best_sharding(make, meshes)
    assert plan.num_copies == copies
    ways = ["sharded over all 8 ranks", "sharded over 4 ranks, in 2 copies"]
    if copies == 2:
        ways.reverse()
    seconds = {mesh.copies: forecast.times.total_s for mesh in meshes if (forecast := make(mesh).forecast) is not None}
    ratio = max(seconds.values()) / min(seconds.values())
    assert plan.notes[NOTE] == f"{ways[0]}; {ways[1]}: the step is {ratio:.2f} times as long"
    assert str(plan.notes[NOTE]) in plan.explain()


def test_what_does_not_fit_is_not_taken() -> None:
    plan = planned(Mesh(8))

    def make(mesh: Mesh) -> Plan:
        if mesh.copies > 1:
            raise CapacityError("too large")
        return plan

    found = best_sharding(make, meshes_of(Mesh(8), 2, "auto"))
    assert str(found.notes[NOTE]).endswith("sharded over 4 ranks, in 2 copies: does not fit")


def test_exchanges_go_over_the_links_of_their_axis() -> None:
    hardware, size = on_nodes(NODE, 2, Network(GB, 0.0)), 2**24
    rows, total = Exchanged("expert", "rows", size), Exchanged("tensor", "sum", size)
    near, far = Mesh(8, tensor=4), Mesh(8, expert=8)
    assert exchange_s([total], near, hardware) == pytest.approx(size / (100 * GB) + size / (50 * GB), rel=1e-3)
    assert exchange_s([rows], far, hardware) == pytest.approx(size / 2 / GB, rel=1e-3)


@pytest.mark.parametrize(
    ("ways", "best", "why"),
    [
        ([Way(Mesh(4), 4.0, 0, 100), Way(Mesh(4, expert=2), 2.0, 1.0, 40)], 1, "expert 2: 25% less time"),
        ([Way(Mesh(4), 4.0), Way(Mesh(4, expert=2), 3.9)], 0, "sharding alone: expert 2 would save 2.5%"),
        ([Way(Mesh(4), 4.0), Way(Mesh(4, tensor=2), 3.0)], 0, "nothing else is faster"),  # of half the samples
        ([Way(Mesh(4), None), Way(Mesh(4, tensor=2), 3.0)], 1, "sharding alone does not fit"),
        ([Way(Mesh(4), None, refusal="does not fit")], None, "nothing fits"),
        ([Way(Mesh(4), None), Way(Mesh(4, expert=2), None)], 0, "sharding alone: the first that fits"),  # not foreseen
    ],
)
def test_what_is_advised(ways: list[Way], best: int | None, why: str) -> None:
    found, told = advise(ways)
    assert found is (None if best is None else ways[best])
    assert why in told


def test_a_step_has_several_micro_batches() -> None:
    hardware, plan = on_nodes(NODE, 2, Network(GB, 0.0)), planned(Mesh(8, tensor=2))
    way = way_of(plan, 4.0, [Exchanged("tensor", "sum", 2**20)], hardware, 2)
    assert way.exchange_s > 0
    assert way.batch_s == pytest.approx((4.0 + way.exchange_s) / 2 / 4)  # of four groups, two each


def test_exchanges_of_recomputed_blocks_come_again() -> None:
    """Those in the block's forward; not those of its backward, of the layer beside it, or of one with a longer name."""
    hardware, plan = on_nodes(NODE, 2, Network(GB, 0.0)), planned(Mesh(8, tensor=2))
    every = [Exchanged("tensor", "sum", 2**20, at) for at in ("layers.1.down", "layers.10.down", "head", "")]

    def seconds(*fates: Fate) -> float:
        blocks = tuple(ModelBlock(f"layers.{number}", fate) for number, fate in enumerate(fates))
        return way_of(replace(plan, activations=blocks), 4.0, every, hardware, 1).exchange_s

    kept = seconds(Fate.KEEP, Fate.OFFLOAD)
    for fate in (Fate.RECOMPUTE, Fate.RECOMPUTE_OFFLOADED):
        assert seconds(fate, fate) == pytest.approx(kept * 5 / 4)


def test_sizes_that_may_be_chosen() -> None:
    found = meshes_to_weigh(12, 2)
    assert [mesh.tensor for mesh in found] == [1, 2, 3, 6, 1, 1, 1, 1, 1]  # within a node of six
    assert [mesh.expert for mesh in found] == [1, 1, 1, 1, 2, 3, 4, 6, 12]
    assert meshes_to_weigh(8, 1, 2, "auto") == tuple(Mesh(8, 2, size) for size in (1, 2, 4))  # what is given stays
    assert meshes_to_weigh(1, 1) == (Mesh(1),)


def test_why_sizes_were_chosen() -> None:
    seconds = {(1, 1): 8.0, (2, 1): 10.0, (1, 2): 6.0, (2, 2): 7.0}

    def look(mesh: Mesh) -> Way:
        if mesh.expert == 4:
            raise PlanError("patterns: net.experts: these experts cannot be cut into 4: choose another size")
        if mesh.tensor == 4:
            raise CapacityError("no room")
        return Way(mesh, seconds[mesh.tensor, mesh.expert], 0.5)

    choice = Choice.of(weigh(meshes_to_weigh(4, 1), look))
    assert choice.mesh == Mesh(4, 1, 2)
    told = choice.note.splitlines()
    assert told[0].startswith("expert 2: 24% less time for the same samples")
    assert [line.partition(":")[0] for line in told[1:4]] == ["sharding alone", "tensor 2", "tensor 4"]
    assert told[1].endswith("1.31 times as long")
    assert "of it for exchanges" in told[1]
    assert told[3] == "tensor 4: does not fit"
    assert told[4].endswith("chosen")
    assert told[5] == "expert 4: these experts cannot be cut into 4"


def test_both_together_are_looked_at_where_each_is_worth_it() -> None:
    def look(mesh: Mesh) -> Way:
        if max(mesh.tensor, mesh.expert) > 2:
            raise CapacityError("no room")
        return Way(mesh, 8.0 / mesh.tensor**2 / mesh.expert)

    assert Choice.of(weigh(meshes_to_weigh(4, 1), look)).mesh == Mesh(4, 2, 2)

"""Several ranks give DDP's numbers; ranks may take different branches without a hang or a mixed-up collective."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_elixir.core.device import CpuDevice
from lightning_elixir.errors import DivergenceError, PlanError
from lightning_elixir.runtime import build
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.dist import run_ranks
from tests.helpers.plans import make_plan
from tests.helpers.ranks import OPTIONS, STEPS, averaged_plain, sent_up, train_rank
from tests.helpers.seeds import seed_torch
from tests.helpers.tiers import crossed, full, telling
from tests.helpers.zoo import ZOO, make


@crossed(
    told=["gpt2-sharded_gpu-2", "odd-cpu-3"],
    name=["gpt2", "odd", "checkpoint_reentrant", "branching"],
    options=OPTIONS,
    world_size=[2, 3],
)
def test_equals_averaged_gradients(name: str, options: str, world_size: int) -> None:
    expected = averaged_plain(name, world_size, 2)
    results = run_ranks(train_rank, world_size, name, 2, OPTIONS[options])
    state, stats = results[0]
    assert results[1][0] == {}
    skipped = {f"transformer.h.{i}.attn.c_attn.bias" for i in range(3)}  # key biases have a true gradient of zero
    for key, value in expected.items():
        if key not in skipped and value.is_floating_point():
            torch.testing.assert_close(state[key], value, rtol=2e-4, atol=2e-5, msg=lambda m, k=key: f"{k}: {m}")
    if options != "cuda":
        assert stats["fetches"] > 0
    if options.startswith("cpu"):
        assert stats["evictions"] > 0


@pytest.mark.parametrize(
    ("world_size", "names"), [(2, ["cuda", "cpu"]), full(2, [*OPTIONS]), full(3, [*OPTIONS])], ids=str
)
def test_placements_agree_bitwise(world_size: int, names: list[str]) -> None:
    states = {key: run_ranks(train_rank, world_size, "gpt2", 2, OPTIONS[key])[0][0] for key in names}
    reference = states.pop("cuda")
    for key, state in states.items():
        assert [k for k in reference if not torch.equal(state[k], reference[k])] == [], key


class Routed(nn.Module):
    """Each rank routes to its own experts, in its own order, and rank 0 takes a branch that others do not."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(16, 32)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(6))
        self.only_rank_0 = nn.Linear(32, 32)
        self.out = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor, experts: list[int], is_first: bool) -> torch.Tensor:
        x = self.inp(x)
        for expert in experts:
            x = x + self.experts[expert](x)
        if is_first:
            x = torch.tanh(self.only_rank_0(x))
        return self.out(x)


def route(step: int, rank: int) -> list[int]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randperm(6, generator=generator)[: 2 + (rank + step) % 3].tolist()


def routed_batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(1000 * step + rank))


def train_routed(options: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    seed_torch(0)
    model = Routed()
    module = ElixirModule(model, make_plan(model, world_size=world_size, **options), device=torch.device("cpu"))
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1))
    for step in range(6):
        loss = module(routed_batch(step, rank), route(step, rank), rank == 0).square().mean()
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step == 3 and rank == 0:  # one rank looks at a released parameter on its own
            with torch.no_grad():
                assert float(model.experts[5][0].weight.abs().sum()) > 0
    state, stats = module.full_state_dict(), module.stats().as_dict()
    module.close()
    return state, stats


@pytest.mark.parametrize("world_size", telling([2, 3], "3"))
@pytest.mark.parametrize("options", telling(["cuda", "cpu", "whole", "half_persistent"], "whole"))
def test_experts_routed_differently_per_rank(options: str, world_size: int) -> None:
    seed_torch(0)
    model = Routed()
    # With decay and momentum, so that what is unused would move if it were stepped.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for step in range(6):
        for rank in range(world_size):
            (model(routed_batch(step, rank), route(step, rank), rank == 0).square().mean() / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    state, stats = run_ranks(train_routed, world_size, {**OPTIONS[options], "chunk_size": 4 * 1024})[0]
    torch.testing.assert_close(state, dict(model.state_dict()), rtol=1e-5, atol=1e-6)
    assert (stats["fetches"] > 0) == (options != "cuda")


def train_in_own_order(rcache_blocks: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    seed_torch(0)
    model = Routed()
    plan = make_plan(model, world_size=world_size, placement_policy="cpu", chunk_size=8 * 1024)
    module = ElixirModule(model, replace(plan, rcache_blocks=rcache_blocks), device=torch.device("cpu"))
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(4):
        optimizer.backward(module(routed_batch(step, rank), own_order(rank), True).square().mean())
        optimizer.step()
    state, stats = module.full_state_dict(), module.stats().as_dict()
    module.close()
    return state, stats


def own_order(rank: int) -> list[int]:
    return list(range(6)) if rank == 0 else [3, 2, 1, 0, 5, 4]


@pytest.mark.full  # random orders
@pytest.mark.parametrize("rcache_blocks", [4, 6])
def test_experts_in_an_order_of_each_ranks_own(rcache_blocks: int) -> None:
    """The same in every step, so all ranks know what comes next: each something else, of what all need soon."""
    seed_torch(0)
    model = Routed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        for rank in range(2):
            (model(routed_batch(step, rank), own_order(rank), True).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    state, stats = run_ranks(train_in_own_order, 2, rcache_blocks)[0]
    torch.testing.assert_close(state, dict(model.state_dict()), rtol=1e-5, atol=1e-6)
    assert stats["prefetches"] > 0


def different_models() -> str:
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8 + rank))
    try:
        ElixirModule(model, make_plan(model, world_size=dist.get_world_size()), device=torch.device("cpu"))
    except PlanError as error:
        return str(error)
    return ""


def test_different_models_are_refused_on_every_rank() -> None:
    messages = run_ranks(different_models, 2)
    assert all("different models" in message for message in messages)


def uneven_calls() -> str:
    model = make("mlp")
    module = ElixirModule(
        model,
        make_plan(model, world_size=dist.get_world_size(), placement_policy="cpu", chunk_size=4096),
        device=torch.device("cpu"),
    )
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        with torch.no_grad():
            if dist.get_rank() == 0:
                module(torch.randn(2, 24))
        optimizer.step()
        return ""
    except DivergenceError as error:
        return str(error)


def test_ranks_at_different_points_is_an_error_on_every_rank() -> None:
    messages = run_ranks(uneven_calls, 2)
    assert all("rank 0 is in the end of a forward (" in message for message in messages)
    assert all("rank 1 is in the optimizer's step() (" in message for message in messages)


def clipped_and_resumed(options: dict[str, Any]) -> tuple[float, bool, bool]:
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def new(seed: int) -> tuple[ElixirModule, ElixirOptimizer]:
        model = make("gpt2", seed)
        module = ElixirModule(model, make_plan(model, world_size=world_size, **options), device=torch.device("cpu"))
        return module, ElixirOptimizer(module, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False))

    def step(module: ElixirModule, optimizer: ElixirOptimizer, index: int) -> float:
        optimizer.backward(ZOO["gpt2"].loss(module, index * world_size + rank))
        norm = float(optimizer.clip_grad_norm_(0.05))
        optimizer.step()
        return norm

    module, optimizer = new(0)
    norm = step(module, optimizer, 0)
    state, optim_state = [module.full_state_dict()], [optimizer.state_dict()]
    dist.broadcast_object_list(state)
    dist.broadcast_object_list(optim_state)
    step(module, optimizer, 1)
    after = module.full_state_dict(rank0_only=False)
    other, other_optimizer = new(5)
    other.load_full_state_dict(state[0])
    other_optimizer.load_state_dict(optim_state[0])
    step(other, other_optimizer, 1)
    resumed = other.full_state_dict(rank0_only=False)
    plain = torch.optim.AdamW(make("gpt2").parameters(), lr=1.0)
    plain.load_state_dict(optim_state[0])  # in torch's own format
    same = all(torch.equal(after[k], resumed[k]) for k in after)
    return norm, same, plain.param_groups[0]["lr"] == 1e-2


@pytest.mark.parametrize("options", telling(["cuda", "cpu", "whole"], "cpu"))
def test_clipping_and_resuming(options: str) -> None:
    model = make("gpt2")
    for rank in range(2):
        (ZOO["gpt2"].loss(model, rank) / 2).backward()
    expected = float(nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    for norm, same, has_group in run_ranks(clipped_and_resumed, 2, OPTIONS[options]):
        assert norm == pytest.approx(expected, rel=1e-6)
        assert same
        assert has_group


def train_on_meta_ranks() -> dict[str, torch.Tensor]:
    """Ranks other than 0 have no values: recurrent layers keep their weights in a second list, tied ones in two."""
    rank = dist.get_rank()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 16, num_layers=2, batch_first=True)
            self.up, self.down = nn.Linear(16, 8), nn.Linear(16, 8)
            self.down.weight = self.up.weight
            self.register_buffer("shift", torch.full((8,), float(rank)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, _ = self.lstm(x)
            return self.up(y) + self.down(y) + self.shift

    seed_torch(0)
    model = Model()
    if rank:
        model = model.to("meta")
        model.down.weight = model.up.weight
    plan = make_plan(model, world_size=2, placement_policy="cpu", chunk_size=4096)
    module = ElixirModule(model, plan, device=torch.device("cpu"))
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(2):
        optimizer.backward(module(torch.ones(2, 3, 8) * (step + rank)).square().mean())
        optimizer.step()
    state = module.full_state_dict()
    module.close()
    return state


def test_ranks_without_values_get_those_of_rank_0() -> None:
    state = run_ranks(train_on_meta_ranks, 2)[0]
    assert torch.equal(state["down.weight"], state["up.weight"])
    assert not state["shift"].any()
    assert all(bool(torch.isfinite(v).all()) for v in state.values())


@pytest.mark.parametrize("name", telling(["odd", "conv", "gpt2"], "odd"))
def test_values_from_the_host_arrive_piece_by_piece(name: str) -> None:
    directly = run_ranks(train_rank, 2, name, 1, OPTIONS["cpu"])[0][0]
    (run, pieces), (_, none) = run_ranks(sent_up, 2, train_rank, name, 1, OPTIONS["cpu"])
    assert pieces > 3
    assert none == 0  # rank 0 alone has values
    assert [key for key, value in directly.items() if not torch.equal(run[0][key], value)] == []


def small_ones_between(is_far: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights that cannot be sent as they are, in the small gaps between biases that can."""
    seed_torch(0)
    layers = [nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 8)]
    model = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(build.Builder, "_is_far", staticmethod(lambda flat: is_far))
        module = ElixirModule(model, make_plan(model, world_size=2, placement_policy="cpu"), device=torch.device("cpu"))
    found = module.full_state_dict(rank0_only=False)
    module.close()
    return values, found


def test_what_cannot_be_sent_is_put_between_what_was() -> None:
    for values, found in run_ranks(small_ones_between, 2, True):
        assert [name for name, value in values.items() if not torch.equal(found[name], value)] == []


def shared_out(usable_bytes: int | None) -> tuple[list[bool], bool]:
    """For every chunk, whether the values of the next one were on their way when its own were shared out."""
    seed_torch(dist.get_rank())  # those of rank 0 count
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(5)])
    seed_torch(0)
    expected = nn.Sequential(*[nn.Linear(32, 32) for _ in range(5)]).state_dict()
    scattered, found = build.Builder._scattered, list[bool]()

    def noted(builder: build.Builder, *given: Any) -> torch.Tensor:
        found.append(builder._ahead is not None)
        return scattered(builder, *given)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(build.Builder, "_scattered", noted)
        monkeypatch.setattr(CpuDevice, "usable_bytes", lambda device: usable_bytes)
        plan = make_plan(model, world_size=2, placement_policy="cpu", chunk_size=8192)
        module = ElixirModule(model, plan, device=torch.device("cpu"))
    state = module.full_state_dict(rank0_only=False)
    module.close()
    return found, all(torch.equal(state[name], value) for name, value in expected.items())


@pytest.mark.parametrize("usable_bytes", [None, 2**30, 3 * 8192])
def test_values_of_the_next_chunk_are_collected_ahead_where_there_is_room(usable_bytes: int | None) -> None:
    (ahead, is_first_right), (others, is_second_right) = run_ranks(shared_out, 2, usable_bytes)
    assert len(ahead) > 2
    assert ahead == [usable_bytes != 3 * 8192] * (len(ahead) - 1) + [False]
    assert not any(others)
    assert is_first_right
    assert is_second_right


def new_table(factors: torch.Tensor, *, is_scaled: bool) -> tuple[ElixirModule, ElixirOptimizer, Any]:
    """16 rows, of which each of two ranks keeps 8; row i of the gradient is `factors[i]`."""
    seed_torch(0)
    model = nn.Embedding(16, 128)
    plan = make_plan(model, world_size=2, placement_policy="cpu")
    module = ElixirModule(model, plan, device=torch.device("cpu"))
    module.needs_loss_scale = is_scaled  # there is no fp16 on the CPU; scaling works with any dtype
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=1.0), initial_scale=4.0)
    return module, optimizer, lambda rows: (rows(torch.arange(16)) * factors).sum()


def clipped_to_the_largest() -> tuple[float, torch.Tensor]:
    module, optimizer, loss_of = new_table(torch.arange(16.0).unsqueeze(1), is_scaled=False)
    optimizer.backward(loss_of(module))
    norm = float(optimizer.clip_grad_norm_(0.5, norm_type=float("inf")))
    optimizer.step()
    state = module.full_state_dict(rank0_only=False)
    module.close()
    return norm, state["weight"]


def test_clipping_to_the_largest_gradient_of_any_rank() -> None:
    factors = torch.arange(16.0).unsqueeze(1)
    seed_torch(0)
    plain = nn.Embedding(16, 128)
    (plain(torch.arange(16)) * factors).sum().backward()
    expected = float(nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type=float("inf")))
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    for norm, weight in run_ranks(clipped_to_the_largest, 2):
        assert norm == expected == 15.0
        torch.testing.assert_close(weight, plain.weight.detach(), rtol=1e-6, atol=1e-7)


def overflow_in_one_shard(row: int) -> tuple[bool, float, bool]:
    factors = torch.ones(16, 1)
    factors[row] = 1e38  # times the loss scale, more than fp32 holds
    module, optimizer, loss_of = new_table(factors, is_scaled=True)
    before = module.full_state_dict(rank0_only=False)["weight"].clone()
    optimizer.backward(loss_of(module))
    optimizer.step()
    after = module.full_state_dict(rank0_only=False)["weight"]
    found = optimizer.is_step_skipped, optimizer.loss_scale, torch.equal(before, after)
    module.close()
    return found


@pytest.mark.parametrize("row", [0, 15])
def test_an_overflow_in_the_shard_of_one_rank_skips_the_step_of_all(row: int) -> None:
    assert run_ranks(overflow_in_one_shard, 2, row) == [(True, 2.0, True)] * 2


def train_with_an_alias_of_one_rank() -> tuple[dict[str, torch.Tensor], bool]:
    rank = dist.get_rank()
    model = make("gpt2")
    plan = make_plan(model, world_size=2, **OPTIONS["cpu"])
    module = ElixirModule(model, plan, device=torch.device("cpu"))
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False))
    parameter, kept = next(iter(model.parameters())), None
    for step in range(STEPS):
        optimizer.backward(ZOO["gpt2"].loss(module, step * 2 + rank))
        optimizer.step()
        if rank == 1 and kept is None:
            kept = parameter.data
    state = module.full_state_dict(rank0_only=False)
    sees_new_values = kept is None or torch.equal(kept, next(iter(state.values())))
    module.close()
    return state, sees_new_values


def test_an_alias_that_one_rank_keeps() -> None:
    """It sees new values, and the other rank has a part of them."""
    expected = averaged_plain("gpt2", 2, 1)
    for state, sees_new_values in run_ranks(train_with_an_alias_of_one_rank, 2, timeout_s=60.0):
        assert sees_new_values
        name = next(iter(state))
        torch.testing.assert_close(state[name], expected[name], rtol=2e-4, atol=2e-5)


def read_what_one_rank_keeps(is_written: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Rank 0 keeps a tensor over the first chunk, which so stays there and goes elsewhere."""
    rank = dist.get_rank()
    model = make("gpt2")
    plan = replace(make_plan(model, world_size=2, **OPTIONS["cpu"]), rcache_blocks=2)
    module = ElixirModule(model, plan, device=torch.device("cpu"))
    parameters = list(model.parameters())
    kept = parameters[0].data
    if rank != 0:
        del kept
    seen = []
    with torch.no_grad():
        for _ in range(2):
            if is_written:
                parameters[0].mul_(2.0)
            for parameter in parameters:  # the first chunk goes, where it can
                seen.append(float(parameter.double().sum()))
            seen.append(float(parameters[0].double().sum()))
            sums = torch.tensor(seen)
            dist.all_reduce(sums)  # of the user's: the engine does not know of it
            seen.append(float(sums.sum()))
    state = module.full_state_dict(rank0_only=False)
    assert (module.stats().evictions > 0) or rank == 0
    module.close()
    return seen, state


@pytest.mark.parametrize("is_written", telling([False, True], "True"))
def test_reads_of_what_one_rank_has_kept(is_written: bool) -> None:
    """Both wait for each other, or neither; and what was written to what one rank has kept reaches the other."""
    (seen, state), other = run_ranks(read_what_one_rank_keeps, 2, is_written, timeout_s=60.0)
    first = next(iter(make("gpt2").parameters())).detach() * (4.0 if is_written else 1.0)
    assert seen == other[0]
    assert torch.equal(next(iter(state.values())), first)
    assert seen[-2] == float(first.double().sum())


def read_beside_a_shortage(is_room_made: bool) -> list[float]:
    """Rank 1 alone gives up what it can between two reads."""
    model = make("gpt2")
    plan = make_plan(model, world_size=2, **OPTIONS["cpu"])
    module = ElixirModule(model, plan, device=torch.device("cpu"))
    first, *others = model.parameters()
    seen = []
    with torch.no_grad():
        for parameter in (first, others[-1]):
            seen.append(float(parameter.double().sum()))
        if dist.get_rank() == 1:
            engine = module.engine
            if is_room_made:
                engine.make_room()
            else:
                engine.iterations.relieve(())
        seen.append(float(first.double().sum()))
        sums = torch.tensor(seen)
        dist.all_reduce(sums)  # of the user's: the engine does not know of it
    module.close()
    return seen


@pytest.mark.parametrize("is_room_made", [False, True])
def test_reads_where_memory_ran_out_on_one_rank(is_room_made: bool) -> None:
    seen, others = run_ranks(read_beside_a_shortage, 2, is_room_made, timeout_s=60.0)
    assert seen == others

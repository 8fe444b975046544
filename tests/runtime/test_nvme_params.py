"""Parameters on NVMe give, bit for bit, what parameters in host memory give; gradients pass through a few buffers."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_elixir.errors import PlanError, StateError, StorageError
from lightning_elixir.optim import HybridAdam
from lightning_elixir.optim.gradient_sums import Addition
from lightning_elixir.plan.io import plan_from_dict, plan_to_dict
from lightning_elixir.plan.memory import PARAM_BUFFERS, STAGING_BUFFERS
from lightning_elixir.plan.types import Tier, UpdateTiming
from lightning_elixir.runtime.accumulation import HostSums
from lightning_elixir.storage.nvme import direct
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers import nvme as nvme_bodies
from tests.helpers import streamed_updates as bodies
from tests.helpers.accumulation import held_until_waited_for
from tests.helpers.dist import run_ranks
from tests.helpers.nvme import BF16, WRITES, failing, new_training, step, train_rank, whole_write
from tests.helpers.plans import make_plan
from tests.helpers.streamed_updates import CPU, HOWS, How, assert_same, result_of, use_small_slots
from tests.helpers.tiers import crossed, telling
from tests.helpers.zoo import ZOO, make

SITE = "nvme_param"
MANY = [
    "accumulated_clipped",
    "bf16_true_clipped_by_value",
    "frozen",
    "scaled_clipped",
    "tied",
    "unused",
    "unused_fp32",
]


@pytest.mark.full  # combinations
@pytest.mark.parametrize("name", telling(MANY, "accumulated_clipped", "frozen", "unused_fp32"))
def test_every_way_to_train(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_slots(monkeypatch)
    nvme_bodies.check_every_way(HOWS[name], SITE, UpdateTiming.INSIDE_BACKWARD, CPU, monkeypatch)


@pytest.mark.full
def test_small_rcache_and_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    nvme_bodies.check_losses(SITE, CPU, monkeypatch)


@pytest.mark.full  # tests/runtime/test_nvme.py has ranks
@pytest.mark.parametrize("how", telling(["tied", "accumulated_clipped", "frozen"], "accumulated_clipped"))
def test_several_ranks(how: str) -> None:
    timing = UpdateTiming.INSIDE_BACKWARD
    expected = run_ranks(train_rank, 2, HOWS[how], "host", timing, {})
    assert_same(run_ranks(train_rank, 2, HOWS[how], SITE, timing, {})[0], expected[0])


@pytest.mark.parametrize(("name", "read", "written"), [("bf16", 12 + 2, 12 + 2 + 2), ("fp32", 12 + 4, 12 + 4)])
def test_bytes_of_a_step(name: str, read: int, written: int) -> None:
    """States and gradients for the update, and parameters for every fetch; states, new values and gradients back."""
    module, optimizer = new_training(HOWS[name], SITE)
    numel, itemsize = sum(c.numel for c in module.plan.chunks), HOWS[name].dtype.itemsize
    for number in range(3):
        module.reset_stats()
        step((module, optimizer), HOWS[name], number)
        optimizer.synchronize()
        stats = module.stats()
    fetched = stats.h2d_bytes
    assert fetched >= numel * itemsize
    assert stats.nvme_read_bytes == read * numel + fetched
    assert stats.nvme_written_bytes == written * numel
    held, largest = stats.held_bytes, max(c.nbytes for c in module.plan.chunks)
    assert not {"cpu_param", "cpu_grad", "cpu_master", "cpu_states"} & set(held)
    assert held["cpu_param_buffer"] <= PARAM_BUFFERS * largest
    assert held["cpu_grad_staging"] <= STAGING_BUFFERS * (largest + 4096)
    assert held.get("nvme_param", 0) == (2 * numel if name == "bf16" else 0)
    assert module.engine.device_bytes() == held["replica"] + held["grad_block"]
    module.close()


def test_gradients_are_dropped_one_by_one_without_reading_the_shard_for_each() -> None:
    module, optimizer = training = new_training(site=SITE)
    step(training, BF16, 0)
    optimizer.backward(ZOO[BF16.name].loss(module, 1))
    module.engine.synchronize()
    model = module.module
    chunk = max(module.engine.chunks, key=lambda c: len(c.parameters))
    assert len(chunk.parameters) > 2
    kept = {name: value.clone() for name, value in module.full_grads().items()}
    module.reset_stats()
    for parameter in chunk.parameters[:2]:
        parameter.grad = None
    left = {m.fqn for m in chunk.spec.members[2:]}
    grads = module.full_grads()
    assert set(grads) == set(kept) - {m.fqn for m in chunk.spec.members[:2]}
    assert all(torch.equal(grads[name], kept[name]) for name in grads)
    assert left <= set(grads)
    numel = sum(c.numel for c in module.plan.chunks)
    assert (module.stats().nvme_read_bytes, module.stats().nvme_written_bytes) == (2 * numel, 0)  # all, to be seen
    module.reset_stats()
    assert chunk.parameters[2].grad is not None
    assert module.stats().nvme_read_bytes == 2 * 2 * chunk.spec.numel  # this one, to be changed, and to be seen
    assert module.stats().nvme_written_bytes == 2 * chunk.spec.numel
    module.reset_stats()
    model.zero_grad()  # of all
    assert module.full_grads() == {}
    assert module.stats().nvme_read_bytes == module.stats().nvme_written_bytes == 0
    module.close()


def test_backward_waits_for_a_free_buffer() -> None:
    """While no gradient is stored, only as many set out as there are buffers: then the first wait for one comes. What
    holds them up is their own thread, not the disk, which parameters come from as well."""
    module, optimizer = training = new_training(site=SITE)
    for number in range(2):
        step(training, BF16, number)
    optimizer.synchronize()
    assert len(module.plan.chunks) > STAGING_BUFFERS + 1
    with held_until_waited_for(lambda: module.stats().held_bytes["cpu_grad_staging"]) as held:
        step(training, BF16, 2)
        optimizer.synchronize()
    ((num_on_their_way, staging_bytes),) = held.seen
    assert num_on_their_way == STAGING_BUFFERS
    assert staging_bytes <= STAGING_BUFFERS * (max(c.nbytes for c in module.plan.chunks) + 4096)
    assert len(held.tasks) == len(module.plan.chunks)
    assert_same(result_of(module, optimizer), replace(bodies.train_on_host(replace(BF16, steps=3)), skipped=[]))
    module.close()


class Reused(nn.Module):
    """Four layers, of which one may be used again after all of them: in backward, its gradients complete early then,
    as far as anybody knows, and once more later on."""

    again = 2

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(4))

    def forward(self, x: Tensor, num_uses: int) -> Tensor:
        x = x.requires_grad_()
        for layer in [*self.layers, *[self.layers[self.again]] * (num_uses - 1)]:
            y: Tensor = checkpoint(layer, x, use_reentrant=True)  # each has a backward of its own inside the backward
            x = x + y
        return x

    def loss(self, model: Any, seed: int, num_uses: int) -> Tensor:
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(seed)).bfloat16()
        result: Tensor = model(x, num_uses).float().square().mean()
        return result


def plain_sums(model: Reused, uses: tuple[int, ...]) -> dict[str, Tensor]:
    """In plain PyTorch: within the first backward in bf16, as autograd adds, afterwards each gradient as it arrives to
    an fp32 sum. What is known to come again in one backward arrives as one."""
    arrived: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: arrived[name].append(grad.clone()))
    sums: dict[str, Tensor] = {}
    known = 1
    for seed, num_uses in enumerate(uses):
        model.loss(model, seed, num_uses).backward()
        for name, parameter in model.named_parameters():
            grads, arrived[name] = arrived[name], []
            assert parameter.grad is not None
            if seed == 0:
                sums[name] = parameter.grad.float()
            else:
                for part in (grads[:known], grads[known:]):
                    sums[name] += sum(part[1:], part[0]).float() if part else 0.0
            parameter.grad = None
        known = num_uses
    return sums


WIDE, NARROW = torch.float32, torch.bfloat16
TO_DISK: dict[tuple[bool, tuple[int, ...]], list[Any]] = {
    (True, (1, 2, 3)): [(None, WIDE, Addition.PUT), *[(WIDE, WIDE, Addition.ADD)] * 4],
    (True, (2, 3)): [(None, WIDE, Addition.PUT), (WIDE, WIDE, Addition.ADD_ROUNDED), *[(WIDE, WIDE, Addition.ADD)] * 2],
    (False, (1, 2)): [(None, NARROW, Addition.PUT), (NARROW, WIDE, Addition.ADD), (WIDE, WIDE, Addition.ADD)],
    (False, (2, 3)): [
        (None, NARROW, Addition.PUT),
        (NARROW, NARROW, Addition.ADD),
        (NARROW, WIDE, Addition.ADD),
        (WIDE, WIDE, Addition.ADD),
    ],
}
"""By whether it is known that backwards are added up, and how often the layer is used in each of them: the dtypes of
its sum on the disk before and after each 16-bit gradient, and what was done. One in each backward comes late, but in
the first of those that use it once."""


@pytest.mark.parametrize(("is_known", "uses"), TO_DISK)
def test_late_gradients_are_added_to_the_sum_on_the_disk(
    is_known: bool, uses: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, plain = Reused(), Reused()
    plain.load_state_dict(model.state_dict())
    masters = {name: nn.Parameter(p.detach().clone()) for name, p in plain.named_parameters()}
    expected = plain_sums(plain.bfloat16(), uses)
    plan = make_plan(model, placement_policy="cpu", compute_dtype=torch.bfloat16, chunk_size=2048)
    plan = replace(plan, chunks=tuple(bodies.SITES[SITE](c) for c in plan.chunks))
    inner = HybridAdam(model.parameters(), lr=1e-2, weight_decay=0.05)
    module = ElixirModule(model, plan, dtype=torch.bfloat16)
    optimizer = ElixirOptimizer(module, inner)
    reused = next(c.id for c in plan.chunks if f"layers.{model.again}.weight" in [m.fqn for m in c.members])
    assert len(plan.chunks) == len(model.layers)
    optimizer.backward(model.loss(module, 9, 1))  # from here on one gradient is expected
    optimizer.zero_grad()
    module.engine.reducer.landing.expect_accumulation(is_known)
    seen: list[Any] = []
    submit = HostSums.submit_to_disk

    def noted(self: HostSums, grad: Tensor, on_disk: Any, dtypes: Any, addition: Any, earlier: Any) -> Any:
        if on_disk.chunk_id == reused:
            assert grad.dtype == torch.bfloat16
            seen.append((*dtypes, addition))
        return submit(self, grad, on_disk, dtypes, addition, earlier)

    monkeypatch.setattr(HostSums, "submit_to_disk", noted)
    for seed, num_uses in enumerate(uses):
        optimizer.backward(model.loss(module, seed, num_uses))
    found = module.full_grads()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []
    assert seen == TO_DISK[is_known, uses]
    optimizer.step()
    reference = torch.optim.AdamW(masters.values(), lr=1e-2, weight_decay=0.05)
    for name, master in masters.items():
        master.grad = expected[name]
    reference.step()
    torch.testing.assert_close(module.full_state_dict(), {n: m.detach() for n, m in masters.items()})
    module.close()


@pytest.mark.parametrize(
    "write",
    telling(
        [pytest.param(write, id=name) for name, write in {**WRITES, "full_parameters": whole_write}.items()],
        "full_parameters",
    ),
)
@pytest.mark.parametrize("name", telling(["bf16", "fp32", "frozen"], "bf16", "frozen"))
def test_what_users_write_is_kept(write: Callable[[ElixirModule], None], name: str) -> None:
    nvme_bodies.check_writes(write, HOWS[name], SITE)


def test_a_dropped_gradient_and_whole_gradients() -> None:
    results = []
    for place in ("host", SITE):
        module, optimizer = training = new_training(BF16, place)
        step(training, BF16, 0)
        optimizer.backward(ZOO[BF16.name].loss(module, 1))
        next(iter(module.module.parameters())).grad = None
        optimizer.backward(ZOO[BF16.name].loss(module, 2))
        grads = module.full_grads()
        norm = float(optimizer.grad_norm())
        optimizer.step()
        results.append((result_of(module, optimizer), grads, norm))
        module.close()
    assert_same(results[1][0], results[0][0])
    assert results[1][2] == results[0][2]
    assert all(torch.equal(results[1][1][k], v) for k, v in results[0][1].items())


@crossed(told=["0-preadv-UpdateTiming.INSIDE_BACKWARD"], after=[0, 7], call=["preadv", "pwritev"], timing=UpdateTiming)
def test_a_disk_that_fails_ends_the_run_and_hangs_nowhere(
    call: str, after: int, timing: UpdateTiming, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, optimizer = training = new_training(BF16, SITE, timing)
    for number in range(2):
        step(training, BF16, number)
    optimizer.synchronize()
    with monkeypatch.context() as patch:
        patch.setattr(direct.os, call, failing(call, errno.EIO, after))

        def go_on() -> None:
            for number in range(2, 4):
                step(training, BF16, number)
            optimizer.synchronize()

        with pytest.raises(StorageError, match="Input/output error"):
            go_on()
    for use in (module.full_state_dict, optimizer.state_dict, optimizer.synchronize, optimizer.step):
        with pytest.raises((StateError, StorageError)):  # the disk works again, and all is lost all the same
            use()
    module.close()


def test_what_no_runtime_could_obey_is_refused() -> None:
    model = make("gpt2")
    plan = bodies.plan_for(model, BF16, SITE)
    assert plan_from_dict(plan_to_dict(plan)) == plan
    for change, message in (
        ({"optim_tier": Tier.CPU}, "states must be there"),
        ({"is_persistent": True}, "stays on the device"),
    ):
        wrong = replace(plan, chunks=tuple(replace(c, **change) for c in plan.chunks))
        with pytest.raises(PlanError, match=message):
            ElixirModule(model, wrong, dtype=torch.bfloat16)
        with pytest.raises(PlanError, match=message):
            plan_from_dict(plan_to_dict(wrong))


PROGRAM = """
    import sys
    import torch
    from torch import nn
    from lightning_elixir import ElixirModule, ElixirOptimizer, HybridAdam
    from tests.helpers.plans import make_plan
    from tests.helpers.own_memory import own_bytes

    folder, fraction = sys.argv[1], float(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(64)])
    optimizer = HybridAdam(model.parameters(), lr=1e-3)
    plan = make_plan(
        model, placement_policy="cpu", chunk_size=2**19, compute_dtype=torch.bfloat16,
        nvme_offload_fraction=1.0, nvme_offload_param_fraction=fraction,
    )
    module = ElixirModule(model, plan, dtype=torch.bfloat16, nvme_offload_dir=folder)
    optimizer = ElixirOptimizer(module, optimizer)
    x = torch.randn(4, 512)
    for _ in range(3):
        loss = module(x).float().square().mean()
        optimizer.backward(loss)
        optimizer.step()
    optimizer.synchronize()
    print(own_bytes(), sum(c.numel for c in plan.chunks), plan.notes["host_bytes"], loss.item())
"""


@pytest.mark.full
def test_host_memory_is_lower_by_parameters_and_gradients(tmp_path: Path) -> None:
    seen = []
    for fraction in (0.0, 1.0):
        command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path), str(fraction)]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        seen.append([float(x) for x in done.stdout.split()])
    (own, _, planned, loss), (lower_own, _, lower_planned, same_loss) = seen
    assert same_loss == loss
    expected = planned - lower_planned
    assert expected > 30e6
    assert 0.8 * expected < own - lower_own < 1.2 * expected, (own - lower_own, expected)


def refuse_whole_shards() -> str:
    how: How = BF16
    model = make("gpt2")
    plan = bodies.plan_for(model, how, SITE, world_size=dist.get_world_size(), enable_distributed_storage=False)
    with pytest.raises(PlanError) as caught:
        ElixirModule(model, plan, dtype=torch.bfloat16)
    return str(caught.value)


def test_whole_shards_on_every_rank_are_refused() -> None:
    assert "enable_distributed_storage=True" in run_ranks(refuse_whole_shards, 2)[0]

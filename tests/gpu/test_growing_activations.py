"""A GPU with so much memory and no more: sequences grow, and replicas make room for them."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_elixir.core.device import CudaDevice
from lightning_elixir.errors import CapacityError
from lightning_elixir.optim.hybrid_adam import HybridAdam
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.plans import make_plan

pytestmark = pytest.mark.gpu

LENGTHS = (128, 128, 160, 288, 320, 320, 128, 128, 128, 128, 128)
CHUNK_BYTES = 16 << 20


@pytest.fixture(autouse=True)
def _restore_memory_fraction() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def make_model() -> nn.Module:
    """100M parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=8, n_embd=1024, n_head=16, vocab_size=512, n_positions=512,
        attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
        bos_token_id=1, eos_token_id=2, loss_type="ForCausalLM",
    )  # fmt: skip
    return GPT2LMHeadModel(config).train()


def loss_of(module: ElixirModule, seed: int, length: int) -> Tensor:
    tokens = torch.randint(0, 512, (4, length), generator=torch.Generator().manual_seed(seed)).cuda()
    loss: Tensor = module(input_ids=tokens, labels=tokens).loss
    return loss


def build() -> tuple[ElixirModule, ElixirOptimizer]:
    """Shards on the host, and a block of the rCache for every replica."""
    model = make_model()
    plan = make_plan(model, placement_policy="cpu", chunk_size=CHUNK_BYTES)
    plan = replace(plan, rcache_blocks=sum(plan.blocks_of(c.id) for c in plan.chunks))
    module = ElixirModule(model, plan)
    return module, ElixirOptimizer(module, HybridAdam(model.parameters(), lr=1e-3))


def step(module: ElixirModule, optimizer: ElixirOptimizer, seed: int, length: int) -> None:
    optimizer.backward(loss_of(module, seed, length))
    optimizer.step()


def train(lengths: Sequence[int]) -> dict[str, Tensor]:
    """Undisturbed."""
    module, optimizer = build()
    for seed, length in enumerate(lengths):
        step(module, optimizer, seed, length)
    state = module.full_state_dict()
    module.close()
    return state


@pytest.fixture(scope="module")
def limit_bytes() -> int:
    """Room for the replicas and for activations twice as large as those of the first step."""
    module, optimizer = build()
    module.sample_activations()
    step(module, optimizer, 0, LENGTHS[0])
    activations = module.peak_activation_bytes()
    plan = module.plan
    module.close()
    return 2 * activations + (plan.rcache_blocks + 2) * plan.block_bytes


def limit_beside_what_is_there(nbytes: int) -> None:
    """Workspaces of libraries are there, and what earlier tests have left."""
    gc.collect()
    limit(nbytes + torch.cuda.memory_allocated())


def limit(nbytes: int) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(nbytes / torch.cuda.mem_get_info()[1])


def different(module: ElixirModule, expected: dict[str, Tensor]) -> list[str]:
    actual: dict[str, Any] = module.full_state_dict()
    module.close()
    return [name for name, value in expected.items() if not torch.equal(actual[name], value)]


def test_the_rcache_gives_way_and_comes_back(limit_bytes: int) -> None:
    expected = train(LENGTHS)
    limit_beside_what_is_there(limit_bytes)
    module, optimizer = build()
    planned = module.plan.rcache_blocks
    budgets = []
    for seed, length in enumerate(LENGTHS):
        step(module, optimizer, seed, length)
        budgets.append(module.engine.rcache.budget_blocks)
    assert budgets[:2] == [planned, planned]
    assert planned > budgets[3] > budgets[4]
    assert budgets[-1] == planned
    assert module.stats().evictions > 0
    assert module.engine.iterations.growth.num_shortages == 0
    assert different(module, expected) == []


def test_what_others_have_left_is_there_for_a_block() -> None:
    """The memory that activations have left in pieces is smaller than a block, and most of what may be used."""
    limit(torch.cuda.memory_reserved() + (1 << 30))
    device = CudaDevice(torch.device("cuda", 0))
    pieces = [torch.empty(64 << 20, dtype=torch.uint8, device="cuda") for _ in range(12)]
    del pieces
    block = torch.empty(0, dtype=torch.uint8, device="cuda")
    device.allocate(block.untyped_storage(), 512 << 20)
    assert block.untyped_storage().nbytes() == 512 << 20


def test_without_giving_way_memory_runs_out_and_the_step_runs_again(limit_bytes: int) -> None:
    expected = train(LENGTHS[:6])
    limit_beside_what_is_there(limit_bytes)
    module, optimizer = build()
    module.engine.set_memory_limit(None)
    num_again = 0
    for seed, length in enumerate(LENGTHS[:6]):
        is_full = False
        try:
            optimizer.backward(loss_of(module, seed, length))
        except (torch.OutOfMemoryError, CapacityError):
            num_again += 1
            is_full = True
        if is_full:
            gc.collect()
            assert module.engine.make_room()
            optimizer.backward(loss_of(module, seed, length))
        optimizer.step()
    assert num_again == 1
    assert module.engine.rcache.budget_blocks < module.plan.rcache_blocks
    assert different(module, expected) == []


def test_times_are_those_of_the_device() -> None:
    module, optimizer = build()
    step(module, optimizer, 0, 128)
    step(module, optimizer, 1, 128)
    module.engine.sample_times(True)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    optimizer.backward(loss_of(module, 2, 128))
    end.record()
    optimizer.step()
    end.synchronize()
    stats = module.stats()
    assert stats.compute_s is not None
    assert stats.exposed_wait_s is not None
    total_s = begin.elapsed_time(end) / 1000
    assert 0 < stats.compute_s < total_s
    assert 0.5 * total_s < stats.compute_s + stats.exposed_wait_s < 1.02 * total_s
    profile = module.engine.step_profile()
    assert profile is not None
    assert profile.compute_s == pytest.approx(stats.compute_s)
    assert profile.peak_non_model_bytes > 0
    module.close()

"""The engine on a CUDA device: the bodies of the CPU tests, with streams, pinned memory and a memory pool."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.dist import run_ranks
from tests.helpers.plans import make_plan
from tests.helpers.ranks import OPTIONS, averaged_plain, train_copies, train_rank
from tests.helpers.training import Scheme, different_names, train_elixir, train_plain
from tests.helpers.zoo import ZOO, make

pytestmark = pytest.mark.gpu

SCHEMES = {
    "fp32": Scheme(device="cuda"),
    "fp32_accumulated_clipped": Scheme(device="cuda", micro_batches=2, clip_norm=0.05),
    "bf16": Scheme(device="cuda", dtype=torch.bfloat16),
    "bf16_autocast_accumulated": Scheme(device="cuda", dtype=torch.bfloat16, autocast=True, micro_batches=2),
    "bf16_true": Scheme(device="cuda", dtype=torch.bfloat16, master=False),
    "fp16": Scheme(device="cuda", dtype=torch.float16, scale=256.0),
    "fp16_autocast_clipped": Scheme(device="cuda", dtype=torch.float16, autocast=True, scale=256.0, clip_norm=0.05),
    "fp16_true": Scheme(device="cuda", dtype=torch.float16, master=False, eps=1e-3),  # 1e-8 is zero in fp16
}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "cuda": {"placement_policy": "cuda", "chunk_size": 8 * 1024},
    "cpu": {"placement_policy": "cpu", "chunk_size": 8 * 1024},
    "cpu_no_prefetch": {"placement_policy": "cpu", "chunk_size": 8 * 1024, "prefetch": False},
    "const": {
        "placement_policy": "const",
        "chunk_size": 8 * 1024,
        "offload_optim_frac": 0.5,
        "offload_param_frac": 0.3,
    },
}


# cuDNN wants the weights of an RNN in one piece and copies them at every call where they are not.
@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", ZOO)
def test_every_model(name: str, placement: str) -> None:
    scheme = SCHEMES["fp32"]
    expected = train_plain(name, scheme)
    small = {"chunk_size": 4 * 1024} if name in ("mlp", "conv") else {}
    run = train_elixir(name, scheme, **{**PLACEMENTS[placement], **small})
    is_exact = placement == "cuda"  # the user's torch.optim.AdamW rounds differently on the CPU
    if is_exact:
        assert run.losses == expected.losses
        assert different_names(run, expected) == []
    else:
        assert run.losses == pytest.approx(expected.losses, rel=1e-4)
    stats = run.engine.stats()
    if placement.startswith("cpu"):
        assert stats.evictions > 0
    run.engine.close()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["gpt2_checkpoint", "odd"])
def test_precision(name: str, scheme: str) -> None:
    how = SCHEMES[scheme]
    expected = train_plain(name, how)
    run = train_elixir(name, how, **PLACEMENTS["cuda"])
    assert run.losses == expected.losses
    assert different_names(run, expected) == []
    run.engine.close()


def test_overflow_skips_the_step() -> None:
    model = make("gpt2")
    module = ElixirModule(
        model,
        make_plan(model, compute_dtype=torch.float16, placement_policy="cpu", chunk_size=8 * 1024),
        dtype=torch.float16,
    )
    optimizer = ElixirOptimizer(module, torch.optim.AdamW(model.parameters(), lr=1e-2), initial_scale=2.0**24)
    before = module.full_state_dict()
    skipped = 0
    for seed in range(30):
        optimizer.backward(ZOO["gpt2"].loss(module, seed))
        optimizer.step()
        if not optimizer.is_step_skipped:
            break
        skipped += 1
        after = module.full_state_dict()
        assert all(torch.equal(before[k], after[k]) for k in before)
        assert optimizer.loss_scale == 2.0**24 * 0.5**skipped
    assert 0 < skipped < 30
    assert any(not torch.equal(before[k], v) for k, v in module.full_state_dict().items())
    module.close()


def test_replicas_really_leave_the_device() -> None:
    """Peak device memory of a step is that of the plan: far less than the model."""
    # cuBLAS takes a workspace on each thread that multiplies: this one's, and that of backward.
    torch.nn.Linear(1024, 1024, device="cuda")(torch.randn(8, 1024, device="cuda")).sum().backward()
    empty = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(40)])  # 160 MiB in fp32
    plan = make_plan(model, placement_policy="cpu", chunk_size=4 << 20)
    module = ElixirModule(model, plan)
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.01))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    assert before - empty < 1 << 20
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        optimizer.backward(module(torch.randn(8, 1024, device="cuda")).square().mean())
        optimizer.step()
    # blocks of the rCache + gradient blocks + the gradient autograd is about to hand over + activations and temporaries
    allowed = (plan.rcache_blocks + 2 + 1) * plan.block_bytes + (12 << 20)
    assert torch.cuda.max_memory_allocated() - before < allowed
    assert module.stats().prefetches > 0
    module.close()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= empty


def slow_lanes(monkeypatch: pytest.MonkeyPatch, cycles: int) -> None:
    """Every transfer starts late: what does not wait for it works on old or foreign bytes."""
    from lightning_elixir.core import device as core_device

    real = core_device._CudaLane.issue

    @contextmanager
    def issue(self: Any) -> Iterator[None]:
        with real(self):
            torch.cuda._sleep(cycles)
            yield

    monkeypatch.setattr(core_device._CudaLane, "issue", issue)


@pytest.mark.parametrize("clip", [False, True])
def test_slow_transfers_are_waited_for(monkeypatch: pytest.MonkeyPatch, clip: bool) -> None:
    """Transfers delayed by milliseconds change nothing, with no host synchronisation by the training loop to help."""
    from lightning_elixir.optim.hybrid_adam import HybridAdam

    states = []
    for is_slow in (False, True):
        if is_slow:
            slow_lanes(monkeypatch, 10_000_000)
        model = make("gpt2")
        plan = make_plan(model, compute_dtype=torch.bfloat16, **PLACEMENTS["cpu"])
        module = ElixirModule(model, plan, dtype=torch.bfloat16)
        optimizer = ElixirOptimizer(module, HybridAdam(model.parameters(), lr=1e-2))
        for seed in range(4):
            optimizer.backward(ZOO["gpt2"].loss(module, seed))
            if clip:
                optimizer.clip_grad_norm_(0.1)
            optimizer.step()
        states.append(module.full_state_dict())
        module.close()
    assert [k for k in states[0] if not torch.equal(states[0][k], states[1][k])] == []


@pytest.mark.several_gpus(2)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", ["gpt2", "branching"])
def test_two_gpus(name: str, options: str) -> None:
    expected = averaged_plain(name, 2, 2)
    state, _ = run_ranks(train_rank, 2, name, 2, OPTIONS[options], "cuda", device="cuda")[0]
    skipped = {f"transformer.h.{i}.attn.c_attn.bias" for i in range(3)}
    for key, value in expected.items():
        if key not in skipped and value.is_floating_point():
            torch.testing.assert_close(state[key], value, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("world_size", "copies", "options"),
    [
        pytest.param(world_size, 2, options, marks=pytest.mark.several_gpus(world_size))
        for world_size in (2, 4)
        for options in ("cpu", "cuda", "sharded_gpu")
    ],
)
def test_copies_of_all_parameters(world_size: int, copies: int, options: str) -> None:
    expected = averaged_plain("gpt2", world_size, 2)
    runs = run_ranks(train_copies, world_size, copies, "gpt2", OPTIONS[options], "cuda", device="cuda")
    state, stats = runs[0]
    assert stats["reduced_across_bytes"] > 0
    skipped = {f"transformer.h.{i}.attn.c_attn.bias" for i in range(3)}
    for key, value in expected.items():
        if key not in skipped and value.is_floating_point():
            torch.testing.assert_close(state[key], value, rtol=2e-3, atol=2e-3)


def test_hybrid_adam_is_bitwise_the_same_wherever_it_runs() -> None:
    from lightning_elixir.optim.hybrid_adam import HybridAdam

    states = []
    for options in PLACEMENTS.values():
        model = make("gpt2")
        module = ElixirModule(
            model, make_plan(model, compute_dtype=torch.bfloat16, **options), dtype=torch.bfloat16, autocast=True
        )
        optimizer = ElixirOptimizer(module, HybridAdam(model.parameters(), lr=1e-2, weight_decay=0.1))
        for seed in range(4):
            optimizer.backward(ZOO["gpt2"].loss(module, seed))
            optimizer.clip_grad_norm_(0.1)
            optimizer.step()
        states.append(module.full_state_dict())
        module.close()
    for state in states[1:]:
        assert [k for k in state if not torch.equal(state[k], states[0][k])] == []


def test_replan_keeps_everything() -> None:
    scheme = replace(SCHEMES["bf16"], steps=2)
    model = make("gpt2")
    plans = [
        make_plan(model, compute_dtype=torch.bfloat16, **{**PLACEMENTS[key], "chunk_size": 8 * 1024})
        for key in ("cpu", "cuda", "const", "cpu")
    ]
    module = ElixirModule(model, plans[0], dtype=torch.bfloat16)
    from lightning_elixir.optim.hybrid_adam import HybridAdam

    optimizer = ElixirOptimizer(module, HybridAdam(model.parameters(), lr=1e-2))
    reference_model = make("gpt2")
    reference = ElixirModule(reference_model, plans[1], dtype=torch.bfloat16)
    reference_optimizer = ElixirOptimizer(reference, HybridAdam(reference_model.parameters(), lr=1e-2))
    for step in range(scheme.steps * len(plans)):
        if step % scheme.steps == 0:
            module.replan(plans[step // scheme.steps])
        for m, o in ((module, optimizer), (reference, reference_optimizer)):
            o.backward(ZOO["gpt2"].loss(m, step))
            o.step()
    actual, expected = module.full_state_dict(), reference.full_state_dict()
    assert [k for k in actual if not torch.equal(actual[k], expected[k])] == []
    module.close()
    reference.close()

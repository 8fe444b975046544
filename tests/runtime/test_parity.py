"""The engine gives plain PyTorch's numbers, bit for bit, while replicas come and go."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_elixir import ElixirModule
from tests.helpers.plans import make_plan
from tests.helpers.tiers import crossed, telling
from tests.helpers.training import Run, Scheme, different_names, train_elixir, train_plain
from tests.helpers.zoo import ZOO

FP32 = Scheme()
# (scheme, why) beyond plain fp32
SCHEMES = {
    "bf16": Scheme(dtype=torch.bfloat16),
    "bf16_autocast": Scheme(dtype=torch.bfloat16, autocast=True),
    "bf16_autocast_accumulated": Scheme(dtype=torch.bfloat16, autocast=True, micro_batches=3),
    "bf16_accumulated_clipped": Scheme(dtype=torch.bfloat16, micro_batches=2, clip_norm=0.05),
    "bf16_true": Scheme(dtype=torch.bfloat16, master=False),
    "bf16_true_accumulated": Scheme(dtype=torch.bfloat16, master=False, micro_batches=2),
    "fp32_clipped": Scheme(clip_norm=0.05),
    "fp32_accumulated_clipped": Scheme(micro_batches=3, clip_norm=0.05),
    "fp32_clipped_by_value": Scheme(clip_value=0.01),
}


def assert_same(actual: Run, expected: Run, rtol: float = 0.0) -> None:
    assert actual.losses == pytest.approx(expected.losses, rel=rtol, abs=0)
    if rtol:
        torch.testing.assert_close(actual.state, expected.state, rtol=rtol, atol=rtol)
    else:
        assert different_names(actual, expected) == []


@crossed(
    told=["gpt2-1", "odd-2", "branching-1", "tied-2", "recurrent-1", "gpt2_checkpoint_reentrant-2"],
    name=ZOO,
    micro_batches=[1, 2],
)
def test_all_resident(name: str, micro_batches: int) -> None:
    scheme = replace(FP32, micro_batches=micro_batches)
    run = train_elixir(name, scheme, placement_policy="cuda")
    # A layer shared by several reentrant checkpoints gets several gradients a backward; plain PyTorch adds each to the
    # running total, the engine adds up each backward first: another order of summation.
    is_reordered = name == "checkpoint_reentrant" and micro_batches > 1
    assert_same(run, train_plain(name, scheme), rtol=1e-4 if is_reordered else 0.0)
    assert run.engine.stats().fetches == 0


@crossed(
    told=["checkpoint_reentrant-False", "tied-True", "odd-True", "branching-True", "gpt2_checkpoint-True"],
    name=ZOO,
    prefetch=[True, False],
)
def test_smallest_rcache(name: str, prefetch: bool) -> None:
    chunk_size = 4 * 1024 if name in ("mlp", "conv") else 8 * 1024
    run = train_elixir(name, FP32, placement_policy="cpu", chunk_size=chunk_size, prefetch=prefetch)
    assert_same(run, train_plain(name, FP32))
    stats = run.engine.stats()
    assert stats.fetches + stats.prefetches > len(run.engine.plan.chunks)
    assert stats.evictions > 0
    assert (stats.prefetches > 0) == prefetch


@crossed(
    together=1,
    options=[
        {"placement_policy": "static", "shard_param_frac": 0.5, "offload_optim_frac": 0.5},
        {"placement_policy": "const", "offload_optim_frac": 1.0},
        {"placement_policy": "const", "offload_optim_frac": 0.3, "offload_param_frac": 0.6},
        {"placement_policy": "cpu", "chunk_size": 512},
        {"placement_policy": "cpu", "chunk_size": 1 << 30},
    ],
    name=["gpt2", "odd", "conv", "tied", "frozen"],
)
def test_policies_and_chunk_sizes(name: str, options: dict[str, Any]) -> None:
    scheme = replace(FP32, micro_batches=2)
    assert_same(train_elixir(name, scheme, **{"chunk_size": 16 * 1024, **options}), train_plain(name, scheme))


@crossed(together=1, name=["gpt2_checkpoint", "odd", "tied", "frozen"], scheme=SCHEMES, policy=["cuda", "cpu", "const"])
def test_precision_accumulation_and_clipping(name: str, scheme: str, policy: str) -> None:
    how = SCHEMES[scheme]
    fractions = {"offload_optim_frac": 0.5, "offload_param_frac": 0.5} if policy == "const" else {}
    run = train_elixir(name, how, placement_policy=policy, chunk_size=8 * 1024, **fractions)
    expected = train_plain(name, how)
    assert_same(run, expected)
    assert run.norms == pytest.approx(expected.norms, rel=1e-6)  # the engine returns it in fp32
    assert len(run.norms) == (how.steps if how.clip_norm else 0)


@pytest.mark.parametrize("scheme", telling(SCHEMES, "fp32_clipped"))
def test_placements_agree_bitwise(scheme: str) -> None:
    how = SCHEMES[scheme]
    reference = train_elixir("gpt2", how, placement_policy="cuda")
    for options in (
        {"placement_policy": "cpu", "chunk_size": 4 * 1024},
        {"placement_policy": "cpu", "chunk_size": 20 * 1024, "prefetch": False},
        {"placement_policy": "const", "chunk_size": 8 * 1024, "offload_optim_frac": 0.5, "offload_param_frac": 0.3},
    ):
        run = train_elixir("gpt2", how, **options)
        assert run.losses == reference.losses
        assert run.norms == reference.norms
        assert different_names(run, reference) == []


@pytest.mark.parametrize("policy", ["cuda", "cpu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_padding_is_zeros(policy: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def filled(*size: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*size, **options)
        return tensor.fill_(7) if tensor.is_floating_point() else tensor

    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    plan = make_plan(model, placement_policy=policy, chunk_size=1024, compute_dtype=dtype)
    monkeypatch.setattr(torch, "empty", filled)
    module = ElixirModule(model, plan, dtype=dtype, device="cpu")
    for chunk in module.engine.chunks:
        shard = module.engine.store[chunk.id]
        is_padding = torch.ones(chunk.spec.numel, dtype=torch.bool)
        for member in chunk.spec.members:
            is_padding[member.offset : member.offset + member.numel] = False
        held = [t for t in (shard.master, shard.param, chunk.flat) if t is not None and t.untyped_storage().nbytes()]
        assert is_padding.any()
        assert held
        assert not any(t[is_padding].any() for t in held)

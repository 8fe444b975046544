"""What a plan says of the device's highest moment is what is there at that moment, blocks of its pool included."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from lightning_elixir import HybridAdam
from lightning_elixir.plan.memory import num_grad_blocks
from lightning_elixir.plan.regime import TrainingRegime
from lightning_elixir.plan.simulator.timeline import scheme_of, simulate_step
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.metered import use_metered_device
from tests.helpers.plans import make_plan
from tests.helpers.tiers import telling
from tests.plan.problems import HARDWARE

KIB = 1024
PLACES = {
    "gpu": {"placement_policy": "cuda"},
    "half": {
        "placement_policy": "const", "shard_param_frac": 1.0, "offload_optim_frac": 0.5, "offload_param_frac": 0.5,
    },
    "cpu": {"placement_policy": "cpu"},
}  # fmt: skip


def build(kind: str, *, is_checkpointed: bool) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2,
        "vocab_size": 128, "tie_word_embeddings": kind == "tied",
    }  # fmt: skip
    if kind == "moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16}
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **experts))
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(intermediate_size=96, **sizes))
    if is_checkpointed:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer versions have another name for it
            model.gradient_checkpointing_enable()
    return model.train()


CASES = [
    pytest.param(kind, place, chunk, num_backwards, is_checkpointed, id=name)
    for kind in ("moe", "llama", "tied")
    for place in PLACES
    for chunk in (32, 96)
    for num_backwards in ((1, 2, 3) if kind == "moe" else (1, 2))
    for is_checkpointed in (False, True)
    if (name := f"{kind}-{place}-{chunk}-{num_backwards}{'-recomputed' * is_checkpointed}")
]


@pytest.mark.parametrize(
    ("kind", "place", "chunk", "num_backwards", "is_checkpointed"),
    telling(CASES, "moe-cpu-96-1-recomputed", "llama-gpu-32-2", "tied-half-96-1"),
)
def test_the_highest_moment_is_what_is_counted(
    kind: str, place: str, chunk: int, num_backwards: int, is_checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(kind, is_checkpointed=is_checkpointed)
    device = use_metered_device(monkeypatch)
    plan = make_plan(model, **PLACES[place], chunk_size=chunk * KIB, compute_dtype=torch.bfloat16)
    with device.counting():
        module = ElixirModule(model, plan, dtype=torch.bfloat16)
        optimizer = ElixirOptimizer(module, HybridAdam(model.parameters(), lr=1e-8))
    engine = module.engine

    def step() -> None:
        with device.counting():
            for seed in range(num_backwards):
                tokens = torch.randint(0, 128, (2, 32), generator=torch.Generator().manual_seed(seed))
                optimizer.backward(module(input_ids=tokens, labels=tokens, use_cache=False).loss)
            optimizer.step()
            optimizer.zero_grad()

    step()
    engine.sample_activations(True)
    for _ in range(2):  # where an expert gets no token in one, its chunk is complete later
        step()
    profile = engine.step_profile()
    assert profile is not None
    engine.sample_activations(False)
    engine.synchronize()  # updates bring and free memory of the device
    foreign = device.allocated_bytes() - engine.device_bytes()
    device.restart_most()
    step()
    regime = TrainingRegime(accumulates=num_backwards > 1, most_backwards=num_backwards)
    timeline = simulate_step(plan, profile, HARDWARE["nominal"], scheme_of(plan, regime), is_detailed=True)
    # Above it is what need not come together: a full rCache and most gradients on their way, or being added up.
    blocks_apart = 5 if num_backwards > 1 else 2 * (place != "gpu")
    tolerance = blocks_apart * max(c.nbytes for c in plan.chunks)
    assert 0 <= timeline.peak_gpu_bytes - device.most_bytes <= tolerance + foreign
    assert max(point.total_bytes for point in timeline.memory) <= timeline.peak_gpu_bytes
    module.close()


class Experts(nn.Module):
    """Layers that loop over what was routed to each expert; those without tokens get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(16, 8, bias=False) for _ in range(6))
        self.experts = nn.ModuleList(
            nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(8))
            for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        for gate, experts in zip(self.gates, self.experts, strict=True):
            weights, chosen = gate(x).softmax(-1).max(-1)
            out = torch.zeros_like(x)
            for number, expert in enumerate(experts):
                (hit,) = torch.nonzero(chosen == number, as_tuple=True)
                if len(hit):
                    out = out.index_add(0, hit, weights[hit, None] * expert(x[hit]))
            x = x + out
        return x


def test_blocks_of_experts_that_tokens_come_to_in_some_steps_only_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks wait for gradients that do not come, and others get more than in the step before."""
    torch.manual_seed(0)
    model = Experts()
    device = use_metered_device(monkeypatch)
    plan = make_plan(model, placement_policy="cpu", chunk_size=10 * KIB)
    module = ElixirModule(model, plan)
    optimizer = ElixirOptimizer(module, HybridAdam(model.parameters(), lr=1e-8))
    engine = module.engine
    engine.sample_activations(True)
    for seed in range(4):  # blocks alone are counted
        device.give_back()
        device.restart_most()
        x = torch.randn(5, 16, generator=torch.Generator().manual_seed(seed))
        optimizer.backward(module(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        profile = engine.step_profile()
        assert profile is not None
        count = num_grad_blocks(plan.chunks, 1, profile.course.arrivals)
        assert 10 < count <= device.most_bytes // plan.block_bytes <= count + plan.rcache_blocks
    module.close()

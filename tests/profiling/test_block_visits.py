"""What blocks save, from fake tensors: beside real checkpoints, and beside what an engine sends to host memory."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from lightning_elixir import ElixirModule, profile_memory
from lightning_elixir.plan.activations import ActivationRequest, Fate, ModelBlock
from lightning_elixir.plan.fates import with_fates
from lightning_elixir.plan.profile import MemoryProfile
from lightning_elixir.profiling.blocks import blocks_of, found_blocks
from lightning_elixir.runtime.kept_attention import keeping_attention
from tests.helpers.plans import make_plan
from tests.helpers.tiers import full, telling


class Block(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)  # three views of one storage
        heads = [part.unflatten(-1, (4, -1)).transpose(1, 2) for part in (q, k, v)]
        y = nn.functional.scaled_dot_product_attention(*heads)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, depth: int = 4, is_checkpointed: bool = False, context_fn: Any = noop_context_fn) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.is_checkpointed = is_checkpointed
        self.context_fn = context_fn

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.is_checkpointed:
                x = checkpoint(block, x, use_reentrant=False, context_fn=self.context_fn)
            else:
                x = block(x)
        return x


def _step(model: nn.Module, inp: Mapping[str, Any]) -> None:
    model(inp["x"]).square().mean().backward()


def _profile(model: nn.Module, x: Tensor, **options: Any) -> MemoryProfile:
    return profile_memory(model, {"x": x}, _step, **options)


def _all(profile: MemoryProfile, fate: Fate) -> MemoryProfile:
    return with_fates(profile, [ModelBlock(name, fate) for name in dict.fromkeys(v.name for v in profile.visits)])


def test_watching_blocks_changes_nothing() -> None:
    model, x = Net(), torch.zeros(4, 256, 256)
    plain, watched = _profile(model, x), _profile(model, x, blocks=found_blocks(model))
    assert plain.visits == ()
    assert [visit.name for visit in watched.visits] == [f"blocks.{i}" for i in range(4)]
    for name in ("activation_bytes", "peak_bytes", "peak_module", "flops", "grad_bytes"):
        assert getattr(watched, name) == getattr(plain, name), name


@pytest.mark.parametrize(
    ("fate", "context_fn"), [(Fate.RECOMPUTE, noop_context_fn), (Fate.KEEP_ATTENTION, keeping_attention)]
)
@pytest.mark.parametrize("dtype", telling([None, torch.bfloat16], "None"))
def test_recomputing_is_foreseen_as_a_real_checkpoint_takes_it(
    dtype: torch.dtype | None, fate: Fate, context_fn: Any
) -> None:
    x = torch.zeros(8, 512, 256)
    model = Net()
    foreseen = _all(_profile(model, x, dtype=dtype, blocks=found_blocks(model)), fate)
    real = _profile(Net(is_checkpointed=True, context_fn=context_fn), x, dtype=dtype)
    assert foreseen.flops == real.flops
    # Workspaces of backward come with its own products here, and with the first that is recomputed there.
    assert 0.99 * real.activation_bytes <= foreseen.activation_bytes <= 1.05 * real.activation_bytes
    assert 0.99 * real.peak_bytes <= foreseen.peak_bytes <= 1.05 * real.peak_bytes
    moved = [sum(i.moved_bytes for i in p.timeline) for p in (foreseen, real)]
    assert moved[0] == pytest.approx(moved[1], rel=0.02)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
def test_attention_in_compiled_code_is_not_told_apart() -> None:
    model = Net(2)
    model.blocks[0].compile()
    visits = _profile(model, torch.zeros(8, 512, 256), blocks=found_blocks(model)).visits
    assert [len(visit.attention) for visit in visits] == [0, 1]
    (call,) = visits[1].attention
    assert call.nbytes >= 8 * 512 * 256 * 4


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
def test_operators_of_compiled_code_are_known_as_such_in_forward_and_backward() -> None:
    model = Net(2)
    model.blocks[1].compile()
    timeline = _profile(model, torch.zeros(8, 512, 256)).timeline
    for is_backward in (False, True):
        working = [i for i in timeline if i.is_backward is is_backward and i.num_ops and i.fqns]
        inside = {i.fqns[0].startswith("blocks.1.") for i in working if i.is_compiled}
        outside = {i.fqns[0].startswith("blocks.1.") for i in working if not i.is_compiled}
        assert (inside, outside) == ({True}, {False})


def test_the_order_of_accesses_is_that_of_a_real_checkpoint() -> None:
    """Of what is pinned: forwards, and forwards that are recomputed."""
    x = torch.zeros(4, 256, 256)
    model = Net(2)
    foreseen = _all(_profile(model, x, blocks=found_blocks(model)), Fate.RECOMPUTE)
    real = _profile(Net(2, is_checkpointed=True), x)
    pinned = [[(i.fqns, i.is_backward) for i in p.timeline if i.is_pinned] for p in (foreseen, real)]
    assert pinned[0] == pinned[1]
    dropped = [[one for i in p.timeline for one in i.dropped] for p in (foreseen, real)]
    assert sorted(dropped[0]) == sorted(dropped[1])


@pytest.mark.full
@pytest.mark.parametrize("fate", [full(Fate.OFFLOAD), Fate.RECOMPUTE_OFFLOADED])
def test_as_much_goes_to_host_memory_as_was_foreseen(fate: Fate) -> None:
    model, x = Net(), torch.randn(4, 256, 256)
    profile = _profile(model, x, blocks=found_blocks(model))
    plan = make_plan(model, placement_policy="cpu", activations=ActivationRequest.of(fate.value))
    module = ElixirModule(copy.deepcopy(model), plan)
    module(x).square().mean().backward()
    stats = module.stats()
    foreseen = _all(profile, fate).offloaded_bytes or 0
    # The CPU's attention keeps statistics of another size than a GPU's.
    assert stats.activations_out_bytes == pytest.approx(foreseen, rel=0.01)
    assert stats.held_bytes["cpu_activations"] == stats.activations_out_bytes
    moves = [i.moves for i in _all(profile, fate).timeline]
    assert sum(m.in_bytes for m in moves) == pytest.approx(stats.activations_in_bytes, rel=0.01)
    assert sum(m.out_bytes for m in moves) == foreseen


def test_what_is_saved_twice_goes_once() -> None:
    class Shared(Net):
        def forward(self, x: Tensor) -> Tensor:
            table = torch.tanh(x)  # which every block is given, and saves
            for block in self.blocks:
                x = block(x * table)
            return x

    model, x = Net(), torch.zeros(4, 256, 256)
    shared = Shared()
    plain, more = (_profile(m, x, blocks=found_blocks(m)) for m in (model, shared))
    assert [v.inner_bytes for v in more.visits] == [v.inner_bytes for v in plain.visits]
    assert sum(v.offload_bytes for v in more.visits) == sum(v.offload_bytes for v in plain.visits)


def test_frozen_blocks_in_front_save_nothing() -> None:
    model = Net()
    model.blocks[0].requires_grad_(False)
    profile = _profile(model, torch.zeros(4, 256, 256), blocks=found_blocks(model))
    first, second = profile.visits[:2]
    assert first.backward == (0, 0)
    assert first.inner_bytes == first.offload_bytes == 0
    assert second.inner_bytes > 0
    assert _all(profile, Fate.RECOMPUTE).flops < 2 * profile.flops


@pytest.mark.full
def test_transformers_own_checkpointing_is_off_for_blocks() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    def build(is_on: bool) -> nn.Module:
        model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=96, n_positions=64)).train()
        if is_on:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    def step(model: nn.Module, inp: Mapping[str, Any]) -> None:
        model(input_ids=inp["x"], labels=inp["x"]).loss.backward()

    tokens = {"x": torch.zeros(4, 64, dtype=torch.long)}
    names = found_blocks(build(False))
    off, on = (profile_memory(build(is_on), tokens, step, blocks=names) for is_on in (False, True))
    assert replace(on, timeline=()) == replace(off, timeline=())
    model = build(True)
    profile_memory(model, tokens, step, blocks=[b.name for b in blocks_of(model, ActivationRequest.of("auto"))])
    assert model.transformer.h[0].gradient_checkpointing


def test_of_two_backwards_the_last_one_has_the_visits_of_one_alone() -> None:
    def twice(model: nn.Module, inp: Mapping[str, Any]) -> None:
        _step(model, inp)
        model.zero_grad()
        _step(model, inp)

    model, x, names = Net(2), torch.zeros(2, 64, 256), ["blocks.0", "blocks.1"]
    alone = _profile(model, x, blocks=names)
    assert alone.of_last_iteration() is alone
    last = profile_memory(model, {"x": x}, twice, blocks=names).of_last_iteration()
    assert last.flops == alone.flops
    assert [i.fqns for i in last.timeline if i.fqns] == [i.fqns for i in alone.timeline if i.fqns]
    for ours, expected in zip(last.visits, alone.visits, strict=True):
        assert (ours.name, ours.inner_bytes) == (expected.name, expected.inner_bytes)
        for now, then in ((ours.forward, expected.forward), (ours.backward, expected.backward)):
            accesses = [i.fqns for i in last.timeline[slice(*now)] if i.fqns]
            assert accesses == [i.fqns for i in alone.timeline[slice(*then)] if i.fqns]
            assert accesses
        assert last.timeline[ours.last_save.interval].fqns == alone.timeline[expected.last_save.interval].fqns
    recomputing = [ModelBlock(name, Fate.RECOMPUTE) for name in names]
    assert with_fates(last, recomputing).flops == with_fates(alone, recomputing).flops

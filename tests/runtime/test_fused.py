"""Fused operators where chunks come and go: the bits of plain PyTorch with the same operators swapped in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_elixir import linear_cross_entropy, profile_memory
from lightning_elixir.errors import PlanError
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.dist import run_ranks
from tests.helpers.fused import FAMILIES, make_batch, make_lm, train_fused_elixir, train_fused_plain
from tests.helpers.plans import make_plan
from tests.helpers.tiers import crossed, telling


def _same(model: Any, plain: Any, **options: Any) -> None:
    losses, master = train_fused_plain(plain, 3, torch.float32, micro=options.get("micro", 1))
    ours, module = train_fused_elixir(model, 3, torch.float32, **options)
    assert ours == losses
    state = module.full_state_dict()
    names = [name for name, _ in plain.named_parameters()]
    assert [n for n, v in zip(names, master, strict=True) if not torch.equal(state[n], v)] == []
    assert module.stats().evictions > 0
    module.close()
    assert all("forward" not in vars(m) for m in model.modules())


@pytest.mark.parametrize("family", telling(FAMILIES, "llama_tied", "qwen3", "qwen3_moe"))
def test_bits(family: str) -> None:
    _same(make_lm(family), make_lm(family))


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")  # renamed in transformers 5.20
@crossed(
    told=["2-True-trained"], micro=[1, 2], checkpointing=[False, True], how=["trained", "frozen_head", "frozen_body"]
)
def test_bits_with(micro: int, checkpointing: bool, how: str) -> None:
    models = [make_lm("llama"), make_lm("llama")]
    for model in models:
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for name, parameter in model.named_parameters():
            is_head = name == "lm_head.weight"
            parameter.requires_grad_(how == "trained" or is_head == (how == "frozen_body"))
    if how == "trained":
        _same(*models, micro=micro)
        return
    plain = models[1]
    _, module = train_fused_elixir(models[0], 2, torch.float32, micro=micro)
    state, before = module.full_state_dict(), dict(make_lm("llama").named_parameters())
    moved = {name for name, value in before.items() if not torch.equal(state[name], value)}
    assert moved == {name for name, p in plain.named_parameters() if p.requires_grad}
    assert module.stats().evictions > 0


@pytest.mark.full
def test_bits_in_16_bits() -> None:
    losses, _ = train_fused_plain(make_lm(), 4, torch.bfloat16)
    ours, module = train_fused_elixir(make_lm(), 4, torch.bfloat16, chunk_size=8 * 1024)
    assert ours == losses
    assert module.stats().evictions > 0


class OwnLoss(nn.Module):
    """Calls the operator with a parameter by itself, outside of any layer's forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(*[nn.Linear(16, 16) for _ in range(30)])
        self.head = nn.Parameter(torch.randn(500, 16) * 0.1)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(self.body(x), self.head, targets)


def test_the_operator_in_a_model_of_ones_own() -> None:
    torch.manual_seed(1)
    x, targets = torch.randn(40, 16), torch.randint(0, 500, (40,))
    plain, model = OwnLoss(), OwnLoss()
    plan = make_plan(model, placement_policy="cpu", chunk_size=4096)
    module = ElixirModule(model, plan)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    ours = ElixirOptimizer(module, optimizers[1])
    for _ in range(3):
        expected, loss = plain(x, targets), module(x, targets)
        assert torch.equal(loss, expected)
        expected.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        ours.backward(loss)
        ours.step()
        ours.zero_grad()
    state = module.full_state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    assert module.stats().evictions > 0


def _train_rank() -> None:
    ours, module = train_fused_elixir(make_lm(), 3, torch.float32, world_size=2)
    losses, master = train_fused_plain(make_lm(), 3, torch.float32)
    assert ours == losses  # the same data on both: the mean of two equal numbers
    state = module.full_state_dict(rank0_only=False)
    assert all(torch.equal(state[n], v) for (n, _), v in zip(make_lm().named_parameters(), master, strict=True))
    assert module.stats().evictions > 0


def test_two_ranks() -> None:
    run_ranks(_train_rank, 2)


def test_an_error_leaves_the_model_plain() -> None:
    model = make_lm()
    plan = make_plan(model, placement_policy="cpu", chunk_size=32 * 1024)
    with pytest.raises(PlanError):
        ElixirModule(make_lm("gpt2"), plan, use_fused_kernels=True)
    with pytest.raises(PlanError, match="nothing can be swapped"):
        ElixirModule(nn.Linear(4, 4), make_plan(nn.Linear(4, 4), placement_policy="cpu"), use_fused_kernels=True)
    assert all("forward" not in vars(m) for m in model.modules())


@pytest.mark.full
def test_the_profiler_counts_what_is_not_kept() -> None:
    model = make_lm()
    batch = {name: value.repeat(16, 1) for name, value in make_batch(0).items()}

    def step(model: nn.Module, inp: Any) -> None:
        model(**inp).loss.backward()

    def peak(**options: Any) -> int:
        return profile_memory(model, batch, step, torch.bfloat16, autocast=True, **options).activation_bytes

    logits = batch["input_ids"].numel() * model.config.vocab_size
    assert (
        peak() - peak(use_fused_kernels=True) > 3 * logits
    )  # which were there in fp32 and in 16 bits, and their gradients
    assert peak(use_fused_kernels="auto") == peak(use_fused_kernels=True)
    assert all("forward" not in vars(m) for m in model.modules())
    with pytest.raises(PlanError, match="nothing can be swapped"):
        profile_memory(
            nn.Linear(2, 2), {"x": torch.ones(2)}, lambda m, i: m(**i).sum().backward(), use_fused_kernels=True
        )

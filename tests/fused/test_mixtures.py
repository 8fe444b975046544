"""The experts of a mixture as one operator, beside the loop that it stands for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_elixir.fused import fuse, mixtures
from lightning_elixir.fused.mixtures import mixture
from lightning_elixir.fused.operators import Gate, activation
from lightning_elixir.profiling.fake_step import profile_memory
from tests.helpers.fused import make_batch, make_lm
from tests.helpers.interpreter import check_under_interpreter
from tests.helpers.releases import need_experts_in_one_module
from tests.helpers.shells import Scaled

EXPERTS = 5


def make_operands(
    num_tokens: int = 9, width: int = 24, inner: int = 40, chosen: int = 2, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tokens, their experts (the fourth gets none), weights, and the experts' matrices."""
    generator = torch.Generator().manual_seed(0)
    shapes = (num_tokens, width), (num_tokens, chosen), (EXPERTS, 2 * inner, width), (EXPERTS, width, inner)
    tokens, weights, gate_up, down = (torch.randn(shape, generator=generator) for shape in shapes)
    there = torch.tensor([0, 1, 2, 4])
    numbers = torch.stack([there[torch.randperm(4, generator=generator)[:chosen]] for _ in range(num_tokens)])
    made = (t.to(dtype).requires_grad_() for t in (tokens, weights, gate_up / width**0.5, down / inner**0.5))
    tokens, weights, gate_up, down = made
    return tokens, numbers, weights, gate_up, down


def by_loop(tokens: Tensor, numbers: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, kind: Gate) -> Tensor:
    output = torch.zeros_like(tokens)
    for expert in range(gate_up.shape[0]):
        token, place = torch.where(numbers == expert)
        gate, up = (tokens[token] @ gate_up[expert].t()).chunk(2, -1)
        result = (activation(gate, kind) * up) @ down[expert].t()
        output = output.index_add(0, token, result * weights[token, place].unsqueeze(1))
    return output


def values_and_gradients(function: Any, operands: Sequence[Tensor], kind: Gate) -> tuple[Tensor, ...]:
    value = function(*operands, kind)
    factors = torch.linspace(-1, 1, value.numel(), device=value.device).view(value.shape).to(value.dtype)
    trained = [t for t in operands if t.requires_grad]
    return value, *torch.autograd.grad((value * factors).sum(), trained)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [({}, torch.float32), ({"width": 2100, "inner": 20, "chosen": 3}, torch.float32), ({}, torch.float64)],
)
def test_is_the_loop(kind: Gate, shape: dict[str, int], dtype: torch.dtype) -> None:
    operands = make_operands(**shape, dtype=dtype)
    ours, theirs = (values_and_gradients(f, operands, kind) for f in (mixture, by_loop))
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype is b.dtype
        # Sums over rows, columns and tokens go in another order.
        assert (a - b).norm() <= 10 * torch.finfo(dtype).eps * b.norm()
    assert not ours[3][3].any()  # of the expert that got no tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tokens_may_have_fewer_experts(dtype: torch.dtype) -> None:
    tokens, numbers, *others = make_operands(chosen=3, dtype=dtype)
    numbers[::2, 1], numbers[3] = -1, -1
    num_pairs = int((numbers >= 0).sum())
    theirs = values_and_gradients(by_loop, (tokens, numbers, *others), "silu")
    ours = values_and_gradients(lambda *given: mixture(*given, num_pairs), (tokens, numbers, *others), "silu")
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= 10 * torch.finfo(dtype).eps * b.norm()


def test_sums_of_rows_in_any_layout() -> None:
    """As gradients of users' experts come."""
    places = torch.tensor([[0, -1], [1, 5], [3, 2]])
    for rows in (torch.randn(24, 6).t(), torch.randn(6, 1).expand(6, 24), torch.randn(1).expand(6, 24)):
        expected = [rows[there[there >= 0]].sum(0) for there in places]
        assert torch.equal(mixtures.added(rows, places, None), torch.stack(expected))


class Largest(TorchDispatchMode):
    """How many elements the largest result has."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.number = max([self.number, *(t.numel() for t in tree_leaves(result) if isinstance(t, Tensor))])
        return result


def test_sums_of_rows_take_memory_for_one_row_of_each_token() -> None:
    rows, places, weights = torch.randn(12, 64), torch.arange(12).view(3, 4), torch.rand(3, 4)
    with Largest() as largest:
        mixtures.added(rows, places, weights)
    assert largest.number == 3 * 64


def test_products_with_padded_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's grouped product begins each row of its result at a multiple of 16 bytes."""
    monkeypatch.setattr(mixtures, "_is_grouped", lambda *them: all(max(t.stride()[-2:]) % 8 == 0 for t in them))
    operands = make_operands(inner=6, dtype=torch.bfloat16)
    ours, theirs = (values_and_gradients(f, operands, "silu") for f in (mixture, by_loop))
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= 2e-2 * b.norm()  # of 8 bits


def test_of_16_bits_is_no_further_from_the_truth_than_the_loop() -> None:
    operands = make_operands(num_tokens=64, dtype=torch.bfloat16)
    wide = [t if t.dtype is torch.int64 else t.detach().double().requires_grad_() for t in operands]
    exact = values_and_gradients(by_loop, wide, "silu")
    ours, theirs = (values_and_gradients(f, operands, "silu") for f in (mixture, by_loop))
    for a, b, truth in zip(ours, theirs, exact, strict=True):
        assert a.dtype is torch.bfloat16
        assert (a - truth).norm() <= 1.1 * (b - truth).norm()


@pytest.mark.parametrize("has_backward_inside", [False, True])
def test_under_autocast_the_tokens_keep_their_dtype(has_backward_inside: bool) -> None:
    operands = make_operands()
    with torch.autocast("cpu", torch.bfloat16):
        value = mixture(*operands, "silu")
        if has_backward_inside:
            value, *grads = values_and_gradients(mixture, operands, "silu")
    if not has_backward_inside:
        value, *grads = values_and_gradients(lambda *_: value, operands, "silu")
    assert value.dtype is torch.float32
    for a, b in zip((value, *grads), values_and_gradients(by_loop, operands, "silu"), strict=True):
        assert a.dtype is torch.float32
        assert (a - b).norm() <= 2e-2 * b.norm()  # three products of bf16 operands, 2^-9 each


@pytest.mark.parametrize("trained", range(4))
def test_with_frozen_operands(trained: int) -> None:
    operands = make_operands()
    floating = [t for t in operands if t.requires_grad]
    for index, operand in enumerate(floating):
        operand.requires_grad_(index == trained)
    ours, theirs = (values_and_gradients(f, operands, "silu") for f in (mixture, by_loop))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_backward_twice_has_the_same_bits_and_no_second_derivative() -> None:
    tokens, *others = make_operands()
    value = mixture(tokens, *others, "silu").square().sum()
    first, again = (torch.autograd.grad(value, (tokens, *others[1:]), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    (slope,) = torch.autograd.grad(value, tokens, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


def kept_bytes(operands: Sequence[Tensor]) -> int:
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        mixture(*operands, "silu")
    return sum(kept.values()) - sum(t.untyped_storage().nbytes() for t in operands if t.requires_grad)


def test_what_is_kept_for_backward() -> None:
    """Besides its operands the outputs of the first products, and where rows are; a dry run keeps as much."""
    num_tokens, inner, chosen = 32, 40, 2
    rows = num_tokens * chosen
    kept = kept_bytes(make_operands(num_tokens, inner=inner, chosen=chosen, dtype=torch.bfloat16))
    assert kept == rows * 2 * inner * 2 + 2 * rows * 8 + EXPERTS * 4
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        operands = make_operands(num_tokens, inner=inner, chosen=chosen, dtype=torch.bfloat16)
        fake = [mode.from_tensor(t) if not isinstance(t, torch._subclasses.FakeTensor) else t for t in operands]
        assert kept_bytes(fake) == kept
        value, *grads = values_and_gradients(mixture, fake, "silu")
    assert [t.shape for t in (value, *grads)] == [fake[i].shape for i in (0, 0, 2, 3, 4)]


@pytest.mark.full
def test_dry_runs_of_a_model() -> None:
    """Under autocast, with backward inside of it, and without."""
    model = make_lm("qwen3_moe")

    def step(model: nn.Module, inputs: Mapping[str, Tensor]) -> None:
        model(**inputs).loss.backward()

    for autocast in (False, True):
        plain, fused = (
            profile_memory(model, make_batch(0), step, torch.bfloat16, autocast=autocast, use_fused_kernels=is_fused)
            for is_fused in (False, True)
        )
        assert sum(i.moved_bytes for i in fused.timeline) < 0.7 * sum(i.moved_bytes for i in plain.timeline)


# What is one


class Experts(nn.Module):
    """As transformers has them."""

    def __init__(self, limit: float | None = None, act: Any = None) -> None:
        super().__init__()
        _, _, _, gate_up, down = make_operands()
        self.num_experts = EXPERTS
        self.gate_up_proj, self.down_proj = nn.Parameter(gate_up.detach()), nn.Parameter(down.detach())
        self.act_fn = act or nn.SiLU()
        self._limit = limit

    def forward(self, tokens: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        assert int(numbers.max()) < self.num_experts
        if self._limit is not None:
            tokens = tokens.clamp(max=self._limit)
        return by_loop(tokens, numbers, weights, self.gate_up_proj, self.down_proj, "silu")


def test_a_module_of_any_library_is_known_by_what_it_computes() -> None:
    tokens, numbers, weights, _, _ = make_operands()
    by_function = Experts(act=torch.nn.functional.silu)  # as Lfm2Moe has it
    model = nn.ModuleList([Experts(), Experts(limit=50.0), by_function])  # 50: which no value here reaches
    expected = [m(tokens, numbers, weights) for m in model]
    swapped = fuse(model, True, torch.device("cpu"))
    assert dict(swapped.counts) == {("experts of a mixture", "Experts"): 2}
    first, second, third = (m(tokens, numbers, weights) for m in model)
    for fused in (first, third):
        assert "Mixture" in type(fused.grad_fn).__name__ + str(fused.grad_fn.next_functions)
        torch.testing.assert_close(fused, expected[0])
    assert torch.equal(second, expected[1])


def test_quantised_experts_stay_as_they_are() -> None:
    """Their products know them by their class."""
    experts = Experts()
    values = experts.gate_up_proj.detach()
    scaled = Scaled(values, torch.ones(()))
    experts.gate_up_proj = nn.Parameter(scaled, requires_grad=False)
    assert not fuse(experts, "auto", torch.device("cpu")).counts
    experts.gate_up_proj = nn.Parameter(values.to(torch.uint8), requires_grad=False)
    assert not fuse(experts, "auto", torch.device("cpu")).counts
    experts.gate_up_proj = nn.Parameter(values, requires_grad=False)
    assert fuse(experts, "auto", torch.device("cpu")).counts


def test_experts_of_transformers() -> None:
    need_experts_in_one_module()
    import transformers as hf

    shape = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8}
    more = {"intermediate_size": 24, "num_experts_per_tok": 2}
    models = {
        "MixtralExperts": hf.MixtralForCausalLM(hf.MixtralConfig(**shape, **more, num_local_experts=4)),
        "OlmoeExperts": hf.OlmoeForCausalLM(hf.OlmoeConfig(**shape, **more, num_experts=4)),
        "GptOssExperts": hf.GptOssForCausalLM(hf.GptOssConfig(**shape, **more, num_local_experts=4)),
    }
    for name, model in models.items():
        swapped = fuse(model, True, torch.device("cpu"))
        # Those of gpt-oss have biases, gates between the others' rows, and a limit.
        assert swapped.counts["experts of a mixture", name] == (name != "GptOssExperts")


@pytest.mark.full
def test_kernels_under_the_interpreter() -> None:
    pytest.importorskip("triton", reason="needs triton, which the extra `test` brings")
    names = ("is_the_loop", "tokens_may_have_fewer_experts", "sums_of_rows_in_any_layout", "products_with_padded_rows")
    check_under_interpreter("14", *(f"{__file__}::test_{name}" for name in (*names, "with_frozen_operands")))


def test_a_full_device_does_not_pass_for_one_without_grouped_products(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", full)
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        mixtures._have_grouped.__wrapped__(torch.device("cpu"))


@pytest.mark.parametrize("number", [-1, 2])
def test_an_expert_that_is_not_there_is_refused(number: int) -> None:
    numbers, weights = torch.tensor([[0], [number]]), torch.ones(2, 1)
    with pytest.raises(RuntimeError, match="other than the 2 from 0 on"):
        mixture(torch.ones(2, 4), numbers, weights, torch.ones(2, 6, 4), torch.ones(2, 4, 3), "silu")

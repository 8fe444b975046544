"""Errors of clashing dtypes say which parameter is in 16 bits; errors with other causes stay as torch words them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_elixir.wrapper import ElixirModule
from tests.helpers.plans import make_plan
from tests.helpers.tiers import full, telling

HALF = torch.bfloat16


class Model(nn.Module):
    """Runs one function over its parameters, outside of autocast."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.LayerNorm(8), nn.Conv1d(8, 8, 1), nn.GRUCell(8, 8)])
        self.rnn = nn.LSTM(8, 8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.matrix = nn.Parameter(torch.eye(8) + 0.1 * torch.randn(8, 8))
        self.table = {"matrix": 0}
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return self.run(self, h)


def wrapped(run: Callable[[Any, Tensor], Tensor], *, is_frozen: bool = False, **options: Any) -> ElixirModule:
    """Frozen are all parameters but those of the first layer."""
    torch.manual_seed(0)
    model = Model(run)
    if is_frozen:
        model.requires_grad_(False)
        model.body.requires_grad_(True)
    plan = make_plan(model, placement_policy="cpu", chunk_size=1024, gpu_bytes=20_000, compute_dtype=HALF)
    return ElixirModule(model, plan, dtype=HALF, **options)


def _helper(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


def _of_torch(model: Any, h: Tensor) -> Tensor:
    return F.layer_norm(h.float(), (8,), model.layers[1].weight, model.layers[1].bias)


def _derived(model: Any, h: Tensor) -> Tensor:
    return torch.linalg.cholesky(torch.mm(*[2 * model.matrix] * 2))


class Derived(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lower = nn.Parameter(torch.eye(8))

    def forward(self, h: Tensor) -> Tensor:
        product = self.lower * 2
        return h + torch.linalg.cholesky(product)


@pytest.mark.parametrize(
    ("run", "cure"),
    [
        (lambda m, h: m.layers[0](h.float()), "['layers.0']"),
        (lambda m, h: m.layers[1](h.float()), "[torch.nn.LayerNorm]"),
        full(lambda m, h: m.layers[2](h.float()[None].mT), "['layers.2']"),
        (lambda m, h: m.layers[3](h.float()), "['layers.3']"),
        full(lambda m, h: m.rnn(h.float())[0], "['rnn']"),
        (lambda m, h: m.attention(h.float(), h.float(), h.float())[0], "['attention']"),
        (lambda m, h: F.linear(h.float(), m.layers[0].weight), "['layers.0.weight']"),
        full(lambda m, h: h.float() @ m.matrix, "['matrix']"),
        (lambda m, h: h.float() @ m.matrix[:, :4], "['matrix']"),
        full(lambda m, h: _helper(h.float(), m.matrix), "['matrix']"),
        (lambda m, h: _helper(h.float(), m.matrix.t()), "['matrix']"),
        (_of_torch, "[torch.nn.LayerNorm]"),
        (lambda m, h: torch.slogdet(m.matrix)[1], "['matrix']"),
        full(lambda m, h: torch.linalg.inv(m.matrix), "['matrix']"),
        full(lambda m, h: torch.linalg.svdvals(m.matrix), "['matrix']"),
        (lambda m, h: torch.linalg.solve(m.matrix, h.float()[:8]), "['matrix']"),
        (lambda m, h: torch.complex(m.matrix, m.matrix).abs(), "['matrix']"),
        full(lambda m, h: torch.polar(torch.ones(8, 8), m.matrix).abs(), "['matrix']"),
        full(lambda m, h: torch.quantile(m.matrix, 0.5), "['matrix']"),
        (lambda m, h: torch.zeros(8, 8).scatter(0, torch.zeros(8, 8).long(), m.matrix), "['matrix']"),
    ],
)
@pytest.mark.parametrize("autocast", telling([False, True], "True"))
def test_the_parameter_is_named_with_the_cure(run: Callable[[Any, Tensor], Tensor], cure: str, autocast: bool) -> None:
    def outside(model: Any, h: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return run(model, h)

    module = wrapped(outside, autocast=autocast)
    with pytest.raises((RuntimeError, ValueError)) as caught:
        module(torch.randn(8, 8))
    text = str(caught.value)
    assert ". This is about precision: under mixed precision " in text
    assert "in bfloat16 here, while plain PyTorch's autocast leaves parameters in float32" in text
    assert text.endswith(f"To keep float32: keep_fp32={cure}")
    module.close()
    names = text.rpartition("keep_fp32=")[2]
    kept: Any = nn.LayerNorm if "torch.nn" in names else eval(names)  # what it says can be written so
    cured = wrapped(outside, autocast=autocast, keep_fp32=kept)
    cured(torch.randn(8, 8)).sum().backward()
    cured.close()


def test_what_is_made_from_a_parameter_is_told_of_with_less_certainty() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Derived())
    plan = make_plan(model, placement_policy="cpu", chunk_size=1024, compute_dtype=HALF)
    module = ElixirModule(model, plan, dtype=HALF)
    message = "under mixed precision 1.lower is in bfloat16 here, so what is made from it may be. .*keep_fp32=\\['1'\\]"
    with pytest.raises(NotImplementedError, match=message):
        module(torch.randn(8, 8))


@pytest.mark.full
@pytest.mark.parametrize(
    "run",
    [
        lambda m, h: m.layers[0](h.double()),
        lambda m, h: m.layers[1](h.double()),
        lambda m, h: m.layers[0](h.half()),
        lambda m, h: F.embedding(h, m.matrix),
        lambda m, h: m.layers[0](h[:, :3]),
        lambda m, h: torch.zeros(8, 8).index_add_(0, torch.arange(8), m.layers[0](h)),  # nor in plain autocast
        lambda m, h: torch.linalg.inv(h * 2),
        lambda m, h: m.missing,
        lambda m, h: _raise(RuntimeError(7)),
        lambda m, h: _raise(RuntimeError("mat1 and mat2 must have the same dtype, but got Float and BFloat16")),
        lambda m, h: _raise(KeyError("dtype of bfloat16")),
    ],
)
def test_other_errors_are_left_alone(run: Callable[[Any, Tensor], Tensor]) -> None:
    module = wrapped(run)
    with pytest.raises((RuntimeError, AttributeError, KeyError)) as caught:
        module(torch.randn(8, 8))
    assert "This is about precision" not in str(caught.value)
    assert module.engine.phase.value == "idle"


def _raise(error: Exception) -> Tensor:
    raise error


def _is_kept(name: str, option: str) -> str:
    return f"This is about precision: {name} stays in float32 ({option}), and meets "


@pytest.mark.parametrize(
    ("run", "options", "told", "cured"),
    [
        (
            lambda m, h: m.layers[0](h),
            {"keep_fp32": ["layers.0.weight"]},
            _is_kept("layers.0.weight", "keep_fp32") + "layers.0.bias in bfloat16 here. For one dtype: "
            "keep_fp32=['layers.0.bias'] as well, or leave layers.0.weight out of keep_fp32",
            {"keep_fp32": ["layers.0.weight", "layers.0.bias"]},
        ),
        (
            lambda m, h: m.layers[0](h),
            {"ignored": ["layers.0.weight"]},
            _is_kept("layers.0.weight", "ignored") + "layers.0.bias in bfloat16 here. For one dtype: "
            "keep_fp32=['layers.0.bias'] as well, or leave layers.0.weight out of ignored",
            {"ignored": ["layers.0.weight"], "keep_fp32": ["layers.0.bias"]},
        ),
        (
            lambda m, h: h @ m.matrix,
            {"keep_fp32": ["matrix"]},
            _is_kept("matrix", "keep_fp32") + "16 bits here: pass float32 (`.float()`), or leave it out of keep_fp32",
            {},
        ),
        full(
            lambda m, h: F.linear(h, m.layers[0].weight),
            {"ignored": ["layers.0"]},
            _is_kept("layers.0.weight", "ignored") + "16 bits here: pass float32 (`.float()`), or leave it out of"
            " ignored",
            {},
        ),
    ],
)
@pytest.mark.parametrize("is_frozen", telling([False, True], "True"))
def test_what_an_option_keeps_in_fp32_is_named_without_masters(
    run: Callable[[Any, Tensor], Tensor], options: dict[str, Any], told: str, cured: dict[str, Any], is_frozen: bool
) -> None:
    def called(model: Any, h: Tensor) -> Tensor:
        return run(model, h)

    module = wrapped(called, is_frozen=is_frozen, master_weights=False, **options)
    with pytest.raises(RuntimeError) as caught:
        module(torch.randn(8, 8))
    assert "dtype" in str(caught.value)
    assert str(caught.value).endswith(told)
    module.close()
    module = wrapped(called, is_frozen=is_frozen, master_weights=False, **cured)
    module(torch.randn(8, 8)).sum().backward()
    module.close()


def test_with_masters_and_no_autocast_what_is_ignored_is_named_so() -> None:
    module = wrapped(lambda m, h: h @ m.matrix, is_frozen=True, ignored=["matrix"])
    with pytest.raises(RuntimeError) as caught:
        module(torch.randn(8, 8))
    assert str(caught.value).endswith(
        _is_kept("matrix", "ignored") + "16 bits here: pass float32 (`.float()`), or leave autocast on"
    )


@pytest.mark.parametrize("is_frozen", [False, True])
def test_what_is_ignored_has_the_users_own_dtype(is_frozen: bool) -> None:
    model = Model(lambda m, h: h.float() @ m.matrix)
    model.matrix = nn.Parameter(torch.eye(8, dtype=HALF), requires_grad=not is_frozen)
    plan = make_plan(model, placement_policy="cpu", chunk_size=1024, gpu_bytes=20_000, compute_dtype=HALF)
    module = ElixirModule(model, plan, dtype=HALF, ignored=["matrix"])
    with pytest.raises(RuntimeError) as caught:
        module(torch.randn(8, 8))
    assert "This is about precision" not in str(caught.value)
    module.close()


@pytest.mark.parametrize("options", [{"keep_fp32": ["matrix"]}, {"ignored": ["matrix"]}])
def test_kept_parameters_that_have_no_part_in_it_are_not_named(options: dict[str, Any]) -> None:
    module = wrapped(lambda m, h: m.layers[0](h.float()), master_weights=False, **options)
    with pytest.raises(RuntimeError) as caught:
        module(torch.randn(8, 8))
    assert "This is about precision" not in str(caught.value)


def test_without_masters_everything_is_in_16_bits_by_wish() -> None:
    module = wrapped(lambda m, h: m.layers[0](h.float()), master_weights=False)
    with pytest.raises(RuntimeError) as caught:
        module(torch.randn(8, 8))
    assert "This is about precision" not in str(caught.value)


def test_a_part_that_is_called_by_itself() -> None:
    module = wrapped(lambda m, h: h)
    with pytest.raises(RuntimeError, match=r"keep_fp32=\['body'\]"):
        module.module.body(torch.randn(8, 8))

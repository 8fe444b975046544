"""What is swapped in a model, what is left, and that it is undone."""

from __future__ import annotations

import copy
import logging
import pickle
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_elixir.errors import PlanError
from lightning_elixir.fused import fuse, swapping
from lightning_elixir.fused.heads import Logits
from lightning_elixir.profiling.fake_step import profile_memory
from tests.helpers.fused import FAMILIES, fused_beside_plain, gradients, make_batch, make_lm
from tests.helpers.tiers import crossed, telling

CPU = torch.device("cpu")
COUNTS = {
    "llama": {"RMS norm": 5, "gated product": 2, "linear cross-entropy": 1},
    "llama_tied": {"RMS norm": 5, "gated product": 2, "linear cross-entropy": 1},
    "qwen3": {"RMS norm": 9, "gated product": 2, "linear cross-entropy": 1},
    "gemma": {"RMS norm": 5, "gated product": 2, "linear cross-entropy": 1},
    "gpt2": {"linear cross-entropy": 1},
    "granite": {"RMS norm": 5, "gated product": 2, "linear cross-entropy": 1},
    "cohere": {"gated product": 2, "linear cross-entropy": 1},
    "qwen3_moe": {"RMS norm": 9, "experts of a mixture": 2, "linear cross-entropy": 1},
}


@crossed(family=FAMILIES, precision=["fp32", "bf16", "autocast"])
def test_gradients_are_no_further_from_the_truth_than_plain(family: str, precision: str) -> None:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    fused, plain = fused_beside_plain(family, dtype, autocast=torch.bfloat16 if precision == "autocast" else None)
    assert fused <= 1.5 * plain  # of a few tensors the largest error: a matter of luck within rounding


@pytest.mark.parametrize("family", FAMILIES)
def test_table_and_undo(family: str, caplog: pytest.LogCaptureFixture) -> None:
    model = make_lm(family)
    plain = gradients(copy.deepcopy(model), make_batch(0))
    with caplog.at_level(logging.INFO, "lightning_elixir"):
        swapped = fuse(model, True, CPU)
    assert {operator: count for (operator, _), count in swapped.counts.items()} == COUNTS[family]
    assert "do not run on the CPU" in caplog.text
    assert type(model).__name__ in caplog.text
    classes = {type(m) for m in model.modules()}
    other = make_lm(family)
    assert all("forward" not in vars(m) for m in other.modules())  # no class was touched
    swapped.undo()
    swapped.undo()
    assert all("forward" not in vars(m) for m in model.modules())
    assert classes == {type(m) for m in other.modules()}
    undone = gradients(model, make_batch(0))
    assert all(torch.equal(undone[name], plain[name]) for name in plain)


def test_a_second_call_takes_over_what_is_swapped() -> None:
    model = make_lm()
    fuse(model, True, CPU)
    fuse(model, True, CPU).undo()
    assert all("forward" not in vars(m) for m in model.modules())
    assert "_loss_function" not in vars(model)


def test_copies_run_their_own_parts() -> None:
    model = make_lm()
    fuse(model, True, CPU)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    plain = make_lm()
    ours, theirs = gradients(copied, make_batch(0)), gradients(plain, make_batch(0))
    assert ours["loss"] == pytest.approx(theirs["loss"].item(), rel=1e-5)
    pickle.dumps(model.state_dict())


class Other(Tensor):
    """As torch's own subclasses of tensors, of which kernels know nothing."""


def test_operands_of_other_classes_are_left_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain, calls = make_lm("llama"), make_lm("llama"), []
    fuse(model, True, CPU)
    monkeypatch.setattr(swapping, "rms_norm", lambda x, *_: calls.append("norm") or x)
    monkeypatch.setattr(swapping, "gated_product", lambda gate, *_: calls.append("gate") or gate)
    x = torch.randn(2, 3, 32)
    for name in ("model.norm", "model.layers.0.mlp"):
        ours, theirs = (m.get_submodule(name) for m in (model, plain))
        ours(x)
        assert torch.equal(ours(x.as_subclass(Other)), theirs(x))
    assert calls == ["norm", "gate"]


class TestLogits:
    def outputs(self, is_training: bool = True) -> tuple[Any, Any, Any]:
        model = make_lm().train(is_training)
        plain = copy.deepcopy(model)
        fuse(model, True, CPU)
        batch = make_batch(0)
        return model, model(**batch), plain(**batch)

    def test_are_computed_when_somebody_looks(self) -> None:
        _, ours, theirs = self.outputs()
        assert isinstance(ours.logits, Logits)
        assert ours.logits.is_put_off
        assert torch.equal(ours.logits.argmax(-1), theirs.logits.argmax(-1))
        assert torch.equal(ours.logits[..., :-1, :], theirs.logits[..., :-1, :])
        assert torch.equal(torch.softmax(ours.logits, -1), torch.softmax(theirs.logits, -1))
        assert torch.equal(2 * ours.logits - theirs.logits, theirs.logits)
        assert torch.equal(copy.deepcopy(ours.logits), theirs.logits)
        assert ours.logits.shape == theirs.logits.shape

    def test_have_gradients(self) -> None:
        model, ours, _ = self.outputs()
        (ours.loss + ours.logits.square().mean()).backward()
        plain = make_lm()
        out = plain(**make_batch(0))
        (out.loss + out.logits.square().mean()).backward()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)

    def test_of_evaluation_and_of_a_forward_without_labels(self) -> None:
        model, _, _ = self.outputs()
        with torch.no_grad():
            loss = model.eval()(**make_batch(0)).loss
            logits = model(input_ids=make_batch(0)["input_ids"]).logits
        assert not loss.requires_grad
        assert type(logits) is Tensor
        assert model.generate(make_batch(0)["input_ids"][:1, :4], max_new_tokens=2, do_sample=False).shape == (1, 6)

    @pytest.mark.parametrize("options", [{"num_items_in_batch": 77}, {"num_items_in_batch": torch.tensor(77)}])
    def test_other_arguments_of_the_loss(self, options: dict[str, Any]) -> None:
        model, _, _ = self.outputs()
        batch = make_batch(0)
        batch["labels"] = batch["input_ids"].clone()
        shift = torch.roll(batch["labels"], -1, 1)
        for more in (options, {**options, "shift_labels": shift}, {"shift_labels": shift}, {"ignore_index": 5}):
            ours, theirs = model(**batch, **more).loss, make_lm()(**batch, **more).loss
            torch.testing.assert_close(ours, theirs)

    @pytest.mark.parametrize("family", ["opt", "granite", "cohere"])
    def test_of_models_that_scale_them_or_pass_them_on(self, family: str) -> None:
        model, plain = make_lm(family), make_lm(family)
        fuse(model, True, CPU)
        ours, theirs = model(**make_batch(0)), plain(**make_batch(0))
        assert ours.logits.is_put_off
        torch.testing.assert_close(ours.loss, theirs.loss)
        ours.loss.backward()
        theirs.loss.backward()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)
        assert ours.logits.is_put_off
        assert torch.equal(ours.logits.argmax(-1), theirs.logits.argmax(-1))
        assert torch.equal(ours.logits + 0, theirs.logits)

    def test_of_a_model_that_changes_them_by_what_is_no_number(self) -> None:
        import transformers as hf

        class Doubled(hf.LlamaForCausalLM):
            by: Any = 2

            def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
                logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state).float() * self.by
                loss = self.loss_function(logits, labels, logits.shape[-1])
                return hf.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)

        torch.manual_seed(0)
        model = Doubled(make_lm().config)
        plain = copy.deepcopy(model)
        fuse(model, True, CPU)
        for by, is_put_off in ((2, True), (torch.tensor(3.0), False), (float("inf"), False), (-1.5, True)):
            model.by = plain.by = by
            ours, theirs = model(**make_batch(0)), plain(**make_batch(0))
            assert getattr(ours.logits, "is_put_off", False) is is_put_off
            torch.testing.assert_close(ours.loss, theirs.loss, equal_nan=True)
            assert torch.equal(ours.logits[..., 1], theirs.logits[..., 1])

    def test_of_a_model_that_looks_at_them(self, caplog: pytest.LogCaptureFixture) -> None:
        model = make_capped()
        expected = gradients(copy.deepcopy(model), make_batch(0))
        assert "linear cross-entropy" in str(fuse(model, True, CPU).counts)
        with caplog.at_level(logging.INFO, "lightning_elixir"):
            ours = gradients(model, make_batch(0))
            model(**make_batch(0))
        assert caplog.text.count("Capped looks at its logits before the loss (tanh)") == 1
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)


def make_capped(cap: float = 2.0) -> Any:
    """A language model of a user's that needs its logits' values."""
    import transformers as hf

    class Capped(hf.GPT2LMHeadModel):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
            logits = self.lm_head(self.transformer(input_ids=input_ids).last_hidden_state)
            logits = cap * torch.tanh(logits / cap)
            loss = self.loss_function(logits, labels, self.config.vocab_size)
            return hf.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)

    torch.manual_seed(0)
    return Capped(make_lm("gpt2").config)


@pytest.mark.parametrize("family", telling(["llama", "opt", "granite"], "granite"))
def test_a_swapped_loss_takes_no_memory_for_logits(family: str) -> None:
    small = make_lm(family)
    small.config.vocab_size = 8000
    model, tokens = type(small)(small.config), torch.cat([make_batch(0)["input_ids"]] * 2)

    def step(module: nn.Module, inputs: dict[str, Tensor]) -> None:
        module(input_ids=inputs["tokens"], labels=inputs["tokens"]).loss.backward()

    peaks = [
        profile_memory(model, {"tokens": tokens}, step, use_fused_kernels=choice).peak_bytes for choice in (False, True)
    ]
    assert peaks[0] - peaks[1] > tokens.numel() * 8000 * 4


class Own(nn.Module):
    """Nothing that is known."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.RMSNorm(4)


class OtherRMSNorm(nn.Module):
    """Called like one, computes another thing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.norm() + self.eps)


class GatedRMSNorm(nn.Module):
    """As in transformers' Bamba, Zamba 2 and Granite 4: an RMS norm where it is given no gate."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.eps = 1e-6

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        wide = x.float() if gate is None else x.float() * nn.functional.silu(gate.float())
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def test_norms_that_take_a_gate_stay_as_they_are() -> None:
    assert not fuse(GatedRMSNorm(), "auto", CPU).counts


def test_inputs_that_come_by_name_are_left_to_the_model() -> None:
    model, plain = make_lm("llama"), make_lm("llama")
    fuse(model, True, CPU)
    x = torch.randn(2, 3, 32)
    for name, argument in (("model.norm", "hidden_states"), ("model.layers.0.mlp", "x")):
        ours, theirs = (m.get_submodule(name) for m in (model, plain))
        assert torch.equal(ours(**{argument: x}), theirs(**{argument: x}))


class CutOffMLP(nn.Module):
    """As in transformers' deepseek_v4: values beyond a limit, which few tokens reach, are cut off."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.act_fn = nn.SiLU()
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x).clamp(max=self.limit)
        up = self.up_proj(x).clamp(min=-self.limit, max=self.limit)
        result: Tensor = self.down_proj(self.act_fn(gate) * up)
        return result


def test_products_of_values_that_are_cut_off_stay_as_they_are() -> None:
    for limit in (0.5, 10.0, 100.0):
        assert not fuse(CutOffMLP(limit), "auto", CPU).counts
    assert fuse(CutOffMLP(float("inf")), True, CPU).counts == {("gated product", "CutOffMLP"): 1}


def test_nothing_to_swap(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(Own(), OtherRMSNorm())
    with pytest.raises(PlanError, match="nothing can be swapped in Sequential .*linear_cross_entropy"):
        fuse(model, True, CPU)
    with caplog.at_level(logging.INFO, "lightning_elixir"):
        assert not fuse(model, "auto", CPU).counts
    assert "stays as it is" in caplog.text
    assert not fuse(make_lm(), False, CPU).counts
    with pytest.raises(PlanError, match="must be True, False or 'auto'"):
        fuse(model, "yes", CPU)  # type: ignore[arg-type]


def test_what_is_left_and_why() -> None:
    import transformers as hf

    def reasons(model: nn.Module) -> str:
        return "; ".join(fuse(model, "auto", CPU).left)

    hooked = make_lm()
    hooked.lm_head.register_forward_hook(lambda *_: None)
    assert "has hooks" in reasons(hooked)
    given = make_lm()
    given.loss_function = lambda *_, **__: torch.zeros(())
    assert "loss_function of its own" in reasons(given)
    wrapped = make_lm()
    wrapped.lm_head = nn.Sequential(wrapped.lm_head)
    assert "is a torch.nn.modules.container.Sequential" in reasons(wrapped)
    config = hf.Gemma2Config(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8
    )
    gemma = hf.Gemma2ForCausalLM(config)
    assert "linear cross-entropy" not in str(fuse(gemma, True, CPU).counts)
    looks = "the loss of Gemma2ForCausalLM stays as it is: its forward looks at the logits before the loss (tanh)"
    assert looks in reasons(hf.Gemma2ForCausalLM(config))
    resized = make_lm()
    resized.vocab_size, resized.config.vocab_size = 299, 299
    assert "its loss is over 299 classes, its last layer has 300" in reasons(resized)
    compiled = make_lm()
    for layer in compiled.model.layers:
        layer.compile(backend="eager")
    swapped = fuse(compiled, True, CPU)
    assert swapped.counts == {("RMS norm", "LlamaRMSNorm"): 1, ("linear cross-entropy", "LlamaForCausalLM"): 1}
    assert "torch.compile fuses" in swapped.left[0]


def test_a_model_that_cannot_be_tried_is_swapped_and_told_of(caplog: pytest.LogCaptureFixture) -> None:
    import transformers as hf

    class WithMask(hf.LlamaForCausalLM):
        def forward(self, mask: Tensor, **kwargs: Any) -> Any:
            loss = self.loss_function  # transformers' own forward is below
            return super().forward(**kwargs, attention_mask=mask) if loss is not None else None

    WithMask.__module__ = WithMask.forward.__module__ = hf.LlamaForCausalLM.__module__
    model = WithMask(make_lm().config)
    state = torch.get_rng_state()
    with caplog.at_level(logging.INFO, "lightning_elixir"):
        swapped = fuse(model, True, CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert swapped.counts["linear cross-entropy", "WithMask"] == 1
    assert "whether the forward of WithMask needs its logits is not known (TypeError" in caplog.text


def test_a_users_own_forward_is_not_run() -> None:
    import transformers as hf

    class Counting(hf.LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.drawn: list[float] = []
            self.register_buffer("num_calls", torch.zeros(()))

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.drawn.append(random.random())
            self.num_calls.add_(1)
            return super().forward(*args, **kwargs)

    class Below(Counting):
        pass

    for kind in (Counting, Below):
        model, state = kind(make_lm().config), random.getstate()
        swapped = fuse(model, True, CPU)
        assert not model.drawn
        assert model.num_calls == 0
        assert random.getstate() == state
        assert "is not known (its code is not all of transformers" in swapped.left[0]
        assert model(**make_batch(0)).logits.is_put_off


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_what_peft_puts_around_a_model_is_not_told_of() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make_lm(), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    swapped = fuse(model, True, CPU)
    assert swapped.counts["linear cross-entropy", "LlamaForCausalLM"] == 1
    assert not swapped.left
    model = peft.get_peft_model(make_lm(), peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"]))
    (left,) = fuse(model, True, CPU).left
    assert "the loss of LlamaForCausalLM stays as it is: its last layer is a peft.tuners.lora.layer.Linear" in left


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.full
def test_blocks_that_are_compiled_later_run_their_own_code() -> None:
    torch._dynamo.reset()
    model = make_lm()
    expected = gradients(copy.deepcopy(model), make_batch(0))
    fuse(model, True, CPU)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(gradients(model, make_batch(0)), expected, rtol=1e-4, atol=1e-6)
    torch._dynamo.reset()

"""Parameters that stay in fp32 under mixed precision, beside plain Lightning, whose autocast leaves all of them so."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from lightning_elixir import HybridAdam
from lightning_elixir._lightning import pl
from lightning_elixir.errors import PlanError
from lightning_elixir.plan.kept_dtypes import kept_in
from lightning_elixir.strategy import ElixirStrategy
from tests.helpers.dist import run_ranks
from tests.helpers.plans import make_plan
from tests.helpers.tiers import crossed, full, telling
from tests.strategy import models
from tests.strategy.models import TIGHT, Block, Net, few_batches, make_data, make_layers, make_optimizer

fit = functools.partial(models.fit, train=few_batches)

WIDTH = 32


class Head(nn.Module):
    """A loss head that the user computes in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make_layers(3)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        with torch.autocast("cpu", enabled=False):
            return self.head(h.float())


class Mixture(nn.Module):
    """A router that the user computes in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(Block() for _ in range(3)))
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.body(x))
        with torch.autocast("cpu", enabled=False):
            weights = self.gate(h.float()).softmax(-1)
        return sum(weights[:, i : i + 1] * expert(h) for i, expert in enumerate(self.experts))  # type: ignore[return-value]


class Flow(nn.Module):
    """An invertible layer, whose Jacobian has no 16-bit form."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make_layers(2)
        self.rotation = nn.Parameter(torch.linalg.qr(torch.randn(4, 4))[0].contiguous())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.body(x), self.rotation) + torch.slogdet(self.rotation)[1]


class Critic(nn.Module):
    def __init__(self, constrain: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.body = make_layers(2)
        self.out = constrain(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "head": Head,
    "router": Mixture,
    "slogdet": Flow,
    "spectral_norm": lambda: Critic(nn.utils.parametrizations.spectral_norm),
    "old spectral_norm": lambda: Critic(nn.utils.spectral_norm),
    "orthogonal": lambda: Critic(nn.utils.parametrizations.orthogonal),
}
KEEP = {"head": ["layers.head"], "slogdet": "*.rotation"}


class Islands(Net):
    def __init__(self, kind: str = "head", optimizer: str = "adamw") -> None:
        self.kind = kind
        super().__init__(optimizer)

    def _make(self) -> None:
        torch.manual_seed(7)
        self.layers = MODELS[self.kind]()  # type: ignore[assignment]


def islands(kind: str, optimizer: str = "adamw") -> Callable[[], Net]:
    return lambda: Islands(kind, optimizer)


def kept(strategy: ElixirStrategy) -> set[str]:
    return {m.fqn for c in strategy.plan.chunks if c.dtype == "float32" for m in c.members}


@pytest.mark.parametrize("kind", telling(MODELS, "router", "spectral_norm", "slogdet"))
def test_runs_as_under_plain_autocast(kind: str) -> None:
    _, _, expected = fit("auto", islands(kind), precision="bf16-mixed")
    strategy = ElixirStrategy(**(TIGHT | {"chunk_size": "4KiB", "gpu_memory_limit": "32KiB"}), keep_fp32=KEEP.get(kind))
    _, model, run = fit(strategy, islands(kind), precision="bf16-mixed")
    # 16-bit values of the same fp32 weights: but for what autocast leaves in fp32 beside the kept ones, the same bits.
    torch.testing.assert_close(run.losses, expected.losses, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(run.state, expected.state, rtol=0.05, atol=0.02)
    assert all(value.dtype is torch.float32 for value in run.state.values())
    assert strategy.stats().evictions > 0
    (name,) = {"head": ["head.weight"], "router": ["gate.weight"], "slogdet": ["rotation"]}.get(kind, ["out.bias"])
    assert model.get_parameter(f"layers.{name}").dtype is torch.float32
    assert f"layers.{name}" in kept(strategy)
    assert "layers.body.0.up.weight" not in kept(strategy)


@pytest.mark.parametrize("kind", ["head", "slogdet"])
@pytest.mark.parametrize("automatic", [True, False])
def test_a_clash_is_told_of_as_one_of_precision(kind: str, automatic: bool) -> None:
    class Manual(Islands):
        def __init__(self) -> None:
            super().__init__(kind)
            self.automatic_optimization = automatic

    name, dtypes = (
        ("layers.head", "layers.head.weight and layers.head.bias are")
        if kind == "head"
        else (
            "layers.rotation",
            "layers.rotation is",
        )
    )
    message = f"This is about precision: under mixed precision {dtypes} in bfloat16.*keep_fp32=\\['{name}'\\]"
    with pytest.raises(RuntimeError, match=message) as caught:
        fit(ElixirStrategy(**TIGHT), Manual, precision="bf16-mixed")
    assert type(caught.value) is RuntimeError


def test_other_errors_stay_as_they_are() -> None:
    class Wrong(Islands):
        def forward(self, x: Tensor) -> Tensor:
            return self.layers.body(x.double().reshape(-1, 2))

    with pytest.raises(RuntimeError) as caught:
        fit(ElixirStrategy(**TIGHT), Wrong, precision="bf16-mixed")
    assert "keep_fp32" not in str(caught.value)


def test_a_kept_layer_that_gets_16_bits_is_told_of() -> None:
    class Forgetful(Islands):
        def forward(self, x: Tensor) -> Tensor:
            h = self.layers.body(x)
            with torch.autocast("cpu", enabled=False):
                return self.layers.head(h)

    message = r"layers.head.weight and layers.head.bias stay in float32 \(keep_fp32\), and meet 16 bits"
    with pytest.raises(RuntimeError, match=message):
        fit(ElixirStrategy(**TIGHT, keep_fp32="layers.head"), Forgetful, precision="bf16-mixed")


@pytest.mark.parametrize(
    ("keep", "names"),
    [
        ("layers.head", {"layers.head.weight", "layers.head.bias"}),
        (["*.he?d.*"], {"layers.head.weight", "layers.head.bias"}),
        ([nn.LayerNorm], {f"layers.body.{i}.norm.{p}" for i in range(3) for p in ("weight", "bias")}),
        ([lambda name, module: name == "layers.body.0.up"], {"layers.body.0.up.weight", "layers.body.0.up.bias"}),
        (("layers.body.3", nn.LayerNorm), None),
    ],
)
def test_names_classes_and_predicates(keep: Any, names: set[str] | None) -> None:
    strategy = ElixirStrategy(**TIGHT, keep_fp32=keep, autocast=False)
    fit(strategy, Plain, precision="bf16-mixed")
    if names is None:
        assert {"layers.body.3.weight", "layers.body.0.norm.bias"} <= kept(strategy)
    else:
        assert kept(strategy) == names


class Plain(Islands):
    """Switches no autocast off."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layers.head(self.layers.body(x))


def test_nothing_is_kept_with_an_empty_list() -> None:
    for empty in ([], ()):
        strategy = ElixirStrategy(**TIGHT, keep_fp32=empty)
        with pytest.raises(RuntimeError, match="mixed dtype.*keep_fp32=\\[torch.nn.LayerNorm\\]"):
            fit(strategy, Plain, precision="bf16-mixed")
        strategy = ElixirStrategy(**TIGHT, keep_fp32=empty, autocast=False)
        fit(strategy, Plain, precision="bf16-mixed")
        assert kept(strategy) == set()


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true", "bf16-true"])
def test_names_that_mean_nothing_are_refused(precision: Any) -> None:
    with pytest.raises(PlanError, match="keep_fp32: 'head' is the name of no parameter.*did you mean 'layers.head'"):
        fit(ElixirStrategy(**TIGHT, keep_fp32=["head"]), Plain, precision=precision)
    with pytest.raises(PlanError, match="'layers.haed'.*did you mean 'layers.head'"):
        fit(ElixirStrategy(**TIGHT, keep_fp32=["layers.haed"]), Plain, precision=precision)
    with pytest.raises(PlanError, match="no module of class Conv2d with parameters; it has .*LayerNorm"):
        fit(ElixirStrategy(**TIGHT, keep_fp32=[nn.Conv2d]), Plain, precision=precision)


def test_values_of_other_kinds_are_refused() -> None:
    for wrong in (3, [3], "", [None], {"a": 1}):
        with pytest.raises(PlanError, match="keep_fp32 takes names of parameters or modules"):
            ElixirStrategy(keep_fp32=wrong)  # type: ignore[arg-type]


def _cast_oracle(keep: str, *, has_masters: bool = True) -> tuple[list[float], dict[str, Tensor]]:
    """Plain PyTorch without autocast: the model in bf16 but for one layer, around which casts are made by hand."""
    pl.seed_everything(11, verbose=False)
    model = Islands()
    masters = [p.detach().clone() for p in model.parameters()]
    for name, parameter in model.named_parameters():
        if not name.startswith(keep):
            parameter.data = parameter.data.bfloat16()
    if not has_masters:
        masters = [p.detach().clone() for p in model.parameters()]
    layer = model.get_submodule(keep)
    layer.register_forward_pre_hook(lambda _, args: tuple(x.float() for x in args))
    layer.register_forward_hook(lambda *args: args[2].bfloat16())
    optimizer = torch.optim.AdamW(masters, lr=1e-2, weight_decay=0.01, foreach=False)
    losses = []
    for x, y in few_batches():
        output = model.layers.head(model.layers.body(x.bfloat16()))
        loss = F.cross_entropy(output.float() if has_masters else output, y)
        loss.backward()
        losses.append(loss.item())
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.to(master.dtype)  # type: ignore[union-attr]
            parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
    return losses, dict(zip((n for n, _ in model.named_parameters()), masters, strict=True))


@pytest.mark.parametrize("keep", ["layers.head", "layers.body.1"])
def test_without_autocast_kept_layers_are_computed_in_fp32(keep: str) -> None:
    losses, masters = _cast_oracle(keep)
    strategy = ElixirStrategy(
        **(TIGHT | {"chunk_size": "8KiB", "gpu_memory_limit": "64KiB"}), keep_fp32=[keep], autocast=False
    )
    _, _, run = fit(strategy, Plain, precision="bf16-mixed")
    assert [loss.item() for loss in run.losses] == losses
    assert all(torch.equal(run.state[name], master) for name, master in masters.items())
    assert strategy.stats().evictions > 0


@pytest.mark.parametrize("late", [False, True])
def test_in_true_half_precision_what_is_named_stays_in_fp32(late: bool) -> None:
    class Late(Plain):
        is_made_in_init = False

        def configure_model(self) -> None:
            if not hasattr(self, "layers"):
                self._make()

        def loss(self, batch: list[Tensor]) -> Tensor:
            return F.cross_entropy(self(batch[0]), batch[1])

    class Early(Late):
        is_made_in_init = True

    strategy = ElixirStrategy(**TIGHT, keep_fp32=["layers.head"])
    _, model, run = fit(strategy, Late if late else Early, precision="bf16-true")
    assert kept(strategy) == {"layers.head.weight", "layers.head.bias"}
    assert run.state["layers.head.weight"].dtype is torch.float32
    assert run.state["layers.body.0.up.weight"].dtype is torch.bfloat16
    if not late:
        losses, parameters = _cast_oracle("layers.head", has_masters=False)
        assert [loss.item() for loss in run.losses] == losses
        assert all(torch.equal(run.state[name], value) for name, value in parameters.items())
    # The update has fp32 bits.
    assert not torch.equal(run.state["layers.head.weight"], run.state["layers.head.weight"].bfloat16().float())
    untouched = ElixirStrategy(**TIGHT)
    fit(untouched, Late if late else Early, precision="bf16-true")
    assert kept(untouched) == set()


PLACEMENTS: dict[str, dict[str, Any]] = {
    "cpu": {"placement_policy": "cpu", "gpu_memory_limit": "64KiB"},
    "cuda": {"placement_policy": "cuda"},
    "auto": {"placement_policy": "auto", "gpu_memory_limit": "160KiB"},
    "nvme": {
        "placement_policy": "cpu",
        "gpu_memory_limit": "64KiB",
        "nvme_offload_fraction": 1.0,
        "nvme_offload_param_fraction": 1.0,
    },
}


@pytest.mark.parametrize("options", [full({}), full({"accumulate_grad_batches": 2}), full({"gradient_clip_val": 0.1})])
def test_every_placement_gives_the_same_bits(tmp_path: Path, options: dict[str, Any]) -> None:
    runs = {}
    for name, placement in PLACEMENTS.items():
        more = {"nvme_offload_dir": str(tmp_path)} if name == "nvme" else {}
        strategy = ElixirStrategy(chunk_size="8KiB", keep_fp32=["layers.head"], **placement, **more)
        _, _, runs[name] = fit(strategy, islands("head", "hybrid"), precision="bf16-mixed", **options)
        assert {"layers.head.weight", "layers.head.bias"} <= kept(strategy)
        assert (strategy.stats().evictions > 0) == (name in ("cpu", "nvme")) or name == "auto"
    for name, run in runs.items():
        assert [x.item() for x in run.losses] == [x.item() for x in runs["cuda"].losses], name
        assert all(torch.equal(value, runs["cuda"].state[key]) for key, value in run.state.items()), name


@pytest.mark.parametrize("kind", telling(["full", "sharded"], "sharded"))
def test_training_goes_on_with_another_keep_fp32(tmp_path: Path, kind: Any) -> None:
    """Of which the next losses know nothing where autocast casts the weight anyway."""

    def run(keep: Any, max_epochs: int, path: str | None = None) -> Any:
        strategy = ElixirStrategy(**TIGHT, keep_fp32=keep, state_dict_type=kind)
        trainer, _, result = fit(
            strategy, Still, precision="bf16-mixed", max_epochs=max_epochs, ckpt_path=path, enable_checkpointing=True
        )
        assert ("layers.head.weight" in kept(strategy)) == (keep is not None)
        return trainer, result

    trainer, first = run(["layers.head"], 1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    _, second = run(None, 2, str(tmp_path / "one.ckpt"))
    trainer, _ = run(None, 1)
    trainer.save_checkpoint(tmp_path / "other.ckpt")
    _, third = run(["layers.head"], 2, str(tmp_path / "other.ckpt"))
    _, whole = run(["layers.head"], 2)
    assert [*first.losses, *second.losses] == whole.losses
    assert third.losses == second.losses
    for resumed in (second, third) if kind == "full" else ():  # else tensors without values, until they are saved
        assert all(torch.equal(resumed.state[name], value) for name, value in whole.state.items())


class Still(Plain):
    """Without dropout, whose random states one file has not."""

    def _make(self) -> None:
        super()._make()
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0


class Tied(Net):
    """An embedding whose weight is the head's, too."""

    def _make(self) -> None:
        torch.manual_seed(7)
        self.layers = nn.ModuleDict({"embed": nn.Embedding(16, WIDTH), "mix": make_layers(1)[0]})  # type: ignore[assignment]
        self.layers["norm"] = nn.LayerNorm(WIDTH)
        self.layers["head"] = nn.Linear(WIDTH, 16, bias=False)
        self.layers["head"].weight = self.layers["embed"].weight

    def forward(self, x: Tensor) -> Tensor:
        ids = (x[:, 0].abs() * 4).long().clamp(max=15)
        return self.layers["head"](self.layers["norm"](self.layers["mix"](self.layers["embed"](ids))))


@crossed(
    told=["layers.head-True", "layers.embed.weight-False"],
    keep=["layers.head", "layers.embed.weight"],
    autocast=[True, False],
)
def test_a_tied_parameter_is_kept_for_all_of_its_users(autocast: bool, keep: str) -> None:
    _, _, expected = fit("auto", Tied, precision="bf16-mixed")
    strategy = ElixirStrategy(**TIGHT, keep_fp32=keep, autocast=autocast)
    _, model, run = fit(strategy, Tied, precision="bf16-mixed")
    assert model.layers["embed"].weight is model.layers["head"].weight
    assert "layers.embed.weight" in kept(strategy)
    torch.testing.assert_close(run.losses, expected.losses, rtol=0.02, atol=0.02)


class PartlyFrozen(Plain):
    def _make(self) -> None:
        super()._make()
        self.layers.head.requires_grad_(False)
        self.layers.body[0].up.requires_grad_(False)


def test_frozen_parameters_stay_in_fp32_too() -> None:
    strategy = ElixirStrategy(**TIGHT, keep_fp32=["layers.head", "layers.body.0"])
    _, model, run = fit(strategy, PartlyFrozen, precision="bf16-mixed")
    before = PartlyFrozen().state_dict()
    for name in ("layers.head.weight", "layers.body.0.up.weight"):
        assert torch.equal(run.state[name], before[name])
    assert not torch.equal(run.state["layers.body.0.down.weight"], before["layers.body.0.down.weight"])
    assert {"layers.head.weight", "layers.body.0.up.weight", "layers.body.0.down.weight"} <= kept(strategy)


class Momentum(Plain):
    """A frozen copy that follows the trained layers slowly, and no loss: what is written to it is all it gets."""

    def _make(self) -> None:
        super()._make()
        self.teacher = copy.deepcopy(self.layers).requires_grad_(False)

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for ours, theirs in zip(self.teacher.parameters(), self.layers.parameters(), strict=True):
                ours.mul_(0.999).add_(theirs, alpha=0.001)


@pytest.mark.parametrize("options", [{"keep_fp32": ["teacher"]}, {"ignored": ["teacher"]}, {}], ids=str)
def test_a_frozen_average_loses_nothing_where_it_is_kept_or_ignored(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    _, _, expected = fit("auto", Momentum, precision="bf16-mixed")
    _, _, run = fit(
        ElixirStrategy(**(TIGHT | {"gpu_memory_limit": "160KiB"}), **options), Momentum, precision="bf16-mixed"
    )
    name = "teacher.body.0.up.weight"
    before, plain = Momentum().state_dict()[name], expected.state[name]
    far = (run.state[name] - plain).norm() / (plain - before).norm()
    assert far < 0.1 if options else far > 0.5  # rounded to 16 bits, as docs/precision.md says
    told = [m for m in caplog.messages if "written to again and again" in m]
    assert len(told) == (0 if options else 1)
    assert options or "keep_fp32=['teacher'], or ignored= the same" in told[0]


class Averaged(Plain):
    """torch's average of the weights, made when they are in 16 bits."""

    takes_both_dtypes = True

    def on_fit_start(self) -> None:
        how: dict[str, Any] = {"avg_fn": get_ema_avg_fn(0.9)}
        if not self.takes_both_dtypes:
            how = {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}
        self.average = [AveragedModel(self.layers, **how)]

    def on_train_batch_end(self, *_: Any) -> None:
        self.average[0].update_parameters(self.layers)


class AveragedTogether(Averaged):
    takes_both_dtypes = False


def test_an_average_of_torchs_that_takes_one_dtype_says_what_takes_both() -> None:
    strategy = ElixirStrategy(**TIGHT)
    with pytest.raises(RuntimeError) as caught:
        fit(strategy, AveragedTogether, precision="bf16-mixed")
    text = str(caught.value)
    assert text.startswith("expected dtype float")
    assert "are in bfloat16 here" in text
    assert "ElixirWeightAveraging, or torch's AveragedModel with avg_fn= in the place of multi_avg_fn=" in text
    _, model, _ = fit(ElixirStrategy(**TIGHT), Averaged, precision="bf16-mixed")
    _, plain, _ = fit("auto", Averaged, precision="bf16-mixed")
    for ours, theirs in zip(model.average[0].parameters(), plain.average[0].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.full
def test_a_given_plan_gets_chunks_for_what_is_kept() -> None:
    model = Islands()
    plan = make_plan(model, placement_policy="cpu", chunk_size=4096, compute_dtype=torch.bfloat16)
    assert kept_in(plan) == set()
    strategy = ElixirStrategy(plan=plan, keep_fp32=["layers.head"])
    _, _, run = fit(strategy, Islands, precision="bf16-mixed")
    searched = ElixirStrategy(**TIGHT, keep_fp32=["layers.head"])
    _, _, expected = fit(searched, Islands, precision="bf16-mixed")
    assert kept(strategy) == kept(searched)
    assert run.losses == expected.losses
    # What it has in fp32 stays so, unless nothing is to.
    given = strategy.plan
    fit(again := ElixirStrategy(plan=given), Islands, precision="bf16-mixed")
    assert again.plan.fingerprint() == given.fingerprint()
    fit(none := ElixirStrategy(plan=given, keep_fp32=(), autocast=False), Plain, precision="bf16-mixed")
    assert kept(none) == set()


def test_whole_parameters_are_in_fp32_and_the_state_is_the_master(tmp_path: Path) -> None:
    strategy = ElixirStrategy(**TIGHT, keep_fp32=["layers.head"])
    trainer, model, run = fit(strategy, Islands, precision="bf16-mixed")
    with strategy.full_parameters(["layers.head.weight", "layers.body.0.up.weight"]) as whole:
        assert whole["layers.head.weight"].dtype is torch.float32
        assert torch.equal(whole["layers.head.weight"], run.state["layers.head.weight"])
        assert whole["layers.body.0.up.weight"].dtype is torch.bfloat16
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    saved = torch.load(tmp_path / "x.ckpt", weights_only=False)["state_dict"]
    assert torch.equal(saved["layers.head.weight"], run.state["layers.head.weight"])


def test_another_keep_fp32_builds_the_engine_anew() -> None:
    _, model, _ = fit(ElixirStrategy(**TIGHT, keep_fp32=["layers.head"]), Plain, precision="bf16-mixed")
    before = model.layers.head.weight.detach().clone()
    assert before.dtype is torch.float32
    strategy = ElixirStrategy(**TIGHT)
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", precision="bf16-mixed", logger=False)
    trainer.predict(model, make_data(8))
    assert model.layers.head.weight.dtype is torch.bfloat16
    assert torch.equal(trainer.strategy.lightning_module_state_dict()["layers.head.weight"], before)


def _train_ranks() -> None:
    """Every rank gets the same batches, so that means are those of one rank."""
    from lightning_elixir import ElixirModule, ElixirOptimizer

    losses, states = [], []
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for world in (world_size, 1):
        torch.manual_seed(7)
        net = Head()
        group = None if world > 1 else torch.distributed.new_group([rank], use_local_synchronization=True)
        plan = make_plan(
            net,
            placement_policy="cpu",
            chunk_size=4096,
            gpu_bytes=30_000,
            world_size=world,
            compute_dtype=torch.bfloat16,
        )
        keep = ["head", "body.*.norm"]
        module = ElixirModule(net, plan, group, dtype=torch.bfloat16, autocast=True, keep_fp32=keep)
        optimizer = ElixirOptimizer(module, make_optimizer("hybrid", module.parameters(), 1e-2))
        module.eval()  # without dropout
        for x, y in make_data(12):
            loss = F.cross_entropy(module(x), y)
            optimizer.zero_grad()
            optimizer.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        assert module.stats().evictions > 0
        assert {c.dtype for c in module.plan.chunks} == {"float32", "bfloat16"}
        states.append(module.full_state_dict(rank0_only=False))
        module.close()
    assert losses[:3] == losses[3:]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_two_ranks_give_the_bits_of_one() -> None:
    run_ranks(_train_ranks, 2)


@pytest.mark.parametrize(
    "text", telling(["layers.head", "[layers.head, '*.norm']", "[]", "null"], "[layers.head, '*.norm']", "null")
)
def test_from_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningCLI

    monkeypatch.setattr(sys, "argv", ["cli"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    config = tmp_path / "options.yaml"
    config.write_text(
        "trainer:\n  accelerator: cpu\n  devices: 1\n  precision: bf16-mixed\n  logger: false\n  strategy:\n"
        f"    class_path: lightning_elixir.ElixirStrategy\n    init_args:\n      keep_fp32: {text}\n"
    )
    cli = LightningCLI(Plain, run=False, seed_everything_default=1, args=[f"--config={config}"])
    expected = {"layers.head": "layers.head", "[]": [], "null": None}.get(text, ["layers.head", "*.norm"])
    assert cli.trainer.strategy._config.keep_fp32 == expected


MOE_WIDTH = 32


class Moe(Net):
    """A MoE model of transformers under a spectral norm and a loss head in fp32."""

    def __init__(self, kind: str, optimizer: str = "adamw") -> None:
        self.kind = kind
        super().__init__(optimizer, lr=3e-3)

    def _make(self) -> None:
        transformers = pytest.importorskip("transformers")
        sizes = {"vocab_size": 64, "hidden_size": MOE_WIDTH, "intermediate_size": 48, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
        torch.manual_seed(7)
        if self.kind == "mixtral":
            config = transformers.MixtralConfig(**sizes, **heads, num_local_experts=4)
            self.model = transformers.MixtralModel(config)
        else:
            config = transformers.Qwen2MoeConfig(
                **sizes, **heads, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
                shared_expert_intermediate_size=32,
            )  # fmt: skip
            self.model = transformers.Qwen2MoeModel(config)
        self.critic = nn.utils.parametrizations.spectral_norm(nn.Linear(MOE_WIDTH, MOE_WIDTH))
        self.head = nn.Linear(MOE_WIDTH, 64)
        self.layers = None  # type: ignore[assignment]

    def loss(self, batch: list[Tensor]) -> Tensor:
        tokens = (batch[0].abs() * 16).long().clamp(max=63)
        h = self.critic(self.model(input_ids=tokens, use_cache=False).last_hidden_state)
        with torch.autocast("cpu", enabled=False):
            logits = self.head(h.float())
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        if self.hparams["optimizer"] == "hybrid":
            return HybridAdam(self.parameters(), lr=3e-3, weight_decay=0.01)
        return super().configure_optimizers()


@pytest.mark.full
@crossed(told=["nvme-mixtral"], placement=["cpu", "cuda", "nvme"], kind=["mixtral", "qwen2_moe"])
def test_moe_of_transformers_trains_as_under_plain_autocast(tmp_path: Path, kind: str, placement: str) -> None:
    _, _, expected = fit("auto", lambda: Moe(kind), precision="bf16-mixed")
    options = PLACEMENTS[placement] | ({} if placement == "cuda" else {"gpu_memory_limit": "160KiB"})
    if placement == "nvme":
        options["nvme_offload_dir"] = str(tmp_path)
    strategy = ElixirStrategy(chunk_size="16KiB", keep_fp32=["head"], **options)
    optimizer = "hybrid" if placement == "nvme" else "adamw"
    _, _, run = fit(strategy, lambda: Moe(kind, optimizer), precision="bf16-mixed")
    # Norms of their own, and embeddings, are in 16 bits here: 3e-4 relative, seen.
    torch.testing.assert_close(run.losses, expected.losses, rtol=2e-3, atol=0.0)
    routers = {name for name, _ in Moe(kind).named_parameters() if name.endswith(".gate.weight")}
    assert len(routers) == 2
    original = "critic.parametrizations.weight.original"
    assert kept(strategy) == routers | {original, "critic.bias", "head.weight", "head.bias"}
    assert (strategy.stats().evictions > 0) == (placement != "cuda")

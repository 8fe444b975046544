"""What cannot work is said clearly, on every rank, before training starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_elixir._lightning import pl
from lightning_elixir.errors import CapacityError, ElixirError, PlanError
from lightning_elixir.plan.io import save_plan
from lightning_elixir.strategy import ElixirStrategy
from tests.helpers.dist import run_ranks
from tests.strategy.models import CHUNK, TIGHT, LateNet, Net, fit, make_data, make_trainer


@pytest.mark.parametrize("precision", ["16-true", "transformer-engine"])
def test_precision_that_does_not_work(precision: Any) -> None:
    with pytest.raises((PlanError, ModuleNotFoundError), match="needs a GPU|choose precision|transformer_engine"):
        make_trainer("elixir", precision=precision)


def test_fp16_mixed_plugin_on_the_cpu() -> None:
    plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(PlanError, match="'16-mixed' needs a GPU: on the CPU use 'bf16-mixed'"):
        make_trainer(ElixirStrategy(), plugins=[plugin])


def test_limit_below_the_smallest_rcache_says_how_much_is_needed_and_for_which_module() -> None:
    with pytest.raises(CapacityError, match=r"(?s)smallest rCache.* for layers\.\d.*KiB"):
        fit(ElixirStrategy(**(TIGHT | {"gpu_memory_limit": "20KiB"})))


def _tries_again() -> Any:
    """With more memory, as a program does that looks for the least."""
    with pytest.raises(CapacityError) as caught:
        fit(ElixirStrategy(**(TIGHT | {"gpu_memory_limit": "20KiB"})), devices=2)
    error = caught.value
    return (str(error), error.resource, error.lacking_bytes), fit(ElixirStrategy(**TIGHT), devices=2)[2].state


def test_all_ranks_hear_that_it_does_not_fit_and_may_try_again() -> None:
    """One that got another error than rank 0, whose plan it is, would leave that waiting in its second try."""
    (first, state), (second, _) = run_ranks(_tries_again, 2, init_group=False)
    assert "smallest rCache" in first[0]
    assert second == (f"rank 0 failed: CapacityError: {first[0]}", *first[1:])
    assert all(value.isfinite().all() for value in state.values())


def test_too_little_host_memory_says_what_would_fit() -> None:
    with pytest.raises(CapacityError, match=r"host memory: the plan needs .* but there are 10.0 KiB\. What would fit"):
        fit(ElixirStrategy(placement_policy="cpu", cpu_memory_limit="10KiB", **CHUNK))


class ForeignNet(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([*self.parameters(), nn.Parameter(torch.zeros(3, 5))])


def test_optimizer_with_parameters_that_are_not_the_models() -> None:
    with pytest.raises(
        PlanError, match=r"1 of the 27 parameters of the optimizer \(AdamW\) are not the model's.*\[3, 5\]"
    ):
        fit(ElixirStrategy(**CHUNK), ForeignNet)


class WholeTensorNet(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def test_optimizer_that_is_not_element_wise() -> None:
    with pytest.raises(ElixirError, match="LBFGS looks at whole parameters.*HybridAdam"):
        fit(ElixirStrategy(**CHUNK), WholeTensorNet)


@pytest.mark.parametrize("policy", ["auto", "cuda", "cpu"])
def test_refusals_on_the_cpu_speak_of_no_gpu(policy: str) -> None:
    with pytest.raises(CapacityError, match=r"^CPU memory \(gpu_memory_limit\): .* there are 4\.0 KiB") as caught:
        fit(ElixirStrategy(placement_policy=policy, gpu_memory_limit="4KiB"))
    assert "GPU" not in str(caught.value)
    assert caught.value.lacking_bytes is not None


def test_nor_do_those_for_want_of_host_memory() -> None:
    advice = r"^host memory: .* more host memory for each rank \(raise cpu_memory_limit\), or .* \(nvme_offload_dir; "
    with pytest.raises(CapacityError, match=advice) as caught:
        fit(ElixirStrategy(gpu_memory_limit="60KiB", cpu_memory_limit="10KiB"))
    assert "GPU" not in str(caught.value)


class AllFrozenNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class EmptyNet(Net):
    is_made_in_init = False


@pytest.mark.parametrize(("make_model", "match"), [(AllFrozenNet, "all of them frozen"), (EmptyNet, "no parameters")])
def test_model_without_anything_to_train(make_model: Any, match: str) -> None:
    with pytest.raises(PlanError, match=match):
        fit(ElixirStrategy(**CHUNK), make_model)


class ComplexNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(3, dtype=torch.complex64))


def test_parameter_that_trains_and_is_not_floating_point() -> None:
    with pytest.raises(PlanError, match=r"table \(torch.complex64"):
        fit(ElixirStrategy(**CHUNK), ComplexNet)


class LazyNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.lazy = nn.LazyLinear(3)


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_parameter_without_a_shape() -> None:
    with pytest.raises(PlanError, match="lazy.weight.*no shape"):
        fit(ElixirStrategy(**CHUNK), LazyNet)


class SparseNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 32, sparse=True)

    def loss(self, batch: Any) -> Any:
        x, y = batch
        return super().loss([x + self.table(y), y])


def test_sparse_gradients() -> None:
    with pytest.raises(ElixirError, match="table: gradients would be sparse"):
        fit(ElixirStrategy(**CHUNK), SparseNet)


class MetaNet(Net):
    is_made_in_init = False

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.own = nn.Parameter(torch.zeros(3))


def test_parameter_without_values() -> None:
    with pytest.raises(PlanError, match=r"MetaNet.*meta device"):
        fit(ElixirStrategy(**CHUNK), MetaNet)


def test_plan_of_another_model(tmp_path: Path) -> None:
    strategy = ElixirStrategy(**CHUNK)
    fit(strategy)
    save_plan(strategy.plan, tmp_path / "plan.json")

    class OtherNet(Net):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Linear(2, 2)

    with pytest.raises(PlanError, match=r"plan was made for another model.*extra\.weight"):
        fit(ElixirStrategy(plan=tmp_path / "plan.json"), OtherNet)
    with pytest.raises(PlanError, match="cannot read the plan"):
        fit(ElixirStrategy(plan=str(tmp_path / "missing.json")))


def test_file_that_is_no_plan_is_refused_before_the_model_is_made(tmp_path: Path) -> None:
    made = []

    class TellingNet(LateNet):
        def configure_model(self) -> None:
            made.append(self)
            super().configure_model()

    (tmp_path / "m.py").write_text("import torch\n")
    with pytest.raises(PlanError, match=r"m\.py is no plan: it is not JSON"):
        fit(ElixirStrategy(plan=tmp_path / "m.py"), TellingNet)
    assert not made


class Unfreeze(pl.callbacks.BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.layers[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        return


def test_finetuning_callback() -> None:
    with pytest.raises(PlanError, match="Unfreeze unfreezes parameters while training"):
        fit(ElixirStrategy(**CHUNK), callbacks=[Unfreeze()])


class LateUnfreezeNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.layers[0].requires_grad_(True)


def test_unfreezing_while_training() -> None:
    with pytest.raises(PlanError, match=r"requires_grad of 6 parameters has changed.*layers\.0\.norm\.weight"):
        fit(ElixirStrategy(**CHUNK), LateUnfreezeNet, max_epochs=2)


def test_unfreezing_between_two_fits_works() -> None:
    def run(strategy: Any) -> list[float]:
        model = Net()
        model.layers[0].requires_grad_(False)
        trainer = make_trainer(strategy)
        trainer.fit(model, make_data())
        model.layers[0].requires_grad_(True)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model, make_data())
        return [loss.item() for loss in model.losses]

    pl.seed_everything(1, verbose=False)
    expected = run("auto")
    pl.seed_everything(1, verbose=False)
    assert run(ElixirStrategy(**TIGHT)) == expected


def test_before_anything_has_run() -> None:
    strategy = ElixirStrategy()
    with pytest.raises(ElixirError, match="call fit, validate, test or predict first"):
        strategy.stats()
    with pytest.raises(ElixirError, match="call fit, validate, test or predict first"):
        strategy.plan  # noqa: B018 - the property raises


@pytest.mark.full
def test_strategy_name_without_the_import() -> None:
    code = f"from {pl.__name__} import Trainer; Trainer(strategy='elixir', accelerator='cpu')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "invalid strategy name" in done.stderr


def test_a_given_plan_is_held_against_the_limits() -> None:
    trainer = fit(ElixirStrategy(placement_policy="cuda", **CHUNK))[0]
    plan = trainer.strategy.plan
    with pytest.raises(
        CapacityError, match=r"^CPU memory \(gpu_memory_limit\): the given plan needs .* but there are 20.0 KiB"
    ):
        fit(ElixirStrategy(plan=plan, gpu_memory_limit="20KiB"))
    fit(ElixirStrategy(plan=plan, gpu_memory_limit="20MiB"))


def test_a_plan_of_a_larger_model_is_told_from_too_little_memory(tmp_path: Path) -> None:
    strategy = ElixirStrategy(**CHUNK)
    fit(strategy)
    save_plan(strategy.plan, tmp_path / "plan.json")

    class SmallNet(Net):
        def __init__(self) -> None:
            super().__init__()
            del self.layers[-1]

    with pytest.raises(PlanError, match="plan was made for another model: it has parameters that the model lacks"):
        fit(ElixirStrategy(plan=tmp_path / "plan.json", gpu_memory_limit="4KiB"), SmallNet)


@pytest.mark.parametrize(
    ("precision", "dtype", "other", "other_dtype"),
    [("32-true", "float32", "bf16-mixed", "bfloat16"), ("bf16-mixed", "bfloat16", "32-true", "float32")],
)
def test_a_plan_of_another_precision(precision: Any, dtype: str, other: Any, other_dtype: str) -> None:
    plan = fit(ElixirStrategy(**CHUNK), precision=precision)[0].strategy.plan
    with pytest.raises(PlanError, match=f"plan is for parameters in {dtype}, .* has them in {other_dtype}: give the"):
        fit(ElixirStrategy(plan=plan), precision=other)

"""What a run leaves behind: nothing but the shards, and those until the model or `close()` goes."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_elixir
from lightning_elixir._lightning import StrategyRegistry, pl
from lightning_elixir.errors import StateError
from lightning_elixir.strategy import ElixirStrategy
from lightning_elixir.strategy.engine_handle import EngineHandle
from tests.helpers.dist import run_ranks
from tests.helpers.tiers import crossed, full, telling
from tests.strategy import models
from tests.strategy.models import (
    CHUNK,
    TIGHT,
    Net,
    assert_same_run,
    assert_same_state,
    few_batches,
    make_data,
    make_layers,
    make_trainer,
)

fit = functools.partial(models.fit, train=few_batches)

ROOT = Path(__file__).parents[2]
NAMES = {"elixir", "elixir_auto", "elixir_cpu", "elixir_cuda", "elixir_nvme"}


def test_names_are_registered() -> None:
    assert set(StrategyRegistry) >= NAMES
    lightning_elixir.register_strategies()  # again: no error


@pytest.mark.parametrize(
    ("name", "policy"), [("elixir", "auto"), ("elixir_auto", "auto"), ("elixir_cpu", "cpu"), ("elixir_cuda", "cuda")]
)
def test_registered_names_train(name: str, policy: str) -> None:
    trainer, _, actual = fit(name)
    assert isinstance(trainer.strategy, lightning_elixir.ElixirStrategy)
    assert trainer.strategy.plan.policy == policy
    assert_same_run(actual, fit("auto")[2])


def test_threads_take_turns_more_often_during_a_fit_alone() -> None:
    seen: list[float] = []

    class Look(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            seen.append(sys.getswitchinterval())

    before_s = sys.getswitchinterval()
    fit("elixir", callbacks=[Look()])
    assert max(seen) < 1e-3 < before_s
    assert sys.getswitchinterval() == pytest.approx(before_s, rel=0.01)


@pytest.mark.parametrize("name", lightning_elixir.__all__)
def test_exported_names_exist(name: str) -> None:
    assert name in dir(lightning_elixir)
    assert getattr(lightning_elixir, name) is not None


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'elixir'"):
        lightning_elixir.elixir  # noqa: B018 - the lookup raises


class RaisingNet(Net):
    """Raises at some point of the third step."""

    moment = "forward"

    def _raise(self, moment: str, batch_idx: int) -> None:
        if self.moment == moment and batch_idx == 3 and len(self.losses) < 5:
            raise ValueError(moment)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._batch_idx = batch_idx
        loss = super().training_step(batch, batch_idx)
        self._raise("forward", batch_idx)
        return loss

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        if self.moment == "in backward" and self._batch_idx == 3 and len(self.losses) < 5:
            loss.register_hook(self._fail)
        super().backward(loss, *args, **kwargs)

    def _fail(self, grad: Any) -> None:
        raise ValueError("in backward")

    def on_after_backward(self) -> None:
        self._raise("after backward", self._batch_idx)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self._raise("between", self._batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._raise("after step", batch_idx)


MOMENTS = ["forward", "between", "in backward", "after backward", "after step"]


@pytest.mark.parametrize("moment", telling(MOMENTS, "in backward", "after step"))
def test_after_an_exception_the_model_can_be_saved_and_trained_on(moment: str) -> None:
    def run(strategy: Any) -> Any:
        pl.seed_everything(4, verbose=False)
        model = RaisingNet()
        model.moment = moment
        trainer = make_trainer(strategy)
        with pytest.raises(ValueError, match=moment):
            trainer.fit(model, make_data())
        states = [{k: v.clone() for k, v in trainer.strategy.lightning_module_state_dict().items()}]
        torch.manual_seed(9)
        again = make_trainer(strategy if strategy == "auto" else ElixirStrategy(**TIGHT))
        again.fit(model, make_data())
        states.append(again.strategy.lightning_module_state_dict())
        return [x.item() for x in model.losses], states

    losses, states = run(ElixirStrategy(**TIGHT))
    expected_losses, expected = run("auto")
    assert losses == expected_losses
    for actual_state, expected_state in zip(states, expected, strict=True):
        assert all(torch.equal(actual_state[k], v) for k, v in expected_state.items())


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_save_once_another_trainer_has_built_the_model_anew(kind: Any, tmp_path: Path) -> None:
    """Plain Lightning saves then; here the states went with the first engine, and the error says so."""
    trainer, model, _ = fit(ElixirStrategy(**TIGHT, state_dict_type=kind))
    make_trainer(ElixirStrategy(**CHUNK, placement_policy="cuda")).validate(model, few_batches(), verbose=False)
    with pytest.raises(StateError, match="the optimizer states of this Trainer's fit are gone: since then another"):
        trainer.save_checkpoint(tmp_path / "one")
    trainer.save_checkpoint(tmp_path / "weights", weights_only=True)
    other = Net()
    make_trainer(ElixirStrategy(**TIGHT)).validate(
        other, few_batches(), ckpt_path=str(tmp_path / "weights"), verbose=False
    )
    assert_same_state(other.state_dict(), model.state_dict())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, few_batches())
    trainer.save_checkpoint(tmp_path / "one")


def _engine_and_flats(strategy: ElixirStrategy) -> list[weakref.ref[Any]]:
    engine = strategy._engine.engine
    tensors = [chunk.flat for chunk in engine.chunks]
    tensors += [shard for chunk in engine.chunks if (shard := engine.store[chunk.id].param) is not None]
    return [weakref.ref(engine), *(weakref.ref(t) for t in tensors)]


@pytest.mark.parametrize("has_failed", [False, True])
def test_memory_goes_with_trainer_and_model(has_failed: bool) -> None:
    strategy, model = ElixirStrategy(**TIGHT), RaisingNet()
    trainer = make_trainer(strategy)
    if has_failed:
        with pytest.raises(ValueError, match="forward"):
            trainer.fit(model, make_data())
    else:
        model.moment = "never"
        trainer.fit(model, make_data())
    references = _engine_and_flats(strategy)
    assert len(references) > 3
    del strategy, trainer, model
    gc.collect()
    assert [r() for r in references] == [None] * len(references)


class KeepingNet(Net):
    """Keeps a graph of its last step, as a list of losses does, where the garbage collector cannot look.

    Args:
        what: "loss": through which backward has run; "hidden": a part of that; "output": of a forward of its own.
    """

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        hidden = self.layers[0](batch[0])
        loss = torch.nn.functional.cross_entropy(self.layers[1:](hidden), batch[1])
        self.kept = {"loss": loss, "hidden": hidden, "output": self(batch[0]) if self.what == "output" else None}[
            self.what
        ]
        self.losses.append(loss.detach())
        return loss


@pytest.mark.parametrize("what", ["loss", "hidden", "output"])
def test_memory_goes_with_a_model_that_keeps_graphs(what: str) -> None:
    strategy = ElixirStrategy(**TIGHT)
    trainer, model, _ = fit(strategy, lambda: KeepingNet(what))
    assert strategy.stats().evictions > 0
    references = _engine_and_flats(strategy)
    graph, weight = model.kept, model.layers[4].weight  # type: ignore[attr-defined]
    del strategy, trainer, model
    gc.collect()
    assert references[0]() is None
    # Both are of no use now, and say so.
    assert weight.shape == (4, 32)
    with pytest.raises(StateError, match="after its engine had gone"):
        weight.sum()
    with pytest.raises(StateError, match="copied after its engine had gone"):
        copy.deepcopy(weight)
    if what == "output":
        with pytest.raises(StateError, match="backward needs layers.*after its engine had gone"):
            graph.sum().backward()
    del graph, weight
    assert [r() for r in references] == [None] * len(references)


def test_states_of_an_earlier_fit_go_when_the_next_begins() -> None:
    strategy = ElixirStrategy(**TIGHT)
    trainer, model, _ = fit(strategy, lambda: Net(optimizer="hybrid"))
    first = weakref.ref(trainer.optimizers[0])
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, make_data())
    gc.collect()
    assert first() is None


def test_the_model_keeps_its_values_when_the_trainer_is_gone() -> None:
    trainer, model, run = fit(ElixirStrategy(**TIGHT))
    model._trainer = None
    del trainer
    gc.collect()
    assert all(torch.equal(model.state_dict()[k], v) for k, v in run.state.items())
    assert EngineHandle.of(model) is not None


def test_close_frees_everything() -> None:
    strategy = ElixirStrategy(**TIGHT)
    trainer, model, _ = fit(strategy)
    references = _engine_and_flats(strategy)
    strategy.close()
    strategy.close()
    assert sum(r().untyped_storage().nbytes() for r in references[1:] if r() is not None) == 0
    with pytest.raises(StateError):
        strategy.stats()
    with pytest.raises(RuntimeError):
        model(torch.zeros(1, 32))


def test_two_engines_in_one_process() -> None:
    first, second = ElixirStrategy(**TIGHT), ElixirStrategy(placement_policy="cuda", **CHUNK)
    one = fit(first)[2]
    two = fit(second, lambda: Net(seed=8))[2]
    expected_one, expected_two = fit("auto")[2], fit("auto", lambda: Net(seed=8))[2]
    assert_same_run(one, expected_one)
    assert_same_run(two, expected_two)
    assert all(torch.equal(first.lightning_module_state_dict()[k], v) for k, v in one.state.items())


def test_trained_model_can_be_pickled_as_a_plain_one() -> None:
    _, model, run = fit(ElixirStrategy(**TIGHT))
    copied = pickle.loads(pickle.dumps(model))
    assert EngineHandle.of(copied) is None
    assert all(torch.equal(copied.state_dict()[k], v) for k, v in run.state.items())
    assert type(next(copied.parameters())) is torch.nn.Parameter


def test_strategy_without_a_run_can_be_pickled() -> None:
    strategy = pickle.loads(pickle.dumps(ElixirStrategy(**TIGHT)))
    assert_same_run(fit(strategy)[2], fit("auto")[2])


@pytest.mark.parametrize("change", telling(["layer", "all"], "layer"))
def test_layers_made_anew_between_two_fits(change: str) -> None:
    def run(strategy: Any) -> Any:
        trainer, model, _ = fit(strategy)
        torch.manual_seed(21)
        if change == "layer":
            model.layers[4] = torch.nn.Linear(32, 4)
        else:
            model.layers = make_layers()
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model, make_data())
        return [x.item() for x in model.losses]

    assert run(ElixirStrategy(**TIGHT)) == run("auto")


CTRL_C = """
    import os, sys, warnings
    warnings.simplefilter("ignore")
    import torch
    torch.set_num_threads(1)
    from tests.strategy.models import Net, TIGHT, make_data, make_trainer
    from lightning_elixir.strategy import ElixirStrategy

    class Slow(Net):
        def training_step(self, batch, batch_idx):
            print("step", os.getpid(), flush=True)
            import time
            time.sleep(0.2)
            return super().training_step(batch, batch_idx)

    make_trainer(ElixirStrategy(**TIGHT), devices={devices}, max_epochs=1000).fit(Slow(), make_data())
"""


@pytest.mark.full
@pytest.mark.parametrize("devices", [1, 2])
def test_ctrl_c_leaves_no_process_behind(tmp_path: Path, devices: int) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(CTRL_C.format(devices=devices)))
    environment = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "WORLD_SIZE", "RANK", "MASTER_PORT")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(
        [sys.executable, str(script)],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # Not to inherit an ignored SIGINT, as shells give it to what they start in the background.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout is not None
        seen: set[str] = set()
        lines: list[str] = []
        while len(seen) < devices:
            line = process.stdout.readline()
            lines.append(line)
            assert line, f"ended before training: {''.join(lines[-30:])}"
            if line.startswith("step"):
                seen.add(line.split()[1])
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=60) != 0
        deadline = time.monotonic() + 30
        while any(Path(f"/proc/{p}").exists() for p in seen) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not any(Path(f"/proc/{p}").exists() for p in seen)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


@pytest.mark.full
def test_other_distribution_of_lightning_points_here() -> None:
    """A Trainer of `pytorch_lightning` beside `lightning` gets an error that says what to import."""
    code = """
        import warnings
        warnings.simplefilter("ignore")
        import pytorch_lightning
        import lightning_elixir
        try:
            pytorch_lightning.Trainer(strategy="elixir", accelerator="cpu")
        except lightning_elixir.PlanError as error:
            print("lightning.pytorch" in str(error))
    """
    pytest.importorskip("lightning")
    assert _python(code).endswith("True")


@pytest.mark.full
def test_pytorch_lightning_alone_is_enough() -> None:
    pytest.importorskip("pytorch_lightning")
    code = """
        import sys, warnings
        warnings.simplefilter("ignore")
        sys.modules["lightning"] = None
        import torch
        import lightning_elixir
        from tests.strategy.models import *
        trainer, model, run = fit(ElixirStrategy(**TIGHT))
        is_same = run.losses == fit("auto")[2].losses
        print(type(trainer).__module__.split(".")[0], is_same, "lightning.pytorch" in sys.modules)
    """
    assert _python(code).endswith("pytorch_lightning True False")


def _python(code: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


@pytest.mark.full
def test_import_does_not_initialise_cuda() -> None:
    code = "import torch, lightning_elixir; lightning_elixir.ElixirStrategy; print(torch.cuda.is_initialized())"
    assert _python(code) == "False"


def _saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


class CopiedMidway(pl.Callback):
    """Copies everything that users copy, in the middle of fit."""

    def __init__(self, duplicate: Any) -> None:
        self.duplicate = duplicate
        self.model: dict[str, torch.Tensor] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step != 3:
            return
        duplicate, self.duplicate = self.duplicate, None
        callbacks, model, copied = duplicate(trainer.callbacks), duplicate(trainer.model), duplicate(trainer)
        assert [type(c) for c in callbacks] == [type(c) for c in trainer.callbacks]
        assert type(model) is type(copied.model) is Net
        assert copied.model is copied.lightning_module is copied.strategy.model
        assert all(type(p) is torch.nn.Parameter for p in (*model.parameters(), *copied.model.parameters()))
        assert EngineHandle.of(model) is None
        (optimizer,) = copied.optimizers
        assert type(optimizer) is torch.optim.AdamW
        assert optimizer.param_groups[0]["params"][0] is next(copied.model.parameters())
        self.model, self.copied = model.state_dict(), copied.model.state_dict()
        self.states = optimizer.state_dict()


@crossed(
    told=["deepcopy-32-true", "_pickled-bf16-mixed"],
    duplicate=[copy.deepcopy, _pickled, _saved],
    precision=["32-true", "bf16-mixed"],
)
def test_what_is_copied_in_the_middle_of_a_fit_is_plain_and_whole(
    tmp_path: Path, duplicate: Any, precision: str
) -> None:
    def run(strategy: Any) -> CopiedMidway:
        copying = CopiedMidway(duplicate)
        saving = pl.callbacks.ModelCheckpoint(tmp_path, save_on_exception=True)
        fit(strategy, callbacks=[copying, saving], enable_checkpointing=True, precision=precision)
        return copying

    actual, expected = run(ElixirStrategy(**TIGHT)), run("auto")
    assert_same_state(actual.model, expected.model)
    assert_same_state(actual.copied, expected.copied)
    assert actual.states["param_groups"] == expected.states["param_groups"]
    assert list(actual.states["state"]) == list(expected.states["state"])
    for number, state in expected.states["state"].items():
        assert_same_state(actual.states["state"][number], state)


@pytest.mark.parametrize("duplicate", telling([copy.deepcopy, _pickled], "_pickled"))
def test_a_copy_keeps_no_engine(duplicate: Any) -> None:
    strategy = ElixirStrategy(**TIGHT)
    trainer, model, run = fit(strategy)
    engine = weakref.ref(strategy._engine.engine)
    copied = duplicate(trainer.model)
    del strategy, trainer, model
    gc.collect()
    assert engine() is None
    assert_same_state(copied.state_dict(), run.state)


class CopiedTogether(pl.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 1:
            return
        whole = trainer.strategy.broadcast(trainer.strategy.lightning_module_state_dict())
        for duplicate in (copy.deepcopy, _pickled):
            assert_same_state(duplicate(trainer.model).state_dict(), whole)
            copied = duplicate(trainer)
            assert_same_state(copied.model.state_dict(), whole)
            assert len(copied.optimizers[0].state) == len(whole)
            duplicate(trainer.callbacks)


def _copy_on_two_ranks(folder: str) -> None:
    callbacks = [CopiedTogether(), pl.callbacks.ModelCheckpoint(folder)]
    fit(ElixirStrategy(**TIGHT), devices=2, callbacks=callbacks, enable_checkpointing=True, precision="bf16-mixed")


@pytest.mark.full
def test_copies_on_two_ranks_are_whole_on_both(tmp_path: Path) -> None:
    run_ranks(_copy_on_two_ranks, 2, str(tmp_path), init_group=False)


RUNS = {
    "cpu": TIGHT,
    "const": {**CHUNK, "placement_policy": "const", "offload_optim_frac": 0.5},
    "nvme": {**TIGHT, "nvme_offload_fraction": 1.0, "nvme_offload_param_fraction": 0.5, "nvme_offload_dir": "states"},
}


@crossed(told=["nvme-False", "const-True"], elixir=RUNS, has_failed=[False, True])
def test_no_thread_goes_on_when_a_run_is_over(elixir: str, has_failed: bool) -> None:
    before = set(threading.enumerate())
    strategy, model = ElixirStrategy(**RUNS[elixir]), RaisingNet(optimizer="hybrid")
    model.moment = "forward" if has_failed else "never"
    trainer = make_trainer(strategy, accumulate_grad_batches=2)
    with pytest.raises(ValueError, match="forward") if has_failed else contextlib.nullcontext():
        trainer.fit(model, make_data(), make_data(8))
    assert set(threading.enumerate()) == before
    for run in (trainer.validate, trainer.test, trainer.predict):
        run(model, make_data(8))
        assert set(threading.enumerate()) == before
    losses = len(model.losses)
    trainer.fit_loop.max_epochs += 1
    trainer.fit(model, make_data())  # they begin again
    assert len(model.losses) > losses
    assert set(threading.enumerate()) == before


def _close_and_fit_again(has_failed: bool) -> None:
    before = set(threading.enumerate())
    strategy, model = ElixirStrategy(**TIGHT), RaisingNet(optimizer="hybrid")
    model.moment = "in backward" if has_failed else "never"
    trainer = make_trainer(strategy, devices=2)
    with pytest.raises(ValueError, match="backward") if has_failed else contextlib.nullcontext():
        trainer.fit(model, make_data(64))
    strategy.close()
    while set(threading.enumerate()) - before:  # the one that watches the other rank ends when it has looked once more
        time.sleep(0.01)
    assert fit(ElixirStrategy(**TIGHT), devices=2)[2].losses == fit(ElixirStrategy(**TIGHT), devices=2)[2].losses


@pytest.mark.parametrize("has_failed", [full(False), True])
def test_close_on_two_ranks_ends_the_threads(has_failed: bool) -> None:
    run_ranks(_close_and_fit_again, 2, has_failed, init_group=False, timeout_s=60)


def test_the_trainers_callbacks_are_the_users() -> None:
    seen: list[Any] = []

    class Looking(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            seen.append(list(trainer.callbacks))

    looking = Looking()
    trainer, _, _ = fit(ElixirStrategy(**TIGHT, report_dir="report"), callbacks=[looking], logger=True)
    assert seen
    assert all(callbacks == [looking] for callbacks in (*seen, trainer.callbacks))


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:.*TorchScript")
@pytest.mark.parametrize("keep", [None, full([torch.nn.LayerNorm, "layers.4"])])
def test_torchscript_takes_a_copy(keep: Any) -> None:
    """Also where modules of 16 bits and of fp32 meet, between which hooks cast."""
    options = {} if keep is None else {"precision": "bf16-mixed"}
    _, model, _ = fit(ElixirStrategy(**TIGHT, keep_fp32=keep, autocast=keep is None), **options)
    x = torch.ones(2, 32)
    expected = (model.eval() if keep is None else copy.deepcopy(model.eval()))(x)
    with pytest.raises(StateError, match=r"cannot be traced .* copy\.deepcopy\(model\)"):
        torch.jit.trace(model, x)
    copied = copy.deepcopy(model)
    left = [f"_forward{kind}" for kind in ("_hooks", "_pre_hooks", "_hooks_with_kwargs", "_pre_hooks_with_kwargs")]
    assert not any(getattr(m, name) for m in copied.modules() for name in (*left, "_forward_hooks_always_called"))
    assert torch.equal(torch.jit.trace(copied.layers, x)(x), expected)
    assert torch.equal(torch.jit.script(copied.layers)(x), expected)
    if keep is None:
        assert torch.equal(model(x), expected)

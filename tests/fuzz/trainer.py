"""A program through Lightning's Trainer with `ElixirStrategy`. The oracle is the plain loop of `play.py`, which does
what automatic optimization does."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_elixir._lightning import LightningModule, Trainer
from lightning_elixir.errors import CapacityError, ElixirError, PeerLostError
from lightning_elixir.plan.io import load_plan
from lightning_elixir.strategy import ElixirStrategy
from lightning_elixir.strategy.engine_handle import EngineHandle
from lightning_elixir.strategy.precision import ElixirPrecision
from tests.fuzz.backends import COUNTED, Plain, least_limit, plan_options, tight_plan
from tests.fuzz.build import Net, make_model, make_optimizer, make_schedule
from tests.fuzz.options import strategy_options
from tests.fuzz.play import Note, Player, raised
from tests.fuzz.programs import AFTER_FORWARD, BEFORE_STEP, FAULTS, P_GRAD, Program

_PATIENCE = 14

T = TypeVar("T")


class Module(LightningModule):
    """The model of a program, and its steps."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.net: Net = make_model(program)
        self.player: Player | None = None

    def forward(self, **batch: Tensor) -> Any:
        return self.net(**batch)

    def on_train_start(self) -> None:
        assert self.player is not None
        self.player.watcher.begin()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        assert self.player is not None
        step, micro = self.trainer.global_step, index % self.program.micro_batches
        loss = self.player.training_loss(step, micro)
        changes = self.program.at(step, AFTER_FORWARD + FAULTS)
        if not changes:
            return loss
        part = loss / self.program.micro_batches  # which Lightning will divide
        changed = self.player.after_forward(step, micro, part)
        return loss if changed is part else changed * self.program.micro_batches

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if (index + 1) % self.program.micro_batches == 0:
            assert self.player is not None
            self.player.between_steps(self.trainer.global_step - 1)

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self.program, self.net.named_parameters())
        schedule = make_schedule(self.program, optimizer)
        if schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class WatchingModule(Module):
    """With a hook between backward and step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.player is not None
        self.player.before_step(self.trainer.global_step)


class HesitatingModule(WatchingModule):
    """Leaves steps out."""

    def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any = None) -> None:
        if any(a.name == "no_step" for a in self.program.at(self.trainer.global_step, BEFORE_STEP)):
            closure()
            self.on_before_optimizer_step(optimizer)
        else:
            super().optimizer_step(epoch, index, optimizer, closure)


def make_module(program: Program) -> Module:
    names = {a.name for a in program.actions}
    if "no_step" in names:
        return HesitatingModule(program)
    return WatchingModule(program) if names & {*BEFORE_STEP, *P_GRAD} else Module(program)


class Left(NamedTuple):
    """What one Trainer leaves to the next."""

    checkpoint: Path
    variant: int
    """Of the next one's chunks."""
    is_sharded: bool

    @property
    def is_saved_inside(self) -> bool:
        """As a callback does, with the batch not over; else when the fit has ended."""
        return self.variant % 2 == 0


class InTrainer(Plain):
    """What a user sees inside a fit."""

    is_engine = True

    def __init__(self, program: Program, module: Module, folder: str) -> None:
        self.program, self.module, self.folder = program, module, folder
        self.rank = int(os.environ["RANK"]) if program.ranks > 1 else 0
        self.dtype = getattr(torch, program.dtype)
        self.is_half = self.dtype.itemsize == 2
        self.is_mixed = self.is_half and program.option("master_weights", True)
        self.model = module.net
        self.named = dict(module.net.named_parameters())
        self.counters = Counter()
        self.sums, self.masters = {}, {}  # the engine has them
        self.earlier: Left | None = None
        """What this one goes on from."""
        self.left: Left | None = None
        """For the next one."""

    def successor(self, module: Module) -> InTrainer:
        """For the Trainer that goes on from this one's checkpoint."""
        following = InTrainer(self.program, module, self.folder)
        following.earlier, following.counters = self.left, self.counters
        return following

    @property
    def strategy(self) -> ElixirStrategy:
        strategy = self.module.trainer.strategy
        assert isinstance(strategy, ElixirStrategy)
        return strategy

    @property
    def optimizer(self) -> Any:  # type: ignore[override]
        return self.module.optimizers(use_pl_optimizer=False)

    def before_forward(self) -> None:
        """The engine does that by itself."""

    def copied(self) -> Net:
        model = copy.deepcopy(self.model)
        return model.float() if self.is_half else model

    def __call__(self, **batch: Tensor) -> Any:
        if self.is_half and not self.program.option("autocast"):
            batch = {k: v.to(self.dtype) if v.is_floating_point() else v for k, v in batch.items()}
        with self.around_steps():
            return self.model(**batch)

    def backward(self, loss: Tensor, **options: Any) -> None:
        self.optimizer.scale_loss(loss).backward(**options)

    def scaling(self) -> dict[str, Any]:
        return {"scale": self.optimizer.loss_scale, "is skipped": self.optimizer.is_step_skipped}

    @contextmanager
    def visible_grads(self) -> Iterator[None]:
        """They are all the time."""
        yield

    def grads(self) -> dict[str, Tensor]:
        return {name.removeprefix("net."): grad for name, grad in self.strategy.full_grads().items()}

    def drop_gradient(self, name: str) -> None:
        self.named[name].grad = None

    def state(self) -> dict[str, Any]:
        if self.is_sharded or self.program.ranks > 1:  # then Lightning's has no values, or has them on rank 0 alone
            handle = EngineHandle.of(self.module)
            assert handle is not None
            state: dict[str, Any] = handle.engine.full_state_dict(rank0_only=False)
        else:
            state = self.strategy.lightning_module_state_dict()
        return {name.removeprefix("net."): value for name, value in state.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state)

    def optimizer_state(self) -> dict[str, Any]:
        optimizer = self.strategy.optimizers[0]
        return copy.deepcopy(optimizer.state_dict() if self.is_sharded else self.strategy.optimizer_state(optimizer))

    @property
    def is_sharded(self) -> bool:
        return self.strategy._config.state_dict_type == "sharded"

    def rebuild(self, variant: int) -> None:
        """What comes next in this step is its end, and of this Trainer."""
        self.left = Left(Path(self.folder, f"resume{variant}.ckpt"), variant, self.is_sharded)
        if self.left.is_saved_inside:
            self.module.trainer.save_checkpoint(self.left.checkpoint)

    def save(self, number: int) -> None:
        self.module.trainer.save_checkpoint(Path(self.folder, f"save{number}.ckpt"))

    @contextmanager
    def whole(self, modify: bool) -> Iterator[dict[str, nn.Parameter]]:
        with self.strategy.full_parameters(modify=modify) as named:
            yield {name.removeprefix("net."): p for name, p in named.items()}

    def look(self) -> None:
        self.strategy.stats()
        self.strategy.grad_norm()


def fit(program: Program, folder: str, found: list[Note]) -> dict[str, int]:
    """Run a program.

    Returns:
        Counters; what is seen goes to `found`.
    """
    return within_limits(program, lambda limits: _fit(program, folder, limits, found))


def within_limits(program: Program, run: Callable[[dict[str, Any]], T]) -> T:
    """Run it with as little memory as the plan can do with, so that the rCache is small.

    Args:
        program: What is run.
        run: Takes the strategy's limits of memory.
    """
    limits: dict[str, Any] = {}
    if program.is_tight:
        limits["gpu_memory_limit"] = least_limit(make_model(program), plan_options(program))
    if program.option("cpu_memory_limit"):
        limits["cpu_memory_limit"] = 1 if program.option("cpu_memory_limit") == "tight" else "2GiB"
    for _ in range(_PATIENCE if program.ranks == 1 else 0):
        try:
            return run(limits)
        except CapacityError as error:  # the strategy counts more than a plan does
            name = "gpu_memory_limit" if error.resource == "GPU" else "cpu_memory_limit"
            if not isinstance(limits.get(name), int) or not error.lacking_bytes:
                raise
            limits[name] += error.lacking_bytes
    # Ranks whose fit has failed have no process group any more, and get this one chance.
    more = {name: 2 * limit if isinstance(limit, int) and limit > 1 else None for name, limit in limits.items()}
    return run(more)


def _fit(program: Program, folder: str, limits: dict[str, Any], found: list[Note]) -> dict[str, int]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    backend, counters = InTrainer(program, make_module(program), folder), Counter[str]()
    player = Player(program, backend)
    player.notes = found
    found.clear()
    resumed = {a.step + 1 for a in program.actions if a.name == "resume"}
    try:
        for number, end in enumerate([*sorted(resumed), program.steps]):  # the last may have nothing left to do
            if number:
                backend = player.backend = backend.successor(make_module(program))
            is_through = _run_until(end, player, backend, limits)
            stats = backend.strategy.stats()
            counters.update({name: getattr(stats, name) for name in COUNTED})
            if not is_through:
                break
    finally:
        player.watcher.stop()
        player.logits = torch.empty(0)  # its graph knows the engine, which knows the module and this player
    player.finish()
    counters.update(backend.counters)
    if program.option("report_dir") and backend.rank == 0:
        _check_report(Path(folder, "report"))
    backend.strategy.close()
    return dict(counters)


def make_trainer(backend: InTrainer, limits: dict[str, Any], end: int) -> Trainer:
    """One that goes up to so many steps."""
    program, module, folder, earlier = backend.program, backend.module, backend.folder, backend.earlier
    options = strategy_options(program, folder, lambda: tight_plan(module, plan_options(program), program.is_tight))
    if earlier is not None:
        if "plan" not in options:
            options |= {"chunk_size": plan_options(program, earlier.variant)["chunk_size"]}
        if earlier.variant % 3 == 0:  # either kind is loaded
            options |= {"state_dict_type": "full" if earlier.is_sharded else "sharded", "async_save": False}
    return Trainer(
        accelerator="gpu" if program.device == "cuda" else "cpu",
        devices=program.ranks,
        strategy=ElixirStrategy(**options, **limits),
        **_precision(program),
        max_steps=end,
        accumulate_grad_batches=program.micro_batches,
        gradient_clip_val=program.clip_at if program.clip else None,
        gradient_clip_algorithm=program.clip or None,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
    )


def _precision(program: Program) -> dict[str, Any]:
    name = _PRECISIONS[program.dtype, program.option("master_weights", True)]
    if name == "16-mixed" and program.device == "cpu":  # where Lightning takes bf16 instead
        return {"plugins": [ElixirPrecision(name, autocast=program.option("autocast", False))]}
    return {"precision": name}


def batches(program: Program) -> DataLoader[Any]:
    """As many as the steps take; what is in them the player knows."""
    return DataLoader(torch.arange(program.steps * program.micro_batches * program.ranks))  # type: ignore[arg-type]


def _run_until(end: int, player: Player, backend: InTrainer, limits: dict[str, Any]) -> bool:
    """A Trainer of its own, up to so many steps. Returns whether nothing was raised."""
    program, module, earlier = player.program, backend.module, backend.earlier
    trainer = make_trainer(backend, limits, end)
    module.player = player
    try:
        trainer.fit(module, batches(program), ckpt_path=None if earlier is None else earlier.checkpoint)
    except Exception as error:
        # What the program raises on all ranks, one may hear of from another before it comes there.
        is_ours = isinstance(error, ElixirError) and not isinstance(error, PeerLostError)
        if is_ours or not any(a.name in FAULTS + AFTER_FORWARD + P_GRAD for a in program.actions):
            raise
        player.note("raised", raised(error))
        return False
    if backend.left is not None and not backend.left.is_saved_inside:
        trainer.save_checkpoint(backend.left.checkpoint)
    return True


_PRECISIONS: dict[tuple[str, bool], Any] = {
    ("float32", True): "32-true",
    ("bfloat16", True): "bf16-mixed",
    ("bfloat16", False): "bf16-true",
    ("float16", True): "16-mixed",
    ("float16", False): "16-true",
}


def _check_report(folder: Path) -> None:
    load_plan(folder / "plan.json")
    if not json.loads((folder / "report.json").read_text()) or "<html" not in (folder / "report.html").read_text():
        raise AssertionError(f"no report in {folder}")

"""A program through Lightning's Trainer with `ElixirStrategy`. The oracle is the plain loop of `play.py`, which does
what automatic optimization does."""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_elixir._lightning import LightningModule, Trainer
from lightning_elixir.errors import CapacityError, ElixirError
from lightning_elixir.strategy import ElixirStrategy
from lightning_elixir.strategy.config import ElixirConfig
from tests.fuzz.backends import COUNTED, Plain, least_limit, plan_options
from tests.fuzz.build import Net, make_model, make_optimizer, make_schedule
from tests.fuzz.play import Note, Player, raised
from tests.fuzz.programs import FAULTS, Program

_PATIENCE = 8


class Module(LightningModule):
    """The model of a program, and its steps."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.net: Net = make_model(program)
        self.player: Player | None = None

    def forward(self, **batch: Tensor) -> Any:
        return self.net(**batch)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        assert self.player is not None
        return self.player.training_loss(self.trainer.global_step, index % self.program.micro_batches)

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


class InTrainer(Plain):
    """What a user sees inside a fit."""

    is_engine = True

    def __init__(self, program: Program, module: Module) -> None:
        self.program, self.module = program, module
        self.rank = int(os.environ["RANK"]) if program.ranks > 1 else 0
        self.is_half = program.dtype == "bfloat16"
        self.is_mixed = self.is_half
        self.model = module.net
        self.named = dict(module.net.named_parameters())

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
            batch = {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch.items()}
        is_cast = self.is_half and self.program.option("autocast")
        with torch.autocast(self.program.device, torch.bfloat16) if is_cast else nullcontext():
            return self.model(**batch)

    def state(self) -> dict[str, Any]:
        state = self.strategy.lightning_module_state_dict()
        return {name.removeprefix("net."): value for name, value in state.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state)

    def optimizer_state(self) -> dict[str, Any]:
        return copy.deepcopy(self.strategy.optimizer_state(self.strategy.optimizers[0]))

    @contextmanager
    def whole(self, modify: bool) -> Iterator[dict[str, nn.Parameter]]:
        with self.strategy.full_parameters(modify=modify) as named:
            yield {name.removeprefix("net."): p for name, p in named.items()}

    def look(self) -> None:
        self.strategy.stats()
        self.strategy.grad_norm()


def fit(program: Program, folder: str, found: list[Note]) -> dict[str, int]:
    """Run a program, with as little memory as its plan can do with, so that the rCache is small.

    Returns:
        Counters; what is seen goes to `found`.
    """
    limit = least_limit(make_model(program), plan_options(program)) if program.is_tight else None
    for _ in range(_PATIENCE if program.ranks == 1 else 0):
        try:
            return _fit(program, folder, limit, found)
        except CapacityError as error:  # the strategy counts more than a plan does
            if limit is None or error.resource != "GPU" or not error.lacking_bytes:
                raise
            limit += error.lacking_bytes
    # Ranks whose fit has failed have no process group any more, and get this one chance.
    return _fit(program, folder, None if limit is None else 2 * limit, found)


def _fit(program: Program, folder: str, limit: int | None, found: list[Note]) -> dict[str, int]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = Module(program)
    strategy = ElixirStrategy(**_strategy_options(program, folder), gpu_memory_limit=limit)
    trainer = Trainer(
        accelerator="gpu" if program.device == "cuda" else "cpu",
        devices=program.ranks,
        strategy=strategy,
        precision="bf16-mixed" if program.dtype == "bfloat16" else "32-true",
        max_steps=program.steps,
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
    backend = InTrainer(program, module)
    module.player = player = Player(program, backend)
    player.notes = found
    found.clear()
    data = DataLoader(torch.arange(program.steps * program.micro_batches * program.ranks))
    try:
        trainer.fit(module, data)
    except ElixirError:
        raise
    except Exception as error:
        if not any(a.name in FAULTS for a in program.actions):
            raise
        player.note("raised", raised(error))
    player.finish()
    stats = strategy.stats()
    counters = {name: getattr(stats, name) for name in COUNTED}
    strategy.close()
    return counters


def _strategy_options(program: Program, folder: str) -> dict[str, Any]:
    known = {f.name for f in dataclasses.fields(ElixirConfig)}
    options = {k: v for k, v in (*program.plan, *program.options) if k in known}
    options["autocast"] = program.option("autocast", False)  # as ElixirModule
    if options.get("nvme_offload_fraction"):
        options["nvme_offload_dir"] = str(Path(folder) / "nvme")
    return options

"""The user's own training step, run on fake tensors before it runs for real: what it will take, and when.

[Note: dry run] A copy of the LightningModule gets stand-ins for the batch, and nothing is computed
(`profiling/fake_step.py`). The user's code must not notice: what it counts, it counts in the copy; what it logs and
prints goes nowhere; random states are put back; the copy's trainer, optimizers and schedulers tell figures, such as
`global_step` and the learning rate, and refuse everything else. Numbers that the code reads from tensors are taken to
be 1, and answers no. Where all this does not do, there is no dry run, and the first step is watched instead
(`strategy/warm_up.py`). What the code changes outside of the module, such as files and globals, it changes once more.
"""

from __future__ import annotations

import contextlib
import enum
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_elixir._lightning import LightningModule, Trainer
from lightning_elixir.core.random_states import capture_random_states, restore_random_states
from lightning_elixir.errors import PlanError
from lightning_elixir.plan.profile import MemoryProfile
from lightning_elixir.profiling.fake_step import profile_memory
from lightning_elixir.profiling.known_values import GuessedValues

_PLAIN = (bool, int, float, str, bytes, enum.Enum, timedelta, torch.device, torch.dtype, type(None))


def dry_run(
    module: LightningModule,
    args: Sequence[Any],
    loss_of: Callable[[Any], Tensor | None],
    *,
    compute_dtype: torch.dtype | None,
    has_autocast: bool,
    kept_fp32: frozenset[str],
) -> MemoryProfile:
    """What a training step takes and does. Neither the module nor the batch nor random states change.

    Args:
        module: In a fit, with automatic optimization; its parameters may be anywhere.
        args: Of `training_step`; tensors on any device.
        loss_of: Makes the loss from what `training_step` returns.
        compute_dtype: Dtype of forward and backward; None: each parameter keeps its own.
        has_autocast: Whether steps run under `torch.autocast`.
        kept_fp32: Names of the parameters that are computed with in fp32 all the same.

    Raises:
        PlanError: The step does not run without values.
    """
    trainer = _FiguresOf(module.trainer)
    tensors: list[Tensor] = []
    apply_to_collection(tuple(args), Tensor, tensors.append)

    def step(copy: nn.Module, inp: Mapping[str, Any]) -> None:
        stand_ins = iter(inp["tensors"])
        fake_args = apply_to_collection(tuple(args), Tensor, lambda _: next(stand_ins))
        if not isinstance(copy, LightningModule):
            raise TypeError(f"the copy is a {type(copy).__name__}")
        _keep_to_itself(copy, module, trainer)
        with GuessedValues():
            loss = loss_of(copy.training_step(*fake_args))
            if loss is None:
                raise ValueError("training_step returned no loss")
            copy.backward(loss)

    with _unnoticed(module.device):
        return profile_memory(
            module,
            {"tensors": tensors},
            step,
            compute_dtype,
            autocast=has_autocast,
            keep_fp32=sorted(kept_fp32) or None,
            master_weights=False,  # what is kept has been decided
            stand_ins=[(module.trainer, trainer)],
        )


class _FiguresOf:
    """A Trainer that can be asked, and does nothing."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("logger", "loggers"):
            return _Nothing()
        value = getattr(self._trainer, name)
        if isinstance(value, _PLAIN):
            return value
        raise PlanError(f"training_step uses trainer.{name}, which is not there in a dry run")


class _GroupsOf:
    """An optimizer whose settings can be read; what is written goes nowhere."""

    def __init__(self, optimizer: Any) -> None:
        self.param_groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


class _RatesOf:
    """A scheduler that tells how far it is, and goes no further."""

    def __init__(self, scheduler: Any) -> None:
        self.last_epoch = scheduler.last_epoch
        self.get_last_lr = scheduler.get_last_lr


def _shown(ask: Callable[..., Any], show: Callable[[Any], Any]) -> Callable[..., Any]:
    """`LightningModule.optimizers` or `lr_schedulers`, with others in the place of each of them."""

    def asked(*args: Any, **options: Any) -> Any:
        found = ask(*args, **options)
        if isinstance(found, list):
            return [show(one) for one in found]
        return None if found is None else show(found)

    return asked


class _Nothing:
    """Can be called and asked for anything, which is nothing again."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        return

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return False

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        return


def _keep_to_itself(copy: LightningModule, module: LightningModule, trainer: _FiguresOf) -> None:
    """Have the copy, and modules of Lightning in it, tell nobody what they do."""
    nothing = _Nothing()
    for one in copy.modules():
        if hasattr(one, "_device"):
            object.__setattr__(one, "_device", torch.device("cpu"))  # where fake tensors are
        if not isinstance(one, LightningModule):
            continue
        silent = {
            "_trainer": trainer,
            "log": nothing,
            "log_dict": nothing,
            "print": nothing,
            "all_gather": _gathering(module.trainer.world_size),
            "optimizers": _shown(module.optimizers, _GroupsOf),
            "lr_schedulers": _shown(module.lr_schedulers, _RatesOf),
        }
        for name, value in silent.items():
            object.__setattr__(one, name, value)


def _gathering(world_size: int) -> Callable[..., Any]:
    """`LightningModule.all_gather` where every rank has what this one has."""

    def all_gather(data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        if world_size == 1:
            return data
        return apply_to_collection(data, Tensor, lambda t: torch.stack([t] * world_size))

    return all_gather


@contextmanager
def _unnoticed(device: torch.device) -> Iterator[None]:
    """What is printed, logged and drawn inside leaves no trace; what is compiled runs as it is."""
    states, disabled = capture_random_states(device), logging.root.manager.disable
    out, err = io.StringIO(), io.StringIO()
    logging.disable(max(disabled, logging.WARNING))
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.compiler.set_stance("force_eager"):
                yield
    finally:
        logging.disable(disabled)
        restore_random_states(states, device)

"""The user's own training step, run on fake tensors before it runs for real: what it will take, and when.

[Note: dry run] A copy of the LightningModule gets stand-ins for the batch, and nothing is computed
(`profiling/fake_step.py`). The user's code must not notice: what it counts, it counts in the copy; what it logs and
prints goes nowhere; what it changes in its classes, its files' globals, the batch and the like is put back
(`strategy/put_back.py`), as are random states; the copy's trainer, optimizers and schedulers tell figures, such as
`global_step` and the learning rate, and refuse most else. Steps of optimizers and schedulers change nothing, so that
manual optimization runs too: of several forwards and backwards in one batch the last ones count, as in a step that is
watched (`runtime/iterations.py`), with the memory of the largest. Numbers that the code reads from tensors are taken to
be 1, and answers no, so many times and no more: a loop may wait for others. A metric of torchmetrics that needs values
is left out where no gradient can come from it. Where all this does not do, or the code may use up an iterator, there is
no dry run, and the first step is watched instead (`strategy/warm_up.py`). What the code does outside of the process,
such as lines in files, it does once more. Tensors without values that something still holds afterwards end the fit:
training would go on with them, unnoticed.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import enum
import functools
import io
import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric

from lightning_elixir._lightning import LightningModule, Trainer
from lightning_elixir.core.random_states import capture_random_states, restore_random_states
from lightning_elixir.errors import PlanError, StateError
from lightning_elixir.plan.profile import MemoryProfile
from lightning_elixir.profiling.fake_step import profile_memory
from lightning_elixir.profiling.known_values import Guesses
from lightning_elixir.strategy.put_back import PutBack, left_behind
from lightning_elixir.strategy.used_iterators import used_iterators

_PLAIN = (bool, int, float, str, bytes, enum.Enum, timedelta, torch.device, torch.dtype, type(None))
_COLLECTIVES = ("c10d", "_c10d_functional")  # namespaces of operators


def dry_run(
    module: LightningModule,
    args: Sequence[Any],
    loss_of: Callable[[Any], Tensor | None] | None,
    *,
    compute_dtype: torch.dtype | None,
    has_autocast: bool,
    kept_fp32: frozenset[str],
    blocks: Collection[str] = (),
) -> MemoryProfile:
    """What a training step takes and does. Neither the module nor the batch nor random states change.

    Args:
        module: In a fit; its parameters may be anywhere.
        args: Of `training_step`; tensors on any device.
        loss_of: Makes the loss from what `training_step` returns; None: it runs backward itself, under manual
            optimization.
        compute_dtype: Dtype of forward and backward; None: each parameter keeps its own.
        has_autocast: Whether steps run under `torch.autocast`.
        kept_fp32: Names of the parameters that are computed with in fp32 all the same.
        blocks: Names of modules that keep all that autograd saves, and of which the profile tells what that is.

    Raises:
        PlanError: The step does not run without values, or runs no backward.
        StateError: The user's code holds tensors of the dry run where they cannot be taken away.
    """
    made: list[weakref.ref[Tensor]] = []
    figures = partial(
        profile_memory,
        dtype=compute_dtype,
        autocast=has_autocast,
        keep_fp32=sorted(kept_fp32) or None,
        master_weights=False,  # what is kept has been decided
        blocks=blocks,
    )
    # In a copy of the context, so that what is set there (`contextvars`) is forgotten.
    run = partial(_profiled, module, args, loss_of, made, figures)
    profile, reason = contextvars.copy_context().run(_profile_or_reason, module, args, run)
    # Not before the exception, and what it holds, is gone.
    kept = left_behind(made)
    if kept:
        raise StateError(
            f"training_step keeps {len(kept)} tensors outside of the module, the batch and the user's own files"
            f" (shapes {', '.join(str(list(t.shape)) for t in kept[:3])}), and in a dry run those have no values. Keep"
            " them in the module; or ask for self.trainer.strategy at the start of training_step: there is no dry run"
            " then"
        )
    if profile is None:
        raise PlanError(reason)
    return profile


def _profile_or_reason(
    module: LightningModule, args: Sequence[Any], run: Callable[[], MemoryProfile]
) -> tuple[MemoryProfile | None, str]:
    """What `run` gives, unnoticed by the user's code; without a profile, why there is none."""
    try:
        with unnoticed(module, args):
            return run(), ""
    except (Exception, SystemExit) as error:
        return None, _why(error.__cause__ or error)


def _why(error: BaseException) -> str:
    if isinstance(error, StateError):  # a parameter of the engine's was read
        return "a copy of the model leads back to the original, whose modules another object or container holds"
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _profiled(
    module: LightningModule,
    args: Sequence[Any],
    loss_of: Callable[[Any], Tensor | None] | None,
    made: list[weakref.ref[Tensor]],
    profile: Callable[..., MemoryProfile],
) -> MemoryProfile:
    """As `dry_run`, which keeps things away from the user's code; adds the tensors without values to `made`.

    Args:
        profile: `profile_memory` with the options that it is to have.
    """
    trainer = _FiguresOf(module.trainer)
    tensors: list[Tensor] = []
    copies: list[nn.Module] = []
    apply_to_collection(tuple(args), Tensor, tensors.append)

    def step(copy: nn.Module, inp: Mapping[str, Any]) -> None:
        stand_ins = iter(inp["tensors"])
        fake_args = apply_to_collection(tuple(args), Tensor, lambda _: next(stand_ins))
        if not isinstance(copy, LightningModule):
            raise TypeError(f"the copy is a {type(copy).__name__}")
        copies.append(copy)
        made.extend(map(weakref.ref, (*copy.parameters(), *copy.buffers(), *inp["tensors"])))
        _keep_to_itself(copy, module, trainer)
        output = copy.training_step(*fake_args)
        if loss_of is None:
            return
        loss = loss_of(output)
        if loss is None:
            raise ValueError("training_step returned no loss")
        copy.backward(loss)

    guess = Guesses()

    def around_operator(func: Any, args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        if func.namespace in _COLLECTIVES:
            raise PlanError(f"training_step talks to other ranks ({func})")
        result = guess(func, args, run)
        results = (result,) if isinstance(result, Tensor) else tree_leaves(result)
        made.extend(weakref.ref(one) for one in results if isinstance(one, FakeTensor))
        return result

    try:
        found = profile(
            module,
            {"tensors": tensors},
            step,
            stand_ins=[(module.trainer, trainer)],
            around_operator=around_operator,
        )
    finally:
        for copy in copies:  # modules lie in cycles, and would stay until the collector comes
            for one in list(copy.modules()):
                vars(one).clear()
    if loss_of is None and not any(interval.is_backward for interval in found.timeline):
        raise PlanError("training_step ran no backward")
    return found if loss_of is not None else found.of_last_iteration()


class _FiguresOf:
    """A Trainer that can be asked, and does nothing."""

    optimizers: list[_GroupsOf]

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
        if name == "lr_scheduler_configs":
            return [dataclasses.replace(config, scheduler=_RatesOf(config.scheduler)) for config in value]
        raise PlanError(f"training_step uses trainer.{name}, which is not there in a dry run")


class _GroupsOf:
    """An optimizer whose settings can be read, over the copy's parameters; steps change nothing.

    Args:
        optimizer: The real one.
        copy: Of the module.
        copied: The copy's parameters, by `id` of the module's.
    """

    def __init__(self, optimizer: Any, copy: LightningModule, copied: Mapping[int, Tensor]) -> None:
        self._copy = copy
        self.defaults = dict(optimizer.defaults)
        self.param_groups = [
            {**group, "params": [copied[id(p)] for p in group["params"]]} for group in optimizer.param_groups
        ]

    @property
    def optimizer(self) -> _GroupsOf:
        """As that of a `LightningOptimizer`."""
        return self

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """As that of a `LightningOptimizer`."""
        toggled: Any = self
        self._copy.toggle_optimizer(toggled)
        yield
        self._copy.untoggle_optimizer(toggled)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.grad = None  # also where values are set to 0: the engine keeps none

    def step(self, closure: Callable[[], Any] | None = None, **_: Any) -> Any:
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()


class _RatesOf:
    """A scheduler that tells how far it is, and goes no further."""

    def __init__(self, scheduler: Any) -> None:
        self.last_epoch = scheduler.last_epoch
        self.get_last_lr = scheduler.get_last_lr

    def step(self, *_: Any, **__: Any) -> None: ...


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
    """Give the copy, and LightningModules in it, methods that log, print and gather nothing."""
    nothing = _Nothing()
    fakes = dict(copy.named_parameters(remove_duplicate=False))
    copied = {id(p): fakes[name] for name, p in module.named_parameters(remove_duplicate=False)}
    optimizers = [_GroupsOf(optimizer, copy, copied) for optimizer in module.trainer.optimizers]
    trainer.optimizers = optimizers
    for one in copy.modules():
        if hasattr(one, "_device"):
            object.__setattr__(one, "_device", torch.device("cpu"))  # where fake tensors are
        if isinstance(one, Metric):
            _leave_out_what_needs_values(one)
        if not isinstance(one, LightningModule):
            continue
        silent = {
            "_trainer": trainer,
            "log": nothing,
            "log_dict": nothing,
            "print": nothing,
            "all_gather": _gathering(module.trainer.world_size),
            "optimizers": partial(_shown, optimizers),
        }
        if not one.automatic_optimization:  # otherwise these raise, and should
            silent |= {"manual_backward": one.backward, "clip_gradients": nothing}
        for name, value in silent.items():
            object.__setattr__(one, name, value)


def _shown(optimizers: list[_GroupsOf], use_pl_optimizer: bool = True) -> _GroupsOf | list[_GroupsOf]:
    """As `LightningModule.optimizers`: the one, or all of several."""
    return optimizers[0] if len(optimizers) == 1 else list(optimizers)


def _leave_out_what_needs_values(metric: Metric) -> None:
    """Have a metric go on without what it cannot do without values: what comes out then is of what it did before, or
    one number, and carries no gradient; so it is only where none is wanted of the metric."""

    def guarded(run: Callable[..., Any], otherwise: Callable[[], Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def guarded_run(*args: Any, **kwargs: Any) -> Any:
            try:
                return run(*args, **kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException):
                has_gradients = any(isinstance(t, Tensor) and t.requires_grad for t in tree_leaves((args, kwargs)))
                if has_gradients and metric.is_differentiable is not False:
                    raise
                return otherwise()

        return guarded_run

    vars(metric)["update"] = guarded(metric.update, lambda: None)
    vars(metric)["compute"] = guarded(metric.compute, lambda: torch.zeros(()))


def _gathering(world_size: int) -> Callable[..., Any]:
    """`LightningModule.all_gather` where every rank has what this one has."""

    def all_gather(data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        if world_size == 1:
            return data
        return apply_to_collection(data, Tensor, lambda t: torch.stack([t] * world_size))

    return all_gather


@contextmanager
def unnoticed(module: LightningModule, args: Sequence[Any]) -> Iterator[None]:
    """What happens inside leaves no trace in the process; what is compiled runs as it is."""
    kinds = sorted({type(one).__name__ for one in used_iterators(module)})
    if kinds:
        raise PlanError(f"training_step may use up an iterator ({', '.join(kinds)}), which cannot be put back")
    device = module.device
    states, disabled, said_once = capture_random_states(device), logging.root.manager.disable, _said_once()
    there = PutBack()
    there.skip(module.trainer)
    there.add_model(module)
    there.add(tuple(args))
    for optimizer in module.trainer.optimizers:
        there.skip(optimizer)
        there.add(optimizer.param_groups)
    for config in module.trainer.lr_scheduler_configs:
        there.add(vars(config.scheduler))
    there.add_code_of(module)  # the last, since other threads may change globals
    out, err, stdin, stop = io.StringIO(), io.StringIO(), sys.stdin, sys.breakpointhook
    logging.disable(max(disabled, logging.CRITICAL))
    for name, method in said_once.items():  # else nothing would be said in the real step
        setattr(logging.Logger, name, method.__wrapped__)
    sys.stdin, sys.breakpointhook = io.StringIO(), _no_breakpoint
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.compiler.set_stance("force_eager"):
                yield
    finally:
        sys.stdin, sys.breakpointhook = stdin, stop
        for name, method in said_once.items():
            setattr(logging.Logger, name, method)
        logging.disable(disabled)
        restore_random_states(states, device)
        there.put_back()  # the last, since the user's objects may raise


def _said_once() -> dict[str, Any]:
    """The methods that libraries give loggers, and that remember what they have logged."""
    return {n: m for n, m in vars(logging.Logger).items() if isinstance(m, functools._lru_cache_wrapper)}


def _no_breakpoint(*args: Any, **kwargs: Any) -> None:
    raise PlanError("training_step has a breakpoint")

"""The precision plugin: dtype of forward and backward, input casts, clipping and stepping through `ElixirOptimizer`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_elixir._lightning import (
    Callback,
    DoublePrecision,
    FabricDoublePrecision,
    FabricHalfPrecision,
    FabricMixedPrecision,
    FabricPrecision,
    HalfPrecision,
    LightningModule,
    LightningOptimizer,
    MixedPrecision,
    Precision,
    is_overridden,
)
from lightning_elixir.core.shells import layout_of
from lightning_elixir.errors import PlanError

if TYPE_CHECKING:
    from lightning_elixir.wrapper import ElixirOptimizer

PrecisionName = Literal["64-true", "32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true"]

_NAMES: dict[str, PrecisionName] = {
    "64-true": "64-true",
    "64": "64-true",
    "32-true": "32-true",
    "32": "32-true",
    "16-mixed": "16-mixed",
    "16": "16-mixed",
    "bf16-mixed": "bf16-mixed",
    "bf16": "bf16-mixed",
    "16-true": "16-true",
    "bf16-true": "bf16-true",
}

_KNOWN_PLUGINS = (Precision, MixedPrecision, HalfPrecision, DoublePrecision) + (
    (FabricPrecision, FabricMixedPrecision, FabricHalfPrecision, FabricDoublePrecision)
)


class ElixirPrecision(Precision):
    """Precision under `ElixirStrategy`, which puts it in the place of whatever `Trainer(precision=...)` made.

    ============ ================= ============= ====================
    precision    parameters        optimizer     loss scaling
    ============ ================= ============= ====================
    `64-true`    fp64              fp64          none
    `32-true`    as the model has  the same      none
    `16-mixed`   fp16              fp32 master   dynamic
    `bf16-mixed` bf16              fp32 master   none
    `16-true`    fp16              fp16          none
    `bf16-true`  bf16              bf16          none
    ============ ================= ============= ====================

    In mixed precision buffers stay fp32, and so do the parameters of norms with running statistics, of modules under
    `spectral_norm` or `orthogonal`, under autocast of routers, and on the CPU under autocast of all norms; beside them
    what `ElixirStrategy(keep_fp32=...)` names. In `16-true` and `bf16-true` that alone stays fp32.

    Args:
        precision: One of the above; `16`, `bf16`, `32` and `64` are short for `16-mixed`, `bf16-mixed`, `32-true` and
            `64-true`.
        autocast: mixed: run steps under `torch.autocast`, so that norms, softmax and losses are computed in fp32.
            False: no autocast; floating-point inputs of the steps are cast, and everything is computed in 16 bits.

    Raises:
        PlanError: Another precision.
    """

    precision: PrecisionName = "32-true"

    def __init__(self, precision: str | int = "32-true", *, autocast: bool = True) -> None:
        name = _NAMES.get(str(precision))
        if name is None:
            raise PlanError(
                f"precision {precision!r} does not work with ElixirStrategy: choose one of"
                f" {', '.join(dict.fromkeys(_NAMES.values()))}"
            )
        self.precision = name
        self.autocast = autocast
        self.device_type = "cpu"  # the strategy tells
        self._optimizer: ElixirOptimizer | None = None
        self._scaling: dict[str, float | int] | None = None  # of the latest fit's loss scale

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_optimizer": None}  # of the run under way, which copies are not part of

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """Dtype of parameters in forward and backward; None: the model's own."""
        if self.precision == "32-true":
            return None
        if self.precision == "64-true":
            return torch.float64
        return torch.bfloat16 if self.precision.startswith("bf16") else torch.float16

    @property
    def is_mixed(self) -> bool:
        return self.precision.endswith("-mixed")

    @property
    def has_autocast(self) -> bool:
        return self.is_mixed and self.autocast

    @property
    def _true_dtype(self) -> torch.dtype | None:
        """The dtype that tensors are created in, where there is none but one."""
        return None if self.is_mixed else self.compute_dtype

    def check_device(self, device_type: str) -> None:
        """Take note of the compute device.

        Raises:
            PlanError: fp16 on the CPU.
        """
        if device_type == "cpu" and self.compute_dtype is torch.float16:
            raise PlanError(
                f"precision {self.precision!r} needs a GPU: on the CPU use {self.precision.replace('16', 'bf16')!r}"
            )
        self.device_type = device_type

    def attach_optimizer(self, optimizer: ElixirOptimizer | None) -> None:
        """The optimizer whose loss scale this plugin saves and restores. It goes on with the scale of the one before,
        as the scaler of Lightning's plugin does from one fit of a Trainer to the next."""
        if self._optimizer is not None and self._optimizer.scaler.enabled:
            self._scaling = self._optimizer.scaler.state_dict()
        self._optimizer = optimizer
        if optimizer is not None and self._scaling is not None:
            optimizer.scaler.load_state_dict(self._scaling)

    # Contexts and casts

    @override
    def convert_module(self, module: nn.Module, kept: Collection[str] = (), ignored: Collection[str] = ()) -> nn.Module:
        """Cast it where no fp32 copy exists: all but the parameters named in `ignored`, those in `kept`, which become
        fp32 if they are not, and the buffers of modules all of whose parameters are kept. Integers, 8-bit floats and
        complex numbers are left alone."""
        dtype = self._true_dtype
        if dtype is None:
            return module
        if self.precision == "64-true":
            module._apply(lambda tensor: cast_floating(tensor, torch.float64))
            return module
        alone = {id(p) for name, p in module.named_parameters(remove_duplicate=False) if name in ignored}
        wide = {id(p) for name, p in module.named_parameters(remove_duplicate=False) if name in kept}
        for part in module.modules() if wide else ():
            own = {id(p) for p in part.parameters()}
            if own and wide.issuperset(own):
                wide.update(id(b) for b in part.buffers())

        def cast(tensor: Tensor) -> Tensor:
            if id(tensor) in alone or layout_of(tensor) is not None:
                return tensor
            return cast_floating(tensor, torch.float32 if id(tensor) in wide else dtype)

        module._apply(cast)
        return module

    @override
    def tensor_init_context(self) -> AbstractContextManager[None]:
        return nullcontext() if self._true_dtype is None else _default_dtype(self._true_dtype)

    @override
    def module_init_context(self) -> AbstractContextManager[None]:
        return self.tensor_init_context()

    @override
    def forward_context(self) -> AbstractContextManager[None]:
        if self.has_autocast:
            return torch.autocast(self.device_type, dtype=self.compute_dtype, cache_enabled=False)
        return self.tensor_init_context()

    @override
    def convert_input(self, data: Any) -> Any:
        if self.compute_dtype is None or self.has_autocast:
            return data
        return apply_to_collection(data, Tensor, cast_floating, self.compute_dtype)

    # Backward and step

    @override
    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """The model's `backward` hook, on the scaled loss; gradients are reduced when it returns. Tensors are created
        in the dtype of the forward, since activation checkpointing runs it again."""
        elixir = _unwrap(optimizer)
        with elixir.module.engine.backwards.span(), self.tensor_init_context():
            model.backward(elixir.scale_loss(tensor), *args, **kwargs)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        elixir = _unwrap(optimizer)
        if elixir.begins_with_users_code and not elixir.scaler.enabled:
            # As in plain Lightning: it does something before the closure runs, and maybe with what that returns.
            return elixir.step(partial(self._wrap_closure, model, optimizer, closure), **kwargs)
        is_unobserved = is_update_unobserved(model)
        with elixir.unobserved(is_unobserved):
            # The closure runs here and not inside `step`: clipping needs the gradients of the whole closure.
            result = closure()
            elixir.show_unscaled()  # to the hooks, as Lightning does
            # What hooks do to inf and nan leaves the step skipped, and the scale too large. Ranks may have other hooks.
            elixir.find_overflows(not is_unobserved)
            self._after_closure(model, optimizer)
            is_skipped = result is None and model.automatic_optimization and self.precision == "16-mixed"
            if not is_skipped:  # as a GradScaler, which has nothing to unscale
                elixir.step(**kwargs)
        return result

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        _unwrap(optimizer).clip_grad_norm_(clip_val)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        _unwrap(optimizer).clip_grad_value_(clip_val)

    # Checkpoints

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # The optimizer saves its loss scale too; here it is for plain Lightning, under the name of its plugin.
        if self._optimizer is not None and self._optimizer.scaler.enabled:
            checkpoint[MixedPrecision.__qualname__] = self._optimizer.scaler.state_dict()

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint.get(MixedPrecision.__qualname__)
        if state and self._optimizer is not None:
            self._optimizer.scaler.load_state_dict(state)


def elixir_precision(plugin: Any, *, autocast: bool) -> ElixirPrecision:
    """The plugin to use where Lightning or the user came with `plugin`.

    Raises:
        PlanError: There is no counterpart.
    """
    if isinstance(plugin, ElixirPrecision):
        return plugin
    return ElixirPrecision(known_precision(plugin), autocast=autocast)


def known_precision(plugin: Any) -> str:
    """The precision of one of Lightning's own plugins, the Trainer's or Fabric's.

    Raises:
        PlanError: It is another plugin.
    """
    if type(plugin) in _KNOWN_PLUGINS:
        return str(plugin.precision)
    raise PlanError(
        f"{type(plugin).__name__} (precision {plugin.precision!r}) does not work with ElixirStrategy: choose precision"
        f" {', '.join(dict.fromkeys(_NAMES.values()))}"
    )


# What runs between backward and step, and may look at gradients, change them or the learning rate, or keep the step
# from happening.
_HOOKS_IN_BETWEEN = ("on_after_backward", "on_before_optimizer_step")
_MODULE_HOOKS_IN_BETWEEN = (*_HOOKS_IN_BETWEEN, "configure_gradient_clipping", "optimizer_step", "backward")


def is_update_unobserved(model: LightningModule) -> bool:
    """Whether no code of the user's runs between a backward and its step, so that updates may begin inside backward.

    A callback's hook there counts as such, unless the callback says `is_blind_to_gradients = True` of itself.
    """
    trainer = model._trainer
    if trainer is None or not model.automatic_optimization or trainer.gradient_clip_val:
        return False
    if any(is_overridden(name, model, LightningModule) for name in _MODULE_HOOKS_IN_BETWEEN):
        return False
    callbacks = [c for c in trainer.callbacks if not getattr(c, "is_blind_to_gradients", False)]  # type: ignore[attr-defined]
    return not any(is_overridden(name, c, Callback) for c in callbacks for name in _HOOKS_IN_BETWEEN)


def needs_norm_or_scale(model: LightningModule) -> bool:
    """Whether every step needs to know the norm of all gradients, or that they are finite, and mostly nothing follows
    from it: updates may then begin as if it were known. Not so where gradients are clamped."""
    trainer = model._trainer
    if trainer is None or not model.automatic_optimization:
        return False
    is_clipped = bool(trainer.gradient_clip_val)
    if is_clipped and trainer.gradient_clip_algorithm == "value":
        return False
    return is_clipped or trainer.precision == "16-mixed"


def _unwrap(optimizer: Any) -> ElixirOptimizer:
    from lightning_elixir.wrapper import ElixirOptimizer  # the wrapper is heavy, and not needed to build a Trainer

    # A LightningOptimizer passes for an instance of the class that it wraps.
    inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
    if not isinstance(inner, ElixirOptimizer):
        raise PlanError(
            f"{type(inner).__name__} is not the optimizer that ElixirStrategy set up; return one optimizer over the"
            " model's parameters from configure_optimizers()"
        )
    return inner


def cast_floating(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """In another dtype, if it is of a floating one of more than 8 bits."""
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.itemsize > 1 else tensor


def widen_trained(module: nn.Module, values: Mapping[str, Any]) -> None:
    """Have 16-bit parameters that train be fp32, as what is to be loaded: what masters had is not rounded then."""
    trained = ((name, p) for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad)
    narrow = [(p, values.get(name)) for name, p in trained if p.dtype in (torch.float16, torch.bfloat16)]
    wide = {id(p) for p, value in narrow if isinstance(value, Tensor) and value.dtype is torch.float32}
    for part in module.modules():
        if any(id(p) in wide for p in part._parameters.values()):
            # Not `part._apply`, for which some have their own, such as metrics
            nn.Module._apply(part, lambda tensor: tensor.float() if id(tensor) in wide else tensor, recurse=False)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)

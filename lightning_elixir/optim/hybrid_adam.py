"""`HybridAdam` and `CPUAdam`: drop-ins for `torch.optim.AdamW` and `Adam` that take 16-bit gradients."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, TypedDict, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from lightning_elixir.core.threads import default_num_threads
from lightning_elixir.errors import PlanError
from lightning_elixir.kernels.cpu import implementation
from lightning_elixir.optim.adam import adam_update_

logger = logging.getLogger(__name__)

# What torch's implementations are chosen by. A loaded group must not keep them: they would come back to life in a
# `torch.optim.AdamW` that loads our state dict, and `fused` or `capturable` would move `step` to the GPU here.
_TORCH_IMPLEMENTATION_KEYS = ("foreach", "fused", "capturable", "differentiable")


class AdamHyper(TypedDict):
    """A group's settings in the form `adam_update_` takes: plain Python numbers, read at the moment of the call."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    adamw_mode: bool
    bias_correction: bool
    maximize: bool


class HybridAdam(Optimizer):
    """Adam and AdamW for parameters on any device, with fp32 arithmetic and 16-bit gradients.

    A drop-in for `torch.optim.AdamW` (`adamw_mode=False`: `torch.optim.Adam`), in the argument order of its ancestors
    (ColossalAI's `HybridAdam`): state dicts are interchangeable with torch's both ways. `exp_avg` and `exp_avg_sq`
    have the parameter's dtype and layout; they are made at the parameter's first step. The arithmetic is that of
    `lightning_elixir.optim.adam.adam_update_`: fp32 (fp64 for fp64 parameters), bitwise equal on CPU and CUDA, and a
    16-bit parameter is rounded once a step.

    An fp32 parameter takes an fp32, bf16, fp16 or fp64 gradient. torch lets `p.grad = g` through only for the dtype
    in `p.grad_dtype`: set that to the gradient's dtype (or None, for any) first.

    Args:
        params: Parameters, named parameters or groups, as any torch optimizer takes them. Strided, floating.
        lr: Learning rate, a number or a tensor of one element.
        bias_correction: Correct the moments for their start at zero.
        betas: Decay of the first and of the second moment, each in [0, 1).
        eps: Added to the root of the second moment.
        weight_decay: Decoupled decay (AdamW), or L2 penalty with `adamw_mode=False`.
        adamw_mode: AdamW rather than Adam. The default of the groups, which carry it under torch's name,
            `decoupled_weight_decay`.
        nvme_offload_fraction: Share of the states to keep on NVMe, in [0, 1]. Only 0 so far.
        nvme_offload_dir: Directory for the states on NVMe; unused while the fraction is 0.
        simd_log: Log which implementation updates the parameters.
        amsgrad: Must be False; there for compatibility.
        maximize: Climb instead of descend.

    Raises:
        PlanError: (a `ValueError`) A setting out of range, `amsgrad`, NVMe, or a parameter that cannot be updated.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | None = None,
        *,
        simd_log: bool = False,
        amsgrad: bool = False,
        maximize: bool = False,
    ) -> None:
        _check_nvme(nvme_offload_fraction, nvme_offload_dir)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "bias_correction": bias_correction,
            # Not an attribute: torch pickles and copies only the defaults, the groups and the state of an optimizer.
            "decoupled_weight_decay": adamw_mode,
        }
        super().__init__(params, defaults)
        if simd_log:
            name, threads = type(self).__name__, default_num_threads()
            logger.info("%s: on the CPU %s, %d threads", name, implementation(), threads)

    @property
    def adamw_mode(self) -> bool:
        """Whether weight decay is decoupled (AdamW) rather than an L2 penalty (Adam), where a group says nothing."""
        return bool(self.defaults["decoupled_weight_decay"])

    @staticmethod
    def hyper_parameters(group: Mapping[str, Any]) -> AdamHyper:
        """This group's current settings as keyword arguments of `adam_update_`."""
        beta1, beta2 = group["betas"]
        return AdamHyper(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            adamw_mode=bool(group["decoupled_weight_decay"]),
            bias_correction=bool(group["bias_correction"]),
            maximize=bool(group["maximize"]),
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as `torch.optim.Optimizer.add_param_group` does.

        Raises:
            PlanError: A setting out of range, or a parameter that cannot be updated; the group is not added.
        """
        if isinstance(param_group, dict):  # torch has its own message for what is not
            self._check_settings({**self.defaults, **param_group})
        super().add_param_group(param_group)
        try:
            for index, p in enumerate(self.param_groups[-1]["params"]):
                self._check_parameter(p, self.param_groups[-1], index)
        except PlanError:
            self.param_groups.pop()
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch calls this with a loaded state dict as well as with a pickle.
        for group in state["param_groups"]:
            _check_amsgrad(group.get("amsgrad", False))
        own_groups = self.__dict__.get("param_groups", state["param_groups"])
        modes = [group["decoupled_weight_decay"] for group in own_groups]
        super().__setstate__(state)
        for group, adamw_mode in zip(self.param_groups, modes, strict=True):
            for key in _TORCH_IMPLEMENTATION_KEYS:
                group.pop(key, None)
            for key in ("amsgrad", "maximize", "bias_correction"):
                group.setdefault(key, self.defaults[key])
            group["decoupled_weight_decay"] = adamw_mode  # as with torch's AdamW, the checkpoint has no say
        for p_state in self.state.values():
            if "step" in p_state:  # a number in old state dicts, on the GPU in those of capturable and fused optimizers
                p_state["step"] = torch.as_tensor(p_state["step"], dtype=torch.float32, device="cpu")

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; the others keep value, moments and step count.

        Args:
            closure: Called first, with gradients enabled; computes the loss and the gradients.

        Returns:
            What the closure returned.

        Raises:
            PlanError: A sparse gradient, or one on another device, of another shape or not floating. No parameter
                has been touched then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for index, p in enumerate(group["params"]):
                if p.grad is not None:
                    self._check_parameter(p, group, index)
                    _check_gradient(p, p.grad, group, index)
        for group in self.param_groups:
            hyper = self.hyper_parameters(group)
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, hyper)
        return loss

    def _update(self, p: Tensor, grad: Tensor, hyper: AdamHyper) -> None:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        state["step"] += 1
        # All four in the parameter's order of memory, so that a transposed or channels-last parameter is not copied.
        order = None if p.is_contiguous() else sorted(range(p.dim()), key=p.stride, reverse=True)
        written = (p, state["exp_avg"], state["exp_avg_sq"])
        flat = [_flatten(x, order) for x in written]
        adam_update_(flat[0], _flatten(grad, order), flat[1], flat[2], step=int(state["step"].item()), **hyper)
        for x, updated in zip(written, flat, strict=True):
            if updated.data_ptr() != x.data_ptr():  # a copy, because `x` has gaps or another order
                view = x if order is None else x.permute(order)
                view.copy_(updated.view(view.shape))

    def _check_settings(self, group: Mapping[str, Any]) -> None:
        lr, betas, eps, weight_decay = group["lr"], group["betas"], group["eps"], group["weight_decay"]
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise PlanError(f"lr as a tensor must have one element, got shape {tuple(lr.shape)}")
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not (math.isfinite(value) and value >= 0.0):
                raise PlanError(f"{name} must be a finite number >= 0, got {value}")
        if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
            raise PlanError(f"betas must be two numbers in [0, 1), got {betas}")
        _check_amsgrad(group["amsgrad"])
        if "adamw_mode" in group:
            raise PlanError(
                "a group takes its mode as torch's do: decoupled_weight_decay=True for AdamW, False for Adam"
            )

    def _check_parameter(self, p: Tensor, group: Mapping[str, Any], index: int) -> None:
        if not p.is_floating_point() or p.layout != torch.strided:
            name = type(self).__name__
            what = f"{_label(group, index)} is {p.dtype}, {p.layout}"
            raise PlanError(f"{name} updates dense floating parameters, but {what}")


class CPUAdam(HybridAdam):
    """`HybridAdam` for parameters on the CPU alone.

    Raises:
        PlanError: As `HybridAdam`, and for a parameter on another device.
    """

    def _check_parameter(self, p: Tensor, group: Mapping[str, Any], index: int) -> None:
        super()._check_parameter(p, group, index)
        if p.device.type != "cpu":
            what = f"{_label(group, index)} is on {p.device}"
            raise PlanError(f"CPUAdam updates parameters on the CPU, but {what}; use HybridAdam")


def _flatten(x: Tensor, order: list[int] | None) -> Tensor:
    """The elements with the dimensions in this order (None: as they are), contiguous: a view where that is possible."""
    x = (x if order is None else x.permute(order)).contiguous()
    return x if x.dim() == 1 else x.view(-1)


def _label(group: Mapping[str, Any], index: int) -> str:
    """What to call a parameter in an error: its name where the optimizer was given names."""
    p: Tensor = group["params"][index]
    names = group.get("param_names")
    name = repr(names[index]) if names else f"number {index} of its group"
    return f"parameter {name} of shape {tuple(p.shape)}"


def _check_gradient(p: Tensor, grad: Tensor, group: Mapping[str, Any], index: int) -> None:
    if grad.layout != torch.strided:
        what = f"the gradient of {_label(group, index)} is {grad.layout}"
        raise PlanError(f"{what}; use sparse=False, or torch.optim.SparseAdam")
    if grad.device != p.device:
        what = f"{_label(group, index)} is on {p.device} but its gradient on {grad.device}"
        raise PlanError(f"{what}; move one to the other")
    if grad.shape != p.shape or not grad.is_floating_point():
        raise PlanError(f"the gradient of {_label(group, index)} is {grad.dtype} of shape {tuple(grad.shape)}")


def _check_amsgrad(amsgrad: bool) -> None:
    if amsgrad:
        raise PlanError("amsgrad=True is not supported; use torch.optim.AdamW(amsgrad=True)")


def _check_nvme(fraction: float, directory: str | None) -> None:
    if not 0.0 <= fraction <= 1.0:
        raise PlanError(f"nvme_offload_fraction must be in [0, 1], got {fraction}")
    if fraction > 0.0:
        raise PlanError(
            f"nvme_offload_fraction={fraction} (nvme_offload_dir={directory!r}) needs NVMe storage, which this version "
            "does not have; leave it at 0"
        )

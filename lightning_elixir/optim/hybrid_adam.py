"""`HybridAdam` and `CPUAdam`: drop-ins for `torch.optim.AdamW` and `Adam` that take 16-bit gradients."""

from __future__ import annotations

import copy
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from lightning_elixir.core.threads import default_num_threads
from lightning_elixir.errors import PlanError
from lightning_elixir.kernels.cpu import implementation
from lightning_elixir.optim.adam import AdamHyper, Operands, adam_update_
from lightning_elixir.optim.memory_order import flattened, memory_order, write_back
from lightning_elixir.optim.nvme_moments import MomentsOnNvme, NvmeOptions, gradient, no_steps

logger = logging.getLogger(__name__)

# What torch's implementations are chosen by. A loaded group must not keep them: they would come back to life in a
# `torch.optim.AdamW` that loads our state dict, and `fused` or `capturable` would move `step` to the GPU here.
_TORCH_IMPLEMENTATION_KEYS = ("foreach", "fused", "capturable", "differentiable")


class HybridAdam(Optimizer):
    """Adam and AdamW for parameters on any device, with fp32 arithmetic and 16-bit gradients.

    A drop-in for `torch.optim.AdamW` (`adamw_mode=False`: `torch.optim.Adam`), in the argument order of its ancestors
    (ColossalAI's `HybridAdam`): state dicts are interchangeable with torch's both ways. `exp_avg` and `exp_avg_sq`
    have the parameter's dtype and layout; they are made at the parameter's first step. The arithmetic is that of
    `lightning_elixir.optim.adam.adam_update_`: fp32 (fp64 for fp64 parameters), bitwise equal on CPU and CUDA, and a
    16-bit parameter is rounded once a step.

    An fp32 parameter takes an fp32, bf16, fp16 or fp64 gradient. torch lets `p.grad = g` through only for the dtype
    in `p.grad_dtype`: set that to the gradient's dtype (or None, for any) first.

    With `nvme_offload_fraction`, moments of parameters on the CPU lie in a file on a disk, which is read, updated and
    written piece by piece in `step()`, all three at once; the numbers stay the same to the bit. The file is made at the
    first step, takes its space at once, and is gone with the optimizer, however the process ends. Parameters are taken
    in their order until the share is reached; the one within which that happens goes as a whole. Parameters that come
    later, by `add_param_group` or because they begin to train, are shared out among themselves, in a file of their own.
    `optimizer.state[p]` then holds the step count alone: `state_dict()` has it all, in host memory, and `iter_states()`
    one parameter after the other; `load_state_dict(torch.load(file, mmap=True))` brings states to the disk without
    holding them in memory. If reading or writing fails in a step, the optimizer refuses all but `load_state_dict`.

    Args:
        params: Parameters, named parameters or groups, as any torch optimizer takes them. Strided, floating.
        lr: Learning rate, a number or a tensor of one element.
        bias_correction: Correct the moments for their start at zero.
        betas: Decay of the first and of the second moment, each in [0, 1).
        eps: Added to the root of the second moment.
        weight_decay: Decoupled decay (AdamW), or L2 penalty with `adamw_mode=False`.
        adamw_mode: AdamW rather than Adam. The default of the groups, which carry it under torch's name,
            `decoupled_weight_decay`.
        nvme_offload_fraction: Share of the moments, by bytes, to keep on NVMe, in [0, 1]. All parameters must be on the
            CPU then. A strategy has an option of its own for this.
        nvme_offload_dir: Folder for them, made if it is missing. None: one for temporary files that is on a disk.
        simd_log: Log which implementation updates the parameters.
        amsgrad: Must be False; there for compatibility.
        maximize: Climb instead of descend.
        nvme_backend: What reads and writes: "direct", threads of our own that pass the page cache by, or "tensornvme",
            the package of that name.

    Raises:
        PlanError: (a `ValueError`) A setting out of range, `amsgrad`, or a parameter that cannot be updated, or not
            with its moments on NVMe.
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
        nvme_offload_dir: str | os.PathLike[str] | None = None,
        *,
        simd_log: bool = False,
        amsgrad: bool = False,
        maximize: bool = False,
        nvme_backend: str = "direct",
    ) -> None:
        self._nvme = MomentsOnNvme(NvmeOptions(nvme_offload_fraction, nvme_offload_dir, nvme_backend))
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
    def nvme_offload_fraction(self) -> float:
        """Share of the moments that was asked to be on NVMe."""
        return self._nvme.options.fraction

    @property
    def nvme_bytes(self) -> int:
        """What moments take on NVMe now."""
        return self._nvme.nbytes

    @property
    def nvme_buffer_bytes(self) -> int:
        """Host memory that they pass through."""
        return self._nvme.buffer_bytes

    @property
    def adamw_mode(self) -> bool:
        """Whether weight decay is decoupled (AdamW) rather than an L2 penalty (Adam), where a group says nothing."""
        return bool(self.defaults["decoupled_weight_decay"])

    @staticmethod
    def hyper_parameters(group: Mapping[str, Any]) -> AdamHyper:
        """This group's current settings."""
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

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return {**state, "state": self._whole_states(), "_nvme_options": self._nvme.options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_nvme" not in self.__dict__:  # a copy, or from a pickle: with a file of its own
            self._nvme = MomentsOnNvme(state.pop("_nvme_options", NvmeOptions()))
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

    def state_dict(self) -> dict[str, Any]:
        """As torch's: with all moments, also those on NVMe, in host memory. `iter_states` does with less.

        Raises:
            StorageError: Moments cannot be read, or are lost since a step that failed.
        """
        own = self.state
        self.state = self._whole_states()
        try:
            return super().state_dict()
        finally:
            self.state = own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's. What belongs on NVMe is written there; after a failure, to a new file.

        Raises:
            PlanError: `amsgrad`, or moments of another size than their parameter. With the latter, load others.
            StorageError: It cannot be written.
        """
        super().load_state_dict(state_dict)
        if self._nvme.failure is not None:
            self._nvme = MomentsOnNvme(self._nvme.options)
        self._nvme.share_out(self._labelled())
        self._nvme.forget()
        self._nvme.bring(self.state)

    def iter_states(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Each parameter that has states with those, whether they are in host memory or on NVMe.

        Moments on NVMe come one parameter after the other, so that no more of them need to be in host memory; they are
        copies. There must be no step until it has ended.

        Raises:
            StorageError: As `state_dict`.
        """
        self._nvme.check_whole()
        for p, state in self.state.items():
            if p not in self._nvme or "exp_avg" in state:
                yield p, state
        yield from self._nvme.read(self.state)

    def _whole_states(self) -> Any:
        self._nvme.check_whole()
        whole = copy.copy(self.state)
        whole.update(self.iter_states())  # in the order in which they were
        return whole

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
            StorageError: There is no room on the disk for moments: no parameter has been touched. Or reading or writing
                them has failed, and now or in an earlier step: the message tells how far the step has come.
        """
        self._nvme.check_whole()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for index, p in enumerate(group["params"]):
                if p.grad is not None:
                    self._check_parameter(p, group, index)
                    _check_gradient(p, p.grad, group, index)
        self._nvme.share_out(self._labelled())
        self._nvme.bring(self.state)
        updates: list[tuple[Tensor, AdamHyper]] = []
        for group in self.param_groups:
            hyper = self.hyper_parameters(group)
            updates += [(p, hyper) for p in group["params"] if p.grad is not None]
        on_nvme = {p: hyper for p, hyper in updates if p in self._nvme}
        if on_nvme:
            for p, _ in updates:  # states are in this order, whatever is updated first
                self.state[p]
            in_memory = [(p, hyper) for p, hyper in updates if p not in on_nvme]
            self._nvme.update(self.state, on_nvme, in_memory, self._update)
        else:
            for p, hyper in updates:
                self._update(p, hyper)
        return loss

    def _labelled(self) -> Iterator[tuple[Tensor, Callable[[], str]]]:
        """All parameters, and what to call them in an error."""
        for group in self.param_groups:
            for index, p in enumerate(group["params"]):
                yield p, partial(_label, group, index)

    def _update(self, p: Tensor, hyper: AdamHyper) -> None:
        state = self.state[p]
        if not state:
            state["step"] = no_steps()
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        state["step"] += 1
        # All four in the parameter's order of memory, so that a transposed or channels-last parameter is not copied.
        order = memory_order(p)
        written = (p, state["exp_avg"], state["exp_avg_sq"])
        flat = [flattened(x, order) for x in written]
        operands = Operands(flat[0], flattened(gradient(p), order), flat[1], flat[2])
        adam_update_(operands, hyper.scalars(int(state["step"].item())))
        for x, updated in zip(written, flat, strict=True):
            write_back(x, updated, order)

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
        if not p.requires_grad and p.grad is None:
            return  # it is never updated, as a quantised one that a model's parameters() has among the others
        if not p.is_floating_point() or p.layout != torch.strided:
            name = type(self).__name__
            what = f"{_label(group, index)} is {p.dtype}, {p.layout}"
            raise PlanError(f"{name} updates dense floating parameters, but {what}")
        self._nvme.check_place(p, partial(_label, group, index))


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

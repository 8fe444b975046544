"""`HybridAdam` and `CPUAdam`: drop-ins for `torch.optim.AdamW` and `Adam` that take 16-bit gradients."""

from __future__ import annotations

import copy
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypedDict, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from lightning_elixir.core.threads import default_num_threads
from lightning_elixir.errors import PlanError, StorageError
from lightning_elixir.kernels.cpu import implementation
from lightning_elixir.optim.adam import adam_update_
from lightning_elixir.optim.nvme_states import NvmeStates, Part
from lightning_elixir.storage.nvme import BACKENDS, is_in_memory, temporary_folder

logger = logging.getLogger(__name__)

# What torch's implementations are chosen by. A loaded group must not keep them: they would come back to life in a
# `torch.optim.AdamW` that loads our state dict, and `fused` or `capturable` would move `step` to the GPU here.
_TORCH_IMPLEMENTATION_KEYS = ("foreach", "fused", "capturable", "differentiable")


_MOMENTS = ("exp_avg", "exp_avg_sq")


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


class _NvmeOptions(NamedTuple):
    """What the user said."""

    fraction: float = 0.0
    directory: str | os.PathLike[str] | None = None
    backend: str = "direct"


class _Placed(NamedTuple):
    """A parameter with moments on NVMe, as it was when it came there."""

    shape: torch.Size
    dtype: torch.dtype
    order: list[int] | None
    """Of its dimensions in memory; moments lie on the disk in this order. None: as they are."""


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
        nvme_backend: Who reads and writes: "direct", threads of our own that pass the page cache by, or "tensornvme",
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
        self._set_nvme(_NvmeOptions(nvme_offload_fraction, nvme_offload_dir, nvme_backend))
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

    def _set_nvme(self, options: _NvmeOptions) -> None:
        _check_nvme(options)
        self._nvme_options = options
        self._nvme: NvmeStates | None = None
        self._shared_out: set[Tensor] = set()
        """Parameters of which it is known where their moments are."""
        self._placed: dict[Tensor, _Placed] = {}
        """Those of them that have their moments on NVMe."""
        self._failure: str | None = None
        """Why moments are lost."""

    @property
    def nvme_bytes(self) -> int:
        """What moments take on NVMe now."""
        return 0 if self._nvme is None else self._nvme.nbytes

    @property
    def nvme_buffer_bytes(self) -> int:
        """Host memory that they pass through."""
        return 0 if self._nvme is None else self._nvme.buffer_bytes

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

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return {**state, "state": self._whole_states(), "_nvme_options": self._nvme_options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_nvme_options" not in self.__dict__:  # a copy, or from a pickle: with a file of its own
            self._set_nvme(state.pop("_nvme_options", _NvmeOptions()))
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
        if self._failure is not None:
            self._set_nvme(self._nvme_options)
        self._share_out()
        if self._nvme is not None:
            self._nvme.forget()
            self._bring()

    def iter_states(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Each parameter that has states with those, whether they are in host memory or on NVMe.

        Moments on NVMe come one parameter after the other, so that no more of them need to be in host memory; they are
        copies. There must be no step until it has ended.

        Raises:
            StorageError: As `state_dict`.
        """
        self._check_whole()
        for p, state in self.state.items():
            if not self._is_on_nvme(p) or "exp_avg" in state:
                yield p, state
        if self._nvme is None:
            return
        flat: list[Tensor] = []
        # Those that somebody has put beside them are newer.
        for part, *moments in self._nvme.read(lambda p: p in self.state and "exp_avg" not in self.state[p]):
            p = part.param
            if part.is_first:
                flat = [torch.empty(p.numel(), dtype=p.dtype) for _ in _MOMENTS]
            for whole, moment in zip(flat, moments, strict=True):
                whole[part.start : part.start + part.numel] = moment
            if part.is_last:
                tensors = [_unflatten(whole, self._placed[p]) for whole in flat]
                yield p, {**self.state[p], **dict(zip(_MOMENTS, tensors, strict=True))}

    def _whole_states(self) -> Any:
        self._check_whole()
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
        self._check_whole()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for index, p in enumerate(group["params"]):
                if p.grad is not None:
                    self._check_parameter(p, group, index)
                    _check_gradient(p, p.grad, group, index)
        self._share_out()
        self._bring()
        updates = [
            (p, self.hyper_parameters(group))
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        in_memory = [(p, hyper) for p, hyper in updates if not self._is_on_nvme(p)]
        if len(in_memory) < len(updates):
            self._update_through_nvme({p: hyper for p, hyper in updates if self._is_on_nvme(p)}, in_memory)
        else:
            self._update_in_memory(in_memory)
        return loss

    def _update_in_memory(self, updates: Sequence[tuple[Tensor, AdamHyper]]) -> None:
        for p, hyper in updates:
            if p.grad is not None:
                self._update(p, p.grad, hyper)

    def _update(self, p: Tensor, grad: Tensor, hyper: AdamHyper) -> None:
        state = self.state[p]
        if not state:
            state["step"] = _no_steps()
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        state["step"] += 1
        # All four in the parameter's order of memory, so that a transposed or channels-last parameter is not copied.
        order = _memory_order(p)
        written = (p, state["exp_avg"], state["exp_avg_sq"])
        flat = [_flatten(x, order) for x in written]
        adam_update_(flat[0], _flatten(grad, order), flat[1], flat[2], step=int(state["step"].item()), **hyper)
        for x, updated in zip(written, flat, strict=True):
            _write_back(x, updated, order)

    # Moments on NVMe

    def _is_on_nvme(self, p: Tensor) -> bool:
        return p in self._placed

    def _check_whole(self) -> None:
        if self._failure is not None:
            raise StorageError(self._failure)

    def _share_out(self) -> None:
        """See which of the parameters that are new have their moments on NVMe, and make room for those.

        Raises:
            PlanError: One that is there has changed.
            StorageError: There is no room. Nothing has changed then.
        """
        if not self._nvme_options.fraction:
            return
        new = []
        for group in self.param_groups:
            for index, p in enumerate(group["params"]):
                self._check_place(p, group, index)
                if p not in self._shared_out and p.numel() and (p.requires_grad or p.grad is not None):
                    new.append(p)
        chosen = _first_share(new, self._nvme_options.fraction)
        if chosen:
            if self._nvme is None:
                self._nvme = NvmeStates(_folder(self._nvme_options.directory), self._nvme_options.backend)
            self._nvme.add(chosen)
        self._shared_out.update(new)
        self._placed.update((p, _Placed(p.shape, p.dtype, _memory_order(p))) for p in chosen)

    def _check_place(self, p: Tensor, group: Mapping[str, Any], index: int) -> None:
        if p.device.type != "cpu":
            what = f"{_label(group, index)} is on {p.device}"
            raise PlanError(
                f"moments on NVMe are those of parameters on the CPU, but {what}; leave nvme_offload_fraction at 0, or "
                "train with a strategy and set it there"
            )
        placed = self._placed.get(p)
        if placed is not None and (placed.shape, placed.dtype) != (p.shape, p.dtype):
            what = f"{_label(group, index)} was of shape {tuple(placed.shape)} and {placed.dtype}, and is {p.dtype} now"
            raise PlanError(f"{what}: its moments are on NVMe as they were; make a new optimizer")

    def _bring(self) -> None:
        """Write moments to NVMe that belong there: loaded ones, or those of a copied optimizer."""
        stray = {p for p in self._placed if "exp_avg" in self.state.get(p, ())}
        if not stray or self._nvme is None:
            return
        for p in stray:
            for name in _MOMENTS:
                if self.state[p][name].numel() != p.numel():
                    shape = tuple(self.state[p][name].shape)
                    raise PlanError(f"{name} of shape {shape} is not of a parameter of shape {tuple(p.shape)}")
        flat: list[Tensor] = []
        try:
            with closing(self._nvme.update(stray.__contains__)) as parts:
                for part, *moments in parts:
                    if part.is_first:
                        order = self._placed[part.param].order
                        flat = [_flatten(self.state[part.param][name], order) for name in _MOMENTS]
                    for moment, whole in zip(moments, flat, strict=True):
                        moment.copy_(whole[part.start : part.start + part.numel])
        except BaseException as error:
            self._fail(error, "moments were being brought to NVMe, and are lost")
        for p in stray:
            for name in _MOMENTS:
                del self.state[p][name]

    def _update_through_nvme(
        self, offloaded: Mapping[Tensor, AdamHyper], in_memory: Sequence[tuple[Tensor, AdamHyper]]
    ) -> None:
        done = 0

        def beside() -> None:
            nonlocal done
            self._update_in_memory(in_memory)
            done += len(in_memory)

        if self._nvme is None:
            raise StorageError("moments on NVMe have been closed")
        for group in self.param_groups:  # states are in this order, whatever is updated first
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]
        current: _Current | None = None
        try:
            with closing(self._nvme.update(offloaded.__contains__, beside)) as parts:
                for part, exp_avg, exp_avg_sq in parts:
                    if current is None or part.is_first:
                        current = _Current(part.param, self._placed[part.param].order, self.state[part.param])
                    current.update(part, exp_avg, exp_avg_sq, offloaded[part.param])
                    done += part.is_last
        except BaseException as error:
            total = len(offloaded) + len(in_memory)
            what = f"the step was cut off: {done} of {total} parameters have their new values, and moments are lost"
            self._fail(error, what)

    def _fail(self, error: BaseException, what: str) -> NoReturn:
        """Give up the file, and raise.

        Raises:
            StorageError: Where that was the cause, with what it means here.
            BaseException: Otherwise the cause.
        """
        cure = "load a checkpoint, the parameters and then the optimizer's state_dict, to go on"
        self._failure = f"{what}; {cure}. It was: {error!r}"
        if self._nvme is not None:
            self._nvme.close()
        self._nvme = None
        if not isinstance(error, StorageError):
            raise error
        text = f"{error}. With that {what}; {cure}"
        raise StorageError(text, path=error.path, offset=error.offset, nbytes=error.nbytes) from error

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
        if self._nvme_options.fraction:
            self._check_place(p, group, index)


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


class _Current:
    """The parameter of which parts are being updated.

    Args:
        p: It has a gradient.
        order: Of its dimensions, for moments.
        state: Its own; gets the step count.
    """

    def __init__(self, p: Tensor, order: list[int] | None, state: dict[str, Any]) -> None:
        self.has_moments = bool(state)
        if not state:  # or they were taken away, and what is on the disk is of the past
            state["step"] = _no_steps()
        state["step"] += 1
        self._step = int(state["step"].item())
        self._p, self._order = p, order
        self._param, self._grad = _flatten(p, order), _flatten(p if p.grad is None else p.grad, order)

    def update(self, part: Part, exp_avg: Tensor, exp_avg_sq: Tensor, hyper: AdamHyper) -> None:
        if not self.has_moments:
            exp_avg.zero_()
            exp_avg_sq.zero_()
        where = slice(part.start, part.start + part.numel)
        adam_update_(self._param[where], self._grad[where], exp_avg, exp_avg_sq, step=self._step, **hyper)
        if part.is_last:
            _write_back(self._p, self._param, self._order)


def _no_steps() -> Tensor:
    return torch.zeros((), dtype=torch.float32, device="cpu")


def _memory_order(p: Tensor) -> list[int] | None:
    """The dimensions as they lie in memory; None: as they are."""
    return None if p.is_contiguous() else sorted(range(p.dim()), key=p.stride, reverse=True)


def _first_share(params: Sequence[Tensor], fraction: float) -> list[Tensor]:
    """The first ones, until they have this share of all bytes."""
    sizes = [p.numel() * p.dtype.itemsize for p in params]
    wanted, taken, chosen = fraction * sum(sizes), 0, []
    for p, nbytes in zip(params, sizes, strict=True):
        if taken >= wanted:
            break
        chosen.append(p)
        taken += nbytes
    return chosen


def _folder(directory: str | os.PathLike[str] | None) -> Path:
    if directory is None:
        return temporary_folder()
    folder = Path(directory)
    if is_in_memory(folder):
        logger.warning("nvme_offload_dir=%s is on a file system in memory: offloading there saves none", folder)
    return folder


def _write_back(x: Tensor, flat: Tensor, order: list[int] | None) -> None:
    """Where `_flatten` gave a copy, because `x` has gaps or another order."""
    if flat.data_ptr() != x.data_ptr():
        view = x if order is None else x.permute(order)
        view.copy_(flat.view(view.shape))


def _unflatten(flat: Tensor, placed: _Placed) -> Tensor:
    if placed.order is None:
        return flat.view(placed.shape)
    back = sorted(range(len(placed.order)), key=placed.order.__getitem__)
    return flat.view([placed.shape[i] for i in placed.order]).permute(back)


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


def _check_nvme(options: _NvmeOptions) -> None:
    if not 0.0 <= options.fraction <= 1.0:
        raise PlanError(f"nvme_offload_fraction must be in [0, 1], got {options.fraction}")
    if options.directory is not None and not isinstance(options.directory, (str, os.PathLike)):
        raise PlanError(f"nvme_offload_dir must be a folder, got {options.directory!r}")
    if options.backend not in BACKENDS:
        raise PlanError(f"there is no nvme_backend {options.backend!r}: choose one of {', '.join(BACKENDS)}")

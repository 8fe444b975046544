"""`HybridAdam`'s moments on a disk: of which parameters they are, how they get there, and what a failure means."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from lightning_elixir.errors import PlanError, StorageError
from lightning_elixir.optim.adam import AdamHyper, Operands, adam_update_
from lightning_elixir.optim.memory_order import flattened, memory_order, unflattened, write_back
from lightning_elixir.optim.nvme_states import NvmeStates, Part
from lightning_elixir.plan.units import check_fraction
from lightning_elixir.storage.nvme import BACKENDS, MOMENTS, is_in_memory, temporary_folder

logger = logging.getLogger(__name__)

States = MutableMapping[Tensor, dict[str, Any]]
"""An optimizer's, by parameter."""


class NvmeOptions(NamedTuple):
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


class MomentsOnNvme:
    """Contains the parameters that have their moments on NVMe.

    Raises:
        PlanError: An option is out of its range.
    """

    def __init__(self, options: NvmeOptions) -> None:
        _check(options)
        self.options = options
        self.failure: str | None = None
        """Why moments are lost."""
        self._states: NvmeStates | None = None
        self._shared_out: set[Tensor] = set()
        """Parameters of which it is known where their moments are."""
        self._placed: dict[Tensor, _Placed] = {}

    def __contains__(self, p: Tensor) -> bool:
        return p in self._placed

    @property
    def nbytes(self) -> int:
        return 0 if self._states is None else self._states.nbytes

    @property
    def buffer_bytes(self) -> int:
        """Host memory that they pass through."""
        return 0 if self._states is None else self._states.buffer_bytes

    def check_whole(self) -> None:
        """
        Raises:
            StorageError: Moments are lost.
        """
        if self.failure is not None:
            raise StorageError(self.failure)

    def check_place(self, p: Tensor, label: Callable[[], str]) -> None:
        """
        Raises:
            PlanError: The parameter is not on the CPU, or has changed since its moments came to the disk.
        """
        if not self.options.fraction:
            return
        if p.device.type != "cpu":
            raise PlanError(
                f"moments on NVMe are those of parameters on the CPU, but {label()} is on {p.device}; leave "
                "nvme_offload_fraction at 0, or train with a strategy and set it there"
            )
        placed = self._placed.get(p)
        if placed is not None and (placed.shape, placed.dtype) != (p.shape, p.dtype):
            what = f"{label()} was of shape {tuple(placed.shape)} and {placed.dtype}, and is {p.dtype} now"
            raise PlanError(f"{what}: its moments are on NVMe as they were; make a new optimizer")

    def share_out(self, params: Iterable[tuple[Tensor, Callable[[], str]]]) -> None:
        """See which of the parameters that are new have their moments on NVMe, and make room for those.

        Args:
            params: All parameters, and what to call them.

        Raises:
            PlanError: As `check_place`.
            StorageError: There is no room. Nothing has changed then.
        """
        if not self.options.fraction:
            return
        new = []
        for p, label in params:
            self.check_place(p, label)
            if p not in self._shared_out and p.numel() and (p.requires_grad or p.grad is not None):
                new.append(p)
        chosen = _first_share(new, self.options.fraction)
        if chosen:
            if self._states is None:
                self._states = NvmeStates(_folder(self.options.directory), self.options.backend)
            self._states.add(chosen)
        self._shared_out.update(new)
        self._placed.update((p, _Placed(p.shape, p.dtype, memory_order(p))) for p in chosen)

    def forget(self) -> None:
        """What the disk holds is of no use any more, and need not be read."""
        if self._states is not None:
            self._states.forget()

    def bring(self, states: States) -> None:
        """Write moments to NVMe that belong there: loaded ones, or those of a copied optimizer.

        Raises:
            PlanError: They are not of their parameter's size.
            StorageError: Reading or writing has failed.
        """
        stray = {p for p in self._placed if "exp_avg" in states.get(p, ())}
        if not stray or self._states is None:
            return
        for p in stray:
            for name in MOMENTS:
                if states[p][name].numel() != p.numel():
                    shape = tuple(states[p][name].shape)
                    raise PlanError(f"{name} of shape {shape} is not of a parameter of shape {tuple(p.shape)}")
        flat: list[Tensor] = []
        try:
            with closing(self._states.update(stray.__contains__)) as parts:
                for part, *moments in parts:
                    if part.is_first:
                        order = self._placed[part.param].order
                        flat = [flattened(states[part.param][name], order) for name in MOMENTS]
                    for moment, whole in zip(moments, flat, strict=True):
                        moment.copy_(whole[part.start : part.start + part.numel])
        except BaseException as error:
            self._fail(error, "moments were being brought to NVMe, and are lost")
        for p in stray:
            for name in MOMENTS:
                del states[p][name]

    def read(self, states: States) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Each parameter here that has states with those; moments are copies.

        Raises:
            StorageError: They cannot be read.
        """
        if self._states is None:
            return
        flat: list[Tensor] = []
        # Those that were put beside them are newer.
        for part, *moments in self._states.read(lambda p: p in states and "exp_avg" not in states[p]):
            p = part.param
            if part.is_first:
                flat = [torch.empty(p.numel(), dtype=p.dtype, device="cpu") for _ in MOMENTS]
            for whole, moment in zip(flat, moments, strict=True):
                whole[part.start : part.start + part.numel] = moment
            if part.is_last:
                _, _, order = self._placed[p]
                tensors = [unflattened(whole, p.shape, order) for whole in flat]
                yield p, {**states[p], **dict(zip(MOMENTS, tensors, strict=True))}

    def update(
        self,
        states: States,
        on_nvme: Mapping[Tensor, AdamHyper],
        in_memory: Sequence[tuple[Tensor, AdamHyper]],
        update_in_memory: Callable[[Tensor, AdamHyper], None],
    ) -> None:
        """One step.

        Args:
            states: Of all parameters.
            on_nvme: Parameters here that have gradients.
            in_memory: Others that have.
            update_in_memory: What to do with those, while the disk is read.

        Raises:
            StorageError: Reading or writing has failed; moments are lost.
        """
        if self._states is None:
            raise StorageError("moments on NVMe have been given up")
        done = 0

        def beside() -> None:
            nonlocal done
            for p, hyper in in_memory:
                update_in_memory(p, hyper)
                done += 1

        current: _Current | None = None
        try:
            with closing(self._states.update(on_nvme.__contains__, beside)) as parts:
                for part, exp_avg, exp_avg_sq in parts:
                    if current is None or part.is_first:
                        current = _Current(part.param, self._placed[part.param].order, states[part.param])
                    current.update(part, exp_avg, exp_avg_sq, on_nvme[part.param])
                    done += part.is_last
        except BaseException as error:
            total = len(on_nvme) + len(in_memory)
            what = f"the step was cut off: {done} of {total} parameters have their new values, and moments are lost"
            self._fail(error, what)

    def _fail(self, error: BaseException, what: str) -> NoReturn:
        """Give up the file, and raise.

        Raises:
            StorageError: Where that was the cause, with what it means here.
            BaseException: Otherwise the cause.
        """
        cure = "load a checkpoint, the parameters and then the optimizer's state_dict, to go on"
        self.failure = f"{what}; {cure}. It was: {error!r}"
        if self._states is not None:
            self._states.close()
        self._states = None
        if not isinstance(error, StorageError):
            raise error
        text = f"{error}. With that {what}; {cure}"
        raise StorageError(text, path=error.path, offset=error.offset, nbytes=error.nbytes) from error


class _Current:
    """The parameter of which parts are being updated.

    Args:
        p: It has a gradient.
        order: Of its dimensions, for moments.
        state: Its own; gets the step count.
    """

    def __init__(self, p: Tensor, order: list[int] | None, state: dict[str, Any]) -> None:
        self._has_moments = bool(state)
        if not state:  # or they were taken away, and what is on the disk is of the past
            state["step"] = no_steps()
        state["step"] += 1
        self._step = int(state["step"].item())
        self._p, self._order = p, order
        self._param, self._grad = flattened(p, order), flattened(gradient(p), order)

    def update(self, part: Part, exp_avg: Tensor, exp_avg_sq: Tensor, hyper: AdamHyper) -> None:
        if not self._has_moments:
            exp_avg.zero_()
            exp_avg_sq.zero_()
        where = slice(part.start, part.start + part.numel)
        operands = Operands(self._param[where], self._grad[where], exp_avg, exp_avg_sq)
        adam_update_(operands, hyper.scalars(self._step))
        if part.is_last:
            write_back(self._p, self._param, self._order)


def gradient(p: Tensor) -> Tensor:
    """That of a parameter which is known to have one."""
    if p.grad is None:
        raise RuntimeError("a parameter without a gradient was to be updated")
    return p.grad


def no_steps() -> Tensor:
    """The step count of a new parameter."""
    return torch.zeros((), dtype=torch.float32, device="cpu")


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
    folder = Path(os.path.expanduser(directory))
    if is_in_memory(folder):
        logger.warning("nvme_offload_dir=%s is on a file system in memory: offloading there saves none", folder)
    return folder


def _check(options: NvmeOptions) -> None:
    check_fraction("nvme_offload_fraction", options.fraction)
    folder: object = options.directory
    if folder is not None and (not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder)):
        raise PlanError(f"nvme_offload_dir must be the path of a folder, got {folder!r}")
    if options.backend not in BACKENDS:
        raise PlanError(f"unknown nvme_backend {options.backend!r}: choose one of {', '.join(BACKENDS)}")

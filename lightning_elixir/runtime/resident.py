"""Frozen parameters that are in no chunk: on the compute device for good, and otherwise as the user made them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_elixir.core.comm import Comm
from lightning_elixir.core.shells import tensors_inside
from lightning_elixir.errors import PlanError
from lightning_elixir.runtime.sources import Source
from lightning_elixir.runtime.unreadable import set_data


class ResidentParameters:
    """Those of one engine."""

    def __init__(self) -> None:
        self.parameters: list[nn.Parameter] = []
        self._known: dict[int, nn.Parameter] = {}  # also those in whose place others were put, by id
        self.nbytes = 0
        """What they take on the device."""

    def add(self, given: nn.Parameter, placed: nn.Parameter) -> None:
        """
        Args:
            given: As the model had it.
            placed: What the model has now, perhaps the same.
        """
        self.parameters.append(placed)
        self._known |= {id(given): given, id(placed): placed}
        self.nbytes += sum(t.numel() * t.element_size() for t in tensors_inside(placed))

    def __contains__(self, tensor: object) -> bool:
        return id(tensor) in self._known


def placed(name: str, parameter: nn.Parameter, source: Source | None, device: torch.device) -> nn.Parameter:
    """The parameter on the device: the same object, where its class is torch's own.

    Args:
        name: For errors.
        parameter: Of any device and class.
        source: Where the values are, if not in the parameter.
        device: The compute device.

    Raises:
        PlanError: It has no values here, and rank 0's cannot be sent.
        StorageError: The source cannot be read.
    """
    if parameter.is_meta:
        if not has_plain_class(parameter):
            raise PlanError(
                f"{name} ({type(parameter).__name__}) is on meta here, and values of its class cannot be sent from rank"
                " 0: build the model with its values on every rank"
            )
        values = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
        if source is not None:
            source.read_run(None, 0, values.view(-1), parameter.dtype)
        return nn.Parameter(values.to(device), requires_grad=False)
    if parameter.device.type == device.type and device.index in (None, parameter.device.index):
        return parameter
    if has_plain_class(parameter):
        set_data([parameter], [parameter.detach().to(device)])
        return parameter
    moved = parameter.to(device)  # the class moves what hangs on it
    return moved if isinstance(moved, nn.Parameter) else nn.Parameter(moved, requires_grad=False)


def has_plain_class(parameter: Tensor) -> bool:
    """Whether all of it lies in its storage."""
    return type(parameter) is nn.Parameter and parameter.layout is torch.strided


def send_from_first(comm: Comm, parameter: nn.Parameter) -> None:
    """Every rank gets rank 0's values. Collective."""
    if comm.world_size == 1 or not parameter.numel():
        return
    values = parameter.detach().contiguous()
    comm.broadcast_from_first(values)
    with torch.no_grad():
        parameter.copy_(values)


def place_beside(parameter: nn.Parameter, device: torch.device) -> None:
    """Bring what hangs on a parameter of a class of its own to the device: the scales of quantised values
    (`quant_state` of bitsandbytes)."""
    for name, value in list(vars(parameter).items()):
        if isinstance(value, Tensor):
            setattr(parameter, name, value.to(device))
        elif not isinstance(value, nn.Module) and any(
            isinstance(v, Tensor) for v in getattr(value, "__dict__", {}).values()
        ):
            move = getattr(value, "to", None)
            if callable(move):
                moved = move(device)  # some move themselves, and return nothing
                setattr(parameter, name, value if moved is None else moved)

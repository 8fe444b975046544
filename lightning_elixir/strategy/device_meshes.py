"""The device mesh that `configure_model` finds, as under Lightning's `ModelParallelStrategy`.

`parallelize_module` sends values from one rank to the others, so it needs them on every rank. Where models are built
with values on the first rank alone (Note: same seed, same start) a rank without learns of that when the mesh is first
used: the use fails there, and that rank builds for real.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lightning_elixir.core.meeting_group import make_device_mesh, told_apart
from lightning_elixir.errors import PlanError, StateError
from lightning_elixir.plan.mesh import Mesh
from lightning_elixir.strategy.model_init import is_without_values

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

TENSOR, DATA = "tensor_parallel", "data_parallel"


class MeshAccess:
    """Stands for a `torch.distributed.device_mesh.DeviceMesh` with the dimensions "data_parallel" and
    "tensor_parallel", which is made at the first use: by all ranks, at the same point.

    Args:
        make: Makes it. Collective.
    """

    def __init__(self, make: Callable[[], DeviceMesh]) -> None:
        self._make: Callable[[], DeviceMesh] | None = make
        self._made: DeviceMesh | None = None
        self._world: Any = None  # the default group, where this process is by itself and has it for the mesh alone
        self._token = object()

    def __deepcopy__(self, memo: dict[int, Any]) -> MeshAccess:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {"_make": None, "_made": None, "_world": None, "_token": None}  # another process has other groups

    @property
    def is_made(self) -> bool:
        """Whether it has been used."""
        return self._made is not None

    def mesh(self) -> DeviceMesh:
        """The mesh.

        Raises:
            StateError: The model was built in another process.
        """
        if self._made is None:
            if is_without_values():
                raise PlanError("this rank builds the model without values, and a device mesh sends some")
            if self._make is None:
                raise StateError("this device mesh was made in another process: build the model in configure_model")
            is_alone = not dist.is_initialized()
            self._made = told_apart(self._make(), self._token)
            self._world = dist.group.WORLD if is_alone else None
        return self._made

    def begin(self) -> None:
        """A run begins that goes on with a mesh of an earlier one."""
        if self._world is not None and self._make is not None and not dist.is_initialized():
            self._make()
            self._world = dist.group.WORLD

    def end(self) -> None:
        """The run is over: a process by itself has no group any more, so that what comes later does not take it for
        one of several. What is cut over the mesh still computes, since one rank exchanges nothing."""
        if self._world is not None and dist.group.WORLD is self._world:
            dist.destroy_process_group()

    def __getitem__(self, name: str | tuple[str, ...]) -> DeviceMesh:
        found: DeviceMesh = told_apart(self.mesh()[name], self._token)
        return found

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.mesh(), name)

    def __repr__(self) -> str:
        return f"DeviceMesh({DATA}, {TENSOR})" if self._made is None else repr(self._made)


def mesh_of(mesh: Mesh, device: torch.device, meet: Callable[[], None]) -> DeviceMesh:
    """Torch's mesh of these ranks, of which neighbours share tensors. Collective.

    Args:
        device: Where its tensors are.
        meet: Called before every collective while there is no engine.
    """
    found: DeviceMesh = make_device_mesh(mesh.along("tensor"), "tensor", TENSOR, DATA, device, meet)
    return found

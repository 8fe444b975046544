"""A process group whose ranks meet before each collective, a device mesh that has one, and groups found by their names.

[Note: collectives of DTensors] Torch's parallel styles issue collectives in the middle of layers, in a forward as in a
backward. A rank that waits in one serves no other, so what holds for our own patterns holds for them (Note: patterns
between collectives). They get a group that looks to torch like any other. Its host, which an engine has, makes the
ranks meet first and lends a group that all ranks can leave. While there is no engine, as when a model is built,
collectives go over a group of its own; there a rank that has failed could not be left, so that ranks tell each other
of that before each of them.

Collectives in compiled code are torch's functional ones, which name their group: an engine has such groups, too, which
always have a host.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from lightning_elixir.errors import StateError

_BACKEND = "elixir_meeting"

Issue = Callable[[dist.ProcessGroup], dist.Work]


class Host(Protocol):
    """Makes the ranks of a group meet."""

    def run(self, axis: str, message: Sequence[int], issue: Issue) -> dist.Work:
        """Meet the peers along the axis, and issue a collective.

        Args:
            message: What must be equal on all peers.
            issue: Gets the group to take.
        """


class MeetingGroup(dist.ProcessGroup):
    """A group along one axis, for torch. With one rank alone there is nothing to exchange.

    Args:
        rank: This one's number in it.
        size: How many ranks there are.
        axis: As its hosts know it.
        own: The same ranks; what collectives go over while there is no host. None: none do.
        meet: Called before each of these.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        axis: str,
        own: dist.ProcessGroup | None = None,
        meet: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub has one of two forms
        self.axis = axis
        self._own = own
        self._meet = meet
        self._host: weakref.ref[Host] | None = None  # torch keeps groups for ever, and an engine has to end
        self._name = ""

    def bind(self, host: Host | None) -> None:
        """Collectives go through this host from now on, for as long as it lives; None: through the group's own."""
        self._host = None if host is None else weakref.ref(host)

    @property
    def is_bound(self) -> bool:
        """Whether there is a host."""
        return self._host is not None and self._host() is not None

    # What torch calls on a group that is written in Python

    def getBackendName(self) -> str:
        return _BACKEND

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> Any:
        return self._name

    @property
    def supports_splitting(self) -> bool:
        return False  # other groups are made of torch's own one

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _run(self, number: int, tensors: Any, issue: Issue) -> dist.Work:
        host = None if self._host is None else self._host()
        if host is not None and self.size() > 1:
            sizes = [each.numel() for each in _tensors(tensors)]
            return host.run(self.axis, [number, len(sizes), *sizes], issue)
        if self._own is None:
            raise StateError("compiled code with a parallel pattern was called where no engine connects the ranks")
        if self.size() > 1:
            self._meet()
        return issue(self._own)


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    return [each for value in values for each in _tensors(value)]


def _method(name: str, number: int, told: Sequence[int]) -> Callable[..., dist.Work]:
    def run(self: MeetingGroup, *args: Any, **kwargs: Any) -> dist.Work:
        sizes = [args[at] for at in told]
        return self._run(number, sizes, lambda group: getattr(group, name)(*args, **kwargs))

    run.__name__ = name
    return run


# Name of a collective -> those of its arguments whose sizes are the same on all ranks.
_COLLECTIVES: dict[str, tuple[int, ...]] = {
    "allreduce": (0,),
    "allreduce_coalesced": (0,),
    "allgather": (1,),
    "allgather_coalesced": (1,),
    "_allgather_base": (0, 1),
    "allgather_into_tensor_coalesced": (0, 1),
    "all_gather_single": (0, 1),
    "reduce": (0,),
    "reduce_scatter": (0,),
    "_reduce_scatter_base": (0, 1),
    "reduce_scatter_tensor_coalesced": (0, 1),
    "reduce_scatter_single": (0, 1),
    "alltoall": (),
    "alltoall_base": (),
    "broadcast": (0,),
    "scatter": (0,),
    "gather": (1,),
    "barrier": (),
}
for _number, (_name, _told) in enumerate(_COLLECTIVES.items()):
    setattr(MeetingGroup, _name, _method(_name, _number, _told))


def give_name(group: MeetingGroup) -> None:
    """Have torch's functional collectives find a group by a name, the same in every run, which nothing else has."""
    for number in itertools.count():
        name: Any = f"elixir_{group.axis}_{number}"
        try:
            distributed_c10d._register_process_group(name, group)
        except RuntimeError:  # it is another engine's
            continue
        group._set_group_name(name)
        return


def take_name(group: MeetingGroup) -> None:
    """Have nothing find it any more."""
    if group.group_name:
        distributed_c10d._unregister_process_group(group.group_name)
        group._set_group_name("")


class _Options:
    """What torch hands on to what makes the group."""

    def __init__(self, own: dist.ProcessGroup, axis: str, meet: Callable[[], None]) -> None:
        self.own = own
        self.axis = axis
        self.meet = meet


def _make(options: Any, ours: _Options) -> MeetingGroup:
    return MeetingGroup(ours.own.rank(), ours.own.size(), ours.axis, ours.own, ours.meet)


def told_apart(mesh: Any, token: object) -> Any:
    """The mesh, equal to those of the same token alone. Torch keeps what it finds out of DTensors' operators, and the
    mesh with it, for all equal ones, and those of a process over the same ranks are: what a second model computes would
    be over the groups of the first one, which may be gone, or another engine's."""
    mesh._thread_id = token  # of what makes two equal, that which torch leaves empty but in its own tests
    return mesh


def make_device_mesh(
    groups: Sequence[Sequence[int]],
    axis: str,
    name: str,
    beside: str,
    device: torch.device,
    meet: Callable[[], None],
) -> Any:
    """A mesh of two dimensions over all ranks. Collective. One process by itself gets a default group for it; when that
    was destroyed, and this is called again, groups have the same names, by which earlier meshes find theirs.

    Args:
        groups: Of ranks that are neighbours along the inner dimension, in the order of the outer one.
        axis: What hosts call the inner one.
        name: What the mesh calls it; its group is a `MeetingGroup`.
        beside: What the mesh calls the outer one, whose group is one of torch's.
        device: Where its tensors are.
        meet: See `MeetingGroup`. Torch keeps it for ever.

    Returns:
        A `torch.distributed.device_mesh.DeviceMesh` of shape `[number of groups, size of a group]`.
    """
    from torch.distributed.device_mesh import DeviceMesh

    if not dist.is_initialized():  # one process by itself: torch makes no mesh without a group
        backend = dist.get_default_backend_for_device(device)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if not hasattr(dist.Backend, _BACKEND.upper()):
        dist.Backend.register_backend(_BACKEND, _make, extended_api=True, devices=["cpu", "cuda"])
    inner: Any = None
    columns = list(zip(*groups, strict=True))
    made = {tuple(ranks): dist.new_group(list(ranks)) for ranks in (*groups, *columns)}
    rank = dist.get_rank()
    for ranks in groups:  # all ranks make all groups: NCCL needs them to
        own = made[tuple(ranks)]
        options = _Options(own, axis, meet) if rank in ranks else None
        meeting = dist.new_group(list(ranks), backend=_BACKEND, pg_options=options)
        inner = meeting if rank in ranks else inner
    outer: Any = made[next(column for column in columns if rank in column)]
    return DeviceMesh.from_group([outer, inner], device.type, mesh=torch.tensor(groups), mesh_dim_names=(beside, name))

"""The processes of a Trainer or of Fabric: started, numbered and connected as `DDPStrategy` does it.

[Note: notebooks] A session of its own (a notebook, `python -i`) has no script that could be run once a device, and what
it has defined cannot be sent to a new process: its processes are forked, as `ddp_notebook` does it. A forked process
cannot use CUDA if its parent has, and waits for ever for OpenMP's threads if its parent had some (`core/threads.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from lightning_elixir._lightning import (
    Accelerator,
    CheckpointIO,
    ClusterEnvironment,
    Precision,
    TorchElasticEnvironment,
    connect_processes,
    default_backend,
    is_interactive,
    reduce_tensor,
    reset_seed,
    set_global_rank,
)
from lightning_elixir.core.comm import Comm, SoloComm, is_default_group, make_comm
from lightning_elixir.core.device import is_device_in_use
from lightning_elixir.core.threads import end_openmp_threads
from lightning_elixir.core.waits import Call
from lightning_elixir.errors import PlanError, StateError
from lightning_elixir.kernels.means import mean_of_rows

T = TypeVar("T")

# Lightning comes to these by itself, on every rank.
_BARRIER = Call("strategy.barrier()", is_routine=True)
_BROADCAST = Call("strategy.broadcast()", is_routine=True)
_REDUCE = Call("strategy.reduce()", is_routine=True)
_ALL_GATHER = Call("strategy.all_gather()", is_routine=True)

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


class Processes:
    """One process for each device. A single device has no process group, no launcher and no distributed sampler.

    To be mixed into a `ParallelStrategy` of the Trainer or of Fabric, before it.

    Args:
        timeout: How long a rank waits for the others.
        start_method: "popen" runs the script once a device, the others use multiprocessing.
        process_group_backend: None: NCCL on GPUs, gloo on CPUs.
    """

    # Of the strategy that this is mixed into
    cluster_environment: Any
    parallel_devices: Any
    accelerator: Any
    checkpoint_io: Any
    _launcher: Any
    # What starts the processes, of the kinds that its side of Lightning has
    _script_launcher: ClassVar[Any]
    _process_launcher: ClassVar[Any]

    def __init__(
        self,
        *,
        process_group_backend: str | None,
        timeout: timedelta | None,
        start_method: StartMethod,
        accelerator: Accelerator | None,
        parallel_devices: list[torch.device] | None,
        cluster_environment: ClusterEnvironment | None,
        checkpoint_io: CheckpointIO | None,
        precision_plugin: Precision | None,
    ) -> None:
        super().__init__(  # type: ignore[call-arg]  # the strategy's
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self.num_nodes = 1
        self.process_group_backend = process_group_backend
        self._timeout = timeout
        self._start_method = start_method
        self._comm: Comm = SoloComm()  # until the processes are connected

    @property
    def root_device(self) -> torch.device:
        return self.parallel_devices[self.local_rank] if self.parallel_devices else torch.device("cpu")

    @property
    def num_processes(self) -> int:
        """Of this node."""
        return len(self.parallel_devices or ())

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than one process; asked by the Trainer, which then gives each its part of the data."""
        return self.num_nodes * self.num_processes > 1

    # With a single device the environment is not read: it may be that of a job in which this process has no rank.

    @property
    def global_rank(self) -> int:
        return self._asked(lambda environment: environment.global_rank(), 0)

    @property
    def local_rank(self) -> int:
        return self._asked(lambda environment: environment.local_rank(), 0)

    @property
    def node_rank(self) -> int:
        return self._asked(lambda environment: environment.node_rank(), 0)

    @property
    def world_size(self) -> int:
        return self._asked(lambda environment: environment.world_size(), 1)

    def _asked(self, ask: Callable[[ClusterEnvironment], int], alone: int) -> int:
        environment = self.cluster_environment
        return ask(environment) if self.is_distributed and environment is not None else alone

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        if self.is_distributed and environment is not None:
            self._launcher = self._make_launcher(environment, self._start_method_here(environment))

    def _make_launcher(self, environment: ClusterEnvironment, start_method: StartMethod) -> Any:
        if start_method == "popen":
            return self._script_launcher(environment, self.num_processes, self.num_nodes)
        return self._process_launcher(self, start_method=start_method)

    def _start_method_here(self, environment: ClusterEnvironment) -> StartMethod:
        """How processes are started: see [Note: notebooks].

        Raises:
            PlanError: In a notebook, a way that does not work there.
        """
        method = self._start_method
        if not is_interactive() or environment.creates_processes_externally or method == "fork":
            return method
        if method != "popen":
            raise PlanError(
                f"start_method={method!r} begins new processes, to which nothing can be sent that was defined in a"
                " notebook or in an interactive session: leave start_method out, and processes are forked"
            )
        return "fork"

    def prepare_start(self, start_method: StartMethod) -> None:
        """Called before processes are started out of this one.

        Raises:
            StateError: They would be forked, and this one uses CUDA.
        """
        if start_method != "fork":
            return
        end_openmp_threads()
        if self.parallel_devices and self.parallel_devices[0].type != "cpu" and is_device_in_use():
            raise StateError(
                "the processes of the other devices are forked from this one, which uses CUDA already, and a forked"
                " process cannot use it then. Restart the kernel (or the session), and let nothing touch the GPU before"
                " training starts (no tensor on cuda, no torch.cuda.* but is_available and device_count); or give"
                " devices=1; or run the program as a script"
            )

    def setup_environment(self) -> None:
        super().setup_environment()  # type: ignore[misc]  # the strategy's
        self.set_world_ranks()
        if not self.is_distributed or self.cluster_environment is None:
            return
        reset_seed()  # every rank builds the same model
        self.process_group_backend = self.process_group_backend or default_backend(self.root_device)
        connect_processes(
            self.cluster_environment,
            self.process_group_backend,
            timeout=self._timeout,
            device_id=self.root_device if self.root_device.type != "cpu" else None,
        )
        if self._comm.world_size == 1:
            self._comm = make_comm(None, self.root_device, mean_of_rows)

    def check_number(self) -> None:
        """Whether there are as many processes as the Trainer or Fabric was told. Lightning looks at some numbers only.

        Raises:
            PlanError: There are others.
        """
        found, wanted = self._comm.world_size, max(1, self.num_nodes * self.num_processes)
        if found != wanted:
            raise PlanError(
                f"num_nodes={self.num_nodes} with devices={self.num_processes} are {wanted} processes, and {found} were"
                f" started: {self._cure}"
            )

    def check_number_here(self) -> None:
        """As `check_number`, of this node, which torchrun tells of (under SLURM Lightning refuses what is uneven).
        Before they are connected: one that has no device never comes to that, and the others would wait for it.

        Raises:
            PlanError: There are others.
        """
        if not self.is_distributed:
            return
        wanted = self.num_processes
        found = max(wanted, self.local_rank + 1)
        if isinstance(self.cluster_environment, TorchElasticEnvironment):
            found = int(os.environ.get("LOCAL_WORLD_SIZE", found))
        if found != wanted:
            raise PlanError(f"devices={wanted}, and on this node ({self.node_rank}) {found} were started: {self._cure}")

    @property
    def _cure(self) -> str:
        return (
            f"start {self.num_processes} on each of {self.num_nodes} nodes (SLURM: --nodes={self.num_nodes}"
            f" --ntasks-per-node={self.num_processes} without another --ntasks; torchrun: --nnodes={self.num_nodes}"
            f" --nproc-per-node={self.num_processes}), or give the numbers that there are"
        )

    def set_world_ranks(self) -> None:
        """Tell the environment, and what logs on rank 0 only, which rank this is. Called by the Trainer."""
        if self.cluster_environment is not None and self.is_distributed:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        set_global_rank(self.global_rank)

    # Messages between the ranks, as the rest of Lightning asks for them

    def _come_to(self, call: Call) -> None:
        """Called before each message of all ranks."""

    def barrier(self, name: str | None = None) -> None:
        self._come_to(_BARRIER)
        self._comm.exchange((), _BARRIER)

    def broadcast(self, obj: T, src: int = 0) -> T:
        self._come_to(_BROADCAST)
        answers: list[T] = self._comm.exchange_objects(obj if self._comm.rank == src else None, _BROADCAST)
        return answers[src if self._comm.world_size > 1 else 0]

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        if not is_default_group(group):
            return reduce_tensor(tensor, group, reduce_op=reduce_op)
        self._come_to(_REDUCE)
        return self._comm.all_reduce(tensor, reduce_op, _REDUCE)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        gather: Callable[..., Tensor] = super().all_gather  # type: ignore[misc]  # the strategy's
        if not is_default_group(group):
            return gather(tensor, group, sync_grads)
        self._come_to(_ALL_GATHER)
        with self._comm.lent(_ALL_GATHER) as ours:
            return gather(tensor, ours, sync_grads)

    def disconnect(self) -> None:
        """Leave the groups that were made for these messages. Collective; the next run makes others."""
        self._comm.close()
        self._comm = SoloComm()


class PreparedStart:
    """To be mixed into a launcher that starts processes out of this one, before it."""

    _strategy: Any
    _start_method: Any

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._strategy.prepare_start(self._start_method)
        return super().launch(function, *args, **kwargs)  # type: ignore[misc]  # the launcher's

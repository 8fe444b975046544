"""The processes of a Trainer: started, numbered and connected as `DDPStrategy` does it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_elixir._lightning import (
    Accelerator,
    CheckpointIO,
    ClusterEnvironment,
    MultiProcessingLauncher,
    ParallelStrategy,
    Precision,
    SubprocessScriptLauncher,
    connect_processes,
    default_backend,
    reduce_tensor,
    reset_seed,
    set_global_rank,
)
from lightning_elixir.core.comm import Comm, SoloComm, make_comm
from lightning_elixir.core.waits import Call

T = TypeVar("T")

# Lightning comes to these by itself, on every rank.
_BARRIER = Call("strategy.barrier()", is_routine=True)
_BROADCAST = Call("strategy.broadcast()", is_routine=True)
_REDUCE = Call("strategy.reduce()", is_routine=True)
_ALL_GATHER = Call("strategy.all_gather()", is_routine=True)

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


class ProcessStrategy(ParallelStrategy):
    """One process for each device. A single device has no process group, no launcher and no distributed sampler.

    Args:
        timeout: How long a rank waits for the others.
        start_method: "popen" runs the script once a device, the others use multiprocessing.
        process_group_backend: None: NCCL on GPUs, gloo on CPUs.
    """

    def __init__(
        self,
        accelerator: Accelerator | None,
        parallel_devices: list[torch.device] | None,
        cluster_environment: ClusterEnvironment | None,
        checkpoint_io: CheckpointIO | None,
        precision_plugin: Precision | None,
        process_group_backend: str | None,
        timeout: timedelta | None,
        start_method: StartMethod,
    ) -> None:
        super().__init__(
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
    @override
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

    # A single device asks the environment nothing: it may be that of a job of which this process is no numbered part.

    @property
    @override
    def global_rank(self) -> int:
        return super().global_rank if self.is_distributed else 0

    @property
    @override
    def local_rank(self) -> int:
        return super().local_rank if self.is_distributed else 0

    @property
    @override
    def node_rank(self) -> int:
        return super().node_rank if self.is_distributed else 0

    @property
    @override
    def world_size(self) -> int:
        return super().world_size if self.is_distributed else 1

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    @override
    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        if not self.is_distributed or environment is None:
            return
        if self._start_method == "popen":
            self._launcher = SubprocessScriptLauncher(environment, self.num_processes, self.num_nodes)
        else:
            self._launcher = MultiProcessingLauncher(self, start_method=self._start_method)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
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
            self._comm = make_comm(None, self.root_device)

    def set_world_ranks(self) -> None:
        """Tell the environment, and what logs on rank 0 only, which rank this is. Called by the Trainer."""
        if self.cluster_environment is not None and self.is_distributed:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        set_global_rank(self.global_rank)

    # Messages between the ranks, as the rest of Lightning asks for them

    @override
    def barrier(self, name: str | None = None) -> None:
        self._comm.exchange((), _BARRIER)

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        answers: list[T] = self._comm.exchange_objects(obj if self._comm.rank == src else None, _BROADCAST)
        return answers[src if self._comm.world_size > 1 else 0]

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        if group is not None:
            return reduce_tensor(tensor, group, reduce_op=reduce_op)
        return self._comm.all_reduce(tensor, reduce_op, _REDUCE)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        if group is not None:
            return super().all_gather(tensor, group, sync_grads)
        with self._comm.lent(_ALL_GATHER) as ours:
            return super().all_gather(tensor, ours, sync_grads)

    def disconnect(self) -> None:
        """Leave the groups that were made for these messages. Collective; the next run makes others."""
        self._comm.close()
        self._comm = SoloComm()

    @override
    def on_exception(self, exception: BaseException) -> None:
        # Ranks that wait for this one, or come to wait, hear of it: it may be the only one that fails.
        self._comm.leave(exception)

    @override
    def teardown(self) -> None:
        # Unlike other strategies: the parameters stay where they are, for checkpoints and the next run.
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()

"""`ElixirModule`: the engine around a plain module, without Lightning."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_elixir.core.comm import make_comm
from lightning_elixir.core.device import make_device
from lightning_elixir.core.frames import with_room
from lightning_elixir.core.module_hooks import without_hooks
from lightning_elixir.core.option_names import checks_option_names
from lightning_elixir.errors import PlanError, StateError
from lightning_elixir.fused import FusedChoice, fuse
from lightning_elixir.kernels.means import mean_of_rows
from lightning_elixir.memory_limits import LimitedModule, MemoryLimits, change_limits
from lightning_elixir.optimizer import ElixirOptimizer
from lightning_elixir.plan.activations import has_offloaded
from lightning_elixir.plan.ignored import ignored_in_fp32, with_ignored
from lightning_elixir.plan.kept_dtypes import kept_in, with_kept
from lightning_elixir.plan.types import Plan
from lightning_elixir.profiling.blocks import with_activations
from lightning_elixir.profiling.ignored import Ignored, ignored_parameters, tell_of_unchunked
from lightning_elixir.profiling.kept_fp32 import KeepFp32, compute_in_fp32, is_nothing, kept_parameters, map_floating
from lightning_elixir.runtime.agreement import Meeting
from lightning_elixir.runtime.build import Precision
from lightning_elixir.runtime.engine import Engine
from lightning_elixir.runtime.stats import Stats
from lightning_elixir.runtime.whole import shells_of, whole_grads, write_whole
from lightning_elixir.storage.nvme import DiskOptions

__all__ = ["ElixirModule", "ElixirOptimizer"]


class ElixirModule(nn.Module):
    """A module whose parameters live in chunks, spread over GPU and CPU as a plan says.

    Args:
        model: The model, on the CPU or on the device; on ranks other than 0 its parameters may be on `meta`. Values are
            taken from rank 0, or, of `pretrained(..., defer=True)`, from files by every rank; parameters on `meta` are
            replaced here. The model object stays usable; its parameters must not be replaced afterwards.
        search_result: The plan, from one of the searches or `lightning_elixir.planning.make_plan`.
        process_group: Ranks that share the chunks; None: the default group, or a single process.
        prefetch: Fetch chunks ahead of need (as far as the plan says so).
        dtype: Compute dtype; None: as in the plan. 16-bit dtypes keep an fp32 master.
        use_fused_kernels: True: swap fused operators in for the model's own (see `ElixirStrategy`), until `close()`.
            "auto": where there are any; True raises where there are none.
        master_weights: False: 16-bit parameters are updated in their own dtype, without an fp32 master.
        keep_fp32: What stays in fp32 where the others are cast to 16 bits: names of parameters or modules (globs, such
            as "*.head"), classes of modules, a function (name, module) -> bool, or a list of these. Parameters that the
            plan has in 16 bits get chunks of their own. None: what cannot run in 16 bits (norms with running
            statistics, `spectral_norm`, `orthogonal`), with `autocast` routers, and what the plan has in fp32; names
            come on top of that. An empty list: nothing. Without master weights nothing is kept unasked. Without
            `autocast` modules that are kept as a whole take 16-bit inputs as fp32, and give 16-bit results.
        ignored: What is left out of chunks, beside what the plan leaves out: values as for `keep_fp32`, and classes of
            parameters. It stays on the device, whole on every rank, in its own dtype, trained or frozen as it is; the
            optimizer states of what trains are spread over the ranks. Frozen parameters of classes that no chunk can
            hold are left out by themselves.
        activations: What becomes of the tensors that autograd saves in the model's blocks, instead of what the plan
            says: "keep", "recompute", "offload", "recompute_offloaded", "keep_attention", or a dict from globs over
            names of blocks to these. "auto": as the plan has it, which `optimal_search(activations="auto")` has made.
            None: as the plan has it; one that says nothing leaves it to the model.
        autocast: Run forward under `torch.autocast` in `dtype`; otherwise floating inputs are cast to a 16-bit `dtype`.
        force_outputs_fp32: Cast floating outputs to fp32.
        reduce_dtype: What gradients are cast to for the reduction over ranks; None: as they are.
        pin_memory: Page-lock host shards (CUDA).
        device: Where to compute; None: the current CUDA device, or the CPU where there is none.
        nvme_offload_dir: Folder for the optimizer states that the plan has on NVMe; None: the system's folder for
            temporary files, if that is on a disk.
        nvme_backend: What reads and writes there: "direct" (our own) or "tensornvme" (the package).
        nvme_checksums: Check what is read from NVMe against what was written; slow, for debugging.

    Raises:
        StorageError: If the folder cannot be used, or its disk has too little room.
        PlanError: If the plan is for another model, another number of ranks or another dtype, fp16 is asked for on
            the CPU, `keep_fp32`, `ignored` or `activations` names what the model has not got, or no fused operator can
            be swapped in.
        OptionError: If there is no option of that name.
    """

    @checks_option_names
    def __init__(
        self,
        model: nn.Module,
        search_result: Plan,
        process_group: dist.ProcessGroup | None = None,
        prefetch: bool = True,
        dtype: torch.dtype | None = None,
        use_fused_kernels: FusedChoice = False,
        *,
        master_weights: bool = True,
        keep_fp32: KeepFp32 = None,
        ignored: Ignored = None,
        activations: str | Mapping[str, str] | None = None,
        autocast: bool = False,
        force_outputs_fp32: bool = False,
        reduce_dtype: torch.dtype | None = None,
        pin_memory: bool = True,
        device: torch.device | str | None = None,
        nvme_offload_dir: str | None = None,
        nvme_backend: str = "direct",
        nvme_checksums: bool = False,
    ) -> None:
        super().__init__()
        plan = search_result
        runtime_device = make_device(device, pin_memory)
        comm = make_comm(process_group, runtime_device.torch_device, mean_of_rows)
        self.dtype = dtype if dtype is not None else getattr(torch, plan.compute_dtype)
        _check(plan, self.dtype, dtype is not None, comm.world_size, runtime_device.torch_device)
        is_half = self.dtype.itemsize == 2
        kept = kept_parameters(model, keep_fp32, has_autocast=autocast, has_defaults=is_half and master_weights)
        plan = with_kept(plan, kept, is_exact=is_nothing(keep_fp32))
        plan = with_activations(model, plan, activations)
        plan = with_ignored(plan, ignored_parameters(model, ignored))
        tell_of_unchunked(model, plan.ignored)
        precision = Precision(torch.float32 if is_half and master_weights else None)
        disk = DiskOptions(nvme_offload_dir, nvme_backend, nvme_checksums)
        with fuse(model, use_fused_kernels, runtime_device.torch_device) as self._swapped:
            self.engine = Engine(model, plan, runtime_device, comm, precision, reduce_dtype, prefetch, disk)
        self.module = model
        self.memory_planner: str | None = None
        """What else moves this module from plan to plan, so that limits are not to be set here."""
        folder = None if nvme_offload_dir is None else str(disk.existing_folder())
        self._limited = LimitedModule(self.engine, model, plan, folder)
        self._limit_activations(plan)
        self.needs_loss_scale = self.dtype is torch.float16 and master_weights
        self._device_type = runtime_device.torch_device.type
        self._has_autocast = autocast and is_half
        self._casts_inputs = is_half and not autocast
        self._handles: list[RemovableHandle] = []
        if self._casts_inputs:
            self._handles = compute_in_fp32(
                model, kept_in(plan) | ignored_in_fp32(plan.ignored), self.dtype, self._device_type
            )
        self._force_outputs_fp32 = force_outputs_fp32

    @property
    def plan(self) -> Plan:
        return self.engine.plan

    def _limit_activations(self, plan: Plan) -> None:
        """Have what goes to host memory leave to others what they need, unless limits are set already. Collective."""
        if has_offloaded(plan.activations) and not self.engine.activations.has_host_limit:
            self.engine.activations.limit_host(self._limited.budget(MemoryLimits()), self._limited.regime)

    @property
    def is_closed(self) -> bool:
        return self.engine.is_closed

    @with_room
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped model's forward."""
        if self._casts_inputs:
            args, kwargs = _cast((args, kwargs), self.dtype)
        with self.engine.forwards.region(), self._autocast():
            output = self.module(*args, **kwargs)
            if self._force_outputs_fp32:
                output = _cast(output, torch.float32)
        self.engine.forwards.watch_outputs(output)
        return output

    def _autocast(self) -> AbstractContextManager[Any]:
        if not self._has_autocast:
            return nullcontext()
        # The cache is for parameters in fp32, which are few here: without it there are as many casts, of activations.
        # With it, 16-bit copies of those that come and go would stay until the forward ends, a recomputation would miss
        # casts that the forward has made, and gradients of one that is used twice would be added up in 16 bits.
        return torch.autocast(self._device_type, self.dtype, cache_enabled=False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients; with `set_to_none=False` they are zeros then, also those that the last step has dropped.
        The same call on every rank."""
        self.engine.steps.drop_gradients(to_zero=not set_to_none)

    # Copies, also pickled ones, are of the wrapped model: plain and whole, in its own dtypes, without an engine. What
    # they take from chunks is collective.

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        with self.engine.turn.long_call("a copy"):
            copied = copy.deepcopy(self.module, memo)
        without_hooks(self.module.modules(), memo)
        return copied

    def __copy__(self) -> nn.Module:
        return copy.copy(self.module)

    def __reduce__(self) -> Any:
        return _itself, (self.module,)

    def state_dict(  # type: ignore[override]
        self, *, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Whole values under the model's own names, on the CPU of every rank. Collective. `keep_vars` is of no use."""
        whole = {prefix + name: value for name, value in self.full_state_dict(rank0_only=False).items()}
        if destination is None:
            return whole
        destination.update(whole)
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load whole values; every rank passes the same. Collective. `assign` is not possible: storage stays bound."""
        missing, unexpected = self.load_full_state_dict(state_dict, strict)
        return nn.modules.module._IncompatibleKeys(missing, unexpected)

    def full_state_dict(self, *, rank0_only: bool = True) -> dict[str, Tensor]:
        """Parameters (tied ones under all their names) and persistent buffers, whole, on the CPU. Collective.

        Returns:
            Name -> tensor, in the model's own dtypes (with fp32 masters: from them); `{}` on other ranks than 0 if
            `rank0_only`.
        """
        engine = self.engine
        with engine.meeting(Meeting.FULL_STATE_DICT if rank0_only else Meeting.STATE_DICT):
            values = engine.whole_values(on_all_ranks=not rank0_only, has_met=True)
            if rank0_only and engine.comm.rank != 0:
                return {}
            with engine.interception.whole_state(values):
                state: dict[str, Any] = self.module.state_dict()  # with hooks, extra state, and the states of metrics
        own = {id(value) for value in values.values()}
        return {
            name: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) and id(value) not in own else value
            for name, value in state.items()
        }

    def load_full_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> tuple[list[str], list[str]]:
        """Overwrite parameters and buffers with whole values; every rank passes the same. Collective.

        Args:
            state: Name -> tensor, as `full_state_dict` or the plain model's `state_dict` gives them.
            strict: Raise if names are missing or unexpected.

        Returns:
            Missing and unexpected names.

        Raises:
            PlanError: For names that do not fit (if strict), or shapes that do not.
        """
        with self.engine.meeting(Meeting.LOAD_STATE_DICT):
            return self._load_whole(state, strict)

    def _load_whole(self, state: Mapping[str, Tensor], strict: bool) -> tuple[list[str], list[str]]:
        engine = self.engine
        fqns = {id(p): m.fqn for c in engine.chunks for p, m in zip(c.parameters, c.spec.members, strict=True)}
        named = self.module.named_parameters(remove_duplicate=False)
        targets = {name: p for name, p in named if id(p) in fqns}  # ignored ones load as buffers do
        shapes = {m.fqn: engine.groups.whole_shape(m) for c in engine.chunks for m in c.spec.members}
        shapes |= {fqn: p.layout_at_elixir.shape for fqn, p in shells_of(engine).items()}
        values: dict[str, Tensor] = {}
        for name, target in targets.items():
            if name in state:
                shape = shapes[fqns[id(target)]]
                if tuple(state[name].shape) != shape:
                    raise PlanError(f"state dict: {name} has shape {tuple(state[name].shape)}, the model has {shape}")
                values[fqns[id(target)]] = state[name]
        missing = [name for name in targets if name not in state]
        # Everything else (buffers, extra state, states of metrics) the modules load by themselves.
        rest = self.module.load_state_dict({k: v for k, v in state.items() if k not in targets}, strict=False)
        missing += [name for name in rest.missing_keys if name not in targets]
        unexpected = list(rest.unexpected_keys)
        if strict and (missing or unexpected):
            raise PlanError(
                f"state dict: missing {missing[:5]}, unexpected {unexpected[:5]} "
                f"({len(missing)} and {len(unexpected)} names)"
            )
        write_whole(engine, values)
        return missing, unexpected

    @contextmanager
    def full_parameters(
        self, names: Iterable[str] | None = None, modify: bool = False
    ) -> Iterator[dict[str, nn.Parameter]]:
        """Inside, the named (or all) parameters are whole, on the compute device, in the compute dtype. Collective.

        Args:
            names: FQNs; None: all.
            modify: Keep what is written to them; otherwise it is undone.

        Raises:
            StateError: For unknown names.
        """
        engine = self.engine
        with engine.meeting(Meeting.WRITE_PARAMETERS if modify else Meeting.FULL_PARAMETERS):
            members = {m.fqn: (c, i) for c in engine.chunks for i, m in enumerate(c.spec.members)}
            beside = {n: p for n, p in self.module.named_parameters() if p in engine.ignored}
            wanted = [*members, *beside] if names is None else list(names)
            unknown = [name for name in wanted if name not in members and name not in beside]
            if unknown:
                raise StateError(f"not parameters of this model: {', '.join(unknown[:5])}")
            parts = [name for name in wanted if name in members and members[name][0].spec.axes]
            if parts:
                raise StateError(
                    f"{', '.join(parts[:3])} are cut between ranks by a pattern, so no rank has them whole: name"
                    " others, or take all from full_state_dict() (lightning_module_state_dict())"
                )
            ids = tuple(dict.fromkeys(members[name][0].id for name in wanted if name in members))
            with engine.writes.resident(ids, modify=modify):
                yield {
                    name: beside[name] if name in beside else members[name][0].parameters[members[name][1]]
                    for name in wanted
                }

    def full_grads(self, loss_scale: float = 1.0) -> dict[str, Tensor]:
        """Whole gradients of all parameters that have one, fp32 (fp64 ones as they are) on the CPU of every rank, as
        the backwards have left them (not clipped, other than `p.grad`), divided by `loss_scale`. Collective."""
        with self.engine.meeting(Meeting.FULL_GRADS):
            return whole_grads(self.engine, 1.0 / loss_scale)

    def stats(self) -> Stats:
        """Counters since the last reset, and bytes held now."""
        return self.engine.stats()

    def reset_stats(self) -> None:
        self.engine.reset_stats()

    def replan(self, plan: Plan) -> None:
        """Move to another placement of the same chunks, between steps. Collective. A plan that was made without what
        stays in fp32 here gets chunks for it, as when this was built; one that says nothing of activations leaves them
        as they are."""
        if not plan.activations:
            now = self.plan
            plan = replace(plan, activations=now.activations, activation_host_bytes=now.activation_host_bytes)
        self._limit_activations(plan)
        self.engine.replan(with_kept(plan, kept_in(self.plan), is_exact=True))

    def set_memory_limit(
        self, gpu: int | str | None = None, cpu: int | str | None = None, *, keep_host_memory: bool = False
    ) -> None:
        """Give memory back, or take it again: between two steps, move to the fastest placement of the same chunks that
        keeps within these limits. No number changes by it, as far as none depends on the placement. Collective, with
        the same limits on all ranks.

        Args:
            gpu: What each device may hold, chunks and a step's activations together: bytes or "16GiB". On the CPU it
                limits what would be on a device. None: what there is.
            cpu: The same of each host. None: what is free.
            keep_host_memory: Whether the host memory that chunks leave now stays, page-locked, for the next call: that
                gives GPU memory back in little more than the copies take. As far as the host comfortably has it, and
                until a call without this.

        Raises:
            PlanError: A size that is none, or limits that differ between ranks.
            CapacityError: No placement keeps within the limits. Nothing has changed then.
            StateError: Inside forward or backward, or while gradients wait for a step.
            DivergenceError: Another rank is in another call.
        """
        if self.memory_planner is not None:
            raise PlanError(
                f"set_memory_limit: {self.memory_planner} plans this module's memory, and would undo a limit that is"
                " set here: call its set_memory_limit(), which has the same arguments"
            )
        change_limits([self._limited], gpu, cpu, keep_host_memory=keep_host_memory)

    def peak_activation_bytes(self) -> int:
        """Device bytes beyond chunks at the peak since sampling began; 0 where the device does not count."""
        return self.engine.peak_non_model_bytes

    def sample_activations(self, is_on: bool = True) -> None:
        """Watch device memory at every access (slow: for a warm-up step)."""
        self.engine.sample_activations(is_on)

    def close(self) -> None:
        """Free replicas and shards and remove all hooks. The parameters have no values any more and raise when used."""
        self.engine.close()
        for handle in self._handles:
            handle.remove()
        self._swapped.undo()


def _itself(module: nn.Module) -> nn.Module:
    """What a pickled `ElixirModule` is restored by."""
    return module


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors anywhere inside, cast."""
    return map_floating(value, lambda tensor: tensor.to(dtype))


def _check(plan: Plan, dtype: torch.dtype, is_given: bool, world_size: int, device: torch.device) -> None:
    if plan.world_size != world_size:
        raise PlanError(
            f"the plan is for {plan.world_size} ranks, the process group has {world_size}: make a plan for {world_size}"
        )
    if is_given and str(dtype).removeprefix("torch.") != plan.compute_dtype:
        raise PlanError(
            f"dtype={dtype}, but the plan was made for {plan.compute_dtype}: pass unified_dtype={dtype} to the search"
        )
    if dtype is torch.float16 and device.type == "cpu":
        raise PlanError("float16 is for GPUs: on the CPU use torch.bfloat16 or torch.float32")

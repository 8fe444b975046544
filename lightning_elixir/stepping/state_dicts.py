"""Optimizer states in and out of an engine: whole, described, segment by segment."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_elixir.core.composed_states import composed_again
from lightning_elixir.core.first_names import first_names
from lightning_elixir.errors import PlanError
from lightning_elixir.optim.state_layout import is_scalar_state
from lightning_elixir.optim.whole_parameters import Layout
from lightning_elixir.plan.shard_segments import Segment
from lightning_elixir.plan.types import Tier
from lightning_elixir.runtime.chunk import Chunk
from lightning_elixir.runtime.chunk_optimizers import ChunkOptimizers
from lightning_elixir.runtime.engine import Engine
from lightning_elixir.runtime.groups import Groups
from lightning_elixir.runtime.whole import gather_whole, in_memory_order

log = logging.getLogger(__name__)

Described = dict[tuple[int, int], dict[str, tuple[str, Any]]]
"""(chunk id, member index) -> key -> ("tensor", dtype) or ("value", value)."""

_FILLED_IN = {
    *("amsgrad", "capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused", "maximize", "nesterov"),
    *("adamw_mode", "bias_correction"),
}
"""Settings that torch's optimizers, or ours, take as they are where they were not saved."""

ReadSegment = Callable[[Chunk, Segment], Mapping[str, Any]]
"""The state of a segment, as torch's optimizers have it, but element-wise ones 1-D, `[segment.numel]`; empty: none. Of
whole parameters in their own shapes."""


class StateDicts:
    """Reads and replaces the states of one optimizer, between steps.

    Args:
        engine: Has the shards that they belong to.
        states: Where they are.

    Raises:
        StateError: From every method: a later optimizer has taken the place of states on NVMe.
    """

    def __init__(self, engine: Engine, states: ChunkOptimizers) -> None:
        self._engine = engine
        self._states = states

    # Out

    def whole(self) -> dict[str, Any]:
        """`state` and `param_groups` as torch's optimizers give them, with whole tensors on the CPU, on rank 0; `{}` on
        other ranks. Collective."""
        engine, states = self._engine, self._states
        numbers, groups = self._numbered()
        described = self.described()
        whole: dict[str, dict[str, Tensor]] = {}
        with engine.store.checkpoint_memory() or nullcontext() as memory:
            for key in sorted({k for entries in described.values() for k, v in entries.items() if v[0] == "tensor"}):
                pieces = ((c, self._piece(c, key, described)) for c in engine.chunks if c.id in states.inner)
                if states.maker.is_whole:
                    found = self._from_owners(key, described)
                else:
                    found = gather_whole(engine, pieces, on_all_ranks=False, memory=memory)
                for fqn, value in found.items():
                    whole.setdefault(fqn, {})[key] = value
        if engine.comm.rank != 0:
            return {}
        state: dict[int, dict[str, Any]] = {}
        for chunk in engine.chunks:
            for index, parameter in enumerate(chunk.parameters):
                entries = described.get((chunk.id, index))
                if entries and id(parameter) in numbers:
                    fqn = chunk.spec.members[index].fqn
                    of_parameter = {
                        key: whole[fqn][key] if kind == "tensor" else value for key, (kind, value) in entries.items()
                    }
                    state[numbers[id(parameter)]] = self._as_its_own(of_parameter)
        return {"state": {n: state[n] for n in sorted(state)}, "param_groups": groups}

    def described(self) -> Described:
        """What states there are, over all ranks. Collective."""
        self._states.check_kept()
        mine: Described = {}
        for chunk_id, inner in self._states.inner.items():
            for position, place in enumerate(inner.places):
                entries = inner.described(position)
                if entries and not inner.has_only_reserved(position):
                    mine[(chunk_id, place.member_index)] = entries
        merged: Described = {}
        for described in self._engine.comm.exchange_objects(mine):
            merged.update(described)
        return merged

    def _from_owners(self, key: str, described: Described) -> dict[str, Tensor]:
        """One state of the parameters' shape, where parameters are updated as a whole, on rank 0. Collective."""
        engine = self._engine
        found: dict[str, Tensor] = {}
        for (chunk_id, index), entries in sorted(described.items()):
            if entries.get(key, ("value",))[0] == "tensor":
                chunk = engine.chunks[chunk_id]
                value = self._from_owner(chunk, index, key, entries[key][1], on_all_ranks=False)
                if value is not None:
                    found[chunk.spec.members[index].fqn] = value
        return found

    def _from_owner(
        self, chunk: Chunk, index: int, key: str, dtype: torch.dtype, *, on_all_ranks: bool
    ) -> Tensor | None:
        """As `_from_owners`, of one parameter; host memory, None where it is not asked for. Collective."""
        engine, inner = self._engine, self._states.inner[chunk.id]
        owner, layout = (
            self._states.owners[chunk.id, index],
            Layout(chunk.spec.members[index].shape, chunk.strides[index]),
        )
        mine = torch.empty(0, dtype=dtype, device="cpu")
        for position, place in enumerate(inner.places):
            run = inner.run_of(position, key) if place.member_index == index else None
            if run is not None:
                mine = run.to("cpu")
        if not on_all_ranks and (owner == 0 or not engine.groups.is_counted):
            return layout.view(mine.clone()) if engine.comm.rank == 0 else None
        copy = engine.groups.copy
        sent = mine if copy.rank == owner else torch.zeros(layout.numel, dtype=dtype, device="cpu")
        rows = copy.gather_host(sent, on_all_ranks)
        return None if rows is None else layout.view(rows[owner].clone())

    def of_member(self, chunk: Chunk, index: int) -> dict[str, Any]:
        """Whole states of one parameter, as copies, on every rank: tensors on the compute device, numbers on the host;
        empty: it has none. Collective."""
        engine, inner = self._engine, self._states.inner[chunk.id]
        mine: dict[str, tuple[str, Any]] = {}
        with engine.telling():
            for position, place in enumerate(inner.places):
                if place.member_index == index and not inner.has_only_reserved(position):
                    mine = inner.described(position)
        entries: dict[str, tuple[str, Any]] = {}
        for told in engine.comm.exchange_objects(mine):
            entries |= told
        found: dict[str, Any] = {}
        for key, (kind, value) in entries.items():
            if kind == "value":
                found[key] = value
                continue
            if self._states.maker.is_whole:
                of_owner = self._from_owner(chunk, index, key, value, on_all_ranks=True)
                if of_owner is not None:
                    found[key] = of_owner.to(engine.device.torch_device)
                continue
            rows = engine.groups.of(chunk.spec).gather_host(inner.flat_state(key, value), on_all_ranks=True) or []
            flat = rows[0] if len(rows) == 1 else torch.cat(rows)
            found[key] = chunk.view_of(flat, index).to(engine.device.torch_device, copy=True)
        return self._as_its_own(found)

    def _as_its_own(self, state: dict[str, Any]) -> dict[str, Any]:
        """The whole states of a parameter as the optimizer has them in plain PyTorch."""
        return composed_again(state) if self._states.maker.is_whole else state

    def runs(self, chunk: Chunk, key: str, dtype: torch.dtype) -> dict[int, Tensor]:
        """One element-wise state of this rank's segments of a chunk, 1-D, by member index: where it lies, unless that
        is a disk. Zeros where there is none."""
        inner = self._states.inner[chunk.id]
        states = [inner.run_of(position, key) for position in range(len(inner.places))]
        if any(state is not None and state.is_meta for state in states):
            flat = inner.flat_state(key, dtype)
            return {p.member_index: flat[p.shard_offset : p.shard_offset + p.numel] for p in inner.places}
        return {
            place.member_index: torch.zeros(place.numel, dtype=dtype, device="cpu") if state is None else state
            for place, state in zip(inner.places, states, strict=True)
        }

    def _numbered(self) -> tuple[dict[int, int], list[dict[str, Any]]]:
        """Numbers of parameters, by `id`, in the order of their groups; the groups with these."""
        numbers: dict[int, int] = {}
        groups = []
        for group in self._states.groups:
            for parameter in group["params"]:
                numbers.setdefault(id(parameter), len(numbers))
            packed = {k: v for k, v in group.items() if k != "params"}
            groups.append({**packed, "params": [numbers[id(p)] for p in group["params"]]})
        return numbers, groups

    def _piece(self, chunk: Chunk, key: str, described: Described) -> Tensor | None:
        """This rank's shard of one state of a chunk; None if no parameter of the chunk has it."""
        dtypes = [e[key][1] for (chunk_id, _), e in described.items() if chunk_id == chunk.id and key in e]
        if not dtypes:
            return None
        return self._states.inner[chunk.id].flat_state(key, dtypes[0])

    # In

    def take_over(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the states of the user's own optimizer, which may have stepped before the model was wrapped."""
        if optimizer.state:
            parameters = [p for group in self._states.groups for p in group["params"]]
            self.load(self._reading({id(p): optimizer.state[p] for p in parameters if p in optimizer.state}))
            optimizer.state.clear()

    def load_whole(self, state_dict: Mapping[str, Any], optimizer: Optimizer) -> None:
        """Take states and groups' settings as `whole` gives them, or torch's optimizer over the plain model.

        Args:
            optimizer: The user's own.

        Raises:
            PlanError: Its groups, settings or shapes are not those of this optimizer.
        """
        groups, saved_groups = self._states.groups, state_dict["param_groups"]
        sizes, saved_sizes = ([len(group["params"]) for group in some] for some in (groups, saved_groups))
        if sizes != saved_sizes:
            raise PlanError(
                f"the optimizer state has groups of {saved_sizes} parameters, this optimizer has {sizes}: load it into"
                " an optimizer with the same groups"
            )
        check_settings(optimizer, saved_groups)
        saved: dict[int, Mapping[str, Any]] = {}
        for group, saved_group in zip(groups, saved_groups, strict=True):
            group.update({k: v for k, v in saved_group.items() if k not in ("params", "param_names")})
            for parameter, number in zip(group["params"], saved_group["params"], strict=True):
                if number in state_dict["state"]:
                    saved[id(parameter)] = state_dict["state"][number]
        self.load(self._reading(saved), {f for c in self._engine.chunks for p, f in _named(c) if id(p) in saved})

    def load(self, read: ReadSegment, saved: Collection[str] = ()) -> None:
        """Replace all states, one segment after the other.

        Args:
            read: Gives them.
            saved: Parameters of which there are any. Those that are frozen have no place for them, which is told.
        """
        self._states.check_kept()
        frozen: list[str] = []
        for chunk in self._engine.chunks:
            if chunk.id in self._states.inner:
                self._load_chunk(chunk, read)
            elif not chunk.spec.requires_grad:
                frozen += [fqn for _, fqn in _named(chunk) if fqn in saved]
        if frozen and self._engine.comm.rank == 0:
            log.warning(
                "optimizer states of parameters that are frozen now (%s) are not taken over. Checkpoints from here on"
                " lack them; what is unfrozen later begins anew, unless it goes on from a checkpoint from before",
                first_names(frozen),
            )

    def _load_chunk(self, chunk: Chunk, read: ReadSegment) -> None:
        inner = self._states.inner[chunk.id]
        if chunk.spec.optim_tier is Tier.NVME:
            inner.allocate_moments()  # so that there is something to open
        segments = {s.member_index: s for s in self._states.state_segments(chunk, self._engine.comm.rank)}
        with inner.opened(is_written=True):
            for position, place in enumerate(inner.places):
                inner.set_state(position, read(chunk, segments[place.member_index]))

    def _reading(self, saved: Mapping[int, Mapping[str, Any]]) -> ReadSegment:
        """Reads what `load` needs out of whole states, by the `id` of their parameters."""
        if not self._states.maker.is_whole:
            return _reading_segments(saved, self._engine.groups)
        return lambda chunk, segment: _unwrapped(saved.get(id(chunk.parameters[segment.member_index]), {}))


def _named(chunk: Chunk) -> Iterator[tuple[Tensor, str]]:
    """The parameters, with their names in the plan."""
    return zip(chunk.parameters, (member.fqn for member in chunk.spec.members), strict=True)


def check_settings(optimizer: Optimizer, saved_groups: Iterable[Mapping[str, Any]]) -> None:
    """Whether saved groups may be those of such an optimizer, as torch would only notice in its first step.

    Raises:
        PlanError: They lack a setting that it needs.
    """
    needed = optimizer.defaults.keys() - _FILLED_IN
    lacking = sorted({name for group in saved_groups for name in needed - group.keys()})
    if lacking:
        raise PlanError(
            f"the saved optimizer is another one than {type(optimizer).__name__}, which has {', '.join(lacking)} as"
            " well: go on with the optimizer that was saved, or begin with the weights alone (load_state_dict of the"
            " model, load_from_checkpoint)"
        )


def _unwrapped(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """bitsandbytes saves a part of a parameter's states as a dictionary among the others."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        found |= value if isinstance(value, dict) else {key: value}
    return found


def _reading_segments(saved: Mapping[int, Mapping[str, Any]], groups: Groups) -> ReadSegment:
    """Reads segments out of whole states, by the `id` of their parameters."""

    def read(chunk: Chunk, segment: Segment) -> Mapping[str, Any]:
        member = chunk.spec.members[segment.member_index]
        state = saved.get(id(chunk.parameters[segment.member_index]), {})
        loaded: dict[str, Any] = {}
        for key, value in state.items():
            if is_scalar_state(key, value, member.shape):
                loaded[key] = value.clone() if isinstance(value, Tensor) else value
                continue
            shape = groups.whole_shape(member)
            if tuple(value.shape) != shape:
                raise PlanError(f"{key} of {member.fqn} has shape {tuple(value.shape)}, expected {shape}")
            part = groups.part_of(member, value)
            loaded[key] = in_memory_order(chunk, segment.member_index, part)[segment.in_param]
        return loaded

    return read

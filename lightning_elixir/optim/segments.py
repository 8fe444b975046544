"""An element-wise optimizer over the segments of one shard."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from lightning_elixir.core.host_memory import Extent
from lightning_elixir.errors import PlanError
from lightning_elixir.optim.adam_states import AdamStates, SegmentPlace, Zeros
from lightning_elixir.optim.elementwise import InnerMaker
from lightning_elixir.optim.elementwise_check import settings_of
from lightning_elixir.optim.gradient_change import GradientChange
from lightning_elixir.optim.hybrid_adam import HybridAdam
from lightning_elixir.optim.state_layout import elementwise_state_dtypes, is_scalar_state
from lightning_elixir.optim.updates import FlatUpdate, StatesOnDisk, UpdatePart
from lightning_elixir.plan.types import ALIGN_NUMEL
from lightning_elixir.storage.nvme import MOMENTS, ChunkStates


class SegmentOptimizer:
    """Updates one chunk's shard in place.

    The states that it shows of Adam are views of `AdamStates`. Other optimizers make theirs themselves.

    Args:
        maker: From `inner_maker`.
        work: 1-D tensor to update: the master, or the compute shard where there is none; on `meta` if it is on a disk.
        places: The segments that have a parameter group, in order.
        groups: The user's parameter groups, for settings.
        zeros: Makes 1-D tensors of zeros where the moments shall live.
        on_disk: Where the moments are, if that is a disk; Adam only.
        is_sent: See `AdamStates`.
    """

    def __init__(
        self,
        maker: InnerMaker,
        work: Tensor,
        places: Sequence[SegmentPlace],
        groups: Sequence[Mapping[str, Any]],
        zeros: Zeros,
        on_disk: ChunkStates | None = None,
        *,
        is_sent: bool = True,
    ) -> None:
        self.places = tuple(places)
        self.work = work
        self.adam = AdamStates(self.places, work.numel(), work.dtype, zeros, on_disk, is_sent=is_sent)
        """Empty for other optimizers."""
        # Others than Adam: position -> memory for the states that its first step will make, until then.
        self._reserved: dict[int, list[Tensor]] = {}
        self._tensors = [work[p.shard_offset : p.shard_offset + p.numel].detach() for p in places]
        self._group_indices = sorted({p.group_index for p in places})
        inner_groups = [
            {
                **settings_of(groups[g]),
                "params": [t for t, p in zip(self._tensors, places, strict=True) if p.group_index == g],
            }
            for g in self._group_indices
        ]
        self._maker = maker
        self._inner = maker.make(inner_groups) if inner_groups else None

    def step(self, grad: Tensor, members: Iterable[int], groups: Sequence[Mapping[str, Any]]) -> None:
        """One update.

        Args:
            grad: 1-D, numel and dtype of `work`; may be overwritten.
            members: Member indices that have a gradient: the others stay untouched.
            groups: The user's groups, whose settings are read now.
        """
        if self._inner is None:
            return
        wanted = set(members)
        self._follow_settings(groups)
        for tensor, place in zip(self._tensors, self.places, strict=True):
            is_used = place.member_index in wanted
            tensor.grad = grad[place.shard_offset : place.shard_offset + place.numel] if is_used else None
        # States that are made now come to lie in what was reserved for them.
        self._reserved = {i: kept for i, kept in self._reserved.items() if self.places[i].member_index not in wanted}
        self._inner.step()
        for tensor in self._tensors:
            tensor.grad = None

    def _follow_settings(self, groups: Sequence[Mapping[str, Any]]) -> None:
        if self._inner is not None:
            for inner_group, group_index in zip(self._inner.param_groups, self._group_indices, strict=True):
                inner_group.update(settings_of(groups[group_index]))

    def set_mode(self, mode: str, groups: Sequence[Mapping[str, Any]]) -> None:
        """Call `train()` or `eval()` of an optimizer that has these (`InnerMaker.has_modes`), which changes `work`.

        Args:
            mode: "train" or "eval".
            groups: The user's groups, whose settings are read now.
        """
        if self._inner is not None:
            self._follow_settings(groups)
            getattr(self._inner, mode)()

    def reserve_states(self) -> None:
        """Others than Adam: take the memory that the first step will need for the states of segments that have none.
        They still have none then, as before any first step in plain PyTorch."""
        if self._inner is None or self.is_adam:
            return
        group_of = {id(t): group for group in self._inner.param_groups for t in group["params"]}
        dtypes: dict[int, tuple[torch.dtype, ...]] = {}  # by the id of the group
        for position, tensor in enumerate(self._tensors):
            if not self._inner.state.get(tensor) and position not in self._reserved:
                group = group_of[id(tensor)]
                if id(group) not in dtypes:
                    dtypes[id(group)] = elementwise_state_dtypes(self._maker.make, settings_of(group), tensor)
                # A tensor each, as the states will be, and written to: the system gives memory only then.
                self._reserved[position] = [torch.empty_like(tensor, dtype=d).zero_() for d in dtypes[id(group)]]

    @property
    def is_adam(self) -> bool:
        """Whether updates are described by `describe` rather than carried out by `step`."""
        return isinstance(self._inner, HybridAdam)

    @property
    def has_states(self) -> bool:
        """Whether Adam's moments have been made."""
        return bool(self.adam.moments)

    @property
    def has_spares(self) -> bool:
        """Whether there is a second set of Adam's moments."""
        return bool(self.adam.spares)

    def has_states_of(self, members: Collection[int]) -> bool:
        """Whether the segments of all these members have been updated before, or have states from elsewhere."""
        return all(i in self.adam.counts for i, place in enumerate(self.places) if place.member_index in members)

    def spans(self, members: Collection[int]) -> list[slice]:
        """Where in the shard the used segments lie, runs of them as one; what `describe` describes."""
        runs = self._runs(members)
        return [_span(self.places[run[0]], self.places[run[-1]]) for run in runs]

    def allocate_moments(self) -> None:
        """Make Adam's moments if there are none yet; nothing for other optimizers."""
        if self.is_adam:
            self.adam.allocate()

    @property
    def moments(self) -> list[Extent]:
        """What Adam's moments take; nothing for other optimizers."""
        extent = Extent(self.adam.numel, self.work.dtype, self.adam.is_sent)
        return [extent] * len(MOMENTS) if self.is_adam else []

    def moments_to_host(self, *, is_sent: bool) -> list[Extent]:
        """What Adam's moments take in host memory if they come there: nothing before a first step, or if they are.

        Args:
            is_sent: As they are to be then, see `AdamStates`.
        """
        is_elsewhere = bool(self.adam.moments) and self.adam.moments[0].device.type != "cpu"
        is_coming = self.is_adam and bool(self.adam.counts) and is_elsewhere
        extent = Extent(self.adam.numel_in_memory, self.work.dtype, is_sent or self.adam.is_on_device)
        return [extent] * len(MOMENTS) if is_coming else []

    def moment_memory(self) -> list[Tensor]:
        """What Adam's moments lie in now, with the second set."""
        return [*self.adam.moments, *self.adam.spares]

    def allocate_spares(self) -> None:
        """Make a second set of Adam's moments, if there is none yet; nothing for other optimizers."""
        if self.is_adam:
            self.adam.allocate_spares()

    def opened(self, *, is_written: bool = False) -> AbstractContextManager[None]:
        """See `AdamStates.opened`."""
        return self.adam.opened(is_written=is_written)

    def take_on_disk(self, members: Collection[int]) -> StatesOnDisk | None:
        """See `AdamStates.take_on_disk`."""
        return self.adam.take_on_disk(members)

    def drop_spares(self) -> None:
        """Give them back."""
        self.adam.spares = ()

    def exchange(self, work: Tensor) -> None:
        """An update to other memory takes effect: the spare moments are those in use, and the other way round.

        Args:
            work: With the new values: what is updated from now on.
        """
        self.work = work
        self.adam.exchange()
        for position, (tensor, place) in enumerate(zip(self._tensors, self.places, strict=True)):
            part = work[place.shard_offset : place.shard_offset + place.numel]
            # The same object over other memory: states are kept by it.
            tensor.set_(part.untyped_storage(), part.storage_offset(), part.shape, part.stride())
            if self._inner is not None and position in self.adam.counts:
                self._inner.state[tensor].update(self.adam.at(position))

    def start_states(self, members: Collection[int]) -> None:
        """Adam: zero moments and a step count of zero for the segments of `members` that have none yet."""
        self.allocate_moments()
        for position, place in enumerate(self.places):
            if self._inner is not None and place.member_index in members and position not in self.adam.counts:
                self._inner.state[self._tensors[position]] = self.adam.begin(position)

    def count_step(self, members: Collection[int]) -> None:
        """The described update of these members is their next step."""
        for position, place in enumerate(self.places):
            if place.member_index in members:
                self.adam.counts[position] += 1

    def describe(
        self,
        grad: Tensor,
        members: Collection[int],
        groups: Sequence[Mapping[str, Any]],
        change: GradientChange,
        *,
        compute: Tensor | None = None,
        is_compute_on_device: bool = False,
        apart: Tensor | None = None,
    ) -> list[FlatUpdate]:
        """The next step of Adam, one update for each run of used segments, all of which have states. Changes nothing.

        Args:
            grad: 1-D, numel of `work`, same device; read only.
            members: Member indices that have a gradient; the other segments stay untouched.
            groups: The user's groups, whose settings are read now.
            change: What the step does to gradients.
            compute: See `FlatUpdate`; 1-D, numel of `work`, any device.
            is_compute_on_device: See `FlatUpdate`.
            apart: 1-D, as `work`: receives the new values in its place, and the spare moments those of the moments.
        """
        hyper = {g: HybridAdam.hyper_parameters(groups[g]) for g in self._group_indices}
        change = change.in_dtype(self.work.dtype)  # without a master, gradients are in the parameters' 16 bits
        updates = []
        for run in self._runs(members):
            first = self.places[run[0]]
            span = _span(first, self.places[run[-1]])
            parts = []
            for position in run:
                place = self.places[position]
                start, step = place.shard_offset - first.shard_offset, self.adam.counts[position] + 1
                parts.append(UpdatePart(start, place.numel, step, hyper[place.group_index]))
            begin = self.adam.start_of(run[0])
            at = slice(begin, begin + span.stop - span.start)
            exp_avg, exp_avg_sq = (m[at] for m in self.adam.moments)
            outputs = None
            if apart is not None:
                outputs = (apart[span], self.adam.spares[0][at], self.adam.spares[1][at])
            updates.append(
                FlatUpdate(
                    self.work[span],
                    grad[span],
                    exp_avg,
                    exp_avg_sq,
                    tuple(parts),
                    change.grad_factor,
                    change.change_grad,
                    None if compute is None else compute[span],
                    is_compute_on_device,
                    outputs,
                )
            )
        return updates

    def _runs(self, members: Collection[int]) -> list[list[int]]:
        """Positions of used segments, those together that have nothing but padding between them."""
        runs: list[list[int]] = []
        end = -ALIGN_NUMEL
        for position, place in enumerate(self.places):
            if place.member_index in members:
                if place.shard_offset - end < ALIGN_NUMEL:
                    runs[-1].append(position)
                else:
                    runs.append([position])
                end = place.shard_offset + place.numel
        return runs

    def state_of(self, position: int) -> dict[str, Any]:
        """State of the segment at `places[position]`, as torch's optimizers have it; empty before its first update.
        Moments on a disk are on `meta`, unless they are `opened`."""
        if self._inner is None:
            return {}
        state: dict[str, Any] = self._inner.state.get(self._tensors[position], {})
        if self.is_adam and state:
            step = torch.tensor(float(self.adam.counts[position]), dtype=torch.float32, device="cpu")
            return {"step": step, **state, **self.adam.at(position)}
        return state

    def described(self, position: int) -> dict[str, tuple[str, Any]]:
        """Of the state of a segment, by name: ("tensor", its dtype) or ("value", one value for the parameter)."""
        state = self.state_of(position)
        return {k: ("value", v) if is_scalar_state(k, v) else ("tensor", v.dtype) for k, v in state.items()}

    def run_of(self, position: int, key: str) -> Tensor | None:
        """One state of a segment, 1-D, in memory order; None: there is none."""
        value: Tensor | None = self.state_of(position).get(key)
        return value

    def has_only_reserved(self, position: int) -> bool:
        """Whether the state of a segment is there and has not seen an update: what a plain optimizer has not got."""
        return self.is_adam and self.adam.counts.get(position) == 0

    def flat_state(self, key: str, dtype: torch.dtype) -> Tensor:
        """One element-wise state of all segments, each where the segment lies in the shard, else zeros; in host memory.

        Args:
            key: Its name.
            dtype: Of the result.
        """
        if key in MOMENTS and self.adam.is_away:
            return self.adam.flat_on_disk(key).to(dtype)
        piece = torch.zeros(self.work.numel(), dtype=dtype, device="cpu")
        for position, place in enumerate(self.places):
            value = self.state_of(position).get(key)
            if value is not None:
                piece[place.shard_offset : place.shard_offset + place.numel] = value
        return piece

    def set_state(self, position: int, state: Mapping[str, Any], *, keeps_dtype: bool = False) -> None:
        """Replace the state of the segment at `places[position]` by a copy, where the shard is. Those on a disk must be
        `opened` for that.

        Args:
            state: One value or 1-D tensor, `[numel]`, any device and dtype, by name.
            keeps_dtype: False: element-wise ones get the dtype of the shard, as in `load_state_dict` of torch.

        Raises:
            PlanError: Adam, and a state without its step count and moments.
        """
        if self._inner is None:
            return
        self._reserved.pop(position, None)
        taken = {
            k: self._copied(k, v, keeps_dtype=keeps_dtype)
            for k, v in state.items()
            if not (self.is_adam and k in ("step", *MOMENTS))
        }
        settings = self._inner.param_groups[self._group_indices.index(self.places[position].group_index)]
        if settings.get("capturable") or settings.get("fused"):  # these need their step counts beside the parameters
            taken = {k: v.to(self.work.device) if isinstance(v, Tensor) else v for k, v in taken.items()}
        self.adam.forget(position)
        if self.is_adam and state:
            missing = [key for key in ("step", *MOMENTS) if key not in state]
            if missing:
                raise PlanError(
                    f"a state to load into Adam holds {sorted(state)}, but not {missing}: it was saved by another "
                    "optimizer"
                )
            self.adam.counts[position] = int(state["step"])
            self.adam.allocate()
            for key, view in self.adam.at(position).items():
                if self.adam.on_disk is None:
                    is_there = state[key].device == view.device and state[key].data_ptr() == view.data_ptr()
                    taken[key] = view if is_there else view.copy_(state[key])
                elif view.is_meta:
                    raise RuntimeError("states on a disk are written while they are opened")
                else:
                    view.copy_(state[key])
                    taken[key] = torch.empty(view.shape, dtype=view.dtype, device="meta")
        self._inner.state[self._tensors[position]] = taken

    def take_states(self, earlier: SegmentOptimizer) -> None:
        """Take over the states of the optimizer that the same shard had before, on whatever device and with whatever
        segments in groups. `earlier` is of no use afterwards."""
        has_reserved = earlier.drop_reserved()
        mine, theirs = self.adam, earlier.adam
        is_same = mine.has_same_segments(theirs)
        is_on_disk = mine.on_disk is not None or theirs.on_disk is not None
        if is_same and is_on_disk:
            mine.take_all(theirs)
            self._show_states(earlier)
        else:
            if is_same and self.is_adam and theirs.moments and theirs.moments[0].device == self.work.device:
                mine.take_memory(theirs)
            elif theirs.counts:
                mine.allocate(is_coming=theirs.is_on_device)
            with theirs.opened(), mine.opened(is_written=True):
                self._copy_states(earlier)
        if has_reserved:
            self.reserve_states()

    def _show_states(self, earlier: SegmentOptimizer) -> None:
        """Moments have been taken over; with them what users have put beside them."""
        if self._inner is None:
            return
        for position in self.adam.counts:
            others = {key: self._copied(key, value) for key, value in earlier.beside_adam(position).items()}
            self._inner.state[self._tensors[position]] = others | self.adam.at(position)

    def drop_reserved(self) -> bool:
        """Give back what `reserve_states` has taken. Returns whether there was any."""
        has_reserved = bool(self._reserved)
        self._reserved.clear()
        return has_reserved

    def beside_adam(self, position: int) -> dict[str, Any]:
        """What users have put into the state of a segment beside Adam's own."""
        state = self.state_of(position)
        return {key: value for key, value in state.items() if key not in ("step", *MOMENTS)}

    def _copy_states(self, earlier: SegmentOptimizer) -> None:
        by_member = {p.member_index: i for i, p in enumerate(earlier.places)}
        for position, place in enumerate(self.places):
            if place.member_index in by_member:
                state = earlier.state_of(by_member[place.member_index])
                if state:
                    self.set_state(position, state, keeps_dtype=True)

    def _copied(self, key: str, value: Any, *, keeps_dtype: bool = False) -> Any:
        if not isinstance(value, Tensor) or is_scalar_state(key, value):
            return value.clone() if isinstance(value, Tensor) else value
        device = "cpu" if self.work.is_meta else self.work.device
        return value.to(device=device, dtype=value.dtype if keeps_dtype else self.work.dtype, copy=True)

    def spare_bytes(self) -> int:
        """Bytes of the second set of moments."""
        return sum(m.nbytes for m in self.adam.spares)

    def state_bytes(self) -> int:
        """Bytes of all element-wise state tensors that are in use, and of what is reserved for those to come."""
        if self._inner is None:
            return 0
        own = sum(m.nbytes for m in self.adam.moments)
        own += sum(tensor.nbytes for reserved in self._reserved.values() for tensor in reserved)
        return own + sum(
            v.nbytes
            for state in self._inner.state.values()
            for k, v in state.items()
            if isinstance(v, Tensor) and not is_scalar_state(k, v) and not (self.is_adam and k in MOMENTS)
        )


def _span(first: SegmentPlace, last: SegmentPlace) -> slice:
    return slice(first.shard_offset, last.shard_offset + last.numel)

"""Gradients as users see them: `p.grad` between backward and step.

[Note: visible gradients] Gradients lie in shards. A read of `p.grad` gives the whole gradient of that parameter, in
its dtype on the compute device, made for the read; with several ranks all of them read, and each gives its slice.
What is handed out stays the same tensor for as long as it is referred to, also when further backwards add to it, and
when `zero_grad(set_to_none=False)` fills it with zeros, until the gradient is dropped. What was written to it counts:
before the gradients are used, this rank's slice is compared with its shard, bit by bit in the parameter's dtype, and
the elements that differ are taken over. The others keep the bits that this dtype does not have.

Values are compared because version counters do not show writes through `.data`. That is done at every meeting of ranks,
at the next backward, and where clipping is asked for. At the end of a backward ranks tell each other what they have
handed out, and what was added is shown in that. Zeros of `zero_grad(set_to_none=False)` take memory where a step, or a
write, needs it (`ZeroGrads`). What an optimizer was told to do to gradients (unscale, clip) is shown in them; when
users write to what they see of that, or a further backward begins, it is done to the shards first. Where an update has
begun that cannot be taken back (`Reducer.note_begun`), reading is an error.

[Note: norms of parts] Of a parameter that a pattern cuts, `p.grad` is the gradient of this rank's part. Its norm is
another on every rank, and so would be the factor by which `torch.nn.utils.clip_grad_norm_` clips: parameters that are
whole would become different from rank to rank. So such a gradient is of a class that refuses to give a norm. It does so
on every rank, once all have come to read it, so none waits for another. Element by element it is as any tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_elixir.core.storages import storage_use_count
from lightning_elixir.errors import DivergenceError, StateError
from lightning_elixir.plan.shard_segments import segment_of
from lightning_elixir.runtime.agreement import Meeting
from lightning_elixir.runtime.chunk import Chunk
from lightning_elixir.runtime.released import tensors_in
from lightning_elixir.runtime.whole import in_memory_order
from lightning_elixir.runtime.written import BITS

if TYPE_CHECKING:
    from lightning_elixir.runtime.engine import Engine

Change = Callable[[Tensor], None]
"""Changes a gradient in place, element by element."""

_attributes: Any = Tensor  # annotated for instances; on the class they are descriptors
_NORMS = frozenset((
    Tensor.norm, torch.norm, torch.linalg.norm, torch.linalg.vector_norm, torch.linalg.matrix_norm, torch._foreach_norm,
))  # fmt: skip
# What these give has the same elements: its norm is no better.
_SAME_ELEMENTS = frozenset((
    _attributes.data.__get__, Tensor.detach, torch.detach, Tensor.clone, torch.clone, Tensor.to, Tensor.cpu,
    Tensor.float, Tensor.double, Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten,
    Tensor.ravel, torch.ravel, torch.cat,
))  # fmt: skip


class PartOfGradient(Tensor):
    """`p.grad` of a parameter that a pattern cuts (Note: norms of parts)."""

    _name_at_elixir: str
    """Of the parameter."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _NORMS:
            name = _part_in(args, kwargs)._name_at_elixir
            raise StateError(
                f"the gradient of {name} is this rank's part of it, as a pattern cuts the parameter: norms of parts, as"
                " torch.nn.utils.clip_grad_norm_ takes them, are other ones on every rank. To clip, use"
                " Trainer(gradient_clip_val=...), self.clip_gradients(...) or fabric.clip_gradients(...); the norm is"
                " strategy.grad_norm(), and whole gradients are strategy.full_grads()"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        is_of_other = bool(args) and isinstance(args[0], Tensor) and not isinstance(args[0], cls)  # `other.to(part)`
        if func not in _SAME_ELEMENTS or is_of_other:
            return result
        return as_part(result, _part_in(args, kwargs)._name_at_elixir)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).clone(memory_format=torch.preserve_format)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)


def _part_in(args: Any, kwargs: dict[str, Any]) -> PartOfGradient:
    return next(t for t in tensors_in((args, kwargs)) if isinstance(t, PartOfGradient))


def as_part(value: Tensor, name: str) -> Tensor:
    """The same tensor, which gives no norm from now on; one of another class than torch's own stays as it is."""
    if type(value) is Tensor:
        value.__class__ = PartOfGradient
        value._name_at_elixir = name  # type: ignore[attr-defined]
    return value


class Gradients:
    """What was handed out as `p.grad` of one engine's parameters, or set.

    Args:
        engine: Has the shards, and knows the optimizers, which may have changed what is to be seen.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seen: dict[tuple[int, int], Tensor] = {}
        """By (chunk id, member index): in the parameter's shape, dtype and memory order."""
        self._spent: dict[tuple[int, int], Tensor] = {}
        """What users held at the last step, until the next backward: `zero_grad` may make it `.grad` again."""
        self._shown_ids: set[int] = set()
        """Chunks of which a gradient was handed out or set since it was dropped, the same on every rank: user code may
        hold it, and see what is added to it."""
        self._spent_ids: set[int] = set()
        """Likewise, of those in `_spent`."""
        self._most_seen = 1
        """So many of them, and those that are referred to from nowhere else are dropped."""
        self._unheld = _holders({(0, 0): torch.empty(1, device="cpu")}, (0, 0))

    def read(self, chunk: Chunk, index: int) -> Tensor | None:
        """`p.grad`: the whole gradient; None: there is none. Collective, unless this rank knows that there is none.

        Raises:
            StateError: The chunk's update has begun inside backward.
            DivergenceError: Another rank reads another gradient.
        """
        engine, key = self._engine, (chunk.id, index)
        is_none = engine.store[chunk.id].grad is None and not engine.reducer.zeros.may_be_in(chunk.id)
        if not chunk.spec.requires_grad or (is_none and key not in self._seen):
            return None
        self._check_not_begun(chunk, index)
        is_seen = key in self._seen
        with engine.meeting(Meeting.GRADIENTS, [*key, is_seen or engine.reducer.has_grad(*key), is_seen]) as rows:
            return self._met(chunk, index, rows)

    def _met(self, chunk: Chunk, index: int, rows: Sequence[Sequence[int]]) -> Tensor | None:
        """`read`, when all ranks have come.

        Args:
            rows: Of every rank, the key, whether it has a gradient, and whether it has handed that out.
        """
        engine, key = self._engine, (chunk.id, index)
        if any(tuple(row[:2]) != key for row in rows):
            names = [engine.chunks[row[0]].spec.members[row[1]].fqn for row in rows]
            where = ", ".join(f"rank {rank}: {name}" for rank, name in enumerate(names))
            raise DivergenceError(
                f"the ranks read the gradients of different parameters ({where}): read `.grad` on every rank, in the "
                "same order"
            )
        if not any(row[2] for row in rows):
            return None
        engine.reducer.carry_out_drops({chunk.id, *engine.reducer.zeros.chunk_ids})  # users may write to zeros
        self._shown_ids.add(chunk.id)
        if not all(row[3] for row in rows):
            if len(self._seen) >= self._most_seen:
                for unheld in self._unheld_keys():
                    self._absorb(*unheld)
                    del self._seen[unheld]
                self._most_seen = 2 * len(self._seen) + 1  # or each of many reads would look at all of them
            if key in self._seen:
                self._absorb(*key)
            whole = self._gather(chunk, index)
            self._seen.setdefault(key, whole)
        seen, member = self._seen[key], chunk.spec.members[index]
        return as_part(seen, member.fqn) if member.cuts else seen

    def write(self, chunk: Chunk, index: int, value: Tensor) -> None:
        """`p.grad = value`, which torch has found to fit. The same call on every rank.

        Raises:
            StateError: In the middle of forward or backward, or the chunk's update has begun.
        """
        engine = self._engine
        name = chunk.spec.members[index].fqn
        if engine.is_computing:
            raise StateError(f"the gradient of {name} cannot be set inside {engine.phase.value}: set it after backward")
        if not chunk.spec.requires_grad:
            raise StateError(f"{name} was frozen when the model was set up: it has no place for a gradient")
        if value.layout is not torch.strided:
            raise StateError(f"the gradient of {name} cannot be {value.layout}: set a dense one (value.to_dense())")
        self._check_not_begun(chunk, index)
        engine.reducer.carry_out_drops({chunk.id})  # or the new one would go with those that were dropped before
        self._seen[chunk.id, index] = value
        self._shown_ids.add(chunk.id)

    def forget(self, chunk: Chunk, index: int) -> None:
        """The gradient is dropped."""
        self._seen.pop((chunk.id, index), None)
        self._spent.pop((chunk.id, index), None)

    def forget_all(self) -> None:
        """All gradients are dropped."""
        self._seen.clear()
        self._spent.clear()
        self._shown_ids.clear()
        self._spent_ids.clear()

    def is_shown(self, chunk_id: int) -> bool:
        """Whether users may see what becomes of a gradient of the chunk. The same on every rank."""
        return chunk_id in self._shown_ids

    @torch.no_grad()
    def zero(self, chunk: Chunk, index: int) -> None:
        """The gradient becomes zeros, if there is one, or was at the last step."""
        key = (chunk.id, index)
        value = self._seen.get(key, self._spent.pop(key, None))
        if value is not None:
            self._seen[key] = value.zero_()
        if chunk.id in self._spent_ids:
            self._shown_ids.add(chunk.id)

    @torch.no_grad()
    def zero_all(self) -> None:
        """As `zero`, of all parameters."""
        self._seen = {**self._spent, **self._seen}
        self._shown_ids |= self._spent_ids
        self._spent.clear()
        for value in self._seen.values():
            value.zero_()

    def begin_backward(self) -> None:
        """More is going to be added. To be called after `absorb`."""
        self._let_go()
        self._spent.clear()
        self._spent_ids.clear()

    @property
    def keys(self) -> list[tuple[int, int]]:
        """Of what was handed out or set on this rank and may be in use: chunk id, member index."""
        return list(self._seen)

    @torch.no_grad()
    def refresh(self, held: Iterable[tuple[int, int]]) -> None:
        """More has been added: what users hold shows it. Collective.

        Args:
            held: What any rank holds.
        """
        for chunk_id, index in sorted(set(held)):
            whole = self._gather(self._engine.chunks[chunk_id], index)
            if (chunk_id, index) in self._seen:
                self._seen[chunk_id, index].copy_(whole)

    @torch.no_grad()
    def retire(self, others: Collection[tuple[int, int]] = ()) -> None:
        """The gradients were dropped, by a step or a backward that failed; of what users hold `zero_grad` may make
        `.grad` again.

        Args:
            others: Parameters of other optimizers, whose gradients stay: chunk id, member index.
        """
        self._let_go()
        zeros = self._engine.reducer.zeros
        kept = {key for key in self._seen if key in others or key in zeros}
        self._spent = {key: value for key, value in self._seen.items() if key not in kept}
        self._seen = {key: v if key in others else v.zero_() for key, v in self._seen.items() if key in kept}
        self._spent_ids = self._shown_ids
        ids = {chunk_id for chunk_id, _ in others}
        self._shown_ids = {i for i in self._shown_ids if i in ids or zeros.may_be_in(i)}

    @torch.no_grad()
    def absorb(self) -> None:
        """Bring what users have written to the gradient shards, and what they have dropped as far as it would be read:
        a step reads nothing but what has a gradient. So what several optimizers have in one chunk is dropped as a whole
        when the last of them has stepped."""
        reducer = self._engine.reducer
        reducer.carry_out_drops(reducer.zeros.chunk_ids)
        for key in list(self._seen):
            self._absorb(*key)

    @torch.no_grad()
    def follow(self, change: Change, is_of: Callable[[int, int], bool]) -> None:
        """Gradients are changed in the step from now on: what users hold shows it. To be called after `absorb`.

        Args:
            is_of: Whether the change is of the gradient of a member, by chunk id and index.
        """
        self._let_go()
        for key, value in self._seen.items():
            if is_of(*key):
                change(value)
                self._show_own(*key, value)

    def _check_not_begun(self, chunk: Chunk, index: int) -> None:
        if self._engine.reducer.has_begun(chunk.id):
            raise StateError(
                f"the gradient of {chunk.spec.members[index].fqn} is gone: its update has begun inside backward, where "
                "nothing was known that looks at gradients. Look at them in on_after_backward or "
                "on_before_optimizer_step, for which updates wait, or use update_timing='behind_forward'"
            )

    def _shown(self, chunk: Chunk, index: int, part: Tensor) -> Tensor:
        """Part of a gradient shard as users see it; 1-D, compute dtype, perhaps `part` itself."""
        change = self._engine.steps.change_of_gradient(chunk.id, index)
        if change is None:
            return part.to(chunk.dtype)
        wide = part.to(torch.promote_types(torch.float32, part.dtype), copy=True)  # factors apply before rounding
        change(wide)
        return wide.to(chunk.dtype)

    def _show_own(self, chunk_id: int, index: int, value: Tensor) -> None:
        """Have this rank's part of a whole gradient be what its shard makes of it, which may have more bits than what
        was changed in the parameter's dtype: users have not written the difference."""
        engine, chunk = self._engine, self._engine.chunks[chunk_id]
        if chunk.dtype.itemsize >= 4:
            return
        own, grad = engine.groups.segment(chunk.spec, index), engine.store[chunk_id].read_grad()
        if own is not None and grad is not None:
            whole, flat = self._new_whole(chunk, index)
            flat.copy_(in_memory_order(chunk, index, value))
            flat[own.in_param].copy_(self._shown(chunk, index, grad[own.in_shard]))
            value.copy_(whole)

    def _new_whole(self, chunk: Chunk, index: int) -> tuple[Tensor, Tensor]:
        """Memory for a whole gradient, on the compute device: in the parameter's shape, and 1-D, as it lies there."""
        member, stride = chunk.spec.members[index], chunk.strides[index]
        device = self._engine.device.torch_device
        if stride is None:
            whole = torch.empty(member.shape, dtype=chunk.dtype, device=device)
        else:
            whole = torch.empty_strided(member.shape, stride, dtype=chunk.dtype, device=device)
        return whole, whole.as_strided((member.numel,), (1,))

    @torch.no_grad()
    def _gather(self, chunk: Chunk, index: int) -> Tensor:
        """The whole gradient. Collective."""
        engine = self._engine
        with engine.telling():
            engine.reducer.landing.wait(chunk.id)
            grad = engine.store[chunk.id].read_grad()
        whole, flat = self._new_whole(chunk, index)
        comm = engine.groups.of(chunk.spec)
        of_ranks = [segment_of(chunk.spec, index, rank, comm.world_size) for rank in range(comm.world_size)]
        own = of_ranks[comm.rank]
        if comm.world_size == 1:
            if own is not None and grad is not None:
                flat.copy_(self._shown(chunk, index, grad[own.in_shard]))
            else:
                flat.zero_()
            return whole
        sent = torch.zeros(max(s.numel if s is not None else 0 for s in of_ranks), dtype=chunk.dtype, device="cpu")
        if own is not None and grad is not None:
            sent[: own.numel].copy_(self._shown(chunk, index, grad[own.in_shard]))
        for segment, row in zip(of_ranks, comm.gather_host(sent, on_all_ranks=True) or (), strict=True):
            if segment is not None:
                flat[segment.in_param].copy_(row[: segment.numel])
        return whole

    def _absorb(self, chunk_id: int, index: int) -> None:
        engine, chunk = self._engine, self._engine.chunks[chunk_id]
        value, store = self._seen[chunk_id, index], self._engine.store
        engine.reducer.landing.wait(chunk_id)
        grad = store[chunk_id].read_grad()
        flat = in_memory_order(chunk, index, value)
        key = (chunk_id, index)
        is_new = grad is None and not engine.reducer.has_grad(*key)
        own = engine.groups.segment(chunk.spec, index)
        values = flat[own.in_param] if own is not None else flat[:0]
        changed = torch.ones_like(values, dtype=torch.bool)
        if own is not None and not is_new:
            shown = torch.zeros_like(values) if grad is None else self._shown(chunk, index, grad[own.in_shard])
            values, bits = values.to(shown.device), BITS[values.dtype.itemsize]
            changed = values.view(bits) != shown.view(bits)
        is_written = bool(changed.any())
        if is_written or is_new:
            if is_written and engine.steps.change_of_gradient(chunk_id, index) is not None:
                engine.steps.apply_gradient_changes(chunk_id, index)

            def write(shard: Tensor) -> None:
                if own is not None:
                    part = shard[own.in_shard]
                    part.copy_(torch.where(changed.to(part.device), values.to(part), part))

            engine.reducer.rewrite(chunk, write)
        if is_written or is_new or key not in engine.reducer.zeros:
            engine.reducer.used.add(key)

    def _let_go(self) -> None:
        """Drop what is referred to from nowhere else any more; it has been absorbed."""
        for key in self._unheld_keys():
            del self._seen[key]

    def _unheld_keys(self) -> list[tuple[int, int]]:
        return [key for key in self._seen if _holders(self._seen, key) == self._unheld]


def _holders(seen: dict[tuple[int, int], Tensor], key: tuple[int, int]) -> tuple[int, int]:
    """How often a tensor is referred to, and how many tensors and handles share its storage; with our own."""
    return sys.getrefcount(seen[key]), storage_use_count(seen[key].untyped_storage())

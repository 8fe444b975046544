"""What a step begins with and leaves behind: gradients that it takes, replicas of old values that go.

Several optimizers may be attached to one engine, each over its own parameters. A step drops the
gradients of its optimizer, and those of parameters that are in none; others' stay, also in chunks that both have
parameters in. There the new values of a step may lie over its own gradients (never in memory that changes roles with
the parameters', see `is_shared`), so these are marked as dropped, and become zeros before they are read or added to
again, if other gradients in the chunk have not been dropped by then too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from lightning_elixir.errors import DivergenceError, StateError
from lightning_elixir.plan.types import AccessTrace, Plan
from lightning_elixir.runtime.agreement import Meeting
from lightning_elixir.runtime.attached import AttachedOptimizer, AttachedOptimizers, PendingChanges
from lightning_elixir.runtime.chunk import Chunk, ChunkState
from lightning_elixir.runtime.chunk_optimizers import hand_over
from lightning_elixir.runtime.gradients import Change

if TYPE_CHECKING:
    from lightning_elixir.runtime.engine import Engine

Members = Mapping[int, Collection[int]]
"""Member indices by chunk id."""


class Steps:
    """The optimizers of one engine, and the gradients that wait for their steps.

    Args:
        engine: Has the shards.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.optimizers = AttachedOptimizers()
        """Those that are still there."""
        self.num_redone = 0
        """Since the last reset: see `Stats.redone_steps`."""
        self._num_attached = 0
        self._aliased_ids: list[int] = []  # on any rank, at the beginning of the step

    # Optimizers

    def attach(self, optimizer: AttachedOptimizer) -> None:
        """The optimizer's states move with the chunks from now on, for as long as they live."""
        optimizer.states.number = self._num_attached
        self._num_attached += 1
        self.optimizers.add(optimizer)
        self.hand_over_states()

    def hand_over_states(self, plan: Plan | None = None) -> None:
        """See `hand_over`; by default for the plan in force."""
        hand_over(self._engine.chunks, plan or self._engine.plan, self.optimizers.states)

    # The step

    def is_shared(self, chunk_id: int, members: Collection[int]) -> bool:
        """Whether other optimizers have parameters in a chunk. The same on every rank.

        Args:
            members: Those of one optimizer.
        """
        found = (states.members.get(chunk_id, set()) for states in self.optimizers.states)
        return any(not others <= set(members) for others in found)

    def begin(self, number: int) -> None:
        """Call before the optimizer updates shards. Collective.

        Args:
            number: Of the optimizer.

        Raises:
            DivergenceError: Another rank steps another optimizer.
        """
        engine = self._engine
        engine.prepare_meeting(Meeting.STEP)
        engine.interception.forget_state_dict()
        mine = self.aliased_ids
        row = [number, *mine]
        rows = engine.active.agreement.meet(Meeting.STEP, row) if engine.comm.world_size > 1 else [row]
        check_same_optimizer(Meeting.STEP, rows)
        self._aliased_ids = sorted({i for row in rows for i in row[1:]})

    @property
    def aliased_ids(self) -> list[int]:
        """Chunks of which user code on this rank keeps another tensor."""
        engine = self._engine
        there = [*engine.rcache.resident_ids, *(c.id for c in engine.chunks if c.spec.is_persistent)]
        return [i for i in there if engine.chunks[i].is_aliased()]

    def renew(self, updated: Members, aliased: Collection[int]) -> None:
        """The shards of `updated` hold new values, outside of a step: replicas made from the old ones go. Collective.

        Args:
            updated: The same on every rank.
            aliased: `aliased_ids` of all ranks.
        """
        self._aliased_ids = sorted(aliased)
        self._engine.interception.forget_versions()
        self._engine.interception.written.forget(updated)
        self._renew(updated)

    def note_end(self, *, is_redone: bool) -> None:
        """A step is over.

        Args:
            is_redone: Updates of it had begun inside backward, and were dropped.
        """
        self.num_redone += is_redone

    def reset_counters(self) -> None:
        self.num_redone = 0

    def end(self, updated: Members, used: Members, members: Members) -> None:
        """The shards of `updated` hold new values: replicas made from the old ones go, and so do all gradients.

        Args:
            updated: What has changed.
            used: What had a gradient, also where the step was skipped.
            members: All that the optimizer has.
        """
        engine = self._engine
        others = self._others(members)
        engine.iterations.end()
        engine.iterations.sampler.note_step()
        engine.forwards.leave_covered()
        engine.interception.forget_versions()  # what was computed before is checked when backward needs it
        engine.interception.written.forget(updated)
        self._renew(updated)
        engine.reducer.end_step(_keys_of(used), others)
        engine.gradients.retire(others)

    def _renew(self, updated: Members) -> None:
        engine = self._engine
        for chunk_id in sorted(updated):
            chunk = engine.chunks[chunk_id]
            chunk.note_written(updated[chunk_id])
            if chunk.spec.is_persistent:
                is_shared = engine.groups.of(chunk.spec).world_size > 1
                if engine.comm.world_size > 1 or chunk_id in self._aliased_ids:
                    engine.store.settle(chunk_id)
                    chunk.wait_ready()
                if is_shared:
                    chunk.to_state(ChunkState.STALE)
                    engine.active.fetcher.gather_in_place(chunk)
                continue
            if not engine.plan.is_storage_distributed and engine.groups.of(chunk.spec).world_size > 1:
                engine.store[chunk_id].is_param_outdated = True
            if chunk_id in self._aliased_ids:
                self._refresh(chunk)
            else:
                engine.active.residency.release((chunk_id,))

    def _refresh(self, chunk: Chunk) -> None:
        """On some rank, user code keeps a tensor over this replica's storage: it shall see the new values, and what is
        written through it shall not be lost. So the replica stays where it is aliased, and is filled again."""
        active = self._engine.active
        if chunk.is_usable and chunk.is_aliased():
            chunk.release()  # keeps the bytes
            active.residency.fetch(chunk.id)
            chunk.wait_ready()
        else:
            active.residency.release((chunk.id,))
            if active.fetcher.is_collective(chunk):
                active.fetcher.serve(chunk)

    def first_needs(self) -> dict[int, int]:
        """Chunk id -> its place in the order in which a forward needs the chunks, as far as that is known."""
        return self._engine.traces.get("train", AccessTrace(())).order_of_need

    # Gradients

    def drop_gradients(self, members: Members | None = None, *, to_zero: bool = False) -> None:
        """What `zero_grad` does. The same call on every rank.

        Args:
            members: Of one optimizer: those of others keep their gradients. None: all.
            to_zero: As with `set_to_none=False`: what has a gradient, or had one at the last step, has one of zeros.

        Raises:
            StateError: Updates have begun with these gradients.
        """
        engine = self._engine
        with engine.turn.call("zero_grad()"):
            engine.leave_stale()
            engine.leave_hooks()
            engine.check_whole()
            # Not by the gradients that there are: these may differ from rank to rank.
            if members is not None and self._others(members):
                engine.reducer.drop_uncollected()
                for chunk_id, index in sorted(_keys_of(members)):
                    self.drop_gradient(engine.chunks[chunk_id], index, to_zero=to_zero)
                return
            if to_zero:
                engine.reducer.zero(engine.gradients.keys)
                engine.gradients.zero_all()
            else:
                engine.gradients.forget_all()
                engine.reducer.clear()
            self._forget_changes()

    def drop_gradient(self, chunk: Chunk, index: int, *, to_zero: bool = False) -> None:
        """What `p.grad = None` does, and `zero_grad` to each parameter, in the turn of what calls it. The same call on
        every rank.

        Args:
            to_zero: See `drop_gradients`.
        """
        engine = self._engine
        if to_zero:
            engine.reducer.zero_member(chunk, index, is_set=(chunk.id, index) in engine.gradients.keys)
            engine.gradients.zero(chunk, index)
        else:
            engine.reducer.drop_member(chunk, index)
            engine.gradients.forget(chunk, index)
        if not engine.reducer.used:
            self._forget_changes()

    def used(self, members: Members | None = None) -> dict[int, set[int]]:
        """Members, by chunk id, that got a gradient on any rank since the last step. Collective.

        Args:
            members: Of one optimizer; None: all.

        Raises:
            StateError: A backward that failed has dropped a gradient of these.
        """
        engine = self._engine
        keys = [(c.id, i) for c in engine.chunks if c.spec.requires_grad for i in range(len(c.parameters))]
        lost = engine.reducer.lost
        marks = [2 if k in lost else int(engine.reducer.has_grad(*k)) for k in keys]
        of_ranks = torch.tensor(marks, dtype=torch.uint8, device="cpu")
        engine.comm.all_reduce_max(of_ranks)
        used: dict[int, set[int]] = {}
        for (chunk_id, index), mark in zip(keys, of_ranks.tolist(), strict=True):
            if members is not None and index not in members.get(chunk_id, ()):
                continue
            if mark == 2 and members is not None:
                raise StateError(
                    "a backward has failed when the gradients of earlier ones had been mixed with its own, and all of "
                    "them were dropped: call zero_grad() and begin again with the first micro-batch"
                )
            if mark == 1:
                used.setdefault(chunk_id, set()).add(index)
        return used

    def _others(self, members: Members) -> set[tuple[int, int]]:
        """What other optimizers have, but for `members`: chunk id, member index. The same on every rank."""
        if len(self.optimizers) < 2:
            return set()
        return set().union(*(_keys_of(states.members) for states in self.optimizers.states)) - _keys_of(members)

    def _forget_changes(self) -> None:
        for known in self.optimizers:
            known.gradients.forget()

    def follow_loss_scale(self, before: float, but: PendingChanges) -> None:
        """The loss scale has changed: gradients that wait for the step of another optimizer come with it now.

        Args:
            before: The scale.
            but: Of the optimizer that has stepped.
        """
        for known in self.optimizers:
            if known.gradients is not but and known.gradients.scaler is but.scaler:
                known.gradients.follow_scale(before)

    def finish_gradient_changes(self) -> None:
        """More gradients come: have optimizers do now what they have been told to do to those that there are."""
        for known in self.optimizers:
            known.gradients.finish()

    def change_of_gradient(self, chunk_id: int, index: int) -> Change | None:
        """What an optimizer has been told to do to the gradient of a member in its step, as far as users are to see it;
        None: nothing."""
        for known in self.optimizers:
            if (change := known.gradients.change_of(chunk_id, index)) is not None:
                return change
        return None

    def apply_gradient_changes(self, chunk_id: int, index: int) -> None:
        """Have the optimizer of a member do it now, to all its gradients."""
        for known in self.optimizers:
            if known.gradients.change_of(chunk_id, index) is not None:
                known.gradients.apply()


def check_same_optimizer(meeting: Meeting, rows: Sequence[Sequence[int]]) -> None:
    """Raises `DivergenceError` if the ranks have met for different optimizers.

    Args:
        rows: Of every rank, the number of the optimizer first.
    """
    if len({row[0] for row in rows}) > 1:
        where = ", ".join(f"rank {rank}: number {row[0]}" for rank, row in enumerate(rows))
        raise DivergenceError(
            f"{meeting.call.words} was called on different optimizers ({where}, in the order in which they were made): "
            "call it on the same one on every rank, in the same order"
        )


def _keys_of(members: Members) -> set[tuple[int, int]]:
    """Chunk id, member index of each."""
    return {(chunk_id, index) for chunk_id, indices in members.items() for index in indices}

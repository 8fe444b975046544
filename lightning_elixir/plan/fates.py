"""A step whose blocks keep, recompute or offload their activations, from one that keeps everything.

What a visit of a block (one call, and its backward) spares the device between the two is known from a dry run. From the
end of its forward on, or for what goes to host memory from the end of the next such block's (Note: activations in host
memory, `runtime/offloading.py`), until its backward, or that of the next such block, so much less is there. A block
that is recomputed has its forward once more before its backward: the same accesses, operators and peak, on top of what
is there then; where attention is kept, its results are not spared, and that forward does without computing them. Copies
begin at the end of a block, and come back when the backward of the next one begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from lightning_elixir.plan.activations import ActivationMoves, Fate, ModelBlock
from lightning_elixir.plan.profile import BlockVisit, MemoryProfile, ProfileInterval, altered

_SEEN = 1.4
"""How much longer the host takes to launch operators while it looks at each call (`runtime/kept_attention.py`), seen on
a CPU: 0.3 ms for a block whose forward takes 0.8 ms."""


def with_fates(profile: MemoryProfile, blocks: Sequence[ModelBlock]) -> MemoryProfile:
    """The same step with these fates of its blocks.

    Args:
        profile: Of a step that keeps everything, with the visits of its blocks.
        blocks: Those that are not named keep everything.

    Returns:
        A profile without visits: it is not of a step that keeps everything any more. `profile` itself where everything
        is kept, or its visits are not known.
    """
    fates = {block.name: block.fate for block in blocks}
    if not profile.visits:
        is_unknown = any(fate.is_offloaded for fate in fates.values())
        return profile if is_unknown else replace(profile, offloaded_bytes=0)
    changes = _Changes(profile, fates)
    timeline: list[ProfileInterval] = []
    for index, interval in enumerate(profile.timeline):
        dropped, held, spared = interval.dropped, changes.held.get(index, ()), changes.spared(index)
        for visit in changes.recomputed_before.get(index, ()):
            begin_bytes = visit.after_bytes - changes.spared_before(index)
            timeline += _recomputation(profile.timeline, visit, begin_bytes, fates[visit.name])
            dropped += _last_drops(profile.timeline, visit)
        timeline.append(
            altered(
                interval,
                dropped=dropped,
                activation_bytes=max(0, interval.activation_bytes - spared),
                total_bytes=max(0, interval.total_bytes - spared),
                num_ops=round(_SEEN * interval.num_ops) if index in changes.seen else interval.num_ops,
                moves=changes.moves.get(index, interval.moves),
                held=(*interval.held, *held) if held else interval.held,
            )
        )
    return replace(
        profile,
        timeline=tuple(timeline),
        activation_bytes=max(i.activation_bytes for i in timeline),
        peak_bytes=max(i.total_bytes for i in timeline),
        flops=sum(i.flops for i in timeline),
        visits=(),
        offloaded_bytes=changes.offloaded_bytes,
    )


class _Changes:
    """What the fates of blocks change, by interval of the timeline."""

    def __init__(self, profile: MemoryProfile, fates: Mapping[str, Fate]) -> None:
        self._timeline = profile.timeline
        # What is spared begins or ends at the half of an interval's number that is even, or just before it.
        self._spared = [0] * (2 * len(self._timeline) + 2)
        self.recomputed_before: dict[int, list[BlockVisit]] = {}
        """Visits by the first interval of their backward."""
        self.moves: dict[int, ActivationMoves] = {}
        self.seen: set[int] = set()
        """Intervals in which the host looks at each call, whether it is attention."""
        self.held: dict[int, tuple[str, ...]] = {}
        """Parameters that a recomputation has saved and its backward has still to use."""
        self.offloaded_bytes = 0
        """Host memory that all of them take together."""
        sent: list[tuple[BlockVisit, int]] = []
        for visit in profile.visits:
            fate = fates.get(visit.name, Fate.KEEP)
            if visit.backward[0] >= visit.backward[1]:
                continue
            if fate.is_recomputed:
                # Until the recomputation has begun, which is just before the backward.
                kept_bytes = 0
                if fate is Fate.KEEP_ATTENTION:
                    kept_bytes = sum(call.nbytes for call in visit.attention)
                    self.seen.update(range(*visit.forward))
                self._spare(visit.inner_bytes - kept_bytes, 2 * visit.forward[1], 2 * visit.backward[0])
                self.recomputed_before.setdefault(visit.backward[0], []).append(visit)
                self._hold(visit)
            if fate.is_offloaded:
                sent.append((visit, visit.offload_bytes if fate is Fate.OFFLOAD else visit.input_bytes))
        self._send(sent)
        self._spared = list(accumulate(self._spared))

    def _send(self, sent: Sequence[tuple[BlockVisit, int]]) -> None:
        self.offloaded_bytes = sum(nbytes for _, nbytes in sent)
        for at, (visit, nbytes) in enumerate(sent):
            self._move(visit.forward[1] - 1, ActivationMoves(out_bytes=nbytes))
            if at + 1 < len(sent):  # else it is on the device still when its backward begins
                after = sent[at + 1][0]
                self._spare(nbytes, 2 * after.forward[1], 2 * after.backward[0] - 1)
                self._move(after.backward[0], ActivationMoves(in_bytes=nbytes))
                self._move(visit.backward[0], ActivationMoves(is_awaited=True))

    def _spare(self, nbytes: int, first: int, end: int) -> None:
        if end > first:
            self._spared[first] += nbytes
            self._spared[end] -= nbytes

    def _move(self, index: int, moves: ActivationMoves) -> None:
        self.moves[index] = self.moves.get(index, ActivationMoves()) + moves

    def _hold(self, visit: BlockVisit) -> None:
        left = dict.fromkeys(fqn for i in self._timeline[slice(*visit.forward)] for fqn in i.fqns)
        for index in range(*visit.backward):
            self.held[index] = tuple(left)
            for fqn in self._timeline[index].fqns:
                left.pop(fqn, None)

    def spared(self, index: int) -> int:
        """Bytes that are not on the device in an interval."""
        return self._spared[2 * index]

    def spared_before(self, index: int) -> int:
        """Bytes that are not on the device just before it."""
        return self._spared[2 * index - 1]


def _last_drops(timeline: Sequence[ProfileInterval], visit: BlockVisit) -> tuple[tuple[str, ...], ...]:
    """Accesses of a visit's forward that are open when its recomputation ends."""
    later = timeline[visit.last_save.interval + 1 : visit.forward[1] + 1]
    # What begins later is not accessed again.
    begun = [interval.fqns for interval in later[:-1] if interval.is_pinned]
    ended = [one for interval in later for one in interval.dropped]
    for fqns in begun:
        if fqns in ended:
            ended.remove(fqns)
    return tuple(ended)


def _recomputation(
    timeline: Sequence[ProfileInterval], visit: BlockVisit, begin_bytes: int, fate: Fate
) -> Iterator[ProfileInterval]:
    """The forward of a visit once more.

    Args:
        timeline: Of a step that keeps everything.
        visit: Its forward is one or more intervals of it.
        begin_bytes: Activations when it begins, what the visit spares the device not counted.
        fate: Of the block.
    """
    keeps_attention = fate is Fate.KEEP_ATTENTION
    flops, there = dict[int, int](), dict[int, int]()
    for call in visit.attention if keeps_attention else ():
        flops[call.interval] = flops.get(call.interval, 0) + call.flops
        there[call.interval] = there.get(call.interval, 0) + call.nbytes
    held: dict[str, None] = {}
    last = visit.last_save
    for offset, interval in enumerate(timeline[visit.forward[0] : last.interval + 1]):
        index = visit.forward[0] + offset
        done = last if index == last.interval else interval
        activations = max(0, begin_bytes + done.activation_bytes - interval.workspace_bytes - visit.before_bytes)
        begin_bytes -= there.get(index, 0)  # what was counted when recomputation began is not made again
        yield altered(
            interval,
            dropped=() if offset == 0 else interval.dropped,
            is_backward=True,
            activation_bytes=activations,
            total_bytes=max(0, interval.total_bytes + activations - done.activation_bytes),
            flops=done.flops - flops.get(index, 0),
            moved_bytes=done.moved_bytes,
            num_ops=round(_SEEN * done.num_ops) if keeps_attention else done.num_ops,
            grads=(),
            held=(*interval.held, *held),
        )
        held |= dict.fromkeys(interval.fqns)

"""What one training step does, as the planner sees it: which parameters when, beside how much other memory.

Two levels. A `MemoryProfile` speaks of parameters by name and needs no chunks: it comes from a run on fake tensors. A
`StepProfile` speaks of chunk ids and seconds: it comes from a `MemoryProfile` and a chunk layout, or from a real step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, TypeVar

from lightning_elixir.plan.activations import NO_MOVES, ActivationMoves
from lightning_elixir.plan.hardware import HardwareSpec
from lightning_elixir.plan.packing import PackedChunk
from lightning_elixir.plan.types import AccessTrace, Acquire, Drop

_LATER_BATCHES = 0.05
_UNCERTAIN = 0.2
# Of what a step takes, and at most so much, by whether the allocator's segments grow.
_GAPS = {False: (0.4, 5 * 2**30), True: (0.25, 4 * 2**30)}


# How many times the least time of an operator the program takes for one, with what is around it: modules in Python,
# autograd, autocast, the engine's hooks. Seen on H100s and H200s, where the least is 7 us: 34 us each in a GPT of 1.4B.
# Compiled code takes the least.
_OPERATOR_LAUNCHES = 4.5

_T = TypeVar("_T")


def altered(one: _T, **fields: Any) -> _T:
    """As `dataclasses.replace` in a third of the time, for intervals, of which a search makes many. Of a dataclass
    without slots; names are not checked."""
    made: _T = object.__new__(type(one))
    vars(made).update(vars(one), **fields)
    return made


@dataclass(frozen=True)
class ProfileInterval:
    """From one access of parameters to the next."""

    fqns: tuple[str, ...]
    """Parameters needed from here on; empty for what happens before the first access."""
    is_pinned: bool
    """Needed until a later interval lists them as dropped (a module's forward); otherwise at this moment only."""
    dropped: tuple[tuple[str, ...], ...]
    """Pinned accesses, each by its `fqns`, that ended in the interval before this one, in that order."""
    module: str
    """Name of the module whose forward or backward runs; for people."""
    is_backward: bool
    """Backward, with what it recomputes."""
    activation_bytes: int
    """Peak of activations, buffers, inputs and temporaries. A parameter's gradient counts here until it is complete."""
    grad_bytes: int
    """Complete gradients at the end of the interval, where they stay, as plain PyTorch keeps them."""
    total_bytes: int
    """Peak of everything together: parameters, buffers, gradients, activations, workspaces."""
    flops: int
    """Floating-point operations of matrix products, convolutions and attention; a multiplication and an addition are
    two. Attention counts for as many as matrix products do in the time that it takes."""
    moved_bytes: int
    """Read and written by operators that count no `flops`."""
    num_ops: int
    """Operators that compute something (views do not)."""
    grads: tuple[str, ...]
    """Parameters whose gradient became complete in the interval."""
    workspace_bytes: int = 0
    """Of `activation_bytes`, workspaces of libraries, which stay once they are there."""
    moves: ActivationMoves = NO_MOVES
    held: tuple[str, ...] = ()
    """Parameters that cannot go when the interval begins, since another tensor over their storage is alive, as those
    that activation checkpointing recomputes with are until their backward."""
    is_compiled: bool = False
    """The operators are of compiled code."""


class Moment(NamedTuple):
    """A point of a timeline: an interval, and what has been done in it. As there."""

    interval: int
    flops: int
    moved_bytes: int
    num_ops: int
    activation_bytes: int


class AttentionCall(NamedTuple):
    """A call of fused attention whose results may stay where the rest is recomputed."""

    interval: int
    """Of the timeline."""
    flops: int
    nbytes: int
    """Of its results."""


@dataclass(frozen=True)
class BlockVisit:
    """One call of a block in a step that keeps everything, and its backward."""

    name: str
    """Of the block."""
    forward: tuple[int, int]
    """Intervals of the timeline: the first one, and the one after the last."""
    backward: tuple[int, int]
    """Likewise, from the first saved tensor that is read to the first of another block; empty without a backward."""
    last_save: Moment
    """In the forward: recomputing goes no further."""
    before_bytes: int
    """Activations when the forward begins, without workspaces."""
    after_bytes: int
    """Activations when the backward begins."""
    inner_bytes: int
    """Saved, made by the block and not given by it: what recomputing spares the device."""
    input_bytes: int
    """The block's inputs, as far as they could go to host memory, and no visit before this one has had them."""
    offload_bytes: int
    """Saved, as far as that could go to host memory, and no visit before this one has saved it."""
    attention: tuple[AttentionCall, ...] = ()
    """In its forward."""


@dataclass(frozen=True)
class MemoryProfile:
    """One training step without an optimizer, as plain PyTorch would run it on one device."""

    dtype: str
    """Dtype of the parameters, that of most elements if they differ."""
    param_bytes: int
    buffer_bytes: int
    grad_bytes: int
    """All gradients together."""
    input_bytes: int
    activation_bytes: int
    """Peak of everything that is neither parameter nor gradient (buffers and inputs included)."""
    peak_bytes: int
    """Peak of everything together: what `torch.cuda.max_memory_allocated` would report."""
    peak_module: str
    """Where that is."""
    flops: int
    timeline: tuple[ProfileInterval, ...]
    visits: tuple[BlockVisit, ...] = ()
    """Calls of the blocks that were asked for, in order; while the timeline is of a step that keeps everything."""
    offloaded_bytes: int | None = None
    """Host memory that activations take; None: it is not known which of them go there."""
    written: tuple[str, ...] = ()
    """Parameters that the step writes to."""

    def with_bytes(self, changed: Callable[[int], int]) -> MemoryProfile:
        """The same with other activations.

        Args:
            changed: From the bytes of an interval to others.
        """
        timeline = (
            replace(
                i,
                activation_bytes=changed(i.activation_bytes),
                total_bytes=i.total_bytes + changed(i.activation_bytes) - i.activation_bytes,
            )
            for i in self.timeline
        )
        return replace(self, timeline=tuple(timeline))

    def of_last_iteration(self) -> MemoryProfile:
        """Where forward and backward came several times: the same from the forward of the last backward to its end,
        with as much memory at its highest moment as any of them took. As it is where they came once."""
        timeline = self.timeline
        end = max((i + 1 for i, interval in enumerate(timeline) if interval.is_backward), default=0)
        start = end
        while start and timeline[start - 1].is_backward:
            start -= 1
        while start and not timeline[start - 1].is_backward:
            start -= 1
        if not start:
            return self
        # What began before is not part of it; what ends with its backward, the next interval tells.
        kept = (replace(timeline[start], dropped=()), *timeline[start + 1 : end])
        if end < len(timeline):
            idle = replace(kept[-1], fqns=(), is_pinned=False, flops=0, moved_bytes=0, num_ops=0, grads=())
            kept += (replace(idle, dropped=timeline[end].dropped),)
        last = replace(self, timeline=kept, flops=sum(i.flops for i in kept), visits=self._visits_from(start, end))
        peak = max(i.activation_bytes for i in kept)
        return last.with_bytes(lambda nbytes: round(nbytes * self.activation_bytes / peak) if peak else nbytes)

    def _visits_from(self, start: int, end: int) -> tuple[BlockVisit, ...]:
        """Those of a part of the timeline, as visits of a timeline that begins there."""

        def moved(visit: BlockVisit) -> BlockVisit:
            (first, after), (begin, over) = visit.forward, visit.backward
            return replace(
                visit,
                forward=(first - start, after - start),
                backward=(begin - start, min(over, end) - start) if start <= begin < end else (0, 0),
                last_save=visit.last_save._replace(interval=visit.last_save.interval - start),
                attention=tuple(call._replace(interval=call.interval - start) for call in visit.attention),
            )

        return tuple(moved(visit) for visit in self.visits if start <= visit.forward[0] and visit.forward[1] <= end)


@dataclass(frozen=True)
class StepInterval:
    """From one acquire of a trace to the next."""

    compute_s: float
    """Device time of the operators in it; waiting for chunks is not part of it."""
    non_model_bytes: int
    """Peak of device memory beside chunks, shards and gradient blocks."""
    grads: tuple[int, ...] = ()
    """Chunks whose gradients became complete in it."""
    is_backward: bool | None = None
    """Backward, with what it recomputes; None: not known. For people."""
    moves: ActivationMoves = NO_MOVES
    arrivals: tuple[int, ...] = ()
    """Chunks in the order in which their first and their last gradient comes, each once for either; a third time where
    more come after all that were expected, as of experts that had no token in the step before: these wait until
    backward ends. None: those of `grads` get all of theirs in it, one after the other."""
    grad_s: tuple[float, ...] = ()
    """How much of `compute_s` has gone by when each of `grads` becomes complete, ascending; none: not known."""

    @property
    def until_grads_s(self) -> tuple[float, ...]:
        """As `grad_s`; where that is not known, evenly over the interval, as in the backward of a layer whose weights
        checkpointing has kept, so that none is fetched again."""
        count = len(self.grads)
        return self.grad_s or tuple(self.compute_s * (n / count) for n in range(1, count + 1))

    def grad_s_before(self, other: StepInterval) -> tuple[float, ...]:
        """`grad_s` of this interval and the one after it in one."""
        if not (self.grad_s or other.grad_s):
            return ()
        return self.until_grads_s + tuple(self.compute_s + seconds for seconds in other.until_grads_s)


class Course(NamedTuple):
    """What a step does to the device's memory beside chunks, shards and blocks."""

    moments: tuple[tuple[tuple[int, ...], int], ...] = ()
    """(chunks that get their first gradient, most bytes in use until others do), in order."""
    arrivals: tuple[int, ...] = ()
    """As in `StepInterval`, of the whole step."""


@dataclass(frozen=True)
class Margin:
    """What was added to bytes beside the chunks."""

    part: float = 0.0
    fixed_bytes: int = 0

    def without(self, nbytes: int) -> int:
        """What so many bytes were before."""
        return max(0, int((nbytes - self.fixed_bytes) / (1 + self.part)))


def first_gradients(arrivals: Iterable[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """Of each interval, the chunks that get their first gradient in it.

    Args:
        arrivals: As in `StepInterval`, of each.
    """
    known = set[int]()
    for of_interval in arrivals:
        yield tuple(i for i in dict.fromkeys(of_interval) if i not in known)
        known.update(of_interval)


@dataclass(frozen=True)
class StepProfile:
    """One forward and backward over chunks."""

    trace: AccessTrace
    intervals: tuple[StepInterval, ...]
    """[0] before the first `Acquire` of the trace, [i] after the i-th one."""
    offloaded_bytes: int | None = None
    """Host memory that activations take; None: not known."""
    margin: Margin = Margin()
    """What the intervals' bytes have in them beside those of tensors."""
    program_s: float = 0.0
    """Seconds between backward and the next forward, beside updates there: the device waits for the program."""
    is_alone: bool = False
    """Times are of computing with nothing beside it, as those of a dry run: collectives make them longer. Those of a
    real step have that in them."""

    @property
    def peak_non_model_bytes(self) -> int:
        return max((i.non_model_bytes for i in self.intervals), default=0)

    @property
    def is_recomputing(self) -> bool:
        """Whether forwards run again in backward, as activation checkpointing has them do; False where that is not
        known."""
        acquires = (event for event in self.trace.events if isinstance(event, Acquire))
        return any(a.is_pinned and i.is_backward for a, i in zip(acquires, self.intervals[1:], strict=False))

    @cached_property
    def compute_s(self) -> float:
        return sum(i.compute_s for i in self.intervals)

    @cached_property
    def course(self) -> Course:
        """What it takes when."""
        moments: list[tuple[tuple[int, ...], int]] = [((), 0)]
        arrivals = [i.arrivals or tuple(chunk for chunk in i.grads for _ in range(2)) for i in self.intervals]
        for interval, begun in zip(self.intervals, first_gradients(arrivals), strict=True):
            if begun:
                moments.append((begun, interval.non_model_bytes))
            elif interval.non_model_bytes > moments[-1][1]:
                moments[-1] = (moments[-1][0], interval.non_model_bytes)
        return Course(tuple(moments), tuple(chain.from_iterable(arrivals)))

    def of_first_chunks(self, count: int) -> StepProfile:
        """The same without what is done with chunks beyond so many."""
        of_others = any(chunk >= count for event in self.trace.events for chunk in event.ids)
        if not of_others and all(chunk < count for i in self.intervals for chunk in (*i.grads, *i.arrivals)):
            return self
        # An access of such chunks alone stays, as one of none: there is an interval after each.
        events = tuple(replace(e, ids=tuple(chunk for chunk in e.ids if chunk < count)) for e in self.trace.events)

        def kept(ids: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(chunk for chunk in ids if chunk < count)

        intervals = tuple(
            replace(
                i,
                grads=kept(i.grads),
                arrivals=kept(i.arrivals),
                grad_s=tuple(seconds for chunk, seconds in zip(i.grads, i.grad_s, strict=False) if chunk < count),
            )
            for i in self.intervals
        )
        return replace(self, trace=AccessTrace(events), intervals=intervals)

    def with_margin(
        self, block_bytes: int, *, is_certain: bool = True, has_growing_segments: bool = True
    ) -> StepProfile:
        """The same with what the device's allocator cannot use, and what later batches may take more.

        Segments that keep their sizes, seen on an H200 with three quarters of the memory full of states: gradients come
        to lie in the gaps of a layer's working memory, which then is obtained once more: 0.3 to 0.8 GiB beside
        activations of 1.5 to 2.8 GiB, 4.1 to 4.7 GiB beside 15 GiB, with and without this package; 1.9 GiB were too
        little beside 5.2 GiB.

        Segments that grow, seen on another one, its limit lowered from step to step: memory ran out with 0.05 to 0.2
        GiB in gaps, at most 0.4 GiB above what a plan counts as allocated, beside 2 to 14 GiB of activations. But with
        less than 1, 2 and 3.5 GiB above that (beside 2, 6 and 12 GiB) the allocator gives memory back and obtains it
        again in each step, which takes 2 to 5% of it, more than states in that memory are worth.

        And two blocks are left for chunks that hold on a little longer.

        Args:
            block_bytes: Bytes of an rCache block.
            has_growing_segments: See `Budget`.
            is_certain: False: this was never seen, or differs from step to step, and a step that takes more cannot be
                repeated, as with several ranks.
        """
        peak = self.peak_non_model_bytes
        if not peak:
            return self  # nothing is measured
        share, most = _GAPS[has_growing_segments]
        extra = min(int(peak * share), most) + 2 * block_bytes
        part = _LATER_BATCHES if is_certain else _UNCERTAIN
        wider = self.with_bytes(lambda nbytes: nbytes + int(nbytes * part) + extra)
        return replace(wider, margin=Margin(part, extra))

    def with_bytes(self, changed: Callable[[int], int]) -> StepProfile:
        """The same with other bytes beside the chunks.

        Args:
            changed: From those of an interval to others.
        """
        intervals = [altered(i, non_model_bytes=changed(i.non_model_bytes)) for i in self.intervals]
        return replace(self, intervals=tuple(intervals))


def step_profile(profile: MemoryProfile, packed: Sequence[PackedChunk], hardware: HardwareSpec) -> StepProfile:
    """The profile of a step over these chunks, with times estimated from operations and bytes (matrix products
    at their rate, everything else at the memory's), or from the program's time where that is longer in all.

    Args:
        profile: By parameter name.
        packed: The chunks; positions are ids. Parameters that they do not hold are left out.
        hardware: Its `matmul_flops_per_s`, `device_bytes_per_s` and `launch_s` are used.
    """
    chunk_of = {m.fqn: i for i, chunk in enumerate(packed) for m in chunk.members}
    known: dict[tuple[str, ...], tuple[int, ...]] = {}

    def ids_of(fqns: tuple[str, ...]) -> tuple[int, ...]:
        ids = known.get(fqns)
        if ids is None:
            ids = known[fqns] = tuple(dict.fromkeys(chunk_of[fqn] for fqn in fqns if fqn in chunk_of))
        return ids

    rate = hardware.matmul_flops_per_s.get(profile.dtype, 0.0) or max(hardware.matmul_flops_per_s.values(), default=0.0)
    waiting = {i: len(c.members) for i, c in enumerate(packed) if c.requires_grad}
    events: list[Acquire | Drop] = []
    intervals: list[StepInterval] = []
    for item, compute_s in zip(profile.timeline, _seconds_of(profile.timeline, rate, hardware), strict=True):
        for fqns in item.dropped:
            ids = ids_of(fqns)
            if ids:
                events.append(Drop(ids))
        arrivals, finished = [], []
        for fqn in item.grads:
            chunk_id = chunk_of.get(fqn)
            if chunk_id is not None and chunk_id in waiting:
                if waiting[chunk_id] == len(packed[chunk_id].members):
                    arrivals.append(chunk_id)
                waiting[chunk_id] -= 1
                if waiting[chunk_id] == 0:
                    arrivals.append(chunk_id)
                    finished.append(chunk_id)
        ids = ids_of(item.fqns)
        moves = item.moves if item.moves else NO_MOVES  # the one, also where the profile comes from another process
        # Compiled code gives all of its gradients when it ends.
        grad_s = (compute_s,) * len(finished) if item.is_compiled and len(finished) > 1 else ()
        interval = StepInterval(
            compute_s, item.activation_bytes, tuple(finished), item.is_backward, moves, tuple(arrivals), grad_s
        )
        if ids:
            events.append(Acquire(ids, item.is_pinned, ids_of(item.held)))
            intervals.append(interval)
        elif intervals:
            intervals[-1] = _joined(intervals[-1], interval)
        if not intervals:
            intervals.append(interval)
        elif ids and len(intervals) == 1:
            intervals.insert(0, StepInterval(0.0, 0))
    # A chunk with parameters that nothing uses is complete at the end of backward.
    late = tuple(i for i, left in waiting.items() if 0 < left < len(packed[i].members))
    if late and intervals:
        last = intervals[-1]
        grad_s = last.grad_s and last.grad_s + (last.compute_s,) * len(late)
        intervals[-1] = replace(last, grads=last.grads + late, arrivals=last.arrivals + late, grad_s=grad_s)
    return StepProfile(AccessTrace(tuple(events)), tuple(intervals), profile.offloaded_bytes, is_alone=True)


def _seconds_of(timeline: Sequence[ProfileInterval], matmul_rate: float, hardware: HardwareSpec) -> list[float]:
    """How long each interval has the device, or has it wait for the program. A program that needs less time for a step
    than the device gets ahead of it, step by step, and the device never waits; one that needs more is waited for, but
    for what the device does meanwhile."""
    device = [
        (item.flops / matmul_rate if matmul_rate else 0.0) + item.moved_bytes / hardware.device_bytes_per_s
        for item in timeline
    ]
    program = [item.num_ops * hardware.launch_s * (1 if item.is_compiled else _OPERATOR_LAUNCHES) for item in timeline]
    if sum(program) <= sum(device):
        return device
    seconds, device_s, program_s = [], 0.0, 0.0
    for on_device_s, in_program_s in zip(device, program, strict=True):
        program_s += in_program_s
        end_s = max(device_s + on_device_s, program_s)
        seconds.append(end_s - device_s)
        device_s = end_s
    return seconds


def _joined(first: StepInterval, second: StepInterval) -> StepInterval:
    return StepInterval(
        first.compute_s + second.compute_s,
        max(first.non_model_bytes, second.non_model_bytes),
        first.grads + second.grads,
        first.is_backward,
        first.moves + second.moves,
        first.arrivals + second.arrivals,
        first.grad_s_before(second),
    )

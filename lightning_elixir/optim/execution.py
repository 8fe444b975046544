"""Carries out Adam updates, each where it belongs, all sites at the same time, while the program goes on.

[Note: updates under way] What the device keeps is updated on the compute stream, in its turn. Everything else is done
by threads: one kind runs the host's own updates, chunk after chunk (two threads, so that the next update is there when
one ends, although both may have to wait for the interpreter), another issues streamed ones. A chunk's update is one
`Task`: what needs the new values waits for that and for nothing else, so the order of the tasks matters: that in which
the next forward needs the chunks, from inside backward on. Results do not depend on any of this: an update reads and
writes its own chunk alone.

That order is the reverse of the one in which gradients land. So a thread that finds no gradient landed waits for the
one that comes next, and takes the most needed of what has landed then. (If each waited for the most needed one, all
would stand still for 0.2 s of a 1 s step: the host is at the step long before the device.)

A fetch waits for its own chunk's task: the replica is allocated and counted as resident at once, and whichever thread
ends the update starts the copy (`LateEvent`), so that what the rCache decides does not depend on how fast updates are.
Parameters that stay on the device while their states are on the host are waited for at their first access, so modules
have hooks then even where nothing is ever evicted. Their new values are sent up by a task of its own, because backward
reads the old ones until it ends: a thread that waited for that could update nothing meanwhile (seen: 0.4 s of a step).
Such a task only issues a copy, so whatever waits for it may carry it out. Collectives are never issued by a thread: a
fetch that needs peers waits for the update on the host.

New 16-bit values are written over the gradients, element by element, and at the step the two buffers change roles:
backward may fetch a chunk whose update has begun and reads the old values, and the update touches two bytes a parameter
less. Where gradients are not of the parameters' dtype (several micro-batches, `reduce_dtype`), or not all of a chunk's
parameters are updated, values go to the compute shard directly, in the step. With `Plan.grad_reuses_compute_shard`
gradients land in the compute shard itself (14 bytes a parameter on the host instead of 16), and parameters that are
read before the step are the master, cast: the same bits. Chunks without a master are updated in the step.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from lightning_elixir.core.device import Device, Event, working_on
from lightning_elixir.core.labels import label
from lightning_elixir.core.staging import Uploads
from lightning_elixir.core.worker import Task, Work, Worker
from lightning_elixir.kernels import cpu
from lightning_elixir.optim.adam import load_adam
from lightning_elixir.optim.scaling import load_square_sums
from lightning_elixir.optim.streaming import StateStream
from lightning_elixir.optim.updates import FlatUpdate, StatesOnDisk
from lightning_elixir.storage.nvme import Visit, when_all_over

log = logging.getLogger(__name__)

# Bounds temporary memory on the device, and for changed gradients everywhere.
_DEVICE_PIECE_NUMEL = _CHANGED_NUMEL = 16 * 1024 * 1024

# Elements that are updated by the host before they are sent to the device, while the next ones are.
_STAGED_NUMEL = 16 * 1024 * 1024

# Streamed chunks whose last pieces are under way when the next one is issued.
_STREAMED_IN_FLIGHT = 4


@dataclass(frozen=True)
class UpdateTimes:
    """What the update of one step did and took on this rank, by the host's clock; nothing is waited for to measure."""

    update_s: float
    """From `step` until the last result was there. Of updates where the device keeps the states, only the launches."""
    host_update_s: float
    """The host's own arithmetic: how long at least one of its threads was at it."""
    gpu_numel: int
    """Parameters updated on the device, where their states live."""
    streamed_numel: int
    """Parameters updated on the device, whose states live on the host."""
    cpu_numel: int
    """Parameters updated by the host."""


class UpdateRecord:
    """What the updates of one step, or some of them, have come to; the step begins when it is made."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self._end_s = self._start_s
        self._adam_s: list[tuple[float, float]] = []  # begin, end
        self._adopted: list[UpdateRecord] = []
        self._tasks: list[Task] = []
        self.gpu_numel = self.streamed_numel = self.cpu_numel = 0

    def note_adam(self, begin_s: float, end_s: float) -> None:
        """The host has updated from one moment of `time.perf_counter` to another."""
        self._adam_s.append((begin_s, end_s))

    def adopt(self, other: UpdateRecord) -> None:
        """What another record has of updates that turn out to be this step's."""
        self.gpu_numel += other.gpu_numel
        self.streamed_numel += other.streamed_numel
        self.cpu_numel += other.cpu_numel
        self._adopted.append(other)
        self._tasks += other._tasks

    def watch(self, task: Task) -> None:
        """One of the updates."""
        self._tasks.append(task)

    def note_end(self) -> None:
        """Something of it that is no task is over."""
        self._end_s = max(self._end_s, time.perf_counter())

    def wait(self) -> None:
        """Make the host wait for all updates.

        Raises:
            BaseException: What the first of those that failed raised; the others are over all the same.
        """
        errors = []
        for task in self._tasks:
            try:
                task.wait()
            except BaseException as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def times(self) -> UpdateTimes | None:
        """None while any update is under way."""
        if not all(task.is_over() for task in self._tasks):
            return None
        return UpdateTimes(
            update_s=max([self._end_s, *(task.over_s for task in self._tasks)]) - self._start_s,
            host_update_s=_covered_s(span for record in (self, *self._adopted) for span in record._adam_s),
            gpu_numel=self.gpu_numel,
            streamed_numel=self.streamed_numel,
            cpu_numel=self.cpu_numel,
        )


@dataclass(frozen=True)
class ChunkUpdate:
    """All updates of one chunk whose states are in host memory, or on a disk."""

    updates: Sequence[FlatUpdate]
    is_streamed: bool = False
    """The device does it; otherwise the host."""
    ready: tuple[Event, ...] = ()
    """Moments to wait for first: gradients are there, and what will be written is not read any more."""
    may_write: Event | None = None
    """When the compute stream has stopped reading what the update, or an upload, writes on the device."""
    uploads: Sequence[tuple[Tensor, Tensor]] = ()
    """Host tensors with new values and where on the device they go, 1-D, of one dtype; after the update, which does not
    wait for `may_write` then."""
    cast: tuple[Tensor, Tensor] | None = None
    """A host tensor and one of another dtype that receives its values, 1-D, of one numel; after the update."""
    on_disk: StatesOnDisk | None = None
    """The updates are described over what is there; they begin when it has come to host memory, and are over before it
    is back."""


def _tried(load: Callable[[], None]) -> None:
    try:
        load()
    except Exception:  # the first step tries again
        log.debug("could not load kernels ahead", exc_info=True)


class UpdateRunner:
    """Carries out `FlatUpdate`s on the compute device, through it, and on the host.

    Args:
        device: The compute device.
        num_threads: Of the host's own updates; None: as `core.threads.default_num_threads` says.
    """

    def __init__(self, device: Device, num_threads: int | None = None) -> None:
        self._device = device
        self._num_threads = num_threads
        self._lane = device.new_lane()  # of new values on their way to the device
        self._uploads = Uploads(device, self._lane)
        self._staging = threading.Lock()
        self._stream = StateStream(device)
        context = partial(working_on, device.torch_device)
        self._host = Worker("elixir-update", num_threads=2, context=context)
        self._streamer = Worker("elixir-stream", context=context, most_in_flight=_STREAMED_IN_FLIGHT)

    def held_bytes(self) -> dict[str, int]:
        """Device memory held now, by the engine's kinds."""
        return self._stream.held_bytes()

    def load_kernels(self, dtypes: Sequence[torch.dtype]) -> None:
        """Have threads compile or load what updates run: seconds, in a process's first step otherwise.

        Args:
            dtypes: Of a parameter, its gradient, both moments and, where there is one, the copy in the compute dtype.
        """
        self._host.submit(cpu.prepare)
        self._load(partial(load_adam, dtypes=dtypes))

    def load_norms(self, dtypes: Iterable[torch.dtype]) -> None:
        """As `load_kernels`, what the norm of gradients of these dtypes runs."""
        for dtype in dtypes:
            self._load(partial(load_square_sums, dtype=dtype))

    def _load(self, load: Callable[[torch.device], None]) -> None:
        """Have a thread load code, if the device has any."""
        if self._device.torch_device.type == "cuda":
            self._streamer.submit(partial(_tried, partial(load, self._device.torch_device)))

    def reserve_stream(self) -> None:
        """Take the device memory that streamed updates need; it stays until `release_stream`.

        Raises:
            CapacityError: If it is not there.
        """
        self._stream.reserve()

    def release_stream(self) -> None:
        """Give it back, when all streamed updates are over."""
        self._streamer.wait()
        self._stream.release()

    @torch.no_grad()
    def run(
        self, on_device: Sequence[FlatUpdate], streamed: Sequence[FlatUpdate], on_host: Sequence[FlatUpdate]
    ) -> UpdateTimes:
        """Carry out all updates; host memory holds the results when this returns.

        Args:
            on_device: Their states are on the compute device.
            streamed: Their states are in host memory, and go up to the device for the update.
            on_host: Their states are in host memory, and stay there.

        Raises:
            CapacityError: If the device has no memory for streaming; no update has begun then.
        """
        record = UpdateRecord()
        now = self._device.compute_event()
        if streamed:
            self.reserve_stream()
        try:
            for updates, is_streamed in ((streamed, True), (on_host, False)):
                for update in updates:
                    self.submit(ChunkUpdate([update], is_streamed, may_write=now), record)
            self.run_on_device(on_device, record)
            record.wait()
        finally:
            if streamed:
                self.release_stream()
        self._device.compute_event().synchronize()
        record.note_end()
        times = record.times()
        if times is None:
            raise RuntimeError("updates that were waited for are not over")
        return times

    @torch.no_grad()
    def run_on_device(self, updates: Iterable[FlatUpdate], record: UpdateRecord) -> bool:
        """Give the compute stream updates of what is on the device.

        Returns:
            Whether new values are on their way to host memory.
        """
        has_gone_down = False
        for update in updates:
            record.gpu_numel += update.used_numel
            has_gone_down |= self._run_on_device(update)
        record.note_end()
        return has_gone_down

    def submit(self, job: ChunkUpdate, record: UpdateRecord, *, order: float = 0.0, after: Task | None = None) -> Task:
        """Have one chunk updated, and its new values sent up; memory for streaming must have been reserved. To be
        called with signals deferred, as it is in steps and at gradients.

        Args:
            job: What to do.
            record: Learns of it.
            order: The lowest goes first, among the host's updates and among streamed ones.
            after: A task of the same kind to come first.

        Returns:
            What is over when the chunk's new values are where they shall be.
        """
        numel = sum(update.used_numel for update in job.updates)
        if job.is_streamed:
            record.streamed_numel += numel
        else:
            record.cpu_numel += numel
        worker = self._streamer if job.is_streamed else self._host
        event = _All(job.ready) if job.ready else None
        task = after
        if job.on_disk is not None:
            task = self._submit_visits(job, job.on_disk, record, order, after, event)
            record.watch(task)
        elif job.updates or job.cast is not None or task is None:
            work = partial(self._stream_up if job.is_streamed else self._update_on_host, job, record)
            task = worker.submit(work, order=order, after=after, event=event)
            record.watch(task)
        if job.uploads:
            # A task of its own: it waits for the end of backward, and the threads go on with other updates until then.
            send = partial(self._send_up, job.uploads)
            task = worker.submit(send, order=order, after=task, event=job.may_write, is_brief=True)
            record.watch(task)
        return task

    def _submit_visits(
        self,
        job: ChunkUpdate,
        on_disk: StatesOnDisk,
        record: UpdateRecord,
        order: float,
        after: Task | None,
        event: Event | None,
    ) -> Task:
        """One task for each piece of the states, and one that is over after all of them. With signals deferred: a task
        that was held and is not noted would never be released."""
        has_landed = partial(_has_come, event)
        pieces: list[tuple[Task, Visit]] = []
        close: Work = partial(_close_visits, job, pieces)
        whole = self._host.submit(close, order=order, is_brief=job.cast is None, is_held=True)
        try:
            for piece, updates in on_disk.pieces(job.updates):
                visit = on_disk.begin(piece, order, has_landed=has_landed)
                work: Work = partial(self._update_visited, replace(job, updates=updates, cast=None), visit, record)
                pieces.append((self._submit_visit(work, visit, order, after, event), visit))
        except BaseException:
            whole.cancel()
            raise
        when_all_over([task for task, _ in pieces], whole.release)
        return whole

    def _submit_visit(self, work: Work, visit: Visit, order: float, after: Task | None, event: Event | None) -> Task:
        """The task is held until the states are there: a thread that waited for them could be the one that has to free
        the buffer which they wait for."""
        try:
            task = self._host.submit(work, order=order, after=after, event=event, is_held=True)
        except BaseException:
            visit.drop()
            raise
        task.then(visit.drop)  # where the update has ended it, this does nothing
        visit.then(task.release)
        return task

    def rest(self) -> None:
        """Finish what is under way and end the threads until there is more to do."""
        self._host.rest()
        self._streamer.rest()

    def close(self) -> None:
        """Finish what is under way and end the threads."""
        self._host.close()
        self._streamer.close()
        self._stream.release()

    # On the threads

    def _stream_up(self, job: ChunkUpdate, record: UpdateRecord) -> Event | None:
        end: Event | None = None
        with label("streamed update"):
            for update in job.updates:
                end = self._stream.issue(update, job.may_write)
        if job.cast is not None:
            if end is not None:
                end.synchronize()  # the new values are in host memory
            _cast(job.cast)
        return end

    def _update_on_host(self, job: ChunkUpdate, record: UpdateRecord) -> Event | None:
        end: Event | None = None
        with label("update on the host"):
            for update in job.updates:
                if update.compute is not None and update.is_compute_on_device:
                    end = self._update_staged(update, job.may_write, record)
                else:
                    self._run_timed(update, record)
        if job.cast is not None:
            _cast(job.cast)
        return end

    def _update_visited(self, job: ChunkUpdate, visit: Visit, record: UpdateRecord) -> Event | None:
        visit.wait()  # it has come, or has failed
        if job.on_disk is not None:
            job.on_disk.prepare(visit)
        updates = [update.over(visit) for update in job.updates]
        end = self._update_on_host(replace(job, updates=updates), record)
        visit.end()  # new values are in the compute dtype's memory already: nothing waits for this
        return end

    def _send_up(self, uploads: Sequence[tuple[Tensor, Tensor]]) -> Event:
        with self._lane.resume(), label("new values"):
            for source, target in uploads:
                target.copy_(source, non_blocking=True)
            return self._lane.record()

    def _update_staged(self, update: FlatUpdate, may_write: Event | None, record: UpdateRecord) -> Event | None:
        """New values are cast while they are in the cache, so that only the compute dtype crosses the bus, from
        page-locked memory."""
        end: Event | None = None
        with self._staging:
            if may_write is not None:
                with self._lane.resume():
                    may_write.wait()
            for piece in update.pieces(_STAGED_NUMEL):
                compute = piece.compute
                if compute is None:
                    continue
                staged = self._uploads.take(compute.numel(), compute.dtype)
                if piece.used_numel < piece.numel:
                    staged.zero_()  # padding goes up as well
                self._run_timed(replace(piece, compute=staged), record)
                end = self._uploads.send(compute)
        return end

    def _run_timed(self, update: FlatUpdate, record: UpdateRecord) -> None:
        start_s = time.perf_counter()
        for piece in _bounded(update):
            piece.run(num_threads=self._num_threads)
        record.note_adam(start_s, time.perf_counter())

    # On the compute stream

    def _run_on_device(self, update: FlatUpdate) -> bool:
        """Returns whether new values are on their way to host memory."""
        compute = update.compute
        if compute is None or update.is_compute_on_device:
            for piece in _bounded(update):
                piece.run()
            return False
        for piece in update.pieces(_DEVICE_PIECE_NUMEL):
            replace(piece, compute=None).run()
            if piece.compute is not None:
                piece.compute.copy_(piece.param.to(compute.dtype), non_blocking=True)
        return True

    def write_back(self, master: Tensor, target: Tensor) -> None:
        """`target` (any device) receives a master (any device) in its own dtype. Cast where the master is."""
        if master.device == target.device:
            target.copy_(master)
        elif master.device.type != "cpu":
            target.copy_(master.to(target.dtype))
        else:
            with self._staging:
                self._uploads.upload([(0, master)], target)


def _covered_s(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds that lie within any of the spans (begin, end): two threads may be at it at once."""
    total_s, until_s = 0.0, -math.inf
    for begin_s, end_s in sorted(spans):
        total_s += max(0.0, end_s - max(begin_s, until_s))
        until_s = max(until_s, end_s)
    return total_s


def _has_come(event: Event | None) -> bool:
    try:
        return event is None or event.is_over()
    except Exception:  # what waits for it says why
        return False


def _bounded(update: FlatUpdate) -> Iterable[FlatUpdate]:
    """The update in as few pieces as temporary memory allows."""
    return [update] if update.change_grad is None else update.pieces(_CHANGED_NUMEL)


def _close_visits(job: ChunkUpdate, pieces: Sequence[tuple[Task, Visit]]) -> None:
    """What is left to do when all pieces are over.

    Raises:
        BaseException: What one of them raised.
    """
    for task, _ in pieces:
        if task.error is not None:
            raise task.error
    if job.cast is not None:
        _cast(job.cast)


def _cast(pair: tuple[Tensor, Tensor]) -> None:
    source, target = pair
    target.copy_(source)


class _All:
    """Several moments as one."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events

    def wait(self) -> None:
        for event in self._events:
            event.wait()

    def synchronize(self) -> None:
        for event in self._events:
            event.synchronize()

    def is_over(self) -> bool:
        return all(event.is_over() for event in self._events)

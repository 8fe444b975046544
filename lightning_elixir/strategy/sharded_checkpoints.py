"""What the strategy does about checkpoints: stand-ins before they are saved, saves under way, folders to be loaded.

A save outside of `fit` is always waited for, since nothing later would raise its failure. Earlier checkpoints that a
callback removes while a thread saves go after it has succeeded. `ModelCheckpoint`, which looks for files before
it chooses a name, is told of the save under way, so that it chooses the name that it would if saves were waited for.
One that saves on exceptions comes before the ranks are told of the exception: so it first looks into the store, for
some seconds, whether all ranks have come to one of their own (`SavesOnException`), and else leaves saving alone. After
a peer was lost in a save, the thread keeps its group and the next save makes a new one. A folder that Lightning loads
before there is an engine is kept open until there is one. Random states are set when training begins, and again before
the first batch in the middle of an epoch, since making the loader's iterator draws.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_elixir.checkpoint import CheckpointIndex, PendingFolder
from lightning_elixir.checkpoint.consolidate import OWN_KEY
from lightning_elixir.checkpoint.writer import Contents
from lightning_elixir.core.comm import Comm
from lightning_elixir.core.random_states import capture_random_states, restore_random_states
from lightning_elixir.core.signals import start
from lightning_elixir.core.threads import default_num_threads
from lightning_elixir.core.together import run_together
from lightning_elixir.errors import DivergenceError, PeerLostError, StateError
from lightning_elixir.runtime.averages import Averages
from lightning_elixir.runtime.whole import shells_of
from lightning_elixir.strategy.engine_state import (
    CURRENT_MODEL,
    SavePlan,
    StandIns,
    averages_state,
    check_values,
    load_averages,
    load_model,
    load_optimizer,
    load_optimizers,
    model_state,
    optimizer_state,
    saved_optimizers,
)
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer

log = logging.getLogger(__name__)


class ShardedCheckpoints:
    """Saves and loads folders, for one strategy.

    Args:
        is_async: Have a thread bring what is saved from the system's cache to the disk.
    """

    def __init__(self, is_async: bool) -> None:
        self._is_async = is_async
        self._stand_ins = StandIns()
        self._running: _Commit | None = None
        self._thread_comm: Comm | None = None
        self._index: CheckpointIndex | None = None
        self._states_to_come: list[Any] = []  # Lightning's list of states that are in the folder that is open
        self._own: Mapping[str, Any] = {}
        self._awaited: tuple[bool, str] | None = None  # `strict` and `root`, for when there is an engine

    # Saving

    def model_state(self, module: ElixirModule) -> dict[str, Any]:
        """With stand-ins for parameters; the first part of a checkpoint. Collective."""
        return model_state(module, self._stand_ins)

    def optimizer_state(self, module: ElixirModule, optimizer: ElixirOptimizer) -> dict[str, Any]:
        """With stand-ins, by names. Collective."""
        return optimizer_state(optimizer, module.engine, self._stand_ins)

    def averages_state(self, module: ElixirModule, averages: Averages) -> dict[str, Tensor]:
        """With stand-ins, by the plan's names; after `model_state`."""
        return averages_state(averages, module.engine, self._stand_ins)

    def save(
        self,
        path: Path,
        checkpoint: Mapping[str, Any],
        module: ElixirModule,
        optimizers: Sequence[ElixirOptimizer],
        comm: Comm,
        device: torch.device,
        *,
        is_waited_for: bool,
        names: Mapping[str, str] | None = None,
    ) -> None:
        """Save. Collective; under `is_async` the checkpoint is there some time after this returns.

        Args:
            path: Of the folder to be.
            checkpoint: As Lightning gives it, with `state_dict` from `model_state` and `optimizer_states`; with
                averages also `current_model_state`.
            is_waited_for: Have it there in any case: nothing later would raise its failure.
            names: Further names of "state_dict", "optimizer_0", "optimizer_1" and so on.

        Raises:
            PlanError: What the checkpoint holds has no values.
            StorageError: This save, or the last one, has failed on some rank.
        """
        self.finish()
        run_together(comm, lambda: check_values(checkpoint, self._stand_ins))
        meta = dict(checkpoint)
        model, states = meta.pop("state_dict"), meta.get("optimizer_states", [])
        if states:  # an empty list is kept, by which optimizers begin anew
            del meta["optimizer_states"]
        current = meta.pop(CURRENT_MODEL, None)
        plan = SavePlan(module.engine, optimizers, model, states, self._stand_ins, names or {}, current)
        randoms = comm.exchange_objects(_as_plain(capture_random_states(device)))
        scaler = optimizers[0].scaler.state_dict() if optimizers and optimizers[0].scaler.enabled else None
        meta[OWN_KEY] = {
            "random_states": randoms,
            "loss_scaler": scaler,
            "names": dict(names or {}),
            "shells": {fqn: str(p.layout_at_elixir) for fqn, p in shells_of(module.engine).items()},
        }
        is_async = self._is_async and not is_waited_for
        folder = PendingFolder(path, comm, past_cache=not is_async)
        folder.write(plan.write, meta, module.engine.device, plan.num_files(default_num_threads()))
        if not is_async:
            folder.commit(plan.contents)
            return
        if self._thread_comm is None:
            self._thread_comm = comm.apart()
        self._running = _Commit(folder, plan.contents, self._thread_comm)

    def finish(self) -> None:
        """Wait for the save under way.

        Raises:
            StorageError: It has failed.
        """
        running = self._running
        if running is None:
            return
        running.join()  # if this is interrupted, the save is still under way
        self._running = None
        try:
            running.check()
        except PeerLostError:
            self._thread_comm = None  # its groups are gone
            raise

    def finish_quietly(self) -> None:
        """As `finish`, where another error is on its way already."""
        try:
            self.finish()
        except Exception as error:
            log.error("%s", error)

    def remove(self, remove: Callable[[], None]) -> None:
        """Remove an earlier checkpoint, but not before the one under way is there; not at all, if that fails."""
        if self._running is None:
            remove()
        else:
            self._running.then(remove)

    def is_coming(self, path: Path) -> bool:
        """Whether a checkpoint of that name is being saved."""
        return self._running is not None and self._running.path == path

    # Loading

    @property
    def is_open(self) -> bool:
        """Whether a folder is being loaded."""
        return self._index is not None

    @property
    def is_model_awaited(self) -> bool:
        """Whether the model's values come when there is an engine."""
        return self._awaited is not None

    def open(self, path: Path, comm: Comm, weights_only: bool | None) -> dict[str, Any]:
        """Begin to load. Collective.

        Returns:
            The checkpoint without model and optimizers.

        Raises:
            StorageError: It is not whole.
        """
        self._index = run_together(comm, lambda: CheckpointIndex(path))
        meta = run_together(comm, lambda: self._opened.meta(weights_only))
        self._own = meta.pop(OWN_KEY, None) or {}
        if saved_optimizers(self._opened, self._further_names):
            # Lightning has them loaded if they are there, and users may have put others in their place.
            meta["optimizer_states"] = self._states_to_come = []
        return meta

    def whole_models(self, comm: Comm) -> dict[str, dict[str, Any]]:
        """What a file has of the model, in host memory of this rank: its values, and where averages are in their place
        also the weights. Collective."""

        def read(root: str) -> dict[str, Any]:
            index = self._opened
            below = index.keys_below(root).items()
            return {n: index.read_whole(key) if key in index.tensors else index.read_object(key) for n, key in below}

        whole = {"state_dict": run_together(comm, lambda: read(self._opened.model_root))}
        if self.has_averages:
            whole[CURRENT_MODEL] = run_together(comm, lambda: read(CURRENT_MODEL))
        return whole

    def close(self) -> None:
        """Nothing more is loaded."""
        self._index, self._awaited, self._own = None, None, {}

    @property
    def names(self) -> set[str]:
        """The first parts of the names of all tensors in the folder that is open."""
        return {key.partition(".")[0] for key in (*self._opened.tensors, *self._opened.objects)}

    def load_model(self, module: ElixirModule | None, strict: bool, root: str = "") -> None:
        """Now, or, without an engine, at `load_awaited_model`. Collective.

        Args:
            root: What the model is called there; empty: as Lightning's strategies do.
        """
        if module is None:
            self._awaited = strict, root
        else:
            load_model(module, self._opened, strict, root)

    def load_awaited_model(self, module: ElixirModule) -> None:
        """See `load_model`."""
        awaited, self._awaited = self._awaited, None
        if awaited is not None:
            load_model(module, self._opened, *awaited)

    @property
    def has_averages(self) -> bool:
        """Whether a folder is open that has averages in the model's place."""
        return self.is_open and bool(self._opened.keys_below(CURRENT_MODEL))

    def load_weights(self, module: ElixirModule | None, strict: bool) -> None:
        """As `load_model`, of such a folder the weights."""
        self.load_model(module, strict, CURRENT_MODEL)

    def load_averages(self, module: ElixirModule, averages: Averages) -> dict[str, Tensor]:
        """Of such a folder the averages; returns their buffers by name. Collective."""
        return load_averages(averages, module.engine, self._opened)

    def has_states_for(self, states: Sequence[Any]) -> bool:
        """Whether an open folder's states are what these, out of the checkpoint that `open` gave, stand for."""
        return self.is_open and states is self._states_to_come

    def load_optimizer(self, module: ElixirModule, optimizer: ElixirOptimizer, root: str) -> None:
        """States, settings and the loss scale. Collective.

        Args:
            root: What the optimizer is called there.
        """
        load_optimizer(optimizer, module.engine, self._opened, root)
        self._load_scale(optimizer)

    def load_optimizers(self, module: ElixirModule, optimizers: Sequence[ElixirOptimizer]) -> None:
        """As `load_optimizer`, of all optimizers over a model."""
        load_optimizers(optimizers, module.engine, self._opened, self._further_names)
        self._load_scale(optimizers[0])  # they share it

    def _load_scale(self, optimizer: ElixirOptimizer) -> None:
        scaler = self._own.get("loss_scaler")
        if scaler and optimizer.scaler.enabled:
            optimizer.scaler.load_state_dict(scaler)

    def restore_random_states(self, comm: Comm, device: torch.device) -> None:
        """As they were when this was saved, if by as many ranks."""
        randoms = self._own.get("random_states") or []
        if len(randoms) == comm.world_size:
            restore_random_states(randoms[comm.rank], device)

    def renew_random_states(self, comm: Comm, device: torch.device) -> None:
        """What ran since has drawn as it does in a run that is not interrupted: from now on these are restored."""
        randoms = self._own.get("random_states") or []
        if len(randoms) == comm.world_size:
            randoms[comm.rank] = capture_random_states(device)

    @property
    def _further_names(self) -> set[str]:
        """What Fabric's user calls model and optimizers in the folder that is open, beside its own names for them."""
        names: Mapping[str, str] = self._own.get("names") or {}
        return set(names.values()) - names.keys()

    @property
    def _opened(self) -> CheckpointIndex:
        if self._index is None:
            raise StateError("no checkpoint folder is open")
        return self._index


class _Commit:
    """A save that a thread brings to its end."""

    def __init__(self, folder: PendingFolder, contents: Contents, comm: Comm) -> None:
        self.path = folder.path
        self._folder, self._contents, self._comm = folder, contents, comm
        self._lock = threading.Lock()
        self._followers: list[Callable[[], None]] = []
        self._is_over = False
        self._error: BaseException | None = None
        # To be waited for in place of the thread, which counts as over when its `join` is interrupted (CPython 3.11).
        self._running = threading.Lock()
        self._running.acquire()
        self._thread = threading.Thread(target=self._run, name="elixir-checkpoint")  # the process waits for it
        start(self._thread)

    def join(self) -> None:
        """Wait for its end, whatever that is."""
        with self._running:
            return

    def check(self) -> None:
        """Raises what the save has failed with."""
        if self._error is not None:
            raise self._error

    def then(self, action: Callable[[], None]) -> None:
        """Have it done after a successful end; at once if that has been; never, if it has failed."""
        with self._lock:
            if not self._is_over:
                self._followers.append(action)
                return
        if self._error is None:
            action()

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._folder.commit(self._contents, self._comm)
        except BaseException as exception:
            error = exception
            log.error("%s", error)  # at once: the next save, or the end, which raises it, may be far
        try:
            with self._lock:
                self._error, self._is_over = error, True
            for action in self._followers if error is None else ():
                with contextlib.suppress(OSError):  # what cannot be removed stays
                    action()
        finally:
            self._running.release()


class _StandIn:
    """What a user's callback has in place of one of its methods for the time of a run. A copy of the callback, also a
    pickled one, has the method itself."""

    def __init__(self, original: Callable[..., Any], call: Callable[..., Any]) -> None:
        self._original = original
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _itself, (self._original,)


def _itself(original: Callable[..., Any]) -> Callable[..., Any]:
    return original


@contextlib.contextmanager
def sees_saves(callback: Any, saves: ShardedCheckpoints) -> Iterator[None]:
    """Have a `ModelCheckpoint` count what is being saved among the files that are there, when it chooses a name.

    Saves begin and end on all ranks together, so all choose the same.
    """
    original = callback.file_exists
    is_own = "file_exists" in vars(callback)

    def file_exists(filepath: str | Path, trainer: Any) -> bool:
        return saves.is_coming(Path(filepath)) or original(filepath, trainer)

    callback.file_exists = _StandIn(original, file_exists)
    try:
        yield
    finally:
        if is_own:
            callback.file_exists = original
        else:
            del callback.file_exists


class SavesOnException:
    """One fit's callbacks that save when an exception has come: they do where it has come on all ranks.

    A save needs all of them. A rank that begins one alone, while the others wait for it somewhere else, ends them and
    itself by an error of the save, which hides what has really happened.

    Args:
        comm: All ranks.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._can_save: bool | None = None  # for all callbacks alike

    @contextlib.contextmanager
    def guarding(self, callback: Any) -> Iterator[None]:
        """Have this `ModelCheckpoint` or `OnExceptionCheckpoint` save together with the other ranks, or not at all."""
        original = callback.on_exception
        is_own = "on_exception" in vars(callback)

        def on_exception(trainer: Any, pl_module: Any, exception: BaseException) -> None:
            if not getattr(callback, "save_on_exception", True):
                original(trainer, pl_module, exception)
                return
            if self._can_save is None:
                # A rank that has heard of another's error has none of its own: the other has left, or waits for it in
                # vain.
                self._can_save = not isinstance(exception, PeerLostError) and self._comm.have_all_stumbled()
            if not self._can_save:
                log.warning(
                    "rank %d: no checkpoint is saved on %s: that takes all ranks, and not all have come to an error of"
                    " their own. Go on from the last one that was saved",
                    self._comm.rank,
                    type(exception).__name__,
                )
                return
            try:
                original(trainer, pl_module, exception)
            except DivergenceError as error:  # the exception is what users have to see
                log.error("rank %d: saving on %s failed: %s", self._comm.rank, type(exception).__name__, error)

        callback.on_exception = _StandIn(original, on_exception)
        try:
            yield
        finally:
            if is_own:
                callback.on_exception = original
            else:
                del callback.on_exception


# numpy's state holds an array, which a file that is safe to load must not


def _as_plain(states: Mapping[str, Any]) -> dict[str, Any]:
    plain = dict(states)
    if "numpy" in plain:
        name, keys, *rest = plain["numpy"]
        plain["numpy"] = (name, [int(key) for key in keys], *rest)
    return plain

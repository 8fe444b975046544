"""The engine's state in sharded checkpoints: every rank writes and reads what is its own.

[Note: stand-ins] A checkpoint is put together by many (Lightning, callbacks, the user's `on_save_checkpoint`) as nested
dictionaries of whole tensors. Here tensors on `meta` stand in for those of which every rank has a part; one that is
taken out is not written, and one that gets another name is written under that, since each is known by itself. Values
are read when they are written, one chunk's at a time.

Tied parameters are written once and have an entry each; the whole model has entries under `state_dict.`
(`ModelParallelStrategy`) and under `model.` (`FSDPStrategy`, and the command that consolidates), over the same bytes.
Groups of `HybridAdam` get the settings that `torch.optim.AdamW` has beside, since FSDP2 asks for them. Buffers, step
counts and settings are rank 0's. Where a rank has a replica of a chunk, or keeps all of it, its values are gathered
once; otherwise loading sends no values between ranks.

In a file of the whole state, optimizers number parameters in the order of their groups, as torch's do. Lightning's FSDP
strategies take a number for the place in the model: they read such a file only of one group in the model's order with
nothing frozen, and of theirs, states are taken wrongly where a group lists parameters in another order than the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.utils._pytree import keystr, tree_leaves_with_path
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_elixir.checkpoint import CheckpointIndex, Extent, TensorPlan
from lightning_elixir.checkpoint.writer import FILE_BYTES, Contents, ShardWriter
from lightning_elixir.core.first_names import first_names
from lightning_elixir.core.together import run_together
from lightning_elixir.errors import PlanError
from lightning_elixir.optim import HybridAdam
from lightning_elixir.optim.state_layout import is_scalar_state
from lightning_elixir.optim.whole_parameters import Layout
from lightning_elixir.optimizer import ElixirOptimizer
from lightning_elixir.plan.shard_segments import Segment
from lightning_elixir.runtime.agreement import Meeting
from lightning_elixir.runtime.averages import Averages
from lightning_elixir.runtime.chunk import Chunk
from lightning_elixir.runtime.engine import Engine
from lightning_elixir.runtime.whole import own_shard_writer, saved_dtype
from lightning_elixir.wrapper import ElixirModule

_MODEL = "state_dict"
_SECOND_NAME = "model"
"""What Lightning's FSDPStrategy, and its consolidate command, call the model."""
OPTIMIZER = "optimizer_{}"
"""With the number of the optimizer, in the order of `configure_optimizers`."""
CURRENT_MODEL = "current_model_state"
"""What Lightning's `WeightAveraging` calls the weights, where the averages are in the model's place."""
_MOST_FILES = 8
"""Of a rank. More threads came to nothing more on a disk of 2 GB/s, and in the system's cache, with 16 cores."""

# What `torch.optim.AdamW` has in its groups beside what HybridAdam has. AdamW looks for them when it loads.
_TORCH_SETTINGS = {"foreach": None, "capturable": False, "differentiable": False, "fused": None}


@dataclass(frozen=True)
class _State:
    """An optimizer's state by name."""

    optimizer: ElixirOptimizer
    key: str


_Kept = _State | Averages | None
"""An optimizer's state of a parameter, or its average; None: the parameter itself."""


@dataclass(frozen=True)
class _Source:
    """What a stand-in stands for."""

    chunk: Chunk
    member_index: int
    state: _Kept
    """None: the parameter."""
    dtype: torch.dtype


class StandIns:
    """The stand-ins of checkpoints: each is known as long as something has it. A copy has none."""

    def __init__(self) -> None:
        self._known = WeakTensorKeyDictionary()

    def __reduce__(self) -> Any:
        return StandIns, ()

    def make(self, engine: Engine, chunk: Chunk, member_index: int, state: _Kept, dtype: torch.dtype) -> Tensor:
        shape = engine.groups.whole_shape(chunk.spec.members[member_index])
        value = torch.empty(shape, dtype=dtype, device="meta")
        self._known[value] = _Source(chunk, member_index, state, dtype)
        return value

    def source_of(self, value: Any) -> _Source | None:
        found: _Source | None = self._known.get(value) if isinstance(value, Tensor) else None
        return found


def check_values(checkpoint: Mapping[str, Any], stand_ins: StandIns) -> None:
    """Whether every tensor has values, or stands for what is read when it is written.

    Args:
        checkpoint: As Lightning gives it.

    Raises:
        PlanError: One is on `meta`: a stand-in in another place, or what was computed from one.
    """
    read = (_MODEL, CURRENT_MODEL, "optimizer_states")
    for path, value in tree_leaves_with_path(checkpoint):
        if not isinstance(value, Tensor) or not value.is_meta:
            continue
        if getattr(path[0], "key", None) not in read or stand_ins.source_of(value) is None:
            raise PlanError(
                f"checkpoint{keystr(path)} has no values: when on_save_checkpoint runs for a sharded checkpoint,"
                " parameters and optimizer states are still to be read. They may be left out and get other names in"
                " 'state_dict' and 'optimizer_states'; nothing can be computed from them, nor may they go elsewhere."
                " Take values from self.state_dict(), or use state_dict_type='full'"
            )


def model_state(module: ElixirModule, stand_ins: StandIns) -> dict[str, Any]:
    """The module's state dict with stand-ins for parameters, and buffers as copies in host memory. Collective."""
    engine = module.engine
    with engine.meeting(Meeting.SHARDED_STATE_DICT):
        return _named_model(engine, stand_ins)


def _named_model(engine: Engine, stand_ins: StandIns) -> dict[str, Any]:
    values = {
        member.fqn: stand_ins.make(engine, chunk, index, None, saved_dtype(engine, chunk, index))
        for chunk in engine.chunks
        for index, member in enumerate(chunk.spec.members)
    }
    with engine.interception.whole_state(values):
        state: dict[str, Any] = engine.module.state_dict()
    found: dict[str, Any] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor) or stand_ins.source_of(value) is not None:
            found[name] = value
        elif value.is_meta:
            raise PlanError(
                f"a hook of state_dict() computes {name} from a parameter: a sharded checkpoint holds parameters as"
                " they are. Use state_dict_type='full'"
            )
        else:
            found[name] = value.detach().to("cpu", copy=True)
    return found


def averages_state(averages: Averages, engine: Engine, stand_ins: StandIns) -> dict[str, Tensor]:
    """Stand-ins for averages, by the plan's names."""
    return {
        member.fqn: stand_ins.make(engine, chunk, index, averages, saved_dtype(engine, chunk, index))
        for chunk in engine.chunks
        if chunk.spec.requires_grad
        for index, member in enumerate(chunk.spec.members)
    }


def optimizer_state(optimizer: ElixirOptimizer, engine: Engine, stand_ins: StandIns) -> dict[str, Any]:
    """The state dict of `torch.optim.AdamW`, by parameter names, with stand-ins. Collective."""
    with engine.meeting(Meeting.SHARDED_OPTIMIZER_STATE):
        described = optimizer.described_states()
    names = _names(engine)
    state: dict[str, dict[str, Any]] = {}
    for (chunk_id, index), entries in described.items():
        chunk = engine.chunks[chunk_id]
        state[chunk.spec.members[index].fqn] = {
            key: stand_ins.make(engine, chunk, index, _State(optimizer, key), value) if kind == "tensor" else value
            for key, (kind, value) in entries.items()
        }
    more = _TORCH_SETTINGS if isinstance(optimizer.optimizer, HybridAdam) else {}
    groups = [{**more, **group, "params": [names[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
    for group in groups:
        group.pop("param_names", None)
    return {"state": state, "param_groups": groups}


def _names(engine: Engine) -> dict[int, str]:
    """Of every parameter, by its id; a tied one has the plan's."""
    every = {id(p): name for name, p in engine.module.named_parameters()}
    return every | {id(p): m.fqn for c in engine.chunks for p, m in zip(c.parameters, c.spec.members, strict=True)}


class SavePlan:
    """What goes into a sharded checkpoint, and which rank writes it.

    Args:
        engine: Whose parameters.
        optimizers: Whose states.
        model: From `model_state`.
        states: Of each, from `optimizer_state`; empty: none are saved.
        stand_ins: Those in `model` and `states`.
        names: Further names of these.
        current_model: As `model`, where that has averages: the weights. None: there are no averages.
    """

    def __init__(
        self,
        engine: Engine,
        optimizers: Sequence[ElixirOptimizer],
        model: Mapping[str, Any],
        states: Sequence[Mapping[str, Any]],
        stand_ins: StandIns,
        names: Mapping[str, str] = MappingProxyType({}),
        current_model: Mapping[str, Any] | None = None,
    ) -> None:
        self._engine = engine
        self._optimizers = tuple(optimizers)  # kept until all is written
        nested: dict[str, Any] = {_MODEL: model, **{OPTIMIZER.format(i): state for i, state in enumerate(states)}}
        if current_model is not None:
            nested[CURRENT_MODEL] = current_model
        flat, self._paths = flatten_state_dict(nested)
        self.contents = Contents(paths={key: tuple(path) for key, path in self._paths.items()})
        self._whole: dict[str, Any] = {}  # rank 0 writes them
        self._runs: dict[int, dict[_Kept, dict[int, str]]] = {}  # chunk id -> state -> member index -> key
        for key, value in flat.items():
            source = stand_ins.source_of(value)
            if source is None:
                self._add_whole(key, value)
            else:
                self._add_runs(key, source)
        further = {(_MODEL, _SECOND_NAME), *names.items()}
        for key in [*self.contents.tensors, *self.contents.objects, *self.contents.aliases]:
            for root, name in further:
                if key.startswith(f"{root}.") and name != root:
                    self._add_alias(name + key.removeprefix(root), key, (name, *self._paths[key][1:]))

    def _add_whole(self, key: str, value: Any) -> None:
        self._whole[key] = value
        if isinstance(value, Tensor):
            self.contents.tensors[key] = TensorPlan(tuple(value.shape), value.dtype)
        else:
            self.contents.objects.append(key)

    def _add_runs(self, key: str, source: _Source) -> None:
        engine, chunk, index = self._engine, source.chunk, source.member_index
        keys = self._runs.setdefault(chunk.id, {}).setdefault(source.state, {})
        if index in keys:  # a tied parameter under its second name
            self._add_alias(key, keys[index], self._paths[key])
            return
        keys[index] = key
        ranks = range(engine.comm.world_size)
        of_ranks = [(s, r) for r in ranks for s in self._segments(chunk, source.state, r) if s.member_index == index]
        extents = [_extent(engine, chunk, segment, rank) for segment, rank in of_ranks]
        shape = engine.groups.whole_shape(chunk.spec.members[index])
        empty = Extent(shape, None, 0, 0)
        self.contents.tensors[key] = TensorPlan(shape, source.dtype, tuple(extents) or (empty,))

    def _segments(self, chunk: Chunk, state: _Kept, rank: int) -> tuple[Segment, ...]:
        """What a rank writes of a chunk."""
        if not self._engine.groups.writes(chunk.spec, rank):
            return ()
        if isinstance(state, _State):
            return state.optimizer.state_segments(chunk, rank)
        return self._engine.groups.segments(chunk.spec, rank)

    def _add_alias(self, key: str, source: str, path: tuple[str | int, ...]) -> None:
        self.contents.aliases[key] = self.contents.aliases.get(source, source)
        self.contents.paths[key] = path

    def num_files(self, num_threads: int) -> int:
        """In how many files to write this rank's part.

        Args:
            num_threads: Of this rank.
        """
        engine = self._engine
        nbytes = 0
        for chunk in engine.chunks:
            for state, keys in self._runs.get(chunk.id, {}).items():
                for segment in self._segments(chunk, state, engine.comm.rank):
                    if segment.member_index in keys:
                        nbytes += segment.numel * self.contents.tensors[keys[segment.member_index]].dtype.itemsize
        return max(1, min(_MOST_FILES, num_threads, nbytes // FILE_BYTES))

    def write(self, writer: ShardWriter) -> None:
        """Write this rank's part, one chunk after the other."""
        engine = self._engine
        if engine.comm.rank == 0:
            for key, value in self._whole.items():
                if isinstance(value, Tensor):
                    writer.add_tensor(key, value)
                else:
                    writer.add_object(key, value)
        for chunk in engine.chunks:
            for state, keys in self._runs.get(chunk.id, {}).items():
                self._write_runs(writer, chunk, state, keys)

    def _write_runs(self, writer: ShardWriter, chunk: Chunk, state: _Kept, keys: Mapping[int, str]) -> None:
        engine = self._engine
        wanted = [s for s in self._segments(chunk, state, engine.comm.rank) if s.member_index in keys]
        if not wanted:
            return
        dtypes = {s.member_index: self.contents.tensors[keys[s.member_index]].dtype for s in wanted}
        if isinstance(state, _State):
            runs = state.optimizer.state_runs(chunk, state.key, dtypes[wanted[0].member_index])
        else:
            values = engine.own_shard(chunk) if state is None else state.own(chunk)
            runs = {s.member_index: values[s.in_shard] for s in wanted}
        for segment in wanted:
            index = segment.member_index
            writer.add_run(keys[index], _extent(engine, chunk, segment), runs[index], dtypes[index])


def _extent(engine: Engine, chunk: Chunk, segment: Segment, rank: int | None = None) -> Extent:
    """What a rank's segment is of the whole parameter; None: this rank's."""
    index = segment.member_index
    member, stride = chunk.spec.members[index], chunk.strides[index]
    offsets = engine.groups.offsets(member, rank) if member.cuts else ()
    return Extent(member.shape, stride, segment.param_offset, segment.numel, offsets)


def load_model(module: ElixirModule, index: CheckpointIndex, strict: bool = True, root: str = "") -> None:
    """Read parameters and buffers; of parameters, what this rank keeps. Collective.

    Args:
        root: What the model is called there; empty: as Lightning's strategies do.

    Raises:
        PlanError: The checkpoint is another model's; names the first differences.
        StorageError: It is damaged, or cannot be read, as far as this or another rank needs it.
    """
    engine = module.engine
    with engine.meeting(Meeting.LOAD_CHECKPOINT):
        keys = run_together(engine.comm, lambda: _load_buffers(engine, index, strict, root or index.model_root))
        memory = _Reused()
        for chunk in engine.chunks:
            if chunk.id in keys:
                read = partial(_read_parameters, engine, index, chunk, keys[chunk.id], memory)
                run_together(engine.comm, own_shard_writer(engine, chunk, run_together(engine.comm, read)))


def _load_buffers(engine: Engine, index: CheckpointIndex, strict: bool, root: str) -> dict[int, dict[int, str]]:
    """Compare the names, and have the modules load all that is no parameter.

    Returns:
        Chunk id -> member index -> key of the parameter.
    """
    stand_ins = StandIns()
    named, _ = flatten_state_dict({_MODEL: _named_model(engine, stand_ins)})
    ours = {key.removeprefix(f"{_MODEL}."): value for key, value in named.items()}
    theirs = index.keys_below(root)
    _check_model(index, ours, theirs, strict)
    keys: dict[int, dict[int, str]] = {}
    rest: dict[str, str] = {}
    for name, key in theirs.items():
        source = stand_ins.source_of(ours[name]) if name in ours else None
        if source is not None:
            keys.setdefault(source.chunk.id, {}).setdefault(source.member_index, key)
        elif name in ours or _is_extra(name):
            rest[key] = name
    if rest:
        engine.module.load_state_dict(_nested(index, rest)[root], strict=False)
    return keys


def _read_parameters(
    engine: Engine, index: CheckpointIndex, chunk: Chunk, keys: Mapping[int, str], memory: _Reused
) -> Tensor:
    own = engine.own_shard(chunk).detach()
    segments = engine.groups.segments(chunk.spec)
    wanted = [segment for segment in segments if segment.member_index in keys]
    values = memory.empty("values", own.numel(), own.dtype)
    if len(wanted) < len(segments):
        values.copy_(own)
    else:
        end = 0
        for segment in wanted:
            values[end : segment.shard_offset].zero_()  # what no parameter fills
            end = segment.shard_offset + segment.numel
        values[end:].zero_()
    runs = [values[segment.shard_offset : segment.shard_offset + segment.numel] for segment in wanted]
    index.read_runs(
        [(keys[s.member_index], _extent(engine, chunk, s), run) for s, run in zip(wanted, runs, strict=True)]
    )
    return values


def load_averages(averages: Averages, engine: Engine, index: CheckpointIndex) -> dict[str, Tensor]:
    """Read what this rank keeps of averages, which the folder has in the model's place. Collective.

    Returns:
        The averages' buffers, by name.

    Raises:
        StorageError: As `load_model`.
    """
    one_name = _canonical_names(engine)
    saved = {name: key for name, key in index.keys_below(index.model_root).items() if key in index.tensors}
    keys = {one_name[name]: key for name, key in saved.items() if name in one_name}

    def read(chunk: Chunk, segment: Segment, target: Tensor) -> None:
        if segment.fqn in keys:
            index.read_runs([(keys[segment.fqn], _extent(engine, chunk, segment), target)])

    buffers = dict(engine.module.named_buffers())
    with engine.meeting(Meeting.LOAD_CHECKPOINT):
        run_together(engine.comm, partial(averages.fill, read))
        return run_together(
            engine.comm, lambda: {name: index.read_whole(saved[name]) for name in buffers if name in saved}
        )


class _Reused:
    """Host memory for what is read and copied on at once: what the system gives anew it has to find page by page, which
    takes longer than reading a fast disk."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def empty(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """1-D, `[numel]`. What was given before under the name goes."""
        nbytes = numel * dtype.itemsize
        held = self._held.pop(name, None)
        if held is None or held.numel() < nbytes:
            held = None  # before there is more
            held = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._held[name] = held
        return held[:nbytes].view(dtype)


def _is_extra(name: str) -> bool:
    """Whether it is what `get_extra_state` gave, whose inside is the module's own affair."""
    return "_extra_state" in name.split(".")


def _nested(index: CheckpointIndex, keys: Iterable[str]) -> dict[str, Any]:
    """What is saved under these keys, nested as it was."""
    flat = {key: index.read_whole(key) if key in index.tensors else index.read_object(key) for key in keys}
    nested: dict[str, Any] = unflatten_state_dict(flat, {key: index.paths[key] for key in flat})
    return nested


def _check_model(index: CheckpointIndex, ours: Mapping[str, Any], theirs: Mapping[str, str], strict: bool) -> None:
    missing = [name for name in ours if name not in theirs and not _is_extra(name)]
    unexpected = [name for name in theirs if name not in ours and not _is_extra(name)]
    reshaped = []
    for name, value in ours.items():
        stored = index.tensors.get(theirs[name]) if name in theirs else None
        if stored is not None and isinstance(value, Tensor) and stored.shape != tuple(value.shape):
            reshaped.append(f"{name} {list(stored.shape)} instead of {list(value.shape)}")
    told = []
    if strict and missing:
        told.append(f"it lacks {first_names(missing)}")
    if strict and unexpected:
        told.append(f"the model lacks {first_names(unexpected)}")
    if reshaped:
        told.append(f"shapes differ: {first_names(reshaped)}")
    if told:
        raise PlanError(f"{index.folder} is a checkpoint of another model: {'; '.join(told)}")


def load_optimizer(optimizer: ElixirOptimizer, engine: Engine, index: CheckpointIndex, root: str) -> None:
    """Read what this rank keeps of the states. Collective.

    Args:
        root: What the optimizer is called there.

    Raises:
        PlanError: They are another model's or optimizer's; names the first differences.
        StorageError: The checkpoint is damaged, or cannot be read, as far as this or another rank needs it.
    """
    with engine.meeting(Meeting.LOAD_OPTIMIZER_CHECKPOINT):
        run_together(engine.comm, lambda: _load_optimizer(optimizer, engine, index, root))


def load_optimizers(
    optimizers: Sequence[ElixirOptimizer], engine: Engine, index: CheckpointIndex, further: Collection[str] = ()
) -> None:
    """As `load_optimizer`: of each optimizer the states over the same parameters, or else those with its number.

    Args:
        further: As of `saved_optimizers`.
    """
    with engine.meeting(Meeting.LOAD_OPTIMIZER_CHECKPOINT):
        saved = _matched(optimizers, engine, index, saved_optimizers(index, further))
        for optimizer, root in zip(optimizers, saved, strict=True):
            run_together(engine.comm, partial(_load_optimizer, optimizer, engine, index, root))


def _matched(
    optimizers: Sequence[ElixirOptimizer], engine: Engine, index: CheckpointIndex, roots: list[str]
) -> list[str]:
    """The root of each optimizer's keys, out of those that are saved."""
    if len(roots) != len(optimizers):
        raise PlanError(
            f"{index.folder} holds {len(roots)} optimizers; this model has {len(optimizers)}: load its weights alone,"
            " or train with as many"
        )
    names, one_name = _names(engine), _canonical_names(engine)
    saved = {
        frozenset(one_name.get(name, name) for group in _saved_groups(index, root) for name in group["params"]): root
        for root in roots
    }
    mine = [frozenset(names[id(p)] for group in one.param_groups for p in group["params"]) for one in optimizers]
    if all(found in saved for found in mine):
        return [saved[found] for found in mine]
    return roots  # what differs is told when these are compared


def _load_optimizer(optimizer: ElixirOptimizer, engine: Engine, index: CheckpointIndex, root: str) -> None:
    groups = _saved_groups(index, root)
    one_name = _canonical_names(engine)
    _check_groups(index, root, optimizer, groups, one_name, _names(engine))
    optimizer.check_settings(groups)
    is_ours = isinstance(optimizer.optimizer, HybridAdam)
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update({k: v for k, v in saved.items() if k != "params" and not (is_ours and k in _TORCH_SETTINGS)})
    states: dict[str, dict[str, str]] = {}  # parameter -> state -> key
    for name, key in index.keys_below(f"{root}.state").items():
        parameter, _, state = name.rpartition(".")
        states.setdefault(one_name.get(parameter, parameter), {})[state] = key

    memory = _Reused()

    def read(chunk: Chunk, segment: Segment) -> Mapping[str, Any]:
        found: dict[str, Any] = {}
        runs = []
        for state, key in states.get(segment.fqn, {}).items():
            stored = index.tensors.get(key)
            if stored is None:
                found[state] = index.read_object(key)
            elif _is_value(optimizer, state, stored.shape, _shape(engine, chunk, segment)):
                found[state] = index.read_whole(key)
            elif stored.shape != _shape(engine, chunk, segment):
                shape = list(_shape(engine, chunk, segment))
                raise PlanError(f"{state} of {segment.fqn} has shape {list(stored.shape)}, expected {shape}")
            else:
                found[state] = memory.empty(state, segment.numel, stored.dtype)
                runs.append((key, _extent(engine, chunk, segment), found[state]))
        index.read_runs(runs)
        if optimizer.is_whole:
            layout = Layout(_shape(engine, chunk, segment), chunk.strides[segment.member_index])
            runs_of = {id(run) for _, _, run in runs}
            return {key: layout.view(value) if id(value) in runs_of else value for key, value in found.items()}
        return found

    optimizer.load_segments(read, states.keys())


def _is_value(optimizer: ElixirOptimizer, state: str, stored: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether an entry of a state is one for the whole parameter, which is read as it is."""
    is_of_other_shape = optimizer.is_whole and tuple(stored) != tuple(shape)
    return is_of_other_shape or is_scalar_state(state, torch.empty(tuple(stored), device="meta"), shape)


def _shape(engine: Engine, chunk: Chunk, segment: Segment) -> tuple[int, ...]:
    """Of the whole parameter."""
    return engine.groups.whole_shape(chunk.spec.members[segment.member_index])


def saved_optimizers(index: CheckpointIndex, further: Collection[str]) -> list[str]:
    """The roots of their keys, in order.

    Args:
        further: Second names of some of them, one of which may be just what the next would be called.
    """
    roots: list[str] = []
    while (root := OPTIMIZER.format(len(roots))) not in further and index.keys_below(f"{root}.param_groups"):
        roots.append(root)
    return roots


def _canonical_names(engine: Engine) -> dict[str, str]:
    """All names of parameters, also further ones of tied ones -> those of the plan."""
    names = _names(engine)
    return {name: names[id(p)] for name, p in engine.module.named_parameters(remove_duplicate=False)}


def _saved_groups(index: CheckpointIndex, root: str) -> list[dict[str, Any]]:
    keys = index.keys_below(f"{root}.param_groups").values()
    groups: list[dict[str, Any]] = _nested(index, keys)[root]["param_groups"]
    return groups


def _check_groups(
    index: CheckpointIndex,
    root: str,
    optimizer: ElixirOptimizer,
    saved: list[dict[str, Any]],
    one_name: Mapping[str, str],
    names: Mapping[int, str],
) -> None:
    ours = [{names[id(p)] for p in group["params"]} for group in optimizer.param_groups]
    theirs = [{one_name.get(name, name) for name in group["params"]} for group in saved]
    if len(ours) != len(theirs):
        raise PlanError(
            f"{index.folder} holds, as {root}, an optimizer with {len(theirs)} parameter groups; this one has"
            f" {len(ours)}"
        )
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if mine != other:
            lacking, surplus = sorted(mine - other), sorted(other - mine)
            told = [f"it lacks {first_names(lacking)}"] * bool(lacking)
            told += [f"only it has {first_names(surplus)}"] * bool(surplus)
            raise PlanError(f"{index.folder} has other parameters in group {number} of {root}: {'; '.join(told)}")

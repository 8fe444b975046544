"""Plans as JSON: readable, checked on the way in."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from dataclasses import fields as dataclass_fields
from pathlib import Path

from lightning_elixir.errors import PlanError
from lightning_elixir.plan.activations import Fate, ModelBlock
from lightning_elixir.plan.files import read_json
from lightning_elixir.plan.memory import problem_of_places
from lightning_elixir.plan.mesh import AXES, AxisCut, axes_of
from lightning_elixir.plan.types import (
    ALIGN_NUMEL,
    DTYPE_BYTES,
    GPU_BYTE_KINDS,
    SCHEMA,
    TRAINED_DTYPES,
    Alternative,
    ChunkSpec,
    Forecast,
    IgnoredParam,
    Member,
    Plan,
    StepTimes,
    Tier,
    UpdateTiming,
)

_PLAN_KEYS = (
    "schema",
    "policy",
    "world_size",
    "tensor_parallel_size",
    "expert_parallel_size",
    "num_copies",
    "compute_dtype",
    "block_bytes",
    "rcache_blocks",
    "prefetch_depth",
    "is_storage_distributed",
    "update_timing",
    "grad_reuses_compute_shard",
    "activations",
    "activation_host_bytes",
    "notes",
    "forecast",
    "chunks",
    "ignored",
)
_CHUNK_KEYS = (
    "id",
    "dtype",
    "requires_grad",
    "numel",
    "param_tier",
    "optim_tier",
    "is_persistent",
    "is_update_streamed",
    "has_spare_states",
    "members",
)
_BLOCK_KEYS = ("name", "fate")
_MEMBER_KEYS = ("fqn", "shape", "offset", "cuts")

_IGNORED_KEYS = ("fqn", "shape", "dtype", "requires_grad", "nbytes")

_ORIGIN = (
    "Plans are written by `lightning-elixir plan --save-plan FILE.json`, by fits with report_dir, and by"
    " lightning_elixir.plan.io.save_plan"
)


def plan_to_dict(plan: Plan) -> dict[str, object]:
    """The plan as plain dicts, lists and scalars."""
    return {
        "schema": plan.schema,
        "policy": plan.policy,
        "world_size": plan.world_size,
        "tensor_parallel_size": plan.tensor_parallel_size,
        "expert_parallel_size": plan.expert_parallel_size,
        "num_copies": plan.num_copies,
        "compute_dtype": plan.compute_dtype,
        "block_bytes": plan.block_bytes,
        "rcache_blocks": plan.rcache_blocks,
        "prefetch_depth": plan.prefetch_depth,
        "is_storage_distributed": plan.is_storage_distributed,
        "update_timing": plan.update_timing.value,
        "grad_reuses_compute_shard": plan.grad_reuses_compute_shard,
        "activations": [{"name": b.name, "fate": b.fate.value} for b in plan.activations],
        "activation_host_bytes": plan.activation_host_bytes,
        "notes": dict(plan.notes),
        "forecast": None if plan.forecast is None else _forecast_to_dict(plan.forecast),
        "chunks": [
            {
                "id": c.id,
                "dtype": c.dtype,
                "requires_grad": c.requires_grad,
                "numel": c.numel,
                "param_tier": c.param_tier.value,
                "optim_tier": c.optim_tier.value,
                "is_persistent": c.is_persistent,
                "is_update_streamed": c.is_update_streamed,
                "has_spare_states": c.has_spare_states,
                "members": [_member_to_dict(m) for m in c.members],
            }
            for c in plan.chunks
        ],
        "ignored": [{**asdict(p), "shape": list(p.shape)} for p in plan.ignored],
    }


def _member_to_dict(member: Member) -> dict[str, object]:
    content: dict[str, object] = {"fqn": member.fqn, "shape": list(member.shape), "offset": member.offset}
    if member.cuts:  # most plans have none
        content["cuts"] = {cut.axis: cut.dim for cut in member.cuts}
    return content


def plan_from_dict(content: object) -> Plan:
    """The plan that `plan_to_dict` made `content` from.

    Raises:
        PlanError: Another schema, a missing or unknown key, a wrong type, or a plan that no runtime could obey.
    """
    fields = _Fields(content, "plan")
    schema = fields.integer("schema", least=0)
    if schema != SCHEMA:
        raise PlanError(f"the plan has schema {schema}, this version reads {SCHEMA}: make the plan again")
    fields.check_keys(_PLAN_KEYS)
    plan = Plan(
        schema=schema,
        policy=fields.text("policy"),
        world_size=fields.integer("world_size", least=1),
        tensor_parallel_size=fields.integer("tensor_parallel_size", least=1),
        expert_parallel_size=fields.integer("expert_parallel_size", least=1),
        num_copies=fields.integer("num_copies", least=1),
        compute_dtype=fields.choice("compute_dtype", TRAINED_DTYPES),
        block_bytes=fields.integer("block_bytes", least=1),
        rcache_blocks=fields.integer("rcache_blocks", least=0),
        prefetch_depth=fields.integer("prefetch_depth", least=0),
        is_storage_distributed=fields.boolean("is_storage_distributed"),
        update_timing=UpdateTiming(fields.choice("update_timing", [t.value for t in UpdateTiming])),
        grad_reuses_compute_shard=fields.boolean("grad_reuses_compute_shard"),
        activations=tuple(_block(item, i) for i, item in enumerate(fields.items("activations"))),
        activation_host_bytes=fields.optional_integer("activation_host_bytes"),
        notes=_notes(fields.get("notes")),
        forecast=_forecast(fields.get("forecast")),
        chunks=tuple(_chunk(item, i) for i, item in enumerate(fields.items("chunks"))),
        ignored=tuple(_ignored(item, i) for i, item in enumerate(fields.items("ignored"))),
    )
    _check_layout(plan)
    return plan


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write the plan as JSON, one member a line."""
    Path(path).write_text(_render(plan_to_dict(plan)) + "\n", encoding="utf-8")


def load_plan(path: str | Path) -> Plan:
    """Read a plan that `save_plan` wrote (or a person edited).

    Raises:
        PlanError: The file cannot be read, is no plan, or `plan_from_dict` refuses it; the message names the file.
    """
    content = read_json(path, "plan", _ORIGIN)
    if not isinstance(content, Mapping) or "chunks" not in content:
        found = f"an object without {'chunks'!r}" if isinstance(content, Mapping) else f"no object: {content!r:.40}"
        raise PlanError(f"{path} is no plan: it is JSON, but {found}. {_ORIGIN}")
    try:
        return plan_from_dict(content)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error


class _Fields:
    """One JSON object with typed, checked access to its values."""

    def __init__(self, content: object, where: str) -> None:
        if not isinstance(content, Mapping):
            raise PlanError(f"{where} must be an object, not {type(content).__name__}")
        self._content = content
        self._where = where

    def check_keys(self, known: Iterable[str]) -> None:
        unknown = sorted(set(self._content) - set(known), key=str)
        if unknown:
            raise PlanError(f"{self._where} has unknown keys: {', '.join(map(str, unknown))}")

    def get(self, key: str) -> object:
        if key not in self._content:
            raise PlanError(f"{self._where} has no {key!r}")
        return self._content[key]

    def integer(self, key: str, *, least: int) -> int:
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise PlanError(f"{self._where}: {key} must be an integer of at least {least}, got {value!r}")
        return value

    def optional_integer(self, key: str) -> int | None:
        return None if self.get(key) is None else self.integer(key, least=0)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key) if default is None else self._content.get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise PlanError(f"{self._where}: {key} must be a number, got {value!r}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def later_number(self, key: str) -> float | None:
        """A number or nothing, under a key that is missing in earlier files."""
        return None if self._content.get(key) is None else self.number(key)

    def later(self, key: str) -> object:
        """None where a plan of an earlier version lacks it."""
        return self._content.get(key)

    def later_integer(self, key: str) -> int | None:
        """The same for an integer."""
        return None if self._content.get(key) is None else self.integer(key, least=0)

    def boolean(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool):
            raise PlanError(f"{self._where}: {key} must be true or false, got {value!r}")
        return value

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str):
            raise PlanError(f"{self._where}: {key} must be a string, got {value!r}")
        return value

    def choice(self, key: str, known: Iterable[str]) -> str:
        value = self.text(key)
        if value not in known:
            raise PlanError(f"{self._where}: {key} must be one of {', '.join(known)}, got {value!r}")
        return value

    def tier(self, key: str) -> Tier:
        return Tier(self.choice(key, [t.value for t in Tier]))

    def items(self, key: str) -> list[object]:
        value = self.get(key)
        if not isinstance(value, list):
            raise PlanError(f"{self._where}: {key} must be a list, got {value!r}")
        return value


def _notes(content: object) -> dict[str, float | int | str]:
    if not isinstance(content, Mapping):
        raise PlanError(f"notes must be an object, not {type(content).__name__}")
    notes: dict[str, float | int | str] = {}
    for key, value in content.items():
        if not isinstance(key, str) or not isinstance(value, (float, int, str)):
            raise PlanError(f"notes: {key!r} must be a number or a string, got {value!r}")
        notes[key] = value
    return notes


def _forecast_to_dict(forecast: Forecast) -> dict[str, object]:
    content = asdict(forecast)
    content["alternatives"] = [asdict(a) for a in forecast.alternatives]
    content["gpu_kinds"] = dict(forecast.gpu_kinds) or None
    return content


_LATER = {"nvme_s": 0.0}
"""What forecasts have had only since some version, and what it was before."""


def _forecast(content: object) -> Forecast | None:
    if content is None:
        return None
    fields = _Fields(content, "forecast")
    fields.check_keys(f.name for f in dataclass_fields(Forecast))
    times = _Fields(fields.get("times"), "forecast, times")
    times.check_keys(f.name for f in dataclass_fields(StepTimes))
    alternatives = []
    for i, item in enumerate(fields.items("alternatives")):
        entry = _Fields(item, f"forecast, alternative {i}")
        entry.check_keys(f.name for f in dataclass_fields(Alternative))
        alternatives.append(
            Alternative(entry.text("description"), entry.optional_number("total_s"), entry.text("reason"))
        )
    return Forecast(
        times=StepTimes(**{f.name: times.number(f.name, _LATER.get(f.name)) for f in dataclass_fields(StepTimes)}),
        peak_gpu_bytes=fields.integer("peak_gpu_bytes", least=0),
        gpu_limit_bytes=fields.optional_integer("gpu_limit_bytes"),
        host_bytes=fields.integer("host_bytes", least=0),
        host_limit_bytes=fields.optional_integer("host_limit_bytes"),
        binding=fields.text("binding"),
        hardware=fields.text("hardware"),
        alternatives=tuple(alternatives),
        weighed_s=fields.later_number("weighed_s"),
        after_steps=fields.later_integer("after_steps"),
        foreseen_s=fields.later_number("foreseen_s"),
        foreseen_after_steps=fields.later_integer("foreseen_after_steps"),
        margin_bytes=fields.later_integer("margin_bytes") or 0,
        gpu_kinds=_gpu_kinds(fields.later("gpu_kinds")),
    )


def _gpu_kinds(content: object) -> tuple[tuple[str, int], ...]:
    if content is None:
        return ()
    kinds = _Fields(content, "forecast, gpu_kinds")
    kinds.check_keys(GPU_BYTE_KINDS)
    return tuple((kind, kinds.integer(kind, least=0)) for kind in GPU_BYTE_KINDS)


def _ignored(content: object, position: int) -> IgnoredParam:
    fields = _Fields(content, f"ignored parameter {position}")
    fields.check_keys(_IGNORED_KEYS)
    requires_grad = fields.boolean("requires_grad")
    return IgnoredParam(
        fqn=fields.text("fqn"),
        shape=_shape(fields, f"ignored parameter {position}"),
        dtype=fields.choice("dtype", TRAINED_DTYPES) if requires_grad else fields.text("dtype"),
        requires_grad=requires_grad,
        nbytes=fields.integer("nbytes", least=0),
    )


def _block(content: object, index: int) -> ModelBlock:
    fields = _Fields(content, f"activations, block {index}")
    fields.check_keys(_BLOCK_KEYS)
    return ModelBlock(fields.text("name"), Fate(fields.choice("fate", [fate.value for fate in Fate])))


def _chunk(content: object, index: int) -> ChunkSpec:
    fields = _Fields(content, f"chunk {index}")
    fields.check_keys(_CHUNK_KEYS)
    return ChunkSpec(
        id=fields.integer("id", least=0),
        dtype=fields.choice("dtype", DTYPE_BYTES),
        requires_grad=fields.boolean("requires_grad"),
        numel=fields.integer("numel", least=1),
        members=tuple(_member(item, f"chunk {index}, member {i}") for i, item in enumerate(fields.items("members"))),
        param_tier=fields.tier("param_tier"),
        optim_tier=fields.tier("optim_tier"),
        is_persistent=fields.boolean("is_persistent"),
        is_update_streamed=fields.boolean("is_update_streamed"),
        has_spare_states=fields.boolean("has_spare_states"),
    )


def _member(content: object, where: str) -> Member:
    fields = _Fields(content, where)
    fields.check_keys(_MEMBER_KEYS)
    shape = _shape(fields, where)
    return Member(fields.text("fqn"), shape, fields.integer("offset", least=0), _cuts(content, list(shape), where))


def _shape(fields: _Fields, where: str) -> tuple[int, ...]:
    shape = fields.items("shape")
    sizes: list[int] = []
    for size in shape:
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise PlanError(f"{where}: shape must be a list of sizes, got {shape!r}")
        sizes.append(size)
    return tuple(sizes)


def _cuts(content: object, shape: list[int], where: str) -> tuple[AxisCut, ...]:
    told = content.get("cuts", {}) if isinstance(content, Mapping) else {}
    fields = _Fields(told, f"{where}, cuts")
    fields.check_keys(AXES)
    cuts = tuple(AxisCut(axis, fields.integer(axis, least=0)) for axis in AXES if axis in told)
    if len({cut.dim for cut in cuts}) < len(cuts) or any(cut.dim >= len(shape) for cut in cuts):
        raise PlanError(f"{where}: cuts must name different dimensions of shape {shape}, got {told!r}")
    return cuts


def _check_layout(plan: Plan) -> None:
    """What the runtime relies on and JSON types cannot say."""
    if plan.grad_reuses_compute_shard and plan.update_timing is UpdateTiming.INSIDE_BACKWARD:
        raise PlanError("grad_reuses_compute_shard and updates inside backward exclude each other")
    plan.mesh.check()
    problem = problem_of_places(plan)
    if problem is not None:
        raise PlanError(problem)
    names = [block.name for block in plan.activations]
    for name in names:
        if names.count(name) > 1:
            raise PlanError(f"activations: block {name} is there twice")
    seen: set[str] = set()
    multiple = plan.world_size * ALIGN_NUMEL
    needed_blocks = 0
    for index, chunk in enumerate(plan.chunks):
        if chunk.id != index:
            raise PlanError(f"chunk {index} has id {chunk.id}: ids must count up from 0")
        if chunk.is_update_streamed and chunk.optim_tier is Tier.GPU:
            raise PlanError(f"chunk {index} has its states on the GPU: there is nothing to stream")
        if chunk.numel % multiple:
            raise PlanError(f"chunk {index} has {chunk.numel} elements, not a multiple of {multiple}")
        if not chunk.is_persistent:
            needed_blocks = max(needed_blocks, plan.blocks_of(index))
        if any(axes_of(member.cuts) != chunk.axes for member in chunk.members):
            raise PlanError(f"chunk {index} holds parameters that are cut along different axes")
        end = 0
        for member in chunk.members:
            if member.fqn in seen:
                raise PlanError(f"parameter {member.fqn} is in the plan twice")
            seen.add(member.fqn)
            if member.offset % ALIGN_NUMEL:
                raise PlanError(f"{member.fqn} starts at {member.offset}, not a multiple of {ALIGN_NUMEL}")
            if member.offset < end or member.offset + member.numel > chunk.numel:
                raise PlanError(f"{member.fqn} does not fit where chunk {index} puts it")
            end = member.offset + member.numel
    if plan.rcache_blocks < needed_blocks:
        raise PlanError(f"rcache_blocks is {plan.rcache_blocks}, but one chunk alone needs {needed_blocks}")


def _render(value: object, indent: str = "") -> str:
    """JSON with one member a line: an object or list without containers worth opening stays on its line."""
    flat = json.dumps(value)
    if not isinstance(value, (dict, list)) or not value or _is_leaf(value):
        return flat
    inner = indent + "  "
    if isinstance(value, dict):
        lines = [f"{inner}{json.dumps(key)}: {_render(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + _render(item, inner) for item in value) + f"\n{indent}]"


def _is_leaf(value: dict[str, object] | list[object]) -> bool:
    """Whether it is a member (its shape and cuts are its only containers) or a list of scalars."""
    if isinstance(value, list):
        return not any(isinstance(item, (dict, list)) for item in value)
    is_member = {"fqn", "shape", "offset"} <= set(value) <= set(_MEMBER_KEYS)
    return is_member or set(value) == set(_BLOCK_KEYS)

"""The options that a user can give: drawn as plain data, and turned into what module, optimizer and strategy take.
`NOT_DRAWN` has those that are not drawn, and why; `test_fuzz.py` knows whether one is missing in both."""

from __future__ import annotations

import dataclasses
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_elixir.plan.activations import Fate
from lightning_elixir.plan.hardware import HardwareSpec, save_hardware
from lightning_elixir.plan.io import save_plan
from lightning_elixir.plan.types import Plan
from lightning_elixir.strategy.config import ElixirConfig

if TYPE_CHECKING:
    from tests.fuzz.programs import Program

_MODEL = "it is the program itself"
_PROCESSES = "how processes begin: no number of a step depends on it, and each way takes seconds (tests/strategy)"
_PARALLEL = "cuts a model that is drawn for one rank; mixes.py draws models, sizes and placements together"
_NODES = "on one node every value is the same; mixes.py draws it with two nodes"
_PACKAGE = "a package of others', compiled on the spot; tests/runtime/test_nvme.py has both back ends"
NOT_DRAWN: dict[str, dict[str, str]] = {
    "ElixirModule": {
        "model": _MODEL,
        "search_result": "the plan, of which `Program.plan` has the arguments",
        "nvme_backend": _PACKAGE,
    },
    "ElixirOptimizer": {"module": _MODEL, "optimizer": "`Program.optimizer` names it"},
    "ElixirStrategy": {
        "tensor_parallel_size": _PARALLEL,
        "expert_parallel_size": _PARALLEL,
        "patterns": _PARALLEL,
        "sharding": _NODES,
        "nvme_backend": _PACKAGE,
        "accelerator": _PROCESSES,
        "parallel_devices": _PROCESSES,
        "cluster_environment": _PROCESSES,
        "process_group_backend": _PROCESSES,
        "start_method": _PROCESSES,
        "timeout": "a run in which it matters has failed, and how long a program may take is the campaign's to say",
        "checkpoint_io": "code of the user's that writes files; tests/strategy/test_checkpoint.py has some",
        "precision_plugin": "`Trainer(precision=...)` makes it",
    },
}
_SCALING = {
    "initial_scale": (1.0, 2.0**10, 2.0**24),
    "min_scale": (0.0, 0.5),
    "max_scale": (2.0**24, 2.0**30),
    "growth_factor": (1.5, 4.0),
    "backoff_factor": (0.25, 0.75),
    "growth_interval": (1, 2, 3),
    "hysteresis": (1, 2),
}
"""Of the loss scale. It is on with fp16 alone: elsewhere these must change nothing."""
_INITIAL_SCALES = (1.0, 2.0**10, 2.0**16, 2.0**18, 2.0**20, 2.0**24)
"""With fp16. Gradients of these programs overflow from about 2^18 on, with the largest in several steps."""
_KEPT = ("*head", "*norm", "*layers.0", "*body", "class:Linear", "class:LayerNorm", "where:0", "where:1", "where:2")
_KEPT_OF_AUTOCAST = ("*bias", "*weight", "*head.weight")
"""Parts of a module: without autocast its own operators refuse a mixture of dtypes."""

Drawn = tuple[tuple[str, Any], ...]


def draw_options(rng: random.Random, program: Program) -> tuple[Drawn, Drawn]:
    """Arguments of `make_plan`, and all others."""
    plan, options = _plan(rng, program), _module(rng, program)
    if plan.get("nvme_offload_fraction"):
        options["nvme_checksums"] = rng.random() < 0.3
    if program.dtype != "float32":
        options |= _mixed(rng, program)
    if program.through == "module":
        options |= _of_module_alone(rng, program)
    else:
        options |= _of_strategy_alone(rng, program, plan)
    if rng.random() < 0.1:
        options |= _scaling(rng)
    return tuple(sorted(plan.items())), tuple(sorted(options.items()))


def _plan(rng: random.Random, program: Program) -> dict[str, Any]:
    policy = rng.choice(("cpu", "cpu", "cpu", "cuda", "const", "auto"))
    is_adam = program.optimizer.startswith("hybrid")
    plan: dict[str, Any] = {"placement_policy": policy, "chunk_size": 1024 * rng.choice((2, 4, 8, 8, 16, 32))}
    if policy == "const":
        plan |= {
            "shard_param_frac": rng.choice((0.0, 0.5, 1.0)),
            "offload_optim_frac": rng.choice((0.0, 0.5, 1.0)),
            "offload_param_frac": rng.choice((0.0, 0.5)),
        }
        plan["offload_param_frac"] = min(plan["offload_param_frac"], plan["shard_param_frac"])
        if rng.random() < 0.2:
            plan["placement_policy"] = "static"
    if policy == "auto" and rng.random() < 0.4:
        plan["gpu_margin_mem_ratio"] = rng.choice((0.0, 0.3, 1.0))
    if rng.random() < 0.2:  # the size is searched for
        del plan["chunk_size"]
        plan["min_chunk_size"] = 1024 * rng.choice((2, 4, 8))
        if rng.random() < 0.5:
            plan["chunk_search_range"] = 1024 * rng.choice((0, 1, 16))
        if rng.random() < 0.5:
            plan["chunk_search_n_grids"] = rng.choice((1, 2, 7))
    if rng.random() < 0.3:
        plan["prefetch"] = False
    if rng.random() < 0.2:
        plan["enable_distributed_storage"] = False
    if is_adam and policy in ("cpu", "const") and rng.random() < 0.5:
        plan["nvme_offload_fraction"] = rng.choice((0.5, 1.0))
        if rng.random() < 0.5:
            plan["nvme_offload_param_fraction"] = rng.choice((0.5, 1.0))
    if is_adam:
        plan["update_timing"] = rng.choice(("after_backward", "behind_forward", "inside_backward"))
    return plan


def _module(rng: random.Random, program: Program) -> dict[str, Any]:
    """What module and strategy both have."""
    options: dict[str, Any] = {}
    if rng.random() < 0.15:
        options["force_outputs_fp32"] = True
    if rng.random() < 0.15:
        options["pin_memory"] = False
    if rng.random() < 0.1:
        options["use_fused_kernels"] = "auto"
    if rng.random() < 0.2:
        options["init_step"] = True
    if rng.random() < 0.1:  # it says nothing in fp32
        options["keep_fp32"] = ("*head",)
    return options


def _mixed(rng: random.Random, program: Program) -> dict[str, Any]:
    options: dict[str, Any] = {"autocast": rng.random() < 0.5}
    if program.ranks > 1 and rng.random() < 0.3:
        options["reduce_dtype"] = "float32"
    if rng.random() < 0.3:
        options["master_weights"] = False
    options["keep_fp32"] = None
    if rng.random() < 0.5:
        known = _KEPT + _KEPT_OF_AUTOCAST if options["autocast"] else _KEPT
        options["keep_fp32"] = tuple(rng.sample(known, rng.choice((0, 1, 1, 2, 3))))
    return {name: value for name, value in options.items() if value is not None}


def _of_module_alone(rng: random.Random, program: Program) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if rng.random() < 0.1:
        options["prefetch"] = False
    if program.ranks > 1 and rng.random() < 0.3:
        options["process_group"] = True
    if rng.random() < 0.2:
        options["num_update_threads"] = rng.choice((1, 2, 5))
    if not program.clip and rng.random() < 0.1:
        options["max_norm"] = program.clip_at
    return options


def _of_strategy_alone(rng: random.Random, program: Program, plan: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if rng.random() < 0.5:
        options["state_dict_type"] = "sharded"
        options["async_save"] = rng.random() < 0.5
    if rng.random() < 0.2:
        options["cpu_memory_limit"] = rng.choice(("2GiB", "tight"))
    if rng.random() < 0.2:
        options["report_dir"] = True
    if rng.random() < 0.2:
        options["hardware"] = rng.choice(("object", "file"))
    if rng.random() < 0.2:
        options["plan"] = rng.choice(("object", "file"))
    if "update_timing" in plan and rng.random() < 0.3:
        plan["update_timing"] = "auto"
    return options


def _scaling(rng: random.Random) -> dict[str, Any]:
    names = rng.sample(sorted(_SCALING), rng.randint(1, len(_SCALING)))
    return {name: rng.choice(_SCALING[name]) for name in sorted(names)}


def with_scaling(rng: random.Random, options: Drawn) -> Drawn:
    """The same for fp16, where the scale is on."""
    drawn = {**_scaling(rng), "initial_scale": rng.choice(_INITIAL_SCALES)}
    return tuple(sorted({**dict(options), **drawn}.items()))


def with_blocks(rng: random.Random, program: Program) -> Drawn:
    """The options of a program, some with fates of its outermost layers, or parameters that are in no chunk.

    Args:
        rng: One of its own, so that all else of a seed's program stays what it was.
        program: Has its other options.
    """
    options = dict(program.options)
    if rng.random() < 0.25:
        drawn = [(n, rng.choice(list(Fate)).value) for n in range(len(program.layers)) if rng.random() < 0.6]
        if sum(layer.kind == "compiled" for layer in program.layers) > 1:
            # They share code, of which torch may recompute another one's graph: under its own checkpoint, too
            # (pytorch#166926).
            stays = Fate.OFFLOAD.value
            drawn = [(n, stays if program.layers[n].kind == "compiled" else fate) for n, fate in drawn]
        if drawn:
            options["activations"] = tuple((f"body.layers.{n}", fate) for n, fate in drawn)
        elif program.through == "trainer" and "plan" not in options:
            options["activations"] = "auto"
    if program.dtype == "float32" and rng.random() < 0.1:
        known = ("*head", "*norm", "*bias", "*body.layers.0*", "*body.layers.1*")
        options["ignored"] = tuple(rng.sample(known[: 3 + len(program.layers[:2])], rng.choice((1, 1, 2))))
    return tuple(sorted(options.items()))


def recomputes(options: Drawn) -> bool:
    """Whether a block's forward runs once more in backward, of which plain PyTorch knows nothing."""
    value = dict(options).get("activations", ())
    return value == "auto" or any(Fate(fate).is_recomputed for _, fate in value)


def _fates(value: Any, above: str = "") -> Any:
    return value if isinstance(value, str) else {above + name: fate for name, fate in value}


# ---------------------------------------------------------------------------------------------------- as arguments


def module_options(program: Program, folder: str) -> dict[str, Any]:
    """Arguments of `ElixirModule` beside the model, the plan and the device."""
    options = dict(program.options)
    given = {name: options[name] for name in _MODULE if name in options}
    if "reduce_dtype" in given:
        given["reduce_dtype"] = getattr(torch, given["reduce_dtype"])
    if "process_group" in given:
        given["process_group"] = dist.new_group()  # with all ranks
    if "keep_fp32" in given:
        given["keep_fp32"] = [kept_entry(words) for words in given["keep_fp32"]]
    if "activations" in given:
        given["activations"] = _fates(given["activations"])
    if program.dtype != "float32":
        given["dtype"] = getattr(torch, program.dtype)
    if _is_on_nvme(program):
        given["nvme_offload_dir"] = folder
    return given


_MODULE = (
    "prefetch", "process_group", "use_fused_kernels", "master_weights", "keep_fp32", "autocast", "force_outputs_fp32",
    "reduce_dtype", "pin_memory", "nvme_checksums", "activations", "ignored",
)  # fmt: skip


def optimizer_options(program: Program) -> dict[str, Any]:
    """Arguments of `ElixirOptimizer` beside the module and the optimizer."""
    names = {*_SCALING, "init_step", "max_norm", "num_update_threads"}
    return {name: value for name, value in program.options if name in names}


def strategy_options(program: Program, folder: str, make_given_plan: Callable[[], Plan]) -> dict[str, Any]:
    """Arguments of `ElixirStrategy`, but for the limits of memory.

    Args:
        program: What they are for.
        folder: Where files go.
        make_given_plan: Makes what is handed over as `plan`, where that is drawn.
    """
    known = {f.name for f in dataclasses.fields(ElixirConfig)} - {"cpu_memory_limit"}
    options = {name: value for name, value in (*program.plan, *program.options) if name in known}
    options["autocast"] = program.option("autocast", False)  # as ElixirModule
    if "keep_fp32" in options:
        options["keep_fp32"] = [kept_entry(words) for words in options["keep_fp32"]]
    if "activations" in options:
        options["activations"] = _fates(options["activations"], "net.")
    if _is_on_nvme(program):
        options["nvme_offload_dir"] = str(Path(folder) / "nvme")
    if "report_dir" in options:
        options["report_dir"] = str(Path(folder) / "report")
    if "hardware" in options:
        options["hardware"] = _or_file(options["hardware"], _hardware(), save_hardware, Path(folder, "hardware.json"))
    if "plan" in options:
        options["plan"] = _or_file(options["plan"], make_given_plan(), save_plan, Path(folder, "plan.json"))
        for name in ("placement_policy", "shard_param_frac", "offload_optim_frac", "offload_param_frac", "chunk_size"):
            options.pop(name, None)  # the plan has them
    return options


def given_options(program: Program) -> dict[str, dict[str, Any]]:
    """By class, what a program passes, as it was drawn."""
    options = {**dict(program.plan), **dict(program.options)}
    if program.dtype != "float32":
        options["dtype"] = program.dtype
    if _is_on_nvme(program):
        options["nvme_offload_dir"] = "a folder"
    if program.through == "trainer":
        if program.is_tight:
            options["gpu_memory_limit"] = "tight"
        known = {f.name for f in dataclasses.fields(ElixirConfig)}
        return {"ElixirStrategy": {name: value for name, value in options.items() if name in known}}
    of_module = {name: options[name] for name in (*_MODULE, "dtype", "nvme_offload_dir") if name in options}
    return {"ElixirModule": {**of_module, "device": program.device}, "ElixirOptimizer": optimizer_options(program)}


def _is_on_nvme(program: Program) -> bool:
    return any(name.startswith("nvme") for name, _ in program.plan)


def _hardware() -> HardwareSpec:
    """Figures of a machine with a slow bus and a fast host."""
    nominal = HardwareSpec.nominal()
    return dataclasses.replace(nominal, name="drawn", cpu_adam_numel_per_s=nominal.gpu_adam_numel_per_s)


def _or_file(word: str, value: Any, save: Callable[[Any, Path], None], path: Path) -> Any:
    if word == "object":
        return value
    save(value, path)
    return str(path)


# ---------------------------------------------------------------------------------------------------- keep_fp32


def kept_entry(words: str) -> Any:
    """What a user passes: a glob, a class, or a function (name, module) -> bool."""
    kind, _, rest = words.rpartition(":")
    if kind == "class":
        return getattr(nn, rest)
    if kind == "where":
        return lambda name, module: is_where(int(rest), name, module)
    return words


def is_where(number: int, name: str, module: nn.Module) -> bool:
    """One in four of the layers without parts, by name; the Trainer's names begin with the model's own."""
    is_layer = next(module.children(), None) is None
    return is_layer and zlib.crc32(name.removeprefix("net.").encode()) % 4 == number

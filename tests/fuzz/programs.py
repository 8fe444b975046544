"""What a random program is: pure data, drawn from a seed, printable, and made simpler step by step.

`generate(seed)` draws a `Program`; `simpler(program)` gives the programs that have one thing less. `repr(program)`
shows what differs from the defaults, and `parse` reads it back.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Literal

from tests.fuzz.options import draw_options, recomputes, with_blocks, with_scaling

Through = Literal["module", "trainer"]

LEAVES = (
    "linear", "mlp", "conv1d", "conv2d", "addmm", "layer_norm", "rms_norm", "group_norm", "batch_norm", "attention",
    "mha", "encoder", "lstm", "gru", "product", "gated", "bmm", "einsum", "experts", "dropout", "weight_norm",
    "spectral_norm", "buffers", "borrowed", "functional_call", "position", "lora", "lora_addmm", "lookup", "alias",
    "save_param", "keep_param", "save_then_change", "in_place", "in_place_product", "no_grad", "detached", "bilinear",
    "parameter_list", "foreign_hooks",
)  # fmt: skip
NEED_FP32 = {"spectral_norm", "weight_norm", "batch_norm", "buffers", "experts", "lookup"}
"""Left out of 16-bit programs: they write parameters or buffers in a dtype of their own, or choose by a number, where a
rounding may choose something else."""
KEPT_UNASKED = {"batch_norm", "spectral_norm"}
"""Of these, what mixed precision leaves in fp32 by itself, so that it can be drawn there."""
HAVE_STATE = {"batch_norm", "buffers", "spectral_norm"}
"""Every forward changes a buffer, so a forward that is run again gives other numbers."""
GROUPS = (
    "sequential", "residual", "twice", "reentrant", "non_reentrant", "selective", "save_on_cpu", "hooks", "odd_steps",
    "no_grad_below", "module_dict",
)  # fmt: skip
COMPILED = "compiled"
"""A group of its own, which `compiled` puts around others."""
CHECKPOINTS = {"reentrant", "non_reentrant", "selective"}
HOOKS = ("forward", "pre", "backward", "tensor", "parameter", "after_accumulation")
FROZEN = ("all", "weight", "bias")
OPTIMIZERS = (
    "sgd", "momentum", "nesterov", "dampened", "adam", "adamw", "amsgrad", "rmsprop", "adagrad", "adadelta", "adamax",
    "nadam", "radam", "asgd", "rprop", "hybrid", "hybrid_adam",
)  # fmt: skip
BETWEEN_STEPS = (
    "read", "write", "copy", "assign", "row", "average", "swap_average", "state_dict", "load_state_dict", "deepcopy",
    "full_parameters", "evaluate", "no_grad_forward", "optimizer_state", "other_lr", "add_group", "resume", "replan",
    "freeze", "kept_alias", "numpy", "vector", "pickle", "part_forward", "stats", "sample", "load_optimizer_of_plain",
    "thread_read", "save",
)  # fmt: skip
BEFORE_STEP = ("drop_gradients", "drop_one_gradient", "no_step", "read_parameters", "grads", "forward_again")
AFTER_FORWARD = ("evaluate_between", "two_losses", "retained", "autograd_grad", "twice_forward", "double_backward")
FAULTS = ("raise_forward", "raise_backward", "raise_recomputation", "overwrite_saved", "write_between")
NOT_RECOMPUTED = {"raise_recomputation", "overwrite_saved"}
"""Of these, what plain PyTorch, which keeps everything, does not come to, or finds out by what it kept."""
P_GRAD = ("p_grad_read", "p_grad_write", "nan_guard", "torch_clip", "torch_clip_value")
"""What users do with `p.grad` between backward and step."""
WATCHERS = ("parameters", "gradients", "state_dict", "norms")
"""What a thread of the user's reads all the time, beside training."""


@dataclass(frozen=True, repr=False)
class _Shown:
    """Shows the fields that are not at their defaults, as an expression."""

    def __repr__(self) -> str:
        shown = []
        for f in fields(self):
            value = getattr(self, f.name)
            if f.default is MISSING or value != f.default:
                shown.append(f"{f.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class Layer(_Shown):
    """One layer, or a group of them."""

    kind: str
    inner: tuple[Layer, ...] = ()
    frozen: str = ""
    hook: str = ""
    arg: int = 0
    """What the kind makes of it: whose weight is borrowed, which variant is taken."""


@dataclass(frozen=True, repr=False)
class Action(_Shown):
    """Something that the user does in a step."""

    step: int
    name: str
    arg: int = 0
    """Which parameter, layer, ..."""


@dataclass(frozen=True, repr=False)
class Ending(_Shown):
    """What happens to a run, so that another one has to go on from its last checkpoint."""

    how: str
    step: int
    """In which it happens; a checkpoint is written after each step, over the one before."""
    moment: float
    """When, as a share of the time that a step and its checkpoint take; of a full disk, which share of the earlier
    checkpoint's bytes there is room for."""
    is_of_one: bool = False
    """It happens to the last rank alone."""


@dataclass(frozen=True, repr=False)
class Program(_Shown):
    """A whole run. Everything that is random in it is drawn from `seed` again."""

    seed: int
    layers: tuple[Layer, ...]
    width: int = 8
    inputs: str = "tokens"
    outputs: str = "tensor"
    loss: str = "cross_entropy"
    is_tied: bool = False
    steps: int = 3
    micro_batches: int = 1
    optimizer: str = "sgd"
    num_groups: int = 1
    schedule: str = ""
    sets_to_none: bool = True
    is_bare: bool = False
    """`loss.backward()`, of which nobody tells the engine."""
    is_unwrapped: bool = False
    """The model is called, and not the `ElixirModule` around it."""
    clip: str = ""
    clip_at: float = 0.5
    records_grads: bool = False
    actions: tuple[Action, ...] = ()
    ranks: int = 1
    through: Through = "module"
    dtype: str = "float32"
    device: str = "cpu"
    plan: tuple[tuple[str, Any], ...] = ()
    """Arguments of `make_plan`."""
    is_tight: bool = True
    """The rCache has as few blocks as the plan permits."""
    options: tuple[tuple[str, Any], ...] = ()
    """Arguments of `ElixirModule`, `ElixirOptimizer`, or `ElixirStrategy`, in the words of `options.py`."""
    watcher: str = ""
    end: Ending | None = None

    def at(self, step: int, names: tuple[str, ...]) -> list[Action]:
        return [a for a in self.actions if a.step == step and a.name in names]

    def leaves(self) -> Iterator[Layer]:
        yield from _leaves(self.layers)

    def option(self, name: str, default: Any = None) -> Any:
        return dict(self.options).get(name, default)

    def on_one_rank(self) -> Program:
        """The same there, where no group of processes is begun that could be given."""
        return replace(self, ranks=1, options=tuple(o for o in self.options if o[0] != "process_group"))


def _leaves(layers: tuple[Layer, ...]) -> Iterator[Layer]:
    for layer in layers:
        if layer.inner:
            yield from _leaves(layer.inner)
        else:
            yield layer


def kinds_in(layers: tuple[Layer, ...]) -> set[str]:
    """Of all layers and groups."""
    found: set[str] = set()
    for layer in layers:
        found |= {layer.kind} | kinds_in(layer.inner)
    return found


def parse(text: str) -> Program:
    """What `repr` of a program gave."""
    program = eval(text, {"Program": Program, "Layer": Layer, "Action": Action, "Ending": Ending})
    if not isinstance(program, Program):
        raise TypeError(f"not a program: {text[:60]}")
    return program


# ---------------------------------------------------------------------------------------------------- drawing


@dataclass(frozen=True)
class Draw:
    """What may be drawn.

    Args:
        ranks: Numbers of ranks to choose from.
        device: Where to compute.
        through: Only this; None: mostly the module.
        dtype: Only this; None: mostly float32.
        is_compiled: Some of the layers are compiled.
    """

    ranks: tuple[int, ...] = (1,)
    device: str = "cpu"
    through: Through | None = None
    dtype: str | None = None
    is_compiled: bool = False


def generate(seed: int, draw: Draw | None = None) -> Program:
    """The program of a seed: the same one for ever, as long as this file stays as it is."""
    draw = draw or Draw()
    rng = random.Random(seed)
    of_fp16 = random.Random(f"{seed} fp16")  # of its own: a seed gives what it gave before there was fp16
    drawn = "bfloat16" if rng.random() < 0.2 else "float32"
    dtype = draw.dtype or ("float16" if drawn == "bfloat16" and of_fp16.random() < 0.5 else drawn)
    through: Through = draw.through or ("trainer" if rng.random() < 0.2 else "module")
    optimizer = rng.choice(OPTIMIZERS)
    if draw.device == "cuda":  # others have other roundings where their states are on the host
        optimizer = rng.choice(("hybrid", "hybrid", "hybrid_adam", "sgd"))
    steps = rng.randint(2, 5)
    micro_batches = rng.choice((1, 1, 1, 2, 3))
    layers = tuple(_layer(rng, depth=0, dtype=dtype) for _ in range(rng.randint(3, 8)))
    clip = rng.choice(("", "", "", "norm", "value"))
    program = Program(
        seed=seed,
        layers=layers,
        width=rng.choice((8, 8, 16, 24)),
        inputs=rng.choice(("tokens", "floats", "both")),
        outputs=rng.choice(("tensor", "tuple", "dict", "dataclass")),
        loss=rng.choice(("cross_entropy", "square")),
        is_tied=rng.random() < 0.3,
        steps=steps,
        micro_batches=micro_batches,
        optimizer=optimizer,
        num_groups=rng.choice((1, 1, 2, 3)),
        schedule=rng.choice(("", "", "step", "cosine", "lambda")),
        sets_to_none=rng.random() < 0.8,
        clip=clip,
        clip_at=rng.choice((0.02, 0.5, 5.0)),
        ranks=rng.choice(draw.ranks),
        through=through,
        dtype=dtype,
        device=draw.device,
        is_tight=rng.random() < 0.8,
    )
    actions = _actions(rng, steps, dtype)
    # Plain PyTorch finds out in the middle of backward, where buffers may have moved, and gradients be there to zero.
    if kinds_in(layers) & HAVE_STATE or not program.sets_to_none:
        actions = tuple(a for a in actions if a.name != "write_between")
    if through == "module":
        program = replace(
            program,
            is_bare=rng.random() < 0.2,
            is_unwrapped=rng.random() < 0.1 and dtype == "float32",
            records_grads=rng.random() < 0.4,
            actions=actions,
        )
    else:
        program = replace(program, actions=tuple(a for a in actions if a.name not in NOT_IN_TRAINER))
    if rng.random() < 0.12:
        program = replace(program, watcher=rng.choice(WATCHERS))
    plan, options = draw_options(rng, program)
    if dtype == "float16":
        options = with_scaling(of_fp16, options)
        if through == "trainer":  # the hook that does it comes when the scale has been taken out
            program = replace(program, actions=tuple(a for a in program.actions if a.name != "forward_again"))
    if dtype != "float32" and not dict(options).get("master_weights", True):  # nothing is kept in fp32 then
        program = replace(program, layers=_without(layers, KEPT_UNASKED))
    program = replace(program, plan=plan, options=options)
    program = compiled(program) if draw.is_compiled else program  # before its layers are named
    program = replace(program, options=with_blocks(random.Random(f"{seed} blocks"), program))
    if recomputes(program.options):
        program = replace(program, actions=tuple(a for a in program.actions if a.name not in NOT_RECOMPUTED))
    return program


def compiled(program: Program) -> Program:
    """The same with half of the outermost layers compiled, one by one or several as one."""
    rng = random.Random(f"{program.seed} compiled")
    layers: list[Layer] = []
    for layer in program.layers:
        if layers and layers[-1].kind == COMPILED and rng.random() < 0.4:
            layers[-1] = replace(layers[-1], inner=(*layers[-1].inner, layer))
        elif rng.random() < 0.6:
            layers.append(Layer(COMPILED, (layer,), arg=rng.randrange(8)))
        else:
            layers.append(layer)
    return replace(program, layers=tuple(layers))


def _without(layers: tuple[Layer, ...], kinds: set[str]) -> tuple[Layer, ...]:
    """The same, with linear layers in the place of these."""
    kept = ("linear" if x.kind in kinds else x.kind for x in layers)
    return tuple(replace(x, kind=kind, inner=_without(x.inner, kinds)) for x, kind in zip(layers, kept, strict=True))


def _layer(rng: random.Random, depth: int, dtype: str) -> Layer:
    if depth < 3 and rng.random() < (0.4, 0.35, 0.25)[depth]:
        inner = tuple(_layer(rng, depth + 1, dtype) for _ in range(rng.randint(1, 3)))
        return Layer(rng.choice(GROUPS), inner, arg=rng.randrange(8))
    kinds = [k for k in LEAVES if dtype == "float32" or k not in NEED_FP32 - KEPT_UNASKED]
    frozen = rng.choice(FROZEN) if rng.random() < 0.25 else ""
    hook = rng.choice(HOOKS) if rng.random() < 0.12 else ""
    return Layer(rng.choice(kinds), frozen=frozen, hook=hook, arg=rng.randrange(8))


def _actions(rng: random.Random, steps: int, dtype: str) -> tuple[Action, ...]:
    names: list[str] = []
    for pool, chance in ((BETWEEN_STEPS, 0.6), (BEFORE_STEP, 0.3), (AFTER_FORWARD, 0.3), (FAULTS, 0.3)):
        while rng.random() < chance:
            names.append(rng.choice(pool))
    if rng.random() < 0.4:
        names.append(rng.choice(P_GRAD))
    if dtype != "float32":  # what the oracle of mixed precision knows
        names = [n for n in names if n in MIXED_ACTIONS]
    drawn = (Action(rng.randrange(steps), n, rng.randrange(64)) for n in names)
    return tuple(sorted(drawn, key=lambda a: (a.step, a.name == "resume")))  # what a Trainer goes on from is its last


MIXED_ACTIONS = {
    "read", "state_dict", "deepcopy", "evaluate", "no_grad_forward", "optimizer_state", "other_lr", "resume", "replan",
    "drop_gradients", "read_parameters", "raise_forward", "raise_backward", "raise_recomputation", "evaluate_between",
    "stats", "sample", "write", "row", "part_forward", "average", "swap_average", "save", "thread_read", *P_GRAD,
    "drop_one_gradient", "grads", "no_step", "forward_again", "retained", "two_losses", "twice_forward",
}  # fmt: skip


NOT_IN_TRAINER = {
    "replan": "a strategy has no such call: it moves by itself",
    "optimizer_state": "Lightning loads the states of optimizers when a fit begins: `resume`",
    "load_optimizer_of_plain": "the same",
}
"""Actions that no user of a Trainer has, and why."""


# ---------------------------------------------------------------------------------------------------- making simpler


def simpler(program: Program) -> Iterator[Program]:
    """Programs with one thing less, the largest things first."""
    if program.ranks > 1:
        yield program.on_one_rank()
    if program.through != "module":
        yield replace(program, through="module")
    if program.watcher:
        yield replace(program, watcher="")
    if program.actions:
        yield replace(program, actions=())
    for index in range(len(program.actions)):
        yield replace(program, actions=program.actions[:index] + program.actions[index + 1 :])
    if program.steps > 1:
        fewer = program.steps - 1
        yield replace(program, steps=fewer, actions=tuple(a for a in program.actions if a.step < fewer))
        later = tuple(replace(a, step=max(0, a.step - 1)) for a in program.actions)
        yield replace(program, steps=fewer, actions=later)
    for layers in _fewer(program.layers):
        yield replace(program, layers=layers)
    for f in fields(Program):
        value = getattr(program, f.name)
        if f.name in _KEPT or f.default is MISSING or value == f.default:
            continue
        yield replace(program, **{f.name: f.default})
    for name in ("plan", "options"):
        entries = getattr(program, name)
        for index in range(len(entries)):
            if entries[index][0] not in ("placement_policy", "chunk_size"):
                yield replace(program, **{name: entries[:index] + entries[index + 1 :]})


_KEPT = {"seed", "layers", "steps", "actions", "ranks", "through", "plan", "options", "device", "is_tight", "watcher"}
_KEPT |= {"end"}


def _fewer(layers: tuple[Layer, ...]) -> Iterator[tuple[Layer, ...]]:
    for index, layer in enumerate(layers):
        before, after = layers[:index], layers[index + 1 :]
        yield before + after
        if layer.inner:
            yield before + layer.inner + after
            for inner in _fewer(layer.inner):
                if inner:
                    yield (*before, replace(layer, inner=inner), *after)
        if layer.frozen:
            yield (*before, replace(layer, frozen=""), *after)
        if layer.hook:
            yield (*before, replace(layer, hook=""), *after)
        if not layer.inner and layer.kind != "linear":
            yield (*before, replace(layer, kind="linear"), *after)

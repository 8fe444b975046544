"""Blocks whose activations a plan has kept, recomputed or sent to host memory: how their calls run.

[Note: whose activations] A plan speaks of a block's outermost call in a forward with gradients. Inside a block, what
the user has wins: a checkpoint or hooks for saved tensors there get what they get in plain PyTorch. Around it, too:
under the user's own checkpoint or hooks, in a recomputation, in a backward, under transforms of `torch.func`, a block
runs as it is. transformers' own switch (`gradient_checkpointing_enable`) is off for the blocks that a plan names, for
as long as it does: what the plan says is done instead.

A recomputed block computes what it has computed (`recomputing.py`). Caches of keys and values that are empty are kept
out of the blocks, as transformers does for those that it checkpoints: they would be filled twice, or hold on to what
shall go. That is so whatever becomes of a block's activations, since a cache may change the last bits. With anything in
it, the block runs as it is.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Collection
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_elixir.core.checkpointing import is_switched_on, switch_off, switch_on
from lightning_elixir.core.compiled_modules import compiled_regions
from lightning_elixir.core.module_hooks import class_forward
from lightning_elixir.errors import PlanError
from lightning_elixir.plan.activations import Fate, ModelBlock, has_offloaded, less_activations
from lightning_elixir.plan.memory import Budget
from lightning_elixir.plan.regime import TrainingRegime
from lightning_elixir.plan.simulator.timeline import plan_use
from lightning_elixir.plan.types import Plan
from lightning_elixir.runtime.hooks import Around, SavedTensors
from lightning_elixir.runtime.offloading import Offloader
from lightning_elixir.runtime.phases import Phase
from lightning_elixir.runtime.recomputing import Recomputed

if TYPE_CHECKING:
    from lightning_elixir.runtime.engine import Engine

log = logging.getLogger(__name__)

_CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")  # of transformers, by name; see `_is_cache`
_SWITCH = "use_cache"  # for caches, also for states in the modules themselves (RecurrentGemma)


class Activations:
    """What becomes of the activations of an engine's blocks.

    Args:
        engine: Whose model has the blocks.
        saved: Packs what autograd saves of chunks.
    """

    def __init__(self, engine: Engine, saved: SavedTensors) -> None:
        self._engine = engine
        self._saved = saved
        self._blocks: tuple[ModelBlock, ...] = ()
        self._switched_off: list[nn.Module] = []
        self.offloader = Offloader(engine.device, engine.host_memory, saved, engine.moved, engine.host_bytes)
        self._host: tuple[Budget, TrainingRegime] | None = None
        self._is_offloading = False
        self._has_told = False
        self._withheld: dict[nn.Module, weakref.ref[Any]] = {}  # by block, the cache that it was last called without
        self._has_told_of_caches = False
        self._unchunked: list[nn.Parameter] = []
        self._compiled: frozenset[nn.Module] = frozenset()

    def adopt(self, plan: Plan) -> list[tuple[nn.Module, Around]]:
        """Take up what a plan says.

        Returns:
            Modules, and what is to run around their calls.

        Raises:
            PlanError: The plan names a block that the model has not got.
        """
        modules = dict(self._engine.module.named_modules())
        missing = [block.name for block in plan.activations if block.name not in modules]
        if missing:
            raise PlanError(
                f"activations: the plan names {', '.join(missing[:3])}, which the model has not got: make a plan of"
                " this model"
            )
        if plan.activations != self._blocks:
            self._note_compiled([modules[b.name] for b in plan.activations if b.fate is Fate.KEEP_ATTENTION])
            self._follow([block.name for block in plan.activations])
            self._engine.iterations.outdate()
        self._blocks = plan.activations
        self._is_offloading = has_offloaded(plan.activations)
        self._unchunked = [p for p in self._engine.module.parameters() if self._engine.home_of(p) is None]
        self._limit_pool(plan)
        return [
            (module := modules[b.name], partial(self._run, _possible(b.fate, module), Recomputed(module)))
            for b in plan.activations
        ]

    @property
    def has_host_limit(self) -> bool:
        """Whether anything but the plan, and what the host has, limits what activations take there."""
        return self._host is not None

    def limit_host(self, budget: Budget, regime: TrainingRegime) -> None:
        """Have activations keep within a budget of host memory, beside all else that the plan has there; those of later
        plans, too. What a plan has foreseen for them may take all of the budget; what none has foreseen, what can be
        done without: `Budget.most_with_spares`.

        Args:
            budget: Of this rank.
            regime: What training is like, for what optimizers will take.
        """
        self._host = budget, regime
        self._limit_pool(self._engine.plan)

    def _limit_pool(self, plan: Plan) -> None:
        pool, foreseen = self.offloader.pool, plan.activation_host_bytes
        pool.limit_bytes, pool.rank_limit_bytes = foreseen if self._is_offloading else 0, None
        if self._is_offloading and self._host is not None:
            budget, regime = self._host
            most = budget.most_with_spares if foreseen is None else budget.cpu_bytes
            if most is not None:
                room = max(0, most - plan_use(plan, regime).host_chunk_bytes)
                pool.limit_bytes = room if foreseen is None else min(room, foreseen)
                pool.rank_limit_bytes = most
        if pool.limit_bytes is not None and pool.held_bytes > pool.limit_bytes:
            pool.drop_free()

    def cure(self) -> str:
        """What would have a step take less of the device than it does under the plan in force: words for an error;
        empty if there is nothing of that kind."""
        recomputes = is_switched_on(self._engine.module)
        return less_activations(self._engine.plan.activations, recomputes_by_itself=recomputes)

    def begin_forward(self) -> None:
        """A forward of the model begins."""
        if self._is_offloading and torch.is_grad_enabled():
            # Buffers, and parameters in no chunk, which are saved as views of themselves.
            staying = (*self._engine.module.buffers(), *self._unchunked)
            plain = (t for t in staying if t.layout is torch.strided and type(t) in (Tensor, nn.Parameter))
            self.offloader.begin_forward({t.untyped_storage()._cdata for t in plain})

    def end_backward(self) -> None:
        """A backward is over."""
        if self._is_offloading:
            self.offloader.end_backward()

    def rest(self) -> None:
        """Give back host memory that is not in use."""
        self.offloader.pool.drop_free()

    def close(self) -> None:
        """Leave the model as it was."""
        switch_on(self._switched_off)
        self._switched_off = []
        self._withheld.clear()
        self.rest()

    def _follow(self, names: Collection[str]) -> None:
        """Have transformers' own switch off for these blocks, and for no others."""
        switch_on(self._switched_off)
        self._switched_off = switch_off(self._engine.module, names)
        if self._switched_off:
            log.info(
                "the model has gradient checkpointing on (gradient_checkpointing_enable): `activations` says what"
                " becomes of its %d blocks instead, as long as the engine lives",
                len(names),
            )

    def _note_compiled(self, blocks: Collection[nn.Module]) -> None:
        """Of these, whose attention is to be kept, none is told apart in compiled code."""
        self._compiled = frozenset()
        if blocks:
            self._compiled = frozenset(r.entrance for r in compiled_regions(self._engine.module)).intersection(blocks)
        if self._compiled:
            log.warning(
                "activations: '%s' keeps nothing of %d compiled blocks, which are recomputed with their attention: what"
                " is inside compiled code cannot be told apart",
                Fate.KEEP_ATTENTION.value,
                len(self._compiled),
            )

    # A call of a block

    def _run(
        self, fate: Fate, block: Recomputed, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        module = block.module
        if not self._applies():
            if fate is not Fate.KEEP and not self._has_told and self._is_left_to_the_user():
                self._has_told = True
                log.warning(
                    "activations: %s runs under a checkpoint, or under hooks for saved tensors, of the model's own,"
                    " which decide: '%s' does nothing there",
                    type(module).__name__,
                    fate.value,
                )
            return call(*args, **kwargs)
        without = _without_caches(module, args, kwargs)
        if without is None:
            return call(*args, **kwargs)
        self._note_withheld(module, args, kwargs)
        args, kwargs = without
        run = partial(call, *args, **kwargs)
        if fate.is_recomputed:
            self._engine.moved.recomputed_blocks += 1
            keeps_attention = fate is Fate.KEEP_ATTENTION and module not in self._compiled
            run = partial(block.run, call, args, kwargs, keeps_attention=keeps_attention)
        if fate.is_offloaded:
            run = partial(self.offloader.run, run)
        return run() if fate is Fate.KEEP else self._engine.forwards.run_block(run)

    def _note_withheld(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Warn of a cache that comes to a block again, and would hold what the block has put there before."""
        if self._has_told_of_caches:
            return
        for given in filter(_is_cache, (*args, *(kwargs.get(name) for name in _CACHES))):
            before = self._withheld.get(module)
            if before is not None and before() is given:
                self._has_told_of_caches = True
                log.warning(
                    "activations: %s was given the same cache of keys and values twice in forwards with gradients,"
                    " which do not fill it. Where a later forward is to see what an earlier one kept, the numbers are"
                    " not those of plain PyTorch: leave these blocks out of `activations`",
                    type(module).__name__,
                )
            self._withheld[module] = weakref.ref(given)

    def _is_left_to_the_user(self) -> bool:
        """Whether the user's own hooks or checkpoint around a block are all that a plan gives way to now."""
        # A reentrant checkpoint runs its forward without gradients; that it is one shows in backward.
        is_in_backward = torch._C._current_graph_task_id() != -1
        return torch.is_grad_enabled() and (is_in_backward or not self._saved.is_alone())

    def _applies(self) -> bool:
        """Whether a call that begins now is one that the plan speaks of."""
        return (
            torch.is_grad_enabled()
            and self._engine.phase is not Phase.CLOSED
            and torch._C._current_graph_task_id() == -1
            and self._saved.is_alone()
            and not torch._C._functorch.get_interpreter_stack()
            and torch._C._get_tracing_state() is None
            and not torch.compiler.is_compiling()
        )


def _possible(fate: Fate, module: nn.Module) -> Fate:
    """What can become of what a block saves: `nn.RReLU` saves its noise before it has drawn it, so that copies would
    hold anything."""
    if fate is not Fate.OFFLOAD or not any(isinstance(part, nn.RReLU) for part in module.modules()):
        return fate
    log.warning("activations: what %s saves stays on the device: a copy of nn.RReLU's is wrong", type(module).__name__)
    return Fate.KEEP


_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _without_caches(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments | None:
    """The arguments of a block without caches of keys and values that hold nothing for it; None if one does."""
    found = {name: kwargs[name] for name in _CACHES if kwargs.get(name) is not None}
    caches = [*found.values(), *filter(_is_cache, args)]
    forward = class_forward(module)
    switched_on = [i for i, value in enumerate(args) if value is True and _parameter(forward, i) == _SWITCH]
    if not caches and not switched_on and not kwargs.get(_SWITCH):
        return args, kwargs
    layers = (vars(part).get("layer_idx") for part in module.modules())
    layer = next((index for index in layers if index is not None), 0)
    if not all(_is_cache(one) and _holds_nothing(one, layer) for one in caches):
        return None
    changes: dict[str, Any] = dict.fromkeys(found)
    if kwargs.get(_SWITCH):
        changes[_SWITCH] = False
    given = (None if _is_cache(value) else False if i in switched_on else value for i, value in enumerate(args))
    return tuple(given), kwargs | changes


@cache
def _parameter(forward: Callable[..., Any], place: int) -> str:
    """The name of what a module's forward is given at that place; empty: it has none."""
    try:
        names = [*inspect.signature(forward).parameters][1:]
    except (TypeError, ValueError):  # no function of Python's
        return ""
    return names[place] if place < len(names) else ""


def _holds_nothing(cache: Any, layer: int) -> bool:
    """Of a block with that number. Caches of hybrid models have a part for each layer, and no length where that keeps a
    state (linear attention, Mamba, convolutions) or nothing (experts)."""
    parts = getattr(cache, "layers", None)
    if not isinstance(parts, list) or layer >= len(parts):
        return bool(cache.get_seq_length(layer) == 0)
    states = getattr(parts[layer], "has_previous_state", False)
    if any(states.values()) if isinstance(states, dict) else states:
        return False
    return not _is_cache(parts[layer]) or bool(parts[layer].get_seq_length() == 0)


def _is_cache(value: Any) -> bool:
    """Without a name, as GPT-2 of transformers 4 is given it, a cache is known by its method."""
    return hasattr(value, "get_seq_length")

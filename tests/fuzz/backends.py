"""Two ways to run one program: plain PyTorch, and the engine. What differs between them is here, and nothing else."""

from __future__ import annotations

import copy
import io
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_elixir.errors import CapacityError
from lightning_elixir.plan.types import Plan, UpdateTiming
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.fuzz.build import Net, make_model, make_optimizer, make_schedule
from tests.fuzz.kept import cast_around, kept_names
from tests.fuzz.options import module_options, optimizer_options
from tests.fuzz.programs import Program
from tests.fuzz.scale import Scale, has_scale
from tests.helpers.plans import make_plan

COUNTED = (
    "fetches", "prefetches", "hits", "evictions", "overflows", "misses_of_trace", "nvme_read_bytes",
    "recomputed_blocks", "activations_out_bytes", "activations_in_bytes", "activations_left_bytes",
)  # fmt: skip


class Plain:
    """The oracle. Mixed precision: the model in 16 bits, the optimizer over an fp32 master; gradients of several
    backwards are added up in fp32. With several ranks, gradients are averaged after every backward. With fp16 the sums
    have the loss scale in them until something needs them without, as with `torch.amp.GradScaler`."""

    is_engine = False

    def __init__(self, program: Program, rank: int, *, jitter: int = 0) -> None:
        self.program, self.rank, self._jitter = program, rank, jitter
        self.dtype: torch.dtype = getattr(torch, program.dtype)
        self.is_half = self.dtype.itemsize == 2
        self.is_mixed = self.is_half and program.option("master_weights", True)
        self.counters: Counter[str] = Counter()
        self.build()

    def build(self, variant: int = 0) -> None:
        self.model: Net = make_model(self.program)
        self._has_own_statistics = self._is_inside_step = False
        self._adopt()

    def _adopt(self) -> None:
        self.named = dict(self.model.named_parameters())
        self.sums: dict[str, Tensor] = {}
        self.scale = Scale(self.program) if has_scale(self.program) else None
        self._is_unscaled = self._is_overflow = False
        """Of the sums."""
        self._is_skipped = False
        self.masters: dict[str, Tensor] = {}
        kept = kept_names(self.program, self.model) if self.is_half else set()
        if self.is_half and not self.program.option("autocast"):
            cast_around(self.model, kept, self.dtype)
        generator = torch.Generator().manual_seed(self._jitter)
        for name, p in self.named.items():
            is_fp32 = not self.is_half or name in kept
            if self._jitter:
                _jitter(p, torch.float32 if is_fp32 else self.dtype, generator)
            if is_fp32:
                continue
            if self.is_mixed and p.requires_grad:
                self.masters[name] = p.detach().clone().requires_grad_()
            p.data = p.data.to(self.dtype)
        self.optimizer = make_optimizer(self.program, self.targets().items())
        self.schedule = make_schedule(self.program, self.optimizer)

    def targets(self) -> dict[str, Any]:
        """What the optimizer holds."""
        return {name: self.masters.get(name, p) for name, p in self.named.items()}

    def __call__(self, **batch: Tensor) -> Any:
        self.before_forward()
        if not self.is_half:
            return self.model(**batch)
        if self.program.option("autocast"):
            with self._autocast():
                return self.model(**batch)
        return self.model(**{k: v.to(self.dtype) if v.is_floating_point() else v for k, v in batch.items()})

    def _autocast(self) -> AbstractContextManager[None]:
        # As the engine's: with the cache, gradients of several uses of an fp32 weight are added up in 16 bits.
        return torch.autocast(self.program.device, self.dtype, cache_enabled=False)

    @contextmanager
    def around_steps(self) -> Iterator[None]:
        """What a Trainer has around what follows a training step's first forward in it."""
        is_trainers = self.program.through == "trainer"
        has_autocast = is_trainers and self.is_half and self.program.option("autocast")
        self._is_inside_step = is_trainers
        try:
            with self._autocast() if has_autocast else nullcontext():
                yield
        finally:
            self._is_inside_step = False

    def before_forward(self) -> None:
        """What is written to 16-bit parameters counts, and, as with DDP, running statistics are those of rank 0: in a
        Trainer when a training step begins, however many forwards it runs, with gradients or without."""
        self._absorb()
        if self._is_inside_step:
            return
        tracking = [m for m in self.model.modules() if getattr(m, "track_running_stats", False)]
        if self._has_own_statistics:
            for module in tracking:
                for buffer in module.buffers(recurse=False):
                    dist.broadcast(buffer, 0)
        self._has_own_statistics = self.program.ranks > 1 and bool(tracking) and torch.is_grad_enabled()

    # Gradients

    def backward(self, loss: Tensor, **options: Any) -> None:
        # What one backward gives is added to earlier ones as a whole: within it, reentrant checkpointing adds
        # to a shared parameter several times, and where that meets an earlier sum only the rounding differs.
        earlier = {name: p.grad for name, p in self.named.items()}
        for p in self.named.values():
            p.grad = None
        if self.scale is not None:
            loss = loss * self.scale.value
        try:
            loss.backward(**options)
        except BaseException:  # what it has put down counts as a gradient: zero_grad(set_to_none=False) makes it zeros
            self._add_to(earlier, {name: p.grad for name, p in self.named.items()})
            raise
        self._add_to(earlier, {name: self._averaged(p) for name, p in self.named.items()})

    def _add_to(self, earlier: dict[str, Tensor | None], grads: dict[str, Tensor | None]) -> None:
        for name, p in self.named.items():
            grad = grads[name]
            if self.is_half:
                p.grad = None
                if grad is not None:
                    before = self.sums.get(name)
                    self.sums[name] = grad if before is None else before.float() + grad
            else:
                before = earlier[name]
                p.grad = grad if before is None else before if grad is None else before + grad

    def _averaged(self, p: nn.Parameter) -> Tensor | None:
        if self.program.ranks == 1 or not p.requires_grad:
            return p.grad
        is_used = torch.tensor(0.0 if p.grad is None else 1.0, device=p.device)
        dist.all_reduce(is_used)
        if not is_used:
            return None
        grad = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        if self.program.option("reduce_dtype") == "float32":
            grad = grad.float()  # and so it stays
        # In the order of ranks, and fp32, as the engine sums: where three are added, the order shows.
        rows = [torch.empty_like(grad) for _ in range(self.program.ranks)]
        dist.all_gather(rows, grad.contiguous())
        total = rows[0].to(torch.promote_types(torch.float32, grad.dtype), copy=True)
        for row in rows[1:]:
            total.add_(row)
        return total.div_(self.program.ranks).to(grad.dtype)

    def grads(self) -> dict[str, Tensor]:
        if self.is_half:
            factor = 1.0 if self.scale is None or self._is_unscaled else 1.0 / self.scale.value
            return {name: (g.float() * factor).cpu() for name, g in self.sums.items()}
        return {name: p.grad.detach().float().cpu() for name, p in self.named.items() if p.grad is not None}

    def drop_gradient(self, name: str) -> None:
        self.sums.pop(name, None)
        self.named[name].grad = None

    def zero_grad(self) -> None:
        sets_to_none = self.program.sets_to_none or self.program.through == "trainer"  # which says nothing
        self.sums = {} if sets_to_none else {name: torch.zeros_like(g) for name, g in self.sums.items()}
        self._is_unscaled = False
        if self.program.through == "module":  # Lightning has told the scaler already, which forgets nothing
            self._is_overflow = False
        self.optimizer.zero_grad(sets_to_none)
        self.model.zero_grad(sets_to_none)

    def drop_gradients(self) -> None:
        """As a user does through the model."""
        self.sums = {}
        self.model.zero_grad()

    def unscale(self) -> None:
        """Take the loss scale out of the sums that the optimizer will see, and find out whether they are finite: what
        is done to them later has no say in that."""
        if self.scale is None or self._is_unscaled:
            return
        own = {id(p) for p in self._optimized()}
        for name, target in self.targets().items():
            if name in self.sums and id(target) in own:
                self._is_overflow |= not bool(self.sums[name].isfinite().all())
                self.sums[name] = self.sums[name].float() * (1.0 / self.scale.value)
        self._is_unscaled = True

    def _for_optimizer(self) -> None:
        """Gradients to where the optimizer looks for them."""
        if self.is_half:
            for name, target in self.targets().items():
                total = self.sums.get(name)
                target.grad = None if total is None else total.to(target.dtype)

    def _optimized(self) -> list[Any]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def clip_norm(self, most: float) -> float:
        """`clip_grad_norm_`, with the norm in fp64: torch's fp32 norm depends on where parameters end."""
        self.unscale()
        self._for_optimizer()
        if self.is_half:  # with all the bits that the sums have
            own = {id(p) for p in self._optimized()}
            grads = [self.sums[name] for name, t in self.targets().items() if name in self.sums and id(t) in own]
        else:
            grads = [p.grad for p in self._optimized() if p.grad is not None]
        norm = math.sqrt(math.fsum(float(g.double().square().sum()) for g in grads))
        self._change(lambda g: g.mul_(min(1.0, most / (norm + 1e-6))))
        return float(torch.tensor(norm))  # fp32, as it is given

    def clip_value(self, most: float) -> None:
        self.unscale()
        self._change(lambda g: g.clamp_(-most, most))

    def _change(self, change: Callable[[Tensor], Any]) -> None:
        if self.is_half:
            own = {id(p) for p in self._optimized()}
            for name, target in self.targets().items():
                if name in self.sums and id(target) in own:
                    self.sums[name] = self.sums[name].float()
                    change(self.sums[name])
        else:
            for p in self._optimized():
                if p.grad is not None:
                    change(p.grad)

    @contextmanager
    def visible_grads(self) -> Iterator[None]:
        """Inside, `p.grad` is what a user sees. In 16 bits that is rounded: what is changed there counts, and the rest
        keeps the bits that it had."""
        if not self.is_half:
            yield
            return
        for name, p in self.named.items():
            total = self.sums.get(name)
            p.grad = None if total is None else total.to(p.dtype, copy=True)
        shown = {name: p.grad.clone() for name, p in self.named.items() if p.grad is not None}
        yield
        for name, p in self.named.items():
            if p.grad is None:
                self.sums.pop(name, None)
            elif name not in shown:
                self.sums[name] = p.grad
            elif not torch.equal(p.grad, shown[name]):
                is_changed = p.grad != shown[name]
                self.sums[name] = torch.where(is_changed, p.grad.float(), self.sums[name].float())
            p.grad = None

    def step(self) -> None:
        self._absorb()
        self.unscale()
        max_norm = self.program.option("max_norm")
        if max_norm:
            self.clip_norm(max_norm)
        if self.scale is not None:
            self._is_skipped, self._is_unscaled, self._is_overflow = self._is_overflow, False, False
            self.scale.update(is_overflow=self._is_skipped)
            if self._is_skipped:
                for target in self.targets().values():
                    target.grad = None
                return
        self._for_optimizer()
        self.optimizer.step()
        with torch.no_grad():
            for name, master in self.masters.items():
                if master.grad is not None:
                    self.named[name].copy_(master)
                    master.grad = None
        if self.is_half:
            for p in self.named.values():
                p.grad = None

    def _absorb(self) -> None:
        """What the user has written to 16-bit parameters comes to their masters, element by element."""
        with torch.no_grad():
            for name, master in self.masters.items():
                p = self.named[name]
                changed = p != master.to(p.dtype)
                master[changed] = p[changed].float()

    def scaling(self) -> dict[str, Any]:
        """The loss scale, and what the last step made of the gradients."""
        return {"scale": 1.0 if self.scale is None else self.scale.value, "is skipped": self._is_skipped}

    def unobserved(self, is_unobserved: bool) -> AbstractContextManager[None]:
        return nullcontext()

    # State

    def state(self) -> dict[str, Any]:
        self._absorb()
        state = {name: value.detach().clone() for name, value in self.model.state_dict(keep_vars=True).items()}
        ids = {id(p): name for name, p in self.named.items()}
        for key, value in self.model.state_dict(keep_vars=True).items():
            name = ids.get(id(value))
            if name in self.masters:
                state[key] = self.masters[name].detach().clone()
        return {key: value.float().cpu() if value.is_floating_point() else value.cpu() for key, value in state.items()}

    def copied(self) -> Net:
        """A copy in fp32: with mixed precision, of the master."""
        self._absorb()
        model = copy.deepcopy(self.model)
        if self.is_half:
            model = model.float()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name in self.masters:
                    p.copy_(self.masters[name])
        return model

    def load_state(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state)
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(state[name])

    def optimizer_state(self) -> dict[str, Any]:
        state = copy.deepcopy(self.optimizer.state_dict())
        for group in state["param_groups"]:
            if self.program.optimizer.startswith("hybrid"):
                group.pop("differentiable", None)  # torch adds it to groups that are added after loading
        return state if self.scale is None else {**state, "loss_scaler": self.scale.state_dict()}

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        own = {key: value for key, value in state.items() if key != "loss_scaler"}
        self.optimizer.load_state_dict(copy.deepcopy(own))
        if self.scale is not None:
            self.scale.load_state_dict(state["loss_scaler"])

    def add_group(self, group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(group)

    def rebuild(self, variant: int) -> None:
        """As after a restart: everything made anew, and loaded."""
        box = [self.state()]
        if self.program.ranks > 1:  # all ranks load the file of rank 0
            dist.broadcast_object_list(box, 0)
        (state,), optimizer_state = box, self.optimizer_state()
        schedule = None if self.schedule is None else self.schedule.state_dict()
        self.close()
        self.build(variant)
        if self.schedule is not None:
            self.schedule.load_state_dict(schedule)
        self.load_state(state)
        self.load_optimizer_state(optimizer_state)

    @contextmanager
    def whole(self, modify: bool) -> Iterator[dict[str, nn.Parameter]]:
        kept = {name: p.detach().clone() for name, p in self.named.items()}
        yield self.named
        if not modify:
            with torch.no_grad():
                for name, p in self.named.items():
                    p.copy_(kept[name])

    def replan(self, variant: int) -> None:
        pass

    def save(self, number: int) -> None:
        """A checkpoint that nobody loads."""

    def look(self) -> None:
        """What only the engine tells."""

    def close(self) -> None:
        pass


@torch.no_grad()
def _jitter(parameter: nn.Parameter, dtype: torch.dtype, generator: torch.Generator) -> None:
    """Move about one element in eight up or down by a unit in the last place of this dtype, or two.

    It is the dtype that is computed in, over an fp32 master as well: there the last bit of a master now and then rounds
    a 16-bit value the other way, and that is what the rest of the run sees of it.
    """
    drawn = torch.rand(parameter.shape, generator=generator).to(parameter.device)
    moves = (drawn < 1 / 16).float() - (drawn > 15 / 16).float()
    parameter.mul_(1.0 + torch.finfo(dtype).eps * moves)


class Engine(Plain):
    """The same, through `ElixirModule` and `ElixirOptimizer`."""

    is_engine = True

    def __init__(self, program: Program, rank: int, folder: str) -> None:
        self._folder = folder
        super().__init__(program, rank)

    def build(self, variant: int = 0) -> None:
        program = self.program
        model = make_model(program)
        inner = make_optimizer(program, model.named_parameters())
        self.plan = tight_plan(model, plan_options(program, variant), program.is_tight)
        self.module = ElixirModule(
            model,
            self.plan,
            device=torch.device(program.device, rank_device(self.rank)) if program.device == "cuda" else CPU,
            **module_options(program, self._folder),
        )
        self.optimizer = ElixirOptimizer(self.module, inner, **optimizer_options(program))
        self.model = model  # not before: a thread of the user's may read it
        self.named = dict(model.named_parameters())
        self.schedule = make_schedule(program, self.optimizer)

    def targets(self) -> dict[str, Any]:
        return dict(self.named)

    def before_forward(self) -> None:
        """The engine does that by itself."""

    def copied(self) -> Net:
        model = copy.deepcopy(self.model)
        return model.float() if self.is_half else model

    def save(self, number: int) -> None:
        torch.save({"model": self.module.full_state_dict(), "optimizer": self.optimizer.state_dict()}, io.BytesIO())

    def __call__(self, **batch: Tensor) -> Any:
        return (self.model if self.program.is_unwrapped else self.module)(**batch)

    def backward(self, loss: Tensor, **options: Any) -> None:
        if self.program.is_bare:
            self.optimizer.scale_loss(loss).backward(**options)
        else:
            self.optimizer.backward(loss, **options)

    def grads(self) -> dict[str, Tensor]:
        return self.module.full_grads(self.optimizer.gradient_scale)

    def scaling(self) -> dict[str, Any]:
        return {"scale": self.optimizer.loss_scale, "is skipped": self.optimizer.is_step_skipped}

    def unscale(self) -> None:
        """The engine does that by itself."""

    def drop_gradient(self, name: str) -> None:
        self.named[name].grad = None

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=self.program.sets_to_none)

    def drop_gradients(self) -> None:
        self.model.zero_grad()

    def clip_norm(self, most: float) -> float:
        return float(self.optimizer.clip_grad_norm_(most))

    def clip_value(self, most: float) -> None:
        self.optimizer.clip_grad_value_(most)

    @contextmanager
    def visible_grads(self) -> Iterator[None]:
        """They are all the time."""
        yield

    def step(self) -> None:
        self.optimizer.step()

    def unobserved(self, is_unobserved: bool) -> AbstractContextManager[None]:
        return self.optimizer.unobserved(is_unobserved)

    def state(self) -> dict[str, Any]:
        return dict(self.module.full_state_dict(rank0_only=False))

    def load_state(self, state: dict[str, Any]) -> None:
        self.module.load_full_state_dict(state)

    def optimizer_state(self) -> dict[str, Any]:
        state = copy.deepcopy(self.optimizer.state_dict())
        if self.program.ranks == 1:
            return state
        box = [state]
        dist.broadcast_object_list(box, 0)
        return box[0]

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(copy.deepcopy(state))

    @contextmanager
    def whole(self, modify: bool) -> Iterator[dict[str, nn.Parameter]]:
        with self.module.full_parameters(modify=modify) as named:
            yield named

    def replan(self, variant: int) -> None:
        policies = (
            {"placement_policy": "cpu"},
            {"placement_policy": "cuda"},
            {"placement_policy": "const", "offload_optim_frac": 0.5, "shard_param_frac": 0.5},
            {"placement_policy": "const", "offload_optim_frac": 1.0, "offload_param_frac": 0.0},
        )
        options: dict[str, Any] = {**policies[variant % len(policies)], "layout": self.plan}
        self.module.replan(tight_plan(self.model, options | _common(self.program), self.program.is_tight))
        self.plan = self.module.plan

    def look(self) -> None:
        self.module.stats()
        self.module.peak_activation_bytes()
        self.module.sample_activations(True)

    def close(self) -> None:
        stats = self.module.stats()
        self.counters.update({name: getattr(stats, name) for name in COUNTED})
        self.module.close()


CPU = torch.device("cpu")


def rank_device(rank: int) -> int:
    return rank % max(1, torch.cuda.device_count())


def _common(program: Program) -> dict[str, Any]:
    return {
        "world_size": program.ranks,
        "compute_dtype": None if program.dtype == "float32" else getattr(torch, program.dtype),
        "master_weights": program.option("master_weights", True),
        "can_stream": program.optimizer.startswith("hybrid"),
        "accumulates": program.micro_batches > 1,
        "num_backwards": program.micro_batches,
        "needs_global_norm": program.clip == "norm" or "max_norm" in dict(program.options) or has_scale(program),
        "enable_distributed_storage": dict(program.plan).get("enable_distributed_storage", True),
    }


def tight_plan(model: nn.Module, options: dict[str, Any], is_tight: bool) -> Plan:
    """With a limit of the device's memory that leaves the rCache as few blocks as there can be."""
    return make_plan(model, **options, gpu_bytes=least_limit(model, options) if is_tight else None)


def least_limit(model: nn.Module, options: dict[str, Any]) -> int | None:
    """Bytes of the device's memory that a plan can just do with; None: it takes no heed of a limit."""
    limit = 1
    for _ in range(8 if options["placement_policy"] != "cuda" else 0):
        try:
            make_plan(model, **options, gpu_bytes=limit)
            return limit
        except CapacityError as error:
            if error.resource != "GPU" or not error.lacking_bytes:
                break
            limit += error.lacking_bytes
    return None


def plan_options(program: Program, variant: int = 0) -> dict[str, Any]:
    """Arguments of `make_plan`. A variant has other chunks."""
    options = dict(program.plan)
    if variant:
        for name in ("min_chunk_size", "chunk_search_range", "chunk_search_n_grids"):
            options.pop(name, None)
        options["chunk_size"] = 1024 * (2, 4, 8, 16)[variant % 4]
    timing = options.pop("update_timing", None)
    if timing not in (None, "auto"):
        options["update_timing"] = UpdateTiming(timing)
    return options | _common(program)

"""This package: through Lightning's Trainer, and without it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    import lightning.pytorch as pl
else:
    try:
        import lightning.pytorch as pl
    except ModuleNotFoundError:  # the other name of the same package
        import pytorch_lightning as pl

from lightning_elixir import ElixirModule, ElixirOptimizer, ElixirStrategy, HardwareSpec, HybridAdam, optimal_search
from lightning_elixir.plan.hardware import load_hardware
from lightning_elixir.plan.io import plan_to_dict
from lightning_elixir.plan.types import Plan, Tier
from peers.jobs import Job, Unsupported
from peers.model import GPT, batches, built_model, empty_model
from peers.recorder import Phase, Recorder
from peers.torch_systems import by_muon, device_of, join_process_group, limit_gpu, muon, rank_of, run_loop

_WATCHED_STEPS = 2


def start_model(job: Job, device: torch.device, rank: int) -> GPT:
    """With values on rank 0 alone, from where the engine takes them."""
    if rank:
        return empty_model(job).bfloat16()
    return built_model(job, device, where=torch.device("cpu"), dtype=torch.bfloat16)


def numel_by_site(plan: Plan) -> dict[str, int]:
    """Trainable elements (padding included) by who updates them: gpu, streamed, or host; written_back are those of the
    host whose values live on the device."""
    sites: Counter[str] = Counter()
    for chunk in plan.chunks:
        if chunk.requires_grad:
            is_on_gpu = chunk.optim_tier is Tier.GPU
            site = "gpu" if is_on_gpu else "streamed" if chunk.is_update_streamed else "host"
            sites[site] += chunk.numel
            if site == "host" and chunk.param_tier is Tier.GPU:
                sites["written_back"] += chunk.numel
    return {site: sites[site] for site in ("gpu", "streamed", "host", "written_back")}


class Watch:
    """What the engine tells of itself: counters of the timed steps, and waiting in some steps after them.

    Marks of time cost a little, so the timed steps go without.
    """

    def __init__(self, job: Job, optimizer: Callable[[], ElixirOptimizer | None]) -> None:
        self._job = job
        self._optimizer = optimizer
        self.module: ElixirModule | None = None
        self.result: dict[str, Any] = {}

    @property
    def _engine(self) -> ElixirModule:
        if self.module is None:
            raise SystemExit("the model was never set up")
        return self.module

    def recorder(self, device: torch.device, rank: int) -> Recorder:
        return Recorder(
            self._job,
            device,
            rank,
            before_timed=lambda: self._engine.reset_stats(),
            after_timed=self._take_counters,
            extra=(Phase("watched", _WATCHED_STEPS, lambda: self._sample(True), self._take_waiting),),
        )

    def _sample(self, is_on: bool) -> None:
        self._engine.engine.sample_times(is_on)

    def _take_counters(self) -> None:
        stats, plan = self._engine.stats(), self._engine.plan
        optimizer = self._optimizer()
        times = None if optimizer is None else optimizer.last_step_times
        self.result |= {
            "counters": stats.as_dict(),
            "h2d_bytes": stats.h2d_bytes / self._job.steps,
            "d2h_bytes": stats.d2h_bytes / self._job.steps,
            "updated_numel": numel_by_site(plan),
            "plan": {k: v for k, v in plan_to_dict(plan).items() if k != "chunks"},
            "sites": [
                [c.numel, c.param_tier.value, c.optim_tier.value, c.is_persistent, c.is_update_streamed]
                for c in plan.chunks
            ],
            "explained": plan.explain(),
            "update_times": asdict(times) if is_dataclass(times) else None,
        }

    def _take_waiting(self) -> None:
        stats = self._engine.stats()
        self._sample(False)
        self.result |= {"exposed_wait_s": stats.exposed_wait_s, "watched_compute_s": stats.compute_s}


# ---------------------------------------------------------------------------------------- with Lightning


class Batches:
    """A list, for the Trainer, which takes a list for several loaders."""

    def __init__(self, batches: list[Tensor]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


class Lit(pl.LightningModule):
    def __init__(self, job: Job, device: torch.device, rank: int) -> None:
        super().__init__()
        self.job, self.draw_device, self.draw_rank = job, device, rank
        self.net: GPT | None = None
        self.automatic_optimization = job.optimizer == "adamw"  # Lightning steps one optimizer a batch by itself

    def configure_model(self) -> None:
        if self.net is None:
            self.net = start_model(self.job, self.draw_device, self.draw_rank)

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(tokens)  # type: ignore[misc]
        if not self.automatic_optimization:
            self.manual_backward(loss)
            for optimizer in cast("list[Any]", self.optimizers()):
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        matrices, others = by_muon(self.named_parameters(), self.job)
        rest = hybrid_adam(others, self.job)
        return (muon(matrices, self.job), rest) if matrices else rest


def hybrid_adam(parameters: Iterable[torch.nn.Parameter], job: Job) -> HybridAdam:
    return HybridAdam(parameters, lr=job.lr, betas=job.betas, weight_decay=job.weight_decay)


class Record(pl.Callback):
    """Tells the recorder of the Trainer's steps."""

    def __init__(self, watch: Watch, device: torch.device, rank: int) -> None:
        self._watch = watch
        self._recorder = watch.recorder(device, rank)
        self.num_steps = self._recorder.num_steps
        self.result: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        model = trainer.strategy.model
        self._watch.module = model if isinstance(model, ElixirModule) else None
        self._recorder.begin()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *args: Any, **kwargs: Any
    ) -> None:
        self._recorder.end(outputs["loss"])

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.result = {**self._recorder.result(), **self._watch.result}


def run_elixir(job: Job) -> dict[str, Any]:
    """`Trainer(strategy=ElixirStrategy(autocast=False))`: everything computed in 16 bits, as in plain's scheme. With
    autocast the stream between the blocks would be fp32."""
    device, rank = device_of(job), rank_of(job)
    limit_gpu(job, device)
    # Lightning's advice, none of which is about what is measured here.
    warnings.filterwarnings("ignore", message=".*(does not have many workers|LeafSpec.*is deprecated|TensorBoard).*")
    optimizers: list[ElixirOptimizer] = []

    def optimizer() -> ElixirOptimizer | None:
        return optimizers[0] if optimizers else None

    watch = Watch(job, optimizer)
    record = Record(watch, device, rank)

    class FindOptimizer(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            optimizers[:] = [o for o in trainer.optimizers if isinstance(o, ElixirOptimizer)]

    strategy = ElixirStrategy(
        **{
            "autocast": False,
            "gpu_memory_limit": job.gpu_limit_bytes,
            "cpu_memory_limit": job.cpu_limit_bytes,
            "hardware": job.hardware,
            **job.options,
        }
    )
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=job.ranks,
        precision="16-mixed" if job.precision == "fp16" else "bf16-mixed",
        max_steps=record.num_steps * (1 if job.optimizer == "adamw" else 2),  # counts those of each optimizer
        gradient_clip_val=job.clip or None,
        callbacks=[FindOptimizer(), record],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Lit(job, device, rank), Batches(batches(job, record.num_steps, rank, device)))
    return record.result


# ------------------------------------------------------------------------------------- without Lightning


def _train_step(model: torch.nn.Module, inp: Any) -> None:
    model(**inp).backward()


def find_plan(job: Job, model: GPT, hardware: HardwareSpec | None) -> Plan:
    """By a step on fake tensors and the machine's figures: nothing is tried out."""
    tokens = torch.zeros(job.batch, job.shape.seq + 1, dtype=torch.int64)
    # The limit of a CPU run is the rCache's: activations are none of its business, as under the strategy.
    beside = 0 if job.device == "cpu" else None
    return optimal_search(
        model,
        job.ranks,
        getattr(torch, job.dtype),
        overlap=True,
        inp={"tokens": tokens},
        step_fn=_train_step,
        gpu_bytes=job.gpu_limit_bytes,
        cpu_bytes=None if job.cpu_limit_bytes is None else job.cpu_limit_bytes // job.ranks,
        hardware=hardware,
        can_stream=True,
        non_model_bytes=beside,
        **job.options,
    )


class ManualStep:
    """`ElixirModule` and `ElixirOptimizer` around a plain loop.

    Args:
        plan: None: `find_plan`'s.
    """

    def __init__(self, job: Job, device: torch.device, rank: int, plan: Callable[[GPT], Plan] | None = None) -> None:
        model = start_model(job, device, rank)
        hardware = None if job.hardware is None else load_hardware(job.hardware)
        found = find_plan(job, model, hardware) if plan is None else plan(model)
        self.module = ElixirModule(model, found, dtype=getattr(torch, job.dtype), device=device)
        # After wrapping: on ranks other than 0 the parameters were on `meta` until then.
        self.optimizer = ElixirOptimizer(self.module, hybrid_adam(model.parameters(), job), max_norm=job.clip)

    def __call__(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.module(tokens)
        self.optimizer.backward(loss)
        self.optimizer.step()
        return loss

    def close(self) -> None:
        self.module.close()


def run_elixir_manual(job: Job) -> dict[str, Any]:
    """The engine alone, with a plan made before the first step."""
    if job.precision == "fp16" and job.device == "cpu":
        raise Unsupported("float16 is for GPUs")
    device, rank = device_of(job), rank_of(job)
    if job.ranks > 1:
        join_process_group(device)
    limit_gpu(job, device)
    step = ManualStep(job, device, rank)
    watch = Watch(job, lambda: step.optimizer)
    watch.module = step.module
    recorder = watch.recorder(device, rank)
    run_loop(step, batches(job, recorder.num_steps, rank, device), recorder)
    result = {**recorder.result(), **watch.result}
    step.close()
    if job.ranks > 1:
        with suppress(RuntimeError):
            torch.distributed.destroy_process_group()
    return result

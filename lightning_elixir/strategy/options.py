"""The options of `ElixirStrategy`, of the Trainer's and of Fabric's: said, documented and checked once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from datetime import timedelta
from typing import ClassVar

import torch

from lightning_elixir._lightning import Accelerator, CheckpointIO, ClusterEnvironment, Precision
from lightning_elixir.core.option_names import checks_option_names
from lightning_elixir.fused import FusedChoice
from lightning_elixir.plan.sharding import Sharding
from lightning_elixir.plan.weighing import ParallelSize
from lightning_elixir.strategy.config import (
    ActivationsOption,
    ElixirConfig,
    HardwareOption,
    KeepOption,
    NvmeBackendName,
    PatternsOption,
    PlanOption,
    PolicyName,
    StateDictType,
    TimingName,
)
from lightning_elixir.strategy.processes import Processes, StartMethod


class StrategyOptions(Processes):
    """Takes them, and keeps those that are ours as one checked value."""

    options_elsewhere: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("precision", "devices", "num_nodes"), "the Trainer (or of Fabric)"
    ) | dict.fromkeys(
        ("gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches", "max_epochs", "max_steps"),
        "the Trainer",
    )

    @checks_option_names
    def __init__(
        self,
        placement_policy: PolicyName = "auto",
        shard_param_frac: float = 1.0,
        offload_optim_frac: float = 0.0,
        offload_param_frac: float = 0.0,
        chunk_size: int | str | None = None,
        chunk_search_range: int | str | None = None,
        chunk_search_n_grids: int = 128,
        min_chunk_size: int | str | None = None,
        enable_distributed_storage: bool = True,
        pin_memory: bool = True,
        prefetch: bool = True,
        update_timing: TimingName = "auto",
        force_outputs_fp32: bool = False,
        autocast: bool = True,
        keep_fp32: KeepOption = None,
        ignored: KeepOption = None,
        activations: ActivationsOption = None,
        gpu_margin_mem_ratio: float | None = None,
        gpu_memory_limit: int | str | None = None,
        cpu_memory_limit: int | str | None = None,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_param_fraction: float = 0.0,
        nvme_offload_dir: str | None = None,
        nvme_backend: NvmeBackendName = "direct",
        nvme_checksums: bool = False,
        plan: PlanOption = None,
        hardware: HardwareOption = None,
        report_dir: str | None = None,
        state_dict_type: StateDictType = "full",
        async_save: bool = False,
        reduce_dtype: torch.dtype | str | None = None,
        use_fused_kernels: FusedChoice = False,
        tensor_parallel_size: ParallelSize = 1,
        expert_parallel_size: ParallelSize = 1,
        patterns: PatternsOption = None,
        sharding: Sharding = "world",
        init_step: bool = False,
        initial_scale: float = 2.0**16,
        min_scale: float = 0.0,
        max_scale: float = math.inf,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 1,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
        start_method: StartMethod = "popen",
    ) -> None:
        """All sizes are bytes as an int, or strings such as "64MiB" or "40GiB".

        Args:
            placement_policy: Where chunks live. "auto": on the GPU if everything fits, else what does not fit on the
                host, decided with what a training step takes, known before the first one. "cpu": parameters and
                optimizer states on the host. "cuda": everything on the GPU. "const" or "static": by three fractions.
            shard_param_frac: const: share of the parameters that is sharded and fetched when needed; the rest stays
                whole on the GPU.
            offload_optim_frac: const: share of the optimizer states on the host.
            offload_param_frac: const: share of the parameters on the host.
            chunk_size: Size of a chunk in the compute dtype. Default: the least waste is searched for.
            chunk_search_range: How far above the smallest candidate to search. Default: up to three times of it.
            chunk_search_n_grids: How many chunk sizes to try.
            min_chunk_size: The smallest candidate. Default: 32 MiB, less for small models.
            enable_distributed_storage: Each rank keeps its slice of every parameter. False: each rank keeps them whole,
                and communicates only after an update.
            pin_memory: Page-lock host memory, which makes transfers faster.
            prefetch: Fetch chunks ahead of need.
            update_timing: When updates of states on the host may run. "after_backward": inside the optimizer's step.
                "behind_forward": behind the next forward, where a layer waits for the updates of its own parameters.
                "inside_backward": also as soon as a chunk's gradients are there, under automatic optimization, with
                bf16 mixed precision, one backward a step, no clipping, and no hook between backward and step
                (`on_after_backward`, `on_before_optimizer_step`, ...); an exception between the two then ends the
                run, for nothing may be saved from half an update. With norm clipping or fp16 too, and then whatever
                hooks there are and without that end, for the chunks whose spare states (14 bytes a parameter) the host
                has memory for. Default: the last, where it is possible, else the second. No number depends
                on it.
            force_outputs_fp32: Cast what the steps of the model return to fp32.
            autocast: Mixed precision: run steps under `torch.autocast`. False: cast the inputs instead, and compute all
                in 16 bits.
            keep_fp32: What stays in fp32 where the others are cast to 16 bits: names of parameters or modules (globs,
                such as "*.head"), classes of modules, a function (name, module) -> bool, or a list of these. They come
                on top of the default: norms with running statistics, modules under `spectral_norm` or `orthogonal`,
                under autocast routers, and on the CPU under autocast all norms (16-true, bf16-true: nothing). An empty
                list: nothing. With `autocast=False` modules that are kept as a whole take 16-bit inputs as fp32, and
                give 16-bit results.
            ignored: What is left out of chunks: values as for `keep_fp32`, and classes of parameters. It stays on the
                GPU, whole on every rank, in its own dtype, trained or frozen as it is, and is counted in the plan.
                Frozen parameters of classes that no chunk can hold are left out by themselves.
            activations: What becomes of the tensors that autograd saves in the blocks of the model (layers that repeat
                in a list) between forward and backward. "keep": they stay on the GPU. "recompute": they are dropped,
                and backward runs the block again. "offload": they go to host memory and come back ahead of need.
                "recompute_offloaded": as "recompute", with the block's inputs in host memory. "keep_attention": as
                "recompute", but results of fused attention stay on the GPU, and are not computed again. A dict from
                globs over names of blocks, or of other modules, to these: for some. "auto": the fastest for each block,
                found together with the placement of chunks, from a dry run of the training step. All give the same
                numbers. They take the place of `gradient_checkpointing_enable`. Default: what the model does by itself.
            gpu_margin_mem_ratio: auto: share of the GPU memory left beside rCache and activations that optimizer states
                may take. Default: all of it.
            gpu_memory_limit: Plan as if each GPU had no more. On the CPU accelerator this is of the host memory that
                plays a GPU, and about chunks alone: what a step has beside them is not counted.
            cpu_memory_limit: Plan as if each host had no more. Default: what is free, but for 2 GiB for each rank and a
                fiftieth of it, at most a quarter.
            nvme_offload_fraction: cpu, const: share of the masters and optimizer states in host memory, by elements,
                that lives on NVMe instead; `HybridAdam` and `CPUAdam` only.
            nvme_offload_param_fraction: cpu, const: share of the parameters in host memory whose states are on NVMe,
                and of frozen ones, by elements, that lives there as well, with their gradients.
            nvme_offload_dir: Folder for them, on a fast disk; made if missing. No file of ours stays there. auto:
                states go there where the host's memory is short. Default: the system's folder for temporary files, if
                that is on a disk.
            nvme_backend: What reads and writes there: "direct" (our own) or "tensornvme" (the package of that name).
            nvme_checksums: Check what is read from NVMe against what was written; slow, for debugging.
            plan: A `Plan`, or the path of one that was saved, to obey instead of searching. Its names may be those of a
                model that this one holds as its only part with parameters (`self.model`), or is such a part of.
            hardware: Figures of the machine to plan with: a `HardwareSpec`, or the path of one that was saved. Default:
                measured on GPUs, once for each machine; round figures on the CPU accelerator.
            report_dir: Folder that receives `plan.json`, `report.json` and `report.html` at the end of `fit`, also
                after an error: what the plan predicted, and what was measured. Made if missing; earlier files are
                overwritten.
            state_dict_type: How checkpoints are saved; either kind is loaded. "full": one file, gathered on rank 0.
                "sharded": a folder in the format of `torch.distributed.checkpoint`, to which each rank writes its own
                part; any number of ranks loads it, with any placement.
            async_save: sharded: go on with training when all is in the system's cache, while a thread waits until it is
                on the disk. The next save, and the end of the run, wait for that and raise its errors.
            reduce_dtype: "float32", "bfloat16" or "float16": dtype in which gradients are reduced. Default: their own.
            use_fused_kernels: True: swap fused operators in for the model's own: the loss of transformers' language
                models with their last layer, so that logits are never all in memory, RMS norms, gated MLPs (SwiGLU,
                GeGLU), experts of mixtures, and, with kernels, rotary embeddings. By the kernels of `liger-kernel`
                where that is installed, on a GPU; by torch's operators elsewhere. No number changes beyond rounding.
                Beneath parallel patterns, too. The log has a table. "auto": where there are any; with True a model that
                has none is an error.
            tensor_parallel_size: Ranks between which single layers are cut; they have the same batch. What is cut, and
                how, say `patterns`, torch's `parallelize_module` in `configure_model`, or else the model's own
                `tp_plan` (transformers). "auto": the size with the shortest predicted time for the same samples, of
                those that fit; where a step cannot be foreseen, as under Fabric, the first that fits without
                activations, beginning with 1. `plan.explain()` says which and why.
            expert_parallel_size: Ranks between which the experts of mixtures are spread; each has a batch of its own.
                Likewise, by the model's own `ep_plan`; "auto" too.
            patterns: How to share the work of which modules: a dict from names of modules (globs, such as
                "*.experts") or classes to patterns of `lightning_elixir.patterns`. They cut nothing along an axis whose
                size is 1, which is warned of. Default: the model's own.
            sharding: Which ranks share parameters, gradients and optimizer states on several nodes. "world": all ranks.
                "node": those of a node; each node has a copy of everything then, and what goes between nodes are
                slices of gradients, once for each backward. "auto": what is predicted to be faster, of what fits. On
                one node all of them are the same.
            init_step: Allocate optimizer states and staging memory at setup instead of in the first step.
            initial_scale: Loss scale at the start (fp16 mixed precision).
            min_scale: Smallest loss scale.
            max_scale: Largest loss scale.
            growth_factor: By how much the loss scale grows.
            backoff_factor: By how much the loss scale shrinks when gradients hold inf or nan.
            growth_interval: After how many good steps in a row the loss scale grows.
            hysteresis: How many bad steps it takes to shrink the loss scale.
            accelerator: As in every strategy of Lightning.
            parallel_devices: As in every strategy of Lightning.
            cluster_environment: As in every strategy of Lightning.
            checkpoint_io: As in every strategy of Lightning.
            precision_plugin: Replaced by `ElixirPrecision` of the same precision.
            process_group_backend: Default: NCCL on GPUs, gloo on CPUs.
            timeout: How long a rank waits for the others.
            start_method: How processes are started: "popen" runs the script once a device, the others use
                multiprocessing. In a notebook, which is no script, "popen" forks.

        Raises:
            PlanError: An option that cannot be used as given.
            OptionError: One that does not exist.
        """
        given = locals()
        self._config = ElixirConfig(**{option.name: given[option.name] for option in fields(ElixirConfig)})
        self._begin()
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )

    def _begin(self) -> None:
        """Make what the strategy keeps beside its options. What comes next asks for it."""

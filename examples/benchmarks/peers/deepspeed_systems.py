"""DeepSpeed ZeRO-2 and ZeRO-3 with everything that they can offload, set up as their users would for speed."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from peers.jobs import Job
from peers.launch import free_port
from peers.model import batches, built_model
from peers.recorder import Recorder
from peers.torch_systems import device_of, limit_gpu, rank_of, run_loop

_BUCKET_NUMEL = 500_000_000


def config_of(job: Job, stage: int) -> dict[str, Any]:
    """The configuration file, as a dictionary: pinned memory, large buckets, overlap."""
    pinned = {"device": "cpu", "pin_memory": job.device == "cuda"}
    zero: dict[str, Any] = {
        "stage": stage,
        "offload_optimizer": pinned,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": _BUCKET_NUMEL,
    }
    if stage == 2:
        zero |= {"allgather_bucket_size": _BUCKET_NUMEL, "round_robin_gradients": True}
    else:
        zero |= {
            "offload_param": pinned,
            # Two blocks ahead; norms stay, as they cost a message each.
            "stage3_prefetch_bucket_size": 2 * 12 * job.shape.width**2,
            "stage3_param_persistence_threshold": 100_000,
        }
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": job.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": job.clip,
        "zero_optimization": zero,
        "steps_per_print": 2**31,
    }
    if job.precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 16}
    else:
        config["bf16"] = {"enabled": True}
    return config


def run_deepspeed(job: Job, stage: int) -> dict[str, Any]:
    """Needs `deepspeed` and its compiled `DeepSpeedCPUAdam`."""
    os.environ.setdefault("DS_PIN_MEMORY_BACKEND", "native")  # exact sizes, where this version knows it
    if job.ranks == 1:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    deepspeed = import_module("deepspeed")
    cpu_adam = import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
    device = device_of(job)
    rank = rank_of(job)
    limit_gpu(job, device)
    deepspeed.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo")
    # ZeRO-3 spreads the parameters by itself; ZeRO-2 keeps them where it computes.
    where = device if stage == 2 else torch.device("cpu")
    model = built_model(job, device, where=where, dtype=getattr(torch, job.dtype))
    optimizer = cpu_adam(model.parameters(), lr=job.lr, betas=job.betas, weight_decay=job.weight_decay, adamw_mode=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(job, stage))

    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = engine(tokens)
        engine.backward(loss)
        engine.step()
        return loss

    recorder = Recorder(job, device, rank)
    run_loop(step, batches(job, recorder.num_steps, rank, device), recorder)
    return {**recorder.result(), "deepspeed_config": config_of(job, stage)}

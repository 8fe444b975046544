"""Plain PyTorch (nothing offloaded), FSDP2 with CPU offload, torchao's CPU-offloading optimizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from peers.jobs import Job, Unsupported
from peers.model import GPT, batches, built_model, drawn, empty_model
from peers.recorder import Phase, Recorder

_FIRST_SCALE = 2.0**16


def run_loop(step: Callable[[Tensor], Tensor], data: list[Tensor], recorder: Recorder) -> None:
    """`step` takes tokens and returns the loss."""
    for tokens in data:
        recorder.begin()
        recorder.end(step(tokens))


def adamw(parameters: Iterable[nn.Parameter], job: Job) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=job.lr, betas=job.betas, weight_decay=job.weight_decay, fused=True)


def by_muon(named: Iterable[tuple[str, nn.Parameter]], job: Job) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters that Muon updates, and the others: with `job.optimizer` "adamw" all."""
    found: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for name, parameter in named:
        is_muons = job.optimizer == "muon" and "blocks." in name and parameter.dim() == 2
        found[0 if is_muons else 1].append(parameter)
    return found


def muon(parameters: Iterable[nn.Parameter], job: Job) -> torch.optim.Muon:
    return torch.optim.Muon(parameters, lr=job.lr, weight_decay=job.weight_decay)


def rank_of(job: Job) -> int:
    return int(os.environ.get("RANK", "0")) if job.ranks > 1 else 0


def device_of(job: Job) -> torch.device:
    if job.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) if job.ranks > 1 else 0)
    torch.cuda.set_device(device)
    return device


def limit_gpu(job: Job, device: torch.device) -> None:
    """From now on torch refuses to take more than the limit."""
    if device.type == "cuda" and job.gpu_limit_bytes is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, job.gpu_limit_bytes / total), device)


def one_process(job: Job) -> None:
    """Raises `Unsupported` for several."""
    if job.ranks > 1:
        raise Unsupported(f"{job.system} is for one process")


def join_process_group(device: torch.device) -> None:
    """The one that the environment describes, or one of this process alone."""
    if "MASTER_ADDR" in os.environ:
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        return
    store = torch.distributed.HashStore()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)


# ------------------------------------------------------------------------------------- nothing offloaded


class PlainStep:
    """16-bit parameters and gradients, an fp32 master, fused AdamW: what all others are compared to.

    One optimizer for each block, so that fp32 copies of gradients exist for one block at a time: 16 bytes a parameter.
    With `job.optimizer` "muon" its matrices have one of their own.
    """

    def __init__(self, job: Job, device: torch.device) -> None:
        self._job = job
        self._device = device
        self.model = built_model(job, device, where=device, dtype=getattr(torch, job.dtype))
        blocks = [list(block.named_parameters(prefix="blocks.")) for block in self.model.blocks]
        blocks.append([(n, p) for n, p in self.model.named_parameters() if not n.startswith("blocks.")])
        members = [(make, ps) for named in blocks for make, ps in zip((muon, adamw), by_muon(named, job), strict=True)]
        self._groups = [(ps, [nn.Parameter(p.detach().float()) for p in ps]) for _, ps in members if ps]
        makers: list[Callable[..., torch.optim.Optimizer]] = [make for make, ps in members if ps]
        self.optimizers = [make(masters, job) for make, (_, masters) in zip(makers, self._groups, strict=True)]
        # What the loss is multiplied by; 1 in bf16.
        self.scale = _FIRST_SCALE if job.precision == "fp16" else 1.0
        self._good_steps = 0
        self.split: dict[str, float] = {}

    def __call__(self, tokens: Tensor) -> Tensor:
        loss = self.forward_backward(tokens)
        self.update()
        return loss

    def forward_backward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(tokens)
        (loss * self.scale if self.scale != 1.0 else loss).backward()
        return loss

    @torch.no_grad()
    def update(self) -> None:
        factor = self._factor()
        if factor is None:
            self.model.zero_grad(set_to_none=True)
            return
        for (parameters, masters), optimizer in zip(self._groups, self.optimizers, strict=True):
            for p, master in zip(parameters, masters, strict=True):
                master.grad = None if p.grad is None else p.grad.float()
                p.grad = None
            grads = [m.grad for m in masters if m.grad is not None]
            if factor is not _ONE:
                torch._foreach_mul_(grads, factor)
            optimizer.step()
            torch._foreach_copy_([*parameters], [*masters])
            for master in masters:
                master.grad = None

    def _factor(self) -> Tensor | None:
        """What gradients are multiplied by, 0-dim fp32; None: they overflowed, and the step is left out."""
        if not self._job.clip and self.scale == 1.0:
            return _ONE
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32))) / self.scale
        if self._job.precision == "fp16":
            if not bool(norm.isfinite()):
                self.scale, self._good_steps = self.scale / 2, 0
                return None
            self._good_steps += 1
        factor = torch.full_like(norm, 1 / self.scale)
        if self._job.clip:
            factor *= (self._job.clip / (norm + 1e-6)).clamp(max=1.0)
        if self._good_steps == 2000:
            self.scale, self._good_steps = self.scale * 2, 0
        return factor

    def look_inside(self, tokens: Tensor) -> Tensor:
        """A step whose two halves are timed apart, and whose activations are counted: fills `split`."""
        if self._device.type != "cuda":
            return self(tokens)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        # The highest moment of activations is at the loss, with all blocks' inputs kept; then parameters' gradients
        # come, which are not activations.
        seen: list[int] = []

        def look(_grad: Tensor) -> None:
            seen.append(torch.cuda.max_memory_allocated())

        handle = self.model.norm.register_forward_hook(
            lambda _module, _inputs, output: output.register_hook(look) and None
        )
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        marks[0].record()
        loss = self.forward_backward(tokens)
        marks[1].record()
        self.update()
        marks[2].record()
        torch.cuda.synchronize()
        handle.remove()
        self.split = {
            "forward_backward_s": marks[0].elapsed_time(marks[1]) / 1e3,
            "update_s": marks[1].elapsed_time(marks[2]) / 1e3,
            "activation_bytes": seen[0] - before if seen else 0,
        }
        return loss


_ONE = torch.ones(())


def run_plain(job: Job) -> dict[str, Any]:
    """The whole card, whatever the limit: it is the reference."""
    one_process(job)
    device = device_of(job)
    recorder = Recorder(job, device, extra=(Phase("split", 1),))
    step = PlainStep(job, device)
    split_at = job.warmup + job.steps
    for index, tokens in enumerate(batches(job, recorder.num_steps, 0, device)):
        recorder.begin()
        recorder.end(step.look_inside(tokens) if index == split_at else step(tokens))
    return {**recorder.result(), **step.split}


def run_plain_autocast(job: Job) -> dict[str, Any]:
    """fp32 parameters and gradients under autocast: PyTorch's usual mixed precision, and other arithmetic."""
    one_process(job)
    device = device_of(job)
    model = built_model(job, device, where=device, dtype=torch.float32)
    optimizer = adamw(model.parameters(), job)
    scaler = torch.amp.GradScaler(device.type, init_scale=_FIRST_SCALE, enabled=job.precision == "fp16")

    def step(tokens: Tensor) -> Tensor:
        loss = _autocast_loss(model, tokens, job)
        scaler.scale(loss).backward()
        if job.clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), job.clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss

    recorder = Recorder(job, device)
    run_loop(step, batches(job, recorder.num_steps, 0, device), recorder)
    return recorder.result()


def _autocast_loss(model: GPT, tokens: Tensor, job: Job) -> Tensor:
    with torch.autocast(tokens.device.type, getattr(torch, job.dtype)):
        loss: Tensor = model(tokens)
    return loss


# ------------------------------------------------------------------------------------------------ FSDP2


def run_fsdp2(job: Job) -> dict[str, Any]:
    """`fully_shard` over every block, `CPUOffloadPolicy`, fp32 shards and fused AdamW on the host."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    if job.precision == "fp16":
        raise Unsupported("fsdp2: no loss scaling of gradients in host memory was set up here")
    device = device_of(job)
    rank = rank_of(job)
    join_process_group(device)
    limit_gpu(job, device)
    mesh = init_device_mesh(device.type, (job.ranks,))
    model = empty_model(job)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=getattr(torch, job.dtype)),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda"),
    }
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, p in model.named_parameters():
            parts = drawn(job, name, p.shape, device).chunk(job.ranks)
            if rank < len(parts):  # a rank may have no part of a short parameter
                p.to_local().copy_(parts[rank])  # type: ignore[attr-defined]
    optimizer = adamw(model.parameters(), job)

    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = model(tokens)
        loss.backward()
        if job.clip:
            nn.utils.clip_grad_norm_(model.parameters(), job.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    recorder = Recorder(job, device, rank)
    run_loop(step, batches(job, recorder.num_steps, rank, device), recorder)
    result = recorder.result()
    torch.distributed.destroy_process_group()
    return result


# ---------------------------------------------------------------------------------------------- torchao


def run_torchao(job: Job) -> dict[str, Any]:
    """`CPUOffloadOptimizer` over fp32 parameters under autocast, gradients offloaded as they come."""
    one_process(job)
    if job.device == "cpu":
        raise Unsupported("torchao's CPUOffloadOptimizer needs a GPU")
    if job.clip:
        raise Unsupported("torchao's CPUOffloadOptimizer sends gradients to the host before their norm is known")
    if job.precision == "fp16":
        raise Unsupported("torchao's CPUOffloadOptimizer does not scale losses")
    offload_optimizer = import_module("torchao.optim").CPUOffloadOptimizer
    device = device_of(job)
    limit_gpu(job, device)
    model = built_model(job, device, where=device, dtype=torch.float32)
    optimizer = offload_optimizer(
        model.parameters(),
        torch.optim.AdamW,
        offload_gradients=True,
        fused=True,
        lr=job.lr,
        betas=job.betas,
        weight_decay=job.weight_decay,
    )

    def step(tokens: Tensor) -> Tensor:
        loss = _autocast_loss(model, tokens, job)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    recorder = Recorder(job, device)
    run_loop(step, batches(job, recorder.num_steps, 0, device), recorder)
    return recorder.result()

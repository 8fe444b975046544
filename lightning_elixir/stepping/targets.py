"""Where the new values of a chunk go, as an update on this rank sees it."""

from __future__ import annotations

from torch import Tensor

from lightning_elixir.plan.types import Tier
from lightning_elixir.runtime.chunk import Chunk
from lightning_elixir.runtime.engine import Engine
from lightning_elixir.stepping.cases import Grads, Params


def target_of(engine: Engine, chunk: Chunk) -> Tensor | None:
    """Where the master goes in the compute dtype: this rank's slice of shard or replica, 1-D. None without a master, or
    where replicas are cast from it."""
    shard = engine.store[chunk.id]
    if not shard.has_master or engine.is_cast_from_master(chunk.spec):
        return None
    if shard.on_disk is not None and shard.on_disk.has_param:
        return shard.on_disk.param_stand_in()
    target = chunk.flat if shard.param is None else shard.param
    if target.numel() != engine.store.optim_numel(chunk.spec):
        target = engine.groups.mine(chunk.spec, target)
    return target


def params_of(engine: Engine, chunk: Chunk, target: Tensor | None) -> Params:
    """Where a chunk's parameters lie.

    Args:
        target: From `target_of`.
    """
    shard = engine.store[chunk.id]
    if chunk.spec.param_tier is Tier.NVME:
        return Params.DISK
    if shard.param is None or chunk.spec.param_tier is Tier.GPU:
        return Params.DEVICE
    return Params.HOST if target is None or target is shard.param else Params.HOST_SLICE


def grads_of(engine: Engine, chunk: Chunk, target: Tensor | None) -> Grads:
    """Where a chunk's gradients lie; it has some.

    Args:
        target: From `target_of`.
    """
    shard = engine.store[chunk.id]
    grad = shard.grad
    if shard.is_param_overwritten:
        return Grads.OVER_PARAMS
    if grad is None or target is None or (target.dtype, target.numel()) != (grad.dtype, grad.numel()):
        return Grads.ELSEWHERE
    if shard.is_param_on_disk:
        return Grads.ELSEWHERE  # backward may read the parameters again: they are written in the step
    if shard.param is not None and shard.param.numel() != grad.numel():
        return Grads.ELSEWHERE  # a whole chunk, of which this rank has updated a slice
    return Grads.LIKE_PARAMS

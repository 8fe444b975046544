"""What refusals say that memory is for, part by part: people add the parts up."""

from __future__ import annotations

from lightning_elixir.plan.memory import MemoryUse, Scheme
from lightning_elixir.plan.owners import EXCHANGE_BYTES, MOST_UPDATE_BYTES
from lightning_elixir.plan.units import format_bytes

STREAMABLE = "with HybridAdam or CPUAdam"
"""The optimizers whose states may be on a disk."""


def gpu_parts(use: MemoryUse, ignored_bytes: int, scheme: Scheme, blocks: int, module: str) -> str:
    """What the device's bytes at the highest moment of a step are for: all of them.

    Args:
        use: At that moment; the rCache is left out.
        ignored_bytes: Of its `non_model_bytes`, those of parameters in no chunk.
        scheme: What training does to the chunks.
        blocks: Of the rCache.
        module: What needs so many, as the smallest rCache.
    """
    parts = []
    if blocks:
        parts.append(
            f"the smallest rCache, {blocks} block{'s' * (blocks > 1)} of {format_bytes(scheme.block_bytes)} for"
            f" {module or 'the model'}, {format_bytes(blocks * scheme.block_bytes)}"
        )
    if use.gpu_param_bytes:
        parts.append(f"parameters that stay on it {format_bytes(use.gpu_param_bytes)}")
    if use.gpu_state_bytes:
        parts.append(f"optimizer states {format_bytes(use.gpu_state_bytes)}")
    if use.gpu_grad_bytes:
        parts.append(f"gradients and their blocks {format_bytes(use.gpu_grad_bytes)}")
    if use.gpu_stream_bytes:
        parts.append(f"{_stream_words(scheme)} {format_bytes(use.gpu_stream_bytes)}")
    if ignored_bytes:
        parts.append(f"parameters that stay out of chunks (ignored) {format_bytes(ignored_bytes)}")
    if use.non_model_bytes > ignored_bytes:
        parts.append(f"activations and other data {format_bytes(use.non_model_bytes - ignored_bytes)}")
    return "; ".join(parts)


def _stream_words(scheme: Scheme) -> str:
    if not scheme.regime.whole_update_bytes:
        return "buffers of updates"
    exchanged = f", and {EXCHANGE_BYTES} for each of the largest chunk" if scheme.world_size > 1 else ""
    return (
        f"buffers of updates of whole parameters, as Muon's: up to {MOST_UPDATE_BYTES} bytes for each element of the"
        f" largest{exchanged},"
    )


def host_parts(use: MemoryUse) -> str:
    """What the host's bytes of a placement are for: all of them."""
    parts = [
        f"parameters {format_bytes(use.host_param_bytes)}",
        f"optimizer states {format_bytes(use.host_state_bytes)}",
        f"gradients {format_bytes(use.host_grad_bytes)}",
    ]
    if use.host_spare_bytes:
        parts.append(f"spare states {format_bytes(use.host_spare_bytes)}")
    if use.host_activation_bytes:
        parts.append(f"activations {format_bytes(use.host_activation_bytes)}")
    if use.host_buffer_bytes:
        parts.append(f"buffers for states on NVMe {format_bytes(use.host_buffer_bytes)}")
    return "; ".join(parts)

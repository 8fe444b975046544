"""What loading a pretrained model takes beside the shards: less than a chunk, and a small buffer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_elixir import ElixirModule, pretrained
from tests.helpers.dist import run_ranks
from tests.helpers.own_memory import Peak
from tests.helpers.plans import make_plan
from tests.helpers.tiers import crossed

save_file = pytest.importorskip("safetensors.torch").save_file

MIB = 2**20
WIDTH, DEPTH = 1024, 26  # 104 MiB in fp32, 4 of them in each layer
CHUNK = 16 * MIB  # in fp32
CONSTANT = 8 * MIB  # a buffer of 1 MiB, its values cast, and what gloo and the interpreter take


def _build(depth: int = DEPTH) -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth)])


def _load(folder: Path, dtype: torch.dtype) -> ElixirModule:
    model = pretrained(lambda: _build(len(list(folder.glob("*.safetensors")))), folder, defer=True)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    chunk_size = CHUNK // 4 * dtype.itemsize
    plan = make_plan(model, world_size=world_size, placement_policy="cpu", compute_dtype=dtype, chunk_size=chunk_size)
    return ElixirModule(model, plan, dtype=dtype)


def _measure(folder: Path, small: Path, dtype: torch.dtype) -> tuple[int, int, int]:
    """Peak of loading, what is left of it, and what shards should take."""
    torch.set_num_threads(1)
    _load(small, dtype).close()  # what torch takes once
    with Peak() as peak:
        module = _load(folder, dtype)
    shards = sum(t.nbytes for c in module.engine.chunks for t in _tensors(module, c.id))
    whole = module.full_state_dict()
    if whole:
        assert all(value.flatten()[0] == float(name.split(".")[0]) for name, value in whole.items())
    return peak.nbytes, peak.left, shards


def _tensors(module: ElixirModule, chunk_id: int) -> list[torch.Tensor]:
    shard = module.engine.store[chunk_id]
    return [t for t in (shard.param, shard.master) if t is not None]


@crossed(told=["2-torch.bfloat16"], world_size=[1, 2], dtype=[torch.float32, torch.bfloat16])
def test_loading_takes_less_than_a_chunk_beside_the_shards(tmp_path: Path, world_size: int, dtype: torch.dtype) -> None:
    for folder, depth in ((tmp_path / "small", 1), (tmp_path / "large", DEPTH)):
        folder.mkdir()
        names = []
        for layer in range(depth):
            name = f"layer-{layer}.safetensors"
            save_file({f"{layer}.weight": torch.full((WIDTH, WIDTH), float(layer))}, folder / name)
            names.append(f'"{layer}.weight": "{name}"')
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {' + ", ".join(names) + "}}")
    results = run_ranks(
        _measure, world_size, tmp_path / "large", tmp_path / "small", dtype, fresh=True, init_group=world_size > 1
    )
    model_bytes = DEPTH * WIDTH * WIDTH * (4 if dtype is torch.float32 else 6)
    for peak, left, shards in results:
        print(f"peak {peak / MIB:.1f} MiB, left {left / MIB:.1f} MiB, shards {shards / MIB:.1f} MiB")
        assert model_bytes / world_size <= shards <= model_bytes / world_size + 2 * CHUNK
        assert left < shards + 2 * MIB
        assert peak < shards + CHUNK / world_size + CONSTANT

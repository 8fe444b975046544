"""Several nodes: on one machine, as torchrun describes them, each with its own numbers of processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_elixir import ElixirStrategy, HybridAdam
from lightning_elixir._lightning import LightningModule, Trainer
from lightning_elixir.patterns import Column, Row
from lightning_elixir.strategy.engine_handle import EngineHandle
from tests.helpers.dist import RankError, run_ranks
from tests.helpers.patterns import difference
from tests.helpers.tiers import telling

ROOT = Path(__file__).parents[2]
DATA = torch.randn(24, 16, generator=torch.Generator().manual_seed(0))


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(24))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        for up, down in zip(self.layers[::2], self.layers[1::2], strict=True):
            batch = batch + down(up(batch).relu())
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return HybridAdam(self.parameters(), lr=1e-2, eps=1e-3)


def trainer_of(strategy: Any, devices: int, nodes: int) -> Trainer:
    return Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        num_nodes=nodes,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )


def as_node(per_node: int) -> int:
    """Have the environment be what torchrun makes it for this rank of a node with so many; returns the node."""
    rank = int(os.environ["RANK"])
    _describe(rank // per_node, rank % per_node, per_node)
    return rank // per_node


def _describe(node: int, local_rank: int, per_node: int) -> None:
    os.environ.pop("NODE_RANK", None)
    os.environ.update(
        LOCAL_RANK=str(local_rank),
        LOCAL_WORLD_SIZE=str(per_node),
        GROUP_RANK=str(node),
        TORCHELASTIC_RUN_ID="a test",
    )


def fit(nodes: int, per_node: int, tensor: int) -> tuple[dict[str, Tensor], int, tuple[int, ...]]:
    node, rank, world = as_node(per_node), int(os.environ["RANK"]), nodes * per_node
    model = Model()
    patterns = {"layers.*[02468]": Column(), "layers.*[13579]": Row()} if tensor > 1 else None
    strategy = ElixirStrategy(
        placement_policy="cpu",
        chunk_size="4KiB",
        gpu_memory_limit="48KiB",
        cpu_memory_limit="64MiB",
        tensor_parallel_size=tensor,
        patterns=patterns,
    )
    trainer = trainer_of(strategy, per_node, nodes)
    batches = world // tensor
    sampler = DistributedSampler(DATA, num_replicas=batches, rank=rank // tensor, shuffle=False)
    trainer.fit(model, DataLoader(DATA, batch_size=12 // batches, sampler=sampler))
    handle = EngineHandle.of(model)
    assert handle is not None
    assert strategy.stats().evictions > 0
    numbers = (trainer.global_rank, trainer.local_rank, trainer.node_rank, trainer.world_size)
    assert numbers == (rank, rank % per_node, node, world)
    state = {k: v.clone() for k, v in strategy.lightning_module_state_dict().items()}
    return state, handle.budget.cpu_bytes or 0, numbers


LAYOUTS = [
    pytest.param(2, 1, 1, id="two-of-one"),
    pytest.param(3, 1, 1, id="three-of-one"),
    pytest.param(2, 2, 1, id="two-of-two"),
    pytest.param(2, 2, 2, id="two-of-two-tensor"),
]


@pytest.mark.parametrize(("nodes", "per_node", "tensor"), telling(LAYOUTS, "two-of-two-tensor"))
def test_nodes_train_as_one_process_and_share_their_own_memory(nodes: int, per_node: int, tensor: int) -> None:
    plain = Model()
    trainer_of("auto", 1, 1).fit(plain, DataLoader(DATA, batch_size=12))
    runs = run_ranks(fit, nodes * per_node, nodes, per_node, tensor, init_group=False)
    assert difference(runs[0][0], plain.state_dict()) < 1e-6
    assert {cpu_bytes for _, cpu_bytes, _ in runs} == {64 * 2**20 // per_node}


def uneven() -> None:
    """Two processes on the first node, one on the second."""
    rank = int(os.environ["RANK"])
    node, local, size = (0, rank, 2) if rank < 2 else (1, 0, 1)
    _describe(node, local, size)
    trainer_of(ElixirStrategy(), size, 2).fit(Model(), DataLoader(DATA, batch_size=4))


def test_uneven_nodes_are_refused() -> None:
    with pytest.raises(RankError, match="num_nodes=2"):
        run_ranks(uneven, 3, init_group=False)


PROGRAM = """
import os, sys, time
import torch
from torch.utils.data import DataLoader
import lightning_elixir
from tests.strategy.test_nodes import DATA, Model, trainer_of

class Slow(Model):
    def on_train_batch_start(self, batch, index):
        print("batch", index, flush=True)
        time.sleep(float(os.environ.get("SLOW_S", "0")))

strategy = lightning_elixir.ElixirStrategy(placement_policy="cpu", chunk_size=2048)
nodes, devices = int(sys.argv[1]), int(sys.argv[2])
trainer = trainer_of(strategy, devices, nodes)
try:
    trainer.fit(Slow(), DataLoader(DATA, batch_size=12 // (nodes * devices)))
except lightning_elixir.PeerLostError as error:
    print("lost:", error, flush=True)
    raise
state = strategy.lightning_module_state_dict()
if trainer.is_global_zero:
    torch.save(state, sys.argv[3])
"""


def _torchrun(node: int, nodes: int, per_node: int, port: int, folder: Path, **more: str) -> subprocess.Popen[str]:
    program = folder / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={per_node}"]
    command += [f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}"]
    command += [str(program), str(nodes), str(per_node), str(folder / "state.pt")]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **more}
    return subprocess.Popen(
        command, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@pytest.mark.full
@pytest.mark.parametrize(("nodes", "per_node"), [(2, 1), (3, 1), (2, 2)])
def test_torchrun_on_several_nodes(nodes: int, per_node: int, tmp_path: Path) -> None:
    port = _free_port()
    launched = [_torchrun(node, nodes, per_node, port, tmp_path) for node in range(nodes)]
    told = [process.communicate(timeout=240)[0] for process in launched]
    assert [process.returncode for process in launched] == [0] * nodes, "\n".join(told)
    plain = Model()
    trainer_of("auto", 1, 1).fit(plain, DataLoader(DATA, batch_size=12))
    found = torch.load(tmp_path / "state.pt")
    assert list(found) == list(plain.state_dict())


@pytest.mark.full
def test_the_ranks_of_the_other_node_hear_that_one_is_lost(tmp_path: Path) -> None:
    port = _free_port()
    first, second = (_torchrun(node, 2, 1, port, tmp_path, SLOW_S="1.5") for node in range(2))
    assert first.stdout is not None
    for line in first.stdout:
        if line.startswith("batch"):
            break
    children = Path(f"/proc/{second.pid}/task/{second.pid}/children").read_text().split()
    begin = time.monotonic()
    os.kill(int(children[0]), signal.SIGKILL)
    told = first.communicate(timeout=120)[0]
    second.communicate(timeout=120)
    assert first.returncode != 0
    assert "lost: rank 0 cannot go on: rank 1 has ended" in told
    assert time.monotonic() - begin < 60

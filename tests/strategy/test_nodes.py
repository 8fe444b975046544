"""Several nodes: on one machine, as torchrun or SLURM describes them, each with its own numbers of processes.

Where a test is in the default tier, what torchrun and srun start are forks, which need not import torch again; the
launcher, its rendezvous and the environment that it makes are torchrun's own. Every node has a hostname of its own: in
a namespace, where the system lets this user make one, else Python alone is told another name.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_elixir import ElixirStrategy, HybridAdam
from lightning_elixir._lightning import LightningModule, Trainer
from lightning_elixir.core import lifelines, peers
from lightning_elixir.errors import PeerLostError, PlanError
from lightning_elixir.patterns import Column, Row
from lightning_elixir.plan.hardware import HardwareSpec
from lightning_elixir.plan.types import Tier
from lightning_elixir.storage.nvme import scratch
from lightning_elixir.strategy import shared_plans
from lightning_elixir.strategy.engine_handle import EngineHandle
from tests.helpers import processes
from tests.helpers.dist import RankError, run_ranks
from tests.helpers.network import be_on, join, unplug, why_not  # noqa: F401 - for what is started
from tests.helpers.patterns import difference
from tests.helpers.tiers import full, telling

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


class OnSharedDisk(Model):
    """While it trains, another program begins to use the folder, which removes what dead ones have left there."""

    def on_train_batch_start(self, batch: Tensor, index: int) -> None:
        assert scratch.remove_stale(Path("shared")) == []


def fit_beside(first: dict[str, int], second: dict[str, int]) -> tuple[dict[str, Tensor], int, set[Tier], set[str]]:
    """Train on two nodes, whose folder for NVMe is the same; it keeps files' names and knows no locks, as some of those
    that hosts share, and no host sees the other's processes. Returns the weights, what a rank may use of its
    host, where states are, and whose files are open.

    Args:
        first: Of that node, `limit` as `cpu_memory_limit` and what is `free`, in bytes, where they are told.
        second: Of the other.
    """
    node = as_node(1)
    memory = (first, second)[node]
    limit = {"cpu_memory_limit": memory["limit"]} if "limit" in memory else {}
    options = {"gpu_memory_limit": "48KiB", "nvme_offload_dir": "shared", "hardware": NOMINAL, **limit}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scratch, "_host", lambda: f"node{node}")
        patch.setattr(scratch.ScratchFile, "unlink", lambda file: False)
        patch.setattr(scratch.fcntl, "flock", _refuse_lock)
        patch.setattr(scratch.psutil, "pid_exists", lambda number: number == os.getpid())
        patch.setattr(shared_plans, "available_host_bytes", lambda: memory.get("free", 2**36))
        strategy = ElixirStrategy(chunk_size="4KiB", **options)
        sampler = DistributedSampler(DATA, num_replicas=2, rank=node, shuffle=False)
        model = OnSharedDisk()
        trainer_of(strategy, 1, 2).fit(model, DataLoader(DATA, batch_size=6, sampler=sampler))
        named = {path.name for path in Path("shared").glob("*")}
        opened = {os.path.basename(os.readlink(path)) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
        state = {k: v.clone() for k, v in strategy.lightning_module_state_dict().items()}
        tiers = {chunk.optim_tier for chunk in strategy.plan.chunks}
        handle = EngineHandle.of(model)
        assert handle is not None
        handle.engine.close()
    return state, handle.budget.cpu_bytes or 0, tiers, named & opened


def _refuse_lock(*arguments: Any) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


NOMINAL = replace(HardwareSpec.nominal(), nvme_read_bytes_per_s=2e9, nvme_write_bytes_per_s=2e9)
LITTLE = 100 * 2**10
MODEL_BYTES = 24 * (16 + 1) * 16 * 4  # which chunks take the place of


@pytest.mark.parametrize(
    ("first", "second", "most"),
    [
        pytest.param({"limit": 2**26}, {"limit": LITTLE}, LITTLE, id="limited", marks=pytest.mark.full),
        pytest.param({}, {"free": LITTLE - MODEL_BYTES}, LITTLE, id="full"),
        pytest.param({}, {"limit": 2**26}, 2**26, id="neither", marks=pytest.mark.full),
    ],
)
def test_plans_hold_on_the_poorest_node(first: dict[str, int], second: dict[str, int], most: int) -> None:
    """Where one has little memory, states of both are on the disk that they share, each in its own file."""
    runs = run_ranks(fit_beside, 2, first, second, init_group=False)
    plain = plain_state(2)
    assert {name for name in plain if not torch.equal(plain[name], runs[0][0][name])} == set()
    assert runs[0][1] == runs[1][1]
    assert most // 2 < runs[0][1] <= most  # of what is free a part is kept back
    for node, (_, _, tiers, files) in enumerate(runs):
        assert (Tier.NVME in tiers) == (most == LITTLE)
        assert [name.startswith(f"elixir-offload-node{node}-") for name in files] == [True] * (most == LITTLE)
    assert list(Path("shared").glob("*")) == []


def uneven() -> None:
    """Two processes on the first node, one on the second."""
    rank = int(os.environ["RANK"])
    node, local, size = (0, rank, 2) if rank < 2 else (1, 0, 1)
    _describe(node, local, size)
    trainer_of(ElixirStrategy(), size, 2).fit(Model(), DataLoader(DATA, batch_size=4))


def test_uneven_nodes_are_refused() -> None:
    with pytest.raises(RankError, match="num_nodes=2"):
        run_ranks(uneven, 3, init_group=False)


# ------------------------------------------------------------------------------------- nodes with names of their own


def run_node(
    node: int,
    nodes: int,
    per_node: int,
    port: int,
    program: Callable[..., None],
    *arguments: Any,
    master: str = "127.0.0.1",
) -> None:
    """What `torchrun --nnodes=... train.py` does on one of the nodes; `program` is what it runs."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    be_on(f"node{node}")
    options = [f"--nnodes={nodes}", f"--nproc-per-node={per_node}", f"--node-rank={node}"]
    options += [f"--master-addr={master}", f"--master-port={port}", "--start-method=fork", "--monitor-interval=0.2"]
    config, _, _ = config_from_args(parse_args([*options, "train.py"]))
    try:
        elastic_launch(config, program)(nodes, per_node, *arguments)
    except ChildFailedError as error:
        sys.stderr.write(f"{error}\n")
        os._exit(1)
    os._exit(0)  # an interpreter that has imported so much takes seconds to end


class Telling(Model):
    """Leaves a file when a rank begins, and then takes its time.

    Args:
        folder: For `begun0` and so on, with the number of the process.
        pause_s: Before each batch.
    """

    def __init__(self, folder: str, pause_s: float) -> None:
        super().__init__()
        self.folder, self.pause_s = folder, pause_s

    def on_train_batch_start(self, batch: Tensor, index: int) -> None:
        Path(self.folder, f"begun{self.global_rank}").write_text(str(os.getpid()))
        time.sleep(self.pause_s)


def train(nodes: int, per_node: int, folder: str, pause_s: float = 0.0, timeout_s: float = 600.0) -> None:
    """A fit, as a user's program does it. Leaves behind what each rank has been, and the weights."""
    model, timeout = Telling(folder, pause_s), timedelta(seconds=timeout_s)
    strategy = ElixirStrategy(placement_policy="cpu", chunk_size="4KiB", cpu_memory_limit="64MiB", timeout=timeout)
    trainer = trainer_of(strategy, per_node, nodes)
    sampler = DistributedSampler(DATA, num_replicas=trainer.world_size, rank=trainer.global_rank, shuffle=False)
    trainer.fit(model, DataLoader(DATA, batch_size=12 // trainer.world_size, sampler=sampler))
    handle = EngineHandle.of(model)
    assert handle is not None
    told = {
        "host": socket.gethostname(),
        "numbers": [trainer.global_rank, trainer.node_rank, trainer.local_rank, trainer.world_size],
        "bytes": handle.budget.cpu_bytes,
    }
    Path(folder, f"rank{trainer.global_rank}.json").write_text(json.dumps(told))
    state = strategy.lightning_module_state_dict()
    if trainer.is_global_zero:
        torch.save(state, Path(folder, "state.pt"))


def plain_state(world: int) -> dict[str, Tensor]:
    """One process without a strategy: gradients of each rank's samples, their mean in the order of ranks, a step."""
    model = Model()
    optimizer = model.configure_optimizers()
    for step in range(2):
        grads = []
        for rank in range(world):
            model.zero_grad()
            model.training_step(DATA[rank::world][step * 12 // world : (step + 1) * 12 // world], step).backward()
            grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        for parameter, *of_ranks in zip(model.parameters(), *grads, strict=True):
            parameter.grad = sum(of_ranks[1:], of_ranks[0]) / world
        optimizer.step()
    return dict(model.state_dict())


def _environment(**more: str) -> dict[str, str]:
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK")
    known = {k: v for k, v in os.environ.items() if k not in ours and not k.startswith("SLURM_")}
    return known | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **more}


def _start(call: str, **environment: str) -> processes.Process:
    code = f"from tests.strategy.test_nodes import *\n{call}"
    return processes.start(processes.without_last_look(code), _environment(**environment))


def _start_slurm_task(task: int, tasks: int, port: int, folder: Path) -> processes.Process:
    """What `srun python train.py` starts on each of the nodes."""
    slurm = {"JOB_ID": "7", "JOB_NAME": "train", "NTASKS": tasks, "NTASKS_PER_NODE": 1, "NNODES": tasks, "PROCID": task}
    slurm |= {"LOCALID": 0, "NODEID": task, "JOB_NODELIST": f"node[0-{tasks - 1}]"}
    named = {f"SLURM_{name}": str(value) for name, value in slurm.items()}
    call = f"be_on('node{task}'); train({tasks}, 1, {str(folder)!r})"
    return _start(call, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **named)


def _wait_for(started: list[processes.Process]) -> None:
    try:
        assert [process.wait(120) for process in started] == [0] * len(started)
    finally:
        for process in started:
            process.kill()
            process.wait(60)


def _assert_is_plain(folder: Path, nodes: int, per_node: int) -> None:
    world = nodes * per_node
    for rank in range(world):
        node, local = rank // per_node, rank % per_node
        told = json.loads((folder / f"rank{rank}.json").read_text())
        assert told == {
            "host": f"node{node}",
            "numbers": [rank, node, local, world],
            "bytes": 64 * 2**20 // per_node,
        }
    found, expected = torch.load(folder / "state.pt"), plain_state(world)
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize(("nodes", "per_node"), [full(2, 1), full(2, 2), (3, 1), full(3, 2)])
def test_torchruns_nodes_give_what_pytorch_gives(nodes: int, per_node: int, tmp_path: Path) -> None:
    port = _free_port()
    calls = [f"run_node({node}, {nodes}, {per_node}, {port}, train, {str(tmp_path)!r})" for node in range(nodes)]
    _wait_for([_start(call) for call in calls])
    _assert_is_plain(tmp_path, nodes, per_node)


def lose(nodes: int, per_node: int, folder: str, timeout_s: float, is_soon: bool = True) -> None:
    """As `train`, on hosts of which none can see the processes of another; leaves behind what a lost peer raises.

    Args:
        is_soon: Hosts that vanish are noticed after three seconds.
    """
    peers._place = socket.gethostname
    lifelines._LONGEST_MEETING_S = 60.0  # a busy machine may be slow
    if is_soon:
        lifelines.IDLE_S, lifelines.ASK_EVERY_S, lifelines.NUM_UNANSWERED = 1, 1, 2
    try:
        train(nodes, per_node, folder, pause_s=2.0, timeout_s=timeout_s)
    except PeerLostError as error:
        Path(folder, f"lost{os.environ['RANK']}").write_text(str(error))
        raise


def _wait_until_all_train(folder: Path, world: int, started: processes.Process) -> None:
    while not all((folder / f"begun{rank}").exists() for rank in range(world)):
        assert started.poll() is None
        time.sleep(0.05)


# To the others a process that is stopped is late, since its system answers for it: they wait as long as `timeout` says.
@pytest.mark.full  # 12 s; that hosts vanish is noticed by the same look
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_lost_on_another_host_is_named(how: signal.Signals, tmp_path: Path) -> None:
    port, begun = _free_port(), tmp_path / "begun1"
    timeout_s = 20.0 if how == signal.SIGSTOP else 600.0
    started = [_start(f"run_node({node}, 2, 1, {port}, lose, {str(tmp_path)!r}, {timeout_s})") for node in range(2)]
    try:
        while not (begun.exists() and begun.read_text()):
            assert started[1].poll() is None
            time.sleep(0.05)
        os.kill(int(begun.read_text()), how)
        assert started[0].wait(120) != 0
    finally:
        with suppress(OSError):
            os.kill(int(begun.read_text()), signal.SIGKILL)
        for process in started:
            process.kill()
            process.wait(60)
    told = (tmp_path / "lost0").read_text()
    assert f"rank 0 cannot go on: rank 1 does not answer (process {begun.read_text()} on node1)" in told


def _start_joined(nodes: int, program: str, folder: Path, *, ipv6: bool = False) -> processes.Process:
    """Start `program` by torchrun on nodes that have networks of their own; it ends when they have, with their number
    if none has ended well."""
    if why_not():
        pytest.skip(why_not())
    code = (
        f"join({nodes}, lambda node: run_node(node, {nodes}, {program}, master='node0'), {str(folder)!r}, ipv6={ipv6})"
    )
    return _start(code, GLOO_SOCKET_IFNAME="eth0" if ipv6 else "")


VANISHING = [
    pytest.param(2, 1, 1, id="one-of-two"),
    pytest.param(3, 1, 1, id="one-of-three"),
    pytest.param(3, 1, 0, id="the-one-with-the-store"),
    pytest.param(2, 2, 0, id="with-two-ranks"),
]


def _assert_all_have_lost(folder: Path, nodes: int, per_node: int, victim: int) -> None:
    """Those of the other nodes name the victim and its ranks; those of the victim, which live on, the others."""
    told = {int(path.name.removeprefix("lost")): path.read_text() for path in folder.glob("lost*")}
    # torchrun ends the other ranks of a node when one has ended
    assert {rank // per_node for rank in told} == set(range(nodes))
    ranks = [", ".join(str(node * per_node + local) for local in range(per_node)) for node in range(nodes)]
    words = [f"host node{node} has vanished, with rank{'s' * (per_node > 1)} {r}:" for node, r in enumerate(ranks)]
    for rank, text in told.items():
        found = {node for node in range(nodes) if words[node] in text}
        is_victims = rank // per_node == victim
        assert (victim not in found and found) if is_victims else found == {victim}, told


@pytest.mark.parametrize(("nodes", "per_node", "victim"), telling(VANISHING, "with-two-ranks"))
def test_a_host_that_vanishes_is_noticed_by_all(nodes: int, per_node: int, victim: int, tmp_path: Path) -> None:
    started = _start_joined(nodes, f"{per_node}, 29500, lose, {str(tmp_path)!r}, 600.0", tmp_path)
    try:
        _wait_until_all_train(tmp_path, nodes * per_node, started)
        unplug(tmp_path, victim)
        assert started.wait(120) == nodes
    finally:
        started.kill()
        started.wait(60)
    _assert_all_have_lost(tmp_path, nodes, per_node, victim)


@pytest.mark.full
def test_a_host_of_ipv6_that_vanishes_is_noticed_within_half_a_minute(tmp_path: Path) -> None:
    started = _start_joined(2, f"1, 29500, lose, {str(tmp_path)!r}, 600.0, False", tmp_path, ipv6=True)
    try:
        _wait_until_all_train(tmp_path, 2, started)
        begin = time.monotonic()
        unplug(tmp_path, 1)
        assert started.wait(60) == 2
        assert 15 < time.monotonic() - begin < 45
    finally:
        started.kill()
        started.wait(60)
    _assert_all_have_lost(tmp_path, 2, 1, 1)


@pytest.mark.full
@pytest.mark.parametrize(("nodes", "per_node"), [(2, 1), (3, 1), (2, 2)])
def test_nodes_with_networks_of_their_own_give_what_pytorch_gives(nodes: int, per_node: int, tmp_path: Path) -> None:
    started = _start_joined(nodes, f"{per_node}, 29500, train, {str(tmp_path)!r}", tmp_path)
    _wait_for([started])
    _assert_is_plain(tmp_path, nodes, per_node)


def test_slurms_nodes_give_what_pytorch_gives(tmp_path: Path) -> None:
    port = _free_port()
    _wait_for([_start_slurm_task(task, 2, port, tmp_path) for task in range(2)])
    _assert_is_plain(tmp_path, 2, 1)


def refusal_of_two_by_two() -> str:
    """What a fit of two nodes with two devices each is refused for; empty if it is not."""
    try:
        trainer_of(ElixirStrategy(), 2, 2).fit(Model(), DataLoader(DATA, batch_size=4))
    except PlanError as error:
        return str(error)
    return ""


def uneven_tasks() -> str:
    """As SLURM describes `--ntasks=3 --nodes=2 --ntasks-per-node=2`."""
    rank = int(os.environ["RANK"])
    os.environ.update(
        SLURM_JOB_ID="7",
        SLURM_JOB_NAME="train",
        SLURM_NTASKS="3",
        SLURM_NTASKS_PER_NODE="2",
        SLURM_NNODES="2",
        SLURM_PROCID=str(rank),
        SLURM_LOCALID=str(rank % 2),
        SLURM_NODEID=str(rank // 2),
    )
    return refusal_of_two_by_two()


def test_uneven_tasks_of_slurm_are_refused_on_every_rank() -> None:
    for told in run_ranks(uneven_tasks, 3, init_group=False):
        assert "num_nodes=2 with devices=2 are 4 processes, and 3 were started" in told
        assert "--ntasks-per-node=2" in told


def three_and_one() -> str:
    """Of 2 x 2 processes three on the first node, where one of them has no device."""
    rank = int(os.environ["RANK"])
    _describe(*((0, rank, 3) if rank < 3 else (1, 0, 1)))
    return refusal_of_two_by_two()


def test_uneven_nodes_of_the_right_total_are_refused_on_every_rank() -> None:
    """Three ranks waited, as long as `timeout` says, for the one that had ended in an `IndexError`."""
    *first, second = run_ranks(three_and_one, 4, init_group=False, timeout_s=60)
    assert all("devices=2, and on this node (0) 3 were started: start 2 on each of 2 nodes" in told for told in first)
    assert "devices=2, and on this node (1) 1 were started" in second


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

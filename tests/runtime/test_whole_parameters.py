"""Muon and Adafactor over chunks: each parameter as a whole, with plain PyTorch's numbers, also where ranks cut it."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor, nn

from lightning_elixir import HybridAdam
from lightning_elixir.core.device import CpuDevice
from lightning_elixir.errors import PlanError
from lightning_elixir.plan.memory import Scheme
from lightning_elixir.plan.owners import num_slots, owners_of, whole_update_bytes
from lightning_elixir.plan.regime import TrainingRegime
from lightning_elixir.plan.types import Tier
from lightning_elixir.profiling.ignored import ignored_parameters
from lightning_elixir.stepping.whole_steps import WholeSteps, taking_turns
from lightning_elixir.stepping.whole_stream import HostUpdate, WholeStream
from lightning_elixir.strategy.regimes import with_optimizer
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers import optimizers
from tests.helpers.dist import run_ranks
from tests.helpers.plans import make_plan
from tests.helpers.tiers import crossed, full, telling

STEPS = 4


class Net(nn.Module):
    """Matrices of several shapes, one of them transposed in memory, a tensor of four dimensions, vectors.

    Args:
        is_large: Two matrices have more than 4096 elements.
    """

    def __init__(self, is_large: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        width, columns = (128, 256) if is_large else (60, 30)
        self.first, self.norm = nn.Linear(24, 40), nn.LayerNorm(40)
        self.wide, self.last = nn.Linear(40, width, bias=False), nn.Linear(width, 8)
        self.across = nn.Parameter(torch.randn(columns, 24).t() * 0.1)
        self.filters = nn.Parameter((torch.randn(2, 3, 4, 2) * 0.1).to(memory_format=torch.channels_last))
        self.unused = nn.Parameter(torch.randn(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.first(x)))
        out: Tensor = self.last(torch.tanh(self.wide(h))).sum() + (x @ self.across).sin().sum()
        return out * 0.1 + (self.filters * x[0, :24].view(1, 3, 4, 2)).square().sum()


def _adafactor(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices}, {"params": rest, "lr": 0.02, "weight_decay": 0.1}]
    return [torch.optim.Adafactor(groups, lr=0.05, foreach=False)]


def _muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Beside AdamW for the rest."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01, foreach=False)]


def _muon_and_hybrid(model: nn.Module) -> list[torch.optim.Optimizer]:
    muon, adam = _muon(model)
    return [muon, HybridAdam(adam.param_groups[0]["params"], lr=0.01)]


def _transformers(model: nn.Module) -> list[torch.optim.Optimizer]:
    from transformers.optimization import Adafactor

    return [Adafactor(model.parameters(), lr=0.01, scale_parameter=False, relative_step=False, beta1=0.5)]


def _bitsandbytes(name: str, **options: Any) -> Callable[[nn.Module], list[torch.optim.Optimizer]]:
    """In 8 bits with blocks of 256 elements in the larger tensors, and fp32 states in the others."""

    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        import bitsandbytes

        more = {"momentum": 0.9} if name.startswith(("SGD", "LARS")) else {}
        every = {"lr": 0.01, "min_8bit_size": 300, **more, **options}
        return [getattr(bitsandbytes.optim, name)(model.parameters(), **every)]

    return make


def _torchao(name: str) -> Callable[[nn.Module], list[torch.optim.Optimizer]]:
    """With moments of few bits in the larger tensors, and plain ones in the others."""

    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        optimizers = pytest.importorskip("torchao.optim", reason="has these optimizers")
        return [getattr(optimizers, name)(model.parameters(), lr=0.01)]

    return make


OF_TORCHAO = ("AdamW8bit", "Adam4bit", "AdamWFp8")
OF_BITSANDBYTES = ("Adam", "AdamW", "LAMB", "Lion", "SGD", "RMSprop", "Adagrad", "LARS")
MAKE: dict[str, Callable[[nn.Module], list[torch.optim.Optimizer]]] = {
    "adafactor": _adafactor,
    "muon": _muon,
    "muon and HybridAdam": _muon_and_hybrid,
    "transformers": _transformers,
    **{f"{name}{bits}": _bitsandbytes(f"{name}{bits}") for name in OF_BITSANDBYTES for bits in ("8bit", "32bit")},
    **{f"{name} of torchao": _torchao(name) for name in OF_TORCHAO},
    "AdEMAMix": _bitsandbytes("AdEMAMix", t_alpha=5),
    "AdEMAMix8bit": _bitsandbytes("AdEMAMix8bit"),
    "AdamW": _bitsandbytes("AdamW"),
    "AdamW told to use 8 bits": _bitsandbytes("AdamW", optim_bits=8),
}
PLACES: dict[str, dict[str, Any]] = {
    "offloaded": {"placement_policy": "cpu", "chunk_size": 4096},
    "resident": {"placement_policy": "cuda", "chunk_size": 6000},
    "half": {"placement_policy": "const", "chunk_size": 4096, "offload_optim_frac": 0.5, "offload_param_frac": 0.5},
}


def _data(seed: int) -> Tensor:
    return torch.randn(6, 24, generator=torch.Generator().manual_seed(seed))


def _net(name: str) -> Net:
    return Net(is_large="torchao" in name)


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torchao compiles its update, for every shape; here it runs as it is written."""
    return functools.wraps(function)(torch.compiler.set_stance("force_eager")(function))


@_uncompiled
def _plain(name: str, world_size: int, clip: float = 0.0) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    model = _net(name)
    optimizers = MAKE[name](model)
    for step in range(STEPS):
        for rank in range(world_size):
            (model(_data(step * world_size + rank)) / world_size).backward()
        if clip:
            for optimizer in optimizers:
                torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizers


@_uncompiled
def _trained(name: str, clip: float = 0.0, *, is_loaded: bool = True, **place: Any) -> tuple[Any, ...]:
    world_size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    model = _net(name)
    module = ElixirModule(model, make_plan(model, world_size=world_size, **place))
    optimizers = [ElixirOptimizer(module, inner, init_step=True) for inner in MAKE[name](model)]
    for step in range(STEPS):
        optimizers[0].backward(module(_data(step * world_size + rank)))
        for optimizer in optimizers:
            if clip:
                optimizer.clip_grad_norm_(clip)
            optimizer.step()
            optimizer.zero_grad()
        if step == 1 and is_loaded:  # states go out and in, and placements change
            for optimizer in optimizers:
                state = module.engine.comm.exchange_objects(_as_a_file(optimizer.state_dict()))[0]
                optimizer.load_state_dict(torch.load(io.BytesIO(state), weights_only=False))
            if place["placement_policy"] == "cpu" and world_size == 1:
                plan = module.plan
                module.replan(make_plan(_net(name), world_size=world_size, placement_policy="cuda", chunk_size=4096))
                module.replan(plan)
    values, states = module.full_state_dict(), [optimizer.state_dict() for optimizer in optimizers]
    evictions = module.stats().evictions
    module.close()
    return values, states, evictions


def _as_a_file(state: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _unwrapped(state: dict[str, Any]) -> dict[str, Any]:
    """bitsandbytes saves some of its states as a dictionary of their own."""
    return {
        k: v for key, value in state.items() for k, v in (value if isinstance(value, dict) else {key: value}).items()
    }


def _differing(
    got: tuple[Any, ...], model: nn.Module, optimizers: list[torch.optim.Optimizer], **close: float
) -> list[str]:
    def is_same(a: Any, b: Any) -> bool:
        if hasattr(b, "tensor_attrs"):  # torchao's, whose bytes are in the tensors inside
            is_alike = repr(a) == repr(b)
            return is_alike and all(is_same(getattr(a, name), getattr(b, name)) for name in b.tensor_attrs)
        a, b = torch.as_tensor(a), torch.as_tensor(b)
        if a.dtype != b.dtype:
            return False
        a, b = (value.view(torch.uint8) if value.dtype is torch.float8_e4m3fn else value for value in (a, b))
        return a.shape == b.shape and (torch.allclose(a, b, **close) if close else torch.equal(a, b))

    found = [name for name, value in model.state_dict().items() if not is_same(got[0][name], value)]
    for number, optimizer in enumerate(optimizers):
        for index, saved in optimizer.state_dict()["state"].items():
            mine, state = got[1][number]["state"].get(index, {}), _unwrapped(saved)
            found += [f"{number} {index} {k}" for k in mine.keys() - state.keys()]
            found += [f"{number} {index} {k}" for k, v in state.items() if k not in mine or not is_same(mine[k], v)]
    return found


@crossed(together=1, name=MAKE, place=PLACES)
def test_bits_of_plain_torch_on_one_rank(name: str, place: str) -> None:
    got = _trained(name, **PLACES[place])
    close = {"rtol": 1e-5, "atol": 1e-6} if "Hybrid" in name else {}
    plain = _plain(name.replace(" and HybridAdam", ""), 1) if "Hybrid" not in name else _plain(name, 1)
    assert _differing(got, *plain, **close) == []
    assert place != "offloaded" or got[2] > 0


def test_clipping() -> None:
    got = _trained("adafactor", 0.01, **PLACES["offloaded"])
    assert _differing(got, *_plain("adafactor", 1, 0.01), rtol=1e-5, atol=1e-7) == []


@pytest.mark.parametrize(
    ("name", "world_size"),
    [("adafactor", 2), full("adafactor", 3), full("muon", 2), ("muon", 3), full("AdamW8bit", 2)]
    + [full("AdamW8bit of torchao", 2), full("Adam4bit of torchao", 3), full("AdEMAMix8bit", 2)],
)
def test_ddps_numbers_on_several_ranks(name: str, world_size: int) -> None:
    got = run_ranks(_trained_on_rank, world_size, name)
    # Two halves are added exactly, so that two ranks have DDP's bits; three thirds are not.
    # Muon computes in bf16, which makes 2**-8 of the last bit of a gradient.
    close = {} if world_size == 2 else {"rtol": 1e-4, "atol": 1e-5 if name == "adafactor" else 2e-3}
    assert _differing(got[0], *_plain(name, world_size), **close) == []


def _trained_on_rank(name: str) -> tuple[Any, ...]:
    return _trained(name, **PLACES["offloaded"])


def test_parameters_are_cut_and_owned_evenly() -> None:
    plan = make_plan(Net(), world_size=2, **PLACES["offloaded"])
    owners = owners_of(plan.chunks, 2)
    assert {owners[c.id, i] for c in plan.chunks for i in range(len(c.members))} == {0, 1}
    loads = [sum(plan.chunks[c].members[i].numel for (c, i), o in owners.items() if o == rank) for rank in (0, 1)]
    assert max(loads) < 2.5 * min(loads)


def test_the_plan_counts_what_an_update_takes() -> None:
    plan = make_plan(Net(), **PLACES["offloaded"])
    members = {c.id: set(range(len(c.members))) for c in plan.chunks}
    assert whole_update_bytes(plan.chunks, members, 1) == 80 * 40 * 60  # of the largest parameter
    assert whole_update_bytes(plan.chunks, {i: set() for i in members}, 2) == 0
    regime = with_optimizer(TrainingRegime(), can_stream=False, num_states=1, whole_update_bytes=777)
    assert Scheme(1, True, 4096, regime).stream_bytes(plan.chunks) == 777


def test_a_limit_that_changes_counts_each_parameters_states() -> None:
    model = Net()
    module = ElixirModule(model, make_plan(model, **PLACES["offloaded"]))
    optimizers = [ElixirOptimizer(module, inner) for inner in _muon_and_hybrid(model)]
    assert [optimizer.state_count for optimizer in optimizers] == [(1, 0), (2, 0)]
    regime = module._limited.regime
    matrices = [name for name, p in model.named_parameters() if p.dim() == 2]
    assert regime.num_states == 2
    assert dict(regime.other_states) == dict.fromkeys(matrices, (1, 0))
    module.close()


@pytest.mark.parametrize(
    ("package", "name", "bits", "count", "small_count"),
    [
        ("bitsandbytes", "AdamW8bit", None, 3, 8),
        ("bitsandbytes", "Lion8bit", None, 2, 4),
        ("bitsandbytes", "AdamW", 8, 3, 8),
        ("bitsandbytes", "AdamW", 32, 8, 8),
        ("bitsandbytes", "Lion", 32, 4, 4),
        ("bitsandbytes", "AdEMAMix8bit", None, 4, 12),
        ("bitsandbytes", "AdEMAMix", 32, 12, 12),
        ("torchao", "AdamW8bit", None, 3, 8),
        ("torchao", "Adam4bit", None, 2, 8),
        ("torchao", "AdamFp8", None, 3, 8),
    ],
)
def test_states_of_few_bits_are_counted_as_what_they_take(
    package: str, name: str, bits: int | None, count: int, small_count: int
) -> None:
    more = {} if bits is None else {"optim_bits": bits}
    optimizers = pytest.importorskip(f"{package}.optim", reason="has these optimizers")
    model = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256))
    module = ElixirModule(model, make_plan(model, placement_policy="cpu"))
    optimizer = ElixirOptimizer(module, getattr(optimizers, name)(model.parameters(), lr=1e-3, **more))
    assert optimizer.state_count == (0, count)
    optimizer.backward(module(torch.randn(2, 256)).square().mean())
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()
    held = module.stats().held_bytes["cpu_states"] / sum(p.numel() for p in model.parameters())
    assert count - 1 < held <= count
    regime = with_optimizer(TrainingRegime(), can_stream=False, num_states=0, byte_states=count)
    assert regime.data_bytes["bfloat16"].states == count
    small = nn.Linear(32, 32)  # of fp32 then
    other = ElixirModule(small, make_plan(small, placement_policy="cpu"))
    inner = getattr(optimizers, name)(small.parameters(), lr=1e-3, **more)
    assert ElixirOptimizer(other, inner).state_count == (0, small_count)
    module.close()
    other.close()


def test_on_nvme_is_refused() -> None:
    model = Net()
    module = ElixirModule(model, make_plan(model, placement_policy="cpu", chunk_size=4096, nvme_offload_fraction=1.0))
    with pytest.raises(PlanError, match="which Adafactor cannot update there"):
        ElixirOptimizer(module, torch.optim.Adafactor(model.parameters()))
    module.close()


@pytest.mark.parametrize("name", telling([*optimizers.MAKE], "Muon and HybridAdam", "ScheduleFree"))
def test_beside_plain_torch(name: str) -> None:
    """What tests/gpu does on a GPU. Modes of schedule-free optimizers round on their way there and back."""
    difference = _uncompiled(optimizers.largest_difference)(name, "offloaded", torch.device("cpu"))
    assert difference <= (1e-6 if "Hybrid" in name or name == "ScheduleFree" else 0.0)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # the compiler's
@torch._inductor.config.patch(compile_threads=1)  # others would stay
def test_bits_of_compiled_updates() -> None:
    """Two matrices of one shape, so that torchao compiles once, for plain PyTorch and for us."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 64, bias=False))
    model = copy.deepcopy(plain)
    (theirs,) = _torchao("AdamW8bit")(plain)
    module = ElixirModule(model, make_plan(model, placement_policy="cpu", chunk_size=16384))
    ours = ElixirOptimizer(module, _torchao("AdamW8bit")(model)[0])
    for seed in range(3):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
        plain(x).square().mean().backward()
        theirs.step()
        theirs.zero_grad()
        ours.backward(module(x).square().mean())
        ours.step()
        ours.zero_grad()
    assert _differing((module.full_state_dict(), [ours.state_dict()]), plain, [theirs]) == []
    module.close()


@pytest.mark.parametrize("place", ["offloaded", "half"])
@pytest.mark.parametrize("name", ["Muon and AdamW", "Adafactor", "AdamW8bit", "AdEMAMix8bit", "AdamW8bit of torchao"])
def test_states_on_the_host_go_through_slots(name: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    issued: list[HostUpdate] = []
    issue = WholeStream.issue
    monkeypatch.setattr(WholeSteps, "_is_streamed", lambda self, chunk: chunk.spec.optim_tier is Tier.CPU)
    monkeypatch.setattr(WholeStream, "issue", lambda self, update: issued.append(update) or issue(self, update))
    assert _uncompiled(optimizers.largest_difference)(name, place, torch.device("cpu")) == 0.0
    assert len(issued) >= 4
    assert issued[-1].slot_bytes > issued[-1].value.nbytes + issued[-1].grad.nbytes  # states came, too


class LoggedLane(CpuDevice):
    """A device whose lanes and events tell of themselves."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self._log = log
        self._names = iter(("up", "down"))

    def new_lane(self) -> Any:
        log, name, count = self._log, next(self._names, "?"), iter(range(100))

        class Lane:
            issue = resume = staticmethod(contextlib.nullcontext)

            @staticmethod
            def record() -> Any:
                number = next(count)
                log.append(f"{name} {number}")
                wait = functools.partial(log.append, f"host waits for {name} {number}")
                return SimpleNamespace(wait=lambda: None, synchronize=wait, is_over=lambda: False)

        return Lane()


def _adding(value: torch.Tensor, home: torch.Tensor) -> HostUpdate:
    def step(value: torch.Tensor, grad: torch.Tensor, states: dict[str, Any]) -> dict[str, Any]:
        value.add_(grad * states["momentum"])
        return {"momentum": states["momentum"].add_(1)}

    grad = torch.full_like(value, 10.0)
    return HostUpdate(value, grad, None, {"momentum": home}, step, lambda states: home.copy_(states["momentum"]))


def _through_slots(numels: Sequence[int], num_slots: int) -> list[str]:
    """What a device sees of updates of these sizes."""
    log: list[str] = []
    stream = WholeStream(LoggedLane(log))
    values, homes = [torch.full((n,), float(i)) for i, n in enumerate(numels)], [torch.ones(n) for n in numels]
    updates = [_adding(value, home) for value, home in zip(values, homes, strict=True)]
    stream.open(max(update.slot_bytes for update in updates), num_slots)
    for update in updates:
        stream.issue(update)
    stream.finish()
    stream.close()
    assert [v[0].item() for v in values] == [10.0 + i for i in range(len(numels))]
    assert all(torch.equal(home, torch.full_like(home, 2.0)) for home in homes)
    return log


def test_a_slot_is_filled_again_when_its_parameter_is_back() -> None:
    assert _through_slots([2000] * 4, 3) == [
        *("up 0", "down 0", "up 1", "down 1", "up 2", "down 2", "host waits for down 0", "up 3", "down 3"),
        *("host waits for down 1", "host waits for down 2", "host waits for down 3"),
    ]


def test_small_parameters_share_a_slot() -> None:
    """Two large ones take both slots; three small ones take the place of the first, and the next large one waits for
    the second alone."""
    assert _through_slots([2000, 2000, 500, 500, 500, 2000], 2) == [
        *("up 0", "down 0", "up 1", "down 1"),
        *("host waits for down 0", "up 2", "down 2", "up 3", "down 3", "up 4", "down 4"),
        *("host waits for down 1", "up 5", "down 5", "host waits for down 4", "host waits for down 5"),
    ]


def test_the_largest_parameters_get_fewer_slots() -> None:
    million = 10**6
    assert [num_slots(n * million) for n in (0, 1, 67, 100, 101, 134, 135, 1000)] == [4, 4, 4, 4, 3, 3, 3, 3]
    of_bytes = [(67, 10), (67, 16), (67, 20), (135, 16), (135, 20)]
    assert [num_slots(n * million, each * n * million + 4096) for n, each in of_bytes] == [4, 4, 3, 3, 2]


def test_chunks_of_both_sides_take_turns() -> None:
    assert taking_turns([1, 2, 3, 4], [5, 6]) == [5, 1, 2, 3, 4, 6]
    assert taking_turns([], [5, 6]) == [5, 6]


@pytest.mark.parametrize("kind", [torch.optim.Muon, torch.optim.Adafactor])
def test_beside_parameters_that_are_ignored(kind: type[torch.optim.Optimizer]) -> None:
    """They lie in chunks behind those of the plan, where the owners of parameters were looked for."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3)))
    model = copy.deepcopy(plain)
    plan = make_plan(model, placement_policy="cpu", chunk_size=2048, ignored=ignored_parameters(model, ["1"]))
    module = ElixirModule(model, plan, device="cpu", ignored=["1"])
    oracle = kind(plain.parameters(), lr=0.02)
    optimizer = ElixirOptimizer(module, kind(model.parameters(), lr=0.02))
    for seed in range(2):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))
        for net, step in ((plain, oracle), (module, optimizer)):
            loss = net(x).square().mean()
            step.backward(loss) if isinstance(step, ElixirOptimizer) else loss.backward()
            step.step()
            step.zero_grad()
    state = module.full_state_dict()
    module.close()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())

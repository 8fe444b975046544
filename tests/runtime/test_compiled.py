"""Compiled modules whose chunks come and go: the numbers, and the graphs, of compiled plain PyTorch."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_elixir import profile_memory
from lightning_elixir.core.compiled_modules import compiled_regions
from lightning_elixir.errors import PlanError, StateError
from lightning_elixir.optim.hybrid_adam import HybridAdam
from lightning_elixir.plan.hardware import HardwareSpec
from lightning_elixir.plan.packing import PackedChunk
from lightning_elixir.plan.profile import step_profile
from lightning_elixir.plan.types import AccessTrace
from lightning_elixir.runtime import forwards
from lightning_elixir.runtime.forwards import check_addresses
from lightning_elixir.runtime.phases import Phase
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.dist import run_processes, run_ranks
from tests.helpers.plans import make_plan
from tests.helpers.tiers import crossed, full, telling

# Of the compiler's own code, which hides the first from users.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning"),
]

WIDTH, DEPTH = 32, 5
PLACEMENTS = {
    "tight": {"placement_policy": "cpu", "chunk_size": 8192},
    "resident": {"placement_policy": "cuda", "chunk_size": 8192},
}


class Block(nn.Module):
    def __init__(self, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm(x)
        if self.is_checkpointed:
            return x + checkpoint(self._feed, inner, use_reentrant=False)
        return x + self._feed(inner)

    def _feed(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    """Checkpointing: "no", "around" blocks, "reentrant" around them, or "inside"."""

    def __init__(self, checkpointing: str = "no") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block(checkpointing == "inside") for _ in range(DEPTH))
        self.out = nn.Linear(WIDTH, 4)
        self.is_reentrant = checkpointing == "reentrant"
        self.is_around = self.is_reentrant or checkpointing == "around"

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.is_reentrant) if self.is_around else block(x)
        return self.out(x)


def by_call(net: Net) -> Net:
    for block in net.blocks:
        block.compile(backend="aot_eager")
    return net


def by_module(net: Net) -> Net:
    for index, block in enumerate(net.blocks):
        net.blocks[index] = torch.compile(block, backend="aot_eager")
    return net


def by_forward(net: Net) -> Net:
    for block in net.blocks:
        block.forward = torch.compile(block.forward, backend="aot_eager")
    return net


class ClassCompiled(Block):
    """Whose class has a compiled forward."""

    forward = torch.compile(Block.forward, backend="aot_eager")


def by_class(net: Net) -> Net:
    for block in net.blocks:
        block.__class__ = ClassCompiled
    return net


def as_a_whole(net: Net) -> Any:
    return torch.compile(net, backend="aot_eager")


def not_at_all(net: Net) -> Net:
    return net


FORMS = [by_call, by_module, by_forward, by_class, as_a_whole]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """The compiler keeps models alive, and with them their engines' threads."""
    yield
    for ours in Ours.made:
        ours.module.close()
    Ours.made.clear()


def num_graphs() -> int:
    """Compiled since the last call; there must have been no break in any."""
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"]
    number = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    counters.clear()
    return int(number)


def batch(step: int, rows: int = 4) -> Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(step))


def new_adam(model: nn.Module, device: str = "cpu") -> torch.optim.Optimizer:
    """On a GPU one whose host updates have the same bits."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, foreach=False) if device == "cpu" else HybridAdam(trained, lr=1e-2)


@dataclass
class Trained:
    losses: list[Tensor]
    state: list[Tensor]
    num_graphs: int


class Plain:
    """A model and an optimizer, under the names of the engine's."""

    def __init__(self, model: nn.Module, device: str = "cpu") -> None:
        self.model = model.to(device)
        self.device = device
        self._adam = new_adam(model, device)

    def __call__(self, x: Tensor) -> Tensor:
        return self.model(x.to(self.device))

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self._adam.step()
        self._adam.zero_grad()

    def values(self) -> list[Tensor]:
        return list(self.model.state_dict().values())


class Ours:
    made: ClassVar[list[Ours]] = []

    def __init__(
        self,
        model: nn.Module,
        placement: str = "tight",
        activations: str | None = None,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        self.model = model
        self.device = device
        plan = make_plan(model, **(PLACEMENTS[placement] | options))
        self.module = ElixirModule(model, plan, device=torch.device(device), activations=activations)
        self._optimizer = ElixirOptimizer(self.module, new_adam(model, device))
        self.is_tight = placement == "tight"
        self.made.append(self)

    def __call__(self, x: Tensor) -> Tensor:
        return self.module(x.to(self.device))

    def backward(self, loss: Tensor) -> None:
        self._optimizer.backward(loss)

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def values(self) -> list[Tensor]:
        return list(self.module.full_state_dict().values())


def steps(run: Any, num_steps: int = 4, rows: int = 4) -> Trained:
    """All but the first with two micro-batches, and a look without gradients before them. Nothing is compiled after the
    third."""
    losses, compiled, num_after_third = [], torch._dynamo.utils.counters["stats"], None
    for step in range(num_steps):
        if step:
            with torch.no_grad():
                losses.append(run(batch(100 + step, rows)).sum())
        for micro in range(2 if step else 1):
            loss = run(batch(2 * step + micro, rows)).square().mean()
            run.backward(loss)
            losses.append(loss.detach())
        run.step()
        if step == 2:
            num_after_third = compiled["unique_graphs"]
    assert num_after_third in (None, compiled["unique_graphs"])
    return Trained(losses, [value.cpu().clone() for value in run.values()], num_graphs())


def plain_steps(run: Any, num_steps: int, micro_batches: int = 1) -> Trained:
    """Graphs are not counted."""
    losses = []
    for step in range(num_steps):
        for micro in range(micro_batches):
            loss = run(batch(micro_batches * step + micro)).square().mean()
            run.backward(loss)
            losses.append(loss.detach())
        run.step()
    return Trained(losses, [value.cpu().clone() for value in run.values()], 0)


def assert_equal(actual: Trained, expected: Trained) -> None:
    assert all(map(torch.equal, actual.losses, expected.losses))
    assert all(map(torch.equal, actual.state, expected.state))
    assert actual.num_graphs == expected.num_graphs


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of looks without gradients
@crossed(
    told=["by_class-tight-reentrant", "by_module-tight-around", "by_call-resident-inside"],
    form=FORMS,
    placement=PLACEMENTS,
    checkpointing=["no", "around", "inside", "reentrant"],
)
def test_as_compiled_plain_pytorch(form: Callable[[Net], nn.Module], placement: str, checkpointing: str) -> None:
    expected = steps(Plain(form(Net(checkpointing))))
    ours = Ours(form(Net(checkpointing)), placement)
    assert_equal(steps(ours), expected)
    stats = ours.module.stats()
    assert stats.overflows == 0  # the plan has known what compiled modules need at once
    if placement == "tight" and form is not as_a_whole:
        assert stats.evictions > 20


def train_with_inductor(device: str = "cpu") -> None:
    """Run by a process of its own, since the compiler keeps threads."""

    def compiled() -> Net:
        net = Net("around")
        for block in net.blocks:
            block.compile()
        return net

    expected = steps(Plain(compiled(), device))
    for placement in PLACEMENTS:
        ours = Ours(compiled(), placement, device=device)
        assert_equal(steps(ours), expected)
        assert ours.module.stats().evictions > 20 or placement != "tight"


def train_with_cuda_graphs() -> None:
    """Run by a process of its own. Chunks that stay, and are updated where they are, keep the addresses that graphs
    need; others are refused."""

    def compiled() -> Any:
        return torch.compile(Net(), mode="reduce-overhead")

    with pytest.raises(PlanError, match="compiled with CUDA graphs"):
        Ours(compiled(), "tight", device="cuda")
    expected = plain_steps(Plain(compiled(), "cuda"), 8)
    assert_equal(plain_steps(Ours(compiled(), "resident", device="cuda"), 8), expected)


@pytest.mark.full
def test_placements_give_the_same_bits_with_the_compiler_that_people_use() -> None:
    code = "from tests.runtime.test_compiled import train_with_inductor; train_with_inductor()"
    assert run_processes(code, 1) == [0]


@pytest.mark.full
@pytest.mark.parametrize("form", [by_call, full(by_module), full(by_forward), full(by_class)])
def test_frozen_weights_and_adapters(form: Callable[[Net], nn.Module]) -> None:
    def frozen() -> nn.Module:
        net = Net("around")
        for block in net.blocks:
            block.requires_grad_(False)
            block.down = nn.Sequential(block.down, nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False))
        return form(net)

    expected = steps(Plain(frozen()))
    ours = Ours(frozen())
    assert_equal(steps(ours), expected)
    assert ours.module.stats().evictions > 20


MANY = 2048  # rows, of which blocks save what is large enough to go to host memory
FATES = ["keep", "recompute", "offload", "recompute_offloaded"]


def partly_trained(trained: str) -> Net:
    """All of it, some blocks alone, or adapters."""
    net = Net()
    for block in net.blocks if trained == "adapters" else net.blocks[:2] if trained == "some" else ():
        block.requires_grad_(False)
    for block in net.blocks if trained == "adapters" else ():
        block.down = nn.Sequential(block.down, nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False))
    return net


def check_fates(run: Ours, fate: str) -> None:
    stats = run.module.stats()
    assert (stats.recomputed_blocks > 0) == fate.startswith("recompute")
    assert (stats.activations_out_bytes > 0) == fate.endswith(("offload", "offloaded"))
    assert stats.activations_left_bytes == 0
    assert not run.is_tight or stats.evictions > 20


@pytest.mark.full
@pytest.mark.parametrize(
    ("fate", "trained", "form", "placement"),
    [
        full("recompute", "adapters", by_call, "tight"),
        ("offload", "some", by_module, "tight"),
        full("recompute_offloaded", "all", by_call, "tight"),
        full("recompute_offloaded", "adapters", by_module, "tight"),
        full("keep", "adapters", by_module, "tight"),
        full("keep", "some", by_call, "resident"),
        full("recompute", "some", by_module, "resident"),
        full("offload", "adapters", by_call, "resident"),
    ],
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_with_fates_of_activations(fate: str, trained: str, form: Callable[[Net], nn.Module], placement: str) -> None:
    """Accumulating, evaluating, partly frozen: nothing is compiled after the third step."""
    expected = steps(Plain(form(partly_trained(trained))), rows=MANY)
    ours = Ours(form(partly_trained(trained)), placement, activations=fate)
    actual = steps(ours, rows=MANY)
    assert all(map(torch.equal, actual.losses, expected.losses))
    assert all(map(torch.equal, actual.state, expected.state))
    check_fates(ours, fate)


class Bare(Ours):
    """Without telling the engine of the backward, and with a user's hook at a parameter."""

    def __init__(self, model: nn.Module, placement: str = "tight") -> None:
        super().__init__(model, placement)
        self.seen: list[Tensor] = []
        next(iter(model.parameters())).register_hook(lambda grad: self.seen.append(grad.detach().clone()))

    def backward(self, loss: Tensor) -> None:
        loss.backward()


@pytest.mark.full
@pytest.mark.parametrize("form", telling(FORMS[:4], "by_class"))
def test_where_parameters_stay_intercepted_in_backward(form: Callable[[Net], nn.Module]) -> None:
    """Blocks that run again in such a backward are still those that the compiler knows."""
    expected = steps(Plain(form(Net("around"))))
    ours = Bare(form(Net("around")))
    assert_equal(steps(ours), expected)
    assert ours.seen


@pytest.mark.full
def test_such_a_backward_where_everything_stays() -> None:
    expected = steps(Plain(by_call(Net("around"))))
    assert_equal(steps(Bare(by_call(Net("around")), "resident")), expected)


@pytest.mark.parametrize("chunk_size", [8192, 1 << 17], ids=["small chunks", "one chunk"])
@pytest.mark.full
def test_beside_a_thread_that_reads(chunk_size: int) -> None:
    """Also where a module above has the chunk brought."""
    plain, ours = Plain(by_call(Net())), Ours(by_call(Net()), chunk_size=chunk_size)
    steps(plain, 2)
    steps(ours, 2)
    thread = threading.Thread(target=lambda: [p.detach().sum() for p in ours.model.parameters()])
    thread.start()
    thread.join()
    assert ours.module.engine.turn.was_contended
    expected = steps(plain)
    assert_equal(steps(ours), expected)


@pytest.mark.parametrize("form", telling(FORMS[:4], "by_forward"))
def test_compiled_when_the_engine_is_there(form: Callable[[Net], nn.Module]) -> None:
    expected = steps(Plain(form(Net())))
    net = Net()
    ours = Ours(net)
    form(net)
    assert_equal(steps(ours), expected)


def fully(net: Net) -> Net:
    for block in net.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    return net


@pytest.mark.full
@pytest.mark.parametrize("form", [full(fully), by_module, full(by_forward)])
def test_compiled_after_the_first_step(form: Callable[[Net], Any]) -> None:
    def trained(run: Any) -> Trained:
        steps(run, 2)
        form(run.model)
        return steps(run)

    expected = trained(Plain(Net()))
    assert expected.num_graphs > 0
    assert_equal(trained(Ours(Net())), expected)


@pytest.mark.full
def test_compiled_again() -> None:
    """As a `configure_model` does that runs before each fit."""

    def trained(run: Any) -> Trained:
        fully(run.model)
        steps(run, 2)
        fully(run.model)
        return steps(run)

    expected = trained(Plain(fully(Net())))
    ours = Ours(fully(Net()))
    assert_equal(trained(ours), expected)
    assert ours.module.stats().overflows == 0


def test_a_call_that_finds_no_memory_is_over() -> None:
    ours = Ours(by_call(Net()))
    steps(ours, 2)
    engine = ours.module.engine
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.active.residency, "acquire", _lack)
        with pytest.raises(MemoryError):
            ours.model.blocks[2](torch.ones(2, WIDTH))
    assert engine.phases.current is Phase.IDLE
    steps(ours, 2)


def _lack(*args: Any) -> bool:
    raise MemoryError


def test_a_compiled_function_that_calls_modules() -> None:
    """Graphs end at our hooks, and the numbers are right."""

    class Around(Net):
        def __init__(self) -> None:
            super().__init__()
            self.run = torch.compile(self._run, backend="aot_eager")

        def _run(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x) * 1.5
            return x

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.run(self.inp(x)))

    expected = plain_steps(Plain(Around()), 3)
    torch._dynamo.reset()
    ours = Ours(Around())
    assert_equal(plain_steps(ours, 3), expected)
    assert ours.module.stats().evictions > 20


class Borrowing(Block):
    """Uses a parameter of a module that is none of its own, and not compiled."""

    def __init__(self, lender: nn.Linear) -> None:
        super().__init__()
        self.lender = [lender]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.lender[0].weight.mean()


@pytest.mark.full
def test_parameters_of_others_in_compiled_code() -> None:
    """Which the compiler leaves to us: its graph ends there."""

    def borrowing() -> Net:
        net = Net("around")
        net.blocks[2] = Borrowing(net.out)
        return by_call(net)

    expected = plain_steps(Plain(borrowing()), 3, micro_batches=2)
    torch._dynamo.reset()
    ours = Ours(borrowing())
    assert_equal(plain_steps(ours, 3, micro_batches=2), expected)
    assert ours.module.stats().evictions > 20


def _on_ranks(placement: str, fate: str | None = None) -> tuple[list[Tensor], int]:
    rank, rows = torch.distributed.get_rank(), 4 if fate is None else MANY
    net = by_call(Net("around" if fate is None else "no"))
    ours = Ours(net, placement, activations=fate, world_size=torch.distributed.get_world_size())
    for step in range(3):
        ours.backward(ours(batch(2 * step + rank, rows)).square().mean())
        ours.step()
    if fate is not None:
        check_fates(ours, fate)
    return ours.values(), ours.module.stats().evictions


@pytest.mark.full
@pytest.mark.parametrize("fate", FATES)
def test_two_ranks_with_fates_of_activations(fate: str) -> None:
    plain = Plain(by_call(Net()))
    for step in range(3):
        for rank in range(2):
            plain.backward(plain(batch(2 * step + rank, MANY)).square().mean() / 2)
        plain.step()
    for placement in PLACEMENTS:
        (values, _), (other, _) = run_ranks(_on_ranks, 2, placement, fate)
        assert all(map(torch.equal, values, other))
        assert all(map(torch.equal, values, plain.values()))


@pytest.mark.full
def test_two_ranks() -> None:
    plain = Plain(by_call(Net("around")))
    for step in range(3):
        for rank in range(2):  # half of each, exactly: the mean over ranks
            plain.backward(plain(batch(2 * step + rank)).square().mean() / 2)
        plain.step()
    (tight, evictions), (other, _) = run_ranks(_on_ranks, 2, "tight")
    (resident, _), _ = run_ranks(_on_ranks, 2, "resident")
    assert evictions > 20
    assert all(map(torch.equal, tight, other))
    assert all(map(torch.equal, tight, resident))
    assert all(map(torch.equal, tight, plain.values()))


def test_what_copies_and_closed_models_have() -> None:
    net = by_call(Net())
    compiled = [block._compiled_call_impl for block in net.blocks]
    ours = Ours(net)
    steps(ours, 2)
    assert copy.deepcopy(net).blocks[0]._compiled_call_impl is None  # as torch has it
    ours.module.close()
    assert [block._compiled_call_impl for block in net.blocks] == compiled


def test_cuda_graphs_are_refused_where_parameters_move() -> None:
    def check(net: nn.Module) -> None:
        check_addresses(net, compiled_regions(net))

    net = Net()
    check(by_call(net))
    net.blocks[1].compile(mode="reduce-overhead")
    with pytest.raises(PlanError, match=r"^blocks\.1: compiled with CUDA graphs"):
        check(net)
    net.blocks[2] = torch.compile(net.blocks[2], mode="max-autotune")
    with pytest.raises(PlanError, match=r"^blocks\.1, blocks\.2: .*max-autotune-no-cudagraphs"):
        check(net)


def test_a_later_plan_that_cuda_graphs_cannot_take_is_refused_before_anything_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forwards, "records_graphs", lambda device: True)  # a GPU's answer
    plain, ours = Plain(Net()), Ours(Net(), "resident")
    steps(plain, 2)
    steps(ours, 2)
    ours.model.blocks[1].compile(mode="reduce-overhead")
    tight = make_plan(ours.model, **PLACEMENTS["tight"])
    with pytest.raises(PlanError, match=r"^blocks\.1: compiled with CUDA graphs"):
        ours.module.replan(tight)
    with pytest.raises(PlanError, match=r"^blocks\.1: compiled with CUDA graphs"):
        ours.module.set_memory_limit(gpu="80KiB")
    by_call(plain.model)
    by_call(ours.model)
    assert_equal(steps(ours), steps(plain))
    assert ours.module.plan.is_all_resident
    ours.module.replan(tight)
    assert_equal(steps(ours), steps(plain))


def test_cuda_graphs_of_methods_are_refused_where_parameters_move() -> None:
    class InItsClass(Block):
        _feed = torch.compile(Block._feed, mode="reduce-overhead")

        @torch.compile(mode="reduce-overhead")
        def without_parameters(self, x: Tensor) -> Tensor:
            return x + 1

    def check(net: nn.Module) -> None:
        check_addresses(net, compiled_regions(net))

    net = Net()
    net.loss = torch.compile(F.mse_loss, mode="reduce-overhead")  # has nothing that moves
    net.blocks[0]._feed = torch.compile(net.blocks[0]._feed)
    check(net)
    net.blocks[1]._feed = torch.compile(net.blocks[1]._feed, mode="reduce-overhead")
    net.blocks[3].__class__ = InItsClass
    with pytest.raises(PlanError, match=r"^blocks\.1\._feed, blocks\.3\._feed: compiled with CUDA graphs"):
        check(net)
    for index in (1, 3):  # in whose graph it is then
        net.blocks[index].compile()
    check(net)


def make_full(net: Net) -> Net:
    for block in net.blocks:
        block._feed = torch.compile(block._feed, backend="aot_eager", fullgraph=True)
    return net


def test_a_full_graph_over_modules_is_refused_with_a_cure() -> None:
    ours = Ours(make_full(Net()))
    for _ in range(2):  # the engine goes on
        with pytest.raises(
            StateError, match=r"^'_feed' was compiled with fullgraph=True.*block\.compile\(\)"
        ) as caught:
            ours(batch(0))
        assert isinstance(caught.value.__cause__, torch._dynamo.exc.Unsupported)
    own = Ours(Net())
    own.model.blocks[0]._feed = torch.compile(_breaks, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):  # which is none of ours
        own(batch(0))


def _breaks(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x


def _refused_on_a_rank() -> str:
    ours = Ours(make_full(Net()), world_size=torch.distributed.get_world_size())
    with pytest.raises(StateError, match="fullgraph=True") as caught:
        ours(batch(0))
    return str(caught.value)


@pytest.mark.full
def test_a_full_graph_over_modules_is_refused_on_all_ranks() -> None:
    first, second = run_ranks(_refused_on_a_rank, 2)
    assert first == second


def most_in_use(trace: AccessTrace) -> int:
    return max(map(len, trace.in_use()))


@pytest.mark.full
@crossed(told=["as_a_whole-no"], form=FORMS, checkpointing=["no", "around"])
def test_the_profile_knows_what_is_needed_at_once(form: Callable[[Net], nn.Module], checkpointing: str) -> None:
    model = form(Net(checkpointing))
    found = profile_memory(model, {"x": batch(0)}, lambda m, inp: m(inp["x"]).square().mean().backward())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0  # the copy runs as it is
    ours = Ours(model)
    steps(ours, 2)
    plan = ours.module.plan
    packed = [PackedChunk(c.dtype, c.requires_grad, c.numel, c.members) for c in plan.chunks]
    foretold = step_profile(found, packed, HardwareSpec.nominal()).trace
    assert most_in_use(foretold) == most_in_use(ours.module.engine.traces["train"])
    assert most_in_use(foretold) > 3
    backward = [access for access in foretold.acquires() if not access.is_pinned]
    assert len(backward) <= DEPTH + 2  # a compiled backward asks for all at once, and what is checkpointed for nothing


def test_a_parameter_of_two_compiled_modules() -> None:
    def tied() -> Net:
        net = Net()
        net.blocks[3].up.weight = net.blocks[1].up.weight
        return by_call(net)

    expected = steps(Plain(tied()))
    ours = Ours(tied())
    found = profile_memory(ours.model, {"x": batch(0)}, lambda m, inp: m(inp["x"]).square().mean().backward())
    backward = [interval.fqns for interval in found.timeline if interval.is_backward and interval.fqns]
    assert max(map(len, backward)) == 6  # of one block
    assert_equal(steps(ours), expected)


def test_what_is_compiled() -> None:
    net = by_forward(Net())
    net.blocks[0] = torch.compiler.disable(net.blocks[0]._modules["norm"])
    nested = torch.compile(net.blocks[1])
    net.blocks[1] = nested
    nested._orig_mod.up.compile()
    assert [region.entrance for region in compiled_regions(net)] == list(net.blocks)[1:]


class Run(Net):
    """Calls its blocks through a function."""

    run: Callable[[Any, Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x) if self.run is None else self.run(block, x)
        return self.out(x)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("checkpointing", [full("no"), "inside"])
def test_a_function_that_is_compiled_for_the_first_time_after_some_steps(checkpointing: str) -> None:
    """It goes past what stands in the place of calls, which from the next step on are hooks."""
    runs = Plain(Run(checkpointing)), Ours(Run(checkpointing))
    block = runs[1].model.blocks[1]
    for is_compiled in (False, True):
        if is_compiled:
            assert block._compiled_call_impl is not None
            for run in runs:
                run.model.run = torch.compile(lambda block, x: block(x), backend="eager")
        expected, actual = (plain_steps(run, 3) for run in runs)
        assert_equal(actual, expected)
    assert block._compiled_call_impl is None
    assert runs[1].module.stats().overflows == 0

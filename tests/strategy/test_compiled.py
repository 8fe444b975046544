"""Compiled models under the Trainer, with the defaults and with chunks that come and go."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_elixir._lightning import Callback, LightningModule, Trainer
from lightning_elixir.errors import PlanError
from lightning_elixir.runtime import forwards
from lightning_elixir.strategy import ElixirStrategy
from lightning_elixir.strategy.blockwise import compile_by_blocks, take_compiler
from lightning_elixir.strategy.warm_up import Stage
from tests.helpers.dist import run_ranks
from tests.helpers.tiers import full, telling
from tests.strategy.models import TIGHT, WIDTH, Block, LateNet, Net, assert_same_run, fit, make_data, make_trainer

# Of the compiler's own code, which hides it from users.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


class NetOfCompiledBlocks(LateNet):
    def configure_model(self) -> None:
        super().configure_model()
        for block in self.layers:
            if isinstance(block, Block):
                block.compile(backend="aot_eager")


class NetCompiledAtOnce(Net):
    """In `__init__`."""

    def _make(self) -> None:
        super()._make()
        for block in self.layers:
            if isinstance(block, Block):
                block.compile(backend="aot_eager")


class NetOfCompiledLayers(LateNet):
    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            super().configure_model()
            self.layers = torch.compile(self.layers, backend="aot_eager")


class NetOfCompiledCall(LateNet):
    def configure_model(self) -> None:
        super().configure_model()
        self.layers.compile(backend="aot_eager")


class NetOfCompiledForward(LateNet):
    def configure_model(self) -> None:
        super().configure_model()
        self.layers.forward = torch.compile(self.layers.forward, backend="aot_eager")


def compiled_net() -> Any:
    return torch.compile(LateNet(), backend="aot_eager")


FORMS: list[Callable[[], Any]] = [
    NetOfCompiledBlocks,
    NetOfCompiledLayers,
    NetOfCompiledCall,
    NetOfCompiledForward,
    compiled_net,
]


def compiled_blocks(module: nn.Module) -> list[str]:
    return [type(m).__name__ for m in module.modules() if m._compiled_call_impl is not None]


def test_nothing_compiled_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in every step, though Lightning puts another forward in the place of its module's in each."""
    looks: list[nn.Module] = []
    real = forwards.compiled_regions
    monkeypatch.setattr(forwards, "compiled_regions", lambda root: (looks.append(root), real(root))[1])
    fit(ElixirStrategy(**TIGHT), LateNet)
    assert len(looks) == 1


def assert_as_compiled_blocks(form: Callable[[], Any], elixir: dict[str, Any], **options: Any) -> Trainer:
    """Trains as the plain Trainer does with a model whose blocks are compiled, whatever the user has compiled. (Torch
    2.13 cannot compile a LightningModule that logs.)"""
    _, _, expected = fit("auto", NetOfCompiledBlocks, **options)
    torch._dynamo.reset()
    trainer, model, actual = fit(ElixirStrategy(**elixir), form, **options)
    assert compiled_blocks(trainer.lightning_module) == ["Block"] * 4
    assert_same_run(replace(actual, state={}), replace(expected, state={}))
    assert all(map(torch.equal, actual.state.values(), expected.state.values()))
    stats = trainer.strategy.stats()
    assert stats.evictions > 0
    assert stats.overflows == 0
    return trainer


@pytest.mark.parametrize("form", telling([*FORMS, NetCompiledAtOnce], "NetOfCompiledBlocks"))
def test_as_the_plain_trainer(form: Callable[[], Any]) -> None:
    assert_as_compiled_blocks(form, TIGHT, val=make_data, max_epochs=2, accumulate_grad_batches=2)


@pytest.mark.full
def test_with_nothing_set() -> None:
    """And with clipping, whose norm has an order of its own."""
    _, _, expected = fit("auto", NetOfCompiledBlocks, gradient_clip_val=0.1)
    _, _, actual = fit("elixir", compiled_net, gradient_clip_val=0.1)
    torch.testing.assert_close(actual.losses, expected.losses, rtol=1e-4, atol=1e-6)


@pytest.mark.full
def test_a_limit_that_auto_plans_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lightning_elixir"):
        assert_as_compiled_blocks(compiled_net, {"gpu_memory_limit": "96KiB", "chunk_size": "16KiB"})
    assert "LateNet is compiled block by block: 4 of Block" in caplog.text
    assert "the rCache needs" not in caplog.text  # the first plan has known


@pytest.mark.full
def test_few_graphs() -> None:
    """Two for all blocks in training, since the first gets what needs no gradient, and one in evaluation."""
    counters = torch._dynamo.utils.counters
    for strategy, form in (("auto", NetOfCompiledBlocks), (ElixirStrategy(**TIGHT), compiled_net)):
        torch._dynamo.reset()
        counters.clear()
        fit(strategy, form, val=make_data, max_epochs=3)
        assert counters["stats"]["unique_graphs"] == 3
        assert not counters["graph_break"]


@pytest.mark.full
def test_evaluation_and_a_second_fit() -> None:
    strategy = ElixirStrategy(**TIGHT)
    trainer, model, _ = fit(strategy, compiled_net)
    before = {name: value.clone() for name, value in strategy.lightning_module_state_dict().items()}
    (loss,) = trainer.test(model, make_data(), verbose=False)
    plain = Net()
    plain.load_state_dict(before)
    (expected,) = make_trainer("auto").test(plain, make_data(), verbose=False)
    assert loss == expected
    again = make_trainer(ElixirStrategy(**TIGHT))
    again.fit(model, make_data())
    assert compiled_blocks(again.lightning_module) == ["Block"] * 4


class NetWithoutBlocks(Net):
    """Single layers, which are no blocks, and a module made of some."""

    def _make(self) -> None:
        torch.manual_seed(7)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(torch.relu(self.first(x))))


def test_a_model_without_blocks() -> None:
    _, _, expected = fit("auto", NetWithoutBlocks)
    trainer, _, actual = fit(ElixirStrategy(**TIGHT), lambda: torch.compile(NetWithoutBlocks(), backend="aot_eager"))
    assert_same_run(actual, expected)
    assert compiled_blocks(trainer.lightning_module) == ["Sequential"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_steps_that_users_have_put_in_place_stay() -> None:
    net = Net()
    seen: list[int] = []
    own_step = net.training_step

    def step(batch: list[Tensor], batch_idx: int) -> Tensor:
        seen.append(batch_idx)
        return own_step(batch, batch_idx)

    net.training_step = step  # type: ignore[method-assign]
    assert take_compiler(take_compiled(torch.compile(net, backend="aot_eager"))) is not None
    assert net.training_step is step
    assert "forward" not in vars(net)
    assert take_compiler(net) is None


def _on_ranks(form: Any) -> tuple[list[Tensor], int]:
    strategy = ElixirStrategy(**TIGHT)
    _, model, _ = fit(strategy, form, devices=2)
    return model.losses, strategy.stats().evictions


@pytest.mark.full  # test_as_the_plain_trainer, with ranks
def test_two_ranks() -> None:
    compiled = run_ranks(_on_ranks, 2, compiled_net, init_group=False)
    blocks = run_ranks(_on_ranks, 2, NetOfCompiledBlocks, init_group=False)
    for rank in range(2):
        assert compiled[rank][1] > 0
        assert torch.equal(torch.stack(compiled[rank][0]), torch.stack(blocks[rank][0]))


class NetForEachSize(LateNet):
    def configure_model(self) -> None:
        super().configure_model()
        for block in self.layers:
            if isinstance(block, Block):
                block.compile(backend="aot_eager", dynamic=False)


class Stages(Callback):
    """What each step was for, in the eyes of the warm-up."""

    def __init__(self) -> None:
        self.seen: list[Stage] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.seen.append(trainer.strategy._fit_run.warm_up.stage)


@pytest.mark.parametrize(("sizes", "timed"), [full([4, 4, 4, 4], 1), ([4, 6, 6, 6], 2)])
def test_a_step_that_compiles_is_not_the_one_that_is_timed(sizes: list[int], timed: int) -> None:
    batches: Any = [batch for size in sizes for batch in make_data(size, size)]
    stages = Stages()
    strategy = ElixirStrategy(gpu_memory_limit="96KiB")
    fit(strategy, NetForEachSize, train=lambda: DataLoader(batches, batch_size=None), callbacks=[stages])
    assert stages.seen[1:] == [Stage.TIMED] * timed + [Stage.DONE] * (3 - timed)


class Parts(LateNet):
    """Layers in lists of lists, which nobody calls."""

    def configure_model(self) -> None:
        if not hasattr(self, "parts"):
            torch.manual_seed(7)
            self.parts = nn.ModuleList(nn.ModuleList([Block(), Block()]) for _ in range(3))
            self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for first, second in self.parts:
            x = second(first(x))
        return self.last(x)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Stacks(LateNet):
    """Two stacks of layers, in a dictionary."""

    def configure_model(self) -> None:
        if not hasattr(self, "stacks"):
            torch.manual_seed(7)
            self.stacks = nn.ModuleDict({"first": Stack(), "second": Stack()})
            self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.stacks["second"](self.stacks["first"](x)))


@pytest.mark.full
@pytest.mark.parametrize("net", [full(Parts), Stacks])
def test_blocks_are_what_is_called(net: type[Net]) -> None:
    _, _, expected = fit("auto", net)
    trainer, _, actual = fit(ElixirStrategy(**TIGHT), lambda: torch.compile(net(), backend="aot_eager"))
    assert_same_run(actual, expected)
    assert compiled_blocks(trainer.lightning_module) == ["Block"] * 6
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.full
def test_compiled_before_each_run() -> None:
    """Also as a whole, where the engine of the run before is kept."""

    class Again(NetOfCompiledCall):
        def configure_model(self) -> None:
            LateNet.configure_model(self)
            self.layers.compile(backend="aot_eager")

    strategy = ElixirStrategy(**TIGHT)
    trainer, model, _ = fit(strategy, Again)
    trainer.validate(model, make_data(), verbose=False)
    assert compiled_blocks(model) == ["Block"] * 4
    assert strategy.stats().overflows == 0
    assert not torch._dynamo.utils.counters["graph_break"]


def test_processes_that_get_no_compiler() -> None:
    strategy = ElixirStrategy(**TIGHT)
    strategy._lightning_module = take_compiled(torch.compile(Net(), backend="aot_eager"))
    sent = copy.deepcopy(strategy)
    with pytest.raises(PlanError, match="cannot be sent to the processes that start_method='spawn' begins"):
        compile_by_blocks(Net(), sent._compiler)


def take_compiled(module: Any) -> Any:
    from lightning.pytorch.utilities.compile import from_compiled

    return from_compiled(module)


def test_lazy_layers_are_refused_as_before() -> None:
    class Lazy(Net):
        def _make(self) -> None:
            self.layers = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 4))

    with pytest.raises(PlanError, match="have no shape yet"):
        make_trainer(ElixirStrategy(**TIGHT)).fit(Lazy(), make_data())


class Llama(LightningModule):
    """A model of transformers that checkpoints its compiled layers, some of which are frozen.

    Args:
        is_late: Whether it is made in `configure_model`.
        form: What is compiled: "layers", "model", or nothing here.
    """

    def __init__(self, is_late: bool, form: str) -> None:
        super().__init__()
        self.form = form
        self.losses: list[Tensor] = []
        self.num_graphs: list[int] = []
        if not is_late:
            self._make()

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self._make()

    def _make(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(7)
        sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, use_cache=False))
        model.gradient_checkpointing_enable()
        model.model.layers[:2].requires_grad_(False)
        if self.form == "layers":
            for layer in model.model.layers:
                layer.compile(backend="aot_eager")
        self.model = torch.compile(model, backend="aot_eager") if self.form == "model" else model

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.detach().clone())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.losses.append(self.model(input_ids=batch, labels=batch).loss)

    def on_train_batch_end(self, *_: Any) -> None:
        self.num_graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3, foreach=False)


def fit_llama(strategy: Any, model: Any) -> list[Tensor]:
    """Losses of training and validation, whose graphs are the last ones."""
    tokens: Any = [torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(i)) for i in range(6)]
    trainer = make_trainer(strategy, accumulate_grad_batches=2, val_check_interval=1.0, max_epochs=2)
    trainer.fit(model, DataLoader(tokens, batch_size=None), DataLoader(tokens[:2], batch_size=None))
    seen: Llama = trainer.lightning_module
    assert seen.num_graphs[6] == seen.num_graphs[-1]
    assert not torch._dynamo.utils.counters["graph_break"]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return seen.losses


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
def test_transformers_model() -> None:
    pytest.importorskip("transformers")
    expected = fit_llama("auto", Llama(is_late=True, form="layers"))
    tight = {"placement_policy": "cpu", "chunk_size": "16KiB"}
    for is_late in (False, True):
        for form in ("layers", "model", "module"):
            strategy, model = ElixirStrategy(**tight), Llama(is_late, form)
            losses = fit_llama(strategy, torch.compile(model, backend="aot_eager") if form == "module" else model)
            assert all(map(torch.equal, losses, expected))
            assert len(losses) == len(expected)
            assert strategy.stats().evictions > 0
            assert strategy.stats().overflows == 0

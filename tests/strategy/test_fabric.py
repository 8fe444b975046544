"""`Fabric(strategy="elixir")` gives what Fabric gives with plain PyTorch, bit for bit, while chunks come and go."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_elixir import CapacityError, ElixirPrecision, HybridAdam, PlanError, StateError, wrapper
from lightning_elixir import ElixirStrategy as TrainerStrategy
from lightning_elixir._lightning import LightningModule, pl
from lightning_elixir.fabric import ElixirStrategy
from lightning_elixir.plan.memory import fair_part
from lightning_elixir.plan.units import parse_bytes
from lightning_elixir.strategy.engine_handle import EngineHandle
from tests.helpers.dist import run_ranks
from tests.helpers.tiers import full, telling
from tests.strategy.fabric_runs import (
    TIGHT,
    Loop,
    Run,
    batch_of,
    collect,
    make_fabric,
    make_net,
    run_steps,
    set_up,
    train,
)
from tests.strategy.models import CHUNK, Block, assert_same_state, make_optimizer

AUTO = {**CHUNK, "gpu_memory_limit": "96KiB"}
LOOPS = {
    "plain": Loop(),
    "one_by_one": Loop(is_joint=False),
    "hybrid": Loop(optimizer="hybrid"),
    "sgd_accumulated": Loop(optimizer="sgd", micro_batches=3),
    "clipped_by_value": Loop(clip_value=0.01),
    "accumulated_clipped_by_value": Loop(micro_batches=2, clip_value=0.01),
    "64": Loop(precision="64-true"),
    "bf16_true": Loop(precision="bf16-true"),
    "bf16_true_clipped_by_value": Loop(optimizer="hybrid", precision="bf16-true", clip_value=0.01),
}


def _assert_same(actual: Run, expected: Run, *, is_tight: bool = True) -> None:
    assert actual.losses == expected.losses
    assert_same_state(actual.state, expected.state)
    assert not is_tight or actual.evictions > 0


@pytest.mark.parametrize(
    "how",
    telling(
        ["plain", "one_by_one", "sgd_accumulated", "accumulated_clipped_by_value", "64", "bf16_true"]
        + ["bf16_true_clipped_by_value"],
        "sgd_accumulated",
        "accumulated_clipped_by_value",
        "bf16_true",
        "one_by_one",
    ),
)
def test_same_as_plain(how: str) -> None:
    loop = LOOPS[how]
    strategy = {**TIGHT, "chunk_size": "4KiB", "gpu_memory_limit": "48KiB"} if "bf16_true" in how else TIGHT
    _assert_same(train(strategy, loop), train("auto", loop))


@pytest.mark.parametrize(
    "strategy", [full("elixir"), full("elixir_cpu"), AUTO, full({"placement_policy": "cuda"})], ids=str
)
def test_policies(strategy: Any) -> None:
    _assert_same(train(strategy), train("auto"), is_tight=strategy is AUTO)


def test_norm_clipping_and_its_norm() -> None:
    loop = Loop(max_norm=0.05, micro_batches=2)
    actual, expected = train(TIGHT, loop), train("auto", loop)
    # The norm is summed in another order.
    assert actual.norms == pytest.approx(expected.norms, rel=1e-5)
    assert actual.losses == pytest.approx(expected.losses, rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("how", ["hybrid", full("mixed"), full("mixed_accumulated")])
def test_placements_agree(how: str) -> None:
    loops = {
        "hybrid": Loop(optimizer="hybrid", precision="bf16-mixed"),
        "mixed": Loop(precision="bf16-mixed", max_norm=0.1),
        "mixed_accumulated": Loop(precision="bf16-mixed", micro_batches=2),
    }
    expected = train({**CHUNK, "placement_policy": "cuda"}, loops[how])
    assert expected.losses[-1] != expected.losses[0]
    for strategy in ({**TIGHT, "gpu_memory_limit": "80KiB"}, AUTO):  # in 16 bits, all would fit TIGHT
        _assert_same(train(strategy, loops[how]), expected)


def _given_step(net: nn.Module, inp: Any) -> None:
    nn.functional.cross_entropy(net(inp["x"]).float(), inp["y"]).backward()


def _values_in_it(net: nn.Module, inp: Any) -> None:
    if net(inp["x"]).sum() > 0:
        _given_step(net, inp)


@pytest.mark.parametrize(
    ("step", "precision", "changes"),
    [(_given_step, "32-true", []), (_given_step, "bf16-mixed", []), (_values_in_it, "32-true", [1])],
)
def test_a_given_step_finds_the_plan_before_the_first_one(step: Any, precision: Any, changes: list[int]) -> None:
    loop, (x, y), plans = Loop(precision=precision), batch_of(0), []
    fabric = make_fabric({**CHUNK, "gpu_memory_limit": "8MiB", "step_fn": step, "inp": {"x": x, "y": y}}, loop)
    model, optimizer = set_up(fabric, loop)
    model.register_forward_hook(lambda *_: plans.append(fabric.strategy.plan))
    run = collect(fabric, model, optimizer, run_steps(fabric, model, optimizer, loop))
    fabric.strategy.close()
    _assert_same(run, train({**CHUNK, "placement_policy": "cuda"}, loop), is_tight=False)
    found = [plan.fingerprint() for plan in plans]
    assert [i for i in range(1, len(found)) if found[i] != found[i - 1]] == changes
    assert plans[-1].is_all_resident


def test_a_step_and_its_inputs_belong_together() -> None:
    with pytest.raises(PlanError, match="step_fn and inp belong together"):
        ElixirStrategy(step_fn=_given_step)


def test_same_as_trainer_in_mixed_precision() -> None:
    """Whose numbers are compared with plain PyTorch elsewhere."""
    from tests.strategy.models import Net, fit

    data = torch.utils.data.DataLoader(_Batches(), batch_size=None)
    trainer, net, expected = fit(TrainerStrategy(**TIGHT), Net, train=lambda: data, precision="bf16-mixed")
    trainer.strategy.close()
    fabric = make_fabric(TIGHT, Loop(precision="bf16-mixed"))
    model, optimizer = set_up(fabric, Loop())
    torch.manual_seed(11)
    losses = [_step(fabric, model, optimizer, step) for step in range(5)]
    if not any(isinstance(m, nn.Dropout) and m.p for m in model.modules()):
        assert losses == [loss.item() for loss in expected.losses]
    assert len(losses) == len(expected.losses)
    fabric.strategy.close()


class _Batches(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        if index >= 5:
            raise IndexError
        return list(batch_of(index))


def _step(fabric: Any, model: Any, optimizer: Any, step: int) -> float:
    x, y = batch_of(step, fabric.global_rank)
    loss = nn.functional.cross_entropy(model(x).float(), y)
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("how", ["one_by_one", full("sgd_accumulated"), full("accumulated_clipped_by_value")])
def test_two_ranks_same_as_ddp(how: str) -> None:
    loop = LOOPS[how]
    loop = Loop(**{**vars(loop), "devices": 2})
    expected = run_ranks(train, 2, "ddp", loop, init_group=False)
    for strategy in (TIGHT, AUTO):
        actual = run_ranks(train, 2, strategy, loop, init_group=False)
        for ours, theirs in zip(actual, expected, strict=True):
            if loop.micro_batches == 1:
                _assert_same(ours, theirs)
            else:  # DDP adds micro-batches up before the ranks do
                assert ours.losses == pytest.approx(theirs.losses, rel=1e-4)
                assert ours.evictions > 0
        assert_same_state(actual[0].state, actual[1].state)


def test_loss_scale_of_one_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: fp16 is let through to the CPU."""
    check = wrapper._check
    monkeypatch.setattr(wrapper, "_check", lambda plan, dtype, given, size, _: check(plan, dtype, given, size, META))
    monkeypatch.setattr(ElixirPrecision, "check_device", lambda self, device: setattr(self, "device_type", device))
    fabric = make_fabric({**TIGHT, "precision_plugin": ElixirPrecision("16-mixed"), "initial_scale": 2.0**24})
    model, optimizer = set_up(fabric, Loop(), _without_dropout)
    losses, scales, unscaled = [], [], 0.0
    for step in range(14):
        x, y = batch_of(0)
        loss = nn.functional.cross_entropy(model(x).float(), y)
        assert loss.dtype is torch.float32
        fabric.backward(loss)
        scales.append(optimizer.loss_scale)
        if step == 13:
            unscaled = float(fabric.clip_gradients(model, optimizer, max_norm=1e9))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert scales[0] == 2.0**24 > scales[-1]  # the first steps were skipped, until the gradients fitted
    assert losses[0] == losses[1] > losses[-1]
    assert 0 < unscaled < 100
    other = nn.Linear(2, 2)
    with pytest.raises(PlanError, match="2 optimizers over one module with precision '16-mixed'"):
        fabric.setup(other, torch.optim.SGD([other.weight], 1.0), torch.optim.SGD([other.bias], 1.0))
    fabric.strategy.close()


META = torch.device("meta")


# Messages


def _messages() -> Any:
    loop = Loop(devices=2)
    found = []
    for strategy in ("ddp", TIGHT):
        fabric = make_fabric(strategy, loop)
        rank = fabric.global_rank
        fabric.barrier()
        found.append(
            {
                "mean": fabric.all_reduce(torch.tensor([1.0 + rank, 4.0])),
                "sum": fabric.all_reduce({"a": torch.tensor(3 + rank)}, reduce_op="sum"),
                "gathered": fabric.all_gather({"x": torch.tensor([rank, 7])}),
                "broadcast": fabric.broadcast({"from": rank}, src=1),
                "any": fabric.strategy.reduce_boolean_decision(rank == 1, all=False),
                "all": fabric.strategy.reduce_boolean_decision(rank == 1, all=True),
                "ranks": (fabric.global_rank, fabric.local_rank, fabric.world_size, fabric.is_global_zero),
                "batches": [x.tolist() for x in fabric.setup_dataloaders(_loader())],
            }
        )
    return found


def _loader() -> Any:
    return torch.utils.data.DataLoader(torch.arange(12), batch_size=2)


def test_messages_and_data_are_those_of_ddp() -> None:
    for ddp, ours in run_ranks(_messages, 2, init_group=False):
        assert str(ours) == str(ddp)


def test_single_device_sees_all_data_in_its_order() -> None:
    fabric = make_fabric(TIGHT)
    assert [x.tolist() for x in fabric.setup_dataloaders(_loader())] == [[2 * i, 2 * i + 1] for i in range(6)]
    assert fabric.all_gather(torch.tensor([1, 2])).tolist() == [1, 2]


# Checkpoints


def _loaded_state(folder_or_file: Path) -> dict[str, Any]:
    if folder_or_file.is_file():
        return torch.load(folder_or_file, weights_only=True)
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    whole = folder_or_file.with_suffix(".whole")
    dcp_to_torch_save(folder_or_file, whole)
    return torch.load(whole, weights_only=True)


@pytest.mark.parametrize("kind", [full("full"), "sharded"])
def test_checkpoint_goes_on_as_if_nothing_had_happened(kind: Any, tmp_path: Path) -> None:
    options = {**TIGHT, "state_dict_type": kind}
    expected = train(TIGHT, Loop(steps=6, optimizer="hybrid"), make=_without_dropout)
    loop = Loop(steps=3, optimizer="hybrid")
    fabric = make_fabric(options, loop)
    model, optimizer = set_up(fabric, loop, _without_dropout)
    run_steps(fabric, model, optimizer, loop)
    path = tmp_path / "saved.ckpt"
    fabric.save(path, {"net": model, "adam": optimizer, "step": 3, "words": ["a"]})
    saved = _loaded_state(path)
    whole = model.state_dict()
    assert_same_state(saved["net"], whole)
    _without_dropout().load_state_dict(saved["net"])
    fabric.strategy.close()

    fabric = make_fabric(options, loop)
    model, optimizer = set_up(fabric, loop, _without_dropout)
    state = {"net": model, "adam": optimizer, "step": 0}
    rest = fabric.load(path, state)
    assert (state["step"], rest) == (3, {"words": ["a"]})
    later = Loop(steps=3, optimizer="hybrid", first_step=3)
    run = collect(fabric, model, optimizer, run_steps(fabric, model, optimizer, later))
    assert run.losses == expected.losses[3:]
    assert_same_state(run.state, expected.state)
    with pytest.raises(KeyError, match="nothing"):
        fabric.load(path, {"nothing": 1})
    fabric.load(path, {"nothing": 1}, strict=False)
    fabric.strategy.close()


def _without_dropout() -> nn.Module:
    net = make_net()
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return net


def _save_and_load(folder: Path, kind: str) -> Any:
    loop = Loop(devices=2, steps=2)
    fabric = make_fabric({**TIGHT, "state_dict_type": kind, "async_save": kind == "sharded"}, loop)
    model, optimizer = set_up(fabric, loop)
    run_steps(fabric, model, optimizer, loop)
    path = folder / kind
    fabric.save(path, {"model": model, "optimizer": optimizer}, filter={"model": lambda name, _: "bias" not in name})
    before = collect(fabric, model, optimizer, Run())
    run_steps(fabric, model, optimizer, loop)
    fabric.load(path, {"model": model, "optimizer": optimizer}, strict=False) if kind == "sharded" else None
    after = collect(fabric, model, optimizer, Run())
    fabric.strategy.close()
    return before, after


def test_two_ranks_save_one_checkpoint(tmp_path: Path) -> None:
    for kind in ("full", "sharded"):
        (before, after), (other, _) = run_ranks(_save_and_load, 2, tmp_path, kind, init_group=False)
        saved = _loaded_state(tmp_path / kind)
        assert_same_state(saved["model"], {k: v for k, v in before.state.items() if "bias" not in k})
        assert_same_state(before.state, other.state)
        assert len(saved["optimizer"]["state"]) == len(before.state)
        if kind == "sharded":
            assert all(torch.equal(after.state[k], v) == ("bias" not in k) for k, v in before.state.items())


def test_plain_files_load_into_the_engine(tmp_path: Path) -> None:
    net = make_net()
    optimizer = make_optimizer("adamw", net.parameters(), 1e-2)
    nn.functional.cross_entropy(net(batch_of(0)[0]), batch_of(0)[1]).backward()
    optimizer.step()
    torch.save(net.state_dict(), tmp_path / "net.pt")
    torch.save(optimizer.state_dict(), tmp_path / "adam.pt")
    fabric = make_fabric(TIGHT)
    model, ours = set_up(fabric, Loop())
    fabric.load_raw(tmp_path / "net.pt", model)
    fabric.load_raw(tmp_path / "adam.pt", ours)
    assert_same_state(dict(model.state_dict()), net.state_dict())
    assert len(ours.state_dict()["state"]) == len(optimizer.state_dict()["state"])
    with pytest.raises(PlanError, match="missing"):
        fabric.load_raw(tmp_path / "net.pt", fabric.setup(nn.Linear(3, 3)))
    fabric.strategy.close()


def test_trainers_commands_read_fabrics_folder(tmp_path: Path) -> None:
    from lightning_elixir.checkpoint.consolidate import consolidate

    fabric = make_fabric({**TIGHT, "state_dict_type": "sharded"})
    model, optimizer = set_up(fabric, Loop())
    run_steps(fabric, model, optimizer, Loop(steps=1))
    fabric.save(tmp_path / "folder", {"net": model, "adam": optimizer, "epoch": 4})
    consolidate(tmp_path / "folder", tmp_path / "one.ckpt", max_file_bytes=2**30)
    one = torch.load(tmp_path / "one.ckpt", weights_only=True)
    assert {"state_dict", "optimizer_states", "epoch"} == one.keys()
    assert_same_state(one["state_dict"], dict(model.state_dict()))
    with pytest.raises(PlanError, match="is a folder"):
        fabric.load_raw(tmp_path / "folder", model)
    fabric.strategy.close()


MATRICES, REST = "optimizer_1", "optimizer_2"  # as a user may call them; in the folder they are 0 and 1


def _two_optimizers_on_ranks(path: Path) -> Any:
    return _two_optimizers(make_fabric(SHARDED, Loop(devices=2)), path, 0, 3)


def _two_optimizers(fabric: Any, path: Path | None, first_step: int, steps: int) -> Any:
    """Muon for matrices beside AdamW for the rest, loaded before training, or saved after it. Ranks have the same data,
    so they have the numbers of one."""
    net = _without_dropout()
    matrices, rest = ([p for p in net.parameters() if (p.dim() == 2) is wanted] for wanted in (True, False))
    model, muon, adam = fabric.setup(net, torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01))
    state = {"net": model, MATRICES: muon, REST: adam, "step": first_step}
    if path is not None and first_step:
        state["step"] = 0
        fabric.load(path, state)
        assert state["step"] == first_step
    losses = []
    for step in range(first_step, first_step + steps):
        x, y = batch_of(step)
        loss = nn.functional.cross_entropy(model(x), y)
        fabric.backward(loss)
        losses.append(loss.item())
        for optimizer in (muon, adam):
            optimizer.step()
            optimizer.zero_grad()
    if path is not None and not first_step:
        fabric.save(path, {**state, "step": first_step + steps})
    run = losses, dict(model.state_dict()), [copy.deepcopy(each.state_dict()) for each in (muon, adam)]
    if isinstance(fabric.strategy, ElixirStrategy):
        fabric.strategy.close()
    return run


SHARDED = {**TIGHT, "state_dict_type": "sharded"}


def test_a_folder_has_several_optimizers_and_loads_on_another_number_of_ranks(tmp_path: Path) -> None:
    from lightning_elixir.checkpoint.consolidate import consolidate

    path = tmp_path / "folder"
    whole = _two_optimizers(make_fabric("auto"), None, 0, 6)
    saved, *_ = run_ranks(_two_optimizers_on_ranks, 2, path, init_group=False)
    losses, values, _ = _two_optimizers(make_fabric(SHARDED), path, 3, 3)
    assert [*saved[0], *losses] == whole[0]
    assert_same_state(values, whole[1])
    consolidate(path, tmp_path / "one.ckpt", max_file_bytes=2**30)
    one = torch.load(tmp_path / "one.ckpt", weights_only=True)
    assert {"state_dict", "optimizer_states", "step"} == one.keys()
    for mine, theirs in zip([saved[2][1], saved[2][0]], one["optimizer_states"], strict=True):  # "optimizer_1" is 1
        assert mine["state"].keys() == theirs["state"].keys()
        for number, state in mine["state"].items():
            for key, value in state.items():
                assert torch.equal(torch.as_tensor(theirs["state"][number][key]), torch.as_tensor(value))


class UnderTwoOptimizers(LightningModule):
    """The same model, for the Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        for name, module in _without_dropout().named_children():
            self.add_module(name, module)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch_of(3 + batch_idx)
        for module in self.children():
            x = module(x)
        loss = nn.functional.cross_entropy(x, y)
        self.losses.append(loss.item())
        self.manual_backward(loss)
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        matrices, rest = ([p for p in self.parameters() if (p.dim() == 2) is wanted] for wanted in (True, False))
        return torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)


@pytest.mark.full
def test_the_trainer_goes_on_from_a_folder_with_several_optimizers(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    whole, _, _ = _two_optimizers(make_fabric("auto"), None, 0, 6)
    _two_optimizers(make_fabric(SHARDED), path, 0, 3)
    net = UnderTwoOptimizers()
    trainer = pl.Trainer(
        strategy=TrainerStrategy(**TIGHT), accelerator="cpu", devices=1, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(net, range(3), ckpt_path=path)
    assert net.losses == whole[3:]
    trainer.strategy.close()


@pytest.mark.full
def test_what_a_folder_cannot_hold_or_has_not_got_is_named(tmp_path: Path) -> None:
    fabric = make_fabric(SHARDED)
    model, optimizer = set_up(fabric, Loop())
    small = nn.Linear(2, 2)
    other, by_other = fabric.setup(small, torch.optim.SGD(small.parameters(), 1.0))
    with pytest.raises(PlanError, match=r"one module that was set up, and not 2 \(a, b\): save each module"):
        fabric.save(tmp_path / "folder", {"a": model, "b": other})
    with pytest.raises(PlanError, match="second steps another module than net"):
        fabric.save(tmp_path / "folder", {"net": model, "first": optimizer, "second": by_other})
    for state in ({"optimizer_0": model}, {"net": model, "model": optimizer}, {"net": model, "optimizer_states": 1}):
        with pytest.raises(PlanError, match=r"uses the name (optimizer_0|model|optimizer_states) for something else"):
            fabric.save(tmp_path / "folder", state)
    for dotted in ({"gen.net": model}, {"net": model, "gen.adam": optimizer}):
        with pytest.raises(PlanError, match=r"under the name gen\.(net|adam): .* a key without dots"):
            fabric.save(tmp_path / "folder", dotted)
    fabric.save(tmp_path / "folder", {"net": model, "adam": optimizer, "step": 1})
    with pytest.raises(KeyError, match="nothing under the name first, second: there are adam, model, net,"):
        fabric.load(tmp_path / "folder", {"net": model, "first": optimizer, "second": optimizer})
    weight, bias = small.parameters()
    twice = fabric.setup(small, torch.optim.SGD([{"params": [weight]}, {"params": [bias]}], 1.0))[1]
    with pytest.raises(PlanError, match="holds, as adam, an optimizer with 1 parameter groups; this one has 2"):
        fabric.load(tmp_path / "folder", {"adam": twice})
    fabric.strategy.close()


# Models


def _built_inside(empty: bool | None) -> Any:
    loop = Loop(devices=2)
    fabric = make_fabric(TIGHT, loop)
    torch.manual_seed(7)
    with fabric.init_module(empty_init=empty):
        net = nn.Sequential(*[Block() for _ in range(4)], nn.Linear(32, 4))
    is_meta = [p.is_meta for p in net.parameters()]
    after = torch.rand(3)
    optimizer = make_optimizer("adamw", net.parameters(), 1e-2)
    model, optimizer = fabric.setup(net, optimizer)
    run = collect(fabric, model, optimizer, run_steps(fabric, model, optimizer, loop))
    fabric.strategy.close()
    return run, any(is_meta), all(is_meta), after


@pytest.mark.full
def test_only_the_first_rank_holds_a_model_that_is_made_in_init_module() -> None:
    expected = run_ranks(train, 2, TIGHT, Loop(devices=2), init_group=False)
    found = run_ranks(_built_inside, 2, None, init_group=False)
    assert [each[1:3] for each in found] == [(False, False), (True, True)]
    assert torch.equal(found[0][3], found[1][3])
    for (run, *_), theirs in zip(found, expected, strict=True):
        _assert_same(run, theirs)


def test_empty_models_get_their_values_from_a_checkpoint(tmp_path: Path) -> None:
    torch.save(make_net().state_dict(), tmp_path / "net.pt")
    fabric = make_fabric(TIGHT)
    with fabric.init_module(empty_init=True):
        net = make_net()
    assert all(p.is_meta for p in net.parameters())
    model, optimizer = fabric.setup(net, make_optimizer("adamw", net.parameters(), 1e-2))
    fabric.load_raw(tmp_path / "net.pt", model)
    run = collect(fabric, model, optimizer, run_steps(fabric, model, optimizer, Loop()))
    fabric.strategy.close()
    _assert_same(run, train(TIGHT))


class Masked(nn.Linear):
    """Has a buffer that its constructor computes and no state dict has."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.register_buffer("mask", torch.ones(16, 16).tril(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * self.mask, self.bias)


class TiedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.masked, self.head = nn.Embedding(24, 16), Masked(), nn.Linear(16, 24)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.masked(self.embedding(tokens)))


def _from_empty(path: Path, strategy: Any, devices: int) -> dict[str, Tensor]:
    """The state after some steps from a checkpoint."""
    fabric = make_fabric(strategy, Loop(devices=devices))
    with fabric.init_module(empty_init=True):
        net = TiedHead()
    model = fabric.setup_module(net)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=1.0))
    fabric.load(path, {"model": model})
    for step in range(3):
        tokens = torch.randint(24, (4, 6), generator=torch.Generator().manual_seed(step))
        fabric.backward(nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.clone() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("devices", [1, full(2)])
def test_empty_models_keep_their_ties_and_computed_buffers(devices: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    torch.save({"model": TiedHead().state_dict()}, tmp_path / "net.pt")
    expected = _from_empty(tmp_path / "net.pt", "auto", 1)
    tight = {"placement_policy": "cpu", "chunk_size": 3000}
    for state in run_ranks(_from_empty, devices, tmp_path / "net.pt", tight, devices, init_group=False):
        assert_same_state(state, expected)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.generator = nn.Sequential(*[nn.Linear(32, 32) for _ in range(16)])
        self.judge = nn.Sequential(*[nn.Linear(32, 32) for _ in range(3)], nn.Linear(32, 1))


@pytest.mark.parametrize(
    ("nbytes", "wanted", "parts"),
    [
        (100, [100, 100], [50, 50]),
        (100, [400, 10], [90, 10]),
        (100, [400, 40, 10], [50, 40, 10]),
        (100, [400, 60, 10], [45, 45, 10]),
        (100, [30, 10], [75, 25]),
        (100, [7], [100]),
    ],
)
def test_parts_of_a_memory_that_several_models_share(nbytes: int, wanted: list[int], parts: list[int]) -> None:
    found = [fair_part(nbytes, each, [*wanted[:i], *wanted[i + 1 :]]) for i, each in enumerate(wanted)]
    assert found == parts
    assert sum(found) <= nbytes


def _adversaries(strategy: Any) -> Any:
    fabric = make_fabric(strategy)
    nets = Pair()
    generator, by_generator = fabric.setup(nets.generator, torch.optim.AdamW(nets.generator.parameters(), 1e-2))
    judge, by_judge = fabric.setup(nets.judge, torch.optim.AdamW(nets.judge.parameters(), 1e-2))
    losses = []
    for step in range(5):
        x, _ = batch_of(step)
        made = generator(x)
        by_judge.zero_grad()
        loss = judge(made.detach()).mean() - judge(x).mean() + judge(x).square().mean()
        fabric.backward(loss)
        by_judge.step()
        by_generator.zero_grad()
        other = -judge(made).mean()
        fabric.backward(other)
        by_generator.step()
        losses += [loss.item(), other.item()]
    states = [generator.state_dict(), judge.state_dict()]
    evictions = 0
    if isinstance(fabric.strategy, ElixirStrategy):
        stats = [fabric.strategy.engine_of(net).stats() for net in (generator, nets.judge)]
        evictions = sum(each.evictions for each in stats)
        with pytest.raises(StateError, match="2 modules were set up"):
            fabric.strategy.stats()
        fabric.strategy.close()
    return losses, states, evictions


@pytest.mark.parametrize(
    "strategy", [{**TIGHT, "gpu_memory_limit": "128KiB"}, full({**AUTO, "gpu_memory_limit": "128KiB"})], ids=str
)
def test_two_modules_share_the_memory(strategy: Any) -> None:
    losses, states, evictions = _adversaries(strategy)
    expected_losses, expected_states, _ = _adversaries("auto")
    assert losses == expected_losses
    for mine, theirs in zip(states, expected_states, strict=True):
        assert_same_state(mine, theirs)
    assert evictions > 0


class Branching(nn.Module):
    """Leaves out layers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: Tensor, left_out: tuple[int, ...]) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = x if number in left_out else x + layer(x).tanh()
        return x


# step -> rank -> layers that each of the two modules leaves out
LEFT_OUT = [[((1, 3), ()), ((), (0, 2))], [((), (1, 2, 3)), ((4,), (5, 1))], [((0, 1, 2), ()), ((), ())]]


def _joint_loss(how: str, first: Any, second: Any, step: int, rank: int) -> Tensor:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank))
    of_first, of_second = LEFT_OUT[step % 3][rank]
    if how == "sum":
        return first(x, of_first).square().mean() + second(x, of_second).square().mean()
    return second(first(x, of_first), of_second).square().mean()


def _branching_apart(how: str) -> dict[str, Tensor]:
    fabric = make_fabric({"placement_policy": "cpu", "chunk_size": 1200}, Loop(devices=2))
    nets = [Branching(seed) for seed in (1, 2)]
    runs = [fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1)) for net in nets]
    for step in range(6):
        fabric.backward(_joint_loss(how, runs[0][0], runs[1][0], step, fabric.global_rank))
        for _, optimizer in runs:
            optimizer.step()
            optimizer.zero_grad()
    assert all(fabric.strategy.engine_of(model).stats().evictions > 0 for model, _ in runs)
    return {f"{i}.{key}": value.clone() for i in (0, 1) for key, value in runs[i][0].state_dict().items()}


@pytest.mark.parametrize("how", ["sum", full("chain")])
def test_ranks_branch_apart_in_one_loss_of_two_modules(how: str) -> None:
    nets = nn.ModuleList(Branching(seed) for seed in (1, 2))
    optimizer = torch.optim.SGD(nets.parameters(), 0.1)
    for step in range(6):
        (sum(_joint_loss(how, *nets, step, rank) for rank in (0, 1)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for state in run_ranks(_branching_apart, 2, how, init_group=False):
        for key, value in nets.state_dict().items():
            assert torch.allclose(state[key], value, rtol=0, atol=1e-6)


def test_a_module_may_be_written_before_the_backward_of_another() -> None:
    def run(strategy: Any, moment: str) -> Any:
        fabric = make_fabric(strategy)
        (one, one_optimizer), (other, other_optimizer) = [set_up(fabric, Loop()) for _ in range(2)]
        for step in range(3):
            x, y = batch_of(step)
            losses = [nn.functional.cross_entropy(model(x), y) for model in (other, one)]
            if moment == "between":
                _halve(other)
            fabric.backward(losses[0])
            other_optimizer.zero_grad()  # and no step
            if moment == "behind":
                _halve(other)
            fabric.backward(losses[1])
            one_optimizer.step()
            one_optimizer.zero_grad()
        states = [{k: v.clone() for k, v in model.state_dict().items()} for model in (one, other)]
        if isinstance(fabric.strategy, ElixirStrategy):
            fabric.strategy.close()
        return states

    tight = {**TIGHT, "gpu_memory_limit": "128KiB"}
    for mine, theirs in zip(run(tight, "behind"), run("auto", "behind"), strict=True):
        assert_same_state(mine, theirs)
    with pytest.raises(StateError, match="parameters were written inside forward and backward"):
        run(tight, "between")


def _halve(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


@pytest.mark.full
def test_memory_of_two_modules_is_not_more_than_the_limit() -> None:
    fabric = make_fabric(AUTO)
    first, optimizer = set_up(fabric, Loop())
    handle = EngineHandle.of(first.module)
    assert handle.budget.gpu_bytes == 96 * 1024
    second = fabric.setup(make_net())
    other = EngineHandle.of(second.module)
    assert handle.budget.gpu_bytes == other.budget.gpu_bytes == 48 * 1024
    run_steps(fabric, first, optimizer, Loop(steps=2))
    for engine in (handle.engine, other.engine):
        forecast = engine.plan.forecast
        assert forecast is None or forecast.peak_gpu_bytes <= 48 * 1024
    fabric.strategy.close()


@pytest.mark.full
def test_modules_that_are_gone_leave_their_memory_to_others() -> None:
    fabric = make_fabric(TIGHT)
    for _ in range(3):  # where they all lived, a part would not do
        model, optimizer = set_up(fabric, Loop())
        run_steps(fabric, model, optimizer, Loop(steps=1))
        assert EngineHandle.of(model.module).budget.gpu_bytes == parse_bytes(TIGHT["gpu_memory_limit"])
        del model, optimizer
    held = [set_up(fabric, Loop()) for _ in range(2)]
    with pytest.raises(CapacityError, match="one of 3 modules that share the memory"):
        set_up(fabric, Loop())
    assert len(held) == 2
    fabric.strategy.close()


def test_what_is_lacking_is_of_all_modules_that_share_the_memory() -> None:
    limit = parse_bytes(TIGHT["gpu_memory_limit"])
    fabric = make_fabric(TIGHT)
    held = [set_up(fabric, Loop()) for _ in range(2)]
    with pytest.raises(CapacityError, match="up to 3 times as much") as raised:
        set_up(fabric, Loop())
    fabric.strategy.close()
    assert raised.value.lacking_bytes is not None
    fabric = make_fabric({**TIGHT, "gpu_memory_limit": limit + raised.value.lacking_bytes})
    held = [set_up(fabric, Loop()) for _ in range(3)]
    assert len(held) == 3
    fabric.strategy.close()


def test_a_small_module_in_fp64_gets_what_it_needs_beside_a_larger_one() -> None:
    """On two ranks, whose chunks take more than those of one."""
    assert run_ranks(_small_beside_large, 2, init_group=False) == [True, True]


def _small_beside_large() -> bool:
    fabric = make_fabric(
        {**CHUNK, "placement_policy": "cpu", "gpu_memory_limit": "600KiB"}, Loop(devices=2, precision="64-true")
    )
    held = []
    for net in (
        nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]),
        nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 64)),
    ):
        held.append(fabric.setup(net, make_optimizer("adamw", net.parameters(), 1e-2)))
    parts = [EngineHandle.of(model.module).budget.gpu_bytes for model, _ in held]
    fabric.strategy.close()
    return 0 < parts[1] < parts[0] and sum(parts) <= 600 * 1024


def test_several_optimizers_of_one_module() -> None:
    def run(strategy: Any) -> Any:
        fabric = make_fabric(strategy)
        net = make_net()
        half = len(list(net.parameters())) // 2
        parts = list(net.parameters())[:half], list(net.parameters())[half:]
        model, *optimizers = fabric.setup(net, *[torch.optim.AdamW(part, 1e-2) for part in parts])
        torch.manual_seed(11)
        for step in range(4):
            x, y = batch_of(step)
            fabric.backward(nn.functional.cross_entropy(model(x), y))
            optimizers[step % 2].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        return model.state_dict()

    assert_same_state(dict(run(TIGHT)), dict(run("auto")))


def test_scheduler_closure_frozen_parameters_and_marked_methods() -> None:
    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()
            self.net[0].requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self(x), y)

    def run(strategy: Any) -> Any:
        fabric = make_fabric(strategy)
        net = Marked()
        trained = [p for p in net.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, 1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        model, optimizer, scheduler = fabric.setup(net, optimizer, scheduler=scheduler)
        model.mark_forward_method("loss")
        torch.manual_seed(11)
        losses = []
        for step in range(4):

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = model.loss(*batch_of(step))
                fabric.backward(loss)
                return loss

            losses.append(optimizer.step(closure).item())
            scheduler.step()
        model.eval()
        with torch.no_grad():
            losses.append(float(model.loss(*batch_of(9))))
        return losses, dict(model.state_dict()), optimizer.param_groups[0]["lr"]

    actual, expected = run(TIGHT), run("auto")
    assert actual[0] == expected[0]
    assert actual[2] == expected[2]
    assert_same_state(actual[1], expected[1])


def test_frozen_module_beside_the_one_that_trains() -> None:
    def run(strategy: Any) -> Any:
        fabric = make_fabric(strategy)
        teacher = fabric.setup(_without_dropout().requires_grad_(False))
        net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), 1e-2))
        losses = []
        for step in range(3):
            x, _ = batch_of(step)
            with torch.no_grad():
                wanted = teacher(x)
            loss = (model(x) - wanted).square().mean() + teacher(model(x) @ torch.ones(4, 32)).mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    torch.manual_seed(3)
    expected = run("auto")
    torch.manual_seed(3)
    assert run(TIGHT) == expected


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it
@pytest.mark.parametrize("how", ["blocks", full("module"), full("call")])
def test_compiled_models(how: str) -> None:
    def run(strategy: Any) -> Run:
        fabric = make_fabric(strategy)
        net: Any = _without_dropout()
        optimizer = make_optimizer("adamw", net.parameters(), 1e-2)
        if how == "blocks":
            for block in net:
                block.compile(backend="eager")
        elif how == "module":
            net.compile(backend="eager")
        else:
            net = torch.compile(net, backend="eager")
        model, optimizer = fabric.setup(net, optimizer)
        return collect(fabric, model, optimizer, run_steps(fabric, model, optimizer, Loop(steps=3)))

    torch._dynamo.reset()
    _assert_same(run(TIGHT), train("auto", Loop(steps=3), _without_dropout))


# What users look at


def test_gradients_norms_and_parameters_can_be_looked_at() -> None:
    fabric = make_fabric(TIGHT)
    net = _without_dropout()
    plain = copy.deepcopy(net)
    model, optimizer = fabric.setup(net, HybridAdam(net.parameters(), 1e-2))
    x, y = batch_of(0)
    fabric.backward(nn.functional.cross_entropy(model(x), y))
    nn.functional.cross_entropy(plain(x), y).backward()
    grads = fabric.strategy.full_grads()
    assert all(torch.equal(grads[name], p.grad) for name, p in plain.named_parameters() if p.grad is not None)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(net.parameters(), plain.parameters(), strict=True))
    norm = nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    torch.testing.assert_close(fabric.strategy.grad_norm(), norm)
    torch.testing.assert_close(optimizer.grad_norm(), norm)
    with fabric.strategy.full_parameters(modify=True) as parameters, torch.no_grad():
        parameters["0.up.weight"].zero_()
    assert not model.state_dict()["0.up.weight"].any()
    assert fabric.strategy.stats().fetches > 0
    fabric.strategy.close()
    with pytest.raises(StateError, match="no module was set up"):
        fabric.strategy.stats()


# Refusals


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PlanError, match="report_dir is for the Trainer"):
        ElixirStrategy(report_dir="reports")
    with pytest.raises(PlanError, match="needs a GPU"):
        make_fabric(TIGHT, Loop(precision="16-true"))
    fabric = make_fabric(TIGHT)
    net = make_net()
    with pytest.raises(PlanError, match="of no module that was set up"):
        fabric.setup_optimizers(torch.optim.AdamW(make_net().parameters()))
    other = nn.Linear(2, 2)
    with pytest.raises(PlanError, match="2 of the .* are not the module's"):
        fabric.setup(net, torch.optim.AdamW(itertools.chain(net.parameters(), other.parameters())))
    with pytest.raises(PlanError, match="element"):
        fabric.setup(net, torch.optim.LBFGS(net.parameters()))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), 1e-2))
    with pytest.raises(RuntimeError, match="fabric.backward"):
        model(batch_of(0)[0]).sum().backward()
    optimizer.zero_grad()
    fabric.backward(model(batch_of(0)[0]).sum() * float("inf"))
    with pytest.raises(RuntimeError, match="cannot be clipped"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.zero_grad()
    optimizer.step()
    net[0].requires_grad_(False)
    with pytest.raises(PlanError, match="requires_grad of 6 parameters has changed"):
        model(batch_of(0)[0])
    fabric.strategy.close()


def test_custom_checkpoint_io_and_sharded_checkpoints_do_not_go_together() -> None:
    from lightning_elixir._lightning import TorchCheckpointIO

    class Own(TorchCheckpointIO):
        pass

    with pytest.raises(PlanError, match="Own would have nothing to do"):
        make_fabric({**TIGHT, "state_dict_type": "sharded", "checkpoint_io": Own()})

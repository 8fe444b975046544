"""What all ranks must call and one calls alone is an error on all within seconds, which names the calls; a rank that is
slow is waited for, and who waits hears signals."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_elixir.core import waits
from lightning_elixir.errors import DivergenceError, PeerLostError
from lightning_elixir.runtime.build import Builder
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.dist import run_processes, run_ranks, start_processes
from tests.helpers.plans import make_plan
from tests.helpers.tiers import full, telling

# From the call to the error on a busy machine; a deadlock would last as long as the group's timeout.
SOON_S = 60.0
_SLOW_S = 240.0
PLACEMENTS = {
    "tight": {"placement_policy": "cpu", "chunk_size": 4096},
    "resident": {"placement_policy": "cuda", "chunk_size": 4096},
}


def new_training(placement: str) -> tuple[nn.Module, ElixirModule, ElixirOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(6)])
    plan = make_plan(model, world_size=dist.get_world_size(), **PLACEMENTS[placement])
    module = ElixirModule(model, plan, device=torch.device("cpu"))
    optimizer = ElixirOptimizer(module, torch.optim.Adam(model.parameters(), lr=1e-3))
    for _ in range(2):
        train(module, optimizer)
    return model, module, optimizer


def train(module: ElixirModule, optimizer: ElixirOptimizer) -> None:
    optimizer.zero_grad()
    optimizer.backward(module(torch.ones(2, 32)).square().mean())
    optimizer.step()


def end_all_together(rank: int) -> None:
    """What a rank that ends would tell the others."""
    Path(f"over_{rank}").touch()
    deadline = time.monotonic() + SOON_S
    while time.monotonic() < deadline and not all(Path(f"over_{r}").exists() for r in range(dist.get_world_size())):
        time.sleep(0.05)


def call_alone(call: str, others: str, placement: str) -> tuple[str, str, float]:
    rank = dist.get_rank()
    model, module, optimizer = new_training(placement)
    alone: dict[str, Callable[[], Any]] = {
        "state_dict": module.state_dict,
        "state_dict of the model": model.state_dict,
        "full_state_dict": module.full_state_dict,
        "full_parameters": lambda: module.full_parameters().__enter__(),
        "a read": lambda: [float(p.detach().sum()) for p in model.parameters()],
        "full_grads": module.full_grads,
        "grad_norm": optimizer.grad_norm,
        "optimizer.state_dict": optimizer.state_dict,
        "replan": lambda: module.replan(module.plan),
    }
    begin, heard = time.monotonic(), ("", "")
    try:
        if rank == 0:
            alone[call]()
        elif others == "train":
            for _ in range(2):
                train(module, optimizer)
        elif others == "barrier":
            dist.barrier()
        elif others == "broadcast":
            dist.broadcast(torch.zeros(1), src=1)
        elif others == "close":
            module.close()
    except Exception as error:
        heard = type(error).__name__, str(error)
    end_all_together(rank)
    return *heard, time.monotonic() - begin


ALONE = {
    "state_dict": ("state_dict() (ElixirModule.state_dict() at ", "Call ElixirModule.state_dict() on every rank"),
    "state_dict of the model": ("state_dict() (Module.state_dict() at ", "Call Module.state_dict() on every rank"),
    "full_state_dict": ("full_state_dict() or lightning_module_state_dict() (", "Call ElixirModule.full_state_dict()"),
    "full_parameters": ("full_parameters() (", "Call full_parameters() on every rank"),
    "a read": ("a read of a parameter (", "Read parameters on every rank"),
    "full_grads": ("full_grads() (", "Call ElixirModule.full_grads() on every rank"),
    "grad_norm": ("grad_norm() (", "Call ElixirOptimizer.grad_norm() on every rank"),
    "optimizer.state_dict": ("the optimizer's state_dict() (", "Call ElixirOptimizer.state_dict() on every rank"),
    "replan": ("replan() (", "Call ElixirModule.replan() on every rank"),
}


@pytest.mark.parametrize(
    "call",
    telling([name for name in ALONE if name != "a read"], "state_dict", "replan", "grad_norm", "full_parameters"),
)
def test_while_others_train(call: str) -> None:
    words, cure = ALONE[call]
    for kind, text, seconds in run_ranks(call_alone, 2, call, "train", "tight"):
        assert kind == "DivergenceError"
        assert f"rank 0 is in {words}" in text
        assert "rank 1 is in the end of a forward (at test_one_rank_alone.py:" in text
        assert f"{cure}" in text
        assert seconds < SOON_S


@pytest.mark.full
@pytest.mark.parametrize("call", ["state_dict", "state_dict of the model", "optimizer.state_dict"])
def test_while_others_train_with_all_resident(call: str) -> None:
    """Their forward meets nobody; their backward does."""
    words, cure = ALONE[call]
    for kind, text, _ in run_ranks(call_alone, 2, call, "train", "resident"):
        assert kind == "DivergenceError"
        assert f"rank 0 is in {words}" in text
        assert "rank 1 is in the end of a backward (" in text
        assert cure in text


@pytest.mark.parametrize(
    ("call", "world_size"),
    [
        full("state_dict", 2),
        full("state_dict", 3),
        full("a read", 2),
        ("full_parameters", 3),
        full("optimizer.state_dict", 2),
    ],
)
@pytest.mark.full
def test_while_others_wait_in_a_barrier_of_torch(call: str, world_size: int) -> None:
    words, cure = ALONE[call]
    for kind, text, seconds in run_ranks(call_alone, world_size, call, "barrier", "tight", fresh=True):
        assert kind == "DivergenceError"
        assert f"rank 0 is in {words}" in text
        assert "in torch.distributed.barrier() (at test_one_rank_alone.py:" in text
        assert cure in text
        assert seconds < SOON_S


def test_a_read_is_served_by_others_that_train() -> None:
    """It changes nothing, and needs them only until it is over."""
    assert [heard[:2] for heard in run_ranks(_read_and_train, 2)] == [("", "")] * 2


def _read_and_train() -> tuple[str, str]:
    model, module, optimizer = new_training("tight")
    before = float(next(iter(model.parameters())).detach().sum()) if dist.get_rank() == 0 else 0.0
    for _ in range(2):
        train(module, optimizer)
    assert before != 0.0 or dist.get_rank() != 0
    module.close()
    return "", ""


@pytest.mark.parametrize("call", telling(["state_dict", "a read"], "state_dict"))
@pytest.mark.full
def test_where_others_have_closed_the_module(call: str) -> None:
    everyone = run_ranks(call_alone, 3, call, "close", "tight", fresh=True)
    kind, text, seconds = everyone[0]
    assert kind == "PeerLostError"
    assert "rank 1 has closed what this goes through (close())" in text
    assert f"It was in {ALONE[call][0]}" in text
    assert "Every rank must " in text
    assert seconds < SOON_S
    assert [heard[0] for heard in everyone[1:]] == ["", ""]


# Processes that end, are slow, or get signals


def in_process(call: str, others: str) -> None:
    """Run by a process of its own."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    _, module, optimizer = new_training("tight")
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    loss = module(torch.ones(2, 32)).square().mean()
    if call == "step":
        optimizer.backward(loss)
    calls: dict[str, Callable[[], Any]] = {
        "state_dict": module.state_dict,
        "forward": lambda: module(torch.ones(2, 32)),
        "backward": lambda: optimizer.backward(loss),
        "step": optimizer.step,
    }
    heard = ""
    if rank == 1 and others == "ended":
        return
    if rank == 1 and others == "slow":
        _sleep_until("go_on")
    begin = time.monotonic()
    Path(f"called_{rank}").touch()
    try:
        calls[call]()
    except BaseException as error:
        heard = f"{type(error).__name__}: {error}"
    Path(f"heard_{rank}").write_text(json.dumps([heard, time.monotonic() - begin]))


class Stopped(Exception):
    pass


def _stop(number: int, frame: Any) -> None:
    raise Stopped("SIGTERM has come")


def _sleep_until(name: str, longest_s: float = _SLOW_S) -> None:
    deadline = time.monotonic() + longest_s
    while not Path(name).exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def _heard(rank: int) -> tuple[str, float]:
    text, seconds = json.loads(Path(f"heard_{rank}").read_text())
    return text, seconds


def _code(call: str, others: str) -> str:
    return f"from tests.runtime.test_one_rank_alone import in_process; in_process({call!r}, {others!r})"


@pytest.mark.parametrize(
    ("call", "where", "cure"),
    [
        full(
            "state_dict",
            "state_dict() (ElixirModule.state_dict() at test_one_rank_alone.py:",
            "Every rank must call ElixirModule.state_dict()",
        ),
        ("forward", "a forward or a backward (at test_one_rank_alone.py:", waits.MORE_BATCHES),
    ],
    ids=["state_dict", "forward"],
)
@pytest.mark.full
def test_where_the_other_has_ended(call: str, where: str, cure: str) -> None:
    codes = run_processes(_code(call, "ended"), 2)
    assert codes == [0, 0]
    text, seconds = _heard(0)
    assert text.startswith("PeerLostError: rank 0 cannot go on: rank 1 has come to the end of its program (process ")
    assert f"It was in {where}" in text
    assert text.endswith(f". {cure}")
    assert seconds < SOON_S


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("call", ["state_dict", "forward", "backward", "step"])
def test_who_waits_heeds_signals(call: str, number: signal.Signals) -> None:
    processes = start_processes(_code(call, "slow"), 2)
    try:
        _sleep_until("called_0")
        assert Path("called_0").exists()
        time.sleep(0.5)
        processes[0].send_signal(number)
        assert processes[0].wait(SOON_S) == 0  # ends, whatever the other does
        assert processes[1].poll() is None
        text, _ = _heard(0)
        assert text == {signal.SIGINT: "KeyboardInterrupt: ", signal.SIGTERM: "Stopped: SIGTERM has come"}[number]
        Path("go_on").touch()
        assert processes[1].wait(SOON_S) == 0
        # Rank 0 has kept the store, and what it told is gone with it.
        assert _heard(1)[0].startswith("PeerLostError: rank 1 cannot go on: rank 0 has ended (process ")
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.full
@pytest.mark.parametrize("call", ["state_dict", "backward"])
def test_a_slow_rank_is_waited_for(call: str) -> None:
    """Many times longer than it takes to find out about ranks that wait for each other."""
    processes = start_processes(_code(call, "slow"), 2)
    try:
        _sleep_until("called_0")
        time.sleep(6 * waits.LOOK_EVERY_S)
        assert [process.poll() for process in processes] == [None, None]
        assert not Path("heard_0").exists()
        Path("go_on").touch()
        assert [process.wait(SOON_S) for process in processes] == [0, 0]
        assert [_heard(rank)[0] for rank in range(2)] == ["", ""]
    finally:
        for process in processes:
            process.kill()
            process.wait()


# Processes that live on


def fail_and_train_again() -> tuple[str, dict[str, torch.Tensor]]:
    rank = dist.get_rank()
    _, module, optimizer = new_training("tight")
    with pytest.raises(DivergenceError) as caught:
        module.state_dict() if rank == 0 else dist.barrier()
    end_all_together(rank)
    again: list[str] = []
    try:
        train(module, optimizer)
    except PeerLostError as error:
        again.append(str(error))
    assert not again
    return str(caught.value), module.state_dict()


@pytest.mark.full
def test_ranks_that_have_heard_train_again() -> None:
    (_, first), (_, second) = run_ranks(fail_and_train_again, 2, fresh=True)
    expected = run_ranks(train_three_times, 2)[0]
    assert all(torch.equal(first[name], expected[name]) and torch.equal(second[name], expected[name]) for name in first)


def train_three_times() -> dict[str, torch.Tensor]:
    _, module, optimizer = new_training("tight")
    train(module, optimizer)
    return module.state_dict()


def hear_in_backward_and_train_again(does_wait: bool) -> tuple[str, float, dict[str, torch.Tensor]]:
    """Rank 1 raises in the middle of a backward, tells, and goes on at once, or when rank 0 has heard."""
    rank = dist.get_rank()
    model, module, optimizer = new_training("resident")
    loss = module(_with_error_inside(model) if rank == 1 else torch.ones(2, 32)).square().mean()
    begin, heard = time.monotonic(), ""
    try:
        optimizer.backward(loss)
    except PeerLostError as error:
        heard = str(error)
    except Boom as error:
        module.engine.comm.leave(error)  # as the strategy does
    seconds = time.monotonic() - begin
    if does_wait:
        end_all_together(rank)
    train(module, optimizer)
    return heard, seconds, module.state_dict()


class Boom(Exception):
    pass


def _with_error_inside(model: nn.Module) -> torch.Tensor:
    """An input; the gradients of half of the layers have come before the error does."""

    def boom(grad: torch.Tensor) -> None:
        raise Boom("in the middle")

    def pass_on(layer: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(boom)
        handle.remove()

    layer = cast(nn.Sequential, model)[2]
    handle = layer.register_forward_hook(pass_on)
    return torch.ones(2, 32)


@pytest.mark.parametrize("does_wait", telling([False, True], "True"))
def test_reductions_under_way_when_a_rank_is_lost(does_wait: bool) -> None:
    """They open no new groups: neither does the rank wait for others there, nor do those that go on lose it again."""
    told, other = run_ranks(hear_in_backward_and_train_again, 2, does_wait, fresh=True)
    assert "rank 1 failed: Boom: in the middle. It was in a backward (" in told[0]
    assert told[1] < SOON_S / 2
    expected = run_ranks(train_three_times, 2)[0]
    for _, _, state in (told, other):
        assert all(torch.equal(state[name], expected[name]) for name in expected)


def different_writes() -> str:
    _, module, _ = new_training("tight")
    try:
        with module.full_parameters(modify=dist.get_rank() == 0):
            return ""
    except DivergenceError as error:
        return str(error)


def test_only_one_rank_writes() -> None:
    for text in run_ranks(different_writes, 2):
        assert "rank 0 is in full_parameters(modify=True) (" in text
        assert "rank 1 is in full_parameters() (" in text


# Building


def build(kind: str) -> str:
    """Make a module where rank 0 has a parameter that cannot be read, or in inference mode."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(6)])
    plan = make_plan(model, world_size=dist.get_world_size(), **PLACEMENTS["tight"])
    if kind == "unreadable" and dist.get_rank() == 0:
        collect, num_collected = Builder._collect, 0

        def stumble(builder: Builder, chunk: Any, full: torch.Tensor) -> torch.Tensor:
            nonlocal num_collected
            num_collected += 1
            if num_collected == 3:
                raise MemoryError("no memory for the values")
            return collect(builder, chunk, full)

        Builder._collect = stumble  # type: ignore[method-assign]
    try:
        with torch.inference_mode(kind == "inference"):
            expected = model(torch.ones(2, 32)) if dist.get_rank() == 0 else None
            module = ElixirModule(model, plan, device=torch.device("cpu"))
            result = module(torch.ones(2, 32))
    except (MemoryError, PeerLostError) as error:
        return f"{type(error).__name__}: {error}"
    return "as plain" if expected is None or torch.equal(result, expected) else "other numbers"


def test_a_rank_that_cannot_put_values_together_ends_the_others() -> None:
    first, second = run_ranks(build, 2, "unreadable")
    assert first == "MemoryError: no memory for the values"
    assert second.startswith("PeerLostError")
    assert "no memory for the values" in second


def test_a_module_is_made_in_inference_mode() -> None:
    assert run_ranks(build, 2, "inference") == ["as plain", "as plain"]

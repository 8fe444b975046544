"""Threads of the user's beside training: served, or refused there, and training goes on as if they were not."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_elixir.core.device import CpuDevice
from lightning_elixir.errors import StateError
from lightning_elixir.optim.hybrid_adam import HybridAdam
from lightning_elixir.runtime import chunk as chunk_module
from lightning_elixir.runtime import turns
from lightning_elixir.runtime.build import Builder
from lightning_elixir.runtime.engine import Engine
from lightning_elixir.runtime.gradients import Gradients
from lightning_elixir.runtime.iterations import Iterations
from lightning_elixir.runtime.reducer import Reducer
from lightning_elixir.runtime.sources import set_source
from lightning_elixir.wrapper import ElixirModule, ElixirOptimizer
from tests.helpers.dist import run_ranks
from tests.helpers.plans import make_plan
from tests.helpers.threads import WIDTH, new_net, train_beside_a_monitor, wrap
from tests.helpers.tiers import telling
from tests.helpers.training import step_side_by_side


def _in_thread(work: Callable[[], Any]) -> Any:
    """What `work` returns or raises in a thread of its own."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, name="monitor", daemon=True)
    thread.start()
    thread.join(60)
    assert found, "the thread hangs"
    return found[0]


def test_a_thread_that_waits_for_what_was_saved_does_not_get_what_was_written_meanwhile() -> None:
    """Plain PyTorch looks at the version where it gives the tensor out."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    module = ElixirModule(model, make_plan(model, placement_policy="cpu", chunk_size=1024), device="cpu")
    x = torch.randn(2, WIDTH, requires_grad=True)
    node = module(x).grad_fn
    assert node is not None
    found: list[Any] = []

    def read() -> None:
        try:
            found.append(node._saved_mat2)
        except RuntimeError as error:
            found.append(error)

    turn = module.engine.turn
    reader = threading.Thread(target=read, daemon=True)
    with turn.call("a call that writes"):
        reader.start()
        while not turn._waiting:  # it has asked
            time.sleep(0.001)
        with torch.no_grad():
            model.weight.mul_(2.0)
    reader.join(60)
    assert len(found) == 1
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        raise found.pop()
    module.close()


def test_a_signal_while_the_engine_is_taken_locks_no_thread_out() -> None:
    """At every moment at which Python may run a handler: where a function begins, and after a call of one in C."""
    turn = turns.Turn(CpuDevice(), is_shared=False)
    for moment in itertools.count():
        moments = itertools.count()

        def look(frame: Any, event: str, _: Any, moments: Any = moments, moment: int = moment) -> None:
            code = frame.f_code
            if code.co_filename not in (turns.__file__, threading.__file__) or code.co_name in ("__exit__", "drop"):
                return
            if event in ("call", "c_return") and next(moments) == moment:
                raise KeyboardInterrupt

        is_through = False
        earlier = sys.getprofile()  # of a tool that measures coverage, or time
        with contextlib.suppress(KeyboardInterrupt):
            sys.setprofile(look)
            try:
                with turn.call("a call"):
                    is_through = next(moments) <= moment
            finally:
                sys.setprofile(earlier)
        assert _in_thread(lambda: turn.call("a call of another thread").__enter__()) is None
        if is_through:
            break
    assert moment > 5


@pytest.mark.parametrize(
    ("use", "is_whole"),
    [("call", True), ("phase", True), ("long_call", False), ("block", False), ("taken", False)],
)
def test_signals_wait_for_the_end_of_a_call_and_not_for_user_code(use: str, is_whole: bool) -> None:
    turn, reached = turns.Turn(CpuDevice(), is_shared=False), []

    def run() -> None:
        if use == "taken":  # as a forward has it while the user's modules run
            turn.phase("a forward").take()
            signal.raise_signal(signal.SIGINT)
        else:
            with getattr(turn, use)("a use"):
                signal.raise_signal(signal.SIGINT)
                reached.append(turn.is_mine())
        reached.append(None)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run()
    finally:
        signal.signal(signal.SIGINT, before)
    assert reached == ([True] if is_whole else [])
    assert turn.is_mine() == (use == "taken")


def test_ctrl_c_ends_the_wait_for_the_call_of_another_thread() -> None:
    turn = turns.Turn(CpuDevice(), is_shared=False)
    has_it, may_go = threading.Lock(), threading.Lock()
    has_it.acquire()
    may_go.acquire()

    def use() -> None:
        with turn.call("a call"):
            has_it.release()
            may_go.acquire(timeout=30)

    def interrupt() -> None:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    others = [threading.Thread(target=use, daemon=True), threading.Thread(target=interrupt, daemon=True)]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        others[0].start()
        has_it.acquire()
        others[1].start()
        with pytest.raises(KeyboardInterrupt), turn.call("a call of this thread"):
            pass
        assert others[0].is_alive()  # it has not been waited for
    finally:
        signal.signal(signal.SIGINT, before)
        may_go.release()
        for other in others:
            other.join()
    assert not turn.is_mine()


def test_a_monitor_reads_parameters_all_the_time() -> None:
    train_beside_a_monitor("cpu")


Calls = Callable[[ElixirModule, ElixirOptimizer], Any]

CALLS: dict[str, Calls] = {
    "read": lambda module, optimizer: float(module.module[0][0].weight.detach().sum()),
    "grad": lambda module, optimizer: [p.grad for p in module.module.parameters()],
    "zero_grad": lambda module, optimizer: module.zero_grad(),
    "full_parameters": lambda module, optimizer: _looked_at(module),
    "full_grads": lambda module, optimizer: module.full_grads(),
    "state_dict": lambda module, optimizer: module.module.state_dict(),
    "full_state_dict": lambda module, optimizer: module.full_state_dict(),
    "deepcopy": lambda module, optimizer: copy.deepcopy(module).state_dict(),
    "deepcopy of the model": lambda module, optimizer: copy.deepcopy(module.module),
    "forward": lambda module, optimizer: _without_gradients(module),
    "layer": lambda module, optimizer: _without_gradients(module.module[3]),
    "optimizer": lambda module, optimizer: optimizer.state_dict(),
    "grad_norm": lambda module, optimizer: optimizer.grad_norm(),
    "stats": lambda module, optimizer: module.stats(),
}
ALWAYS = ("stats",)  # served at any time
CONSISTENT = ("state_dict", "full_state_dict", "deepcopy", "full_parameters")  # of one moment


def _looked_at(module: ElixirModule) -> dict[str, torch.Tensor]:
    with module.full_parameters() as whole:
        return {name: p.detach().clone() for name, p in whole.items()}


def _without_gradients(net: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return net(torch.full((2, WIDTH), 0.1))


UNDISTURBED = [name for name in CALLS if name != "zero_grad"]


@pytest.mark.parametrize("name", telling(UNDISTURBED, "forward", "optimizer", "full_parameters", "state_dict"))
def test_calls_of_another_thread_leave_training_as_it_is(name: str) -> None:
    plain = new_net()
    module, optimizer = wrap(copy.deepcopy(plain))
    oracle = HybridAdam(plain.parameters(), lr=1e-2)
    is_over = threading.Event()
    served: list[Any] = []
    refused: list[Exception] = []

    def call() -> None:
        while not is_over.is_set():
            try:
                served.append(CALLS[name](module, optimizer))
            except Exception as error:
                refused.append(error)
            is_over.wait(1e-3)

    states = [copy.deepcopy(plain.state_dict())]
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    num_steps = 0
    while num_steps < 12 or (not served and num_steps < 300):
        step_side_by_side(plain, oracle, module, optimizer, torch.randn(8, WIDTH))
        states.append(copy.deepcopy(plain.state_dict()))
        num_steps += 1
    is_over.set()
    thread.join(60)
    assert not thread.is_alive()
    assert served
    assert {type(error) for error in refused} <= ({StateError} if name not in ALWAYS else set())
    assert all(torch.equal(value, states[-1][key]) for key, value in module.state_dict().items())
    if name in CONSISTENT:
        for values in served:
            assert any(all(torch.equal(values[key], state[key]) for key in state) for state in states)


class _DeviceWithStreams(CpuDevice):
    """Writes down which stream waits for which; each thread has one, by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def compute_stream(self) -> _NamedStream:
        return _NamedStream(threading.current_thread().name, self)


@dataclasses.dataclass(frozen=True)
class _NamedStream:
    name: str
    device: _DeviceWithStreams

    def hold_up_this_thread(self) -> None:
        self.device.waits.append(f"{threading.current_thread().name} for {self.name}")

    def wait_for(self, other: _NamedStream) -> None:
        self.device.waits.append(f"{self.name} for {other.name}")


def test_what_threads_do_on_streams_of_their_own_has_one_order() -> None:
    device = _DeviceWithStreams()
    turn = turns.Turn(device, is_shared=False)

    def use(name: str, *, is_step: bool = False) -> list[str]:
        def run() -> None:
            with turn.phase("a step") if is_step else turn.call("a read"), turn.call("a read inside"):
                pass

        device.waits.clear()
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        thread.join(60)
        return list(device.waits)

    with turn.phase("a step"):
        pass
    me = threading.current_thread().name
    assert use("reader") == [f"reader for {me}", f"{me} for reader"]
    with turn.call("a read"):
        pass
    assert device.waits == [f"reader for {me}", f"{me} for reader"], "nothing new"
    assert use("trainer", is_step=True) == [f"trainer for {me}"]
    with turn.call("a read"):
        pass
    assert device.waits == [f"trainer for {me}", f"{me} for trainer"]


def test_between_steps_another_thread_is_served() -> None:
    plain = new_net()
    model = copy.deepcopy(plain)
    module, optimizer = wrap(model)
    x = torch.randn(8, WIDTH)
    optimizer.backward(module(x).sum())
    plain(x).sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(_in_thread(lambda p=p: p.detach().clone()), q)
        assert torch.equal(_in_thread(lambda p=p: p.grad), q.grad)
    for name in CONSISTENT:
        values = _in_thread(lambda name=name: CALLS[name](module, optimizer))
        assert all(torch.equal(values[key], value) for key, value in plain.state_dict().items())
    assert _in_thread(lambda: CALLS["zero_grad"](module, optimizer)) is None
    assert [p.grad for p in model.parameters()] == [None] * 20


def test_the_thread_that_trains_waits_for_the_forward_of_another() -> None:
    model = new_net()
    module, optimizer = wrap(model)
    x = torch.randn(8, WIDTH)
    expected = module(x).detach()
    optimizer.backward(module(x).sum())  # from here on, this is the thread that trains
    is_inside, may_go_on = threading.Event(), threading.Event()

    def wait(*args: Any) -> None:
        if threading.current_thread().name == "other":
            is_inside.set()
            assert may_go_on.wait(60)

    model[5].register_forward_hook(wait)
    found: list[torch.Tensor] = []

    def run() -> None:
        with torch.no_grad():
            found.append(module(x))

    thread = threading.Thread(target=run, name="other", daemon=True)
    thread.start()
    assert is_inside.wait(60)
    timer = threading.Timer(0.2, may_go_on.set)
    timer.start()
    assert torch.equal(module(x), expected)
    thread.join(60)
    assert torch.equal(found[0], expected)


def test_in_a_block_of_the_thread_that_trains_another_is_refused() -> None:
    model = new_net()
    module, optimizer = wrap(model)
    optimizer.backward(module(torch.randn(8, WIDTH)).sum())
    with module.full_parameters():
        assert isinstance(_in_thread(module.full_state_dict), StateError)  # and does not wait for the block's end
    assert isinstance(_in_thread(module.full_state_dict), dict)


@pytest.mark.parametrize(
    ("owner", "name"), [(Reducer, "flush"), (Iterations, "end_forward"), (Iterations, "abandon"), (Gradients, "follow")]
)
def test_up_to_its_last_line_a_call_has_the_engine_alone(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the forward or the backward that it ends is noted as over. On a GPU others ran there, and found
    gradients of which a part had landed."""
    plain = new_net()
    model = copy.deepcopy(plain)
    module, optimizer = wrap(model)
    oracle = HybridAdam(plain.parameters(), lr=1e-2)
    step_side_by_side(plain, oracle, module, optimizer, torch.randn(8, WIDTH))
    real, threads = getattr(owner, name), []

    def beside(self: Any, *args: Any, **kwargs: Any) -> Any:
        served: list[Any] = []

        def read() -> None:
            with contextlib.suppress(StateError):
                served.append(model[0][0].weight.detach().clone())

        threads.append(threading.Thread(target=read, daemon=True))
        threads[-1].start()
        threads[-1].join(0.2)
        assert not served
        return real(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, beside)
    if name == "abandon":
        handle = model[5].register_forward_hook(_raise)
        with pytest.raises(ZeroDivisionError):
            module(torch.randn(8, WIDTH))
        handle.remove()
    x = torch.randn(8, WIDTH)
    optimizer.backward(module(x).square().mean())
    optimizer.clip_grad_value_(1e-3)
    optimizer.step()
    oracle.zero_grad()
    plain(x).square().mean().backward()
    nn.utils.clip_grad_value_(plain.parameters(), 1e-3)
    oracle.step()
    assert threads
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    state = module.state_dict()
    assert all(torch.equal(state[key], value) for key, value in plain.state_dict().items())


def _raise(*args: Any) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("name", ["read", "raw pointer", "state_dict", "layer", "full_grads", "grad"])
def test_a_thread_that_waited_while_the_engine_was_closed_is_told(name: str) -> None:
    """Before, it went on over shards that were gone."""
    model = new_net()
    module, optimizer = wrap(model)
    optimizer.backward(module(torch.randn(8, WIDTH)).sum())
    call = CALLS.get(name, lambda module, optimizer: model[0][0].weight.data_ptr())
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call(module, optimizer))
        except Exception as error:
            found.append(error)

    thread, turn = threading.Thread(target=run, daemon=True), module.engine.turn
    with turn.call("a call"):
        thread.start()
        while not turn._waiting:
            time.sleep(0.01)
        module.close()
    thread.join(60)
    assert not thread.is_alive()
    if name == "grad":  # of a closed engine there are none
        assert found == [[None] * 20]
    else:
        assert isinstance(found[0], StateError), found
        assert "closed" in str(found[0])


@dataclasses.dataclass
class _Output:
    """Nothing tells the engine of a backward that begins at what is inside."""

    value: torch.Tensor


class _Recomputed(nn.Module):
    """Recomputes its layers in backward, and counts operators there."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = new_net()

    def forward(self, x: torch.Tensor) -> _Output:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, context_fn=_selective) if self.training else layer(x)
        return _Output(x)


def _selective() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_a_backward_that_nothing_tells_of_has_the_engine_when_it_needs_parameters(
    is_recomputed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _Recomputed().train(is_recomputed)
    plain = copy.deepcopy(model)
    module, _ = wrap(model)
    real, had_turn = Engine.acquire, []

    def look(self: Engine, ids: Any, *, pin: bool) -> None:
        had_turn.append(self.turn.is_mine())
        real(self, ids, pin=pin)

    x = torch.randn(8, WIDTH)
    loss = module(x).value.square().mean()
    norms = [float(p.detach().norm()) for p in model.parameters()]  # so that chunks may have been written to
    monkeypatch.setattr(Engine, "acquire", look)
    loss.backward()
    assert len(had_turn) > 5
    assert all(had_turn)
    plain(x).value.square().mean().backward()
    assert norms == [float(p.detach().norm()) for p in plain.parameters()]
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]


def test_what_a_thread_has_left_open_is_free_when_it_has_ended() -> None:
    model = new_net()
    module, _ = wrap(model)

    def leave(*args: Any) -> None:
        raise KeyboardInterrupt

    handle = model[5].register_forward_hook(leave)

    def run() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            model(torch.randn(8, WIDTH))  # torch calls no hooks after it, so the engine is not told

    _in_thread(run)
    handle.remove()
    x = torch.randn(8, WIDTH)
    assert torch.equal(module(x), new_net()(x))


def test_inside_forward_another_thread_is_refused_and_told_what_to_do() -> None:
    model = new_net()
    module, optimizer = wrap(model)
    weight, seen = model[0][0].weight, []

    def look(*args: Any) -> None:
        seen.extend(
            _in_thread(lambda call=call: call(module, optimizer)) for name, call in CALLS.items() if name not in ALWAYS
        )
        assert _in_thread(lambda: tuple(weight.shape)) == (WIDTH, WIDTH)

    model[5].register_forward_hook(look)
    x = torch.randn(8, WIDTH)
    loss = module(x).square().mean()
    assert len(seen) == len(CALLS) - len(ALWAYS)
    for error in seen:
        assert isinstance(error, StateError)
        assert "thread 'monitor'" in str(error)
        assert "callback" in str(error)
    optimizer.backward(loss)  # and nothing has happened to this one
    plain = new_net()
    plain(x).square().mean().backward()
    grads = module.full_grads()
    assert all(torch.equal(grads[name], p.grad) for name, p in plain.named_parameters() if p.grad is not None)


def test_a_thread_that_has_read_before_training_is_refused_while_parameters_are_in_use() -> None:
    """It is known then; before, its next read went to memory that might be gone before the read was over."""
    model = new_net()
    module, optimizer = wrap(model)
    weight, seen = model[0][0].weight, []
    turns_of_monitor, answers = queue.SimpleQueue[bool](), queue.SimpleQueue[Any]()

    def monitor() -> None:
        while turns_of_monitor.get():
            try:
                answers.put(weight.sum().item())
            except Exception as error:
                answers.put(error)

    def read() -> Any:
        turns_of_monitor.put(True)
        return answers.get(timeout=60)

    thread = threading.Thread(target=monitor, name="monitor", daemon=True)
    thread.start()
    assert read() == new_net()[0][0].weight.sum().item()
    model[0][0].register_forward_hook(lambda *args: seen.append(read()))
    optimizer.backward(module(torch.ones(2, WIDTH)).square().mean())
    turns_of_monitor.put(False)
    thread.join()
    assert seen
    assert all(isinstance(answer, StateError) for answer in seen)


def test_one_thread_after_the_other_may_train() -> None:
    plain = new_net()
    module, optimizer = wrap(copy.deepcopy(plain))
    oracle = HybridAdam(plain.parameters(), lr=1e-2)

    def train(net: Any, step: Any) -> float:
        loss = net(torch.full((8, WIDTH), 0.1)).square().mean()
        optimizer.backward(loss) if step is optimizer else loss.backward()
        step.step()
        step.zero_grad()
        return loss.item()

    for _ in range(2):
        assert _in_thread(lambda: train(module, optimizer)) == train(plain, oracle)
        assert train(module, optimizer) == train(plain, oracle)
    with pytest.raises(TypeError):  # and an error in a thread is its own
        raise _in_thread(lambda: module())
    assert train(module, optimizer) == train(plain, oracle)


def _read_before_the_first_forward() -> tuple[str, list[float], list[float]]:
    rank = dist.get_rank()
    plain = new_net()
    model = copy.deepcopy(plain)
    plan = make_plan(model, placement_policy="cpu", chunk_size=17408, world_size=2)
    module = ElixirModule(model, plan, device="cpu")
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.1))
    read = _in_thread(model.state_dict) if rank == 1 else None
    losses = []
    for step in range(2):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = module(x).square().mean()
        optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    oracle, expected = torch.optim.SGD(plain.parameters(), lr=0.1), []
    for step in range(2):
        oracle.zero_grad()
        loss = plain(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        oracle.step()
        expected.append(loss.item())
    return str(read), losses, expected


def test_with_two_ranks_a_thread_is_refused_before_the_first_forward_too() -> None:
    """Before, what it called took the other rank, which was in its forward, and the run was lost."""
    (_, losses, expected), (read, others, _) = run_ranks(_read_before_the_first_forward, 2)
    assert losses == others == expected
    assert "thread 'monitor'" in read
    assert "takes all ranks" in read


def _train_in_another_thread() -> float:
    model = new_net()
    module = ElixirModule(model, make_plan(model, placement_policy="cpu", chunk_size=17408, world_size=2), device="cpu")
    optimizer = ElixirOptimizer(module, torch.optim.SGD(model.parameters(), lr=0.1))

    def train() -> float:
        loss = module(torch.ones(2, WIDTH)).square().mean()
        optimizer.backward(loss)
        optimizer.step()
        return float(sum(v.sum() for v in module.state_dict().values()))

    found: float = _in_thread(train)
    return found


def test_two_ranks_may_train_in_another_thread_than_that_which_made_the_engine() -> None:
    first, second = run_ranks(_train_in_another_thread, 2)
    assert isinstance(first, float)
    assert first == second


def test_while_the_engine_is_built_another_thread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """And where its parts are put together, waits."""
    net, found = new_net(), []
    first = next(net.parameters())
    build_chunk, adopt = Builder._build_chunk, Engine._adopt

    def read_after(builder: Builder, chunk: Any) -> None:
        build_chunk(builder, chunk)
        found.append(_in_thread(lambda: first.norm()))

    def read_beside(engine: Engine, active: Any) -> None:
        thread = threading.Thread(target=lambda: found.append(first.norm()), daemon=True)
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        adopt(engine, active)

    monkeypatch.setattr(Builder, "_build_chunk", read_after)
    monkeypatch.setattr(Engine, "_adopt", read_beside)
    expected = first.norm()
    module, _ = wrap(net)
    num_chunks, end = len(module.plan.chunks), time.monotonic() + 30
    while len(found) == num_chunks and time.monotonic() < end:
        time.sleep(0.01)
    for error in found[:num_chunks]:
        assert isinstance(error, StateError)
        assert "is being built" in str(error)
    assert torch.equal(found[num_chunks], expected)
    module.close()


@pytest.mark.parametrize("policy", ["cpu", "cuda"])
def test_while_the_engine_is_built_another_thread_finds_no_values_that_are_not_there(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """It could read a chunk's memory before that was filled."""
    net = new_net()
    expected = copy.deepcopy(net.state_dict())
    expected["0.0.weight"] = torch.full((WIDTH, WIDTH), 2.0)
    net[0][0].weight = _from_a_file(expected["0.0.weight"])
    set_data, found = chunk_module.set_data, []

    def read_all() -> None:
        for name, parameter in net.named_parameters():
            try:
                found.append(parameter.is_meta or torch.equal(parameter.clone(), expected[name]))
            except StateError as error:
                found.append("is being built" in str(error))

    def read_after(tensors: Any, values: Any) -> None:
        set_data(tensors, values)
        assert _in_thread(read_all) is None

    def read_while_building(builder: Builder, *given: Any) -> Any:
        with monkeypatch.context() as while_building:
            while_building.setattr(chunk_module, "set_data", read_after)
            return build(builder, *given)

    build = Builder.build
    monkeypatch.setattr(Builder, "build", read_while_building)
    plan = make_plan(net, placement_policy=policy, chunk_size=17408)
    module = ElixirModule(net, plan, device="cpu", dtype=torch.float32)
    assert len(found) > 4 * len(plan.chunks)
    assert all(found)
    assert all(torch.equal(value, expected[name]) for name, value in module.state_dict().items())
    module.close()


def _from_a_file(values: torch.Tensor) -> nn.Parameter:
    """A parameter without values yet, which the engine is to read: as `pretrained` makes them."""

    class File:
        def read_run(self, stride: Any, begin: int, target: torch.Tensor, dtype: torch.dtype) -> None:
            target.copy_(values.flatten()[begin : begin + target.numel()])

        def part(self, shape: tuple[int, ...], offsets: tuple[int, ...]) -> File:
            raise NotImplementedError

    parameter = nn.Parameter(torch.empty_like(values, device="meta"))
    set_source(parameter, File())
    return parameter

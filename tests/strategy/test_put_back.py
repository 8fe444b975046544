"""What a training step changes outside of its module is as it was after a dry run, of whatever kind it is, and whatever
threads there are."""

from __future__ import annotations

import array
import collections
import contextvars
import http.server
import io
import itertools
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import DataLoader

from lightning_elixir.plan.profile import MemoryProfile
from lightning_elixir.strategy import ElixirStrategy
from lightning_elixir.strategy import fit_run as fit_run_module
from lightning_elixir.strategy.dry_run import dry_run
from lightning_elixir.strategy.put_back import PutBack
from tests.strategy.models import CHUNK, Net, assert_same_run, fit, make_data

LIMIT = {**CHUNK, "gpu_memory_limit": "96KiB"}


@pytest.fixture
def threads_and_profiles(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[Any]]:
    """Names of the threads beside each dry run, and what came out of each."""
    names: list[str] = []
    found: list[Any] = []

    def noted(*args: Any, **options: Any) -> MemoryProfile:
        names.extend(thread.name for thread in threading.enumerate())
        try:
            found.append(dry_run(*args, **options))
        except Exception as error:
            found.append(error)
            raise
        result = found[-1]
        assert isinstance(result, MemoryProfile)
        return result

    monkeypatch.setattr(fit_run_module, "dry_run", noted)
    return names, found


class Slotted:
    __slots__ = ("later", "n")

    def __init__(self) -> None:
        self.n = 0


class OwnDict(dict[str, int]):
    def __setitem__(self, key: str, value: int) -> None:
        super().__setitem__(key, value + 1000)


def _nonlocal_counter() -> Callable[[], int]:
    n = 0

    def count() -> int:
        nonlocal n
        n += 1
        return n

    return count


def _added(container: Any, value: Any, add: str = "append") -> Any:
    getattr(container, add)(value)
    return container


def _slotted(slotted: Slotted) -> Any:
    slotted.n += 1
    was_new = not hasattr(slotted, "later")
    slotted.later = 1  # type: ignore[attr-defined]
    return slotted.n, was_new


def _one_more(container: Any, key: Any) -> Any:
    container[key] += 1
    return container[key]


def _written(file: Any) -> Any:
    file.write("line")
    return file.getvalue(), file.tell()


def _local(local: Any) -> int:
    local.n = getattr(local, "n", 0) + 1
    return local.n  # type: ignore[no-any-return]


def _queued(waiting: Any) -> Any:
    waiting.put(3)
    return waiting.get(), waiting.qsize()


def _filled(kind: type) -> Any:
    waiting = kind()
    for item in (1, 2):
        waiting.put(item)
    return waiting


# What there is at first, and what a step does to it and sees of it.
KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "deque": (lambda: collections.deque([1, 2], maxlen=2), lambda d: list(_added(d, d[-1] + 1))),
    "counter": (lambda: collections.Counter("aab"), lambda c: sorted(_added(c, "ac", "update").items())),
    "defaultdict": (lambda: collections.defaultdict(int), lambda d: _one_more(d, "a")),
    "ordered": (lambda: collections.OrderedDict(a=1, b=2), lambda d: [d.move_to_end(next(iter(d))), list(d)][1]),
    "own dict": (lambda: OwnDict(n=1), lambda d: [d.update(n=d["n"] + 1), d["n"]][1]),
    "chain map": (lambda: collections.ChainMap({"a": 0}), lambda c: _one_more(c, "a")),
    "user list": (lambda: collections.UserList([1]), lambda u: len(_added(u, 1))),
    "bytearray": (lambda: bytearray(2), lambda b: len(_added(b, 1))),
    "array": (lambda: array.array("d", [0.0]), lambda a: list(_added(a, a[-1] + 1))),
    "slots": (Slotted, _slotted),
    "queue": (lambda: _filled(queue.Queue), _queued),
    "priority queue": (lambda: _filled(queue.PriorityQueue), _queued),
    "simple queue": (lambda: _filled(queue.SimpleQueue), _queued),
    "string file": (io.StringIO, _written),
    "thread local": (threading.local, _local),
    "nonlocal": (_nonlocal_counter, lambda count: count()),
    "RandomState": (lambda: np.random.RandomState(3), lambda r: r.rand()),
    "bit generator": (lambda: np.random.PCG64(3), lambda b: b.random_raw()),
    "numpy generator": (lambda: np.random.default_rng(3), lambda r: r.random()),
    "torch generator": (lambda: torch.Generator().manual_seed(3), lambda g: torch.randint(99, (), generator=g).item()),
    "count": (lambda: itertools.count(3, 2), next),
    "next of count": (lambda: itertools.count().__next__, lambda count: count()),
    "iterator": (lambda: iter([5, 6, 7, 8, 9, 10, 11, 12, 13, 14]), next),
}
things: dict[str, Any] = {}
names = itertools.count()
variable = contextvars.ContextVar("variable", default=0)


class ChangingThings(Net):
    counts: Any = None

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        # Drawing on fake tensors gives no values; the generator moves all the same.
        seen = [change(things[name]) for name, (_, change) in KINDS.items()]
        variable.set(variable.get() + 1)
        os.environ["OF_THE_DRY_RUN"] = str(int(os.environ.get("OF_THE_DRY_RUN", "0")) + 1)
        seen += [next(names), next(type(self).counts), variable.get(), os.environ["OF_THE_DRY_RUN"]]
        self.seen.append(seen)
        return super().training_step(batch, batch_idx)


def test_kinds_that_a_step_changes_are_put_back(
    threads_and_profiles: tuple[list[str], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(strategy: Any) -> Any:
        global names
        monkeypatch.delenv("OF_THE_DRY_RUN", raising=False)
        things.update({name: make() for name, (make, _) in KINDS.items()})
        names = itertools.count()
        ChangingThings.counts = itertools.count()
        variable.set(0)
        before, counts = dict(things), names
        _, model, result = fit(strategy, ChangingThings)
        assert isinstance(model, ChangingThings)
        assert all(things[name] is before[name] for name in things)  # nothing else is in its place
        assert names is counts
        monkeypatch.delenv("OF_THE_DRY_RUN")
        return result, model.seen

    expected, actual = run("auto"), run(ElixirStrategy(**LIMIT))
    _, (profile,) = threads_and_profiles
    assert isinstance(profile, MemoryProfile), profile
    wrong = [name for name, a, b in zip(KINDS, actual[1][0], expected[1][0], strict=False) if a != b]
    assert not wrong
    assert actual[1] == expected[1]
    assert_same_run(actual[0], expected[0])


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_is_put_back(name: str) -> None:
    make, change = KINDS[name]
    expected, holder = change(make()), {"it": make()}
    there = PutBack()
    there.add(holder)
    change(holder["it"])
    there.put_back()
    assert change(holder["it"]) == expected


def test_a_file_that_is_read_is_read_again(tmp_path: Any) -> None:
    (tmp_path / "words").write_text("one\ntwo\n")
    with (tmp_path / "words").open() as file:
        there = PutBack()
        there.add([file])
        file.readline()
        there.put_back()
        assert file.readline() == "one\n"


# What cannot be put back


def _numbers() -> Iterator[int]:
    yield from range(100)


numbers: Iterator[int] = _numbers()
in_a_dict: dict[str, Any] = {}


class TakingNumbers(Net):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.taken: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.taken += [next(numbers), next(in_a_dict["zip"])[0]]
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("make", [TakingNumbers, Net])
def test_generators_are_not_gone_through_twice(
    make: type[Net], threads_and_profiles: tuple[list[str], list[Any]]
) -> None:
    def run(strategy: Any) -> Any:
        global numbers
        numbers, in_a_dict["zip"] = _numbers(), zip(range(100), strict=True)
        _, model, result = fit(strategy, make)
        return result, getattr(model, "taken", None)

    expected, actual = run("auto"), run(ElixirStrategy(**LIMIT))
    assert actual[1] == expected[1]
    assert_same_run(actual[0], expected[0])
    _, (profile,) = threads_and_profiles
    if make is Net:  # whose code knows nothing of them
        assert isinstance(profile, MemoryProfile)
    else:
        assert "cannot be put back" in str(profile)


# Other threads

num_steps = 0
draws = np.random.default_rng(0)


class CountingSteps(Net):
    num_of_class = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        global num_steps
        num_steps += 1
        CountingSteps.num_of_class += 1
        self.seen.append((num_steps, CountingSteps.num_of_class, float(draws.random())))
        return super().training_step(batch, batch_idx)


def _run_counting(strategy: Any, **options: Any) -> Any:
    global num_steps, draws
    num_steps = CountingSteps.num_of_class = 0
    draws = np.random.default_rng(0)
    _, model, result = fit(strategy, CountingSteps, **options)
    assert isinstance(model, CountingSteps)
    return result, model.seen


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_beside_a_data_loader_with_workers(threads_and_profiles: tuple[list[str], list[Any]]) -> None:
    def data() -> Any:
        return DataLoader(make_data().dataset, batch_size=4, num_workers=1, multiprocessing_context="fork")

    expected = _run_counting("auto", train=data)
    actual = _run_counting(ElixirStrategy(**LIMIT), train=data)
    names, (profile,) = threads_and_profiles
    assert "QueueFeederThread" in names
    assert isinstance(profile, MemoryProfile)
    assert actual[1] == expected[1]
    assert_same_run(actual[0], expected[0])


num_seconds = 0
samples: list[int] = []
is_over = threading.Event()


def _sample() -> None:
    global num_seconds
    while not is_over.wait(0.001):
        num_seconds += 1
        samples.append(num_seconds)


def test_beside_a_thread_of_the_users_that_changes_other_things(
    threads_and_profiles: tuple[list[str], list[Any]],
) -> None:
    global num_seconds
    expected = _run_counting("auto")
    is_over.clear()
    samples.clear()
    num_seconds = 0
    thread = threading.Thread(target=_sample, daemon=True)
    thread.start()
    actual = _run_counting(ElixirStrategy(**LIMIT))
    is_over.set()
    thread.join()
    assert samples == list(range(1, num_seconds + 1))  # nothing of it has been undone
    assert isinstance(threads_and_profiles[1][0], MemoryProfile)
    assert actual[1] == expected[1]
    assert_same_run(actual[0], expected[0])


shared = {"n": 0}
masks: dict[str, Any] = {"mask": None}
not_shared = {"n": 0}
feed: collections.deque[int] = collections.deque([1])


class Worker:
    """Waits, and knows of what is shared."""

    def __init__(self, more: Any) -> None:
        self.more = more

    def __call__(self) -> None:
        is_over.wait(10)
        self.change()

    def change(self) -> None:
        shared["n"] += len(masks) + len(feed)
        self.more["n"] += 1


def _in_a_pool(worker: Worker) -> Callable[[], object]:
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(1)
    pool.submit(worker)
    return pool.shutdown


def _begun(thread: threading.Thread) -> Callable[[], object]:
    thread.daemon = True
    thread.start()
    return thread.cancel if isinstance(thread, threading.Timer) else thread.join


class OwnThread(threading.Thread):
    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self.worker = worker

    def run(self) -> None:
        self.worker()


def _raw(worker: Worker) -> Callable[[], object]:
    import _thread

    def call() -> None:
        worker()

    _thread.start_new_thread(call, ())
    time.sleep(0.05)
    return lambda: time.sleep(0.05)


class OwnModule(nn.Module):
    """Has a thread of its own."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self.worker, self.of_training = worker, not_shared

    def work(self) -> None:
        self.call()

    def call(self) -> None:
        self.worker()


def _served(worker: Worker) -> Callable[[], object]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            worker()

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()

    def end() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return end


THREADS: dict[str, Callable[[Worker], Callable[[], object]]] = {
    "target": lambda worker: _begun(threading.Thread(target=worker)),
    "method": lambda worker: _begun(threading.Thread(target=worker.__call__)),
    "argument": lambda worker: _begun(threading.Thread(target=lambda call: call(), args=(worker,))),
    "class": lambda worker: _begun(OwnThread(worker)),
    "timer": lambda worker: _begun(threading.Timer(100, worker)),
    "pool": _in_a_pool,
    "raw": _raw,
    "module": lambda worker: _begun(threading.Thread(target=OwnModule(worker).work)),
    "server": _served,
}


@pytest.mark.parametrize("kind", [None, *THREADS])
def test_what_other_threads_may_do_meanwhile_is_not_undone(kind: str | None) -> None:
    """Only what holds tensors without values is put back of that."""
    is_over.clear()
    shared["n"] = not_shared["n"] = 0
    feed.clear()
    masks["mask"] = None
    more = {"n": 0}
    end = THREADS[kind](Worker(more)) if kind else lambda: None
    with FakeTensorMode():
        fake = torch.zeros(3)
    there = PutBack()
    there._is_shared = True  # as for globals
    there.add([shared, masks, not_shared, feed, more])
    shared["n"] += 1
    not_shared["n"] += 1
    more["n"] += 1
    masks["mask"] = fake
    feed.append(2)
    there.put_back()
    found = shared["n"], more["n"], list(feed)
    is_over.set()
    end()
    assert masks == {"mask": None}
    assert not_shared["n"] == 0
    assert found == ((0, 0, []) if kind is None else (1, 1, [2]))


def test_idle_threads_of_libraries_hold_nothing_back() -> None:
    """Pools that wait, what feeds queues and pins pages, timers of libraries."""
    from concurrent.futures import ThreadPoolExecutor
    from logging.handlers import QueueListener
    from multiprocessing import Queue

    listener, fed = QueueListener(queue.Queue()), Queue()  # type: ignore[var-annotated]
    timer = threading.Timer(100, random.random)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(CountingSteps).result()
        listener.start()
        fed.put(shared)
        timer.start()
        there = PutBack()
        there._is_shared = True
        there.add([shared, not_shared])
        before = dict(shared)
        shared["n"] += 1
        not_shared["n"] += 1
        there.put_back()
        timer.cancel()
        listener.stop()
    fed.get()
    fed.close()
    fed.join_thread()
    assert shared == before
    assert not_shared == {"n": 0}


# What it costs


def test_ten_thousand_attributes_are_noted_at_once() -> None:
    """In milliseconds; the limit is for machines that are busy."""
    model = Net()
    for i in range(10_000):
        setattr(model, f"attribute_{i}", [i] if i % 2 else {i: i})
    taken = []
    for _ in range(3):
        begin = time.perf_counter()
        there = PutBack()
        there.add_model(model)
        there.add_code_of(model)
        there.put_back()
        taken.append(time.perf_counter() - begin)
    assert min(taken) < 0.5

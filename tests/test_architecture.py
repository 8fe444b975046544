"""The import arrows and the "only here" rules of the architecture, read off the syntax trees."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_elixir"
DOCUMENT = PACKAGE / "ARCHITECTURE.md"

# What each room of the package may import of the others; every room may import itself and `errors`.
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "plan": set(),
    "core": set(),
    "kernels": {"core", "plan"},
    "storage": {"core", "plan"},
    "optim": {"core", "plan", "kernels", "storage"},
    "fused": {"core"},
    "patterns": {"core", "fused", "plan"},
    "profiling": {"core", "fused", "plan", "patterns", "storage", "kernels", "optim"},  # the optimizer that is measured
    "checkpoint": {"core", "storage"},
    "runtime": {"core", "plan", "patterns", "storage", "optim"},
    "report": {"plan"},
    "planning": {"core", "fused", "plan", "profiling"},
    "memory_limits": {"core", "plan", "planning", "runtime"},
    "stepping": {"core", "plan", "optim", "runtime"},
    "optimizer": {"core", "plan", "optim", "runtime", "stepping", "wrapper"},
    "wrapper": {"core", "fused", "kernels", "plan", "profiling", "runtime", "storage", "optimizer", "memory_limits"},
    # Lightning itself comes in through `_lightning` alone.
    "_lightning": set(),
    "strategy": {"_lightning", "wrapper", "optimizer", "planning", "report", "runtime", "checkpoint", "profiling"}
    | {"patterns", "optim", "kernels", "storage", "core", "fused", "plan", "memory_limits"},
    "registration": {"_lightning", "strategy"},
    "cli": {
        "_lightning",
        "registration",
        "strategy",
        "planning",
        "patterns",
        "report",
        "checkpoint",
        "profiling",
        "plan",
    },
    "fabric": {"strategy"},
    "__init__": {"fused", "plan", "optim", "profiling", "planning", "wrapper", "strategy", "registration"},
    "__main__": {"cli"},
}

# Where signals are deferred: doors of the engine, and pieces below it that have to be whole (Note: signals). A call
# that has the engine (`Turn.call`), a `DeferringLock` and a `Worker` need no row.
DEFERRED = {
    "checkpoint/writer.py": {"ShardWriter.__init__", "ShardWriter.__exit__"},
    "core/signals.py": {"start"},
    "core/worker.py": {"_Pool._help_to_end", "_Pool._help_to_begin", "_Pool.cancel", "_end"},
    "runtime/backwards.py": {"Backwards.need"},
    "runtime/engine.py": {"Engine.come_to_message", "Engine.prepare_meeting", "Engine.replan"},
    "runtime/forwards.py": {f"Forwards.{name}" for name in ("__init__", "enter_module", "exit_module")},
    "runtime/hooks.py": {"_grad_hook"},
    "runtime/offloading.py": {"Offloader._settle", "Offloader.pack", "Offloader.unpack"},
    "runtime/param_reads.py": {"ParamReads.submit"},
    "runtime/pattern_wire.py": {"PatternWire.meet"},
    "runtime/spans.py": {"Span.__enter__", "Span.__exit__"},
    "runtime/turns.py": {"Held.__enter__", "Held.__exit__"},
    "runtime/user_writes.py": {"UserWrites.resident"},
    "stepping/scheduler.py": {"UpdateScheduler.step_promised"},
    "storage/nvme/offload_file.py": {"OffloadFile.close"},
    "storage/nvme/state_file.py": {"StateFile.close"},
}
# Their inner locks stay taken where a signal comes at the wrong moment.
WRITTEN_IN_PYTHON = {
    "Barrier",
    "Condition",
    "Event",
    "Future",
    "ProcessPoolExecutor",
    "Semaphore",
    "ThreadPoolExecutor",
}

LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric"}
COLLECTIVES = re.compile(
    r"(all_reduce|all_gather|reduce|reduce_scatter|broadcast|scatter|gather|all_to_all)(_\w+)?"
    r"|i?send(_\w+)?|i?recv(_\w+)?|(monitored_)?barrier|batch_isend_irecv"
)
IMPORTS_A_TEST = re.compile(r"^\s*(?:from|import)\s[^\n(]*(?:\([^)]*)?\btest_", re.MULTILINE)
"""What `_uses_tests` finds, and perhaps more."""

Module = tuple[str, ast.Module]


@functools.cache
def _modules(folder: Path = PACKAGE) -> tuple[Module, ...]:
    """Read when a test asks: every process of a parallel run imports this file, and one runs its tests."""
    paths = sorted(folder.rglob("*.py"))
    return tuple((path.relative_to(folder).as_posix(), ast.parse(path.read_text(), str(path))) for path in paths)


@functools.cache
def _nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Of the whole tree, which nearly every rule here looks through."""
    return tuple(ast.walk(tree))


def _room(name: str) -> str:
    return name.partition("/")[0].removesuffix(".py")


def _imported(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Dotted names of all imported modules and members, also of imports inside functions, with their lines."""
    for node in _nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            yield from ((f"{prefix}.{alias.name}", node.lineno) for alias in node.names)


def _dotted(node: ast.AST) -> str:
    """`a.b.c` of an attribute chain that starts at a name; "" of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = _dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return ""


def _found(look: Callable[[ast.Module], Iterator[int]], *allowed: str, modules: Iterable[Module] = ()) -> list[str]:
    """`file:line` of what `look` finds outside the allowed files, and allowed files where it finds nothing.

    Args:
        modules: Those of the package unless given.
    """
    lines = {name: list(look(tree)) for name, tree in modules or _modules()}
    stale = [f"{name} needs no exemption" for name in allowed if not lines.get(name)]
    return [f"{name}:{line}" for name in lines if name not in allowed for line in lines[name]] + stale


# Each `_uses_...` yields the lines where a tree does so.


def _uses_cuda(tree: ast.Module) -> Iterator[int]:
    yield from (line for name, line in _imported(tree) if f"{name}.".startswith("torch.cuda."))
    yield from (n.lineno for n in _nodes(tree) if isinstance(n, ast.Attribute) and _dotted(n) == "torch.cuda")


def _uses_collectives(tree: ast.Module) -> Iterator[int]:
    aliases = {"torch.distributed"}
    for node in _nodes(tree):
        if isinstance(node, ast.Import):
            aliases |= {a.asname for a in node.names if a.name == "torch.distributed" and a.asname}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            aliases |= {a.asname or a.name for a in node.names if a.name == "distributed"}
    for name, line in _imported(tree):
        head, _, member = name.rpartition(".")
        is_collective = head == "torch.distributed" and COLLECTIVES.fullmatch(member)
        if is_collective or name.startswith("torch.distributed._functional_collectives"):
            yield line
    for node in _nodes(tree):
        if isinstance(node, ast.Attribute) and COLLECTIVES.fullmatch(node.attr) and _dotted(node.value) in aliases:
            yield node.lineno


def _uses_assert(tree: ast.Module) -> Iterator[int]:
    yield from (node.lineno for node in _nodes(tree) if isinstance(node, ast.Assert))


def _uses_data_assignment(tree: ast.Module) -> Iterator[int]:
    for node in _nodes(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            for part in ast.walk(target) if target is not None else ():
                if isinstance(part, ast.Attribute) and part.attr == "data" and isinstance(part.ctx, ast.Store):
                    yield part.lineno
        if isinstance(node, ast.Call) and _dotted(node.func) == "setattr" and len(node.args) == 3:
            name = node.args[1]
            if isinstance(name, ast.Constant) and name.value == "data":
                yield node.lineno


def _uses_what_signals_break(tree: ast.Module) -> Iterator[int]:
    for name, line in _imported(tree):
        module, _, member = name.rpartition(".")
        if module in ("threading", "concurrent.futures") and member in WRITTEN_IN_PYTHON:
            yield line
    for node in _nodes(tree):
        if isinstance(node, ast.Attribute) and _dotted(node) in {f"threading.{each}" for each in WRITTEN_IN_PYTHON}:
            yield node.lineno


def _deferring(node: ast.AST, name: str = "") -> Iterator[str]:
    """Functions that call `deferred` or `deferring`, as often as they do."""
    for child in ast.iter_child_nodes(node):
        is_named = isinstance(child, ast.FunctionDef | ast.ClassDef)
        yield from _deferring(child, f"{name}.{child.name}".lstrip(".") if is_named else name)  # type: ignore[attr-defined]
        if isinstance(child, ast.Call) and _dotted(child.func) in {"deferred", "deferring"}:
            yield name


def _uses_lightning(tree: ast.Module) -> Iterator[int]:
    yield from (line for name, line in _imported(tree) if name.partition(".")[0] in LIGHTNING)


def _uses_tests(tree: ast.Module) -> Iterator[int]:
    yield from (line for name, line in _imported(tree) if re.match(r"tests\.(\w+\.)*test_", name))


@pytest.mark.parametrize(
    "room", sorted({_room(path.relative_to(PACKAGE).as_posix()) for path in PACKAGE.rglob("*.py")})
)
def test_imports_follow_the_arrows(room: str) -> None:
    assert room in ARROWS, f"lightning_elixir/{room} is new: give it a row in ARROWS"
    wrong = []
    for name, tree in _modules():
        if _room(name) != room:
            continue
        for imported, line in _imported(tree):
            parts = imported.split(".")
            if parts[0] == "":
                wrong.append(f"{name}:{line} imports relatively: write the full name")
            elif parts[0] == "lightning_elixir" and parts[1] not in ARROWS[room] | {room, "errors", "__version__"}:
                wrong.append(f"{name}:{line} imports {imported}")
    assert wrong == []


def test_every_arrow_is_used() -> None:
    used = {
        (_room(name), imported.split(".")[1])
        for name, tree in _modules()
        for imported, _ in _imported(tree)
        if imported.startswith("lightning_elixir.")
    }
    assert [
        f"{room} -> {other}" for room in ARROWS for other in sorted(ARROWS[room]) if (room, other) not in used
    ] == []


def test_arrows_within_plan() -> None:
    """What is in its folders is used by those alone that stand above them, and through one module each."""
    allowed = {"simulator": set(), "placing": {"simulator.timeline"}}
    wrong = []
    for name, tree in _modules():
        room, *folders, _ = name.split("/") if "/" in name else (name, "")
        if room == "plan":
            own = folders[0] if folders else ""
            for imported, line in _imported(tree):
                folder, _, module = imported.removeprefix("lightning_elixir.plan.").partition(".")
                inside = f"{folder}.{module.partition('.')[0]}"
                if folder in allowed and folder != own and inside not in allowed.get(own, ()):
                    wrong.append(f"{name}:{line} imports {imported}")
    assert wrong == []


def test_plan_imports_the_standard_library_alone() -> None:
    allowed = sys.stdlib_module_names | {"lightning_elixir"}
    modules = [module for module in _modules() if _room(module[0]) in ("plan", "errors")]
    wrong = [f"{n}:{line} {i}" for n, t in modules for i, line in _imported(t) if i.partition(".")[0] not in allowed]
    assert wrong == []


def test_lightning_comes_in_through_one_file() -> None:
    assert _found(_uses_lightning, "_lightning.py") == []


def test_cuda_is_named_in_the_device_file_alone() -> None:
    assert _found(_uses_cuda, "core/device.py") == []


def test_collectives_are_called_in_comm_alone() -> None:
    """But for those of compiled code, which go over a group that has `Comm` issue them."""
    assert _found(_uses_collectives, "core/comm.py", "patterns/peers.py") == []


def test_no_data_is_assigned() -> None:
    """But through `set_data` (`runtime/unreadable.py`)."""
    assert _found(_uses_data_assignment) == []


def test_signals_are_deferred_at_the_doors_alone() -> None:
    found = {name: set(_deferring(tree)) for name, tree in _modules()}
    assert {name: doors for name, doors in found.items() if doors} == DEFERRED


def test_no_thread_waits_for_what_a_signal_leaves_locked() -> None:
    assert _found(_uses_what_signals_break) == []


def test_package_has_no_assert() -> None:
    assert _found(_uses_assert) == []


def test_architecture_document_names_files_that_exist() -> None:
    """A path is relative to the package or to the repository; a bare name is that of a module, in whatever room."""
    named = re.findall(r"`([\w./-]+(?:\.py|\.md|/))`", DOCUMENT.read_text(encoding="utf-8"))
    assert len(named) > 100
    modules = {name.rpartition("/")[2] for name, _ in _modules()}
    roots = (PACKAGE, PACKAGE.parent)
    assert [n for n in named if n not in modules and not any((root / n).exists() for root in roots)] == []


def test_architecture_document_is_short() -> None:
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 250
    assert [line for line in lines if len(line) > 135] == []


def test_every_note_is_in_the_index_with_its_owner() -> None:
    index = DOCUMENT.read_text(encoding="utf-8").partition("## Index of the notes")[2]
    listed = {
        (note, path.rpartition("/")[2])
        for notes, path in re.findall(r"((?:\*[^*`]+\*,? )+)\(`([\w./]+)`\)", index)
        for note in re.findall(r"\*([^*]+)\*", notes)
    }
    told = {
        (note, name.rpartition("/")[2])
        for name, tree in _modules()
        for note in re.findall(r"^\[Note: ([^\]]+)\]", ast.get_docstring(tree) or "", re.MULTILINE)
    }
    assert told
    assert listed == told


def test_tests_import_no_test_module() -> None:
    """What several of them share is in `tests/helpers`, or in a module of their folder that is no test."""
    texts = {path: path.read_text() for path in sorted(Path(__file__).parent.rglob("*.py"))}
    # Parsing every test would take longer than all else here.
    modules = [(str(path), ast.parse(text)) for path, text in texts.items() if IMPORTS_A_TEST.search(text)]
    assert modules  # which have it in the text of a program that they start
    assert _found(_uses_tests, modules=modules) == []


@pytest.mark.parametrize(
    ("look", "source"),
    [
        (_uses_cuda, "import torch\ntorch.cuda.synchronize()"),
        (_uses_cuda, "from torch import cuda\n"),
        (_uses_cuda, "from torch.cuda import Stream\n"),
        (_uses_collectives, "import torch.distributed as dist\ndist.all_reduce(x)"),
        (_uses_collectives, "import torch\ntorch.distributed.all_gather_into_tensor(x, y)"),
        (_uses_collectives, "from torch import distributed\ndistributed.barrier()"),
        (_uses_collectives, "from torch.distributed import broadcast_object_list\n"),
        (_uses_data_assignment, "p.data = x"),
        (_uses_data_assignment, "a, p.data = x"),
        (_uses_data_assignment, "p.data += x"),
        (_uses_data_assignment, "setattr(p, 'data', x)"),
        (_uses_assert, "assert x"),
        (_uses_lightning, "import lightning.pytorch as pl"),
        (_uses_lightning, "from pytorch_lightning import Trainer"),
        (_uses_tests, "from tests.runtime import test_nvme as bodies"),
        (_uses_tests, "from tests.runtime.test_nvme import BF16"),
        (_uses_tests, "def f():\n    import tests.test_cli"),
        (_uses_tests, "from tests.runtime import (\n    models,\n    test_nvme,\n)"),
    ],
)
def test_rule_finds_what_it_is_for(look: Callable[[ast.Module], Iterator[int]], source: str) -> None:
    assert _found(look, modules=[("example.py", ast.parse(source))])
    assert look is not _uses_tests or IMPORTS_A_TEST.search(source)


@pytest.mark.parametrize(
    ("look", "source"),
    [
        (_uses_cuda, "torch.device('cuda'); tensor.is_cuda"),
        (_uses_collectives, "import torch.distributed as dist\ndist.is_initialized(); functools.reduce(f, x)"),
        (_uses_data_assignment, "x = p.data"),
        (_uses_lightning, "from lightning_elixir._lightning import Trainer"),
        (_uses_tests, "from tests.helpers.nvme import BF16"),
    ],
)
def test_rule_leaves_the_rest_alone(look: Callable[[ast.Module], Iterator[int]], source: str) -> None:
    assert _found(look, modules=[("example.py", ast.parse(source))]) == []

"""What README.md and docs/ show works: Python blocks and commands run, options exist, links lead somewhere."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import runpy
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_elixir.cli import main
from lightning_elixir.cli.options import TRAINING_COMMANDS
from lightning_elixir.profiling.measured_hardware import HardwareProbe
from tests.helpers.releases import need_experts_in_one_module
from tests.helpers.tiers import telling

ROOT = Path(__file__).parents[1]
PAGES = {
    path.stem if path.name != "README.md" else "README": path
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
}
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in PAGES.items()}


def _blocks(page: str, language: str) -> list[str]:
    """Code blocks of a page, but for files of examples/ that it includes: tests of their own run those."""
    return re.findall(rf"^```{language}\n(.*?)^```", TEXTS[page], flags=re.DOTALL | re.MULTILINE)


def _anchors(text: str) -> set[str]:
    """Of the headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.filterwarnings(
    "ignore:.*does not have many workers",
    "ignore:.*`isinstance.treespec, LeafSpec.` is depr",  # Lightning 2.6 on torch 2.13
    "ignore:Precision bf16-mixed is not supported by the model summary",
    "ignore:Be aware that when using `ckpt_path`",
)
@pytest.mark.parametrize("page", [page for page in sorted(PAGES) if _blocks(page, "python")])
def test_python_blocks_of_a_page_run_one_after_the_other(page: str) -> None:
    pytest.importorskip("lightning", reason="the pages import lightning, and only pytorch_lightning is installed")
    if any("transformers" in block for block in _blocks(page, "python")):
        pytest.importorskip("transformers")
    torch.set_grad_enabled(True)
    names = {"__name__": "page"}
    for block in _blocks(page, "python"):
        exec(compile(block, str(PAGES[page]), "exec"), names)


def _commands(page: str) -> list[list[str]]:
    """The words of each command that a page shows."""
    script = "".join(_blocks(page, "bash")).replace("\\\n", " ")
    return [shlex.split(line, comments=True) for line in script.splitlines() if line.strip()]


def _is_run(words: list[str]) -> bool:
    """Whether it is a command of ours that ends by itself within seconds."""
    return words[0] == "lightning-elixir" and words[1] not in TRAINING_COMMANDS


@pytest.mark.parametrize("page", [page for page in sorted(PAGES) if _commands(page)])
def test_commands_of_a_page_exist(page: str) -> None:
    for words in _commands(page):
        if words[:2] == ["python3", "dev.py"]:
            assert words[2] in ("docs", "example", "tensornvme", "test")
        else:
            assert words[0] in ("lightning-elixir", "python"), words


# What the commands take for granted: a module of the reader's.
TRAIN_PY = """
import torch
from lightning_elixir._lightning import LightningModule


class MyModule(LightningModule):
    def __init__(self, width=8):
        super().__init__()
        self.model = torch.nn.Linear(width, width)

    def training_step(self, batch):
        return self.model(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def example_batch():
    return torch.randn(2, 4096)
"""


def _save_sharded(folder: str) -> None:
    """A checkpoint of a fit of the module in `TRAIN_PY`."""
    from lightning_elixir import ElixirStrategy
    from lightning_elixir._lightning import Trainer

    names: dict[str, Any] = {"__name__": "train"}
    exec(TRAIN_PY, names)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    strategy = ElixirStrategy(state_dict_type="sharded")
    trainer = Trainer(strategy=strategy, accelerator="cpu", max_steps=1, enable_checkpointing=False, **quiet)
    trainer.fit(names["MyModule"](), DataLoader(torch.randn(2, 8)))
    trainer.save_checkpoint(folder)


def _first_shown() -> dict[str, list[list[str]]]:
    """The commands that are run, by the page that shows them first."""
    shown: dict[str, list[list[str]]] = {}
    seen: list[list[str]] = []
    for page in sorted(PAGES):
        new = [words for words in _commands(page) if _is_run(words) and words not in seen]
        seen += new
        if new:
            shown[page] = new
    return shown


FIRST_SHOWN = _first_shown()


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*`isinstance.treespec, LeafSpec.` is depr")
@pytest.mark.parametrize("page", telling(FIRST_SHOWN, "README"))
def test_commands_of_a_page_run(page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    commands = FIRST_SHOWN[page]
    if any("--model" in words for words in commands):
        pytest.importorskip("transformers")
    if any("--patterns" in words for words in commands):
        need_experts_in_one_module()
    Path("train.py").write_text(TRAIN_PY)
    if any("checkpoints/last.ckpt" in words for words in commands):
        _save_sharded("checkpoints/last.ckpt")
    # How fast this machine is does not matter here.
    quick = partial(HardwareProbe, cache_dir="kept", budget_s=0.1, max_bytes=2**24)
    monkeypatch.setattr("lightning_elixir.cli.bench.HardwareProbe", quick)
    for words in commands:
        assert main(words[1:]) == 0, (words, capsys.readouterr().err)
        written = [words[i + 1] for i, word in enumerate(words) if word in ("-o", "--out", "--html", "--save-plan")]
        assert [name for name in written if not Path(name).exists()] == []
        assert capsys.readouterr().out


def test_options_that_are_shown_exist() -> None:
    from lightning_elixir import ElixirStrategy

    options = set(inspect.signature(ElixirStrategy).parameters)
    rows = TEXTS["README"].partition("| option of `ElixirStrategy`")[2].partition("\n\n")[0].splitlines()[2:]
    shown = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    shown |= set(re.findall(r"^ {6}(\w+):", "".join(_blocks("quick-start", "yaml")), flags=re.MULTILINE))
    assert "placement_policy" in shown
    assert shown <= options


@pytest.mark.parametrize("page", sorted(PAGES))
def test_links_and_files_that_a_page_names_exist(page: str) -> None:
    folder = PAGES[page].parent
    for link, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", TEXTS[page]):
        assert link or anchor
        target = folder / link if link else PAGES[page]
        assert target.exists(), link
        if anchor:
            assert anchor in _anchors(target.read_text(encoding="utf-8")), f"{link}#{anchor}"
    named = re.findall(r"`(examples/[\w./]+\.(?:py|md)|lightning_elixir/ARCHITECTURE.md)`", TEXTS[page])
    assert [name for name in named if not (ROOT / name).exists()] == []
    files = re.findall(r"`(\w[\w.-]+_20\d\d-\d\d-\d\d\.(?:json|md))`", TEXTS[page])
    results = ROOT / "examples" / "benchmarks" / "results"
    assert [name for name in files if not (results / name).exists()] == []


def test_every_page_is_in_the_navigation() -> None:
    settings = (ROOT / ".mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"([\w-]+)\.md$", settings, flags=re.MULTILINE))
    assert listed == set(PAGES) - {"README"}


def test_every_error_class_is_explained() -> None:
    from lightning_elixir import errors

    classes = {
        name for name, value in vars(errors).items() if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    assert "ElixirError" in classes
    assert [name for name in classes if f"`{name}" not in TEXTS["errors"]] == []


def test_everything_that_is_exported_is_in_the_reference() -> None:
    import lightning_elixir

    shown = set(re.findall(r"^::: lightning_elixir\.(\w+)$", TEXTS["api"] + TEXTS["options"], flags=re.MULTILINE))
    other_names = {"__version__", "cuda_memory_profiling"}
    assert shown == set(lightning_elixir.__all__) - other_names


def test_figures_are_what_the_results_say(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["draw_figures.py", "--check"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples" / "benchmarks" / "draw_figures.py"), run_name="__main__")
    assert ended.value.code == 0, f"run examples/benchmarks/draw_figures.py: {capsys.readouterr().out}"


def test_readme_is_short() -> None:
    assert len(TEXTS["README"]) <= 10_000


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed: pip install '.[docs]'")
def test_the_site_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    """Linters build it; here, what it loads."""
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict"]
    command = [*build, "-f", str(ROOT / ".mkdocs.yml"), "-d", str(tmp_path / "site")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert (done.returncode, done.stderr) == (0, "")
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > len(PAGES) - 1
    loads = re.compile(
        r"<(?:script|img|iframe|source)[^>]+src=\"(?:https?:)?//|<link[^>]+rel=\"(?:stylesheet|preconnect)\"[^>]+href=\"https?:"
    )
    assert [page.name for page in pages if loads.search(page.read_text(encoding="utf-8"))] == []


@pytest.mark.full
def test_table_of_what_fits_is_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """Its cheapest row."""
    pytest.importorskip("transformers")
    table = TEXTS["will-it-fit"].partition("## What fits")[2]
    command = next(line for line in table.splitlines() if line.startswith("lightning-elixir plan"))
    options, _, models = command.partition("--fits")
    model = models.split()[0]
    (row,) = [line for line in table.splitlines() if line.startswith(f"| {model} |")]
    assert main([*options.split()[1:], "--fits", model]) == 0
    assert row in capsys.readouterr().out.splitlines()

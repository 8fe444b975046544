"""The commands of README.md are those of dev.py, and the first examples run. What it shows else: test_docs.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=280)


def test_commands_are_those_of_dev_py() -> None:
    commands = re.findall(r"python3 dev.py (\w+)", README)
    assert set(commands) == {"docs", "example", "test"}
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith("python3 dev.py test")


def test_dev_py_knows_its_commands() -> None:
    assert "dev.py example" in _python(str(ROOT / "dev.py"), "--help").stdout
    assert _python(str(ROOT / "dev.py"), "no such command").returncode == 2


@pytest.mark.full
def test_minimal_example_runs() -> None:
    pytest.importorskip("lightning")
    done = _python(str(ROOT / "examples" / "01_minimal.py"))
    assert done.returncode == 0, done.stderr
    checkpoint = torch.load("regression.ckpt", weights_only=True)
    assert checkpoint["state_dict"]["net.0.weight"].shape == (256, 32)


def _train_gpt(*arguments: str) -> tuple[dict[str, list[float]], str]:
    """The JSON report and the output of a short run of the big example."""
    short = ("--steps", "6", "--batch-size", "4", "--seq-len", "64", "--sample-bytes", "8", "--val-batches", "2")
    script = str(ROOT / "examples" / "train_gpt.py")
    done = _python(script, *short, "--accelerator", "cpu", "--json", "report.json", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(Path("report.json").read_text()), done.stdout


@pytest.mark.full
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_gpt_example_has_the_losses_of_plain_lightning(precision: str) -> None:
    plain, _ = _train_gpt("--precision", precision, "--plain")
    tight, output = _train_gpt("--precision", precision, "--policy", "cpu", "--gpu-memory-limit", "4MiB")
    assert len(tight["losses"]) == 6
    # HybridAdam rounds differently from torch's AdamW by a few units in the last place.
    assert tight["losses"] == pytest.approx(plain["losses"], rel=1e-5 if precision == "32-true" else 1e-2)
    assert "chunks fetched " in output
    assert "a sample:\nclass " in output


@pytest.mark.full
def test_gpt_example_shows_chunks_that_come_and_go_and_nothing_else() -> None:
    short = ("--steps", "4", "--batch-size", "4", "--seq-len", "64", "--sample-bytes", "8", "--val-batches", "1")
    done = _python(str(ROOT / "examples" / "train_gpt.py"), "--accelerator", "cpu", *short)
    assert (done.returncode, done.stderr) == (0, "")
    assert "gpu_memory_limit=2MiB" in done.stdout.splitlines()[0]
    assert int(re.search(r"evicted (\d+) times", done.stdout)[1]) > 0  # type: ignore[index]
    assert "bytes moved: " in done.stdout
    assert "Epoch" not in done.stdout


def test_each_command_installs_what_it_needs_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import dev

    asked: list[str] = []

    def installed(extra: str) -> list[str]:
        asked.clear()
        dev.venv_interpreter(extra)
        return [word for word in asked if word.startswith(("torch", "mkdocs", "ruff", str(ROOT)))]

    python = tmp_path / ("Scripts" if os.name == "nt" else "bin") / "python"
    python.parent.mkdir()
    python.touch()
    monkeypatch.setattr(dev, "VENV", tmp_path)
    monkeypatch.setattr(dev, "STAMP", tmp_path / "stamp.json")
    monkeypatch.setattr(dev, "has_gpu", lambda: False)
    monkeypatch.setattr(dev, "make_venv", lambda: None)
    monkeypatch.setattr(dev, "install", lambda command, what: asked.extend(command))
    builders = installed("docs")
    assert [re.split("[^a-z-]", word)[0] for word in builders] == ["mkdocs", "mkdocs-material", "mkdocstrings", "ruff"]
    torch_twice = [dev.TORCH_WITHOUT_GPU] * 2
    assert installed("") == [*torch_twice, f"{ROOT}[docs]"]
    assert installed("docs") == installed("") == []
    assert installed("test") == [*torch_twice, f"{ROOT}[test]"]
    assert installed("docs") == installed("") == installed("test") == []
    (tmp_path / "stamp.json").unlink()
    assert installed("") == [*torch_twice, str(ROOT)]


def test_this_python_builds_the_site_only_with_what_that_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    import dev

    monkeypatch.setattr(dev, "venv_interpreter", lambda extra: f"that of .venv, for {extra}")
    for lacking, chosen in (((), sys.executable), (("material",), "that of .venv, for docs")):
        monkeypatch.setattr(dev, "is_importable", lambda name, lacking=lacking: name not in lacking)
        monkeypatch.setattr(dev, "is_served", lambda *needs: False)  # neither torch nor pytest is needed
        assert dev.interpreter("docs") == chosen


def test_lightnings_bad_releases_are_no_need_served(monkeypatch: pytest.MonkeyPatch) -> None:
    import dev

    requirement = next(line for line in (ROOT / "pyproject.toml").read_text().splitlines() if '"lightning>' in line)
    for version, is_good in (("2.6.1", True), ("2.6.2", False), ("2.6.3", False), ("2.6.4", True), ("2.5.9", False)):
        assert (f"!={version}" in requirement) == (version in ("2.6.2", "2.6.3"))
        monkeypatch.setattr(dev.metadata, "version", lambda _, version=version: version)
        assert dev.is_served("lightning|pytorch-lightning", (2, 6)) == is_good

#!/usr/bin/env python3
"""The project's commands, for a machine that has nothing but Python >= 3.11.

    python3 dev.py example [arguments of examples/train_gpt.py]
    python3 dev.py test                    (linters, and the tests that find nearly everything)
    python3 dev.py test --full             (linters, and all tests; with the package tensornvme, see below)
    python3 dev.py test --gpu              (the tests that need GPUs, many at once, without linters)
    python3 dev.py test [--full] [arguments of pytest]
    python3 dev.py docs                    (builds the documentation's site into build/docs; needs no torch)
    python3 dev.py tensornvme              (compiles and installs the package tensornvme, for its tests)

All make the environment `.venv` when it is missing, bring it up to date when `pyproject.toml` has changed, and
use it otherwise. Where the running Python has everything already (a GPU machine without a network, an environment
of your own), it is used as it is and nothing is installed.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
STAMP = VENV / "made-by-dev.json"

# An open range would pull the CUDA libraries, gigabytes of them, onto a machine that has no GPU; this release has a
# CPU build.
TORCH_WITHOUT_GPU = "torch==2.13.0"
TORCH_WITH_GPU = "torch>=2.11"

# What the running Python must have to be used as it is: for each need, the distributions that serve it, and from which
# version.
RUN_NEEDS = (("torch", (2, 11)), ("lightning|pytorch-lightning", (2, 6)), ("psutil", (5, 9)))
# Releases that intruders have published (PL#21691).
NEVER = {"lightning": ("2.6.2", "2.6.3"), "pytorch-lightning": ("2.6.2", "2.6.3")}
TEST_NEEDS = (*RUN_NEEDS, ("pytest", (8, 2)))
LINTERS = ("ruff", "mypy", "codespell_lib")
SITE_BUILDERS = ("mkdocs", "material", "mkdocstrings_handlers")


def main(arguments: list[str]) -> int:
    if sys.version_info < (3, 11):  # noqa: UP036 - also started by hand, with whatever `python3` is
        return fail(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}; run me with a newer one")
    if arguments[:1] == ["example"]:
        python = interpreter(extra="")
        return run([python, str(ROOT / "examples" / "train_gpt.py"), *arguments[1:]])
    if arguments[:1] == ["test"]:
        if "--gpu" in arguments:
            return test_on_gpus([a for a in arguments[1:] if a != "--gpu"])
        return test(interpreter(extra="test"), arguments[1:])
    if arguments == ["docs"]:
        return docs(interpreter(extra="docs"))
    if arguments == ["tensornvme"]:
        return install_tensornvme(interpreter(extra="test"))
    print(__doc__)
    return 0 if arguments in (["-h"], ["--help"], ["help"]) else 2


def test(python: str, arguments: list[str]) -> int:
    """Lint, then run tests: those of the default tier, or with `--full` all; tests/README.md says which are which."""
    os.chdir(ROOT)
    is_full, chosen = "--full" in arguments, [a for a in arguments if a != "--full"]
    begin_s = time.monotonic()
    unclean = lint(python)
    lint_s = time.monotonic() - begin_s
    variables = {}
    if is_full and sys.platform.startswith("linux"):
        if code := install_tensornvme(python):
            return code
        variables["LIGHTNING_ELIXIR_TEST_TENSORNVME"] = "1"  # its tests are not to be skipped
    # Where there is no GPU, some thousand tests more would be set up to be skipped.
    marks = [*([] if is_full else ["not full"]), *([] if has_gpu() else ["not gpu"])]
    command = [python, "-m", "pytest", *(["-m", " and ".join(marks)] if marks else [])]
    if has_module(python, "xdist") and not has_gpu():
        # A file's tests share what they compute, and the processes of their ranks. One process more than there are
        # cores, since tests of ranks wait as long as they compute.
        command += ["-n", str(num_cores() + 1), "--dist", "loadfile"]
    begin_s = time.monotonic()
    code = run([*command, *(chosen or ["-q", "--durations=15"])], variables)
    print(f"dev.py: {lint_s:.0f} s of linters, {time.monotonic() - begin_s:.0f} s of tests", flush=True)
    return code or (fail(f"lint: {', '.join(unclean)}") if unclean else 0)


def test_on_gpus(chosen: list[str]) -> int:
    """Run the tests marked `gpu`: those of one GPU many at once, then those of several one after another, as programs
    that share two GPUs by turns meet each other seldom, and NCCL waits. Random programs (tests/fuzz) are left out."""
    os.chdir(ROOT)
    if not has_gpu():
        return fail("no GPU is found here")
    python = interpreter(extra="test")
    chosen = chosen or ["-q", "--durations=15", "--ignore", "tests/fuzz"]
    # A GPU does not gain by more processes at once, and each takes some GiB of its memory.
    many = ["-n", str(min(10, num_cores())), "--dist", "load"] if has_module(python, "xdist") else []
    codes = []
    # pytest-benchmark, where it is installed, warns beside xdist, and warnings are errors here.
    many += ["-p", "no:benchmark"]
    for marks, spread in (("gpu and not several_gpus", many), ("several_gpus", [])):
        begin_s = time.monotonic()
        codes.append(run([python, "-m", "pytest", "-m", marks, *spread, *chosen], {"OMP_NUM_THREADS": "4"}))
        print(f"dev.py: {time.monotonic() - begin_s:.0f} s of tests that are {marks}", flush=True)
    none_found = 5
    return next((code for code in codes if code not in (0, none_found)), 0)


def lint(python: str) -> list[str]:
    """Run the linters, as many at once as there are cores; returns those that complained."""
    commands = {
        "mypy": ["mypy"],  # takes longest, so it comes first
        "ruff check": ["ruff", "check", "."],
        "ruff format": ["ruff", "format", "--check", "."],
        "codespell": ["codespell_lib"],
    }
    missing = [name for name in LINTERS if not has_module(python, name)]
    lacking = [name for name in SITE_BUILDERS if not has_module(python, name)]
    unclean = []

    def missed(title: str, names: list[str]) -> None:
        print(f"lint: {title} skipped, {', '.join(names)} not installed here", flush=True)
        if os.environ.get("CI") == "true":
            unclean.append(f"{title} (missing)")

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(num_cores()) as threads:
        under_way = {}
        for title, command in commands.items():
            if command[0] in missing:
                missed(title, [command[0]])
            else:
                under_way[title] = threads.submit(printed, run, [python, "-m", *command])
        if lacking:
            missed("docs", lacking)
        else:
            under_way["docs"] = threads.submit(printed, build_site, python, folder)
        for title, check in under_way.items():
            code, text = check.result()
            print(text, end="", flush=True)
            if code:
                unclean.append(title)
    return unclean


def printed(check: Callable[..., int], *arguments: Any) -> tuple[int, str]:
    """What a check returns, and what it writes to the file that it gets as `output`."""
    with tempfile.TemporaryFile() as file:
        code = check(*arguments, output=file)
        file.seek(0)
        return code, file.read().decode()


# ----------------------------------------------------------------------------------------------------------- docs


def docs(python: str) -> int:
    site = ROOT / "build" / "docs"
    code = build_site(python, str(site))
    if code == 0:
        print(f"dev.py: open {site / 'index.html'}; its search needs a server: python3 -m http.server -d {site}")
    return code


def build_site(python: str, folder: str, output: IO[bytes] | None = None) -> int:
    """Build the site of docs/ into a folder; a broken link or an unknown name is an error. See `run`."""
    os.chdir(ROOT)  # what .mkdocs.yml names is looked for from here
    command = [python, "-m", "mkdocs", "build", "--quiet", "--strict", "-f", str(ROOT / ".mkdocs.yml")]
    # Else Material warns at every start of a version of mkdocs that pyproject.toml excludes.
    return run([*command, "--site-dir", folder], {"NO_MKDOCS_2_WARNING": "1"}, output)


# ---------------------------------------------------------------------------------------------------- environment


def interpreter(extra: str) -> str:
    """Path of a Python that has the package's requirements and those of `extra`; of "docs", these alone."""
    needs = {"test": TEST_NEEDS, "docs": ()}.get(extra, RUN_NEEDS)
    modules: tuple[str, ...] = (*SITE_BUILDERS, "ruff") if extra == "docs" else ()
    if extra == "test" and os.environ.get("CI") == "true":
        modules = (*LINTERS, *SITE_BUILDERS)
    if all(is_served(names, least) for names, least in needs) and all(map(is_importable, modules)):
        return sys.executable
    return venv_interpreter(extra)


def is_served(names: str, least: tuple[int, ...]) -> bool:
    """Whether one of the distributions `a|b` is installed here, at version `least` or newer, and no bad one."""
    for name in names.split("|"):
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        version = tuple(int(part) for part in re.findall(r"\d+", installed)[:2])
        if version >= least and installed not in NEVER.get(name, ()):
            return True
    return False


def is_importable(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def has_module(python: str, name: str) -> bool:
    return subprocess.run([python, "-c", f"import {name}"], stderr=subprocess.DEVNULL, check=False).returncode == 0


def venv_interpreter(extra: str) -> str:
    """Python of `.venv`, made or brought up to date first where that is needed."""
    python = VENV / ("Scripts" if os.name == "nt" else "bin") / "python"
    torch = TORCH_WITH_GPU if has_gpu() else TORCH_WITHOUT_GPU
    project_file = (ROOT / "pyproject.toml").read_text()
    content = [project_file, torch, str(ROOT), sys.version]
    wanted = hashlib.sha256("\n".join(content).encode()).hexdigest()
    stamp = read_stamp()
    extras = sorted({*stamp.get("extras", []), extra})
    if "test" in extras:  # the others are part of it
        extras = ["test"]
    if stamp.get("installed") == wanted and extras == stamp["extras"] and python.exists():
        return str(python)

    # Only what this file made is ever cleared: half installed, or made by another Python.
    is_ours = stamp.get("is_ours", not VENV.exists())
    is_whole = python.exists() and stamp.get("installed") != "" and stamp.get("python", sys.version) == sys.version
    print(f"dev.py: installing into {VENV}; this takes minutes the first time", flush=True)
    if is_ours and not is_whole:
        make_venv()
    write_stamp(is_ours=is_ours, python=sys.version, installed="", extras=extras)
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    if extras == ["docs"]:  # the site is made of the source files, without importing them
        builders = tomllib.loads(project_file)["project"]["optional-dependencies"]["docs"]
        install([*pip, *builders], "installing what builds the documentation")
    else:
        install([*pip, torch], f"installing {torch}")
        project = f"{ROOT}[{','.join(filter(None, extras))}]".removesuffix("[]")
        install([*pip, torch, "--editable", project], "installing lightning_elixir and what it needs")
    write_stamp(is_ours=is_ours, python=sys.version, installed=wanted, extras=extras)
    return str(python)


def make_venv() -> None:
    if not (is_importable("ensurepip") and is_importable("venv")):
        sys.exit(
            fail(
                f"{sys.executable} cannot make an environment: its modules ensurepip and venv are missing. On Debian "
                "and Ubuntu `apt install python3-venv` brings them; or run me with another Python, or with one that "
                f"has {', '.join(names for names, _ in TEST_NEEDS)} installed"
            )
        )
    shutil.rmtree(VENV, ignore_errors=True)
    VENV.mkdir()
    write_stamp(is_ours=True, python=sys.version, installed="", extras=[])  # first, so that an interruption is seen
    install([sys.executable, "-m", "venv", str(VENV)], "making the environment")


def install(command: list[str], what: str) -> None:
    """Run a command, whose output is shown only if it fails."""
    print(f"dev.py: {what} ...", flush=True)
    with tempfile.TemporaryFile() as output:
        if run(command, output=output):
            output.seek(0)
            sys.stderr.write(output.read().decode(errors="replace"))
            sys.exit(fail(f"`{' '.join(command)}` failed (its message is above); run me again to try again"))


def read_stamp() -> dict[str, Any]:
    try:
        stamp = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def write_stamp(**content: object) -> None:
    STAMP.write_text(json.dumps(content))


def num_cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform.startswith("linux") else os.cpu_count() or 1


def has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None or bool(glob.glob("/dev/nvidia[0-9]*"))


# ----------------------------------------------------------------------------------------------------- tensornvme

TENSORNVME = "tensornvme==0.1.0"
TRY_TENSORNVME = """
import tempfile, torch
from lightning_elixir.storage.nvme import open_offload_file
with open_offload_file(tempfile.gettempdir(), [4000], backend="tensornvme") as file:
    file.write(0, torch.ones(1000)).wait()
    target = torch.zeros(1000)
    file.read(0, target).wait()
    raise SystemExit(not bool((target == 1).all()))
"""


def install_tensornvme(python: str) -> int:
    """Compile tensornvme against the torch that is there; says what is missing, if something is."""
    try_it = [python, "-c", TRY_TENSORNVME]
    if has_module(python, "tensornvme") and run(try_it) == 0:
        return 0
    if not sys.platform.startswith("linux"):
        return fail("tensornvme is for Linux only")
    tools = [names for names in ("make", "c++|g++|clang++") if not any(map(shutil.which, names.split("|")))]
    if tools:
        return fail(f"tensornvme needs {' and '.join(tools)} to be compiled; on Debian and Ubuntu: build-essential")
    if missing_headers() and shutil.which("apt-get") and os.geteuid() == 0:
        packages = ["apt-get", "install", "-y", "--no-install-recommends", "liburing-dev", "libaio-dev"]
        if run(packages):  # the list of packages may be old, or missing
            run(["apt-get", "update"])
            run(packages)
    if missing_headers():
        what = "`apt-get install liburing-dev libaio-dev` as root, or what your system calls them"
        return fail(
            f"tensornvme needs {' and '.join(missing_headers())}, which are not here: {what}; then run me again"
        )

    pip = [python, "-m", "pip", "install", "--disable-pip-version-check"]
    environment = {"LIBRARY_PATH": os.path.dirname(static_uring()), "PATH": path_with(python)}
    if os.access("/usr", os.W_OK):
        environment["WITH_ROOT"] = "1"
    with tempfile.TemporaryDirectory() as home:  # whose .bashrc it edits
        # Its build wants the torch that is there, and a wheel from pip's cache may have been built for another.
        build = [*pip, "--no-cache-dir", "--no-build-isolation", "--force-reinstall", "--no-deps", TENSORNVME]
        for command in ([*pip, "-U", "setuptools", "wheel", "packaging", "ninja", "cmake", "click"], build):
            if run(command, {**environment, "HOME": home}):
                return fail(f"`{' '.join(command)}` failed; its message is above")
    if run(try_it):
        return fail(f"{TENSORNVME} was installed and does not work here; the message is above")
    return 0


def missing_headers() -> list[str]:
    """What tensornvme is compiled with and is not on this machine."""
    headers = [name for name in ("liburing.h", "libaio.h") if not os.path.exists(f"/usr/include/{name}")]
    return headers + ([] if static_uring() else ["liburing.a"])


def static_uring() -> str:
    places = ("/usr/lib*/liburing.a", "/usr/lib/*/liburing.a", "/usr/local/lib*/liburing.a")
    return next((path for place in places for path in sorted(glob.glob(place))), "")


def path_with(python: str) -> str:
    """Where programs are found, those of this environment first."""
    return os.pathsep.join([os.path.dirname(python), os.environ.get("PATH", os.defpath)])


# ------------------------------------------------------------------------------------------------------ processes


def run(command: list[str], variables: Mapping[str, str] | None = None, output: IO[bytes] | None = None) -> int:
    """Run a command with this folder's package on its path, and with these variables; returns its exit code.

    Args:
        output: Where what it prints goes; None: to the terminal.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(variables or {})}
    if not has_gpu():
        # Threads that wait give their core away. Spinning, on a machine that has other things to do as well, was
        # seen to turn steps of 0.15 s into steps of 3 s.
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    process = subprocess.Popen(
        command, env=environment, stdout=output, stderr=None if output is None else subprocess.STDOUT
    )
    while True:
        try:
            code = process.wait()
        except KeyboardInterrupt:
            continue  # the command got it too and ends in its own way
        return code if code >= 0 else 128 - code


def fail(message: str) -> int:
    print(f"dev.py: {message}", file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

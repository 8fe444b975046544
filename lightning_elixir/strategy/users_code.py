"""What is the user's own code, and what is Python's or installed."""

from __future__ import annotations

import functools
import sys
import sysconfig
from types import ModuleType

_LIBRARIES = frozenset(
    {"torch", "torchvision", "numpy", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_elixir"}
)
_INSTALLED = ("site-packages", "dist-packages")


def is_library(module_name: str) -> bool:
    """Whether a module is one of those that training rests on."""
    return module_name.partition(".")[0] in _LIBRARIES or module_name == "builtins"


def is_installed(module_name: str) -> bool:
    """Whether a module is one of an installed package."""
    path = getattr(sys.modules.get(module_name), "__file__", None)
    return isinstance(path, str) and any(part in path for part in _INSTALLED)


def is_users_class(kind: type) -> bool:
    """Whether a class is neither Python's own nor installed."""
    return is_users_module(kind.__module__)


def is_users_module(name: str, module: ModuleType | None = None) -> bool:
    """Whether a loaded module is neither Python's own nor installed.

    Args:
        name: Of it.
        module: None: the one of this name.
    """
    if name == "__main__":
        return True
    path = getattr(sys.modules.get(name) if module is None else module, "__file__", None)
    if not isinstance(path, str) or is_library(name) or any(part in path for part in _INSTALLED):
        return False
    return not path.startswith(_folders_of_python())


@functools.cache
def _folders_of_python() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return paths["stdlib"], paths["platstdlib"]

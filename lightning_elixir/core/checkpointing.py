"""The switch by which transformers' models recompute their layers (`gradient_checkpointing_enable`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import nn

_SWITCH = "gradient_checkpointing"
_FUNCTION = "_gradient_checkpointing_func"
_LAYER = "GradientCheckpointingLayer"


def switch_off(root: nn.Module, names: Collection[str]) -> list[nn.Module]:
    """Have blocks of a model, what is in them, and what they are part of, recompute nothing by themselves.

    Args:
        root: The model.
        names: Of its blocks.

    Returns:
        Modules that were switched on, for `switch_on`.
    """
    found: list[nn.Module] = []
    if not names:
        return found
    above = {name.rsplit(".", depth)[0] for name in names for depth in range(1, name.count(".") + 1)} | {""}
    for name, module in root.named_modules():
        is_concerned = name in above or name in names or any(name.startswith(f"{block}.") for block in names)
        if is_concerned and getattr(module, _SWITCH, False) is True:
            setattr(module, _SWITCH, False)
            found.append(module)
    return found


def switch_on(modules: Iterable[nn.Module]) -> None:
    """Undo `switch_off`."""
    for module in modules:
        setattr(module, _SWITCH, True)


def is_switched_on(root: nn.Module) -> bool:
    """Whether any part of a model recomputes its layers by that switch."""
    return any(getattr(module, _SWITCH, False) is True for module in root.modules())


def keeps_what_it_recomputes(module: nn.Module) -> bool:
    """Whether the module's forward runs once more in backward, which keeps all that autograd saves there, parameters
    too, until it has used it: `torch.utils.checkpoint` with `use_reentrant=False` around a layer of transformers."""
    if not any(cls.__name__ == _LAYER for cls in type(module).__mro__) or getattr(module, _SWITCH, False) is not True:
        return False
    return getattr(getattr(module, _FUNCTION, None), "keywords", {}).get("use_reentrant") is False

"""The precision plugin of `Fabric`: casts of what goes into a module and comes out of it, as Fabric's own have them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from typing_extensions import override

from lightning_elixir.strategy.precision import ElixirPrecision, cast_floating, known_precision


class FabricElixirPrecision(ElixirPrecision):
    """`ElixirPrecision` where the training loop is the user's: no hook of a LightningModule runs."""

    @override
    def convert_module(
        self, module: nn.Module, kept: Collection[str] | None = None, ignored: Collection[str] = ()
    ) -> nn.Module:
        # Fabric calls this before it is known which parameters are kept in fp32; the strategy calls it again.
        return module if kept is None else super().convert_module(module, kept, ignored)

    @override
    def convert_input(self, data: Any) -> Any:
        if self.has_autocast:
            return apply_to_collection(data, Tensor, cast_floating, torch.float32)
        return super().convert_input(data)

    @override
    def convert_output(self, data: Any) -> Any:
        if self.compute_dtype is None:
            return data
        return apply_to_collection(data, Tensor, cast_floating, torch.get_default_dtype())

    @override
    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        tensor.backward(*args, **kwargs)

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        return optimizer.step(**kwargs)

    @override
    def unscale_gradients(self, optimizer: Any) -> None:
        optimizer.show_unscaled()


def fabric_precision(plugin: Any, *, autocast: bool) -> FabricElixirPrecision:
    """As `elixir_precision`, for Fabric."""
    if isinstance(plugin, FabricElixirPrecision):
        return plugin
    if isinstance(plugin, ElixirPrecision):
        return FabricElixirPrecision(plugin.precision, autocast=plugin.autocast)
    return FabricElixirPrecision(known_precision(plugin), autocast=autocast)

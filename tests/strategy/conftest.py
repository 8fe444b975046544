"""Lightning's own advice (number of workers, unused GPU...) is no error here; everything else stays one."""

from __future__ import annotations

import pytest

_ADVICE = (
    "ignore:.*does not have many workers",
    "ignore:You defined a `validation_step` but have no `val_dataloader`",
    "ignore:.*GPU available but not used",
    "ignore:.*is smaller than the logging interval",
    "ignore:Checkpoint directory .* exists and is not empty",
    "ignore:.*Trying to infer the `batch_size`",
    "ignore:.*`isinstance.treespec, LeafSpec.` is deprecated",
    "ignore:.*was called without a model",
    "ignore:torch.distributed.nn.functional.all_gather is deprecated",
    "ignore:Using `DistributedSampler` with the dataloaders",
    "ignore:.*is supported for historical reasons",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/strategy" in item.nodeid:
            for advice in reversed(_ADVICE):
                item.add_marker(pytest.mark.filterwarnings(advice))

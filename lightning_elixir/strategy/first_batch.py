"""A batch such as a fit will have, before its loader has begun.

Chunks are cut before the Trainer asks for batches, and how many tokens a step has decides how ranks are to share work.
So the first samples of the dataset make one: without a sampler and without processes of a loader, which go on as if
nothing had been asked. The hook that gives the loader (`train_dataloader`) runs once more for it, and so do those that
change batches. What they and the dataset change is put back.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lightning_elixir._lightning import LightningModule
from lightning_elixir.errors import PlanError
from lightning_elixir.strategy.dry_run import unnoticed
from lightning_elixir.strategy.used_iterators import held_iterators


def likely_batch(module: LightningModule) -> Any:
    """As `training_step` gets one, with tensors on the host.

    Args:
        module: In a fit, whose data are there.

    Raises:
        PlanError: Nothing but the loader itself can tell, or asking would use up samples.
    """
    source = module.trainer.fit_loop._data_source
    kinds = sorted({type(one).__name__ for one in held_iterators(module, source.instance)})
    if kinds:
        raise PlanError(f"what gives batches may use up an iterator ({', '.join(kinds)}), which cannot be put back")
    with unnoticed(module, (source.instance,)):
        batch = _first_samples(source.dataloader())
        batch = module.trainer.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        return module._apply_batch_transfer_handler(batch, torch.device("cpu"), dataloader_idx=0)


def _first_samples(loader: Any) -> Any:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise PlanError("only a DataLoader over a dataset with indices tells what a batch is before it begins")
    dataset: Any = loader.dataset
    if loader.batch_sampler is None:
        return loader.collate_fn(dataset[0])
    if type(loader.batch_sampler) is not BatchSampler:
        raise PlanError("the loader has a batch_sampler of its own, whose batches are not known before it begins")
    indices = list(range(min(loader.batch_sampler.batch_size, len(dataset))))
    many = getattr(dataset, "__getitems__", None)  # as the loader asks
    return loader.collate_fn([dataset[index] for index in indices] if many is None else many(indices))


def begins_with_its_first_batch(loaders: Any) -> bool:
    """Whether one of the loaders makes its iterator by a generator, which does nothing before the first batch."""
    return any(inspect.isgeneratorfunction(getattr(type(loader), "__iter__", None)) for loader in tree_leaves(loaders))

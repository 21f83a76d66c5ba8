"""Owns the data loaders that an engine makes: DeepSpeed's order of the data, dealt to the ranks."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from onefold.errors import ConfigError

WORKERS = 2
"""Processes that load a rank's data unless a number is given, as in DeepSpeed."""


class DeepSpeedDataLoader(DataLoader[Any]):
    """A `DataLoader` over this rank's part of a data set, also read with `next`, as DeepSpeed's."""

    @property
    def data_sampler(self) -> Any:
        """The sampler."""
        return self.sampler

    def __next__(self) -> Any:
        if "_running" not in vars(self):
            raise TypeError("a data loader is read with next() after iter() was called on it")
        return next(vars(self)["_running"])

    def __iter__(self) -> Any:
        vars(self)["_running"] = super().__iter__()
        return vars(self)["_running"]


class RepeatingLoader:
    """Starts a loader again whenever it ends, for as long as batches are asked for."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.data_iter: Iterator[Any] = iter(loader)

    def __iter__(self) -> "RepeatingLoader":
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


def make_loader(
    dataset: Any,
    *,
    batch_size: int,
    rank: int,
    num_ranks: int,
    drop_last: bool,
    is_trained_on: bool,
    pin_memory: bool,
    sampler: "Sampler[Any] | None",
    collate_fn: "Callable[..., Any] | None",
    num_workers: int | None,
) -> DeepSpeedDataLoader:
    """A loader of this rank's part of `dataset`.

    Args:
        batch_size: samples of one batch on one rank.
        is_trained_on: shuffle, with the order of `DistributedSampler`'s seed 0; else in order.
        sampler: another choice of samples; it has to deal them to the ranks itself.
    Raises:
        ConfigError: `dataset` is none.
    """
    if isinstance(dataset, IterableDataset):
        sampler = None  # it deals its samples itself
    elif not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise ConfigError(f"training data are a torch Dataset, not {type(dataset).__name__}")
    elif sampler is None:
        sampler = DistributedSampler(dataset, num_replicas=num_ranks, rank=rank, shuffle=is_trained_on)
    return DeepSpeedDataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        num_workers=WORKERS if num_workers is None else num_workers,
        collate_fn=collate_fn,
        pin_memory=pin_memory and torch.cuda.is_available(),
        drop_last=drop_last,
    )

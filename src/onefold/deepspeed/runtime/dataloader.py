"""DeepSpeed's module `runtime.dataloader`: a loader that begins again."""

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

Batch = TypeVar("Batch")


class RepeatingLoader(Generic[Batch]):
    """Batches of `loader` without end: after the last one it begins again.

    Raises:
        StopIteration: the loader has no batches at all.
    """

    def __init__(self, loader: Iterable[Batch]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        for batch in self.data_iter:
            return batch
        self.data_iter = iter(self.loader)
        return next(self.data_iter)

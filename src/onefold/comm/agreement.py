"""Owns the proof that all ranks were asked for the same thing, and that none goes on alone where one fails.

Each rank describes what it was given, or what is wrong with it, in lines; ranks exchange them once. So a rank that
refuses a model does not leave the others waiting, and ranks whose models or settings differ all raise. Work of many
collectives is `united`: a rank that fails in between tells the others where they meet next.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from onefold.comm.comm import Comm
from onefold.errors import OnefoldError, ShardError, WeightsError

Result = TypeVar("Result")


def together(
    comm: Comm, attempt: Callable[[], Result], kind: type[OnefoldError] = ShardError, did: str = "refused its model"
) -> Result:
    """What `attempt` returns, unless it fails on any rank.

    Raises:
        OnefoldError: the attempt's own, on the rank where it failed; one of `kind` on the others, saying which rank it
            was and what it `did`.
    """
    result: Result | None = None
    problem: OnefoldError | None = None
    try:
        result = attempt()
    except OnefoldError as error:
        problem = error
    stories = comm.exchange_objects(None if problem is None else str(problem))
    if problem is not None:
        raise problem
    failed = next((rank for rank, story in enumerate(stories) if story is not None), None)
    if failed is not None:
        raise kind(f"rank {failed} {did}, so rank {comm.rank} stops too: {stories[failed]}")
    return result  # type: ignore[return-value]


@contextmanager
def united(comm: Comm, what: str, settings: Sequence[object] = ()) -> Iterator[Callable[[], None]]:
    """Inside, every rank calls what this gives at the same points, before a collective; there, and at the end, all
    learn whether any has failed since.

    Args:
        what: what the ranks do, for messages.
        settings: equal on every rank, or all raise.
    Raises:
        WeightsError: on the ranks that did not fail themselves; the one that did raises its own exception.
    """
    is_over = False

    def tell(story: str | None) -> None:
        nonlocal is_over
        for rank, told in enumerate(comm.exchange_objects(story)):
            is_over = is_over or told is not None
            if story is None and told is not None:
                raise WeightsError(f"{what} failed on rank {rank}, so rank {comm.rank} stops too: {told}")

    try:
        for rank, theirs in enumerate(comm.exchange_objects(list(map(str, settings)))):
            for ours, other in zip(map(str, settings), theirs, strict=True):
                if ours != other:
                    is_over = True
                    raise WeightsError(f"{what} was asked for {ours} on rank {comm.rank}, for {other} on rank {rank}")
        yield lambda: tell(None)
    except Exception as error:
        if not is_over:
            tell(str(error) or type(error).__name__)
        raise
    else:
        tell(None)

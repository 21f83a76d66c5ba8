"""Owns how ranks go on together, or not at all: each tells the others once what it brings, and what went wrong."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from onefold.checkpoint.directory import Damaged
from onefold.comm.comm import Comm
from onefold.comm.side_channel import Conversation, Line
from onefold.errors import CheckpointError, OnefoldError

Brought = TypeVar("Brought")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Statement(Generic[Brought]):
    """What one rank tells the others."""

    given: Mapping[str, bool]
    """Which things it was given: each rank reads and writes its part of all of them."""
    brought: Brought | None
    story: str | None
    """What went wrong on it."""
    is_damage: bool
    """Whether that is the fault of the checkpoint it brought."""

    @property
    def may_go_on(self) -> bool:
        """Whether it would go on, with another checkpoint if need be."""
        return self.story is None or self.is_damage


def attempt(work: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """What `work` returns, or else None and what went wrong: the other ranks have to hear of it before it is raised."""
    try:
        return work(), None
    except OnefoldError as error:
        return None, error
    except Exception as error:
        told = CheckpointError(str(error) or repr(error))
        told.__cause__ = error
        return None, told
    except BaseException as error:
        return None, error


def tell(
    comm: Comm, given: Mapping[str, bool], brought: Brought | None, problem: BaseException | None
) -> list[Statement[Brought]]:
    """What every rank tells, by rank; the ranks meet here."""
    story = None if problem is None else str(problem) or repr(problem)
    return comm.exchange_objects(Statement(given, brought, story, isinstance(problem, Damaged)))


def go_on(every: Sequence[Statement[Any]], rank: int, problem: BaseException | None, did: str) -> None:
    """Come back if nothing went wrong on any rank, and all were given the same things.

    Raises:
        CheckpointError: on every rank: its own, or one that says which rank it was; Damaged, if it is that on any.
        BaseException: (on the rank that it comes from) it is no error.
    """
    for what in every[0].given:
        ranks = [at for at, told in enumerate(every) if told.given[what]]
        if 0 < len(ranks) < len(every):
            raise CheckpointError(
                f"{what}= was given on ranks {ranks} of {len(every)} only: give it on all, or on none"
            ) from problem
    damaged = [at for at, told in enumerate(every) if told.is_damage]
    failed = damaged or [at for at, told in enumerate(every) if told.story is not None]
    if problem is not None and (rank in failed or not isinstance(problem, Exception)):
        raise problem
    if failed:
        kind = Damaged if damaged else CheckpointError
        raise kind(f"rank {failed[0]} {did}, so rank {rank} stops too: {every[failed[0]].story}") from problem


def all_or_none(
    comm: Comm, work: Callable[[], tuple[Result, Brought]], given: Mapping[str, bool], did: str
) -> tuple[Result, list[Brought]]:
    """What `work` returns: a result for this rank, and what every rank brings, by rank.

    Raises:
        CheckpointError: see `go_on`.
    """
    found, problem = attempt(work)
    every: list[Statement[Brought]] = tell(comm, given, None if found is None else found[1], problem)
    go_on(every, comm.rank, problem, did)
    return found[0], [told.brought for told in every if told.brought is not None]


@dataclass(frozen=True, slots=True)
class Opening:
    """By what ranks open a conversation; rank 0's counts."""

    line: str
    """The name of the line, if it is still to be made."""
    tag: int


_tags = count()
_lines: WeakKeyDictionary[Any, Line] = WeakKeyDictionary()
"""By the group of the ranks: models over the same ones share it."""


def opening() -> Opening:
    """One that was never used before."""
    return Opening(secrets.token_hex(8), next(_tags))


def conversation(comm: Comm, opened: Opening) -> Conversation:
    """A conversation between the ranks of `comm`, for work beside the loop. Every rank calls it, with rank 0's opening.

    Raises:
        CheckpointError: a rank did not come.
    """
    group = comm.control_group()
    if group is None:
        return Conversation(comm.rank, comm.num_ranks, None, opened.tag)  # nobody else is there
    if group not in _lines:
        _lines[group] = Line(comm.rank, comm.num_ranks, opened.line)
    return _lines[group].open(opened.tag)

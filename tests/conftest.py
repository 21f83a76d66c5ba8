"""Owns the fixtures that tests share. Invariant: no process outlives the session."""

import pytest
from hypothesis import settings

from onefold.testing import RankPool, Workers

# No example has to be found right within a time: on a busy machine any may take long.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
# `--hypothesis-profile=thorough`: five times as many examples where a test scales with the profile.
settings.register_profile("thorough", max_examples=500, deadline=None)


@pytest.fixture(scope="session")
def ranks():
    """`ranks(2).run(fn, *args)` calls `fn(rank, num_ranks, *args)` on 2 real ranks; all tests share the processes.

    Where ranks have to fail each by itself, `ranks(2, grace_s=...)` lets the later ones come to it.
    """
    workers = Workers()
    yield lambda num_ranks, **options: RankPool(num_ranks, workers=workers, **options)
    workers.kill()

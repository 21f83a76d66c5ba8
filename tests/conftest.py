"""Owns the fixtures that tests share. Invariant: no process outlives the session."""

from collections import defaultdict

import pytest
import torch
from hypothesis import settings

from onefold.testing import RankPool, Workers

# No example has to be found right within a time: on a busy machine any may take long.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
# `--hypothesis-profile=thorough`: five times as many examples where a test scales with the profile.
settings.register_profile("thorough", max_examples=500, deadline=None)


@pytest.fixture(scope="session")
def ranks():
    """`ranks(2).run(fn, *args)` calls `fn(rank, num_ranks, *args)` on 2 real ranks; all tests share the processes, on
    GPUs all with as many ranks: processes that share memory keep to each other (`SymmetricPool.num_opened`).

    Where ranks have to fail each by itself, `ranks(2, grace_s=...)` lets the later ones come to it.
    """
    has_gpu = torch.cuda.is_available()
    shared = defaultdict(Workers)
    yield lambda num_ranks, **options: RankPool(num_ranks, workers=shared[num_ranks if has_gpu else None], **options)
    for workers in shared.values():
        workers.kill()

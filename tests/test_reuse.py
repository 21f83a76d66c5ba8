"""Promise: a module may be used any number of times in one forward; each use adds its part of the gradient.

Under reentrant checkpointing each use has a backward of its own inside the one that is running, so a parameter's
gradient is complete before the others have begun.
"""

import contextlib
import copy

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import onefold
from onefold import DynamicLossScale, Precision
from pairs import pairwise
from plans import NAMED_PLANS

PLANS = ("zero_0", "zero_1", "zero_2", "zero_3", "offload", "offload_3")


class Triplet(nn.Module):
    """One encoder for every input; powers of ten tell the uses apart."""

    def __init__(self, reentrant, has_stem):
        super().__init__()
        self.reentrant = reentrant
        self.stem = nn.Linear(4, 4) if has_stem else nn.Identity()
        self.encoder = nn.Linear(4, 4)

    def forward(self, *inputs):
        outputs = [checkpoint(self.encoder, self.stem(x), use_reentrant=self.reentrant) for x in inputs]
        return sum(output.sum() * 10**place for place, output in enumerate(outputs))


def gradients_are_those_of_plain_pytorch(rank, num_ranks, plan, uses, backwards, options):
    reentrant, has_stem, accumulating, precision = options
    torch.manual_seed(0)
    plain = Triplet(reentrant, has_stem)
    model = onefold.shard(copy.deepcopy(plain), NAMED_PLANS[plan], precision=precision)
    inputs = [torch.ones(1, 4, requires_grad=True) for _ in range(uses)]
    for number in range(backwards):
        (plain(*inputs) * 2**number).backward()
        inside = accumulating and number + 1 < backwards
        with onefold.accumulate(model) if inside else contextlib.nullcontext():
            (model(*inputs) * 2**number).backward()
    with onefold.gathered(model):
        for (name, param), (_, expected) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            torch.testing.assert_close(param.grad.float(), expected.grad, rtol=1e-3, atol=0, msg=name)


SCALED = Precision(params=torch.float32, loss_scale=DynamicLossScale(initial=2.0**8))


# How often a module is used, how many backwards there are, and how.
WAYS = {
    "three": (3, 1, (True, False, False, Precision())),
    "four": (4, 1, (True, True, False, Precision())),
    "plain": (4, 1, (False, False, False, Precision())),
    "again": (2, 3, (True, True, False, Precision())),
    "accumulated": (2, 3, (True, True, True, Precision())),
    "three accumulated": (3, 2, (True, False, True, Precision())),
    "scaled": (2, 1, (True, False, False, SCALED)),
    "all": (3, 2, (True, True, True, SCALED)),
}


@pairwise(way=WAYS, plan=PLANS, num_ranks=(1, 2))
def test_every_use_counts(ranks, num_ranks, plan, way):
    ranks(num_ranks).run(gradients_are_those_of_plain_pytorch, plan, *way)

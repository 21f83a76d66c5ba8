"""Promise: however many backward passes come before a step, and whichever are thrown away, each counts once.

Libraries failed here by counting passes once too often or too seldom: that does not crash, it only trains worse.
"""

from functools import partial

import torch
from torch import nn

from models import WIDTH, Stack
from pairs import pairwise
from plans import PLANS
from ranks import Case, squared, train


class TwoHeads(Stack):
    def __init__(self):
        super().__init__(depth=2)
        self.second = nn.Linear(WIDTH, 3)

    def forward(self, x, second=False):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.second(x) if second else self.head(x)


def rows(model, turn, accumulated):
    """One backward per row of the identity; the first ones inside `accumulate`."""
    for index, row in enumerate(torch.eye(4)):
        if index < accumulated:
            with turn.accumulate(model):
                model(row[None]).sum().backward()
        else:
            model(row[None]).sum().backward()


def nested_accumulate(model, turn):
    with turn.accumulate(model):
        squared(model, turn)
        with turn.accumulate(model):
            squared(model, turn)
        squared(model, turn)
    squared(model, turn)


def each_head(model, turn):
    x = turn.randn(3, 4)
    model(x).sum().backward()
    model(x, second=True).pow(2).sum().backward()


def same_graph_twice(model, turn):
    loss = model(turn.randn(3, 4)).pow(2).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def discarded(model, turn):
    """A backward that is thrown away, as after a loss that was not finite."""
    squared(model, turn)
    model.zero_grad()
    squared(model, turn)


def discarded_in_accumulate(model, turn):
    with turn.accumulate(model):
        squared(model, turn)
    model.zero_grad()
    squared(model, turn)


def only_on_even_steps(model, turn):
    if turn.step % 2 == 0:
        squared(model, turn)


def parts_of_the_model(model, turn):
    """The second backward reaches only some of the parameters."""
    with turn.accumulate(model):
        squared(model, turn)
    model(turn.randn(3, 4))
    model.blocks[0].middle.mean().backward()


BACKWARDS = {
    **{f"4, {k} of them in accumulate": Case(model=Stack, work=partial(rows, accumulated=k)) for k in (0, 1, 3)},
    "nested accumulate": Case(model=Stack, work=nested_accumulate),
    "one per head": Case(model=TwoHeads, work=each_head),
    "same graph twice": Case(model=Stack, work=same_graph_twice),
    "second reaches a part": Case(model=Stack, work=parts_of_the_model),
    "one thrown away": Case(model=Stack, work=discarded),
    "one thrown away in accumulate": Case(model=Stack, work=discarded_in_accumulate),
    "two steps per zero_grad": Case(model=Stack, work=squared, steps=4, steps_per_zero=2),
    "no backward in odd steps": Case(model=Stack, work=only_on_even_steps, optimizer="adamw", steps=4),
}


@pairwise(name=list(BACKWARDS), plan=PLANS, num_ranks=(1, 2))
def test_every_backward_counts_once(ranks, name, plan, num_ranks):
    ranks(num_ranks).run(train, BACKWARDS[name], plan)

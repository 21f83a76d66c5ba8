"""Promise: what is written inside `GatheredParameters` without a modifier rank is dropped, as DeepSpeed does.

The log says so once of each parameter, with the way out. Where parameters rest whole, it stays.
"""

import logging

import pytest
import torch

import onefold.deepspeed as deepspeed
from checks import equal
from deepspeed_models import LEVELS, SETTINGS, Net, loss_of, made, values_of
from onefold.deepspeed import zero


class Said(logging.Handler):
    """Collects what Onefold warns of."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())

    def __enter__(self):
        logging.getLogger("onefold").addHandler(self)
        return self

    def __exit__(self, *exception):
        logging.getLogger("onefold").removeHandler(self)


def write_one(weight, rank):
    if rank == 1:
        weight.data[-1, -1] += 1


WRITES = {
    "data": lambda weight, _: weight.data.copy_(weight.data + 1),
    "in place": lambda weight, _: weight.fill_(3),
    "one element on one rank": write_one,
}
PLACES = {"made in parts": None, **{name: LEVELS[name] for name in ("zero2", "zero3", "offload3")}}


def write(rank, num_ranks, place, way):
    """Whether a rank's write is spoken of, whether values stay, and whether the model still trains."""
    model = made(Net, 3)
    config = SETTINGS | {"zero_optimization": PLACES[place] or LEVELS["zero3"]}
    engine = None if PLACES[place] is None else deepspeed.initialize(model=model, config=config)[0]
    before = values_of(model)
    weight = model.blocks[1].up.weight
    with Said() as said:
        for _ in range(2):
            with torch.no_grad(), zero.GatheredParameters(list(model.parameters())):
                assert weight.sum().isfinite()
                WRITES[way](weight, rank)
        values = values_of(model)
    engine = engine or deepspeed.initialize(model=model, config=config)[0]
    engine.backward(loss_of(engine, rank, 0))
    engine.step()
    return said.texts, equal(values, before)


@pytest.mark.parametrize("way", WRITES)
@pytest.mark.parametrize("place", [place for place in PLACES if place != "zero2"])
def test_a_write_that_is_dropped_is_spoken_of_once(ranks, place, way):
    for rank, (texts, is_as_before) in enumerate(ranks(2).run(write, place, way)):
        assert is_as_before
        wrote = rank == 1 or way != "one element on one rank"
        assert len(texts) == wrote
        assert all("up.weight'" in text and "modifier_rank=0" in text for text in texts)


def test_a_write_into_parameters_that_rest_whole_stays_and_is_not_spoken_of(ranks):
    assert ranks(2).run(write, "zero2", "data") == [([], False)] * 2


def fail(rank, num_ranks):
    model = made(Net, 3)
    with Said() as said:
        try:
            with torch.no_grad(), zero.GatheredParameters(model.embed.weight):
                model.embed.weight.zero_()
                raise KeyError("no such weight")
        except KeyError:
            return said.texts


def test_an_error_inside_is_not_talked_over(ranks):
    assert ranks(1).run(fail) == [[]]

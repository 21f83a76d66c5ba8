"""Promise: over long runs offloaded training ends where training on the device ends, and a delayed update converges as
well.

A small GPT learns the demo's text for 1000 steps. The compiled kernel's square roots are not torch's to the last bit
(see test_offload), so those runs are compared where they end; with torch's kernel every loss is the same.

An update that is one step late costs something, and more at a higher learning rate. At the 1e-3 used here, over three
seeds, the delayed run ended 0.8% to 1.2% above the exact one on training text and 0.6% to 0.9% on held-out text: the
bound is 3%. At the demo's own 3e-3 it ended 4% to 13% above, and so did the same delay written in plain PyTorch.
"""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest

from inside import TorchKernel

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "lm"
STEPS, DELAY_AFTER = 1000, 40
SIZES = {"layers": 2, "width": 64, "heads": 2, "context": 32, "global_batch": 8, "lr": 1e-3, "eval_batches": 32}
SAME, DELAYED = 0.01, 0.03
"""How far apart the ends of runs may be, relatively."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run's loss at each step, and on text it never saw once all steps are done."""

    losses: list[float]
    held_out: float | None

    @property
    def end(self) -> float:
        return sum(self.losses[-50:]) / 50


@pytest.fixture(scope="module")
def train():
    """`train(plan, **settings)` trains in this process, on one rank and the CPU; `until` stops before the last step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLE)
        import config
        import data
        import train

        corpus = data.load()
        patch.setattr(data, "load", lambda: corpus)  # reading it takes a second

        def run(plan, until=STEPS, **settings):
            chosen = config.Config(
                plan=config.PlanName(plan), device=config.Device.cpu, steps=STEPS, **SIZES, **settings
            )
            trainer = train.Trainer(chosen)
            losses = [record.loss for record in islice(trainer.steps(), until)]
            trainer.optimizer.zero_grad()
            return Run(losses=losses, held_out=trainer.held_out_loss() if until == STEPS else None)

        yield run


@pytest.fixture(scope="module")
def on_device(train):
    return train("zero_0")


@pytest.fixture(scope="module")
def offloaded(train):
    return train("offload")


@pytest.fixture(scope="module")
def delayed(train):
    return train("offload", delayed=True, delay_after=DELAY_AFTER)


def test_the_runs_learn(on_device):
    assert on_device.end < 0.6 * on_device.losses[0]


def test_offloaded_training_ends_where_training_on_the_device_ends(on_device, offloaded):
    assert offloaded.end == pytest.approx(on_device.end, rel=SAME)
    assert offloaded.held_out == pytest.approx(on_device.held_out, rel=SAME)


@pytest.mark.parametrize("fraction", [None, 0.5])
def test_with_the_same_kernel_every_loss_is_the_same(train, on_device, monkeypatch, fraction):
    monkeypatch.setattr("onefold.optim.optimizer.host_kernel", lambda *_: TorchKernel())
    got = train("offload", until=200, fraction=fraction)
    assert got.losses == on_device.losses[:200]


def test_a_delayed_run_is_exact_until_it_is_delayed(offloaded, delayed):
    # Loss n comes before update n, so after 40 exact updates loss 41 is still exact. Update 41 is late: loss 42 is
    # that of the weights which update 40 left.
    exact = DELAY_AFTER + 1
    assert delayed.losses[:exact] == offloaded.losses[:exact]
    assert delayed.losses[exact] != offloaded.losses[exact]


def test_a_delayed_run_converges_as_well(offloaded, delayed):
    assert delayed.end == pytest.approx(offloaded.end, rel=DELAYED)
    assert delayed.held_out == pytest.approx(offloaded.held_out, rel=DELAYED)

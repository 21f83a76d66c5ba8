"""Promise: an average of the weights is what arithmetic makes it, under every plan, and taking it changes nothing."""

import pytest
import torch

import onefold
from checkpoint_models import PLANS, Run, same_state
from inside import insides
from onefold.errors import OptimizerError
from pairs import pairwise

DECAY = 0.75


def average_by_hand(rank, num_ranks, plan, precision):
    """How far the average over five steps is from one by hand, and whether a run without it ends the same."""
    run, plain = Run(rank, num_ranks, plan, precision), Run(rank, num_ranks, plan, precision)
    ema = onefold.EMA(run.model, DECAY)
    expected = {name: values.double() for name, values in exact(run).items()}
    for _ in range(5):
        run.train(1)
        ema.update()
        for name, values in exact(run).items():
            expected[name] = expected[name] * DECAY + values * (1 - DECAY)
    with ema.applied():
        shown = exact(run)
    plain.train(5)
    off = max(float((shown[name] - expected[name]).abs().max()) for name in expected)
    return off, same_state(run.state(), plain.state())


def exact(run):
    """The exact weights that this rank updates: masters, not their roundings."""
    runtime = run.model._onefold_session.runtime
    runtime.catch_up()
    trained = [pair for unit in runtime.units for pair in unit.trained_flats]
    return {flat.names[0]: part.master.load().double() for flat, part in trained}


@pairwise(plan=(*PLANS, "offload_3"), precision=("fp32", "bf16", "fp16"), num_ranks=(1, 2))
def test_an_average_is_what_arithmetic_makes_it(ranks, plan, precision, num_ranks):
    for off, is_same in ranks(num_ranks).run(average_by_hand, plan, precision):
        assert off < 1e-6
        assert is_same, "taking and looking at the average changed the run"


def applied_weights(rank, num_ranks, plan):
    """Weights that the model shows inside `applied`, before, and after."""
    run = Run(rank, num_ranks, plan)
    ema = onefold.EMA(run.model, 0.5)
    before = run.state()
    run.train(2)
    after = run.state()
    ema.update()
    with ema.applied():
        inside = run.state()
    return before, after, inside, run.state()


@pytest.mark.parametrize("plan", ["zero_0", "zero_3", "offload"])
def test_the_model_shows_the_average_and_then_its_weights_again(ranks, plan):
    for before, after, inside, later in ranks(2).run(applied_weights, plan):
        assert same_state(later, after)
        name = "blocks.0.up.weight"
        assert torch.allclose(inside[0][name], (before[0][name] + after[0][name]) / 2, atol=1e-6)
        assert not torch.equal(inside[0][name], after[0][name])


def saved_and_loaded(rank, num_ranks, directory, plan):
    if plan is None:
        run = Run(rank, num_ranks, "zero_3", "bf16")
        ema = onefold.EMA(run.model, 0.5)
        run.train(3)
        ema.update()
        run.save(directory / "a", ema=ema)
    else:
        run = Run(rank, num_ranks, plan, "bf16", seed=2)
        ema = onefold.EMA(run.model, 0.5)
        run.load(directory / "a", ema=ema)
    with ema.applied():
        return run.state()[0]


def test_an_average_is_saved_and_loaded_at_another_number_of_ranks(ranks, tmp_path):
    saved = ranks(2).run(saved_and_loaded, tmp_path, None)[0]
    for plan in ("zero_0", "offload_3"):
        loaded = ranks(3).run(saved_and_loaded, tmp_path, plan)[0]
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)


@pytest.mark.parametrize("what", ["a step", "an update"])
def test_a_change_inside_is_refused(what):
    run = Run(0, 1, "zero_3")
    ema = onefold.EMA(run.model)
    change = run.optimizer.step if what == "a step" else ema.update
    with ema.applied():
        for _ in range(2):
            with pytest.raises(OptimizerError, match="averages now"):
                change()
    run.train(1)
    ema.update()


@pytest.mark.parametrize("plan", ["zero_2", "offload"])
def test_what_is_written_into_an_average_inside_stays_in_it(plan):
    run = Run(0, 1, plan)
    ema = onefold.EMA(run.model)
    trained = [param for param in run.model.parameters() if param.requires_grad]
    before = run.state()
    with ema.applied(), torch.no_grad():
        for param in trained:
            param.zero_()
    assert same_state(run.state(), before)
    with ema.applied():
        assert not any(param.any() for param in trained)


def test_leaving_that_is_interrupted_leaves_the_average_in_place_and_changes_refused():
    run, is_left = Run(0, 1, "zero_3"), []

    def interrupt():
        if not is_left:
            is_left.append(True)
            raise KeyboardInterrupt

    ema = onefold.EMA(run.model)
    with pytest.raises(KeyboardInterrupt), ema.applied():
        insides(run.model).readers.append(interrupt)
    for change in (run.optimizer.step, ema.update):
        with pytest.raises(OptimizerError, match="averages now"):
            change()


def test_loading_weights_inside_is_refused(tmp_path):
    run = Run(0, 1, "zero_3")
    onefold.export(run.model, tmp_path / "out")
    with onefold.EMA(run.model).applied(), pytest.raises(OptimizerError, match="averages now"):
        onefold.load_pretrained(run.model, tmp_path / "out")
    onefold.load_pretrained(run.model, tmp_path / "out")


@pytest.mark.parametrize("decay", [-0.1, 1, 2.0])
def test_a_decay_outside_is_refused(decay):
    with pytest.raises(OptimizerError, match="decay"):
        onefold.EMA(Run(0, 1, "zero_3").model, decay)

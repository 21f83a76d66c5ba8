"""Promise: what is saved at any number of ranks under any plan loads at any other, and training goes on as if it had
not stopped."""

import pytest

from checkpoint_models import PLANS, Run, distance, same_state

KERNELS = {plan: "native" if plan == "offload" else "torch" for plan in PLANS}
"""What updates run in: results of the two differ in rounding."""


def save_all(rank, num_ranks, directory, precision):
    """Saves a run under every plan after four steps. Returns, by plan, its state then and three steps later."""
    states = {}
    for plan in PLANS:
        run = Run(rank, num_ranks, plan, precision)
        run.train(4)
        run.save(directory / plan)
        saved = run.state()
        run.train(3)
        states[plan] = (saved, run.state())
    return states


def load_all(rank, num_ranks, directory, precision, states, save_ranks):
    """Loads each of those saves under every plan, over whatever the run before left; returns what does not hold."""
    wrong = []
    for plan in PLANS:
        run = Run(rank, num_ranks, plan, precision, seed=2)
        for saved_under, (saved, later) in states.items():
            case = f"{saved_under} as {plan}"
            run.load(directory / saved_under)
            loaded = run.state()
            if not same_state(loaded, saved):
                wrong.append(f"{case}: loaded state differs by {distance(loaded, saved)}, {loaded[1]}, {saved[1]}")
            run.train(3)
            after = run.state()
            same_sums = num_ranks == save_ranks and KERNELS[plan] == KERNELS[saved_under]
            off = distance(after, later)
            if off > (0 if same_sums else TOLERANCE[precision]) or after[1] != later[1]:
                wrong.append(f"{case}: three steps later off by {off}, {after[1]}, {later[1]}")
    return wrong


TOLERANCE = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 2e-2}


@pytest.mark.parametrize(("save_ranks", "precision"), [(1, "fp32"), (2, "bf16"), (4, "fp16")])
def test_a_save_loads_at_any_number_of_ranks_under_any_plan(ranks, tmp_path, save_ranks, precision):
    states = ranks(save_ranks).run(save_all, tmp_path, precision)[0]
    for load_ranks in (1, 2, 3, 4):
        for wrong in ranks(load_ranks).run(load_all, tmp_path, precision, states, save_ranks):
            assert not wrong, f"at {load_ranks} ranks: {wrong}"

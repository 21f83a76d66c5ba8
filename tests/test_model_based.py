"""Promise: whatever a script does with a sharded model, in whatever order, weights and gradients are those of plain
PyTorch.

Random programs are run by both, statement by statement. One that shows a difference is printed, to be pasted. Which
statements there are is in programs.py; with `-m soak`, and more so with `--hypothesis-profile=thorough`, there are many
more programs.
"""

from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from program_runs import Program
from programs import OPERATIONS

LENGTH = 12
PATIENCE_S = 20.0
"""For one program of two ranks, on a busy machine."""


class Walk(RuleBasedStateMachine):
    """One program. Each operation is a rule, so that Hypothesis takes away those that a failure does not need."""

    program = None

    @initialize(data=st.data())
    def start(self, data):
        self.program = Program(chooser(data))

    def teardown(self):
        if self.program is not None:
            self.program.end()


def chooser(data):
    return lambda values: data.draw(st.sampled_from(list(values)))


def add_rule(name, is_possible):
    def operate(self, data):
        self.program.writer.choose = chooser(data)
        self.program.operate(name)

    operate.__name__ = name
    setattr(Walk, name, rule(data=st.data())(precondition(lambda self: is_possible(self.program.writer))(operate)))


for _name, (_, _is_possible) in OPERATIONS.items():
    add_rule(_name, _is_possible)


@pytest.mark.parametrize("programs", [300, pytest.param(100 * settings.default.max_examples, marks=pytest.mark.soak)])
def test_any_program_gives_what_plain_pytorch_gives(programs):
    checks = list(HealthCheck)  # a program draws much, and takes long on a busy machine
    options = {"deadline": None, "suppress_health_check": checks, "report_multiple_bugs": False}
    run_state_machine_as_test(Walk, settings=settings(max_examples=programs, stateful_step_count=LENGTH, **options))


def walk(rank, num_ranks, seeds):
    """Programs written from seeds, so that they are the same on every rank."""
    for seed in seeds:
        random = Random(seed)
        program = Program(random.choice, rank, num_ranks)
        for _ in range(LENGTH):
            program.operate(random.choice(program.writer.possible()))
        program.end()


@pytest.mark.parametrize("programs", [40, pytest.param(20 * settings.default.max_examples, marks=pytest.mark.soak)])
def test_any_program_gives_the_mean_over_two_ranks(ranks, programs):
    ranks(2).run(walk, range(programs), timeout_s=PATIENCE_S * programs)

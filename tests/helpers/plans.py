"""Owns which plans tests run under: every one that `onefold` names, by its name in small letters."""

import pytest

import onefold

NAMED_PLANS = {name.lower(): plan for name, plan in vars(onefold).items() if isinstance(plan, onefold.Plan)}
PLANS = ("zero_0", "zero_1", "zero_2", "zero_3")
"""The plans of the ZeRO paper, whose state rests on the device."""
WHOLE_PLANS = PLANS[:3]
"""Those under which parameters rest whole."""

every_plan = pytest.mark.parametrize("plan", PLANS)
one_and_two_ranks = pytest.mark.parametrize("num_ranks", [1, 2])

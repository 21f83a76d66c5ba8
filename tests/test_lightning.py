"""Promise: the recipe of docs/howto/lightning.md trains under Lightning as Lightning's own DDP does, and resumes."""

from pathlib import Path

import pytest
import torch

from apart import finish, start

SCRIPT = Path(__file__).parent / "helpers" / "lightning_runs.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    directory = tmp_path_factory.mktemp("lightning")
    finish(start(SCRIPT, directory))
    return torch.load(directory / "found.pt", weights_only=True) | {"directory": directory}


def test_it_trains_as_under_lightnings_own_ddp(found):
    ours, theirs = found["onefold"], found["ddp"]
    assert found["is split"]
    assert len(ours["losses"]) == 2 * ours["steps"] == 8
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
    assert ours["validation"] == pytest.approx(theirs["validation"], rel=1e-5)
    assert (ours["rates"], ours["steps"]) == (theirs["rates"], theirs["steps"])


def test_it_saves_and_goes_on_where_it_was(found):
    assert sorted(path.name for path in (found["directory"] / "run").iterdir()) == ["epoch-0", "epoch-1"]
    half = len(found["onefold"]["losses"]) // 2
    assert found["resumed"]["losses"] == found["onefold"]["losses"][half:]
    assert found["resumed"]["validation"] == found["onefold"]["validation"][1:]
    assert found["resumed"]["rates"] == found["onefold"]["rates"]


def test_the_trainers_clipping_is_refused_with_the_way_out(found):
    assert "max_grad_norm" in found["clipped"]

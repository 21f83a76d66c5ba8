"""Promise: after the last step one rank may save, or evaluate, by itself while the others' scripts end."""

import os
import subprocess
import sys

import pytest
import torch

import onefold
from checks import same, tensors
from forks import Forks, launched
from models import Stack, build
from onefold.errors import ReleasedParameterError
from ranks import Turn

SCRIPT = """
import os, sys
import torch
import onefold
from models import Stack, build
from ranks import Turn
rank, fraction, way = int(os.environ["RANK"]), float(sys.argv[1]), sys.argv[2]
model = onefold.shard(build(Stack), onefold.OFFLOAD, fraction=fraction)
optimizer = onefold.SGD(model, lr=0.1)
for step in range(3):
    model(Turn(0, step, sharded=True).randn(3, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if rank == 0 and way == "evaluated":
    with torch.no_grad():
        torch.save(model(torch.ones(3, 4)), sys.argv[3])
elif rank == 0:
    torch.save(model.state_dict(), sys.argv[3])
elif way == "others fail":
    raise SystemExit("no more")
"""


def trained():
    model = build(Stack)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model(Turn(0, step, sharded=False).randn(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.fixture(scope="module")
def forks():
    process = Forks()
    yield process
    process.close()


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize("way", ["saved", "evaluated", "others fail"])
@pytest.mark.parametrize("fraction", ["0", "0.5"])
def test_others_may_end_while_one_rank_reads_weights(forks, script, tmp_path, fraction, way):
    """What they updated on the host is still to be sent then: they send it before they end."""
    ran = forks.run(script, fraction, way, tmp_path / "out.pt", ranks=launched(2))
    assert ran.returncode == (way == "others fail"), ran.stderr
    assert "rank" not in ran.stderr
    check(tmp_path / "out.pt", way)


def test_they_may_under_torchrun(script, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, script, "0.5", "saved", tmp_path / "out.pt"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    check(tmp_path / "out.pt", "saved")


def check(path, way):
    got, want = torch.load(path), trained()
    if way == "evaluated":
        same({"": got}, {"": want(torch.ones(3, 4)).detach()})
    else:
        same(got, tensors(want))


def read_alone(rank, num_ranks):
    """A rank reads weights that are an update behind, of which others have parts; they wait for it elsewhere."""
    model = onefold.shard(build(Stack), onefold.OFFLOAD)
    optimizer = onefold.SGD(model, lr=0.1, delayed=True, delay_after=1)
    for step in range(3):
        model(Turn(rank, step, sharded=True).randn(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        with pytest.raises(ReleasedParameterError, match=r"while delayed updates are under way.*onefold.gathered"):
            model.state_dict()
        with torch.no_grad():
            model(torch.ones(3, 4))
    torch.distributed.barrier()
    with onefold.gathered(model):
        return tensors(model)


def test_one_rank_alone_cannot_wait_for_a_delayed_update(ranks):
    first, second = ranks(2).run(read_alone, timeout_s=100)
    same(first, second, 0)

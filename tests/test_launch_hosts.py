"""Promise: a run on two machines loses one of them, whichever it is, and goes on by itself with the other one from its
latest checkpoint; its losses are those of a run that nothing has interrupted.

The machines are network namespaces on this one (`hosts.py`); ssh between them, their ranks and gloo are real. Where
namespaces are not permitted, these tests say so and are skipped.
"""

import json

import pytest
import torch

from hosts import ssh_command, two_hosts, why_not
from launches import eventually, finish, launcher

STEPS, LOST_AT = 8, 4
# Every rank takes its part of a batch of 8. In the first attempt the last rank stops at a step and the others wait for
# it in a collective, until the machine is lost.
TRAIN = f"""
import json, os, signal, sys
from pathlib import Path
import torch, torch.distributed as dist
import onefold

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
model = onefold.shard(model, onefold.ZERO_3, precision=onefold.Precision(params=torch.float32))
optimizer = onefold.AdamW(model, lr=1e-2)
step = onefold.load("run/latest", model, optimizer)["step"] if list(Path().glob("run/step-*")) else 0
while step < {STEPS}:
    if world == 4 and step == {LOST_AT} and rank == 3:
        open("waiting", "w")
        signal.pause()
    batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss = loss.detach()
    dist.all_reduce(loss)
    step += 1
    if rank == 0:
        restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        with open("losses", "a") as file:
            print(json.dumps([step, world, restarts, loss.item() / world]), file=file)
    onefold.save(f"run/step-{{step}}", model, optimizer, extra={{"step": step}})
dist.destroy_process_group()
"""


def uninterrupted():
    """The losses of the same training, by plain PyTorch in one process."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        loss = model(torch.randn(8, 16, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


@pytest.fixture
def machines(tmp_path):
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with launcher(tmp_path) as launch, two_hosts(tmp_path, launch.environment()) as (one, two):
        yield launch, one, two


def started(launch, one, two, script, *words):
    """`onefold run` on `one`, for ranks of which the first are on `two`."""
    launch.write("hosts", f"{two.address} slots=2\n{one.address} slots=2\n")
    launch.write("train.py", script)
    reached = ("--hostfile", "hosts", "--ssh_command", ssh_command(launch.folder), "--grace", 1)
    return launch.start("run", *reached, *words, "train.py", inside=one.enter)


def test_a_run_goes_on_with_the_machine_that_is_left(machines):
    launch, one, two = machines
    process = started(launch, one, two, TRAIN, "--max_restarts", 1, "--min_nodes", 1)
    eventually((launch.folder / "waiting").exists)
    two.lose()  # rank 0 with the store at which ranks met, in the middle of a collective
    done = finish(process)
    assert done.returncode == 0, done.stderr
    assert f"onefold run: lost {two.address}: " in done.stderr
    assert f"onefold run: going on without {two.address}: " in done.stderr
    told = [json.loads(line) for line in (launch.folder / "losses").read_text().splitlines()]
    worlds = [[step, *((4, 0) if step <= LOST_AT else (2, 1))] for step in range(1, STEPS + 1)]
    assert [line[:3] for line in told] == worlds
    torch.testing.assert_close([line[3] for line in told], list(uninterrupted()), rtol=1e-4, atol=1e-6)
    assert launch.alive() == []


def test_a_machine_that_is_lost_ends_the_run_with_its_name_and_the_way_to_go_on(machines):
    launch, one, two = machines
    script = "import os, time\nopen('up-' + os.environ['RANK'], 'w')\ntime.sleep(1000)\n"
    process = started(launch, one, two, script)
    eventually(lambda: len(list(launch.folder.glob("up-*"))) == 4)
    two.lose()
    done = finish(process)
    assert done.returncode == 255
    lost, way_out = done.stderr.splitlines()[-2:]
    assert lost == f"onefold run: lost {two.address}: ssh failed, or the machine is gone"
    assert f"--exclude {two.address}" in way_out
    assert launch.alive() == []

"""Promise: ranks that any launcher announces train as one model, or a process that cannot join them is refused. A
library that looked for torchrun only trained every process alone, and each overwrote the others' checkpoints."""

import pytest

from forks import Forks, meeting_point

SCRIPT = """
import os, sys
import torch
import onefold
torch.manual_seed(0)
model = onefold.shard(torch.nn.Linear(2, 1, bias=False), onefold.ZERO_2)
optimizer = onefold.SGD(model, lr=1.0)
before = model.weight.detach().clone()
model(torch.full((1, 2), float(os.environ["SAMPLE"]))).sum().backward()
optimizer.step()
open(sys.argv[1], "a").write(f"moved by {(before - model.weight).max().item()}\\n")
"""
ANNOUNCED = {
    # rank, ranks, rank on this machine
    "Kubernetes": ("RANK", "WORLD_SIZE", None),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
}
BATCH = {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}


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


def announced(by, rank, num_ranks=2):
    names = dict(zip(ANNOUNCED[by], map(str, (rank, num_ranks, rank)), strict=True))
    return {name: value for name, value in names.items() if name is not None} | {"SAMPLE": str(1 + 2 * rank)}


@pytest.mark.parametrize("by", list(ANNOUNCED))
def test_announced_ranks_train_one_model(forks, script, by):
    meeting = meeting_point()
    ran = forks.run(script, script.parent / "told", ranks=[announced(by, rank) | meeting for rank in range(2)])
    assert ran.returncode == 0, ran.stderr
    assert (script.parent / "told").read_text() == "moved by 2.0\n" * 2  # the mean of the samples, 1 and 3


@pytest.mark.parametrize("given", [{}, BATCH, {"WORLD_SIZE": "1", "RANK": "0"}], ids=["nobody", "a batch", "one rank"])
def test_a_process_of_its_own_trains_alone(forks, script, given):
    ran = forks.run(script, script.parent / "told", ranks=[given | {"SAMPLE": "3"}])
    assert ran.returncode == 0, ran.stderr
    assert (script.parent / "told").read_text() == "moved by 3.0\n"


@pytest.mark.parametrize("by", list(ANNOUNCED))
def test_one_that_cannot_join_is_refused(forks, script, by):
    ran = forks.run(script, script.parent / "told", ranks=[announced(by, 0)])
    assert ran.returncode == 1
    _, num_ranks, _ = ANNOUNCED[by]
    for word in (num_ranks, "MASTER_ADDR and MASTER_PORT", "train alone", "onefold run", f"unset {num_ranks}"):
        assert word in ran.stderr


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"RANK": ""}, "but not RANK"),
        ({"RANK": "2"}, "RANK=2 of WORLD_SIZE=2"),
        ({"RANK": "first"}, "RANK='first' in the environment is to be a whole number"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' in the environment is to be a whole number"),
    ],
    ids=lambda value: str(value),
)
def test_what_announces_no_rank_is_refused(forks, script, changes, words):
    ran = forks.run(script, script.parent / "told", ranks=[announced("Kubernetes", 0) | meeting_point() | changes])
    assert ran.returncode == 1
    assert "ShardError" in ran.stderr
    assert words in ran.stderr

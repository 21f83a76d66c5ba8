"""Promise: `onefold run` starts a script's ranks as they were asked for, ends them all when one dies or a signal comes,
leaves nothing behind, and its exit code and last lines are those of the rank that failed."""

import json
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from launches import PATIENCE_S, again, eventually, finish, launcher

PAGE = Path(__file__).resolve().parent.parent / "docs/howto/launch.md"
AWKWARD = ["two words", "$HOME $$ ${local_rank} `id`", 'it\'s "quoted"', "new\nline", "--help", "--", "", "a\\b*"]

TELL = """
import json, os, sys
rank = os.environ["RANK"]
told = {"args": sys.argv[1:], "cores": sorted(os.sched_getaffinity(0))}
told |= dict(os.environ)
open(f"told-{rank}.json", "w").write(json.dumps(told))
print(f"here is {rank}")
"""

# A rank that starts a process of its own, which outlives it unless somebody cares.
FAMILY = """
import os, signal, subprocess, sys, time
sys.excepthook = lambda *error: (sys.__excepthook__(*error), sys.stderr.flush(), os._exit(7))
rank = int(os.environ["RANK"])
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_DFL)
subprocess.Popen(["sleep", "1000"], start_new_session=True)
open(f"ready-{rank}", "w")
while not all(os.path.exists(f"ready-{each}") for each in range(2)):
    time.sleep(0.01)
"""
DEATHS = {
    "error": ("if rank == 1: [].lost", 7, "rank 1 exited with code 7"),
    "killed": ("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1 was ended by SIGKILL"),
}


@pytest.fixture
def launch(tmp_path):
    with launcher(tmp_path) as made:
        yield made


def told(launch, rank):
    return json.loads((launch.folder / f"told-{rank}.json").read_text())


def test_every_rank_gets_its_arguments_as_written_and_cores_of_its_own(launch):
    launch.write("tell.py", TELL)
    done = launch.run("--nproc", 2, "tell.py", *AWKWARD, PET_NNODES="7", PET_RDZV_ENDPOINT="nowhere:1")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank 0] here is 0", "[rank 1] here is 1"]
    ranks = [told(launch, rank) for rank in range(2)]
    assert [rank["args"] for rank in ranks] == [AWKWARD, AWKWARD]
    assert [rank["WORLD_SIZE"] for rank in ranks] == ["2", "2"]
    assert [rank["MASTER_ADDR"] for rank in ranks] == ["127.0.0.1"] * 2  # whatever this machine's name leads to
    assert [rank["PYTORCH_ALLOC_CONF"] for rank in ranks] == ["expandable_segments:True"] * 2
    mine, other = (set(rank["cores"]) for rank in ranks)
    allowed = len(mine | other)
    assert mine.isdisjoint(other) if allowed > 1 else mine == other


def test_a_deepspeed_command_line_for_one_machine_works_unchanged(launch):
    launch.write("tell.py", TELL)
    launch.write(".deepspeed_env", "# what ranks need\nFROM_FILE=a = b $X\nFROM_FLAG=no\n")
    launch.write("hosts", "localhost slots=4\n")
    words = ("--hostfile", "hosts", "--include", "localhost:2", "--no_ssh_check", "--launcher", "pdsh", "--module")
    script = ("tell", "--deepspeed", "--deepspeed_config", "ds.json")
    done = launch.run(*words, "--env", "FROM_FLAG=x y", *script, PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:64")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "here is 0\n"  # a single rank has the terminal for itself
    found = told(launch, 0)
    assert found["args"] == ["--local_rank=0", "--deepspeed", "--deepspeed_config", "ds.json"]
    assert (found["FROM_FILE"], found["FROM_FLAG"]) == ("a = b $X", "x y")
    assert "PYTORCH_ALLOC_CONF" not in found, "the user has chosen how the allocator works"


@pytest.mark.parametrize("how", DEATHS)
def test_a_rank_that_dies_ends_all_with_its_code_and_its_words_last(launch, how):
    death, code, said = DEATHS[how]
    launch.write("die.py", f"{FAMILY}{death}\ntime.sleep(1000)\n")
    done = launch.run("--nproc", 2, "die.py")
    assert done.returncode == code, done.stderr
    _, found, last = done.stderr.rpartition(said)
    assert found, done.stderr
    if how == "error":
        assert last.startswith("; its traceback:\nTraceback (most recent call last):\n")
        assert last.endswith("AttributeError: 'list' object has no attribute 'lost'\n")
    assert launch.alive() == []


def test_the_traceback_of_a_single_rank_is_the_last_thing_on_the_screen(launch):
    launch.write("die.py", "import sys\nprint('begun', file=sys.stderr)\n[].lost\n")
    done = launch.run("die.py")
    assert done.returncode == 1
    assert done.stderr.startswith("begun\nTraceback (most recent call last):\n")
    assert done.stderr.endswith("AttributeError: 'list' object has no attribute 'lost'\n")
    assert done.stderr.count("AttributeError") == 1


def test_a_second_signal_ends_ranks_that_do_not_listen_at_once(launch):
    # With a grace longer than this test's patience; what the ranks have started does not listen either.
    deaf = "for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, signal.SIG_IGN)\n"
    launch.write("stay.py", FAMILY.replace("subprocess.Popen", f"{deaf}subprocess.Popen") + "time.sleep(1000)\n")
    process = launch.start("run", "--nproc", 2, "--grace", 900, "stay.py")
    eventually(lambda: len(list(launch.folder.glob("ready-*"))) == 2)
    again(process, signal.SIGINT)
    done = finish(process)
    assert done.returncode == 130
    assert done.stderr.endswith("onefold run: ended by SIGINT\n")
    assert launch.alive() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_lets_ranks_save_within_the_grace_and_leaves_no_orphan(launch, number):
    # Rank 0 saves; rank 1 does not listen, and is killed when the grace is over.
    saves = "lambda *_: (open('saved', 'w'), sys.exit(0))"
    listen = f"signal.signal(signal.{number.name}, {saves} if rank == 0 else signal.SIG_IGN)\n"
    launch.write("stay.py", f"{FAMILY}{listen}open(f'listens-{{rank}}', 'w')\ntime.sleep(1000)\n")
    process = launch.start("run", "--nproc", 2, "--grace", 5, "stay.py")
    eventually(lambda: len(list(launch.folder.glob("listens-*"))) == 2)
    process.send_signal(number)
    done = finish(process)
    assert done.returncode == 128 + number
    assert done.stderr.endswith(f"onefold run: ended by {number.name}\n")
    assert (launch.folder / "saved").exists()
    assert launch.alive() == []


def test_ranks_die_with_a_launcher_that_is_killed(launch):
    launch.write("stay.py", "import os, time\nopen('up-' + os.environ['RANK'], 'w')\ntime.sleep(1000)\n")
    process = launch.start("run", "--nproc", 2, "stay.py")
    eventually(lambda: len(list(launch.folder.glob("up-*"))) == 2)
    process.kill()
    eventually(lambda: launch.alive() == [])


# What the page leaves to its reader. In the first attempt, rank 0 fails in a step.
YOURS = """
import os, signal
from pathlib import Path
import torch
import onefold
torch.distributed.init_process_group("gloo")
rank, device, num_steps, save_every = torch.distributed.get_rank(), "cpu", {num_steps}, 2
model = onefold.shard(torch.nn.Linear(4, 4), onefold.ZERO_3)
optimizer = onefold.SGD(model, lr=0.1)
def train_one_step(step):
    print("step", step)
    assert rank or step != {fails_at} or os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def pages_script(num_steps, fails_at):
    loop, agreement = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    yours = YOURS.format(num_steps=num_steps, fails_at=fails_at)
    return f"{yours}\n{agreement}\n{loop}\ntorch.distributed.destroy_process_group()\n"


def test_the_pages_pattern_goes_on_where_the_last_attempt_got_to(launch):
    launch.write("train.py", pages_script(5, fails_at=3))  # step 2 is saved
    done = launch.run("--nproc", 2, "--max_restarts", 1, "--log_dir", "logs", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""  # each rank has files of its own
    logs = {log.parent.name: log.read_text() for log in launch.folder.glob("logs/run-*/*/attempt_1/*/stdout.log")}
    assert logs == {"0": "step 2\nstep 3\nstep 4\n", "1": "step 2\nstep 3\nstep 4\n"}
    assert sorted(path.name for path in launch.folder.glob("run/*")) == ["step-2", "step-4", "step-5"]


def test_the_pages_pattern_saves_when_it_is_told_to_stop(launch):
    launch.write("train.py", pages_script(10**9, fails_at=-1))
    process = launch.start("run", "--nproc", 2, "--log_dir", "logs", "train.py")
    eventually((launch.folder / "logs").exists)
    eventually(lambda: [log for log in launch.folder.glob("logs/run-*/*/attempt_0/0/stdout.log") if log.read_text()])
    process.send_signal(signal.SIGTERM)
    assert finish(process).returncode == 143
    logs = {log.read_text() for log in launch.folder.glob("logs/run-*/*/attempt_0/*/stdout.log")}
    assert len(logs) == 1  # all ranks stopped after the same step, and saved it
    assert (launch.folder / f"run/step-{int(logs.pop().split()[-1]) + 1}").exists()


def test_a_port_in_use_is_named_with_its_owner_and_the_way_out(launch):
    launch.write("tell.py", TELL)
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        done = launch.run("--nproc", 1, "--master_port", port, "tell.py")
    assert done.returncode == 2
    assert f"port {port} of this machine cannot be used" in done.stderr
    assert "choose another with --master_port, or leave it out" in done.stderr
    assert not (launch.folder / "told-0.json").exists()


def test_a_dry_run_prints_a_torchrun_command_that_works(launch):
    launch.write("tell.py", TELL)
    shown = launch.run("--nproc", 2, "--dry_run", "tell.py", *AWKWARD)
    assert shown.returncode == 0, shown.stderr
    assert not (launch.folder / "told-0.json").exists()
    command = shown.stdout.replace("/tmp/onefold-run", str(launch.folder / "logs"))
    subprocess.run(["sh", "-c", command], cwd=launch.folder, check=True, capture_output=True, timeout=PATIENCE_S)
    assert told(launch, 1)["args"] == AWKWARD

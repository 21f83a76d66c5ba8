"""Promise: what `onefold run` is asked for is understood as DeepSpeed's launcher understands it, or refused in words
that name the option, or the file and the line, and the way out. Nothing is started then."""

import os

import pytest
from typer.testing import CliRunner

from onefold.cli import main
from onefold.errors import LaunchError
from onefold.launch import failure_report
from onefold.launch.cluster import env_forwarding, hostfile
from onefold.launch.cluster.hostfile import Machine
from onefold.system import affinity
from onefold.system.cores import quota

POOL = [Machine("worker-0", (0, 1, 2, 3)), Machine("worker-1", (0, 1))]


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("worker-0 slots=4\nworker-1 slots=2\n", POOL),
        ("# pool\n\n  worker-0\tslots=4 # big\n \nworker-1 slots=2", POOL),
        ("me@10.0.0.1 slots=1\r\n", [Machine("me@10.0.0.1", (0,))]),
        ("\ufeffworker-0 slots=4\nworker-1 slots=2", POOL),  # as Windows' editors begin a file
    ],
)
def test_a_hostfile_is_read_in_its_order(tmp_path, text, hosts):
    path = tmp_path / "hosts"
    path.write_text(text)
    assert hostfile.read_hostfile(path) == hosts


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a slots=1\nworker slots=x\n", "hosts, line 2: expected `NAME slots=NUMBER`"),
        ("worker\n", "hosts, line 1: expected"),
        ("worker slots=1 slots=2\n", "hosts, line 1: expected"),
        ("worker slots=-1\n", "hosts, line 1: expected"),
        ("\n#\na slots=1\nb slots=1\na slots=2\n", "hosts, line 5: a is there twice, first in line 3"),
        ("a slots=100000000000\n", "hosts, line 1: expected"),
        ("a slots=\u0664\n", "hosts, line 1: expected"),
        ("a slots=0\n", "hosts, line 1: a has no slots"),
        ("-oProxyCommand=x slots=1\n", "hosts, line 1: a host's name cannot begin with -"),
        ("# nothing\n", "names no host"),
        ("", "names no host"),
        (b"\xff\xfe", "cannot read the hostfile"),
    ],
)
def test_a_wrong_line_is_named_with_file_and_number(tmp_path, text, said):
    path = tmp_path / "hosts"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(LaunchError) as caught:
        hostfile.read_hostfile(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "slots"),
    [
        ({}, [(0, 1, 2, 3), (0, 1)]),
        ({"include": "worker-1"}, [(), (0, 1)]),
        ({"include": "worker-0@worker-1:1"}, [(0, 1, 2, 3), (1,)]),
        ({"include": "worker-1:1@worker-0:2,0"}, [(0, 2), (1,)]),  # in the order of the hostfile
        ({"include": "worker-0:0@worker-0:3,0"}, [(0, 3), ()]),
        ({"exclude": "worker-1:0"}, [(0, 1, 2, 3), (1,)]),
        ({"exclude": "worker-0"}, [(), (0, 1)]),
        ({"exclude": "worker-1:0,1@worker-0:1"}, [(0, 2, 3), ()]),
        ({"num_nodes": 1}, [(0, 1, 2, 3), ()]),
        ({"num_gpus": 2}, [(0, 1), (0, 1)]),
        ({"num_nodes": 1, "num_gpus": 3}, [(0, 1, 2), ()]),
    ],
    ids=str,
)
def test_hosts_and_slots_are_chosen_as_deepspeed_does(asked, slots):
    wanted = [Machine(host.name, chosen) for host, chosen in zip(POOL, slots, strict=True) if chosen]
    assert hostfile.choose(POOL, **asked) == wanted


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"include": "worker-0", "exclude": "worker-1"}, "--include and --exclude cannot both be given"),
        ({"include": "worker-0", "num_nodes": 1}, "give one kind only"),
        ({"exclude": "worker-0", "num_gpus": 1}, "give one kind only"),
        ({"include": "worker-2"}, "--include worker-2: there is no host worker-2; the hosts are worker-0, worker-1"),
        ({"exclude": "worker-2:0"}, "--exclude worker-2:0: there is no host worker-2"),
        ({"include": "worker-1:0,2"}, "worker-1 has no slot 2; it has slots 0 to 1"),
        ({"include": "worker-0:"}, "expected NAME or NAME:SLOT"),
        ({"include": "worker-0:0-3"}, "expected NAME or NAME:SLOT"),
        ({"include": "worker-0@"}, "expected NAME or NAME:SLOT"),
        ({"exclude": "worker-0@worker-1"}, "leaves nothing to run on"),
        ({"num_nodes": 3}, "--num_nodes 3: there are 2 hosts"),
        ({"num_nodes": 0}, "--num_nodes 0: there are 2 hosts"),
        ({"num_gpus": 3}, "--num_gpus 3: worker-1 has 2 slots"),
    ],
    ids=str,
)
def test_a_choice_that_contradicts_itself_or_the_hosts_is_refused(asked, said):
    with pytest.raises(LaunchError) as caught:
        hostfile.choose(POOL, **asked)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--num_gpus 1 --nproc 1", "give one"),
        ("-m --no_python", "--module and --no_python contradict"),
        ("--slurm --kubernetes", "give one"),
        ("--slurm", "--slurm needs --num_gpus"),
        ("--slurm --num_gpus 2 --hostfile hosts", "--hostfile and --slurm: the scheduler chooses the machines"),
        ("--kubernetes --num_gpus 2", "needs --image"),
        ("--slurm --num_gpus 2 --job_name=a\vb", "--job_name 'a\\x0bb': --slurm needs letters"),
        ("--jobset --num_gpus 2 --image x --job_name Mine", "--job_name 'Mine': --jobset needs a lower-case letter"),
        ("--slurm --num_gpus 2 --sbatch=long", "--sbatch 'long': expected one line"),
        ("--slurm --num_gpus 2 --sbatch=--a\x85#SBATCH", "expected one line"),
        ("--submit", "--submit needs --slurm, --kubernetes or --jobset"),
        ("--no_ssh", "say which with --node_rank"),
        ("--num_nodes 2", "--num_nodes 2 needs a --hostfile"),
        ("--num_nodes 0", "--num_nodes 0: expected at least 1"),
        ("--slurm --num_gpus -2", "--num_gpus -2: expected at least 1"),
        ("--num_nodes 2 --node_rank 0", "--node_rank needs --master_addr and --master_port"),
        (
            "--num-nodes 2 --node-rank 2 --master-addr a --master-port 1",
            "--node_rank 2: with 2 machine(s) it is 0 to 1",
        ),
        ("--num_nodes 2 --min_nodes 3 --node_rank 0 --master_addr a --master_port 1", "--min_nodes 3: there are 2"),
        ("--min_nodes 0", "at least one machine has to be left"),
        (
            "--num_nodes 2 --min_nodes 1 --node_rank 0 --master_addr a --master_port 1",
            "--min_nodes 1 needs --max_restarts",
        ),
        ("--no_bind_cores --bind_core_list 0", "contradict"),
        ("--bind_core_list 0-", "'0-' is no list of cores"),
        ("-m --bind_core_list 100000", "none of the cores [100000] is this process's"),
        ("--include localhost:100000", "localhost has no slot 100000"),
        ("--include worker-0:0", "there is no host worker-0; the hosts are localhost"),
        ("--include localhost:0 --exclude localhost:0", "--include and --exclude cannot both be given"),
        ("--hostfile nowhere", "cannot read the hostfile nowhere"),
        ("--env 1=2", "--env 1=2: expected NAME=VALUE or NAME"),
        ("--env NOT_SET_ANYWHERE", "--env NOT_SET_ANYWHERE: it has no value here"),
        ("--launcher openmpi", "--launcher openmpi: machines are reached by ssh"),
        ("--launcher slurm", "--slurm writes a Slurm job"),
        ("--elastic_training", "--elastic_training: give --max_restarts and --min_nodes"),
        ("--autotuning run", "--autotuning: Onefold has no autotuner"),
        ("--launcher SLURM", "--slurm writes a Slurm job"),
        ("--venv_script activate", "--venv_script: ranks run under the Python"),
        ("--log_level loud", "--log_level loud: expected one of debug, info"),
        ("", "there is no script train.py"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_starts(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    done = CliRunner().invoke(main.app(), ["run", *filter(None, words.split(" ")), "train.py"])
    assert isinstance(done.exception, LaunchError), done.output
    assert said in str(done.exception)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", True),
        ("--num_nodes=-1 --num_gpus=-1 --node_rank=-1 --launcher PDSH --log_level debug", True),
        ("--log_level error", False),
        ("-q", False),
    ],
)
def test_what_deepspeeds_launcher_takes_for_granted_may_be_written_out(words, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "train.py").touch()
    (tmp_path / ".deepspeed_env").write_text("\ufeffA=1\n")
    done = CliRunner().invoke(main.app(), ["run", "--dry_run", *words.split(), "train.py"])
    assert done.exit_code == 0, done.exception
    assert ("1 variables from" in done.stderr) == told
    assert " A=1 " in done.stdout


def test_cards_are_not_chosen_twice(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    done = CliRunner().invoke(main.app(), ["run", "--include", "localhost:0", "train.py"])
    assert "CUDA_VISIBLE_DEVICES=4,5 and --include or --exclude both choose GPUs" in str(done.exception)


def test_every_command_is_found_by_its_file():
    listed = CliRunner().invoke(main.app(), ["--help"])
    assert listed.exit_code == 0
    assert {"run", "report"} <= set(listed.output.split())


@pytest.mark.parametrize(
    ("text", "said"), [("A=1\nB\n", "line 2: expected NAME=VALUE; found 'B'"), ("=x", "line 1"), ("1A=x", "line 1")]
)
def test_a_wrong_line_of_deepspeed_env_is_named(tmp_path, text, said):
    path = tmp_path / ".deepspeed_env"
    path.write_text(text)
    with pytest.raises(LaunchError) as caught:
        env_forwarding.read_env_file(path)
    assert f"{path}, {said}" in str(caught.value)


def test_the_nearer_deepspeed_env_wins(tmp_path):
    home, here = tmp_path / "home", tmp_path / "here"
    for folder in (home, here):
        folder.mkdir()
        (folder / ".deepspeed_env").write_text("export A=1\n")
    assert env_forwarding.env_files(".deepspeed_env", [home, here]) == [
        home / ".deepspeed_env",
        here / ".deepspeed_env",
    ]
    assert env_forwarding.env_files(".deepspeed_env", [here, here]) == [here / ".deepspeed_env"]
    assert env_forwarding.read_env_file(home / ".deepspeed_env") == {"A": "1"}


# --- cores


def machine(root, nodes, siblings):
    """What the system tells of a machine: nodes = lists of threads, siblings = {thread: list}."""
    for number, threads in enumerate(nodes):
        folder = root / f"node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{threads}\n")
    for thread, threads in siblings.items():
        folder = root / f"cpu/cpu{thread}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{threads}\n")
    return root


# Two nodes of four cores with two threads each, numbered as Linux does: second threads come last.
TWO_NODES = (["0-3,8-11", "4-7,12-15"], {thread: f"{thread % 8},{thread % 8 + 8}" for thread in range(16)})


@pytest.mark.parametrize(
    ("allowed", "nodes", "shares"),
    [
        (range(16), [0, 1], [(0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)]),
        (range(16), [1, 0, 1, 0], [(4, 5, 12, 13), (0, 1, 8, 9), (6, 7, 14, 15), (2, 3, 10, 11)]),
        (range(16), [None, None], [(0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)]),
        (range(16), [0, 0, 0, 0, 0], [(0, 8), (1, 2, 9, 10), (3, 11), (4, 5, 12, 13), (6, 7, 14, 15)]),
        ([0, 1, 2, 3, 8], [0, 0], [(0, 1, 8), (2, 3)]),
        ([0, 1], [1, 1], [(0,), (1,)]),  # no core of that node is ours
        ([5], [1, 1], [(5,), (5,)]),
    ],
    ids=str,
)
def test_ranks_share_out_whole_cores_near_their_cards(tmp_path, allowed, nodes, shares):
    cores = affinity.read_cores(allowed, machine(tmp_path, *TWO_NODES))
    assert affinity.share(cores, nodes) == shares


def test_where_the_system_tells_nothing_each_thread_is_a_core(tmp_path):
    assert affinity.share(affinity.read_cores([3, 4], tmp_path), [None]) == [(3, 4)]


@pytest.mark.parametrize(
    ("text", "processors"), [("max 100000", float("inf")), ("150000 100000\n", 1.5), ("", float("inf"))]
)
def test_a_quota_of_processors_is_read(tmp_path, text, processors):
    (tmp_path / "cpu.max").write_text(text)
    assert quota(tmp_path / "cpu.max") == processors
    assert quota(tmp_path / "none") == float("inf")


# --- failures


CHAINED = """step 1
Traceback (most recent call last):
  File "old.py", line 1, in <module>
ValueError: an older one, dealt with
step 2
Traceback (most recent call last):
  File "a.py", line 1, in <module>
KeyError: 'k'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 3, in <module>
RuntimeError: cannot go on
"""
AFTERMATH = """terminate called without an active exception
[W1128 10:14:53.961725738 TCPStore.cpp:138] [c10d] recvValueWithTimeout failed
"""


@pytest.mark.parametrize(
    ("prefix", "after"),
    [("", ""), ("[rank3]: ", ""), ("", AFTERMATH), ("[rank3]: ", AFTERMATH)],
    ids=["python", "torch", "python_then_c", "torch_then_c"],
)
def test_the_last_traceback_comes_with_what_it_chains_to_and_nothing_else(tmp_path, prefix, after):
    path = tmp_path / "stderr.log"
    path.write_text("".join(f"{prefix}{line}" for line in CHAINED.splitlines(keepends=True)) + after)
    said = failure_report.last_words(path)
    assert said.startswith('Traceback (most recent call last):\n  File "a.py", line 1')
    assert said.endswith("RuntimeError: cannot go on")


@pytest.mark.parametrize(
    ("ended", "code", "said"),
    [
        ({2: 3}, 3, "rank 2 exited with code 3"),
        ({2: 255}, 255, "rank 2 exited with code 255"),
        ({0: 137, 1: -15}, 137, "rank 0 exited with code 137"),
        ({2: -11, 1: -15}, 139, "rank 2 was ended by SIGSEGV"),
        ({1: -15, 0: -15}, 143, "rank 1 was ended by SIGTERM"),  # not by torchrun, which ends others later
        ({0: -9, 1: -15}, 137, "rank 0 was ended by SIGKILL (often the system, for want of memory: see `dmesg`)"),
        ({0: -64}, 192, "rank 0 was ended by "),
    ],
    ids=str,
)
def test_a_death_has_the_code_that_a_shell_shows_and_its_cause_in_words(ended, code, said):
    found = failure_report.first({rank: (each, None) for rank, each in ended.items()})
    assert found.code == code
    assert found.text().startswith(f"onefold run: {said}")


def test_the_first_to_fail_is_the_one_whose_last_words_are_oldest(tmp_path):
    ended = {}
    for rank, (code, at) in enumerate([(1, 300), (1, 100), (-15, 50)]):
        path = tmp_path / f"{rank}.log"
        path.write_text(f"Traceback (most recent call last):\nError: {rank}\n")
        os.utime(path, (at, at))
        ended[rank] = (code, path)
    found = failure_report.first(ended)
    assert (found.rank, found.code) == (1, 1)
    assert failure_report.Failure.decode(found.encode()) == found

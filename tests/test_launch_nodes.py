"""Promise: over ssh a run on the machines of a hostfile is as one on this machine: arguments and variables arrive as
written, the first failure is named with its machine, nothing stays anywhere when the launcher ends, and a machine that
cannot take part is named with the reason before anything starts.

The client is the system's ssh, the server a real one on the loopback interface.
"""

import json
import os
import signal
import socket
import subprocess

import pytest

from hosts import this_host
from launches import SOURCE, again, eventually, finish, launcher
from onefold.errors import LaunchError
from onefold.launch import launch as local
from onefold.launch.cluster import env_forwarding, preflight, ssh_run
from onefold.system import network_interfaces

AWKWARD = ["two words", "$HOME $$ ${local_rank} `id`", 'it\'s "quoted"', "new\nline", "--help", "", "a\\b*", "é 😀"]


@pytest.fixture
def launch(tmp_path):
    with launcher(tmp_path) as made:
        yield made


@pytest.fixture
def ssh(launch):
    with this_host(launch.folder, launch.environment()) as command:
        yield command


TELL = """
import json, os, sys
told = {"args": sys.argv[1:]} | {name: os.environ.get(name) for name in ("FROM_FILE", "NCCL_X", "HF_TOKEN", "HERE")}
told |= {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES")}
json.dump(told, open("told.json", "w"))
"""


def test_arguments_and_variables_arrive_as_written(launch, ssh):
    launch.write("tell.py", TELL)
    launch.write("hosts", "127.0.0.1 slots=8  # this one\n")
    launch.write(".deepspeed_env", 'FROM_FILE=it\'s $HOME; "x"\n')
    here = {"NCCL_X": "a\nb", "HF_TOKEN": "secret", "HERE": "stays"}
    words = ("--hostfile", "hosts", "--include", "127.0.0.1:3", "--force_multi", "--ssh_command", ssh)
    done = launch.run(*words, "tell.py", *AWKWARD, **here)
    assert done.returncode == 0, done.stderr
    found = json.loads((launch.folder / "told.json").read_text())
    assert found["args"] == AWKWARD
    assert (found["FROM_FILE"], found["NCCL_X"]) == ('it\'s $HOME; "x"', "a\nb")
    assert found["HF_TOKEN"] is None  # command lines are no secret
    assert (found["RANK"], found["WORLD_SIZE"], found["CUDA_VISIBLE_DEVICES"]) == ("0", "1", "3")


# The second rank fails in the first attempt, when the first one is there.
AGAIN = """
import os, time
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
open(f"up-{rank}-{attempt}", "w").write(os.environ["WORLD_SIZE"])
while not os.path.exists(f"up-0-{attempt}"):
    time.sleep(0.01)
if attempt == "0":
    assert rank == "0", "rank 1 has had enough"
    time.sleep(1000)
"""


def test_ranks_on_all_machines_start_again_after_a_failure_and_know_the_attempt(launch, ssh):
    launch.write("work.py", AGAIN)
    launch.write("hosts", "127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    done = launch.run("--hostfile", "hosts", "--ssh_command", ssh, "--grace", 1, "--max_restarts", 2, "work.py")
    assert done.returncode == 0, done.stderr
    assert "AssertionError: rank 1 has had enough\nonefold run: starting again, 1 of 2\n" in done.stderr
    found = {path.name: path.read_text() for path in launch.folder.glob("up-*")}
    assert found == {f"up-{rank}-{attempt}": "2" for rank in range(2) for attempt in range(2)}


def test_a_rank_that_dies_on_one_machine_ends_all_and_is_named_with_its_machine(launch, ssh):
    work = "import os, time\nassert os.environ['RANK'] == '0', 'rank 1 has had enough'\ntime.sleep(1000)\n"
    launch.write("work.py", work)
    launch.write("hosts", "127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    done = launch.run("--hostfile", "hosts", "--ssh_command", ssh, "--grace", 5, "work.py")
    assert done.returncode == 1, done.stderr
    _, found, last = done.stderr.rpartition("onefold run: rank 1 on 127.0.0.2 exited with code 1; its traceback:\n")
    assert found, done.stderr
    assert last.startswith("Traceback (most recent call last):\n")
    assert last.endswith("AssertionError: rank 1 has had enough\n")
    assert launch.alive() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_nothing_stays_on_a_machine_when_the_launcher_ends(launch, ssh, number):
    saves = "signal.signal(signal.SIGTERM, lambda *_: (open('saved', 'w'), sys.exit(0)))"
    launch.write("stay.py", f"import os, signal, sys, time\n{saves}\nopen('up', 'w')\ntime.sleep(1000)\n")
    launch.write("hosts", "127.0.0.1 slots=1\n")
    words = ("--hostfile", "hosts", "--force_multi", "--ssh_command", ssh)
    process = launch.start("run", *words, "stay.py")
    eventually((launch.folder / "up").exists)
    process.send_signal(number)
    done = finish(process) if number == signal.SIGTERM else None
    eventually(lambda: launch.alive() == [])
    assert (launch.folder / "saved").exists()
    if done is not None:
        assert done.returncode == 128 + number
        assert done.stderr.endswith("onefold run: ended by SIGTERM\n")


def test_a_second_signal_ends_ranks_on_every_machine_at_once(launch, ssh):
    # With a grace longer than this test's patience.
    ignore = "for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, signal.SIG_IGN)"
    launch.write("stay.py", f"import os, signal, time\n{ignore}\nopen('up', 'w')\ntime.sleep(1000)\n")
    launch.write("hosts", "127.0.0.1 slots=1\n")
    process = launch.start(
        "run", "--hostfile", "hosts", "--force_multi", "--ssh_command", ssh, "--grace", 900, "stay.py"
    )
    eventually((launch.folder / "up").exists)
    again(process, signal.SIGINT)
    done = finish(process)
    assert done.returncode == 130
    eventually(lambda: launch.alive() == [])


def test_a_node_that_does_not_hear_its_launcher_ends_its_ranks(launch):
    saves = "signal.signal(signal.SIGTERM, lambda *_: (open('saved', 'w'), sys.exit(0)))"
    launch.write("stay.py", f"import os, signal, sys, time\n{saves}\nopen('up', 'w')\ntime.sleep(1000)\n")
    silent, _ = os.pipe()  # a connection that was cut: it neither speaks nor ends
    process = launch.start("run", "--as_node", "--nproc", 1, "--silence", 3, "stay.py", stdin=silent)
    done = finish(process)
    assert done.returncode == 143
    assert "onefold run: nothing from the launcher for 3 s; ending\n" in done.stderr
    assert (launch.folder / "saved").exists() == (launch.folder / "up").exists()
    assert launch.alive() == []


def test_a_launcher_is_heard_all_the_time(monkeypatch):
    assert ssh_run._BEAT_S * 2 < ssh_run._SILENCE_S
    monkeypatch.setattr(ssh_run, "_BEAT_S", 0.01)
    hears = ["sh", "-c", "read one && read two && test -z $one$two"]
    assert ssh_run.run_attempt({"machine": hears}, grace_s=1) == ssh_run.Ended()


# --- machines that cannot take part

ON_A_SHELL = ["sh", "-c", 'exec sh -c "$2"', "ssh"]
"""Runs what ssh would run over there, here."""


@pytest.fixture
def elsewhere(tmp_path):
    """A folder with two that can come first where Python looks for packages: an Onefold, and what tells of a torch."""
    info = tmp_path / "torch/torch-0.0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 0.0.1\n")
    (tmp_path / "code/onefold").mkdir(parents=True)
    (tmp_path / "code/onefold/__init__.py").write_text("")
    # The Onefold under test may be installed as a finder of its own, before all paths; those of Python are classes.
    alone = "import sys\nsys.meta_path[:] = [finder for finder in sys.meta_path if isinstance(finder, type)]\n"
    (tmp_path / "code/sitecustomize.py").write_text(alone)
    return tmp_path


@pytest.mark.parametrize(
    ("ssh", "path", "reason"),
    [
        pytest.param(ON_A_SHELL, "code", "another Onefold is there, in ", id="another Onefold"),
        pytest.param(ON_A_SHELL, "torch", "torch 0.0.1 there, ", id="another torch"),
        pytest.param(["sh", "-c", "cd nowhere", "ssh"], "", "nowhere (exit code ", id="no folder"),
        pytest.param(["sh", "-c", "exec no-such-python", "ssh"], "", "not found (exit code 127)", id="no Python"),
        pytest.param(["sh", "-c", "exit 3", "ssh"], "", "it said nothing (exit code 3)", id="nothing"),
        pytest.param(["sh", "-c", "echo Welcome", "ssh"], "", "Welcome (exit code 0)", id="a greeting only"),
        pytest.param(["sh", "-c", "exec sleep 1000", "ssh"], "", "no answer within 1 s", id="a hanging ssh"),
    ],
)
def test_a_machine_that_cannot_take_part_is_known_with_the_reason(ssh, path, reason, elsewhere):
    environment = {"PYTHONPATH": f"{elsewhere / path}{os.pathsep}{SOURCE}"}
    answers, reasons = preflight.ask(ssh, {"a": environment}, elsewhere, patience_s=1 if "within" in reason else 60)
    assert answers == {}
    assert reason in reasons["a"]


def test_machines_meet_at_an_address_that_all_know_and_a_free_port(tmp_path):
    greeting = ["sh", "-c", 'echo Welcome; exec sh -c "$2"', "ssh"]
    hosts = {host: {"PYTHONPATH": str(SOURCE)} for host in ("127.0.0.1", "me@127.0.0.2")}
    for _ in range(5):  # another test may take the port meanwhile
        answers, reasons = preflight.ask(greeting, hosts, tmp_path)
        assert reasons == {}
        assert {host: answer.address for host, answer in answers.items()} == {
            "127.0.0.1": "127.0.0.1",
            "me@127.0.0.2": "127.0.0.2",
        }
        if all(is_free(answer.port) for answer in answers.values()):
            return
    pytest.fail("no port that was told is free")


def is_free(port):
    try:
        local.check_port(port)
    except LaunchError:
        return False
    return True


def test_no_run_starts_without_a_machine_and_every_missing_one_is_named(launch, ssh):
    launch.write("tell.py", "open('told', 'w')\n")
    launch.write("hosts", "127.0.0.1 slots=1\n127.0.0.2 slots=1\nnobody.invalid slots=1\n")
    other = ssh.replace("/user ", "/other ")  # a key that is not let in; ssh would ask for a password
    for words, missing in (
        ([ssh], ["nobody.invalid: "]),
        ([other], ["127.0.0.1: ", "127.0.0.2: ", "nobody.invalid: "]),
    ):
        done = launch.run("--hostfile", "hosts", "--ssh_command", *words, "tell.py")
        assert done.returncode == 2
        assert f"{3 - len(missing)} of 3 machines can take part, and 3 must" in done.stderr
        told = [line.strip() for line in done.stderr.splitlines() if line.startswith("  ")]
        assert [line.partition(" ")[0] + " " for line in told] == missing
        assert not (launch.folder / "told").exists()
    with pytest.raises(LaunchError, match="cannot run no-such-ssh"):
        preflight.ask(["no-such-ssh"], {"a": {}}, launch.folder)


def test_a_port_in_use_on_another_machine_ends_the_run_without_another_try(launch, ssh):
    launch.write("tell.py", "open('told', 'w')\n")
    launch.write("hosts", "127.0.0.1 slots=1\n")
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        words = ("--hostfile", "hosts", "--force_multi", "--ssh_command", ssh, "--master_port", port)
        done = launch.run(*words, "--max_restarts", 3, "tell.py")
    assert done.returncode == 2
    assert done.stderr.count(f"port {port} of this machine cannot be used") == 1
    assert done.stderr.endswith("onefold run: 127.0.0.1 ended with code 2; its messages are above\n")
    assert not (launch.folder / "told").exists()


@pytest.mark.parametrize(
    ("command", "port", "words"),
    [
        ("ssh -o ConnectTimeout=1", 7, ["ssh", "-o", "ConnectTimeout=1", "-p", "7", "-o", "BatchMode=yes"]),
        ("/a/ssh", None, ["/a/ssh", "-o", "BatchMode=yes"]),
        ("'my ssh' x", None, ["my ssh", "x"]),
    ],
)
def test_ssh_never_asks_and_what_the_user_says_comes_first(command, port, words):
    found = preflight.ssh_words(command, port)
    assert found[: len(words)] == words
    assert (len(found) > len(words)) == ("BatchMode=yes" in words)


@pytest.mark.parametrize(
    ("address", "interface"), [("127.0.0.1", "lo"), ("127.1.2.3", "lo"), ("::1", "lo"), ("", None)]
)
def test_gloo_uses_the_interface_that_leads_to_the_other_machine(address, interface):
    assert network_interfaces.leading_to(address or "nobody.invalid") == interface


def test_a_name_that_means_this_machine_only_leads_nowhere(monkeypatch):
    # Debian writes `127.0.1.1 NAME` into /etc/hosts.
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, *words, **more: real("127.0.1.1", *words, **more))
    assert network_interfaces.leading_to("worker-0") is None


@pytest.mark.parametrize("word", [*AWKWARD, "~", "!x", "#", "a=b", "*", "\t"])
def test_a_shell_takes_a_remote_line_apart_into_the_same_words(word, tmp_path):
    folder = tmp_path / "a folder's"
    folder.mkdir()
    tell = "import os, sys; print(repr((sys.argv[1:], os.environ['V'], os.getcwd())), end='')"
    line = preflight.remote_line(["python3", "-c", tell, word, "last"], {"V": word}, folder)
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout == repr(([word, "last"], word, str(folder)))


@pytest.mark.parametrize(
    ("name", "goes"),
    [
        *(("NCCL_DEBUG", True), ("PYTHONPATH", True), ("UCX_TLS", True), ("HF_HOME", True), ("OMP_NUM_THREADS", True)),
        *(("HOME", False), ("CUDA_VISIBLE_DEVICES", False), ("HF_TOKEN", False), ("MLFLOW_TRACKING_PASSWORD", False)),
        *(("HF_TOKEN_WRITE", False), ("HF_TOKENS", False), ("ONEFOLD_KEY_2", False), ("MLFLOW_DB_PASS", False)),
        *(("MLFLOW_CREDENTIALS", False), ("HF_APIKEY", False), ("hf_secret", False), ("MLFLOW_AUTH", False)),
        *(("TOKENIZERS_PARALLELISM", True), ("PYTHONPATH_KEYED", True), ("NCCL_COMPASS", True), ("HF_PATH", True)),
        *(("ONEFOLD_RUN", False), ("TORCHELASTIC_RUN_ID", False), ("AWS_SECRET", False), ("BASH_FUNC_x%%", False)),
    ],
)
def test_families_of_variables_are_forwarded_and_secrets_are_not(name, goes):
    assert env_forwarding.forwarded({name: "x"}) == ({name: "x"} if goes else {})


@pytest.mark.parametrize(
    ("value", "goes"),
    [
        ("https://me:secret@tracking.example/path", False),
        ("postgresql+psycopg://u:p%40ss@db/x", False),
        ("see http://a:b@c", False),
        ("https://tracking.example:5000/path?at=me@home", True),
        ("https://me@tracking.example", True),
        ("a:b@c", True),
    ],
)
def test_addresses_with_a_password_are_not_forwarded(value, goes):
    assert env_forwarding.forwarded({"MLFLOW_TRACKING_URI": value}) == ({"MLFLOW_TRACKING_URI": value} if goes else {})

"""Promise: over ssh a run on the machines of a hostfile is as one on this machine: arguments and variables arrive as
written, the first failure is named with its machine, and nothing stays anywhere when the launcher ends.

Where there is an sshd, it is the real one, on the loopback interface; else a script that does what ssh does with a
command line: it hands it to a shell on the other side.
"""

import getpass
import json
import os
import shutil
import signal
import socket
import subprocess

import pytest

from launches import eventually, finish, launcher
from onefold import launch as local
from onefold import nodes, variables
from onefold.errors import LaunchError

AWKWARD = ["two words", "$HOME $$ ${local_rank} `id`", 'it\'s "quoted"', "new\nline", "--help", "", "a\\b*"]
AS_SSH = """#!/bin/sh
# The host, then one line, which a shell there takes apart. The environment is another one.
exec env -i PATH="$PATH" HOME="$HOME" LAUNCH_TEST="$LAUNCH_TEST" sh -c "$2"
"""


@pytest.fixture(scope="session")
def sshd(tmp_path_factory):
    """The command that reaches a real sshd on this machine; None where there is none."""
    program, keygen = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin"), shutil.which("ssh-keygen")
    if program is None or keygen is None or shutil.which("ssh") is None:
        yield None
        return
    folder = tmp_path_factory.mktemp("sshd")
    for key in ("host", "user"):
        subprocess.run([keygen, "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    shutil.copy(folder / "user.pub", folder / "authorized")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = (f"Port={port}", "ListenAddress=127.0.0.1", f"HostKey={folder}/host", f"PidFile={folder}/pid")
    more = (f"AuthorizedKeysFile={folder}/authorized", "StrictModes=no", "UsePAM=no", "PermitRootLogin=yes")
    flags = [word for setting in (*settings, *more) for word in ("-o", setting)]
    server = subprocess.Popen([program, "-D", "-e", "-f", "/dev/null", *flags], stderr=subprocess.PIPE)
    known = "-o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
    ssh = f"ssh -F /dev/null {known} -i {folder}/user -p {port} -l {getpass.getuser()}"
    for line in iter(server.stderr.readline, b""):  # it may end at once: it wants a folder that only root can make
        if b"Server listening" in line:
            break
    reached = subprocess.run([*ssh.split(), "127.0.0.1", "true"], capture_output=True)
    yield ssh if reached.returncode == 0 else None
    server.terminate()
    server.communicate()


@pytest.fixture
def launch(tmp_path):
    with launcher(tmp_path) as made:
        made.write("as_ssh", AS_SSH).chmod(0o755)
        yield made


@pytest.fixture
def ssh(sshd, launch):
    return sshd or f"{launch.folder}/as_ssh"


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


def test_a_rank_that_dies_on_one_machine_ends_all_and_is_named_with_its_machine(launch):
    work = "import os, time\nassert os.environ['RANK'] == '0', 'rank 1 has had enough'\ntime.sleep(1000)\n"
    launch.write("work.py", work)
    launch.write("hosts", "127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    ssh = f"{launch.folder}/as_ssh"  # sshd listens on one address
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
    words = ("--hostfile", "hosts", "--force_multi", "--ssh_command", ssh, "--env", f"LAUNCH_TEST={launch.mark}")
    process = launch.start("run", *words, "stay.py")
    eventually((launch.folder / "up").exists)
    process.send_signal(number)
    done = finish(process) if number == signal.SIGTERM else None
    eventually(lambda: launch.alive() == [])
    assert (launch.folder / "saved").exists()
    if done is not None:
        assert done.returncode == 128 + number
        assert done.stderr.endswith("onefold run: ended by SIGTERM\n")


def test_a_machine_that_cannot_be_reached_is_named():
    with pytest.raises(LaunchError, match=r"worker-0 did not tell a free port \(exit code 255\).*no route"):
        nodes.meeting(["sh", "-c", "echo no route >&2; exit 255", "ssh"], "worker-0")
    with pytest.raises(LaunchError, match="cannot run no-such-ssh"):
        nodes.meeting(["no-such-ssh"], "worker-0")


def test_machines_meet_at_an_address_that_all_know_and_a_free_port():
    with_a_shell = ["sh", "-c", 'exec sh -c "$2"', "ssh"]
    for name, address in (("127.0.0.1", "127.0.0.1"), ("me@127.0.0.2", "127.0.0.2")):
        assert any(is_free_at(address, *nodes.meeting(with_a_shell, name)) for _ in range(5))


def is_free_at(address, found, port):
    """Whether the address is the one that is meant, and nobody has taken the port meanwhile: another test may."""
    assert found == address
    try:
        local.check_port(port)
    except LaunchError:
        return False
    return True


@pytest.mark.parametrize("word", [*AWKWARD, "~", "!x", "#", "a=b", "*", "\t", "é"])
def test_a_shell_takes_a_remote_line_apart_into_the_same_words(word, tmp_path):
    folder = tmp_path / "a folder's"
    folder.mkdir()
    tell = "import os, sys; print(repr((sys.argv[1:], os.environ['V'], os.getcwd())), end='')"
    line = nodes.remote_line(["python3", "-c", tell, word, "last"], {"V": word}, folder)
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout == repr(([word, "last"], word, str(folder)))


@pytest.mark.parametrize(
    ("name", "goes"),
    [
        *(("NCCL_DEBUG", True), ("PYTHONPATH", True), ("UCX_TLS", True), ("HF_HOME", True), ("OMP_NUM_THREADS", True)),
        *(("HOME", False), ("CUDA_VISIBLE_DEVICES", False), ("HF_TOKEN", False), ("MLFLOW_TRACKING_PASSWORD", False)),
        *(("ONEFOLD_RUN", False), ("TORCHELASTIC_RUN_ID", False), ("AWS_SECRET", False), ("BASH_FUNC_x%%", False)),
    ],
)
def test_families_of_variables_are_forwarded_and_secrets_are_not(name, goes):
    assert variables.forwarded({name: "x"}) == ({name: "x"} if goes else {})

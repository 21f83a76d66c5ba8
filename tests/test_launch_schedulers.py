"""Promise: what `onefold run` writes for a scheduler starts the same ranks with the same arguments as over ssh."""

import ast
import os
import shlex
import subprocess
import sys

import pytest
import yaml
from typer.testing import CliRunner

from onefold.cli import main
from onefold.errors import LaunchError
from onefold.launch.cluster.schedulers import job_name

AWKWARD = [
    "two words",
    "$HOME $$ $(x)",
    'it\'s "quoted"',
    "new\nline",
    "--help",
    "é 😀",
    "",
    "\x85\u2028\x7f\t",
    "%j \\\\ # @",
]
SHAPE = ["--num_nodes", "2", "--num_gpus", "8", "--grace", "60", "--max_restarts", "3"]


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Calls `onefold run` in an empty folder and hands back its output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))

    def run(*words):
        done = CliRunner().invoke(main.app(), ["run", *words, "my/Train_1.py", *AWKWARD])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done

    return run


def expanded(text):
    """What Kubernetes makes of a command or value where no variable $(NAME) is known: `$$` is `$`."""
    return text.replace("$$", "$")


def arguments(line, **known):
    """The words that a shell makes of a line `exec python -m onefold run ...`."""
    told = "import sys; print(repr(sys.argv[1:]))"
    program = shlex.join([sys.executable, "-c", told])
    _, _, rest = line.partition(" -m onefold run ")
    done = subprocess.run(
        ["sh", "-c", f"{program} {rest}"], env={**os.environ, **known}, capture_output=True, check=True
    )
    return ast.literal_eval(done.stdout.decode())


OPTIONS = ["--num_nodes", "2", "--nproc", "8", "--grace=60", "--max_restarts=3", "--no_local_rank", "my/Train_1.py"]


def test_an_sbatch_script_starts_each_machines_part(written, tmp_path):
    done = written("--slurm", *SHAPE, "--env", "A=it's $X", "--sbatch=--partition=long", "--account", "me")
    assert done.exit_code == 0, done.output
    assert "start it with: sbatch train-1.sbatch" in done.output
    text = (tmp_path / "train-1.sbatch").read_text()
    subprocess.run(["bash", "-n", tmp_path / "train-1.sbatch"], check=True)
    asked = {line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")}
    assert {"--nodes=2", "--gpus-per-node=8", "--ntasks-per-node=1", "--signal=TERM@70"} <= asked
    assert {"--partition=long", "--account=me"} <= asked


SRUN = """#!/bin/sh
# Each task is told its number, as Slurm does.
while [ "$1" != bash ]; do shift; done
SLURM_NODEID=1 exec "$@"
"""
PYTHON = """#!/bin/sh
echo "A=$A"
shift 3
exec {python} -c 'import sys; print(repr(sys.argv[1:]))' "$@"
"""


def test_an_sbatch_script_says_to_each_task_who_it_is(written, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "a python"))
    written("--slurm", *SHAPE, "--env", "A=it's $X", "--output", "job")
    for name, text in (("srun", SRUN), ("scontrol", "#!/bin/sh\necho first\necho second\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "a python").write_text(PYTHON.format(python=os.path.realpath("/proc/self/exe")))
    (tmp_path / "a python").chmod(0o755)
    slurm = {"SLURM_JOB_ID": "70001", "SLURM_JOB_NODELIST": "first,second", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "job"], env={**os.environ, **slurm}, capture_output=True, text=True, check=True)
    variable, words = done.stdout.splitlines()
    assert variable == "A=it's $X"
    told = ["--node_rank", "1", "--master_addr", "first", "--master_port", "30001"]
    assert ast.literal_eval(words) == [*told, *OPTIONS, *AWKWARD]


def test_a_trainjob_starts_each_machines_part(written):
    done = written("--kubernetes", *SHAPE, "--image", "me/it:1", "--env", "A=$X $(Y)", "--output", "-")
    manifest = yaml.safe_load(done.output)
    assert (manifest["kind"], manifest["metadata"]["name"]) == ("TrainJob", "train-1")
    trainer = manifest["spec"]["trainer"]
    assert (trainer["image"], trainer["numNodes"], trainer["numProcPerNode"]) == ("me/it:1", 2, 8)
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 8}}
    assert [(each["name"], expanded(each["value"])) for each in trainer["env"]] == [("A", "$X $(Y)")]
    shell, flag, line = map(expanded, trainer["command"])
    assert (shell, flag) == ("/bin/sh", "-c")
    told = arguments(line, PET_NODE_RANK="1", PET_MASTER_ADDR="first", PET_MASTER_PORT="29400")
    who = ["--node_rank", "1", "--master_addr", "first", "--master_port", "29400"]
    assert told == [*who, *OPTIONS, *AWKWARD]


def test_a_jobset_starts_each_machines_part(written):
    done = written("--jobset", *SHAPE, "--image", "me/it:1", "--output", "-", "--job_name", "mine")
    manifest = yaml.safe_load(done.output)
    assert (manifest["kind"], manifest["metadata"]["name"]) == ("JobSet", "mine")
    (group,) = manifest["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["completionMode"]) == (2, 2, "Indexed")
    pod = job["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > 60
    told = arguments(expanded(pod["containers"][0]["command"][2]), JOB_COMPLETION_INDEX="1")
    who = ["--node_rank", "1", "--master_addr", "mine-node-0-0.mine", "--master_port", "29500"]
    assert told == [*who, *OPTIONS, *AWKWARD]


def test_a_file_of_somebody_else_is_not_overwritten(written, tmp_path):
    path = tmp_path / "train-1.sbatch"
    path.write_text("#!/bin/bash\n# mine\n")
    with pytest.raises(LaunchError, match="was not written by this command"):
        written("--slurm", *SHAPE)
    assert path.read_text() == "#!/bin/bash\n# mine\n"
    path.unlink()
    for _ in range(2):  # its own file it may write again
        assert written("--slurm", *SHAPE).exit_code == 0


def test_submitting_hands_the_file_to_sbatch_and_its_code_back(written, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="there is no sbatch here"):
        written("--slurm", *SHAPE, "--submit")
    (tmp_path / "sbatch").write_text('#!/bin/sh\necho "$1" > submitted\nexit 3\n')
    (tmp_path / "sbatch").chmod(0o755)
    assert written("--slurm", *SHAPE, "--submit").exit_code == 3
    assert (tmp_path / "submitted").read_text() == "train-1.sbatch\n"


@pytest.mark.parametrize(
    ("script", "name"), [("a/b/Train_1.py", "train-1"), ("7b.py", "run-7b"), ("pkg.train", "pkg"), ("_.py", "run")]
)
def test_a_job_is_named_after_its_script(script, name):
    assert job_name(script) == name

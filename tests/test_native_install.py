"""Promise: the host kernels in use are those of this tree, at this machine's best. Where they cannot be built or
loaded, the package works all the same: torch does their work, and that is said once."""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from host_kernels import library
from onefold.optim import rules
from onefold.optim.kernels import host
from onefold.optim.kernels.host import LEVELS, Run, Step, host_kernel, levels, load_library

ROOT = Path(__file__).resolve().parent.parent
NO_COMPILER = {"CC": "/nonexistent", "CXX": "/nonexistent"}
NO_PATH = {"PATH": "/nonexistent"}


def test_the_library_is_built_from_the_sources_as_they_are():
    files = [ROOT / "CMakeLists.txt", *sorted((ROOT / "csrc").iterdir())]
    hashes = "".join(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)
    assert library().onefold_sources().decode() == hashlib.sha256(hashes.encode()).hexdigest(), "stale: make env"


def test_an_installed_library_is_taken_at_its_best_level():
    assert host_kernel(2).name == f"native ({levels(library())[-1]})"
    assert set(levels(library())) <= set(LEVELS)


def test_threads_are_those_asked_for_or_torchs():
    asked = [3, torch.get_num_threads()] if library().onefold_has_threads() else [1, 1]
    assert [host_kernel(threads).num_threads for threads in (3, None)] == asked


def test_a_library_of_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(host, "ABI", host.ABI + 1)
    with pytest.raises(OSError, match=f"has ABI {host.ABI - 1}, .* needs {host.ABI}: install"):
        load_library(host.find_library())


@pytest.mark.parametrize("content", [None, b"no library"], ids=["missing", "broken"])
def test_without_a_library_torch_does_it_and_that_is_said_once(content, tmp_path, caplog):
    path = tmp_path / "libonefold.so"
    if content is not None:
        path.write_bytes(content)
    assert_torch_does_it(path, caplog)


def test_a_library_of_something_else_is_not_taken(caplog):
    assert_torch_does_it(Path("libm.so.6"), caplog)


def assert_torch_does_it(path, caplog):
    assert [host_kernel(path=path).name for _ in range(3)] == ["torch"] * 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no compiled host kernels" in caplog.text
    assert str(path) in caplog.text


@pytest.mark.parametrize(
    ("env", "is_bound"),
    [
        ({}, False),
        ({"OMP_PROC_BIND": "false", "OMP_PLACES": "cores"}, False),
        ({"OMP_PROC_BIND": "close"}, True),
        ({"OMP_PLACES": "cores"}, True),
        ({"GOMP_CPU_AFFINITY": "0"}, True),
    ],
    ids=str,
)
def test_threads_that_openmp_binds_are_said_once(env, is_bound):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_P", "GOMP_", "KMP_"))}
    code = "from onefold.optim.kernels.host import host_kernel; host_kernel(2); print(host_kernel(2).name)"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env={**clean, **env}, capture_output=True, text=True, check=True)
    assert result.stdout.startswith("native")
    assert result.stderr.count("OpenMP was told to bind threads") == int(is_bound), result.stderr


def build(folder, **env):
    """Build a wheel of this tree into `folder`, as every installer does it."""
    build = f"from scikit_build_core.build import build_wheel; build_wheel({str(folder)!r})"
    clean = {name: value for name, value in os.environ.items() if name != "ONEFOLD_REQUIRE_NATIVE"}
    command = [sys.executable, "-c", build]
    return subprocess.run(command, cwd=ROOT, env={**clean, **env}, capture_output=True, text=True, check=False)


def step_twice():
    """Called in a process of its own, on the wheel that was built without a compiler."""
    rule = rules.SGD(lr=0.5)
    for _ in range(2):
        kernel, run = host_kernel(), Run(weight=torch.ones(3), exact=None, grad=torch.ones(3), state={})
        kernel.update(run, Step(rule=rule, hyper=rule.defaults(), number=1))
        print(kernel.name, *run.weight.tolist(), host.__file__)


@pytest.mark.parametrize("env", [NO_COMPILER, NO_PATH], ids=["no compiler", "empty PATH"])
def test_without_a_compiler_the_package_installs_and_works(env, tmp_path):
    result = build(tmp_path, **env)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    # -S: without the hook of an editable install, which would lead back to this tree.
    command = [sys.executable, "-S", "-c", "import test_native_install as t; t.step_twice()"]
    paths = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(Path(__file__).parent), *sys.path])}
    result = subprocess.run(command, env={**os.environ, **paths}, capture_output=True, text=True, check=False)
    said = f"torch 0.5 0.5 0.5 {tmp_path / 'site' / 'onefold' / 'optim' / 'kernels' / 'host.py'}"
    assert result.stdout.splitlines() == [said] * 2, result.stderr
    assert result.stderr.count("no compiled host kernels (the package was installed without them)") == 1


def test_where_the_library_is_required_a_failed_build_says_why(tmp_path):
    result = build(tmp_path, **NO_COMPILER, ONEFOLD_REQUIRE_NATIVE="1")
    assert result.returncode != 0
    assert NO_COMPILER["CXX"] in result.stdout + result.stderr
    assert list(tmp_path.iterdir()) == []

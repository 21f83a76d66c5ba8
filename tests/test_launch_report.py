"""Promise: `onefold report` tells what a bug report needs, always comes to its end, and gives nobody away."""

import getpass
import shutil
import socket

import psutil
import pytest
import torch
from typer.testing import CliRunner

from onefold.cli import main
from onefold.cli.report import machine_report

PARTS = ["versions", "machine", "cards", "links", "kernels", "missing"]


def parts(text):
    """{heading: lines under it}."""
    found = {}
    for line in text.splitlines():
        if line.startswith("  "):
            found[list(found)[-1]].append(line.strip())
        else:
            found[line] = []
    return found


def test_a_report_has_all_its_parts():
    done = CliRunner().invoke(main.app(), ["report"])
    assert done.exit_code == 0
    found = parts(done.output)
    assert list(found) == PARTS
    assert all(found.values())
    assert f"torch {torch.__version__.partition('+')[0]}" in found["versions"][2] + found["versions"][1]
    assert not any("not to be found out" in line for line in done.output.splitlines())


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ('{"train_batch_size": 8}', 0, "can be used"),
        ('{"train_batch_size": "auto"}', 0, "can be used, once filled in"),
        ('{"train_batch_size": 8, "zero_optimisation": {}}', 1, "cannot be used"),
        ("[]", 1, "line 1"),
        (None, 1, "there is no file"),
    ],
)
def test_a_job_script_can_ask_whether_a_configuration_can_be_used(tmp_path, text, code, said):
    path = tmp_path / "ds_config.json"
    if text is not None:
        path.write_text(text)
    done = CliRunner().invoke(main.app(), ["report", "--config", str(path)])
    assert done.exit_code == code
    assert said in done.stdout


def test_what_is_missing_comes_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    missing = parts(machine_report())["missing"]
    assert any(line.startswith("GPUs: ") for line in missing)
    assert "torch.compile: a C++ compiler (g++)" in missing


def test_a_part_that_cannot_be_found_out_says_so_and_the_rest_is_there(monkeypatch):
    def broken():
        raise OSError("no /proc")

    monkeypatch.setattr(psutil, "virtual_memory", broken)
    found = parts(machine_report())
    assert list(found) == PARTS
    assert found["machine"] == ["not to be found out: OSError: no /proc"]


def test_a_report_names_no_user_and_no_host():
    text = machine_report()
    assert socket.gethostname() not in text.split()
    assert f"/{getpass.getuser()}/" not in text

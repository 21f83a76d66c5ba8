"""Promise: a directory is replaced by a whole new one or not at all, whenever the process dies; nothing piles up."""

import subprocess
import sys
from errno import EINVAL
from pathlib import Path

import pytest

from onefold.system import atomic_replace
from onefold.system.atomic_replace import replacing, replacing_file

# The module alone, without torch, so that a process is up in a moment.
SCRIPT = f"""
import importlib.util, os, signal, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("atomic_replace", {atomic_replace.__file__!r})
atomic_replace = importlib.util.module_from_spec(spec)
spec.loader.exec_module(atomic_replace)
die = lambda *args, **more: os.kill(os.getpid(), signal.SIGKILL)
renames, rename = [], os.rename
def rename_or_die(source, target):
    renames.append(target)
    return rename(source, target) if len(renames) < 2 else die()
{{}}
with atomic_replace.replacing(Path(sys.argv[1]), lambda name: name == "weights") as fresh:
    (fresh / "weights").write_text("new")
    {{}}
"""
DEATHS = {
    "while it writes": ("", "die()", "old"),
    "before the exchange": ("atomic_replace.Workplace.commit = die", "", "old"),
    "after the exchange": ("atomic_replace.shutil.rmtree = die", "", "new"),
    "between two renames": (
        f"atomic_replace.System.exchange = lambda *paths: {EINVAL}; os.rename = rename_or_die",
        "",
        None,
    ),
}


@pytest.mark.parametrize("name", list(DEATHS))
def test_a_process_that_is_killed_leaves_a_whole_directory(tmp_path, name):
    before, inside, left = DEATHS[name]
    target = tmp_path / "out"
    target.mkdir()
    (target / "weights").write_text("old")
    ended = subprocess.run([sys.executable, "-c", SCRIPT.format(before, inside), str(target)], check=False)
    assert ended.returncode == -9
    there = target if left else tmp_path / ".out.replaced"  # where names cannot be exchanged, there is such a moment
    assert (there / "weights").read_text() == (left or "old")
    with replacing(target, lambda name: name == "weights") as fresh:
        assert (target / "weights").read_text() == (left or "old")
        (fresh / "weights").write_text("newer")
    assert (target / "weights").read_text() == "newer"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_replacement_takes_over_what_it_does_not_bring(tmp_path, monkeypatch, can_exchange):
    if not can_exchange:
        monkeypatch.setattr(atomic_replace.System, "exchange", lambda *paths: EINVAL)
    target = tmp_path / "deep" / "out"
    for text, kept in (("one", []), ("two", ["link", "notes"])):
        with replacing(target, lambda name: name.startswith("weights")) as fresh:
            (fresh / f"weights-{text}").write_text(text)
        assert sorted(path.name for path in target.iterdir()) == sorted([*kept, f"weights-{text}"])
        (target / "notes").mkdir(exist_ok=True)
        (target / "notes" / "mine").write_text("mine")
        if not kept:
            (target / "link").symlink_to("nowhere")
    assert (target / "notes" / "mine").read_text() == "mine"
    assert (target / "link").readlink() == Path("nowhere")
    assert [path.name for path in target.parent.iterdir()] == ["out"]


def test_a_body_that_fails_changes_nothing(tmp_path):
    (tmp_path / "out").mkdir()

    def fail():
        with replacing(tmp_path / "out", lambda name: True) as fresh:
            (fresh / "weights").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert [path.name for path in tmp_path.rglob("*")] == ["out"]


def test_two_replacements_of_one_directory_leave_each_other_alone(tmp_path):
    target = tmp_path / "out"
    with replacing(target, lambda name: True) as first:
        (first / "weights").write_text("first")
        with replacing(target, lambda name: True) as second:
            (second / "weights").write_text("second")
        assert (target / "weights").read_text() == "second"
    assert (target / "weights").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in target.iterdir()] == ["weights"]


def test_a_file_of_the_users_that_would_be_lost_is_told_of(tmp_path):
    (tmp_path / "lock").write_text("mine")
    with pytest.raises(FileExistsError, match="give it another"), replacing(tmp_path, lambda name: True):
        pass
    assert (tmp_path / "lock").read_text() == "mine"


def test_a_file_is_replaced_by_a_whole_one_or_not_at_all(tmp_path):
    def write(text, error=None):
        with replacing_file(tmp_path / "file") as fresh:
            fresh.write_text(text)
            if error is not None:
                raise error

    write("old")
    with pytest.raises(KeyboardInterrupt):
        write("half", KeyboardInterrupt())
    assert (tmp_path / "file").read_text() == "old"
    write("new")
    assert (tmp_path / "file").read_text() == "new"
    (tmp_path / "folder" / "full").mkdir(parents=True)
    with pytest.raises(OSError, match="folder"), replacing_file(tmp_path / "folder") as fresh:
        fresh.write_text("never")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_the_directory_behind_a_link_is_replaced(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with replacing(tmp_path / "link", lambda name: True) as fresh:
        (fresh / "weights").write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "weights").read_text() == "new"


def test_the_directory_that_a_process_works_in_stays(tmp_path, monkeypatch):
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    for target in (Path("."), tmp_path):
        with pytest.raises(OSError, match="works in"), replacing(target, lambda name: True):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["inner"]

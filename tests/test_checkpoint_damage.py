"""Promise: whatever has happened to the files of a checkpoint, or whoever made them, `load` gives what was saved or an
error that names the file, and `latest` falls back to the checkpoint before."""

import gzip
import json
import logging
import os
import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from zlib import crc32

import pytest
from safetensors.torch import load_file

import onefold
from checkpoint_faults import WAYS, SmallRun, after, harm, save_both
from checks import equal
from onefold.checkpoint.codec import packed, unpacked
from onefold.checkpoint.files import Files
from onefold.checkpoint.manifest import MANIFEST, SHARED, Manifest, manifest_text, read_manifest
from onefold.errors import CheckpointError, OnefoldError


def load_each(rank, num_ranks, directory, cases):
    """Loads `step-3` and `latest` of every directory; returns what does not hold, by case."""
    run, wrong = SmallRun(seed=5), []
    want = {step: after(step) for step in (2, 3)}
    passed = logging.Handler()
    passed.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("onefold").addHandler(passed)
    for case, name, harmless in cases:
        records, place = [], directory / case
        try:
            run.load(place / "step-3")
            if not (harmless and equal(run.state(), want[3])):
                wrong.append(f"{case}: loaded")
        except CheckpointError as error:
            if harmless or str(place / "step-3" / name) not in str(error) or "is no value" in str(error):
                wrong.append(f"{case}: {error}")
        except Exception as error:
            wrong.append(f"{case}: {error!r}")
        step = run.load(place / "latest")
        if step != (3 if harmless else 2) or not equal(run.state(), want[step]):
            wrong.append(f"{case}: latest is {step}")
        is_told = any("step-3 (" in record and name in record for record in records)
        if rank == 0 and not (harmless or is_told or case == f"{MANIFEST} of the one before"):
            wrong.append(f"{case}: the log says {records}")
    logging.getLogger("onefold").removeHandler(passed)
    return wrong


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_damage_to_any_file_is_told_and_the_checkpoint_before_is_taken(ranks, tmp_path, num_ranks):
    ranks(2).run(save_both, tmp_path / "whole")
    cases = []
    for name in sorted(path.name for path in (tmp_path / "whole" / "step-3").iterdir()):
        for way in WAYS:
            case = f"{name} {way}"
            shutil.copytree(tmp_path / "whole", tmp_path / case)
            harm(tmp_path / case, name, way)
            # One rank has no use for what the other kept for itself, and does not read it.
            unread = num_ranks == 1 and name == "rank-00001.json.gz"
            sizes = {(tmp_path / which / "step-3" / name) for which in ("whole", case)}
            same_size = all(path.is_file() for path in sizes) and len({path.stat().st_size for path in sizes}) == 1
            # That manifest is whole, and of the same moment as the checkpoint before, but the rest is not of it.
            blamed = SHARED if case == f"{MANIFEST} of the one before" else name
            cases.append((case, blamed, unread and same_size))
    assert len(cases) == 8 * len(WAYS)
    for wrong in ranks(num_ranks).run(load_each, tmp_path, cases, timeout_s=300):
        assert not wrong, "\n".join(wrong)


def forge(checkpoint, name, text):
    """Put a file in place of one, and into the manifest, as somebody would who knows how."""
    (checkpoint / name).write_bytes(text)
    manifest = read_manifest(checkpoint)
    record = replace(manifest.files[name], nbytes=len(text), checksum=crc32(text))
    (checkpoint / MANIFEST).write_bytes(
        manifest_text(Manifest(manifest.saved_ns, {**manifest.files, record.name: record}))
    )


NONSENSE = (None, [], {}, 7, -1, "x", 10**30, 0.5, [[]], {"$": "tuple"}, {"$": 1}, {"a": {"b": 1}}, {"a": 1})
DEEP = b'{"tensors": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
WEIGHT = "model.first.weight"


def last_part(values):
    """Puts other parts in place of the last of a weight's."""

    def change(tensors):
        chunks = tensors[WEIGHT]["chunks"]
        tensors[WEIGHT]["chunks"] = chunks[:-1] + values(*chunks[-1])

    return change


def extra(**fields):
    return lambda tensors: tensors["extra.0"].update(fields)


FORGED_TENSORS = {
    "huge shape": extra(shape=[10**12]),
    "huge number": extra(shape=[10**30]),
    "huge product": extra(shape=[2**40, 2**40]),
    "negative shape": extra(shape=[-5]),
    "fraction of a shape": extra(shape=[5.5]),
    "shape of words": extra(shape="five"),
    "no shape": extra(shape=None),
    "no parts": extra(chunks=[]),
    "parts of words": extra(chunks=["abcd"]),
    "unknown dtype": extra(dtype="float33"),
    "no dtype": extra(dtype="nn"),
    "not even a name": extra(dtype=7),
    "wider dtype": extra(dtype="complex128"),
    "overlap": last_part(lambda offsets, *rest: [[[offsets[0] - 1, 0], *rest]]),
    "gap": last_part(lambda *part: []),
    "twice": last_part(lambda *part: [part, part]),
    "outside of the shape": last_part(lambda offsets, *rest: [[[60, 0], *rest]]),
    "before the shape": last_part(lambda offsets, *rest: [[[-3, 0], *rest]]),
    "outside of the file": last_part(lambda *part: [[*part[:3], 10**9]]),
    "before the file": last_part(lambda *part: [[*part[:3], -4]]),
    "between bytes": last_part(lambda *part: [[*part[:3], 0.5]]),
    "another directory": last_part(lambda *part: [[*part[:2], "../step-2/rank-00001.data", part[3]]]),
    "no data file": last_part(lambda *part: [[*part[:2], SHARED, 0]]),
    "other dims": last_part(lambda offsets, *rest: [[[3], *rest]]),
    "sizes of nothing": last_part(lambda offsets, sizes, *rest: [[offsets, sizes, *rest], [offsets, [0, 6], *rest]]),
    "no run": lambda tensors: tensors[WEIGHT].update(
        chunks=[[[0, 0], [6, 3], "rank-00000.data", 0], [[0, 3], [6, 3], "rank-00000.data", 72]]
    ),
}


class Overtaken(Files):
    """As if another run saved with `keep_last=1` meanwhile: once a file of step 2 is read, there is step 3 only, under
    the same name or another."""

    def __init__(self, directory, file, name):
        self.directory, self.file, self.name = directory, file, name

    def read_into(self, file, data):
        place = self.directory / "step-2"
        if file.name == str(place / self.file) and (self.directory / ".new").exists():
            place.rename(self.directory / ".old")
            (self.directory / ".new").rename(self.directory / self.name)
            shutil.rmtree(self.directory / ".old")
        return super().read_into(file, data)


def load_overtaken(rank, num_ranks, directory, file, name, meant):
    run = SmallRun(seed=5)
    found = run.load(directory / meant, files=Overtaken(directory, file, name))
    return found, equal(run.state(), after(found)), (directory / ".new").exists()


@pytest.mark.parametrize("file", [SHARED, "rank-00000.json.gz", "rank-00000.sums", "rank-00000.data"])
@pytest.mark.parametrize(("name", "meant"), [("step-3", "latest"), ("step-2", "latest"), ("step-2", "step-2")])
def test_a_checkpoint_that_goes_while_it_is_read_gives_way_to_its_successor(ranks, tmp_path, file, name, meant):
    ranks(1).run(save_both, tmp_path)
    (tmp_path / "step-3").rename(tmp_path / ".new")
    step = 2 if file == "rank-00000.data" else 3  # that file is the last to be opened, and an open one stays readable
    assert ranks(1).run(load_overtaken, tmp_path, file, name, meant) == [(step, True, False)]


@contextmanager
def unprivileged():
    """Inside, the system does not let this process read just anything: what tests run as may be the superuser."""
    user = os.geteuid()
    os.seteuid(user or 65534)
    try:
        yield
    finally:
        os.seteuid(user)


def load_unreadable(rank, num_ranks):
    """What loading and exporting give where this process may not read the newest checkpoint, or what lies around it."""
    with TemporaryDirectory() as made:  # not pytest's, below which nobody else may look
        directory = Path(made)
        directory.chmod(0o777)
        run = SmallRun()
        save_both(rank, num_ranks, directory / "all")
        run.load(directory / "all" / "latest")
        onefold.export(directory / "all" / "latest", directory / "out")
        (directory / "out").chmod(0o777)
        found, told = [], []
        (directory / "all" / "step-3").chmod(0)
        with unprivileged():
            found.append(run.load(directory / "all" / "latest"))
            onefold.export(directory / "all" / "latest", directory / "out" / "latest")
        found.append(equal(load_file(directory / "out" / "latest" / "model.safetensors"), dict(after(2))))
        (directory / "all").chmod(0)
        with unprivileged():
            for attempt in (
                lambda: run.load(directory / "all" / "latest"),
                lambda: run.load(directory / "all" / "step-2"),
                lambda: onefold.export(directory / "all" / "latest", directory / "out" / "other"),
            ):
                with pytest.raises(CheckpointError) as caught:
                    attempt()
                told.append(str(caught.value).removeprefix(made))
        for path in (directory / "all", directory / "all" / "step-3"):
            path.chmod(0o700)
    return found, told


def test_what_may_not_be_read_is_passed_over_or_told(ranks):
    ((found, told),) = ranks(1).run(load_unreadable)
    assert found == [2, True]
    assert told == [f"/all/{name} cannot be read: Permission denied" for name in ("latest", "step-2", "latest")]


def exported(place, out):
    """What an export does with a checkpoint, but to write it or to refuse it."""
    try:
        onefold.export(place, out)
    except OnefoldError:
        return []
    except Exception as error:
        return [f"exported with {error!r}"]
    return []


def load_forged(rank, num_ranks, directory, whole):
    """Loads a checkpoint with each forgery; returns those that gave anything but what was saved or our error."""
    run, wrong, refused = SmallRun(seed=5), [], set()
    want = after(3)

    def attempt(case, place, file, must_fail=False):
        try:
            onefold.load(place, run.model, run.optimizer)
            if must_fail or not equal(run.state(), want):
                wrong.append(f"{case}: loaded")
        except CheckpointError as error:
            refused.add(case)
            if str(place / file) not in str(error) and str(place) + " " not in str(error):
                wrong.append(f"{case}: does not name {file}: {error}")
        except Exception as error:
            wrong.append(f"{case}: {error!r}")

        wrong.extend(f"{case}: {told}" for told in exported(place, directory / "out"))

    shared = unpacked((whole / SHARED).read_bytes())
    own = unpacked((whole / "rank-00000.json.gz").read_bytes())
    for file, text, prefix in ((SHARED, shared, "shared"), ("rank-00000.json.gz", own, "own")):
        for key in text:
            for number, value in enumerate((..., *NONSENSE)):
                case = f"{prefix} {key} {value!r}"
                place = shutil.copytree(whole, directory / f"{prefix}-{key}-{number}")
                forged = {k: v for k, v in text.items() if k != key} | ({} if value is ... else {key: value})
                forge(place, file, packed(forged))
                attempt(case, place, file)
                shutil.rmtree(place)
    for case, change in FORGED_TENSORS.items():
        place = shutil.copytree(whole, directory / case)
        tensors = json.loads(json.dumps(shared["tensors"]))
        change(tensors)
        forge(place, SHARED, packed({**shared, "tensors": tensors}))
        attempt(case, place, SHARED, must_fail=True)
    for number, text in enumerate((b"", b"[]", b"7", b"null", b"nonsense", b"\xff\xfe", DEEP, b"9" * 5000)):
        for way, wrap in (("text", gzip.compress), ("plain", bytes), ("twice", lambda text: 2 * gzip.compress(text))):
            place = shutil.copytree(whole, directory / f"{way}-{number}")
            forge(place, SHARED, wrap(text))
            attempt(f"{way} {text[:20]}", place, SHARED, must_fail=True)
        place = shutil.copytree(whole, directory / f"manifest-{number}")
        (place / MANIFEST).write_bytes(text)
        attempt(f"manifest {text[:20]}", place, MANIFEST, must_fail=True)
    return wrong, len(refused)


def test_a_forged_checkpoint_loads_as_what_it_says_or_is_refused_by_file(ranks, tmp_path):
    ranks(2).run(save_both, tmp_path)
    wrong, refused = ranks(1).run(load_forged, tmp_path / "forged", tmp_path / "step-3", timeout_s=300)[0]
    assert not wrong, "\n".join(wrong)
    assert refused > 100


@pytest.mark.parametrize("name", ["../else", "{}/else", "config.json/../../else", "tokenizer.json"])
def test_a_forged_checkpoint_writes_nothing_but_what_an_export_has(ranks, tmp_path, name):
    ranks(1).run(save_both, tmp_path)
    shared = unpacked((tmp_path / "step-3" / SHARED).read_bytes())
    shared["files"]["configs"] = {name.format(tmp_path): {}, "config.json": {"mine": 1}}
    forge(tmp_path / "step-3", SHARED, packed(shared))
    onefold.export(tmp_path / "step-3", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "step-2", "step-3"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]


FORGED_RECORDS = {
    "name outside": lambda files: files.update({"../secret": files[SHARED]}),
    "absolute name": lambda files: files.update({"/etc/passwd": files[SHARED]}),
    "parent": lambda files: files.update({"..": files[SHARED]}),
    "no name": lambda files: files.update({"": files[SHARED]}),
    "zero in a name": lambda files: files.update({"a\0b": files[SHARED]}),
    "odd name": lambda files: files.update({"rank-0000a.data": files[SHARED]}),
    "size of words": lambda files: files[SHARED].update(bytes="many"),
    "negative size": lambda files: files[SHARED].update(bytes=-1),
    "huge size": lambda files: files[SHARED].update(bytes=10**30),
    "fractional size": lambda files: files[SHARED].update(bytes=1.5),
    "no size": lambda files: files[SHARED].pop("bytes"),
    "no sum": lambda files: files[SHARED].update(crc32=None),
    "no block": lambda files: files["rank-00001.data"].update(block=None),
    "blocks of nothing": lambda files: files["rank-00001.data"].update(block=0),
    "odd blocks": lambda files: files["rank-00001.data"].update(block=4095),
    "huge blocks": lambda files: files["rank-00001.data"].update(block=2**40),
    "blocks of words": lambda files: files["rank-00001.data"].update(block="4096"),
    "shorter blocks": lambda files: files["rank-00001.data"].update(block=64),
    "sum of words": lambda files: files[SHARED].update(crc32="x"),
    "no file": lambda files: files.pop(SHARED),
    "no data": lambda files: files.pop("rank-00001.data"),
    "no sums": lambda files: files.pop("rank-00001.sums"),
    "huge data": lambda files: files["rank-00001.data"].update(bytes=10**15),
    "record of words": lambda files: files.update({SHARED: "x"}),
}


def test_a_forged_manifest_is_refused(ranks, tmp_path):
    ranks(2).run(save_both, tmp_path / "whole")
    for case, change in FORGED_RECORDS.items():
        shutil.copytree(tmp_path / "whole", tmp_path / case)
        path = tmp_path / case / "step-3" / MANIFEST
        body = json.loads(path.read_bytes())
        body.pop("crc32")
        change(body["files"])
        checksum = crc32(json.dumps(body, sort_keys=True).encode())
        path.write_bytes(json.dumps({**body, "crc32": checksum}).encode())
    (wrong,) = ranks(1).run(load_each, tmp_path, [(case, "", False) for case in FORGED_RECORDS])
    assert not wrong, "\n".join(wrong)

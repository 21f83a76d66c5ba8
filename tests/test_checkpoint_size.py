"""Promise: a checkpoint is as big as what is in it; each rank writes and reads its share; and neither takes more memory
beside the run than a unit."""

import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import onefold
from inside import insides
from onefold.checkpoint.entries import kept_entries
from onefold.checkpoint.files import LEAST_BLOCK, MOST_BLOCK, Files, block_bytes
from onefold.checkpoint.manifest import read_manifest
from plans import NAMED_PLANS

WIDTH, DEPTH = 724, 8
NUMEL = DEPTH * (WIDTH * WIDTH + WIDTH)  # 4.2 million
ADAM_BYTES = 12
"""Of a parameter in a checkpoint: exact weight and two averages."""


class Counting(Files):
    """Counts the bytes of data files that are read and written, and those of all files that are read."""

    def __init__(self):
        self.read = self.read_of_all = self.written = 0

    def read_into(self, file, data):
        count = super().read_into(file, data)
        self.read += count if file.name.endswith(".data") else 0
        self.read_of_all += count
        return count

    def write(self, file, data, offset):
        count = super().write(file, data, offset)
        self.written += count if file.name.endswith(".data") else 0
        return count


class Uneven(nn.Module):
    """0.9 million parameters: units of matrices and vectors, and an embedding."""

    def __init__(self, width=120):
        super().__init__()
        self.embed = nn.Embedding(2001, width)
        sizes = ((width, 4 * width), (4 * width, width), (width, width))
        blocks = (nn.Sequential(nn.LayerNorm(width), *(nn.Linear(*size) for size in sizes)) for _ in range(5))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, words):
        raise NotImplementedError


def even():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))


def made(plan, precision="fp32", make=even):
    model = make()
    options = {} if precision == "fp32" else {"precision": onefold.Precision(params=precision)}
    model = onefold.shard(model, NAMED_PLANS[plan], **options)
    return model, onefold.AdamW(model)


def save_one(rank, num_ranks, path, plan, precision, make=even):
    files = Counting()
    onefold.save(path, *made(plan, precision, make), files=files, extra={"step": 1})
    return files.written


def load_one(rank, num_ranks, path, plan, make=even):
    """Bytes read of data files and of all files, bytes wanted, and the number of ranges that these lie in."""
    model, optimizer = made(plan, make=make)
    files = Counting()
    onefold.load(path, model, optimizer, files=files)
    entries = list(kept_entries(insides(model), optimizer, None))
    return files.read, files.read_of_all, sum(entry.nbytes for entry in entries), len(entries)


@pytest.mark.parametrize(
    ("save_ranks", "plan", "precision", "load_ranks", "load_plan"),
    [(2, "zero_3", "fp32", 3, "zero_3"), (3, "zero_0", "bf16", 2, "zero_3"), (1, "offload", "fp32", 3, "offload_3")],
)
def test_a_checkpoint_has_no_more_bytes_than_it_needs(
    ranks, tmp_path, save_ranks, plan, precision, load_ranks, load_plan
):
    path, total = tmp_path / "it", NUMEL * ADAM_BYTES
    written = ranks(save_ranks).run(save_one, path, plan, precision)
    assert sum(written) == total
    assert max(written) <= 1.05 * total / save_ranks
    assert sum(file.stat().st_size for file in path.iterdir()) <= 1.01 * total
    found = ranks(load_ranks).run(load_one, path, load_plan)
    for _, _, wanted, _ in found:
        assert wanted <= 1.05 * total / load_ranks
    assert_little_more(path, found, save_ranks)


def assert_little_more(path, found, save_ranks):
    """That ranks read less than two blocks more than they want for each run of bytes, and in all at most 5 % more."""
    block = max(record.block or 0 for record in read_manifest(path).files.values())
    for read, read_of_all, wanted, ranges in found:
        runs = ranges * min(save_ranks, 2)  # a range may begin in one rank's file and end in the next one's
        assert wanted <= read <= wanted + 2 * block * runs
        assert read_of_all <= 1.05 * wanted


@pytest.mark.parametrize("save_ranks", [1, 2, 3, 4])
def test_ranks_of_any_number_read_little_more_than_their_share(ranks, tmp_path, save_ranks):
    total = sum(ranks(save_ranks).run(save_one, tmp_path / "it", "zero_3", "fp32", Uneven))
    assert sum(file.stat().st_size for file in (tmp_path / "it").iterdir()) <= 1.01 * total
    for load_ranks in (1, 2, 3, 4):
        assert_little_more(
            tmp_path / "it", ranks(load_ranks).run(load_one, tmp_path / "it", "zero_3", Uneven), save_ranks
        )


@pytest.mark.parametrize(
    ("nbytes", "num_tensors", "block"),
    [
        (0, 0, LEAST_BLOCK),
        (2**19 - 1, 1, LEAST_BLOCK),
        (2**19, 1, 2 * LEAST_BLOCK),
        (2**19, 2, LEAST_BLOCK),
        (2**24 - 1, 1, MOST_BLOCK // 2),
        (2**24, 1, MOST_BLOCK),
        (2**40, 100, MOST_BLOCK),
    ],
)
def test_blocks_are_a_small_part_of_the_tensors_of_a_file(nbytes, num_tensors, block):
    assert block_bytes(nbytes, num_tensors) == block


PROGRAM = """
import re, sys, torch
sys.path.insert(0, {path!r})
from torch import nn
import onefold
from onefold.plan.table import NAMED_PLANS

def status(name):
    return 1024 * int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1])

def extra(attempt):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forget the largest size so far
    before = status("VmRSS")
    attempt()
    return status("VmHWM") - before

torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear({width}, {width}, bias=False) for _ in range(40)))
model = onefold.shard(model, NAMED_PLANS[{plan!r}], precision=onefold.Precision(params={precision!r}))
optimizer = onefold.AdamW(model)
small = onefold.shard(nn.Linear(3, 3), onefold.ZERO_3)
model(torch.ones(1, {width}, dtype=torch.{dtype})).sum().backward()
optimizer.step()
optimizer.zero_grad()
onefold.save({target!r} + "/small", small)  # whatever is imported or made once
onefold.load({target!r} + "/small", small)
onefold.measured(model, optimizer)  # waits for the update on the host, which takes pages as it first writes them
print(extra(lambda: onefold.save({target!r} + "/it", model, optimizer)))
print(extra(lambda: onefold.load({target!r} + "/it", model, optimizer)))
"""


@pytest.mark.parametrize(
    ("plan", "precision", "dtype"), [("zero_3", "fp32", "float32"), ("offload", "bf16", "bfloat16")]
)
def test_saving_and_loading_take_no_more_memory_than_a_unit(tmp_path, plan, precision, dtype):
    width = 1000
    program = PROGRAM.format(
        path=str(Path(onefold.__file__).parent.parent),
        width=width,
        plan=plan,
        precision=precision,
        dtype=dtype,
        target=str(tmp_path),
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr
    saving, loading = map(int, ended.stdout.split())
    unit = 16 * width * width
    window = 16 * 2**20  # what is copied, checked and written at once
    whole = 40 * width * width * ADAM_BYTES
    print(f"saving {saving / 2**20:.1f} MiB, loading {loading / 2**20:.1f} MiB")
    assert saving <= unit + 3 * window < whole / 4  # what malloc keeps of temporaries varies
    assert loading <= unit + 3 * window

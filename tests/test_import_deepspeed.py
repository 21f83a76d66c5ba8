"""Promise: a checkpoint that DeepSpeed wrote becomes a Onefold one, bit for bit, and training goes on as DeepSpeed's
would have. Nothing in such a file runs."""

import os
import shutil
import zipfile
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import deepspeed_runs
import onefold
from apart import finish, start
from checkpoint_models import PRECISIONS
from deepspeed_runs import AFTER, BEFORE, SETTINGS, STATES, VARIANTS, WARMUP, Net, groups, loss_of, schedule
from onefold.checkpoint.files import Files
from onefold.checkpoint.storage import Reader
from onefold.cli.main import app
from onefold.deepspeed.schedules import WarmupLR
from onefold.errors import CheckpointError
from onefold.interop.imports import import_deepspeed
from onefold.interop.imports.deepspeed import Extent, reader
from plans import NAMED_PLANS
from ranks import needs_deepspeed

CASES = [(num_ranks, name) for num_ranks, variants in VARIANTS.items() for name in variants]
every_case = pytest.mark.parametrize(("num_ranks", "name"), CASES)


class Written:
    """What DeepSpeed wrote, and its imports, each made when first asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.left_out: dict[Path, dict[str, str]] = {}

    def path(self, num_ranks, name):
        return self.directory / str(num_ranks) / name

    def truth(self, num_ranks, name):
        return torch.load(self.directory / str(num_ranks) / f"{name}.pt", weights_only=True)

    def imported(self, num_ranks, name):
        out = self.directory / f"imported-{num_ranks}-{name}"
        if out not in self.left_out:
            self.left_out[out] = import_deepspeed(self.path(num_ranks, name), out, progress=False)
        return out


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp("deepspeed")
    finish(start(deepspeed_runs.__file__, directory))
    return Written(directory)


@needs_deepspeed
@every_case
def test_weights_and_optimizer_state_are_taken_bit_for_bit(written, num_ranks, name):
    truth = written.truth(num_ranks, name)["saved"]
    expected = {f"model.{key}": value for key, value in [*truth["weights"].items(), *truth["frozen"].items()]}
    expected |= {f"buffer.{key}": value for key, value in truth["buffers"].items()}
    expected |= {f"optimizer.{s}.{key}": value for s in STATES for key, value in truth[s].items()}
    expected["extra.0"] = torch.arange(3)
    with closing(Reader(written.imported(num_ranks, name))) as store:
        store.verify()
        keys = list(store.tensors)
        if name == "zero2-fp32-round-robin":  # DeepSpeed does not say
            keys = [key for key in keys if not key.startswith("optimizer.")]
        assert sorted(keys) == sorted(expected)
        wrong = [key for key, value in expected.items() if not same(store.tensor(key), value)]
    assert wrong == []


@needs_deepspeed
@every_case
@pytest.mark.parametrize("dtype", [None, "fp32"])
def test_an_import_exports_what_deepspeed_trained(written, tmp_path, num_ranks, name, dtype):
    saved, computed = written.truth(num_ranks, name)["saved"], DTYPES[precision_of(name)]
    onefold.export(written.imported(num_ranks, name), tmp_path / "out", dtype=dtype)
    found = load_file(tmp_path / "out" / "model.safetensors")
    params = {**saved["weights"], **saved["frozen"]}
    assert found.keys() == {*params, *saved["buffers"]}  # what is tied once, by its first name
    chosen = torch.float32 if dtype else computed
    assert [key for key, value in params.items() if not same(found[key], value.to(chosen))] == []
    assert [key for key, value in saved["buffers"].items() if not same(found[key], value)] == []
    model = onefold.shard(Net().to(chosen), onefold.ZERO_0)
    assert onefold.load_pretrained(model, tmp_path / "out") == ([], [])
    assert torch.equal(model.head.weight, found["embed.weight"])


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ELASTIC = "zero2-fp32-elastic"


def precision_of(name):
    return name.split("-")[1]


def same(mine, theirs):
    return mine.dtype == theirs.dtype and torch.equal(mine, theirs)


SCHEDULES = {"zero2-fp32-own-scheduler": lambda optimizer: WarmupLR(optimizer, **WARMUP["params"])}


def go_on(rank, num_ranks, out, name, plan):
    """Load under a plan, train, and return what it was like, and what `load` returned."""
    torch.manual_seed(7)
    model = onefold.shard(Net(), NAMED_PLANS[plan], precision=PRECISIONS[precision_of(name)])
    optimizer = onefold.AdamW(model, param_groups=groups(model), max_grad_norm=1.0, **SETTINGS)
    scheduler = SCHEDULES.get(name, schedule)(optimizer)
    extra = onefold.load(out, model, optimizer, scheduler=scheduler)
    if name == ELASTIC:  # DeepSpeed does not save hyper-parameters then
        for group, lr in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
            group["lr"] = lr
    loaded = state(model, optimizer)
    for step in range(extra["deepspeed"]["global_steps"], BEFORE + AFTER):
        loss_of(model, step, rank, num_ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return loaded, state(model, optimizer), extra


def state(model, optimizer):
    with onefold.gathered(model):
        weights = {name: param.detach().float().clone() for name, param in model.named_parameters()}
    rates = [group["lr"] for group in optimizer.param_groups]
    return {"weights": weights, "rates": rates, "scale": optimizer.loss_scale, "updates": optimizer.num_updates}


TOLERANCE = {"fp32": 2e-6, "fp16": 2e-3, "bf16": 2e-2}
"""Sums of gradients are rounded in other places."""
ROUNDED = {"fp32": 0.0, "fp16": 1e-3, "bf16": 1e-2}
"""What is read after loading is weights in the compute dtype."""
TAKEN_UP = {1: (2, "zero_3"), 2: (3, "zero_2"), 3: (1, "offload")}
"""At how many ranks, and under which plan, what DeepSpeed wrote at so many goes on."""


@needs_deepspeed
@every_case
def test_training_goes_on_as_under_deepspeed(written, ranks, num_ranks, name):
    load_ranks, plan = TAKEN_UP[num_ranks]
    out, truth = written.imported(num_ranks, name), written.truth(num_ranks, name)
    loaded, later, extra = ranks(load_ranks).run(go_on, out, name, plan)[0]
    assert extra["client_state"]["note"] == "hello"
    assert torch.equal(extra["client_state"]["mask"], torch.arange(3))
    for mine, theirs in ((loaded, truth["saved"]), (later, truth["later"])):
        assert numbers(mine) == numbers(theirs)
    assert distance(loaded["weights"], truth["saved"]["weights"]) <= ROUNDED[precision_of(name)]
    assert distance(later["weights"], truth["later"]["weights"]) <= TOLERANCE[precision_of(name)]
    assert distance(later["weights"], truth["saved"]["weights"]) > 100 * TOLERANCE["fp32"]


def numbers(state):
    return state["rates"], state["scale"], state["updates"]


def distance(mine, theirs):
    return max(float((mine[name] - weight).abs().max()) for name, weight in theirs.items())


@needs_deepspeed
def test_what_is_left_out_is_named(written):
    reasons = {name: written.left_out[written.imported(2, name)] for name in VARIANTS[2]}
    assert {name: list(found) for name, found in reasons.items() if found} == {ELASTIC: ["param_groups"]}


def damage_rank(where):
    (where / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()


def damage_last_rank(where):
    (where / "zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()


def damage_model(where):
    (where / "zero_pp_rank_2_mp_rank_00_model_states.pt").unlink()


def damage_bytes(where):
    path = where / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    path.write_bytes(path.read_bytes()[:-1000])


def damage_bit(where):
    """In a tensor, of which torch.load takes whatever stands there."""
    path = where / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    with zipfile.ZipFile(path) as archive:
        inside = max(archive.infolist(), key=lambda info: info.file_size)
    data = bytearray(path.read_bytes())
    data[inside.header_offset + inside.file_size // 2] ^= 1
    path.write_bytes(data)


def damage_file(where):
    path = where / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    path.unlink()
    os.mkfifo(path)


def damage_kinds(where):
    shutil.copy(
        where / "zero_pp_rank_0_mp_rank_00_optim_states.pt", where / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    )


def damage_parts(where):
    shutil.copy(
        where / "zero_pp_rank_0_mp_rank_00_optim_states.pt", where / "zero_pp_rank_0_mp_rank_01_optim_states.pt"
    )


def damage_layout(where):
    path = where / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    other = where.parent.parent / "other.pt"
    shutil.copy(where / "zero_pp_rank_0_mp_rank_00_model_states.pt", other)
    shutil.copy(other, path)


DAMAGES = [
    (damage_rank, "optimizer states of rank 1 are missing"),
    (damage_last_rank, r"cut into \[3\] partitions, and there are files of 2 ranks"),
    (damage_model, "model states of rank 2 are missing"),
    (damage_bytes, "zero_pp_rank_1_mp_rank_00_optim_states.pt cannot be read"),
    (damage_bit, r"zero_pp_rank_1_mp_rank_00_optim_states.pt is damaged: \S+/data/\d+ in it is not what was written"),
    (damage_file, "zero_pp_rank_1_mp_rank_00_optim_states.pt cannot be read: it is no regular file"),
    (damage_kinds, "files of two runs"),
    (damage_parts, "tensor, pipeline or expert parallelism"),
    (damage_layout, "is not laid out as DeepSpeed"),
]


@needs_deepspeed
@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_what_is_not_whole_is_refused(written, tmp_path, damage, message):
    shutil.copytree(written.path(3, "zero3-fp32"), tmp_path / "theirs")
    damage(tmp_path / "theirs" / f"global_step{BEFORE}")
    with pytest.raises(CheckpointError, match=message):
        import_deepspeed(tmp_path / "theirs", tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir() if path.name != "other.pt"] == ["theirs"]


@needs_deepspeed
def test_a_tag_may_be_named_or_be_the_directory(written, tmp_path):
    theirs, tag = written.path(1, "zero1-fp32"), f"global_step{BEFORE}"
    for number, (directory, named) in enumerate([(theirs, None), (theirs, tag), (theirs / tag, None)]):
        import_deepspeed(directory, tmp_path / str(number), named)
        assert Reader(tmp_path / str(number)).shared["extra"]["deepspeed"]["tag"] == tag
    with pytest.raises(CheckpointError, match=f"holds no checkpoint 'global_step9'; it holds: {tag}"):
        import_deepspeed(theirs, tmp_path / "ours", "global_step9")
    with pytest.raises(CheckpointError, match="name one of the checkpoints in it"):
        import_deepspeed(theirs.parent, tmp_path / "ours")


@needs_deepspeed
def test_the_command_imports_and_says_what_it_left_out(written, tmp_path):
    theirs = written.path(2, ELASTIC)
    told = CliRunner().invoke(app(), ["import-deepspeed", str(theirs), str(tmp_path / "ours")], catch_exceptions=False)
    assert (told.exit_code, told.stderr) == (
        0,
        "left out: param_groups: an elastic checkpoint does not hold them: set hyper-parameters anew\n",
    )
    with closing(Reader(tmp_path / "ours")) as store:
        store.verify()


class Touch:
    """Pickled, it is an instruction to make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


class Unknown:
    """Harmless, but not on the list."""


def lay_trap(directory, thing, kind):
    """A checkpoint of one rank with `thing` in one of its files."""
    optimizer = {"optimizer_state_dict": thing if kind == "optimizer" else {}}
    model = {"module": {}, "client": thing if kind == "model" else {}}
    torch.save(optimizer, directory / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    torch.save(model, directory / "mp_rank_00_model_states.pt")


@pytest.mark.parametrize("kind", ["optimizer", "model"])
def test_a_hostile_file_runs_nothing(tmp_path, kind):
    theirs, sprung = tmp_path / "theirs", tmp_path / "sprung"
    theirs.mkdir()
    lay_trap(theirs, Touch(sprung), kind)
    with pytest.raises(CheckpointError, match=r"posix\.mkdir.*would run code"):
        import_deepspeed(theirs, tmp_path / "ours")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]
    torch.load(next(theirs.glob("*optim*" if kind == "optimizer" else "mp_*")), weights_only=False)
    assert sprung.exists()  # the trap does work


def test_a_class_that_is_not_on_the_list_is_refused_by_name(tmp_path):
    lay_trap(tmp_path, Unknown(), "model")
    with pytest.raises(CheckpointError, match=r"test_import_deepspeed\.Unknown"):
        import_deepspeed(tmp_path, tmp_path.parent / "ours")


class Watched(Files):
    """Takes note of how much memory of its own the process has while it writes."""

    def __init__(self) -> None:
        self.most = own_memory()

    def write(self, file, data, offset):
        self.most = max(self.most, own_memory())
        return super().write(file, data, offset)


def own_memory():
    """Bytes that this process has and no file has."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


NUMEL, COUNT = 2**20, 14


def write_large(directory):
    """What two ranks write of `COUNT` parameters of 4 MiB under ZeRO-2, as far as the import looks at it."""
    shapes = {f"layers.{index}.weight": torch.Size([2**10, 2**10]) for index in range(COUNT)}
    for rank in range(2):
        flat = torch.full((COUNT * NUMEL // 2,), float(rank))
        inner = {
            "base_optimizer_state": {
                "state": {0: {"step": torch.tensor(3.0), "exp_avg": flat, "exp_avg_sq": flat.clone()}},
                "param_groups": [{"lr": 0.1, "params": [0]}],
            },
            "single_partition_of_fp32_groups": [flat.clone()],
            "partition_count": [2],
        }
        path = directory / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": inner}, path)
    steps = {"global_steps": 3, "skipped_steps": 0, "global_samples": 3}
    model = {"module": {}, "buffer_names": [], "param_shapes": [shapes], "shared_params": {}, **steps}
    torch.save(model, directory / "mp_rank_00_model_states.pt")


def import_large(rank, num_ranks, directory):
    write_large(directory)
    files = Watched()
    before = own_memory()
    import_deepspeed(directory, directory.parent / "ours", files=files)
    with closing(Reader(directory.parent / "ours")) as store:
        return files.most - before, store.tensor(f"optimizer.exp_avg.layers.{COUNT - 1}.weight")


def test_an_import_holds_one_parameter_at_a_time(ranks, tmp_path):
    (tmp_path / "theirs").mkdir()
    grown, last = ranks(1).run(import_large, tmp_path / "theirs")[0]
    assert bool((last == 1).all())
    buffers, parameter, slack = 64 * 2**20, 4 * NUMEL, 8 * 2**20
    assert grown <= buffers + 2 * parameter + slack
    assert buffers + 2 * parameter + slack < 3 * COUNT * parameter / 2


def test_elements_are_found_across_partitions():
    tensors = [torch.arange(0.0, 4.0), torch.arange(4.0, 8.0)]
    read = reader(tensors, [Extent(0, 1, 0, 3), Extent(1, 0, 3, 2)])
    assert read(0, 5).tolist() == [1, 2, 3, 4, 5]
    assert [read(start, start + 2).tolist() for start in range(4)] == [[1, 2], [2, 3], [3, 4], [4, 5]]

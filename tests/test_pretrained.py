"""Promise: `onefold.load_pretrained` brings files of safetensors straight into shards: the right numbers, read once.

Models are made on the meta device where nothing else is said, on real ranks, from real files.
"""

import resource

import pytest
import torch
from safetensors.torch import load_file

import onefold
from checks import live_bytes
from huggingface_models import VOCABULARY, bert, gpt2, llama, logits, lora, t5, text, tied_llama
from inside import units_of
from models import Stack, build, on_meta, wide
from onefold import Precision
from onefold.errors import WeightsError
from onefold.files import tensor_files
from plans import NAMED_PLANS
from ranks import Turn, squared
from weight_files import Odd, outcome, saved, whole

MODELS = {"gpt2": gpt2, "llama": llama, "llama, tied": tied_llama, "bert": bert, "t5": t5}
PLACES = [
    *((name, plan, 3) for name in MODELS for plan in ("zero_3", "offload")),
    *(("gpt2", plan, num_ranks) for plan in ("zero_0", "zero_3", "offload") for num_ranks in (1, 2)),
    ("llama", "zero_0", 3),
    ("t5", "zero_1", 3),
    ("bert", "offload_3", 3),
]


def loaded(rank, num_ranks, make, plan, directory):
    model = onefold.shard(on_meta(make), NAMED_PLANS[plan])
    assert onefold.load_pretrained(model, directory) == ([], [])
    return whole(model), logits(model)


@pytest.mark.parametrize(("name", "plan", "num_ranks"), PLACES)
def test_a_model_from_meta_gets_what_from_pretrained_gives(ranks, tmp_path, name, plan, num_ranks):
    want = build(MODELS[name])
    saved(want, tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for state, out in ranks(num_ranks).run(loaded, MODELS[name], plan, tmp_path):
        assert {key: value.tolist() for key, value in state.items()} == {
            key: value.tolist() for key, value in want.state_dict().items()
        }
        assert torch.equal(out, logits(want))


PRECISIONS = {
    "fp32": Precision(),
    "bf16, split": Precision(params="bf16"),
    "bf16, copy": Precision(params="bf16", master="fp32"),
    "fp16": Precision(params="fp16", loss_scale=8.0),
}


def trained(rank, num_ranks, plan, precision, directory):
    """Losses and weights of a few steps; the weights come from `directory` after the first step, or were there."""
    model = onefold.shard(build(Stack, seed=1 if directory else 0), NAMED_PLANS[plan], precision=precision)
    optimizer = onefold.SGD(model, lr=0.1)
    for step in range(4):
        squared(model, Turn(rank, step, sharded=True))
        if step == 0 and directory:  # what the optimizer would step with is not touched, but forgotten here
            optimizer.zero_grad()
            onefold.load_pretrained(model, directory)
        elif step:
            optimizer.step()
        optimizer.zero_grad()
    return whole(model)


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        *((plan, "bf16, split") for plan in ("zero_0", "zero_1", "zero_3", "offload", "offload_3")),
        *((plan, name) for plan in ("zero_1", "offload") for name in ("fp32", "bf16, copy", "fp16")),
    ],
)
def test_training_goes_on_from_exactly_what_was_loaded(ranks, tmp_path, plan, name):
    """In every form of exact weights and twin: the steps are those of a model that was made with the weights."""
    saved(build(Stack), tmp_path)
    want, got = (ranks(2).run(trained, plan, PRECISIONS[name], where) for where in (None, tmp_path))
    for rank in range(2):
        assert all(torch.equal(got[rank][key], want[rank][key]) for key in want[rank])


def loaded_odd(rank, num_ranks, plan, directory):
    model = onefold.shard(build(Odd, seed=7), NAMED_PLANS[plan])
    onefold.load_pretrained(model, directory)
    return whole(model), model.hidden


@pytest.mark.parametrize("plan", ["zero_1", "zero_3", "offload_3"])
def test_frozen_weights_buffers_and_tied_weights_are_loaded(ranks, tmp_path, plan):
    want = build(Odd)
    for state, hidden in ranks(3).run(loaded_odd, plan, saved(want, tmp_path)):
        assert state.keys() == want.state_dict().keys()
        assert all(torch.equal(state[key], value) for key, value in want.state_dict().items())
        assert torch.equal(hidden, build(Odd, seed=7).hidden)  # not in the files


def loaded_too_early(rank, num_ranks, plan, directory):
    model = onefold.shard(build(Stack), NAMED_PLANS[plan])
    loss = model(torch.ones(3, 4)).pow(2).mean()
    onefold.load_pretrained(model, directory)
    with pytest.raises(RuntimeError, match=r"updated between this forward|modified by an inplace"):
        loss.backward()


@pytest.mark.parametrize("plan", ["zero_0", "zero_3", "offload"])
def test_a_backward_never_mixes_old_weights_with_loaded_ones(ranks, tmp_path, plan):
    ranks(2).run(loaded_too_early, plan, saved(build(Stack), tmp_path))


# --- what is read and held


class Counting:
    """Stands before an open file or a slice of it, and counts the bytes of everything that is read."""

    nbytes = 0

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def get_slice(self, name):
        return Counting(self.inner.get_slice(name))

    def __getitem__(self, ranges):
        part = self.inner[ranges]
        Counting.nbytes += part.nbytes
        return part


def counted(rank, num_ranks, plan, precision, directory):
    """Bytes read, the most bytes held meanwhile above those of the sharded model, and the largest unit's part of it."""
    model = onefold.shard(on_meta(wide), NAMED_PLANS[plan], precision=precision)
    Counting.nbytes, before, seen = 0, live_bytes(), []
    real_open, real_read = tensor_files.safe_open, tensor_files.StoredTensors.read

    def read_and_look(self, name, box):
        seen.append(live_bytes() - before)
        return real_read(self, name, box).clone()  # a view of the mapped file would count as the whole file

    tensor_files.safe_open = lambda *args, **more: Counting(real_open(*args, **more))
    tensor_files.StoredTensors.read = read_and_look
    try:
        onefold.load_pretrained(model, directory)
    finally:
        tensor_files.safe_open, tensor_files.StoredTensors.read = real_open, real_read
    sizes = [unit.nbytes for unit in units_of(model)]
    return Counting.nbytes, max(seen), max(sizes) / sum(sizes)


@pytest.mark.parametrize(
    ("plan", "name", "parts"),
    [
        ("zero_0", "bf16, split", 1),
        ("zero_1", "bf16, copy", 3),
        ("zero_3", "fp32", 3),
        ("zero_3", "bf16, split", 3),
        ("offload", "bf16, split", 3),
        ("offload_3", "fp32", 3),
    ],
)
def test_a_rank_reads_its_share_and_holds_no_more_than_a_unit(ranks, tmp_path, plan, name, parts):
    model = build(wide)
    saved(model, tmp_path)
    nbytes = sum(param.nbytes for param in model.parameters())
    counts = ranks(3).run(counted, plan, PRECISIONS[name], tmp_path)
    assert all(read <= 1.05 * nbytes / parts for read, _, _ in counts), counts
    assert sum(read for read, _, _ in counts) == nbytes * 3 / parts  # nothing twice
    assert all(held <= 2 * nbytes * part for _, held, part in counts), counts  # the clone included
    assert all(part <= 2 / 16 for _, _, part in counts), "a unit is a small part of this model"


# --- files


def cut_off(directory):
    path = directory / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def gone(directory):
    (directory / "model-00002-of-00003.safetensors").unlink()


def other_index(text):
    return lambda directory: (directory / "model.safetensors.index.json").write_text(text)


def only_pickles(directory):
    for path in directory.iterdir():
        path.unlink()
    (directory / "pytorch_model.bin").write_bytes(b"")


BROKEN = {
    "cut off": (cut_off, ["model-00002-of-00003.safetensors could not be read"]),
    "gone": (gone, ["model-00002-of-00003.safetensors could not be read"]),
    "no index": (other_index("{}"), ["model.safetensors.index.json is no index"]),
    "an index that leads away": (other_index('{"weight_map": {"a": "../a"}}'), ["is no index"]),
    "an index that promises": (
        other_index('{"weight_map": {"a": "model-00001-of-00003.safetensors"}}'),
        ["model-00001-of-00003.safetensors lacks 'a'"],
    ),
    "pickles": (only_pickles, ["holds neither", "pytorch_model.bin is a pickle"]),
}


@pytest.mark.parametrize("name", list(BROKEN))
def test_broken_files_are_named_and_nothing_is_changed(ranks, tmp_path, name):
    damage, words = BROKEN[name]
    saved(build(gpt2), tmp_path, max_shard_size="18KB")
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    damage(tmp_path)
    for kind, message in ranks(2).run(outcome, gpt2, tmp_path, {}):
        assert kind is WeightsError
        assert all(word in message for word in words), message


def blinded(rank, num_ranks, directory):
    """Rank 1 may open no more files."""
    model = onefold.shard(build(Stack), onefold.ZERO_3)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, most[1]))
    try:
        onefold.load_pretrained(model, directory)
    except WeightsError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
    return None


def test_a_rank_that_cannot_read_stops_all(ranks, tmp_path):
    messages = ranks(3).run(blinded, saved(build(Stack), tmp_path))
    assert "could not be read" in messages[1]
    for rank in (0, 2):
        assert f"failed on rank 1, so rank {rank} stops too" in messages[rank]
        assert messages[1] in messages[rank]


def adapted(rank, num_ranks, directory):
    with pytest.raises(WeightsError, match="load the weights before adding adapters"):
        onefold.load_pretrained(onefold.shard(lora(), onefold.ZERO_3), directory)


def test_a_model_with_adapters_is_refused(ranks, tmp_path):
    ranks(2).run(adapted, saved(build(gpt2), tmp_path))


def round_trip(rank, num_ranks, plan, directory):
    model = onefold.shard(build(gpt2), NAMED_PLANS[plan], precision=Precision(params="bf16"))
    optimizer = onefold.AdamW(model, lr=1e-2)
    text(model, Turn(rank, 0, sharded=True))
    optimizer.step()
    onefold.export(model, directory / "first", dtype="fp32")
    again = onefold.shard(on_meta(gpt2), onefold.ZERO_2, precision=Precision(params="fp16"))
    onefold.load_pretrained(again, directory / "first")
    onefold.export(again, directory / "second", dtype="fp32")


def test_an_export_that_is_loaded_is_exact(ranks, tmp_path):
    ranks(3).run(round_trip, "zero_3", tmp_path)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert first["transformer.wte.weight"].shape[0] == VOCABULARY
    assert all(torch.equal(first[key], second[key]) for key in first)

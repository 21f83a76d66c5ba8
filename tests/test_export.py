"""Promise: `onefold.export` writes what `from_pretrained` loads: the same logits, exact numbers, every tensor once.

Several ranks, real files. Models are tiny, and nothing is downloaded.
"""

import json
import resource
from functools import partial

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import onefold
from checks import live_bytes
from huggingface_models import (
    bert,
    gpt2,
    llama,
    loaded,
    logits,
    lora,
    mixtral,
    t5,
    text,
    tied_llama,
)
from models import Stack, build, on_meta, wide
from onefold import Precision
from onefold.errors import OnefoldError, PrecisionError, WeightsError
from onefold.files import tensor_files
from onefold.plan.layout import boxes
from plans import NAMED_PLANS
from ranks import Turn, squared
from weight_files import Odd


def tied_by_hand():
    """The configuration does not know: `from_pretrained` looks for both names."""
    model = llama()
    model.lm_head.weight = model.model.embed_tokens.weight
    return model


MODELS = {
    "gpt2": gpt2,
    "llama": llama,
    "llama, tied": tied_llama,
    "llama, tied by hand": tied_by_hand,
    "bert": bert,
    "t5": t5,
    "mixtral": mixtral,
}
PLACES = {"zero_3": MODELS, "zero_1": ["gpt2", "t5"], "offload_3": ["llama, tied", "bert"], "zero_0": ["llama"]}


def trained_and_exported(rank, num_ranks, make, plan, target, options):
    model = onefold.shard(build(make), NAMED_PLANS[plan])
    optimizer = onefold.AdamW(model, lr=1e-2)
    text(model, Turn(rank, 0, sharded=True))
    optimizer.step()
    onefold.export(model, target, **options)
    return logits(model)


@pytest.mark.parametrize(("plan", "name"), [(plan, name) for plan, names in PLACES.items() for name in names])
def test_exported_models_give_equal_logits(ranks, tmp_path, plan, name):
    target = tmp_path / "out" / "model"
    each = ranks(3).run(trained_and_exported, MODELS[name], plan, target, {"max_file_bytes": 20_000})
    got = logits(loaded(target))
    assert not torch.equal(got, logits(build(MODELS[name])))
    for want in each:
        assert torch.equal(got, want)
    assert [path.name for path in target.parent.iterdir()] == ["model"]


def exported(rank, num_ranks, make, plan, precision, target, options):
    onefold.export(onefold.shard(build(make), NAMED_PLANS[plan], precision=precision), target, **options)


def test_a_bf16_export_is_what_the_model_computed_with(ranks, tmp_path):
    ranks(3).run(exported, gpt2, "zero_3", Precision(params="bf16"), tmp_path / "own", {})
    ranks(3).run(exported, gpt2, "zero_2", None, tmp_path / "asked", {"dtype": "bf16"})
    plain = build(gpt2).to(torch.bfloat16)
    for name in ("own", "asked"):
        model = loaded(tmp_path / name)
        assert model.dtype == torch.bfloat16
        assert torch.equal(logits(model), logits(plain))


MASTERS = {
    "bf16, split": Precision(params="bf16"),
    "bf16, copy": Precision(params="bf16", master="fp32"),
    "fp16": Precision(params="fp16"),
    "fp32": Precision(params="fp32"),
}


@pytest.mark.parametrize("plan", ["zero_0", "zero_1", "zero_3", "offload", "offload_3"])
@pytest.mark.parametrize("name", list(MASTERS))
def test_an_fp32_export_is_exact(ranks, tmp_path, plan, name):
    ranks(2).run(exported, Stack, plan, MASTERS[name], tmp_path / "out", {"dtype": "fp32"})
    got, want = load_file(tmp_path / "out" / "model.safetensors"), build(Stack).state_dict()
    assert set(got) == set(want)
    assert all(torch.equal(got[key], want[key]) for key in want)


# --- what goes in


@pytest.mark.parametrize("plan", ["zero_1", "zero_3", "offload_3"])
def test_frozen_weights_buffers_and_tied_weights_are_written_once(ranks, tmp_path, plan):
    ranks(3).run(exported, Odd, plan, None, tmp_path / "out", {})
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    got, want = load_file(tmp_path / "out" / "model.safetensors"), build(Odd).state_dict()
    assert set(got) == set(want) - {"last.weight"}
    for key, value in got.items():
        assert value.dtype == want[key].dtype
        assert torch.equal(value, want[key])
    written = (tmp_path / "out" / "model.safetensors").read_bytes()
    header = json.loads(written[8 : 8 + int.from_bytes(written[:8], "little")])
    for key, value in got.items():  # so that a reader may map the file
        assert header[key]["data_offsets"][0] % value.itemsize == 0


def test_files_keep_their_bound_and_the_index_says_where_everything_is(ranks, tmp_path):
    bound, target = 3000, tmp_path / "out"
    ranks(2).run(exported, gpt2, "zero_3", None, target, {"max_file_bytes": bound})
    index = json.loads((target / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in target.glob("*.safetensors"))
    assert files == [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
    total, places = 0, {}
    for name in files:
        with safe_open(target / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  it is no mapping
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= bound or len(tensors) == 1
        assert (target / name).stat().st_size <= size + 8 + 8 + 128 * (1 + len(tensors))
        places.update(dict.fromkeys(tensors, name))
        total += size
    assert index == {"metadata": {"total_size": total}, "weight_map": places}
    assert total == sum(param.nbytes for param in gpt2().parameters())


@pytest.mark.parametrize("dtype", list(tensor_files._DTYPES), ids=str)
def test_every_dtype_is_written_whole_and_read_in_part(tmp_path, dtype):
    want = torch.tensor([[0, 1], [1, 0], [1, 1]]).to(dtype)
    entry = tensor_files.Entry(name="x", shape=(3, 2), dtype=dtype, load=lambda: want)
    tensor_files.write_files(tmp_path, [entry], 1)
    stored = tensor_files.StoredTensors(tmp_path)
    assert stored.tensors == {"x": tensor_files.Stored(shape=(3, 2), dtype=dtype)}
    parts = [stored.read("x", box).reshape(-1) for box in boxes((3, 2), 1, 5)]
    assert all(part.dtype == dtype for part in parts)
    assert (
        torch.cat([part.view(torch.uint8) for part in parts]).tolist() == want.view(-1)[1:5].view(torch.uint8).tolist()
    )


def adapter_exported(rank, num_ranks, target):
    model = onefold.shard(build(partial(lora, saved=["lm_head"])), onefold.ZERO_3)
    optimizer = onefold.AdamW(model, lr=1e-1)
    text(model, Turn(rank, 0, sharded=True))
    optimizer.step()
    onefold.export(model, target)
    return logits(model)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning")  # peft's use of transformers
@pytest.mark.filterwarnings("ignore:.*ensure_weight_tying:UserWarning")  # the head is trained apart from its twin
def test_of_a_peft_model_the_adapter_is_exported(ranks, tmp_path):
    import peft

    each = ranks(3).run(adapter_exported, tmp_path / "out")
    base = build(gpt2)
    assert not torch.equal(logits(base), each[0])
    model = peft.PeftModel.from_pretrained(base, tmp_path / "out")
    assert torch.equal(logits(model), each[0])
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert sum(value.nbytes for value in written.values()) < sum(param.nbytes for param in base.parameters()) / 2


# --- how much memory, and what happens to training


def looked_at(rank, num_ranks, target):
    """The most bytes held while tensors are written, above those of the sharded model, and the bytes of the whole."""
    model = onefold.shard(on_meta(wide), onefold.ZERO_3, units=[nn.Linear])
    before, seen, write = live_bytes(), [], tensor_files._write_all

    def write_and_look(file, data):
        seen.append(live_bytes() - before)
        write(file, data)

    tensor_files._write_all = write_and_look
    try:
        onefold.export(model, target)
    finally:
        tensor_files._write_all = write
    return seen, sum(param.numel() * 4 for param in model.parameters())


def test_no_more_than_a_unit_is_whole(ranks, tmp_path):
    (seen, whole), (others, _) = ranks(2).run(looked_at, tmp_path / "out")
    assert len(seen) > 16  # units
    assert max(seen) <= 2.1 * whole / 16  # a unit, and the piece on its way into the file
    assert others == []


def stepped(rank, num_ranks, plan, target, options):
    model = onefold.shard(build(Stack), NAMED_PLANS[plan], precision=Precision(params="bf16"))
    optimizer = onefold.AdamW(model, lr=1e-2, **options)
    for step in range(3):
        squared(model, Turn(rank, step, sharded=True))
        if target is not None:
            onefold.export(model, target)
        optimizer.step()
        if target is not None:
            onefold.export(model, target)
        optimizer.zero_grad()
    with onefold.gathered(model):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("plan", ["zero_1", "zero_3", "offload", "offload_3"])
def test_training_goes_on_as_if_nothing_had_been_exported(ranks, tmp_path, plan):
    want, got = (ranks(2).run(stepped, plan, target, {})[1] for target in (None, tmp_path / "out"))
    assert all(torch.equal(got[name], want[name]) for name in want)


# --- what is there already, and failure


def test_an_old_export_is_replaced_and_other_files_stay(ranks, tmp_path):
    target = tmp_path / "out"
    ranks(2).run(exported, gpt2, "zero_3", None, target, {"max_file_bytes": 3000})
    (target / "tokenizer.json").write_text("{}")
    (target / "runs").mkdir()
    (target / "runs" / "notes.txt").write_text("mine")
    ranks(2).run(exported, llama, "zero_3", None, target, {})
    names = ["config.json", "generation_config.json", "model.safetensors", "runs", "tokenizer.json"]
    assert sorted(path.name for path in target.iterdir()) == names
    assert (target / "runs" / "notes.txt").read_text() == "mine"
    assert torch.equal(logits(loaded(target)), logits(build(llama)))
    assert list(tmp_path.iterdir()) == [target]


def refused(rank, num_ranks, make, target, options, quota):
    """The message of the error that each rank gets; on rank 0 files may have `quota` bytes (None: any)."""
    model = onefold.shard(build(make), onefold.ZERO_3)
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 0 and quota is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (quota, most[1]))
    try:
        onefold.export(model, target.format(rank=rank), **options)
    except OnefoldError as error:
        return type(error), str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    return None


def test_a_full_disk_stops_every_rank_and_keeps_the_old_export(ranks, tmp_path):
    """A limit on the size of files is what a test can have of a full disk: the system refuses the write halfway."""
    target = tmp_path / "out"
    ranks(3).run(exported, Stack, "zero_3", None, target, {})
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    for rank, (kind, message) in enumerate(ranks(3).run(refused, Stack, str(target), {}, 2000)):
        assert kind is WeightsError
        assert "model.safetensors could not be written: File too large" in message
        assert ("failed on rank 0" in message) == (rank != 0)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert list(tmp_path.iterdir()) == [target]


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def get_extra_state(self):
        return {"count": 3}

    def set_extra_state(self, state):
        pass


REFUSED = {
    "a file is there": (Stack, "{file}", {}, WeightsError, "is a file"),
    "a file is on the way": (Stack, "{file}/out", {}, WeightsError, "could not be written"),
    "ranks differ": (Stack, "{new}{{rank}}", {}, WeightsError, "directory"),
    "no such dtype": (Stack, "{new}", {"dtype": "int4"}, PrecisionError, "int4"),
    "no size": (Stack, "{new}", {"max_file_bytes": 0}, WeightsError, "max_file_bytes=0"),
    "extra state": (Stateful, "{new}", {}, WeightsError, "get_extra_state"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_cannot_be_exported_is_refused_on_every_rank(ranks, tmp_path, name):
    make, target, options, kind, words = REFUSED[name]
    (tmp_path / "file").write_text("mine")
    target = target.format(file=tmp_path / "file", new=tmp_path / "new")
    outcomes = ranks(3).run(refused, make, target, options, None)
    assert {issubclass(found, (kind, WeightsError)) for found, _ in outcomes} == {True}
    assert outcomes[0][0] is kind
    assert all(words in message for _, message in outcomes), outcomes
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


def inside_gathered(rank, num_ranks, target):
    model = onefold.shard(build(Stack), onefold.ZERO_3)
    with onefold.gathered(model, write=True), pytest.raises(OnefoldError, match="leave it first"):
        onefold.export(model, target)
    model.late = nn.Parameter(torch.ones(1))
    with pytest.raises(WeightsError, match=r"'late' was added to the model, or replaced, after onefold\.shard"):
        onefold.export(model, target)


def test_a_model_that_is_being_changed_is_refused(ranks, tmp_path):
    ranks(2).run(inside_gathered, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def state_dicts(rank, num_ranks, plan):
    model = onefold.shard(build(tied_llama), NAMED_PLANS[plan], precision=Precision(params="bf16"))
    return onefold.full_state_dict(model), onefold.full_state_dict(model, dtype="fp32")


@pytest.mark.parametrize("plan", ["zero_0", "zero_3", "offload_3"])
def test_a_full_state_dict_is_the_models_own_on_rank_0(ranks, plan):
    plain = build(tied_llama)
    (own, exact), (other, nothing) = ranks(2).run(state_dicts, plan)
    assert other == nothing == {}
    assert exact.keys() == own.keys() == plain.state_dict().keys()
    assert all(torch.equal(exact[name], tensor) for name, tensor in plain.state_dict().items())
    assert all(torch.equal(own[name], tensor) for name, tensor in plain.to(torch.bfloat16).state_dict().items())
    assert exact["lm_head.weight"].data_ptr() == exact["model.embed_tokens.weight"].data_ptr()

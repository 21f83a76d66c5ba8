"""Promise: `onefold.load_pretrained` finds a model's tensors by any of their names, and names what does not match."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from huggingface_models import bert, gpt2
from models import Stack, build
from onefold.errors import WeightsError
from weight_files import outcome, saved


def trunk():
    return gpt2().transformer


def renamed(source, target, change):
    """A directory with the tensors of another, named and made anew by `change(name, tensor)`."""
    target.mkdir()
    tensors = load_file(source / "model.safetensors")
    changed = [change(name, tensor) for name, tensor in tensors.items()]
    save_file({pair[0]: pair[1] for pair in changed if pair is not None}, target / "model.safetensors")
    return target


def test_a_head_may_be_loaded_from_names_without_the_prefix(ranks, tmp_path):
    """A tied head has no tensor of its own, so the trunk's files are all there is."""
    want = build(gpt2)
    saved(want.transformer, tmp_path)
    for unmatched, state in ranks(2).run(outcome, gpt2, tmp_path, {}):
        assert unmatched == ([], [])
        assert all(torch.equal(state[key], value) for key, value in want.state_dict().items())


def test_a_trunk_may_be_loaded_from_names_with_the_prefix(ranks, tmp_path):
    want = build(gpt2)
    saved(want, tmp_path)
    for unmatched, state in ranks(2).run(outcome, trunk, tmp_path, {}):
        assert unmatched == ([], [])
        assert all(torch.equal(state[key], value) for key, value in want.transformer.state_dict().items())


def test_any_name_of_a_tied_parameter_counts(ranks, tmp_path):
    want, mapping = build(gpt2), {"transformer.wte.weight": "lm_head.weight"}
    saved(want, tmp_path / "plain")
    renamed(tmp_path / "plain", tmp_path / "other", lambda name, tensor: (mapping.get(name, name), tensor))
    for unmatched, state in ranks(2).run(outcome, gpt2, tmp_path / "other", {}):
        assert unmatched == ([], [])
        assert torch.equal(state["transformer.wte.weight"], want.transformer.wte.weight)


def test_old_names_of_layer_norms_are_known(ranks, tmp_path):
    want = build(bert)
    saved(want, tmp_path / "plain")

    def older(name, tensor):
        name = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        return name, torch.full_like(tensor, 7) if "gamma" in name else tensor

    for unmatched, state in ranks(2).run(outcome, bert, renamed(tmp_path / "plain", tmp_path / "old", older), {}):
        assert unmatched == ([], [])
        assert state["bert.embeddings.LayerNorm.weight"].eq(7).all()


def test_not_strict_leaves_what_is_not_there(ranks, tmp_path):
    saved(build(Stack), tmp_path / "plain")

    def other(name, tensor):
        return ("stranger", tensor) if name == "head.weight" else (name, tensor)

    want, kept = build(Stack).state_dict(), build(Stack, seed=3).state_dict()["head.weight"]
    renamed(tmp_path / "plain", tmp_path / "other", other)
    for unmatched, state in ranks(2).run(outcome, Stack, tmp_path / "other", {"strict": False}):
        assert unmatched == (["head.weight"], ["stranger"])
        assert torch.equal(state["head.weight"], kept)
        assert torch.equal(state["embed.weight"], want["embed.weight"])


WRONG = {
    "missing": (
        lambda name, tensor: None if name == "head.bias" else (name, tensor),
        ["not in the files: 'head.bias'"],
    ),
    "unexpected": (
        lambda name, tensor: (name.replace("head.bias", "head.bais"), tensor),
        ["not in the model: 'head.bais'", "for 'head.bias', did you mean 'head.bais'?"],
    ),
    "another shape": (
        lambda name, tensor: (name, tensor[:1].clone() if name == "head.weight" else tensor),
        ["'head.weight' is (1, 8) in the files, (2, 8) in the model"],
    ),
    "packed": (
        lambda name, tensor: (name, tensor.to(torch.int8) if name == "head.weight" else tensor),
        ["'head.weight' is torch.int8 in the files, which cannot be cast to the model's torch.float32"],
    ),
    "a prefix": (
        lambda name, tensor: (f"module.{name}", tensor),
        ["'embed.weight'", "5 more", "the files' names begin with 'module.' and the others do not"],
    ),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_what_does_not_match_is_named_and_nothing_is_changed(ranks, tmp_path, name):
    change, words = WRONG[name]
    saved(build(partial(Stack, depth=1)), tmp_path / "plain")
    renamed(tmp_path / "plain", tmp_path / "other", change)
    for kind, message in ranks(2).run(outcome, partial(Stack, depth=1), tmp_path / "other", {}):
        assert kind is WeightsError
        assert all(word in message for word in words), message

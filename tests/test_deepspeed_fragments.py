"""Promise: `safe_get_*` and `safe_set_*` see and change a parameter's gradient, exact weights and optimizer state as if
they were whole, wherever they rest; and `zero_to_fp32` reads exact weights out of a checkpoint."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import onefold.deepspeed as deepspeed
from checkpoint_models import WORDS, Net
from onefold.deepspeed import utils, zero
from onefold.deepspeed.utils import zero_to_fp32
from onefold.errors import CheckpointError, ConfigError, OnefoldError

LEVELS = {
    "zero0": {"stage": 0},
    "zero1": {"stage": 1},
    "zero3": {"stage": 3},
    "offload": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "offload3": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}
HYPER = {"lr": 0.05, "weight_decay": 0.1, "eps": 1e-3}
STATES = ("exp_avg", "exp_avg_sq")


def settings(level, **more):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": LEVELS[level],
        "optimizer": {"type": "AdamW", "params": HYPER},
        **more,
    }


def net():
    torch.manual_seed(1)
    return Net()


def loss_of(model, step, rank, num_ranks):
    words = torch.randint(WORDS, (4, 5), generator=torch.Generator().manual_seed(step)).chunk(num_ranks)[rank]
    return nn.functional.cross_entropy(model(words[:, :-1]).float().flatten(0, 1), words[:, 1:].flatten())


def trained(model):
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


class Plain:
    """The same training by torch alone, on the whole batch."""

    def __init__(self):
        self.model = net()
        self.optimizer = torch.optim.AdamW(trained(self.model).values(), **HYPER)

    def backward(self, step):
        self.optimizer.zero_grad()
        loss_of(self.model, step, 0, 1).backward()


def close(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], atol=2e-5, rtol=1e-4, msg=name)


def full_states(model):
    return {
        f"{state}.{name}": utils.safe_get_full_optimizer_state(param, state)
        for name, param in trained(model).items()
        for state in STATES
    }


def plain_states(plain):
    return {
        f"{state}.{name}": plain.optimizer.state[param][state]
        for name, param in trained(plain.model).items()
        for state in STATES
    }


def see_and_change(rank, num_ranks, level):
    """Two steps; before the second, gradients, weights and states are changed in both."""
    plain = Plain()
    engine = deepspeed.initialize(model=net(), config=settings(level))[0]
    ours, theirs = trained(engine.module), trained(plain.model)
    assert utils.safe_get_full_grad(ours["embed.weight"]) is None
    for step in range(2):
        engine.backward(loss_of(engine, step, rank, num_ranks))
        plain.backward(step)
        close(
            {name: utils.safe_get_full_grad(param) for name, param in ours.items()},
            {name: param.grad for name, param in theirs.items()},
        )
        if step:
            change(ours, theirs, plain)
        engine.step()
        plain.optimizer.step()
        close({name: utils.safe_get_full_fp32_param(param) for name, param in ours.items()}, theirs)
        close(full_states(engine.module), plain_states(plain))
    assert utils.safe_get_full_optimizer_state(ours["embed.weight"], "momentum_buffer") is None
    frozen = engine.module.frozen.weight
    assert torch.equal(utils.safe_get_full_fp32_param(frozen), plain.model.frozen.weight)
    with zero.GatheredParameters(list(ours.values())):
        close({name: param.detach().clone() for name, param in ours.items()}, theirs)


def change(ours, theirs, plain):
    name, other = "blocks.1.up.weight", "blocks.0.norm.weight"
    utils.safe_set_full_grad(ours[name], 2 * utils.safe_get_full_grad(ours[name]))
    utils.safe_update_full_grad_vectorized([ours[other]], lambda grad, param: grad + param.dim())
    utils.safe_set_full_fp32_param(ours[other], 1.5 * utils.safe_get_full_fp32_param(ours[other]))
    value = 0.5 * utils.safe_get_full_optimizer_state(ours[name], "exp_avg")
    utils.safe_set_full_optimizer_state(ours[name], value, "exp_avg")
    with torch.no_grad():
        theirs[name].grad.mul_(2)
        theirs[other].grad.add_(1)
        theirs[other].mul_(1.5)
        plain.optimizer.state[theirs[name]]["exp_avg"].mul_(0.5)


@pytest.mark.parametrize(
    ("level", "num_ranks"),
    [("zero0", 2), ("zero1", 2), ("zero3", 1), ("zero3", 2), ("offload", 2), ("offload3", 2)],
    ids=lambda value: str(value),
)
def test_what_is_seen_and_changed_is_what_torch_computes(ranks, level, num_ranks):
    ranks(num_ranks).run(see_and_change, level)


def keep_exact(rank, num_ranks, level, number_format):
    engine = deepspeed.initialize(model=net(), config=settings(level, **{number_format: {"enabled": True}}))[0]
    param = engine.module.blocks[0].up.weight
    value = torch.linspace(-1, 1, param.numel()).view(param.shape) / 3
    utils.safe_set_full_fp32_param(param, value)
    with zero.GatheredParameters(param):
        computed = param.detach().float()
    torch.testing.assert_close(computed, value, atol=4e-3, rtol=0)
    return torch.equal(utils.safe_get_full_fp32_param(param), value) and not torch.equal(computed, value)


@pytest.mark.parametrize(
    ("level", "number_format"), [("zero1", "fp16"), ("zero3", "bf16"), ("zero3", "fp16"), ("offload", "bf16")]
)
def test_exact_weights_are_kept_exactly(ranks, level, number_format):
    assert ranks(2).run(keep_exact, level, number_format) == [True, True]


def see_parts(rank, num_ranks):
    engine = deepspeed.initialize(model=net(), config=settings("zero3"))[0]
    engine.backward(loss_of(engine, 0, rank, num_ranks))
    found = {}
    for name, param in trained(engine.module).items():
        grad = utils.safe_get_local_grad(param)
        utils.safe_set_local_grad(param, 3 * grad)
        assert torch.equal(utils.safe_get_local_grad(param), 3 * grad)
        found[f"grad.{name}"] = 3 * grad, utils.safe_get_full_grad(param)
    engine.step()
    for name, param in trained(engine.module).items():
        weight, state = utils.safe_get_local_fp32_param(param), utils.safe_get_local_optimizer_state(param, "exp_avg")
        utils.safe_set_local_fp32_param(param, weight + 1)
        utils.safe_set_local_optimizer_state(param, state + rank, "exp_avg")
        found[f"weight.{name}"] = weight + 1, utils.safe_get_full_fp32_param(param)
        found[f"state.{name}"] = state + rank, utils.safe_get_full_optimizer_state(param, "exp_avg")
    return found


def test_parts_of_all_ranks_together_are_the_whole(ranks):
    first, second = ranks(2).run(see_parts)
    assert first.keys() == second.keys()
    for name, (part, whole) in first.items():
        assert torch.equal(whole, second[name][1]), name
        assert torch.equal(torch.cat([part, second[name][0]]), whole.view(-1)), name


def refuse(rank, num_ranks, what):
    engine = deepspeed.initialize(model=net(), config=settings("zero1"))[0]
    param = engine.module.embed.weight
    ACTS[what][0](param)


ACTS = {
    "another shape": (lambda p: utils.safe_set_full_fp32_param(p, torch.ones(3)), r"embed\.weight is \[11, 8\].*\[3\]"),
    "no such state": (lambda p: utils.safe_set_full_optimizer_state(p, torch.ones(11, 8), "mu"), "no 'mu'"),
    "no gradient": (lambda p: utils.safe_set_full_grad(p, torch.ones(11, 8)), "call backward first"),
    "parts of what is whole": (utils.safe_get_local_fp32_param, "stage 3"),
}


@pytest.mark.parametrize("what", ACTS)
def test_what_cannot_be_is_refused_by_name(ranks, what):
    with pytest.raises(OnefoldError, match=ACTS[what][1]):
        ranks(1).run(refuse, what)


def test_parameters_that_are_not_sharded_have_no_exact_weights_of_their_own():
    param = nn.Parameter(torch.ones(2))
    assert utils.safe_get_full_fp32_param(param) is utils.safe_get_full_optimizer_state(param, "exp_avg") is None
    param.grad = torch.ones(2)
    assert utils.safe_get_full_grad(param) is param.grad
    with pytest.raises(OnefoldError, match=r"deepspeed\.initialize"):
        utils.safe_set_full_fp32_param(param, torch.ones(2))


def write(rank, num_ranks, directory):
    engine = deepspeed.initialize(model=net(), config=settings("zero3", bf16={"enabled": True}))[0]
    engine.backward(loss_of(engine, 0, rank, num_ranks))
    engine.step()
    engine.save_checkpoint(directory)
    found = {name: utils.safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()}
    return found | dict(engine.module.named_buffers())


def test_exact_weights_are_read_out_of_a_checkpoint(ranks, tmp_path):
    wanted, _ = ranks(2).run(write, str(tmp_path / "run"))
    wanted["head.weight"] = wanted["embed.weight"]
    found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "run")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())
    assert found["head.weight"] is found["embed.weight"]
    loaded = zero_to_fp32.load_state_dict_from_zero_checkpoint(Net(), tmp_path / "run", tag="global_step1")
    assert all(torch.equal(value, wanted[name]) for name, value in loaded.state_dict().items())
    without = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "run", exclude_frozen_parameters=True)
    assert wanted.keys() - without.keys() == {"frozen.weight", "frozen.bias"}


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("exclude", [False, True])
def test_exact_weights_are_written_for_others(ranks, tmp_path, safe, exclude):
    from safetensors.torch import load_file

    ranks(1).run(write, str(tmp_path / "run"))
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(
        tmp_path / "run", tmp_path / "out", "1KB", safe_serialization=safe, exclude_frozen_parameters=exclude
    )
    files = sorted((tmp_path / "out").glob("*.safetensors" if safe else "*.bin"))
    assert (len(files) > 1) == (safe and not exclude)
    found = {}
    for file in files:
        found |= load_file(file) if safe else torch.load(file, weights_only=True)
    wanted = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "run", None, exclude)
    assert found.keys() - {"head.weight"} == wanted.keys() - {"head.weight"}
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())


def test_the_script_in_a_checkpoints_directory_writes_exact_weights_or_says_why_not(ranks, tmp_path):
    ranks(1).run(write, str(tmp_path))
    command = [sys.executable, "zero_to_fp32.py", ".", "out", "--tag"]
    subprocess.run([*command, "global_step1"], check=True, cwd=tmp_path)
    wanted = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    found = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(value, wanted[name]) for name, value in found.items())
    ended = subprocess.run([*command, "other"], check=False, cwd=tmp_path, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (2, "zero_to_fp32.py: error: there is no checkpoint other\n")


def test_what_is_no_checkpoint_of_ours_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="latest"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path, tag="global_step3")
    (tmp_path / "global_step3").mkdir()
    (tmp_path / "global_step3" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    with pytest.raises(CheckpointError, match="import-deepspeed"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path, tag="global_step3")
    with pytest.raises(ConfigError, match="5GB"):
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(
            tmp_path, tmp_path, "many", safe_serialization=True, tag="global_step3"
        )

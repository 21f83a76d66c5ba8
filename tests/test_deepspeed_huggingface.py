"""Promise: scripts written for DeepSpeed, with transformers' Trainer or accelerate, run on Onefold after one call of
`onefold.deepspeed.install()`, and compute what they compute with DeepSpeed."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import huggingface_runs
from apart import finish, start
from checks import equal
from huggingface_lora import KINDS
from ranks import needs_deepspeed


def run(kind, directory):
    (directory / kind).mkdir()
    return start(huggingface_runs.__file__, kind, directory / kind)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What came out, by kind and name."""
    directory = tmp_path_factory.mktemp("huggingface")
    running = {"onefold": run("onefold", directory)}
    if find_spec("deepspeed") is not None:
        running["deepspeed"] = run("deepspeed", directory)
    for process in running.values():
        finish(process)

    def result(kind, name):
        return torch.load(Path(directory) / kind / f"{name}.pt", weights_only=True)

    return result


def close(found, wanted, within=1e-4):
    return pytest.approx(wanted, abs=within, rel=within) == found


@needs_deepspeed
@pytest.mark.parametrize("kind", ["zero2", "zero3", "activations made again", "sgd", "a new head", "evaluated"])
def test_the_trainer_computes_what_it_computes_with_deepspeed(results, kind):
    ours, theirs = (results(library, "levels")[kind] for library in ("onefold", "deepspeed"))
    assert ours.keys() == theirs.keys()
    for what, found in ours.items():
        assert close(found, theirs[what]), what


@pytest.mark.parametrize("name", ["zero0", "zero1", "offload3"])
def test_the_trainer_computes_the_same_wherever_state_rests(results, name):
    assert close(results("onefold", "plans")[name]["losses"], results("onefold", "levels")["zero3"]["losses"], 1e-5)


def test_optimizer_and_schedule_of_the_configuration_are_used(results):
    found, other = results("onefold", "plans")["own-offload"], results("onefold", "levels")["zero3"]
    assert found["rates"] == [0.0, 0.02, 0.02, 0.01] != other["rates"]
    assert found["losses"][:2] == pytest.approx(other["losses"][:2], abs=1e-5)
    assert found["losses"][2] > other["losses"][2] + 0.1  # its first two steps are at rate 0


def test_where_whole_weights_are_not_asked_for_a_checkpoint_is_saved(results):
    assert {"latest", "global_step4"} < set(results("onefold", "plans")["parts"])
    assert not any(name.endswith(".safetensors") for name in results("onefold", "plans")["parts"])


def test_a_resumed_run_goes_on_under_another_level_as_if_it_had_not_stopped(results):
    found = results("onefold", "resumed")
    assert found["rest"]["losses"] == found["whole"]["losses"] == results("onefold", "levels")["zero2"]["losses"]


def test_the_best_checkpoint_is_loaded_at_the_end_and_saved_whole(results):
    found = results("onefold", "resumed")
    assert found["whole"]["evaluated"] == found["best"] < found["rest"]["evaluated"]
    assert len(found["written"]) == len(found["weights"])
    assert all(torch.equal(value, found["weights"][name]) for name, value in found["written"].items())


@pytest.mark.parametrize("stage", [2, 3])
def test_adapters_are_trained_and_saved(results, stage):
    found = results("onefold", "adapted")
    trained, loaded = found[stage]
    assert torch.equal(trained, loaded)
    assert close(found[f"losses{stage}"], found["losses2"], 1e-5)
    assert found[f"losses{stage}"] != results("onefold", "levels")[f"zero{stage}"]["losses"]


def test_adapters_are_saved_without_what_they_adapt_and_go_on_under_another_level(results):
    found = results("onefold", "adapted")
    assert len(found["saved"]) == 4
    assert all("lora_" in name for name in found["saved"])
    assert close(found["resumed"], found["losses3"], 1e-5)


def test_a_model_made_of_a_configuration_rests_in_parts_and_has_its_own_initializers_values(results):
    found = results("onefold", "grown")
    assert found["partitioned"]
    assert {name: value.shape for name, value in found["split"].items()} == {
        name: value.shape for name, value in found["plain"].items()
    }
    for name, value in found["split"].items():
        assert value.std().item() == pytest.approx(found["plain"][name].std().item(), abs=0.05), name


@needs_deepspeed
def test_a_model_made_of_a_configuration_has_the_values_that_it_has_with_deepspeed(results):
    ours, theirs = (results(kind, "grown")["split"] for kind in ("onefold", "deepspeed"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_made_inside_of_init_have_the_values_of_those_made_outside_and_train_as_they_do(results, kind):
    found = results("onefold", "born")[kind]
    assert set(found["partitioned"]) == {"PartitionedParameter"}
    assert equal(found["split"], found["whole"])
    assert found["trained split"]["losses"] == found["trained whole"]["losses"]
    assert equal(found["trained split"]["values"], found["trained whole"]["values"])
    changed = {
        name for name, value in found["split"].items() if not value.equal(found["trained split"]["values"][name])
    }
    assert changed
    assert all("lora_" in name or "modules_to_save" in name for name in changed)


@needs_deepspeed
def test_an_adapter_with_the_same_weights_trains_as_it_does_with_deepspeed(results):
    found, theirs = results("onefold", "born")["lora"], results("deepspeed", "born")
    assert close(found["trained split"]["losses"], theirs["trained whole"]["losses"])


@needs_deepspeed
def test_deepspeed_leaves_out_what_transformers_and_peft_write_into_weights_that_are_split(results):
    """Why losses may differ where a script makes its model inside of zero.Init: ours are those of the whole model."""
    theirs = results("deepspeed", "born")
    assert equal(theirs["split"], theirs["bare"])
    assert not equal(theirs["split"], results("onefold", "born")["lora"]["whole"])


@pytest.mark.parametrize("name", ["plugin", "file", "bf16"])
def test_a_loop_of_accelerates_trains_saves_and_loads(results, name):
    found = results("onefold", "accelerated")[name]
    exact = results("onefold", "accelerated")["plugin"]
    assert len(found["norms"]) == len(found["losses"]) // 2 == 4
    assert close(found["losses"][:4], exact["losses"][:4], 3e-2 if name == "bf16" else 1e-5)
    assert found["losses"][-1] < found["losses"][0]
    assert (found["again"] < found["losses"][0] - 0.3) == (name != "file")  # its schedule starts with two steps at 0
    assert found["unwrapped"] == "LlamaForCausalLM"
    assert len(found["names"]) == 21
    assert [len(row) for row in found["generated"]] == [5, 5]

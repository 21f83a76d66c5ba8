"""Promise: every name below is DeepSpeed's and is there, under `onefold.deepspeed` and, after `install`, under
`deepspeed`; what Onefold does not do is refused by name."""

import argparse
import ast
import json
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import onefold.deepspeed as deepspeed
from onefold.deepspeed import checkpointing, comm
from onefold.errors import ConfigError

NAMES = {
    "": (
        *("initialize", "init_distributed", "add_config_arguments", "get_accelerator", "DeepSpeedEngine"),
        *("DeepSpeedOptimizer", "zero", "comm", "ops", "runtime", "utils", "checkpointing", "pipe", "moe", "logger"),
        *("log_dist", "OnDevice", "__version__", "__version_major__", "init_inference", "PipelineModule"),
        *("tp_model_init", "DeepSpeedConfig", "DeepSpeedTransformerLayer", "DeepSpeedHybridEngine"),
    ),
    "accelerator": ("get_accelerator",),
    "checkpoint.utils": ("clone_tensors_for_torch_save",),
    "checkpointing": ("checkpoint", "configure", "is_configured", "reset", "non_reentrant_checkpoint"),
    "comm": (
        *("init_distributed", "is_initialized", "is_available", "get_rank", "get_world_size", "get_local_rank"),
        *(
            "get_global_rank",
            "get_world_group",
            "get_all_ranks_from_group",
            "new_group",
            "barrier",
            "monitored_barrier",
        ),
        *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "reduce", "reduce_scatter"),
        *("reduce_scatter_tensor", "broadcast", "broadcast_object_list", "gather", "scatter", "send", "recv", "isend"),
        *(
            "irecv",
            "monitored_barrier",
            "all_to_all",
            "all_to_all_single",
            "destroy_process_group",
            "ReduceOp",
            "log_summary",
        ),
    ),
    "moe": ("MoE",),
    "ops": ("adam", "adagrad", "lamb", "lion"),
    "ops.adam": ("DeepSpeedCPUAdam", "FusedAdam"),
    "ops.adagrad": ("DeepSpeedCPUAdagrad",),
    "ops.lamb": ("FusedLamb",),
    "ops.lion": ("DeepSpeedCPULion", "FusedLion"),
    "pipe": ("PipelineModule", "LayerSpec", "TiedLayerSpec"),
    "runtime.activation_checkpointing": ("checkpointing",),
    "runtime.activation_checkpointing.checkpointing": ("checkpoint", "configure"),
    "runtime.dataloader": ("DeepSpeedDataLoader", "RepeatingLoader"),
    "runtime.engine": ("DeepSpeedEngine",),
    "runtime.lr_schedules": (
        *("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "VALID_LR_SCHEDULES"),
    ),
    "runtime.utils": ("see_memory_usage", "empty_cache", "clip_grad_norm_"),
    "runtime.zero": ("Init", "GatheredParameters", "register_external_parameter", "TiledLinear"),
    "runtime.zero.partition_parameters": ("Init", "GatheredParameters", "zero_wrapper_for_fp_tensor_constructor"),
    "utils": (
        *("logger", "log_dist", "groups", "RepeatingLoader", "set_z3_leaf_modules", "z3_leaf_module"),
        *(f"safe_{verb}_full_{what}" for verb in ("get", "set") for what in ("fp32_param", "grad", "optimizer_state")),
        *(f"safe_{verb}_local_{what}" for verb in ("get", "set") for what in ("fp32_param", "grad", "optimizer_state")),
        "safe_update_full_grad_vectorized",
    ),
    "utils.groups": ("_get_data_parallel_group", "_get_data_parallel_world_size", "_get_sequence_parallel_group"),
    "utils.logging": ("logger", "log_dist", "print_dist"),
    "utils.tensor_fragment": (
        *(f"safe_{verb}_full_{what}" for verb in ("get", "set") for what in ("fp32_param", "grad", "optimizer_state")),
        *(f"safe_{verb}_local_{what}" for verb in ("get", "set") for what in ("fp32_param", "grad", "optimizer_state")),
        "safe_update_full_grad_vectorized",
    ),
    "utils.zero_to_fp32": (
        *("get_fp32_state_dict_from_zero_checkpoint", "load_state_dict_from_zero_checkpoint"),
        "convert_zero_checkpoint_to_fp32_state_dict",
    ),
    "zero": (
        *("Init", "GatheredParameters", "register_external_parameter", "unregister_external_parameter"),
        *("TiledLinear", "unwrap_model_for_generation"),
    ),
}

REFUSED = {
    "": (
        *("init_inference", "InferenceEngine", "DeepSpeedHybridEngine", "PipelineEngine", "PipelineModule", "OnDevice"),
        *("tp_model_init", "set_autotp_mode", "replace_transformer_layer", "DeepSpeedTransformerLayer"),
        *("DeepSpeedTransformerConfig", "DeepSpeedConfig", "default_inference_config"),
    ),
    "checkpointing": ("get_cuda_rng_tracker", "partition_activations_in_checkpoint"),
    "comm": ("log_summary",),
    "moe": ("MoE",),
    "ops.adam": ("ZenFlowCPUAdam", "ZenFlowSelectiveAdamW"),
    "ops.lamb": ("FusedLamb",),
    "pipe": ("PipelineModule", "LayerSpec", "TiedLayerSpec", "ProcessTopology"),
    "runtime.utils": ("clip_grad_norm_",),
    "utils.groups": ("_get_sequence_parallel_group", "_get_sequence_parallel_rank", "_get_expert_parallel_group"),
    "zero": ("TiledLinear", "TiledLinearReturnBias"),
}


def module_of(place, package="onefold.deepspeed"):
    return import_module(f"{package}.{place}" if place else package)


@pytest.mark.parametrize("place", NAMES)
def test_every_promised_name_is_there(place):
    assert [name for name in NAMES[place] if not hasattr(module_of(place), name)] == []


@pytest.mark.parametrize(("place", "name"), [(place, name) for place, names in REFUSED.items() for name in names])
def test_refused_names_say_why_and_what_is_nearest(place, name):
    thing = getattr(module_of(place), name)
    assert not isinstance(nn.Linear(1, 1), thing)
    with pytest.raises(ConfigError, match=rf"deepspeed\.[\w.]*{name}: .*; nearest: "):
        thing(nn.Linear(1, 1), config={})


def test_a_name_that_deepspeed_does_not_have_either_is_no_attribute():
    with pytest.raises(AttributeError, match="inititalize"):
        _ = deepspeed.inititalize


# --- install ---------------------------------------------------------------------------------------------------------

INSTALLED = """
import importlib, importlib.metadata, importlib.util, json, sys
names = json.loads(sys.argv[1])
import onefold.deepspeed
onefold.deepspeed.install()
onefold.deepspeed.install()
import deepspeed
import deepspeed.ops.adam as adam
from deepspeed.utils import safe_get_full_grad
assert deepspeed is onefold.deepspeed and adam is onefold.deepspeed.ops.adam
assert importlib.util.find_spec("deepspeed") is not None and importlib.util.find_spec("deepspeed.zero") is not None
assert importlib.metadata.version("deepspeed") == deepspeed.__version__
assert importlib.metadata.metadata("deepspeed")["Name"] == "deepspeed"
assert "deepspeed" in importlib.metadata.packages_distributions()
assert importlib.metadata.version("torch")
for place, listed in names.items():
    module = importlib.import_module(f"deepspeed.{place}" if place else "deepspeed")
    ours = importlib.import_module(f"onefold.deepspeed.{place}" if place else "onefold.deepspeed")
    assert module is ours and module.__name__ == module.__spec__.name == ours.__name__, place
    assert all(hasattr(module, name) for name in listed), place
inside = ("deepspeed.moe.layer", "deepspeed.comm.comm", "deepspeed.utils.logging.more")
for missing in ("deepspeed.inference", "deepspeed.runtime.zero.stage3", "deepspeed.inference.config", *inside):
    try:
        importlib.import_module(missing)
    except ModuleNotFoundError as error:
        assert "onefold.deepspeed has nothing for deepspeed." in str(error), error
    else:
        raise AssertionError(missing)
try:
    import deepspeed.inference
except ImportError as error:
    assert "there is no engine for inference" in str(error)
try:
    from deepspeed.moe.layer import MoE
except ImportError as error:
    assert "there is no expert parallelism" in str(error)
"""


def test_install_makes_deepspeed_mean_onefold():
    command = [sys.executable, "-c", INSTALLED, json.dumps(NAMES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("module", "message"),
    [("deepspeed", "is imported already"), ("accelerate.utils", "accelerate.utils looked for deepspeed before")],
)
def test_install_is_refused_where_it_comes_too_late(monkeypatch, module, message):
    finders = list(sys.meta_path)
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)
    monkeypatch.setitem(sys.modules, module, ModuleType(module))
    with pytest.raises(ConfigError, match=message):
        deepspeed.install()
    assert sys.meta_path == finders


# What libraries take and Onefold does not have: sequence parallelism, and what `accelerate launch` asks beforehand.
LACKED = ("deepspeed.runtime.sequence_parallel", "deepspeed.launcher", "deepspeed.utils.is_initialized")


def taken_by(path):
    """Dotted names of DeepSpeed's that a source file imports or looks up."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    is_imported = False
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "deepspeed" and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "deepspeed"]
            is_imported = is_imported or bool(names)
            yield from names
    for node in ast.walk(tree) if is_imported else ():
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("deepspeed."):
            yield ast.unparse(node)


def is_there(name):
    thing = deepspeed
    for part in name.split(".")[1:]:
        if not hasattr(thing, part):
            try:
                import_module(f"{thing.__name__}.{part}")
            except (ImportError, AttributeError):
                return False
        thing = getattr(thing, part)
    return True


@pytest.mark.parametrize("library", ["transformers", "accelerate", "peft"])
def test_every_name_that_a_library_takes_from_deepspeed_is_there(library):
    places = find_spec(library).submodule_search_locations
    sources = [path for place in places for path in Path(place).rglob("*.py") if "test_utils" not in path.parts]
    names = {
        name
        for path in sources
        if re.search(rb"^\s*(import|from) deepspeed", path.read_bytes(), re.MULTILINE)
        for name in taken_by(path)
    }
    assert "deepspeed" in names
    assert sorted(name for name in names if not is_there(name) and not name.startswith(LACKED)) == []


# --- the rest --------------------------------------------------------------------------------------------------------


def net():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def communicate(rank, num_ranks):
    comm.init_distributed()
    total = torch.ones(2) * rank
    comm.all_reduce(total)
    comm.all_reduce_coalesced([total])
    comm.broadcast(total, 1)
    comm.barrier()
    assert comm.get_all_ranks_from_group() == [0, 1]
    return comm.get_rank(), comm.get_world_size(), total.tolist(), deepspeed.get_accelerator().current_device_name()


def test_comm_is_torch_distributed(ranks):
    assert ranks(2).run(communicate) == [(0, 2, [2.0, 2.0], "cpu"), (1, 2, [2.0, 2.0], "cpu")]


def test_the_accelerator_answers_what_scripts_ask():
    device = deepspeed.get_accelerator()
    assert device is deepspeed.get_accelerator()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    assert device.device_name() == torch.device(device.current_device_name()).type == kind
    assert device.communication_backend_name() == {"cuda": "nccl", "cpu": "gloo"}[kind]
    assert device.is_available()
    assert device.is_bf16_supported()
    assert device.device_count() >= 1
    assert 0 < device.available_memory() <= device.total_memory()
    assert 0 <= device.memory_allocated() <= device.total_memory()
    assert device.max_memory_allocated() >= 0
    assert device.on_accelerator(torch.ones(1, device=kind))
    device.synchronize()
    device.empty_cache()


def test_options_of_the_command_line_are_read_by_initialize(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"train_batch_size": 3, "zero_optimization": {"stage": 2}}))
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    assert args.deepspeed
    assert deepspeed.initialize(args=args, model=net())[0].train_batch_size() == 3
    assert parser.parse_args([]).deepspeed_config is None


def test_activations_are_made_again_and_gradients_stay():
    model, other = net(), net()
    x = torch.randn(3, 4)
    calls = []
    model[1].register_forward_hook(lambda *_: calls.append(1))
    checkpointing.configure(None, partition_activations=True, num_checkpoints=4, synchronize=True)
    assert checkpointing.is_configured()
    checkpointing.reset()
    assert not checkpointing.is_configured()
    checkpointing.checkpoint(model, x).sum().backward()
    other(x).sum().backward()
    assert len(calls) == 2
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_activations_are_not_moved_to_the_host_or_split():
    class TwoRanks:
        def get_model_parallel_world_size(self):
            return 2

    with pytest.raises(ConfigError, match="save_on_cpu"):
        checkpointing.configure(checkpoint_in_cpu=True)
    with pytest.raises(ConfigError, match="2 ranks"):
        checkpointing.configure(TwoRanks())
    assert not checkpointing.is_configured()


def test_loaders_can_repeat_and_leaf_modules_are_found():
    loader = deepspeed.utils.RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
    model = net()
    assert deepspeed.utils.set_z3_leaf_modules(model, [nn.Linear, "Tanh"]) == [model[0], model[1], model[2]]
    with pytest.raises(ConfigError, match="Conv1d"):
        deepspeed.utils.set_z3_leaf_modules(model, [nn.Conv1d])


def test_tensors_anywhere_in_a_container_are_moved():
    tensor = torch.ones(2)
    found = deepspeed.runtime.utils.move_to_device({"a": [tensor, 3], "b": (tensor,)}, "meta")
    assert found["a"][0].is_meta
    assert found["b"][0].is_meta
    assert found["a"][1] == 3
    assert not tensor.is_meta


def test_what_is_cloned_shares_no_memory():
    whole = torch.ones(4)
    found = deepspeed.checkpoint.utils.clone_tensors_for_torch_save({"a": [whole[:2], 3]})
    assert found["a"][0].untyped_storage().nbytes() == 8
    assert found["a"][1] == 3


def test_logging_is_for_the_ranks_that_are_named(caplog):
    with caplog.at_level("INFO", logger="DeepSpeed"):
        deepspeed.log_dist("before", ranks=[0])
        deepspeed.runtime.utils.see_memory_usage("now")
        deepspeed.runtime.utils.see_memory_usage("then", force=True)
    assert [record.message.split(":")[0].split("] ")[-1] for record in caplog.records] == ["before", "then"]

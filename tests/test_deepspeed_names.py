"""Promise: every name below is DeepSpeed's and is there, under `onefold.deepspeed` and, after `install`, under
`deepspeed`; what Onefold does not do is refused by name."""

import argparse
import json
import subprocess
import sys
from importlib import import_module

import pytest
import torch
from torch import nn

import onefold
import onefold.deepspeed as deepspeed
from onefold.deepspeed import checkpointing, comm
from onefold.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from onefold.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from onefold.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from onefold.errors import ConfigError, OptimizerError

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
        *("irecv", "all_to_all", "all_to_all_single", "destroy_process_group", "ReduceOp", "log_summary"),
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
    with pytest.raises(AttributeError):
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
for missing in ("deepspeed.inference", "deepspeed.runtime.zero.stage3", "deepspeed.inference.config"):
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
from accelerate.utils import is_deepspeed_available
assert is_deepspeed_available()
from transformers.integrations import is_deepspeed_available
from transformers.integrations.deepspeed import HfDeepSpeedConfig
assert is_deepspeed_available() and HfDeepSpeedConfig.__mro__[1] is not object
"""
LATE = """
import sys, types
import onefold.deepspeed
sys.modules["deepspeed"] = types.ModuleType("deepspeed")
try:
    onefold.deepspeed.install()
except onefold.errors.ConfigError as error:
    assert "is imported already" in str(error), error
del sys.modules["deepspeed"]
sys.modules["accelerate.utils"] = types.ModuleType("accelerate.utils")
try:
    onefold.deepspeed.install()
except onefold.errors.ConfigError as error:
    assert "accelerate.utils looked for deepspeed before" in str(error), error
else:
    raise AssertionError
"""


@pytest.mark.parametrize("script", [INSTALLED, LATE], ids=["in time", "too late"])
def test_install_makes_deepspeed_mean_onefold(script):
    command = [sys.executable, "-c", script, json.dumps(NAMES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


# --- optimizers ------------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "FusedAdam": (lambda p: FusedAdam(p, lr=0.05, weight_decay=0.1), "AdamW", {"lr": 0.05, "weight_decay": 0.1}),
    "FusedAdam, L2": (
        lambda p: FusedAdam(p, 0.05, True, (0.8, 0.9), 1e-6, False, 0.1),
        "Adam",
        {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1},
    ),
    "DeepSpeedCPUAdam": (lambda p: DeepSpeedCPUAdam(p, lr=0.05), "AdamW", {"lr": 0.05, "weight_decay": 0.0}),
    "DeepSpeedCPUAdam, L2": (
        lambda p: DeepSpeedCPUAdam(p, lr=0.05, weight_decay=0.1, adamw_mode=False),
        "Adam",
        {"lr": 0.05, "weight_decay": 0.1},
    ),
    "DeepSpeedCPULion": (
        lambda p: DeepSpeedCPULion(p, lr=0.01, weight_decay=0.1),
        "Lion",
        {"lr": 0.01, "betas": (0.9, 0.999), "weight_decay": 0.1},
    ),
    "FusedLion": (lambda p: FusedLion(p, 0.01, (0.8, 0.9)), "Lion", {"lr": 0.01, "betas": (0.8, 0.9)}),
    "DeepSpeedCPUAdagrad": (
        lambda p: DeepSpeedCPUAdagrad(p, lr=0.05, weight_decay=0.1),
        "Adagrad",
        {"lr": 0.05, "weight_decay": 0.1},
    ),
    "Adagrad": (lambda p: torch.optim.Adagrad(p, lr=0.05), "Adagrad", {"lr": 0.05}),
}


def net():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def loss_of(model, step):
    return model(torch.randn(3, 4, generator=torch.Generator().manual_seed(step))).square().mean()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_run_as_onefolds_own_and_by_themselves(name):
    make, own, arguments = OPTIMIZERS[name]
    model, alone, direct = net(), net(), net()
    settings = {"train_micro_batch_size_per_gpu": 3, "gradient_clipping": 0.0, "zero_optimization": {"stage": 2}}
    engine = deepspeed.initialize(model=model, optimizer=make(model.parameters()), config=settings)[0]
    single = make(alone.parameters())
    direct = onefold.shard(direct, onefold.ZERO_2)
    optimizer = getattr(onefold, own)(direct, **arguments)
    for step in range(3):
        engine.backward(loss_of(engine, step))
        engine.step()
        loss_of(alone, step).backward()
        single.step(lambda: None)
        single.zero_grad()
        loss_of(direct, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found, wanted, by_itself in zip(model.parameters(), direct.parameters(), alone.parameters(), strict=True):
        assert torch.equal(found, wanted)
        torch.testing.assert_close(found.detach(), by_itself.detach(), atol=1e-6, rtol=1e-5)
    assert engine.optimizer.rule_name == optimizer.rule_name


@pytest.mark.parametrize("cls", [FusedAdam, DeepSpeedCPUAdam])
def test_adam_without_bias_correction_is_what_the_configuration_means_by_it(cls):
    found = []
    for mine in (True, False):
        model = net()
        given = {"optimizer": cls(model.parameters(), lr=0.05, bias_correction=False, weight_decay=0.1)} if mine else {}
        params = {"lr": 0.05, "bias_correction": False, "weight_decay": 0.1}
        settings = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": 2}}
        if not mine:
            settings["optimizer"] = {"type": "Adam", "params": params}
        engine = deepspeed.initialize(model=model, config=settings, **given)[0]
        engine.backward(loss_of(engine, 0))
        engine.step()
        found.append(list(model.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("cls", [FusedAdam, DeepSpeedCPUAdam, DeepSpeedCPUAdagrad])
def test_amsgrad_is_refused_as_in_deepspeed(cls):
    with pytest.raises(OptimizerError, match="amsgrad"):
        cls(net().parameters(), amsgrad=True)


# --- the rest --------------------------------------------------------------------------------------------------------


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
    assert device.is_available() and device.is_bf16_supported() and device.device_count() >= 1
    assert 0 < device.available_memory() <= device.total_memory()
    assert device.memory_allocated() >= 0 and device.max_memory_allocated() >= 0
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

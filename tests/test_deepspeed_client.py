"""Promise: what a script hands to `initialize` (configuration, parameters, optimizer, schedule, data) is used as it was
meant, or refused by name.
"""

import argparse
import copy
import json
import logging
import os
import socket
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import onefold
import onefold.deepspeed as deepspeed
from checks import same
from deepspeed_loops import WARM, Net, Run, parameters, settings, two_groups
from deepspeed_steps import ADAM, ONE, SCRIPT, engine_of, steps, weights
from onefold.deepspeed.loader import RepeatingLoader
from onefold.deepspeed.spec import UncorrectedAdam
from onefold.errors import ConfigError, OptimizerError, ShardError


@pytest.mark.parametrize("way", ["config", "config_params", "args", "path"])
def test_a_configuration_may_come_by_any_of_its_ways(way, tmp_path):
    config = {"train_batch_size": 7}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    args = argparse.Namespace(deepspeed_config=str(path), local_rank=-1)
    arguments = {"config": {"config": config}, "config_params": {"config_params": config}, "args": {"args": args}}
    engine = deepspeed.initialize(model=nn.Linear(2, 2), **(arguments | {"path": {"config": str(path)}})[way])[0]
    assert engine.train_batch_size() == 7
    assert engine.config == config
    assert args.local_rank == (0 if way == "args" else -1)


def decoupled(params, **hyper):
    return torch.optim.Adam(params, decoupled_weight_decay=True, **hyper)


class Renamed(torch.optim.AdamW):
    """Other arguments, the same arithmetic."""

    def __init__(self, params, learning_rate):
        super().__init__(params, lr=learning_rate)


class Halved(torch.optim.SGD):
    """Another arithmetic."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(0.5)
        return super().step(closure)


CLIENTS = {
    "AdamW": (lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, amsgrad=True), onefold.AdamW),
    "Adam": (lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3, weight_decay=0.1), onefold.Adam),
    "decoupled": (lambda p: decoupled(p, lr=0.01, eps=1e-3, weight_decay=0.1), onefold.AdamW),
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1), onefold.SGD),
    "Adagrad": (lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-3), onefold.Adagrad),
    "maximized": (lambda p: torch.optim.Adagrad(p, lr=0.01, eps=1e-3, maximize=True), onefold.Adagrad),
    "RMSprop": (lambda p: torch.optim.RMSprop(p, lr=0.01, alpha=0.9, eps=1e-3), onefold.Elementwise),
    "renamed": (lambda p: Renamed(p, learning_rate=0.01), onefold.AdamW),
    "another": (lambda p: Halved(p, lr=0.05), onefold.Elementwise),
    "uncorrected": (lambda p: UncorrectedAdam(p, lr=0.01, decoupled=False, weight_decay=0.1), onefold.Elementwise),
}


@pytest.mark.parametrize("name", CLIENTS)
@pytest.mark.parametrize("stage", [0, 3])
def test_an_optimizer_that_the_script_brings_does_what_it_did(name, stage):
    make, kind = CLIENTS[name]
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    engine = engine_of({**SCRIPT, "zero_optimization": {"stage": stage}}, model, optimizer=make(two_groups(model)))
    assert isinstance(engine.optimizer, kind)
    theirs, run = make(two_groups(plain)), Run(engine, 0, 1)
    steps(run, 0, 4)
    for micro_step in range(4):
        plain(*run.batch(micro_step)).backward()
        theirs.step()
        theirs.zero_grad()
    same(weights(engine), {n: p.detach() for n, p in plain.named_parameters()}, 1e-5)


def test_groups_are_shared_with_the_scripts_optimizer_both_ways():
    model = Net()
    mine = torch.optim.SGD(two_groups(model), lr=0.05)
    schedule = torch.optim.lr_scheduler.ExponentialLR(mine, 0.5)  # not handed over: the script steps it
    run = Run(engine_of(SCRIPT, model, optimizer=mine), 0, 1)
    steps(run, 0, 1)
    schedule.step()
    assert run.engine.get_lr() == [0.025, 0.0025]
    run.engine.optimizer.param_groups[0]["lr"] = 0.0
    assert mine.param_groups[0]["lr"] == 0.0
    before = weights(run.engine)
    steps(run, 1, 2)
    after = weights(run.engine)
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert moved == [name for name in before if "bias" in name]


@pytest.mark.filterwarnings("ignore:Detected call")  # of torch: the schedule's own optimizer never steps
def test_groups_are_shared_with_an_optimizer_that_the_scripts_was_made_of():
    """As accelerate does where updates run on the host: the schedule belongs to the one that is not handed over."""
    model = Net()
    first = torch.optim.AdamW(two_groups(model), lr=0.05)
    schedule = torch.optim.lr_scheduler.ExponentialLR(first, 0.5)
    mine = deepspeed.ops.adam.DeepSpeedCPUAdam(first.param_groups)
    run = Run(engine_of(SCRIPT, model, optimizer=mine), 0, 1)
    steps(run, 0, 1)
    schedule.step()
    assert run.engine.get_lr() == [0.025, 0.0025]
    for group in first.param_groups:
        group["lr"] = 0.0
    before = weights(run.engine)
    steps(run, 1, 2)
    same(weights(run.engine), before, 0)  # so updates read them too


@pytest.mark.filterwarnings("ignore:Detected call")  # of torch: the schedule's own optimizer never steps
def test_a_schedule_may_belong_to_an_optimizer_that_the_scripts_was_made_of():
    model = Net()
    first = torch.optim.AdamW(two_groups(model), lr=0.05)
    given = {"optimizer": deepspeed.ops.adam.DeepSpeedCPUAdam(first.param_groups)}
    schedule = torch.optim.lr_scheduler.ExponentialLR(first, 0.5)
    run = Run(engine_of(SCRIPT, model, **given, lr_scheduler=schedule), 0, 1)
    steps(run, 0, 4)
    assert run.engine.get_lr() == [0.05 * 0.5**run.engine.global_steps, 0.005 * 0.5**run.engine.global_steps]


def test_frozen_parameters_and_empty_groups_are_left_alone():
    model = Net()
    model.embed.requires_grad_(False)
    groups = [{"params": list(model.embed.parameters())}, {"params": []}, {"params": list(model.blocks.parameters())}]
    run = Run(engine_of(SCRIPT, model, optimizer=torch.optim.AdamW(groups, lr=0.1)), 0, 1)
    before = weights(run.engine)
    steps(run, 0, 2)
    assert len(run.engine.optimizer.param_groups) == 2
    after = weights(run.engine)
    moved = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"blocks"}  # the head is in no group


@pytest.mark.parametrize("given", [parameters, two_groups], ids=["parameters", "groups"])
def test_a_function_that_makes_the_optimizer_gets_the_parameters_as_they_were_given(given):
    model, seen = Net(), []

    def make(params):
        seen.append(params)
        return torch.optim.SGD(params, lr=0.1)

    engine = engine_of(SCRIPT, model, optimizer=make, model_parameters=given(model))
    want = list(given(model))
    assert [type(each) for each in seen[0]] == [type(each) for each in want]
    assert len(engine.optimizer.param_groups) == (1 if given is parameters else 2)


def test_parameters_of_a_model_on_the_meta_device_may_be_grouped():
    with torch.device("meta"):
        model = Net()
    engine = engine_of(settings(3), model, model_parameters=two_groups(model))
    run = Run(engine, 0, 1)
    steps(run, 0, 2)
    assert engine.get_lr() == [0.02, 0.005]
    assert all(bool(value.isfinite().all()) for value in weights(engine).values())


def test_the_scripts_optimizer_and_schedule_count_before_the_configurations_and_the_log_says_so(caplog):
    model = Net()
    mine = torch.optim.SGD(model.parameters(), lr=0.05)
    with caplog.at_level(logging.INFO, logger="onefold"):
        engine, optimizer, _, schedule = deepspeed.initialize(
            model=model,
            optimizer=mine,
            lr_scheduler=lambda given: torch.optim.lr_scheduler.ConstantLR(given, 0.1),
            config=settings(1, **WARM),
        )
    assert isinstance(optimizer, onefold.SGD)
    assert isinstance(schedule, torch.optim.lr_scheduler.ConstantLR)
    assert engine.get_lr() == [pytest.approx(0.005)]
    told = " ".join(caplog.messages)
    assert told.count("the script's optimizer, SGD, is used; AdamW(") == 1
    assert told.count("the script's schedule is used; WarmupLR(") == 1


def test_what_is_met_by_other_means_is_said(caplog):
    with caplog.at_level(logging.INFO, logger="onefold"):
        engine_of({**ONE, "bf16": {"enabled": True, "bf16_optimizer_states": True}})
    assert caplog.messages == [
        "the configuration: bf16.bf16_optimizer_states = true: optimizer state stays fp32: more memory, exact moments"
    ]


def used():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.ones(2)
    optimizer.step()
    return optimizer


def onefolds(model):
    return onefold.SGD(onefold.shard(nn.Linear(2, 2), onefold.ZERO_0))


REFUSED = {
    "no-configuration": ({"config": None}, ConfigError, "no configuration: give config="),
    "two-configurations": (
        {"config": ONE, "args": argparse.Namespace(deepspeed_config="x.json")},
        ConfigError,
        "config= and args.deepspeed_config are both given",
    ),
    "unknown-key": ({"config": {**ONE, "fp17": {}}}, ConfigError, "fp17: unknown key; did you mean fp16?"),
    "auto": ({"config": {"train_micro_batch_size_per_gpu": "auto"}}, ConfigError, "give micro_batch"),
    "no-model": ({"model": None}, ConfigError, "initialize needs a torch.nn.Module"),
    "mpu": ({"mpu": object()}, ConfigError, "mpu= asks for model parallelism"),
    "mesh": ({"mesh_param": (1, 1)}, ConfigError, "mesh_param= asks for sequence parallelism"),
    "no-optimizer": ({"optimizer": 3}, OptimizerError, "optimizer=3: give a torch.optim.Optimizer, or a function"),
    "no-optimizer-made": ({"optimizer": lambda params: 3}, OptimizerError, "returned 3, which is no torch.optim"),
    "used": ({"optimizer": lambda params: used()}, OptimizerError, "this SGD has made steps or loaded state"),
    "onefolds": ({"optimizer": onefolds}, OptimizerError, "initialize shards the model and makes Onefold's optimizer"),
    "whole-matrices": ({"optimizer": torch.optim.Adafactor}, OptimizerError, "Adafactor cannot run on flat shards"),
    "stranger": (
        {"model_parameters": [nn.Parameter(torch.ones(3))]},
        OptimizerError,
        r"group 0 holds a tensor of shape \(3,\) that is not a parameter of the model",
    ),
    "read-to-its-end": (
        {"config": {**ONE, **ADAM}, "model_parameters": iter(())},
        OptimizerError,
        "model_parameters is empty: no parameter is trained, or it is a generator that was read to its end",
    ),
    "mixed": ({"model_parameters": [nn.Parameter(torch.ones(3)), {}]}, OptimizerError, "not a mix"),
    "schedule-alone": ({"lr_scheduler": lambda optimizer: 3}, OptimizerError, "lr_scheduler= without an optimizer"),
    "another-schedule": (
        {
            "optimizer": torch.optim.SGD,
            "lr_scheduler": torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([nn.Parameter(torch.ones(1))])),
        },
        OptimizerError,
        "this ConstantLR sets the learning rates of another optimizer",
    ),
    "no-data": ({"training_data": 3}, ConfigError, "training data are a torch Dataset, not int"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_taken_is_refused_by_name(name):
    given, error, told = REFUSED[name]
    with pytest.raises(error, match=told):
        deepspeed.initialize(**({"model": nn.Linear(2, 2), "config": ONE} | given))


def test_a_parameter_in_two_groups_an_engine_and_a_sharded_model_are_refused():
    with pytest.raises(ConfigError, match="model= is an engine already"):
        engine_of(ONE, engine_of(ONE))
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight]}, {"params": [model.bias, model.weight]}]
    with pytest.raises(OptimizerError, match="'weight' is in two parameter groups"):
        engine_of({**ONE, **ADAM}, model, model_parameters=groups)
    with pytest.raises(ShardError, match="already sharded"):
        engine_of(ONE, engine_of(ONE).module)


# --- data


def seen_data(rank, num_ranks):
    data = TensorDataset(torch.arange(11.0).unsqueeze(1))
    config = {"train_micro_batch_size_per_gpu": 2, "dataloader_drop_last": True}
    engine = engine_of(config, nn.Linear(1, 1))
    loader = engine.deepspeed_io(data, num_local_io_workers=0)
    in_order = engine.deepspeed_io(data, batch_size=3, route="eval", num_local_io_workers=0)
    mine = [batch[0].flatten().tolist() for batch in loader]
    return mine, len(loader), [batch[0].flatten().tolist() for batch in in_order]


def test_the_loader_of_training_data_has_workers_and_makes_micro_batches():
    data = TensorDataset(torch.arange(5.0))
    engine, _, loader, _ = deepspeed.initialize(
        model=nn.Linear(1, 1),
        config={"train_batch_size": 4, "gradient_accumulation_steps": 2},
        training_data=data,
        collate_fn=lambda samples: [float(sample) for (sample,) in samples],
    )
    assert loader is engine.training_dataloader
    assert loader.num_workers == 2
    batches = list(loader)
    assert ([len(batch) for batch in batches], len(loader)) == ([2, 2, 1], 3)
    assert sorted(sample for batch in batches for sample in batch) == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_training_data_are_dealt_to_the_ranks(ranks):
    found = ranks(2).run(seen_data)
    first, second = ([x for batch in mine for x in batch] for mine, _, _ in found)
    assert [length for _, length, _ in found] == [3, 3]
    assert [len(mine) for mine in (first, second)] == [6, 6]
    assert {*first, *second} == {float(number) for number in range(11)}  # 12 are dealt: one comes twice
    assert [in_order for _, _, in_order in found] == [
        [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]],
        [[1.0, 3.0, 5.0], [7.0, 9.0, 0.0]],
    ]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(4.0))


def test_a_stream_is_loaded_as_it_is_and_a_loader_is_read_with_next_or_over_and_over():
    engine = engine_of({"train_batch_size": 2})
    loader = engine.deepspeed_io(Stream(), num_local_io_workers=0)
    with pytest.raises(TypeError, match="read with next"):
        next(loader)
    iter(loader)
    assert [next(loader).tolist(), next(loader).tolist()] == [[0.0, 1.0], [2.0, 3.0]]
    again = RepeatingLoader(loader)
    assert [next(again).tolist() for _ in range(3)] == [[0.0, 1.0], [2.0, 3.0], [0.0, 1.0]]
    assert loader.data_sampler is loader.sampler


# --- ranks

ALONE = """
import torch, torch.distributed as dist
from torch import nn
import onefold.deepspeed as deepspeed
if {first}:
    deepspeed.init_distributed()
engine, *_ = deepspeed.initialize(model=nn.Linear(2, 2), config={{"train_micro_batch_size_per_gpu": 1}})
print(engine.global_rank, engine.world_size, engine.local_rank, engine.train_batch_size(), dist.is_initialized())
"""


def nothing(rank, port):
    return {}


def launcher(rank, port):
    """What torchrun and DeepSpeed's own launcher say."""
    said = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in said.items()}


def mpirun(rank, port):
    names = {"RANK": rank, "LOCAL_RANK": rank, "SIZE": 2, "LOCAL_SIZE": 2}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()} | {"MASTER_PORT": str(port)}


STARTS = [(1, nothing, True), (1, nothing, False), (2, launcher, False), (2, mpirun, True)]


@pytest.mark.parametrize(("num_ranks", "says", "is_first"), STARTS, ids=["first", "alone", "launcher", "mpirun"])
def test_processes_become_ranks_as_any_launcher_says_or_are_alone(num_ranks, says, is_first):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    clean = {name: value for name, value in os.environ.items() if name not in launcher(0, 0)}
    clean |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", ALONE.format(first=is_first)]
    started = [
        subprocess.Popen(command, env=clean | says(rank, port), stdout=subprocess.PIPE, text=True)
        for rank in range(num_ranks)
    ]
    told = [process.communicate(timeout=120)[0].split() for process in started]
    is_set_up = str(says is not nothing or is_first)
    assert told == [[str(rank), str(num_ranks), str(rank), str(num_ranks), is_set_up] for rank in range(num_ranks)]


def test_ranks_that_mpi_started_on_several_machines_have_to_be_told_where_they_meet(monkeypatch):
    for name, value in {"RANK": "0", "SIZE": "4", "LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    with pytest.raises(ConfigError, match="mpirun started 4 ranks, 2 of them on this machine"):
        deepspeed.init_distributed()
    deepspeed.init_distributed(dist_init_required=False)

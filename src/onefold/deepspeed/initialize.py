"""Owns `initialize`: what a script and its configuration say, turned into a sharded model inside an engine."""

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onefold.comm.process_groups import all_ranks
from onefold.deepspeed.accelerator import get_accelerator
from onefold.deepspeed.auto_values import Given
from onefold.deepspeed.client_optimizer import choose_optimizer, choose_scheduler
from onefold.deepspeed.ds_attributes import add_ds_attributes
from onefold.deepspeed.engine import DeepSpeedEngine, Setup
from onefold.deepspeed.loader import DeepSpeedDataLoader
from onefold.deepspeed.source import Source, read
from onefold.deepspeed.spec import Translation
from onefold.deepspeed.translate import examine, translate
from onefold.deepspeed.values import said
from onefold.deepspeed.walk import walk
from onefold.deepspeed.world import init_distributed, is_launched, local_rank
from onefold.errors import ConfigError
from onefold.optim.optimizer import Optimizer
from onefold.setup.join_ranks import join_ranks
from onefold.setup.shard import shard

_log = logging.getLogger("onefold")


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: "torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None" = None,
    model_parameters: "Iterable[Any] | None" = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: "Callable[..., Any] | None" = None,
    config: "Mapping[str, Any] | str | Path | None" = None,
    mesh_param: Any = None,
    config_params: "Mapping[str, Any] | str | Path | None" = None,
) -> tuple[DeepSpeedEngine, Optimizer | None, DeepSpeedDataLoader | None, Any]:
    """Shard `model` as a DeepSpeed configuration says, and wrap it in an engine. Every rank calls it.

    Args:
        args: its `deepspeed_config`, if there is one, is the configuration; its `local_rank` is set.
        model: as for `onefold.shard`.
        optimizer: of torch.optim, or a function of parameters that makes one. It counts before the configuration's. Its
            groups and learning rates go on to be shared with the one that is returned.
        model_parameters: for the configuration's optimizer: parameters or groups of them, as for torch.optim. None is
            everything that is trained.
        training_data, collate_fn: a Dataset, which the loader that is returned deals to the ranks, and its collate_fn.
        lr_scheduler: a schedule of `optimizer`, or a function of an optimizer. It counts before the configuration's.
        config: a dict, the path of a JSON file, JSON, or JSON in base64. `config_params` is its older name.
        dist_init_required: False leaves torch.distributed to the script. distributed_port: has no effect.
        mpu, mesh_param: refused: there is data parallelism only.
    Returns:
        The engine, its optimizer, its loader and its schedule; None for what there is not.
    Raises:
        ConfigError: the configuration, or an argument, asks for what there is not; all keys concerned are named.
        OptimizerError: the optimizer cannot run on parts of parameters, or does not belong to the model.
        ShardError: the model cannot be sharded.
    """
    module = _module(model, mpu, mesh_param)
    source = _configuration(args, config, config_params)
    given = _given(module, dist_init_required)
    translation = _translated(source, given)
    chosen = choose_optimizer(module, optimizer, model_parameters, translation)
    setup = Setup(translation, walk(source, given).config, source.values, local_rank(), chosen.client, collate_fn)
    sharded = _sharded(module, translation)
    built = chosen.build(sharded, translation.max_grad_norm)
    engine = DeepSpeedEngine(sharded, built, choose_scheduler(lr_scheduler, built, chosen, translation), setup)
    if hasattr(args, "local_rank"):
        args.local_rank = engine.local_rank
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data)
    return engine, built, engine.training_dataloader, engine.lr_scheduler


def _translated(source: Source, given: Given) -> Translation:
    """The configuration in Onefold's terms. Says what is met by other means than DeepSpeed's; `report` has the rest."""
    translation = translate(source, given)
    for verdict in examine(source, given).verdicts:
        if verdict.word == "adapted":
            _log.info("%s: %s = %s: %s", source.name, verdict.path, said(verdict.value), verdict.text)
    return translation


def _sharded(module: nn.Module, translation: Translation) -> nn.Module:
    if translation.plan.params.partitioned:
        for number, param in enumerate(module.parameters()):
            add_ds_attributes(param, number)
    # As in DeepSpeed, a model on the host goes to the accelerator; shard moves it there in parts.
    with torch.device(get_accelerator().current_device_name()):
        return shard(module, **translation.shard_arguments)


def _given(module: nn.Module, dist_init_required: bool | None) -> Given:
    """What is known besides the configuration, once this process is a rank."""
    if is_launched():
        init_distributed(dist_init_required=dist_init_required)
    join_ranks()
    return Given(num_ranks=len(all_ranks() or (0,))).with_model(module)


def _module(model: Any, mpu: Any, mesh_param: Any) -> nn.Module:
    """The model, if it is one, and nothing is asked for that there is not."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model={model!r}: initialize needs a torch.nn.Module")
    if isinstance(model, DeepSpeedEngine):
        raise ConfigError("model= is an engine already: use it as it is, or make one of a new model")
    if mpu is not None:
        raise ConfigError(
            "mpu= asks for model parallelism, and there is data parallelism only: leave it out, and use "
            "stage 3 for a model that does not fit"
        )
    if mesh_param is not None:
        raise ConfigError("mesh_param= asks for sequence parallelism, and there is data parallelism only: leave it out")
    return model


def _configuration(args: Any, config: Any, config_params: Any) -> Source:
    """The one configuration that was given."""
    named = {
        "config=": config,
        "config_params=": config_params if config is None else None,  # as in DeepSpeed, the newer name counts
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
        "args.deepscale_config": getattr(args, "deepscale_config", None),
    }
    found = {name: value for name, value in named.items() if value is not None}
    if len(found) > 1:
        raise ConfigError(f"{' and '.join(found)} are both given: keep one configuration")
    if not found:
        raise ConfigError("no configuration: give config=, a dict or the path of a JSON file, or --deepspeed_config")
    return read(next(iter(found.values())))

"""Promise: optimizers made by DeepSpeed's names and arguments run as Onefold's own, and by themselves."""

import pytest
import torch
from torch import nn

import onefold
import onefold.deepspeed as deepspeed
from onefold.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from onefold.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from onefold.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from onefold.errors import OptimizerError

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

"""Promise: what a DeepSpeed configuration says - offloading, batch, "auto", formats, optimizer - is what runs."""

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import onefold
from onefold import Placement, Plan, Tier
from onefold.deepspeed import Given, report, translate
from onefold.errors import ConfigError

WHOLE, PART, HOST = Placement(False), Placement(True), Placement(True, Tier.HOST)
ONE = {"train_batch_size": 1}

OFFLOADS = [
    ({"stage": 1, "offload_optimizer": {"device": "cpu"}}, Plan(WHOLE, WHOLE, HOST)),
    ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, onefold.OFFLOAD),
    ({"stage": 2, "cpu_offload": True}, onefold.OFFLOAD),
    ({"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.25}}, onefold.OFFLOAD.keeping(0.75)),
    ({"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0}}, onefold.ZERO_2),
    ({"stage": 2, "offload_param": {"device": "cpu"}}, onefold.ZERO_2),
    ({"stage": 3, "offload_optimizer": {"device": "cpu"}}, Plan(PART, HOST, HOST)),
    ({"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}, onefold.OFFLOAD_3),
    ({"stage": 3, "offload_param": {"device": "cpu"}}, onefold.OFFLOAD_3),
    ({"stage": 3, "cpu_offload": True, "cpu_offload_params": True}, onefold.OFFLOAD_3),
    ({"stage": 3, "offload_optimizer": None, "offload_param": {"device": "none"}}, onefold.ZERO_3),
]


@pytest.mark.parametrize(("zero", "plan"), OFFLOADS, ids=[f"{n}" for n, _ in enumerate(OFFLOADS)])
def test_offloading_is_a_plan(zero, plan):
    assert translate({**ONE, "zero_optimization": zero}).plan == plan


BATCHES = [
    # train, micro, accumulation, ranks -> the three; None is refused
    ((32, None, None), 4, (32, 8, 1)),
    ((None, 8, None), 4, (32, 8, 1)),
    ((None, 8, 2), 4, (64, 8, 2)),
    ((64, 8, None), 4, (64, 8, 2)),
    ((64, None, 2), 4, (64, 8, 2)),
    ((64, 8, 2), 4, (64, 8, 2)),
    ((64, 8, 2), None, (64, 8, 2)),
    (("64", 8.0, "auto"), 4, (64, 8, 2)),
    ((64, 8, 4), 4, None),
    ((30, 8, None), 4, None),
    ((2, None, None), 4, None),
    ((7, None, 2), 1, None),
    ((65, 8, 2), None, None),
]


@pytest.mark.parametrize(("sizes", "ranks", "result"), BATCHES, ids=[f"{n}" for n, _ in enumerate(BATCHES)])
def test_batch_sizes_fit_or_are_refused_with_the_numbers(sizes, ranks, result):
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = {name: size for name, size in zip(names, sizes, strict=True) if size is not None}
    if result is None:
        with pytest.raises(ConfigError, match=r"train_batch_size: \d+ samples a step are not micro batch \d+ x"):
            translate(config, Given(num_ranks=ranks))
    else:
        done = translate(config, Given(num_ranks=ranks))
        assert (done.train_batch, done.micro_batch, done.accumulation) == result


AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto", "loss_scale_window": "auto"},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
}


def test_auto_comes_from_the_arguments_of_a_trainer_and_from_the_model(tmp_path):
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=3,
        max_grad_norm=0.7,
        learning_rate=5e-5,
        adam_beta1=0.8,
        adam_beta2=0.99,
        adam_epsilon=1e-6,
        weight_decay=0.2,
        warmup_steps=10,
        max_steps=200,
        bf16=True,
        use_cpu=True,
    )
    model = GPT2LMHeadModel(GPT2Config(n_embd=10, n_head=1, n_layer=1, vocab_size=11, n_positions=8))
    done = translate(AUTO, Given.from_arguments(arguments, num_ranks=2).with_model(model))
    assert (done.train_batch, done.micro_batch, done.accumulation) == (24, 4, 3)
    assert done.max_grad_norm == 0.7
    assert done.precision == onefold.Precision("bf16", cast_inputs=False)
    assert done.prefetch_bytes == 2 * 90
    assert done.optimizer.arguments == {"lr": 5e-5, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.2}
    expected = {"warmup_min_lr": 0.0, "warmup_max_lr": 5e-5, "warmup_num_steps": 10, "total_num_steps": 200}
    assert done.scheduler.arguments == expected


def test_auto_that_nothing_fills_in_is_refused_with_what_to_give_and_reported_as_open():
    with pytest.raises(ConfigError) as error:
        translate(AUTO)
    for name in ("micro_batch", "max_grad_norm", "precision", "lr", "betas", "warmup_steps", "total_steps"):
        assert f"give {name}" in str(error.value)
    assert "can be used, once filled in" in report(AUTO)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_auto_precision_is_the_models_own_where_no_trainer_says(dtype):
    model = nn.Linear(4, 4).to(dtype)
    config = {**ONE, "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}
    precision = translate(config, Given().with_model(model)).precision
    assert precision.param_dtype(dtype) == dtype
    assert (precision.loss_scale is None) == (dtype != torch.float16)


@pytest.mark.parametrize(
    ("config", "known", "path"),
    [
        ({"gradient_clipping": 1.0}, {"max_grad_norm": 0.5}, "gradient_clipping"),
        ({"train_micro_batch_size_per_gpu": 2}, {"micro_batch": 4}, "train_micro_batch_size_per_gpu"),
        ({"fp16": {"enabled": True}}, {"precision": "bf16"}, "fp16.enabled"),
        ({"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}, {"lr": 1e-4}, "optimizer.params.lr"),
    ],
    ids=["clipping", "micro batch", "precision", "lr"],
)
def test_a_value_that_contradicts_the_trainer_is_refused(config, known, path):
    with pytest.raises(ConfigError, match=f"  {path}: is .* was given; make them one, or write auto"):
        translate({"train_micro_batch_size_per_gpu": 4, **config}, Given(**known))


PRECISIONS = [
    ({}, onefold.Precision(cast_inputs=False)),
    (
        {"torch_autocast": {"enabled": True, "dtype": "torch.float16"}},
        onefold.Precision(
            cast_inputs=False,
            loss_scale=onefold.DynamicLossScale(window=2000, hysteresis=1, raise_at_minimum=False),
        ),
    ),
    ({"data_types": {"grad_accum_dtype": None}, "steps_per_print": float("inf")}, onefold.Precision(cast_inputs=False)),
    ({"fp16": {"enabled": True}}, onefold.Precision("fp16", loss_scale="dynamic", cast_inputs=False)),
    (
        {"fp16": {"enabled": True, "auto_cast": True, "loss_scale": 128}},
        onefold.Precision("fp16", loss_scale=128.0, cast_inputs=True),
    ),
    (
        {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 5, "hysteresis": 1,
                  "consecutive_hysteresis": True, "min_loss_scale": 2}},
        onefold.Precision("fp16", cast_inputs=False, loss_scale=onefold.DynamicLossScale(
            initial=256.0, window=5, hysteresis=1, consecutive_hysteresis=True, minimum=2.0)),
    ),
    ({"bfloat16": {"enabled": True}, "communication_data_type": "fp32"},
     onefold.Precision("bf16", "fp32", cast_inputs=False)),
    ({"data_types": {"grad_accum_dtype": "fp32"}}, onefold.Precision(None, "fp32", cast_inputs=False)),
]  # fmt: skip


@pytest.mark.parametrize(("config", "precision"), PRECISIONS, ids=[f"{n}" for n, _ in enumerate(PRECISIONS)])
def test_number_formats_and_the_loss_scale_are_those_written(config, precision):
    assert translate({**ONE, **config}).precision == precision


OPTIMIZERS = [
    ({"type": "Adam", "params": {"weight_decay": 0.1}}, torch.optim.AdamW, {"weight_decay": 0.1}),
    ({"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}, torch.optim.Adam, {"weight_decay": 0.1}),
    ({"type": "AdamW", "params": {"adam_w_mode": False}}, torch.optim.AdamW, {"weight_decay": 0.0}),
    ({"type": "Adam", "params": {"torch_adam": True}}, torch.optim.AdamW, {"weight_decay": 0.01}),
    ({"type": "SGD", "params": {"lr": "1e-2", "momentum": 0.9}}, torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    ({"type": "adagrad", "params": {"lr": 0.1}}, torch.optim.Adagrad, {"lr": 0.1}),
    ({"type": "RMSprop", "params": {"alpha": "0.9"}}, torch.optim.RMSprop, {"alpha": 0.9}),
]


@pytest.mark.parametrize(("written", "cls", "arguments"), OPTIMIZERS, ids=[f"{n}" for n, _ in enumerate(OPTIMIZERS)])
def test_an_optimizer_updates_as_the_class_it_means(written, cls, arguments):
    torch.manual_seed(0)
    model, twin = nn.Linear(5, 3), nn.Linear(5, 3)
    twin.load_state_dict(model.state_dict())
    done = translate({**ONE, "optimizer": written})
    assert done.plan == onefold.ZERO_0
    ours = done.optimizer.build(onefold.shard(model, done.plan, precision=done.precision), max_grad_norm=None)
    theirs = cls(twin.parameters(), **arguments)
    for _ in range(3):
        x = torch.randn(4, 5)
        for each, optimizer in ((model, ours), (twin, theirs)):
            optimizer.zero_grad()
            each(x).square().mean().backward()
            optimizer.step()
    assert torch.allclose(model.weight, twin.weight, rtol=1e-6, atol=0)


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_without_bias_correction_follows_its_formula_on_shards(decoupled):
    torch.manual_seed(0)
    params = {"lr": 0.1, "bias_correction": False, "weight_decay": 0.5, "adam_w_mode": decoupled}
    done = translate({**ONE, "optimizer": {"type": "Adam", "params": params}})
    model = nn.Linear(3, 1, bias=False)
    weight, first, second = model.weight.detach().double().clone(), 0.0, 0.0
    optimizer = done.optimizer.build(onefold.shard(model, onefold.ZERO_0))
    for _ in range(3):
        x = torch.randn(2, 3)
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        grad = x.double().sum(0, keepdim=True) + (0.0 if decoupled else 0.5 * weight)
        first, second = 0.9 * first + 0.1 * grad, 0.999 * second + 0.001 * grad**2
        weight = weight - 0.1 * (first / (second.sqrt() + 1e-8) + (0.5 * weight if decoupled else 0.0))
    assert torch.allclose(model.weight.double(), weight, rtol=1e-5)


def test_autocast_to_fp16_trains_with_a_loss_scale():
    config = {**ONE, "torch_autocast": {"enabled": True, "dtype": "float16"}, "optimizer": {"type": "SGD"}}
    done = translate(config)
    torch.manual_seed(0)
    model = onefold.shard(nn.Linear(4, 1), **done.shard_arguments)
    twin = nn.Linear(4, 1)
    twin.load_state_dict(model.state_dict())
    optimizer = done.optimizer.build(model)
    x = torch.randn(4, 4)
    for each in (model, twin):
        with torch.autocast("cpu", dtype=done.autocast):
            loss = each(x)
        (loss.float() / 1e4).mean().backward()
    optimizer.step()
    assert optimizer.loss_scale == 2.0**16
    assert model.weight.dtype == torch.float32
    norm = torch.nn.utils.get_total_norm([param.grad for param in twin.parameters()]).item()
    assert optimizer.grad_norm == pytest.approx(norm, rel=1e-2)


def test_a_translation_trains_a_model():
    config = {
        "train_batch_size": 4,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "1e3"},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 2}},
    }
    torch.manual_seed(0)
    done = translate(config)
    model = onefold.shard(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)), **done.shard_arguments)
    optimizer = done.optimizer.build(model, max_grad_norm=done.max_grad_norm)
    schedule = done.scheduler.build(optimizer)
    x = torch.randn(4, 8, dtype=torch.bfloat16)
    losses = []
    for _ in range(6):
        loss = (model(x) - 1).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    assert losses[-1] < losses[0]
    assert optimizer.max_grad_norm == 0.5

"""Owns training runs under DeepSpeed itself, and what they were like: the yardstick of the import.

As a script it is given a directory. It imports DeepSpeed once and forks the ranks of each number of ranks in
`VARIANTS`; these write its checkpoints after `BEFORE` steps, train `AFTER` more, and rank 0 writes down what DeepSpeed
says of weights and state, then and at the end. No pytest here: it runs in processes of its own, so that nothing of
DeepSpeed reaches those of other tests.
"""

import sys
from pathlib import Path

import torch
from torch import nn

import checkpoint_models
from apart import prepare_deepspeed, run_ranks
from checkpoint_models import BATCH, WORDS

BEFORE, AFTER = 4, 3
STATES = ("exp_avg", "exp_avg_sq")


def variant(stage, precision, zero=None, **config):
    """The configuration of one run; `precision` is one of Onefold's tests' names."""
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, **(zero or {})},
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        **config,
    }
    if precision != "fp32":
        settings[precision] = {"enabled": True}
    if precision == "fp16":
        settings[precision] |= {"initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}
    return settings


WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 10}}
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
ORDINARY = {f"zero{stage}-{kind}": variant(stage, kind) for stage in (1, 2, 3) for kind in ("fp32", "bf16", "fp16")}
SPECIAL = {
    "zero1-bf16-fp32-sums": variant(1, "bf16", data_types={"grad_accum_dtype": "fp32"}),
    "zero2-fp32-round-robin": variant(2, "fp32", {"round_robin_gradients": True}),
    "zero2-fp32-aligned": variant(2, "fp32", {"parameter_alignment": True}),
    "zero2-fp32-elastic": variant(2, "fp32", {"elastic_checkpoint": True}),
    "zero2-fp32-own-scheduler": variant(2, "fp32", scheduler=WARMUP),
    "zero2-fp32-offload": variant(2, "fp32", OFFLOADED, zero_force_ds_cpu_optimizer=False),
    "zero3-bf16-offload": variant(3, "bf16", OFFLOADED, zero_force_ds_cpu_optimizer=False),
    "zero3-bf16-sub-groups": variant(3, "bf16", {"sub_group_size": 300}),
}
"""What is not in a name is as DeepSpeed has it unless told otherwise."""
VARIANTS = {
    1: {name: ORDINARY[name] for name in ("zero1-fp32", "zero2-fp16", "zero3-bf16")},
    2: ORDINARY | SPECIAL,
    3: ORDINARY,
}
"""By number of ranks."""


class Net(checkpoint_models.Net):
    """Tied, frozen and with buffers. DeepSpeed cannot broadcast a parameter without dimensions, so it has none."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


def groups(model):
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    return [
        {"params": [p for n, p in named.items() if n.startswith("blocks")], "lr": 0.02, "weight_decay": 0.1},
        {"params": [p for n, p in named.items() if not n.startswith("blocks")], "weight_decay": 0.0},
    ]


SETTINGS = {"lr": 0.01, "eps": 1e-4, "betas": (0.8, 0.99)}


def schedule(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)


def loss_of(model, step, rank, num_ranks):
    """One fixed batch a step, dealt to the ranks in order."""
    words = torch.randint(WORDS, (BATCH, 5), generator=torch.Generator().manual_seed(step)).chunk(num_ranks)[rank]
    logits = model(words[:, :-1]).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


def trained(engine):
    return [(name, param) for name, param in engine.module.named_parameters() if param.requires_grad]


def weights_of(engine):
    """Exact weights: the parameters themselves where they are, else what DeepSpeed says its master weights are."""
    from deepspeed.utils import safe_get_full_fp32_param

    return {
        name: (param if param.numel() and param.dtype == torch.float32 else safe_get_full_fp32_param(param))
        .detach()
        .clone()
        for name, param in trained(engine)
    }


def states_of(engine):
    """Optimizer state; none where DeepSpeed says it wrongly: it looks in the order that parameters had at first."""
    from deepspeed.utils import safe_get_full_optimizer_state

    optimizer = engine.optimizer
    if getattr(optimizer, "round_robin_gradients", False):
        return {state: {} for state in STATES}
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):  # it did so after the first group's first step only
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    return {
        state: {name: safe_get_full_optimizer_state(param, state).clone() for name, param in trained(engine)}
        for state in STATES
    }


def frozen_of(engine):
    from deepspeed.runtime.zero import GatheredParameters

    found = {}
    for name, param in engine.module.named_parameters():
        if not param.requires_grad:
            with GatheredParameters([param], enabled=hasattr(param, "ds_id")):
                found[name] = param.detach().clone().cpu()
    return found


def numbers_of(engine):
    return {
        "rates": [group["lr"] for group in engine.optimizer.param_groups],
        "scale": float(getattr(engine.optimizer, "cur_scale", 1.0)),
        "updates": engine.global_steps - engine.skipped_steps,
    }


def train(engine, start, stop, rank, num_ranks):
    for step in range(start, stop):
        engine.backward(loss_of(engine, step, rank, num_ranks))
        engine.step()


def write(rank, num_ranks, directory, config):
    """Train and save under one configuration; returns what it was like."""
    import deepspeed

    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.AdamW(groups(model), **SETTINGS)
    scheduler = None if "scheduler" in config else schedule(optimizer)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=dict(config))[0]
    train(engine, 0, BEFORE, rank, num_ranks)
    engine.save_checkpoint(str(directory), client_state={"note": "hello", "mask": torch.arange(3)})
    saved = {
        "weights": weights_of(engine),
        **states_of(engine),
        "frozen": frozen_of(engine),
        "buffers": {name: buffer.clone() for name, buffer in engine.module.named_buffers()},
        **numbers_of(engine),
    }
    train(engine, BEFORE, BEFORE + AFTER, rank, num_ranks)
    return {"saved": saved, "later": {"weights": weights_of(engine), **numbers_of(engine)}}


def act(rank, num_ranks, directory):
    """What each forked rank does."""
    for name, config in VARIANTS[num_ranks].items():
        found = write(rank, num_ranks, directory / str(num_ranks) / name, config)
        if rank == 0:
            torch.save(found, directory / str(num_ranks) / f"{name}.pt")


def main(directory):
    prepare_deepspeed()
    for num_ranks in VARIANTS:
        (directory / str(num_ranks)).mkdir()
        run_ranks(num_ranks, directory, act, directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

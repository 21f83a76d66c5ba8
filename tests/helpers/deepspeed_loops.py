"""Owns the loops that scripts written for DeepSpeed run, as functions of the module that they import as `deepspeed`."""

import torch
from torch import nn

WIDTH, MICRO, STEPS = 16, 4, 6


class Net(nn.Module):
    """A few blocks; returns its loss, as Hugging Face's models do, or its output without targets."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x, y=None):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        out = self.head(x).squeeze(-1)
        return out if y is None else nn.functional.mse_loss(out.float(), y)


def settings(stage, zero=None, **config):
    """A configuration as a user writes it. `torch_adam`, since DeepSpeed would compile a kernel for its own; `eps` so
    large that the sign of a gradient that is almost zero does not matter."""
    adam = {"lr": 0.02, "weight_decay": 0.1, "betas": [0.8, 0.95], "eps": 1e-2, "torch_adam": True}
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, **(zero or {})},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {"type": "AdamW", "params": adam},
        **config,
    }


CPU = {"offload_optimizer": {"device": "cpu"}}
TWO = {"gradient_accumulation_steps": 2}
WARM = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.03, "warmup_num_steps": 4}}}
DECAY = {
    "type": "WarmupDecayLR",
    "params": {"warmup_max_lr": 0.03, "warmup_num_steps": 3, "total_num_steps": 6, "warmup_type": "linear"},
}
BF16 = {"bf16": {"enabled": True}}
SCALED = {"initial_scale_power": 8, "loss_scale_window": 100, "hysteresis": 1}
FP16 = {"fp16": {"enabled": True, **SCALED}}
TOO_MUCH = {"fp16": {"enabled": True, **SCALED, "initial_scale_power": 24}}
GROWING = {"fp16": {"enabled": True, **SCALED, "loss_scale_window": 2, "consecutive_hysteresis": True}}
STILL = {"optimizer": {"type": "AdamW", "params": {"lr": 0.0, "torch_adam": True}}}
LARGE = {"gradient_accumulation_steps": 3, "gradient_clipping": 0.05}

# name -> (loop, configuration). fp32 unless the name says otherwise. In 16 bits, DeepSpeed's stage 0 makes a first step
# of Adam with zero gradients when it starts, and every stage divides the gradients of a step whose success doubles the
# loss scale by the doubled one: stage 0 is left out, and where the scale grows the weights stay.
VARIANTS = {
    **{f"zero{stage}": ("tutorial", settings(stage)) for stage in range(4)},
    "zero2-offload": ("tutorial", settings(2, CPU)),
    "zero3-offload": ("tutorial", settings(3, CPU)),
    **{f"zero{stage}-two": ("tutorial", settings(stage, **TWO)) for stage in range(4)},
    **{f"zero{stage}-two-plain": ("plain", settings(stage, **TWO)) for stage in (1, 2, 3)},
    "zero2-two-outputs": ("outputs", settings(2, **TWO)),
    "zero0-no-sync": ("no_sync", settings(0, **TWO)),
    "zero2-boundary": ("boundary", settings(2, **TWO)),
    "zero3-unscaled": ("unscaled", settings(3, **TWO)),
    "zero2-unmanaged": ("unmanaged", settings(2, managed_gradient_accumulation=False, **TWO)),
    **{f"zero{stage}-zeroing": ("zeroing", settings(stage, **TWO)) for stage in range(4)},
    "zero0-resized": ("resized", settings(0)),
    "zero0-clip": ("tutorial", settings(0, gradient_clipping=0.05)),
    "zero2-clip": ("tutorial", settings(2, **LARGE)),
    "zero3-clip": ("tutorial", settings(3, CPU, **LARGE)),
    "zero1-warmup": ("tutorial", settings(1, **WARM, **TWO)),
    "zero3-decay": ("tutorial", settings(3, scheduler=DECAY)),
    "zero0-client": ("client", settings(0, **TWO)),
    "zero2-client": ("client", settings(2)),
    "zero3-callables": ("callables", settings(3)),
    "zero2-groups": ("groups", settings(2, **WARM)),
    "zero1-loader": ("loader", settings(1)),
    **{f"zero{stage}-bf16": ("tutorial", settings(stage, **BF16)) for stage in (1, 2, 3)},
    "zero2-bf16-two": ("tutorial", settings(2, **BF16, **TWO)),
    "zero3-bf16-offload": ("tutorial", settings(3, CPU, **BF16)),
    **{f"zero{stage}-fp16": ("tutorial", settings(stage, **FP16)) for stage in (1, 2, 3)},
    "zero2-fp16-overflow": ("tutorial", settings(2, **TOO_MUCH, **WARM)),
    "zero3-fp16-overflow": ("tutorial", settings(3, **TOO_MUCH, **TWO)),
    "zero1-fp16-growing": ("tutorial", settings(1, **GROWING) | STILL),
    "zero2-autocast": ("tutorial", settings(2, torch_autocast={"enabled": True, "dtype": "bfloat16"})),
}

ALONE = [
    "zero0",
    "zero1",
    "zero2",
    "zero3",
    "zero2-offload",
    "zero3-offload",
    "zero2-two",
    "zero3-two-plain",
    "zero0-clip",
]
ALONE += ["zero3-clip", "zero1-warmup", "zero0-client", "zero3-bf16", "zero2-fp16", "zero3-fp16-overflow"]
CASES = [(1, name) for name in ALONE] + [(2, name) for name in VARIANTS]
"""Numbers of ranks, and what runs on so many."""


class Run:
    """One engine in training, and what is seen of it."""

    def __init__(self, engine, rank, num_ranks):
        self.engine, self.rank, self.num_ranks = engine, rank, num_ranks
        self.dtype = next((p.dtype for p in engine.module.parameters() if p.is_floating_point()), torch.float32)
        self.seen = {"losses": [], "rates": [], "norms": [], "boundaries": [], "scales": [], "counts": []}

    def batch(self, micro_step):
        generator = torch.Generator().manual_seed(100 * micro_step + self.rank)
        x = torch.randn(MICRO, 8, generator=generator)
        return x.to(self.dtype), x.sum(1).sin()

    def loss(self, micro_step):
        loss = self.engine(*self.batch(micro_step))
        self.seen["losses"].append(loss.item())
        return loss

    def step(self):
        engine = self.engine
        self.seen["boundaries"].append(bool(engine.is_gradient_accumulation_boundary()))
        engine.step()
        norm = engine.get_global_grad_norm()
        self.seen["norms"].append(None if norm is None else float(norm))
        self.seen["rates"].append([float(lr) for lr in engine.get_lr()])
        self.seen["scales"].append(float(getattr(engine.optimizer, "cur_scale", 1.0)))
        counts = engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps
        self.seen["counts"].append([*counts, bool(engine.was_step_applied())])


def start(deepspeed, config, rank, num_ranks, **arguments):
    torch.manual_seed(0)
    model = Net()
    given = {name: value(model) for name, value in arguments.items()}
    engine, optimizer, loader, schedule = deepspeed.initialize(model=model, config=dict(config), **given)
    assert engine.optimizer is optimizer
    assert engine.lr_scheduler is schedule
    assert engine.training_dataloader is loader
    return Run(engine, rank, num_ranks)


def parameters(model):
    return model.parameters()


def tutorial(deepspeed, config, *where):
    """The loop of DeepSpeed's first tutorial."""
    run = start(deepspeed, config, *where, model_parameters=parameters)
    for micro_step in range(STEPS * run.engine.gradient_accumulation_steps()):
        loss = run.loss(micro_step)
        run.engine.backward(loss)
        run.step()
    return run.seen


def plain(deepspeed, config, *where):
    """backward() of the loss itself."""
    run = start(deepspeed, config, *where)
    for micro_step in range(STEPS * 2):
        run.loss(micro_step).backward()
        run.step()
    return run.seen


def outputs(deepspeed, config, *where):
    """The loss is computed outside of the engine, and backward() of outputs is given a gradient."""
    run = start(deepspeed, config, *where)
    for micro_step in range(STEPS * 2):
        x, y = run.batch(micro_step)
        out = run.engine(x)
        run.seen["losses"].append((out - y).square().mean().item())
        if micro_step % 2:
            (out - y).square().mean().backward()
        else:
            out.backward((2 * (out - y) / len(y)).detach())
        run.step()
    return run.seen


def no_sync(deepspeed, config, *where):
    """All but the last micro-batch inside no_sync."""
    run = start(deepspeed, config, *where)
    run.engine.set_gradient_accumulation_boundary(True)
    for step in range(STEPS):
        with run.engine.no_sync():
            run.engine.backward(run.loss(2 * step))
        run.engine.backward(run.loss(2 * step + 1))
        run.step()
    return run.seen


def boundary(deepspeed, config, *where):
    """The script says which micro-batch is the last, and calls step() after that only, as accelerate does."""
    run = start(deepspeed, config, *where)
    for step in range(STEPS):
        for part in range(2):
            run.engine.set_gradient_accumulation_boundary(part == 1)
            run.engine.backward(run.loss(2 * step + part))
        run.step()
    return run.seen


def unscaled(deepspeed, config, *where):
    """The script divides the loss."""
    run = start(deepspeed, config, *where)
    for micro_step in range(STEPS * 2):
        returned = run.engine.backward(run.loss(micro_step) / 2, scale_wrt_gas=False)
        run.seen["losses"].append(returned.item())
        run.step()
    return run.seen


def unmanaged(deepspeed, config, *where):
    """As many backwards a step as the script likes."""
    run = start(deepspeed, config, *where)
    micro_step = 0
    for step in range(STEPS):
        for _ in range(1 + step % 3):
            run.engine.backward(run.loss(micro_step))
            micro_step += 1
        run.step()
    return run.seen


def resized(deepspeed, config, *where):
    """Larger batches from the third step on."""
    run = start(deepspeed, config, *where)
    for micro_step in range(STEPS):
        if micro_step == 2:
            run.engine.set_train_batch_size(2 * MICRO * run.num_ranks)
        run.engine.backward(run.loss(micro_step))
        run.step()
    return run.seen


def zeroing(deepspeed, config, *where):
    """Gradients are cleared in the middle of a step."""
    run = start(deepspeed, config, *where)
    for micro_step in range(STEPS * 2):
        run.engine.zero_grad()
        run.engine.backward(run.loss(micro_step))
        run.step()
    return run.seen


def two_groups(model):
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if "bias" not in n], "weight_decay": 0.2},
        {"params": [p for n, p in named if "bias" in n], "weight_decay": 0.0, "lr": 0.005},
    ]


def client(deepspeed, config, *where):
    """The script brings optimizer and schedule."""
    made = []

    def optimizer(model):
        made.append(torch.optim.AdamW(two_groups(model), lr=0.02, betas=(0.8, 0.95), eps=1e-6))
        return made[0]

    def schedule(model):
        return torch.optim.lr_scheduler.LambdaLR(made[0], lambda step: 1 / (1 + step))

    run = start(deepspeed, config, *where, optimizer=optimizer, lr_scheduler=schedule)
    for micro_step in range(STEPS * run.engine.gradient_accumulation_steps()):
        run.engine.backward(run.loss(micro_step))
        run.step()
        assert [group["lr"] for group in made[0].param_groups] == run.engine.get_lr()
    return run.seen


def callables(deepspeed, config, *where):
    """The script brings functions that make optimizer and schedule."""
    run = start(
        deepspeed,
        config,
        *where,
        optimizer=lambda model: lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        lr_scheduler=lambda model: lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    )
    for micro_step in range(STEPS):
        run.engine.backward(run.loss(micro_step))
        run.step()
    return run.seen


def groups(deepspeed, config, *where):
    """Parameter groups of the script's, the configuration's optimizer."""
    run = start(deepspeed, config, *where, model_parameters=two_groups)
    for micro_step in range(STEPS):
        run.engine.backward(run.loss(micro_step))
        run.step()
    return run.seen


def loader(deepspeed, config, *where):
    """The engine makes the loader."""
    x = torch.randn(22, 8, generator=torch.Generator().manual_seed(5))
    data = torch.utils.data.TensorDataset(x, x.sum(1).cos())
    run = start(deepspeed, config | {"dataloader_drop_last": True}, *where)
    batches = run.engine.deepspeed_io(data, num_local_io_workers=0)
    run.seen["lengths"] = [len(batches), len(run.engine.deepspeed_io(data, 3, "eval", num_local_io_workers=0))]
    for _ in range(2):
        for batch in batches:
            loss = run.engine(*batch)
            run.seen["losses"].append(loss.item())
            run.engine.backward(loss)
            run.step()
    return run.seen


LOOPS = {each.__name__: each for each in (tutorial, plain, outputs, no_sync, boundary, unscaled, unmanaged, resized)}
LOOPS |= {each.__name__: each for each in (zeroing, client, callables, groups, loader)}


def train(deepspeed, name, rank, num_ranks):
    """Run one variant; returns what it saw."""
    loop, config = VARIANTS[name]
    return LOOPS[loop](deepspeed, config, rank, num_ranks)


STOP = 3
"""Steps before a checkpoint."""
RESUMED = settings(2, **WARM, **FP16)


def resume(deepspeed, directory, tag, rank, num_ranks, *, is_there):
    """Train to a checkpoint and on, or from one that is there; returns the client state and what was seen."""
    run, client_state = start(deepspeed, RESUMED, rank, num_ranks), {"epoch": 2}
    if is_there:
        path, client_state = run.engine.load_checkpoint(str(directory), tag)
        assert path is not None
    for micro_step in range(STOP if is_there else 0, STEPS):
        if micro_step == STOP and not is_there:
            run.engine.save_checkpoint(str(directory), tag, client_state=client_state)
        run.engine.backward(run.loss(micro_step))
        run.step()
    return client_state, run.seen

"""Owns training with Lightning: the recipe of docs/howto/lightning.md, and the same under Lightning's own DDP.

As a script it is given a directory: it forks two ranks, and rank 0 writes down what came out. No pytest here: Lightning
changes what a process logs and warns of, so that nothing of it reaches other tests.
"""

import os
import sys
import textwrap
from pathlib import Path

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

import onefold
from apart import run_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "lightning.md"
EPOCHS = 2


def recipe():
    """The names that the page's first block of code defines."""
    lines = PAGE.read_text().split("\n")
    first = next(number for number, line in enumerate(lines) if line.startswith("    "))
    last = next(number for number in range(first, len(lines)) if lines[number] and not lines[number].startswith("    "))
    names = {}
    exec(compile("\n" * first + textwrap.dedent("\n".join(lines[first:last])), str(PAGE), "exec"), names)
    return names


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))


def loader():
    """The same data in the same order in every epoch."""
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(x, x.sum(1))
    sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
    return torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)


class Losses(lightning.Callback):
    """Collects what a module logs."""

    def __init__(self):
        self.training, self.validation = [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.training.append(outputs["loss"].item())

    def on_validation_end(self, trainer, module):
        self.validation.append(trainer.callback_metrics["validation"].item())


def fit(module, strategy, epochs=EPOCHS, **more):
    losses = Losses()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=epochs,
        accumulate_grad_batches=2,
        num_sanity_val_steps=0,
        callbacks=[losses],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **more,
    )
    trainer.fit(module, loader(), loader())
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    return {"losses": losses.training, "validation": losses.validation, "rates": rates, "steps": trainer.global_step}


def refused(module, strategy, **more):
    try:
        fit(module, strategy, **more)
    except onefold.errors.OnefoldError as error:
        return str(error)


def act(rank, num_ranks, directory):
    """What each forked rank does."""
    names = recipe()
    module, strategy = names["Module"], names["Sharded"]

    class Plain(module):
        """The same with nothing of Onefold."""

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def on_train_epoch_end(self):
            pass

    run = directory / "run"
    sharded = module(net(), run)
    found = {
        "ddp": fit(Plain(net(), run), DDPStrategy(), gradient_clip_val=1.0),
        "onefold": fit(sharded, strategy()),
        "resumed": fit(module(net(), directory / "rest", resume=run / "epoch-0"), strategy(), epochs=1),
        "clipped": refused(module(net(), directory / "clipped"), strategy(), gradient_clip_val=1.0),
    }
    weight = sharded.net[2].weight
    found["is split"] = isinstance(weight, onefold.engine.released.ReleasedParameter)
    if rank == 0:
        torch.save(found, directory / "found.pt")


def main(directory):
    os.environ["TORCHELASTIC_RUN_ID"] = "lightning"  # by which Lightning knows that the ranks were started already
    run_ranks(2, directory, act, directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

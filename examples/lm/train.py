"""Owns the training loop: a small GPT on Python's own source code, under any plan.

Invariant: with one seed and one global batch the losses are the same whatever the plan, and up to rounding whatever the
number of ranks. Run it with `python examples/lm/train.py`, or with `torchrun`, one process a GPU; `--help` says more.
"""

import math
import os
import time
from collections.abc import Iterator, Sequence

import psutil
import torch
import torch.distributed as dist
import typer
from torch import Tensor

import data
import onefold
import report
from config import Config, Device, PrecisionName, command
from model import GPT, Shape, generate
from onefold.plan.table import NAMED_PLANS


class Trainer:
    """One rank's part of a run: the model, its optimizer, and the slices of the global batches that are its own."""

    def __init__(self, config: Config) -> None:
        self.config = config
        # torchrun tells each process who it is; without it there is one rank.
        self.rank, self.num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        config.check_ranks(self.num_ranks)
        self.micro_batch = min(config.micro_batch, config.global_batch // self.num_ranks)
        self.device = _device(config.device)
        self.corpus = data.load()
        torch.manual_seed(config.seed)
        shape = Shape(
            vocab_size=data.VOCAB_SIZE,
            context=config.context,
            layers=config.layers,
            width=config.width,
            heads=config.heads,
            tied=config.tied,
            checkpoint_activations=config.checkpoint_activations,
        )
        # Onefold starts here. The model is the same object afterwards, the loop below is plain PyTorch.
        self.model: GPT = onefold.shard(
            GPT(shape).to(self.device),
            NAMED_PLANS[config.plan.value],
            precision=onefold.Precision(
                params=config.precision.value, loss_scale="dynamic" if config.precision is PrecisionName.fp16 else None
            ),
            compile=config.compile,
            fraction=config.fraction,
        )
        self.optimizer = onefold.AdamW(
            self.model,
            lr=config.lr,
            betas=(0.9, 0.95),
            weight_decay=config.weight_decay,
            no_decay=("*.bias", "*norm*"),
            max_grad_norm=config.clip or None,
            delayed=config.delayed,
            delay_after=config.delay_after,
        )
        self.host_bytes = onefold.predicted(self.model, self.optimizer).tier_bytes[onefold.Tier.HOST]
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._lr_factor)

    def _lr_factor(self, step: int) -> float:
        """Linear warm-up over the first 5% of the steps, then half a cosine down to 10%."""
        warmup = max(1, self.config.steps // 20)
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, self.config.steps - warmup)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

    def _micro_batches(self, tokens: Tensor, *key: object) -> list[tuple[Tensor, Tensor]]:
        """This rank's slice of the global batch that `key` names, cut into pieces of `micro_batch` samples."""
        batch = data.global_batch(tokens, self.config.global_batch, self.config.context, *key)
        mine = (data.rank_slice(part, self.rank, self.num_ranks).to(self.device) for part in batch)
        return list(zip(*(part.split(self.micro_batch) for part in mine), strict=True))

    def _mean(self, total: Tensor, count: int) -> float:
        """The mean over `count` losses on each rank, whose sum here is `total`."""
        if self.num_ranks > 1:
            dist.all_reduce(total)
        return float(total) / (count * self.num_ranks)

    def _backward(self, step: int) -> float:
        """Leave the gradient of the global batch of `step` in the model; returns the loss over all ranks."""
        batches = self._micro_batches(self.corpus.train, "train", self.config.seed, step)
        *early, last = batches
        total = torch.zeros((), device=self.device)
        with onefold.accumulate(self.model):  # these backward passes only add up ...
            for inputs, targets in early:
                loss = self.model(inputs, targets)
                (loss / len(batches)).backward()
                total += loss.detach()
        loss = self.model(*last)
        (loss / len(batches)).backward()  # ... and this one reduces the sum over the ranks
        return self._mean(total + loss.detach(), len(batches))

    def steps(self) -> Iterator[report.Record]:
        """Train; yields one record a step. The last step's gradients stay in place, so that they can be measured."""
        self.model.train()
        host_busy = host_wait = 0.0
        for step in range(self.config.steps):
            start = time.perf_counter()
            self.optimizer.zero_grad()
            loss = self._backward(step)
            lr = self.optimizer.param_groups[0]["lr"]
            self.optimizer.step()
            if not self.optimizer.skipped:  # fp16 skips a step whose gradients overflowed
                self.schedule.step()
            seconds = time.perf_counter() - start
            # The host updates beside the loop: what it did since the last step ended is counted to this one.
            busy_before, host_busy = host_busy, self.optimizer.host_busy_s
            wait_before, host_wait = host_wait, self.optimizer.host_wait_s
            yield report.Record(
                step=step + 1,
                loss=loss,
                lr=lr,
                grad_norm=self.optimizer.grad_norm,
                loss_scale=self.optimizer.loss_scale,
                skipped=self.optimizer.skipped,
                seconds=seconds,
                memory_bytes=_memory_bytes(self.device),
                host_bytes=self.host_bytes,
                host_busy=(host_busy - busy_before) / seconds,
                host_wait=(host_wait - wait_before) / seconds,
            )

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """The loss on text that was never trained on, over equally many samples on every rank."""
        self.model.eval()
        total, count = torch.zeros((), device=self.device), 0
        for index in range(self.config.eval_batches):
            for inputs, targets in self._micro_batches(self.corpus.held_out, "held out", self.config.seed, index):
                total += self.model(inputs, targets)
                count += 1
        return self._mean(total, count)

    def sample(self) -> str:
        """Text that the model writes after the prompt. All ranks write it together: under zero_3 each holds a part."""
        self.model.eval()
        prompt = torch.tensor(list(data.encode(self.config.prompt)), device=self.device)
        return data.decode(generate(self.model, prompt, self.config.sample_tokens, 0.6, self.config.seed))

    def result(self, records: Sequence[report.Record]) -> report.Result:
        """What the run came to, measured after its last step."""
        budgets = onefold.predicted(self.model, self.optimizer), onefold.measured(self.model, self.optimizer)
        self.optimizer.zero_grad()  # evaluation needs no gradients
        return report.Result(
            config=self.config,
            num_ranks=self.num_ranks,
            device=str(self.device.type),
            num_parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            records=records,
            held_out_loss=self.held_out_loss(),
            sample=self.sample(),
            budgets=budgets,
        )


def _device(wanted: Device) -> torch.device:
    """One GPU a process where there are GPUs, unless the CPU was asked for."""
    if wanted is Device.cpu or (wanted is Device.auto and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise typer.BadParameter("--device cuda: this PyTorch sees no GPU; use --device cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _memory_bytes(device: torch.device) -> int:
    """The largest GPU memory this rank has used so far; on CPU the memory its process holds now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return int(psutil.Process().memory_info().rss)


def run(config: Config) -> None:
    """Train a small GPT on the source code of Python's own standard library.

    \b
    Two ranks on one machine (about two minutes on two CPU cores):
        torchrun --standalone --nproc-per-node 2 examples/lm/train.py --plan zero_3
    One rank:
        python examples/lm/train.py

    The loss is the same under every plan; what changes is how many bytes each rank holds. A table at the end shows
    them, predicted and measured.

    \b
    Plans:
        zero_0     every rank holds everything (plain data parallelism)
        zero_1     optimizer state split over the ranks
        zero_2     optimizer state and gradients split
        zero_3     optimizer state, gradients and parameters split
        offload    zero_2, with gradients and optimizer state in host memory
        offload_3  zero_3, with everything in host memory
        infinity   zero_3, with parameters and optimizer state on disk
    The last needs the disk tier, which is not built yet: Onefold refuses it
    and says so. Of what a plan keeps off the device, --fraction brings a part
    back: --plan offload --fraction 0.5 is halfway between offload and zero_2.

    \b
    Where a plan keeps state on the host, progress also shows
        host MiB     training state in this rank's host memory
        device busy  share of the time the loop did not wait for the host
        host busy    share of the time updates ran on the host
        waiting      share of the time the loop waited for those updates
    """
    try:
        config.out.mkdir(parents=True, exist_ok=True)  # now, not when all steps are made
    except OSError as error:
        raise typer.BadParameter(f"--out {config.out} cannot be made: {error}") from error
    try:
        trainer = Trainer(config)
    except onefold.errors.OnefoldError as error:
        raise typer.BadParameter(str(error)) from error
    with report.Display(config, trainer.rank, trainer.num_ranks) as display:
        records = [display.show(record) for record in trainer.steps()]
    result = trainer.result(records)
    if trainer.rank == 0:
        report.publish(result)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(command(run))
    app()

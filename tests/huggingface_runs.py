"""Owns scripts written for DeepSpeed with transformers and accelerate, and runs them on ranks of their own.

As a script it is given "onefold" or "deepspeed" and a directory. It imports the libraries once and forks two ranks,
which run everything in `RUNS`; rank 0 writes down what came out. No pytest here: what the libraries think of DeepSpeed
is a property of the process, so that neither kind of run reaches other tests.
"""

import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

NUM_RANKS = 2
WORDS, LENGTH = 31, 8


def zero(stage, **more):
    """A configuration as the Trainer's documentation writes it."""
    return {
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_gather_16bit_weights_on_model_save": True,
            **more,
        },
        "bf16": {"enabled": "auto"},
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }


OWN = {
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
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
OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}


def config():
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
        initializer_range=0.2,
    )


class Words(torch.utils.data.Dataset):
    """Sentences that are always the same."""

    def __init__(self, number, seed=0):
        self.words = torch.randint(WORDS, (number, LENGTH), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        return {"input_ids": self.words[index], "labels": self.words[index]}


def begin():
    """What `accelerate launch` does where there is a GPU: on CPUs a script has to name the backend itself."""
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    return PartialState(backend="gloo")


def arguments(directory, settings, **more):
    from transformers import TrainingArguments

    begin()
    return TrainingArguments(
        **{
            "output_dir": str(directory),
            "deepspeed": settings,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "max_steps": 4,
            "learning_rate": 0.02,
            "weight_decay": 0.1,
            "warmup_steps": 1,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "seed": 3,
            "dataloader_pin_memory": False,
            "optim": "adamw_torch",
            "accelerator_config": {"use_configured_state": True},
            **more,
        }
    )


def run_clm(directory, base, settings, model_of=None, resume=None, **more):
    """As examples/pytorch/language-modeling/run_clm.py goes: load, train, evaluate, save."""
    from transformers import AutoModelForCausalLM, Trainer, set_seed

    args = arguments(directory, settings, **more)
    set_seed(args.seed)
    model = AutoModelForCausalLM.from_pretrained(base) if model_of is None else model_of()
    trainer = Trainer(model=model, args=args, train_dataset=Words(64), eval_dataset=Words(8, seed=1))
    trainer.train(resume_from_checkpoint=resume)
    history = trainer.state.log_history
    found = {
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "norms": [float(entry["grad_norm"]) for entry in history if "grad_norm" in entry],
        "rates": [entry["learning_rate"] for entry in history if "learning_rate" in entry],
        "evaluated": trainer.evaluate()["eval_loss"],
    }
    trainer.save_model(str(directory / "saved"))
    return found


def levels(directory, base):
    """The same training under each level that DeepSpeed's loss is compared at."""
    found = {f"zero{stage}": run_clm(directory / f"zero{stage}", base, zero(stage)) for stage in (2, 3)}
    own = run_clm(directory / "own", base, zero(3) | OWN, max_grad_norm=0.5)
    return found | {"own": own}


def plans(directory, base):
    """Other places for the state, and number formats."""
    kinds = {
        "zero0": zero(0),
        "zero1": zero(1),
        "offload2": zero(2, **OFFLOAD),
        "offload3": zero(3, **OFFLOAD, offload_param={"device": "cpu"}),
        "own-offload": zero(2, **OFFLOAD) | OWN,
    }
    return {name: run_clm(directory / name, base, settings) for name, settings in kinds.items()}


def saved(directory, base):
    """What `save_model` wrote under each level, and the weights it was trained to."""
    import onefold
    from transformers import AutoModelForCausalLM, Trainer

    found = {}
    for stage in (0, 1, 2, 3):
        args = arguments(directory / str(stage), zero(stage), save_strategy="steps", save_steps=2)
        trainer = Trainer(model=AutoModelForCausalLM.from_pretrained(base), args=args, train_dataset=Words(64))
        trainer.train()
        trainer.save_model(str(directory / f"saved{stage}"))
        weights = onefold.full_state_dict(trainer.model_wrapped.module, dtype="fp32")
        again = AutoModelForCausalLM.from_pretrained(str(directory / f"saved{stage}")) if stage < 3 else None
        found[stage] = weights, None if again is None else again.state_dict()
        found[f"losses{stage}"] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return found


def resumed(directory, base):
    """Stopped after two of four steps, and taken up again."""
    found = {}
    for stage in (0, 2, 3):
        where = directory / str(stage)
        whole = run_clm(where, base, zero(stage), save_strategy="steps", save_steps=2)
        rest = run_clm(where, base, zero(stage), resume=str(where / "checkpoint-2"))
        found[stage] = whole["losses"], rest["losses"]
    return found


RUNS = {"levels": levels, "plans": plans, "saved": saved, "resumed": resumed}


def act(rank, kind, directory):
    """The life of one forked rank."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(NUM_RANKS),
        "LOCAL_WORLD_SIZE": str(NUM_RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "OMP_NUM_THREADS": "1",
    }
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory / 'meeting'}", rank=rank, world_size=NUM_RANKS)
    for name in sys.argv[3:] or RUNS:
        found = RUNS[name](directory / name, directory / "base")
        if rank == 0:
            torch.save(found, directory / f"{name}.pt")
    dist.destroy_process_group()


def fork(rank, kind, directory):
    """Start a rank; returns its process id."""
    child = os.fork()
    if child:
        return child
    try:
        act(rank, kind, directory)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main(kind, directory):
    if kind == "onefold":
        import onefold.deepspeed

        onefold.deepspeed.install()
    else:
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it compiles a kernel for sums
    import deepspeed.runtime.zero.partition_parameters
    from transformers import AutoModelForCausalLM, Trainer  # noqa: F401  imported once, before the ranks are forked

    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(config()).save_pretrained(directory / "base")
    children = [fork(rank, kind, directory) for rank in range(NUM_RANKS)]
    if any([os.waitpid(child, 0)[1] for child in children]):
        sys.exit("a rank failed")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

"""Owns scripts written for DeepSpeed with transformers and accelerate, and runs them on ranks of their own.

As a script it is given "onefold" or "deepspeed" and a directory. It imports the libraries once and forks two ranks,
which run everything in `RUNS`, or in `THEIRS`; rank 0 writes down what came out. No pytest here: what the libraries
think of DeepSpeed is a property of the process, so that neither kind of run reaches other tests.
"""

import copy
import gzip
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from apart import prepare_deepspeed, run_ranks
from huggingface_data import OFFLOAD, OWN, WORDS, Sorted, Words, arguments, begin, config, unset, zero
from huggingface_lora import born, born_with_deepspeed

NUM_RANKS = 2


def run_clm(directory, base, settings, resume=None, **more):
    """As examples/pytorch/language-modeling/run_clm.py goes: load, train, evaluate, save."""
    from transformers import AutoModelForCausalLM, Trainer, set_seed

    args = arguments(directory, settings, **more)
    set_seed(args.seed)
    model = AutoModelForCausalLM.from_pretrained(base)
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
    return found, trainer


def levels(directory, base):
    """What is held to DeepSpeed."""
    from transformers import AutoModelForCausalLM, Trainer

    kinds = {
        "zero2": (2, {}),
        "zero3": (3, {}),
        "activations made again": (3, {"gradient_checkpointing": True}),
        "sgd": (3, {"optim": "sgd", "max_grad_norm": 0.3, "gradient_accumulation_steps": 1}),
    }
    found = {name: run_clm(directory / name, base, zero(stage), **more)[0] for name, (stage, more) in kinds.items()}
    found["a new head"] = classify(directory)
    args = arguments(directory / "evaluated", zero(3))
    trainer = Trainer(model=AutoModelForCausalLM.from_pretrained(base), args=args, eval_dataset=Words(8, seed=1))
    return found | {"evaluated": {"evaluated": trainer.evaluate()["eval_loss"]}}


def classify(directory):
    """A trunk that was trained, with a head that is drawn as the model is loaded."""
    from transformers import AutoModelForSequenceClassification, BertConfig, BertModel, Trainer, set_seed

    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    unset()  # or the trunk would be split as it is made, and could not be saved
    if dist.get_rank() == 0:
        torch.manual_seed(1)
        BertModel(BertConfig(vocab_size=WORDS, **small, **none)).save_pretrained(directory / "trunk")
    dist.barrier()
    args = arguments(directory / "head", zero(3))
    set_seed(args.seed)
    model = AutoModelForSequenceClassification.from_pretrained(directory / "trunk")
    trainer = Trainer(model=model, args=args, train_dataset=Sorted(64))
    trainer.train()
    return {"losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]}


def plans(directory, base):
    """Other places for the state. What `save_model` writes where whole weights are not asked for is a checkpoint."""
    kinds = {
        "zero0": zero(0),
        "zero1": zero(1),
        "offload3": zero(3, **OFFLOAD, offload_param={"device": "cpu"}),
        "own-offload": zero(2, **OFFLOAD) | OWN,
    }
    found = {name: run_clm(directory / name, base, settings)[0] for name, settings in kinds.items()}
    run_clm(directory / "parts", base, zero(3, stage3_gather_16bit_weights_on_model_save=False))
    return found | {"parts": sorted(os.listdir(directory / "parts" / "saved"))}


def resumed(directory, base):
    """Saved after two of four steps, and taken up again under another level; the better one is loaded at the end."""
    from safetensors.torch import load_file

    import onefold

    often = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    whole, trainer = run_clm(directory, base, zero(2), **often, load_best_model_at_end=True)
    weights = onefold.full_state_dict(trainer.model_wrapped.module, dtype="fp32")
    dist.barrier()
    written = load_file(directory / "saved" / "model.safetensors")
    rest, _ = run_clm(directory, base, zero(3), resume=str(directory / "checkpoint-2"))
    best = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    return {"whole": whole, "rest": rest, "weights": weights, "written": written, "best": min(best[:2])}


def adapted(directory, base):
    """LoRA: what it is trained to, and what a plain model is with the adapter that was saved."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM, Trainer

    from onefold.deepspeed.zero import GatheredParameters

    def trainer_of(name, seed, stage, **more):
        args = arguments(directory / name, zero(stage, **OFFLOAD), **more)
        torch.manual_seed(seed)
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2, target_modules=["q_proj"]))
        return Trainer(model=model, args=args, train_dataset=Words(64))

    found = {}
    words = Words(4, seed=2).words
    for stage in (2, 3):
        trainer = trainer_of(str(stage), 7, stage, save_strategy="steps", save_steps=2)
        model = trainer.model
        trainer.train()
        trainer.save_model(str(directory / f"adapter{stage}"))
        with torch.no_grad(), GatheredParameters(list(model.parameters())):
            trained = trainer.model_wrapped(input_ids=words).logits.clone()
        found[f"losses{stage}"] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        dist.barrier()
        unset()  # or from_pretrained would split the next model too
        plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), directory / f"adapter{stage}")
        with torch.no_grad():
            found[stage] = trained, plain(input_ids=words).logits
    trainer = trainer_of("resumed", 8, 2)
    trainer.train(resume_from_checkpoint=str(directory / "3" / "checkpoint-2"))
    written = directory / "3" / "checkpoint-2" / "global_step2" / "checkpoint.json.gz"
    saved = json.loads(gzip.decompress(written.read_bytes()))
    found["saved"] = list(saved["params"])
    found["resumed"] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return found


def grown(directory, base):
    """Made of a configuration under level 3, with more words than it had, beside the same without DeepSpeed."""
    import deepspeed
    from transformers import AutoModelForCausalLM, set_seed
    from transformers.integrations import HfDeepSpeedConfig

    def make():
        set_seed(4)
        model = AutoModelForCausalLM.from_config(config())
        model.resize_token_embeddings(WORDS + 6, mean_resizing=False)
        return model

    plain = make().state_dict()
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    kept = HfDeepSpeedConfig(settings)
    model = make()
    is_partitioned = [type(param).__name__ == "PartitionedParameter" for param in model.model.layers.parameters()]
    engine = deepspeed.initialize(model=model, config=settings)[0]
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        values = {name: value.clone() for name, value in engine.module.state_dict().items()}
    del kept
    return {"plain": plain, "split": values, "partitioned": all(is_partitioned)}


def prepared(base, name, settings):
    """Accelerator, model, optimizer, loader and schedule, as accelerate's examples make them."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler
    from transformers import AutoModelForCausalLM, get_linear_schedule_with_warmup

    begin()
    plugin = DeepSpeedPlugin(
        zero_stage=2 if name == "plugin" else 3,
        gradient_accumulation_steps=2,
        gradient_clipping=1.0,
        hf_ds_config=settings,
        zero3_init_flag=name == "bf16",
        zero3_save_16bit_model=True,
    )
    accelerator = Accelerator(
        deepspeed_plugin=plugin, mixed_precision="bf16" if name == "bf16" else "no", gradient_accumulation_steps=2
    )
    model = AutoModelForCausalLM.from_pretrained(base)
    if settings is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
        schedule = get_linear_schedule_with_warmup(optimizer, 1, 8)
    else:
        optimizer = DummyOptim(model.parameters(), lr=0.02, weight_decay=0.1)
        schedule = DummyScheduler(optimizer, total_num_steps=8, warmup_num_steps=2)
    loader = torch.utils.data.DataLoader(Words(16), batch_size=2)
    return accelerator, *accelerator.prepare(model, optimizer, loader, schedule)


def loop(accelerator, model, optimizer, loader, schedule, directory):
    """Eight micro-batches, two a step. The state is saved after four."""
    losses, norms = [], []
    for epoch in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather_for_metrics(loss.detach()).mean().item())
        if epoch == 0:
            accelerator.save_state(str(directory))
    return {"losses": losses, "norms": norms}


def accelerated(directory, base):
    """A loop of accelerate's; then everything else that is done with a prepared model."""
    fixed = zero(3) | copy.deepcopy(OWN) | {"bf16": {"enabled": False}}
    fixed["optimizer"]["params"] |= {"betas": [0.9, 0.999], "eps": 1e-8}
    found = {}
    for name, settings in {"plugin": None, "file": fixed, "bf16": None}.items():
        accelerator, model, optimizer, loader, schedule = prepared(base, name, settings)
        found[name] = loop(accelerator, model, optimizer, loader, schedule, directory / name)
        state = accelerator.get_state_dict(model)  # on rank 0
        accelerator.load_state(str(directory / name))
        batch = next(iter(loader))
        inner = accelerator.unwrap_model(model)
        words = inner.generate(batch["input_ids"][:, :3], max_new_tokens=2, do_sample=False, pad_token_id=0)
        with torch.no_grad():
            again = accelerator.gather_for_metrics(model(**batch).loss).mean().item()
        found[name] |= {"again": again, "generated": words.tolist(), "names": sorted(state or ())}
        found[name] |= {"unwrapped": type(inner).__name__, "rate": schedule.get_last_lr()}
        accelerator.free_memory()
    return found


RUNS = {
    "levels": levels,
    "plans": plans,
    "resumed": resumed,
    "adapted": adapted,
    "grown": grown,
    "born": born,
    "accelerated": accelerated,
}
THEIRS = {"levels": levels, "grown": grown, "born": born_with_deepspeed}


def act(rank, num_ranks, directory):
    """What each forked rank does."""
    for name, run in (RUNS if sys.argv[1] == "onefold" else THEIRS).items():
        found = run(directory / name, directory / "base")
        if rank == 0:
            torch.save(found, directory / f"{name}.pt")


def main(kind, directory):
    if kind == "onefold":
        import onefold.deepspeed

        onefold.deepspeed.install()
    else:
        prepare_deepspeed()
    import deepspeed.runtime.zero.partition_parameters  # noqa: F401
    from transformers import AutoModelForCausalLM, Trainer  # noqa: F401  imported once, before the ranks are forked

    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(config()).save_pretrained(directory / "base")
    run_ranks(NUM_RANKS, directory, act, directory)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

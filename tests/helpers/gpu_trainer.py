"""Owns a script written for transformers' Trainer with DeepSpeed, one line changed: it runs each case it knows on GPUs.

onefold run tests/helpers/gpu_trainer.py RESULTS.json FOLDER
"""

import json
import sys
from pathlib import Path

import onefold.deepspeed

onefold.deepspeed.install()

import torch.distributed as dist  # noqa: E402  (the switch comes before transformers)
from transformers import LlamaForCausalLM, Trainer, TrainingArguments, set_seed  # noqa: E402

from huggingface_data import OFFLOAD, OWN, USUAL, Words, config, zero  # noqa: E402

CASES = {
    "zero2": (zero(2), {}),
    "zero3": (zero(3), {}),
    "zero2-offload": (zero(2, **OFFLOAD), {}),
    "zero3-own": (zero(3) | OWN, {}),
    "zero2-bf16": (zero(2), {"bf16": True}),
    "zero3-bf16": (zero(3), {"bf16": True, "gradient_checkpointing": True}),
    "zero3-bf16-offload": (zero(3, **OFFLOAD, offload_param={"device": "cpu"}), {"bf16": True}),
    "zero2-fp16": (zero(2) | {"fp16": {"enabled": "auto", "initial_scale_power": 8}}, {"fp16": True}),
}


def train(settings, folder, **more):
    args = TrainingArguments(output_dir=folder, deepspeed=settings, **(USUAL | more))
    set_seed(args.seed)
    trainer = Trainer(model=LlamaForCausalLM(config()), args=args, train_dataset=Words(64))
    trainer.train()
    assert trainer.model_wrapped.device.type == "cuda"
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main():
    results, folder = Path(sys.argv[1]), sys.argv[2]
    found = {name: train(settings, f"{folder}/{name}", **more) for name, (settings, more) in CASES.items()}
    if dist.get_rank() == 0:
        results.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

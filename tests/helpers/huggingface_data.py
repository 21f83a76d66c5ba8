"""Owns what the scripts in huggingface_runs.py are given: configurations, arguments, data."""

import os

import torch

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


USUAL = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 4,
    "learning_rate": 0.02,
    "warmup_steps": 1,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "seed": 3,
}
"""TrainingArguments of every run."""


def arguments(directory, settings, **more):
    from transformers import TrainingArguments

    begin()
    return TrainingArguments(
        **{
            "output_dir": str(directory),
            "deepspeed": settings,
            **USUAL,
            "weight_decay": 0.1,
            "dataloader_pin_memory": False,
            "accelerator_config": {"use_configured_state": True},
            **more,
        }
    )


class Sorted(Words):
    """Sentences by their first word."""

    def __getitem__(self, index):
        return {"input_ids": self.words[index], "labels": self.words[index][0] % 2}


def unset():
    """Make `from_pretrained` load models whole again, which the last TrainingArguments may have ended."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()

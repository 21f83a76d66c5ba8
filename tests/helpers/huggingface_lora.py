"""Owns LoRA of peft inside `zero.Init`: models of transformers, wrapped there, and trained under ZeRO 3.

One of the runs of huggingface_runs.py, under Onefold and under DeepSpeed.
"""

from unittest import mock

import torch

from huggingface_data import WORDS, config, unset

SEED, STEPS = 5, 3
SETTINGS = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
}
"""`torch_adam`, since DeepSpeed would compile a kernel for its own: minutes."""
KINDS = {
    "lora": {},
    "dora": {"use_dora": True},
    "pissa": {"init_lora_weights": "pissa"},
    "whole modules": {"modules_to_save": ["lm_head"]},
    "embeddings": {"target_modules": ["embed_tokens", "v_proj"], "lora_dropout": 0.1},
}
"""Adapters whose constructors use the weights they adapt in different ways: not at all, read, write, copy."""


def make(kind):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    return get_peft_model(
        AutoModelForCausalLM.from_config(config()), LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **KINDS[kind]})
    )


def whole(kind):
    torch.manual_seed(SEED)
    return make(kind)


def split(kind, rank):
    """Made in parts; each rank draws other numbers."""
    import deepspeed

    torch.manual_seed(SEED + rank)
    with deepspeed.zero.Init(config_dict_or_path=SETTINGS):
        return make(kind)


def values_of(model):
    import deepspeed

    found = {}
    for name, param in model.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            found[name] = param.detach().clone()
    return found


def overwrite(model, values, rank):
    import deepspeed

    for name, param in model.named_parameters():
        with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
            if rank == 0:
                param.data.copy_(values[name])
    return model


def train(model, rank):
    import deepspeed

    engine, losses = deepspeed.initialize(model=model, config=SETTINGS)[0], []
    for step in range(STEPS):
        words = torch.randint(WORDS, (1, 8), generator=torch.Generator().manual_seed(10 * step + rank))
        torch.manual_seed(step)  # of dropout
        loss = engine(input_ids=words, labels=words).loss
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return {"losses": losses, "values": values_of(engine.module)}


def born(directory, base):
    """Made in parts, beside what it is when it is made whole."""
    unset()
    rank = torch.distributed.get_rank()
    found = {}
    for kind in KINDS:
        model = split(kind, rank)
        found[kind] = {
            "split": values_of(model),
            "whole": values_of(whole(kind)),
            "partitioned": [type(param).__name__ for param in model.parameters()],
            "trained split": train(model, rank),
            "trained whole": train(whole(kind), rank),
        }
    return found


def born_with_deepspeed(directory, base):
    """The same model as it is born, with no initializer after its layers' own, and with the weights of a whole one."""
    from peft.tuners.lora.layer import LoraLayer
    from transformers import PreTrainedModel

    unset()
    rank = torch.distributed.get_rank()
    values = values_of(split("lora", rank))
    with (
        mock.patch.object(PreTrainedModel, "initialize_weights", return_value=None),
        mock.patch.object(LoraLayer, "reset_lora_parameters", return_value=None),
    ):
        bare = values_of(whole("lora"))
    model = overwrite(split("lora", rank), values_of(whole("lora")), rank)
    return {"split": values, "bare": bare, "trained whole": train(model, rank)}

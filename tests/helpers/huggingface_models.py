"""Owns small models of transformers and peft, made of configurations: nothing is downloaded.

Whatever imports this is left out where those are not installed.
"""

import json
from functools import partial

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

VOCABULARY = 40


def gpt2(**more):
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=3, n_head=2, **more))


def llama(**more):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads, **more))


def bert():
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, **sizes))


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes))


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_channels=1, num_labels=3, **sizes))


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4}
    return MixtralForCausalLM(MixtralConfig(vocab_size=VOCABULARY, output_router_logits=True, **sizes, **heads))


def lora(saved=None, checkpoint=False):
    from peft import LoraConfig, get_peft_model

    model = gpt2()
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    config = LoraConfig(r=2, target_modules=["c_attn"], modules_to_save=saved, fan_in_fan_out=True)
    return get_peft_model(model, config).train()


def text(model, turn):
    tokens = turn.randint(VOCABULARY, 2, 6)
    model(input_ids=tokens, labels=tokens).loss.backward()


tied_llama = partial(llama, tie_word_embeddings=True)
TOKENS = torch.arange(12).view(2, 6) % VOCABULARY


def logits(model):
    model.eval()
    more = {"decoder_input_ids": TOKENS} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(input_ids=TOKENS, **more).logits.clone()


def loaded(directory):
    import transformers

    (name,) = json.loads((directory / "config.json").read_text())["architectures"]
    model, report = getattr(transformers, name).from_pretrained(directory, output_loading_info=True)
    assert not any(report.values()), report
    return model

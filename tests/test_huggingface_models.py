"""Promise: models of transformers, unchanged, and adapters of peft train sharded as they do in plain PyTorch.

Dropout stays on, since sharding draws no random numbers.
"""

from functools import partial

import pytest
import torch

from huggingface_models import VOCABULARY, bert, gpt2, llama, lora, mixtral, t5, text, vit
from pairs import pairwise
from plans import PLANS
from ranks import Case, train

places = pytest.mark.parametrize(
    ("plan", "num_ranks"), [("zero_0", 2), ("zero_1", 2), ("zero_2", 2), ("zero_3", 1), ("zero_3", 2)]
)


def checkpointed(make, reentrant):
    model = make()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    return model


def frozen_trunk():
    model = llama()
    model.model.requires_grad_(False)
    model.model.layers[2].requires_grad_(True)
    return model


def padded_text(model, turn):
    tokens = turn.randint(VOCABULARY, 2, 6)
    mask = torch.ones_like(tokens)
    mask[0, 4:] = 0
    model(input_ids=tokens, attention_mask=mask, labels=tokens).loss.backward()


def pictures(model, turn):
    model(pixel_values=turn.randn(2, 1, 8, 8), labels=turn.randint(3, 2)).loss.backward()


def accumulated_text(model, turn):
    for _ in range(2):
        with turn.accumulate(model):
            text(model, turn)
    text(model, turn)


def generate_then_train(model, turn):
    """Sampling between steps, as in learning from rewards; what was sampled becomes the next batch."""
    model.eval()
    with torch.no_grad():
        tokens = model.generate(torch.tensor([[1, 2]]) + turn.step, max_new_tokens=4, do_sample=False, pad_token_id=0)
    model.train()
    model(input_ids=tokens, labels=tokens).loss.backward()


def translate_then_train(model, turn):
    """Generation calls the encoder by itself."""
    source = turn.randint(VOCABULARY, 2, 5)
    model.eval()
    with torch.no_grad():
        tokens = model.generate(source, max_new_tokens=4, do_sample=False, num_beams=2)
    model.train()
    model(input_ids=source, labels=tokens.contiguous()).loss.backward()


def hidden_states(model, turn):
    """A loss on the hidden states that the output holds, and none on the logits."""
    out = model(input_ids=turn.randint(VOCABULARY, 2, 6), output_hidden_states=True)
    out.hidden_states[1].pow(2).mean().backward()


CASES = {
    "gpt2": Case(model=gpt2, work=text, optimizer="adamw"),
    "gpt2, generating between steps": Case(model=gpt2, work=generate_then_train),
    "t5, generating between steps": Case(model=t5, work=translate_then_train),
    "gpt2, loss on hidden states": Case(model=gpt2, work=hidden_states),
    "gpt2, recomputed": Case(model=partial(checkpointed, gpt2, False), work=text),
    "gpt2, recomputed reentrantly": Case(model=partial(checkpointed, gpt2, True), work=text),
    "llama": Case(model=llama, work=padded_text, optimizer="adamw"),
    "llama, tied": Case(model=partial(llama, tie_word_embeddings=True), work=accumulated_text),
    "llama, recomputed": Case(model=partial(checkpointed, llama, False), work=text),
    "llama, frozen trunk": Case(model=frozen_trunk, work=text, optimizer="adamw"),
    "bert": Case(model=bert, work=padded_text, optimizer="adamw"),
    "t5": Case(model=t5, work=text, optimizer="adamw"),
    "vit": Case(model=vit, work=pictures, optimizer="adamw"),
    "mixtral": Case(model=mixtral, work=text),
    "lora": Case(model=lora, work=text, optimizer="adamw", steps=3),
    "lora, head saved too": Case(model=partial(lora, saved=["lm_head"]), work=text, optimizer="adamw", steps=3),
    "lora, recomputed": Case(model=partial(lora, checkpoint=True), work=text, steps=3),
}


@pairwise(name=list(CASES), plan=PLANS, num_ranks=(1, 2))
def test_hugging_face_models(ranks, name, plan, num_ranks):
    ranks(num_ranks).run(train, CASES[name], plan)

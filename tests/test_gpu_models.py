"""Promise: real models train on GPUs under every plan as plain PyTorch does - checkpointed, compiled, in bf16."""

import copy

import pytest
import torch

import onefold
from gpu_models import gpus

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = [
    # torch 2.11's compiler looks at .grad of activations while it traces, and would rather have TF32
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]

PLANS = {"zero_1": onefold.ZERO_1, "zero_2": onefold.ZERO_2, "zero_3": onefold.ZERO_3}


def llama():
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=128,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config).cuda()


def losses(model, optimizer, steps=4):
    seen = []
    for step in range(steps):
        tokens = torch.randint(512, (2, 64), generator=torch.Generator().manual_seed(step)).cuda()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return torch.tensor(seen)


@gpus(1)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_llama_trains_as_plain_pytorch(plan, reentrant, compiled):
    torch.manual_seed(0)
    model = llama()
    plain = copy.deepcopy(model)
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.train()
    model = onefold.shard(model, plan, compile=compiled)
    got = losses(model, onefold.AdamW(model, lr=1e-3, weight_decay=0.1))
    want = losses(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.1))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@gpus(1)
def test_compiled_blocks_are_compiled_once():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = onefold.shard(llama(), onefold.ZERO_3, compile=True, precision=onefold.Precision(params="bf16"))
    optimizer = onefold.AdamW(model, lr=1e-3)
    losses(model, optimizer, steps=3)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    losses(model, optimizer, steps=3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs

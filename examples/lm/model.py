"""Owns the model: a small GPT in plain PyTorch that knows nothing of Onefold.

Invariant: the initial weights are a pure function of the shape and torch's seed, so all ranks start from the same ones.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a GPT."""

    vocab_size: int
    context: int
    layers: int
    width: int
    heads: int
    tied: bool = True
    """Does the head share its weight with the token embedding?"""
    checkpoint_activations: bool = False
    """Keep only each block's input in forward and compute the rest again in backward?"""


class Attention(nn.Module):
    """Causal self-attention, [batch, tokens, width] -> the same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, num_tokens, width = x.shape
        split = self.qkv(x).view(batch, num_tokens, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each [batch, heads, tokens, width / heads]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, num_tokens, width))


class Block(nn.Module):
    """One pre-norm transformer block, [batch, tokens, width] -> the same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.norm_mlp = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class GPT(nn.Module):
    """A decoder-only transformer over tokens."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocab_size, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab_size, bias=False)
        self.apply(_initialize)
        for block in self.blocks:
            # GPT-2: the sum of 2 x layers branches should not grow with depth.
            for branch in (block.attention.out, block.down):
                branch.weight.data /= (2 * shape.layers) ** 0.5
        if shape.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits [batch, tokens, vocab], or, given `targets`, the mean cross-entropy in nats (fp32 scalar).

        `tokens` and `targets` are int64 [batch, tokens]. The loss belongs in here because fp16 loss scaling multiplies
        the gradient where it enters the model's output: an fp32 loss cannot underflow there, fp16 logits can.
        """
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            if self.shape.checkpoint_activations and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


@torch.no_grad()
def generate(model: GPT, prompt: Tensor, num_tokens: int, temperature: float, seed: int) -> Tensor:
    """Continue `prompt`, int64 [tokens], by `num_tokens` sampled tokens; returns both, int64 on the CPU.

    Every rank must call this with the same arguments: with partitioned parameters a forward pass is collective. Equal
    weights and an equal seed then give every rank the same text.
    """
    device, context = prompt.device, model.shape.context
    generator = torch.Generator().manual_seed(seed)
    text = prompt.tolist()
    for _ in range(num_tokens):
        window = text[-context:]
        # Attention is causal, so what fills the window after the text is never read; one fixed shape compiles once.
        filled = torch.tensor([window + [0] * (context - len(window))], device=device)
        logits = model(filled)[0, len(window) - 1].float().cpu()
        chances = torch.softmax(logits / temperature, dim=-1)
        text.append(int(torch.multinomial(chances, 1, generator=generator)))
    return torch.tensor(text)

"""The demo's model: a small character-level transformer, made of two stages that can live on two ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .text import LONGEST, VOCABULARY

_WIDTH = 64
_HEADS = 4
_BLOCKS = 2  # in each stage
_LEARNING_RATE = 3e-3


class Block(nn.Module):
    """Attention to what comes before in the same line, then a small network for each character."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(_WIDTH)
        self.mix_in = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.mix_out = nn.Linear(_WIDTH, _WIDTH)
        self.network = nn.Sequential(
            nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH)
        )

    def forward(self, hidden: Tensor, visible: Tensor) -> Tensor:
        rows, length, _ = hidden.shape
        parts = self.mix_in(self.before_attention(hidden)).view(rows, length, 3, _HEADS, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=visible)
        hidden = hidden + self.mix_out(mixed.transpose(1, 2).reshape(rows, length, _WIDTH))
        out: Tensor = hidden + self.network(hidden)
        return out


class Stage(nn.Module):
    """Half of the blocks. Both halves look at the mask and at the positions, so both must get them."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Embedding(LONGEST, _WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(_BLOCKS))

    def forward(self, hidden: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        length = mask.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        visible = (mask[:, None, :] & causal)[:, None]
        hidden = hidden + self.place(positions)
        for block in self.blocks:
            hidden = block(hidden, visible)
        return hidden


class First(nn.Module):
    """From characters to a hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, _WIDTH)
        self.stage = Stage()

    def forward(self, tokens: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        out: Tensor = self.stage(self.embed(tokens), mask, positions)
        return out


class Second(nn.Module):
    """From a hidden state to the loss of each line, in nats, summed over its characters."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = Stage()
        self.head = nn.Sequential(nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, VOCABULARY))

    def forward(self, hidden: Tensor, mask: Tensor, positions: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.stage(hidden, mask, positions))
        losses = functional.cross_entropy(logits.transpose(1, 2), targets.long(), reduction="none")
        return (losses * mask).sum(dim=1)


def build(seed: int) -> tuple[First, Second]:
    """Both halves, the same for the same seed, whichever of them the caller keeps."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return First(), Second()


def optimizer(*parts: nn.Module) -> torch.optim.Optimizer:
    parameters = [parameter for part in parts for parameter in part.parameters()]
    return torch.optim.AdamW(parameters, lr=_LEARNING_RATE)

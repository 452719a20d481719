"""Training a small GPT whose attention is written by hand: losses and weights of eager and of the pass, compared.

    python examples/training.py           # five steps of 512 tokens: about a minute on two cores
    python examples/training.py --small   # three steps of a tiny one, without code generation: seconds

Gradients go through the chosen kernel; it mostly saves memory, since no score matrix is kept for the backward. With
active attention dropout the sites would be left on a CPU, whose kernel has no dropout.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
import typer
from side_by_side import compare
from torch import Tensor, nn

import attn_pass


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * q.size(-1) ** -0.5
        later = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
        attended = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        x = x + self.out(attended.transpose(1, 2).reshape(b, n, d))
        return x + self.mlp(x)


class Gpt(nn.Module):
    def __init__(self, tokens: int, dim: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, dim)
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(layers)))
        self.head = nn.Linear(dim, tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens)))


def trained(model: nn.Module, backend: Any, data: Tensor) -> list[Tensor]:
    """Trains a copy of the model; the losses of all steps, and the weights at the end."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = model if backend is None else torch.compile(model, backend=backend)
    found = []
    for batch in data:
        loss = F.cross_entropy(run(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [torch.stack(found), *model.parameters()]


def main(small: bool = False) -> float:
    """Returns the error of the pass's losses and weights against eager's."""
    tokens, length, steps = (100, 33, 3) if small else (1000, 513, 5)
    torch.manual_seed(0)
    model = Gpt(tokens, *((32, 2, 1) if small else (256, 8, 4))).train()
    data = torch.randint(tokens, (steps, 2, length))

    print(attn_pass.explain(model, data[0][:, :-1]))
    backend = attn_pass.wrap("aot_eager", choose="fused") if small else attn_pass.backend
    ways = {"eager": lambda: trained(model, None, data), "attn_pass": lambda: trained(model, backend, data)}
    return compare(ways, rounds=1)


if __name__ == "__main__":
    typer.run(main)

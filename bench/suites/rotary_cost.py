"""What fusing a rotary embedding into attention could save, predicted: `python -m bench rotary-cost [--json FILE]`.

Inductor makes one loop of the rotation, which writes rotated queries and keys; a kernel that rotated them while it
packs them would neither write nor read those. The table has the most that this can save: the time to write and read
them once at this device's rates, with the arithmetic free and no row rotated twice, beside the predicted time of the
attention and of a whole block (attention, projections and feed-forward at the rate of this device's products).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

import attn_pass
from attn_pass.devices import roofline
from attn_pass.devices.registry import device_for
from attn_pass.model.dtype_name import dtype_name
from bench.harness.command import Json, started
from bench.harness.document import Column, Row

COLUMNS = (
    Column("layer", "layer"),
    Column("dtype", "dtype"),
    Column("attention ms", "attention_ms", ",.3f"),
    Column("block ms", "block_ms", ",.2f"),
    Column("rotated MB", "rotated_mb", ",.3f"),
    Column("saved at most ms", "saved_ms", ",.4f"),
    Column("% of the attention", "of_attention", ".2f"),
    Column("% of the block", "of_block", ".3f"),
)


@dataclass(frozen=True)
class Layer:
    """A layer of a decoder: its sizes, and how many tokens it is given beside those in its cache."""

    name: str
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    tokens: int
    cached: int = 0

    @property
    def rotated(self) -> int:
        """Elements of queries and keys that are rotated: keys in a cache were rotated before."""
        return self.tokens * (self.heads + self.kv_heads) * self.head_dim

    @property
    def flops(self) -> float:
        """Of the products around the attention."""
        projections = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return 2.0 * self.tokens * (projections + 3 * self.hidden * self.feed_forward)

    @property
    def weights(self) -> int:
        """Elements of the weights of those products, which a step of one token reads once."""
        return int(self.flops) // (2 * self.tokens)


LAYERS = (
    Layer("Llama 3 8B, 1 x 2048", 4096, 14336, 32, 8, 128, 2048),
    Layer("Llama 3 8B, 1 x 256", 4096, 14336, 32, 8, 128, 256),
    Layer("Llama 3 8B, a step over 4096", 4096, 14336, 32, 8, 128, 1, 4095),
    Layer("Gemma 2 2B, 1 x 2048", 2304, 9216, 8, 4, 256, 2048),
    Layer("Qwen 3 0.6B, 1 x 2048", 1024, 3072, 16, 8, 128, 2048),
    Layer("Qwen 3 0.6B, 1 x 256", 1024, 3072, 16, 8, 128, 256),
)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of a layer, with as many query as key heads where they are shared."""
    causal = q.shape[2] == k.shape[2]
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def predicted(layer: Layer, dtype: torch.dtype) -> Row:
    """The cells of a layer."""
    device = device_for(torch.device("cpu"))
    queries = torch.empty(1, layer.heads, layer.tokens, layer.head_dim, dtype=dtype)
    keys = torch.empty(1, layer.kv_heads, layer.tokens + layer.cached, layer.head_dim, dtype=dtype)
    (site,) = attn_pass.explain(attention, queries, keys, keys).sites
    taken = min(us for us in site.predicted_us.values())
    around = max(
        layer.flops / device.matmul(dtype) / 1e3,
        roofline.traffic(device, layer.weights * dtype.itemsize),
    )
    size = layer.rotated * dtype.itemsize
    saved = 2 * roofline.traffic(device, size)
    return {
        "layer": layer.name,
        "dtype": dtype_name(dtype),
        "attention_ms": taken / 1e3,
        "block_ms": (taken + around) / 1e3,
        "rotated_mb": size / 1e6,
        "saved_ms": saved / 1e3,
        "of_attention": 100 * saved / taken,
        "of_block": 100 * saved / (taken + around),
    }


def main(json_file: Json = None) -> None:
    """Predict what fusing rotary embeddings into the CPU kernel could save."""
    recorder = started("Rotary embeddings in the CPU kernel, predicted", json_file)
    table = recorder.table("The most that can be saved", COLUMNS)
    for layer, dtype in product(LAYERS, (torch.float32, torch.bfloat16)):
        table.rows.append(predicted(layer, dtype))
    recorder.finish()

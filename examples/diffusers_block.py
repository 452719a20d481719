"""A transformer of Stable Diffusion 1.5, with diffusers' plain attention processor: explained, compiled, compared.

    python examples/diffusers_block.py           # 64 x 64 latents, 77 text tokens: about a minute on two cores
    python examples/diffusers_block.py --small   # a tiny one, without code generation: seconds

It contains both kinds of attention: self-attention of the image (4096 keys), and cross-attention to the text (77 keys).
"""

from __future__ import annotations

import torch
import typer
from diffusers import Transformer2DModel
from diffusers.models.attention_processor import Attention, AttnProcessor
from side_by_side import compare

import attn_pass


def main(small: bool = False) -> float:
    """Returns the error of the pass against eager."""
    side, heads, dim, text = (8, 2, 16, 32) if small else (64, 8, 40, 768)
    torch.manual_seed(0)
    model = Transformer2DModel(
        num_attention_heads=heads,
        attention_head_dim=dim,
        in_channels=heads * dim,
        cross_attention_dim=text,
        norm_num_groups=16,
    ).eval()
    for module in model.modules():
        if isinstance(module, Attention):
            module.set_processor(AttnProcessor())  # products and a softmax, as in diffusers before torch 2.0
    inputs = (torch.randn(2, heads * dim, side, side), torch.randn(2, 77, text))

    with torch.no_grad():
        print(attn_pass.explain(model, *inputs, return_dict=False))
        backend = attn_pass.wrap("aot_eager", choose="fused") if small else attn_pass.backend
        fast = torch.compile(model, backend=backend)
        ways = {"eager": lambda: model(*inputs, return_dict=False)}
        if not small:
            stock = torch.compile(model)
            ways["torch.compile"] = lambda: stock(*inputs, return_dict=False)
        ways["attn_pass"] = lambda: fast(*inputs, return_dict=False)
        return compare(ways, rounds=2 if small else 5)


if __name__ == "__main__":
    typer.run(main)

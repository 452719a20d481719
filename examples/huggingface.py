"""An unchanged Hugging Face model: explained, compiled with the pass, compared with eager and with stock.

    python examples/huggingface.py           # GPT-2 small, 1 x 512 tokens: about a minute on two cores
    python examples/huggingface.py --small   # a tiny one, without code generation: seconds

Weights are random, made from the configuration: nothing is downloaded. With `from_pretrained` the code is the same.
"""

from __future__ import annotations

import torch
import typer
from side_by_side import compare
from transformers import GPT2Config, GPT2LMHeadModel

import attn_pass


def main(small: bool = False) -> float:
    """Returns the error of the pass against eager."""
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 64, "vocab_size": 500} if small else {}
    config = GPT2Config(**sizes, attn_implementation="eager", use_cache=False, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).eval()
    tokens = torch.randint(3, config.vocab_size, (1, 64 if small else 512))

    with torch.no_grad():
        # 1. Ask first: what would become of every attention, and why. Nothing is compiled.
        print(attn_pass.explain(model, tokens))

        # 2. Compile with the pass: the one line that changes in your program is the backend.
        backend = attn_pass.wrap("aot_eager", choose="fused") if small else attn_pass.backend
        fast = torch.compile(model, backend=backend)

        # 3. Compare.
        ways = {"eager": lambda: model(tokens).logits}
        if not small:
            stock = torch.compile(model)
            ways["torch.compile"] = lambda: stock(tokens).logits
        ways["attn_pass"] = lambda: fast(tokens).logits
        return compare(ways, rounds=2 if small else 5)


if __name__ == "__main__":
    typer.run(main)

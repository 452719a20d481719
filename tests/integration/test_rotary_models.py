"""Rotary embeddings and norms of real architectures: what is read of each, and that it computes queries and keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from prologue_reference import captured_graphs, checked
from torch import nn

transformers = pytest.importorskip("transformers")

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 32,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "use_cache": False,
}


def text(
    kind: str, config: str = "Config", model: str = "Model", **settings: Any
) -> Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]]:
    def build() -> tuple[nn.Module, dict[str, torch.Tensor]]:
        made = getattr(transformers, kind + config)(**{k: v for k, v in {**TINY, **settings}.items() if v is not None})
        tokens = torch.randint(1, 90, (2, 12), generator=torch.Generator().manual_seed(1))
        return getattr(transformers, kind + model)(made), {"input_ids": tokens}

    return build


def pixtral() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    config = transformers.PixtralVisionConfig(**sizes, image_size=32, patch_size=8, head_dim=8)
    return transformers.PixtralVisionModel(config), {"pixel_values": torch.randn(1, 3, 32, 24)}


def rms(eps: str) -> str:
    return f"RMS norm over the head dim (eps {eps}), with a weight, then "


ALL = "rotary over all 8 elements, "
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 4,
}
EXPERTS = {"n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]], str]] = {
    "Llama": (text("Llama"), f"{ALL}in halves"),
    "GPT-NeoX": (
        text("GPTNeoX", rotary_pct=0.5, head_dim=None, num_key_value_heads=None),
        "rotary over elements 0 to 3 of 8, in halves",
    ),
    "GPT-J": (
        text("GPTJ", n_embd=32, n_layer=1, n_head=4, rotary_dim=4),
        "rotary over elements 0 to 3 of 8, interleaved",
    ),
    "Gemma 3": (text("Gemma3", "TextConfig", "TextModel"), f"{rms('1e-06')}{ALL}in halves"),
    "Qwen 3": (text("Qwen3"), f"{rms('1e-06')}{ALL}in halves"),
    "OLMo 2": (
        text("Olmo2"),
        f"RMS norm over all heads together (eps 1e-05), with a weight, then {ALL}in halves",
    ),
    "DeepSeek V3": (
        text("DeepseekV3", **LATENT, **EXPERTS, num_key_value_heads=4, first_k_dense_replace=1),
        "rotary over elements 8 to 11 of 12, interleaved",
    ),
    "Llama 4": (
        text("Llama4", "TextConfig", "TextModel", num_local_experts=2, use_qk_norm=False, no_rope_layers=[1]),
        f"{ALL}interleaved",
    ),
    "Pixtral": (pixtral, f"{ALL}in halves"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_read(name: str) -> None:
    build, expected = MODELS[name]
    torch.manual_seed(0)
    model, inputs = build()
    graphs = captured_graphs(model.eval(), **inputs)
    found = [read for gm, given in graphs for read in checked(gm, given, tolerance=1e-4)]
    assert [{n: str(p) for n, p in read.items()} for read in found] == [{"query": expected, "key": expected}]

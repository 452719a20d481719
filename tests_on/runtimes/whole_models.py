"""Small models of transformers with attention by hand, from their configurations, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

_SMALL = {"vocab_size": 100, "attn_implementation": "eager"}
_SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 64}


@dataclass(frozen=True)
class Model:
    """A model and its inputs; ``sites``: how many attentions it has."""

    make: Callable[[], Any]
    inputs: Callable[[], dict[str, torch.Tensor]]
    sites: int = 2

    def made(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """The model, to be evaluated, and its inputs."""
        torch.manual_seed(0)
        return self.make().eval(), self.inputs()


def _ids() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.arange(32).reshape(2, 16) % 100}


def _padded() -> dict[str, torch.Tensor]:
    return {**_ids(), "attention_mask": (torch.arange(16) < torch.tensor([[16], [9]])).long()}


def _bert() -> Any:
    return transformers.BertModel(transformers.BertConfig(**_SIZES, **_SMALL))


def _gpt2() -> Any:
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=4, use_cache=False, **_SMALL)
    return transformers.GPT2Model(config)


def _llama() -> Any:
    config = transformers.LlamaConfig(num_key_value_heads=2, use_cache=False, **_SIZES, **_SMALL)
    return transformers.LlamaModel(config)


MODELS = {
    "BERT": Model(_bert, _padded),
    "GPT-2": Model(_gpt2, _ids),
    "Llama": Model(_llama, _ids),
}

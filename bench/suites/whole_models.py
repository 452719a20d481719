"""Whole models at the sizes they are used at, with random weights: what `python -m bench models` measures.

Nothing is downloaded. Each is a module of plain tensors that returns what a caller uses; attention is written out
("by hand": `attn_implementation="eager"`, timm without its fused attention, diffusers' AttnProcessor) unless a name
says SDPA.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import nn

# Imported first: it keeps both libraries off the network. Sharper weights give scores a spread that shows a wrong mask.
from bench.suites.architectures import _sharpen

Tensors = tuple[torch.Tensor, ...]
Built = tuple[nn.Module, Tensors]


@dataclass(frozen=True)
class Model:
    """A model by name; `make()` returns the module and its inputs, `exact` says if a float64 run is affordable."""

    name: str
    make: Callable[[], Built]
    exact: bool = True

    def build(self) -> Built:
        """The module in eval mode, and its inputs: the same weights and numbers on every call."""
        torch.manual_seed(0)
        module, inputs = self.make()
        _sharpen(module)
        return module.eval().requires_grad_(False), inputs


# ---- what is called ----


class Called(nn.Module):
    """A library's model: tensors go in under these names, beside fixed settings; the first output comes out."""

    def __init__(self, model: nn.Module, *names: str, **settings: Any) -> None:
        super().__init__()
        self.model = model
        self.names, self.settings = names, settings

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.model(**dict(zip(self.names, tensors)), **self.settings)[0]
        return output


class Prefill(nn.Module):
    """What generation does with a prompt: all hidden states, and the logits of the last token."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, head

    def forward(self, ids: torch.Tensor) -> Tensors:
        hidden = self.body(input_ids=ids, use_cache=False)[0]
        return hidden, self.head(hidden[:, -1:])


class Decode(nn.Module):
    """One token against a static cache whose other places are taken; every call writes the same last place."""

    def __init__(self, model: Any, length: int) -> None:
        super().__init__()
        from transformers import StaticCache

        self.model, self.position = model, length - 1
        config = model.config
        static_cache: Any = StaticCache
        self.cache = static_cache(config=config, max_cache_len=length)
        self.cache.early_initialization(
            1, config.num_key_value_heads, config.head_dim, dtype=torch.float32, device=torch.device("cpu")
        )
        for layer in self.cache.layers:
            layer.keys.normal_()
            layer.values.normal_()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        # The cache counts its own tokens; without this the next call would write behind its end.
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.position)
        logits: torch.Tensor = self.model(input_ids=ids, past_key_values=self.cache, use_cache=True).logits
        return logits


# ---- how it is built ----


def _tokens(vocabulary: int, batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, vocabulary, (batch, length))


def _padding(batch: int, length: int) -> torch.Tensor:
    """A (batch, length) mask of ones; each sequence is a twelfth shorter than the one before it."""
    lengths = length - length // 12 * torch.arange(batch)
    return (torch.arange(length) < lengths[:, None]).long()


def _transformers(model: str, config: str, attention: str = "eager", **sizes: Any) -> Any:
    import transformers

    made = getattr(transformers, config)(**sizes)
    return getattr(transformers, model)._from_config(made, attn_implementation=attention)


def gpt2(attention: str = "eager", length: int = 1024, **sizes: Any) -> Built:
    """GPT-2 small, which is what its config class makes by default."""
    model = _transformers("GPT2LMHeadModel", "GPT2Config", attention, **sizes)
    return Prefill(model.transformer, model.lm_head), (_tokens(model.config.vocab_size, 1, length),)


def bert(batch: int = 8, length: int = 512, **sizes: Any) -> Built:
    """BERT base, its config class's default, on sequences of different lengths."""
    model = _transformers("BertModel", "BertConfig", **sizes)
    tokens = _tokens(model.config.vocab_size, batch, length)
    return Called(model, "input_ids", "attention_mask"), (tokens, _padding(batch, length))


LLAMA: Mapping[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
"""Llama 3.2 1B with 4 of its 16 layers, and the vocabulary of Llama 2."""


def _llama(attention: str) -> Any:
    return _transformers("LlamaForCausalLM", "LlamaConfig", attention, **LLAMA)


def llama(attention: str = "eager", length: int = 2048) -> Built:
    """A prompt."""
    model = _llama(attention)
    return Prefill(model.model, model.lm_head), (_tokens(model.config.vocab_size, 1, length),)


def llama_decode(attention: str = "eager", length: int = 4096) -> Built:
    """One step of generation."""
    model = _llama(attention)
    return Decode(model, length), (_tokens(model.config.vocab_size, 1, 1),)


def t5_encoder() -> Built:
    """The encoder of t5-base."""
    sizes: dict[str, Any] = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "d_kv": 64}
    model = _transformers("T5EncoderModel", "T5Config", **sizes)
    return Called(model, "input_ids"), (_tokens(model.config.vocab_size, 1, 512),)


def whisper_encoder() -> Built:
    """The encoder of whisper-small on 30 s of sound, 3000 frames."""
    sizes: dict[str, Any] = {"encoder_layers": 12, "encoder_attention_heads": 12, "encoder_ffn_dim": 3072}
    model = _transformers("WhisperModel", "WhisperConfig", d_model=768, decoder_layers=1, **sizes)
    return Called(model.encoder, "input_features"), (torch.randn(1, 80, 3000),)


def _pixels() -> Tensors:
    return (torch.randn(8, 3, 224, 224),)


def vit() -> Built:
    """ViT-B/16, its config class's default: 197 tokens an image."""
    return Called(_transformers("ViTModel", "ViTConfig"), "pixel_values"), _pixels()


def swin() -> Built:
    """swin_tiny, its config class's default; every other block shifts its windows and so adds a mask."""
    return Called(_transformers("SwinModel", "SwinConfig"), "pixel_values"), _pixels()


# What timm imports of torchvision: data transforms and a norm class that no model here has.
TORCHVISION = (
    *("torchvision", "torchvision.datasets", "torchvision.ops", "torchvision.ops.misc", "torchvision.transforms"),
    *("torchvision.transforms.functional", "torchvision.models", "torchvision.models.feature_extraction"),
)


def timm_model(name: str) -> Built:
    """A model of timm with attention written out. torchvision need not be installed."""
    if find_spec("torchvision") is not None:
        import timm
    else:
        sys.modules.update({module: MagicMock() for module in TORCHVISION})
        import timm

        for module in TORCHVISION:
            del sys.modules[module]
    timm.layers.set_fused_attn(False)  # type: ignore[attr-defined]
    return timm.create_model(name, pretrained=False), _pixels()


def diffusion_block(attention: str = "eager") -> Built:
    """The transformer of Stable Diffusion 1.5's widest level, 64 x 64, with and without its prompt (batch 2)."""
    from diffusers import Transformer2DModel
    from diffusers.models.attention_processor import Attention, AttnProcessor, AttnProcessor2_0

    transformer: Any = Transformer2DModel
    model = transformer(
        num_attention_heads=8, attention_head_dim=40, in_channels=320, cross_attention_dim=768, norm_num_groups=32
    )
    processor: Any = AttnProcessor if attention == "eager" else AttnProcessor2_0
    for module in model.modules():
        if isinstance(module, Attention):
            module.set_processor(processor())
    inputs = torch.randn(2, 320, 64, 64), torch.randn(2, 77, 768)
    # The class of its output warns that it will move, which no full graph can hold.
    return Called(model, "hidden_states", "encoder_hidden_states", return_dict=False), inputs


MODELS: tuple[Model, ...] = (
    Model("GPT-2 small, 1 x 1024", gpt2),
    Model("GPT-2 small, 1 x 1024, SDPA", functools.partial(gpt2, "sdpa")),
    Model("BERT base, 8 x 512, padded", bert),
    Model("ViT-B/16, 8 x 197", vit),
    Model("ViT-B/16 of timm, 8 x 197", functools.partial(timm_model, "vit_base_patch16_224")),
    Model("Llama, 4 layers, 32/8 heads, 1 x 2048", llama, exact=False),
    Model("Llama, 4 layers, 32/8 heads, 1 x 2048, SDPA", functools.partial(llama, "sdpa"), exact=False),
    Model("Llama, 4 layers, 32/8 heads, decode, 1 x 4096", llama_decode, exact=False),
    Model("Llama, 4 layers, 32/8 heads, decode, 1 x 4096, SDPA", functools.partial(llama_decode, "sdpa"), exact=False),
    Model("T5 base encoder, 1 x 512", t5_encoder),
    Model("Whisper small encoder, 1 x 1500", whisper_encoder),
    Model("diffusion block, 2 x 4096, 77 cross", diffusion_block),
    Model("diffusion block, 2 x 4096, 77 cross, SDPA", functools.partial(diffusion_block, "sdpa")),
    Model("Swin tiny, 8 x 224 x 224", swin),
    Model("Swin tiny of timm, 8 x 224 x 224", functools.partial(timm_model, "swin_tiny_patch4_window7_224")),
)

QUICK: tuple[Model, ...] = (
    Model("GPT-2, 2 layers, 1 x 128", functools.partial(gpt2, length=128, n_embd=128, n_layer=2, n_head=4)),
    Model(
        "BERT, 2 layers, 2 x 128, padded",
        functools.partial(
            bert, 2, 128, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512
        ),
    ),
)

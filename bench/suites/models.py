"""Whole models at the sizes they are used at, the pass against stock: `python -m bench models [--json FILE] [--quick]`.

Attention is written out (`attn_implementation="eager"`, timm without its fused attention, diffusers' AttnProcessor)
unless a name says SDPA. Where float64 would take too long, outputs are compared with eager's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from bench.harness import variants as w
from bench.harness.programs import Built, Program, Setting, Tensors
from bench.suites.zoo import Called, library, padding, pixels, ready, timm_model, tokens

TITLE = "Whole models"
WAYS = (*w.COMPILED, *w.FROZEN, *w.PACKAGED_FROZEN)
# Of the largest value, after as many layers. Random weights carry the rounding of bfloat16 on from layer to layer.
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: None}


class Autocast(nn.Module):
    """A model in float32 under autocast to bfloat16, as training scripts and pipelines run it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *tensors: torch.Tensor) -> Any:
        with torch.autocast(tensors[0].device.type, torch.bfloat16):
            result: Any = self.model(*tensors)
        return result


class Prefill(nn.Module):
    """What generation does with a prompt: all hidden states, and the logits of the last token."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, head

    def forward(self, ids: torch.Tensor) -> Tensors:
        hidden = self.body(input_ids=ids, use_cache=False)[0]
        return hidden, self.head(hidden[:, -1:])


def full_cache(config: Any, batch: int, length: int, dtype: torch.dtype = torch.float32) -> Any:
    """A static cache of transformers, in all of whose places there are random numbers."""
    from transformers import StaticCache

    static_cache: Any = StaticCache
    cache = static_cache(config=config, max_cache_len=length)
    sizes = (batch, config.num_key_value_heads, config.head_dim)
    cache.early_initialization(*sizes, dtype=dtype, device=torch.device("cpu"))
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
    return cache


class Decode(nn.Module):
    """One token against a static cache whose other places are taken; every call writes the same last place."""

    def __init__(self, model: Any, length: int) -> None:
        super().__init__()
        self.model, self.position = model, length - 1
        self.cache = full_cache(model.config, 1, length)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Decode:
        """What moves the weights moves the cache, which is no module."""
        super()._apply(fn, recurse)
        for layer in self.cache.layers:
            layer.keys, layer.values = fn(layer.keys), fn(layer.values)
        return self

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        # The cache counts its own tokens; without this the next call would write behind its end.
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.position)
        logits: torch.Tensor = self.model(input_ids=ids, past_key_values=self.cache, use_cache=True).logits
        return logits


# ---------------------------------------------------------------- how they are built


def gpt2(attention: str = "eager", length: int = 1024, **sizes: Any) -> Built:
    """GPT-2 small, which is what its config class makes by default."""
    model = library("GPT2LMHeadModel", "GPT2Config", attention, **sizes)
    return Prefill(model.transformer, model.lm_head), (tokens(1, length, model.config.vocab_size),)


def gpt2_body(attention: str = "eager", length: int = 1024, **sizes: Any) -> Built:
    """The same without its head."""
    model = library("GPT2Model", "GPT2Config", attention, **sizes)
    return Called(model, "input_ids", use_cache=False), (tokens(1, length, model.config.vocab_size),)


def bert(attention: str = "eager", batch: int = 8, length: int = 512, **sizes: Any) -> Built:
    """BERT base, its config class's default, on sequences of different lengths."""
    model = library("BertModel", "BertConfig", attention, **sizes)
    ids = tokens(batch, length, model.config.vocab_size)
    return Called(model, "input_ids", "attention_mask"), (ids, padding(batch, length))


def small_bert(attention: str = "eager") -> Built:
    """For quick runs."""
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}
    return bert(attention, 2, 128, **sizes)


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


def llama(attention: str = "eager", length: int = 2048) -> Built:
    """A prompt."""
    model = library("LlamaForCausalLM", "LlamaConfig", attention, **LLAMA)
    return Prefill(model.model, model.lm_head), (tokens(1, length, model.config.vocab_size),)


def llama_decode(attention: str = "eager", length: int = 4096) -> Built:
    """One step of generation."""
    model = library("LlamaForCausalLM", "LlamaConfig", attention, **LLAMA)
    return Decode(model, length), (tokens(1, 1, model.config.vocab_size),)


def t5_encoder(num_layers: int = 12) -> Built:
    """The encoder of t5-base."""
    sizes: dict[str, Any] = {"d_model": 768, "d_ff": 3072, "num_layers": num_layers, "num_heads": 12, "d_kv": 64}
    model = library("T5EncoderModel", "T5Config", **sizes)
    return Called(model, "input_ids"), (tokens(1, 512, model.config.vocab_size),)


def whisper_encoder(encoder_layers: int = 12) -> Built:
    """The encoder of whisper-small on 30 s of sound, 3000 frames."""
    sizes: dict[str, Any] = {"encoder_layers": encoder_layers, "encoder_attention_heads": 12, "encoder_ffn_dim": 3072}
    model = library("WhisperModel", "WhisperConfig", d_model=768, decoder_layers=1, **sizes)
    return Called(model.encoder, "input_features"), (torch.randn(1, 80, 3000),)


def image_model(model: str, config: str, attention: str = "eager", **sizes: Any) -> Built:
    """Of its config class's default sizes but for these: ViT-B/16 and swin_tiny."""
    return Called(library(model, config, attention, **sizes), "pixel_values"), (pixels(8, 224),)


vit = partial(image_model, "ViTModel", "ViTConfig")


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
    return Called(model, "hidden_states", "encoder_hidden_states"), inputs


def _timm(name: str) -> Built:
    return timm_model(name), (pixels(8, 224),)


MODELS: Mapping[str, Callable[[], Built]] = {
    "GPT-2 small, 1 x 1024": gpt2,
    "BERT base, 8 x 512, padded": bert,
    "ViT-B/16, 8 x 197": vit,
    "Llama, 4 layers, 32/8 heads, decode, 1 x 4096": llama_decode,
    "T5 base encoder, 1 x 512": t5_encoder,
    "Whisper small encoder, 1 x 1500": whisper_encoder,
    "diffusion block, 2 x 4096, 77 cross": diffusion_block,
    "Swin tiny, 8 x 224 x 224": partial(image_model, "SwinModel", "SwinConfig"),
    "Llama, 4 layers, 32/8 heads, 1 x 2048": llama,
    "ViT-B/16 of timm, 8 x 197": partial(_timm, "vit_base_patch16_224"),
    "Swin tiny of timm, 8 x 224 x 224": partial(_timm, "swin_tiny_patch4_window7_224"),
    "GPT-2 small, 1 x 1024, SDPA": partial(gpt2, "sdpa"),
    "Llama, 4 layers, 32/8 heads, decode, 1 x 4096, SDPA": partial(llama_decode, "sdpa"),
    "diffusion block, 2 x 4096, 77 cross, SDPA": partial(diffusion_block, "sdpa"),
    "Llama, 4 layers, 32/8 heads, 1 x 2048, SDPA": partial(llama, "sdpa"),
}
"""Attention written out, and then some of them with calls."""
QUICK: Mapping[str, Callable[[], Built]] = {
    "GPT-2, 2 layers, 1 x 128": partial(gpt2, length=128, n_embd=128, n_layer=2, n_head=4),
    "BERT, 2 layers, 2 x 128, padded": small_bert,
}


def made(make: Callable[..., Built], dtype: torch.dtype, device: str = "cpu") -> Built:
    """The model and its inputs on the device: the same weights and numbers on every call."""
    torch.manual_seed(0)
    module, inputs = make()
    floating = tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)
    return ready(module).to(device, dtype), tuple(x.to(device) for x in floating)


def made_for_autocast(make: Callable[..., Built], device: str = "cpu") -> Built:
    """The same in float32, under autocast."""
    module, inputs = made(make, torch.float32, device)
    return Autocast(module).eval(), inputs


AUTOCAST = ", autocast"
_FORMS: Mapping[str, tuple[torch.dtype, Callable[..., Any]]] = {
    "": (torch.float32, lambda make: partial(made, make, torch.float32)),
    ", bfloat16": (torch.bfloat16, lambda make: partial(made, make, torch.bfloat16)),
    AUTOCAST: (torch.bfloat16, lambda make: partial(made_for_autocast, make)),
}
"""What a name ends with: the type of the products, and what makes such a model. Float64 autocast leaves as it is."""


def is_small(name: str) -> bool:
    """Whether a model is computed in float64, too, to compare with."""
    return "Llama" not in name


def in_float32(make: Callable[..., Built], *inputs: torch.Tensor) -> Any:
    """What a model gives in float32: one under autocast would narrow that as well."""
    return made(make, torch.float32)[0](*inputs)


def programs(setting: Setting) -> list[Program]:
    """All models in float32, in bfloat16 and under autocast; two small ones in quick runs."""
    return [
        Program(
            f"{name}{form}",
            maker(make),
            dtype=dtype,
            tolerance=TOLERANCES[dtype],
            float64=is_small(name),
            reference=None if form != AUTOCAST or is_small(name) else partial(in_float32, make),
        )
        for form, (dtype, maker) in _FORMS.items()
        for name, make in (QUICK if setting.quick else MODELS).items()
        if form != AUTOCAST or "decode" not in name  # transformers' static cache takes keys and values of one type
    ]

"""Models of transformers, timm and diffusers with random weights and attention written out; nothing is downloaded.

`ARCHITECTURES` are small enough for two CPU cores. The code is that of the libraries, so that each spelling of
attention appears as users meet it, several layers deep; suites that need other depths or widths give other sizes.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any
from unittest.mock import MagicMock

# Both libraries look for a network and print advice on import; models made here need neither.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from torch import nn

Built = tuple[nn.Module, dict[str, Any]]
"""A module in eval mode and its inputs by name."""

VOCABULARY = 1000
FRAMES = 200
# A fresh initialisation gives scores near zero and a zero bias table: every softmax is then almost uniform, and a wrong
# scale or a lost bias would hardly show in the output. These factors give scores a spread of one or more. With more,
# rounding in bfloat16 grows from layer to layer until eager itself is wrong: by 44 % in GPT-2 with a factor of 4.
_SHARPER: tuple[tuple[str, float], ...] = (
    (r"\.(query|key|q_proj|k_proj)\.weight$", 4.0),
    (r"\.c_attn\.weight$", 3.0),
    (r"\.(to_q|to_k)\.weight$", 2.0),
)
_WIDE = 2048  # so many products summed have that spread as they are


def library(model: str, config: str, attention: str = "eager", **sizes: Any) -> Any:
    """A model of transformers, of its config class's default sizes but for these."""
    import transformers

    made = getattr(transformers, config)(**sizes)
    return getattr(transformers, model)._from_config(made, attn_implementation=attention)


def tokens(batch: int, length: int, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(3, vocabulary, (batch, length))


def padding(batch: int, length: int) -> torch.Tensor:
    """A (batch, length) mask of ones; each sequence is a twelfth shorter than the one before it."""
    lengths = length - length // 12 * torch.arange(batch)
    return (torch.arange(length) < lengths[:, None]).long()


def pixels(batch: int, size: int) -> torch.Tensor:
    return torch.randn(batch, 3, size, size)


def ready(module: nn.Module) -> nn.Module:
    """The module for inference, with sharper weights."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("relative_position_bias_table"):
                parameter.normal_()
            for pattern, factor in _SHARPER:
                if re.search(pattern, name) and parameter.shape[-1] < _WIDE:
                    parameter.mul_(factor)
    return module.eval().requires_grad_(False)


class Called(nn.Module):
    """A library's model: tensors go in under these names, beside fixed settings; the first output comes out."""

    def __init__(self, model: nn.Module, *names: str, **settings: Any) -> None:
        super().__init__()
        # Classes of outputs may warn that they will move, which no full graph can hold.
        self.model, self.names, self.settings = model, names, {"return_dict": False, **settings}

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.model(**dict(zip(self.names, tensors)), **self.settings)[0]
        return output


# What timm imports of torchvision: data transforms and a norm class that no model here has.
TORCHVISION = (
    *("torchvision", "torchvision.datasets", "torchvision.ops", "torchvision.ops.misc", "torchvision.transforms"),
    *("torchvision.transforms.functional", "torchvision.models", "torchvision.models.feature_extraction"),
)


def timm_model(name: str, **sizes: Any) -> nn.Module:
    """A model of timm with attention written out. torchvision need not be installed."""
    if find_spec("torchvision") is not None:
        import timm
    else:
        sys.modules.update({module: MagicMock() for module in TORCHVISION})
        import timm

        for module in TORCHVISION:
            del sys.modules[module]
    timm.layers.set_fused_attn(False)  # type: ignore[attr-defined]
    made: nn.Module = timm.create_model(name, pretrained=False, **sizes)
    return made


# ---------------------------------------------------------------- small ones


@dataclass(frozen=True)
class Architecture:
    """A model a user could have: how it is made of sizes, the sizes, its inputs, and what it is."""

    name: str
    make: Callable[..., nn.Module]
    sizes: Mapping[str, Any]
    inputs: Callable[[], dict[str, Any]]
    note: str

    def build(self, **sizes: Any) -> Built:
        """The same weights and inputs on every call; ``sizes`` in place of its own."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return ready(self.make(**{**self.sizes, **sizes})), self.inputs()


def _of(model: str, config: str) -> Callable[..., nn.Module]:
    return lambda **sizes: library(model, config, **sizes)


def _unet(**sizes: Any) -> nn.Module:
    from diffusers import UNet2DConditionModel
    from diffusers.models.attention_processor import AttnProcessor

    module = UNet2DConditionModel(**sizes)
    module.set_attn_processor(AttnProcessor())
    return module


def _text() -> dict[str, Any]:
    return {"input_ids": tokens(2, 128)}


def _padded() -> dict[str, Any]:
    return {**_text(), "attention_mask": padding(2, 128)}


def _two_texts() -> dict[str, Any]:
    return {**_padded(), "decoder_input_ids": tokens(2, 48)}


def _sound() -> dict[str, Any]:
    return {"input_features": torch.randn(2, 80, FRAMES), "decoder_input_ids": tokens(2, 32)}


def _image() -> dict[str, Any]:
    return {"pixel_values": pixels(2, 112)}


def _noise() -> dict[str, Any]:
    sample, prompt = torch.randn(2, 4, 32, 32), torch.randn(2, 77, 64)
    return {"sample": sample, "timestep": torch.tensor(10), "encoder_hidden_states": prompt}


_ENDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LAYERS = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8}
_UNCACHED = {"use_cache": False}
_GPT2 = {**_ENDS, "n_positions": 256, "n_embd": 256, "n_layer": 4, "n_head": 8, **_UNCACHED}
_BERT = {**_LAYERS, "vocab_size": VOCABULARY, "intermediate_size": 1024}
_LLAMA = {**_LAYERS, **_ENDS, "num_key_value_heads": 2, "intermediate_size": 688, **_UNCACHED}
_QWEN = {**_LLAMA, "head_dim": 32}
_T5 = {
    **{"d_model": 256, "d_kv": 32, "d_ff": 1024, "num_layers": 3, "num_decoder_layers": 3, "num_heads": 8},
    **{"vocab_size": VOCABULARY, "decoder_start_token_id": 0, **_UNCACHED},
}
_WHISPER = {
    **{"d_model": 256, "decoder_start_token_id": 1, **_ENDS, **_UNCACHED},
    **{f"{side}_layers": 3 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 8 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 1024 for side in ("encoder", "decoder")},
    "max_source_positions": FRAMES // 2,
    "max_target_positions": 64,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
_UNET = {
    "sample_size": 32,
    "block_out_channels": (64, 128),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "layers_per_block": 1,
    "cross_attention_dim": 64,
    "attention_head_dim": 4,  # the number of heads: a naming accident diffusers keeps for its checkpoints' sake
    "norm_num_groups": 16,
}
_VIT = {**_LAYERS, "image_size": 112, "patch_size": 8, "intermediate_size": 1024}
# Two stages of two blocks: the second block of a stage shifts its windows and so adds the window mask.
_SWIN = {"image_size": 112, "embed_dim": 64, "depths": [2, 2], "num_heads": [2, 4], "window_size": 7}

_SMALL = (
    Architecture("GPT-2", _of("GPT2LMHeadModel", "GPT2Config"), _GPT2, _text, "causal decoder"),
    Architecture("BERT", _of("BertModel", "BertConfig"), _BERT, _padded, "encoder, padding mask"),
    Architecture("Llama", _of("LlamaForCausalLM", "LlamaConfig"), _LLAMA, _text, "causal, 8 heads on 2 KV heads"),
    Architecture("Qwen3", _of("Qwen3ForCausalLM", "Qwen3Config"), _QWEN, _text, "causal, normalised queries and keys"),
    Architecture(
        "T5", _of("T5ForConditionalGeneration", "T5Config"), _T5, _two_texts, "encoder-decoder, learned relative bias"
    ),
    Architecture(
        "Whisper", _of("WhisperForConditionalGeneration", "WhisperConfig"), _WHISPER, _sound, "encoder-decoder, audio"
    ),
    Architecture("ViT", _of("ViTModel", "ViTConfig"), _VIT, _image, "image encoder, no mask"),
    Architecture("Swin", _of("SwinModel", "SwinConfig"), _SWIN, _image, "shifted windows, relative bias"),
    Architecture("UNet", _unet, _UNET, _noise, "diffusers UNet2DConditionModel, plain AttnProcessor"),
)
ARCHITECTURES: Mapping[str, Architecture] = {architecture.name: architecture for architecture in _SMALL}

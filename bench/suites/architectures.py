"""Real architectures, built from their config classes with random weights and eager attention.

Nothing is downloaded and nothing needs torchvision. The sizes are small enough for two CPU cores; the code is that of
the libraries, so each spelling of attention appears as users meet it, several layers deep.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Both libraries look for a network and print advice on import; models made here need neither.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from torch import nn

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

VOCABULARY = 1000


@dataclass(frozen=True)
class Architecture:
    """A model a user could have: what it is called, and how to make it.

    `build()` returns `(module, args, kwargs)`, the module in eval mode; every call gives the same weights and inputs.
    """

    name: str
    build: Callable[[], Built]
    note: str = ""


def _tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length))


def _padding(batch: int, length: int) -> torch.Tensor:
    """A (batch, length) mask of ones with zeros at the end of all but the first row."""
    lengths = length - 7 * torch.arange(batch)
    return (torch.arange(length) < lengths[:, None]).long()


def _gpt2() -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=256,
        n_embd=256,
        n_layer=4,
        n_head=8,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="eager",
    )
    return GPT2LMHeadModel(config), (), {"input_ids": _tokens(2, 128)}


def _bert() -> Built:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        intermediate_size=1024,
        attn_implementation="eager",
    )
    return BertModel(config), (), {"input_ids": _tokens(2, 128), "attention_mask": _padding(2, 128)}


def _llama() -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=688,
        use_cache=False,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config), (), {"input_ids": _tokens(2, 128)}


def _t5() -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=256,
        d_kv=32,
        d_ff=1024,
        num_layers=3,
        num_decoder_layers=3,
        num_heads=8,
        use_cache=False,
        decoder_start_token_id=0,
        attn_implementation="eager",
    )
    inputs = {
        "input_ids": _tokens(2, 96),
        "attention_mask": _padding(2, 96),
        "decoder_input_ids": _tokens(2, 48),
    }
    return T5ForConditionalGeneration(config), (), inputs


def _whisper() -> Built:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    frames = 200
    config = WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=80,
        d_model=256,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=1024,
        decoder_ffn_dim=1024,
        max_source_positions=frames // 2,
        max_target_positions=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        use_cache=False,
        attn_implementation="eager",
    )
    inputs = {"input_features": torch.randn(2, 80, frames), "decoder_input_ids": _tokens(2, 32)}
    return WhisperForConditionalGeneration(config), (), inputs


def _vit() -> Built:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        image_size=112,
        patch_size=8,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        intermediate_size=1024,
        attn_implementation="eager",
    )
    return ViTModel(config), (), {"pixel_values": torch.randn(2, 3, 112, 112)}


def _swin() -> Built:
    from transformers import SwinConfig, SwinModel

    # Two stages of two blocks: the second block of a stage shifts its windows and so adds the window mask.
    config = SwinConfig(
        image_size=112,
        patch_size=4,
        embed_dim=64,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=7,
        attn_implementation="eager",
    )
    return SwinModel(config), (), {"pixel_values": torch.randn(2, 3, 112, 112)}


def _unet() -> Built:
    from diffusers import UNet2DConditionModel
    from diffusers.models.attention_processor import AttnProcessor

    # `attention_head_dim` is the number of heads here: a naming accident diffusers keeps for its checkpoints' sake.
    module = UNet2DConditionModel(
        sample_size=32,
        in_channels=4,
        out_channels=4,
        block_out_channels=(64, 128),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=64,
        attention_head_dim=4,
        norm_num_groups=16,
    )
    module.set_attn_processor(AttnProcessor())
    args = (torch.randn(2, 4, 32, 32), torch.tensor(10), torch.randn(2, 77, 64))
    return module, args, {}


# A fresh initialisation gives scores near zero and a zero bias table: every softmax is then almost uniform, and a wrong
# scale or a lost bias would hardly show in the output. These factors give scores a spread of one to two.
_SHARPER: tuple[tuple[str, float], ...] = (
    (r"\.(query|key|q_proj|k_proj|c_attn)\.weight$", 4.0),
    (r"\.(to_q|to_k)\.weight$", 2.0),
)


def _sharpen(module: nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("relative_position_bias_table"):
                parameter.normal_()
            for pattern, factor in _SHARPER:
                if re.search(pattern, name):
                    parameter.mul_(factor)


def _seeded(build: Callable[[], Built]) -> Callable[[], Built]:
    def built() -> Built:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module, args, kwargs = build()
            _sharpen(module)
        return module.eval(), args, kwargs

    return built


ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture("GPT-2", _seeded(_gpt2), "causal decoder"),
    Architecture("BERT", _seeded(_bert), "encoder, padding mask"),
    Architecture("Llama", _seeded(_llama), "causal decoder, 8 query heads on 2 KV heads"),
    Architecture("T5", _seeded(_t5), "encoder-decoder, learned relative bias"),
    Architecture("Whisper", _seeded(_whisper), "encoder-decoder on audio"),
    Architecture("ViT", _seeded(_vit), "image encoder, no mask"),
    Architecture("Swin", _seeded(_swin), "shifted windows, relative bias"),
    Architecture("UNet", _seeded(_unet), "diffusers UNet2DConditionModel, plain AttnProcessor"),
)

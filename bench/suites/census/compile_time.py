"""The pass's share of a cold compile: real models, stock Inductor and attn_pass in turns, each in a fresh process.

Cold means: no cache of Inductor or AOTAutograd, a new folder for compiled code, and a process that has compiled nothing
but one addition, which builds the C++ headers and imports what Inductor needs for any compile.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

import attn_pass
from bench.harness.timing import private_caches
from bench.suites.census.dataset import open_census
from bench.suites.census.rows import Row, told_report

WAYS = ("stock", "attn_pass")
VOCABULARY, WIDTH, HEADS, INNER = 512, 128, 4, 256

Built = tuple[nn.Module, dict[str, Any]]
"""A module, and its inputs by name."""


def facts_of(name: str, way: str, number: int) -> Row:
    """What a row is about: a model, compiled one way, in one round."""
    return {"bench": "compile-time", "name": name, "stage": f"{way} {number}", "way": way}


def measure(name: str, way: str, number: int, choose: str, folder: Path | None) -> Iterator[Row]:
    """One cold compile, timed."""
    warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
    torch.manual_seed(0)
    model, inputs = MODELS[name](folder)
    model.eval()
    ours = way != "stock"
    settings: Mapping[str, Any] = {"backend": attn_pass.backend, "options": {"choose": choose}} if ours else {}
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache,
        private_caches(Path(cache)),
        torch._inductor.config.patch(force_disable_caches=True),
        torch.no_grad(),
    ):
        torch.compile(lambda x: x + 1)(torch.zeros(8))
        torch._dynamo.reset()
        compiled = torch.compile(model, **settings)
        with attn_pass.record() if ours else nullcontext(attn_pass.Report()) as report:
            began = time.perf_counter()
            compiled(**inputs)
            first_s = time.perf_counter() - began
        began = time.perf_counter()
        compiled(**inputs)
        run_s = time.perf_counter() - began
    yield {
        **facts_of(name, way, number),
        "status": "ok",
        "compile_s": first_s - run_s,
        "pass_s": report.seconds,
        "graphs": report.graphs,
        **told_report(report),
    }


# ---- the models: those of the libraries, at their usual depths and small widths ----


def _tokens(length: int = 64) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, length))


def _transformers(model: str, config: str, inputs: Callable[[], dict[str, Any]], **settings: Any) -> Built:
    import transformers

    made = getattr(transformers, config)(**settings)
    return getattr(transformers, model)._from_config(made, attn_implementation="eager"), inputs()


def _decoder(model: str, config: str, layers: int = 12, **settings: Any) -> Built:
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "use_cache": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return _transformers(model, config, lambda: {"input_ids": _tokens()}, **sizes, **settings)


def _gpt2() -> Built:
    sizes = {"vocab_size": VOCABULARY, "n_positions": 128, "n_embd": WIDTH, "n_layer": 12, "n_head": HEADS}
    tokens = {"bos_token_id": 1, "eos_token_id": 2}
    return _transformers(
        "GPT2LMHeadModel", "GPT2Config", lambda: {"input_ids": _tokens()}, use_cache=False, **sizes, **tokens
    )


def _bert() -> Built:
    def inputs() -> dict[str, Any]:
        padding = (torch.arange(64) < torch.tensor([[64], [50]])).long()
        return {"input_ids": _tokens(), "attention_mask": padding}

    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": INNER}
    depth = {"num_hidden_layers": 12, "num_attention_heads": HEADS}
    return _transformers("BertModel", "BertConfig", inputs, **sizes, **depth)


def _t5() -> Built:
    sizes = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": INNER, "num_heads": HEADS}
    depth = {"num_layers": 12, "num_decoder_layers": 12, "decoder_start_token_id": 0, "use_cache": False}
    return _transformers(
        "T5ForConditionalGeneration",
        "T5Config",
        lambda: {"input_ids": _tokens(), "decoder_input_ids": _tokens(32)},
        **sizes,
        **depth,
    )


def _whisper() -> Built:
    frames = 128
    sizes = {"vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_ffn_dim": INNER, "decoder_ffn_dim": INNER}
    depth = {"encoder_layers": 12, "decoder_layers": 12}
    heads = {"encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS}
    lengths = {"max_source_positions": frames // 2, "max_target_positions": 64}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return _transformers(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        lambda: {"input_features": torch.randn(2, 80, frames), "decoder_input_ids": _tokens(32)},
        use_cache=False,
        **sizes,
        **depth,
        **heads,
        **lengths,
        **tokens,
    )


def _pixels(size: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, size, size)}


def _vit() -> Built:
    sizes = {"image_size": 64, "patch_size": 8, "hidden_size": WIDTH, "intermediate_size": INNER}
    depth = {"num_hidden_layers": 12, "num_attention_heads": HEADS}
    return _transformers("ViTModel", "ViTConfig", lambda: _pixels(64), **sizes, **depth)


def _swin() -> Built:
    sizes = {"image_size": 224, "patch_size": 4, "embed_dim": 32, "window_size": 7}
    depth = {"depths": [2, 2, 6, 2], "num_heads": [1, 2, 4, 8]}
    return _transformers("SwinModel", "SwinConfig", lambda: _pixels(224), **sizes, **depth)


def _timm_vit(folder: Path | None) -> Built:
    if folder is not None:
        # timm imports torchvision, which the census replaces where it is not installed.
        open_census(folder).zoo.stub_torchvision()
    import timm

    timm.layers.set_fused_attn(False)
    sizes = {"img_size": 64, "patch_size": 8, "embed_dim": WIDTH, "depth": 12, "num_heads": HEADS}
    return timm.models.VisionTransformer(num_classes=10, **sizes), {"x": torch.randn(2, 3, 64, 64)}


def _unet() -> Built:
    from diffusers import UNet2DConditionModel
    from diffusers.models.attention_processor import AttnProcessor

    model = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(32, 64, 64, 64),
        layers_per_block=2,
        cross_attention_dim=64,
        attention_head_dim=4,
        norm_num_groups=8,
    )
    model.set_attn_processor(AttnProcessor())
    sample, text = torch.randn(2, 4, 16, 16), torch.randn(2, 16, 64)
    return model, {"sample": sample, "timestep": torch.tensor(10), "encoder_hidden_states": text}


MODELS: Mapping[str, Callable[[Path | None], Built]] = {
    "GPT-2, 12 layers": lambda _: _gpt2(),
    "BERT, 12 layers": lambda _: _bert(),
    "Llama, 12 layers": lambda _: _decoder("LlamaForCausalLM", "LlamaConfig"),
    "Qwen3, 12 layers": lambda _: _decoder("Qwen3ForCausalLM", "Qwen3Config", head_dim=WIDTH // HEADS),
    "T5, 12 + 12 layers": lambda _: _t5(),
    "Whisper, 12 + 12 layers": lambda _: _whisper(),
    "ViT, 12 layers": lambda _: _vit(),
    "Swin, 12 layers": lambda _: _swin(),
    "timm ViT, 12 layers": _timm_vit,
    "UNet, diffusers": lambda _: _unet(),
    "Llama, 48 layers": lambda _: _decoder("LlamaForCausalLM", "LlamaConfig", 48),
}

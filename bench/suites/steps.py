"""Whole training steps with the optimizer, the pass against stock: `python -m bench steps [--json FILE] [--only NAME]`.

Models of transformers from their config classes, with random weights and attention written out. A step is the loss, its
gradients and AdamW. The error is that of the losses of the first 50 steps, against the same steps in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from bench.harness.programs import Built, Program, Setting, Tensors, doubled
from bench.suites.zoo import Called, library, padding, pixels, tokens

TITLE = "Whole steps"
STEPS, FEW_STEPS = 50, 5  # whose losses are compared; in quick runs


class Trainer:
    """Steps of a module, each call one more; its weights are those it has when the first step is made."""

    def __init__(self, run: Callable[..., torch.Tensor], module: nn.Module) -> None:
        self.run, self.module = run, module
        self.optimizer = self._fresh()

    def _fresh(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.module.parameters(), lr=1e-4, foreach=True)

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            loss = self.run(*inputs)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def losses(self, weights: Mapping[str, torch.Tensor], inputs: Tensors, steps: int) -> torch.Tensor:
        """Of so many steps from these weights on."""
        self.module.load_state_dict(dict(weights))
        self.optimizer = self._fresh()
        return torch.stack([self(*inputs) for _ in range(steps)])


@dataclass(frozen=True)
class Steps(Program):
    """A call is a step; the answer is the losses of the first ``steps``."""

    steps: int = STEPS

    def call(self, run: Callable[..., Any], module: nn.Module | None = None) -> Callable[..., Any]:
        """A step of the module that ``run`` was made of."""
        assert module is not None
        return Trainer(run, module)

    def answer(self, call: Callable[..., Any], inputs: Tensors) -> torch.Tensor:
        """Losses."""
        assert isinstance(call, Trainer)
        weights = self.make("cpu")[0].state_dict()
        return call.losses(weights, inputs, self.steps)

    def exact(self, device: str, inputs: Tensors) -> torch.Tensor:
        """In float64."""
        module = self.make(device)[0].double()
        return Trainer(module, module).losses(module.state_dict(), doubled(inputs), self.steps)


# ---------------------------------------------------------------- models

# T5 small is what its config class makes. Fewer words than each has: their products are no attention.
T5 = {"vocab_size": 8192, "dropout_rate": 0.0, "decoder_start_token_id": 0}
BERT = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 2048}
GEMMA = {
    **{"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64},
    **{"intermediate_size": 2048, "vocab_size": 8192, "query_pre_attn_scalar": 64, "sliding_window": 512},
}


def t5(batch: int = 2, length: int = 256, **sizes: Any) -> Built:
    """T5 small, with a quarter as many words out as in."""
    model = library("T5ForConditionalGeneration", "T5Config", **T5 | sizes)
    words = model.config.vocab_size
    return Called(model, "input_ids", "labels"), (tokens(batch, length, words), tokens(batch, length // 4, words))


def bert(batch: int = 2, length: int = 512, dropout: float = 0.0, **sizes: Any) -> Built:
    """BERT small (Turc et al., 2019) on sequences of different lengths."""
    drops = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    model = library("BertForMaskedLM", "BertConfig", **{**BERT, **drops, "vocab_size": 8192} | sizes)
    ids = tokens(batch, length, model.config.vocab_size)
    return Called(model, "input_ids", "attention_mask", "labels"), (ids, padding(batch, length), ids.roll(1, -1))


def swin(batch: int = 2, **sizes: Any) -> Built:
    """Swin tiny, its config class's default."""
    model = library("SwinForImageClassification", "SwinConfig", drop_path_rate=0.0, **sizes)
    return Called(model, "pixel_values", "labels"), (pixels(batch, model.config.image_size), torch.arange(batch) % 2)


def gemma(batch: int = 1, length: int = 768, **sizes: Any) -> Built:
    """A decoder as Gemma 2 is: soft caps, grouped heads, windows in every other layer."""
    model = library("Gemma2ForCausalLM", "Gemma2Config", **GEMMA | sizes)
    ids = tokens(batch, length, model.config.vocab_size)
    return Called(model, "input_ids", "labels"), (ids, ids)


MODELS: Mapping[str, tuple[Callable[..., Built], Mapping[str, Any]]] = {
    "T5 small": (t5, {"length": 64, "num_layers": 1, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_heads": 4}),
    "BERT small, padded": (bert, {"batch": 2, "length": 64, "num_hidden_layers": 1}),
    "BERT small, padded, dropout 0.1": (partial(bert, dropout=0.1), {"batch": 2, "length": 64, "num_hidden_layers": 1}),
    "Swin tiny": (swin, {"batch": 2, "image_size": 56, "depths": [2], "num_heads": [2], "embed_dim": 16}),
    "Gemma-like decoder": (gemma, {"length": 64, "num_hidden_layers": 2, "sliding_window": 16}),
}
"""How each is made, and its sizes in quick runs and in tests."""


def _built(name: str, small: bool, device: str) -> Built:
    make, sizes = MODELS[name]
    torch.manual_seed(0)
    module, inputs = make(**sizes) if small else make()
    return module.train().to(device), tuple(x.to(device) for x in inputs)


def programs(setting: Setting) -> list[Program]:
    """Every model; small ones in quick runs."""
    steps = FEW_STEPS if setting.quick else STEPS
    return [
        Steps(
            name,
            partial(_built, name, setting.quick),
            tolerance=None,
            trains=True,
            draws="dropout" in name,
            dtype=torch.float32,
            steps=steps,
        )
        for name in MODELS
    ]

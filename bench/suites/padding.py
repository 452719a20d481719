"""Whole models on batches with padding: `python -m bench padding [--json FILE] [--layers N] [--quick] [--only TEXT]`.

transformers' encoders with random weights, as a user calls them, each with an end that does not show rows of padding:
a pooled token, a classification head, a token head under its mask, a masked mean. So all of a result is compared with
float64. 16 sequences of up to 512 tokens: with lengths spread evenly from 16, with many short ones and few long ones,
and all of the same length. CLIP's text encoder has 77 positions, and gets 64 sequences of the same proportions.

Beside stock, frozen stock and the pass: packing by hand, as it is written for these models (rows that are kept as one
sequence, attention for each sequence on its own), compiled for the number of rows of this very batch; ONNX Runtime and
OpenVINO where they are installed. ``--layers`` takes as many of the models' 12 layers; all layers of a model are alike,
and what finding the rows takes, the embeddings and the heads count for more where there are few.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional as F

from attn_pass.model.dtype_name import dtype_name
from bench.harness import variants as w
from bench.harness.command import Add, Against, Json, Only, Quick, Rounds, Threads, measured_tables
from bench.harness.document import LEGEND, STANDARD, Column
from bench.harness.programs import Built, Extra, Program, Setting
from bench.suites.commands import tables_of
from bench.suites.peers import OPENVINO, ORT, peers_of
from bench.suites.zoo import library, ready, tokens

TITLE = "Batches with padding"
WAYS = (w.STOCK, w.STOCK_AGAIN, w.PASS, *w.FROZEN, w.HAND)
LAYERS, BATCH, LONGEST, SHORTEST, PAD = 12, 16, 512, 1 / 32, 1
BY_HAND = "the rows that are kept as one sequence, attention by SDPA for each sequence"
EACH_ALONE = "the rows that are kept as one sequence, the model's own attention for each sequence"
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: None}


# ---------------------------------------------------------------- batches


def uniform(batch: int, longest: int) -> Tensor:
    """Lengths spread evenly from a 32nd of the longest on: nearly half of the batch is padding."""
    return torch.linspace(longest * SHORTEST, longest, batch).round().long()


def long_tailed(batch: int, longest: int) -> Tensor:
    """Each length larger than the one before it by the same factor, from a 32nd of the longest on."""
    return torch.logspace(0, 1, batch, base=1 / SHORTEST).mul(longest * SHORTEST).round().long()


def full(batch: int, longest: int) -> Tensor:
    """No padding at all."""
    return torch.full((batch,), longest)


LENGTHS: Mapping[str, Callable[[int, int], Tensor]] = {"uniform": uniform, "long-tailed": long_tailed, "none": full}


def batch_of(lengths: Tensor, longest: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Numbers of tokens, padded on the right, with one that ends a sequence; and the mask. In no order of length."""
    lengths = lengths[torch.randperm(len(lengths))]
    mask = torch.arange(longest) < lengths[:, None]
    ids = tokens(len(lengths), longest, vocabulary - 1)
    ids[torch.arange(len(lengths)), lengths - 1] = vocabulary - 1
    return torch.where(mask, ids, PAD), mask.long()


# ---------------------------------------------------------------- models


class Ended(nn.Module):
    """A model, called with a batch, and what becomes of its output."""

    def __init__(self, model: nn.Module, end: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.end = model, end

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.end(self.model(input_ids=ids, attention_mask=mask, return_dict=False), mask)


def _first(output: Any, mask: Tensor) -> Tensor:
    logits: Tensor = output[0]
    return logits


def _pooled(output: Any, mask: Tensor) -> Tensor:
    pooled: Tensor = output[1]
    return pooled


def _of_tokens(output: Any, mask: Tensor) -> Tensor:
    logits: Tensor = output[0]
    return logits.masked_fill(mask[..., None] == 0, 0.0)


def _mean(output: Any, mask: Tensor) -> Tensor:
    weights = mask[..., None].to(output[0].dtype)
    mean: Tensor = (output[0] * weights).sum(1) / weights.sum(1)
    return mean


class Rows(NamedTuple):
    """The rows of a batch that are kept: which of all, their positions and sequences; and what each sequence has."""

    index: Tensor
    positions: Tensor
    sequence: Tensor
    firsts: Tensor
    lasts: Tensor
    lengths: Tensor


def _bert_by_hand(model: Any, given: dict[str, Any], rows: Rows, mask: Tensor) -> Tensor:
    pooled: Tensor = model.pooler(model(**given)[0][0][rows.firsts][:, None])
    return pooled


def _classes_by_hand(model: Any, given: dict[str, Any], rows: Rows, mask: Tensor) -> Tensor:
    logits: Tensor = model.classifier(model.roberta(**given)[0][0][rows.firsts][:, None])
    return logits


def _tokens_by_hand(model: Any, given: dict[str, Any], rows: Rows, mask: Tensor) -> Tensor:
    logits = model.classifier(model.base_model(**given)[0][0])
    whole: Tensor = logits.new_zeros(mask.numel(), logits.shape[1])
    return whole.index_copy(0, rows.index, logits).view(*mask.shape, -1)


def _mean_by_hand(model: Any, given: dict[str, Any], rows: Rows, mask: Tensor) -> Tensor:
    hidden = model(**given)[0][0]
    sums: Tensor = hidden.new_zeros(len(mask), hidden.shape[1]).index_add(0, rows.sequence, hidden)
    return sums / rows.lengths[:, None]


def _clip_by_hand(model: Any, given: dict[str, Any], rows: Rows, mask: Tensor) -> Tensor:
    projected: Tensor = model.text_projection(model.text_model(**given)[0][0][rows.lasts])
    return projected


_SMALL = {"vocab_size": 1000, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
_T5 = {"d_model": 768, "d_ff": 3072, "num_heads": 12, "d_kv": 64}
_DEBERTA = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 256,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "type_vocab_size": 0,
    "position_biased_input": False,
}


@dataclass(frozen=True)
class Model:
    """A model of transformers: its classes, what becomes of its output, the same by hand, and sizes.

    ``small`` are those of quick runs, ``layers`` is what the number of layers is called, ``first_position`` the number
    that the table of positions begins with; None without one. ``attention`` is what transformers calls its attention.
    """

    model: str
    config: str
    end: Callable[[Any, Tensor], Tensor]
    by_hand: Callable[[Any, dict[str, Any], Rows, Tensor], Tensor]
    sizes: Mapping[str, Any] = field(default_factory=dict)
    small: Mapping[str, Any] = field(default_factory=lambda: _SMALL)
    layers: str = "num_hidden_layers"
    first_position: int | None = 0
    batch: int = BATCH
    longest: int = LONGEST
    attention: str = "sdpa"
    hand: str = BY_HAND


_POSITIONS = {"max_position_embeddings": 514}
MODELS: Mapping[str, Model] = {
    "BERT base, pooled": Model("BertModel", "BertConfig", _pooled, _bert_by_hand),
    "RoBERTa base, classes": Model(
        "RobertaForSequenceClassification", "RobertaConfig", _first, _classes_by_hand, _POSITIONS, first_position=2
    ),
    "RoBERTa base, classes of tokens": Model(
        "RobertaForTokenClassification", "RobertaConfig", _of_tokens, _tokens_by_hand, _POSITIONS, first_position=2
    ),
    "DeBERTa v3 base, classes of tokens": Model(
        "DebertaV2ForTokenClassification",
        "DebertaV2Config",
        _of_tokens,
        _tokens_by_hand,
        _DEBERTA,
        first_position=None,
        attention="eager",
        hand=EACH_ALONE,
    ),
    "T5 base encoder, mean": Model(
        "T5EncoderModel",
        "T5Config",
        _mean,
        _mean_by_hand,
        _T5,
        {"vocab_size": 1000, "d_model": 256, "d_ff": 1024, "num_heads": 4, "d_kv": 64},
        layers="num_layers",
        first_position=None,
    ),
    "CLIP text, projected": Model(
        "CLIPTextModelWithProjection",
        "CLIPTextConfig",
        _first,
        _clip_by_hand,
        small={**_SMALL, "eos_token_id": 999},
        batch=64,
        longest=77,
    ),
}


def built(name: str, lengths: str, dtype: torch.dtype, setting: Setting, device: str) -> Built:
    """A model in eval mode and a batch for it, the same numbers on every call."""
    torch.manual_seed(0)
    made = MODELS[name]
    small: Mapping[str, Any] = made.small if setting.quick else {}
    given = {**made.sizes, made.layers: 2 if setting.quick else setting.layers or LAYERS, **small}
    model = library(made.model, made.config, made.attention, **given)
    batch, longest = (8, min(128, made.longest)) if setting.quick else (made.batch, made.longest)
    inputs = batch_of(LENGTHS[lengths](batch, longest), longest, model.config.vocab_size)
    return ready(Ended(model, made.end)).to(device, dtype), tuple(x.to(device) for x in inputs)


# ---------------------------------------------------------------- packed by hand

_SPANS: list[tuple[int, int]] = []  # where each sequence of the batch that is being computed begins and ends


@torch.compiler.disable
def _each_alone(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Attention of (1, H, N, D), each sequence on its own; heads after positions."""
    outs = []
    for begin, end in _SPANS:
        q, k, v = (x[:, :, begin:end] for x in (query, key, value))
        added = None if bias is None else bias[:, :, : end - begin, : end - begin]
        outs.append(F.scaled_dot_product_attention(q, k, v, added, is_causal=causal, scale=scale))
    return torch.cat(outs, 2).transpose(1, 2)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    is_causal: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    scale = query.size(-1) ** -0.5 if scaling is None else scaling
    return _each_alone(query, key, value, position_bias, scale, bool(is_causal)), None


@torch.compiler.disable
def _rows(mask: Tensor) -> Rows:
    index = mask.reshape(-1).nonzero().squeeze(1)
    lengths = mask.sum(1)
    ends = lengths.cumsum(0)
    firsts = ends - lengths
    _SPANS[:] = zip(firsts.tolist(), ends.tolist())
    return Rows(index, index % mask.shape[1], index // mask.shape[1], firsts, ends - 1, lengths)


class Packed(nn.Module):
    """A model on packed rows, by the registries that transformers has for it."""

    def __init__(self, made: Model, model: nn.Module) -> None:
        super().__init__()
        self.made, self.model = made, model

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        rows = _rows(mask)
        given: dict[str, Any] = {"input_ids": ids.reshape(-1)[rows.index][None], "return_dict": False}
        if self.made.first_position is not None:
            given["position_ids"] = rows.positions[None] + self.made.first_position
        return self.made.by_hand(self.model, given, rows, mask)


def _pack_deberta(encoder: Any) -> None:
    """Its attention is its own, with positions and a mask for each sequence."""
    encoder.get_attention_mask, encoder.get_rel_pos = (lambda mask: mask), (lambda *_: None)

    def each_alone(whole: Callable[..., Any]) -> Callable[..., Any]:
        @torch.compiler.disable
        def attend(hidden: Tensor, *_: Any, rel_embeddings: Tensor, **__: Any) -> tuple[Tensor, None]:
            outs = []
            for begin, end in _SPANS:
                kept = torch.ones(1, 1, end - begin, end - begin, dtype=torch.bool, device=hidden.device)
                outs.append(whole(hidden[:, begin:end], kept, rel_embeddings=rel_embeddings)[0])
            return torch.cat(outs, 1), None

        return attend

    for layer in encoder.layer:
        attention = layer.attention.self
        attention.forward = each_alone(attention.forward)


def packed(name: str, lengths: str, dtype: torch.dtype, setting: Setting, device: str) -> nn.Module:
    """The model as it is run without padding by hand."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register("by_hand", _attention)
    AttentionMaskInterface.register("by_hand", lambda *_, **__: None)
    module, (_, mask) = built(name, lengths, dtype, setting, device)
    model: Any = module.model
    if hasattr(model, "deberta"):
        _pack_deberta(model.deberta.encoder)
    else:
        model.set_attn_implementation("by_hand")
    if hasattr(model, "encoder") and hasattr(model.encoder, "block"):  # T5: biases of the longest hold those of all
        attention = model.encoder.block[0].layer[0].SelfAttention
        whole = attention.compute_bias
        attention.compute_bias = lambda queries, keys, **more: whole(mask.shape[1], mask.shape[1], **more)
    if hasattr(model, "text_model"):  # CLIP takes no more rows than there are positions: its table gets more of them
        table = model.text_model.embeddings.position_embedding
        table.weight = nn.Parameter(F.pad(table.weight, (0, 0, 0, mask.numel())), requires_grad=False)
    return Packed(MODELS[name], model)


# ---------------------------------------------------------------- the command


def _peers(dtype: torch.dtype) -> dict[str, Extra]:
    """The runtimes that are installed; ONNX Runtime computes in float32 alone."""
    known, packages = peers_of(dtype), {ORT: "onnxruntime", OPENVINO: "openvino"}
    return {way: known[way] for way, package in packages.items() if way in known and find_spec(package) is not None}


def programs(setting: Setting) -> list[Program]:
    """Every model with lengths spread evenly, the first with all lengths; in float32, then in bfloat16.

    Quick: two small ones in float32.
    """
    first, evenly = next(iter(MODELS)), next(iter(LENGTHS))
    made = [
        Program(
            f"{name}, lengths {lengths}, {dtype_name(dtype)}",
            partial(built, name, lengths, dtype, setting),
            by_hand=partial(packed, name, lengths, dtype, setting),
            hand=MODELS[name].hand,
            dtype=dtype,
            tolerance=tolerance,
            extra=_peers(dtype),
            facts={"padding": share_of_padding(name, lengths)},
        )
        for dtype, tolerance in _TOLERANCES.items()
        for name in MODELS
        for lengths in LENGTHS
        if lengths == evenly or name == first
    ]
    return [made[0], made[2]] if setting.quick else made


def share_of_padding(name: str, lengths: str) -> float:
    """Of all rows of a batch."""
    made = MODELS[name]
    return 1 - float(LENGTHS[lengths](made.batch, made.longest).double().mean()) / made.longest


COLUMNS = (*STANDARD[:2], Column("padding", "padding", ".0%"), *(c for c in STANDARD[2:] if c.field != "of_floor"))
NOTES = (
    LEGEND,
    f"Padding: its share of all rows. By hand: {BY_HAND} (DeBERTa: the model's own); compiled for the number of rows "
    "of this very batch, where the pass compiles once for every batch. All of a result is compared; no result holds "
    "rows of padding.",
)
Layers = Annotated[int, typer.Option(min=1, help="Take as many layers of each model.")]


def main(
    json_file: Json = None,
    baseline: Against = None,
    quick: Quick = False,
    only: Only = "",
    add: Add = False,
    threads: Threads = 2,
    rounds: Rounds = 5,
    layers: Layers = LAYERS,
) -> None:
    """Whole models on batches with padding: stock, frozen, the pass, packing by hand, other runtimes."""
    setting = Setting("cpu", threads, min(rounds, 3) if quick else rounds, quick=quick, layers=layers)
    of_all = f"{TITLE}, {layers} of {LAYERS} layers" if layers != LAYERS and not quick else TITLE
    tables = partial(tables_of, sys.modules[__name__], WAYS, only)
    measured_tables(of_all, tables, setting, json_file, baseline, add)

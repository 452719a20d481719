"""One token at a time over a static cache: `python -m bench decode [--json FILE] [--quick] [--only TEXT]`.

transformers' Llama with Llama 3.2 1B's attention in each of 8 layers; the MLPs are narrower (2,048 in place of 8,192),
and the vocabulary is small (1,000). The cache has room for 4,096 positions, and one graph a way serves all of them: a
second compile is an error. The rows of batch 4 have the lengths 1, 3/4, 1/2 and 1/4 of the longest, padded on the left.

Stock, stock again (the same code: A/A) and the pass take turns in one process: at whole steps, and at the attention of
all layers alone, over the same caches and under the same mask. Whole loops are transformers' `generate()`, of a smaller
Llama, with `CompileConfig(backend=...)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

import attn_pass
from attn_pass.measuring.timing import compiled, in_turns, relative_error
from attn_pass.model.dtype_name import dtype_name
from attn_pass.options import LEAVE
from bench.harness import variants as w
from bench.harness.command import Json, Only, Quick, Rounds, Threads, named, started
from bench.harness.document import STANDARD, Column, Row
from bench.harness.measure import child, judged, quiet, row_of
from bench.suites.models import full_cache
from bench.suites.zoo import library, ready, tokens

TITLE = "Decoding over a static cache"
CACHE, BLOCK, VOCABULARY = 4096, 64, 1000
POSITIONS = (64, 256, 1024, 4095)
LENGTHS = {1: (1.0,), 4: (1.0, 0.75, 0.5, 0.25)}  # of a row, as shares of the longest
LLAMA = {
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
}
SMALL = {**LLAMA, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
PROMPT, MADE = 100, 128
BLOCK_S = 0.05  # a sample: as many calls as take so long, in seconds
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: None}  # of the largest logit, from eager in float32
STEP, ALONE, LOOPS = "Steps", "Attention alone", "Whole loops"


@dataclass(frozen=True)
class Case:
    """How attention is written (`attn_implementation`), in which precision, for how many rows."""

    form: str
    dtype: torch.dtype
    batch: int

    @property
    def name(self) -> str:
        return f"{dtype_name(self.dtype)}, {self.form}, batch {self.batch}"


CASES = tuple(Case(f, d, b) for d, f, b in product((torch.float32, torch.bfloat16), ("sdpa", "eager"), LENGTHS))
QUICK = (Case("sdpa", torch.float32, 1), Case("eager", torch.bfloat16, 4))


class Decoder:
    """A model and its cache, whose next position is set from outside."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case = case
        self.model = ready(library("LlamaForCausalLM", "LlamaConfig", case.form, **LLAMA)).to(case.dtype)
        self.config: Any = self.model.config
        self.cache = full_cache(self.config, case.batch, CACHE, case.dtype)
        self.ids = tokens(case.batch, 1, VOCABULARY)
        self.queries = [torch.randn(case.batch, 32, 1, 64, dtype=case.dtype) for _ in self.cache.layers]
        self.padding = torch.ones(case.batch, CACHE, dtype=torch.int64)
        self.position_ids = torch.zeros(case.batch, 1, dtype=torch.int64)

    def go_to(self, position: int) -> None:
        """The next token is written there; what is in the cache before it is valid, but for padding."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(position)
        starts = torch.tensor([first for first, _ in valid_keys(self.case.batch, position)])
        self.padding.copy_(torch.arange(CACHE) >= starts[:, None])
        self.position_ids.copy_(position - starts[:, None])

    def at(self, position: int, run: Callable[[], Any]) -> Any:
        """What it computes at a position."""
        self.go_to(position)
        return run()

    def to_float32(self) -> None:
        """The same numbers, in the weights and in the cache."""
        self.model.float()
        self.queries = [x.float() for x in self.queries]
        for layer in self.cache.layers:
            layer.keys, layer.values = layer.keys.float(), layer.values.float()

    def step(self) -> Tensor:
        """The logits of one token for each row. Counts the cache's position up."""
        if self.case.batch == 1:
            return self.model(self.ids, past_key_values=self.cache, use_cache=True).logits  # type: ignore[no-any-return]
        given = {"attention_mask": self.padding, "position_ids": self.position_ids}
        return self.model(self.ids, past_key_values=self.cache, use_cache=True, **given).logits  # type: ignore[no-any-return]

    def attention(self) -> tuple[Tensor, ...]:
        """What the layers' attention computes, of queries of its own, by the model's own functions."""
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import create_causal_mask
        from transformers.models.llama.modeling_llama import eager_attention_forward

        forward: Any = eager_attention_forward if self.case.form == "eager" else sdpa_attention_forward
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=self.queries[0][:, 0],
            attention_mask=None if self.case.batch == 1 else self.padding,
            past_key_values=self.cache,
            position_ids=None if self.case.batch == 1 else self.position_ids,
        )
        layers = zip(self.model.model.layers, self.queries, self.cache.layers)  # type: ignore[arg-type, union-attr]
        return tuple(forward(x.self_attn, q, c.keys, c.values, mask, scaling=0.125)[0] for x, q, c in layers)


def valid_keys(batch: int, position: int) -> list[tuple[int, int]]:
    """The first valid key of each row, and the one behind its last, when the token at ``position`` asks."""
    return [(position + 1 - max(1, int((position + 1) * share)), position + 1) for share in LENGTHS[batch]]


def cache_bytes(case: Case, position: int, block: int = 1) -> int:
    """Of all layers' keys and values, those in blocks of so many keys that hold a valid one."""
    keys = sum((-(-end // block) - first // block) * block for first, end in valid_keys(case.batch, position))
    width = LLAMA["num_key_value_heads"] * LLAMA["head_dim"]
    return 2 * keys * width * LLAMA["num_hidden_layers"] * case.dtype.itemsize


def measured(case: Case, positions: Sequence[int], rounds: int, threads: int) -> Iterator[Row]:
    """Rows of steps and of their attention alone, at every position."""
    quiet(threads)
    decoder = Decoder(case)
    parts: dict[str, Callable[[], Any]] = {STEP: decoder.step, ALONE: decoder.attention}
    made = {part: _ways(decoder, function) for part, function in parts.items()}
    answers: dict[tuple[int, str, str], Any] = {}
    rows: list[Row] = []
    # One graph serves every position.
    with torch._dynamo.config.patch(error_on_recompile=True):
        for position, (part, (runs, took)) in product(positions, made.items()):
            at = {way: partial(decoder.at, position, run) for way, run in runs.items()}
            answers |= {(position, part, way): run() for way, run in at.items()}
            for way, taken in in_turns(at, (), rounds, seconds=BLOCK_S).items():
                row = row_of(f"{case.name}, position {position}", way, taken, 0.0, TOLERANCE[case.dtype])
                rows.append({**row, "stage": part, **_facts(case, position, took[way]), "took": took[way]})
    decoder.to_float32()
    # A step writes to the cache, in float32 another key than in bfloat16: what reads the cache alone comes first.
    in_order = sorted(answers.items(), key=lambda item: item[0][1] == STEP)
    errors = {key: relative_error(answer, decoder.at(key[0], parts[key[1]])) for key, answer in in_order}
    alone = {(row["position"], row["way"]): row["median_us"] for row in rows if row["stage"] == ALONE}
    for row in rows:
        row["error"] = errors[row["position"], row["stage"], row["way"]]
        if row["stage"] == STEP:
            row["share"] = alone[row["position"], row["way"]] / row["median_us"]
        yield row


def _ways(decoder: Decoder, function: Callable[[], Any]) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """Eager, stock twice and the pass, each compiled once, and what became of the attention."""
    runs = {
        w.EAGER: function,
        w.STOCK: compiled(function, fullgraph=True),
        w.STOCK_AGAIN: compiled(function, fullgraph=True),
        w.PASS: compiled(function, fullgraph=True, backend=attn_pass.backend),
    }
    took = dict.fromkeys(runs, "")
    for way, run in runs.items():
        decoder.go_to(POSITIONS[0])
        with attn_pass.record() as report:
            run()
        if way == w.PASS:
            took[way] = _forms(report)
    return runs, took


def _facts(case: Case, position: int, took: str) -> Row:
    return {
        "position": position,
        "batch": case.batch,
        "valid_bytes": cache_bytes(case, position),
        "read_bytes": cache_bytes(case, position, BLOCK if took.startswith("cpu_kernel") else CACHE),
    }


# ---------------------------------------------------------------- whole loops


def looped(form: str, rounds: int, threads: int) -> Iterator[Row]:
    """128 tokens by `generate()`, eager and compiled by its own CompileConfig."""
    from transformers import CompileConfig

    quiet(threads)
    backends = {w.EAGER: None, w.STOCK: "inductor", w.PASS: "attn_pass"}
    prompt = tokens(1, PROMPT, VOCABULARY)
    runs: dict[str, Callable[[], Tensor]] = {}
    for way, backend in backends.items():
        torch.manual_seed(0)
        model: Any = ready(library("LlamaForCausalLM", "LlamaConfig", form, **SMALL))
        config: Any = None if backend is None else CompileConfig(backend=backend, mode="default", fullgraph=True)
        given = {"cache_implementation": "static", "max_cache_len": CACHE, "max_new_tokens": MADE, "do_sample": False}
        if config is not None:
            config._compile_all_devices = True  # without it transformers compiles for no CPU
            given["compile_config"] = config
        runs[way] = partial(model.generate, prompt, eos_token_id=None, **given)
    reports, made = {}, {}
    for way, run in runs.items():
        with attn_pass.record() as reports[way]:
            made[way] = run()
    compiles = _compiles()
    taken = in_turns({**runs, w.STOCK_AGAIN: runs[w.STOCK]}, (), rounds, seconds=0.0)
    for way in taken:
        code = w.STOCK if way == w.STOCK_AGAIN else way
        same = torch.equal(made[code], made[w.EAGER])
        row = row_of(f"float32, {form}", way, taken[way], 0.0 if same else 1.0, 0.0)
        facts = {"batch": MADE, "same": "yes" if same else "no", "recompiled": _compiles() - compiles}
        yield {**row, "stage": LOOPS, **facts, "took": _forms(reports[code])}


def _compiles() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _forms(report: attn_pass.Report) -> str:
    return ", ".join(sorted({site.taken or LEAVE for site in report.sites}))


# ---------------------------------------------------------------- the command

_TIMES = (*STANDARD[:4], *STANDARD[5:8], Column("tokens/s", "rate", ".1f"))
_CACHE = (
    Column("valid MiB", "valid_bytes", ".1f", 2.0**-20),
    Column("read MiB", "read_bytes", ".1f", 2.0**-20),
    Column("error", "error", ".0e"),
    Column("outcome", "took"),
)
COLUMNS = {
    STEP: (*_TIMES, Column("attention's share", "share", ".0%"), *_CACHE),
    ALONE: (*(c for c in _TIMES if c.field != "rate"), *_CACHE),
    LOOPS: (*_TIMES, Column("eager's tokens", "same"), Column("recompiled", "recompiled"), Column("outcome", "took")),
}
NOTES = {
    STEP: "One token for each row of the batch: all layers and the head. Attention's share: the time of the attention "
    "of all layers alone, over the step's. Bytes of the cache: of the valid keys and values, and of what is read. Stock"
    f" reads all of it; the CPU kernel reads the blocks of {BLOCK} keys that hold a valid one, and may fetch the next "
    "one. Error: the largest difference from eager in float32, relative to the largest value.",
    ALONE: "The attention of all layers over their caches, with the mask, and nothing else.",
    LOOPS: f"{MADE} tokens by `generate()` after a prompt of {PROMPT}, cache {CACHE}: 4 layers, 32/8 heads of 64, "
    "hidden size 256. The prompt runs eagerly in all. Recompiled: graphs that were compiled after the first loop of "
    "each.",
}


def main(
    json_file: Json = None, quick: Quick = False, only: Only = "", threads: Threads = 2, rounds: Rounds = 7
) -> None:
    """A decode step of Llama over a static cache, its attention alone, and whole loops of generate()."""
    rounds, told = (min(rounds, 3), "two cases, two positions, fewer rounds") if quick else (rounds, None)
    turns = f"{rounds} in turns, a fresh process a case"
    recorder = started(TITLE, json_file, threads=threads, rounds=turns, quick=told)
    tables = [recorder.table(name, columns, [NOTES[name]]) for name, columns in COLUMNS.items()]
    positions = POSITIONS[1::2] if quick else POSITIONS
    jobs: list[tuple[str, Callable[..., Iterator[Row]], tuple[Any, ...]]] = [
        *((case.name, measured, (case, positions, rounds, threads)) for case in (QUICK if quick else CASES)),
        *((f"generate, {form}", looped, (form, min(rounds, 5), threads)) for form in ("sdpa", "eager")),
    ]
    for name, function, given in named(only, jobs, itemgetter(0)):
        rows = child(name, function, given, recorder.tell)
        for table in tables:
            table.rows += _judged([row for row in rows if row["stage"] == table.title])
        recorder.keep()
    recorder.finish()


def _judged(rows: list[Row]) -> list[Row]:
    for row in rows:
        row["rate"] = row["batch"] / row["median_us"] * 1e6
    return judged(rows)

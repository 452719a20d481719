"""Part 7: a real model that generates: Llama's layers over a cache that grows by one token per step, stock and pass.

Transformers' own model and DynamicCache with random weights, attention as it is written out there ("eager") and as a
call ("sdpa"), each with and without ``mode="reduce-overhead"``. A step's time is the median over the last steps, by the
clock: what a user waits for.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import attn_pass
from attn_pass.measuring.timing import relative_error, why
from bench.gpu.environment import Environment, decision_row, passed, stock
from bench.gpu.parts import Column, Part, Row, one_each
from bench.suites import models
from bench.suites.zoo import library

MODES = {"": "", ", reduce-overhead": "reduce-overhead"}
SPELLINGS = ("eager", "sdpa")
FORMS = {f"Llama, {spelling}{title}": (spelling, mode) for spelling in SPELLINGS for title, mode in MODES.items()}
PROMPT, STEPS, COUNTED = 2048, 48, 24
LLAMA = {**models.LLAMA, "num_hidden_layers": 8}
TINY = {**LLAMA, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_TOLERANCE = 0.05  # of the largest logit, in bfloat16 over eight layers


def _model(env: Environment, attention: str) -> Any:
    torch.manual_seed(0)
    made = library("LlamaForCausalLM", "LlamaConfig", attention, **(TINY if env.dry else LLAMA))
    return made.to(device=env.device, dtype=torch.float32 if env.dry else torch.bfloat16).eval()


def _program(model: Any) -> Callable[..., Tensor]:
    def step(ids: Tensor, cache: Any) -> Tensor:
        logits: Tensor = model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1]
        return logits

    return step


def _compiled(env: Environment, who: str, program: Callable[..., Tensor], mode: str) -> Callable[..., Tensor]:
    given = {"mode": mode} if mode and not env.dry else {}
    compilers = {"stock": stock, "pass": passed}
    return compilers[who](env, program, dynamic=True, **given) if who in compilers else program


def generate(env: Environment, model: Any, run: Callable[..., Tensor]) -> tuple[list[float], Tensor]:
    """Milliseconds of every step after the prompt, and the last logits; the same tokens whatever the logits say."""
    from transformers import DynamicCache

    prompt, steps = (12, 3) if env.dry else (PROMPT, STEPS)
    torch.manual_seed(1)
    tokens = torch.randint(3, model.config.vocab_size, (1, prompt + steps), device=env.device)
    cache = DynamicCache()
    model(input_ids=tokens[:, :prompt], past_key_values=cache, use_cache=True)
    taken, logits = [], torch.empty(0)
    for number in range(steps):
        torch.compiler.cudagraph_mark_step_begin()
        env.wait()
        began = time.perf_counter()
        logits = run(tokens[:, prompt + number : prompt + number + 1], cache).clone()
        env.wait()
        taken.append((time.perf_counter() - began) * 1e3)
    return taken, logits


def measure(env: Environment, form: tuple[str, str]) -> Row:
    """One spelling in one mode: eager, stock, the pass."""
    attention, mode = form
    try:
        model = _model(env, attention)
    except ImportError:
        return {"wanting": "transformers is not installed"}
    row: Row = {"failed": {}, "ms": {}, "first_s": {}}
    logits: dict[str, Tensor] = {}
    with torch.no_grad():
        for who in ("eager", "stock", "pass"):
            torch._dynamo.reset()
            try:
                with attn_pass.record() as report:
                    taken, logits[who] = generate(env, model, _compiled(env, who, _program(model), mode))
            except Exception as error:
                row["failed"][who] = why(error)
                continue
            row["ms"][who] = row[f"ms, {who}"] = statistics.median(taken[-COUNTED:])
            row["first_s"][who] = round(sum(taken[:2]) / 1e3, 2)  # compiled twice: for one length, then for any
            if who == "pass":
                row |= decision_row(report)
    right = logits.get("eager")
    wrong = [n for n, x in logits.items() if right is None or not relative_error(x, right) <= _TOLERANCE]
    row["wrong"] = ", ".join(wrong) or None
    if {"stock", "pass"} <= set(row["ms"]):
        row["stock_over_pass"] = row["ms"]["stock"] / row["ms"]["pass"]
    if row["failed"]:
        raise RuntimeError("; ".join(f"{who}: {reason}" for who, reason in row["failed"].items()))
    return row


PART = Part(
    "model",
    f"Llama with 8 layers, {PROMPT} tokens and {STEPS} more: milliseconds a token",
    0.15,
    (
        Column("model", "name"),
        Column("eager ms", "ms, eager", ".2f"),
        Column("stock ms", "ms, stock", ".2f"),
        Column("pass ms", "ms, pass", ".2f"),
        Column("stock / pass", "stock_over_pass", ".2f"),
        Column("took", "took"),
        Column("wrong", "wrong"),
        Column("not run", "wanting"),
    ),
    one_each(FORMS, measure, quick=3),
    usual=False,
)

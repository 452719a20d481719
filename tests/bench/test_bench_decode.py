"""The bench of decode steps: what a row may see, which bytes that takes, and that one graph serves every position."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import attn_pass
from attn_pass.measuring.timing import compiled, relative_error
from bench.harness import variants as w
from bench.suites import decode

pytest.importorskip("transformers")

SMALL = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 50}
CASE = decode.Case("eager", torch.float32, 4)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small models, rewritten and run node by node."""
    sizes = {"LLAMA": {**decode.LLAMA, **SMALL}, "SMALL": {**decode.LLAMA, **SMALL}, "VOCABULARY": 50, "BLOCK_S": 0.0}
    for name, size in {**sizes, "PROMPT": 5, "MADE": 3, "CACHE": 300}.items():
        monkeypatch.setattr(decode, name, size)

    def eagerly(function: Callable[..., Any], *, backend: Any = None, **given: Any) -> Callable[..., Any]:
        rewritten = attn_pass.wrap("eager", choose="fused", targets=("cpu_kernel",), on_error="raise")
        return compiled(function, backend="eager" if backend is None else rewritten, **given)

    monkeypatch.setattr(decode, "compiled", eagerly)
    threads = torch.get_num_threads()
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


def test_bytes_are_those_of_the_valid_keys_and_of_their_blocks() -> None:
    """At position 256 what is read is at most one and a half times what is valid."""
    one, four = decode.Case("sdpa", torch.float32, 1), decode.Case("sdpa", torch.bfloat16, 4)
    a_key = 2 * 8 * 64 * 2  # keys and values, heads, head dim, layers
    assert decode.cache_bytes(one, 256) == 257 * a_key * 4
    assert decode.cache_bytes(one, 256, decode.BLOCK) == 5 * 64 * a_key * 4
    assert decode.cache_bytes(four, 256) == (257 + 192 + 128 + 64) * a_key * 2
    assert decode.cache_bytes(four, 256, decode.BLOCK) == (5 + 4 + 3 + 2) * 64 * a_key * 2
    for case in (one, four):
        assert decode.cache_bytes(case, 256, decode.BLOCK) <= 1.5 * decode.cache_bytes(case, 256)


@pytest.mark.parametrize("form", ["sdpa", "eager"])
def test_a_row_sees_its_own_length_and_no_more(form: str) -> None:
    decoder = decode.Decoder(decode.Case(form, torch.float32, 4))
    results = decoder.at(200, decoder.attention)
    for result, query, layer in zip(results, decoder.queries, decoder.cache.layers):
        for row, (first, end) in enumerate(decode.valid_keys(4, 200)):
            q = query[row].unflatten(0, (8, 4)).squeeze(2)
            key, value = (x[row, :, first:end] for x in (layer.keys, layer.values))
            wanted = (q @ key.mT / 8).softmax(-1) @ value
            assert relative_error(result[row, 0], wanted.flatten(0, 1)) < 1e-5


def test_one_graph_serves_every_position_and_is_right() -> None:
    rows = list(decode.measured(CASE, (64, 256), 1, 1))
    assert len(rows) == 2 * 2 * 4 and max(row["error"] for row in rows) < 1e-4
    passed = [row for row in rows if row["way"] == w.PASS]
    assert all(row["took"] == "cpu_kernel (valid_range)" for row in passed)
    assert all(row["read_bytes"] <= 1.5 * row["valid_bytes"] for row in passed if row["position"] == 256)
    assert all(row["share"] > 0 for row in rows if row["stage"] == decode.STEP)


def test_attention_alone_is_judged_by_the_cache_it_read() -> None:
    """A step in float32 would put another key at its position than the step in bfloat16 did."""
    case = decode.Case("sdpa", torch.bfloat16, 1)
    rows = [row for row in decode.measured(case, (64,), 1, 1) if row["stage"] == decode.ALONE]
    assert max(row["error"] for row in rows) < 2e-2


def test_a_graph_for_one_position_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def go_to(decoder: decode.Decoder, position: int) -> None:
        decoder.place = position  # type: ignore[attr-defined]

    def attention(decoder: decode.Decoder) -> torch.Tensor:
        return decoder.queries[0] * decoder.place  # type: ignore[attr-defined, no-any-return]

    monkeypatch.setattr(decode.Decoder, "go_to", go_to)
    monkeypatch.setattr(decode.Decoder, "attention", attention)
    monkeypatch.setattr(decode.Decoder, "step", attention)
    with pytest.raises(torch._dynamo.exc.RecompileError):
        list(decode.measured(CASE, (64, 256), 1, 1))

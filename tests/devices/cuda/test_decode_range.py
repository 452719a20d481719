"""A cache of which a part is valid, by the split-KV target: what the operator is told, and the program's numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_eager import NEG_INF, qkv, same

import attn_pass

pytest.importorskip("triton")

Tensor = torch.Tensor
HALF = torch.bfloat16
LOWEST = torch.finfo(HALF).min
POSITION, LENGTHS, EACH = torch.tensor(11), torch.tensor([3, 20]), torch.tensor([11, 4, 30, 2, 7])
NAMES = ("query", "key", "value", "mask", "scale", "causal", "window", "lengths", "starts", "mean")


def at() -> Tensor:
    return torch.arange(50)


def row() -> Tensor:
    return torch.arange(5)[:, None]


def of_batch(n: Tensor) -> Tensor:
    return n[:, None, None, None]


# What is kept, of what the program knows; query rows; what the operator is told, with a fill of -inf.
MASKS: dict[str, tuple[Callable[[Tensor], Tensor], Tensor, int, set[str]]] = {
    "a position": (lambda p: at() <= p, POSITION, 1, {"lengths"}),
    "a position of several rows": (lambda p: at() <= p, POSITION, 5, {"lengths"}),
    "lengths": (lambda n: at() < of_batch(n), LENGTHS, 1, {"lengths"}),
    "left padding": (lambda n: at() >= of_batch(n), LENGTHS, 3, {"starts"}),
    "a window": (lambda p: (at() <= p) & (at() > p - 4), POSITION, 1, {"lengths", "starts"}),
    "a range of numbers beside it": (
        lambda p: (at() <= p) & (at() >= 2) & (at() < 40),
        POSITION,
        1,
        {"lengths", "starts"},
    ),
    "causal from a position": (lambda p: at() <= row() + p, POSITION, 5, {"causal", "lengths"}),
    "causal in each row of the batch": (lambda n: at() < row() + of_batch(n), LENGTHS, 5, {"causal", "lengths"}),
    "windows from a position": (
        lambda p: (at() <= row() + p) & (at() > row() + p - 4),
        POSITION,
        5,
        {"causal", "window", "lengths"},
    ),
    "causal and left padding": (
        lambda n: (at() <= row() + 14) & (at() <= row() + of_batch(n) + 9) & (at() >= of_batch(n) - 1),
        LENGTHS,
        5,
        {"mask", "lengths", "starts"},
    ),
    "left padding of a chunk": (
        lambda n: (at() <= row() + of_batch(n)) & (at() >= of_batch(n) - 1),
        LENGTHS,
        5,
        {"causal", "lengths", "starts"},
    ),
    "positions of queries": (lambda p: at() <= p[:, None], EACH, 5, {"mask", "lengths"}),
    "a sink beside a window": (
        lambda p: ((at() <= p) & (at() > p - 4)) | (at() == 0),
        POSITION,
        1,
        {"mask", "lengths"},
    ),
    "a ring": (lambda p: p - (p - at()) % 50 >= 0, POSITION, 1, {"lengths"}),
    "causal beside a length": (lambda p: (at() <= row() + p) & (at() < p + 3), POSITION, 5, {"mask", "lengths"}),
}


def attend(keep: Callable[[Tensor], Tensor], fill: float = NEG_INF, added: bool = False) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, known: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        kept, scores = keep(known), q @ k.mT * 0.3
        scores = scores + torch.where(kept, 0.0, fill).to(q.dtype) if added else scores.masked_fill(~kept, fill)
        return scores.softmax(-1) @ v

    return run


def reported(fn: Callable[..., Any], *inputs: Tensor, **options: Any) -> dict[str, Any]:
    """What the emitted operator is given besides its defaults, by name."""
    calls: list[torch.fx.Node] = []

    def seen(gm: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        calls.extend(n for n in gm.graph.nodes if "attn_pass.decode" in str(n.target))
        return gm

    asked = {"device": "H200", "targets": ("decode",), "choose": "fused", "on_error": "raise", **options}
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(fn, backend=attn_pass.wrap(seen, **asked))(*inputs)
    (call,) = calls
    given = dict(zip(NAMES, call.args))
    defaults = {"mask": None, "causal": False, "window": -1, "lengths": None, "starts": None, "mean": False}
    return {name: given[name] for name, default in defaults.items() if given.get(name, default) is not default}


def inputs_for(q_len: int, kv_heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return qkv(2, 4, q_len, 50, 16, kv_heads=kv_heads, dtype=HALF)


@pytest.mark.parametrize("name", MASKS)
def test_what_the_operator_is_told(name: str) -> None:
    keep, known, q_len, wanted = MASKS[name]
    told = reported(attend(keep), *inputs_for(q_len), known)
    assert set(told) - {"window"} == wanted - {"window"}
    assert ("window" in wanted) == (told.get("window", -1) >= 0)


@pytest.mark.parametrize(("fill", "added"), [(NEG_INF, False), (LOWEST, True)])
@pytest.mark.parametrize("name", MASKS)
def test_the_program_s_numbers(name: str, fill: float, added: bool) -> None:
    """At positions in the cache, before its first key (fully masked rows) and behind its last one."""
    keep, known, q_len, _ = MASKS[name]
    inputs = inputs_for(q_len)
    then = [(*inputs, known + moved) for moved in (-12, 45)]
    asked = {"device": "H200", "targets": ("decode",), "reference": False}
    with torch.no_grad():
        same(attend(keep, fill, added), *inputs, known, then=then, rewritten=1, **asked)


def test_a_number_that_fills_a_row_is_the_mean_of_all_values() -> None:
    keep, known, q_len, _ = MASKS["causal from a position"]
    assert reported(attend(keep, LOWEST), *inputs_for(q_len), known)["mean"] is True
    assert "mean" not in reported(attend(keep, LOWEST), *inputs_for(q_len), known, assume_nonempty_rows=True)
    keep, known, q_len, _ = MASKS["a sink beside a window"]
    assert "lengths" not in reported(attend(keep, LOWEST), *inputs_for(q_len), known)  # which a range would not be


def test_a_range_that_is_refused_has_its_reason_in_the_report() -> None:
    """Where the target takes the mask as it is, and not the range beside it."""
    keep, known, q_len, _ = MASKS["a sink beside a window"]
    asked = {"device": "H200", "targets": ("decode", "flash", "efficient"), "choose": "fused"}
    with torch.no_grad():
        report = attn_pass.explain(attend(keep, LOWEST), *inputs_for(q_len), known, attn_pass_options=asked)
    (site,) = report.sites
    assert site.target in ("decode", "efficient") and "decode" not in site.refusals
    assert "is the mean of all values, of which a range" in site.refusals["decode (valid_range)"]
    assert site.refusals["flash"] == "the flash kernel takes no mask"
    assert "is the mean of all values, of which a range" in site.refusals["flash (valid_range)"]


def test_invalid_keys_are_never_read() -> None:
    q, k, v = inputs_for(1)
    k[:, :, 13:], v[:, :, 13:] = torch.nan, torch.inf
    backend = attn_pass.wrap("eager", choose="fused", targets=("decode",), device="H200", on_error="raise")
    fn = torch.compile(attend(MASKS["a position"][0], LOWEST), backend=backend)
    with torch.no_grad():
        valid = attend(lambda p: at()[:13] <= p)(q, k[:, :, :13], v[:, :, :13], torch.tensor(12))
        torch.testing.assert_close(fn(q, k, v, torch.tensor(12)), valid, atol=2e-2, rtol=2e-2)


def test_dynamic_sizes() -> None:
    for name in ("lengths", "left padding of a chunk"):
        keep, known, q_len, _ = MASKS[name]
        given = inputs_for(q_len)
        same(attend(keep), *given, known, rewritten=1, device="H200", targets=("decode",), reference=False)


@pytest.mark.parametrize("q_len", [1, 4])
def test_the_range_is_predicted_cheaper_than_the_whole_cache(q_len: int) -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, p: Tensor) -> Tensor:
        keys, rows = (torch.arange(x.shape[2], device=q.device) for x in (k, q))
        keep = keys <= rows[:, None] + p
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, keep[None, None], enable_gqa=True)

    with torch.device("meta"):
        q = torch.empty(4, 32, q_len, 128, dtype=HALF)
        k, v = (torch.empty(4, 8, 4096, 128, dtype=HALF) for _ in range(2))
    with torch.no_grad():
        site = attn_pass.explain(
            fn, q, k, v, torch.tensor(9, device="meta"), attn_pass_options={"device": "H200"}
        ).sites[0]
    assert (site.target, site.poor_cases) == ("decode", ("valid_range",)), site.predicted_us
    assert site.predicted_us["decode (valid_range)"] < site.predicted_us["decode"]

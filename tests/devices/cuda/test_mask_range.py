"""Masks that are made outside and passed in: the split-KV target finds in the mask itself which keys it has to read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import NEG_INF, qkv, randn, same, same_each

import attn_pass
from attn_pass.devices.cuda import mask_range
from attn_pass.targets import looking
from bench.gpu import stand_ins

pytest.importorskip("triton")
stand_ins.install()

Tensor = torch.Tensor
HALF = torch.bfloat16
KEYS = 50
LOWEST = torch.finfo(HALF).min
ASKED: dict[str, Any] = {"device": "H200", "targets": ("decode",), "choose": "fused", "on_error": "raise"}
LENGTHS, STARTS = 7, 8  # among the operator's arguments


def at() -> Tensor:
    return torch.arange(KEYS)


def row() -> Tensor:
    return torch.arange(5)[:, None]


def of_batch(*numbers: int) -> Tensor:
    return torch.tensor(numbers)[:, None, None, None]


# What a row keeps, of two batch rows, 4 heads and 5 queries: what a cache would, and what one would not.
KEPT: dict[str, Tensor] = {
    "a position": (at() <= 11).expand(1, 1, 1, -1),
    "positions of queries": (at() <= row() + 11)[None, None],
    "lengths": at() < of_batch(3, 20),
    "left padding": at() >= of_batch(7, 0),
    "left padding of a chunk": (at() >= of_batch(7, 0)) & (at() <= row() + 20),
    "a window": ((at() <= row() + 30) & (at() > row() + 22))[None, None],
    "another range for each head": at() < torch.tensor([3, 9, 1, 0])[None, :, None, None],
    "a later key": ((at() <= 11) | (at() == KEYS - 1)).expand(1, 1, 1, -1),
    "a prefix": ((at() <= row() + 11) | (at() < 30))[None, None],
    "a sink beside a window": (((at() <= 40) & (at() > 36)) | (at() == 0)).expand(1, 1, 1, -1),
    "no key for a row of the batch": at() < of_batch(0, 20),
    "no key for one query": ((at() < 20) & (row() != 2))[None, None],
    "no key at all": torch.zeros(1, 1, 1, KEYS, dtype=torch.bool),
    "every key": torch.ones(2, 1, 1, KEYS, dtype=torch.bool),
    "at random": randn(2, 4, 5, KEYS) > 1,
}


def given_keep(fill: float) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        return (q @ k.mT * 0.3).masked_fill(~mask, fill).softmax(-1) @ v

    return run


def given_matrix(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    return (q @ k.mT * 0.3 + mask).softmax(-1) @ v


def operands(q_len: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    return qkv(2, 4, q_len, KEYS, 16, kv_heads=2, dtype=HALF)


def emitted(fn: Callable[..., Any], *inputs: Tensor, **options: Any) -> list[torch.fx.Node]:
    nodes: list[torch.fx.Node] = []

    def seen(gm: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        nodes.extend(gm.graph.nodes)
        return gm

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(fn, backend=attn_pass.wrap(seen, **{**ASKED, **options}))(*inputs)
    return nodes


def is_told(nodes: list[torch.fx.Node]) -> list[bool]:
    """Of each call whether it has a range of keys."""
    calls = [n for n in nodes if "attn_pass.decode" in str(n.target)]
    assert calls
    return [len(n.args) > STARTS and None not in (n.args[LENGTHS], n.args[STARTS]) for n in calls]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if looking cost nothing: these shapes are small."""
    monkeypatch.setattr(looking, "pays", lambda *_: True)


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[mask_range.MaskRange]:
    """The ranges that were emitted."""
    emitted_ranges: list[mask_range.MaskRange] = []
    original = mask_range.MaskRange.lengths_and_starts

    def noted(self: mask_range.MaskRange, lower: Any) -> Any:
        emitted_ranges.append(self)
        return original(self, lower)

    monkeypatch.setattr(mask_range.MaskRange, "lengths_and_starts", noted)
    return emitted_ranges


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", KEPT)
def test_it_equals_the_program(name: str, looked: list[mask_range.MaskRange]) -> None:
    mask = KEPT[name]
    added = torch.zeros(mask.shape, dtype=HALF).masked_fill(~mask, LOWEST)
    programs = {
        "filled with -inf": (given_keep(NEG_INF), (*operands(), mask)),
        "filled with a number": (given_keep(LOWEST), (*operands(), mask)),
        "added": (given_matrix, (*operands(), added)),
    }
    with torch.no_grad():
        same_each(programs, device="H200", targets=("decode",), reference=False)
    assert len(looked) == 3 and looked[1].averages


def rows_of_a_triangle(q: Tensor, k: Tensor, v: Tensor, triangle: Tensor, position: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=triangle[None, None, position], enable_gqa=True)


def zeros_and_ones(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    added = (1.0 - mask[:, None, None, :].to(q.dtype)) * torch.finfo(q.dtype).min
    return F.scaled_dot_product_attention(q, k, v, attn_mask=added, enable_gqa=True)


def padding_is_true(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=~padding[:, None, None, :], enable_gqa=True)


def part_of_a_wider_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """As transformers cut theirs to the length of the keys."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, :, :, : k.shape[-2]], enable_gqa=True)


SPELLINGS: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "rows of a triangle": (rows_of_a_triangle, (torch.ones(KEYS, KEYS).tril().bool(), torch.arange(5) + 11)),
    "zeros and ones": (zeros_and_ones, ((at() < torch.tensor([[3], [20]])).long(),)),
    "padding is true": (padding_is_true, (at() >= torch.tensor([[3], [20]]),)),
    "a part of a wider mask": (part_of_a_wider_mask, ((torch.arange(64) < 9).expand(1, 1, 5, -1),)),
}


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name: str, looked: list[mask_range.MaskRange]) -> None:
    fn, given = SPELLINGS[name]
    with torch.no_grad():
        same(fn, *operands(), *given, rewritten=1, device="H200", targets=("decode",), reference=False)
    assert len(looked) == 1


@pytest.mark.usefixtures("always")
def test_keys_outside_are_never_read() -> None:
    q, k, v = operands()
    mask = (at() < 13).expand(1, 1, 1, -1)
    nothing = k.clone(), v.clone()
    for t, bad in zip(nothing, (torch.nan, torch.inf)):
        t[:, :, 13:] = bad
    added = torch.zeros(mask.shape, dtype=HALF).masked_fill(~mask, LOWEST)
    for fn, given in ((given_keep(NEG_INF), mask), (given_matrix, added)):
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend=attn_pass.wrap("eager", **ASKED))
        with torch.no_grad():
            torch.testing.assert_close(compiled(q, *nothing, given), fn(q, k, v, given), atol=2e-2, rtol=2e-2)


def layers(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    for _ in range(3):
        q = given_keep(NEG_INF)(q, k, v, mask)
    return q


def layers_that_unmask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Each layer keeps one key more, by a write to the mask that all of them read."""
    for layer in range(3):
        q = given_keep(NEG_INF)(q, k, v, mask)
        mask[..., 30 + layer] = True
    return q


WAITS = ("item", "nonzero", "_local_scalar_dense", "tolist", "masked_select", "equal")


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("target", ["decode", "flash", "flex"])
def test_nothing_waits_for_the_device(target: str) -> None:
    """Ranges are tensors from their making to the kernel: a CUDA graph serves every position."""

    def of_position(q: Tensor, k: Tensor, v: Tensor, p: Tensor, padding: Tensor) -> Tensor:
        keep = (at() <= row() + p) & (at() >= padding[:, None, None, None])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep, enable_gqa=True)

    programs: list[tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = [
        (of_position, (torch.tensor(11), torch.tensor([3, 0])))
    ]
    programs += [(given_keep(NEG_INF), (KEPT["lengths"],))] if target == "decode" else []
    for fn, known in programs:
        nodes = emitted(fn, *operands(), *known, targets=(target,))
        targets = [str(n.target) for n in nodes if n.op.startswith("call")]
        assert any(target in name for name in targets)
        assert not {name.rpartition("aten.")[2].partition(".")[0] for name in targets} & set(WAITS), targets


@pytest.mark.usefixtures("always")
def test_all_layers_look_once() -> None:
    nodes = emitted(layers, *operands(), KEPT["lengths"])
    assert is_told(nodes) == [True] * 3
    assert sum("amax" in str(n.target) for n in nodes) == 2  # where the range begins, and where it ends
    same(layers, *operands(), KEPT["lengths"], rewritten=3, device="H200", targets=("decode",), reference=False)


def test_a_mask_that_is_written_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor predicted to be."""
    seen: list[int] = []
    microseconds = mask_range.microseconds

    def noted(problem: Any, setting: Any) -> float:
        seen.append(setting.sharing_mask)
        return microseconds(problem, setting)

    monkeypatch.setattr(mask_range, "microseconds", noted)
    emitted(layers, *operands(), KEPT["lengths"])
    assert set(seen) == {3}
    seen.clear()
    emitted(layers_that_unmask, *operands(), KEPT["lengths"].clone())
    assert set(seen) == {1}


@pytest.mark.usefixtures("always")
def test_a_mask_that_later_unmasks_is_looked_at_again() -> None:
    nodes = emitted(layers_that_unmask, *operands(), KEPT["lengths"].clone())
    assert sum("amax" in str(n.target) for n in nodes) == 2 * sum(is_told(nodes)) == 6
    given = (*operands(), KEPT["lengths"].clone())
    same(layers_that_unmask, *given, rewritten=3, device="H200", targets=("decode",), reference=False)


def beside_a_bias(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, bias: Tensor) -> Tensor:
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    return (q @ k.mT * 0.3 + bias).masked_fill(~mask, LOWEST).softmax(-1) @ v


@pytest.mark.usefixtures("always")
def test_what_is_not_looked_at() -> None:
    mask, half = KEPT["lengths"], torch.float16
    same_for_all = torch.ones(2, 1, 5, 1, dtype=torch.bool)
    assert is_told(emitted(given_keep(NEG_INF), *operands(), same_for_all)) == [False]
    narrow = [t.to(half) for t in (*operands(), torch.zeros(mask.shape).masked_fill(~mask, -60000.0))]
    assert is_told(emitted(given_matrix, *narrow)) == [False]  # there such a number does not absorb a score

    assert is_told(emitted(beside_a_bias, *operands(), mask, randn(1, 4, 5, KEYS, dtype=HALF))) == [False]


@pytest.mark.usefixtures("always")
def test_a_learned_bias_rules_no_key_out() -> None:
    bias = randn(1, 4, 5, KEYS, dtype=HALF) * 100
    with torch.no_grad():
        same(given_matrix, *operands(), bias, rewritten=1, device="H200", targets=("decode",))


@pytest.mark.usefixtures("always")
def test_sizes_that_are_not_known() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    backend, graphs = attn_pass.wrap("eager", **ASKED), []

    def counted(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return backend(gm, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=counted)
    for keys in (50, 61, 32):
        q, k, v = qkv(2, 4, 5, keys, 16, kv_heads=2, dtype=HALF)
        mask = torch.arange(keys) < of_batch(keys // 2, 3)
        for x in (k, v):
            torch._dynamo.mark_dynamic(x, 2)
        torch._dynamo.mark_dynamic(mask, 3)
        with torch.no_grad():
            torch.testing.assert_close(compiled(q, k, v, mask), fn(q, k, v, mask), atol=2e-2, rtol=2e-2)
    assert len(graphs) == 1


# ---------------------------------------------------------------- whether it pays, at sizes of models


def step(count: int, *, in_place: bool = True) -> Callable[..., list[Tensor]]:
    def run(q: Tensor, caches: Tensor, new: Tensor, position: Tensor, mask: Tensor) -> list[Tensor]:
        made = []
        for layer in range(count):
            k, v = caches[2 * layer], caches[2 * layer + 1]
            if in_place:
                k.index_copy_(2, position, new)
                v.index_copy_(2, position, new)
            made.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True))
        return made

    return run


def predicted(count: int, keys: int, batch: int, *, in_place: bool = True, device: str = "H200") -> float:
    with torch.device("meta"):
        q, new = (torch.empty(batch, heads, 1, 128, dtype=HALF) for heads in (32, 8))
        caches = torch.empty(2 * count, batch, 8, keys, 128, dtype=HALF)
        position, mask = torch.empty(1, dtype=torch.int64), torch.empty(batch, 1, 1, keys, dtype=torch.bool)
    with torch.no_grad():
        fn = step(count, in_place=in_place)
        report = attn_pass.explain(fn, q, caches, new, position, mask, attn_pass_options={"device": device})
    return report.sites[0].predicted_us["decode"]


def test_it_is_looked_where_that_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    pays = looking.pays
    monkeypatch.setattr(looking, "pays", lambda *given: asked.append(pays(*given)) or asked[-1])

    def is_looked(*given: Any, **more: Any) -> bool:
        asked.clear()
        predicted(*given, **more)
        return asked[0]

    assert is_looked(32, 4096, 1) and is_looked(8, 4096, 2, device="A100")
    assert not is_looked(1, 4096, 1) and not is_looked(4, 512, 1)
    assert is_looked(1, 65536, 4)


def test_keys_that_are_turned_in_place_are_no_cache() -> None:
    """Rotary embeddings written to the projection's own result."""

    def fn(x: Tensor, weight: Tensor, cosine: Tensor, q: Tensor, mask: Tensor) -> Tensor:
        k = (x @ weight).view(4, 8192, 8, 128).transpose(1, 2)
        k.mul_(cosine)
        return F.scaled_dot_product_attention(q, k, k, attn_mask=mask, enable_gqa=True)

    with torch.device("meta"):
        x, weight, cosine = (torch.empty(*shape, dtype=HALF) for shape in ((4, 8192, 64), (64, 1024), (8192, 128)))
        q, mask = torch.empty(4, 32, 1, 128, dtype=HALF), torch.empty(4, 1, 1, 8192, dtype=torch.bool)
    with torch.no_grad():
        report = attn_pass.explain(fn, x, weight, cosine, q, mask, attn_pass_options={"device": "H200"})
    assert report.sites[0].predicted_us["decode"] > 0.9 * predicted(1, 8192, 4, in_place=False)


def test_only_a_cache_is_taken_for_half_full(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, other = (predicted(4, 16384, 4, in_place=in_place) for in_place in (True, False))
    monkeypatch.setattr(looking, "pays", lambda *_: False)
    whole = predicted(4, 16384, 4)
    assert cache < 0.6 * whole < whole < other < 1.1 * whole

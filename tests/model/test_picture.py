"""Pictures of masks: every cell shows what the program's mask does to its rows and keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_eager import Together

import attn_pass
from attn_pass.model.picture import CELLS
from attn_pass.report.pages.collect import collect
from attn_pass.report.pages.picture import Picture

Tensor = torch.Tensor
Mask = Callable[[Tensor, Tensor], Tensor]


def drawn(program: Callable[..., Tensor], *inputs: Tensor, dynamic: bool = False) -> Picture | None:
    (picture,) = all_drawn(program, *inputs, dynamic=dynamic)
    return picture


def all_drawn(program: Callable[..., Any], *inputs: Tensor, dynamic: bool = False) -> list[Picture | None]:
    """Of each site."""
    options = {"choose": "fused", "on_error": "raise"}
    with collect() as collection:
        attn_pass.explain(program, *inputs, attn_pass_options=options, attn_pass_dynamic=dynamic)
    return [change.picture for change in collection.graphs[0].sites]


def qkv(rows: int, keys: int, heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(1, heads, rows, 4), torch.randn(1, heads, keys, 4), torch.randn(1, heads, keys, 4)


def masked(keep: Mask) -> Callable[..., Tensor]:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
        return (q @ k.mT).masked_fill(~keep(i, j), float("-inf")).softmax(-1) @ v

    return program


def shrunk(mask: Tensor) -> list[str]:
    """What the picture of a mask in memory is."""
    rows, keys = mask.shape
    high, wide = min(rows, CELLS), min(keys, CELLS)
    smaller = []
    for y in range(high):
        line = ""
        for x in range(wide):
            cell = mask[y * rows // high : (y + 1) * rows // high, x * keys // wide : (x + 1) * keys // wide]
            line += "#" if bool(cell.all()) else "+" if bool(cell.any()) else "."
        smaller.append(line)
    return smaller


MASKS: dict[str, Mask] = {
    "causal": lambda i, j: j <= i,
    "bottom right": lambda i, j: j <= i + 3,
    "window": lambda i, j: (j <= i) & (i - j <= 11),
    "chunks": lambda i, j: j // 7 == i // 7,
    "prefix": lambda i, j: (j < 5) & (i >= 0),
    "strided": lambda i, j: ((i - j) % 3 == 0) | (j == 0),
}


@pytest.mark.parametrize(("rows", "keys"), [(1, 13), (7, 7), (50, 61), (113, 200)])
def test_every_cell_is_the_programs_mask(rows: int, keys: int) -> None:
    whole = Together([(masked(keep), 3) for keep in MASKS.values()])
    pictures = all_drawn(whole, *(x for _ in MASKS for x in qkv(rows, keys)))
    i, j = torch.arange(rows)[:, None], torch.arange(keys)[None, :]
    for (name, keep), picture in zip(MASKS.items(), pictures, strict=True):
        mask = keep(i, j).expand(rows, keys)
        if picture is None:
            assert bool(mask.all()), f"{name}: a mask without a picture"
            continue
        assert list(picture.cells) == shrunk(mask) and (picture.rows, picture.keys) == (rows, keys), name
        assert "sampled" not in picture.remark, name


def test_a_long_mask_is_sampled_and_says_so() -> None:
    picture = drawn(masked(MASKS["causal"]), *qkv(3000, 3000, heads=1))
    assert picture is not None and "sampled" in picture.remark
    expected = ["#" * n + "+" + "." * (CELLS - n - 1) for n in range(CELLS)]
    assert list(picture.cells) == expected


def test_what_is_known_at_run_time_only_is_unknown_where_it_matters() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor, pad: Tensor) -> Tensor:
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
        keep = (j <= i) & pad[:, None, None, :]
        return (q @ k.mT).masked_fill(~keep, -1e30).softmax(-1) @ v

    picture = drawn(program, *qkv(9, 9), torch.ones(1, 9, dtype=torch.bool))
    assert picture is not None
    assert list(picture.cells) == ["?" * (n + 1) + "." * (8 - n) for n in range(9)]

    def either(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
        keep = (j <= i) | seen[:, None, None, :]
        return (q @ k.mT).masked_fill(~keep, float("-inf")).softmax(-1) @ v

    picture = drawn(either, *qkv(9, 9), torch.ones(1, 9, dtype=torch.bool))
    assert picture is not None
    assert list(picture.cells) == ["#" * (n + 1) + "?" * (8 - n) for n in range(9)]


def test_the_values_of_a_constant_are_looked_at() -> None:
    kept = torch.rand(12, 12) < 0.4
    kept[:, 0] = True

    class Fixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", kept)

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return (q @ k.mT).masked_fill(~self.kept, float("-inf")).softmax(-1) @ v

    unknown = drawn(Fixed(), *qkv(12, 12))
    assert unknown is not None and set("".join(unknown.cells)) == {"?"}
    with collect() as collection:
        options = {"choose": "fused", "assume_constant_buffers": True}
        attn_pass.explain(Fixed(), *qkv(12, 12), attn_pass_options=options, attn_pass_aot=True)
    picture = collection.graphs[0].sites[0].picture
    assert picture is not None and list(picture.cells) == shrunk(kept)


def test_symbolic_sizes_are_those_of_the_example() -> None:
    picture = drawn(masked(MASKS["causal"]), *qkv(21, 21), dynamic=True)
    assert picture is not None and (picture.rows, picture.keys) == (21, 21)
    assert list(picture.cells) == shrunk(torch.ones(21, 21).tril().bool())


def test_nothing_is_drawn_of_no_mask_and_of_a_bias() -> None:
    assert drawn(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, *qkv(5, 5)) is None
    assert drawn(lambda q, k, v, bias: (q @ k.mT + bias).softmax(-1) @ v, *qkv(5, 5), torch.randn(5, 5)) is None


def test_an_additive_mask_is_one() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
        bias = torch.zeros(q.shape[2], k.shape[2]).masked_fill(j > i, float("-inf"))
        return (q @ k.mT + bias).softmax(-1) @ v

    picture = drawn(program, *qkv(17, 17))
    assert picture is not None and list(picture.cells) == shrunk(torch.ones(17, 17).tril().bool())


def test_a_mask_that_differs_between_heads_says_which_is_shown() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
        h = torch.arange(q.shape[1])[:, None, None]
        return (q @ k.mT).masked_fill(j > i + h, float("-inf")).softmax(-1) @ v

    picture = drawn(program, *qkv(8, 8))
    assert picture is not None and list(picture.cells) == shrunk(torch.ones(8, 8).tril().bool())
    assert picture.remark == "of the first batch entry and head"


def test_nothing_is_drawn_without_a_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_pass.rewriting import record

    monkeypatch.setattr(record, "picture_of", lambda *_: pytest.fail("a picture that was not requested"))
    attn_pass.explain(masked(MASKS["causal"]), *qkv(5, 5))


def test_runs_of_cells_are_the_cells() -> None:
    picture = Picture(("##+.", "....", "?##."), 3, 4)
    reported = [[*"...."] for _ in range(3)]
    for x, y, width, kind in picture.runs():
        reported[y][x : x + width] = kind * width
    assert ["".join(row) for row in reported] == list(picture.cells) and picture.kinds == ("#", "+", ".", "?")

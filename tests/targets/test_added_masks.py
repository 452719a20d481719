"""Masks of half-precision operands beside wider scores: a number masks in the type in which it joins the scores."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from against_eager import FLEX_ON_CPU, NEG_INF, qkv, randn, same
from torch import Tensor

import attn_pass
from attn_pass.targets.base import FINITE_KEYS

HALF = torch.float16
LOWEST = torch.finfo(torch.float32).min
CAUSAL = torch.ones(9, 9, dtype=torch.bool).tril()
ROWS = (torch.arange(9) == 1).float()[:, None]
Scores = Callable[[Tensor, Tensor, Tensor], Tensor]  # of query, key and the padding (B, 1, 1, S), 1 where kept

# What a row of nothing but masked keys is in eager: the mean of the values, or of those masked the least.
SPELLINGS: dict[str, Scores] = {
    "float32's lowest number, added": lambda q, k, m: (q @ k.mT) * 0.3 + (1.0 - m) * LOWEST,
    "-1e9, added": lambda q, k, m: (q @ k.mT) * 0.3 + (1.0 - m) * -1e9,
    "operands in float32": lambda q, k, m: (q.float() @ k.float().mT) * 0.3 + (1.0 - m) * LOWEST,
    "scores in float32": lambda q, k, m: ((q @ k.mT) * 0.3).float() + (1.0 - m) * -1e9,
    "the mask subtracted": lambda q, k, m: ((q @ k.mT) * 0.3).float() - (1.0 - m) * 1e9,
    "filled by masked_fill": lambda q, k, m: ((q @ k.mT) * 0.3).float().masked_fill(m == 0, LOWEST),
    "filled by where": lambda q, k, m: torch.where(m != 0, (q @ k.mT).float() * 0.3, -1e9),
    "filled in place": lambda q, k, m: ((q @ k.mT) * 0.3).float().masked_fill_(m == 0, -1e9),
    "-1e9, and -inf for what comes later": lambda q, k, m: (
        (q @ k.mT * 0.3).float() + (1.0 - m) * -1e9
    ).masked_fill(~CAUSAL, NEG_INF),
    "-1e9, and a matrix of -inf": lambda q, k, m: (
        (q @ k.mT * 0.3).float() + (1.0 - m) * -1e9 + torch.zeros(9, 9).masked_fill(~CAUSAL, NEG_INF)
    ),
    "left padding and causal in one matrix": lambda q, k, m: (
        q @ k.mT * 0.3 + torch.where(CAUSAL & (m.flip(-1) != 0), 0.0, torch.full((1,), LOWEST))
    ),
    "a bias below float16's range": lambda q, k, m: q @ k.mT * 0.3 + (torch.arange(9) * -20000.0 - 70000.0),
    "a bias below float16's range, at run time": lambda q, k, m: q @ k.mT * 0.3 + (m * -2e4 - 7e4),
    "float64 scores, all absorbed": lambda q, k, m: (q @ k.mT * 0.3).double() + (1.0 - m.double()) * -1e30,
    "float64 scores, nothing absorbed": lambda q, k, m: (q @ k.mT * 0.3).double() + (1.0 - m.double()) * -1e9,
    "float64 scores, below float32's range": lambda q, k, m: (q @ k.mT * 0.3).double() + (1.0 - m.double()) * -1e300,
    "float64 scores, made float32": lambda q, k, m: (
        (q @ k.mT * 0.3).double() + (1.0 - m.double()) * -1e9
    ).float(),
    "float64 scores, rounded to float32 and back": lambda q, k, m: (
        ((q @ k.mT * 0.3).double() + (1.0 - m.double()) * -1e9).float().double()
    ),
    "float32 scores, made float64": lambda q, k, m: ((q @ k.mT * 0.3).float() + (1.0 - m) * -1e9).double(),
    "float64 scores, turned": lambda q, k, m: -((q @ k.mT * 0.3).double() + (1.0 - m.double()) * LOWEST),
    "float16, then float32's softmax": lambda q, k, m: (
        q @ k.mT * 0.3 + (1.0 - m.half()) * torch.finfo(HALF).min
    ).float(),
    "float16 and float32": lambda q, k, m: (
        (q @ k.mT * 0.3 + (1.0 - m.half()) * torch.finfo(HALF).min).float() + torch.arange(9) * -1e9
    ),
    "float16, and float32 for rows": lambda q, k, m: (
        (q @ k.mT * 0.3 + (1.0 - m.half()) * torch.finfo(HALF).min).float() + ROWS * -1e9
    ),
    "float16 for rows, and float32": lambda q, k, m: (
        (q @ k.mT * 0.3 + ROWS.half() * torch.finfo(HALF).min).float() + (1.0 - m) * -1e9
    ),
    "-inf in float16, and float32": lambda q, k, m: (
        (q @ k.mT * 0.3).masked_fill(~CAUSAL, NEG_INF) + (1.0 - m) * -1e9
    ),
    "-inf in float16, and float32 for rows": lambda q, k, m: (
        (q @ k.mT * 0.3).masked_fill(torch.arange(9) >= 6, NEG_INF) + ROWS * -1e9
    ),
    "clamped by -inf": lambda q, k, m: (q @ k.mT * 0.3).clamp(min=NEG_INF) + (1.0 - m) * -1e9,
    "clamped by inf": lambda q, k, m: (q @ k.mT * 0.3).clamp(max=math.inf) + (1.0 - m) * -1e9,
    "the maximum with -inf": lambda q, k, m: (
        torch.maximum(q @ k.mT * 0.3, torch.tensor(NEG_INF, dtype=HALF)) + (1.0 - m) * -1e9
    ),
    "clamped by float16's lowest number": lambda q, k, m: (
        (q @ k.mT * 0.3).clamp(min=torch.finfo(HALF).min) + (1.0 - m) * -1e9
    ),
}  # fmt: skip
LEFT = (
    "float16 and float32",
    "float16, and float32 for rows",
    "float16 for rows, and float32",
    "clamped by float16's lowest number",
    *(() if FLEX_ON_CPU else ("clamped by inf",)),  # a score function
)
LEFT_IN_TRAINING = (
    "float64 scores, turned",
    "-inf in float16, and float32",  # two masks that may empty a row between them
    "-inf in float16, and float32 for rows",
    "clamped by inf",  # a score function
)


def padding() -> Tensor:
    """The first batch entry is fully masked, the other one six of nine."""
    kept = torch.ones(2, 1, 1, 9)
    kept[0], kept[1, ..., 6:] = 0, 0
    return kept


def operands(dtype: torch.dtype, grad: bool) -> list[Tensor]:
    return [randn(2, 2, 9, 16, dtype=dtype, grad=grad, seed=seed) for seed in (1, 2, 3)]


def program(scores: Scores) -> Callable[..., Tensor]:
    return lambda q, k, v, m: scores(q, k, m).softmax(-1).to(v.dtype) @ v


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", list(SPELLINGS))
def test_a_fully_masked_row_of_half_operands(name: str, grad: bool) -> None:
    fn, absorbs_nothing = program(SPELLINGS[name]), name.startswith("a bias")
    inputs, left = (*operands(HALF, grad), padding()), (*LEFT, *LEFT_IN_TRAINING) if grad else LEFT
    count = int(name not in left)
    same(fn, *inputs, rewritten=count, grad=grad, reference=absorbs_nothing)


@pytest.mark.parametrize(
    "name", [n for n in SPELLINGS if "causal" not in n and not n.startswith(("a bias", "float64"))]
)
def test_one_key_of_half_operands_that_is_masked(name: str) -> None:
    """Its weight is 1, and its mask the same for all keys: the type in which that joins the scores counts here too."""
    q, k, v = operands(HALF, False)
    inputs = (q, k[..., :1, :], v[..., :1, :], padding()[..., :1])

    def fn(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        scores = SPELLINGS[name](q, k, m)
        return scores[..., :1].softmax(-1).to(v.dtype) @ v

    with torch.no_grad():
        same(fn, *inputs, reference=False)


@pytest.mark.parametrize(
    "name", ["float32's lowest number, added", "scores in float32", "float64 scores, all absorbed"]
)
def test_a_fully_masked_row_of_bfloat16_operands(name: str) -> None:
    with torch.no_grad():
        same(program(SPELLINGS[name]), *operands(torch.bfloat16, False), padding(), rewritten=1, reference=False)


@pytest.mark.parametrize(
    "numbers", [1e30, 1e300, -1e20 - 1e12 * (torch.arange(9).double() % 2)], ids=["1e30", "1e300", "two"]
)
def test_numbers_that_absorb_a_score_of_float64(numbers: Tensor | float) -> None:
    """In front of the keys that are kept, and two of which the higher takes the row, and float32 makes one."""

    def fn(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return ((q @ k.mT * 0.3).double() + (1.0 - m.double()) * numbers).softmax(-1).to(v.dtype) @ v

    with torch.no_grad():
        same(fn, *operands(HALF, False), padding(), rewritten=1, reference=False)


@pytest.mark.parametrize("reported", [torch.float32, None])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_a_softmax_of_float64_scores_with_a_dtype_argument(dtype: torch.dtype, reported: torch.dtype | None) -> None:
    """-1e9 absorbs a score once it is rounded to float32, and none in float64."""

    def fn(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        scores = (q @ k.mT * 0.3) + (1.0 - m.double()) * -1e9
        return torch.softmax(scores, -1, dtype=reported).to(v.dtype) @ v

    with torch.no_grad():
        same(fn, *operands(dtype, False), padding(), rewritten=1, reference=False)


FUNCTIONS: dict[str, Scores] = {
    "a factor a key": lambda q, k, m: ((q @ k.mT).double() + (1.0 - m.double()) * LOWEST) * torch.arange(1, 10) / 2,
    "a factor a key, -1e9": lambda q, k, m: ((q @ k.mT).double() + (1.0 - m.double()) * -1e9) * (torch.arange(9) > 2),
    "a soft cap, a mask, a factor a key": lambda q, k, m: (
        ((q @ k.mT).tanh().double() + (1.0 - m.double()) * LOWEST) * torch.arange(1, 10)
    ),
}


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_functions_of_float64_scores_with_a_mask_inside(name: str) -> None:
    with torch.no_grad():
        report = same(program(FUNCTIONS[name]), *operands(torch.float32, False), padding(), reference=False)
    assert "float64 scores of narrower operands" in report.left[0].reason


@pytest.mark.parametrize("fill", [LOWEST, -1e9])
def test_a_softmax_with_dtype_float32(fill: float) -> None:
    """The mask is float16's own there, and -1e9 is -inf in it."""

    def fn(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        scores = (q @ k.mT * 0.3) + (1.0 - m) * fill
        return torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype) @ v

    with torch.no_grad():
        same(fn, *operands(HALF, False), padding(), rewritten=1, reference=False)


@pytest.mark.parametrize("kept", [1, 3])
def test_a_half_number_filled_in_under_one_of_minus_infinity(kept: int) -> None:
    """Rows in which float16's lowest number is all that is kept: eager attends to those keys, as to equals."""

    def fn(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        later = torch.arange(9) >= torch.arange(9)[:, None] + kept
        scores = (q @ k.mT * 0.3).masked_fill(m == 0, torch.finfo(HALF).min)
        return scores.masked_fill(later, -math.inf).softmax(-1) @ v

    with torch.no_grad():
        same(fn, *operands(HALF, False), (torch.arange(9) > 5).to(HALF), rewritten=1, reference=False)


class Module(torch.nn.Module):
    """A spelling as a model, to be exported."""

    def __init__(self, scores: Scores) -> None:
        super().__init__()
        self.scores = scores

    def forward(self, q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return program(self.scores)(q, k, v, m)


@pytest.mark.parametrize("name", list(SPELLINGS))
def test_a_fully_masked_row_of_half_operands_exported(name: str) -> None:
    inputs = (*operands(HALF, False), padding())
    exported = torch.export.export(Module(SPELLINGS[name]), inputs)
    report = attn_pass.rewrite(exported, choose="fused", on_error="raise")
    assert len(report.rewritten) == (name not in LEFT), report
    want = Module(SPELLINGS[name])(*inputs)
    torch.testing.assert_close(exported.module()(*inputs), want, atol=1e-2, rtol=0)  # float32 has steps of 0.008 at 7e4


def test_left_padding_under_a_causal_mask_at_default_options() -> None:
    """transformers' matrix of both in float32, the operands float16: rows of padding are the mean of the values."""

    def fn(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        rows = torch.arange(q.shape[2])
        past = (rows <= rows[:, None]) & keep[:, None, None, :].bool()
        scores = q @ k.mT / math.sqrt(q.shape[-1]) + torch.where(past, 0.0, torch.full((1,), LOWEST))
        return torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v

    inputs = [randn(4, 2, 64, 16, dtype=HALF, seed=seed) for seed in (1, 2, 3)]
    keep = (torch.arange(64) >= torch.tensor([0, 10, 40, 63])[:, None]).long()
    with torch.no_grad():
        want = fn(*inputs, keep)
        assert (want[3, :, 5] - inputs[2][3].float().mean(1)).abs().max() < 1e-2
        torch._dynamo.reset()
        out = torch.compile(fn, backend=attn_pass.wrap("eager", choose="fused"))(*inputs, keep)
    torch.testing.assert_close(out, want, atol=1e-2, rtol=0)


# ---- keys that no row may see, and that are no numbers ----

NEAR = (torch.arange(80)[None] - torch.arange(80)[:, None]).abs() <= 2
# With whether eager hides the key, and whether the pass does.
HIDING: dict[str, tuple[Callable[..., Tensor], bool, bool]] = {
    "causal": (lambda s, m: s.masked_fill(~torch.ones(80, 80, dtype=torch.bool).tril(), -1e9), True, True),
    "a range of the keys": (lambda s, m: s.masked_fill(torch.arange(80) >= 30, -1e9), True, True),
    "a score function": (lambda s, m: torch.tanh(s).masked_fill(m == 0, -1e9), True, True),
    "a window": (lambda s, m: s.masked_fill(~NEAR, -1e9), True, False),
    "padding": (lambda s, m: s.masked_fill(m == 0, NEG_INF), True, False),
    "padding, and then a bias": (lambda s, m: s.masked_fill(m == 0, -1e30) + torch.arange(80) / 8, True, False),
    "a weak fill, and then a bias": (lambda s, m: s.masked_fill(m == 0, -1e9) + torch.arange(80) / 8, True, True),
    "an added matrix": (lambda s, m: s + (1.0 - m) * -1e9, False, True),
}
OF_SCORES = ("a score function", "a weak fill, and then a bias")
"""Of these, those that are functions of the scores."""


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", [n for n in HIDING if FLEX_ON_CPU or n not in OF_SCORES])
def test_a_masked_key_that_is_nan(name: str, value: float) -> None:
    """It is eager's result, or an assumption that "strict" does not make; an added mask hides it in neither."""
    scores, eager_hides, pass_hides = HIDING[name]
    q, k, v = (randn(1, 2, 80, 16, seed=seed) for seed in (1, 2, 3))
    k[:, :, 70], mask = value, torch.ones(80)
    mask[70] = 0

    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scores(q @ k.mT, mask).softmax(-1) @ v

    want = fn(q, k, v)
    defined = torch.isfinite(want)
    assert bool(defined.any()) == eager_hides
    for numerics in ("default", "strict"):
        torch._dynamo.reset()
        with attn_pass.record() as report, torch.no_grad():
            run = torch.compile(fn, backend=attn_pass.wrap("eager", choose="fused", numerics=numerics))
            got = run(q, k, v)
        (site,) = report.sites
        right = not eager_hides or torch.allclose(got[defined], want[defined], atol=1e-5)
        assert right == (pass_hides or numerics == "strict")
        assert (FINITE_KEYS in site.assumptions) == (not pass_hides and site.outcome == "rewritten")
        assert site.outcome == "rewritten" or numerics == "strict"


def test_a_call_with_a_mask_hides_no_key_itself() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q[:, 0], k[:, 0], v[:, 0], attn_mask=keep)

    report = same(fn, *operands(torch.float32, False), CAUSAL & (torch.arange(9) != 3), rewritten=1)
    assert FINITE_KEYS not in report.sites[0].assumptions


LOW = torch.finfo(torch.float16).min


def _added(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, (1.0 - keep.to(q.dtype)) * LOW)


def _filled(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, torch.zeros(8, 8, dtype=q.dtype).masked_fill(~keep, LOW))


@pytest.mark.parametrize("program", [_added, _filled])
@pytest.mark.parametrize("target", ["sdpa", "cpu_kernel"])
@pytest.mark.parametrize("rank", [3, 4])
def test_a_call_in_float16_adds_its_mask_in_float32(rank: int, target: str, program: Callable[..., Tensor]) -> None:
    """Where torch does not fuse it either: a row of equal low numbers still has its scores."""
    keep = torch.ones(8, 8, dtype=torch.bool)
    keep[3], keep[4, 4:] = False, False
    q, k, v = qkv(1, 2, 8, 8, value_dim=16 if rank == 3 else 24, dtype=torch.float16)
    operands = (q[0], k[0], v[0]) if rank == 3 else (q, k, v)
    same(program, *operands, keep, rewritten=1, targets=(target,))


def test_a_causal_call_in_float16_is_causal() -> None:
    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, torch.full((8, 8), LOW, dtype=q.dtype).triu(1))

    q, k, v = qkv(1, 2, 8, 8, value_dim=24, dtype=torch.float16)
    assert same(program, q, k, v, rewritten=1, targets=("sdpa",)).sites[0].mask == "causal"


@pytest.mark.parametrize("target", ["sdpa", "cpu_kernel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_mask_of_a_single_score(target: str, dtype: torch.dtype) -> None:
    """Computed of numbers alone, it is a matrix all the same."""
    lowest = torch.finfo(dtype).min

    def program(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = torch.where(torch.ones(1, 1, dtype=torch.bool).tril(-1), 0.0, lowest).to(dtype)
        scores = torch.maximum(q @ k.mT + hidden, torch.tensor(lowest, dtype=dtype))
        return torch.softmax(scores, -1) @ v

    same(program, *qkv(2, 2, 1, 1, 4, dtype=dtype), rewritten=1, targets=(target,))

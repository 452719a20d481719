"""`attn_pass::attention` in eager: random calls compared with float64, on every instruction set of this machine."""

from __future__ import annotations

import os
import platform
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_reference import reference
from torch import Tensor

from attn_pass.devices.cpu.kernel import build, operator, scores, source
from attn_pass.devices.cpu.kernel.operator import OPERATOR, WITH_LSE

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCORE = "add(mul(tanh(mul(x, number(0.25f))), number(5.0f)), where(captured(1), captured(0), number(0.5f)))"
ERRORS = {torch.float32: 8e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # of numbers of about 1


def laid_out(rng: random.Random, dtype: torch.dtype, batch: int, heads: int, length: int, dim: int) -> Tensor:
    """An operand as it may lie: heads last, transposed, with gaps, expanded, or dense."""
    make = {
        "heads last": lambda: torch.randn(batch, length, heads, dim).to(dtype).transpose(1, 2),
        "transposed": lambda: torch.randn(batch, heads, dim, length).to(dtype).mT,
        "with gaps": lambda: torch.randn(batch, heads, length, dim + 3).to(dtype)[..., 1 : dim + 1],
        "expanded": lambda: torch.randn(1, heads, length, dim).to(dtype).expand(batch, heads, length, dim),
        "dense": lambda: torch.randn(batch, heads, length, dim).to(dtype),
    }
    return make[rng.choice(list(make))]()


def lookups(rng: random.Random, dtype: torch.dtype, shape: Sequence[int]) -> dict[str, list[Any]]:
    """Tables and places over scores of a shape, each of which may be broadcast, and keys that may lie apart."""
    given: dict[str, list[Any]] = {"tables": [], "places": [], "factors": []}
    for _ in range(rng.randint(1, scores.MOST_LOOKUPS)):
        numbers = rng.choice((1, 7, 40))
        table, place = ([rng.choice((1, n)) for n in shape] for _ in range(2))
        made = torch.randn(*table, numbers + 2)[..., 1 : numbers + 1]
        made = made if rng.random() < 0.7 else made.transpose(3, 4).contiguous().transpose(3, 4)
        given["tables"].append(made.to(rng.choice((torch.float32, dtype))))
        given["places"].append(torch.randint(0, numbers, place, dtype=torch.int32))
        given["factors"].append(torch.tensor(rng.choice((1.0, -0.3))))
    return given


def draw(
    rng: random.Random, dtype: torch.dtype, scored: float
) -> tuple[tuple[Tensor, Tensor, Tensor, float], dict[str, Any]]:
    """A call: sizes around those of tiles and panels, and any of the bounds and masks together."""
    batch, kv_heads, groups = rng.choice((1, 1, 2, 3)), rng.choice((1, 2, 3)), rng.choice((1, 1, 2, 4))
    heads, q_len = kv_heads * groups, rng.choice((1, 1, 2, 3, 5, 7, 16, 17, 49, 97, 130))
    kv_len = rng.choice((1, 2, 15, 16, 17, 49, 63, 64, 65, 128, 257, 300))
    dim = rng.choice((1, 3, 8, 16, 24, 32, 33, 40, 64, 72, 80, 128, 130))
    operands = (
        laid_out(rng, dtype, batch, heads, q_len, dim),
        laid_out(rng, dtype, batch, kv_heads, kv_len, dim),
        laid_out(rng, dtype, batch, kv_heads, kv_len, rng.choice((dim, dim, 1, 20, 64, 100))),
    )
    scale = rng.choice((dim**-0.5, dim**-0.5, dim**-0.5, 0.0, -0.3, 0.02))
    given: dict[str, Any] = {"fully_masked": rng.choice(operator.FULLY_MASKED)}

    def sometimes(name: str, share: float, make: Any) -> None:
        if rng.random() < share:
            given[name] = make()

    def broadcast() -> list[int]:
        return [rng.choice((1, n)) for n in (batch, heads, q_len, kv_len)]

    def bias() -> Tensor:
        made = torch.randn(broadcast())
        if rng.random() < 0.5:
            made = made.masked_fill(torch.rand(made.shape) < 0.4, float("-inf"))
        return made.to(rng.choice((torch.float32, dtype)))

    def keep() -> Tensor:
        """Keys at random, or two ranges with a hole between them, as of global tokens and a block."""
        shape = broadcast()
        if rng.random() < 0.6:
            return torch.rand(shape) < rng.choice((0.1, 0.5, 0.9))
        at, first = torch.arange(shape[-1]), rng.randrange(shape[-1])
        kept = (at < rng.choice((1, 8, 40))) | ((at >= first) & (at < first + rng.choice((1, 20, 100))))
        return kept.expand(shape).clone()

    sometimes("after", 0.4, lambda: rng.choice((0, kv_len - q_len, 3, -1)))
    sometimes("before", 0.25, lambda: rng.choice((0, 1, 10, 100)))
    sometimes("start", 0.1, lambda: rng.randrange(kv_len + 1))
    sometimes("end", 0.1, lambda: rng.randrange(kv_len + 2))
    sometimes("prefix", 0.15, lambda: rng.choice((0, 1, 20, kv_len, 400)))
    sometimes("chunk", 0.15, lambda: rng.choice((1, 3, 16, 64, 70, 500)))
    sometimes("chunk_rows", 0.1, lambda: rng.choice((-70, -1, 5, 100)))
    sometimes("chunk_keys", 0.1, lambda: rng.choice((-70, -1, 5, 100)))
    sometimes("shift", 0.2, lambda: torch.randint(-5, kv_len, (rng.choice((1, batch)),)))
    sometimes("ends", 0.2, lambda: torch.randint(0, kv_len + 1, (batch,)))
    sometimes("starts", 0.1, lambda: torch.randint(0, kv_len, (batch,)))
    sometimes("keep", 0.25, keep)
    sometimes("bias", 0.25, bias)
    sometimes("sink", 0.15, lambda: torch.randn([rng.choice((1, n)) for n in (batch, heads, q_len)] + [1]))
    if rng.random() < scored:
        given |= {"score": SCORE, "captured": [torch.randn(broadcast()), (torch.rand(broadcast()) < 0.5).float()]}
    return (*operands, scale), given


def difference(got: Tensor, expected: Tensor) -> float:
    """The largest, relative to numbers above 1; infinite where one is NaN or infinite and the other is not."""
    finite = expected.isfinite()
    if not torch.equal(got[~finite].double().nan_to_num(7e9), expected[~finite].nan_to_num(7e9)):
        return float("inf")
    got, expected = got[finite], expected[finite]
    apart = (got.double() - expected).abs() / (1 + expected.abs())
    return float(apart.nan_to_num(float("inf")).max()) if got.numel() else 0.0


def failures(dtype: torch.dtype, count: int, seed: int, scored: float = 0.0) -> list[str]:
    """Drawn calls that come out wrong, in words; a share of them with a score function."""
    rng, faults = random.Random(seed), []
    torch.manual_seed(seed)
    for n in range(count):
        operands, given = draw(rng, dtype, scored)
        if rng.random() < 0.15:
            given |= lookups(rng, dtype, (*operands[0].shape[:3], operands[1].size(2)))
        expected, expected_lse = reference(*operands, **given)
        if n % 2:
            out, lse = WITH_LSE(*operands, **given)
            wrong = max(difference(out, expected), difference(lse, expected_lse))
        else:
            wrong = difference(OPERATOR(*operands, **given), expected)
        if wrong > ERRORS[dtype]:
            shapes = [tuple(x.shape) for x in operands[:3]]
            faults.append(f"{dtype} {seed}.{n}: {wrong:.1e} {shapes} scale {operands[3]} {sorted(given)}")
    return faults


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_drawn_calls_are_right(dtype: torch.dtype) -> None:
    assert failures(dtype, 150, seed=7) == []


def test_score_functions_and_what_they_capture() -> None:
    assert failures(torch.float32, 60, seed=9, scored=1.0) == []


@pytest.mark.parametrize("text", ["x; abort()", "system(x)", "number(1.0f)\n#include <x>", ""])
def test_text_that_is_not_a_score_function_is_not_compiled(text: str) -> None:
    with pytest.raises(ValueError, match="is not a score function"):
        scores.checked(text)


def test_kernels_with_and_without_tiles_fit_in_one_file(tmp_path: Path) -> None:
    """And with pairs: float32 has no use for either."""
    calls = [
        (dtype, source.everywhere(dtype, tiles))
        for dtype, tiles in ((torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, False))
    ]
    text = "".join(
        f"#ifndef {source.namespace_of(sets, '')}_h\n#define {source.namespace_of(sets, '')}_h\n"
        f"{source.kernel_source(sets)}\n#endif\nvoid run{n}({source.namespace_of(sets, '')}::Args& args) {{\n"
        f"{source.call_of(dtype, sets)}\n}}\n"
        for n, (dtype, sets) in enumerate(calls)
    )
    file = tmp_path / "both.cpp"
    file.write_text(text)
    command = [build.compiler(), "-std=c++17", "-fsyntax-only", "-w", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:2000]


AVX2_FLAGS, AVX512_FLAGS = ("-mavx2", "-mfma", "-mf16c"), ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="sets of other processors")
@pytest.mark.parametrize(
    ("flags", "left"),
    [
        ((), ["avx512", "avx2", "plain"]),
        (("-mavx2",), ["avx512", "avx2", "plain"]),  # no product and sum in one: not yet all that the set has
        (AVX2_FLAGS, ["avx512", "avx2"]),
        ((*AVX2_FLAGS, "-mavx512f"), ["avx512", "avx2"]),
        ((*AVX2_FLAGS, *AVX512_FLAGS), ["avx512"]),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "tiles", "more"),
    [
        (torch.float32, False, []),
        (torch.float16, False, []),
        (torch.bfloat16, False, ["avx512_bf16"]),
        (torch.bfloat16, True, ["amx", "avx512_bf16"]),
    ],
)
def test_a_package_holds_no_set_that_its_other_code_surpasses(
    flags: tuple[str, ...], left: list[str], dtype: torch.dtype, tiles: bool, more: list[str]
) -> None:
    """The least that is left is what runs if a lesser one is asked for."""
    sets = source.everywhere(dtype, tiles)
    text = f"{source.kernel_source(sets)}\n{source.call_of(dtype, sets)}\n"
    command = [build.compiler(), *flags, "-E", "-P", "-xc++", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"namespace (\w+) \{\s+namespace \{", done)[1:-1] == [*more, *left]
    chosen = done[done.rindex("switch (set)") :]
    assert re.findall(r"case attn_pass_cpu\w*::(\w+):", chosen) == [name.upper() for name in [*more, *left][:-1]]
    assert re.findall(r"default:\s+attn_pass_cpu\w*::(\w+)::", chosen) == left[-1:]
    assert f"best_set({str(tiles).lower()}, {str(bool(more)).lower()})" in done


def test_two_score_functions_fit_in_one_file(tmp_path: Path) -> None:
    """A package is one: everything is named by its function."""
    sets = source.ALL[-1:]
    text = "".join(
        f"{source.kernel_source(sets, score)}\nvoid run{n}({source.namespace_of(sets, score)}::Args& args) {{\n"
        f"{source.call_of(torch.float32, sets, score=score)}\n}}\n"
        for n, score in enumerate(("", SCORE))
    )
    file = tmp_path / "both.cpp"
    file.write_text(text)
    command = [build.compiler(), "-std=c++17", "-fsyntax-only", "-w", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:2000]


TOLD = """
import os
from attn_pass.devices.cpu.kernel import build, source
import sanitize, test_cpu_attention as attention, test_cpu_dropout as dropout, test_cpu_lanes as lanes
import test_linear_kernel as linear

build._FLAGS = ("-O1", *build._FLAGS[1:])  # half the compiler's time
for name in ("amx", "avx512_bf16", "avx2", "plain", sanitize.ARM):
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, name
        continue
    os.environ["ATTN_PASS_CPU_ISA"], more = sanitize.built_as(name)
    build._FLAGS += more
    told = [s for s in source.ALL if s.name == os.environ["ATTN_PASS_CPU_ISA"]]
    build.of_this_machine = lambda tiles: (*told, *(s for s in source.of_this_machine(tiles) if s not in told))
    found = attention.failures(attention.torch.bfloat16, 100, seed=8)
    found += lanes.failures(attention.torch.bfloat16, 30, seed=2)
    found += linear.failures(attention.torch.bfloat16, 30, seed=3)
    assert not found, found
    dropout.test_a_weight_is_dropped_by_its_place_and_the_seed((2, 2, 100, 130), attention.torch.bfloat16)
    os._exit(0)
"""


@pytest.mark.slow
def test_every_instruction_set_is_right() -> None:
    """In a process that is told to take it; one that this machine lacks is compiled, and its own runs."""
    here = Path(__file__).parent
    found = os.pathsep.join(map(str, (here, here.parents[1] / "support", here.parents[2])))
    reported = {**os.environ, "PYTHONPATH": found}
    done = subprocess.run([sys.executable, "-c", TOLD], capture_output=True, text=True, env=reported, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("masked_by", ["keep", "bias", "bias beside a mask that keeps every key"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 300), (4, 129), (100, 129), (200, 700)])
def test_a_masked_key_counts_for_nothing_whatever_it_holds(
    dtype: torch.dtype, q_len: int, kv_len: int, masked_by: str
) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 2, n, 40).to(dtype) for n in (q_len, kv_len, kv_len))
    keep = torch.rand(2, 1, q_len, kv_len) < 0.5
    keep[..., 0], keep[..., 70:75] = True, False
    given = {"keep": keep, "after": kv_len - q_len}
    if masked_by != "keep":
        given |= {"keep": None, "bias": torch.zeros(keep.shape).masked_fill(~keep, float("-inf"))}
    if masked_by.endswith("every key"):
        given["keep"] = torch.ones(2, 1, 1, kv_len, dtype=torch.bool)
    clean = OPERATOR(query, key, value, 0.2, **given)
    key[:, :, 70:75] = float("nan")
    value[:, :, 70] = float("nan")
    value[:, :, 71:75] = float("inf")
    assert difference(OPERATOR(query, key, value, 0.2, **given), clean.double()) <= ERRORS[dtype]


def test_numbers_that_mask_keep_their_order_and_infinite_scores_stay_infinite() -> None:
    query, key, value = torch.ones(1, 1, 2, 4), torch.ones(1, 1, 3, 4), torch.eye(3)[None, None]
    lowest = torch.finfo(torch.float32).min
    bias = torch.tensor([[lowest, lowest, -2e38], [lowest, lowest, lowest]])
    out = OPERATOR(query, key, value, 0.5, bias=bias)
    assert torch.allclose(out[0, 0], torch.tensor([[0.0, 0.0, 1.0], [1 / 3, 1 / 3, 1 / 3]]))
    key[:] = float("-inf")
    assert OPERATOR(query, key, value, 0.5, bias=torch.zeros(2, 3), fully_masked="zero").eq(0).all()


def test_a_row_that_keeps_a_key_which_is_no_number_is_none_and_others_are() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 150, 24) for _ in range(3))
    value[:, :, 100] = float("nan")
    out = OPERATOR(query, key, value, 0.2, after=0)
    assert out[:, :, 100:].isnan().all()
    assert out[:, :, :100].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_masks_over_several_blocks_of_rows(dtype: torch.dtype, kv_heads: int) -> None:
    """Documents, causal, whose masks are read once for 96 rows together, or for heads that share keys row by row."""
    torch.manual_seed(0)
    for rows, value_dim in ((95, 8), (96, 24), (97, 40), (200, 72), (290, 104)):
        sizes = ((4, 48), (kv_heads, 48), (kv_heads, value_dim))
        query, key, value = (torch.randn(2, heads, rows, dim).to(dtype) for heads, dim in sizes)
        document = torch.arange(rows) // 70
        keep = (document[:, None] == document) & (torch.arange(rows) <= torch.arange(rows)[:, None])
        holes = torch.rand(2, 4, rows, rows) < 0.9
        for masked in (keep[None, None], keep & holes[:, :1], keep & holes[:1], keep & holes):
            given = {"keep": masked, "fully_masked": "zero"}
            expected, expected_lse = reference(query, key, value, 0.2, **given)
            out, lse = WITH_LSE(query, key, value, 0.2, **given)
            assert difference(out, expected) <= ERRORS[dtype], (rows, masked.shape)
            assert difference(lse, expected_lse) <= ERRORS[dtype], (rows, masked.shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_few_rows_in_any_number(dtype: torch.dtype) -> None:
    """Panels are read as they lie, or transposed first, by the number of rows: the same comes out."""
    torch.manual_seed(0)
    for rows in range(1, 18):
        for dim in (40, 64):
            query, key, value = (
                torch.randn(2, heads, n, dim).to(dtype) for heads, n in ((rows, 1), (1, 150), (1, 150))
            )
            given = {"keep": torch.rand(2, rows, 1, 150) < 0.7, "after": 140}
            value[:, :, 145] = float("nan")  # behind the last key that is kept
            expected, expected_lse = reference(query, key, value.nan_to_num(0.0), 0.2, **given)
            out, lse = WITH_LSE(query, key, value, 0.2, **given)
            assert difference(out, expected) <= ERRORS[dtype], rows
            assert difference(lse, expected_lse) <= ERRORS[dtype], rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_do_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    before = torch.get_num_threads()
    for q_len, kv_len in ((1, 3000), (3, 3000), (300, 500)):
        query, key, value = (torch.randn(1, 2, n, 64).to(dtype) for n in (q_len, kv_len, kv_len))
        outs = []
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            outs.append(OPERATOR(query, key, value, 0.1, after=kv_len - q_len))
        torch.set_num_threads(before)
        assert all(torch.equal(outs[0], other) for other in outs[1:])


@pytest.mark.parametrize("q_len", [2, 200])
def test_the_log_sum_exp_of_scores_that_are_infinite(q_len: int) -> None:
    """As `torch.logsumexp` has it; of no score at all it is -inf, with a sink too."""
    query, key, value = torch.ones(1, 1, q_len, 4), torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4)
    for rows in ([0.0, 1.0, float("inf")], [float("-inf")] * 3, [float("-inf"), 2.0, 1.0], [0.0, float("nan"), 1.0]):
        bias = torch.tensor(rows)
        _, lse = WITH_LSE(query, key, value, 0.5, bias=bias, sink=torch.zeros(1, 1, 1, 1), fully_masked="zero")
        assert torch.allclose(lse, (bias + 2).logsumexp(-1).expand(1, 1, q_len), equal_nan=True)


def test_the_log_sum_exp_where_there_are_no_values_or_no_keys() -> None:
    query, key = torch.randn(2, 2, 3, 8), torch.randn(2, 2, 5, 8)
    out, lse = WITH_LSE(query, key, torch.randn(2, 2, 5, 0), 1.0)
    assert out.shape == (2, 2, 3, 0) and torch.allclose(lse, (query @ key.mT).logsumexp(-1), atol=1e-5)
    assert WITH_LSE(query, key[:, :, :0], key[:, :, :0], 1.0)[1].eq(float("-inf")).all()


@pytest.mark.parametrize("sizes", [(0, 2, 3, 4, 8), (2, 2, 0, 4, 8), (2, 2, 3, 0, 8), (2, 2, 3, 4, 0)])
def test_sizes_of_nothing(sizes: tuple[int, ...]) -> None:
    batch, heads, q_len, kv_len, dim = sizes
    query, key, value = (torch.randn(batch, heads, n, dim) for n in (q_len, kv_len, kv_len))
    expected = (query @ key.mT).softmax(-1) @ value
    assert difference(OPERATOR(query, key, value, 1.0), expected.double()) < 1e-6


def test_what_it_does_not_take_is_named() -> None:
    query = torch.randn(1, 1, 2, 8)
    with pytest.raises(TypeError, match="attention takes"):
        OPERATOR(query.double(), query.double(), query.double(), 1.0)
    with pytest.raises(TypeError, match="keep takes"):
        OPERATOR(query, query, query, 1.0, keep=torch.ones(1, 1, 2, 2))
    with pytest.raises(TypeError, match="ends takes"):
        OPERATOR(query, query, query, 1.0, ends=torch.ones(1, dtype=torch.int32))
    table, place = torch.randn(1, 1, 2, 1, 5), torch.full((1, 1, 2, 2), 5, dtype=torch.int32)
    with pytest.raises(IndexError, match="none of the table's 5 numbers"):
        OPERATOR(query, query, query, 1.0, tables=[table], places=[place], factors=[torch.ones(())])
    with pytest.raises(ValueError, match="a table has places and a factor"):
        OPERATOR(query, query, query, 1.0, tables=[table], places=[place])
    with pytest.raises(ValueError, match="a table has the dimensions"):
        OPERATOR(query, query, query, 1.0, tables=[table[0]], places=[place], factors=[torch.ones(())])
    with pytest.raises(TypeError, match="places takes"):
        OPERATOR(query, query, query, 1.0, tables=[table], places=[place.long()], factors=[torch.ones(())])


def test_the_operator_passes_torch_s_own_checks() -> None:
    query, key = torch.randn(2, 4, 3, 16), torch.randn(2, 2, 9, 16)
    given = {"after": 6, "ends": torch.tensor([5, 9]), "keep": torch.rand(2, 1, 3, 9) < 0.9}
    for operator_ in (OPERATOR, WITH_LSE):
        torch.library.opcheck(operator_, (query, key, key, 0.25), given)


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ATTN_PASS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "compiler", lambda: "/bin/false")
    with pytest.raises(build.NoCompilerError, match="/bin/false could not build the CPU kernel"):
        build.entry.__wrapped__(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_a_head_that_is_one_task_and_rows_that_are_give_the_same(dtype: torch.dtype, kv_heads: int) -> None:
    """With one thread a task is a KV head, which packs for itself; with many it is a block of rows."""
    q = torch.randn(1, 8, 250, 40).to(dtype)
    k, v = (torch.randn(1, kv_heads, 135, 40).to(dtype) for _ in range(2))
    v[0, 1, 70] = float("nan")  # masked for most rows
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 16):
            torch.set_num_threads(count)
            results.append(OPERATOR(q, k, v, 0.2, after=0))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*(x.nan_to_num(7.0) for x in results))
    repeated = [x.double().repeat_interleave(8 // kv_heads, 1) for x in (k, v.nan_to_num(0.0))]
    kept = torch.arange(135) <= torch.arange(250)[:, None]
    exact = (q.double() @ repeated[0].mT * 0.2).masked_fill(~kept, float("-inf")).softmax(-1) @ repeated[1]
    finite = results[0].isfinite().all(-1)
    assert finite[0, : 8 // kv_heads].all()
    assert not finite[0, 8 // kv_heads : 16 // kv_heads, 70:].any()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    assert ((results[0].double() - exact).abs()[finite] < tolerance).all()


@pytest.mark.parametrize("rows", [4, 70])
def test_roundings_of_many_equal_keys_do_not_add_up(rows: int) -> None:
    """In one chain over 16,384 keys the error of equal values was 1e-4."""
    query, key, value = torch.zeros(1, 1, rows, 8), torch.randn(1, 1, 16384, 8), torch.full((1, 1, 16384, 8), 0.7)
    assert (OPERATOR(query, key, value, 1.0).double() - value[0, 0, 0].double()).abs().max() < 2e-6
    masked = OPERATOR(query, key, value, 1.0, keep=torch.zeros(1, 1, 1, 16384).bool(), fully_masked="mean")
    assert (masked.double() - value[0, 0, 0].double()).abs().max() < 2e-7


@pytest.mark.parametrize("fill", [-torch.inf, torch.finfo(torch.float32).min, -1e9])
def test_a_sigmoid_of_what_is_masked_is_0(fill: float) -> None:
    query, key, value = (torch.randn(1, 2, n, 16) for n in (20, 70, 70))
    mask = torch.zeros(20, 70).masked_fill(torch.rand(20, 70) < 0.3, fill)
    got = OPERATOR(query, key, value, 1.0, score="sigmoid(add(x, captured(0)))", captured=[mask])
    exact = torch.sigmoid(query.double() @ key.double().mT + mask.double()).softmax(-1) @ value.double()
    assert (got - exact).abs().max() < 1e-5
    assert OPERATOR(query, key, value, 1.0, score="exp(add(x, captured(0)))", captured=[-mask]).isnan().any()


@pytest.mark.parametrize("far", [1 << 40, (1 << 63) - 2, (1 << 63) - 1])
def test_positions_beyond_all_keys_see_all_keys(far: int) -> None:
    query, key, value = (torch.randn(1, 2, n, 16) for n in (3, 50, 50))
    got = OPERATOR(query, key, value, 0.25, shift=torch.tensor([far]), after=0)
    torch.testing.assert_close(got, OPERATOR(query, key, value, 0.25))


def test_sizes_that_do_not_go_together_are_refused() -> None:
    def operand(*sizes: int) -> Tensor:
        return torch.randn(*sizes)

    query, key = operand(1, 4, 5, 8), operand(1, 2, 7, 8)
    for other in (operand(1, 2, 6, 8), operand(1, 1, 7, 8), operand(2, 2, 7, 8)):
        with pytest.raises(ValueError, match="do not go together"):
            OPERATOR(query, key, other, 0.3)
    with pytest.raises(ValueError, match="do not go together"):
        OPERATOR(query, operand(1, 2, 7, 9), key, 0.3)
    with pytest.raises(ValueError, match="no multiple of 3"):
        OPERATOR(query, operand(1, 3, 7, 8), operand(1, 3, 7, 8), 0.3)
    with pytest.raises(ValueError, match="captured tensor that is not given"):
        OPERATOR(query, key, key, 0.3, score="add(x, captured(1))", captured=[operand(5, 7)])


@pytest.mark.parametrize("known", [True, False])
def test_a_folder_that_cannot_be_written_is_not_used(
    known: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Or is full, or that of a user without a home folder."""
    built: list[Path] = []

    def build_nothing(text: str, command: tuple[str, ...], library: Path) -> None:
        built.append(library)
        if library.is_relative_to(tmp_path):
            raise OSError("No space left on device")
        raise build.NoCompilerError("not now")

    def folder() -> Path:
        if known:
            return tmp_path
        raise RuntimeError("the home folder of this user is not known")

    monkeypatch.setattr(build, "_build", build_nothing)
    monkeypatch.setattr(build.disk_cache, "folder", folder)
    build.entry.cache_clear()
    try:
        with pytest.raises(build.NoCompilerError):
            build.entry(torch.float32)
    finally:
        build.entry.cache_clear()
    assert len(built) == 1 + known and not built[-1].is_relative_to(tmp_path)


def test_compilers_know_the_names_of_the_instruction_sets() -> None:
    """GCC before 11 and Clang before 18 have none for the conversions of float16, and refuse the whole source."""
    text = source.kernel_source()
    known = ("avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512bf16")
    assert set(re.findall(r'__builtin_cpu_supports\("(\w+)"\)', text)) <= set(known)


@pytest.mark.parametrize("kernel", ["attend_type", "attend_few", source.BACKWARD])
@pytest.mark.parametrize("machine", ["x86_64-linux-gnu", "aarch64-macos"])
def test_clang_compiles_what_a_package_holds(machine: str, kernel: str, tmp_path: Path) -> None:
    """Clang 16 from a wheel, with the headers of each system: it finds what GCC lets pass."""
    sets = source.everywhere(torch.bfloat16, False)
    lines = [f"{source.kernel_source(sets, kernel=kernel)}\n"]
    for number, dtype in enumerate(source.ELEMENTS):
        name = "BackwardArgs" if kernel == source.BACKWARD else "Args"
        taken = f"auto& args = *static_cast<{source.namespace_of(sets, '', kernel)}::{name}*>(given);"
        checked_alone = dtype != torch.bfloat16 or kernel != "attend_type"  # code for all of them takes a minute
        lines.append(f"{'static ' * checked_alone}void run_{number}(void* given) {{\n{taken}\n")
        lines.append(f"{source.call_of(dtype, sets, kernel)}\n}}\n")
    (tmp_path / "kernel.cpp").write_text("".join(lines))
    compiler = [sys.executable, "-m", "ziglang", "c++", "-target", machine, "-std=c++17", "-O0", "-g0", "-w"]
    place = {"ZIG_GLOBAL_CACHE_DIR": str(tmp_path), "ZIG_LOCAL_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [*compiler, "-c", "kernel.cpp", "-o", "kernel.o"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | place,
    )
    assert done.returncode == 0, done.stderr[:2000]


def test_a_thread_does_not_keep_much_for_little() -> None:
    """Of one large backward; its memory is given back in the next call that needs little."""
    code = """
import resource, torch
from attn_pass.devices.cpu.kernel.gradients import FORWARD
torch.set_num_threads(1)

def step(length):
    q = torch.randn(1, 32, length, 128, requires_grad=True)
    k, v = (torch.randn(1, 1, 64, 128) for _ in range(2))
    FORWARD(q, k, v, 0.1)[0].sum().backward()

def now():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() >> 20

step(16)
before = now()
step(8192)
step(16)
print(now() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100  # MiB; 128 in the queries' gradients of one task

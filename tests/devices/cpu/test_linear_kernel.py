"""Linear layers by the CPU kernel: which are, that the numbers are right, compiled and in packages."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.nn import functional as F

import attn_pass
from attn_pass.devices.base import LinearLayer
from attn_pass.devices.cpu.facts import by_name, cpu
from attn_pass.devices.cpu.family import Cpu
from attn_pass.devices.cpu.kernel import build
from attn_pass.devices.cpu.linear import rules
from attn_pass.devices.cpu.linear.kernel_call import OPERATOR

pytestmark = pytest.mark.skipif(bool(build.missing()), reason="no compiler for the CPU kernel")
ERRORS = {torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 6e-4}
SIZES = (1, 2, 7, 15, 16, 17, 31, 32, 33, 64, 100, 250, 1024, 2048, 4100)
ROWS = (*range(1, 21), 23, 48, 97, 384, 391)  # from 17 on weights are packed
WIDTHS = (1, 2, 3, 5, 15, 16, 17, 40, 64, 127, 129, 300)


def failures(dtype: torch.dtype, count: int, seed: int) -> list[str]:
    """Drawn calls that come out wrong, in words; beside float64, relative to the largest result, or to 1."""
    rng, faults = random.Random(seed), []
    torch.manual_seed(seed)
    for n in range(count):
        rows, features, width = rng.choice(ROWS), rng.choice(SIZES), rng.choice(WIDTHS)
        x, weight = torch.randn(rows, features).to(dtype), torch.randn(width, features).to(dtype)
        if by_columns := rng.random() < 0.5:
            weight = weight.t().contiguous().t()
        bias = torch.randn(width).to(dtype) if rng.random() < 0.5 else None
        exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        wrong = float((OPERATOR(x, weight, bias).double() - exact).abs().max() / exact.abs().max().clamp(min=1))
        if not wrong <= ERRORS[dtype]:
            faults.append(
                f"{dtype} {seed}.{n}: {wrong:.1e}, {rows} rows, {features} to {width}, {by_columns=}, {bias is None=}"
            )
    return faults


@pytest.mark.parametrize("dtype", ERRORS, ids=str)
def test_drawn_calls_are_right(dtype: torch.dtype) -> None:
    assert failures(dtype, 200, seed=1) == []


@pytest.mark.parametrize("rows", [3, 200])
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
def test_any_number_of_threads_gives_the_same(dtype: torch.dtype, rows: int) -> None:
    x, weight, threads = torch.randn(rows, 300).to(dtype), torch.randn(1000, 300).to(dtype), torch.get_num_threads()
    try:
        results = []
        for number in (1, 2, 3, 16):
            torch.set_num_threads(number)
            results.append(OPERATOR(x, weight))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_rows_beyond_what_is_widened_at_a_time() -> None:
    x, weight = torch.randn(4500, 1024).half(), torch.randn(3, 1024).half()
    torch.testing.assert_close(OPERATOR(x, weight).double(), x.double() @ weight.double().t(), rtol=1e-3, atol=0.1)


@pytest.mark.parametrize("rows", [5, 25])
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
def test_numbers_that_are_none_stay_in_their_row(dtype: torch.dtype, rows: int) -> None:
    """What fills the vectors up at their ends, and the rows that make up for those that are not there, is zero."""
    x, weight = torch.ones(rows, 37, dtype=dtype), torch.ones(19, 37, dtype=dtype)
    x[1, -1], x[3, 0], weight[18, 36] = float("nan"), float("inf"), float("inf")
    expected = F.linear(x.double(), weight.double())
    for lying in (weight, weight.t().contiguous().t()):
        torch.testing.assert_close(OPERATOR(x, lying).double(), expected, equal_nan=True)


def test_shapes() -> None:
    """Several dimensions of rows, none, rows that are transposed, sizes of zero."""
    weight, bias = torch.randn(6, 8), torch.randn(6)
    shapes = ((2, 3, 8), (8,), (0, 8), (4, 2, 0, 8), (5, 7, 8))
    for x in (*map(torch.randn, shapes), torch.randn(8, 3).t()):
        torch.testing.assert_close(OPERATOR(x, weight, bias), F.linear(x, weight, bias))
    for rows in (3, 30):
        torch.testing.assert_close(OPERATOR(torch.randn(rows, 0), torch.randn(6, 0), bias), bias.expand(rows, 6))
    torch.library.opcheck(OPERATOR, (torch.randn(2, 8), weight, bias))


# ---------------------------------------------------------------- which are taken

E = 512  # a weight of 2^18 elements
ONE = LinearLayer(torch.bfloat16, 1, E, E, False, True, False, False)


@pytest.mark.parametrize(
    ("changed", "taken"),
    [
        ({}, True),
        ({"rows": 16}, True),
        ({"rows": 17}, False),
        ({"has_bias": True}, True),
        ({"dtype": torch.float32, "rows": 8}, True),
        ({"dtype": torch.float32, "rows": 9}, False),
        ({"dtype": torch.float64}, False),
        ({"dtype": torch.float16}, False),
        ({"dtype": torch.float16, "rows": 2}, True),
        ({"width": E - 1}, False),
        ({"has_static_rows": False}, False),
        ({"by_columns": True}, True),
        ({"by_columns": True, "dtype": torch.float16}, True),
        ({"by_columns": True, "dtype": torch.float32}, False),
        ({"by_columns": True, "dtype": torch.float32, "rows": 2}, True),
        ({"is_constant": True, "rows": 8}, True),
        ({"is_constant": True, "rows": 9}, False),
        ({"is_constant": True, "rows": 2, "dtype": torch.float32}, True),
        ({"is_constant": True, "rows": 3, "dtype": torch.float32}, False),
        ({"is_constant": True, "is_packaged": True}, True),
    ],
    ids=str,
)
def test_the_layers_that_were_measured(changed: dict[str, object], taken: bool) -> None:
    assert rules.has_few_rows(replace(ONE, **changed)) == taken  # type: ignore[arg-type]


def test_where_the_processor_the_compiler_or_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "is_amd", lambda: True)
    monkeypatch.setattr(rules, "instruction_set", lambda: "avx512_bf16")
    faster = rules.faster_linear(ONE)
    assert faster is not None and faster.operator is OPERATOR and tuple(faster.activations) == ("none",)
    with torch._inductor.config.patch(max_autotune=True):
        assert rules.faster_linear(ONE) is None
    with torch.backends.mkldnn.flags(enabled=False):  # it is not oneDNN's
        assert rules.faster_linear(ONE) is not None
    with monkeypatch.context() as patched:
        patched.setattr(build, "missing", lambda: "no compiler")
        assert rules.faster_linear(ONE) is None
    for name, value in (("instruction_set", lambda: "neon"), ("is_amd", lambda: False)):
        with monkeypatch.context() as patched:
            patched.setattr(rules, name, value)
            assert rules.faster_linear(ONE) is None


MANY = replace(ONE, rows=100, has_bias=True)


@pytest.fixture
def without_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor with AVX2 alone, whoever made it; oneDNN multiplies no half precision there."""
    monkeypatch.setattr(rules, "is_amd", lambda: False)
    monkeypatch.setattr(rules, "instruction_set", lambda: "avx2")
    monkeypatch.setattr(rules, "is_onednns", lambda dtype: False)


@pytest.mark.usefixtures("without_half")
@pytest.mark.parametrize(
    ("changed", "taken"),
    [
        ({}, True),
        ({"rows": 1, "features": 8 * E}, True),
        ({"rows": 1}, False),
        ({"rows": 1, "has_static_rows": False}, True),
        ({"rows": 1, "by_columns": True}, True),
        ({"rows": 3}, True),
        ({"rows": 3, "width": E - 1}, False),
        ({"rows": 4, "width": E // 4}, True),
        ({"rows": 4, "width": E // 4 - 1}, False),
        ({"features": 16, "rows": 130}, True),
        ({"features": 16, "rows": 100}, False),
        ({"features": 15, "rows": 1000}, False),
        ({"width": 15, "rows": 1000}, False),
        ({"rows": 4, "width": E // 2, "has_static_rows": False}, False),
        ({"has_static_rows": False}, True),
        ({"is_constant": True}, True),
        ({"is_constant": True, "is_packaged": True}, True),
        ({"dtype": torch.float16}, True),
        ({"dtype": torch.float16, "rows": 1, "features": 8 * E}, False),
        ({"dtype": torch.float16, "rows": 1, "features": 16 * E}, True),
        ({"dtype": torch.float32}, False),
        ({"dtype": torch.float32, "rows": 8}, False),  # it is not AMD's
        ({"dtype": torch.float64}, False),
    ],
    ids=str,
)
def test_layers_of_a_type_without_a_fast_product(changed: dict[str, object], taken: bool) -> None:
    faster = rules.faster_linear(replace(MANY, **changed))  # type: ignore[arg-type]
    assert (faster is not None) == taken
    if faster is not None:
        assert faster.operator is OPERATOR and "torch has no fast product of" in faster.reason


@pytest.mark.usefixtures("without_half")
def test_few_rows_of_float32_on_amds_processors_with_avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "is_amd", lambda: True)
    few = replace(MANY, dtype=torch.float32, rows=8)
    faster = rules.faster_linear(few)
    assert faster is not None and faster.operator is OPERATOR and "read" in faster.reason
    for left in (replace(few, rows=9), replace(few, rows=400), replace(few, is_plain=False)):
        assert rules.faster_linear(left) is None


@pytest.mark.usefixtures("without_half")
def test_where_half_precision_is_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the set of instructions, and where oneDNN says so; without a compiler nothing can be done."""
    half = {dtype: replace(MANY, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)}
    for name, lacking in (("avx512", [torch.float16]), ("avx512_bf16", [torch.float16]), ("amx", []), ("neon", [])):
        monkeypatch.setattr(rules, "instruction_set", lambda name=name: name)
        assert [dtype for dtype, layer in half.items() if rules.faster_linear(layer) is not None] == lacking
    monkeypatch.setattr(rules, "instruction_set", lambda: "avx512_bf16")
    few = [replace(half[torch.float16], rows=rows) for rows in (1, 2, 16, 17)]
    assert [rules.faster_linear(layer) is not None for layer in few] == [False, False, False, True]
    with monkeypatch.context() as amd:
        amd.setattr(rules, "is_amd", lambda: True)  # few rows were measured there
        assert [rules.faster_linear(layer) is not None for layer in few] == [False, True, True, True]
    monkeypatch.setattr(rules, "instruction_set", lambda: "avx2")
    with torch._inductor.config.patch(max_autotune=True):
        assert all(rules.faster_linear(layer) is None for layer in half.values())
    for patched, *value in ((rules, "is_onednns", lambda dtype: True), (build, "missing", lambda: "no compiler")):
        with monkeypatch.context() as once:
            once.setattr(patched, *value)
            assert all(rules.faster_linear(layer) is None for layer in half.values())
    assert all(rules.faster_linear(layer) is not None for layer in half.values())


@pytest.mark.usefixtures("without_half")
def test_the_rate_that_packing_counts_on() -> None:
    """Rows of padding are worth less where linear layers are fast."""
    device, family = cpu(), Cpu()
    for dtype, of in ((torch.bfloat16, torch.float32), (torch.float16, torch.float32)):
        layer = replace(MANY, dtype=dtype)
        assert family.linear_gflops(device, layer, chooses=True) == 0.8 * device.matmul(of)
        assert family.linear_gflops(device, layer, chooses=False) == device.matmul(dtype)
        assert family.new_rows_us(device, layer, chooses=True) == 0  # no code is made for them
        elsewhere = by_name("Graviton4")
        assert elsewhere is not None
        assert family.linear_gflops(elsewhere, layer, chooses=True) == elsewhere.matmul(dtype)
        assert family.new_rows_us(elsewhere, layer, chooses=True) > 0
        with torch._inductor.config.patch(max_autotune=True):
            assert family.linear_gflops(device, layer, chooses=True) == device.matmul(dtype)
    plain = replace(MANY, dtype=torch.float32)
    assert family.linear_gflops(device, plain, chooses=True) == device.matmul(torch.float32)


# ---------------------------------------------------------------- delivered


class Decoding(nn.Module):
    """A query a sequence, over keys that are given: layers before and after its attention."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.by_columns = nn.Linear(E, E, dtype=dtype), nn.Parameter(torch.randn(E, E, dtype=dtype) / 40)
        sizes = ((1, 2), (2, 1), (1, 1))
        self.after = nn.ModuleList(nn.Linear(a * E, b * E, bias=False, dtype=dtype) for a, b in sizes)

    def forward(self, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, 1, E), (B, 8, S, E / 8) and the same, to (B, 1, E)."""
        q = self.before(x).unflatten(-1, (8, -1)).transpose(1, 2)
        x = ((q @ k.mT * 0.1).softmax(-1) @ v).transpose(1, 2).flatten(2)
        for layer in self.after:
            x = F.silu(layer(x))
        return x @ self.by_columns


LAYERS = [3, 1, 1]  # by their sizes


def inputs(batch: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    return tuple(torch.randn(batch, *shape).to(dtype) for shape in ((1, E), (8, 90, E // 8), (8, 90, E // 8)))


@pytest.fixture
def on_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule of the processors where it was measured, whatever this one is."""
    monkeypatch.setattr(rules, "is_amd", lambda: True)
    monkeypatch.setattr(rules, "instruction_set", lambda: "avx512_bf16")


def check(program: object, model: Decoding, given: tuple[Tensor, ...]) -> None:
    """Compares with float64, as far as stock is from it."""
    with torch.no_grad():
        got, plain = program(*given), model(*given)  # type: ignore[operator]
        dtype = given[0].dtype
        exact = model.double()(*(x.double() for x in given))
        model.to(dtype)
    error, stock = ((y - exact).abs().max() for y in (got, plain))
    assert error <= 2 * stock + 1e-5, (error, stock)


@pytest.mark.usefixtures("on_amd")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_layers_of_a_decoding_model(dtype: torch.dtype) -> None:
    model, given = Decoding(dtype).eval(), inputs(2, dtype)
    torch._dynamo.reset()
    backend = attn_pass.wrap("aot_eager", choose="fused", on_error="raise")
    with torch.no_grad():
        explained = attn_pass.explain(model, *given, attn_pass_options={"choose": "fused"})
    with torch.no_grad(), attn_pass.record() as report:
        check(torch.compile(model, backend=backend), model, given)
    assert report.linear_layers == []  # another compiler's are as they were
    records = explained.linear_layers
    assert {record.library for record in records} == {"the CPU kernel"} and [r.layers for r in records] == LAYERS
    assert "linear layers multiplied by the CPU kernel: 512 to 512 features" in str(explained)


@pytest.mark.slow
@pytest.mark.usefixtures("on_amd")
@pytest.mark.parametrize("frozen", [False, True])
def test_compiled(frozen: bool) -> None:
    dtype = torch.bfloat16
    model, given = Decoding(dtype).eval(), inputs(3, dtype)
    torch._dynamo.reset()
    options = {"choose": "fused", "on_error": "raise"}
    with torch.no_grad(), torch._inductor.config.patch(freezing=frozen), attn_pass.record() as report:
        compiled = torch.compile(model, backend=attn_pass.backend, options=options)
        _, (code,) = run_and_get_code(compiled, *given)
        check(compiled, Decoding(dtype).eval(), given)
    assert [record.layers for record in report.linear_layers] == LAYERS
    # Sizes are arguments, and how weights are stored: with a bias, and without one.
    assert re.findall(r"::(multiply\w*)<", code) == ["multiply_few"] * 2


@pytest.mark.slow
@pytest.mark.usefixtures("without_half")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_compiled_for_any_number_of_rows(dtype: torch.dtype) -> None:
    """Few rows and many by the same code."""
    model = Decoding(dtype).eval()
    torch._dynamo.reset()
    options = {"choose": "fused", "on_error": "raise"}
    compiled = torch.compile(model, backend=attn_pass.backend, dynamic=True, options=options)
    with attn_pass.record() as report:
        for batch in (40, 3):
            check(compiled, Decoding(dtype).eval(), inputs(batch, dtype))
    assert [record.layers for record in report.linear_layers] == LAYERS and report.graphs == 1


@pytest.mark.slow
@pytest.mark.usefixtures("on_amd")
@pytest.mark.parametrize("frozen", [False, True])
def test_in_a_package(frozen: bool, tmp_path: Path) -> None:
    model, given = Decoding(torch.float32).eval(), inputs(2, torch.float32)
    options = {"choose": "fused", "on_error": "raise"}
    with torch.no_grad(), torch._inductor.config.patch(freezing=frozen), attn_pass.record() as report:
        path = attn_pass.aot_compile(model, given, package_path=tmp_path / "m.pt2", options=options)
    assert [record.layers for record in report.linear_layers] == LAYERS
    check(torch._inductor.aoti_load_package(str(path)), model, given)

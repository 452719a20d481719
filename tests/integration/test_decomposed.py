"""Exports that were decomposed earlier: recognised, improved, and equal to float64."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_eager import NEG_INF, randn
from torch import Tensor, nn
from torch._inductor.decomposition import select_decomp_table
from torch.export import Dim, ExportedProgram
from torch.nn.attention import SDPBackend, sdpa_kernel

import attn_pass

Function = Callable[..., Tensor]
TABLES: dict[str, Callable[[], Any]] = {"core": lambda: None, "{}": dict, "inductor": select_decomp_table}
B, L, S = Dim("batch", min=1, max=512), Dim("length", min=2, max=512), Dim("keys", min=2, max=512)


def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def causal_call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.7)


def grouped_call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def masked_call(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None])


def last_key_call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keep = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril(k.size(-2) - q.size(-2))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)


def added_call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def expanded_call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Seed S4 with the batch written out: torch's kernel takes it, and reads keys and values for every query."""
    return F.scaled_dot_product_attention(q, *(x.expand(q.size(0), -1, -1, -1) for x in (k, v)))


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / q.size(-1) ** 0.5).softmax(-1) @ v


def causal_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    keep = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril()
    return (q @ k.mT * 0.2).masked_fill(~keep, NEG_INF).softmax(-1) @ v


def grouped_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n = q.size(1) // k.size(1)
    k, v = (x[:, :, None].expand(-1, -1, n, -1, -1).flatten(1, 2) for x in (k, v))
    return by_hand(q, k, v)


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhij,bhjd->bhid", (torch.einsum("bhid,bhjd->bhij", q, k) * 0.2).softmax(-1), v)


def three(q: tuple[int, ...], k: tuple[int, ...]) -> tuple[Tensor, ...]:
    return randn(*q, seed=1), randn(*k, seed=2), randn(*k, seed=3)


ROWS, SAME = ({0: B, 2: L}, {0: B, 2: S}, {0: B, 2: S}), ({0: B, 2: L},) * 3
SHARED = ({0: B}, None, None)
TWO, SQUARE = three((2, 4, 7, 16), (2, 4, 13, 16)), three((2, 4, 11, 16), (2, 4, 11, 16))
GROUPED, ONE = three((2, 8, 7, 16), (2, 2, 13, 16)), three((2, 8, 1, 16), (2, 2, 13, 16))
SEED = three((37, 4, 1, 16), (1, 4, 61, 16))
KEEP = randn(2, 13, seed=4) > -0.5
KEEP[1] = False  # a batch row that is fully masked
# function, inputs, dynamic shapes, and what has to come of it: the mask, the poor case
FORMS: dict[str, tuple[Function, tuple[Tensor, ...], Any, str, str]] = {
    "call": (call, TWO, ROWS, "none", ""),
    "call in bfloat16": (call, tuple(x.bfloat16() for x in TWO), ROWS, "none", ""),
    "causal": (causal_call, SQUARE, SAME, "causal", ""),
    "causal, more keys": (causal_call, TWO, ROWS, "causal", ""),
    "causal to the last key": (last_key_call, TWO, ROWS, "causal with offset", ""),
    "padding": (masked_call, (*TWO, KEEP), (*ROWS, {0: B, 1: S}), "padding", ""),
    "added": (added_call, (*TWO, randn(2, 1, 7, 13)), (*ROWS, {0: B, 2: L, 3: S}), "additive", ""),
    "grouped": (grouped_call, GROUPED, ROWS, "none", "grouped_heads"),
    "grouped, one query": (grouped_call, ONE, ({0: B}, *ROWS[1:]), "none", "grouped_heads"),
    "S4": (call, SEED, SHARED, "none", "shared_kv"),
    "S4, expanded": (expanded_call, SEED, SHARED, "none", "shared_kv"),
    "by hand": (by_hand, TWO, ROWS, "none", ""),
    "causal by hand": (causal_by_hand, SQUARE, SAME, "causal", ""),
    "grouped by hand": (grouped_by_hand, GROUPED, ROWS, "none", "grouped_heads"),
    "S4 by hand": (by_hand, SEED, SHARED, "none", "shared_kv"),
    "einsum": (by_einsum, TWO, ROWS, "none", ""),
}


def exported(function: Function, inputs: tuple[Tensor, ...], shapes: Any) -> ExportedProgram:
    class Model(nn.Module):
        def forward(self, *given: Tensor) -> Tensor:
            return function(*given)

    with torch.no_grad():
        return torch.export.export(Model(), inputs, dynamic_shapes=None if shapes is None else (shapes,))


def decomposed(function: Function, inputs: tuple[Tensor, ...], shapes: Any, table: str) -> ExportedProgram:
    return exported(function, inputs, shapes).run_decompositions(TABLES[table]())


@lru_cache(maxsize=1)
def exported_forms(forms: tuple[str, ...], dynamic: bool) -> ExportedProgram:
    """All in one program, for all tables: run_decompositions() gives a program of its own."""

    class Model(nn.Module):
        def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
            results = []
            for form in forms:
                function, inputs, *_ = FORMS[form]
                results.append(function(*given[: len(inputs)]))
                given = given[len(inputs) :]
            return tuple(results)

    shapes = [x for n, form in enumerate(forms) for x in _renamed(FORMS[form][2], f"_{n}")]
    with torch.no_grad():
        return torch.export.export(Model(), inputs_of(forms), dynamic_shapes=(tuple(shapes),) if dynamic else None)


def inputs_of(forms: tuple[str, ...], others: bool = False) -> tuple[Tensor, ...]:
    """Of each form after the other, as they are in the table or of other sizes."""
    rows = [(inputs, shapes) for _, inputs, shapes, *_ in map(FORMS.__getitem__, forms)]
    return tuple(x.clone() for inputs, shapes in rows for x in (other_sizes(inputs, shapes) if others else inputs))


def same(program: ExportedProgram, function: Function, inputs: tuple[Tensor, ...]) -> None:
    near(program.module()(*inputs), function, inputs)


def near(result: Tensor, function: Function, inputs: tuple[Tensor, ...]) -> None:
    """As near to float64 as eager is, or half a unit in the last place."""
    eager = function(*inputs)
    exact = function(*(x.double() if x.is_floating_point() else x for x in inputs))
    assert (result.dtype, result.shape) == (eager.dtype, eager.shape)
    unit = 1e-5 if result.dtype == torch.float32 else 2**-9 * float(exact.abs().max())
    errors = [float((x.double() - exact).abs().max()) for x in (result, eager)]
    assert errors[0] <= 2 * errors[1] + unit, errors


def other_sizes(inputs: tuple[Tensor, ...], shapes: Any) -> tuple[Tensor, ...]:
    """Inputs of other sizes, where they are dynamic: a prime each."""
    lengths = {"batch": 3, "length": 17, "keys": 19}
    made = []
    for number, (tensor, sizes) in enumerate(zip(inputs, shapes, strict=True)):
        shape = list(tensor.shape)
        for dim, symbol in (sizes or {}).items():
            shape[dim] = lengths[symbol.__name__]
        value = randn(*shape, seed=10 + number)
        made.append(value > 0 if tensor.dtype == torch.bool else value.to(tensor.dtype))
    return tuple(made)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(
    ("forms", "dynamic"),
    [(tuple(FORMS), True), (("S4", "causal to the last key"), False)],
    ids=["any size", "one size"],
)
def test_every_form_is_recognised(forms: tuple[str, ...], dynamic: bool, table: str) -> None:
    program = exported_forms(forms, dynamic).run_decompositions(TABLES[table]())
    before = program.module()(*inputs_of(forms))
    sites = attn_pass.rewrite(program, choose="fused", on_error="raise").sites
    calls = [str(n.target) for n in program.graph.nodes if "attention" in str(n.target)]
    assert calls == ["aten.scaled_dot_product_attention.default"] * len(forms)
    for others in (False, True) if dynamic else (False,):
        results = program.module()(*inputs_of(forms, others))
        for form, site, result, unfused in zip(forms, sites, results, before, strict=True):
            function, inputs, shapes, mask, poor_case = FORMS[form]
            assert (site.target, site.poor_cases) == ("sdpa", (poor_case,) if poor_case else ()), (form, site.reason)
            assert site.mask.startswith(mask), form
            near(result, function, other_sizes(inputs, shapes) if others else inputs)
            # decompositions may change eager's
            assert others or result.stride() == unfused.stride(), form


def test_the_unfused_call_is_recognised() -> None:
    """sdpa_kernel(MATH) around the export and the decomposition: torch's own unfused form, as operators."""
    with sdpa_kernel(SDPBackend.MATH):
        program = decomposed(last_key_call, TWO, None, "inductor")
    (site,) = attn_pass.rewrite(program, choose="fused", on_error="raise").sites
    assert site.target == "sdpa" and site.form == "eager" and site.mask == "causal with offset 6"
    same(program, last_key_call, TWO)


@pytest.mark.parametrize("table", ["core", "inductor"])
def test_seed_s4_is_predicted_to_gain_when_decomposed(table: str) -> None:
    inputs = three((1000, 4, 1, 32), (1, 4, 2048, 32))
    shapes = ({0: Dim("batch", min=1, max=2048)}, None, None)
    (site,) = attn_pass.rewrite(decomposed(call, inputs, shapes, table), on_error="raise").sites
    assert site.poor_cases == ("shared_kv",)
    assert site.predicted_us["leave"] > 1.5 * min(site.predicted_us.values())


@pytest.mark.parametrize(
    ("table", "forms"), [("core", ("S4", "causal to the last key")), ("inductor", ("grouped, one query",))]
)
def test_a_decomposed_export_becomes_a_package(table: str, forms: tuple[str, ...], tmp_path: Path) -> None:
    """The forms of a table are in one package, each with three inputs and with lengths of its own."""
    functions, inputs, shapes, _, poor_cases = zip(*(FORMS[form] for form in forms), strict=True)

    def together(*given: Tensor) -> tuple[Tensor, ...]:
        return tuple(f(*given[3 * n : 3 * n + 3]) for n, f in enumerate(functions))

    renamed = [_renamed(of_form, f"_{n}") for n, of_form in enumerate(shapes)]
    examples, lengths = (tuple(x for part in parts for x in part) for parts in (inputs, renamed))
    program = exported(together, examples, lengths).run_decompositions(TABLES[table]())
    options = {"choose": "fused", "targets": ("sdpa",)}
    path = attn_pass.aot_compile(program, package_path=tmp_path / "m.pt2", options=options)
    sites = attn_pass.package_report(path).sites
    assert [site.target for site in sites] == ["sdpa"] * len(forms)
    assert [site.poor_cases for site in sites] == [(case,) if case else () for case in poor_cases]
    loaded = torch._inductor.aoti_load_package(path)
    others = tuple(x for of_form, of_shape in zip(inputs, shapes) for x in other_sizes(of_form, of_shape))
    for given in (examples, others):
        for result, exact in zip(loaded(*given), together(*(x.double() for x in given)), strict=True):
            torch.testing.assert_close(result.double(), exact, atol=1e-5, rtol=1e-5)


def _renamed(shapes: Any, ending: str) -> list[dict[int, Dim] | None]:
    """Dynamic sizes under other names: a size of one form is none of another."""
    return [
        sizes and {dim: Dim(size.__name__ + ending, min=size.min, max=size.max) for dim, size in sizes.items()}
        for sizes in shapes
    ]


# ---- what looks alike ----

_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def with_logsumexp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out, lse = _kernel(q, k, v)
    return out + lse[..., None]


def scores_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The guard against fully masked rows looks at other scores than the softmax does."""
    scores = q @ k.mT
    return torch.where(((scores + 1) != NEG_INF).any(-1, keepdim=True), scores.softmax(-1), 0.5) @ v


def over_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-2) @ v


def other_maximum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What a decomposed softmax looks like, but for the sum."""
    weights = torch.exp(q @ k.mT - (q @ k.mT).amax(-1, keepdim=True))
    return weights / weights.sum(-2, keepdim=True) @ v


def strided_positions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every other key is before the row: positions with a step and a start, which iota has as well."""
    i, j = torch.arange(q.size(-2)), torch.arange(1, 2 * k.size(-2) + 1, 2)
    return (q @ k.mT).masked_fill(j[None] > i[:, None] + 1, NEG_INF).softmax(-1) @ v


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("function", [scores_twice, over_rows, other_maximum])
def test_look_alikes_are_left(function: Function, table: str) -> None:
    program = decomposed(function, TWO, None, table)
    assert not attn_pass.rewrite(program, choose="fused", on_error="raise").rewritten
    torch.testing.assert_close(program.module()(*TWO), function(*TWO))


def test_a_kernel_of_which_more_is_used_is_left() -> None:
    program = decomposed(with_logsumexp, TWO, None, "inductor")
    (site,) = attn_pass.rewrite(program, choose="fused", on_error="raise").sites
    assert site.outcome == "left"
    assert site.reason.startswith("the logarithm of the sum of exponentials is used as well")


@pytest.mark.parametrize("table", TABLES)
def test_positions_with_a_step_are_not_read_as_causal(table: str) -> None:
    program = decomposed(strided_positions, TWO, None, table)
    (site,) = attn_pass.rewrite(program, choose="fused", on_error="raise").sites
    assert site.outcome == "rewritten" and "causal" not in site.mask
    same(program, strided_positions, TWO)


def test_a_cuda_kernel_of_a_decomposed_program_is_reported() -> None:
    """It was chosen when the program was decomposed; on another device the graph can only be looked at."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        graph = torch.fx.Graph()
        q, k, v = (graph.placeholder(name) for name in "qkv")
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention.default
        both = graph.call_function(kernel, (q, k, v, None, False))
        first = graph.call_function(operator.getitem, (both, 0))
        graph.output((first,))
        for node in (q, k, v, first):
            node.meta["val"] = torch.empty(2, 4, 8, 16)
        both.meta["val"] = (first.meta["val"], torch.empty(0))
        gm = torch.fx.GraphModule({}, graph)
        (site,) = attn_pass.rewrite(gm).sites
    assert site.outcome == "left"
    assert site.reason.startswith("torch's efficient kernel was chosen when the program was decomposed")

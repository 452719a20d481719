"""`same`: a program compiled with the pass, compared with itself in eager and in float64 (the numerics contract)."""

from __future__ import annotations

import copy
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch.nn.attention import flex_attention

import attn_pass
from attn_pass.compat import TORCH_VERSION

FLEX_ON_CPU = TORCH_VERSION >= (2, 13)  # what the target takes (attn_pass/targets/flex/rules.py)
NEG_INF = float("-inf")
SOME = -1
"""Of sites that must be rewritten: at least one where ``targets`` are given, and any number where they are not."""


def randn(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False, seed: int = 0) -> torch.Tensor:
    """Normal numbers that depend on the shape and the seed alone."""
    generator = torch.Generator().manual_seed(1000 * seed + sum((n + 1) * s for n, s in enumerate(shape)))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)


def qkv(
    batch: int = 2,
    heads: int = 2,
    q_len: int = 8,
    kv_len: int = 8,
    dim: int = 16,
    *,
    kv_heads: int | None = None,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    grad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value, (B, H, L, D)."""
    kv = kv_heads or heads
    return (
        randn(batch, heads, q_len, dim, dtype=dtype, grad=grad, seed=1),
        randn(batch, kv, kv_len, dim, dtype=dtype, grad=grad, seed=2),
        randn(batch, kv, kv_len, value_dim or dim, dtype=dtype, grad=grad, seed=3),
    )


def attend(weights: Callable[..., torch.Tensor], scale: float = 0.25) -> Callable[..., torch.Tensor]:
    """Attention of query, key and value by the weights that are computed of its scores, and of what else is given."""
    return lambda q, k, v, *rest: weights(q @ k.mT * scale, *rest) @ v


def same(
    fn: Callable[..., Any],
    *inputs: Any,
    rewritten: int | None = SOME,
    grad: bool = False,
    dynamic: bool | None = None,
    reference: Callable[..., Any] | bool = True,
    twice: float = 2.0,
    aot: bool = False,
    then: Sequence[Sequence[Any]] = (),
    **options: Any,
) -> attn_pass.Report:
    """Asserts that the compiled program is the eager one: values, gradients, dtypes, strides, writes to its inputs.

    The error against float64 may be twice eager's, or 1e-5 of the largest value (1e-11 in float64, half a unit in the
    last place in half precision). Where eager is NaN or infinite nothing is asked. ``rewritten`` is how many must be;
    with `SOME` one at least where ``targets`` are given, of which eager compared with itself would say nothing.
    ``reference`` computes in float64 what ``fn`` should; False compares with eager alone. ``aot``: AOTAutograd compiles
    the rewritten graph, whatever the test's name. ``then`` are more inputs for the same compiled program, whose results
    are compared with eager's alone.
    """
    truth: tuple[list[Any], list[Any]] | None = None
    with flex_as_it_is(grad):
        expected, wanted, touched = _run(fn, _copies(inputs), grad)
        if reference is not False:
            exact = reference if callable(reference) else _as_float64(fn)
            truth = _run(exact, _copies(inputs, torch.float64), grad)[:2]
    torch._dynamo.reset()
    inner = compiler(aot or (dynamic and bool(then)))
    inner = without_numbers if dynamic and inner == "eager" else inner
    backend = attn_pass.wrap(inner, **{"choose": "fused", "on_error": "raise", **options})
    compiled = torch.compile(fn, backend=backend, dynamic=dynamic)
    with attn_pass.record() as report:
        results, got, left = _run(compiled, _copies(inputs), grad)
    if rewritten not in (None, SOME):
        assert len(report.rewritten) == rewritten, [(s.outcome, s.reason) for s in report.sites]
    elif rewritten == SOME and options.get("targets"):
        assert report.rewritten, [(s.outcome, s.reason, s.refusals) for s in report.sites]
    _compare("result", results, expected, truth[0] if truth else None, twice)
    assert [t.stride() for t in results] == [t.stride() for t in expected]
    _compare("gradient", got, wanted, truth[1] if truth else None, twice)
    _compare("input", left, touched, None, twice)
    for more in then:
        with torch._dynamo.config.patch(error_on_recompile=True):
            results = _run(compiled, _copies(more), False)[0]
        with flex_as_it_is(False):
            _compare("result", results, _run(fn, _copies(more), False)[0], None, twice)
    return report


def same_each(
    programs: Mapping[str, tuple[Callable[..., Any], Sequence[Any]]],
    *,
    rewritten: int | None = 1,
    then: Sequence[Sequence[Sequence[Any]]] = (),
    **more: Any,
) -> attn_pass.Report:
    """`same` for programs with their inputs, all in one graph, which takes less long than a graph each.

    ``rewritten`` is how many must be of each; ``then`` has inputs of all programs, each time. Where something is wrong
    each program is run alone, to tell which it is.
    """
    whole = Together([(fn, len(inputs)) for fn, inputs in programs.values()])
    others = [[x for inputs in given for x in inputs] for given in then]
    try:
        inputs = (x for _, inputs in programs.values() for x in inputs)
        count = None if rewritten is None else rewritten * len(programs)
        return same(whole, *inputs, rewritten=count, then=others, **more)
    except Exception as together:
        for number, (name, (fn, inputs)) in enumerate(programs.items()):
            try:
                same(fn, *inputs, rewritten=rewritten, then=[given[number] for given in then], **more)
            except Exception as error:
                raise AssertionError(f"{name}: {error}") from error
        raise AssertionError("each alone is right, and all in one graph are not") from together


def exported_each(
    programs: Mapping[str, tuple[Callable[..., Any], Sequence[Any]]], *, decompose: bool = False, **options: Any
) -> attn_pass.Report:
    """Asserts that one exported program of all of them gives eager's results; says which it is that does not."""
    whole = Together([(fn, len(inputs)) for fn, inputs in programs.values()])
    inputs = [x for _, given in programs.values() for x in given]
    program = torch.export.export(whole, tuple(_copies(inputs)))
    program = program.run_decompositions() if decompose else program
    report = attn_pass.rewrite(program, **{"choose": "fused", "on_error": "raise", **options})
    results = list(program.module()(*_copies(inputs)))
    for name, (fn, given) in programs.items():
        wanted = _run(fn, _copies(given), False)[0]
        _compare(f"{name}: result", results[: len(wanted)], wanted, None, 1.0)
        del results[: len(wanted)]
    return report


class Together(torch.nn.Module):
    """Programs, each of so many inputs, one after the other."""

    def __init__(self, programs: Sequence[tuple[Callable[..., Any], int]]) -> None:
        super().__init__()
        self.programs = programs
        self.held = torch.nn.ModuleList(fn for fn, _ in programs if isinstance(fn, torch.nn.Module))

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        results: list[Any] = []
        for fn, count in self.programs:
            out = fn(*inputs[:count])
            results += [out] if isinstance(out, torch.Tensor) else list(out)
            inputs = inputs[count:]
        return tuple(results)


def flex_as_it_is(grad: bool) -> mock._patch[bool]:  # type: ignore[name-defined]
    """Eager FlexAttention without Dynamo, which traces each call anew, and makes the same products of it.

    Its backward needs Dynamo.
    """
    return mock.patch.object(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", not grad)


def compiler(always: bool | None) -> Any:
    """What compiles the rewritten graph: AOTAutograd for one test in four, by its name; the others execute it.

    AOTAutograd takes half of such a test's time, and what it finds in what the pass writes, generated programs find.
    So it does where a compiled program is called with other sizes than it was compiled for, as it may add guards, and
    where a higher-order operator is emitted into a checkpoint: eager's second forward saves other tensors than the
    first.
    The default partitioner: which of its values the backward computes again is the compiler's choice, and takes long.
    """
    drawn = zlib.crc32(os.environ.get("PYTEST_CURRENT_TEST", "").encode()) % 4 == 0
    return "aot_eager_default_partitioner" if drawn or always else "eager"


def without_numbers(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Executes a graph of dynamic sizes, but for one whose numbers are symbols too: that AOTAutograd compiles.

    Dynamo hands those as tensors, and it is AOTAutograd that has them made constants where no tensor can take their
    place: what is traced then, again, is the graph that users see.
    """
    has_numbers = any(n.op == "call_method" and n.target == "item" for n in gm.graph.nodes)
    name = "aot_eager_default_partitioner" if has_numbers else "eager"
    return torch._dynamo.lookup_backend(name)(gm, inputs)  # type: ignore[no-any-return]


def _as_float64(fn: Callable[..., Any]) -> Callable[..., Any]:
    return copy.deepcopy(fn).double() if isinstance(fn, torch.nn.Module) else fn


def _copies(values: Sequence[Any], dtype: torch.dtype | None = None) -> list[Any]:
    return [_copy(v, dtype) if isinstance(v, torch.Tensor) else v for v in values]


def _copy(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    if 0 in tensor.stride():  # expanded: memory that no copy can write twice
        return tensor.detach().to(kind).requires_grad_(tensor.requires_grad)
    new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind)
    return new.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)


def _run(fn: Callable[..., Any], inputs: list[Any], grad: bool) -> tuple[list[Any], list[Any], list[Any]]:
    out = fn(*inputs)
    results = [out] if isinstance(out, torch.Tensor) else list(out)
    gradients: list[Any] = []
    if grad:
        leaves = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
        leaves += list(fn.parameters()) if isinstance(fn, torch.nn.Module) else []
        with_grad = [t for t in results if t.requires_grad]
        ones = [randn(*t.shape, dtype=t.dtype, seed=7) for t in with_grad]
        gradients = list(torch.autograd.grad(with_grad, leaves, ones, allow_unused=True)) if with_grad else []
    return results, gradients, [t.detach() for t in inputs if isinstance(t, torch.Tensor)]


def _compare(what: str, results: list[Any], expected: list[Any], truth: list[Any] | None, twice: float) -> None:
    assert len(results) == len(expected)
    for number, (a, b) in enumerate(zip(results, expected, strict=True)):
        name = f"{what} {number}"
        assert (a is None) == (b is None), f"{name}: {'a gradient' if b is None else 'no gradient'} that eager has not"
        if a is None:
            continue
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        if not a.is_floating_point():
            assert torch.equal(a, b), name
            continue
        defined = torch.isfinite(b)
        size = max(1.0, float(b.detach()[defined].abs().max())) if defined.any() else 1.0
        exact = b if truth is None or truth[number] is None else truth[number]
        eager, ours = (_error(t, exact, defined) for t in (b, a))
        unit = {torch.float32: 1e-5, torch.float64: 1e-11, torch.bfloat16: 2**-9, torch.float16: 2**-12}[a.dtype] * size
        if truth is None and a.dtype in (torch.bfloat16, torch.float16):
            unit *= 8
        limit = max(twice * eager, unit) if a.dtype in (torch.float32, torch.float64) else twice * eager + unit
        assert ours <= limit, f"{name}: error {ours:.3g}, eager's is {eager:.3g}"


def _error(tensor: torch.Tensor, exact: torch.Tensor, defined: torch.Tensor) -> float:
    difference = (tensor.detach().double() - exact.detach().double()).abs()[defined]
    if not len(difference):
        return 0.0
    return float(difference.nan_to_num(nan=float("inf"), posinf=float("inf")).max())

"""Programs that stock Inductor gets wrong are right: rewritten by the pass, and left to Inductor with the shield.

What stock does is told (`record_property`) and not asked for: where a torch gets a program right its test is skipped.
Most run Inductor up to the code it would write and its graphs as they are: the patterns are all before that. A few are
compiled; tests/entries/test_shield.py compiles two more.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from against_eager import Together, same
from miscompiled import PROGRAMS, TRAINED, Program
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func

import attn_pass

HALVES = (torch.float16, torch.bfloat16)
LEAVE: dict[str, Any] = {"rules": {"*": "leave"}}
FUSED: dict[str, Any] = {"choose": "fused"}


pytestmark = pytest.mark.usefixtures("quiet_torch")


def given(program: Program, dtype: torch.dtype, grad: bool = False) -> list[Any]:
    inputs = program.inputs(dtype)
    return [x.requires_grad_() if grad and x.is_floating_point() else x for x in inputs]


# ---- with the pass ----


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_pass_is_right_in_training(name: str) -> None:
    program = PROGRAMS[name]
    # Gradients of a fully masked row are not the mean's: eager's own are asked for there.
    reference = program.reference if program.reference is True else False
    same(program.function, *given(program, torch.float32, grad=True), grad=True, reference=reference)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_pass_is_right_in_half_precision(name: str) -> None:
    program = PROGRAMS[name]
    for dtype in HALVES:
        same(program.function, *given(program, dtype), reference=program.reference)


def test_what_is_attention_among_them_is_rewritten() -> None:
    """So that the tests above see more than sites that were left."""
    names = ("a key permuted at once", "padding is 1", "a mask of three values", "where, a fully masked row")
    for name in (*names, "heads before the batch", "heads last", "a bias with alpha", "a scale that is a tensor"):
        program = PROGRAMS[name]
        same(program.function, *given(program, torch.float32), reference=program.reference, rewritten=1)


# ---- left to Inductor ----


def interpreted(gm: torch.fx.GraphModule, inputs: Any, **_: Any) -> Callable[..., Any]:
    """In place of Inductor's code: the graph as its passes before and around autograd left it."""
    return make_boxed_func(gm.forward)  # type: ignore[no-any-return]


def stock(gm: torch.fx.GraphModule, inputs: Any) -> Any:
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, inputs, inner_compile=interpreted)


def values(function: Callable[..., Any], inputs: list[Any], grad: bool) -> list[torch.Tensor]:
    """The result, and in training the gradients of the inputs."""
    with torch.set_grad_enabled(grad):
        out = function(*inputs)
    if not grad:
        return [out]
    leaves = [x for x in inputs if x.requires_grad]
    return [out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)]


def difference(results: list[torch.Tensor], expected: list[torch.Tensor]) -> str:
    """What is wrong, in words; "" where nothing is."""
    for a, b in zip(results, expected, strict=True):
        if a.shape != b.shape:
            return f"{tuple(a.shape)} in place of {tuple(b.shape)}"
        error = float((a - b).abs().max())
        if not error < 1e-4:
            return f"{error:.2g} away"
    return ""


def what_stock_does(program: Program, inputs: list[Any], grad: bool, backend: Any = stock) -> str:
    torch._dynamo.reset()
    expected = values(program.function, inputs, grad)
    try:
        return difference(values(torch.compile(program.function, backend=backend), inputs, grad), expected)
    except Exception as error:
        return f"raises {type(error).__name__}: {str(error).strip().splitlines()[0]}"


SHIELDED = [(name, False) for name in PROGRAMS] + [(name, True) for name in TRAINED]


@pytest.mark.parametrize(("name", "grad"), SHIELDED)
def test_the_shield_stops_inductors_patterns(
    name: str,
    grad: bool,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, Any], None],
) -> None:
    program = PROGRAMS[name]
    inputs = given(program, torch.float32, grad)
    does = what_stock_does(program, inputs, grad)
    record_property("stock", does)
    if not does:
        pytest.skip("this torch gets it right")
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", interpreted)
    torch._dynamo.reset()
    counters.clear()
    with attn_pass.record() as report:
        outcome = values(torch.compile(program.function, backend=attn_pass.backend, options=LEAVE), inputs, grad)
    assert not report.rewritten
    assert difference(outcome, values(program.function, inputs, grad)) == ""
    assert counters["inductor"]["fuse_attention"] == 0


def test_without_the_shield_a_site_that_was_left_is_what_stock_makes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    program = PROGRAMS["a fill of 0"]
    inputs = given(program, torch.float32)
    if not what_stock_does(program, inputs, False):
        pytest.skip("this torch gets it right")
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", interpreted)
    unshielded = torch.compile(program.function, backend=attn_pass.backend, options={**LEAVE, "shield": False})
    assert difference(values(unshielded, inputs, False), values(program.function, inputs, False))


# ---- compiled ----


def right(program: Program, dtype: torch.dtype, result: torch.Tensor) -> bool:
    inputs = given(program, dtype)
    exact = program.reference if callable(program.reference) else program.function
    truth = exact(*(x.double() if x.is_floating_point() else x for x in inputs))
    own = float((program.function(*inputs).double() - truth).abs().max())
    unit = {torch.float32: 1e-5, torch.float16: 2**-11, torch.bfloat16: 2**-8}[dtype]
    return bool((result.double() - truth).abs().max() <= 2 * own + unit * float(truth.abs().max()))


@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [("padding is 1", torch.float32, FUSED), ("where, a fill of -5", torch.bfloat16, LEAVE)],
)
def test_compiled_by_inductor(name: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    program = PROGRAMS[name]
    with torch.no_grad():
        result = torch.compile(program.function, backend=attn_pass.backend, options=options)(*given(program, dtype))
    assert right(program, dtype, result)


def test_packaged_by_aotinductor(tmp_path: Path) -> None:
    """Two in one package: an attention, and none, which is the shield's."""
    dtypes = {"a key permuted at once": torch.float32, "softmax over dim 1": torch.float16}
    parts = [(PROGRAMS[name], given(PROGRAMS[name], dtype)) for name, dtype in dtypes.items()]
    whole = Together([(program.function, len(inputs)) for program, inputs in parts])
    inputs = tuple(x for _, of_one in parts for x in of_one)
    path = attn_pass.aot_compile(whole, inputs, package_path=str(tmp_path / "model.pt2"), options=FUSED)
    results = torch._inductor.aoti_load_package(path)(*inputs)
    for (name, dtype), result in zip(dtypes.items(), results, strict=True):
        assert right(PROGRAMS[name], dtype, result), name

"""PyTorch's own test of its attention patterns, run with the pass: `python -m bench peers-suite FILE [--json OUT]`.

FILE is test/inductor/test_fused_attention.py of a PyTorch checkout; it is imported from there and its checks are
replaced. Each form is compiled with the fused targets forced and every site verified, with a static and with a dynamic
batch, in inference and, where the peers train it, in training; results and gradients are compared with eager and with
float64. The status is 1 where a number is wrong, or a form is neither fused nor refused for a reason given below.
torch's test helpers need `pip install expecttest`.
"""

from __future__ import annotations

import copy
import fnmatch
import hashlib
import unittest.mock
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import attn_pass
from attn_pass.measuring.timing import farthest, why
from bench.harness.command import Device, Json, Only, named, started
from bench.harness.console import plain_console, teller
from bench.harness.document import Column, Row, Table
from bench.suites.peer_forms import Form, SuiteError, collect, load

TITLE = "PyTorch's own test of its attention patterns"
OPTIONS: dict[str, Any] = {"choose": "fused", "verify": "graph", "on_error": "raise"}
SEED = 1234
# Of the largest value: what one more rounding in the dtype may change.
UNITS = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
FUSED, REFUSED, NOT_FUSED, WRONG, RAISED, AGAIN = "fused", "refused", "NOT FUSED", "WRONG", "RAISED", "COMPILED AGAIN"
BAD = (NOT_FUSED, WRONG, RAISED, AGAIN)


@dataclass(frozen=True)
class Refusal:
    """Forms that are rightly left: their tests (as file names match), words of the pass's reason, and why that is."""

    tests: str
    says: str
    because: str


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "pattern_fails_with_reuse",
        "the attention weights are returned",
        "no fused kernel gives the weights, and the program returns them: the peers ask for no fusing either",
    ),
    Refusal(
        "sdpa_rewriter_*",
        "torch's fused CPU kernel has no dropout",
        "the CPU has no fused kernel with dropout, however small its probability is; the peers fuse these into torch's "
        "call, which takes the same steps as the program does there",
    ),
    Refusal(
        "sdpa_*",
        "no input of its checkpoint needs a gradient",
        "torch refuses F.scaled_dot_product_attention itself there (`does not support RNG ops in recompute regions`), "
        "and stock's patterns match nothing there in torch 2.13.0",
    ),
)

COLUMNS = (
    Column("form", "form"),
    Column("the peers", "peers"),
    Column("settings", "settings"),
    Column("became", "became"),
    Column("reason", "reason"),
    Column("error", "error", ".1e"),
    Column("eager's", "eager", ".1e"),
    Column("verdict", "verdict"),
)
NOTES = (
    "Error, eager's: largest distance from float64, over results, gradients and settings. Where random numbers are "
    "drawn, both start from one seed and the distance is that from eager.",
    "A number after a test's name tells its calls apart. A star: no class of the file names the test on this device; "
    "what it makes on CUDA is made on this device.",
    "A dynamic batch is also run with another size, which must not compile again.",
)


def _to_wide(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`x.to(dtype)` that stays in float64, for the same program computed exactly."""
    args = tuple(torch.float64 if isinstance(a, torch.dtype) and a.is_floating_point else a for a in args)
    return _to(tensor, *args, **kwargs)


_to = torch.Tensor.to


@dataclass(frozen=True)
class Outcome:
    """Results, and gradients where trained."""

    values: list[torch.Tensor]
    names: list[str]


def run(function: Callable[..., Any], form: Form, inputs: Sequence[Any], training: bool) -> Outcome:
    """The form's results on these inputs, which are leaves; in training, their gradients too."""
    torch.manual_seed(SEED)
    extra = [training] if form.takes_training else []
    with torch.set_grad_enabled(training or form.gradients):
        out = function(*inputs, *extra)
    values = [out] if isinstance(out, torch.Tensor) else list(out)
    names = [f"result {n}" for n in range(1, len(values) + 1)]
    if training:
        with_grad = [v for v in values if v.requires_grad]
        torch.autograd.backward(with_grad, [_direction(v) for v in with_grad])
        for number, x in enumerate(inputs, 1):
            if isinstance(x, torch.Tensor) and x.grad is not None:
                values.append(x.grad)
                names.append(f"the gradient of input {number}")
    return Outcome([v.detach() for v in values], names)


def _direction(like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.dtype).to(like.device)


def leaves(inputs: Sequence[Any], training: bool, dtype: torch.dtype | None = None) -> list[Any]:
    """Copies of the inputs, which require gradients in training."""

    def leaf(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        floating = x.is_floating_point()
        made = x.detach().clone() if dtype is None or not floating else x.detach().to(dtype)
        return made.requires_grad_(training and floating)

    return [leaf(x) for x in inputs]


def _in_float64(form: Form, inputs: Sequence[Any], training: bool) -> Outcome | None:
    if form.draws and training:
        return None  # float64 draws other numbers
    function = form.function
    function = copy.deepcopy(function).double() if isinstance(function, torch.nn.Module) else function
    # Not by a mode: a checkpoint runs the function again in the backward, out of it.
    with unittest.mock.patch.object(torch.Tensor, "to", _to_wide):
        return run(function, form, leaves(inputs, training, torch.float64), training)


def apart(result: Outcome, eager: Outcome, truth: Outcome | None) -> tuple[float, float, str]:
    """``(error, eager's error, what is wrong or "")``: an error may be twice eager's and a rounding."""
    if result.names != eager.names:
        return float("inf"), 0.0, f"{result.names} where eager gives {eager.names}"
    worst, own, wrong = 0.0, 0.0, ""
    for index, name in enumerate(result.names):
        got, want = result.values[index], eager.values[index]
        exact = want if truth is None else truth.values[index]
        if (got.shape, got.dtype) != (want.shape, want.dtype):
            return float("inf"), own, f"{name} is {got.dtype} {tuple(got.shape)} in place of {want.dtype} {want.shape}"
        defined = torch.isfinite(want)
        size = max(1.0, float(exact[defined].abs().max())) if defined.any() else 1.0
        ours, theirs = farthest(got, exact, defined), farthest(want, exact, defined)
        # Without float64 eager's own rounding is in the distance too.
        unit = UNITS.get(want.dtype, 0.0) * size * (8 if truth is None else 1)
        if not ours <= 2 * theirs + unit and not wrong:
            wrong = f"{name} is {ours:.2g} away, eager {theirs:.2g}"
        worst, own = max(worst, ours), max(own, theirs)
    return worst, own, wrong


def check(form: Form, training: bool) -> Row:
    """One form in one setting: what it became, and whether its numbers are right."""
    setting = f"{'static' if form.static else 'dynamic'} {'training' if training else 'eval'}"
    row: Row = {"program": form.test, "form": title(form), "settings": setting, "became": "-", "reason": ""}
    row["peers"] = "fuse it" if form.fused else "do not"
    torch._dynamo.reset()
    backend = attn_pass.wrap("aot_eager", **OPTIONS)
    compiled = torch.compile(form.function, backend=backend, fullgraph=True)
    sizes = [form.inputs] if form.static else [form.inputs, _another_batch(form.inputs)]
    errors: list[tuple[float, float, str]] = []
    try:
        with attn_pass.record() as report:
            for inputs in sizes:
                given = leaves(inputs, training)
                if not form.static:
                    _mark(given)
                result = run(compiled, form, given, training)
                eager = run(form.function, form, leaves(inputs, training), training)
                errors.append(apart(result, eager, _in_float64(form, inputs, training)))
    except Exception as error:
        row |= {"verdict": RAISED, "reason": why(error, 200)}
        return row
    wrong = next((e[2] for e in errors if e[2]), "")
    row |= {"error": max(e[0] for e in errors), "eager": max(e[1] for e in errors), "graphs": report.graphs}
    row |= _outcome(form, report)
    if wrong:
        row |= {"verdict": WRONG, "reason": wrong}
    elif report.graphs > 1:
        row |= {"verdict": AGAIN, "reason": f"{report.graphs} graphs for two sizes of the batch"}
    return row


def title(form: Form) -> str:
    """The test and which of its calls, with a star where no class of this device names it."""
    return f"{form.test} {form.number}{'' if form.named else ' *'}"


def _mark(inputs: Sequence[Any]) -> None:
    for x in inputs[:3]:
        # A batch of 1 is a number to torch, whatever is asked for.
        (torch._dynamo.mark_dynamic if x.shape[0] > 1 else torch._dynamo.maybe_mark_dynamic)(x, 0)


def _another_batch(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The inputs with one more batch row; as they are where the batch is 1."""
    if inputs[0].shape[0] == 1:
        return tuple(inputs)
    return (*(torch.cat([x, x[:1]]) for x in inputs[:3]), *inputs[3:])


def _outcome(form: Form, report: attn_pass.Report) -> Row:
    sites = report.sites
    if not sites:
        return {"became": "no site", "reason": "", "verdict": NOT_FUSED}
    became = ", ".join(dict.fromkeys(f"{s.target}" if s.outcome != "left" else "left" for s in sites))
    left = [s.reason for s in sites if s.outcome == "left"]
    if not left:
        return {"became": became, "reason": "", "verdict": FUSED}
    known = [refusal(form.test, reason) for reason in left]
    verdict = REFUSED if all(known) else NOT_FUSED
    return {"became": became, "reason": "; ".join(dict.fromkeys(left)), "verdict": verdict}


def refusal(test: str, reason: str) -> Refusal | None:
    """The known refusal that this is, if any."""
    return next((r for r in REFUSALS if fnmatch.fnmatch(test, r.tests) and r.says in reason), None)


def merged(rows: Sequence[Row]) -> list[Row]:
    """One line for the settings of a form that went the same way."""
    by_form: dict[tuple[str, ...], Row] = {}
    for row in rows:
        key = (row["form"], row["became"], row["reason"], row["verdict"])
        if key in by_form:
            old = by_form[key]
            old["settings"] += f", {row['settings']}"
            for name in ("error", "eager"):
                if name in row:
                    old[name] = max(old.get(name, 0.0), row[name])
        else:
            by_form[key] = dict(row)
    return list(by_form.values())


def main(
    file: Annotated[Path, typer.Argument(help="test/inductor/test_fused_attention.py of a PyTorch checkout.")],
    json_file: Json = None,
    only: Only = "",
    device: Device = "cpu",
) -> None:
    """PyTorch's own test of its attention patterns, against the pass."""
    tell = teller(plain_console())
    warnings.filterwarnings("ignore", category=UserWarning)  # the file's own: reentrant checkpoints, deprecated helpers
    try:
        forms, others = collect(load(file), device)
    except SuiteError as error:
        raise typer.BadParameter(str(error)) from error
    every: list[Any] = [*forms, *others]
    asked = {each.test for each in named(only, every, attrgetter("test"))}
    forms = [form for form in forms if form.test in asked]
    others = [other for other in others if other.test in asked]
    rows: list[Row] = []
    for form in forms:
        for training in (False, True) if form.trains else (False,):
            rows.append(check(form, training))
            tell(f"{rows[-1]['form']}, {rows[-1]['settings']}: {rows[-1]['verdict']} {rows[-1]['reason']}")
    made = started(TITLE, json_file, device=device, **_run(file, rows, forms))
    made.table("Forms", COLUMNS, NOTES).rows += merged(rows)
    made.document.tables += _tables_about(rows, others)
    made.finish(bad=not rows or any(row["verdict"] in BAD for row in rows))


def _run(file: Path, rows: Sequence[Row], forms: Sequence[Form]) -> dict[str, Any]:
    counts = Counter(row["verdict"] for row in rows)
    content = file.read_bytes()
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    return {
        "file": f"{file.name}, {len(content)} bytes, Git blob {blob[:12]}",
        "forms": len({title(form) for form in forms}),
        "checks": ", ".join(f"{count} {verdict}" for verdict, count in counts.items()),
        "options": ", ".join(f"{name}={value!r}" for name, value in OPTIONS.items()),
    }


def _tables_about(rows: Sequence[Row], others: Sequence[Any]) -> list[Table]:
    """The refusals that were met, with why they are true; and the tests that gave no form."""
    met = {refusal(row["program"], reason) for row in rows for reason in row["reason"].split("; ")} - {None}
    refusals = [{"says": r.says, "because": r.because} for r in REFUSALS if r in met]
    because = (Column("the pass says", "says"), Column("which is so", "because"))
    missing = (Column("test", "test"), Column("batch", "batch"), Column("why", "why"))
    lines = [{"test": o.test, "batch": "static" if o.static else "dynamic", "why": o.why} for o in others]
    tables = [
        Table("Why a refusal is true", because, refusals),
        Table("Tests that gave no form here", missing, lines),
    ]
    return [table for table in tables if table.rows]

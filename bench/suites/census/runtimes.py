"""Programs for other runtimes: how many attentions end as the runtime's own operator, stock and rewritten.

Each model is exported by torch.export, translated as it is and after `attn_pass.rewrite(program, runtime=...)`, and run
by ONNX Runtime and by OpenVINO on the CPU; results are compared with eager.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

import attn_pass
from bench.suites.census.dataset import Census, NotMeasured, Subject, error_text, prepared
from bench.suites.census.export import exported
from bench.suites.census.rows import Row, report_row, tried
from bench.suites.peers import compiled_by_openvino, session_of

Translated = tuple[Counter[str], Callable[[], list[Tensor]]]
"""The operators of a translated program, and what runs it."""


def measure(census: Census, name: str) -> Iterator[Row]:
    """A row for each runtime that is installed."""
    subject = prepared(census, name)
    program, _ = exported(subject)
    for stage, (package, operator, translate) in RUNTIMES.items():
        if find_spec(package) is not None:
            yield {"stage": stage, **_compared(subject, program, stage, operator, translate)}


def _compared(
    subject: Subject,
    program: ExportedProgram,
    runtime: str,
    operator: str,
    translate: Callable[[Subject, ExportedProgram], Translated],
) -> Row:
    """How many operators stock and the rewritten program have, and what both compute."""
    sites = subject.census.counted([program.module()])
    row: Row = {"status": "ok", "attentions": sites.get("hand", 0) + sites.get("sdpa", 0), "sites": sites}
    stock: list[Tensor] | None = None
    try:
        found, run = translate(subject, program)
        computed = run()
        row.update(stock=found[operator], stock_numerics=subject.judged(computed))
        # What the runtime gets wrong without the pass is not the pass's: then both have to be equal.
        stock = None if row["stock_numerics"]["ok"] else computed
    except Exception as error:
        row["stock_error"] = error_text(error)
    try:
        ours, _ = exported(subject)  # translating a program may leave something in it
    except NotMeasured as error:
        return {**row, "status": error.status, "error": str(error)}
    report = attn_pass.rewrite(ours, runtime=runtime)
    row.update(report_row(report))
    with tried(row, "does not run" if "stock_error" not in row else "not for this runtime"):
        found, run = translate(subject, ours)
        row["operators"] = found[operator]
        row["numerics"] = subject.judged(run(), stock)
    return row


def _tensors(subject: Subject) -> list[Tensor]:
    return [x for x in tree_leaves((subject.args, subject.kwargs)) if isinstance(x, Tensor)]


def _by_onnx(subject: Subject, program: ExportedProgram) -> Translated:
    translated = torch.onnx.export(program, opset_version=23, dynamo=True, verbose=False)
    assert translated is not None
    session = session_of(translated.model_proto.SerializeToString(), severity=4)
    names = [given.name for given in session.get_inputs()]
    fed = dict(zip(names, (x.numpy() for x in _tensors(subject)), strict=True))
    return (
        Counter(node.op_type for node in translated.model.graph),
        lambda: [torch.from_numpy(x) for x in session.run(None, fed)],
    )


def _by_openvino(subject: Subject, program: ExportedProgram) -> Translated:
    import openvino  # type: ignore[import-not-found]

    model = openvino.convert_model(program)
    compiled = compiled_by_openvino(model)
    results: Callable[[], Any] = lambda: compiled([x.numpy() for x in _tensors(subject)])  # noqa: E731
    return (
        Counter(node.get_type_name() for node in model.get_ops()),
        lambda: [torch.from_numpy(x.copy()) for x in results().values()],
    )


RUNTIMES = {
    "onnx": ("onnxruntime", "Attention", _by_onnx),
    "openvino": ("openvino", "ScaledDotProductAttention", _by_openvino),
}
"""By the name `attn_pass.rewrite` has for it: the package, its attention operator, and what translates a program."""
FACTS = {"bench": "runtimes", "stage": next(iter(RUNTIMES))}

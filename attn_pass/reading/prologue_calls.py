"""The spellings of what makes queries and keys beside the operations of scores: rotations, norms, complex numbers.

A table of its own: an operation that is known here is as unknown as before to everything else that reads graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch.fx import Node

from attn_pass.reading.vocabulary import Call, Row, bound, parse_row, resolve

_TABLE: tuple[tuple[str, str, str], ...] = (
    ("cos", "input", "torch.cos .cos aten.cos.default"),
    ("sin", "input", "torch.sin .sin aten.sin.default"),
    ("sqrt", "input", "torch.sqrt .sqrt aten.sqrt.default"),
    ("rsqrt", "input", "torch.rsqrt .rsqrt aten.rsqrt.default"),
    ("square", "input", "torch.square .square aten.square.default"),
    ("mean", "input, dim=None, keepdim=False, dtype=None", "torch.mean .mean aten.mean.dim"),
    ("norm", "input, p=2, dim=None, keepdim=False, dtype=None", "torch.norm torch.functional.norm .norm"),
    ("norm", "input, p, dim, keepdim=False", "aten.norm.ScalarOpt_dim"),
    ("roll", "input, shifts, dims=None", "torch.roll .roll aten.roll.default"),
    ("flip", "input, *dims", "torch.flip .flip aten.flip.default"),
    ("view_as_complex", "input", "torch.view_as_complex aten.view_as_complex.default"),
    ("view_as_real", "input", "torch.view_as_real aten.view_as_real.default"),
    ("complex", "real, imag", "torch.complex aten.complex.default"),
    ("polar", "abs, angle", "torch.polar aten.polar.default"),
    ("conj", "input", "torch.conj .conj aten._conj.default aten.conj.default aten._conj_physical.default"),
    ("real", "input", "torch.real aten.real.default"),
    ("imag", "input", "torch.imag aten.imag.default"),
    (
        "rms_norm",
        "input, normalized_shape, weight=None, eps=None",
        "torch.nn.functional.rms_norm torch.rms_norm aten.rms_norm.default aten._fused_rms_norm.default",
    ),
    (
        "layer_norm",
        "input, normalized_shape, weight=None, bias=None, eps=1e-05",
        "torch.nn.functional.layer_norm torch.layer_norm aten.layer_norm.default aten.native_layer_norm.default",
    ),
    ("index_copy", "input, dim, index, source", "torch.index_copy .index_copy aten.index_copy.default"),
)


@lru_cache(maxsize=1)
def _rows() -> dict[Callable[..., Any] | str, Row]:
    rows: dict[Callable[..., Any] | str, Row] = {}
    for op, parameters, spellings in _TABLE:
        row = parse_row(op, parameters)
        for spelling in spellings.split():
            target = spelling[1:] if spelling.startswith(".") else resolve(spelling)
            if target is not None:
                rows[target] = row
    return rows


def prologue_call(node: Node) -> Call | None:
    """The operation of this table that a node is; None for any other."""
    if node.op not in ("call_function", "call_method"):
        return None
    try:
        row = _rows().get(node.target)
    except TypeError:  # an unhashable target
        return None
    return None if row is None else bound(node, row, False)


def writes_rows(node: Node) -> Call | None:
    """The call that writes rows of a tensor by their numbers, in place or not: ``index_copy``."""
    name = str(getattr(node.target, "__name__", node.target)).removesuffix(".default")
    if node.op in ("call_function", "call_method") and name in ("index_copy", "index_copy_"):
        return bound(node, _rows()["index_copy"], False)
    return None

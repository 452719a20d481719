"""Calls of torch_npu's attention operators: what they compute according to torch_npu's documentation.

These are ``npu_fusion_attention`` in its first and third version, and ``npu_fused_infer_attention_score``, on sequences
of one length. True in a mask means masked out; the scale is 1 unless it is passed; modes 2 to 4 are passed by number
and require the compressed mask beside them (``triangle.py``). A call that the documentation does not allow
(``contract.py``), or whose result it leaves undefined, is left.

Nothing of torch_npu is imported: its operators are known by their names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from attn_pass.devices.npu.contract import CallFacts, mask_letters, mask_words, refusal
from attn_pass.devices.npu.triangle import SIDE, check_triangle
from attn_pass.graph.values import memory_order, tensor_value
from attn_pass.model.attention import AsWritten
from attn_pass.model.dtype_name import dtype_name
from attn_pass.model.expression import TRUE, Const, Dot, Expr, Load, apply, index_value
from attn_pass.model.index import Axis, Index, axis_index, divide, divide_exactly, product
from attn_pass.patterns.base import (
    NOT_GROUPED,
    UNKNOWN_SIZES,
    Site,
    check_window,
    failed,
    first_result,
    operator_name,
    refused,
    scale_of,
)
from attn_pass.patterns.calls import element_of
from attn_pass.reading.describe import Parts, describe
from attn_pass.reading.operands import OperandForm, operand
from attn_pass.reading.reader import Reader
from attn_pass.reading.unreadable import Unreadable
from attn_pass.reading.use_def import SideLoad
from attn_pass.reading.views import Position

FORM = "npu"
_FUSION = ("npu_fusion_attention", "npu_fusion_attention_v3")
_INFERENCE = "npu_fused_infer_attention_score"
_NOT_READ = (  # met in graphs, and left
    *("npu_fusion_attention_v2", "npu_prompt_flash_attention", "npu_incre_flash_attention"),
    *("npu_fused_infer_attention_score_v2", "npu_fusion_attention_v4"),
)
_CALLS: Mapping[str, str] = {f"npu::{name}": name for name in (*_FUSION, _INFERENCE, *_NOT_READ)}
# The operators' own spellings of one thing.
_SPELLINGS: Mapping[str, str] = {
    "heads": "head_num num_heads",
    "kv_heads": "num_key_value_heads",
    "before": "pre_tockens pre_tokens",
    "after": "next_tockens next_tokens",
    "layout": "input_layout",
    "mode": "sparse_mode",
    "mask": "atten_mask",
    "scale": "scale",
    "keep": "keep_prob",
    "inner": "inner_precise",
}
_IGNORED = ("gen_mask_parallel", "sync", "softmax_layout", "query", "key", "value")
# Layouts as the dimensions of an operand: batch, head, position, element; "hd" is both in one.
_LAYOUTS: Mapping[str, tuple[str, ...]] = {
    "BNSD": ("b", "h", "s", "d"),
    "BSND": ("b", "s", "h", "d"),
    "BSH": ("b", "s", "hd"),
    "SBH": ("s", "b", "hd"),
}
_UNBOUNDED = 2147483647
_RESULTS = {
    1: "the maxima of the softmax, or the logarithm of its sum, are used as well",
    2: "the sums of the softmax are used as well",
}
TRUSTED = "the mask given beside a sparse_mode is the triangle that torch_npu requires"


@dataclass(frozen=True)
class _ParsedCall:
    """A call's arguments in one spelling; ``layouts`` of the operands and of the result."""

    name: str
    query: Node
    key: Node
    value: Node
    heads: int
    kv_heads: int | None
    layouts: tuple[tuple[str, ...], tuple[str, ...]]
    mode: int
    before: int
    after: int
    mask: Node | None
    scale: Any
    keep: float
    inner_precise: object


def find(reader: Reader) -> Iterator[Site]:
    """Every call of the operators."""
    for node in list(reader.graph.nodes):
        name = _CALLS.get(operator_name(node))
        if name is None:
            continue
        region = reader.regions.of(node)
        try:
            if name in _NOT_READ:
                raise Unreadable(f"calls of {name} are not read: it stays", node)
            if region.functorch:
                raise Unreadable(f"it runs under {region.describe()}", node)
            result, rest = first_result(node, _RESULTS)
            parsed = _arguments(node, name)
            with reader.site() as used:
                mask = _Mask(reader, node, parsed)
                described = describe(_lift(reader, node, result, parsed, mask), used)
            check_window(reader, described, result)
            described = replace(described, assumptions=(*described.assumptions, *mask.trusted))
            written = _as_written(reader, parsed)
            yield Site(result, FORM, region, described, internal=(node, *rest), written=written, is_call=True)
        except Unreadable as error:
            yield refused(node, FORM, region, error, kind="attention")
        except Exception as error:
            yield failed(node, FORM, region, error)


def _as_written(reader: Reader, parsed: _ParsedCall) -> AsWritten:
    mask = tensor_value(parsed.mask)
    dense = mask is not None and parsed.mode < 2
    return AsWritten(
        fused=True,
        mask="boolean" if dense else "none",
        mask_elements=reader.sizes.hint(product(reader.sizes.shape(mask))) if dense and mask is not None else 0,
        causal=parsed.mode in (2, 3),
        library=parsed.name,
    )


def _arguments(node: Node, name: str) -> _ParsedCall:
    target = node.target
    overload = target if isinstance(target, OpOverload) else target.default  # type: ignore[union-attr]
    schema = overload._schema.arguments
    arguments: dict[str, Any] = {a.name: a.default_value for a in schema if a.has_default_value()}
    arguments |= dict(zip((a.name for a in schema), node.args))
    arguments |= node.kwargs
    known = {spelling: word for word, both in _SPELLINGS.items() for spelling in both.split()}
    by_name: dict[str, Any] = {known[n]: v for n, v in arguments.items() if n in known}
    for argument in schema:
        if argument.name in (*known, *_IGNORED):
            continue
        default = argument.default_value if argument.has_default_value() else None
        if arguments.get(argument.name) not in (None, default):
            raise Unreadable(f"its {argument.name} is not read", node)
    for word in ("heads", "before", "after", "mode"):
        if not isinstance(by_name[word], int):
            raise Unreadable(f"its {word} is not a constant", node)
    keep = by_name.get("keep", 1.0)
    if not isinstance(keep, (int, float)) or not 0 < keep <= 1:
        raise Unreadable(f"keep_prob {keep} is not accepted by the operator", node)
    inner, _, outer = str(by_name["layout"]).partition("_")
    if inner not in _LAYOUTS or (outer and (name != _INFERENCE or (inner, outer) != ("BNSD", "BSND"))):
        raise Unreadable(f"layout {by_name['layout']}: sequences of one length are read", node)
    return _ParsedCall(
        name=name,
        query=arguments["query"],
        key=arguments["key"],
        value=arguments["value"],
        heads=by_name["heads"],
        kv_heads=by_name.get("kv_heads") if name == _INFERENCE else None,
        layouts=(_LAYOUTS[inner], _LAYOUTS[outer or inner]),
        mode=by_name["mode"],
        before=by_name["before"],
        after=by_name["after"],
        mask=by_name["mask"],
        scale=by_name["scale"],
        keep=float(keep),
        inner_precise=by_name["inner"],
    )


def _at(layout: tuple[str, ...], where: Mapping[str, Index], dim: Index) -> Position:
    """The position of one element in a tensor of a layout; ``dim`` is the head dim."""
    return tuple(where["h"] * dim + where["d"] if word == "hd" else where[word] for word in layout)


def _sizes(layout: tuple[str, ...], shape: Position, heads: int, node: Node) -> dict[str, Index]:
    """Sizes by their letters. Raises `Unreadable` where they do not fit the number of heads."""
    if len(shape) != len(layout):
        raise Unreadable("an operand has another rank than its layout", node)
    sizes = dict(zip(layout, shape))
    if "hd" in sizes:
        dim = divide_exactly(sizes.pop("hd"), heads) if heads else None
        if dim is None:
            raise Unreadable("a hidden size is no multiple of the number of heads", node)
        sizes |= {"h": heads, "d": dim}
    return sizes


def _lift(reader: Reader, node: Node, result: Node, parsed: _ParsedCall, mask: _Mask) -> Parts:
    tensors = [t for n in (parsed.query, parsed.key, parsed.value, result) if (t := tensor_value(n)) is not None]
    if len(tensors) != 4:
        raise Unreadable("an operand is not a tensor", node)
    inner, outer = parsed.layouts
    q, k, v, kv_heads = _sizes_of_operands(reader, node, parsed, tensors)
    facts = _facts(reader, parsed, tensors, q, k, v)
    if (why := refusal(facts)) is not None:
        raise Unreadable(why, node)
    output = tuple(Axis(f"o{n}", size) for n, size in enumerate(reader.sizes.shape(tensors[3])))
    at: dict[str, Index] = {}
    for word, axis in zip(outer, output):
        if word == "hd":
            at["h"], at["d"] = divide(axis_index(axis), v["d"])
        else:
            at[word] = axis_index(axis)
    keys, dim = Axis("j", k["s"]), Axis("d", q["d"])
    kv = {"b": at["b"], "h": divide(at["h"], parsed.heads // kv_heads)[0], "s": axis_index(keys)}
    time, region = reader.order[node], reader.regions.of(node)

    def forms(tensor: Node, position: Position, *, factors: bool = True) -> list[OperandForm]:
        return [f for f in operand(reader, tensor, position, time, region, factors=factors) if not f.factors]

    scale = scale_of(reader, parsed.scale, time, node)
    keep = mask.keep((at["b"], at["h"], at["s"], axis_index(keys)), facts)
    return Parts(
        reader=reader,
        result=result,
        output=output,
        rows_at=((at["b"], at["h"]), at["s"]),
        keys=keys,
        dim=dim,
        query=forms(parsed.query, _at(inner, {**at, "d": axis_index(dim)}, q["d"])),
        key=forms(parsed.key, _at(inner, {**kv, "d": axis_index(dim)}, k["d"])),
        value=forms(parsed.value, _at(inner, {**kv, "d": at["d"]}, v["d"]), factors=False),
        score=apply("where", keep, apply("mul", Dot(), scale), Const(float("-inf"))),
        side=mask.side,
        score_dtype=torch.float32,
        product_dtypes=(tensors[3].dtype, tensors[3].dtype),
        dropout=1.0 - parsed.keep,
        empty_row_is_nan=False,
    )


_BySize = dict[str, Index]


def _sizes_of_operands(
    reader: Reader, node: Node, parsed: _ParsedCall, tensors: list[torch.Tensor]
) -> tuple[_BySize, _BySize, _BySize, int]:
    """Sizes of query, key and value by their letters, and the number of KV heads. Raises `Unreadable`."""
    inner, _ = parsed.layouts
    q_shape, k_shape, v_shape = (reader.sizes.shape(t) for t in tensors[:3])
    q = _sizes(inner, q_shape, parsed.heads, node)
    kv_heads = parsed.kv_heads
    if kv_heads is None:  # by the head dim of the query
        merged = k_shape[inner.index("hd")] if "hd" in inner else None
        in_keys = k_shape[inner.index("h")] if merged is None else divide_exactly(merged, q["d"])
        kv_heads = in_keys if isinstance(in_keys, int) else 0
    kv_heads = kv_heads or parsed.heads
    k, v = (_sizes(inner, shape, kv_heads, node) for shape in (k_shape, v_shape))
    if (q["h"], q["d"], q["b"], k["s"], k["h"]) != (parsed.heads, k["d"], k["b"], v["s"], v["h"]) or k["b"] != v["b"]:
        raise Unreadable(UNKNOWN_SIZES, node)
    if k["h"] != kv_heads:
        raise Unreadable(f"{kv_heads} KV heads are given, and the keys have {k['h']}", node)
    if parsed.heads % kv_heads:
        raise Unreadable(NOT_GROUPED, node)
    return q, k, v, kv_heads


def _facts(
    reader: Reader, parsed: _ParsedCall, tensors: list[torch.Tensor], q: _BySize, k: _BySize, v: _BySize
) -> CallFacts:
    inner, outer = parsed.layouts
    return CallFacts(
        inference=parsed.name == _INFERENCE,
        dtypes=(tensors[0].dtype, tensors[1].dtype, tensors[2].dtype),
        is_contiguous=all(_is_contiguous(reader, t) for t in tensors[:3]),
        query=q,
        key=k,
        value=v,
        positions_first=any(layout[1] == "s" for layout in parsed.layouts),
        transposed=inner != outer,
        inner_precise=parsed.inner_precise,
        mode=parsed.mode,
        before=parsed.before,
        after=parsed.after,
    )


@dataclass
class _Mask:
    """The mask of a call as a condition; ``side`` is what it loads, ``trusted`` what it takes for granted."""

    reader: Reader
    node: Node
    parsed: _ParsedCall
    side: dict[Load, SideLoad] = field(default_factory=dict)
    trusted: list[str] = field(default_factory=list)

    def keep(self, position: Position, facts: CallFacts) -> Expr:
        """The condition under which a score is kept, at (batch, head, row, key)."""
        parsed, node = self.parsed, self.node
        _, _, row, key = position
        rows, keys = facts.query["s"], facts.key["s"]
        if parsed.mask is None:
            if parsed.mode or (parsed.before, parsed.after) != (_UNBOUNDED, _UNBOUNDED):
                raise Unreadable(
                    f"sparse_mode {parsed.mode} and bounds do nothing without atten_mask: the operator attends to "
                    "every key, or raises; pass torch.ones(2048, 2048, dtype=torch.bool).triu(1) with modes 2 to 4",
                    node,
                )
            return TRUE
        if parsed.name == _INFERENCE and not isinstance(rows, int):
            raise Unreadable(
                "whether there is one query row is not known, and for one row a mask means another thing", node
            )
        value = tensor_value(parsed.mask)
        if value is None or value.dtype not in facts.limits.mask_dtypes:
            accepted = ", ".join(dtype_name(d) for d in facts.limits.mask_dtypes)
            kind = "no tensor" if value is None else f"of {dtype_name(value.dtype)}"
            raise Unreadable(f"its mask is {kind}: the operator takes {accepted}, and no float mask", node)
        if parsed.mode in (0, 1) or facts.decodes:
            keep = apply("not", self._masked(parsed.mask, value, position, facts))
            bounded = parsed.mode == 0 and not facts.decodes
            return apply("and", keep, _between(key, row, parsed.before, parsed.after)) if bounded else keep
        if parsed.mode not in (2, 3, 4):
            raise Unreadable(f"sparse_mode {parsed.mode} is not read", node)
        self._check_triangle(parsed.mask, value, facts)
        own = row if parsed.mode == 2 else row + keys - rows
        bounds = (parsed.before, parsed.after) if parsed.mode == 4 else (_UNBOUNDED, 0)
        return _between(key, own, *bounds)

    def _masked(self, mask: Node, value: torch.Tensor, position: Position, facts: CallFacts) -> Expr:
        """Whether a score is masked out: an element of a full-size mask."""
        shape = self.reader.sizes.shape(value)
        letters = mask_letters(facts, shape)
        if letters is None:
            raise Unreadable(
                f"its mask of {_shape_text(shape)} is of no shape that is documented for "
                f"{'one query row' if facts.decodes else f'sparse_mode {facts.mode}'}: {mask_words(facts)}",
                self.node,
            )
        if facts.inference and not _is_contiguous(self.reader, value):
            raise Unreadable("its mask is not contiguous, which the inference operator requires", self.node)
        places: dict[str, Index] = {**dict(zip("bhik", position)), "1": 0}
        load = element_of(self.reader, self.node, mask, tuple(places[letter] for letter in letters), self.side)
        return load if value.dtype == torch.bool else apply("ne", load, Const(0))

    def _check_triangle(self, mask: Node, value: torch.Tensor, facts: CallFacts) -> None:
        """Raises `Unreadable` where the mask beside modes 2 to 4 is not, or may not be, the one that they ask for."""
        shape = self.reader.sizes.shape(value)
        if "".join("s" if n == SIDE else str(n) for n in shape) not in facts.limits.compressed:
            raise Unreadable(
                f"a mode with a compressed mask needs one of 2048 x 2048, got {_shape_text(shape)}", self.node
            )
        why, trusted = check_triangle(self.reader, mask, self.reader.order[self.node])
        if why is not None:
            raise Unreadable(why, self.node)
        if trusted:
            self.trusted.append(TRUSTED)


def _shape_text(shape: Position) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def _is_contiguous(reader: Reader, value: torch.Tensor) -> bool:
    order = memory_order(value, reader.sizes)
    if order is None:
        return False
    real = [d for d in order if reader.sizes.index(value.shape[d]) != 1]
    return real == sorted(real)


def _between(key: Index, own: Index, before: int, after: int) -> Expr:
    keep: Expr = TRUE
    if after < _UNBOUNDED:
        keep = apply("le", index_value(key), index_value(own + after))
    if before < _UNBOUNDED:
        keep = apply("and", keep, apply("ge", index_value(key), index_value(own - before)))
    return keep

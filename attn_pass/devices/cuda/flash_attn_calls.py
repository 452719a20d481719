"""Calls of the library flash-attn (Dao-AILab, 2.7 and newer): the nodes that its functions become in a graph.

Without a gradient that is one call of the operator ``flash_attn::_flash_attn_forward``. Its first result is the
attention; its operands are (B, L, H, D), with fewer heads of keys and values than of queries if they are grouped;
positions are counted from the last key (``key <= row + kv_len - q_len`` is causal), and fully masked rows are 0. With a
gradient it is an autograd function around the same operator, whose backward is the library's and needs what the
operator saves: those calls are left. Calls on sequences of several lengths stay as well, without the copies of their
operands that the kernel does not need.

Nothing of the package is imported: its operators are known by their names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from attn_pass.graph.values import fake_value, tensor_value
from attn_pass.model.attention import AsWritten
from attn_pass.model.expression import TRUE, Const, Dot, Expr, Load, apply, index_value
from attn_pass.model.index import Axis, Index, axis_index, divide, divide_exactly, is_at_most
from attn_pass.patterns.base import (
    NOT_GROUPED,
    UNKNOWN_SIZES,
    USED_LOGARITHM,
    Composite,
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

FORM = "flash_attn"
_FORWARD = "flash_attn::_flash_attn_forward"
_VARIABLE_LENGTHS = "flash_attn::_flash_attn_varlen_forward"
_PARAMETERS = (
    *("q", "k", "v", "dropout_p", "softmax_scale", "causal", "window_size_left", "window_size_right"),
    *("softcap", "alibi_slopes", "return_softmax"),
)
_TRAINING = "flash_attn's own backward needs what the call saves: in training the call stays"
_RESULTS = {  # the operator's other results, and why the call stays if they are used
    1: USED_LOGARITHM,
    2: "the attention weights of return_attn_probs are used as well",
    3: _TRAINING,  # the state of the random numbers, for the backward alone
}


def find(reader: Reader) -> Iterator[Site]:
    """Every call of the library's forward operators."""
    for node in list(reader.graph.nodes):
        name = operator_name(node)
        if name not in (_FORWARD, _VARIABLE_LENGTHS):
            continue
        region = reader.regions.of(node)
        try:
            if name == _VARIABLE_LENGTHS:
                yield Site(node, FORM, region, composite=_several_lengths(reader, node))
                continue
            if region.functorch:
                raise Unreadable(f"it runs under {region.describe()}", node)
            result, rest = first_result(node, _RESULTS)
            call_args = _arguments(node)
            with reader.site() as used:
                described = describe(_lift(reader, node, result, call_args), used)
            check_window(reader, described, result)
            written = AsWritten(fused=True, causal=bool(call_args["causal"]), library=FORM)
            yield Site(result, FORM, region, described, internal=(node, *rest), written=written, is_call=True)
        except Unreadable as error:
            yield refused(node, FORM, region, error, kind="attention")
        except Exception as error:
            yield failed(node, FORM, region, error)


def _several_lengths(reader: Reader, node: Node) -> Composite:
    """The call on sequences one behind the other, (total, H, D), without copies the kernel can do without."""
    region, args = reader.regions.of(node), list(node.args)
    places = range(min(3, len(args)))
    for place in places:
        args[place] = _uncopied(reader, args[place], node, is_query=place == 0)
    if region.functorch or all(args[place] is node.args[place] for place in places):
        return Composite(node, "sequences of several lengths, one after another, are not (B, H, L, D): the call stays")
    why = "the kernel reads its operands with their own strides, without the copies"
    return Composite(node, None, (tuple(args), dict(node.kwargs)), FORM, why)


def _uncopied(reader: Reader, argument: Any, user: Node, *, is_query: bool) -> Any:
    """What an operand is a copy of, where the kernel takes that: its rows dense, each at a multiple of 16 bytes.

    The result is laid out as the query is, so that one whose heads lie further apart than its positions stays a copy.
    """
    call = reader.call(argument) if isinstance(argument, Node) else None
    if call is None or call.op != "copy" or call.in_place:
        return argument
    source = argument.args[0] if argument.args else argument.kwargs.get("self", argument.kwargs.get("input"))
    before, after = tensor_value(source), tensor_value(argument)
    if not isinstance(source, Node) or before is None or after is None or before.dtype != after.dtype:
        return argument
    if reader.regions.of(source) != reader.regions.of(user):
        return argument
    if any(
        reader.effects.mutation_between(n, reader.order[argument] - 1, reader.order[user]) for n in (source, argument)
    ):
        return argument
    sizes = reader.sizes
    starts = [sizes.index(before.storage_offset()), *(sizes.index(s) for s in before.stride()[:-1])]
    vectors = all(divide(start, _VECTOR // before.element_size())[1] == 0 for start in starts)
    in_order = not is_query or is_at_most(sizes.index(before.stride(1)), sizes.index(before.stride(0)))
    return source if vectors and in_order and sizes.index(before.stride(-1)) == 1 else argument


_VECTOR = 16  # bytes


def _arguments(node: Node) -> dict[str, Any]:
    """The arguments by name; numbers that are known are numbers."""
    target = node.target
    overload = target if isinstance(target, OpOverload) else target.default  # type: ignore[union-attr]
    schema = overload._schema.arguments
    if {a.name for a in schema} != set(_PARAMETERS):
        raise Unreadable("the call is of another version of flash_attn's operator", node)
    call_args = {a.name: a.default_value for a in schema if a.has_default_value()}
    call_args |= dict(zip((a.name for a in schema), node.args))
    call_args |= node.kwargs
    for name, kind in (
        ("dropout_p", float),
        ("softcap", float),
        ("window_size_left", int),
        ("window_size_right", int),
        ("causal", bool),
        ("return_softmax", bool),
    ):
        call_args[name] = _number(call_args[name])
        if not isinstance(call_args[name], (int, kind)):
            raise Unreadable(f"{name} is not a constant", node)
    if call_args["return_softmax"]:
        raise Unreadable("the call asks for the attention weights", node)
    return call_args


def _number(value: Any) -> Any:
    """The number a node holds where the program holds for that one alone; anything else as it is."""
    fake = fake_value(value) if isinstance(value, Node) else value
    if isinstance(fake, (torch.SymInt, torch.SymFloat)):
        expression = fake.node.expr
        if not expression.is_number:
            return value
        return int(expression) if isinstance(fake, torch.SymInt) else float(expression)
    return fake if isinstance(fake, (bool, int, float)) else value


def _lift(reader: Reader, node: Node, result: Node, call_args: dict[str, Any]) -> Parts:
    operands = {name: call_args[name] for name in ("q", "k", "v")}
    q, k, v, out = (tensor_value(n) for n in (*operands.values(), result))
    if q is None or k is None or v is None or out is None or any(t.dim() != 4 for t in (q, k, v)):
        raise Unreadable("an operand is not a tensor of four dimensions", node)
    if out.requires_grad:
        raise Unreadable("the operator alone has no gradient, and one is needed", node)
    q_shape, k_shape, v_shape = (reader.sizes.shape(t) for t in (q, k, v))
    output = tuple(Axis(f"o{n}", size) for n, size in enumerate(reader.sizes.shape(out)))
    batch, row, head, _ = at = tuple(axis_index(a) for a in output)
    keys, dim = Axis("j", k_shape[1]), Axis("d", k_shape[3])
    checked = ((q_shape[0], k_shape[0]), (q_shape[0], v_shape[0]), (k_shape[1], v_shape[1]))
    if k_shape[2] != v_shape[2] or q_shape[3] != k_shape[3] or any(_differ(*pair) for pair in checked):
        raise Unreadable(UNKNOWN_SIZES, node)
    kv_head = head
    if k_shape[2] != q_shape[2]:
        groups = divide_exactly(q_shape[2], k_shape[2])
        if groups is None:
            raise Unreadable(NOT_GROUPED, node)
        kv_head = divide(head, groups)[0]
    time, region = reader.order[node], reader.regions.of(node)
    key = axis_index(keys)
    positions: dict[str, Position] = {
        "q": (batch, row, head, axis_index(dim)),
        "k": (batch, key, kv_head, axis_index(dim)),
        "v": (batch, key, kv_head, at[3]),
    }
    side: dict[Load, SideLoad] = {}
    score = _score(reader, node, call_args, (batch, head, row, key), (q_shape[1], k_shape[1]), side)

    def forms(name: str) -> list[OperandForm]:
        # A tensor multiplied into the half-precision query stays: the scores, in float32, are not what it was for.
        read = operand(reader, operands[name], positions[name], time, region, factors=name != "v")
        return [f for f in read if not f.factors]

    return Parts(
        reader=reader,
        result=result,
        output=output,
        rows_at=((batch, head), row),
        keys=keys,
        dim=dim,
        query=forms("q"),
        key=forms("k"),
        value=forms("v"),
        score=score,
        side=side,
        score_dtype=torch.float32,
        product_dtypes=(out.dtype, out.dtype),
        dropout=float(call_args["dropout_p"]),
        empty_row_is_nan=False,
    )


def _differ(one: Index, other: Index) -> bool:
    """Whether two sizes are known to differ. Where they are not, the kernel sees to it (CHECK_SHAPE in mha_fwd).

    What torch checks of its own calls is known as a guard; what a kernel checks is not, so that keys and values of a
    cache that grows have lengths of two names.
    """
    return isinstance(one, int) and isinstance(other, int) and one != other


def _score(
    reader: Reader,
    node: Node,
    call_args: dict[str, Any],
    position: Position,
    lengths: tuple[Index, Index],
    side: dict[Load, SideLoad],
) -> Expr:
    """Scale, soft cap, ALiBi, mask, in the order of the kernel (flash_fwd_kernel.h, mask.h in 2.8.3)."""
    batch, head, row, key = position
    score = apply("mul", Dot(), scale_of(reader, call_args["softmax_scale"], reader.order[node], node))
    cap = float(call_args["softcap"])
    if cap > 0:
        score = apply("mul", apply("tanh", apply("div", score, Const(cap))), Const(cap))
    own = row + lengths[1] - lengths[0]  # the key that stands where the row does
    slopes = call_args["alibi_slopes"]
    if slopes is not None:
        value = tensor_value(slopes)
        if value is None or value.dim() not in (1, 2):
            raise Unreadable("the slopes are not a tensor of one or two dimensions", node)
        slope = element_of(reader, node, slopes, (batch, head)[2 - value.dim() :], side)
        distance = apply("cast", apply("abs", index_value(own - key)), dtype=torch.float32)
        score = apply("sub", score, apply("mul", slope, distance))
    before, after = _window(node, call_args, lengths)
    condition: Expr = TRUE
    if after is not None:
        condition = apply("le", index_value(key), index_value(own + after))
    if before is not None:
        condition = apply("and", condition, apply("ge", index_value(key), index_value(own - before)))
    return apply("where", condition, score, Const(float("-inf")))


def _window(node: Node, call_args: dict[str, Any], lengths: tuple[Index, Index]) -> tuple[Index | None, Index | None]:
    """How many keys before and after its own position a row attends to; None for no limit.

    The steps of ``mha_fwd`` and ``set_params_fprop``, which matter where there are more rows than keys: a side without
    a limit then has one, of ``kv_len``, if the other side has one.
    """
    q_len, kv_len = lengths
    left, right = call_args["window_size_left"], call_args["window_size_right"]
    if isinstance(kv_len, int):
        left, right = (-1 if n >= kv_len else n for n in (left, right))
    if call_args["causal"]:
        right = 0
    if left < 0 and right <= 0:
        return None, (None if right < 0 else 0)
    if is_at_most(q_len, kv_len):
        return (None if left < 0 else left), (None if right < 0 else right)
    if not isinstance(q_len, int) or not isinstance(kv_len, int):
        raise Unreadable("a window may have more rows than keys", node)
    return (kv_len if left < 0 else left), (kv_len if right < 0 else right)

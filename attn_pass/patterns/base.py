"""`Site`: a place in a graph that is, or resembles, attention; and the checks that all finders share."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Node

from attn_pass.errors import first_line
from attn_pass.graph.effects import is_metadata_assertion
from attn_pass.graph.names import operation_name
from attn_pass.graph.regions import Region
from attn_pass.graph.stand_in import ShapeUse
from attn_pass.model.attention import AsWritten
from attn_pass.model.expression import Expr
from attn_pass.patterns.opaque import Opaque
from attn_pass.reading.describe import Described
from attn_pass.reading.operands import OperandForm
from attn_pass.reading.reader import Reader
from attn_pass.reading.unreadable import Unreadable

# Reasons that the finders of several calls give.
NOT_GROUPED = "the number of heads is not a multiple of the number of KV heads"
UNKNOWN_SIZES = "the sizes of query, key and value do not provably fit each other"
USED_LOGARITHM = "the logarithm of the sum of exponentials is used as well"


def scale_of(reader: Reader, scale: Any, at: int, node: Node) -> Expr:
    """The scale of a call, as it is read at a place of the graph. Raises `Unreadable` for one that is not known."""
    factor = reader.scalar(scale, at)
    if factor is None:
        raise Unreadable("the scale is neither a number nor a symbolic number", node)
    return factor


@dataclass(frozen=True)
class Composite:
    """A call that stays, with other arguments: why it is left, or None where these are exact."""

    node: Node
    refusal: str | None
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
    target: str = ""  # what it calls with these arguments
    why: str = ""


@dataclass(frozen=True)
class Logarithms:
    """Log-sum-exps of a site's scores, and what goes with the site where a kernel gives them: scores and weights."""

    nodes: tuple[Node, ...]
    internal: tuple[Node, ...]
    shape_uses: tuple[ShapeUse, ...]


@dataclass
class Site:
    """An attention (``described``) or a near miss (``refusal``) whose result is ``node``.

    ``internal`` are the nodes that compute it and nothing else: they go when it is replaced.
    """

    node: Node
    form: str
    region: Region
    described: Described | None = None
    refusal: str = ""
    refused_at: Node | None = None
    internal: tuple[Node, ...] = field(default_factory=tuple)
    written_to: Node | None = (
        None  # the tensor that the result is written to as well: ``out=``, or that of ``baddbmm_``
    )
    shape_uses: tuple[ShapeUse, ...] = ()  # what stays and takes a shape from them
    kind: Literal["attention", "near miss"] = "attention"
    composite: Composite | None = None
    unshared: Site | None = None  # of one refused because something else needs an inner node: the site without that
    needed_as_well: str = ""  # who needs weights or a log-sum-exp as well: these stay as written, beside the result
    softmax_of: tuple[Node, int] | None = None  # the scores, and the dimension of the keys
    logarithms: Logarithms | None = None  # all that is needed as well, where a kernel may give it with the result
    partners: tuple[Site, ...] = ()  # sites that share inner nodes, this one among them: all are rewritten, or none
    alone: str = ""  # why it is left if a partner is
    opaque: Opaque | None = None  # the call of one of torch's modules that hides it
    error: Exception | None = None  # a defect of attn_pass met while reading it
    written: AsWritten = field(default_factory=lambda: AsWritten(fused=False))  # what would run if nothing were done
    is_call: bool = False  # of an attention operator; else it is written out by hand


def refused(node: Node, form: str, region: Region, error: Unreadable, kind: str = "near miss") -> Site:
    """The site as a near miss, with the reason and where it was found."""
    return Site(
        node,
        form,
        region,
        refusal=error.reason,
        refused_at=error.node,
        kind="attention" if kind == "attention" else "near miss",
    )


def failed(node: Node, form: str, region: Region, error: Exception) -> Site:
    """The site left because reading it failed: a defect, reported as one, that affects no other site."""
    reason = f"internal error: {type(error).__name__}: {first_line(error)}"
    return Site(node, form, region, refusal=reason, error=error)


def operator_name(node: Node) -> str:
    """The qualified name of a registered operator; Dynamo's graphs hold it without its overload."""
    target = node.target
    if node.op != "call_function":
        return ""
    packet = target.overloadpacket if isinstance(target, OpOverload) else target
    return str(packet._qualified_op_name) if isinstance(packet, OpOverloadPacket) else ""


class UsedElsewhere(Unreadable):
    """The site was read, but something else needs what it would no longer compute."""


def first_result(node: Node, others: Mapping[int, str]) -> tuple[Node, list[Node]]:
    """The node that takes the first of an operator's results, and the nodes that take the others and are not used.

    Raises `UsedElsewhere` if one of the others is used; ``others`` says what that means, by its number.
    """
    getitems: dict[int, list[Node]] = {}
    for user in node.users:
        if user.op != "call_function" or user.target is not operator.getitem or user.args[0] is not node:
            raise UsedElsewhere(f"all that it returns is used by {user.name}", user)
        getitems.setdefault(user.args[1], []).append(user)  # type: ignore[arg-type]
    for index in sorted(getitems, reverse=True):
        users = [u for item in getitems[index] for u in item.users if not is_metadata_assertion(u)]
        if index != 0 and users:
            raise UsedElsewhere(others.get(index, f"its result number {index} is used"), node)
    if len(getitems.get(0, ())) != 1:
        raise UsedElsewhere("its result is not taken exactly once", node)
    return getitems[0][0], [item for index, items in getitems.items() if index != 0 for item in items]


def check_uses(reader: Reader, internal: Iterable[Node], result: Node, shape_uses: Iterable[ShapeUse] = ()) -> None:
    """Raises `UsedElsewhere` where an inner node is needed by anything but the site, and for more than its shape."""
    inside = set(internal) | {result}
    of_a_shape = {use.user for use in shape_uses}
    for node in sorted(inside, key=lambda n: reader.order.get(n, 0)):  # the first of several uses is reported
        for user in node.users if node is not result else ():
            if user in inside or user in of_a_shape or is_metadata_assertion(user):
                continue
            if user.op == "output":
                raise UsedElsewhere(_use_text(reader, node, "returned by the model"), user)
            raise UsedElsewhere(_use_text(reader, node, f"also used by {operation_name(user)}"), user)
        if node is not result and reader.effects.mutations(node) and not reader.effects.is_internal(node, inside):
            raise UsedElsewhere("an operation inside writes to memory that others can see", node)


def _use_text(reader: Reader, node: Node, how: str) -> str:
    """That an inner node is needed, and how."""
    if reader.softmaxes.get(node):
        return f"the attention weights are {how}"
    return f"the scores' log-sum-exp is {how}" if is_logarithm(reader, node) else f"the attention scores are {how}"


def is_logarithm(reader: Reader, node: Node) -> bool:
    """Whether a node is a call of `logsumexp`."""
    call = reader.call(node)
    return call is not None and call.op == "logsumexp"


def check_window(reader: Reader, described: Described, result: Node) -> None:
    """Raises `Unreadable` where a source is written between being read and the site's result."""
    for source, at in described.read_at.items():
        node = described.nodes[source]
        mutation = reader.effects.mutation_between(node, at - 1, reader.order[result])
        if mutation is not None:
            raise Unreadable(
                f"{node.name} is written in place by {mutation.node.name} before the result is computed", mutation.node
            )


def still_held(reader: Reader, forms: list[OperandForm], result: Node) -> list[OperandForm]:
    """The forms of an operand that are not written until the site is computed; the source of a copy may be written."""
    held = [f for f in forms if reader.effects.mutation_between(f.node, f.at - 1, reader.order[result]) is None]
    return held or forms[:1]
